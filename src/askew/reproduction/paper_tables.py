"""What an experiment of a paper looks like in a terminal: the list of all, its plan, its table beside the paper's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, stdev
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

from ..report.terminal import QUIET, duration, pairs, plain_table, size
from .papers import Planned, words
from .reproduce import Cell, Reproduction, choices

WORDS = {
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
FORMS = {"best_accuracy": ".2f", "last_accuracy": ".2f", "speedup": ".2f", "best_round": ".0f", "rounds_to": ".0f"}
MANY = 10  # runs that are told one by one
LATER = 6000  # seconds from which hours read better


class Listed(NamedTuple):
    """One line of the list of experiments."""

    id: str
    where: str
    title: str
    runs: int
    samples: int
    seconds: float | None


def amount(count: float) -> str:
    """A large number in few letters."""
    for limit, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if count >= limit:
            return f"{count / limit:.3g}{unit}"
    return f"{count:.0f}"


def hours(seconds: float | None) -> str:
    return "unknown" if seconds is None else duration(seconds) if seconds < LATER else f"{seconds / 3600:.3g} h"


def listing(entries: Iterable[Listed], device: str) -> RenderableType:
    shown = plain_table()
    shown.add_column("experiment", style="bold", no_wrap=True)
    shown.add_column("what it is")
    for heading in ("runs", "samples", f"on an\n{device}"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for entry in entries:
        cost = [str(entry.runs), amount(entry.samples), hours(entry.seconds)] if entry.runs else ["–"] * 3
        shown.add_row(entry.id, Text.assemble(entry.title, "\n", (entry.where, QUIET)), *cost)
    notes = "Runs and samples at full scale and with the published seeds; times are rough. What one will do: askew reproduce ID --plan"
    return Group(shown, Text(f"\n{notes}", QUIET))


def planned(
    begun: Reproduction, samples: int, times: Mapping[str, float | None], memory: int | None, together: int
) -> RenderableType:
    """What will be run and what it will cost, then what the paper leaves open."""
    e, runs, missing = begun.experiment, {(p.digest, p.seed) for p in begun.planned}, len(begun.missing)
    rows: list[tuple[str, RenderableType]] = [
        ("experiment", f"{e.id}: {e.title} ({e.where})"),
        ("scale", begun.scale + ("" if begun.scale == "full" else ", not comparable with the paper")),
    ]
    if e.trains:
        held = (
            f"{size(memory)} of uploads and states in the largest run; activations come on top"
            if memory
            else "nothing is left to run"
        )
        rows += [
            ("runs", f"{len(runs):,}, of which {len(runs) - missing:,} are finished"),
            ("samples", f"{amount(samples)} still to be trained on"),
            *((f"time on {device}", hours(told)) for device, told in times.items()),
            ("memory", held + (f"; up to {together} runs share a GPU" if memory else "")),
        ]
    if tuned := choices(begun, begun.planned):
        rows.append(
            ("tuning", f"{len(tuned)} times, by the first seed; further seeds are run at the chosen points alone")
        )
    rows += [("seeds", ", ".join(map(str, dict.fromkeys(p.seed for p in begun.planned))))] if begun.planned else []
    rows += [
        ("" if n else "left open", Text.assemble((f"{key} ", "cyan"), what))
        for n, (key, what) in enumerate(e.choices.items())
    ]
    rows += [("note", Text(note, "yellow")) for note in e.notes]
    return pairs(rows)


def compared(begun: Reproduction, cells: Sequence[Cell]) -> RenderableType:
    """Ours beside the paper's, a table for each figure; at other scales than the full one ours alone."""
    full, parts = begun.scale == "full", list[RenderableType]()
    for metric in dict.fromkeys(cell.metric for cell in cells):
        mine = [cell for cell in cells if cell.metric == metric]
        tuned, held = any(cell.hyper for cell in mine), any(cell.held for cell in mine)
        left = ["case", "method", *(["at"] if tuned else [])]
        right = [
            *(["paper", "differ-\nence"] if full else []),
            *(["chosen on one half,\nmeasured on the other"] if held else []),
        ]
        shown = plain_table(*left, WORDS.get(metric, metric), *right)
        for column in shown.columns[: len(left)]:
            column.justify = "left"
        for n, cell in enumerate(mine):
            case = cell.case if n == 0 or mine[n - 1].case != cell.case else ""
            row = [case, cell.method, *([cell.hyper] if tuned else []), spoken(cell.values, cell)]
            row += [printed(cell), "–" if cell.difference is None else f"{cell.difference:+.2f}"] if full else []
            elsewhere = "" if cell.held_hyper == cell.hyper else f"\n{cell.held_hyper}"
            shown.add_row(*row, *([spoken(cell.held, cell) + elsewhere if cell.held else "–"] if held else []))
        parts += [shown, Text()]
    return Group(*parts, Text(remarks(begun, cells), QUIET))


def remarks(begun: Reproduction, cells: Sequence[Cell]) -> str:
    """What the headings leave unsaid."""
    seeds = sorted({seed for cell in cells for seed in cell.seeds})
    words = [f"Seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}." if seeds else "Nothing was run."]
    words += ["Means ± one standard deviation."] if len(seeds) > 1 else []
    if begun.scale != "full":
        words.append(f"Scale {begun.scale}: not the published settings, and not comparable with the paper's numbers.")
    words += [f"{len(begun.missing)} runs are still to be made."] if begun.missing else []
    return " ".join(words)


def spoken(values: Sequence[float], cell: Cell) -> str:
    """Mean and deviation; a target that some seed missed lies beyond the last round."""
    if not all(map(math.isfinite, values)):
        return f"> {cell.limit}"
    form = FORMS.get(cell.metric, ".4g")
    return f"{fmean(values):{form}}" + (f" ± {stdev(values):{form}}" if len(values) > 1 else "")


def printed(cell: Cell) -> str:
    return (
        "–"
        if cell.printed is None
        else cell.printed.value + (f" ± {cell.printed.spread}" if cell.printed.spread else "")
    )


def called(runs: Sequence[Planned]) -> str:
    """Runs by name, the first of many."""
    names = [
        " ".join(word for word in (p.case, p.method, words(p.hyper), f"seed {p.seed}") if word) for p in runs[:MANY]
    ]
    return ", ".join([*names, *([f"and {len(runs) - MANY} more"] if len(runs) > MANY else [])])


def figures(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> RenderableType:
    """A plain table of ready words."""
    shown = plain_table(*headings)
    shown.columns[0].justify = "left"
    for row in rows:
        shown.add_row(*row)
    return shown
