"""How much an answer counts that was computed from an older model."""

from __future__ import annotations

from torch import Tensor


def polynomial(staleness: Tensor, exponent: float) -> Tensor:
    """(1 + τ)^−a, for a staleness τ in server steps."""
    return (1 + staleness) ** -exponent


def hinge(staleness: Tensor, slope: float, free: float) -> Tensor:
    """1 up to a staleness of b, and 1 / (a (τ − b) + 1) beyond it."""
    return 1 / (slope * (staleness - free).clamp(min=0) + 1)
