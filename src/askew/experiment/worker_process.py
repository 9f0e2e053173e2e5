"""A worker process as its parent starts it, and those that are started before there is a job for them.

A process takes seconds to load torch. A command that will need workers starts them before it loads torch itself, so
that all load it at the same time. This module does without torch.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, NamedTuple

from ..core.signals import defer_signals
from ..errors import EngineError
from .process_tuning import ENVIRONMENT

CONNECTION = "ASKEW_CONNECTION"  # the environment variable with the number of the worker's end of its pipe
# Signals are ignored until the worker listens to its parent: Ctrl-C reaches all processes of a terminal.
WORKER_CODE = """
import signal as s
[s.signal(n, s.SIG_IGN) for n in (s.SIGINT, s.SIGTERM)]
from askew.experiment.process_tuning import quick_imports
with quick_imports():
    from askew.experiment import launch
    from askew.experiment.workers import run_worker
run_worker()
"""

# environment variables that a worker gets when it is started, and keeps
PATHS = "PYTHONPATH"
FIXED = {"OMP_NUM_THREADS": "1", "THP_MEM_ALLOC_ENABLE": "1"}  # one thread; large pages for a round's rows
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # their connections cannot be reached from other machines

early: list[WorkerProcess] = []  # those that nobody has taken yet


class WorkerProcess(NamedTuple):
    """A worker process, and the parent's end of the pipe to it."""

    process: subprocess.Popen[bytes]
    connection: Connection

    def send_job(self, function: Callable[..., None], job: Mapping[str, Any], variables: Mapping[str, str]) -> None:
        """Let it call a function with a job, in an environment that has changed since it was started.

        That of this process may have changed too, and these variables are the worker's alone.
        """
        kept = {PATHS, *FIXED, *INTERFACES}
        environment = {name: value for name, value in os.environ.items() if name not in kept} | {**variables}
        name = f"{function.__module__}:{function.__name__}"
        self.connection.send_bytes(json.dumps({"function": name, "job": job, "environment": environment}).encode())


def start_process(silent: bool = False) -> WorkerProcess:
    """Start a worker, which then waits for its job; a `silent` one shows no warnings."""
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    if not loopback:
        raise EngineError("this machine has no loopback interface for worker processes; set engine.workers = 1.")
    parent_end, worker_end = Pipe()
    paths = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
    variables = FIXED | dict.fromkeys(INTERFACES, loopback[0]) | {PATHS: paths}
    with worker_end:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", WORKER_CODE],
            env=ENVIRONMENT | os.environ | variables | {CONNECTION: str(worker_end.fileno())},
            pass_fds=(worker_end.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL if silent else 2,  # standard output is the parent's alone
            stderr=subprocess.DEVNULL if silent else None,
        )
    return WorkerProcess(process, parent_end)


def start_early(count: int) -> None:
    """Start workers that load torch while this process does; what is not taken ends with this process."""
    if count:
        atexit.register(end_early)
    try:
        with defer_signals():  # none is left behind
            early.extend(start_process() for _ in range(count))
    except (OSError, EngineError):  # said where one is needed
        return


def take_early() -> WorkerProcess | None:
    """One of those that were started early and are still there."""
    while early:
        worker = early.pop()
        if worker.process.poll() is None:
            return worker
    return None


def end_early() -> None:
    """End the workers that nobody has taken."""
    for process, connection in early:
        connection.close()
        process.kill()
        process.wait()
    early.clear()
