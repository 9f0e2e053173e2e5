"""An experiment again: its runs planned, those that lack played, results kept as they come, and the table beside the paper's."""

from __future__ import annotations

import csv
import io
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import torch

from ..data import files
from ..engine.choose import EngineSettings
from ..engine.server import TIMES
from ..errors import ConfigError, ModelError
from ..experiment.build import device_of
from ..experiment.config import Config
from ..experiment.conformal import conformal
from ..experiment.launch import run_all
from ..experiment.process_pool import Notify, run_in_pool
from ..experiment.run import OnRound
from ..experiment.store import Record, Run, read_text
from . import results as stored
from .cost import memory, work
from .papers import Experiment, Hyper, Planned, find, papers_folder, plan, words
from .prune_curves import drawn, rules, thin, thinned
from .results import HELD, Metrics

TIME = "seconds_per_round"
COSTS = (TIME, "bytes_up", "bytes_down")
PAUSE = 2.0  # seconds between two writings of the results
SHARE = 0.4  # of a GPU's memory that uploads and states may take; activations need the rest

Key = tuple[str, str, str]  # experiment, case and method


@dataclass
class Reproduction:
    """The runs of an experiment and what is known of them."""

    experiment: Experiment
    scale: str
    only: tuple[str, ...]
    seeds: int | None
    engine: EngineSettings | None
    runs: dict[tuple[str, int], dict[str, str]]  # measured, by digest and seed
    planned: list[Planned]
    alone: bool = False  # one run at a time: those that share a device share its time
    unfinished: Run | None = None  # the run that was stopped
    lost: Sequence[Planned] = ()  # runs that were given up with the processes that played them
    bare: frozenset[tuple[str, int]] = frozenset()  # runs that lost a curve which is to be shown after all

    def found(self, p: Planned) -> Metrics | None:
        """What was measured of a run, if it was made and has what is wanted of it."""
        told = stored.found(self.runs, p) or {}
        wanted = [self.experiment.metric] * (self.experiment.shows == "coverage") + [TIME] * self.alone
        return told if told and all(metric in told for metric in wanted) else None

    @property
    def missing(self) -> list[Planned]:
        """Runs still to make, each once."""
        return list({(p.digest, p.seed): p for p in self.planned if not self.done(p)}.values())

    def done(self, p: Planned) -> bool:
        told = self.found(p)
        return told is not None and not ((p.digest, p.seed) in self.bare and thinned(told))

    def plan(self) -> None:
        """All runs as far as they are known: further seeds of what is tuned only at the points that the first one chose."""
        whole = plan(self.experiment, self.scale, self.seeds, self.only)
        chosen = choices(self, whole)
        self.planned = []
        for p in whole:
            points = chosen.get((p.experiment, p.case, p.method))
            if points is None or p.seed == whole[0].seed or p.hyper in points:
                self.planned.append(p._replace(config=replace(p.config, engine=self.engine)) if self.engine else p)
        bare = {(p.digest, p.seed) for p in self.planned if thinned(self.found(p) or {})}
        self.bare = frozenset(bare and bare & drawn(self.experiment, self.runs, self.scale))


def start(
    id: str,
    scale: str = "full",
    only: Iterable[str] = (),
    seeds: int | None = None,
    results: str | Path = "results",
    engine: EngineSettings | None = None,
    alone: bool = False,
) -> Reproduction:
    """What there is to do, and what is done already."""
    experiment = find(id)
    alone = alone or experiment.shows == "cost"
    begun = Reproduction(experiment, scale, tuple(only), seeds, engine, stored.by_run(stored.read(results)), [], alone)
    begun.plan()
    return begun


def reproduce(
    id: str,
    scale: str = "full",
    only: Iterable[str] = (),
    seeds: int | None = None,
    out: str | Path = "runs",
    results: str | Path = "results",
    watch: OnRound | None = None,
    processes: int = 1,
) -> list[Cell]:
    """An experiment from its plan to its table; what is stored already is not played again."""
    begun = start(id, scale, only, seeds, results)
    for _ in ("tune", "repeat"):
        for _ in play(begun, out, results, watch, processes):
            pass
        if begun.unfinished or begun.lost:
            break
        begun.plan()
    return table(begun)


# playing --------------------------------------------------------------------------------------------------------


