"""Drift metrics: how the participants' updates lie to each other, to the global update and to the one before.

    δ_i an update, Δ the global update w_new − w_old, Δ' that of the round before
    diversity  Σ ‖δ_i‖² / ‖Σ δ_i‖²:  1/C where all are equal, 1 where they are orthogonal, more where they cancel
    r_i = δ_i − (⟨δ_i, Δ'⟩ / ‖Δ'‖²) Δ':  what a projection off the last global update leaves, in every method

Diversity as in Li et al., On the Effectiveness of Partial Variance Reduction in Federated Learning with Heterogeneous
Data, CVPR 2023 (arXiv 2212.02191), there by layer. Sums are taken layer by layer in float64 on the device; numbers
leave it once.
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..core.algebra import norm
from ..core.records import Record
from ..core.space import Space
from ..core.task import WithFeatures
from ..core.types import State

Array = np.ndarray[Any, np.dtype[np.float64]]

WINDOW = 20  # rounds over which the variance of global updates is taken
HEAD = 2  # last layers that are measured together


def layer_slices(space: Space) -> dict[str, slice]:
    """The coordinates of each layer that has parameters; those of one module lie side by side."""
    prefix = "module." if space.modules[""] is WithFeatures else ""
    found: dict[str, slice] = {}
    for name, size, end in zip(space.shapes, space.sizes, accumulate(space.sizes), strict=True):
        owner = name.removeprefix(prefix).rpartition(".")[0] or "network"
        found[owner] = slice(found[owner].start if owner in found else end - size, end)
    return found


def history(space: Space) -> State:
    """What is remembered from round to round: the last update, the model that a window of rounds began with, and of the
    window the sum of squared lengths and the number of rounds.
    """
    tally = torch.zeros(2, dtype=torch.float64, device=space.device)
    return {"moved": space.zeros_float64(), "start": space.start, "tally": tally}


def measure_round(
    space: Space,
    history: State,
    round: int,
    old: Tensor,
    new: Tensor,
    deltas: Tensor,
    weights: Tensor,
    client_drift: Tensor | None = None,
) -> tuple[Record, State]:
    """The record of a round that led from one model to another, and the history after it.

    `client_drift` [C, P] are the drifts that the participants keep, where the method learns any.
    """
    step = new.double() - old.double()
    record = measure_updates(space, deltas, weights, step, history["moved"])
    if client_drift is not None and client_drift.shape == deltas.shape and len(deltas):
        apart = deltas - step.to(deltas.dtype)  # from the new model
        plain, corrected = torch.stack([norm(apart).mean(), norm(apart + client_drift).mean()]).tolist()
        record |= {"drift_apart": plain, "drift_apart_corrected": corrected}
    tally = history["tally"] + torch.stack([step @ step, torch.ones_like(step[0])])
    if round % WINDOW:
        return record, {"moved": step, "start": history["start"], "tally": tally}
    distance = (new.double() - history["start"].double()).square().sum()
    squares, rounds, way = torch.stack([*tally, distance]).tolist()
    record["drift_window"] = rounds * squares / way - 1 if way > 0 else None
    return record, {"moved": step, "start": new, "tally": torch.zeros_like(tally)}


class UpdateSums(NamedTuple):
    """Squares and products of a round's updates, over one layer or over all."""

    squares: Array  # ‖δ_i‖² [C]
    to_new: Array  # ⟨δ_i, Δ⟩ [C]
    to_previous: Array  # ⟨δ_i, Δ'⟩ [C]
    apart: Array  # ‖δ_i − δ̄‖² [C]
    mean: float  # ‖δ̄‖²
    total: float  # ‖Σ δ_i‖²
    new: float  # ‖Δ‖²
    previous: float  # ‖Δ'‖²
    turn: float  # ⟨Δ, Δ'⟩

    @classmethod
    def of(cls, row: Array, count: int) -> UpdateSums:
        """The sums from a row [4C + 5] of `layer_sums`."""
        return cls(*row[: 4 * count].reshape(4, count), *row[4 * count :].tolist())


def layer_sums(products: Array, count: int) -> Array:
    """The entries of UpdateSums one after the other, of one layer [4C + 5].

    They are among the products of δ_i, δ_i − δ̄ (C of each), δ̄ = Σ p_j δ_j, Σ δ_i, Δ and Δ' with one another.
    """
    squares = products.diagonal()
    each = [squares[:count], *products[-2:, :count], squares[count : 2 * count]]
    return np.concatenate([*each, squares[2 * count :], products[-1, -2:-1]])


