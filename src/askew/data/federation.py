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
from .partition import Assignment, FromFile, Natural, Partition
from .shift import shifted
from .view import InputTransform, marks

CHUNK = 1024  # samples in one chunk of a look
KEPT = 8  # plans
SHOWN = 500  # clients whose labels are kept for pictures


class LocalSettings(Settings):
    """Local training."""

    title = "local"
    epochs: int = setting("passes over the client's samples; steps > 0 replaces them", default=1, least=1, most=100_000)
    steps: int = setting("exact number of local steps; 0: by epochs", default=0, least=0, most=10_000_000)
    batch: int = setting("batch size; 0: all of a client's samples in one batch", default=32, least=0)
    drop_last: bool = setting(
        "leave out an epoch's last batch if it is short, unless it is the only one", default=False
    )
    lr: float = setting("learning rate of the first round", default=0.1, above=0, most=1e6, hint="try 0.1 or 0.01.")
    momentum: float = setting("heavy-ball momentum, begun anew each round", default=0.0, least=0, below=1)
    weight_decay: float = setting("weight decay, outside the clipped norm", default=0.0, least=0)
    clip: float = setting("limit of the gradient's norm; 0: off", default=0.0, least=0)
    decay: float = setting("factor γ on the learning rate after every round", default=1.0, above=0, most=1)
    schedule: str = setting(
        "how the rate falls over the rounds", default="exponential", choices=("exponential", "linear", "cosine")
    )

    def check(self) -> None:
        if self.schedule != "exponential" and self.decay != 1.0:
            raise ConfigError(
                f'local: decay is the factor of the exponential schedule; leave it out with schedule = "{self.schedule}".'
            )

    def rate(self, round: int, rounds: int = 0) -> float:
        """η_t, rounds counted from 1 to T: η_0 γ^(t−1); linear η_0 (1 − (t−1)/T); cosine η_0 (1 + cos(π (t−1)/T))/2."""
        if self.schedule == "exponential":
            return self.lr * self.decay ** (round - 1)
        done = (round - 1) / rounds
        return self.lr * (1 - done if self.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2)

    @property
    def clip_limit(self) -> float:
        return self.clip or math.inf


class SampleIndex(NamedTuple):
    """Samples to gather, any shape of index, and the marks of these uses where chance plays a part in how they are seen."""

    places: Tensor
    marks: Tensor | None = None

    def at(self, index: Any) -> SampleIndex:
        return SampleIndex(self.places[index], None if self.marks is None else self.marks[index])


class ClientBatches(NamedTuple):
    """One client's samples in the order it uses them, on the host; cuts[k]:cuts[k+1] is its k-th batch or chunk."""

    places: Tensor
    cuts: list[int]
    marks: Tensor | None = None

    @property
    def batches(self) -> int:
        return len(self.cuts) - 1

    @property
    def samples(self) -> int:
        return self.cuts[-1]

    def lengths(self) -> list[int]:
        return [b - a for a, b in pairwise(self.cuts)]

    def pick(self, a: int, b: int) -> SampleIndex:
        return SampleIndex(self.places, self.marks).at(slice(a, b))

    def to(self, device: torch.device) -> ClientBatches:
        """The same on the device."""
        return self._replace(places=self.places.to(device), marks=None if self.marks is None else self.marks.to(device))

    def first(self, batches: int) -> ClientBatches:
        """The beginning of the work."""
        cuts = self.cuts[: batches + 1]
        places, marks = self.pick(0, cuts[-1])
        return ClientBatches(places, cuts, marks)


