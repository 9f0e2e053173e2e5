"""Clients with their own data: the same numbers as a simulation that holds all of it, and only counts are sent."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from in_process import (
    FIRST_NODE,
    VARIANTS,
    InProcessTransport,
    assert_same_rounds,
    deploy,
    models_equal,
    simulate,
    slow_except,
    small_run,
)

import askew
from askew.data.dataset import Dataset, Samples
from askew.data.federation import Federation
from askew.errors import AskewError
from askew.experiment.config import Config
from askew.flower.deployment_data import DataModule, NodeConfig
from askew.flower.wire import Payload

FEDAVG = small_run(VARIANTS["fedavg"])
OWN_DATA_METHODS = slow_except(
    ("scaffold", "lossbias", "fedga"), ("scaffold", "moon", "lossbias", "fedga", "fedvarp", "feddc", "fednova")
)


@cache
def federation(needs: tuple[str, ...] = ()) -> Federation:
    """The simulator's federation."""
    config = Config.build(FEDAVG)
    return Federation(config.data, config.partition, config.seed, needs=needs)


def samples_of(client: int) -> Samples:
    """What the simulator gives to a client."""
    pool, (own,) = federation().gather([client])
    return Samples(pool.x[own], pool.y[own])


# functions of data modules


def simulated_client(node: NodeConfig) -> Any:
    return samples_of(int(node["partition-id"])), None, None


def server_test_set() -> Any:
    return None, federation().test


def public_and_test_set() -> Any:
    fed = federation(("public",))
    return fed.public, fed.test


def client_with_more_classes(node: NodeConfig) -> Any:
    """Client i has 2 + i classes."""
    return (torch.randn(12, 8), torch.arange(12) % (2 + int(node["partition-id"]))), None, None


def client_with_more_samples(node: NodeConfig) -> Any:
    """Client i has 2 + i classes and 7 + i samples."""
    (x, y), _, _ = client_with_more_classes(node)
    return (x[: 7 + int(node["partition-id"])], y[: 7 + int(node["partition-id"])]), None, None


def client_that_names_classes(node: NodeConfig) -> Any:
    """Client i has samples of 2 + i classes, and says that there are 6."""
    train, _, _ = client_with_more_classes(node)
    return Dataset(Samples(*train), Samples(*train), 6)


# the simulator's numbers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", OWN_DATA_METHODS)
def test_clients_with_their_own_data_give_the_simulators_run(key: str, tmp_path: Path) -> None:
    """With the simulator's test set at the server, to the last number; clients hold out validation data themselves."""
    tables = small_run(VARIANTS[key])
    deployed, _, warnings = deploy(tables, tmp_path, data=DataModule(simulated_client, server_test_set))
    simulated = simulate(tables)
    assert warnings == []
    assert_same_rounds(deployed, simulated)
    assert models_equal(deployed.model, simulated.model)


def test_a_public_set_is_the_servers_own(tmp_path: Path) -> None:
    """FedPDC's: the simulator draws it from other clients, a deployment has it from the server's function."""
    tables = small_run(VARIANTS["fedpdc-prox"])
    deployed, _, _ = deploy(tables, tmp_path, data=DataModule(simulated_client, public_and_test_set))
    simulated = simulate(tables)
    assert_same_rounds(deployed, simulated)
    assert models_equal(deployed.model, simulated.model)
    sentence = r"FedPDC needs public data at the server; let the data module's server\(\) return"
    with pytest.raises(AskewError, match=sentence):
        deploy(tables, tmp_path / "without", data=DataModule(simulated_client))


def test_given_validation_data_are_measured_and_not_trained_on(tmp_path: Path) -> None:
    validation = (torch.zeros(4, 8), torch.zeros(4, dtype=torch.long))
    module = DataModule(lambda node: (samples_of(int(node["partition-id"])), validation, None), server_test_set)
    tables, losses = small_run(VARIANTS["lossbias"]), list[float]()

    def note(kind: str, client: int, payload: Payload, reply: Payload) -> Payload:
        losses.extend(t.item() for n, t in reply.tensors.items() if n == "up.validation")
        return reply

    deployed, _, _ = deploy(tables, tmp_path, data=module, change_reply=note)
    assert deployed.federation["sizes"] == federation().sizes.tolist()
    assert len(losses) == 12 and len({round(v, 4) for v in losses[:3]}) == 3  # one set, three models
    without, _, _ = deploy(tables, tmp_path / "without", data=DataModule(simulated_client, server_test_set))
    sizes = zip(deployed.federation["sizes"], without.federation["sizes"], strict=True)
    assert all(a > b for a, b in sizes)  # without given data a fifth is held out
    deployed, _, _ = deploy(FEDAVG, tmp_path / "fedavg", data=module)
    assert models_equal(deployed.model, simulate(FEDAVG).model)  # as if there were none


