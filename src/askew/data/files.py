"""The files of the datasets: where they are, their published checksums, and a cache of what was decoded from them.

Files are read where they are, out of archives too; nothing is unpacked to disk, and nothing that was not verified is
decoded.
"""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..core.files import is_file, printable, tensors_sha256, write_atomically
from ..errors import DataError, UnknownName, did_you_mean

ReadFile = Callable[[str], bytes]  # the content of a file of a dataset, by name

CACHE_FOLDER = ".askew"  # in the folder of the datasets
LARGEST_FILE = 2**30  # bytes; no file of these datasets is half as large, unpacked or not
CACHE_VERSION = 1  # of the layout of the decoded arrays; a new one leaves old caches alone


class FileState(NamedTuple):
    """A file at some time: another write leaves another state, unless it comes in the same tick of the clock."""

    path: Path
    inode: int
    size: int
    modified: int  # nanoseconds


CHECKED = set[FileState]()  # cached arrays whose checksum this process has found right: for 180 MB it takes 0.1 s
SETTLED = 10**9  # nanoseconds without a change after which a state is not mistaken for an older one


class File(NamedTuple):
    """A file as its authors publish it."""

    name: str
    md5: str = ""  # of its unpacked content, line ends of texts as LF; empty: none is published


class DatasetLayout(NamedTuple):
    """One way in which a dataset is published: its files, and where they may be."""

    kind: str  # what its reader goes by
    folders: tuple[str, ...]  # where its files may be, in the folder of the datasets
    files: tuple[File, ...]  # each plain or with .gz
    archive: File | None = None
    inside: str = ""  # the folder of its files in the archive
    addresses: tuple[str, ...] = ()  # of the archive, or of the folder that holds the files
    ending: str = ""  # of the files there
    dated: tuple[str, ...] = ()  # patterns of folders whose times show changes in them

    def wanted_files(self) -> str:
        """The files to put into the folder of the datasets, as a list in words."""
        return self.archive.name if self.archive else ", ".join(f"{self.folders[0]}/{file.name}" for file in self.files)


class DatasetEntry(NamedTuple):
    """A dataset that needs files."""

    what: str  # a description of its samples
    classes: int
    train: int  # samples
    test: int  # samples
    layouts: tuple[DatasetLayout, ...]  # the preferred one first

    def idea(self) -> str:
        """One line for lists of datasets."""
        return f"{self.what}; {self.classes} classes, {self.train:,} to train and {self.test:,} to test"


class DatasetLocation(NamedTuple):
    """Where a dataset was found: a folder of its files, or one archive of them."""

    name: str
    layout: DatasetLayout
    path: Path
    packed: bool  # is the path an archive?

    def originals(self) -> list[Path]:
        """The files, and the folders whose times matter, that decoded arrays depend on."""
        if self.packed:
            return [self.path]
        files = [find_plain_or_gzip(self.path / file.name) or self.path / file.name for file in self.layout.files]
        return files + [path for pattern in self.layout.dated for path in sorted(self.path.glob(pattern))]

    def size(self) -> int:
        """Bytes of all files."""
        return sum(path.stat().st_size for path in self.originals())

    def stamp(self) -> str:
        """Sizes and times of the originals as JSON: while it stays the same, what was decoded from them does."""
        stats = [(path.relative_to(self.path.parent), path.stat()) for path in self.originals()]
        return json.dumps([[str(path), stat.st_size, stat.st_mtime_ns] for path, stat in stats])


class Checksum(NamedTuple):
    """The MD5 of a file and the one that is published."""

    name: str
    published: str
    found: str

    @property
    def agrees(self) -> bool:
        """Is the file the published one, or is no checksum published?"""
        return self.published in ("", self.found)


# the published files --------------------------------------------------------------------------------------------


def list_files(names: tuple[str, ...], checksums: str = "") -> tuple[File, ...]:
    """Files by their names and their checksums, which are separated by blanks; without checksums if there are none."""
    return tuple(File(name, md5) for name, md5 in zip(names, checksums.split() or [""] * len(names), strict=True))


