"""Clients with data of their own: the same numbers as a simulation that holds all of it, and nothing told but counts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hands import VARIANTS, assert_same_rounds, deployed, page, same_model, simulated

import askew
from askew.data.dataset import Dataset, Samples
from askew.data.federation import Federation
from askew.errors import AskewError
from askew.experiment.config import Config
from askew.flower.deployment_data import DataModule, Node
from askew.flower.wire import Payload

TABLES = page(VARIANTS["fedavg"])


def federation(needs: tuple[str, ...] = ()) -> Federation:
    config = Config.build(TABLES)
    return Federation(config.data, config.partition, config.seed, needs=needs)


def samples(client: int) -> Samples:
    """What the simulator gives to a client."""
    pool, (own,) = federation().gather([client])
    return Samples(pool.x[own], pool.y[own])


def whole(node: Node) -> Any:
    return samples(int(node["partition-id"])), None, None


def common() -> Any:
    return None, federation().test


def public() -> Any:
    return federation(("public",)).public, federation(("public",)).test


@pytest.mark.parametrize("key", ["scaffold", "moon", "lossbias", "fedga", "fedvarp", "feddc", "fednova"])
def test_own_data_give_the_simulators_run(key: str, tmp_path: Path) -> None:
    """Where the server has the simulator's test set, to the last number; validation data are held out by the clients themselves."""
    tables = page(VARIANTS[key])
    ours, _, said = deployed(tables, tmp_path, data=DataModule(whole, common))
    theirs = simulated(tables)
    assert said == []
    assert_same_rounds(ours, theirs)
    assert same_model(ours.model, theirs.model)


def test_a_public_set_is_the_servers_own(tmp_path: Path) -> None:
    """FedPDC's, taken by the simulator from strangers; here from the server's function."""
    tables = page(VARIANTS["fedpdc-prox"])
    ours, _, _ = deployed(tables, tmp_path, data=DataModule(whole, public))
    theirs = simulated(tables)
    assert_same_rounds(ours, theirs)
    assert same_model(ours.model, theirs.model)
    with pytest.raises(
        AskewError, match=r"FedPDC needs public data at the server; let the data module's server\(\) return"
    ):
        deployed(tables, tmp_path / "without", data=DataModule(whole))


def test_given_validation_data_are_looked_at_and_not_trained_on(tmp_path: Path) -> None:
    held = lambda node: (
        samples(int(node["partition-id"])),
        (torch.zeros(4, 8), torch.zeros(4, dtype=torch.long)),
        None,
    )
    tables, losses = page(VARIANTS["lossbias"]), list[float]()

    def noted(kind: str, client: int, letter: Payload, told: Payload) -> Payload:
        losses.extend(t.item() for n, t in told.tensors.items() if n == "up.validation")
        return told

    ours, _, _ = deployed(tables, tmp_path, data=DataModule(held, common), change=noted)
    assert ours.federation["sizes"] == federation().sizes.tolist()
    assert len(losses) == 12 and len({round(v, 4) for v in losses[:3]}) == 3  # one set, three models
    without = deployed(tables, tmp_path / "without", data=DataModule(whole, common))[0].federation["sizes"]
    assert all(a > b for a, b in zip(ours.federation["sizes"], without, strict=True))  # a fifth is held out there
    ours, _, _ = deployed(page(VARIANTS["fedavg"]), tmp_path / "fedavg", data=DataModule(held, common))
    assert same_model(ours.model, simulated(page(VARIANTS["fedavg"])).model)  # as if they were not there


def test_nothing_is_told_but_counts(tmp_path: Path) -> None:
    told: list[Payload] = []

    def noted(kind: str, client: int, letter: Payload, answer: Payload) -> Payload:
        told.append(answer)
        return answer

    ours, _, _ = deployed(page(VARIANTS["fedavg"]), tmp_path, data=DataModule(whole, common), change=noted)
    assert {*told[0].numbers} == {"client", "samples", "classes", "shape", "real", "digest", "version"} and not told[
        0
    ].tensors
    assert "labels" not in ours.federation and ours.federation["sizes"] == federation().sizes.tolist()
    assert ours.config["data"]["name"] == "own" and ours.config["partition"]["name"] == "natural"


def test_without_a_test_set_at_the_server_the_clients_measure(tmp_path: Path) -> None:
    """Every client on samples of its own; the mean over samples is the score on all of them."""

    def client(node: Node) -> Any:
        i = int(node["partition-id"])
        mine = samples(i)
        return mine, None, None if i == 2 else (mine.x[: 3 + i], mine.y[: 3 + i])  # one has none

    tables = page(VARIANTS["fedavg"], model={"name": "softmax"})
    ours, post, said = deployed(tables, tmp_path, data=DataModule(client))
    x, y = (torch.cat([samples(i)[side][: 3 + i] for i in (0, 1, 3, 4)]) for side in (0, 1))
    theirs = simulated(tables)
    assert said == [] and same_model(ours.model, theirs.model)
    weight, bias = ours.model.values()
    loss = torch.nn.functional.cross_entropy(x @ weight.T + bias, y).item()
    accuracy = ((x @ weight.T + bias).argmax(1) == y).double().mean().item()
    assert (ours.rounds[-1]["accuracy"], ours.rounds[-1]["loss"]) == (
        pytest.approx(accuracy),
        pytest.approx(loss, rel=1e-5),
    )
    assert {client for kind, client, _ in post.log if kind == "evaluate"} == {0, 1, 2, 3, 4}


