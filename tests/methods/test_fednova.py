"""FedNova: displacements divided by the length of the local path."""

from __future__ import annotations

import pytest
import torch
from textbook import (
    COHORTS,
    EVERY_TERM,
    assert_defaults,
    exactly,
    momentum_length,
    sample_shares,
    two_rounds_on_the_line,
    zeros,
)
from torch import Tensor

from askew.algorithms import FedAvg, FedNova
from askew.core.algorithm import Algorithm
from askew.core.types import Cohort
from askew.data.dataset import Samples
from askew.data.federation import LocalSettings
from problems import Problem, close, federation, make_server, round_outputs, scalars, train_locally, trained_server


@pytest.mark.parametrize("mu", [0.0, 0.8])
def test_rounds_follow_the_formulas(noisy: Problem, mu: float) -> None:
    """The proximal term is outside the clipped norm, inside the momentum; τ_eff is Σ p_i a_i without it
    and Σ p_i K_i with it.
    """
    server, w, M = make_server(FedNova(mu=mu, server_momentum=0.5), noisy, EVERY_TERM), zeros(noisy), zeros(noisy)
    for t, ids in enumerate(COHORTS, 1):
        server.run_round(t, ids)
        p, total, tau = sample_shares(noisy, ids), zeros(noisy), 0.0
        for p_i, i in zip(p, ids, strict=True):
            end, _, gradients = train_locally(noisy, EVERY_TERM, i, t, w, beside=lambda theta, w=w: mu * (theta - w))
            a = c = 0.0
            for _ in gradients:
                c = 0.6 * c + 1 - EVERY_TERM.rate(t) * mu * a
                a = a + c
            total, tau = total + p_i * (end - w) / a, tau + p_i * (len(gradients) if mu else a)
        M = 0.5 * M + tau * total
        w = w + M
        assert close(server.w, w) and close(server.state["M"], M)


def test_two_rounds_by_hand() -> None:
    # One epoch in batches of one: K = 1, 3, 2 and as many samples.
    # Client 0 from 0: 0.1. Client 1: −2 (1 − 0.6³) = −1.568. p = ¼, ¾; δ/a = 0.1 and −1.568/3; τ_eff = ¼ + 9/4 = 2.5.
    # w = 2.5 (0.025 − 0.392) = −0.9175.
    # Client 0: δ = 0.1 · 1.9175 = 0.19175. Client 2: δ = 0.36 · 3.9175 = 1.4103. p = ⅓, ⅔; τ_eff = ⅓ + 4/3 = 5/3.
    # w = −0.9175 + 5/3 (0.19175/3 + 1.4103/3) = −0.9175 + 5/9 · 1.60205 = −0.0274722…
    path, _ = two_rounds_on_the_line(FedNova(), LocalSettings(batch=1, lr=0.1), [1, 3, 2, 1])
    assert path == exactly(-0.9175, -0.9175 + 5 / 9 * 1.60205)


def reported_lengths(alg: FedNova, local: LocalSettings) -> tuple[list[int], Tensor]:
    """K_i and the reported a_i of clients with 1 to 5 steps."""
    problem = scalars(*[(1.0, float(k)) for k in range(5)], copies=[1, 2, 3, 4, 5])
    return [1, 2, 3, 4, 5], round_outputs(make_server(alg, problem, local), 1, range(5)).up["a"]


def test_reported_lengths_are_the_closed_forms() -> None:
    steps, a = reported_lengths(FedNova(), LocalSettings(batch=1, lr=0.1))
    assert a.tolist() == steps
    steps, a = reported_lengths(FedNova(), LocalSettings(batch=1, lr=0.1, momentum=0.9))
    assert close(a, [momentum_length(K, 0.9) for K in steps])
    steps, a = reported_lengths(FedNova(mu=2.0), LocalSettings(batch=1, lr=0.1))
    assert close(a, [(1 - (1 - 0.2) ** K) / 0.2 for K in steps])


