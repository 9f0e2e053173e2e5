"""The basic types of the data: samples, a dataset of them, and the sources that datasets are loaded from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..core.settings import Settings
from ..errors import DataError
from .transform import InputTransform

Criterion = str | Callable[[Tensor, Tensor], Tensor]

MAX_POOLED_VALUES = 50_000_000  # numbers in all inputs together, where clients that are drawn one by one are pooled


class Samples(NamedTuple):
    """Inputs and what to predict from them, n of each."""

    x: Tensor  # [n, ...] float32 or int64 tokens; with a transform, whatever it takes (bytes, positions in a text)
    y: Tensor  # [n] int64 class labels, or float32 targets

    def select(self, index: Tensor | np.ndarray | slice) -> Samples:
        """The samples at these positions, or where a mask is true."""
        return Samples(self.x[index], self.y[index])

    def to(self, device: torch.device, dtype: torch.dtype) -> Samples:
        """The samples on a device; real inputs and targets in this precision, whole numbers as they are."""
        x, y = (t.to(device, dtype if t.is_floating_point() else t.dtype) for t in self)
        return Samples(x, y)


def concatenate(parts: Iterable[Samples]) -> Samples:
    """All samples of several sets, one set after the other."""
    x, y = zip(*parts, strict=True)
    return Samples(torch.cat(x), torch.cat(y))


def hold_out_fifth(samples: Samples, order: np.ndarray) -> tuple[Samples, Samples]:
    """Training samples and test samples: the first, the sixth, the eleventh … of `order` are for testing.

    `order` [n] holds the positions of all samples.
    """
    is_test = torch.zeros(len(order), dtype=torch.bool)
    is_test[torch.from_numpy(order[::5].copy())] = True
    return samples.select(~is_test), samples.select(is_test)


@dataclass(frozen=True, eq=False)
class Dataset:
    """Pooled training samples and the common test set."""

    train: Samples
    test: Samples
    classes: int  # 0: not a classification
    owner: np.ndarray | None = None  # [n] the natural client of every training sample
    criterion: Criterion = "cross_entropy"  # or "squared_error", or (output [B, ..], y) -> loss of each sample [B]
    transform: InputTransform | None = None  # turns stored samples into inputs; None: they are inputs
    test_owner: np.ndarray | None = None  # [m] the natural client of every test sample, where each has some of its own

    def to(self, device: torch.device, dtype: torch.dtype) -> Dataset:
        """The same dataset on a device; real inputs and targets in this precision."""
        train, test = self.train.to(device, dtype), self.test.to(device, dtype)
        return replace(self, train=train, test=test, transform=self.transform and self.transform.to(device))


class Source(Settings):
    """Settings that say which dataset to load; the base class of all datasets that have a name."""

    natural: ClassVar[bool] = False  # True: the data come divided among clients, see NaturalSource
    idea: ClassVar[str] = ""  # one line for lists of datasets

    @property
    def seeded(self) -> bool:
        """Do the samples depend on the seed?"""
        return True

    def load(self, seed: int, clients: int) -> Dataset:
        """The pooled data."""
        raise NotImplementedError


class NaturalSource(Source):
    """A dataset that comes divided among clients, each a function of (seed, client) alone.

    Nothing is kept in memory: a million clients cost nothing until they take part.
    """

    natural: ClassVar[bool] = True

    @property
    def classes(self) -> int:
        """The number of classes."""
        raise NotImplementedError

    def sizes(self, seed: int, clients: int) -> np.ndarray:
        """The number of training samples of every client, int64 [N]."""
        raise NotImplementedError

    def client(self, seed: int, client: int) -> Samples:
        """One client's training samples."""
        raise NotImplementedError

    def test_set(self, seed: int, clients: int) -> Samples:
        """The common test samples of the first N clients."""
        raise NotImplementedError

    def load(self, seed: int, clients: int) -> Dataset:
        sizes = self.sizes(seed, clients)
        values = int(sizes.sum()) * self.client(seed, 0).x[:1].numel()
        if values > MAX_POOLED_VALUES:
            raise DataError(
                f"{self.display_name()}: pooling {clients:,} clients would hold {values:,} numbers, at most "
                f'{MAX_POOLED_VALUES:,} are allowed; set partition.name = "natural", which draws a client\'s data when '
                "it takes part, or take fewer clients."
            )
        train = concatenate(self.client(seed, i) for i in range(clients))
        return Dataset(train, self.test_set(seed, clients), self.classes, np.repeat(np.arange(clients), sizes))
