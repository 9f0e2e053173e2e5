"""The report: one HTML page with figures, tables and configurations, which loads nothing from elsewhere."""

from __future__ import annotations

import shlex
from base64 import b64encode
from collections.abc import Callable, Sequence
from html import escape
from math import floor, log10
from pathlib import Path
from typing import NamedTuple

from ..errors import StoreError
from ..experiment.roll_call import loss_sentence, never_sentences, percent, reason_text
from ..experiment.store import Run, write_text
from ..experiment.toml import to_toml
from .figures import draw_pictures
from .picture import COLOURS, Picture, write_picture
from .tables import (
    ComparisonRow,
    RunGroup,
    by_federation,
    client_count,
    federation_key,
    group_runs,
    participation_name,
    partition_name,
    shorten_label,
    table,
    value_text,
)


class PageColumn(NamedTuple):
    """A column of the page's comparison."""

    key: str  # of a row of `table`
    heading: str
    unit: str = ""
    scale: float = 1  # from the row's unit to this one
    better: int = 0  # 1: more is better, −1: less is, 0: neither


COLUMNS = (
    PageColumn("seeds", "Seeds"),
    PageColumn("best_accuracy", "Best accuracy", "%", 100, 1),
    PageColumn("best_round", "at round"),
    PageColumn("final_accuracy", "Last accuracy", "%", 100, 1),
    PageColumn("worst_clients_accuracy", "Worst tenth of clients", "%", 100, 1),
    PageColumn("train_loss", "Training loss", better=-1),
    PageColumn("test_loss", "Test loss", better=-1),
    PageColumn("rounds", "Rounds"),
    PageColumn("rounds_to_target", "Rounds to target", better=-1),
    PageColumn("seconds_to_target", "Virtual time to target", "s", better=-1),
    PageColumn("speedup", "Speedup", "×", better=1),
    PageColumn("seconds_per_round", "Time a round", "ms", 1e3, -1),
    PageColumn("clock", "Virtual time", "s"),
    PageColumn("bytes_up", "Sent up", "MB", 1e-6, -1),
    PageColumn("bytes_down", "Sent down", "MB", 1e-6, -1),
    PageColumn("dropped", "Dropped", better=-1),
    PageColumn("lost_answers", "Lost answers", better=-1),
    PageColumn("epsilon", "ε", better=-1),
)
COUNTS = ("dropped", "lost_answers")  # columns that are shown where a value is not 0
WHOLE_NUMBERS = ("seeds", "best_round", "rounds", "rounds_to_target")  # columns without decimals
MAX_HEADLINES = 4  # tasks whose result stands at the top


def write_report(runs: Sequence[Run], folder: Path, title: str | None = None) -> Path:
    """Write index.html, which needs no other file, and the pictures beside it as PNG; return the page's path."""
    groups = group_runs(runs)
    if not groups:
        raise StoreError(
            "a report needs at least one run, got none; name the folders that `askew run` made, such as runs/NAME."
        )
    pictures = draw_pictures(groups)
    for picture in pictures:
        write_picture(picture, Path(folder))
    path = Path(folder) / "index.html"
    write_text(path, report_page(groups, table(runs), pictures, title))
    return path


def check_run(run: Run) -> None:
    """Make from one run all that the page takes from it but the pictures; fails with a run that cannot be shown."""
    import numpy as np

    groups = group_runs([run])
    report_page(groups, table([run]), [], None)
    counts = {key: np.asarray(run.federation.get(key, []), dtype=float) for key in ("sizes", "labels")}
    if counts["sizes"].ndim != 1 or (counts["labels"].size and counts["labels"].shape[:1] != counts["sizes"].shape):
        raise ValueError("federation.json has not one size and one row of labels for each client")
    for record in run.rounds:
        np.asarray(record.get("participants", []), dtype=np.int64)


