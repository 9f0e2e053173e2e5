"""Convolution, ReLU and 2×2 max-pooling on a CPU, in C and compiled for the sizes of a layer: torch's are slow with few
channels.
"""

from __future__ import annotations

from ctypes import CDLL, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from .compiler import library

SOURCE = Path(__file__).with_suffix(".c")
MAX_INPUT_CHANNELS = 64  # channels of the input: above, torch's products of matrices are better


def can_run(x: Tensor, conv: nn.Module, relu: nn.Module, pool: nn.Module) -> bool:
    """Can the kernels run these three layers on x? Not what is vmapped, compiled by torch or cast."""
    return (
        x.device.type == "cpu"
        and is_conv_relu_pool(conv, relu, pool)
        and x.dtype == conv.weight.dtype
        and x.dim() == 4
        and x.shape[1] == conv.in_channels <= MAX_INPUT_CHANNELS
        and torch._C._functorch.peek_interpreter_stack() is None
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and kernels(*sizes(x, conv.weight, int(conv.padding[0])), x.dtype) is not None
    )


def is_conv_relu_pool(conv: nn.Module, relu: nn.Module, pool: nn.Module) -> TypeGuard[nn.Conv2d]:
    """Is it a convolution with square filters, as many pixels of zeros on all sides and a bias, a ReLU, and 2×2 max-
    pooling?
    """
    return (
        type(conv) is nn.Conv2d
        and type(relu) is nn.ReLU
        and type(pool) is nn.MaxPool2d
        and pool.kernel_size == pool.stride == 2
        and pool.padding == 0
        and pool.dilation == 1
        and not pool.ceil_mode
        and conv.stride == conv.dilation == (1, 1)
        and conv.groups == 1
        and conv.bias is not None
        and conv.padding_mode == "zeros"
        and conv.kernel_size[0] == conv.kernel_size[1]
        and isinstance(conv.padding, tuple)
        and conv.padding[0] == conv.padding[1]
    )


def sizes(x: Tensor, w: Tensor, pad: int) -> tuple[int, ...]:
    return (*x.shape[1:], *w.shape[::3], pad)


@cache
def kernels(ci: int, h: int, wd: int, co: int, k: int, pad: int, dtype: torch.dtype) -> CDLL | None:
    """The functions for images and filters of these sizes."""
    if min(h, wd) + 2 * pad <= k or dtype not in (torch.float32, torch.float64):  # nothing to pool, or other numbers
        return None
    return library(SOURCE, dtype, ("CI", ci), ("CO", co), ("K", k), ("PAD", pad), ("H", h), ("W", wd))


def call(function: Any, count: int, *tensors: Tensor | None) -> None:
    if function(c_int64(count), *[c_void_p(None if t is None else t.data_ptr()) for t in tensors]):
        raise MemoryError("there is no memory for a convolution; use smaller batches.")


def conv_relu_pool(x: Tensor, conv: nn.Module) -> Tensor:
    """max_pool2d(relu(conv(x)), 2)."""
    assert isinstance(conv, nn.Conv2d)
    y: Tensor = _CpuConvReluPool.apply(x, conv.weight, conv.bias, conv.padding[0])  # type: ignore[no-untyped-call]
    return y


class _CpuConvReluPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor, pad: int) -> Tensor:
        x, w, bias = x.contiguous(), w.contiguous(), bias.contiguous()
        ctx.kernels = kernels(*sizes(x, w, pad), x.dtype)
        y = x.new_empty((len(x), len(w), *((side + 2 * pad - w.shape[3] + 1) // 2 for side in x.shape[2:])))
        which = torch.empty(y.shape, dtype=torch.uint8)
        call(ctx.kernels.forward, len(x), x, w, bias, y, which)
        ctx.save_for_backward(x, w, which)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        given = (*grads, *ctx.saved_tensors, ctx.needs_input_grad[0], ctx.kernels)
        return *_CpuConvBackward.apply(*given), None  # type: ignore[no-untyped-call]


class _CpuConvBackward(torch.autograd.Function):
    """The backward pass as a function of its own, so that its derivative is refused and not forgotten."""

    @staticmethod
    def forward(
        ctx: Any, g: Tensor, x: Tensor, w: Tensor, which: Tensor, deep: bool, functions: CDLL
    ) -> tuple[Tensor | None, ...]:
        dw, db, dx = torch.empty_like(w), w.new_empty(len(w)), torch.empty_like(x) if deep else None
        call(functions.backward, len(x), g.contiguous(), x, w, which, dw, db, dx)
        return dx, dw, db

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError("convolutions in C have no second derivative")
