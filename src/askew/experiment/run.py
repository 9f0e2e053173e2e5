"""Runs in this process: the round loop, readable top to bottom, for one run or for several side by side.

How many runs are given to it, and whether other processes share their work, is decided in `launch`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..core.records import Record
from ..engine.base import PhaseOutputs, PhaseRequest, finished_time, prepare_next
from ..engine.choose import stochastic
from ..engine.evaluate import accuracy_by_owner, share_raised
from ..engine.process_group import SINGLE, ProcessGroup, process_group
from ..engine.server import measure_time
from ..errors import ConfigError
from ..participation import Turnout
from . import checkpoint
from .build import BuildCache, BuiltRun, build
from .config import Config, stored_tables
from .divergence import divergence_sentence
from .extend import begin_at_end, keep_end
from .folder_lock import lock_folder
from .global_generators import TORCH, States, draws_sentence, generator_states
from .process_state import deterministic_algorithms, explain_out_of_memory, stop_requests, torch_lock, torch_state
from .run_evaluation import evaluate_models, evaluation_record, main_model, model_tensors
from .run_folder import (
    begin_or_resume,
    check_finished_data,
    check_same_config,
    clear_run,
    computed_with,
    is_finished,
    previous_engine,
    read_finished,
    run_folder,
)
from .store import DIVERGED, REACHED, Run, append_lines, flush_records, load, write_json
from .workers import is_worker

OnRound = Callable[[Run, Record | None], None]  # called once before the first round, and after every round
Model = tuple[Tensor, Tensor]  # w [P] and buffers [Q]

SAVE_SECONDS = 5.0  # seconds at least between two checkpoints, where the user says nothing
SAVE_SHARE = 20  # checkpoints take at most one part in so many of the time
SHORT_ROUND = 0.1  # seconds; shorter rounds on a GPU follow one another without a pause
FIRST_ROUNDS = 10  # in which, as in rounds that are not short, global generators are compared: half a millisecond each


def run_together(
    configs: Sequence[Config],
    out: str | Path | None = None,
    *,
    fresh: bool = False,
    watch: OnRound | None = None,
    save_every: float = SAVE_SECONDS,
    hand_over: Callable[[ActiveRun], bool] = lambda active: False,
) -> list[Run]:
    """Run configurations with the same engine settings side by side, round by round; of several ranks, one at a time.

    Finished runs are read back. A run that is alone asks `hand_over` after every round whether to stop, so that
    others go on with it.
    """
    group = process_group()
    if group.size > 1 and len(configs) > 1:
        return [run_together([c], out, fresh=fresh, watch=watch, save_every=save_every)[0] for c in configs]
    folders = [run_folder(config, out) for config in configs]
    with ExitStack() as stack:
        runs = open_folders(configs, folders, fresh, group, stack)
        if len(runs) < len(configs):
            stack.enter_context(torch_lock)
            stack.enter_context(torch_state(configs[0], group))
            stack.enter_context(deterministic_algorithms(configs[0].engine))
            stack.enter_context(explain_out_of_memory())
            stopping = stack.enter_context(stop_requests(patient=group.size > 1 or is_worker()))
            build_cache, active = BuildCache(), list[ActiveRun]()
            for n in [n for n in range(len(configs)) if n not in runs]:
                built = build_watched(configs[n], folders[n], build_cache, group)
                active.append(ActiveRun(built, folders[n], watch if group.is_leader else None, save_every, group))
                runs[n] = active[-1].run
            for run in active:
                run.run.facts["together"] = len(active)  # a round's time is divided equally among them
            round_loop(active, lambda: stopping() or (len(active) == 1 and hand_over(active[0])), group)
    return [runs[n] for n in range(len(configs))]


def open_folders(
    configs: Sequence[Config], folders: Sequence[Path | None], fresh: bool, group: ProcessGroup, stack: ExitStack
) -> dict[int, Run]:
    """Lock the runs' folders until the stack ends, and prepare them; the finished runs, by number, are read back."""
    for config, folder in zip(configs, folders, strict=True):
        if folder and group.is_leader:
            stack.enter_context(lock_folder(folder))
            if fresh:
                clear_run(folder)
            check_same_config(folder, config)
            if not fresh:
                begin_at_end(folder, config)
    stored = enumerate(zip(configs, folders, strict=True)) if group.is_leader else ()
    finished = group.broadcast([n for n, (c, folder) in stored if is_finished(folder, c.evaluation)])
    for n in finished if group.is_leader else ():
        check_finished_data(Path(folders[n] or ""), configs[n])
    read_back = read_finished if group.is_leader else load
    return {n: read_back(folder) for n, folder in enumerate(folders) if folder and n in finished}


