"""Turns a user's arrays, tensors and torch datasets into checked samples and a Dataset."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.utils.data as torch_data
from torch import Tensor

from ..core.rng import generator
from ..errors import DataError
from .dataset import Dataset, Samples, hold_out_fifth, hold_out_share, plain_array, remark_on_tests
from .names import number_labels, number_names, plain_numbers, spelling_remark, to_names

ArrayPair = tuple[Tensor | np.ndarray, Tensor | np.ndarray]
UserData = ArrayPair | torch_data.Dataset[tuple[Tensor, Tensor]]

CHANNELS = (1, 3)  # of grey and of coloured images
FEW = 100  # different targets; of fewer whole ones it is likely that classes are meant
LEAST_SIDE = 4  # pixels; what is smaller is no image


class RawSamples(NamedTuple):
    """A user's samples before clients and classes are numbered."""

    x: Tensor  # [n, ...]
    y: Tensor | np.ndarray  # [n] numbers, or an array of names
    owner: np.ndarray | None = None  # [n] the client of every sample, by name or number

    @classmethod
    def joined(cls, parts: Sequence[RawSamples], names: Sequence[str], what: str) -> RawSamples:
        """The samples of several clients, each owned by the client of its name."""
        first = parts[0]
        for name, part in zip(names, parts, strict=True):
            for side, one, other in (("inputs", part.x, first.x), ("targets", part.y, first.y)):
                kinds = [f"{v.dtype} of shape {list(v.shape[1:])}" for v in (one, other) if isinstance(v, Tensor)]
                if isinstance(one, Tensor) != isinstance(other, Tensor) or len(set(kinds)) > 1:
                    raise DataError(
                        f"the clients' {side} must be alike, and those of client {name!r} of the {what} are not like "
                        f"those of client {names[0]!r} ({', '.join(kinds) or 'names and numbers'}); prepare them alike."
                    )
        y = [part.y for part in parts]
        targets = torch.cat(y) if isinstance(first.y, Tensor) else np.concatenate(y)  # type: ignore[arg-type]
        owner = np.repeat(np.array(names), [len(part.x) for part in parts])
        return cls(torch.cat([part.x for part in parts]), targets, owner)


def make_dataset(
    train: Samples,
    test: Samples | None,
    owner: np.ndarray | None = None,
    class_names: tuple[str, ...] | None = None,
    *,
    renumber: bool = True,
) -> Dataset:
    """A dataset of checked samples; without a test set a fixed fifth of the training samples is held out.

    `owner` [n] is the natural client of every training sample. With `class_names` the labels are numbers of these.
    Without `renumber` labels are classes as they are: one client of several may lack any of them.
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
    return label_classes(train, test, class_names, renumber=renumber, owner=owner)


def make_user_dataset(train: RawSamples, test: RawSamples | None) -> Dataset:
    """A dataset of a user's samples, whose clients and classes may have names.

    Without a test set a fixed fifth is held out, where there are owners of each client's samples.
    """
    targets, names = number_targets(train.y, None if test is None else test.y)
    samples = [Samples(part.x, y) for part, y in zip((train, test), targets, strict=False) if part is not None]
    if train.owner is None:
        return make_dataset(samples[0], samples[1] if test is not None else None, None, names)
    test_owner = None if test is None else test.owner
    return make_owned_dataset(samples[0], samples[1] if test is not None else None, train.owner, names, test_owner)


def make_owned_dataset(
    train: Samples,
    test: Samples | None,
    owner: np.ndarray,
    class_names: tuple[str, ...] | None,
    test_owner: np.ndarray | None = None,
) -> Dataset:
    """A dataset whose samples have owners, by name or number; without a test set a fifth of each one's is held out."""
    numbers, client_names = number_names(owner)
    if test is None:
        held = hold_out_share(numbers, 0.2, generator(0, "test split"))
        if not held.any():
            raise DataError("no client has samples enough to hold some out for testing; pass test = (x, y).")
        train, test = train.select(torch.from_numpy(~held)), train.select(torch.from_numpy(held))
        numbers, of_test = numbers[~held], numbers[held]
    else:
        of_test = numbers_among(client_names, test_owner)
    return label_classes(train, test, class_names, owner=numbers, test_owner=of_test, client_names=client_names)


def numbers_among(names: Sequence[str], owner: np.ndarray | None) -> np.ndarray | None:
    """The clients of test samples by number; None where they have none, or one that does not train."""
    if owner is None or not set(map(str, np.unique(owner))) <= set(names):
        return None
    place = {name: k for k, name in enumerate(names)}
    return np.array([place[str(name)] for name in owner], dtype=np.int64)


def number_targets(
    train: Tensor | np.ndarray, test: Tensor | np.ndarray | None
) -> tuple[list[Tensor], tuple[str, ...] | None]:
    """The targets of the training and the test data as numbers, and the classes' names where they have some."""
    given = [train] if test is None else [train, test]
    if all(isinstance(part, Tensor) for part in given):
        return [part for part in given if isinstance(part, Tensor)], None
    if any(isinstance(part, Tensor) for part in given):
        raise DataError(
            "the labels of the training data and of the test data must both be names or both be numbers; "
            "prepare them alike."
        )
    numbers, names = number_names(np.concatenate([np.asarray(part) for part in given]))
    return list(torch.split(torch.from_numpy(numbers), [len(part) for part in given])), names


