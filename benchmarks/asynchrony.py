"""Which methods stay sound when answers start from older models.

Every method is trained asynchronously on least squares with ten skewed clients of unequal speeds, and once more with
the same clients in the same steps, who all start from the newest model then. What differs is the staleness alone.
Measured are the relative distance to the minimiser of the mean client loss, and whether the server's sums still are the
sums of what the clients keep. A method that is worse with stale answers is measured again, with a fifth of the rate and
three times the steps: staleness may ask for a smaller rate, and must not move the point at which a method comes to rest.

    python benchmarks/asynchrony.py                 prints the table
    python benchmarks/asynchrony.py --only fedavg   prints the rows of one method; repeatable
    python benchmarks/asynchrony.py --json FILE     also keeps the numbers in a file, and begins with those in it
    python benchmarks/asynchrony.py --write         also writes the table into docs/asynchrony.md
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
from pathlib import Path
from typing import Any, NamedTuple

import torch
from optimum import SETTINGS, SKIPPED, N, format_distance, quadratics

from askew.algorithms import algorithms
from askew.engine.server import Server
from askew.experiment.api import OwnData, OwnNetwork
from askew.experiment.build import build
from askew.experiment.config import Config
from askew.experiment.process_tuning import tune_process
from askew.experiment.run import ActiveRun, train_round

RATES = {0.02: 400, 0.004: 1200}  # local rates, and the steps of the server; the second where the first is not enough
LAST = 50  # steps over whose distances the median is taken
WORSE = 2.0  # times the distance with fresh answers, from which on stale ones are measured again, and are wrong
NEAR = 1e-5  # a distance that is near enough, whatever it is with fresh answers
CLOCK = {"wait": "buffer", "buffer": 2, "at_work": 8, "seconds": 1.0, "speed": "lognormal", "sigma": 1.0}
ONE_EXCHANGE = {"fedga": {"form": "memory"}}  # the form with two is refused
# Sums that a server keeps beside what clients keep: its entry, their bank and entry, and the factor of the sum.
SUMS = {
    "scaffold": [("c", "clients", "c", 1 / N)],
    "fedpvr": [("c", "clients", "c", 1 / N)],
    "feddyn": [("h", "clients", "h", 1 / N)],
    "fedspeed": [("h", "clients", "h", 1 / N)],
    "feddc": [("c", "clients", "c", 1 / N), ("h", "clients", "h", 1 / N)],
    "fedvarp": [("mean", "memory", "y", 1 / N)],
    "mifa": [("mean", "memory", "y", 1 / N)],
    "fedamd": [("v", "memory", "g", 1 / N)],
    "focus": [("y", "clients", "g", 1.0)],
}
OUT = Path(__file__).parent.parent / "docs" / "asynchrony.md"


class Measured(NamedTuple):
    """Where a method comes to rest at one rate."""

    rate: float
    stale: float  # relative distance to the optimum, the median over the last steps; inf: it diverged
    fresh: float  # with the same clients in the same steps, who start from the newest model
    gap: float  # of the server's sums, relative to what the clients keep; nan: it has none

    @property
    def is_worse(self) -> bool:
        return self.stale > max(WORSE * self.fresh, NEAR) or not math.isfinite(self.stale)


def configure(name: str, problem: Any, rate: float, clock: dict[str, Any]) -> Config:
    """The run of a method at a local rate."""
    data, module, _, local = problem
    own = {**SETTINGS.get(name, {}), **ONE_EXCHANGE.get(name, {})}
    return Config.build(
        {
            "algorithm": {"name": name, "weighting": "uniform", **own},
            "data": OwnData.of(data, None),
            "model": OwnNetwork.of(module),
            "partition": {"name": "natural", "clients": N},
            "participation": {"cohort": 4},
            "local": {**local, "batch": 0, "steps": 5, "lr": rate},
            "engine": {"name": "sequential", "dtype": "float64"},
            "rounds": RATES[rate],
            **({"time": clock} if clock else {}),
        }
    )


def measure(name: str, problem: Any, rate: float) -> Measured:
    """The distances of a method with stale and with fresh answers."""
    built, best = build(configure(name, problem, rate, CLOCK)), problem[2]
    run, distances, cohorts = ActiveRun(built, None, None, math.inf), list[float](), list[list[int]]()
    while not run.is_over:
        (trained,) = train_round([run], meanwhile=lambda: None, evaluate=False)
        cohorts.append(trained.record["participants"])
        distances.append(float((built.server.w - best).norm() / best.norm()))
    gap = largest_gap(name, built.server)
    fresh, again = build(configure(name, problem, rate, {})).server, list[float]()
    for t, ids in enumerate(cohorts, 1):
        fresh.run_round(t, ids)
        again.append(float((fresh.w - best).norm() / best.norm()))
    return Measured(rate, median_of_last(distances), median_of_last(again), gap)


def median_of_last(distances: list[float]) -> float:
    """The median over the last steps; infinity where it is not finite."""
    value = statistics.median(distances[-LAST:])
    return value if math.isfinite(value) else math.inf


def largest_gap(name: str, server: Server) -> float:
    """How far the server's sums are from those of what the clients keep, relative to it."""
    gaps = [math.nan]
    for entry, bank, own, factor in SUMS.get(name, []):
        rows = server.banks[bank].read(range(N))[own].double()
        gaps.append(float((server.state[entry] - rows.sum(0) * factor).norm() / rows.norm().clamp(min=1e-300)))
    return max(gaps[1:], default=math.nan)


def rows_of(name: str, problem: Any) -> list[Measured]:
    """What was measured of a method: at the first rate, and at the second if it was worse there."""
    rows = []
    for rate in RATES:
        rows.append(measure(name, problem, rate))
        if not rows[-1].is_worse:
            break
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    measurable = [name for name in algorithms if name not in SKIPPED]
    parser.add_argument("--only", metavar="NAME", action="append", choices=measurable)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--write", action="store_true", help="write docs/asynchrony.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tune_process()
    for name in algorithms:  # what is refused is measured too
        algorithms[name].stale = ""
    stored = json.loads(options.json.read_text("utf-8")) if options.json and options.json.exists() else {}
    results = {name: [Measured(*row) for row in rows] for name, rows in stored.items()}
    problem = quadratics()
    for name in options.only or measurable:
        if name not in results:
            results[name] = rows_of(name, problem)
            if options.json:
                options.json.write_text(json.dumps(results), encoding="utf-8")
        print(f"{name:12} {'; '.join(in_words(row) for row in results[name])}", flush=True)
    if options.write:
        page = OUT.read_text("utf-8")
        OUT.write_text(re.sub(r"\| method \|.*?\n\n", table(results) + "\n", page, flags=re.S), encoding="utf-8")


def in_words(row: Measured) -> str:
    """A measurement as the table shows it."""
    gap = "" if math.isnan(row.gap) else f", sums to {row.gap:.0e}"
    return f"η {row.rate:g}: {format_distance(row.stale)} stale, {format_distance(row.fresh)} fresh{gap}"


def table(results: dict[str, list[Measured]]) -> str:
    """The rows of docs/asynchrony.md."""
    lines = ["| method | sound with stale answers? | distance to the optimum |", "| --- | --- | --- |"]
    for name, rows in results.items():
        lines.append(f"| `{name}` | {'no' if rows[-1].is_worse else 'yes'} | {'; '.join(map(in_words, rows))} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
