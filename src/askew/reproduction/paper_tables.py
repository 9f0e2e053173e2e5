"""Experiments in a terminal: the list of all, the plan of one, and its table beside the paper's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple, TypeGuard

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..core.text import count_text
from ..report.plain_table import plain_table
from ..report.tables import sample_std
from ..report.terminal import QUIET, pairs, size
from .comparison import TableCell
from .cost import Estimate, RunTimes, short_count
from .plan import Reproduction, chosen_points
from .planned_runs import PlannedRun, hyper_text, settings_text

METRIC_HEADINGS = {
    "best_accuracy": "best\naccuracy, %",
    "last_accuracy": "last\naccuracy, %",
    "best_round": "round of\nthe best",
    "rounds_to": "rounds to\ntarget",
    "speedup": "speed-up",
    "seconds_per_round": "seconds\na round",
    "last_loss": "last test\nloss",
    "set_size_raps": "classes in a set\n(RAPS, 90%)",
    "seconds_clients": "seconds of the\nclients' part",
    "seconds_server": "seconds of the\nserver's part",
    "bytes_up": "bytes up\na round",
    "bytes_down": "bytes down\na round",
}
# Formats of numbers by metric; ".4g" where none is given.
FORMATS = {"best_accuracy": ".2f", "last_accuracy": ".2f", "speedup": ".2f", "best_round": ".0f", "rounds_to": ".0f"}
MAX_NAMES = 10  # runs that are named one by one
# units of time, their seconds, and the seconds from which they are used
UNITS = (
    *(("years", 31_557_600, 34_560_000), ("days", 86_400, 360_000), ("h", 3600, 6000)),
    *(("min", 60, 100), ("s", 1, 1), ("ms", 0.001, 0)),
)


class ExperimentEntry(NamedTuple):
    """One line of the list of experiments."""

    id: str
    where: str
    title: str
    runs: int
    samples: int
    seconds: float | None


class PlanCost(NamedTuple):
    """What the missing runs of an experiment cost."""

    samples: int
    times: Mapping[str, RunTimes]  # by device
    memory: int | None  # bytes of the largest run; None where nothing is missing
    together: int  # runs that share a GPU


def long_duration(seconds: float | None) -> str:
    """A time that may be long: with three digits."""
    if seconds is None:
        return "unknown"
    unit, length = time_unit(seconds)
    text = f"{seconds / length:.3g} {unit}"
    return f"{text} ({range_text(seconds)})" if is_range(seconds) else text


def range_text(estimate: Estimate) -> str:
    """The range of an estimate with two digits, in the unit of the estimate itself."""
    unit, length = time_unit(estimate)
    low, high = (f"{v:.0f}" if v >= 10 else f"{v:.2g}" for v in (estimate.low / length, estimate.high / length))
    return f"{low} to {high} {unit}"


def time_unit(seconds: float) -> tuple[str, float]:
    """The unit in which a time is given, and how many seconds it has."""
    return next((unit, length) for unit, length, least in UNITS if seconds >= least)


def times_text(times: RunTimes) -> str:
    """How long runs take, and of which networks that is not known."""
    if not times.untimed:
        return long_duration(times.timed)
    others = " and ".join(f"{count_text(count, 'run')} of {network}" for network, count in times.untimed.items())
    others += ", which was never timed there" if len(times.untimed) == 1 else ", which were never timed there"
    return f"{long_duration(times.timed)}, and {others}" if times.timed else f"unknown: {others}"


def is_range(seconds: float) -> TypeGuard[Estimate]:
    """Whether a time is an estimate of some runs, which has a range."""
    return isinstance(seconds, Estimate) and seconds > 0


def experiment_list(entries: Iterable[ExperimentEntry], device: str) -> RenderableType:
    """All experiments with what they cost on a device."""
    table = plain_table()
    table.add_column("experiment", style="bold", no_wrap=True)
    table.add_column("what it is")
    for heading in ("runs", "samples", f"on an\n{device}"):
        table.add_column(heading, justify="right")
    for entry in entries:
        time = long_duration(entry.seconds).replace(" (", "\n(")  # the range in a line of its own
        cost = [str(entry.runs), short_count(entry.samples), time] if entry.runs else ["–"] * 3
        table.add_row(entry.id, Text.assemble(entry.title, "\n", (entry.where, QUIET)), *cost)
    note = (
        "Runs and samples at full scale and with the published seeds; times follow from measured speeds, and eight "
        "of ten lie in the range beside them. "
        "What one will do: askew reproduce ID --plan"
    )
    return Group(table, Text(f"\n{note}", QUIET))


def plan_table(reproduction: Reproduction, cost: PlanCost) -> RenderableType:
    """What will be run and what it will cost, then what the paper leaves open."""
    e, planned, missing = reproduction.experiment, reproduction.planned, len(reproduction.missing)
    runs = {p.key for p in planned}
    rows: list[tuple[str, RenderableType]] = [
        ("experiment", f"{e.id}: {e.title} ({e.where})"),
        ("scale", reproduction.scale + ("" if reproduction.scale == "full" else ", not comparable with the paper")),
    ]
    if e.trains:
        memory = "nothing is left to run"
        if cost.memory:
            memory = f"{size(cost.memory)} of uploads and states in the largest run; activations come on top"
            memory += f"; up to {cost.together} runs share a GPU"
        rows += [
            ("runs", f"{len(runs):,}, of which {len(runs) - missing:,} are finished"),
            ("samples", f"{short_count(cost.samples)} still to be trained on"),
            *((f"time on {device}", times_text(times)) for device, times in cost.times.items()),
            ("memory", memory),
        ]
    if tuned := chosen_points(reproduction, planned):
        text = f"{len(tuned)} times, by the first seed; further seeds are run at the chosen points alone"
        rows.append(("tuning", text))
    if planned:
        rows.append(("seeds", ", ".join(map(str, dict.fromkeys(p.seed for p in planned)))))
    rows += [
        ("" if n else "left open", Text.assemble((f"{key} ", "cyan"), text))
        for n, (key, text) in enumerate(e.choices.items())
    ]
    # notes are about the paper's numbers, with which other scales are not compared
    rows += [("note", Text(note, "yellow")) for note in e.notes if reproduction.scale == "full"]
    return pairs(rows)


def comparison_tables(reproduction: Reproduction, cells: Sequence[TableCell]) -> RenderableType:
    """Ours beside the paper's, a table for each metric; at other scales than the full one ours alone."""
    parts: list[RenderableType] = []
    names = case_names(reproduction)
    for metric in dict.fromkeys(cell.metric for cell in cells):
        shown = [cell._replace(case=names.get(cell.case, cell.case)) for cell in cells if cell.metric == metric]
        parts += [metric_table(shown, reproduction.scale == "full"), Text()]
    return Group(*parts, Text(table_remarks(reproduction, cells), QUIET))


