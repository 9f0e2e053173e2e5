"""The reference engine: one client after another, gradients through a bound module."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch

from ..core.algorithm import Algorithm
from ..core.local import Moving, client_round
from ..core.rng import torch_seed
from ..core.task import Task
from ..core.types import Me
from ..data.federation import Pick, Plan
from .base import Ask, Inbox, Outbox
from .jobs import Room


class Alone:
    """The course of one client: moves applied directly to its batches, each gathered when its turn comes.

    What travels through the loop are picks, so that a batch is gone before the next one is gathered: two of them alive
    at a time make the allocator ask the system for fresh pages at every step.
    """

    def __init__(self, task: Task, plan: Plan, i: int) -> None:
        self.task, self.plan, self.i = task, plan, i

    def steps(self) -> Iterator[Pick]:
        work = self.plan.train[self.i].to(self.plan.pool.y.device)
        for a, b in pairwise(work.cuts):
            yield work.pick(a, b)

    def chunks(self, name: str, step: int | None) -> Iterator[tuple[Pick, float]]:
        work = self.plan.looks[name][self.i].to(self.plan.pool.y.device)
        for a, b in pairwise(work.cuts):
            share = (b - a) / len(work.places)
            yield work.pick(a, b), share if step is None else share / self.plan.train[self.i].batches

    def all(self, move: Callable[..., Any], me: Me, *moving: Any) -> Any:
        return move(me, *moving)

    def some(self, move: Callable[..., Moving], me: Me, moving: Moving, batch: Pick, share: float) -> Moving:
        return move(self.task, me, moving, self.plan.batch(batch), share)


class Sequential:
    """A for-loop over the cohort. Networks that draw random numbers (dropout) draw them from the client's address."""

    name = "sequential"

    def __init__(self, task: Task, seed: int, stochastic: bool) -> None:
        self.task, self.seed, self.stochastic = task, seed, stochastic

    def map(self, asks: Sequence[Ask]) -> list[Outbox]:
        return [self._map(*ask) for ask in asks]

    def _map(self, phase: Algorithm, inbox: Inbox, plan: Plan, want: Collection[str]) -> Outbox:
        room = Room(len(plan.train), want)
        for i in range(len(plan.train)):
            if self.stochastic:
                torch.manual_seed(torch_seed(self.seed, "network", inbox.round, plan.ids[i]))
            room.put(i, client_round(phase, inbox.me(i), Alone(self.task, plan, i)), None)  # before the next one moves the network
        assert room.outbox is not None
        return room.outbox
