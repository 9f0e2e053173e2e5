"""Synthetic(α, β): classification problems whose clients differ in their inputs, in their labels or in both."""

from __future__ import annotations

from functools import lru_cache
from typing import ClassVar

import numpy as np
import torch

from ..core.rng import generator
from ..core.settings import setting
from .dataset import NaturalSource, Samples, concatenate

MAX_SAMPLES = 100_000  # samples of a client


class LinearTeachers(NaturalSource):
    """Samples labelled by linear models, one for each client or one for all; the base class of both generators.

    x ~ N(v_i, diag(j^−1.2)), y = argmax(xᵀW_i + b_i);
    own inputs: v_i ~ N(B_i, I) with B_i ~ N(0, β), else v_i = 0;
    own solutions: entries of W_i, b_i ~ N(u_i, 1) with u_i ~ N(0, α), else one common W, b ~ N(0, 1).

    Second arguments are standard deviations. As u_i shifts all classes alike it cancels in the argmax: what counts is
    whether clients have solutions of their own.
    """

    dim: int = setting("length of an input", default=30, least=1, most=1_000_000)
    labels: int = setting("number of classes", default=5, least=2, most=1_000_000)
    alpha: float = setting("standard deviation of u_i, the mean of client i's solution", default=0.0, least=0)
    beta: float = setting("standard deviation of B_i, the mean of client i's input centre", default=0.0, least=0)
    test_clients: int = setting(
        "the test set is drawn from the first so many clients (from all, if they are no more)", default=1000, least=1
    )

    @property
    def classes(self) -> int:
        return self.labels

    @property
    def own_inputs(self) -> bool:
        """Does every client have inputs about a centre of its own?"""
        return True

    @property
    def own_solutions(self) -> bool:
        """Does every client have a W, b of its own?"""
        return True

    def counts(self, z: np.ndarray) -> np.ndarray:
        """The number of samples of clients, training and test together, from one standard normal number each, int64."""
        raise NotImplementedError

    def count(self, seed: int, client: int) -> int:
        """The number of samples of one client, training and test together."""
        return int(first_counts(self, seed, client + 1)[client])

    def draw(self, seed: int, client: int) -> Samples:
        """All samples of one client, training and test together."""
        rng = generator(seed, "synthetic inputs", client=client)
        # The centre is drawn even where it is not used: the noise is then the same with and without it.
        centre = rng.normal(rng.normal(0, self.beta), 1, self.dim) * self.own_inputs
        deviation = np.arange(1, self.dim + 1) ** -0.6
        x = centre + deviation * rng.standard_normal((self.count(seed, client), self.dim))
        rng = generator(seed, "synthetic solution", client=client if self.own_solutions else -1)
        mean = rng.normal(0, self.alpha) * self.own_solutions
        w, b = rng.normal(mean, 1, (self.dim, self.labels)), rng.normal(mean, 1, self.labels)
        return Samples(torch.from_numpy(x).float(), torch.from_numpy((x @ w + b).argmax(1)))


@lru_cache(maxsize=16)
def cached_counts(source: LinearTeachers, seed: int, capacity: int) -> np.ndarray:
    """The number of samples of each of the first clients.

    The beginning of a stream does not depend on how much of it is drawn, so that more clients leave the first ones
    alone.
    """
    counts = source.counts(generator(seed, "client sizes").standard_normal(capacity))
    counts.flags.writeable = False
    return counts


def first_counts(source: LinearTeachers, seed: int, clients: int) -> np.ndarray:
    """The number of samples of each of the first clients.

    It is taken from few cached arrays: their lengths are powers of two, 4096 or more.
    """
    return cached_counts(source, seed, max(4096, 1 << (clients - 1).bit_length()))[:clients]


class Synthetic(LinearTeachers):
    """The data Synthetic(α, β) as FedDyn (Acar et al., ICLR 2021) and FedDC (Gao et al., CVPR 2022) use them.

    Client i has inputs x ~ N(v_i, diag(j^−1.2)) and labels argmax(xᵀW_i + b_i). β > 0: clients have inputs of their
    own, v_i ~ N(B_i, 1) with B_i ~ N(0, β); else v_i = 0. α > 0: they have solutions of their own, W_i and b_i ~
    N(u_i, 1) with u_i ~ N(0, α); else all share W, b ~ N(0, 1). Second arguments are standard deviations. u_i cancels
    in the argmax: of α only counts whether it is 0. The test set is the training data.
    """

    idea: ClassVar[str] = (
        "Synthetic(α, β) of FedDyn and FedDC: own solutions if α > 0, own inputs if β > 0; any number of clients"
    )
    samples: int = setting("mean samples of a client", default=200, least=1, most=MAX_SAMPLES)
    sigma: float = setting(
        f"lognormal spread of the clients' sizes; none exceeds {MAX_SAMPLES:,}", default=0.0, least=0, most=100
    )
    iid_data: bool | None = setting("all clients draw inputs alike; left out: if beta = 0", default=None)
    iid_solution: bool | None = setting("all clients share one W, b; left out: if alpha = 0", default=None)

    @property
    def own_inputs(self) -> bool:
        return self.beta > 0 if self.iid_data is None else not self.iid_data

    @property
    def own_solutions(self) -> bool:
        return self.alpha > 0 if self.iid_solution is None else not self.iid_solution

    def counts(self, z: np.ndarray) -> np.ndarray:
        sizes = self.samples * np.exp(self.sigma * z - self.sigma**2 / 2)
        return sizes.clip(1, MAX_SAMPLES).astype(np.int64)

    def sizes(self, seed: int, clients: int) -> np.ndarray:
        return first_counts(self, seed, clients).copy()

    def client(self, seed: int, client: int) -> Samples:
        return self.draw(seed, client)

    def test_set(self, seed: int, clients: int) -> Samples:
        return concatenate(self.draw(seed, i) for i in range(min(clients, self.test_clients)))


class SyntheticLeaf(LinearTeachers):
    """Synthetic(α, β) as FedProx (Li et al., MLSys 2020) made it: always own inputs and solutions, very unequal sizes.

    A client has 50 + LogNormal(4, 2) samples, nine tenths to train; one beyond 100,000 is cut there.
    """

    idea: ClassVar[str] = (
        "the original Synthetic(α, β) of FedProx: own inputs, own solutions, sizes 50 + LogNormal(4, 2)"
    )
    dim = 60
    labels = 10
    alpha = 1.0
    beta = 1.0

    def counts(self, z: np.ndarray) -> np.ndarray:
        sizes: np.ndarray = np.minimum(50 + np.exp(4 + 2 * z), MAX_SAMPLES)
        return sizes.astype(np.int64)

    def sizes(self, seed: int, clients: int) -> np.ndarray:
        sizes: np.ndarray = first_counts(self, seed, clients) * 9 // 10
        return sizes

    def client(self, seed: int, client: int) -> Samples:
        return self.split(seed, client)[0]

    def test_set(self, seed: int, clients: int) -> Samples:
        return concatenate(self.split(seed, i)[1] for i in range(min(clients, self.test_clients)))

    def split(self, seed: int, client: int) -> tuple[Samples, Samples]:
        """One client's training and test samples."""
        x, y = self.draw(seed, client)
        train = len(y) * 9 // 10
        return Samples(x[:train], y[:train]), Samples(x[train:], y[train:])
