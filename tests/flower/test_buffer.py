"""Asynchronous deployments within one process: what is used when, from which model, and what is lost."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from in_process import (
    FIRST_NODE,
    VARIANTS,
    ChangeReply,
    InProcessTransport,
    deploy,
    models_equal,
    simulate,
    slow_except,
    small_run,
)

from askew.algorithms import algorithms
from askew.core.records import CLIENT_ERROR, NO_ANSWER
from askew.errors import ConfigError
from askew.experiment.config import Config
from askew.experiment.store import Run, load
from askew.flower.buffered_engine import check_buffer
from askew.flower.client_state import AnswerLog
from askew.flower.rules import DeploymentRules
from askew.flower.transport import Reply
from askew.flower.wire import InvalidMessage, Payload

METHODS = slow_except(("scaffold",), ("scaffold", "fedbn", "fedvarp"))
NOT_COMPARED = ("seconds", "wire_up", "wire_down", "accuracy", "loss")
CLOCK = ("clock", "began", "asked", "late", "away", "answer_seconds", "started", "started_at")


class OrderedTransport(InProcessTransport):
    """A transport whose training answers come in a given order of clients, one at each look."""

    def __init__(self, *args: Any, turns: Sequence[int], **options: Any) -> None:
        super().__init__(*args, **options)
        self.turns, self.training = deque(turns), dict[str, int]()

    def send(self, kind: str, payloads: Mapping[int, Payload], group: str, timeout: float) -> dict[str, int]:
        sent = super().send(kind, payloads, group, timeout)
        self.training |= sent if kind == "train" else {}
        return sent

    def receive(self, message_ids: Collection[str]) -> dict[str, Reply]:
        if not {*message_ids} & {*self.training}:
            return super().receive(message_ids)
        due = [name for name in message_ids if self.turns and self.training[name] == FIRST_NODE + self.turns[0]]
        if due:
            self.turns.popleft()
        return super().receive(due)


def all_at_work(key: str, **changes: Any) -> dict[str, Any]:
    return small_run(VARIANTS[key], participation={"name": "uniform", "cohort": 5}, **changes)


def asked_rounds(run: Run) -> list[tuple[int, int, int]]:
    """Of every answer that was used: the round that used it, the client, and the round in which it was asked.

    Every round makes a step, so that the staleness of an answer is a number of rounds.
    """
    return [
        (record["round"], client, record["round"] - late)
        for record in run.rounds
        for client, late in zip(record["participants"], record["staleness"], strict=True)
    ]


def check_messages(run: Run, sent: Sequence[tuple[str, int, Payload]]) -> None:
    """Every message says which of the client's rounds was used last, and no answer is used twice."""
    used = asked_rounds(run)
    assert len({(client, round) for _, client, round in used}) == len(used)
    for kind, client, payload in sent:
        if kind == "train":
            before = [asked for t, i, asked in used if i == client and t < payload.numbers["round"]]
            assert payload.numbers["used"] == max(before, default=0)


@pytest.mark.parametrize("key", METHODS)
def test_a_buffer_as_large_as_the_cohort_gives_the_rounds_of_a_simulation(key: str, tmp_path: Path) -> None:
    tables = small_run(VARIANTS[key])
    deployed, _, warnings = deploy(tables, tmp_path, {"buffer": 3})
    simulated = simulate(tables)
    assert warnings == [] and models_equal(deployed.model, simulated.model)
    for one, other in zip(deployed.rounds, simulated.rounds, strict=True):
        assert {k: v for k, v in one.items() if k not in NOT_COMPARED} == {
            k: v for k, v in other.items() if k not in NOT_COMPARED
        } | {"staleness": [0, 0, 0]}


@pytest.mark.parametrize(("key", "buffer"), [pytest.param("fedasync", 1, marks=pytest.mark.slow), ("scaffold", 2)])
def test_answers_in_the_order_of_a_simulated_clock_give_its_model(key: str, buffer: int, tmp_path: Path) -> None:
    """All clients are at work, so that nothing is drawn: who answered is the one who starts again."""
    clock = {"wait": "buffer", "buffer": buffer, "speed": "lognormal", "sigma": 1.0}
    tables = all_at_work(key, rounds=6, evaluation={"every": 6})
    simulated = simulate(tables | {"time": clock})
    turns = [client for record in simulated.rounds for client in record["participants"]]
    deployed, transport, warnings = deploy(
        tables, tmp_path, {"buffer": buffer, "timeout": 60.0}, transport_class=OrderedTransport, turns=turns
    )
    assert warnings == [] and any(late for record in deployed.rounds for late in record["staleness"])
    assert models_equal(deployed.model, simulated.model)
    for one, other in zip(deployed.rounds, simulated.rounds, strict=True):
        assert {k: v for k, v in one.items() if k not in NOT_COMPARED} == {
            k: v for k, v in other.items() if k not in (*NOT_COMPARED, *CLOCK)
        }
    check_messages(deployed, transport.sent)


