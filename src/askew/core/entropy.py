"""The mean cross-entropy of a batch, or of many vmapped ones, and its gradient in one kernel, for CUDA.

Torch takes some twenty short kernels for it under vmap, and a small network's step has few others.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

ROWS = 32  # samples at a time
MOST = 1024  # classes


@cache
def available() -> bool:
    """Can kernels be compiled here, for a device on which they were tried or one like it?"""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return torch.cuda.is_available() and torch.version.cuda is not None and torch.cuda.get_device_capability() >= (8, 0)


def fits(output: Tensor, y: Tensor) -> bool:
    """Is this what the kernel does?"""
    whole = output.dtype is torch.float32 and output.dim() == 2 and output.shape[1] <= MOST and y.dtype is torch.long
    return output.is_cuda and whole and available()


def cross_entropy(output: Tensor, y: Tensor, weight: Tensor | None) -> Tensor:
    """The mean over the samples, by their weights if there are any."""
    weight = output.new_empty(0) if weight is None else weight
    loss: Tensor = _Entropy.apply(output, y, weight)[0]  # type: ignore[no-untyped-call]
    return loss


def many(output: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Losses [G] and their gradients [G, B, K] of G batches; weights [G, B], or [G, 0] for none."""
    output, y, weight = output.contiguous(), y.contiguous(), weight.contiguous()
    groups, batch, classes = output.shape
    loss, slope = output.new_empty(groups), torch.empty_like(output)
    wide = max(2, 1 << (classes - 1).bit_length())
    rows = max(1, ROWS * 32 // max(32, wide))
    _kernel()[(groups,)](output, y, weight, loss, slope, batch, classes, bool(weight.numel()), rows, wide, num_warps=4)
    return loss, slope


class _Many(torch.autograd.Function):
    @staticmethod
    def forward(output: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return many(output, y, weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)  # no zeros for what has no gradient
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.saved_tensors[0] * grads[0][..., None, None], None, None


class _Entropy(_Many):
    """One batch, or one of those that are vmapped."""

    @staticmethod
    def forward(output: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        loss, slope = many(output[None], y[None], weight[None])
        return loss[0], slope[0]

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], *given: Tensor) -> Any:
        first = [
            t.expand(info.batch_size, *t.shape) if d is None else t.movedim(d, 0)
            for t, d in zip(given, dims, strict=True)
        ]
        return _Many.apply(*first), (0, 0)  # type: ignore[no-untyped-call]


@cache
def _kernel() -> Any:
    """The kernel, compiled at first use."""
    import triton
    import triton.language as tl

    @triton.jit(do_not_specialize=["batch"])
    def entropy(x, y, weight, loss, slope, batch,
                classes: tl.constexpr, WEIGHTED: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
        """A program has one batch."""
        group, k = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE)
        x += group * batch * classes
        slope += group * batch * classes
        y += group * batch
        weight += group * batch
        count = batch * 1.0
        if WEIGHTED:
            count = 0.0
            for start in range(0, batch, ROWS):
                row = start + tl.arange(0, ROWS)
                count += tl.sum(tl.load(weight + row, mask=row < batch, other=0.0))
        total = 0.0
        for start in range(0, batch, ROWS):
            row = start + tl.arange(0, ROWS)
            spot, keep = row[:, None] * classes + k[None, :], (row[:, None] < batch) & (k[None, :] < classes)
            v = tl.where(k[None, :] < classes, tl.load(x + spot, mask=keep, other=0.0), float("-inf"))
            top = tl.max(v, 1)
            e = tl.exp(v - top[:, None])
            whole = tl.sum(e, 1)
            hit = k[None, :] == tl.load(y + row, mask=row < batch, other=0)[:, None]
            part = tl.where(row < batch, 1.0, 0.0)
            if WEIGHTED:
                part = tl.load(weight + row, mask=row < batch, other=0.0)
            total += tl.sum(part * (tl.log(whole) + top - tl.sum(tl.where(hit, v, 0.0), 1)))
            tl.store(slope + spot, (e / whole[:, None] - tl.where(hit, 1.0, 0.0)) * (part / count)[:, None], mask=keep)
        tl.store(loss + group, total / count)

    return entropy
