"""Data of a user's own: files by name, natural clients by a column, what Python accepts, and messages for mistakes."""

from __future__ import annotations

import gzip
import io
import json
import shutil
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, TensorDataset

import askew
from askew.cli.main import main
from askew.data import ImageFolder, Npz, from_user
from askew.data.dataset import Source, hold_out_share
from askew.data.federation import Federation
from askew.data.names import in_order, number_labels
from askew.data.own_files import Csv
from askew.data.partition import Iid, Natural
from askew.errors import AskewError, DataError, DataWarning
from askew.experiment.build import BuildCache
from askew.experiment.config import Config

ROWS = """hospital,age,sex,outcome
Bern,30,f,ill
Basel,40,m,well
Bern,50,f,well
Basel,60,m,ill
Bern,70,x,ill
Chur,20,f,well
"""
X = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int64)
OWNER = np.array(["north", "south", "east"])[np.arange(60) % 3]


def write(folder: Path, text: str = ROWS, name: str = "patients.csv") -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def csv_source(file: str, **more: Any) -> Csv:
    return Csv(file=file, **{"label": "outcome", "client": "hospital", **more})


def pictures(folder: Path, *names: str, size: int = 8, mode: str = "RGB") -> None:
    for k, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new(mode, (size, size), 40 * k if mode == "L" else (40 * k, 0, 9)).save(folder / name)


# --- tables


def test_a_table_by_hand(tmp_path: Path) -> None:
    test = write(tmp_path, "sex,outcome,age,hospital\nm,well,90,Chur\n", "test.csv")
    data = csv_source(write(tmp_path), test=test).read()
    assert data.client_names == ("Basel", "Bern", "Chur") and data.class_names == ("ill", "well")
    assert data.owner is not None and data.owner.tolist() == [1, 0, 1, 0, 1, 2]
    assert data.train.y.tolist() == [0, 1, 1, 0, 0, 1] and data.test.y.tolist() == [1]
    ages = np.array([30, 40, 50, 60, 70, 20])
    z = (ages - 45) / np.sqrt(np.mean((ages - 45.0) ** 2))
    sexes = np.array([[s == "f", s == "m", s == "x"] for s in "fmfmxf"])
    assert np.allclose(data.train.x.numpy(), np.column_stack([z, sexes]), atol=1e-6)
    assert np.allclose(data.test.x.numpy(), [[(90 - 45) / ages.std(), 0, 1, 0]], atol=1e-6)
    assert data.test_owner is not None and data.test_owner.tolist() == [2]


def test_missing_values_are_filled_by_the_training_mean_or_dropped(tmp_path: Path) -> None:
    test = write(tmp_path, "hospital,age,sex,outcome\nBern,NA,,well\n", "test.csv")
    file = write(tmp_path, ROWS.replace("30,f", ",f"))
    filled = csv_source(file, test=test, missing="fill").read()
    assert filled.train.x.shape[1] == 5  # a category of their own for the missing
    assert filled.train.x[0, 0] == 0 and filled.test.x[0].tolist() == [0, 0, 0, 0, 1]
    dropped = csv_source(file, missing="drop", test=write(tmp_path, name="all.csv")).read()
    assert len(dropped.train.y) == 5 and dropped.remarks == ("Left out: 1 row of patients.csv with missing values.",)


def test_codes_are_categories_where_the_user_says_so_and_regressions_are_numbers(tmp_path: Path) -> None:
    file = write(tmp_path, "site,code,dose,price\na,1,2,0.5\nb,10,2,1.5\na,2,2,2.5\nb,2,2,3\na,1,2,4\n")
    data = Csv(file=file, label="price", client="site", categories=("code",), test_share=0.4).read()
    assert data.classes == 0 and data.criterion == "squared_error" and data.train.y.shape == (3, 1)
    assert (
        Config.build({"data": {"name": "csv", "file": file, "label": "price"}}).tables()["partition"]["name"] == "iid"
    )
    both = torch.cat([data.train.x, data.test.x])
    assert both.shape[1] == 4 and both[:, :3].sum(1).tolist() == [1] * 5 and both[:, 3].eq(0).all()  # a constant is 0


def test_one_file_in_four_disguises_is_one_dataset(tmp_path: Path) -> None:
    plain = csv_source(write(tmp_path)).read()
    semicolons = csv_source(write(tmp_path, ROWS.replace(",", ";"), "s.csv"), delimiter=";").read()
    quoted = csv_source(write(tmp_path, "\ufeff" + ROWS.replace("Bern", '"Bern"').replace("\n", "\r\n"))).read()
    packed = tmp_path / "p.csv.gz"
    packed.write_bytes(gzip.compress(ROWS.encode()))
    for other in (semicolons, quoted, csv_source(str(packed)).read()):
        assert torch.equal(other.train.x, plain.train.x) and other.client_names == plain.client_names


