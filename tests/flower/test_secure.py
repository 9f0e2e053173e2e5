"""Secure aggregation: the sum is the plain one, single uploads are not to be read, and clients that leave or lie cost a round at most."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hands import VARIANTS, page, simulated, written
from safetensors.torch import load_file
from test_privacy import WIDE, deployed, tables, values

from askew.experiment.store import load
from askew.flower.app import write_app
from askew.flower.server import Rules
from askew.flower.wire import Payload, RawPayload

pytest.importorskip("flwr", reason="needs the extra flower")

from test_apps import play, task  # noqa: F401 - what Flower sets in the process of an app

from askew.flower import secure
from askew.flower.loopback import Loopback

SECURE = {"secure": True, "fewest": 2}


@pytest.mark.parametrize(
    "key", ["fedavg", "fedprox", "fedadam", "scaffold", "feddyn", "feddc", "fedga", "moon", "fedbn", "fedsgd"]
)
def test_the_sum_is_the_plain_one(key: str, tmp_path: Path) -> None:
    """The same rounds as without, up to 2^-33 a number; no answer of training holds anything but masked words."""
    seen: list[Payload] = []

    def noted(kind: str, client: int, letter: Payload, told: Payload) -> Payload:
        seen.extend([told] if kind == "train" else [])
        return told

    whole = page(VARIANTS[key])
    run, _, said = deployed(whole | {"privacy": SECURE}, tmp_path, noted)
    theirs = simulated(whole)
    assert said == [] and all({*told.tensors} == {"hidden"} and told.numbers["loss"] == 0 for told in seen)
    assert max((run.model[n] - v).abs().max().item() for n, v in theirs.model.items()) < 1e-5
    for one, other in zip(run.rounds, theirs.rounds, strict=True):
        assert one["participants"] == other["participants"] and one["train_loss"] == pytest.approx(
            other["train_loss"], rel=1e-4
        )


def test_masked_words_tell_nothing(tmp_path: Path) -> None:
    """They fill all 64 bits evenly, and the same update is masked otherwise each round."""
    words: list[np.ndarray] = []

    def noted(kind: str, client: int, letter: Payload, told: Payload) -> Payload:
        words.extend([told.tensors["hidden"].numpy().view(np.uint64)] if kind == "train" else [])
        return told

    deployed(tables(model=WIDE, rounds=1, privacy=SECURE), tmp_path, noted)
    bits = np.unpackbits(words[0].view(np.uint8))
    assert bits.mean() == pytest.approx(0.5, abs=5 * 0.5 / math.sqrt(len(bits)))
    high = (words[0] >> np.uint64(60)).astype(int)
    assert np.bincount(high, minlength=16).std() < 5 * math.sqrt(len(high) / 16)
    assert len({*words[0].tolist()} & {*words[1].tolist()}) == 0


@pytest.mark.parametrize("stage", ["train.keys", "train.shares", "train", "train.unmask"])
def test_a_client_that_leaves_at_any_stage_is_left_out(stage: str, tmp_path: Path) -> None:
    """The sum is of the others, as if it had never been asked; but for one that leaves when all is sent."""
    whole = tables("scaffold", participation={"name": "full"}, rounds=2)
    gone = lambda kind, client, letter, told: (
        None if (kind, client, letter.numbers.get("round")) == (stage, 1, 1) else told
    )
    run, _, said = deployed(whole | {"privacy": SECURE}, tmp_path, gone)
    came = [[0, 2, 3, 4] if stage != "train.unmask" else [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
    path = tmp_path / "trace.json"
    path.write_text(str(came))
    theirs = simulated(whole | {"participation": {"name": "trace", "path": str(path)}})
    assert [r["participants"] for r in run.rounds] == came and len(said) == (stage != "train.unmask")
    assert max((run.model[n] - v).abs().max().item() for n, v in theirs.model.items()) < 1e-5


def test_with_too_few_left_the_round_is_thrown_away(tmp_path: Path) -> None:
    gone = lambda kind, client, letter, told: (
        None if (kind, letter.numbers.get("round")) == ("train", 1) and client < 3 else told
    )
    run, _, said = deployed(tables(participation={"name": "full"}, privacy=SECURE, rounds=2), tmp_path, gone)
    assert run.rounds[0]["participants"] == [] and run.rounds[1]["participants"] == [0, 1, 2, 3, 4]
    assert "round 1: secure aggregation has 2 clients left, at least 3 are needed; the round is thrown away." in said


@pytest.mark.parametrize(
    ("stage", "numbers"),
    [
        ("train.keys", {"mask": b"x"}),
        ("train.keys", {"mask": 3}),
        ("train.shares", {"sealed": [b"x"]}),
        ("train.shares", {"sealed": [b"x"] * 5}),
        ("train.unmask", {"shares": [b"x"] * 5}),
        ("train.unmask", {"shares": [bytes(52)] * 5}),
    ],
)
def test_false_answers_cost_a_round_at_most(stage: str, numbers: dict[str, Any], tmp_path: Path) -> None:
    def spoil(kind: str, client: int, letter: Payload, told: Payload) -> Payload:
        return (
            told._replace(numbers={**told.numbers, **numbers})
            if (kind, client, letter.numbers.get("round")) == (stage, 1, 1)
            else told
        )

    run, _, said = deployed(tables(participation={"name": "full"}, privacy=SECURE, rounds=2), tmp_path, spoil)
    assert run.finished and said and run.rounds[1]["participants"] == [0, 1, 2, 3, 4]
    assert all(abs(v).max() < 100 for v in run.model.values())


def test_noise_and_sums_go_together(tmp_path: Path) -> None:
    whole = tables(model=WIDE, rounds=1, participation={"name": "full"})
    whole["algorithm"] = {"name": "fedavg", "weighting": "uniform"}
    still, _, _ = deployed(whole | {"privacy": {"clip": 0.5}}, tmp_path / "still")
    run, _, _ = deployed(whole | {"privacy": {"clip": 0.5, "noise": 2.0, "secure": True}}, tmp_path / "run")
    assert (values(run) - values(still)).std().item() == pytest.approx(2.0 * 0.5 / 5, rel=0.02)


def test_a_client_tells_one_share_of_one_secret_once() -> None:
    """A server that asks for both shares of a client, or for the sum of one, gets a sentence."""
    vaults = [dict[str, Any]() for _ in range(4)]
    clients = [secure.Hidden(vault, i, 3, "the server") for i, vault in enumerate(vaults)]
    keys = [client.keys("here", RawPayload({}, {})) for client in clients]
    public = {name: [k[name] for k in keys] for name in ("mask", "letter")}
    asked = lambda **numbers: RawPayload(numbers, {})
    with pytest.raises(secure.Refused, match="a sum of 2 clients was asked for, at least 3"):
        clients[0].shares("here", asked(clients=[0, 1], **{n: v[:2] for n, v in public.items()}))
    with pytest.raises(secure.Refused, match="keys came that are not one of each"):
        clients[0].shares("here", asked(clients=[0, 1, 2, 3], mask=[public["mask"][1]] * 4, letter=public["letter"]))
    with pytest.raises(secure.Refused, match="this one's own among them"):  # somebody else's in its place
        clients[0].shares("here", asked(clients=[1, 0, 2, 3], **public))
    with pytest.raises(secure.Refused, match="does not follow"):
        clients[0].shares("there", asked(clients=[0, 1, 2, 3], **public))
    sealed = [client.shares("here", asked(clients=[0, 1, 2, 3], **public))["sealed"] for client in clients]
    vectors = [secure.pressed(torch.tensor([i + 0.25, -float(i)])) for i in range(4)]
    letter = lambda i: asked(present=[0, 1, 2, 3], sealed=[row[i] for row in sealed])
    hidden = {i: client.hide("here", letter(i), vectors[i]) for i, client in enumerate(clients) if i != 2}
    with pytest.raises(secure.Refused, match="does not follow"):
        clients[0].hide("here", letter(0), vectors[0])
    with pytest.raises(secure.Refused, match="too few to tell their sum"):
        clients[0].unmask("here", asked(answered=[0]))
    shares = [clients[i].unmask("here", asked(answered=[0, 1, 3]))["shares"] for i in (0, 1, 3)]
    with pytest.raises(secure.Refused, match="does not follow"):
        clients[0].unmask("here", asked(answered=[1, 2, 3]))
    total = secure.unmasked(hidden, dict(enumerate(public["mask"])), dict(enumerate(zip(*shares, strict=True))), 2)
    assert secure.unpressed(total).tolist() == [4.75, -4.0]
    with pytest.raises(secure.Refused, match="cannot be summed"):
        secure.pressed(torch.tensor([float("nan")]))


def test_flower_carries_all_stages(tmp_path: Path) -> None:
    """The apps as Flower calls them; secrets are with its context between messages, and gone at the end."""
    whole = page(VARIANTS["scaffold"], participation={"name": "full"})
    grid = play(whole | {"privacy": SECURE}, tmp_path)
    run, theirs = load(next((tmp_path / "runs").iterdir())), simulated(whole)
    assert run.folder is not None and run.finished and run.facts["privacy"] == "secure aggregation"
    model = load_file(run.folder / "model.safetensors")
    assert max((model[n] - v).abs().max().item() for n, v in theirs.model.items()) < 1e-5
    assert all(context.state["secure"] == {} for context in grid.contexts.values())
    assert run.config["privacy"]["secure"] is True


@pytest.mark.skipif(os.environ.get("ASKEW_LOOPBACK") != "all", reason="takes long; set ASKEW_LOOPBACK=all")
def test_real_clients_add_up(tmp_path: Path) -> None:
    whole = page(
        VARIANTS["fedavg"], rounds=1, partition={"name": "natural", "clients": 3}, participation={"name": "full"}
    )
    rules = Rules(out=str(tmp_path / "runs"), wait=300.0, timeout=300.0)
    write_app(written(whole | {"privacy": {"secure": True}}, tmp_path / "page"), tmp_path / "app", rules=rules)
    with Loopback(tmp_path / "flower", 3, env={"OMP_NUM_THREADS": "1"}) as link:
        assert link.run(tmp_path / "app").wait(300.0) == 0, (link.folder / "run.log").read_text()
    run = load(next((tmp_path / "runs").iterdir()))
    assert run.folder is not None and run.rounds[0]["participants"] == [0, 1, 2]
    model = load_file(run.folder / "model.safetensors")
    assert max((model[n] - v).abs().max().item() for n, v in simulated(whole).model.items()) < 1e-6


def test_a_letter_of_shares_is_good_for_one_way() -> None:
    """Who passes them on cannot hand a client its own letter as another's."""
    vaults = [dict[str, Any]() for _ in range(3)]
    clients = [secure.Hidden(vault, i, 2, "the server") for i, vault in enumerate(vaults)]
    keys = [client.keys("here", RawPayload({}, {})) for client in clients]
    told = RawPayload({"clients": [0, 1, 2], **{name: [k[name] for k in keys] for name in ("mask", "letter")}}, {})
    sealed = [client.shares("here", told)["sealed"] for client in clients]
    given = [
        sealed[0][0],
        sealed[0][1],
        sealed[2][0],
    ]  # the second is a letter of client 0's own, sent back as client 1's
    clients[0].hide("here", RawPayload({"present": [0, 1, 2], "sealed": given}, {}), secure.pressed(torch.zeros(1)))
    shares = clients[0].unmask("here", RawPayload({"answered": [0, 2]}, {}))["shares"]
    assert [bool(share) for share in shares] == [True, False, True]
