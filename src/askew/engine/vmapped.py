"""Many small clients at once: every move of the local loop is vmapped over the rows that still have work.

Clients are sorted by their number of steps, so those at work are always the first rows; a row that has ended costs
nothing. Ragged last batches are padded and weighted; with batch norm, whose statistics a padded sample would pollute,
rows are grouped by their real batch size instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from ..core import local
from ..core.algorithm import Algorithm
from ..core.differentiate import GradientResult
from ..core.local import Look, Progress, Result, Step
from ..core.task import Functional
from ..core.types import Batch, Client, select_rows
from ..data.federation import ClientBatches, RoundPlan, SampleIndex
from ..kernels.steps import RowSteps, StepKernels
from .base import PhaseInputs, PhaseOutputs, PhaseRequest
from .results import ResultRows

BUDGET = 2**30  # bytes that one group of clients may take
WEIGHTS = 2**24  # bytes of weights that steps in place go over at a time: of more they wait for memory

Rows = slice | Tensor
Flat = tuple[Tensor, ...]
PER_CLIENT = ("w", "buffers", "steps", "tau", "size", "coin")  # fields of Client that are tensors of its own
Array = np.ndarray[Any, np.dtype[np.int64]]


class BatchTable:
    """The batches of all rows as arrays, so that batch k of all rows is gathered at once."""

    def __init__(self, works: list[ClientBatches], device: torch.device) -> None:
        draws = [work.draws for work in works if work.draws is not None]
        places = torch.cat([work.places for work in works]).to(device)
        self.index = SampleIndex(places, torch.cat(draws).to(device) if draws else None)
        self.sizes = np.array([len(work.places) for work in works])
        self.first = np.concatenate([[0], np.cumsum(self.sizes)[:-1]])
        self.count = np.array([work.batches for work in works])
        most = int(self.count.max())
        self.starts, self.lengths = np.zeros((2, most, len(works)), dtype=np.int64)
        for i, work in enumerate(works):
            cuts = np.array(work.cuts)
            self.starts[: len(cuts) - 1, i] = cuts[:-1] + self.first[i]
            self.lengths[: len(cuts) - 1, i] = np.diff(cuts)


class RowBatch(NamedTuple):
    """One batch for each of some rows, and weights where some samples are padding."""

    rows: Rows
    samples: SampleIndex
    weight: Tensor | None


class RowBatches(NamedTuple):
    """The k-th batch of all rows that have one; grouped by length where batches must not be padded."""

    k: int
    groups: list[RowBatch]


class RowSchedule:
    """The batches of a group of clients, sorted by their number of steps."""

    def __init__(self, plan: RoundPlan, order: list[int], dtype: torch.dtype, never_pad: bool) -> None:
        self.plan, self.order, self.dtype, self.never_pad = plan, order, dtype, never_pad
        self.device = plan.pool.x.device
        self.tables: dict[str, BatchTable] = {}

    def table(self, name: str) -> BatchTable:
        if name not in self.tables:
            works = self.plan.train if name == "train" else self.plan.looks[name]
            self.tables[name] = BatchTable([works[i] for i in self.order], self.device)
        return self.tables[name]

    def batches(self) -> Iterator[RowBatches]:
        table = self.table("train")
        for k in range(len(table.starts)):
            yield self._batches(table, k, np.flatnonzero(table.count > k))

    def chunks(self, name: str, step: int | None) -> Iterator[RowBatches]:
        table, steps = self.table(name), self.table("train").count
        for k in range(len(table.starts)):
            rows = np.flatnonzero((table.count > k) & (True if step is None else steps > step))
            if len(rows):
                yield self._batches(table, k, rows)

    def share(self, look: Look[RowBatches]) -> Tensor:
        table = self.table(look.name)
        steps = None if look.step is None else self.table("train").count
        share = local.look_share(table.lengths[look.chunk.k], table.sizes, steps)
        return torch.tensor(share, dtype=self.dtype, device=self.device)

    def _batches(self, table: BatchTable, k: int, rows: Array) -> RowBatches:
        lengths = table.lengths[k, rows]
        if self.never_pad and lengths.min() != lengths.max():
            return RowBatches(k, [self._group(table, k, rows[lengths == n]) for n in np.unique(lengths)])
        return RowBatches(k, [self._group(table, k, rows)])

    def _group(self, table: BatchTable, k: int, rows: Array) -> RowBatch:
        lengths, starts = table.lengths[k, rows], table.starts[k, rows]
        column = np.arange(lengths.max())
        real = column < lengths[:, None]
        index = torch.from_numpy(starts[:, None] + np.where(real, column, 0)).to(self.device)
        weight = None if real.all() else torch.tensor(real, dtype=self.dtype, device=self.device)
        first = bool(rows[-1] == len(rows) - 1)  # the usual case: the first rows, which need no gathering
        chosen = slice(0, len(rows)) if first else torch.from_numpy(rows).to(self.device)
        return RowBatch(chosen, table.index.at(index), weight)


class ClientRows:
    """A chunk of clients in lockstep: moves are vmapped over the rows that take part in them.

    vmap takes flat tuples of tensors here: with dicts and named tuples a small network's step takes a tenth longer.
    """

    def __init__(self, alg: Algorithm, task: Functional, inputs: PhaseInputs, schedule: RowSchedule) -> None:
        self.alg, self.task, self.schedule = alg, task, schedule
        self.rows, self.shared = len(schedule.order), set(inputs.server)  # broadcast: the same to all, never batched
        pick = torch.tensor(schedule.order, device=inputs.w.device)
        w, buffers = (t.expand(self.rows, -1) if t.dim() == 1 else t[pick] for t in (inputs.w, inputs.buffers))
        memory, state, carry = (select_rows(rows, pick) for rows in (inputs.memory, inputs.state, inputs.carry))
        rates = (inputs.lr, inputs.lr0, inputs.momentum, inputs.decay, inputs.clip)
        steps, tau, size, coin = (t[pick] for t in (inputs.steps, inputs.tau, inputs.size, inputs.coin))
        server, parts = inputs.server | memory, inputs.parts
        self.clients = Client(w, buffers, server, state, carry, parts, *rates, steps, tau, size, inputs.round, coin)
        own = [v for n, v in server.items() if n not in self.shared]
        fields = (getattr(self.clients, field) for field in PER_CLIENT)
        self.flat: Flat = (*fields, *own, *state.values(), *carry.values())

    def client(self, flat: Flat) -> Client:
        """One row's view, under vmap."""
        clients, rest = self.clients, iter(flat[len(PER_CLIENT) :])
        server = {n: v if n in self.shared else next(rest) for n, v in clients.server.items()}
        state, carry = ({n: next(rest) for n in entries} for entries in (clients.state, clients.carry))
        fields: dict[str, Any] = dict(zip(PER_CLIENT, flat, strict=False))
        return clients._replace(server=server, state=state, carry=carry, **fields)

    def begin(self) -> Progress:
        return vmap(lambda flat: local.begin(self.alg, self.client(flat)))(self.flat)

    def finish(self, progress: Progress) -> Result:
        finish = lambda flat, progress: local.finish(self.alg, self.client(flat), progress)
        return vmap(finish)(self.flat, progress)

    def step(self, progress: Progress, batches: RowBatches, kernels: StepKernels | None) -> Progress:
        """One step of the rows that have a batch."""

        def step(client: Client, at: Progress, batch: Batch, *known: Tensor) -> Progress:
            result = GradientResult(known[0], known[1], at.carry["buffers"]) if known else None
            return local.step(self.alg, self.task, client, at, batch, result)

        for group in batches.groups:
            data = self.schedule.plan.batch(group.samples, group.weight)
            known = kernels.row_gradients(self.alg, progress.theta[group.rows], data) if kernels else None
            progress = self._apply(step, progress, group.rows, data, *(known or ()))
        return progress

    def look(self, progress: Progress, move: Look[RowBatches]) -> Progress:
        """One look of the rows that have a chunk."""
        share = self.schedule.share(move)
        look = lambda client, at, batch, share: local.look(move.name, self.task, at, batch, share)
        for group in move.chunk.groups:
            data = self.schedule.plan.batch(group.samples, group.weight)
            progress = self._apply(look, progress, group.rows, data, share[group.rows])
        return progress

    def _apply(
        self, move: Callable[..., Progress], progress: Progress, rows: Rows, batch: Batch, *more: Tensor
    ) -> Progress:
        """A move of some rows, given their clients, progress, batches and rows of `more`; the other rows stay."""
        names = list(progress.carry)
        old: Flat = (progress.theta, progress.loss_sum, *progress.carry.values())
        data = tuple(t for t in batch if t is not None)  # without weights where nothing is padded

        def one(flat: Flat, at: Flat, data: Flat, more: Flat) -> Flat:
            theta, loss_sum, *carry = at
            before = Progress(theta, dict(zip(names, carry, strict=True)), loss_sum)
            new = move(self.client(flat), before, Batch(*data), *more)
            return (new.theta, new.loss_sum, *(new.carry[name] for name in names))

        if isinstance(rows, slice) and rows.stop == self.rows:
            new = vmap(one)(self.flat, old, data, more)
        else:
            flat, at = tuple(t[rows] for t in self.flat), tuple(t[rows] for t in old)
            changed = vmap(one)(flat, at, data, more)
            new = tuple(replace_rows(before, rows, t) for before, t in zip(old, changed, strict=True))
        theta, loss_sum, *carry = new
        return Progress(theta, dict(zip(names, carry, strict=True)), loss_sum)