def measure_updates(space: Space, deltas: Tensor, weights: Tensor, step: Tensor, previous: Tensor) -> Record:
    """The record of a round: updates [C, P] (C = 0: the method sends none) and their weights [C], Δ and Δ' [P] in
    float64.

    None stands where a length is 0, so that there is no angle or ratio.
    """
    slices, count = layer_slices(space), len(deltas)
    p, by_layer = sums_by_layer(list(slices.values()), deltas, weights, step, previous)
    sums, head = (UpdateSums.of(rows.sum(0), count) for rows in (by_layer, by_layer[-HEAD:]))
    layers = {name: UpdateSums.of(row, count) for name, row in zip(slices, by_layer, strict=True)}
    length, new, last = np.sqrt(sums.squares), math.sqrt(sums.new), math.sqrt(sums.previous)
    near, far = cosine(sums.to_new, length * new), cosine(sums.to_previous, length * last)
    return {
        **{f"drift_cosine_{what}": value for what, value in summary(near).items()},
        **{f"drift_previous_{what}": value for what, value in summary(far).items()},
        "drift_previous_acute": float(np.mean(far > 0)) if len(far) else None,
        "drift_previous_rank": rank_correlation(np.abs(far), far),
        "drift_turn": next(iter(cosine(np.array([sums.turn]), np.array([new * last])).tolist()), None),
        "drift_norm": float(length.mean()) if count else None,
        "drift_norm_global": new,
        "drift_spread": float(p @ np.sqrt(sums.apart)) if count else None,
        "drift_relative": relative_spread(sums, p),
        "drift_relative_head": relative_spread(head, p),
        "drift_relative_layers": {name: relative_spread(layer, p) for name, layer in layers.items()},
        "drift_diversity": diversity(sums),
        "drift_layers": {name: diversity(layer) for name, layer in layers.items()},
        **projection_gain(sums),
    }


def sums_by_layer(
    slices: list[slice], deltas: Tensor, weights: Tensor, step: Tensor, previous: Tensor
) -> tuple[Array, Array]:
    """The weights [C], and of each layer a row of `layer_sums`; read from the device at once."""
    count, d = len(deltas), deltas.double()
    mean = weights.double() @ d
    rows = torch.cat([d, d - mean, torch.stack([mean, d.sum(0), step, previous])])
    products = [(rows[:, at] @ rows[:, at].T).flatten() for at in slices]
    values = torch.cat([weights.double(), *products]).cpu().numpy()
    each = values[count:].reshape(len(slices), len(rows), len(rows))
    return values[:count], np.stack([layer_sums(layer, count) for layer in each])


def cosine(products: Array, lengths: Array) -> Array:
    """⟨a, b⟩ / (‖a‖ ‖b‖) where there is an angle."""
    return np.clip(products[lengths > 0] / lengths[lengths > 0], -1, 1)


def summary(values: Array) -> dict[str, float | None]:
    """Mean, lowest and highest, where there is a value."""
    of = (float(values.mean()), float(values.min()), float(values.max())) if len(values) else (None, None, None)
    return dict(zip(("mean", "min", "max"), of, strict=True))


def ranks(values: Array) -> Array:
    """Ranks, equal values sharing theirs."""
    _, at, counts = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(counts) - (counts - 1) / 2)[at])


def rank_correlation(a: Array, b: Array) -> float | None:
    """The rank correlation of two rows; none where one is constant."""
    constant = len(a) < 2 or bool(np.ptp(a) == 0 or np.ptp(b) == 0)
    if constant:
        return None
    x, y = (values - values.mean() for values in (ranks(a), ranks(b)))
    return float(x @ y / np.sqrt((x @ x) * (y @ y)))


def diversity(sums: UpdateSums) -> float | None:
    """Σ ‖δ_i‖² / ‖Σ δ_i‖²; none where the updates cancel altogether."""
    return float(sums.squares.sum() / sums.total) if sums.total > 0 else None


def relative_spread(sums: UpdateSums, p: Array) -> float | None:
    """Σ p_i ‖δ_i − δ̄‖ / ‖δ̄‖: how far local models are from their average, beside how far that went."""
    return float(p @ np.sqrt(sums.apart / sums.mean)) if len(p) and sums.mean > 0 else None


def projection_gain(sums: UpdateSums) -> Record:
    """What taking Δ' out of every update does to their variance: log ratios of before to after, above 0 where it falls.

    Once relative to the mean update's squared length, once as it is.
    """
    none: Record = {"drift_projected": None, "drift_projected_absolute": None}
    squares, products, count = sums.squares, sums.to_previous, len(sums.squares)
    if count < 2 or sums.previous <= 0:
        return none
    before = squares.sum(), sums.total
    after = squares.sum() - (products**2).sum() / sums.previous, sums.total - products.sum() ** 2 / sums.previous
    apart = [inside - whole / count for inside, whole in (before, after)]
    if min(*apart, before[1], after[1]) <= 0:
        return none
    absolute = float(np.log(apart[0] / apart[1]))
    return {"drift_projected": absolute - float(np.log(before[1] / after[1])), "drift_projected_absolute": absolute}
