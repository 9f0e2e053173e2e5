"""The study of turnouts, ours/turnout: its learning rates, the numbers of docs/turnout.md and its pictures.

    python benchmarks/turnout.py --rates     write the rates that ours/turnout-rates chose into papers/ours/turnout.toml
    python benchmarks/turnout.py --write     write tables, sentences and pictures of docs/turnout.md from results alone

tests/test_turnout.py compares the page and the rates with what this file makes of results.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
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
from askew.reproduction.results import metrics_by_run, parse_curve, read_results_file, results_file

ROOT = Path(__file__).parents[1]
RESULTS, PAGE, PICTURES = ROOT / "results", ROOT / "docs/turnout.md", ROOT / "docs/img"
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
METHODS = (
    *("FedAvg", "SCAFFOLD", "FedDyn", "FedCM", "FedDPC", "FedVARP", "MIFA", "FedAU", "FedAWE", "FOCUS"),
    *ASYNCHRONOUS_METHODS,
)
PARTIAL = ("uniform", "uneven", "Markov", "cyclic", "day and night", "deadline")
TITLES = {"digits": "Digits", "cifar10": "CIFAR-10"}
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


class Block(NamedTuple):
    """One dataset with one skew: the accuracy of each turnout and method by seed, in percent, in each of the ways."""

    name: str  # "digits-0.1"
    limits: dict[str, float]  # of bytes and seconds, and 1: all rounds
    values: dict[str, dict[str, dict[str, dict[int, float]]]]  # by way, turnout, method and seed

    @property
    def title(self) -> str:
        data, _, alpha = self.name.partition("-")
        return f"{TITLES[data]}, Dirichlet {float(alpha):.1f}"

    @property
    def turnouts(self) -> list[str]:
        return list(self.values["rounds"])

    def methods(self, turnout: str) -> list[str]:
        return list(self.values["rounds"].get(turnout, {}))

    def mean(self, way: str, turnout: str, method: str) -> float | None:
        """The mean over the seeds; that of FedAvg for a method that is FedAvg there."""
        own = self.values[way][turnout].get(method)
        if own is None and turnout == "full" and method in FULL_IS_FEDAVG:
            own = self.values[way][turnout].get(BASE)
        return fmean(own.values()) if own else None

    def compare(self, way: str, turnout: str, method: str, other: str) -> PairedComparison:
        """A method less another one, seed by seed, tested alone."""
        return judge_pairs([self.pairs(way, turnout, method, other)])[0]

    def pairs(self, way: str, turnout: str, method: str, other: str) -> PairedComparison:
        one, two = (self.values[way][turnout][name] for name in (method, other))
        seeds = sorted(one.keys() & two.keys())
        return PairedComparison(method, other, turnout, way, seeds, [one[s] - two[s] for s in seeds], {}, [])

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


def study_blocks(runs: Runs) -> list[Block]:
    """The blocks of the study, of what is stored of at least three seeds: fewer decide nothing."""
    blocks: dict[str, dict[str, dict[str, dict[int, RunCurve]]]] = {}
    for case in find_experiment(STUDY).cases:
        name, _, turnout = case.name.partition(" ")
        own = runs.get(case.name, {})
        if its := {m: own[m] for m in METHODS if len(own.get(m, ())) >= MIN_SEEDS}:
            blocks.setdefault(name, {})[turnout] = its
    return [make_block(name, turnouts) for name, turnouts in blocks.items()]


def make_block(name: str, turnouts: Mapping[str, Mapping[str, Mapping[int, RunCurve]]]) -> Block:
    """A block of runs: its limits are what the run that spent least has spent, to two digits.

    Asynchronous runs are not asked: they end hours before the others, and their own last fifth counts.
    """
    asked = [methods for turnout, methods in turnouts.items() if turnout != ASYNCHRONOUS]
    every = [run for methods in asked for seeds in methods.values() for run in seeds.values()]
    limits = {way: round_down(min(run.total(way) for run in every)) for way in WAYS}
    values = {
        way: {
            turnout: {
                method: {seed: 100 * run.at(way, limits[way]) for seed, run in sorted(seeds.items())}
                for method, seeds in methods.items()
            }
            for turnout, methods in turnouts.items()
        }
        for way in WAYS
    }
    return Block(name, limits, values)


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
    tests = {turnout: block.against(way, turnout, BASE) for turnout in block.turnouts}
    methods = [m for m in METHODS if any(m in block.methods(turnout) for turnout in block.turnouts)]
    rows = [[m, *(accuracy_cell(block, way, turnout, m, tests) for turnout in block.turnouts)] for m in methods]
    return markdown_table(["method", *block.turnouts], rows)


def accuracy_cell(
    block: Block, way: str, turnout: str, method: str, tests: Mapping[str, Mapping[str, PairedComparison]]
) -> str:
    """One accuracy in percent."""
    if method not in block.methods(turnout):
        return "= FedAvg" if turnout == "full" and method in FULL_IS_FEDAVG else "–"
    test = tests[turnout].get(method)
    mark = {BETTER: " ↑", WORSE: " ↓"}.get(test.verdict, "") if test else ""
    text = f"{block.mean(way, turnout, method):.1f}"
    return (f"**{text}**" if method == block.best(way, turnout) else text) + mark


def choice_table(block: Block) -> str:
    """By turnout and way: the method with the highest mean, and those that the seeds do not tell from it."""
    rows = []
    for turnout in block.turnouts:
        cells = []
        for way in WAYS:
            best, *near = block.as_good(way, turnout)
            cells.append(f"**{best}**" + (f" ({', '.join(near)})" if near else ""))
        rows.append([turnout, *cells])
    return markdown_table(["turnout", *WAYS.values()], rows, numbers=False)


def rates_table() -> str:
    """The chosen learning rates by method and block; † is the smallest or largest that was tried."""
    chosen, tried = chosen_rates(), measured_rates()

    def cell(key: tuple[str, str]) -> str:
        if key not in chosen:
            return "–"
        return f"{chosen[key]:g}" + (" †" if chosen[key] in (min(tried[key]), max(tried[key])) else "")

    blocks = list(dict.fromkeys(block for block, _ in chosen))
    rows = [[m, *(cell((b, m)) for b in blocks)] for m in METHODS]
    return markdown_table(["method", *blocks], rows)


# picture --------------------------------------------------------------------------------------------------------------


def picture(blocks: Sequence[Block]) -> Any:
    """Heat maps of differences from FedAvg in points, methods by turnouts: a row for each skew, a column each way."""
    with style():
        figure = canvas(13, 4.6 * len(blocks))
        grid: Any = figure.subplots(len(blocks), len(WAYS), squeeze=False)
        for axes_row, block in zip(grid, blocks, strict=True):
            for axes, way in zip(axes_row, WAYS, strict=True):
                draw_differences(axes, block, way)
                axes.set_title(f"{block.title}: {WAYS[way]}")
    return figure


def whole_points(value: float) -> str:
    """A difference of accuracies without digits after the point."""
    return f"{value:+.0f}".replace("-", "−") if abs(value) >= 0.5 else "0"


def draw_differences(axes: Any, block: Block, way: str) -> None:
    """One heat map; the first row has FedAvg's own accuracy."""
    methods = [m for m in METHODS if any(m in block.methods(t) for t in block.turnouts)]
    table = np.full((len(methods), len(block.turnouts)), np.nan)
    for column, turnout in enumerate(block.turnouts):
        base = block.mean(way, turnout, BASE)
        for row, method in enumerate(methods):
            mean = block.mean(way, turnout, method)
            if mean is not None and base is not None:
                table[row, column] = mean - base
                text = f"{mean:.0f}" if method == BASE else whole_points(mean - base)
                dark = method != BASE and abs(mean - base) > 0.6 * SPAN
                axes.text(column, row, text, ha="center", va="center", fontsize=9, color="white" if dark else "#333333")
    axes.imshow(table, cmap="RdBu", vmin=-SPAN, vmax=SPAN, aspect="auto")
    axes.grid(visible=False)
    axes.set_xticks(range(len(block.turnouts)), block.turnouts, rotation=40, ha="right")
    axes.set_yticks(range(len(methods)), methods)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)


