"""Datasets of the Hugging Face hub and of flwr-datasets: recognised without them, read with them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import askew
from askew.data import Samples, adapt, from_user
from askew.data.adapt import LIBRARY_TYPES, from_flower, input_column, library_type, target_column
from askew.data.arrays import make_dataset
from askew.errors import DataError

RNG = np.random.default_rng(0)
GREY = RNG.integers(0, 256, (10, 6, 5), dtype=np.uint8)
COLOUR = RNG.integers(0, 256, (10, 6, 5, 3), dtype=np.uint8)
ROWS = RNG.standard_normal((10, 3, 2)).astype(np.float32)
LABELS = [0, 1, 2, 0, 1, 2, 0, 1, 2, 0]


def check_refused(sentence: str, data: Any, test: Any = None, x: Any = None, y: Any = None) -> None:
    """Check that `adapt` refuses the data with this sentence."""
    with pytest.raises(DataError, match=sentence) as caught:
        adapt.adapt(data, test, x=x, y=y)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")


# --- without the libraries


def make_type(path: str, *bases: type) -> Any:
    """An empty type with this full name."""
    module, _, name = path.rpartition(".")
    return type(name, bases, {"__module__": module})


@pytest.mark.parametrize("path", LIBRARY_TYPES)
def test_types_are_recognised_by_their_names_and_their_bases(path: str) -> None:
    given = make_type(path)
    assert library_type(given()) == library_type(make_type("mine.Own", given)()) == LIBRARY_TYPES[path]


def test_types_of_similar_names_are_not_recognised() -> None:
    similar = make_type("datasets.Dataset", TensorDataset)(torch.zeros(10, 2), torch.tensor(LABELS))
    assert library_type(similar) == library_type({}) == library_type((ROWS, LABELS)) == library_type(None) == ""
    assert from_user(similar).classes == 3


def test_loading_the_module_loads_neither_library() -> None:
    code = "import sys, askew.data.adapt; print({'datasets', 'flwr_datasets', 'pyarrow', 'PIL'} & {*sys.modules})"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "set()"


def test_what_cannot_be_adapted_is_refused_in_one_sentence() -> None:
    table = make_type("datasets.arrow_dataset.Dataset")()
    splits = make_type("datasets.dataset_dict.DatasetDict", dict)
    check_refused(
        r"adapt takes a datasets.Dataset or DatasetDict.*got tuple; hand other data to askew.run as they are",
        (ROWS, LABELS),
    )
    check_refused(
        "are a stream, .*; load them without streaming=True", make_type("datasets.iterable_dataset.IterableDataset")()
    )
    check_refused(
        r'no split train to train on, only: a, b; .* adapt\(data\["…"\], data\["…"\]\)', splits(a=table, b=table)
    )
    check_refused("no split train to train on, only: none", splits())
    check_refused(
        "the test data must be a datasets.Dataset like the training data, got tuple", table, test=(ROWS, LABELS)
    )
    with pytest.raises(
        DataError, match="from_flower takes a FederatedDataset or a partitioner, got Dataset; use adapt"
    ):
        from_flower(table)


@dataclass
class Value:
    dtype: str


@dataclass
class List:
    feature: Any


class Image: ...


class ClassLabel: ...


class Array3D(Value): ...


TEXT, WHOLE, REAL = Value("string"), Value("int64"), Value("float32")


@pytest.mark.parametrize(
    ("features", "x", "y"),
    [
        ({"image": Image(), "label": ClassLabel()}, "image", "label"),
        ({"img": Image(), "coarse_label": ClassLabel(), "fine_label": ClassLabel()}, "img", "fine_label"),
        ({"photo": Image(), "label": WHOLE, "character": ClassLabel()}, "photo", "character"),
        ({"writer": TEXT, "x": List(REAL), "photo": Image(), "y": WHOLE}, "photo", "y"),
        (
            {"text": TEXT, "attention_mask": List(WHOLE), "input_ids": List(WHOLE), "label": ClassLabel()},
            "input_ids",
            "label",
        ),
        ({"id": WHOLE, "cells": List(List(REAL)), "target": REAL}, "cells", "target"),
        ({"id": WHOLE, "cube": Array3D("uint8"), "labels": WHOLE}, "cube", "labels"),
        ({"id": WHOLE, "x": REAL, "y": REAL}, "x", "y"),
    ],
)
def test_columns_are_found_by_type_and_name(features: dict[str, Any], x: str, y: str) -> None:
    assert target_column(features, []) == y and input_column(features, y) == x


@pytest.mark.parametrize(
    ("features", "sentence"),
    [
        (
            {"sentence": TEXT, "label": ClassLabel(), "idx": WHOLE},
            r"inputs is recognised among sentence \(string\), label \(ClassLabel\), idx ",
        ),
        (
            {"words": List(TEXT), "label": ClassLabel()},
            r'adapt\(data, x="…"\), and tokenise text first: inputs are images or numbers\.$',
        ),
        ({"a": Image(), "b": Image(), "label": ClassLabel()}, "no column for the inputs"),
        ({"a": List(REAL), "b": List(REAL), "label": ClassLabel()}, "no column for the inputs"),
        (
            {"image": Image(), "a": ClassLabel(), "b": ClassLabel()},
            r'no column for what to predict .*adapt\(data, y="…"\)\.$',
        ),
        ({"image": Image(), "digit": WHOLE}, "no column for what to predict"),
    ],
)
def test_columns_are_not_guessed(features: dict[str, Any], sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        input_column(features, target_column(features, []))


def test_an_input_that_is_named_is_not_what_to_predict() -> None:
    assert target_column({"label": ClassLabel(), "y": ClassLabel()}, ["label"]) == "y"


def test_owners_stay_with_their_samples_as_a_fifth_is_held_out() -> None:
    owner = np.repeat(np.arange(7), 5)
    data = make_dataset(Samples(torch.from_numpy(owner[:, None]).float(), torch.zeros(35)), None, owner)
    assert data.owner is not None and len(data.owner) == 28
    assert data.train.x[:, 0].tolist() == data.owner.tolist()


def test_inputs_of_two_types_are_refused() -> None:
    with pytest.raises(
        DataError, match=r"inputs of type torch.int64 and the test data torch.float32; both must be alike"
    ):
        from_user((np.ones((4, 2), dtype=int), [0, 1, 0, 1]), (np.ones((4, 2)), [0, 1, 0, 1]))


# --- Hugging Face


@pytest.fixture(scope="module")
def hub() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield pytest.importorskip("datasets", reason="needs the Hugging Face datasets library: pip install -e '.[hub]'")


def image_table(hub: Any, images: Any) -> Any:
    """A table of images with the labels a, b and c; nothing is a d."""
    features = hub.Features(img=hub.Image(), label=hub.ClassLabel(names=["a", "b", "c", "d"]))
    return hub.Dataset.from_dict({"img": list(images), "label": LABELS[: len(images)]}, features=features)


@pytest.mark.parametrize(("images", "stored"), [(GREY, GREY[:, None]), (COLOUR, COLOUR.transpose(0, 3, 1, 2))])
@pytest.mark.parametrize("chunk", [3, 256])
def test_images_stay_bytes_and_become_inputs_in_0_to_1(
    hub: Any, monkeypatch: pytest.MonkeyPatch, images: Any, stored: Any, chunk: int
) -> None:
    monkeypatch.setattr(adapt, "CHUNK", chunk)
    table = image_table(hub, images)
    data = from_user(hub.DatasetDict(train=table, validation=table.select([1]), test=table.select([4, 2])))
    assert (
        data.train.x.dtype == torch.uint8 and np.array_equal(data.train.x, stored) and data.train.y.tolist() == LABELS
    )
    assert np.array_equal(data.test.x, stored[[4, 2]]) and data.test.y.tolist() == [1, 2]
    assert data.classes == 4, "the classes are those that the column declares"
    assert data.owner is None and data.criterion == "cross_entropy" and data.transform is not None
    inputs = data.transform(data.train.x, torch.float64)
    assert torch.allclose(inputs, torch.from_numpy(stored / 255), atol=1e-7) and not data.transform.random


def test_splits_are_found_by_name(hub: Any) -> None:
    table = image_table(hub, GREY)
    for name in ("test", "validation", "valid"):
        assert len(adapt.adapt(hub.DatasetDict(train=table, other=table, **{name: table.select([1, 2])})).test.y) == 2
    alone, same = adapt.adapt(hub.DatasetDict(test=table)), adapt.adapt(table)
    assert len(alone.test.y) == 2 and len(alone.train.y) == 8
    assert torch.equal(alone.test.x, same.test.x) and torch.equal(alone.train.y, same.train.y)
    assert len(adapt.adapt(hub.DatasetDict(train=table, test=table), table.select([3])).test.y) == 1


def test_rows_come_in_the_order_of_the_table(hub: Any) -> None:
    order = [7, 1, 8, 3, 0]
    data = adapt.adapt(image_table(hub, GREY).select(order), image_table(hub, GREY))
    assert np.array_equal(data.train.x, GREY[order, None]) and data.train.y.tolist() == [LABELS[i] for i in order]


def test_a_format_changes_nothing_but_the_columns_to_choose_from(hub: Any) -> None:
    table = image_table(hub, GREY).add_column("target", [0.5] * 10)
    for form in ("torch", "numpy", "arrow"):
        assert torch.equal(adapt.adapt(table.with_format(form)).train.x, adapt.adapt(table).train.x)
    assert adapt.adapt(table.with_format("numpy", columns=["img", "target"])).classes == 0
    check_refused(
        r"have a transform .*; apply it with .map\(\), or drop it by .reset_format\(\)",
        table.with_transform(lambda batch: batch),
    )


def types_of_lists(hub: Any) -> dict[str, Any]:
    return {
        "lists": hub.List(hub.List(hub.Value("float64"))),
        "large": hub.LargeList(hub.LargeList(hub.Value("float32"))),
        "fixed": hub.List(hub.List(hub.Value("float32"), length=2), length=3),
        "array": hub.Array2D((3, 2), "float32"),
    }


@pytest.mark.parametrize("kind", ["lists", "large", "fixed", "array"])
@pytest.mark.parametrize("chunk", [4, 256])
def test_lists_of_numbers_are_tensors(hub: Any, monkeypatch: pytest.MonkeyPatch, kind: str, chunk: int) -> None:
    monkeypatch.setattr(adapt, "CHUNK", chunk)
    features = hub.Features(x=types_of_lists(hub)[kind], y=hub.Value("int32"))
    table = hub.Dataset.from_dict({"x": ROWS.tolist(), "y": LABELS}, features=features).select(range(9, -1, -1))
    data = adapt.adapt(table, table)
    assert data.train.x.dtype == torch.float32 and np.array_equal(data.train.x, ROWS[::-1])
    assert data.train.y.tolist() == LABELS[::-1] and data.classes == 3 and data.transform is None


def test_numbers_follow_the_rules_for_arrays(hub: Any) -> None:
    def adapt_lists(x: Any, y: Any, kind: str) -> askew.Dataset:
        features = hub.Features(
            x=hub.List(hub.Value(kind)), y=hub.Value("float64" if isinstance(y[0], float) else "bool")
        )
        return adapt.adapt(hub.Dataset.from_dict({"x": x, "y": y}, features=features))

    tokens = adapt_lists([[1, 2], [3, 4]], [True, False], "int32")
    pixels = adapt_lists([[1, 255], [3, 4]], [0.5, 1.5], "uint8")
    assert tokens.train.x.dtype == torch.int64 and tokens.classes == 2
    assert pixels.train.x.dtype == torch.float32 and pixels.transform is None
    assert pixels.classes == 0 and pixels.criterion == "squared_error" and pixels.train.y.dtype == torch.float32


def test_columns_can_be_named(hub: Any) -> None:
    table = hub.Dataset.from_dict({"a": [1, 2, 3], "b": [0.5, 0.25, 1.0], "c": [0, 1, 1], "d": ROWS[:3].tolist()})
    both, one = adapt.adapt(table, table, x=["b", "a"], y="c"), adapt.adapt(table, table, x="a", y="b")
    assert (
        both.train.x.tolist() == [[0.5, 1], [0.25, 2], [1, 3]]
        and both.train.x.dtype == torch.float32
        and both.classes == 2
    )
    assert one.train.x.tolist() == [[1], [2], [3]] and one.train.x.dtype == torch.float32 and one.classes == 0
    check_refused(
        "several input columns must hold one number each, and some of a, d hold lists", table, x=["a", "d"], y="c"
    )
    check_refused("the training data have no column 'z', only: a, b, c, d; name one of them", table, x="z", y="c")
    check_refused("the training data have no column 'z'", table, y="z")
    check_refused("the test data have no column 'a', only: b", table, table.select_columns(["b"]), x="a", y="b")


@pytest.mark.parametrize("chunk", [1, 256])
def test_images_that_cannot_be_stacked_are_refused(hub: Any, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(adapt, "CHUNK", chunk)
    unlike = (
        r"'img' of the training data must hold images of one size, all grey \(L\) or all RGB, got {}; "
        "convert them, .*resize"
    )
    check_refused(unlike.format("L 5×6 and L 4×6"), image_table(hub, [*GREY[:4], GREY[4, :, :4]]))
    check_refused(unlike.format("L 5×6 and RGB 5×6"), image_table(hub, [GREY[0], COLOUR[0]]))
    check_refused(unlike.format("RGBA 1×2"), image_table(hub, [np.zeros((2, 1, 4), dtype=np.uint8)] * 3))
    check_refused("'img' of the training data must hold a value in every row", image_table(hub, [GREY[0], None]))
    broken = image_table(hub, [{"bytes": b"no image", "path": None}] * 2)
    check_refused(r"'img' of the training data holds an image that cannot be read \(.*\); drop or replace it", broken)
    bare = image_table(hub, GREY).cast_column("img", hub.Image(decode=False))
    check_refused("holds images that are not decoded; let them be", bare)
    assert np.array_equal(
        adapt.adapt(bare.cast_column("img", hub.Image()), bare.cast_column("img", hub.Image())).train.x, GREY[:, None]
    )
    mixed = image_table(hub, [GREY[0], COLOUR[0]]).cast_column("img", hub.Image(mode="RGB"))
    assert adapt.adapt(mixed, mixed).train.x.shape == (2, 3, 6, 5), "the remedy works"


@pytest.mark.parametrize("chunk", [1, 256])
@pytest.mark.parametrize(
    ("x", "y", "sentence"),
    [
        (
            [[1.0], [1.0, 2.0]],
            [0, 1],
            r"'x' of the training data must hold lists of one length and none empty, .*; pad or cut them",
        ),
        ([[[1.0]], [[1.0], [2.0]]], [0, 1], "must hold lists of one length"),
        ([[1.0], []], [0, 1], "must hold lists of one length"),
        ([[], []], [0, 1], "must hold lists of one length and none empty"),
        ([[1.0], None], [0, 1], "'x' of the training data must hold a value in every row"),
        ([[1.0], [None]], [0, 1], "'x' of the training data must hold a value in every row"),
        ([[1.0], [float("nan")]], [0, 1], "inputs of the training data must be finite"),
        ([[1.0], [2.0]], [0, None], "'y' of the training data must hold a value in every row"),
        ([[1.0], [2.0]], [0, -1], "class labels of the training data must be 0, 1, 2"),
        (["a", "b"], [0, 1], "'x' of the training data must hold numbers, got string; tokenise text first"),
        ([["a"], ["b"]], [0, 1], "'x' of the training data must hold numbers, got string; tokenise text first"),
        ([], [], "at least one"),
    ],
)
def test_columns_that_are_not_numbers_are_refused(
    hub: Any, monkeypatch: pytest.MonkeyPatch, x: Any, y: Any, sentence: str, chunk: int
) -> None:
    monkeypatch.setattr(adapt, "CHUNK", chunk)
    check_refused(sentence, hub.Dataset.from_dict({"x": x, "y": y}), x="x", y="y")


def test_a_test_set_that_is_unlike_is_refused(hub: Any) -> None:
    table = image_table(hub, GREY)
    check_refused(r"inputs of shape .*\[1, 6, 5\].* and the test data .*\[3, 6, 5\]", table, image_table(hub, COLOUR))
    cube = hub.Dataset.from_dict({"img": GREY[:, None].astype(float).tolist(), "label": LABELS})
    check_refused("inputs of type torch.uint8 and the test data torch.float32", table, cube)
    other = table.cast_column("label", hub.ClassLabel(names=["b", "a", "c", "d"]))
    check_refused("the test data must number the classes of 'label' as the training data do", table, other)


def test_a_stream_is_refused(hub: Any) -> None:
    stream = image_table(hub, GREY).to_iterable_dataset()
    check_refused("are a stream", stream)
    check_refused("are a stream", hub.IterableDatasetDict(train=stream))


def test_a_run_on_images_is_the_run_on_their_numbers(hub: Any) -> None:
    images, labels = RNG.integers(0, 256, (60, 6, 5), dtype=np.uint8), RNG.integers(0, 3, 60)
    features = hub.Features(img=hub.Image(), label=hub.ClassLabel(num_classes=3))
    table = hub.Dataset.from_dict({"img": list(images), "label": labels}, features=features)
    ways = [{"data": table}, {"data": (images[:, None] / 255, labels)}]
    ours, theirs = (
        askew.run(
            "feddyn",
            model="softmax",
            partition="iid",
            clients=4,
            cohort=2,
            rounds=3,
            engine={"dtype": "float64"},
            **way,
        )
        for way in ways
    )
    assert ours.model.keys() == theirs.model.keys()
    assert all(torch.allclose(ours.model[name], theirs.model[name], atol=1e-6) for name in ours.model)


# --- flwr-datasets


@pytest.fixture(scope="module")
def flower(hub: Any) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLWR_TELEMETRY_ENABLED", "0")
        yield pytest.importorskip("flwr_datasets", reason="needs Flower Datasets: pip install -e '.[hub]'")


def numbered_table(hub: Any, count: int = 60) -> Any:
    """A table whose rows hold their numbers."""
    rows = {
        "x": [[float(i), 0.0] for i in range(count)],
        "y": [i % 3 for i in range(count)],
        "who": [f"w{i % 5}" for i in range(count)],
    }
    return hub.Dataset.from_dict(rows)


def rows_of_clients(data: askew.Dataset) -> dict[int, list[float]]:
    """The numbers of the rows that each client holds."""
    assert data.owner is not None and len(data.owner) == len(data.train.y)
    return {client: data.train.x[data.owner == client, 0].tolist() for client in range(data.owner.max() + 1)}


def test_partitions_are_natural_clients(hub: Any, flower: Any) -> None:
    rules = flower.partitioner
    for partitioner in (
        rules.IidPartitioner(7),
        rules.NaturalIdPartitioner("who"),
        rules.DirichletPartitioner(4, "y", alpha=0.5, min_partition_size=1, seed=1),
        rules.LinearPartitioner(4),
    ):
        partitioner.dataset = numbered_table(hub)
        data = from_flower(partitioner, numbered_table(hub))
        count = partitioner.num_partitions
        assert rows_of_clients(data) == {
            i: [row[0] for row in partitioner.load_partition(i)["x"]] for i in range(count)
        }
        assert len(data.train.y) == len(data.test.y) == 60
        fewer = from_user(partitioner)
        assert len(fewer.train.y) == 48 and len(fewer.test.y) == 12
        tests, rows = set(fewer.test.x[:, 0].tolist()), rows_of_clients(data)
        assert rows_of_clients(fewer) == {i: [x for x in of_client if x not in tests] for i, of_client in rows.items()}


def test_a_partition_may_be_empty(hub: Any, flower: Any) -> None:
    class Uneven(flower.partitioner.Partitioner):  # type: ignore[misc]
        num_partitions = 3

        def load_partition(self, partition_id: int) -> Any:
            return self.dataset.select([range(10), [], range(10, 60)][partition_id])

    partitioner = Uneven()
    partitioner.dataset = numbered_table(hub)
    data = from_flower(partitioner, numbered_table(hub))
    assert data.owner is not None and np.bincount(data.owner).tolist() == [10, 0, 50]


@pytest.fixture
def federated(hub: Any, flower: Any, tmp_path: Path) -> Any:
    """A function that makes a FederatedDataset of files, as its users do of the hub's."""
    numbered_table(hub).to_parquet(tmp_path / "train.parquet")
    numbered_table(hub, 15).to_parquet(tmp_path / "test.parquet")

    def make_federated(partitioners: Any, **splits: str) -> Any:
        files = {split: str(tmp_path / f"{name}.parquet") for split, name in splits.items()}
        return flower.FederatedDataset(
            dataset="parquet", partitioners=partitioners, data_files=files, cache_dir=str(tmp_path / "cache")
        )

    return make_federated


