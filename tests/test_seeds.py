"""Seeds of the partition, the weights and the participants: each fixes its part, and no name changes without them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import askew
from askew.algorithms import FedAvg
from askew.errors import AlgorithmError, ConfigError, Remark
from askew.experiment.build import BuiltRun, build
from askew.experiment.config import Config
from askew.reproduction.digests import result_digest

TABLES: dict[str, Any] = {
    "rounds": 3,
    "model": {"name": "mlp", "hidden": [4]},
    "partition": {"clients": 6, "public": 30},
    "participation": {"cohort": 3},
}
PARTS = ("partition", "model", "participation")


def config(seed: int, **own_seeds: int) -> Config:
    """A configuration with this seed; some of its tables have a seed of their own."""
    own = {name: TABLES[name] | {"seed": own_seed} for name, own_seed in own_seeds.items()}
    return Config.build({**TABLES, "seed": seed} | own)


def participants(built: BuiltRun) -> list[list[int]]:
    """Who takes part in the first four rounds."""
    c, fed = built.config, built.fed
    return [c.participation.turnout(c.seed, t, fed.eligible, fed.clients).ids.tolist() for t in range(1, 5)]


def equal_parts(one: BuiltRun, other: BuiltRun) -> dict[str, bool]:
    """Which of the three parts agree; the public set goes with the partition."""
    assert (
        one.fed.assignment is not None
        and other.fed.assignment is not None
        and one.fed.public is not None
        and other.fed.public is not None
    )
    split = all(np.array_equal(a, b) for a, b in zip(one.fed.assignment, other.fed.assignment, strict=True))
    assert split == torch.equal(one.fed.public.x, other.fed.public.x)
    weights = torch.equal(one.space.start, other.space.start)
    return {"partition": split, "model": weights, "participation": participants(one) == participants(other)}


@pytest.mark.parametrize("fixed", PARTS)
def test_a_seed_of_its_own_fixes_one_part(fixed: str) -> None:
    first, other, mixed = (build(c) for c in (config(0), config(5), config(5, **{fixed: 0})))
    assert equal_parts(first, other) == dict.fromkeys(PARTS, False)
    assert equal_parts(first, mixed) == {part: part == fixed for part in PARTS}
    assert equal_parts(other, mixed) == {part: part != fixed for part in PARTS}


def test_batches_go_with_the_run_and_all_three_make_no_copy_of_it() -> None:
    runs = [askew.run(config(seed, partition=0, model=0, participation=0)) for seed in (0, 5)]
    one, other = ([r["participants"] for r in run.rounds] for run in runs)
    assert one == other
    assert runs[0].rounds[0]["train_loss"] != runs[1].rounds[0]["train_loss"]
    whole = askew.run(config(0))
    assert [r["train_loss"] for r in whole.rounds] == [r["train_loss"] for r in runs[0].rounds]


def test_names_change_only_where_one_is_set() -> None:
    """The names that this configuration has had before there were such settings."""
    plain, set_ = config(0), config(0, partition=0)
    assert (plain.digest(), result_digest(plain)) == ("59196753", "000e49b4da")
    assert set_.digest() != plain.digest() and result_digest(set_) != result_digest(plain)


def test_a_wrong_one_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"seed .*0"):
        config(0, model=-1)


# code of a user's that draws from generators of the whole process -------------------------------------------------


class DrawsAtClients(FedAvg):
    def direction(self, theta: Tensor, grad: Any, client: Any) -> Tensor:
        factor = np.random.rand()  # noqa: NPY002
        return factor * grad(theta)  # type: ignore[no-any-return]


class DrawsLater(FedAvg):
    """In a round that no trial takes."""

    def finish(self, theta: Tensor, client: Any) -> Any:
        factor = random.random() if float(client.round) > 2 else 1.0
        return {"delta": factor * (theta - client.w)}, client.state


class DrawsAtTheServer(FedAvg):
    def aggregate(self, w: Tensor, up: Any, cohort: Any, server: Any) -> Any:
        return w + np.random.rand() * (self.weights(up, cohort) @ up["delta"]), server  # noqa: NPY002


class DrawsTorchAtTheServer(FedAvg):
    def aggregate(self, w: Tensor, up: Any, cohort: Any, server: Any) -> Any:
        return w + torch.rand(()) * (self.weights(up, cohort) @ up["delta"]), server


class DrawsTorchAtClients(FedAvg):
    """From the client's own stream, which is allowed."""

    def direction(self, theta: Tensor, grad: Any, client: Any) -> Tensor:
        return torch.rand(()) * grad(theta)  # type: ignore[no-any-return]


def noisy_loss(output: Tensor, y: Tensor) -> Tensor:
    return random.random() * F.cross_entropy(output, y, reduction="none")


def drawn_network() -> nn.Module:
    torch.nn.init.constant_((network := nn.Linear(4, 2)).weight, random.random())
    return network


def train(method: FedAvg, data: Any = "digits", **settings: Any) -> askew.Run:
    shared = {"rounds": 3, "clients": 6, "cohort": 3, "device": "cpu", "progress": False, "engine": "sequential"}
    return askew.run(method, data=data, **(shared | settings))


def own_samples(criterion: Callable[[Tensor, Tensor], Tensor] | str = "cross_entropy") -> askew.Dataset:
    x, y = torch.arange(400.0).reshape(100, 4) / 400, torch.arange(100) % 2
    samples = askew.Samples(x, y)
    return askew.Dataset(samples, samples, classes=2, criterion=criterion)


def test_hooks_and_criteria_that_draw_what_no_seed_decides_are_refused() -> None:
    before = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]  # noqa: NPY002
    with pytest.raises(AlgorithmError, match="a hook of DrawsAtClients gives another result when it is called again"):
        train(DrawsAtClients())
    assert before == (random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[index]  # noqa: NPY002
    with pytest.raises(AlgorithmError, match="the criterion gives another result when it is called again"):
        train(FedAvg(), own_samples(noisy_loss), model=nn.Linear(4, 2))


@pytest.mark.parametrize(
    ("method", "settings", "says"),
    [
        (DrawsLater, {}, "in round 3, code of yours drew random numbers from Python's generator"),
        (DrawsAtTheServer, {}, "in round 1, code of yours drew random numbers from numpy's generator"),
        (DrawsTorchAtTheServer, {}, "in round 1, code of yours drew random numbers from torch's generator"),
        (FedAvg, {"data": own_samples(), "model": drawn_network}, "before the first round, .* from Python's generator"),
    ],
)
def test_what_draws_what_no_seed_decides_is_said(method: type[FedAvg], settings: dict[str, Any], says: str) -> None:
    with pytest.warns(Remark, match=says) as said:
        run = train(method(), **settings)
    assert len(said) == 1 and run.facts["draws"] in str(said[0].message)


def test_torchs_numbers_of_a_client_and_what_a_users_function_draws_are_allowed() -> None:
    """Warnings are errors in tests."""
    assert "draws" not in train(DrawsTorchAtClients(), watch=lambda run, record: random.random()).facts
