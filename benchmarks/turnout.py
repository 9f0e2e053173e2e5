"""The study of turnouts, ours/turnout: its learning rates, the numbers of its pages in docs and its pictures.

    python benchmarks/turnout.py --rates     write the rates that ours/turnout-rates chose into papers/ours/turnout.toml
    python benchmarks/turnout.py --write     write tables, sentences and pictures of the pages from results alone

tests/test_turnout.py compares the pages and the rates with what this file makes of results.
"""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from io import BytesIO
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from askew.algorithms import algorithms
from askew.report.picture import canvas, style
from askew.report.significance import BETTER, WORSE, PairedComparison, judge_pairs
from askew.report.statistics import MIN_SEEDS, t_interval
from askew.reproduction.papers import find_experiment
from askew.reproduction.results import metrics_by_run, read_results_file, results_file
from askew.reproduction.run_metrics import parse_curve

ROOT = Path(__file__).parents[1]
RESULTS, PICTURES = ROOT / "results", ROOT / "docs/img"
PAGES = (ROOT / "docs/turnout.md", ROOT / "docs/turnout-tables.md")
STUDY, SEARCH, FILE = "ours/turnout", "ours/turnout-rates", ROOT / "papers/ours/turnout.toml"
BASE = "FedAvg"
START = 0.1  # accuracy before the first round: ten classes
PLACES = 5  # at which the accuracy is read in the last fifth of a limit
HOUR = 3600.0  # seconds
SPAN = 15.0  # points from FedAvg at which the colours of the picture end
# With everybody in every round these are FedAvg: what each client sends is averaged with equal weights.
FULL_IS_FEDAVG = ("FedVARP", "MIFA", "FedAU")
WAYS = {"rounds": "equal rounds", "bytes": "equal bytes", "seconds": "equal virtual time"}
ASYNCHRONOUS, ASYNCHRONOUS_METHODS = "asynchronous", ("FedBuff", "FedAsync")
SIZED = "uniform, size"  # FedAvg alone: uniform turnout at the deadline's speeds, with which the deadline is compared
METHODS = (
    *("FedAvg", "SCAFFOLD", "FedDyn", "FedCM", "FedDPC", "FedVARP", "MIFA", "FedAU", "FedAWE", "FOCUS"),
    *ASYNCHRONOUS_METHODS,
)
PARTIAL = ("uniform", "uneven", "Markov", "cyclic", "day and night", "deadline")
TITLES = {"digits": "Digits", "cifar10": "CIFAR-10"}
EDGE = " †"  # after a method whose learning rate is the smallest or the largest that was tried
# FedAvg in one turnout and way: with which other turnout it is compared, and in which words.
TENTH = "compared with waiting for a tenth"
WAITS = {
    ("full", "bytes"): ("uniform", f"**Everybody in every round**, FedAvg after equal bytes, {TENTH}"),
    ("full", "seconds"): ("uniform", f"**Everybody in every round**, FedAvg after equal virtual time, {TENTH}"),
    ("deadline", "seconds"): (SIZED, f"**A deadline**, FedAvg after equal virtual time, {TENTH} at the same speeds"),
    (ASYNCHRONOUS, "seconds"): ("uniform", f"**Asynchronous steps**, FedAvg after equal virtual time, {TENTH}"),
    (ASYNCHRONOUS, "rounds"): ("uniform", f"**Asynchronous steps**, FedAvg after equal rounds, {TENTH}"),
}
# What a case says of a method beside its rate. FedAsync's server steps with every answer: it has as many answers.
EXTRA = {
    ("digits", "FedAsync"): ("rounds = 500", "time = { buffer = 1 }", "evaluation = { every = 50 }"),
    ("cifar10", "FedAsync"): ("rounds = 1000", "time = { buffer = 1 }", "evaluation = { every = 50 }"),
}


class RunCurve(NamedTuple):
    """One run: accuracy, bytes and virtual seconds at its stored rounds, each as rounds and values."""

    accuracy: tuple[list[int], list[float]]
    bytes: tuple[list[int], list[float]]
    clock: tuple[list[int], list[float]]

    def spent(self, way: str) -> np.ndarray:
        """Rounds, bytes or seconds, as a share of the run's steps for rounds, where the accuracy is stored."""
        rounds = self.accuracy[0]
        if way == "rounds":
            return np.array(rounds) / rounds[-1]
        return np.interp(rounds, *(self.bytes if way == "bytes" else self.clock))

    def at(self, way: str, limit: float) -> float:
        """The mean accuracy over the last fifth of a limit, or of the run if it ends before.

        Between stored rounds it is on a straight line. That of one round moves up and down with who took part in it.
        """
        end = min(limit, self.total(way))
        places = np.linspace(0.8 * end, end, PLACES)
        return float(np.interp(places, [0.0, *self.spent(way)], [START, *self.accuracy[1]]).mean())

    def total(self, way: str) -> float:
        """What the whole run spent."""
        return float(self.spent(way)[-1])


