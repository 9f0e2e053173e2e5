"""A method compared with itself: how often `askew compare --test` finds a difference that is not there.

    python benchmarks/aa.py

Real runs: FedAvg on digits, 30 clients, 10 rounds, with many seeds. A comparison draws 2n different runs and takes n of
them for the method and n for the reference; all follow the same distribution, so every decided difference is a false
win. Pairs of different seeds differ more than pairs of one seed do, and a test of a mean is not helped by that. In a
family several "methods" are compared with one reference, and one false win makes the family false.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np

import askew
from askew.report.significance import METRICS, PairedComparison, judge_pairs

ROUNDS, COMPARISONS = 10, 1000
METRIC = "best_accuracy"


def measure_spread(seeds: range) -> np.ndarray:
    """The best accuracies of FedAvg at these seeds."""
    runs = askew.sweep("fedavg", seeds=seeds, rounds=ROUNDS, progress=False)
    return np.array([METRICS[METRIC].value(run) for run in runs])


def is_false_win(values: np.ndarray, n: int, methods: int, rng: np.random.Generator) -> bool:
    """Whether a comparison of `methods` samples with another one decides anything; all have n seeds of one method."""
    drawn = rng.choice(values, size=(methods + 1, n), replace=False)
    pairs = [
        PairedComparison(f"method {k}", "itself", "", METRIC, list(range(n)), list(each - drawn[0]), {}, [])
        for k, each in enumerate(drawn[1:], 1)
    ]
    return any(test.verdict in ("better", "worse") for test in judge_pairs(pairs))


def main() -> int:
    """Print the rates of false wins; exit code 1 if one is above 5%."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=200, help="runs to draw from")
    parser.add_argument("--first", type=int, default=0, help="the first seed; another one makes other runs and draws")
    parser.add_argument("--comparisons", type=int, default=COMPARISONS)
    options = parser.parse_args()
    values = measure_spread(range(options.first, options.first + options.seeds))
    rng, total, worst = np.random.default_rng(1 + options.first), 0, 0.0
    mean, spread = 100 * values.mean(), 100 * values.std(ddof=1)
    print(f"fedavg on digits, {ROUNDS} rounds, {len(values)} seeds: best accuracy {mean:.1f} ± {spread:.1f} %")
    settings = [(n, methods) for n in (3, 5, 10) for methods in (1, 4)]
    for n, methods in settings:
        wins = sum(is_false_win(values, n, methods, rng) for _ in range(options.comparisons))
        rate = wins / options.comparisons
        total, worst = total + wins, max(worst, rate)
        what = "1 method" if methods == 1 else f"{methods} methods, Holm"
        print(f"n = {n:2d} seeds, {what}: {wins} of {options.comparisons} comparisons decided, {100 * rate:.1f} %")
    overall = total / (len(settings) * options.comparisons)
    print(f"all: {100 * overall:.2f} % of {len(settings) * options.comparisons:,}")
    return int(worst > 0.05)


if __name__ == "__main__":
    sys.exit(main())
