"""Runs that are killed again and again, at any moment and inside any write, end with the numbers of a run that was not.

Processes are forked from one that has imported askew, so that hundreds of them take minutes. A process is killed by a
signal after a random time, or kills itself at a random call that changes files: then half of what was to be written is
written. Where several processes share the work, the killed one is the parent or any of its workers.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors import torch as safetensors_torch

import askew
from askew.core.files import read_tensors, tensors_sha256
from askew.core.ranks import rank_and_size
from askew.errors import EngineError, StoreWarning
from askew.experiment import launch
from askew.experiment.config import Config
from askew.experiment.folder_lock import lock_folder
from askew.experiment.launch import run_all, run_shared
from askew.experiment.store import load
from askew.experiment.workers import Message, Send
from askew.reproduction.reproduce import reproduce
from askew.reproduction.results import PROVENANCE, read_results
from process_tree import process_tree

LONG = pytest.mark.skipif(os.environ.get("ASKEW_LONG") != "all", reason="takes minutes; ASKEW_LONG=all runs it")
METHODS = ("fedavg", "scaffold", "feddyn", "feddc", "fedcm", "mifa", "fedvarp", "fedadam", "fedpmvr", "fedbn")
CALLS = 60  # calls that change files, within the first rounds of a run
BUSY_SECONDS = 90.0  # until workers whose parent was killed have ended and left the folder
SMOKE = "feddpc/fig6"  # an experiment with several runs
DIE_AT = "DIE_AT_CALL"  # the environment variable by which `share_and_die` gets its number
WORKER_LOST = 3  # exit code of a process that says in one sentence which of its workers was lost


def tables(method: str, **more: Any) -> dict[str, Any]:
    return {
        "rounds": 8,
        "data": {"name": "synthetic", "dim": 20, "samples": 20},  # no import of scikit-learn in every process
        "model": {"name": "mlp", "hidden": [16], "norm": "batch" if method == "fedbn" else "none"},
        "partition": {"clients": 12},
        "participation": {"cohort": 4},
        "algorithm": {"name": method},
        "local": {"lr": 0.05, "steps": 2},
        **more,
    }


# what the killed processes do -----------------------------------------------------------------------------------


def die_at_call(number: int) -> None:
    """Let this process kill itself at the so-manieth call that changes files, in its middle."""
    left = [number]

    def dying(function: Callable[..., Any], half: Callable[..., Any] | None = None) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                if half:
                    half(*arguments, **options)
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return call

    def half_a_file(tensors: object, path: Path, metadata: object = None) -> None:
        path.write_bytes(safetensors_torch.save({}) * 3)

    os.fsync = dying(os.fsync)
    os.replace = dying(os.replace)
    os.unlink = dying(os.unlink)
    safetensors_torch.save_file = dying(safetensors_torch.save_file, half_a_file)
    open_file = askew.experiment.store.__dict__.get("open", open)

    def append(path: Any, mode: str = "r", encoding: str | None = None) -> Any:
        file = open_file(path, mode, encoding=encoding)
        if mode == "a":
            write = file.write
            file.write = dying(write, lambda text: (write(text[: len(text) // 2]), file.flush()))
        return file

    askew.experiment.store.open = append  # type: ignore[attr-defined]


def train(tables_of_runs: list[dict[str, Any]], out: Path, die_at: int) -> None:
    launch.run_shared, os.environ[DIE_AT] = share_and_die, str(die_at)
    if die_at and tables_of_runs[0].get("engine") is None:  # workers write the files, where there are any
        die_at_call(die_at)
    warnings.simplefilter("error")  # nothing is damaged by a kill, so there is nothing to warn of
    try:
        for _ in run_all([Config.build(each) for each in tables_of_runs], out, save_every=0):
            pass
    except EngineError as sentence:
        assert "\n" not in str(sentence)
        sys.exit(WORKER_LOST)


def share_and_die(job: Message, send: Send) -> None:
    """The job of a worker; the one that writes the files kills itself while it does so."""
    if rank_and_size()[0] == 0 and int(os.environ[DIE_AT]):
        die_at_call(int(os.environ[DIE_AT]))
    warnings.simplefilter("error", StoreWarning)
    run_shared(job, send)


def repeat_experiment(folder: Path, die_at: int) -> None:
    if die_at:
        die_at_call(die_at)
    reproduce(SMOKE, "smoke", out=folder / "runs", results=folder / "results", processes=2)


# killing them ---------------------------------------------------------------------------------------------------


def forked(function: Callable[..., None], *arguments: Any) -> Any:
    """A process that calls a function, forked from one that has imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["askew.reproduction.reproduce", "askew.experiment.launch", __name__])
    process = context.Process(target=function, args=arguments)
    process.start()
    return process


def kill_later(process: Any, seconds: float, draw: random.Random | None = None) -> bool:
    """Kill a process after some time; was it still at work? With `draw`, kill the process or one of its workers."""
    process.join(seconds)
    tree = [process.pid, *(one for one in process_tree(process.pid) if is_worker(one))]
    victim = draw.choice(tree) if draw else process.pid
    killed_worker = process.is_alive() and victim != process.pid
    if process.is_alive():
        os.kill(victim, signal.SIGKILL)
    process.join(BUSY_SECONDS)
    assert process.exitcode in (0, -signal.SIGKILL, WORKER_LOST), f"exit code {process.exitcode}"
    deadline = time.monotonic() + BUSY_SECONDS
    while any(map(is_worker, tree)):
        assert time.monotonic() < deadline, "workers outlive the process that started them"
        time.sleep(0.05)
    return killed_worker or process.exitcode != 0