def test_a_client_sends_no_more_than_counts_about_its_data(tmp_path: Path) -> None:
    replies: list[Payload] = []

    def note(kind: str, client: int, payload: Payload, reply: Payload) -> Payload:
        replies.append(reply)
        return reply

    deployed, _, _ = deploy(FEDAVG, tmp_path, data=DataModule(simulated_client, server_test_set), change_reply=note)
    assert replies[0].numbers.keys() == {"client", "samples", "classes", "shape", "real", "digest", "version"}
    assert not replies[0].tensors
    assert "labels" not in deployed.federation and deployed.federation["sizes"] == federation().sizes.tolist()
    assert deployed.config["data"]["name"] == "own" and deployed.config["partition"]["name"] == "natural"


def test_without_a_test_set_at_the_server_the_clients_evaluate(tmp_path: Path) -> None:
    """Each on its own test samples; the mean over samples is the score on all of them."""

    def client(node: NodeConfig) -> Any:
        i = int(node["partition-id"])
        x, y = samples_of(i)
        return (x, y), None, None if i == 2 else (x[: 3 + i], y[: 3 + i])  # client 2 has no test set

    tables = small_run(VARIANTS["fedavg"], model={"name": "softmax"}, evaluation={"per_class": True})
    deployed, transport, warnings = deploy(tables, tmp_path, data=DataModule(client))
    x, y = (torch.cat([samples_of(i)[part][: 3 + i] for i in (0, 1, 3, 4)]) for part in (0, 1))
    assert warnings == [] and models_equal(deployed.model, simulate(tables).model)
    weight, bias = deployed.model.values()
    logits = x @ weight.T + bias
    accuracy, loss = (logits.argmax(1) == y).double().mean().item(), torch.nn.functional.cross_entropy(logits, y).item()
    last = deployed.rounds[-1]
    assert (last["accuracy"], last["loss"]) == (pytest.approx(accuracy), pytest.approx(loss, rel=1e-5))
    right = (logits.argmax(1) == y).double()
    assert last["class_accuracy"] == pytest.approx({str(k): right[y == k].mean().item() for k in range(3)})
    assert {client for kind, client, _ in transport.sent if kind == "evaluate"} == {0, 1, 2, 3, 4}


