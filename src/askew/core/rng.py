"""Addressed random streams: every draw is a function of (seed, purpose, round, client) and of nothing else.

No stream depends on how much another one was used, on the algorithm or on the engine: two methods that coincide on
paper see the same participants and the same batches, and a resumed run needs no generator state.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from hashlib import blake2b
from itertools import count
from typing import Any, cast

import numpy as np
import torch
from numpy.random.bit_generator import ISeedSequence

eight_words = struct.Struct("<8Q").unpack


def address_key(seed: int, purpose: str, round: int = 0, client: int = -1) -> bytes:
    """128 bits that belong to one address."""
    return blake2b(f"{seed}/{purpose}/{round}/{client}".encode(), digest_size=16).digest()


class _Address(ISeedSequence):
    """A generator's key. Handed over as `key`, the generator would first ask the system for chance, which takes twice
    as long.
    """

    def __init__(self, words: np.ndarray[Any, np.dtype[np.uint64]]) -> None:
        self.words = words

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> np.ndarray[Any, Any]:
        assert (n_words, dtype) == (len(self.words), self.words.dtype)
        return self.words


def generator(seed: int, purpose: str, round: int = 0, client: int = -1) -> np.random.Generator:
    """The stream at an address; round 0 stands for draws made once, client −1 for the server's."""
    return np.random.Generator(
        np.random.Philox(cast(Any, _Address(np.frombuffer(address_key(seed, purpose, round, client), dtype=np.uint64))))
    )


def torch_seed(seed: int, purpose: str, round: int = 0, client: int = -1) -> int:
    """A seed for torch's own generators at an address."""
    return int.from_bytes(address_key(seed, purpose, round, client)[:8], "little") >> 1


def coin(seed: int, round: int, client: int) -> float:
    """One uniform number in [0, 1) of a client and a round: an address is as good as a draw."""
    return torch_seed(seed, "coin", round, client) / 2**63


def uniforms(seed: int, purpose: str, round: int = 0, client: int = -1) -> Iterator[float]:
    """Uniform numbers in (0, 1), without the ends, at an address; for a few of them this is faster than a generator."""
    for part in count():
        for word in uniform_words(seed, purpose, round, client, part):
            yield ((word >> 12) + 0.5) / 2**52


def uniform(seed: int, purpose: str, round: int = 0, client: int = -1) -> float:
    """The first of `uniforms` at an address."""
    return ((uniform_words(seed, purpose, round, client, 0)[0] >> 12) + 0.5) / 2**52


def uniform_words(seed: int, purpose: str, round: int, client: int, part: int) -> tuple[int, ...]:
    """Eight numbers of 64 bits at an address, of which `uniforms` makes its numbers."""
    return eight_words(blake2b(f"{seed}/{purpose}/{round}/{client}/{part}".encode()).digest())


def torch_generator(seed: int, purpose: str, round: int = 0, client: int = -1) -> torch.Generator:
    """A torch stream (on the host) at an address."""
    return torch.Generator().manual_seed(torch_seed(seed, purpose, round, client))
