"""Linear layers, with the ReLU behind them, of many vmapped networks: vmap and autograd would make ten kernels of one.

On CUDA the forward and the backward pass are one kernel each, which leave padding out; elsewhere they are products.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .cuda import available, triton_kernels
from .cuda.rows import contiguous_rows, cublas_precision, real_counts, rows_first

kernels = partial(triton_kernels, "linear")
SAMPLES = 64  # of one program
OUTPUTS = 32
INPUTS = 64
FORWARD = {"tf32": (SAMPLES, 32), "tf32x3": (16, 64)}  # samples and inputs at a time; three products need registers
MAX_WIDTH = 1024  # inputs or outputs; for wider layers cuBLAS computes the gradients faster
MAX_SAMPLES = 2**13  # of all networks; for more, cuBLAS computes the gradients faster
# The same limit for the forward pass; in TF32 cuBLAS is slow unless rows of weights start at multiples of 16 bytes.
MAX_WIDTH_FORWARD = {"tf32": 2048, "tf32x3": MAX_WIDTH}


def is_batched(layer: nn.Module, x: Tensor) -> bool:
    """Is this a linear layer of many vmapped networks?"""
    batched = type(layer) is nn.Linear and x.dim() == 2 and torch._C._functorch.is_batchedtensor(x)
    return batched and layer.bias is not None and not torch.is_autocast_enabled(x.device.type)


def linear(x: Tensor, layer: nn.Module, relu: bool = False) -> Tensor:
    """The layer, and a ReLU if asked for."""
    y: Tensor = _Linear.apply(x, layer.weight, layer.bias, relu)  # type: ignore[no-untyped-call]
    return y


def can_launch(x: Tensor, weight: Tensor, most: int) -> bool:
    """Can the kernels take this, with so many inputs or outputs at most?"""
    return x.is_cuda and x.dtype is torch.float32 and max(weight.shape[1:]) <= most and available()


def forward(x: Tensor, w: Tensor, bias: Tensor, relu: bool, real: Tensor | None) -> Tensor:
    """x [G, B, in], weights [G, out, in], biases [G, out] → [G, B, out]."""
    x, w, bias = x.contiguous(), contiguous_rows(w), contiguous_rows(bias)
    (groups, batch, inner), outer = x.shape, w.shape[1]
    y = x.new_empty((groups, batch, outer))
    exact = cublas_precision()
    samples, depth = FORWARD[exact]
    grid = (-(-batch // samples), -(-outer // OUTPUTS), groups)
    sizes = (batch, w.stride(0), bias.stride(0), inner, outer, samples, OUTPUTS, depth, relu, real is not None, exact)
    kernels().forward[grid](x, w, bias, y, x if real is None else real, *sizes, num_warps=4, num_stages=3)
    return y


def backward(
    g: Tensor, x: Tensor, w: Tensor, y: Tensor, relu: bool, deep: bool, real: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of weights, bias and, if `deep`, of the input."""
    g, x, w = g.contiguous(), x.contiguous(), contiguous_rows(w)
    (groups, batch, inner), outer = x.shape, w.shape[1]
    dw, db = x.new_empty((groups, outer, inner)), x.new_empty((groups, outer))
    dx = torch.empty_like(x) if deep else x
    samples, outputs = SAMPLES // 2 if batch <= SAMPLES else SAMPLES, OUTPUTS // 2 if outer <= OUTPUTS // 2 else OUTPUTS
    across, down = -(-inner // INPUTS), -(-outer // outputs)
    grid = (across, down + (-(-batch // samples) if deep else 0), groups)
    sizes = (
        batch,
        w.stride(0),
        inner,
        outer,
        down,
        samples,
        outputs,
        INPUTS,
        relu,
        real is not None,
        cublas_precision(),
    )
    kernels().backward[grid](g, x, w, y, dw, db, dx, x if real is None else real, *sizes, num_warps=4, num_stages=2)
    return dw, db, dx


class _Linears(torch.autograd.Function):
    """Many networks at once."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, relu: bool, real: Tensor | None) -> Tensor:
        if can_launch(x, weight, MAX_WIDTH_FORWARD[cublas_precision()]):
            return forward(x, weight, bias, relu, real)
        y = torch.baddbmm(bias[..., None, :], x, weight.mT)
        return y.relu_() if relu else y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, _, ctx.relu, *rest = inputs
        ctx.save_for_backward(x, weight, output, *rest)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (g,), (x, weight, y, *rest), deep = grads, ctx.saved_tensors, ctx.needs_input_grad[0]
        nothing = (None,) * (1 + len(rest))
        # without `rest` it is one of those that are vmapped
        if rest and can_launch(x, weight, MAX_WIDTH) and x.shape[0] * x.shape[1] <= MAX_SAMPLES:
            dw, db, dx = backward(g, x, weight, y, ctx.relu, deep, rest[0])
            return dx if deep else None, dw, db, *nothing
        g = torch.ops.aten.threshold_backward(g, y, 0) if ctx.relu else g
        return g @ weight if deep else None, g.mT @ x, g.sum(-2), *nothing


class _Linear(_Linears):
    """One network's, or that of one of those that are vmapped."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, relu: bool) -> Tensor:  # type: ignore[override]
        y = torch.addmm(bias, x, weight.mT)
        return y.relu() if relu else y

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], x: Tensor, weight: Tensor, bias: Tensor, relu: bool) -> Any:
        x, weight, bias = rows_first(info, dims[:3], (x, weight, bias))
        return _Linears.apply(x, weight, bias, relu, real_counts(x)), 0  # type: ignore[no-untyped-call]
