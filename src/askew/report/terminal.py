"""What runs look like in a terminal: progress while they train, tables and a small chart afterwards."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import ceil
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from rich import box
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from ..core.settings import plain
from ..engine.server import RECORD
from ..experiment.config import Config, stored_tables
from ..experiment.store import Record, Run
from .tables import brief, clients, group, participation_name, partition_name, table

LINES = 20  # the most that a run says where there is no terminal
BLOCKS = " ▁▂▃▄▅▆▇█"
WIDTH, HEIGHT = 60, 6  # of the chart, in characters
LAST = 5  # rounds that are shown one by one
BEST, QUIET = "bold green", "dim"


# words ----------------------------------------------------------------------------------------------------------


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}%"


def digits(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def size(count: float) -> str:
    """Bytes in the unit that suits them."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.0f} TB"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return (
        f"{1000 * seconds:.3g} ms"
        if seconds < 1
        else f"{seconds:.3g} s"
        if seconds < 100
        else f"{seconds / 60:.3g} min"
    )


def times(value: float | None) -> str:
    """A multiple of the model, to one decimal."""
    return "–" if value is None else f"{value:.1f}".removesuffix(".0")


def command(*words: str | Path) -> str:
    """A command line that can be pasted into a shell."""
    return shlex.join(["askew", *map(str, words)])


SELDOM = {"head": 0, "weights": "", "new_head": False, "drop_last": False}


def settings(table: dict[str, Any], without: Sequence[str] = ()) -> str:
    """A table of a configuration in one line: its name, then key=value; what is seldom used only where it is used."""
    shown = {k: v for k, v in table.items() if k not in ("name", *without) and (k not in SELDOM or v != SELDOM[k])}
    return " ".join(
        [*([str(table["name"])] if "name" in table else []), *(f"{k}={short(v)}" for k, v in shown.items())]
    )


def short(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, str):
        return value or '""'
    return f"{value:g}" if isinstance(value, float) else plain(value)


def scene(run: Run) -> str:
    """The federation in one line: "digits, 30 clients, Dirichlet α = 0.2, …"."""
    config = run.config
    words = [config["data"]["name"], f"{clients(run)} clients", partition_name(config), participation_name(config)]
    return ", ".join(str(word) for word in words if word)


def engine(run: Run) -> str:
    reason = run.facts.get("reason")
    workers = run.facts.get("workers", 1)
    shared = f", {workers} processes" if workers > 1 else ""
    slow = re.fullmatch(r"torch \((?!as asked)(.+)\)", str(run.facts.get("kernels")))
    kernels = f", with torch's kernels instead of faster ones ({slow[1]})" if slow else ""
    return f"{run.facts.get('engine', '–')}{f' ({reason})' if reason else ''}, on {run.facts.get('device', '–')}{shared}{kernels}"


def state(run: Run) -> str:
    """Finished, or how far it came."""
    done, rounds = len(run.rounds), run.config["rounds"]
    return (
        f"finished, {rounds} rounds"
        if run.finished
        else f"{run.facts.get('state', 'begun')}, {done} of {rounds} rounds"
    )


def go_on(folder: Path, engine: str = "") -> str:
    """The command that takes an unfinished run up again."""
    if engine == "flower":
        work = folder / "flower"  # where `askew deploy up` keeps its app
        secure = ["--secure"] * (work / "keys").is_dir()
        return (
            command("deploy", "up", work / "app", "--out", folder.parent, *secure) if work.is_dir() else "flwr run APP"
        )
    return command("run", folder / "run.toml", "--out", folder.parent)


# while they train -----------------------------------------------------------------------------------------------


