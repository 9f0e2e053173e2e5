"""Triton kernel that gathers the next batch of many clients; launched by gather.py."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr


@triton.jit(do_not_specialize=["length", "span"])
def gather(x, y, rows, lengths, first, last, count, at, steps, step, into_x, into_y, weight, live, real, length, span,
           wide: constexpr, deep: constexpr, BLOCK: constexpr):  # fmt: skip
    """A program has some numbers of one client's batch, the first one the labels too."""
    group = tl.program_id(1).to(tl.int64)
    now = tl.load(at)
    row = tl.minimum(tl.load(first + group) + now, tl.load(last + group))
    begin, n = tl.load(rows + row * length), tl.load(lengths + row).to(tl.int32)
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    sample = e // wide
    spot = tl.minimum(sample, n - 1) * wide + e - sample * wide  # padding is the last sample again
    tl.store(into_x + group * span * wide + e, tl.load(x + begin * wide + spot, mask=sample < span), mask=sample < span)
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
