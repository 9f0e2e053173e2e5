"""The files of the datasets: where they lie, their published checksums, and a cache of what was decoded from them.

Files are read where they are, out of archives too; nothing is unpacked, and nothing that was not verified is decoded.
"""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from ..errors import DataError, UnknownName, did_you_mean

Read = Callable[[str], bytes]
CACHE = ".askew"
LAYOUT = 1  # of the decoded arrays; a new one leaves old caches alone


class File(NamedTuple):
    """A file as its authors publish it."""

    name: str
    md5: str = ""  # of its unpacked content, line ends of texts as LF; empty: none is published


class Form(NamedTuple):
    """One way in which a dataset is published."""

    kind: str  # what its reader goes by
    folders: tuple[str, ...]  # where its files may lie
    files: tuple[File, ...]  # each plain or with .gz
    archive: File | None = None
    inside: str = ""  # the folder of its files in the archive
    addresses: tuple[str, ...] = ()  # of the archive, or of the folder that holds the files
    ending: str = ""  # of the files there
    dated: tuple[str, ...] = ()  # patterns of folders whose times tell of changes in them

    def wanted(self) -> str:
        """What to put into the folder of the datasets, in words."""
        return self.archive.name if self.archive else ", ".join(f"{self.folders[0]}/{file.name}" for file in self.files)


class Entry(NamedTuple):
    """A dataset that needs files."""

    what: str
    classes: int
    train: int
    test: int
    forms: tuple[Form, ...]

    def idea(self) -> str:
        return f"{self.what}; {self.classes} classes, {self.train:,} to train and {self.test:,} to test"


class Place(NamedTuple):
    """Where a dataset was found: a folder of its files, or one archive of them."""

    name: str
    form: Form
    path: Path
    packed: bool

    def originals(self) -> list[Path]:
        if self.packed:
            return [self.path]
        files = [plain_or_packed(self.path / file.name) or self.path / file.name for file in self.form.files]
        return files + [path for pattern in self.form.dated for path in sorted(self.path.glob(pattern))]

    def size(self) -> int:
        return sum(path.stat().st_size for path in self.originals())

    def stamp(self) -> str:
        """Sizes and times of the originals: while they stay the same, what was decoded from them does."""
        stats = [(path.relative_to(self.path.parent), path.stat()) for path in self.originals()]
        return json.dumps([[str(path), stat.st_size, stat.st_mtime_ns] for path, stat in stats])


class Sum(NamedTuple):
    """A file beside its published checksum."""

    name: str
    published: str
    found: str

    @property
    def agrees(self) -> bool:
        return self.published in ("", self.found)


def listed(names: tuple[str, ...], sums: str = "") -> tuple[File, ...]:
    return tuple(File(name, md5) for name, md5 in zip(names, sums.split() or [""] * len(names), strict=True))


def idx_names(train: str, test: str) -> tuple[str, ...]:
    return tuple(f"{part}-{kind}-ubyte" for part in (train, test) for kind in ("images-idx3", "labels-idx1"))


def toronto(name: str, inside: str, md5: str, kind: str, files: tuple[File, ...]) -> Form:
    return Form(kind, (inside,), files, File(name, md5), inside, (f"https://www.cs.toronto.edu/~kriz/{name}",))


BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
TEXT = "d2028225a89d8b0b3093dddb720da91f"
OLD_TEXT = "https://www.gutenberg.org/files/100/old"