# findings -------------------------------------------------------------------------------------------------------------


def findings(blocks: Sequence[Block]) -> list[str]:
    """What the tables of one dataset say, each sentence from the numbers; those without runs are left out."""
    found = [
        *leads(blocks),
        *by_turnout(blocks),
        *made_for_turnout(blocks),
        *memories(blocks),
        *messages(blocks),
    ]
    return [*found, *costs_of_turnout(blocks), *waiting(blocks)]


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


def overall_table(blocks: Sequence[Block]) -> str:
    """Methods by blocks and ways: mean differences from FedAvg over the partial turnouts, with intervals."""
    columns = [(block, way) for block in blocks for way in WAYS]
    tests = [overall(block, way) for block, way in columns]
    heads = ["method", *(f"{TITLES[b.name.partition('-')[0]]}, {skew(b)}, {WAYS[way]}" for b, way in columns)]
    methods = [m for m in METHODS if any(m in its for its in tests)]
    return markdown_table(heads, [[m, *(interval(its[m]) if m in its else "–" for its in tests)] for m in methods])


def leads(blocks: Sequence[Block]) -> list[str]:
    """Which method has the largest lead over FedAvg on average, for each way."""
    texts = []
    for way, words in WAYS.items():
        firsts = []
        for block in blocks:
            tests = overall(block, way)
            first = max(tests, key=lambda m: tests[m].mean or 0.0)
            lead = tests[first].mean or 0.0
            firsts.append(f"{skew(block)} {f'{first} {interval(tests[first])}' if lead > 0 else 'none'}")
        texts.append(f"{words}: {', '.join(firsts)}")
    return [f"**The largest lead over FedAvg**, on average over the six partial turnouts, after {'; '.join(texts)}."]