def replace_rows(old: Tensor, rows: Rows, new: Tensor) -> Tensor:
    """A tensor with some rows replaced; another tensor, as hooks may return their arguments and keep old ones."""
    return torch.cat([new, old[rows.stop :]]) if isinstance(rows, slice) else old.index_copy(0, rows, new)


class Vmapped:
    """Groups of clients that fit the memory, each trained in lockstep."""

    name = "vmapped"

    def __init__(
        self, task: Functional, never_pad: bool, kernels: StepKernels | None = None, budget: int = BUDGET
    ) -> None:
        """`never_pad`: batches must not be padded."""
        self.task, self.never_pad, self.kernels, self.budget = task, never_pad, kernels, budget

    def run(self, requests: Sequence[PhaseRequest]) -> list[PhaseOutputs]:
        return [self._cohort(request) for request in requests]

    def _cohort(self, request: PhaseRequest) -> PhaseOutputs:
        plan, device = request.plan, request.inputs.w.device
        order = sorted(range(len(plan.train)), key=lambda i: -plan.train[i].batches)
        steps = self._row_steps(request)
        size, results = self._group_size(request, steps), ResultRows(request.phase, len(order), request.wanted)
        for a in range(0, len(order), size):
            group = torch.tensor(order[a : a + size], device=device)
            rows = group.argsort() if len(group) == len(order) else torch.arange(len(group), device=device)
            results.put_rows(group, rows, self._run_group(request, order[a : a + size], steps))
        return results.outputs()

    def _row_steps(self, request: PhaseRequest) -> RowSteps | None:
        """What takes the steps of all rows in place; None: the plain code does."""
        if self.kernels is None or not request.phase.trains:
            return None
        return self.kernels.row_steps(request.phase, request.inputs.client(0), request.plan.pool.y.dtype)

    def _group_size(self, request: PhaseRequest, steps: RowSteps | None) -> int:
        """Clients at once: a dozen vectors of length P and a rough multiple of one batch's input for activations."""
        inputs, plan = request.inputs, request.plan
        longest = max(length for work in plan.train for length in work.lengths())
        sample = plan.batch(SampleIndex(plan.train[0].places[:1].to(inputs.w.device))).x
        one = (12 * inputs.w.shape[-1] + 40 * longest * sample.numel()) * inputs.w.element_size()
        size = max(1, int(self.budget // one))
        few = max(1, WEIGHTS // (inputs.w.shape[-1] * inputs.w.element_size()))
        return min(size, few) if steps else size

    def _run_group(self, request: PhaseRequest, order: list[int], steps: RowSteps | None) -> Result:
        """The phase of some clients: begin, the moves of the local loop, finish."""
        schedule = RowSchedule(request.plan, order, request.inputs.w.dtype, self.never_pad)
        rows = ClientRows(request.phase, self.task, request.inputs, schedule)
        progress, own = rows.begin(), False  # are theta and the momentum this group's own, to be changed in place?
        for move in local.moves(request.phase, schedule):
            if not isinstance(move, Step):
                progress = rows.look(progress, move)
            elif steps and (new := self._steps_in_place(rows, progress, move.batch, steps, own)):
                progress, own = new, True
            else:
                progress = rows.step(progress, move.batch, self.kernels)
        return rows.finish(progress)

    def _steps_in_place(
        self, rows: ClientRows, progress: Progress, batches: RowBatches, steps: RowSteps, own: bool
    ) -> Progress | None:
        """Steps in place; None: refused, nothing was changed."""
        theta, v = progress.theta, progress.carry["momentum"]
        if not own:
            theta, v = (t.clone(memory_format=torch.contiguous_format) for t in (theta, v))
        ((first, index, weight),) = batches.groups  # one group, of the first rows: only batch norm needs more
        values = steps.take(theta[first], rows.schedule.plan.batch(index, weight), v[first])
        if values is None:
            return None
        total = progress.loss_sum.clone()
        total[first] += values
        return Progress(theta, progress.carry | {"momentum": v}, total)