@pytest.mark.parametrize(("mu", "momentum"), [(0.0, 0.0), (0.0, 0.9), (2.0, 0.0), (2.0, 0.9)])
def test_the_length_is_the_path_under_a_constant_gradient(mu: float, momentum: float) -> None:
    """On a linear loss δ_i = −η a_i g whatever momentum and proximal term: the definition of a_i."""
    samples = [
        Samples(torch.ones(n, 1, dtype=torch.float64), torch.full((n, 1), g, dtype=torch.float64))
        for n, g in ((2, 1.0), (4, -3.0))
    ]
    problem = Problem(federation(samples, criterion=lambda output, y: (output * y)[:, 0]), scalars((1.0, 0.0)).module)
    server = make_server(FedNova(mu=mu), problem, LocalSettings(batch=1, lr=0.1, momentum=momentum))
    up = round_outputs(server, 1, [0, 1]).up
    a = up["a"]
    assert close(up["delta"][:, 0], -0.1 * a * torch.tensor([1.0, -3.0], dtype=torch.float64))
    effective = (2 * a[0] + 4 * a[1]) / 6 if mu == 0 else (2 * 2 + 4 * 4) / 6
    assert close(server.w, -0.1 * effective * (2 * 1.0 + 4 * -3.0) / 6)


def test_a_path_that_leads_nowhere_is_left_out() -> None:
    """ρ = 0.9, ημ = 1.62: after four steps a_i = −0.0236, and a division by it would turn every update round."""
    steps, a = reported_lengths(FedNova(mu=16.2), LocalSettings(batch=1, lr=0.1, momentum=0.9))
    assert a[steps.index(4)].item() == pytest.approx(-0.0236, abs=1e-3)
    row = lambda *values: torch.tensor(values, dtype=torch.float64)
    alg, w, K = FedNova(mu=1.0), row(0.0), row(4.0, 2.0, 2.0)
    known = Cohort(row(0.5, 0.25, 0.25), K, K, K, K, None, 0.1, 0.1, 1, 3)
    up = {"delta": row(5.0, 3.0, 1.0)[:, None], "a": row(-0.0236, 2.0, 1.0)}
    assert close(alg.aggregate(w, up, known, {"M": w})[0], 2 * (0.5 * 3 / 2 + 0.5 * 1 / 1))
    assert close(alg.aggregate(w, up | {"a": row(-1.0, 0.0, -2.0)}, known, {"M": w})[0], 0.0)


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.8}])
def test_with_equal_lengths_it_is_fedavg(noisy: Problem, settings: dict[str, float]) -> None:
    local = LocalSettings(batch=2, steps=4, lr=0.1, **settings)
    assert close(trained_server(FedNova(), noisy, local, COHORTS).w, trained_server(FedAvg(), noisy, local, COHORTS).w)


def fixed_point(alg: Algorithm, problem: Problem, local: LocalSettings) -> float:
    """The fixed point of a method without state on the line, where a round is w ↦ αw + β."""
    server = make_server(alg, problem, local)
    images = []
    for start in (0.0, 1.0):
        server.w = torch.tensor([start], dtype=torch.float64)
        server.run_round(1, problem.clients)
        images.append(float(server.w))
    beta, alpha = images[0], images[1] - images[0]
    return beta / (1 - alpha)


def test_the_fixed_point_tends_to_the_optimum_and_that_of_fedavg_does_not() -> None:
    """K_i from 1 to 8. Error at η = 0.08, 0.02, 0.005: FedNova 0.040, 0.010, 0.0025; FedAvg 1.28, 1.27, 1.27."""
    problem = scalars((1.0, 4.0), (0.5, -3.0), (2.0, 1.0), copies=[1, 8, 3])
    best = float(problem.optimum([1.0, 8.0, 3.0]))
    away = {
        alg: [abs(fixed_point(alg, problem, LocalSettings(batch=1, lr=lr)) - best) for lr in (0.08, 0.02, 0.005)]
        for alg in (FedNova(), FedAvg())
    }
    normalised, plain = away.values()
    assert min(plain) > 1
    assert normalised[2] < 0.005
    assert normalised[0] / normalised[1] == pytest.approx(4, rel=0.2)
    assert normalised[1] / normalised[2] == pytest.approx(4, rel=0.1)


def test_defaults_are_the_published_ones() -> None:
    assert_defaults(FedNova(), {"weighting": "samples", "mu": 0.0, "server_momentum": 0.0})
