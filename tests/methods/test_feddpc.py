"""FedDPC: updates projected off the last global update, and its guards a to g."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from textbook import COHORTS, DECAYING, EVERY_TERM, PLAIN, assert_defaults, exactly, make_cohort, zeros
from torch import Tensor

from askew.algorithms import FedAvg, FedDPC
from askew.core.types import State
from askew.data.federation import LocalSettings
from askew.errors import ConfigError
from problems import Problem, close, least_squares, make_server, run_rounds, train_locally, trained_server


def feddpc_step(alg: FedDPC, delta: Tensor, prev: Tensor, w: Tensor | None = None) -> tuple[Tensor, State]:
    """One server step; without `w`, from the origin."""
    number = torch.zeros((), dtype=delta.dtype)
    state = {"prev": prev, "ratio": number, "undefined": number}
    cohort = make_cohort([1 / len(delta)] * len(delta), round=2)
    cohort = cohort._replace(p=cohort.p.to(delta.dtype))
    return alg.aggregate(torch.zeros_like(prev) if w is None else w, {"delta": delta}, cohort, state)


@pytest.fixture
def updates() -> tuple[Tensor, Tensor]:
    """Four clients' updates δ_i [4, 6] and the last global update [6]."""
    rng = torch.Generator().manual_seed(1)
    return torch.randn(4, 6, generator=rng, dtype=torch.float64), torch.randn(6, generator=rng, dtype=torch.float64)


@pytest.mark.parametrize("lam", [1.0, 0.0, -0.5])
def test_rounds_follow_the_formulas(noisy: Problem, lam: float) -> None:
    """In the paper's gradient units, Δ_i = (w − θ_i)/η, with a rate that decays."""
    server, w, prev = make_server(FedDPC(lam=lam), noisy, DECAYING), zeros(noisy), zeros(noisy)
    for t, ids in enumerate(COHORTS, 1):
        server.run_round(t, ids)
        z, rate = [], DECAYING.rate(t)
        for i in ids:
            Delta = (w - train_locally(noisy, DECAYING, i, t, w).theta) / rate
            r = Delta - (Delta @ prev / (prev @ prev) * prev if t > 1 else 0)
            z.append((lam + Delta.norm() / r.norm()) * r)
        prev = torch.stack(z).mean(0)
        w = w - rate * prev
        assert close(server.w, w, 1e-11)


def test_two_rounds_by_hand() -> None:
    # In the plane: ½‖θ − a_i‖², one step of rate ½, λ = 1. a_0 = (6, 8), a_1 = (2, 0): δ = (3, 4) and (1, 0).
    # First round: twice the mean, w = (4, 4) = d.
    # Client 0: δ = (1, 2), along d (1.5, 1.5), r = (−½, ½), ratio √5/√½ = √10.
    # Client 2, a_2 = (4, 2): δ = (0, −1), along d (−½, −½), r = (½, −½), ratio √2.
    # w = (4, 4) + ½ ((1 + √10) − (1 + √2)) (−½, ½).
    a = torch.tensor([[6.0, 8.0], [2.0, 0.0], [4.0, 2.0]], dtype=torch.float64)
    problem = least_squares(torch.eye(2, dtype=torch.float64).expand(3, 2, 2), a)
    server = make_server(FedDPC(), problem, LocalSettings(batch=0, steps=1, lr=0.5))
    server.run_round(1, [0, 1])
    assert server.w.tolist() == exactly(4.0, 4.0)
    record = server.run_round(2, [0, 2])
    step = (math.sqrt(10) - math.sqrt(2)) / 4
    assert server.w.tolist() == exactly(4 - step, 4 + step)
    assert server.state["prev"].tolist() == exactly(-step, step)
    assert record["ratio"] == pytest.approx(math.sqrt(10)) and record["undefined"] == 0


