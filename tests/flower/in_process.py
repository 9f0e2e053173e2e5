"""Deployments within one process: a transport whose nodes answer at once, small runs, comparisons with simulations."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from askew.algorithms import algorithms
from askew.core.algorithm import Algorithm
from askew.core.types import State
from askew.errors import AskewError
from askew.experiment.config import Config
from askew.experiment.launch import run_config
from askew.experiment.store import Run
from askew.experiment.toml import to_toml
from askew.flower.client import DeployedClient, answer_query
from askew.flower.client_state import FileStore
from askew.flower.deployment_data import ClientSetup, DataModule, DeploymentConfig, NodeConfig, read_config
from askew.flower.rules import DeploymentRules
from askew.flower.server import serve
from askew.flower.transport import Reply, Warn
from askew.flower.wire import Payload, RawPayload, encode_payload, from_records, to_records

# Is given the kind of a message, its client, its payload and the reply; returns what to use instead, None for no reply.
ChangeReply = Callable[[str, int, Payload, Payload], Reply | Payload | None]

OF_DEPLOYMENTS = ("wire_up", "wire_down", "unreachable")  # keys of records that simulations do not have
FIRST_NODE = 100  # the node of client 0; client i is node 100 + i
SCORES = ("accuracy", "loss")
NO_NORM = {"name": "mlp", "hidden": [8], "norm": "none"}
WIDE = {"name": "mlp", "hidden": [4096], "norm": "none"}  # enough numbers to measure a distribution
VARIANTS: dict[str, dict[str, Any]] = {key: {"name": key} for key in algorithms} | {
    "scaffold-I": {"name": "scaffold", "option": "I"},
    "fedga-memory": {"name": "fedga", "form": "memory"},
    "fedpdc-prox": {"name": "fedpdc", "penalty": "prox", "adaptive": True},
    "lossbias-each": {"name": "lossbias", "measure": "mean_over_steps"},
    "fedbn-init": {"name": "fedbn", "eval": "server_init"},
}


def slow_except(fast: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Parameters of a test, of which all but the fast ones are left to `make test-all`."""
    return [case if case in fast else pytest.param(case, marks=pytest.mark.slow) for case in cases]


# small runs -----------------------------------------------------------------------------------------------------


def needs_full_gradient(alg: Algorithm) -> bool:
    return any("gradient" in (*phase.before, *phase.each, *phase.after) for phase in alg.phases())


