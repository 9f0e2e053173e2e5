"""How often each client takes part in many rounds, and how unequal these counts are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from ..core.rng import generator
from ..participation import Participation, Skewed, chances

Counts = np.ndarray[Any, np.dtype[np.int64]]


def participation_counts(rule: Participation, seed: int, clients: int, rounds: int) -> Counts:
    """In how many of the rounds each of N clients is sampled, [N]; every client is eligible."""
    everybody, own_seed = np.arange(clients), rule.drawn_by(seed)
    samples = [rule.sample(own_seed, t, everybody, clients) for t in range(1, rounds + 1)]
    return np.bincount(np.concatenate(samples), minlength=clients)


def skewed_counts(seed: int, clients: int, cohort: int, gammas: Iterable[float], rounds: int) -> dict[float, Counts]:
    """`participation_counts` of the rule `skewed` with m = `cohort` at several γ, by γ.

    The exponential times of a round do not depend on γ, so they are drawn once for all.
    """
    found: dict[float, Counts] = {}
    drawn = [generator(seed, "participation", t).standard_exponential(clients) for t in range(1, rounds + 1)]
    times = np.array(drawn)  # [T, N]
    for gamma in gammas:
        if gamma == 0:
            found[gamma] = participation_counts(Skewed(gamma=0, cohort=cohort), seed, clients, rounds)
        else:
            earliest = np.argpartition(times / chances(seed, clients, gamma), cohort, axis=1)[:, :cohort]
            found[gamma] = np.bincount(earliest.ravel(), minlength=clients)
    return found


def gini(counts: np.ndarray[Any, Any]) -> float:
    """The Gini coefficient: 0 if all counts are equal, towards 1 if one client has all."""
    ordered, n = np.sort(counts), len(counts)
    return float((2 * np.arange(1, n + 1) - n - 1) @ ordered / (n * max(ordered.sum(), 1)))