@pytest.mark.parametrize(
    ("codes", "names"),
    [
        (("007", "7", "3"), ("3", "007", "7")),  # leading zeros are part of a name
        (("3.0", "10", "700"), ("3", "10", "700")),
        ((str(2**60), str(2**60 + 1), "5"), ("5", str(2**60), str(2**60 + 1))),  # equal as float64
    ],
)
def test_codes_of_clients_are_kept_apart(tmp_path: Path, codes: tuple[str, ...], names: tuple[str, ...]) -> None:
    rows = "".join(f"{code},{k},{k % 2}\n" for k in range(4) for code in codes)
    source = csv_source(write(tmp_path, f"hospital,age,outcome\n{rows}"))
    assert source.read().client_names == names


def test_a_path_is_data(tmp_path: Path) -> None:
    file = write(tmp_path)
    shape = askew.describe(Path(file), client="hospital", label="outcome").summary()
    assert shape == askew.describe({"name": "csv", "file": file, **BOTH}).summary()


def test_the_share_held_out_of_each_client() -> None:
    owner = np.repeat([0, 1, 2, 3], [50, 5, 1, 44])
    for share in (0.1, 0.2, 0.5, 0.9):
        held = hold_out_share(owner, share, np.random.default_rng(0))
        of = np.bincount(owner[held], minlength=4)
        assert np.abs(of - share * np.array([50, 5, 1, 44])).max() <= 1 and of[2] == 0
        assert not np.array_equal(held, hold_out_share(owner, share, np.random.default_rng(1)))


def test_labels_and_names_in_order() -> None:
    assert in_order(["10", "9", "-1"]) == ["-1", "9", "10"] and in_order(["b10", "b9"]) == ["b10", "b9"]
    numbers, names, remark = number_labels(np.array([3, 1, 2, 1]))
    assert numbers.tolist() == [2, 0, 1, 0] and names == ("1", "2", "3")
    assert remark == "the labels 1, 2, 3 are counted as classes 0, 1, 2."
    assert number_labels(np.array([0, 2]))[1:] == (None, "no sample has the label 1; each stays a class.")
    assert number_labels(np.array([0, 10**6]))[0].tolist() == [0, 1]


# --- arrays and images


def test_an_archive_of_arrays(tmp_path: Path) -> None:
    pixels = np.arange(10 * 6 * 6, dtype=np.uint8).reshape(10, 6, 6)
    np.savez(tmp_path / "a.npz", x_train=pixels, y_train=np.arange(10) % 2, x_test=pixels[:3], y_test=[0, 1, 0])
    source = Npz(file=str(tmp_path / "a.npz"))
    data = source.read()
    assert data.train.x.shape == (10, 1, 6, 6) and len(data.test.y) == 3 and source.default_network == "cnn"
    assert data.transform is not None
    assert torch.allclose(data.transform(data.train.x, torch.float32), torch.from_numpy(pixels[:, None] / 255).float())
    np.savez(tmp_path / "b.npz", x=X, y=Y + 1, site=OWNER, note=1)
    data = Npz(file=str(tmp_path / "b.npz"), client="site").read()
    assert data.client_names == ("east", "north", "south") and data.class_names == ("1", "2")
    assert len(data.remarks) == 2 and "note, which is not used" in data.remarks[1]


def test_folders_of_images(tmp_path: Path) -> None:
    flat, divided, split = (tmp_path / name for name in ("flat", "divided", "split"))
    pictures(flat, *(f"{c}/{k}.png" for c in ("cat", "dog") for k in range(5)), mode="L")
    data = ImageFolder(file=str(flat)).read()
    assert data.owner is None and data.class_names == ("cat", "dog") and data.train.x.shape == (8, 1, 8, 8)
    pictures(divided, *(f"{p}/{c}/{k}.png" for p in ("ann", "bob") for c in ("cat", "dog") for k in range(5)))
    (divided / "ann" / ".DS_Store").write_text("")
    (divided / "notes.txt").write_text("")
    source = ImageFolder(file=str(divided), size=4)
    data = source.read()
    assert data.client_names == ("ann", "bob") and source.owners == 2 and data.train.x.shape == (16, 3, 4, 4)
    assert data.train.x.dtype == torch.uint8 and data.remarks == ("1 file is no image and left out: notes.txt.",)
    pictures(split, "train/a/1.png", "train/b/2.png", "test/a/3.png", "test/b/4.png", "test/b/5.png")
    data = ImageFolder(file=str(split)).read()
    assert len(data.train.y) == 2 and data.test.y.tolist() == [0, 1, 1] and data.class_names == ("a", "b")


# --- natural federations and identity


def own_tables(file: str, **more: Any) -> dict[str, Any]:
    return {"data": {"name": "csv", "file": file, "client": "hospital", "label": "outcome"}, **more}


