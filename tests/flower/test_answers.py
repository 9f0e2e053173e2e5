"""Each kind of faulty answer in a deployment: the reason in the record, the line on the console, and the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from in_process import (
    NO_NORM,
    VARIANTS,
    InProcessTransport,
    OneByOneTransport,
    deploy,
    models_equal,
    simulate,
    small_run,
    with_participants,
)

from askew.core import records
from askew.engine import answers as reasons
from askew.errors import ConfigError, EngineError
from askew.experiment.store import Run
from askew.flower.deployment_data import DataModule
from askew.flower.transport import Reply
from askew.flower.wire import Payload

ASKED = [0, 1, 2, 3]


def change_tensors(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Payload], Payload]:
    return lambda reply: reply._replace(tensors={name: change(t) for name, t in reply.tensors.items()})


def change_numbers(**changes: int) -> Callable[[Payload], Payload]:
    return lambda reply: reply._replace(
        numbers={**reply.numbers, **{name: reply.numbers[name] + change for name, change in changes.items()}}
    )


FAULTS: list[tuple[Callable[[Payload], Payload | str | None], str]] = [  # what client 1 does in each round
    (lambda reply: None, records.NO_ANSWER),
    (lambda reply: "the disk is full", records.CLIENT_ERROR),
    (change_tensors(lambda t: t * math.nan), reasons.NOT_FINITE),
    (change_tensors(lambda t: t + math.inf), reasons.NOT_FINITE),
    (change_tensors(lambda t: t[:-1]), reasons.WRONG_FORM),
    (change_tensors(lambda t: t.double()), reasons.WRONG_FORM),
    (lambda reply: reply._replace(tensors={}), reasons.WRONG_FORM),
    (change_tensors(lambda t: 1e6 * t), reasons.TOO_LARGE),
    (change_numbers(round=-1), reasons.OTHER_ROUND),
    (change_numbers(client=1), reasons.OTHER_CLIENT),
]


def faulty_run(key: str, rounds: list[list[int]], folder: Path) -> dict[str, Any]:
    return with_participants(small_run(VARIANTS[key], model=NO_NORM, evaluation={"every": 20}), rounds, folder)


def test_each_fault_of_a_client_has_its_reason_in_the_record(tmp_path: Path) -> None:
    """The model is that of a run without the client, and its share of the data is recorded as lost."""
    count = len(FAULTS)

    def spoil(kind: str, client: int, payload: Payload, reply: Payload) -> Payload | str | None:
        return FAULTS[payload.numbers["round"] - 1][0](reply) if (kind, client) == ("train", 1) else reply

    deployed, _, warnings = deploy(faulty_run("scaffold", [ASKED] * count, tmp_path), tmp_path, change_reply=spoil)
    simulated = simulate(faulty_run("scaffold", [[0, 2, 3]] * count, tmp_path))
    assert [r["incidents"] for r in deployed.rounds] == [{reason: [1]} for _, reason in FAULTS]
    sizes = np.array(deployed.federation["sizes"])
    assert {r["lost_share"] for r in deployed.rounds} == {sizes[1] / sizes[ASKED].sum()}
    assert models_equal(deployed.model, simulated.model)
    assert [r["train_loss"] for r in deployed.rounds] == [r["train_loss"] for r in simulated.rounds]
    assert len(warnings) == count and all("client 1" in text for text in warnings)
    call = deployed.roll_call()
    assert (call.unused, call.unasked, call.lost) == ([1], [4], count)


class RepeatingTransport(OneByOneTransport):
    """A transport that brings one reply at a time, and client 1's again with the next one."""

    again: dict[str, Reply] = {}

    def receive(self, message_ids: Collection[str]) -> dict[str, Reply]:
        new = super().receive(message_ids)
        replies, self.again = self.again | new, {m: r for m, r in new.items() if self.sent[int(m)][:2] == ("train", 1)}
        return replies


def test_the_first_of_two_answers_is_used_and_the_second_is_counted(tmp_path: Path) -> None:
    tables = faulty_run("scaffold", [ASKED] * 2, tmp_path)
    deployed, _, _ = deploy(tables, tmp_path, {"timeout": 60.0}, transport_class=RepeatingTransport)
    assert [r["incidents"] for r in deployed.rounds] == [{reasons.REPEATED: [1]}] * 2
    assert [(r["lost_share"], r["dropped"], r.get("absent")) for r in deployed.rounds] == [(0.0, 0, None)] * 2
    assert models_equal(deployed.model, simulate(tables).model) and deployed.roll_call().lost == 0


