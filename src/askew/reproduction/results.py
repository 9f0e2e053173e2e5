"""Measured results as plain rows: one CSV file for each experiment and scale.

Tables, figures and the ledger are made from these files alone.
"""

from __future__ import annotations

import csv
import io
import re
import shlex
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from ..errors import StoreError, StoreWarning
from ..experiment.folder_lock import remove_leftovers, wait_for_folder
from ..experiment.store import REACHED, Run, read_text, write_text
from ..experiment.toml import text_hash
from .planned_runs import PlannedRun, hyper_text
from .provenance import Provenance, parse_provenance, provenance_text
from .run_metrics import TO_TARGET, run_metrics, stopped_metrics

CHECKSUM = "checksum"  # the metric of a further row of each run
PROVENANCE = "provenance"  # the metric of a row that says, as JSON, how a run was computed
VALUE = re.compile(r"(?:(?:\d+:)?[-+]?(?:\d+(?:\.\d*)?(?:e[-+]?\d+)?|inf|nan)(?: |$))+")  # a number or a curve

RunKey = tuple[str, int]  # a run's digest and seed
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


def run_provenance(rows: Iterable[ResultRow]) -> dict[RunKey, Provenance]:
    """How every run was computed, by digest and seed."""
    found: dict[RunKey, Provenance] = {}
    for row in rows:
        found.setdefault(row.run, Provenance())
        if row.metric == PROVENANCE:
            found[row.run] = parse_provenance(row.value)
    return found


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
