"""Adapters for datasets of the Hugging Face hub and of flwr-datasets: columns of images or numbers, read in chunks.

`askew.run(data=…)` calls `adapt` by itself; call it to name columns. The libraries' types are recognised by their
names, so that neither library need be installed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ..errors import DataError, did_you_mean
from .arrays import make_dataset, make_owned_dataset, to_samples
from .dataset import Dataset, Samples
from .names import to_names
from .transform import PixelTransform

# Types of the two libraries by their full names, and what each holds.
LIBRARY_TYPES = {
    "datasets.arrow_dataset.Dataset": "table",
    "datasets.dataset_dict.DatasetDict": "splits",
    "datasets.dataset_dict.IterableDatasetDict": "stream",
    "datasets.iterable_dataset.IterableDataset": "stream",
    "flwr_datasets.federated_dataset.FederatedDataset": "federated",
    "flwr_datasets.partitioner.partitioner.Partitioner": "partitioner",
}
# Usual names of columns and splits, the best first.
INPUT_NAMES = ("image", "img", "x", "pixel_values", "features", "input_ids")
TARGET_NAMES = ("label", "labels", "fine_label", "y", "target")
TEST_SPLITS = ("test", "validation", "valid")
TEXT_ADVICE = "tokenise text first: inputs are images or numbers"
NAMING_ADVICE = "name it, as in askew.data.adapt.adapt(data"
CHUNK = 256  # rows decoded at once

ColumnNames = str | Sequence[str] | None


def library_type(data: object) -> str:
    """Which of the libraries' types this is: a value of LIBRARY_TYPES, or an empty text if it is none of them."""
    names = (f"{base.__module__}.{base.__qualname__}" for base in type(data).__mro__)
    return next((LIBRARY_TYPES[name] for name in names if name in LIBRARY_TYPES), "")


def adapt(
    data: Any, test: Any = None, *, x: ColumnNames = None, y: str | None = None, client: str | None = None
) -> Dataset:
    """A dataset from a datasets.Dataset or DatasetDict, or from a FederatedDataset or partitioner of flwr-datasets.

    The columns are found by their types and usual names unless `x` and `y` name them; several columns of one number
    each make one input. The split to train on is train, or the only one; the test set is `test`, or the split test,
    validation or valid, or a fixed fifth. Images stay bytes and become numbers in 0..1 batch by batch; columns of
    numbers follow the rules for arrays. `client` names a column with the client of every row.
    """
    match library_type(data):
        case "table":
            return assemble_dataset([data], test, x, y, client=client)
        case "splits":
            split = training_split(data, 'data["…"], data["…"]')
            if test is None:
                test = next((data[name] for name in TEST_SPLITS if name in data and name != split), None)
            return assemble_dataset([data[split]], test, x, y, client=client)
        case "federated" | "partitioner":
            if client:
                raise DataError("the partitions are the clients already; leave client out.")
            return from_flower(data, test, x=x, y=y)
        case "stream":
            raise DataError(
                "the data are a stream, and samples must be at hand in any order; load them without streaming=True."
            )
    raise DataError(
        f"adapt takes a datasets.Dataset or DatasetDict, or a FederatedDataset or partitioner of flwr-datasets, "
        f"got {type(data).__name__}; hand other data to askew.run as they are."
    )


def from_flower(data: Any, test: Any = None, *, x: ColumnNames = None, y: str | None = None) -> Dataset:
    """A dataset whose natural clients 0, 1, 2, … are the partitions of a FederatedDataset or of a partitioner.

    A partitioner must have its dataset already.
    """
    partitioner = data
    if library_type(data) == "federated":
        partitioners = load_or_explain(lambda: data.partitioners)
        split = training_split(partitioners, 'data.partitioners["…"], data.load_split("…")')
        partitioner = partitioners[split]
        if test is None:
            others = (load_split(data, name) for name in TEST_SPLITS if name != split)
            test = next((table for table in others if table is not None), None)
    if library_type(partitioner) != "partitioner":
        raise DataError(
            f"from_flower takes a FederatedDataset or a partitioner, got {type(partitioner).__name__}; "
            "use adapt for other datasets."
        )
    if not partitioner.is_dataset_assigned():
        raise DataError("the partitioner has no dataset yet; set it first, as in partitioner.dataset = data.")
    tables = load_or_explain(lambda: [partitioner.load_partition(i) for i in range(partitioner.num_partitions)])
    if any(table.column_names != tables[0].column_names for table in tables):
        raise DataError(
            "the partitions must all have the same columns, and these differ; use a partitioner that divides the rows."
        )
    return assemble_dataset(tables, test, x, y, np.repeat(np.arange(len(tables)), [len(table) for table in tables]))


