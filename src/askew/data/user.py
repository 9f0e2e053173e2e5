"""Turns whatever data a user has, arrays, tables or another library's datasets, into a Dataset."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.utils.data as torch_data

from ..core.settings import is_askews, require_arguments
from ..core.task import CRITERIA
from ..errors import DataError
from .adapt import adapt, library_type
from .arrays import RawSamples, make_user_dataset, require_finite, require_same, to_raw_samples
from .dataset import Dataset, Samples, Source
from .encode import from_frame
from .names import is_counted, listed, number_names, to_names
from .tables import FrameSettings, is_frame

SPLITS = {"train", "training", "test", "testing", "val", "valid", "validation", "dev"}  # and not clients


def from_user(data: Any, test: Any = None, *, client: str = "", label: str = "") -> Dataset:
    """A dataset from whatever data a user has.

    That is (x, y) or (x, y, owner) of arrays or tensors, map-style torch datasets of (x, y) pairs, a dictionary
    {client: data} or a list with the data of each client, a DataFrame whose columns `client` and `label` are named,
    what `adapt` takes, or a ready Dataset. Owners and labels may be names. Whole-number targets are class labels,
    others are targets of a regression under the squared error. Inputs become float32; signed whole numbers (tokens)
    stay whole, unsigned bytes (pixels) do not. Without `test`, a fixed fifth is held out.
    """
    if is_frame(data):
        return from_frame(data, test, FrameSettings(client=client, label=label))
    if isinstance(data, Dataset):
        if test is not None:
            raise DataError(
                "a ready Dataset has a test set of its own, so test must be left out; "
                "replace data.test if another is wanted."
            )
        return checked_dataset(data)
    if library_type(data):
        return adapt(data, test, y=label or None, client=client or None)
    clients = clients_of(data)
    if clients and any(is_frame(part) for part in clients.values()):
        return from_frames(clients, test, label)
    if client or label:
        raise DataError(
            f"client and label name columns of a table, and the data are {type(data).__name__}; "
            "pass a DataFrame, or (x, y, owner)."
        )
    train = raw_samples(data, "training data")
    return make_user_dataset(train, None if test is None else raw_samples(test, "test data"))


def from_frames(clients: Mapping[str, Any], test: Any, label: str) -> Dataset:
    """A dataset from a DataFrame for each client, which have the same columns."""
    import pandas

    column = "client"
    while any(column in frame.columns for frame in clients.values() if is_frame(frame)):
        column += "_"
    for name, frame in clients.items():
        if not is_frame(frame):
            raise DataError(f"client {name!r} has {type(frame).__name__}, and others a DataFrame; prepare them alike.")
    first = next(iter(clients))
    for name, frame in clients.items():
        if odd := sorted(map(str, set(frame.columns) ^ set(clients[first].columns))):
            raise DataError(
                f"the tables of the clients {first!r} and {name!r} must have the same columns, and one of them alone "
                f"has {listed(odd)}; add it to both, or leave it out."
            )
    joined = pandas.concat([frame.assign(**{column: name}) for name, frame in clients.items()], ignore_index=True)
    kinds = {title: "category" for frame in clients.values() for title in frame.select_dtypes("category").columns}
    joined = joined.astype(kinds)  # which concat forgets where clients have different categories
    return from_frame(joined, test, FrameSettings(client=column, label=label))


def is_samples(value: object) -> bool:
    """Do these look like one client's data: a pair of arrays, a torch dataset, or a table?"""
    if isinstance(value, (tuple, list)):
        return len(value) == 2 and not any(isinstance(part, (str, int, float, bool)) for part in value)
    return isinstance(value, torch_data.Dataset) or is_frame(value)


def is_divided(data: object) -> bool:
    """Is this a dictionary of clients' data, and not a table of settings?"""
    return isinstance(data, Mapping) and any(is_samples(value) for value in data.values())


def clients_of(data: object) -> dict[str, Any] | None:
    """The data of each client by name, from a dictionary or from a list; None where they are not given so."""
    if isinstance(data, Mapping):
        names = [str(name) for name in data]
        if len(set(names)) < len(names):
            raise DataError("two clients of the dictionary have one name; give every client a name of its own.")
        if len(names) > 1 and {name.lower() for name in names} <= SPLITS:
            raise DataError(
                f"the dictionary's keys {listed(names)} are no clients but splits; "
                "pass one as data and the other as test."
            )
        return dict(zip(names, data.values(), strict=True))
    one_each = isinstance(data, list) and all(
        isinstance(part, torch_data.Dataset) or is_frame(part) or (isinstance(part, tuple) and is_samples(part))
        for part in data
    )
    if not one_each or not isinstance(data, list) or not data:
        return None
    return {str(k): part for k, part in enumerate(data)}


