"""The reference engine: one client after another, gradients through a bound module."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from ..core import local
from ..core.algorithm import Algorithm
from ..core.local import Move, Progress, Result, Step
from ..core.rng import torch_seed
from ..core.task import Task
from ..core.types import Client
from ..data.federation import RoundPlan, SampleIndex
from ..kernels.steps import ClientSteps, StepKernels
from .base import PhaseOutputs, PhaseRequest
from .results import ResultRows


class BatchIndices(NamedTuple):
    """Samples that are gathered when their turn comes, and where the batches among them end: cuts[k]:cuts[k+1]."""

    places: SampleIndex
    cuts: tuple[int, ...]


class ClientSchedule:
    """One client's batches in order, each gathered when its turn comes.

    With `most` samples at a time, batches that follow each other are gathered together, for a kernel that takes several
    steps at once.
    """

    def __init__(self, plan: RoundPlan, i: int, most: int = 0) -> None:
        self.plan, self.i, self.most = plan, i, most

    def batches(self) -> Iterator[BatchIndices]:
        work, k = self.plan.train[self.i].to(self.plan.pool.y.device), 0
        while k < work.batches:
            stop = max(k + 1, bisect_right(work.cuts, work.cuts[k] + self.most) - 1)
            cuts = tuple(cut - work.cuts[k] for cut in work.cuts[k : stop + 1])
            yield BatchIndices(work.slice(work.cuts[k], work.cuts[stop]), cuts)
            k = stop

    def chunks(self, name: str, step: int | None) -> Iterator[BatchIndices]:
        work = self.plan.looks[name][self.i].to(self.plan.pool.y.device)
        return (BatchIndices(work.slice(a, b), (0, b - a)) for a, b in pairwise(work.cuts))

    def share(self, name: str, chunk: BatchIndices, step: int | None) -> float:
        steps = None if step is None else self.plan.train[self.i].batches
        return local.look_share(chunk.cuts[-1], self.plan.looks[name][self.i].samples, steps)


class Sequential:
    """A for-loop over the cohort. Networks that draw random numbers (dropout) draw them from the client's address."""

    name = "sequential"

    def __init__(self, task: Task, seed: int, stochastic: bool, kernels: StepKernels | None = None) -> None:
        self.task, self.seed, self.stochastic, self.kernels = task, seed, stochastic, kernels

    def run(self, requests: Sequence[PhaseRequest]) -> list[PhaseOutputs]:
        return [self._cohort(request) for request in requests]

    def _cohort(self, request: PhaseRequest) -> PhaseOutputs:
        inputs, plan = request.inputs, request.plan
        results = ResultRows(request.phase, len(plan.train), request.wanted)
        for i in range(len(plan.train)):
            if self.stochastic:
                torch.manual_seed(torch_seed(self.seed, "network", inputs.round, plan.ids[i]))
            result = self._client(request.phase, inputs.client(i), plan, i)
            results.put(i, result, None)  # before the next client moves the network
        return results.outputs()

    def _client(self, alg: Algorithm, client: Client, plan: RoundPlan, i: int) -> Result:
        """One client's phase: begin, the moves of the local loop, finish."""
        steps = self.kernels.client_steps(alg, client, plan.pool.y.dtype) if self.kernels else None
        schedule = ClientSchedule(plan, i, steps.samples if steps else 0)
        progress = local.begin(alg, client)
        for move in local.moves(alg, schedule):
            progress = self._apply(alg, client, progress, move, schedule, steps)
        return local.finish(alg, client, progress)

    def _apply(
        self,
        alg: Algorithm,
        client: Client,
        progress: Progress,
        move: Move[BatchIndices],
        schedule: ClientSchedule,
        steps: ClientSteps | None,
    ) -> Progress:
        """One move. Its samples are gone before the next ones are gathered: with two batches at a time the allocator
        would request fresh pages from the system at every step.
        """
        if not isinstance(move, Step):
            share = schedule.share(move.name, move.chunk, move.step)
            return local.look(move.name, self.task, progress, schedule.plan.batch(move.chunk.places), share)
        batch = schedule.plan.batch(move.batch.places)
        if steps:
            return steps.take(client, progress, batch, move.batch.cuts)
        theta, buffers = progress.theta, progress.carry["buffers"]
        gradient = self.kernels.gradient(alg, theta, batch, buffers) if self.kernels else None
        return local.step(alg, self.task, client, progress, batch, gradient)
