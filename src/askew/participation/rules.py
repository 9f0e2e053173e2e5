"""The rules that draw the clients of a round.

What they draw is a function of the seed and the round alone; one rule also asks for the clients' labels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from typing import ClassVar, Self

import numpy as np

from ..core.rng import generator
from ..core.settings import setting
from ..errors import ConfigError
from .base import MANY, CohortParticipation, Participation, keep

LEAST_CHANCE = 1e-12  # probability; a client whose part in a skewed draw underflowed still comes when no other is left
MAX_CONCENTRATION = 1e12  # of a Dirichlet: clients' chances differ by a millionth, and nothing overflows


class Uniform(CohortParticipation):
    """m clients at random without replacement: m = max(1, round(fraction·N)), or `cohort`.

    If fewer clients are eligible, all of them take part.
    """

    idea: ClassVar[str] = "a fixed number of clients, all equally likely, without replacement"


class FullParticipation(Participation):
    """Everybody, every round."""

    title: ClassVar[str] = "Full"
    idea: ClassVar[str] = "all clients, every round"

    def sample(self, seed: int, round: int, eligible: np.ndarray, clients: int) -> np.ndarray:
        return np.sort(eligible).astype(np.int64, copy=False)


class Bernoulli(Participation):
    """Each client takes part with a given chance, independently; drawn again while nobody does (as in FedDC's code)."""

    idea: ClassVar[str] = "every client comes with the same chance, independently: the number varies, at least one"
    fraction: float = setting("chance that a client takes part in a round", default=0.2, above=0, most=1)

    def sample(self, seed: int, round: int, eligible: np.ndarray, clients: int) -> np.ndarray:
        rng, n = generator(seed, "participation", round), len(eligible)
        came = rng.random(clients)[eligible] < self.fraction
        if n and not came.any():
            # What drawing again and again ends with, in one draw, however small the chance is.
            first = self.first_to_come(rng, n)
            came = rng.random(n) < self.fraction
            came[:first], came[first] = False, True
        return np.sort(eligible[came]).astype(np.int64, copy=False)

    def first_to_come(self, rng: np.random.Generator, n: int) -> int:
        """Which of n clients is the first that comes, given that one does: a geometric draw cut off at n."""
        if self.fraction == 1:
            return 0
        log_absent = math.log1p(-self.fraction)
        return min(int(math.log1p(rng.random() * math.expm1(n * log_absent)) / log_absent), n - 1)

    def sample_there(
        self, seed: int, round: int, eligible: np.ndarray, clients: int, is_there: Callable[[int], bool]
    ) -> np.ndarray:
        came = keep(self.sample(seed, round, eligible, clients), is_there)
        looked, n, rng = 0, len(eligible), generator(seed, "time others", round)
        while not len(came) and n > MANY and looked < n:  # draw again, how many come and then who, until somebody does
            count = 1 + int(rng.binomial(n - 1 - self.first_to_come(rng, n), self.fraction))
            came, looked = keep(eligible[rng.choice(n, count, replace=False)], is_there), looked + count
        if not len(came):
            return super().sample_there(seed, round, eligible, clients, is_there)
        return np.sort(came).astype(np.int64, copy=False)


class Poisson(Participation):
    """Each client takes part with a given chance, independently; there may be none. Differential privacy counts on
    this rule where participants are secret.
    """

    idea: ClassVar[str] = "every client comes with the same chance, independently: the number varies, perhaps none"
    fraction: float = setting("chance that a client takes part in a round", default=0.2, above=0, most=1)

    def sample(self, seed: int, round: int, eligible: np.ndarray, clients: int) -> np.ndarray:
        came = generator(seed, "participation", round).random(clients)[eligible] < self.fraction
        return np.sort(eligible[came]).astype(np.int64, copy=False)

    def sample_there(
        self, seed: int, round: int, eligible: np.ndarray, clients: int, is_there: Callable[[int], bool]
    ) -> np.ndarray:
        return keep(self.sample(seed, round, eligible, clients), is_there)


class Uneven(Participation):
    """Each client takes part with a chance of its own, independently; there may be none.

    The chances p_i ~ Beta(fraction/γ, (1 − fraction)/γ) are drawn once a run, multiplied so that their mean is
    `fraction`, and cut off at 1. γ = 0 is `poisson`, draw for draw.
    """

    idea: ClassVar[str] = "every client comes with a chance of its own, independently: some often, some hardly ever"
    fraction: float = setting("mean chance that a client takes part in a round", default=0.2, above=0, below=1)
    gamma: float = setting(
        "how uneven the chances are, 1 / the concentration of their Beta distribution; 0: all are the same",
        default=0.2,
        least=0,
        most=1000,
    )

    def sample(self, seed: int, round: int, eligible: np.ndarray, clients: int) -> np.ndarray:
        own = own_chances(seed, clients, self.fraction, self.gamma) if self.gamma else np.full(clients, self.fraction)
        came = (generator(seed, "participation", round).random(clients) < own)[eligible]
        return np.sort(eligible[came]).astype(np.int64, copy=False)

    def sample_there(
        self, seed: int, round: int, eligible: np.ndarray, clients: int, is_there: Callable[[int], bool]
    ) -> np.ndarray:
        return keep(self.sample(seed, round, eligible, clients), is_there)


@lru_cache(maxsize=8)
def own_chances(seed: int, clients: int, fraction: float, gamma: float) -> np.ndarray:
    """The chance of every client in one run, p_i ~ Beta(fraction/γ, (1 − fraction)/γ) with the mean `fraction` [N]."""
    drawn = np.maximum(generator(seed, "chances").beta(fraction / gamma, (1 - fraction) / gamma, clients), LEAST_CHANCE)
    p: np.ndarray = np.minimum(drawn * (fraction / drawn.mean()), 1.0)
    p.flags.writeable = False
    return p


class Skewed(CohortParticipation):
    """m clients, one after the other without replacement, with chances p ~ Dir_N(1/γ) drawn once a run (MLDL24).

    p is cut off below at 1e-12; among the eligible it is renormalised. γ = 0 is `uniform`, draw for draw.
    """

    idea: ClassVar[str] = "chances of taking part drawn once from a Dirichlet; large gamma: always the same few"
    gamma: float = setting(
        "skew, 1 / the Dirichlet's concentration; 0: all clients equally likely", default=1.0, least=0
    )

    def sample(self, seed: int, round: int, eligible: np.ndarray, clients: int) -> np.ndarray:
        if self.gamma == 0:
            return super().sample(seed, round, eligible, clients)
        m = min(self.size(clients), len(eligible))
        times = self.times(seed, round, clients)[eligible]
        earliest = eligible[np.argpartition(times, m)[:m]] if m < len(eligible) else eligible
        return np.sort(earliest).astype(np.int64, copy=False)

    def times(self, seed: int, round: int, clients: int) -> np.ndarray:
        """When each client would be drawn, float64 [N].

        Exponential times of rates p come in the order of successive draws from p, each renormalised over those left:
        so the m earliest are m draws without replacement.
        """
        times: np.ndarray = generator(seed, "participation", round).standard_exponential(clients)
        times /= chances(seed, clients, self.gamma)
        return times

    def sample_there(
        self, seed: int, round: int, eligible: np.ndarray, clients: int, is_there: Callable[[int], bool]
    ) -> np.ndarray:
        found = islice(filter(is_there, self.order(seed, round, eligible, clients)), self.size(clients))
        return np.array(sorted(found), dtype=np.int64)

    def order(self, seed: int, round: int, eligible: np.ndarray, clients: int) -> Iterator[int]:
        """The eligible clients in the order in which they would be drawn; they are sorted as far as is asked for."""
        times, looked, upto = self.times(seed, round, clients)[eligible], 0, 16 * self.size(clients)
        while looked < len(times):
            first = np.argpartition(times, upto)[:upto] if upto < len(times) else np.arange(len(times))
            yield from eligible[first[np.argsort(times[first])][looked:]].tolist()
            looked, upto = len(first), 16 * upto


@lru_cache(maxsize=8)
def chances(seed: int, clients: int, gamma: float) -> np.ndarray:
    """The chances p ~ Dir_N(1/γ) of the clients in one run, cut off below, float64 [N]."""
    concentration = min(1 / gamma, MAX_CONCENTRATION)
    p = np.maximum(generator(seed, "chances").dirichlet(np.full(clients, concentration)), LEAST_CHANCE)
    p.flags.writeable = False
    return p


class Cyclic(CohortParticipation):
    """Groups of equal size take turns, round by round; m clients of the group whose turn it is take part.

    They are drawn at random; if the group has fewer, all of it takes part.
    """

    idea: ClassVar[str] = "fixed groups of clients take turns, as time zones do over a day"
    groups: int = setting("number of groups", default=5, least=1)
    shuffle: bool = setting(
        "form the groups at random, once; false: by id, the first N / groups clients first", default=True
    )

    def check_clients(self, clients: int) -> None:
        super().check_clients(clients)
        if self.groups > clients:
            raise ConfigError(
                f"{self.display_name()}: groups must be at most the number of clients, {clients}, got {self.groups}; "
                "lower participation.groups or raise partition.clients."
            )

    def present(self, seed: int, round: int, eligible: np.ndarray, clients: int) -> np.ndarray:
        group = membership(seed if self.shuffle else None, clients, self.groups)[eligible]
        return np.compress(group == (round - 1) % self.groups, eligible)


@lru_cache(maxsize=8)
def membership(seed: int | None, clients: int, groups: int) -> np.ndarray:
    """The group of every client, int64 [N], whose sizes differ by at most one; by id without a seed, else at random."""
    place = np.arange(clients) if seed is None else generator(seed, "groups").permutation(clients)
    group = place * groups // clients
    group.flags.writeable = False
    return group


class Markov(CohortParticipation):
    """Every client is a Markov chain of its own, available or absent; m available clients at random take part.

    If fewer are there, all of them take part; there may be none. In round 1 a client is there with the stationary
    chance, join / (join + leave): so it is in every round, and its states t rounds apart are correlated by
    (1 − join − leave)^t.
    """

    idea: ClassVar[str] = "clients come and go: each stays there or away for a while"
    join: float = setting("chance that an absent client is available in the next round", default=0.1, above=0, most=1)
    leave: float = setting("chance that an available client is absent in the next round", default=0.1, least=0, most=1)

    def present(self, seed: int, round: int, eligible: np.ndarray, clients: int) -> np.ndarray:
        return np.compress(self.available(seed, round, clients)[eligible], eligible)

    def available(self, seed: int, round: int, clients: int) -> np.ndarray:
        """Which clients are available in a round, bool [N].

        The round after the one asked last costs one step of the chains, an earlier one all steps from the first.
        """
        latest = latest_state(seed, clients, self.join, self.leave)
        t, state = latest[0]
        if t == 0 or t > round:
            t, state = 1, generator(seed, "availability", 1).random(clients) < self.join / (self.join + self.leave)
        while t < round:
            t += 1
            state = generator(seed, "availability", t).random(clients) < np.where(state, 1 - self.leave, self.join)
        state.flags.writeable = False
        latest[0] = t, state
        return state


@lru_cache(maxsize=8)
def latest_state(seed: int, clients: int, join: float, leave: float) -> list[tuple[int, np.ndarray]]:
    """The round of one run's chains that was asked last, and its states; round 0: none was asked yet.

    They are the one item of a list, which is replaced as a whole.
    """
    return [(0, np.zeros(0, dtype=bool))]


class ByClass(Participation):
    """Each client takes part with a chance that follows from its classes, independently; there may be none.

    p_i(t) = f(t) Σ_c ν_ic φ_c: ν_ic is the share of class c among the client's samples. φ_c is uniform between 0 and
    `high` for the first half of the classes and between 0 and `low` for the others, drawn once a run.
    f(t) = 1 − swing + swing · sin(2π (t − 1) / period). As in FedAWE (Xiang et al., NeurIPS 2024, Appendix J.3).
    """

    idea: ClassVar[str] = "clients come with chances that follow from their classes, and that may rise and fall"
    high: float = setting("largest φ of the first half of the classes", default=1.0, above=0, most=1)
    low: float = setting("largest φ of the other classes", default=0.5, above=0, most=1)
    swing: float = setting("how far chances rise and fall, as a share; 0: they stay", default=0.0, least=0, most=0.5)
    period: int = setting("rounds after which they have risen and fallen once", default=20, least=1)
    shares: ClassVar[np.ndarray | None] = None  # of the classes [N, K], of an instance that knows the labels

    def with_labels(self, counts: Callable[[], np.ndarray]) -> Self:
        rule, held = replace(self), counts()
        if held.shape[1] < 2:
            raise ConfigError(
                f"{self.display_name()}: chances follow from classes, which these data do not have; "
                'set participation.name = "bernoulli".'
            )
        object.__setattr__(rule, "shares", held / np.maximum(held.sum(1, keepdims=True), 1))
        return rule

    def sample(self, seed: int, round: int, eligible: np.ndarray, clients: int) -> np.ndarray:
        came = generator(seed, "participation", round).random(clients) < self.chances(seed, round, clients)
        return np.sort(eligible[came[eligible]]).astype(np.int64, copy=False)

    def sample_there(
        self, seed: int, round: int, eligible: np.ndarray, clients: int, is_there: Callable[[int], bool]
    ) -> np.ndarray:
        return keep(self.sample(seed, round, eligible, clients), is_there)

    def chances(self, seed: int, round: int, clients: int) -> np.ndarray:
        """p_i(t) of all clients [N]; their mean over all φ where labels are not known, for estimates of cost."""
        factor = 1 - self.swing + self.swing * math.sin(2 * math.pi * (round - 1) / self.period)
        if self.shares is None:
            return np.full(clients, factor * (self.high + self.low) / 4)
        classes = self.shares.shape[1]
        phi = generator(seed, "chances").random(classes)
        return factor * self.shares @ (phi * np.where(np.arange(classes) < classes // 2, self.high, self.low))


def takes_any(rule: CohortParticipation) -> bool:
    """Does a rule take any m of those present, all equally likely, by the code of its base class?"""
    draws = type(rule).sample
    return draws is CohortParticipation.sample or (
        isinstance(rule, Skewed) and draws is Skewed.sample and rule.gamma == 0
    )
