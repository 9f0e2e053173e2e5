"""Trackers record every round once, whatever happens to the run, and the run does not notice them."""

from __future__ import annotations

import importlib.util
import os
import signal
import struct
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import askew
from askew.cli.main import main
from askew.errors import ConfigError, Remark
from askew.experiment.store import Run, load
from askew.experiment.trackers import KINDS, tracking

SMALL: dict[str, Any] = {
    "data": {"name": "synthetic", "dim": 6, "samples": 20},
    "model": {"name": "mlp", "hidden": [4]},
    "clients": 6,
    "cohort": 3,
    "progress": False,
}
LIBRARIES = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"needs {name}: pip install {name}"),
    )
    for name in KINDS
]
WITH_TENSORBOARD = LIBRARIES[0].marks[0]


class Notebook:
    """A tracker that keeps all it is told."""

    made: list[Notebook] = []
    has: int | None = None  # the last round that it claims to have

    def __init__(self) -> None:
        self.config: dict[str, Any] = {}
        self.rounds: list[tuple[int, dict[str, float]]] = []
        self.ended: list[Run] = []
        self.made.append(self)

    def start(self, config: dict[str, Any], folder: Path | None) -> int | None:
        self.config, self.folder = config, folder
        return self.has

    def record(self, round: int, metrics: dict[str, float]) -> None:
        self.rounds.append((round, metrics))

    def end(self, result: Run) -> None:
        self.ended.append(result)


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("WANDB_MODE", "WANDB_DIR", "WANDB_PROJECT", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    Notebook.made = []


def numbers(record: dict[str, Any]) -> dict[str, float]:
    """The numbers of a record of which each has a name of its own."""
    return {k: v for k, v in record.items() if isinstance(v, (int, float)) and k != "round"}


# the seam -------------------------------------------------------------------------------------------------------------


def test_an_own_tracker_gets_what_the_records_hold() -> None:
    book = Notebook()
    run = askew.run(
        "scaffold", rounds=3, lr=0.05, evaluation={"every": 2, "drift": True}, track=book, out="runs", **SMALL
    )
    assert book.rounds[1][1].items() >= numbers(run.rounds[1]).items() and "accuracy" in book.rounds[1][1]
    assert [number for number, _ in book.rounds] == [1, 2, 3] and "accuracy" not in book.rounds[0][1]
    assert book.rounds[2][1]["drift_layers.fc1"] == run.rounds[2]["drift_layers"]["fc1"]
    assert (
        book.config["local.lr"] == 0.05 and book.config["algorithm.name"] == "scaffold" and book.config["rounds"] == 3
    )
    assert book.folder == run.folder and book.ended == [run] and book.ended[0].facts["state"] == "finished"


def test_tracking_changes_no_bit() -> None:
    plain = askew.run("feddyn", rounds=3, **SMALL)
    tracked = askew.run("feddyn", rounds=3, track=[Notebook(), Notebook], **SMALL)
    without_time = lambda run: [{k: v for k, v in record.items() if k != "seconds"} for record in run.rounds]
    assert without_time(plain) == without_time(tracked)
    assert all(torch.equal(tensor, tracked.model[name]) for name, tensor in plain.model.items())


@pytest.mark.parametrize("has, told", [(None, [1, 2, 3, 4]), (1, [2, 3, 4]), (3, [4])])
def test_a_resumed_run_goes_on_where_its_tracker_is(has: int | None, told: list[int]) -> None:
    def stop(run: Run, record: dict[str, Any] | None) -> None:
        if len(run.rounds) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        askew.run("fedavg", rounds=4, watch=stop, track=Notebook, save_every=0.0, out="runs", **SMALL)
    (before,) = Notebook.made
    # the round whose end was interrupted is stored, so it is recorded at the end
    assert [number for number, _ in before.rounds] == [1, 2] and not before.ended[0].finished
    book = Notebook()
    book.has = has
    run = askew.run("fedavg", rounds=4, track=book, out="runs", **SMALL)
    assert [number for number, _ in book.rounds] == told and run.finished


def test_a_finished_run_is_recorded_when_it_is_read_back() -> None:
    run = askew.run("fedavg", rounds=2, out="runs", **SMALL)
    book = Notebook()
    askew.run("fedavg", rounds=2, out="runs", track=book, **SMALL)
    assert [metrics["loss"] for _, metrics in book.rounds] == [record["loss"] for record in run.rounds]


def test_a_run_that_lost_its_process_is_recorded_once() -> None:
    done = askew.run("fedavg", rounds=4, **SMALL)
    book = Notebook()
    trackers = tracking(book, [done.name])
    rounds = [done.rounds[:n] for n in (0, 1, 2, 3)]
    for part in [*rounds, done.rounds[:1], *rounds[2:], done.rounds]:  # from the checkpoint after round 1 again
        trackers(Run(done.config, rounds=part, facts=done.facts), None)
    trackers.end(done)
    assert [number for number, _ in book.rounds] == [1, 2, 3, 4] and book.ended == [done]


def test_every_run_of_a_sweep_has_a_tracker() -> None:
    runs = askew.sweep(over={"method": ["fedavg", "fedprox"]}, seeds=2, rounds=2, track=Notebook, out="runs", **SMALL)
    assert [book.ended[0].name for book in Notebook.made] == [run.name for run in runs]
    assert all([number for number, _ in book.rounds] == [1, 2] for book in Notebook.made)
    with pytest.raises(
        ConfigError, match="each needs a tracker of its own; give what makes one, such as track=Notebook"
    ):
        askew.sweep("fedavg", seeds=2, track=Notebook(), **SMALL)


@pytest.mark.parametrize("at", ["__init__", "start", "record", "end"])
def test_a_tracker_that_fails_is_named_once_and_the_run_goes_on(at: str) -> None:
    def fail(*_: object) -> None:
        print("to standard output")
        raise OSError(28, "No space left on device")

    failing, book = type("Failing", (Notebook,), {at: fail}), Notebook()
    with pytest.warns(
        Remark, match=r"Failing records fedavg-\S+ no further, the run itself goes on .*No space"
    ) as said:
        run = askew.run("fedavg", rounds=3, track=[failing, book], **SMALL)
    assert len(said) == 1 and run.finished and [number for number, _ in book.rounds] == [1, 2, 3]


@pytest.mark.parametrize(
    "track, sentence",
    [
        ("tensorbord", "no tracker 'tensorbord'; did you mean 'tensorboard'"),
        (7, "an object with the methods start, record, end, or what makes one, got int; write for example"),
    ],
)
def test_what_is_no_tracker_is_refused(track: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        askew.run("fedavg", track=track, **SMALL)


def test_a_library_that_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert main(["run", "--rounds", "1", "--track", "wandb"]) == 2
    assert capsys.readouterr().err.rstrip().endswith("pip install wandb.")
    Path("trackio").mkdir()  # a folder of this name is no library
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    monkeypatch.setattr(sys, "path", [str(Path.cwd())])
    with pytest.raises(ConfigError, match="pip install trackio"):
        askew.run("fedavg", track="trackio", **SMALL)
    sys.modules.pop("trackio", None)
    assert not Path("runs").exists()


def test_weights_and_biases_is_offline_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    class Session:
        id, step, dir, logged = "abc", 0, "wandb/files", list[int]()

        def __init__(self, mode: str) -> None:
            self.settings = types.SimpleNamespace(mode=mode)

        def log(self, metrics: dict[str, float], step: int) -> None:
            self.logged.append(step)

        def finish(self, exit_code: int) -> None:
            assert exit_code == 0

    def init(**options: Any) -> Session:
        asked.append(options)
        return Session(options["mode"])

    fake = types.ModuleType("wandb")
    fake.__file__, fake.init, fake.Settings = "wandb.py", init, dict  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    askew.sweep("fedavg", seeds=2, rounds=2, track="wandb:mine", **SMALL)
    assert os.environ["WANDB_ERROR_REPORTING"] == "false" and Session.logged == [1, 2, 1, 2]
    assert [(each["mode"], each["project"]) for each in asked] == [("offline", "mine")] * 2
    assert asked[0]["group"] == asked[1]["group"] and asked[0]["config"]["seed"] != asked[1]["config"]["seed"]
    os.environ["WANDB_MODE"] = "online"
    askew.run("fedavg", rounds=1, track="wandb", **SMALL)
    assert asked[2]["mode"] == "online" and asked[2]["group"] is None


# the libraries --------------------------------------------------------------------------------------------------------


def tensorboard_rounds(run: Run, key: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run.folder / "tensorboard"))  # type: ignore[operator]
    events.Reload()
    assert str(run.folder.resolve()) in str(events.summary_metadata["_hparams_/session_start_info"])  # type: ignore[union-attr]
    return [(event.step, event.value) for event in events.Scalars(key)]


def mlflow_rounds(run: Run, key: str) -> list[tuple[int, float]]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{Path('runs/mlflow.db').resolve()}")
    experiment = client.get_experiment_by_name("askew")
    (found,) = client.search_runs([experiment.experiment_id], f"tags.folder = '{run.folder.resolve()}'")  # type: ignore[union-attr]
    assert found.info.status == "FINISHED" and found.data.tags["hash"] == run.name[-8:]
    assert found.data.params["local.lr"] == str(run.config["local"]["lr"])
    return sorted((metric.step, metric.value) for metric in client.get_metric_history(found.info.run_id, key))


def wandb_rounds(run: Run, key: str) -> list[tuple[int, float]]:
    """From the file that `wandb sync` would send: blocks of 32 KiB with records, in the format of LevelDB's log."""
    from wandb.proto.wandb_internal_pb2 import Record

    found: list[tuple[int, float]] = []
    (file,) = [
        path for path in Path("runs/wandb").glob("offline-run-*/*.wandb") if run.name.encode() in path.read_bytes()
    ]
    content, at, part = file.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", content[at : at + 7])
        part += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or its last part
            record, part = Record.FromString(part), b""
            items = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
            found += [(record.history.step.num, float(items[key]))] if key in items else []
    return found


def trackio_rounds(run: Run, key: str) -> list[tuple[int, float]]:
    from trackio.sqlite_storage import SQLiteStorage

    identifiers = [each["id"] for each in SQLiteStorage.get_run_records("askew") if each["name"] == run.name]
    logs = SQLiteStorage.get_logs("askew", run_id=identifiers[-1])
    return [(log["step"], log[key]) for log in logs]


READERS: dict[str, Callable[[Run, str], list[tuple[int, float]]]] = {
    "tensorboard": tensorboard_rounds,
    "mlflow": mlflow_rounds,
    "wandb": wandb_rounds,
    "trackio": trackio_rounds,
}


@pytest.fixture
def own_trackio_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """trackio reads its folder's name once, when it is imported: one test at a time can have its own."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    yield


def in_a_process_that_dies(action: Callable[[], object]) -> None:
    """Do something in a process that is killed meanwhile."""
    if (child := os.fork()) == 0:
        try:
            action()
        finally:
            os._exit(1)  # it should have been killed
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


def kill_after(rounds: int) -> Callable[[Run, object], None]:
    """A function for `watch` that kills the process once a run has so many rounds, before trackers know of the last."""

    def watch(run: Run, record: object) -> None:
        if len(run.rounds) == rounds:
            os.kill(os.getpid(), signal.SIGKILL)

    return watch


@pytest.mark.filterwarnings("ignore")  # of the libraries
@pytest.mark.usefixtures("own_trackio_folder")
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_killed_run_has_every_round_once(library: str) -> None:
    tracked = {"rounds": 6, "track": library, "out": "runs", **SMALL}
    # after the first kill nothing is stored but the records, and rounds are trained again; after the second a
    # checkpoint has one round more than the tracker
    in_a_process_that_dies(lambda: askew.run("fedavg", watch=kill_after(3), save_every=1e9, **tracked))
    in_a_process_that_dies(lambda: askew.run("fedavg", watch=kill_after(5), save_every=0.0, **tracked))
    run = askew.run("fedavg", **tracked)
    plain = askew.run("fedavg", rounds=6, **SMALL)
    assert all(torch.equal(tensor, run.model[name]) for name, tensor in plain.model.items())  # to the last bit
    for key in ("accuracy", "loss", "bytes_up"):
        expected = [(record["round"], pytest.approx(record[key], rel=1e-6)) for record in run.rounds]
        assert READERS[library](run, key) == expected
    askew.run("fedavg", **tracked)  # read back: nothing is recorded again
    assert len(READERS[library](run, "loss")) == 6
    assert load(run.folder or "").finished


@WITH_TENSORBOARD
def test_the_command_line_records_a_sweep_in_two_places() -> None:
    small = [word for key in ("rounds=2", "data.name=synthetic", "partition.clients=6") for word in ("--set", key)]
    main(["sweep", "--over", "seed=0,1", *small, "--track", "tensorboard", "--track", "tensorboard:logs", "--json"])
    for folder in Path("runs").iterdir():
        run = load(folder)
        expected = [(record["round"], pytest.approx(record["loss"], rel=1e-6)) for record in run.rounds]
        assert tensorboard_rounds(run, "loss") == expected
        (events,) = (Path("logs") / run.name).iterdir()
        assert b"run.hash" in events.read_bytes()
    assert len(list(Path("runs").iterdir())) == 2


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("own_trackio_folder")
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_run_that_starts_over_is_recorded_anew(library: str) -> None:
    runs = askew.sweep("fedavg", seeds=2, rounds=2, track=library, out="runs", **SMALL)
    run = askew.run("fedavg", rounds=2, track=library, out="runs", fresh=True, **SMALL)
    if library in ("tensorboard", "trackio"):
        assert [number for number, _ in READERS[library](run, "loss")] == [1, 2]
    assert READERS[library](runs[1], "loss") == [
        (record["round"], pytest.approx(record["loss"], rel=1e-6)) for record in runs[1].rounds
    ]