class Ticker:
    """Watches runs: live bars on a terminal, elsewhere a line now and then (for one run) or a line a run (for several)."""

    def __init__(self, console: Console, configs: Sequence[Config] = (), title: str = "") -> None:
        self.console, self.runs, self.done, self.played, self.training = console, max(1, len(configs)), 0, 0, False
        begun = [Run(stored_tables(config), facts={"name": config.name()}) for config in configs]
        self.labels = {run.name: g.label for g in group(begun) for run in g.runs}  # as the table of all will name them
        self.parts: dict[str, float] = {}  # of runs at play
        columns = (
            TextColumn("{task.description}"),
            BarColumn(None),
            TextColumn("{task.fields[words]}"),
            TimeRemainingColumn(compact=True),
        )
        self.bars = Progress(*columns, console=console, transient=True, disable=not console.is_terminal, expand=True)
        self.whole = self.bars.add_task(title, total=self.runs, words=self.count()) if self.runs > 1 else None
        self.bar = self.bars.add_task("", total=None, visible=False, words="")

    def __enter__(self) -> Self:
        self.bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bars.stop()

    def __call__(self, run: Run, record: Record | None) -> None:
        """Before the first round (no record) and after each."""
        if record is None:
            self.begin(run)
        else:
            self.played += 1
        done, rounds = len(run.rounds), int(run.config["rounds"])
        last, loss = run.last("accuracy"), run.last("train_loss")
        words = f"round {done}/{rounds}" + (f" · accuracy {percent(last)}" if last is not None else "")
        words += f" · loss {loss:.2f}" if loss is not None else ""
        self.bars.update(self.bar, completed=done, words=words)
        self.parts[run.name] = done / rounds
        if self.whole is not None:
            self.bars.update(self.whole, completed=self.done + sum(self.parts.values()))
        elif (
            not self.console.is_terminal and record is not None and (done % ceil(rounds / LINES) == 0 or done == rounds)
        ):
            self.console.print(words, highlight=False, soft_wrap=True)

    def begin(self, run: Run) -> None:
        """Say what is about to be trained and set the bar up for it."""
        self.training = True
        if self.runs > 1 and not self.done and not self.parts:
            self.say(f"{self.runs} runs on {scene(run)}, {run.config['rounds']} rounds each")
        if self.runs == 1:
            self.say(f"{run.algorithm} on {scene(run)}")
            self.say(f"engine {engine(run)}")
            if run.facts.get("remark"):
                self.say(f"note: {run.facts['remark']}", "yellow")
            if run.rounds:
                self.say(f"going on after round {len(run.rounds)} of {run.config['rounds']}", "yellow")
        called = self.called(run) if self.runs > 1 else run.algorithm
        self.bars.reset(
            self.bar, total=run.config["rounds"], completed=len(run.rounds), visible=True, description=called
        )

    def end(self, run: Run) -> None:
        """One of several runs is through."""
        self.done += 1
        self.parts.pop(run.name, None)
        if self.whole is not None:
            self.bars.update(self.whole, completed=self.done, words=self.count())
        if not self.console.is_terminal and self.training:
            self.say(f"{self.count()}: {self.called(run)}: best accuracy {percent(run.best_accuracy)}")
        self.training = False

    def called(self, run: Run) -> str:
        return f"{brief(self.labels.get(run.name, run.algorithm))}, seed {run.config['seed']}"

    def count(self) -> str:
        return f"{self.done}/{self.runs} runs"

    def say(self, words: str, style: str = QUIET) -> None:
        self.console.print(Text(words, style), soft_wrap=not self.console.is_terminal)


# afterwards -----------------------------------------------------------------------------------------------------


