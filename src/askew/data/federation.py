"""Federation: which client holds which samples, and the plan of batches that every engine consumes.

A plan is a function of (seed, round, client) alone: all algorithms and engines see the same batches in the same order.
Data that come divided among clients are drawn when a client takes part, so a million clients cost nothing at rest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..core.memory import require_memory
from ..core.rng import generator
from ..core.settings import Settings, setting
from ..core.types import Batch
from ..errors import ConfigError, DataError
from .assignment import Assignment
from .dataset import Criterion, Dataset, NaturalSource, Samples, Source, concatenate
from .partition import Natural, Partition
from .partition_file import FromFile
from .shift import FeatureShift, shift_inputs
from .transform import InputTransform, sample_draws
from .user import load_checked

CHUNK = 1024  # samples in one chunk of a look
CACHED_PLANS = 8  # plans of the latest rounds that are kept
CACHED_USES = 2**24  # uses of a sample in one plan; of larger plans only the latest is kept
CLIENT_BYTES = 48  # of a client, about, while clients are divided and chosen: measured were 24 (iid) to 54 (natural)
USE_BYTES, BATCH_BYTES = 24, 120  # of a plan while it is made, for each use of a sample and for each batch
SHOWN = 500  # clients whose label counts are stored for pictures
DEFAULT_VALIDATION = 0.2  # fraction of a client's samples, where the algorithm needs a validation part
DEFAULT_PUBLIC = 1000  # samples at most, and at most a tenth of all, where the algorithm needs a public set


class LocalSettings(Settings):
    """Local training."""

    title = "local"
    epochs: int = setting("passes over the client's samples; steps > 0 replaces them", default=1, least=1, most=100_000)
    steps: int = setting("exact number of local steps; 0: by epochs", default=0, least=0, most=10_000_000)
    batch: int = setting("batch size; 0: all of a client's samples in one batch", default=32, least=0)
    drop_last: bool = setting(
        "leave out an epoch's last batch if it is short, unless it is the only one", default=False
    )
    lr: float = setting(
        "learning rate of the first round",
        default=0.1,
        above=0,
        most=1e6,
        hint="try 0.1 or 0.01.",
        tries=(0.01, 0.03, 0.1, 0.3, 1.0),
    )
    momentum: float = setting("heavy-ball momentum, begun anew each round", default=0.0, least=0, below=1)
    weight_decay: float = setting("weight decay, outside the clipped norm", default=0.0, least=0)
    clip: float = setting("limit of the gradient's norm; 0: off", default=0.0, least=0)
    decay: float = setting("factor γ on the learning rate after every round", default=1.0, above=0, most=1)
    schedule: str = setting(
        "rate of round t of T: lr·decay^(t−1), lr·(1 − (t−1)/T), lr·(1 + cos(π(t−1)/T))/2, or lr/√(1 + (t−1)/10)",
        default="exponential",
        choices=("exponential", "linear", "cosine", "inverse_sqrt"),
        hint="for a constant rate leave it out.",
    )

    def check(self) -> None:
        if self.schedule != "exponential" and self.decay != 1.0:
            raise ConfigError(
                "local: decay is the factor of the exponential schedule; "
                f'leave it out with schedule = "{self.schedule}".'
            )

    def rate(self, round: int, rounds: int = 0) -> float:
        """The learning rate η_t of round t = 1 … T.

        exponential: η_0 γ^(t−1);  linear: η_0 (1 − (t−1)/T);  cosine: η_0 (1 + cos(π (t−1)/T))/2;
        inverse_sqrt: η_0 / √(1 + (t−1)/10)
        """
        if self.schedule == "exponential":
            return self.lr * self.decay ** (round - 1)
        if self.schedule == "inverse_sqrt":
            return self.lr / math.sqrt(1 + (round - 1) / 10)
        done = (round - 1) / rounds
        return self.lr * (1 - done if self.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2)

    @property
    def clip_limit(self) -> float:
        """The largest norm of a gradient that is not clipped; infinity if clipping is off."""
        return self.clip or math.inf


class SampleIndex(NamedTuple):
    """Places of samples in a pool, in any shape, and the draws of these uses where the transform is random."""

    places: Tensor
    draws: Tensor | None = None

    def at(self, index: Any) -> SampleIndex:
        """The part of both that an index selects, whatever tensors can be indexed by."""
        return SampleIndex(self.places[index], None if self.draws is None else self.draws[index])


class ClientBatches(NamedTuple):
    """One client's samples in the order it uses them, on the host; cuts[k]:cuts[k+1] is its k-th batch or chunk."""

    places: Tensor  # int64, places in the plan's pool
    cuts: list[int]
    draws: Tensor | None = None  # int64, one for each use of a sample, where the transform is random

    @property
    def batches(self) -> int:
        """The number of batches."""
        return len(self.cuts) - 1

    @property
    def samples(self) -> int:
        """The number of uses of a sample in all batches."""
        return self.cuts[-1]

    def lengths(self) -> list[int]:
        """The number of samples in every batch."""
        return [b - a for a, b in pairwise(self.cuts)]

    def slice(self, a: int, b: int) -> SampleIndex:
        """The uses a … b − 1."""
        return SampleIndex(self.places, self.draws).at(slice(a, b))

    def to(self, device: torch.device) -> ClientBatches:
        """The same on a device."""
        return self._replace(places=self.places.to(device), draws=None if self.draws is None else self.draws.to(device))

    def first(self, batches: int) -> ClientBatches:
        """The first batches alone."""
        cuts = self.cuts[: batches + 1]
        places, draws = self.slice(0, cuts[-1])
        return ClientBatches(places, cuts, draws)


