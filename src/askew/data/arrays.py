"""Turns a user's arrays, tensors and torch datasets into checked samples and a Dataset."""

from __future__ import annotations

import numpy as np
import torch
import torch.utils.data as torch_data
from torch import Tensor

from ..core.rng import generator
from ..errors import DataError
from .dataset import Dataset, Samples, hold_out_fifth

ArrayPair = tuple[Tensor | np.ndarray, Tensor | np.ndarray]
UserData = ArrayPair | torch_data.Dataset[tuple[Tensor, Tensor]]


def make_dataset(train: Samples, test: Samples | None, owner: np.ndarray | None = None) -> Dataset:
    """A dataset of checked samples; without a test set a fixed fifth of the training samples is held out.

    `owner` [n] is the natural client of every training sample.
    """
    if test is None:
        count = len(train.y)
        if count < 2:
            raise DataError(
                f"a test set can be held out from 2 samples or more, got {count}; "
                "give more data, or pass test = (x, y)."
            )
        order = generator(0, "test split").permutation(count)
        train, test = hold_out_fifth(train, order)
        owner = None if owner is None else np.delete(owner, order[::5])
    require_alike(train, test)
    if train.y.is_floating_point():
        return Dataset(train, test, 0, owner, criterion="squared_error")
    return Dataset(train, test, 1 + int(max(train.y.max(), test.y.max())), owner)


def require_alike(train: Samples, test: Samples) -> None:
    """Refuse training and test samples of different shapes or types."""
    for what, of_train, of_test in (
        ("inputs of shape", train.x.shape[1:], test.x.shape[1:]),
        ("inputs of type", train.x.dtype, test.x.dtype),
        ("targets of type", train.y.dtype, test.y.dtype),
    ):
        if of_train != of_test:
            raise DataError(
                f"the training data have {what} {of_train} and the test data {of_test}; "
                "both must be alike: prepare them alike."
            )


def to_samples(data: UserData, what: str, keep_bytes: bool = False) -> Samples:
    """A user's data as checked samples in our types; `what` names the data in error messages.

    Inputs become float32; signed whole numbers (tokens) become int64. With `keep_bytes` inputs keep the type they have.
    """
    if isinstance(data, torch_data.Dataset):
        data = stack_items(data, what)
    if not isinstance(data, (tuple, list)) or len(data) != 2:
        raise DataError(
            f"the {what} must be a pair (x, y) of tensors or arrays, or a map-style torch Dataset of such pairs, "
            f"got {type(data).__name__}; pass for example (x, y)."
        )
    x, y = (to_tensor(part, f"{name} of the {what}") for part, name in zip(data, "xy", strict=True))
    if x.ndim == 0 or y.ndim == 0 or len(x) != len(y) or len(x) == 0:
        raise DataError(
            f"the {what} must hold as many targets as inputs and at least one, got x of shape {list(x.shape)} and y of "
            f"shape {list(y.shape)}; give one target to each input."
        )
    if not keep_bytes:
        x = x.long() if is_whole(x) and x.dtype != torch.uint8 else x.float()
    y = y.long() if is_whole(y) else y.float()
    for part, name in ((x, "inputs"), (y, "targets")):
        if not bool(torch.isfinite(part).all()):
            raise DataError(
                f"the {name} of the {what} must be finite in float32, got NaN or infinite numbers; "
                "clean or rescale them."
            )
    if is_whole(y):
        check_labels(y, what)
    return Samples(x, y)


def check_labels(labels: Tensor, what: str) -> None:
    """Refuse class labels that are not one number a sample, counted from 0."""
    if labels.ndim != 1:
        raise DataError(
            f"the class labels of the {what} must be one number a sample, got shape {list(labels.shape)}; "
            "flatten or argmax them."
        )
    if int(labels.min()) < 0:
        raise DataError(
            f"the class labels of the {what} must be 0, 1, 2, …, got {int(labels.min())}; renumber them from 0."
        )


def is_whole(values: Tensor) -> bool:
    """Are these whole numbers by type?"""
    return not values.is_floating_point()


def to_tensor(value: object, what: str) -> Tensor:
    """A copy as a detached tensor in the host's memory; `what` names the value in error messages."""
    try:
        copy = torch.as_tensor(value).detach().to("cpu", copy=True)
    except (TypeError, ValueError, RuntimeError):
        copy = None
    if copy is None or copy.is_complex():
        raise DataError(
            f"{what} must be a tensor or an array of real numbers, got {type(value).__name__}; "
            "convert it with torch.tensor."
        )
    return copy


def stack_items(data: torch_data.Dataset[tuple[Tensor, Tensor]], what: str) -> tuple[Tensor, Tensor]:
    """The inputs and the targets of all items of a map-style torch dataset, stacked."""
    try:
        length = len(data)  # type: ignore[arg-type]
    except TypeError:
        raise DataError(
            f"the {what} must be map-style, with a length and an index, and are a stream; collect them into (x, y)."
        ) from None
    if length == 0:
        raise DataError(f"the {what} must hold at least one sample, got none; check the dataset's folder or filter.")
    items = [data[i] for i in range(length)]
    if any(not isinstance(item, (tuple, list)) or len(item) != 2 for item in items):
        raise DataError(
            f"the {what} must yield pairs (x, y), got something else; wrap the dataset so that each item is a pair."
        )
    x, y = ([to_tensor(item[side], f"{'xy'[side]} of an item of the {what}") for item in items] for side in (0, 1))
    try:
        return torch.stack(x), torch.stack(y)
    except RuntimeError:
        raise DataError(
            f"the items of the {what} must all have one shape, got several; crop, pad or resize them."
        ) from None
