"""The ledger as pages of Markdown: docs/reproduction.md, and beside it a folder with a page for each paper."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import fmean, median
from types import MappingProxyType

from ..report.picture import Picture
from .claim_results import VERDICTS, ClaimResult
from .claim_rules import FAILS, HOLDS, NOT_RUN
from .ledger import PaperSection
from .ledger_curves import figure_picture
from .ledger_figures import forest_picture, leads_picture, scatter_picture, svg_with_text
from .ledger_rows import LARGE_GAP, LedgerRow, LedgerTable, count_measured
from .ledger_summary import (
    COUNTED,
    DEDUCED,
    NO_RULE,
    TRAINED,
    Lead,
    claim_grounds,
    count_columns,
    find_leads,
    find_standing,
    gap_sizes,
    summary_texts,
)
from .titles import case_title

PAGE_NAME, NOT_RUN_PAGE = "reproduction.md", "not-run.md"
HEAD = """# Reproduction ledger

Which of these methods should I believe, and by how much? In points of test accuracy, from our runs.
"""
FINDING_NOTE = (
    "*Column*: one dataset and split of the paper's tables. *Clear*: three seeds or more put the 95% interval of the "
    "mean difference on one side of 0 (not corrected for the number of comparisons). *First*: ahead of every other "
    "method that was run; *behind*: another is ahead. *Yes*: clearly first in a column and clearly behind in none; "
    "*no*: the reverse; *in part*: both are found. The answer is for the columns that were run."
)
HOW = """## How to read it

- These pages are made by `askew ledger` from `papers/` (the papers' experiments, printed numbers and claims) and \
`results/` (our runs) alone.
- **Ours** is the mean over seeds ± one standard deviation, at full scale only. Where an experiment has a grid, \
settings are chosen as the
  paper chooses them: on the test set, at the seeds at which the whole grid was run, which mostly is the first alone. \
**Validated** chooses
  settings and round on one half of the test set and measures on the other. Leads are differences of our numbers \
within a seed, at the seeds
  that both methods have, without those by which the settings of one of them were chosen, where there are others.
- A **verdict** on a claim is *holds*, *does not hold*, *undecided* (at so many seeds) or *not run*. Differences are \
taken within a seed, and
  tuned settings are chosen at other seeds than the tested one. Each comparison is tested by a one-sided paired t-test \
at 5%. From five
  seeds on an exact test is made too (all flips of the signs of the differences), and it decides where the two \
disagree. A claim of many
  comparisons holds if every one passes. It does not hold if one of them is significant in the opposite direction: by \
the t-test after
  Holm's correction for the number of comparisons, and by the exact test without correction (corrected, it could not \
refute a claim of
  fifty comparisons with ten seeds).
- Seeds were added where a verdict seemed near. So their number differs between comparisons, and the seeds that \
suggested a verdict also
  count in its test: a p-value just below 5% says less than it would with a number of seeds fixed beforehand.
- **Signs**: α, β: Dirichlet parameter, smaller is more skewed; D1, D2: FedDC's two Dirichlet splits (0.6 and 0.3); γ: \
skew of participation;
  C: share of clients in a round; J: local steps; N_c: labels of a client; 15%: of the clients take part in a round.
- Where a paper can be read in several ways, there is a verdict for each reading. One that is marked as the default \
decides the claim; where
  none is, the claim is undecided until all readings are decided, and then has the verdict of the first. A claim does \
not hold if it
  implies one that does not.
