"""Measured results as plain rows: one CSV file for each experiment and scale.

Tables, figures and the ledger are made from these files alone.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
import shlex
import subprocess
import warnings
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache, lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from ..core.records import RECORD, TIMES
from ..errors import StoreError, StoreWarning
from ..experiment.config import Config
from ..experiment.folder_lock import remove_leftovers, wait_for_folder
from ..experiment.store import REACHED, Run, read_text, write_text
from ..experiment.toml import text_hash
from .digests import changed_settings
from .papers import CURVES
from .planned_runs import PlannedRun, hyper_text

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
CHECKSUM = "checksum"  # the metric of a further row of each run
PROVENANCE = "provenance"  # the metric of a row that says, as JSON, how a run was computed
NOT_RECORDED = "not recorded"  # of what results of older versions do not say
VALUE = re.compile(r"(?:(?:\d+:)?[-+]?(?:\d+(?:\.\d*)?(?:e[-+]?\d+)?|inf|nan)(?: |$))+")  # a number or a curve

RunKey = tuple[str, int]  # a run's digest and seed
Metrics = Mapping[str, str]  # of one run: numbers and curves as text, by name
RunMetrics = Mapping[RunKey, dict[str, str]]

# Columns that are the same in all rows of a run: only its first row in a file has them.
RUN_COLUMNS = ("experiment", "scale", "case", "method", "hyper", "device", "version", "command")


class ResultRow(NamedTuple):
    """One number, or one curve, of one run; the fields are the columns of the file."""

    digest: str
    experiment: str
    scale: str
    case: str
    method: str
    hyper: str  # the grid point, as `papers.hyper_text` writes it
    seed: int
    metric: str
    value: str
    device: str
    version: str
    command: str

    @property
    def run(self) -> RunKey:
        return self.digest, self.seed

    @property
    def key(self) -> tuple[str, int, str]:
        return *self.run, self.metric


def result_rows(planned: PlannedRun, run: Run) -> list[ResultRow]:
    """The rows to store of a finished run, one for each metric."""
    engine = planned.config.engine
    precision = [engine.dtype] * (engine.dtype != "float32") + ["compiled"] * engine.compile
    device = ", ".join([str(run.facts.get("device", "unknown")), *precision])
    version, command = str(run.facts.get("version", "")), run_command(planned)
    stopped = run.facts.get("state") == REACHED
    metrics = stopped_metrics(run) if stopped else run_metrics(run, planned.curves, planned.curves_every)
    if planned.stored:
        metrics = {name: value for name, value in metrics.items() if name in planned.stored}
    metrics |= {PROVENANCE: provenance_text(planned.config, run, whole=not planned.stored)}
    return [
        ResultRow(
            planned.digest,
            planned.experiment,
            planned.scale,
            planned.case,
            planned.method,
            hyper_text(planned.hyper),
            planned.seed,
            metric,
            value,
            device,
            version,
            command,
        )
        for metric, value in metrics.items()
    ]


def run_command(planned: PlannedRun) -> str:
    """The command that gives this run again."""
    only = [
        f"case={planned.case}",
        f"method={planned.method}",
        *hyper_text(planned.hyper).split(),
        f"seed={planned.seed}",
    ]
    engine = planned.config.engine
    command = ["askew", "reproduce", planned.experiment, "--scale", planned.scale]
    command += ["--stop-at-target"] * bool(planned.config.evaluation.stop_at)
    command += [*precision_options(engine.dtype, engine.compile), "--seeds", str(planned.seed + 1)]
    return shlex.join([*command, *(word for item in only for word in ("--only", item))])


def precision_options(dtype: str, compiled: bool) -> list[str]:
    """The options of `askew reproduce` that choose a precision and compiled steps; none at the defaults."""
    return ["--dtype", dtype] * (dtype != "float32") + ["--compile"] * compiled


def device_options(device: str) -> list[str]:
    """The same options from a row's device: "NVIDIA H200, tf32, compiled"."""
    words = device.split(", ")[1:]
    dtypes = [word for word in words if word != "compiled"]
    return precision_options(dtypes[0] if dtypes else "float32", "compiled" in words)


@lru_cache(maxsize=1024)  # the rows of a run have one command
def complete_command(command: str, device: str) -> str:
    """The command of a stored run; older versions left out some options that follow from its device.

    They are put behind the scale.
    """
    options = device_options(device)
    words = shlex.split(command) if options else []
    if "--scale" not in words or all(word in words for word in options):
        return command
    kept = [word for word in words if word not in options]
    at = kept.index("--scale") + 2
    return shlex.join([*kept[:at], *options, *kept[at:]])


# how a run was computed -----------------------------------------------------------------------------------------


