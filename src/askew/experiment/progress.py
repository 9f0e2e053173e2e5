"""How far runs are that a script or a notebook trains: one line that is renewed, or a line every half minute."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from ..core.records import Record
from .store import Run

LINE_SECONDS = 30.0  # between two lines, where a line cannot be renewed
LIVE_SECONDS = 0.2  # between two renewals of a line
QUIET_SECONDS = 0.5  # a run that is shorter shows nothing


def in_notebook() -> bool:
    """Does this process run the cells of a notebook?"""
    shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


class ScriptProgress:
    """Shows how far runs are on standard error; it is called before the first round of each and after every round."""

    def __init__(
        self, runs: int = 1, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.runs, self.stream, self.clock = runs, stream or sys.stderr, clock
        self.live = self.stream.isatty() or in_notebook()
        self.begun: dict[str, tuple[float, int]] = {}  # by name of a run: when it began, after how many rounds
        self.shown, self.width = clock() + (QUIET_SECONDS - LIVE_SECONDS if self.live else 0.0), 0
        self.text = ""

    def __call__(self, run: Run, record: Record | None) -> None:
        now = self.clock()
        if record is None:
            self.begun[run.name] = now, len(run.rounds)
            return
        self.text = self.describe(run, now)
        if now - self.shown >= (LIVE_SECONDS if self.live else LINE_SECONDS):
            self.shown = now
            self.write(self.text)

    def describe(self, run: Run, now: float) -> str:
        """How far a run is, and how long the other rounds will take if they are like those before."""
        done, rounds = len(run.rounds), int(run.config["rounds"])
        accuracy, loss = run.last("accuracy"), run.last("train_loss")
        which = f"run {len(self.begun)} of {self.runs}, " if self.runs > 1 else ""
        parts = [f"{which}{run.algorithm}, seed {run.config.get('seed', 0)}: round {done} of {rounds}"]
        parts += [f"accuracy {100 * accuracy:.1f}%"] if accuracy is not None else []
        parts += [f"training loss {loss:.3g}"] if loss is not None else []
        began, before = self.begun.get(run.name, (now, 0))
        if before < done < rounds:
            parts.append(f"{time_left((now - began) * (rounds - done) / (done - before))} left")
        return ", ".join(parts)

    def write(self, text: str) -> None:
        """Write a line, over the one before where that can be done."""
        if self.live:
            text = text[: max(20, shutil.get_terminal_size().columns - 1)]
            self.stream.write(f"\r{text:<{self.width}}")
            self.width = len(text)
        else:
            self.stream.write(f"{text}\n")
        self.stream.flush()

    def close(self) -> None:
        """End the line that was renewed, with the last round in it."""
        if self.live and self.width:
            self.write(self.text)
            self.stream.write("\n")
            self.stream.flush()


def time_left(seconds: float) -> str:
    """A time in whole seconds, minutes or hours."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
