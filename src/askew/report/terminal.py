"""Runs in a terminal: texts, tables and a small chart."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..core.records import RECORD
from ..core.settings import toml_text
from ..core.text import count_text
from ..experiment.listing import stored_catalogue
from ..experiment.roll_call import call_round, loss_sentence, never_sentences, reason_text
from ..experiment.store import DIVERGED, REACHED, Run, read_json
from .plain_table import FirstThatFits, PlainTable, plain_table
from .tables import (
    ComparisonRow,
    best_words,
    client_count,
    divergence_remark,
    group_runs,
    has_diverged,
    is_running,
    participation_name,
    partition_name,
    repeated_remark,
    shorten_label,
    table,
)

BLOCKS = " ▁▂▃▄▅▆▇█"
WIDTH, HEIGHT = 60, 6  # of the chart, in characters
# by the state of a run that was stopped early: what lets it go on
GO_ON = {DIVERGED: " --set evaluation.stop_diverged=false", REACHED: " --set evaluation.stop_at=0"}
LAST_ROUNDS = 5  # rounds that are shown one by one
BEST, QUIET, WARNING = "bold green", "dim", "bold yellow"  # styles of text


# texts ----------------------------------------------------------------------------------------------------------


def percent(value: float | None) -> str:
    """A fraction in percent; – if there is none."""
    return "–" if value is None else f"{100 * value:.1f}%"


def digits(value: float | None) -> str:
    """A number with three digits; – if there is none."""
    return "–" if value is None else plain_number(value, ".3g")


def plain_number(value: float, form: str) -> str:
    """A number in this form, or where that would be an exponent, below a million the whole number: "1,422"."""
    text = f"{value:{form}}"
    return f"{value:,.0f}" if "e+" in text and abs(value) < 1e6 else text


def size(count: float) -> str:
    """A number of bytes with three digits: "1.5 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.0f} TB"


def duration(seconds: float | None) -> str:
    """A time with three digits, in milliseconds, seconds or minutes; – if there is none."""
    if seconds is None:
        return "–"
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds / 60:.3g} min"


