"""The report: the page of `askew watch` as one file, with what is written, drawn and tabled of all runs around it."""

from __future__ import annotations

import zlib
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.files import printable
from ..core.text import count_text
from ..errors import StoreError
from ..experiment.roll_call import loss_sentence, never_sentences, percent, reason_text
from ..experiment.store import Run, to_json, write_text
from ..experiment.toml import to_toml
from . import views
from .figures import draw_pictures
from .page_comparison import colour_numbers, comparison_tables, in_box, percent_text, swatch
from .paste_runs import paste_comparison
from .picture import Picture, write_picture
from .shell import single_page
from .tables import (
    ComparisonRow,
    RunGroup,
    best_groups,
    best_words,
    by_federation,
    client_count,
    divergence_remark,
    group_runs,
    is_running,
    participation_name,
    partition_name,
    repeated_remark,
    shorten_label,
    table,
    value_text,
)
from .terminal import command, duration, resume_command, size

if TYPE_CHECKING:
    from .significance import PairedComparison


MAX_HEADLINES = 4  # tasks whose result stands at the top
MANY = 50  # runs, above which the page holds less of each
COARSE = views.Detail(points=200, rounds=100, clients=50, classes=50)
Broken = Mapping[Path, str]  # by run folder that cannot be read: why


def write_report(runs: Sequence[Run], folder: Path, title: str | None = None, broken: Broken | None = None) -> Path:
    """Write index.html, which needs no other file, and the pictures beside it as PNG; return the page's path.

    `broken` are run folders that cannot be read; the page shows them as such.
    """
    groups = group_runs(runs)
    if not groups:
        raise StoreError(
            "a report needs at least one run, got none; name the folders that `askew run` made, such as runs/NAME."
        )
    pictures = draw_pictures(groups)
    for picture in pictures:
        write_picture(picture, Path(folder))
    path = Path(folder) / "index.html"
    data = page_data(runs, groups, broken or {})
    write_text(path, single_page(*page_parts(groups, table(runs), pictures, title, data), to_json(data)))
    return path


def check_run(run: Run) -> None:
    """Make from one run all that the page takes from it but the pictures; fails with a run that cannot be shown."""
    import numpy as np

    groups = group_runs([run])
    page_parts(groups, table([run]), [], None, page_data([run], groups, {}))
    counts = {key: np.asarray(run.federation.get(key, []), dtype=float) for key in ("sizes", "labels")}
    if counts["sizes"].ndim != 1 or (counts["labels"].size and counts["labels"].shape[:1] != counts["sizes"].shape):
        raise ValueError("federation.json has not one size and one row of labels for each client")
    for record in run.rounds:
        np.asarray(record.get("participants", []), dtype=np.int64)


# data ---------------------------------------------------------------------------------------------------------------


def shown_runs(runs: Sequence[Run]) -> list[views.ShownRun]:
    """Runs as the page shows them; where two have one name, with the names of the folders that they are in."""
    names, found = Counter(run.name for run in runs), []
    for number, run in enumerate(runs):
        inside = f"{run.folder.parent.name}/" if run.folder and names[run.name] > 1 else ""
        shown = views.ShownRun(number, printable(inside + run.name))
        shown.show(run, views.shown_columns(run))
        found.append(shown)
    return found


def page_data(runs: Sequence[Run], groups: Sequence[RunGroup], broken: Broken) -> views.Answer:
    """All that the page's script shows: the rows of all runs, and of each run what `askew watch` would send.

    Above MANY runs, curves have fewer points and heat maps fewer cells. At first the page shows a run of each method
    of the first federation, of very many methods the best.
    """
    shown, detail = shown_runs(runs), views.FULL if len(runs) <= MANY else COARSE
    unread = [
        views.ShownRun(len(shown) + n, printable(folder.name), views.BROKEN, printable(problem))
        for n, (folder, problem) in enumerate(broken.items())
    ]
    labels = {id(run): g.label for g in groups for run in g.runs}
    for each, run in zip(shown, runs, strict=True):
        each.label = printable(labels.get(id(run), ""))
    places = {id(run): number for number, run in enumerate(runs)}
    first = [places[id(g.runs[0])] for g in best_groups((by_federation(groups) or [[]])[0], views.MOST_CHOSEN)]
    return views.table([*shown, *unread]) | {"first": first, "runs": [pack(run, detail) for run in shown]}


