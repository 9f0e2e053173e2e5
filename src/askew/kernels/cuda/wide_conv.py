"""Convolution, ReLU and 2×2 max-pooling of many networks at once, with channels enough for matrix units, for CUDA.

cuDNN trains one network at a time: a batch of fifty fills a GPU badly, and of the first layer's three channels it makes
nothing of matrix units. Here images lie channels-last, so that a pixel's channels, and a row of a filter, are a run of
numbers; four pixels that are pooled are four rows of one product. What flows back goes to the largest of the four.

The gradient of the weights is a sum over pixels and images. Matrix units read float32 only along what is summed, so for
this the images, and of them the pixels of a row, are put next to each other first; that takes about a quarter of the
time.
"""

from __future__ import annotations

from functools import cache, partial

import torch
from torch import Tensor

from . import triton_kernels

kernels = partial(triton_kernels, "wide_conv")
WIDTHS = (32, 64, 128)  # channels of the output
# pooled pixels of one program, its outputs at most, those of one warp, inputs at a time, the stages of its loop
FORWARD = {"tf32": (64, 128, 16, 16, 3), "tf32x3": (64, 64, 8, 32, 2)}
WEIGHTS = {"tf32": (256, 32, 4, 528), "tf32x3": (64, 32, 3, 528)}  # rows, numbers at a time, stages, programs
FIRST = {"tf32": (64, 16, 4, 264), "tf32x3": (32, 16, 4, 264)}  # spots, numbers at a time, stages, programs
INPUTS = {"tf32": (64, 64, 4, 3), "tf32x3": (64, 32, 4, 3)}  # pixels of one program, outputs at a time
IMAGES = 64  # that are copied at a time
# bytes of shared memory on a multiprocessor that four stages of WEIGHTS need; a GeForce has 100 KiB, enough for three
FOUR_STAGES = 145 * 2**10


def supports(ci: int, co: int, k: int, pad: int) -> bool:
    """Is this what the kernels do?"""
    return co in WIDTHS and pad == 0 and (ci in WIDTHS or k * ci <= 16)


def channels_last(t: Tensor) -> Tensor:
    """[…, channels, height, width] with the channels last, and contiguous."""
    return t.movedim(-3, -1).contiguous()


def channels_first(t: Tensor) -> Tensor:
    return t.movedim(-1, -3)


