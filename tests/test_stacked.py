"""The stacked engine without graphs: clients in rows, and runs that share rows are the runs that they are alone."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from askew.algorithms.fedavg import FedAvg
from askew.core.algorithm import Gradient
from askew.core.settings import setting
from askew.core.task import Bound
from askew.core.types import Client
from askew.engine import row_buffers, stacked
from askew.engine.jobs import Jobs, RequestJobs
from askew.engine.row_buffers import RowBuffers, graph_rows
from askew.engine.sample_buffer import SampleBuffer, fill_buffers
from askew.engine.sequential import Sequential
from askew.engine.stacked import Stacked, count_long
from askew.errors import EngineError
from askew.experiment.build import BuildCache, build
from askew.experiment.config import Config
from askew.experiment.run import run_together
from askew.experiment.store import Run

LOCAL = {"epochs": 2, "batch": 16, "lr": 0.1, "momentum": 0.5, "weight_decay": 1e-3, "clip": 5.0}


def make_config(algorithm: object, lr: float = 0.1, seed: int = 0, **more: object) -> Config:
    """Three rounds of five of twelve clients on digits."""
    tables = {
        "algorithm": algorithm,
        "seed": seed,
        "rounds": 3,
        "model": {"name": "mlp", "hidden": [16]},
        "partition": {"clients": 12},
        "participation": {"cohort": 5},
        "local": LOCAL | {"lr": lr},
        "engine": {"name": "stacked", "device": "cpu", "dtype": "float64"},
    }
    return Config.build(tables | more)


def model_gap(a: Run, b: Run) -> float:
    """The largest difference between two runs' models."""
    return max(float((a.model[n] - v).abs().max()) for n, v in b.model.items())


def sequential_run(config: Config) -> Run:
    """The run by the sequential engine, alone."""
    (run,) = run_together([dataclasses.replace(config, engine=dataclasses.replace(config.engine, name="sequential"))])
    return run


