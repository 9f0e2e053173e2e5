"""Signals that end a process, delayed while it does what must not be interrupted midway."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def defer_signals() -> Iterator[None]:
    """Delay signals that end this process to the end of the block, where they are acted on at once.

    A process that is just being started would be left behind, and a library that is half imported cannot be imported
    again.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    note = lambda number, frame: received.append(number)
    before = {s: signal.signal(s, note) for s in END_SIGNALS if callable(signal.getsignal(s))}
    try:
        yield
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
        for number in received[:1]:
            signal.raise_signal(number)
