"""Clients as rows, played here without graphs: runs that share rows are the runs they are alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from askew.algorithms.fedavg import FedAvg
from askew.core.algorithm import Gradient
from askew.core.settings import setting
from askew.core.task import Bound
from askew.core.types import Client
from askew.engine import stacked as rows
from askew.engine.jobs import ClientJobs, Jobs, SampleBuffer, lay
from askew.engine.sequential import Sequential
from askew.errors import EngineError
from askew.experiment import build
from askew.experiment.build import BuildCache
from askew.experiment.config import Config
from askew.experiment.run import run_together
from askew.experiment.store import Run

LOCAL = {"epochs": 2, "batch": 16, "lr": 0.1, "momentum": 0.5, "weight_decay": 1e-3, "clip": 5.0}


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(build, "GRAPHS", ("cpu",))
    yield


def configured(algorithm: object, lr: float = 0.1, seed: int = 0, **more: object) -> Config:
    tables = {
        "algorithm": algorithm,
        "seed": seed,
        "rounds": 3,
        "partition": {"clients": 12},
        "participation": {"cohort": 5},
    }
    engine = {"name": "vmapped", "device": "cpu", "dtype": "float64"}
    return Config.build(tables | {"local": LOCAL | {"lr": lr}, "engine": engine} | more)


def apart(a: Run, b: Run) -> float:
    return max(float((a.model[n] - v).abs().max()) for n, v in b.model.items())


def played(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """How many jobs are played together from now on: those that go ahead, if there are any, and the others."""
    seen: list[list[int]] = []
    play = rows.side_by_side

    def watched(phase: Any, lanes: Any, differ: Any) -> Any:
        seen.append([len(jobs) for _, jobs in lanes])
        return play(phase, lanes, differ)

    monkeypatch.setattr(rows, "side_by_side", watched)
    return seen


def alone(config: Config) -> Run:
    (run,) = run_together([dataclasses.replace(config, engine=dataclasses.replace(config.engine, name="sequential"))])
    return run


@pytest.mark.parametrize(
    ("method", "own"),
    [
        ("fedprox", "mu"),
        ("fedcm", "alpha"),
        ("fedga", "beta"),
        ("feddpc", "lam"),
        ("moon", "mu"),
        ("feddc", "alpha"),
        ("scaffold", None),
    ],
)
def test_runs_of_a_sweep_share_the_rows(method: str, own: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates, seeds and a method's own settings differ; jobs of several runs stand in the same rows."""
    seen = played(monkeypatch)
    values = ((0.1, 0.1, 0), (0.5, 0.05, 0), (0.9, 0.1, 1))
    configs = [configured({"name": method} | ({own: value} if own else {}), lr, seed) for value, lr, seed in values]
    for config, run in zip(configs, run_together(configs), strict=True):
        assert apart(run, alone(config)) < 1e-13
    assert max(map(sum, seen)) == 15


class Stubborn(FedAvg):
    """A proximal term that looks at its own strength, which no tensor under vmap can bear."""

    mu: float = setting("strength", default=0.1, least=0)

    def direction(self, theta: Tensor, grad: Gradient, client: Client) -> Tensor:
        return grad(theta) + (self.mu if self.mu > 0.3 else 2 * self.mu) * (theta - client.w)


def test_a_method_that_cannot_bear_tensors_has_rows_of_its_own() -> None:
    configs = [configured(Stubborn(mu=mu)) for mu in (0.1, 0.5)]
    for config, run in zip(configs, run_together(configs), strict=True):
        assert apart(run, alone(config)) < 1e-13


def test_settings_that_are_alike_in_one_call_may_be_others_in_the_next() -> None:
    """Graphs hold the settings that no two runs of a call differ in."""
    shop, moved = BuildCache(), list[list[Tensor]]()
    engine: rows.Stacked | None = None
    for factor in (1.0, 3.0):
        houses = [build.build(configured(Scaled(mu=mu, factor=factor)), shop) for mu in (0.1, 0.2)]
        engine = engine or cast(rows.Stacked, houses[0].server.engine)
        asks = [next(house.server.round_requests(1, [0, 1, 2])) for house in houses]
        moved.append([out.up["delta"] for out in engine.run(asks)])
        for ask, out in zip(asks, moved[-1], strict=True):
            one = Sequential(Bound(houses[0].module, houses[0].space), 0, False).run([ask])[0].up["delta"]
            assert float((one - out).abs().max()) < 1e-13
    assert engine is not None and float((moved[0][0] - moved[1][0]).abs().max()) > 1e-3 and len(engine.blocks) == 2


class Scaled(FedAvg):
    """A proximal term of two factors."""

    mu: float = setting("strength", default=0.1, least=0)
    factor: float = setting("factor", default=1.0, least=0)

    def direction(self, theta: Tensor, grad: Gradient, client: Client) -> Tensor:
        return self.factor * grad(theta) + self.mu * (theta - client.w)


def test_an_error_of_a_hook_is_not_hidden() -> None:
    class Broken(FedAvg):
        mu: float = setting("strength", default=0.1, least=0)

        def direction(self, theta: Tensor, grad: Gradient, client: Client) -> Tensor:
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        run_together([configured(Broken(mu=0.1)), configured(Broken(mu=0.2))])