def outputs(x: Tensor, w: Tensor, bias: Tensor, real: Tensor | None, exact: str, half: bool) -> tuple[Tensor, Tensor]:
    """Pooled output and which of its four pixels each is; x [G, B, …], weights [G, …]: G networks at once."""
    x, w, bias = channels_last(x), channels_last(w), bias.contiguous()
    groups, b, h, wd, ci = x.shape
    co, k = w.shape[1:3]
    ho, wo = (h - k + 1) // 2, (wd - k + 1) // 2
    y = torch.empty((groups, b, ho, wo, co), dtype=torch.bfloat16 if half else x.dtype, device=x.device)
    which = torch.empty(y.shape, dtype=torch.uint8, device=x.device)
    block, most, each, step, stages = FORWARD[exact]
    total, out = b * ho * wo, min(co, most)
    if k * ci <= 16:
        step, stages = 16, 2  # short rows: more programs at a time bring more than more stages
    sizes = (total, ci, h, wd, co, k, ho, wo, block, out, step, exact, half, real is not None)
    grid = (-(-total // block), groups, co // out)
    kernels().forward[grid](
        x, w, bias, y, which, counts(real, x), *sizes, num_warps=max(4, out // each), num_stages=stages
    )
    return channels_first(y), channels_first(which)


def slopes(
    g: Tensor, x: Tensor, w: Tensor, which: Tensor, inner: bool, real: Tensor | None, exact: str, half: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of weights, bias and, if `inner`, of the input."""
    which = channels_last(which)
    groups, b, ci, h, wd = x.shape
    (co, k), (ho, wo) = w.shape[1::2], g.shape[3:]
    dtype, pad = (torch.bfloat16, -(-b // 8) * 8) if half else (torch.float32, -(-b // 4) * 4)  # by 16 bytes
    seen = images_last(x, pad, dtype, real)
    few = k * ci <= 16
    sent, places, dy, sums = spread(g, which, pad, dtype, not few, real)
    if few and inner:
        dy = spread(g, which, pad, dtype, True, real)[2]
    across = 1 if few else 2  # pixels of a row that each of `sent` stands for
    shape = (ci, h, wd, co, k, across * ho, across * wo, pad)
    dw = first_weights(seen, sent, places, shape, real, exact) if few else weights(seen, sent, shape, real, exact)
    dw, db = dw.view(groups, k, k, ci, co).permute(0, 4, 3, 1, 2), sums.sum((0, 2))
    if not inner:
        return dw, db, x.new_empty((groups, 0))
    turned = w.permute(0, 3, 4, 2, 1).contiguous()
    dx = torch.empty((groups, b, h, wd, ci), dtype=x.dtype, device=x.device)
    block, step, warps, stages = INPUTS[exact]
    sizes = (*shape[:5], 2 * ho, 2 * wo, block, min(step, co), max(16, 1 << (ci - 1).bit_length()), exact, half)
    kernels().inputs[(-(-b * h * wd // block), groups)](dy, turned, dx, b, *sizes, num_warps=warps, num_stages=stages)
    return dw, db, channels_first(dx)


def spread(
    g: Tensor, which: Tensor, pad: int, dtype: torch.dtype, everywhere: bool, real: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients with the images last, which of four pixels each belongs to, gradients channels-last, sums for the bias.

    `everywhere`: gradients are those of all pixels, and the second is empty; else of pooled ones, and the third is.
    """
    groups, b, ho, wo, co = which.shape
    across = 2 if everywhere else 1
    sent = g.new_empty((groups, across * ho, co, across * wo, pad), dtype=dtype)
    places = torch.empty(0 if everywhere else sent.shape, dtype=torch.uint8, device=g.device)
    dy = g.new_empty((groups, b, 2 * ho, 2 * wo, co) if everywhere else 0, dtype=dtype)
    block = min(IMAGES, 1 << (pad - 1).bit_length())
    grid = (ho * wo, groups, -(-pad // block))
    sums = torch.empty((grid[2], groups, ho * wo, co), dtype=torch.float32, device=g.device)
    sizes = (b, *g.stride(), co, ho, wo, pad, block, everywhere, real is not None)
    kernels().spread[grid](g, which, dy, sent, places, sums, counts(real, which), *sizes, num_warps=8, num_stages=1)
    return sent, places, dy, sums


def counts(real: Tensor | None, other: Tensor) -> Tensor:
    """What is handed to a kernel as the number of real samples; `other`, which is not read, where all of them are."""
    return other if real is None else real


def images_last(x: Tensor, pad: int, dtype: torch.dtype, real: Tensor | None) -> Tensor:
    """x [G, B, channels, height, width] as [G, height, channels, width, pad], zeros in the places of no image."""
    if 1 not in (x.stride(2), x.stride(4)):
        x = x.contiguous()
    groups, b, ci, h, wd = x.shape
    into = torch.empty((groups, h, ci, wd, pad), dtype=dtype, device=x.device)
    block = min(IMAGES, 1 << (pad - 1).bit_length())
    if x.stride(4) == 1:  # lines of one channel; else those of one pixel
        lines, line, columns, place = ci, 2, wd, (pad, wd * pad)
    else:
        lines, line, columns, place = wd, 4, ci, (wd * pad, pad)
    strides = (x.stride(0), x.stride(1), x.stride(3), x.stride(line))
    sizes = (columns, lines, ci * wd * pad, *place, h * ci * wd * pad, pad, block, 1 << (columns - 1).bit_length())
    grid = (h * lines, groups, -(-pad // block))
    kernels().images_last[grid](
        x, into, counts(real, x), b, *strides, *sizes, real is not None, num_warps=4, num_stages=1
    )
    return into


def weights(seen: Tensor, sent: Tensor, shape: tuple[int, ...], real: Tensor | None, exact: str) -> Tensor:
    """Gradients of weights [G, taps, inputs, outputs], flat; summed in parts, in a fixed order."""
    groups, (ci, _, _, co, k, ho, *_) = len(seen), shape
    rows, depth, most, programs = WEIGHTS[exact]
    stages = most if has_shared_memory(seen.device, FOUR_STAGES) else min(most, 3)
    taps = max(1, rows // ci)
    tiles = -(-k * k // taps)
    each = -(-ho // max(1, min(ho, programs // (groups * tiles))))
    parts = -(-ho // each)
    partial = torch.empty((groups, parts, k * k * ci * co), dtype=torch.float32, device=seen.device)
    sizes = (parts, each, *shape, depth, taps, exact, real is not None)
    kernels().weights[(parts * groups, tiles)](
        seen, sent, partial, counts(real, seen), *sizes, num_warps=8 if co > 64 else 4, num_stages=stages
    )
    return partial.sum(1)


@cache
def has_shared_memory(device: torch.device, size: int) -> bool:
    """Has a multiprocessor so many bytes?"""
    return bool(torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor >= size)


def first_weights(
    seen: Tensor, sent: Tensor, places: Tensor, shape: tuple[int, ...], real: Tensor | None, exact: str
) -> Tensor:
    """The same for few inputs, from the gradients of pooled pixels, with sums for each of the four places."""
    groups, (ci, _, _, co, k, ho, wo, pad) = len(seen), shape
    spots, depth, stages, programs = FIRST[exact]
    tiles, chunks = -(-(k + 1) * (k + 1) * ci // spots), ho * -(-wo * pad // depth)
    each = -(-chunks // max(1, min(chunks, programs // (groups * tiles))))
    parts = -(-chunks // each)
    partial = torch.empty((groups, parts * 4, k * k * ci * co), dtype=torch.float32, device=seen.device)
    sizes = (parts, each, *shape, depth, spots, exact, real is not None)
    kernels().first_weights[(parts * groups, tiles)](
        seen, sent, places, partial, counts(real, seen), *sizes, num_warps=8 if co > 64 else 4, num_stages=stages
    )
    return partial.sum(1)
