"""The basic types of the data: samples, a dataset of them, and the sources that datasets are loaded from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..core.settings import Settings
from ..errors import DataError
from .transform import InputTransform

Criterion = str | Callable[[Tensor, Tensor], Tensor]

MAX_POOLED_VALUES = 50_000_000  # numbers in all inputs together, where clients that are drawn one by one are pooled
NO_LABELS = (
    "the Dataset has no classes, and its targets are neither labels nor shares of classes that sum to 1, so that the "
    'squared error is used; write criterion="squared_error", or a function of your own.'
)


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


def as_tensors(samples: Any, what: str) -> Samples:
    """Samples whose two parts are tensors, and whole-number labels int64, which torch's losses take; arrays are
    converted, `what` names the samples in error messages.
    """
    if isinstance(samples, tuple) and len(samples) == 2 and all(isinstance(part, Tensor) for part in samples):
        x, y = samples
        return Samples(x, y if y.is_floating_point() or y.is_complex() else y.long())
    try:
        x, y = (torch.as_tensor(plain_array(part, f"the {what} samples")) for part in samples)
    except (TypeError, ValueError, RuntimeError):
        raise DataError(
            f"the {what} samples of a Dataset must be askew.Samples(x, y) of tensors or arrays of numbers; "
            "hand (x, y) with labels that are names to askew.run as they are."
        ) from None
    is_kept = x.is_floating_point() or x.dtype == torch.uint8  # bytes may be what a transform takes
    return Samples(x if is_kept else x.long(), y if y.is_floating_point() else y.long())


def plain_array(value: Any, what: str) -> np.ndarray:
    """An array as torch takes it: not flipped, in this machine's byte order, writable; masked values are refused."""
    if np.ma.is_masked(value):
        raise DataError(
            f"{what} must have a value everywhere, and some are masked; fill them in by .filled(…), or drop their rows."
        )
    array = np.asarray(value)
    return np.require(array, array.dtype.newbyteorder("="), ["C", "W"])


def hold_out_share(owner: np.ndarray, share: float, rng: np.random.Generator) -> np.ndarray:
    """Which samples are held out for testing, bool [n]: this share of all, of each client as near to it as can be.

    Samples are shuffled and ordered by client; the k-th is held out where ⌊(k + 1)·share⌋ > ⌊k·share⌋. A client keeps
    at least one sample.
    """
    count = len(owner)
    order = rng.permutation(count)
    order = order[np.argsort(owner[order], kind="stable")]
    steps = np.floor(np.arange(count + 1) * share + 1e-9)
    held = np.zeros(count, dtype=bool)
    held[order] = np.diff(steps) > 0
    kept = np.bincount(owner[~held], minlength=int(owner.max(initial=-1)) + 1)
    alone = held & (kept[owner] == 0)
    _, first = np.unique(np.where(alone, owner, -1), return_index=True)  # one sample of each client that kept none
    held[first[alone[first]]] = False
    return held


def is_labels(y: Tensor) -> bool:
    """Does the cross-entropy take such targets: are they labels, or shares of classes that sum to 1?"""
    if not y.is_floating_point():
        return True
    shares = y.dim() > 1 and y.shape[1] > 1 and bool((y >= 0).all())
    return shares and torch.allclose(y.sum(1), torch.ones_like(y.sum(1)), atol=1e-3)


@dataclass(frozen=True, eq=False)
class Dataset:
    """Pooled training samples and the common test set."""

    train: Samples  # those of all clients
    test: Samples  # the common test set
    classes: int  # 0: not a classification
    owner: np.ndarray | None = None  # [n] the natural client of every training sample
    # or "squared_error", as targets of a regression have it, or (output [B, ..], y) -> loss of each sample [B]
    criterion: Criterion = "cross_entropy"
    transform: InputTransform | None = None  # turns stored samples into inputs; None: they are inputs
    test_owner: np.ndarray | None = None  # [m] the natural client of every test sample, where each has some of its own
    client_names: tuple[str, ...] | None = None  # of the natural clients 0, 1, 2, …
    class_names: tuple[str, ...] | None = None  # of the classes 0, 1, 2, …
    remarks: tuple[str, ...] = ()  # sentences on what was done to the data, for whoever runs them

    def __post_init__(self) -> None:
        object.__setattr__(self, "train", as_tensors(self.train, "training"))
        object.__setattr__(self, "test", as_tensors(self.test, "test"))
        if not self.classes and self.criterion == "cross_entropy" and not is_labels(self.train.y):
            object.__setattr__(self, "criterion", "squared_error")
            object.__setattr__(self, "remarks", (*self.remarks, NO_LABELS))

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

    @property
    def owners(self) -> int:
        """The number of clients that the data come divided among; 0 where they do not, or where any number will do."""
        return 0

    @property
    def regression(self) -> bool:
        """Are there no classes? Where that is not known before the samples are loaded, no."""
        return False

    @property
    def default_network(self) -> str:
        """The name of the network that is trained where none is named; empty: the usual one."""
        return ""

    def load(self, seed: int, clients: int) -> Dataset:
        """The pooled data."""
        raise NotImplementedError


class NaturalSource(Source):
    """A dataset that comes divided among clients, each a function of (seed, client) alone.

    Nothing is kept in memory: a million clients cost nothing until they take part.
    """

    natural: ClassVar[bool] = True  # every client has samples of its own

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


def remark_on_tests(train: Samples, test: Samples, names: Sequence[str] | None, classes: bool = True) -> str:
    """What makes the accuracy on test samples mean little; empty if nothing is seen."""
    if len(train.y) == len(test.y) and torch.equal(train.y, test.y) and torch.equal(train.x, test.x):
        return "the test samples are the training samples, so that the accuracy says little about new ones."
    unseen = np.setdiff1d(test.y.numpy(), train.y.numpy()).tolist() if classes else []
    if not unseen:
        return ""
    shown = ", ".join(str(names[label] if names else label) for label in unseen[:3]) + (", …" if unseen[3:] else "")
    share = float(torch.isin(test.y, torch.tensor(unseen)).double().mean())
    return f"no training sample has the label {shown}, which {100 * share:.3g}% of the test samples have."
