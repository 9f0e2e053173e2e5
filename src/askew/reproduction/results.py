"""Measured results as plain rows: one CSV file an experiment and scale, from which tables, figures and the ledger are made."""

from __future__ import annotations

import csv
import io
import math
import shlex
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

from ..engine.server import RECORD, TIMES
from ..errors import StoreError
from ..experiment.store import Run, read_text, write_text
from .papers import Planned, words

WARM_UP = 10  # rounds that tell nothing about the time of the others
SHARES = (10, 50, 100)  # percent of the rounds over which means are taken
HALVES = ("accuracy_choose", "accuracy_report")
# What is chosen by and reported where the choice is made on one half of the test set and the report on the other.
HELD = {
    "best_accuracy": ("chosen_accuracy", "reported_accuracy"),
    "last_accuracy": ("last_accuracy_choose", "last_accuracy_report"),
}
CURVES = ("accuracy", "train_loss", "loss", "public_share", "public_ratio")
SPARSE = "drift_relative"  # a curve too, of every so many rounds
EVERY = 20
EARLY = range(10, 101)  # rounds over which claims about local models speak of the mean
LOCAL = ("drift_relative", "drift_apart", "fit_loss")  # of such records, and tables of them by layer

Metrics = Mapping[str, str]
Runs = Mapping[tuple[str, int], dict[str, str]]  # metrics by digest and seed

ONCE = (
    "experiment",
    "scale",
    "case",
    "method",
    "hyper",
    "device",
    "version",
    "command",
)  # a run's first row has them for all


class Result(NamedTuple):
    """One number, or one curve, of one run."""

    digest: str
    experiment: str
    scale: str
    case: str
    method: str
    hyper: str  # the grid point, as `papers.words` writes it
    seed: int
    metric: str
    value: str
    device: str
    version: str
    command: str

    @property
    def run(self) -> tuple[str, int]:
        return self.digest, self.seed

    @property
    def key(self) -> tuple[str, int, str]:
        return *self.run, self.metric


def results_of(planned: Planned, run: Run) -> list[Result]:
    """Everything worth keeping of a finished run."""
    engine = planned.config.engine
    how = [engine.dtype] * (engine.dtype != "float32") + ["compiled"] * engine.compile
    device = ", ".join([str(run.facts.get("device", "unknown")), *how])
    about = (
        planned.digest,
        planned.experiment,
        planned.scale,
        planned.case,
        planned.method,
        words(planned.hyper),
        planned.seed,
    )
    rest = device, str(run.facts.get("version", "")), command(planned)
    return [Result(*about, metric, value, *rest) for metric, value in metrics(run).items()]


def command(planned: Planned) -> str:
    """What to type to get this run again."""
    only = [f"case={planned.case}", f"method={planned.method}", *words(planned.hyper).split(), f"seed={planned.seed}"]
    how = ["--dtype", planned.config.engine.dtype] if planned.config.engine.dtype != "float32" else []
    whole = ["askew", "reproduce", planned.experiment, "--scale", planned.scale, *how]
    return shlex.join([*whole, "--seeds", str(planned.seed + 1), *(word for item in only for word in ("--only", item))])


