"""Trackers: TensorBoard, MLflow, Weights & Biases and trackio record the rounds of runs while they are trained.

A tracker records one run; `Tracking` makes trackers for every run and is called where `watch` is. None of them can
stop a run: where one fails, a remark says so and the run goes on without it. Libraries are imported where they are
used, and nothing is sent over a network unless the user sets that.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from importlib import import_module
from io import StringIO
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, TypeVar

from ..core.records import Record
from ..errors import ConfigError, Remark, UnknownName, did_you_mean
from .store import TRACKING, Run, read_json, write_json

if TYPE_CHECKING:
    from .run import OnRound

Result = TypeVar("Result")
NO_FOLDER = Path("tracking")  # what is recorded of runs that are not stored lies below this folder
PROJECT = "askew"  # of runs whose user names no project


class Tracker(Protocol):
    """Records one run; an object of your own needs these three methods."""

    def start(self, config: dict[str, Any], folder: Path | None) -> int | None:
        """Begin to record, or go on; return the last round that is recorded already, or None.

        `config` has every setting by its dotted name. Rounds that were trained before are recorded first.
        """

    def record(self, round: int, metrics: dict[str, float]) -> None:
        """Record the numbers of one round."""

    def end(self, result: Run) -> None:
        """End the record of a run that has all its rounds, or was stopped and may go on later."""


MakeTracker = Callable[[Run], Tracker | None]  # None where there is nothing to record


# all runs -------------------------------------------------------------------------------------------------------------


class Tracking:
    """Makes trackers for each run and gives them its rounds; called before the first round and after every one."""

    def __init__(self, makers: Mapping[str, MakeTracker]) -> None:
        """`makers` make the trackers of one run, by the names that remarks give them."""
        self.makers = makers
        self.active: dict[str, tuple[Run, dict[str, Tracker]]] = {}  # by the run's name
        self.recorded: dict[tuple[str, str], int] = {}  # the last round, by the names of the run and the tracker

    def beside(self, watch: OnRound | None) -> OnRound | None:
        """A function that calls `watch` and then the trackers; `watch` itself where there are none."""
        if not self.makers:
            return watch

        def both(run: Run, record: Record | None) -> None:
            if watch is not None:
                watch(run, record)
            self(run, record)

        return both

    def __call__(self, run: Run, record: Record | None) -> None:
        """Record all rounds of a run that are not recorded yet; some may be trained for the second time."""
        known = run.name in self.active
        self.active[run.name] = run, self.active[run.name][1] if known else {}
        for name, make in () if known else self.makers.items():
            self.attempt(run, name, self.begin, make)
        for name in list(self.active[run.name][1]):
            self.attempt(run, name, self.catch_up)

    def begin(self, run: Run, name: str, make: MakeTracker) -> None:
        """Make a run's tracker and start it."""
        tracker = make(run)
        if tracker is not None:
            self.active[run.name][1][name] = tracker
            self.recorded[run.name, name] = max(0, tracker.start(flatten(run.config), run.folder) or 0)

    def catch_up(self, run: Run, name: str) -> None:
        """Record the rounds that a tracker does not have."""
        tracker = self.active[run.name][1][name]
        for record in run.rounds[self.recorded[run.name, name] :]:
            tracker.record(record["round"], metrics_of(record))
            self.recorded[run.name, name] = record["round"]

    def end(self, run: Run) -> None:
        """End the trackers of a run; one that was finished before and is read back is recorded now."""
        if run.over or run.name in self.active:
            self(run, None)
            for name in list(self.active[run.name][1]):
                self.attempt(run, name, self.close)
            del self.active[run.name]

    def close(self, run: Run, name: str) -> None:
        """End one tracker of a run."""
        self.active[run.name][1][name].end(run)

    def follow(self, runs: Iterable[Result]) -> Iterator[Result]:
        """These runs, whose trackers end when they come; what is no run passes."""
        for run in runs:
            if isinstance(run, Run):
                self.end(run)
            yield run

    def attempt(self, run: Run, name: str, action: Callable[..., None], *more: object) -> None:
        """Let a tracker of a run do something; if that fails, say so and go on without this tracker."""
        is_library = name.partition(":")[0] in KINDS
        try:
            # libraries greet and take leave on standard output, which is for results
            with redirect_stdout(StringIO()) if is_library else nullcontext():
                action(run, name, *more)
        except Exception as e:
            self.active[run.name][1].pop(name, None)
            what = " ".join(f"{type(e).__name__}: {e}".split())[:300]
            warnings.warn(f"{name} records {run.name} no further, the run itself goes on ({what}).", Remark, 2)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for run, _ in list(self.active.values()):
            self.end(run)


