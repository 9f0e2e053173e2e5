"""An experiment's results beside the numbers that the paper prints."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from statistics import fmean
from typing import NamedTuple

from ..core.records import TIMES
from ..experiment.curves import rounds_to
from ..report.tables import sample_std
from .evidence import metric_value
from .papers import papers_folder
from .plan import TIME_METRIC, MethodKey, Reproduction, chosen_points, runs_by_method
from .planned_runs import PlannedRun, hyper_text
from .printed import PrintedNumber, printed_by_key, read_printed
from .run_metrics import HELD_OUT, curve_to, parse_curve

COST_METRICS = (TIME_METRIC, "bytes_up", "bytes_down", *TIMES)  # shown by an experiment about cost

Groups = Mapping[MethodKey, Sequence[PlannedRun]]


class TableCell(NamedTuple):
    """One metric of one method in one case: our values by seed, and the paper's number."""

    case: str
    method: str
    hyper: str  # the grid point
    metric: str
    seeds: list[int]
    values: list[float]  # accuracies in percent; infinite: the target was not reached
    limit: int  # rounds of the run
    printed: PrintedNumber | None
    held_out: list[float]  # by seed: measured on one half of the test set, at the point that the other half chose
    held_out_hyper: str  # that point

    @property
    def mean(self) -> float:
        return fmean(self.values)

    @property
    def std(self) -> float | None:
        """The sample standard deviation; None of one value, and where a target was not reached."""
        return sample_std(self.values) if math.isfinite(self.mean) else None

    @property
    def difference(self) -> float | None:
        """Our mean less the paper's number; None where one of them is not a number."""
        with suppress(ValueError):
            if self.printed and math.isfinite(self.mean):
                return self.mean - float(self.printed.value)
        return None


def table_cells(reproduction: Reproduction) -> list[TableCell]:
    """A cell for every case, method and metric that was measured; for every grid point where nothing is chosen."""
    e, groups = reproduction.experiment, runs_by_method(reproduction.planned)
    printed = printed_by_key(read_printed(papers_folder() / e.paper))
    printed_metrics = [number.metric for number in printed.values() if number.experiment == e.id]
    metrics = dict.fromkeys([e.metric, *(COST_METRICS if e.shows == "cost" else ()), *printed_metrics])
    chosen, cells = chosen_points(reproduction, reproduction.planned), list[TableCell]()
    for key, runs in groups.items():
        _, case, method = key
        by_hyper: dict[str, list[PlannedRun]] = {}
        for p in runs:
            by_hyper.setdefault(hyper_text(p.hyper), []).append(p)
        points = [(hyper, hyper) for hyper in by_hyper]  # each with the one that is measured on held-out samples
        if key in chosen:
            picked = [hyper_text(hyper) for hyper in chosen[key]]
            points = [(picked[0], picked[-1])] if picked else []
        for hyper, held_out_hyper in points:
            for metric in metrics:
                values = run_values(reproduction, groups, by_hyper[hyper], metric)
                if not values:
                    continue
                names = (method, f"{method} @ {hyper}")  # the latter of one point of a grid
                numbers = [printed[at] for name in names if (at := (e.id, case, name, metric)) in printed]
                held_out = dict[int, float]()
                if metric in HELD_OUT:
                    held_out = run_values(reproduction, groups, by_hyper[held_out_hyper], HELD_OUT[metric][1])
                cells.append(
                    TableCell(
                        case,
                        method,
                        hyper,
                        metric,
                        seeds=list(values),
                        values=list(values.values()),
                        limit=by_hyper[hyper][0].config.rounds,
                        printed=numbers[0] if numbers else None,
                        held_out=list(held_out.values()),
                        held_out_hyper=held_out_hyper,
                    )
                )
    return cells


def run_values(reproduction: Reproduction, groups: Groups, runs: Sequence[PlannedRun], metric: str) -> dict[int, float]:
    """A metric of runs by seed, where it was measured."""
    values = {p.seed: run_value(reproduction, groups, p, metric) for p in runs}
    return {seed: value for seed, value in values.items() if value is not None}


def run_value(reproduction: Reproduction, groups: Groups, planned: PlannedRun, metric: str) -> float | None:
    """A metric of one run, accuracies in percent; None if it was not measured, inf if a target was not reached."""
    metrics = reproduction.metrics_of(planned)
    if not metrics:
        return None
    if metric == "rounds_to":
        target = target_accuracy(reproduction, groups, planned)
        curve = None if target is None else curve_to(metrics, target)
        if target is None or curve is None:
            return None
        reached = rounds_to(*parse_curve(curve), target)
        return math.inf if reached is None else float(reached)
    if metric == "speedup":
        baseline = groups.get((planned.experiment, planned.case, "FedAvg"), ())
        base = [run_value(reproduction, groups, b, "rounds_to") for b in baseline if b.seed == planned.seed]
        ours = run_value(reproduction, groups, planned, "rounds_to")
        limit = planned.config.rounds  # which stands for a target that was not reached
        return min(base[0], limit) / min(ours, limit) if base and base[0] and ours else None
    value = metric_value(metrics, metric)
    return value if isinstance(value, float) else None


def target_accuracy(reproduction: Reproduction, groups: Groups, planned: PlannedRun) -> float | None:
    """The accuracy to reach, as a fraction: given, or a method's best or last one of the same case and seed."""
    target = reproduction.experiment.target
    if not isinstance(target, str):
        return target
    name, _, which = target.partition(" ")
    for base in groups.get((planned.experiment, planned.case, name), ()):
        if base.seed == planned.seed and (metrics := reproduction.metrics_of(base)):
            values = parse_curve(metrics.get("accuracy", ""))[1]
            return None if not values else values[-1] if which == "last" else max(values)
    return None