def build_watched(config: Config, folder: Path | None, build_cache: BuildCache, group: ProcessGroup) -> BuiltRun:
    """Build a run; if that draws from global generators, which no seed of the run sets, its facts say so."""
    before = generator_states()
    built = build(config, build_cache, group, previous_engine(folder))
    if sentence := draws_sentence(before, generator_states(), "before the first round"):
        built.facts["draws"] = sentence
    return built


# one run --------------------------------------------------------------------------------------------------------


@dataclass
class TrainedRound:
    """A round of one run that was trained, and whose record is not written yet."""

    run: ActiveRun
    record: Record
    before: Model
    after: Model
    scores: dict[str, Tensor] = field(default_factory=dict)  # of the models after it, still on the device
    seconds: float = 0.0
    checkpoint_due: bool = False


class ActiveRun:
    """One run while it runs: which round comes next, who takes part in it, what is measured and written after it."""

    def __init__(
        self,
        built: BuiltRun,
        folder: Path | None,
        watch: OnRound | None,
        save_every: float,
        group: ProcessGroup = SINGLE,
    ) -> None:
        self.built, self.config, self.server, self.group = built, built.config, built.server, group
        self.watch, self.save_every, self.next_save = watch, save_every, time.monotonic() + save_every
        self.run = Run(stored_tables(built.config), facts=built.facts, federation=built.fed.labels(), folder=folder)
        self.t = begin_or_resume(self.run, built, group) if folder else 0  # the last round trained
        if built.clock and self.run.rounds:
            built.clock.resume(self.run.rounds)
        self.best_accuracy = self.run.best_accuracy or 0.0
        self.before: Model = (self.server.w, self.server.buffers)  # before the round that is trained
        self.plain_record: Record = {}  # the last record, as it is where more rounds follow
        self.clock_record: Record = {}  # what the round's record says of the virtual clock
        self.turnouts: dict[int, Turnout] = {}  # by round: who takes part, where that is known before it begins
        if watch:
            watch(self.run, None)

    @property
    def is_over(self) -> bool:
        """Are all rounds trained, or is it to stop early?"""
        return self.t >= self.config.rounds or bool(self.early_state)

    @property
    def early_state(self) -> str:
        """The state in which the run is to stop early; empty if it goes on."""
        settings = self.config.evaluation
        if settings.stop_diverged and "diverged" in self.run.facts:
            return DIVERGED
        return REACHED if settings.stop_at and self.best_accuracy >= settings.stop_at else ""

    @property
    def can_overlap(self) -> bool:
        """May a round be evaluated and written while the device trains the next one?"""
        return self.built.space.device.type == "cuda" and self.group.size == 1

    @property
    def evaluation_due(self) -> bool:
        """Is the model evaluated after the round that was just trained?"""
        return self.t % self.config.evaluation.every == 0 or self.is_over

    def prepare_round(self, t: int) -> None:
        """Draw who takes part in round t and plan the batches: neither depends on what the rounds before trained."""
        if t <= self.config.rounds and t not in self.turnouts:
            fed, clock = self.built.fed, self.built.clock
            if clock is None:
                turnout = self.config.participation.turnout(self.config.seed, t, fed.eligible, fed.clients)
            else:
                try:
                    turnout = clock.turnout(t)
                except ConfigError:
                    if t == self.t + 1:
                        raise
                    return  # it is said when that round begins, after the one that is trained now is written
            self.turnouts[t] = turnout
            self.server.prepare(t, turnout.ids.tolist(), turnout.share.tolist())

    def trains_next(self) -> bool:
        """Does the next round train anybody? One that does not ends as soon as it begins."""
        self.prepare_round(self.t + 1)
        turnout = self.turnouts[self.t + 1]
        plan = self.server.prepare(self.t + 1, turnout.ids.tolist(), turnout.share.tolist())
        return any(work.batches for work in plan.train)

    def start_round(self) -> Generator[PhaseRequest, PhaseOutputs, Record]:
        """Begin the next round: a generator that asks for the clients' work of each phase and returns the record."""
        self.prepare_round(self.t + 1)
        turnout, self.before = self.turnouts.pop(self.t + 1), (self.server.w, self.server.buffers)
        self.clock_record = dict(turnout.record)
        return self.server.turnout_requests(self.t + 1, turnout)

    def end_round(self, record: Record) -> TrainedRound:
        """Note that the round is trained."""
        self.t += 1
        record |= self.clock_record
        return TrainedRound(self, record, self.before, (self.server.w, self.server.buffers))

    def evaluate(self) -> dict[str, Tensor]:
        """Scores of the models, still on the device; none if no evaluation is due."""
        if not self.evaluation_due:
            return {}
        stream = self.evaluation_stream()
        if stream:
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            return evaluate_models(self.built)

    def evaluation_stream(self) -> torch.cuda.Stream | None:
        """The CUDA stream in which models are evaluated beside the next round; None where rounds do not overlap."""
        return stream_beside(self.built.space.device) if self.can_overlap else None

    def write_record(self, trained: TrainedRound) -> None:
        """Complete a round's record with its time and what was measured, and append it to the log."""
        record, built, settings = trained.record, self.built, self.config.evaluation
        record["seconds"] = trained.seconds
        unmeasured = record | {"accuracy": None, "loss": None}
        with torch.cuda.stream(self.evaluation_stream()):
            record |= evaluation_record(built, trained.scores) if trained.scores else {"accuracy": None, "loss": None}
            if trained.scores and settings.descent:
                record |= share_raised(built.task, (trained.before, trained.after), built.fed, record["participants"])
            self.plain_record = dict(record) if record["round"] % settings.every == 0 else unmeasured
            if record["round"] == self.config.rounds and settings.spread and built.fed.test_owner is not None:
                clients = [client for r in (*self.run.rounds, record) for client in r["participants"]]
                rounds_of = np.bincount(clients, minlength=built.fed.clients).tolist()  # of each client
                record |= accuracy_by_owner(built.task, *main_model(built), built.fed, rounds_of)
        self.run.rounds.append(record)
        self.best_accuracy = max(self.best_accuracy, record["accuracy"] or 0.0)
        if self.run.folder and self.group.is_leader:
            append_lines(self.run.folder / "rounds.jsonl", [record])
        self.note_divergence()

    def note_divergence(self) -> None:
        """Note in the run's facts that it has diverged, once."""
        run, config = self.run, self.config
        if "diverged" in run.facts:
            return
        classes, every = int(run.federation.get("classes", 0)), config.evaluation.every if config.simulated else 0
        if sentence := divergence_sentence(run.rounds, classes, config.rounds, config.local.lr, every):
            self.note_fact("diverged", sentence)

    def note_fact(self, name: str, sentence: str) -> None:
        """Note what a user should know of this run."""
        self.run.facts[name] = sentence
        if self.run.folder and self.group.is_leader:
            write_json(self.run.folder / "run.json", self.run.facts)

    @property
    def may_draw(self) -> bool:
        """Does code of a user's run in the rounds, and is it not known that it draws from global generators?"""
        return self.built.users_code and "draws" not in self.run.facts

    def after_record(self, checkpoint_due: bool) -> None:
        """Save a checkpoint if one is due, then call `watch` with the round's record."""
        if checkpoint_due and not self.is_over and self.run.folder:
            began = time.monotonic()
            self.save_checkpoint(self.run.folder)
            took = time.monotonic() - began
            # save_every = 0 means: after every round
            self.next_save = began + (max(self.save_every, SAVE_SHARE * took) if self.save_every else 0)
        if self.watch:
            self.watch(self.run, dict(self.run.rounds[-1]))  # a copy: what a user does with it stays with the user

    def save_checkpoint(self, folder: Path) -> None:
        """Save a checkpoint, once the records of its rounds are on the disk; all ranks must call this."""
        if self.group.is_leader:
            flush_records(folder / "rounds.jsonl")
        checkpoint.save(folder, self.server, self.t, self.config.digest(), self.group, computed_with(self.built))

    def finish(self) -> None:
        """Store the model and the state of a run that has all its rounds, or was stopped."""
        run = self.run
        run.facts["state"] = "finished" if run.finished else self.early_state or "interrupted"
        run.facts["kernels"] = self.built.kernels.summary()  # known only now: which of them the run used
        run.model = {name: tensor.cpu() for name, tensor in model_tensors(self.built).items()}
        if run.folder and not run.finished:
            self.save_checkpoint(run.folder)
        elif run.folder and self.config.simulated:
            used = computed_with(self.built)
            keep_end(run.folder, self.config, self.server, self.plain_record, self.group, used)
        if run.folder and self.group.is_leader:
            flush_records(run.folder / "rounds.jsonl")
            about = {"round": str(self.t), "run": run.name}
            checkpoint.save_tensors(run.folder / "model.safetensors", run.model, about)
            if run.finished:
                checkpoint.remove(run.folder)
            write_json(run.folder / "run.json", run.facts)


