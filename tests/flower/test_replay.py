"""Questions that are asked twice: a client answers each message of a round once, and knows it after a restart.

Every message is answered by a new client object, as by a new process: what it knows of earlier ones is in its files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import FIRST_NODE, InProcessTransport, deploy, private_run, small_run

from askew.flower.client_state import lock_answers
from askew.flower.wire import Payload, RawPayload, encode_payload

NOISE = {"clip": 1.0, "noise": 0.5, "where": "client"}


def uniform_run(privacy: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A run in which all clients take part with equal weights."""
    tables = private_run("fedavg", privacy, participation={"name": "full"}, **changes)
    return tables | {"algorithm": {"name": "fedavg", "weighting": "uniform"}}


def sent_to(transport: InProcessTransport, client: int, kind: str = "train") -> Payload:
    """The first message of a kind to a client, as it travelled."""
    payload = next(payload for one, to, payload in transport.sent if (one, to) == (kind, client))
    return payload._replace(numbers={**payload.numbers, "client": client})


def ask(transport: InProcessTransport, client: int, payload: Payload, kind: str = "train") -> RawPayload | str:
    """What a client answers to a message."""
    reply = transport.answer(kind, FIRST_NODE + client, encode_payload(payload))
    return encode_payload(reply) if isinstance(reply, Payload) else reply


def change_numbers(payload: Payload, **numbers: Any) -> Payload:
    return payload._replace(numbers={**payload.numbers, **numbers})


def test_noise_cannot_be_averaged_away(tmp_path: Path) -> None:
    """The same question has one answer: the mean of many is no nearer to the update than one."""
    _, transport, _ = deploy(uniform_run(NOISE, rounds=1), tmp_path)
    question = sent_to(transport, 2)
    answers = [ask(transport, 2, question) for _ in range(20)]
    assert isinstance(answers[0], RawPayload) and all(answer == answers[0] for answer in answers)


def test_a_round_is_answered_for_one_model(tmp_path: Path) -> None:
    _, transport, _ = deploy(uniform_run(NOISE, rounds=2), tmp_path)
    question = sent_to(transport, 2)
    other = question._replace(tensors={n: t + 1 for n, t in question.tensors.items()})
    for another in (other, change_numbers(question, lr=0.01), change_numbers(other, start="again")):
        answer = ask(transport, 2, another)
        assert isinstance(answer, str)
        assert answer.startswith("client 2 has answered another message of round 1 (train, phase 0) before")
        assert str(tmp_path / "clients" / "client-2-answers.safetensors") in answer and answer.count(". ") == 0
    old = ask(transport, 2, question)  # of a round whose answers are no longer kept
    assert isinstance(old, str) and "this message, and no longer has its answer" in old


@pytest.mark.parametrize("round", [0, 3, 2**40])
def test_rounds_that_the_run_does_not_have_are_refused(round: int, tmp_path: Path) -> None:
    _, transport, _ = deploy(small_run({"name": "fedavg"}, rounds=2, participation={"name": "full"}), tmp_path)
    answer = ask(transport, 1, change_numbers(sent_to(transport, 1), round=round))
    assert answer == (
        f"the server: this is of round {round}, and the run has 2 rounds; "
        "client 1 answers no other, start a run with more rounds."
    )


def test_two_secure_sums_of_a_round_do_not_tell_a_client_apart(tmp_path: Path) -> None:
    """A server that forgets its run and asks again without client 4 would learn client 4's update by subtraction."""
    pytest.importorskip("flwr", reason="needs Flower: pip install -e '.[flower]'")

    class WithoutOne(InProcessTransport):
        def connected_nodes(self) -> list[int]:
            return [FIRST_NODE + client for client in range(4)]

    tables = uniform_run({"secure": True, "fewest": 2}, rounds=1)
    first, _, _ = deploy(tables, tmp_path)
    rules = {"fresh": True, "nodes": 4}
    second, _, warnings = deploy(tables, tmp_path, rules, transport_class=WithoutOne)
    assert first.rounds[0]["participants"] == [0, 1, 2, 3, 4] and second.rounds[0]["participants"] == []
    assert sum("has answered another message of round 1 (train.shares, phase 0) before" in w for w in warnings) == 4


