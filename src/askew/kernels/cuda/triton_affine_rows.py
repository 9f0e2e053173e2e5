"""Triton kernels of one affine step of many rows; launched by affine_rows.py."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr

loose = triton.jit(do_not_specialize=["size", "parts"])


@triton.jit
def direction(theta, g, shift, gain, pull, row, spot, inside, GAIN: constexpr, SHIFT: constexpr, PULL: constexpr):
    """gain·g + shift + pull·theta of some coordinates of a row."""
    d = tl.load(g + spot, mask=inside, other=0.0)
    if GAIN:
        d *= tl.load(gain + row)
    if SHIFT:
        d += tl.load(shift + spot, mask=inside, other=0.0)
    if PULL:
        d += tl.load(pull + row) * tl.load(theta + spot, mask=inside, other=0.0)
    return d


@loose
def squares(theta, g, shift, gain, pull, partial, size, parts,
            GAIN: constexpr, SHIFT: constexpr, PULL: constexpr, BLOCK: constexpr):  # fmt: skip
    """A program has some coordinates of one row: the sum of the direction's squares."""
    row, at = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = direction(theta, g, shift, gain, pull, row, row * size + at, at < size, GAIN, SHIFT, PULL).to(tl.float64)
    tl.store(partial + row * parts + tl.program_id(0), tl.sum(d * d))


@loose
def step(theta, v, g, shift, gain, pull, decays, rate, partial, size, parts, momentum, decay, clip,
         GAIN: constexpr, SHIFT: constexpr, PULL: constexpr, DECAYS: constexpr, CLIP: constexpr, MOMENTUM: constexpr,
         BLOCK: constexpr, PARTS: constexpr):  # fmt: skip
    """A program has some coordinates of one row: its momentum and theta after the step."""
    row, at = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    spot, inside = row * size + at, at < size
    d = direction(theta, g, shift, gain, pull, row, spot, inside, GAIN, SHIFT, PULL)
    if CLIP:
        sums = tl.zeros((PARTS,), dtype=tl.float64)
        for first in range(0, parts, PARTS):
            part = first + tl.arange(0, PARTS)
            sums += tl.load(partial + row * parts + part, mask=part < parts, other=0.0)
        d *= tl.minimum(clip / (tl.sqrt(tl.sum(sums)) + 1e-6), 1.0).to(tl.float32)
    old, lr = tl.load(theta + spot, mask=inside, other=0.0), tl.load(rate + row)
    if DECAYS:
        decay += tl.load(decays + row)
    d += decay * old
    if MOMENTUM:
        d += momentum * tl.load(v + spot, mask=inside, other=0.0)
        tl.store(v + spot, d, mask=inside)
    tl.store(theta + spot, old - lr * d, mask=inside)
