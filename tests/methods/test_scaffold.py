"""SCAFFOLD: control variates, options I and II."""

from __future__ import annotations

import pytest
import torch
from textbook import (
    ALL,
    COHORTS,
    DECAYING,
    EVERY_TERM,
    EVERYBODY,
    PLAIN,
    assert_defaults,
    exactly,
    full_gradient,
    momentum_length,
    two_rounds_on_the_line,
    zeros,
)

from askew.algorithms import FedAvg, Scaffold
from askew.data.federation import LocalSettings
from problems import Problem, client_row, close, make_server, quadratics, random_cohorts, train_locally, trained_server


@pytest.mark.parametrize("norm", ["nova", "steps"])
@pytest.mark.parametrize("rate", ["current", "initial"])
def test_rounds_follow_the_formulas(noisy: Problem, norm: str, rate: str) -> None:
    server = make_server(Scaffold(variate_norm=norm, variate_lr=rate, server_scale=0.8), noisy, EVERY_TERM)
    w, c, variates = zeros(noisy), zeros(noisy), {i: zeros(noisy) for i in ALL}
    for t, ids in enumerate(COHORTS, 1):
        server.run_round(t, ids)
        step, change = zeros(noisy), zeros(noisy)
        for i in ids:
            end, _, gradients = train_locally(
                noisy, EVERY_TERM, i, t, w, inside=lambda _, c=c, c_i=variates[i]: c - c_i
            )
            length = momentum_length(len(gradients), 0.6) if norm == "nova" else len(gradients)
            new = variates[i] - c + (w - end) / (length * EVERY_TERM.rate(t if rate == "current" else 1))
            step, change, variates[i] = step + (end - w) / len(ids), change + (new - variates[i]) / 4, new
        w, c = w + 0.8 * step, c + change
        assert close(server.w, w) and close(server.state["c"], c)
        assert all(close(client_row(server.clients, i)["c"], variates[i]) for i in ALL)


def test_two_rounds_by_hand() -> None:
    # The first round is FedAvg: 0.19 and −1.28, w = −0.545. c_0 = −0.19/0.2 = −0.95, c_1 = 6.4, c = 5.45/4 = 1.3625.
    # Client 0: θ ← 0.9 θ + 0.1 − 0.1 (1.3625 + 0.95) = 0.9 θ − 0.13125: −0.62175, −0.690825.
    # Client 2: θ ← 0.8 θ + 0.6 − 0.13625: 0.02775, 0.48595. w = −0.1024375.
    # c_0 = mean of −1.545 and −1.62175 = −1.583375; c_2 = mean of 2(−0.545 − 3) and 2(0.02775 − 3) = −6.51725.
    # c = (−1.583375 + 6.4 − 6.51725)/4 = −0.42515625.
    path, server = two_rounds_on_the_line(Scaffold())
    assert path == exactly(-0.545, -0.1024375)
    assert server.clients.read(ALL)["c"].flatten().tolist() == exactly(-1.583375, 6.4, -6.51725, 0.0)
    assert server.state["c"].tolist() == exactly(-0.42515625)


def test_two_rounds_of_option_i_by_hand() -> None:
    # c_0 = −1 and c_1 = 8, the gradients at 0; c = 7/4.
    # Client 0: θ ← 0.9 θ + 0.1 − 0.275: −0.6655, −0.77395. Client 2: θ ← 0.8 θ + 0.6 − 0.175: −0.011, 0.4162.
    # w = −0.178875.
    # c_0 = −1.545, c_2 = −7.09, the gradients at −0.545; c = (−1.545 + 8 − 7.09)/4 = −0.15875.
    path, server = two_rounds_on_the_line(Scaffold(option="I"))
    assert path == exactly(-0.545, -0.178875) and server.state["c"].tolist() == exactly(-0.15875)


def test_the_variate_is_the_mean_gradient_of_the_round(noisy: Problem) -> None:
    """Under any participation, with unequal numbers of steps and a decaying rate."""
    server = make_server(Scaffold(), noisy, DECAYING)
    for t, ids in enumerate(COHORTS, 1):
        w, c, variates = server.w, server.state["c"], {i: client_row(server.clients, i)["c"] for i in ids}
        server.run_round(t, ids)
        for i in ids:
            gradients = train_locally(
                noisy, DECAYING, i, t, w, inside=lambda _, c=c, c_i=variates[i]: c - c_i
            ).gradients
            assert close(client_row(server.clients, i)["c"], gradients.mean(0))