def idx_names(train: str, test: str) -> tuple[str, ...]:
    """The names of the four files of a dataset in the format of MNIST."""
    return tuple(f"{part}-{kind}-ubyte" for part in (train, test) for kind in ("images-idx3", "labels-idx1"))


def toronto_layout(name: str, inside: str, md5: str, kind: str, files: tuple[File, ...]) -> DatasetLayout:
    """The layout of an archive of the University of Toronto."""
    return DatasetLayout(kind, (inside,), files, File(name, md5), inside, (f"https://www.cs.toronto.edu/~kriz/{name}",))


CIFAR10_BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
TEXT_MD5 = "d2028225a89d8b0b3093dddb720da91f"  # of the plays, under whatever name they are published
GUTENBERG = "https://www.gutenberg.org/files/100/old"

MNIST = DatasetLayout(
    "idx",
    ("MNIST/raw", "mnist"),
    list_files(
        idx_names("train", "t10k"),
        "6bbc9ace898e44ae57da46a324031adb a25bea736e30d166cdddb491f175f624 "
        "2646ac647ad5339dbf082846283269ea 27ae3e4e09519cfbb04c329615203637",
    ),
    addresses=("https://ossci-datasets.s3.amazonaws.com/mnist", "https://storage.googleapis.com/cvdf-datasets/mnist"),
    ending=".gz",
)
FASHION_MNIST = DatasetLayout(
    "idx",
    ("FashionMNIST/raw", "fashion_mnist"),
    list_files(
        idx_names("train", "t10k"),
        "f4a8712d7a061bf5bd6d2ca38dc4d50a 9018921c3c673c538a1fc5bad174d6f9 "
        "8181f5470baa50b63fa0f6fddb340f0a 15d484375f8d13e6eb1aabb0c3f46965",
    ),
    addresses=("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",),
    ending=".gz",
)
EMNIST = DatasetLayout(
    "idx",
    ("EMNIST/raw", "emnist"),
    list_files(idx_names("emnist-letters-train", "emnist-letters-test")),
    File("gzip.zip", "58c8d27c78d21e728a6bc7b3cc06412e"),
    "gzip",
    ("https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",),
)
CIFAR10_BINARY = toronto_layout(
    "cifar-10-binary.tar.gz",
    "cifar-10-batches-bin",
    "c32a1d4ab5d03f1284b67883e8d87530",
    "binary",
    list_files(
        tuple(f"{name}.bin" for name in CIFAR10_BATCHES),
        "5dd7e06a14cb22eb9f671a540d1b7c25 5ea93a67294ea407fff1d09f752e9692 942cd6a4bcdd0dd3c604fbe906cb4421 "
        "ae636b3ba5c66a11e91e8cb52e771fcb 53f37980c15c3d472c316c40844f3f0d 803d5f7f4d78ea53de84dbe85f74fb6d",
    ),
)
CIFAR10_PYTHON = toronto_layout(
    "cifar-10-python.tar.gz",
    "cifar-10-batches-py",
    "c58f30108f718f92721af3b95e74349a",
    "python",
    list_files(
        CIFAR10_BATCHES,
        "c99cafc152244af753f735de768cd75f d4bba439e000b95fd0a9bffe97cbabec 54ebc095f3ab1f0389bbae665268c751 "
        "634d18415352ddfa80567beed471001a 482c414d41f54cd18b22e5b47cb7c3cb 40351d587109b95175f43aff81a1287e",
    ),
)
CIFAR100_BINARY = toronto_layout(
    "cifar-100-binary.tar.gz",
    "cifar-100-binary",
    "03b5dce01913d631647c71ecec9e9cb8",
    "binary",
    list_files(("train.bin", "test.bin"), "6172c7755cfe09b2fe270c85cebc1b15 4499cfba6c016c1be1438163640a0898"),
)
CIFAR100_PYTHON = toronto_layout(
    "cifar-100-python.tar.gz",
    "cifar-100-python",
    "eb9058c3a382ffc7106e4002c42a8d85",
    "python",
    list_files(("train", "test"), "16019d7e3df5f24257cddd939b257f8d f0ef6b0ae62326f3e7ffdfab6717acfc"),
)
TINY_IMAGENET = DatasetLayout(
    "jpeg",
    ("tiny-imagenet-200",),
    list_files(("wnids.txt", "val/val_annotations.txt")),
    File("tiny-imagenet-200.zip", "90528d7ca1a48142e341f4ef8d21d0de"),
    "tiny-imagenet-200",
    ("http://cs231n.stanford.edu/tiny-imagenet-200.zip",),
    dated=("train/*/images", "val/images"),
)
SHAKESPEARE = (
    DatasetLayout("text", ("shakespeare",), list_files(("pg100.txt",), TEXT_MD5)),
    DatasetLayout(
        "text",
        ("shakespeare",),
        list_files(("t8.shakespeare.txt",), TEXT_MD5),
        addresses=("https://ocw.mit.edu/ans7870/6/6.006/s08/lecturenotes/files",),
    ),
    DatasetLayout(
        "text",
        ("shakespeare",),
        list_files(("100.txt",), TEXT_MD5),
        File("1994-01-100.zip"),
        addresses=(f"{GUTENBERG}/1994-01-100.zip", f"{GUTENBERG}/old/1994-01-100.zip"),
    ),
)

