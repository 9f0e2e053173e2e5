"""What a run sets in its process for its time: torch's threads and precision, signal handlers, wording of errors."""

from __future__ import annotations

import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

import torch

from ..core.files import printable
from ..engine.distributed import SINGLE, ProcessGroup
from ..errors import EngineError, StoreWarning
from .config import Config


@contextmanager
def torch_state(config: Config, group: ProcessGroup = SINGLE) -> Iterator[None]:
    """Set torch's threads, precision and random state for a run, and put them back afterwards.

    One thread on the CPU: small batches gain nothing from more, and on a busy machine more are slower. Full float32
    on CUDA, unless the configuration says tf32.
    """
    before, tf32 = torch.get_num_threads(), (torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32)
    cuda = list(range(torch.cuda.device_count())) if config.engine.device != "cpu" and torch.cuda.is_available() else []
    if cuda and group.size > 1:
        cuda = [torch.cuda.current_device()]  # the others are other ranks'
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = config.engine.dtype == "tf32"
    try:
        with torch.random.fork_rng(devices=cuda):
            yield
    finally:
        torch.set_num_threads(before)
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = tf32


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


def show_plain_warnings(show: Callable[[str], object]) -> None:
    """Show warnings about what is stored as one sentence each, every time; all others as Python does."""
    show_other = warnings.showwarning

    def show_warning(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if issubclass(category, StoreWarning):
            show(f"warning: {printable(str(message))}")
        else:
            show_other(message, category, filename, lineno, file, line)

    warnings.simplefilter("always", StoreWarning)
    warnings.showwarning = show_warning


@contextmanager
def stop_requests(patient: bool = False) -> Iterator[Callable[[], bool]]:
    """Catch Ctrl-C and SIGTERM, and give a function that says whether one came.

    So the round can end and what is stored is whole; a second signal stops at once. A `patient` process, which
    another one started, gets the same Ctrl-C more than once and is ended by its parent if need be: there further
    signals do nothing.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return

    def receive(number: int, frame: object) -> None:
        if received and not patient:
            raise KeyboardInterrupt
        received.append(number)

    before = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
