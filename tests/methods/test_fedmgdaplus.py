"""FedMGDA+: the same of unit updates, with weights in a box."""

from __future__ import annotations

import math

import pytest
import torch
from textbook import (
    COHORTS,
    EVERY_TERM,
    LINE_CLIENTS,
    PLAIN,
    TWO_STEPS,
    displacements,
    make_cohort,
    mgda_step,
    sample_shares,
    vectors,
    zeros,
)

from askew.algorithms import MGDA, FedMGDAPlus
from problems import Problem, close, make_server, scalars


def test_two_rounds_by_hand() -> None:
    # Sizes 1, 3, 2: shares ¼ and ¾, free by 0.1. One up, one down: weights 0.35 and 0.65, w = −0.3. Then both up:
    # w = 0.7.
    server = make_server(FedMGDAPlus(eps=0.1), scalars(*LINE_CLIENTS, copies=[1, 3, 2, 1]), TWO_STEPS)
    assert server.run_round(1, [0, 1])["norm"] == pytest.approx(0.3, abs=1e-9)
    assert server.w.tolist() == pytest.approx([-0.3], abs=1e-9)
    assert server.run_round(2, [0, 2])["norm"] == pytest.approx(1, abs=1e-9)
    assert server.w.tolist() == pytest.approx([0.7], abs=1e-9)


def test_without_freedom_it_is_fedavg_of_unit_updates(noisy: Problem) -> None:
    alg = FedMGDAPlus(eps=0.0, server_lr=0.3, server_decay_rate=0.5)
    server, w = make_server(alg, noisy, EVERY_TERM), zeros(noisy)
    for t, ids in enumerate(COHORTS, 1):
        server.run_round(t, ids)
        delta = displacements(noisy, EVERY_TERM, ids, t, w)
        w = w + 0.3 * 0.5 ** (t - 1) * (sample_shares(noisy, ids) @ (delta / delta.norm(dim=1, keepdim=True)))
        assert close(server.w, w)


def test_with_full_freedom_it_is_mgda_on_displacements(noisy: Problem) -> None:
    server, w = make_server(FedMGDAPlus(eps=1.0), noisy, PLAIN), zeros(noisy)
    for t, ids in enumerate(COHORTS, 1):
        server.run_round(t, ids)
        w = mgda_step(MGDA(), -displacements(noisy, PLAIN, ids, t, w), w)[0]
        assert close(server.w, w, 1e-10)


def test_weights_of_two_in_their_box() -> None:
    """The optimum is one half each: shares of 0.8 and 0.2 may go to 0.7 and 0.3; 0.55 and 0.45 may go all the way."""
    delta = vectors([-3.0, 0.0], [0.0, -7.0])
    for p, eps, want in (
        ((0.8, 0.2), 0.1, (0.7, 0.3)),
        ((0.55, 0.45), 0.1, (0.5, 0.5)),
        ((0.98, 0.02), 0.3, (0.68, 0.32)),
    ):
        w = torch.zeros(2, dtype=torch.float64)
        new, state = FedMGDAPlus(eps=eps).aggregate(w, {"delta": delta}, make_cohort(p), {"norm": w[0]})
        assert (-new).tolist() == pytest.approx(want, abs=1e-7)
        assert float(state["norm"]) == pytest.approx(math.hypot(*want), abs=1e-7)


def test_bounds_of_three_weights() -> None:
    """Of two weights one's lower bound is the other's upper; of three each bound can act alone.

    Equal shares; two updates are e_1 and e_2. Against the third, −(e_1 + e_2)/√2, weights 1/(1 + √2) = 0.414 and 0.293
    would cancel: the upper bound stops at 0.383.
    The third as (e_1 + e_2)/√2 is of no use: the lower bound keeps it at 1/30.
    """
    side = math.sqrt(0.5)
    for third, eps, weight in ((-side, 0.05, 1 / 3 + 0.05), (side, 0.3, 1 / 30)):
        u = vectors([1.0, 0.0], [0.0, 1.0], [third, third])
        w = torch.zeros(2, dtype=torch.float64)
        new, _ = FedMGDAPlus(eps=eps).aggregate(w, {"delta": -5 * u}, make_cohort([1 / 3] * 3), {"norm": w[0]})
        assert (-new).tolist() == pytest.approx([(1 - weight) / 2 + weight * third] * 2, abs=1e-7)


def test_clients_that_did_not_move_are_left_out() -> None:
    w, delta = torch.zeros(2, dtype=torch.float64), vectors([0.0, 0.0], [0.0, 5.0])
    for eps in (0.0, 0.1, 1.0):
        alg = FedMGDAPlus(eps=eps)
        step = lambda delta, alg=alg: alg.aggregate(w, {"delta": delta}, make_cohort([0.9, 0.1]), {"norm": w[0]})[0]
        assert step(delta).tolist() == pytest.approx([0.0, 1.0])
        assert torch.equal(step(0 * delta), w)
