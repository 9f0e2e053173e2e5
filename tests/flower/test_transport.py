"""A deployed run is the simulated one, number for number, and what travels is what was counted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hands import VARIANTS, assert_same_rounds, deployed, page, same_model, simulated
from torch import Tensor

from askew.algorithms import Scaffold, algorithms
from askew.core.algorithm import Algorithm
from askew.core.space import Space
from askew.core.types import Client, Cohort, Part, State
from askew.flower.wire import Payload


class Warm(Algorithm):
    """A phase that trains, moves the model, changes the client's state and has a carry for the next one."""

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
        return (Warm(), self)

    def memory(self, space: Space) -> State:
        return {"y": space.zeros()}

    def private(self, space: Space) -> Part:
        return space.last(1)

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


@pytest.mark.parametrize("lost", [None, 0, 1])
def test_all_that_a_message_can_hold(lost: int | None, everything: None, tmp_path: Path) -> None:
    """Where an answer is lost in a phase, the client goes on from its state before the round."""
    tables = page({"name": "everything"}, participation={"name": "full"})
    cut = lambda kind, client, letter, told: (
        None
        if (kind, client, letter.numbers.get("round"), letter.numbers.get("phase")) == ("train", 1, 2, lost)
        else told
    )
    ours, _, said = deployed(tables, tmp_path, change=cut)
    assert len(said) == (lost is not None)
    if lost == 1:  # a simulation has no client that leaves between phases
        assert ours.rounds[1]["absent"] == 1 and ours.rounds[2]["participants"] == [0, 1, 2, 3, 4]
        return
    if lost == 0:
        path = tmp_path / "trace.json"
        path.write_text(json.dumps([[0, 1, 2, 3, 4], [0, 2, 3, 4], *[[0, 1, 2, 3, 4]] * 2]))
        tables["participation"] = {"name": "trace", "path": str(path)}
    theirs = simulated(tables)
    assert same_model(ours.model, theirs.model)
    assert ours.rounds[-1]["loss"] == pytest.approx(theirs.rounds[-1]["loss"], rel=1e-12)


@pytest.mark.parametrize("key", VARIANTS)
def test_every_method_is_the_simulators(key: str, tmp_path: Path) -> None:
    """Every letter is bytes on its way, every client knows what lies in its file and no more."""
    tables, answers = page(VARIANTS[key]), list[tuple[int, Payload]]()

    def noted(kind: str, client: int, letter: Payload, told: Payload) -> Payload:
        answers.append((letter.numbers["round"] if kind == "train" else 0, told))
        return told

    ours, post, said = deployed(tables, tmp_path, change=noted)
    theirs = simulated(tables)
    assert said == []
    assert_same_rounds(ours, theirs)
    if key != "centralised":  # whose model stays with its client
        assert same_model(ours.model, theirs.model)
    for record in ours.rounds:  # to the byte; names, numbers and the headers of arrays come on top
        t = record["round"]
        down = [letter for kind, _, letter in post.log if kind == "train" and letter.numbers["round"] == t]
        up = [letter for round, letter in answers if round == t]
        assert (sum(map(size, down)), sum(map(size, up))) == (record["bytes_down"], record["bytes_up"])
        assert 0 < record["wire_down"] - record["bytes_down"] <= 1024 * len(down)
        assert 0 < record["wire_up"] - record["bytes_up"] <= 1024 * len(up)


def size(letter: Payload) -> int:
    return sum(t.numel() * t.element_size() for t in letter.tensors.values())