@pytest.mark.parametrize("option", ["I", "II"])
@pytest.mark.parametrize("cohorts", [EVERYBODY * 3, COHORTS], ids=["everybody", "some"])
def test_the_server_variate_is_the_mean_over_all_clients(noisy: Problem, option: str, cohorts: list[list[int]]) -> None:
    server = make_server(Scaffold(option=option), noisy, PLAIN)
    for t, ids in enumerate(cohorts, 1):
        server.run_round(t, ids)
        assert close(server.state["c"], server.clients.read(ALL)["c"].mean(0))


def test_the_variate_of_option_i_is_the_full_gradient_at_the_received_model(noisy: Problem) -> None:
    server = make_server(Scaffold(option="I"), noisy, EVERY_TERM)
    for t, ids in enumerate(COHORTS, 1):
        w = server.w
        server.run_round(t, ids)
        assert all(close(client_row(server.clients, i)["c"], full_gradient(noisy, i, w)) for i in ids)


def test_the_first_round_is_fedavg(noisy: Problem) -> None:
    for option in ("I", "II"):
        ours = trained_server(Scaffold(option=option), noisy, EVERY_TERM, COHORTS[:1])
        assert torch.equal(ours.w, trained_server(FedAvg(weighting="uniform"), noisy, EVERY_TERM, COHORTS[:1]).w)


def test_with_one_step_of_everybody_it_is_fedavg_in_every_round(noisy: Problem) -> None:
    local = LocalSettings(batch=3, steps=1, lr=0.1)
    ours, fedavg = make_server(Scaffold(), noisy, local), make_server(FedAvg(weighting="uniform"), noisy, local)
    for t in range(1, 6):
        ours.run_round(t, ALL)
        fedavg.run_round(t, ALL)
        assert close(ours.w, fedavg.w)


def test_the_initial_rate_in_the_divisor_is_a_relaxation(noisy: Problem) -> None:
    """c_i⁺ = ρ·(mean gradient) + (1 − ρ)(c_i − c) with ρ = η_t/η_0."""
    server = make_server(Scaffold(variate_lr="initial"), noisy, DECAYING)
    for t, ids in enumerate(COHORTS, 1):
        w, c, variates = server.w, server.state["c"], {i: client_row(server.clients, i)["c"] for i in ids}
        server.run_round(t, ids)
        rho = DECAYING.rate(t) / DECAYING.rate(1)
        for i in ids:
            gradients = train_locally(
                noisy, DECAYING, i, t, w, inside=lambda _, c=c, c_i=variates[i]: c - c_i
            ).gradients
            assert close(client_row(server.clients, i)["c"], rho * gradients.mean(0) + (1 - rho) * (variates[i] - c))


def test_under_momentum_it_needs_the_length_of_fednova() -> None:
    """ρ = 0.9: after 20 rounds the distance is 1e5 with K in the divisor, 6e-13 with a_i."""
    problem, away = quadratics(6, 3), {}
    local = LocalSettings(batch=0, steps=8, lr=0.05, momentum=0.9)
    for norm in ("nova", "steps"):
        server = trained_server(Scaffold(variate_norm=norm), problem, local, [range(6)] * 20)
        away[norm] = float((server.w - problem.optimum()).norm())
    assert away["nova"] < 1e-10 and away["steps"] > 1e3


def test_it_reaches_the_optimum_of_the_plain_mean_whatever_the_sizes() -> None:
    problem = quadratics(5, 2, copies=[1, 2, 5, 3, 1])
    server = trained_server(Scaffold(), problem, LocalSettings(batch=0, steps=3, lr=0.2), random_cohorts(150, 2, 5))
    assert close(server.w, problem.optimum(), 1e-10)
    assert not close(server.w, problem.optimum([1.0, 2.0, 5.0, 3.0, 1.0]), 0.01)


def test_defaults_are_the_published_ones() -> None:
    expected = {
        "weighting": "uniform",
        "option": "II",
        "variate_norm": "nova",
        "variate_lr": "current",
        "server_scale": 1.0,
    }
    assert_defaults(Scaffold(), expected)
