"""The server of a deployment, with clients in this process: lost and false replies, restarts, changing nodes."""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import (
    FIRST_NODE,
    VARIANTS,
    ChangeReply,
    InProcessTransport,
    OneByOneTransport,
    assert_same_rounds,
    deploy,
    encode_as_flower,
    models_equal,
    simulate,
    slow_except,
    small_run,
    with_participants,
    write_config,
)
from safetensors.torch import load_file

import askew.flower
from askew.errors import ConfigError, EngineError, StoreError
from askew.experiment.config import Config
from askew.experiment.launch import run_config
from askew.experiment.store import load
from askew.flower import registry
from askew.flower.client_state import FileStore, MemoryStore, StateHistory
from askew.flower.deployment_data import DataModule, NodeConfig, read_config
from askew.flower.transport import Reply
from askew.flower.wire import Payload

STATEFUL = slow_except(("scaffold", "fedbn"), ("scaffold", "fedbn", "moon", "feddc"))
RESTARTED = slow_except(
    ("scaffold", "fedga"), ("scaffold", "fedbn", "moon", "feddc", "fedga", "fedvarp", "fedpdc", "fedawe")
)
ALL_REPLY = [[0, 1, 2], [1, 2, 3], [0, 1, 4], [1, 2, 3]]  # participants by round
ONE_MISSING = [[0, 1, 2], [2, 3], [0, 1, 4], [1, 2, 3]]  # without client 1 in round 2
ROUND_2_EMPTY = [[0, 1, 2], [], [0, 1, 4], [1, 2, 3]]


def traced_run(key: str, participants: list[list[int]], folder: Path) -> dict[str, Any]:
    """A run of a method with these participants, round by round."""
    return with_participants(small_run(VARIANTS[key]), participants, folder)


def change_one(change: Callable[[Payload], Any]) -> ChangeReply:
    """Change client 1's reply of round 2."""
    return lambda kind, client, payload, reply: (
        change(reply) if (kind, client, payload.numbers.get("round")) == ("train", 1, 2) else reply
    )


def with_numbers(reply: Payload, **numbers: Any) -> Payload:
    return reply._replace(numbers={**reply.numbers, **numbers})


# replies that are lost or wrong ---------------------------------------------------------------------------------


@pytest.mark.parametrize("key", STATEFUL)
def test_a_client_whose_reply_is_lost_goes_on_from_its_state_before(key: str, tmp_path: Path) -> None:
    """It has trained, and must forget that it has."""
    drop = change_one(lambda reply: None)
    deployed, _, warnings = deploy(traced_run(key, ALL_REPLY, tmp_path), tmp_path, change_reply=drop)
    simulated = simulate(traced_run(key, ONE_MISSING, tmp_path))
    assert models_equal(deployed.model, simulated.model)
    assert [r["participants"] for r in deployed.rounds] == ONE_MISSING
    assert [r.get("absent", 0) for r in deployed.rounds] == [0, 1, 0, 0]
    assert not any(r["dropped"] for r in deployed.rounds)
    assert warnings == ["round 2: client 1: no answer within 0.2 s"]
    assert [r["bytes_up"] for r in deployed.rounds] == [r["bytes_up"] for r in simulated.rounds]
    assert deployed.rounds[1]["bytes_down"] == simulated.rounds[1]["bytes_down"] * 3 / 2


@pytest.mark.parametrize("key", ["scaffold", "fedbn"])
def test_a_reply_that_is_not_finite_is_dropped_by_the_servers_own_guard(key: str, tmp_path: Path) -> None:
    to_nan = lambda reply: reply._replace(tensors={n: torch.full_like(t, torch.nan) for n, t in reply.tensors.items()})
    deployed, _, warnings = deploy(traced_run(key, ALL_REPLY, tmp_path), tmp_path, change_reply=change_one(to_nan))
    assert models_equal(deployed.model, simulate(traced_run(key, ONE_MISSING, tmp_path)).model)
    assert [r["dropped"] for r in deployed.rounds] == [0, 1, 0, 0] and "absent" not in deployed.rounds[1]
    assert len(warnings) == 1 and "round 2: client 1 sent numbers that are not finite" in warnings[0]


