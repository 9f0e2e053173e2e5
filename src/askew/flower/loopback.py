"""A whole federation on this machine, to try and to test: a SuperLink, a SuperNode for each client, and runs."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from secrets import randbelow
from types import TracebackType
from typing import Self
from uuid import uuid4

from ..core.signals import defer_signals
from ..core.text import count_text
from ..errors import EngineError, StoreError
from ..experiment.run import OnRound
from ..experiment.run_folder import is_finished
from ..experiment.store import Run, load, read_json, read_rounds, write_json, write_text
from ..experiment.toml import literal
from . import require_flower
from .keys import KeyFiles
from .launch import KEYS_FOLDER, LIFELINE, MARKER, command_of
from .transport import WAITING, Warn

HOST = "127.0.0.1"
CONNECTION = "loopback"  # the SuperLink's name in Flower's configuration
PROCESSES = "processes.json"  # file of a federation's folder: the marker of its processes, and whether it has keys
PROGRAMS = ("flower-superlink", "flower-supernode", "flwr")  # that are started by launch.py
START_SECONDS = 60.0  # until a process listens, or a key is registered
STOP_SECONDS = 5.0  # in which a process may end by itself
POLL_SECONDS = 0.2  # between two looks at a run
PORTS = range(20_000, 32_000)  # below those that systems give to connections, of which one could take a free port
UNINFORMATIVE = re.compile(  # lines of a log that say nothing about a failure
    r"(?!ERROR)[A-Z]+ ?:|ERROR ?: Exit Code|\d{4}-\d\d-|For more information|An unhandled exception|"
    r"The SuperNode could not|Error$"
)


def free_port() -> int:
    """A port that nobody uses."""
    while True:
        with socket.socket() as s, suppress(OSError):
            s.bind((HOST, PORTS[randbelow(len(PORTS))]))
            return int(s.getsockname()[1])


class Loopback:
    """The processes of a federation, which end together, whatever happens: also if this process is killed.

    Their logs and Flower's own files are in `folder`. Ports answer this user's processes alone, where the system can
    tell. With keys every connection is encrypted, and nodes need a registered key.
    """

    def __init__(
        self,
        folder: Path,
        clients: int,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        keys: KeyFiles | None = None,
        say: Warn = lambda text: None,
    ) -> None:
        """`say` is given sentences about the start."""
        require_flower()
        self.say, self.connected = say, set[str]()  # nodes that are connected to the SuperLink
        self.folder, self.clients, self.cwd, self.port = folder.resolve(), clients, cwd, free_port()
        self.keys = keys and keys._replace(folder=keys.folder.resolve())
        self.registered: set[int] = set()  # clients whose keys the SuperLink knows
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.log_starts: dict[
            str, int
        ] = {}  # where the log of each begins, in a file that may have that of an earlier one
        self.lifeline: tuple[int, int] | None = None  # a pipe: processes end when this process, and so its end, is gone
        programs = str(Path(sys.executable).parent)
        self.env = {
            **os.environ,
            "FLWR_HOME": str(self.folder / "flwr"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "PATH": programs + os.pathsep + os.environ.get("PATH", ""),
            **(env or {}),
            MARKER: uuid4().hex,
        }

    def __enter__(self) -> Self:
        self.check_none_left()
        write_json(self.folder / PROCESSES, {"marker": self.env[MARKER], "keys": self.keys is not None})
        trust = f"root-certificates = {literal(str(self.keys.ca_certificate))}" if self.keys else "insecure = true"
        write_text(
            self.folder / "flwr" / "config.toml",
            f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
            f'address = "{HOST}:{self.port}"\n{trust}\n',
        )
        security = [*self.keys.server_options(), "--enable-supernode-auth"] if self.keys else ["--insecure"]
        options = ["--disable-runtime-dependency-installation", "--host", HOST, "--port", str(self.port)]
        try:
            self.start_process("superlink", "flower-superlink", *security, *options)
            self.wait_for_port("superlink", self.port)
            self.say("the SuperLink is ready; SuperNodes and the server are being started")
            for client in range(self.clients):
                self.start_node(client)
        except BaseException:
            self.stop_all()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop_all()

    # starting ---------------------------------------------------------------------------------------------------

    def check_none_left(self) -> None:
        """Refuse to start while processes run that an earlier start in this folder has left behind."""
        marker, end = read_json(self.folder / PROCESSES).get("marker"), time.monotonic() + 2 * STOP_SECONDS
        while marker and (left := processes_with(marker)):
            if time.monotonic() > end:
                numbers = " ".join(map(str, left))
                raise EngineError(
                    f"{len(left)} processes of an earlier start in {self.folder} still run; wait, or end them with "
                    f"kill {numbers}."
                )
            time.sleep(0.2)

    def start_node(self, client: int, superlink_port: int | None = None) -> None:
        """Start the SuperNode of a client, or start it again.

        It connects to the SuperLink's own port, or to another one that leads there.
        """
        state = str(self.folder / "state").replace("\\", "/")
        config = f'partition-id={client} num-partitions={self.clients} state="{state}"'
        superlink = ["--superlink", f"{HOST}:{superlink_port or self.port}"]
        address = ["--host", HOST, "--port", str(free_port())]
        if self.keys and client not in self.registered:
            self.register_key(client, self.keys)
        security = self.keys.node_options(client) if self.keys else ["--insecure"]
        options = [*security, *superlink, *address, "--node-config", config]
        self.start_process(f"node-{client}", "flower-supernode", *options)

    def register_key(self, client: int, keys: KeyFiles) -> None:
        """Register a client's key with the SuperLink."""
        name, command = (
            f"register-{client}",
            ["flwr", "supernode", "register", str(keys.public_key(client)), CONNECTION],
        )
        with suppress(subprocess.TimeoutExpired):
            if self.start_process(name, *command).wait(START_SECONDS) == 0:
                self.stop_process(name)
                self.registered.add(client)
                self.say(f"the key of client {client} is registered")
                return
        raise EngineError(f"the key of client {client} could not be registered; {self.failure_reason(name)}")

    def start_run(self, app: Path) -> subprocess.Popen[bytes]:
        """Start a run of an app folder; the process ends with the run, and its log is the server's."""
        return self.start_process("run", "flwr", "run", str(app.resolve()), CONNECTION, "--stream")

    def start_process(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        """Start a process in a session of its own, so that it can be stopped with all that it started."""
        self.stop_process(name)
        self.lifeline = self.lifeline or os.pipe()
        env = {**self.env, LIFELINE: str(self.lifeline[0])}
        if self.keys and self.keys.temporary:
            env[KEYS_FOLDER] = str(self.keys.folder)
        with open(self.folder / f"{name}.log", "ab") as log, defer_signals():
            self.log_starts[name] = log.tell()
            self.running[name] = subprocess.Popen(
                command_of(*command) if command[0] in PROGRAMS else command,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=env,
                cwd=self.cwd,
                start_new_session=True,
                pass_fds=[self.lifeline[0]],
            )
        return self.running[name]

    def wait_for_port(self, name: str, port: int) -> None:
        """Wait until a process listens at a port."""
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end and self.running[name].poll() is None:
            with suppress(OSError), socket.create_connection((HOST, port), timeout=1):
                return
            time.sleep(0.1)
        raise EngineError(f"Flower's {name} did not start; {self.failure_reason(name)}")

    # a run ------------------------------------------------------------------------------------------------------

    def run_app(self, app: Path, folder: Path, on_round: OnRound | None = None, warn: Warn | None = None) -> Run:
        """Run an app to its end; `folder` is the run's. Rounds and the server's warnings are passed on as they come."""
        progress = RunProgress(folder, self.folder / "run.log", on_round, warn, self.say)
        process, ended = self.start_run(app), set[str]()
        while True:
            finished = process.poll() is not None
            self.note_connections()
            progress.update(finished)
            if finished:
                break
            for name, other in self.running.items():
                if other is process or other.poll() is None or name in ended:
                    continue
                if name == "superlink" or progress.run is None:
                    raise EngineError(f"Flower's {name} ended; {self.failure_reason(name)}")
                ended.add(name)
                if warn:
                    warn(f"Flower's {name} ended, and the run goes on without it; {self.failure_reason(name)}")
            time.sleep(POLL_SECONDS)
        if not is_finished(folder):
            raise EngineError(f"the run failed; {self.failure_reason('run')}")
        return load(folder)

    def note_connections(self) -> None:
        """Say how many nodes are connected, if there are more than before."""
        nodes, before = {name for name in self.running if name.startswith("node-")}, len(self.connected)
        for name in nodes - self.connected:
            if b"SuperNode ID" in (self.folder / f"{name}.log").read_bytes()[self.log_starts[name] :]:
                self.connected.add(name)
        if len(self.connected) > before:
            are = "is" if len(self.connected) == 1 else "are"
            self.say(f"{len(self.connected)} of {count_text(len(nodes), 'SuperNode')} {are} connected")

    def failure_reason(self, name: str) -> str:
        """The end of a sentence about a process that failed: the last useful line of its log, and the log's path.

        One that was killed had no time to say why.
        """
        path, process = self.folder / f"{name}.log", self.running.get(name)
        log = path.read_bytes()[self.log_starts.get(name, 0) :]
        lines = [line for line in plain_lines(log) if not UNINFORMATIVE.match(line)]
        last = lines[-1] if lines else "it said nothing"
        if process and (process.poll() or 0) < 0:
            last = f"it was killed ({signal.Signals(-process.returncode).name})"
        last = re.sub(r"^(ERROR\s*:\s*|askew\.errors\.\w+: )", "", last).rstrip(".")
        return f"{last}; its log is {path}."

    # stopping ---------------------------------------------------------------------------------------------------

    def stop_process(self, name: str, kill: bool = False) -> None:
        """End a process and all that it started, at once if `kill`."""
        process = self.running.pop(name, None)
        if process is None:
            return
        for number in (signal.SIGKILL,) if kill else (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)

    def stop_all(self) -> None:
        """End all processes: runs and nodes, then the SuperLink, then whatever these have left behind."""
        for name, process in self.running.items():
            if name != "superlink":
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)  # so that they end side by side
        for name in reversed(list(self.running)):
            self.stop_process(name)
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process_id in self.leftover_processes():
                with suppress(ProcessLookupError):
                    os.kill(process_id, number)
            end = time.monotonic() + STOP_SECONDS
            while self.leftover_processes() and time.monotonic() < end:
                time.sleep(0.1)
        for end_of_pipe in self.lifeline or ():
            os.close(end_of_pipe)
        self.lifeline = None

    def leftover_processes(self) -> list[int]:
        """Processes of this federation that still run.

        Those of a SuperLink are in sessions of their own, and outlive it for a while if it is killed.
        """
        return processes_with(self.env[MARKER])


