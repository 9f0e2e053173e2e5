"""An experiment from its plan to its table: the missing runs are trained, and results are stored as runs end."""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path

import torch

from ..data import files
from ..errors import ConfigError, ModelError
from ..experiment.build import device_of
from ..experiment.config import Config
from ..experiment.conformal import conformal
from ..experiment.launch import run_all
from ..experiment.process_pool import Notify, run_in_pool
from ..experiment.run import OnRound
from ..experiment.store import Record, Run
from .comparison import TableCell, table_cells
from .cost import estimate_memory, run_cost
from .papers import PlannedRun
from .plan import Reproduction, prepare_reproduction
from .prune_curves import prune_curves
from .results import ResultRow, metrics_by_run, result_rows, write_results

WRITE_INTERVAL = 2.0  # seconds between two writes of the results
MEMORY_SHARE = 0.4  # of a GPU's memory that uploads and states may take; activations need the rest


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

    def __init__(self, reproduction: Reproduction, planned: Mapping[str, PlannedRun], folder: str | Path) -> None:
        """`planned` are the runs by name."""
        self.reproduction, self.planned, self.folder = reproduction, planned, folder
        self.added = set[str]()  # names of runs
        self.rows = list[ResultRow]()  # not yet written
        self.due = 0.0  # time of the next write

    def add(self, run: Run) -> None:
        """Take the results of a finished run."""
        self.added.add(run.name)
        self.rows.extend(result_rows(self.planned[run.name], run))

    def write_if_due(self) -> None:
        """Write what was added, unless results were written a moment ago."""
        if self.rows and time.monotonic() >= self.due:
            self.write()

    def write(self) -> None:
        """Write what was added, to the folder and to the reproduction's metrics."""
        write_results(self.folder, self.rows)
        self.reproduction.runs |= metrics_by_run(self.rows)
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
    planned = {p.config.name(): p for p in missing}
    writer = ResultWriter(reproduction, planned, results)

    def on_round(run: Run, record: Record | None) -> None:
        if record is not None and run.finished:
            writer.add(run)
        writer.write_if_due()
        if watch:
            watch(run, record)

    folder = Path(out) / "alone" if reproduction.alone else out  # which has no run that shared the device
    returned = set[str]()
    try:
        with closing(train(missing, folder, reproduction.alone, processes, on_round, log)) as runs:
            for run in runs:
                if not run.finished:
                    reproduction.unfinished = run
                    return
                if reproduction.experiment.shows == "coverage":
                    with suppress(ModelError):  # a method without one global model has no prediction sets
                        conformal([run])
                if run.name not in writer.added or run.conformal:
                    writer.add(run)
                returned.add(run.name)
                yield run
    finally:
        writer.write()
    reproduction.lost = [p for name, p in planned.items() if name not in returned | writer.added]
    prune_curves(results, reproduction.experiment, reproduction.scale)


def train(
    planned: Sequence[PlannedRun],
    folder: str | Path,
    alone: bool,
    processes: int,
    on_round: OnRound,
    log: Notify,
) -> Generator[Run, None, None]:
    """Train runs, in several processes or as many at a time as a device has memory for; yields them as they end."""
    if processes > 1 and len(planned) > 1:
        parts = [[p.config for p in part] for part in split_for_processes(planned, processes)]
        yield from run_in_pool(parts, folder, processes, on_round, log)
        return
    for batch in memory_batches(planned, alone):
        yield from run_all([p.config for p in batch], folder, watch=on_round)


def split_for_processes(planned: Sequence[PlannedRun], processes: int) -> list[list[PlannedRun]]:
    """Parts of the runs for several processes, the longest first.

    On a GPU a part is the runs of one method, which are trained side by side; elsewhere each run is a part.
    """
    cuda = device_of(planned[0].config.engine.device).type == "cuda"
    kinds = dict[Hashable, list[PlannedRun]]()
    for n, p in enumerate(planned):
        kinds.setdefault((type(p.config.algorithm), p.config.model) if cuda else n, []).append(p)
    parts = [part for kind in kinds.values() for part in memory_batches(kind, processes=processes)]
    return sorted(parts, key=lambda part: -sum(run_cost(p.config).weight for p in part))


def memory_batches(
    planned: Sequence[PlannedRun], alone: bool = False, processes: int = 1
) -> Iterator[list[PlannedRun]]:
    """The runs in batches that a GPU has memory for while as many other processes use it; one batch without a GPU."""
    room = MEMORY_SHARE * torch.cuda.mem_get_info()[1] / processes if torch.cuda.is_available() else math.inf
    batch, used = list[PlannedRun](), 0.0
    for p in planned:
        size = estimate_memory(p.config) if math.isfinite(room) else 0
        if batch and (alone or used + size > room):
            yield batch
            batch, used = [], 0.0
        batch.append(p)
        used += size
    if batch:
        yield batch


def check_files(configs: Sequence[Config]) -> None:
    """Refuse at once what would fail after hours: data and weights that are not there."""
    for name in sorted({str(config.tables()["data"]["name"]) for config in configs} & set(files.table)):
        files.locate(name)
    for path in {path for config in configs for path in config.model.reads()}:
        if not path.is_file():
            raise ModelError(
                f"there is no file of weights {str(path)!r}; put it there, or choose other cases with --only."
            )