def pack(run: views.ShownRun, detail: views.Detail) -> str:
    """What the page shows of one run, compressed, as text."""
    whole = {
        "curves": views.curves(run, detail),
        "clients": views.clients(run, detail),
        "turns": views.turns(run, detail=detail),
    }
    return b64encode(zlib.compress(to_json(whole).encode(), 9)).decode()


# the page -----------------------------------------------------------------------------------------------------------


def page_parts(
    groups: Sequence[RunGroup],
    rows: Sequence[ComparisonRow],
    pictures: Sequence[Picture],
    title: str | None,
    data: views.Answer,
) -> tuple[str, str, str]:
    """The HTML of the heading, and of what comes before and after the runs, their curves and their clients.

    `rows` are those of `table`, one for each group.
    """
    runs, federations, tests = [run for g in groups for run in g.runs], by_federation(groups), seed_tests(groups)
    short = [row | {key: row[key] and shorten_label(row[key]) for key in ("label", "baseline")} for row in rows]
    before = [
        f'<div class="text">{summary(groups, short)}{notice_lines(groups, pictures, data)}{page_links(pictures)}</div>',
        written("comparison", "Comparison", comparison_tables(federations, short)),
        tests_section(tests),
    ]
    settings = [
        configuration_section(number, g, len(federations) > 1)
        for its in federations
        for number, g in zip(colour_numbers(its), its, strict=True)
    ]
    facts = ["The pictures lie beside this page as PNG files."] if pictures else []
    for word, key in (("askew", "version"), ("torch", "torch"), ("device", "device")):
        facts += [f"{word} {value}" for value in dict.fromkeys(run.facts.get(key) for run in runs) if value]
    after = [
        *map(picture_section, pictures),
        roll_call_section(groups),
        paper_section(runs, rows, tests),
        written(
            "configurations", "Configurations, and how to run them again", in_box("\n".join(settings), len(settings))
        ),
        f'<footer class="text">{escape(" · ".join(facts))}</footer>',
    ]
    heading = escape(title or f"{subject(groups)} on {alternatives(groups, 'data')}")
    return heading, "\n".join(before), "\n".join(after)


def subject(groups: Sequence[RunGroup]) -> str:
    """What a page compares, as its heading names it: "7 methods", "3 settings of fedavg"."""
    methods, count = {g.runs[0].algorithm for g in groups}, len(groups)
    if count == 1:
        return shorten_label(groups[0].label)
    if len({g.task for g in groups}) > 1:
        return f"{count} configurations"
    if len(methods) == count:
        return f"{count} methods"
    return f"{count} settings of {next(iter(methods)) if len(methods) == 1 else f'{len(methods)} methods'}"


def summary(groups: Sequence[RunGroup], rows: Sequence[ComparisonRow]) -> str:
    """What was run, the result of each task in a sentence, and of a single task the main figures."""
    tasks = [
        [row for g, row in zip(groups, rows, strict=True) if g.task == task]
        for task in dict.fromkeys(g.task for g in groups)
    ]
    several = len({g.federation for g in groups}) > 1
    places = [f"{peers[0]['federation']}: " if several else "" for peers in tasks]
    results = [
        f'<p class="result">{escape(place + headline(peers))}</p>'
        for place, peers in list(zip(places, tasks, strict=True))[:MAX_HEADLINES]
    ]
    if len(tasks) > MAX_HEADLINES:
        results.append(f'<p class="what">{len(tasks) - MAX_HEADLINES} more in the table.</p>')
    results += [f'<div class="tiles">{tiles(rows)}</div>'] if len(tasks) == 1 else []
    return f'<p class="what">{escape(sentence(groups))}</p>{"".join(results)}'


def notice_lines(groups: Sequence[RunGroup], pictures: Sequence[Picture], data: views.Answer) -> str:
    """What is no result or missing, and why."""
    found = [*run_notices(groups, data), *picture_notices(groups, pictures)]
    return "".join(f'<p class="notice">{escape(notice)}</p>' for notice in found)


def page_links(pictures: Sequence[Picture]) -> str:
    """Links to the parts of the page."""
    parts = {"comparison": "Comparison", "all": "Runs", "chosen": "Curves", "one": "Clients and classes"}
    parts |= {pictures[0].name: "Figures"} if pictures else {}
    parts |= {"paper": "For a paper", "configurations": "Configurations"}
    links = "".join(f'<a href="#{name}">{word}</a>' for name, word in parts.items())
    return f"<nav>{links}</nav>"


def written(name: str, heading: str, html: str) -> str:
    """A section of the page beside those that its script fills."""
    return f'<section class="text" id="{name}"><h2>{escape(heading)}</h2>{html}</section>'


