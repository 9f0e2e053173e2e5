"""`askew table`: a table of a paper to paste into another, from stored results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ..report import terminal
from ..reproduction.papers import find_experiment
from ..reproduction.paste_experiment import paste_experiment
from ..reproduction.plan import prepare_reproduction
from ..reproduction.results import ResultRow, metrics_by_run, read_results
from .options import TableFile, TableFormat, examples, option_words, put_table

app = typer.Typer(add_completion=False)

RESULTS = Path("results")  # where `askew reproduce` stores results by default
EPILOG = examples(
    "askew table feddpc/table2",
    "askew table feddpc/table2 --paper --out table2.tex",
    "askew table ours/participation --against FedAvg --format csv",
)


@app.command(epilog=EPILOG)
def table(
    id: Annotated[
        str, typer.Argument(metavar="ID", help="An experiment of `askew list experiments`.", show_default=False)
    ],
    form: TableFormat = None,
    out: TableFile = None,
    paper: Annotated[bool, typer.Option("--paper", help="Put the paper's numbers beside ours.")] = False,
    against: Annotated[
        str | None,
        typer.Option(metavar="METHOD", help="Test the others against this one.", show_default="FedAvg, if it is there"),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Seeds 0 to N−1.", show_default="all that are stored")
    ] = None,
    scale: Annotated[str, typer.Option(metavar="SCALE", help="full (as published), reduced or smoke.")] = "full",
    results: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the results' CSV files.")] = RESULTS,
) -> None:
    """Print a table of a paper from stored results, to paste as Markdown, LaTeX or CSV; nothing is trained."""
    options = {"--format": form, "--out": out, "--paper": paper, "--against": against, "--seeds": seeds}
    options |= {
        "--scale": None if scale == "full" else scale,
        "--results": None if results == Path("results") else results,
    }
    rows = read_results(results)
    reproduction = prepare_reproduction(
        id, scale, (), seeds or stored_seeds(rows, id), results, runs=metrics_by_run(rows)
    )
    made_by = terminal.command("table", id, *option_words(options))
    put_table(paste_experiment(reproduction, made_by, against, paper), form, out)


def stored_seeds(rows: Sequence[ResultRow], id: str) -> int | None:
    """How many seeds, from 0 on, are stored of an experiment's paper; None if none is. Ours show runs of all papers."""
    paper = find_experiment(id).paper
    return max((row.seed + 1 for row in rows if paper in ("ours", row.experiment.split("/")[0])), default=None)
