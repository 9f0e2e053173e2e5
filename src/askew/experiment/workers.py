"""Worker processes on this machine: how they are started, sent a job, listened to and ended.

A `WorkerGroup` starts processes that do one job together. Each worker gets the job as JSON and calls one function
with it; rank 0 may send messages back. The parent passes a request to stop on to all workers, and ends all of them
when one is lost. A worker whose parent is gone ends itself. This module does not depend on what the job is.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self

from .. import errors
from ..core.ranks import STORE, rank_and_size
from ..data import files
from ..engine.process_group import PeerLost
from ..errors import AskewError, EngineError
from .plain_warnings import show_plain_warnings
from .plugins import plugin_fault
from .process_tuning import quick_imports, tune_process
from .worker_process import CONNECTION, WorkerProcess, start_process, take_early

Message = dict[str, Any]  # a JSON object
Send = Callable[[Message], None]
WorkerFunction = Callable[[Message, Send], None]  # of the job, and of the function that sends messages to the parent

POLL_SECONDS = 0.2  # seconds between two looks at whether somebody wants to stop
GRACE_SECONDS = 3.0  # seconds in which a better reason for a failure may arrive, or a worker may end by itself
STOP = b"stop"  # what a parent sends so that its workers stop after their round

_is_worker = False
_orders = SimpleQueue[bytes]()  # what else the parent sent after the job, in JSON


def is_worker() -> bool:
    """Was this process started by a WorkerGroup?"""
    return _is_worker


def meeting_folder() -> tempfile.TemporaryDirectory[str]:
    """A new folder that only this user may open, for temporary files or else in memory."""
    for folder in (None, "/dev/shm"):
        with suppress(OSError):
            return tempfile.TemporaryDirectory(prefix="askew-", dir=folder)
    raise EngineError(
        "there is no folder for temporary files in which worker processes could meet; set TMPDIR to a folder that can "
        "be written, or engine.workers = 1."
    )


def can_meet() -> bool:
    """Is there a folder in which worker processes find each other?"""
    try:
        meeting_folder().cleanup()
    except EngineError:
        return False
    return True


# the parent -----------------------------------------------------------------------------------------------------


class WorkerGroup:
    """Worker processes that do one job together, and a pipe to each; `workers` is in the order of ranks."""

    def __init__(self, size: int, function: WorkerFunction, job: Message) -> None:
        self.size = size
        self.workers: list[WorkerProcess] = []
        self.connections: dict[Connection, int] = {}  # to the workers that still run, with their ranks
        self.finished: set[int] = set()  # ranks
        self.failures: dict[int, Message] = {}  # by rank: {"error": name of an exception, "sentence": its text}
        # where the ranks find each other: a file that nobody else may open, so that no port is open for it
        self.folder = meeting_folder()
        try:
            for rank in range(size):
                self._start(rank)
            for rank, worker in enumerate(self.workers):
                with suppress(OSError):  # a worker that is gone is noticed in `messages`
                    worker.send_job(function, job, self._environment(rank))
        except BaseException:
            self.end()
            raise

    def _start(self, rank: int) -> None:
        """Start one worker, or take one that was started early."""
        silent = rank > 0 and "ASKEW_DEBUG" not in os.environ  # warnings of all ranks are alike
        try:
            worker = (None if silent else take_early()) or start_process(silent)
        except OSError as e:
            raise EngineError(f"cannot start {self.size} processes: {e.strerror}; lower engine.workers.") from None
        self.workers.append(worker)
        self.connections[worker.connection] = rank

    def _environment(self, rank: int) -> dict[str, str]:
        """The environment variables that give a worker its rank, and say where data and the other ranks are."""
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.size, "ASKEW_DATA": files.folder()}
        return {name: str(value) for name, value in variables.items()} | {STORE: str(Path(self.folder.name) / "store")}

    def messages(self, stopping: Callable[[], bool], poll_seconds: float = POLL_SECONDS) -> Iterator[Message]:
        """Yield what rank 0 sends until all workers are done; if one fails, raise its error.

        With poll_seconds = 0 an empty message is yielded whenever no other is there.
        """
        end = math.inf
        while self.connections and len(self.finished) < self.size and time.monotonic() < end:
            ready = wait([*self.connections], poll_seconds)
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = self.connections[connection]
                message = self._receive(connection)
                if "done" in message:
                    self.finished.add(rank)
                elif "error" not in message:
                    yield message
                elif rank not in self.finished | self.failures.keys():
                    self.failures[rank] = message
                    end = min(end, time.monotonic() + GRACE_SECONDS)
            if stopping():
                self.send_stop()
            if not ready and not poll_seconds:
                yield {}
        if self.failures:
            raise self._failure()

    def _receive(self, connection: Connection) -> Message:
        """The next message of a worker; where its pipe is closed, a failure without a sentence."""
        try:
            message: Message = json.loads(connection.recv_bytes())
        except (EOFError, OSError):
            del self.connections[connection]
            return {"error": "", "sentence": ""}
        return message

    def send_stop(self) -> None:
        """Ask all workers to stop after their round."""
        for connection in self.connections:
            with suppress(OSError):
                connection.send_bytes(STOP)

    def send(self, rank: int, order: Any) -> None:
        """Send a worker more to do, which it gets by `next_order`."""
        for connection in [c for c, its in self.connections.items() if its == rank]:
            with suppress(OSError):  # a worker that is gone is noticed in `messages`
                connection.send_bytes(json.dumps(order).encode())

    def _failure(self) -> Exception:
        """The error to raise: what a worker says of itself, else which one died, and only then who lost the others."""
        lost = PeerLost.__name__
        rank, failure = min(
            self.failures.items(),
            key=lambda item: (item[1]["error"] == lost, not item[1]["sentence"], item[0]),
        )
        if failure["sentence"]:
            return failure_error(failure)
        return EngineError(
            f"process {rank} of the {self.size} that shared the work was ended {self.exit_reason(rank)}; "
            "if nobody did that, memory ran out: lower engine.workers; "
            "started again, the run goes on from its last checkpoint, if it has one."
        )

    def exit_reason(self, rank: int) -> str:
        """How a worker ended, as "by SIGKILL" or "with exit code 1"."""
        with suppress(subprocess.TimeoutExpired):
            self.workers[rank].process.wait(GRACE_SECONDS)
        code = self.workers[rank].process.poll()
        return f"by {signal.Signals(-code).name}" if code is not None and code < 0 else f"with exit code {code}"

    def end(self) -> None:
        """Close the pipes, which ends all workers that still listen; kill the others."""
        for connection in self.connections:
            connection.close()
        end = time.monotonic() + GRACE_SECONDS
        for process, _ in self.workers:
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


# a worker -------------------------------------------------------------------------------------------------------


def run_worker() -> None:
    """Call a function with the job that the parent sends, then wait for the parent: all that a worker does."""
    global _is_worker
    _is_worker = True
    connection = Connection(int(os.environ.pop(CONNECTION)))
    try:
        start = json.loads(connection.recv_bytes())
    except (EOFError, OSError):  # there is no job, or the parent is gone
        os._exit(0)
    os.environ |= start["environment"]
    tune_process()
    show_plain_warnings(lambda sentence: print(sentence, file=sys.stderr))
    leads = rank_and_size()[0] == 0
    listener = threading.Thread(target=obey_parent, args=(connection,), daemon=True)
    listener.start()

    def send(message: Message) -> None:
        connection.send_bytes(json.dumps(message).encode())

    try:
        job_function(start["function"])(start["job"], send if leads else lambda message: None)
        send({"done": True})
        listener.join()  # until all are done, which the parent decides: the others might still need this one
    except BaseException as e:
        if os.environ.get("ASKEW_DEBUG"):
            traceback.print_exc()
        send(failure_message(e))
        os._exit(1)  # nothing may wait for ranks that are gone


def job_function(name: str) -> WorkerFunction:
    """The function MODULE:NAME."""
    module, _, function = name.partition(":")
    with quick_imports():
        found: WorkerFunction = getattr(import_module(module), function)
    return found


def failure_message(e: BaseException) -> Message:
    """The message by which the parent gets an exception."""
    if isinstance(e, AskewError):
        return {"error": type(e).__name__, "sentence": str(e)}
    if fault := plugin_fault(e):
        return {"error": EngineError.__name__, "sentence": fault}
    return {"error": "", "sentence": f"{type(e).__name__}: {e}"}


def failure_error(failure: Message) -> Exception:
    """The exception in a worker's message."""
    usual = EngineError if failure["error"] == PeerLost.__name__ else RuntimeError
    error: Exception = getattr(errors, failure["error"], usual)(failure["sentence"])
    return error


def obey_parent(connection: Connection) -> None:
    """Stop after the round when the parent says so, keep its orders, and end at once when the parent is gone."""
    with suppress(EOFError, OSError):
        while True:
            received = connection.recv_bytes()
            if received == STOP:
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                _orders.put(received)
    os._exit(0)


def next_order() -> Any:
    """The next thing that the parent sends; waits for it."""
    return json.loads(_orders.get())
