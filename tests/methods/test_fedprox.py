"""FedProx: a proximal term in the local objective."""

from __future__ import annotations

import torch
from textbook import COHORTS, EVERY_TERM, assert_defaults, exactly, sample_shares, two_rounds_on_the_line, zeros

from askew.algorithms import FedAvg, FedProx
from askew.data.federation import LocalSettings
from problems import Problem, close, make_server, quadratics, round_outputs, train_locally, trained_server


def test_rounds_follow_the_formulas(noisy: Problem) -> None:
    """The penalty is inside the clipped norm."""
    server, w = make_server(FedProx(mu=0.7), noisy, EVERY_TERM), zeros(noisy)
    for t, ids in enumerate(COHORTS, 1):
        server.run_round(t, ids)
        penalty = lambda theta, w=w: 0.7 * (theta - w)
        ends = [train_locally(noisy, EVERY_TERM, i, t, w, inside=penalty).theta for i in ids]
        w = sample_shares(noisy, ids) @ torch.stack(ends)
        assert close(server.w, w)


def test_two_rounds_by_hand() -> None:
    # μ = 1. Client 0: θ ← 0.8 θ + 0.1: 0.1, 0.18. Client 1: θ ← 0.5 θ − 0.8: −0.8, −1.2. w = −0.51.
    # Client 0: θ ← θ − 0.1 (θ − 1 + θ + 0.51) = 0.8 θ + 0.049: −0.359, −0.2382.
    # Client 2: θ ← θ − 0.1 (2θ − 6 + θ + 0.51) = 0.7 θ + 0.549: 0.192, 0.6834. w = 0.2226.
    assert two_rounds_on_the_line(FedProx(mu=1.0))[0] == exactly(-0.51, 0.2226)


def test_with_one_local_step_it_is_fedavg_at_any_mu(noisy: Problem) -> None:
    local = LocalSettings(batch=3, steps=1, lr=0.1, momentum=0.5, weight_decay=0.1, clip=0.5)
    ours, fedavg = (trained_server(alg, noisy, local, COHORTS) for alg in (FedProx(mu=7.0), FedAvg()))
    assert torch.equal(ours.w, fedavg.w)


def test_solved_exactly_it_is_the_proximal_point() -> None:
    """θ_i minimises L_i + μ/2 ‖θ − w‖²: (A_i + μ) θ = A_i a_i + μ w."""
    problem = quadratics(3, 2)
    server = make_server(FedProx(mu=0.8), problem, LocalSettings(batch=0, steps=120, lr=0.4))
    server.w = torch.tensor([3.0, -2.0], dtype=torch.float64)
    w = server.w
    delta = round_outputs(server, 1, [0, 1, 2]).up["delta"]
    for i in range(3):
        X, y = problem.samples(i)
        A, b = X.T @ X / len(y), X.T @ y[:, 0] / len(y)
        assert close(w + delta[i], torch.linalg.solve(A + 0.8 * torch.eye(2, dtype=torch.float64), b + 0.8 * w))


def test_defaults_are_the_published_ones() -> None:
    assert_defaults(FedProx(), {"weighting": "samples", "server_scale": 1.0})
