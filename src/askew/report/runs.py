"""Runs as Python shows them: a few lines, a table, a figure, a frame of pandas, and HTML in a notebook."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex, overload

from rich.console import Console, Group, RenderableType
from rich.text import Text

from ..core.files import printable
from ..core.text import count_text
from ..errors import ConfigError, StoreError, UnknownName, did_you_mean
from ..experiment.roll_call import loss_sentence
from ..experiment.store import Run
from . import terminal
from .figures import OVER, draw_curves
from .page import write_report
from .paste import PasteTables
from .paste_runs import paste_comparison
from .picture import drawn_for, style
from .tables import ComparisonRow, average, group_runs, shorten_label, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..experiment.launch import FailedRun
    from .significance import PairedComparison

SHOWN_ROWS = 4  # of runs in the few lines that stand for them
WIDTH = 110  # characters of a table
PANELS = {  # labels of axes
    "accuracy": "Test accuracy, %",
    "loss": "Test loss",
    "train_loss": "Training loss",
    "accuracy_validation": "Accuracy on held-out samples, %",
    "loss_validation": "Loss on held-out samples",
}
# Colours are those of the page around it, light or dark.
HTML = (
    '<pre style="color:inherit;background:inherit;font-family:monospace;line-height:1.25;overflow-x:auto;'
    'white-space:pre;margin:0">{code}</pre>'
)


class ComparisonTable(list[ComparisonRow]):
    """The rows that `askew compare --json` prints, one for each method; shown as the table of `askew compare`."""

    def __init__(
        self,
        runs: Sequence[Run],
        target: float | None = None,
        *,
        test: bool = False,
        against: str | None = None,
        metric: str | None = None,
    ) -> None:
        """`test` adds to each row its test `against` a method by a `metric`, and lists the tests as `tests`."""
        if target is not None and not 0 < target <= 1:
            raise ConfigError(
                f"compare: target (--target in a shell) must be > 0 and ≤ 1, got {target:g}; "
                "accuracies are fractions, try 0.9."
            )
        if not test and (against is not None or metric is not None):
            raise ConfigError(
                "compare: against and metric say how to test; give test=True (--test in a shell) with them."
            )
        if target is not None and runs and all(run.best_accuracy is None for run in runs):
            raise ConfigError(
                "compare: target (--target in a shell) is an accuracy, and none of these runs has one; leave it out."
            )
        super().__init__(table(runs, target))
        self.runs, self.target = runs, target
        self.tests: list[PairedComparison] = []
        if test:
            from .significance import compare_methods  # with numpy, which a table without tests does not need

            self.tests = compare_methods(group_runs(runs), against, metric)
            found = {(each.federation, each.method): each for each in self.tests}
            for row in self:
                each = found.get((row["federation"], row["label"]))
                row["test"] = each and each._asdict()

    def rich(self) -> RenderableType:
        """The table as `rich` prints it, with the tests below it."""
        means = terminal.comparison(self.runs, self.target)
        if not self.tests:
            return means
        from .verdicts import verdict_tables

        return Group(means, Text(), verdict_tables(self.tests))

    def frame(self) -> Any:
        """The rows as a frame of pandas."""
        return data_frame(list(self))

    def paste(self, made_by: str = "") -> PasteTables:
        """The table for a paper, made by this command."""
        return paste_comparison(self.runs, self, self.target, self.tests, made_by)

    def markdown(self) -> str:
        """The table in Markdown."""
        return self.paste().markdown()

    def latex(self) -> str:
        """The table in LaTeX, for the package booktabs; means ± deviations, the best in bold, tested ones marked."""
        return self.paste().latex()

    def csv(self) -> str:
        """All figures of the rows as CSV."""
        return self.paste().csv()

    def __repr__(self) -> str:
        return as_text(self.rich())

    def _repr_html_(self) -> str:
        return as_html(self.rich())


class Runs(list[Run]):
    """Several runs: a list that shows itself as a comparison. `failed` are the runs of a sweep that failed, `broken`
    has the run folders that could not be read, and why.
    """

    def __init__(
        self,
        runs: Iterable[Run] = (),
        failed: Sequence[FailedRun] = (),
        broken: Mapping[Path, str] | None = None,
    ) -> None:
        super().__init__(runs)
        self.failed, self.broken = list(failed), dict(broken or {})

    @overload
    def __getitem__(self, index: SupportsIndex) -> Run: ...
    @overload
    def __getitem__(self, index: slice) -> Runs: ...
    def __getitem__(self, index: SupportsIndex | slice) -> Run | Runs:
        return Runs(super().__getitem__(index)) if isinstance(index, slice) else super().__getitem__(index)

    def table(
        self,
        target: float | None = None,
        *,
        test: bool = False,
        against: str | None = None,
        metric: str | None = None,
    ) -> ComparisonTable:
        """One row for each configuration, means over its seeds, as `askew compare` shows them; `test` as there."""
        return ComparisonTable(self, target, test=test, against=against, metric=metric)

    def frame(self) -> Any:
        """One row for each round of each run, as a frame of pandas."""
        labels = {id(run): group.label for group in group_runs(self) for run in group.runs}
        return data_frame(
            [
                {"label": labels.get(id(run), run.algorithm), "seed": run.config.get("seed"), **row}
                for run in self
                for row in round_rows(run)
            ]
        )

    def plot(self, key: str = "accuracy", size: str | None = None, over: str = "round") -> Figure:
        """A figure of one record key over the rounds; a line for each configuration, the mean over its seeds.

        With `over="clock"` it is drawn over the seconds of the virtual clock.
        `size` is "column" or "page" of a two-column paper; figure.savefig("accuracy.pdf") then writes it.
        """
        return draw_key(self, key, size, over)

    def report(self, out: str | Path = "report", title: str | None = None) -> Path:
        """Write one HTML page with tables and pictures into a folder; return the page's path."""
        return write_report(self, Path(out), title, self.broken)

    def __repr__(self) -> str:
        groups = group_runs(self)
        counts = [count_text(len(self), "run"), f"of {count_text(len(groups), 'configuration')}"]
        lines = [" ".join(counts) + f", {len(self.failed)} failed" * bool(self.failed)]
        for group in groups[:SHOWN_ROWS]:
            best, losses = group.values(lambda run: run.best_accuracy), group.last("loss")
            shown = f"best accuracy {terminal.percent(average(best))}" if best else "no accuracy"
            shown = f"last test loss {terminal.digits(average(losses))}" if losses and not best else shown
            seeds = f", {len(group.runs)} seeds" if len(group.runs) > 1 else ""
            lines.append(f"  {shorten_label(group.label)}: {shown}{seeds}")
        lines += [f"  and {len(groups) - SHOWN_ROWS} more; .table() shows all"] if len(groups) > SHOWN_ROWS else []
        return printed("\n".join(lines))

    def _repr_html_(self) -> str:
        return as_html(self.table().rich()) if self else as_html(Text("no runs"))


