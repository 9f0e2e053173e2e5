"""`askew reproduce --queue`: many experiments in one command, for as long as there is time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..core.records import Record
from ..core.text import count_text
from ..engine.settings import EngineSettings
from ..experiment.store import Run, write_text
from ..report import terminal
from ..report.plain_table import plain_table
from ..reproduction.queue import QueueEntry, prepare_queue, queue_schedule, run_queue
from ..reproduction.queue_plan import EntryPlan, plan_queue, sort_entries
from ..reproduction.schedule import ScheduledExperiment
from .options import PlainConsole, exit_with_command, interruptible, print_json, print_rich
from .progress import RegularLines, queue_text

H200 = "NVIDIA H200"  # the device whose times the list and plans give


class QueueOptions(NamedTuple):
    """What the command says of a queue, besides its file."""

    scale: str
    engine: EngineSettings
    out: Path
    results: Path
    processes: int
    seconds: float | None  # of --stop-after
    as_json: bool
    again: str  # the command that goes on


def run_queue_file(path: Path, options: QueueOptions) -> None:
    """Train what is missing of a queue's entries, within the given time, and say what was done."""
    began, console = time.monotonic(), PlainConsole(stderr=True)
    _, _, out, results, processes, seconds, as_json, again = options
    entries, experiments = prepare_queue(path, results, options.scale, options.engine)
    left = None if seconds is None else seconds - (time.monotonic() - began)
    schedule = queue_schedule(experiments, results, processes, left)
    said = set[str]()  # names of runs of which it was said that they diverged

    def say(text: str) -> None:
        console.print(Text(text, terminal.QUIET), soft_wrap=True)

    def watch(run: Run, record: Record | None) -> None:
        if (sentence := run.facts.get("diverged")) and run.name not in said:
            said.add(run.name)
            planned = schedule.begun[run.name].planned
            say(f"{planned.experiment} {planned.case} {planned.method}, seed {planned.seed}: {sentence}")

    stopped, done = False, 0
    with interruptible(console, again), RegularLines(console, lambda: queue_text(schedule, began)):
        for run in run_queue(experiments, schedule, out, watch, say):
            if not run.over:
                stopped = True
                break
            planned, done = schedule.begun[run.name].planned, done + 1
            name = f"{planned.experiment} {planned.case} {planned.method}, seed {planned.seed}"
            say(f"{done}: {name}: {terminal.headline(run)}")
    wall = time.monotonic() - began
    if as_json:
        print_json({"seconds": wall, "entries": [row_json(*pair) for pair in zip(entries, experiments, strict=True)]})
    else:
        print_rich(queue_table(entries, experiments, wall, processes))
    lost = sum(len(e.lost) for e in experiments)
    if stopped and time.monotonic() < schedule.deadline:
        exit_with_command(console, "stopped, all that was done is stored", again)
    if lost:
        what = f"{count_text(lost, 'run')} failed or lost a process, all others are stored"
        exit_with_command(console, what, again, 1)


def show_queue_plan(path: Path, options: QueueOptions, sorted_file: Path | None) -> None:
    """Print what the entries would bring and take; write them to a file, the most numbers a minute first."""
    PlainConsole(stderr=True).print(Text("planning what is missing: up to a minute", terminal.QUIET))
    entries, experiments = prepare_queue(path, options.results, options.scale, options.engine)
    plans = plan_queue(entries, experiments, options.results, H200)
    if sorted_file is not None:
        write_text(sorted_file, "\n".join(entry.toml() for entry in sort_entries(plans)))
    if options.as_json:
        print_json([plan_json(plan) for plan in plans])
    else:
        print_rich(queue_plan_table(plans))


def queue_plan_table(plans: Sequence[EntryPlan]) -> RenderableType:
    """The plan of a queue for a reader."""
    table = plain_table(
        *("entry", "missing\nruns", "stored\nbefore", "printed\nnumbers", "claims"),
        *(f"seconds on\n{H200}", "numbers\na minute"),
    )
    table.columns[0].justify = "left"
    for plan in plans:
        seconds = "unknown" if plan.seconds is None else f"{plan.seconds:,.0f}"
        rate = "–" if plan.numbers_per_minute is None else f"{plan.numbers_per_minute:.2g}"
        counts = (plan.missing, plan.stored, plan.numbers, len(plan.claims))
        table.add_row(plan.entry.title, *map(str, counts), seconds, rate)
    note = (
        "Numbers and claims: those that are not measured or decided and need the missing runs; entries may share runs."
    )
    return Group(table, Text(f"\n{note}", terminal.QUIET))


def plan_json(plan: EntryPlan) -> dict[str, object]:
    """The plan of an entry for a script."""
    return given_keys(plan.entry) | {
        "missing": plan.missing,
        "stored": plan.stored,
        "numbers": plan.numbers,
        "claims": list(plan.claims),
        "estimated_seconds": plan.seconds,
        "numbers_per_minute": plan.numbers_per_minute,
    }


def given_keys(entry: QueueEntry) -> dict[str, object]:
    """What the file says of an entry."""
    return {key: value for key, value in entry._asdict().items() if value not in (None, ())}


def queue_table(
    entries: Sequence[QueueEntry], experiments: Sequence[ScheduledExperiment], wall: float, processes: int
) -> Table:
    """What became of each entry, and of all."""
    table = plain_table("entry", "runs\ndone", "stored\nbefore", "left", "seconds", "results\na second")
    table.columns[0].justify = "left"
    counts = [(e.done, e.stored, e.left, e.spent / processes) for e in experiments]
    for entry, row in zip(entries, counts, strict=True):
        table.add_row(entry.title, *row_texts(*row))
    table.add_section()
    done, stored, left = (sum(row[n] for row in counts) for n in range(3))
    table.add_row("all", *row_texts(int(done), int(stored), int(left), wall))
    return table


def row_texts(done: int, stored: int, left: int, seconds: float) -> list[str]:
    """One row of the table of a queue."""
    rate = f"{done / seconds:.3g}" if done and seconds else "–"
    return [str(done), str(stored), str(left), f"{seconds:.0f}", rate]


def row_json(entry: QueueEntry, e: ScheduledExperiment) -> dict[str, object]:
    """What became of an entry, for a script; `seconds` are those of its parts, several of which may run at a time."""
    counts = {"done": e.done, "stored": e.stored, "left": e.left, "lost": len(e.lost), "too_long": len(e.too_long)}
    return given_keys(entry) | counts | {"seconds": e.spent} | ({"problem": e.problem} if e.problem else {})
