"""Real processes that are killed, late, false or new. All are slow; `test_server.py` has the same within one process.

Most runs share one federation. A result is compared with a simulation in which those take part who did: weights agree
up to 1e-6, and are the same numbers where processes round alike.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch
from in_process import largest_difference, simulate, small_run, with_participants, write_config
from processes import ByteCount, CountingProxy, check_bytes, on_request
from safetensors.torch import load_file

from askew.data.federation import Federation
from askew.experiment.config import Config
from askew.experiment.store import Run, load
from askew.flower.app import PACKAGE, write_app
from askew.flower.rules import DeploymentRules
from process_tree import process_tree

pytest.importorskip("flwr", reason="needs Flower: pip install -e '.[flower]'")

from faulty_client import CLIENT_SOURCE, FOLDER_VARIABLE

from askew.flower.loopback import Loopback

pytestmark = pytest.mark.slow
TOLERANCE = 1e-6  # of weights
MAX_WAIT = 300.0  # seconds for anything to happen
HERE = Path(__file__).parent

DATA_MODULE = """\
from pathlib import Path

import numpy as np


def client(node):
    with np.load(Path({folder!r}) / f"{{node['partition-id']}}.npz") as arrays:
        return (arrays["x"], arrays["y"]), None, (arrays["x_test"], arrays["y_test"])
"""


class FaultyFederation(NamedTuple):
    """A federation of three nodes with faulty clients; orders for them are files in `orders`, see faulty_client.py."""

    link: Loopback
    proxies: list[CountingProxy]
    orders: Path

    # runs

    def start(
        self, folder: Path, tables: dict[str, Any], orders: dict[str, str], data: Path | None = None, **rules: Any
    ) -> None:
        """Start a run with these orders by "ROUND-CLIENT"."""
        for path in self.orders.iterdir():
            path.unlink()
        (self.orders / "orders.json").write_text(json.dumps(orders))
        waits = {"wait": MAX_WAIT, "hello": MAX_WAIT, "timeout": MAX_WAIT}
        all_rules = DeploymentRules.build({"out": str(folder / "runs"), **waits, **rules})
        write_app(write_config(tables, folder / "config"), folder / "app", data, all_rules)
        (folder / "app" / PACKAGE / "client.py").write_text(CLIENT_SOURCE)
        self.link.start_run(folder / "app")

    def finish(self, folder: Path) -> Run:
        """Wait for the end of the run."""
        assert self.link.running["run"].wait(MAX_WAIT) == 0, self.read_log("run")
        return load(next((folder / "runs").iterdir()))

    def wait_until(self, condition: Callable[[], Any]) -> None:
        """Wait while the run goes on."""
        end = time.monotonic() + MAX_WAIT
        while not condition():
            assert time.monotonic() < end and self.link.running["run"].poll() is None, self.read_log("run")
            time.sleep(0.1)

    def wait_for_message(self, name: str) -> None:
        """Wait until the client of "ROUND-CLIENT" has that round's message."""
        self.wait_until((self.orders / f"started-{name}").exists)

    def wait_for_rounds(self, folder: Path, count: int) -> None:
        """Wait until so many rounds are recorded."""
        files = lambda: folder.glob("runs/*/rounds.jsonl")
        self.wait_until(lambda: sum(len(path.read_text().splitlines()) for path in files()) >= count)

    def go(self, name: str) -> None:
        """End the wait of the client of "ROUND-CLIENT"."""
        (self.orders / f"go-{name}").touch()

    # logs

    def read_log(self, name: str) -> str:
        path = self.link.folder / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def replies_sent(self, client: int) -> int:
        """How many replies a client's node has sent, by its log."""
        return self.read_log(f"node-{client}").count("Sent successfully")

    # processes

    def start_node(self, client: int) -> None:
        self.link.start_node(client, self.proxies[client].port)

    def connect_node(self, client: int) -> None:
        """Start a node and wait until it is connected."""
        connections = lambda: self.read_log(f"node-{client}").count("SuperNode ID")
        before = connections()
        self.start_node(client)
        self.wait_until(lambda: connections() > before)

    def start_missing_nodes(self) -> None:
        for client in range(3):
            if f"node-{client}" not in self.link.running:
                self.start_node(client)

    def restart_superlink(self, command: list[str]) -> None:
        """Kill the SuperLink and all it started, and start it again."""
        for process_id in process_tree(self.link.running["superlink"].pid):
            with suppress(ProcessLookupError):
                os.kill(process_id, signal.SIGKILL)
        self.link.start_process("superlink", *command)
        self.link.wait_for_port("superlink", self.link.port)