def test_a_regression_has_no_accuracy(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    data = [(rng.normal(size=(20, 8)), rng.normal(size=(20, 1))) for _ in range(5)]
    module = DataModule(lambda node: (data[int(node["partition-id"])], None, data[0]))
    tables = small_run(VARIANTS["fedavg"], model={"name": "softmax"})
    deployed, _, warnings = deploy(tables, tmp_path, data=module)
    assert warnings == [] and deployed.rounds[-1]["accuracy"] is None and 0 < deployed.rounds[-1]["loss"] < 10


# numbers of classes ---------------------------------------------------------------------------------------------


def test_classes_are_counted_over_all_clients(tmp_path: Path) -> None:
    deployed, _, warnings = deploy(FEDAVG, tmp_path, data=DataModule(client_with_more_classes))
    assert warnings == [] and deployed.federation["classes"] == 6
    late: dict[str, Any] = {"rules": {"nodes": 4}, "late_clients": [4]}
    deployed, _, warnings = deploy(FEDAVG, tmp_path / "late", data=DataModule(client_with_more_classes), **late)
    sentence = "client 4 has 6 classes, and the run was begun with 5; let client(node) return"
    assert sentence in warnings[0] and deployed.finished
    deployed, _, warnings = deploy(FEDAVG, tmp_path / "named", data=DataModule(client_that_names_classes), **late)
    assert warnings == [] and any(4 in r["participants"] for r in deployed.rounds)


def test_a_restarted_server_knows_the_clients_that_it_knew(tmp_path: Path) -> None:
    """Client 4, which alone has the last class, is not connected when the server starts again."""

    def interrupt(kind: str, client: int, payload: Payload, reply: Payload) -> Payload:
        if kind == "train" and payload.numbers["round"] == 2:
            raise KeyboardInterrupt
        return reply

    tables, module = small_run(VARIANTS["scaffold"]), DataModule(client_with_more_samples)
    with pytest.raises(KeyboardInterrupt):
        deploy(tables, tmp_path, data=module, change_reply=interrupt)
    continued, _, warnings = deploy(tables, tmp_path, {"nodes": 4}, data=module, late_clients=[4])
    whole, _, _ = deploy(tables, tmp_path / "whole", data=module)
    assert warnings == [] and continued.federation == whole.federation and continued.federation["classes"] == 6
    assert continued.finished and len(continued.rounds) == 4
    assert continued.facts["reason"] == whole.facts["reason"] == "5 clients, each with its own data"


# numbers of samples ---------------------------------------------------------------------------------------------


def sizes_of_rounds(transport: InProcessTransport, client: int) -> dict[int, float]:
    """By round: the relative size that a client was sent."""
    trained = [payload.numbers for kind, asked, payload in transport.sent if kind == "train" and asked == client]
    return {numbers["round"]: numbers["size"] for numbers in trained}


def test_a_client_that_joins_later_changes_no_relative_size(tmp_path: Path) -> None:
    """Also not after a restart: sums of the server hold what was weighted in the unit of the first round."""

    def client(node: NodeConfig) -> Any:
        count = 60 if node["partition-id"] == 4 else 12
        return (torch.ones(count, 8), torch.arange(count) % 3), None, None

    def interrupt(kind: str, client: int, payload: Payload, reply: Payload) -> Payload:
        if kind == "train" and payload.numbers["round"] == 4:
            raise KeyboardInterrupt
        return reply

    tables = small_run({"name": "scaffold", "weighting": "samples"}, participation={"name": "full"}, rounds=6)
    late: dict[str, Any] = {"rules": {"nodes": 4}, "late_clients": [4], "data": DataModule(client)}
    whole, transport, warnings = deploy(tables, tmp_path / "whole", **late)
    assert sizes_of_rounds(transport, 0) == dict.fromkeys(range(1, 7), 1.0)
    assert sizes_of_rounds(transport, 4) == dict.fromkeys(range(2, 7), 5.0)
    assert len(warnings) == 1 and "client 4 joins with 60 training samples, and relative sizes" in warnings[0]
    with pytest.raises(KeyboardInterrupt):
        deploy(tables, tmp_path, change_reply=interrupt, **late)
    continued, transport, warnings = deploy(tables, tmp_path, data=DataModule(client))
    assert warnings == [] and sizes_of_rounds(transport, 0) == dict.fromkeys(range(4, 7), 1.0)
    assert continued.federation == whole.federation and models_equal(continued.model, whole.model)


@pytest.mark.parametrize("restarted", [False, True])
def test_a_client_that_comes_back_with_other_data_is_refused(restarted: bool, tmp_path: Path) -> None:
    """As another node in the middle of a run, or where the server was started again; the others are not touched."""
    rounds_before = 2

    class SecondNode(InProcessTransport):
        def trained(self) -> int:
            return max((payload.numbers["round"] for kind, _, payload in self.sent if kind == "train"), default=0)

        def connected_nodes(self) -> list[int]:
            changed = restarted or self.trained() >= rounds_before
            return [FIRST_NODE + (12 if changed and client == 2 else client) for client in range(5)]

        def node_config(self, node: int) -> NodeConfig:
            return {"partition-id": (node - FIRST_NODE) % 10, "more": node >= FIRST_NODE + 10}

    def interrupt(kind: str, client: int, payload: Payload, reply: Payload) -> Payload:
        if kind == "train" and payload.numbers["round"] > rounds_before:
            raise KeyboardInterrupt
        return reply

    def client(node: NodeConfig) -> Any:
        count = 36 if node.get("more") else 12
        return (torch.ones(count, 8), torch.arange(count) % 3), None, None

    tables, data = small_run(VARIANTS["fedavg"], participation={"name": "full"}), DataModule(client)
    if restarted:
        with pytest.raises(KeyboardInterrupt):
            deploy(tables, tmp_path, data=data, change_reply=interrupt)
    run, transport, warnings = deploy(tables, tmp_path, data=data, transport_class=SecondNode)
    sentence = "node 112 is left out: client 2 has 36 training samples, and had 12 when it joined this run; start it"
    assert warnings[0].startswith(sentence) and [r["participants"] for r in run.rounds[2:]] == [[0, 1, 3, 4]] * 2
    assert {*sizes_of_rounds(transport, 0).values()} == {1.0} and run.federation["sizes"] == [12] * 5


def test_a_run_does_not_begin_without_any_sample(tmp_path: Path) -> None:
    empty = lambda node: ((torch.ones(12, 8), torch.arange(12) % 3), None, None)
    no_samples = lambda kind, client, payload, reply: (
        reply._replace(numbers={**reply.numbers, "samples": 0}) if kind == "query" else reply
    )
    with pytest.raises(AskewError, match="none of the clients that came has training samples"):
        deploy(FEDAVG, tmp_path, data=DataModule(empty), change_reply=no_samples)


# what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("client", "sentence"),
    [
        (
            lambda node: None,
            "must return (train, validation, test), each a pair (x, y) or None, or an askew.Dataset, got NoneType",
        ),
        (lambda node: (None, None, None), "returned no training data"),
        (lambda node: ((torch.ones(2, 8), torch.ones(3)), None, None), "must hold as many targets as inputs"),
        (
            lambda node: ((torch.ones(2, 8), torch.ones(2).long()), None, (torch.ones(2, 7), torch.ones(2).long())),
            "prepare them alike",
        ),
    ],
)
def test_what_a_data_module_returns_is_checked(
    client: Callable[[NodeConfig], Any], sentence: str, tmp_path: Path
) -> None:
    warnings: list[str] = []
    with pytest.raises(AskewError, match="none of the 5 connected nodes can take part"):
        deploy(FEDAVG, tmp_path, {"wait": 1.0}, data=DataModule(client), warnings=warnings)
    assert sentence in warnings[0]