def report_page(
    groups: Sequence[RunGroup], rows: Sequence[ComparisonRow], pictures: Sequence[Picture], title: str | None
) -> str:
    """The page's HTML; `rows` are those of `table`, one for each group."""
    rows = [
        row
        | {
            "label": shorten_label(row["label"]),
            "baseline": row["baseline"] and shorten_label(row["baseline"]),
        }
        for row in rows
    ]
    tasks = [
        [row for g, row in zip(groups, rows, strict=True) if g.task == task]
        for task in dict.fromkeys(g.task for g in groups)
    ]
    federations = by_federation(groups)
    places = [f"{peers[0]['federation']}: " if len(federations) > 1 else "" for peers in tasks]
    results = [
        f'<p class="result">{escape(place + headline(peers))}</p>'
        for place, peers in list(zip(places, tasks, strict=True))[:MAX_HEADLINES]
    ]
    if len(tasks) > MAX_HEADLINES:
        results.append(f'<p class="what">{len(tasks) - MAX_HEADLINES} more in the table.</p>')
    subject = f"{len(groups)} {'methods' if len(tasks) == 1 else 'configurations'}"
    if len(groups) == 1:
        subject = shorten_label(groups[0].label)
    runs = [run for g in groups for run in g.runs]
    facts = ["The pictures lie beside this page as PNG files."] if pictures else []
    for word, key in (("askew", "version"), ("torch", "torch"), ("device", "device")):
        facts += [f"{word} {value}" for value in dict.fromkeys(run.facts.get(key) for run in runs) if value]
    return TEMPLATE.format(
        title=escape(title or f"{subject} on {alternatives(groups, 'data')}"),
        sentence=escape(sentence(groups)),
        results="".join(results),
        tiles=f'<div class="tiles">{tiles(rows)}</div>' if len(tasks) == 1 else "",
        notices="".join(f'<p class="notice">{escape(notice)}</p>' for notice in notices(runs, pictures)),
        comparison=comparison_tables(federations, rows),
        roll_call=roll_call_section(groups),
        figures="\n".join(map(picture_section, pictures)),
        configurations="\n".join(
            configuration_section(n, g, len(federations) > 1) for its in federations for n, g in enumerate(its)
        ),
        facts=escape(" · ".join(facts)),
        style=CSS,
        script=SCRIPT,
    )


def alternatives(groups: Sequence[RunGroup], text: str | Callable[[RunGroup], str]) -> str:
    """A text that the groups have in common, or up to three alternatives: "cifar10 or cifar100".

    `text` gives a group's; or it names a table of the configuration, whose name is taken.
    """
    texts = [str(g.config.get(text, {}).get("name", "")) if isinstance(text, str) else text(g) for g in groups]
    distinct = list(dict.fromkeys(filter(None, texts)))
    return " or ".join(distinct[:3]) + (" or …" if len(distinct) > 3 else "")


def count_text(number: int, word: str) -> str:
    """A number with its noun: "1 round", "2 rounds"."""
    return f"{number} {word}{'s' * (number != 1)}"


def sentence(groups: Sequence[RunGroup]) -> str:
    """What was run: "30 clients, Dirichlet α = 0.2, 20% take part each round · digits · mlp · 40 rounds · 3 seeds"."""

    def clients(g: RunGroup) -> str:
        number = client_count(g.runs[0])
        return count_text(number, "client") if number else ""

    federation = [
        alternatives(groups, clients),
        alternatives(groups, lambda g: partition_name(g.config)),
        alternatives(groups, lambda g: participation_name(g.config)),
    ]
    parts = [
        ", ".join(filter(None, federation)),
        alternatives(groups, "data"),
        alternatives(groups, "model"),
        alternatives(groups, lambda g: count_text(g.config["rounds"], "round")),
        count_text(max(len(g.runs) for g in groups), "seed"),
    ]
    return " · ".join(filter(None, parts))


def notices(runs: Sequence[Run], pictures: Sequence[Picture]) -> list[str]:
    """What is missing, and why."""
    names, found = {picture.name.partition("-")[0] for picture in pictures}, []
    unfinished = sum(not run.finished for run in runs)
    if unfinished:
        count = f"{unfinished} of {count_text(len(runs), 'run')}"
        found.append(f"{count} did not reach the last round; the figures count the rounds so far.")
    lossy = [run for run in runs if not run.roll_call().empty]
    if lossy:
        share = percent(max(run.roll_call().largest_share for run in lossy))
        found.append(
            f"Answers of clients are missing in {len(lossy)} of {count_text(len(runs), 'run')}, up to {share} of the "
            "data of a round: see the roll-call."
        )
    all_of_them, drawn = len({federation_key(run) for run in runs}), len({picture.federation for picture in pictures})
    if all_of_them > drawn and pictures:
        found.append(f"Of {all_of_them} federations, the pictures show the first {drawn}.")
    if "accuracy" not in names:
        found.append("No round has a test accuracy, so there are no accuracy curves.")
    if "partition" not in names:
        found.append("No run tells who holds what, so there is no picture of the partition.")
    return found


