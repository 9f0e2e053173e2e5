"""ε of Gaussian noise at a given δ: exact for rounds whose participants are known, and for secret Poisson sampling by
the package dp-accounting.
"""

from __future__ import annotations

import math
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

PACKAGE = "dp_accounting"
HOW_TO_INSTALL = "for ε with secret sampling, which is lower, run pip install 'askew[privacy]'"
# The step of privacy losses is this share of their standard deviation in one round, within these bounds. Then ε is
# too high by less than a hundredth, if it is not tiny, and never too low.
LEAST_STEP, LARGEST_STEP, STEP_SHARE = 5e-5, 1e-2, 0.1
BISECTIONS = 60  # after them the last bits are found


def epsilon(noise: float, rounds: int, delta: float, rate: float = 1.0, replaced: bool = False) -> float:
    """ε at δ of a client in so many rounds, for noise of this many times the longest update; ∞ without noise.

    `rate` is the chance at which a client is drawn, in secret and independently of all others, for each of the rounds;
    1: it is known to take part. `replaced`: neighbours differ in what one client sends, and not in whether it does.
    Without dp-accounting the rate is taken as 1, which is never too low.
    """
    if not rounds:
        return 0.0
    if not noise:
        return math.inf
    if rate < 1 and can_amplify():
        return sampled_epsilon(noise, rounds, delta, rate, replaced)
    return gaussian_epsilon(math.sqrt(rounds) * (2 if replaced else 1) / noise, delta)


def can_amplify() -> bool:
    """Is dp-accounting installed?"""
    return find_spec(PACKAGE) is not None


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The smallest ε at δ of Gaussian noise whose standard deviation is 1/μ of the sensitivity.

    Φ is the standard normal distribution; Balle, Wang, ICML 2018, arXiv 1805.06530, Theorem 8:

        δ(ε) = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ)

    T rounds of noise z are one round of noise z / √T: sums of Gaussians are Gaussian.
    """
    from scipy.special import log_ndtr  # a dependency of askew; engines load without it

    def excess(eps: float) -> float:
        below, above = log_ndtr(mu / 2 - eps / mu), eps + log_ndtr(-mu / 2 - eps / mu)
        return float(math.exp(below) * -math.expm1(above - below)) - delta

    low, high = 0.0, mu * mu / 2 + mu * math.sqrt(2 * math.log(1 / delta))  # concentrated privacy: never too low
    if excess(0.0) <= 0:
        return 0.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return high


def sampled_epsilon(noise: float, rounds: int, delta: float, rate: float, replaced: bool) -> float:
    """ε at δ of Poisson-sampled Gaussian noise, by the distribution of privacy losses; never too low.

    Koskela, Jälkö, Honkela, AISTATS 2020; Doroshenko et al., PoPETs 2022, arXiv 2207.04380.
    """
    return float(one_round_loss(noise, rate, replaced).self_compose(rounds).get_epsilon_for_delta(delta))


@lru_cache(maxsize=4)
def one_round_loss(noise: float, rate: float, replaced: bool) -> Any:
    """The distribution of privacy losses of one round."""
    from dp_accounting import NeighboringRelation  # the extra privacy
    from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism

    spread = rate * math.sqrt(math.expm1(min(1 / noise**2, 50.0)))  # nearly its standard deviation
    relation = NeighboringRelation.REPLACE_ONE if replaced else NeighboringRelation.ADD_OR_REMOVE_ONE
    return from_gaussian_mechanism(
        noise,
        sampling_prob=rate,
        value_discretization_interval=max(LEAST_STEP, min(LARGEST_STEP, STEP_SHARE * spread)),
        neighboring_relation=relation,
    )
