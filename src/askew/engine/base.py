"""What goes into an engine and what comes out: one phase of one round, rows in the order of the cohort."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..core.algorithm import Algorithm
from ..core.types import Client, Part, State, select_rows
from ..data.federation import RoundPlan

UPLOAD = "up."  # begins the names of uploads where they are beside others


def parts_key(parts: Mapping[str, Part]) -> bytes:
    """What the parts of a method are, as a hash: runs whose parts are the same have one."""
    if not parts:
        return b""
    digest = hashlib.blake2b()
    for name, part in parts.items():
        digest.update(repr((name, *(t.numel() for t in part))).encode())
        for t in part:
            digest.update(t.cpu().numpy().tobytes())
    return digest.digest()


class PhaseInputs(NamedTuple):
    """What the server hands to the C clients of a phase."""

    w: Tensor  # [P], or [C, P] where clients have private parts
    buffers: Tensor  # [Q], or [C, Q]
    server: State  # broadcast, the same to all
    memory: State  # broadcast, to each its row
    state: State  # rows of client state
    carry: State  # rows from the phase before
    parts: dict[str, Part]
    lr: float
    lr0: float
    momentum: float
    decay: float
    clip: float
    round: int
    steps: Tensor  # [C], in the model's dtype, as the three below
    tau: Tensor
    size: Tensor
    coin: Tensor
    parts_key: bytes = b""  # the same for runs whose parts are the same

    def client(self, i: int) -> Client:
        """One client's view: plain numbers, its own rows."""
        return Client(
            w=self.w if self.w.dim() == 1 else self.w[i],
            buffers=self.buffers if self.buffers.dim() == 1 else self.buffers[i],
            server=self.server | select_rows(self.memory, i),
            state=select_rows(self.state, i),
            carry=select_rows(self.carry, i),
            parts=self.parts,
            lr=self.lr,
            lr0=self.lr0,
            momentum=self.momentum,
            decay=self.decay,
            clip=self.clip,
            steps=float(self.steps[i]),
            tau=float(self.tau[i]),
            size=float(self.size[i]),
            round=self.round,
            coin=float(self.coin[i]),
        )

    def rows(self, rows: list[int] | Tensor) -> PhaseInputs:
        """The inputs of some clients."""
        w, buffers = (t if t.dim() == 1 else t[rows] for t in (self.w, self.buffers))
        memory, state, carry = (select_rows(entries, rows) for entries in (self.memory, self.state, self.carry))
        steps, tau, size, coin = (t[rows] for t in (self.steps, self.tau, self.size, self.coin))
        new = self._replace(w=w, buffers=buffers, memory=memory, state=state, carry=carry)
        return new._replace(steps=steps, tau=tau, size=size, coin=coin)


class Incident(NamedTuple):
    """A client that was asked and one of whose answers is not used."""

    client: int
    reason: str  # a few plain words, the same for all incidents of one kind; they are in `answers`
    arrived: bool  # did an answer come that was not refused?
    lost: bool = True  # is no answer of this client used?