def percent_text(value: float, std: float | None = None) -> str:
    """A fraction in percent, with its standard deviation: "78.5 ± 0.7 %"."""
    return f"{100 * value:.1f}" + (f" ± {100 * std:.1f}" if std is not None else "") + " %"


def headline(rows: Sequence[ComparisonRow]) -> str:
    """The result of one task in a sentence or two; a lead within the seeds' spread is called so."""
    ranked = sorted((r for r in rows if r["best_accuracy"] is not None), key=lambda r: -r["best_accuracy"])
    if not ranked:
        measured = [r for r in rows if r["test_loss"] is not None]
        if not measured:
            return "No round has been evaluated yet."
        lowest = min(measured, key=lambda r: float(r["test_loss"]))
        return f"{lowest['label']} ends with a test loss of {lowest['test_loss']:.4g}."
    best = ranked[0]
    text = f"{best['label']} reaches {percent_text(best['best_accuracy'], best['best_accuracy_std'])} test accuracy"
    rival = next((r for r in ranked[1:] if r["label"] == best["baseline"]), ranked[1] if len(ranked) > 1 else None)
    if not rival:
        return f"{text}, at round {best['best_round']:.0f} of {best['rounds']:.0f}."
    gap = best["best_accuracy"] - rival["best_accuracy"]
    noise = max(best["best_accuracy_std"] or 0, rival["best_accuracy_std"] or 0)
    text += f", {100 * gap:.1f} points above {rival['label']}" if gap else f", as does {rival['label']}"
    text += ", a lead within the spread between seeds." if 0 < gap <= noise else "."
    fast = fastest(rows)
    if fast:
        rounds = count_text(fast["rounds_to_target"], "round")
        text += f" {'It' if fast is best else fast['label']} needs {rounds} to reach"
        text += f" the best of {fast['baseline']}, which itself takes {fast['rounds_to_target'] * fast['speedup']:.0f}."
    return text


def fastest(rows: Sequence[ComparisonRow]) -> ComparisonRow | None:
    """The row that needs the fewest rounds to the baseline's best, if fewer than the baseline."""
    return max((r for r in rows if (r["speedup"] or 0) > 1), key=lambda r: float(r["speedup"]), default=None)


def tiles(rows: Sequence[ComparisonRow]) -> str:
    """The main figures, of the method with the best accuracy."""
    best = max(rows, key=lambda r: -1 if r["best_accuracy"] is None else r["best_accuracy"])
    fast = fastest(rows)
    milliseconds, megabytes = 1e3 * (best["seconds_per_round"] or 0), (best["bytes_up"] + best["bytes_down"]) / 1e6
    shown: dict[str, str] = {}
    if best["best_accuracy"] is not None:
        shown[f"best accuracy · {best['label']}"] = percent_text(best["best_accuracy"])
    if fast:
        shown[f"fewer rounds to {fast['baseline']}’s best · {fast['label']}"] = f"{fast['speedup']:.1f}×"
    if milliseconds:
        shown[f"a round · {best['label']}"] = f"{milliseconds:.{decimals([milliseconds])}f} ms"
    shown[f"up and down in a run · {best['label']}"] = f"{megabytes:.{decimals([megabytes])}f} MB"
    return "".join(
        f"<div><strong>{escape(value)}</strong><span>{escape(text)}</span></div>" for text, value in shown.items()
    )


def decimals(values: Sequence[float]) -> int:
    """Decimals that show three digits of the largest value."""
    top = max(map(abs, values), default=0)
    return min(4, max(0, 2 - floor(log10(top)))) if top else 0


def comparison_tables(federations: Sequence[Sequence[RunGroup]], rows: Sequence[ComparisonRow]) -> str:
    """A table for each federation; methods on different data are not compared."""
    parts = []
    for its in federations:
        heading = f"<h3>{escape(its[0].federation)}</h3>" if len(federations) > 1 else ""
        parts.append(heading + comparison_table(its, [r for r in rows if r["federation"] == its[0].federation]))
    return "\n".join(parts)