table: dict[str, DatasetEntry] = {
    "mnist": DatasetEntry("handwritten digits, 28×28 grey", 10, 60_000, 10_000, (MNIST,)),
    "fashion_mnist": DatasetEntry("pictures of clothes, 28×28 grey", 10, 60_000, 10_000, (FASHION_MNIST,)),
    "emnist": DatasetEntry("handwritten letters, 28×28 grey", 26, 124_800, 20_800, (EMNIST,)),
    "cifar10": DatasetEntry(
        "photographs of animals and vehicles, 32×32 in colour", 10, 50_000, 10_000, (CIFAR10_BINARY, CIFAR10_PYTHON)
    ),
    "cifar100": DatasetEntry(
        "photographs of all kinds of things, 32×32 in colour", 100, 50_000, 10_000, (CIFAR100_BINARY, CIFAR100_PYTHON)
    ),
    "tiny_imagenet": DatasetEntry(
        "photographs of all kinds of things, 64×64 in colour", 200, 100_000, 10_000, (TINY_IMAGENET,)
    ),
    "shakespeare": DatasetEntry(
        "the next character in the speeches of Shakespeare's roles", 80, 3_678_452, 356_922, SHAKESPEARE
    ),
}


# the folder -----------------------------------------------------------------------------------------------------

chosen_folder: Path | None = None  # by `use`; None: where the environment says


def use(path: str | Path | None) -> None:
    """Let this be the folder of the datasets; None: the one that the environment names."""
    global chosen_folder
    chosen_folder = None if path is None else Path(path).expanduser()


def folder() -> Path:
    """The folder of the datasets: the one given to `use`, else ASKEW_DATA, else one in the user's cache."""
    if chosen_folder is not None:
        return chosen_folder
    if given := os.environ.get("ASKEW_DATA"):
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "askew" / "data"


def get_command(name: str) -> str:
    """The command that gets a dataset into the folder in use."""
    return f"askew data get {name}" + (f" --data-dir {chosen_folder}" if chosen_folder else "")


def manual_advice(name: str) -> str:
    """What to do to get a dataset without a download, as the end of a sentence."""
    return f"put {', or '.join(layout.wanted_files() for layout in entry(name).layouts)} into {folder()}"


def entry(name: str) -> DatasetEntry:
    """The dataset of this name."""
    if name not in table:
        raise UnknownName(f"no dataset {name!r} is kept in files; {did_you_mean(name, table)}")
    return table[name]


def find_plain_or_gzip(path: Path) -> Path | None:
    """This file, or this file with .gz, or None if neither exists."""
    return next((p for p in (path, path.with_name(f"{path.name}.gz")) if is_file(p)), None)