def test_a_federated_dataset_brings_its_clients_and_its_test_set(federated: Any) -> None:
    given = federated({"train": 6}, train="train", test="test")
    data = from_user(given)
    assert rows_of_clients(data) == {i: [row[0] for row in given.load_partition(i)["x"]] for i in range(6)}
    assert sorted(data.test.x[:, 0].tolist()) == list(range(15)) and data.classes == 3
    run = askew.run("feddyn", data=given, model="softmax", partition="natural", clients=6, cohort=3, rounds=2)
    assert run.federation["sizes"] == [10] * 6
    same = askew.run(
        "feddyn", data=from_flower(given), model="softmax", partition="natural", clients=6, cohort=3, rounds=2
    )
    assert all(torch.equal(run.model[name], same.model[name]) for name in run.model)


def test_the_splits_of_a_federated_dataset(federated: Any) -> None:
    assert len(from_flower(federated({"train": 6, "test": 2}, train="train", test="test")).test.y) == 15
    assert len(from_flower(federated({"train": 6}, train="train", valid="test")).test.y) == 15
    assert len(from_flower(federated({"train": 6}, train="train")).test.y) == 12
    assert len(from_flower(federated({"test": 3}, train="train", test="test")).train.y) == 12
    check_refused(
        r'only: a, b; .* adapt\(data.partitioners\["…"\], data.load_split\("…"\)\)',
        federated({"a": 2, "b": 2}, a="train", b="test"),
    )


def test_partitions_that_cannot_be_are_refused(hub: Any, flower: Any, federated: Any) -> None:
    rules = flower.partitioner
    check_refused(r"has no dataset yet; set it first, as in partitioner.dataset = data\.$", rules.IidPartitioner(3))
    for partitioner, sentence in (
        (
            rules.VerticalEvenPartitioner(num_partitions=2),
            "must all have the same columns, and these differ; use a partitioner that divides the rows",
        ),
        (
            rules.NaturalIdPartitioner("nobody"),
            "flwr-datasets cannot load or divide the data: .*nobody.*; put that right",
        ),
        (
            rules.PathologicalPartitioner(5, "y", num_classes_per_partition=9),
            "flwr-datasets cannot load or divide the data",
        ),
    ):
        partitioner.dataset = numbered_table(hub)
        check_refused(sentence, partitioner)
    check_refused("flwr-datasets cannot load or divide the data: .*nowhere", federated({"nowhere": 2}, train="train"))