Runs = dict[str, dict[str, dict[int, RunCurve]]]  # by case, method and seed


def read_study(folder: Path = RESULTS) -> Runs:
    """The stored runs of the study."""
    rows = read_results_file(results_file(folder, STUDY, "full"))
    metrics, runs = metrics_by_run(rows), Runs()
    for row in rows:
        if row.metric == "last_accuracy":
            own = metrics[row.run]
            run = RunCurve(*(parse_curve(own[name]) for name in ("accuracy", "bytes", "clock")))
            seeds = runs.setdefault(row.case, {}).setdefault(row.method, {})
            if row.seed in seeds:  # of another version of the study: which one counts is not for this page to guess
                raise SystemExit(f"{row.case}, {row.method}, seed {row.seed} is stored twice; remove one of the runs.")
            seeds[row.seed] = run
    return runs


# rates ----------------------------------------------------------------------------------------------------------------


@cache
def measured_rates(folder: Path = RESULTS) -> dict[tuple[str, str], dict[float, float]]:
    """Of each block (dataset and skew) and method: the mean validation accuracy by learning rate."""
    path = results_file(folder, SEARCH, "full")
    found: dict[tuple[str, str], dict[float, list[float]]] = {}
    for row in read_results_file(path) if path.exists() else ():
        if row.metric == "mean_accuracy_validation":
            rate = float(row.hyper.removeprefix("local.lr="))
            key = row.case.partition(" ")[0], row.method
            found.setdefault(key, {}).setdefault(rate, []).append(float(row.value))
    return {key: {rate: fmean(values) for rate, values in sorted(rates.items())} for key, rates in found.items()}


@cache
def chosen_rates(folder: Path = RESULTS) -> dict[tuple[str, str], float]:
    """The learning rate of each block and method: the best on held-out samples, of equal ones the smallest."""
    return {key: max(rates, key=lambda rate: rates[rate]) for key, rates in measured_rates(folder).items()}


def write_rates(text: str, rates: Mapping[tuple[str, str], float]) -> str:
    """The study's file with these rates, a line in each case."""
    parts = re.split(r"(?m)^(?=\[\[case\]\]|\[\[method\]\])", text)
    return "".join(with_rates(part, rates) if part.startswith("[[case]]") else part for part in parts)


def with_rates(case: str, rates: Mapping[tuple[str, str], float]) -> str:
    """One [[case]] with the rates of its block."""
    name = re.search(r'name = "(.*)"', case)
    assert name
    block, _, turnout = name[1].partition(" ")
    lines = [line for line in case.rstrip("\n").splitlines() if not line.startswith("methods = ")]
    entries = [entry for m in METHODS if (entry := method_entry(block, turnout, m, rates.get((block, m))))]
    return "\n".join([*lines, f"methods = {{ {', '.join(entries)} }}"] if entries else lines) + "\n\n"


def case_methods(case: str) -> list[str]:
    """The methods that a case of the study has."""
    return [m.name for m in find_experiment(STUDY).methods if not m.cases or case in m.cases]


def method_entry(block: str, turnout: str, method: str, rate: float | None) -> str:
    """What a case says of a method; nothing of one that it does not have. A rate may not be known yet."""
    if method not in case_methods(f"{block} {turnout}"):
        return ""
    own = [] if rate is None else [f"local = {{ lr = {rate!r} }}"]
    tables = [*own, *EXTRA.get((block.partition("-")[0], method), ())]
    return f"{method} = {{ {', '.join(tables)} }}" if tables else ""


# statistics -----------------------------------------------------------------------------------------------------------


Turnouts = Mapping[str, Mapping[str, Mapping[int, RunCurve]]]  # by turnout, method and seed


