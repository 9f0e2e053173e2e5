"""Datasets in files: every layout is read alike, nothing unverified is decoded, and the settings do what they say."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import pickle
import re
import struct
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from askew.cli import data as data_commands
from askew.data import files, shakespeare
from askew.data.files import File
from askew.data.images import Cifar10, Cifar100, Emnist, FashionMnist, Images, Mnist, TinyImageNet
from askew.data.shakespeare import Shakespeare
from askew.data.view import PixelTransform, TextWindows, marks
from askew.errors import ConfigError, DataError, UnknownName

Contents = dict[str, bytes]


def md5(data: bytes) -> str:
    return hashlib.md5(data).hexdigest()


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """An empty folder of datasets."""
    files.use(tmp_path / "data")
    yield tmp_path / "data"
    files.use(None)


@pytest.fixture
def publish(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lets small files stand for the published ones."""

    def now(
        name: str, contents: Contents, train: int, test: int, form: int = 0, archive: bytes = b"", classes: int = 0
    ) -> None:
        entry = files.table[name]
        known = [File(n, md5(c)) for n, c in contents.items()]
        if all(not file.md5 for file in entry.forms[form].files):
            known = [File(file.name) for file in known]
        new = entry.forms[form]._replace(files=tuple(known))
        if new.archive and new.archive.md5:
            new = new._replace(archive=File(new.archive.name, md5(archive)))
        forms = tuple(new if k == form else each for k, each in enumerate(entry.forms))
        replaced = entry._replace(train=train, test=test, classes=classes or entry.classes, forms=forms)
        monkeypatch.setitem(files.table, name, replaced)

    return now


def put(folder: Path, contents: Contents) -> None:
    for name, data in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def tarred(contents: Contents) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, data in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return out.getvalue()


def zipped(contents: Contents) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, data in contents.items():
            archive.writestr(name, data)
    return out.getvalue()


def drawn(*shape: int, below: int = 256, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, below, shape, dtype=np.uint8)


# cifar ----------------------------------------------------------------------------------------------------------

X, Y = drawn(14, 3, 32, 32), drawn(14, below=10, seed=1)
BATCHES = [f"data_batch_{k}" for k in range(1, 6)] + ["test_batch"]
PARTS = [slice(2 * k, 2 * k + 2) for k in range(5)] + [slice(10, 14)]


def records(x: np.ndarray[Any, Any], *labels: np.ndarray[Any, Any]) -> bytes:
    return np.hstack([*(label[:, None] for label in labels), x.reshape(len(x), -1)]).tobytes()


def binary() -> Contents:
    return {f"{name}.bin": records(X[part], Y[part]) for name, part in zip(BATCHES, PARTS, strict=True)}


def batch(x: np.ndarray[Any, Any], **labels: list[int]) -> bytes:
    """A pickle as Python 2 wrote it (protocol 2): texts without an encoding, and the arrays as numpy then took them apart."""
    short = lambda data: b"U" + bytes([len(data)]) + data
    long = lambda data: b"T" + struct.pack("<I", len(data)) + data
    whole = lambda value: b"J" + struct.pack("<i", value)
    dtype = (
        b"cnumpy\ndtype\n(" + short(b"u1") + b"K\0K\1tR(K\3" + short(b"|") + b"NNN" + whole(-1) + whole(-1) + b"K\0tb"
    )
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\0t" + short(b"b") + b"tR"
    array += b"(K\1(" + whole(len(x)) + whole(x[0].size) + b"t" + dtype + b"I00\n" + long(x.tobytes()) + b"tb"
    lists = b"".join(
        short(name.encode()) + b"](" + b"".join(map(whole, values)) + b"es" for name, values in labels.items()
    )
    return b"\x80\x02}" + short(b"data") + array + b"s" + lists + b"."


def python() -> Contents:
    return {name: batch(X[part], labels=Y[part].tolist()) for name, part in zip(BATCHES, PARTS, strict=True)}


@pytest.fixture
def cifar10(root: Path, publish: Any) -> Path:
    """Fourteen images as the binary CIFAR-10, in its folder."""
    publish("cifar10", binary(), 10, 4)
    put(root / "cifar-10-batches-bin", binary())
    return root


