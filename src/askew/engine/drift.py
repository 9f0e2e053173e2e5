"""Drift: how the participants' updates lie to each other, to the global update and to the one before.

    δ_i an update, Δ the global update x_new − x_old, Δ' that of the round before
    diversity  Σ ‖δ_i‖² / ‖Σ δ_i‖²:  1/C where all are equal, 1 where they are orthogonal, more where they cancel

Diversity as in Li et al., On the Effectiveness of Partial Variance Reduction in Federated Learning with Heterogeneous Data,
CVPR 2023 (arXiv 2212.02191), there by layer. Sums are taken layer by layer in float64 on the device; numbers leave it once.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.space import Space
from ..core.task import WithFeatures

Record = dict[str, Any]
Array = np.ndarray[Any, np.dtype[np.float64]]


def layers(space: Space) -> dict[str, slice]:
    """The coordinates of each layer that has parameters; those of one module lie side by side."""
    prefix = "module." if space.modules[""] is WithFeatures else ""
    found: dict[str, slice] = {}
    for name, size, end in zip(space.shapes, space.sizes, accumulate(space.sizes), strict=True):
        owner = name.removeprefix(prefix).rpartition(".")[0] or "network"
        found[owner] = slice(found[owner].start if owner in found else end - size, end)
    return found


def sums(deltas: Tensor, weights: Tensor, moved: Tensor, previous: Tensor) -> Tensor:
    """Of one layer, [4C + 4]: ‖δ_i‖², ⟨δ_i, Δ⟩, ⟨δ_i, Δ'⟩, ‖δ_i − Σ p_j δ_j‖² of each, then ‖Σ δ_i‖², ‖Δ‖², ‖Δ'‖², ⟨Δ, Δ'⟩."""
    d, p = deltas.double(), weights.double()
    each = [d.square().sum(1), d @ moved, d @ previous, (d - p @ d).square().sum(1)]
    return torch.cat([*each, torch.stack([d.sum(0).square().sum(), moved @ moved, previous @ previous, moved @ previous])])


def measured(space: Space, deltas: Tensor, weights: Tensor, moved: Tensor, previous: Tensor) -> Record:
    """The record of a round: updates [C, P] (C = 0: the method sends none) and their weights [C], Δ and Δ' [P] in float64.

    None stands where a length is 0, so that there is no angle or ratio.
    """
    parts, count = layers(space), len(deltas)
    rows = [sums(deltas[:, at], weights, moved[at], previous[at]) for at in parts.values()]
    told = torch.cat([*rows, weights.double()]).cpu().numpy()
    by_layer, p = told[: len(told) - count].reshape(len(parts), -1), told[len(told) - count :]
    whole = by_layer.sum(0)
    squares, to_new, to_previous, apart = whole[: 4 * count].reshape(4, count)
    length, new, last = np.sqrt(squares), float(np.sqrt(whole[-3])), float(np.sqrt(whole[-2]))
    near, far = cosine(to_new, length * new), cosine(to_previous, length * last)
    return {
        **{f"drift_cosine_{what}": value for what, value in extent(near).items()},
        **{f"drift_previous_{what}": value for what, value in extent(far).items()},
        "drift_previous_acute": float(np.mean(far > 0)) if len(far) else None,
        "drift_turn": next(iter(cosine(whole[-1:], np.array([new * last])).tolist()), None),
        "drift_norm": float(length.mean()) if count else None,
        "drift_norm_global": new,
        "drift_spread": float(p @ np.sqrt(apart)) if count else None,
        "drift_diversity": diversity(whole, count),
        "drift_layers": {name: diversity(row, count) for name, row in zip(parts, by_layer, strict=True)},
    }


def cosine(products: Array, lengths: Array) -> Array:
    """⟨a, b⟩ / (‖a‖ ‖b‖) where there is an angle."""
    return np.clip(products[lengths > 0] / lengths[lengths > 0], -1, 1)


def extent(values: Array) -> dict[str, float | None]:
    """Mean, lowest and highest, where there is a value."""
    of = (float(values.mean()), float(values.min()), float(values.max())) if len(values) else (None, None, None)
    return dict(zip(("mean", "min", "max"), of, strict=True))


def diversity(row: Array, count: int) -> float | None:
    """Σ ‖δ_i‖² / ‖Σ δ_i‖², from sums; none where the updates cancel altogether."""
    return float(row[:count].sum() / row[-4]) if row[-4] > 0 else None
