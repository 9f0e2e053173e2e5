"""Kernels in C for the CPU, compiled where they run: at first use, for the sizes asked for, with all instructions of the machine.

They lie in the user's cache, by the hash of all that went into them. Where there is no C compiler, or ASKEW_NATIVE=0 says
so, there are none, and torch's own functions are used instead.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from itertools import product
from pathlib import Path

import torch

TUNED = (["-march=native"], ["-mcpu=native"])  # as compilers call it; the first that they know
FLAGS = ["-O3", "-std=gnu11", "-fPIC", "-shared", "-w"]  # no -ffast-math: a loss that is not a number must be seen
COMMON = Path(__file__).with_name("vectors.h")
PATIENCE = 60  # seconds for one compilation

complaints: dict[str, str] = {}  # of the compiler, by source: the first, which is about the better way to call it


@cache
def commands() -> list[list[str]]:
    """Ways to call the C compiler, the better one first; none where there is no compiler, or none is wanted."""
    compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
    if os.environ.get("ASKEW_NATIVE") == "0" or os.name != "posix" or not shutil.which(compiler[0]):
        return []
    return [[*compiler, *FLAGS, *tuned] for tuned in TUNED]


def _complaint(command: list[str], code: str, made: Path) -> str:
    """What the compiler has against the code; nothing if it is made."""
    try:
        done = subprocess.run(
            [*command, "-x", "c", "-", "-o", str(made), "-lm"],
            input=code,
            text=True,
            capture_output=True,
            timeout=PATIENCE,
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        return str(e)
    told = done.stderr.splitlines() or [f"{command[0]} ended with {done.returncode}"]
    return next((line for line in told if "error" in line), told[-1]) if done.returncode else ""


def why_not(source: Path) -> str:
    """Why the functions of a C file cannot be had, after they were asked for."""
    return (
        complaints.get(source.stem, "")
        if commands()
        else "no C compiler"
        if os.environ.get("ASKEW_NATIVE") != "0"
        else "as asked for"
    )


@cache
def machine() -> str:
    """What a home folder's machines may differ in."""
    try:
        told = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0]
    except OSError:
        told = platform.processor()
    return platform.machine() + "".join(
        line for line in told.splitlines() if line.startswith(("model name", "flags", "Features"))
    )


def cached() -> list[Path]:
    """Folders for what is compiled, the better one first."""
    other = Path(tempfile.gettempdir()) / f"askew-{os.getuid()}"
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # a user without a home, as in some containers
        return [other]
    return [home / "askew" / "native", other]


@cache
def library(source: Path, dtype: torch.dtype, *sizes: tuple[str, int]) -> ctypes.CDLL | None:
    """The functions of a C file with these constants, for numbers of this type; None where they cannot be had."""
    if not commands():
        return None
    complaints.pop(source.stem, None)  # of another time
    given = "".join(f"#define {name} {value}\n" for name, value in (("DOUBLE", int(dtype is torch.float64)), *sizes))
    code = given + COMMON.read_text() + source.read_text()
    for make in (False, True):  # first all places where it may be already
        for command, folder in product(commands(), cached()):
            key = hashlib.sha256("\n".join([code, *command, machine()]).encode()).hexdigest()[:32]
            try:
                if made := _found(command, code, folder, folder / f"{source.stem}-{key}.so", make):
                    return ctypes.CDLL(str(made))
            except OSError:  # nothing may be written here, or nothing loaded from here
                continue
    return None


def _found(command: list[str], code: str, folder: Path, made: Path, make: bool) -> Path | None:
    """The file, if it is there, or if it is to be made and can be."""
    if make:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.is_dir() and folder.stat().st_uid != os.getuid():  # somebody else's, in a folder for everybody
        return None
    if make:  # anew if it is there: it could not be loaded
        with tempfile.TemporaryDirectory(dir=folder) as place:  # others may compile the same at this moment
            if complaint := _complaint(command, code, new := Path(place, "made.so")):
                complaints.setdefault(made.stem.split("-")[0], complaint)
                return None
            new.replace(made)
    return made if made.is_file() else None
