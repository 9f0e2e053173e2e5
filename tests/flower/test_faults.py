"""Clients and servers that are killed, late, false or new, as real processes; what they send is bounded and never unpickled.

Most runs share one federation on this machine. What came out is compared with a simulation in which those take part who did: weights
agree up to 1e-6, the same numbers where processes round alike. `ASKEW_LOOPBACK=all` plays the longer ones too.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch
from hands import Hands, deployed, page, simulated, written
from safetensors.torch import load_file

import askew.flower
from askew.data.federation import Federation
from askew.experiment.config import Config
from askew.experiment.store import Run, load
from askew.flower.app import PACKAGE, write_app
from askew.flower.deployment_data import DataModule, read_page
from askew.flower.server import Rules, serve
from askew.flower.wire import Payload

pytest.importorskip("flwr", reason="needs the extra flower")

from faulty import CLIENT
from test_loopback import Meter, check_bytes
from test_wire import by_flower

from askew.flower import server_app as server_side
from askew.flower.loopback import HOST, Loopback

TOLERANCE = 1e-6
PATIENCE = 300.0  # seconds for anything to happen
HERE = Path(__file__).parent
longer = pytest.mark.skipif(os.environ.get("ASKEW_LOOPBACK") != "all", reason="takes long; set ASKEW_LOOPBACK=all")

DATA = """\
from pathlib import Path

import numpy as np


def client(node):
    with np.load(Path({folder!r}) / f"{{node['partition-id']}}.npz") as kept:
        return (kept["x"], kept["y"]), None, (kept["x_test"], kept["y_test"])
"""


class Door(Meter):
    """A meter that outlives the server that it leads to."""

    def serve(self) -> None:
        with suppress(OSError), self.door:
            while True:
                near, _ = self.door.accept()
                try:
                    far = socket.create_connection((HOST, self.target))
                except OSError:
                    near.close()
                    continue
                threading.Thread(target=self.lead, args=(near, far), daemon=True).start()


class Case(NamedTuple):
    """A federation and a desk with orders for its clients."""

    link: Loopback
    meters: list[Door]
    desk: Path

    def start(
        self, folder: Path, tables: dict[str, Any], orders: dict[str, str], data: Path | None = None, **rules: Any
    ) -> None:
        for path in self.desk.iterdir():
            path.unlink()
        (self.desk / "orders.json").write_text(json.dumps(orders))
        kept = Rules(out=str(folder / "runs"), wait=PATIENCE, hello=PATIENCE, **{"timeout": PATIENCE, **rules})
        write_app(written(tables, folder / "page"), folder / "app", data, kept)
        (folder / "app" / PACKAGE / "client.py").write_text(CLIENT)
        self.link.run(folder / "app")

    def go(self, place: str) -> None:
        (self.desk / f"go-{place}").touch()

    def until(self, what: Callable[[], Any]) -> None:
        """Wait while the run is on."""
        end = time.monotonic() + PATIENCE
        while not what():
            assert time.monotonic() < end and self.link.running["run"].poll() is None, self.log("run")
            time.sleep(0.1)

    def came(self, place: str) -> None:
        """Wait until a client has a round's letter."""
        self.until((self.desk / f"came-{place}").exists)

    def log(self, name: str) -> str:
        path = self.link.folder / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def said(self, client: int, words: str) -> int:
        return self.log(f"node-{client}").count(words)

    def begin(self, client: int) -> None:
        self.link.node(client, self.meters[client].port)

    def node(self, client: int) -> None:
        """A client's node, until it is there."""
        before = self.said(client, "SuperNode ID")
        self.begin(client)
        self.until(lambda: self.said(client, "SuperNode ID") > before)

    def superlink(self, words: list[str]) -> None:
        """Kill the SuperLink and all it started, and start it again."""
        for process in family(self.link.running["superlink"].pid):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.link.start("superlink", *words)
        self.link.listens("superlink", self.link.port)

    def recorded(self, folder: Path, rounds: int) -> None:
        """Wait until so many rounds are played."""
        self.until(lambda: sum(len(p.read_text().splitlines()) for p in folder.glob("runs/*/rounds.jsonl")) >= rounds)

    def end(self, folder: Path) -> Run:
        assert self.link.running["run"].wait(PATIENCE) == 0, self.log("run")
        return load(next((folder / "runs").iterdir()))


