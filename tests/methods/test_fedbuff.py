"""FedBuff: steps from a buffer of answers, of which stale ones count less."""

from __future__ import annotations

import math

import pytest
import torch
from textbook import COHORTS, EVERY_TERM, assert_defaults, exactly, stale_cohort, two_rounds_on_the_line, vectors

from askew.algorithms import FedAvg, FedBuff
from problems import Problem, identical, trained_server

W = torch.tensor([0.5, -1.0], dtype=torch.float64)
UPDATES = vectors([1.0, 0.0], [0.0, 2.0], [4.0, 4.0])


def test_stale_updates_are_added_with_their_factors_and_divided_by_their_number() -> None:
    # (1 + τ)^−½ for τ = 0, 3, 8: 1, 1/2, 1/3. The sum (1 + 4/3, 1 + 4/3) over three answers, times s = 0.6.
    w, _ = FedBuff(server_scale=0.6).aggregate(W, {"delta": UPDATES}, stale_cohort(0, 3, 8), {})
    assert w.tolist() == exactly(0.5 + 0.6 * 7 / 9, -1 + 0.6 * 7 / 9)


def test_two_steps_by_hand() -> None:
    """Clients 0 and 1 answer first; client 2 started beside them, and answers together with client 0, which is new."""
    # (A, a) are (1, 1), (4, −2), (2, 3); two local steps go 0.19, 0.64 and 0.36 of the way from the start to a.
    path, _ = two_rounds_on_the_line(FedBuff())
    first = (0.19 - 1.28) / 2
    assert path[0] == pytest.approx(first, rel=1e-12)
    late, new = 0.36 * 3, 0.19 * (1 - first)  # from 0 and from the first step's model
    w, _ = FedBuff().aggregate(W.new_tensor([first]), {"delta": vectors([late], [new])}, stale_cohort(1, 0), {})
    assert w.tolist() == exactly(first + (late / math.sqrt(2) + new) / 2)


@pytest.mark.parametrize("alg", [FedBuff(staleness="constant", exponent=2.0), FedBuff(exponent=0.0)])
def test_where_stale_updates_count_as_new_ones_it_is_fedavg(alg: FedBuff) -> None:
    cohort = stale_cohort(0, 3, 8)
    ours, fedavg = (a.aggregate(W, {"delta": UPDATES}, cohort, {})[0] for a in (alg, FedAvg(weighting="uniform")))
    assert torch.equal(ours, fedavg)


def test_without_stale_answers_it_is_fedavg_with_equal_weights_bit_for_bit(noisy: Problem) -> None:
    algs = FedBuff(server_lr=0.08), FedAvg(weighting="uniform", server_lr=0.08)
    ours, fedavg = (trained_server(alg, noisy, EVERY_TERM, COHORTS) for alg in algs)
    assert identical({"w": ours.w}, {"w": fedavg.w})


def test_defaults_are_the_published_ones() -> None:
    expected = {"weighting": "uniform", "server_scale": 1.0, "staleness": "polynomial", "exponent": 0.5}
    assert_defaults(FedBuff(), expected)