def by_turnout(blocks: Sequence[Block]) -> list[str]:
    """The two methods that are nearest to the best of their column in each turnout, on average, and FedAvg."""
    texts = []
    for turnout in dict.fromkeys(t for block in blocks for t in block.turnouts):
        its = [block for block in blocks if turnout in block.turnouts]
        methods = [m for m in METHODS if all(m in block.methods(turnout) for block in its)]
        behind = {m: fmean(behind_best(b, way, turnout, m) for b in its for way in WAYS) for m in methods}
        near = sorted(methods, key=lambda m: behind[m])[:2]
        shown = list(dict.fromkeys([*near, BASE]))
        texts.append(f"{turnout}: {', '.join(f'{m} {behind[m]:.1f}' for m in shown)}")
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
        f"{m} {', '.join(f'{interval(its[m])} with {skew(block)}' for block, its in tests if m in its)}"
        for m in methods
    )


def made_for_turnout(blocks: Sequence[Block]) -> list[str]:
    """FedAU, FedAWE and FOCUS against FedAvg."""
    uneven = [block for block in blocks if "FedAU" in block.methods("uneven")]
    tests = [f"{interval(block.against('rounds', 'uneven', BASE)['FedAU'])} with {skew(block)}" for block in uneven]
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
        tests = judge_pairs([across(block, "rounds", turnout, "uniform") for turnout in others])
        texts.append(
            f"{skew(block)}: {', '.join(f'{t} {interval(test)}' for t, test in zip(others, tests, strict=True))}"
        )
    return [
        "**What a turnout costs FedAvg** after equal rounds, compared with uniform turnout: " + "; ".join(texts) + "."
    ]


def waiting(blocks: Sequence[Block]) -> list[str]:
    """FedAvg with everybody, with a deadline and asynchronously, compared with waiting for a uniform tenth."""
    lines = []
    for turnout, way, name in (
        ("full", "bytes", "**Everybody in every round**, FedAvg after equal bytes"),
        ("full", "seconds", "**Everybody in every round**, FedAvg after equal virtual time"),
        ("deadline", "seconds", "**A deadline**, FedAvg after equal virtual time"),
        (ASYNCHRONOUS, "seconds", "**Asynchronous steps**, FedAvg after equal virtual time"),
        (ASYNCHRONOUS, "rounds", "**Asynchronous steps**, FedAvg after equal rounds"),
    ):
        its = [block for block in blocks if {turnout, "uniform"} <= {*block.turnouts}]
        texts = [f"{skew(b)}: {interval(judge_pairs([across(b, way, turnout, 'uniform')])[0])}" for b in its]
        if texts:
            lines.append(f"{name}, compared with waiting for a uniform tenth: {'; '.join(texts)}.")
    its = [block for block in blocks if "FedBuff" in block.methods(ASYNCHRONOUS)]
    if its:
        texts = []
        for block in its:
            tests = block.against("seconds", ASYNCHRONOUS, BASE)
            listed = ", ".join(f"{m} {interval(tests[m])}" for m in ASYNCHRONOUS_METHODS if m in tests)
            texts.append(f"{skew(block)}: {listed}")
        lines.append(
            f"**FedBuff and FedAsync** against FedAvg, all asynchronous, after equal virtual time: {'; '.join(texts)}."
        )
    return lines