def lose(kind: str, client: int, payload: Payload, reply: Payload) -> Reply | Payload | None:
    """Client 1 fails in round 2 and client 0 says nothing in round 4."""
    if kind == "train" and (client, payload.numbers["round"]) == (1, 2):
        return "it has no power"
    return None if kind == "train" and (client, payload.numbers["round"]) == (0, 4) else reply


@pytest.mark.parametrize("change", [None, lose])
def test_answers_that_came_together_wait_and_lost_ones_are_replaced(change: ChangeReply | None, tmp_path: Path) -> None:
    tables = all_at_work("scaffold", rounds=5, evaluation={"every": 5})
    rules = {"buffer": 2, "timeout": 0.001 if change else 60.0, "hello": 0.01}
    run, transport, warnings = deploy(tables, tmp_path, rules, change_reply=change)
    assert run.finished and [len(r["participants"]) for r in run.rounds] == [2] * 5
    check_messages(run, transport.sent)
    if change is None:
        # all five answer at once: two are used, two wait, and the fifth waits for two rounds
        assert asked_rounds(run)[:6] == [(1, 0, 1), (1, 1, 1), (2, 2, 1), (2, 3, 1), (3, 0, 2), (3, 4, 1)]
        assert warnings == []
    else:
        lost = [(reason, *clients) for r in run.rounds for reason, clients in r.get("incidents", {}).items()]
        assert sorted(lost) == sorted([(CLIENT_ERROR, 1), (NO_ANSWER, 0)])
        assert any("client 1: it has no power" in text for text in warnings)
        asked_who = [client for kind, client, _ in transport.sent if kind == "query"]
        assert sorted(asked_who) == [0, 0, 1, 2, 3, 4]  # whoever was late says again which client it is


def test_a_killed_server_asks_again_whose_answers_were_on_their_way(tmp_path: Path) -> None:
    tables = all_at_work("scaffold", rounds=5, evaluation={"every": 5})
    count = 0

    def interrupt(kind: str, client: int, payload: Payload, reply: Payload) -> Payload:
        nonlocal count
        count += kind == "train"
        if count > 7:
            raise KeyboardInterrupt
        return reply

    with pytest.raises(KeyboardInterrupt):
        deploy(tables, tmp_path, {"buffer": 2}, change_reply=interrupt)
    before = load(next((tmp_path / "runs").iterdir()))
    with pytest.raises(ConfigError, match="holds this run with buffer = 2, and buffer = 0 is another run"):
        deploy(tables, tmp_path)
    run, transport, warnings = deploy(tables, tmp_path, {"buffer": 2})
    assert warnings == [] and len(run.rounds) == 5 and run.rounds[: len(before.rounds)] == before.rounds
    assert all(len(record["participants"]) == 2 for record in run.rounds)
    check_messages(run, transport.sent)


def test_a_message_that_comes_too_late_does_not_replace_a_newer_state() -> None:
    log, reply = AnswerLog(None, 0, strict=False), Payload({}, {})
    log.add("one", 5, "train, phase 0", "a", reply)
    with pytest.raises(InvalidMessage, match="has answered round 5 and trains for no earlier one; round 3 came too"):
        log.find("one", 3, "train, phase 0", "b")
    assert log.find("one", 3, "evaluate", "b") is None and log.find("one", 6, "train, phase 0", "b") is None
    assert log.find("another start", 3, "train, phase 0", "b") is None


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"participation": {"name": "full"}}, {"buffer": 2}, 'set participation.name = "uniform"'),
    ({}, {"buffer": 4}, "4 answers never come from the 3 clients of the cohort at work; lower buffer"),
    ({}, {"buffer": 1, "answers": 2}, "lower answers"),
    ({}, {"buffer": 2, "spare": 0.5}, "set spare = 0"),
    ({"algorithm": {"name": "fedga"}}, {"buffer": 2}, "FedGA has 2 exchanges in a round"),
    ({"algorithm": {"name": "fedcm"}}, {"buffer": 2}, "which is wrong for FedCM: it is a test; set buffer = 0"),
    ({"evaluation": {"weights": True}}, {"buffer": 2}, "the models that the clients started from"),
    ({"privacy": {"clip": 1.0, "noise": 1.0}}, {"buffer": 2}, "drawn together"),
]


@pytest.mark.parametrize(("changes", "rules", "sentence"), REFUSED, ids=lambda value: str(value)[:30])
def test_what_needs_rounds_is_refused(
    changes: dict[str, Any], rules: dict[str, Any], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(algorithms["fedcm"], "stale", "it is a test")
    model = {"name": "mlp", "hidden": [8], "norm": "none"}
    config = Config.build(small_run(VARIANTS["fedavg"], model=model) | changes)
    check_buffer(config, DeploymentRules.build({"out": "x"}))
    with pytest.raises(ConfigError, match=sentence):
        check_buffer(config, DeploymentRules.build(rules))
