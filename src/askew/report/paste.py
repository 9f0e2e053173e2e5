"""Tables to paste into a paper: Markdown, LaTeX (booktabs) and CSV, from one description of a table."""

from __future__ import annotations

import csv
import re
import unicodedata
from collections.abc import Mapping, Sequence
from io import StringIO
from typing import Any, NamedTuple

from ..core.files import printable
from ..errors import UnknownName, did_you_mean
from ..version import __version__

COLUMN_WIDTH, PAGE_WIDTH = 238.0, 497.0  # points of a column and of the page in a two-column paper: 3.3 and 6.9 inches
SIZES = (("small", 4.75, 4), ("footnotesize", 4.4, 3), ("scriptsize", 4.0, 2))  # points of a letter, and between cells
FORMATS = {"markdown": ".md", "latex": ".tex", "csv": ".csv"}  # with the endings of their files
BETTER_MARK, WORSE_MARK = "*", "†"  # of a cell that differs from the reference's by a test
LATEX_MARKS = {BETTER_MARK: r"$^{*}$", WORSE_MARK: r"$^{\dagger}$"}
LATEX = {
    **{letter: "\\" + letter for letter in "#$%&_{}"},
    **{letter: f"${letter}$" for letter in "<>|"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    '"': "''",
    "±": r"$\pm$",
    "×": r"$\times$",
    "−": "$-$",
    "·": r"$\cdot$",
    "≤": r"$\leq$",
    "≥": r"$\geq$",
    "∞": r"$\infty$",
    "→": r"$\rightarrow$",
    "†": r"$\dagger$",
    "–": "--",
    "—": "---",
    "…": r"\dots{}",
    "’": "'",
    "\xa0": "~",
}
# Greek letters that look like Latin ones have no command of their own in LaTeX.
LATIN_GREEK = dict(zip("ΑΒΕΖΗΙΚΜΝΟΡΤΧο", "ABEZHIKMNOPTXo", strict=True))


class PasteCell(NamedTuple):
    """A figure of a table: a mean, with its deviation where there are several values."""

    mean: float | None
    std: float | None = None
    form: str = ".2f"  # as in f"{value:form}"
    best: bool = False
    mark: str = ""  # BETTER_MARK or WORSE_MARK
    text: str = ""  # in place of the figure

    def figures(self, plus_minus: str) -> str:
        """The mean and the deviation as text, without bold and marks."""
        if self.text or self.mean is None:
            return self.text or "–"
        return f"{self.mean:{self.form}}" + ("" if self.std is None else f"{plus_minus}{self.std:{self.form}}")


class PasteTable(NamedTuple):
    """A table with a name in each row, which cells follow."""

    title: str
    headings: Sequence[str]
    rows: Sequence[tuple[str, Sequence[PasteCell]]]
    notes: Sequence[str] = ()


class PasteTables(NamedTuple):
    """Tables of one kind, the plain figures behind them, and the commands that made them."""

    tables: Sequence[PasteTable]
    plain: Sequence[Mapping[str, Any]]  # of the CSV file
    commands: Sequence[str]
    label: str = "askew"

    def text(self, form: str) -> str:
        """The content of a file of this format."""
        if form not in FORMATS:
            raise UnknownName(f"unknown format {form!r}; {did_you_mean(form, FORMATS)}")
        return {"markdown": self.markdown, "latex": self.latex, "csv": self.csv}[form]()

    def markdown(self) -> str:
        """The tables in Markdown."""
        made = [f"<!-- {comment_text(command)} -->" for command in self.comments()]
        return "\n\n".join(["\n".join(made), *map(markdown_table, self.tables)]) + "\n"

    def latex(self) -> str:
        """The tables in LaTeX, which need the package booktabs alone."""
        made = [f"% {printable(command)}" for command in self.comments()]
        several = len(self.tables) > 1
        made += [
            latex_table(each, f"tab:{slug(self.label)}" + (f"-{n}" if several else ""))
            for n, each in enumerate(self.tables, 1)
        ]
        return "\n".join(made) + "\n"

    def csv(self) -> str:
        """The figures behind the tables, with all their digits; no command stands in it, since CSV has no comments."""
        columns, buffer = list(dict.fromkeys(key for row in self.plain for key in row)), StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows([safe_field(row.get(key)) for key in columns] for row in self.plain)
        return buffer.getvalue()

    def comments(self) -> list[str]:
        """The lines that say how the tables were made; a folder's name may hold the end of a line."""
        commands = [" ".join(command.split("\n")) for command in self.commands]
        return [f"Made by askew {__version__} with:", *(f"  {command}" for command in commands)]


def slug(text: str) -> str:
    """A text as a part of a LaTeX label."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "table"


# Markdown and CSV -----------------------------------------------------------------------------------------------


def markdown_text(text: str) -> str:
    """A text in which nothing is an instruction to Markdown."""
    return re.sub(r"([\\|*_`<>\[\]#$~])", r"\\\1", printable(text))


def comment_text(text: str) -> str:
    """A text that does not end a comment of HTML."""
    return printable(text).replace("--", "-\u200b-") if "-->" in text or "--!>" in text else printable(text)


def markdown_cell(cell: PasteCell) -> str:
    """A cell in Markdown."""
    text = markdown_text(cell.figures(" ± "))
    return (f"**{text}**" if cell.best else text) + markdown_text(cell.mark)


def markdown_table(table: PasteTable) -> str:
    """A table in Markdown."""
    lines = [[*map(markdown_text, table.headings)], ["---", *["---:"] * (len(table.headings) - 1)]]
    lines += [[markdown_text(name), *map(markdown_cell, cells)] for name, cells in table.rows]
    body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    notes = markdown_text(" ".join(table.notes))
    return "\n\n".join(part for part in (markdown_text(table.title), body, notes) if part)


def safe_field(value: Any) -> Any:
    """A field of a CSV file: without control characters, and no text that a spreadsheet would take for a formula."""
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value))
    if not isinstance(value, str):
        return value
    return f"'{printable(value)}" if value[:1] in ("=", "+", "-", "@", "\t", "\r") else printable(value)


# LaTeX ----------------------------------------------------------------------------------------------------------


def latex_text(text: str) -> str:
    """A text in which nothing is an instruction to LaTeX."""
    return "".join(map(latex_letter, printable(text)))


def latex_letter(letter: str) -> str:
    """A letter in LaTeX; one that pdfLaTeX has no glyph for is named by its number."""
    if letter in LATEX:
        return LATEX[letter]
    if letter in LATIN_GREEK:
        return f"${LATIN_GREEK[letter]}$"
    name = unicodedata.name(letter, "")
    if found := re.fullmatch(r"GREEK (SMALL|CAPITAL) LETTER ([A-Z]+)", name):
        command = {"LAMDA": "lambda"}.get(found[2], found[2].lower())
        return f"$\\{command if found[1] == 'SMALL' else command.capitalize()}$"
    return letter if letter < "\x7f" or ("LATIN" in name and letter <= "ÿ") else f"[U+{ord(letter):04X}]"


def latex_cell(cell: PasteCell) -> str:
    """A cell in LaTeX: the mean in bold where it is the best."""
    if cell.text or cell.mean is None:
        return latex_text(cell.figures(""))
    mean = f"{cell.mean:{cell.form}}".replace("-", "$-$")
    spread = "" if cell.std is None else f" $\\pm$ {cell.std:{cell.form}}"
    return (f"\\textbf{{{mean}}}" if cell.best else mean) + spread + LATEX_MARKS.get(cell.mark, "")


def latex_size(texts: Sequence[Sequence[str]]) -> tuple[str, str, int] | None:
    """How a table is set: "*" if it needs the page's width, the size of its letters, and the points between cells.

    None if there is no room for it.
    """
    widest = [max(map(len, column)) for column in zip(*texts, strict=True)]
    for star, room in (("", COLUMN_WIDTH), ("*", PAGE_WIDTH)):
        for name, letter, gap in SIZES[: 1 if not star else None]:
            if sum(widest) * letter + 2 * gap * len(widest) <= room:
                return star, name, gap
    return None


def latex_blocks(table: PasteTable) -> tuple[list[PasteTable], tuple[str, str, int]]:
    """The table, or blocks of its columns that the page has room for, and how they are set."""
    columns = len(table.headings) - 1
    for step in range(columns + columns % 2, 0, -2):  # even, since two columns may belong together
        blocks = [take_columns(table, at, at + step) for at in range(0, columns, step)]
        found = [latex_size(plain_texts(block)) for block in blocks]
        sizes = [size for size in found if size]
        if len(sizes) == len(blocks):
            return blocks, max(sizes, key=lambda size: (size[0], -size[2]))
    return [table], ("*", SIZES[-1][0], SIZES[-1][2])


def take_columns(table: PasteTable, start: int, end: int) -> PasteTable:
    """The names and some of the columns."""
    rows = [(name, list(cells)[start:end]) for name, cells in table.rows]
    return table._replace(headings=[table.headings[0], *table.headings[1 + start : 1 + end]], rows=rows)


def plain_texts(table: PasteTable) -> list[list[str]]:
    """What a table shows, as plain text."""
    rows = [[name, *(cell.figures(" ± ") + cell.mark for cell in cells)] for name, cells in table.rows]
    return [list(table.headings), *rows]


def latex_tabular(table: PasteTable) -> str:
    """Headings, lines and cells."""
    rows = [[latex_text(name), *map(latex_cell, cells)] for name, cells in table.rows]
    lines = [
        f"  \\begin{{tabular}}{{l{'r' * (len(table.headings) - 1)}}}",
        "    \\toprule",
        f"    {' & '.join(map(latex_text, table.headings))} \\\\",
        "    \\midrule",
        *(f"    {' & '.join(row)} \\\\" for row in rows),
        "    \\bottomrule",
        "  \\end{tabular}",
    ]
    return "\n".join(lines)


def latex_table(table: PasteTable, label: str) -> str:
    """A table in LaTeX; one that a column of a two-column paper has no room for is as wide as the page."""
    blocks, (star, letters, gap) = latex_blocks(table)
    lines = [
        f"\\begin{{table{star}}}[t]",
        f"  \\centering\\{letters}",
        f"  \\caption{{{latex_text(' '.join([table.title.rstrip('.') + '.', *table.notes]))}}}",
        f"  \\label{{{label}}}",
        "  \\vspace{4pt}",
        f"  \\setlength{{\\tabcolsep}}{{{gap}pt}}",
        "\n\n  \\medskip\n".join(map(latex_tabular, blocks)),
        f"\\end{{table{star}}}",
    ]
    return "\n".join(lines)
