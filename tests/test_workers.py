"""Worker processes that share a run: whatever their number, it is the same run; and none of them ends unnoticed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import askew
from askew.algorithms import FedAvg, algorithms
from askew.cli.main import main
from askew.core.records import Record
from askew.engine.process_group import ProcessGroup
from askew.errors import ConfigError, EngineError
from askew.experiment import checkpoint, launch, worker_process
from askew.experiment.api import OwnData
from askew.experiment.config import CHOICES, Config
from askew.experiment.folder_lock import lock_folder
from askew.experiment.launch import configs_message, run_all, run_config, run_shared
from askew.experiment.workers import WorkerGroup

PLUGIN = """
import torch
from torch import nn
import askew
from askew.algorithms import Scaffold

@askew.register("fragile")
class Fragile(Scaffold):
    \"\"\"SCAFFOLD some of whose clients have a state that is not a number.\"\"\"

    def finish(self, theta, client):
        up, state = super().finish(theta, client)
        return up, {"c": torch.where(torch.as_tensor(client.coin) < 0.3, torch.nan, state["c"])}

@askew.register("dropout")
class Dropout(askew.Network):
    \"\"\"A network that draws while it trains.\"\"\"

    def module(self, shape, classes):
        return nn.Sequential(nn.Linear(*shape, 12), nn.BatchNorm1d(12), nn.Dropout(0.2), nn.Linear(12, classes))

@askew.register("broken")
class Broken(Scaffold):
    \"\"\"Fails in the first round.\"\"\"

    def direction(self, theta, grad, client):
        return client.nothing
"""
BASE: dict[str, Any] = {
    "rounds": 4,
    "data": {"name": "synthetic", "test_clients": 5},
    "partition": {"clients": 7},
    "participation": {"cohort": 4},
    "model": {"name": "mlp", "hidden": [6], "norm": "batch"},
    "local": {"epochs": 1, "batch": 32, "lr": 0.1},
}
BUSY_SECONDS = 120.0  # for what takes a second on an idle machine
TAKE_OVER: dict[str, Any] = {"free_cores": lambda: 2, "LEAST_ROUND_SECONDS": 0.0, "LEAST_SAVED_SECONDS": 0.0}


def configured(workers: int, **tables: Any) -> Config:
    return Config.build(BASE | tables | {"engine": {"name": "sequential", "workers": workers}})


def records(run: askew.Run) -> list[Record]:
    return [{k: v for k, v in r.items() if k != "seconds"} for r in run.rounds]


def workers_alive() -> list[int]:
    """The ids of the worker processes that this one started and that run, in the order of their ranks."""
    found = list[tuple[int, int]]()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            fields = (process / "stat").read_text().rsplit(")", 1)[1].split()
            is_worker = b"run_worker" in (process / "cmdline").read_bytes()
        except OSError:
            continue
        if int(fields[1]) == os.getpid() and is_worker:  # the parent; field 19 is when it was started
            found.append((int(fields[19]), int(process.name)))
    return [process for _, process in sorted(found)]


def wait_for_a_round(out: Path, alive: Callable[[], bool] = lambda: True) -> None:
    until = time.monotonic() + 60
    while not any(log.read_text().count("\n") for log in out.glob("*/rounds.jsonl")):
        assert alive() and time.monotonic() < until
        time.sleep(0.05)


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The path of a plugin; afterwards its methods are not registered any more."""
    for registry in CHOICES.values():
        monkeypatch.setattr(registry, "members", dict(registry.members))
    (tmp_path / "own.py").write_text(PLUGIN)
    return str(tmp_path / "own.py")


@pytest.mark.slow
def test_a_sweep_stopped_on_two_processes_goes_on_with_three_to_the_same_bits(plugin: str, tmp_path: Path) -> None:
    kinds: list[dict[str, Any]] = [
        {"algorithm": {"name": "fedavg"}, "participation": {"cohort": 1}},
        {"algorithm": {"name": "fedbn"}},
        {"algorithm": {"name": "fragile"}, "model": {"name": "dropout"}, "rounds": 40, "evaluation": {"every": 40}},
        {"algorithm": {"name": "fedvarp"}, "evaluation": {"every": 3}},
        {"algorithm": {"name": "fedga"}, "model": {"name": "softmax"}},
        {"algorithm": {"name": "lossbias"}},
    ]
    one, two, three = ([configured(workers, plugins=[plugin], **kind) for kind in kinds] for workers in (1, 2, 3))
    assert [c.name() for c in one] == [c.name() for c in two] == [c.name() for c in three]
    expected = list(run_all(one))
    assert any(r["dropped"] for r in expected[2].rounds)

    def stop(run: askew.Run, record: Record | None) -> None:
        if record and record["round"] == 2 and run.algorithm == "fragile":
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    first = list(run_all(two, tmp_path / "runs", watch=stop))
    assert [run.finished for run in first] == [True, True, False] and 2 <= len(first[2].rounds) < 40
    assert first[2].facts["state"] == "interrupted" and first[2].facts["workers"] == 2
    assert signal.getsignal(signal.SIGINT) is before and not workers_alive()
    watched: list[tuple[str, int]] = []
    broken = configured(3, plugins=[plugin], algorithm={"name": "broken"}, rounds=1)
    going = run_all(
        [*three, broken], tmp_path / "runs", watch=lambda run, record: watched.append((run.algorithm, len(run.rounds)))
    )
    again = [next(going) for _ in three]
    with pytest.raises(
        EngineError, match=r"own.py' failed in line 27: AttributeError: .* correct the file and try again"
    ):
        next(going)
    assert (
        watched[0] == ("fragile", len(first[2].rounds)) and not workers_alive()
    )  # what was finished is not trained again
    for run, other, first_time in zip(again, expected, [*first[:2], *again[2:]], strict=True):
        assert records(run) == records(other)
        assert first_time.model.keys() == other.model.keys() and all(
            torch.equal(first_time.model[n], t) for n, t in other.model.items()
        )
        assert run.folder is not None and not (run.folder / checkpoint.FILE).exists()
        assert records(askew.load(run.folder)) == records(other)
    assert [run.facts["workers"] for run in again] == [2, 2, 3, 3, 3, 3]


