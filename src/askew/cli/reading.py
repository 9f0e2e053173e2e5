"""`askew list`, `show`, `compare` and `report`: what reads, without torch where no plugin needs it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import ConfigError, UnknownName, did_you_mean
from ..experiment import listing
from ..experiment.store import load_all, load_checked, load_whole
from ..report import terminal, write_figures, write_report
from ..report.listing import catalogue, explain_entry
from ..report.page import check_run
from ..report.picture import PAPER_KINDS, PAPER_SIZES
from ..report.runs import Runs
from .options import (
    AsJson,
    Folders,
    Plugins,
    TableFile,
    TableFormat,
    examples,
    option_words,
    print_json,
    print_rich,
    put_table,
)

app = typer.Typer(add_completion=False)


@app.command(
    "list", epilog=examples("askew list algorithms", "askew list algorithms feddyn", "askew list partitions --json")
)
def list_(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="KIND",
            help="One of algorithms, attacks, datasets, experiments, models, partitions, participations, rules.",
        ),
    ],
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Explain this one alone.", show_default=False)
    ] = None,
    plugins: Plugins = None,
    as_json: AsJson = False,
) -> None:
    """List what a configuration can name, with its settings; or the papers' experiments.

    With a name, that one is explained: what it does, of a method also its equations and paper, and its settings.
    """
    if kind == "experiments":
        from .papers import list_experiments

        if name:
            raise ConfigError(f"list: experiments are listed all at once; askew reproduce {name} --plan shows one.")
        list_experiments(as_json)
        return
    entries = list_with_plugins(kind, plugins) if plugins else listing.stored_entries(kind)
    if name:
        entry = next((entry for entry in entries if entry["name"] == name), None)
        if entry is None:
            known = did_you_mean(name, [entry["name"] for entry in entries])
            raise UnknownName(f"unknown {kind.removesuffix('s')} {name!r}; {known}")
        if as_json:
            print_json(entry)
        else:
            print_rich(explain_entry(kind, entry))
    elif as_json:
        print_json(entries)
    else:
        print_rich(catalogue(kind, entries))


def list_with_plugins(kind: str, plugins: Sequence[str]) -> list[dict[str, Any]]:
    """The entries of a kind, with what plugins register."""
    from ..experiment import catalogue
    from ..experiment.plugins import load_plugin

    for path in plugins:
        load_plugin(path)
    return catalogue.entries_with_plugins(kind)


@app.command(epilog=examples("askew show runs/NAME", "askew show runs/NAME --json"))
def show(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Show one run: settings, figures, curve and last rounds."""
    run = load_checked(folder, terminal.run_details)
    if as_json:
        print_json(run.summary() | {"config": run.config, "facts": run.facts, "records": run.rounds})
    else:
        print_rich(terminal.run_details(run))


@app.command(
    epilog=examples(
        "askew compare runs",
        "askew compare runs/A runs/B --target 0.9",
        "askew compare runs --test --against fedavg",
        "askew compare runs --test --format latex --out table.tex",
        "askew compare runs --json",
    )
)
def compare(
    folders: Folders,
    target: Annotated[
        float | None,
        typer.Option(metavar="ACC", help="Count rounds to this accuracy, 0 to 1.", show_default="fedavg's best"),
    ] = None,
    test: Annotated[bool, typer.Option("--test", help="Test each method against one of them, paired by seed.")] = False,
    against: Annotated[
        str | None, typer.Option(metavar="METHOD", help="With --test: this one.", show_default="fedavg, or the first")
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="With --test: best_accuracy, final_accuracy, worst_clients_accuracy or test_loss.",
            show_default="best_accuracy",
        ),
    ] = None,
    form: TableFormat = None,
    out: TableFile = None,
    as_json: AsJson = False,
) -> None:
    """Compare runs in one table; runs that differ only in their seed share a row."""
    if not test and (against is not None or metric is not None):
        raise ConfigError("compare: --against and --metric say how to test; give --test with them.")
    rows = Runs(load_all(folders, lambda run: terminal.comparison([run]))).table(
        target, test=test, against=against, metric=metric
    )
    if as_json and (form or out):
        raise ConfigError("compare: --json and --format or --out do not go together; give one of them.")
    if form or out:
        options = {"--target": target, "--test": test, "--against": against, "--metric": metric, "--format": form}
        made_by = terminal.command("compare", *folders, *option_words(options | {"--out": out}))
        put_table(rows.paste(made_by), form, out)
    elif as_json:
        print_json(rows)
    else:
        print_rich(rows.rich())


@app.command(
    epilog=examples(
        "askew report runs --out report",
        "askew report runs/A runs/B --out report --title 'A against B'",
        "askew report runs --figures pdf --size column",
    )
)
def report(
    folders: Folders,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the page and its pictures.")] = Path("report"),
    title: Annotated[str | None, typer.Option(help="Heading of the page.", show_default=False)] = None,
    kind: Annotated[
        str | None,
        typer.Option("--figures", metavar="KIND", help="Also figures for a paper: pdf or svg.", show_default=False),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Width of these figures: column (3.3 inches) or page (6.9 inches).",
            show_default="column",
        ),
    ] = None,
) -> None:
    """Write one HTML page with tables and pictures of runs."""
    if kind is not None and kind not in PAPER_KINDS:
        raise UnknownName(f"report: unknown kind of --figures {kind!r}; {did_you_mean(kind, PAPER_KINDS)}")
    if size is not None and size not in PAPER_SIZES:
        raise UnknownName(f"report: unknown --size {size!r} of figures; {did_you_mean(size, PAPER_SIZES)}")
    if size is not None and kind is None:
        raise ConfigError("report: --size is that of --figures; give both, for example --figures pdf --size column.")
    runs, broken = load_whole(folders, check_run)
    print(write_report(runs, out, title, broken))
    for path in write_figures(runs, out, kind, size or "column") if kind else ():
        print(path)
