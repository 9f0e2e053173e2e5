"""Many small clients at once: every move of the local loop is vmapped over the rows that still have work.

Clients are sorted by their number of steps, so those at work are always the first rows; a row that has ended costs
nothing. Ragged last batches are padded and weighted; with batch norm, whose statistics a padded sample would pollute,
rows are grouped by their real batch size instead.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_map

from ..core.algorithm import Algorithm
from ..core.local import Moving, Result, client_round
from ..core.task import Task
from ..core.types import Batch, Me, State, taken
from ..data.federation import Plan, Work
from .base import Inbox, Outbox

BUDGET = 2**30  # bytes that one chunk of clients may take


class Rows(NamedTuple):
    """The same move for some rows: a batch each."""

    rows: Tensor | slice
    batch: Batch


class Lockstep:
    """The course of a chunk of clients, sorted by steps: moves are vmapped over the rows that take part in them."""

    def __init__(self, plan: Plan, order: list[int], dims: Me, even: bool) -> None:
        self.plan, self.order, self.dims, self.even = plan, order, dims, even
        self.device = plan.pool.x.device

    def steps(self) -> Iterator[list[Rows]]:
        works = [self.plan.train[i] for i in self.order]
        for k in range(works[0].batches):
            yield self._rows(works, k)

    def chunks(self, name: str, step: int | None) -> Iterator[tuple[list[Rows], Tensor]]:
        works = [self.plan.looks[name][i] for i in self.order]
        steps = [self.plan.train[i].batches for i in self.order]
        active = [i for i, k in enumerate(steps) if step is None or k > step]
        for j in range(max(works[i].batches for i in active)):
            rows = [i for i in active if works[i].batches > j]
            share = torch.zeros(len(works), dtype=self.dims_dtype, device=self.device)
            for i in rows:
                share[i] = works[i].lengths()[j] / len(works[i].places) / (1 if step is None else steps[i])
            yield self._rows(works, j, rows), share

    @property
    def dims_dtype(self) -> torch.dtype:
        return self.plan.pool.x.dtype if self.plan.pool.x.is_floating_point() else torch.float32

    def _rows(self, works: list[Work], k: int, rows: list[int] | None = None) -> list[Rows]:
        """Batch k of all rows that have one, padded to one length, or grouped by length where batches must be even."""
        rows = [i for i, work in enumerate(works) if work.batches > k] if rows is None else rows
        pieces = {i: works[i].places[works[i].cuts[k] : works[i].cuts[k + 1]] for i in rows}
        groups: dict[int, list[int]] = {}
        longest = max(len(piece) for piece in pieces.values())
        for i, piece in pieces.items():
            groups.setdefault(len(piece) if self.even else longest, []).append(i)
        return [self._padded(length, {i: pieces[i] for i in group}, len(works)) for length, group in groups.items()]

    def _padded(self, length: int, pieces: dict[int, Tensor], total: int) -> Rows:
        rows: Tensor | slice = torch.tensor(list(pieces), device=self.device)
        if list(pieces) == list(range(len(pieces))):
            rows = slice(0, len(pieces))  # the usual case: the first rows, which need no gathering
        if all(len(piece) == length for piece in pieces.values()):
            return Rows(rows, self.plan.batch(torch.stack(list(pieces.values()))))
        index = torch.zeros(len(pieces), length, dtype=torch.long, device=self.device)
        weight = torch.zeros(len(pieces), length, dtype=self.dims_dtype, device=self.device)
        for row, piece in enumerate(pieces.values()):
            index[row, : len(piece)] = piece
            index[row, len(piece) :] = piece[0]
            weight[row, : len(piece)] = 1
        return Rows(rows, self.plan.batch(index, weight))

    def all(self, move: Callable[..., Any], me: Me, *moving: Any) -> Any:
        return vmap(move, in_dims=(self.dims, *(0 for _ in moving)))(me, *moving)

    def some(self, move: Callable[..., Moving], me: Me, moving: Moving, batch: list[Rows], share: Tensor | float) -> Moving:
        for rows, part in batch:
            mine = me if whole(rows, moving) else rows_of(me, self.dims, rows)
            at_work = moving if whole(rows, moving) else Moving(*tree_map(partial(rows_at, rows), tuple(moving)))
            dims = (self.dims, 0, Batch(0, 0, None if part.weight is None else 0), 0 if isinstance(share, Tensor) else None)  # type: ignore[arg-type]
            new = vmap(move, in_dims=dims)(mine, at_work, part, share[rows] if isinstance(share, Tensor) else share)
            moving = new if whole(rows, moving) else Moving(*tree_map(partial(put, rows), tuple(moving), tuple(new)))
        return moving


def whole(rows: Tensor | slice, moving: Moving) -> bool:
    return isinstance(rows, slice) and rows.stop == len(moving.w)


def rows_at(rows: Tensor | slice, t: Tensor) -> Tensor:
    return t[rows]


def put(rows: Tensor | slice, old: Tensor, new: Tensor) -> Tensor:
    """A new tensor: an old one may still be somebody's, and hooks may return their arguments."""
    if isinstance(rows, slice):
        return torch.cat([new, old[rows.stop :]])
    return old.index_copy(0, rows, new)