def load_or_explain(load: Callable[[], Any]) -> Any:
    """What flwr-datasets loads, or a DataError that quotes its complaint."""
    try:
        return load()
    except (OSError, ValueError, LookupError, TypeError) as problem:
        reason = " ".join(str(problem).split()).rstrip(".")
        raise DataError(
            f"flwr-datasets cannot load or divide the data: {reason}; put that right in the FederatedDataset."
        ) from None


def load_split(data: Any, split: str) -> Any:
    """A split of a FederatedDataset, or None if it has none of this name: it does not list its splits."""
    try:
        return data.load_split(split)
    except ValueError:
        return None


def training_split(splits: Mapping[str, Any], example: str) -> str:
    """The name of the split to train on; `example` is the argument list that an error message suggests."""
    split = "train" if len(splits) != 1 else next(iter(splits))
    if split not in splits:
        raise DataError(
            f"there is no split train to train on, only: {', '.join(splits) or 'none'}; "
            f"hand over one to train on and one to test, adapt({example})."
        )
    return split


def assemble_dataset(
    tables: list[Any],
    test: Any,
    x: ColumnNames,
    y: str | None,
    owner: np.ndarray | None = None,
    client: str | None = None,
) -> Dataset:
    """One dataset from the tables of the training data, in their order, and perhaps a table of test data."""
    if test is not None and library_type(test) != "table":
        raise DataError(
            f"the test data must be a datasets.Dataset like the training data, got {type(test).__name__}; convert them."
        )
    features = visible_features(tables[0])
    if client and client not in features:
        raise DataError(f"the training data have no column {client!r}; {did_you_mean(client, features)}")
    columns = {name: feature for name, feature in features.items() if name != client}
    inputs = [x] if isinstance(x, str) else list(x or ())
    y = y or target_column(columns, inputs)
    inputs = inputs or [input_column(columns, y)]
    labels = features[y] if y in features and type_name(features[y]) == "ClassLabel" else None
    names = tuple(labels.names) if labels is not None and labels.names else None
    if is_text(features.get(y)):
        names = text_labels(tables, y, "training data", *([] if test is None else [test]))
    train_samples = read_samples(tables, inputs, y, "training data", names)
    test_samples = None if test is None else read_samples([test], inputs, y, "test data", names)
    if client:
        owner = to_names([name for table in tables for name in table[client]], f"clients in column {client!r}")
        dataset = make_owned_dataset(train_samples, test_samples, owner, names)
    else:
        dataset = make_dataset(train_samples, test_samples, owner, names)
    if dataset.train.x.dtype == torch.uint8:
        channels = dataset.train.x.shape[1]
        to_unit_range = PixelTransform(torch.zeros(channels, 1, 1), torch.ones(channels, 1, 1))
        dataset = dataclasses.replace(dataset, transform=to_unit_range)
    if labels is not None:
        require_same_classes(labels, test, y)
        dataset = dataclasses.replace(dataset, classes=max(dataset.classes, labels.num_classes))
    return dataset


def require_same_classes(labels: Any, test: Any, y: str) -> None:
    """Refuse a table of test data whose column `y` numbers the classes in another order than the training data do."""
    if test is None or type_name(test.features[y]) != "ClassLabel":
        return
    if test.features[y].names != labels.names:
        raise DataError(
            f"the test data must number the classes of {y!r} as the training data do; "
            "cast both to one datasets.ClassLabel."
        )


def is_text(feature: Any) -> bool:
    """Does a column hold texts?"""
    return type_name(feature) == "Value" and str(feature.dtype) in ("string", "large_string")


def text_labels(tables: list[Any], y: str, what: str, *tests: Any) -> tuple[str, ...]:
    """The names of the classes in a column of texts, sorted."""
    found = {name for table in (*tables, *tests) if y in table.column_names for name in table[y]}
    if None in found:
        raise HubColumn(tables, y, what).missing_values()
    return tuple(sorted(found))