@cache
def stream_beside(device: torch.device) -> torch.cuda.Stream:
    """One CUDA stream for each device, beside the one that trains."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


# all runs -------------------------------------------------------------------------------------------------------


def round_loop(runs: Sequence[ActiveRun], stopping: Callable[[], bool], group: ProcessGroup = SINGLE) -> None:
    """Train, evaluate and write round after round of every run, until all are over or `stopping` says so.

    Short rounds on a GPU overlap: a round is evaluated as soon as it is trained, and written while the device trains
    the next one.
    """
    for run in runs:
        if run.is_over:  # it was interrupted after the round in which it is to stop
            run.finish()
    active = [run for run in runs if not run.is_over]
    unwritten: list[TrainedRound] = []
    overlap, seconds = False, 0.0

    def write() -> None:
        rounds, unwritten[:] = list(unwritten), ()
        for trained in rounds:
            trained.run.write_record(trained)
        for trained in rounds:
            trained.run.after_record(trained.checkpoint_due)

    while active:
        # where rounds overlap, `write` calls what a user's program may draw in as it likes
        watched = [] if overlap else runs_to_watch(active, seconds)
        states = generator_states(with_torch=True) if watched else {}
        began = time.perf_counter()
        try:
            rounds = train_round(active, meanwhile=write, evaluate=overlap)
        finally:
            write()  # what was trained before this round, also if it failed
        seconds = (finished_time(active[0].built.space.device) - began) / len(active)
        if not overlap:
            for trained in rounds:
                trained.scores = trained.run.evaluate()
        note_draws(watched, states)
        overlap = seconds < SHORT_ROUND and all(run.can_overlap for run in active)
        now = time.monotonic()
        due = group.gather_numbers([now >= run.next_save for run in active])[0].tolist()  # rank 0 decides
        for trained, checkpoint_due in zip(rounds, due, strict=True):
            trained.seconds, trained.checkpoint_due = seconds, bool(checkpoint_due)
        unwritten += rounds
        if not overlap or any(due) or any(run.is_over for run in active):
            write()
        stop = bool(group.gather_numbers([stopping()]).any())
        if stop:
            write()
        for run in active:
            if run.is_over or stop:
                run.finish()
        active = [] if stop else [run for run in active if not run.is_over]


def runs_to_watch(runs: Sequence[ActiveRun], seconds: float) -> list[ActiveRun]:
    """Runs whose next round may draw from global generators; none in later rounds that are short, as the last one."""
    is_cheap = seconds >= SHORT_ROUND or any(run.t < FIRST_ROUNDS for run in runs)
    return [run for run in runs if run.may_draw] if is_cheap else []


def note_draws(runs: Sequence[ActiveRun], before: States) -> None:
    """Note in the facts of these runs if global generators were drawn from in the round that was just trained."""
    after = generator_states(with_torch=True) if runs else {}
    for run in runs:
        # a network or a client's hook that draws has torch's set for each client
        own = {name: state for name, state in before.items() if name != TORCH or not stochastic(run.built.module)}
        if sentence := draws_sentence(own, after, f"in round {run.t}"):
            run.note_fact("draws", sentence)


def train_round(runs: Sequence[ActiveRun], meanwhile: Callable[[], None], evaluate: bool) -> list[TrainedRound]:
    """Train the next round of every run, phase by phase; runs with the same engine are given to it together.

    `meanwhile` is called while a phase is trained, and in any case before a model changes. With `evaluate` a run's
    models are evaluated as soon as its round is trained.
    """
    if not all(run.trains_next() for run in runs):
        meanwhile()
    rounds = [run.start_round() for run in runs]
    trained: dict[int, TrainedRound] = {}
    requests: dict[int, PhaseRequest] = {}

    def advance(n: int, outputs: PhaseOutputs | None) -> None:
        """Give run n the outputs of its phase; it asks for its next phase, or its round is trained."""
        try:
            requests[n] = next(rounds[n]) if outputs is None else rounds[n].send(outputs)
        except StopIteration as end:
            trained[n] = runs[n].end_round(end.value)
            if evaluate:
                trained[n].scores = runs[n].evaluate()

    for n in range(len(runs)):
        advance(n, None)
    while requests:
        current, outputs = dict(requests), dict[int, PhaseOutputs]()
        requests.clear()
        by_engine: dict[int, list[int]] = {}
        for n in current:
            by_engine.setdefault(id(runs[n].server.engine), []).append(n)
        for members in by_engine.values():
            with measure_time([runs[n].server for n in members], "clients"):
                results = runs[members[0]].server.engine.run([current[n] for n in members])
            outputs |= dict(zip(members, results, strict=True))
        for n in current:
            runs[n].prepare_round(runs[n].t + 2)
        for members in by_engine.values():
            following = [runs[n].server.next_request(current[n]) for n in members]
            prepare_next(runs[members[0]].server.engine, [request for request in following if request is not None])
        meanwhile()
        for n in outputs:
            advance(n, outputs[n])
    return [trained[n] for n in range(len(runs))]
