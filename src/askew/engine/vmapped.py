"""Many small clients at once: every move of the local loop is vmapped over the rows that still have work.

Clients are sorted by their number of steps, so those at work are always the first rows; a row that has ended costs
nothing. Ragged last batches are padded and weighted; with batch norm, whose statistics a padded sample would pollute,
rows are grouped by their real batch size instead.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from ..core.algorithm import Algorithm
from ..core.local import Progress, Result, client_round, dense, rule_of, slide_rows, slides, slope_rows, step
from ..core.task import Functional
from ..core.types import Batch, Client, State, taken
from ..data.federation import ClientBatches, RoundPlan, SampleIndex
from .base import PhaseInputs, PhaseOutputs, PhaseRequest
from .jobs import ResultRows

BUDGET = 2**30  # bytes that one chunk of clients may take
WEIGHTS = (
    2**24
)  # bytes of weights that straight steps go over at a time; of more they wait for memory, with fewer for Python

Rows = slice | Tensor
Flat = tuple[Tensor, ...]


class BatchTable:
    """The works of the rows as arrays, so that batch k of all rows is gathered at once."""

    def __init__(self, works: list[ClientBatches], device: torch.device) -> None:
        draws = [work.draws for work in works if work.draws is not None]
        self.pick = SampleIndex(
            torch.cat([work.places for work in works]).to(device), torch.cat(draws).to(device) if draws else None
        )
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
    """One move for some rows: a batch for each, and weights where some are padding."""

    rows: Rows
    pick: SampleIndex
    weight: Tensor | None


class VmapSchedule:
    """The course of a chunk of clients, sorted by steps: moves are vmapped over the rows that take part in them."""

    def __init__(
        self, task: Functional, plan: RoundPlan, order: list[int], me: Client, shared: State, even: bool
    ) -> None:
        self.task, self.plan, self.order, self.even, self.dtype = task, plan, order, even, me.x.dtype
        self.device = plan.pool.x.device
        self.tables: dict[str, BatchTable] = {}
        self.same = set(shared)  # broadcast: the same to all rows, so never batched
        self.rows = len(order)
        self.own: Tensor | None = None  # rows that may be moved in place

    def table(self, name: str) -> BatchTable:
        if name not in self.tables:
            works = self.plan.train if name == "train" else self.plan.looks[name]
            self.tables[name] = BatchTable([works[i] for i in self.order], self.device)
        return self.tables[name]

    def steps(self) -> Iterator[list[RowBatch]]:
        table = self.table("train")
        for k in range(len(table.starts)):
            yield self._groups(table, k, np.flatnonzero(table.count > k))

    def chunks(self, name: str, step: int | None) -> Iterator[tuple[list[RowBatch], Tensor]]:
        table, steps = self.table(name), self.table("train").count
        for j in range(len(table.starts)):
            rows = np.flatnonzero((table.count > j) & (True if step is None else steps > step))
            share = table.lengths[j] / table.sizes / (1 if step is None else steps)
            if len(rows):
                yield self._groups(table, j, rows), torch.tensor(share, dtype=self.dtype, device=self.device)

    def _groups(self, table: BatchTable, k: int, rows: np.ndarray[Any, Any]) -> list[RowBatch]:
        """Batch k of these rows, padded to one length, or grouped by length where batches must be even."""
        lengths = table.lengths[k, rows]
        if self.even and lengths.min() != lengths.max():
            return [self._group(table, k, rows[lengths == n]) for n in np.unique(lengths)]
        return [self._group(table, k, rows)]

    def _group(self, table: BatchTable, k: int, rows: np.ndarray[Any, Any]) -> RowBatch:
        lengths, starts = table.lengths[k, rows], table.starts[k, rows]
        column = np.arange(lengths.max())
        real = column < lengths[:, None]
        index = torch.from_numpy(starts[:, None] + np.where(real, column, 0)).to(self.device)
        weight = None if real.all() else torch.tensor(real, dtype=self.dtype, device=self.device)
        first = bool(rows[-1] == len(rows) - 1)  # the usual case: the first rows, which need no gathering
        return RowBatch(
            slice(0, len(rows)) if first else torch.from_numpy(rows).to(self.device), table.pick.at(index), weight
        )

    # vmap takes flat tuples of tensors: walking nested trees at every step costs more than a small network's step

    def _flat(self, me: Client) -> Flat:
        own = [v for n, v in me.server.items() if n not in self.same]
        numbers = [torch.as_tensor(n) for n in (me.steps, me.tau, me.size, me.coin)]
        return (me.x, me.buffers, *numbers, *own, *me.mine.values(), *me.carry.values())

    def _me(self, me: Client, flat: Flat) -> Client:
        rest = iter(flat[6:])
        server = {n: v if n in self.same else next(rest) for n, v in me.server.items()}
        mine, carry = ({n: next(rest) for n in state} for state in (me.mine, me.carry))
        x, buffers, steps, tau, size, coin = flat[:6]
        return me._replace(
            x=x, buffers=buffers, server=server, mine=mine, carry=carry, steps=steps, tau=tau, size=size, coin=coin
        )

    def all(self, move: Callable[..., Any], me: Client, *moving: Any) -> Any:
        return vmap(lambda flat, *moving: move(self._me(me, flat), *moving))(self._flat(me), *moving)

    def some(
        self, move: Callable[..., Progress], me: Client, moving: Progress, batch: list[RowBatch], share: Tensor | float
    ) -> Progress:
        alg = move.args[0] if isinstance(move, partial) and move.func is step else None
        if alg is not None and slides(alg, self.task, me, self.plan.pool.y.dtype):
            return self._slide(me, moving, batch)
        products = alg is not None and dense(alg, self.task)
        names, mine = list(moving.carry), self._flat(me)
        now: Flat = (moving.w, moving.total, *moving.carry.values())

        def one(mine: Flat, now: Flat, x: Tensor, y: Tensor, extra: Flat, slope: Flat) -> Flat:
            weight = extra[0] if padded else None
            part = extra[-1] if isinstance(share, Tensor) else share
            at = Progress(now[0], dict(zip(names, now[2:], strict=True)), now[1])
            known = (*slope, at.carry["buffers"]) if slope else ()
            new = move(self.task, self._me(me, mine), at, Batch(x, y, weight), part, known)
            return (new.w, new.total, *(new.carry[n] for n in names))

        for rows, pick, weights in batch:
            data, padded = self.plan.batch(pick), weights is not None
            extra = (*(() if weights is None else (weights,)), *((share[rows],) if isinstance(share, Tensor) else ()))
            slope = slope_rows(self.task, now[0][rows], data._replace(weight=weights)) if products else ()
            if isinstance(rows, slice) and rows.stop == self.rows:
                now = vmap(one)(mine, now, data.x, data.y, extra, slope)
            else:
                new = vmap(one)(tuple(t[rows] for t in mine), tuple(t[rows] for t in now), data.x, data.y, extra, slope)
                now = tuple(put(old, rows, t) for old, t in zip(now, new, strict=True))
        return Progress(now[0], dict(zip(names, now[2:], strict=True)), now[1])

    def _slide(self, me: Client, moving: Progress, batch: list[RowBatch]) -> Progress:
        """Steps in place: the first one makes the rows, and those of the momentum, this course's own."""
        w, v = moving.w, moving.carry["momentum"]
        if self.own is None or w is not self.own:
            w, v = (t.clone(memory_format=torch.contiguous_format) for t in (w, v))
            self.own = w
        total = moving.total.clone()
        for rows, pick, weights in batch:  # one group: the first rows
            total[rows] += slide_rows(
                self.task, w[rows], self.plan.batch(pick, weights), float(me.lr), rule_of(me), v=v[rows]
            )
        return Progress(w, moving.carry | {"momentum": v}, total)