def small_run(method: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """The tables of a small run of a method, with batch norm where the method allows it."""
    alg = algorithms[method["name"]].build({k: v for k, v in method.items() if k != "name"})
    data = {"name": "synthetic", "dim": 8, "labels": 3, "samples": 30, "sigma": 0.7, "alpha": 1.0, "beta": 1.0}
    local = {"epochs": 2, "batch": 8, "lr": 0.05, "momentum": 0.5, "weight_decay": 0.01, "clip": 1.0, "decay": 0.9}
    return {
        "seed": 3,
        "rounds": 4,
        "data": data | {"test_clients": 5},
        "partition": {"name": "natural", "clients": 5},
        "participation": {"name": "uniform", "cohort": 3},
        "model": {"name": "mlp", "hidden": [8], "norm": "none" if needs_full_gradient(alg) else "batch"},
        "algorithm": dict(method),
        "local": local,
        "evaluation": {"every": 2},
        "engine": {"name": "sequential", "device": "cpu"},
    } | changes


def private_run(key: str = "fedavg", privacy: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """A small run of a method without batch norm, with this table [privacy]."""
    tables = small_run(VARIANTS[key], **{"model": NO_NORM, **changes})
    return tables if privacy is None else tables | {"privacy": privacy}


def wide_run() -> dict[str, Any]:
    """One round of FedAvg with equal weights and a model of many numbers."""
    tables = private_run(model=WIDE, rounds=1, participation={"name": "full"})
    return tables | {"algorithm": {"name": "fedavg", "weighting": "uniform"}}


def with_participants(tables: dict[str, Any], rounds: Sequence[Sequence[int]], folder: Path) -> dict[str, Any]:
    """The same run with these participants, round by round."""
    path = folder / f"trace-{len(list(folder.glob('trace-*')))}.json"
    path.write_text(json.dumps(rounds))
    return tables | {"rounds": len(rounds), "participation": {"name": "trace", "path": str(path)}}


def write_config(tables: dict[str, Any], folder: Path) -> Path:
    """Write the tables as a TOML file and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "run.toml"
    path.write_text(to_toml(tables))
    return path


def encode_as_flower(payload: Payload) -> RawPayload:
    """The payload through the bytes in which Flower's processes exchange records."""
    pytest.importorskip("flwr", reason="needs Flower: pip install -e '.[flower]'")
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

    records = to_records(payload)
    contents = {name: thing.deflate() for name, thing in get_all_nested_objects(records).items()}
    return from_records(inflate_object_from_contents(records.object_id, contents), "somebody")


# deployments ----------------------------------------------------------------------------------------------------


class InProcessTransport:
    """A transport whose nodes are in this process, one for each client.

    `data` is the clients' data module, `encode` makes the bytes of a payload, `change_reply` may spoil or drop a reply,
    and `late_clients` are not connected before the first training message.
    """

    def __init__(
        self,
        config: DeploymentConfig,
        folder: Path,
        data: DataModule | None = None,
        encode: Callable[[Payload], RawPayload] = encode_payload,
        change_reply: ChangeReply | None = None,
        late_clients: Sequence[int] = (),
    ) -> None:
        self.config, self.folder, self.data = config, folder, data
        self.encode, self.change_reply, self.late_clients = encode, change_reply, late_clients
        self.bytes_sent = self.bytes_received = 0
        self.sent: list[tuple[str, int, Payload]] = []  # all messages: kind, client, payload
        self.replies: dict[str, Reply] = {}
        self.secrets: dict[int, dict[str, Any]] = {}  # by node, as Flower's context keeps them

    def connected_nodes(self) -> list[int]:
        begun = any(kind == "train" for kind, _, _ in self.sent)
        clients = range(self.config.client_count)
        return [FIRST_NODE + client for client in clients if begun or client not in self.late_clients]

    def node_config(self, node: int) -> NodeConfig:
        return {"partition-id": node - FIRST_NODE}

    def send(self, kind: str, payloads: Mapping[int, Payload], group: str, timeout: float) -> dict[str, int]:
        nodes = {f"{len(self.sent) + n}": node for n, node in enumerate(payloads)}
        for message_id, node in nodes.items():
            payload, client = payloads[node], node - FIRST_NODE
            self.sent.append((kind, client, payload))
            raw = self.encode(payload)
            self.bytes_sent += raw.bytes
            reply: Reply | Payload | None = self.answer(kind, node, raw)
            if self.change_reply is not None and isinstance(reply, Payload):
                reply = self.change_reply(kind, client, payload, reply)
            if isinstance(reply, Payload):
                reply = self.encode(reply)
                self.bytes_received += reply.bytes
            if reply is not None:
                self.replies[message_id] = reply
        return nodes

    def receive(self, message_ids: Collection[str]) -> dict[str, Reply]:
        return {name: self.replies.pop(name) for name in message_ids if name in self.replies}

    def answer(self, kind: str, node: int, payload: RawPayload) -> Payload | str:
        """The reply of a node that remembers no more than a new process would: its file and its secrets."""
        try:
            classes = None if kind == "query" else payload.numbers["classes"]
            make_setup = lambda: ClientSetup(self.config, self.node_config(node), self.data, classes)
            if kind == "query":
                return answer_query(self.config, self.node_config(node), make_setup)
            setup = make_setup()
            store = FileStore(self.folder / f"client-{setup.client}.safetensors")
            answers = self.folder / f"client-{setup.client}-answers.safetensors"
            return DeployedClient(setup, store, self.secrets.setdefault(node, {}), answers).answer(kind, payload)
        except AskewError as e:
            return str(e)


class OneByOneTransport(InProcessTransport):
    """A transport that returns one reply at a time, in the order of the messages."""

    def receive(self, message_ids: Collection[str]) -> dict[str, Reply]:
        return super().receive(list(message_ids)[:1])


def deploy(
    tables: dict[str, Any],
    folder: Path,
    rules: Mapping[str, Any] | None = None,
    warnings: list[str] | None = None,
    transport_class: type[InProcessTransport] = InProcessTransport,
    say: Warn = lambda text: None,
    **options: Any,
) -> tuple[Run, InProcessTransport, list[str]]:
    """Deploy a run within this process; return the run, its transport and the server's warnings.

    `options` are those of the transport. A list of warnings that is handed in has them even if the run fails.
    """
    config = read_config(write_config(tables, folder / "app"), options.get("data"))
    warnings = [] if warnings is None else warnings
    transport = transport_class(config, folder / "clients", **options)
    short = {"out": str(folder / "runs"), "wait": 1.0, "timeout": 0.2, "hello": 5.0}
    rules = DeploymentRules.build(short | dict(rules or {}))
    run = serve(config, transport, rules, transport.data, warnings.append, say=say)
    return run, transport, warnings


# comparisons ----------------------------------------------------------------------------------------------------


def simulate(tables: dict[str, Any]) -> Run:
    return run_config(Config.build(tomllib.loads(to_toml(tables))))


def model_values(run: Run) -> torch.Tensor:
    return torch.cat([t.flatten() for t in run.model.values()]).double()


def models_equal(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], v) for n, v in other.items())


def largest_difference(one: State, other: State) -> float:
    """The largest absolute difference of two models, which must have the same names."""
    assert one.keys() == other.keys()
    return max((one[n] - v).abs().max().item() for n, v in other.items())


def assert_same_rounds(deployed: Run, simulated: Run) -> None:
    """Compare records, but for times and message sizes; scores up to rounding, as means are taken in another order."""
    assert len(deployed.rounds) == len(simulated.rounds)
    for one, other in zip(deployed.rounds, simulated.rounds, strict=True):
        assert {k: v for k, v in one.items() if k not in ("seconds", *OF_DEPLOYMENTS, *SCORES)} == {
            k: v for k, v in other.items() if k not in ("seconds", *SCORES)
        }
        for name in SCORES:
            assert one[name] == (None if other[name] is None else pytest.approx(other[name], rel=1e-12))
