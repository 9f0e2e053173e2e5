"""Runs from their configurations to their folders: the round loop, readable top to bottom."""

from __future__ import annotations

import shutil
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.task import WithFeatures
from ..engine.base import Engine, PhaseOutputs, PhaseRequest, finished_time, prepare_next
from ..engine.choose import EngineChoice
from ..engine.distributed import SINGLE, ProcessGroup, process_group
from ..engine.evaluate import (
    accuracy_by_owner,
    accuracy_by_rarity,
    client_spread,
    evaluate_clients,
    mean_private,
    share_raised,
    with_private,
)
from ..engine.server import measure_time
from ..errors import EngineError, StoreError
from ..participation import Turnout
from . import checkpoint, workers
from .build import BuildCache, BuiltRun, build, device_of
from .config import Config, read_back
from .store import Record, Run, append_lines, load, locked, read_json, read_rounds, to_json, write_json, write_text
from .toml import read_toml
from .workers import free_cores, hired, visible

OnRound = Callable[[Run, Record | None], None]  # called once before the first round and after every round

TOGETHER = 32  # runs that share a device
BRIEF = 0.1  # seconds; shorter rounds follow one another without a pause
LONG = 0.05  # seconds; of shorter rounds on a CPU several processes would wait for each other more than they save
WORTH = 20.0  # seconds that processes nobody asked for must save
CREW = 16  # of them at most


def play(
    config: Config,
    out: str | Path | None = None,
    *,
    fresh: bool = False,
    watch: OnRound | None = None,
    save_every: float = 5.0,
) -> Run:
    """Run a configuration. With `out` it lives in a folder there: finished runs are read back, interrupted ones resumed.

    `fresh` starts over; `watch` sees every record; `save_every` is the least number of seconds between checkpoints.
    """
    (run,) = play_all([config], out, fresh=fresh, watch=watch, save_every=save_every)
    return run


def play_all(
    configs: Sequence[Config],
    out: str | Path | None = None,
    *,
    fresh: bool = False,
    watch: OnRound | None = None,
    save_every: float = 5.0,
) -> Iterator[Run]:
    """Run several configurations: on a GPU many at a time, which fill it better than one, elsewhere one after the other.

    With engine.workers > 1 processes are started that share each run's work; with 0, once a run proves long enough to be worth it.
    It ends with the first run that was stopped.
    """
    todo, alone = list(configs), process_group().size == 1
    while todo:
        first, count = todo[0], 1
        hires = alone and first.engine.workers > 1
        most = len(todo) if hires else TOGETHER if alone and device_of(first.engine.device).type == "cuda" else 1
        while count < min(len(todo), most) and todo[count].engine == first.engine:
            count += 1
        now, todo = todo[:count], todo[count:]
        with ExitStack() as held:
            runs: Iterable[Run]
            if hires and (fresh or not all(stored(folder_of(config, out)) for config in now)):
                stopping = held.enter_context(stop_requests())
                runs = held.enter_context(closing(hired(now, out, fresh, watch, save_every, stopping)))
            else:
                runs = play_together(now, out, fresh=fresh, watch=watch, save_every=save_every)
            for run in runs:
                if run.crew > 1:
                    asked = replace(first, engine=replace(first.engine, workers=run.crew))
                    stopping = held.enter_context(stop_requests())
                    (run,) = held.enter_context(closing(hired([asked], out, False, watch, save_every, stopping)))
                yield run
                if not run.finished:
                    return


