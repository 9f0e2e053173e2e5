"""Datasets of the Hugging Face hub and of flwr-datasets as ours: columns of images or numbers, read in chunks.

`askew.run(data=…)` calls `adapt` by itself; call it to name columns. Types are told by their names, so that neither library need
be installed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ..errors import DataError
from .dataset import Dataset, Samples, completed, samples
from .view import PixelTransform

HUB = {
    "datasets.arrow_dataset.Dataset": "table",
    "datasets.dataset_dict.DatasetDict": "splits",
    "datasets.dataset_dict.IterableDatasetDict": "stream",
    "datasets.iterable_dataset.IterableDataset": "stream",
    "flwr_datasets.federated_dataset.FederatedDataset": "federated",
    "flwr_datasets.partitioner.partitioner.Partitioner": "partitioner",
}
INPUTS = ("image", "img", "x", "pixel_values", "features", "input_ids")
TARGETS = ("label", "labels", "fine_label", "y", "target")
TESTS = ("test", "validation", "valid")
TEXT = "tokenise text first: inputs are images or numbers"
NAME_IT = "name it, as in askew.data.adapt.adapt(data"
CHUNK = 256  # rows decoded at once

Names = str | Sequence[str] | None


def kind(data: object) -> str:
    """Which of the libraries' types this is; empty: none of them."""
    names = (f"{base.__module__}.{base.__qualname__}" for base in type(data).__mro__)
    return next((HUB[name] for name in names if name in HUB), "")


def adapt(data: Any, test: Any = None, *, x: Names = None, y: str | None = None) -> Dataset:
    """A dataset from a datasets.Dataset or DatasetDict, or from a FederatedDataset or partitioner of flwr-datasets.

    The columns are found by their types and usual names unless `x` and `y` name them; several columns of one number each make
    one input. The split to train on is train, or the only one; the test set is `test`, or the split test, validation or valid,
    or a fixed fifth. Images stay bytes and are seen as numbers in 0..1; columns of numbers follow the rules for arrays.
    """
    match kind(data):
        case "table":
            return assembled([data], test, x, y)
        case "splits":
            split = training(data, 'data["…"], data["…"]')
            held = next((data[name] for name in TESTS if name in data and name != split), None)
            return assembled([data[split]], held if test is None else test, x, y)
        case "federated" | "partitioner":
            return from_flower(data, test, x=x, y=y)
        case "stream":
            raise DataError(
                "the data are a stream, and samples must be at hand in any order; load them without streaming=True."
            )
    raise DataError(
        f"adapt takes a datasets.Dataset or DatasetDict, or a FederatedDataset or partitioner of flwr-datasets, "
        f"got {type(data).__name__}; hand other data to askew.run as they are."
    )


def from_flower(data: Any, test: Any = None, *, x: Names = None, y: str | None = None) -> Dataset:
    """The partitions of a FederatedDataset, or of a partitioner that has its dataset, as natural clients 0, 1, 2, …"""
    if kind(data) == "federated":
        whole, partitioners = data, said(lambda: data.partitioners)
        split = training(partitioners, 'data.partitioners["…"], data.load_split("…")')
        data = partitioners[split]
        if test is None:
            others = (loaded(whole, name) for name in TESTS if name != split)
            test = next((table for table in others if table is not None), None)
    if kind(data) != "partitioner":
        raise DataError(
            f"from_flower takes a FederatedDataset or a partitioner, got {type(data).__name__}; use adapt for other datasets."
        )
    if not data.is_dataset_assigned():
        raise DataError("the partitioner has no dataset yet; set it first, as in partitioner.dataset = data.")
    parts = said(lambda: [data.load_partition(i) for i in range(data.num_partitions)])
    if any(part.column_names != parts[0].column_names for part in parts):
        raise DataError(
            "the partitions must all have the same columns, and these differ; use a partitioner that divides the rows."
        )
    return assembled(parts, test, x, y, np.repeat(np.arange(len(parts)), [len(part) for part in parts]))


def said(load: Callable[[], Any]) -> Any:
    """What flwr-datasets loads, or its complaint as a sentence of ours."""
    try:
        return load()
    except (OSError, ValueError, LookupError, TypeError) as wrong:
        told = " ".join(str(wrong).split()).rstrip(".")
        raise DataError(
            f"flwr-datasets cannot load or divide the data: {told}; put that right in the FederatedDataset."
        ) from None


