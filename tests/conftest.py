"""What all tests share: one thread, so that sums are taken in one order."""

from __future__ import annotations

import pytest
import torch

from problems import Problem, regression
from textbook import SIZES

torch.set_num_threads(1)


@pytest.fixture
def noisy() -> Problem:
    """Four clients of unequal sizes whose batches differ."""
    return regression(SIZES)