WIDE = "has real inputs of shape [9] and class labels"


def widths(*wide: int) -> Callable[[NodeConfig], Any]:
    """The function of a data module: inputs of these clients have nine numbers, those of the others eight."""
    return lambda node: ((torch.ones(9, 8 + (node["partition-id"] in wide)), torch.arange(9) % 3), None, None)


@pytest.mark.parametrize("odd", [0, 3])
def test_clients_with_other_inputs_than_most_are_left_out(odd: int, tmp_path: Path) -> None:
    """Also one that comes first."""
    tables = FEDAVG | {"participation": {"name": "full"}, "rounds": 2}
    deployed, _, warnings = deploy(tables, tmp_path, data=DataModule(widths(odd)))
    most = "most of the clients have real inputs of shape [8] and class labels; prepare the data alike on every node."
    assert warnings[0] == f"node {FIRST_NODE + odd} is left out: client {odd} {WIDE}, and {most}"
    others = [client for client in range(5) if client != odd]
    assert deployed.finished and [r["participants"] for r in deployed.rounds] == [others] * 2
    assert deployed.federation["shape"] == [8] and deployed.federation["sizes"][odd] == 0


def test_of_equally_many_clients_the_first_decides_until_more_come(tmp_path: Path) -> None:
    """Two clients are to be there. After client 0, and 1 with other data, client 2 comes, whose data are like 1's."""

    class LateTransport(InProcessTransport):
        looks = 0

        def connected_nodes(self) -> list[int]:
            self.looks += 1
            return [FIRST_NODE + client for client in (0, 1, 2)[: 2 + (self.looks > 1)]]

    tables = FEDAVG | {"participation": {"name": "full"}, "rounds": 1}
    rules = {"nodes": 2, "wait": 5.0}
    deployed, _, warnings = deploy(tables, tmp_path, rules, data=DataModule(widths(0)), transport_class=LateTransport)
    assert f"and client 0, which came first, {WIDE}" in warnings[0] and f"client 0 {WIDE}, and most" in warnings[1]
    assert len(warnings) == 2 and deployed.rounds[0]["participants"] == [1, 2]


