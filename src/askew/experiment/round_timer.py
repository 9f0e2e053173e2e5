"""How long the rounds of different methods take on this machine, measured while a few of each are trained."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import mean, median
from typing import NamedTuple

from ..core.records import Record
from .halving import Cost
from .store import Run

LEAST_SECONDS = 1e-6  # of a round; clocks know no less
STEPS = 4  # the cheapest round's parts in which costs are counted: times are not known better


class Moment(NamedTuple):
    """When something happened, by the clock and by the processor's time of this process."""

    wall: float
    cpu: float


class RoundTimer:
    """Notes when runs were built and when their rounds ended; it is called as `watch` is."""

    def __init__(self) -> None:
        self.latest = time.monotonic()  # when something was noted last
        self.starts: list[float] = []  # seconds from what was noted before to a run's first round: its building
        self.moments: dict[str, list[Moment]] = {}  # by run: when it had been built, and when its rounds ended

    def __call__(self, run: Run, record: Record | None) -> None:
        now = time.monotonic()
        if record is None:
            self.starts.append(now - self.latest)
        self.moments.setdefault(run.name, []).append(Moment(now, time.process_time()))
        self.latest = now

    def costs(self, runs: Mapping[str, Sequence[Run]], processes: int = 1) -> dict[str, Cost]:
        """The seconds of a round and of a run's start, from runs of each method.

        On a machine that is busy with other things the shortest round shows best which method takes longer, and the
        mean of all how long to wait. Where one process trains on a CPU, its processor time shows it better still.
        """
        every = [run for its in runs.values() for run in its]
        alone = processes == 1 and all(
            run.facts.get("device") == "cpu" and run.facts.get("workers", 1) == 1 for run in every
        )
        walls = {name: [step.wall for run in its for step in self.steps(run)] for name, its in runs.items()}
        cpus = {name: [step.cpu for run in its for step in self.steps(run)] for name, its in runs.items()}
        least = {name: min(its) for name, its in (cpus if alone else walls).items()}
        cheapest = min(least.values())
        relative = {name: max(STEPS, round(STEPS * value / cheapest)) / STEPS for name, value in least.items()}
        unit = mean(map(mean, walls.values())) / mean(relative.values()) / processes
        start = median(self.starts) / processes if self.starts else 0.0
        return {name: Cost(unit * value, start) for name, value in relative.items()}

    def steps(self, run: Run) -> list[Moment]:
        """What the rounds of a run took, without the first, which warms up, and without the runs beside it."""
        beside, moments = int(run.facts.get("together", 1)), self.moments.get(run.name, [])[1:]
        steps = [
            Moment(*(max(LEAST_SECONDS, (b - a) / beside) for a, b in zip(one, two, strict=True)))
            for one, two in pairwise(moments)
        ]
        known = run.seconds_per_round or LEAST_SECONDS
        return steps or [Moment(known, known)]
