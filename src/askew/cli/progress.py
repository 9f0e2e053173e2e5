"""How far a long command is: bars on a terminal, elsewhere a line at least every half minute."""

from __future__ import annotations

import threading
import time
import tomllib
from collections.abc import Callable, Sequence
from math import ceil
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from ..core.records import Record
from ..core.text import count_text
from ..experiment.store import DIVERGED, Run
from ..report import terminal
from ..report.tables import group_runs, shorten_label

if TYPE_CHECKING:
    from ..experiment.config import Config
    from ..reproduction.schedule import RunSchedule

LINE_SECONDS = 30.0  # seconds between two lines, away from a terminal
MAX_LINES = 20  # of progress, for one run where there is no terminal
WARM_ROUNDS = 3  # rounds after which their time is known
LONG_SECONDS = 60.0  # from which on the remaining time is shown in lines of progress
VERY_LONG_SECONDS = 30 * 86_400.0  # from which on a run gets a warning: thirty days


def remaining_seconds(run: Run) -> float:
    """How long the remaining rounds take if they are like the last ones; evaluation is not counted."""
    last = [float(record["seconds"]) for record in run.rounds[-WARM_ROUNDS:]]
    return min(last, default=0.0) * (int(run.config["rounds"]) - len(run.rounds))


def quality_text(run: Run) -> str:
    """The last accuracy and training loss of a line of progress; in a regression the losses, of test and training."""
    accuracy, test, train = run.last("accuracy"), run.last("loss"), run.last("train_loss")
    if accuracy is None and test is not None:
        return f" · test loss {terminal.digits(test)} · training loss {terminal.digits(train)}"
    text = f" · accuracy {terminal.percent(accuracy)}" if accuracy is not None else ""
    return text + (f" · training loss {train:.2f}" if train is not None else "")


