"""Secure aggregation: the sum is the plain one, no upload can be read, and clients that leave or lie cost a round."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from in_process import (
    VARIANTS,
    WIDE,
    deploy,
    largest_difference,
    model_values,
    private_run,
    simulate,
    slow_except,
    small_run,
    wide_run,
    with_participants,
)
from safetensors.torch import load_file

from askew.experiment.store import load
from askew.flower.wire import InvalidMessage, Payload, RawPayload

pytest.importorskip("flwr", reason="needs Flower: pip install -e '.[flower]'")

from flower_grid import run_apps, task_identity  # noqa: F401 - the fixture is used by name

from askew.flower import secure

SECURE = {"secure": True, "fewest": 2}
EVERYBODY = [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "key",
    slow_except(
        ("scaffold", "fedga", "fedbn"),  # several uploads, phases, private parts
        ("fedavg", "fedprox", "fedadam", "scaffold", "feddyn", "feddc", "fedga", "moon", "fedbn", "fedsgd", "focus"),
    ),
)
def test_the_sum_is_the_plain_one(key: str, tmp_path: Path) -> None:
    """The same rounds as without, up to 2^-33 a number; a reply to training holds nothing but masked words."""
    replies: list[Payload] = []

    def note(kind: str, client: int, payload: Payload, reply: Payload) -> Payload:
        replies.extend([reply] if kind == "train" else [])
        return reply

    tables = small_run(VARIANTS[key])
    run, _, warnings = deploy(tables | {"privacy": SECURE}, tmp_path, change_reply=note)
    simulated = simulate(tables)
    assert warnings == [] and all({*reply.tensors} == {"masked"} and reply.numbers["loss"] == 0 for reply in replies)
    assert largest_difference(run.model, simulated.model) < 1e-5
    for one, other in zip(run.rounds, simulated.rounds, strict=True):
        assert one["participants"] == other["participants"]
        assert one["train_loss"] == pytest.approx(other["train_loss"], rel=1e-4)


def test_masked_words_reveal_nothing(tmp_path: Path) -> None:
    """They fill all 64 bits evenly, and two clients' have nothing in common."""
    masked: list[np.ndarray] = []

    def note(kind: str, client: int, payload: Payload, reply: Payload) -> Payload:
        masked.extend([reply.tensors["masked"].numpy().view(np.uint64)] if kind == "train" else [])
        return reply

    deploy(private_run(model=WIDE, rounds=1, privacy=SECURE), tmp_path, change_reply=note)
    bits = np.unpackbits(masked[0].view(np.uint8))
    assert bits.mean() == pytest.approx(0.5, abs=5 * 0.5 / math.sqrt(len(bits)))
    high = (masked[0] >> np.uint64(60)).astype(int)
    assert np.bincount(high, minlength=16).std() < 5 * math.sqrt(len(high) / 16)
    assert len({*masked[0].tolist()} & {*masked[1].tolist()}) == 0


@pytest.mark.parametrize("stage", ["train.keys", "train.shares", "train", "train.unmask"])
def test_a_client_that_leaves_at_any_stage_is_left_out(stage: str, tmp_path: Path) -> None:
    """The sum is that of the others, unless the client leaves after its vector is sent."""
    tables = private_run("scaffold", participation={"name": "full"}, rounds=2)
    drop = lambda kind, client, payload, reply: (
        None if (kind, client, payload.numbers.get("round")) == (stage, 1, 1) else reply
    )
    run, _, warnings = deploy(tables | {"privacy": SECURE}, tmp_path, change_reply=drop)
    participants = [EVERYBODY if stage == "train.unmask" else [0, 2, 3, 4], EVERYBODY]
    simulated = simulate(with_participants(tables, participants, tmp_path))
    assert [r["participants"] for r in run.rounds] == participants and len(warnings) == (stage != "train.unmask")
    assert largest_difference(run.model, simulated.model) < 1e-5


def test_with_too_few_left_the_round_is_thrown_away(tmp_path: Path) -> None:
    drop = lambda kind, client, payload, reply: (
        None if (kind, payload.numbers.get("round")) == ("train", 1) and client < 3 else reply
    )
    tables = private_run(participation={"name": "full"}, privacy=SECURE, rounds=2)
    run, _, warnings = deploy(tables, tmp_path, change_reply=drop)
    assert [r["participants"] for r in run.rounds] == [[], EVERYBODY]
    sentence = "round 1: secure aggregation has 2 clients left, at least 3 are needed; the round is thrown away."
    assert sentence in warnings


def test_false_replies_cost_a_round_at_most(tmp_path: Path) -> None:
    """Client 1 sends something false in every round but the last."""
    false: list[tuple[str, dict[str, Any]]] = [
        ("train.keys", {"mask": b"x"}),
        ("train.keys", {"mask": 3}),
        ("train.shares", {"encrypted_shares": [b"x"]}),
        ("train.shares", {"encrypted_shares": [b"x"] * 5}),
        ("train.unmask", {"shares": [b"x"] * 5}),
        ("train.unmask", {"shares": [bytes(52)] * 5}),
    ]

    def spoil(kind: str, client: int, payload: Payload, reply: Payload) -> Payload:
        stage, numbers = dict(enumerate(false, 1)).get(payload.numbers.get("round", 0), ("", {}))
        return reply._replace(numbers={**reply.numbers, **numbers}) if (kind, client) == (stage, 1) else reply

    tables = private_run(participation={"name": "full"}, privacy=SECURE, rounds=len(false) + 1)
    run, _, warnings = deploy(tables, tmp_path, change_reply=spoil)
    for n, case in enumerate(false, 1):
        assert any(text.startswith(f"round {n}: ") for text in warnings), case
    assert run.finished and run.rounds[-1]["participants"] == EVERYBODY
    assert all(abs(v).max() < 100 for v in run.model.values())