def comparison_table(groups: Sequence[RunGroup], rows: Sequence[ComparisonRow]) -> str:
    """The table of a federation's groups, with a note on its figures."""
    headings = [heading_cell("Method")]
    cells = [[method_cell(n, g, row)] for n, (g, row) in enumerate(zip(groups, rows, strict=True))]
    baselines = sorted({r["baseline"] for r in rows if r["baseline"] not in (None, r["label"])})
    for column in COLUMNS:
        if is_informative(column.key, rows, baselines):
            heading = column.heading
            if column.key == "rounds_to_target" and len(baselines) == 1:
                heading = f"Rounds to {baselines[0]}’s best"
            headings.append(heading_cell(heading, column.unit))
            for row_cells, cell in zip(cells, column_cells(column, groups, rows, heading), strict=True):
                row_cells.append(cell)
    head, body = "".join(headings), "\n".join(f"<tr>{''.join(row)}</tr>" for row in cells)
    note = "Means over the seeds, ± one standard deviation. " if any(row["seeds"] > 1 for row in rows) else ""
    targets = {
        row["baseline"]: f"{percent_text(row['target'])}, the peak of {row['baseline']}’s mean curve"
        for row in rows
        if row["baseline"] in baselines
    }
    note += f"Rounds are counted to {'; '.join(targets.values())}." if note and targets else ""
    whole = f'<table class="methods"><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>'
    return f'<div class="scroll">{whole}</div>' + (f'<p class="note">{escape(note)}</p>' if note else "")


def column_cells(
    column: PageColumn, groups: Sequence[RunGroup], rows: Sequence[ComparisonRow], heading: str
) -> list[str]:
    """The cells of one column, one for each group; the best value of a task is bold unless all are equal.

    Each holds its heading, which narrow pages show beside the value.
    """
    name = escape(f"{heading}, {column.unit}" if column.unit else heading)
    values = [None if row[column.key] is None else row[column.key] * column.scale for row in rows]
    digits = decimals([v for v in values if v is not None])
    if column.key in WHOLE_NUMBERS or column.unit == "%":
        digits = 0 if column.key in WHOLE_NUMBERS else 2
    texts = ["" if v is None else f"{v:.{digits}f}" for v in values]
    cells = []
    for n, (g, row) in enumerate(zip(groups, rows, strict=True)):
        peers = [m for m, other in enumerate(groups) if other.task == g.task and values[m] is not None]
        best = max(peers, key=lambda m: column.better * (values[m] or 0), default=n)
        bold = column.better and texts[n] == texts[best] and len({texts[m] for m in peers}) > 1
        missed_target = column.key == "rounds_to_target" and row["target"] is not None
        missing = f"&gt; {row['rounds']:.0f}" if missed_target else "–"
        shown = (f"<b>{texts[n]}</b>" if bold else texts[n]) or missing
        std = row.get(f"{column.key}_std")
        shown += f'<span class="std"> ± {column.scale * std:.{digits}f}</span>' if std is not None else ""
        value = "" if values[n] is None else values[n]
        cells.append(f'<td data-v="{value}" data-h="{name}">{shown}</td>')
    return cells


def is_informative(key: str, rows: Sequence[ComparisonRow], baselines: Sequence[str]) -> bool:
    """Whether a column is shown; seeds and rounds that all rows share stand in the page's first sentence already."""
    values = {row[key] for row in rows} - {None}
    if key in ("rounds_to_target", "speedup"):
        return bool(baselines)
    return len(values) > 1 if key in ("seeds", "rounds") else any(values) if key in COUNTS else bool(values)


def heading_cell(text: str, unit: str = "") -> str:
    """The heading of a column, a button that sorts by it."""
    small = f"&nbsp;<small>{unit}</small>" if unit else ""
    return f'<th scope="col" aria-sort="none"><button>{escape(text)}{small}</button></th>'


def swatch(n: int) -> str:
    """A small square in the colour of the n-th method."""
    return f'<i style="background:{COLOURS[n % len(COLOURS)]}"></i>'


def method_cell(n: int, g: RunGroup, row: ComparisonRow) -> str:
    """The first cell of a row: the n-th method's colour and label."""
    label, mark = escape(g.label), "" if row["finished"] else " <em>unfinished</em>"
    return f'<th scope="row" data-v="{label}" title="{label}">{swatch(n)}{escape(row["label"])}{mark}</th>'


