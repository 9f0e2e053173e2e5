"""The comparison of a report: a table for each federation, with the best value of each column in bold."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import floor, log10
from typing import NamedTuple

from .figures import MAX_LINES
from .picture import COLOURS
from .tables import ComparisonRow, RunGroup, best_groups, best_words


class PageColumn(NamedTuple):
    """A column of the page's comparison."""

    key: str  # of a row of `table`
    heading: str
    unit: str = ""
    scale: float = 1  # from the row's unit to this one
    better: int = 0  # 1: more is better, −1: less is, 0: neither


COLUMNS = (
    PageColumn("seeds", "Seeds"),
    PageColumn("best_accuracy", "Best accuracy", "%", 100, 1),
    PageColumn("best_round", "at round"),
    PageColumn("final_accuracy", "Last accuracy", "%", 100, 1),
    PageColumn("worst_clients_accuracy", "Worst tenth of clients", "%", 100, 1),
    PageColumn("train_loss", "Training loss", better=-1),
    PageColumn("test_loss", "Test loss", better=-1),
    PageColumn("rounds", "Rounds"),
    PageColumn("rounds_to_target", "Rounds to target", better=-1),
    PageColumn("seconds_to_target", "Virtual time to target", "s", better=-1),
    PageColumn("speedup", "Speedup", "×", better=1),
    PageColumn("seconds_per_round", "Time a round", "ms", 1e3, -1),
    PageColumn("clock", "Virtual time", "s"),
    PageColumn("bytes_up", "Sent up", "MB", 1e-6, -1),
    PageColumn("bytes_down", "Sent down", "MB", 1e-6, -1),
    PageColumn("dropped", "Dropped", better=-1),
    PageColumn("lost_answers", "Lost answers", better=-1),
    PageColumn("epsilon", "ε", better=-1),
)
LOSSES, HUGE = ("train_loss", "test_loss"), 1e4  # columns with exponents where a value is as large
COUNTS = ("dropped", "lost_answers")  # columns that are shown where a value is not 0
WHOLE_NUMBERS = ("seeds", "best_round", "rounds", "rounds_to_target")  # columns without decimals
LONG = 20  # rows of a table, or configurations, above which they scroll in a box of their own
MAX_LETTERS = 24  # of a baseline's label in the heading of a column


def comparison_tables(federations: Sequence[Sequence[RunGroup]], rows: Sequence[ComparisonRow]) -> str:
    """A table for each federation; methods on different data are not compared."""
    parts = []
    for its in federations:
        heading = f"<h3>{escape(its[0].federation)}</h3>" if len(federations) > 1 else ""
        parts.append(heading + comparison_table(its, [r for r in rows if r["federation"] == its[0].federation]))
    return "\n".join(parts)


def comparison_table(groups: Sequence[RunGroup], rows: Sequence[ComparisonRow]) -> str:
    """The table of a federation's groups, with a note on its figures."""
    headings, several = [heading_cell("Method")], any(row["seeds"] > 1 for row in rows)
    numbered = zip(colour_numbers(groups), groups, rows, strict=True)
    cells = [[method_cell(number, g, row)] for number, g, row in numbered]
    baselines = sorted({r["baseline"] for r in rows if r["baseline"] is not None})
    compared = any(r["baseline"] not in (None, r["label"]) for r in rows)
    baselines = baselines if compared else []  # rounds to one's own best say nothing
    tasks = [g.task for g in groups]
    named = len(baselines) == 1 and len(baselines[0]) <= MAX_LETTERS
    for column in COLUMNS:
        if is_informative(column.key, rows, baselines):
            heading = column.heading
            if column.key == "rounds_to_target" and named:
                heading = f"Rounds to {baselines[0]}'s best"
            headings.append(heading_cell(heading, column.unit))
            for row_cells, cell in zip(cells, column_cells(column, tasks, rows, heading), strict=True):
                row_cells.append(cell)
    head, body = "".join(headings), "\n".join(f"<tr>{''.join(row)}</tr>" for row in cells)
    notes = ["Means over the seeds, ± one standard deviation."] if several else []
    notes += [target_note(rows, baselines)] if baselines and (several or not named) else []
    whole = f'<table class="methods"><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>'
    return in_box(whole, len(rows)) + (f'<p class="note">{escape(" ".join(notes))}</p>' if notes else "")


def target_note(rows: Sequence[ComparisonRow], baselines: Sequence[str]) -> str:
    """What the rounds are counted to."""
    targets = []
    for baseline in baselines:
        row = next(row for row in rows if row["baseline"] == baseline)
        targets.append(f"{percent_text(row['target'])}, {best_words(rows, baseline)}")
    return f"Rounds are counted to {'; '.join(targets)}."


