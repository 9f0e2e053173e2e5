"""Triton kernels of the LSTM layers of many networks; launched by lstm.py."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr

loose = triton.jit(do_not_specialize=["step", "top", "times", "batch", "tiles"])


@triton.jit
def tanh(x):
    """tanh; near 0 by a polynomial (of the Cephes library), where the quotient would lose digits."""
    z, e = x * x, tl.exp(-2 * tl.abs(x))
    near = (((-5.70498872745e-3 * z + 2.06390887954e-2) * z - 5.37397155531e-2) * z + 1.33314422036e-1) * z
    far = (1 - e) / (1 + e)
    return tl.where(tl.abs(x) < 0.625, x + x * z * (near - 3.33332819422e-1), tl.where(x < 0, -far, far))


@loose
def forward(pre, w, bias, hidden, cells, gates, step, top, times, batch, tiles, layers: constexpr, size: constexpr,
            SAMPLES: constexpr, UNITS: constexpr, DEPTH: constexpr, exact: constexpr):  # fmt: skip
    """A program has some units of one layer of one network, at the time `step` - layer, for some samples.

    A column of the product is one gate of one unit. Layer 0 adds `pre`, the part of its input; the others multiply
    the output of the layer below, which is of the step before, and add the bias.
    """
    group = tl.program_id(1).to(tl.int64)
    layer, first = top - tl.program_id(2) // tiles, tl.program_id(2) % tiles * SAMPLES
    time, own = step - layer, group * layers + layer
    sample, unit = first + tl.arange(0, SAMPLES), tl.program_id(0) * UNITS + tl.arange(0, UNITS)
    column, depth, real = tl.arange(0, 4 * UNITS), tl.arange(0, DEPTH), (sample < batch)[:, None]
    output = column % 4 * size + tl.program_id(0) * UNITS + column // 4
    if layer == 0:
        place = ((group * times + time) * batch + sample)[:, None] * (4 * size) + output[None, :]
        acc = tl.load(pre + place, mask=real, other=0.0)
    else:
        acc = tl.load(bias + own * (4 * size) + output)[None, :] + tl.zeros((SAMPLES, 4 * UNITS), dtype=tl.float32)
    before = (own * (times + 1) + time) * batch * size
    below = ((own - 1) * (times + 1) + time + 1) * batch * size
    matrix = (group * (2 * layers - 1) + tl.maximum(2 * layer - 1, 0)) * (4 * size * size)
    spots, rows = sample[:, None] * size + depth[None, :], output[None, :] * size + depth[:, None]
    for k in range(0, tl.where(layer == 0, size, 2 * size), DEPTH):
        second = k >= size
        a = tl.load(hidden + tl.where(second, below - size, before) + k + spots, mask=real, other=0.0)
        b = tl.load(w + tl.where(second, matrix + (4 * size - 1) * size, matrix) + k + rows)
        acc = tl.dot(a, b, acc, input_precision=exact)
    even, odd = tl.split(tl.reshape(acc, (SAMPLES, UNITS, 2, 2)))
    i, g = tl.split(even)
    f, o = tl.split(odd)
    i, f, g, o = tl.sigmoid(i), tl.sigmoid(f), tanh(g), tl.sigmoid(o)
    spots = sample[:, None] * size + unit[None, :]
    c = f * tl.load(cells + before + spots, mask=real, other=0.0) + i * g
    after = before + batch * size
    tl.store(cells + after + spots, c, mask=real)
    tl.store(hidden + after + spots, o * tanh(c), mask=real)
    gates += ((own * times + time) * batch + sample)[:, None] * (4 * size) + unit[None, :]
    tl.store(gates, i, mask=real)
    tl.store(gates + size, f, mask=real)
    tl.store(gates + 2 * size, g, mask=real)
    tl.store(gates + 3 * size, o, mask=real)


@loose
def backward(dy, w, cells, gates, slopes, carried, step, top, times, batch, tiles, layers: constexpr, size: constexpr,
             SAMPLES: constexpr, UNITS: constexpr, DEPTH: constexpr, exact: constexpr):  # fmt: skip
    """A program has some units of one layer of one network, at the time `step` - layer, for some samples.

    What flows back to a unit comes from the gates of the same layer one time later and of the layer above at the same
    time, which are both of the step before; each of the four gates is a product of its own, so that warps share them.
    `carried` is what flows back through the cells.
    """
    group = tl.program_id(1).to(tl.int64)
    layer, first = top - tl.program_id(2) // tiles, tl.program_id(2) % tiles * SAMPLES
    time, own = step - layer, group * layers + layer
    sample, unit = first + tl.arange(0, SAMPLES), tl.program_id(0) * UNITS + tl.arange(0, UNITS)
    gate, depth, real = tl.arange(0, 4), tl.arange(0, DEPTH), (sample < batch)[:, None]
    later = (own * times + time + 1) * batch * (4 * size)
    above = ((own + 1) * times + time) * batch * (4 * size)
    matrix = (group * (2 * layers - 1) + tl.maximum(2 * layer - 1, 0)) * (4 * size * size)
    upper = (group * (2 * layers - 1) + 2 * layer + 2) * (4 * size * size)
    spots = gate[:, None, None] * size + sample[None, :, None] * (4 * size) + depth[None, None, :]
    rows = (gate[:, None, None] * size + depth[None, :, None]) * size + unit[None, None, :]
    begin, stop = tl.where(time < times - 1, 0, size), tl.where(layer < layers - 1, 2 * size, size)
    acc = tl.zeros((4, SAMPLES, UNITS), dtype=tl.float32)
    for k in range(begin, stop, DEPTH):
        second = k >= size
        a = tl.load(slopes + tl.where(second, above - size, later) + k + spots, mask=real[None, :, :], other=0.0)
        b = tl.load(w + tl.where(second, upper - size * size, matrix) + k * size + rows)
        acc = tl.dot(a, b, acc, input_precision=exact)
    dh = tl.sum(acc, 0)
    spots = sample[:, None] * size + unit[None, :]
    if begin == stop:  # the last time of the last layer
        dh += tl.load(dy + group * batch * size + spots, mask=real, other=0.0)
    before, carry = (own * (times + 1) + time) * batch * size + spots, carried + own * batch * size + spots
    place = ((own * times + time) * batch + sample)[:, None] * (4 * size) + unit[None, :]
    i, f = tl.load(gates + place, mask=real, other=0.0), tl.load(gates + place + size, mask=real, other=0.0)
    g = tl.load(gates + place + 2 * size, mask=real, other=0.0)
    o = tl.load(gates + place + 3 * size, mask=real, other=0.0)
    tc = tanh(tl.load(cells + before + batch * size, mask=real, other=0.0))
    dc = dh * o * (1 - tc * tc) + tl.load(carry, mask=real, other=0.0)
    tl.store(carry, dc * f, mask=real)
    tl.store(slopes + place, dc * g * i * (1 - i), mask=real)
    tl.store(slopes + place + size, dc * tl.load(cells + before, mask=real, other=0.0) * f * (1 - f), mask=real)
    tl.store(slopes + place + 2 * size, dc * i * (1 - g * g), mask=real)
    tl.store(slopes + place + 3 * size, dh * tc * o * (1 - o), mask=real)
