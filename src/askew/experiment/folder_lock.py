"""Folders that one process writes at a time, and the sentence for a file that cannot be written."""

from __future__ import annotations

import errno
import glob
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import StoreError

try:
    import fcntl
except ImportError:  # not a POSIX system: only folders cannot be locked there
    fcntl = None  # type: ignore[assignment]

# what a process that was killed left of a file that it was writing: ".", the file's name, "." and some letters
TEMPORARY = re.compile(
    r"\.(run|rounds|federation|model|tracking|checkpoint|end)[\w.-]*\.(toml|jsonl?|safetensors)\.\w+"
)


@contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Turn an OSError while a file is written into a StoreError that says what to do."""
    try:
        yield
    except OSError as e:
        full = e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        advice = (
            "free some space and start the run again: it goes on from what is stored"
            if full
            else "name a folder you can write to"
        )
        raise StoreError(f"cannot write {path}: {e.strerror or e}; {advice}.") from None


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Make a run folder and lock it; refuse at once if another process has it. The lock ends with its process."""
    if fcntl is None:
        raise StoreError(
            f"cannot lock {folder}: storing a run needs a POSIX system, as Linux or macOS; use one, or leave out= away."
        )
    with explain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        # never through a link: the folder may be somebody else's
        file = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise StoreError(
            f"another process is writing {folder}; wait for it to end, or run another configuration."
        ) from None
    try:
        for path in folder.iterdir():
            if TEMPORARY.fullmatch(path.name):  # of a process that was killed: nobody else writes here now
                path.unlink(missing_ok=True)
        yield
    finally:
        if [p.name for p in folder.iterdir()] == [".lock"]:  # the run was refused before it began
            (folder / ".lock").unlink()
            folder.rmdir()
        os.close(file)


def remove_leftovers(path: Path) -> None:
    """Remove what processes that were killed left of a file that they were writing; call it where nobody writes it."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*"):
        left.unlink(missing_ok=True)


@contextmanager
def wait_for_folder(folder: Path) -> Iterator[None]:
    """Make a folder and keep others who call this from it, after those who have it now have left it."""
    with explain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    if fcntl is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def is_locked(folder: Path) -> bool:
    """Is a process writing this run folder?"""
    if fcntl is None:
        return False
    try:
        file = os.open(folder / ".lock", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    except OSError as e:
        return e.errno != errno.ELOOP  # a link is no lock
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(file)
    return False
