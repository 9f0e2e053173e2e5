"""The next batch of many clients at once: one kernel on CUDA, where torch would need six short ones."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from . import available, triton_kernels

kernels = partial(triton_kernels, "gather")
BLOCK = 2048  # numbers of one program


class BatchPool(Protocol):
    """Samples on a device and, for every batch, the places of its samples, their weights and their number."""

    x: Tensor
    y: Tensor
    rows: Tensor  # [batches, B] places of samples; padding repeats the last one
    weight: Tensor  # [batches, B], 0 for padding
    lengths: Tensor  # [batches]


class Cursor(NamedTuple):
    """Which batch of a pool each client is to see: first + counter, and no further than last."""

    first: Tensor  # [G]
    last: Tensor  # [G]
    batches: Tensor  # [G] how many a client has
    counter: Tensor  # [] the same for all


class Gathered(NamedTuple):
    """Batches [G, B, …] of G clients, weights [G, B] that are 0 for padding, who takes part, and how many samples
    count.
    """

    x: Tensor
    y: Tensor
    weight: Tensor
    active: Tensor  # [G] bool
    real: Tensor  # [G] int32, 0 for a client that takes no part


def gather(pool: BatchPool, cursor: Cursor, limit: Cursor, length: int) -> Gathered:
    """The clients' next batches, of `length` samples each. A client takes part while it has batches, and while it has
    taken no more steps than `limit` allows.
    """
    if pool.x.is_cuda and available():
        return launch(pool, cursor, limit, length)
    row = torch.minimum(cursor.first + cursor.counter, cursor.last)
    places, lengths = pool.rows.index_select(0, row)[:, :length], pool.lengths.index_select(0, row)
    active = (cursor.counter < cursor.batches) & (limit.counter <= limit.batches)
    weight = pool.weight.index_select(0, row)[:, :length]
    return Gathered(pool.x[places], pool.y[places], weight, active, torch.where(active, lengths, 0).int())


def launch(pool: BatchPool, cursor: Cursor, limit: Cursor, length: int) -> Gathered:
    """The same by the kernel."""
    groups, device = len(cursor.first), pool.x.device
    x, y = (t.new_empty((groups, length, *t.shape[1:])) for t in (pool.x, pool.y))
    weight = torch.empty((groups, length), dtype=pool.weight.dtype, device=device)
    active, real = (torch.empty(groups, dtype=kind, device=device) for kind in (torch.bool, torch.int32))
    wide, deep = (t[0].numel() for t in (pool.x, pool.y))
    counters = (cursor.first, cursor.last, cursor.batches, cursor.counter, limit.batches, limit.counter)
    result = Gathered(x, y, weight, active, real)
    sizes = (pool.rows.shape[1], length, wide, deep, BLOCK)
    grid = (-(-length * wide // BLOCK), groups)
    kernels().gather[grid](pool.x, pool.y, pool.rows, pool.lengths, *counters, *result, *sizes)
    return result
