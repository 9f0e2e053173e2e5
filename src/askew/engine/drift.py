"""Drift metrics: how the participants' updates lie to each other, to the global update and to the one before.

    δ_i an update, Δ the global update w_new − w_old, Δ' that of the round before
    diversity  Σ ‖δ_i‖² / ‖Σ δ_i‖²:  1/C where all are equal, 1 where they are orthogonal, more where they cancel
    r_i = δ_i − (⟨δ_i, Δ'⟩ / ‖Δ'‖²) Δ':  what a projection off the last global update leaves, in every method

Diversity as in Li et al., On the Effectiveness of Partial Variance Reduction in Federated Learning with Heterogeneous
Data, CVPR 2023 (arXiv 2212.02191), there by layer. Sums are taken layer by layer in float64 on the device; numbers
leave it once.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

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


def layer_sums(products: Array, count: int) -> Array:
    """Of one layer [4C + 5], from the products of δ_i, δ_i − δ̄ (C of each), δ̄ = Σ p_j δ_j, Σ δ_i, Δ and Δ' with one
    another.

    ‖δ_i‖², ⟨δ_i, Δ⟩, ⟨δ_i, Δ'⟩, ‖δ_i − δ̄‖² of each, then ‖δ̄‖², ‖Σ δ_i‖², ‖Δ‖², ‖Δ'‖², ⟨Δ, Δ'⟩.
    """
    squares = products.diagonal()
    each = [squares[:count], *products[-2:, :count], squares[count : 2 * count]]
    return np.concatenate([*each, squares[2 * count :], products[-1, -2:-1]])


def measure_updates(space: Space, deltas: Tensor, weights: Tensor, step: Tensor, previous: Tensor) -> Record:
    """The record of a round: updates [C, P] (C = 0: the method sends none) and their weights [C], Δ and Δ' [P] in
    float64.

    None stands where a length is 0, so that there is no angle or ratio.
    """
    parts, count = layer_slices(space), len(deltas)
    d = deltas.double()
    mean = weights.double() @ d
    rows = torch.cat([d, d - mean, torch.stack([mean, d.sum(0), step, previous])])
    products = [(rows[:, at] @ rows[:, at].T).flatten() for at in parts.values()]
    values = torch.cat([weights.double(), *products]).cpu().numpy()
    p = values[:count]
    by_layer = np.stack([layer_sums(each, count) for each in values[count:].reshape(len(parts), len(rows), len(rows))])
    whole = by_layer.sum(0)
    squares, to_new, to_previous, apart = whole[: 4 * count].reshape(4, count)
    length, new, last = np.sqrt(squares), float(np.sqrt(whole[-3])), float(np.sqrt(whole[-2]))
    near, far = cosine(to_new, length * new), cosine(to_previous, length * last)
    return {
        **{f"drift_cosine_{what}": value for what, value in summary(near).items()},
        **{f"drift_previous_{what}": value for what, value in summary(far).items()},
        "drift_previous_acute": float(np.mean(far > 0)) if len(far) else None,
        "drift_previous_rank": rank_correlation(np.abs(far), far),
        "drift_turn": next(iter(cosine(whole[-1:], np.array([new * last])).tolist()), None),
        "drift_norm": float(length.mean()) if count else None,
        "drift_norm_global": new,
        "drift_spread": float(p @ np.sqrt(apart)) if count else None,
        "drift_relative": relative_spread(whole, p),
        "drift_relative_head": relative_spread(by_layer[-HEAD:].sum(0), p),
        "drift_relative_layers": {name: relative_spread(row, p) for name, row in zip(parts, by_layer, strict=True)},
        "drift_diversity": diversity(whole, count),
        "drift_layers": {name: diversity(row, count) for name, row in zip(parts, by_layer, strict=True)},
        **projection_gain(squares, to_previous, whole[-4], whole[-2]),
    }


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


def diversity(row: Array, count: int) -> float | None:
    """Σ ‖δ_i‖² / ‖Σ δ_i‖², from sums; none where the updates cancel altogether."""
    return float(row[:count].sum() / row[-4]) if row[-4] > 0 else None


def relative_spread(row: Array, p: Array) -> float | None:
    """Σ p_i ‖δ_i − δ̄‖ / ‖δ̄‖, from sums: how far local models are from their average, beside how far that went."""
    count = len(p)
    return float(p @ np.sqrt(row[3 * count : 4 * count] / row[-5])) if count and row[-5] > 0 else None


def projection_gain(squares: Array, products: Array, total: float, last: float) -> Record:
    """What taking Δ' out of every update does to their variance: log ratios of before to after, above 0 where it falls.

    From ‖δ_i‖², ⟨δ_i, Δ'⟩, ‖Σ δ_i‖² and ‖Δ'‖². Once relative to the mean update's squared length, once as it is.
    """
    none: Record = {"drift_projected": None, "drift_projected_absolute": None}
    count = len(squares)
    if count < 2 or last <= 0:
        return none
    before = squares.sum(), total
    after = squares.sum() - (products**2).sum() / last, total - products.sum() ** 2 / last
    apart = [inside - whole / count for inside, whole in (before, after)]
    if min(*apart, before[1], after[1]) <= 0:
        return none
    absolute = float(np.log(apart[0] / apart[1]))
    return {"drift_projected": absolute - float(np.log(before[1] / after[1])), "drift_projected_absolute": absolute}
