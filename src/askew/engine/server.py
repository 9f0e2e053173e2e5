"""The server: one round from the participants' draw to the new model, with the guards that all methods share."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..core.algorithm import Algorithm
from ..core.bank import Bank
from ..core.rng import coin
from ..core.space import Space
from ..core.types import Cohort, State, nova_length, taken
from ..data.federation import Federation, LocalSettings, RoundPlan
from ..errors import AlgorithmError, ConfigError
from . import drift as drifting
from .base import Engine, PhaseInputs, PhaseOutputs, PhaseRequest, ahead, clock
from .jobs import sent
from .round_metrics import Examine, RoundMetric, RoundUpdates

RECORD = (
    "round",
    "participants",
    "train_loss",
    "accuracy",
    "loss",
    "bytes_up",
    "bytes_down",
    "seconds",
    "dropped",
    "absent",
)
TIMES = ("seconds_clients", "seconds_server")  # where they are recorded


@dataclass
class Traffic:
    """Bytes of one round, all participants together."""

    down: int = 0
    up: int = 0


class Made(NamedTuple):
    """What a round makes, phase by phase; it takes the place of the old only if all of it is sound."""

    x: Tensor
    buffers: Tensor
    state: State
    kept: dict[str, State]  # rows of the banks: "mine", "memory", "private"
    seen: RoundUpdates

    def only(self, rows: list[int]) -> Made:
        return self._replace(kept={name: taken(state, rows) for name, state in self.kept.items()})


class Told(NamedTuple):
    """What the host learns of a phase."""

    losses: list[float]
    sound: list[bool]  # whose reports are all numbers: others are left out
    whole: bool  # is what was made of them?
    numbers: dict[str, float]  # of the server's state, for the record


class Server:
    """The global model, the algorithm's state, and three banks: client state, server memory, private parts."""

    def __init__(
        self,
        alg: Algorithm,
        space: Space,
        fed: Federation,
        local: LocalSettings,
        engine: Engine,
        seed: int,
        least: int = 1,
        *,
        rounds: int = 0,
        examine: Examine | None = None,
        owns: Callable[[int], bool] | None = None,
        drift: bool = False,
        times: bool = False,
        witnesses: Sequence[RoundMetric] = (),
    ) -> None:
        self.alg, self.space, self.fed, self.local, self.engine, self.seed = alg, space, fed, local, engine, seed
        self.rounds = rounds  # T, which some schedules need
        self.ready: tuple[Any, RoundPlan] | None = None
        self.worked: list[tuple[Any, Tensor]] = []  # of the plans made last
        self.examine = examine  # accuracy and loss of a model on the public set
        self.least = least  # 2: batches of one sample are skipped, which batch norm cannot take
        self.phases = alg.phases()
        self.x, self.buffers = space.start.clone(), space.buffers.clone()
        self.trail = drifting.trail(space) if drift else None  # None: drift is not recorded
        self.witnesses = witnesses
        self.times = dict.fromkeys(TIMES if times else (), 0.0)  # of the round under way
        self.state = alg.server_state(space)
        self.parts, self.private = alg.parts(space), alg.private(space)
        self.clients = Bank(alg.client_state(space), owns=owns)  # which clients' state lives in this process; None: all
        self.memory = Bank(alg.memory(space))
        own = {"w": space.start[self.private.w], "b": space.buffers[self.private.b]}
        self.privates = Bank({} if self.private.empty else own)
        self.looks = sorted({name for phase in self.phases for name in (*phase.before, *phase.each, *phase.after)})
        if "gradient" in self.looks and least > 1:
            raise ConfigError(
                f"{alg.called()}: full gradients of a batch-norm network are not defined (chunks differ); use another norm."
            )
        clash = sorted({*self.state, *self.memory.start} & {*RECORD, *TIMES})
        if clash:
            raise AlgorithmError(
                f"{alg.called()}: {clash[0]!r} is a name of the round's record; rename that server state."
            )

    # one round --------------------------------------------------------------------------------------------------

    def prepare(self, round: int, ids: Sequence[int], share: Sequence[float] = ()) -> RoundPlan:
        """The plan of a round, kept for `play`: it may be made while the device is busy with the round before."""
        key = (round, tuple(ids), tuple(share))
        if self.ready is None or self.ready[0] != key:
            self.ready = (key, self.fed.plan(ids, round, self.local, self.looks, self.least, share))
            self._work(able(self.ready[1]), round)
        return self.ready[1]

    def following(self, ask: PhaseRequest) -> PhaseRequest | None:
        """What comes after this ask, but for models and states, if that is prepared; of a round with several phases it is not known.

        Where times are recorded, a round's samples count for that round.
        """
        if self.ready is None or self.ready[0][0] == ask.inbox.round or len(self.phases) > 1 or self.times:
            return None
        plan = able(self.ready[1])
        return ask._replace(plan=plan) if plan.ids else None

    def play(
        self,
        round: int,
        ids: Sequence[int],
        share: Sequence[float] = (),
        absent: int = 0,
        meanwhile: Callable[[], None] | None = None,
    ) -> dict[str, Any]:
        """One round with this server's own engine; `meanwhile` is called before the first phase's results are waited for."""
        moves = self.moves(round, ids, share, absent)
        try:
            ask = next(moves)
            while True:
                with timed([self], "clients"):
                    (out,) = self.engine.map([ask])
                if meanwhile is not None:
                    meanwhile()
                    meanwhile = None
                    ahead(self.engine, [coming for coming in (self.following(ask),) if coming])
                ask = moves.send(out)
        except StopIteration as end:
            record: dict[str, Any] = end.value
            return record

    def moves(
        self, round: int, ids: Sequence[int], share: Sequence[float] = (), absent: int = 0
    ) -> Generator[PhaseRequest, PhaseOutputs, dict[str, Any]]:
        """One round, which asks an engine for each phase and is sent its results; it returns the round's record.

        The model, all state and all banks change together or, if nobody is left, not at all. `share` is how much of its
        work each participant does; `absent` are those who were asked and do not answer.
        """
        plan = able(self.prepare(round, ids, share))
        rows = {"mine": self.clients, "memory": self.memory, "private": self.privates}
        kept = {name: bank.read(plan.ids) for name, bank in rows.items()}
        at = Made(self.x, self.buffers, self.state, kept, RoundUpdates.nothing(round, self.x, self.buffers))
        traffic, losses, carry = Traffic(), list[float](), State()
        gone: set[int] = set()  # asked, without an answer
        recorded, whole, numbers = drifting.Record(), False, dict[str, float]()
        self.times = dict.fromkeys(self.times, 0.0)
        if not plan.ids:  # the absent were sent what they need to begin
            sent = [self.x, self.buffers, *(v for n, v in self.state.items() if n in self.phases[0].broadcast)]
            traffic.down = absent * sum(v.numel() for v in sent) * self.space.start.element_size()
        for n, phase in enumerate(self.phases):
            if not plan.ids:
                break
            inbox = self._inbox(phase, round, plan, at, carry)
            want = [*(["w"] if at.kept["private"] else []), *(["carry"] if n + 1 < len(self.phases) else [])]
            out = self._cut((yield PhaseRequest(phase, inbox, plan, want)))
            self._count(traffic, phase, inbox, out, absent if n == 0 else None)
            if out.came is not None:
                gone |= {*plan.ids} - {plan.ids[i] for i in out.came}
                plan, at = plan.only(out.came), at.only(out.came)
                if not plan.ids:
                    break
            with timed([self], "server"):
                guess = self._guess(phase, round, plan, out, at)
                told = self._told(out, guess)
            if phase.trains or not losses:
                losses = told.losses
            if not all(told.sound):
                left = [i for i, ok in enumerate(told.sound) if ok]
                out, plan, at = only(out, left), plan.only(left), at.only(left)
                if not plan.ids:
                    break
                guess = self._made(phase, round, plan, out, at)
                told = self._told(out, guess)
            at, carry, whole, numbers = guess, out.carry, told.whole, told.numbers
        healthy = bool(plan.ids) and whole
        if healthy:
            x, seen = at.x, at.seen
            if self.trail is not None:
                learned = at.kept["mine"].get("h") if self.clients.owns is None else None
                recorded, self.trail = drifting.recorded(
                    self.space, self.trail, round, self.x, x, seen.deltas, seen.weights, learned
                )
            for witness in self.witnesses if len(seen.deltas) else ():
                recorded |= witness(seen._replace(new=x, buffers=at.buffers))
            self.x, self.buffers, self.state = x, at.buffers, at.state
            for name, bank in rows.items():
                bank.write(plan.ids, at.kept[name])
        finite = [v for v in losses if np.isfinite(v)]
        return {
            "round": round,
            "participants": [int(i) for i in ids if i not in gone],
            "train_loss": float(np.mean(finite)) if finite else None,
            "bytes_up": traffic.up,
            "bytes_down": traffic.down,
            "dropped": len(ids) - len(gone) - (len(plan.ids) if healthy else 0),
            **({"absent": absent + len(gone)} if absent or gone else {}),
            **self.times,
            **recorded,
            **(numbers if healthy else {n: float(v) for n, v in self.state.items() if v.dim() == 0}),
        }

    def _made(self, phase: Algorithm, round: int, plan: RoundPlan, out: PhaseOutputs, at: Made) -> Made:
        """What a phase's reports make of model, buffers, state and rows."""
        cohort, seen, buffers = self._cohort(round, plan, out, at.x, phase), at.seen, at.buffers
        x, state, memory = self._aggregate(phase, at.x, out.up, cohort, at.state, at.kept["memory"])
        if "delta" in out.up and (self.trail is not None or self.witnesses):
            weights = self._weights(phase, out.up, cohort)
            seen = seen._replace(
                ids=plan.ids, deltas=out.up["delta"], locals=out.buffers, weights=weights, public=cohort.public
            )
        if phase.trains and buffers.numel():
            shared = self._weights(phase, out.up, cohort) @ out.buffers
            buffers = shared if self.private.empty else shared.index_copy(0, self.private.b, buffers[self.private.b])
        private = at.kept["private"]
        if out.w is not None:
            private = {"w": out.w[:, self.private.w], "b": out.buffers[:, self.private.b]}
        mine = self._same(phase, "finish", "client state", at.kept["mine"], out.mine)
        return Made(x, buffers, state, {"mine": mine, "memory": memory, "private": private}, seen)

    def _guess(self, phase: Algorithm, round: int, plan: RoundPlan, out: PhaseOutputs, at: Made) -> Made:
        """The same before it is known whether all reports are sound, so that the host need not wait for the device in between."""
        try:
            return self._made(phase, round, plan, out, at)
        except (RuntimeError, ValueError, ArithmeticError):  # which a report that is no number may cause
            if all(self._told(out, at).sound):
                raise
            return at

    def _told(self, out: PhaseOutputs, made: Made) -> Told:
        """All that the host must know of a phase, from the device at once."""
        kept = [] if out.w is None else [out.w]  # private coordinates are in no upload
        reports = [t for t in (*out.up.values(), *out.mine.values(), *kept, out.buffers) if t.numel()]
        logged = {n: v for n, v in made.state.items() if v.dim() == 0}
        parts = [t for t in (made.x, made.buffers, *made.state.values()) if t.dim() and t.numel()]
        each = torch.stack([out.loss.double(), *map(halved, reports)])
        rest = [*(halved(t[None]) for t in parts), *(v.double()[None] for v in logged.values())]
        values = torch.cat([each.flatten(), *rest]).cpu().numpy()
        rows, whole = np.split(values, [each.numel()])
        numbers = dict(zip(logged, whole[len(parts) :].tolist(), strict=True))
        sound = np.isfinite(rows.reshape(each.shape)).all(0)
        return Told(rows[: len(sound)].tolist(), sound.tolist(), bool(np.isfinite(whole).all()), numbers)

    def _inbox(self, phase: Algorithm, round: int, plan: RoundPlan, at: Made, carry: State) -> PhaseInputs:
        x, buffers, state, kept, _ = at
        down = {
            n: v.to(self.space.dtype) if v.is_floating_point() else v for n, v in state.items() if n in phase.broadcast
        }
        memory = {n: v for n, v in kept["memory"].items() if n in phase.broadcast}
        if kept["private"]:
            count = len(plan.ids)
            x = x.expand(count, -1).index_copy(1, self.private.w, kept["private"]["w"])
            buffers = buffers.expand(count, -1).index_copy(1, self.private.b, kept["private"]["b"])
        local = self.local
        rates = (
            local.rate(round, self.rounds),
            local.rate(1, self.rounds),
            local.momentum,
            local.weight_decay,
            local.clip_limit,
        )
        return PhaseInputs(
            x, buffers, down, memory, kept["mine"], carry, self.parts, *rates, round, *self._work(plan, round)
        )

    def _work(self, plan: RoundPlan, round: int) -> Tensor:
        """Of the participants their steps, the length of these under momentum, relative sizes, and what their coins show."""
        for works, told in self.worked:
            if len(works) == len(plan.train) and all(a is b for a, b in zip(works, plan.train, strict=True)):
                return told
        steps = torch.tensor([work.batches for work in plan.train], dtype=self.space.dtype)
        size = torch.from_numpy(self.fed.sizes[plan.ids] / self.fed.mean_size).to(self.space.dtype)
        coins = torch.tensor([coin(self.seed, round, i) for i in plan.ids], dtype=self.space.dtype)
        told = sent(torch.stack([steps, nova_length(steps, self.local.momentum), size, coins]), self.space.device)
        self.worked = [*self.worked[-1:], (plan.train, told)]
        return told

    def _cohort(self, round: int, plan: RoundPlan, out: PhaseOutputs, x: Tensor, phase: Algorithm) -> Cohort:
        steps, tau, size, _ = self._work(plan, round)
        p = size / size.sum() if self.alg.by_samples else torch.full_like(size, 1 / len(size))
        public: State | None = None
        if self.examine is not None and phase.trains and "delta" in out.up:
            scores = [
                self.examine(x + delta, buffers) for delta, buffers in zip(out.up["delta"], out.buffers, strict=True)
            ]
            accuracy, loss = torch.stack(scores, 1).to(self.space.dtype)
            public = {"accuracy": accuracy, "loss": loss}
        now, first = (self.local.rate(t, self.rounds) for t in (round, 1))
        return Cohort(p, steps, tau, size, out.loss, public, now, first, round, len(self.fed.eligible))

    def _weights(self, phase: Algorithm, up: State, cohort: Cohort) -> Tensor:
        return phase.weights(up, cohort).to(self.space.dtype)

    def _aggregate(
        self, phase: Algorithm, x: Tensor, up: State, cohort: Cohort, state: State, memory: State
    ) -> tuple[Tensor, State, State]:
        new, told = phase.aggregate(x, up, cohort, state | memory)
        self._same(phase, "aggregate", "model", {"x": x}, {"x": new})
        told = self._same(phase, "aggregate", "server state", state | memory, told)
        return new, {n: told[n] for n in state}, {n: told[n] for n in memory}

    def _same(self, phase: Algorithm, hook: str, what: str, old: State, new: State) -> State:
        """States keep their names, shapes and dtypes, so that a bank, a message and a checkpoint can hold them."""
        was, came = ({n: f"{tuple(v.shape)} {v.dtype}" for n, v in state.items()} for state in (old, new))
        if was != came:
            name = next(n for n in {**was, **came} if was.get(n) != came.get(n))
            raise AlgorithmError(
                f"{phase.called()}: {hook}() must return the {what} with its declared names, shapes and types; {name!r} was declared "
                f"{was.get(name, 'not at all')} and came back {came.get(name, 'not at all')}. Correct the hook."
            )
        return new

    # guards and accounts ----------------------------------------------------------------------------------------

    def _cut(self, out: PhaseOutputs) -> PhaseOutputs:
        """Private coordinates never go up: every upload of length P arrives with zeros there."""
        if not self.private.w.numel():
            return out
        whole = {n for n, t in out.up.items() if t.dim() == 2 and t.shape[1] == self.space.P}
        up = {n: t.index_fill(1, self.private.w, 0) if n in whole else t for n, t in out.up.items()}
        return out._replace(up=up)

    def _count(
        self, traffic: Traffic, phase: Algorithm, inbox: PhaseInputs, out: PhaseOutputs, absent: int | None
    ) -> None:
        """Bytes of what is declared to travel, for every client that was asked; a number of absent ones marks the first phase."""
        hidden, asked, answers = self.private.w.numel(), len(inbox.steps), len(out.loss)
        one = torch.empty((), dtype=self.space.dtype).element_size()
        seen = self.space.Q - self.private.b.numel()

        def size(t: Tensor, rows: int) -> int:
            numbers = t.numel() // max(rows, 1)
            return (numbers - (hidden if numbers == self.space.P else 0)) * t.element_size()

        down = sum(size(t, 1) for t in inbox.server.values()) + sum(size(t, asked) for t in inbox.memory.values())
        up = sum(size(t, answers) for t in out.up.values())
        if absent is not None:
            down += (self.space.P - hidden + seen) * one
        if phase.trains:
            up += seen * one
        traffic.down += down * (asked + (absent or 0))
        traffic.up += up * answers