def column_cells(column: PageColumn, tasks: Sequence[str], rows: Sequence[ComparisonRow], heading: str) -> list[str]:
    """The cells of one column, one for each row; the best value of a task is bold unless all are equal.

    Each holds its heading, which narrow pages show beside the value.
    """
    name = escape(f"{heading}, {column.unit}" if column.unit else heading)
    values = [None if row[column.key] is None else row[column.key] * column.scale for row in rows]
    form = number_form(column, [v for v in values if v is not None])
    texts = ["" if v is None else f"{v:{form}}" for v in values]
    cells = []
    for n, row in enumerate(rows):
        peers = [m for m, task in enumerate(tasks) if task == tasks[n] and values[m] is not None]
        best = max(peers, key=lambda m: column.better * (values[m] or 0), default=n)
        bold = column.better and texts[n] == texts[best] and len({texts[m] for m in peers}) > 1
        missed_target = column.key == "rounds_to_target" and row["target"] is not None
        missing = f"&gt; {row['rounds']:.0f}" if missed_target else "–"
        shown = (f"<b>{texts[n]}</b>" if bold else texts[n]) or missing
        std = row.get(f"{column.key}_std")
        shown += f'<span class="std"> ± {column.scale * std:{form}}</span>' if std is not None else ""
        value = "" if values[n] is None else values[n]
        cells.append(f'<td data-v="{value}" data-h="{name}">{shown}</td>')
    return cells


def number_form(column: PageColumn, values: Sequence[float]) -> str:
    """How the numbers of a column are written, as in f"{value:form}"; a loss may be huge, beside one that is not."""
    if column.key in WHOLE_NUMBERS or column.unit == "%":
        return ".0f" if column.key in WHOLE_NUMBERS else ".2f"
    if column.key in LOSSES and max(map(abs, values), default=0) >= HUGE:
        return ".4g"
    return f".{decimals(values)}f"


def is_informative(key: str, rows: Sequence[ComparisonRow], baselines: Sequence[str]) -> bool:
    """Whether a column is shown; seeds and rounds that all rows share stand in the page's first sentence already."""
    values = {row[key] for row in rows} - {None}
    if key in ("rounds_to_target", "speedup"):
        return bool(baselines)
    return len(values) > 1 if key in ("seeds", "rounds") else any(values) if key in COUNTS else bool(values)


def heading_cell(text: str, unit: str = "") -> str:
    """The heading of a column, a button that sorts by it."""
    small = f"&nbsp;<small>{unit}</small>" if unit else ""
    return f'<th scope="col" aria-sort="none"><button>{escape(text)}{small}</button></th>'


def method_cell(number: int | None, g: RunGroup, row: ComparisonRow) -> str:
    """The first cell of a row: the method's colour and label, and whether its figures are results."""
    label, marks = escape(g.label), "" if row["finished"] else " <em>unfinished</em>"
    if row["diverged"]:
        marks += " <em>diverged</em>" if row["diverged"] == row["seeds"] else f" <em>{row['diverged']} diverged</em>"
    return f'<th scope="row" data-v="{label}" title="{label}">{swatch(number)}{escape(row["label"])}{marks}</th>'


def colour_numbers(groups: Sequence[RunGroup]) -> list[int | None]:
    """The number of each group's colour in the pictures of its federation; None where these do not show it."""
    drawn = [g.label for g in best_groups(groups, MAX_LINES)]
    return [drawn.index(g.label) if g.label in drawn else None for g in groups]


def swatch(number: int | None) -> str:
    """A small square in the colour of this number, or without one."""
    return "<i></i>" if number is None else f'<i class="c{number % len(COLOURS)}"></i>'


def in_box(html: str, lines: int) -> str:
    """A wide table or a list in a box that scrolls, if it has many lines also up and down."""
    return f'<div class="{"scroll long" if lines > LONG else "scroll"}">{html}</div>'


def percent_text(value: float, std: float | None = None) -> str:
    """A fraction in percent, with its standard deviation: "78.5 ± 0.7 %"."""
    return f"{100 * value:.1f}" + (f" ± {100 * std:.1f}" if std is not None else "") + " %"


def decimals(values: Sequence[float]) -> int:
    """Decimals that show three digits of the largest value."""
    top = max(map(abs, values), default=0)
    return min(4, max(0, 2 - floor(log10(top)))) if top else 0
