"""A whole federation on this machine, for trying and testing: a SuperLink, a SuperNode for each client, and runs on them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from ..errors import EngineError
from ..experiment.store import write_text
from . import require_flower

HOST, NAME = "127.0.0.1", "loopback"
PATIENCE = 60.0  # seconds until a process listens
GRACE = 5.0  # seconds in which a process may end by itself


def free_port() -> int:
    with socket.socket() as s:
        s.bind((HOST, 0))
        return int(s.getsockname()[1])


class Loopback:
    """Processes that are ended together, whatever happens in between. Their logs and Flower's own files are in `folder`."""

    def __init__(self, folder: Path, clients: int, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> None:
        require_flower()
        self.folder, self.clients, self.cwd, self.port = folder.resolve(), clients, cwd, free_port()
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        bin = str(Path(sys.executable).parent)
        self.env = {
            **os.environ,
            "FLWR_HOME": str(self.folder / "flwr"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
            "PATH": bin + os.pathsep + os.environ.get("PATH", ""),
            **(env or {}),
        }

    def __enter__(self) -> Self:
        write_text(
            self.folder / "flwr" / "config.toml",
            f'[superlink]\ndefault = "{NAME}"\n\n[superlink.{NAME}]\naddress = "{HOST}:{self.port}"\ninsecure = true\n',
        )
        try:
            link = ["--insecure", "--disable-runtime-dependency-installation", "--host", HOST, "--port", str(self.port)]
            self.start("superlink", "flower-superlink", *link)
            self.listens("superlink", self.port)
            for client in range(self.clients):
                self.node(client)
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.end()

    def node(self, client: int, port: int | None = None) -> None:
        """Start the SuperNode of a client, or start it again; `port` is where it looks for the SuperLink, if elsewhere."""
        name, own = f"node-{client}", free_port()
        state = str(self.folder / "state").replace("\\", "/")
        config = f'partition-id={client} num-partitions={self.clients} state="{state}"'
        where = ["--superlink", f"{HOST}:{port or self.port}", "--host", HOST, "--port", str(own)]
        self.start(name, "flower-supernode", "--insecure", *where, "--node-config", config)

    def run(self, app: Path) -> subprocess.Popen[bytes]:
        """Start a run of an app folder; the process ends with the run, its log is what the server says."""
        return self.start("run", "flwr", "run", str(app.resolve()), NAME, "--stream")

    def start(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        """A process in a group of its own, so that it is ended with all it started."""
        self.stop(name)
        with open(self.folder / f"{name}.log", "ab") as log:
            self.running[name] = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=self.env, cwd=self.cwd, start_new_session=True
            )
        return self.running[name]

    def listens(self, name: str, port: int) -> None:
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end and self.running[name].poll() is None:
            with suppress(OSError), socket.create_connection((HOST, port), timeout=1):
                return
            time.sleep(0.1)
        raise EngineError(f"Flower's {name} did not start; read {self.folder / f'{name}.log'}.")

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
        """End everything: runs first, then nodes, then the link."""
        for name in reversed(list(self.running)):
            self.stop(name)
