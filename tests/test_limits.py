"""Limits: runs that diverge, that take too long, that do not fit, and what other machines can reach of a run."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import torch

import askew
from askew.cli.main import main
from askew.cli.options import parse_time
from askew.core import memory
from askew.core.records import Record
from askew.data import federation
from askew.data.federation import CACHED_PLANS, Federation, LocalSettings
from askew.engine import process_group
from askew.engine.answers import MODEL_NOT_FINITE, NOT_FINITE
from askew.errors import AskewError, ConfigError, EngineError
from askew.experiment import build as build_module
from askew.experiment import cores, launch, process_state
from askew.experiment.config import Config
from askew.experiment.divergence import divergence_sentence
from askew.experiment.launch import run_all, run_config
from askew.experiment.run_folder import check_same_config, run_folder, stored_model
from askew.experiment.store import to_json, write_json
from askew.report.terminal import long_time

BASE: dict[str, Any] = {"rounds": 12, "partition": {"clients": 6}, "model": {"name": "softmax"}}
TOO_FAST: dict[str, Any] = {"local": {"lr": 1e6, "steps": 2}, "algorithm": {"name": "fedavg", "server_scale": 30.0}}


def configured(**tables: Any) -> Config:
    return Config.build(BASE | tables)


def bits(run: askew.Run) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in run.model.items()}


# the rule of divergence -----------------------------------------------------------------------------------------------


def rounds_with(*losses: float | None, test: float = 1.0) -> list[Record]:
    """Records of rounds with these training losses; None: of no client a result was finite."""
    return [
        {
            "round": n,
            "participants": [0, 1],
            "train_loss": loss,
            "loss": test,
            "dropped": 2 * (loss is None),
            **({"incidents": {NOT_FINITE: [0], MODEL_NOT_FINITE: [1]}} if loss is None else {}),
        }
        for n, loss in enumerate(losses, 1)
    ]


LIMIT = 10 * math.log(4)  # of four classes: 13.9


@pytest.mark.parametrize(
    ("losses", "diverged"),
    [
        ((1.4, 14, 15, 16), True),
        ((1.4, 14, 15), False),  # two rounds are not enough
        ((1.4, 14, 13, 15, 16), False),  # one of three is below the limit
        ((300, 200, 100, 50, 20), False),  # it begins high and falls
        ((300, 200, 210, 220, 230), True),  # and falls no more
        ((1.4, None, None, None), True),
        ((1.4, None, None, 1.2), False),
        ((1.4, None, 99, None), True),
        ((LIMIT, LIMIT, LIMIT), False),
    ],
)
def test_three_bad_rounds_in_a_row_are_a_divergence(losses: tuple[float | None, ...], diverged: bool) -> None:
    assert bool(divergence_sentence(rounds_with(*losses), 4, 30, 0.1)) == diverged


def test_the_rule_at_its_edges() -> None:
    assert divergence_sentence(rounds_with(1.0, 1.0, 1.0, test=math.nan), 4, 30, 0.1)
    assert divergence_sentence(rounds_with(None), 4, 1, 0.1) and not divergence_sentence(rounds_with(None), 4, 2, 0.1)
    assert not divergence_sentence(rounds_with(2e-3, 1e-2, 1e-2, 1e-2), 0, 30, 0.1)  # a regression: ten times the first
    assert divergence_sentence(rounds_with(2e-3, 3e-2, 3e-2, 3e-2), 0, 30, 0.1)
    nobody = [record | {"train_loss": None, "participants": []} for record in rounds_with(1.0, 1.0, 1.0)]
    assert not divergence_sentence(nobody, 4, 30, 0.1)
    some = [record | {"incidents": {NOT_FINITE: [0]}, "dropped": 1} for record in rounds_with(1.0, 1.0, 1.0)]
    assert not divergence_sentence(some, 4, 30, 0.1)  # the others' answers are used
    sentence = divergence_sentence(rounds_with(1.4, 14, 15, 16), 4, 30, 0.5)
    assert sentence and sentence.startswith(
        "diverged: in rounds 2 to 4 the training loss reached 16 (the limit is 13.9)"
    )
    assert "try a lower local.lr (now 0.5)" in sentence


@pytest.mark.parametrize("accuracy", [0.25, None])  # None: a regression
def test_a_stored_test_loss_that_was_not_finite_counts_as_such(accuracy: float | None) -> None:
    """JSON has no NaN: what an interrupted run reads back is null, as in a round in which nothing was measured."""
    stored = json.loads(to_json([r | {"accuracy": accuracy} for r in rounds_with(1.0, 1.0, 1.0, test=math.nan)]))
    assert divergence_sentence(stored, 0 if accuracy is None else 4, 30, 0.1, every=1)
    unmeasured = [record | {"accuracy": None} for record in stored]
    assert not divergence_sentence(unmeasured, 4, 30, 0.1, every=2)
    assert not divergence_sentence(unmeasured, 4, 30, 0.1)  # of clients without test data


# a run that diverges --------------------------------------------------------------------------------------------------


def test_a_run_that_diverges_says_so_and_goes_on_or_stops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "a.toml", tmp_path / "runs"
    file.write_text(configured(**TOO_FAST).toml())
    assert main(["run", str(file), "--out", str(out), "--set", "evaluation.stop_diverged=true"]) == 0
    printed, said = capsys.readouterr()
    assert said.count("diverged: in rounds ") == 1 and "try a lower local.lr (now 1e+06)" in said
    assert "warning" in printed
    [folder] = out.iterdir()
    facts = json.loads((folder / "run.json").read_text())
    stopped = askew.load(folder)
    assert facts["state"] == "diverged" and facts["diverged"].startswith("diverged: ")
    assert 3 <= len(stopped.rounds) < 12 and stopped.over and not stopped.finished
    assert main(["show", str(folder)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "diverged: in rounds" in shown and "stop_diverged=false" in shown
    assert main(["run", str(file), "--out", str(out), "--set", "evaluation.stop_diverged=true"]) == 0
    assert "already finished" in capsys.readouterr().err  # nothing more is trained
    assert main(["run", str(file), "--out", str(out)]) == 0  # without the setting it goes on, in the same folder
    whole = askew.load(folder)
    assert whole.finished and whole.facts["state"] == "finished" and "diverged" in whole.facts
    assert [r["train_loss"] for r in whole.rounds] == [
        r["train_loss"] for r in run_config(configured(**TOO_FAST)).rounds
    ]


def test_a_run_stops_at_an_accuracy_and_goes_on_where_more_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "a.toml", tmp_path / "runs"
    file.write_text(configured().toml())
    whole = run_config(configured())
    accuracy = [r["accuracy"] for r in whole.rounds]
    target, more = accuracy[1], max(accuracy[2:])
    first, later = (next(n for n, a in enumerate(accuracy, 1) if a >= goal) for goal in (target, more))
    assert first < later

    def run(goal: float) -> askew.Run:
        assert main(["run", str(file), "--out", str(out), "--set", f"evaluation.stop_at={goal!r}"]) == 0
        [folder] = out.iterdir()
        return askew.load(folder)

    stopped = run(target)
    assert (len(stopped.rounds), stopped.facts["state"], stopped.over, stopped.finished) == (first, "reached", True, 0)
    capsys.readouterr()
    assert len(run(target).rounds) == first and "already finished" in capsys.readouterr().err
    assert main(["show", str(stopped.folder)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "stopped as its accuracy was high enough" in shown and "--set evaluation.stop_at=0" in shown
    facts = json.loads((Path(str(stopped.folder)) / "run.json").read_text())
    write_json(Path(str(stopped.folder)) / "run.json", facts | {"state": "interrupted"})  # just after that round
    assert (again := run(target)).facts["state"] == "reached" and len(again.rounds) == first
    assert len(run(more).rounds) == later
    assert [r["accuracy"] for r in run(0.0).rounds] == accuracy
    assert run(0.0).facts["state"] == "finished"
    [folder] = out.iterdir()
    assert {n: t.numpy().tobytes() for n, t in stored_model(folder).items()} == bits(whole)


def test_the_other_runs_of_a_sweep_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = configured(**TOO_FAST, evaluation={"stop_diverged": True})
    (tmp_path / "a.toml").write_text(config.toml() + '[sweep]\n"algorithm.server_scale" = [30.0, 1e-6]\n')
    assert main(["sweep", str(tmp_path / "a.toml"), "--out", str(tmp_path / "runs"), "--json"]) == 0
    printed, said = capsys.readouterr()
    first, second = json.loads(printed)
    assert not first["finished"] and first["diverged"].startswith("diverged: ") and second["rounds"] > first["rounds"]
    assert "as it diverged" in said


def test_a_run_that_was_stored_before_a_setting_existed_is_the_same_run(tmp_path: Path) -> None:
    config = configured()
    folder = run_folder(config, tmp_path)
    assert folder is not None
    folder.mkdir()
    old = config.toml().replace("stop_diverged = false\n", "").replace("deterministic = false\n", "")
    assert old.count("\n") == config.toml().count("\n") - 2
    (folder / "run.toml").write_text(old)
    check_same_config(folder, config)
    (folder / "run.toml").write_text(old.replace("batch = 32", "batch = 33"))
    with pytest.raises(AskewError, match="another configuration"):
        check_same_config(folder, config)


# a time to stop -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"), [("30s", 30), ("10m", 600), ("2h", 7200), ("1.5d", 129_600), (None, None)]
)
def test_a_time_is_a_number_with_a_unit(text: str | None, seconds: float | None) -> None:
    assert parse_time(text) == seconds


@pytest.mark.parametrize("text", ["", "2", "h", "-1h", "2 hours", "1e3s", "nan", "9" * 40 + "s", "2h30m"])
def test_other_times_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", f"--stop-after={text}", "--quiet"]) == 2
    assert "--stop-after takes a time such as 30s, 10m, 2h" in " ".join(capsys.readouterr().err.split())


def test_a_run_stops_when_its_time_is_over_and_goes_on_to_the_same_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.toml").write_text(configured().toml())
    words = ["run", str(tmp_path / "a.toml"), "--out", str(tmp_path / "runs"), "--quiet"]
    assert main([*words, "--stop-after", "0s"]) == 130
    [folder] = (tmp_path / "runs").iterdir()
    assert len(askew.load(folder).rounds) == 1 and askew.load(folder).facts["state"] == "interrupted"
    assert main(words) == 0
    alone, again = run_config(configured()), askew.load(folder)
    assert [r["loss"] for r in again.rounds] == [r["loss"] for r in alone.rounds]


def test_a_sweep_stops_in_its_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.toml").write_text(configured().toml())
    words = ["sweep", str(tmp_path / "a.toml"), "--over", "seed=0,1", "--out", str(tmp_path / "runs")]
    assert main([*words, "--stop-after", "0s"]) == 130
    assert "stopped in run 1 of 2, all of it stored" in capsys.readouterr().err
    assert [len(askew.load(folder).rounds) for folder in (tmp_path / "runs").iterdir()] == [1]


def test_the_time_is_that_of_the_command_alone() -> None:
    with process_state.stop_after(0.0), process_state.stop_requests() as stopping:
        assert stopping()
    with process_state.stop_after(None), process_state.stop_requests() as stopping:
        assert not stopping()


def test_a_run_leaves_onednn_as_it_was() -> None:
    """Torch switches it off where a product in bfloat16 fails, and the next run would give other bits."""
    assert torch._C._get_mkldnn_enabled()
    run_config(configured(rounds=1), watch=lambda run, record: torch._C._set_mkldnn_enabled(False))
    assert torch._C._get_mkldnn_enabled()


# determinism ----------------------------------------------------------------------------------------------------------


def test_a_deterministic_run_uses_no_stopwatch_and_leaves_torch_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(process_state.WORKSPACE, raising=False)
    during: list[object] = []

    def look(run: askew.Run, record: Record | None) -> None:
        during.append((torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic))

    monkeypatch.setattr(build_module, "try_engines", lambda *args: pytest.fail("a trial"))
    wide = {"participation": {"fraction": 1.0}, "partition": {"clients": 20}, "rounds": 2, "model": {"name": "mlp"}}
    first, second = (run_config(configured(**wide, engine={"deterministic": True}), watch=look) for _ in range(2))
    assert during == [(True, True)] * 6 and bits(first) == bits(second)
    assert not torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.deterministic
    assert os.environ[process_state.WORKSPACE] == ":4096:8"
    plain = run_config(configured(**wide, engine={"name": first.facts["engine"]}))
    assert bits(plain) == bits(first)  # on a CPU nothing else changes


@pytest.mark.parametrize("method", ["fedavg", "lossbias"])
@pytest.mark.parametrize("engine", ["slots", "stacked"])
def test_a_deterministic_run_that_is_resumed_has_the_same_bits(engine: str, method: str, tmp_path: Path) -> None:
    """Batches of other lengths than those of the rounds before: what they are padded to changes the last bits."""

    class Stop(Exception):
        pass

    def stop(run: askew.Run, record: Any) -> None:
        if record and record["round"] == 1:
            raise Stop

    sizes = {"name": "lognormal", "clients": 15, "sigma": 1.0}
    settings: dict[str, Any] = {"data": "digits", "model": "mlp", "partition": sizes, "cohort": 3, "rounds": 6}
    settings |= {"local": {"batch": 0, "epochs": 2, "lr": 0.1}}
    settings["engine"] = {"name": engine, "device": "cpu", "deterministic": True}
    if method == "lossbias":  # looks at more samples than it trains on
        settings["partition"] = sizes | {"validation": 0.8}
    whole = askew.run(method, **settings)
    with pytest.raises(Stop):
        askew.run(method, out=tmp_path, save_every=0, watch=stop, **settings)
    resumed = askew.run(method, out=tmp_path, **settings)
    assert all(torch.equal(whole.model[name], resumed.model[name]) for name in whole.model)


def test_what_cannot_be_deterministic_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineError, match="chooses kernels by timing"):
        configured(engine={"deterministic": True, "compile": True})
    monkeypatch.setenv(process_state.WORKSPACE, ":8:8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(EngineError, match=r"needs the environment variable CUBLAS_WORKSPACE_CONFIG=:4096:8 .* is :8:8"):
        process_state.prepare_deterministic()
    settings = configured(engine={"deterministic": True}).engine
    with pytest.raises(EngineError, match="no deterministic max_pool_cuda on this device"):  # noqa: SIM117
        with process_state.deterministic_algorithms(settings):
            raise RuntimeError("max_pool_cuda does not have a deterministic implementation, but you set …")
    assert not torch.are_deterministic_algorithms_enabled()


def test_on_cuda_the_engine_whose_rows_depend_on_free_memory_is_replaced() -> None:
    class OnCuda:
        device = torch.device("cuda")

    space: Any = OnCuda()
    chosen = build_module.deterministic_choice(build_module.EngineChoice("stacked", "small", ("slots",)), space)
    assert chosen.name == "slots" and not chosen.others
    with pytest.raises(EngineError, match=r'use engine.name = "slots" or "sequential"'):
        build_module.deterministic_choice(build_module.EngineChoice("stacked", build_module.AS_CONFIGURED), space)
    kept = build_module.EngineChoice("vmapped", "wide", ("sequential",))
    space.device = torch.device("cpu")
    assert build_module.deterministic_choice(kept, space) == kept._replace(others=())


# worker processes -----------------------------------------------------------------------------------------------------


def own_sockets() -> set[str]:
    """The numbers of the sockets of this process and of those that it started."""
    found = list[str]()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = (process / "stat").read_text().rsplit(")", 1)[1].split()[1]
            for file in (process / "fd").iterdir() if str(os.getpid()) in (process.name, parent) else ():
                with suppress(OSError):  # it is closed by now
                    found.append(str(file.readlink()))
    return {link.removeprefix("socket:[").removesuffix("]") for link in found if link.startswith("socket:[")}


def reachable() -> set[str]:
    """The addresses, other than loopback ones, at which these processes listen for TCP connections."""
    own, found = own_sockets(), set()
    for table, loopback in (("tcp", ("0100007F",)), ("tcp6", ("0" * 24 + "01000000", "0" * 16 + "FFFF00000100007F"))):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and rest[5] in own and local.split(":")[0] not in loopback:
                found.add(f"{table} {local}")
    return found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs Linux's list of sockets")
def test_nothing_of_a_run_with_workers_can_be_reached_from_other_machines() -> None:
    with socket.create_server(("0.0.0.0", 0)):
        assert len(reachable()) == 1  # so the test can fail
    during = list[set[str]]()
    config = configured(rounds=3, engine={"workers": 2, "name": "sequential"})
    run = run_config(config, watch=lambda run, record: during.append(reachable()))
    assert run.facts["workers"] == 2 and during == [set()] * 4


def refusals(keys: list[bytes], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What ranks say of their peers, each with a secret of its own; they are threads here, and lines are queues."""
    lines = {(a, b): Queue[torch.Tensor]() for a in range(len(keys)) for b in range(len(keys))}
    here = threading.local()
    monkeypatch.setattr(process_group.dist, "send", lambda t, other: lines[here.rank, other].put(t))
    monkeypatch.setattr(process_group.dist, "recv", lambda t, other: t.copy_(lines[other, here.rank].get(timeout=10)))
    said = [""] * len(keys)

    def check(rank: int) -> None:
        here.rank = rank
        try:
            process_group.check_peers(rank, len(keys), keys[rank])
        except EngineError as e:
            said[rank] = str(e)

    threads = [threading.Thread(target=check, args=(rank,)) for rank in range(len(keys))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return said


def test_worker_processes_refuse_who_does_not_know_their_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusals([b"a", b"a", b"a"], monkeypatch) == ["", "", ""]
    impostor = refusals([b"a", b"b"], monkeypatch)
    assert "in the place of worker process 1" in impostor[0] and "in the place of worker process 0" in impostor[1]
    proofs = {tuple(process_group.peer_proof(b"a", *pair).tolist()) for pair in ((0, 1), (1, 0), (0, 2))}
    assert len(proofs) == 3  # none can be sent back, or sent on to somebody else


def test_more_processes_than_cores_are_refused_unless_that_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "own_cores", lambda: 2)
    monkeypatch.delenv(cores.MANY, raising=False)
    monkeypatch.setattr(launch, "WorkerGroup", lambda *args: pytest.fail("processes are started"))
    with pytest.raises(ConfigError, match=r"workers\) = 128 is more than the 2 cores here, .*MANY_PROCESSES=1"):
        next(run_all([configured(engine={"workers": 128})]))
    cores.check_cores(2, "engine.workers")
    monkeypatch.setenv(cores.MANY, "1")
    cores.check_cores(128, "engine.workers")


