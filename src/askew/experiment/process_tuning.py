"""What makes training faster and changes the whole process: the allocator, and how many queues CUDA has.

The command line and the worker processes that askew starts do this. As a library askew changes nothing of the program
that imports it, unless that program calls `askew.tune_process`.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ..core.signals import defer_signals

# Environment variables, with the values that are set where the user set none.
# CUDA reads this one when it starts: with its default of 8 queues, clients trained side by side wait for each other.
ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}

M_TRIM_THRESHOLD, TRIM_BYTES = -1, 256 * 2**20  # bytes that may stay free at the top of glibc's heap
M_MMAP_THRESHOLD, MMAP_BYTES = -3, 32 * 2**20  # bytes from which on memory comes from the system; 32 MB is the most


def tune_process() -> None:
    """Set the allocator and the CUDA queues of this process so that training is faster; call it before CUDA is used.

    glibc keeps up to 256 MB that a step frees for the next step. By default it returns the top of the heap to the
    system after every step and asks for fresh pages in the next one; on a virtual machine these page faults were a
    sixth of LeNet5's time. Where the C library is not glibc, its allocator is left as it is. CUDA gets 32 queues, by
    the environment variable CUDA_DEVICE_MAX_CONNECTIONS, unless that is set already.

    The command line does this by itself. In a Python program of your own it is your choice, as it affects the whole
    process.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(M_TRIM_THRESHOLD, TRIM_BYTES)
        libc.mallopt(M_MMAP_THRESHOLD, MMAP_BYTES)
    except (OSError, AttributeError):
        pass


@contextmanager
def quick_imports() -> Iterator[None]:
    """Inside, imports are interrupted neither by signals nor by searches for garbage; the end acts on signals.

    What imports leave in memory is not searched again.

    Loading torch makes some hundred thousand objects, and Python looks through all of them several times: a quarter of
    the time in which a run starts. Where torch is loaded already, nothing is changed.
    """
    with defer_signals():
        if "torch" in sys.modules or not gc.isenabled():
            yield
            return
        gc.disable()
        try:
            yield
        finally:
            gc.freeze()
            gc.enable()