class ProgressDisplay:
    """Shows the progress of runs, which it is called with after every round.

    On a terminal with live bars; elsewhere one run has a line now and then, and several have a line each.
    """

    def __init__(
        self,
        console: Console,
        configs: Sequence[Config] = (),
        title: str = "",
        warnings: Console | None = None,
    ) -> None:
        """Without configurations there is one run. `warnings` are printed there, if not on the console itself."""
        self.console, self.runs, self.warnings = console, max(1, len(configs)), warnings or console
        self.done = 0  # runs that ended
        self.trained_rounds = 0  # rounds that were trained
        self.said: set[tuple[str, str]] = set()  # names of runs, and the warnings that were given about them
        planned = [Run(tomllib.loads(config.toml()), facts={"name": config.name()}) for config in configs]
        # labels of the runs by name, as the table of all will have them
        self.labels = {run.name: g.title for g in group_runs(planned) for run in g.runs}
        self.parts: dict[str, float] = {}  # the done part of runs in progress, by name
        columns = (
            TextColumn("{task.description}"),
            BarColumn(None),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(compact=True),
        )
        self.bars = Progress(*columns, console=console, transient=True, disable=not console.is_terminal, expand=True)
        # the bar of all runs, if there are several, and that of one run
        self.whole = self.bars.add_task(title, total=self.runs, text=self.count()) if self.runs > 1 else None
        self.bar = self.bars.add_task("", total=None, visible=False, text="")

    def __enter__(self) -> Self:
        self.bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bars.stop()

    def __call__(self, run: Run, record: Record | None) -> None:
        """Show a run before its first round (no record) and after each."""
        if record is None:
            self.begin(run)
        else:
            self.trained_rounds += 1
            self.warn(run)
        done, rounds = len(run.rounds), int(run.config["rounds"])
        text = f"round {done}/{rounds}" + quality_text(run)
        text += f" · ε {run.last('epsilon'):.3g}" if run.last("epsilon") is not None else ""
        left = remaining_seconds(run)
        is_long = record is not None and not self.console.is_terminal and done < rounds and left >= LONG_SECONDS
        text += f" · {terminal.long_time(left)} left" if is_long else ""
        self.bars.update(self.bar, completed=done, text=text)
        self.parts[run.name] = done / rounds
        if self.whole is not None:
            self.bars.update(self.whole, completed=self.done + sum(self.parts.values()))
            return
        is_line_due = done % ceil(rounds / MAX_LINES) == 0 or done == rounds
        if is_line_due and record is not None and not self.console.is_terminal:
            self.console.print(text, highlight=False, soft_wrap=True)

    def warn(self, run: Run) -> None:
        """Say, once, that a run has diverged, draws numbers that no seed decides, or will take very long."""
        warnings = {kind: str(run.facts.get(kind, "")) for kind in ("diverged", "draws")}
        left = remaining_seconds(run)
        if len(run.rounds) >= WARM_ROUNDS and left > VERY_LONG_SECONDS:
            rounds = int(run.config["rounds"]) - len(run.rounds)
            warnings["long"] = (
                f"the remaining {rounds:,} rounds will take {terminal.long_time(left)} at "
                f"{terminal.duration(run.rounds[-1]['seconds'])} each; lower rounds, or stop with Ctrl-C, which stores "
                "what is done"
            )
        for kind, text in warnings.items():
            if text and (run.name, kind) not in self.said:
                self.said.add((run.name, kind))
                self.say_warning(f"{self.run_title(run)}: {text}" if self.runs > 1 else text)

    def begin(self, run: Run) -> None:
        """Say what is about to be trained and set the bar up for it."""
        if self.runs > 1 and not self.done and not self.parts:
            rounds = count_text(run.config["rounds"], "round")
            self.say(f"{self.runs} runs on {terminal.federation_text(run)}, {rounds} each")
        if self.runs == 1:
            self.say(f"{run.algorithm} on {terminal.federation_text(run)}")
            self.say(f"engine {terminal.engine_text(run)}")
            if run.facts.get("remark"):
                self.say(f"note: {run.facts['remark']}", "yellow")
            if run.rounds:
                self.say(f"going on after round {len(run.rounds)} of {run.config['rounds']}", "yellow")
        name = self.run_title(run) if self.runs > 1 else run.algorithm
        self.bars.reset(self.bar, total=run.config["rounds"], completed=len(run.rounds), visible=True, description=name)

    def end(self, run: Run) -> None:
        """Count a run that ended."""
        self.done += 1
        was_trained = self.parts.pop(run.name, None) is not None
        if self.whole is not None:
            self.bars.update(self.whole, completed=self.done, text=self.count())
        if not self.console.is_terminal and was_trained:
            why = "it diverged" if run.facts.get("state") == DIVERGED else "its accuracy was high enough"
            early = f", stopped after round {len(run.rounds)} as {why}" if not run.finished else ""
            self.say(f"{self.count()}: {self.run_title(run)}: {terminal.headline(run)}{early}")

    def give_up(self, name: str) -> None:
        """Count a run that failed."""
        self.done += 1
        self.parts.pop(name, None)
        if self.whole is not None:
            self.bars.update(self.whole, completed=self.done, text=self.count())
        self.say(f"{self.count()}: {shorten_label(self.labels.get(name, name))}: failed", "yellow")

    def run_title(self, run: Run) -> str:
        return f"{shorten_label(self.labels.get(run.name, run.algorithm))}, seed {run.config['seed']}"

    def count(self) -> str:
        return f"{self.done}/{self.runs} runs"

    def say(self, text: str, style: str = terminal.QUIET) -> None:
        """Print a line above the bars."""
        self.console.print(Text(text, style), soft_wrap=not self.console.is_terminal)

    def say_warning(self, text: str) -> None:
        """Print a warning above the bars."""
        self.warnings.print(Text(f"warning: {text}", "yellow"), soft_wrap=not self.warnings.is_terminal)


class ExperimentProgress(ProgressDisplay):
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
    return f"{done:,} of {count_text(total, 'round')}, {pace}"


def queue_text(schedule: RunSchedule, began: float) -> str:
    """How far a queue is: the time, the results so far and what is being trained."""
    now, parts = time.monotonic(), [part for e in schedule.experiments for part in list(e.parts)]
    limit = f" of {terminal.duration(schedule.deadline - began)}" if schedule.deadline < float("inf") else ""
    done = sum(e.done for e in schedule.experiments)
    texts = [f"{terminal.duration(now - began)}{limit}", count_text(done, "result")]
    for part in parts:
        p, runs = part.runs[0], len(part.runs)
        name = f"{p.experiment} {p.case} {p.method}" + f" and {runs - 1} more" * (runs > 1)
        texts.append(
            f"{name}: {rounds_text(sum(list(part.rounds.values())), part.total_rounds, part.rounds_per_second)}"
        )
    return " · ".join(texts)