def find(name: str) -> DatasetLocation | None:
    """Where a dataset is, unverified, or None: a folder with all of its files before an archive."""
    layouts, root = entry(name).layouts, folder()
    for layout in layouts:
        for where in layout.folders:
            if all(find_plain_or_gzip(root / where / file.name) for file in layout.files):
                return DatasetLocation(name, layout, root / where, packed=False)
    for layout in layouts:
        for where in (".", *layout.folders):
            if layout.archive and (root / where / layout.archive.name).is_file():
                return DatasetLocation(name, layout, root / where / layout.archive.name, packed=True)
    return None


def locate(name: str) -> DatasetLocation:
    """Where a dataset is, unverified; an error that says how to get it if it is nowhere."""
    found = find(name)
    if found is None:
        raise DataError(
            f"{name}: its files are not in {folder()}; run `{get_command(name)}`, or {manual_advice(name)}."
        )
    return found


# reading --------------------------------------------------------------------------------------------------------


def gunzip(data: bytes) -> bytes:
    """The content of a gzip file; of a damaged or far too large one what can be had, which no checksum will match."""
    stream = zlib.decompressobj(wbits=31)
    try:
        return stream.decompress(data, LARGEST_FILE)
    except zlib.error:
        return b""


def content_md5(name: str, data: bytes) -> str:
    """The MD5 of a file's content; a text may come with either kind of line ends."""
    content = data.replace(b"\r\n", b"\n") if name.endswith(".txt") else data
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def file_md5(path: Path) -> str:
    """The MD5 of a file as it is."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


@contextmanager
def open_unverified(location: DatasetLocation) -> Iterator[ReadFile]:
    """A function that reads files of a dataset by name."""
    if not location.packed:
        yield lambda name: read_from_folder(location.path, name)
        return
    inside, archive_file = location.layout.inside, location.layout.archive
    try:
        if archive_file and archive_file.name.endswith(".zip"):
            with open_zip(location.path) as archive:
                yield lambda name: read_from_zip(archive, f"{inside}/{name}".lstrip("/"))
        else:
            yield read_tar(location.path, {f"{inside}/{file.name}": file.name for file in location.layout.files})
    except (KeyError, OSError, tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError) as problem:
        reason = printable(" ".join(str(problem).split()))
        raise DataError(
            f"{location.path} cannot be unpacked ({reason}); remove it and run `{get_command(location.name)}`."
        ) from None


def read_from_folder(path: Path, name: str) -> bytes:
    """The unpacked content of a file in a folder."""
    found = find_plain_or_gzip(path / name)
    if found is None:
        raise DataError(f"{path} lacks {name}; put the file there, or remove the folder and take the archive.")
    if found.stat().st_size > LARGEST_FILE:
        raise DataError(f"{found} is far too large to be a file of this dataset; remove it and get it anew.")
    data = found.read_bytes()
    return gunzip(data) if found.name != Path(name).name else data


def open_zip(path: Path) -> zipfile.ZipFile:
    """A zip archive, opened; BadZipFile if it is damaged."""
    try:
        return zipfile.ZipFile(path)
    except OSError:
        raise
    except Exception as problem:  # anything may go wrong in a damaged list of contents
        raise zipfile.BadZipFile(str(problem)) from None


def read_from_zip(archive: zipfile.ZipFile, name: str) -> bytes:
    """The unpacked content of a file in a zip archive."""
    packed = name not in archive.NameToInfo
    member = archive.getinfo(f"{name}.gz" if packed else name)
    if member.file_size > LARGEST_FILE:
        raise zipfile.BadZipFile(f"{member.filename} is far too large")
    try:
        data = archive.read(member)
    except Exception as problem:  # as above
        raise zipfile.BadZipFile(str(problem)) from None
    return gunzip(data) if packed else data


def read_tar(path: Path, names: dict[str, str]) -> ReadFile:
    """A function that returns files of a tar archive; `names` are theirs by their paths in the archive.

    They are all read at once, in the order of the archive: going back would mean unpacking it again.
    """
    with tarfile.open(path) as tar:
        wanted = (member for member in tar if member.name in names and member.size <= LARGEST_FILE)
        contents = {names[member.name]: data.read() for member in wanted if (data := tar.extractfile(member))}
    return contents.__getitem__


@contextmanager
def open_verified(location: DatasetLocation) -> Iterator[ReadFile]:
    """A function that reads files of a dataset by name and refuses those that are not the published ones."""
    archive = location.layout.archive
    if location.packed and archive and archive.md5:
        require_agreement(location, Checksum(location.path.name, archive.md5, file_md5(location.path)), location.path)
    published = {file.name: file.md5 for file in location.layout.files if file.md5}
    with open_unverified(location) as read:

        def read_verified(name: str) -> bytes:
            data = read(name)
            if name in published:
                path = location.path if location.packed else find_plain_or_gzip(location.path / name)
                checksum = Checksum(name, published[name], content_md5(name, data))
                require_agreement(location, checksum, path or location.path)
            return data

        yield read_verified


def require_agreement(location: DatasetLocation, checksum: Checksum, path: Path) -> None:
    """Refuse a file that is not the published one; `path` is the file or the archive that it is in."""
    if not checksum.agrees:
        content = "" if path.name == checksum.name else f" holds a {checksum.name} that"
        raise DataError(
            f"{path}{content} has the MD5 {checksum.found} and the published one {checksum.published}: "
            f"it is truncated, damaged or another file; remove it and run `{get_command(location.name)}`."
        )


def read_all(location: DatasetLocation) -> dict[str, bytes]:
    """The contents of all files of a dataset by name, verified."""
    with open_verified(location) as read:
        return {file.name: read(file.name) for file in location.layout.files}


def check(location: DatasetLocation) -> list[Checksum]:
    """The checksum of every file; of a damaged archive the archive's alone."""
    checksums = []
    if location.packed and location.layout.archive:
        checksums.append(Checksum(location.path.name, location.layout.archive.md5, file_md5(location.path)))
    if all(checksum.agrees for checksum in checksums):
        with open_unverified(location) as read:
            checksums += [
                Checksum(file.name, file.md5, content_md5(file.name, read(file.name))) for file in location.layout.files
            ]
    return checksums


