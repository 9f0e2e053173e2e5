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
from .claim_results import VERDICTS, ClaimResult
from .claim_rules import FAILS, HOLDS, NOT_RUN, UNDECIDED, UNTESTABLE
from .ledger import PaperSection
from .ledger_curves import figure_picture
from .ledger_figures import svg_with_text
from .ledger_markdown import (
    CLAIM_COLUMNS,
    CLAIM_NOTE,
    FINDING_COLUMNS,
    FINDING_NOTE,
    HEAD,
    HOW,
    LEAD_COLUMNS,
    LEAD_NOTE,
    METRIC_TITLES,
    MISSING_COLUMNS,
    OVERVIEW_COLUMNS,
    cell_note,
    claim_cells,
    finding_cells,
    gap_lines,
    lead_rows,
    ledger_pictures,
    missing_cells,
    number_grids,
    overview_cells,
    totals_text,
)
from .ledger_rows import LARGE_GAP, LedgerTable, count_measured
from .ledger_summary import TRAINED, claim_grounds, summary_texts

BOLD, ITALIC, CODE = re.compile(r"\*\*(.+?)\*\*"), re.compile(r"(?<!\*)\*([^*]+)\*"), re.compile(r"`(.+?)`")
LINK = re.compile(r"\[([^\]]+)\]\(([^)]+)\)")
TAGS = re.compile(r"&lt;(br|/?small)&gt;")  # that cells have
# Classes of the style sheet by verdict.
CLASSES = {HOLDS: "yes", FAILS: "no", UNDECIDED: "open", NOT_RUN: "none", UNTESTABLE: "never"}


def write_ledger_page(sections: Sequence[PaperSection], path: Path) -> Path:
    """Write the page; return its path."""
    write_text(path, ledger_page(sections))
    return path


def ledger_page(sections: Sequence[PaperSection]) -> str:
    """The page's HTML."""
    claims = [result for section in sections for result in section.claims]
    pictures = ledger_pictures(sections)
    return TEMPLATE.format(
        question=inline(HEAD.partition("\n\n")[2]),
        buttons="".join(filter_button(v, [r for r in claims if r.verdict == v]) for v in VERDICTS),
        findings=html_table(FINDING_COLUMNS, [finding_cells(section, f"#{section.name}") for section in sections]),
        note=inline(FINDING_NOTE),
        pictures="".join(picture_figure(pictures[name]) for name in ("leads", "numbers") if name in pictures),
        totals=totals_text(sections),
        counts=html_table(OVERVIEW_COLUMNS, [overview_cells(section, f"#{section.name}") for section in sections]),
        how=bullet_list(HOW.partition("\n\n")[2].splitlines()),
        papers="\n".join(paper_section(section, pictures.get(f"{section.name}-effects")) for section in sections),
        style=read_static("text.css") + STYLE,
        script=SCRIPT,
    )


def picture_figure(picture: Picture) -> str:
    """A picture inside the page, with what it shows."""
    data = b64encode(svg_with_text(picture)).decode()
    image = f'<img src="data:image/svg+xml;base64,{data}" alt="{escape(picture.alt)}">'
    return f"<figure>{image}<figcaption>{escape(picture.title)}. {escape(picture.note)}</figcaption></figure>"


def filter_button(verdict: str, results: Sequence[ClaimResult]) -> str:
    """The button that shows the claims with a verdict; how many there are, and how many of them were trained."""
    trained = sum(claim_grounds(result) == TRAINED for result in results)
    grounds = f" ({trained} by training)" if verdict in (HOLDS, FAILS) else ""
    text = f"<strong>{len(results)}</strong><span>{verdict}{grounds}</span>"
    return f'<button data-kind="{CLASSES[verdict]}" aria-pressed="false">{text}</button>'