def test_noise_and_secure_aggregation_go_together(tmp_path: Path) -> None:
    tables = wide_run()
    without, _, _ = deploy(tables | {"privacy": {"clip": 0.5}}, tmp_path / "without")
    run, _, _ = deploy(tables | {"privacy": {"clip": 0.5, "noise": 2.0, "secure": True}}, tmp_path / "run")
    assert (model_values(run) - model_values(without)).std().item() == pytest.approx(2.0 * 0.5 / 5, rel=0.02)


@pytest.mark.usefixtures("task_identity")
def test_flower_carries_all_stages(tmp_path: Path) -> None:
    """The apps as Flower calls them; secrets are with its context between messages, and gone at the end."""
    tables = small_run(VARIANTS["scaffold"], participation={"name": "full"}, rounds=2)
    grid = run_apps(tables | {"privacy": SECURE}, tmp_path)
    run = load(next((tmp_path / "runs").iterdir()))
    assert run.folder is not None and run.finished and run.facts["privacy"] == "secure aggregation"
    assert largest_difference(load_file(run.folder / "model.safetensors"), simulate(tables).model) < 1e-5
    assert all(context.state["secure"] == {} for context in grid.contexts.values())
    assert run.config["privacy"]["secure"] is True


# the protocol ---------------------------------------------------------------------------------------------------


def request(**numbers: Any) -> RawPayload:
    return RawPayload(numbers, {})


def clients_with_keys(count: int, min_clients: int) -> tuple[list[secure.SecureClient], dict[str, list[Any]]]:
    """Clients of the sum "now" after the first stage, and their public keys by name."""
    clients = [secure.SecureClient({}, i, min_clients, "the server") for i in range(count)]
    replies = [client.create_keys("now", request()) for client in clients]
    return clients, {name: [reply[name] for reply in replies] for name in secure.KEY_NAMES}


def test_a_client_reveals_one_share_of_one_secret_once() -> None:
    """A server that asks for both shares of a client, or for a sum of too few, is refused in a sentence."""
    clients, keys = clients_with_keys(4, min_clients=3)
    with pytest.raises(InvalidMessage, match="a sum of 2 clients was asked for, at least 3"):
        clients[0].share_secrets("now", request(clients=[0, 1], **{n: v[:2] for n, v in keys.items()}))
    with pytest.raises(InvalidMessage, match="keys came that are not one of each"):
        same_key = {"mask": [keys["mask"][1]] * 4, "encryption": keys["encryption"]}
        clients[0].share_secrets("now", request(clients=[0, 1, 2, 3], **same_key))
    with pytest.raises(InvalidMessage, match="this one's own among them"):  # another client's in its place
        clients[0].share_secrets("now", request(clients=[1, 0, 2, 3], **keys))
    with pytest.raises(InvalidMessage, match="does not follow"):
        clients[0].share_secrets("then", request(clients=[0, 1, 2, 3], **keys))
    second = request(clients=[0, 1, 2, 3], **keys)
    encrypted = [client.share_secrets("now", second)["encrypted_shares"] for client in clients]
    vectors = [secure.to_fixed_point(torch.tensor([i + 0.25, -float(i)])) for i in range(4)]
    third = [request(present=[0, 1, 2, 3], encrypted_shares=[row[i] for row in encrypted]) for i in range(4)]
    masked = {i: client.mask("now", third[i], vectors[i]) for i, client in enumerate(clients) if i != 2}
    with pytest.raises(InvalidMessage, match="does not follow"):
        clients[0].mask("now", third[0], vectors[0])
    with pytest.raises(InvalidMessage, match="too few to tell their sum"):
        clients[0].reveal_shares("now", request(answered=[0]))
    shares = [clients[i].reveal_shares("now", request(answered=[0, 1, 3]))["shares"] for i in (0, 1, 3)]
    with pytest.raises(InvalidMessage, match="does not follow"):
        clients[0].reveal_shares("now", request(answered=[1, 2, 3]))
    by_client = dict(enumerate(zip(*shares, strict=True)))
    total = secure.unmask_sum(masked, dict(enumerate(keys["mask"])), by_client, 2)
    assert secure.from_fixed_point(total).tolist() == [4.75, -4.0]


def test_a_number_that_is_not_finite_cannot_be_summed() -> None:
    with pytest.raises(InvalidMessage, match="cannot be summed"):
        secure.to_fixed_point(torch.tensor([float("nan")]))


def test_encrypted_shares_are_good_for_one_sender_and_receiver() -> None:
    """A server that passes them on cannot give a client its own shares as those of another."""
    clients, keys = clients_with_keys(3, min_clients=2)
    second = request(clients=[0, 1, 2], **keys)
    encrypted = [client.share_secrets("now", second)["encrypted_shares"] for client in clients]
    given = [
        encrypted[0][0],
        encrypted[0][1],
        encrypted[2][0],
    ]  # the second is client 0's own, given back as client 1's
    third = request(present=[0, 1, 2], encrypted_shares=given)
    clients[0].mask("now", third, secure.to_fixed_point(torch.zeros(1)))
    shares = clients[0].reveal_shares("now", request(answered=[0, 2]))["shares"]
    assert [bool(share) for share in shares] == [True, False, True]
