"""Data before any training: tables in the terminal, a picture, and `askew.describe`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..core.text import count_text
from ..errors import ConfigError
from .picture import save_figure
from .plain_table import plain_table
from .runs import as_html, as_text
from .skew import draw_skew, skew_table
from .terminal import QUIET

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURES = (".png", ".svg", ".pdf")
MOST_CLIENTS = 20  # that the table lists
MOST_CLASSES = 8  # that have a column of their own
BAR = 10  # letters


class Description:
    """What some data are; printed it is a few tables, and `plot` draws who holds what."""

    def __init__(self, survey: Any) -> None:
        self.survey = survey

    @property
    def clients(self) -> tuple[str, ...]:
        """The clients' names."""
        return tuple(self.survey.clients)

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes' names."""
        return tuple(self.survey.labels)

    @property
    def counts(self) -> Any:
        """Training samples by client and class, int64 [N, K]."""
        return self.survey.counts

    def summary(self) -> dict[str, Any]:
        """All of it as plain values."""
        facts: dict[str, Any] = self.survey.summary()
        return facts

    def plot(self) -> Figure:
        """A figure of the samples by client and class."""
        found = self.survey
        title = f"{found.name}, {count_text(len(found.clients), 'client')}"
        return draw_skew(found.counts, found.sizes, title, client_names=found.clients, class_names=found.labels)

    def save(self, path: str | Path) -> Path:
        """Draw the samples by client and class into a file: png, svg or pdf."""
        path = Path(path)
        if path.suffix.lower() not in PICTURES:
            raise ConfigError(f"the picture's name must end in .png, .svg or .pdf, got {str(path)!r}; try skew.svg.")
        save_figure(self.plot(), path)
        return path

    def __repr__(self) -> str:
        return as_text(describe_survey(self.survey))

    def _repr_html_(self) -> str:
        return as_html(describe_survey(self.survey))


def describe(
    data: Any = None,
    test: Any = None,
    *,
    client: str = "",
    label: str = "",
    partition: Any = None,
    clients: int | None = None,
    seed: int = 0,
) -> Description:
    """What some data are: clients, sizes, classes and what is missing; the arguments are as for `askew.run`."""
    from ..experiment.api import data_settings, put_settings
    from ..experiment.config import Config
    from ..experiment.survey import survey

    tables: dict[str, Any] = {} if data is None else {"data": data_settings(data, test, client, label)}
    put_settings(tables, {"partition": partition, "seed": seed}, {"partition.clients": clients}, {})
    return Description(survey(Config.build(tables)))


def describe_survey(survey: Any, *more: tuple[str, str]) -> RenderableType:
    """The tables that describe data."""
    inputs = " × ".join(map(str, survey.shape)) or "1"
    task = count_text(survey.classes, "class", "classes") if survey.classes else "a regression"
    title = f"{survey.name}: {count_text(len(survey.clients), 'client')}, {task}, inputs of {inputs} "
    title += f"{'number' if inputs == '1' else 'numbers'}, {count_text(survey.samples, 'sample')} to train on and "
    parts: list[RenderableType] = [Text(f"{title}{survey.tests:,} to test on", "bold")]
    if survey.columns:
        parts += [Text(), column_table(survey.columns)]
    if survey.round_length:
        more = (("a round", survey.round_length), *more)
    parts += [Text(), client_table(survey), Text(), skew_table(survey.skew, *more)]
    parts += [Text(f"note: {remark}", "yellow") for remark in survey.remarks]
    return Group(*parts)


def column_table(columns: Any) -> Table:
    """What each column of a table is for, and how many of its values are missing."""
    table = plain_table("column", "use", "different", "missing", "values")
    for column in table.columns:
        column.justify = "left"
    table.columns[2].justify = table.columns[3].justify = "right"
    for facts in columns:
        missing = Text(f"{facts['missing']:,}", "yellow" if facts["missing"] else "")
        values = Text(str(facts["values"])[:48], QUIET)
        table.add_row(facts["name"], facts["use"] or "left out", f"{facts['different']:,}", missing, values)
    return table


def client_table(survey: Any) -> Table:
    """The first clients, their sizes and their labels."""
    single = 0 < survey.classes <= MOST_CLASSES
    own_tests = survey.tests_of is not None
    headings = ["client", "samples", "", *(["test"] if own_tests else []), *(survey.labels if single else ())]
    table = plain_table(*headings, *(["classes", "most frequent"] if survey.classes and not single else []))
    table.columns[0].justify = table.columns[2].justify = "left"
    most = max(int(survey.sizes.max()), 1)
    for k in range(min(len(survey.clients), MOST_CLIENTS)):
        size, row = int(survey.sizes[k]), survey.counts[k]
        cells = [survey.clients[k], f"{size:,}", Text("█" * max(1, round(BAR * size / most)) if size else "", QUIET)]
        cells += [f"{int(survey.tests_of[k]):,}"] if own_tests else []
        if single:
            cells += [f"{int(count):,}" for count in row]
        elif survey.classes:
            top = int(row.argmax())
            share = f"{survey.labels[top]} ({row[top] / size:.0%})" if size else "–"
            cells += [f"{int((row > 0).sum())}", share]
        table.add_row(*cells)
    if len(survey.clients) > MOST_CLIENTS:
        table.add_row(f"… {len(survey.clients) - MOST_CLIENTS:,} more")
    return table