def test_why_a_round_is_thrown_away_and_who_was_not_awaited(tmp_path: Path) -> None:
    drop: Any = lambda kind, client, payload, reply: None if (kind, client) == ("train", 1) else reply
    tables = faulty_run("fedavg", [ASKED], tmp_path)
    deployed, _, _ = deploy(tables, tmp_path, {"answers": 4}, change_reply=drop)
    assert deployed.rounds[0]["incidents"] == {records.NO_ANSWER: [1], reasons.TOO_FEW: [0, 2, 3]}
    assert deployed.rounds[0]["lost_share"] == 1.0 and deployed.rounds[0]["bytes_up"] > 0
    tables = small_run({"name": "fedavg"}, rounds=1, model=NO_NORM)
    rules = {"spare": 1.0, "timeout": 60.0, "fresh": True}
    spare, _, _ = deploy(tables, tmp_path, rules, transport_class=OneByOneTransport)
    assert spare.rounds[0]["incidents"] == {records.NOT_AWAITED: [3, 4]}


class AnyTimeTransport(InProcessTransport):
    """A transport that keeps client 1's reply of round 1 back and gives it as that of round 2."""

    kept: Reply | None = None

    def receive(self, message_ids: Collection[str]) -> dict[str, Reply]:
        replies = super().receive(message_ids)
        for message_id in [m for m in replies if self.sent[int(m)][:2] == ("train", 1)]:
            late, self.kept = self.kept, replies.pop(message_id)
            if late is not None:
                replies[message_id] = late
        return replies


def test_a_late_answer_is_none_in_its_round_and_refused_in_the_next(tmp_path: Path) -> None:
    deployed, _, _ = deploy(faulty_run("scaffold", [ASKED] * 2, tmp_path), tmp_path, transport_class=AnyTimeTransport)
    assert [r["incidents"] for r in deployed.rounds] == [{records.NO_ANSWER: [1]}, {reasons.OTHER_ROUND: [1]}]
    assert models_equal(deployed.model, simulate(faulty_run("scaffold", [[0, 2, 3]] * 2, tmp_path)).model)


def test_faults_are_not_put_into_real_answers_and_the_limit_can_be_set(tmp_path: Path) -> None:
    tables = faulty_run("fedavg", [ASKED], tmp_path)
    with pytest.raises(ConfigError, match="the rates and check_answers are for simulations"):
        deploy(tables | {"faults": {"missing": 0.1}}, tmp_path)
    enlarge: Any = lambda kind, client, payload, reply: (
        change_tensors(lambda t: 1e6 * t)(reply) if (kind, client) == ("train", 1) else reply
    )
    for limit, incidents in ((1e9, None), (0.0, None), (1e3, {reasons.TOO_LARGE: [1]})):
        limited = tables | {"faults": {"scale_limit": limit}}
        deployed, _, _ = deploy(limited, tmp_path / f"{limit}", change_reply=enlarge)
        assert deployed.rounds[0].get("incidents") == incidents


def test_the_console_says_after_every_round_whose_answers_were_used(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("flwr", reason="needs Flower: pip install -e '.[flower]'")
    from askew.flower import server_app

    lines: list[tuple[int, str]] = []
    monkeypatch.setattr(server_app, "log", lambda level, text, *values: lines.append((level, text % values)))
    record = {"round": 1, "participants": [0, 2], "accuracy": 0.5, "dropped": 0, "seconds": 1.0}
    federation = {"clients": 4, "shown": 4, "sizes": [10, 40, 30, 20], "samples": 100}
    run = Run({"rounds": 2}, [record], {"engine": "flower", "name": "trial"}, federation)
    server_app.log_round(run, record)
    lost = record | {"round": 2, "incidents": {records.NO_ANSWER: [1]}, "lost_share": 0.5, "absent": 1}
    run.rounds.append(lost)
    server_app.log_round(run, lost)
    assert lines[1] == (20, "round 1: 2 of 2 answers used")
    assert lines[3] == (30, "round 2: 2 of 3 answers used; no answer: client 1; 50% of the data of this round lost")
    assert [text for level, text in lines[4:] if level == 30] == [
        "trial: 1 answer lost, incidents in 1 of 2 rounds; at most 50% of a round's data, in round 2",
        "trial: Client 1 was asked, but no answer was ever used (40% of all data).",
        "trial: Client 3 was never asked (20% of all data).",
    ]


def test_a_data_module_that_raises_is_said_once_and_not_waited_for(tmp_path: Path) -> None:
    def client(node: Any) -> Any:
        raise FileNotFoundError("no such file: ward.csv")

    said: list[str] = []
    with pytest.raises(EngineError, match=r"none of the 5 connected nodes can take part: .*client\(node\) failed in"):
        deploy(faulty_run("fedavg", [ASKED], tmp_path), tmp_path, {"wait": 5.0}, said, data=DataModule(client))
    assert len(said) == 5 and all("FileNotFoundError: no such file: ward.csv" in text for text in said)
