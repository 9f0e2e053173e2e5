"""A whole federation on this machine, for trying and testing: a SuperLink, a SuperNode for each client, and runs on them."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import randbelow
from types import TracebackType
from typing import Self
from uuid import uuid4

from ..errors import EngineError
from ..experiment.run import OnRound
from ..experiment.run_folder import is_finished
from ..experiment.store import Run, load, read_rounds, write_text
from ..experiment.toml import literal
from . import require_flower
from .keys import Keys

HOST, NAME, MARK = "127.0.0.1", "loopback", "ASKEW_FEDERATION"
PATIENCE = 60.0  # seconds until a process listens
GRACE = 5.0  # seconds in which a process may end by itself
POLL = 0.2  # seconds between looks at a run
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
NOISE = re.compile(  # lines of a log that say nothing about a failure
    r"(?!ERROR)[A-Z]+ ?:|ERROR ?: Exit Code|\d{4}-\d\d-|For more information|An unhandled exception|The SuperNode could not|Error$"
)

Say = Callable[[str], None]


def free_port() -> int:
    """A port that nobody has, below those that systems give to connections: one of these could take it in the meantime."""
    while True:
        with socket.socket() as s, suppress(OSError):
            s.bind((HOST, 20_000 + randbelow(12_000)))
            return int(s.getsockname()[1])


class Loopback:
    """Processes that are ended together, whatever happens in between. Their logs and Flower's own files are in `folder`.

    With keys every connection is encrypted, and only nodes whose keys are registered are let in.
    """

    def __init__(
        self,
        folder: Path,
        clients: int,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        keys: Keys | None = None,
    ) -> None:
        require_flower()
        self.folder, self.clients, self.cwd, self.port = folder.resolve(), clients, cwd, free_port()
        self.keys = keys and keys._replace(folder=keys.folder.resolve())
        self.known: set[int] = set()  # clients whose keys are registered
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        bin = str(Path(sys.executable).parent)
        self.env = {
            **os.environ,
            "FLWR_HOME": str(self.folder / "flwr"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5",
            "PATH": bin + os.pathsep + os.environ.get("PATH", ""),
            **(env or {}),
            MARK: uuid4().hex,
        }

    def __enter__(self) -> Self:
        trust = f"root-certificates = {literal(str(self.keys.ca))}" if self.keys else "insecure = true"
        write_text(
            self.folder / "flwr" / "config.toml",
            f'[superlink]\ndefault = "{NAME}"\n\n[superlink.{NAME}]\naddress = "{HOST}:{self.port}"\n{trust}\n',
        )
        how = [*self.keys.server(), "--enable-supernode-auth"] if self.keys else ["--insecure"]
        try:
            link = ["--disable-runtime-dependency-installation", "--host", HOST, "--port", str(self.port)]
            self.start("superlink", "flower-superlink", *how, *link)
            self.listens("superlink", self.port)
            for client in range(self.clients):
                self.node(client)
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def node(self, client: int, port: int | None = None) -> None:
        """Start the SuperNode of a client, or start it again; `port` is where it looks for the SuperLink, if elsewhere."""
        name, own = f"node-{client}", free_port()
        state = str(self.folder / "state").replace("\\", "/")
        config = f'partition-id={client} num-partitions={self.clients} state="{state}"'
        where = ["--superlink", f"{HOST}:{port or self.port}", "--host", HOST, "--port", str(own)]
        if self.keys and client not in self.known:
            self.register(client, self.keys)
        how = self.keys.node(client) if self.keys else ["--insecure"]
        self.start(name, "flower-supernode", *how, *where, "--node-config", config)

    def register(self, client: int, keys: Keys) -> None:
        """Let the SuperLink know a client's key."""
        name = f"register-{client}"
        with suppress(subprocess.TimeoutExpired):
            if self.start(name, "flwr", "supernode", "register", str(keys.public(client)), NAME).wait(PATIENCE) == 0:
                self.stop(name)
                self.known.add(client)
                return
        raise EngineError(f"the key of client {client} could not be registered; {self.told(name)}")

    def run(self, app: Path) -> subprocess.Popen[bytes]:
        """Start a run of an app folder; the process ends with the run, its log is what the server says."""
        return self.start("run", "flwr", "run", str(app.resolve()), NAME, "--stream")

    def start(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        """A process in a group of its own, so that it is ended with all it started."""
        self.stop(name)
        with open(self.folder / f"{name}.log", "ab") as log, deferred():
            self.running[name] = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=self.env,
                cwd=self.cwd,
                start_new_session=True,
            )
        return self.running[name]

    def listens(self, name: str, port: int) -> None:
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end and self.running[name].poll() is None:
            with suppress(OSError), socket.create_connection((HOST, port), timeout=1):
                return
            time.sleep(0.1)
        raise EngineError(f"Flower's {name} did not start; {self.told(name)}")

    def play(self, app: Path, folder: Path, watch: OnRound | None = None, say: Say | None = None) -> Run:
        """Run an app to its end; its rounds are read from the run's folder as they are written. What the server warns of is said."""
        log, begun, run, now, ended = self.folder / "run.log", changed(folder / "run.json"), None, 0, set[str]()
        read = log.stat().st_size if log.exists() else 0
        process = self.run(app)
        while True:
            over = process.poll() is not None
            with open(log, "rb") as file:
                file.seek(read)
                lines = file.read()
            lines = lines if over else lines[: lines.rfind(b"\n") + 1]
            read += len(lines)
            for line in plain(lines):
                if say and line.startswith("WARNING"):
                    say(line.removeprefix("WARNING").lstrip(" :"))
            if run is None and changed(folder / "run.json") != begun:
                run = load(folder)
                if watch:
                    watch(run, None)
            if run is not None and now != (now := changed(folder / "rounds.jsonl")):
                for record in read_rounds(folder / "rounds.jsonl")[len(run.rounds) :]:
                    run.rounds.append(record)
                    if watch:
                        watch(run, record)
            if over:
                break
            for name in [
                name
                for name, each in self.running.items()
                if each is not process and each.poll() is not None and name not in ended
            ]:
                if name == "superlink" or run is None:
                    raise EngineError(f"Flower's {name} ended; {self.told(name)}")
                ended.add(name)
                if say:
                    say(f"Flower's {name} ended, and the run goes on without it; {self.told(name)}")
            time.sleep(POLL)
        if not is_finished(folder):
            raise EngineError(f"the run failed; {self.told('run')}")
        return load(folder)

    def told(self, name: str) -> str:
        """The end of a sentence about a process that failed: the last thing worth reading in its log, and where that is."""
        path = self.folder / f"{name}.log"
        lines = [line for line in plain(path.read_bytes()) if not NOISE.match(line)]
        last = (
            re.sub(r"^(ERROR\s*:\s*|askew\.errors\.\w+: )", "", lines[-1]).rstrip(".") if lines else "it said nothing"
        )
        return f"{last}; its log is {path}."

    def stop(self, name: str, kill: bool = False) -> None:
        """End a process and all that it started, at once if `kill`."""
        process = self.running.pop(name, None)
        if process is None:
            return
        for number in (signal.SIGKILL,) if kill else (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)

    def end(self) -> None:
        """End everything: runs and nodes, then the link."""
        for name, process in self.running.items():
            if name != "superlink":
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)  # so that they end side by side
        for name in reversed(list(self.running)):
            self.stop(name)
        for number in (signal.SIGTERM, signal.SIGKILL):
            for stray in self.strays():
                with suppress(ProcessLookupError):
                    os.kill(stray, number)
            end = time.monotonic() + GRACE
            while self.strays() and time.monotonic() < end:
                time.sleep(0.1)

    def strays(self) -> list[int]:
        """Processes that ours have left behind: a SuperLink's are in no group of its own, and stay for a while where it is killed."""
        mark, found = f"{MARK}={self.env[MARK]}".encode(), list[int]()
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if mark in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
        return found


@contextmanager
def deferred() -> Iterator[None]:
    """Signals that end this process wait: a process that is being started would not be known yet, and left behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {
        s: signal.signal(s, lambda number, frame: came.append(number)) for s in ENDING if callable(signal.getsignal(s))
    }
    try:
        yield
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
    for number in came[:1]:
        signal.raise_signal(number)


def plain(log: bytes) -> list[str]:
    """The lines of a log without colours and frames."""
    lines = re.sub(r"\x1b\[[0-9;]*m|[─│╭╮╰╯]", "", log.decode(errors="replace")).splitlines()
    return [" ".join(line.split()) for line in lines if line.strip()]


def changed(path: Path) -> int:
    """A number that is another one when the file is."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0
