"""The ledger as one HTML page that loads nothing from elsewhere: claims to filter by verdict, and printed numbers."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Sequence
from html import escape
from pathlib import Path

from ..experiment.store import write_text
from ..report.picture import Picture
from ..report.shell import read_static
from .claim_rules import FAILS, HOLDS, NOT_RUN, UNDECIDED, UNTESTABLE
from .ledger import VERDICTS, ClaimResult, LedgerRow, LedgerTable, PaperSection, count_measured
from .ledger_curves import figure_picture
from .ledger_figures import forest_picture, scatter_picture, svg_with_text
from .ledger_markdown import (
    GAP_COLUMNS,
    HOW,
    LEAD_COLUMNS,
    LEAD_NOTE,
    OVERVIEW_NOTE,
    lead_cells,
    leads_by_rival,
    overview_cells,
    paper_overview,
    totals_text,
)
from .ledger_summary import summary_texts

BOLD, ITALIC, CODE = re.compile(r"\*\*(.+?)\*\*"), re.compile(r"\*(.+?)\*"), re.compile(r"`(.+?)`")
# Classes of the style sheet by verdict.
CLASSES = {HOLDS: "yes", FAILS: "no", UNDECIDED: "open", NOT_RUN: "none", UNTESTABLE: "never"}
NUMBER_HEADINGS = ("Case", "Method", "Metric", "Paper", "Ours", "Validated", "Difference", "Command")


def write_ledger_page(sections: Sequence[PaperSection], path: Path) -> Path:
    """Write the page; return its path."""
    write_text(path, ledger_page(sections))
    return path


def ledger_page(sections: Sequence[PaperSection]) -> str:
    """The page's HTML."""
    claims = [result for section in sections for result in section.claims]
    rows = [row for section in sections for row in section.rows]
    numbers = f"{len(claims)} claims and {len(rows):,} printed numbers of {len(sections)} papers"
    return TEMPLATE.format(
        sentence=f"{numbers}, beside what we measured.",
        result=totals_text(sections),
        buttons="".join(filter_button(v, sum(result.verdict == v for result in claims)) for v in VERDICTS),
        findings="".join(map(finding_item, sections)),
        pictures="".join(picture_figure(p) for draw in (scatter_picture, forest_picture) if (p := draw(sections))),
        gaps=heading_cells(GAP_COLUMNS),
        bars="".join(map(overview_row, sections)),
        note=OVERVIEW_NOTE,
        how=bullet_list(HOW.partition("\n\n")[2].splitlines()),
        papers="\n".join(map(paper_section, sections)),
        style=read_static("text.css") + STYLE,
        script=SCRIPT,
    )


def finding_item(section: PaperSection) -> str:
    """What was found about a paper, as an item of a list; empty where nobody wrote it down."""
    text = inline(summary_texts(section)[0])
    return f'<li><a href="#{section.name}">{section.title}</a>: {text}</li>' if text else ""


def picture_figure(picture: Picture) -> str:
    """A picture inside the page, with what it shows."""
    data = b64encode(svg_with_text(picture)).decode()
    image = f'<img src="data:image/svg+xml;base64,{data}" alt="{escape(picture.alt)}">'
    return f"<figure>{image}<figcaption>{escape(picture.title)}. {escape(picture.note)}</figcaption></figure>"


def filter_button(verdict: str, count: int) -> str:
    """The button that shows the claims with a verdict, and their number."""
    text = f"<strong>{count}</strong><span>{verdict}</span>"
    return f'<button data-kind="{CLASSES[verdict]}" aria-pressed="false">{text}</button>'


def overview_row(section: PaperSection) -> str:
    """The claims of a paper by verdict, as one bar."""
    counts = [(v, section.count(v)) for v in VERDICTS]
    bar = "".join(f'<i class="{CLASSES[v]}" style="flex:{n}" title="{n} {v}">{n}</i>' for v, n in counts if n)
    title = f'<th scope="row"><a href="#{section.name}">{section.title}</a></th>'
    measured = f"{count_measured(section.rows)} of {len(section.rows)}"
    gaps = overview_cells(section, "")[-len(GAP_COLUMNS) :]
    cells = table_cells([measured, *gaps], ("measured", *GAP_COLUMNS))
    return f'<tr>{title}<td class="bar"><div>{bar}</div></td>{cells}</tr>'


