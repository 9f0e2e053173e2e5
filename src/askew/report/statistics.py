"""Small-sample tests on differences within seeds; a sample without variance is decided by its sign."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

SIGNIFICANCE = 0.05  # level of every test
MIN_SEEDS = 3  # fewer decide nothing
MAX_SEEDS = 20  # more are not planned
# Numbers of seeds at which all flips of signs are counted: fewer cannot reach 5%, more are a million flips and add
# nothing.
EXACT_SEEDS = range(5, 21)


class MeanTest(NamedTuple):
    """One-sided tests of a mean: is it above 0, and is it below 0?

    The p-values are Student's; the exact ones, of all flips of signs, are there where there are enough seeds.
    """

    n: int  # seeds
    mean: float
    std: float
    p_above: float
    p_below: float
    exact_above: float | None = None
    exact_below: float | None = None

    @property
    def is_above(self) -> bool:
        """Above 0 at 5%; where both p-values are there, the exact one decides."""
        return self.n >= MIN_SEEDS and (self.p_above if self.exact_above is None else self.exact_above) < SIGNIFICANCE

    @property
    def is_below(self) -> bool:
        """Below 0 at 5%, decided in the same way."""
        return self.n >= MIN_SEEDS and (self.p_below if self.exact_below is None else self.exact_below) < SIGNIFICANCE

    @property
    def is_zero(self) -> bool:
        """Every difference is 0."""
        return self.n >= MIN_SEEDS and self.mean == 0 and self.std == 0


def t_cdf(t: float, freedom: float) -> float:
    """The distribution function of Student's t."""
    from scipy.special import stdtr

    return float(stdtr(freedom, t))


def t_quantile(p: float, freedom: float) -> float:
    """The quantile of Student's t."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, p))


def without_rounding(d: np.ndarray) -> np.ndarray:
    """The same values; made equal if they differ by rounding alone, and 0 if they are rounding alone."""
    size = float(np.abs(d).max(initial=0))
    return np.full_like(d, d.mean() if size > 1e-12 else 0.0) if len(d) and np.ptp(d) <= 1e-9 * size + 1e-12 else d


def p_above_zero(mean: float, error: float, freedom: float) -> float:
    """The p-value of "the mean is above 0"; without variance 0 or 1 by the sign, and 1 at 0."""
    return 1 - t_cdf(mean / error, freedom) if error > 0 else 0.0 if mean > 0 else 1.0


def paired_test(differences: Sequence[float]) -> MeanTest:
    """Test the mean of differences, one for each seed: Student's t, and from five seeds on all flips of their signs."""
    d = without_rounding(np.asarray(differences, dtype=np.float64))
    n = len(d)
    if n < 2:
        return MeanTest(n, float(d.mean()) if n else 0.0, 0.0, 1.0, 1.0)
    mean, std = float(d.mean()), float(d.std(ddof=1)) if np.ptp(d) else 0.0
    error = std / n**0.5
    exact = (sign_flip_p(d), sign_flip_p(-d)) if n in EXACT_SEEDS and std else (None, None)
    return MeanTest(n, mean, std, p_above_zero(mean, error, n - 1), p_above_zero(-mean, error, n - 1), *exact)


def sign_flip_p(d: np.ndarray) -> float:
    """The share of sign assignments whose sum is at least that of `d`: an exact p-value if signs are symmetric."""
    sums = np.zeros(1)
    for value in np.abs(d):
        sums = np.concatenate([sums + value, sums - value])
    return float(np.mean(sums >= d.sum() - 1e-9 * np.abs(d).sum()))


def t_interval(values: Sequence[float], level: float = 0.9) -> tuple[float, float]:
    """The two-sided t-interval of the mean; its ends are one-sided bounds at (1 + level) / 2."""
    v = without_rounding(np.asarray(values, dtype=np.float64))
    half = 0.0
    if len(v) > 1 and np.ptp(v):
        half = t_quantile((1 + level) / 2, len(v) - 1) * float(v.std(ddof=1)) / len(v) ** 0.5
    return float(v.mean()) - half, float(v.mean()) + half


def is_within(differences: Sequence[float], low: float, high: float, level: float = 0.9) -> bool | None:
    """Is the interval inside the range (True), wholly outside (False) or neither? At 90%: two one-sided tests at 5%."""
    if len(differences) < MIN_SEEDS:
        return None
    left, right = t_interval(differences, level)
    return True if low <= left and right <= high else False if right < low or left > high else None


def holm_adjust(ps: Sequence[float]) -> list[float]:
    """P-values after Holm's step-down adjustment, in the given order."""
    order, adjusted, worst = np.argsort(ps, kind="stable"), [0.0] * len(ps), 0.0
    for rank, n in enumerate(order):
        worst = max(worst, min(1.0, (len(ps) - rank) * ps[n]))
        adjusted[n] = worst
    return adjusted


def welch_test(a: Sequence[float], b: Sequence[float]) -> MeanTest:
    """Test the mean of `a` less that of `b`, where `b` comes from other runs and may have another variance."""
    x, y = (without_rounding(np.asarray(v, dtype=np.float64)) for v in (a, b))
    n, mean = min(len(x), len(y)), float(x.mean() - y.mean()) if len(x) and len(y) else 0.0
    if n < 2:
        return MeanTest(n, mean, 0.0, 1.0, 1.0)
    parts = [float(v.var(ddof=1)) / len(v) if np.ptp(v) else 0.0 for v in (x, y)]
    error = sum(parts) ** 0.5
    freedom = error**4 / sum(p**2 / (len(v) - 1) for p, v in zip(parts, (x, y), strict=True)) if error else 1.0
    return MeanTest(n, mean, error * n**0.5, p_above_zero(mean, error, freedom), p_above_zero(-mean, error, freedom))


def find_power(effect: float, seeds: int, level: float) -> float:
    """The chance that a one-sided t-test at this level finds an effect, given in standard deviations."""
    from scipy.special import nctdtr

    limit = t_quantile(1 - level, seeds - 1)
    power = 1 - float(nctdtr(seeds - 1, effect * seeds**0.5, limit))
    return power if 0 <= power <= 1 else float(effect * seeds**0.5 > limit)  # out of the function's range


def seeds_needed(
    effect: float, level: float, least: int = MIN_SEEDS, power: float = 0.8, most: int = MAX_SEEDS
) -> int | None:
    """The fewest seeds at which a test finds an effect with this chance; None if `most` would not do."""

    def enough(n: int) -> bool:
        return find_power(effect, n, level) >= power

    few = next((n for n in range(least, min(most, MAX_SEEDS) + 1) if enough(n)), None)
    many = range(max(least, MAX_SEEDS + 1), most + 1)
    if few or not many or not enough(most):
        return few
    return many[bisect_left(many, True, key=enough)]


def bootstrap_interval(values: Sequence[float], level: float = 0.95, draws: int = 10_000) -> tuple[float, float]:
    """The percentile interval of the mean over resamples of the values; the same values give the same interval."""
    v = np.asarray(values, dtype=np.float64)
    means = v[np.random.default_rng(0).integers(len(v), size=(draws, len(v)))].mean(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def two_sided_p(differences: Sequence[float]) -> float:
    """The p-value of "the mean is 0" by Student's paired t.

    Equal differences have no spread to judge them by; their p-value is that of all flips of signs, 2 of 2ⁿ.
    """
    test = paired_test(differences)
    if test.std == 0:
        return 1.0 if test.mean == 0 else min(1.0, 2.0 ** (1 - test.n))
    return min(1.0, 2 * min(test.p_above, test.p_below))
