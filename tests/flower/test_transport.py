"""A deployed run is the simulated one, number for number, and the bytes that travel are the bytes that are counted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from in_process import (
    VARIANTS,
    assert_same_rounds,
    deploy,
    models_equal,
    simulate,
    slow_except,
    small_run,
    with_participants,
)
from torch import Tensor

from askew.algorithms import Scaffold, algorithms
from askew.core.algorithm import Algorithm
from askew.core.space import Space
from askew.core.types import Client, Cohort, Part, State
from askew.flower.wire import Payload

# One of each kind of message: client state, private parts, phases, looks, public data, server memory, one client.
KINDS = ("fedavg", "scaffold", "fedbn", "fedga", "moon", "fedpdc-prox", "lossbias", "fedvarp", "fednova", "centralised")


class FirstPhase(Algorithm):
    """A phase that trains, moves the model, changes the client's state and carries something to the next phase."""

    broadcast = ("c",)

    def finish(self, theta: Tensor, client: Client) -> tuple[State, State]:
        return {"delta": theta - client.w, "odd": theta[:3].double()}, {n: v + 1 for n, v in client.state.items()}

    def carry(self, client: Client) -> State:
        return {"start": client.w + client.state["c"]}

    def aggregate(self, w: Tensor, up: State, cohort: Cohort, server: State) -> tuple[Tensor, State]:
        y = server["y"] + up["odd"].mean(1, keepdim=True).float() * up["delta"]
        return w + cohort.p @ up["delta"], server | {"c": server["c"] + 0.1 * up["delta"].mean(0), "y": y}


class Everything(Scaffold):
    """Two phases, client state, server memory to each client, a private layer: all that a message can hold."""

    broadcast = ("c", "y")

    def phases(self) -> tuple[Algorithm, ...]:
        return (FirstPhase(), self)

    def memory(self, space: Space) -> State:
        return {"y": space.zeros()}

    def private(self, space: Space) -> Part:
        return space.last_layers(1)

    def evaluates(self) -> str:
        return "clients"

    def begin(self, client: Client) -> Tensor:
        return client.w + 0.01 * (client.carry["start"] - client.w) + 0.001 * client.server["y"]

    def aggregate(self, w: Tensor, up: State, cohort: Cohort, server: State) -> tuple[Tensor, State]:
        w, state = super().aggregate(w, up, cohort, server)
        return w, state | {"y": server["y"] + up["delta"]}


@pytest.fixture
def everything() -> Iterator[None]:
    algorithms.register("everything", Everything)
    yield
    del algorithms.members["everything"]


@pytest.mark.parametrize("lost_phase", [None, 0, 1])
def test_all_that_a_message_can_hold(lost_phase: int | None, everything: None, tmp_path: Path) -> None:
    """If a reply is lost in a phase, the client goes on from its state before the round."""
    tables = small_run({"name": "everything"}, participation={"name": "full"}, rounds=3)
    lost = ("train", 1, 2, lost_phase)  # of client 1 in round 2
    drop = lambda kind, client, payload, reply: (
        None if (kind, client, payload.numbers.get("round"), payload.numbers.get("phase")) == lost else reply
    )
    deployed, _, warnings = deploy(tables, tmp_path, change_reply=drop)
    assert len(warnings) == (lost_phase is not None)
    if lost_phase == 1:  # a simulation has no client that leaves between phases
        assert deployed.rounds[1]["absent"] == 1 and deployed.rounds[2]["participants"] == [0, 1, 2, 3, 4]
        return
    if lost_phase == 0:
        everybody = [0, 1, 2, 3, 4]
        tables = with_participants(tables, [everybody, [0, 2, 3, 4], everybody], tmp_path)
    simulated = simulate(tables)
    assert models_equal(deployed.model, simulated.model)
    assert deployed.rounds[-1]["loss"] == pytest.approx(simulated.rounds[-1]["loss"], rel=1e-12)


@pytest.mark.parametrize("key", slow_except(KINDS, VARIANTS))
def test_every_method_is_the_simulators(key: str, tmp_path: Path) -> None:
    """Every message is bytes on its way, and a client knows no more than what is in its file."""
    tables, replies = small_run(VARIANTS[key]), list[tuple[int, Payload]]()

    def note(kind: str, client: int, payload: Payload, reply: Payload) -> Payload:
        replies.append((payload.numbers["round"] if kind == "train" else 0, reply))
        return reply

    deployed, transport, warnings = deploy(tables, tmp_path, change_reply=note)
    simulated = simulate(tables)
    assert warnings == []
    assert_same_rounds(deployed, simulated)
    if key != "centralised":  # whose model stays with its client
        assert models_equal(deployed.model, simulated.model)
    for record in deployed.rounds:  # to the byte; names, numbers and the headers of arrays come on top
        t = record["round"]
        down = [payload for kind, _, payload in transport.sent if kind == "train" and payload.numbers["round"] == t]
        up = [reply for round, reply in replies if round == t]
        counted = record["bytes_down"], record["bytes_up"]
        assert (sum(map(tensor_bytes, down)), sum(map(tensor_bytes, up))) == counted
        assert 0 < record["wire_down"] - record["bytes_down"] <= 1024 * len(down)
        assert 0 < record["wire_up"] - record["bytes_up"] <= 1024 * len(up)


def tensor_bytes(payload: Payload) -> int:
    return sum(t.numel() * t.element_size() for t in payload.tensors.values())