# columns --------------------------------------------------------------------------------------------------------


def visible_features(table: Any) -> dict[str, Any]:
    """The types of the columns that a table's format shows, by column name."""
    return {name: table.features[name] for name in table.format["columns"]}


def type_name(feature: Any) -> str:
    """The name of a column's type."""
    return type(feature).__name__


def is_numeric(feature: Any) -> bool:
    """Does a column hold numbers, or lists of numbers?"""
    while type_name(feature) in ("List", "LargeList", "Sequence"):
        feature = feature.feature
    return type_name(feature).startswith(("Value", "Array")) and feature.dtype.startswith(
        ("int", "uint", "float", "bool")
    )


def target_column(features: Mapping[str, Any], inputs: Sequence[str]) -> str:
    """The column to predict: one of class labels before any other."""
    candidates = [name for name in features if name not in inputs]
    labels = [name for name in candidates if type_name(features[name]) == "ClassLabel"]
    advice = f'{NAMING_ADVICE}, y="…")'
    return find_column(features, "what to predict", advice, TARGET_NAMES, labels or candidates, labels)


def input_column(features: Mapping[str, Any], y: str) -> str:
    """The column of the inputs: images before lists of numbers.

    Columns of single numbers may be anything, so that they need a usual name.
    """
    candidates = {
        name: feature
        for name, feature in features.items()
        if name != y and (type_name(feature) == "Image" or is_numeric(feature))
    }
    images = [name for name in candidates if type_name(candidates[name]) == "Image"]
    certain = images or [name for name in candidates if type_name(candidates[name]) != "Value"]
    advice = f'{NAMING_ADVICE}, x="…"), and {TEXT_ADVICE}'
    return find_column(features, "the inputs", advice, INPUT_NAMES, certain or list(candidates), certain)


def find_column(
    features: Mapping[str, Any],
    role: str,
    advice: str,
    usual: Sequence[str],
    candidates: Sequence[str],
    certain: Sequence[str],
) -> str:
    """The candidate with the first of the usual names, or the only certain one.

    `role` and `advice` are for the error message.
    """
    name = next((name for name in usual if name in candidates), certain[0] if len(certain) == 1 else "")
    if not name:
        columns = ", ".join(
            f"{name} ({feature.dtype if type_name(feature) == 'Value' else type_name(feature)})"
            for name, feature in features.items()
        )
        raise DataError(f"no column for {role} is recognised among {columns}; {advice}.")
    return name


# reading --------------------------------------------------------------------------------------------------------


def read_samples(
    tables: list[Any], x: Sequence[str], y: str, what: str, names: tuple[str, ...] | None = None
) -> Samples:
    """The checked samples in some tables that follow one another; `what` names the data in error messages.

    Labels that are texts become their places in `names`.
    """
    features = visible_features(tables[0])
    for name in (*x, y):
        if name not in features:
            raise DataError(f"the {what} have no column {name!r}, only: {', '.join(features)}; name one of them.")
    if any(table.format["type"] == "custom" for table in tables):
        raise DataError(
            f"the {what} have a transform that acts as samples are read; "
            "apply it with .map(), or drop it by .reset_format()."
        )
    if names is not None and is_text(features[y]):
        place = {name: k for k, name in enumerate(names)}
        targets = np.array([place[name] for table in tables for name in table[y]], dtype=np.int64)
    else:
        advice = 'number the classes first, as with .class_encode_column("label")'
        targets = HubColumn(tables, y, what).read_numbers(advice)
    columns = [HubColumn(tables, name, what) for name in x]
    if len(columns) == 1 and type_name(features[x[0]]) == "Image":
        return to_samples((columns[0].read_images(), targets), what, keep_bytes=True)
    values = [column.read_numbers(TEXT_ADVICE) for column in columns]
    if len(values) == 1 and values[0].ndim > 1:
        return to_samples((values[0], targets), what)
    if any(value.ndim > 1 for value in values):
        raise DataError(
            f"several input columns must hold one number each, and some of {', '.join(x)} hold lists; name one column."
        )
    return to_samples((np.column_stack(values).astype(np.float64), targets), what)


