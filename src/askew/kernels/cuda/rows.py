"""Rows: many networks' tensors side by side, and how many samples of each batch are real."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class _RealSamples:
    """How many samples are real in each network's batch, where an engine gives it."""

    counts: Tensor | None = None  # [G] int32
    batch = 0  # samples of a batch, padding included


@contextmanager
def real_samples(counts: Tensor | None, batch: int) -> Iterator[None]:
    """Inside, vmapped networks have batches of `batch` samples, of which only the first `counts` [G] (int32) are real.

    Kernels may leave padding out: its outputs are finite, and of no other account.
    """
    before = _RealSamples.counts, _RealSamples.batch
    _RealSamples.counts, _RealSamples.batch = counts, batch
    try:
        yield
    finally:
        _RealSamples.counts, _RealSamples.batch = before


def real_counts(x: Tensor) -> Tensor | None:
    """The number of real samples in each batch of x [G, B, …]; None: all."""
    counts = _RealSamples.counts
    return counts if counts is not None and x.shape[:2] == (len(counts), _RealSamples.batch) else None


def rows_first(info: Any, dims: tuple[int | None, ...], tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """Each tensor with its vmapped dimension first."""
    pairs = zip(tensors, dims, strict=True)
    return [t.expand(info.batch_size, *t.shape) if d is None else t.movedim(d, 0) for t, d in pairs]


def contiguous_rows(t: Tensor) -> Tensor:
    """Rows that are contiguous, each in itself: rows of a matrix may be apart."""
    return t if t[0].is_contiguous() else t.contiguous()


def precision(allow_tf32: bool) -> str:
    """Of a kernel's products: TF32 where that is allowed, else three of them, which is as good as float32."""
    return "tf32" if allow_tf32 else "tf32x3"


def cudnn_precision() -> str:
    return precision(torch.backends.cudnn.allow_tf32)


def cublas_precision() -> str:
    return precision(torch.backends.cuda.matmul.allow_tf32)