def tracking(track: Any, names: Sequence[str]) -> Tracking:
    """What records runs with these names.

    `track` is a text such as "tensorboard" or "wandb:project", an object with the methods of `Tracker`, a class or
    function that makes one for each run, or a list of these.
    """
    given = [] if track is None else list(track) if isinstance(track, (list, tuple)) else [track]
    group = f"sweep-{hashlib.sha256(' '.join(sorted(names)).encode()).hexdigest()[:6]}" if len(names) > 1 else ""
    makers: dict[str, MakeTracker] = {}
    for each in given:
        if isinstance(each, str):
            makers[each] = stored_tracker(each, group)
        else:
            name = getattr(each, "__name__", type(each).__name__)
            makers[name if name not in makers else f"{name} {len(makers)}"] = own_tracker(each, len(names))
    return Tracking(makers)


def own_tracker(tracker: Any, runs: int) -> MakeTracker:
    """What gives a user's own tracker to each of so many runs."""
    parts = ("start", "record", "end")
    is_one = not isinstance(tracker, type) and all(callable(getattr(tracker, part, None)) for part in parts)
    if not is_one and not callable(tracker):
        raise ConfigError(
            f"track must be one of {', '.join(KINDS)}, an object with the methods {', '.join(parts)}, or what makes "
            f'one, got {type(tracker).__name__}; write for example track="tensorboard".'
        )
    if is_one and runs > 1:
        raise ConfigError(
            f"track: a sweep has many runs, and each needs a tracker of its own; give what makes one, such as "
            f"track={type(tracker).__name__}."
        )
    return lambda run: tracker if is_one else tracker()


def metrics_of(record: Record) -> dict[str, float]:
    """The numbers of a record by their names there; of tables, their entries as "table.name"."""
    return {
        key: float(value)
        for key, value in flatten(record).items()
        if isinstance(value, (int, float)) and key != "round"
    }


