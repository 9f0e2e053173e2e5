"""Convolution, ReLU and 2×2 max-pooling of many networks at once, with channels enough for matrix units, for CUDA.

cuDNN trains one network at a time: a batch of fifty fills a GPU badly, and of the first layer's three channels it makes
nothing of matrix units. Here images lie channels-last, so that a pixel's channels, and a row of a filter, are a run of
numbers; four pixels that are pooled are four rows of one product. What flows back goes to the largest of the four.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch
from torch import Tensor

WIDTHS = (32, 64, 128)  # channels of the output
FORWARD = (128, 32, 8, 3)  # pixels of one program, inputs at a time, its warps, and the stages of its loop
WEIGHTS = (64, 64, 4, 3)  # pixels at a time, inputs of one program
FIRST = (32, 128, 4, 4)  # the same where rows of filters are short
INPUTS = (64, 32, 4, 3)  # pixels of one program, outputs at a time, the fewest of WIDTHS
PROGRAMS = 512  # of the weights' gradient, which is summed in parts: enough to fill the device


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
    block, step, warps, stages = FORWARD
    total, step = b * ho * wo, 16 if k * ci <= 16 else step
    sizes = (total, ci, h, wd, co, k, ho, wo, block, step, exact, half, real is not None)
    grid = (-(-4 * total // block), groups)
    kernels().forward[grid](
        x, w, bias, y, which, x if real is None else real, *sizes, num_warps=warps, num_stages=stages
    )
    return channels_first(y), channels_first(which)


def slopes(
    g: Tensor, x: Tensor, w: Tensor, which: Tensor, inner: bool, real: Tensor | None, exact: str, half: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of weights, bias and, if `inner`, of the input."""
    g, x, which, launch = channels_last(g), channels_last(x), channels_last(which), kernels()
    groups, b, h, wd, ci = x.shape
    co, k = w.shape[1], w.shape[3]
    ho, wo = g.shape[2:4]
    total, counts = b * ho * wo, x if real is None else real
    run = k * ci
    block, tile, warps, stages = WEIGHTS if run > 16 else FIRST
    tiles = -(-k * max(run, 16) // tile)
    blocks = -(-4 * total // block)
    each = -(-blocks // max(1, PROGRAMS // (groups * tiles)))
    parts = -(-blocks // each)
    partial = torch.empty((groups, parts, k * run * co + co), dtype=torch.float32, device=x.device)
    sizes = (total, each, parts, ci, h, wd, co, k, ho, wo, block, tile, exact, half, real is not None)
    launch.weights[(parts * groups, tiles)](x, g, which, partial, counts, *sizes, num_warps=warps, num_stages=stages)
    sums = partial.sum(1)
    dw, db = sums[:, :-co].view(groups, k, k, ci, co).permute(0, 4, 3, 1, 2), sums[:, -co:]
    if not inner:
        return dw, db, x.new_empty((groups, 0))
    dx, turned = torch.empty_like(x), w.permute(0, 3, 4, 2, 1).contiguous()
    block, step, warps, stages = INPUTS
    shape = (
        b,
        ci,
        h,
        wd,
        co,
        k,
        ho,
        wo,
        block,
        step,
        max(16, 1 << (ci - 1).bit_length()),
        exact,
        half,
        real is not None,
    )
    launch.inputs[(-(-b * h * wd // block), groups)](
        g, which, turned, dx, counts, *shape, num_warps=warps, num_stages=stages
    )
    return dw, db, channels_first(dx)


@cache
def kernels() -> ModuleType:
    """The kernels; triton is loaded where they are first needed."""
    from . import triton_wide_conv

    return triton_wide_conv