class Provenance(NamedTuple):
    """How a run was computed; what was not recorded is None."""

    commit: str | None = None  # of the checkout, with "+" where files were changed
    source: str | None = None  # a hash of askew's own files
    torch: str | None = None
    device: str | None = None
    dtype: str | None = None
    compiled: bool | None = None
    engine: str | None = None
    together: int | None = None  # runs that were trained side by side
    date: str | None = None  # on which the results were stored
    config: Mapping[str, Any] | None = None  # as `papers.changed_settings` writes it


def provenance_text(config: Config, run: Run, whole: bool = True) -> str:
    """How a finished run was computed, as one line of JSON; if not whole, without the configuration."""
    engine = config.engine
    made = Provenance(
        commit=source_commit() or None,
        source=source_hash(),
        torch=str(run.facts["torch"]) if "torch" in run.facts else None,
        device=str(run.facts.get("device", "unknown")),
        dtype=engine.dtype,
        compiled=engine.compile,
        engine=str(run.facts["engine"]) if "engine" in run.facts else None,
        together=int(run.facts["together"]) if "together" in run.facts else None,
        date=datetime.now(UTC).date().isoformat(),
        config=changed_settings(config) if whole else None,
    )
    known = {name: value for name, value in made._asdict().items() if value is not None}
    return json.dumps(known, separators=(",", ":"), ensure_ascii=False)


def parse_provenance(text: str) -> Provenance:
    """What a stored line says; nothing is known where there is none."""
    try:
        page = json.loads(text) if text else {}
        return Provenance(**{name: page.get(name) for name in Provenance._fields})
    except (ValueError, AttributeError) as e:
        raise StoreError(
            f"{text[:60]!r} does not say how a run was computed ({e}); restore the file, or run again."
        ) from None


def run_provenance(rows: Iterable[ResultRow]) -> dict[RunKey, Provenance]:
    """How every run was computed, by digest and seed."""
    found: dict[RunKey, Provenance] = {}
    for row in rows:
        found.setdefault(row.run, Provenance())
        if row.metric == PROVENANCE:
            found[row.run] = parse_provenance(row.value)
    return found


@cache
def source_commit() -> str:
    """The commit of the checkout that askew runs from, with "+" where its files were changed; empty elsewhere."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return ""
    ask = ("git", "-C", str(root))
    try:
        answers = [
            subprocess.run([*ask, *words], capture_output=True, text=True, timeout=10, check=True).stdout.strip()
            for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no", "--", "src"))
        ]
    except (OSError, subprocess.SubprocessError):  # no git, or a checkout of somebody else
        return ""
    return answers[0][:12] + "+" * bool(answers[1])


@cache
def source_hash() -> str:
    """A hash of all files of askew's source, which distinguishes versions where there is no commit."""
    root = Path(__file__).resolve().parents[1]
    files = sorted(path for path in root.rglob("*.py"))
    return text_hash("\n".join(f"{path.relative_to(root).as_posix()}\n{path.read_text('utf-8')}" for path in files))


# metrics --------------------------------------------------------------------------------------------------------


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
    found |= {f"last_{key}": v[-1] for key, v in values.items() if not key.startswith("drift_")}
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


# files ----------------------------------------------------------------------------------------------------------


def results_file(folder: Path, experiment: str, scale: str) -> Path:
    """The path of an experiment's results at one scale."""
    return folder / f"{experiment.replace('/', '-')}-{scale}.csv"


def read_results(folder: str | Path, leave_out: bool = False) -> list[ResultRow]:
    """All rows of a folder's files; an empty list where there is no folder.

    With `leave_out` a file that cannot be read is left out, with a warning.
    """
    rows: list[ResultRow] = []
    for path in sorted(Path(folder).glob("*.csv")):
        try:
            rows += read_results_file(path)
        except StoreError as problem:
            if not leave_out:
                raise
            warnings.warn(f"results are left out: {problem}", StoreWarning, stacklevel=2)
    return rows


def read_results_file(path: Path) -> list[ResultRow]:
    """The rows of one file without checksums; runs that are damaged are left out, with a warning."""
    rows, damaged = parse_results(path, read_text(path))
    for digest, seed in damaged:
        warnings.warn(
            f"{path}: the results of the run {digest} with seed {seed} are damaged or were changed by hand, "
            "and are left out; restore the file, or let askew reproduce run it again.",
            StoreWarning,
            stacklevel=2,
        )
    return list(rows)