def count_jobs(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """How many jobs are run side by side from now on, call by call: the few long ones, if any, and the others."""
    counts: list[list[int]] = []
    run_side_by_side = stacked.run_side_by_side

    def counted(rows: Any) -> Any:
        counts.append([moves.schedule.rows for moves in rows])
        return run_side_by_side(rows)

    monkeypatch.setattr(stacked, "run_side_by_side", counted)
    return counts


# runs that share rows -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [{"name": "mlp", "hidden": [16]}, {"name": "cnn", "width": 8}])
def test_rows_in_lower_precision_are_near(model: dict[str, object]) -> None:
    """Forward passes in bfloat16; weights and updates keep their precision."""
    dtypes = ("float32", "bf16")
    engines = [{"name": "stacked", "device": "cpu", "dtype": dtype} for dtype in dtypes]
    plain, lower = (
        run_together([make_config({"name": "scaffold"}, model=model, engine=engine)])[0] for engine in engines
    )
    alone = sequential_run(make_config({"name": "scaffold"}, model=model, engine=engines[1]))
    assert all(weights.dtype == torch.float32 for weights in lower.model.values())
    assert 1e-5 < model_gap(plain, lower) < 0.03 and model_gap(alone, lower) < 0.03


@pytest.mark.parametrize(
    ("method", "own"),
    [
        ("fedprox", "mu"),
        ("scaffold", None),
        *(
            pytest.param(method, own, marks=pytest.mark.slow)
            for method, own in (
                ("fedcm", "alpha"),
                ("fedga", "beta"),
                ("feddpc", "lam"),
                ("moon", "mu"),
                ("feddc", "alpha"),
            )
        ),
    ],
)
def test_runs_of_a_sweep_share_the_rows(method: str, own: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates, seeds and a method's own settings differ; jobs of several runs are in the same rows."""
    counts = count_jobs(monkeypatch)
    values = ((0.1, 0.1, 0), (0.5, 0.05, 0), (0.9, 0.1, 1))
    configs = [make_config({"name": method} | ({own: value} if own else {}), lr, seed) for value, lr, seed in values]
    for config, run in zip(configs, run_together(configs), strict=True):
        assert model_gap(run, sequential_run(config)) < 1e-13
    assert max(map(sum, counts)) == 15


def test_several_methods_train_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """In their first round each by itself, then all together; every run is what it is alone."""
    counts = count_jobs(monkeypatch)
    pairs = [(method, seed) for method in ("fedavg", "moon", "feddyn") for seed in (0, 1)]
    equal = {"name": "iid", "clients": 12}
    configs = [make_config({"name": method}, seed=seed, partition=equal) for method, seed in pairs]
    runs = run_together(configs)
    assert [len(groups) for groups in counts] == [1, 1, 1, 3, 3] and counts[-1] == [10, 10, 10]
    for config, run in zip(configs, runs, strict=True):
        assert model_gap(run, sequential_run(config)) < 1e-13


class BranchesOnSetting(FedAvg):
    """A proximal term that branches on its strength, which it cannot do with a tensor under vmap."""

    mu: float = setting("strength", default=0.1, least=0)

    def direction(self, theta: Tensor, grad: Gradient, client: Client) -> Tensor:
        return grad(theta) + (self.mu if self.mu > 0.3 else 2 * self.mu) * (theta - client.w)


def test_a_method_whose_settings_cannot_be_tensors_has_rows_of_its_own() -> None:
    configs = [make_config(BranchesOnSetting(mu=mu)) for mu in (0.1, 0.5)]
    for config, run in zip(configs, run_together(configs), strict=True):
        assert model_gap(run, sequential_run(config)) < 1e-13


class TwoFactors(FedAvg):
    """A proximal term of two factors."""

    mu: float = setting("strength", default=0.1, least=0)
    factor: float = setting("factor", default=1.0, least=0)

    def direction(self, theta: Tensor, grad: Gradient, client: Client) -> Tensor:
        return self.factor * grad(theta) + self.mu * (theta - client.w)


def test_settings_that_are_equal_in_one_call_may_be_others_in_the_next() -> None:
    """Graphs hold the settings in which no two runs of a call differ."""
    cache, deltas = BuildCache(), list[list[Tensor]]()
    engine: Stacked | None = None
    for factor in (1.0, 3.0):
        runs = [build(make_config(TwoFactors(mu=mu, factor=factor)), cache) for mu in (0.1, 0.2)]
        engine = engine or cast(Stacked, runs[0].server.engine)
        requests = [next(run.server.round_requests(1, [0, 1, 2])) for run in runs]
        deltas.append([outputs.up["delta"] for outputs in engine.run(requests)])
        for request, delta in zip(requests, deltas[-1], strict=True):
            (one,) = Sequential(Bound(runs[0].module, runs[0].space), 0, False).run([request])
            assert float((one.up["delta"] - delta).abs().max()) < 1e-13
    assert engine is not None and len(engine.buffers) == 2
    assert float((deltas[0][0] - deltas[1][0]).abs().max()) > 1e-3


def test_an_error_of_a_hook_is_not_hidden() -> None:
    class Broken(FedAvg):
        mu: float = setting("strength", default=0.1, least=0)

        def direction(self, theta: Tensor, grad: Gradient, client: Client) -> Tensor:
            raise ValueError("from the hook")

    with pytest.raises(ValueError, match="from the hook"):
        run_together([make_config(Broken(mu=0.1)), make_config(Broken(mu=0.2))])


def test_runs_with_one_seed_share_plans_and_samples() -> None:
    cache = BuildCache()
    runs = [build(make_config({"name": method}), cache) for method in ("fedavg", "fedprox")]
    assert runs[0].fed is runs[1].fed
    requests = [next(run.server.round_requests(1, [0, 1, 2])) for run in runs]
    works = [request.plan.train for request in requests]
    assert all(a is b for a, b in zip(*works, strict=True))
    buffers: dict[str, SampleBuffer] = {}
    jobs = [job for request in requests for job in RequestJobs(request).jobs()]
    grown, first = fill_buffers(buffers, jobs)
    assert grown and first["train"][:3] == first["train"][3:]
    assert sum(buffers["train"].filled) == sum(len(work.places) for work in works[0])
    other = build(make_config({"name": "fedavg"}, seed=1), cache)
    assert other.fed is not runs[0].fed


# rows and memory ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3))])
def test_more_jobs_than_rows(most: int) -> None:
    config = make_config({"name": "scaffold"})
    run = build(config)
    engine = run.server.engine
    assert isinstance(engine, Stacked)
    engine.most = most
    for t in (1, 2, 3):
        turnout = config.participation.turnout(config.seed, t, run.fed.eligible, run.fed.clients)
        run.server.run_round(t, turnout.ids.tolist())
    expected = torch.cat([v.flatten() for v in sequential_run(config).model.values()])
    assert float((run.server.w - expected).abs().max()) < 1e-13


def test_running_out_of_memory_halves_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    load, loaded = RowBuffers.load, list[int]()

    def load_two(buffers: RowBuffers, jobs: Jobs, *rest: Any) -> None:
        loaded.append(len(jobs))
        if len(jobs) > 2:
            raise torch.OutOfMemoryError("too many")
        load(buffers, jobs, *rest)

    monkeypatch.setattr(RowBuffers, "load", load_two)
    config = make_config({"name": "fedavg"}, partition={"name": "iid", "clients": 12})
    (run,) = run_together([config])
    assert model_gap(run, sequential_run(config)) < 1e-13 and loaded[0] == 5 and max(loaded[-3:]) <= 2

    def load_none(buffers: RowBuffers, jobs: Jobs, *rest: Any) -> None:
        raise torch.OutOfMemoryError("not even one")

    monkeypatch.setattr(RowBuffers, "load", load_none)
    with pytest.raises(EngineError, match="not enough memory"):
        run_together([config])


def test_graphs_are_for_few_numbers_of_rows() -> None:
    """Each close above what is needed."""
    sizes = [graph_rows(n) for n in range(1, 513)]
    assert all(n <= m <= max(n * 1.125, n + 1) for n, m in enumerate(sizes, 1)) and sizes == sorted(sizes)
    assert len(set(sizes)) <= 50


# long clients, and the next round -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method", ["scaffold", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fedavg", "feddc", "moon"))]
)
def test_a_few_long_clients_have_rows_of_their_own(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In rows of their own, and with the same results, whatever round they are in."""
    counts = count_jobs(monkeypatch)
    skewed = {"name": "dirichlet", "alpha": 0.2, "clients": 24}
    local = LOCAL | {"batch": 8}
    config = make_config({"name": method}, partition=skewed, participation={"cohort": 12}, local=local)
    (run,) = run_together([config])
    assert model_gap(run, sequential_run(config)) < 1e-13
    assert any(len(groups) == 2 and groups[0] < groups[1] for groups in counts)


def test_how_many_clients_have_rows_of_their_own() -> None:
    assert count_long([10] * 5) == 0 and count_long([7]) == 0  # all are equal
    assert count_long([18, 8, 8, 6, 2]) == 1 and count_long([24, 15, 12, 12, 12, 12]) == 2
    assert count_long([24, 20, 16, 14, 4, 4]) == 0 and count_long([24, 16, 16, 14, 4, 4]) == 1  # at most half the work
    assert count_long([9, 4, 4, 3, 1]) == 0  # too few steps to be worth it
    assert count_long([0, 0]) == 0


def test_samples_are_put_in_place_once_and_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the next round while this one runs; if another round is run in the end, those of that one."""
    config = make_config({"name": "fedavg"})
    prepared, plain = build(config).server, build(config).server
    engine, cohorts = cast(Stacked, prepared.engine), [[0, 3, 5], [0, 3, 5], [1, 2]]
    calls, filled_during_run = list[int](), list[bool]()
    fill, run = row_buffers.fill_buffers, engine.run

    def counted_fill(buffers: Any, jobs: Jobs, **more: Any) -> Any:
        calls.append(len(jobs))
        return fill(buffers, jobs, **more)

    def watched_run(requests: Any) -> Any:
        before = len(calls)
        outputs = run(requests)
        filled_during_run.append(len(calls) > before)
        return outputs

    monkeypatch.setattr(row_buffers, "fill_buffers", counted_fill)
    monkeypatch.setattr(engine, "run", watched_run)
    for t, ids in enumerate(cohorts, 1):  # [0, 3, 5] are always expected next
        prepared.run_round(t, ids, meanwhile=lambda t=t: prepared.prepare(t + 1, [0, 3, 5]))  # type: ignore[misc]
    assert filled_during_run == [True, False, True]  # the first round, and the one with other participants
    monkeypatch.undo()
    for t, ids in enumerate(cohorts, 1):
        plain.run_round(t, ids)
    assert torch.equal(prepared.w, plain.w)
