"""CUDA files as functions of the CPU: compiled as C++ with emulate.h."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

EMULATOR = Path(__file__).with_name("emulate.h")


def compiled(source: Path, constants: Mapping[str, int], launchers: str, folder: Path) -> ctypes.CDLL:
    """The functions that `launchers` adds to a CUDA file. Products and sums are rounded one by one."""
    defined = "".join(f"#define {name} {value}\n" for name, value in constants.items())
    (folder / "kernels.cpp").write_text(f'{defined}#include "{EMULATOR}"\n{source.read_text()}{launchers}')
    options = ["-O1", "-std=c++17", "-w", "-ffp-contract=off", "-shared", "-fPIC"]
    subprocess.run(["g++", *options, "-o", "kernels.so", "kernels.cpp"], cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "kernels.so"))


def address(t: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if t is None else t.data_ptr())
