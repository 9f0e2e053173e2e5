"""Triton kernels of one affine step of many rows; launched by affine_rows.py."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr

loose = triton.jit(do_not_specialize=["size", "parts"])
ALIGNED = constexpr(32)  # numbers that begin where memory is read at once


@triton.jit
def coordinates(row, size, BLOCK: constexpr):
    """Where a program's coordinates of a row begin, so that memory is read at once; their places from there, and which
    of them are the row's.
    """
    first = row * size
    begin = first // ALIGNED * ALIGNED
    before = (first - begin).to(tl.int32)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    return begin, at, (at >= before) & (at < before + size)


@triton.jit
def direction(theta, g, shift, gain, pull, row, at, inside, GAIN: constexpr, SHIFT: constexpr, PULL: constexpr):
    """gain·g + shift + pull·theta of some coordinates of a row."""
    d = tl.load(g + at, mask=inside, other=0.0)
    if GAIN:
        d *= tl.load(gain + row)
    if SHIFT:
        d += tl.load(shift + at, mask=inside, other=0.0)
    if PULL:
        d += tl.load(pull + row) * tl.load(theta + at, mask=inside, other=0.0)
    return d


@loose
def squares(theta, g, shift, gain, pull, active, partial, size, parts,
            GAIN: constexpr, SHIFT: constexpr, PULL: constexpr, SOME: constexpr, BLOCK: constexpr):  # fmt: skip
    """A program has some coordinates of one row: the sum of the direction's squares."""
    row = tl.program_id(1).to(tl.int64)
    begin, at, inside = coordinates(row, size, BLOCK)
    if SOME:
        inside &= tl.load(active + row)
    d = direction(theta + begin, g + begin, shift + begin, gain, pull, row, at, inside, GAIN, SHIFT, PULL)
    d = d.to(tl.float64)
    tl.store(partial + row * parts + tl.program_id(0), tl.sum(d * d))


@loose
def step(theta, v, g, shift, gain, pull, decays, rate, active, partial, size, parts, momentum, decay, clip,
         GAIN: constexpr, SHIFT: constexpr, PULL: constexpr, DECAYS: constexpr, CLIP: constexpr, MOMENTUM: constexpr,
         SOME: constexpr, BLOCK: constexpr, PARTS: constexpr):  # fmt: skip
    """A program has some coordinates of one row: its momentum and theta after the step."""
    row = tl.program_id(1).to(tl.int64)
    begin, at, inside = coordinates(row, size, BLOCK)
    if SOME:
        inside &= tl.load(active + row)
    theta += begin
    v += begin
    d = direction(theta, g + begin, shift + begin, gain, pull, row, at, inside, GAIN, SHIFT, PULL)
    if CLIP:
        sums = tl.zeros((PARTS,), dtype=tl.float64)
        for first in range(0, parts, PARTS):
            part = first + tl.arange(0, PARTS)
            sums += tl.load(partial + row * parts + part, mask=part < parts, other=0.0)
        d *= tl.minimum(clip / (tl.sqrt(tl.sum(sums)) + 1e-6), 1.0).to(tl.float32)
    old, lr = tl.load(theta + at, mask=inside, other=0.0), tl.load(rate + row)
    if DECAYS:
        decay += tl.load(decays + row)
    d += decay * old
    if MOMENTUM:
        d += momentum * tl.load(v + at, mask=inside, other=0.0)
        tl.store(v + at, d, mask=inside)
    tl.store(theta + at, old - lr * d, mask=inside)