class Block(NamedTuple):
    """One dataset with one skew: the accuracy of each turnout and method by seed, in percent, in each of the ways."""

    name: str  # "digits-0.1"
    runs: Turnouts
    limits: dict[str, float]  # of bytes and seconds, and 1: all rounds
    values: dict[str, dict[str, dict[str, dict[int, float]]]]  # by way, turnout, method and seed

    @property
    def data(self) -> str:
        return TITLES[self.name.partition("-")[0]]

    @property
    def skew(self) -> str:
        return f"α = {float(self.name.partition('-')[2]):.1f}"

    @property
    def title(self) -> str:
        return f"{self.data}, {self.skew}"

    @property
    def turnouts(self) -> list[str]:
        return list(self.values["rounds"])

    def methods(self, turnout: str) -> list[str]:
        return list(self.values["rounds"].get(turnout, {}))

    def mean(self, way: str, turnout: str, method: str) -> float | None:
        """The mean over the seeds; that of FedAvg for a method that is FedAvg there; None without runs in this way."""
        turnouts = self.values[way].get(turnout, {})
        own = turnouts.get(method)
        if own is None and turnout == "full" and method in FULL_IS_FEDAVG:
            own = turnouts.get(BASE)
        return fmean(own.values()) if own else None

    def pairs(self, way: str, turnout: str, method: str, other: str) -> PairedComparison:
        """A method less another one, seed by seed."""
        one, two = (self.values[way][turnout][name] for name in (method, other))
        return paired(method, other, turnout, way, one, two)

    def against(self, way: str, turnout: str, reference: str) -> dict[str, PairedComparison]:
        """Every other method of a turnout less a reference; Holm's correction is over these methods."""
        others = [name for name in self.methods(turnout) if name != reference]
        tests = judge_pairs([self.pairs(way, turnout, name, reference) for name in others])
        return dict(zip(others, tests, strict=True))

    def best(self, way: str, turnout: str) -> str:
        """The method with the highest mean."""
        return max(self.methods(turnout), key=lambda m: self.mean(way, turnout, m) or 0.0)

    def as_good(self, way: str, turnout: str) -> list[str]:
        """Methods that the seeds do not tell from the best one, the best first."""
        best = self.best(way, turnout)
        tests = self.against(way, turnout, best)
        near = [name for name, test in tests.items() if test.verdict != WORSE]
        return [best, *sorted(near, key=lambda m: -(self.mean(way, turnout, m) or 0.0))]


def paired(
    method: str, other: str, turnout: str, way: str, one: Mapping[int, float], two: Mapping[int, float]
) -> PairedComparison:
    """Differences at the seeds that both have; nothing is tested yet."""
    seeds = sorted(one.keys() & two.keys())
    return PairedComparison(method, other, turnout, way, seeds, [one[s] - two[s] for s in seeds], {}, [])


def study_blocks(runs: Runs) -> list[Block]:
    """The blocks of the study, of what is stored of at least three seeds: fewer decide nothing."""
    blocks: dict[str, dict[str, dict[str, dict[int, RunCurve]]]] = {}
    for case in find_experiment(STUDY).cases:
        name, _, turnout = case.name.partition(" ")
        own = runs.get(case.name, {})
        if its := {m: own[m] for m in METHODS if len(own.get(m, ())) >= MIN_SEEDS}:
            blocks.setdefault(name, {})[turnout] = its
    return [make_block(name, turnouts) for name, turnouts in blocks.items()]


def make_block(name: str, runs: Turnouts) -> Block:
    """A block of runs: its limits are what the run that spent least has spent, to two digits.

    Asynchronous runs have no share in equal virtual time: they end hours before the others.
    """
    shown = {way: [t for t in runs if t != SIZED and (way, t) != ("seconds", ASYNCHRONOUS)] for way in WAYS}
    asked = [run for t in shown["seconds"] for seeds in runs[t].values() for run in seeds.values()]
    limits = {way: round_down(min(run.total(way) for run in asked)) for way in WAYS}
    values = {
        way: {t: {m: accuracies(seeds, way, limits[way]) for m, seeds in runs[t].items()} for t in shown[way]}
        for way in WAYS
    }
    return Block(name, runs, limits, values)


def accuracies(seeds: Mapping[int, RunCurve], way: str, limit: float) -> dict[int, float]:
    """Accuracies of runs in percent."""
    return {seed: 100 * run.at(way, limit) for seed, run in sorted(seeds.items())}


def round_down(value: float) -> float:
    """A number cut off after its second digit."""
    unit = 10.0 ** (np.floor(np.log10(value)) - 1)
    return float(np.floor(value / unit) * unit)