@pytest.mark.parametrize("settings", [{}, {"lam": 0.0}, {"lam": -0.5}, {"scaling": False}, {"server_scale": 0.6}])
def test_an_update_is_orthogonal_to_the_last_one(noisy: Problem, settings: dict[str, float]) -> None:
    """Hence ‖w_t − w_{t−2}‖² = ‖w_t − w_{t−1}‖² + ‖w_{t−1} − w_{t−2}‖²; to older ones it is not orthogonal."""
    server, path = make_server(FedDPC(**settings), noisy, EVERY_TERM), [zeros(noisy)]
    for t, ids in enumerate([[0, 1, 3], [1, 2], [0, 2, 3], [2, 3]], 1):
        server.run_round(t, ids)
        path.append(server.w)
    steps = [b - a for a, b in pairwise(path)]
    for a, b in pairwise(steps):
        assert abs(float(a @ b)) < 1e-13 * float(a.norm() * b.norm())
        assert float((a + b) @ (a + b)) == pytest.approx(float(a @ a + b @ b), rel=1e-12)
    assert abs(float(steps[0] @ steps[2])) > 1e-3 * float(steps[0].norm() * steps[2].norm())


@pytest.mark.parametrize("lam", [0.0, 1.0, 2.5, -0.5])
def test_lengths_of_scaled_residuals(updates: tuple[Tensor, Tensor], lam: float) -> None:
    """‖z_i‖ = |λ‖r_i‖ + ‖δ_i‖|: with λ = 0 the length is kept, for λ ≥ 0 it is between ‖δ_i‖ and (1 + λ)‖δ_i‖."""
    delta, prev = updates
    for row_i in delta:
        z, _ = feddpc_step(FedDPC(lam=lam), row_i[None], prev)
        r = row_i - row_i @ prev / (prev @ prev) * prev
        assert float(z.norm()) == pytest.approx(abs(lam * float(r.norm()) + float(row_i.norm())), rel=1e-12)
        assert close(z / z.norm(), r / r.norm())
        if lam >= 0:
            assert row_i.norm() * (1 - 1e-12) <= z.norm() <= (1 + lam) * row_i.norm() * (1 + 1e-12)


def test_the_mean_moves_the_model_and_is_remembered(updates: tuple[Tensor, Tensor]) -> None:
    """The mean of the scaled residuals moves w and is remembered; the server's factor moves w alone."""
    delta, prev = updates
    each = torch.stack([feddpc_step(FedDPC(), row_i[None], prev)[0] for row_i in delta])
    w, state = feddpc_step(FedDPC(server_scale=0.5), delta, prev, torch.ones(6, dtype=torch.float64))
    assert close(w, 1 + 0.5 * each.mean(0)) and close(state["prev"], each.mean(0))


@pytest.mark.parametrize("lam", [0.0, 1.0, -0.5])
def test_the_first_round_is_a_longer_fedavg(noisy: Problem, lam: float) -> None:
    fedavg = trained_server(FedAvg(weighting="uniform"), noisy, EVERY_TERM, COHORTS[:1])
    assert close(trained_server(FedDPC(lam=lam), noisy, EVERY_TERM, COHORTS[:1]).w, (1 + lam) * fedavg.w)


def test_the_first_round_without_scaling_is_fedavg(noisy: Problem) -> None:
    fedavg = trained_server(FedAvg(weighting="uniform", server_lr=0.2), noisy, EVERY_TERM, COHORTS[:1])
    assert close(trained_server(FedDPC(scaling=False, server_lr=0.2), noisy, EVERY_TERM, COHORTS[:1]).w, fedavg.w)


@pytest.mark.parametrize("factor", [1e-6, 3.0, -2.0, 1e6])
def test_the_length_of_the_last_update_changes_nothing(updates: tuple[Tensor, Tensor], factor: float) -> None:
    delta, prev = updates
    for alg in (FedDPC(), FedDPC(scaling=False)):
        assert close(feddpc_step(alg, delta, factor * prev)[0], feddpc_step(alg, delta, prev)[0])


def test_without_scaling_and_without_projection(updates: tuple[Tensor, Tensor]) -> None:
    delta, prev = updates
    r = delta - torch.outer(delta @ prev / (prev @ prev), prev)
    assert close(feddpc_step(FedDPC(scaling=False), delta, prev)[0], r.mean(0))
    assert close(feddpc_step(FedDPC(scaling=False, projection=False), delta, prev)[0], delta.mean(0))
    with pytest.raises(ConfigError, match="scaling without projection"):
        FedDPC(projection=False)


