"""Which curves stay in results/: where a grid is tuned, those of the points that some rule chose.

No table, figure or claim reads the other points' curves, and they would be most of the files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from ..experiment.folder_lock import wait_for_folder
from .evidence import Evidence, choice_rules, choose_point
from .papers import CURVES, Experiment, experiments, find_experiment
from .planned_runs import hyper_text
from .results import (
    RunKey,
    RunMetrics,
    metrics_by_run,
    read_results,
    read_results_file,
    results_file,
    write_results_file,
)
from .run_metrics import Metrics

# A metric that is read off a curve, by the curve: where it is there and the curve is not, the curve was pruned.
CURVE_METRICS = {"accuracy": "best_accuracy", "loss": "last_loss", "train_loss": "best_train_loss"}


def is_pruned(metrics: Metrics, curves: Iterable[str]) -> bool:
    """Whether some of these curves of a run was pruned."""
    return any(curve not in metrics and CURVE_METRICS.get(curve, f"mean_{curve}") in metrics for curve in curves)


def curve_uses(evidence: Evidence, id: str) -> Iterator[tuple[RunKey, bool | None]]:
    """Of every run of an experiment that is stored: whether its curve is used; None while its grid is not finished.

    A point is chosen on the first seed, on all that have the whole grid, or on all but the one it is tested at.
    """
    for points in evidence.points(id).values():
        tuning, rules = evidence.tuning_seeds(points), choice_rules(evidence.known[id].choose)
        seed_lists = [tuning, *([s] for s in tuning), *([s for s in tuning if s != left] for left in tuning)]
        choices = [choose_point(points, rule, seeds) for rule in rules for seeds in seed_lists]
        chosen = {hyper_text(p.hyper) for p in choices if p}
        others = [p for p in points if hyper_text(p.hyper) not in chosen]
        finished = bool(chosen) and not any(seed not in tuning for p in others for seed in p.runs)
        is_tuned = bool(rules) and len(points) > 1
        for p in points:
            used = not is_tuned or hyper_text(p.hyper) in chosen
            for seed, digest in p.digests.items():
                yield (digest, seed), True if used else False if finished else None


def runs_with_used_curves(e: Experiment, runs: RunMetrics, scale: str) -> set[RunKey]:
    """The runs of an experiment whose curves are used."""
    evidence = Evidence(known_experiments(e), runs, scale)
    return {key for id in (e.id, *e.runs) for key, used in curve_uses(evidence, id) if used}


def known_experiments(e: Experiment) -> Mapping[str, Experiment]:
    """All experiments by id, with this one, which may come from a file of the user's own."""
    return {**experiments(), **{id: find_experiment(id) for id in e.runs}, e.id: e}


def prune_curves(folder: str | Path, e: Experiment, scale: str) -> None:
    """Remove from a folder of results the curves of an experiment's runs that no experiment uses."""
    runs = metrics_by_run(row for row in read_results(folder) if row.scale == scale)
    evidence = Evidence(known_experiments(e), runs, scale)
    unused = {key for id in (e.id, *e.runs) for key, used in curve_uses(evidence, id) if used is False}
    if not any(curve in evidence.runs[key] for key in unused for curve in CURVES):
        return
    unused -= {key for id in evidence.known for key, used in curve_uses(evidence, id) if used is not False}
    with wait_for_folder(Path(folder)):  # another process may be storing results here
        for id in (e.id, *e.runs):
            path = results_file(Path(folder), evidence.known[id].id, scale)
            if path.exists():
                rows = read_results_file(path)
                write_results_file(path, [r for r in rows if r.run not in unused or r.metric not in CURVES])