def roll_call_section(groups: Sequence[RunGroup]) -> str:
    """The roll-call of every run with lost answers, or of a deployment without some clients; empty if there is none."""
    parts = []
    for g in groups:
        for run in g.runs:
            call = run.roll_call()
            lines = [] if call.empty else [loss_sentence(call, len(run.rounds)) + "."]
            lines += [reason_text(reason, clients) for reason, clients in call.reasons.items()]
            warnings = never_sentences(call, run.federation, run.deployed)
            if lines or warnings:
                items = "".join(f"<li>{escape(line)}</li>" for line in lines)
                items += "".join(f"<li><strong>{escape(warning)}</strong></li>" for warning in warnings)
                name = f"{shorten_label(g.title)}, seed {value_text(run.config.get('seed'))}"
                parts.append(f"<h3>{escape(name)}</h3><ul>{items}</ul>")
    heading = "<h2>Roll-call: whose answers were lost, and why</h2>"
    return f'<section id="roll-call">{heading}{"".join(parts)}</section>' if parts else ""


def picture_section(picture: Picture) -> str:
    """A picture as SVG inside of the page, with its note."""
    data = b64encode(picture.render("svg")).decode()
    image = f'<div class="scroll"><img src="data:image/svg+xml;base64,{data}" alt="{escape(picture.alt)}"></div>'
    caption = f"<figcaption>{escape(picture.note)}</figcaption>" if picture.note else ""
    return f'<section id="{picture.name}"><h2>{escape(picture.title)}</h2><figure>{image}{caption}</figure></section>'


def configuration_section(n: int, g: RunGroup, several: bool) -> str:
    """All settings of one group, and for each seed its engine and device and how to run it again.

    The federation is named where there are several.
    """
    seeds = []
    for run in g.runs:
        facts = [
            f"seed {value_text(run.config.get('seed'))}",
            f"{len(run.rounds)} of {count_text(run.config['rounds'], 'round')}",
        ]
        facts += [str(run.facts[key]) for key in ("state", "engine", "device", "privacy") if run.facts.get(key)]
        again = shlex.join(["askew", "run", str(run.folder / "run.toml")]) if run.folder else "# not stored in a folder"
        seeds.append(f"<li>{escape(' · '.join(facts))}<pre>{escape(again)}</pre></li>")
    first = " of the first seed" if len(seeds) > 1 else ""
    name = f"{g.label} on {g.federation}" if several else g.label
    return (
        f"<details><summary>{swatch(n)}{escape(name)}</summary><ul>{''.join(seeds)}</ul>"
        f"<p>Configuration{first}:</p><pre>{escape(to_toml(g.config))}</pre></details>"
    )


