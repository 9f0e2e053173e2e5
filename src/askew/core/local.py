"""The only local training loop: its moves in order, and what each move does.

A client's phase is `begin`, then the moves that `moves` yields, then `finish`. An engine applies the moves: to one
client after another (`sequential`), to many rows at once (`vmapped`, `stacked`), or by replaying a captured graph
(`slots`). Order of operations in a step: gradient of the loss and the method's terms → clip its norm → weight decay →
momentum → step. So weight decay is not clipped and a penalty is. Momentum starts anew each round; the learning rate is
constant within one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..errors import AlgorithmError
from . import hooks
from .algebra import clip_norm
from .algorithm import Algorithm
from .differentiate import GradientResult, Objective, differentiate
from .settings import is_off
from .task import Task
from .types import Batch, Client, Number, State

Array = np.ndarray[Any, Any]
B = TypeVar("B")  # how an engine refers to a batch: the batch itself, indices, a number
B_co = TypeVar("B_co", covariant=True)
T = TypeVar("T", float, Array)  # of one client, or of many


class Progress(NamedTuple):
    """What changes while a client trains."""

    theta: Tensor
    carry: State
    loss_sum: Tensor  # sum of the batch losses so far


class Result(NamedTuple):
    """What a client's phase leaves: the upload, its new state, and for the engine its model, carry and mean loss."""

    up: State
    state: State
    theta: Tensor
    carry: State
    loss: Tensor


@dataclass(frozen=True, slots=True)
class Step(Generic[B]):
    """A move: one local step on a batch."""

    batch: B


@dataclass(frozen=True, slots=True)
class Look(Generic[B]):
    """A move: the mean gradient or loss of some samples at theta, which stays. `name`: "gradient" or "validation"."""

    name: str
    chunk: B
    step: int | None  # the local step that it follows; None: before the first or after the last


Move = Step[B] | Look[B]


class Schedule(Protocol[B_co]):
    """One client's batches in order, or those of several clients in lockstep."""

    def batches(self) -> Iterable[B_co]: ...
    def chunks(self, name: str, step: int | None) -> Iterable[B_co]: ...


def moves(alg: Algorithm, schedule: Schedule[B]) -> Iterator[Move[B]]:
    """The local loop: a phase's moves between `begin` and `finish`."""
    yield from looks(alg.before, schedule, None)
    if alg.trains:
        for k, batch in enumerate(schedule.batches()):
            yield Step(batch)
            yield from looks(alg.each, schedule, k)
    yield from looks(alg.after, schedule, None)


def looks(names: Iterable[str], schedule: Schedule[B], step: int | None) -> Iterator[Look[B]]:
    """The chunks of some looks, one after the other."""
    return (Look(name, chunk, step) for name in names for chunk in schedule.chunks(name, step))


def begin(alg: Algorithm, client: Client) -> Progress:
    """The start of a phase: momentum at zero, received buffers, empty looks, the method's own carry entries."""
    zero = client.w.new_zeros(())
    names = {*alg.before, *alg.each, *alg.after}
    blank: State = {"validation": zero} if "validation" in names else {}
    if "gradient" in names:
        blank |= {"gradient": torch.zeros_like(client.w), "loss": zero}
    momentum = zero if is_off(client.momentum) else torch.zeros_like(client.w)
    client = client.carrying({"momentum": momentum, "buffers": client.buffers, **blank})
    own = hooks.carry(alg, client)
    if clash := {"buffers", *blank, *({"labels"} & {*alg.needs})} & own.keys():
        raise AlgorithmError(
            f"{alg.display_name()}: carry() must not use {sorted(clash)[0]!r}, which the local loop keeps; "
            "rename that entry."
        )
    client = client.carrying(own)
    return Progress(hooks.begin(alg, client), client.carry, zero)


def step(
    alg: Algorithm, task: Task, client: Client, progress: Progress, batch: Batch, gradient: GradientResult | None = None
) -> Progress:
    """One local step on one batch. An engine that has the gradient at theta already hands it over as `gradient`."""
    theta, client = progress.theta, client._replace(carry=progress.carry)

    def gradient_at(u: Tensor) -> GradientResult:
        return differentiate(task, lambda u: hooks.loss(alg, task, u, batch, client), u, client.carry["buffers"])

    g, value, buffers = gradient or gradient_at(theta)
    d = hooks.direction(alg, theta, lambda u: g if u is theta else gradient_at(u).gradient, client)
    new, v = hooks.descend(alg, theta, clip_norm(d, client.clip), client)
    carry = client.carry | hooks.note(alg, theta, g, d, client) | {"momentum": v, "buffers": buffers}
    return Progress(new, carry, progress.loss_sum + value)


def look(
    name: str, task: Task, progress: Progress, batch: Batch, share: Number, gradient: GradientResult | None = None
) -> Progress:
    """Look at one chunk: its gradient or loss, times its share of all samples, is added to the carry."""
    carry = progress.carry
    if name == "gradient":
        loss: Objective = lambda u: task.loss(u, batch)
        g, value, _ = gradient or differentiate(task, loss, progress.theta, carry["buffers"])
        new = {"gradient": carry["gradient"] + share * g, "loss": carry["loss"] + share * value}
    else:
        value = task.mean_loss(task.frozen(progress.theta, carry["buffers"], batch)[0], batch)
        new = {name: carry[name] + share * value}
    return progress._replace(carry=carry | new)


def look_share(samples: T, all_samples: T, steps: T | None) -> T:
    """What a chunk of so many samples adds to the mean over all; after every step, to the mean over the steps too."""
    share = samples / all_samples
    return share if steps is None else share / steps


def finish(alg: Algorithm, client: Client, progress: Progress) -> Result:
    """The end of a phase."""
    up, state = hooks.finish(alg, progress.theta, client._replace(carry=progress.carry))
    loss = progress.loss_sum / client.steps if alg.trains else progress.carry.get("loss", progress.loss_sum)
    return Result(up, state, progress.theta, progress.carry, loss)
