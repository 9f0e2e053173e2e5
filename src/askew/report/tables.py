"""Rows for comparison: runs that differ only in their seed become one group, and one row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import mean, stdev
from typing import Any, NamedTuple

from ..data import partitions
from ..experiment.store import Run

Flat = dict[str, str]
TASK = ("data", "partition", "participation", "model")  # figures compare only where these tables are equal


class Curve(NamedTuple):
    """The mean over seeds at every recorded round, and the standard deviation (0 for one seed)."""

    rounds: list[int]
    mean: list[float]
    std: list[float]


@dataclass(frozen=True)
class RunGroup:
    """Runs of one configuration, one a seed."""

    label: str
    runs: tuple[Run, ...]

    @property
    def config(self) -> dict[str, Any]:
        return self.runs[0].config

    @property
    def task(self) -> str:
        return same(self.config, TASK)

    def values(self, figure: Callable[[Run], float | None]) -> list[float]:
        """One figure of each seed, where there is one."""
        return [v for v in map(figure, self.runs) if v is not None]

    def last(self, key: str) -> list[float]:
        return [values[-1] for run in self.runs if (values := run.curve(key)[1])]

    def curve(self, key: str) -> Curve:
        points = sorted((r, v) for run in self.runs for r, v in zip(*run.curve(key), strict=True))
        columns = [(r, [v for _, v in column]) for r, column in groupby(points, key=lambda point: point[0])]
        return Curve([r for r, _ in columns], [mean(v) for _, v in columns], [spread(v) or 0.0 for _, v in columns])


def average(values: Sequence[float]) -> float | None:
    return mean(values) if values else None


def spread(values: Sequence[float]) -> float | None:
    """The sample standard deviation; one value has none."""
    return stdev(values) if len(values) > 1 else None


def same(config: Mapping[str, Any], tables: Iterable[str]) -> str:
    """A key that is equal where these tables of the configuration are."""
    return repr([sorted(flatten({name: config.get(name, {})}).items()) for name in tables])


def flatten(config: Mapping[str, Any], above: str = "") -> Flat:
    """Nested tables as dotted keys and their values as text; what the numbers may differ by (seed) or never depend on is left out."""
    flat: Flat = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{above}{key}.")
        elif above + key not in ("seed", "engine.workers"):
            flat[above + key] = plain(value)
    return flat


def described(run: Run) -> Flat:
    """What tells a run apart from others; a deployed one is not its simulation."""
    return flatten(run.config) | ({"engine.name": "flower"} if run.facts.get("engine") == "flower" else {})


def group(runs: Iterable[Run]) -> list[RunGroup]:
    """Groups in order of appearance; of two runs with one configuration and seed the longer one counts."""
    families: dict[str, dict[Any, Run]] = {}
    for run in runs:
        seeds = families.setdefault(repr(sorted(described(run).items())), {})
        seed = run.config.get("seed")
        if seed not in seeds or len(run.rounds) > len(seeds[seed].rounds):
            seeds[seed] = run
    members = [tuple(seeds.values()) for seeds in families.values()]
    return [
        RunGroup(label, each) for label, each in zip(name([described(m[0]) for m in members]), members, strict=True)
    ]


def name(flats: Sequence[Flat]) -> list[str]:
    """Each algorithm's key and what tells its group apart, written as `--set` takes it: "fedprox mu=0.1", "fedavg local.lr=0.05"."""
    task = {key for key in differing(flats) if key.split(".")[0] in TASK}
    rivals: dict[str, list[Flat]] = {}
    for flat in flats:
        rivals.setdefault(flat["algorithm.name"], []).append(flat)
    apart = {method: (differing(its) | task) - {"algorithm.name"} for method, its in rivals.items()}
    names = []
    for flat in flats:
        telling = [k for k in flat if k in apart[flat["algorithm.name"]]]
        words = [flat[k] if k.endswith(".name") else f"{k.removeprefix('algorithm.')}={flat[k]}" for k in telling]
        names.append(" ".join([flat["algorithm.name"], *words]))
    return names


def differing(flats: Sequence[Flat]) -> set[str]:
    keys = {key for flat in flats for key in flat}
    return {key for key in keys if len({flat.get(key) for flat in flats}) > 1}