def play_together(
    configs: Sequence[Config],
    out: str | Path | None = None,
    *,
    fresh: bool = False,
    watch: OnRound | None = None,
    save_every: float = 5.0,
) -> list[Run]:
    """Run configurations with the same engine settings side by side, round by round; on several ranks, one at a time."""
    group = process_group()
    if group.size > 1 and len(configs) > 1:
        return [play(config, out, fresh=fresh, watch=watch, save_every=save_every) for config in configs]
    with ExitStack() as held:
        folders = [folder_of(config, out) for config in configs]
        for config, folder in zip(configs, folders, strict=True):
            if folder and group.is_leader:
                held.enter_context(locked(folder))
                if fresh:
                    clear(folder)
                check_same(folder, config)
        done = group.broadcast([n for n, folder in enumerate(folders) if group.is_leader and stored(folder)])
        runs = {n: load(folder) for n, folder in enumerate(folders) if folder and n in done}
        if len(runs) < len(configs):
            with (
                torch_state(configs[0], group),
                enough_memory(),
                stop_requests(patient=group.size > 1 or workers.employed) as stopping,
            ):
                shop, players = BuildCache(), list[ActiveRun]()
                for n, (config, folder) in enumerate(zip(configs, folders, strict=True)):
                    if n not in runs:
                        house = build(config, shop, group, engine_before(folder))
                        players.append(ActiveRun(house, folder, watch if group.is_leader else None, save_every, group))
                        runs[n] = players[-1].run
                for player in players:
                    player.run.facts["together"] = len(players)  # whose time is told as equal shares
                loop(players, lambda: stopping() or (len(players) == 1 and players[0].gives_up()), group)
    return [runs[n] for n in range(len(configs))]


class ActiveRun:
    """One run at play: whose turn it is, what is written."""

    def __init__(
        self,
        house: BuiltRun,
        folder: Path | None,
        watch: OnRound | None,
        save_every: float,
        group: ProcessGroup = SINGLE,
    ) -> None:
        self.house, self.config, self.server, self.group = house, house.config, house.server, group
        self.watch, self.save_every, self.due = watch, save_every, time.monotonic() + save_every
        self.run = Run(read_back(house.config), facts=house.facts, federation=house.fed.labels(), folder=folder)
        self.t = resume(self.run, house, group) if folder else 0  # the last round played
        self.coming: dict[int, Turnout] = {}
        self.scores: dict[str, Tensor] = {}  # of the last round's model, still on the device
        if watch:
            watch(self.run, None)

    @property
    def over(self) -> bool:
        return self.t >= self.config.rounds

    @property
    def patient(self) -> bool:
        """May the round's record wait for the next round, so that the device goes on without a pause?"""
        return self.house.space.device.type == "cuda" and self.group.size == 1

    def aside(self) -> torch.cuda.Stream | None:
        """Where a model is measured while the next round is on its way; None: in between."""
        return evaluation_stream(self.house.space.device) if self.patient else None

    def gives_up(self) -> bool:
        """Would several processes end the run so much sooner that they should go on with it?"""
        run, free = (
            self.run,
            self.config.engine.workers == 0 and self.group.size == 1 and self.house.space.device.type == "cpu",
        )
        if not free or not run.folder or len(run.rounds) < 2:
            return False
        took = min(float(r["seconds"]) for r in run.rounds[-2:])  # the first round warms up
        crew = min(free_cores(), CREW, len(run.rounds[-1]["participants"]))
        if (
            crew > 1
            and took >= LONG
            and took * (self.config.rounds - self.t) * (1 - 1 / crew) > WORTH
            and visible(self.config)
        ):
            run.crew = crew
        return run.crew > 1

    def look_ahead(self, t: int) -> None:
        """Who comes and with which batches does not depend on the rounds before: found out while the device is busy."""
        if t <= self.config.rounds and t not in self.coming:
            came = self.config.participation.turnout(
                self.config.seed, t, self.house.fed.eligible, self.house.fed.clients
            )
            self.coming[t] = came
            self.server.prepare(t, came.ids.tolist(), came.share.tolist())

    def moves(self) -> Generator[PhaseRequest, PhaseOutputs, Record]:
        """The next round."""
        self.look_ahead(self.t + 1)
        came, self.before = self.coming.pop(self.t + 1), (self.server.w, self.server.buffers)
        return self.server.round_requests(self.t + 1, came.ids.tolist(), came.share.tolist(), len(came.absent))

    def examine(self) -> dict[str, Tensor]:
        """The round is played: how good it is, if that is to be known; the answer is still on the device."""
        self.t, self.models = self.t + 1, (self.before, (self.server.w, self.server.buffers))
        if self.t % self.config.evaluation.every and not self.over:
            return {}
        if aside := self.aside():
            aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            return examined(self.house)

    def close(self, record: Record, seconds: float, scores: dict[str, Tensor]) -> None:
        """The round's record is made and written."""
        record["seconds"] = seconds
        with torch.cuda.stream(self.aside()):
            record |= measured(self.house, scores) if scores else {"accuracy": None, "loss": None}
            if scores and self.config.evaluation.descent:
                record |= share_raised(self.house.task, self.models, self.house.fed, record["participants"])
            if (
                record["round"] == self.config.rounds
                and self.config.evaluation.spread
                and self.house.fed.test_owner is not None
            ):
                came = np.bincount(
                    [i for r in (*self.run.rounds, record) for i in r["participants"]], minlength=self.house.fed.clients
                )
                record |= accuracy_by_owner(
                    self.house.task, self.server.w, self.server.buffers, self.house.fed, came.tolist()
                )
        self.run.rounds.append(record)
        if self.run.folder and self.group.is_leader:
            append_lines(self.run.folder / "rounds.jsonl", [record])

    def keep(self, due: bool) -> None:
        """The round is written: is a checkpoint due? Then it is shown."""
        if due and not self.over and self.run.folder:
            now = time.monotonic()
            checkpoint.save(self.run.folder, self.server, self.t, self.config.digest(), self.group)
            cost = time.monotonic() - now
            # At most a twentieth of the time; 0: every round.
            self.due = now + (max(self.save_every, 20 * cost) if self.save_every else 0)
        if self.watch:
            self.watch(self.run, self.run.rounds[-1])

    def end(self) -> None:
        """The run is through, or was stopped."""
        run = self.run
        run.facts["state"] = "finished" if run.finished else "interrupted"
        run.model = {n: v.cpu() for n, v in model_of(self.house).items()}
        if run.folder and not run.finished:
            checkpoint.save(run.folder, self.server, self.t, self.config.digest(), self.group)
        if run.folder and self.group.is_leader:
            checkpoint.save_tensors(
                run.folder / "model.safetensors", run.model, {"round": str(self.t), "run": run.name}
            )
            if run.finished:
                (run.folder / checkpoint.FILE).unlink(missing_ok=True)
            write_json(run.folder / "run.json", run.facts)