def test_owners_make_the_federation_natural(tmp_path: Path) -> None:
    file = write(tmp_path)
    config = Config.build(own_tables(file))
    assert config.tables()["partition"]["name"] == "natural" and config.partition.clients == 3
    again = Config.build(config.tables())
    assert again.digest() == config.digest()
    with pytest.raises(AskewError, match=r"divided among 3 clients, and partition.clients is 30; leave it out"):
        Config.build(own_tables(file, partition={"clients": 30}))
    with pytest.warns(DataWarning, match="divides them anew"):
        run = askew.run(own_tables(file, partition={"name": "iid", "clients": 2}), rounds=1)
    assert "divides them anew" in run.facts["remark"]


def test_a_run_of_changed_data_is_another_run(tmp_path: Path) -> None:
    file = write(tmp_path)
    first = Config.build(own_tables(file)).digest()
    assert Config.build(own_tables(file)).digest() == first
    write(tmp_path, ROWS.replace("30,f", "31,f"))
    assert Config.build(own_tables(file)).digest() != first
    pictures(tmp_path / "p", "a/1.png", "b/2.png", "b/3.png")
    folder = {"data": {"name": "folder", "file": str(tmp_path / "p")}}
    config = Config.build(folder)
    before = config.digest()
    assert config.tables()["model"]["name"] == "cnn"
    (tmp_path / "p" / "b").rename(tmp_path / "p" / "c")
    assert Config.build(folder).digest() != before


def test_what_python_takes_in_one_line() -> None:
    parts = {name: (X[name == OWNER], Y[name == OWNER]) for name in ("east", "north", "south")}
    names = np.where(Y, "well", "ill")
    pairs = [TensorDataset(torch.from_numpy(x), torch.from_numpy(y)) for x, y in parts.values()]
    sparse = np.array([7, 900, 8])[np.arange(60) % 3]
    for data in ((X, Y, OWNER), (X, names.tolist(), OWNER.tolist()), parts, pairs, (X, Y, sparse)):
        run = askew.run(data=data, model="softmax", participation="full", rounds=1)
        assert run.config["partition"]["name"] == "natural"
        assert run.federation["clients"] == 3 and run.federation["sizes"] == [16, 16, 16]
    run = askew.run(data=(X, names, OWNER), model="softmax", rounds=1)
    assert run.federation["client_names"] == ["east", "north", "south"]
    assert run.federation["class_names"] == ["ill", "well"]


def test_a_ready_dataset_of_arrays_with_owners_that_are_names() -> None:
    data = askew.Dataset(askew.Samples(X, Y), askew.Samples(X[:5], Y[:5]), 2, owner=OWNER, test_owner=OWNER[:5])
    assert data.train.x.dtype == torch.float32 and data.train.y.dtype == torch.int64
    found = from_user(data)
    assert found.client_names == ("east", "north", "south") and found.test_owner is not None
    assert found.owner is not None and found.owner[:3].tolist() == [1, 2, 0] == found.test_owner[:3].tolist()


def test_what_was_done_to_data_is_said() -> None:
    with pytest.warns(DataWarning, match="the labels 1, 2 are counted as classes 0, 1"):
        askew.run(data=(X, Y + 1), model="softmax", partition={"name": "iid", "clients": 3}, rounds=1)
    with pytest.warns(DataWarning, match="divides them anew"):
        askew.run(data=(X, Y, OWNER), model="softmax", partition={"name": "iid", "clients": 3}, rounds=1)
    with pytest.warns(DataWarning, match="so this is a regression"):
        askew.run(data=(X, Y.astype(float)), model="softmax", partition={"name": "iid", "clients": 3}, rounds=1)
    with pytest.warns(DataWarning) as said:  # each sentence once
        askew.run(data=(X, np.array(["No", "no"])[Y], np.where(OWNER == "east", "North", OWNER)), rounds=1)
    assert [str(each.message).split(";")[0] for each in said] == [
        "'No' and 'no' are two classes",
        "'North' and 'north' are two clients",
    ]


# --- describe


