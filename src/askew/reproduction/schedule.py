"""Which runs are trained next and how many at a time, so that results come every few minutes and within a given time.

Runs are given out in parts. The runs of a part are trained side by side in one process, and their results come when it
ends. The rule for the size of a part on a GPU:

- as many runs of one network (with several processes: of one method) as end within PART_SECONDS, by the pace measured
  for like runs in this call or, before there is one, by the speeds of stored results;
- but at least so many that FEWEST_RUNS are trained at a time by all processes, as fewer leave a GPU idle;
- no more than memory and TOGETHER allow;
- runs of one method stay together, as the clients of all of them are trained as one batch. Methods have streams of
  their own, so a part may have several; STACKED_RUNS of whole methods are enough.

On a CPU a part is one run. Where there is a deadline, a part must be expected to end before it; otherwise a smaller
part, another method or the next experiment is looked at.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch

from ..core.records import Record
from ..experiment.build import device_of
from ..experiment.config import Config
from ..experiment.launch import TOGETHER
from ..experiment.store import Run
from .cost import Speeds, estimate_memory, estimate_seconds, network_name, run_cost, training_speeds
from .plan import Reproduction
from .planned_runs import PlannedRun
from .results import RunKey, read_results

PART_SECONDS = 150.0  # seconds after which a part's results should be there
FEWEST_RUNS = 8  # runs that a GPU trains at a time at least, as far as there are so many
STACKED_RUNS = 6  # runs of whole methods that are enough for a part, though it could be larger
FIRST_RUNS = 4  # runs of a first part, where it is unknown how long it takes
START_SECONDS = 15.0  # seconds from giving out a part to its first round, until they are measured
SAFETY = 1.15  # times as long as expected, a part must still end in time
MEASURED_ROUNDS = 4  # rounds of a part after which its pace is believed
JUDGED_SECONDS = 15.0  # seconds after its first round from which on a part may be stopped, as it takes too long
MEMORY_SHARE = 0.4  # of a GPU's memory that uploads and states may take; activations need the rest


@dataclass
class ScheduledExperiment:
    """An experiment of a schedule: what it still waits for, what is being trained, and what came of it."""

    reproduction: Reproduction
    most: int = 10**6  # parts of it that are trained at a time
    waiting: list[PlannedRun] = field(default_factory=list)
    parts: list[TrainedPart] = field(default_factory=list)  # that are being trained
    training: set[RunKey] = field(default_factory=set)  # its runs that are being trained, also for another experiment
    ended: int = 0  # runs of it that ended
    refilled: int = 0  # how many had ended when its plan was last looked at
    stored: int = 0  # runs that were stored before
    done: int = 0  # runs that were trained by this schedule
    lost: list[PlannedRun] = field(default_factory=list)  # given up
    too_long: list[PlannedRun] = field(default_factory=list)  # stopped, as they would not have ended in time
    seconds: float = 0.0  # of its parts that ended
    problem: str = ""  # why it cannot be trained here

    @property
    def spent(self) -> float:
        """Seconds of its parts, also of those that have not ended."""
        return self.seconds + sum(time.monotonic() - part.began for part in self.parts)

    @property
    def left(self) -> int:
        """Runs that are still to be made."""
        return len(self.reproduction.missing)


@dataclass
class TrainedPart:
    """Runs that are trained side by side, and how far they are."""

    experiment: ScheduledExperiment
    runs: list[PlannedRun]
    began: float  # time when it was given out
    first: float = 0.0  # time of its first record
    last: float = 0.0  # time of its last record
    rounds: dict[str, int] = field(default_factory=dict)  # how far each run is, by name
    too_slow: bool = False  # whether it was stopped, as it would not have ended in time
    records: int = 0  # rounds that were trained since its first record
    weight: float = 0.0  # what was trained since its first record, as RunCost.weight

    @cached_property
    def names(self) -> set[str]:
        """Names of the runs that have not ended."""
        return {p.config.name() for p in self.runs}

    @cached_property
    def levels(self) -> list[Hashable]:
        return levels(self.runs[0])

    @property
    def is_measured(self) -> bool:
        """Whether its pace is known."""
        return self.records >= MEASURED_ROUNDS * len(self.runs) and self.last > self.first

    @property
    def pace(self) -> float:
        """Seconds for one unit of weight."""
        return (self.last - self.first) / self.weight

    @property
    def start_seconds(self) -> float:
        return self.first - self.began

    @property
    def total_rounds(self) -> int:
        return sum(p.config.rounds for p in self.runs)

    @property
    def rounds_per_second(self) -> float:
        """Rounds of its runs in a second; 0 while it is not known."""
        return self.records / (self.last - self.first) if self.last > self.first else 0.0


class BegunRun(NamedTuple):
    """A run that was given out."""

    planned: PlannedRun
    part: TrainedPart
    weight: float  # of a round


class ExpectedTimes(NamedTuple):
    """How long a part is expected to take, in seconds."""

    usual: float  # while all processes are at work
    until_end: float  # if nothing else begins


class RunSchedule:
    """Gives out parts of the runs of experiments, in their order, and measures how fast they are trained."""

    def __init__(
        self,
        experiments: Sequence[ScheduledExperiment],
        results: str | Path,
        processes: int = 1,
        alone: bool = False,
        deadline: float = math.inf,
        refill: Callable[[ScheduledExperiment], None] = lambda experiment: None,
    ) -> None:
        """`deadline` is a time of time.monotonic(); `refill` is called when all planned runs of an experiment ended."""
        self.experiments, self.processes, self.alone = experiments, processes, alone
        self.results, self.deadline, self.refill = results, deadline, refill
        self.begun: dict[str, BegunRun] = {}  # by name
        self.measured: dict[Hashable, TrainedPart] = {}  # the last part with a pace, by what its runs have in common
        self.weights: dict[RunKey, float] = {}  # of runs, once computed
        self.seconds: dict[RunKey, float | None] = {}  # of runs on a full device, by stored results, once computed
        self.stopped = set[RunKey]()  # runs of parts that were stopped, as these would not have ended in time
        self.device, self.began = device_of("auto"), time.monotonic()
        self.changed = True  # since nothing could be given out

    # giving out

    def parts(self) -> Iterator[Sequence[Config]]:
        """The parts as they are asked for; an empty one while nothing can begin before something else has ended."""
        while True:
            part = self.next_part() if self.changed else None
            if part is None and not any(e.parts for e in self.experiments):
                return
            self.changed = part is not None
            yield [p.config for p in part.runs] if part else []

    def next_part(self) -> TrainedPart | None:
        """The first part, in the order of the experiments, that can be trained now and will end in time."""
        for experiment in self.experiments:
            if not experiment.waiting and not experiment.training and experiment.ended > experiment.refilled:
                experiment.refilled = experiment.ended
                self.refill(experiment)
            if len(experiment.parts) < experiment.most:
                for runs in self.kinds(experiment.waiting):
                    if chosen := self.cut_part(runs):
                        return self.begin(experiment, chosen)
        return None

    def begin(self, experiment: ScheduledExperiment, runs: list[PlannedRun]) -> TrainedPart:
        """Note that these runs are being trained."""
        part = TrainedPart(experiment, runs, time.monotonic())
        experiment.parts.append(part)
        begun = {p.key for p in runs}
        for each in self.experiments:  # others may plan the same run
            each.training |= {p.key for p in each.waiting} & begun
            each.waiting = [p for p in each.waiting if p.key not in begun]
        for p in runs:
            self.begun[p.config.name()] = BegunRun(p, part, self.weight(p) / p.config.rounds)
        return part

    def kinds(self, planned: Sequence[PlannedRun]) -> list[list[PlannedRun]]:
        """Runs that may form a part, those that take longest first."""
        kinds = dict[Hashable, list[PlannedRun]]()
        for n, p in enumerate(planned):
            kind: Hashable = n
            if self.device.type == "cuda" and not self.alone:
                kind = (type(p.config.algorithm) if self.processes > 1 else None, p.config.model, p.config.engine)
            kinds.setdefault(kind, []).append(p)
        if self.processes == 1:
            return [by_method(kind) for kind in kinds.values()]
        return sorted(kinds.values(), key=lambda kind: -sum(map(self.weight, kind)))

    def weight(self, planned: PlannedRun) -> float:
        """What a run costs, in trained samples."""
        if planned.key not in self.weights:
            self.weights[planned.key] = run_cost(planned.config).weight
        return self.weights[planned.key]

    def cut_part(self, runs: Sequence[PlannedRun]) -> list[PlannedRun]:
        """The first of these runs, as many as the rule of this module says; none if they would not end in time."""
        left = (self.deadline - time.monotonic()) / SAFETY
        fewest = -(-FEWEST_RUNS // self.processes)
        room = MEMORY_SHARE * torch.cuda.mem_get_info()[1] / self.processes if self.device.type == "cuda" else math.inf
        most, used = 0, 0.0
        for n, p in enumerate(runs[:TOGETHER], 1):
            used += estimate_memory(p.config) if math.isfinite(room) else 0
            expected = self.expected_times(runs[:n])
            if expected is None:  # unknown: a few are tried in the first half of the time
                too_many, too_late = n > FIRST_RUNS, left < (self.deadline - self.began) / 2
            else:
                too_many, too_late = n > fewest and expected.usual > PART_SECONDS, expected.until_end > left
            if too_late or (n > 1 and (too_many or used > room)):
                break
            most = n
        return list(runs[: whole_methods(runs, most)])

    # what was measured

    def on_round(self, run: Run, record: Record | None) -> None:
        """Take in the start or a round of a run."""
        _, part, weight = self.begun[run.name]
        now, part.rounds[run.name] = time.monotonic(), len(run.rounds)
        if record is None:
            return
        if not part.first:
            part.first = now
            return
        part.last, part.records, part.weight = now, part.records + 1, part.weight + weight
        if part.is_measured:
            for level in part.levels:
                self.measured[level] = part

    def on_end(self, run: Run) -> None:
        """Take in that a run has ended."""
        self.begun[run.name].part.experiment.done += 1
        self.end_run(run.name)

    def end_run(self, name: str) -> None:
        """Take a run out of what is being trained, and its part if it was the last one."""
        planned, part, _ = self.begun[name]
        part.names.discard(name)
        for experiment in self.experiments:
            if planned.key in experiment.training:
                experiment.training.discard(planned.key)
                experiment.ended += 1
        if not part.names and part in part.experiment.parts:
            part.experiment.parts.remove(part)
            part.experiment.seconds += time.monotonic() - part.began
            self.changed = True

    def on_loss(self, configs: Sequence[Config]) -> None:
        """Take in that runs were lost with their processes, failed or were stopped."""
        for name in [config.name() for config in configs]:
            planned, part, _ = self.begun[name]
            experiment = part.experiment
            if experiment.reproduction.is_done(planned):  # it ended while others of its part had not
                experiment.done += 1
            elif part.too_slow and len(part.runs) > 1 and planned.key not in self.stopped:
                self.stopped.add(planned.key)
                experiment.waiting.append(planned)  # fewer runs may end in time, now that their pace is known
            else:
                (experiment.too_long if part.too_slow else experiment.lost).append(planned)
            self.end_run(name)

    def note_if_too_slow(self, configs: Sequence[Config]) -> bool:
        """Note whether the part of these runs will miss the deadline at its pace so far, and return it: others may
        then use its time.
        """
        part = self.begun[configs[0].name()].part
        if math.isfinite(self.deadline) and part.is_measured and part.last - part.first > JUDGED_SECONDS:
            part.too_slow = part.last + 0.95 * self.weight_left(part) * part.pace > self.deadline
        return part.too_slow

    # what is expected

    def expected_times(self, runs: Sequence[PlannedRun]) -> ExpectedTimes | None:
        """How long a part will take: by like runs of this call, else by stored results; None if neither is known.

        Of a part with fewer runs than the measured one half of its time is taken to be the same. Stored speeds are
        those of a full device, which all processes share.
        """
        for level in levels(runs[0]):
            if part := self.measured.get(level):
                fewer = max(1.0, (1 + len(part.runs) / len(runs)) / 2)
                seconds = part.start_seconds + fewer * sum(map(self.weight, runs)) * part.pace
                return ExpectedTimes(seconds, seconds)
        own = self.stored_seconds(runs)
        if own is None:
            return None
        others = sum(self.device_seconds_left(part) for e in self.experiments for part in e.parts)
        return ExpectedTimes(START_SECONDS + own * self.processes, START_SECONDS + own + others)

    def weight_left(self, part: TrainedPart) -> float:
        """What the rounds that a part still has to do cost, in trained samples; a resumed run begins with some done."""
        shares = [(p, part.rounds.get(p.config.name(), 0) / p.config.rounds) for p in part.runs]
        return sum(self.weight(p) * max(0.0, 1 - done) for p, done in shares)

    def stored_seconds(self, runs: Sequence[PlannedRun]) -> float | None:
        """How long a full device takes for runs, by the speeds of stored results; None if there are none."""
        for p in runs:
            if p.key not in self.seconds:
                self.seconds[p.key] = estimate_seconds([p.config], self.device_name, self.speeds)
        known = [s for p in runs if (s := self.seconds[p.key]) is not None]
        return sum(known) if len(known) == len(runs) else None

    def device_seconds_left(self, part: TrainedPart) -> float:
        """How much of the device's time a part still needs."""
        if part.is_measured:
            return self.weight_left(part) * part.pace / sum(len(e.parts) for e in self.experiments)
        return self.stored_seconds(part.runs) or PART_SECONDS

    @cached_property
    def device_name(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"

    @cached_property
    def speeds(self) -> Speeds:
        return training_speeds(read_results(self.results, leave_out=True))


def by_method(runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    """Runs of one method next to each other; the methods, and the runs of each, in their order."""
    methods = dict[type, list[PlannedRun]]()
    for p in runs:
        methods.setdefault(type(p.config.algorithm), []).append(p)
    return [p for method in methods.values() for p in method]


def whole_methods(runs: Sequence[PlannedRun], most: int) -> int:
    """How many of at most so many first runs to take, so that runs of one method are not parted without need.

    A method with more runs than `most` is cut into equal parts. One that would be cut at the end waits for the next
    part, if those before it are enough to fill a device.
    """
    kinds = [type(p.config.algorithm) for p in runs]
    if most == 0 or most >= len(runs):
        return most
    first = next((n for n, kind in enumerate(kinds) if kind is not kinds[0]), len(runs))
    if first > most:
        return -(-first // -(-first // most))
    end = max(n for n in range(most + 1) if n and kinds[n] is not kinds[n - 1])
    return end if end >= STACKED_RUNS else most


def levels(planned: PlannedRun) -> list[Hashable]:
    """What a run has in common with like runs, from the most to the least alike."""
    config = planned.config
    case = planned.experiment, planned.case, config.engine
    return [(*case, planned.method), case, (network_name(config), config.engine)]