def label_classes(
    train: Samples, test: Samples, names: tuple[str, ...] | None, renumber: bool = True, **more: Any
) -> Dataset:
    """The dataset of these samples; without names, labels that do not begin at 0 are counted anew, with a remark."""
    require_alike(train, test)
    if train.y.is_floating_point():
        remarks: tuple[str, ...] = ()
        if bool((train.y == train.y.round()).all()) and len(train.y) > len(np.unique(train.y.numpy())) < FEW:
            remarks = (
                "the targets are whole numbers of a real type, so this is a regression; for classes pass y as whole "
                f"numbers, as in {'y.argmax(1)' if train.y[0].numel() > 1 else 'y.astype(int)'}.",
            )
        return Dataset(train, test, 0, criterion="squared_error", remarks=remarks, **more)
    remark = spelling_remark(names or (), "classes")
    if names is None and renumber:
        both, names, remark = number_labels(torch.cat([train.y, test.y]).numpy())
        y = torch.split(torch.from_numpy(both), [len(train.y), len(test.y)])
        train, test = Samples(train.x, y[0]), Samples(test.x, y[1])
    elif names and (int(torch.cat([train.y, test.y]).min()) < 0 or int(max(train.y.max(), test.y.max())) >= len(names)):
        raise DataError(
            f"the class labels must be 0 to {len(names) - 1}, the numbers of the {len(names)} classes, got "
            f"{int(train.y.min())} to {int(max(train.y.max(), test.y.max()))}; drop samples without a label."
        )
    classes = len(names) if names else 1 + int(max(train.y.max(), test.y.max()))
    remarks = (remark, spelling_remark(more.get("client_names") or (), "clients"), remark_on_tests(train, test, names))
    return Dataset(train, test, classes, class_names=names, remarks=tuple(filter(None, remarks)), **more)


def require_alike(train: Samples, test: Samples) -> None:
    """Refuse training and test samples of different shapes or types."""
    for what, of_train, of_test in (
        ("inputs of shape", list(train.x.shape[1:]), list(test.x.shape[1:])),
        ("inputs of type", train.x.dtype, test.x.dtype),
        ("targets of type", train.y.dtype, test.y.dtype),
    ):
        require_same(what, of_train, of_test)


def require_same(what: str, of_train: object, of_test: object) -> None:
    """Refuse training and test samples that differ in something."""
    if of_train != of_test:
        raise DataError(
            f"the training data have {what} {of_train} and the test data {of_test}; "
            "both must be alike: prepare them alike."
        )


def to_samples(data: UserData, what: str, keep_bytes: bool = False) -> Samples:
    """A user's data as checked samples in our types; `what` names the data in error messages.

    Inputs become float32; signed whole numbers (tokens) become int64. With `keep_bytes` inputs keep the type they have.
    """
    raw = to_raw_samples(data, what, keep_bytes)
    if not isinstance(raw.y, Tensor):
        raise DataError(f"y of the {what} must be numbers, got names; number the classes first.")
    if is_whole(raw.y) and int(raw.y.min()) < 0:
        raise DataError(
            f"the class labels of the {what} must be 0, 1, 2, …, got {int(raw.y.min())}; renumber them from 0."
        )
    return Samples(raw.x, raw.y)


def to_raw_samples(data: Any, what: str, keep_bytes: bool = False) -> RawSamples:
    """A user's pair (x, y), triple (x, y, owner) or torch dataset of pairs, checked; labels and owners may be names."""
    if isinstance(data, torch_data.Dataset):
        data = stack_items(data, what)
    if isinstance(data, (tuple, list)) and len(data) in (2, 3) and isinstance(data[1], torch_data.Dataset):
        raise DataError(
            f"the {what} are {len(data)} datasets; pass a list of them for one a client, "
            "or data = the first and test = the second."
        )
    if hasattr(data, "dataset") and hasattr(data, "batch_size"):
        raise DataError(f"the {what} are a DataLoader, and a run makes its own batches; pass loader.dataset.")
    if not isinstance(data, (tuple, list)) or len(data) not in (2, 3):
        raise DataError(
            f"the {what} must be a pair (x, y) of tensors or arrays, a triple (x, y, owner), a map-style torch Dataset "
            f"of pairs, a DataFrame, or a dictionary or list with such data for every client, "
            f"got {type(data).__name__}; pass for example (x, y)."
        )
    if any(isinstance(part, (tuple, list)) and len(part) == 2 and hasattr(part[0], "shape") for part in data):
        raise DataError(
            f"the {what} are {len(data)} pairs; pass a list of tuples, [(x, y), …], for one a client, "
            "or data = the first and test = the second."
        )
    x, y = to_tensor(data[0], f"x of the {what}"), to_targets(data[1], what)
    owner = None if len(data) == 2 else to_names(data[2], f"owners of the {what}")
    if x.ndim == 0 or y.ndim == 0 or len(x) != len(y) or len(x) == 0:
        raise DataError(
            f"the {what} must hold as many targets as inputs and at least one, got x of shape {list(x.shape)} and y of "
            f"shape {list(y.shape)}; give one target to each input."
        )
    if owner is not None and len(owner) != len(x):
        raise DataError(
            f"the {what} must have one owner a sample, got {len(owner)} owners for {len(x)} samples; "
            "give the client of every sample."
        )
    refuse_channels_last(tuple(x.shape), what)
    if not keep_bytes:
        x = x.long() if is_whole(x) and x.dtype not in (torch.uint8, torch.bool) else x.float()
    require_finite(x, f"inputs of the {what}")
    if isinstance(y, Tensor):
        y = y.long() if is_whole(y) else y.float()
        require_finite(y, f"targets of the {what}")
        if is_whole(y) and y.ndim != 1:
            raise DataError(
                f"the class labels of the {what} must be one number a sample, got shape {list(y.shape)}; "
                "flatten or argmax them."
            )
    return RawSamples(x, y, owner)