@contextmanager
def federation(folder: Path) -> Iterator[Case]:
    """Two nodes that reach the link through meters; a third one comes when it is started."""
    (folder / "desk").mkdir(parents=True)
    paths = os.pathsep.join([str(HERE), str(HERE.parents[1] / "src")])
    env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "ASKEW_DESK": str(folder / "desk")}
    with Loopback(folder / "flower", 0, env=env) as link:
        link.clients = 3
        case = Case(link, [Door(link.port) for _ in range(3)], folder / "desk")
        for client in range(2):
            case.begin(client)
        yield case
        for meter in case.meters:
            meter.door.close()


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    """One that several runs share."""
    with federation(tmp_path_factory.mktemp("faults")) as shared:
        yield shared


def tables(key: str, **more: Any) -> dict[str, Any]:
    return page({"name": key}, partition={"name": "natural", "clients": 3}, participation={"name": "full"}) | more


def assert_simulated(ours: Run, whole: dict[str, Any], rounds: Sequence[Sequence[int]], folder: Path) -> None:
    """The model is that of a simulation in which these take part."""
    path = folder / "trace.json"
    path.write_text(json.dumps(rounds))
    theirs = simulated(whole | {"participation": {"name": "trace", "path": str(path)}}).model
    assert ours.folder is not None and ours.finished
    model = load_file(ours.folder / "model.safetensors")
    assert max((model[n] - v).abs().max().item() for n, v in theirs.items()) <= TOLERANCE


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Case]:
    """One in which no client was before."""
    with federation(tmp_path / "federation") as own:
        yield own


def test_clients_join_late_answer_late_are_killed_and_come_again(alone: Case, tmp_path: Path) -> None:
    """Everybody who is there is asked, and two answers are waited for; SCAFFOLD's variates show who went on from which round."""
    case = alone
    whole = tables("scaffold", rounds=6, participation={"name": "uniform", "cohort": 2}, evaluation={"every": 6})
    orders = {"1-0": "hold", "2-0": "hold", "3-1": "late", "4-0": "hold", "4-2": "hold", "5-0": "hold", "6-1": "late"}
    case.start(tmp_path, whole, orders, nodes=2, spare=1.0)
    case.came("1-0")
    case.node(2)  # joins while round 1 is played, is asked who it is when round 2 begins
    case.go("1-0")
    case.came("2-0")
    case.until(lambda: case.said(2, "Sent successfully"))
    case.go("2-0")
    case.recorded(tmp_path, 3)  # without client 1, whose answer comes now
    case.go("3-1")
    case.came("4-2")
    case.link.stop("node-2", kill=True)
    case.node(2)
    before = case.said(2, "Sent successfully")
    case.go("4-0")
    case.came("5-0")
    case.until(lambda: case.said(2, "Sent successfully") > before)
    case.go("5-0")
    ours = case.end(tmp_path)
    came = [[0, 1], [0, 1], [0, 2], [0, 1], [0, 1], [0, 2]]
    assert [r["participants"] for r in ours.rounds] == came
    assert [r.get("absent", 0) for r in ours.rounds[:4]] == [0, 0, 1, 1] and ours.rounds[5]["absent"] == 1
    assert not any(r["dropped"] for r in ours.rounds)
    assert "round 3: client 1: no answer within 300 s, or enough others came before" in case.log("run")
    assert "client 2 is now node" in case.log("run")
    assert_simulated(ours, whole, came, tmp_path)


