"""What the virtual clock costs: who takes part in a round of a thousand and of a million clients, beside the round.

The round is the smallest real one: softmax regression on samples of 64 numbers, about 60 for each of ten clients. Each
round is drawn by the participation rule alone, drawn on the clock, and trained, in turn in one process, so that a busy
machine disturbs all three alike. Printed are medians over the rounds, in milliseconds of the processor; the share of
the clock, which is what it takes beyond the rule alone, in the round without it; and the longest draw.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from askew.engine.clock import VirtualClock
from askew.experiment.build import BuiltRun, build
from askew.experiment.config import Config
from askew.experiment.process_tuning import tune_process
from askew.participation import Bernoulli, Cyclic, Markov, Participation, Poisson, Skewed, Uniform
from askew.timeline import TimeSettings

COHORT = 10
THERE: dict[str, dict[str, Any]] = {
    "always": {"availability": "always"},
    "markov": {"availability": "markov", "mean_on": 60.0, "mean_off": 300.0},
    "day": {"availability": "day", "opens": 22.0, "closes": 6.0},
    "trace": {},  # the file is written below
}
SHARE = {"always": 1, "markov": 1 / 6, "day": 1 / 3, "trace": 1 / 12}  # of the clients that are there


def rules(clients: int, there: str) -> list[Participation]:
    """Rules that draw about ten clients a round, or so many that about ten of them are there."""
    chance = COHORT / SHARE[there] / clients
    draws = [Bernoulli(fraction=chance), Poisson(fraction=chance)]
    return [Uniform(cohort=COHORT), Cyclic(cohort=COHORT), Markov(cohort=COHORT), Skewed(cohort=COHORT), *draws]


def federation(clients: int) -> BuiltRun:
    """A federation of so many clients whose samples are drawn when they take part."""
    tables = {
        "data": {"name": "synthetic", "dim": 64, "samples": 60},
        "partition": {"clients": clients},
        "participation": {"cohort": COHORT},
        "model": {"name": "softmax"},
        "local": {"batch": 32},
        "engine": {"name": "sequential", "device": "cpu"},
    }
    return build(Config.build(tables))


def write_trace(path: Path, clients: int) -> None:
    """Two stays of an hour in a day for every client, a twelfth of the time."""
    begins = np.random.default_rng(0).uniform([0, 43_200], [39_600, 82_800], (clients, 2))
    lines = [f"{i},{a:.1f},{a + 3600:.1f}\n{i},{b:.1f},{b + 3600:.1f}\n" for i, (a, b) in enumerate(begins.tolist())]
    path.write_text("client,from,to\n" + "".join(lines))


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Milliseconds that something takes, and what it returns."""
    began = time.process_time()
    result = work()
    return 1e3 * (time.process_time() - began), result


def measure(built: BuiltRun, rule: Participation, how: dict[str, Any], rounds: int, begin: float) -> dict[str, Any]:
    """Milliseconds of the rule, of the clock and of the round, and the share of the clock."""
    fed, server = built.fed, built.server
    start, clock = timed(lambda: VirtualClock(TimeSettings(wait="all", speed="lognormal", **how), rule, server, 1))
    clock.now = begin
    alone, drawn, trained = list[float](), list[float](), list[float]()
    for t in range(1, rounds + 3):
        ms, usual = timed(lambda t=t: rule.turnout(0, t, fed.eligible, fed.clients))
        alone.append(ms)
        drawn.append(timed(lambda t=t: clock.turnout(t))[0])
        trained.append(timed(lambda t=t, ids=usual.ids[:COHORT]: server.run_round(t, ids.tolist()))[0])
    usual_ms, clock_ms, round_ms = (statistics.median(times[2:]) for times in (alone, drawn, trained))
    share = (clock_ms - usual_ms) / (usual_ms + round_ms)
    return {
        "clients": fed.clients,
        "start_ms": start,
        "rule_ms": usual_ms,
        "clock_ms": clock_ms,
        "round_ms": round_ms,
        "share": share,
        "longest_ms": max(drawn[2:]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[1_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--there", nargs="+", choices=[*THERE], default=[*THERE])
    parser.add_argument("--begin", type=float, default=20_000.0, help="second of the first round; at 0 few are there")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tune_process()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for clients in options.clients:
            built = federation(clients)
            for there in options.there:
                how = dict(THERE[there])
                if there == "trace":
                    how["trace"] = f"{folder}/{clients}.csv"
                    write_trace(Path(how["trace"]), clients)
                for rule in rules(clients, there):
                    row = {
                        "rule": type(rule).__name__,
                        "there": there,
                        **measure(built, rule, how, options.rounds, options.begin),
                    }
                    rows.append(row)
                    if not options.json:
                        print("{clients:>9,} clients  {rule:10} {there:7}".format(**row), end=" ")
                        print(
                            "rule {rule_ms:6.2f}  clock {clock_ms:6.2f}  round {round_ms:6.2f} ms".format(**row), end=""
                        )
                        print("  share {share:6.1%}  longest {longest_ms:8.2f} ms".format(**row), flush=True)
    if options.json:
        print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
