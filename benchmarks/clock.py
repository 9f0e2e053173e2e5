"""What the virtual clock costs beside a round, with a thousand and a million clients, synchronously and asynchronously.

The round is the smallest real one: softmax regression on samples of 64 numbers, about 60 for each of ten clients. What
is compared is measured in turn in one process, so that a busy machine disturbs all of it alike. Printed are medians
over the rounds, in milliseconds of the processor, and shares of the round without a clock, which is drawn by the
participation rule alone.

Synchronously (`wait = "all"`) each round is drawn by the rule alone, drawn on the clock, and trained. The share of the
clock is what it takes beyond the rule alone. The longest draw is printed too.

Asynchronously (`wait = "buffer"`, ten answers a step) each step is drawn on the clock and made; then a round is drawn
by the rule alone, and the clients that began in the step are trained in it. So both train the same clients, and neither
evaluates. Clients that begin in one step start from the same model: as in the round, they are one call of the engine.
The share of the clock is what it takes beyond the rule alone, that of the server what the step takes beyond the round:
answers are stored until they are used. Both are medians of the differences between a step and its round.

The clock does not depend on what is trained. With `--lenet5` its share of a larger round is printed too: LeNet5 on
CIFAR-10, ten of 100 clients, an epoch each (askew data get cifar10).
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
from askew.engine.server import Server
from askew.experiment.build import BuildCache, BuiltRun, build
from askew.experiment.config import Config
from askew.experiment.process_tuning import tune_process
from askew.participation import (
    Bernoulli,
    CohortParticipation,
    Cyclic,
    Markov,
    Participation,
    Poisson,
    Skewed,
    Turnout,
    Uniform,
)
from askew.timeline import TimeSettings

COHORT = 10
AT_WORK = (10, 30)  # clients at the same time, asynchronously
SKIPPED = 5  # first steps, which are not measured: the clients that are at work begin in them
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


def federation(clients: int, rule: Participation, how: TimeSettings, shared: BuildCache) -> BuiltRun:
    """A federation of so many clients whose samples are drawn when they take part."""
    tables = {
        "data": {"name": "synthetic", "dim": 64, "samples": 60},
        "partition": {"clients": clients},
        "participation": rule,
        "model": {"name": "softmax"},
        "local": {"batch": 32},
        "engine": {"name": "sequential", "device": "cpu"},
        "time": how,
    }
    return build(Config.build(tables), shared)


def write_trace(path: Path, clients: int) -> None:
    """Two stays of an hour in a day for every client, a twelfth of the time."""
    begins = np.random.default_rng(0).uniform([0, 43_200], [39_600, 82_800], (clients, 2))
    lines = [f"{i},{a:.1f},{a + 3600:.1f}\n{i},{b:.1f},{b + 3600:.1f}\n" for i, (a, b) in enumerate(begins.tolist())]
    path.write_text("client,from,to\n" + "".join(lines))


def lenet5_round() -> float:
    """Milliseconds of a round of LeNet5, the median of three."""
    tables = {
        "data": {"name": "cifar10"},
        "partition": {"name": "iid", "clients": 100},
        "participation": {"name": "uniform", "cohort": COHORT},
        "model": {"name": "lenet"},
        "local": {"epochs": 1, "batch": 100},
        "engine": {"name": "sequential", "device": "cpu"},
    }
    server = build(Config.build(tables)).server
    return statistics.median([timed(lambda t=t: server.run_round(t, list(range(COHORT))))[0] for t in range(4)][1:])


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
        "start_ms": start,
        "rule_ms": usual_ms,
        "clock_ms": clock_ms,
        "round_ms": round_ms,
        "share": share,
        "longest_ms": max(drawn[2:]),
    }


def train(server: Server, round: int, turnout: Turnout) -> None:
    """One round or step, with the server's own engine."""
    server.fed.plans.clear()  # so that neither the step nor the round finds the plan of the other
    requests = server.turnout_requests(round, turnout)
    try:
        request = next(requests)
        while True:
            (outputs,) = server.engine.run([request])
            request = requests.send(outputs)
    except StopIteration:
        return