@pytest.mark.slow
def test_without_a_folder_the_model_comes_back_and_a_killed_rank_0_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    killed: list[float] = []

    def kill(run: askew.Run, record: Record | None) -> None:
        if record and record["round"] == 5:
            os.kill(workers_alive()[0], signal.SIGKILL)
            killed.append(time.monotonic())

    short, long = (configured(2, algorithm={"name": "scaffold"}, rounds=rounds) for rounds in (2, 100_000))
    going = run_all([short, long], watch=kill)
    run, alone = next(going), run_config(configured(1, algorithm={"name": "scaffold"}, rounds=2))
    assert run.folder is None and run.finished and records(run) == records(alone) and run.name == alone.name
    assert list(run.model) == list(alone.model)  # in the network's order, whoever trained it
    assert all(torch.equal(run.model[n], t) for n, t in alone.model.items())
    with pytest.raises(
        EngineError, match=r"^process 0 of the 2 that shared the work was ended by SIGKILL; .* goes on from"
    ):
        next(going)
    assert time.monotonic() - killed[0] < 10 and not workers_alive()
    out, err = capfd.readouterr()
    # torch 2.10's own line about its connections
    assert out == "" and [line for line in err.splitlines() if not line.startswith("[Gloo]")] == []


@pytest.mark.slow
def test_a_killed_rank_ends_the_command_with_one_sentence(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def kill() -> None:
        wait_for_a_round(tmp_path)
        os.kill(workers_alive()[1], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    (tmp_path / "long.toml").write_text(configured(1, algorithm={"name": "scaffold"}, rounds=100_000).toml())
    code = main(["run", str(tmp_path / "long.toml"), "--workers", "2", "--out", str(tmp_path), "--quiet"])
    killer.join()
    out, err = capfd.readouterr()
    assert code == 2 and out == "" and err.count("\n") == 1 and not workers_alive()
    assert err.startswith("error: process 1 of the 2 that shared the work was ended by SIGKILL; ")
    [log] = tmp_path.glob("*/rounds.jsonl")
    assert len(askew.load(log.parent).rounds) >= 1
    with lock_folder(log.parent):  # nobody holds it any more
        pass


@pytest.mark.slow
def test_ranks_started_as_torchrun_does_are_one_run_and_one_prints(tmp_path: Path) -> None:
    config = configured(1, algorithm={"name": "scaffold"}, rounds=3)
    (tmp_path / "a.toml").write_text(config.toml())
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "askew", "run", str(tmp_path / "a.toml"), "--json", "--out", str(tmp_path)]
    environment = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            command, env=environment | {"RANK": rank}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in "01"
    ]
    (out, err), silent = (rank.communicate(timeout=100) for rank in ranks)
    assert [rank.returncode for rank in ranks] == [0, 0], err
    assert silent == ("", "") and err.count("round 3/3") == 1
    run = askew.load(json.loads(out)["run"])
    assert run.facts["workers"] == 2 and records(run) == records(run_config(config))