# one run --------------------------------------------------------------------------------------------------------------


def run_text(run: Run) -> str:
    """A run in at most six lines."""
    lines = [f"{run.algorithm} on {terminal.federation_text(run)}, seed {run.config.get('seed', 0)}"]
    best, loss = run.best_accuracy, run.last("loss")
    if best is not None:
        lines.append(f"best accuracy {terminal.percent(best)} in round {run.best_round}, last {final(run)}")
    elif loss is not None:
        lines.append(f"last test loss {terminal.digits(loss)}")
    sent = f"{terminal.size(run.bytes_up)} up, {terminal.size(run.bytes_down)} down"
    lines.append(f"{terminal.state(run)}, {terminal.duration(run.seconds_per_round)} each, {sent}")
    call = run.roll_call()
    if run.facts.get("diverged"):
        lines.append(str(run.facts["diverged"]))
    elif not call.empty:
        lines.append(loss_sentence(call, len(run.rounds)))
    lines += [f"stored in {run.folder}"] if run.folder else []
    return printed("\n  ".join(lines))


def final(run: Run) -> str:
    """The last accuracy in percent."""
    return terminal.percent(run.final_accuracy)


def run_html(run: Run) -> str:
    """A run for a notebook: its figures and the curve of accuracies."""
    at, accuracy = run.curve("accuracy")
    text = Text(run_text(run))
    if len(accuracy) > 1:
        text.append("\n\naccuracy by round\n").append_text(terminal.chart(at, accuracy))
    return as_html(text)


