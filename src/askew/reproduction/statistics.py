"""Small-sample tests on differences within seeds; a sample without variance is decided by its sign."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

LEVEL = 0.05
FEWEST = 3  # seeds that a test needs
EXACT = range(
    5, 21
)  # seeds with which signs are flipped: fewer cannot reach 5%, more are a million flips and add nothing


class Outcome(NamedTuple):
    """One-sided tests that the mean is above 0 (`p`) and below it (`reverse`); the permutation's where there are seeds enough."""

    n: int
    mean: float
    std: float
    p: float
    reverse: float
    exact: float | None = None
    exact_reverse: float | None = None

    @property
    def passes(self) -> bool:
        """Above 0 at 5%; where both tests are there, the exact one decides."""
        return self.n >= FEWEST and (self.p if self.exact is None else self.exact) < LEVEL

    @property
    def reversed(self) -> bool:
        return self.n >= FEWEST and (self.reverse if self.exact_reverse is None else self.exact_reverse) < LEVEL

    @property
    def zero(self) -> bool:
        """Every difference is 0."""
        return self.n >= FEWEST and self.mean == 0 and self.std == 0


def t_cdf(t: float, freedom: float) -> float:
    from scipy.special import stdtr

    return float(stdtr(freedom, t))


def t_quantile(p: float, freedom: float) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(freedom, p))


def steady(d: np.ndarray) -> np.ndarray:
    """Differences whose spread is rounding alone become equal, and those that are rounding alone become 0."""
    size = float(np.abs(d).max(initial=0))
    return np.full_like(d, d.mean() if size > 1e-12 else 0.0) if len(d) and np.ptp(d) <= 1e-9 * size + 1e-12 else d


def one_sided(mean: float, error: float, freedom: float) -> float:
    """The p-value of "the mean is above 0"; without variance 0 or 1 by the sign, and 1 at 0."""
    return 1 - t_cdf(mean / error, freedom) if error > 0 else 0.0 if mean > 0 else 1.0


def paired(differences: Sequence[float]) -> Outcome:
    """Is the mean of these differences, one a seed, above 0? Student's t, and from five seeds on all flips of their signs."""
    d = steady(np.asarray(differences, dtype=np.float64))
    n = len(d)
    if n < 2:
        return Outcome(n, float(d.mean()) if n else 0.0, 0.0, 1.0, 1.0)
    mean, std = float(d.mean()), float(d.std(ddof=1)) if np.ptp(d) else 0.0
    error = std / n**0.5
    exact = (flips(d), flips(-d)) if n in EXACT and std else (None, None)
    return Outcome(n, mean, std, one_sided(mean, error, n - 1), one_sided(-mean, error, n - 1), *exact)


def flips(d: np.ndarray) -> float:
    """The share of sign assignments whose sum is at least the one seen: exact if signs are symmetric."""
    sums = np.zeros(1)
    for value in np.abs(d):
        sums = np.concatenate([sums + value, sums - value])
    return float(np.mean(sums >= d.sum() - 1e-9 * np.abs(d).sum()))


def interval(values: Sequence[float], level: float = 0.9) -> tuple[float, float]:
    """The two-sided t-interval of the mean; its ends are one-sided bounds at (1 + level) / 2."""
    v = steady(np.asarray(values, dtype=np.float64))
    half = (
        t_quantile((1 + level) / 2, len(v) - 1) * float(v.std(ddof=1)) / len(v) ** 0.5
        if len(v) > 1 and np.ptp(v)
        else 0.0
    )
    return float(v.mean()) - half, float(v.mean()) + half


def equivalent(differences: Sequence[float], low: float, high: float) -> bool | None:
    """Two one-sided tests at 5%: is the 90% interval inside (True), wholly outside (False) or neither (None)?"""
    if len(differences) < FEWEST:
        return None
    left, right = interval(differences)
    return True if low <= left and right <= high else False if right < low or left > high else None


def holm(ps: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment."""
    order, adjusted, worst = np.argsort(ps, kind="stable"), [0.0] * len(ps), 0.0
    for rank, n in enumerate(order):
        worst = max(worst, min(1.0, (len(ps) - rank) * ps[n]))
        adjusted[n] = worst
    return adjusted


def welch(a: Sequence[float], b: Sequence[float]) -> Outcome:
    """Is the mean of `a` above that of `b`, which comes from other runs and may vary otherwise?"""
    x, y = (steady(np.asarray(v, dtype=np.float64)) for v in (a, b))
    n, mean = min(len(x), len(y)), float(x.mean() - y.mean()) if len(x) and len(y) else 0.0
    if n < 2:
        return Outcome(n, mean, 0.0, 1.0, 1.0)
    parts = [float(v.var(ddof=1)) / len(v) if np.ptp(v) else 0.0 for v in (x, y)]
    error = sum(parts) ** 0.5
    freedom = error**4 / sum(p**2 / (len(v) - 1) for p, v in zip(parts, (x, y), strict=True)) if error else 1.0
    return Outcome(n, mean, error * n**0.5, one_sided(mean, error, freedom), one_sided(-mean, error, freedom))
