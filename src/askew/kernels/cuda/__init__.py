"""Kernels for CUDA devices: in Triton and in CUDA C."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType

import torch


@cache
def available() -> bool:
    """Can kernels be compiled here, for a device on which they were tried or one like it?"""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return torch.cuda.is_available() and torch.version.cuda is not None and torch.cuda.get_device_capability() >= (8, 0)


@cache
def triton_kernels(name: str) -> ModuleType:
    """The kernels of the file triton_NAME.py; triton is loaded where they are first needed."""
    return import_module(f".triton_{name}", __package__)