MNIST = Form(
    "idx",
    ("MNIST/raw", "mnist"),
    listed(
        idx_names("train", "t10k"),
        "6bbc9ace898e44ae57da46a324031adb a25bea736e30d166cdddb491f175f624 "
        "2646ac647ad5339dbf082846283269ea 27ae3e4e09519cfbb04c329615203637",
    ),
    addresses=("https://ossci-datasets.s3.amazonaws.com/mnist", "https://storage.googleapis.com/cvdf-datasets/mnist"),
    ending=".gz",
)
FASHION_MNIST = Form(
    "idx",
    ("FashionMNIST/raw", "fashion_mnist"),
    listed(
        idx_names("train", "t10k"),
        "f4a8712d7a061bf5bd6d2ca38dc4d50a 9018921c3c673c538a1fc5bad174d6f9 "
        "8181f5470baa50b63fa0f6fddb340f0a 15d484375f8d13e6eb1aabb0c3f46965",
    ),
    addresses=("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",),
    ending=".gz",
)
EMNIST = Form(
    "idx",
    ("EMNIST/raw", "emnist"),
    listed(idx_names("emnist-letters-train", "emnist-letters-test")),
    File("gzip.zip", "58c8d27c78d21e728a6bc7b3cc06412e"),
    "gzip",
    ("https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",),
)
CIFAR10_BINARY = toronto(
    "cifar-10-binary.tar.gz",
    "cifar-10-batches-bin",
    "c32a1d4ab5d03f1284b67883e8d87530",
    "binary",
    listed(
        tuple(f"{name}.bin" for name in BATCHES),
        "5dd7e06a14cb22eb9f671a540d1b7c25 5ea93a67294ea407fff1d09f752e9692 942cd6a4bcdd0dd3c604fbe906cb4421 "
        "ae636b3ba5c66a11e91e8cb52e771fcb 53f37980c15c3d472c316c40844f3f0d 803d5f7f4d78ea53de84dbe85f74fb6d",
    ),
)
CIFAR10_PYTHON = toronto(
    "cifar-10-python.tar.gz",
    "cifar-10-batches-py",
    "c58f30108f718f92721af3b95e74349a",
    "python",
    listed(
        BATCHES,
        "c99cafc152244af753f735de768cd75f d4bba439e000b95fd0a9bffe97cbabec 54ebc095f3ab1f0389bbae665268c751 "
        "634d18415352ddfa80567beed471001a 482c414d41f54cd18b22e5b47cb7c3cb 40351d587109b95175f43aff81a1287e",
    ),
)
CIFAR100_BINARY = toronto(
    "cifar-100-binary.tar.gz",
    "cifar-100-binary",
    "03b5dce01913d631647c71ecec9e9cb8",
    "binary",
    listed(("train.bin", "test.bin"), "6172c7755cfe09b2fe270c85cebc1b15 4499cfba6c016c1be1438163640a0898"),
)
CIFAR100_PYTHON = toronto(
    "cifar-100-python.tar.gz",
    "cifar-100-python",
    "eb9058c3a382ffc7106e4002c42a8d85",
    "python",
    listed(("train", "test"), "16019d7e3df5f24257cddd939b257f8d f0ef6b0ae62326f3e7ffdfab6717acfc"),
)
TINY_IMAGENET = Form(
    "jpeg",
    ("tiny-imagenet-200",),
    listed(("wnids.txt", "val/val_annotations.txt")),
    File("tiny-imagenet-200.zip", "90528d7ca1a48142e341f4ef8d21d0de"),
    "tiny-imagenet-200",
    ("http://cs231n.stanford.edu/tiny-imagenet-200.zip",),
    dated=("train/*/images", "val/images"),
)
SHAKESPEARE = (
    Form("text", ("shakespeare",), listed(("pg100.txt",), TEXT)),
    Form(
        "text",
        ("shakespeare",),
        listed(("t8.shakespeare.txt",), TEXT),
        addresses=("https://ocw.mit.edu/ans7870/6/6.006/s08/lecturenotes/files",),
    ),
    Form(
        "text",
        ("shakespeare",),
        listed(("100.txt",), TEXT),
        File("1994-01-100.zip"),
        addresses=(f"{OLD_TEXT}/1994-01-100.zip", f"{OLD_TEXT}/old/1994-01-100.zip"),
    ),
)

