"""What the tests of identities share: cohorts and settings, the letters of the papers, and two rounds to follow by pencil."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from askew.core.algorithm import Algorithm
from askew.core.types import Cohort
from askew.data.federation import LocalSettings
from askew.engine.server import Server
from problems import Problem, scalars, serve

SIZES = [5, 8, 3, 6]
COHORTS = [[0, 1, 3], [1, 2], [0, 2, 3], [2]]
EVERYBODY = [[0, 1, 2, 3]]
PLAIN = LocalSettings(epochs=2, batch=3, lr=0.1)
SLOWING = LocalSettings(epochs=2, batch=3, lr=0.1, decay=0.7)
RICH = LocalSettings(epochs=2, batch=3, lr=0.1, momentum=0.6, weight_decay=0.03, clip=0.9, decay=0.9)


def zeros(on: Problem) -> Tensor:
    return torch.zeros(on.fed.shape[0], dtype=torch.float64)


def shares(on: Problem, ids: Sequence[int]) -> Tensor:
    """n_i / Σ n_j"""
    n = torch.tensor(on.fed.sizes[list(ids)], dtype=torch.float64)
    return n / n.sum()


def gradient(on: Problem, client: int, w: Tensor) -> Tensor:
    """∇L_i(w) over all of a client's samples."""
    x, y = on.samples(client)
    return x.T @ (x @ w - y[:, 0]) / len(y)


def nova(K: int, rho: float) -> float:
    """The length of K heavy-ball steps, in closed form."""
    return (K - rho * (1 - rho**K) / (1 - rho)) / (1 - rho)


def cohort(p: Sequence[float], lr: float = 0.1, lr0: float = 0.1, round: int = 1, clients: int = 10) -> Cohort:
    """What a server knows, where only the weights and the rate matter."""
    row = torch.tensor(p, dtype=torch.float64)
    ones = torch.ones_like(row)
    return Cohort(row, ones, ones, ones, ones, None, lr, lr0, round, clients)


# two rounds by pencil -------------------------------------------------------------------------------------------
# On the line: L_i(θ) = ½ A_i (θ − a_i)², w starts at 0, two full steps of rate 0.1. Clients 0 and 1 come to the first
# round, clients 0 and 2 to the second; client 3 never comes but is one of N = 4.

CLIENTS = (1.0, 1.0), (4.0, -2.0), (2.0, 3.0), (1.0, 0.0)
TWICE = LocalSettings(batch=0, steps=2, lr=0.1)
VISITS = [[0, 1], [0, 2]]


def by_pencil(
    alg: Algorithm, local: LocalSettings = TWICE, copies: Sequence[int] | None = None
) -> tuple[list[float], Server]:
    """x after the first and after the second round."""
    server, xs = serve(alg, scalars(*CLIENTS, copies=copies), local), []
    for t, ids in enumerate(VISITS, 1):
        server.run_round(t, ids)
        xs.append(float(server.w))
    return xs, server


def exactly(*values: float) -> object:
    return pytest.approx(list(values), rel=1e-12, abs=1e-13)
