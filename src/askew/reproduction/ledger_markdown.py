"""The ledger as a page of Markdown: docs/reproduction.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .ledger import VERDICTS, ClaimResult, LedgerRow, LedgerTable, PaperSection, collect_ledger

HEAD = """# Reproduction ledger

This page is made by `askew ledger` from `papers/` and `results/` alone. `papers/` holds the experiments, the numbers \
that the papers print
and their claims in our words; `results/` holds what we measured. A run that was not made is never filled in.

- **Ours** is the mean over seeds ± one standard deviation, at full scale only. Where an experiment has a grid, \
settings are chosen as the
  paper chooses them, on the test set; **validated** chooses settings and round on one half of the test set and \
measures on the other.
- A **verdict** is *holds*, *does not hold*, *undecided* (at so many seeds) or *not run*. Differences are taken \
within a seed; the test is
  a one-sided paired t-test at 5%, from five seeds on confirmed by all flips of signs. A claim about many cells holds \
if every cell passes,
  and does not hold if one is reversed after Holm's correction over all of them. Tuned settings are chosen on other \
seeds than those tested.
- Where a paper can be read in several ways, there is a verdict for each reading, the default one first. A claim does \
not hold if it
  implies one that does not.
- **needs**: the cheapest runs that would decide an open claim, with their time (from measured speeds) and its range. \
A cell that points
  the other way is taken to the number of seeds at which it refutes the claim in eight of ten trials, if its \
difference stays as it is.
- **Paper**: do the paper's own numbers support its claim? n/a: it prints none.
- Below every table: what the paper leaves open and what was done, and why ours is more than two points of accuracy \
from a printed
  number, or what was tried to find out.
- Verdicts from smaller runs read *(reduced)* and never stand beside published numbers.
"""
CLAIM_COLUMNS = ("claim", "verdict", "evidence", "paper", "controls")
NUMBER_COLUMNS = ("case", "method", "metric", "paper", "ours", "validated", "difference", "chosen", "command")


def ledger_markdown(papers: Path, results: Path) -> str:
    """The ledger of a folder of papers and one of results, as Markdown."""
    return to_markdown(collect_ledger(papers, results))


def to_markdown(sections: Sequence[PaperSection]) -> str:
    """The whole page."""
    summary = ("paper", "printed numbers", "measured", *VERDICTS)
    lines = [HEAD, *markdown_table(summary, [section.summary() for section in sections])]
    for section in sections:
        lines += ["", f"## {section.title}", "", f"### {section.title}: claims", ""]
        lines += markdown_table(CLAIM_COLUMNS, [claim_cells(result) for result in section.claims])
        for table in section.tables:
            lines += table_lines(table)
        if section.unprinted:
            lines += ["", f"### {section.title}: experiments without printed numbers", ""]
            lines += [f"- {table.experiment.id}: {' '.join(table.remarks)}" for table in section.unprinted]
    return "\n".join(lines) + "\n"


def table_lines(table: LedgerTable) -> list[str]:
    """The printed numbers of one experiment, below a heading."""
    e = table.experiment
    machines = f" Measured on {'; '.join(table.machines)}." if table.machines else ""
    lines = ["", f"### {e.id}: {e.title}", "", f"{e.where}.{machines}", ""]
    lines += [line for remark in table.remarks for line in (remark, "")]
    return lines + markdown_table(NUMBER_COLUMNS, [row_cells(row) for row in table.rows])


def claim_cells(result: ClaimResult) -> list[str]:
    """The cells of a claim, as CLAIM_COLUMNS names them."""
    claim = result.claim
    where = f"{claim.where}; {', '.join(claim.experiments)}"
    return [
        f"**{claim.id}** {claim.text} *{where}*",
        f"**{result.verdict_text}**",
        "<br>".join(result.evidence),
        claim.printed,
        "<br>".join(result.controls),
    ]


def row_cells(row: LedgerRow) -> list[str]:
    """The cells of a printed number, as NUMBER_COLUMNS names them."""
    p = row.printed
    note = f" ({p.note})" if p.note else ""
    return [
        p.case,
        p.method,
        p.metric,
        f"{p.text}{note}",
        row.ours,
        row.validated,
        row.difference,
        row.hyper,
        f"`{row.command}`",
    ]


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table."""

    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"

    return [line(headings), line(["---"] * len(headings)), *map(line, rows)]
