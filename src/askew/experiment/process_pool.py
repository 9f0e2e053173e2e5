"""Many runs divided among processes of one machine, which use a GPU, or several cores, better than one process does.

The runs come in parts. Each part is a file with the configurations of runs that are run at a time:

    todo/00003   a part that no process has taken; they are taken in this order, so the longest part should be first
    7/00003      the same part, taken by process 7: it moves the file, so that no two take one part

The parent trains nothing. It hears of every round as if it had trained it, and gives the part of a process that was
lost to a new process.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import count
from multiprocessing.connection import wait
from pathlib import Path
from typing import Self

from ..errors import EngineError
from .build import device_of
from .config import Config, stored_tables
from .launch import RemoteRuns, end_message, run_all, send_rounds
from .process_state import stop_requests
from .run import OnRound
from .store import Record, Run
from .workers import POLL_SECONDS, Message, Send, WorkerGroup, check_cores

MOST_MESSAGES = 100  # messages of one process that are read before the others have their turn

MPS = "nvidia-cuda-mps-control"  # NVIDIA's program that lets several processes compute on one GPU at the same time
MPS_PIPES, MPS_LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"  # environment variables that it reads
MPS_DEFAULT_PIPES = "/tmp/nvidia-mps"  # where its pipes are if the variable is not set
MPS_SECONDS = 30.0  # seconds for it to start, and to end

Notify = Callable[[str], None]  # gets a sentence for the user


# the parent -----------------------------------------------------------------------------------------------------


def run_in_pool(
    parts: Sequence[Sequence[Config]], out: str | Path, processes: int, watch: OnRound, notify: Notify
) -> Generator[Run, None, None]:
    """Run parts, each in one of several processes, and yield the runs as they end.

    After a request to stop, the last run yielded is one that was stopped. A part that lost two processes is given up:
    its unfinished runs are not yielded.
    """
    check_cores(min(processes, len(parts)), "--processes")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="askew-")))
        stopping = stack.enter_context(stop_requests())
        if device_of(parts[0][0].engine.device).type == "cuda":
            stack.enter_context(mps_server(notify))
        pool = stack.enter_context(ProcessPool(parts, folder, Path(out), min(processes, len(parts)), stopping, notify))
        runs = RemoteRuns([config for part in parts for config in part], Path(out), watch)
        for message in pool.messages():
            run = runs.receive(message)
            # a run that had ended before its process was lost is read back by the next one, and ends twice
            if run is not None and run.name in pool.unfinished:
                del pool.unfinished[run.name]
                yield run
        if pool.unfinished and stopping():
            yield Run(stored_tables(next(iter(pool.unfinished.values()))))


class ProcessPool:
    """Processes that take one part after the other from a folder, until none is left."""

    def __init__(
        self,
        parts: Sequence[Sequence[Config]],
        folder: Path,
        out: Path,
        size: int,
        stopping: Callable[[], bool],
        notify: Notify,
    ) -> None:
        self.parts, self.folder, self.size, self.stopping, self.notify = parts, folder, size, stopping, notify
        self.unfinished = {config.name(): config for part in parts for config in part}
        self.lost_once: set[str] = set()  # files of parts that lost a process
        self.numbers = count(1)  # of the processes
        self.todo = folder / "todo"
        self.job = {"todo": str(self.todo), "out": str(out), "processes": size}
        self.workers: list[PoolWorker] = []
        write_parts(parts, self.todo)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for worker in self.workers:
            worker.group.end()

    def messages(self) -> Iterator[Message]:
        """Start the processes and yield their messages; a process that was lost is replaced."""
        for _ in range(self.size):
            self._start()
        while self.workers:
            wait([connection for worker in self.workers for connection in worker.group.connections], POLL_SECONDS)
            for worker in list(self.workers):
                yield from worker.messages()
                if worker.is_over:
                    self.workers.remove(worker)
                    if worker.failure:
                        self._replace(worker)

    def _start(self) -> None:
        """Start a process."""
        self.workers.append(PoolWorker(self.folder / str(next(self.numbers)), self.job, self.stopping))

    def _replace(self, lost: PoolWorker) -> None:
        """Let a new process take the parts of one that was lost, unless they lost a process before."""
        taken = {
            file: [config for config in self.parts[int(file.name)] if config.name() in self.unfinished]
            for file in lost.folder.iterdir()
        }
        again = [file for file, configs in taken.items() if configs and file.name not in self.lost_once]
        self.lost_once |= {file.name for file in taken}
        unfinished = sum(map(len, taken.values()))
        self.notify(loss_sentence(f"one of {self.size} processes {lost.failure}", unfinished, bool(again)))
        for file in again:
            file.rename(self.todo / file.name)
        # a process that was lost before it took anything is not replaced: the next one would be lost too
        if taken and any(self.todo.iterdir()) and not self.stopping():
            self._start()


def write_parts(parts: Sequence[Sequence[Config]], todo: Path) -> None:
    """Write the file of each part. Every run is run by one process alone: the other cores are the other processes'."""
    todo.mkdir()
    for n, part in enumerate(parts):
        tables = [stored_tables(replace(config, engine=replace(config.engine, workers=1))) for config in part]
        (todo / f"{n:05}").write_text(json.dumps(tables))