WRONG_REPLIES: list[
    tuple[Callable[[Payload], Payload | str], str]
] = [  # what client 1 does to its reply, and why it is refused
    (lambda reply: "it broke", "client 1: it broke"),
    (lambda reply: with_numbers(reply, round=99), "client 1: this is of round 99, expected round 2"),
    (lambda reply: with_numbers(reply, client=2), "client 1: this is of client 2, expected client 1"),
    (lambda reply: with_numbers(reply, phase=1), "client 1: this is of phase 1, expected phase 0"),
    (lambda reply: with_numbers(reply, samples=10**9), "client 1: this is of samples 1000000000, expected samples"),
    (lambda reply: with_numbers(reply, loss="small"), "client 1: loss must be of type float"),
    (lambda reply: reply._replace(numbers={}), "client 1: client must be of type int"),
    (
        lambda reply: reply._replace(tensors={}),
        "client 1 sent tensors named none at all, expected 'buffers', 'up.dc', 'up.delta'",
    ),
    (lambda reply: reply._replace(tensors=reply.tensors | {"more": torch.ones(1)}), "'more'"),
    (lambda reply: reply._replace(tensors={n: t.double() for n, t in reply.tensors.items()}), "came, expected <f4"),
    (lambda reply: reply._replace(tensors={n: t[:-1] for n, t in reply.tensors.items()}), "came, expected <f4"),
    (lambda reply: reply._replace(tensors={n: torch.zeros(10**5) for n in reply.tensors}), "bytes came, at most"),
]


def test_a_wrong_reply_is_left_out_with_a_sentence(tmp_path: Path) -> None:
    """Client 1 sends another wrong reply in every round; the model is that of a run without it."""
    count = len(WRONG_REPLIES)

    def spoil(kind: str, client: int, payload: Payload, reply: Payload) -> Payload | str:
        if (kind, client) != ("train", 1):
            return reply
        change, _ = WRONG_REPLIES[payload.numbers["round"] - 1]
        return change(reply)

    deployed, _, warnings = deploy(traced_run("scaffold", [[0, 1, 2]] * count, tmp_path), tmp_path, change_reply=spoil)
    assert models_equal(deployed.model, simulate(traced_run("scaffold", [[0, 2]] * count, tmp_path)).model)
    for n, (_, sentence) in enumerate(WRONG_REPLIES, 1):
        (warning,) = [text for text in warnings if text.startswith(f"round {n}: ")]
        assert sentence in warning
    assert len(warnings) == count and [r["absent"] for r in deployed.rounds] == [1] * count


def test_a_round_that_nobody_answers_changes_nothing(tmp_path: Path) -> None:
    drop_all: ChangeReply = lambda kind, client, payload, reply: (
        None if payload.numbers.get("round") == 2 and kind == "train" else reply
    )
    deployed, _, _ = deploy(traced_run("scaffold", ALL_REPLY, tmp_path), tmp_path, change_reply=drop_all)
    record = deployed.rounds[1]
    assert (record["participants"], record["absent"], record["train_loss"]) == ([], 3, None)
    assert record["bytes_up"] == 0 < record["bytes_down"]
    simulated = simulate(traced_run("scaffold", ROUND_2_EMPTY, tmp_path))
    assert deployed.finished and models_equal(deployed.model, simulated.model)


@pytest.mark.parametrize("spare", [0.0, 1.0])
def test_more_answers_than_a_round_waits_for_are_refused_before_it(spare: float, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="that a round waits for, 3, got 4"):  # 3 of 5 clients take part
        deploy(small_run(VARIANTS["fedavg"]), tmp_path, {"answers": 4, "spare": spare})


def test_too_few_replies_throw_a_round_away(tmp_path: Path) -> None:
    tables, drop = traced_run("scaffold", ALL_REPLY, tmp_path), change_one(lambda reply: None)
    deployed, _, warnings = deploy(tables, tmp_path, {"answers": 3}, change_reply=drop)
    assert (deployed.rounds[1]["dropped"], deployed.rounds[1]["absent"]) == (2, 1)
    assert "round 2 is thrown away: 2 answers came, at least 3 are needed." in warnings
    assert models_equal(deployed.model, simulate(traced_run("scaffold", ROUND_2_EMPTY, tmp_path)).model)