def test_more_jobs_than_rows() -> None:
    config = configured({"name": "scaffold"})
    one = alone(config)
    for most in (1, 2, 3):
        shop = BuildCache()
        house = build.build(config, shop)
        engine = house.server.engine
        assert isinstance(engine, rows.Stacked)
        engine.most = most
        for t in (1, 2, 3):
            came = config.participation.turnout(config.seed, t, house.fed.eligible, house.fed.clients)
            house.server.run_round(t, came.ids.tolist())
        assert float((house.server.w - torch.cat([v.flatten() for v in one.model.values()])).abs().max()) < 1e-13


def test_running_out_of_memory_halves_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    load, asked = rows.Block.load, list[int]()

    def tight(block: rows.Block, jobs: Jobs, *rest: Any) -> None:
        asked.append(len(jobs))
        if len(jobs) > 2:
            raise torch.OutOfMemoryError("too many")
        load(block, jobs, *rest)

    monkeypatch.setattr(rows.Block, "load", tight)
    config = configured({"name": "fedavg"}, partition={"name": "iid", "clients": 12})
    (run,) = run_together([config])
    assert apart(run, alone(config)) < 1e-13 and asked[0] == 5 and max(asked[-3:]) <= 2

    def never(block: rows.Block, jobs: Jobs, *rest: Any) -> None:
        raise torch.OutOfMemoryError("not even one")

    monkeypatch.setattr(rows.Block, "load", never)
    with pytest.raises(EngineError, match="not enough memory"):
        run_together([config])


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "feddc", "moon"])
def test_a_few_long_clients_go_ahead(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In rows of their own, and with the same results, whatever round they are in."""
    seen = played(monkeypatch)
    skewed = {"name": "dirichlet", "alpha": 0.2, "clients": 24}
    config = configured({"name": method}, partition=skewed, participation={"cohort": 12}, local=LOCAL | {"batch": 8})
    (run,) = run_together([config])
    assert apart(run, alone(config)) < 1e-13
    assert any(len(lanes) == 2 and lanes[0] < lanes[1] for lanes in seen)


def test_who_goes_ahead() -> None:
    assert rows.ahead_of([10] * 5) == 0 and rows.ahead_of([7]) == 0  # all alike
    assert rows.ahead_of([18, 8, 8, 6, 2]) == 1 and rows.ahead_of([24, 15, 12, 12, 12, 12]) == 2
    assert (
        rows.ahead_of([24, 20, 16, 14, 4, 4]) == 0 and rows.ahead_of([24, 16, 16, 14, 4, 4]) == 1
    )  # half of the work at most
    assert rows.ahead_of([9, 4, 4, 3, 1]) == 0  # too few steps for it to pay
    assert rows.ahead_of([0, 0]) == 0


def test_samples_are_put_in_place_once_and_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the next round while this one is at work; if another round is played in the end, those of that one."""
    config = configured({"name": "fedavg"})
    house, other = build.build(config), build.build(config)
    server, engine = house.server, cast(rows.Stacked, house.server.engine)
    ids, laid, during = [0, 3, 5], list[int](), list[bool]()
    lay, map = rows.lay, engine.map

    def counted(feeds: Any, jobs: Jobs, **more: Any) -> Any:
        laid.append(len(jobs))
        return lay(feeds, jobs, **more)

    def mapped(asks: Any) -> Any:
        before = len(laid)
        out = map(asks)
        during.append(len(laid) > before)
        return out

    monkeypatch.setattr(rows, "lay", counted)
    monkeypatch.setattr(engine, "map", mapped)
    for t, expected in ((1, ids), (2, ids), (3, [1, 2])):
        server.run_round(t, ids if t < 3 else [1, 2], meanwhile=lambda t=t, who=expected: server.prepare(t + 1, ids))  # type: ignore[misc]
    assert during == [
        True,
        False,
        True,
    ]  # the first round, whose feed is too small yet, and the one that came otherwise
    monkeypatch.undo()
    for t, who in ((1, ids), (2, ids), (3, [1, 2])):
        other.server.run_round(t, who)
    assert torch.equal(server.w, other.server.w)


def test_numbers_of_rows_are_few_and_near() -> None:
    sizes = [rows.wide(n) for n in range(1, 513)]
    assert all(n <= m <= max(n * 1.125, n + 1) for n, m in enumerate(sizes, 1)) and sizes == sorted(sizes)
    assert len(set(sizes)) <= 50


def test_runs_with_one_seed_share_plans_and_samples() -> None:
    shop = BuildCache()
    houses = [build.build(configured({"name": method}), shop) for method in ("fedavg", "fedprox")]
    assert houses[0].fed is houses[1].fed
    asks = [next(house.server.round_requests(1, [0, 1, 2])) for house in houses]
    works = [ask.plan.train for ask in asks]
    assert all(a is b for a, b in zip(*works, strict=True))
    feeds: dict[str, SampleBuffer] = {}
    errands = [ClientJobs(ask) for ask in asks]
    grown, first = lay(feeds, [(errand, i) for errand in errands for i in range(3)])
    assert grown and first["train"][:3] == first["train"][3:]
    assert sum(feeds["train"].laid) == sum(len(work.places) for work in works[0])
    other = build.build(configured({"name": "fedavg"}, seed=1), shop)
    assert other.fed is not houses[0].fed
