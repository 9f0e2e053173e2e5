"""Problems that the tests of several methods share."""

from __future__ import annotations

import pytest
from textbook import SIZES

from problems import Problem, TwoLayerLinear, regression


@pytest.fixture
def noisy() -> Problem:
    """Least squares with four clients of unequal sizes whose batches differ."""
    return regression(SIZES)


@pytest.fixture
def equal_sizes() -> Problem:
    """The same with equal sizes."""
    return regression([6, 6, 6, 6])


@pytest.fixture
def layered() -> Problem:
    """The same as `noisy` with four weights in two layers of two."""
    return Problem(regression(SIZES, d=4).fed, TwoLayerLinear())