# the cache ------------------------------------------------------------------------------------------------------


def load_decoded(
    location: DatasetLocation, decode: Callable[[DatasetLocation], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """The arrays that `decode` makes of the files; from a cache beside them until they change.

    Where nothing may be written there is no cache.
    """
    layout = location.layout
    published = repr((CACHE_VERSION, layout.kind, layout.archive, layout.files))
    version = hashlib.sha256(published.encode()).hexdigest()[:8]
    path, stamp = folder() / CACHE_FOLDER / f"{location.name}-{version}.safetensors", location.stamp()
    tensors = read_cache(path, stamp)
    if tensors is None:
        tensors = decode(location)
        write_cache(path, tensors, stamp)
    return tensors


def read_cache(path: Path, stamp: str) -> dict[str, Tensor] | None:
    """The cached arrays, or None if there are none, if they are damaged or if the originals have another stamp."""
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            if about.get("originals") != stamp:
                return None
            state = file_state(path)
            names = file.keys()  # `file` is no dictionary and cannot be iterated over
            tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError):
        return None
    if state in CHECKED:
        return tensors
    if about.get("sha256") != tensors_sha256(tensors):
        return None
    if state.modified < time.time_ns() - SETTLED:
        CHECKED.add(state)
    return tensors


def file_state(path: Path) -> FileState:
    """What changes if somebody writes into a file."""
    found = path.stat()
    return FileState(path, found.st_ino, found.st_size, found.st_mtime_ns)


def write_cache(path: Path, tensors: dict[str, Tensor], stamp: str) -> None:
    """Store decoded arrays, if it can be done."""
    try:
        with write_atomically(path) as temporary:
            save_file(tensors, temporary, metadata={"originals": stamp, "sha256": tensors_sha256(tensors)})
    except (SafetensorError, OSError):
        return  # no right to write, or no room: the next load decodes again
