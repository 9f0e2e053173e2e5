"""CUDA C, compiled where it runs by NVRTC, which torch brings along: at first use, for the sizes asked for."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from ..cpu.compiler import cache_folders, store, stored_files

SHARED_MEMORY = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
USUAL = 48 * 1024  # bytes of shared memory that a kernel may use without being asked


class Kernel:
    """A compiled kernel."""

    def __init__(self, function: ctypes.c_void_p) -> None:
        self.function, self.allowed = function, USUAL

    def launch(
        self, grid: tuple[int, int, int], threads: int, memory: int, arguments: Sequence[Tensor | int | float | None]
    ) -> None:
        """Start it on the current stream. Arguments are tensors' numbers, integers, doubles, and None for no tensor."""
        if 0 in grid:
            return
        if memory > self.allowed:
            check(driver().cuFuncSetAttribute(self.function, SHARED_MEMORY, memory), "shared memory")
            self.allowed = memory
        values = [as_c(a) for a in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        check(driver().cuLaunchKernel(self.function, *grid, threads, 1, 1, memory, stream, pointers, None), "launch")


def as_c(argument: Tensor | int | float | None) -> ctypes.c_int | ctypes.c_double | ctypes.c_void_p:
    if isinstance(argument, int):
        return ctypes.c_int(argument)
    if isinstance(argument, float):
        return ctypes.c_double(argument)
    return ctypes.c_void_p(None if argument is None else argument.data_ptr())


def check(result: int, what: str) -> None:
    """Raise what a driver's error means."""
    if result:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(result, ctypes.byref(text))
        raise RuntimeError(f"CUDA: {what}: {(text.value or b'').decode() or result}")


@cache
def driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@cache
def compiler() -> ctypes.CDLL | None:
    """NVRTC, as torch was built with; None where it cannot be had."""
    major = (torch.version.cuda or "0").split(".")[0]
    name = f"libnvrtc.so.{major}"
    beside_torch = Path(torch.__file__).parent.parent.glob(f"nvidia/*/lib/{name}")
    for library in (name, *map(str, beside_torch)):
        try:
            return ctypes.CDLL(library)
        except OSError:
            continue
    return None


@cache
def can_compile() -> bool:
    """Is there all that kernels in CUDA C need?"""
    if compiler() is None:
        return False
    try:
        driver()
        compiled('extern "C" __global__ void nothing() {}', (), torch.cuda.get_device_capability())
    except (OSError, RuntimeError):
        return False
    return True


@cache
def kernels(source: Path, constants: tuple[tuple[str, int], ...], names: tuple[str, ...], device: int) -> list[Kernel]:
    """The kernels of a CUDA file with these constants, on the current device, which is the one of this number."""
    module = ctypes.c_void_p()
    binary = machine_code(source, constants, torch.cuda.get_device_capability(device))
    check(driver().cuModuleLoadData(ctypes.byref(module), binary), source.name)
    found = []
    for name in names:
        function = ctypes.c_void_p()
        check(driver().cuModuleGetFunction(ctypes.byref(function), module, name.encode()), name)
        found.append(Kernel(function))
    return found


def machine_code(source: Path, constants: Sequence[tuple[str, int]], capability: tuple[int, int]) -> bytes:
    """What a CUDA file becomes: from the user's cache, or compiled and stored there."""
    code = source.read_text()
    parts = [code, repr((constants, capability)), str(torch.version.cuda)]
    name = f"{source.stem}-{hashlib.sha256(chr(10).join(parts).encode()).hexdigest()[:32]}"
    folder = next(cache_folders(), None)
    if folder is None:
        return compiled(code, constants, capability)
    for path in stored_files(folder, name):
        return path.read_bytes()
    content = compiled(code, constants, capability)
    store(folder, name, content)
    return content


def compiled(code: str, constants: Sequence[tuple[str, int]], capability: tuple[int, int]) -> bytes:
    """The machine code of a CUDA file."""
    library, program = compiler(), ctypes.c_void_p()
    assert library is not None
    words = [f"--gpu-architecture=sm_{capability[0]}{capability[1]}", *(f"-D{name}={n}" for name, n in constants)]
    options = (ctypes.c_char_p * len(words))(*(word.encode() for word in words))
    library.nvrtcCreateProgram(ctypes.byref(program), code.encode(), b"kernels.cu", 0, None, None)
    try:
        failed, size = library.nvrtcCompileProgram(program, len(words), options), ctypes.c_size_t()
        if failed:
            library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            library.nvrtcGetProgramLog(program, log)
            raise RuntimeError(f"CUDA: {log.value.decode()}")
        library.nvrtcGetCUBINSize(program, ctypes.byref(size))
        binary = ctypes.create_string_buffer(size.value)
        library.nvrtcGetCUBIN(program, binary)
        return binary.raw
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))