def paper_section(section: PaperSection, effects: Picture | None) -> str:
    """The summary, leads, large gaps, figures, claims and printed numbers of one paper."""
    leads, gaps = lead_rows(section), [line for line in gap_lines(section) if line.startswith("- ")]
    shown = [picture_figure(figure_picture(figure)) for figure in section.figures if figure.is_shown]
    rows = [claim_cells(result, result.evidence) for result in section.claims]
    marks = [f' data-kind="{CLASSES[result.verdict]}" id="{result.claim.id}"' for result in section.claims]
    unprinted = [f"- {table.experiment.id}: {' '.join(table.remarks())}" for table in section.unprinted]
    folded = {
        f"Not reproduced: more than {LARGE_GAP:g} points off": bullet_list(gaps),
        "Figures from our runs": "".join(shown),
        "Claims": f"<p class='note'>{inline(CLAIM_NOTE)}</p>{html_table(CLAIM_COLUMNS, rows, marks)}",
        "Experiments without printed numbers": bullet_list(unprinted),
    }
    return "\n".join(
        [
            f'<section id="{section.name}"><h2>{section.title}</h2><p>{inline(summary_texts(section)[1])}</p>',
            f"<p class='note'>{LEAD_NOTE}</p>{html_table(LEAD_COLUMNS, leads)}" if leads else "",
            picture_figure(effects) if effects else "",
            *(fold(title, content) for title, content in folded.items() if content),
            *(fold(f"{t.experiment.id}: {t.experiment.title}", number_tables(t)) for t in section.tables),
            "</section>",
        ]
    )


def fold(title: str, content: str) -> str:
    """A part of the page to unfold."""
    return f"<details><summary>{escape(title)}</summary>{content}</details>"


def number_tables(table: LedgerTable) -> str:
    """The printed numbers of one experiment beside ours."""
    measured = f"{table.experiment.where}. {count_measured(table.rows)} of {len(table.rows)} numbers are measured."
    grids = [
        f"<h3>{METRIC_TITLES.get(metric, metric)}</h3>{html_table(headings, rows)}"
        for metric, (headings, rows) in number_grids(table.rows).items()
    ]
    missing = [missing_cells(row) for row in table.rows if not row.values]
    left = [f"<h3>Not run</h3>{html_table(MISSING_COLUMNS, missing)}"] if missing else []
    notes = [f"- {text}" for text in (*table.remarks(), *table.machines)]
    return "".join([f"<p>{inline(measured)} {inline(cell_note(table.rows))}</p>", *grids, *left, bullet_list(notes)])


def html_table(headings: Sequence[str], rows: Sequence[Sequence[str]], marks: Sequence[str] = ()) -> str:
    """A table whose cells are Markdown; `marks` are attributes of its rows. A narrow screen shows headings in cells."""
    head = "".join(f"<th>{inline(heading)}</th>" for heading in headings)
    body = list[str]()
    for mark, (first, *cells) in zip(marks or [""] * len(rows), rows, strict=True):
        names = (escape(heading.partition("<br>")[0]) for heading in headings[1:])
        rest = "".join(f'<td data-h="{name}"><div>{inline(c)}</div></td>' for name, c in zip(names, cells, strict=True))
        body.append(f'<tr{mark}><th scope="row">{inline(first)}</th>{rest}</tr>')
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'


def inline(text: str) -> str:
    """Markdown's bold, italic, code and links in HTML."""
    text = TAGS.sub(r"<\1>", escape(text, quote=False))
    for pattern, tag in ((BOLD, "strong"), (ITALIC, "em"), (CODE, "code")):
        text = pattern.sub(rf"<{tag}>\1</{tag}>", text)
    return LINK.sub(r'<a href="\2">\1</a>', text)


def bullet_list(lines: Sequence[str]) -> str:
    """A list of Markdown in HTML; a line without a dash goes on with the item above."""
    items: list[str] = []
    for line in filter(str.strip, lines):
        if line.startswith("- "):
            items.append(line.removeprefix("- "))
        else:
            items[-1] += f" {line.strip()}"
    return f"<ul>{''.join(f'<li>{inline(item)}</li>' for item in items)}</ul>" if items else ""


