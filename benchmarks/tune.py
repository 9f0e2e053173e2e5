"""`askew tune` beside an exhaustive comparison: is what it finds among the best, and does it end inside its budget?

    python benchmarks/tune.py

Digits with 30 clients, divided in three ways. The exhaustive comparison trains every setting of every method to the
last round at several seeds, which tune does not use. A method stands there with the setting that held-out samples
choose, and methods and settings are ranked by their mean test accuracy in the round that held-out samples choose.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import mean

import askew
from askew.experiment.contenders import METHODS, Contender, make_contender, score_run
from askew.experiment.launch import FailedRun, run_each

SKEWS = {
    "Dirichlet 0.1": {"name": "dirichlet", "alpha": 0.1},
    "Dirichlet 0.5": {"name": "dirichlet", "alpha": 0.5},
    "two labels each": {"name": "labels", "labels": 2},
}
FIRST_SEED = 100  # of the exhaustive comparison


def measure(contender: Contender, seeds: int) -> list[tuple[float, float, str]]:
    """Of every setting of a method the mean accuracy on held-out and on test samples, and the setting."""
    found = []
    for candidate in contender.candidates:
        configs = [replace(candidate.config, seed=FIRST_SEED + n) for n in range(seeds)]
        runs = [run for run in run_each(configs, None) if not isinstance(run, FailedRun)]
        scores = [score_run(run) for run in runs]
        if scores and all(score.test is not None for score in scores):
            test = mean(score.test or 0.0 for score in scores)
            found.append((mean(score.value for score in scores), test, json.dumps(candidate.setting)))
    return found


def compare(tables: dict[str, object], budget: str, seeds: int) -> tuple[str, bool]:
    """A row of the table for one federation, and whether tune held what it promises."""
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        tuning = askew.tune(tables, budget=budget, out=Path(folder), progress=False)
    took, winner = time.process_time() - began, tuning.result.standings[0]
    began = time.process_time()
    measured = {name: measure(make_contender(tables, name, METHODS, {}), seeds) for name in METHODS}
    full = time.process_time() - began
    rounds = sum(len(each) for each in measured.values()) * seeds * int(str(tables["rounds"]))
    methods = sorted(((max(each)[1], name) for name, each in measured.items()), reverse=True)
    settings = sorted(((test, name, its) for name, each in measured.items() for _, test, its in each), reverse=True)
    place = [name for _, name in methods].index(winner.method) + 1
    own = next(n for n, (_, name, its) in enumerate(settings) if (name, its) == (winner.method, key(winner.setting)))
    off = 100 * (settings[0][0] - settings[own][0])
    print(f"  best methods: {', '.join(f'{name} {100 * test:.1f}' for test, name in methods)}")
    found = [(each["method"], each["test"]) for each in tuning.ranking]
    print(f"  tuned: {', '.join(f'{name} {100 * test:.1f}' for name, test in found)}")
    row = f"{winner.method} {key(winner.setting)} | {place} of {len(methods)} | {own + 1} of {len(settings)} | "
    row += f"{off:.1f} | {tuning.result.spent:,.0f} of {budget} | {rounds:,} | {took:.0f} s | {full:.0f} s"
    return row, place <= 3 and tuning.result.spent <= float(budget.removesuffix("rounds"))


def key(setting: dict[str, object]) -> str:
    """A setting as text."""
    return json.dumps(setting)


def main() -> int:
    """Print a row for each federation; exit code 1 if a winner is not among the best three, or a budget exceeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--budget", default="2400rounds")
    parser.add_argument("--seeds", type=int, default=4, help="seeds of the exhaustive comparison")
    options, held = parser.parse_args(), True
    print("federation | winner | method's place | setting's place | points off | spent | exhaustive | CPU | CPU")
    for name, partition in SKEWS.items():
        tables = {"rounds": options.rounds, "partition": partition}
        row, holds = compare(tables, options.budget, options.seeds)
        print(f"{name} | {row}", flush=True)
        held = held and holds
    return int(not held)


if __name__ == "__main__":
    sys.exit(main())
