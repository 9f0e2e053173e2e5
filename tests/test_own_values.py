"""Values of a user's data that are easily lost: long numbers, codes, constants, images of many bits."""

from __future__ import annotations

import math
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from PIL import Image

from askew.data import ImageFolder, from_user
from askew.data.adapt import HubColumn
from askew.data.dataset import Dataset, Samples
from askew.data.names import to_names
from askew.data.own_files import Csv, Parquet
from askew.data.tables import number_text
from askew.errors import DataError

LONG = [2**60, 2**60 + 1, 2**60 + 2]  # one number in float64
NAMES = tuple(map(str, LONG))
X = np.random.default_rng(0).normal(size=(60, 3))


def csv(folder: Path, columns: dict[str, list[str]], test: dict[str, list[str]] | None = None, **more: Any) -> Dataset:
    """The dataset of a CSV file with these columns, each repeated to 40 rows."""
    for name, content in (("train.csv", columns), ("test.csv", test)):
        if content:
            rows = [",".join(values[k % len(values)] for values in content.values()) for k in range(40)]
            (folder / name).write_text("\n".join([",".join(content), *rows]) + "\n")
    given = {"label": "y", "test": str(folder / "test.csv") if test else "", **more}
    return Csv(file=str(folder / "train.csv"), **given).read()


# --- images


def image_folder(folder: Path, values: dict[str, np.ndarray], ending: str, **more: Any) -> Dataset:
    for label, pixels in values.items():
        (folder / label).mkdir(parents=True)
        for k in range(5):
            Image.fromarray(pixels).save(folder / label / f"{k}{ending}")
    return ImageFolder(file=str(folder), **more).read()


@pytest.mark.parametrize("size", [0, 4])
@pytest.mark.parametrize("kind", [".png", ".tif", "big.tif"])
def test_of_sixteen_bits_the_upper_eight_are_kept(tmp_path: Path, kind: str, size: int) -> None:
    dtype = ">u2" if kind == "big.tif" else "<u2"
    values = {label: np.full((8, 8), value, dtype=dtype) for label, value in (("ill", 10_000), ("well", 50_000))}
    data = image_folder(tmp_path, values, kind, size=size)
    side = size or 8
    assert data.train.x.shape[1:] == (1, side, side)
    assert [data.train.x[data.train.y == k].unique().tolist() for k in (0, 1)] == [[39], [195]]


def test_sixteen_bits_beside_colours(tmp_path: Path) -> None:
    values = {"a": np.full((8, 8), 50_000, dtype=np.uint16), "b": np.zeros((8, 8, 3), dtype=np.uint8)}
    data = image_folder(tmp_path, values, ".png")
    assert data.train.x[data.train.y == 0].unique().tolist() == [195] and data.train.x.shape[1] == 3


@pytest.mark.parametrize(("dtype", "word"), [(np.int32, "whole"), (np.float32, "real")])
def test_images_of_numbers_without_a_range_are_refused(tmp_path: Path, dtype: type, word: str) -> None:
    with pytest.raises(DataError, match=f"0.tif has {word} numbers as pixels.*save it as 8 bit"):
        image_folder(tmp_path, {"a": np.ones((8, 8), dtype), "b": np.zeros((8, 8), dtype)}, ".tif")


def test_images_of_a_hub_dataset_are_not_to_be_clipped() -> None:
    class Table:
        """What is used of a datasets.Dataset, which need not be installed."""

        features: ClassVar[dict[str, Any]] = {"image": SimpleNamespace(decode=True)}

        def with_format(self, form: None, columns: list[str]) -> Table:
            return self

        def __len__(self) -> int:
            return 1

        def __getitem__(self, rows: slice) -> dict[str, list[Image.Image]]:
            return {"image": [Image.fromarray(np.full((8, 8), 50_000, dtype=np.uint16))]}

    with pytest.raises(DataError, match=r"holds images of more than 8 bits \(I;16 8×8\); save them as 8 bit"):
        HubColumn([Table()], "image", "training data").read_images()


# --- columns of tables


