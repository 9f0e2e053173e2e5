"""What travels between server, engine and client: NamedTuples of tensors, which vmap, a slot and a message can hold.

Shape letters: N clients, C cohort, P parameters, Q buffer values, K local steps, B batch.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

State = dict[str, Tensor]
Number = float | Tensor


def taken(state: State, rows: Any) -> State:
    """Some rows of every entry."""
    return {name: entry[rows] for name, entry in state.items()}


class Part(NamedTuple):
    """A named subset of the model: indices, because a mask would make shapes depend on data."""

    w: Tensor  # coordinates of w [v]
    b: Tensor  # places in the buffers [u]

    @property
    def empty(self) -> bool:
        return self.w.numel() == 0 and self.b.numel() == 0


class Batch(NamedTuple):
    """One mini-batch. `weight` [B] is 0 on padding and 1 elsewhere; None where every sample is real.

    An engine may hand over several at once, where steps can be taken together: `cuts` says where they end. x may then be a pool of
    images in bytes, of which those at `places` are meant, and `table` [256] says what numbers bytes stand for.
    """

    x: Tensor
    y: Tensor
    weight: Tensor | None = None
    cuts: tuple[int, ...] = ()
    places: Tensor | None = None
    table: Tensor | None = None


class Client(NamedTuple):
    """All that one client knows in one phase of one round."""

    x: Tensor  # the received model [P], its private parts already in place
    buffers: Tensor  # the received buffers [Q], likewise
    server: State  # what was broadcast
    mine: State  # its own state
    carry: State  # what moves along the steps and phases of this round
    part: dict[str, Part]
    lr: Number  # this round's rate, and the first round's
    lr0: Number
    momentum: Number
    decay: Number
    clip: Number  # inf: off
    steps: Number  # K_i ≥ 1
    tau: Number  # a_i: the weight that K_i steps under this momentum give to a constant gradient
    size: Number  # n_i / n̄
    round: Number  # t, from 1
    coin: Number  # a uniform draw of this client and round

    def carrying(self, entries: State) -> Self:
        return self._replace(carry=self.carry | entries)


class Cohort(NamedTuple):
    """All that the server knows beside the uploads; rows [C] in their order."""

    p: Tensor  # weights, sum 1
    steps: Tensor
    tau: Tensor
    size: Tensor
    loss: Tensor  # mean training loss
    public: State | None  # accuracy and loss of the received models on the public set, where the algorithm needs it
    lr: float
    lr0: float
    round: int
    clients: int  # N: clients that hold samples


def nova_length(steps: Tensor, momentum: float) -> Tensor:
    """a_i: the L1 norm of the gradient-accumulation vector of K_i steps with heavy-ball momentum ρ (closed form)."""
    if momentum == 0:
        return steps
    k, rho = steps.to(torch.float64), momentum
    return ((k - rho * (1 - rho**k) / (1 - rho)) / (1 - rho)).to(steps.dtype)
