"""Which answers and states are finite, read from the device at once."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..core.types import State
from .base import PhaseOutputs


class PhaseCheck(NamedTuple):
    """What the host learns of a phase."""

    losses: list[float]
    finite: list[bool]  # whose reports are all finite: others are left out
    whole: bool  # is the new state finite?
    scalars: dict[str, float]  # 0-d server state, for the record


def check_phase(outputs: PhaseOutputs, w: Tensor, buffers: Tensor, server: State) -> PhaseCheck:
    """All that the host must know of a phase's outputs and of the new model, buffers and server state."""
    models = [] if outputs.theta is None else [outputs.theta]  # private coordinates are in no upload
    reports = [*outputs.up.values(), *outputs.state.values(), *models, outputs.buffers]
    scalars = {n: v for n, v in server.items() if v.dim() == 0}
    parts = [t for t in (w, buffers, *server.values()) if t.dim() and t.numel()]
    each = torch.stack([outputs.loss.double(), *(half_means(t) for t in reports if t.numel())])
    rest = [*(half_means(t[None]) for t in parts), *(v.double()[None] for v in scalars.values())]
    values = torch.cat([each.flatten(), *rest]).cpu().numpy()
    rows, whole = np.split(values, [each.numel()])
    finite = np.isfinite(rows.reshape(each.shape)).all(0)
    logged = dict(zip(scalars, whole[len(parts) :].tolist(), strict=True))
    return PhaseCheck(rows[: len(finite)].tolist(), finite.tolist(), bool(np.isfinite(whole).all()), logged)


def finite_rows(tensors: Iterable[Tensor]) -> Tensor:
    """Which rows are finite in all of these tensors [C, …]: [C] bool."""
    return torch.stack([half_means(t).isfinite() for t in tensors]).all(0)


def half_means(t: Tensor) -> Tensor:
    """Half the mean of each row, in float64 [C]: finite exactly where the whole row is finite.

    One product reads the numbers once; torch.isfinite takes about ten times as long on a CPU. Half of it, so that
    the sum of very large numbers does not overflow.
    """
    rows = t[..., None].flatten(1)
    if not rows.is_floating_point():
        return torch.zeros(len(rows), dtype=torch.float64, device=t.device)
    return (rows @ _half_mean_weights(rows.shape[1], rows.dtype, rows.device)).double()


@lru_cache(maxsize=4)
def _half_mean_weights(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((n,), 0.5 / max(1, n), dtype=dtype, device=device)
