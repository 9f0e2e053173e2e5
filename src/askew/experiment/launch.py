"""How configurations are run: one in this process, many side by side on a GPU, or shared by worker processes.

`run_config` and `run_all` decide that. Worker processes run `run_shared`, which sends messages about every round;
`RemoteRuns` makes runs of these messages in the parent. The rounds themselves are in `run`, the processes in `workers`.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Generator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from ..core.records import Record
from ..engine.process_group import process_group
from ..errors import ConfigError, DiskFull
from .build import device_of
from .config import CHOICES, Config, FromPython, stored_tables
from .cores import check_cores, own_cores
from .plugins import plugin_module
from .process_state import prepare_deterministic, stop_requests
from .run import SAVE_SECONDS, ActiveRun, OnRound, run_together
from .run_folder import is_finished, run_folder, stored_model
from .store import Run, load
from .workers import Message, Send, WorkerGroup, can_meet

TOGETHER = 32  # runs at most that share a GPU
MOST_WORKERS = 16  # at most so many workers take over a run whose user asked for no number
# seconds; of shorter rounds on a CPU several processes would wait for each other more than they save
LEAST_ROUND_SECONDS = 0.05
LEAST_SAVED_SECONDS = 20.0  # seconds that workers must save on the remaining rounds to take over a run


def run_config(
    config: Config,
    out: str | Path | None = None,
    *,
    fresh: bool = False,
    watch: OnRound | None = None,
    save_every: float = SAVE_SECONDS,
) -> Run:
    """Run one configuration; a run that is finished in its folder is read back, an interrupted one resumed.

    With `out` the run has a folder there, else nothing is stored.
    `fresh` starts over; `watch` is called after every round; `save_every` is the least number of seconds between
    checkpoints.
    """
    (run,) = run_all([config], out, fresh=fresh, watch=watch, save_every=save_every)
    return run


def run_all(
    configs: Sequence[Config],
    out: str | Path | None = None,
    *,
    fresh: bool = False,
    watch: OnRound | None = None,
    save_every: float = SAVE_SECONDS,
) -> Generator[Run, None, None]:
    """Run several configurations and yield each run when it ends; after one that was stopped come no more.

    On a GPU many run at a time, which use it better than one; elsewhere one after the other. With engine.workers > 1
    worker processes share each run; with 0 they take over a run that proves long enough.
    """
    remaining = list(configs)
    if any(config.engine.deterministic for config in configs):
        prepare_deterministic()
    while remaining:
        batch = next_batch(remaining)
        del remaining[: len(batch)]
        with closing(run_batch(batch, out, fresh, watch, save_every)) as runs:
            for run in runs:
                yield run
                if not run.over:
                    return


class FailedRun(NamedTuple):
    """A run that could not be made, and why."""

    config: Config
    error: Exception


def run_each(
    configs: Sequence[Config], out: str | Path | None, *, watch: OnRound | None = None
) -> Generator[Run | FailedRun, None, None]:
    """As `run_all`, but a run that fails is yielded as such and the others go on.

    Where several run at a time and one fails, those that have not ended are run again one by one, from what is stored.
    Errors of the system, such as a full disk, end all.
    """
    waiting, remaining = list[list[Config]](), list(configs)
    while remaining:
        waiting.append(next_batch(remaining))
        del remaining[: len(waiting[-1])]
    while waiting:
        part, ended = waiting.pop(0), 0
        try:
            for run in run_all(part, out, watch=watch):
                yield run
                if not run.over:
                    return
                ended += 1
        except (OSError, DiskFull):
            raise
        except Exception as e:
            alone = len(part) == 1
            waiting[:0] = [] if alone else [[config] for config in part[ended:]]
            if alone:
                yield FailedRun(part[0], e)


def next_batch(configs: Sequence[Config]) -> list[Config]:
    """The first configurations, as many as can be run at a time; all have the same engine settings."""
    first = configs[0]
    if uses_workers(first):
        most = len(configs)
    elif first.engine.deterministic:  # rows of several runs would be computed together
        most = 1
    else:
        most = TOGETHER if process_group().size == 1 and device_of(first.engine.device).type == "cuda" else 1
    return list(takewhile(lambda config: config.engine == first.engine, configs[:most]))


def uses_workers(config: Config) -> bool:
    """Does this process start workers for a configuration? A worker starts none."""
    return process_group().size == 1 and config.engine.workers > 1


def run_batch(
    configs: Sequence[Config], out: str | Path | None, fresh: bool, watch: OnRound | None, save_every: float
) -> Generator[Run, None, None]:
    """Run configurations that can be run at a time, in this process or in workers."""
    is_stored = lambda config: is_finished(run_folder(config, out), config.evaluation)
    if uses_workers(configs[0]) and (fresh or not all(map(is_stored, configs))):
        yield from run_on_workers(configs, out, fresh, watch, save_every)
        return
    takeover = Takeover()
    runs = run_together(configs, out, fresh=fresh, watch=watch, save_every=save_every, hand_over=takeover)
    if takeover.workers > 1:
        (config,) = configs
        config = replace(config, engine=replace(config.engine, workers=takeover.workers))
        yield from run_on_workers([config], out, False, watch, save_every)
    else:
        yield from runs


# worker processes that share a run ------------------------------------------------------------------------------


class Takeover:
    """Decides after each round whether workers would end a run so much sooner that they take it over."""

    workers = 1  # how many take it over

    def __call__(self, active: ActiveRun) -> bool:
        """Should the run stop in this process, so that workers go on with it?"""
        run, config = active.run, active.config
        alone_on_cpu = active.group.size == 1 and active.built.space.device.type == "cpu"
        if config.engine.workers != 0 or not alone_on_cpu or not run.folder or len(run.rounds) < 2:
            return False
        if config.engine.deterministic and run.facts["engine"] != "sequential":  # others' bits depend on the number
            return False
        seconds = min(float(record["seconds"]) for record in run.rounds[-2:])  # the first round warms up
        workers = min(free_cores(), MOST_WORKERS, len(run.rounds[-1]["participants"]))
        if workers < 2 or seconds < LEAST_ROUND_SECONDS:
            return False
        saved = seconds * (config.rounds - active.t) * (1 - 1 / workers)
        if saved <= LEAST_SAVED_SECONDS or not can_rebuild(config) or not can_meet():
            return False
        self.workers = workers
        return True


def free_cores() -> int:
    """Cores that this process may use and nobody else is using, its own among them."""
    return max(1, round(own_cores() - max(0.0, os.getloadavg()[0] - 1)))


def can_rebuild(config: Config) -> bool:
    """Can a new process build this configuration from its text alone?"""
    try:
        check_rebuildable(config)
    except ConfigError:
        return False
    return True


def check_rebuildable(config: Config, option: str = "") -> None:
    """Refuse a configuration that a new process could not build from its text alone.

    `option` names the setting that gives the number of processes, where it is not engine.workers.
    """
    plugins = {plugin_module(path) for path in config.plugins}
    for name in CHOICES:
        settings = getattr(config, name)
        module = type(settings).__module__
        if isinstance(settings, FromPython) or not (module.startswith("askew.") or module in plugins):
            asked = option or f"engine.workers = {config.engine.workers}"
            raise ConfigError(
                f"{asked}: new processes cannot see the {name} that was handed in from Python; "
                f"{'leave it out' if option else 'set engine.workers = 1'}, or register it in a file and name that in "
                "plugins."
            )


def run_on_workers(
    configs: Sequence[Config], out: str | Path | None, fresh: bool, watch: OnRound | None, save_every: float
) -> Generator[Run, None, None]:
    """Run configurations one after the other, each shared by as many workers as the first one sets."""
    for config in configs:
        check_rebuildable(config)
    check_cores(configs[0].engine.workers, "engine.workers (--workers)")
    with ExitStack() as stack:
        stopping = stack.enter_context(stop_requests())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()) if out is None else out)
        job = {
            **configs_message(configs),
            "out": str(folder),
            "fresh": fresh,
            "save_every": math.inf if out is None else save_every,
        }
        runs = RemoteRuns(configs, folder, watch, with_models=True, temporary=out is None)
        group = stack.enter_context(WorkerGroup(configs[0].engine.workers, run_shared, job))
        for message in group.messages(stopping):
            run = runs.receive(message)
            if run is not None:
                yield run


def run_shared(job: Message, send: Send) -> None:
    """A worker's job: run configurations together with the other workers, and send messages about them."""
    configs, watch = received_configs(job), send_rounds(send)
    for run in run_all(configs, job["out"], fresh=job["fresh"], watch=watch, save_every=job["save_every"]):
        send(end_message(run))


