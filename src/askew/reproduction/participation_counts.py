"""How often each client takes part in many rounds, and how unequal these counts are."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..participation import Participation

Counts = np.ndarray[Any, np.dtype[np.int64]]


def participation_counts(rule: Participation, seed: int, clients: int, rounds: int) -> Counts:
    """In how many of the rounds each of N clients is sampled, [N]; every client is eligible."""
    everybody, own_seed = np.arange(clients), rule.drawn_by(seed)
    samples = [rule.sample(own_seed, t, everybody, clients) for t in range(1, rounds + 1)]
    return np.bincount(np.concatenate(samples), minlength=clients)


def gini(counts: np.ndarray[Any, Any]) -> float:
    """The Gini coefficient: 0 if all counts are equal, towards 1 if one client has all."""
    ordered, n = np.sort(counts), len(counts)
    return float((2 * np.arange(1, n + 1) - n - 1) @ ordered / (n * max(ordered.sum(), 1)))
