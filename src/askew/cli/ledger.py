"""`askew ledger`: what the papers print and claim, beside what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group
from rich.text import Text

from ..errors import StoreError
from ..experiment.store import read_text, write_text
from ..report import terminal
from ..reproduction import ledger as library
from ..reproduction.ledger_page import write_ledger
from ..reproduction.papers import papers_folder
from .options import AsJson, examples, print_json, print_rich

EPILOG = examples(
    "askew ledger", "askew ledger --check", "askew ledger --html ledger.html", "askew ledger --results elsewhere --json"
)
PAGE, RESULTS = Path("docs/reproduction.md"), Path("results")


def ledger(
    results: Annotated[Path, typer.Option(metavar="DIR", help="Folder of measured results.")] = RESULTS,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The page, as Markdown.")] = PAGE,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write a page to look at in a browser.")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Write nothing; fail if the page is out of date.")] = False,
    as_json: AsJson = False,
) -> None:
    """Put every number and claim of the papers beside what was measured.

    Made from the papers' files and the stored results alone: the same files give the same page.
    """
    if results != RESULTS and not results.is_dir():
        raise StoreError(
            f"there is no folder {str(results)!r}; name one that `askew reproduce --results` wrote, or leave it out."
        )
    chapters = library.collect(papers_folder(), results)
    text = library.markdown(chapters)
    if check:
        if not out.exists() or read_text(out) != text:
            raise StoreError(
                f"{out} does not follow from {results}; write it again: {terminal.command('ledger', '--results', results, '--out', out)}."
            )
    else:
        write_text(out, text)
        if html:
            write_ledger(chapters, html)
    if as_json:
        print_json(
            [{"id": j.claim.id, "verdict": j.words, "paper": j.claim.printed} for c in chapters for j in c.claims]
        )
    else:
        print_rich(shown(chapters, [] if check else [out, *([html] if html else [])]))


def shown(chapters: list[library.Chapter], written: list[Path]) -> Group:
    """How the claims stand, paper by paper."""
    table = terminal.plain_table("paper", "printed\nnumbers", "measured", *library.VERDICTS)
    table.columns[0].justify = "left"
    for chapter in chapters:
        table.add_row(*library.summary(chapter))
    return Group(table, *(Text(str(path), terminal.QUIET) for path in written))
