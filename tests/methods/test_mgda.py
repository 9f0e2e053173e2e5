"""MGDA: the shortest convex combination of unit gradients."""

from __future__ import annotations

import math

import pytest
import torch
from textbook import (
    COHORTS,
    EVERY_TERM,
    LINE_CLIENTS,
    ONE_STEP,
    PLAIN,
    TWO_STEPS,
    exactly,
    full_gradient,
    mgda_step,
    vectors,
    zeros,
)

from askew.algorithms import MGDA
from askew.algorithms._simplex import min_norm_point
from problems import Problem, close, least_squares, make_server, run_rounds, scalars, train_locally


def test_rounds_follow_the_formulas(noisy: Problem) -> None:
    """Raw gradients along the steps, before clipping and weight decay, which bend the path."""
    server, w = make_server(MGDA(server_lr=0.3, server_decay=0.1), noisy, EVERY_TERM), zeros(noisy)
    for t, ids in enumerate(COHORTS, 1):
        server.run_round(t, ids)
        G = torch.stack([train_locally(noisy, EVERY_TERM, i, t, w).gradients.mean(0) for i in ids])
        u = G / G.norm(dim=1, keepdim=True)
        alpha = torch.from_numpy(min_norm_point((u @ u.T).numpy()))
        w = w - 0.3 * (alpha @ u + 0.1 * w)
        assert close(server.w, w, 1e-10)


def test_two_rounds_by_hand() -> None:
    # On the line u_i is a sign. Clients 0 and 2 both pull up: w = 0.5. Then 0 pulls up and 1 down: nobody may lose.
    server = make_server(MGDA(server_lr=0.5), scalars(*LINE_CLIENTS), TWO_STEPS)
    records = run_rounds(server, [[0, 2], [0, 1]])
    assert server.w.tolist() == exactly(0.5)
    assert [(r["norm"], r["stationary"]) for r in records] == [(1.0, 0.0), (0.0, 1.0)]


def test_two_rounds_in_the_plane_by_hand() -> None:
    # L_i = ½ ‖w − a_i‖², a = (3, 4), (4, −3): unit gradients −(0.6, 0.8), −(0.8, −0.6), orthogonal: w = (0.7, 0.1).
    # From there client 2 with a = (0.7, 5.1) has −(0, 1) and client 0 −(2.3, 3.9)/√20.5: half of both.
    minima = vectors([3.0, 4.0], [4.0, -3.0], [0.7, 5.1])
    problem = least_squares(torch.eye(2, dtype=torch.float64).expand(3, 2, 2), minima)
    server = make_server(MGDA(single_gradient=True), problem, ONE_STEP)
    server.run_round(1, [0, 1])
    assert server.w.tolist() == exactly(0.7, 0.1)
    server.run_round(2, [0, 2])
    root = math.sqrt(2.3**2 + 3.9**2)
    assert server.w.tolist() == exactly(0.7 + 1.15 / root, 0.1 + 0.5 + 1.95 / root)


@pytest.mark.parametrize("solver", ["wolfe", "slsqp"])
def test_with_orthogonal_gradients_the_step_is_their_unit_mean(solver: str) -> None:
    for m in (1, 2, 5):
        new, state = mgda_step(MGDA(solver=solver), torch.diag(torch.arange(1.0, m + 1).double()))
        assert new.tolist() == pytest.approx([-1 / m] * m, abs=1e-8)
        assert state["norm"] == pytest.approx(1 / math.sqrt(m), abs=1e-8)
        assert state["stationary"] == 0


@pytest.mark.parametrize("solver", ["wolfe", "slsqp"])
def test_with_two_gradients_the_step_is_half_of_both_unit_vectors(solver: str) -> None:
    new, _ = mgda_step(MGDA(solver=solver, server_lr=2.0), vectors([30.0, 40.0], [8.0, 6.0]))
    assert new.tolist() == pytest.approx([-1.4, -1.4], abs=1e-8)


@pytest.mark.parametrize("solver", ["wolfe", "slsqp"])
def test_with_identical_gradients_the_step_is_normalised(solver: str) -> None:
    """The Gram matrix is singular: the weights are not unique, the step is."""
    new, state = mgda_step(MGDA(solver=solver), vectors(*[[3.0, 4.0]] * 4))
    assert new.tolist() == pytest.approx([-0.6, -0.8], abs=1e-12) and state["norm"] == pytest.approx(1)


def test_zero_gradients_are_left_out() -> None:
    new, _ = mgda_step(MGDA(), vectors([0.0, 0.0], [0.0, 5.0]))
    assert new.tolist() == exactly(0.0, -1.0)
    new, state = mgda_step(MGDA(), vectors([0.0, 0.0], [0.0, 0.0]), vectors([1.0, 1.0])[0])
    assert new.tolist() == [1.0, 1.0] and state == {"norm": 0.0, "stationary": 1.0}


def test_no_step_where_it_is_stationary() -> None:
    """Not even the weight decay's; the record counts it."""
    three = vectors([1.0, 0.0], [-1.0, math.sqrt(3)], [-1.0, -math.sqrt(3)])
    for gradients in (vectors([2.0, 1.0], [-4.0, -2.0]), three):
        new, state = mgda_step(MGDA(server_decay=0.5), gradients, vectors([1.0, 1.0])[0])
        assert new.tolist() == [1.0, 1.0] and state["stationary"] == 1 and state["norm"] < 1e-8


def test_with_one_client_it_is_normalised_sgd_with_decay(noisy: Problem) -> None:
    server, w = make_server(MGDA(single_gradient=True, server_lr=0.2, server_decay=0.3), noisy, PLAIN), zeros(noisy)
    for t in (1, 2, 3):
        server.run_round(t, [1])
        g = full_gradient(noisy, 1, w)
        w = w - 0.2 * (g / g.norm() + 0.3 * w)
        assert close(server.w, w)