class PhaseOutputs(NamedTuple):
    """What the C clients return; their models and carry only if asked for: both are as large as the uploads."""

    up: State
    state: State
    carry: State  # rows, or nothing
    buffers: Tensor  # [C, Q]
    loss: Tensor  # [C]
    theta: Tensor | None  # [C, P]
    answered: list[int] | None = None  # the rows of the cohort that these are, where some are not used; None: all
    incidents: tuple[Incident, ...] = ()  # why the others are not used

    def entries(self) -> State:
        """All that is sent, and models if there are any, in one dictionary; `uploads_in` finds the uploads in it."""
        sent = {**{UPLOAD + n: t for n, t in self.up.items()}, "buffers": self.buffers, "loss": self.loss}
        return sent if self.theta is None else sent | {"theta": self.theta}

    def cohort_rows(self) -> list[int]:
        """The places of these rows in the whole cohort."""
        return list(range(len(self.loss))) if self.answered is None else self.answered

    def leave_out(self, incidents: Sequence[Incident], ids: Sequence[int]) -> PhaseOutputs:
        """The outputs without the clients that these incidents cost; `ids` are the clients of the whole cohort."""
        cohort_rows = self.cohort_rows()
        gone = {incident.client for incident in incidents if incident.lost}
        kept = [i for i, row in enumerate(cohort_rows) if ids[row] not in gone]
        answered = [cohort_rows[i] for i in kept]
        return self.rows(kept)._replace(answered=answered, incidents=(*self.incidents, *incidents))

    def rows(self, rows: list[int]) -> PhaseOutputs:
        """The outputs of some clients; who the others were is not kept."""
        up, state, carry = (select_rows(entries, rows) for entries in (self.up, self.state, self.carry))
        theta = None if self.theta is None else self.theta[rows]
        return PhaseOutputs(up, state, carry, self.buffers[rows], self.loss[rows], theta)


def uploads_in(entries: State) -> State:
    """The uploads among such entries, by their own names."""
    return {n.removeprefix(UPLOAD): t for n, t in entries.items() if n.startswith(UPLOAD)}


class PhaseRequest(NamedTuple):
    """One phase of one run's round, for an engine to do."""

    phase: Algorithm
    inputs: PhaseInputs
    plan: RoundPlan
    wanted: Collection[str]  # "theta", "carry": what is needed beside the uploads

    def sent_buffers(self, rows: list[int]) -> Tensor:
        """The buffers that some of the clients were sent, by their rows [C', Q]."""
        sent = self.inputs.buffers
        return sent.expand(len(rows), -1) if sent.dim() == 1 else sent[rows]

    def only(self, rows: list[int]) -> PhaseRequest:
        """The same of some of the clients, by their rows."""
        return self._replace(inputs=self.inputs.rows(rows), plan=self.plan.only(rows))

    def first_steps(self, steps: int) -> PhaseRequest:
        """The same with the first steps of each client alone, and the first chunk of each look."""
        looks = {name: [work.first(1) for work in clients] for name, clients in self.plan.looks.items()}
        return self._replace(plan=self.plan._replace(train=[w.first(steps) for w in self.plan.train], looks=looks))


class OutputStage(Protocol):
    """Changes a phase's outputs on their way from the clients to the server's step: an attack, a fault, a check, noise.

    It leaves a client out by `PhaseOutputs.leave_out`, which puts the reason into the round's record.
    """

    def __call__(self, request: PhaseRequest, outputs: PhaseOutputs) -> PhaseOutputs: ...


class RecordingStage:
    """A stage that keeps numbers from round to round and adds to the round's record."""

    def __call__(self, request: PhaseRequest, outputs: PhaseOutputs) -> PhaseOutputs:
        raise NotImplementedError

    def note(self, record: dict[str, Any]) -> dict[str, Any]:
        """What the stage adds to a round's record, which is complete but for what is measured later."""
        raise NotImplementedError

    def resume(self, records: Sequence[dict[str, Any]]) -> None:
        """Take up the numbers where the records of a run that is continued leave off."""
        raise NotImplementedError

    def without_clients(self, round: int, w: Tensor) -> State | None:
        """The upload, one row, that a round without any client's answer goes on with; None: it changes nothing."""
        return None


class Engine(Protocol):
    """Runs the local loop for cohorts: of one run, or of several that share the engine."""

    name: str

    def run(self, requests: Sequence[PhaseRequest]) -> list[PhaseOutputs]: ...


def prepare_next(engine: Engine, requests: Sequence[PhaseRequest]) -> None:
    """Pass an engine that can use it the requests that come next; models and states in it are not yet real."""
    if requests and (prepare := getattr(engine, "prepare", None)):
        prepare(requests)


def finished_time(device: torch.device) -> float:
    """The clock's time in seconds when all work on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