class RunProgress:
    """Follows a run by its folder and the server's log, and passes on new rounds and warnings."""

    def __init__(self, folder: Path, log: Path, on_round: OnRound | None, warn: Warn | None, say: Warn) -> None:
        self.folder, self.log, self.on_round, self.warn, self.say = folder, log, on_round, warn, say
        self.run: Run | None = None  # once this run, and not an earlier one, has written its folder
        self.facts_before = modification_time(folder / "run.json")
        self.rounds_time = 0  # when the rounds that were read last were written
        self.bytes_read = log.stat().st_size if log.exists() else 0  # of the log

    def update(self, finished: bool) -> None:
        """Pass on what is new; of a log that is still written only whole lines are read."""
        self._read_log(finished)
        self._read_rounds()

    def _read_log(self, finished: bool) -> None:
        with open(self.log, "rb") as file:
            file.seek(self.bytes_read)
            new = file.read()
        lines = new if finished else new[: new.rfind(b"\n") + 1]
        self.bytes_read += len(lines)
        for line in plain_lines(lines):
            if self.warn and line.startswith("WARNING"):
                self.warn(line.removeprefix("WARNING").lstrip(" :"))
            elif WAITING in line:
                self.say(line.removeprefix("INFO").lstrip(" :"))

    def _read_rounds(self) -> None:
        if self.run is None and modification_time(self.folder / "run.json") not in (0, self.facts_before):
            with suppress(StoreError):  # a folder that is being cleared or written is read at the next look
                self.run = load(self.folder)
            if self.run and self.on_round:
                self.on_round(self.run, None)
        written = modification_time(self.folder / "rounds.jsonl")
        if self.run is None or written == self.rounds_time:
            return
        self.rounds_time = written
        for record in read_rounds(self.folder / "rounds.jsonl")[len(self.run.rounds) :]:
            self.run.rounds.append(record)
            if self.on_round:
                self.on_round(self.run, record)


def processes_with(marker: str) -> list[int]:
    """The processes of the federation that has this marker, apart from this one."""
    entry, found = f"{MARKER}={marker}".encode(), list[int]()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if entry in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return [process_id for process_id in found if process_id != os.getpid()]


def plain_lines(log: bytes) -> list[str]:
    """The lines of a log without colours, frames and empty lines."""
    lines = re.sub(r"\x1b\[[0-9;]*m|[─│╭╮╰╯]", "", log.decode(errors="replace")).splitlines()
    return [" ".join(line.split()) for line in lines if line.strip()]


def modification_time(path: Path) -> int:
    """When a file was last written, in nanoseconds; 0 if there is none."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0
