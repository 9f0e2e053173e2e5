"""Flower's ports on this machine answer their own user alone, and its processes end with whoever started them."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from processes import assert_none_left, processes_of

from askew.errors import EngineError
from askew.flower import guard, loopback
from askew.flower.guard import FLEET_PREFIX, SameUserOnly, can_identify_users, connection_owner
from askew.flower.keys import temporary_keys
from askew.flower.loopback import MARKER, PROCESSES, Loopback

needs_linux = pytest.mark.skipif(not can_identify_users(), reason="needs Linux")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
NOBODY = 65534  # a user without rights

# Sends a request as another user; also with headers that say it comes from elsewhere, as a proxy adds them.
FORWARDED = "X-Forwarded-For: 127.0.0.1:1\r\n"
ATTACK = """\
import os, socket, sys
port, path, user, forwarded = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
request = f"POST {path} HTTP/1.1\\r\\nHost: localhost\\r\\nContent-Length: 0\\r\\n{forwarded}\\r\\n".encode()
os.setuid(user)
connection = socket.socket()
connection.settimeout(20)
connection.connect(("127.0.0.1", port))
connection.sendall(request)
print(connection.recv(100).split()[1].decode())
"""


@contextmanager
def open_connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection on this machine: the client's and the server's."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
        with near, far:
            yield near, far


@needs_linux
def test_the_owner_of_a_connection_is_known_while_it_is_open() -> None:
    with open_connection() as (near, far):
        client, server = near.getsockname(), near.getpeername()
        assert connection_owner(client, server) == os.getuid()
        assert connection_owner((f"::ffff:{client[0]}", client[1]), server) == os.getuid()
        assert connection_owner(("127.0.0.2", client[1]), server) is None
        near.close()  # the system forgets the owner of a closed end, and says 0, which is root
        assert connection_owner(client, server) is None
        far.close()


def answer_of(scope: dict[str, Any], open_fleet: bool = False) -> int:
    """The status of a guarded app's answer; the app itself says 200."""
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(SameUserOnly(app, open_fleet)({"type": "http", **scope}, None, send))  # type: ignore[arg-type]
    return int(sent[0]["status"])


@needs_linux
def test_requests_of_other_users_and_machines_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_connection() as (near, _):
        own = {"client": near.getsockname(), "server": near.getpeername(), "path": "/v1/control/start-run"}
        assert answer_of(own) == 200
        assert answer_of(own | {"client": ("10.0.0.5", 5000)}) == 403
        assert answer_of(own | {"client": None}) == 403 and answer_of(own | {"client": ("unknown", 1)}) == 403
        monkeypatch.setattr(guard.os, "getuid", lambda: os.geteuid() + 1)  # now the connection is another user's
        assert answer_of(own) == 403 and answer_of(own, open_fleet=True) == 403
        node = own | {"path": f"{FLEET_PREFIX}pull-messages"}
        assert answer_of(node) == 403 and answer_of(node, open_fleet=True) == 200


@needs_linux
@needs_root
@pytest.mark.slow
def test_another_user_reaches_neither_the_superlink_nor_a_node(tmp_path: Path) -> None:
    """Today's attack: list and start runs, and take a node's tasks, as a user without rights."""
    pytest.importorskip("flwr", reason="needs the extra flower")
    with Loopback(tmp_path, 1, env={"OMP_NUM_THREADS": "1"}) as link:
        command = [str(word) for word in link.running["node-0"].args]  # type: ignore[union-attr]
        ports = {
            link.port: "/v1/control/list-runs",
            int(command[command.index("--port") + 1]): "/v1/runtime/acquire-task",
        }
        for port, path in ports.items():
            link.wait_for_port("superlink" if port == link.port else "node-0", port)
            for user, forwarded, refused in ((NOBODY, "", True), (NOBODY, FORWARDED, True), (0, "", False)):
                attack = [sys.executable, "-c", ATTACK, str(port), path, str(user), forwarded]
                done = subprocess.run(attack, capture_output=True, text=True, check=False)
                assert (done.stdout == "403\n") == refused and done.returncode == 0, (path, user, done)


@needs_linux
def test_a_second_start_is_refused_while_processes_of_the_first_live(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("flwr", reason="needs the extra flower")
    monkeypatch.setattr(loopback, "STOP_SECONDS", 0.1)
    (tmp_path / PROCESSES).write_text('{"marker": "first"}')
    with subprocess.Popen(["sleep", "60"], env={**os.environ, MARKER: "first"}) as left:
        try:
            with (
                pytest.raises(EngineError, match=f"1 processes of an earlier start .* kill {left.pid}"),
                Loopback(tmp_path, 0),
            ):
                pass
        finally:
            left.kill()
    assert not list(tmp_path.glob("*.log"))  # nothing was started


def test_keys_of_one_start_are_private_and_removed() -> None:
    pytest.importorskip("cryptography", reason="needs the extra flower")
    with temporary_keys(1) as keys:
        folder = keys.folder
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and (folder / "node-0").is_file()
    assert not folder.exists()


STARTER = """\
import sys, time
from pathlib import Path
from askew.flower.keys import temporary_keys
from askew.flower.loopback import Loopback
with temporary_keys(1) as keys, Loopback(Path(sys.argv[1]), 1, keys=keys):
    print(keys.folder, flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
@needs_linux
def test_processes_and_keys_end_with_a_starter_that_is_killed(tmp_path: Path) -> None:
    pytest.importorskip("flwr", reason="needs the extra flower")
    with subprocess.Popen([sys.executable, "-c", STARTER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        keys, home = Path(starter.stdout.readline().strip()), tmp_path / "flwr"
        end = time.monotonic() + 60
        while len(processes_of(home)) < 5 and time.monotonic() < end:  # the SuperLink, the node and what they started
            time.sleep(0.2)
        assert (keys / "ca.key").is_file() and len(processes_of(home)) >= 5
        starter.send_signal(signal.SIGKILL)
    assert_none_left(home)
    assert not keys.exists()