@contextmanager
def timed(servers: Sequence[Server], part: str) -> Iterator[None]:
    """The seconds of a part of their round, in equal shares, for those that record times."""
    some = [server for server in servers if server.times]
    if not some:
        yield
        return
    began = clock(some[0].space.device)
    yield
    for server in some:
        server.times[f"seconds_{part}"] += (clock(server.space.device) - began) / len(servers)


def halved(t: Tensor) -> Tensor:
    """Half the mean of each row [C]: a number where all of the row are, however large, and only there. One pass over memory."""
    rows = t[..., None].flatten(1)
    if not rows.is_floating_point():
        return torch.zeros(len(rows), dtype=torch.float64, device=t.device)
    return (rows @ _shares(rows.shape[1], rows.dtype, rows.device)).double()


@lru_cache(maxsize=4)
def _shares(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((n,), 0.5 / max(1, n), dtype=dtype, device=device)


def able(plan: RoundPlan) -> RoundPlan:
    """The plan of those who have anything to do."""
    rows = [i for i, work in enumerate(plan.train) if work.batches]
    return plan if len(rows) == len(plan.train) else plan.only(rows)


def only(out: PhaseOutputs, rows: list[int]) -> PhaseOutputs:
    w = None if out.w is None else out.w[rows]
    return PhaseOutputs(
        taken(out.up, rows), taken(out.mine, rows), taken(out.carry, rows), out.buffers[rows], out.loss[rows], w
    )
