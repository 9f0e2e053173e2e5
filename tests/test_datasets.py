"""Datasets in files: every layout is read alike, nothing unverified is decoded, and the settings do what they say."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import re
import struct
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from archives import Contents, make_tar, make_zip, md5
from askew.cli import data as data_commands
from askew.data import files, shakespeare
from askew.data.dataset import Source
from askew.data.files import File
from askew.data.images import Cifar10, Cifar100, Emnist, FashionMnist, Images, Mnist, TinyImageNet
from askew.data.shakespeare import Shakespeare
from askew.data.transform import PixelTransform, TextWindows, sample_draws
from askew.errors import ConfigError, DataError, UnknownName
from damages import LONG, attack

TICKS = count(1, 1000)  # times for files, none of which comes twice


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """An empty folder of datasets."""
    files.use(tmp_path / "data")
    yield tmp_path / "data"
    files.use(None)


@pytest.fixture
def publish(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lets small files stand for the published ones."""

    def publish_files(
        name: str, contents: Contents, train: int, test: int, layout: int = 0, archive: bytes = b"", classes: int = 0
    ) -> None:
        entry = files.table[name]
        published = [File(n, md5(c)) for n, c in contents.items()]
        if all(not file.md5 for file in entry.layouts[layout].files):
            published = [File(file.name) for file in published]
        changed = entry.layouts[layout]._replace(files=tuple(published))
        if changed.archive and changed.archive.md5:
            changed = changed._replace(archive=File(changed.archive.name, md5(archive)))
        layouts = tuple(changed if k == layout else other for k, other in enumerate(entry.layouts))
        replaced = entry._replace(train=train, test=test, classes=classes or entry.classes, layouts=layouts)
        monkeypatch.setitem(files.table, name, replaced)

    return publish_files


def put(folder: Path, contents: Contents) -> None:
    for name, data in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def random_bytes(*shape: int, below: int = 256, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, below, shape, dtype=np.uint8)


# cifar ----------------------------------------------------------------------------------------------------------

X, Y = random_bytes(14, 3, 32, 32), random_bytes(14, below=10, seed=1)
BATCHES = [f"data_batch_{k}" for k in range(1, 6)] + ["test_batch"]
PARTS = [slice(2 * k, 2 * k + 2) for k in range(5)] + [slice(10, 14)]


def pack_records(x: np.ndarray[Any, Any], *labels: np.ndarray[Any, Any]) -> bytes:
    return np.hstack([*(label[:, None] for label in labels), x.reshape(len(x), -1)]).tobytes()


def binary_files() -> Contents:
    return {f"{name}.bin": pack_records(X[part], Y[part]) for name, part in zip(BATCHES, PARTS, strict=True)}


def pickle_batch(x: np.ndarray[Any, Any], **labels: list[int]) -> bytes:
    """A pickle as Python 2 wrote it (protocol 2): texts without an encoding, and arrays in the form of numpy then."""
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


def python_files() -> Contents:
    return {name: pickle_batch(X[part], labels=Y[part].tolist()) for name, part in zip(BATCHES, PARTS, strict=True)}


@pytest.fixture
def cifar10(root: Path, publish: Any) -> Path:
    """Fourteen images as the binary CIFAR-10, in its folder."""
    publish("cifar10", binary_files(), 10, 4)
    put(root / "cifar-10-batches-bin", binary_files())
    return root


@pytest.mark.parametrize("layout", ["folder", "archive", "python folder", "python archive"])
def test_cifar10_is_read_from_every_layout(root: Path, publish: Any, layout: str) -> None:
    number = int(layout.startswith("python"))
    held, inside = (python_files(), "cifar-10-batches-py") if number else (binary_files(), "cifar-10-batches-bin")
    packed = make_tar(
        {f"{inside}/readme.html": b"", "../evil": b"", **{f"{inside}/{n}": d for n, d in reversed(held.items())}}
    )
    publish("cifar10", held, 10, 4, number, packed)
    if "archive" in layout:
        put(root, {files.table["cifar10"].layouts[number].archive.name: packed})
    else:
        put(root / inside, held)
    data = Cifar10().load(0, 3)
    assert torch.equal(data.train.x, torch.from_numpy(X[:10])) and torch.equal(data.test.x, torch.from_numpy(X[10:]))
    assert data.train.y.tolist() == Y[:10].tolist() and data.test.y.tolist() == Y[10:].tolist()
    assert data.train.x.dtype == torch.uint8 and data.train.y.dtype == torch.int64
    assert data.classes == 10 and data.owner is None and not (root.parent / "evil").exists()