def test_real_targets(tmp_path: Path) -> None:
    """A regression: no client has a class."""
    rng = np.random.default_rng(0)
    held = [(rng.normal(size=(20, 8)), rng.normal(size=(20, 1))) for _ in range(5)]
    module = DataModule(lambda node: (held[int(node["partition-id"])], None, held[0]))
    ours, _, said = deployed(page(VARIANTS["fedavg"], model={"name": "softmax"}), tmp_path, data=module)
    assert said == [] and ours.rounds[-1]["accuracy"] is None and 0 < ours.rounds[-1]["loss"] < 10


def more_and_more(node: Node) -> Any:
    """Client i has 2 + i classes."""
    return (torch.randn(12, 8), torch.arange(12) % (2 + int(node["partition-id"]))), None, None


def named_by_number(node: Node) -> Any:
    """Likewise, of other sizes."""
    (x, y), _, _ = more_and_more(node)
    return (x[: 7 + int(node["partition-id"])], y[: 7 + int(node["partition-id"])]), None, None


def named(node: Node) -> Any:
    """Likewise, and all classes are named."""
    train, _, _ = more_and_more(node)
    return Dataset(Samples(*train), Samples(*train), 6)


def test_classes_are_counted_over_all_clients(tmp_path: Path) -> None:
    ours, _, said = deployed(page(VARIANTS["fedavg"]), tmp_path, data=DataModule(more_and_more))
    assert said == [] and ours.federation["classes"] == 6
    ours, _, said = deployed(
        page(VARIANTS["fedavg"]), tmp_path / "late", {"nodes": 4}, data=DataModule(more_and_more), late=[4]
    )
    assert "client 4 has 6 classes, and the run was begun with 5; let client(node) return" in said[0] and ours.finished
    ours, _, said = deployed(
        page(VARIANTS["fedavg"]), tmp_path / "named", {"nodes": 4}, data=DataModule(named), late=[4]
    )
    assert said == [] and any(4 in r["participants"] for r in ours.rounds)


def test_a_server_that_starts_again_knows_the_clients_it_knew(tmp_path: Path) -> None:
    """Client 4, who alone has the last class, is not there when the server is."""

    def cut(kind: str, client: int, letter: Payload, told: Payload) -> Payload:
        if kind == "train" and letter.numbers["round"] == 2:
            raise KeyboardInterrupt
        return told

    tables, module = page(VARIANTS["scaffold"]), DataModule(named_by_number)
    with pytest.raises(KeyboardInterrupt):
        deployed(tables, tmp_path, data=module, change=cut)
    ours, _, said = deployed(tables, tmp_path, {"nodes": 4}, data=module, late=[4])
    whole, _, _ = deployed(tables, tmp_path / "whole", data=module)
    assert said == [] and ours.federation == whole.federation and ours.federation["classes"] == 6
    assert ours.finished and len(ours.rounds) == 4


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
def test_what_a_data_module_returns_is_checked(client: Callable[[Node], Any], sentence: str, tmp_path: Path) -> None:
    said: list[str] = []
    with pytest.raises(AskewError, match="0 of 5 clients came"):
        deployed(page(VARIANTS["fedavg"]), tmp_path, {"wait": 0.1}, data=DataModule(client), said=said)
    assert sentence in said[0]


def test_clients_with_other_inputs_are_left_out(tmp_path: Path) -> None:
    client = lambda node: ((torch.ones(9, 8 + (node["partition-id"] == 3)), torch.arange(9) % 3), None, None)
    ours, _, said = deployed(page(VARIANTS["fedavg"]), tmp_path, {"nodes": 4}, data=DataModule(client))
    assert "client 3 has real inputs of shape [9] and class labels, the others have real inputs of shape [8]" in said[0]
    assert ours.finished and all(3 not in r["participants"] for r in ours.rounds)


def test_a_module_without_the_function_is_named(tmp_path: Path) -> None:
    with pytest.raises(AskewError, match=r"must define client\(node\)"):
        DataModule.of(askew)


@pytest.mark.parametrize(("key", "sentence"), [("centralised", "needs all data in one place")])
def test_methods_that_need_all_data_are_refused(key: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(AskewError, match=sentence):
        deployed(page(VARIANTS[key]), tmp_path, data=DataModule(whole))
