"""FedCM: the server's momentum in every local step."""

from __future__ import annotations

import pytest
import torch
from textbook import (
    COHORTS,
    DECAYING,
    EVERY_TERM,
    PLAIN,
    assert_defaults,
    exactly,
    momentum_length,
    two_rounds_on_the_line,
    zeros,
)

from askew.algorithms import FedAvg, FedCM
from askew.data.federation import LocalSettings
from askew.errors import ConfigError
from problems import Problem, close, make_server, train_locally, trained_server


@pytest.mark.parametrize("length", ["nova", "steps"])
def test_rounds_follow_the_formulas(noisy: Problem, length: str) -> None:
    """M is measured with each client's own length, a_i or the paper's K_i, and with the rate of its round."""
    alg = FedCM(alpha=0.3, server_scale=0.8, length=length)
    server, w, M = make_server(alg, noisy, EVERY_TERM), zeros(noisy), zeros(noisy)
    length_of = (lambda K: momentum_length(K, 0.6)) if length == "nova" else float
    for t, ids in enumerate(COHORTS, 1):
        server.run_round(t, ids)
        inside = lambda _, M=M: 0.7 * M
        rounds = [train_locally(noisy, EVERY_TERM, i, t, w, inside=inside, gain=0.3) for i in ids]
        step = sum(r.theta - w for r in rounds) / len(ids)
        lengths = [EVERY_TERM.rate(t) * length_of(len(r.gradients)) for r in rounds]
        M = sum((w - r.theta) / each for r, each in zip(rounds, lengths, strict=True)) / len(ids)
        w = w + 0.8 * step
        assert close(server.w, w) and close(server.state["M"], M)


def test_two_rounds_by_hand() -> None:
    # α = ½, M = 0: half steps. Client 0: 0.05, 0.0975. Client 1: −0.4, −0.72. w = −0.31125, M = 0.31125/0.2 = 1.55625.
    # Client 0: θ ← 0.95 θ + 0.05 − 0.0778125: −0.3235, −0.3351375.
    # Client 2: θ ← 0.9 θ + 0.3 − 0.0778125: −0.0579375, 0.17004375. w = −0.082546875.
    # M = (−0.31125 + 0.082546875)/0.2 = −1.143515625.
    path, server = two_rounds_on_the_line(FedCM(alpha=0.5))
    assert path == exactly(-0.31125, -0.082546875) and server.state["M"].tolist() == exactly(-1.143515625)


def test_the_momentum_is_a_running_mean_of_gradients(noisy: Problem) -> None:
    """M⁺ = α·(mean over participants and steps of g) + (1 − α) M, with unequal K_i and a decaying rate."""
    server = make_server(FedCM(alpha=0.3), noisy, DECAYING)
    for t, ids in enumerate(COHORTS, 1):
        w, M = server.w, server.state["M"]
        server.run_round(t, ids)
        inside = lambda _, M=M: 0.7 * M
        rounds = [train_locally(noisy, DECAYING, i, t, w, inside=inside, gain=0.3) for i in ids]
        mean = torch.stack([r.gradients.mean(0) for r in rounds]).mean(0)
        assert close(server.state["M"], 0.3 * mean + 0.7 * M)


def test_the_first_round_takes_steps_of_alpha(noisy: Problem) -> None:
    slow = LocalSettings(epochs=2, batch=3, lr=0.03)
    ours = trained_server(FedCM(alpha=0.3), noisy, PLAIN, COHORTS[:1])
    assert close(ours.w, trained_server(FedAvg(weighting="uniform"), noisy, slow, COHORTS[:1]).w)


def test_alpha_must_be_above_0_and_at_most_1() -> None:
    for wrong in (0.0, -0.1, 1.5):
        with pytest.raises(ConfigError, match="alpha must be"):
            FedCM(alpha=wrong)


def test_defaults_are_the_published_ones() -> None:
    assert_defaults(FedCM(), {"weighting": "uniform", "server_scale": 1.0, "length": "nova"})


def test_without_momentum_both_lengths_are_the_same(noisy: Problem) -> None:
    one, other = (trained_server(FedCM(length=length), noisy, PLAIN, COHORTS) for length in ("nova", "steps"))
    assert torch.equal(one.w, other.w) and torch.equal(one.state["M"], other.state["M"])
