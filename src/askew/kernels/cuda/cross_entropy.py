"""The mean cross-entropy of a batch, or of many vmapped ones, and its gradient in one kernel, for CUDA.

Torch takes some twenty short kernels for it under vmap, and a small network's step has few others.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import available, triton_kernels
from .rows import rows_first

kernels = partial(triton_kernels, "cross_entropy")
ROWS = 32  # samples at a time
MAX_CLASSES = 1024


def can_run(output: Tensor, y: Tensor) -> bool:
    """Can the kernel take this?"""
    whole = output.dtype is torch.float32 and output.dim() == 2 and y.dtype is torch.long
    return output.is_cuda and whole and output.shape[1] <= MAX_CLASSES and available()


def cross_entropy(output: Tensor, y: Tensor, weight: Tensor | None) -> Tensor:
    """The mean over the samples, by their weights if there are any."""
    weight = output.new_empty(0) if weight is None else weight
    loss: Tensor = _CrossEntropy.apply(output, y, weight)[0]  # type: ignore[no-untyped-call]
    return loss


def losses_and_gradients(output: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Losses [G] and their gradients [G, B, K] of G batches; weights [G, B], or [G, 0] for none."""
    output, y, weight = output.contiguous(), y.contiguous(), weight.contiguous()
    groups, batch, classes = output.shape
    loss, slope = output.new_empty(groups), torch.empty_like(output)
    wide = max(2, 1 << (classes - 1).bit_length())
    rows = max(1, ROWS * 32 // max(32, wide))
    sizes = (batch, classes, bool(weight.numel()), rows, wide)
    kernels().entropy[(groups,)](output, y, weight, loss, slope, *sizes, num_warps=4)
    return loss, slope


class _ManyBatches(torch.autograd.Function):
    """Many batches at once."""

    @staticmethod
    def forward(output: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return losses_and_gradients(output, y, weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)  # no zeros for what has no gradient
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.saved_tensors[0] * grads[0][..., None, None], None, None


class _CrossEntropy(_ManyBatches):
    """One batch, or one of those that are vmapped."""

    @staticmethod
    def forward(output: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        loss, slope = losses_and_gradients(output[None], y[None], weight[None])
        return loss[0], slope[0]

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], *given: Tensor) -> Any:
        return _ManyBatches.apply(*rows_first(info, dims, given)), (0, 0)  # type: ignore[no-untyped-call]