# spare clients --------------------------------------------------------------------------------------------------


def test_of_participants_and_spare_clients_the_first_to_reply_are_used(tmp_path: Path) -> None:
    """As many replies as were wanted are waited for: here the first three of five, in the order of the messages."""
    rules = {"spare": 1.0, "timeout": 60.0}
    deployed, _, _ = deploy(small_run(VARIANTS["scaffold"]), tmp_path, rules, transport_class=OneByOneTransport)
    assert [(r["participants"], r["absent"]) for r in deployed.rounds] == [([0, 1, 2], 2)] * 4  # all five are asked
    simulated = simulate(traced_run("scaffold", [[0, 1, 2]] * 4, tmp_path))
    assert models_equal(deployed.model, simulated.model)


@pytest.mark.parametrize("value", [torch.nan, None])
def test_a_spare_client_replaces_one_that_sends_garbage(value: float | None, tmp_path: Path) -> None:
    """Three replies are wanted of five clients; those of client 0 have no tensors, or tensors that are not finite."""
    spoil = lambda kind, client, payload, reply: (
        reply
        if (kind, client) != ("train", 0)
        else reply._replace(
            tensors={} if value is None else {n: torch.full_like(t, value) for n, t in reply.tensors.items()}
        )
    )
    rules, options = {"spare": 1.0, "timeout": 60.0}, {"transport_class": OneByOneTransport, "change_reply": spoil}
    deployed, _, warnings = deploy(small_run({"name": "fedavg"}), tmp_path, rules, **options)
    used = [[client for client in r["participants"] if client] for r in deployed.rounds]
    assert used == [[1, 2, 3]] * 4 and sum("client 0" in text for text in warnings) == 4


# restarts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", RESTARTED)
@pytest.mark.parametrize("last_client", [0, 4])
def test_a_killed_server_goes_on_from_its_last_round(key: str, last_client: int, tmp_path: Path) -> None:
    """It is killed in round 3, when the first or the last of three clients has replied."""
    tables = traced_run(key, ALL_REPLY, tmp_path)

    def interrupt(kind: str, client: int, payload: Payload, reply: Payload) -> Payload:
        if kind == "train" and payload.numbers["round"] == 3 and client == last_client:
            raise KeyboardInterrupt
        return reply

    with pytest.raises(KeyboardInterrupt):
        deploy(tables, tmp_path, change_reply=interrupt)
    folder = next((tmp_path / "runs").iterdir())
    assert load(folder).facts["state"] == "interrupted" and len(load(folder).rounds) == 2
    deployed, transport, warnings = deploy(tables, tmp_path)
    simulated = simulate(tables)
    rounds = {payload.numbers["round"] for kind, _, payload in transport.sent if kind == "train"}
    assert warnings == [] and rounds == {3, 4}
    assert_same_rounds(deployed, simulated)
    assert models_equal(load_file(folder / "model.safetensors"), simulated.model)


def test_a_finished_run_is_not_played_again_unless_it_is_asked_for(tmp_path: Path) -> None:
    tables = small_run(VARIANTS["moon"])
    first, _, _ = deploy(tables, tmp_path)
    again, transport, warnings = deploy(tables, tmp_path)
    assert transport.sent == [] and "holds this run already" in warnings[0] and len(again.rounds) == len(first.rounds)
    fresh, transport, _ = deploy(tables, tmp_path, {"fresh": True})  # state that clients have of the first is not used
    assert transport.sent and models_equal(fresh.model, first.model)


def test_a_client_that_lost_its_state_says_so_and_is_left_out(tmp_path: Path) -> None:
    def remove_state(kind: str, client: int, payload: Payload, reply: Payload) -> Payload:
        (tmp_path / "clients" / "client-1.safetensors").unlink(missing_ok=True)
        return reply

    deployed, _, warnings = deploy(traced_run("scaffold", ALL_REPLY, tmp_path), tmp_path, change_reply=remove_state)
    assert [r.get("absent", 0) for r in deployed.rounds] == [0, 1, 1, 1]
    sentence = "client 1 has no state of round 1, which the server has used"
    assert sentence in warnings[0] and 'state="FOLDER"' in warnings[0]