def raw_samples(data: Any, what: str) -> RawSamples:
    """A user's samples; a dictionary or list of clients' data gives every sample its owner."""
    clients = clients_of(data)
    if clients is None:
        return to_raw_samples(data, what)
    if not clients:
        raise DataError(f"the {what} are a dictionary without clients; give at least one.")
    parts = [to_raw_samples(part, f"{what} of client {name!r}") for name, part in clients.items()]
    if any(part.owner is not None for part in parts):
        raise DataError(f"the {what} name owners twice, by their client and by themselves; pass (x, y) for each.")
    return RawSamples.joined(parts, list(clients), what)


# a ready dataset ------------------------------------------------------------------------------------------------


def load_checked(source: Source, seed: int, clients: int) -> Dataset:
    """The data of a source, after the check of a ready dataset if the source is a user's own."""
    require_arguments(source, "load")
    data = source.load(seed, clients)
    if is_askews(source):
        return data
    if not isinstance(data, Dataset):
        raise DataError(
            f"load() of the dataset {source.display_name()} must return an askew.Dataset, got {type(data).__name__}; "
            "end it with return askew.Dataset(train, test, classes)."
        )
    return checked_dataset(data)


def checked_dataset(data: Dataset) -> Dataset:
    """A ready dataset after a check; owners that are names, or not 0 … N − 1, are numbered."""
    check_kind(data)
    for what, samples in (("training", data.train), ("test", data.test)):
        check_samples(samples, what, data)
    of_train, of_test = (tuple(samples.x.shape[1:]) for samples in (data.train, data.test))
    if data.transform:
        of_train, of_test = data.transform.shape(of_train), data.transform.shape(of_test)
    require_same("inputs of shape", of_train, of_test)
    if data.owner is None:
        return data
    owner = to_names(data.owner, "owners of the Dataset")
    if len(owner) != len(data.train.y):
        raise DataError(
            f"the Dataset must have one owner for each of its {len(data.train.y)} training samples, got {len(owner)}; "
            "give the client of every sample."
        )
    if owner.dtype.kind == "i" and int(owner.min(initial=0)) < 0:
        raise DataError(f"the owners of the Dataset must be ≥ 0 or names, got {int(owner.min())}; renumber them.")
    if is_counted(owner):
        return data
    numbers, names = number_names(owner)
    place = {name: k for k, name in enumerate(names)}
    test_owner = data.test_owner
    if test_owner is not None:
        test_owner = np.array([place.get(str(name), -1) for name in to_names(test_owner, "owners of the test samples")])
        test_owner = None if (test_owner < 0).any() else test_owner
    kept = data.client_names
    if kept and owner.dtype.kind == "i" and int(owner.max()) < len(kept):
        names = tuple(kept[int(name)] for name in names)
    return dataclasses.replace(data, owner=numbers, test_owner=test_owner, client_names=names)


def check_kind(data: Dataset) -> None:
    """Refuse classes and a criterion of a ready dataset that are none, or do not go together."""
    if not isinstance(data.classes, (int, np.integer)) or data.classes < 0:
        raise DataError(
            f"classes of the Dataset must be the number of classes, or 0 for a regression, got {data.classes!r}; "
            "count the labels."
        )
    if not callable(data.criterion) and data.criterion not in CRITERIA:
        raise DataError(
            f"the criterion of the Dataset must be {' or '.join(map(repr, CRITERIA))}, or a function of the output and "
            f"the targets, got {data.criterion!r}; correct it."
        )
    if not data.classes and data.criterion == "cross_entropy" and not data.train.y.is_floating_point():
        raise DataError(
            "the Dataset has labels, whole numbers, and classes = 0, which is for a regression; set classes to the "
            'number of classes, or criterion = "squared_error".'
        )


def check_samples(samples: Samples, what: str, data: Dataset) -> None:
    """Refuse samples of a ready dataset that cannot be trained on."""
    x, y = samples
    if not len(x) or len(x) != len(y):
        raise DataError(
            f"the {what} samples of the Dataset must have as many targets as inputs and at least one, got {len(x)} "
            f"inputs and {len(y)} targets; give one target to each input."
        )
    if not data.transform:
        require_finite(x, f"{what} inputs of the Dataset")
    if not callable(data.criterion):  # a user's own may pass over targets that are missing
        require_finite(y, f"{what} targets of the Dataset")
    if not data.classes or y.is_floating_point() or data.criterion != "cross_entropy":
        if data.classes and y.is_floating_point() and data.criterion == "cross_entropy":
            raise DataError(
                f"the {what} labels of the Dataset must be whole numbers from 0 to {data.classes - 1}, got "
                f"{str(y.dtype).removeprefix('torch.')}; pass y.long(), or classes = 0 for a regression."
            )
        return
    wrong = torch.nonzero((y < 0) | (y >= data.classes))
    if len(wrong):
        at = tuple(wrong[0].tolist())
        raise DataError(
            f"the {what} labels of the Dataset must be 0 to {data.classes - 1}, as classes = {data.classes} says, got "
            f"{int(y[at])} for sample {at[0]}; count labels from 0, or set classes to their number."
        )
