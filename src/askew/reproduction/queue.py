"""A queue of experiments: what is missing of each is trained in their order, for as long as there is time.

A file of a queue has entries like these; all keys but `experiment` may be left out:

    [[entry]]
    experiment = "feddpc/table2"                    # as `askew list experiments` names it
    only = ["case=cifar10-0.6", "method=FedDPC"]    # as `askew reproduce --only`
    seeds = 7                                       # as --seeds: 0 to 6
    scale = "full"
    dtype = "tf32"
    compile = true
    processes = 2                                   # at most so many processes train it at a time
    all_rounds = true                               # as --all-rounds
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..engine.settings import EngineSettings
from ..errors import AskewError, ConfigError
from ..experiment.process_pool import Notify
from ..experiment.process_state import stop_after
from ..experiment.run import OnRound
from ..experiment.store import Run
from ..experiment.toml import literal, read_toml
from .papers import SCALES, refuse_unknown_keys
from .plan import prepare_reproduction
from .prune_curves import prune_curves
from .reproduce import ResultWriter, check_files, run_schedule
from .results import metrics_by_run, read_results
from .schedule import RunSchedule, ScheduledExperiment


class QueueEntry(NamedTuple):
    """One entry of a queue; the fields are the keys of the file. What is None the command says."""

    experiment: str
    only: Sequence[str] = ()
    seeds: int | None = None  # None: as published
    scale: str | None = None
    dtype: str | None = None
    compile: bool | None = None
    processes: int | None = None
    all_rounds: bool | None = None

    @property
    def title(self) -> str:
        """The experiment and what is selected of it."""
        return " ".join([self.experiment, *self.only, *([f"seeds={self.seeds}"] if self.seeds else [])])

    def toml(self) -> str:
        """The entry as a file has it."""
        given = {key: value for key, value in self._asdict().items() if value not in (None, ())}
        lines = [f"{key} = {literal(list(v) if key == 'only' else v)}" for key, v in given.items()]
        return "\n".join(["[[entry]]", *lines, ""])


FORMS: dict[str, tuple[type, str]] = {
    "experiment": (str, "the name of an experiment"),
    "only": (list, "a list of texts"),
    "seeds": (int, "a number of seeds, 1 or more"),
    "scale": (str, f"one of {', '.join(SCALES)}"),
    "dtype": (str, "float32, tf32, bf16 or float64"),
    "compile": (bool, "true or false"),
    "processes": (int, "a number of processes, 1 or more"),
    "all_rounds": (bool, "true or false"),
}


def read_queue(path: Path) -> list[QueueEntry]:
    """The entries of a file, in its order."""
    page = read_toml(path)
    refuse_unknown_keys(page, ("entry",), f"{path}: ")
    entries = page.get("entry")
    if not isinstance(entries, list) or not entries or not all(isinstance(e, dict) for e in entries):
        raise ConfigError(f"{path} has no entries; write [[entry]] and experiment = ... below it.")
    return [entry_from_table(table, f"{path}, entry {n}: ") for n, table in enumerate(entries, 1)]


def entry_from_table(table: dict[str, Any], where: str) -> QueueEntry:
    """The entry of one table, checked; `where` begins a sentence about a mistake."""
    refuse_unknown_keys(table, QueueEntry._fields, where)
    if "experiment" not in table:
        raise ConfigError(f"{where}experiment is missing; name one of `askew list experiments`.")
    for key, value in table.items():
        kind, form = FORMS[key]
        items = value if isinstance(value, list) else [""]
        if (
            type(value) is not kind
            or (isinstance(value, int) and value < 1 and kind is int)
            or not all(isinstance(item, str) for item in items)
        ):
            raise ConfigError(f"{where}{key} must be {form}, got {value!r}; correct it.")
    return QueueEntry(**(table | {"only": tuple(table.get("only", ()))}))


def prepare_queue(
    path: Path, results: str | Path, scale: str = "full", engine: EngineSettings | None = None
) -> tuple[list[QueueEntry], list[ScheduledExperiment]]:
    """Read and plan the entries of a file; what an entry does not say of scale and precision is as given here."""
    entries, scheduled = read_queue(path), list[ScheduledExperiment]()
    runs, usual = metrics_by_run(read_results(results)), engine or EngineSettings()
    for n, entry in enumerate(entries, 1):
        try:
            settings = EngineSettings(
                dtype=entry.dtype or usual.dtype, compile=usual.compile if entry.compile is None else entry.compile
            )
            own = settings if settings != EngineSettings() else None
            chosen = (entry.experiment, entry.scale or scale, entry.only, entry.seeds)
            whole = bool(entry.all_rounds)
            reproduction = prepare_reproduction(*chosen, results, own, runs=runs, all_rounds=whole)
        except AskewError as e:
            raise type(e)(f"{path}, entry {n}: {e}") from None
        if reproduction.alone:
            raise ConfigError(
                f"{path}, entry {n}: {entry.experiment} times rounds, one run at a time; take it out of the queue and "
                "run it by itself."
            )
        missing = reproduction.missing
        stored = len({p.key for p in reproduction.planned}) - len(missing)
        scheduled.append(ScheduledExperiment(reproduction, entry.processes or 10**6, missing, stored=stored))
    return entries, scheduled


def run_queue(
    experiments: Sequence[ScheduledExperiment],
    schedule: RunSchedule,
    out: str | Path,
    watch: OnRound | None = None,
    log: Notify = lambda text: None,
) -> Generator[Run, None, None]:
    """Train what is missing and store each result as it comes; yields runs as they end, up to one that was stopped.

    An entry whose data are not there is left out, and one that fails is given up; the others go on.
    """
    for experiment in experiments:
        try:
            check_files([p.config for p in experiment.waiting])
        except AskewError as e:
            experiment.waiting, experiment.problem = [], str(e)
            log(f"{experiment.reproduction.experiment.id} is left out: {e}")
    left = None if math.isinf(schedule.deadline) else max(0.0, schedule.deadline - time.monotonic())
    writer = ResultWriter(experiments[0].reproduction.runs, schedule.results)
    with stop_after(left):
        yield from run_schedule(schedule, out, writer, watch, log, go_on=True)


def queue_schedule(
    experiments: Sequence[ScheduledExperiment], results: str | Path, processes: int = 1, seconds: float | None = None
) -> RunSchedule:
    """The schedule of a queue that may take so many seconds from now on."""

    def refill(experiment: ScheduledExperiment) -> None:
        """Plan further seeds of what was tuned, once all that was planned has ended."""
        reproduction = experiment.reproduction
        prune_curves(results, reproduction.experiment, reproduction.scale)
        reproduction.update_plan()
        begun = {begun.planned.key for begun in schedule.begun.values()}
        experiment.waiting = [p for p in reproduction.missing if p.key not in begun]

    deadline = math.inf if seconds is None else time.monotonic() + seconds
    schedule = RunSchedule(experiments, results, processes, deadline=deadline, refill=refill)
    return schedule