def pairs(rows: Iterable[tuple[str, RenderableType]]) -> Table:
    """Names to the left, values to the right."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    return table


def figures(run: Run) -> list[tuple[str, RenderableType]]:
    """The figures of a run, for `pairs`."""
    best = f"{percent(run.best_accuracy)}" + (f" in round {run.best_round}" if run.best_round else "")
    rows: list[tuple[str, RenderableType]] = [
        ("best accuracy", Text(best, BEST if run.best_accuracy is not None else "")),
        ("last accuracy", percent(run.final_accuracy)),
        ("rounds", f"{len(run.rounds)} of {run.config['rounds']}, {duration(run.seconds_per_round)} each"),
        ("sent", f"{size(run.bytes_up)} up, {size(run.bytes_down)} down"),
    ]
    return rows + ([("left out", f"{run.dropped} client rounds, not finite or without a batch")] if run.dropped else [])


def summary(run: Run) -> RenderableType:
    """How a run ended, where it is and what to type next."""
    rows = (
        figures(run)
        + [("engine", engine(run))]
        + ([("stored in", Text(str(run.folder), overflow="fold"))] if run.folder else [])
    )
    following = [command("show", run.folder), command("report", run.folder, "--out", "report")] if run.folder else []
    return Group(
        Text(), pairs(rows), Text(), pairs([("next" if n == 0 else "", Text(line)) for n, line in enumerate(following)])
    )


def shown(run: Run) -> RenderableType:
    """Everything worth knowing about a stored run, on one page."""
    config = run.config
    about: list[tuple[str, RenderableType]] = [
        ("federation", scene(run)),
        ("algorithm", settings(config["algorithm"])),
        (
            "model",
            settings(config["model"])
            + (f", {run.facts['parameters']:,} parameters" if run.facts.get("parameters") else ""),
        ),
        ("local", settings(config.get("local", {}))),
        ("seed", str(config.get("seed", "–"))),
        ("engine", engine(run)),
    ]
    about += [("note", Text(str(run.facts["remark"]), "yellow"))] if run.facts.get("remark") else []
    parts: list[RenderableType] = [Text.assemble((run.name, "bold"), f": {state(run)}", overflow="fold"), Text()]
    parts += [pairs(about), Text(), pairs(figures(run))]
    at, accuracy = run.curve("accuracy")
    if len(accuracy) > 1:
        parts += [Text(), Text("accuracy by round", "cyan"), chart(at, accuracy)]
    if run.rounds:
        parts += [Text(), last_rounds(run)]
    logged = [
        key for key in dict.fromkeys(key for r in run.rounds for key in r) if key not in RECORD and run.curve(key)[1]
    ]
    if logged:
        parts += [Text(), also(run, logged)]
    if not run.finished and run.folder:
        parts += [Text(), pairs([("go on", Text(go_on(run.folder, str(run.facts.get("engine")))))])]
    return Group(*parts)


def last_rounds(run: Run) -> Table:
    table = plain_table("round", "clients", "accuracy", "test\nloss", "train\nloss", "left\nout", "up", "down", "time")
    for r in run.rounds[-LAST:]:
        values = [
            str(r["round"]),
            str(len(r.get("participants") or ())),
            percent(r.get("accuracy")),
            digits(r.get("loss")),
        ]
        values += [
            digits(r.get("train_loss")),
            str(r["dropped"]),
            size(r["bytes_up"]),
            size(r["bytes_down"]),
            duration(r["seconds"]),
        ]
        table.add_row(*values)
    return table


def also(run: Run, keys: Sequence[str]) -> Table:
    """What the method or the evaluation recorded besides."""
    table = plain_table("also recorded", "first", "last", "lowest", "highest")
    table.columns[0].justify, table.columns[0].min_width = "left", max(map(len, keys))
    table.add_column("by round", no_wrap=True)
    for key in keys:
        values = run.curve(key)[1]
        table.add_row(key, *(digits(v) for v in (values[0], values[-1], min(values), max(values))), spark(values, 16))
    return table


def plain_table(*headings: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, header_style="cyan")
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def resampled(values: Sequence[float], width: int) -> list[float]:
    """At most `width` values: means over equal stretches."""
    if len(values) <= width:
        return list(values)
    cuts = [round(k * len(values) / width) for k in range(width + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]


def heights(values: Sequence[float], steps: int) -> list[int]:
    """Values as whole numbers from 1 to `steps`."""
    low, high = min(values), max(values)
    return [1 + round((steps - 1) * (v - low) / (high - low)) if high > low else 1 for v in values]


def spark(values: Sequence[float], width: int) -> str:
    """A curve in one line."""
    return "".join(BLOCKS[h] for h in heights(resampled(values, width), len(BLOCKS) - 1))


def chart(rounds: Sequence[int], values: Sequence[float]) -> Text:
    """A curve in a few lines, from its lowest to its highest value."""
    eighths = len(BLOCKS) - 1
    drawn = resampled(values, WIDTH)
    columns = heights(drawn, HEIGHT * eighths)
    wide = max(1, WIDTH // len(columns))
    labels = {HEIGHT - 1: percent(max(drawn)), 0: percent(min(drawn))}
    text = Text()
    for row in reversed(range(HEIGHT)):
        cells = "".join(BLOCKS[max(0, min(eighths, h - row * eighths))] * wide for h in columns)
        text.append(f"{labels.get(row, ''):>7} ", QUIET).append("│", QUIET).append(f"{cells.rstrip()}\n", "green")
    ends = (str(rounds[0]), str(rounds[-1]))
    return text.append(f"{'round':>7}  {ends[0]}{ends[1]:>{max(1, len(columns) * wide - len(ends[0]))}}", QUIET)


# comparison -----------------------------------------------------------------------------------------------------


class Column(NamedTuple):
    """A column of the comparison; better: 1 more is better, −1 less is, 0 neither (times depend on what else the machine does)."""

    heading: str
    key: str
    better: int
    form: str
    scale: float = 1


COLUMNS = (
    Column("last\nacc. %", "final_accuracy", 1, ".1f", 100),
    Column("rounds to\ntarget", "rounds_to_target", -1, ".0f"),
    Column("speed-\nup", "speedup", 1, ".1f"),
    Column("MB\nup", "bytes_up", -1, ".3g", 1e-6),
    Column("MB\ndown", "bytes_down", -1, ".3g", 1e-6),
    Column("ms a\nround", "seconds_per_round", 0, ".3g", 1e3),
)
HEADLINE = Column("best\nacc. %", "best_accuracy", 1, ".1f", 100)


def comparison(runs: Sequence[Run], target: float | None = None) -> RenderableType:
    """One row a method, the best values among methods on the same task highlighted."""
    rows, tasks = table(runs, target), [g.task for g in group(runs)]
    columns = [column for column in (HEADLINE, *COLUMNS) if any(row[column.key] is not None for row in rows)]
    shown = plain_table("method", *(column.heading for column in columns))
    shown.columns[0].justify, shown.columns[0].overflow = "left", "fold"
    for row, task in zip(rows, tasks, strict=True):
        peers = [other for other, its in zip(rows, tasks, strict=True) if its == task]
        shown.add_row(row["label"], *(cell(row, column, peers) for column in columns))
    return Group(shown, Text(remarks(rows, target), QUIET))


def cell(row: dict[str, Any], column: Column, peers: Sequence[dict[str, Any]]) -> Text:
    """A figure with its standard deviation; highlighted where it is the best and not all are."""
    value = row[column.key]
    if value is None:
        return Text("–", QUIET)
    known = [peer[column.key] for peer in peers if peer[column.key] is not None]
    best = column.better and min(known) < max(known) and value == (max if column.better > 0 else min)(known)
    deviation = row.get(f"{column.key}_std") if column is HEADLINE else None
    words = f"{column.scale * value:{column.form}}" + (
        f" ± {column.scale * deviation:{column.form}}" if deviation is not None else ""
    )
    return Text(words, BEST if best else "")


def remarks(rows: Sequence[dict[str, Any]], given: float | None) -> str:
    """What the headings leave unsaid."""
    seeds, targets, bases = ({row[key] for row in rows} for key in ("seeds", "target", "baseline"))
    words = []
    if seeds != {1}:
        words.append(f"Means over {f'{max(seeds)} seeds' if len(seeds) == 1 else 'seeds'}, ± one standard deviation.")
    if given is not None:
        words.append(f"Target: accuracy {percent(given)}.")
    elif len(targets) == len(bases) == 1 and None not in targets:
        words.append(f"Target: accuracy {percent(targets.pop())}, the best of {bases.pop()}.")
    elif targets != {None}:
        words.append("Target: the best accuracy of fedavg on the same task.")
    late = sum(not row["finished"] for row in rows)
    return " ".join(words + ([f"{late} of {len(rows)} did not reach the last round."] if late else []))


# catalogue ------------------------------------------------------------------------------------------------------


def catalogue(kind: str, entries: Sequence[dict[str, Any]]) -> RenderableType:
    """Everything of one kind that a configuration can name, with its settings."""
    if kind != "algorithms":
        shown, one = plain_table(), kind.removesuffix("s")
        shown.add_column(one, style="bold", no_wrap=True)
        shown.add_column("what it is, and its settings with their defaults (–: left out)")
        first, *others = [entry["parameters"] for entry in entries]
        common = [p for p in first if others and all(p in other for other in others)]
        for entry in entries:
            own = [p for p in entry["parameters"] if p not in common]
            shown.add_row(
                entry["name"], Group(Text(entry["idea"]), *([explained(own)] if own else [])), end_section=True
            )
        if not common:
            return shown
        return Group(shown, Text(f"\nevery {one} has these settings too\n", "cyan"), explained(common))
    shown, settled = plain_table(), plain_table()
    for each in (shown, settled):
        each.add_column("algorithm", style="bold", no_wrap=True)
    for heading in ("sent\ndown", "sent\nup", "kept at\nserver", "kept at\nclient"):
        shown.add_column(heading, justify="right", no_wrap=True)
    shown.add_column("exact", justify="center", no_wrap=True)
    shown.add_column("idea and paper")
    settled.add_column("settings, with their defaults (–: left out)")
    for entry in entries:
        server = times(entry["server_state"]) + (f"+{times(entry['memory'])}N" if entry["memory"] else "")
        costs = [times(entry["down"]), times(entry["up"]), server, times(entry["client_state"])]
        about = Text.assemble(entry["idea"], "\n", (entry["paper"], QUIET))
        shown.add_row(entry["name"], *costs, Text("yes", "green") if entry["exact"] else "–", about)
        settled.add_row(entry["name"], " ".join(f"{p['name']}={short(p['default'])}" for p in entry["parameters"]))
    notes = (
        "sent: by and to one client in a round, kept: from round to round, both in multiples of the model, measured on a small network "
        "with batch norm. exact: claims the true optimum under skewed data and partial participation."
    ) + (" +1N: and once for each client." if any(entry["memory"] for entry in entries) else "")
    return Group(
        shown,
        Text(f"\n{notes}\n", QUIET),
        settled,
        Text("\nwhat each setting means: askew list algorithms --json", QUIET),
    )


def explained(parameters: Sequence[dict[str, Any]]) -> Table:
    """Settings with their defaults, meanings and ranges."""
    return pairs(
        (f"{p['name']} = {short(p['default'])}", Text(f"{p['doc']} ({p['allowed']})", QUIET)) for p in parameters
    )