def plain(value: object) -> str:
    """A value as short as it can be without becoming another."""
    if isinstance(value, bool):
        return str(value).lower()
    short = f"{value:g}" if isinstance(value, float) else str(value)
    return short if not isinstance(value, float) or float(short) == value else repr(value)


def brief(label: str) -> str:
    """A label that fits a legend or a sentence: the middle of a very long one is left out."""
    return label if len(label) <= 80 else f"{label[:50]} … {label[-27:]}"


def labels(runs: Iterable[Run]) -> list[str]:
    """One short label for each row of `table`, all distinct."""
    return [g.label for g in group(runs)]


def table(runs: Iterable[Run], target: float | None = None) -> list[dict[str, Any]]:
    """One row a group; every figure is the mean over its seeds, None where nothing was recorded.

    The target, unless given, is the best value of the mean accuracy curve of the first fedavg group with the same data, partition,
    participation and model; `speedup` is that group's rounds to it divided by the row's.
    """
    groups = group(runs)
    rows = []
    for g in groups:
        base = next((b for b in groups if b.runs[0].algorithm == "fedavg" and b.task == g.task), None)
        goal = target if target is not None else max(base.curve("accuracy").mean, default=None) if base else None
        needed = rounds_to(g, goal)
        needed_by_base = rounds_to(base, goal) if base else None
        best = g.values(lambda run: run.best_accuracy)
        rows.append(
            {
                "label": g.label,
                "algorithm": g.runs[0].algorithm,
                "seeds": len(g.runs),
                "best_accuracy": average(best),
                "best_accuracy_std": spread(best),
                "best_round": average(g.values(lambda run: run.best_round)),
                "final_accuracy": average(g.last("accuracy")),
                "final_accuracy_std": spread(g.last("accuracy")),
                "worst_clients_accuracy": average(g.last("client_accuracy_worst10")),
                "train_loss": average(g.last("train_loss")),
                "test_loss": average(g.last("loss")),
                "rounds": average([len(run.rounds) for run in g.runs]),
                "finished": all(run.finished for run in g.runs),
                "baseline": base.label if base and goal is not None else None,
                "target": goal,
                "rounds_to_target": needed,
                "speedup": needed_by_base / needed if needed and needed_by_base else None,
                "seconds_per_round": average(g.values(lambda run: run.seconds_per_round)),
                "bytes_up": average([run.bytes_up for run in g.runs]),
                "bytes_down": average([run.bytes_down for run in g.runs]),
                "dropped": average([run.dropped for run in g.runs]),
            }
        )
    return rows


def rounds_to(g: RunGroup, target: float | None) -> int | None:
    """The first round whose mean accuracy over the seeds is at least the target."""
    curve = g.curve("accuracy")
    return next((r for r, v in zip(curve.rounds, curve.mean, strict=True) if target is not None and v >= target), None)


def clients(run: Run) -> int:
    """How many clients there are; 0 if nobody says."""
    return int(run.federation.get("clients") or run.config.get("partition", {}).get("clients") or 0)


TELLING = {"alpha": "α", "sigma": "σ", "labels": "labels", "shards": "shards"}  # what a partition is known by


def partition_name(config: Mapping[str, Any]) -> str:
    """A partition in words: "Dirichlet α = 0.2"."""
    settings = {k: v for k, v in config.get("partition", {}).items() if k not in ("name", "clients")}
    called = str(config.get("partition", {}).get("name", ""))
    usual = partitions[called]().table() if called in partitions else {}
    shown = {k: v for k, v in settings.items() if k in TELLING or v != usual.get(k)}
    title = "IID" if called == "iid" else called.replace("_", " ").capitalize()
    return f"{title} {', '.join(f'{TELLING.get(k, k)} = {plain(v)}' for k, v in shown.items())}".strip()


def participation_name(config: Mapping[str, Any]) -> str:
    """Who takes part, in words: "20% take part each round"."""
    settings = config.get("participation", {})
    called, cohort, fraction = str(settings.get("name", "")), settings.get("cohort"), settings.get("fraction")
    if called == "full":
        return "all take part each round"
    if not cohort and not fraction:
        return f"{called} participation" if called else ""
    rule = f" ({called})" if called not in ("", "uniform") else ""
    return f"{plain(cohort) if cohort else f'{100 * fraction:.4g}%'} take part each round{rule}"