@pytest.mark.parametrize("value", ["0.1", "0.7", "36.6", "1e-300"])
def test_a_constant_column_is_zero(tmp_path: Path, value: str) -> None:
    train = {"dose": [value], "age": ["1", "2", "5"], "y": ["p", "q"]}
    data = csv(tmp_path, train, train | {"dose": [value, "36.8"]})
    assert data.train.x[:, 0].eq(0).all() and data.test.x[:, 0].eq(0).all() and data.train.x[:, 1].std() > 0.9
    plain = csv(tmp_path, train, standardise=False)
    assert plain.train.x[:, 0].unique().tolist() == [float(np.float32(value))]


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (["007", "7", "010", "10"], ("007", "7", "010", "10")),
        (["9007199254740992", "9007199254740993"], ("9007199254740992", "9007199254740993")),
        (["10000000000000000001", "20000000000000000002"], ("10000000000000000001", "20000000000000000002")),
        (["1" * 300, "2"], ("2", "1" * 300)),
    ],
    ids=["zeros", "16 digits", "20 digits", "300 digits"],
)
def test_labels_that_are_codes_are_kept_apart(tmp_path: Path, labels: list[str], names: tuple[str, ...]) -> None:
    columns = {"x": ["1", "2", "3"], "y": labels}
    for data in (csv(tmp_path, columns), csv(tmp_path, columns, columns)):
        assert data.class_names == names and data.train.y.unique().tolist() == list(range(len(names)))


def test_a_number_of_5000_digits_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="column 'y' is infinite in line 2"):
        csv(tmp_path, {"x": ["1", "2", "3"], "y": ["1" * 5000, "2"]})


def test_labels_of_a_frame_are_kept_apart() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": X[:, 0], "id": LONG * 20})
    assert from_user(frame, label="id").class_names == NAMES
    assert from_user(pandas.DataFrame({"a": X[:, 0], "y": [1e19, 2e19, 3e19] * 20}), label="y").classes == 3


def test_codes_are_as_many_categories_with_a_test_file_as_without(tmp_path: Path) -> None:
    columns = {"ward": ["007", "7", "010", "10"], "y": ["p", "q", "q"]}
    plain = {"ward": ["7", "10"], "y": ["p", "q", "q"]}
    for test in (None, columns, plain):
        data = csv(tmp_path, columns, test, categories=("ward",))
        assert data.train.x.shape[1] == 4 and data.train.x.sum(0).gt(0).all()
    data = csv(tmp_path, plain, columns, categories=("ward",))
    assert data.train.x.sum(0).tolist() == [0, 20, 0, 20]  # 007, 7, 010, 10


def test_texts_and_numbers_of_two_files_meet(tmp_path: Path) -> None:
    train = {"ward": ["1.0", "2.0", "A"], "site": ["1.0", "B"], "y": ["1.0", "2.0", "A", "B"]}
    test = {"ward": ["1.0", "2.0"], "site": ["1.0"], "y": ["1.0", "2.0"]}
    data = csv(tmp_path, train, test, client="site", categories=("ward",))
    assert data.class_names == ("1.0", "2.0", "A", "B") and data.test.y.unique().tolist() == [0, 1]
    assert data.client_names == ("1.0", "B") and data.test_owner is not None and set(data.test_owner) == {0}
    assert data.train.x.shape[1] == 3 and data.test.x.sum(0).tolist() == [20, 20, 0]
    back = csv(tmp_path, test, train, client="site", categories=("ward", "y"))
    assert back.client_names == ("1.0",) and back.test_owner is None and back.train.x.shape[1] == 3
    numbers = csv(tmp_path, test, {"ward": ["1", "2.00"], "site": ["1"], "y": ["1", "2"]}, client="site")
    assert numbers.client_names == ("1",) and numbers.test_owner is not None and numbers.class_names == ("1", "2")


def test_numbers_as_names() -> None:
    written = [number_text(value) for value in (3.0, -0.5, 1e15 + 1, 2.0**53 - 1, 1e19, math.inf)]
    assert written == ["3", "-0.5", "1000000000000001", "9007199254740991", "1e+19", "inf"]


def test_clients_of_sixteen_digits_keep_their_names(tmp_path: Path) -> None:
    data = csv(tmp_path, {"site": ["1000000000000001", "3"], "x": ["1", "2", "3"], "y": ["p", "q", "q"]}, client="site")
    assert data.client_names == ("3", "1000000000000001")


def test_long_ids_of_a_parquet_file_with_one_missing(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"id": [None, *LONG * 20], "a": [*X[:, 0], 0.5], "y": ["u", *["u", "v"] * 30]})
    parquet.write_table(table, tmp_path / "ids.parquet")
    data = Parquet(file=str(tmp_path / "ids.parquet"), label="y", client="id", missing="drop").read()
    assert data.client_names == NAMES and len(data.train.y) + len(data.test.y) == 60


