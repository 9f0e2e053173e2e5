"""Runs of an experiment divided among processes: the same results, and none lost with a process or a Ctrl-C."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from askew.cli.main import main
from askew.experiment import process_pool
from askew.experiment.config import CHOICES
from askew.experiment.store import load
from askew.reproduction.plan import prepare_reproduction
from askew.reproduction.reproduce import reproduce, run_missing
from askew.reproduction.results import metrics_by_run, read_results

PLUGIN = """
import os, signal
from pathlib import Path
import askew
from askew.algorithms import FedAvg

@askew.register("deadly")
class Deadly(FedAvg):
    \"\"\"FedAvg that fails as often as a file has letters.\"\"\"

    def aggregate(self, w, up, cohort, server):
        lives = Path({lives!r})
        if cohort.round == 2 and (left := lives.read_text()):
            lives.write_text(left[1:])
            {failure}
        return super().aggregate(w, up, cohort, server)
"""
KILLED = "os.kill(os.getpid(), signal.SIGKILL)"
OUT_OF_MEMORY = "raise RuntimeError('CUDA error: out of memory')"
FAILING = """
import askew
from askew.algorithms import FedAvg

@askew.register("failing")
class Failing(FedAvg):
    \"\"\"FedAvg that fails.\"\"\"
    def aggregate(self, w, up, cohort, server):
        raise ValueError("on purpose")
"""
EXPERIMENT = """
title = "Some runs"
where = "here"
shows = "table"
[base]
rounds = 2
plugins = [{plugin!r}]
partition = {{ clients = 4 }}
[[method]]
name = "A"
[[method]]
name = "B"
set = {{ algorithm = {{ name = "fedprox" }} }}
[[method]]
name = "C"
set = {{ {more} }}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a plugin whose method kills its process, which is registered for one test only."""
    for registry in CHOICES.values():
        monkeypatch.setattr(registry, "members", dict(registry.members))
    monkeypatch.chdir(tmp_path)
    write_plugin(tmp_path, KILLED)
    return tmp_path


def write_plugin(folder: Path, failure: str) -> None:
    """The method "deadly", which fails by this statement."""
    (folder / "own.py").write_text(PLUGIN.format(lives=str(folder / "lives"), failure=failure))


def experiment(folder: Path, more: str, lives: str = "") -> str:
    """The path of an experiment with three methods, of which the third has these settings."""
    (folder / "lives").write_text(lives)
    (folder / "mine.toml").write_text(EXPERIMENT.format(plugin=str(folder / "own.py"), more=more))
    return str(folder / "mine.toml")


def rows(folder: Path) -> dict[Any, str]:
    """The stored results without times."""
    return {r.key: r.value for r in read_results(folder) if not r.metric.startswith("seconds")}


def methods(folder: Path) -> set[str]:
    """The methods with stored results."""
    return {r.method for r in read_results(folder / "results")}


DEADLY = 'rounds = 3, algorithm = { name = "deadly" }'


@pytest.mark.slow
def test_two_processes_give_the_results_of_one(folder: Path) -> None:
    watched: list[str] = []
    one = reproduce("feddpc/table2", "smoke", ["FedProx", "FedDPC"], 2, folder / "a", folder / "one")
    watch = lambda run, record: watched.append(run.name)
    two = reproduce(
        "feddpc/table2", "smoke", ["FedProx", "FedDPC"], 2, folder / "b", folder / "two", watch, processes=2
    )
    untimed = lambda cells: [cell for cell in cells if not cell.metric.startswith("seconds")]
    assert untimed(two) == untimed(one) and rows(folder / "two") == rows(folder / "one") and len(set(watched)) == 5
    results = metrics_by_run(read_results(folder / "two"))
    shared = {key for key, run in results.items() if "seconds_shared" in run}  # times that are not a run's own
    assert all("seconds_per_round" in run for key, run in results.items() if key not in shared) and len(shared) >= 4
    assert all(load(run_folder).facts["state"] == "finished" for run_folder in (folder / "b").iterdir())
    assert not list(folder.rglob("end-*"))  # no longer run will begin there


@pytest.mark.slow
def test_what_a_killed_process_had_begun_is_taken_by_a_fresh_one(folder: Path) -> None:
    id, sentences = experiment(folder, DEADLY, "x"), list[str]()
    begun = prepare_reproduction(id, results=folder / "results")
    runs = list(run_missing(begun, folder / "runs", folder / "results", None, 2, sentences.append))
    assert (
        sorted(run.algorithm for run in runs) == ["deadly", "fedavg", "fedprox"]
        and not begun.missing
        and not begun.lost
    )
    assert {run.facts["state"] for run in runs} == {"finished"} and {run.facts["processes"] for run in runs} == {2}
    assert sentences == ["one of 2 processes was ended by SIGKILL; a fresh one takes its 1 unfinished run"]
    reproduce(id, out=folder / "alone", results=folder / "whole")
    assert rows(folder / "results") == rows(folder / "whole")


@pytest.mark.slow
def test_a_run_that_kills_twice_is_named_and_all_others_are_stored(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    id = experiment(folder, DEADLY, "xx")
    assert main(["reproduce", id, "--processes", "2"]) == 1
    out, err = capfd.readouterr()
    assert not out and "its 1 unfinished run had lost one before: given up" in err
    assert "not made: 1 of 3 runs, as their processes were lost, all others are stored: all C seed 0; to go on:" in err
    assert f"askew reproduce {id} --scale full --processes 2 --out runs --results results" in err
    assert methods(folder) == {"A", "B"}
    assert main(["reproduce", id, "--processes", "2"]) == 0
    assert methods(folder) == {"A", "B", "C"}


@pytest.mark.slow
def test_where_memory_runs_out_fewer_processes_do_the_rest(folder: Path) -> None:
    """Each of two processes finds no memory: the first one's run is taken by the other, and its own by a fresh one."""
    write_plugin(folder, OUT_OF_MEMORY)
    id, sentences = experiment(folder, DEADLY, "xx"), list[str]()
    begun = prepare_reproduction(id, results=folder / "results")
    runs = list(run_missing(begun, folder / "runs", folder / "results", None, 2, sentences.append))
    assert sorted(run.algorithm for run in runs) == ["deadly", "fedavg", "fedprox"] and not begun.lost
    ends = [sentence.rpartition("; ")[2] for sentence in sentences]
    assert ends == ["the other one goes on and takes its 1 unfinished run", "a fresh one takes its 1 unfinished run"]
    assert all("failed in line 15: RuntimeError: CUDA error: out of memory" in sentence for sentence in sentences)
    assert [sentence.split(" failed")[0] for sentence in sentences] == ["one of 2 processes", "the only process"]