def play(
    begun: Reproduction,
    out: str | Path,
    results: str | Path,
    watch: OnRound | None = None,
    processes: int = 1,
    speak: Notify = lambda words: None,
) -> Iterator[Run]:
    """Play what is missing; results are written as runs end. It ends with the first run that was stopped."""
    if begun.alone and processes > 1:
        raise ConfigError(f"--processes {processes}: rounds are timed here, one run at a time; leave --processes out.")
    missing, shows = begun.missing, begun.experiment.shows
    at_hand([p.config for p in missing])
    by_name = {p.config.name(): p for p in missing}
    ended, kept, due = (
        set[str](),
        list[stored.Result](),
        0.0,
    )  # kept is not yet written: many runs of a GPU end in one moment

    def keep(run: Run) -> None:
        ended.add(run.name)
        kept.extend(stored.results_of(by_name[run.name], run))

    def put_down() -> None:
        nonlocal due
        stored.write(results, kept)
        begun.runs |= stored.by_run(kept)
        kept.clear()
        due = time.monotonic() + PAUSE

    def seen(run: Run, record: Record | None) -> None:
        if record is not None and run.finished:
            keep(run)
        if kept and time.monotonic() >= due:
            put_down()
        if watch:
            watch(run, record)

    folder = Path(out) / "alone" if begun.alone else out  # where no run lies that was played among others
    if processes > 1 and len(missing) > 1:
        parts = [[p.config for p in part] for part in shares(missing, processes)]
        runs = run_in_pool(parts, folder, processes, seen, speak)
    else:
        runs = (
            run
            for batch in batches(missing, begun.alone)
            for run in run_all([p.config for p in batch], folder, watch=seen)
        )
    came = set[str]()
    try:
        with closing(runs):
            for run in runs:
                if not run.finished:
                    begun.unfinished = run
                    return
                if shows == "coverage":
                    with suppress(ModelError):  # a method without one global model has no such sets
                        conformal([run])
                if run.name not in ended or run.conformal:
                    keep(run)
                came.add(run.name)
                yield run
    finally:
        put_down()
    begun.lost = [p for name, p in by_name.items() if name not in came | ended]
    thin(results, begun.experiment, begun.scale)


def shares(planned: Sequence[Planned], processes: int) -> list[list[Planned]]:
    """Parts for several processes, the longest first: on a GPU the runs of one method, which are played side by side; else each run."""
    cuda, kinds = device_of(planned[0].config.engine.device).type == "cuda", dict[Any, list[Planned]]()
    for n, p in enumerate(planned):
        kinds.setdefault((type(p.config.algorithm), p.config.model) if cuda else n, []).append(p)
    parts = [part for kind in kinds.values() for part in batches(kind, processes=processes)]
    return sorted(parts, key=lambda part: -sum(work(p.config).weight for p in part))


def batches(planned: Sequence[Planned], alone: bool = False, processes: int = 1) -> Iterator[list[Planned]]:
    """Runs that may share a device with as many of other processes: as many as its memory has room for."""
    room = SHARE * torch.cuda.mem_get_info()[1] / processes if torch.cuda.is_available() else math.inf
    batch, held = list[Planned](), 0.0
    for p in planned:
        more = memory(p.config) if math.isfinite(room) else 0
        if batch and (alone or held + more > room):
            yield batch
            batch, held = [], 0.0
        batch.append(p)
        held += more
    if batch:
        yield batch


def at_hand(configs: Sequence[Config]) -> None:
    """Refuse at once what would fail after hours: data and weights that are not there."""
    for name in sorted({str(config.tables()["data"]["name"]) for config in configs} & set(files.table)):
        files.locate(name)
    for path in {path for config in configs for path in config.model.reads()}:
        if not path.is_file():
            raise ModelError(
                f"there is no file of weights {str(path)!r}; put it there, or choose other cases with --only."
            )


# choosing -------------------------------------------------------------------------------------------------------


def grouped(planned: Sequence[Planned]) -> dict[Key, list[Planned]]:
    groups: dict[Key, list[Planned]] = {}
    for p in planned:
        groups.setdefault((p.experiment, p.case, p.method), []).append(p)
    return groups


def choices(begun: Reproduction, planned: Sequence[Planned]) -> dict[Key, list[Hyper]]:
    """Of everything that is tuned, the grid point chosen by the paper's rule and that chosen on one half of the test set.

    Both by the first seed; none while its grid is not finished.
    """
    tuned: dict[Key, list[Hyper]] = {}
    for key, points in grouped(planned).items():
        rule = begun.experiment.choose if key[0] == begun.experiment.id else find(key[0]).choose
        if not rule or len({words(p.hyper) for p in points}) < 2:
            continue
        told = [(p.hyper, begun.found(p)) for p in points if p.seed == planned[0].seed]
        done = [(hyper, metrics) for hyper, metrics in told if metrics]
        tuned[key] = (
            [hyper for r in rules(rule) if (hyper := best(done, r)) is not None] if len(done) == len(told) else []
        )
    return tuned


def best(points: Sequence[tuple[Hyper, Metrics]], rule: Sequence[str]) -> Hyper | None:
    """The point with the highest first metric ("-…": the lowest), ties by the next; None where it was not measured."""
    if any(rule[0].removeprefix("-") not in metrics for _, metrics in points):
        return None
    return max(points, key=lambda point: [score(point[1], metric) for metric in rule])[0] if points else None


def score(metrics: Metrics, metric: str) -> float:
    name = metric.removeprefix("-")
    return (
        -math.inf if name not in metrics else -float(metrics[name]) if metric.startswith("-") else float(metrics[name])
    )


