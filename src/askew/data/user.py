"""Turns whatever data a user has, arrays or another library's datasets, into a Dataset."""

from __future__ import annotations

from ..errors import DataError
from .adapt import adapt, library_type
from .arrays import UserData, make_dataset, to_samples
from .dataset import Dataset


def from_user(data: Dataset | UserData, test: UserData | None = None) -> Dataset:
    """A dataset from whatever data a user has.

    That is (x, y) arrays or tensors, map-style torch datasets of (x, y) pairs, what `adapt` takes, or a ready Dataset.
    Whole-number targets are class labels, others are targets of a regression under the squared error. Inputs become
    float32; signed whole numbers (tokens) stay whole, unsigned bytes (pixels) do not. Without `test`, a fixed fifth is
    held out.
    """
    if isinstance(data, Dataset):
        if test is not None:
            raise DataError(
                "a ready Dataset has a test set of its own, so test must be left out; "
                "replace data.test if another is wanted."
            )
        return data
    if library_type(data):
        return adapt(data, test)
    return make_dataset(to_samples(data, "training data"), None if test is None else to_samples(test, "test data"))