def loss_sentence(what: str, runs: int, again: bool) -> str:
    """The sentence on a process that was lost, with so many unfinished runs."""
    if not runs:
        return what
    unfinished = f"{runs} unfinished run{'s' * (runs != 1)}"
    if again:
        return f"{what}; a fresh one takes its {unfinished}"
    return f"{what}; its {unfinished} had lost one before: given up"


class PoolWorker:
    """One process of the pool, and the folder of the parts that it took."""

    def __init__(self, folder: Path, job: Message, stopping: Callable[[], bool]) -> None:
        folder.mkdir()
        self.folder, self.is_over, self.failure = folder, False, ""
        self.group = WorkerGroup(1, run_parts, job | {"taken": str(folder)})
        self.incoming = self.group.messages(stopping, poll_seconds=0)

    def messages(self) -> list[Message]:
        """The messages that came since the last call; misuse that the process reports is raised.

        When `is_over` no more will come; if the process was lost, `failure` says how.
        """
        messages: list[Message] = []
        try:
            while len(messages) < MOST_MESSAGES and (message := next(self.incoming)):
                messages.append(message)
        except StopIteration:
            self.is_over = True
        except (EngineError, RuntimeError):
            sentence = self.group.failures[0]["sentence"]
            self.is_over = True
            self.failure = (
                f"failed ({sentence.splitlines()[0]})" if sentence else f"was ended {self.group.exit_reason(0)}"
            )
        if self.is_over:
            self.group.end()
        return messages


# MPS ------------------------------------------------------------------------------------------------------------


@contextmanager
def mps_server(notify: Notify) -> Iterator[None]:
    """Start NVIDIA's MPS, so that processes compute on a GPU at the same time, unless it runs or is not installed.

    Without it the processes take turns.
    """
    if not shutil.which(MPS) or (Path(os.environ.get(MPS_PIPES, MPS_DEFAULT_PIPES)) / "control").exists():
        yield
        return
    before = {name: os.environ.get(name) for name in (MPS_PIPES, MPS_LOGS)}
    with tempfile.TemporaryDirectory(prefix="askew-mps-") as folder:
        for name in before:
            os.environ[name] = str(Path(folder) / name.split("_")[2].lower())
            Path(os.environ[name]).mkdir()
        started = call_mps("-d")
        if not started:
            notify(f"{MPS} did not start; the processes take turns on the GPU")
        try:
            yield
        finally:
            if started and not call_mps(standard_input="quit\n"):
                notify(f"{MPS} did not end; end it by its process id")
            for name, value in before.items():
                os.environ.pop(name)
                os.environ |= {} if value is None else {name: value}


def call_mps(*arguments: str, standard_input: str = "") -> bool:
    """Call MPS's control program, and say whether it succeeded."""
    try:
        done = subprocess.run(
            [MPS, *arguments],
            input=standard_input,
            text=True,
            stdout=subprocess.DEVNULL,  # a daemon would keep a pipe open
            stderr=subprocess.DEVNULL,
            timeout=MPS_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


# a process ------------------------------------------------------------------------------------------------------


def run_parts(job: Message, send: Send) -> None:
    """The job of a process: take one part after the other, run it, and send messages about its runs."""
    todo, taken, send_round = Path(job["todo"]), Path(job["taken"]), send_rounds(send)

    def watch(run: Run, record: Record | None) -> None:
        run.facts["processes"] = job["processes"]  # a round's time is not this run's alone
        send_round(run, record)

    while files := sorted(todo.iterdir()):
        try:
            part = files[0].rename(taken / files[0].name)
        except FileNotFoundError:
            continue  # another process was faster
        configs = [Config.build(tables) for tables in json.loads(part.read_text())]
        for run in run_all(configs, job["out"], watch=watch):
            if not run.over:
                return
            send(end_message(run))