def put(old: Tensor, rows: Rows, new: Tensor) -> Tensor:
    """A new tensor: an old one may still be somebody's, and hooks may return their arguments."""
    return torch.cat([new, old[rows.stop :]]) if isinstance(rows, slice) else old.index_copy(0, rows, new)


class Vmapped:
    """Chunks of clients that fit the memory, each trained in lockstep."""

    name = "vmapped"

    def __init__(self, task: Functional, even: bool, budget: int = BUDGET) -> None:
        self.task, self.even, self.budget = task, even, budget

    def map(self, asks: Sequence[PhaseRequest]) -> list[PhaseOutputs]:
        return [self._map(*ask) for ask in asks]

    def _map(self, phase: Algorithm, inbox: PhaseInputs, plan: RoundPlan, want: Collection[str]) -> PhaseOutputs:
        order = sorted(range(len(plan.train)), key=lambda i: -plan.train[i].batches)
        size, room = self._chunk(phase, inbox, plan), ResultRows(len(order), want)
        for a in range(0, len(order), size):
            clients = torch.tensor(order[a : a + size], device=inbox.x.device)
            rows = (
                clients.argsort() if len(clients) == len(order) else torch.arange(len(clients), device=inbox.x.device)
            )
            room.put_rows(clients, rows, self._chunk_round(phase, inbox, plan, order[a : a + size]))
        assert room.outbox is not None
        return room.outbox

    def _chunk(self, phase: Algorithm, inbox: PhaseInputs, plan: RoundPlan) -> int:
        """Clients at once: a dozen vectors of length P and a rough multiple of one batch's input for activations."""
        longest = max(b for work in plan.train for b in work.lengths())
        one = (
            12 * inbox.x.shape[-1]
            + 40 * longest * plan.batch(SampleIndex(plan.train[0].places[:1].to(inbox.x.device))).x.numel()
        )
        size = max(1, int(self.budget // (one * inbox.x.element_size())))
        few = max(1, WEIGHTS // (inbox.x.shape[-1] * inbox.x.element_size()))
        return min(size, few) if slides(phase, self.task, inbox.me(0), plan.pool.y.dtype) else size

    def _chunk_round(self, phase: Algorithm, inbox: PhaseInputs, plan: RoundPlan, order: list[int]) -> Result:
        pick = torch.tensor(order, device=inbox.x.device)
        x, buffers = (t.expand(len(order), -1) if t.dim() == 1 else t[pick] for t in (inbox.x, inbox.buffers))
        memory, mine, carry = (taken(rows, pick) for rows in (inbox.memory, inbox.mine, inbox.carry))
        rates = (inbox.lr, inbox.lr0, inbox.momentum, inbox.decay, inbox.clip)
        steps, tau, size, coin = (t[pick] for t in (inbox.steps, inbox.tau, inbox.size, inbox.coin))
        me = Client(
            x, buffers, inbox.server | memory, mine, carry, inbox.part, *rates, steps, tau, size, inbox.round, coin
        )
        return client_round(phase, me, VmapSchedule(self.task, plan, order, me, inbox.server, self.even))