def metrics(run: Run) -> dict[str, str]:
    """The figures of a run by name, as text; what was not recorded is left out."""
    told: dict[str, float | None] = {
        "best_accuracy": run.best_accuracy,
        "best_round": run.best_round,
        "last_accuracy": run.final_accuracy,
        "last_loss": last(run, "loss"),
        "best_train_loss": min(run.curve("train_loss")[1], default=None),
    }
    for share in SHARES:
        told[f"mean_accuracy_{share}"] = mean_over(run, "accuracy", share)
        told[f"mean_train_loss_{share}"] = math.inf if lost(run) else mean_over(run, "train_loss", share)
    told |= halves(run)
    seconds = [float(r["seconds"]) for r in run.rounds]
    processes = int(run.facts.get("processes", 1))
    alone = run.facts.get("together", 1) * processes == 1
    timed = "seconds_per_round" if alone else "seconds_shared"  # alone, or its share of several runs' time
    told[timed] = median(seconds[WARM_UP:] or seconds) / processes if seconds else None
    parts = {key: run.curve(key)[1] for key in TIMES if alone}
    told |= {key: median(values[WARM_UP:] or values) for key, values in parts.items() if values}
    told |= {key: median(int(r[key]) for r in run.rounds) for key in ("bytes_up", "bytes_down") if run.rounds}
    told["parameters"] = run.facts.get("parameters")
    figures = {
        name: f"{value:.6g}" for name, value in (told | others(run) | prediction_sets(run)).items() if value is not None
    }
    curves = {key: curve_text(run, key) for key in CURVES} | {SPARSE: curve_text(run, SPARSE, EVERY)}
    return figures | {key: text for key, text in curves.items() if text} | set_curves(run)


def others(run: Run) -> dict[str, float | None]:
    """Means over the rounds of all else that was recorded; of what is measured now and then the last too.

    Of cosines of consecutive updates also the largest, by size; of what tells about local models the mean over early rounds.
    """
    values: dict[str, list[float]] = {}
    early: dict[str, list[float]] = {}
    for record in run.rounds:
        for key, value in record.items():
            if key in (*RECORD, *TIMES, *HALVES):
                continue
            if isinstance(value, (int, float)):
                values.setdefault(key, []).append(float(value))
            if record["round"] in EARLY and key.startswith(LOCAL):
                told = (
                    {f"{key}.{name}": one for name, one in value.items()} if isinstance(value, dict) else {key: value}
                )
                for name, one in told.items():
                    if one is not None:
                        early.setdefault(name, []).append(float(one))
    found: dict[str, float | None] = {f"mean_{key}": sum(all) / len(all) for key, all in values.items()}
    found |= {f"last_{key}": all[-1] for key, all in values.items() if not key.startswith("drift_")}
    found |= {f"max_{key}": max(map(abs, values[key])) for key in ("turn", "drift_turn") if key in values}
    return found | {f"early_{key}": sum(all) / len(all) for key, all in early.items()}


def prediction_sets(run: Run) -> dict[str, float | None]:
    """Coverage and size of the sets of a run whose model was measured so."""
    methods = run.conformal.get("methods", {})
    return {
        f"{what}_{name}": told[key]
        for name, told in methods.items()
        for what, key in (("coverage", "coverage"), ("set_size", "size"))
    }


def set_curves(run: Run) -> dict[str, str]:
    """Coverages and sizes over the levels 1 − a from 0.99 to 0.20."""
    curves = run.conformal.get("curves", {})
    return {
        f"{what}_{name}": " ".join(f"{v:.4g}" for v in told[key])
        for name, told in curves.items()
        for what, key in (("coverages", "coverage"), ("set_sizes", "size"))
    }


def last(run: Run, key: str) -> float | None:
    values = run.curve(key)[1]
    return values[-1] if values else None


def mean_over(run: Run, key: str, share: int) -> float | None:
    """The mean over the first so many percent of the rounds, where recorded."""
    until = share / 100 * int(run.config["rounds"])
    values = [v for r, v in zip(*run.curve(key), strict=True) if r <= until]
    return sum(values) / len(values) if values else None


def lost(run: Run) -> bool:
    """Did it diverge: a round with participants and without a finite loss?"""
    return any(r.get("participants") and r.get("train_loss") is None for r in run.rounds)


def halves(run: Run) -> dict[str, float | None]:
    """The best accuracy on the half of the test set that chooses, its round, and the other half's accuracy in that round."""
    points = [
        (r["accuracy_choose"], -r["round"], r["accuracy_report"])
        for r in run.rounds
        if r.get("accuracy_choose") is not None
    ]
    if not points:
        return {}
    best, round, reported = max(points)
    last, _, last_reported = points[-1]
    told = {"chosen_accuracy": best, "chosen_round": -round, "reported_accuracy": reported}
    return told | {"last_accuracy_choose": last, "last_accuracy_report": last_reported}


