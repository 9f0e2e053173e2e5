"""What askew finds on this machine: libraries, devices, compiler and kernels, the engine it would choose, and folders.

Nothing that is missing or damaged ends the examination: torch is imported inside, and what fails becomes a finding.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from ..core.memory import free_memory, gigabytes
from ..core.text import count_text
from ..version import __version__
from .cores import own_cores

OK, MISSING, BROKEN = "ok", "missing", "broken"  # missing: not needed for simulations
PURPOSES = {  # of the optional libraries, by the extra that installs them
    "flower": "deployments over Flower",
    "hub": "datasets of Hugging Face",
    "images": "images in files",
    "privacy": "ε with secret sampling",
}
REQUIREMENT = re.compile(r"([\w.-]+)(?:\[.*?\])?([^;]*)(?:;.*extra == ['\"](\w+)['\"])?")


class MachineFinding(NamedTuple):
    """One thing that was looked at: what was found, whether it is as it should be, and what to do if not."""

    topic: str
    name: str
    found: str
    state: str = OK
    advice: str = ""


def examine(runs: Path) -> list[MachineFinding]:
    """Everything that was found; `runs` is the folder for run folders."""
    parts: tuple[tuple[str, Callable[[], Iterator[MachineFinding]]], ...] = (
        ("libraries", find_libraries),
        ("devices", find_devices),
        ("kernels", find_compiler),
        ("engine", find_engine),
        ("folders", lambda: find_folders(runs)),
    )
    findings: list[MachineFinding] = []
    for topic, look in parts:
        try:
            findings += look()
        except Exception as e:  # of whatever kind: to say so is what this is for
            sentence = f"{type(e).__name__}: {e}".rstrip(".")
            advice = "correct what the message names; if torch cannot be loaded, install it anew"
            findings.append(MachineFinding(topic, topic, sentence, BROKEN, advice))
    return findings


# libraries ------------------------------------------------------------------------------------------------------------


def find_libraries() -> Iterator[MachineFinding]:
    """Python, askew, and what askew needs or can use, with their versions."""
    recent = sys.version_info >= (3, 11)
    yield MachineFinding("libraries", "askew", f"{__version__}, in {Path(__file__).parents[1]}")
    python = f"{platform.python_version()}, {sys.executable}"
    yield MachineFinding(
        "libraries", "python", python, OK if recent else BROKEN, "" if recent else "install Python 3.11"
    )
    try:
        lines = requires("askew") or []
    except PackageNotFoundError:
        advice = "pip install askew, or pip install -e . in its folder"
        yield MachineFinding(
            "libraries", "needed versions", "unknown: askew is not installed as a package", MISSING, advice
        )
        return
    for line in lines:
        if (parts := REQUIREMENT.match(line)) and (parts[3] is None or parts[3] in PURPOSES):
            yield find_library(parts[1], parts[2].strip(), parts[3])


def find_library(name: str, wanted: str, extra: str | None) -> MachineFinding:
    """One library: needed, or optional where it belongs to an extra."""
    purpose = f" (for {PURPOSES[extra]})" if extra else ""
    advice = f"pip install 'askew[{extra}]'" if extra else f"pip install '{name}{wanted}'"
    try:
        found = version(name)
    except PackageNotFoundError:
        return MachineFinding("libraries", name, f"not installed{purpose}", MISSING if extra else BROKEN, advice)
    if fits(found, wanted):
        return MachineFinding("libraries", name, found + purpose)
    return MachineFinding(
        "libraries", name, f"{found}, {wanted} is needed{purpose}", MISSING if extra else BROKEN, advice
    )


def fits(found: str, wanted: str) -> bool:
    """Is a version within bounds such as ">=1.41,<1.42"? Only these two signs are looked at."""
    have = numbers(found)
    bounds = re.findall(r"(>=|<)\s*([\d.]+)", wanted)
    return all(have >= numbers(bound) if sign == ">=" else have < numbers(bound) for sign, bound in bounds)


def numbers(text: str) -> tuple[int, ...]:
    """The numbers at the start of a version, without zeros at the end."""
    found = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, re.sub(r"(\.0)+$", "", found[0]).split("."))) if found else ()


# the machine ----------------------------------------------------------------------------------------------------------


def find_devices() -> Iterator[MachineFinding]:
    """Processors and GPUs."""
    import torch

    free = free_memory()
    memory = f", {gigabytes(free)} of memory free" if free < float("inf") else ""
    yield MachineFinding("devices", "cpu", f"{own_cores()} cores{memory}")
    for number in range(torch.cuda.device_count()) if torch.cuda.is_available() else ():
        about = torch.cuda.get_device_properties(number)
        yield MachineFinding("devices", f"cuda:{number}", f"{about.name}, {gigabytes(about.total_memory)}")
    if not torch.cuda.is_available():
        seen = shutil.which("nvidia-smi") is not None
        built = f"torch {torch.__version__} " + ("is built without CUDA" if torch.version.cuda is None else "sees none")
        advice = "install a torch that is built for this machine's CUDA driver (pytorch.org)" if seen else ""
        yield MachineFinding("devices", "cuda", f"none: {built}", MISSING if seen else OK, advice)


def find_compiler() -> Iterator[MachineFinding]:
    """The C compiler, whether kernels compile with it, and where they are kept."""
    import torch

    from ..kernels.cpu.compiler import cache_folders, compiler, library, why_not
    from ..kernels.cpu.dense import SOURCE

    if os.environ.get("ASKEW_NATIVE") == "0":
        yield MachineFinding("kernels", "compiler", "not used: ASKEW_NATIVE=0")
    elif command := compiler():
        yield MachineFinding("kernels", "compiler", compiler_version(command))
        works = library(SOURCE, torch.float32) is not None
        found = "kernels in C compile" if works else f"kernels in C do not compile: {why_not(SOURCE)}"
        advice = "" if works else "install gcc 12 or later, or clang, or name one in CC"
        yield MachineFinding("kernels", "C", found, OK if works else MISSING, advice)
    else:
        advice = "install gcc or clang, or name one in CC: small networks then train several times faster on a CPU"
        yield MachineFinding("kernels", "compiler", "none", MISSING, advice)
    place = next(cache_folders(), None)
    advice = "let XDG_CACHE_HOME name a folder that is yours and that nobody else can write to"
    yield MachineFinding(
        "kernels", "cache", str(place or "no safe folder"), OK if place else MISSING, "" if place else advice
    )


def compiler_version(command: tuple[str, ...]) -> str:
    """The first line that a compiler says of itself, or else its command."""
    try:
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return " ".join(command)
    return next(iter(done.stdout.splitlines()), " ".join(command))


def find_engine() -> Iterator[MachineFinding]:
    """The engine and the kernels of the default configuration, of which one round is trained."""
    from .build import build
    from .config import Config
    from .process_state import torch_state

    config = Config()
    with torch_state(config):
        built = build(config)
        record = built.server.run_round(1, built.fed.eligible.tolist()[:6])
    yield MachineFinding("engine", "default configuration", f"{built.facts['engine']}: {built.facts['reason']}")
    yield MachineFinding("engine", "device", str(built.facts["device"]))
    yield MachineFinding("engine", "kernels", built.kernels.summary())
    whole = len(record["participants"]) == 6 and not record.get("dropped")
    trained = "one round of six clients was trained" if whole else "the model of a first round is not finite"
    yield MachineFinding("engine", "trial", trained, OK if whole else BROKEN, "" if whole else "install torch anew")


# folders --------------------------------------------------------------------------------------------------------------


def find_folders(runs: Path) -> Iterator[MachineFinding]:
    """Where datasets and runs are."""
    from ..data import files
    from .store import find_run_folders

    there = [name for name in files.table if files.find(name)]
    absent = [name for name in files.table if name not in there]
    yield find_folder("data", files.folder(), f"{', '.join(there) or 'no dataset'} there", "ASKEW_DATA or --data-dir")
    if absent:
        advice = f"askew data get {absent[0]}, and so on; digits and synthetic data need no files"
        yield MachineFinding("folders", "datasets", f"not there: {', '.join(absent)}", MISSING, advice)
    count = sum(1 for _ in find_run_folders(runs))
    yield find_folder("runs", runs.absolute(), count_text(count, "run"), "--out")


def find_folder(name: str, path: Path, content: str, setting: str) -> MachineFinding:
    """One folder: what is in it, whether it can be written, and how much space is left."""
    at = next(folder for folder in (path, *path.parents) if folder.exists())
    if not can_write(at):
        advice = f"make it a folder that you may write to, or name another one by {setting}"
        return MachineFinding("folders", name, f"{path}: cannot be written", BROKEN, advice)
    made = content if at == path else "is made when it is needed"
    return MachineFinding("folders", name, f"{path}: {made}, {gigabytes(shutil.disk_usage(at).free)} free")


def can_write(folder: Path) -> bool:
    """Can a folder be made in it? That is tried, as permissions say nothing of /proc or of a read-only disk."""
    try:
        with TemporaryDirectory(prefix=".askew-doctor-", dir=folder):
            return True
    except OSError:
        return False
