"""Triton kernels of the linear layers of many networks; launched by linear.py."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr

loose = triton.jit(do_not_specialize=["batch", "apart", "bias_apart"])


@loose
def forward(x, w, bias, y, real, batch, apart, bias_apart, inner: constexpr, outer: constexpr,
            SAMPLES: constexpr, OUTPUTS: constexpr, INPUTS: constexpr,
            RELU: constexpr, COUNTED: constexpr, exact: constexpr):  # fmt: skip
    """A program has some outputs of some samples of one network."""
    group = tl.program_id(2).to(tl.int64)
    x += group * batch * inner
    w += group * apart
    bias += group * bias_apart
    y += group * batch * outer
    sample, out = (
        tl.program_id(0) * SAMPLES + tl.arange(0, SAMPLES),
        tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS),
    )
    acc, stop = tl.zeros((SAMPLES, OUTPUTS), dtype=tl.float32), inner
    if COUNTED:
        stop = tl.where(tl.program_id(0) * SAMPLES < tl.load(real + group), inner, 0)
    for start in range(0, stop, INPUTS):
        k = start + tl.arange(0, INPUTS)
        a = tl.load(
            x + sample[:, None] * inner + k[None, :],
            mask=(sample < batch)[:, None] & (k < inner)[None, :],
            other=0.0,
        )
        b = tl.load(
            w + out[None, :] * inner + k[:, None], mask=(out < outer)[None, :] & (k < inner)[:, None], other=0.0
        )
        acc = tl.dot(a, b, acc, input_precision=exact)
    acc += tl.load(bias + out, mask=out < outer, other=0.0)[None, :]
    if RELU:
        acc = tl.where(acc < 0, 0.0, acc)
    tl.store(y + sample[:, None] * outer + out[None, :], acc, mask=(sample < batch)[:, None] & (out < outer)[None, :])


@loose
def backward(g, x, w, y, dw, db, dx, real, batch, apart, inner: constexpr, outer: constexpr, down: constexpr,
             SAMPLES: constexpr, OUTPUTS: constexpr, INPUTS: constexpr,
             RELU: constexpr, COUNTED: constexpr, exact: constexpr):  # fmt: skip
    """A program has a tile of the weights' gradient of one network or, beyond the last of these, one of the input's."""
    group = tl.program_id(2).to(tl.int64)
    g += group * batch * outer
    y += group * batch * outer
    x += group * batch * inner
    dx += group * batch * inner
    k, tile, count = tl.program_id(0) * INPUTS + tl.arange(0, INPUTS), tl.program_id(1), batch
    if COUNTED:
        count = tl.load(real + group)
    if tile < down:
        out = tile * OUTPUTS + tl.arange(0, OUTPUTS)
        acc, sums = tl.zeros((OUTPUTS, INPUTS), dtype=tl.float32), tl.zeros((OUTPUTS,), dtype=tl.float32)
        for start in range(0, count, SAMPLES):
            sample = start + tl.arange(0, SAMPLES)
            spot, keep = sample[None, :] * outer + out[:, None], (sample < batch)[None, :] & (out < outer)[:, None]
            slope = tl.load(g + spot, mask=keep, other=0.0)
            if RELU:
                slope = tl.where(tl.load(y + spot, mask=keep, other=0.0) <= 0, 0.0, slope)
            before = tl.load(
                x + sample[:, None] * inner + k[None, :],
                mask=(sample < batch)[:, None] & (k < inner)[None, :],
                other=0.0,
            )
            acc = tl.dot(slope, before, acc, input_precision=exact)
            sums += tl.sum(slope, 1)
        tl.store(
            dw + (group * outer + out[:, None]) * inner + k[None, :],
            acc,
            mask=(out < outer)[:, None] & (k < inner)[None, :],
        )
        if tl.program_id(0) == 0:
            tl.store(db + group * outer + out, sums, mask=out < outer)
    else:
        w += group * apart
        first = (tile - down) * SAMPLES
        sample, stop = first + tl.arange(0, SAMPLES), tl.where(first < count, outer, 0)
        back = tl.zeros((SAMPLES, INPUTS), dtype=tl.float32)
        for start in range(0, stop, OUTPUTS):
            out = start + tl.arange(0, OUTPUTS)
            spot, keep = sample[:, None] * outer + out[None, :], (sample < batch)[:, None] & (out < outer)[None, :]
            slope = tl.load(g + spot, mask=keep, other=0.0)
            if RELU:
                slope = tl.where(tl.load(y + spot, mask=keep, other=0.0) <= 0, 0.0, slope)
            weight = tl.load(
                w + out[:, None] * inner + k[None, :], mask=(out < outer)[:, None] & (k < inner)[None, :], other=0.0
            )
            back = tl.dot(slope, weight, back, input_precision=exact)
        tl.store(dx + sample[:, None] * inner + k[None, :], back, mask=(sample < batch)[:, None] & (k < inner)[None, :])
