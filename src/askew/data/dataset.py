"""Samples, datasets and their sources; and a user's own data made into a dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import numpy as np
import torch
import torch.utils.data as torch_data
from torch import Tensor

from ..core.rng import generator
from ..core.settings import Settings
from ..errors import DataError
from .view import InputTransform

Criterion = str | Callable[[Tensor, Tensor], Tensor]
Pair = tuple[Tensor | np.ndarray, Tensor | np.ndarray]
Given = Pair | torch_data.Dataset[tuple[Tensor, Tensor]]

MOST_POOLED = 50_000_000


class Samples(NamedTuple):
    """Inputs and what to predict from them."""

    x: Tensor  # [n, ...] float32 or int64 tokens; with a view, whatever it takes (bytes, places in a text)
    y: Tensor  # [n] int64 class labels, or float32 targets


@dataclass(frozen=True, eq=False)
class Dataset:
    """Pooled training samples and the common test set."""

    train: Samples
    test: Samples
    classes: int  # 0: not a classification
    owner: np.ndarray | None = None  # [n] the natural client of every training sample
    criterion: Criterion = "cross_entropy"  # or "squared_error", or (output [B, ..], y) -> loss of each sample [B]
    view: InputTransform | None = None  # how stored samples become inputs; None: they are inputs
    test_owner: np.ndarray | None = None  # [m] the natural client of every test sample, where each has some of its own

    def to(self, device: torch.device, dtype: torch.dtype) -> Dataset:
        """The same with its samples on a device, real inputs and targets in a precision."""
        train, test = (
            Samples(*(t.to(device, dtype if t.is_floating_point() else t.dtype) for t in s))
            for s in (self.train, self.test)
        )
        return replace(self, train=train, test=test, view=self.view and self.view.to(device))


class Source(Settings):
    """A dataset by its settings; the base of all of them."""

    natural: ClassVar[bool] = False  # True: the data come divided among clients, see NaturalSource
    idea: ClassVar[str] = ""

    @property
    def seeded(self) -> bool:
        """Do the samples depend on the seed?"""
        return True

    def load(self, seed: int, clients: int) -> Dataset:
        """The pooled data."""
        raise NotImplementedError


class NaturalSource(Source):
    """A dataset that comes divided among clients, each a function of (seed, client) alone.

    Nothing is held: a million clients cost nothing until they take part.
    """

    natural: ClassVar[bool] = True

    @property
    def classes(self) -> int:
        raise NotImplementedError

    def sizes(self, seed: int, clients: int) -> np.ndarray:
        """The number of training samples of every client, int64 [N]."""
        raise NotImplementedError

    def client(self, seed: int, client: int) -> Samples:
        """One client's training samples."""
        raise NotImplementedError

    def test_set(self, seed: int, clients: int) -> Samples:
        raise NotImplementedError

    def load(self, seed: int, clients: int) -> Dataset:
        sizes = self.sizes(seed, clients)
        numbers = int(sizes.sum()) * self.client(seed, 0).x[:1].numel()
        if numbers > MOST_POOLED:
            raise DataError(
                f"{self.called()}: pooling {clients:,} clients would hold {numbers:,} numbers, at most {MOST_POOLED:,} are allowed; "
                'set partition.name = "natural", which draws a client\'s data when it takes part, or take fewer clients.'
            )
        train = pool(self.client(seed, i) for i in range(clients))
        return Dataset(train, self.test_set(seed, clients), self.classes, np.repeat(np.arange(clients), sizes))


def pool(parts: Iterable[Samples]) -> Samples:
    """The union of several sets, in their order."""
    x, y = zip(*parts, strict=True)
    return Samples(torch.cat(x), torch.cat(y))


def from_user(data: Dataset | Given, test: Given | None = None) -> Dataset:
    """A dataset from (x, y) arrays or tensors, map-style torch datasets of (x, y) pairs, what `adapt` takes, or a ready Dataset.

    Whole-number targets are class labels, others are targets of a regression under the squared error. Inputs become float32;
    signed whole numbers (tokens) stay whole, unsigned bytes (pixels) do not. Without `test`, a fixed fifth is held out.
    """
    if isinstance(data, Dataset):
        if test is not None:
            raise DataError(
                "a ready Dataset has a test set of its own, so test must be left out; replace data.test if another is wanted."
            )
        return data
    from .adapt import adapt, kind  # which needs what is defined here

    if kind(data):
        return adapt(data, test)
    return completed(samples(data, "training data"), None if test is None else samples(test, "test data"))


