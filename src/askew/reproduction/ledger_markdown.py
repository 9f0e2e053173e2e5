"""The ledger as pages of Markdown: docs/reproduction.md, and beside it a folder with a page for each paper."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from statistics import fmean

from ..report.picture import Picture
from .claim_rules import FAILS, HOLDS, NOT_RUN
from .ledger import VERDICTS, ClaimResult, LedgerRow, LedgerTable, PaperSection, count_measured
from .ledger_curves import figure_picture
from .ledger_figures import forest_picture, scatter_picture, svg_with_text
from .ledger_summary import (
    COUNTED,
    DEDUCED,
    NO_RULE,
    TRAINED,
    Lead,
    accuracy_rows,
    claim_grounds,
    count_wins,
    find_gaps,
    find_leads,
    gap_of,
    lead_seeds,
    summary_texts,
)

PAGE_NAME, NOT_RUN_PAGE = "reproduction.md", "not-run.md"
HEAD = """# Reproduction ledger

Which of these methods should I believe, and by how much? This page answers from what was measured; it is made by \
`askew ledger`
from `papers/` (the papers' experiments, printed numbers and claims) and `results/` (our runs) alone.

Differences are in points of accuracy, at the same seeds. *Clear*: the 95% interval over the seeds is on one side of 0.
A claim *holds* or *does not hold* by a test at 5%; everything else is *undecided* ([how to read it](#how-to-read-it)).
"""
HOW = """## How to read it

- **Ours** is the mean over seeds ± one standard deviation, at full scale only. Where an experiment has a grid, \
settings are chosen as the
  paper chooses them, on the test set; **validated** chooses settings and round on one half of the test set and \
measures on the other.
- A **verdict** is *holds*, *does not hold*, *undecided* (at so many seeds) or *not run*. Differences are taken \
within a seed; the test is
  a one-sided paired t-test at 5%; from five seeds on all flips of signs decide at 5% where the two disagree. A claim \
about many cells
  holds if every cell passes, and does not hold if one is reversed by both: by the flips at 5%, and by the t-test \
after Holm's
  correction over all cells (the flips are not corrected: ten seeds could not pass a family of fifty). Tuned settings \
are chosen on
  other seeds than those tested.
- Seeds were added where they promised a verdict, so their number differs between cells, and the first seeds of a cell \
are among those
  that test it. A p-value just below 5% says less than it would with seeds fixed beforehand.
- **Signs**: α, β: Dirichlet parameter, smaller is more skewed; D1, D2: FedDC's two Dirichlet splits (0.6 and 0.3); γ: \
skew of participation;
  C: share of clients in a round; J: local steps; N_c: labels of a client.
- Where a paper can be read in several ways, there is a verdict for each reading, the default one first. A claim does \
not hold if it
  implies one that does not.
- Verdicts are **trained** (from runs), **counted** (bytes or samples of runs) or **deduced** (from the methods' code \
and arithmetic, no run).
- **Paper**: do the paper's own numbers support its claim? n/a: it prints none.
- Beside every table: what the paper leaves open and what was done, and why ours is more than two points of accuracy \
from a printed
  number, or what was tried to find out.
- Verdicts from smaller runs read *(reduced)* and never stand beside published numbers. A run that was not made is \
never filled in.
"""
NOT_RUN_HEAD = """# Not run

What was not measured, and what it costs. Times come from measured speeds; in brackets the range in which eight of ten \
times lie. One
number is measured with `askew reproduce EXPERIMENT --scale full --only case=CASE --only method=METHOD`. Back to the \
[first page](../{first}).
"""
OPEN_HEAD = """An undecided claim **needs** the cheapest runs that would decide it. A cell that points the other \
way is taken to the number of seeds at
which it refutes the claim in eight of ten trials, if its difference stays as it is.
"""
CLAIM_COLUMNS = ("claim", "verdict", "evidence", "paper", "controls")
NUMBER_COLUMNS = ("case", "method", "metric", "paper", "ours", "validated", "difference", "chosen", "command")
LEAD_COLUMNS = ("method", "against", "columns", "seeds", "lead here", "lead in print", "least here", "most here")
LEAD_NOTE = "Points of accuracy, on average over the columns of the tables and the seeds that both methods have."
GAP_COLUMNS = ("median gap", "largest gap", "first here", "first in print")
OVERVIEW_COLUMNS = ("paper", "printed numbers", "measured", *VERDICTS, *GAP_COLUMNS)
OVERVIEW_NOTE = (
    "Gap: distance of an accuracy from the printed one, in points; beside its table stands what is known of the cause. "
    "First: columns of the tables in which a method that the paper proposes (MLDL24: loss-biased weights, MGDA) is "
    "above every other one that was measured, at the seeds that both have."
)
MISSING_COLUMNS = ("case", "method", "metric", "paper", "ours")
GROUNDS_TITLES = {
    TRAINED: "Claims that training tests",
    COUNTED: "Claims that are counted",
    DEDUCED: "Claims that are deduced without a run",
    NO_RULE: "Claims that cannot be tested",
}


def ledger_files(sections: Sequence[PaperSection], out: Path) -> dict[Path, bytes]:
    """The files of the ledger, pages and pictures: the first page `out`, the others in a folder of the same name.

    An `out` without a suffix is the folder of the first page.
    """
    out = out if out.suffix else out / PAGE_NAME
    pictures = [picture for draw in (scatter_picture, forest_picture) if (picture := draw(sections))]
    files = {path: text.encode() for path, text in markdown_pages(sections, out, pictures).items()}
    pictures += [figure_picture(figure) for section in sections for figure in section.figures if figure.is_shown]
    return files | {out.with_suffix("") / f"{p.name}.svg": svg_with_text(p) for p in pictures}


def markdown_pages(sections: Sequence[PaperSection], out: Path, pictures: Sequence[Picture] = ()) -> dict[Path, str]:
    """The text of every page by its path; the first one shows the pictures."""
    folder = out.with_suffix("")
    shown = [f"![{p.alt}]({folder.name}/{p.name}.svg)\n\n*{p.title}. {p.note}*\n" for p in pictures]
    pages = {out: first_page(sections, folder.name, shown)}
    pages |= {folder / f"{section.name}.md": paper_page(section, out.name) for section in sections}
    return pages | {folder / NOT_RUN_PAGE: not_run_page(sections, out.name)}


# the first page -------------------------------------------------------------------------------------------------


def first_page(sections: Sequence[PaperSection], folder: str, pictures: Sequence[str]) -> str:
    """What the ledger comes to: findings, counts by paper, the pictures, and how to read the other pages."""
    links = {section.name: str(PurePosixPath(folder) / f"{section.name}.md") for section in sections}
    lines = [HEAD, "## Findings", "", *finding_lines(sections, links), ""]
    lines += [totals_text(sections, f"{folder}/{NOT_RUN_PAGE}"), ""]
    lines += markdown_table(OVERVIEW_COLUMNS, [overview_cells(section, links[section.name]) for section in sections])
    lines += ["", f"*{OVERVIEW_NOTE}*"]
    lines += ["", *pictures]
    for section in sections:
        lines += paper_overview(section, links[section.name])
    return "\n".join([*lines, HOW])


def finding_lines(sections: Iterable[PaperSection], links: Mapping[str, str]) -> list[str]:
    """One finding for each paper that has one."""
    findings = [(section, summary_texts(section)[0]) for section in sections]
    return [f"- **[{s.title}]({links[s.name]})**: {text}" for s, text in findings if text]


def totals_text(sections: Sequence[PaperSection], not_run: str = "") -> str:
    """Numbers and claims of all papers together, in a few sentences."""
    rows = [row for section in sections for row in section.rows]
    gaps = find_gaps([row for section in sections for row in accuracy_rows(section.rows)])
    claims = [result for section in sections for result in section.claims]
    decided = [result for result in claims if result.verdict in (HOLDS, FAILS)]
    trained = [result for result in decided if claim_grounds(result) == TRAINED]
    counts = {verdict: sum(r.verdict == verdict for r in trained) for verdict in (HOLDS, FAILS)}
    corrected = sum(result.if_corrected != result.verdict for result in decided)
    exact = f" {corrected} of these verdicts would be undecided if exact p-values were corrected too." * bool(corrected)
    more = f" [What was not run, and what it costs]({not_run})." if not_run else ""
    return (
        f"Of {len(rows):,} printed numbers {count_measured(rows):,} are measured. Of the {gaps.total:,} accuracies "
        f"among them {gaps.close:,} are within a point of the printed one, and half of all within {gaps.median:.1f}. "
        f"Of {len(claims)} claims {len(decided)} are decided: {len(trained)} by training ({counts[HOLDS]} hold, "
        f"{counts[FAILS]} do not), {len(decided) - len(trained)} by counting or deduction.{exact}{more}"
    )


def overview_cells(section: PaperSection, link: str) -> list[str]:
    """A paper's line in the table of the first page."""
    gaps, wins = find_gaps(accuracy_rows(section.rows)), count_wins(find_leads(section))
    title, *counts = section.summary()
    sizes = [f"{gaps.median:.1f}", f"{gap_of(gaps.largest):+z.1f}"] if gaps.largest else ["–", "–"]
    first = [f"{n} of {wins.columns}" for n in (wins.ours, wins.printed)] if wins.columns else ["–", "–"]
    return [f"[{title}]({link})", *counts, *sizes, *first]


def paper_overview(section: PaperSection, link: str = "") -> list[str]:
    """A paper's claims that training decided, by verdict; and its number that is farthest from the printed one."""
    lines = [f"## {section.title}", ""]
    for verdict, what in ((HOLDS, "Holds"), (FAILS, "Does not hold")):
        found = [r.claim for r in section.claims if r.verdict == verdict and claim_grounds(r) == TRAINED]
        if found:
            lines.append(f"- {what}, by training:")
            lines += [f"    - {claim.text} ({claim.id})" for claim in found]
    gaps = {table.experiment.id: find_gaps(accuracy_rows(table.rows)) for table in section.tables}
    gaps = {experiment: each for experiment, each in gaps.items() if each.largest}
    largest = find_gaps(accuracy_rows(section.rows)).largest
    if largest:
        best = min(gaps, key=lambda experiment: gaps[experiment].median)
        numbers = f"{gaps[best].total} measured accuracies, half of them within {gaps[best].median:.2f} points"
        lines.append(f"- Best reproduced: {best}, {numbers} of the printed ones.")
        p = largest.printed
        lines.append(f"- Largest gap: {p.method} in {p.experiment}, {p.case}: {largest.ours}, printed {p.text}.")
    return [*lines, *([f"- [All claims and tables]({link})"] if link else []), ""]


# the page of a paper --------------------------------------------------------------------------------------------


def paper_page(section: PaperSection, first: str) -> str:
    """A paper's summary, leads, claims by their grounds, and tables with the measured rows."""
    lines = [f"# {section.title}", "", f"Back to the [first page](../{first}), which says how to read this page."]
    summary = summary_texts(section)[1]
    lines += ["", summary] if summary else []
    lines += [*lead_lines(section), *figure_lines(section)]
    for grounds, title in GROUNDS_TITLES.items():
        shown = [r for r in section.claims if claim_grounds(r) == grounds and r.verdict != NOT_RUN]
        shown.sort(key=lambda r: VERDICTS.index(r.verdict))
        if shown:
            lines += ["", f"## {title}", ""]
            lines += markdown_table(CLAIM_COLUMNS, [claim_cells(result, result.grounds) for result in shown])
    missing = [r.claim.id for r in section.claims if r.verdict == NOT_RUN]
    lines += ["", f"[Not run]({NOT_RUN_PAGE}#{section.name}-claims): {', '.join(missing)}."] if missing else []
    shared = shared_choices(section)
    if shared:
        lines += ["", "## Choices that several experiments share", ""]
        lines += [f"- {key}: {text}" for key, text in shared]
    lines += ["", "## Tables"]
    for table in section.tables:
        lines += table_lines(table, shared)
    if section.unprinted:
        lines += ["", "## Experiments without printed numbers", ""]
        lines += [f"- {table.experiment.id}: {' '.join(table.remarks_beside(shared))}" for table in section.unprinted]
    return "\n".join(lines) + "\n"


def shared_choices(section: PaperSection) -> list[tuple[str, str]]:
    """What the paper leaves open of more than one experiment, and what is done: each once."""
    counts = Counter(choice for table in (*section.tables, *section.unprinted) for choice in table.choices.items())
    return [choice for choice, count in counts.items() if count > 1]


def lead_lines(section: PaperSection) -> list[str]:
    """A table of the leads of the paper's methods over each other one: a row for each, with mean and extremes."""
    rows = [[*pair, *lead_cells(leads)] for pair, leads in leads_by_rival(section).items()]
    table = markdown_table(LEAD_COLUMNS, rows)
    return ["", "## Does it beat the others?", "", LEAD_NOTE, "", *table] if rows else []


def leads_by_rival(section: PaperSection) -> dict[tuple[str, str], list[Lead]]:
    """The leads of the paper's methods, by method and other method."""
    by_rival: dict[tuple[str, str], list[Lead]] = {}
    for lead in find_leads(section):
        by_rival.setdefault((lead.method, lead.rival), []).append(lead)
    return by_rival


def lead_cells(leads: Sequence[Lead]) -> list[str]:
    """Numbers of columns and of seeds, mean leads, and the columns with the least and the most."""
    means = (fmean(lead.ours for lead in leads), fmean(lead.printed for lead in leads))
    ends = (min(leads, key=lambda lead: lead.ours), max(leads, key=lambda lead: lead.ours))
    counts = [str(len(leads)), lead_seeds(leads).partition(" seed")[0]]
    return [*counts, *(f"{mean:+z.2f}" for mean in means), *(f"{e.ours:+z.2f} in {e.case}" for e in ends)]


def figure_lines(section: PaperSection) -> list[str]:
    """The published figures drawn from our runs, and those of which too little was run."""
    lines = ["", "## Figures"] if section.figures else []
    for figure in section.figures:
        if figure.is_shown:
            image = f"![{figure.alt}]({figure.file_name}.svg)"
            lines += ["", f"### {figure.title}", "", image, "", f"*{figure.note}*"]
    few = [f"{figure.experiment.id} ({figure.experiment.where})" for figure in section.figures if not figure.is_shown]
    return [*lines, *(["", f"Of these one line only was run: {', '.join(few)}."] if few else [])]


def table_lines(table: LedgerTable, shared: Collection[tuple[str, str]] = ()) -> list[str]:
    """The measured numbers of one experiment below a heading; without any, what is to be known of it."""
    e = table.experiment
    machines = f" Measured on {'; '.join(table.machines)}." if table.machines else ""
    rows = [row for row in table.rows if row.values]
    missing = len(table.rows) - len(rows)
    left_out = f" {missing} of {len(table.rows)} numbers are [not run]({NOT_RUN_PAGE})." if missing else ""
    lines = ["", f"### {e.id}: {e.title}", "", f"{e.where}.{machines}{left_out}", ""]
    lines += [line for remark in table.remarks_beside(shared) for line in (remark, "")]
    return lines + markdown_table(NUMBER_COLUMNS, [row_cells(row) for row in rows]) if rows else lines[:-1]


# what was not run -----------------------------------------------------------------------------------------------


def not_run_page(sections: Sequence[PaperSection], first: str) -> str:
    """What was not run and its cost: by experiment, by claim and by number."""
    lines = [NOT_RUN_HEAD.format(first=first), "## Costs by experiment", ""]
    tables = [table for section in sections for table in section.tables if table.missing]
    costs = [[t.experiment.id, t.experiment.title, unmeasured(t.rows), str(t.missing)] for t in tables]
    lines += markdown_table(("experiment", "title", "numbers not run", "needs"), costs)
    for section in sections:
        lines += ["", f"## {section.title}: claims", "", *open_claims(section)]
        for table in section.tables:
            rows = [row for row in table.rows if not row.values]
            if rows:
                lines += ["", f"### {table.experiment.id}: numbers", ""]
                lines += markdown_table(MISSING_COLUMNS, [row_cells(row)[: len(MISSING_COLUMNS)] for row in rows])
    return "\n".join(lines) + "\n"


def unmeasured(rows: Sequence[LedgerRow]) -> str:
    """How many rows are not measured, of how many."""
    return f"{len(rows) - count_measured(rows)} of {len(rows)}"


def open_claims(section: PaperSection) -> list[str]:
    """The claims that were not run, and what decides those that are undecided."""
    not_run = [result for result in section.claims if result.verdict == NOT_RUN]
    lines = markdown_table(CLAIM_COLUMNS, [claim_cells(r, r.evidence) for r in not_run]) if not_run else []
    undecided = [r for r in section.claims if r.verdict != NOT_RUN and r.bill_text]
    if undecided:
        cells = [[f"{r.claim.id} {r.claim.text}", r.verdict_text, r.bill_text] for r in undecided]
        lines += ["", OPEN_HEAD, *markdown_table(("claim", "verdict", "needs"), cells)]
    return lines or ["All claims are decided."]


# cells ----------------------------------------------------------------------------------------------------------


def claim_cells(result: ClaimResult, evidence: Sequence[str]) -> list[str]:
    """The cells of a claim, as CLAIM_COLUMNS names them."""
    claim = result.claim
    where = f"{claim.where}; {', '.join(claim.experiments)}"
    return [
        f"**{claim.id}** {claim.text} *{where}*",
        f"**{result.verdict_text}**",
        "<br>".join(evidence),
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
