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
    epochs: int = setting("passes over the client's samples; steps > 0 replaces them", default=1, least=1, most=100_000)
    steps: int = setting("exact number of local steps; 0: by epochs", default=0, least=0, most=10_000_000)
    batch: int = setting("batch size; 0: all of a client's samples in one batch", default=32, least=0)
    lr: float = setting("learning rate of the first round", default=0.1, above=0, hint="try 0.1 or 0.01.")
    momentum: float = setting("heavy-ball momentum, begun anew each round", default=0.0, least=0, below=1)
    weight_decay: float = setting("weight decay, outside the clipped norm", default=0.0, least=0)
    clip: float = setting("limit of the gradient's norm; 0: off", default=0.0, least=0)
    decay: float = setting("factor γ on the learning rate after every round", default=1.0, above=0, most=1)
    schedule: str = setting("how the rate falls over the rounds", default="exponential", choices=("exponential", "linear", "cosine"))

    def check(self) -> None:
        if self.schedule != "exponential" and self.decay != 1.0:
            raise ConfigError(f'local: decay is the factor of the exponential schedule; leave it out with schedule = "{self.schedule}".')

    def rate(self, round: int, rounds: int = 0) -> float:
        """η_t, rounds counted from 1 to T: η_0 γ^(t−1); linear η_0 (1 − (t−1)/T); cosine η_0 (1 + cos(π (t−1)/T))/2."""
        if self.schedule == "exponential":
            return self.lr * self.decay ** (round - 1)
        done = (round - 1) / rounds
        return self.lr * (1 - done if self.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2)

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
        needs: Sequence[str] = (),
    ) -> None:
        self.seed, self.device, self.dtype = seed, torch.device(device), dtype
        share = partition.validation
        self.validation = (0.2 if "validation" in needs else 0.0) if share is None else share
        self.public: Samples | None = None
        self.source: NaturalSource | None = None
        self.shares: Shares | None = None
        if isinstance(source, NaturalSource) and isinstance(partition, Natural):
            self.source = source
            self.sizes = source.sizes(seed, partition.clients)
            self.test = self._placed(source.test_set(seed, partition.clients))
            self.classes = source.classes
            self.criterion: Criterion = "cross_entropy"
            count = self._public_count(partition, needs, int(self.sizes.sum()))
            if count:
                self.public = self._placed(strangers(source, seed, partition.clients, count))
        else:
            dataset = source if isinstance(source, Dataset) else source.load(seed, partition.clients)
            self.pool, self.test = self._placed(dataset.train), self._placed(dataset.test)
            self.classes, self.criterion = dataset.classes, dataset.criterion
            labels, owner = dataset.train.y.numpy(), dataset.owner
            count = self._public_count(partition, needs, len(labels))
            if count and not dataset.classes:
                raise ConfigError(
                    "public data are taken class by class, and a regression has no classes; use a method without public data."
                )
            if count:
                taken, rest = balanced(labels, count, seed)
                self.public = Samples(self.pool.x[taken], self.pool.y[taken])
                shares = partition.split(labels[rest], seed, None if owner is None else owner[rest])
                self.shares = Shares(rest[shares.order], shares.offsets)
            else:
                self.shares = partition.split(labels, seed, owner)
            self.sizes = self.shares.sizes
        if self.validation:
            self.sizes = self.sizes - self._held_out(self.sizes)
        self.clients = len(self.sizes)
        self.eligible = np.flatnonzero(self.sizes > 0)
        if not len(self.eligible):
            raise DataError("no client holds a sample; use more data, or fewer clients (partition.clients).")
        self.mean_size = float(self.sizes[self.eligible].mean())

    def _public_count(self, partition: Partition, needs: Sequence[str], samples: int) -> int:
        """How many samples the server keeps."""
        count = partition.public
        if count is None:
            count = min(1000, samples // 10) if "public" in needs else 0
        if "public" in needs and count == 0:
            raise ConfigError("this algorithm needs public data at the server, got partition.public = 0; leave it out or set 1 or more.")
        if count >= samples:
            raise DataError(f"partition.public must be less than the {samples:,} training samples, got {count:,}; lower it.")
        return count

    def _held_out(self, sizes: Any) -> Any:
        """How many of its samples a client holds out: its share, at least one; none of a single sample."""
        return np.where(sizes >= 2, np.maximum(1, np.floor(self.validation * sizes)), 0).astype(np.int64)

    def _parts(self, own: np.ndarray[Any, Any], client: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """A client's training and validation samples; the same in every round."""
        if not self.validation:
            return own, own[:0]
        shuffled = own[generator(self.seed, "validation", 0, client).permutation(len(own))]
        held = int(self._held_out(np.array(len(own))))
        return shuffled[held:], shuffled[:held]

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
        parts = [self._parts(own, client) for client, own in zip(ids, places, strict=True)]
        train = [self._train(own, round, client, local, least) for client, (own, _) in zip(ids, parts, strict=True)]
        seen = {"gradient": [own for own, _ in parts], "validation": [held if len(held) else own for own, held in parts]}
        return Plan([int(i) for i in ids], pool, train, {name: [self._work(own, CHUNK, 1) for own in seen[name]] for name in looks})

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


def balanced(labels: np.ndarray[Any, Any], count: int, seed: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Indices of `count` samples, as equal in number by class as the data allow, and of the rest."""
    order = generator(seed, "public").permutation(len(labels))
    shuffled = labels[order]
    rank = np.zeros(len(labels), dtype=np.int64)  # how many of its class came before a sample
    for label in np.unique(shuffled):
        mine = shuffled == label
        rank[mine] = np.arange(mine.sum())
    taken = order[np.argsort(rank, kind="stable")[:count]]
    rest = np.setdiff1d(np.arange(len(labels)), taken)
    return np.sort(taken), rest


def strangers(source: NaturalSource, seed: int, clients: int, count: int) -> Samples:
    """Samples of clients that are not in the federation, drawn by its own law."""
    held: list[Samples] = []
    while sum(len(s.y) for s in held) < count:
        held.append(source.client(seed, clients + len(held)))
    return Samples(torch.cat([s.x for s in held])[:count], torch.cat([s.y for s in held])[:count])
