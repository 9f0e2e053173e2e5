"""Real deployments on this machine: a SuperLink, three SuperNodes and every message in a process of its own.

`ASKEW_LOOPBACK=all python -m pytest tests/flower/test_loopback.py` plays all methods, which takes a quarter of an hour on two cores;
otherwise a few are played. Weights are compared up to 1e-6: they are the same numbers where processes round alike.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hands import page, simulated, written
from processes import assert_none_left, with_home
from safetensors.torch import load_file

from askew.experiment.store import Run, load
from askew.flower.app import write_app
from askew.flower.server import Rules

pytest.importorskip("flwr", reason="needs the extra flower")

from askew.flower.loopback import HOST, Loopback

FEW = ("scaffold", "fedbn")
REST = (
    "fedavg",
    "fedpdc",
    "feddyn",
    "feddc",
    "feddpc",
    "fedcm",
    "fedvarp",
    "moon",
    "mgda",
    "lossbias",
    "fedga",
    "solo",
)
BYTES = ("bytes_up", "bytes_down")
TOLERANCE = 1e-6
OVERHEAD = 64 * 1024  # bytes a message, besides a twentieth
PATIENCE = 300.0  # seconds for a run
everything = pytest.mark.skipif(os.environ.get("ASKEW_LOOPBACK") != "all", reason="takes long; set ASKEW_LOOPBACK=all")


class Meter:
    """A port that leads to another one and counts the bytes of both directions."""

    def __init__(self, port: int) -> None:
        self.target, self.up, self.down = port, 0, 0
        self.door = socket.create_server((HOST, 0))
        self.port = int(self.door.getsockname()[1])
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        with suppress(OSError), self.door:
            while True:
                near, _ = self.door.accept()
                threading.Thread(
                    target=self.lead, args=(near, socket.create_connection((HOST, self.target))), daemon=True
                ).start()

    def lead(self, near: socket.socket, far: socket.socket) -> None:
        """Until one of the two ends."""
        with suppress(OSError), near, far:
            while True:
                for end in select.select([near, far], [], [])[0]:
                    data = end.recv(65536)
                    if not data:
                        return
                    (far if end is near else near).sendall(data)
                    self.up += len(data) * (end is near)
                    self.down += len(data) * (end is far)


@contextmanager
def federation(folder: Path) -> Iterator[tuple[Loopback, list[Meter]]]:
    """Three nodes that reach the link through meters."""
    with Loopback(folder, 0, env={"OMP_NUM_THREADS": "1"}) as link:
        link.clients, meters = 3, [Meter(link.port) for _ in range(3)]
        for client, meter in enumerate(meters):
            link.node(client, meter.port)
        yield link, meters
        for meter in meters:
            meter.door.close()


def tables(key: str) -> dict[str, Any]:
    """Three clients, three rounds, and a network large enough for its bytes to be seen."""
    whole = page({"name": key}, rounds=3, partition={"name": "natural", "clients": 3}, participation={"name": "full"})
    return whole | {"model": whole["model"] | {"hidden": [2048]}, "evaluation": {"every": 3}}


def play(link: Loopback, key: str, folder: Path) -> Run:
    write_app(
        written(tables(key), folder / "page"),
        folder / "app",
        rules=Rules(out=str(folder / "runs"), wait=120.0, timeout=120.0),
    )
    process = link.run(folder / "app")
    assert process.wait(PATIENCE) == 0, (link.folder / "run.log").read_text()
    found = list((folder / "runs").glob("*"))
    assert found, (link.folder / "run.log").read_text()
    return load(found[0])


@pytest.mark.parametrize("keys", [pytest.param(FEW, id="few"), pytest.param(REST, id="rest", marks=everything)])
def test_a_deployment_is_the_simulators_run(keys: tuple[str, ...], tmp_path: Path) -> None:
    with federation(tmp_path / "flower") as (link, meters):
        for key in keys:
            before = sum(m.down for m in meters), sum(m.up for m in meters)
            ours, theirs = play(link, key, tmp_path / key), simulated(tables(key))
            assert ours.finished and ours.facts["engine"] == "flower" and ours.folder is not None
            model = load_file(ours.folder / "model.safetensors")
            assert model.keys() == theirs.model.keys()
            assert max((model[n] - v).abs().max().item() for n, v in theirs.model.items()) <= TOLERANCE
            for one, other in zip(ours.rounds, theirs.rounds, strict=True):
                assert [one[name] for name in ("participants", *BYTES)] == [
                    other[name] for name in ("participants", *BYTES)
                ]
                for name in ("train_loss", "accuracy", "loss"):
                    assert one[name] == (None if other[name] is None else pytest.approx(other[name], rel=1e-5))
            seen = sum(m.down for m in meters) - before[0], sum(m.up for m in meters) - before[1]
            counted = ours.bytes_down, ours.bytes_up
            print(
                f"{key}: {counted} bytes counted, {seen} seen; rounds of {[round(r['seconds'], 1) for r in ours.rounds]} s"
            )
            if key not in ("fedbn", "solo"):  # whose evaluation travels too
                check_bytes(counted, seen, messages=3 * (len(ours.rounds) + 1))


def check_bytes(counted: tuple[int, int], seen: tuple[int, int], messages: int) -> None:
    """The count is what goes over the sockets, down and up, but for records, requests, polling and the app itself."""
    for least, all_of_it in zip(counted, seen, strict=True):
        assert least < all_of_it < 1.05 * least + messages * OVERHEAD


@everything
def test_flowers_own_simulation_plays_the_same_app(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs flwr[simulation]")
    with Loopback(tmp_path / "flower", 0, env={"FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1"}) as link:
        (tmp_path / "flower" / "flwr" / "config.toml").write_text(
            '[superlink]\ndefault = "local"\n\n[superlink.local]\naddress = ":local:"\n'
        )
        write_app(
            written(tables("moon"), tmp_path / "page"),
            tmp_path / "app",
            rules=Rules(out=str(tmp_path / "runs"), wait=120.0),
        )
        words = ["--federation-config", "num-supernodes=3 client-resources-num-cpus=1"]
        try:
            assert (
                link.start("run", "flwr", "run", str(tmp_path / "app"), "local", "--stream", *words).wait(PATIENCE) == 0
            )
        finally:
            end_all(link.env["FLWR_HOME"])
    ours, theirs = load(next((tmp_path / "runs").iterdir())), simulated(tables("moon"))
    assert ours.finished and ours.rounds[-1]["loss"] == pytest.approx(theirs.rounds[-1]["loss"], rel=1e-5)


def end_all(home: str) -> None:
    """End what `flwr run` leaves behind: the processes with this home."""
    for process in with_home(Path(home)):
        with suppress(OSError):
            os.kill(process, signal.SIGTERM)


def test_nothing_is_left_running(tmp_path: Path) -> None:
    """All processes end, those that they started included, even where one is killed."""
    with Loopback(tmp_path, 1) as link:
        link.stop("node-0", kill=True)
    assert_none_left(Path(link.env["FLWR_HOME"]))
