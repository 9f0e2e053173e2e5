"""Tables in a terminal: texts are broken between words, no number is cut, and columns may be left out to make room."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.style import StyleType
from rich.table import Table
from rich.text import Text

BREAKS = re.compile(r"(?<=[./=-])(?=[A-Za-z])")  # places in a long word at which it may be broken, as in local.|lr
GAP = 2  # characters between two columns
HEADING = 13  # characters of a line of a longer heading, where there is not room for all
LONGEST_PIECE = 24  # characters that a text without such places may need at least; longer ones are broken anywhere


class CellText:
    """A text in a table: words that are longer than a line are broken after signs such as the dot in local.lr."""

    def __init__(self, text: str | Text) -> None:
        self.text = Text(text) if isinstance(text, str) else text

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        plain = self.text.plain
        pieces = [len(piece) for word in plain.split() for piece in BREAKS.split(word)]
        longest = max(map(len, plain.split("\n")))
        return Measurement(min(max(pieces, default=0), LONGEST_PIECE), longest)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text("\n").join(self.text.divide(line_breaks(self.text.plain, options.max_width)))


def line_breaks(text: str, width: int) -> Iterator[int]:
    """The places at which words that are longer than a line are broken."""
    for word in re.finditer(r"\S+", text):
        begin = word.start()
        places = [begin, *(begin + found.start() for found in BREAKS.finditer(word[0])), word.end()]
        for before, end in pairwise(places):
            if end - begin > width and before > begin:
                begin = before
                yield before


class ColumnWidth(NamedTuple):
    """How narrow a column may be, and how wide it is where there is room."""

    least: int
    most: int
    is_number: bool  # then it is narrower because of its heading alone


class PlainTable(Table):
    """A table as wide as the terminal, if its numbers fit in there; else it is wider, and the terminal breaks lines."""

    def add_row(self, *cells: RenderableType | None, style: StyleType | None = None, end_section: bool = False) -> None:
        """Add a row of texts and other things."""
        shown = (CellText(cell) if isinstance(cell, (str, Text)) else cell for cell in cells)
        super().add_row(*shown, style=style, end_section=end_section)

    def limits(self, console: Console, options: ConsoleOptions, whole_headings: bool = True) -> list[ColumnWidth]:
        """The widths of its columns; without `whole_headings`, words of headings may be broken."""
        wide = options.update(width=10_000)  # or else nothing would be measured as wider than the terminal
        found = []
        for column in self.columns:
            cells = [Measurement.get(console, wide, cell) for cell in column.cells]
            lines = str(column.header).split("\n")
            words = lines if column.no_wrap else str(column.header).split() if whole_headings else []
            is_number = column.justify != "left"
            needed = [cell.maximum if is_number or column.no_wrap else cell.minimum for cell in cells]
            wanted = [*(cell.maximum for cell in cells), *map(len, lines), 1]
            found.append(ColumnWidth(max([*needed, *map(len, words), 1]), max(wanted), is_number))
        return found

    def fits(self, console: Console, options: ConsoleOptions) -> bool:
        """Can it be shown without breaking words of headings?"""
        return sum(limit.least + GAP for limit in self.limits(console, options)) - GAP <= options.max_width

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        limits = self.limits(console, options, self.fits(console, options))
        room = options.max_width + GAP - GAP * len(limits)
        widths = [limit.most for limit in limits]
        for widest in range(options.max_width, 0, -1):
            if sum(widths) > room:
                widths = widths_at(limits, widest)
        for column, width in zip(self.columns, widths, strict=True):
            column.width, column.overflow = width, "fold"
        yield from super().__rich_console__(console, options.update(width=sum(widths) + GAP * len(widths)))


def widths_at(limits: Sequence[ColumnWidth], widest: int) -> list[int]:
    """The widths of columns of which none is wider than `widest`, unless it must be."""
    return [max(limit.least, min(limit.most, min(widest, HEADING) if limit.is_number else widest)) for limit in limits]


class FirstThatFits:
    """Several tables of the same, of which the first that fits into the terminal is shown, or else the last."""

    def __init__(self, choices: Sequence[PlainTable]) -> None:
        self.choices = choices

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        fitting = (table for table in self.choices if table.fits(console, options))
        yield next(fitting, self.choices[-1])


def plain_table(*headings: str) -> PlainTable:
    """An empty table in our style; columns with these headings are aligned to the right."""
    table = PlainTable(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, header_style="cyan")
    for heading in headings:
        table.add_column(heading, justify="right")
    return table
