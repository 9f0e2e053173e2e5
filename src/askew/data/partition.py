"""Partitions: who owns which training samples. Disjoint, complete, a function of the labels and the seed."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import numpy as np

from ..core.rng import generator
from ..core.settings import Settings, setting
from ..errors import DataError

MOST_DRAWS = 2000


class Shares(NamedTuple):
    """Client i owns order[offsets[i]:offsets[i + 1]]; a client may own nothing."""

    order: np.ndarray  # [n] int64 sample indices, grouped by client
    offsets: np.ndarray  # [N + 1] int64

    @property
    def clients(self) -> int:
        return len(self.offsets) - 1

    @property
    def sizes(self) -> np.ndarray:
        return np.diff(self.offsets)

    def client(self, i: int) -> np.ndarray:
        """The sample indices of one client, ascending."""
        return self.order[self.offsets[i] : self.offsets[i + 1]]

    def histogram(self, labels: np.ndarray, classes: int) -> np.ndarray:
        """Samples of every class at every client, int64 [N, classes]."""
        owner = np.repeat(np.arange(self.clients), self.sizes)
        return np.bincount(owner * classes + labels[self.order], minlength=self.clients * classes).reshape(self.clients, classes)


def grouped(owner: np.ndarray, clients: int) -> Shares:
    """Shares from the owner of every sample."""
    offsets = np.zeros(clients + 1, dtype=np.int64)
    np.cumsum(np.bincount(owner, minlength=clients), out=offsets[1:])
    return Shares(np.argsort(owner, kind="stable").astype(np.int64, copy=False), offsets)


class Partition(Settings):
    """A rule that divides samples among clients; the base of all of them."""

    idea: ClassVar[str] = ""
    clients: int = setting("number of clients", default=30, least=1)
    validation: float | None = setting(
        "share of each client's samples held out for validation; left out: 0.2 where the algorithm needs it", default=None, least=0, below=1
    )
    public: int | None = setting(
        "samples the server takes from the training data, by class; left out: a tenth, at most 1,000, where the algorithm needs them",
        default=None,
        least=0,
    )

    def split(self, labels: np.ndarray, seed: int, owner: np.ndarray | None = None) -> Shares:
        raise NotImplementedError


class Iid(Partition):
    """Shuffle and cut: sizes differ by at most one."""

    idea: ClassVar[str] = "shuffle and cut into equal parts"

    def split(self, labels: np.ndarray, seed: int, owner: np.ndarray | None = None) -> Shares:
        n = len(labels)
        sizes = n // self.clients + (np.arange(self.clients) < n % self.clients)
        holder = np.empty(n, dtype=np.int64)
        holder[generator(seed, "partition").permutation(n)] = np.repeat(np.arange(self.clients), sizes)
        return grouped(holder, self.clients)


class Dirichlet(Partition):
    """Class r goes to the clients in proportions P_r ~ Dir_N(α) (Yurochkin et al., ICML 2019).

    As in the authors' code, classes are dealt one after the other, clients holding ≥ n/N samples get no more (`cap`),
    and the whole draw is repeated until every client has `min_size` samples.
    """

    idea: ClassVar[str] = "each class is shared out in Dirichlet(alpha) proportions; small alpha: few classes a client, unequal sizes"
    alpha: float = setting("concentration; small is skewed, 100 nearly iid", default=0.2, above=0)
    cap: bool = setting("a client holding its n/N samples gets nothing of the classes that follow", default=True)
    min_size: int = setting("draw again until every client has so many samples", default=10, least=0)

    def split(self, labels: np.ndarray, seed: int, owner: np.ndarray | None = None) -> Shares:
        n = len(labels)
        if not np.issubdtype(labels.dtype, np.integer):
            raise DataError("the dirichlet partition needs class labels, whole numbers, and these targets are not; use the iid partition.")
        if n < self.clients * self.min_size:
            raise DataError(
                f"{n} samples cannot give {self.clients} clients partition.min_size = {self.min_size} each; "
                f"at most {n // self.clients} is possible: lower partition.min_size or partition.clients."
            )
        present, totals = np.unique(labels, return_counts=True)
        rng = generator(seed, "partition")
        best = -1
        for _ in range(MOST_DRAWS):
            counts = self.deal(totals, rng)
            smallest = int(counts.sum(0).min())
            if smallest >= self.min_size:
                break
            best = max(best, smallest)
        else:
            raise DataError(
                f"no client may have fewer than partition.min_size = {self.min_size} samples, yet in {MOST_DRAWS} draws with "
                f"alpha = {self.alpha:g} and {self.clients} clients the smallest never had more than {best}; "
                f"set partition.min_size to {best} or less, raise partition.alpha or take fewer clients."
            )
        holder = np.empty(n, dtype=np.int64)
        for label, row in zip(present, counts, strict=True):
            holder[rng.permutation(np.flatnonzero(labels == label))] = np.repeat(np.arange(self.clients), row)
        return grouped(holder, self.clients)

    def deal(self, totals: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """One draw: how many samples of each class every client gets, int64 [classes, N]."""
        counts = np.empty((len(totals), self.clients), dtype=np.int64)
        held = np.zeros(self.clients, dtype=np.int64)
        n = int(totals.sum())
        for row, total in zip(counts, totals, strict=True):
            shares = rng.dirichlet(np.full(self.clients, self.alpha))
            # Not everybody can be full before the last sample is dealt: somebody always has room.
            room = held * self.clients < n if self.cap else np.full(self.clients, True)
            shares[~room] = 0
            edges = shares.cumsum()
            if not edges[-1] > 0:
                # A tiny alpha leaves one client with all of the mass, and that one may be full (or all shares may underflow):
                # renormalised Dirichlet shares tend to a random corner as alpha → 0, so one client with room gets the class.
                edges = (np.arange(self.clients) >= rng.choice(np.flatnonzero(room))).astype(float)
            # Divided by the last edge, which becomes exactly 1: a full last client is left nothing by rounding.
            row[:] = np.diff(np.floor(edges / edges[-1] * total).astype(np.int64), prepend=0)
            held += row
        return counts


class Natural(Partition):
    """Every sample stays with the client it came from."""

    idea: ClassVar[str] = "as the data come: every sample stays with its natural client"

    def split(self, labels: np.ndarray, seed: int, owner: np.ndarray | None = None) -> Shares:
        if owner is None:
            raise DataError(
                'the natural partition: this dataset does not come divided among clients; set partition.name to "iid" or "dirichlet".'
            )
        if len(owner) != len(labels) or int(owner.min()) < 0:
            raise DataError(
                f"the owners must be one client number from 0 for each of the {len(labels)} samples, "
                f"got {len(owner)} from {int(owner.min())}; number the clients 0, 1, 2, …"
            )
        if int(owner.max()) >= self.clients:
            raise DataError(
                f"the data belong to {int(owner.max()) + 1} clients, more than partition.clients = {self.clients}; "
                f"set partition.clients = {int(owner.max()) + 1}."
            )
        return grouped(owner, self.clients)
