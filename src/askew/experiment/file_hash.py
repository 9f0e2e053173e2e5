"""Hashes of files and folders that a run reads, by which a change of them is noticed."""

from __future__ import annotations

import hashlib
import json
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..core.files import is_readable_file


def file_hash(path: Path) -> str:
    """A hash of a file's content, or of the names and contents of all files in a folder.

    Empty where it cannot be read, which whoever needs the file will report.
    """
    try:
        if path.is_dir():
            below = sorted(Path(where) / name for where, _, names in os.walk(path) for name in names)
            return folder_hash(path, tuple((file, *file_stamp(file)) for file in below))
        if not is_readable_file(path):  # a device has no end
            return ""
        return content_hash(path, file_stamp(path))
    except OSError:
        return ""


def file_stamp(path: Path) -> tuple[int, int, int]:
    """A file's size and times, which change with its content."""
    about = path.stat()
    return about.st_size, about.st_mtime_ns, about.st_ctime_ns


@lru_cache(64)
def content_hash(path: Path, stamp: tuple[int, int, int]) -> str:
    """A hash of a file's content, computed once while its stamp stays."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@lru_cache(8)
def folder_hash(folder: Path, stamps: tuple[tuple[Any, ...], ...]) -> str:
    """A hash of the names and contents of a folder's files, computed once while their stamps stay."""
    contents = [(str(file.relative_to(folder)), content_hash(file, tuple(stamp))) for file, *stamp in stamps]
    return hashlib.sha256(json.dumps(contents).encode()).hexdigest()
