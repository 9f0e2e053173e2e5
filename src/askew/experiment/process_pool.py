"""Many runs divided among processes of one machine, which use a GPU, or several cores, better than one process does.

The runs come in parts: lists of configurations that are run at a time. A process requests a part when it has nothing
to do, and only then is the next part taken from those that are given, so that what comes next may depend on what was
measured so far. The parent trains nothing. It gets every round's record as if it had trained it, and gives the part of
a process that was lost to a new process.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from itertools import chain
from multiprocessing.connection import wait
from pathlib import Path
from typing import Self

from ..core.records import Record
from ..core.text import count_text
from ..errors import DiskFull, EngineError
from .build import device_of
from .config import Config, stored_tables
from .cores import check_cores
from .launch import (
    FailedRun,
    RemoteRuns,
    check_rebuildable,
    configs_message,
    end_message,
    received_configs,
    run_all,
    send_rounds,
)
from .process_state import stop_requests
from .process_tuning import ENVIRONMENT
from .run import OnRound
from .store import Run
from .workers import (
    POLL_SECONDS,
    Message,
    Send,
    WorkerGroup,
    failure_error,
    failure_message,
    next_order,
)

OUT_OF_MEMORY = ("out of memory", "can't allocate memory")  # in the messages of CUDA and torch

MOST_MESSAGES = 100  # messages of one process that are read before the others have their turn

MPS = "nvidia-cuda-mps-control"  # NVIDIA's program that lets several processes compute on one GPU at the same time
MPS_PIPES, MPS_LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"  # environment variables that it reads
MPS_DEFAULT_PIPES = "/tmp/nvidia-mps"  # where its pipes are if the variable is not set
MPS_SECONDS = 30.0  # seconds for it to start, and to end
MPS_MOST_QUEUES = 96  # of all processes: on an H200 116 were served, and with 128 a process found no memory or device
QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"

Notify = Callable[[str], None]  # gets a sentence for the user
OnLoss = Callable[[Sequence[Config]], None]  # gets the configurations of runs that are given up
IsTooSlow = Callable[[Sequence[Config]], bool]  # whether the runs of a part are to be stopped, as they take too long
OnFailure = Callable[[Config, Exception], None]  # gets the configuration of a run that failed, and why
Part = Sequence[Config]  # configurations that are run at a time; an empty one: there is nothing to do at present


# the parent -----------------------------------------------------------------------------------------------------


def run_in_pool(
    parts: Iterable[Part],
    out: str | Path,
    processes: int,
    watch: OnRound,
    notify: Notify,
    on_loss: OnLoss = lambda configs: None,
    is_too_slow: IsTooSlow = lambda configs: False,
    on_failure: OnFailure | None = None,
) -> Generator[Run, None, None]:
    """Run parts, each in one of several processes, and yield the runs as they end.

    After a request to stop, the last run yielded is one that was stopped. A part that lost two processes is given up
    (one whose memory ran out while others went on is not counted), and one that `is_too_slow` is stopped: `on_loss`
    gets the unfinished runs, which are not yielded. With `on_failure` a run that fails does not end the others; parts
    must have one run each then.
    """
    check_cores(processes, "--processes")
    coming = iter(parts)
    if not (first := next(coming, None)):
        return
    with ExitStack() as stack:
        stopping = stack.enter_context(stop_requests())
        if device_of(first[0].engine.device).type == "cuda":
            stack.enter_context(mps_server(processes, notify))
        runs = RemoteRuns((), Path(out), watch)
        pool = stack.enter_context(ProcessPool(chain([first], coming), Path(out), processes, stopping, notify))
        pool.on_begin, pool.on_loss, pool.is_too_slow = runs.expect, on_loss, is_too_slow
        pool.job["each"] = on_failure is not None
        for message in pool.messages():
            if on_failure and "failed" in message:
                on_failure(pool.unfinished.pop(message["run"]), failure_error(message["failed"]))
                continue
            run = runs.receive(message)
            # a run that had ended before its process was lost is read back by the next one, and ends twice
            if run is not None and run.name in pool.unfinished:
                del pool.unfinished[run.name]
                yield run
        if stopping():
            left: Part | None = [*pool.unfinished.values()]
            if left := left or next(pool.parts, None):
                yield Run(stored_tables(left[0]))


def run_each_in_pool(
    configs: Sequence[Config], out: str | Path, processes: int, watch: OnRound, notify: Notify
) -> Generator[Run | FailedRun, None, None]:
    """As `run_each`, in several processes; runs come as they end."""
    for config in configs:
        check_rebuildable(config, "--processes")
    failed: list[FailedRun] = []
    lost = EngineError("its process was ended twice; if nobody did that, memory ran out: use fewer --processes.")
    runs = run_in_pool(
        [[config] for config in configs],
        out,
        processes,
        watch,
        notify,
        on_loss=lambda configs: failed.extend(FailedRun(config, lost) for config in configs),
        on_failure=lambda config, error: failed.append(FailedRun(config, error)),
    )
    with closing(runs):
        for run in runs:
            yield from failed
            failed.clear()
            yield run
    yield from failed


class ProcessPool:
    """Processes that get one part after the other, until none is left."""

    def __init__(
        self,
        parts: Iterator[Part],
        out: Path,
        size: int,
        stopping: Callable[[], bool],
        notify: Notify,
    ) -> None:
        self.parts, self.size, self.stopping, self.notify = parts, size, stopping, notify
        self.on_begin: Callable[[Part], None] = lambda part: None  # called with each part that is given out
        self.on_loss: OnLoss = lambda configs: None
        self.is_too_slow: IsTooSlow = lambda configs: False
        self.unfinished: dict[str, Config] = {}  # by name: runs of parts that were begun
        self.again: list[Part] = []  # parts that lost their process
        self.lost_once: set[str] = set()  # names of runs that lost a process
        self.job: Message = {"out": str(out), "processes": size}
        self.workers: list[PoolWorker] = []

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
                    if worker.failure or worker.stopped:
                        self._replace(worker)
                elif worker.waits:
                    self._give_part(worker)
                elif worker.part and not worker.stopped and self.is_too_slow(worker.part):
                    worker.stop()

    def _start(self) -> None:
        """Start a process."""
        self.workers.append(PoolWorker(self.job, self.stopping))

    def _give_part(self, worker: PoolWorker) -> None:
        """Give a process its next part, or let it end; with nothing to do at present it waits on."""
        part: Part | None = None
        if not self.stopping():
            part = self.again.pop() if self.again else next(self.parts, None)
        if part:
            self.unfinished |= {config.name(): config for config in part}
            self.on_begin(part)
        if part or part is None:
            worker.give(part)

    def _replace(self, lost: PoolWorker) -> None:
        """Let a new process take the part of one that was lost, unless it lost a process before.

        Where memory ran out, the other processes take it: a new one would find no more memory.
        """
        left = [config for config in lost.part or () if config.name() in self.unfinished]
        what = f"one of {self.size} processes" if self.size > 1 else "the only process"
        others = sum(not (worker.ends or worker.stopped) for worker in self.workers)
        if is_out_of_memory(lost.failure) and others:
            self.notify(shrunk_sentence(f"{what} {lost.failure}", len(left), others))
            self.size = others
            if left:
                self.again.append(left)
            return
        names = {config.name() for config in left}
        again = bool(left) and not lost.stopped and not names & self.lost_once
        if not lost.stopped:
            self.lost_once |= names
            self.notify(loss_sentence(f"{what} {lost.failure}", len(left), again))
        if again:
            self.again.append(left)
        else:
            self.unfinished = {name: config for name, config in self.unfinished.items() if name not in names}
            self.on_loss(left)
        # a process that was lost before it took anything is not replaced: the next one would be lost too
        if lost.part is not None and not self.stopping():
            self._start()


def loss_sentence(what: str, runs: int, again: bool) -> str:
    """The sentence on a process that was lost, with so many unfinished runs."""
    if not runs:
        return what
    unfinished = count_text(runs, "unfinished run")
    if again:
        return f"{what}; a fresh one takes its {unfinished}"
    return f"{what}; its {unfinished} had lost one before: given up"


def shrunk_sentence(what: str, runs: int, others: int) -> str:
    """The sentence on a process that memory was too small for."""
    goes_on = f"{what}; {'the other one goes' if others == 1 else f'the other {others} go'} on"
    if not runs:
        return goes_on
    return f"{goes_on} and take{'s' * (others == 1)} its {count_text(runs, 'unfinished run')}"


def is_out_of_memory(message: str) -> bool:
    """Does the message of an error say that memory ran out?"""
    return any(words in message for words in OUT_OF_MEMORY)


class PoolWorker:
    """One process of the pool, and the last part that it got."""

    def __init__(self, job: Message, stopping: Callable[[], bool]) -> None:
        self.part: Part | None = None
        self.waits, self.stopped, self.is_over, self.failure = False, False, False, ""
        self.ends = False  # whether it ends, as there is nothing left for it
        self.group = WorkerGroup(1, run_parts, job)
        self.incoming = self.group.messages(stopping, poll_seconds=0)

    def give(self, part: Part | None) -> None:
        """Send a part; None lets the process end.

        Every run is run by one process alone: the other cores are the other processes'.
        """
        alone = [replace(config, engine=replace(config.engine, workers=1)) for config in part or ()]
        self.part, self.waits, self.ends = part or self.part, False, part is None
        self.group.send(0, configs_message(alone))

    def stop(self) -> None:
        """Stop its runs after their round; the process ends then."""
        self.stopped = True
        self.group.send_stop()

    def messages(self) -> list[Message]:
        """The messages about runs that came since the last call; misuse that the process reports is raised.

        When `is_over` no more will come; if the process was lost, `failure` says how.
        """
        messages: list[Message] = []
        try:
            while len(messages) < MOST_MESSAGES and (message := next(self.incoming)):
                if "waits" in message:
                    self.waits = True
                else:
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
def mps_server(processes: int, notify: Notify) -> Iterator[None]:
    """Start NVIDIA's MPS, so that processes compute on a GPU at the same time, unless it runs or is not installed.

    Without it the processes take turns. With it they share the GPU's queues, of which each gets as many. If it runs
    already, this process has its own queues among them.
    """
    if not shutil.which(MPS):
        yield
        return
    own = int(os.environ.get(QUEUES, ENVIRONMENT[QUEUES]))
    runs = (Path(os.environ.get(MPS_PIPES, MPS_DEFAULT_PIPES)) / "control").exists()
    queues = min(own, max(1, (MPS_MOST_QUEUES - own * runs) // processes))
    if runs:
        with changed_environment({QUEUES: str(queues)}):
            yield
        return
    with tempfile.TemporaryDirectory(prefix="askew-mps-") as folder:
        folders = {name: str(Path(folder) / name.split("_")[2].lower()) for name in (MPS_PIPES, MPS_LOGS)}
        for path in folders.values():
            Path(path).mkdir()
        with changed_environment(folders | {QUEUES: str(queues)}):
            started = call_mps("-d")
            if not started:
                notify(f"{MPS} did not start; the processes take turns on the GPU")
            try:
                yield
            finally:
                if started and not call_mps(standard_input="quit\n"):
                    notify(f"{MPS} did not end; end it by its process id")


@contextmanager
def changed_environment(values: Mapping[str, str]) -> Iterator[None]:
    """Inside, environment variables have these values."""
    before = {name: os.environ.get(name) for name in values}
    os.environ |= values
    try:
        yield
    finally:
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
    """The job of a process: ask for one part after the other, run it, and send messages about its runs."""
    send_round = send_rounds(send)

    def watch(run: Run, record: Record | None) -> None:
        run.facts["processes"] = job["processes"]  # a round's time is not this run's alone
        send_round(run, record)

    while True:
        send({"waits": True})
        configs = received_configs(next_order())
        if not configs:
            return
        try:
            for run in run_all(configs, job["out"], watch=watch):
                if not run.over:
                    return
                send(end_message(run))
        except (OSError, DiskFull):
            raise
        except Exception as e:
            if not job["each"] or is_out_of_memory(str(e)):
                raise
            send({"run": configs[0].name(), "failed": failure_message(e)})