def alternatives(groups: Sequence[RunGroup], text: str | Callable[[RunGroup], str]) -> str:
    """A text that the groups have in common, or up to three alternatives: "cifar10 or cifar100".

    `text` gives a group's; or it names a table of the configuration, whose name is taken.
    """
    texts = [str(g.config.get(text, {}).get("name", "")) if isinstance(text, str) else text(g) for g in groups]
    distinct = list(dict.fromkeys(filter(None, texts)))
    return " or ".join(distinct[:3]) + (" or …" if len(distinct) > 3 else "")


def count_alternatives(groups: Sequence[RunGroup], word: str, count: Callable[[RunGroup], int]) -> str:
    """A number that the groups have in common, or up to three, with their noun: "8 or 6 rounds"; 0 is not known."""
    text = alternatives(groups, lambda g: f"{count(g):,}" if count(g) else "")
    return text and f"{text} {word if text == '1' else f'{word}s'}"


def sentence(groups: Sequence[RunGroup]) -> str:
    """What was run: "30 clients, Dirichlet α = 0.2, 20% take part each round · digits · mlp · 40 rounds · 3 seeds"."""
    federation = [
        count_alternatives(groups, "client", lambda g: client_count(g.runs[0])),
        alternatives(groups, lambda g: partition_name(g.config)),
        alternatives(groups, lambda g: participation_name(g.config)),
    ]
    parts = [
        ", ".join(filter(None, federation)),
        alternatives(groups, "data"),
        alternatives(groups, "model"),
        count_alternatives(groups, "round", lambda g: int(g.config["rounds"])),
        count_text(max(len(g.runs) for g in groups), "seed"),
    ]
    return " · ".join(filter(None, parts))


def run_notices(groups: Sequence[RunGroup], data: views.Answer) -> list[str]:
    """Which runs are no results, or not yet, and of which something is missing."""
    runs, found = [run for g in groups for run in g.runs], list[str]()
    diverged = divergence_remark({g.title: (g.diverged, len(g.runs)) for g in groups})
    found += [f"{diverged} The configurations below say when it was and what to try."] if diverged else []
    broken = sum(row["state"] == views.BROKEN for row in data["rows"])
    if broken:
        found.append(f"{count_text(broken, 'run folder')} cannot be read: the table of runs says why.")
    if len(data["runs"]) > MANY and any(is_reduced(run) for run in runs):
        found.append(
            f"This page holds {len(data['runs'])} runs, and of each at most {COARSE.points} points of a curve and "
            f"{COARSE.rounds} by {COARSE.clients} cells of a heat map; askew watch shows all."
        )
    running, of_all = sum(map(is_running, runs)), f"of {count_text(len(runs), 'run')}"
    unfinished = sum(not run.finished for run in runs) - running
    were = "was" if running == 1 else "were"
    left_out = any(len(g.measured) < len(g.runs) for g in groups)
    counted = f"the figures {'leave them out where other seeds ended' if left_out else 'count the rounds so far'}"
    for count, what in ((running, f"{were} still being trained"), (unfinished, "did not reach the last round")):
        found += [f"{count} {of_all} {what}; {counted}."] if count else []
    found += filter(None, [repeated_remark(sum(g.repeated for g in groups))])
    lossy = [run for run in runs if not run.roll_call().empty]
    if lossy:
        share = percent(max(run.roll_call().largest_share for run in lossy))
        found.append(
            f"Answers of clients are missing in {len(lossy)} {of_all}, up to {share} of the data of a round: "
            "see the roll-call."
        )
    return found


def is_reduced(run: Run) -> bool:
    """Would a page of many runs leave out some of this one's points or cells?"""
    classes = len((run.federation.get("labels") or [[]])[0])
    return len(run.rounds) > COARSE.rounds or client_count(run) > COARSE.clients or classes > COARSE.classes


def picture_notices(groups: Sequence[RunGroup], pictures: Sequence[Picture]) -> list[str]:
    """Which pictures there are not."""
    names, found = {picture.name.partition("-")[0] for picture in pictures}, list[str]()
    all_of_them, drawn = len(by_federation(groups)), len({picture.federation for picture in pictures})
    if all_of_them > drawn and pictures:
        found.append(f"Of {all_of_them} federations, the pictures show the first {drawn}.")
    if "accuracy" not in names:
        found.append("No round has a test accuracy, so there are no accuracy curves.")
    if "partition" not in names:
        found.append("No run has stored who holds what, so there is no picture of the partition.")
    return found


