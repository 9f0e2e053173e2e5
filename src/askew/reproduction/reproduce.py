"""An experiment from its plan to its table: the missing runs are trained, and results are stored as runs end."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path

from ..core.records import Record
from ..core.text import count_text
from ..data import files
from ..errors import AskewError, ConfigError, DiskFull, ModelError
from ..experiment.checkpoint import remove_end
from ..experiment.config import Config
from ..experiment.conformal import conformal
from ..experiment.launch import run_all
from ..experiment.process_pool import Notify, run_in_pool
from ..experiment.run import OnRound
from ..experiment.store import Run
from .comparison import TableCell, table_cells
from .plan import Reproduction, prepare_reproduction
from .planned_runs import PlannedRun
from .prune_curves import prune_curves
from .results import ResultRow, RunKey, metrics_by_run, result_rows, write_results
from .schedule import RunSchedule, ScheduledExperiment

WRITE_INTERVAL = 0.5  # seconds between two writes of the results while runs go on


def reproduce(
    id: str,
    scale: str = "full",
    only: Iterable[str] = (),
    seeds: int | None = None,
    out: str | Path = "runs",
    results: str | Path = "results",
    watch: OnRound | None = None,
    processes: int = 1,
) -> list[TableCell]:
    """Run an experiment and return its table; what is stored already is not trained again."""
    reproduction = prepare_reproduction(id, scale, only, seeds, results)
    for _ in ("tune", "repeat"):
        for _ in run_missing(reproduction, out, results, watch, processes):
            pass
        if reproduction.unfinished or reproduction.lost:
            break
        reproduction.update_plan()
    return table_cells(reproduction)


class ResultWriter:
    """Collects the results of finished runs and writes them now and then: many runs of a GPU end in one moment."""

    def __init__(self, runs: dict[RunKey, dict[str, str]], folder: str | Path) -> None:
        """`runs` are the known metrics, to which those of finished runs are added."""
        self.runs, self.folder = runs, folder
        self.added = set[str]()  # names of runs
        self.rows = list[ResultRow]()  # not yet written
        self.due = 0.0  # time of the next write

    def add(self, planned: PlannedRun, run: Run) -> None:
        """Take the results of a finished run."""
        self.added.add(run.name)
        self.rows.extend(result_rows(planned, run))

    def write_if_due(self) -> None:
        """Write what was added, unless results were written a moment ago."""
        if self.rows and time.monotonic() >= self.due:
            self.write()

    def write(self) -> None:
        """Write what was added, to the folder and to the known metrics."""
        if not self.rows:
            return
        write_results(self.folder, self.rows)
        self.runs |= metrics_by_run(self.rows)
        self.rows.clear()
        self.due = time.monotonic() + WRITE_INTERVAL


def run_missing(
    reproduction: Reproduction,
    out: str | Path,
    results: str | Path,
    watch: OnRound | None = None,
    processes: int = 1,
    log: Notify = lambda text: None,
) -> Iterator[Run]:
    """Train the missing runs and store their results; yields runs as they end, up to the first that was stopped."""
    if reproduction.alone and processes > 1:
        raise ConfigError(f"--processes {processes}: rounds are timed here, one run at a time; leave --processes out.")
    missing = reproduction.missing
    check_files([p.config for p in missing])
    experiment = ScheduledExperiment(reproduction, waiting=missing)
    processes = max(1, min(processes, len(missing)))
    schedule = RunSchedule([experiment], results, processes, reproduction.alone)
    folder = Path(out) / "alone" if reproduction.alone else out  # which has no run that shared the device
    writer = ResultWriter(reproduction.runs, results)
    for run in run_schedule(schedule, folder, writer, watch, log):
        if not run.over:
            reproduction.unfinished = run
            return
        yield run
    reproduction.lost = [p for p in missing if p.config.name() not in writer.added]
    prune_curves(results, reproduction.experiment, reproduction.scale)


def run_schedule(
    schedule: RunSchedule,
    out: str | Path,
    writer: ResultWriter,
    watch: OnRound | None,
    log: Notify,
    go_on: bool = False,
) -> Generator[Run, None, None]:
    """Train what a schedule gives out and store the results; yields runs as they end, up to one that was stopped.

    With `go_on` a failure is logged and the other parts go on; several processes always do so.
    """

    def on_round(run: Run, record: Record | None) -> None:
        schedule.on_round(run, record)
        if record is not None and run.finished:
            writer.add(schedule.begun[run.name].planned, run)
        writer.write_if_due()
        if watch:
            watch(run, record)

    if schedule.processes > 1:
        handlers = schedule.on_loss, schedule.note_if_too_slow
        training = run_in_pool(schedule.parts(), out, schedule.processes, on_round, log, *handlers)
    else:
        training = run_here(schedule, out, on_round, log, go_on)
    try:
        with closing(training) as runs:
            for run in runs:
                if run.over:
                    planned, part, _ = schedule.begun[run.name]
                    if part.experiment.reproduction.experiment.shows == "coverage":
                        with suppress(ModelError):  # a method without one global model has no prediction sets
                            conformal([run])
                    if run.name not in writer.added or run.conformal:
                        writer.add(planned, run)
                    writer.write()
                    if run.folder:
                        remove_end(run.folder)  # an experiment's number of rounds is given: nothing goes on from it
                    schedule.on_end(run)
                yield run
                if not run.over:
                    return
    finally:
        writer.write()


class PartStopped(Exception):
    """A part would not have ended in time."""


def run_here(
    schedule: RunSchedule, out: str | Path, watch: OnRound, log: Notify, go_on: bool
) -> Generator[Run, None, None]:
    """Run the parts of a schedule one after the other in this process, and yield the runs as they end.

    With `go_on` the runs of a part that fails are given up, else the failure is raised.
    """
    for part in schedule.parts():
        ended, configs = set[str](), list(part)

        def on_round(run: Run, record: Record | None, configs: Sequence[Config] = configs) -> None:
            watch(run, record)
            if schedule.note_if_too_slow(configs):
                raise PartStopped

        try:
            for run in run_all(part, out, watch=on_round):
                ended.add(run.name)
                yield run
                if not run.over:
                    return
        except DiskFull:  # the next part would fail too
            raise
        except (AskewError, RuntimeError, PartStopped) as e:
            left = [config for config in part if config.name() not in ended]
            if not isinstance(e, PartStopped):
                if not go_on:
                    raise
                log(f"{count_text(len(left), 'run')} failed ({str(e).splitlines()[0]}); given up")
            schedule.on_loss(left)


def check_files(configs: Sequence[Config]) -> None:
    """Refuse at once what would fail after hours: data and weights that are not there."""
    for name in sorted({str(config.tables()["data"]["name"]) for config in configs} & set(files.table)):
        files.locate(name)
    for path in {path for config in configs for path in config.model.reads()}:
        if not path.is_file():
            raise ModelError(
                f"there is no file of weights {str(path)!r}; put it there, or choose other cases with --only."
            )
