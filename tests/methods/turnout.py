"""Clients that come with uneven chances, for the tests of methods that make up for it; no data and no engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import product

import numpy as np
import torch
from textbook import make_cohort
from torch import Tensor

from askew.core.algorithm import Algorithm
from askew.core.space import Space
from askew.core.types import select_rows
from problems import linear_model

RATES = (0.9, 0.5, 0.2, 0.1)  # the clients' chances to come
MINIMA = torch.tensor([[1.0], [-1.0], [3.0], [7.0]], dtype=torch.float64)  # of the losses ½ (w − a_i)², mean 2.5
RATE = 0.01  # of the one local step


def draw_cohorts(rounds: int, rates: Callable[[int], Sequence[float]], seed: int = 0) -> Iterator[list[int]]:
    """Who comes in each round, every client independently; nobody sometimes."""
    rng = np.random.default_rng(seed)
    for t in range(1, rounds + 1):
        yield np.flatnonzero(rng.random(len(rates(t))) < rates(t)).tolist()


class ServerOnTheLine:
    """A method's server and its memory of four clients, whose uploads are computed beside it."""

    def __init__(self, alg: Algorithm, dimension: int = 1, clients: int = 4) -> None:
        space = Space(linear_model(dimension), torch.float64)
        self.alg, self.w, self.state, self.clients = alg, space.start, alg.server_state(space), clients
        self.memory = {n: torch.stack([v] * clients) for n, v in alg.memory(space).items()}

    def take_step(self, round: int, ids: Sequence[int], delta: Tensor) -> None:
        """The round of these clients with these uploads; without any it does not happen."""
        if not ids:
            return
        cohort = make_cohort([1 / len(ids)] * len(ids), round=round, clients=self.clients)
        rows = select_rows(self.memory, list(ids))
        self.w, new = self.alg.aggregate(self.w, {"delta": delta}, cohort, self.state | rows)
        self.state = {n: new[n] for n in self.state}
        for name, entry in self.memory.items():
            entry[list(ids)] = new[name]


Upload = Callable[[ServerOnTheLine, int, list[int]], Tensor]


def step_from_w(server: ServerOnTheLine, round: int, ids: list[int]) -> Tensor:
    """One step of each participant from w towards its minimum."""
    return RATE * (MINIMA[ids] - server.w)


def long_run_mean(
    alg: Algorithm,
    upload: Upload = step_from_w,
    rates: Callable[[int], Sequence[float]] = lambda t: RATES,
    rounds: int = 5000,
    read: Callable[[ServerOnTheLine], Tensor] = lambda server: server.w,
) -> float:
    """The mean of w over the rounds after the first thousand."""
    server, path = ServerOnTheLine(alg), []
    for t, ids in enumerate(draw_cohorts(rounds, rates), 1):
        server.take_step(t, ids, upload(server, t, ids))
        path.append(float(read(server)))
    return float(np.mean(path[1000:]))


def biased_minimum(weights: Sequence[float]) -> float:
    """The minimum of the weighted losses: the weighted mean of the clients' minima."""
    p = torch.tensor(weights, dtype=torch.float64)
    return float(p @ MINIMA[:, 0] / p.sum())


def all_cohorts(rates: Sequence[float]) -> Iterator[tuple[float, list[int]]]:
    """All ways to come, each with its chance."""
    for come in product((0, 1), repeat=len(rates)):
        yield math.prod(p if c else 1 - p for p, c in zip(rates, come, strict=True)), np.flatnonzero(come).tolist()


def mean_shares(rates: Sequence[float] = RATES) -> list[float]:
    """E[1{i comes} / number that come]: the weights of the clients in a mean over the participants."""
    shares = np.zeros(len(rates))
    for chance, ids in all_cohorts(rates):
        shares[ids] += chance / max(1, len(ids))
    return shares.tolist()
