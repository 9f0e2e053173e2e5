"""The moves of the local loop on the rows of the stacked engine: who has a batch, and their step or look."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple

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
from .jobs import NUMBERS
from .row_buffers import RowBuffers, graph_rows
from .row_schedule import StackedBatch
from .sample_buffer import send

PADDED_LENGTHS = 2  # lengths, to one of which a batch is padded


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


class RowMoves:
    """The moves of one method's jobs in the rows of a buffer."""

    def __init__(self, alg: Algorithm, buffers: RowBuffers, floats: Sequence[str]) -> None:
        self.alg, self.buffers, self.schedule, self.floats = alg, buffers, buffers.schedule, floats
        self.task = buffers.task
        self.rows = min(graph_rows(self.schedule.rows), buffers.rows)

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
        usual = last == self.schedule.rows == buffers.first_jobs
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