def loop(players: Sequence[ActiveRun], stopping: Callable[[], bool], group: ProcessGroup = SINGLE) -> None:
    """Round after round of every run: who comes, one round, how good it is, what is written."""
    active = [player for player in players if not player.over]
    untold: list[tuple[ActiveRun, Record, float, bool]] = []
    brief = False  # then models are measured and records written while the device is busy with other runs, or with the next round

    def tell() -> None:
        """Write what the last round gave."""
        rounds, untold[:] = list(untold), ()
        for player, record, seconds, _ in rounds:
            player.close(record, seconds, player.scores)
        for player, *_, due in rounds:
            player.keep(due)

    while active:
        began = time.perf_counter()
        try:
            records = one_round(active, tell, brief)
        finally:
            tell()
        seconds = (finished_time(active[0].house.space.device) - began) / len(active)  # a run's share
        if not brief:
            for player in active:
                player.scores = player.examine()
        brief = seconds < BRIEF and all(player.patient for player in active)
        here = time.monotonic()
        due = [bool(now) for now in group.gather_numbers([here >= player.due for player in active])[0].tolist()]
        untold += zip(active, records, [seconds] * len(active), due, strict=True)
        if not brief or any(due) or any(player.over for player in active):
            tell()
        stop = group.gather_numbers([stopping()]).any()
        if stop:
            tell()
        for player in [player for player in active if player.over]:
            player.end()
        active = [player for player in active if not player.over]
        if stop:
            break
    for player in active:
        player.end()