@pytest.mark.parametrize(
    ("runs", "others", "end"),
    [(0, 1, "the other one goes on"), (2, 3, "the other 3 go on and take its 2 unfinished runs")],
)
def test_the_sentence_on_a_process_without_memory(runs: int, others: int, end: str) -> None:
    assert process_pool.shrunk_sentence("one failed", runs, others) == f"one failed; {end}"


@pytest.mark.slow
def test_a_failure_is_reported_by_its_process_and_misuse_ends_all(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    id = experiment(folder, 'algorithm = { name = "deadly" }')
    (folder / "lives").unlink()  # now the plugin fails
    assert main(["reproduce", id, "--processes", "2"]) == 1
    assert "own.py' failed in line 13: FileNotFoundError" in capfd.readouterr().err
    assert main(["reproduce", id, "--processes", "2", "--workers", "2"]) == 2
    assert main(["reproduce", id, "--processes", "2", "--alone"]) == 2
    err = capfd.readouterr().err
    assert (
        "both divide the machine; give one of them" in err and "leave --processes out" in err and err.count("\n") == 2
    )


@pytest.mark.slow
def test_a_sweep_in_two_processes_gives_the_runs_of_one_and_names_those_that_fail(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three runs, one of which fails as it is trained; the others are the same as in one process."""
    (folder / "bad.py").write_text(FAILING)
    sweep = ["sweep", "--over", "algorithm.name=fedavg,failing,fedprox", "--over", "algorithm.mu=0.1"]
    sweep += ["--plugin", str(folder / "bad.py"), "--set", "rounds=2", "--set", "partition.clients=4"]
    outputs = []
    for out, more in (("one", []), ("two", ["--processes", "2"])):
        assert main([*sweep, "--out", str(folder / out), *more]) == 2
        outputs.append(capsys.readouterr())
        assert "failed in line 9: ValueError: on purpose" in outputs[-1].err
        assert "3/3 runs" in outputs[-1].err and outputs[-1].err.count("best accuracy") == 2
    rows = [[line.split()[:3] for line in each.out.splitlines() if line.startswith("fed")] for each in outputs]
    assert rows[0] == rows[1] and [row[0] for row in rows[0]] == ["fedavg", "fedprox"]
    folders = [{path.name: load(path) for path in (folder / out).glob("fed*")} for out in ("one", "two")]
    assert len(folders[0]) == 2 and folders[0].keys() == folders[1].keys()
    for name, run in folders[0].items():
        pairs = zip(run.rounds, folders[1][name].rounds, strict=True)
        assert all(a | {"seconds": 0} == b | {"seconds": 0} for a, b in pairs)


@pytest.mark.slow
def test_an_interrupted_command_keeps_what_is_finished_and_goes_on(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    id = experiment(folder, 'rounds = 100000 }\n[[method]]\nname = "D"\nset = { rounds = 100001')

    def played() -> list[int]:
        return sorted(n for log in folder.glob("runs/*/rounds.jsonl") if (n := log.read_text().count("\n")) != 2)

    def stop(before: list[int]) -> None:
        """When the short runs are stored and both long ones have gone on; or after minutes, so that the test ends."""
        until = time.monotonic() + 300
        while time.monotonic() < until:
            time.sleep(0.05)
            if (
                methods(folder) == {"A", "B"}
                and len(now := played()) == 2
                and all(a < b for a, b in zip(before, now, strict=True))
            ):
                break
        os.kill(os.getpid(), signal.SIGINT)

    before = [3, 3]
    for _ in ("first", "again"):
        stopper = threading.Thread(target=stop, args=(before,))
        stopper.start()
        assert main(["reproduce", id, "--processes", "3"]) == 130
        stopper.join()
        left = prepare_reproduction(id, results=folder / "results").missing
        runs = [load(folder / "runs" / p.config.name()) for p in left]
        assert methods(folder) == {"A", "B"} and [p.method for p in left] == ["C", "D"]
        assert {run.facts["state"] for run in runs} == {"interrupted"} and all(
            a < b for a, b in zip(before, played(), strict=True)
        )
        before = played()
    err = capfd.readouterr().err
    assert "stopped with 2 of 4 runs to go, all of it stored" in err and "stopped with 2 of 2 runs to go" in err


# MPS ------------------------------------------------------------------------------------------------------------


def install_mps(folder: Path, code: int = 0) -> None:
    """Write a program of MPS's name that notes its calls."""
    path = folder / process_pool.MPS
    path.write_text(
        f'#!/bin/sh\necho "$1 $(cat) $CUDA_MPS_PIPE_DIRECTORY $CUDA_MPS_LOG_DIRECTORY" >> {folder}/calls\nexit {code}\n'
    )
    path.chmod(0o755)


@pytest.mark.parametrize("code", [0, 1])
def test_mps_runs_while_the_command_does(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_mps(tmp_path, code)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv(process_pool.MPS_PIPES, raising=False)
    monkeypatch.setattr(process_pool, "MPS_DEFAULT_PIPES", str(tmp_path / "missing"))
    sentences: list[str] = []
    with process_pool.mps_server(6, sentences.append):
        pipe, log = os.environ[process_pool.MPS_PIPES], os.environ[process_pool.MPS_LOGS]
        assert Path(pipe).is_dir() and Path(log).is_dir() and pipe != log
        assert os.environ[process_pool.QUEUES] == "16"  # of six processes, which share 96
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls == ([f"-d  {pipe} {log}", f" quit {pipe} {log}"] if code == 0 else [f"-d  {pipe} {log}"])
    assert sentences == (
        [] if code == 0 else ["nvidia-cuda-mps-control did not start; the processes take turns on the GPU"]
    )
    assert process_pool.MPS_PIPES not in os.environ and not Path(pipe).exists()


def test_mps_that_runs_already_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_mps(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "control").touch()
    monkeypatch.setenv(process_pool.MPS_PIPES, str(tmp_path))
    with process_pool.mps_server(6, lambda sentence: None):
        assert os.environ[process_pool.MPS_PIPES] == str(tmp_path)
        assert os.environ[process_pool.QUEUES] == "10"  # 32 of 96 are this process's
    assert not (tmp_path / "calls").exists() and os.environ[process_pool.MPS_PIPES] == str(tmp_path)
    monkeypatch.setenv("PATH", "")
    (tmp_path / "control").unlink()
    with process_pool.mps_server(6, lambda sentence: None):  # nor is it missed where it is not installed
        assert os.environ[process_pool.MPS_PIPES] == str(tmp_path)
