"""The study of turnouts, ours/turnout: its learning rates, its page docs/turnout.md and its picture, from results alone.

    python benchmarks/turnout.py --rates     write the rates that ours/turnout-rates chose into papers/ours/turnout.toml
    python benchmarks/turnout.py --write     write docs/turnout.md and docs/img/turnout.png

tests/test_turnout.py compares the page and the rates with what this file makes of results.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np

from askew.report.picture import Picture, canvas, style
from askew.report.significance import BETTER, UNDECIDED, WORSE, PairedComparison, judge_pairs
from askew.reproduction.papers import Experiment, find_experiment
from askew.reproduction.results import metrics_by_run, parse_curve, read_results_file, results_file

ROOT = Path(__file__).parents[1]
RESULTS, PAGE, PICTURE = ROOT / "results", ROOT / "docs/turnout.md", ROOT / "docs/img/turnout.png"
STUDY, SEARCH, FILE = "ours/turnout", "ours/turnout-rates", ROOT / "papers/ours/turnout.toml"
BASE = "FedAvg"
START = 0.1  # accuracy before the first round: ten classes
HOUR = 3600.0  # seconds
# With everybody in every round these are FedAvg: what each client sends is averaged with equal weights.
FULL_IS_FEDAVG = ("FedVARP", "MIFA", "FedAU", "FedAWE")
WAYS = {"rounds": "equal rounds", "bytes": "equal bytes", "seconds": "equal virtual time"}
ASYNCHRONOUS, ASYNCHRONOUS_METHODS = "asynchronous", ("FedBuff", "FedAsync")
METHODS = (
    *("FedAvg", "SCAFFOLD", "FedDyn", "FedCM", "FedDPC", "FedVARP", "MIFA", "FedAU", "FedAWE", "FOCUS"),
    *ASYNCHRONOUS_METHODS,
)
TITLES = {"digits": "Digits", "cifar10": "CIFAR-10"}
# What a case says of a method beside its rate. FedAsync's server steps with every answer: it has as many answers.
EXTRA = {
    ("digits", "FedAsync"): ("rounds = 500", "time = { buffer = 1 }", "evaluation = { every = 50 }"),
    ("cifar10", "FedAsync"): ("rounds = 1000", "time = { buffer = 1 }", "evaluation = { every = 50 }"),
}


class RunCurve(NamedTuple):
    """One run: its last accuracy, and accuracy over bytes and seconds at the stored rounds."""

    last: float
    accuracy: tuple[list[int], list[float]]
    bytes: tuple[list[int], list[float]]
    clock: tuple[list[int], list[float]]

    def at(self, way: str, limit: float) -> float:
        """The accuracy where so many bytes or seconds are spent, between stored rounds on a straight line."""
        if way == "rounds":
            return self.last
        rounds, values = self.accuracy
        spent = np.interp(rounds, *(self.bytes if way == "bytes" else self.clock))
        return float(np.interp(limit, [0.0, *spent], [START, *values]))

    def total(self, way: str) -> float:
        """What the whole run spent."""
        return (self.bytes if way == "bytes" else self.clock)[1][-1]


Runs = dict[str, dict[str, dict[int, RunCurve]]]  # by case, method and seed


def read_study(folder: Path = RESULTS) -> Runs:
    """The stored runs of the study."""
    rows = read_results_file(results_file(folder, STUDY, "full"))
    metrics, runs = metrics_by_run(rows), Runs()
    for row in rows:
        if row.metric == "last_accuracy":
            own = metrics[row.run]
            curves = (parse_curve(own[name]) for name in ("accuracy", "bytes", "clock"))
            run = RunCurve(float(row.value), *curves)
            runs.setdefault(row.case, {}).setdefault(row.method, {})[row.seed] = run
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
    entries = [method_entry(block, turnout, m, rate) for (its, m), rate in rates.items() if its == block]
    entries = [entry for entry in entries if entry]
    return "\n".join([*lines, f"methods = {{ {', '.join(entries)} }}"] if entries else lines) + "\n\n"


def method_entry(block: str, turnout: str, method: str, rate: float) -> str:
    """What a case says of a method; nothing of one that it does not have."""
    if (method in ASYNCHRONOUS_METHODS and turnout != ASYNCHRONOUS) or (method in FULL_IS_FEDAVG and turnout == "full"):
        return ""
    tables = [f"local = {{ lr = {rate!r} }}", *EXTRA.get((block.partition("-")[0], method), ())]
    return f"{method} = {{ {', '.join(tables)} }}"


# statistics -----------------------------------------------------------------------------------------------------------


class Block(NamedTuple):
    """One dataset with one skew: the accuracy of each turnout and method by seed, in percent, in each of the ways."""

    name: str  # "digits-0.1"
    limits: dict[str, float]  # of bytes and seconds
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
    """The blocks of the study, of the runs that are stored."""
    blocks: dict[str, dict[str, dict[str, dict[int, RunCurve]]]] = {}
    for case in find_experiment(STUDY).cases:
        name, _, turnout = case.name.partition(" ")
        if case.name in runs:
            blocks.setdefault(name, {})[turnout] = {m: runs[case.name][m] for m in METHODS if m in runs[case.name]}
    return [make_block(name, turnouts) for name, turnouts in blocks.items()]


def make_block(name: str, turnouts: Mapping[str, Mapping[str, Mapping[int, RunCurve]]]) -> Block:
    """A block of runs: its limits are what the run that spent least has spent, to two digits."""
    every = [run for methods in turnouts.values() for seeds in methods.values() for run in seeds.values()]
    limits = {way: round_down(min(run.total(way) for run in every)) for way in ("bytes", "seconds")} | {"rounds": 0.0}
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