def test_workers_take_over_only_long_runs_that_they_would_end_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where rounds are short, few are left, the machine is busy, one process is asked for, or nothing is stored."""
    monkeypatch.setattr(launch, "free_cores", lambda: 3)
    records = [{"seconds": seconds, "participants": [0, 1, 2, 3]} for seconds in (9.0, 1.0, 1.2)]

    def workers(config: Config, rounds: int = 3, folder: Path | None = Path("runs"), t: int = 3) -> int:
        run = askew.Run({}, records[:rounds], folder=folder)
        built = SimpleNamespace(space=SimpleNamespace(device=torch.device("cpu")))
        takeover = launch.Takeover()
        active: Any = SimpleNamespace(run=run, config=config, group=ProcessGroup(), built=built, t=t)
        assert takeover(active) == (takeover.workers > 1)
        return takeover.workers

    long = configured(0, rounds=100)
    assert workers(long) == 3 and workers(long, rounds=1) == 1 and workers(long, folder=None) == 1
    assert workers(configured(1, rounds=100)) == 1 and workers(configured(2, rounds=100)) == 1
    assert workers(long, t=69) == 3 and workers(long, t=71) == 1  # 31 or 29 rounds of a second, two thirds saved
    assert workers(replace(long, data=OwnData.of((torch.randn(9, 2), torch.arange(9) % 3), None))) == 1
    monkeypatch.setattr(launch, "free_cores", lambda: 1)
    assert workers(long) == 1
    monkeypatch.setattr(launch, "free_cores", lambda: 8)
    assert workers(long) == 4  # as many as take part in a round
    records[1]["seconds"] = 0.04
    assert workers(configured(0, rounds=100_000)) == 1


@pytest.mark.slow
def test_a_long_run_goes_on_with_more_processes_where_cores_are_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the same bits."""
    config = configured(0, algorithm={"name": "scaffold"}, rounds=5)
    alone = run_config(configured(1, algorithm={"name": "scaffold"}, rounds=5))
    for key, limit in TAKE_OVER.items():
        monkeypatch.setattr(launch, key, limit)
    lengths: list[int] = []
    run = run_config(config, tmp_path, watch=lambda run, record: lengths.append(len(run.rounds)))
    assert run.finished and run.facts["workers"] == 2 and lengths == [0, 1, 2, 2, 3, 4, 5] and not workers_alive()
    assert records(run) == records(alone) and all(torch.equal(run.model[n], t) for n, t in alone.model.items())
    assert records(run_config(config, tmp_path)) == records(alone)  # read back


@pytest.mark.slow
def test_a_run_that_more_processes_took_over_can_be_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, limit in TAKE_OVER.items():
        monkeypatch.setattr(launch, key, limit)

    def stop(run: askew.Run, record: Record | None) -> None:
        if record and record["round"] == 4:
            os.kill(os.getpid(), signal.SIGINT)

    run = run_config(configured(0, rounds=100_000), tmp_path, watch=stop)
    assert not run.finished and run.facts["state"] == "interrupted" and len(run.rounds) >= 4 and not workers_alive()


def report_environment(job: dict[str, Any], send: Callable[[dict[str, Any]], None]) -> None:
    """A worker's job: say who it is and what some environment variables are."""
    names = ("OMP_NUM_THREADS", "WORLD_SIZE", "ASKEW_NAMED_LATER")
    send(job | {"process": os.getpid()} | {name: os.environ.get(name) for name in names})


def test_a_worker_that_is_started_early_gets_the_job_and_what_changed_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that was lost before is not taken; another one that nobody takes ends."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # of this process alone
    worker_process.start_early(3)
    unused, taken, lost = (worker.process for worker in worker_process.early)
    lost.kill()
    lost.wait()
    monkeypatch.setenv("ASKEW_NAMED_LATER", "yes")
    with WorkerGroup(1, report_environment, {"given": 1}) as group:
        [message] = group.messages(lambda: False)
    wanted = {"OMP_NUM_THREADS": "1", "WORLD_SIZE": "1", "ASKEW_NAMED_LATER": "yes"}
    assert message == {"given": 1, "process": taken.pid} | wanted
    [(_, connection)] = worker_process.early
    connection.close()
    assert unused.wait(BUSY_SECONDS) == 0
    worker_process.end_early()
    assert not worker_process.early


@pytest.mark.slow
def test_ranks_end_when_their_parent_is_gone(tmp_path: Path) -> None:
    configs = configs_message([configured(2, algorithm={"name": "scaffold"}, rounds=100_000)])
    job = {**configs, "out": str(tmp_path), "fresh": False, "save_every": 5.0}
    with WorkerGroup(2, run_shared, job) as group:
        wait_for_a_round(tmp_path)
        for connection in group.connections:
            connection.close()
        assert [worker.process.wait(20) for worker in group.workers] == [0, 0]
    [log] = tmp_path.glob("*/rounds.jsonl")
    with lock_folder(log.parent):
        pass


# what cannot be -------------------------------------------------------------------------------------------------


def test_objects_from_python_are_refused_with_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(algorithms, "members", dict(algorithms.members))

    @askew.register("mine")
    class Mine(FedAvg):
        """A method of this file."""

    x, y = torch.randn(60, 2), torch.arange(60) % 3
    two = {"workers": 2}
    for name, given in (
        ("data", {"data": (x, y)}),
        ("model", {"model": nn.Linear(64, 10)}),
        ("algorithm", {"what": "mine"}),
    ):
        with pytest.raises(
            ConfigError, match=rf"engine.workers = 2: new processes cannot see the {name} .* set engine.workers = 1"
        ):
            askew.run(**given, engine=two)


def test_workers_are_a_number_within_limits() -> None:
    for wrong in (-1, 129, 1.5, "two"):
        with pytest.raises(ConfigError, match=r"engine: workers must be"):
            Config.build({"engine": {"workers": wrong}})
