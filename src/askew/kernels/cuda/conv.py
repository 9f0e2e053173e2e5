"""Convolution, ReLU and 2×2 max-pooling in one kernel, for CUDA.

Small networks spend a GPU's time on many short kernels and on convolutions that cuDNN has no good kernel for (3 → 6
channels). Here the forward pass is one kernel that never writes what is pooled away, and the backward pass reads only
the pixel that was the largest of its four. The weights' gradient is summed in a fixed order, so results repeat bit for
bit. Where it is known how many samples of a batch are real, padding costs next to nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..cpu.conv import is_conv_relu_pool
from . import available, nvrtc, small_conv, wide_conv
from .rows import cudnn_precision, real_counts, rows_first

WIDTH = 16  # channels at most: with more, four columns for each do not fit
MANY_IMAGES = 512  # images that fill the device without other networks


def can_run(x: Tensor, conv: nn.Module, relu: nn.Module, pool: nn.Module) -> bool:
    """Can the kernels run these three layers on x?"""
    if not x.is_cuda or x.dtype == torch.float64 or not available():
        return False
    evaluated = x.dim() == 4 and len(x) >= MANY_IMAGES and not torch.is_grad_enabled()
    if not supports(conv, relu, pool, many=evaluated or torch._C._functorch.is_batchedtensor(x)):
        return False
    return max(channels(conv)) > WIDTH or fits(x, conv)


def channels(conv: nn.Module) -> tuple[int, int]:
    assert isinstance(conv, nn.Conv2d)
    return conv.in_channels, conv.out_channels


def fits(x: Tensor, conv: nn.Module) -> bool:
    """Do images of this size fit the kernels?"""
    assert isinstance(conv, nn.Conv2d)
    ci, h, w = x.shape[-3:]
    shape = small_conv.ConvSizes(ci, h, w, conv.out_channels, conv.kernel_size[0], int(conv.padding[0]))
    return nvrtc.can_compile() and shape.fits()


def supports(conv: nn.Module, relu: nn.Module, pool: nn.Module, *, many: bool) -> bool:
    """Is this what the kernels do? With many channels only for many networks or images, where they were measured."""
    if not is_conv_relu_pool(conv, relu, pool):
        return False
    ci, co, k, pad = conv.in_channels, conv.out_channels, conv.kernel_size[0], int(conv.padding[0])
    return (k <= 7 and pad <= 2 and max(ci, co) <= WIDTH) or (many and wide_conv.supports(ci, co, k, pad))


def conv_relu_pool(x: Tensor, conv: nn.Module) -> Tensor:
    """max_pool2d(relu(conv(x)), 2)."""
    assert isinstance(conv, nn.Conv2d)
    y: Tensor = _ConvReluPool.apply(x, conv.weight, conv.bias, conv.padding[0])[0]  # type: ignore[no-untyped-call]
    return y


def forward(x: Tensor, w: Tensor, bias: Tensor, pad: int, real: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Pooled output and which of its four pixels each is; x [G, B, …], weights [G, …]: G networks at once."""
    half = x.is_cuda and torch.is_autocast_enabled("cuda")
    exact = precision(half)
    if max(w.shape[1:3]) > WIDTH:
        return wide_conv.outputs(x, w, bias, real, exact, half)
    return small_conv.outputs(aligned(x), w, bias, pad, real, exact != "tf32", half)


def precision(half: bool) -> str:
    """Of the products; where bfloat16 is asked for (`half`), TF32 is more than that."""
    return "tf32" if half else cudnn_precision()


def aligned(x: Tensor) -> Tensor:
    """Contiguous, and where four numbers can be read at once."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def backward(
    g: Tensor, x: Tensor, w: Tensor, which: Tensor, pad: int, inner: bool, real: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of weights, bias and, if `inner`, of the input."""
    half = g.dtype is torch.bfloat16
    exact = precision(half)
    if max(w.shape[1:3]) > WIDTH:
        return wide_conv.slopes(g, x, w, which, inner, real, exact, half)
    g, x, which, split = g.contiguous(), aligned(x), which.contiguous(), exact != "tf32"
    co, sums = w.shape[1], small_conv.weight_gradients(g, x, which, w.shape[3], pad, real, split)
    dx = small_conv.input_gradients(g, x, w, which, pad, real, split) if inner else x.new_empty((len(x), 0))
    return sums[:, :-co].view(w.shape), sums[:, -co:], dx


class _Grouped(torch.autograd.Function):
    """Many networks at once."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, pad: int, real: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return forward(x, weight, bias, pad, real)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, weight, _, ctx.pad, *rest = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)  # no zeros for what has no gradient
        ctx.save_for_backward(x, weight, output[1], *rest)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inner = ctx.needs_input_grad[0]
        x, w, which, real = ctx.saved_tensors
        weight, bias, dx = backward(grads[0], x, w, which, ctx.pad, inner, real)
        return dx if inner else None, weight, bias, None, None


class _ConvReluPool(_Grouped):
    """One network, or one of those that are vmapped."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, pad: int) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        y, which = forward(x[None], weight[None], bias[None], pad)
        return y[0], which[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inner = ctx.needs_input_grad[0]
        weight, bias, x = _Backward.apply(grads[0], *ctx.saved_tensors, ctx.pad, inner)  # type: ignore[no-untyped-call]
        return x if inner else None, weight, bias, None

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], x: Tensor, weight: Tensor, bias: Tensor, pad: int) -> Any:
        x, weight, bias = rows_first(info, dims[:3], (x, weight, bias))
        return _Grouped.apply(x, weight, bias, pad, real_counts(x)), (0, 0)  # type: ignore[no-untyped-call]


class _Backward(torch.autograd.Function):
    """The backward pass as a function of its own, so that it too can be vmapped."""

    @staticmethod
    def forward(g: Tensor, x: Tensor, weight: Tensor, which: Tensor, pad: int, inner: bool) -> tuple[Tensor, ...]:
        return tuple(t[0] for t in backward(g[None], x[None], weight[None], which[None], pad, inner))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Nothing is kept: there are no second derivatives."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError("a fused convolution has no second derivative")

    @staticmethod
    def vmap(
        info: Any,
        dims: tuple[int | None, ...],
        g: Tensor,
        x: Tensor,
        weight: Tensor,
        which: Tensor,
        pad: int,
        inner: bool,
    ) -> Any:
        g, x, weight, which = rows_first(info, dims[:4], (g, x, weight, which))
        return backward(g, x, weight, which, pad, inner), (0, 0, 0)
