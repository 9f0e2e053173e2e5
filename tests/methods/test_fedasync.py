"""FedAsync: every model that comes is mixed into the global one, stale ones less."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from textbook import (
    COHORTS,
    EVERY_TERM,
    assert_defaults,
    exactly,
    stale_cohort,
    two_rounds_on_the_line,
    vectors,
    zeros,
)

from askew.algorithms import FedAsync, FedAvg
from askew.data.federation import LocalSettings
from askew.errors import ConfigError
from problems import Problem, close, make_server, train_locally, trained_server

W = torch.tensor([0.5, -1.0], dtype=torch.float64)
MODEL = vectors([3.0, 1.0])


def test_rounds_follow_the_formulas(noisy: Problem) -> None:
    """The penalty is inside the clipped norm."""
    server, w = make_server(FedAsync(alpha=0.8, rho=0.7), noisy, EVERY_TERM), zeros(noisy)
    for t, ids in enumerate(COHORTS, 1):
        penalty = lambda theta, w=w: 0.7 * (theta - w)
        ends = torch.stack([train_locally(noisy, EVERY_TERM, i, t, w, inside=penalty).theta for i in ids])
        server.run_round(t, ids)
        w = 0.2 * w + 0.8 * ends.mean(0)
        assert close(server.w, w)


@pytest.mark.parametrize(
    ("settings", "staleness", "mixed"),
    [
        ({"staleness": "constant"}, 8, 0.9),
        ({}, 0, 0.9),
        ({}, 3, 0.45),  # (1 + 3)^−½
        ({"exponent": 1.0}, 8, 0.1),
        ({"staleness": "hinge"}, 1, 0.9),
        ({"staleness": "hinge"}, 4, 0.9),
        ({"staleness": "hinge"}, 6, 0.9 / 21),  # 1 / (10 · 2 + 1)
        ({"staleness": "hinge", "slope": 0.5, "free": 2.0}, 6, 0.3),
    ],
)
def test_a_model_is_mixed_in_by_its_staleness(settings: dict[str, Any], staleness: int, mixed: float) -> None:
    w, _ = FedAsync(alpha=0.9, **settings).aggregate(W, {"model": MODEL}, stale_cohort(staleness), {})
    assert w.tolist() == exactly((1 - mixed) * 0.5 + 3 * mixed, -(1 - mixed) + mixed)


def test_two_steps_by_hand() -> None:
    # α = 0.6, ρ = 0. The models 0.19 and −1.28 from 0, then 0.19 (1 − w) and 0.36 (3 − w) further from w = −0.327.
    assert two_rounds_on_the_line(FedAsync(rho=0.0))[0] == exactly(-0.327, -0.327 + 0.6 * (0.25213 + 1.19772) / 2)


def test_a_stale_model_is_mixed_in_as_it_is_wherever_it_started() -> None:
    """Clients 0 and 2 start from 0 and answer one after the other: the second step forgets 0.6 / √2 of the first."""
    # Two local steps go 0.19 of the way to 1, and 0.36 of the way to 3: the models 0.19 and 1.08.
    first, _ = FedAsync(rho=0.0).aggregate(W.new_zeros(1), {"model": vectors([0.19])}, stale_cohort(0), {})
    second, _ = FedAsync(rho=0.0).aggregate(first, {"model": vectors([1.08])}, stale_cohort(1), {})
    alpha = 0.6 / 2**0.5
    assert first.tolist() == exactly(0.114) and second.tolist() == exactly((1 - alpha) * 0.114 + alpha * 1.08)


def test_at_full_weight_without_penalty_it_is_fedavg(noisy: Problem) -> None:
    algs = FedAsync(alpha=1.0, rho=0.0), FedAvg(weighting="uniform")
    ours, fedavg = (trained_server(alg, noisy, EVERY_TERM, COHORTS) for alg in algs)
    assert close(ours.w, fedavg.w)


def test_a_penalty_that_overshoots_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"FedAsync: rho × local.lr must be < 2, got 2; .* lower rho or local.lr\."):
        FedAsync(rho=20.0).check_learning_rate(LocalSettings(lr=0.1).lr)


def test_defaults_are_the_published_ones() -> None:
    published = {"alpha": 0.6, "rho": 0.005, "staleness": "polynomial", "exponent": 0.5, "slope": 10.0, "free": 4.0}
    assert_defaults(FedAsync(), {"weighting": "uniform", **published})
