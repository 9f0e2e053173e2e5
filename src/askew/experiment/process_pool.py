"""Runs shared out among processes of one machine, which keep a GPU, or several cores, busier than one does.

    todo/00003   a part that nobody has taken: the pages of runs that are played side by side; the longest part comes first
    7/00003      the same, taken by process 7: it moves the file, so that no two take one part

The parent trains nothing. It hears of every round as if it had played it, and gives the part of a process that was lost to a fresh one.
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

from ..errors import EngineError
from .build import device_of
from .config import Config, read_back
from .run import OnRound, play_all, stop_requests
from .store import Record, Run, load
from .workers import BEAT, Say, Told, WorkerPool

MANY = 100  # words of one process that are listened to before the others have their turn
MPS = "nvidia-cuda-mps-control"
PIPE, LOG = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
USUAL = "/tmp/nvidia-mps"  # where its pipes are if nobody says otherwise
LONG = 30.0  # seconds for it to start, and to end

Speak = Callable[[str], None]


# the parent -----------------------------------------------------------------------------------------------------


def shared(
    parts: Sequence[Sequence[Config]], out: str | Path, processes: int, watch: OnRound, speak: Speak
) -> Generator[Run, None, None]:
    """Play parts of runs, each in one of several processes. Runs come as they end; after a wish to stop, at last one that was stopped.

    A part that lost two processes is given up: its runs do not come.
    """
    left = {config.name(): config for part in parts for config in part}
    runs, numbers, tried = dict[str, Run](), count(1), set[str]()
    with ExitStack() as held:
        desk = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="askew-")))
        todo, stopping = desk / "todo", held.enter_context(stop_requests())
        lay_out(parts, todo)
        if device_of(parts[0][0].engine.device).type == "cuda":
            held.enter_context(at_once(speak))
        processes = min(processes, len(parts))
        job = {"todo": str(todo), "out": str(out), "processes": processes}

        def start() -> PoolWorker:
            return held.enter_context(PoolWorker(desk / str(next(numbers)), job, stopping))

        hands = [start() for _ in range(processes)]
        while hands:
            wait([line for hand in hands for line in hand.crew.lines], BEAT)
            for hand in list(hands):
                for told in hand.news():
                    name = told["run"]
                    if "begun" in told:
                        runs[name] = Run(read_back(left[name]), **told["begun"], folder=Path(out) / name)
                        watch(runs[name], None)
                    elif "record" in told:
                        runs[name].rounds.append(told["record"])
                        runs[name].facts = told["facts"]
                        watch(runs[name], told["record"])
                    elif left.pop(name, None):  # else it had ended before its process was lost, and was read back
                        yield runs.get(name) or load(Path(out) / name)
                if not hand.over:
                    continue
                hands.remove(hand)
                if hand.reason:
                    took = {
                        path: [c for c in parts[int(path.name)] if c.name() in left] for path in hand.folder.iterdir()
                    }
                    again = [path for path, lack in took.items() if lack and path.name not in tried]
                    tried |= {path.name for path in took}
                    speak(
                        loss(f"one of {processes} processes {hand.reason}", sum(map(len, took.values())), bool(again))
                    )
                    for path in again:
                        path.rename(todo / path.name)
                    if (
                        took and any(todo.iterdir()) and not stopping()
                    ):  # one that was lost before it took anything is not replaced
                        hands.append(start())
        if left and stopping():
            yield Run(read_back(next(iter(left.values()))))


def lay_out(parts: Sequence[Sequence[Config]], todo: Path) -> None:
    """Each run is played by one process alone: the other cores are the other processes'."""
    todo.mkdir()
    for n, part in enumerate(parts):
        pages = [read_back(replace(config, engine=replace(config.engine, workers=1))) for config in part]
        (todo / f"{n:05}").write_text(json.dumps(pages))


def loss(what: str, runs: int, again: bool) -> str:
    """The sentence on a process that was lost, with so many unfinished runs."""
    their = f"{runs} unfinished run{'s' * (runs != 1)}"
    return (
        f"{what}; {f'a fresh one takes its {their}' if again else f'its {their} had lost one before: given up'}"
        if runs
        else what
    )


class PoolWorker:
    """One process, and the folder of the parts that it took."""

    def __init__(self, folder: Path, job: Told, stopping: Callable[[], bool]) -> None:
        folder.mkdir()
        self.folder, self.over, self.reason = folder, False, ""
        self.crew = WorkerPool(1, play_parts, job | {"mine": str(folder)})
        self.ears = self.crew.heard(stopping, 0)

    def news(self) -> list[Told]:
        """What it told since. When it is over nothing more will come, and if it was lost the reason says why; misuse is raised."""
        told = list[Told]()
        try:
            while len(told) < MANY and (one := next(self.ears)):
                told.append(one)
        except StopIteration:
            self.over = True
        except (EngineError, RuntimeError):
            says = self.crew.reasons[0]["says"]
            self.over, self.reason = (
                True,
                f"failed ({says.splitlines()[0]})" if says else f"was ended {self.crew.ending(0)}",
            )
        if self.over:
            self.crew.end()
        return told

    def __enter__(self) -> PoolWorker:
        return self

    def __exit__(self, *why: object) -> None:
        self.crew.end()


@contextmanager
def at_once(speak: Speak) -> Iterator[None]:
    """Let processes compute on a GPU at the same time: by NVIDIA's MPS where it is installed, unless it serves already.

    Without it they take turns.
    """
    if not shutil.which(MPS) or (Path(os.environ.get(PIPE, USUAL)) / "control").exists():
        yield
        return
    before = {name: os.environ.get(name) for name in (PIPE, LOG)}
    with tempfile.TemporaryDirectory(prefix="askew-mps-") as folder:
        for name in before:
            os.environ[name] = str(Path(folder) / name.split("_")[2].lower())
            Path(os.environ[name]).mkdir()
        serves = order("-d")
        if not serves:
            speak(f"{MPS} did not start; the processes take turns on the GPU")
        try:
            yield
        finally:
            if serves and not order(standard_input="quit\n"):
                speak(f"{MPS} did not end; end it by its process id")
            for name, value in before.items():
                os.environ.pop(name)
                os.environ |= {} if value is None else {name: value}


def order(*words: str, standard_input: str = "") -> bool:
    """Did MPS do as it was told? A daemon would keep a pipe from its output open, so that goes nowhere."""
    nowhere = subprocess.DEVNULL
    try:
        done = subprocess.run(
            [MPS, *words], input=standard_input, text=True, stdout=nowhere, stderr=nowhere, timeout=LONG, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


# a process ------------------------------------------------------------------------------------------------------


def play_parts(job: Told, say: Say) -> None:
    """Take one part after the other, as long as there are any, and tell of every round."""
    todo, mine = Path(job["todo"]), Path(job["mine"])

    def watch(run: Run, record: Record | None) -> None:
        run.facts["processes"] = job["processes"]  # whose time is not a run's own
        begun = {"begun": {"rounds": run.rounds, "facts": run.facts}}
        say({"run": run.name} | (begun if record is None else {"record": record, "facts": run.facts}))

    while paths := sorted(todo.iterdir()):
        try:
            part = paths[0].rename(mine / paths[0].name)
        except FileNotFoundError:
            continue  # another was faster
        for run in play_all([Config.build(page) for page in json.loads(part.read_text())], job["out"], watch=watch):
            if not run.finished:
                return
            say({"run": run.name, "ended": True})