def measure_steps(
    clients: int, rule: Participation, how: TimeSettings, shared: BuildCache, rounds: int, begin: float
) -> dict[str, Any]:
    """Milliseconds of an asynchronous step, on the clock and at the server, and of the round without a clock."""
    server = federation(clients, rule, TimeSettings(), shared).server
    start, built = timed(lambda: federation(clients, rule, how, shared))
    fed, clock = built.fed, built.clock
    assert clock is not None
    clock.now = begin
    drawn, stepped, alone, trained, counts = list[float](), list[float](), list[float](), list[float](), list[int]()
    for t in range(1, rounds + SKIPPED + 1):
        ms, turnout = timed(lambda t=t: clock.turnout(t))
        drawn.append(ms)
        stepped.append(timed(lambda t=t, who=turnout: train(built.server, t, who))[0])
        # with another seed than the clock, so that the rule does not find what it has drawn there
        alone.append(timed(lambda t=t: rule.turnout(1, t, fed.eligible, fed.clients))[0])
        same = Turnout(turnout.ids, turnout.share, turnout.absent[:0])
        trained.append(timed(lambda t=t, who=same: train(server, t, who))[0])
        counts.append(len(turnout.ids))
    clock_ms, step_ms, rule_ms, round_ms = (
        statistics.median(times[SKIPPED:]) for times in (drawn, stepped, alone, trained)
    )
    clock_share, server_share = (
        statistics.median(np.subtract(more, less)[SKIPPED:].tolist()) / (rule_ms + round_ms)
        for more, less in ((drawn, alone), (stepped, trained))
    )
    return {
        "start_ms": start,
        "rule_ms": rule_ms,
        "clock_ms": clock_ms,
        "step_ms": step_ms,
        "round_ms": round_ms,
        "clock_share": clock_share,
        "server_share": server_share,
        "share": clock_share + server_share,
        "longest_ms": max(drawn[SKIPPED:]),
        "trained": statistics.mean(counts[SKIPPED:]),  # clients in a step
    }


SYNCHRONOUS = (
    "{clients:>9,} clients  {rule:10} {there:7} rule {rule_ms:6.2f}  clock {clock_ms:6.2f}  round {round_ms:6.2f} ms"
    "  share {share:6.1%}  longest {longest_ms:8.2f} ms"
)
ASYNCHRONOUS = (
    "{clients:>9,} clients  {rule:10} {there:7} at work {at_work:2}  rule {rule_ms:6.2f}  clock {clock_ms:6.2f}  "
    "step {step_ms:6.2f}  round {round_ms:6.2f} ms of {trained:4.1f} clients"
    "  share {share:6.1%} = clock {clock_share:6.1%} + server {server_share:6.1%}  longest {longest_ms:8.2f} ms"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[1_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--there", nargs="+", choices=[*THERE], default=[*THERE])
    parser.add_argument("--wait", nargs="+", choices=["all", "buffer"], default=["all", "buffer"])
    parser.add_argument("--rules", nargs="+", help="names of classes, as they are printed; left out: all")
    parser.add_argument("--begin", type=float, default=20_000.0, help="second of the first round; at 0 few are there")
    parser.add_argument("--lenet5", action="store_true", help="also the clock's share of a round of LeNet5")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tune_process()
    rows = []

    lenet5 = lenet5_round() if options.lenet5 else 0.0

    def add(line: str, row: dict[str, Any]) -> None:
        if options.lenet5:
            share = row.get("clock_share", row["share"]) * (row["rule_ms"] + row["round_ms"]) / lenet5
            row |= {"lenet5_ms": lenet5, "lenet5_share": share}
            line += "  clock {lenet5_share:7.3%} of {lenet5_ms:6.0f} ms"
        rows.append(row)
        if not options.json:
            print(line.format(**row), flush=True)

    with tempfile.TemporaryDirectory() as folder:
        for clients in options.clients:
            shared = BuildCache()
            built = federation(clients, Uniform(cohort=COHORT), TimeSettings(), shared)
            for there in options.there:
                how = dict(THERE[there])
                if there == "trace":
                    how["trace"] = f"{folder}/{clients}.csv"
                    write_trace(Path(how["trace"]), clients)
                for rule in rules(clients, there):
                    name = type(rule).__name__
                    if options.rules and name not in options.rules:
                        continue
                    row = {"clients": clients, "rule": name, "there": there}
                    if "all" in options.wait:
                        add(SYNCHRONOUS, row | measure(built, rule, how, options.rounds, options.begin))
                    if "buffer" in options.wait and isinstance(rule, CohortParticipation):
                        for at_work in AT_WORK:
                            settings = TimeSettings(
                                wait="buffer", buffer=COHORT, at_work=at_work, speed="lognormal", **how
                            )
                            measured = measure_steps(clients, rule, settings, shared, options.rounds, options.begin)
                            add(ASYNCHRONOUS, row | {"at_work": at_work} | measured)
    if options.json:
        print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