def ranked_rows(rows: Sequence[ComparisonRow]) -> list[ComparisonRow]:
    """The rows that were evaluated, the best first: by accuracy, or where there is none by test loss."""
    key, sign = ("test_loss", 1) if all(row["best_accuracy"] is None for row in rows) else ("best_accuracy", -1)
    return sorted((row for row in rows if row[key] is not None), key=lambda row: sign * float(row[key]))


def method_words(row: ComparisonRow) -> str:
    """A row's label, with how many of its runs diverged if any did: their figures are no results."""
    if not row["diverged"]:
        return str(row["label"])
    some = f"{row['diverged']} of {row['seeds']} runs " if row["diverged"] < row["seeds"] else ""
    return f"{row['label']} ({some}diverged)"


def headline(rows: Sequence[ComparisonRow]) -> str:
    """The result of one task in a sentence or two; a lead within the seeds' spread is called so."""
    ranked = ranked_rows(rows)
    if not ranked:
        return "No round has been evaluated yet."
    best, others = ranked[0], ranked[1:]
    if best["best_accuracy"] is None:
        return f"{method_words(best)} ends with a test loss of {best['test_loss']:.4g}."
    reached = percent_text(best["best_accuracy"], best["best_accuracy_std"])
    text = f"{method_words(best)} reaches {reached} test accuracy"
    rival = strongest_rival(best, others)
    if not rival:
        return f"{text}, at round {best['best_round']:.0f} of {best['rounds']:.0f}."
    gap = best["best_accuracy"] - rival["best_accuracy"]
    noise = max(best["best_accuracy_std"] or 0, rival["best_accuracy_std"] or 0)
    text += f", {100 * gap:.1f} points above {method_words(rival)}" if gap else f", as does {method_words(rival)}"
    if best["seeds"] != rival["seeds"]:
        text += f" ({count_text(best['seeds'], 'seed')} against {rival['seeds']})"
    text += ", a lead within the spread between seeds." if 0 < gap <= noise else "."
    fast = fastest(rows)
    if fast:
        rounds = count_text(fast["rounds_to_target"], "round")
        text += (
            f" {'It' if fast is best else fast['label']} needs {rounds} to reach {best_words(rows, fast['baseline'])}"
        )
        text += f", which itself takes {fast['rounds_to_target'] * fast['speedup']:.0f}."
    return text


def strongest_rival(best: ComparisonRow, others: Sequence[ComparisonRow]) -> ComparisonRow | None:
    """The row that the best one is compared with: the best fedavg, which may have been tried with several settings.

    Where there is none, or fedavg is the best itself, it is the second. `others` are the other rows, the best first.
    """
    fedavg = (row for row in others if row["algorithm"] == "fedavg" != best["algorithm"])
    return next(fedavg, others[0] if others else None)


def fastest(rows: Sequence[ComparisonRow]) -> ComparisonRow | None:
    """The row that needs the fewest rounds to the baseline's best, if fewer than the baseline."""
    return max((r for r in rows if (r["speedup"] or 0) > 1), key=lambda r: float(r["speedup"]), default=None)


def tiles(rows: Sequence[ComparisonRow]) -> str:
    """The main figures, of the method with the best accuracy, or in a regression the lowest test loss."""
    best, fast = next(iter(ranked_rows(rows)), rows[0]), fastest(rows)
    shown: dict[str, str] = {}
    if best["best_accuracy"] is not None:
        shown[f"best accuracy · {method_words(best)}"] = percent_text(best["best_accuracy"])
    elif best["test_loss"] is not None:
        shown[f"last test loss · {method_words(best)}"] = f"{best['test_loss']:.4g}"
    if fast:
        shown[f"fewer rounds to {best_words(rows, fast['baseline'])} · {fast['label']}"] = f"{fast['speedup']:.1f}×"
    if best["seconds_per_round"]:
        shown[f"a round · {best['label']}"] = duration(best["seconds_per_round"])
    shown[f"up and down in a run · {best['label']}"] = size(best["bytes_up"] + best["bytes_down"])
    return "".join(
        f"<div><strong>{escape(value)}</strong><span>{escape(text)}</span></div>" for text, value in shown.items()
    )


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
    return written("roll-call", "Roll-call: whose answers were lost, and why", "".join(parts)) if parts else ""