def flatten(tables: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a table, and of tables in it as "table.name"."""
    flat: dict[str, Any] = {}
    for key, value in tables.items():
        if isinstance(value, Mapping):
            flat |= {f"{key}.{name}": entry for name, entry in flatten(value).items()}
        else:
            flat[key] = value
    return flat


# four libraries -------------------------------------------------------------------------------------------------------


def stored_tracker(text: str, group: str) -> MakeTracker:
    """What makes a tracker of one of the libraries from a text, its name and, after a colon, where to record."""
    name, _, place = text.partition(":")
    if name not in KINDS:
        raise UnknownName(f"track: no tracker {name!r}; {did_you_mean(name, KINDS)}")
    kind = KINDS[name]
    for variable, value in kind.environment.items():
        os.environ.setdefault(variable, value)  # before the import, and what the user has set stays
    try:
        module = import_module(kind.module)
    except ImportError as e:
        raise ConfigError(f"track: {name} cannot be imported ({e}); pip install {name}.") from None
    if getattr(module, "__file__", None) is None:  # a folder of this name, as Weights & Biases makes it for its files
        raise ConfigError(f"track: {name} is not installed, there is only a folder of its name; pip install {name}.")

    def make(run: Run) -> Tracker | None:
        tracker = kind(text, place, group, run)
        return None if run.over and tracker.note.get("rounds") == len(run.rounds) else tracker

    return make


class LibraryTracker:
    """What the trackers of the libraries have in common: where they record, and a note in the run's folder.

    The note says which record of the library is this run's, so that a resumed run goes on there.
    """

    module: ClassVar[str]  # what is imported
    environment: ClassVar[dict[str, str]] = {}  # variables that keep it from sending anything, unless they are set

    def __init__(self, key: str, place: str, group: str, run: Run) -> None:
        self.key, self.place, self.group, self.name = key, place, group, run.name
        self.file = run.folder / TRACKING if run.folder else None
        self.below = (run.folder.parent if run.folder else NO_FOLDER).resolve()  # the folder of all runs
        self.tags = {"folder": str(run.folder.resolve()) if run.folder else "", "hash": run.name.rpartition("-")[2]}
        self.run_tags = {f"run.{key}": value for key, value in self.tags.items()}  # beside the settings
        self.note: dict[str, Any] = read_json(self.file).get(key, {}) if self.file else {}

    def keep(self, **values: Any) -> None:
        """Add to the note."""
        self.note |= values
        if self.file:
            write_json(self.file, {**read_json(self.file), self.key: self.note})

    def start(self, config: dict[str, Any], folder: Path | None) -> int | None:
        """Begin to record, or go on."""
        raise NotImplementedError

    def record(self, round: int, metrics: dict[str, float]) -> None:
        """Record one round."""
        raise NotImplementedError

    def end(self, result: Run) -> None:
        """End the record, and note that it is whole."""
        self.close(result)
        if result.over:
            self.keep(rounds=len(result.rounds))

    def close(self, result: Run) -> None:
        """Write what is left."""
        raise NotImplementedError


class TensorBoard(LibraryTracker):
    """TensorBoard: event files in the run's folder, or in a folder of its name below the one that is given."""

    module = "torch.utils.tensorboard"

    def start(self, config: dict[str, Any], folder: Path | None) -> int | None:
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter
        from torch.utils.tensorboard.summary import hparams

        where = Path(self.place) / self.name if self.place else (folder or self.below / self.name) / "tensorboard"
        where.mkdir(parents=True, exist_ok=True)
        self.events = open(where / f"events.out.tfevents.{time.time():.6f}", "xb")  # noqa: SIM115
        self.writer = RecordWriter(self.events)
        self.write(file_version="brain.Event:2")
        # Hides what older files have; all rounds are recorded anew, so that none is there twice and none is missing.
        self.write(session_log=SessionLog(status=SessionLog.START))
        plain = {key: value if isinstance(value, (int, float)) else str(value) for key, value in config.items()}
        # of three parts the one with this run's values: TensorBoard itself finds out what runs have in common
        self.write(summary=hparams(plain | self.run_tags, {})[1])  # type: ignore[no-untyped-call]
        return None

    def write(self, **content: Any) -> None:
        """Write one event; TensorBoard's own writer would do so in a thread, whose errors come late."""
        from tensorboard.compat.proto.event_pb2 import Event

        self.writer.write(Event(wall_time=time.time(), **content).SerializeToString())
        self.events.flush()

    def record(self, round: int, metrics: dict[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=key, simple_value=value) for key, value in metrics.items()]
        self.write(step=round, summary=Summary(value=values))

    def close(self, result: Run) -> None:
        self.events.close()


class MLflow(LibraryTracker):
    """MLflow: a database in the folder of all runs or the one that is given, or the server with a given address."""

    module = "mlflow"
    environment: ClassVar = {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}

    def start(self, config: dict[str, Any], folder: Path | None) -> int | None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        place = self.place or os.environ.get("MLFLOW_TRACKING_URI", "")
        below = Path(place).resolve() if place else self.below
        is_address = "://" in place
        if not is_address:
            below.mkdir(parents=True, exist_ok=True)
        self.client = MlflowClient(place if is_address else f"sqlite:///{below / 'mlflow.db'}")
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        found = self.client.get_experiment_by_name(name)
        files = None if is_address else str(below / "mlflow-files")
        experiment = found.experiment_id if found else self.client.create_experiment(name, files)
        if "id" in self.note:
            self.client.update_run(self.note["id"], "RUNNING")
            return max((m.step for m in self.client.get_metric_history(self.note["id"], "seconds")), default=0)
        tags = self.tags | ({"group": self.group} if self.group else {})
        self.keep(id=self.client.create_run(experiment, tags=tags, run_name=self.name).info.run_id)
        parameters = [Param(key, str(value)) for key, value in config.items()]
        for first in range(0, len(parameters), 100):  # MLflow takes no more at a time
            self.client.log_batch(self.note["id"], params=parameters[first : first + 100])
        return None

    def record(self, round: int, metrics: dict[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        self.client.log_batch(self.note["id"], [Metric(key, value, now, round) for key, value in metrics.items()])

    def close(self, result: Run) -> None:
        self.client.set_terminated(self.note["id"], "FINISHED" if result.over else "KILLED")


class WeightsAndBiases(LibraryTracker):
    """Weights & Biases: offline, in the folder of all runs, unless WANDB_MODE says otherwise; a project is given."""

    module = "wandb"
    environment: ClassVar = {"WANDB_ERROR_REPORTING": "false"}

    def start(self, config: dict[str, Any], folder: Path | None) -> int | None:
        import wandb

        self.below.mkdir(parents=True, exist_ok=True)
        mode = os.environ.get("WANDB_MODE", "offline")
        self.run = wandb.init(
            mode=mode,
            project=self.place or os.environ.get("WANDB_PROJECT", PROJECT),
            dir=os.environ.get("WANDB_DIR", self.below),
            id=self.note.get("id"),
            name=self.name,
            group=self.group or None,
            tags=[self.tags["hash"]],
            config=config | self.run_tags,
            resume=None if mode == "offline" else "allow",
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=True),
        )
        if self.run.settings.mode != "offline":
            self.keep(id=self.run.id)
            return int(self.run.step) - 1
        # A process that is killed leaves a part that nobody can rely on: all rounds are recorded anew, in a new folder.
        now, before = Path(self.run.dir).parent, self.note.get("offline")
        self.keep(id=self.run.id, offline=now.name)
        if before:
            shutil.rmtree(now.parent / before, ignore_errors=True)
        return None

    def record(self, round: int, metrics: dict[str, float]) -> None:
        self.run.log(metrics, step=round)

    def close(self, result: Run) -> None:
        self.run.finish(exit_code=0 if result.over else 1)


class Trackio(LibraryTracker):
    """trackio: its own folder of this machine; a project is given."""

    module = "trackio"
    environment: ClassVar = {"GRADIO_ANALYTICS_ENABLED": "False", "HF_HUB_DISABLE_TELEMETRY": "1"}

    def start(self, config: dict[str, Any], folder: Path | None) -> int | None:
        import trackio
        from trackio.sqlite_storage import SQLiteStorage

        project = self.place or os.environ.get("TRACKIO_PROJECT", PROJECT)
        self.run = trackio.init(
            project,
            name=self.name,
            group=self.group or None,
            config=config | self.run_tags,
            resume="allow" if self.note else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self.keep(id=self.run.id)
        last: int | None = SQLiteStorage.get_last_step(project, run_id=self.run.id)
        return last

    def record(self, round: int, metrics: dict[str, float]) -> None:
        self.run.log(metrics, step=round)

    def close(self, result: Run) -> None:
        from trackio import context_vars

        self.run.finish()
        if context_vars.current_run.get() is self.run:  # or trackio would finish it again, and say so, at the very end
            context_vars.current_run.set(None)


KINDS: dict[str, type[LibraryTracker]] = {
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "wandb": WeightsAndBiases,
    "trackio": Trackio,
}