class RoundPlan(NamedTuple):
    """One round: the pool of samples and each participant's work."""

    ids: list[int]
    pool: Samples
    train: list[ClientBatches]
    looks: dict[str, list[ClientBatches]]
    view: InputTransform | None = None
    dtype: torch.dtype = torch.float32

    def only(self, rows: Sequence[int]) -> RoundPlan:
        """The plan of some of the participants."""
        looks = {name: [works[i] for i in rows] for name, works in self.looks.items()}
        return self._replace(ids=[self.ids[i] for i in rows], train=[self.train[i] for i in rows], looks=looks)

    def batch(self, pick: SampleIndex, weight: Tensor | None = None) -> Batch:
        """Gather samples and see them as the network does."""
        x, y = (
            t.index_select(0, pick.places.flatten()).view(*pick.places.shape, *t.shape[1:])
            for t in (self.pool.x, self.pool.y)
        )
        return Batch(self.view(x, self.dtype, pick.marks) if self.view else x, y, weight)


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
        own = seed if partition.seed is None else partition.seed
        share = partition.validation
        self.validation = (0.2 if "validation" in needs else 0.0) if share is None else share
        self.public: Samples | None = None
        self.source: NaturalSource | None = None
        self.shares: Assignment | None = None
        self.view: InputTransform | None = None
        self.test_owner: np.ndarray[Any, Any] | None = None  # whose each test sample is, where clients are natural
        self.shift = (
            (partition.clients, partition.noise, partition.rotation, own)
            if partition.noise or partition.rotation
            else None
        )
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
            dataset = (source if isinstance(source, Dataset) else source.load(seed, partition.clients)).to(
                self.device, dtype
            )
            self.pool, self.test = dataset.train, dataset.test
            self.classes, self.criterion = dataset.classes, dataset.criterion
            self.view = dataset.view
            self.test_owner = dataset.test_owner if isinstance(partition, Natural) else None
            labels, owner = dataset.train.y.cpu().numpy(), dataset.owner
            count = self._public_count(partition, needs, len(labels))
            if count and not dataset.classes:
                raise ConfigError(
                    "public data are taken class by class, and a regression has no classes; use a method without public data."
                )
            if count:
                taken, rest = balanced(labels, count, own)
                self.public = Samples(self.pool.x[taken], self.pool.y[taken])
                if isinstance(partition, FromFile):  # whose indices are those of all samples
                    self.shares = partition.split(labels, own, owner).without(taken)
                else:
                    shares = partition.split(labels[rest], own, None if owner is None else owner[rest])
                    self.shares = Assignment(rest[shares.order], shares.offsets)
            else:
                self.shares = partition.split(labels, own, owner)
            self.sizes = self.shares.sizes
            if self.shift:
                self.pool = Samples(self._shifted_pool(self.shares), self.pool.y)
        if self.validation:
            self.sizes = self.sizes - self._held_out(self.sizes)
        self.clients = len(self.sizes)
        self.eligible = np.flatnonzero(self.sizes > 0)
        if not len(self.eligible):
            raise DataError("no client holds a sample; use more data, or fewer clients (partition.clients).")
        self.mean_size = float(self.sizes[self.eligible].mean())
        self.made: dict[Any, RoundPlan] = {}  # the latest plans, which runs that share a federation share

    def _shifted_pool(self, shares: Assignment) -> Tensor:
        """All samples, those of each client shifted by its own measure."""
        assert self.shift is not None
        if len(np.unique(shares.order)) < len(shares.order):
            raise DataError(
                "partition.noise and partition.rotation need clients that share no sample; set partition.overlap = false."
            )
        x, owner = self.pool.x.clone(), np.repeat(np.arange(shares.clients), shares.sizes)
        x[shares.order] = shifted(x[shares.order], owner, *self.shift)
        return x

    def _public_count(self, partition: Partition, needs: Sequence[str], samples: int) -> int:
        """How many samples the server keeps."""
        count = partition.public
        if count is None:
            count = min(1000, samples // 10) if "public" in needs else 0
        if "public" in needs and count == 0:
            raise ConfigError(
                "this algorithm needs public data at the server, got partition.public = 0; leave it out or set 1 or more."
            )
        if count >= samples:
            raise DataError(
                f"partition.public must be less than the {samples:,} training samples, got {count:,}; lower it."
            )
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
        stored = tuple(self.test.x.shape[1:])
        return self.view.shape(stored) if self.view else stored

    def inputs(self, x: Tensor, marks: Tensor | None = None) -> Tensor:
        """Stored samples as the network sees them; without marks, as in a test."""
        return self.view(x, self.dtype, marks) if self.view else x

    def gather(self, ids: Sequence[int]) -> tuple[Samples, list[np.ndarray[Any, Any]]]:
        """A pool of samples and the places of each of these clients' samples in it."""
        if self.shares is not None:
            return self.pool, [self.shares.client(i) for i in ids]
        assert self.source is not None
        if not len(ids):
            return Samples(self.test.x[:0], self.test.y[:0]), []
        held = [self.source.client(self.seed, i) for i in ids]
        if self.shift:
            held = [
                Samples(shifted(s.x, np.full(len(s.y), i), *self.shift), s.y) for i, s in zip(ids, held, strict=True)
            ]
        bounds = np.cumsum([0] + [len(s.y) for s in held])
        pool = Samples(torch.cat([s.x for s in held]), torch.cat([s.y for s in held]))
        return self._placed(pool), [np.arange(a, b) for a, b in pairwise(bounds)]

    def plan(
        self,
        ids: Sequence[int],
        round: int,
        local: LocalSettings,
        looks: Sequence[str] = (),
        least: int = 1,
        share: Sequence[float] = (),
    ) -> RoundPlan:
        """The round's batches. `least` 2 skips batches of one sample, which batch norm cannot take; `share` is how much of
        its work each client does, everything if left out.
        """
        key = (
            tuple(ids),
            round,
            local.epochs,
            local.steps,
            local.batch,
            local.drop_last,
            tuple(looks),
            least,
            tuple(share),
        )
        if key not in self.made:
            while len(self.made) >= KEPT:
                self.made.pop(next(iter(self.made)))
            self.made[key] = self._plan(ids, round, local, looks, least, share)
        return self.made[key]

    def _plan(
        self,
        ids: Sequence[int],
        round: int,
        local: LocalSettings,
        looks: Sequence[str],
        least: int,
        share: Sequence[float],
    ) -> RoundPlan:
        pool, places = self.gather(ids)
        parts = [self._parts(own, client) for client, own in zip(ids, places, strict=True)]
        train = [self._train(own, round, client, local, least) for client, (own, _) in zip(ids, parts, strict=True)]
        if any(part < 1 for part in share):
            train = [work.first(math.ceil(part * work.batches)) for work, part in zip(train, share, strict=True)]
        seen = {
            "gradient": [own for own, _ in parts],
            "validation": [held if len(held) else own for own, held in parts],
        }
        glances = {name: [self._work(own, CHUNK, 1) for own in seen[name]] for name in looks}
        return RoundPlan([int(i) for i in ids], pool, train, glances, self.view, self.dtype)

    def _train(
        self, own: np.ndarray[Any, Any], round: int, client: int, local: LocalSettings, least: int
    ) -> ClientBatches:
        rng, n = generator(self.seed, "batches", round, client), len(own)
        size = local.batch or n
        least = max(least, min(size, n)) if local.drop_last else least
        per_epoch = sum(1 for a in range(0, n, size) if min(size, n - a) >= least)
        epochs = math.ceil(local.steps / max(per_epoch, 1)) if local.steps else local.epochs
        orders = [own[rng.permutation(n)] for _ in range(epochs)]
        work = self._work(orders[0] if epochs == 1 else np.concatenate(orders), size, least, n)
        work = work.first(local.steps) if local.steps else work
        if self.view and self.view.random:
            work = work._replace(marks=marks(self.seed, len(work.places), round, client))
        return work

    def _work(self, order: np.ndarray[Any, Any], size: int, least: int, epoch: int | None = None) -> ClientBatches:
        """Cut an order into batches that never reach over the end of an epoch."""
        epoch = epoch or max(len(order), 1)
        starts = [a for e in range(0, len(order), epoch) for a in range(e, min(e + epoch, len(order)), size)]
        ends = [*starts[1:], len(order)]
        if any(b - a < least for a, b in zip(starts, ends, strict=True)):
            kept = [(a, b) for a, b in zip(starts, ends, strict=True) if b - a >= least]
            order = np.concatenate([order[a:b] for a, b in kept]) if kept else order[:0]
            ends = np.cumsum([b - a for a, b in kept]).tolist()
        return ClientBatches(torch.from_numpy(np.ascontiguousarray(order)), [0, *ends])

    def labels(self) -> dict[str, Any]:
        """Who holds what, for pictures: sizes and label counts of the first clients."""
        shown = min(self.clients, SHOWN)
        told: dict[str, Any] = {
            "clients": self.clients,
            "classes": self.classes,
            "empty": self.clients - len(self.eligible),
        }
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