def test_tables_of_clients_with_different_categories() -> None:
    pandas = pytest.importorskip("pandas")

    def frame(wards: list[float], labels: list[float]) -> Any:
        columns = {"ward": pandas.Categorical(wards * 10), "a": X[:20, 0], "y": pandas.Categorical(labels * 10)}
        return pandas.DataFrame(columns)

    clients = {"A": frame([1, 2], [0.5, 1.5]), "B": frame([2, 3], [1.5, 2.5])}
    for data in (from_user(clients, label="y"), from_user(list(clients.values()), label="y")):
        assert data.class_names == ("0.5", "1.5", "2.5") and data.train.x.shape[1] == 4


# --- arrays of objects, and owners


@pytest.mark.parametrize("kind", [float, Decimal, np.float64], ids=["float", "Decimal", "numpy"])
def test_real_targets_as_objects_are_a_regression(kind: Any) -> None:
    y = np.array([kind(value) for value in X[:, 0].tolist()], dtype=object)
    data, plain = from_user((X, y)), from_user((X, X[:, 0]))
    assert data.classes == 0 and torch.equal(data.train.y, plain.train.y)


def test_whole_labels_as_objects_stay_classes_and_apart() -> None:
    assert from_user((X, np.array([0, 1, True] * 20, dtype=object))).classes == 2
    assert from_user((X, np.array(LONG * 20, dtype=object))).class_names == NAMES
    longest = [10**20, 10**20 + 1]
    assert from_user((X, np.array(longest * 30, dtype=object))).class_names == tuple(map(str, longest))
    unsigned = np.array([2**63 + 5, 2**63 + 6] * 30, dtype=np.uint64)
    assert from_user((X, unsigned)).class_names == (str(2**63 + 5), str(2**63 + 6))


def test_owners_keep_their_numbers() -> None:
    assert to_names(np.array([1, 1.0, 2, 3], dtype=object), "owners").tolist() == [1, 1, 2, 3]
    assert to_names(np.array([1, 2**63 + 5], dtype=np.uint64), "owners").tolist() == ["1", str(2**63 + 5)]
    owner = np.array([2**63 + 5, 2**63 + 6, 1] * 20, dtype=np.uint64)
    assert from_user((X, X[:, 0] > 0, owner)).client_names == ("1", str(2**63 + 5), str(2**63 + 6))


@pytest.mark.parametrize(
    "owner",
    [
        np.array([1e19, 2e19, 3e19]),
        np.array([1, 2**24], dtype=np.float32),
        np.array([2**60, 2**60 + 1, 1.0], dtype=object),
    ],
    ids=["float64", "float32", "object"],
)
def test_owners_that_real_numbers_may_have_merged_are_refused(owner: np.ndarray) -> None:
    with pytest.raises(
        DataError, match=r"must be exact, got .* merges whole numbers of such length; pass them as texts"
    ):
        to_names(owner, "owners")


def test_a_missing_owner_of_pandas_is_named() -> None:
    pandas = pytest.importorskip("pandas")
    with pytest.raises(DataError, match="sample 1 has none"):
        to_names(np.array(["a", pandas.NA], dtype=object), "owners")


# --- arrays as numpy keeps them


@pytest.mark.parametrize("kept", [lambda a: a[::-1].copy()[::-1], lambda a: a.astype(a.dtype.newbyteorder(">"))])
def test_flipped_arrays_and_those_of_another_byte_order_are_plain_arrays(kept: Any) -> None:
    y = np.arange(60) % 3
    plain, own = from_user((X, y)), from_user((kept(X), kept(y)))
    given = Dataset(Samples(kept(X), kept(y)), Samples(X, y), 3)
    assert all(map(torch.equal, plain.train, own.train)) and all(map(torch.equal, given.train, given.test))


def test_masked_values_are_not_taken_for_values() -> None:
    y = np.arange(60) % 3
    for x, labels, part in ((np.ma.masked_array(X, X > 1), y, "x"), (X, np.ma.masked_array(y, y == 2), "y")):
        with pytest.raises(DataError, match=f"^{part} of the training data must have a value everywhere, .* masked"):
            from_user((x, labels))
        with pytest.raises(DataError, match=r"^the training samples must have a value everywhere"):
            Dataset(Samples(x, labels), Samples(X, y), 3)
    from_user((np.ma.masked_array(X), y))
