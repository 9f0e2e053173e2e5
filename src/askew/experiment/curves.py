"""Functions of recorded curves: rounds in ascending order and one value for each of them."""

from __future__ import annotations

from collections.abc import Iterable


def rounds_to(rounds: Iterable[int], values: Iterable[float], target: float) -> int | None:
    """The first of these rounds whose value is at least the target; None if no value reaches it."""
    return next((r for r, v in zip(rounds, values, strict=True) if v >= target), None)