def draw_key(runs: Sequence[Run], key: str, size: str | None = None, over: str = "round") -> Figure:
    """A figure of one record key over the rounds or the clock; a line for each configuration; `size` is a paper's."""
    if over not in OVER:
        raise UnknownName(f"plot: unknown axis {over!r}; {did_you_mean(over, OVER)}")
    if over == "clock" and all(run.clock is None for run in runs):
        raise ConfigError("plot: these runs have no virtual clock; plot them over rounds, or run them with [time].")
    try:
        with drawn_for(size) if size else nullcontext(), style():
            percent = key == "accuracy" or key.startswith(("accuracy_", "client_accuracy"))
            label = PANELS.get(key, key.replace("_", " ") + (", %" if percent else ""))
            scale = 100 if percent else 1
            figure, values = draw_curves(group_runs(runs), {key: label}, scale, not percent, over)
    except ModuleNotFoundError as e:
        if e.name != "matplotlib":
            raise
        raise StoreError("plot() draws with matplotlib, which is not installed; pip install matplotlib.") from None
    if not values:
        known = sorted({name for run in runs for record in run.rounds for name in record if run.curve(name)[1]})
        raise ConfigError(
            f"plot: no number is recorded as {key!r} in these runs; recorded are {', '.join(known) or 'none'}."
        )
    return figure


def round_rows(run: Run) -> list[dict[str, Any]]:
    """One row for each round: what was recorded as a number or a text; of tables, their entries as "table.name"."""
    rows = []
    for record in run.rounds:
        row: dict[str, Any] = {"algorithm": run.algorithm}
        for name, value in record.items():
            if isinstance(value, Mapping):
                row |= {f"{name}.{key}": entry for key, entry in value.items() if not isinstance(entry, (list, dict))}
            elif name == "participants":
                row["clients"] = len(value)
            elif not isinstance(value, list):
                row[name] = value
        rows.append(row)
    return rows


def data_frame(rows: Sequence[Mapping[str, Any]]) -> Any:
    """A frame of pandas with these rows."""
    try:
        import pandas
    except ModuleNotFoundError:
        raise StoreError(
            "frame() makes a frame of pandas, which is not installed; pip install pandas, or take the plain numbers: "
            'run.rounds, run.curve("accuracy") or runs.table().'
        ) from None
    return pandas.DataFrame(rows)


# texts ----------------------------------------------------------------------------------------------------------------


def printed(text: str) -> str:
    """A text without control characters, which may come from somebody else's files; its lines stay."""
    return "\n".join(map(printable, text.split("\n")))


def text_console(**more: Any) -> Console:
    """A console that prints into a text; in a notebook `rich` would show it at once, beside the result of the cell."""
    return Console(file=StringIO(), width=WIDTH, markup=False, highlight=False, force_jupyter=False, **more)


def as_text(output: RenderableType) -> str:
    """What `rich` prints, as plain text."""
    console = text_console(color_system=None)
    with console.capture() as captured:
        console.print(output, crop=False)
    return printed("\n".join(line.rstrip() for line in captured.get().rstrip().split("\n")))


def as_html(output: RenderableType) -> str:
    """What `rich` prints, as HTML that needs nothing else and is as light or dark as the page around it."""
    console = text_console(record=True)
    console.print(output, crop=False)
    return printed(console.export_html(inline_styles=True, code_format=HTML))
