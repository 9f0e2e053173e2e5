"""The moves of the local loop on the rows of the stacked engine: who has a batch, and their step or look."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from ..core import hooks, local
from ..core.algorithm import Algorithm
from ..core.differentiate import GradientResult, differentiate_rows, value_and_buffers
from ..core.local import Look, Move, Progress, Result, Step
from ..core.types import Batch, State
from ..kernels.affine_rows import AffineRows, put_active
from ..kernels.cuda.gather import gather
from ..kernels.cuda.rows import real_samples
from .graphs import copy_tensors, overwrite
from .jobs import NUMBERS, Jobs
from .row_buffers import RowBuffers, graph_rows
from .sample_buffer import send

PADDED_LENGTHS = 2  # lengths, to one of which a batch is padded

LengthTable = np.ndarray[Any, np.dtype[np.int64]]
Mask = np.ndarray[Any, np.dtype[np.bool_]]


class StackedBatch(NamedTuple):
    """The k-th batch of all rows under a name; of a look after a step, of the rows that took that step."""

    name: str
    k: int
    step: int | None


class MoveRows(NamedTuple):
    """What a move is given of each row, as vmap takes it apart."""

    given: list[Tensor]  # what RowBuffers.client makes a client of
    numbers: Tensor
    progress: Progress
    x: Tensor
    y: Tensor
    extra: State  # the weights of padded batches and the shares of looks

    def batch(self) -> Batch:
        return Batch(self.x, self.y, self.extra.get("weight"))


class MoveForm(NamedTuple):
    """All that a captured move depends on beside the tensors in the buffers: moves of one form are one graph."""

    name: str  # of the batches
    after_step: bool  # is it a look of the rows that took a step?
    rows: int  # it is made for the first so many rows,
    length: int  # on batches of so many samples each
    padded: bool  # are there shorter batches among them?
    every: bool  # has each of these rows a batch?


class Extent(NamedTuple):
    """The rows that have a batch."""

    rows: int
    last: int  # the first so many rows contain them all
    longest: int  # samples of their longest batch
    shortest: int


def extents(table: LengthTable) -> list[Extent]:
    """The rows that have a batch, for each column of a table of lengths; 0: none."""
    has = table > 0
    last = np.where(has.any(0), len(table) - has[::-1].argmax(0), 0)
    longest, shortest = table.max(0), np.where(has, table, table.max()).min(0)
    return [Extent(*numbers) for numbers in np.stack([has.sum(0), last, longest, shortest], 1).tolist()]


class StackedSchedule:
    """The batches of jobs in rows, the longest first."""

    def __init__(self, jobs: Jobs) -> None:
        self.jobs = jobs
        self.lengths = {name: self._table(name) for name in jobs[0].batches}  # rows × batches, 0: none
        self.count = {name: (table > 0).sum(1) for name, table in self.lengths.items()}
        self.extents = {name: extents(table) for name, table in self.lengths.items()}

    def _table(self, name: str) -> LengthTable:
        works = [job.batches[name] for job in self.jobs]
        lengths = {id(work): work.lengths() for work in works}  # runs may share them
        table = np.zeros((len(works), max(map(len, lengths.values()))), dtype=np.int64)
        for row, work in enumerate(works):
            table[row, : len(lengths[id(work)])] = lengths[id(work)]
        return table

    def batches(self) -> Iterator[StackedBatch]:
        return (StackedBatch("train", k, None) for k in range(self.lengths["train"].shape[1]))

    def chunks(self, name: str, step: int | None) -> Iterator[StackedBatch]:
        return (StackedBatch(name, k, step) for k in range(self.count[name][self._takes(step)].max()))

    def _takes(self, step: int | None) -> Mask:
        """Which rows take this step."""
        return np.ones(len(self.jobs), dtype=bool) if step is None else self.count["train"] > step

    def active(self, batch: StackedBatch) -> Mask:
        """Which rows have this batch."""
        return np.asarray((self.count[batch.name] > batch.k) & self._takes(batch.step))

    def extent(self, batch: StackedBatch) -> Extent:
        """The rows that have this batch."""
        if batch.step is None:
            return self.extents[batch.name][batch.k]
        column = self.lengths[batch.name][:, batch.k] * self._takes(batch.step)
        return extents(column[:, None])[0]

    def shares(self, batch: StackedBatch, rows: int) -> list[float]:
        """What a look's chunk adds to each row's mean."""
        table = self.lengths[batch.name][:rows]
        steps = None if batch.step is None else self.count["train"][:rows]
        shares = local.look_share(self.active(batch)[:rows] * table[:, batch.k], table.sum(1), steps)
        return cast(list[float], shares.tolist())


class RowMoves:
    """The moves of one method's jobs in the rows of a buffer."""

    def __init__(self, alg: Algorithm, buffers: RowBuffers, schedule: StackedSchedule, floats: Sequence[str]) -> None:
        self.alg, self.buffers, self.schedule, self.floats = alg, buffers, schedule, floats
        self.task = buffers.task
        self.rows = min(graph_rows(len(schedule.jobs)), buffers.rows)

    def method(self, numbers: Tensor) -> Algorithm:
        """The method with the settings of this row."""
        if not self.floats:
            return self.alg
        other = copy.copy(self.alg)
        for name, value in zip(self.floats, numbers[len(NUMBERS) :].unbind(), strict=True):
            object.__setattr__(other, name, value)
        return other

    def begin(self) -> None:
        buffers, m = self.buffers, self.rows

        def begin() -> Progress:
            one = lambda given, numbers: local.begin(self.method(numbers), buffers.client(given, numbers))
            return vmap(one)(*buffers.first_rows(m))

        if buffers.progress is None:
            buffers.allocate_progress(begin())
        for counter in buffers.counter.values():
            counter.zero_()
        buffers.graphs.replay(("begin", m), lambda: overwrite(buffers.first_progress(m), begin()), buffers.changed)

    def finish(self) -> Result:
        buffers, m = self.buffers, self.rows

        def one(given: list[Tensor], numbers: Tensor, progress: Progress) -> Result:
            return local.finish(self.method(numbers), buffers.client(given, numbers), progress)

        def body() -> None:
            buffers.result[m] = vmap(one)(*buffers.first_rows(m), buffers.first_progress(m))

        buffers.graphs.replay(("finish", m), body, buffers.changed)
        return buffers.result[m]

    def apply(self, move: Move[StackedBatch]) -> None:
        """One step or look of the rows that have the batch."""
        buffers, batch = self.buffers, move.chunk if isinstance(move, Look) else move.batch
        extent = self.schedule.extent(batch)
        if not extent.rows:
            return
        last = extent.last
        length = buffers.samples[batch.name].padded_length(extent.longest, PADDED_LENGTHS)
        usual = last == len(self.schedule.jobs) == buffers.first_jobs
        m = last if usual else min(graph_rows(last), buffers.rows)
        form = MoveForm(batch.name, batch.step is not None, m, length, extent.shortest < length, extent.rows == m)
        if batch.k == 0:
            buffers.counter[batch.name].zero_()
            if isinstance(move, Step) and buffers.affine is not None:
                self._prepare_rule()
        if isinstance(move, Look):
            shares = torch.tensor(self.schedule.shares(batch, last), dtype=buffers.share.dtype)
            buffers.share[:last].copy_(send(shares, buffers.device))
        buffers.graphs.replay(form, lambda: self._move(move, form), buffers.changed)

    def _move(self, move: Move[StackedBatch], form: MoveForm) -> None:
        """A move of this form; rows without a batch stay as they are."""
        buffers, (name, after_step, m, length, padded, every) = self.buffers, form
        limit = buffers.cursor("train" if after_step else name, m)
        data = gather(buffers.samples[name], buffers.cursor(name, m), limit, length)
        given, numbers = buffers.first_rows(m)
        old = buffers.first_progress(m)
        extra = {"weight": data.weight} if padded else {}
        if isinstance(move, Look):
            extra["share"] = buffers.share[:m]
        rows = MoveRows(given, numbers, old, data.x, data.y, extra)
        # a loss of a user's own may put samples in another order, and padding is then not at their end
        in_order = hooks.is_ours(self.alg, "loss")
        with real_samples(data.real if in_order and (padded or not every) else None, length):
            active = None if every else data.active
            if isinstance(move, Step) and buffers.affine is not None:
                self._affine_step(buffers.affine, move, rows, active)
            else:
                overwrite(old, self._vmapped(move, rows), active)
        buffers.counter[name].add_(1)

    def _prepare_rule(self) -> None:
        """Compute what stays of the rows' affine steps until the round ends."""
        buffers, m = self.buffers, self.rows

        def one(given: list[Tensor], numbers: Tensor, carry: State) -> State:
            client = buffers.client(given, numbers)._replace(carry=carry)
            return AffineRows.rule(self.method(numbers), client)

        def rule() -> State:
            return vmap(one)(*buffers.first_rows(m), buffers.first_progress(m).carry)

        if buffers.rule is None:
            try:
                buffers.rule = {n: t.new_zeros((buffers.rows, *t.shape[1:])) for n, t in rule().items()}
            except (TypeError, ValueError, RuntimeError):  # a plug-in's rule that is not made of tensors
                buffers.affine = None
                return
        if own := buffers.rule:
            to = [t[:m] for t in own.values()]
            buffers.graphs.replay(("rule", m), lambda: copy_tensors(to, [*rule().values()]), buffers.changed)

    def _affine_step(self, affine: AffineRows, move: Move[StackedBatch], rows: MoveRows, active: Tensor | None) -> None:
        """A step in place of the rows that are active (None: all)."""
        theta, carry, loss_sum = rows.progress
        gradients, values, after = self._gradients(move, rows)
        rule = {n: t[: len(theta)] for n, t in (self.buffers.rule or {}).items()}
        affine.take(theta, carry["momentum"], gradients, rule, rows.numbers[:, 0], active)
        put_active(loss_sum, loss_sum + values, active)
        put_active(carry["buffers"], after, active)

    def _vmapped(self, move: Move[StackedBatch], rows: MoveRows) -> Progress:
        """The new progress of all rows: first their gradients, then the move."""
        gradients = self._gradients(move, rows)

        def one(own: tuple[Tensor, ...], row: MoveRows) -> Progress:
            gradient = GradientResult(*own) if own else None
            if isinstance(move, Look):
                return local.look(move.name, self.task, row.progress, row.batch(), row.extra["share"], gradient)
            client = self.buffers.client(row.given, row.numbers)
            return local.step(self.method(row.numbers), self.task, client, row.progress, row.batch(), gradient)

        return vmap(one)(gradients, rows)

    def _gradients(self, move: Move[StackedBatch], rows: MoveRows) -> tuple[Tensor, ...]:
        """Gradients, values and buffers of all rows, where the move follows from them."""
        if isinstance(move, Look) and move.name != "gradient":
            return ()

        def evaluate(theta: Tensor, row: MoveRows) -> tuple[Tensor, Tensor]:
            batch, carry = row.batch(), row.progress.carry
            client = self.buffers.client(row.given, row.numbers)._replace(carry=carry)
            if isinstance(move, Look):
                objective = lambda u: self.task.loss(u, batch)
            else:
                objective = lambda u: hooks.loss(self.method(row.numbers), self.task, u, batch, client)
            return value_and_buffers(self.task, objective, carry["buffers"], theta)

        return differentiate_rows(evaluate, rows.progress.theta, rows)
