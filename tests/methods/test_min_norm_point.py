"""The shortest vector in a convex hull, by Wolfe's method and by quadratic programming."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from askew.algorithms._simplex import min_norm_point, slsqp


@st.composite
def unit_vectors(draw: st.DrawFn, most: int = 100, dimensions: int = 120) -> np.ndarray:
    """Unit vectors in few or many dimensions; some repeated, some opposite."""
    m, d, seed = draw(st.integers(1, most)), draw(st.integers(1, dimensions)), draw(st.integers(0, 10**6))
    rng = np.random.default_rng(seed)
    u = rng.normal(size=(m, d)) + draw(st.sampled_from([0.0, 0.5, 3.0])) * rng.normal(size=d)
    if draw(st.booleans()):
        u[rng.integers(m, size=m // 2)] = u[0]
    if draw(st.booleans()):
        u[-1] = -u[0]
    return u / np.linalg.norm(u, axis=1, keepdims=True)


@given(unit_vectors())
@settings(max_examples=60, deadline=None)
def test_the_shortest_point_is_optimal(u: np.ndarray) -> None:
    """⟨u*, u_i⟩ ≥ ‖u*‖² for all, with equality where α_i > 0; not longer than the mean."""
    alpha = min_norm_point(u @ u.T)
    point = alpha @ u
    products, length = u @ point, point @ point
    assert alpha.min() >= 0 and abs(alpha.sum() - 1) < 1e-12
    assert products.min() > length - 1e-9
    assert np.abs(products[alpha > 1e-9] - length).max() < 1e-8
    assert length <= np.square(u.mean(0)).sum() + 1e-12


def test_the_shortest_point_among_vectors_of_many_lengths_is_optimal() -> None:
    """Many points of few dimensions, some of them a hundred times longer."""
    for seed in range(300):
        rng = np.random.default_rng(seed)
        m, d = rng.integers(3, 40), rng.integers(1, 12)
        scaled = rng.normal(size=(m, d)) * rng.lognormal(0, 1 + seed % 2, size=(m, 1))
        u = scaled + (1, 3, 10)[seed % 3] * rng.normal(size=d)
        point = min_norm_point(u @ u.T) @ u
        assert (u @ point).min() > point @ point - 1e-12 * np.square(u).sum(1).max()


def check_both_solvers(u: np.ndarray) -> None:
    """Both solvers must find the same point."""
    gram = u @ u.T
    one, other = min_norm_point(gram) @ u, slsqp(gram) @ u
    assert abs(one @ one - other @ other) < 1e-8
    assert np.linalg.norm(one - other) < 1e-4  # squares that differ by ε allow points that differ by √ε


@given(unit_vectors(most=8, dimensions=10))
@settings(max_examples=15, deadline=None)
def test_both_solvers_find_the_same_point(u: np.ndarray) -> None:
    check_both_solvers(u)


@pytest.mark.slow
@given(unit_vectors())
@settings(max_examples=25, deadline=None)
def test_both_solvers_find_the_same_point_of_many_vectors(u: np.ndarray) -> None:
    check_both_solvers(u)


@given(st.integers(0, 10**6), st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_the_shortest_of_two_in_closed_form(seed: int, d: int) -> None:
    a, b = np.random.default_rng(seed).normal(size=(2, d))
    alpha = np.clip((b - a) @ b / ((a - b) @ (a - b)), 0, 1)
    u = np.stack([a, b])
    assert min_norm_point(u @ u.T) == pytest.approx([alpha, 1 - alpha], abs=1e-10)


def check_weights_in_a_box(u: np.ndarray, eps: float) -> None:
    """Karush–Kuhn–Tucker: ⟨u*, u_i⟩ is one number ν inside the box, ≥ ν at a lower and ≤ ν at an upper bound."""
    share = np.random.default_rng(len(u)).dirichlet(np.ones(len(u)))
    low, high = np.clip(share - eps, 0, 1), np.clip(share + eps, 0, 1)
    weights = slsqp(u @ u.T, low, high, share)
    assert (weights > low - 1e-9).all() and (weights < high + 1e-9).all() and abs(weights.sum() - 1) < 1e-12
    products = u @ (weights @ u)
    may_grow, may_shrink = products[weights < high - 1e-6], products[weights > low + 1e-6]
    if len(may_grow) and len(may_shrink):
        assert may_grow.min() > may_shrink.max() - 1e-5


@given(unit_vectors(most=8, dimensions=10), st.sampled_from([0.02, 0.1, 0.4]))
@settings(max_examples=15, deadline=None)
def test_weights_in_a_box_are_optimal(u: np.ndarray, eps: float) -> None:
    check_weights_in_a_box(u, eps)


@pytest.mark.slow
@given(unit_vectors(), st.sampled_from([0.02, 0.1, 0.4]))
@settings(max_examples=12, deadline=None)
def test_weights_of_many_vectors_in_a_box_are_optimal(u: np.ndarray, eps: float) -> None:
    check_weights_in_a_box(u, eps)
