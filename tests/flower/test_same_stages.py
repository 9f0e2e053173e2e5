"""Checks, faults, attacks and robust rules see what travels: the same in a simulation and in a deployment."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from askew import register
from askew.algorithms import FedAvg, algorithms
from askew.core.space import Space
from askew.core.types import Part
from askew.experiment.build import build
from askew.experiment.config import Config
from askew.experiment.toml import to_toml
from flower.in_process import NO_NORM, deploy, models_equal, simulate, small_run
from test_robust import SMALL, outputs_of, request_of

EVERYBODY = {"name": "full"}


@pytest.fixture
def private_head() -> Iterator[str]:
    """A method whose last layer stays with its client; the statistics of batch norm in its body travel."""

    @register("private-head")
    class PrivateHead(FedAvg):
        idea = "the last layer stays with its client"

        def private(self, space: Space) -> Part:
            return space.last_layers(1)

        def evaluates(self) -> str:
            return "clients"

    yield "private-head"
    algorithms.members.pop("private-head")


@pytest.mark.parametrize("rule", ["median", "clip", "geometric"])
def test_robust_rules_guard_shared_statistics_beside_private_weights(
    rule: str, private_head: str, tmp_path: Path
) -> None:
    tables = small_run({"name": private_head}, participation=EVERYBODY, rounds=3) | {"robust": {"rule": rule}}
    deployed, _, warned = deploy(tables, tmp_path)
    assert not warned and models_equal(simulate(tables).model, deployed.model)


def test_a_method_with_two_kinds_of_uploads_is_not_judged_by_their_lengths(tmp_path: Path) -> None:
    tables = small_run({"name": "fedamd"}, participation=EVERYBODY, rounds=4, model={"name": "softmax"})
    tables["local"] |= {"lr": 0.001}
    deployed, _, warned = deploy(tables, tmp_path)
    assert not warned and not any(record.get("incidents") for record in deployed.rounds)
    assert models_equal(simulate(tables).model, deployed.model)
    checked = simulate(tables | {"faults": {"check_answers": True}})
    assert models_equal(checked.model, deployed.model)


def after_a_round(faults: dict[str, Any]) -> Any:
    """A server of FedBN after a round of all clients."""
    tables = small_run({"name": "fedbn"}, participation=EVERYBODY, rounds=1) | ({"faults": faults} if faults else {})
    server = build(Config.build(tomllib.loads(to_toml(tables)))).server
    return server, server.run_round(1, [0, 1, 2, 3, 4])


def test_faults_on_the_way_do_not_change_what_a_client_keeps() -> None:
    (plain, _), (scaled, record) = after_a_round({}), after_a_round({"scaled": 1.0, "factor": 10.0})
    assert record["participants"] == [0, 1, 2, 3, 4] and not record.get("incidents")
    move = lambda server: (server.w - server.space.start)[
        ~torch.isin(torch.arange(server.space.P), server.private.indices)
    ]
    # torch.testing would import sympy, which takes longer than all that is tested here
    assert torch.allclose(move(scaled), 10 * move(plain), rtol=1e-4, atol=1e-6)
    kept = [server.privates.read([0, 1, 2, 3, 4]) for server in (plain, scaled)]
    assert all(torch.equal(kept[0][name], kept[1][name]) for name in ("w", "b"))


def test_private_statistics_are_not_judged() -> None:
    server, _ = after_a_round({"check_answers": True})
    request = server.first_request(2, server.prepare(2, [0, 1, 2, 3, 4], []))
    (outputs,) = server.engine.run([request])
    far = outputs.buffers.clone()
    far[4] *= 1e6  # of inputs in another unit
    left = server.through_stages(request, outputs._replace(buffers=far))
    assert left.answered is None and torch.equal(left.buffers, far)


@pytest.mark.parametrize("rate", [0.5, 1.0])
def test_answers_that_come_twice_do_not_lower_epsilon(rate: float) -> None:
    tables = small_run({"name": "fedavg", "weighting": "uniform"}, model=NO_NORM, participation=EVERYBODY, rounds=3)
    tables |= {"privacy": {"clip": 0.5, "noise": 1.0}}
    spent = [[r["epsilon"] for r in simulate(t).rounds] for t in (tables, tables | {"faults": {"repeated": rate}})]
    assert spent[0] == spent[1] and spent[0][0] > 0


@pytest.mark.parametrize("name", ["alie", "inner_product"])
def test_attackers_do_not_copy_what_is_not_finite(name: str) -> None:
    attack = {"name": name, "clients": [0, 1], "strength": 4.0}
    (stage,) = build(Config.build({**SMALL, "attack": attack})).server.stages
    rows = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    rows[4, 3] = torch.nan
    whole, without = (stage(request_of([1.0] * len(r)), outputs_of(r)).up["delta"][:2] for r in (rows, rows[:4]))
    assert torch.isfinite(whole).all() and torch.equal(whole, without)
