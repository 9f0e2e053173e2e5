"""What a run sets in its process for its time: torch's threads, precision and determinism, signal handlers, wording of
errors; and how long a command may train.
"""

from __future__ import annotations

import math
import os
import re
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ..engine.process_group import SINGLE, ProcessGroup
from ..engine.settings import EngineSettings
from ..errors import EngineError
from .config import Config

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # the environment variable that cuBLAS reads once, when it starts
WORKSPACES = (":4096:8", ":16:8")  # its values that make cuBLAS deterministic; the first is set where there is none

# Held while random numbers of torch's global generator are seeded and drawn, and for the time of a run: threads share
# the generator, and two runs at a time would draw each other's numbers.
torch_lock = threading.RLock()
_deadline = math.inf  # of time.monotonic(): when all runs of this process stop


@contextmanager
def torch_state(config: Config, group: ProcessGroup = SINGLE) -> Iterator[None]:
    """Set torch's threads, precision, modes and random state for a run, and put them back afterwards.

    One thread on the CPU: small batches gain nothing from more, and on a busy machine more are slower. Full float32
    on CUDA, unless the configuration says tf32. What a program around the run has set for itself (a default dtype or
    device, autocast, no gradients) does not reach it: its numbers follow from its configuration.
    """
    before, tf32 = torch.get_num_threads(), (torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32)
    cuda = list(range(torch.cuda.device_count())) if config.engine.device != "cpu" and torch.cuda.is_available() else []
    if cuda and group.size > 1:
        cuda = [torch.cuda.current_device()]  # the others are other ranks'
    onednn = torch._C._get_mkldnn_enabled()  # which torch itself may switch off in a run with bfloat16
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = config.engine.dtype == "tf32"
    try:
        with plain_modes(), torch.random.fork_rng(devices=cuda), warnings.catch_warnings():
            # a page of addresses, where a CPU lacks bfloat16: torch then takes another product
            warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
            yield
    finally:
        torch.set_num_threads(before)
        torch._C._set_mkldnn_enabled(onednn)
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = tf32


@contextmanager
def plain_modes() -> Iterator[None]:
    """Torch's modes as in a new process: float32 on the CPU by default, no autocast, gradients on."""
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    with ExitStack() as stack:
        stack.callback(torch.set_default_dtype, dtype)
        torch.set_default_dtype(torch.float32)
        if device.type != "cpu":
            stack.callback(torch.set_default_device, device)
            torch.set_default_device(None)
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        if torch.get_default_device().type != "cpu":  # set by a `with`, which nobody else can end
            raise EngineError(
                f"engine: this run is inside `with torch.device({str(device)!r})`, which decides where its tensors "
                "lie; leave the block first, and set engine.device instead."
            )
        yield


def prepare_deterministic() -> None:
    """Set what deterministic runs need in the environment of this process and its workers, before CUDA starts."""
    value = os.environ.get(WORKSPACE)
    if value is None and not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        os.environ[WORKSPACE] = value = WORKSPACES[0]
    if torch.cuda.is_available() and value not in WORKSPACES:
        raise EngineError(
            f"engine: deterministic = true needs the environment variable {WORKSPACE}={WORKSPACES[0]} from the start "
            f"of the process, and it is {value or 'not set'}; set it, or run this configuration by a command of its "
            "own."
        )


@contextmanager
def deterministic_algorithms(settings: EngineSettings) -> Iterator[None]:
    """Allow torch only functions that give the same bits again, where the settings say so; afterwards as before."""
    if not settings.deterministic:
        yield
        return
    cudnn: Any = torch.backends.cudnn
    extra: Any = torch.utils.deterministic
    enabled, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    before = cudnn.deterministic, cudnn.benchmark, extra.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    cudnn.deterministic, cudnn.benchmark = True, False
    extra.fill_uninitialized_memory = False  # nothing is read before it is written, and filling takes time
    try:
        yield
    except RuntimeError as e:
        if "deterministic" not in str(e):
            raise
        name = re.match(r"\w+", str(e))
        raise EngineError(
            f"engine: deterministic = true, and torch has no deterministic {name[0] if name else 'function'} on this "
            "device; use another network or engine.name, or leave deterministic out."
        ) from None
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warns)
        cudnn.deterministic, cudnn.benchmark, extra.fill_uninitialized_memory = before


@contextmanager
def explain_out_of_memory() -> Iterator[None]:
    """Turn a failed allocation of memory into an EngineError that says what to do."""
    try:
        yield
    except (MemoryError, RuntimeError) as e:
        if not isinstance(e, (MemoryError, torch.OutOfMemoryError)) and "allocate memory" not in str(e):
            raise
        raise EngineError(
            "there is not enough memory for this run; take a smaller network, smaller batches or fewer participants, "
            "or another device."
        ) from None


@contextmanager
def stop_requests(patient: bool = False) -> Iterator[Callable[[], bool]]:
    """Catch Ctrl-C and SIGTERM, and give a function that says whether one came, or the time of `stop_after` is over.

    So the round can end and what is stored is whole; a second signal stops at once. A `patient` process, which
    another one started, gets the same Ctrl-C more than once and is ended by its parent if need be: there further
    signals do nothing.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: time.monotonic() >= _deadline
        return

    def receive(number: int, frame: object) -> None:
        if received and not patient:
            raise KeyboardInterrupt
        received.append(number)

    before = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(received) or time.monotonic() >= _deadline
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def stop_after(seconds: float | None) -> Iterator[None]:
    """Stop the runs of this process, as by Ctrl-C, after the round in which so many seconds are over; None: never."""
    global _deadline
    before, _deadline = _deadline, math.inf if seconds is None else time.monotonic() + seconds
    try:
        yield
    finally:
        _deadline = before
