"""Assignments of samples to clients, and how samples are dealt by owner, by counts of each class or by sizes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..errors import DataError


class Assignment(NamedTuple):
    """Which client owns which samples: client i owns order[offsets[i]:offsets[i + 1]].

    A client may own nothing; a sample may be nobody's or, where a rule overlaps, several clients'.
    """

    order: np.ndarray  # int64 sample indices, grouped by client
    offsets: np.ndarray  # [N + 1] int64

    @property
    def clients(self) -> int:
        """The number of clients, N."""
        return len(self.offsets) - 1

    @property
    def sizes(self) -> np.ndarray:
        """The number of samples of every client, int64 [N]."""
        return np.diff(self.offsets)

    @property
    def owners(self) -> np.ndarray:
        """The client of every entry of `order`, int64."""
        return np.repeat(np.arange(self.clients), self.sizes)

    def client(self, i: int) -> np.ndarray:
        """The sample indices of one client, ascending."""
        return self.order[self.offsets[i] : self.offsets[i + 1]]

    def without(self, removed: np.ndarray) -> Assignment:
        """The same assignment without some samples, which become nobody's."""
        remaining = ~np.isin(self.order, removed)
        sizes = np.bincount(self.owners[remaining], minlength=self.clients)
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        return Assignment(self.order[remaining], offsets)

    def histogram(self, labels: np.ndarray, classes: int) -> np.ndarray:
        """The number of samples of every client and class, int64 [N, classes]."""
        counts = np.bincount(self.owners * classes + labels[self.order], minlength=self.clients * classes)
        return counts.reshape(self.clients, classes)


def checked_assignment(given: object, samples: int, clients: int, rule: str) -> Assignment:
    """What a rule made of so many samples and clients, with indices of type int64, or a sentence on what is wrong."""
    if not isinstance(given, Assignment):
        raise DataError(
            f"{rule} must return an askew.Assignment, got {type(given).__name__}; "
            "end split() with return askew.Assignment(order, offsets)."
        )
    for name, part in zip(given._fields, given, strict=True):
        if not isinstance(part, np.ndarray) or part.dtype.kind not in "iu" or part.ndim != 1:
            what = f"{part.dtype} of shape {list(part.shape)}" if isinstance(part, np.ndarray) else type(part).__name__
            raise DataError(
                f"{rule}: {name} of the Assignment must be a one-dimensional array of whole numbers, got {what}; "
                "make it by np.array(…, dtype=np.int64)."
            )
    order, offsets = (part.astype(np.int64, copy=False) for part in given)
    if len(offsets) != clients + 1:
        raise DataError(
            f"{rule} must divide the samples among partition.clients = {clients:,} clients, so that its Assignment has "
            f"{clients + 1:,} offsets, got {len(offsets):,}; correct split(), or set partition.clients."
        )
    if offsets[0] != 0 or offsets[-1] != len(order) or (np.diff(offsets) < 0).any():
        raise DataError(
            f"{rule}: the offsets of the Assignment must begin at 0, never decrease and end at {len(order):,}, the "
            "length of order; give client i the samples order[offsets[i]:offsets[i + 1]]."
        )
    wrong = order[(order < 0) | (order >= samples)]
    if len(wrong):
        raise DataError(
            f"{rule} must assign samples 0 to {samples - 1:,}, got {wrong[0]}; give indices of the labels in split()."
        )
    return Assignment(order, offsets)


def group_by_owner(owner: np.ndarray, clients: int) -> Assignment:
    """The assignment that gives every sample to its owner; −1 is nobody."""
    ends = np.cumsum(np.bincount(owner + 1, minlength=clients + 1))
    return Assignment(np.argsort(owner, kind="stable")[ends[0] :].astype(np.int64, copy=False), ends - ends[0])


def class_sizes(labels: np.ndarray, rule: str) -> np.ndarray:
    """The number of samples of every class there is, by ascending label; `rule` is the partition that needs them."""
    if not np.issubdtype(labels.dtype, np.integer):
        raise DataError(
            f"the {rule} partition needs class labels, whole numbers, and these targets are not; use the iid partition."
        )
    return np.unique(labels, return_counts=True)[1]


def shuffle_within_classes(labels: np.ndarray, totals: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """All sample indices, class after class, at random within a class."""
    classes = np.split(np.argsort(labels, kind="stable"), np.cumsum(totals)[:-1])
    return np.concatenate([rng.permutation(members) for members in classes])


def deal_samples(labels: np.ndarray, totals: np.ndarray, counts: np.ndarray, rng: np.random.Generator) -> Assignment:
    """A random assignment that gives every client `counts` [classes, N] samples of each class; others are nobody's."""
    classes, clients = counts.shape
    with_nobody = np.column_stack([counts, totals - counts.sum(1)])
    takers = np.tile(np.append(np.arange(clients), -1), classes)
    owner = np.empty(len(labels), dtype=np.int64)
    owner[shuffle_within_classes(labels, totals, rng)] = np.repeat(takers, with_nobody.ravel())
    return group_by_owner(owner, clients)


def deal_sizes(sizes: np.ndarray, rng: np.random.Generator) -> Assignment:
    """A random assignment that gives every client so many samples, whatever their labels."""
    owner = np.empty(int(sizes.sum()), dtype=np.int64)
    owner[rng.permutation(len(owner))] = np.repeat(np.arange(len(sizes)), sizes)
    return group_by_owner(owner, len(sizes))


def even_sizes(n: int, parts: int) -> np.ndarray:
    """The sizes of n things in parts that differ by at most one, the larger first."""
    sizes = np.full(parts, n // parts)
    sizes[: n % parts] += 1
    return sizes


def lognormal_sizes(n: int, clients: int, sigma: float, rng: np.random.Generator) -> np.ndarray:
    """Sizes s_i ~ LogNormal(log(n/N), σ) of N clients, scaled to sum to n and floored.

    What flooring left, never negative, goes to the first client. σ = 0 gives sizes that differ by at most one. A client
    may get nothing.
    """
    if n < clients:
        raise DataError(
            f"{n:,} samples cannot be shared among {clients:,} clients, one each at least on average; "
            "lower partition.clients."
        )
    if sigma == 0:
        return even_sizes(n, clients)
    z = sigma * rng.standard_normal(clients)  # the mean drops out in the scaling
    s = np.exp(z - z.max())
    sizes: np.ndarray = np.floor(s / s.sum() * n).astype(np.int64)
    sizes[0] += n - sizes.sum()
    return sizes