def paper_section(section: PaperSection) -> str:
    """The summary, leads, figures, claims and printed numbers of one paper."""
    claims = "\n".join(map(claim_row, section.claims))
    tables = "\n".join(map(number_table, section.tables))
    headings = "".join(f"<th>{heading}</th>" for heading in ("Claim", "Verdict", "Evidence", "Paper", "Controls"))
    return (
        f'<section id="{section.name}"><h2>{section.title}</h2>{summary_parts(section)}'
        f'<h3>Claims</h3><div class="scroll"><table class="claims"><thead>'
        f"<tr>{headings}</tr></thead><tbody>\n{claims}\n</tbody></table></div>\n"
        f"<h3>Printed numbers</h3>\n{tables}{unprinted_experiments(section)}</section>"
    )


def summary_parts(section: PaperSection) -> str:
    """What a paper begins with: its summary, what training decided, its method's leads, and its figures."""
    summary, leads = inline(summary_texts(section)[1]), leads_by_rival(section)
    body = "".join(f"<tr>{table_cells([*pair, *lead_cells(its)], LEAD_COLUMNS)}</tr>" for pair, its in leads.items())
    table = (
        f'<div class="scroll"><table class="numbers"><thead><tr>{heading_cells(LEAD_COLUMNS)}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )
    shown = [figure_picture(figure) for figure in section.figures if figure.is_shown]
    return (
        (f"<p>{summary}</p>" if summary else "")
        + bullet_list(paper_overview(section)[2:])
        + (f'<h3>Does it beat the others?</h3><p class="note">{LEAD_NOTE}</p>{table}' if leads else "")
        + ("<h3>Figures from our runs</h3>" + "".join(map(picture_figure, shown)) if shown else "")
    )


def inline(text: str) -> str:
    """Markdown's bold, italic and code words in HTML."""
    text = escape(text, quote=False)
    for pattern, tag in ((BOLD, "strong"), (ITALIC, "em"), (CODE, "code")):
        text = pattern.sub(rf"<{tag}>\1</{tag}>", text)
    return text


def bullet_list(lines: Sequence[str]) -> str:
    """A list of Markdown, in which indented items belong to the one above, in HTML; other lines go on with an item."""
    items: list[list[str]] = []  # each: its text, then those of the items below it
    for line in filter(str.strip, lines):
        text = line.strip().removeprefix("- ")
        if line.startswith("- "):
            items.append([text])
        elif line.strip().startswith("- "):
            items[-1].append(text)
        else:
            items[-1][-1] += f" {text}"
    parts = [f"<li>{inline(text)}{bullet_list([f'- {line}' for line in more])}</li>" for text, *more in items]
    return f"<ul>{''.join(parts)}</ul>" if parts else ""


def heading_cells(headings: Sequence[str]) -> str:
    return "".join(f"<th>{heading.capitalize()}</th>" for heading in headings)


def table_cells(cells: Sequence[str], headings: Sequence[str]) -> str:
    """The cells of a row; a narrow screen shows their headings beside them."""
    pairs = zip(cells, headings, strict=True)
    return "".join(f'<td data-h="{heading.capitalize()}">{escape(cell)}</td>' for cell, heading in pairs)


def unprinted_experiments(section: PaperSection) -> str:
    """What the paper leaves open of experiments without printed numbers, to unfold; empty where there are none."""
    remarks = [f"{table.experiment.id}: {' '.join(table.remarks)}" for table in section.unprinted]
    summary = "<summary>Experiments without printed numbers</summary>"
    return f"<details>{summary}{paragraphs(remarks)}</details>" if remarks else ""


def claim_row(result: ClaimResult) -> str:
    """One claim with its verdict, evidence and controls."""
    claim, kind = result.claim, CLASSES[result.verdict]
    where = escape(f"{claim.where} · {', '.join(claim.experiments)}")
    return (
        f'<tr data-kind="{kind}" id="{claim.id}"><th scope="row"><small>{claim.id}</small> {escape(claim.text)}'
        f'<span class="where">{where}</span></th>'
        f'<td data-h="Verdict"><b class="pill {kind}">{escape(result.verdict_text)}</b></td>'
        f'<td data-h="Evidence"><div>{paragraphs(result.evidence)}</div></td><td data-h="Paper">{claim.printed}</td>'
        f'<td data-h="Controls"><div>{paragraphs(result.controls)}</div></td></tr>'
    )


def paragraphs(lines: Sequence[str]) -> str:
    return "".join(f"<p>{escape(line)}</p>" for line in lines)


def number_table(table: LedgerTable) -> str:
    """The printed numbers of one experiment, to unfold."""
    e = table.experiment
    rows = "\n".join(map(number_row, table.rows))
    notes = paragraphs([text for text in ("; ".join(table.machines), *table.remarks) if text])
    headings = "".join(f"<th>{heading}</th>" for heading in NUMBER_HEADINGS)
    measured = f"{count_measured(table.rows)} of {len(table.rows)} measured"
    return (
        f"<details><summary>{escape(e.id)}: {escape(e.title)} <em>{escape(e.where)} · {measured}</em></summary>{notes}"
        f'<div class="scroll"><table class="numbers"><thead><tr>{headings}</tr></thead>'
        f"<tbody>\n{rows}\n</tbody></table></div></details>"
    )


def number_row(row: LedgerRow) -> str:
    """One printed number beside ours."""
    p = row.printed
    note = f" <em>{escape(p.note)}</em>" if p.note else ""
    ours = f"<b>{escape(row.ours)}</b>" if row.values else f"<em>{escape(row.ours)}</em>"
    ours += f'<span class="where">{escape(row.hyper)}</span>' if row.hyper else ""
    cells = [
        escape(p.method),
        escape(p.metric),
        f"{escape(p.text)}{note}",
        ours,
        escape(row.validated),
        escape(row.difference),
        f"<code>{escape(row.command)}</code>",
    ]
    pairs = zip(cells, NUMBER_HEADINGS[1:], strict=True)
    labelled = "".join(f'<td data-h="{heading}"><div>{cell}</div></td>' for cell, heading in pairs)
    return f'<tr><th scope="row">{escape(p.case)}</th>{labelled}</tr>'


STYLE = """
:root { --yes: #1a7f52; --no: #b3391f; --open: #9a6700; --none: #8a94a0; --never: #b9c0c8 }
main { max-width: 1280px; margin: 0 auto; padding: 2.5rem 1.25rem 3rem }
@media (max-width: 40rem) { main { padding: 1.2rem .6rem 2rem } }
figure { margin: 1.2rem 0 } figure img { width: auto; max-width: min(100%, 900px); margin: 0; background: #fff;
  border-radius: 8px }
li { margin: .2rem 0; overflow-wrap: anywhere } p { overflow-wrap: anywhere }
figcaption { color: var(--soft); font-size: .85rem }
h3 { font-size: 1rem; margin: 1.4rem 0 .4rem; color: var(--soft) }
a { color: inherit }
.filter { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .9rem; margin-top: 1.6rem }
.filter button { all: unset; cursor: pointer; background: var(--card); border: 1px solid var(--line);
  border-left: 5px solid var(--none);
  border-radius: 12px; padding: .7rem 1rem }
.filter strong { display: block; font-size: 1.7rem; line-height: 1.2; font-variant-numeric: tabular-nums }
.filter span { color: var(--soft); font-size: .88rem }
.filter button:focus-visible { outline: 2px solid var(--mark) }
.filter button[aria-pressed=true] { background: color-mix(in srgb, var(--mark) 12%, var(--card)) }
.filter [data-kind=yes] { border-left-color: var(--yes) } .filter [data-kind=no] { border-left-color: var(--no) }
.filter [data-kind=open] { border-left-color: var(--open) }
.filter [data-kind=never] { border-left-color: var(--never) }
.bar { width: 55% } .bar div { display: flex; gap: 2px; border-radius: 6px; overflow: hidden }
.bar i { margin: 0; height: 1.5rem; width: auto; min-width: 1.4rem; border-radius: 0; color: #fff; text-align: center;
  font: 600 .78rem/1.5rem system-ui, sans-serif }
i.yes, b.yes { background: var(--yes) } i.no, b.no { background: var(--no) }
i.open, b.open { background: var(--open) }
i.none, b.none { background: var(--none) } i.never, b.never { background: var(--never) }
.overview th:first-child { min-width: 6rem } .overview th:nth-child(2) { text-align: left }
.claims td, .claims th, .numbers td, .numbers th { text-align: left; vertical-align: top }
.claims td { white-space: normal; font-size: .85rem; min-width: 4rem } .claims td:nth-child(3) { min-width: 17rem }
.claims td:nth-child(5) { min-width: 14rem; color: var(--soft) }
.claims p { margin: 0 0 .35rem; overflow-wrap: anywhere }
.claims tbody th { font-weight: 500; min-width: 15rem; line-height: 1.35 }
.claims small { color: var(--soft); font-weight: 600 }
.where { display: block; color: var(--soft); font-size: .78rem; font-weight: 400; margin-top: .2rem }
.claims .pill { color: #fff; border-radius: 999px; padding: .15rem .6rem; font-size: .78rem; font-weight: 600;
  display: inline-block }
.numbers td { white-space: normal } .numbers tbody th { min-width: 7rem; font-weight: 500 }
.numbers td:last-child { white-space: normal; min-width: 13rem }
.numbers code { overflow-wrap: anywhere; font-size: .72rem; line-height: 1.3; color: var(--soft) }
summary em { font-weight: 400; font-style: normal } tr[hidden] { display: none }
@media (max-width: 48rem) {
  .scroll { overflow: visible } table, tbody, tr, tbody th, td { display: block; width: 100% } thead { display: none }
  tr { border-top: 1px solid var(--line); padding: .5rem 0 } td, th { border: 0 }
  .claims tbody th, .numbers tbody th, .overview tbody th { position: static; min-width: 0; max-width: none;
    padding: .2rem 0 }
  table td:nth-child(n) { min-width: 0; padding: .12rem 0; text-align: left; white-space: normal;
    overflow-wrap: anywhere }
  td[data-h] { display: flex; gap: .6rem } td > div { min-width: 0; flex: 1 }
  td[data-h]::before { content: attr(data-h); color: var(--soft); flex: 0 0 5.6rem }
  tr[hidden] { display: none }
}
@media print { .claims tbody th, .claims td:nth-child(n) { min-width: 0 } details { display: none } }
"""

SCRIPT = """
const buttons = [...document.querySelectorAll(".filter button")];
for (const button of buttons) button.onclick = () => {
  button.setAttribute("aria-pressed", button.getAttribute("aria-pressed") !== "true");
  const wanted = buttons.filter(b => b.getAttribute("aria-pressed") === "true").map(b => b.dataset.kind);
  for (const row of document.querySelectorAll(".claims tbody tr"))
    row.hidden = wanted.length > 0 && !wanted.includes(row.dataset.kind);
};
"""

TEMPLATE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>Reproduction ledger</title>
<style>{style}</style>
</head>
<body>
<main class="text">
<header><h1>Reproduction ledger</h1><p class="what">{sentence}</p><p class="result">{result}</p>
<div class="filter">{buttons}</div></header>
<section><h2>Findings</h2><ul>{findings}</ul>{pictures}</section>
<section><h2>Papers</h2><div class="scroll"><table class="overview">
<thead><tr><th>Paper</th><th>Claims</th><th>Measured</th>{gaps}</tr></thead>
<tbody>{bars}</tbody></table></div><p class="note">{note}</p></section>
{papers}
<section><h2>How to read it</h2>{how}<p class="note">Made by <code>askew ledger</code> from papers/ and results/
alone.</p></section>
</main>
<script>{script}</script>
</body>
</html>
"""