def test_a_secure_sum_that_is_asked_for_again_is_the_same(tmp_path: Path) -> None:
    """A server that was killed in the last stage of a sum runs the round again, and all stages have their answers."""
    pytest.importorskip("flwr", reason="needs Flower: pip install -e '.[flower]'")
    tables, secrets = uniform_run({"secure": True, "fewest": 2}, rounds=1), dict[int, dict[str, Any]]()

    def interrupt(kind: str, client: int, payload: Payload, reply: Payload) -> Payload:
        if kind == "train.unmask" and client == 4:
            raise KeyboardInterrupt
        return reply

    class SameNodes(InProcessTransport):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.secrets = secrets

    with pytest.raises(KeyboardInterrupt):
        deploy(tables, tmp_path, transport_class=SameNodes, change_reply=interrupt)
    run, _, warnings = deploy(tables, tmp_path, transport_class=SameNodes)
    alone, _, _ = deploy(tables, tmp_path / "alone")
    assert warnings == [] and run.rounds[0]["participants"] == [0, 1, 2, 3, 4]
    assert all(torch.equal(run.model[n], v) for n, v in alone.model.items())


def test_a_run_without_privacy_may_start_over(tmp_path: Path) -> None:
    """With other participants its second round has another model, which is no attack: nothing was hidden."""
    tables = small_run({"name": "fedavg"}, rounds=2, participation={"name": "full"})
    deploy(tables, tmp_path)
    drop = lambda kind, client, payload, reply: None if (kind, client) == ("train", 0) else reply
    run, _, warnings = deploy(tables, tmp_path, {"fresh": True}, change_reply=drop)
    assert [r["participants"] for r in run.rounds] == [[1, 2, 3, 4]] * 2 and len(warnings) == 2


def test_a_damaged_list_of_answers_is_named(tmp_path: Path) -> None:
    _, transport, _ = deploy(uniform_run(NOISE, rounds=1), tmp_path)
    path = tmp_path / "clients" / "client-2-answers.safetensors"
    path.write_bytes(path.read_bytes()[:40])
    answer = ask(transport, 2, sent_to(transport, 2))
    assert isinstance(answer, str) and answer.startswith(
        f"the client's list of answers {path} cannot be read or is damaged; "
    )


def test_one_process_at_a_time_answers_for_a_client(tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl", reason="locks of files need a POSIX system")
    path = tmp_path / "answers.safetensors"
    with lock_answers(path), open(path.with_suffix(".lock"), "w") as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


# what the server sends ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numbers", "sentence"),
    [
        ({"lr": float("nan")}, "the server: lr must be a number from 0 to 1e+09, got nan"),
        ({"lr": -0.1}, "the server: lr must be a number from 0 to 1e+09, got -0.1"),
        ({"tau": float("inf")}, "the server: tau must be a number from 0 to 1e+09, got inf"),
        ({"clip": float("nan")}, "the server: clip must be a number from 0 to 1e+09, got nan"),
        ({"momentum": 1e300}, "the server: momentum must be a number from 0 to 1e+09, got 1e+300"),
        ({"steps": float("nan")}, "batches, and the server counts on nan"),
        ({"round": 2**60}, "the server: round must be of type int"),
        ({"start": "x" * 2000}, "the server: start must be of type str"),
    ],
)
def test_settings_of_the_server_are_checked(numbers: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    _, transport, _ = deploy(small_run({"name": "fedavg"}, rounds=1, participation={"name": "full"}), tmp_path)
    (tmp_path / "clients" / "client-1-answers.safetensors").unlink()
    answer = ask(transport, 1, change_numbers(sent_to(transport, 1), **numbers))
    assert isinstance(answer, str) and sentence in answer
    assert not (tmp_path / "clients" / "client-1-answers.safetensors").exists()  # a refusal is no answer