def to_targets(value: object, what: str) -> Tensor | np.ndarray:
    """A user's targets: numbers as a tensor, names as an array of texts."""
    if not isinstance(value, Tensor):
        try:
            array = plain_array(value, f"y of the {what}")
        except ValueError:
            array = np.zeros(0)
        if array.dtype.kind in "USOu" and array.ndim == 1:
            value = array = plain_numbers(array)
        if array.dtype.kind in "USO" and array.ndim == 1:
            return to_names(array, f"labels of the {what}")
    return to_tensor(value, f"y of the {what}")


def require_finite(values: Tensor, what: str) -> None:
    """Refuse numbers of which one is NaN or infinite; the sentence says which."""
    finite = torch.isfinite(values)
    if bool(finite.all()):
        return
    sample, *place = (~finite).nonzero()[0].tolist()
    where = f" at {place}" if place else ""
    raise DataError(
        f"the {what} must be finite in float32, got NaN or infinite numbers, the first in sample {sample}{where}; "
        "clean or rescale them."
    )


def refuse_channels_last(shape: tuple[int, ...], what: str) -> None:
    """Refuse images whose channels come last."""
    n, *rest = shape
    if len(rest) != 3 or rest[2] not in CHANNELS or rest[0] in CHANNELS or min(rest[:2]) < LEAST_SIDE:
        return
    raise DataError(
        f"the images of the {what} have their channels last, shape {list(shape)}, and networks take "
        f"{[n, rest[2], *rest[:2]]}; pass x.transpose(0, 3, 1, 2) of an array, x.permute(0, 3, 1, 2) of a tensor."
    )


def is_whole(values: Tensor) -> bool:
    """Are these whole numbers by type?"""
    return not values.is_floating_point()


def to_tensor(value: object, what: str) -> Tensor:
    """A copy as a detached tensor in the host's memory; `what` names the value in error messages."""
    try:
        if hasattr(value, "to_numpy"):  # a table or a column of pandas
            value = value.to_numpy()
        if isinstance(value, np.ndarray):
            value = plain_array(value, what)
        copy = torch.as_tensor(value).detach().to("cpu", copy=True)
    except (TypeError, ValueError, RuntimeError):
        copy = None
    if copy is None and (text := first_text(value)) is not None:
        raise DataError(f"{what} must be numbers, got the text {text!r}; turn texts into numbers first.")
    if copy is None and type(value).__module__.startswith("PIL."):
        raise DataError(f"{what} is a picture, not yet a tensor; give the dataset transform=ToTensor(), or the like.")
    if copy is None or copy.is_complex():
        raise DataError(
            f"{what} must be a tensor or an array of real numbers, got {type(value).__name__}; "
            f"{'convert it with x.astype(float)' if isinstance(value, np.ndarray) else 'convert it with torch.tensor'}."
        )
    return copy


def stack_items(data: torch_data.Dataset[Any], what: str) -> tuple[Tensor, Tensor | np.ndarray]:
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
    x = [to_tensor(item[0], f"x of item {k} of the {what}") for k, item in enumerate(items)]
    if any(isinstance(item[1], str) for item in items):
        y: Tensor | np.ndarray | None = to_names([item[1] for item in items], f"labels of the {what}")
    else:
        y = None
        numbers = [to_tensor(item[1], f"y of item {k} of the {what}") for k, item in enumerate(items)]
    try:
        return torch.stack(x), torch.stack(numbers) if y is None else y
    except RuntimeError:
        shapes = dict.fromkeys(str(list(part.shape)) for part in x)
        raise DataError(
            f"the items of the {what} must all have one shape, got several"
            f"{': ' + ' and '.join([*shapes][:2]) if len(shapes) > 1 else ''}; crop, pad or resize them."
        ) from None


def first_text(value: object) -> str | None:
    """The first text in a list or array of texts, else None."""
    if isinstance(value, (list, tuple)):
        return next((text for each in value if (text := each if isinstance(each, str) else first_text(each))), None)
    array = value
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "USO":
        return None
    return next((str(each) for each in array.ravel().tolist() if isinstance(each, str)), None)
