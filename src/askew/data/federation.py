"""Federation: who holds which samples, and the plan of batches that every engine consumes.

A plan is a function of (seed, round, client) alone: all algorithms and engines see the same batches in the same order.
Data that come divided among clients are made when a client takes part, so a million clients cost nothing at rest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..core.rng import generator
from ..core.settings import Settings, setting
from ..core.types import Batch
from ..errors import ConfigError, DataError
from .dataset import Criterion, Dataset, NaturalSource, Samples, Source
from .partition import Natural, Partition, Shares

CHUNK = 1024  # samples in one chunk of a look
SHOWN = 500  # clients whose labels are kept for pictures


class Local(Settings):
    """Local training."""

    title = "local"
    epochs: int = setting("passes over the client's samples; steps > 0 replaces them", default=1, least=1)
    steps: int = setting("exact number of local steps; 0: by epochs", default=0, least=0)
    batch: int = setting("batch size; 0: all of a client's samples in one batch", default=32, least=0)
    lr: float = setting("learning rate of the first round", default=0.1, above=0, hint="try 0.1 or 0.01.")
    momentum: float = setting("heavy-ball momentum, begun anew each round", default=0.0, least=0, below=1)
    weight_decay: float = setting("weight decay, outside the clipped norm", default=0.0, least=0)
    clip: float = setting("limit of the gradient's norm; 0: off", default=0.0, least=0)
    decay: float = setting("factor γ on the learning rate after every round", default=1.0, above=0, most=1)

    def rate(self, round: int) -> float:
        """η_t = η_0 γ^(t−1), rounds counted from 1."""
        return self.lr * self.decay ** (round - 1)

    @property
    def clip_limit(self) -> float:
        return self.clip or math.inf


class Work(NamedTuple):
    """One client's samples in the order it uses them; cuts[k]:cuts[k+1] is its k-th batch or chunk."""

    places: Tensor
    cuts: list[int]

    @property
    def batches(self) -> int:
        return len(self.cuts) - 1

    def lengths(self) -> list[int]:
        return [b - a for a, b in pairwise(self.cuts)]


class Plan(NamedTuple):
    """One round: the pool of samples and each participant's work."""

    ids: list[int]
    pool: Samples
    train: list[Work]
    looks: dict[str, list[Work]]

    def only(self, rows: Sequence[int]) -> Plan:
        """The plan of some of the participants."""
        looks = {name: [works[i] for i in rows] for name, works in self.looks.items()}
        return Plan([self.ids[i] for i in rows], self.pool, [self.train[i] for i in rows], looks)

    def batch(self, index: Tensor, weight: Tensor | None = None) -> Batch:
        """Gather samples; any shape of index."""
        return Batch(self.pool.x[index], self.pool.y[index], weight)


class Federation:
    """Clients 0…N−1, their samples, and a common test set."""

    def __init__(
        self,
        source: Source | Dataset,
        partition: Partition,
        seed: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.seed, self.device, self.dtype = seed, torch.device(device), dtype
        self.source: NaturalSource | None = None
        self.shares: Shares | None = None
        if isinstance(source, NaturalSource) and isinstance(partition, Natural):
            self.source = source
            self.sizes = source.sizes(seed, partition.clients)
            self.test = self._placed(source.test_set(seed, partition.clients))
            self.classes = source.classes
            self.criterion: Criterion = "cross_entropy"
        else:
            dataset = source if isinstance(source, Dataset) else source.load(seed, partition.clients)
            self.pool, self.test = self._placed(dataset.train), self._placed(dataset.test)
            self.shares = partition.split(dataset.train.y.numpy(), seed, dataset.owner)
            self.sizes = self.shares.sizes
            self.classes, self.criterion = dataset.classes, dataset.criterion
        self.clients = len(self.sizes)
        self.eligible = np.flatnonzero(self.sizes > 0)
        if not len(self.eligible):
            raise DataError("no client holds a sample; use more data, or fewer clients (partition.clients).")
        self.mean_size = float(self.sizes[self.eligible].mean())

    def _placed(self, samples: Samples) -> Samples:
        x, y = (t.to(self.device, self.dtype if t.is_floating_point() else t.dtype) for t in samples)
        return Samples(x, y)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return tuple(self.test.x.shape[1:])

    def gather(self, ids: Sequence[int]) -> tuple[Samples, list[np.ndarray[Any, Any]]]:
        """A pool of samples and the places of each of these clients' samples in it."""
        if self.shares is not None:
            return self.pool, [self.shares.client(i) for i in ids]
        assert self.source is not None
        held = [self.source.client(self.seed, i) for i in ids]
        bounds = np.cumsum([0] + [len(s.y) for s in held])
        pool = Samples(torch.cat([s.x for s in held]), torch.cat([s.y for s in held]))
        return self._placed(pool), [np.arange(a, b) for a, b in pairwise(bounds)]

    def plan(self, ids: Sequence[int], round: int, local: Local, looks: Sequence[str] = (), least: int = 1) -> Plan:
        """The round's batches. `least` 2 skips batches of one sample, which batch norm cannot take."""
        pool, places = self.gather(ids)
        train = [self._train(own, round, client, local, least) for client, own in zip(ids, places, strict=True)]
        if "validation" in looks:
            raise ConfigError("this algorithm looks at client validation data, which this federation does not hold out yet.")
        return Plan([int(i) for i in ids], pool, train, {name: [self._work(own, CHUNK, 1) for own in places] for name in looks})

    def _train(self, own: np.ndarray[Any, Any], round: int, client: int, local: Local, least: int) -> Work:
        rng, n = generator(self.seed, "batches", round, client), len(own)
        size = local.batch or n
        if not local.steps:
            return self._work(np.concatenate([own[rng.permutation(n)] for _ in range(local.epochs)]), size, least, n)
        per_epoch = sum(1 for a in range(0, n, size) if min(size, n - a) >= least)
        epochs = math.ceil(local.steps / max(per_epoch, 1))
        whole = self._work(np.concatenate([own[rng.permutation(n)] for _ in range(epochs)]), size, least, n)
        cuts = whole.cuts[: local.steps + 1]
        return Work(whole.places[: cuts[-1]], cuts)

    def _work(self, order: np.ndarray[Any, Any], size: int, least: int, epoch: int | None = None) -> Work:
        """Cut an order into batches that never reach over the end of an epoch."""
        epoch = epoch or max(len(order), 1)
        starts = [a for e in range(0, len(order), epoch) for a in range(e, min(e + epoch, len(order)), size)]
        ends = [*starts[1:], len(order)]
        if any(b - a < least for a, b in zip(starts, ends, strict=True)):
            kept = [(a, b) for a, b in zip(starts, ends, strict=True) if b - a >= least]
            order = np.concatenate([order[a:b] for a, b in kept]) if kept else order[:0]
            ends = np.cumsum([b - a for a, b in kept]).tolist()
        return Work(torch.from_numpy(np.ascontiguousarray(order)).to(self.device), [0, *ends])

    def labels(self) -> dict[str, Any]:
        """Who holds what, for pictures: sizes and label counts of the first clients."""
        shown = min(self.clients, SHOWN)
        told: dict[str, Any] = {"clients": self.clients, "classes": self.classes, "empty": self.clients - len(self.eligible)}
        told |= {"shown": shown, "sizes": self.sizes[:shown].tolist(), "samples": int(self.sizes.sum())}
        if self.classes:
            pool, places = self.gather(range(shown))
            y = pool.y.cpu().numpy()
            told["labels"] = [np.bincount(y[own], minlength=self.classes).tolist() for own in places]
        return told