def loaded(data: Any, split: str) -> Any:
    """A split of a FederatedDataset, None if there is none: it does not list them."""
    try:
        return data.load_split(split)
    except ValueError:
        return None


def training(splits: Mapping[str, Any], instead: str) -> str:
    """The split to train on."""
    split = "train" if len(splits) != 1 else next(iter(splits))
    if split not in splits:
        known = ", ".join(splits) or "none"
        raise DataError(
            f"there is no split train to train on, only: {known}; hand over one to train on and one to test, adapt({instead})."
        )
    return split


def assembled(parts: list[Any], test: Any, x: Names, y: str | None, owner: np.ndarray | None = None) -> Dataset:
    """One dataset from the tables of the training data and perhaps a test set."""
    if test is not None and kind(test) != "table":
        raise DataError(
            f"the test data must be a datasets.Dataset like the training data, got {type(test).__name__}; convert them."
        )
    features = shown(parts[0])
    names = [x] if isinstance(x, str) else list(x or ())
    y = y or target_column(features, names)
    names = names or [input_column(features, y)]
    train = read(parts, names, y, "training data")
    held = None if test is None else read([test], names, y, "test data")
    dataset = completed(train, held, owner)
    if dataset.train.x.dtype == torch.uint8:
        channels = dataset.train.x.shape[1]
        dataset = dataclasses.replace(
            dataset, view=PixelTransform(torch.zeros(channels, 1, 1), torch.ones(channels, 1, 1))
        )
    if called(features[y]) == "ClassLabel":
        if (
            test is not None
            and called(test.features[y]) == "ClassLabel"
            and test.features[y].names != features[y].names
        ):
            raise DataError(
                f"the test data must number the classes of {y!r} as the training data do; cast both to one datasets.ClassLabel."
            )
        dataset = dataclasses.replace(dataset, classes=max(dataset.classes, features[y].num_classes))
    return dataset


def shown(table: Any) -> dict[str, Any]:
    """The columns that a table's format shows, and their types."""
    return {name: table.features[name] for name in table.format["columns"]}


def called(feature: Any) -> str:
    return type(feature).__name__


def numeric(feature: Any) -> bool:
    """Numbers, or lists of them?"""
    while called(feature) in ("List", "LargeList", "Sequence"):
        feature = feature.feature
    return called(feature).startswith(("Value", "Array")) and feature.dtype.startswith(("int", "uint", "float", "bool"))


def target_column(features: Mapping[str, Any], inputs: Sequence[str]) -> str:
    """What to predict: a column of class labels before any other."""
    rest = [name for name in features if name not in inputs]
    labels = [name for name in rest if called(features[name]) == "ClassLabel"]
    return told(features, "what to predict", f'{NAME_IT}, y="…")', TARGETS, labels or rest, labels)


def input_column(features: Mapping[str, Any], y: str) -> str:
    """Images before lists of numbers; single numbers, which may be anything, by a usual name alone."""
    rest = {
        name: feature
        for name, feature in features.items()
        if name != y and (called(feature) == "Image" or numeric(feature))
    }
    images = [name for name in rest if called(rest[name]) == "Image"]
    certain = images or [name for name in rest if called(rest[name]) != "Value"]
    return told(features, "the inputs", f'{NAME_IT}, x="…"), and {TEXT}', INPUTS, certain or list(rest), certain)


def told(
    features: Mapping[str, Any],
    role: str,
    remedy: str,
    usual: Sequence[str],
    among: Sequence[str],
    certain: Sequence[str],
) -> str:
    """The first usual name among some columns, or the only certain one."""
    name = next((name for name in usual if name in among), certain[0] if len(certain) == 1 else "")
    if not name:
        seen = ", ".join(f"{name} ({f.dtype if called(f) == 'Value' else called(f)})" for name, f in features.items())
        raise DataError(f"no column for {role} can be told from {seen}; {remedy}.")
    return name


