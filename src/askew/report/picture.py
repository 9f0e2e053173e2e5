"""What all pictures have in common: their style and colours, and how they are written to files."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from io import BytesIO
from math import ceil
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import UnknownName, did_you_mean
from ..experiment.store import write_atomic
from .tables import shorten_label

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 6.8  # inches of a picture in a report: its text can be read on a telephone
# Okabe and Ito's colours, which colour-blind readers tell apart; without the yellow, hard to see on white paper.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#333333")
MARKERS, DASHES = "osD^v>X<", ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))
INK, GRID, GREY, BLUE, ORANGE = "#333333", "#E3E6EA", "#9AA7B4", COLOURS[0], COLOURS[1]
HATCHES = ("", "///", "...", "xxx")
STYLE: Any = {
    "font.size": 10.5,
    "font.family": "DejaVu Sans",
    "text.color": INK,
    "axes.edgecolor": "#9AA1A9",
    "axes.labelcolor": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "grid.color": GRID,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "svg.hashsalt": "askew",  # the same runs give the same file
    "pdf.fonttype": 42,  # TrueType, since publishers refuse matplotlib's other fonts
}


class PaperSize(NamedTuple):
    """How a figure is drawn for a two-column paper."""

    width: float  # inches
    height: float  # as a fraction of the height in a report
    font: float  # points


PAPER_SIZES = {"column": PaperSize(3.3, 0.58, 8), "page": PaperSize(6.9, 0.72, 9)}
PAPER_KINDS = ("pdf", "svg")
# The size that figures are drawn in now; None is that of a report.
paper_size: ContextVar[PaperSize | None] = ContextVar("paper_size", default=None)


@dataclass(frozen=True)
class Picture:
    """A drawn figure, its heading and a description of it in words."""

    name: str
    title: str
    alt: str
    note: str
    figure: Figure
    federation: int = 0  # which of several it shows

    def render(self, kind: str) -> bytes:
        """The file's content; kind is png, svg or pdf."""
        buffer, undated = BytesIO(), {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
        with style():
            self.figure.savefig(buffer, format=kind, dpi=160, metadata=undated.get(kind))
        return buffer.getvalue()


@contextmanager
def style() -> Iterator[None]:
    """Draw in the style of the report, or in that of a paper while its size is set."""
    import matplotlib

    size = paper_size.get()
    paper: Any = {}
    if size:
        paper = {"font.size": size.font, "axes.titlesize": size.font, "lines.linewidth": 1.1, "axes.linewidth": 0.6}
    with matplotlib.rc_context(STYLE | paper), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)  # a box in a label is no reason to stop
        yield


def canvas(width: float, height: float) -> Figure:
    """An empty figure of so many inches in a report; in a paper, with the same proportions or flatter."""
    from matplotlib.figure import Figure

    size = paper_size.get()
    if size:
        width, height = size.width * width / WIDTH, size.height * height

    class ShownFigure(Figure):
        """A figure that a notebook shows, whether or not pyplot is used there."""

        def _repr_png_(self) -> bytes:
            buffer = BytesIO()
            self.savefig(buffer, format="png", dpi=100)
            return buffer.getvalue()

    return ShownFigure(figsize=(width, height), layout="constrained")


@contextmanager
def drawn_for(name: str) -> Iterator[None]:
    """Draw figures in the size of a paper: "column" or "page"."""
    if name not in PAPER_SIZES:
        raise UnknownName(f"unknown size of a figure {name!r}; {did_you_mean(name, PAPER_SIZES)}")
    token = paper_size.set(PAPER_SIZES[name])
    try:
        yield
    finally:
        paper_size.reset(token)


def legend_columns(labels: Iterable[str]) -> int:
    """How many columns a legend below a picture has room for."""
    longest = max((len(line) for label in labels for line in label.split("\n")), default=0)
    columns, size = 3 if longest <= 16 else 2, paper_size.get()
    return max(1, columns - 1) if size and size.width < WIDTH / 2 else columns


def legend_height(labels: Sequence[str]) -> float:
    """The inches that a legend below a picture takes."""
    lines, columns = max((label.count("\n") + 1 for label in labels), default=1), legend_columns(labels)
    return 0.21 * lines * ceil(len(labels) / columns) + 0.2


def draw_legend(figure: Figure, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """Put a legend below a picture, where it stays within a narrow page."""
    figure.legend(handles, labels, loc="outside lower left", ncols=legend_columns(labels), fontsize=legend_font())


def legend_font() -> float:
    """The points of a legend's letters."""
    size = paper_size.get()
    return size.font - 0.5 if size else 9.5


def legend_label(label: str) -> str:
    """A label for a legend, broken into lines.

    Matplotlib hides a label that begins with an underscore and reads mathematics between dollar signs.
    """
    label = shorten_label(label).replace("$", r"\$")
    return fill(f" {label}" if label.startswith("_") else label, 32, break_on_hyphens=False, drop_whitespace=False)


def write_picture(picture: Picture, folder: Path, kind: str = "png") -> Path:
    """Write a picture into a folder; return its path."""
    path = Path(folder) / f"{picture.name}.{kind}"
    write_atomic(path, picture.render(kind))
    return path


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure into a file, in the format of its ending, or leave the file as it was."""
    buffer = BytesIO()
    figure.savefig(buffer, format=path.suffix.lower().removeprefix("."), dpi=150)
    write_atomic(path, buffer.getvalue())


def bar_width(bars: int) -> float:
    """The width of bars; where there are too many for gaps to be seen, bars touch."""
    return 0.85 if bars <= 100 else 1.0
