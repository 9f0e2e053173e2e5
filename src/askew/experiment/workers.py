"""Processes on one machine that share runs: who starts them, listens to them and ends them.

The parent trains nothing. It starts the ranks and hands them the configurations as text; rank 0 tells it of every round; it
passes a wish to stop on, and ends all ranks when one is lost. A rank whose parent is gone ends itself.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch.distributed as dist
from safetensors.torch import load_file

from .. import errors
from ..data import files
from ..engine.distributed import PeerLost, rank_and_size
from ..errors import AskewError, ConfigError, EngineError
from .config import CHOICES, Config, FromPython, plugin_fault, plugin_module, read_back
from .store import Record, Run, load

if TYPE_CHECKING:
    from .run import OnRound

Told = dict[str, Any]
Say = Callable[[Told], None]

employed = False  # was this process started by another?

BEAT = 0.2  # seconds between two looks at whether somebody wants to stop
GRACE = 3.0  # seconds in which a better reason for a failure may arrive, or a rank may end by itself
BEGIN = (
    "import signal as s; [s.signal(n, s.SIG_IGN) for n in (s.SIGINT, s.SIGTERM)]; "
    "from askew.experiment.workers import work; from {} import {} as do; work(do)"
)


# the parent -----------------------------------------------------------------------------------------------------


def hired(
    configs: Sequence[Config],
    out: str | Path | None,
    fresh: bool,
    watch: OnRound | None,
    save_every: float,
    stopping: Callable[[], bool],
) -> Generator[Run, None, None]:
    """Run configurations one after the other, each on all processes that the first one asks for."""
    for config in configs:
        check_visible(config)
    with ExitStack() as held:
        home = Path(held.enter_context(tempfile.TemporaryDirectory()) if out is None else out)
        job: Told = {"pages": [read_back(config) for config in configs], "out": str(home), "fresh": fresh}
        job["save_every"] = math.inf if out is None else save_every
        crew = held.enter_context(WorkerPool(configs[0].engine.workers, play_pages, job))
        todo, run = iter(configs), None
        for told in crew.heard(stopping):
            if "begun" in told:
                config = next(todo)
                run = Run(read_back(config), **told["begun"], folder=None if out is None else home / config.name())
                if watch:
                    watch(run, None)
            elif run and "record" in told:
                run.rounds.append(told["record"])
                if watch:
                    watch(run, told["record"])
            elif run:
                run.facts = told["ended"]
                run.model = load_file(home / str(run.facts["name"]) / "model.safetensors")
                yield run
                run = None
            else:
                yield load(home / next(todo).name())


def free_cores() -> int:
    """Cores that this process may use and nobody is using now, its own among them."""
    have = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, round(have - max(0.0, os.getloadavg()[0] - 1)))


def visible(config: Config) -> bool:
    try:
        check_visible(config)
    except ConfigError:
        return False
    return True


def check_visible(config: Config) -> None:
    """Refuse what a new process could not build from the page alone."""
    known = {plugin_module(path) for path in config.plugins}
    for name in CHOICES:
        part = getattr(config, name)
        module = type(part).__module__
        if isinstance(part, FromPython) or not (module.startswith("askew.") or module in known):
            raise ConfigError(
                f"engine.workers = {config.engine.workers}: new processes cannot see the {name} that was handed in from Python; "
                "set engine.workers = 1, or register it in a file and name that in plugins."
            )


class WorkerPool:
    """The processes that were started, by rank, and a line to each. All of them do the same job; rank 0 speaks of it."""

    def __init__(self, size: int, do: Callable[[Told, Say], None], job: Told) -> None:
        self.size, self.code = size, BEGIN.format(do.__module__, do.__name__)
        self.processes, self.lines = list[subprocess.Popen[bytes]](), dict[Connection, int]()
        self.through, self.reasons = set[int](), dict[int, Told]()
        # where the ranks find each other
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        try:
            for rank in range(size):
                self._start(rank)
            for line in self.lines:
                with suppress(OSError):  # one that is gone is noticed in `heard`
                    line.send_bytes(json.dumps(job).encode())
        except BaseException:
            self.end()
            raise

    def _start(self, rank: int) -> None:
        here, there = Pipe()
        self.lines[here] = rank
        loop = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
        told = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": self.size,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": self.store.port,
        }
        told |= {
            "TORCHELASTIC_USE_AGENT_STORE": True,
            "OMP_NUM_THREADS": 1,
            **({"GLOO_SOCKET_IFNAME": loop[0]} if loop else {}),
        }
        told |= {"THP_MEM_ALLOC_ENABLE": 1}  # large pages for a round's rows
        told |= {"ASKEW_DATA": files.folder(), "ASKEW_LINE": there.fileno()}
        told |= {"PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path)}
        heard = rank == 0 or "ASKEW_DEBUG" in os.environ  # warnings of all ranks are alike
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", self.code],
                env=os.environ | {name: str(value) for name, value in told.items()},
                pass_fds=(there.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=2 if heard else subprocess.DEVNULL,  # standard output is the parent's alone
                stderr=None if heard else subprocess.DEVNULL,
            )
        except OSError as e:
            raise EngineError(f"cannot start {self.size} processes: {e.strerror}; lower engine.workers.") from None
        self.processes.append(process)
        there.close()

    def heard(self, stopping: Callable[[], bool], beat: float = BEAT) -> Iterator[Told]:
        """What rank 0 tells, until all are through; if one fails, its sentence is raised. With beat 0, {} where nothing is told now."""
        until = math.inf
        while self.lines and len(self.through) < self.size and time.monotonic() < until:
            ready = wait([*self.lines], beat)
            for line in ready:
                assert isinstance(line, Connection)
                rank = self.lines[line]
                try:
                    told: Told = json.loads(line.recv_bytes())
                except (EOFError, OSError):
                    del self.lines[line]
                    told = {"failed": "", "says": ""}
                if "done" in told:
                    self.through.add(rank)
                elif "failed" not in told:
                    yield told
                elif rank not in self.through | self.reasons.keys():
                    self.reasons[rank] = told
                    until = min(until, time.monotonic() + GRACE)
            if stopping():
                for line in self.lines:
                    with suppress(OSError):
                        line.send_bytes(b"stop")
            if not ready and not beat:
                yield {}
        if self.reasons:
            raise self._reason()

    def _reason(self) -> Exception:
        """Why it failed: what a rank says of itself, else who died, and only then who lost the others."""
        rank, told = min(
            self.reasons.items(),
            key=lambda item: (item[1]["failed"] == PeerLost.__name__, not item[1]["says"], item[0]),
        )
        kind = getattr(errors, told["failed"], EngineError if told["failed"] == PeerLost.__name__ else RuntimeError)
        if told["says"]:
            reason: Exception = kind(told["says"])
            return reason
        return EngineError(
            f"process {rank} of the {self.size} that shared the work was ended {self.ending(rank)}; if nobody did that, memory ran out: "
            "lower engine.workers; started again, the run goes on from what is stored."
        )

    def ending(self, rank: int) -> str:
        """How a process ended."""
        with suppress(subprocess.TimeoutExpired):
            self.processes[rank].wait(GRACE)
        code = self.processes[rank].poll()
        return f"by {signal.Signals(-code).name}" if code is not None and code < 0 else f"with exit code {code}"

    def end(self) -> None:
        """Cut the lines, which ends whoever can still hear; the others are killed."""
        for line in self.lines:
            line.close()
        until = time.monotonic() + GRACE
        for process in self.processes:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


# a rank ---------------------------------------------------------------------------------------------------------


def work(do: Callable[[Told, Say], None]) -> None:
    """The life of a process that was started."""
    global employed
    employed = True
    line, leads = Connection(int(os.environ.pop("ASKEW_LINE"))), rank_and_size()[0] == 0
    job = json.loads(line.recv_bytes())
    listener = threading.Thread(target=heed, args=(line,), daemon=True)
    listener.start()

    def say(told: Told) -> None:
        line.send_bytes(json.dumps(told).encode())

    try:
        do(job, say if leads else lambda told: None)
        say({"done": True})
        listener.join()  # until the parent has heard it of all: who left earlier might be missed by the others
    except BaseException as e:
        if os.environ.get("ASKEW_DEBUG"):
            traceback.print_exc()
        fault = plugin_fault(e)
        if isinstance(e, AskewError):
            say({"failed": type(e).__name__, "says": str(e)})
        else:
            say({"failed": EngineError.__name__ if fault else "", "says": fault or f"{type(e).__name__}: {e}"})
        os._exit(1)  # nothing may wait for ranks that are gone


def play_pages(job: Told, say: Say) -> None:
    """Play the runs of a job's pages, and tell of their rounds."""
    from .run import play_all

    def watch(run: Run, record: Record | None) -> None:
        begun = {"rounds": run.rounds, "facts": run.facts, "federation": run.federation}
        say({"begun": begun} if record is None else {"record": record})

    configs = [Config.build(page) for page in job["pages"]]
    for run in play_all(configs, job["out"], fresh=job["fresh"], watch=watch, save_every=job["save_every"]):
        say({"ended": run.facts})


def heed(line: Connection) -> None:
    """Whatever the parent says means stop; without a parent there is nobody to work for."""
    with suppress(EOFError, OSError):
        while True:
            line.recv_bytes()
            os.kill(os.getpid(), signal.SIGTERM)
    os._exit(0)
