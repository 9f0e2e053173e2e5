"""Processes of federations on this machine: which ones run, and how many bytes go through their sockets."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

HOST = "127.0.0.1"
on_request = pytest.mark.skipif(
    os.environ.get("ASKEW_LOOPBACK") != "all", reason="takes a quarter of an hour in all; set ASKEW_LOOPBACK=all"
)


def environment(process_id: int) -> list[bytes]:
    with suppress(OSError):
        return Path(f"/proc/{process_id}/environ").read_bytes().split(b"\0")
    return []


def processes_of(home: Path) -> list[int]:
    """The processes of one federation: those that have its Flower home."""
    wanted = f"FLWR_HOME={home}".encode()
    return [int(path.name) for path in Path("/proc").glob("[0-9]*") if wanted in environment(int(path.name))]


def assert_none_left(home: Path, seconds: float = 20.0) -> None:
    """No process of a federation runs, at the latest after so many seconds."""
    end = time.monotonic() + seconds
    while (left := processes_of(home)) and time.monotonic() < end:
        time.sleep(0.2)
    listing = ["ps", "-fp", ",".join(map(str, left))]
    assert not left, subprocess.run(listing, capture_output=True, text=True, check=False).stdout


class CountingProxy:
    """A port that leads to a server and counts the bytes of both directions; it outlives the server."""

    def __init__(self, port: int) -> None:
        self.target, self.bytes_up, self.bytes_down = port, 0, 0
        self.listener = socket.create_server((HOST, 0))
        self.port = int(self.listener.getsockname()[1])
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        with suppress(OSError), self.listener:
            while True:
                near, _ = self.listener.accept()
                try:
                    far = socket.create_connection((HOST, self.target))
                except OSError:  # no server there at the moment
                    near.close()
                    continue
                threading.Thread(target=self.forward, args=(near, far), daemon=True).start()

    def forward(self, near: socket.socket, far: socket.socket) -> None:
        """Pass bytes on until one side ends."""
        with suppress(OSError), near, far:
            while True:
                for end in select.select([near, far], [], [])[0]:
                    data = end.recv(65536)
                    if not data:
                        return
                    (far if end is near else near).sendall(data)
                    self.bytes_up += len(data) * (end is near)
                    self.bytes_down += len(data) * (end is far)

    def close(self) -> None:
        self.listener.close()


class FaultyProxy(CountingProxy):
    """A port that leads to a server over a network with faults, which a test switches on and off by `fault`.

    "cut": connections end, and no new one is made. "stall": bytes stay on the way. "delay": they are late. "garbage":
    some are changed. "": nothing of that.
    """

    fault = ""
    delay = 0.3  # seconds for each piece of data

    def forward(self, near: socket.socket, far: socket.socket) -> None:
        with suppress(OSError), near, far:
            while self.fault != "cut":
                for end in select.select([near, far], [], [], 0.1)[0] if self.fault != "stall" else ():
                    data = bytearray(end.recv(65536))
                    if not data:
                        return
                    time.sleep(self.delay if self.fault == "delay" else 0)
                    if self.fault == "garbage":
                        data[len(data) // 2] ^= 0xFF
                    (far if end is near else near).sendall(data)
                time.sleep(0.1 if self.fault == "stall" else 0)


class ByteCount:
    """The bytes that proxies pass on from now on, down and up."""

    def __init__(self, proxies: list[CountingProxy]) -> None:
        self.proxies, self.before = proxies, (0, 0)
        self.before = self.since()

    def since(self) -> tuple[int, int]:
        down, up = sum(p.bytes_down for p in self.proxies), sum(p.bytes_up for p in self.proxies)
        return down - self.before[0], up - self.before[1]


EXTRA_BYTES = 64 * 1024  # that a message may take on the sockets, besides a twentieth


def check_bytes(counted: tuple[int, int], passed: tuple[int, int], messages: int) -> None:
    """The sockets pass what was counted, down and up, and little more: records, requests, polling and the app."""
    for least, total in zip(counted, passed, strict=True):
        assert least < total < 1.05 * least + messages * EXTRA_BYTES
