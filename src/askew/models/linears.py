"""Linear layers, with the ReLU behind them, of many networks at once: vmap and autograd would make ten short kernels of one.

On CUDA forward and backward pass are one kernel each, which take padding for what it is; elsewhere they are products.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from .fused import available, dense, real_of, rows_first

SAMPLES = 64  # of one program
OUTPUTS = 32
INPUTS = 64
FORWARD = {
    "tf32": (SAMPLES, 32),
    "tf32x3": (16, 64),
}  # samples, and inputs at a time; three products of 64 samples fill the registers
MOST = 1024  # inputs or outputs: above, cuBLAS is better,
FEW = 2**13  # as it is for the gradients of more samples


def many(layer: nn.Module, x: Tensor) -> bool:
    """Are these the linear layers of many networks?"""
    batched = type(layer) is nn.Linear and x.dim() == 2 and torch._C._functorch.is_batchedtensor(x)
    return batched and layer.bias is not None and not torch.is_autocast_enabled(x.device.type)


def linear(x: Tensor, layer: nn.Module, relu: bool = False) -> Tensor:
    """The layer, and a ReLU if asked for."""
    y: Tensor = _Linear.apply(x, layer.weight, layer.bias, relu)  # type: ignore[no-untyped-call]
    return y


def fits(x: Tensor, weight: Tensor) -> bool:
    """Is this what the kernels do?"""
    return x.is_cuda and x.dtype is torch.float32 and max(weight.shape[1:]) <= MOST and available()


def precision() -> str:
    """As of all products: TF32 where that is allowed, else three of them, which is as good as float32."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "tf32x3"


def forward(x: Tensor, w: Tensor, bias: Tensor, relu: bool, real: Tensor | None) -> Tensor:
    """x [G, B, in], weights [G, out, in], biases [G, out] → [G, B, out]."""
    x, w, bias = x.contiguous(), dense(w), dense(bias)
    (groups, batch, inner), outer = x.shape, w.shape[1]
    y = x.new_empty((groups, batch, outer))
    exact = precision()
    samples, depth = FORWARD[exact]
    grid = (-(-batch // samples), -(-outer // OUTPUTS), groups)
    sizes = (batch, w.stride(0), bias.stride(0), inner, outer, samples, OUTPUTS, depth, relu, real is not None, exact)
    _kernels().forward[grid](x, w, bias, y, x if real is None else real, *sizes, num_warps=4, num_stages=3)
    return y


def backward(
    g: Tensor, x: Tensor, w: Tensor, y: Tensor, relu: bool, deep: bool, real: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of weights, bias and, if `deep`, of the input."""
    g, x, w = g.contiguous(), x.contiguous(), dense(w)
    (groups, batch, inner), outer = x.shape, w.shape[1]
    dw, db = x.new_empty((groups, outer, inner)), x.new_empty((groups, outer))
    dx = torch.empty_like(x) if deep else x
    samples, outputs = SAMPLES // 2 if batch <= SAMPLES else SAMPLES, OUTPUTS // 2 if outer <= OUTPUTS // 2 else OUTPUTS
    across, down = -(-inner // INPUTS), -(-outer // outputs)
    grid = (across, down + (-(-batch // samples) if deep else 0), groups)
    sizes = (batch, w.stride(0), inner, outer, down, samples, outputs, INPUTS, relu, real is not None, precision())
    _kernels().backward[grid](g, x, w, y, dw, db, dx, x if real is None else real, *sizes, num_warps=4, num_stages=2)
    return dw, db, dx


class _Linears(torch.autograd.Function):
    """Many networks at once."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, relu: bool, real: Tensor | None) -> Tensor:
        if fits(x, weight):
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
        if (
            rest and fits(x, weight) and x.shape[0] * x.shape[1] <= FEW
        ):  # without `rest` it is one of those that are vmapped
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
        return _Linears.apply(x, weight, bias, relu, real_of(x)), 0  # type: ignore[no-untyped-call]


@cache
def _kernels() -> Any:
    """The kernels, compiled at first use."""
    import triton
    import triton.language as tl

    loose = triton.jit(do_not_specialize=["batch", "apart", "bias_apart"])

    @loose
    def forward(x, w, bias, y, real, batch, apart, bias_apart, inner: tl.constexpr, outer: tl.constexpr,
                SAMPLES: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
                RELU: tl.constexpr, COUNTED: tl.constexpr, exact: tl.constexpr):  # fmt: skip
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
        tl.store(
            y + sample[:, None] * outer + out[None, :], acc, mask=(sample < batch)[:, None] & (out < outer)[None, :]
        )

    @loose
    def backward(g, x, w, y, dw, db, dx, real, batch, apart, inner: tl.constexpr, outer: tl.constexpr, down: tl.constexpr,
                 SAMPLES: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
                 RELU: tl.constexpr, COUNTED: tl.constexpr, exact: tl.constexpr):  # fmt: skip
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
            tl.store(
                dx + sample[:, None] * inner + k[None, :], back, mask=(sample < batch)[:, None] & (k < inner)[None, :]
            )

    return SimpleNamespace(forward=forward, backward=backward)
