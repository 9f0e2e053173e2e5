"""What there is to do for an experiment: its runs, those that are stored already, and the grid points to repeat."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..engine.settings import EngineSettings
from ..errors import ConfigError
from ..experiment.config import Config
from ..experiment.store import Run
from .evidence import GridPoint, choice_rules, choose_point
from .papers import Experiment, Hyper, find_experiment
from .planned_runs import PlannedRun, hyper_text, plan_runs
from .prune_curves import is_pruned, runs_with_used_curves
from .results import RunKey, metrics_by_run, read_results
from .run_metrics import Metrics, curve_to, was_stopped

TIME_METRIC = "seconds_per_round"  # of runs that had the device for themselves

MethodKey = tuple[str, str, str]  # experiment, case and method


@dataclass
class Reproduction:
    """The runs of an experiment and what is known of them."""

    experiment: Experiment
    scale: str
    only: tuple[str, ...]  # as `askew reproduce --only`
    seeds: int | None  # how many, 0 to N − 1; None: as published
    engine: EngineSettings | None  # None: the experiment's own
    runs: dict[RunKey, dict[str, str]]  # stored metrics
    planned: list[PlannedRun] = field(default_factory=list)
    alone: bool = False  # one run at a time, so that rounds can be timed
    stop_at_target: bool = False  # runs end where they reach the accuracy up to which rounds are counted
    all_rounds: bool = False  # runs that were stopped there go on to their last round
    unfinished: Run | None = None  # the run that was stopped
    lost: Sequence[PlannedRun] = ()  # runs that were given up with the processes that trained them
    need_curve: frozenset[RunKey] = frozenset()  # runs whose curve was pruned and is used after all

    def metrics_of(self, planned: PlannedRun) -> Metrics | None:
        """The stored metrics of a run; None if it was not run, or without a metric that this experiment needs."""
        metrics, target = self.runs.get(planned.key), self.experiment.accuracy_to_reach
        too_short = self.all_rounds or target is None or (metrics and curve_to(metrics, target) is None)
        if metrics and was_stopped(metrics) and too_short:
            return None
        needed = [self.experiment.metric] * (self.experiment.shows == "coverage") + [TIME_METRIC] * self.alone
        return metrics if metrics and all(metric in metrics for metric in needed) else None

    def is_done(self, planned: PlannedRun) -> bool:
        """Whether a run is stored with everything that this experiment needs."""
        metrics = self.metrics_of(planned)
        return metrics is not None and not (planned.key in self.need_curve and is_pruned(metrics, planned.curves))

    @property
    def missing(self) -> list[PlannedRun]:
        """Runs still to train, each once."""
        return list({p.key: p for p in self.planned if not self.is_done(p)}.values())

    def update_plan(self) -> None:
        """Plan all runs as far as they are known.

        Further seeds of what is tuned are planned only at the points that the first seed chose.
        """
        whole = plan_runs(self.experiment, self.scale, self.seeds, self.only)
        chosen = chosen_points(self, whole)
        self.planned = []
        for p in whole:
            points = chosen.get((p.experiment, p.case, p.method))
            if points is None or p.seed == whole[0].seed or p.hyper in points:
                self.planned.append(p._replace(config=self.adapt(p.config)))
        pruned = {p.key for p in self.planned if is_pruned(self.metrics_of(p) or {}, p.curves)}
        used = runs_with_used_curves(self.experiment, self.runs, self.scale) if pruned else set()
        self.need_curve = frozenset(pruned & used)

    def adapt(self, config: Config) -> Config:
        """The configuration with the chosen engine, and stopped at the target if asked for."""
        config = replace(config, engine=self.engine) if self.engine else config
        if self.alone and config.engine.workers == 0:  # timed: no other process may take over clients on the way
            config = replace(config, engine=replace(config.engine, workers=1))
        target = self.experiment.accuracy_to_reach if self.stop_at_target else None
        return replace(config, evaluation=replace(config.evaluation, stop_at=target)) if target else config


def prepare_reproduction(
    id: str,
    scale: str = "full",
    only: Iterable[str] = (),
    seeds: int | None = None,
    results: str | Path = "results",
    engine: EngineSettings | None = None,
    alone: bool = False,
    runs: dict[RunKey, dict[str, str]] | None = None,
    stop_at_target: bool = False,
    all_rounds: bool = False,
) -> Reproduction:
    """Plan an experiment and look up which of its runs are stored in the folder of results.

    `runs` are the metrics that are stored there, where they are known already.
    """
    experiment = find_experiment(id)
    runs = metrics_by_run(read_results(results)) if runs is None else runs
    alone = alone or experiment.shows == "cost"
    if stop_at_target and experiment.accuracy_to_reach is None:
        raise ConfigError(
            f"reproduce: --stop-at-target is for experiments that count the rounds to a given accuracy, and {id} does "
            "not; leave it out."
        )
    if stop_at_target and all_rounds:
        raise ConfigError("reproduce: --stop-at-target and --all-rounds do not go together; give one of them.")
    chosen = (experiment, scale, tuple(only), seeds, engine, runs)
    reproduction = Reproduction(*chosen, alone=alone, stop_at_target=stop_at_target, all_rounds=all_rounds)
    reproduction.update_plan()
    return reproduction


def runs_by_method(planned: Iterable[PlannedRun]) -> dict[MethodKey, list[PlannedRun]]:
    """The runs by experiment, case and method."""
    groups: dict[MethodKey, list[PlannedRun]] = {}
    for p in planned:
        groups.setdefault((p.experiment, p.case, p.method), []).append(p)
    return groups


def chosen_points(reproduction: Reproduction, planned: Sequence[PlannedRun]) -> dict[MethodKey, list[Hyper]]:
    """Of every case and method that is tuned, the chosen grid points: by the paper's rule and by half of the test set.

    Both are chosen by the first seed; the list is empty while its grid is not finished.
    """
    tuned: dict[MethodKey, list[Hyper]] = {}
    experiment = reproduction.experiment
    for key, runs in runs_by_method(planned).items():
        choose = experiment.choose if key[0] == experiment.id else find_experiment(key[0]).choose
        if not choose or len({hyper_text(p.hyper) for p in runs}) < 2:
            continue
        first = planned[0].seed
        grid = [p for p in runs if p.seed == first]
        points = [
            GridPoint(p.hyper, {first: m}, {first: p.digest}, {}) for p in grid if (m := reproduction.metrics_of(p))
        ]
        rules = choice_rules(choose) if len(points) == len(grid) else []
        tuned[key] = [point.hyper for rule in rules if (point := choose_point(points, rule, [first]))]
    return tuned
