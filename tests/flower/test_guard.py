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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from processes import assert_none_left, processes_of

from askew.errors import EngineError
from askew.flower import guard, launch, loopback
from askew.flower.guard import (
    FLEET_PREFIX,
    MAX_REQUEST,
    BoundedRequests,
    SameUserOnly,
    ServerApp,
    ask_for_owner,
    can_identify_users,
    connection_owner,
    find_owner,
)
from askew.flower.keys import temporary_keys
from askew.flower.launch import LIFELINE, MARKER
from askew.flower.loopback import PROCESSES, Loopback

needs_linux = pytest.mark.skipif(not can_identify_users(), reason="needs Linux")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
NOBODY = 65534  # a user without rights

# Sends a request as another user; also with headers that say it comes from elsewhere, as a proxy adds them.
EMPTY = "Content-Length: 0\r\n"
FORWARDED = f"{EMPTY}X-Forwarded-For: 127.0.0.1:1\r\n"
TOO_LARGE = f"Content-Length: {MAX_REQUEST + 1}\r\n"
ATTACK = """\
import os, socket, sys
port, path, user, headers = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
request = f"POST {path} HTTP/1.1\\r\\nHost: localhost\\r\\n{headers}\\r\\n".encode()
os.setuid(user)
connection = socket.socket()
connection.settimeout(20)
connection.connect(("127.0.0.1", port))
connection.sendall(request)
print(connection.recv(100).split()[1].decode())
"""


@contextmanager
def open_connection(host: str = "127.0.0.1") -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection on this machine: the client's and the server's."""
    if host == "::1" and not Path("/proc/net/if_inet6").is_file():
        pytest.skip("this machine has no IPv6")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        near = socket.create_connection(listener.getsockname()[:2])
        far, _ = listener.accept()
        with near, far:
            yield near, far


@needs_linux
@pytest.mark.parametrize("owner", [connection_owner, ask_for_owner, find_owner])
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_owner_of_a_connection_is_known_while_it_is_open(host: str, owner: Callable[..., int | None]) -> None:
    with open_connection(host) as (near, far):
        client, server = near.getsockname()[:2], near.getpeername()[:2]
        assert owner(client, server) == os.getuid()
        assert host == "::1" or owner((f"::ffff:{client[0]}", client[1]), server) == os.getuid()
        assert owner(("127.0.0.2", client[1]), server) is None
        assert owner(server, (host, 1)) is None  # one that listens at this port is no end of a connection
        near.close()  # the system forgets the owner of a closed end, and says 0, which is root
        assert owner(client, server) is None
        far.close()


@needs_linux
@needs_root
@pytest.mark.parametrize("owner", [ask_for_owner, find_owner])
def test_the_owner_of_a_connection_is_the_user_who_opened_it(owner: Callable[..., int | None]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = listener.getsockname()
        attack = [sys.executable, "-c", ATTACK, str(server[1]), "/", str(NOBODY), EMPTY]
        with subprocess.Popen(attack, stdout=subprocess.PIPE):
            far, client = listener.accept()
            assert owner(client, server) == NOBODY and owner(server, client) == 0
            far.sendall(b"HTTP/1.1 403\r\n")
            far.close()


def test_tables_are_read_where_the_system_answers_no_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise PermissionError

    monkeypatch.setattr(guard.socket, "socket", refuse)
    monkeypatch.setattr(guard, "find_owner", lambda near, far: 7)
    assert connection_owner(("127.0.0.1", 5), ("127.0.0.1", 6)) == 7


def status_of(guarded: Callable[[ServerApp], ServerApp], scope: dict[str, Any]) -> int:
    """The status of a guarded app's answer; the app itself says 200."""
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(guarded(app)({"type": "http", **scope}, None, send))  # type: ignore[arg-type, func-returns-value]
    return int(sent[0]["status"])


def answer_of(scope: dict[str, Any], open_fleet: bool = False) -> int:
    return status_of(lambda app: SameUserOnly(app, open_fleet), scope)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([], 200),
        ([(b"content-length", str(MAX_REQUEST).encode())], 200),
        ([(b"content-length", str(MAX_REQUEST + 1).encode())], 413),
        ([(b"content-length", b"-1")], 413),
        ([(b"content-length", b"1"), (b"transfer-encoding", b"chunked")], 413),
    ],
)
def test_requests_that_are_too_large_or_hide_their_size_are_not_read(
    headers: list[tuple[bytes, bytes]], status: int
) -> None:
    assert status_of(BoundedRequests, {"headers": headers}) == status


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
    """List and start runs, and take a node's tasks, as a user without rights; and a huge request of one's own."""
    pytest.importorskip("flwr", reason="needs Flower: pip install -e '.[flower]'")
    with Loopback(tmp_path, 1, env={"OMP_NUM_THREADS": "1"}) as link:
        command = [str(word) for word in link.running["node-0"].args]  # type: ignore[union-attr]
        ports = {
            link.port: "/v1/control/list-runs",
            int(command[command.index("--port") + 1]): "/v1/runtime/acquire-task",
        }
        for port, path in ports.items():
            link.wait_for_port("superlink" if port == link.port else "node-0", port)
            for user, headers, refused in (
                (NOBODY, EMPTY, 403),
                (NOBODY, FORWARDED, 403),
                (0, EMPTY, 0),
                (0, TOO_LARGE, 413),
            ):
                attack = [sys.executable, "-c", ATTACK, str(port), path, str(user), headers]
                done = subprocess.run(attack, capture_output=True, text=True, check=False)
                status = int(done.stdout)
                assert status == refused or (not refused and status not in (403, 413)), (path, user, headers, done)


@needs_linux
def test_a_second_start_is_refused_while_processes_of_the_first_live(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("flwr", reason="needs Flower: pip install -e '.[flower]'")
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
    pytest.importorskip("cryptography", reason="needs cryptography: pip install -e '.[flower]'")
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
    pytest.importorskip("flwr", reason="needs Flower: pip install -e '.[flower]'")
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


PROGRAM = """\
import subprocess, sys, time
sys.path.insert(0, sys.argv[1])  # as a script: without the package
import launch
launch.end_with_starter()
print(subprocess.Popen(["sleep", "600"], start_new_session=True).pid, flush=True)
time.sleep(600)
"""


@needs_linux
def test_what_a_program_started_in_a_session_of_its_own_ends_with_the_starter() -> None:
    """As the server apps of a SuperLink, which do not notice its end."""
    theirs, ours = os.pipe()
    env = {**os.environ, MARKER: "tests", LIFELINE: str(theirs)}
    words = [sys.executable, "-c", PROGRAM, str(Path(launch.__file__).parent)]
    with subprocess.Popen(
        words, env=env, pass_fds=[theirs], start_new_session=True, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        child = int(program.stdout.readline())
        os.close(theirs)
        os.close(ours)  # as if the starter was killed
        assert program.wait(30) == -signal.SIGTERM
    assert not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text().split()[2]