@pytest.mark.parametrize("layout", ["folder", "archive", "python folder", "python archive"])
def test_cifar10_is_read_from_every_layout(root: Path, publish: Any, layout: str) -> None:
    form = int(layout.startswith("python"))
    held, inside = (python(), "cifar-10-batches-py") if form else (binary(), "cifar-10-batches-bin")
    packed = tarred(
        {f"{inside}/readme.html": b"", "../evil": b"", **{f"{inside}/{n}": d for n, d in reversed(held.items())}}
    )
    publish("cifar10", held, 10, 4, form, packed)
    put(root, {files.table["cifar10"].forms[form].archive.name: packed}) if "archive" in layout else put(
        root / inside, held
    )
    data = Cifar10().load(0, 3)
    assert torch.equal(data.train.x, torch.from_numpy(X[:10])) and torch.equal(data.test.x, torch.from_numpy(X[10:]))
    assert data.train.y.tolist() == Y[:10].tolist() and data.test.y.tolist() == Y[10:].tolist()
    assert data.train.x.dtype == torch.uint8 and data.train.y.dtype == torch.int64
    assert data.classes == 10 and data.owner is None and not (root.parent / "evil").exists()


@pytest.mark.parametrize("form", [0, 1])
def test_cifar100_has_the_fine_labels(root: Path, publish: Any, form: int) -> None:
    coarse, fine = drawn(14, below=20, seed=2), drawn(14, below=100, seed=3)
    parts = {"train": slice(0, 10), "test": slice(10, 14)}
    if form:
        held = {
            n: batch(X[p], coarse_labels=coarse[p].tolist(), fine_labels=fine[p].tolist()) for n, p in parts.items()
        }
    else:
        held = {f"{n}.bin": records(X[p], coarse[p], fine[p]) for n, p in parts.items()}
    publish("cifar100", held, 10, 4, form)
    put(root / ("cifar-100-python" if form else "cifar-100-binary"), held)
    data = Cifar100().load(0, 3)
    assert torch.equal(data.train.x, torch.from_numpy(X[:10])) and data.train.y.tolist() == fine[:10].tolist()
    assert data.test.y.tolist() == fine[10:].tolist() and data.classes == 100


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_no_batch_runs_code(root: Path, publish: Any) -> None:
    held = python() | {"data_batch_3": pickle.dumps(Evil(root / "evil"))}
    publish("cifar10", python(), 10, 4, form=1)
    put(root / "cifar-10-batches-py", held)
    with pytest.raises(DataError, match="data_batch_3 has the MD5"):
        Cifar10().load(0, 3)
    publish("cifar10", held, 10, 4, form=1)  # even if that were the published file
    with pytest.raises(DataError, match="mkdir, which no array needs"):
        Cifar10().load(0, 3)
    assert not (root / "evil").exists()


def test_damaged_files_are_refused_with_both_checksums(cifar10: Path) -> None:
    good = binary()
    broken = {
        "truncated": good["data_batch_2.bin"][:-1],
        "swapped": good["data_batch_1.bin"],
        "tampered": good["data_batch_2.bin"][:99] + b"?" + good["data_batch_2.bin"][100:],
        "empty": b"",
    }
    for bad in broken.values():
        put(cifar10 / "cifar-10-batches-bin", {"data_batch_2.bin": bad})
        with pytest.raises(DataError) as told:
            Cifar10().load(0, 3)
        assert all(
            word in str(told.value)
            for word in ("data_batch_2.bin", md5(bad), md5(good["data_batch_2.bin"]), "askew data get")
        )


def test_a_damaged_archive_is_refused(root: Path, publish: Any) -> None:
    packed = tarred({f"cifar-10-batches-bin/{n}": d for n, d in binary().items()})
    publish("cifar10", binary(), 10, 4, 0, packed)
    for bad in (packed[:-200], tarred({})):
        put(root, {"cifar-10-binary.tar.gz": bad})
        with pytest.raises(DataError) as told:
            Cifar10().load(0, 3)
        assert md5(bad) in str(told.value) and md5(packed) in str(told.value)


def test_missing_files_say_what_to_do(root: Path) -> None:
    with pytest.raises(DataError) as told:
        Cifar10().load(0, 3)
    assert all(
        word in str(told.value) for word in ("`askew data get cifar10 --data-dir ", "cifar-10-binary.tar.gz", str(root))
    )
    put(root / "cifar-10-batches-bin", {"data_batch_1.bin": b""})  # a part is not the whole
    with pytest.raises(DataError, match="askew data get cifar10"):
        Cifar10().load(0, 3)
    with pytest.raises(DataError, match="MNIST/raw/t10k-images-idx3-ubyte"):
        Mnist().load(0, 3)


# idx ------------------------------------------------------------------------------------------------------------


def idx(array: np.ndarray[Any, Any]) -> bytes:
    return np.array([0x800 + array.ndim, *array.shape], ">i4").tobytes() + array.tobytes()


GREY, DIGITS = drawn(9, 28, 28), drawn(9, below=10, seed=1)