# curves ---------------------------------------------------------------------------------------------------------


def curve_text(run: Run, key: str, every: int = 1) -> str:
    """Values with four digits, of every so many rounds and the last; "round:value" unless there is one in every round."""
    at, values = run.curve(key)
    whole = every == 1 and at == list(range(1, len(at) + 1))
    points = [(r, v) for r, v in zip(at, values, strict=True) if r % every == 0 or r == at[-1]]
    return " ".join(f"{v:.4g}" if whole else f"{r}:{v:.4g}" for r, v in points)


def curve(text: str) -> tuple[list[int], list[float]]:
    """Rounds and values of a stored curve."""
    pairs = [item.rpartition(":") for item in text.split()]
    return [int(r) if r else n for n, (r, _, _) in enumerate(pairs, 1)], [float(v) for _, _, v in pairs]


def rounds_to(text: str, target: float) -> int | None:
    """The first evaluated round with at least this accuracy; None if it was never reached."""
    return next((r for r, v in zip(*curve(text), strict=True) if v >= target), None)


# files ----------------------------------------------------------------------------------------------------------


def file_of(folder: Path, experiment: str, scale: str) -> Path:
    return folder / f"{experiment.replace('/', '-')}-{scale}.csv"


def read(folder: str | Path) -> list[Result]:
    """All results of a folder; an empty list where there is none."""
    return [result for path in sorted(Path(folder).glob("*.csv")) for result in read_csv(path)]


def read_csv(path: Path) -> list[Result]:
    csv.field_size_limit(2**24)
    rows = list(csv.reader(io.StringIO(read_text(path))))
    if not rows or tuple(rows[0]) != Result._fields:
        raise StoreError(
            f"{path} does not begin with {','.join(Result._fields)}; restore the file, or remove it and run again."
        )
    results = list[Result]()
    for number, row in enumerate(rows[1:], 2):
        try:
            result = Result._make([*row[:6], int(row[6]), *row[7:]])
        except (ValueError, TypeError, IndexError):
            raise StoreError(
                f"{path}, line {number} is not a result; restore the file, or remove it and run again."
            ) from None
        last = results[-1] if results and results[-1].run == result.run else None
        results.append(
            result._replace(**{name: getattr(result, name) or getattr(last, name) for name in ONCE}) if last else result
        )
    return results


def write(folder: str | Path, results: Iterable[Result]) -> list[Path]:
    """Merge results into the files of their experiments and scales: of one run and metric the newest stays."""
    files: dict[Path, dict[tuple[str, int, str], Result]] = {}
    for result in results:
        files.setdefault(file_of(Path(folder), result.experiment, result.scale), {})[result.key] = result
    for path, new in files.items():
        merged = ({r.key: r for r in read_csv(path)} if path.exists() else {}) | new
        write_csv(path, merged.values())
    return list(files)


def write_csv(path: Path, results: Iterable[Result]) -> None:
    rows = sorted(results, key=lambda r: (r.case, r.method, r.hyper, r.seed, r.digest, r.metric))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(Result._fields)
    for last, row in pairwise([None, *rows]):
        assert row is not None
        known = last is not None and last.run == row.run
        said = {name for name in ONCE if known and getattr(last, name) == getattr(row, name)}
        writer.writerow(["" if name in said else value for name, value in row._asdict().items()])
    write_text(path, text.getvalue())


def by_run(results: Iterable[Result]) -> dict[tuple[str, int], dict[str, str]]:
    """Metrics of every run, by (digest, seed): experiments that plan the same run share it."""
    runs: dict[tuple[str, int], dict[str, str]] = {}
    for result in results:
        runs.setdefault((result.digest, result.seed), {})[result.metric] = result.value
    return runs


def found(runs: Runs, planned: Planned) -> dict[str, str] | None:
    """The metrics of a planned run, if it was made."""
    return runs.get((planned.digest, planned.seed))