def test_data_are_described_before_anything_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, ROWS.replace("30,f", ",f"))
    words = ["data", "describe", *settings("csv", "patients.csv", client="hospital", label="outcome")]
    assert main([*words, "--out", "skew.svg"]) == 0
    out = capsys.readouterr().out
    assert "3 clients, 2 classes" in out and "Basel" in out and "Chur" in out and "1 values are missing" in out
    assert "<svg" in (tmp_path / "skew.svg").read_text()
    assert main([*words, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [c["client"] for c in facts["clients"]] == ["Basel", "Bern", "Chur"]
    assert sum(sum(c["labels"]) for c in facts["clients"]) == facts["train"] == 5
    assert {c["name"]: c["missing"] for c in facts["columns"]} == {"hospital": 0, "age": 1, "sex": 0, "outcome": 0}
    found = askew.describe((X, Y, OWNER))
    assert found.clients == ("east", "north", "south") and found.counts.sum() == 48 and "north" in repr(found)


# --- mistakes


def settings(name: str, file: str, **more: Any) -> list[str]:
    pairs = {"data.name": name, "data.file": file} | {f"data.{key}": value for key, value in more.items()}
    return [word for key, value in pairs.items() for word in ("--set", f"{key}={value}")]


def archive(**arrays: Any) -> Callable[[Path], object]:
    return lambda folder: np.savez(folder / "d.npz", **arrays)


def false_header(folder: Path) -> None:
    """An archive with a header that states far more numbers than there are."""
    file = io.BytesIO()
    np.save(file, np.zeros(4))
    with zipfile.ZipFile(folder / "d.npz", "w") as packed:
        packed.writestr("x.npy", file.getvalue().replace(b"(4,)", b"(4" + b"0" * 12 + b",)"))
        packed.writestr("y.npy", file.getvalue())


def damaged_picture(folder: Path) -> None:
    pictures(folder / "p", "a/1.png", "b/2.png")
    (folder / "p/a/0.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")


def with_column(name: str, **values: str) -> str:
    """ROWS with a further column before the sex, whose value each sex has."""
    text = ROWS.replace("age", f"age,{name}")
    for sex, value in values.items():
        text = text.replace(f",{sex},", f",{value},{sex},")
    return text


def table(text: str) -> Callable[[Path], object]:
    return lambda folder: write(folder, text)


BOTH = {"client": "hospital", "label": "outcome"}
SHELL: dict[str, tuple[Callable[[Path], object], list[str], str]] = {
    "no file named": (table(ROWS), ["--set", "data.name=csv"], "data.file is not set; name the file"),
    "a file that is not there": (table(ROWS), settings("csv", "pat.csv", **BOTH), "'pat.csv' does not exist; set"),
    "a folder for a file": (
        lambda f: (f / "d").mkdir(),
        settings("csv", "d", **BOTH),
        "'d' is a folder; set data.file",
    ),
    "no label": (table(ROWS), settings("csv", "patients.csv"), "set data.label (in Python label=) to one of hospital"),
    "a label misspelt": (table(ROWS), settings("csv", "patients.csv", label="outcom"), "did you mean 'outcome'?"),
    "a client misspelt": (
        table(ROWS),
        settings("csv", "patients.csv", label="outcome", client="Hospital"),
        "data.client: patients.csv has no column 'Hospital'; did you mean 'hospital'?",
    ),
    "label and client alike": (
        table(ROWS),
        settings("csv", "patients.csv", label="hospital", client="hospital"),
        "both name the column 'hospital'",
    ),
    "the label dropped": (
        table(ROWS),
        settings("csv", "patients.csv", **BOTH, drop=["outcome"]),
        "data.drop and data.label both name the column 'outcome'; leave it out of data.drop.",
    ),
    "semicolons": (
        table(ROWS.replace(",", ";")),
        settings("csv", "patients.csv", **BOTH),
        """separated by ';' and not by ','; set data.delimiter = ";".""",
    ),
    "a short line": (
        table(ROWS + "Bern,30\n"),
        settings("csv", "patients.csv", **BOTH),
        "line 8 of patients.csv has 2 values, and the header names 4 columns",
    ),
    "a missing value": (
        table(ROWS.replace("40", "")),
        settings("csv", "patients.csv", **BOTH),
        """column 'age' has no value in line 3 of patients.csv; set data.missing to "drop" """.strip(),
    ),
    "a missing label": (
        table(ROWS.replace("60,m,ill", "60,m,?")),
        settings("csv", "patients.csv", **BOTH, missing="fill"),
        "column 'outcome' has no value in line 5 of patients.csv",
    ),
    "a missing client": (
        table(ROWS.replace("Chur", "")),
        settings("csv", "patients.csv", **BOTH),
        "column 'hospital' has no value in line 7 of patients.csv",
    ),
    "a text among numbers": (
        table(ROWS.replace("40", "4O")),
        settings("csv", "patients.csv", **BOTH),
        "column 'age' holds numbers, but '4O' in line 3 of patients.csv; correct",
    ),
    "an infinite number": (
        table(ROWS.replace("40", "inf")),
        settings("csv", "patients.csv", **BOTH),
        "column 'age' is infinite in line 3 of patients.csv",
    ),
    "free text": (
        table("note,outcome\n" + "".join(f"text {k},{k % 2}\n" for k in range(150))),
        settings("csv", "patients.csv", label="outcome"),
        "column 'note' of patients.csv has 150 different texts",
    ),
    "one label only": (
        table(ROWS.replace("well", "ill")),
        settings("csv", "patients.csv", **BOTH),
        "every row of patients.csv has the label 'ill' in column 'outcome'",
    ),
    "a count for a label": (
        table("x,cost\n" + "".join(f"{k},{7 * k}\n" for k in range(150))),
        settings("csv", "patients.csv", label="cost"),
        """has 150 different whole numbers; say what they are: set data.task""",
    ),
    "two columns of one name": (
        table(ROWS.replace("sex", "age")),
        settings("csv", "patients.csv", **BOTH),
        "patients.csv has two columns named 'age'; rename one",
    ),
    "an empty file": (table(""), settings("csv", "patients.csv", **BOTH), "patients.csv is empty"),
    "a workbook": (
        lambda f: (f / "patients.csv").write_bytes(b"PK\x03\x04rest"),
        settings("csv", "patients.csv", **BOTH),
        "is no text but a workbook or archive; export it as CSV",
    ),
    "another encoding": (
        lambda f: (f / "patients.csv").write_bytes(ROWS.replace("Chur", "Zürich").encode("latin-1")),
        settings("csv", "patients.csv", **BOTH),
        "patients.csv is no text in UTF-8 (byte 0xfc",
    ),
    "a NUL byte in a name": (
        table(ROWS.replace("age", "a\0ge", 1)),
        settings("csv", "patients.csv", **BOTH),
        "patients.csv has a NUL byte in 'hospital,a\\x00ge",
    ),
    "texts among the test's numbers": (
        lambda f: (write(f), write(f, ROWS.replace("60", "old").replace("50", "new"), "test.csv")),
        settings("csv", "patients.csv", **BOTH, test="test.csv"),
        "column 'age' holds numbers in patients.csv, but 'new' in line 4 of test.csv",
    ),
    "test columns unlike": (
        lambda f: (write(f), write(f, "hospital,age,outcome\nBern,3,ill\n", "test.csv")),
        settings("csv", "patients.csv", **BOTH, test="test.csv"),
        "test.csv has no column 'sex', which patients.csv has",
    ),
    "too many clients asked for": (
        table(ROWS),
        [*settings("csv", "patients.csv", **BOTH), "--set", "partition.clients=30"],
        "divided among 3 clients, and partition.clients is 30",
    ),
    "no such array": (archive(a=X, y=Y), settings("npz", "d.npz"), "data.x: d.npz has no array 'x'; known: a, y"),
    "pickled owners": (
        archive(x=X, y=Y, who=OWNER.astype(object)),
        settings("npz", "d.npz", client="who"),
        "the array 'who' in d.npz holds Python objects",
    ),
    "a false header": (false_header, settings("npz", "d.npz"), "the array 'x' in d.npz is damaged"),
    "no archive": (lambda f: write(f, "x", "d.npz"), settings("npz", "d.npz"), "d.npz is no NumPy archive"),
    "channels last in a file": (
        archive(x=np.zeros((5, 8, 8, 3), np.uint8), y=Y[:5]),
        settings("npz", "d.npz"),
        "have their channels last, shape [5, 8, 8, 3], and networks take [5, 3, 8, 8]",
    ),
    "no folder of images": (table(ROWS), settings("folder", "photos"), "the folder 'photos' does not exist"),
    "no images": (lambda f: (f / "p").mkdir(), settings("folder", "p"), "the folder 'p' holds no images"),
    "images beside classes": (
        lambda f: pictures(f / "p", "a/1.png", "b/2.png", "3.png"),
        settings("folder", "p"),
        "every one must be in CLASS/image or every one in CLIENT/CLASS/image",
    ),
    "one class of images": (
        lambda f: pictures(f / "p", "a/1.png", "a/2.png"),
        settings("folder", "p"),
        "are in the one class 'a'; make one folder for each class",
    ),
    "images of two sizes": (
        lambda f: (pictures(f / "p", "a/1.png"), pictures(f / "p", "b/2.png", size=9)),
        settings("folder", "p"),
        "p/a/1.png has 8×8 pixels, p/b/2.png 9×9; set data.size",
    ),
    "row numbers of pandas": (
        table("," + ROWS.replace("\n", "\n0,")),
        settings("csv", "patients.csv", **BOTH),
        "column 1 of patients.csv has no name, and the first line must name every column; name it, or leave it out",
    ),
    "thousands": (
        table(with_column("pay", f='"1,200"', m='"3,400"', x="1%")),
        settings("csv", "patients.csv", **BOTH),
        "holds numbers as texts, such as '1,200'; write them as 1234.5",
    ),
    "dates": (
        table(with_column("day", f="2024-01-05", m="2024-02-07", x="2024-03-01")),
        settings("csv", "patients.csv", **BOTH),
        "holds dates as texts, such as '2024-01-05'; give numbers",
    ),
    "one row a client": (
        table("hospital,age,outcome\na,1,x\nb,2,y\nc,3,x\n"),
        settings("csv", "patients.csv", **BOTH),
        "the rows of every client are too few to hold out",
    ),
    "a damaged image": (damaged_picture, settings("folder", "p"), "0.png cannot be read"),
}


@pytest.mark.parametrize("mistake", SHELL)
def test_a_mistake_in_the_shell_is_one_sentence(
    mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    prepare, words, sentence = SHELL[mistake]
    prepare(tmp_path)
    capsys.readouterr()
    assert main(["run", *words, "--rounds", "1"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and "Traceback" not in err
    assert sentence in err


class Photos(Dataset):
    """A dataset whose transform was forgotten."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, k: int) -> Any:
        return Image.new("RGB", (8, 8)), k


PYTHON: dict[str, tuple[Any, dict[str, Any], str]] = {
    "NaN in the inputs": ((np.where(X > 2, np.nan, X), Y), {}, r"the first in sample \d+ at \[\d\]; clean"),
    "texts for inputs": (([["a"], ["b"]], [0, 1]), {}, "x of the training data must be numbers, got the text 'a'"),
    "channels last": ((np.zeros((5, 28, 28, 1)), Y[:5]), {}, r"pass x.transpose\(0, 3, 1, 2\) of an array"),
    "labels one-hot": ((X, np.eye(2, dtype=int)[Y]), {}, "must be one number a sample, got shape"),
    "fewer labels": ((X, Y[:50]), {}, "as many targets as inputs"),
    "fewer owners": ((X, Y, OWNER[:50]), {}, "one owner a sample, got 50 owners for 60 samples"),
    "an owner missing": ((X, Y, [None, *OWNER[1:]]), {}, "sample 0 has none; drop it"),
    "a label missing": ((X, [None, *map(str, Y[1:])]), {}, "labels of the training data must have a value"),
    "owners that are real numbers": ((X, Y, X[:, 0]), {}, "must be names or whole numbers, got"),
    "test labels of another kind": ((X, Y), {"test": (X, Y.astype(str))}, "both be names or both be numbers"),
    "train and test in one": (
        (TensorDataset(torch.zeros(1)), TensorDataset(torch.zeros(1))),
        {},
        "are 2 datasets; pass a list of them for one a client, or data = the first and test = the second",
    ),
    "clients in a tuple": (((X, Y), (X, Y), (X, Y)), {}, r"are 3 pairs; pass a list of tuples"),
    "clients in lists": ([[X, Y], [X, Y]], {}, r"are 2 pairs; pass a list of tuples"),
    "a dictionary of arrays": ({"x": X, "y": Y}, {}, r"data\['x'\] is no setting but ndarray; pass \(x, y\)"),
    "a loader": (DataLoader(TensorDataset(torch.zeros(2))), {}, "are a DataLoader, .* pass loader.dataset"),
    "objects for numbers": ((X.astype(object), Y), {}, r"convert it with x.astype\(float\)"),
    "clients unlike": (
        {"a": (X, Y), "b": (X[:, :2], Y)},
        {},
        "those of client 'b' .* are not like those of client 'a'",
    ),
    "whole numbers for measurements": ((X.astype(int), Y, OWNER), {}, r"taken for tokens: .* pass x.astype\(float\)"),
    "splits for clients": ({"train": (X, Y), "test": (X, Y)}, {}, "keys train, test are no clients but splits"),
    "a client without data": ({"a": (X, Y), "b": 3}, {}, "client 'b' must be a pair"),
    "columns named for arrays": ((X, Y), {"label": "y"}, "client and label name columns of a table"),
    "pictures that are no tensors": (Photos(), {}, "x of item 0 of the training data is a picture, not yet a tensor"),
    "labels beyond the classes": (
        askew.Dataset(askew.Samples(X, Y + 1), askew.Samples(X, Y), 2),
        {},
        "must be 0 to 1, as classes = 2 says, got 2 for sample",
    ),
    "real labels for classes": (
        askew.Dataset(askew.Samples(X, X[:, 0]), askew.Samples(X, X[:, 0]), 2),
        {},
        "must be whole numbers from 0 to 1, got float32; pass y.long",
    ),
    "owners too few in a Dataset": (
        askew.Dataset(askew.Samples(X, Y), askew.Samples(X, Y), 2, owner=OWNER[:5]),
        {},
        "one owner for each of its 60 training samples, got 5",
    ),
}
TENSORS = askew.Samples(torch.from_numpy(X).float(), torch.from_numpy(Y))
NARROW, MISSING = TENSORS._replace(x=TENSORS.x[:, :2]), TENSORS._replace(x=TENSORS.x / 0)
READY: dict[str, tuple[askew.Dataset, str]] = {  # ready datasets, from Python or from a user's own source
    "targets too few": (askew.Dataset(TENSORS._replace(y=TENSORS.y[:5]), TENSORS, 2), "got 60 inputs and 5 targets"),
    "labels beyond": (askew.Dataset(TENSORS, TENSORS, 1), "labels of the Dataset must be 0 to 0"),
    "owners too few": (askew.Dataset(TENSORS, TENSORS, 2, owner=OWNER[:5]), "one owner for each of its 60"),
    "missing values": (askew.Dataset(MISSING, TENSORS, 2), "training inputs of the Dataset must be finite"),
    "missing values in the test": (askew.Dataset(TENSORS, MISSING, 2), "test inputs of the Dataset must be finite"),
    "missing targets": (
        askew.Dataset(*[askew.Samples(TENSORS.x, TENSORS.x[:, 0] / 0)] * 2, 0, criterion="squared_error"),
        "training targets of the Dataset must be finite",
    ),
    "a narrow test": (askew.Dataset(TENSORS, NARROW, 2), r"inputs of shape \(4,\) and the test data \(2,\)"),
    "labels without classes": (askew.Dataset(TENSORS, TENSORS, 0), "has labels, whole numbers, and classes = 0"),
    "fewer than no classes": (askew.Dataset(TENSORS, TENSORS, -1), "classes of the Dataset must be .* got -1"),
    "classes by name": (askew.Dataset(TENSORS, TENSORS, "two"), "classes of the Dataset must be .* got 'two'"),  # type: ignore[arg-type]
    "no such criterion": (
        askew.Dataset(TENSORS, TENSORS, 2, criterion="foo"),
        "must be 'cross_entropy' or 'squared_error', or a function .* got 'foo'",
    ),
}


@pytest.mark.parametrize("mistake", PYTHON)
def test_a_mistake_in_python_is_one_sentence(mistake: str) -> None:
    data, more, sentence = PYTHON[mistake]
    with pytest.raises(AskewError, match=sentence) as caught, warnings.catch_warnings():
        askew.run(data=data, rounds=1, **more)
    assert "\n" not in str(caught.value)


def own_source(data: Any) -> Source:
    """A source of a user's own that loads these data."""
    return type("Own", (Source,), {"__module__": __name__, "load": lambda self, seed, clients: data})()


@pytest.mark.parametrize("mistake", READY)
def test_a_ready_dataset_is_checked_wherever_it_comes_from(mistake: str) -> None:
    data, sentence = READY[mistake]
    source, partition = own_source(data), Iid(clients=3)
    for attempt in (
        lambda: askew.run(data=data, rounds=1),
        lambda: Federation(source, partition, 0),
        lambda: BuildCache().samples(source, partition, 3, 0, torch.device("cpu"), torch.float32),
    ):
        with pytest.raises(AskewError, match=sentence) as caught:
            attempt()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("data", [None, TENSORS])
def test_a_source_must_load_a_dataset(data: object) -> None:
    with pytest.raises(DataError, match=rf"load\(\) of the dataset Own must return .* got {type(data).__name__}; end"):
        Federation(own_source(data), Iid(clients=3), 0)


def test_owners_that_a_source_names_are_numbered() -> None:
    fed = Federation(own_source(askew.Dataset(TENSORS, TENSORS, 2, owner=OWNER)), Natural(clients=3), 0)
    assert fed.client_names == tuple(sorted(set(map(str, OWNER))))


def test_what_a_check_of_a_dataset_lets_pass() -> None:
    """Inputs of another precision, targets that are missing under a criterion of one's own, a count as target."""
    double, holes = TENSORS._replace(x=TENSORS.x.double()), TENSORS._replace(y=TENSORS.x[:, 0] / 0)
    for data in (
        askew.Dataset(double, TENSORS, 2),
        askew.Dataset(holes, holes, 0, criterion=lambda output, y: (output[:, 0] - y).nan_to_num()),
        askew.Dataset(TENSORS, TENSORS, 0, criterion="squared_error"),
    ):
        assert len(Federation(own_source(data), Iid(clients=3), 0).pool.y) == 60


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.bool])
def test_whole_numbers_of_any_type_are_labels(dtype: torch.dtype) -> None:
    x, y = torch.randn(40, 3, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 2
    own: dict[str, Any] = {"model": "softmax", "clients": 2, "cohort": 2, "rounds": 1, "progress": False}
    usual, other = (
        askew.run(data=askew.Dataset(askew.Samples(x, labels), askew.Samples(x, labels), classes=2), **own)
        for labels in (y, y.to(dtype))
    )
    assert other.curve("loss") == usual.curve("loss") and other.name == usual.name


def test_targets_that_are_no_labels_have_the_squared_error() -> None:
    """A Dataset without classes and without a criterion is a regression; shares of classes are labels."""
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    network = torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.Flatten(0))  # one number a sample
    own: dict[str, Any] = {"model": network, "clients": 2, "cohort": 2, "rounds": 1, "progress": False}
    samples = askew.Samples(x, x[:, 0])
    with pytest.warns(DataWarning, match="has no classes, and its targets are neither labels nor shares of classes"):
        run = askew.run(data=askew.Dataset(samples, samples, classes=0), **own)
    said = askew.run(data=askew.Dataset(samples, samples, classes=0, criterion="squared_error"), **own)
    assert run.curve("loss") == said.curve("loss") and run.name == said.name
    shares = askew.Samples(x, torch.softmax(x, 1))
    assert askew.Dataset(shares, shares, classes=0).criterion == "cross_entropy"
    assert askew.Dataset(askew.Samples(x, x), askew.Samples(x, x), classes=0).criterion == "squared_error"


def test_samples_that_are_names_are_refused_when_the_dataset_is_made() -> None:
    with pytest.raises(DataError, match="of tensors or arrays of numbers; hand"):
        askew.Dataset(askew.Samples(X, Y.astype(str)), askew.Samples(X, Y), 2)


# --- other libraries, where they are installed


def test_frames_and_parquet_files_are_the_csv_file(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas", reason="needs pandas: pip install -e '.[dev]'")
    pytest.importorskip("pyarrow", reason="needs pyarrow: pip install -e '.[dev]'")
    file = write(tmp_path)
    frame, plain = pandas.read_csv(file), csv_source(file).read()
    found = [from_user(frame, client="hospital", label="outcome")]
    by_client = {name: part.drop(columns="hospital") for name, part in frame.groupby("hospital")}
    assert from_user(by_client, label="outcome").client_names == plain.client_names
    frame.to_parquet(tmp_path / "p.parquet")
    source = {"name": "parquet", "file": str(tmp_path / "p.parquet"), **BOTH}
    found.append(Config.build({"data": source}).data.load(0, 0))
    for other in found:
        assert torch.equal(other.train.x, plain.train.x) and torch.equal(other.train.y, plain.train.y)
        assert other.client_names == plain.client_names and other.class_names == plain.class_names
    with pytest.raises(DataError, match=r"column 'age' has no value in row 1 of the DataFrame.* by table.dropna\(\)"):
        from_user(frame.assign(age=frame["age"].where(frame["age"] != 40)), client="hospital", label="outcome")
    by_index = from_user(frame.set_index("hospital"), client="hospital", label="outcome")
    assert torch.equal(by_index.train.x, plain.train.x)
    codes = frame.assign(age=frame["age"].astype("category"))  # of numbers: as many inputs as there are
    wider = from_user(codes, client="hospital", label="outcome").train.x.shape[1] - plain.train.x.shape[1]
    assert wider == frame["age"].nunique() - 1
    price = frame.loc[frame.index.repeat(20)].assign(age=np.arange(20.0 * len(frame)))
    assert from_user(price, client="hospital", label="age").classes == 0  # many whole numbers of a real type
    with pytest.raises(DataError, match=r"for a regression .astype\(float\)"):
        from_user(price.astype({"age": int}), client="hospital", label="age")


def test_a_column_of_a_hub_dataset_names_the_clients() -> None:
    datasets = pytest.importorskip(
        "datasets", reason="needs the Hugging Face datasets library: pip install -e '.[hub]'"
    )
    rows = {"x": X.tolist(), "label": np.where(Y, "well", "ill").tolist(), "site": OWNER.tolist()}
    run = askew.run(data=datasets.Dataset.from_dict(rows), client="site", model="softmax", rounds=1)
    assert run.federation["client_names"] == ["east", "north", "south"]
    assert run.federation["class_names"] == ["ill", "well"]


@pytest.mark.slow
def test_a_transformer_is_a_network() -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install transformers")
    shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}

    class Classifier(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = transformers.BertConfig(vocab_size=50, num_labels=2, max_position_embeddings=8, **shape)
            self.bert = transformers.BertForSequenceClassification(config)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.bert(input_ids=x).logits
            return logits

    torch.manual_seed(1)
    tokens = np.random.default_rng(0).integers(4, size=(60, 8)) + 4 * Y[:, None]  # each class has words of its own
    run = askew.run(data=(tokens, Y, OWNER), model=Classifier(), participation="full", rounds=12, lr=0.5, epochs=2)
    assert run.best_accuracy is not None and run.best_accuracy > 0.9


def test_a_reader_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    shutil.copy(write(tmp_path), tmp_path / "p.parquet")
    with pytest.raises(DataError, match="read by pyarrow, which is not installed; pip install pyarrow"):
        Config.build({"data": {"name": "parquet", "file": str(tmp_path / "p.parquet"), **BOTH}})


def test_test_samples_that_nothing_can_be_learnt_of_are_remarked(tmp_path: Path) -> None:
    train, other = (
        write(tmp_path),
        write(tmp_path, "hospital,age,sex,outcome\nBern,31,f,dead\nBern,32,m,ill\n", "test.csv"),
    )
    unseen = csv_source(train, test=other, client="").load(0, 1).remarks
    assert "no training sample has the label dead, which 50% of the test samples have." in unseen
    same = csv_source(train, test=train, client="").load(0, 1).remarks
    assert "the test samples are the training samples, so that the accuracy says little about new ones." in same
    assert not csv_source(train, client="").load(0, 1).remarks
