"""Participation: who takes part in a round, a function of the seed and the round alone."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from .core.rng import generator
from .core.settings import Registry, Settings, setting
from .errors import ConfigError


class Participation(Settings):
    """A rule that chooses the clients of a round; the base of all of them."""

    idea: ClassVar[str] = ""

    def fit(self, clients: int) -> None:
        """Refuse, when the configuration loads, what cannot be with so many clients."""

    def sample(self, seed: int, round: int, eligible: np.ndarray, clients: int) -> np.ndarray:
        """Sorted int64 ids of the participants; `eligible` are the ids of the clients that have samples, of N = `clients`."""
        raise NotImplementedError


class Uniform(Participation):
    """m clients at random without replacement: m = max(1, round(fraction·N)), or `cohort`; all eligible ones if they are fewer."""

    idea: ClassVar[str] = "a fixed number of clients, all equally likely, without replacement"
    fraction: float = setting("share of the clients that take part in a round", default=0.2, above=0, most=1)
    cohort: int = setting("number of clients that take part in a round, instead of the share; 0: use the share", default=0, least=0)

    def fit(self, clients: int) -> None:
        if self.cohort > clients:
            raise ConfigError(
                f"{self.called()}: cohort must be at most the number of clients, {clients}, got {self.cohort}; "
                "lower participation.cohort or raise partition.clients."
            )

    def sample(self, seed: int, round: int, eligible: np.ndarray, clients: int) -> np.ndarray:
        m = min(self.size(clients), len(eligible))
        chosen = generator(seed, "participation", round).choice(len(eligible), m, replace=False, shuffle=False)
        return np.sort(eligible[chosen]).astype(np.int64, copy=False)

    def size(self, clients: int) -> int:
        """m, before looking at who is eligible."""
        return self.cohort or max(1, round(self.fraction * clients))


class Full(Participation):
    """Everybody, every round."""

    idea: ClassVar[str] = "all clients, every round"

    def sample(self, seed: int, round: int, eligible: np.ndarray, clients: int) -> np.ndarray:
        return np.sort(eligible).astype(np.int64, copy=False)


participations: Registry[Participation] = Registry("participation", {"full": Full, "uniform": Uniform})
