"""What is stored of a finished run: its metrics and curves, by name, as text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from statistics import median

from ..core.records import DRIFT, RECORD, TIMES
from ..experiment.store import Run
from .papers import CURVES

WARM_UP = 10  # first rounds that are left out of a run's median time
MEAN_PERCENTS = (10, 50, 100)  # percent of the rounds over which means of accuracy and training loss are taken
HALVES = ("accuracy_choose", "accuracy_report")  # record keys: accuracy on either half of the test set
# By a metric on the whole test set: the metric that chooses on one half, and the one that reports on the other.
HELD_OUT = {
    "best_accuracy": ("chosen_accuracy", "reported_accuracy"),
    "last_accuracy": ("last_accuracy_choose", "last_accuracy_report"),
}
EARLY_ROUNDS = range(10, 101)  # rounds of the metrics "early_…", which claims about local models use
LOCAL_MODEL_KEYS = ("drift_relative", "drift_apart", "fit_loss")  # record keys with such a metric, also by layer

TO_TARGET = "accuracy_to_target"  # of a run that was stopped at a target, in place of all that needs more rounds

Metrics = Mapping[str, str]  # of one run: numbers and curves as text, by name


def run_metrics(run: Run, curves: Iterable[str] = ("accuracy",), curves_every: int = 1) -> dict[str, str]:
    """The metrics of a run by name, as text with six digits; what was not recorded is left out.

    The named curves have a point every so many rounds; the other metrics are of all rounds.
    """
    numbers: dict[str, float | None] = {
        "best_accuracy": run.best_accuracy,
        "best_round": run.best_round,
        "last_accuracy": run.final_accuracy,
        "last_loss": run.last("loss"),
        "best_train_loss": min(run.curve("train_loss")[1], default=None),
    }
    for percent in MEAN_PERCENTS:
        numbers[f"mean_accuracy_{percent}"] = mean_over_first(run, "accuracy", percent)
        loss = math.inf if has_diverged(run) else mean_over_first(run, "train_loss", percent)
        numbers[f"mean_train_loss_{percent}"] = loss
    numbers |= half_metrics(run) | cost_metrics(run) | record_metrics(run) | prediction_set_metrics(run)
    texts = {name: f"{value:.6g}" for name, value in numbers.items() if value is not None}
    points = {key: curve_text(run, key, max(CURVES[key], curves_every)) for key in curves}
    points |= clock_curves(run, curves_every)
    return texts | {key: text for key, text in points.items() if text} | prediction_set_curves(run)


def stopped_metrics(run: Run) -> dict[str, str]:
    """What is stored of a run that was stopped at an accuracy: how it got there, and its cost."""
    costs = {name: f"{value:.6g}" for name, value in cost_metrics(run).items() if value is not None}
    return costs | {TO_TARGET: curve_text(run, "accuracy")}


def was_stopped(metrics: Metrics) -> bool:
    """Whether these are all metrics of a run that was stopped at an accuracy."""
    return TO_TARGET in metrics and "accuracy" not in metrics and "best_accuracy" not in metrics


def curve_to(metrics: Metrics, target: float) -> str | None:
    """The stored curve of accuracies up to a target at least; None if there is none, or it was stopped before."""
    if "accuracy" in metrics or TO_TARGET not in metrics:
        return metrics.get("accuracy")
    return metrics[TO_TARGET] if max(parse_curve(metrics[TO_TARGET])[1]) >= target else None


def mean_over_first(run: Run, key: str, percent: int) -> float | None:
    """The mean over the first so many percent of the rounds, where recorded."""
    until = percent / 100 * int(run.config["rounds"])
    values = [v for r, v in zip(*run.curve(key), strict=True) if r <= until]
    return sum(values) / len(values) if values else None


def has_diverged(run: Run) -> bool:
    """Whether some round had participants and no finite training loss."""
    return any(r.get("participants") and r.get("train_loss") is None for r in run.rounds)


def half_metrics(run: Run) -> dict[str, float | None]:
    """Best accuracy on the half of the test set that chooses, its round, and the other half's accuracy in that round.

    Also the last accuracies of both halves.
    """
    points = [
        (r["accuracy_choose"], -r["round"], r["accuracy_report"])
        for r in run.rounds
        if r.get("accuracy_choose") is not None
    ]
    if not points:
        return {}
    best, minus_round, reported = max(points)
    last, _, last_reported = points[-1]
    return {
        "chosen_accuracy": best,
        "chosen_round": -minus_round,
        "reported_accuracy": reported,
        "last_accuracy_choose": last,
        "last_accuracy_report": last_reported,
    }


def cost_metrics(run: Run) -> dict[str, float | None]:
    """Seconds and bytes of a round (medians) and the number of parameters.

    `seconds_per_round` is of a run that had the device for itself; otherwise the time is called `seconds_shared` and
    is the run's part of the time of several.
    """
    seconds = [float(r["seconds"]) for r in run.rounds]
    processes = int(run.facts.get("processes", 1))
    alone = run.facts.get("together", 1) * processes == 1
    found: dict[str, float | None] = {}
    if seconds:
        found["seconds_per_round" if alone else "seconds_shared"] = median(seconds[WARM_UP:] or seconds) / processes
    parts = {key: run.curve(key)[1] for key in TIMES if alone}
    found |= {key: median(values[WARM_UP:] or values) for key, values in parts.items() if values}
    found |= {key: median(int(r[key]) for r in run.rounds) for key in ("bytes_up", "bytes_down") if run.rounds}
    return found | {"parameters": run.facts.get("parameters")}


def record_metrics(run: Run) -> dict[str, float | None]:
    """Of everything else that was recorded: "mean_…" over the rounds and "last_…".

    Of cosines of consecutive updates also "max_…", the largest by size; of what describes local models "early_…", the
    mean over the early rounds.
    """
    values: dict[str, list[float]] = {}
    early: dict[str, list[float]] = {}
    for record in run.rounds:
        for key, value in record.items():
            if key in (*RECORD, *TIMES, *HALVES):
                continue
            if isinstance(value, (int, float)):
                values.setdefault(key, []).append(float(value))
            if record["round"] in EARLY_ROUNDS and key.startswith(LOCAL_MODEL_KEYS):
                by_layer = isinstance(value, dict)
                entries = {f"{key}.{layer}": v for layer, v in value.items()} if by_layer else {key: value}
                for name, entry in entries.items():
                    if entry is not None:
                        early.setdefault(name, []).append(float(entry))
    found: dict[str, float | None] = {f"mean_{key}": sum(v) / len(v) for key, v in values.items()}
    found |= {f"last_{key}": v[-1] for key, v in values.items() if not key.startswith(DRIFT)}
    found |= {f"max_{key}": max(map(abs, values[key])) for key in ("turn", "drift_turn") if key in values}
    return found | {f"early_{key}": sum(v) / len(v) for key, v in early.items()}


def prediction_set_metrics(run: Run) -> dict[str, float | None]:
    """Coverage and size of the prediction sets, where `askew conformal` measured the run."""
    return {
        f"{metric}_{method}": measured[key]
        for method, measured in run.conformal.get("methods", {}).items()
        for metric, key in (("coverage", "coverage"), ("set_size", "size"))
    }


def prediction_set_curves(run: Run) -> dict[str, str]:
    """Coverages and sizes over the levels 1 − a from 0.99 to 0.20, as text."""
    return {
        f"{metric}_{method}": " ".join(f"{v:.4g}" for v in measured[key])
        for method, measured in run.conformal.get("curves", {}).items()
        for metric, key in (("coverages", "coverage"), ("set_sizes", "size"))
    }


# curves ---------------------------------------------------------------------------------------------------------


def curve_text(run: Run, key: str, every: int = 1) -> str:
    """A curve as text: values with four digits, of every so many rounds and the last.

    Written "round:value", unless there is a value in every round.
    """
    return points_text(*run.curve(key), every)


def clock_curves(run: Run, every: int) -> dict[str, str]:
    """Virtual seconds and bytes sent since the start, at evaluated rounds, of a run that has a virtual clock."""
    rounds, clock = run.curve("clock")
    sent = accumulate(float(r["bytes_up"]) + float(r["bytes_down"]) for r in run.rounds)
    evaluated = {*run.curve("accuracy")[0]}
    found = [point for point in zip(rounds, clock, sent, strict=True) if point[0] in evaluated] if rounds else []
    at, *values = map(list, zip(*found, strict=True)) if found else ([], [], [])
    return {name: points_text(at, each, every) for name, each in zip(("clock", "bytes"), values, strict=True) if each}


def points_text(at: Sequence[int], values: Sequence[float], every: int) -> str:
    """Rounds and values as `curve_text` writes them."""
    whole = every == 1 and list(at) == list(range(1, len(at) + 1))
    points = [(r, v) for r, v in zip(at, values, strict=True) if r % every == 0 or r == at[-1]]
    return " ".join(f"{v:.4g}" if whole else f"{r}:{v:.4g}" for r, v in points)


def parse_curve(text: str) -> tuple[list[int], list[float]]:
    """Rounds and values of a stored curve."""
    pairs = [item.rpartition(":") for item in text.split()]
    return [int(r) if r else n for n, (r, _, _) in enumerate(pairs, 1)], [float(v) for _, _, v in pairs]
