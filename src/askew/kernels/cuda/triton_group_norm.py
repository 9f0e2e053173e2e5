"""Triton kernels of group norm with what follows it; launched by group_norm.py."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr

# A program has one group of channels of one image, [area, size] numbers of the image's [area, channels].
loose = triton.jit(do_not_specialize=["area", "images"])


@loose
def forward(x, weight, bias, shortcut, y, statistics, area, eps, size: constexpr, groups: constexpr,
            PIXELS: constexpr, SIZE: constexpr, RELU: constexpr, ADD: constexpr):  # fmt: skip
    """The normalised group, plus the shortcut, after a ReLU; and its mean and 1 / deviation in `statistics`."""
    image, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pixel, channel = tl.arange(0, PIXELS), tl.arange(0, SIZE)
    place = group * size + channel
    begin = image * area * (groups * size)
    mean, spread, seen = 0.0, 0.0, 0.0
    for start in range(0, area, PIXELS):
        keep = (start + pixel < area)[:, None] & (channel < size)[None, :]
        spots = begin + (start + pixel)[:, None] * (groups * size) + place[None, :]
        numbers = tl.load(x + spots, mask=keep, other=0.0).to(tl.float32)
        # the mean and the squared distances of these, then of all so far: no large sums are subtracted
        count = tl.minimum(area - start, PIXELS) * size * 1.0
        middle = tl.sum(numbers) / count
        apart = tl.where(keep, numbers - middle, 0.0)
        shift = middle - mean
        spread += tl.sum(apart * apart) + shift * shift * seen * count / (seen + count)
        mean += shift * count / (seen + count)
        seen += count
    scale = 1 / tl.sqrt(spread / seen + eps)
    tl.store(statistics + (image * groups + group) * 2, mean)
    tl.store(statistics + (image * groups + group) * 2 + 1, scale)
    factor = tl.load(weight + place, mask=channel < size, other=0.0).to(tl.float32) * scale
    add = tl.load(bias + place, mask=channel < size, other=0.0).to(tl.float32) - mean * factor
    for start in range(0, area, PIXELS):
        keep = (start + pixel < area)[:, None] & (channel < size)[None, :]
        spots = begin + (start + pixel)[:, None] * (groups * size) + place[None, :]
        out = tl.load(x + spots, mask=keep, other=0.0).to(tl.float32) * factor[None, :] + add[None, :]
        if ADD:
            out += tl.load(shortcut + spots, mask=keep, other=0.0).to(tl.float32)
        if RELU:
            out = tl.where(out < 0, 0.0, out)  # and what is not a number stays so
        tl.store(y + spots, out, mask=keep)


@triton.jit
def slope_and_normal(g, x, y, spots, keep, mean, scale, RELU: constexpr):
    """The gradients before the ReLU and the normalised numbers at some places of a group."""
    slope = tl.load(g + spots, mask=keep, other=0.0).to(tl.float32)
    if RELU:
        slope = tl.where(tl.load(y + spots, mask=keep, other=0.0).to(tl.float32) <= 0, 0.0, slope)
    return slope, (tl.load(x + spots, mask=keep, other=0.0).to(tl.float32) - mean) * scale


@loose
def backward(g, x, weight, y, statistics, dx, dshortcut, sums, area, images, size: constexpr, groups: constexpr,
             PIXELS: constexpr, SIZE: constexpr, RELU: constexpr, ADD: constexpr):  # fmt: skip
    """Gradients of the input and the shortcut, and this image's share of those of weight and bias in `sums`."""
    image, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pixel, channel = tl.arange(0, PIXELS), tl.arange(0, SIZE)
    place = group * size + channel
    begin = image * area * (groups * size)
    mean = tl.load(statistics + (image * groups + group) * 2)
    scale = tl.load(statistics + (image * groups + group) * 2 + 1)
    factor = tl.load(weight + place, mask=channel < size, other=0.0).to(tl.float32)
    for_weight, for_bias = tl.zeros((SIZE,), dtype=tl.float32), tl.zeros((SIZE,), dtype=tl.float32)
    for start in range(0, area, PIXELS):
        keep = (start + pixel < area)[:, None] & (channel < size)[None, :]
        spots = begin + (start + pixel)[:, None] * (groups * size) + place[None, :]
        slope, normal = slope_and_normal(g, x, y, spots, keep, mean, scale, RELU)
        for_weight += tl.sum(slope * normal, 0)
        for_bias += tl.sum(slope, 0)
    row = image * (groups * size) + place
    tl.store(sums + row, for_weight, mask=channel < size)
    tl.store(sums + images.to(tl.int64) * (groups * size) + row, for_bias, mask=channel < size)
    along = tl.sum(for_weight * factor) / (area * size)
    level = tl.sum(for_bias * factor) / (area * size)
    for start in range(0, area, PIXELS):
        keep = (start + pixel < area)[:, None] & (channel < size)[None, :]
        spots = begin + (start + pixel)[:, None] * (groups * size) + place[None, :]
        slope, normal = slope_and_normal(g, x, y, spots, keep, mean, scale, RELU)
        tl.store(dx + spots, (slope * factor[None, :] - level - normal * along) * scale, mask=keep)
        if ADD and RELU:
            tl.store(dshortcut + spots, slope, mask=keep)