def idx_files(prefix: str = "", test: str = "t10k", labels: np.ndarray[Any, Any] = DIGITS) -> Contents:
    parts = {f"{prefix}train": slice(0, 6), f"{prefix}{test}": slice(6, 9)}
    return {
        f"{n}-{kind}-ubyte": idx(a[p])
        for n, p in parts.items()
        for kind, a in (("images-idx3", GREY), ("labels-idx1", labels))
    }


@pytest.mark.parametrize("source, folder", [(Mnist, "MNIST/raw"), (Mnist, "mnist"), (FashionMnist, "FashionMNIST/raw")])
@pytest.mark.parametrize("packed", [False, True])
def test_idx_files_are_read_plain_and_packed(
    root: Path, publish: Any, source: type[Images], folder: str, packed: bool
) -> None:
    publish(source.key, idx_files(), 6, 3)
    held = {f"{n}.gz": gzip.compress(d, mtime=0) for n, d in idx_files().items()} if packed else idx_files()
    put(root / folder, held)
    data = source().load(0, 3)
    assert torch.equal(data.train.x[:, 0], torch.from_numpy(GREY[:6])) and torch.equal(
        data.test.x[:, 0], torch.from_numpy(GREY[6:])
    )
    assert data.train.y.tolist() == DIGITS[:6].tolist() and data.test.y.tolist() == DIGITS[6:].tolist()


def test_a_truncated_gzip_file_is_refused_with_both_checksums(root: Path, publish: Any) -> None:
    publish("mnist", idx_files(), 6, 3)
    held = {f"{n}.gz": gzip.compress(d, mtime=0) for n, d in idx_files().items()}
    name = "train-images-idx3-ubyte"
    for bad in (held[f"{name}.gz"][:-500], b"not gzip"):
        put(root / "MNIST/raw", held | {f"{name}.gz": bad})
        with pytest.raises(DataError, match=rf"{name}.gz.*MD5 \w{{32}} .*{md5(idx_files()[name])}"):
            Mnist().load(0, 3)


# emnist ---------------------------------------------------------------------------------------------------------

LETTERS = np.array([1, 2, 3, 26, 11, 10, 1, 10, 12], np.uint8)


def letters(labels: np.ndarray[Any, Any] = LETTERS) -> Contents:
    return idx_files("emnist-letters-", "test", labels)


@pytest.mark.parametrize("layout", ["EMNIST/raw", "emnist", "gzip.zip", "EMNIST/raw/gzip.zip"])
def test_letters_are_turned_upright_and_counted_from_zero(root: Path, publish: Any, layout: str) -> None:
    packed = zipped({f"gzip/{n}.gz": gzip.compress(d) for n, d in letters().items()})
    publish("emnist", letters(), 6, 3, 0, packed)
    put(root, {layout: packed}) if layout.endswith("zip") else put(root / layout, letters())
    data = Emnist().load(0, 3)
    assert torch.equal(data.train.x[:, 0].mT, torch.from_numpy(GREY[:6]))
    assert data.train.y.tolist() == [0, 1, 2, 25, 10, 9] and data.classes == 26
    ten = Emnist(letters=10).load(0, 3)
    assert ten.train.y.tolist() == [0, 1, 2, 9] and ten.test.y.tolist() == [0, 9] and ten.classes == 10
    assert torch.equal(ten.train.x, data.train.x[[0, 1, 2, 5]])
    seen = ten.view(ten.train.x, torch.float64)  # type: ignore[misc]
    assert abs(float(seen.mean())) < 1e-6 and abs(float(seen.std(correction=0)) - 1) < 1e-6
    assert torch.equal(Emnist(letters=10, train=1).load(0, 3).view.mean, ten.view.mean)  # type: ignore[union-attr]


def test_letters_without_a_checksum_are_counted(root: Path, publish: Any) -> None:
    publish("emnist", letters(), 7, 3)
    put(root / "emnist", letters())
    with pytest.raises(DataError, match="should hold 7 train images and labels, got 6 and 6"):
        Emnist().load(0, 3)
    publish("emnist", letters(), 6, 3)
    for labels, told in ((LETTERS - 1, "numbered from 1"), (LETTERS + 1, "labels of 26 classes, got number 26")):
        put(root / "emnist", letters(labels))
        with pytest.raises(DataError, match=told):
            Emnist().load(0, 3)
    name = "emnist-letters-test-images-idx3-ubyte"
    for bad in (letters()[name][:-1], b"", b"\0\0\x0d" + letters()[name][3:], letters()[name][:7]):
        put(root / "emnist", letters() | {name: bad})
        with pytest.raises(DataError, match=f"{name} is not a whole idx file"):
            Emnist().load(0, 3)