def is_worker(process_id: int) -> bool:
    """Is this a worker process that has not ended?"""
    try:
        return b"run_worker" in Path(f"/proc/{process_id}/cmdline").read_bytes()  # empty once it has ended
    except OSError:
        return False


def end(function: Callable[..., None], *arguments: Any) -> None:
    """Let a process end by itself; it is begun anew while workers of a killed one still have the folder."""
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        process = forked(function, *arguments)
        process.join()
        if process.exitcode == 0:
            return
        assert time.monotonic() < deadline, f"exit code {process.exitcode}"


def outcome(folder: Path) -> dict[str, Any]:
    """Records without times and the hash of the model of every run below a folder; no leftovers may be there."""
    runs = {}
    for path in sorted(path for path in folder.iterdir() if path.name != "figures"):
        run = load(path)
        records = [{key: value for key, value in record.items() if key != "seconds"} for record in run.rounds]
        runs[path.name] = records, tensors_sha256(read_tensors(path / "model.safetensors")[0]), run.facts["state"]
        left = {file.name for file in path.iterdir()}
        whole = {"run.toml", "run.json", "rounds.jsonl", "federation.json", "model.safetensors", ".lock"}
        assert {name for name in left if not name.startswith("end-")} == whole
    return runs


def kill_often(
    function: Callable[..., None],
    tmp_path: Path,
    kills: int,
    draw: random.Random,
    calls: int = CALLS,
    outcome: Callable[[Path], object] = outcome,
) -> str:
    """Kill so many times what fills a folder, up to six times in a row before it may end, and compare; a sentence.

    `function(folder, die_at)` fills a folder; every second kill is at one of so many first calls that change files.
    """
    end(function, tmp_path / "whole", 0)
    began = time.monotonic()
    end(function, tmp_path / "again", 0)
    seconds = time.monotonic() - began
    right, met, in_writes, part = outcome(tmp_path / "whole"), 0, 0, 0
    while met < kills:
        folder = tmp_path / f"killed{part}"
        for n in range(6):
            die_at = 0 if n % 2 else draw.randrange(1, calls)
            process = forked(function, folder, die_at)
            if not kill_later(process, BUSY_SECONDS if die_at else draw.uniform(0.1, 0.9) * seconds, draw):
                break  # it ended first
            met, in_writes = met + 1, in_writes + (die_at > 0)
        end(function, folder, 0)
        assert outcome(folder) == right
        part += 1
        assert part <= 4 * kills
    return f"{met} kills met it at work, {in_writes} of them inside writes; {part} of {part} results are identical"


def test_what_a_kill_leaves_of_any_file_is_removed(tmp_path: Path) -> None:
    """Of every file of a run folder, also of the state after the last round, which is written last."""
    list(run_all([Config.build(tables("scaffold", rounds=2))], tmp_path))
    (folder,) = tmp_path.iterdir()
    names = {path.name for path in folder.iterdir()} - {".lock"}
    assert any(name.startswith("end-") for name in names)
    for name in names:
        (folder / f".{name}.abc_12").write_bytes(b"half of it")
    with lock_folder(folder):
        assert {path.name for path in folder.iterdir()} == names | {".lock"}


@pytest.mark.slow
def test_a_few_kills(tmp_path: Path) -> None:
    kill_often(partial(train, [tables("scaffold")]), tmp_path, 5, random.Random(0))


@LONG
@pytest.mark.parametrize("method", METHODS)
def test_twenty_kills_of_each_of_ten_methods(method: str, tmp_path: Path) -> None:
    print(f"{method}: {kill_often(partial(train, [tables(method)]), tmp_path, 20, random.Random(method))}")


@LONG
def test_kills_of_sweeps(tmp_path: Path) -> None:
    runs = [tables(method, seed=seed) for method in ("fedavg", "scaffold") for seed in (0, 1)]
    print(f"sweep: {kill_often(partial(train, runs), tmp_path, 20, random.Random(1))}")


@LONG
def test_kills_with_two_workers(tmp_path: Path) -> None:
    runs = [tables("scaffold", rounds=40, engine={"workers": 2})]
    print(f"two workers: {kill_often(partial(train, runs), tmp_path, 24, random.Random(2))}")


def outcome_of_experiment(folder: Path) -> object:
    """The results of an experiment without times and dates, and its runs."""
    rows = [r for r in read_results(folder / "results") if "seconds" not in r.metric and r.metric != PROVENANCE]
    return {row.key: row.value for row in rows}, outcome(folder / "runs")


@LONG
def test_kills_of_an_experiment_on_two_processes(tmp_path: Path) -> None:
    """Kills inside writes are the parent's, which writes the results; a lost worker's part is given to a new one."""
    print(f"--processes 2: {kill_often(repeat_experiment, tmp_path, 20, random.Random(3), 12, outcome_of_experiment)}")