# the table ------------------------------------------------------------------------------------------------------


class Printed(NamedTuple):
    """A number of the paper, as it is printed."""

    value: str
    spread: str = ""
    note: str = ""


class Cell(NamedTuple):
    """One figure of one method in one case: ours, a value a seed (infinite: the target was not reached), and the paper's."""

    case: str
    method: str
    hyper: str
    metric: str
    seeds: list[int]
    values: list[float]  # accuracies in percent
    limit: int  # rounds of the run
    printed: Printed | None
    held: list[float]  # on one half of the test set, at the point that the other half chose
    held_hyper: str

    @property
    def mean(self) -> float:
        return fmean(self.values)

    @property
    def std(self) -> float | None:
        """The sample standard deviation; one value has none."""
        return stdev(self.values) if len(self.values) > 1 and math.isfinite(self.mean) else None

    @property
    def difference(self) -> float | None:
        """Ours less the paper's, where both are numbers."""
        with suppress(ValueError):
            if self.printed and math.isfinite(self.mean):
                return self.mean - float(self.printed.value)
        return None


def table(begun: Reproduction) -> list[Cell]:
    """A cell for every case, method and figure that was measured; for every grid point where nothing is chosen."""
    e, printed, chosen = begun.experiment, printed_numbers(begun.experiment.paper), choices(begun, begun.planned)
    costs = (*COSTS, *TIMES) if e.shows == "cost" else ()
    figures = dict.fromkeys([e.metric, *costs, *(m for id, _, _, m in printed if id == e.id)])
    groups, cells = grouped(begun.planned), list[Cell]()
    for key, points in groups.items():
        by_point = {
            hyper: [p for p in points if words(p.hyper) == hyper]
            for hyper in dict.fromkeys(words(p.hyper) for p in points)
        }
        picked = [words(hyper) for hyper in chosen[key]] if key in chosen else list(by_point)
        for hyper in picked[:1] if key in chosen else picked:
            held_hyper = picked[-1] if key in chosen else hyper
            for metric in figures:
                told = [
                    (p.seed, value)
                    for p in by_point[hyper]
                    if (value := measured(begun, groups, p, metric)) is not None
                ]
                held = (
                    [measured(begun, groups, p, HELD[metric][1]) for p in by_point[held_hyper]]
                    if metric in HELD
                    else []
                )
                if told:
                    seeds, values = (list(column) for column in zip(*told, strict=True))
                    names = (key[2], f"{key[2]} @ {hyper}")  # the latter of one point of a grid
                    beside = next(
                        (printed[at] for name in names if (at := (e.id, key[1], name, metric)) in printed), None
                    )
                    others = [v for v in held if v is not None]
                    limit = by_point[hyper][0].config.rounds
                    cells.append(Cell(key[1], key[2], hyper, metric, seeds, values, limit, beside, others, held_hyper))
    return cells


def measured(begun: Reproduction, groups: Mapping[Key, Sequence[Planned]], p: Planned, metric: str) -> float | None:
    """One figure of one run, accuracies in percent; None where it was not measured."""
    metrics, key = begun.found(p), (p.experiment, p.case)
    if not metrics:
        return None
    if metric == "rounds_to":
        goal = target(begun, groups, p)
        if goal is None or "accuracy" not in metrics:
            return None
        reached = stored.rounds_to(metrics["accuracy"], goal)
        return math.inf if reached is None else float(reached)
    if metric == "speedup":
        base = [measured(begun, groups, b, "rounds_to") for b in groups.get((*key, "FedAvg"), ()) if b.seed == p.seed]
        own = measured(begun, groups, p, "rounds_to")
        limit = p.config.rounds  # which stands for a target that was not reached
        return min(base[0], limit) / min(own, limit) if base and base[0] and own else None
    with suppress(KeyError, ValueError):
        return (100 if "accuracy" in metric else 1) * float(metrics[metric])
    return None


def target(begun: Reproduction, groups: Mapping[Key, Sequence[Planned]], p: Planned) -> float | None:
    """The accuracy to reach: given, or a method's best or last one of the same case and seed, as curves store it."""
    goal = begun.experiment.target
    if not isinstance(goal, str):
        return goal
    name, _, which = goal.partition(" ")
    for base in groups.get((p.experiment, p.case, name), ()):
        if base.seed == p.seed and (metrics := begun.found(base)):
            values = stored.curve(metrics.get("accuracy", ""))[1]
            return None if not values else values[-1] if which == "last" else max(values)
    return None


def printed_numbers(paper: str) -> dict[tuple[str, str, str, str], Printed]:
    """What a paper prints, by experiment, case, method and metric; nothing where the file is not there."""
    path = papers_folder() / paper / "printed.csv"
    rows = csv.DictReader(io.StringIO(read_text(path))) if path.is_file() else ()
    return {
        (r["experiment"], r["case"], r["method"], r["metric"]): Printed(r["value"], r["spread"], r["note"])
        for r in rows
    }
