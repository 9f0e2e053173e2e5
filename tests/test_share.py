"""Runs of an experiment shared out among processes: the same results, and none lost with a process or a Ctrl-C."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from askew.cli.main import main
from askew.experiment import process_pool as share
from askew.experiment.config import CHOICES
from askew.experiment.store import load
from askew.reproduction.papers import find_experiment, plan_runs
from askew.reproduction.plan import prepare_reproduction
from askew.reproduction.reproduce import reproduce, run_missing, split_for_processes
from askew.reproduction.results import metrics_by_run, read_results

PLUGIN = """
import os, signal
from pathlib import Path
import askew
from askew.algorithms import FedAvg

@askew.register("deadly")
class Deadly(FedAvg):
    \"\"\"FedAvg that kills its process as often as a file has letters.\"\"\"

    def aggregate(self, x, up, cohort, server):
        lives = Path({lives!r})
        if cohort.round == 2 and (left := lives.read_text()):
            lives.write_text(left[1:])
            os.kill(os.getpid(), signal.SIGKILL)
        return super().aggregate(x, up, cohort, server)
"""
PAGE = """
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
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a method that kills, which the registries forget afterwards."""
    for registry in CHOICES.values():
        monkeypatch.setattr(registry, "members", dict(registry.members))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(PLUGIN.format(lives=str(tmp_path / "lives")))
    return tmp_path


def page(desk: Path, more: str, lives: str = "") -> str:
    (desk / "lives").write_text(lives)
    (desk / "mine.toml").write_text(PAGE.format(plugin=str(desk / "own.py"), more=more))
    return str(desk / "mine.toml")


def rows(folder: Path) -> dict[Any, str]:
    return {r.key: r.value for r in read_results(folder) if not r.metric.startswith("seconds")}


def methods(desk: Path) -> set[str]:
    return {r.method for r in read_results(desk / "results")}


DEADLY = 'rounds = 3, algorithm = { name = "deadly" }'


def test_two_processes_give_the_results_of_one(desk: Path) -> None:
    seen: list[str] = []
    one = reproduce("feddpc/table2", "smoke", ["FedProx", "FedDPC"], 2, desk / "a", desk / "one")
    watch = lambda run, record: seen.append(run.name)
    two = reproduce("feddpc/table2", "smoke", ["FedProx", "FedDPC"], 2, desk / "b", desk / "two", watch, processes=2)
    untimed = lambda cells: [cell for cell in cells if not cell.metric.startswith("seconds")]
    assert untimed(two) == untimed(one) and rows(desk / "two") == rows(desk / "one") and len(set(seen)) == 5
    told = metrics_by_run(read_results(desk / "two"))
    shared = {key for key, run in told.items() if "seconds_shared" in run}
    assert (
        all("seconds_per_round" in run for key, run in told.items() if key not in shared) and len(shared) >= 4
    )  # times that say so
    assert all(load(folder).facts["state"] == "finished" for folder in (desk / "b").iterdir())


def test_what_a_killed_process_had_begun_is_taken_by_a_fresh_one(desk: Path) -> None:
    id, said = page(desk, DEADLY, "x"), list[str]()
    begun = prepare_reproduction(id, results=desk / "results")
    runs = list(run_missing(begun, desk / "runs", desk / "results", None, 2, said.append))
    assert (
        sorted(run.algorithm for run in runs) == ["deadly", "fedavg", "fedprox"]
        and not begun.missing
        and not begun.lost
    )
    assert said == ["one of 2 processes was ended by SIGKILL; a fresh one takes its 1 unfinished run"]
    reproduce(id, out=desk / "alone", results=desk / "whole")
    assert rows(desk / "results") == rows(desk / "whole")


def test_a_run_that_kills_twice_is_named_and_all_others_are_stored(
    desk: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    id = page(desk, DEADLY, "xx")
    assert main(["reproduce", id, "--processes", "2"]) == 1
    out, err = capfd.readouterr()
    assert not out and "its 1 unfinished run had lost one before: given up" in err
    assert (
        "1 of 3 runs were not made, as their processes were lost, all others are stored: all C seed 0; to go on:" in err
    )
    assert f"askew reproduce {id} --scale full --processes 2 --out runs --results results" in err
    assert methods(desk) == {"A", "B"}
    assert main(["reproduce", id, "--processes", "2"]) == 0
    assert methods(desk) == {"A", "B", "C"}


def test_a_failure_is_told_by_its_process_and_misuse_ends_all(desk: Path, capfd: pytest.CaptureFixture[str]) -> None:
    id = page(desk, 'algorithm = { name = "deadly" }')
    (desk / "lives").unlink()  # now the plugin fails
    assert main(["reproduce", id, "--processes", "2"]) == 1
    assert "own.py' failed in line 13: FileNotFoundError" in capfd.readouterr().err
    assert main(["reproduce", id, "--processes", "2", "--workers", "2"]) == 2
    assert main(["reproduce", id, "--processes", "2", "--alone"]) == 2
    err = capfd.readouterr().err
    assert (
        "both divide the machine; give one of them" in err and "leave --processes out" in err and err.count("\n") == 2
    )


def test_an_interrupted_command_keeps_what_is_finished_and_goes_on(
    desk: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    id = page(desk, 'rounds = 100000 }\n[[method]]\nname = "D"\nset = { rounds = 100001')

    def played() -> list[int]:
        return sorted(n for log in desk.glob("runs/*/rounds.jsonl") if (n := log.read_text().count("\n")) != 2)

    def stop(before: list[int]) -> None:
        """When the short runs are stored and both long ones have gone on; or after minutes, so that the test ends."""
        until = time.monotonic() + 300
        while time.monotonic() < until:
            time.sleep(0.05)
            if (
                methods(desk) == {"A", "B"}
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
        left = prepare_reproduction(id, results=desk / "results").missing
        runs = [load(desk / "runs" / p.config.name()) for p in left]
        assert methods(desk) == {"A", "B"} and [p.method for p in left] == ["C", "D"]
        assert {run.facts["state"] for run in runs} == {"interrupted"} and all(
            a < b for a, b in zip(before, played(), strict=True)
        )
        before = played()
    err = capfd.readouterr().err
    assert "stopped with 2 of 4 runs to go, all of it stored" in err and "stopped with 2 of 2 runs to go" in err


# parts ----------------------------------------------------------------------------------------------------------


def test_on_a_gpu_the_runs_of_a_method_stay_together_and_the_longest_part_is_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planned = plan_runs(find_experiment("feddpc/table2"), "smoke")
    assert [len(part) for part in split_for_processes(planned, 2)] == [1] * len(planned)
    monkeypatch.setattr("askew.reproduction.reproduce.device_of", lambda name: torch.device("cuda"))
    parts = split_for_processes(planned, 2)
    assert (
        [len({p.method for p in part}) for part in parts] == [1] * 6
        and parts[0][0].method == "FedProx"
        and len(parts[0]) == 2
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 100))
    monkeypatch.setattr("askew.reproduction.reproduce.estimate_memory", lambda config: 20)
    assert [len(part) for part in split_for_processes(planned, 2)] == [1] * len(
        planned
    )  # each of two has room for one run


# MPS ------------------------------------------------------------------------------------------------------------


def daemon(folder: Path, code: int = 0) -> None:
    """A program of its name that notes what it is told."""
    path = folder / share.MPS
    path.write_text(
        f'#!/bin/sh\necho "$1 $(cat) $CUDA_MPS_PIPE_DIRECTORY $CUDA_MPS_LOG_DIRECTORY" >> {folder}/told\nexit {code}\n'
    )
    path.chmod(0o755)


@pytest.mark.parametrize("code", [0, 1])
def test_mps_serves_for_the_time_of_the_command(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon(tmp_path, code)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv(share.PIPE, raising=False)
    monkeypatch.setattr(share, "USUAL", str(tmp_path / "nobody"))
    said: list[str] = []
    with share.at_once(said.append):
        pipe, log = os.environ[share.PIPE], os.environ[share.LOG]
        assert Path(pipe).is_dir() and Path(log).is_dir() and pipe != log
    told = (tmp_path / "told").read_text().splitlines()
    assert told == ([f"-d  {pipe} {log}", f" quit {pipe} {log}"] if code == 0 else [f"-d  {pipe} {log}"])
    assert said == ([] if code == 0 else ["nvidia-cuda-mps-control did not start; the processes take turns on the GPU"])
    assert share.PIPE not in os.environ and not Path(pipe).exists()


def test_mps_that_serves_already_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "control").touch()
    monkeypatch.setenv(share.PIPE, str(tmp_path))
    with share.at_once(lambda words: None):
        assert os.environ[share.PIPE] == str(tmp_path)
    assert not (tmp_path / "told").exists() and os.environ[share.PIPE] == str(tmp_path)
    monkeypatch.setenv("PATH", "")
    (tmp_path / "control").unlink()
    with share.at_once(lambda words: None):  # nor is it missed where it is not installed
        assert os.environ[share.PIPE] == str(tmp_path)