def read(parts: list[Any], x: Sequence[str], y: str, what: str) -> Samples:
    """Inputs and targets of the tables that together are the `what`, checked and in our types."""
    features = shown(parts[0])
    for name in (*x, y):
        if name not in features:
            raise DataError(f"the {what} have no column {name!r}, only: {', '.join(features)}; name one of them.")
    if any(part.format["type"] == "custom" for part in parts):
        raise DataError(
            f"the {what} have a transform that acts as samples are read; apply it with .map(), or drop it by .reset_format()."
        )
    targets = Column(parts, y, what).numbers('number the classes first, as with .class_encode_column("label")')
    columns = [Column(parts, name, what) for name in x]
    if len(columns) == 1 and called(features[x[0]]) == "Image":
        return samples((columns[0].images(), targets), what, as_bytes=True)
    values = [column.numbers(TEXT) for column in columns]
    if len(values) == 1 and values[0].ndim > 1:
        return samples((values[0], targets), what)
    if any(value.ndim > 1 for value in values):
        raise DataError(
            f"several input columns must hold one number each, and some of {', '.join(x)} hold lists; name one column."
        )
    return samples((np.column_stack(values).astype(np.float64), targets), what)


class Column(NamedTuple):
    """One column of tables that follow one another."""

    parts: list[Any]
    name: str
    what: str

    def images(self) -> np.ndarray:
        """Bytes [n, c, h, w]."""
        return self.filled(self.pictures())

    def numbers(self, remedy: str) -> np.ndarray:
        """[n], or [n, ..] of lists; `remedy` is for what is not numbers."""
        return self.filled(self.regular(chunk.combine_chunks(), remedy) for chunk in self.chunks("arrow"))

    def chunks(self, form: str | None) -> Iterator[Any]:
        for part in self.parts:
            table = part.with_format(form, columns=[self.name])
            for start in range(0, len(part), CHUNK):
                yield table[start : start + CHUNK][self.name]

    def filled(self, blocks: Iterator[np.ndarray]) -> np.ndarray:
        """Blocks of rows in one array."""
        whole, at = np.empty(0), 0
        for block in blocks:
            if at == 0:
                whole = np.empty((sum(map(len, self.parts)), *block.shape[1:]), block.dtype)
            if block.shape[1:] != whole.shape[1:]:
                raise self.uneven()
            whole[at : at + len(block)] = block
            at += len(block)
        return whole

    def pictures(self) -> Iterator[np.ndarray]:
        """Decoded images, all alike."""
        looks: dict[str, None] = {}
        if not all(part.features[self.name].decode for part in self.parts):
            raise self.wrong(
                "holds images that are not decoded", f'let them be, with .cast_column("{self.name}", datasets.Image())'
            )
        try:
            for chunk in self.chunks(None):
                if None in chunk:
                    raise self.missing()
                looks |= dict.fromkeys(f"{image.mode} {image.width}×{image.height}" for image in chunk)
                if len(looks) > 1 or chunk[0].mode not in ("L", "RGB"):
                    raise self.wrong(
                        f"must hold images of one size, all grey (L) or all RGB, got {' and '.join(list(looks)[:2])}",
                        f'convert them, as with .cast_column("{self.name}", datasets.Image(mode="RGB")), or resize them with .map()',
                    )
                block = np.stack([np.asarray(image) for image in chunk])
                yield block[:, None] if block.ndim == 3 else block.transpose(0, 3, 1, 2)
        except (OSError, ValueError, SyntaxError) as wrong:
            raise self.wrong(f"holds an image that cannot be read ({wrong})", "drop or replace it") from None

    def regular(self, array: Any, remedy: str) -> np.ndarray:
        """An Arrow array of numbers, or of lists that are all of one length."""
        import pyarrow as pa
        import pyarrow.compute as pc

        shape = [len(array)]
        while True:
            array = array.storage if isinstance(array, pa.ExtensionArray) else array
            if array.null_count:
                raise self.missing()
            if not isinstance(array, (pa.ListArray, pa.LargeListArray, pa.FixedSizeListArray)):
                break
            lengths = pc.list_value_length(array).to_numpy()
            if not 0 < lengths[0] == lengths.min() == lengths.max():
                raise self.uneven()
            shape.append(int(lengths[0]))
            array = array.flatten()
        values: np.ndarray = array.to_numpy(zero_copy_only=False)
        if values.dtype.kind not in "biuf":
            raise self.wrong(f"must hold numbers, got {array.type}", remedy)
        return values.reshape(shape)

    def missing(self) -> DataError:
        return self.wrong("must hold a value in every row, and some have none", "drop those rows with .filter()")

    def uneven(self) -> DataError:
        return self.wrong("must hold lists of one length and none empty, and does not", "pad or cut them with .map()")

    def wrong(self, what: str, remedy: str) -> DataError:
        return DataError(f"the column {self.name!r} of the {self.what} {what}; {remedy}.")