CSS = """
:root { color-scheme: light dark;
  --ink: #1b2430; --soft: #5b6673; --line: #dfe4ea; --page: #f6f7f9; --card: #fff; --accent: #0072b2;
  --warn: #fff4d6 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8ecf1; --soft: #9aa6b4; --line: #313a46; --page: #12161c; --card: #1b212a; --accent: #6cb8ea;
  --warn: #3a3115 }
}
* { box-sizing: border-box }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif }
main { max-width: 1120px; margin: 0 auto; padding: 2.5rem 1.25rem 3rem }
h1 { font-size: clamp(1.6rem, 4vw, 2.3rem); line-height: 1.15; margin: 0 0 .4rem; letter-spacing: -.015em;
  overflow-wrap: anywhere }
h2 { font-size: 1.15rem; margin: 0 0 .8rem }
.what { color: var(--soft); margin: 0 }
.result { font-size: 1.15rem; margin: 1.1rem 0 0; max-width: 52rem; padding-left: .9rem;
  border-left: 4px solid var(--accent); overflow-wrap: anywhere }
.notice { background: var(--warn); border-radius: 8px; padding: .6rem .9rem; margin: 1rem 0 0 }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: .9rem; margin-top: 1.6rem }
.tiles div, section { background: var(--card); border: 1px solid var(--line); border-radius: 12px }
.tiles div { padding: .9rem 1.1rem }
.tiles strong { display: block; font-size: 1.7rem; line-height: 1.2; letter-spacing: -.02em;
  font-variant-numeric: tabular-nums }
.tiles span { color: var(--soft); font-size: .88rem; overflow-wrap: anywhere }
section { margin-top: 1.4rem; padding: 1.2rem 1.3rem }
.scroll { overflow-x: auto }
table { border-collapse: collapse; width: 100%; font-size: .9rem; font-variant-numeric: tabular-nums }
td, th { padding: .5rem .55rem; text-align: right; white-space: nowrap; border-top: 1px solid var(--line) }
thead th { border-top: 0; vertical-align: bottom; white-space: normal }
th:first-child { text-align: left; position: sticky; left: 0; background: var(--card); font-weight: 600;
  padding-left: 0 }
tbody th { white-space: normal; min-width: 10.5rem; max-width: 20rem; overflow-wrap: anywhere }
tbody tr:hover > * { background: color-mix(in srgb, var(--accent) 9%, var(--card)) }
th button { all: unset; cursor: pointer; color: var(--soft); font-size: .8rem; line-height: 1.25; font-weight: 600 }
th button:hover, th button:focus-visible { color: var(--accent); text-decoration: underline }
th[aria-sort=ascending] button::after { content: " ▲" } th[aria-sort=descending] button::after { content: " ▼" }
td b { color: var(--accent) } .std, em { color: var(--soft); font-size: .85em } small { font-weight: 400 }
i { display: inline-block; width: .7em; height: .7em; border-radius: 3px; margin-right: .55em }
figure { margin: 0 } figure .scroll { background: #fff; border-radius: 8px; padding: .4rem }
img { display: block; width: 100%; max-width: 760px; margin: 0 auto; height: auto }
figcaption, .note { color: var(--soft); font-size: .88rem; margin: .7rem 0 0 }
details { border-top: 1px solid var(--line); padding: .55rem 0 }
summary { cursor: pointer; font-weight: 600; overflow-wrap: anywhere }
ul { padding-left: 1.2rem; color: var(--soft); font-size: .9rem }
details p { font-size: .9rem; color: var(--soft); margin-bottom: 0 }
pre { background: var(--page); color: var(--ink); border-radius: 8px; padding: .7rem .9rem; margin: .4rem 0;
  overflow-x: auto;
  font: .85rem/1.45 ui-monospace, Menlo, Consolas, monospace }
footer { color: var(--soft); font-size: .85rem; margin-top: 1.6rem }
@media (max-width: 40rem) {
  main { padding: 1.2rem .6rem 2rem } section { padding: .9rem .8rem } .tiles { grid-template-columns: 1fr 1fr }
  .methods, .methods tbody, .methods tr { display: block } .methods thead { display: none }
  .methods tr { border-top: 1px solid var(--line); padding: .4rem 0 }
  .methods th { display: block; border: 0; padding: .2rem 0; max-width: none }
  .methods td { display: flex; justify-content: flex-end; gap: .3rem; border: 0; padding: .1rem 0 }
  .methods td::before { content: attr(data-h); color: var(--soft); margin-right: auto; text-align: left;
    white-space: normal }
}
@media print {
  :root { color-scheme: light; --ink: #000; --soft: #444; --line: #ccc; --page: #fff; --card: #fff;
  --accent: #0072b2; --warn: #fff }
  main { padding: 0; max-width: none } section { break-inside: avoid; border: 0; padding: 0 }
  table { font-size: .62rem } th button { font-size: .6rem } td, th { padding: .25rem } tbody th { min-width: 0 }
}
"""

SCRIPT = """
for (const button of document.querySelectorAll(".methods th button")) button.onclick = () => {
  const head = button.parentNode, column = head.cellIndex, body = head.closest("table").tBodies[0];
  const value = row => row.cells[column].dataset.v, number = column > 0;
  const down = head.getAttribute("aria-sort") === (number ? "descending" : "ascending") ? !number : number;
  const rows = [...body.rows].sort((a, b) => {
    const x = value(a), y = value(b);
    if (x === "" || y === "") return (x === "") - (y === "");
    return (number ? x - y : x.localeCompare(y)) * (down ? -1 : 1);
  });
  for (const other of head.parentNode.cells) other.setAttribute("aria-sort", "none");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  body.append(...rows);
};
"""

TEMPLATE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
<header><h1>{title}</h1><p class="what">{sentence}</p>{results}{tiles}{notices}</header>
<section id="comparison"><h2>Comparison</h2>{comparison}</section>
{roll_call}
{figures}
<section id="configurations"><h2>Configurations, and how to run them again</h2>
{configurations}
</section>
<footer>{facts}</footer>
</main>
<script>{script}</script>
</body>
</html>
"""