@contextmanager
def start_federation(folder: Path, clients: int = 3, nodes: int = 2) -> Iterator[FaultyFederation]:
    """A federation with the nodes of the first clients; those of the others connect when a test starts them."""
    (folder / "orders").mkdir(parents=True)
    path = os.pathsep.join([str(HERE), str(HERE.parents[1] / "src")])
    env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, FOLDER_VARIABLE: str(folder / "orders")}
    with Loopback(folder / "flower", 0, env=env) as link:
        link.clients = clients
        federation = FaultyFederation(link, [CountingProxy(link.port) for _ in range(clients)], folder / "orders")
        for client in range(nodes):
            federation.start_node(client)
        yield federation
        for proxy in federation.proxies:
            proxy.close()


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[FaultyFederation]:
    """A federation in which client 2 has never been."""
    with start_federation(tmp_path / "federation") as new:
        yield new


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[FaultyFederation]:
    """A federation of two clients whose nodes are not started yet."""
    with start_federation(tmp_path / "federation", clients=2, nodes=0) as new:
        yield new


def three_clients(key: str, **changes: Any) -> dict[str, Any]:
    """A run of three clients, all of which take part."""
    partition = {"name": "natural", "clients": 3}
    return small_run({"name": key}, partition=partition, participation={"name": "full"}) | changes


def assert_simulated(run: Run, tables: dict[str, Any], participants: Sequence[Sequence[int]], folder: Path) -> None:
    """The model is that of a simulation with these participants."""
    simulated = simulate(with_participants(tables, participants, folder))
    assert run.folder is not None and run.finished
    assert largest_difference(load_file(run.folder / "model.safetensors"), simulated.model) <= TOLERANCE


def test_clients_join_late_reply_late_are_killed_come_again_and_send_garbage(
    federation: FaultyFederation, tmp_path: Path
) -> None:
    """Two runs of one federation, which takes long to start."""
    check_late_clients(federation, tmp_path / "late")
    check_garbage(federation, tmp_path / "garbage")


def check_late_clients(federation: FaultyFederation, folder: Path) -> None:
    """All connected clients are asked, and two replies waited for.

    SCAFFOLD's variates show who went on from which round.
    """
    folder.mkdir()
    participation, evaluation = {"name": "uniform", "cohort": 2}, {"every": 6}
    tables = three_clients("scaffold", rounds=6, participation=participation, evaluation=evaluation)
    orders = {"1-0": "hold", "2-0": "hold", "3-1": "late", "4-0": "hold", "4-2": "hold", "5-0": "hold", "6-1": "late"}
    federation.start(folder, tables, orders, nodes=2, spare=1.0)
    federation.wait_for_message("1-0")
    federation.connect_node(2)  # it joins in round 1, and is asked which client it is when round 2 begins
    federation.go("1-0")
    federation.wait_for_message("2-0")
    federation.wait_until(lambda: federation.replies_sent(2))
    federation.go("2-0")
    federation.wait_for_rounds(folder, 3)  # without client 1, whose reply comes now
    federation.go("3-1")
    federation.wait_for_message("4-2")
    federation.link.stop_process("node-2", kill=True)
    federation.connect_node(2)
    before = federation.replies_sent(2)
    federation.go("4-0")
    federation.wait_for_message("5-0")
    federation.wait_until(lambda: federation.replies_sent(2) > before)
    federation.go("5-0")
    run = federation.finish(folder)
    participants = [[0, 1], [0, 1], [0, 2], [0, 1], [0, 1], [0, 2]]
    assert [r["participants"] for r in run.rounds] == participants
    assert [r.get("absent", 0) for r in run.rounds[:4]] == [0, 0, 1, 1] and run.rounds[5]["absent"] == 1
    assert not any(r["dropped"] for r in run.rounds)
    log = federation.read_log("run")
    assert "round 3: client 1: enough others answered first" in log
    assert "client 2 is now node" in log
    assert_simulated(run, tables, participants, folder)


@on_request  # a client must answer within 30 seconds, which a busy machine may not
@pytest.mark.parametrize("answers", [1, 3])
def test_a_reply_that_does_not_come_in_time_is_not_waited_for(
    answers: int, federation: FaultyFederation, tmp_path: Path
) -> None:
    """Client 1 is silent in round 1 until the time is over; if three replies are needed, the round changes nothing."""
    tables, log = three_clients("scaffold", rounds=2, evaluation={"every": 2}), len(federation.read_log("run"))
    federation.start(tmp_path, tables, {"1-1": "late"}, answers=answers, timeout=30.0)
    federation.start_missing_nodes()
    federation.wait_for_message("1-1")
    federation.wait_for_rounds(tmp_path, 1)
    federation.go("1-1")
    run, new_log = federation.finish(tmp_path), federation.read_log("run")[log:]
    assert run.rounds[0]["absent"] == 1 and run.rounds[1]["participants"] == [0, 1, 2]
    assert "round 1: client 1: no answer within 30 s" in new_log
    assert ("round 1 is thrown away: 2 answers came, at least 3 are needed." in new_log) == (answers == 3)
    assert_simulated(run, tables, [[0, 2] if answers == 1 else [], [0, 1, 2]], tmp_path)


