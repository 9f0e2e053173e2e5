"""What travels between server, engine and client: NamedTuples of tensors, which vmap, a slot and a message can hold.

Letters: w is the global model, theta a local one. Shapes: N clients, C cohort, P parameters, Q buffer values,
K local steps, B batch.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import torch
from torch import Tensor

State = dict[str, Tensor]
Number = float | Tensor
ALL_NEW = torch.zeros(())  # the staleness of a cohort that started from the newest model: one 0 for all rows


def select_rows(state: State, rows: Tensor | list[int] | int) -> State:
    """The given rows of every entry."""
    return {name: entry[rows] for name, entry in state.items()}


class Part(NamedTuple):
    """A named subset of the model: indices, because a mask would make shapes depend on data."""

    indices: Tensor  # coordinates of w [v]
    buffer_indices: Tensor  # places in the buffers [u]

    @property
    def empty(self) -> bool:
        return self.indices.numel() == 0 and self.buffer_indices.numel() == 0


class Batch(NamedTuple):
    """One mini-batch."""

    x: Tensor  # inputs [B, …]
    y: Tensor  # targets [B, …]
    weight: Tensor | None = None  # [B]: 0 on padding and 1 elsewhere; None where every sample is real


class Client(NamedTuple):
    """All that one client knows in one phase of one round: what every client hook is given."""

    w: Tensor  # the received global model [P], the client's private parts already in place
    buffers: Tensor  # the received buffers [Q], likewise
    server: State  # what was broadcast
    state: State  # the client's own state
    carry: State  # what moves along the steps and phases of this round
    parts: dict[str, Part]  # the method's named subsets of the model
    lr: Number  # this round's learning rate η
    lr0: Number  # the first round's
    momentum: Number  # heavy-ball momentum of local steps
    decay: Number  # weight decay
    clip: Number  # limit of the direction's norm; inf: off
    steps: Number  # K_i ≥ 1
    tau: Number  # a_i, FedNova's length of the round: K_i without momentum, and more with it (see momentum_length)
    size: Number  # n_i / n̄
    round: Number  # t, from 1
    coin: Number  # a random number in [0, 1), drawn anew for every client and round, for methods with random roles

    def carrying(self, entries: State) -> Self:
        """The same client with these entries in its carry."""
        return self._replace(carry=self.carry | entries)


class Affine(NamedTuple):
    """A local step that is affine in the gradient g and in theta, with numbers and a vector that stay for the round
    (and so must not read momentum or buffers):

    d = clip(gain·g + pull·theta + shift),   v ← momentum·v + d + (weight decay + decay)·theta,   theta ← theta − η v
    """

    gain: Number = 1.0  # factor on the gradient
    pull: Number = 0.0  # factor on theta
    shift: Tensor | None = None  # [P]; None: zero
    decay: Number = 0.0  # outside the clipped norm, as weight decay is


class Cohort(NamedTuple):
    """All that the server knows beside the uploads; rows [C] in their order."""

    p: Tensor  # weights, sum 1
    steps: Tensor  # local steps K_i
    tau: Tensor  # a_i, as in Client
    size: Tensor  # n_i / n̄
    loss: Tensor  # mean training loss
    public: State | None  # accuracy and loss of the received models on the public set, where the method needs it
    lr: float  # this round's learning rate η
    lr0: float  # the first round's
    round: int  # t, from 1
    clients: int  # N: clients that hold samples
    # [C]: how many steps the server made after the model from which each client started; one 0 where all started from
    # the newest
    staleness: Tensor = ALL_NEW


def momentum_length(steps: Tensor, momentum: float) -> Tensor:
    """a_i: the L1 norm of the gradient-accumulation vector of K_i steps with heavy-ball momentum ρ (closed form)."""
    if momentum == 0:
        return steps
    k, rho = steps.to(torch.float64), momentum
    return ((k - rho * (1 - rho**k) / (1 - rho)) / (1 - rho)).to(steps.dtype)
