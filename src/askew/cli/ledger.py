"""`askew ledger`: what the papers print and claim, beside what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.text import Text

from ..errors import StoreError
from ..experiment.store import write_atomic
from ..report import terminal
from ..report.statistics import MIN_SEEDS, t_interval
from ..reproduction.claim_results import VERDICTS
from ..reproduction.claim_rules import LEVEL, Finding
from ..reproduction.ledger import PaperSection, collect_ledger
from ..reproduction.ledger_markdown import ledger_files
from ..reproduction.ledger_page import write_ledger_page
from ..reproduction.ledger_summary import claim_grounds
from ..reproduction.paper_tables import text_table
from ..reproduction.papers import papers_folder
from .options import AsJson, examples, print_json, print_rich

app = typer.Typer(add_completion=False)

EPILOG = examples(
    "askew ledger",
    "askew ledger --out ledger.md --html ledger.html",
    "askew ledger --check --out ledger.md",
    "askew ledger --results elsewhere --json",
)
RESULTS = Path("results")  # where `askew reproduce` stores results by default
PAGE = Path("docs/reproduction.md")  # of a checkout: what --check compares by default


@app.command(epilog=EPILOG)
def ledger(
    results: Annotated[Path, typer.Option(metavar="DIR", help="Folder of measured results.")] = RESULTS,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the pages, as Markdown: this one, and others in a folder of its name.",
            show_default=False,
        ),
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page to look at in a browser.")] = None,
    check: Annotated[
        bool, typer.Option("--check", help=f"Write nothing; fail if the pages (--out, or {PAGE}) are out of date.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Put every number and claim of the papers beside what was measured.

    Made from the papers' files and the stored results alone: the same files give the same page.

    Without --out and --html nothing is written.
    """
    if results != RESULTS and not results.is_dir():
        raise StoreError(
            f"there is no folder {str(results)!r}; name one that `askew reproduce --results` wrote, or leave it out."
        )
    sections = collect_ledger(papers_folder(), results)
    written: list[Path] = []
    if check:
        check_page(sections, results, out or PAGE)
    else:
        written = write_pages(sections, out, html)
    if as_json:
        print_json({"claims": claim_records(sections), "numbers": number_records(sections)})
    else:
        print_rich(summary_table(sections, written))


def claim_records(sections: Iterable[PaperSection]) -> list[dict[str, Any]]:
    """Every claim with its verdict as the pages show and count it, where that comes from, and the numbers behind it."""
    claims = [result for section in sections for result in section.claims]
    return [
        {
            "id": r.claim.id,
            "verdict": r.verdict_text,
            "counts_as": r.verdict,
            "from": claim_grounds(r),
            "paper": r.claim.printed,
            "tests": [finding_record(finding) for finding in r.findings.get("full", ())],
        }
        for r in claims
    ]


def finding_record(finding: Finding) -> dict[str, Any]:
    """What one test of a claim found: its verdict, and of each comparison the value at every seed and an interval."""
    comparisons = [
        {
            "name": cell.name,
            "values": cell.values,
            "interval": t_interval(cell.values, LEVEL) if cell.n >= MIN_SEEDS else None,
        }
        for cell in finding.cells
    ]
    return {
        "test": finding.test,
        "verdict": finding.verdict,
        "evidence": finding.evidence,
        "level": LEVEL,
        "comparisons": comparisons,
    }


def number_records(sections: Iterable[PaperSection]) -> list[dict[str, Any]]:
    """Every printed number, as it is printed, with ours by seed; none where it was not run."""
    rows = [row for section in sections for row in section.rows]
    return [
        {**row.printed._asdict(), "ours": list(row.values), "missed": row.missed, "command": row.command}
        for row in rows
    ]


def check_page(sections: Sequence[PaperSection], results: Path, page: Path) -> None:
    """Refuse pages and pictures that are not the ledger of these results."""
    wrong = [
        path
        for path, content in ledger_files(sections, page).items()
        if not path.is_file() or path.read_bytes() != content
    ]
    if wrong:
        again = terminal.command("ledger", "--results", results, "--out", page)
        raise StoreError(f"{wrong[0]} does not follow from {results}; write it again: {again}.")


def write_pages(sections: Sequence[PaperSection], out: Path | None, html: Path | None) -> list[Path]:
    """Write the pages that were asked for; return their paths."""
    files = ledger_files(sections, out) if out else {}
    for path, content in files.items():
        write_atomic(path, content)
    if html:
        write_ledger_page(sections, html)
    return [*files, *([html] if html else [])]


def summary_table(sections: Iterable[PaperSection], written: Iterable[Path]) -> Group:
    """The claims by verdict, paper by paper, and the paths of what was written."""
    headings = ("paper", "printed\nnumbers", "measured", *VERDICTS)
    table = text_table(headings, [section.summary() for section in sections])
    return Group(table, *(Text(str(path), terminal.QUIET) for path in written))
