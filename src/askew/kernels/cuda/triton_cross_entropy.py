"""Triton kernel of the mean cross-entropy and its gradient; launched by cross_entropy.py."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr


@triton.jit(do_not_specialize=["batch"])
def entropy(x, y, weight, loss, slope, batch,
            classes: constexpr, WEIGHTED: constexpr, ROWS: constexpr, WIDE: constexpr):  # fmt: skip
    """A program has one batch."""
    group, k = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE)
    x += group * batch * classes
    slope += group * batch * classes
    y += group * batch
    weight += group * batch
    count = batch * 1.0
    if WEIGHTED:
        count = 0.0
        for start in range(0, batch, ROWS):
            row = start + tl.arange(0, ROWS)
            count += tl.sum(tl.load(weight + row, mask=row < batch, other=0.0))
    total = 0.0
    for start in range(0, batch, ROWS):
        row = start + tl.arange(0, ROWS)
        spot, keep = row[:, None] * classes + k[None, :], (row[:, None] < batch) & (k[None, :] < classes)
        v = tl.where(k[None, :] < classes, tl.load(x + spot, mask=keep, other=0.0), float("-inf"))
        top = tl.max(v, 1)
        e = tl.exp(v - top[:, None])
        whole = tl.sum(e, 1)
        hit = k[None, :] == tl.load(y + row, mask=row < batch, other=0)[:, None]
        part = tl.where(row < batch, 1.0, 0.0)
        if WEIGHTED:
            part = tl.load(weight + row, mask=row < batch, other=0.0)
        total += tl.sum(part * (tl.log(whole) + top - tl.sum(tl.where(hit, v, 0.0), 1)))
        tl.store(slope + spot, (e / whole[:, None] - tl.where(hit, 1.0, 0.0)) * (part / count)[:, None], mask=keep)
    tl.store(loss + group, total / count)
