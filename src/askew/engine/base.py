"""What goes into an engine and what comes out: one phase of one round, rows in the order of the cohort."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..core.algorithm import Algorithm
from ..core.types import Client, Part, State, taken
from ..data.federation import RoundPlan


class PhaseInputs(NamedTuple):
    """What the server hands to the C clients of a phase."""

    x: Tensor  # [P], or [C, P] where clients have private parts
    buffers: Tensor  # [Q], or [C, Q]
    server: State  # broadcast, the same to all
    memory: State  # broadcast, to each its row
    mine: State  # rows of client state
    carry: State  # rows from the phase before
    part: dict[str, Part]
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

    def me(self, i: int) -> Client:
        """One client's view: plain numbers, its own rows."""
        return Client(
            self.x if self.x.dim() == 1 else self.x[i],
            self.buffers if self.buffers.dim() == 1 else self.buffers[i],
            self.server | taken(self.memory, i),
            taken(self.mine, i),
            taken(self.carry, i),
            self.part,
            self.lr,
            self.lr0,
            self.momentum,
            self.decay,
            self.clip,
            float(self.steps[i]),
            float(self.tau[i]),
            float(self.size[i]),
            self.round,
            float(self.coin[i]),
        )


class PhaseOutputs(NamedTuple):
    """What the C clients return; their models and their carry only if asked for, as both are as large as the uploads."""

    up: State
    mine: State
    carry: State  # rows, or nothing
    buffers: Tensor  # [C, Q]
    loss: Tensor  # [C]
    w: Tensor | None  # [C, P]
    came: list[int] | None = None  # the rows of the cohort that these are, where some did not answer; None: all


class PhaseRequest(NamedTuple):
    """One phase of one run's round, for an engine to do."""

    phase: Algorithm
    inbox: PhaseInputs
    plan: RoundPlan
    want: Collection[str]  # "w", "carry": what is needed beside the uploads


class Engine(Protocol):
    """Runs the local loop for cohorts: of one run, or of several that share the engine."""

    name: str

    def map(self, asks: Sequence[PhaseRequest]) -> list[PhaseOutputs]: ...


def ahead(engine: Engine, asks: Sequence[PhaseRequest]) -> None:
    """Tell an engine that can use it what it will be asked for next. Only the models and states in these asks are not yet those."""
    if asks and (look := getattr(engine, "ahead", None)):
        look(asks)


def clock(device: torch.device) -> float:
    """The time when all work on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
