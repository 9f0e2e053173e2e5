"""Which curves are kept: where a grid is tuned, those of the points that some rule chose; no table, figure or claim reads others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from . import results as stored
from .evidence import Evidence, pick
from .papers import Experiment, experiments, find, words
from .results import CURVES, HELD, Metrics, Runs

# Figures that were read off curves: one without its curve tells that this was dropped.
READ_OFF = {"best_accuracy": "accuracy", "last_loss": "loss", "best_train_loss": "train_loss"}

Key = tuple[str, int]  # digest and seed


def rules(choose: Sequence[str]) -> list[tuple[str, ...]]:
    """The paper's rule, and the same on one half of the test set."""
    return [tuple(choose), *([(HELD[choose[0]][0], *choose[1:])] if choose[0] in HELD else [])] if choose else []


def thinned(metrics: Metrics) -> bool:
    return any(figure in metrics and curve not in metrics for figure, curve in READ_OFF.items())


def verdicts(evidence: Evidence, id: str) -> Iterator[tuple[Key, bool | None]]:
    """Of every run that was made for an experiment: is its curve shown? None: that is open, as a grid is not finished.

    A point is chosen on the first seed, on all that have the whole grid, or on all but the one it is tested at.
    """
    for points in evidence.points(id).values():
        tuning, choose = evidence.tuning(points), rules(evidence.known[id].choose)
        seeds = [tuning, *([s] for s in tuning), *([s for s in tuning if s != left] for left in tuning)]
        tuned = bool(choose) and len(points) > 1
        chosen = {words(p.hyper) for rule in choose for some in seeds if (p := pick(points, rule, some))}
        others = [p for p in points if words(p.hyper) not in chosen]
        finished = bool(chosen) and not any(seed not in tuning for p in others for seed in p.runs)
        for p in points:
            shown = not tuned or words(p.hyper) in chosen
            for seed, digest in p.digests.items():
                yield (digest, seed), True if shown else False if finished else None


def drawn(e: Experiment, runs: Runs, scale: str) -> set[Key]:
    """The runs of an experiment whose curves are shown."""
    evidence = Evidence(around(e), runs, scale)
    return {key for id in (e.id, *e.runs) for key, shown in verdicts(evidence, id) if shown}


def around(e: Experiment) -> Mapping[str, Experiment]:
    """All experiments, with one that may be a file of somebody's own."""
    return {**experiments(), **{id: find(id) for id in e.runs}, e.id: e}


def thin(folder: str | Path, e: Experiment, scale: str) -> None:
    """Drop the curves of an experiment's runs that no experiment shows."""
    evidence = Evidence(around(e), stored.by_run(r for r in stored.read(folder) if r.scale == scale), scale)
    spare = {key for id in (e.id, *e.runs) for key, shown in verdicts(evidence, id) if shown is False}
    if not any(curve in evidence.runs[key] for key in spare for curve in CURVES):
        return
    spare -= {key for id in evidence.known for key, shown in verdicts(evidence, id) if shown is not False}
    for id in (e.id, *e.runs):
        path = stored.file_of(Path(folder), evidence.known[id].id, scale)
        if path.exists():
            stored.write_csv(path, [r for r in stored.read_csv(path) if r.run not in spare or r.metric not in CURVES])