# messages about runs --------------------------------------------------------------------------------------------


def configs_message(configs: Sequence[Config]) -> Message:
    """The message by which another process gets configurations."""
    return {"configs": [stored_tables(config) for config in configs], "names": [config.name() for config in configs]}


def received_configs(message: Message) -> list[Config]:
    """The configurations in a message; refused where this process read other files than the one that sent it."""
    configs = [Config.build(tables) for tables in message["configs"]]
    if [config.name() for config in configs] != message["names"]:
        raise ConfigError(
            "a plugin, a file that it imports or a file of data was edited after this command had read it, and a new "
            "process read the new one; start the command again, which goes on from what is stored."
        )
    return configs


def send_rounds(send: Send) -> OnRound:
    """A function for `watch` that sends a message when a run starts and after each of its rounds."""

    def watch(run: Run, record: Record | None) -> None:
        if record is None:
            start = {"rounds": run.rounds, "facts": run.facts, "federation": run.federation}
            send({"run": run.name, "start": start})
        else:
            send({"run": run.name, "record": record, "facts": run.facts})

    return watch


def end_message(run: Run) -> Message:
    """The message that a run has ended, or was found finished."""
    return {"run": run.name, "end": run.facts, "tensors": list(run.model)}


class RemoteRuns:
    """Runs that other processes train, made of their messages.

    `folder` holds the run folders; a `temporary` one is removed at the end, so no run names it. `with_models` reads
    the model of each run that ends.
    """

    def __init__(
        self,
        configs: Sequence[Config],
        folder: Path,
        watch: OnRound | None,
        *,
        with_models: bool = False,
        temporary: bool = False,
    ) -> None:
        self.tables: dict[str, dict[str, Any]] = {}
        self.expect(configs)
        self.folder, self.watch, self.with_models, self.temporary = folder, watch, with_models, temporary
        self.active: dict[str, Run] = {}  # by name: those that have started and not ended

    def expect(self, configs: Sequence[Config]) -> None:
        """Take messages about the runs of these configurations."""
        self.tables |= {config.name(): stored_tables(config) for config in configs}

    def receive(self, message: Message) -> Run | None:
        """Take in one message and call `watch` for a start or a round; return the run that it ends, else None."""
        name = message["run"]
        if "end" in message:
            return self._end(name, message["end"], message["tensors"])
        if "start" in message:
            folder = None if self.temporary else self.folder / name
            self.active[name] = Run(self.tables[name], **message["start"], folder=folder)
        else:
            self.active[name].rounds.append(message["record"])
            self.active[name].facts = message["facts"]
        if self.watch:
            self.watch(self.active[name], message.get("record"))
        return None

    def _end(self, name: str, facts: dict[str, Any], tensors: list[str]) -> Run:
        """The run that has ended; one that never started was finished before, and is read back.

        `tensors` are the names of its model in the network's order, which the file does not keep.
        """
        run = self.active.pop(name, None)
        if run is None:
            return load(self.folder / name)
        run.facts = facts
        if self.with_models:
            model = stored_model(self.folder / name)
            run.model = {tensor: model[tensor] for tensor in tensors}
        return run