- Verdicts are **trained** (from runs), **counted** (bytes or samples of runs) or **deduced** (from the methods' code \
and arithmetic, no run).
- Verdicts from smaller runs read *(reduced)* and never stand beside published numbers. A run that was not made is \
never filled in.
"""
CLAIM_NOTE = (
    "*In print*: do the paper's own numbers support the claim (n/a: it prints none)? *By sign*: how many comparisons "
    "point as the claim says. *Weakest*: the comparison with the largest p; *against*: one that refutes the claim, "
    "with p after Holm's correction. *Exact p*: from all flips of signs. `best_accuracy`, `last_accuracy`: of the best "
    "and of the last round; `mean_accuracy_50`, `mean_accuracy_100`: the mean over the first half of the rounds, and "
    "over all."
)
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
CLAIM_COLUMNS = ("claim", "verdict", "evidence")
LEAD_COLUMNS = ("methods", "columns", "mean (printed)", "least", "most")
LEAD_NOTE = (
    "Points of accuracy of the first method ahead of the second (−: behind), over the columns of the tables. Rows of "
    "a table have different seeds; comparisons use common seeds only."
)
FINDING_COLUMNS = ("paper", "better than the others?", "by how much", "its columns here", "first in print")
OVERVIEW_COLUMNS = (
    "paper",
    "printed numbers",
    "measured",
    "median distance",
    f"over {LARGE_GAP:g} points off",
    *VERDICTS,
)
MISSING_COLUMNS = ("case", "method", "metric", "paper", "ours")
METRIC_TITLES = {
    "best_accuracy": "Best test accuracy, %",
    "last_accuracy": "Last test accuracy, %",
    "best_round": "Round of the best accuracy",
    "rounds_to": "Rounds to the target (a run that misses it counts as one more than all its rounds)",
    "speedup": "Speed-up: rounds of FedAvg to the target by those of the method (a miss counts as all rounds)",
    "seconds_per_round": "Seconds a round",
}
MAX_COLUMNS = 6  # of a table of numbers beside its heading
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
    folder = out.with_suffix("")
    pictures = ledger_pictures(sections)
    files = {path: text.encode() for path, text in markdown_pages(sections, out, pictures).items()}
    shown = [figure_picture(figure) for section in sections for figure in section.figures if figure.is_shown]
    return files | {folder / f"{p.name}.svg": svg_with_text(p) for p in [*pictures.values(), *shown]}


def ledger_pictures(sections: Sequence[PaperSection]) -> dict[str, Picture]:
    """The pictures that are no figures of papers, by their names: two of all papers, and one of each paper's claims."""
    drawn = [leads_picture(sections), scatter_picture(sections), *map(forest_picture, sections)]
    return {picture.name: picture for picture in drawn if picture}


def markdown_pages(
    sections: Sequence[PaperSection], out: Path, pictures: Mapping[str, Picture] = MappingProxyType({})
) -> dict[Path, str]:
    """The text of every page by its path, with the pictures."""
    folder = out.with_suffix("")
    pages = {out: first_page(sections, folder.name, pictures)}
    pages |= {folder / f"{s.name}.md": paper_page(s, out.name, pictures.get(f"{s.name}-effects")) for s in sections}
    return pages | {folder / NOT_RUN_PAGE: not_run_page(sections, out.name)}


def picture_lines(picture: Picture, folder: str = "") -> list[str]:
    """A picture that links to its file, where it can be seen larger, and what it shows."""
    file = f"{folder}{picture.name}.svg"
    return ["", f"[![{picture.alt}]({file})]({file})", "", f"*{picture.title}. {picture.note}*"]


# the first page -------------------------------------------------------------------------------------------------


def first_page(sections: Sequence[PaperSection], folder: str, pictures: Mapping[str, Picture]) -> str:
    """What the ledger comes to: the methods beside their rivals, two pictures, and counts by paper."""
    lines = [HEAD, *markdown_table(FINDING_COLUMNS, [finding_cells(s, f"{folder}/{s.name}.md") for s in sections])]
    lines += ["", FINDING_NOTE]
    for name in ("leads", "numbers"):
        lines += picture_lines(pictures[name], f"{folder}/") if name in pictures else []
    lines += [
        "",
        "## Numbers and claims",
        "",
        f"{totals_text(sections)} [What was not run]({folder}/{NOT_RUN_PAGE}).",
        "",
    ]
    lines += markdown_table(OVERVIEW_COLUMNS, [overview_cells(s, f"{folder}/{s.name}.md") for s in sections])
    return "\n".join([*lines, "", HOW])


def finding_cells(section: PaperSection, link: str) -> list[str]:
    """A paper's line in the first table: whether its method is better than the others, and by how much."""
    standing = find_standing(find_leads(section))
    here, printed = (standing.text, f"{standing.printed} of {standing.columns}") if standing.columns else ("–", "–")
    left_out = count_columns(section) - standing.columns
    here += f"; {left_out} not run" if left_out and standing.columns else ""
    return [f"[{section.title}]({link})", f"**{standing.answer}**", summary_texts(section)[0], here, printed]


def totals_text(sections: Sequence[PaperSection]) -> str:
    """Numbers and claims of all papers together, in a few sentences."""
    rows = [row for section in sections for row in section.rows]
    sizes = gap_sizes(rows)
    claims = [result for section in sections for result in section.claims]
    decided = [result for result in claims if result.is_decided]
    trained = [result for result in decided if claim_grounds(result) == TRAINED]
    counts = {verdict: sum(r.verdict == verdict for r in trained) for verdict in (HOLDS, FAILS)}
    weak = {
        "open in another reading": [r.claim.id for r in decided if r.has_open_reading],
        "the opposite in another reading": [r.claim.id for r in decided if r.is_reversed],
        "from smaller runs alone (reduced)": [r.claim.id for r in decided if r.is_reduced],
        "undecided if exact p-values were corrected too": [r.claim.id for r in decided if r.if_corrected != r.verdict],
    }
    of_these = "; ".join(f"{len(ids)} {text} ({', '.join(ids)})" for text, ids in weak.items() if ids)
    return (
        f"Of {len(rows):,} printed numbers {count_measured(rows):,} are measured. Of the {len(sizes):,} accuracies "
        f"among them {sum(size <= 1 for size in sizes):,} are within a point of the printed one, and "
        f"{sum(size > LARGE_GAP for size in sizes):,} more than {LARGE_GAP:g} points off. "
        f"Of {len(claims)} claims {len(decided)} are decided: {len(trained)} by training ({counts[HOLDS]} hold, "
        f"{counts[FAILS]} do not), {len(decided) - len(trained)} by counting or deduction."
        f"{f' Of these verdicts: {of_these}.' if of_these else ''}"
    )


def overview_cells(section: PaperSection, link: str) -> list[str]:
    """A paper's line in the table of numbers and claims."""
    sizes, (title, numbers, measured, *verdicts) = gap_sizes(section.rows), section.summary()
    large = sum(size > LARGE_GAP for size in sizes)
    far = f"[{large} of {len(sizes)}]({link}#not-reproduced)" if large else f"0 of {len(sizes)}"
    gaps = [f"{median(sizes):.1f}", far] if sizes else ["–", "–"]
    return [f"[{title}]({link})", numbers, measured, *gaps, *verdicts]


# the page of a paper --------------------------------------------------------------------------------------------


def paper_page(section: PaperSection, first: str, effects: Picture | None = None) -> str:
    """A paper's summary, leads, large gaps, figures, claims by their grounds, and tables."""
    lines = [f"# {section.title}", ""]
    lines += [summary_texts(section)[1], ""] if section.summary_template else []
    lines += [f"[First page](../{first}), which says how to read this one."]
    if leads := lead_rows(section):
        lines += ["", "## Does it beat the others?", "", LEAD_NOTE, "", *markdown_table(LEAD_COLUMNS, leads)]
    lines += [*gap_lines(section), *figure_lines(section), "", "## Claims", "", CLAIM_NOTE]
    lines += picture_lines(effects) if effects else []
    for grounds, title in GROUNDS_TITLES.items():
        shown = [r for r in section.claims if claim_grounds(r) == grounds and r.verdict != NOT_RUN]
        shown.sort(key=lambda r: VERDICTS.index(r.verdict))
        if shown:
            lines += ["", f"### {title}", ""]
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
        lines += [f"- {t.experiment.id}: {' '.join(t.remarks(shared))}" for t in section.unprinted]
    return "\n".join(lines) + "\n"


def shared_choices(section: PaperSection) -> list[tuple[str, str]]:
    """What the paper leaves open of more than one experiment, and what is done: each once."""
    counts = Counter(choice for table in (*section.tables, *section.unprinted) for choice in table.choices.items())
    return [choice for choice, count in counts.items() if count > 1]


def lead_rows(section: PaperSection) -> list[list[str]]:
    """The leads of the paper's methods over each other one: a row for each, with mean and extremes."""
    by_rival: dict[tuple[str, str], list[Lead]] = {}
    for lead in find_leads(section):
        by_rival.setdefault((lead.method, lead.rival), []).append(lead)
    return [[f"{method} – {rival}", *lead_cells(leads)] for (method, rival), leads in by_rival.items()]


def lead_cells(leads: Sequence[Lead]) -> list[str]:
    """In how many columns the method is clearly ahead or behind, mean leads, and the extremes."""
    ahead, behind = sum(lead.is_ahead for lead in leads), sum(lead.is_behind for lead in leads)
    mean, printed = fmean(lead.ours for lead in leads), fmean(lead.printed for lead in leads)
    ends = (min(leads, key=lambda lead: lead.ours), max(leads, key=lambda lead: lead.ours))
    return [
        f"clearly ahead in {ahead}, clearly behind in {behind} of {len(leads)}",
        f"{mean:+z.2f} ({printed:+z.2f})",
        *(f"{e.ours:+z.2f} in {case_title(e.case)} ({e.sure})" for e in ends),
    ]


def gap_lines(section: PaperSection) -> list[str]:
    """The accuracies that are far from the printed ones, with what is known of the cause."""
    sizes = gap_sizes(section.rows)
    lines = [f"- {table.experiment.id}: {cause}." for table in section.tables for cause in table.causes]
    large = sum(size > LARGE_GAP for size in sizes)
    text = f"{large} of {len(sizes)} accuracies are more than {LARGE_GAP:g} points from the printed ones."
    return ["", "## Not reproduced", "", text, "", *lines] if lines else []


def figure_lines(section: PaperSection) -> list[str]:
    """The published figures drawn from our runs, and those of which too little was run."""
    lines = ["", "## Figures"] if section.figures else []
    for figure in section.figures:
        if figure.is_shown:
            file = f"{figure.file_name}.svg"
            lines += ["", f"### {figure.title}", "", f"[![{figure.alt}]({file})]({file})", "", f"*{figure.note}*"]
    few = [f"{figure.experiment.id} ({figure.experiment.where})" for figure in section.figures if not figure.is_shown]
    return [*lines, *(["", f"Of these one line only was run: {', '.join(few)}."] if few else [])]


def table_lines(table: LedgerTable, shared: Collection[tuple[str, str]] = ()) -> list[str]:
    """The numbers of one experiment below a heading; without any, what is to be known of it."""
    e, measured = table.experiment, count_measured(table.rows)
    left_out = len(table.rows) - measured
    missing = f" {left_out} of {len(table.rows)} numbers are [not run]({NOT_RUN_PAGE})." if left_out else ""
    lines = ["", f"### {e.id}: {e.title}", "", f"{e.where}.{f' {cell_note(table.rows)}' if measured else ''}{missing}"]
    for metric, (headings, rows) in number_grids(table.rows).items():
        lines += ["", f"**{METRIC_TITLES.get(metric, metric)}**", "", *markdown_table(headings, rows)]
    lines += [text for note in e.notes for text in ("", note)]
    folded = [*table.choice_texts(shared), *(f"measured on {machine}" for machine in table.machines)]
    items = "".join(f"<li>{escape(text, quote=False)}</li>" for text in folded)
    return (
        [*lines, "", f"<details><summary>Choices and machines</summary><ul>{items}</ul></details>"] if folded else lines
    )


def cell_note(rows: Sequence[LedgerRow]) -> str:
    """What the cells of tables of numbers show, and how one is measured again."""
    commands = dict.fromkeys(again_command(row) for row in rows if row.values)
    return (
        f"Ours (printed), in a smaller line seeds and settings; one again: {', or '.join(f'`{c}`' for c in commands)}."
    )


def again_command(row: LedgerRow) -> str:
    """The command of a number with CASE, METHOD and N for what differs between numbers."""
    words = shlex.split(row.command)
    named = [n for n, word in enumerate(words) if word in ("--only", "--seeds")]
    kept = [word for n, word in enumerate(words) if n not in named and n - 1 not in named]
    return f"{shlex.join(kept)} --only case=CASE --only method=METHOD --seeds N"


def number_grids(rows: Sequence[LedgerRow]) -> dict[str, tuple[list[str], list[list[str]]]]:
    """By metric: headings and rows of a table of methods by cases, or of cases by methods where there are many cases.

    They are in the order in which they are printed; those of which nothing was measured are left out.
    """
    grids = dict[str, tuple[list[str], list[list[str]]]]()
    for metric in dict.fromkeys(row.printed.metric for row in rows if row.values):
        cells = {(row.printed.case, row.printed.method): row for row in rows if row.printed.metric == metric}
        cases, methods = (
            [
                name
                for name in dict.fromkeys(key[n] for key in cells)
                if any(cells[k].values for k in cells if k[n] == name)
            ]
            for n in (0, 1)
        )
        titles = {
            case: f"{case_title(case)}<br>`{case}`" if case_title(case) != case else f"`{case}`" for case in cases
        }
        if len(cases) > MAX_COLUMNS:
            lines = [[titles[c], *(number_cell(cells.get((c, m))) for m in methods)] for c in cases]
            grids[metric] = ["case", *methods], lines
        else:
            lines = [[m, *(number_cell(cells.get((c, m))) for c in cases)] for m in methods]
            grids[metric] = ["method", *titles.values()], lines
    return grids


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
                lines += markdown_table(MISSING_COLUMNS, [missing_cells(row) for row in rows])
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


def number_cell(row: LedgerRow | None) -> str:
    """Our number and the printed one; in a second line its seeds and settings."""
    if row is None:
        return ""
    printed = f"({row.printed.text}{f'; {row.printed.note}' if row.printed.note else ''})"
    if not row.values:
        return f"– {printed}"
    more = [row.seeds_text, row.hyper, f"validated {row.validated}" if row.held_out else ""]
    return f"{row.number} {printed}<br><small>{'; '.join(filter(None, more))}</small>"


def claim_cells(result: ClaimResult, evidence: Sequence[str]) -> list[str]:
    """The cells of a claim, as CLAIM_COLUMNS names them."""
    claim = result.claim
    where = f"{claim.where}; {', '.join(claim.experiments)}; in print: {claim.printed}"
    controls = [f"*Control*: {text}" for text in result.controls]
    return [f"**{claim.id}** {claim.text} *{where}*", f"**{result.verdict_text}**", "<br>".join([*evidence, *controls])]


def missing_cells(row: LedgerRow) -> list[str]:
    """The cells of a printed number that was not measured, as MISSING_COLUMNS names them."""
    p = row.printed
    return [p.case, p.method, p.metric, f"{p.text}{f' ({p.note})' if p.note else ''}", row.ours]


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table."""

    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"

    return [line(headings), line(["---"] * len(headings)), *map(line, rows)]