# tiny imagenet --------------------------------------------------------------------------------------------------


def photograph(shade: int, side: int = 64, mode: str = "RGB") -> bytes:
    from PIL import Image

    out = io.BytesIO()
    Image.new(mode, (side, side), shade if mode == "L" else (shade, 0, 255 - shade)).save(out, "JPEG", quality=95)
    return out.getvalue()


def tiny() -> Contents:
    ids = ["n03", "n01", "n02"]
    held = {
        "wnids.txt": "\n".join(ids).encode(),
        "val/val_annotations.txt": b"val_0.JPEG\tn02\t0\t0\t9\t9\nval_1.JPEG\tn01\t0\t0\t9\t9\n",
    }
    held |= {
        f"train/{wnid}/images/{wnid}_{k}.JPEG": photograph(80 * int(wnid[-1]) + k) for wnid in ids for k in range(2)
    }
    return held | {"val/images/val_0.JPEG": photograph(160), "val/images/val_1.JPEG": photograph(80, mode="L")}


@pytest.mark.parametrize("packed", [False, True])
def test_tiny_imagenet_is_read_from_folder_and_zip(root: Path, publish: Any, packed: bool) -> None:
    archive = zipped({f"tiny-imagenet-200/{n}": d for n, d in tiny().items()})
    publish("tiny_imagenet", {n: d for n, d in tiny().items() if n.endswith("txt")}, 6, 2, 0, archive, classes=3)
    put(root, {"tiny-imagenet-200.zip": archive}) if packed else put(root / "tiny-imagenet-200", tiny())
    data = TinyImageNet().load(0, 3)
    assert (
        data.train.x.shape == (6, 3, 64, 64)
        and data.train.y.tolist() == [0, 0, 1, 1, 2, 2]
        and data.test.y.tolist() == [1, 0]
    )
    shades = data.train.x.float().mean((2, 3))
    assert torch.allclose(shades[:, 0], torch.tensor([80.0, 81, 160, 161, 240, 241]), atol=3)
    assert torch.allclose(shades.sum(1), torch.tensor(255.0), atol=6)
    assert torch.allclose(data.test.x[1].float().mean((1, 2)), torch.tensor(80.0), atol=3)  # grey becomes colour


def test_tiny_imagenet_refuses_what_is_not_there_or_not_an_image(
    root: Path, publish: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish("tiny_imagenet", {n: d for n, d in tiny().items() if n.endswith("txt")}, 6, 2, classes=3)
    at, name = root / "tiny-imagenet-200", "train/n02/images/n02_1.JPEG"
    for bad in (b"text", photograph(1, side=32)):
        put(at, tiny() | {name: bad})
        with pytest.raises(DataError, match=f"{name} is not a JPEG file of 64×64"):
            TinyImageNet().load(0, 3)
    (at / name).unlink()
    with pytest.raises(DataError, match=f"lacks {name}"):
        TinyImageNet().load(0, 3)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError, match=re.escape("pip install 'askew[images]'")):
        TinyImageNet().load(0, 3)


# the cache ------------------------------------------------------------------------------------------------------


