"""Norms and inner products of long vectors, accumulated in float64, and the clipping rule."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .types import Number


def dot(a: Tensor, b: Tensor) -> Tensor:
    """⟨a, b⟩ along the last dimension, in float64."""
    return (a.double() * b.double()).sum(-1)


def norm(a: Tensor) -> Tensor:
    """‖a‖ along the last dimension, in float64."""
    length: Tensor = torch.linalg.vector_norm(a, dim=-1, dtype=torch.float64)
    return length


def step_along(theta: Tensor, d: Tensor, rate: Number) -> Tensor:
    """theta − rate·d, in one pass over memory."""
    if isinstance(rate, Tensor):
        return torch.addcmul(theta, d, rate, value=-1)
    return torch.sub(theta, d, alpha=rate)


def clip_norm(d: Tensor, limit: Number) -> Tensor:
    """d, shortened to at most `limit`."""
    return d if isinstance(limit, float) and math.isinf(limit) else d * clip_factor(d, limit)


def clip_factor(d: Tensor, limit: Number) -> Tensor:
    """What shortens d to at most `limit`; the 1e-6 is that of torch's own clipping, which the papers' code calls."""
    return (limit / (norm(d) + 1e-6)).clamp(max=1.0).to(d.dtype)
