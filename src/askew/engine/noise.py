"""Gaussian noise for sums of clients' updates: from the operating system where it protects somebody, from the run's
seed where a simulation must repeat its numbers.

Noise that protects is discrete. Added to a floating-point number, even perfect noise leaves traces in the last bits, by
which two inputs can be distinguished (Mironov, CCS 2012). Here every update is first rounded towards zero to whole
multiples of a small step, so that it gets no longer; these are summed exactly, and a discrete Gaussian is added, which
is drawn with whole numbers alone (Canonne, Kamath, Steinke, NeurIPS 2020, arXiv 2004.00010, Algorithms 1 to 3). What
comes out can be every whole number, whatever went in. The step is 2⁻²⁴ of the noise's standard deviation: so fine that
its guarantee is that of the continuous Gaussian up to e^(−2π² 2⁴⁸). Chances are exact up to 2⁻⁶⁰.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ..core.algebra import norm
from ..core.rng import generator

Words = np.ndarray[Any, np.dtype[np.uint64]]
Integers = np.ndarray[Any, np.dtype[np.int64]]
RandomWords = Callable[[int], Words]  # returns so many random words of 64 bits

BITS = 24  # the noise's standard deviation is 2^BITS steps
CHUNK = 2**17  # draws at a time, so that they stay in the processor's cache
ONE_IN_E = np.uint64(6786177901268885274)  # ⌊2⁶⁴ / e⌋: a word is below it with the chance 1/e
SHORTER = 1 - 1e-9  # factor by which clipped updates are shorter than allowed, more than float64 may round up


class NoiseSource(Protocol):
    """Adds up rows and hides each of them by Gaussian noise."""

    def noisy_sum(self, rows: Tensor, longest: float, std: float, purpose: str, round: int, client: int = -1) -> Tensor:
        """The sum [P] of rows [m, P], none longer than `longest`, plus noise of this deviation, in float64."""
        ...


class SeededNoise:
    """Noise of a simulation, which repeats with the run's seed: who knows the seed can subtract it."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def noisy_sum(self, rows: Tensor, longest: float, std: float, purpose: str, round: int, client: int = -1) -> Tensor:
        noise = generator(self.seed, purpose, round, client).normal(0.0, std, rows.shape[1])
        return shorten_rows(rows.double(), longest).sum(0) + torch.from_numpy(noise).to(rows.device)


def system_words(count: int) -> Words:
    """Random words from the operating system's cryptographic generator."""
    return np.frombuffer(os.urandom(8 * count), dtype=np.uint64)


class SystemNoise:
    """Noise that protects: discrete, and from the operating system, so that nobody can draw it again."""

    def __init__(self, words: RandomWords = system_words) -> None:
        self.words = words

    def noisy_sum(self, rows: Tensor, longest: float, std: float, purpose: str, round: int, client: int = -1) -> Tensor:
        step = std / 2**BITS
        total = np.zeros(rows.shape[1], dtype=np.int64)
        for row in rows:  # one by one: whole numbers of all rows at once would take much memory
            exact = shorten_rows(row[None].double(), longest * SHORTER)[0] / step
            total += exact.trunc().to(torch.int64).cpu().numpy()
        total += discrete_gaussian(len(total), self.words)
        result: Tensor = torch.from_numpy(total).to(rows.device).double() * step
        return result


def shorten_rows(rows: Tensor, longest: float) -> Tensor:
    """The rows, those that are longer scaled down to this length."""
    lengths = norm(rows)
    scale = torch.where(lengths > longest, longest / lengths.clamp(min=torch.finfo(torch.float64).tiny), 1.0)
    return torch.where((lengths > longest)[:, None], rows * scale[:, None].to(rows.dtype), rows)


# drawing in whole numbers ---------------------------------------------------------------------------------------


def discrete_gaussian(count: int, words: RandomWords) -> Integers:
    """Draws k of chances proportional to exp(−k² / 2σ²) for σ = 2^BITS, by rejection from a discrete Laplace."""
    draws: list[Integers] = []
    missing = count
    while missing > 0:
        laplace = discrete_laplace(min(CHUNK, 2 * missing + 64), words)
        excess = np.abs(laplace) - 2**BITS
        kept = laplace[bernoulli_exp((excess * excess).astype(np.uint64), 2 * BITS + 1, words)]
        draws.append(kept[:missing])
        missing -= len(draws[-1])
    return np.concatenate(draws) if draws else np.zeros(0, dtype=np.int64)


def discrete_laplace(tries: int, words: RandomWords) -> Integers:
    """Draws k of chances proportional to exp(−|k| / 2^BITS); of so many tries about six in ten succeed."""
    word = words(tries)
    rest, negative = word & np.uint64(2**BITS - 1), (word >> np.uint64(63)).astype(bool)
    kept = bernoulli_exp(rest, BITS, words)
    rest, negative = rest[kept], negative[kept]
    whole, active = np.zeros(len(rest), dtype=np.uint64), np.arange(len(rest))
    while len(active):
        active = active[words(len(active)) < ONE_IN_E]
        whole[active] += np.uint64(1)
    draws = (rest + (whole << np.uint64(BITS))).astype(np.int64)
    draws[negative] *= -1
    kept_draws: Integers = draws[~negative | (draws != 0)]  # without negative zeros, else 0 would come twice as often
    return kept_draws


def bernoulli_exp(counts: Words, bits: int, words: RandomWords) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Independent draws that are true with the chance exp(−c / 2^bits) for each c in `counts`.

    For γ < 1, let K be the first k at which a draw of chance γ/k fails: then K is odd with the chance exp(−γ). Whole
    parts of γ are draws of chance 1/e.
    """
    fraction, left = counts & np.uint64(2**bits - 1), counts >> np.uint64(bits)
    result, active, k = np.zeros(len(counts), dtype=bool), np.arange(len(counts)), 1
    while len(active):
        hit = (words(len(active)) >> np.uint64(64 - bits)) < fraction[active]
        if k > 1:
            hit &= words(len(active)) % np.uint64(k) == 0
        result[active[~hit]] = k % 2 == 1
        active, k = active[hit], k + 1
    active = np.flatnonzero(result & (left > 0))
    while len(active):
        hit = words(len(active)) < ONE_IN_E
        result[active[~hit]] = False
        left[active] -= np.uint64(1)
        active = active[hit & (left[active] > 0)]
    return result