@pytest.fixture
def decodings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by one whenever CIFAR-10 is decoded."""
    seen: list[str] = []
    decode = Cifar10.decode
    monkeypatch.setattr(Cifar10, "decode", lambda self, where: seen.append(where.name) or decode(self, where))
    return seen


def cache(root: Path) -> Path:
    [path] = (root / files.CACHE).iterdir()
    return path


def test_a_second_load_comes_from_the_cache(cifar10: Path, decodings: list[str]) -> None:
    first, second = Cifar10().load(0, 3), Cifar10().load(0, 3)
    assert len(decodings) == 1 and cache(cifar10).name.startswith("cifar10-")
    for one, other in zip((*first.train, *first.test), (*second.train, *second.test), strict=True):
        assert torch.equal(one, other) and one.dtype == other.dtype


def test_a_changed_original_is_verified_anew(cifar10: Path, decodings: list[str]) -> None:
    Cifar10().load(0, 3)
    path = cifar10 / "cifar-10-batches-bin" / "test_batch.bin"
    os.utime(path, ns=(1, 1))
    Cifar10().load(0, 3)
    assert len(decodings) == 2
    Cifar10().load(0, 3)
    assert len(decodings) == 2
    path.write_bytes(path.read_bytes()[::-1])
    with pytest.raises(DataError, match=r"test_batch\.bin has the MD5"):
        Cifar10().load(0, 3)


@pytest.mark.parametrize(
    "harm", [lambda d: d[:-1], lambda d: d[:40], lambda d: b"", lambda d: d[:-9] + bytes([d[-9] ^ 1]) + d[-8:]]
)
def test_a_damaged_cache_is_made_anew(cifar10: Path, decodings: list[str], harm: Any) -> None:
    Cifar10().load(0, 3)
    path = cache(cifar10)
    path.write_bytes(harm(path.read_bytes()))
    assert torch.equal(Cifar10().load(0, 3).train.x, torch.from_numpy(X[:10]))
    assert len(decodings) == 2
    Cifar10().load(0, 3)
    assert len(decodings) == 2 and cache(cifar10) == path


def test_a_cache_of_other_files_is_not_used(cifar10: Path, publish: Any) -> None:
    Cifar10().load(0, 3)
    old, stats = cache(cifar10), {p: p.stat() for p in (cifar10 / "cifar-10-batches-bin").iterdir()}
    other = {f"{name}.bin": records(X[part] ^ 255, Y[part]) for name, part in zip(BATCHES, PARTS, strict=True)}
    publish("cifar10", other, 10, 4)
    put(cifar10 / "cifar-10-batches-bin", other)
    for path, stat in stats.items():
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert torch.equal(Cifar10().load(0, 3).train.x, torch.from_numpy(X[:10] ^ 255)) and old.exists()


def test_a_folder_that_cannot_be_written_does_without_a_cache(cifar10: Path, decodings: list[str]) -> None:
    (cifar10 / files.CACHE).write_text("in the way")
    for _ in range(2):
        assert torch.equal(Cifar10().load(0, 3).train.x, torch.from_numpy(X[:10]))
    assert len(decodings) == 2


# settings -------------------------------------------------------------------------------------------------------


def test_normalisation(cifar10: Path) -> None:
    x = torch.from_numpy(X[:10])
    mean, std = (
        torch.tensor(v, dtype=torch.float64)[:, None, None] for v in ((0.491, 0.482, 0.447), (0.247, 0.243, 0.262))
    )
    for normalise, want in (("channels", (x / 255 - mean) / std), ("unit", x / 255), ("half", x / 127.5 - 1)):
        data = Cifar10(normalise=normalise).load(0, 3)
        assert isinstance(data.view, PixelTransform) and not data.view.random
        assert torch.allclose(data.view(data.train.x, torch.float64), want.double(), atol=1e-6)


def test_random_changes_reach_the_view_and_leave_tests_alone(cifar10: Path) -> None:
    data = Cifar10(crop=28, pad=2, fill="reflect", flip=True, turn=10, chance=0.5).load(0, 3)
    assert isinstance(data.view, PixelTransform) and data.view.random and data.train.x.shape[2:] == (32, 32)
    told = (data.view.crop, data.view.pad, data.view.fill, data.view.flip, data.view.turn, data.view.chance)
    assert told == (28, 2, "reflect", True, 10, 0.5)
    seen = data.view(data.test.x, torch.float64)
    assert torch.allclose(seen, Cifar10().load(0, 3).view(data.test.x[:, :, 2:30, 2:30], torch.float64))  # type: ignore[misc]


def test_frozen_images_are_changed_once_for_all(cifar10: Path) -> None:
    source = Cifar10(crop=28, flip=True, frozen=True)
    data, again, other = source.load(0, 3), source.load(0, 3), source.load(1, 3)
    assert isinstance(data.view, PixelTransform) and not data.view.random and data.train.x.dtype == torch.uint8
    loose = Cifar10(crop=28, flip=True).load(0, 3)
    assert torch.equal(data.train.x, loose.view.cut(loose.train.x, marks(0, 10)))  # type: ignore[union-attr]
    assert torch.equal(data.train.x, again.train.x) and not torch.equal(data.train.x, other.train.x)
    assert torch.equal(data.test.x, loose.test.x[:, :, 2:30, 2:30])
    assert data.view.shape(tuple(data.train.x.shape[1:])) == (3, 28, 28)


def test_random_tests_are_cut_once(cifar10: Path) -> None:
    for frozen in (False, True):
        data = Cifar10(crop=28, random_test=True, frozen=frozen).load(0, 3)
        assert data.test.x.shape == (4, 3, 28, 28) and torch.equal(
            data.test.x, Cifar10(crop=28, random_test=True).load(0, 3).test.x
        )
        windows = torch.from_numpy(X[10:]).unfold(2, 28, 1).unfold(3, 28, 1)  # all places of a 28×28 square
        same = (windows == data.test.x[:, :, None, None]).flatten(4).all(4).all(1).flatten(1)
        assert same.sum(1).tolist() == [1] * 4 and len(set(same.int().argmax(1).tolist())) > 1
        assert data.view.shape(tuple(data.test.x.shape[1:])) == (3, 28, 28)  # type: ignore[union-attr]


def test_the_first_so_many(cifar10: Path) -> None:
    data = Cifar10(train=3, test=2).load(0, 3)
    assert torch.equal(data.train.x, torch.from_numpy(X[:3])) and data.test.y.tolist() == Y[10:12].tolist()
    with pytest.raises(DataError, match="train must be at most the 10 images there are, got 11"):
        Cifar10(train=11).load(0, 3)


@pytest.mark.parametrize(
    "wrong, told",
    [
        ({"chance": 0.5}, "nothing cuts them"),
        ({"frozen": True}, "frozen needs a random change"),
        ({"random_test": True}, "random_test needs a random change"),
        ({"fill": "reflect", "turn": 5}, "there is none"),
        ({"fill": "mean"}, "there is none"),
        ({"fill": "mean", "pad": 4, "frozen": True}, "stay bytes"),
        ({"turn": 181}, "turn must be"),
        ({"fill": "white"}, "unknown fill"),
        ({"normalise": "chanels"}, "did you mean 'channels'"),
    ],
)
def test_contradictions_are_refused(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Cifar10(**wrong)


def test_cuts_larger_than_the_image_are_refused(cifar10: Path) -> None:
    with pytest.raises(DataError, match="crop must be at most the side of an image, 32, got 33"):
        Cifar10(crop=33, pad=4).load(0, 3)
    with pytest.raises(DataError, match="reflects at most 31 pixels, got pad = 32"):
        Cifar10(pad=32, fill="reflect").load(0, 3)
    Cifar10(pad=31, fill="reflect").load(0, 3)


@pytest.mark.parametrize("source", [Mnist, FashionMnist, Emnist, Cifar10, Cifar100, TinyImageNet])
def test_every_set_tells_its_classes_and_has_an_idea(source: type[Images]) -> None:
    assert len(source.names) in (0, files.table[source.key].classes) and source.idea
    assert (len(source.names) > 0) == (files.table[source.key].classes <= 26)
    assert (
        len(source.mean) == len(source.std) == (0 if source is Emnist else 1 if source in (Mnist, FashionMnist) else 3)
    )


# shakespeare ----------------------------------------------------------------------------------------------------

TEXT = """First line, which nobody reads
THE SONNETS