def across(block: Block, way: str, turnout: str, other: str, method: str = BASE) -> PairedComparison:
    """A method under one turnout less the same method under another, seed by seed."""
    one, two = (block.values[way][name][method] for name in (turnout, other))
    seeds = sorted(one.keys() & two.keys())
    return PairedComparison(method, method, turnout, way, seeds, [one[s] - two[s] for s in seeds], {}, [])


def skew(block: Block) -> str:
    """The skew of a block."""
    return f"α = {float(block.name.partition('-')[2]):.1f}"


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
    """What the page has between its marks, by their names."""
    by_data = {data: [b for b in blocks if b.name.startswith(data)] for data in TITLES}
    known = {data: its for data, its in by_data.items() if its}
    told = [[f"**{TITLES[data]}**\n", *(f"- {text}" for text in findings(its)), ""] for data, its in known.items()]
    choices = [[f"**{block.title}**\n", choice_table(block), ""] for block in blocks]
    pictures = [
        f"![{TITLES[data]}: accuracy less that of FedAvg by method and turnout](img/turnout-{data}.png)\n"
        for data in known
    ]
    return {
        "findings": "\n".join(line for lines in told for line in lines),
        "overall": overall_table(blocks) + "\n",
        "choice": "\n".join(line for lines in choices for line in lines),
        "pictures": "\n".join(pictures),
        "tables": "\n".join([*(line for block in blocks for line in block_section(block)), refusals()]),
        "rates": rates_table() + "\n",
    }


def page(text: str, blocks: Sequence[Block]) -> str:
    """The text of docs/turnout.md with its sections written anew."""
    for name, section in sections(blocks).items():
        begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->\n"
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


def last_round(runs: Runs) -> list[str]:
    """Leads over FedAvg in the accuracy of the last round, on average over the partial turnouts, with 95% intervals."""
    lines = []
    for block in sorted({case.partition(" ")[0] for case in runs if case.endswith(PARTIAL[0])}):
        cells = [runs[f"{block} {turnout}"] for turnout in PARTIAL]
        for method in cells[0]:
            seeds = sorted(set.intersection(*({*cell[method]} & {*cell[BASE]} for cell in cells)))
            last = lambda cell, name, seed: 100 * cell[name][seed].accuracy[1][-1]
            each = [fmean(last(cell, method, seed) - last(cell, BASE, seed) for cell in cells) for seed in seeds]
            if method != BASE and len(each) >= MIN_SEEDS:
                low, high = t_interval(each, 0.95)
                lines.append(f"{block} {method} {fmean(each):+.1f} ({low:+.1f} to {high:+.1f}), {len(each)} seeds")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", action="store_true", help="write papers/ours/turnout.toml with the chosen rates")
    parser.add_argument("--write", action="store_true", help="write docs/turnout.md and the pictures")
    parser.add_argument("--last-round", action="store_true", help="print leads by the accuracy of the last round")
    options = parser.parse_args()
    if options.last_round:
        print("\n".join(last_round(read_study())))
    if options.rates:
        FILE.write_text(write_rates(FILE.read_text(encoding="utf-8"), chosen_rates()), encoding="utf-8")
    if options.write:
        blocks = study_blocks(read_study())
        PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), blocks), encoding="utf-8")
        for data in TITLES:
            if its := [block for block in blocks if block.name.startswith(data)]:
                drawn = BytesIO()
                picture(its).savefig(drawn, dpi=100)
                few = Image.open(drawn).convert("RGB").quantize(200)  # colours: half of the bytes
                few.save(PICTURES / f"turnout-{data}.png", optimize=True)


if __name__ == "__main__":
    main()