def seed_tests(groups: Sequence[RunGroup]) -> list[PairedComparison]:
    """Which differences between methods are more than chance; none where there are too few seeds."""
    if not any(len(its) > 1 and len(its[0].runs) > 1 for its in by_federation(groups)):
        return []
    from .significance import TOO_FEW, compare_methods  # with numpy, which the rest can do without

    tests = compare_methods(groups)
    return [] if all(test.verdict == TOO_FEW for test in tests) else tests


def tests_section(tests: Sequence[PairedComparison]) -> str:
    """The tests over seeds, a table for each federation."""
    if not tests:
        return ""
    from .significance import METRICS
    from .verdicts import federation_texts, heading, verdict_remarks

    parts = []
    for federation in dict.fromkeys(test.federation for test in tests):
        its = [test for test in tests if test.federation == federation]
        place = f": {federation}" if len({test.federation for test in tests}) > 1 else ""
        names = ["n", "Difference", "95% interval by t", "95% interval by bootstrap", "p (Holm)", "d_z", "Verdict"]
        head = "".join(f'<th scope="col">{escape(name)}</th>' for name in ("Method", *names))
        rows = [
            f'<tr><th scope="row">{escape(name)}</th>'
            + "".join(f'<td data-h="{escape(h)}">{escape(text)}</td>' for h, text in zip(names, texts, strict=True))
            for name, *texts in federation_texts(its, METRICS[its[0].metric].percent)
        ]
        body = f'<table class="methods"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
        note = f'<p class="note">{escape(" ".join(verdict_remarks(its)))}</p>'
        parts.append(f'<h3>{escape(heading(its) + place)}</h3><div class="scroll">{body}</div>{note}')
    return written("tests", "Which differences are more than chance", "".join(parts))


def paper_section(runs: Sequence[Run], rows: Sequence[ComparisonRow], tests: Sequence[PairedComparison]) -> str:
    """The comparison as tables to paste, and how to draw the figures for a paper."""
    folders = [run.folder for run in runs if run.folder]
    common = folders[0].parent if folders and {folder.parent for folder in folders} == {folders[0].parent} else None
    drawn = command("report", *([common] if common else folders[:1]), "--figures", "pdf", "--size", "column")
    compared = command("compare", *([common] if common else folders), *["--test"][: len(tests)])
    paste = paste_comparison(runs, rows, None, tests, compared)
    texts = {"LaTeX": paste.latex(), "Markdown": paste.markdown(), "CSV": paste.csv()}
    parts = [f"<details><summary>{name}</summary><pre>{escape(text)}</pre></details>" for name, text in texts.items()]
    how = "As PDF or SVG, in the size and font of a two-column paper (column or page):"
    parts.append(f"<details><summary>Figures</summary><p>{how}</p><pre>{escape(drawn)}</pre></details>")
    return written("paper", "For a paper: tables to paste, and figures", "".join(parts))


def picture_section(picture: Picture) -> str:
    """A picture as SVG inside of the page, with its note."""
    data = b64encode(picture.render("svg")).decode()
    image = f'<div class="scroll"><img src="data:image/svg+xml;base64,{data}" alt="{escape(picture.alt)}"></div>'
    caption = f"<figcaption>{escape(picture.note)}</figcaption>" if picture.note else ""
    return written(picture.name, picture.title, f"<figure>{image}{caption}</figure>")


def command_again(run: Run) -> str:
    """The command that runs a run again."""
    return resume_command(run.folder, str(run.facts.get("engine"))) if run.folder else "# not stored in a folder"


def configuration_section(number: int | None, g: RunGroup, several: bool) -> str:
    """All settings of one group, and for each seed its engine and device and how to run it again.

    The federation is named where there are several.
    """
    seeds = []
    for run in g.runs:
        facts = [
            f"seed {value_text(run.config.get('seed'))}",
            f"{len(run.rounds)} of {count_text(run.config['rounds'], 'round')}",
        ]
        facts += [
            str(run.facts[key]) for key in ("state", "engine", "device", "privacy", "diverged") if run.facts.get(key)
        ]
        seeds.append(f"<li>{escape(' · '.join(facts))}<pre>{escape(command_again(run))}</pre></li>")
    first = " of the first seed" if len(seeds) > 1 else ""
    name = f"{g.label} on {g.federation}" if several else g.label
    return (
        f"<details><summary>{swatch(number)}{escape(name)}</summary><ul>{''.join(seeds)}</ul>"
        f"<p>Configuration{first}:</p><pre>{escape(to_toml(g.config))}</pre></details>"
    )