# tables ---------------------------------------------------------------------------------------------------------------


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]], numbers: bool = True) -> str:
    """A Markdown table, its columns after the first flush right if they are numbers."""
    lines = [heads, ["---", *["---:" if numbers else "---"] * (len(heads) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def accuracy_table(block: Block, way: str) -> str:
    """Methods by turnouts: mean accuracies, the highest of a turnout in bold; marks tell the tests against FedAvg."""
    shown = [turnout for turnout in block.turnouts if turnout in block.values[way]]
    tests = {turnout: block.against(way, turnout, BASE) for turnout in shown}
    methods = [m for m in METHODS if any(m in block.methods(turnout) for turnout in shown)]
    rows = [[marked(m, block), *(accuracy_cell(block, way, t, m, tests[t]) for t in shown)] for m in methods]
    return markdown_table(["method", *shown], rows)


def accuracy_cell(block: Block, way: str, turnout: str, method: str, tests: Mapping[str, PairedComparison]) -> str:
    """One accuracy in percent."""
    if method not in block.methods(turnout):
        return "= FedAvg" if turnout == "full" and method in FULL_IS_FEDAVG else "–"
    test = tests.get(method)
    mark = {BETTER: " ↑", WORSE: " ↓"}.get(test.verdict, "") if test else ""
    text = f"{block.mean(way, turnout, method):.1f}"
    return (f"**{text}**" if method == block.best(way, turnout) else text) + mark


def choice_table(block: Block) -> str:
    """By turnout and way: the method with the highest mean, and those that the seeds do not tell from it."""
    rows = []
    for turnout in block.turnouts:
        cells = []
        for way in WAYS:
            best, *near = block.as_good(way, turnout) if turnout in block.values[way] else ("",)
            others = f" ({', '.join(marked(m, block) for m in near)})" if near else ""
            cells.append(f"**{marked(best, block)}**{others}" if best else "–")
        rows.append([turnout, *cells])
    return markdown_table(["turnout", *WAYS.values()], rows, numbers=False)


def spent_table(blocks: Sequence[Block]) -> str:
    """What 100 rounds of FedAvg take by turnout: hours, from the fastest to the slowest seed, and bytes."""
    rows = []
    for turnout in blocks[0].runs:
        cells = []
        for block in blocks:
            low, high = hours(block, turnout)
            sent = fmean(run.total("bytes") for run in block.runs[turnout][BASE].values())
            span = f"{low:.0f}" if f"{low:.0f}" == f"{high:.0f}" else f"{low:.0f} to {high:.0f}"
            cells.append(f"{span} h, {sent / 1e6:.{1 if sent < 1e8 else 0}f} MB")
        rows.append([turnout, *cells])
    return markdown_table(["turnout", *(block.title for block in blocks)], rows)


def hours(block: Block, *turnouts: str) -> tuple[float, float]:
    """Virtual hours of 100 rounds of FedAvg, at the fastest and the slowest seed of some turnouts."""
    every = [run.total("seconds") / HOUR for turnout in turnouts for run in block.runs[turnout][BASE].values()]
    return min(every), max(every)


def spent_sentence(blocks: Sequence[Block]) -> str:
    """What 100 rounds of FedAvg take, over all blocks."""

    def span(*turnouts: str) -> str:
        each = [hours(block, *turnouts) for block in blocks]
        return f"{min(low for low, _ in each):.0f} to {max(high for _, high in each):.0f}"

    waiting = [turnout for turnout in PARTIAL if turnout != "deadline"]
    sent = [
        fmean(run.total("bytes") for run in b.runs[t][BASE].values()) for b in blocks for t in ("deadline", "uniform")
    ]
    more = sorted(100 * (late / plain - 1) for late, plain in zip(sent[::2], sent[1::2], strict=True))
    return (
        f"100 rounds of FedAvg take {span(*waiting)} hours, with everybody {span('full')}, with the deadline "
        f"{span('deadline')} and asynchronously {span(ASYNCHRONOUS)}. The rounds of partial turnouts send about as "
        f"many bytes; those with the deadline send {more[0]:.0f} to {more[-1]:.0f}% more, as more clients are asked."
    )


def at_edge(method: str, block: str) -> bool:
    """Is the chosen rate the smallest or the largest that was tried?"""
    tried = measured_rates().get((block, method))
    return bool(tried) and chosen_rates()[block, method] in (min(tried), max(tried))


def marked(method: str, *blocks: Block) -> str:
    """A method's name, marked if its rate is at the edge of those that were tried in one of the blocks."""
    return method + EDGE * any(at_edge(method, block.name) for block in blocks)


def rates_table() -> str:
    """The chosen learning rates by method and block; † is the smallest or largest that was tried."""
    chosen = chosen_rates()
    blocks = list(dict.fromkeys(block for block, _ in chosen))
    cell = lambda m, b: f"{chosen[b, m]:g}" + EDGE * at_edge(m, b) if (b, m) in chosen else "–"
    return markdown_table(["method", *blocks], [[m, *(cell(m, b) for b in blocks)] for m in METHODS])


# picture --------------------------------------------------------------------------------------------------------------


def picture(blocks: Sequence[Block]) -> Any:
    """Heat maps of differences from FedAvg in points, methods by turnouts: a row for each way, a column each skew."""
    methods = {
        way: [m for m in METHODS if any(m in ms for b in blocks for ms in b.values[way].values())] for way in WAYS
    }
    with style():
        figure = canvas(3.6 * len(blocks), 9.0)
        ratios = [len(each) for each in methods.values()]
        grid: Any = figure.subplots(len(WAYS), len(blocks), squeeze=False, sharey="row", height_ratios=ratios)
        for axes_row, way in zip(grid, WAYS, strict=True):
            for axes, block in zip(axes_row, blocks, strict=True):
                draw_differences(axes, block, way, methods[way])
                axes.set_title(f"{block.title}: {WAYS[way]}", fontsize=9)
            axes_row[0].set_yticks(range(len(methods[way])), [marked(m, *blocks) for m in methods[way]], fontsize=8)
        for axes in (*grid[0], *grid[-1]):
            at_top = axes in grid[0]
            axes.set_xticks(range(len(blocks[0].turnouts)), blocks[0].turnouts, fontsize=8)
            axes.tick_params(labelbottom=not at_top, labeltop=at_top)
            for label in axes.get_xticklabels():
                label.set(rotation=40, ha="left" if at_top else "right", rotation_mode="anchor")
    return figure


def whole_points(value: float) -> str:
    """A difference of accuracies without digits after the point."""
    return f"{value:+.0f}".replace("-", "−") if abs(value) >= 0.5 else "0"


def draw_differences(axes: Any, block: Block, way: str, methods: Sequence[str]) -> None:
    """One heat map; the first row has FedAvg's own accuracy."""
    table = np.full((len(methods), len(block.turnouts)), np.nan)
    for column, turnout in enumerate(block.turnouts):
        base = block.mean(way, turnout, BASE)
        for row, method in enumerate(methods):
            mean = block.mean(way, turnout, method)
            if mean is not None and base is not None:
                table[row, column] = mean - base
                text = f"{mean:.0f}" if method == BASE else whole_points(mean - base)
                dark = method != BASE and abs(mean - base) > 0.6 * SPAN
                axes.text(column, row, text, ha="center", va="center", fontsize=8, color="white" if dark else "#333333")
    axes.imshow(table, cmap="RdBu", vmin=-SPAN, vmax=SPAN, aspect="auto")
    axes.grid(visible=False)
    axes.set_xticks([])
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)


# advice ---------------------------------------------------------------------------------------------------------------

Tests = Mapping[str, Mapping[str, PairedComparison]]  # methods against FedAvg, by way and method


def advice_table(blocks: Sequence[Block], waited: Waits) -> str:
    """By case and skew, which method; last what FedAvg gains in time where the server does not wait for the slowest."""
    groups: dict[str, Callable[[Block], Tests]] = {
        f"the server waits ({', '.join(PARTIAL)})": lambda b: {way: overall(b, way) for way in WAYS},
        "everybody in every round": lambda b: {way: b.against(way, "full", BASE) for way in WAYS},
        "asynchronous steps": lambda b: {way: b.against(way, ASYNCHRONOUS, BASE) for way in ("rounds", "bytes")},
    }
    skews = list(dict.fromkeys(block.skew for block in blocks))

    def row(words: str, text_of: Callable[[Block], str]) -> list[str]:
        texts = [{b.data: text_of(b) for b in blocks if b.skew == skew} for skew in skews]
        return [words, *("<br>".join(f"{data}: {text}" for data, text in its.items()) for its in texts)]

    rows = [row(words, lambda b, tests_of=tests_of: advice(b, tests_of(b))) for words, tests_of in groups.items()]
    rows.append(row("time counts most: what FedAvg gains over waiting for a tenth", lambda b: time_gains(b, waited)))
    names = ("strongly skewed data", "mildly skewed data")
    return markdown_table(
        ["your case", *(f"{name} ({skew})" for name, skew in zip(names, skews, strict=True))], rows, numbers=False
    )


def advice(block: Block, tests: Tests) -> str:
    """The method that is ahead of FedAvg in most ways, of several the one with the largest mean lead; and its leads."""
    methods = list(next(iter(tests.values())))
    wins = {m: [way for way in tests if tests[way][m].verdict == BETTER] for m in methods}
    leads = {m: sorted(tests[way][m].mean or 0.0 for way in tests) for m in methods}
    first = max(methods, key=lambda m: (len(wins[m]), fmean(leads[m])))
    name = f"**{marked(first, block)}**" if 2 * len(wins[first]) >= len(tests) else marked(first, block)
    text = f"{name} {points(leads[first][0])} to {points(leads[first][-1])}"
    better = better_elsewhere(first, tests)
    parts = [f"{marked(m, block)} after {WAYS[way]}" for way, m in better.items()]
    if unclear := [WAYS[way] for way in tests if way not in (*better, *wins[first])]:
        parts.append("undecided" if len(unclear) == len(tests) else f"undecided after {' and '.join(unclear)}")
    if others := [m for m in methods if m != first and len(wins[m]) == len(tests)]:
        parts.append(f"then {', '.join(marked(m, block) for m in sorted(others, key=lambda m: -fmean(leads[m])))}")
    return "; ".join([text, *parts])


def better_elsewhere(first: str, tests: Tests) -> dict[str, str]:
    """Ways in which another method has the highest mean, and is told from FedAvg and from this one."""
    found, pairs = dict[str, str](), []
    for way, its in tests.items():
        best = max(its, key=lambda m: its[m].mean or 0.0)
        if best != first and its[best].verdict == BETTER:
            one, two = (dict(zip(its[m].seeds, its[m].differences, strict=True)) for m in (best, first))
            found[way] = best
            pairs.append(paired(best, first, "", way, one, two))
    return {way: m for (way, m), test in zip(found.items(), judge_pairs(pairs), strict=True) if test.verdict == BETTER}


def time_gains(block: Block, waited: Waits) -> str:
    """What FedAvg gains with a deadline and asynchronously, after equal virtual time."""
    texts = []
    for turnout, words in (("deadline", "a deadline"), (ASYNCHRONOUS, "asynchronous steps")):
        if (block.name, turnout, "seconds") in waited:
            test, _ = waited[block.name, turnout, "seconds"]
            texts.append(f"{words} {points(test.mean or 0.0)}" + " (undecided)" * (test.verdict not in (BETTER, WORSE)))
    return ", ".join(texts)


# findings -------------------------------------------------------------------------------------------------------------


Waits = dict[tuple[str, str, str], tuple[PairedComparison, float]]  # by block, turnout and way


def waits(blocks: Sequence[Block]) -> Waits:
    """FedAvg in one turnout less FedAvg in another one, and where: by the end of the run that spent least of both.

    Holm's correction is over all of them.
    """
    found: Waits = {}
    for (turnout, way), (other, _) in WAITS.items():
        for block in blocks:
            if {turnout, other} <= {*block.runs}:
                both = [block.runs[name][BASE] for name in (turnout, other)]
                limit = min(block.limits[way], *(run.total(way) for seeds in both for run in seeds.values()))
                one, two = (accuracies(seeds, way, limit) for seeds in both)
                found[block.name, turnout, way] = paired(BASE, BASE, turnout, way, one, two), limit
    judged = judge_pairs([pairs for pairs, _ in found.values()])
    return {key: (test, limit) for (key, (_, limit)), test in zip(found.items(), judged, strict=True)}


def findings(blocks: Sequence[Block], waited: Waits) -> list[str]:
    """What the tables of one dataset say, each sentence from the numbers; those without runs are left out."""
    found = [
        *leads(blocks),
        *by_turnout(blocks),
        *made_for_turnout(blocks),
        *memories(blocks),
        *messages(blocks),
    ]
    return [*found, *costs_of_turnout(blocks), *waiting(blocks, waited), *asynchronous_methods(blocks)]


def overall(block: Block, way: str) -> dict[str, PairedComparison]:
    """Every method less FedAvg, at each seed the mean over the partial turnouts; Holm's correction is over methods."""
    turnouts = [turnout for turnout in PARTIAL if turnout in block.turnouts]
    methods = [m for m in METHODS if m != BASE and all(m in block.methods(t) for t in turnouts)]
    pairs = []
    for method in methods:
        by_turnout = [block.pairs(way, turnout, method, BASE) for turnout in turnouts]
        seeds = sorted(set.intersection(*({*pair.seeds} for pair in by_turnout)))
        means = [fmean(pair.differences[pair.seeds.index(s)] for pair in by_turnout) for s in seeds]
        pairs.append(PairedComparison(method, BASE, block.name, way, seeds, means, {}, []))
    return dict(zip(methods, judge_pairs(pairs), strict=True))


def overall_table(block: Block) -> str:
    """Methods by ways: mean differences from FedAvg over the partial turnouts, with intervals."""
    tests = {way: overall(block, way) for way in WAYS}
    methods = [m for m in METHODS if m in tests["rounds"]]
    rows = [[marked(m, block), *(interval(its[m]) for its in tests.values())] for m in methods]
    return markdown_table(["method", *WAYS.values()], rows)


def leads(blocks: Sequence[Block]) -> list[str]:
    """Which method has the largest lead over FedAvg on average, for each way."""
    texts = []
    for way, words in WAYS.items():
        firsts = []
        for block in blocks:
            tests = overall(block, way)
            first = max(tests, key=lambda m: tests[m].mean or 0.0)
            lead = tests[first].mean or 0.0
            firsts.append(f"{block.skew} {f'{marked(first, block)} {interval(tests[first])}' if lead > 0 else 'none'}")
        texts.append(f"{words}: {', '.join(firsts)}")
    return [f"**The largest lead over FedAvg**, on average over the six partial turnouts, after {'; '.join(texts)}."]


def by_turnout(blocks: Sequence[Block]) -> list[str]:
    """The two methods that are nearest to the best of their column in each turnout, on average, and FedAvg."""
    texts = []
    for turnout in dict.fromkeys(t for block in blocks for t in block.turnouts):
        its = [block for block in blocks if turnout in block.turnouts]
        methods = [m for m in METHODS if all(m in block.methods(turnout) for block in its)]
        ways = [way for way in WAYS if turnout in its[0].values[way]]
        behind = {m: fmean(behind_best(b, way, turnout, m) for b in its for way in ways) for m in methods}
        near = sorted(methods, key=lambda m: behind[m])[:2]
        shown = list(dict.fromkeys([*near, BASE]))
        texts.append(f"{turnout}: {', '.join(f'{marked(m, *its)} {behind[m]:.1f}' for m in shown)}")
    return [
        "**By turnout**, how many points a method is behind the best of its column, on average over skews and equal "
        f"rounds, bytes and time; the two nearest, and FedAvg: {'; '.join(texts)}."
    ]


def behind_best(block: Block, way: str, turnout: str, method: str) -> float:
    """How many points a method is behind the one with the highest mean."""
    best = block.mean(way, turnout, block.best(way, turnout))
    return (best or 0.0) - (block.mean(way, turnout, method) or 0.0)


def against_fedavg(blocks: Sequence[Block], methods: Sequence[str], way: str) -> str:
    """Methods less FedAvg on average over the partial turnouts, in words."""
    tests = [(block, overall(block, way)) for block in blocks]
    return "; ".join(
        f"{marked(m, *blocks)} {', '.join(f'{interval(its[m])} with {block.skew}' for block, its in tests if m in its)}"
        for m in methods
    )


def made_for_turnout(blocks: Sequence[Block]) -> list[str]:
    """FedAU, FedAWE and FOCUS against FedAvg."""
    uneven = [block for block in blocks if "FedAU" in block.methods("uneven")]
    tests = [f"{interval(block.against('rounds', 'uneven', BASE)['FedAU'])} with {block.skew}" for block in uneven]
    return [
        "**Methods made for unknown participation** against FedAvg, on average over the six partial turnouts, after "
        f"equal rounds: {against_fedavg(blocks, ('FedAU', 'FedAWE', 'FOCUS'), 'rounds')}. Under uneven chances alone: "
        f"FedAU {', '.join(tests)}. What they promise is the right point to end in; these are the first 100 rounds."
    ]


def memories(blocks: Sequence[Block]) -> list[str]:
    """FedVARP and MIFA against FedAvg."""
    text = against_fedavg(blocks, ("FedVARP", "MIFA"), "rounds")
    return [f"**A memory of absent clients** against FedAvg, on the same average, after equal rounds: {text}."]


def messages(blocks: Sequence[Block]) -> list[str]:
    """SCAFFOLD after equal rounds and after equal bytes."""
    rounds, sent = (against_fedavg(blocks, ("SCAFFOLD",), way) for way in ("rounds", "bytes"))
    return [f"**Twice the bytes**, on the same average: after equal rounds {rounds}; after equal bytes {sent}."]


def costs_of_turnout(blocks: Sequence[Block]) -> list[str]:
    """How FedAvg fares in each turnout, compared with uniform turnout after equal rounds."""
    texts = []
    for block in blocks:
        others = [t for t in PARTIAL if t != "uniform" and t in block.turnouts]
        fedavg = {turnout: block.values["rounds"][turnout][BASE] for turnout in ("uniform", *others)}
        pairs = [paired(BASE, BASE, t, "rounds", fedavg[t], fedavg["uniform"]) for t in others]
        tests = judge_pairs(pairs)
        texts.append(
            f"{block.skew}: {', '.join(f'{t} {interval(test)}' for t, test in zip(others, tests, strict=True))}"
        )
    return [
        "**What a turnout costs FedAvg** after equal rounds, compared with uniform turnout: " + "; ".join(texts) + "."
    ]


def waiting(blocks: Sequence[Block], waited: Waits) -> list[str]:
    """FedAvg with everybody, with a deadline and asynchronously, compared with waiting for a tenth."""
    lines = []
    for (turnout, way), (other, words) in WAITS.items():
        texts = []
        for block in blocks:
            if (block.name, turnout, way) in waited:
                test, limit = waited[block.name, turnout, way]
                end = f", {limit / HOUR:.3g} h" if way == "seconds" else ""
                few = f" ({stored_by(block, other, limit)})" if turnout == ASYNCHRONOUS and way == "seconds" else ""
                texts.append(f"{block.skew}{end}{few}: {interval(test)}")
        lines.append(f"{words}: {'; '.join(texts)}.")
    return lines


def stored_by(block: Block, turnout: str, seconds: float) -> str:
    """How many accuracies of FedAvg are stored up to a time, at the seeds that have fewest and most."""
    counts = [int((run.spent("seconds") <= seconds).sum()) for run in block.runs[turnout][BASE].values()]
    span = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} or {max(counts)}"
    return f"{span} {'accuracy' if max(counts) == 1 else 'accuracies'} of {turnout} turnout stored by then"


def asynchronous_methods(blocks: Sequence[Block]) -> list[str]:
    """FedBuff and FedAsync against FedAvg, all asynchronous."""
    texts = []
    for block in blocks:
        tests = block.against("rounds", ASYNCHRONOUS, BASE)
        texts.append(f"{block.skew}: {', '.join(f'{m} {interval(tests[m])}' for m in ASYNCHRONOUS_METHODS)}")
    return [f"**FedBuff and FedAsync** against FedAvg, all asynchronous, after as many answers: {'; '.join(texts)}."]


def points(value: float) -> str:
    """A difference of accuracies."""
    return f"{value:+.1f}".replace("-", "−")


def interval(test: PairedComparison) -> str:
    """A mean difference in points with its interval, and whether the test decides it."""
    assert test.mean is not None
    if test.t_interval is None:
        return f"{points(test.mean)} (too few seeds)"
    low, high = test.t_interval
    undecided = "" if test.verdict in (BETTER, WORSE) else ", undecided"
    return f"{points(test.mean)} ({points(low)} to {points(high)}{undecided})"


# page -----------------------------------------------------------------------------------------------------------------


def sections(blocks: Sequence[Block]) -> dict[str, str]:
    """What the pages have between their marks, by their names."""
    by_data = {data: [b for b in blocks if b.name.startswith(data)] for data in TITLES}
    waited = waits(blocks)
    told = [
        [f"**{TITLES[data]}**\n", *(f"- {text}" for text in findings(its, waited)), ""] for data, its in by_data.items()
    ]
    drawn = [f"img/turnout-{data}.png" for data in TITLES]
    pictures = [
        f"[![{title}: accuracy less that of FedAvg by method and turnout]({path})]({path})\n"
        for title, path in zip(TITLES.values(), drawn, strict=True)
    ]
    return {
        "advice": advice_table(blocks, waited) + "\n",
        "pictures": "\n".join(pictures),
        "spent": textwrap.fill(spent_sentence(blocks), 120) + "\n",
        "findings": "\n".join(line for lines in told for line in lines),
        "overall": "\n".join(f"**{block.title}**\n\n{overall_table(block)}\n" for block in blocks),
        "choice": "\n".join(f"**{block.title}**\n\n{choice_table(block)}\n" for block in blocks),
        "tables": "\n".join([*(line for block in blocks for line in block_section(block)), refusals()]),
        "hours": spent_table(blocks) + "\n",
        "last": "\n".join(last_round(blocks)) + "\n",
        "rates": rates_table() + "\n",
    }


def page(text: str, sections: Mapping[str, str]) -> str:
    """The text of a page with its sections, by name, written anew."""
    for name, section in sections.items():
        begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->\n"
        if begin in text:
            before, _, rest = text.partition(begin)
            text = f"{before}{begin}\n{section}\n{end}{rest.partition(end)[2]}"
    return text


def refusals() -> str:
    """Which methods have no asynchronous runs, and why: in them answers start from older models."""
    names = {m.name: str(m.set["algorithm"]["name"]) for m in find_experiment(STUDY).methods}
    reasons = [f"{method} ({algorithms[name].stale})" for method, name in names.items() if algorithms[name].stale]
    return f"Without asynchronous runs, as they refuse stale answers: {'; '.join(reasons)}.\n" if reasons else ""


def block_section(block: Block) -> list[str]:
    """The tables of one block."""
    counts = {len(seeds) for methods in block.values["rounds"].values() for seeds in methods.values()}
    seeds = f"{min(counts)} seeds" if len(counts) == 1 else f"{min(counts)} to {max(counts)} seeds"
    spent = {
        "rounds": "100 rounds",
        "bytes": f"{block.limits['bytes'] / 1e6:.3g} MB",
        "seconds": f"{block.limits['seconds'] / HOUR:.3g} hours",
    }
    lines = [f"### {block.title}\n"]
    for way in WAYS:
        lines += [f"After {spent[way]} ({seeds}):\n", accuracy_table(block, way), ""]
    return lines


def last_round(blocks: Sequence[Block]) -> list[str]:
    """Leads over FedAvg in the accuracy of the last round, on average over the partial turnouts, with 95% intervals."""
    lines = []
    for block in blocks:
        cells, texts = [block.runs[turnout] for turnout in PARTIAL], []
        for method in cells[0]:
            seeds = sorted(set.intersection(*({*cell[method]} & {*cell[BASE]} for cell in cells)))
            last = lambda cell, name, seed: 100 * cell[name][seed].accuracy[1][-1]
            each = [fmean(last(cell, method, seed) - last(cell, BASE, seed) for cell in cells) for seed in seeds]
            if method != BASE:
                low, high = t_interval(each, 0.95)
                texts.append(f"{marked(method, block)} {points(fmean(each))} ({points(low)} to {points(high)})")
        lines.append(f"- {block.title}: {', '.join(texts)}.")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", action="store_true", help="write papers/ours/turnout.toml with the chosen rates")
    parser.add_argument("--write", action="store_true", help="write the pages and the pictures")
    options = parser.parse_args()
    if options.rates:
        FILE.write_text(write_rates(FILE.read_text(encoding="utf-8"), chosen_rates()), encoding="utf-8")
    if options.write:
        blocks = study_blocks(read_study())
        written = sections(blocks)
        for path in PAGES:
            path.write_text(page(path.read_text(encoding="utf-8"), written), encoding="utf-8")
        for data in TITLES:
            drawn = BytesIO()
            picture([block for block in blocks if block.name.startswith(data)]).savefig(drawn, dpi=200)
            few = Image.open(drawn).convert("RGB").quantize(200)  # colours: half of the bytes
            few.save(PICTURES / f"turnout-{data}.png", optimize=True)


if __name__ == "__main__":
    main()
