"""Kernels in C, compiled where they run: at first use, for the sizes asked for, with all instructions of the machine.

What was compiled is kept in the user's cache, under a name that holds the hash of all that went into it and the hash of
the file itself. A file is loaded only from a folder that is the user's own, that nobody else can write to and that is
no link; a damaged file is compiled again. Where there is no C compiler, or ASKEW_NATIVE=0 says so, there are no
kernels, and torch's own functions are used instead.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

from ...core.files import write_atomically

TUNING = ("-march=native", "-mcpu=native")  # as compilers call it; the first that they accept
FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-shared", "-w")  # no -ffast-math: a loss that is not a number must be seen
COMMON = Path(__file__).with_name("vectors.h")
TIMEOUT = 60  # seconds for one compilation, also on a machine that has much else to do

errors: dict[str, str] = {}  # why a source could not be compiled, by its stem
hanging: set[tuple[str, ...]] = set()  # compilers that took longer than TIMEOUT once, and are not waited for again


def library(source: Path, dtype: torch.dtype, *sizes: tuple[str, int]) -> ctypes.CDLL | None:
    """The functions of a C file with these constants, for numbers of this type; None where they cannot be had."""
    return _library(source, dtype, sizes) if compiler() else None


def why_not(source: Path) -> str:
    """Why the functions of a C file cannot be had, after they were asked for."""
    if os.environ.get("ASKEW_NATIVE") == "0":
        return "as asked for"
    if compiler():
        return errors.get(source.stem, "")
    return f"CC={os.environ['CC']} cannot be read: a quote is not closed" if cc_words() is None else "no C compiler"


def cc_words() -> list[str] | None:
    """The words of the compiler's command that the environment variable CC has; None where a quote is not closed."""
    try:
        return shlex.split(os.environ.get("CC", ""))
    except ValueError:
        return None


@cache
def compiler() -> tuple[str, ...]:
    """The command that compiles C; empty where there is none, or none is wanted."""
    words = cc_words()
    if words is None or os.environ.get("ASKEW_NATIVE") == "0" or os.name != "posix":
        return ()
    command = words or ["cc"]
    return tuple(command) if shutil.which(command[0]) else ()


@cache
def _library(source: Path, dtype: torch.dtype, sizes: tuple[tuple[str, int], ...]) -> ctypes.CDLL | None:
    errors.pop(source.stem, None)
    constants = (("DOUBLE", int(dtype is torch.float64)), *sizes)
    code = "".join(f"#define {name} {value}\n" for name, value in constants) + COMMON.read_text() + source.read_text()
    parts = [code, *compiler(), *FLAGS, *TUNING, machine()]
    name = f"{source.stem}-{hashlib.sha256(chr(10).join(parts).encode()).hexdigest()[:32]}"
    content: bytes | None = None
    for folder in cache_folders():  # the next one only where nothing can be stored in this one, or loaded from it
        for path in stored_files(folder, name):
            if loaded := load(path):
                return loaded
        content = content or compile_code(code, source.stem, folder)
        if content is None and source.stem in errors:
            return None
        if content is None:
            continue
        stored = store(folder, name, content)
        if stored and (loaded := load(stored)):
            return loaded
    errors[source.stem] = "there is no safe folder to keep what is compiled"
    return None


def load(path: Path) -> ctypes.CDLL | None:
    """A shared library; None where the system refuses it, as from a folder without leave to execute."""
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        return None


@cache
def machine() -> str:
    """What machines that share a home folder may differ in."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
    except OSError:
        lines = [f"model name {platform.processor()}"]
    return platform.machine() + "".join(line for line in lines if line.startswith(("model name", "flags", "Features")))


def compile_code(code: str, stem: str, folder: Path) -> bytes | None:
    """The shared library of a C program, compiled within this folder; None where it does not compile, with the reason
    in `errors`, or where nothing can be written there.
    """
    try:
        with tempfile.TemporaryDirectory(dir=folder) as inside:
            return compile_inside(code, stem, Path(inside))
    except OSError:
        return None


def compile_inside(code: str, stem: str, folder: Path) -> bytes | None:
    """The shared library of a C program; all of the compiler's files are in this folder, which is empty."""
    output, environment = folder / "kernel.so", os.environ | {"TMPDIR": str(folder)}
    for tuning in TUNING:
        command = [*compiler(), *FLAGS, tuning, "-x", "c", "-", "-o", str(output), "-lm"]
        if compiler() in hanging:
            errors.setdefault(stem, f"{command[0]} took longer than {TIMEOUT} seconds")
            return None
        try:
            done = subprocess.run(command, input=code, text=True, capture_output=True, timeout=TIMEOUT, env=environment)
        except subprocess.TimeoutExpired:
            hanging.add(compiler())
            continue
        except OSError as e:
            errors.setdefault(stem, str(e))
            return None
        if done.returncode == 0 and output.is_file():
            errors.pop(stem, None)
            return output.read_bytes()
        lines = done.stderr.splitlines() or [f"{command[0]} ended with {done.returncode}"]
        errors.setdefault(stem, next((line for line in lines if "error" in line), lines[-1]))
    return None


# the cache ------------------------------------------------------------------------------------------------------------


def cache_folders() -> Iterator[Path]:
    """Folders for what is compiled that are safe to load from: the user's cache, or else one for temporary files."""
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # a user without a home, as in some containers
        home = None
    if home is not None and (folder := safe_folder(home / "askew" / "native")):
        yield folder
    with suppress(FileNotFoundError):  # where no folder for temporary files can be written
        if folder := safe_folder(Path(tempfile.gettempdir()) / f"askew-{os.getuid()}"):
            yield folder


def safe_folder(folder: Path) -> Path | None:
    """The folder, made if need be, with links on the way to it resolved; None where another user could write to it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if stat.S_ISLNK(folder.lstat().st_mode):
            return None
        folder = folder.resolve(strict=True)
        if not is_private(folder.lstat(), stat.S_IFDIR):
            return None
        return folder if all(is_trusted(parent.lstat()) for parent in folder.parents) else None
    except OSError:
        return None


def is_private(found: os.stat_result, kind: int) -> bool:
    """Is this a file (or folder) of the user's own that no other user can write to, and no link?"""
    return stat.S_IFMT(found.st_mode) == kind and found.st_uid == os.getuid() and not found.st_mode & 0o022


def is_trusted(found: os.stat_result) -> bool:
    """Can only this user and root rename what lies in this folder? The sticky bit keeps others from that."""
    return found.st_uid in (0, os.getuid()) and not (found.st_mode & 0o002 and not found.st_mode & stat.S_ISVTX)


def stored_files(folder: Path, name: str) -> Iterator[Path]:
    """Files of this name whose content is what their name says; others of this name are removed."""
    for path in sorted(folder.glob(f"{name}-*.so")):
        try:
            if is_private(path.lstat(), stat.S_IFREG) and path.name == file_name(name, path.read_bytes()):
                yield path
            else:
                path.unlink()
        except OSError:
            continue


def file_name(name: str, content: bytes) -> str:
    return f"{name}-{hashlib.sha256(content).hexdigest()[:32]}.so"


def store(folder: Path, name: str, content: bytes) -> Path | None:
    """Write a compiled file atomically: others may compile the same at this moment. None where that cannot be."""
    path = folder / file_name(name, content)
    try:
        with write_atomically(path, mode=0o700) as beside:
            beside.write_bytes(content)
    except OSError:
        return None
    return path