@lru_cache(maxsize=100)  # a file is read many times while its runs are planned, trained and shown
def parse_results(path: Path, text: str) -> tuple[tuple[ResultRow, ...], tuple[RunKey, ...]]:
    """The intact rows of the text of a file, and its damaged runs.

    Columns that a run's later rows leave empty are filled from the row before.
    """
    csv.field_size_limit(2**24)
    try:
        lines = list(csv.reader(io.StringIO(text, newline="")))
    except csv.Error as e:
        raise StoreError(f"{path} is not a table ({e}); restore the file, or remove it and run again.") from None
    if not lines or tuple(lines[0]) != ResultRow._fields:
        raise StoreError(
            f"{path} does not begin with {','.join(ResultRow._fields)}; restore the file, or remove it and run again."
        )
    rows = list[ResultRow]()
    for number, line in enumerate(lines[1:], 2):
        try:
            row = ResultRow._make([*line[:6], int(line[6]), *line[7:]])
            if row.metric not in (CHECKSUM, PROVENANCE) and not VALUE.fullmatch(row.value):
                raise ValueError
            if row.metric == PROVENANCE:
                parse_provenance(row.value)
        except (ValueError, TypeError, IndexError, StoreError):
            raise StoreError(
                f"{path}, line {number} is not a result; restore the file, or remove it and run again."
            ) from None
        if rows and rows[-1].run == row.run:
            filled = ResultRow._make(new or old for new, old in zip(row, rows[-1], strict=True))
            row = filled._replace(metric=row.metric, value=row.value)
        rows.append(row)
    return intact_rows(rows)


def write_results(folder: str | Path, rows: Iterable[ResultRow]) -> list[Path]:
    """Merge rows into the files of their experiments and scales; a new row replaces that of the same run and metric."""
    files: dict[Path, dict[tuple[str, int, str], ResultRow]] = {}
    for row in rows:
        files.setdefault(results_file(Path(folder), row.experiment, row.scale), {})[row.key] = row
    if files:
        with wait_for_folder(Path(folder)):  # another process may be storing results here
            for path, new in files.items():
                old = read_results_file(path) if path.exists() else []
                whole = {row.run for row in new.values() if row.metric == "last_accuracy"}
                merged = {r.key: r for r in old if r.metric != TO_TARGET or r.run not in whole} | new
                write_results_file(path, merged.values())
    return list(files)


def write_results_file(path: Path, rows: Iterable[ResultRow]) -> None:
    """Write one file; what a row repeats of the row before, of the same run, is left empty.

    Whoever calls this has the folder to itself.
    """
    remove_leftovers(path)
    given = list(rows)
    ordered = sorted(
        [*given, *run_checksums(given)], key=lambda r: (r.case, r.method, r.hyper, r.seed, r.digest, r.metric)
    )
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(ResultRow._fields)
    for before, row in pairwise([None, *ordered]):
        assert row is not None
        same_run = before is not None and before.run == row.run
        repeated = {name for name in RUN_COLUMNS if same_run and getattr(before, name) == getattr(row, name)}
        writer.writerow(["" if name in repeated else value for name, value in row._asdict().items()])
    write_text(path, text.getvalue())


def run_checksums(rows: Iterable[ResultRow]) -> list[ResultRow]:
    """A further row for each run of a file, with a hash of its rows."""
    runs: dict[RunKey, list[ResultRow]] = {}
    for row in rows:
        runs.setdefault(row.run, []).append(row)
    return [its[0]._replace(metric=CHECKSUM, value=rows_hash(its)) for its in runs.values()]


def rows_hash(rows: Iterable[ResultRow]) -> str:
    """A hash of a run's rows."""
    return text_hash("\n".join("\t".join(map(str, row)) for row in sorted(rows, key=lambda row: row.metric)))


def intact_rows(rows: Sequence[ResultRow]) -> tuple[tuple[ResultRow, ...], tuple[RunKey, ...]]:
    """The rows without checksums and without the runs whose checksum does not fit or is lost; and these runs.

    A file without any, as older versions wrote it, is taken as it is.
    """
    stored = {row.run: row.value for row in rows if row.metric == CHECKSUM}
    runs: dict[RunKey, list[ResultRow]] = {}
    for row in rows:
        if row.metric != CHECKSUM:
            runs.setdefault(row.run, []).append(row)
    known = {run for run, its in runs.items() if not stored or stored.get(run) == rows_hash(its)}
    kept = [row for row in rows if row.metric != CHECKSUM and row.run in known]
    commands = [complete_command(row.command, row.device) for row in kept]
    intact = (row._replace(command=command) for row, command in zip(kept, commands, strict=True))
    return tuple(intact), tuple(sorted((runs.keys() | stored.keys()) - known))


def metrics_by_run(rows: Iterable[ResultRow]) -> dict[RunKey, dict[str, str]]:
    """The metrics of every run, by digest and seed: experiments that plan the same run share it."""
    runs: dict[RunKey, dict[str, str]] = {}
    for row in rows:
        if row.metric != PROVENANCE:
            runs.setdefault(row.run, {})[row.metric] = row.value
    return runs
