"""The next batch of many clients in one kernel, for CUDA; with torch it would be six short ones."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.entropy import available
from .jobs import SampleBuffer

BLOCK = 2048  # numbers of one program


class Reach(NamedTuple):
    """Which batches of a feed clients are to see: that of the counter `at`, of those from `first` to `last`, `batches` in all."""

    first: Tensor
    last: Tensor
    batches: Tensor
    at: Tensor


class Taken(NamedTuple):
    """Batches [G, B, …] of G clients, weights [G, B] that are 0 for padding, who is at work, and how many samples count then."""

    x: Tensor
    y: Tensor
    weight: Tensor
    live: Tensor
    real: Tensor


def take(feed: SampleBuffer, reach: Reach, limit: Reach, span: int) -> Taken:
    """Batches of length `span`. A client takes part while it has batches, and no more steps behind it than `limit` allows."""
    if feed.x.is_cuda and available():
        return launched(feed, reach, limit, span)
    row = torch.minimum(reach.first + reach.at, reach.last)
    places, lengths = feed.rows.index_select(0, row)[:, :span], feed.lengths.index_select(0, row)
    live = (reach.at < reach.batches) & (limit.at <= limit.batches)
    return Taken(
        feed.x[places],
        feed.y[places],
        feed.weight.index_select(0, row)[:, :span],
        live,
        torch.where(live, lengths, 0).int(),
    )


def launched(feed: SampleBuffer, reach: Reach, limit: Reach, span: int) -> Taken:
    """The same by the kernel."""
    groups, device = len(reach.first), feed.x.device
    x, y = (t.new_empty((groups, span, *t.shape[1:])) for t in (feed.x, feed.y))
    weight = torch.empty((groups, span), dtype=feed.weight.dtype, device=device)
    live, real = (torch.empty(groups, dtype=kind, device=device) for kind in (torch.bool, torch.int32))
    wide, deep = (t[0].numel() for t in (feed.x, feed.y))
    counters = (reach.first, reach.last, reach.batches, reach.at, limit.batches, limit.at)
    grid = (-(-span * wide // BLOCK), groups)
    taken = Taken(x, y, weight, live, real)
    _kernel()[grid](
        feed.x, feed.y, feed.rows, feed.lengths, *counters, *taken, feed.rows.shape[1], span, wide, deep, BLOCK
    )
    return taken


@cache
def _kernel() -> Any:
    """The kernel, compiled at first use."""
    import triton
    import triton.language as tl

    @triton.jit(do_not_specialize=["length", "span"])
    def gather(x, y, rows, lengths, first, last, count, at, steps, step, into_x, into_y, weight, live, real, length, span,
               wide: tl.constexpr, deep: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
        """A program has some numbers of one client's batch, the first one the labels too."""
        group = tl.program_id(1).to(tl.int64)
        now = tl.load(at)
        row = tl.minimum(tl.load(first + group) + now, tl.load(last + group))
        begin, n = tl.load(rows + row * length), tl.load(lengths + row).to(tl.int32)
        e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        sample = e // wide
        spot = tl.minimum(sample, n - 1) * wide + e - sample * wide  # padding is the last sample again
        tl.store(
            into_x + group * span * wide + e, tl.load(x + begin * wide + spot, mask=sample < span), mask=sample < span
        )
        if tl.program_id(0) == 0:
            for start in range(0, span * deep, BLOCK):
                d = start + tl.arange(0, BLOCK)
                here = d // deep
                there = tl.minimum(here, n - 1) * deep + d - here * deep
                tl.store(
                    into_y + group * span * deep + d,
                    tl.load(y + begin * deep + there, mask=here < span),
                    mask=here < span,
                )
            for start in range(0, span, BLOCK):
                s = start + tl.arange(0, BLOCK)
                tl.store(weight + group * span + s, tl.where(s < n, 1.0, 0.0), mask=s < span)
            at_work = (now < tl.load(count + group)) & (tl.load(step) <= tl.load(steps + group))
            tl.store(live + group, at_work)
            tl.store(real + group, tl.where(at_work, n, 0))

    return gather