STYLE = """
:root { --yes: #1a7f52; --no: #b3391f; --open: #9a6700; --none: #8a94a0; --never: #b9c0c8 }
main { max-width: 1280px; margin: 0 auto; padding: 2.5rem 1.25rem 3rem }
@media (max-width: 40rem) { main { padding: 1.2rem .6rem 2rem } }
figure { margin: 1.2rem 0 } figure img { width: 100%; max-width: 62rem; background: #fff; border-radius: 8px }
figcaption { max-width: 62rem; margin: .4rem auto 0 }
li { margin: .2rem 0 } main > section :is(li, p, ul) { color: inherit; overflow-wrap: anywhere }
h3 { margin: 1.4rem 0 .4rem; color: var(--soft) }
a { color: var(--mark) } code { font-size: .85em; overflow-wrap: anywhere }
.filter { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .9rem; margin: 1rem 0 }
.filter button { all: unset; cursor: pointer; border: 1px solid var(--line); border-left: 5px solid var(--none);
  border-radius: 12px; padding: .7rem 1rem }
.filter strong { display: block; font-size: 1.7rem; line-height: 1.2; font-variant-numeric: tabular-nums }
.filter span { color: var(--soft); font-size: .88rem }
.filter button:focus-visible { outline: 2px solid var(--mark) }
.filter button[aria-pressed=true] { background: color-mix(in srgb, var(--mark) 12%, var(--card)) }
.filter [data-kind=yes] { border-left-color: var(--yes) } .filter [data-kind=no] { border-left-color: var(--no) }
.filter [data-kind=open] { border-left-color: var(--open) }
.filter [data-kind=never] { border-left-color: var(--never) }
tr[data-kind=yes] td:nth-child(2) { color: var(--yes) } tr[data-kind=no] td:nth-child(2) { color: var(--no) }
tr[data-kind=open] td:nth-child(2) { color: var(--open) }
main td, main th { text-align: left; vertical-align: top; white-space: normal }
main td { min-width: 5.5rem; overflow-wrap: anywhere } td em { color: inherit }
tbody th small, td small { color: var(--soft) } main tbody th { font-weight: 500 }
tr[hidden] { display: none }
@media (max-width: 48rem) {
  .scroll { overflow: visible } table, tbody, tr, tbody th, td { display: block; width: 100% } thead { display: none }
  tr { border-top: 1px solid var(--line); padding: .5rem 0 } td, th { border: 0 }
  main tbody th, main td { position: static; min-width: 0; max-width: none; padding: .12rem 0 }
  td[data-h] { display: flex; gap: .6rem } td > div { min-width: 0; flex: 1 }
  td[data-h]::before { content: attr(data-h); color: var(--soft); flex: 0 0 6.5rem }
  tr[hidden] { display: none }
}
@media print { details { display: none } }
"""

SCRIPT = """
const buttons = [...document.querySelectorAll(".filter button")];
for (const button of buttons) button.onclick = () => {
  button.setAttribute("aria-pressed", button.getAttribute("aria-pressed") !== "true");
  const wanted = buttons.filter(b => b.getAttribute("aria-pressed") === "true").map(b => b.dataset.kind);
  for (const part of document.querySelectorAll("details"))
    if (part.querySelector("tr[data-kind]")) part.open = wanted.length > 0;
  for (const row of document.querySelectorAll("tr[data-kind]"))
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
<header><h1>Reproduction ledger</h1><p class="what">{question}</p></header>
<section><h2>Findings</h2>{findings}<p class="note">{note}</p>{pictures}</section>
<section><h2>Numbers and claims</h2><p>{totals}</p>{counts}<div class="filter">{buttons}</div>
<p class="note">A box shows the claims with its verdict alone, in every paper's list below.</p></section>
{papers}
<section><h2>How to read it</h2>{how}</section>
</main>
<script>{script}</script>
</body>
</html>
"""