@pytest.mark.parametrize("layout", [0, 1])
def test_cifar100_has_the_fine_labels(root: Path, publish: Any, layout: int) -> None:
    coarse, fine = random_bytes(14, below=20, seed=2), random_bytes(14, below=100, seed=3)
    parts = {"train": slice(0, 10), "test": slice(10, 14)}
    if layout:
        held = {
            n: pickle_batch(X[p], coarse_labels=coarse[p].tolist(), fine_labels=fine[p].tolist())
            for n, p in parts.items()
        }
    else:
        held = {f"{n}.bin": pack_records(X[p], coarse[p], fine[p]) for n, p in parts.items()}
    publish("cifar100", held, 10, 4, layout)
    put(root / ("cifar-100-python" if layout else "cifar-100-binary"), held)
    data = Cifar100().load(0, 3)
    assert torch.equal(data.train.x, torch.from_numpy(X[:10])) and data.train.y.tolist() == fine[:10].tolist()
    assert data.test.y.tolist() == fine[10:].tolist() and data.classes == 100


class CodeInPickle:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_no_batch_runs_code(root: Path, publish: Any) -> None:
    held = python_files() | {"data_batch_3": pickle.dumps(CodeInPickle(root / "evil"))}
    publish("cifar10", python_files(), 10, 4, layout=1)
    put(root / "cifar-10-batches-py", held)
    with pytest.raises(DataError, match="data_batch_3 has the MD5"):
        Cifar10().load(0, 3)
    publish("cifar10", held, 10, 4, layout=1)  # even if that were the published file
    with pytest.raises(DataError, match="mkdir, which no array needs"):
        Cifar10().load(0, 3)
    assert not (root / "evil").exists()


def test_damaged_files_are_refused_with_both_checksums(cifar10: Path) -> None:
    good = binary_files()
    broken = {
        "truncated": good["data_batch_2.bin"][:-1],
        "swapped": good["data_batch_1.bin"],
        "tampered": good["data_batch_2.bin"][:99] + b"?" + good["data_batch_2.bin"][100:],
        "empty": b"",
    }
    for bad in broken.values():
        put(cifar10 / "cifar-10-batches-bin", {"data_batch_2.bin": bad})
        with pytest.raises(DataError) as error:
            Cifar10().load(0, 3)
        for part in ("data_batch_2.bin", md5(bad), md5(good["data_batch_2.bin"]), "askew data get"):
            assert part in str(error.value)


def test_a_damaged_archive_is_refused(root: Path, publish: Any) -> None:
    packed = make_tar({f"cifar-10-batches-bin/{n}": d for n, d in binary_files().items()})
    publish("cifar10", binary_files(), 10, 4, 0, packed)
    for bad in (packed[:-200], make_tar({})):
        put(root, {"cifar-10-binary.tar.gz": bad})
        with pytest.raises(DataError) as error:
            Cifar10().load(0, 3)
        assert md5(bad) in str(error.value) and md5(packed) in str(error.value)


def test_missing_files_say_what_to_do(root: Path) -> None:
    with pytest.raises(DataError) as error:
        Cifar10().load(0, 3)
    for part in ("`askew data get cifar10 --data-dir ", "cifar-10-binary.tar.gz", str(root)):
        assert part in str(error.value)
    put(root / "cifar-10-batches-bin", {"data_batch_1.bin": b""})  # a part is not the whole
    with pytest.raises(DataError, match="askew data get cifar10"):
        Cifar10().load(0, 3)
    with pytest.raises(DataError, match="MNIST/raw/t10k-images-idx3-ubyte"):
        Mnist().load(0, 3)


# idx ------------------------------------------------------------------------------------------------------------


def pack_idx(array: np.ndarray[Any, Any]) -> bytes:
    return np.array([0x800 + array.ndim, *array.shape], ">i4").tobytes() + array.tobytes()


GREY, DIGITS = random_bytes(9, 28, 28), random_bytes(9, below=10, seed=1)