def rows_of(me: Me, dims: Me, rows: Tensor | slice) -> Me:
    """Some clients' views."""
    return Me(
        *(tree_map(lambda t, d: t if d is None else t[rows], a, b, is_leaf=lambda v: v is None) for a, b in zip(me, dims, strict=True))
    )


class Vmapped:
    """Chunks of clients that fit the memory, each trained in lockstep."""

    name = "vmapped"

    def __init__(self, task: Task, even: bool, budget: int = BUDGET) -> None:
        self.task, self.even, self.budget = task, even, budget

    def map(self, phase: Algorithm, inbox: Inbox, plan: Plan, want: Collection[str]) -> Outbox:
        order = sorted(range(len(plan.train)), key=lambda i: -plan.train[i].batches)
        size = self._chunk(inbox, plan)
        parts = [self._chunk_round(phase, inbox, plan, order[a : a + size], want) for a in range(0, len(order), size)]
        back = torch.tensor(sorted(range(len(order)), key=order.__getitem__), device=inbox.x.device)
        join = lambda *rows: None if rows[0] is None else torch.cat(rows)[back]
        joined = [tree_map(join, *column) for column in zip(*parts, strict=True)]
        return Outbox(*joined)

    def _chunk(self, inbox: Inbox, plan: Plan) -> int:
        """Clients at once: a dozen vectors of length P and a rough multiple of one batch's input for activations."""
        longest = max(b for work in plan.train for b in work.lengths())
        one = 12 * inbox.x.shape[-1] + 40 * longest * max(plan.pool.x[0].numel(), 1)
        return max(1, int(self.budget // (one * inbox.x.element_size())))

    def _chunk_round(self, phase: Algorithm, inbox: Inbox, plan: Plan, order: list[int], want: Collection[str]) -> tuple[Any, ...]:
        pick = torch.tensor(order, device=inbox.x.device)
        x, buffers = (t.expand(len(order), -1) if t.dim() == 1 else t[pick] for t in (inbox.x, inbox.buffers))
        shared, mine, carry = (taken(rows, pick) for rows in (inbox.memory, inbox.mine, inbox.carry))
        numbers = (inbox.lr, inbox.lr0, inbox.momentum, inbox.decay, inbox.clip)
        counts = (inbox.steps[pick], inbox.tau[pick], inbox.size[pick])
        me = Me(
            x,
            buffers,
            inbox.server | shared,
            mine,
            carry,
            inbox.part,
            *numbers,
            *counts,
            inbox.round,
            inbox.coin[pick],
        )
        zeros: Callable[[State], dict[str, int]] = lambda state: dict.fromkeys(state, 0)
        server = dict.fromkeys(inbox.server) | zeros(shared)
        none = tree_map(lambda _: None, inbox.part)
        dims = Me(0, 0, server, zeros(mine), zeros(carry), none, *(None,) * 5, 0, 0, 0, None, 0)  # type: ignore[arg-type]
        result: Result = client_round(phase, self.task, me, Lockstep(plan, order, dims, self.even))
        w = result.w if "w" in want else None
        kept = result.carry if "carry" in want else {}
        return result.up, result.mine, kept, result.carry["buffers"], result.loss, w