def write_samples(folder: Path) -> list[dict[str, np.ndarray]]:
    """Write a file for each client: the samples that the simulator gives it, some of them as its test set."""
    config = Config.build(three_clients("fedavg"))
    fed = Federation(config.data, config.partition, config.seed)
    pool, owned = fed.gather([0, 1, 2])
    samples = []
    for client, own in enumerate(owned):
        x, y, count = pool.x[own].numpy(), pool.y[own].numpy(), 5 + client
        samples.append({"x": x, "y": y, "x_test": x[:count], "y_test": y[:count]})
        np.savez(folder / f"{client}.npz", **samples[-1])
    return samples


GARBAGE = {  # by "ROUND-CLIENT": the order, and the sentence in the server's log
    "1-0": ("shape", "client 0, tensor"),
    "1-1": ("nan", "client 1 sent numbers that are not finite"),
    "2-0": ("round", "client 0: this is of round 99, expected round 2"),
    "2-1": ("model", "came, expected <f4"),
    "3-0": ("bytes", "bytes came, at most"),
    "3-1": ("raise", "client 1: "),
}


def check_garbage(federation: FaultyFederation, folder: Path) -> None:
    """Two of three clients send garbage in every round; nobody but the clients has test data, and they evaluate."""
    folder.mkdir()
    tables = three_clients("fedavg", rounds=3, model={"name": "softmax"}, evaluation={"every": 3})
    (folder / "data.py").write_text(DATA_MODULE.format(folder=str(folder)))
    samples, log, passed = write_samples(folder), len(federation.read_log("run")), ByteCount(federation.proxies)
    orders = {name: order for name, (order, _) in GARBAGE.items()}
    federation.start(folder, tables, orders, folder / "data.py")
    federation.start_missing_nodes()
    run, lines = federation.finish(folder), federation.read_log("run")[log:].splitlines()
    for name, (_, sentence) in GARBAGE.items():
        assert sum(f"round {name[0]}: " in line and sentence in line for line in lines) == 1, (name, lines)
    assert not any("Traceback" in line for line in lines)
    assert [r["participants"] for r in run.rounds] == [[1, 2], [2], [2]]
    assert [r["dropped"] for r in run.rounds] == [1, 0, 0] and [r["absent"] for r in run.rounds] == [1, 2, 2]
    assert_simulated(run, tables, [[2], [2], [2]], folder)
    assert run.folder is not None
    bias, weight = sorted(load_file(run.folder / "model.safetensors").values(), key=torch.Tensor.dim)
    x, y = (torch.from_numpy(np.concatenate([one[name] for one in samples])) for name in ("x_test", "y_test"))
    logits = x @ weight.T + bias
    assert run.rounds[-1]["accuracy"] == pytest.approx((logits.argmax(1) == y).double().mean().item())
    assert run.rounds[-1]["loss"] == pytest.approx(torch.nn.functional.cross_entropy(logits, y).item(), rel=1e-5)
    counted = tuple(sum(r[name] for r in run.rounds) for name in ("wire_down", "wire_up"))
    check_bytes(cast(tuple[int, int], counted), passed.since(), messages=3 * 5)


@pytest.mark.parametrize(
    "has_database", [pytest.param(False, id="memory", marks=on_request), pytest.param(True, id="database")]
)
def test_a_killed_server_goes_on_where_it_was(has_database: bool, pair: FaultyFederation, tmp_path: Path) -> None:
    """SIGKILL to the SuperLink and all it started, in the second round.

    A SuperLink without a database has forgotten its nodes, which are started again; with one they live on.
    """
    federation, link, two = pair, pair.link, {"name": "natural", "clients": 2}
    tables = three_clients("feddc", rounds=2, evaluation={"every": 2}, partition=two)
    command = [str(word) for word in cast(list[str], link.running["superlink"].args)]
    if has_database:
        command += ["--database", str(tmp_path / "link.db")]
        federation.restart_superlink(command)
    federation.start(tmp_path, tables, {"2-0": "hold"})
    for client in range(2):
        federation.start_node(client)
    federation.wait_for_message("2-0")
    federation.restart_superlink(command)
    federation.go("2-0")
    for client in () if has_database else range(2):
        federation.start_node(client)
    link.start_run(tmp_path / "app")
    run = federation.finish(tmp_path)
    assert len(run.rounds) == 2 and not any("absent" in r for r in run.rounds)
    assert_simulated(run, tables, [[0, 1]] * 2, tmp_path)
