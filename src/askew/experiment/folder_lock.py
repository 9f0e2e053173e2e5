"""Folders that one process writes at a time, and the sentence for a file that cannot be written."""

from __future__ import annotations

import errno
import glob
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import DiskFull, StoreError

try:
    import fcntl
except ImportError:  # not a POSIX system: only folders cannot be locked there
    fcntl = None  # type: ignore[assignment]

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # no room: on the disk, in a quota, in a file
READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)  # the folder of somebody else, or of a medium that is only read

# a run's newest checkpoint, and the one before it, for the case that it is damaged
CHECKPOINTS = ("checkpoint.safetensors", "checkpoint-before.safetensors")

# what a process that was killed left of a file that it was writing: ".", the file's name, "." and some letters; or
# where safetensors was writing it, ".tmp" and six
TEMPORARY = re.compile(
    r"\.(run|rounds|federation|model|tracking|checkpoint|end)[\w.-]*\.(toml|jsonl?|safetensors)\.\w+|\.tmp\w{6}"
)


@contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Turn an OSError while a file is written into a StoreError that says what to do."""
    try:
        yield
    except OSError as e:
        what = f"cannot write {path}: {e.strerror or e}"
        if e.errno in FULL:
            raise DiskFull(f"{what}; free some space and {advice_after_space(path)}.") from None
        gone = "if its folder was removed or renamed meanwhile, put it back; else " * (e.errno == errno.ENOENT)
        raise StoreError(f"{what}; {gone}name a folder you can write to.") from None


def advice_after_space(path: Path) -> str:
    """What to do once there is room for a file, and what a run loses by it."""
    folder = path.parent
    if any((folder / name).exists() for name in CHECKPOINTS):
        return "start the run again: it goes on from its last checkpoint"
    if (folder / "rounds.jsonl").exists() and not (folder / "model.safetensors").exists():
        return "start the run again: it begins anew, as it had no checkpoint yet"
    return "try again"


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Make a run folder and lock it; refuse at once if another process has it. The lock ends with its process.

    A folder that cannot be written is locked too if a run was trained there, which may be read.
    """
    if fcntl is None:
        raise StoreError(
            f"cannot lock {folder}: storing a run needs a POSIX system, as Linux or macOS; use one, or leave out= away."
        )
    refuse_unreadable_name(folder)
    file, kind = open_lock(folder)
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise StoreError(
            f"another process is writing {folder}; wait for it to end, or run another configuration."
        ) from None
    try:
        with suppress(OSError):  # what cannot be removed harms nobody
            for path in folder.iterdir():
                if TEMPORARY.fullmatch(path.name):  # of a process that was killed: nobody else writes here now
                    path.unlink(missing_ok=True)
        yield
    finally:
        with suppress(OSError):  # the folder may be gone, and why the run ended is more important
            if [p.name for p in folder.iterdir()] == [".lock"]:  # the run was refused before it began
                (folder / ".lock").unlink()
                folder.rmdir()
        os.close(file)


def open_lock(folder: Path) -> tuple[int, int]:
    """The opened file that stands for a run folder, which is made, and the kind of lock: who writes must be alone."""
    flags = os.O_NOFOLLOW | os.O_NONBLOCK  # never through a link: the folder may be somebody else's
    with explain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            return os.open(folder / ".lock", flags | os.O_RDWR | os.O_CREAT, 0o644), fcntl.LOCK_EX
        except OSError as e:
            if e.errno not in READ_ONLY or not (folder / "model.safetensors").exists():
                raise
        kind = fcntl.LOCK_EX if os.access(folder, os.W_OK) else fcntl.LOCK_SH
        try:
            return os.open(folder / ".lock", flags | os.O_RDONLY), kind
        except FileNotFoundError:  # nobody ever wrote there: it is a copy
            return os.open(folder, os.O_RDONLY), kind


def refuse_unreadable_name(folder: Path) -> None:
    """Refuse a folder whose name is not in UTF-8: checkpoints and models could be written there, but not read."""
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        raise StoreError(
            f"cannot store a run in {folder}: the name is not in UTF-8, so its checkpoints could not be read; "
            "name another folder."
        ) from None


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