table: dict[str, Entry] = {
    "mnist": Entry("handwritten digits, 28×28 grey", 10, 60_000, 10_000, (MNIST,)),
    "fashion_mnist": Entry("pictures of clothes, 28×28 grey", 10, 60_000, 10_000, (FASHION_MNIST,)),
    "emnist": Entry("handwritten letters, 28×28 grey", 26, 124_800, 20_800, (EMNIST,)),
    "cifar10": Entry(
        "photographs of animals and vehicles, 32×32 in colour", 10, 50_000, 10_000, (CIFAR10_BINARY, CIFAR10_PYTHON)
    ),
    "cifar100": Entry(
        "photographs of all kinds of things, 32×32 in colour", 100, 50_000, 10_000, (CIFAR100_BINARY, CIFAR100_PYTHON)
    ),
    "tiny_imagenet": Entry(
        "photographs of all kinds of things, 64×64 in colour", 200, 100_000, 10_000, (TINY_IMAGENET,)
    ),
    "shakespeare": Entry(
        "the next character in the speeches of Shakespeare's roles", 80, 3_678_452, 356_922, SHAKESPEARE
    ),
}


# the folder -----------------------------------------------------------------------------------------------------

chosen: Path | None = None


def use(path: str | Path | None) -> None:
    """Let the datasets lie here; None: where the environment says."""
    global chosen
    chosen = None if path is None else Path(path).expanduser()


def folder() -> Path:
    """Where the datasets lie: the folder given to `use`, else ASKEW_DATA, else one in the user's cache."""
    if chosen is not None:
        return chosen
    if given := os.environ.get("ASKEW_DATA"):
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "askew" / "data"


def getting(name: str) -> str:
    """The command that gets a dataset into the folder in use."""
    return f"askew data get {name}" + (f" --data-dir {chosen}" if chosen else "")


def entry(name: str) -> Entry:
    if name not in table:
        raise UnknownName(f"no dataset {name!r} is kept in files; {did_you_mean(name, table)}")
    return table[name]


def plain_or_packed(path: Path) -> Path | None:
    return next((p for p in (path, path.with_name(f"{path.name}.gz")) if p.is_file()), None)


def find(name: str) -> Place | None:
    """Where a dataset lies, unverified: a folder with all of its files before an archive."""
    forms, root = entry(name).forms, folder()
    for form in forms:
        for where in form.folders:
            if all(plain_or_packed(root / where / file.name) for file in form.files):
                return Place(name, form, root / where, packed=False)
    for form in forms:
        for where in (".", *form.folders):
            if form.archive and (root / where / form.archive.name).is_file():
                return Place(name, form, root / where / form.archive.name, packed=True)
    return None


def place(name: str) -> Place:
    """Where a dataset lies, or a sentence that says how to get it."""
    found = find(name)
    if found is None:
        raise DataError(f"{name}: its files are not in {folder()}; run `{getting(name)}`, or {by_hand(name)}.")
    return found


def by_hand(name: str) -> str:
    return f"put {', or '.join(form.wanted() for form in entry(name).forms)} into {folder()}"


# reading --------------------------------------------------------------------------------------------------------


def unpacked(data: bytes) -> bytes:
    """The content of a gzip file; of a damaged one what can be had, which no checksum will fit."""
    stream = zlib.decompressobj(wbits=31)
    try:
        return stream.decompress(data)
    except zlib.error:
        return b""


def digest(name: str, data: bytes) -> str:
    """The MD5 of a file's content; a text may come with either kind of line ends."""
    return hashlib.md5(
        data.replace(b"\r\n", b"\n") if name.endswith(".txt") else data, usedforsecurity=False
    ).hexdigest()


def file_digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


@contextmanager
def unverified(where: Place) -> Iterator[Read]:
    """A function that reads files of a dataset by name."""
    if not where.packed:
        yield lambda name: from_folder(where.path, name)
        return
    try:
        if not zipfile.is_zipfile(where.path):
            wanted = {f"{where.form.inside}/{file.name}": file.name for file in where.form.files}
            with tarfile.open(
                where.path
            ) as tar:  # in the order of the archive: going back would mean unpacking it again
                held = {wanted[m.name]: data.read() for m in tar if m.name in wanted and (data := tar.extractfile(m))}
            yield held.__getitem__
            return
        with zipfile.ZipFile(where.path) as archive:
            yield lambda name: from_zip(archive, f"{where.form.inside}/{name}".lstrip("/"))
    except (KeyError, tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError) as e:
        raise DataError(f"{where.path} cannot be unpacked ({e}); remove it and run `{getting(where.name)}`.") from None


