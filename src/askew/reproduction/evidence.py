"""What was measured at one scale, by experiment, case, method and grid point; and the choice of grid points."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np

from .digests import seed_digests
from .expressions import RecordedCurve, Term, Value
from .papers import CURVES, Experiment, Hyper
from .planned_runs import hyper_text, plan_runs
from .results import RunMetrics
from .run_metrics import HELD_OUT, TO_TARGET, Metrics, parse_curve, was_stopped

CellKey = tuple[str, str]  # case and method


class GridPoint(NamedTuple):
    """One grid point of a case and method: the metrics and digests of its runs by seed, as far as they were run."""

    hyper: Hyper
    runs: dict[int, Metrics]
    digests: dict[int, str]
    stopped: dict[int, str]  # digests of runs that were stopped at an accuracy, which are not among the others


class Evidence:
    """Results at one scale. They are found by their configurations: experiments that plan the same run share it."""

    def __init__(self, known: Mapping[str, Experiment], runs: RunMetrics, scale: str) -> None:
        self.known, self.scale = known, scale
        self.runs = {key: metrics for key, metrics in runs.items() if not was_stopped(metrics)}
        self.stopped = {key: metrics for key, metrics in runs.items() if key not in self.runs}
        self.seeds = sorted({seed for _, seed in runs})
        self.found: dict[str, dict[CellKey, list[GridPoint]]] = {}  # by experiment, once looked up
        self.values: dict[tuple[str, Term, bool], dict[int, Value]] = {}  # of terms, which several rules name

    def points(self, experiment: str) -> dict[CellKey, list[GridPoint]]:
        """The grid points of every case and method of an experiment, with what was measured."""
        if experiment not in self.found:
            self.found[experiment] = self.look_up(self.known[experiment]) if self.seeds else {}
        return self.found[experiment]

    def look_up(self, e: Experiment) -> dict[CellKey, list[GridPoint]]:
        """As `points`, computed."""
        if e.runs:
            return {key: points for owner in e.runs for key, points in self.points(owner).items() if e.includes(*key)}
        found: dict[CellKey, list[GridPoint]] = {}
        for planned in plan_runs(e, self.scale, self.seeds[:1]):
            digests = seed_digests(planned.config, self.seeds)
            stopped = {seed: digest for seed, digest in digests.items() if (digest, seed) in self.stopped}
            digests = {seed: digest for seed, digest in digests.items() if (digest, seed) in self.runs}
            runs: dict[int, Metrics] = {seed: self.runs[digest, seed] for seed, digest in digests.items()}
            point = GridPoint(planned.hyper, runs, digests, stopped)
            found.setdefault((planned.case, planned.method), []).append(point)
        return found

    def points_of(self, experiment: str, case: str, method: str, hyper: str = "") -> list[GridPoint]:
        """The grid points of one case and method; `hyper` narrows them to those with these settings."""
        wanted = set(hyper.split())
        points = self.points(experiment).get((case, method), [])
        return [p for p in points if wanted <= set(hyper_text(p.hyper).split())]

    def tuned_point(
        self, experiment: str, points: Sequence[GridPoint], without: int | None = None, by: Sequence[str] = ()
    ) -> GridPoint | None:
        """The grid point with the best mean over the seeds at which all points were run.

        Best by the experiment's rule, or `by` other metrics; `without` leaves one seed out. None where no seed has the
        whole grid, and where the whole grid is the result.
        """
        if len(points) == 1:
            return points[0]
        rule = by or self.known[experiment].choose
        return choose_point(points, rule, [s for s in self.tuning_seeds(points) if s != without]) if rule else None

    def tuning_seeds(self, points: Sequence[GridPoint]) -> list[int]:
        """The seeds at which a whole grid was run."""
        return [s for s in self.seeds if points and all(s in p.runs for p in points)]

    def term_values(self, experiment: str, t: Term, blind: bool = True) -> dict[int, Value]:
        """The values of a term by seed.

        Blind, a tuned point is chosen on other seeds than the one it is tested at; otherwise on all, as papers do.
        """
        key = experiment, t, blind
        if key not in self.values:
            self.values[key] = self.compute_values(*key)
        return self.values[key]

    def compute_values(self, experiment: str, t: Term, blind: bool) -> dict[int, Value]:
        """As `term_values`, computed."""
        points, found = self.points_of(experiment, t.case, t.method, t.hyper), dict[int, Value]()
        for seed in self.seeds:
            point = self.tuned_point(experiment, points, without=seed if blind else None)
            metrics = point.runs.get(seed, {}) if point else {}
            if point and t.metric == TO_TARGET and seed in point.stopped:
                metrics = self.stopped[point.stopped[seed], seed]
            value = metric_value(metrics, t.metric)
            if isinstance(value, RecordedCurve):
                found[seed] = value._replace(values=t.sign * value.values)
            elif value is not None:
                found[seed] = t.sign * value
        return found


def metric_value(metrics: Metrics, metric: str) -> Value | None:
    """A metric of a run: accuracies in percent, a curve where several values are stored; None if it is not there."""
    stopped = metric == TO_TARGET and was_stopped(metrics)
    metric = "accuracy" if metric == TO_TARGET and not stopped else metric
    if metric not in metrics:
        return None
    text, unit = metrics[metric], 100.0 if "accuracy" in metric else 1.0
    if metric in CURVES or stopped or " " in text or ":" in text:
        at, values = parse_curve(text)
        return RecordedCurve(np.array(at), unit * np.array(values), stopped) if at else None
    return unit * float(text)


# choosing -------------------------------------------------------------------------------------------------------


def choice_rules(choose: Sequence[str]) -> list[tuple[str, ...]]:
    """The rules by which a grid point is chosen: the paper's, and the same on one half of the test set."""
    if not choose:
        return []
    held_out = [(HELD_OUT[choose[0]][0], *choose[1:])] if choose[0] in HELD_OUT else []
    return [tuple(choose), *held_out]


def choose_point(points: Sequence[GridPoint], rule: Sequence[str], seeds: Iterable[int]) -> GridPoint | None:
    """The point with the best mean over these seeds, at which all points were run.

    Best is the highest first metric of the rule ("-…": the lowest), ties are broken by the next. None without a seed,
    and where the first metric was not measured.
    """
    seeds = list(seeds)
    first = rule[0].removeprefix("-")
    if not points or not seeds or any(first not in p.runs[s] for p in points for s in seeds):
        return None
    return max(points, key=lambda p: [choice_score(p, metric, seeds) for metric in rule])


def choice_score(point: GridPoint, metric: str, seeds: Iterable[int]) -> float:
    """A metric's mean over seeds, negated if it begins with "-"; −inf where it was not measured."""
    values = [metric_value(point.runs[s], metric.removeprefix("-")) for s in seeds]
    numbers = [v for v in values if isinstance(v, float)]
    if not numbers:
        return -math.inf
    return -fmean(numbers) if metric.startswith("-") else fmean(numbers)
