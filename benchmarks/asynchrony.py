"""Which methods stay sound when answers start from older models.

Every method is trained asynchronously on least squares with ten skewed clients of unequal speeds, and once more with
the same clients in the same steps, who all start from the newest model then. What differs is the staleness alone.
Measured are the relative distance to the minimiser of the mean client loss, and whether the server's sums still are the
sums of what the clients keep. A method that is worse with stale answers is measured again, with a fifth of the rate and
five times the steps: staleness may ask for a smaller rate, but must not bring a method to rest twice as far away.

The virtual clock says who begins and whose answer is used; the hooks of the method do the rest, on gradients that are
written out here. `--check` compares one method with a run of askew.

    python benchmarks/asynchrony.py                 prints the table
    python benchmarks/asynchrony.py --only fedavg   prints the row of one method; repeatable
    python benchmarks/asynchrony.py --check fedavg  compares with a run
    python benchmarks/asynchrony.py --write         also writes the table into docs/asynchrony.md
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from optimum import SETTINGS, SIZE, SKIPPED, N, format_distance, quadratics
from torch import Tensor

from askew.algorithms import algorithms
from askew.core.rng import coin
from askew.core.types import Client, Cohort, State
from askew.experiment.api import OwnData, OwnNetwork
from askew.experiment.build import BuiltRun, build
from askew.experiment.config import Config
from askew.experiment.run import ActiveRun, train_round
from askew.participation import Turnout

RATES = {0.02: 800, 0.004: 4000}  # local rates, and the steps of the server; the second where the first is not enough
LAST = 50  # steps over whose distances the median is taken
WORSE = 2.0  # times the distance with fresh answers, from which on stale ones are measured again, and are wrong
NEAR = 1e-5  # a distance that is near enough, whatever it is with fresh answers
LOCAL_STEPS = 5
NOT_MEASURED = {*SKIPPED, "moon"}  # MOON's loss needs features, and is all in which it differs from FedAvg
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
        return self.stale > max(WORSE * self.fresh, NEAR) or not math.isfinite(self.stale) or self.gap > NEAR


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


@cache
def schedule(rate: float) -> tuple[BuiltRun, list[Turnout]]:
    """Who begins in each step, and whose answers it uses: the same for all methods, as all answers take as long."""
    built = build(configure("fedavg", quadratics(), rate, CLOCK))
    assert built.clock is not None
    return built, [built.clock.turnout(t) for t in range(1, RATES[rate] + 1)]


class Simulation:
    """A server and ten clients, by the hooks of a method alone."""

    def __init__(self, name: str, rate: float) -> None:
        built, self.turnouts = schedule(rate)
        config = configure(name, quadratics(), rate, {})
        self.alg, self.rate, space = config.algorithm, rate, built.space
        data = quadratics()[0].train
        self.x, self.y = data.x.double().view(N, SIZE, -1), data.y.double().view(N, SIZE)
        self.w, self.parts, self.seed = space.start.double(), self.alg.parts(space), config.seed
        self.state, self.gap = self.alg.server_state(space), math.nan
        self.memory, self.clients = (
            {n: torch.stack([v] * N) for n, v in start.items()}
            for start in (self.alg.memory(space), self.alg.client_state(space))
        )

    def gradient(self, i: int, u: Tensor) -> Tensor:
        """The gradient of client i's loss, half the mean square of its errors."""
        return self.x[i].T @ (self.x[i] @ u - self.y[i]) / SIZE

    def train(self, i: int, round: int) -> tuple[State, State]:
        """The upload and the new state of a client that starts from the newest model."""
        alg, known = self.alg, self.state | {n: rows[i] for n, rows in self.memory.items()}
        number = self.w.new_tensor
        client = Client(
            *(self.w, self.w.new_zeros(0), {n: known[n] for n in alg.broadcast}),
            *({n: rows[i] for n, rows in self.clients.items()}, {}, self.parts),
            *(self.rate, self.rate, 0.0, 0.0, math.inf),
            *(number(float(LOCAL_STEPS)), number(float(LOCAL_STEPS)), number(1.0), number(float(round))),
            number(coin(self.seed, round, i)),
        )
        client = client.carrying(alg.carry(client))
        theta, grad = alg.begin(client), lambda u: self.gradient(i, u)
        if "gradient" in alg.before:
            client = client.carrying({"gradient": grad(theta)})
        for _ in range(LOCAL_STEPS if alg.trains else 0):
            d = alg.direction(theta, grad, client)
            new, _ = alg.descend(theta, d, torch.zeros_like(theta), client)
            client, theta = client.carrying(alg.note(theta, grad(theta), d, client)), new
        if "validation" in alg.after:
            client = client.carrying({"validation": (self.x[i] @ theta - self.y[i]).square().mean() / 2})
        return alg.finish(theta, client)

    def step(self, round: int, ids: Sequence[int], answers: Sequence[tuple[State, State]], ages: list[int]) -> None:
        """The server's step with these answers."""
        rows, ones = list(ids), torch.ones(len(ids), dtype=torch.float64)
        count, memory = LOCAL_STEPS * ones, {n: held[rows] for n, held in self.memory.items()}
        staleness = torch.tensor(ages, dtype=torch.float64)
        cohort = Cohort(ones / len(ids), count, count, ones, ones, None, self.rate, self.rate, round, N, staleness)
        up = {n: torch.stack([sent[n] for sent, _ in answers]) for n in answers[0][0]}
        self.w, new = self.alg.aggregate(self.w, up, cohort, self.state | memory)
        self.state = {n: new[n] for n in self.state}
        for name, held in self.memory.items():
            held[rows] = new[name]
        for name, held in self.clients.items():
            held[rows] = torch.stack([kept[name] for _, kept in answers])

    def distances(self, stale: bool) -> list[float]:
        """The relative distance to the optimum after each step."""
        best, path, waiting, steps = quadratics()[2], list[float](), dict[int, Any](), 0
        for t, turnout in enumerate(self.turnouts, 1):
            assert turnout.used is not None
            ids = [answer.client for answer in turnout.used]
            if stale:
                waiting |= {i: (steps, self.w, self.train(i, t)) for i in turnout.ids.tolist()}
            else:
                waiting = {i: (steps, self.w, self.train(i, t)) for i in ids}
            if ids:
                self.step(t, ids, [waiting[i][2] for i in ids], [steps - waiting[i][0] for i in ids])
                steps += 1
                if "x" in self.memory:  # FedAWE: the new model is the mean of the participants' models
                    mean = torch.stack([waiting[i][1] + waiting[i][2][0]["delta"] for i in ids]).mean(0)
                    self.gap = float((self.w - mean).norm() / self.w.norm())
            path.append(float((self.w - best).norm() / best.norm()))
        return path

    def largest_gap(self) -> float:
        """How far the server's sums are from those of what the clients keep, relative to it; nan if it has none."""
        gaps, banks = [] if math.isnan(self.gap) else [self.gap], {"clients": self.clients, "memory": self.memory}
        for entry, bank, own, factor in SUMS.get(algorithms.name_of(self.alg), []):
            rows = banks[bank][own].double()
            gaps.append(float((self.state[entry] - rows.sum(0) * factor).norm() / rows.norm().clamp(min=1e-300)))
        return max(gaps, default=math.nan)


