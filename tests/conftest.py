"""What all tests share: one thread, so that sums are taken in one order, and processes on machines with few cores.

What a test registers under a name is forgotten after it.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
import torch

from askew.algorithms import algorithms
from askew.data import partitions, sources
from askew.models import networks
from askew.participation import participations

torch.set_num_threads(1)
os.environ["ASKEW_MANY_PROCESSES"] = "1"


def pytest_collection_finish() -> None:
    """Leave modules and tests, which stay to the end, out of every later search for garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def registries_stay_as_they_are() -> Iterator[None]:
    registries = (algorithms, sources, partitions, networks, participations)
    before = [dict(registry.members) for registry in registries]
    yield
    for registry, members in zip(registries, before, strict=True):
        registry.members.clear()
        registry.members.update(members)