class RoundPlan(NamedTuple):
    """One round: the pool of samples and each participant's batches, in the order of `ids`."""

    ids: list[int]
    pool: Samples
    train: list[ClientBatches]
    looks: dict[str, list[ClientBatches]]  # by name, the chunks of a pass over a client's samples without training
    transform: InputTransform | None = None
    dtype: torch.dtype = torch.float32

    def only(self, rows: Sequence[int]) -> RoundPlan:
        """The plan of some of the participants, by their rows in this plan."""
        looks = {name: [clients[i] for i in rows] for name, clients in self.looks.items()}
        return self._replace(ids=[self.ids[i] for i in rows], train=[self.train[i] for i in rows], looks=looks)

    def batch(self, index: SampleIndex, weight: Tensor | None = None) -> Batch:
        """The samples at these places as a batch of network inputs."""
        x, y = (
            t.index_select(0, index.places.flatten()).view(*index.places.shape, *t.shape[1:])
            for t in (self.pool.x, self.pool.y)
        )
        return Batch(self.transform(x, self.dtype, index.draws) if self.transform else x, y, weight)


class Federation:
    """Clients 0…N−1, their samples, and a common test set.

    A client's training samples are either places in the `pool` (then there is an `assignment`) or drawn from a natural
    `source` whenever the client takes part (then there is no `pool`).
    """

    pool: Samples  # of all clients; the samples that are nobody's are in it too
    assignment: Assignment | None  # which client holds which places in the pool
    source: NaturalSource | None
    clients: int  # N
    sizes: np.ndarray  # [N] int64, training samples of every client, those held out for validation not counted
    eligible: np.ndarray  # int64, the clients that have training samples
    mean_size: float  # training samples of an eligible client
    test: Samples
    test_owner: np.ndarray | None  # [m] the client of every test sample, where clients are natural and have some
    public: Samples | None  # the server's own
    classes: int  # 0: not a classification
    criterion: Criterion
    transform: InputTransform | None
    shift: FeatureShift | None
    validation: float  # fraction of a client's samples that is held out
    has_targets = True  # are the targets of the test set real ones?
    divided: bool = False  # do the data say to whom every sample belongs?
    client_names: tuple[str, ...] | None = None  # of the natural clients
    class_names: tuple[str, ...] | None = None
    remarks: tuple[str, ...] = ()  # of the dataset
    validation_counts: np.ndarray | None = None  # [N] samples of every client for validation, where some are held out
    flipped: frozenset[int] = frozenset()  # natural clients whose labels are flipped whenever they are drawn

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
        self.assignment = self.source = self.test_owner = self.public = self.transform = self.shift = None
        self.validation = validation_fraction(partition, needs)
        require_memory(
            CLIENT_BYTES * partition.clients, f"partition.clients = {partition.clients:,}", "lower partition.clients"
        )
        partition_seed = seed if partition.seed is None else partition.seed
        if partition.noise or partition.rotation:
            self.shift = FeatureShift(partition.clients, partition.noise, partition.rotation, partition_seed)
        if isinstance(source, NaturalSource) and isinstance(partition, Natural):
            self._draw_natural_clients(source, partition, needs)
        else:
            dataset = source if isinstance(source, Dataset) else load_checked(source, seed, partition.clients)
            self._divide_pooled_data(dataset.to(self.device, dtype), partition, partition_seed, needs)
        if self.validation:
            self.validation_counts = validation_sizes(self.sizes, self.validation)
            self.sizes = self.sizes - self.validation_counts
        self.clients = len(self.sizes)
        self.eligible = np.flatnonzero(self.sizes > 0)
        self.eligible.setflags(write=False)  # a participation rule gets the array itself
        if not len(self.eligible):
            raise DataError("no client holds a sample; use more data, or fewer clients (partition.clients).")
        self.mean_size = float(self.sizes[self.eligible].mean())
        self.plans: dict[Any, RoundPlan] = {}  # the latest; runs that share a federation share them

    def _draw_natural_clients(self, source: NaturalSource, partition: Natural, needs: Sequence[str]) -> None:
        """Let clients draw their samples when they take part; public samples are drawn from further clients."""
        self.source = source
        self.sizes = source.sizes(self.seed, partition.clients)
        self.test = source.test_set(self.seed, partition.clients).to(self.device, self.dtype)
        self.classes, self.criterion = source.classes, "cross_entropy"
        public = public_count(partition, needs, int(self.sizes.sum()))
        if public:
            others = samples_of_further_clients(source, self.seed, partition.clients, public)
            self.public = others.to(self.device, self.dtype)

    def _divide_pooled_data(self, dataset: Dataset, partition: Partition, seed: int, needs: Sequence[str]) -> None:
        """Take the public samples out of the training data and divide the others among the clients."""
        self.pool, self.test = dataset.train, dataset.test
        self.classes, self.criterion, self.transform = dataset.classes, dataset.criterion, dataset.transform
        natural = isinstance(partition, Natural)
        self.test_owner = dataset.test_owner if natural else None
        self.client_names = dataset.client_names if natural else None
        self.divided, self.class_names, self.remarks = dataset.owner is not None, dataset.class_names, dataset.remarks
        public = public_count(partition, needs, len(dataset.train.y))
        if public and not dataset.classes:
            raise ConfigError(
                "public data are taken class by class, and a regression has no classes; "
                "use a method without public data."
            )
        labels, owner = dataset.train.y.cpu().numpy(), dataset.owner
        if public:
            chosen = choose_balanced(labels, public, seed)
            self.public = self.pool.select(chosen)
            self.assignment = split_without(partition, labels, seed, owner, chosen)
        else:
            self.assignment = partition.divide(labels, seed, owner)
        self.sizes = self.assignment.sizes
        if self.shift:
            self.pool = Samples(self._shift_pool(self.assignment, self.shift), self.pool.y)

    def _shift_pool(self, assignment: Assignment, shift: FeatureShift) -> Tensor:
        """The inputs of the pool, those of each client shifted by its own amount."""
        if len(np.unique(assignment.order)) < len(assignment.order):
            raise DataError(
                "partition.noise and partition.rotation need clients that share no sample; "
                "set partition.overlap = false."
            )
        x = self.pool.x.clone()
        x[assignment.order] = shift_inputs(x[assignment.order], assignment.owners, *shift)
        return x

    def flip_labels(self, clients: Sequence[int]) -> None:
        """Let these clients hold the labels K − 1 − y instead of y: an attack on the training data."""
        if not self.classes:
            raise ConfigError("attack: label_flip needs classes, and a regression has none; use another attack.")
        if self.assignment is None:
            self.flipped = frozenset(clients)
            return
        order = self.assignment.order
        if len(np.unique(order)) < len(order):
            raise DataError("attack: label_flip needs clients that share no sample; set partition.overlap = false.")
        held = torch.from_numpy(np.concatenate([self.assignment.client(i) for i in clients]))
        y = self.pool.y.clone()
        y[held] = self.classes - 1 - y[held]
        self.pool = Samples(self.pool.x, y)

    def _split_validation(self, places: np.ndarray, client: int) -> tuple[np.ndarray, np.ndarray]:
        """A client's training and validation samples; the same in every round."""
        if not self.validation:
            return places, places[:0]
        shuffled = places[generator(self.seed, "validation", 0, client).permutation(len(places))]
        count = int(validation_sizes(np.array(len(places)), self.validation))
        return shuffled[count:], shuffled[:count]

    def training_samples(self, ids: Sequence[int]) -> tuple[Samples, list[np.ndarray]]:
        """As `gather`, without the samples that are held out for validation."""
        pool, places = self.gather(ids)
        return pool, [self._split_validation(own, client)[0] for own, client in zip(places, ids, strict=True)]

    def held_out(self) -> Samples:
        """The samples that clients hold out for validation and nobody trains on; of clients that draw theirs, those of
        the first ones.
        """
        ids = self.eligible if self.assignment is not None else self.eligible[:SHOWN]
        pool, places = self.gather(ids.tolist())
        parts = [self._split_validation(own, client) for own, client in zip(places, ids.tolist(), strict=True)]
        trained, held = (np.concatenate(each) for each in zip(*parts, strict=True))
        held = np.setdiff1d(held, trained)  # clients that share samples may train on what others hold out
        if not len(held):
            raise DataError(
                "no sample is held out that nobody trains on; take fewer clients, or set partition.overlap = false."
            )
        return pool.select(held)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        stored = tuple(self.test.x.shape[1:])
        return self.transform.shape(stored) if self.transform else stored

    def inputs(self, x: Tensor, draws: Tensor | None = None) -> Tensor:
        """Stored samples as network inputs; without draws, as in a test."""
        return self.transform(x, self.dtype, draws) if self.transform else x

    def gather(self, ids: Sequence[int]) -> tuple[Samples, list[np.ndarray]]:
        """A pool of samples, and the places in it of each of these clients' samples."""
        if self.assignment is not None:
            return self.pool, [self.assignment.client(i) for i in ids]
        assert self.source is not None
        if not len(ids):
            return self.test.select(slice(0)), []
        held = [self.source.client(self.seed, i) for i in ids]
        if self.flipped:
            held = [
                Samples(samples.x, self.classes - 1 - samples.y) if i in self.flipped else samples
                for i, samples in zip(ids, held, strict=True)
            ]
        if self.shift:
            held = [
                Samples(shift_inputs(samples.x, np.full(len(samples.y), i), *self.shift), samples.y)
                for i, samples in zip(ids, held, strict=True)
            ]
        bounds = np.cumsum([0] + [len(samples.y) for samples in held])
        pool = concatenate(held).to(self.device, self.dtype)
        return pool, [np.arange(a, b) for a, b in pairwise(bounds)]

    def plan(
        self,
        ids: Sequence[int],
        round: int,
        local: LocalSettings,
        looks: Sequence[str] = (),
        smallest_batch: int = 1,
        share: Sequence[float] = (),
    ) -> RoundPlan:
        """The batches of these clients in a round; the latest plans are kept.

        Batches of fewer than `smallest_batch` samples are left out (2 where there is batch norm, which cannot take one
        sample). `share` is the fraction of its batches that each client trains on, all if left out.
        """
        how = local.epochs, local.steps, local.batch, local.drop_last
        key = (tuple(ids), round, how, tuple(looks), smallest_batch, tuple(share))
        if key not in self.plans:
            most = CACHED_PLANS if self._check_size(ids, local) <= CACHED_USES else 1
            while len(self.plans) >= most:
                self.plans.pop(next(iter(self.plans)))
            self.plans[key] = self._make_plan(ids, round, local, looks, smallest_batch, share)
        return self.plans[key]

    def longest_batches(self, local: LocalSettings) -> dict[str, int]:
        """By name the samples that the longest batch of any client can have, in training and in a look."""
        most = int(self.sizes.max(initial=1))
        looks = {name: int(self.looked_at(name, self.eligible).max()) for name in ("gradient", "validation")}
        return {"train": min(local.batch or most, most)} | {
            name: min(longest, CHUNK) for name, longest in looks.items()
        }

    def _check_size(self, ids: Sequence[int], local: LocalSettings) -> int:
        """How often a sample is used in a round's plan, about; refuse a plan that does not fit in memory."""
        sizes = self.sizes[list(ids)]
        lengths = np.minimum(local.batch or sizes, sizes)
        steps = local.steps or -(-sizes // np.maximum(lengths, 1)) * local.epochs
        uses, batches = int((steps * lengths).sum()), int(np.sum(steps * np.minimum(sizes, 1)))
        require_memory(
            2 * (USE_BYTES * uses + BATCH_BYTES * batches),  # the next round's plan is made while this one is used
            f"the batches of a round with {len(ids):,} participants",
            "lower local.steps, local.epochs, local.batch or the number of participants",
        )
        return uses

    def _make_plan(
        self,
        ids: Sequence[int],
        round: int,
        local: LocalSettings,
        looks: Sequence[str],
        smallest_batch: int,
        share: Sequence[float],
    ) -> RoundPlan:
        """A new plan; the arguments are those of `plan`."""
        pool, places = self.gather(ids)
        parts = [self._split_validation(held, client) for client, held in zip(ids, places, strict=True)]
        train = [
            self._training_batches(training, round, client, local, smallest_batch)
            for client, (training, _) in zip(ids, parts, strict=True)
        ]
        if any(fraction < 1 for fraction in share):
            train = [
                batches.first(math.ceil(fraction * batches.batches))
                for batches, fraction in zip(train, share, strict=True)
            ]
        looked_at = {
            "gradient": [training for training, _ in parts],
            "validation": [validation if len(validation) else training for training, validation in parts],
        }
        chunks = {name: [cut_batches(held, CHUNK, 1) for held in looked_at[name]] for name in looks}
        return RoundPlan([int(i) for i in ids], pool, train, chunks, self.transform, self.dtype)

    def _training_batches(
        self, places: np.ndarray, round: int, client: int, local: LocalSettings, smallest_batch: int
    ) -> ClientBatches:
        """A client's batches in a round: every epoch is a new random order of its samples."""
        rng, n = generator(self.seed, "batches", round, client), len(places)
        size = local.batch or n
        smallest_batch = max(smallest_batch, min(size, n)) if local.drop_last else smallest_batch
        full, rest = divmod(n, size) if n else (0, 0)
        per_epoch = (full if size >= smallest_batch else 0) + (0 < rest >= smallest_batch)
        epochs = math.ceil(local.steps / max(per_epoch, 1)) if local.steps else local.epochs
        orders = [places[rng.permutation(n)] for _ in range(epochs)]
        batches = cut_batches(orders[0] if epochs == 1 else np.concatenate(orders), size, smallest_batch, n)
        batches = batches.first(local.steps) if local.steps else batches
        if self.transform and self.transform.random:
            batches = batches._replace(draws=sample_draws(self.seed, len(batches.places), round, client))
        return batches

    def planned_work(
        self,
        ids: Sequence[int] | np.ndarray,
        local: LocalSettings,
        smallest_batch: int = 1,
        share: Sequence[float] = (),
    ) -> tuple[np.ndarray, np.ndarray]:
        """How many batches and how many samples each of these clients trains on in a round, without making the plan."""
        n = self.sizes[np.asarray(ids, dtype=np.int64)]
        size = np.maximum(local.batch or n, 1)
        fewest = np.maximum(smallest_batch, np.minimum(size, n)) if local.drop_last else smallest_batch
        full, rest = np.where(size >= fewest, n // size, 0), np.where(n % size >= fewest, n % size, 0)
        per_epoch = full + (rest > 0)
        batches = np.minimum(per_epoch, 1) * local.steps if local.steps else per_epoch * local.epochs
        if any(fraction < 1 for fraction in share):
            batches = np.ceil(np.asarray(share) * batches).astype(np.int64)
        epochs, last = np.divmod(batches, np.maximum(per_epoch, 1))  # of an epoch that is cut off, only full batches
        return batches, epochs * (full * size + rest) + last * size

    def looked_at(self, name: str, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """How many samples of each of these clients a look reads: "gradient", or "validation" if some are held out."""
        chosen = np.asarray(ids, dtype=np.int64)
        training = self.sizes[chosen]
        if name != "validation" or self.validation_counts is None:
            return training
        held = self.validation_counts[chosen]
        return np.where(held > 0, held, training)

    def label_counts(self, ids: Sequence[int]) -> Tensor:
        """How many training samples of each class these clients hold, [C, K] in the type of the model."""
        if not self.classes:
            return torch.zeros(len(ids), 0, device=self.device, dtype=self.dtype)
        pool, places = self.training_samples(ids)
        y = pool.y.cpu().numpy()
        counts = [np.bincount(y[own], minlength=self.classes) for own in places]
        return torch.from_numpy(np.array(counts).reshape(len(ids), self.classes)).to(self.device, self.dtype)

    def size_numbers(self) -> dict[str, Any]:
        """How many clients, classes and samples there are, and the sizes of the first clients."""
        shown = min(self.clients, SHOWN)
        return {
            "clients": self.clients,
            "classes": self.classes,
            "empty": self.clients - len(self.eligible),
            "shown": shown,
            "sizes": self.sizes[:shown].tolist(),
            "samples": int(self.sizes.sum()),
        }

    def labels(self) -> dict[str, Any]:
        """Sizes and label counts of the first clients, for pictures and for the stored page."""
        page = self.size_numbers()
        shown = page["shown"]
        if self.classes:
            pool, places = self.training_samples(range(shown))
            y = pool.y.cpu().numpy()
            page["labels"] = [np.bincount(y[held], minlength=self.classes).tolist() for held in places]
        if self.client_names:
            page["client_names"] = list(self.client_names[:shown])
        if self.class_names:
            page["class_names"] = list(self.class_names)
        return page


# validation and public samples ----------------------------------------------------------------------------------


def validation_fraction(partition: Partition, needs: Sequence[str]) -> float:
    """The fraction of a client's samples that is held out for validation."""
    if partition.validation is not None:
        return partition.validation
    return DEFAULT_VALIDATION if "validation" in needs else 0.0


def validation_sizes(sizes: np.ndarray, fraction: float) -> np.ndarray:
    """How many of its samples each client holds out: this fraction, at least one; none of a single sample."""
    return np.where(sizes >= 2, np.maximum(1, np.floor(fraction * sizes)), 0).astype(np.int64)


def public_count(partition: Partition, needs: Sequence[str], samples: int) -> int:
    """How many samples the server has, of so many training samples."""
    count = partition.public
    if count is None:
        count = min(DEFAULT_PUBLIC, samples // 10) if "public" in needs else 0
    if "public" in needs and count == 0:
        raise ConfigError(
            "this algorithm needs public data at the server, got partition.public = 0; leave it out or set 1 or more."
        )
    if count >= samples:
        raise DataError(
            f"partition.public must be less than the {samples:,} training samples, got {count:,}; lower it."
        )
    return count


def choose_balanced(labels: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Sorted indices of `count` random samples, as equal in number by class as the data allow."""
    order = generator(seed, "public").permutation(len(labels))
    shuffled = labels[order]
    rank = np.zeros(len(labels), dtype=np.int64)  # how many of its class came before a sample
    for label in np.unique(shuffled):
        of_class = shuffled == label
        rank[of_class] = np.arange(of_class.sum())
    return np.sort(order[np.argsort(rank, kind="stable")[:count]])


def split_without(
    partition: Partition, labels: np.ndarray, seed: int, owner: np.ndarray | None, chosen: np.ndarray
) -> Assignment:
    """Who holds which samples, where nobody holds the `chosen` ones."""
    if isinstance(partition, FromFile):  # whose indices are those of all samples
        return partition.divide(labels, seed, owner).without(chosen)
    remaining = np.setdiff1d(np.arange(len(labels)), chosen)
    assignment = partition.divide(labels[remaining], seed, None if owner is None else owner[remaining])
    return Assignment(remaining[assignment.order], assignment.offsets)


def samples_of_further_clients(source: NaturalSource, seed: int, clients: int, count: int) -> Samples:
    """`count` samples of the clients N, N + 1, …, which are drawn as the others are and not in the federation."""
    drawn: list[Samples] = []
    while sum(len(samples.y) for samples in drawn) < count:
        drawn.append(source.client(seed, clients + len(drawn)))
    return concatenate(drawn).select(slice(count))


# batches --------------------------------------------------------------------------------------------------------


def cut_batches(order: np.ndarray, size: int, smallest_batch: int, epoch: int | None = None) -> ClientBatches:
    """Samples in this order cut into batches of `size`; batches of fewer than `smallest_batch` samples are left out.

    `order` may hold several epochs of `epoch` samples each; no batch reaches over the end of an epoch.
    """
    epoch = epoch or max(len(order), 1)
    starts = [a for e in range(0, len(order), epoch) for a in range(e, min(e + epoch, len(order)), size)]
    ends = [*starts[1:], len(order)]
    if smallest_batch > 1 and any(b - a < smallest_batch for a, b in zip(starts, ends, strict=True)):
        large = [(a, b) for a, b in zip(starts, ends, strict=True) if b - a >= smallest_batch]
        order = np.concatenate([order[a:b] for a, b in large]) if large else order[:0]
        ends = np.cumsum([b - a for a, b in large]).tolist()
    return ClientBatches(torch.from_numpy(np.ascontiguousarray(order)), [0, *ends])