by William Shakespeare
  Nobody. A speech above the first play
    is in no play.




A FINE PLAY; OR, TWO



by William Shakespeare

  Anna. One   two
    three,  four
   (three blanks: dropped)
    five
[Enter Ben]
  ben. Good day.
  Ben. And good night,
      good   Anna,
    farewell.
  ANNA. Six
  Clown. Two lines
    are too few.
  Dr. Foot. A name ends with its first full stop.
  X2. No name.

ONE VOICE

by William Shakespeare
  Solo. One.
  Solo. Two.
  Solo. Three.

THE COMEDY OF ERRORS

by William Shakespeare

Before the first speech
DUKE. Merchant,
  plead no
more.
ACT I. SCENE 1
Nobody speaks here,
and nobody here
Egeon. Yet this
my comfort
<<NOTICE
dropped>>
EGEON. My woes

  end
"""
ROLES = {
    "A_FINE_PLAY__OR__TWO_ANNA": "One two three, four five Six ",
    "A_FINE_PLAY__OR__TWO_BEN": "Good day. And good night, good Anna, farewell. ",
    "THE_COMEDY_OF_ERRORS_DUKE": "Merchant, plead no more. ",
    "THE_COMEDY_OF_ERRORS_EGEON": "Yet this my comfort My woes end ",
}
SAID = list(ROLES.values())


@pytest.fixture
def play(root: Path, publish: Any) -> Path:
    """The small text as the one that is published."""
    for form, name in enumerate(("pg100.txt", "t8.shakespeare.txt", "100.txt")):
        publish("shakespeare", {name: TEXT.encode()}, 0, 0, form)
    put(root / "shakespeare", {"pg100.txt": TEXT.encode()})
    return root


def test_roles_follow_the_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shakespeare.spoken(TEXT) == ROLES
    found = dict(shakespeare.plays(TEXT))
    assert list(found) == ["A FINE PLAY; OR, TWO", "ONE VOICE", "THE COMEDY OF ERRORS"]
    assert found["A FINE PLAY; OR, TWO"]["DR"] == ["Foot. A name ends with its first full stop."]
    assert set(found["A FINE PLAY; OR, TWO"]) == {"ANNA", "BEN", "CLOWN", "DR"}
    monkeypatch.setattr(
        shakespeare, "LAST_LINE", TEXT.splitlines().index("THE COMEDY OF ERRORS")
    )  # what follows are poems
    assert set(shakespeare.spoken(TEXT)) == set(list(ROLES)[:2])


def test_the_alphabet_has_eighty_characters_in_order() -> None:
    assert len(shakespeare.ALPHABET) == 80 and list(shakespeare.ALPHABET) == sorted(set(shakespeare.ALPHABET))


def told(data: Any, alphabet: str) -> list[list[tuple[str, str]]]:
    """What a dataset shows, in characters: the training samples and the test samples."""
    assert isinstance(data.view, TextWindows) and data.view.text.dtype == torch.uint8
    letter = lambda codes: "".join(alphabet[c] for c in codes)
    return [
        [(letter(w), alphabet[y]) for w, y in zip(data.view(x, torch.float32).tolist(), y, strict=True)]
        for x, y in (data.train, data.test)
    ]


def windows(said: str, width: int) -> list[tuple[str, str]]:
    return [(said[k : k + width], said[k + width]) for k in range(len(said) - width)]


def test_every_window_of_every_role_trains_or_tests_or_is_skipped(play: Path) -> None:
    data = Shakespeare(window=5, share=0.6).load(0, 4)
    train, test, owners, testers = [], [], [], []
    for k, said in enumerate(SAID):
        all_of_it = windows(said, 5)
        cut = int(0.6 * len(all_of_it))
        train += all_of_it[:cut]
        test += all_of_it[cut + 4 :]
        owners += [k] * cut
        testers += [k] * len(all_of_it[cut + 4 :])
    assert told(data, shakespeare.ALPHABET) == [train, test]
    assert data.owner is not None and data.owner.tolist() == owners and data.classes == 80
    assert data.test_owner is not None and data.test_owner.tolist() == testers
    assert data.train.x.dtype == data.train.y.dtype == torch.int64


def test_roles_without_enough_windows_are_not_drawn(play: Path) -> None:
    lengths = [len(windows(said, 5)) for said in SAID]  # 24, 42, 20, 27
    assert lengths == [24, 42, 20, 27]
    for settings, fit in (
        ({"least": 24}, 3),
        ({"samples": 11, "reserve": 1}, 3),
        ({"samples": 14}, 2),
        ({"test": 7}, 2),
    ):
        source = Shakespeare(window=5, share=0.6, **settings)
        with pytest.raises(DataError, match=rf"{fit} roles have more than .*got partition.clients = {fit + 1}"):
            source.load(0, fit + 1)
        assert len(np.unique(source.load(0, fit).owner)) == fit


def test_a_run_is_contiguous_and_starts_anywhere(play: Path) -> None:
    source, starts = Shakespeare(window=5, share=0.7, samples=4, reserve=2, test=1), set()
    for seed in range(40):
        data = source.load(seed, 2)
        train, test = told(data, shakespeare.ALPHABET)
        assert (
            len(train) == 8 and len(test) == 2 and data.owner is not None and data.owner.tolist() == [0] * 4 + [1] * 4
        )
        for run, held in ((train[:4], test[0]), (train[4:], test[1])):
            [said] = [s for s in SAID if all(each in windows(s, 5) for each in (*run, held))]
            first, cut = windows(said, 5).index(run[0]), int(0.7 * len(windows(said, 5)))
            assert run == windows(said, 5)[first : first + 4] and first + 6 <= cut
            assert held == windows(said, 5)[cut + 4]
            starts.add((said, first))
    # All roles but the shortest, whose test would be empty, from every start that leaves room for the reserve.
    fit = [s for s in SAID if len(windows(s, 5)) - int(0.7 * len(windows(s, 5))) > 4]
    assert {s for s, _ in starts} == set(fit)
    assert any(first == 0 for _, first in starts) and any(
        first + 6 == int(0.7 * len(windows(s, 5))) for s, first in starts
    )


def test_a_draw_belongs_to_the_seed_and_the_role(play: Path) -> None:
    source = Shakespeare(window=5, share=0.6, samples=3)
    one, again, more = source.load(5, 2), source.load(5, 2), source.load(5, 4)
    assert torch.equal(one.train.x, again.train.x) and set(one.train.x.tolist()) < set(more.train.x.tolist())
    assert any(not torch.equal(one.train.x, source.load(seed, 2).train.x) for seed in range(3))


def test_the_vocabulary_of_what_was_seen(play: Path) -> None:
    settings: dict[str, Any] = {"window": 5, "share": 0.6, "samples": 3, "reserve": 2}
    for seed in range(10):
        data = Shakespeare(**settings, vocabulary="seen").load(seed, 1)
        start = int(data.train.x[0])
        seen = sorted(set("".join(SAID)[start : start + 5 + 4]))  # five windows: three train, two are kept back
        assert data.classes == len(seen) + 1
        plain = told(Shakespeare(**settings).load(seed, 1), shakespeare.ALPHABET)
        hidden = [[tuple("".join(c if c in seen else "?" for c in s) for s in pair) for pair in part] for part in plain]
        assert told(data, "".join(seen) + "?") == hidden and any("?" in w for w, _ in hidden[1])


def test_the_text_may_have_either_line_ends_and_comes_as_a_zip_too(play: Path) -> None:
    want = Shakespeare(window=5, share=0.6).load(0, 2).view
    data = TEXT.replace("\n", "\r\n").encode()
    for held in ({"shakespeare/t8.shakespeare.txt": data}, {"1994-01-100.zip": zipped({"100.txt": data})}):
        for path in (play / "shakespeare").iterdir():
            path.unlink()
        put(play, held)
        got = Shakespeare(window=5, share=0.6).load(0, 2).view
        assert isinstance(want, TextWindows) and isinstance(got, TextWindows) and torch.equal(want.text, got.text)
    for bad in (zipped({"100.txt": data[1:]}), zipped({}), b"no zip"):
        put(play, {"shakespeare/t8.shakespeare.txt": b"", "1994-01-100.zip": bad})
        (play / "shakespeare" / "t8.shakespeare.txt").unlink()
        with pytest.raises(DataError, match=r"1994-01-100\.zip"):
            Shakespeare(window=5, share=0.6).load(0, 2)


# the folder and the command line --------------------------------------------------------------------------------


def test_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("ASKEW_DATA", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert files.folder() == tmp_path / ".cache/askew/data"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert files.folder() == Path("/x/askew/data")
    monkeypatch.setenv("ASKEW_DATA", "~/sets")
    assert files.folder() == tmp_path / "sets"
    files.use("~/mine")
    assert files.folder() == tmp_path / "mine"
    files.use(None)
    assert files.folder() == tmp_path / "sets"


def tell(*words: str | Path) -> Any:
    return CliRunner().invoke(
        data_commands.app, [str(word) for word in words], catch_exceptions=False, env={"COLUMNS": "100"}
    )


def test_data_list(cifar10: Path) -> None:
    rows = {row["name"]: row for row in json.loads(tell("list", "--json", "--data-dir", cifar10).stdout)}
    assert rows["cifar10"]["where"] == str(cifar10 / "cifar-10-batches-bin") and rows["cifar10"]["bytes"] == 14 * 3073
    assert rows["mnist"]["where"] is None and rows["mnist"]["train"] == 60_000
    assert rows["digits"]["where"] == rows["synthetic"]["where"] == "built in"
    page = tell("list", "--data-dir", cifar10).stdout
    assert "cifar-10-batches-bin" in page and "not here" in page and "built in" in page


def test_data_check(cifar10: Path) -> None:
    done = tell("check", "cifar10", "--data-dir", cifar10)
    assert done.exit_code == 0 and done.stdout.count("OK") == 6
    Cifar10().load(0, 3)
    path = cifar10 / "cifar-10-batches-bin" / "data_batch_4.bin"
    stat = path.stat()
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # a check is not misled by what a load goes by
    done = tell("check", "cifar10", "--data-dir", cifar10)
    assert done.exit_code == 2 and done.stdout.count("OK") == 5
    assert md5(path.read_bytes()) in done.stdout and f"should be {md5(binary()[path.name])}" in done.stdout
    with pytest.raises(DataError, match="askew data get mnist"):
        tell("check", "mnist")
    with pytest.raises(UnknownName, match="did you mean 'cifar10'"):
        tell("check", "cifar-10")


def test_data_check_of_an_archive_names_it_and_what_is_in_it(root: Path, publish: Any) -> None:
    packed = zipped({f"gzip/{n}.gz": gzip.compress(d) for n, d in letters().items()})
    publish("emnist", letters(), 6, 3, 0, packed)
    put(root, {"gzip.zip": packed})
    done = tell("check", "emnist", "--data-dir", root)
    assert done.exit_code == 0 and done.stdout.count("OK") == 1 and done.stdout.count("no checksum is published") == 4
    put(root, {"gzip.zip": packed + b"?"})
    done = tell("check", "emnist", "--data-dir", root)
    assert done.exit_code == 2 and "emnist-letters" not in done.stdout


def test_data_path(tmp_path: Path) -> None:
    assert tell("path", "--data-dir", tmp_path).stdout == f"{tmp_path}\n"
    files.use(None)
    assert "get" in tell().stdout
