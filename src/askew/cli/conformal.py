"""`askew conformal`: how often prediction sets of finished runs contain the true class, and how large they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from ..errors import ConfigError
from ..experiment import conformal as library
from ..experiment.conformal import METHODS, Conformal
from ..experiment.plugins import load_plugin
from ..experiment.store import load_all, write_atomic
from ..report import tables, terminal
from ..report.figures import coverage_picture
from ..report.picture import style
from ..report.plain_table import plain_table
from .options import AsJson, Folder, Folders, Plugins, examples, json_text, print_rich

app = typer.Typer(add_completion=False)

EPILOG = examples(
    "askew conformal runs",
    "askew conformal runs/NAME --alpha 0.05 --calibration 0.2",
    "askew conformal runs --plot coverage.png",
    "askew conformal runs --penalty 0.1 --k-reg 3 --json",
)
HEADINGS = ("naive", "APS", "RAPS")  # of METHODS
PICTURES = (".png", ".svg", ".pdf")  # formats
DEFAULT = Conformal()
TopClasses = Annotated[int, typer.Option(metavar="K", min=0, help="RAPS: so many top classes bear no penalty.")]


@app.command(epilog=EPILOG)
def conformal(
    folders: Folders,
    alpha: Annotated[
        float, typer.Option(metavar="A", help="Share of samples whose set may miss the true class.")
    ] = DEFAULT.alpha,
    calibration: Annotated[
        float, typer.Option(metavar="PART", help="Part of the test set that calibrates.")
    ] = DEFAULT.calibration,
    splits: Annotated[
        int, typer.Option(metavar="N", help="Random divisions over which means are taken.")
    ] = DEFAULT.splits,
    k_reg: TopClasses = DEFAULT.k_reg,
    penalty: Annotated[
        float, typer.Option(metavar="λ", help="RAPS: penalty of every further class.")
    ] = DEFAULT.penalty,
    fixed: Annotated[bool, typer.Option("--fixed", help="Draw nothing in scores; sets are larger.")] = False,
    nonempty: Annotated[
        bool, typer.Option("--nonempty", help="Put the top class into sets that would be empty.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw coverage against set size: png, svg or pdf.")
    ] = None,
    plugins: Plugins = None,
    trust: Annotated[
        bool, typer.Option("--trust", help="Run the plugins that the run folders name, whoever made them.")
    ] = False,
    folder: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Measure the prediction sets of finished runs: naive ones, APS and RAPS.

    What is measured is stored in each run's folder, and `askew report` draws it.

    Runs that differ only in their seed share a row.
    """
    check_picture(plot)
    how = Conformal(
        alpha=alpha,
        calibration=calibration,
        splits=splits,
        k_reg=k_reg,
        penalty=penalty,
        nonempty=nonempty,
        randomised=not fixed,
    )
    load_plugins(plugins)
    runs = library.measure_whole(load_all(folders, lambda run: terminal.comparison([run])), how, trust)
    groups = tables.group_runs(runs)
    if plot is not None:
        draw_coverage(groups, plot)
    if as_json:
        rows = [
            {"run": str(run.folder), "algorithm": run.algorithm, "seed": run.config["seed"], **run.conformal}
            for run in runs
        ]
        print(json_text(rows, indent=None))
    else:
        print_rich(results(groups, how, plot))


def load_plugins(paths: Iterable[str] | None) -> None:
    """Load the plugins that the command names."""
    for path in paths or ():
        load_plugin(path)


def check_picture(file: Path | None) -> None:
    """Refuse a picture of a format that cannot be drawn."""
    if file is not None and file.suffix not in PICTURES:
        raise ConfigError(
            f"conformal: --plot must end in {', '.join(PICTURES[:-1])} or {PICTURES[-1]}, got {str(file)!r}; "
            "try coverage.png."
        )


def draw_coverage(groups: Sequence[tables.RunGroup], file: Path) -> None:
    """Write a picture of coverage against set size; its format follows from the file's name."""
    with style():
        picture = coverage_picture(groups)
    assert picture is not None
    write_atomic(file, picture.render(file.suffix[1:]))


def results(groups: Sequence[tables.RunGroup], how: Conformal, plot: Path | None) -> RenderableType:
    """A table with a row for each group of runs; of a single group also the coverage by set size."""
    table = plain_table(
        "method", "acc. %", *(f"{heading}\n{what}" for heading in HEADINGS for what in ("cov. %", "size"))
    )
    table.columns[0].justify = "left"
    for g in groups:
        cells = [
            (100, "accuracy", None),
            *((scale, what, m) for m in METHODS for scale, what in ((100, "coverage"), (1, "size"))),
        ]
        table.add_row(tables.shorten_label(g.title), *(cell(g, scale, what, method) for scale, what, method in cells))
    parts: list[RenderableType] = [table, Text(remarks(groups, how), terminal.QUIET)]
    if len(groups) == 1:
        parts += [Text(), by_size(groups[0])]
    if plot:
        parts += [Text(), terminal.pairs([("picture", str(plot))])]
    return Group(*parts)


def cell(g: tables.RunGroup, scale: float, what: str, method: str | None) -> str:
    """The mean of one figure over a group's runs, times a scale: of a method, or of the run itself."""
    measured = [run.conformal["methods"][method] if method else run.conformal for run in g.runs]
    value = scale * (tables.average([figures[what] for figures in measured]) or 0.0)
    return f"{value:.1f}" if scale == 100 else f"{value:.2f}"


def remarks(groups: Sequence[tables.RunGroup], how: Conformal) -> str:
    """The sentences below the table: what was asked for, over what means are taken, and how many samples there were."""
    first, *others = [run.conformal for g in groups for run in g.runs]
    text = f"Asked for: coverage {terminal.percent(1 - how.alpha)}. Means over {how.splits} random divisions"
    text += " and over seeds." if any(len(g.runs) > 1 for g in groups) else "."
    counts = [first["calibrating"], first["measured"]]
    if all([other["calibrating"], other["measured"]] == counts for other in others):
        low, high = first["band"]
        text += f" {counts[0]:,} test samples calibrate, {counts[1]:,} are measured:"
        text += f" one division's coverage by APS or RAPS {band_text(low, high, how.nonempty)}."
    return text


def band_text(low: float, high: float, nonempty: bool) -> str:
    """Where a coverage lies: a class that is put into empty sets can only raise it, so that the lower end remains."""
    if nonempty:
        return f"is at least {terminal.percent(low)} with probability 99.5%, as empty sets get a class"
    return f"lies between {terminal.percent(low)} and {terminal.percent(high)} with probability 99%"


def by_size(g: tables.RunGroup) -> RenderableType:
    """A table of the coverage of sets of each size, of a group's first run."""
    methods = g.runs[0].conformal["methods"]
    by_method: dict[str, list[dict[str, Any]]] = {method: methods[method]["strata"] for method in METHODS}
    ends = sorted({(stratum["from"], stratum["to"]) for strata in by_method.values() for stratum in strata})
    table = plain_table("set size", *(f"{heading}\n{what}" for heading in HEADINGS for what in ("share %", "cov. %")))
    for low, high in ends:
        row = [str(low) if low == high else f"{low}–{high}"]
        for strata in by_method.values():
            same = next((stratum for stratum in strata if stratum["to"] == high), None)
            row += ["–", "–"] if same is None else [f"{100 * same['share']:.1f}", f"{100 * same['coverage']:.1f}"]
        table.add_row(*row)
    seeds = f" Of seed {g.runs[0].config['seed']}." if len(g.runs) > 1 else ""
    return Group(Text(f"coverage by set size.{seeds}", "cyan"), table)