def test_a_damaged_state_is_named(tmp_path: Path) -> None:
    def damage(kind: str, client: int, payload: Payload, reply: Payload) -> Payload:
        if kind == "train" and client == 1:
            (tmp_path / "clients" / "client-1.safetensors").write_bytes(b"nothing")
        return reply

    _, _, warnings = deploy(traced_run("moon", ALL_REPLY, tmp_path), tmp_path, change_reply=damage)
    assert "client-1.safetensors cannot be read" in warnings[0]


# clients that come and go ---------------------------------------------------------------------------------------


class ChangingTransport(InProcessTransport):
    """A transport whose nodes come and go; `nodes_at` has them by the number of the look, `configs` the odd ones."""

    looks = 0

    def __init__(
        self, *arguments: Any, nodes_at: Callable[[int], list[int]], configs: dict[int, NodeConfig], **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self.nodes_at, self.configs = nodes_at, configs

    def connected_nodes(self) -> list[int]:
        self.looks += 1
        return self.nodes_at(self.looks)

    def node_config(self, node: int) -> NodeConfig:
        return self.configs.get(node, {"partition-id": node % 100})


def deploy_on(
    nodes_at: Callable[[int], list[int]],
    tables: dict[str, Any],
    folder: Path,
    configs: dict[int, NodeConfig] | None = None,
    **rules: Any,
) -> tuple[Any, InProcessTransport, list[str]]:
    """Deploy a run on nodes that come and go."""
    options = {"transport_class": ChangingTransport, "nodes_at": nodes_at, "configs": configs or {}}
    return deploy(tables, folder, {"wait": 0.5, **rules}, **options)


def test_a_client_may_join_later_and_come_again_as_another_node(tmp_path: Path) -> None:
    """Client 4 is there from round 3 on; client 1 is another node by then."""
    tables = traced_run("scaffold", ALL_REPLY, tmp_path)
    before, after = [100, 101, 102, 103], [100, 201, 102, 103, 104]
    deployed, transport, warnings = deploy_on(lambda look: before if look <= 3 else after, tables, tmp_path, nodes=4)
    simulated = simulate(tables)
    assert warnings == [] and models_equal(deployed.model, simulated.model)
    assert_same_rounds(deployed, simulated)
    queried = [client + FIRST_NODE for kind, client, _ in transport.sent if kind == "query"]
    assert queried == [100, 101, 102, 103, 201, 104]


class LongRounds(ChangingTransport):
    """Rounds last longer than Flower keeps replies: what a node says comes, and is gone, while clients train."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.asked, self.readable, self.gone = set[str](), set[str](), set[str]()  # messages to new nodes

    def connected_nodes(self) -> list[int]:
        self.gone, self.readable = self.gone | self.readable, set()
        return super().connected_nodes()

    def send(self, kind: str, payloads: Mapping[int, Payload], group: str, timeout: float) -> dict[str, int]:
        begun, sent = any(kind == "train" for kind, _, _ in self.sent), super().send(kind, payloads, group, timeout)
        if kind == "train":
            self.readable, self.asked = self.asked, set()
        elif kind == "query" and begun:
            self.asked |= sent.keys()
        return sent

    def receive(self, message_ids: Collection[str]) -> dict[str, Reply]:
        lost = dict.fromkeys(self.gone.intersection(message_ids), "Message Unavailable")
        return super().receive([*{*message_ids} - self.asked - self.gone]) | lost


@pytest.mark.parametrize("buffer", [0, 4])
def test_a_client_may_join_while_rounds_last_longer_than_flower_keeps_what_it_says(
    buffer: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "LOOK_SECONDS", 0.0)
    nodes_at = lambda look: [100, 101, 102, 103, *[104] * (look > 2)]  # client 4 comes after round 1 began
    options: dict[str, Any] = {"transport_class": LongRounds, "nodes_at": nodes_at, "configs": {}}
    tables = small_run(VARIANTS["fedavg"], rounds=10, participation={"name": "uniform", "cohort": 5})
    run, _, warnings = deploy(tables, tmp_path, {"nodes": 4, "buffer": buffer}, **options)
    assert warnings == [] and {4} <= {client for record in run.rounds for client in record["participants"]}


def test_participants_are_drawn_from_the_clients_that_are_connected(tmp_path: Path) -> None:
    nodes_at = lambda look: [100, 103, 104] if look <= 3 else [100, 102]
    deployed, _, _ = deploy_on(nodes_at, small_run(VARIANTS["fedavg"]), tmp_path, nodes=2)
    assert [r["participants"] for r in deployed.rounds] == [[0, 3, 4], [0, 3, 4], [0, 2], [0, 2]]
    assert not any("absent" in r for r in deployed.rounds)


def test_without_clients_no_round_is_played(tmp_path: Path) -> None:
    tables = small_run(VARIANTS["fedavg"])
    with pytest.raises(EngineError, match=r"2 of 5 clients came within 0\.5 s; start the others"):
        deploy_on(lambda look: [100, 101], tables, tmp_path)
    with pytest.raises(EngineError, match="0 of 1 client came"):
        deploy_on(lambda look: [100, 101] if look <= 2 else [], tables, tmp_path, nodes=2)
    assert len(load(next((tmp_path / "runs").iterdir())).rounds) == 1


def test_nodes_that_do_not_say_which_client_they_are_are_asked_before_every_round_and_left_out(tmp_path: Path) -> None:
    """And it is said once of each. They are asked once more before four rounds, and once at the start."""
    wrong: dict[int, tuple[NodeConfig, str]] = {
        110: ({}, "partition-id must be its client number from 0 to 4, got None"),
        111: ({"partition-id": 5}, "partition-id must be its client number from 0 to 4, got 5"),
        112: ({"partition-id": "0"}, "partition-id must be its client number from 0 to 4, got '0'"),
        113: ({"partition-id": 4, "num-partitions": 7}, "num-partitions is 7, and partition.clients is 5"),
    }
    nodes, configs = [100, 101, 102, 103, *wrong], {node: config for node, (config, _) in wrong.items()}
    tables = small_run(VARIANTS["fedavg"])
    deployed, transport, warnings = deploy_on(lambda look: nodes, tables, tmp_path, configs, nodes=4)
    for node, (_, sentence) in wrong.items():
        who = f"node {node}, client 4, is" if node == 113 else f"node {node} is"
        about_node = [text for text in warnings if text.startswith(f"{who} left out: ")]
        assert len(about_node) == 1 and sentence in about_node[0]
    assert deployed.finished and len(warnings) == len(wrong)
    assert sum(kind == "query" for kind, _, _ in transport.sent) == 4 + (1 + 4) * len(wrong)


def test_of_two_nodes_with_one_number_the_later_one_is_used(tmp_path: Path) -> None:
    nodes, tables = [100, 101, 102, 103, 104, 201], small_run(VARIANTS["fedavg"])
    deployed, transport, warnings = deploy_on(lambda look: nodes, tables, tmp_path)
    assert warnings == ["client 1 is now node 201 and no longer node 101."]
    trained = {client + FIRST_NODE for kind, client, _ in transport.sent if kind == "train"}
    assert trained <= {100, 102, 103, 104, 201} and deployed.finished


def test_a_node_takes_its_client_back_when_another_with_its_number_is_gone(tmp_path: Path) -> None:
    """Node 201 is client 1 for one round; node 101 is connected all the time."""
    nodes, tables = [100, 101, 102, 103, 104], small_run(VARIANTS["fedavg"], participation={"name": "full"})
    nodes_at = lambda look: nodes + [201] * (look == 3)
    deployed, transport, warnings = deploy_on(nodes_at, tables, tmp_path)
    assert warnings == ["client 1 is now node 201 and no longer node 101."]
    assert [r["participants"] for r in deployed.rounds] == [[0, 1, 2, 3, 4]] * 4
    asked = [client + FIRST_NODE for kind, client, _ in transport.sent if kind == "train" and client % 100 == 1]
    assert asked == [101, 201, 101, 101]


def test_a_node_takes_its_client_back_when_another_with_its_number_hangs(tmp_path: Path) -> None:
    """Node 201 comes after the start, and answers nothing from its first training message on."""
    kinds: list[str] = []

    def hang(kind: str, client: int, payload: Payload, reply: Payload) -> Payload | None:
        kinds.extend([kind] * (client + FIRST_NODE == 201))
        return None if client + FIRST_NODE == 201 and "train" in kinds else reply

    nodes_at = lambda look: [100, 101, 102, 103, 104] + [201] * (look > 1)
    options: dict[str, Any] = {"transport_class": ChangingTransport, "nodes_at": nodes_at, "configs": {}}
    tables = small_run(VARIANTS["fedavg"], participation={"name": "full"})
    deployed, _, warnings = deploy(tables, tmp_path, {"wait": 0.5}, change_reply=hang, **options)
    assert [r["participants"] for r in deployed.rounds] == [[0, 2, 3, 4], *[[0, 1, 2, 3, 4]] * 3]
    assert warnings[-1] == "client 1 is now node 101 and no longer node 201."


def test_a_client_that_disappears_is_reported_once(tmp_path: Path) -> None:
    nodes_at = lambda look: [100, 101, 102, 103, 104] if look <= 2 else [100, 102, 103, 104]
    deployed, _, warnings = deploy_on(nodes_at, small_run(VARIANTS["fedavg"]), tmp_path)
    assert deployed.finished and len(warnings) == 1
    assert warnings[0].startswith("client 1 is left out, as its node 101 is no longer connected; start it again")
    assert [r.get("unreachable") for r in deployed.rounds] == [None, [1], [1], [1]]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda reply: reply._replace(tensors={"x": torch.zeros(9)}), "sent tensors named 'x', expected none at all"),
        (lambda reply: with_numbers(reply, more="x" * 10**7), "bytes came, at most 1,048,576 are allowed"),
        (lambda reply: with_numbers(reply, more=[b"x" * 10**7]), "bytes came, at most 1,048,576 are allowed"),
        (lambda reply: with_numbers(reply, version="1\n2\x1b[2J"), "this is of version 1 2 [2J, expected version"),
    ],
)
def test_a_false_description_of_a_client_is_refused(
    change: Callable[[Payload], Payload], sentence: str, tmp_path: Path
) -> None:
    change_reply = lambda kind, client, payload, reply: change(reply) if (kind, client) == ("query", 3) else reply
    tables = small_run({"name": "fedavg"}, rounds=1)
    _, _, warnings = deploy(tables, tmp_path, {"nodes": 4}, change_reply=change_reply)
    assert warnings and sentence in warnings[0] and "\n" not in warnings[0] and "\x1b" not in warnings[0]


@pytest.mark.parametrize(
    ("numbers", "sentence"),
    [
        ({"samples": 10**9}, "client 3 says it has 1,000,000,000 samples, at most 10,000,000 are allowed"),
        ({"classes": 10**8}, "client 3 says it has 100,000,000 classes, at most 100,000 are allowed"),
        ({"samples": 2**62}, "client 3: samples must be of type int"),
        ({"shape": [10**4, 10**4]}, "client 3: inputs of shape [10000, 10000] came, at most 10,000,000 numbers"),
        ({"shape": [1] * 10**3}, "client 3: inputs of shape [1, 1, 1"),
    ],
)
@pytest.mark.parametrize("first", [False, True])
def test_a_client_with_impossible_data_is_refused_by_name_and_the_others_go_on(
    numbers: dict[str, Any], sentence: str, first: bool, tmp_path: Path
) -> None:
    """Also where it is the first of all to come; nobody waits for it."""
    module = DataModule(lambda node: ((torch.ones(9, 8), torch.arange(9) % 3), None, None))
    change_reply = lambda kind, client, payload, reply: (
        with_numbers(reply, **numbers) if (kind, client) == ("query", 3) else reply
    )

    class LastNodeFirst(InProcessTransport):
        def connected_nodes(self) -> list[int]:
            return [FIRST_NODE + client for client in ([3, 0, 1, 2, 4] if first else [0, 1, 2, 3, 4])]

    tables = small_run({"name": "fedavg"}, rounds=1, participation={"name": "full"})
    run, _, warnings = deploy(tables, tmp_path, data=module, change_reply=change_reply, transport_class=LastNodeFirst)
    assert run.rounds[0]["participants"] == [0, 1, 2, 4] and len(warnings) == 1
    assert warnings[0].startswith("node 103 is left out: ") and sentence in warnings[0]


@pytest.mark.parametrize("recovers", [False, True])
def test_a_client_that_is_late_costs_its_time_once(recovers: bool, tmp_path: Path) -> None:
    """It is asked to train again only when its node has said again which client it is."""
    asked: list[str] = []

    def silent(kind: str, client: int, payload: Payload, reply: Payload) -> Payload | None:
        if client != 1:
            return reply
        asked.append(kind)
        late = kind == "train" and payload.numbers["round"] == 1
        still_silent = kind == "query" and len(asked) > 1 and not (recovers and len(asked) > 3)
        return None if late or still_silent else reply

    tables = small_run({"name": "fedavg"}, rounds=4, participation={"name": "full"})
    rules = {"timeout": 0.2, "hello": 0.01 if recovers else 60.0}
    run, _, warnings = deploy(tables, tmp_path, rules, change_reply=silent)
    assert asked == ["query", "train", "query", *["query", "train"] * recovers]
    everybody, others = [0, 1, 2, 3, 4], [0, 2, 3, 4]
    assert [r["participants"] for r in run.rounds] == [others, others, others, everybody if recovers else others]
    assert warnings == [
        "round 1: client 1: no answer within 0.2 s",
        "client 1 was late and is left out until its node says again which client it is.",
    ]


# what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tables", "sentence"),
    [
        (small_run({"name": "fedbn", "eval": "server_mean"}), 'set algorithm.eval = "clients"'),
        (small_run(VARIANTS["fedbn"], evaluation={"spread": True}), "evaluation.spread needs the clients' samples"),
    ],
)
def test_what_real_clients_cannot_do_is_refused(tables: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=sentence):
        read_config(write_config(tables, tmp_path))


def test_a_message_of_another_run_is_refused_by_the_client(tmp_path: Path) -> None:
    transport = InProcessTransport(read_config(write_config(small_run(VARIANTS["fedavg"]), tmp_path)), tmp_path)
    payload = transport.encode(Payload({"mark": "other", "client": 1, "classes": 3}, {}))
    reply = transport.answer("train", 101, payload)
    assert isinstance(reply, str) and "the server: this is of mark other, expected mark" in reply


def test_a_client_reads_no_larger_message_than_it_expects(tmp_path: Path) -> None:
    _, transport, _ = deploy(small_run({"name": "fedavg"}, rounds=1), tmp_path)
    _, client, payload = next(message for message in transport.sent if "x" in message[2].tensors)
    (tmp_path / "clients" / f"client-{client}-answers.safetensors").unlink()  # as if it had not been answered
    for large in (
        payload._replace(tensors=payload.tensors | {"x": torch.zeros(10**6)}),
        payload._replace(numbers={**payload.numbers, "m": "x" * 10**7}),
    ):
        reply = transport.answer("train", FIRST_NODE + client, transport.encode(large))
        assert isinstance(reply, str) and "bytes came, at most" in reply


def test_impossible_scores_are_left_out(tmp_path: Path) -> None:
    """Scores of another number, that are not finite, or that are no floats would be in the mean."""
    wrong = {0: [0.5], 1: [0.5, math.nan], 2: [10**9]}
    module = DataModule(
        lambda node: ((torch.ones(9, 8), torch.arange(9) % 3), None, (torch.ones(3, 8), torch.arange(3)))
    )
    change_reply = lambda kind, client, payload, reply: (
        with_numbers(reply, **{"scores.global": wrong[client]}) if kind == "evaluate" and client in wrong else reply
    )
    deployed, _, warnings = deploy(small_run({"name": "fedavg"}), tmp_path, data=module, change_reply=change_reply)
    assert sum("scores must be lists of 2 finite numbers" in text for text in warnings) == 2 * len(wrong)
    assert deployed.rounds[-1]["accuracy"] <= 1


def test_nothing_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole run with client state, its messages in Flower's bytes, with pickle switched off."""

    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("pickle")

    for owner, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(owner, name, forbidden)
    deployed, _, warnings = deploy(small_run({"name": "scaffold"}), tmp_path, encode=encode_as_flower)
    assert deployed.finished and warnings == []
    text = "".join(path.read_text() for path in Path(askew.flower.__file__).parent.glob("*.py"))
    assert not re.search(r"pickle\.|torch\.load|np\.load\(|allow_pickle=True|\beval\(|\bexec\(|shelve|marshal", text)


# what is stored -------------------------------------------------------------------------------------------------


def test_a_deployed_run_has_another_folder_than_a_simulated_one(tmp_path: Path) -> None:
    config = read_config(write_config(small_run(VARIANTS["fedavg"]), tmp_path))
    assert config.name().endswith("-flower")


@pytest.mark.parametrize("in_file", [False, True])
def test_a_client_keeps_the_state_used_last_and_the_latest(in_file: bool, tmp_path: Path) -> None:
    store = FileStore(tmp_path / "deep" / "state.safetensors") if in_file else MemoryStore()
    history = StateHistory(store, {"c": torch.zeros(2)}, 1)
    assert torch.equal(history.load_round(0)["c"], torch.zeros(2))
    history.save_round(0, 3, {"c": torch.full((2,), 3.0)})
    history.save_round(3, 5, {"c": torch.full((2,), 5.0)})
    assert [history.load_round(t)["c"][0].item() for t in (3, 5)] == [3, 5]
    history.save_round(3, 7, {"c": torch.full((2,), 7.0)})  # round 5 was not used
    assert [history.load_round(t)["c"][0].item() for t in (3, 7)] == [3, 7]
    with pytest.raises(StoreError, match="client 1 has no state of round 5"):
        history.load_round(5)
    history.save_phase(7, 8, 1, {"x": torch.ones(1)})
    assert history.load_phase(8, 1)["x"] == 1 and history.load_round(7)["c"][0] == 7
    with pytest.raises(StoreError, match="has not done phase 0 of round 9"):
        history.load_phase(9, 1)


def test_a_clients_file_has_the_names_of_older_versions(tmp_path: Path) -> None:
    """So that a client's folder of an older version can be read."""
    deploy(traced_run("scaffold", ALL_REPLY, tmp_path), tmp_path)
    assert load_file(tmp_path / "clients" / "client-1.safetensors").keys() == {"3.mine.c", "4.mine.c"}
    deploy(small_run(VARIANTS["fedbn"], participation={"name": "full"}), tmp_path / "fedbn")
    names = {"3.private.w", "3.private.b", "4.private.w", "4.private.b"}
    assert load_file(tmp_path / "fedbn" / "clients" / "client-1.safetensors").keys() == names


def test_the_command_line_reads_a_deployed_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from askew.cli.main import main

    tables = small_run(VARIANTS["scaffold"])
    deployed, _, _ = deploy(tables, tmp_path)
    simulated = run_config(Config.build(tables), tmp_path / "runs")
    for words in (["show", str(deployed.folder)], ["compare", str(deployed.folder), str(simulated.folder)]):
        assert main(words) == 0
    out = capsys.readouterr().out
    assert "flower" in out and "5 clients, each with its own data" in out


COUNTING = """
import askew
from askew.algorithms import FedAvg

class Sends(FedAvg):
    def finish(self, theta, client):
        return {"delta": theta - client.w, "labels": client.carry["labels"]}, client.state

    def weights(self, up, cohort):
        return up["labels"].max(1).values / up["labels"].max(1).values.sum()

@askew.register("counting")
class Counting(Sends):
    needs = ("labels",)

    def phases(self):
        return (self, Sends())
"""


def test_clients_count_their_own_labels(tmp_path: Path) -> None:
    """The server never sees them but in what the method sends, and the weights are the simulator's."""
    (tmp_path / "counting.py").write_text(COUNTING)
    tables = small_run({"name": "fedavg"}, rounds=2, plugins=[str(tmp_path / "counting.py")])
    tables |= {"algorithm": {"name": "counting"}}
    deployed, _, _ = deploy(tables, tmp_path)
    assert_same_rounds(deployed, simulate(tables))
    plain = simulate(tables | {"algorithm": {"name": "fedavg"}})
    assert deployed.curve("train_loss") != plain.curve("train_loss")
