"""FedExP: a server step that is extrapolated."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from textbook import (
    COHORTS,
    DECAYING,
    PLAIN,
    displacements,
    exactly,
    make_cohort,
    sample_shares,
    second_displacements,
    two_rounds_on_the_line,
    vectors,
    zeros,
)
from torch import Tensor

from askew.algorithms import FedExP
from problems import Problem, close, make_server, run_rounds


def fedexp_step(alg: FedExP, delta: Tensor, **more: float) -> tuple[Tensor, float]:
    """The step from the origin and its factor, with equal weights."""
    w = torch.zeros(delta.shape[1], dtype=torch.float64)
    cohort = make_cohort([1 / len(delta)] * len(delta), **more)  # type: ignore[arg-type]
    new, state = alg.aggregate(w, {"delta": delta}, cohort, {"last": w, "eta_g": torch.ones((), dtype=torch.float64)})
    return new, float(state["eta_g"])


@pytest.mark.parametrize("times_m", [False, True])
def test_rounds_follow_the_formulas(noisy: Problem, times_m: bool) -> None:
    """ε shrinks with the squared rate."""
    server, w = make_server(FedExP(eps=0.003, eps_times_m=times_m), noisy, DECAYING), zeros(noisy)
    for t, ids in enumerate(COHORTS, 1):
        record = server.run_round(t, ids)
        p, delta = sample_shares(noisy, ids), displacements(noisy, DECAYING, ids, t, w)
        mean, eps = p @ delta, 0.003 * 0.7 ** (2 * (t - 1)) * (len(ids) if times_m else 1)
        eta = max(1.0, float(p @ delta.square().sum(1) / (2 * (mean @ mean + eps))))
        w = w + eta * mean
        assert close(server.w, w) and record["eta_g"] == pytest.approx(eta, rel=1e-12)


def test_two_rounds_by_hand() -> None:
    # Mean −0.545, its square 0.297025; mean square (0.0361 + 1.6384) / 2 = 0.83725; η_g = 0.83725 / (2 · 0.298025).
    w = -0.545 * 0.83725 / 0.59605
    a, b = second_displacements(w)  # so similar that the quotient is below 1
    assert two_rounds_on_the_line(FedExP(eps=0.001))[0] == exactly(w, w + (a + b) / 2)


def test_with_one_or_with_identical_updates_it_is_fedavg() -> None:
    """The quotient is 1/2 there, so the factor is 1."""
    for m in (1, 3):
        new, eta = fedexp_step(FedExP(eps=0.0), vectors(*[[3.0, 4.0]] * m))
        assert eta == 1.0 and new.tolist() == exactly(3.0, 4.0)


@pytest.mark.parametrize("m", [2, 3, 6])
def test_the_factor_of_orthogonal_updates_is_half_their_number(m: int) -> None:
    factor = fedexp_step(FedExP(eps=0.0), 5 * torch.eye(m, dtype=torch.float64))[1]
    assert factor == pytest.approx(max(1.0, m / 2), rel=1e-14)


@given(
    st.lists(st.lists(st.floats(-9, 9), min_size=2, max_size=2), min_size=1, max_size=6), st.sampled_from([0.0, 0.01])
)
@settings(max_examples=60, deadline=None)
def test_it_never_shortens(delta: list[list[float]], eps: float) -> None:
    new, eta = fedexp_step(FedExP(eps=eps), vectors(*delta))
    assert eta >= 1.0 and bool(torch.isfinite(new).all())


def test_without_a_mean_and_without_eps_the_model_stays() -> None:
    new, eta = fedexp_step(FedExP(eps=0.0), vectors([1.0, 2.0], [-1.0, -2.0]))
    assert eta == 1.0 and new.tolist() == [0.0, 0.0]


def test_eps_shrinks_with_the_squared_rate() -> None:
    delta = vectors([3.0, 0.0], [0.0, 1.0])  # mean square 5, squared mean 5/2
    for lr, eps in ((0.1, 0.1), (0.05, 0.025)):
        assert fedexp_step(FedExP(eps=0.1), delta, lr=lr)[1] == pytest.approx(max(1.0, 5 / (2 * (2.5 + eps))))
    wide = vectors([3.0, 0.0], [0.0, 3.0], [0.0, -3.0])  # mean square 9, squared mean 1
    assert fedexp_step(FedExP(eps=0.4), wide, lr=0.05)[1] == pytest.approx(9 / (2 * 1.1))
    assert fedexp_step(FedExP(eps=0.4, eps_times_m=True), wide)[1] == pytest.approx(9 / (2 * 2.2))


def test_the_last_iterate_or_the_mean_of_two_is_evaluated(noisy: Problem) -> None:
    for average in (False, True):
        server = make_server(FedExP(evaluate_average_of_last_two=average), noisy, PLAIN)
        run_rounds(server, COHORTS[:2])
        before = server.w
        server.run_round(3, COHORTS[2])
        (model,) = server.alg.models(server.w, server.state).values()
        assert close(model, (server.w + before) / 2 if average else server.w)