def measure(name: str, rate: float) -> Measured:
    """The distances of a method with stale and with fresh answers."""
    stale, fresh = Simulation(name, rate), Simulation(name, rate)
    distance = median_of_last(stale.distances(stale=True))
    return Measured(rate, distance, median_of_last(fresh.distances(stale=False)), stale.largest_gap())


def difference_from_run(name: str, rounds: int = 30) -> float:
    """How far the model of a simulation is from that of a run of askew, after some steps."""
    rate = next(iter(RATES))
    built = build(configure(name, quadratics(), rate, CLOCK))
    run, simulation = ActiveRun(built, None, None, math.inf), Simulation(name, rate)
    simulation.turnouts = simulation.turnouts[:rounds]
    simulation.distances(stale=True)
    for _ in range(rounds):
        train_round([run], meanwhile=lambda: None, evaluate=False)
    return float((built.server.w - simulation.w).abs().max())


def median_of_last(distances: list[float]) -> float:
    """The median over the last steps; infinity where it is not finite."""
    value = statistics.median(distances[-LAST:])
    return value if math.isfinite(value) else math.inf


def rows_of(name: str) -> list[Measured]:
    """What was measured of a method: at the first rate, and at the second if it is worse, or does not work, there."""
    rows = []
    for rate in RATES:
        rows.append(measure(name, rate))
        if not rows[-1].is_worse and rows[-1].fresh < 1:  # 1 is the distance at which it began
            break
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    measurable = [name for name in algorithms if name not in NOT_MEASURED]
    parser.add_argument("--only", metavar="NAME", action="append", choices=measurable)
    parser.add_argument("--check", metavar="NAME", action="append", choices=measurable, default=[])
    parser.add_argument("--write", action="store_true", help="write docs/asynchrony.md")
    options = parser.parse_args()
    if options.write and options.only:
        parser.error("--write needs the rows of all methods; leave out --only.")
    torch.set_num_threads(1)
    for name in algorithms:  # what is refused is measured too
        algorithms[name].stale = ""
    for name in options.check:
        print(f"{name:12} differs from a run by {difference_from_run(name):.1e}")
    results = {}
    for name in [] if options.check else options.only or measurable:
        results[name] = rows_of(name)
        print(f"{name:12} {'; '.join(map(in_words, results[name]))}", flush=True)
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
        sound = "yes, to another point" if hasattr(algorithms[name], "staleness") else "yes"
        lines.append(f"| `{name}` | {'no' if rows[-1].is_worse else sound} | {'; '.join(map(in_words, rows))} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
