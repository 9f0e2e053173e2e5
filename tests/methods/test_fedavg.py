"""FedAvg, also with a server rate: its formulas, two rounds by hand, its bias."""

from __future__ import annotations

import pytest
import torch
from textbook import (
    ALL,
    COHORTS,
    DECAYING,
    EVERY_TERM,
    ONE_STEP,
    PLAIN,
    assert_defaults,
    displacements,
    exactly,
    two_rounds_on_the_line,
    weights_of,
    zeros,
)

from askew.algorithms import FedAvg
from askew.data.federation import LocalSettings
from askew.errors import ConfigError
from problems import (
    Problem,
    close,
    make_server,
    quadratics,
    random_cohorts,
    round_outputs,
    softmax_optimum,
    softmax_regression,
    trained_server,
)


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_rounds_follow_the_formulas(noisy: Problem, weighting: str) -> None:
    server, w = make_server(FedAvg(weighting=weighting, server_scale=0.8), noisy, EVERY_TERM), zeros(noisy)
    for t, ids in enumerate(COHORTS, 1):
        server.run_round(t, ids)
        p = weights_of(noisy, ids, weighting)
        w = w + 0.8 * (p @ displacements(noisy, EVERY_TERM, ids, t, w))
        assert close(server.w, w)


def test_two_rounds_by_hand() -> None:
    # Sizes 1, 3, 2. Client 0 from 0: 0.1, 0.19. Client 1: −0.8, −1.28. w = (0.19 − 3 · 1.28) / 4 = −0.9125.
    # Client 0 from there: 1 − 0.81 · 1.9125 = −0.549125. Client 2: 3 − 0.64 · 3.9125 = 0.496.
    # w = (−0.549125 + 2 · 0.496) / 3 = 0.147625.
    assert two_rounds_on_the_line(FedAvg(), copies=[1, 3, 2, 1])[0] == exactly(-0.9125, 0.147625)


def test_two_rounds_with_a_server_rate_by_hand() -> None:
    # Displacements 0.19 and −1.28, mean −0.545; η_g = 0.05 is half of the local rate: w = −0.2725.
    # Client 0: 1 − 0.81 · 1.2725 = −0.030725, Client 2: 3 − 0.64 · 3.2725 = 0.9056; mean 0.4374375.
    # w = −0.2725 + ½ (0.4374375 + 0.2725) = 0.08246875.
    assert two_rounds_on_the_line(FedAvg(weighting="uniform", server_lr=0.05))[0] == exactly(-0.2725, 0.08246875)


def test_one_full_step_of_everybody_is_a_step_on_the_pooled_loss(noisy: Problem) -> None:
    server, w = make_server(FedAvg(), noisy, ONE_STEP), zeros(noisy)
    X, y = noisy.fed.pool.x, noisy.fed.pool.y[:, 0]
    for t in (1, 2, 3):
        server.run_round(t, ALL)
        w = w - 0.3 * X.T @ (X @ w - y) / len(y)
        assert close(server.w, w)


def test_server_lr_equal_to_the_local_rate_changes_nothing(noisy: Problem) -> None:
    one = trained_server(FedAvg(weighting="uniform", server_lr=0.1), noisy, PLAIN, COHORTS)
    assert torch.equal(one.w, trained_server(FedAvg(weighting="uniform"), noisy, PLAIN, COHORTS).w)


def test_server_lr_is_server_scale_times_the_rate_of_the_round(noisy: Problem) -> None:
    """w ← w − η_g mean Δ_i with Δ_i in gradient units, so under a decaying local rate the factor s grows."""
    server = make_server(FedAvg(weighting="uniform", server_lr=0.05), noisy, DECAYING)
    for t, ids in enumerate(COHORTS, 1):
        w = server.w
        delta = round_outputs(server, t, ids).up["delta"]
        assert close(server.w, w + 0.05 / DECAYING.rate(t) * delta.mean(0))
    scaled = trained_server(FedAvg(weighting="uniform", server_scale=0.5), noisy, PLAIN, COHORTS)
    assert close(scaled.w, trained_server(FedAvg(weighting="uniform", server_lr=0.05), noisy, PLAIN, COHORTS).w)


def test_one_server_rate_and_no_zero_rates() -> None:
    with pytest.raises(ConfigError, match=r"server_scale or server_lr, not both"):
        FedAvg(server_scale=2.0, server_lr=0.1)
    for wrong in ({"server_scale": 0.0}, {"server_lr": 0.0}):
        with pytest.raises(ConfigError, match="must be"):
            FedAvg(**wrong)
    with pytest.raises(ConfigError, match="lr must be > 0"):
        LocalSettings(lr=0.0)


def test_solved_exactly_it_is_biased() -> None:
    """Its clients jump to their own minima, whose mean is not the minimum of the mean."""
    problem = quadratics(4, 2)
    w = trained_server(FedAvg(), problem, LocalSettings(batch=0, steps=120, lr=1.0), [range(4)]).w
    minima = [torch.linalg.lstsq(s.x, s.y).solution[:, 0] for s in map(problem.samples, range(4))]
    assert close(w, torch.stack(minima).mean(0))
    assert float((w - problem.optimum()).norm()) > 0.1


def test_it_does_not_reach_the_optimum_of_regularised_softmax_regression() -> None:
    """Measured after 40 rounds: 0.15."""
    problem, local = softmax_regression([12] * 5), LocalSettings(batch=0, steps=4, lr=0.2, weight_decay=0.1)
    server = trained_server(FedAvg(), problem, local, random_cohorts(40, 2, 5))
    assert float((server.w - softmax_optimum(problem, 0.1)).norm()) > 0.05


def test_defaults_are_the_published_ones() -> None:
    expected = {"weighting": "samples", "server_scale": 1.0, "server_lr": None}
    assert_defaults(FedAvg(), expected)
