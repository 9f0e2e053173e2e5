"""One affine step of many rows in one pass over memory, for CUDA; where it is clipped, in two.

Torch's operations write and read every intermediate vector: for a step of FedDC, clipped and with weight decay, more
than twice as many bytes.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from ...core.settings import is_off
from ...core.types import Number, State
from . import available, triton_kernels

kernels = partial(triton_kernels, "affine_rows")
BLOCK, WARPS = 4096, 8  # coordinates of one program, and its warps
PARTS = 256  # sums of squares that are read at a time


def can_run(theta: Tensor) -> bool:
    """Can the kernels change these rows?"""
    return theta.is_cuda and theta.dtype is torch.float32 and theta.is_contiguous() and available()


def take(
    theta: Tensor,
    v: Tensor,
    g: Tensor,
    rule: State,
    lr: Tensor,
    active: Tensor | None,
    momentum: Number,
    decay: Number,
    clip: Number,
) -> None:
    """Change theta [C, P] and the momentum v of active rows (None: all); `rule` is what a step has beside gradients."""
    (rows, size), g, lr = theta.shape, g.contiguous(), lr.contiguous()
    parts = -(-(size + kernels().ALIGNED.value - 1) // BLOCK)  # a row may begin within its first block
    some = active is not None
    who = lr if active is None else active
    terms = (rule.get("shift", theta), rule.get("gain", lr), rule.get("pull", lr))
    has = ("gain" in rule, "shift" in rule, "pull" in rule)
    clips, grid = not math.isinf(clip), (parts, rows)
    squares = torch.empty((rows, parts) if clips else 0, dtype=torch.float64, device=theta.device)
    if clips:
        kernels().squares[grid](theta, g, *terms, who, squares, size, parts, *has, some, BLOCK, num_warps=WARPS)
    numbers = (size, parts, float(momentum), float(decay), float(clip))
    flags = (*has, "decay" in rule, clips, not is_off(momentum), some)
    kernels().step[grid](
        theta, v, g, *terms, rule.get("decay", lr), lr, who, squares, *numbers, *flags, BLOCK, PARTS, num_warps=WARPS
    )