def test_data_of_the_server_say_what_clients_must_have(tmp_path: Path) -> None:
    """Here those of most clients are of another shape, and the test data have a class more than the clients."""
    test = torch.ones(4, 8), torch.arange(4)
    tables = FEDAVG | {"participation": {"name": "full"}, "rounds": 1}
    data = DataModule(widths(0, 1, 2), lambda: (None, test))
    deployed, _, warnings = deploy(tables, tmp_path, data=data)
    assert deployed.rounds[0]["participants"] == [3, 4] and deployed.federation["classes"] == 4
    declared = "the server's data are real inputs of shape [8] and class labels; prepare the data alike on every node."
    assert warnings[:3] == [f"node {100 + i} is left out: client {i} {WIDE}, and {declared}" for i in range(3)]
    with pytest.raises(AskewError, match="none of the 5 connected nodes can take part: "):
        deploy(tables, tmp_path, {"fresh": True}, data=DataModule(widths(*range(5)), data.server))
    wrong = DataModule(widths(), lambda: ((torch.ones(4, 9), torch.arange(4)), test))
    with pytest.raises(AskewError, match=r"shape \[8\] and class labels and real inputs of shape \[9\].*prepare both"):
        deploy(tables, tmp_path, {"fresh": True}, data=wrong)


@pytest.mark.parametrize("classes", [3, 6])
def test_what_a_run_was_begun_with_holds_after_a_restart(classes: int, tmp_path: Path) -> None:
    """Also if most of the clients that are there have other data: the model is one for the first ones."""
    broken = []

    def interrupt(kind: str, client: int, payload: Payload, reply: Payload) -> Payload:
        if kind == "train" and payload.numbers["round"] == 2:
            broken.append(client)
            raise KeyboardInterrupt
        return reply

    def client(node: NodeConfig) -> Any:
        changed = broken and node["partition-id"] < 3
        return (
            (torch.ones(12, 8 + (classes == 3 and bool(changed))), torch.arange(12) % (classes if changed else 3)),
            None,
            None,
        )

    tables = FEDAVG | {"participation": {"name": "full"}, "rounds": 3}
    with pytest.raises(KeyboardInterrupt):
        deploy(tables, tmp_path, data=DataModule(client), change_reply=interrupt)
    deployed, _, warnings = deploy(tables, tmp_path, data=DataModule(client))
    assert [r["participants"] for r in deployed.rounds] == [[*range(5)], [3, 4], [3, 4]]
    assert [text.split(",")[0] for text in warnings[:3]] == [
        f"node {100 + i} is left out: client {i} has {'6 classes' if classes == 6 else WIDE.removeprefix('has ')}"
        for i in range(3)
    ]


NO_RUN_GOES_ON = [
    (
        (torch.ones(6, 9), torch.arange(6) % 3),
        r"are real inputs of shape \[9\] and class labels, and the run was begun",
    ),
    ((torch.ones(6, 8), torch.ones(6)), "and real targets, and the run was begun with real inputs"),
    (
        (torch.ones(6, 8), torch.arange(6)),
        "have 6 classes, and the run was begun with 3; give the server the data that",
    ),
]


@pytest.mark.parametrize(("changed", "sentence"), NO_RUN_GOES_ON)
def test_a_server_that_comes_back_with_other_data_is_refused(changed: Any, sentence: str, tmp_path: Path) -> None:
    """Before, this was an error of torch, or a checkpoint that was called damaged."""
    tests = [(torch.ones(6, 8), torch.arange(6) % 3)]
    data = DataModule(widths(), lambda: (None, tests[-1]))

    def interrupt(kind: str, client: int, payload: Payload, reply: Payload) -> Payload:
        if kind == "train" and payload.numbers["round"] == 2:
            raise KeyboardInterrupt
        return reply

    with pytest.raises(KeyboardInterrupt):
        deploy(FEDAVG, tmp_path, data=data, change_reply=interrupt)
    tests.append(changed)
    with pytest.raises(AskewError, match=sentence):
        deploy(FEDAVG, tmp_path, data=data)
    tests.pop()
    assert deploy(FEDAVG, tmp_path, data=data)[0].finished


def test_what_the_function_of_the_server_raises_is_one_sentence(tmp_path: Path) -> None:
    def server() -> Any:
        raise FileNotFoundError("no such file: test.npz")

    with pytest.raises(AskewError, match=r"server\(\) failed in line \d+: FileNotFoundError: no such file: test.npz"):
        deploy(FEDAVG, tmp_path, data=DataModule(widths(), server))