def one_round(players: Sequence[ActiveRun], meanwhile: Callable[[], None], examine: bool) -> list[Record]:
    """The next round of every run, phase by phase; runs that share an engine are handed to it together.

    `meanwhile` is called when a phase is on its way; `examine` measures a run's model as soon as its round is over.
    """
    rounds = [player.moves() for player in players]
    records: dict[int, Record] = {}
    asks: dict[int, PhaseRequest] = {}

    def go_on(n: int, out: PhaseOutputs | None) -> None:
        try:
            asks[n] = next(rounds[n]) if out is None else rounds[n].send(out)
        except StopIteration as end:
            records[n] = end.value
            if examine:
                players[n].scores = players[n].examine()

    for n in range(len(players)):
        go_on(n, None)
    while asks:
        now, asks = asks, {}
        outs: dict[int, PhaseOutputs] = {}
        engines: dict[int, Engine] = {id(players[n].server.engine): players[n].server.engine for n in now}
        for key, engine in engines.items():
            mine = [n for n in now if id(players[n].server.engine) == key]
            with measure_time([players[n].server for n in mine], "clients"):
                outs |= dict(zip(mine, engine.run([now[n] for n in mine]), strict=True))
        for n in now:
            players[n].look_ahead(players[n].t + 2)
        for key, engine in engines.items():
            servers = {n: players[n].server for n in now if id(players[n].server.engine) == key}
            prepare_next(
                engine, [ask for n, server in servers.items() if (ask := server.next_request(now[n])) is not None]
            )
        meanwhile()
        for n, out in outs.items():
            go_on(n, out)
    return [records[n] for n in range(len(players))]


@cache
def evaluation_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def examined(house: BuiltRun) -> dict[str, Tensor]:
    """Scores of what the algorithm calls its models; the first is the headline."""
    server, fed, exam = house.server, house.fed, house.evaluator
    how, part = server.alg.evaluates(), server.private
    scores: dict[str, Tensor] = {}
    for name, w in server.alg.models(server.w, server.state).items():
        buffers = server.buffers
        if how == "clients" and not part.empty:
            scores[name] = evaluate_clients(exam, w, buffers, part, server.privates)
        else:
            if how == "mean" and not part.empty:
                w, buffers = with_private(w, buffers, part, mean_private(server.privates, len(fed.eligible)))
            scores[name] = exam(w, buffers)
    return scores


def measured(house: BuiltRun, scores: dict[str, Tensor]) -> Record:
    """Scores as plain numbers, and how evenly the clients are served where that is asked for."""
    server, fed, part = house.server, house.fed, house.server.private
    record: Record = {}
    for name, (accuracy, loss, *half) in zip(scores, torch.stack(list(scores.values())).tolist(), strict=True):
        tail = f"_{name}" if record else ""
        record |= {f"accuracy{tail}": accuracy if fed.classes else None, f"loss{tail}": loss}
        if half and fed.classes and not tail:
            count, chosen = len(fed.test.y), len(fed.test.y) // 2
            record |= {
                "accuracy_choose": half[0],
                "accuracy_report": (count * accuracy - chosen * half[0]) / (count - chosen),
            }
    if house.config.evaluation.spread and fed.classes:
        own = server.alg.evaluates() == "clients" and not part.empty
        record |= client_spread(house.task, server.w, server.buffers, fed, part, server.privates if own else None)
    if house.config.evaluation.rare and fed.classes and fed.assignment is not None and part.empty:
        record |= accuracy_by_rarity(house.task, server.w, server.buffers, fed)
    return record


def model_of(house: BuiltRun) -> dict[str, Tensor]:
    """The global model by the network's own names; of one client's training, that client's."""
    server, x, buffers = house.server, house.server.w, house.server.buffers
    if server.alg.pooled and len(server.privates):
        x, buffers = with_private(x, buffers, server.private, {n: v[0] for n, v in server.privates.read([0]).items()})
    prefix = "module." if isinstance(house.module, WithFeatures) else ""
    return {
        n.removeprefix(prefix): v for n, v in {**house.space.split(x), **house.space.split_buffers(buffers)}.items()
    }


# the folder -----------------------------------------------------------------------------------------------------


def folder_of(config: Config, out: str | Path | None) -> Path | None:
    return None if out is None else Path(out) / config.name()


