"""FedAU: weights from the intervals between a client's participations."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from textbook import (
    ALL,
    EVERY_TERM,
    assert_defaults,
    displacements,
    exactly,
    relative_size,
    two_rounds_on_the_line,
    zeros,
)
from turnout import RATES, ServerOnTheLine, all_cohorts, biased_minimum, draw_cohorts, long_run_mean, mean_shares

from askew.algorithms import FedAU, FedAvg
from problems import Problem, close, identical, make_server, run_rounds

SPARSE = [[0, 1], [1], [1, 3], [0], [1], [0, 3], [2], [0, 2, 3]]
WEIGHTS = torch.eye(4, dtype=torch.float64)  # uploads that let a step show the weights


class PublishedWeights:
    """Algorithm 2 of the paper, for one client, which is asked in every round whether it takes part."""

    def __init__(self, cutoff: int | None) -> None:
        self.cutoff, self.running, self.ended, self.weight = cutoff, 0, 0, 1.0

    def end_round(self, takes_part: bool) -> None:
        """Renew the weight for the next round."""
        self.running += 1
        if takes_part or self.running == self.cutoff:
            self.weight = (self.ended * self.weight + self.running) / (self.ended + 1) if self.ended else self.running
            self.ended, self.running = self.ended + 1, 0


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
@pytest.mark.parametrize("cutoff", [None, 2])
def test_rounds_follow_the_formulas(noisy: Problem, cutoff: int | None, weighting: str) -> None:
    server = make_server(FedAU(cutoff=cutoff, server_scale=0.9, weighting=weighting), noisy, EVERY_TERM)
    w, published = zeros(noisy), {i: PublishedWeights(cutoff) for i in ALL}
    for t, ids in enumerate(SPARSE, 1):
        server.run_round(t, ids)
        for i, delta in zip(ids, displacements(noisy, EVERY_TERM, ids, t, w), strict=True):
            size = relative_size(noisy, i) if weighting == "samples" else 1.0
            w = w + 0.9 / 4 * published[i].weight * size * delta
        for i in ALL:
            published[i].end_round(i in ids)
        assert close(server.w, w)
    assert max(each.weight for each in published.values()) > 1.5


@pytest.mark.parametrize("cutoff", [None, 1, 3, 7])
def test_weights_kept_by_the_participants_are_those_of_all_clients_in_all_rounds(cutoff: int | None) -> None:
    """The cutoff also ends intervals of clients that are away, and rounds pass in which nobody comes."""
    server, published = ServerOnTheLine(FedAU(cutoff=cutoff), 4), [PublishedWeights(cutoff) for _ in ALL]
    for t, ids in enumerate(draw_cohorts(80, lambda t: (0.7, 0.3, 0.15, 0.03 if t < 60 else 0.5)), 1):
        w = server.w
        server.take_step(t, ids, WEIGHTS[ids])
        expected = [published[i].weight / 4 if i in ids else 0.0 for i in ALL]
        assert close(server.w - w, expected)
        for i in ALL:
            published[i].end_round(i in ids)
    assert [each.ended for each in published if each.ended < 5] == []


def test_three_rounds_by_hand() -> None:
    # (0.19 − 1.28) / 4; then 0.19 · 1.2725 and 0.36 · 3.2725, both with weight 1. In the third round client 2 comes
    # with weight 2, its first interval; client 1, in the fourth, with its first interval 1.
    path, server = two_rounds_on_the_line(FedAU())
    second = -0.2725 + (0.241775 + 1.1781) / 4
    assert path == exactly(-0.2725, second)
    server.run_round(3, [2])
    third = second + 2 * 0.36 * (3 - second) / 4
    assert float(server.w) == pytest.approx(third, rel=1e-12)
    server.run_round(4, [1])
    fourth = third + 0.64 * (-2 - third) / 4
    assert float(server.w) == pytest.approx(fourth, rel=1e-12)
    server.run_round(5, [1])  # intervals 1 and 3: weight 2
    assert float(server.w) == pytest.approx(fourth + 2 * 0.64 * (-2 - fourth) / 4, rel=1e-12)


def test_with_everybody_it_is_fedavg_bit_for_bit(noisy: Problem) -> None:
    servers = [make_server(alg, noisy, EVERY_TERM) for alg in (FedAU(cutoff=2), FedAvg(weighting="uniform"))]
    for server in servers:
        run_rounds(server, [ALL] * 4)
    assert identical({"w": servers[0].w}, {"w": servers[1].w})


@pytest.mark.parametrize("cutoff", [None, 3])
def test_weights_come_to_the_inverse_of_the_rate(cutoff: int | None) -> None:
    """The mean of a geometric interval that is cut off at K is (1 − (1 − p)^K) / p; within four standard errors."""
    server, rounds = ServerOnTheLine(FedAU(cutoff=cutoff), 4), 300
    for t, ids in enumerate(draw_cohorts(rounds, lambda t: RATES), 1):
        server.take_step(t, ids, WEIGHTS[ids])
    server.w = torch.zeros(4, dtype=torch.float64)
    server.take_step(rounds + 1, ALL, WEIGHTS)
    p = np.array(RATES)
    expected = 1 / p if cutoff is None else (1 - (1 - p) ** cutoff) / p
    error = np.sqrt((1 - p) / p**2 / (rounds * p))
    assert (np.abs(4 * server.w.numpy() - expected) < 4 * error).all()


def test_with_these_weights_the_mean_step_is_that_of_everybody() -> None:
    """Over all ways in which clients can come with their chances; FedAvg's mean step follows those who come often."""
    rates, mean, fedavg = (1.0, 0.5, 0.25, 0.2), torch.zeros(4, dtype=torch.float64), torch.zeros(4)
    for chance, ids in all_cohorts(rates):
        server = ServerOnTheLine(FedAU(), 4)
        p = torch.tensor(rates, dtype=torch.float64)
        server.memory = {"last": torch.full_like(p, 20.0), "intervals": 20 * p}  # mean intervals 1, 2, 4 and 5
        server.take_step(21, ids, WEIGHTS[ids])
        other = ServerOnTheLine(FedAvg(), 4)
        other.take_step(21, ids, WEIGHTS[ids])
        mean, fedavg = mean + chance * server.w, fedavg + chance * other.w
    assert close(mean, [0.25] * 4) and close(fedavg, mean_shares(rates)) and not close(fedavg, [0.25] * 4, 0.3)


@pytest.mark.slow
def test_uneven_rates_bias_fedavg_and_not_fedau() -> None:
    """Equal curvatures: the mean over the participants has the minimum of the losses weighted by its mean shares, FedAU
    that of 1 − (1 − p_i)^K, and without a cutoff that of the plain mean.
    """
    assert abs(biased_minimum([1.0] * 4) - biased_minimum(mean_shares())) > 1
    assert long_run_mean(FedAvg()) == pytest.approx(biased_minimum(mean_shares()), abs=0.05)
    assert long_run_mean(FedAU(cutoff=3)) == pytest.approx(biased_minimum([1 - (1 - p) ** 3 for p in RATES]), abs=0.1)
    assert long_run_mean(FedAU()) == pytest.approx(biased_minimum([1.0] * 4), abs=0.1)


def test_defaults() -> None:
    assert_defaults(FedAU(), {"weighting": "uniform", "cutoff": None, "server_scale": 1.0})