@longer
@pytest.mark.parametrize("answers", [1, 2])
def test_an_answer_that_does_not_come_in_time_is_not_waited_for(alone: Case, tmp_path: Path, answers: int) -> None:
    """One of two clients is silent in round 1 until the time is over; where two answers are needed, the round changes nothing."""
    whole = tables("scaffold", rounds=2, evaluation={"every": 2})
    alone.start(tmp_path, whole, {"1-1": "late"}, nodes=2, answers=answers, timeout=30.0)
    alone.came("1-1")
    alone.recorded(tmp_path, 1)
    alone.go("1-1")
    ours = alone.end(tmp_path)
    assert ours.rounds[0]["absent"] == 1 and ours.rounds[1]["participants"] == [0, 1]
    assert "round 1: client 1: no answer within 30 s" in alone.log("run")
    assert ("round 1 is thrown away: 1 answers came, at least 2 are needed." in alone.log("run")) == (answers == 2)
    assert_simulated(ours, whole, [[0] if answers == 1 else [], [0, 1]], tmp_path)


def samples(folder: Path) -> list[dict[str, np.ndarray]]:
    """What the simulator gives to the clients, and test data of their own."""
    config = Config.build(tables("fedavg"))
    fed = Federation(config.data, config.partition, config.seed)
    pool, owned = fed.gather([0, 1, 2])
    kept = [{"x": pool.x[own].numpy(), "y": pool.y[own].numpy()} for own in owned]
    kept = [one | {"x_test": one["x"][: 5 + i], "y_test": one["y"][: 5 + i]} for i, one in enumerate(kept)]
    for client, one in enumerate(kept):
        np.savez(folder / f"{client}.npz", **one)
    return kept


REFUSED = {
    "1-0": ("shape", "client 0, tensor"),
    "1-1": ("nan", "client 1 sent numbers that are not finite"),
    "2-0": ("round", "client 0: this is of round 99, expected round 2"),
    "2-1": ("model", "came, expected <f4"),
    "3-0": ("bytes", "bytes came, at most"),
    "3-1": ("raise", "client 1: "),
}


def test_garbage_is_refused_and_the_clients_measure_the_model(case: Case, tmp_path: Path) -> None:
    """Two of three send something else in every round; nobody but the clients has test data."""
    whole = tables("fedavg", rounds=3, model={"name": "softmax"}, evaluation={"every": 3})
    (tmp_path / "data.py").write_text(DATA.format(folder=str(tmp_path)))
    kept, log = samples(tmp_path), len(case.log("run"))
    before = [sum(m.down for m in case.meters), sum(m.up for m in case.meters)]
    case.start(tmp_path, whole, {place: order for place, (order, _) in REFUSED.items()}, tmp_path / "data.py")
    if "node-2" not in case.link.running:
        case.node(2)
    ours, told = case.end(tmp_path), case.log("run")[log:].splitlines()
    for place, (_, sentence) in REFUSED.items():
        lines = [line for line in told if f"round {place[0]}: " in line and sentence in line]
        assert len(lines) == 1, (place, told)
    assert not any("Traceback" in line for line in told)
    assert [r["participants"] for r in ours.rounds] == [[1, 2], [2], [2]] and [r["dropped"] for r in ours.rounds] == [
        1,
        0,
        0,
    ]
    assert [r["absent"] for r in ours.rounds] == [1, 2, 2]
    assert_simulated(ours, whole, [[2], [2], [2]], tmp_path)
    assert ours.folder is not None
    bias, weight = sorted(load_file(ours.folder / "model.safetensors").values(), key=torch.Tensor.dim)
    x, y = (torch.from_numpy(np.concatenate([one[name] for one in kept])) for name in ("x_test", "y_test"))
    out = x @ weight.T + bias
    assert ours.rounds[-1]["accuracy"] == pytest.approx((out.argmax(1) == y).double().mean().item())
    assert ours.rounds[-1]["loss"] == pytest.approx(torch.nn.functional.cross_entropy(out, y).item(), rel=1e-5)
    counted = [sum(r[name] for r in ours.rounds) for name in ("wire_down", "wire_up")]
    seen = [sum(m.down for m in case.meters) - before[0], sum(m.up for m in case.meters) - before[1]]
    print("rounds of", [round(r["seconds"], 1) for r in ours.rounds], "s;", counted, "bytes counted,", seen, "seen")
    check_bytes((counted[0], counted[1]), (seen[0], seen[1]), messages=3 * 5)