def idx_files(prefix: str = "", test: str = "t10k", labels: np.ndarray[Any, Any] = DIGITS) -> Contents:
    parts = {f"{prefix}train": slice(0, 6), f"{prefix}{test}": slice(6, 9)}
    return {
        f"{n}-{kind}-ubyte": pack_idx(a[p])
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


def letter_files(labels: np.ndarray[Any, Any] = LETTERS) -> Contents:
    return idx_files("emnist-letters-", "test", labels)


@pytest.mark.parametrize("layout", ["EMNIST/raw", "emnist", "gzip.zip", "EMNIST/raw/gzip.zip"])
def test_letters_are_turned_upright_and_counted_from_zero(root: Path, publish: Any, layout: str) -> None:
    packed = make_zip({f"gzip/{n}.gz": gzip.compress(d) for n, d in letter_files().items()})
    publish("emnist", letter_files(), 6, 3, 0, packed)
    put(root, {layout: packed}) if layout.endswith("zip") else put(root / layout, letter_files())
    data = Emnist().load(0, 3)
    assert torch.equal(data.train.x[:, 0].mT, torch.from_numpy(GREY[:6]))
    assert data.train.y.tolist() == [0, 1, 2, 25, 10, 9] and data.classes == 26
    ten = Emnist(letters=10).load(0, 3)
    assert ten.train.y.tolist() == [0, 1, 2, 9] and ten.test.y.tolist() == [0, 9] and ten.classes == 10
    assert torch.equal(ten.train.x, data.train.x[[0, 1, 2, 5]])
    inputs = ten.transform(ten.train.x, torch.float64)  # type: ignore[misc]
    assert abs(float(inputs.mean())) < 1e-6 and abs(float(inputs.std(correction=0)) - 1) < 1e-6
    assert torch.equal(Emnist(letters=10, train=1).load(0, 3).transform.mean, ten.transform.mean)  # type: ignore[union-attr]


def test_letters_without_a_checksum_are_counted(root: Path, publish: Any) -> None:
    publish("emnist", letter_files(), 7, 3)
    put(root / "emnist", letter_files())
    with pytest.raises(DataError, match="should hold 7 train images and labels, got 6 and 6"):
        Emnist().load(0, 3)
    publish("emnist", letter_files(), 6, 3)
    for labels, sentence in ((LETTERS - 1, "numbered from 1"), (LETTERS + 1, "labels of 26 classes, got number 26")):
        put(root / "emnist", letter_files(labels))
        with pytest.raises(DataError, match=sentence):
            Emnist().load(0, 3)
    name = "emnist-letters-test-images-idx3-ubyte"
    for bad in (letter_files()[name][:-1], b"", b"\0\0\x0d" + letter_files()[name][3:], letter_files()[name][:7]):
        put(root / "emnist", letter_files() | {name: bad})
        with pytest.raises(DataError, match=f"{name} is not a whole idx file"):
            Emnist().load(0, 3)


# tiny imagenet --------------------------------------------------------------------------------------------------


def make_jpeg(shade: int, side: int = 64, mode: str = "RGB") -> bytes:
    from PIL import Image

    out = io.BytesIO()
    Image.new(mode, (side, side), shade if mode == "L" else (shade, 0, 255 - shade)).save(out, "JPEG", quality=95)
    return out.getvalue()


def tiny_files() -> Contents:
    ids = ["n03", "n01", "n02"]
    held = {
        "wnids.txt": "\n".join(ids).encode(),
        "val/val_annotations.txt": b"val_0.JPEG\tn02\t0\t0\t9\t9\nval_1.JPEG\tn01\t0\t0\t9\t9\n",
    }
    held |= {
        f"train/{wnid}/images/{wnid}_{k}.JPEG": make_jpeg(80 * int(wnid[-1]) + k) for wnid in ids for k in range(2)
    }
    return held | {"val/images/val_0.JPEG": make_jpeg(160), "val/images/val_1.JPEG": make_jpeg(80, mode="L")}


@pytest.mark.parametrize("packed", [False, True])
def test_tiny_imagenet_is_read_from_folder_and_zip(root: Path, publish: Any, packed: bool) -> None:
    archive = make_zip({f"tiny-imagenet-200/{n}": d for n, d in tiny_files().items()})
    publish("tiny_imagenet", {n: d for n, d in tiny_files().items() if n.endswith("txt")}, 6, 2, 0, archive, classes=3)
    put(root, {"tiny-imagenet-200.zip": archive}) if packed else put(root / "tiny-imagenet-200", tiny_files())
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
    publish("tiny_imagenet", {n: d for n, d in tiny_files().items() if n.endswith("txt")}, 6, 2, classes=3)
    at, name = root / "tiny-imagenet-200", "train/n02/images/n02_1.JPEG"
    for bad in (b"text", make_jpeg(1, side=32)):
        put(at, tiny_files() | {name: bad})
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
    """A list that grows by one name whenever CIFAR-10 is decoded."""
    names: list[str] = []
    decode = Cifar10.decode

    def decode_and_note(self: Cifar10, location: files.DatasetLocation) -> Any:
        names.append(location.name)
        return decode(self, location)

    monkeypatch.setattr(Cifar10, "decode", decode_and_note)
    return names


def cache_file(root: Path) -> Path:
    [path] = (root / files.CACHE_FOLDER).iterdir()
    return path


def test_a_second_load_comes_from_the_cache(cifar10: Path, decodings: list[str]) -> None:
    first, second = Cifar10().load(0, 3), Cifar10().load(0, 3)
    assert len(decodings) == 1 and cache_file(cifar10).name.startswith("cifar10-")
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
    path = cache_file(cifar10)
    path.write_bytes(harm(path.read_bytes()))
    assert torch.equal(Cifar10().load(0, 3).train.x, torch.from_numpy(X[:10]))
    assert len(decodings) == 2
    Cifar10().load(0, 3)
    assert len(decodings) == 2 and cache_file(cifar10) == path


def test_a_cache_of_other_files_is_not_used(cifar10: Path, publish: Any) -> None:
    Cifar10().load(0, 3)
    old, stats = cache_file(cifar10), {p: p.stat() for p in (cifar10 / "cifar-10-batches-bin").iterdir()}
    other = {f"{name}.bin": pack_records(X[part] ^ 255, Y[part]) for name, part in zip(BATCHES, PARTS, strict=True)}
    publish("cifar10", other, 10, 4)
    put(cifar10 / "cifar-10-batches-bin", other)
    for path, stat in stats.items():
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert torch.equal(Cifar10().load(0, 3).train.x, torch.from_numpy(X[:10] ^ 255)) and old.exists()


def test_a_folder_that_cannot_be_written_does_without_a_cache(cifar10: Path, decodings: list[str]) -> None:
    (cifar10 / files.CACHE_FOLDER).write_text("in the way")
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
        assert isinstance(data.transform, PixelTransform) and not data.transform.random
        assert torch.allclose(data.transform(data.train.x, torch.float64), want.double(), atol=1e-6)


def test_random_changes_reach_the_transform_and_leave_tests_alone(cifar10: Path) -> None:
    data = Cifar10(crop=28, pad=2, fill="reflect", flip=True, turn=10, chance=0.5).load(0, 3)
    assert isinstance(data.transform, PixelTransform) and data.transform.random and data.train.x.shape[2:] == (32, 32)
    settings = [getattr(data.transform, name) for name in ("crop", "pad", "fill", "flip", "turn", "chance")]
    assert settings == [28, 2, "reflect", True, 10, 0.5]
    inputs, plain = data.transform(data.test.x, torch.float64), Cifar10().load(0, 3).transform
    assert plain is not None
    assert torch.allclose(inputs, plain(data.test.x[:, :, 2:30, 2:30], torch.float64))


def test_frozen_images_are_changed_once_for_all(cifar10: Path) -> None:
    source = Cifar10(crop=28, flip=True, frozen=True)
    data, again, other = source.load(0, 3), source.load(0, 3), source.load(1, 3)
    assert (
        isinstance(data.transform, PixelTransform) and not data.transform.random and data.train.x.dtype == torch.uint8
    )
    loose = Cifar10(crop=28, flip=True).load(0, 3)
    assert torch.equal(data.train.x, loose.transform.augment(loose.train.x, sample_draws(0, 10)))  # type: ignore[union-attr]
    assert torch.equal(data.train.x, again.train.x) and not torch.equal(data.train.x, other.train.x)
    assert torch.equal(data.test.x, loose.test.x[:, :, 2:30, 2:30])
    assert data.transform.shape(tuple(data.train.x.shape[1:])) == (3, 28, 28)


def test_random_tests_are_cut_once(cifar10: Path) -> None:
    for frozen in (False, True):
        data = Cifar10(crop=28, random_test=True, frozen=frozen).load(0, 3)
        assert data.test.x.shape == (4, 3, 28, 28) and torch.equal(
            data.test.x, Cifar10(crop=28, random_test=True).load(0, 3).test.x
        )
        windows = torch.from_numpy(X[10:]).unfold(2, 28, 1).unfold(3, 28, 1)  # all places of a 28×28 square
        same = (windows == data.test.x[:, :, None, None]).flatten(4).all(4).all(1).flatten(1)
        assert same.sum(1).tolist() == [1] * 4 and len(set(same.int().argmax(1).tolist())) > 1
        assert data.transform.shape(tuple(data.test.x.shape[1:])) == (3, 28, 28)  # type: ignore[union-attr]


def test_the_first_so_many(cifar10: Path) -> None:
    data = Cifar10(train=3, test=2).load(0, 3)
    assert torch.equal(data.train.x, torch.from_numpy(X[:3])) and data.test.y.tolist() == Y[10:12].tolist()
    with pytest.raises(DataError, match="train must be at most the 10 images there are, got 11"):
        Cifar10(train=11).load(0, 3)


@pytest.mark.parametrize(
    "wrong, sentence",
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
def test_contradictions_are_refused(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Cifar10(**wrong)


def test_cuts_larger_than_the_image_are_refused(cifar10: Path) -> None:
    with pytest.raises(DataError, match="crop must be at most the side of an image, 32, got 33"):
        Cifar10(crop=33, pad=4).load(0, 3)
    with pytest.raises(DataError, match="reflects at most 31 pixels, got pad = 32"):
        Cifar10(pad=32, fill="reflect").load(0, 3)
    Cifar10(pad=31, fill="reflect").load(0, 3)


@pytest.mark.parametrize("source", [Mnist, FashionMnist, Emnist, Cifar10, Cifar100, TinyImageNet])
def test_every_image_dataset_names_its_classes_and_has_an_idea(source: type[Images]) -> None:
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
SPEECHES = list(ROLES.values())


@pytest.fixture
def play(root: Path, publish: Any) -> Path:
    """The small text as the one that is published."""
    for layout, name in enumerate(("pg100.txt", "t8.shakespeare.txt", "100.txt")):
        publish("shakespeare", {name: TEXT.encode()}, 0, 0, layout)
    put(root / "shakespeare", {"pg100.txt": TEXT.encode()})
    return root


def test_roles_follow_the_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shakespeare.text_of_roles(TEXT) == ROLES
    found = dict(shakespeare.split_plays(TEXT))
    assert list(found) == ["A FINE PLAY; OR, TWO", "ONE VOICE", "THE COMEDY OF ERRORS"]
    assert found["A FINE PLAY; OR, TWO"]["DR"] == ["Foot. A name ends with its first full stop."]
    assert set(found["A FINE PLAY; OR, TWO"]) == {"ANNA", "BEN", "CLOWN", "DR"}
    # as if what follows were poems
    monkeypatch.setattr(shakespeare, "LAST_LINE", TEXT.splitlines().index("THE COMEDY OF ERRORS"))
    assert set(shakespeare.text_of_roles(TEXT)) == set(list(ROLES)[:2])


def test_the_alphabet_has_eighty_characters_in_order() -> None:
    assert len(shakespeare.ALPHABET) == 80 and list(shakespeare.ALPHABET) == sorted(set(shakespeare.ALPHABET))


def samples_as_text(data: Any, alphabet: str) -> list[list[tuple[str, str]]]:
    """The training and the test samples of a dataset as pairs of a window and the character that follows it."""
    assert isinstance(data.transform, TextWindows) and data.transform.text.dtype == torch.uint8
    decode = lambda codes: "".join(alphabet[c] for c in codes)
    return [
        [(decode(w), alphabet[y]) for w, y in zip(data.transform(x, torch.float32).tolist(), y, strict=True)]
        for x, y in (data.train, data.test)
    ]


def windows(speech: str, width: int) -> list[tuple[str, str]]:
    """All windows of a speech and the character that follows each."""
    return [(speech[k : k + width], speech[k + width]) for k in range(len(speech) - width)]


def test_every_window_of_every_role_trains_or_tests_or_is_skipped(play: Path) -> None:
    data = Shakespeare(window=5, share=0.6).load(0, 4)
    train, test, owners, testers = [], [], [], []
    for k, speech in enumerate(SPEECHES):
        all_of_it = windows(speech, 5)
        cut = int(0.6 * len(all_of_it))
        train += all_of_it[:cut]
        test += all_of_it[cut + 4 :]
        owners += [k] * cut
        testers += [k] * len(all_of_it[cut + 4 :])
    assert samples_as_text(data, shakespeare.ALPHABET) == [train, test]
    assert data.owner is not None and data.owner.tolist() == owners and data.classes == 80
    assert data.test_owner is not None and data.test_owner.tolist() == testers
    assert data.train.x.dtype == data.train.y.dtype == torch.int64


def test_roles_without_enough_windows_are_not_drawn(play: Path) -> None:
    lengths = [len(windows(speech, 5)) for speech in SPEECHES]  # 24, 42, 20, 27
    assert lengths == [24, 42, 20, 27]
    for settings, suitable in (
        ({"least": 24}, 3),
        ({"samples": 11, "reserve": 1}, 3),
        ({"samples": 14}, 2),
        ({"test": 7}, 2),
    ):
        source = Shakespeare(window=5, share=0.6, **settings)
        with pytest.raises(
            DataError, match=rf"{suitable} roles have more than .*got partition.clients = {suitable + 1}"
        ):
            source.load(0, suitable + 1)
        assert len(np.unique(source.load(0, suitable).owner)) == suitable


def test_a_run_is_contiguous_and_starts_anywhere(play: Path) -> None:
    source, starts = Shakespeare(window=5, share=0.7, samples=4, reserve=2, test=1), set()
    for seed in range(40):
        data = source.load(seed, 2)
        train, test = samples_as_text(data, shakespeare.ALPHABET)
        assert (
            len(train) == 8 and len(test) == 2 and data.owner is not None and data.owner.tolist() == [0] * 4 + [1] * 4
        )
        for run, test_window in ((train[:4], test[0]), (train[4:], test[1])):
            [speech] = [s for s in SPEECHES if all(window in windows(s, 5) for window in (*run, test_window))]
            all_of_it = windows(speech, 5)
            first, cut = all_of_it.index(run[0]), int(0.7 * len(all_of_it))
            assert run == all_of_it[first : first + 4] and first + 6 <= cut
            assert test_window == all_of_it[cut + 4]
            starts.add((speech, first))
    # All roles but the shortest, whose test would be empty, from every start that leaves room for the reserve.
    counts = {speech: len(windows(speech, 5)) for speech in SPEECHES}
    assert {speech for speech, _ in starts} == {s for s, count in counts.items() if count - int(0.7 * count) > 4}
    assert any(first == 0 for _, first in starts)
    assert any(first + 6 == int(0.7 * counts[speech]) for speech, first in starts)


def test_a_draw_belongs_to_the_seed_and_the_role(play: Path) -> None:
    source = Shakespeare(window=5, share=0.6, samples=3)
    one, again, more = source.load(5, 2), source.load(5, 2), source.load(5, 4)
    assert torch.equal(one.train.x, again.train.x) and set(one.train.x.tolist()) < set(more.train.x.tolist())
    assert any(not torch.equal(one.train.x, source.load(seed, 2).train.x) for seed in range(3))


def test_the_vocabulary_of_the_training_windows(play: Path) -> None:
    settings: dict[str, Any] = {"window": 5, "share": 0.6, "samples": 3, "reserve": 2}
    for seed in range(10):
        data = Shakespeare(**settings, vocabulary="seen").load(seed, 1)
        start = int(data.train.x[0])
        known = sorted(set("".join(SPEECHES)[start : start + 5 + 4]))  # five windows: three train, two are the reserve
        assert data.classes == len(known) + 1
        plain = samples_as_text(Shakespeare(**settings).load(seed, 1), shakespeare.ALPHABET)
        hidden = [
            [tuple("".join(c if c in known else "?" for c in s) for s in pair) for pair in part] for part in plain
        ]
        assert samples_as_text(data, "".join(known) + "?") == hidden and any("?" in w for w, _ in hidden[1])


def test_the_text_may_have_either_line_ends_and_comes_as_a_zip_too(play: Path) -> None:
    want = Shakespeare(window=5, share=0.6).load(0, 2).transform
    data = TEXT.replace("\n", "\r\n").encode()
    for held in ({"shakespeare/t8.shakespeare.txt": data}, {"1994-01-100.zip": make_zip({"100.txt": data})}):
        for path in (play / "shakespeare").iterdir():
            path.unlink()
        put(play, held)
        got = Shakespeare(window=5, share=0.6).load(0, 2).transform
        assert isinstance(want, TextWindows) and isinstance(got, TextWindows) and torch.equal(want.text, got.text)
    for bad in (make_zip({"100.txt": data[1:]}), make_zip({}), b"no zip"):
        put(play, {"shakespeare/t8.shakespeare.txt": b"", "1994-01-100.zip": bad})
        (play / "shakespeare" / "t8.shakespeare.txt").unlink()
        with pytest.raises(DataError, match=r"1994-01-100\.zip"):
            Shakespeare(window=5, share=0.6).load(0, 2)


# damage ---------------------------------------------------------------------------------------------------------


def zipped(contents: Contents) -> Contents:
    return {"1994-01-100.zip": make_zip(contents)}


def gzipped(contents: Contents) -> Contents:
    return {f"{name}.gz": gzip.compress(data, mtime=0) for name, data in contents.items()}


class Raw(NamedTuple):
    """A dataset in files, for the test of damages to them."""

    key: str
    source: Source
    folder: str
    contents: Contents
    counts: tuple[int, int]  # samples to train and to test
    hashed: bool = True  # is a hash of each file published?
    layout: int = 0
    classes: int = 0
    packed: Callable[[Contents], Contents] = dict


RAW = {
    "binary batches": Raw("cifar10", Cifar10(), "cifar-10-batches-bin", binary_files(), (10, 4)),
    "pickled batches": Raw("cifar10", Cifar10(), "cifar-10-batches-py", python_files(), (10, 4), layout=1),
    "idx": Raw("mnist", Mnist(), "MNIST/raw", idx_files(), (6, 3)),
    "idx with gzip": Raw("mnist", Mnist(), "MNIST/raw", idx_files(), (6, 3), packed=gzipped),
    "idx without a hash": Raw("emnist", Emnist(), "emnist", letter_files(), (6, 3), hashed=False),
    "idx with gzip, without a hash": Raw(
        "emnist", Emnist(), "emnist", letter_files(), (6, 3), hashed=False, packed=gzipped
    ),
    "text": Raw("shakespeare", Shakespeare(window=2), "shakespeare", {"pg100.txt": TEXT.encode()}, (0, 0)),
    "text in a zip": Raw(
        "shakespeare", Shakespeare(window=2), ".", {"100.txt": TEXT.encode()}, (0, 0), layout=2, packed=zipped
    ),
    "images": Raw("tiny_imagenet", TinyImageNet(), "tiny-imagenet-200", tiny_files(), (6, 2), hashed=False, classes=3),
}


@pytest.mark.parametrize("kind", RAW)
def test_damaged_files_give_the_right_samples_or_a_sentence_with_their_name(
    kind: str, root: Path, publish: Any
) -> None:
    raw = RAW[kind]
    published = {n: d for n, d in raw.contents.items() if not n.endswith("JPEG")}
    publish(raw.key, published, *raw.counts, raw.layout, classes=raw.classes)
    held = raw.packed(raw.contents)
    put(root / raw.folder, held)

    def read(path: Path) -> object:
        for changed in (path, path.parent):  # so that the cache of decoded samples is not taken
            os.utime(changed, ns=(next(TICKS), next(TICKS)))
        try:
            data = raw.source.load(0, 2)
        except DataError as problem:
            sentence = str(problem)
            assert (path.name in sentence or str(root / raw.folder) in sentence) and sentence.isprintable()
            raise
        return [tensor.tolist() for part in (data.train, data.test) for tensor in (part.x, part.y)]

    for n, name in enumerate([*held][: None if LONG else 3]):
        path = root / raw.folder / name
        attack(path, read, read(path) if raw.hashed else None, seed=n)


def test_declared_sizes_allocate_nothing(root: Path, publish: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "emnist-letters-train-images-idx3-ubyte"
    publish("emnist", letter_files(), 6, 3)
    whole = letter_files()[name]
    sizes = [[2**32 - 1] * 3, [2**31, 2**31, 4], [6, 2**16, 2**16 * 784], [6, 28, 29]]
    bad = [whole[:4] + np.array(size, ">u4").tobytes() + whole[16:] for size in sizes]
    deep = b"\0\0\x08\xff" + np.ones(255, ">u4").tobytes() + b"1"  # 255 dimensions
    flat = pack_idx(LETTERS[:6])  # labels in place of images
    for content in (*bad, deep, flat):
        put(root / "emnist", letter_files() | {name: content})
        with pytest.raises(DataError, match=f"{name} is not a whole idx file"):
            Emnist().load(0, 3)
    monkeypatch.setattr(files, "LARGEST_FILE", 2**20)
    assert len(files.gunzip(gzip.compress(bytes(2**24)))) == 2**20
    (root / "emnist" / name).write_bytes(b"")
    os.truncate(root / "emnist" / name, 2**40)
    with pytest.raises(DataError, match=f"{name} is far too large"):
        Emnist().load(0, 3)
    (root / "bomb.zip").write_bytes(make_zip({"100.txt": bytes(2**21)}))
    layout = files.table["shakespeare"].layouts[2]
    with (
        pytest.raises(DataError, match=r"bomb.zip cannot be unpacked \(100.txt is far too large\)"),
        files.open_unverified(files.DatasetLocation("shakespeare", layout, root / "bomb.zip", packed=True)) as read,
    ):
        read("100.txt")


def test_lists_of_tiny_imagenet_are_checked_before_images_are_read(root: Path, publish: Any) -> None:
    publish("tiny_imagenet", {n: d for n, d in tiny_files().items() if n.endswith("txt")}, 6, 2, classes=3)
    at, ids, tests = root / "tiny-imagenet-200", "wnids.txt", "val/val_annotations.txt"
    for name, bad, sentence in (
        (ids, b"n01 n02", "wnids.txt should name 3 classes, got 2"),
        (ids, b"\xff\xfe n02 n02", "wnids.txt should name 3 classes, got 1"),
        (tests, b"val_0.JPEG\tn02\nval_1.JPEG\tn09\n", "2 images a class of wnids.txt, got 2 lines, 1 of them without"),
        (tests, b"val_0.JPEG\tn02\nval_1.JPEG\n", "got 2 lines, 1 of them without one"),
        (tests, b"val_0.JPEG\tn02\n" * 5000, "got 5,000 lines, 0 of them without one"),
    ):
        put(at, tiny_files() | {name: bad})
        with pytest.raises(DataError, match=sentence):
            TinyImageNet().load(0, 3)
    image = make_jpeg(1)
    start = image.index(b"\xff\xc0") + 5  # of the height and the width in the header of the frame
    huge = image[:start] + b"\xff\xff\xff\xff" + image[start + 4 :]
    put(at, tiny_files() | {"train/n01/images/n01_0.JPEG": huge})
    with pytest.raises(DataError, match=r"n01_0\.JPEG is not a JPEG file of 64×64"):
        TinyImageNet().load(0, 3)


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


def run_command(*arguments: str | Path) -> Any:
    """The result of `askew data` with these arguments."""
    return CliRunner().invoke(
        data_commands.app, [str(argument) for argument in arguments], catch_exceptions=False, env={"COLUMNS": "100"}
    )


def test_data_list(cifar10: Path) -> None:
    rows = {row["name"]: row for row in json.loads(run_command("list", "--json", "--data-dir", cifar10).stdout)}
    assert rows["cifar10"]["where"] == str(cifar10 / "cifar-10-batches-bin") and rows["cifar10"]["bytes"] == 14 * 3073
    assert rows["mnist"]["where"] is None and rows["mnist"]["train"] == 60_000
    assert rows["digits"]["where"] == rows["synthetic"]["where"] == "built in"
    page = run_command("list", "--data-dir", cifar10).stdout
    assert "cifar-10-batches-bin" in page and "not here" in page and "built in" in page


def test_data_check(cifar10: Path) -> None:
    done = run_command("check", "cifar10", "--data-dir", cifar10)
    assert done.exit_code == 0 and done.stdout.count("OK") == 6
    Cifar10().load(0, 3)
    path = cifar10 / "cifar-10-batches-bin" / "data_batch_4.bin"
    stat = path.stat()
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # a check is not misled by what a load goes by
    done = run_command("check", "cifar10", "--data-dir", cifar10)
    assert done.exit_code == 2 and done.stdout.count("OK") == 5
    assert md5(path.read_bytes()) in done.stdout and f"should be {md5(binary_files()[path.name])}" in done.stdout
    with pytest.raises(DataError, match="askew data get mnist"):
        run_command("check", "mnist")
    with pytest.raises(UnknownName, match="did you mean 'cifar10'"):
        run_command("check", "cifar-10")


def test_data_check_of_an_archive_names_it_and_what_is_in_it(root: Path, publish: Any) -> None:
    packed = make_zip({f"gzip/{n}.gz": gzip.compress(d) for n, d in letter_files().items()})
    publish("emnist", letter_files(), 6, 3, 0, packed)
    put(root, {"gzip.zip": packed})
    done = run_command("check", "emnist", "--data-dir", root)
    assert done.exit_code == 0 and done.stdout.count("OK") == 1 and done.stdout.count("no checksum is published") == 4
    put(root, {"gzip.zip": packed + b"?"})
    done = run_command("check", "emnist", "--data-dir", root)
    assert done.exit_code == 2 and "emnist-letters" not in done.stdout


def test_data_path(tmp_path: Path) -> None:
    assert run_command("path", "--data-dir", tmp_path).stdout == f"{tmp_path}\n"
    files.use(None)
    assert "get" in run_command().stdout