def stored(folder: Path | None) -> bool:
    """Is there a finished run?"""
    if folder is None or not ((folder / "run.toml").exists() and (folder / "model.safetensors").exists()):
        return False
    return load(folder).finished


def engine_before(folder: Path | None) -> EngineChoice | None:
    """The engine of a run that goes on: another one's rounds would differ from those before by rounding."""
    facts = read_json(folder / "run.json") if folder and (folder / checkpoint.FILE).exists() else {}
    return EngineChoice(str(facts["engine"]), str(facts["reason"])) if {"engine", "reason"} <= facts.keys() else None


def fixed(page: dict[str, Any]) -> dict[str, Any]:
    """A page without what changes nothing: where a method's file lies, how many processes there are."""
    engine = page.get("engine")
    return page | {"plugins": None, "engine": engine | {"workers": None} if isinstance(engine, dict) else engine}


def check_same(folder: Path, config: Config) -> None:
    """A folder holds one configuration for ever."""
    page = folder / "run.toml"
    if page.exists() and fixed(read_toml(page)) != fixed(read_back(config)):
        raise StoreError(f"{folder} holds a run of another configuration; use another --out, or --fresh to replace it.")


def clear(folder: Path) -> None:
    """Remove what a run stored, and nothing else."""
    for name in (
        "run.toml",
        "rounds.jsonl",
        "run.json",
        "federation.json",
        "model.safetensors",
        "conformal.json",
        checkpoint.FILE,
    ):
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / "figures", ignore_errors=True)


def resume(run: Run, house: BuiltRun, group: ProcessGroup = SINGLE) -> int:
    """Begin a folder, or go on from its checkpoint; returns the last round played."""
    assert run.folder is not None
    folder, log = run.folder, run.folder / "rounds.jsonl"
    known = read_rounds(log)
    last = checkpoint.restore(folder, house.server, house.config.digest())
    if last > len(known):
        raise StoreError(
            f"{log} ends before the checkpoint's round {last}; restore the file, or use --fresh to start over."
        )
    run.rounds = known[:last]
    if not group.is_leader:
        return last
    write_text(folder / "run.toml", house.config.toml())
    write_text(log, "".join(to_json(r) + "\n" for r in run.rounds))
    write_json(folder / "federation.json", run.federation)
    write_json(folder / "run.json", run.facts)
    return last


# the process ----------------------------------------------------------------------------------------------------


@contextmanager
def torch_state(config: Config, group: ProcessGroup = SINGLE) -> Iterator[None]:
    """One thread on the CPU: small batches gain nothing from more, and on a busy machine more are slower. Full float32 on CUDA.

    What a run changes in torch (threads, TF32, random state) is as it was when the run ends.
    """
    before, tf32 = torch.get_num_threads(), (torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32)
    cuda = list(range(torch.cuda.device_count())) if config.engine.device != "cpu" and torch.cuda.is_available() else []
    if cuda and group.size > 1:
        cuda = [torch.cuda.current_device()]  # the others are other ranks'
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = config.engine.dtype == "tf32"
    try:
        with torch.random.fork_rng(devices=cuda):
            yield
    finally:
        torch.set_num_threads(before)
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = tf32


@contextmanager
def enough_memory() -> Iterator[None]:
    """Turn a failed allocation into a sentence."""
    try:
        yield
    except (MemoryError, RuntimeError) as e:
        if not isinstance(e, (MemoryError, torch.OutOfMemoryError)) and "allocate memory" not in str(e):
            raise
        raise EngineError(
            "there is not enough memory for this run; take a smaller network, smaller batches or fewer participants, or another device."
        ) from None


@contextmanager
def stop_requests(patient: bool = False) -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C (or SIGTERM) lets the round end, so that what is stored is whole; the second stops at once.

    A process that another started is patient: it hears of one Ctrl-C more than once, and who started it ends it if need be.
    """
    asked: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return

    def ask(number: int, frame: object) -> None:
        if asked and not patient:
            raise KeyboardInterrupt
        asked.append(number)

    before = {s: signal.signal(s, ask) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(asked)
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