def family(process: int) -> list[int]:
    """A process and all that it started, Flower's children in sessions of their own among them."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents.setdefault(int(path.read_text().rpartition(")")[2].split()[1]), []).append(int(path.parent.name))
    found = [process]
    for one in found:
        found += parents.get(one, [])
    return found


@pytest.mark.parametrize("kept", [pytest.param(False, id="memory", marks=longer), pytest.param(True, id="database")])
def test_a_killed_server_goes_on_where_it_was(kept: bool, case: Case, tmp_path: Path) -> None:
    """SIGKILL to the SuperLink and all it started, in the second round.

    A SuperLink without a database has forgotten its nodes, which are started again; with one they live on.
    """
    whole, link = tables("feddc", rounds=2, evaluation={"every": 2}), case.link
    words = [str(word) for word in cast(list[str], link.running["superlink"].args)]
    if kept:
        words += ["--database", str(tmp_path / "link.db")]
        case.superlink(words)
    case.start(tmp_path, whole, {"2-0": "hold"})
    for client in range(3):
        if kept or client == 2:
            case.begin(client)
    case.came("2-0")
    case.superlink(words)
    case.go("2-0")
    for client in () if kept else range(3):
        case.begin(client)
    link.run(tmp_path / "app")
    ours = case.end(tmp_path)
    assert len(ours.rounds) == 2 and not any("absent" in r for r in ours.rounds)
    assert_simulated(ours, whole, [[0, 1, 2]] * 2, tmp_path)


# within this process --------------------------------------------------------------------------------------------


class Slow(Hands):
    """Answers come one at a look, in the order in which they were asked for."""

    def collect(self, names: Any) -> Any:
        return super().collect(list(names)[:1])


@pytest.mark.parametrize("broken", [torch.nan, None])
def test_a_spare_client_stands_in_for_one_that_sends_garbage(broken: float | None, tmp_path: Path) -> None:
    """Three answers are wanted of five; those of client 0 are no good."""
    spoil = lambda kind, client, letter, told: (
        told
        if (kind, client) != ("train", 0)
        else told._replace(
            tensors={} if broken is None else {n: torch.full_like(t, broken) for n, t in told.tensors.items()}
        )
    )
    config = read_page(written(page({"name": "fedavg"}), tmp_path / "app"))
    post, said = Slow(config, tmp_path / "clients", change=spoil), list[str]()
    run = serve(config, post, Rules(out=str(tmp_path / "runs"), spare=1.0), None, said.append)
    used = [[i for i in r["participants"] if i] for r in run.rounds]
    assert used == [[1, 2, 3]] * 4 and sum("client 0" in text for text in said) == 4


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda told: told._replace(tensors={"x": torch.zeros(9)}), "sent tensors named 'x', expected none at all"),
        (
            lambda told: told._replace(numbers={**told.numbers, "more": "x" * 10**7}),
            "bytes came, at most 1,048,576 are allowed",
        ),
        (
            lambda told: told._replace(numbers={**told.numbers, "more": [b"x" * 10**7]}),
            "bytes came, at most 1,048,576 are allowed",
        ),
        (
            lambda told: told._replace(numbers={**told.numbers, "version": "1\n2\x1b[2J"}),
            "this is of version 1 2 [2J, expected version",
        ),
    ],
)
def test_a_false_hello_is_refused(spoil: Callable[[Payload], Payload], sentence: str, tmp_path: Path) -> None:
    said: list[str] = []
    change = lambda kind, client, letter, told: spoil(told) if (kind, client) == ("query", 3) else told
    deployed(page({"name": "fedavg"}), tmp_path, {"nodes": 4}, change=change, said=said)
    assert said and sentence in said[0] and "\n" not in said[0] and "\x1b" not in said[0]


def test_scores_that_cannot_be_are_left_out(tmp_path: Path) -> None:
    """Of another length, or no numbers: they would be in the mean."""
    false = {0: [0.5], 1: [0.5, math.nan], 2: [10**9]}
    module = DataModule(
        lambda node: ((torch.ones(9, 8), torch.arange(9) % 3), None, (torch.ones(3, 8), torch.arange(3)))
    )
    change = lambda kind, client, letter, told: (
        told._replace(numbers={**told.numbers, "scores.global": false[client]})
        if kind == "evaluate" and client in false
        else told
    )
    ours, _, said = deployed(page({"name": "fedavg"}), tmp_path, data=module, change=change)
    assert (
        len([text for text in said if "scores must be lists of 2 finite numbers" in text]) == 6
        and ours.rounds[-1]["accuracy"] <= 1
    )


def test_a_client_takes_no_more_than_it_expects(tmp_path: Path) -> None:
    """Each way a message is bounded by what must be in it."""
    config = read_page(written(page({"name": "fedavg"}), tmp_path / "app"))
    post = Hands(config, tmp_path / "clients")
    asked: list[Payload] = []
    deployed(
        page({"name": "fedavg"}), tmp_path, change=lambda kind, client, letter, told: (asked.append(letter), told)[1]
    )
    letter = next(one for one in asked if "x" in one.tensors)
    client = letter.numbers["client"]
    for large in (
        letter._replace(tensors=letter.tensors | {"x": torch.zeros(10**6)}),
        letter._replace(numbers={**letter.numbers, "m": "x" * 10**7}),
    ):
        told = post.answer("train", 100 + client, post.carry(large))
        assert isinstance(told, str) and "bytes came, at most" in told


def test_what_flower_stumbles_over_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that cannot be read, and one whose reason is a page long."""
    from flwr.app import Error, Message, RecordDict
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("run_id", "node_id", "task_id"):
        monkeypatch.setattr(TaskIdentity, f"_{name}", 1)
    told: list[str] = []
    monkeypatch.setattr(server_side, "log", lambda level, text, *more: told.append(text % more))
    asked = Message(RecordDict(), 7, "train")
    asked.metadata.__dict__["_message_id"] = "one"
    reply = Message(Error(2, "a\nb" + "c" * 10**6), reply_to=asked)

    class Torn:
        def pull_messages(self, names: list[str]) -> list[Message]:
            if names == ["false"]:
                raise ValueError("no\nobject")
            return [reply]

    post = server_side.GridPost(cast(Any, Torn()))
    assert post.collect(["false"]) == {} and "Flower cannot read (no object)" in told[0]
    answer = post.collect(["one"])["one"]
    assert isinstance(answer, str) and answer.startswith("a bccc") and len(answer) == 1000
    assert post.collect(["another"]) == {}  # nobody asked for it


def test_nothing_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole run with client state, its messages in Flower's bytes, in a world without pickle."""

    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("pickle")

    for owner, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(owner, name, forbidden)
    ours, _, said = deployed(page({"name": "scaffold"}), tmp_path, carry=by_flower)
    assert ours.finished and said == []
    text = "".join(path.read_text() for path in Path(askew.flower.__file__).parent.glob("*.py"))
    assert not re.search(r"pickle\.|torch\.load|np\.load\(|allow_pickle=True|\beval\(|\bexec\(|shelve|marshal", text)
