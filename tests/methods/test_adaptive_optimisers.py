"""FedAdagrad, FedAdam and FedYogi: adaptive optimisers at the server."""

from __future__ import annotations

import math

import pytest
import torch
from textbook import (
    COHORTS,
    EVERY_TERM,
    PLAIN,
    displacements,
    exactly,
    sample_shares,
    second_displacements,
    two_rounds_on_the_line,
    vectors,
    zeros,
)

from askew.algorithms import FedAdagrad, FedAdam, FedYogi
from askew.errors import ConfigError
from problems import Problem, close, make_server, trained_server

SECOND_MOMENT = {
    FedAdagrad: lambda V, D: V + D**2,
    FedAdam: lambda V, D: 0.9 * V + 0.1 * D**2,
    FedYogi: lambda V, D: V - 0.1 * D**2 * torch.sign(V - D**2),
}


@pytest.mark.parametrize("cls", SECOND_MOMENT)
def test_rounds_follow_the_formulas(noisy: Problem, cls: type[FedAdam]) -> None:
    server = make_server(cls(server_lr=0.3, beta1=0.5, beta2=0.9, tau=0.2), noisy, EVERY_TERM)
    w, M, V = zeros(noisy), zeros(noisy), torch.full_like(zeros(noisy), 0.04)
    assert close(server.state["V"], V) and close(server.state["M"], M)
    for t, ids in enumerate(COHORTS, 1):
        server.run_round(t, ids)
        D = sample_shares(noisy, ids) @ displacements(noisy, EVERY_TERM, ids, t, w)
        M, V = 0.5 * M + 0.5 * D, SECOND_MOMENT[cls](V, D)
        w = w + 0.3 * M / (V.sqrt() + 0.2)
        assert close(server.w, w) and close(server.state["V"], V) and close(server.state["M"], M)


@pytest.mark.parametrize("cls", SECOND_MOMENT)
def test_two_rounds_by_hand(cls: type[FedAdam]) -> None:
    # β1 = ½, β2 = ¾, τ = ½, η_g = 0.1; D = −0.545, D² = 0.297025 > V = 0.25.
    V = {FedAdagrad: 0.547025, FedAdam: 0.1875 + 0.07425625, FedYogi: 0.25 + 0.07425625}[cls]
    w1 = 0.1 * -0.2725 / (math.sqrt(V) + 0.5)
    D = sum(second_displacements(w1)) / 2  # about 0.66: larger than √V again
    V = {FedAdagrad: V + D**2, FedAdam: 0.75 * V + 0.25 * D**2, FedYogi: V + 0.25 * D**2}[cls]
    w2 = w1 + 0.1 * (-0.13625 + 0.5 * D) / (math.sqrt(V) + 0.5)
    assert two_rounds_on_the_line(cls(beta1=0.5, beta2=0.75, tau=0.5, server_lr=0.1))[0] == exactly(w1, w2)


@pytest.mark.parametrize(
    ("cls", "factor"), [(FedAdagrad, 1 / 2), (FedYogi, 1 / 2), (FedAdam, 1 / (1 + math.sqrt(0.64)))]
)
def test_the_first_step_with_a_large_tau(noisy: Problem, cls: type[FedAdam], factor: float) -> None:
    """V starts at τ², so with η_g = τ → ∞ it is D/2, and for Adam D/(1 + √β2)."""
    server = trained_server(cls(beta1=0.0, beta2=0.64, tau=1e9, server_lr=1e9), noisy, PLAIN, COHORTS[:1])
    D = sample_shares(noisy, COHORTS[0]) @ displacements(noisy, PLAIN, COHORTS[0], 1, zeros(noisy))
    assert close(server.w, factor * D)


def test_yogi_and_adam_agree_where_the_square_is_the_moment() -> None:
    V = vectors([4.0, 4.0, 4.0])[0]
    adam, yogi = (cls(beta2=0.75).second_moment(V, vectors([2.0, 1.0, 3.0])[0]) for cls in (FedAdam, FedYogi))
    assert adam.tolist() == exactly(4.0, 3.25, 5.25) and yogi.tolist() == exactly(4.0, 3.75, 6.25)


def test_tau_must_be_positive_and_defaults_are_the_published_ones() -> None:
    with pytest.raises(ConfigError, match="tau must be > 0"):
        FedAdam(tau=0.0)
    assert FedAdagrad().beta1 == 0.0 and (FedYogi().beta1, FedYogi().beta2, FedYogi().tau) == (0.9, 0.99, 1e-3)