def case_names(reproduction: Reproduction) -> dict[str, str]:
    """The cases as they are shown: at smoke scale with the data that are used in place of the paper's."""
    if reproduction.scale != "smoke":
        return {}
    return {p.case: f"{p.case}, on {p.config.tables()['data']['name']}" for p in reproduction.planned}


def metric_table(cells: Sequence[TableCell], with_paper: bool) -> Table:
    """The cells of one metric, a row for each case and method."""
    tuned, held_out = any(cell.hyper for cell in cells), any(cell.held_out for cell in cells)
    left = ["case", "method", *(["at"] if tuned else [])]
    right = ["paper", "differ-\nence"] if with_paper else []
    right += ["chosen on one half,\nmeasured on the other"] if held_out else []
    table = plain_table(*left, METRIC_HEADINGS.get(cells[0].metric, cells[0].metric), *right)
    for column in table.columns[: len(left)]:
        column.justify = "left"
    table.columns[0].no_wrap = True
    for n, cell in enumerate(cells):
        case = cell.case if n == 0 or cells[n - 1].case != cell.case else ""
        row = [case, cell.method, *([cell.hyper] if tuned else []), mean_text(cell.values, cell)]
        if with_paper:
            row += [cell.printed.text if cell.printed else "–"]
            row += ["–" if cell.difference is None else f"{cell.difference:+z.2f}"]
        if held_out:
            elsewhere = "" if cell.held_out_hyper == cell.hyper else f"\n{cell.held_out_hyper}"
            row += [mean_text(cell.held_out, cell) + elsewhere if cell.held_out else "–"]
        table.add_row(*row)
    return table


def table_remarks(reproduction: Reproduction, cells: Sequence[TableCell]) -> str:
    """Sentences below the tables: seeds, scale and what is still missing."""
    seeds = sorted({seed for cell in cells for seed in cell.seeds})
    sentences = [f"Seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}." if seeds else "Nothing was run."]
    sentences += ["Means ± one standard deviation."] if len(seeds) > 1 else []
    scale, missing = reproduction.scale, len(reproduction.missing)
    if scale != "full":
        sentences.append(
            f"Scale {scale}: {settings_text(reproduction.planned)}; not comparable with the paper's numbers."
        )
    sentences += [f"Still to be made: {count_text(missing, 'run')}."] if missing else []
    return " ".join(sentences)


def mean_text(values: Sequence[float], cell: TableCell) -> str:
    """Mean and deviation; a target that some seed missed lies beyond the last round."""
    if not all(map(math.isfinite, values)):
        return f"> {cell.limit}"
    form, std = FORMATS.get(cell.metric, ".4g"), sample_std(values)
    return f"{fmean(values):{form}}" + ("" if std is None else f" ± {std:{form}}")


def run_names(runs: Sequence[PlannedRun]) -> str:
    """Runs by case, method, grid point and seed; the first of many."""
    names = [
        " ".join(word for word in (p.case, p.method, hyper_text(p.hyper), f"seed {p.seed}") if word)
        for p in runs[:MAX_NAMES]
    ]
    return ", ".join([*names, *([f"and {len(runs) - MAX_NAMES} more"] if len(runs) > MAX_NAMES else [])])


def text_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table of given texts, the first column aligned to the left."""
    table = plain_table(*headings)
    table.columns[0].justify = "left"
    for row in rows:
        table.add_row(*row)
    return table
