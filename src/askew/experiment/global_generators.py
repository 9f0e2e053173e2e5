"""Python's, numpy's and torch's random generators of the whole process: no seed of a run sets them."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch

TORCH = "torch's generator"
States = dict[str, object]  # by the name of the generator; compared, and nothing else


def generator_states(with_torch: bool = False) -> States:
    """The states of the generators of Python and numpy, and perhaps of torch on the CPU, to compare."""
    # pickled, as numpy's may be replaced by a generator with another kind of state
    states: States = {"Python's generator": random.getstate()}
    states["numpy's generator"] = pickle.dumps(np.random.get_state(legacy=False))  # noqa: NPY002 the one that users draw from
    return states | ({TORCH: torch.get_rng_state().numpy().tobytes()} if with_torch else {})


@contextmanager
def other_generators() -> Iterator[None]:
    """Leave the generators of Python and numpy as they were."""
    python, numpy = random.getstate(), np.random.get_state(legacy=False)  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002


def draws_sentence(before: Mapping[str, object], after: Mapping[str, object], when: str) -> str:
    """That numbers were drawn from these generators in between, and what to do; empty if none were."""
    moved = [name for name, state in before.items() if after[name] != state]
    if not moved:
        return ""
    return (
        f"{when}, code of yours drew random numbers from {' and '.join(moved)}, which the seed does not set: the same "
        "run may give other numbers next time; draw by torch.rand and the like in hooks of a client and in a network, "
        "and elsewhere from a generator that is made anew, as by np.random.default_rng([seed, round])"
    )