def from_folder(path: Path, name: str) -> bytes:
    found = plain_or_packed(path / name)
    if found is None:
        raise DataError(f"{path} lacks {name}; put the file there, or remove the folder and take the archive.")
    data = found.read_bytes()
    return unpacked(data) if found.name != Path(name).name else data


def from_zip(archive: zipfile.ZipFile, name: str) -> bytes:
    return archive.read(name) if name in archive.NameToInfo else unpacked(archive.read(f"{name}.gz"))


@contextmanager
def opened(where: Place) -> Iterator[Read]:
    """A function that reads files of a dataset by name and refuses those that are not the published ones."""
    if where.packed and where.form.archive and where.form.archive.md5:
        agreed(where, Sum(where.path.name, where.form.archive.md5, file_digest(where.path)), where.path)
    published = {file.name: file.md5 for file in where.form.files if file.md5}
    with unverified(where) as read:

        def verified(name: str) -> bytes:
            data = read(name)
            if name in published:
                at = where.path if where.packed else plain_or_packed(where.path / name)
                agreed(where, Sum(name, published[name], digest(name, data)), at or where.path)
            return data

        yield verified


def agreed(where: Place, found: Sum, at: Path) -> None:
    if not found.agrees:
        content = "" if at.name == found.name else f" holds a {found.name} that"
        raise DataError(
            f"{at}{content} has the MD5 {found.found} and the published one {found.published}: it is truncated, damaged or another "
            f"file; remove it and run `{getting(where.name)}`."
        )


def contents(where: Place) -> dict[str, bytes]:
    """All files of a dataset, verified."""
    with opened(where) as read:
        return {file.name: read(file.name) for file in where.form.files}


def check(where: Place) -> list[Sum]:
    """Every file beside its published checksum; what a damaged archive holds is not looked at."""
    sums = []
    if where.packed and where.form.archive:
        sums.append(Sum(where.path.name, where.form.archive.md5, file_digest(where.path)))
    if all(each.agrees for each in sums):
        with unverified(where) as read:
            sums += [Sum(file.name, file.md5, digest(file.name, read(file.name))) for file in where.form.files]
    return sums


# the cache ------------------------------------------------------------------------------------------------------


def decoded(where: Place, decode: Callable[[Place], dict[str, Tensor]]) -> dict[str, Tensor]:
    """What `decode` makes of the files, kept beside them: made anew when they changed, not kept where nothing may be written."""
    version = hashlib.sha256(
        repr((LAYOUT, where.form.kind, where.form.archive, where.form.files)).encode()
    ).hexdigest()[:8]
    path, stamp = folder() / CACHE / f"{where.name}-{version}.safetensors", where.stamp()
    kept = cached(path, stamp)
    if kept is None:
        kept = decode(where)
        keep(path, kept, stamp)
    return kept


def fingerprint(tensors: dict[str, Tensor]) -> str:
    total = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        total.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        total.update(tensor.numpy().data)
    return total.hexdigest()


def cached(path: Path, stamp: str) -> dict[str, Tensor] | None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            if about.get("originals") != stamp:
                return None
            tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError):
        return None
    return tensors if about.get("sha256") == fingerprint(tensors) else None


def keep(path: Path, tensors: dict[str, Tensor], stamp: str) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        with written(path) as beside:
            save_file(tensors, beside, metadata={"originals": stamp, "sha256": fingerprint(tensors)})
    except (SafetensorError, OSError):
        return  # no right to write, or no room: the next load decodes again


@contextmanager
def written(path: Path) -> Iterator[Path]:
    """A path beside this one; what is written there takes this name when it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    beside = Path(name)
    try:
        yield beside
        with open(beside, "rb+") as file:
            os.fsync(file.fileno())
        beside.chmod(0o644)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