@pytest.mark.parametrize("wrong", [0.0, math.inf, math.nan])
def test_guard_a_no_last_update_no_projection(updates: tuple[Tensor, Tensor], wrong: float) -> None:
    delta, prev = updates
    w, state = feddpc_step(FedDPC(), delta, torch.full_like(prev, wrong))
    assert close(w, 2 * delta.mean(0))
    assert float(state["ratio"]) == pytest.approx(1.0) and float(state["undefined"]) == 0


@pytest.mark.parametrize("settings", [{}, {"scaling": False}, {"max_ratio": 5.0}])
@pytest.mark.parametrize("along", [1.0, -3.0, 1e-3])
def test_guard_b_an_update_along_the_last_one_has_no_direction(
    updates: tuple[Tensor, Tensor], settings: dict[str, float], along: float
) -> None:
    """It contributes nothing, is counted, and still is one of the m."""
    delta, prev = updates
    alone, _ = feddpc_step(FedDPC(**settings), delta[:1], prev)
    w, state = feddpc_step(FedDPC(**settings), torch.stack([delta[0], along * prev]), prev)
    assert close(w, alone / 2) and float(state["undefined"]) == 1


def test_guard_b_begins_at_one_part_in_a_million(updates: tuple[Tensor, Tensor]) -> None:
    delta, prev = updates
    r = delta[0] - delta[0] @ prev / (prev @ prev) * prev
    for part, undefined in ((1e-7, 1), (1e-5, 0)):
        _, state = feddpc_step(FedDPC(), (prev + part * prev.norm() * r / r.norm())[None], prev)
        assert float(state["undefined"]) == undefined
        assert float(state["ratio"]) == pytest.approx(0 if undefined else 1 / part, rel=1e-3)


def test_guard_c_no_update_contributes_nothing(updates: tuple[Tensor, Tensor]) -> None:
    delta, prev = updates
    w, _ = feddpc_step(FedDPC(), torch.stack([delta[0], torch.zeros_like(prev)]), prev)
    assert close(w, feddpc_step(FedDPC(), delta[:1], prev)[0] / 2)


def test_guard_d_the_ratio_can_be_capped(updates: tuple[Tensor, Tensor]) -> None:
    delta, prev = updates
    r = delta - torch.outer(delta @ prev / (prev @ prev), prev)
    ratio = delta.norm(dim=1) / r.norm(dim=1)
    assert float(ratio.max()) > 1.1 > float(ratio.min())
    w, state = feddpc_step(FedDPC(lam=0.5, max_ratio=1.1), delta, prev)
    assert close(w, ((0.5 + ratio.clamp(max=1.1))[:, None] * r).mean(0)) and float(state["ratio"]) == pytest.approx(1.1)
    assert float(feddpc_step(FedDPC(), delta, prev)[1]["ratio"]) == pytest.approx(float(ratio.max()))


def test_guard_e_if_all_are_along_the_last_one_nothing_changes(updates: tuple[Tensor, Tensor]) -> None:
    _, prev = updates
    w = torch.ones(6, dtype=torch.float64)
    after, state = feddpc_step(FedDPC(), torch.stack([prev, -2 * prev, 0 * prev]), prev, w)
    assert torch.equal(after, w) and torch.equal(state["prev"], prev) and float(state["undefined"]) == 3


def test_guard_f_one_participant(noisy: Problem) -> None:
    server = make_server(FedDPC(), noisy, PLAIN)
    records = run_rounds(server, [[0], [1], [2]])
    assert all(math.isfinite(r["ratio"]) and r["ratio"] >= 1 and r["undefined"] == 0 for r in records)


@pytest.mark.parametrize("part", [1e-2, 1e-4, 1e-5])
def test_guard_g_orthogonal_in_single_precision(part: float) -> None:
    """The residual of an update nearly along the last one: one subtraction would leave 1e-3 and more of it."""
    rng = torch.Generator().manual_seed(2)
    prev, noise = (torch.randn(10_000, generator=rng) for _ in range(2))
    w, _ = feddpc_step(FedDPC(), (prev + part * noise)[None], prev)
    assert abs(float(w.double() @ prev.double())) < 1e-6 * float(w.double().norm() * prev.double().norm())


def test_defaults_are_the_published_ones() -> None:
    expected = {
        "weighting": "uniform",
        "lam": 1.0,
        "projection": True,
        "scaling": True,
        "max_ratio": None,
        "server_scale": 1.0,
    }
    assert_defaults(FedDPC(), expected)
