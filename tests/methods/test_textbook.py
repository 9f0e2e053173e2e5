"""The helpers that the tests of methods compare with."""

from __future__ import annotations

import torch
from textbook import TWO_STEPS, full_gradient, zeros

from problems import close, identical, quadratics, scalars, train_locally


def test_the_helpers_of_these_tests() -> None:
    """Full gradients of a quadratic, and states that differ."""
    problem = scalars((2.0, 3.0))
    assert close(full_gradient(problem, 0, torch.tensor([1.0], dtype=torch.float64)), -4.0)
    assert close(train_locally(problem, TWO_STEPS, 0, 1, zeros(problem)).theta, 3 * (1 - 0.64))
    assert not identical({"w": torch.zeros(1)}, {"w": torch.ones(1)})


def test_local_training_written_out() -> None:
    """On a quadratic with a known answer, and optima that differ."""
    problem = scalars((2.0, 3.0))
    assert close(train_locally(problem, TWO_STEPS, 0, 1, zeros(problem)).theta, 3 * (1 - 0.64))
    assert not close(quadratics().optimum(), quadratics(seed=1).optimum(), 1e-3)
