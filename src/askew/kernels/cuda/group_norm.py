"""Group norm, the addition of a shortcut and a ReLU in one kernel each way, for images channels-last on CUDA.

torch normalises in float32 whatever its input, in several kernels, and needs channels first: in bfloat16 most of a
residual network's time went into copies. Here numbers are read and written as they are, and computed in float32.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from . import available, triton_kernels

kernels = partial(triton_kernels, "group_norm")
NUMBERS = 8192  # of a group that a program has at a time
WARPS = 8


def can_run(x: Tensor, norm: nn.Module) -> bool:
    """Can the kernels normalise x?"""
    return (
        x.is_cuda
        and type(norm) is nn.GroupNorm
        and norm.affine
        and x.dim() == 4
        and x.dtype in (torch.bfloat16, torch.float32)
        and not torch._C._functorch.is_batchedtensor(x)  # which cannot be asked for its memory format
        and x.is_contiguous(memory_format=torch.channels_last)
        and not torch.compiler.is_compiling()
        and available()
    )


def norm_relu(x: Tensor, norm: nn.Module, relu: bool = True, shortcut: Tensor | None = None) -> Tensor:
    """relu(norm(x) + shortcut)."""
    assert isinstance(norm, nn.GroupNorm)
    if shortcut is not None:
        shortcut = shortcut.to(x.dtype)
    options = (norm.num_groups, norm.eps, relu)
    y: Tensor = _NormRelu.apply(x, norm.weight, norm.bias, shortcut, *options)[0]  # type: ignore[no-untyped-call]
    return y


def channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def tile(size: int) -> tuple[int, int]:
    """Pixels that a program has at a time, and channels, both powers of two."""
    wide = 1 << (size - 1).bit_length()
    return max(1, NUMBERS // wide), wide


def forward(
    x: Tensor, weight: Tensor, bias: Tensor, shortcut: Tensor | None, groups: int, eps: float, relu: bool
) -> tuple[Tensor, Tensor]:
    """The output, and of every group the mean and 1 / deviation."""
    x = channels_last(x)
    added = x if shortcut is None else channels_last(shortcut)
    images, channels, height, width = x.shape
    y, statistics = torch.empty_like(x), torch.empty((images, groups, 2), dtype=torch.float32, device=x.device)
    size = channels // groups
    options = (height * width, eps, size, groups, *tile(size), relu, shortcut is not None)
    kernels().forward[(images, groups)](x, weight, bias, added, y, statistics, *options, num_warps=WARPS)
    return y, statistics


def backward(
    g: Tensor, x: Tensor, weight: Tensor, y: Tensor, statistics: Tensor, relu: bool, add: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the input, of weight and bias, and of the shortcut."""
    g, x = channels_last(g), channels_last(x)
    (images, channels, height, width), groups = x.shape, statistics.shape[1]
    dx, dshortcut = torch.empty_like(x), torch.empty_like(g) if add and relu else g
    sums = torch.empty((2, images, channels), dtype=torch.float32, device=x.device)
    size = channels // groups
    options = (height * width, images, size, groups, *tile(size), relu, add)
    kernels().backward[(images, groups)](g, x, weight, y, statistics, dx, dshortcut, sums, *options, num_warps=WARPS)
    dweight, dbias = sums.sum(1)
    return dx, dweight, dbias, dshortcut


class _NormRelu(torch.autograd.Function):
    """One network's."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        shortcut: Tensor | None,
        groups: int,
        eps: float,
        relu: bool,
    ) -> tuple[Tensor, Tensor]:
        y, statistics = forward(x, weight, bias, shortcut, groups, eps, relu)
        ctx.relu, ctx.add = relu, shortcut is not None
        ctx.mark_non_differentiable(statistics)
        ctx.set_materialize_grads(False)  # no zeros for what has no gradient
        ctx.save_for_backward(x, weight, y, statistics)
        return y, statistics

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, y, statistics = ctx.saved_tensors
        dx, dweight, dbias, dshortcut = backward(grads[0], x, weight, y, statistics, ctx.relu, ctx.add)
        return dx, dweight, dbias, dshortcut if ctx.add else None, None, None, None