def completed(train: Samples, held: Samples | None, owner: np.ndarray | None = None) -> Dataset:
    """A dataset of checked samples; a fixed fifth is held out where there is no test set."""
    if held is None:
        count = len(train.y)
        if count < 2:
            raise DataError(
                f"a test set can be held out from 2 samples or more, got {count}; give more data, or pass test = (x, y)."
            )
        order = generator(0, "test split").permutation(count)
        train, held = hold_out(train, order)
        owner = None if owner is None else np.delete(owner, order[::5])
    alike = (
        ("inputs of shape", train.x.shape[1:], held.x.shape[1:]),
        ("inputs of type", train.x.dtype, held.x.dtype),
        ("targets of type", train.y.dtype, held.y.dtype),
    )
    for what, ours, theirs in alike:
        if ours != theirs:
            raise DataError(
                f"the training data have {what} {ours} and the test data {theirs}; both must be alike: prepare them alike."
            )
    if train.y.is_floating_point():
        return Dataset(train, held, 0, owner, criterion="squared_error")
    return Dataset(train, held, 1 + int(max(train.y.max(), held.y.max())), owner)


def samples(given: Given, what: str, as_bytes: bool = False) -> Samples:
    """What a user gave, checked and in our types; inputs stay bytes for a view on request."""
    if isinstance(given, torch_data.Dataset):
        given = stacked(given, what)
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise DataError(
            f"the {what} must be a pair (x, y) of tensors or arrays, or a map-style torch Dataset of such pairs, "
            f"got {type(given).__name__}; pass for example (x, y)."
        )
    x, y = (tensor(part, f"{name} of the {what}") for part, name in zip(given, "xy", strict=True))
    if x.ndim == 0 or y.ndim == 0 or len(x) != len(y) or len(x) == 0:
        raise DataError(
            f"the {what} must hold as many targets as inputs and at least one, got x of shape {list(x.shape)} and y of shape "
            f"{list(y.shape)}; give one target to each input."
        )
    if not as_bytes:
        x = x.long() if whole(x) and x.dtype != torch.uint8 else x.float()
    y = y.long() if whole(y) else y.float()
    for part, name in ((x, "inputs"), (y, "targets")):
        if not bool(torch.isfinite(part).all()):
            raise DataError(
                f"the {name} of the {what} must be finite in float32, got NaN or infinite numbers; clean or rescale them."
            )
    if whole(y) and y.ndim != 1:
        raise DataError(
            f"the class labels of the {what} must be one number a sample, got shape {list(y.shape)}; flatten or argmax them."
        )
    if whole(y) and int(y.min()) < 0:
        raise DataError(f"the class labels of the {what} must be 0, 1, 2, …, got {int(y.min())}; renumber them from 0.")
    return Samples(x, y)


def whole(values: Tensor) -> bool:
    """Are these whole numbers by type?"""
    return not values.is_floating_point()


def tensor(value: object, what: str) -> Tensor:
    """A detached tensor of its own, in the host's memory."""
    try:
        made = torch.as_tensor(value).detach().to("cpu", copy=True)
    except (TypeError, ValueError, RuntimeError):
        made = None
    if made is None or made.is_complex():
        kind = type(value).__name__
        raise DataError(
            f"{what} must be a tensor or an array of real numbers, got {kind}; convert it with torch.tensor."
        )
    return made


def stacked(given: torch_data.Dataset[tuple[Tensor, Tensor]], what: str) -> tuple[Tensor, Tensor]:
    """All pairs of a map-style torch dataset."""
    try:
        length = len(given)  # type: ignore[arg-type]
    except TypeError:
        raise DataError(
            f"the {what} must be map-style, with a length and an index, and are a stream; collect them into (x, y)."
        ) from None
    if length == 0:
        raise DataError(f"the {what} must hold at least one sample, got none; check the dataset's folder or filter.")
    pairs = [given[i] for i in range(length)]
    if any(not isinstance(pair, (tuple, list)) or len(pair) != 2 for pair in pairs):
        raise DataError(
            f"the {what} must yield pairs (x, y), got something else; wrap the dataset so that each item is a pair."
        )
    x, y = ([tensor(pair[side], f"{'xy'[side]} of an item of the {what}") for pair in pairs] for side in (0, 1))
    try:
        return torch.stack(x), torch.stack(y)
    except RuntimeError:
        raise DataError(
            f"the items of the {what} must all have one shape, got several; crop, pad or resize them."
        ) from None


def hold_out(given: Samples, order: np.ndarray) -> tuple[Samples, Samples]:
    """Training and test set: every fifth sample in this order is held out."""
    held = torch.zeros(len(order), dtype=torch.bool)
    held[torch.from_numpy(order[::5].copy())] = True
    return Samples(given.x[~held], given.y[~held]), Samples(given.x[held], given.y[held])
