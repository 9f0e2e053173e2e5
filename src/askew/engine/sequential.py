"""The reference engine: one client after another, gradients through a bound module."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch

from ..core.algorithm import Algorithm
from ..core.local import Progress, client_round, together
from ..core.rng import torch_seed
from ..core.task import Task
from ..core.types import Client
from ..data.federation import RoundPlan, SampleIndex
from .base import PhaseInputs, PhaseOutputs, PhaseRequest
from .jobs import ResultRows

CACHED = (
    2**20
)  # bytes of samples that are gathered at a time where steps are taken together: beside a network, half of a usual cache

Many = tuple[SampleIndex, tuple[int, ...]]  # batches that follow each other, and where they end; () if it is one


class Alone:
    """The course of one client: moves applied directly to its batches, each gathered when its turn comes.

    What travels through the loop are picks, so that a batch is gone before the next one is gathered: two of them alive
    at a time make the allocator ask the system for fresh pages at every step. Where `several` steps may be taken at once, a pick
    is of several batches, as many as stay in a cache.
    """

    def __init__(self, task: Task, plan: RoundPlan, i: int, several: bool = False) -> None:
        self.task, self.plan, self.i = task, plan, i
        self.most = 0  # samples at a time
        if several and task.walk:
            self.most = CACHED // (task.walk.inputs * task.space.dtype.itemsize)

    def steps(self) -> Iterator[Many]:
        work, k = self.plan.train[self.i].to(self.plan.pool.y.device), 0
        while k < work.batches:
            stop = max(k + 1, bisect_right(work.cuts, work.cuts[k] + self.most) - 1)
            yield (
                work.slice(work.cuts[k], work.cuts[stop]),
                tuple(cut - work.cuts[k] for cut in work.cuts[k : stop + 1]),
            )
            k = stop

    def chunks(self, name: str, step: int | None) -> Iterator[tuple[Many, float]]:
        work = self.plan.looks[name][self.i].to(self.plan.pool.y.device)
        for a, b in pairwise(work.cuts):
            share = (b - a) / len(work.places)
            yield (work.slice(a, b), ()), share if step is None else share / self.plan.train[self.i].batches

    def all(self, move: Callable[..., Any], me: Client, *moving: Any) -> Any:
        return move(me, *moving)

    def some(self, move: Callable[..., Progress], me: Client, moving: Progress, batch: Many, share: float) -> Progress:
        pick, cuts = batch
        gathered = self.plan.batch(pick)._replace(cuts=cuts)
        return move(self.task, me, moving, gathered, share)


class Sequential:
    """A for-loop over the cohort. Networks that draw random numbers (dropout) draw them from the client's address."""

    name = "sequential"

    def __init__(self, task: Task, seed: int, stochastic: bool) -> None:
        self.task, self.seed, self.stochastic = task, seed, stochastic

    def map(self, asks: Sequence[PhaseRequest]) -> list[PhaseOutputs]:
        return [self._map(*ask) for ask in asks]

    def _map(self, phase: Algorithm, inbox: PhaseInputs, plan: RoundPlan, want: Collection[str]) -> PhaseOutputs:
        room = ResultRows(len(plan.train), want)
        for i in range(len(plan.train)):
            if self.stochastic:
                torch.manual_seed(torch_seed(self.seed, "network", inbox.round, plan.ids[i]))
            me = inbox.me(i)
            course = Alone(self.task, plan, i, together(phase, self.task, me, plan.pool.y.dtype))
            room.put(i, client_round(phase, me, course), None)  # before the next one moves the network
        assert room.outbox is not None
        return room.outbox