def long_time(seconds: float) -> str:
    """A time in its largest unit, for people who wait: "about 3 hours"."""
    for unit, length in (("year", 31_557_600), ("day", 86_400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            count = round(seconds / length)
            return f"about {count_text(count, unit)}"
    return "less than a minute"


def times(value: float | None) -> str:
    """A multiple of the model, to one decimal."""
    return "–" if value is None else f"{value:.1f}".removesuffix(".0")


def command(*words: str | Path) -> str:
    """A command line that can be pasted into a shell."""
    return shlex.join(["askew", *map(str, words)])


RARE_SETTINGS = {"head": 0, "weights": "", "new_head": False, "drop_last": False}  # with their defaults


def settings_line(table: dict[str, Any]) -> str:
    """A table of a configuration in one line: its name, then key=value; rare settings only where they are used."""
    name = [str(table["name"])] if "name" in table else []
    shown = {k: v for k, v in table.items() if k != "name" and (k not in RARE_SETTINGS or v != RARE_SETTINGS[k])}
    return " ".join([*name, *(f"{k}={setting_text(v)}" for k, v in shown.items())])


def setting_text(value: Any) -> str:
    """A setting's value in one word; – if it is left out."""
    if value is None:
        return "–"
    if isinstance(value, str):
        return value or '""'
    return f"{value:g}" if isinstance(value, float) else toml_text(value)


def federation_text(run: Run) -> str:
    """The federation in one line: "digits, 30 clients, Dirichlet α = 0.2, …"."""
    config = run.config
    clients = count_text(client_count(run), "client")
    parts = [config["data"]["name"], clients, partition_name(config), participation_name(config)]
    return ", ".join(str(part) for part in parts if part)


def engine_text(run: Run) -> str:
    """The engine with the reason for its choice, the device, and why kernels are slow, if they are."""
    facts = run.facts
    reason, workers = facts.get("reason"), facts.get("workers", 1)
    slow = re.fullmatch(r"torch \((?!as asked)(.+)\)", str(facts.get("kernels")))
    text = f"{facts.get('engine', '–')}{f' ({reason})' if reason else ''}, on {facts.get('device', '–')}"
    text += f", {workers} processes" if workers > 1 else ""
    return text + (f", with torch's kernels instead of faster ones ({slow[1]})" if slow else "")


def state(run: Run) -> str:
    """Finished, or how far it came."""
    rounds = count_text(run.config["rounds"], "round")
    if run.finished:
        return f"{'diverged' if has_diverged(run) else 'finished'}, {rounds}"
    if is_running(run):
        return f"running, {len(run.rounds)} of {rounds}"
    if run.facts.get("state") == REACHED:
        return f"stopped as its accuracy was high enough, {len(run.rounds)} of {rounds}"
    return f"{run.facts.get('state', 'begun')}, {len(run.rounds)} of {rounds}"


def headline(run: Run) -> str:
    """The figure that a run is known by: its best accuracy, or in a regression its last test loss."""
    loss = run.last("loss")
    is_regression = run.best_accuracy is None and loss is not None
    return f"last test loss {digits(loss)}" if is_regression else f"best accuracy {percent(run.best_accuracy)}"


def resume_command(folder: Path, engine: str = "", options: Sequence[str | Path] = ()) -> str:
    """The command that continues an unfinished run; `options` are further words of `askew run`."""
    if engine == "flower":
        work = folder / "flower"  # where `askew deploy up` keeps its app
        if not work.is_dir():
            return "flwr run APP"
        secure = ["--secure"] * (read_json(work / "processes.json").get("keys") is True)
        return command("deploy", "up", work / "app", "--out", folder.parent, *secure)
    return command("run", folder / "run.toml", "--out", folder.parent, *options)


# afterwards -----------------------------------------------------------------------------------------------------


def pairs(rows: Iterable[tuple[str, RenderableType]]) -> Table:
    """A table of two columns: names to the left, values to the right."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    return table


def run_figures(run: Run) -> list[tuple[str, RenderableType]]:
    """The main figures of a run, for `pairs`."""
    rows: list[tuple[str, RenderableType]] = [
        *quality_rows(run),
        ("rounds", f"{len(run.rounds)} of {run.config['rounds']}, {duration(run.seconds_per_round)} each"),
        ("sent", f"{size(run.bytes_up)} up, {size(run.bytes_down)} down"),
    ]
    rows += [("virtual clock", clock_text(run))] if run.clock is not None else []
    rows += [("privacy", privacy_text(run))] if run.facts.get("privacy") else []
    rows += [("warning", Text(str(run.facts[k]), WARNING)) for k in ("diverged", "draws") if run.facts.get(k)]
    return rows + roll_call_rows(run)


def quality_rows(run: Run) -> list[tuple[str, RenderableType]]:
    """The best and the last accuracy, or in a regression the losses on the test set, for `pairs`."""
    at, losses = run.curve("loss")
    if run.best_accuracy is None and losses:
        lowest = f"{digits(min(losses))} in round {at[losses.index(min(losses))]}"
        return [("lowest test loss", Text(lowest, BEST)), ("last test loss", digits(losses[-1]))]
    best = percent(run.best_accuracy) + (f" in round {run.best_round}" if run.best_round else "")
    style = BEST if run.best_accuracy is not None else ""
    return [("best accuracy", Text(best, style)), ("last accuracy", percent(run.final_accuracy))]


def roll_call_rows(run: Run) -> list[tuple[str, RenderableType]]:
    """Whose answers were lost, how often and why, for `pairs`; nothing where all are there."""
    call, rows = run.roll_call(), list[tuple[str, RenderableType]]()
    if call.empty and run.dropped:  # a run of before answers were called by name
        rows.append(("left out", f"{run.dropped} client rounds, not finite or without a batch"))
    if not call.empty:
        rows.append(("roll-call", Text(loss_sentence(call, len(run.rounds)), WARNING)))
        rows += [("", reason_text(reason, clients)) for reason, clients in call.reasons.items()]
    sentences = never_sentences(call, run.federation, run.deployed)
    return rows + [("warning", Text(sentence, WARNING)) for sentence in sentences]


def clock_text(run: Run) -> str:
    """How long a run took on the virtual clock, how long a round, and what was late or away."""
    records = [r for r in run.rounds if r.get("clock") is not None]
    lengths = [float(r["clock"]) - float(r["began"]) for r in records]
    asked, late, away = (sum(int(r[key]) for r in records) for key in ("asked", "late", "away"))
    text = f"{duration(run.clock)}, a round {duration(median(lengths))} (median), at most {duration(max(lengths))}"
    text += f"; of {asked} asked clients {late} late, {away} left" if late or away else ""
    stale = [int(steps) for r in records for steps in r.get("staleness", ())]
    return text + (f"; staleness {mean(stale):.2g} on average, at most {max(stale)}" if stale else "")


def privacy_text(run: Run) -> str:
    """What ε the rounds so far have come to, if any, and what was planned."""
    spent, delta = run.last("epsilon"), run.config.get("privacy", {}).get("delta")
    so_far = f"ε = {spent:.3g} at δ = {delta:g} after round {len(run.rounds)}; " if spent is not None else ""
    return f"{so_far}planned: {run.facts['privacy']}"


def summary(run: Run) -> RenderableType:
    """How a run ended, where it is and what to type next."""
    rows = [*run_figures(run), ("engine", engine_text(run))]
    commands: list[tuple[str, RenderableType]] = []
    if run.folder:
        rows.append(("stored in", Text(str(run.folder), overflow="fold")))
        commands.append(("next", Text(command("show", run.folder))))
        commands.append(("", Text(command("report", run.folder, "--out", "report"))))
    return Group(Text(), pairs(rows), Text(), pairs(commands))


def run_details(run: Run) -> RenderableType:
    """A stored run on one page: its settings, figures, curve of accuracies and last rounds."""
    config = run.config
    parameters = f", {run.facts['parameters']:,} parameters" if run.facts.get("parameters") else ""
    about: list[tuple[str, RenderableType]] = [
        ("federation", federation_text(run)),
        ("algorithm", settings_line(config["algorithm"])),
        ("model", settings_line(config["model"]) + parameters),
        ("local", settings_line(config.get("local", {}))),
        *optional_rows(config),
        ("seed", str(config.get("seed", "–"))),
        ("engine", engine_text(run)),
    ]
    about += [("note", Text(str(run.facts["remark"]), "yellow"))] if run.facts.get("remark") else []
    parts: list[RenderableType] = [Text.assemble((run.name, "bold"), f": {state(run)}", overflow="fold"), Text()]
    parts += [pairs(about), Text(), pairs(run_figures(run))]
    key, name, form = ("accuracy", "accuracy", percent)
    if run.best_accuracy is None:
        key, name, form = ("loss", "test loss", digits)
    at, values = run.curve(key)
    if len(values) > 1:
        parts += [Text(), Text(f"{name} by round", "cyan"), chart(at, values, form)]
    if run.rounds:
        parts += [Text(), last_rounds(run)]
    keys = dict.fromkeys(key for r in run.rounds for key in r)
    further = [key for key in keys if key not in (*RECORD, "clock", "began") and run.curve(key)[1]]
    if further:
        parts += [Text(), further_records(run, further)]
    if not run.finished and run.folder:
        parts += [Text(), pairs([next_step(run, run.folder)])]
    return Group(*parts)


def next_step(run: Run, folder: Path) -> tuple[str, Text]:
    """What to type next about an unfinished run, for `pairs`; one that a process trains now would be refused."""
    if is_running(run):
        return "watch it", Text(command("watch", folder.parent))
    again = resume_command(folder, str(run.facts.get("engine")))
    return "go on", Text(again + GO_ON.get(str(run.facts.get("state")), ""))


def optional_rows(config: Mapping[str, Any]) -> list[tuple[str, RenderableType]]:
    """The tables that most runs do not have, with the settings that differ from their defaults, for `pairs`."""
    defaults = stored_catalogue()["optional tables"]
    tables = {name: config[name] for name in defaults if name in config}
    changed = {name: {k: v for k, v in its.items() if v != defaults[name].get(k)} for name, its in tables.items()}
    return [(name, settings_line(its)) for name, its in changed.items() if its]


def last_rounds(run: Run) -> PlainTable:
    """The records of the last rounds."""
    accuracy = ["accuracy"] if run.best_accuracy is not None else []
    table = plain_table("round", "clients", *accuracy, "test\nloss", "train\nloss", "left\nout", "up", "down", "time")
    for r in run.rounds[-LAST_ROUNDS:]:
        one = call_round(r)
        table.add_row(
            str(r["round"]),
            str(len(r.get("participants") or ())),
            *(percent(r.get(key)) for key in accuracy),
            digits(r.get("loss")),
            digits(r.get("train_loss")),
            str(len(one.asked) - len(one.used) or r["dropped"]),
            size(r["bytes_up"]),
            size(r["bytes_down"]),
            duration(r["seconds"]),
        )
    return table


def further_records(run: Run, keys: Sequence[str]) -> PlainTable:
    """What the method or the evaluation recorded besides the usual: first, last, lowest and highest values."""
    table = plain_table("also recorded", "first", "last", "lowest", "highest")
    table.columns[0].justify = "left"
    table.columns[0].no_wrap = True
    table.add_column("by round", no_wrap=True)
    for key in keys:
        values = run.curve(key)[1]
        table.add_row(key, *(digits(v) for v in (values[0], values[-1], min(values), max(values))), spark(values, 16))
    return table


def resample(values: Sequence[float], width: int) -> list[float]:
    """At most `width` values: means over equal stretches."""
    if len(values) <= width:
        return list(values)
    cuts = [round(k * len(values) / width) for k in range(width + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]


def bar_heights(values: Sequence[float], steps: int) -> list[int]:
    """Values as whole numbers from 1 (the lowest) to `steps` (the highest)."""
    low, high = min(values), max(values)
    return [1 + round((steps - 1) * (v - low) / (high - low)) if high > low else 1 for v in values]


def spark(values: Sequence[float], width: int) -> str:
    """A curve in one line."""
    return "".join(BLOCKS[h] for h in bar_heights(resample(values, width), len(BLOCKS) - 1))


def chart(rounds: Sequence[int], values: Sequence[float], form: Callable[[float], str] = percent) -> Text:
    """A curve in a few lines, from its lowest to its highest value, which `form` writes."""
    eighths = len(BLOCKS) - 1
    shown = resample(values, WIDTH)
    columns = bar_heights(shown, HEIGHT * eighths)
    width = max(1, WIDTH // len(columns))  # of a column
    labels = {HEIGHT - 1: form(max(shown)), 0: form(min(shown))}
    text = Text()
    for row in reversed(range(HEIGHT)):
        cells = "".join(BLOCKS[max(0, min(eighths, h - row * eighths))] * width for h in columns)
        text.append(f"{labels.get(row, ''):>7} ", QUIET).append("│", QUIET).append(f"{cells.rstrip()}\n", "green")
    ends = (str(rounds[0]), str(rounds[-1]))
    return text.append(f"{'round':>7}  {ends[0]}{ends[1]:>{max(1, len(columns) * width - len(ends[0]))}}", QUIET)


# comparison -----------------------------------------------------------------------------------------------------


class ComparisonColumn(NamedTuple):
    """A column of the comparison in a terminal."""

    heading: str
    key: str  # of a row of `table`
    better: int  # 1: more is better, −1: less is, 0: neither (times depend on what else the machine does)
    form: str  # as in f"{value:form}"
    scale: float = 1  # from the row's unit to the shown one


# columns of which the last are left out first where the terminal is too narrow
COLUMNS = (
    ComparisonColumn("last\nacc. %", "final_accuracy", 1, ".1f", 100),
    ComparisonColumn("rounds to\ntarget", "rounds_to_target", -1, ".0f"),
    ComparisonColumn("virtual s\nto target", "seconds_to_target", -1, ".4g"),
    ComparisonColumn("speed-\nup", "speedup", 1, ".1f"),
    ComparisonColumn("MB\nup", "bytes_up", -1, ".3g", 1e-6),
    ComparisonColumn("MB\ndown", "bytes_down", -1, ".3g", 1e-6),
    ComparisonColumn("ms a\nround", "seconds_per_round", 0, ".3g", 1e3),
)
HEADLINE = ComparisonColumn("best\nacc. %", "best_accuracy", 1, ".1f", 100)
LOSS = ComparisonColumn("last test\nloss", "test_loss", -1, ".4g")  # the headline of a regression
KEPT = 1  # columns of figures that are never left out


def comparison(runs: Sequence[Run], target: float | None = None) -> RenderableType:
    """A table for each federation, with one row for each method; the best values on the same task are highlighted."""
    rows, tasks, parts = table(runs, target), [g.task for g in group_runs(runs)], list[RenderableType]()
    for federation in dict.fromkeys(row["federation"] for row in rows):
        its = [(row, task) for row, task in zip(rows, tasks, strict=True) if row["federation"] == federation]
        parts += [*([Text()] if parts else []), Text(federation, "bold"), Text(), federation_table(its, target)]
    return Group(*parts)


def federation_table(tasked: Sequence[tuple[ComparisonRow, str]], target: float | None) -> RenderableType:
    """The table of one federation, whose rows come with their tasks."""
    rows = [row for row, _ in tasked]
    headline = LOSS if all(row["best_accuracy"] is None for row in rows) else HEADLINE
    columns = [column for column in (headline, *COLUMNS) if any(row[column.key] is not None for row in rows)]
    choices = [method_table(tasked, columns[:count]) for count in range(len(columns), min(KEPT, len(columns)) - 1, -1)]
    return Group(FirstThatFits(choices), Text(comparison_remarks(rows, target), QUIET))


def method_table(tasked: Sequence[tuple[ComparisonRow, str]], columns: Sequence[ComparisonColumn]) -> PlainTable:
    """A row for each method, with these columns."""
    methods = plain_table("method", *(column.heading for column in columns))
    methods.columns[0].justify = "left"
    for row, task in tasked:
        peers = [other for other, its in tasked if its == task]
        label = shorten_label(row["label"])
        methods.add_row(label, *(comparison_cell(row, column, peers) for column in columns))
    return methods


def comparison_cell(row: ComparisonRow, column: ComparisonColumn, peers: Sequence[ComparisonRow]) -> Text:
    """A figure with its standard deviation; highlighted where it is the best and not all are."""
    value = row[column.key]
    if value is None:
        return Text("–", QUIET)
    known = [peer[column.key] for peer in peers if peer[column.key] is not None]
    best = column.better and min(known) < max(known) and value == (max if column.better > 0 else min)(known)
    std = row.get(f"{column.key}_std") if column in (HEADLINE, LOSS) else None
    text = plain_number(column.scale * value, column.form)
    text += f" ± {column.scale * std:{column.form if column is HEADLINE else '.2g'}}" if std is not None else ""
    return Text(text, BEST if best else "")


def comparison_remarks(rows: Sequence[ComparisonRow], given: float | None) -> str:
    """Sentences below the comparison: seeds, the target (`given`, or fedavg's best), and rows that are no results."""
    seeds, sentences = {row["seeds"] for row in rows}, list[str]()
    if seeds != {1}:
        counts, where = f"{max(seeds)}", ""
        if len(seeds) > 1:
            counts, where = f"{min(seeds)} to {max(seeds)}", " where there are several" if 1 in seeds else ""
        sentences.append(f"Means over {counts} seeds, ± one standard deviation{where}.")
    sentences.append(f"Target: accuracy {percent(given)}." if given is not None else target_remark(rows))
    sentences.append(divergence_remark({row["label"]: (row["diverged"], row["seeds"]) for row in rows}))
    running = sum(bool(row["running"]) for row in rows)
    if running:
        are = "is" if running == 1 else "are"
        sentences.append(f"{running} of {len(rows)} {are} still being trained; the figures are those so far.")
    unfinished = sum(not row["finished"] and not row["running"] for row in rows)
    sentences += [f"{unfinished} of {count_text(len(rows), 'row')} did not reach the last round."] if unfinished else []
    left_out = sum(row["left_out"] for row in rows)
    seeds_left = "1 seed that has" if left_out == 1 else f"{left_out} seeds that have"
    sentences += [f"Left out: {seeds_left} not reached the last round."] if left_out else []
    sentences.append(repeated_remark(sum(row["repeated"] for row in rows)))
    lost = sum(bool(row["lost_answers"]) for row in rows)
    lost_text = f"Answers of clients were lost in {lost} of {count_text(len(rows), 'row')}"
    sentences += [f"{lost_text}: askew show RUN says whose and why."] if lost else []
    return " ".join(filter(None, sentences))


def target_remark(rows: Sequence[ComparisonRow]) -> str:
    """What the rounds are counted to where no target was given: fedavg's best, or the best of its mean curve."""
    targets, bases = ({row[key] for row in rows} for key in ("target", "baseline"))
    if len(targets) == len(bases) == 1 and None not in targets:
        return f"Target: accuracy {percent(targets.pop())}, {best_words(rows, bases.pop())}."
    several = any(row["seeds"] > 1 for row in rows if row["label"] in bases)
    best = "best of fedavg's mean curve" if several else "best accuracy of fedavg"
    return f"Target: the {best} on the same task." if targets != {None} else ""
