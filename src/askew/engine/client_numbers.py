"""What a participant is as numbers: its steps, their length under momentum, its relative size and its coin."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..core.rng import coin
from ..core.space import Space
from ..core.types import momentum_length
from ..data.federation import ClientBatches, Federation, RoundPlan
from .sample_buffer import send


class ClientNumbers:
    """The numbers of a plan's clients, which its phases and the server's step both use."""

    def __init__(self, fed: Federation, space: Space, momentum: float, seed: int) -> None:
        self.fed, self.space, self.momentum, self.seed = fed, space, momentum, seed
        # of the last two plans, by their clients' batches: the next round is prepared while one is under way
        self.known: list[tuple[list[ClientBatches], Tensor]] = []

    def of(self, plan: RoundPlan, round: int) -> Tensor:
        """Steps, the length of these under momentum, relative sizes and coins [4, C], on the device."""
        numbers = self._known_numbers(plan)
        if numbers is None:
            numbers = self._compute(plan, [coin(self.seed, round, client) for client in plan.ids])
            self.known = [*self.known[-1:], (plan.train, numbers)]
        return numbers

    def without_coins(self, plan: RoundPlan) -> tuple[Tensor, Tensor, Tensor]:
        """Steps, the length of these under momentum, and relative sizes, each [C], for the server's step.

        Coins, which take time to draw, are not drawn for it.
        """
        numbers = self._known_numbers(plan)
        steps, tau, size, _ = self._compute(plan, [0.0] * len(plan.ids)) if numbers is None else numbers
        return steps, tau, size

    def _known_numbers(self, plan: RoundPlan) -> Tensor | None:
        for works, numbers in self.known:
            if len(works) == len(plan.train) and all(a is b for a, b in zip(works, plan.train, strict=True)):
                return numbers
        return None

    def _compute(self, plan: RoundPlan, coins: list[float]) -> Tensor:
        steps, size = [work.batches for work in plan.train], self.fed.sizes[plan.ids] / self.fed.mean_size
        rows = torch.from_numpy(np.array([steps, steps, size, coins], dtype=np.float64)).to(self.space.dtype)
        if self.momentum:
            rows[1] = momentum_length(rows[0], self.momentum)
        return send(rows, self.space.device)
