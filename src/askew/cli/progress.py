"""How far a long command is: bars on a terminal, elsewhere a line at least every half minute."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from rich.console import Console

from ..experiment.config import Config
from ..experiment.store import Record, Run
from ..report import terminal
from ..reproduction.schedule import RunSchedule

LINE_SECONDS = 30.0  # seconds between two lines, away from a terminal


class ExperimentProgress(terminal.ProgressDisplay):
    """One bar for all runs of an experiment, which differ in more than their method."""

    def __call__(self, run: Run, record: Record | None) -> None:
        self.trained_rounds += record is not None
        if record is not None:
            self.warn(run)
        self.parts[run.name] = len(run.rounds) / int(run.config["rounds"])
        if self.whole is not None:
            self.bars.update(self.whole, completed=self.done + sum(self.parts.values()))


class RegularLines:
    """Prints a line every LINE_SECONDS where there is no terminal.

    It has a thread of its own, so that lines come while a network is compiled or a round takes minutes.
    """

    def __init__(self, console: Console, text: Callable[[], str]) -> None:
        self.console, self.text, self.over = console, text, threading.Event()
        self.thread = threading.Thread(target=self.print_lines, daemon=True)

    def print_lines(self) -> None:
        """Print until the command has ended."""
        while not self.over.wait(LINE_SECONDS):
            self.console.print(self.text(), highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        if not self.console.is_terminal:
            self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.over.set()


class RoundCount:
    """Counts the rounds of several runs; it is called after each."""

    def __init__(self, configs: Sequence[Config]) -> None:
        self.total = sum(config.rounds for config in configs)
        self.done: dict[str, int] = {}  # rounds by name of the run
        self.trained, self.began = 0, time.monotonic()  # rounds trained by this command, and since when

    def __call__(self, run: Run, record: Record | None) -> None:
        self.done[run.name] = len(run.rounds)
        self.trained += record is not None

    def text(self) -> str:
        """How many rounds are done, how fast, and how long the others will take."""
        done, rate = sum(list(self.done.values())), self.trained / (time.monotonic() - self.began)
        return rounds_text(done, self.total, rate)


def rounds_text(done: int, total: int, rate: float) -> str:
    """So many rounds, a second and in all: "120 of 400 rounds, 3.2 a second, 87.5 s left"."""
    pace = f"{rate:.3g} a second, {terminal.duration((total - done) / rate)} left" if rate else "none yet in this call"
    return f"{done:,} of {total:,} rounds, {pace}"


def queue_text(schedule: RunSchedule, began: float) -> str:
    """How far a queue is: the time, the results so far and what is being trained."""
    now, parts = time.monotonic(), [part for e in schedule.experiments for part in list(e.parts)]
    limit = f" of {terminal.duration(schedule.deadline - began)}" if schedule.deadline < float("inf") else ""
    done = sum(e.done for e in schedule.experiments)
    texts = [f"{terminal.duration(now - began)}{limit}", f"{done} result{'s' * (done != 1)}"]
    for part in parts:
        p, runs = part.runs[0], len(part.runs)
        name = f"{p.experiment} {p.case} {p.method}" + f" and {runs - 1} more" * (runs > 1)
        texts.append(
            f"{name}: {rounds_text(sum(list(part.rounds.values())), part.total_rounds, part.rounds_per_second)}"
        )
    return " · ".join(texts)