class HubColumn(NamedTuple):
    """One column of tables that follow one another."""

    tables: list[Any]
    name: str
    what: str  # the data that the tables are, for error messages

    def read_images(self) -> np.ndarray:
        """All images as bytes [n, c, h, w]."""
        return self.join(self.decode_images())

    def read_numbers(self, advice: str) -> np.ndarray:
        """All numbers [n], or lists of them [n, ..]; `advice` is what to do if they are not numbers."""
        return self.join(self.to_array(chunk.combine_chunks(), advice) for chunk in self.chunks("arrow"))

    def chunks(self, form: str | None) -> Iterator[Any]:
        """The values of the column, CHUNK rows at a time, in a format of the library."""
        for table in self.tables:
            formatted = table.with_format(form, columns=[self.name])
            for start in range(0, len(table), CHUNK):
                yield formatted[start : start + CHUNK][self.name]

    def join(self, blocks: Iterator[np.ndarray]) -> np.ndarray:
        """Blocks of rows in one array that is allocated once."""
        joined, filled = np.empty(0), 0
        for block in blocks:
            if filled == 0:
                joined = np.empty((sum(map(len, self.tables)), *block.shape[1:]), block.dtype)
            if block.shape[1:] != joined.shape[1:]:
                raise self.uneven_lists()
            joined[filled : filled + len(block)] = block
            filled += len(block)
        return joined

    def decode_images(self) -> Iterator[np.ndarray]:
        """Blocks of decoded images, all of one size and mode."""
        if not all(table.features[self.name].decode for table in self.tables):
            raise self.refusal(
                "holds images that are not decoded", f'let them be, with .cast_column("{self.name}", datasets.Image())'
            )
        modes: dict[str, None] = {}  # an ordered set
        try:
            for chunk in self.chunks(None):
                if None in chunk:
                    raise self.missing_values()
                modes |= dict.fromkeys(f"{image.mode} {image.width}×{image.height}" for image in chunk)
                if wide := [mode for mode in modes if mode.startswith(("I", "F"))]:  # a cast to RGB clips at 255
                    raise self.refusal(f"holds images of more than 8 bits ({wide[0]})", "save them as 8 bit")
                if len(modes) > 1 or chunk[0].mode not in ("L", "RGB"):
                    raise self.refusal(
                        f"must hold images of one size, all grey (L) or all RGB, got {' and '.join(list(modes)[:2])}",
                        f'convert them, as with .cast_column("{self.name}", datasets.Image(mode="RGB")), '
                        "or resize them with .map()",
                    )
                block = np.stack([np.asarray(image) for image in chunk])
                yield block[:, None] if block.ndim == 3 else block.transpose(0, 3, 1, 2)
        except (OSError, ValueError, SyntaxError) as problem:
            raise self.refusal(f"holds an image that cannot be read ({problem})", "drop or replace it") from None

    def to_array(self, array: Any, advice: str) -> np.ndarray:
        """An Arrow array of numbers, or of lists that all have one length, as an array of numpy."""
        import pyarrow as pa  # which comes with the library whose table this is
        import pyarrow.compute as pc

        shape = [len(array)]
        while True:
            array = array.storage if isinstance(array, pa.ExtensionArray) else array
            if array.null_count:
                raise self.missing_values()
            if not isinstance(array, (pa.ListArray, pa.LargeListArray, pa.FixedSizeListArray)):
                break
            lengths = pc.list_value_length(array).to_numpy()
            if not 0 < lengths[0] == lengths.min() == lengths.max():
                raise self.uneven_lists()
            shape.append(int(lengths[0]))
            array = array.flatten()
        values: np.ndarray = array.to_numpy(zero_copy_only=False)
        if values.dtype.kind not in "biuf":
            raise self.refusal(f"must hold numbers, got {array.type}", advice)
        return values.reshape(shape)

    def missing_values(self) -> DataError:
        """The error for a row without a value."""
        return self.refusal("must hold a value in every row, and some have none", "drop those rows with .filter()")

    def uneven_lists(self) -> DataError:
        """The error for lists of different lengths, or empty ones."""
        return self.refusal("must hold lists of one length and none empty, and does not", "pad or cut them with .map()")

    def refusal(self, what: str, advice: str) -> DataError:
        """The error that this column is wrong in some way, and what to do."""
        return DataError(f"the column {self.name!r} of the {self.what} {what}; {advice}.")