@pytest.mark.parametrize("wrong", ["another shape", "not finite"])
def test_a_client_takes_part_once_its_data_are_corrected(wrong: str, tmp_path: Path) -> None:
    """Its node is the same one, as one with a key is that was started again."""
    trained, said = set[int](), list[str]()

    def client(node: NodeConfig) -> Any:
        odd = node["partition-id"] == 3 and 2 not in trained
        x = torch.ones(9, 9 if odd and wrong == "another shape" else 8)
        return (x / (0 if odd and wrong == "not finite" else 1), torch.arange(9) % 3), None, None

    def note(kind: str, client: int, payload: Payload, reply: Payload) -> Payload:
        if kind == "train":
            trained.add(int(str(payload.numbers["round"])))
        return reply

    tables = FEDAVG | {"participation": {"name": "full"}, "rounds": 4}
    run, _, warnings = deploy(tables, tmp_path, data=DataModule(client), change_reply=note, say=said.append)
    assert len(warnings) == 1 and "client 3" in warnings[0] and "left out" in warnings[0]
    assert [3 in record["participants"] for record in run.rounds] == [False, False, True, True]
    assert "client 3 takes part after all." in said


@pytest.mark.parametrize("rules", [{"nodes": 0}, {"nodes": 4}])
def test_a_client_whose_data_cannot_be_used_is_named_and_not_waited_for(rules: dict[str, int], tmp_path: Path) -> None:
    """As one whose data are of another shape, though here the client itself finds out."""

    def client(node: NodeConfig) -> Any:
        x = torch.full((9, 8), math.nan if node["partition-id"] == 0 else 1.0)
        return (x, torch.arange(9) % 3), None, None

    tables = FEDAVG | {"participation": {"name": "full"}}
    deployed, transport, warnings = deploy(tables, tmp_path, rules, data=DataModule(client))
    assert deployed.finished and all(r["participants"] == [1, 2, 3, 4] for r in deployed.rounds)
    assert len(warnings) == 1 and warnings[0].startswith("node 100, client 0, is left out: ")
    tries_at_the_start = 1 if rules["nodes"] else 3  # then one before each of four rounds
    assert sum(kind == "query" for kind, _, _ in transport.sent) == 4 + tries_at_the_start + 4


def test_a_deployment_of_one_client_is_described_in_the_singular(tmp_path: Path) -> None:
    tables = FEDAVG | {"partition": {"name": "natural", "clients": 1}, "participation": {"name": "full"}, "rounds": 1}
    client = lambda node: ((torch.ones(9, 8), torch.arange(9) % 3), None, None)
    deployed, _, _ = deploy(tables, tmp_path, data=DataModule(client))
    assert deployed.facts["reason"] == "1 client, with its own data"
    alone = lambda node: ((torch.ones(9, 8) * math.nan, torch.arange(9) % 3), None, None)
    with pytest.raises(AskewError, match="the only connected node cannot take part: "):
        deploy(tables, tmp_path, {"fresh": True}, data=DataModule(alone))
    with pytest.raises(AskewError, match="0 of 1 client came within"):
        deploy(tables, tmp_path, {"fresh": True}, data=DataModule(client), late_clients=[0])


def test_others_are_waited_for_in_place_of_a_client_that_is_refused(tmp_path: Path) -> None:
    """Of five clients three are to be there: one is refused, and another comes later."""
    client = lambda node: ((torch.ones(9, 8 + (node["partition-id"] == 2)), torch.arange(9) % 3), None, None)

    class LateTransport(InProcessTransport):
        looks = 0

        def connected_nodes(self) -> list[int]:
            self.looks += 1  # of which the second is already that of the first round, if nobody is waited for
            return [FIRST_NODE + client for client in (0, 1, 2, 3)[: 3 + (self.looks > 2)]]

    tables = FEDAVG | {"participation": {"name": "full"}, "rounds": 1}
    rules = {"nodes": 3, "wait": 5.0}
    deployed, _, _ = deploy(tables, tmp_path, rules, data=DataModule(client), transport_class=LateTransport)
    assert deployed.rounds[0]["participants"] == [0, 1, 3]


def test_a_module_without_the_function_is_named() -> None:
    with pytest.raises(AskewError, match=r"must define client\(node\)"):
        DataModule.of(askew)


def test_a_method_that_needs_all_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AskewError, match="needs all data in one place"):
        deploy(small_run(VARIANTS["centralised"]), tmp_path, data=DataModule(simulated_client))