# memory and time ------------------------------------------------------------------------------------------------------


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two gigabytes, so that nothing is really allocated if a refusal is missing."""
    monkeypatch.setattr(memory, "free_memory", lambda: 2e9)


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize(
    ("tables", "sentence"),
    [
        ({"partition": {"name": "iid", "clients": 10**8}}, r"partition.clients = 100,000,000 would take about 4.8 GB"),
        ({"local": {"steps": 10**7}}, r"batches of a round with \d participants? would take .* lower local.steps"),
        ({"local": {"epochs": 10**5}, "partition": {"name": "iid", "clients": 2}}, r"lower local.steps, local.epochs"),
        (
            {"model": {"name": "mlp", "hidden": [10**5, 10**4]}},
            r"a network with 1,\d+,\d+,\d+ parameters, .*smaller network",
        ),
    ],
)
def test_what_cannot_fit_is_refused_before_it_is_allocated(tables: dict[str, Any], sentence: str) -> None:
    began = time.monotonic()
    with pytest.raises(EngineError, match=sentence):
        run_config(configured(**tables))
    assert time.monotonic() - began < 5


def test_free_memory_is_the_least_of_machine_and_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < memory.free_memory() < math.inf
    for name, value in (("max", "3000"), ("current", "1000"), ("none", "max")):
        (tmp_path / name).write_text(f"{value}\n")
    monkeypatch.setattr(memory, "CGROUPS", ((str(tmp_path / "max"), str(tmp_path / "current")),))
    assert memory.free_memory() == 2000
    monkeypatch.setattr(memory, "CGROUPS", ((str(tmp_path / "none"), str(tmp_path / "current")),))
    assert memory.free_memory() > 2000


def test_of_large_plans_only_the_latest_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(federation, "CACHED_USES", 1000)
    fed = Federation(configured().data, configured().partition, 0)
    small, large = LocalSettings(steps=1), LocalSettings(steps=100)
    for t in range(1, 12):
        fed.plan([0], t, small)
    assert len(fed.plans) == CACHED_PLANS
    for t in range(1, 3):
        fed.plan([0], t, large)
        assert len(fed.plans) == 1


def test_a_very_long_run_says_how_long_it_will_take(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.toml").write_text(replace(configured(), rounds=10**12).toml())
    words = ["run", str(tmp_path / "a.toml"), "--out", str(tmp_path / "runs"), "--stop-after", "0.4s"]
    assert main(words) == 130
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("rounds will take about") == 1 and "years at" in said and "lower rounds" in said


def test_long_times_in_words() -> None:
    assert [long_time(s) for s in (5, 90, 7200, 86_400, 4e9)] == [
        "less than a minute",
        "about 2 minutes",
        "about 2 hours",
        "about 1 day",
        "about 127 years",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("closed", "words"), [(">&-", "list partitions"), ("<&- >&- 2>&-", "run --quiet --set rounds=1")]
)
def test_closed_standard_streams_are_no_error(closed: str, words: str, tmp_path: Path) -> None:
    line = f"exec {sys.executable} -m askew {words} {closed}"
    done = subprocess.run(["sh", "-c", line], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and "Traceback" not in done.stderr
    for folder in tmp_path.glob("runs/*"):
        assert askew.load(folder).finished
