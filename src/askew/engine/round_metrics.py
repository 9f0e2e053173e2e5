"""Round metrics: what else may be recorded of a round's participants, where it is asked for. None changes the round.

- LocalFit: the loss of their models on their own samples, after local training
- ClientWeights: how their weights correlate with their labels and sizes, and how accurate their models and the global
  one are on public data
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..core.records import Record
from ..core.task import Task
from ..core.types import State
from ..data.dataset import Samples
from ..data.federation import Federation
from ..data.skew import entropy
from .drift import Array, rank_correlation
from .evaluate import per_sample

EARLY = 100  # rounds in which local models are measured on their own samples

EvaluateModel = Callable[[Tensor, Tensor], Tensor]  # (w, buffers) → accuracy and loss


class RoundUpdates(NamedTuple):
    """A round's updates as the server has them: rows in the order of the participants who were left."""

    round: int
    ids: Sequence[int]
    old: Tensor  # the model that was sent [P]
    deltas: Tensor  # [C, P]
    local_buffers: Tensor  # of their models [C, Q]
    weights: Tensor  # [C]
    public: State | None  # accuracy and loss of their models on the public set
    new: Tensor  # the model and the buffers after the round
    buffers: Tensor

    @classmethod
    def none(cls, round: int, w: Tensor, buffers: Tensor) -> RoundUpdates:
        """A round in which no updates were sent."""
        no_deltas, no_buffers = w.new_zeros(0, len(w)), buffers.new_zeros(0, len(buffers))
        return cls(round, (), w, no_deltas, no_buffers, w.new_zeros(0), None, w, buffers)


RoundMetric = Callable[[RoundUpdates], Record]


class LocalFit:
    """How well the participants' models fit their own samples, in early rounds."""

    def __init__(self, task: Task, fed: Federation) -> None:
        self.task, self.fed = task, fed

    def __call__(self, updates: RoundUpdates) -> Record:
        if updates.round > EARLY:
            return {}
        pool, places = self.fed.training_samples(updates.ids)
        held = (torch.from_numpy(own).to(pool.y.device) for own in places)
        models = zip(updates.deltas, updates.local_buffers, held, strict=True)
        losses = [
            per_sample(self.task, updates.old + d, b, Samples(pool.x[own], pool.y[own]), self.fed)[1].mean()
            for d, b, own in models
        ]
        return {"fit_loss": float(torch.stack(losses).double().mean())}


class ClientWeights:
    """What weight goes with: with the entropy of a client's labels, with its size; and what public data say of the
    models.
    """

    def __init__(self, fed: Federation, evaluate: EvaluateModel | None) -> None:
        self.evaluate, self.sizes = evaluate, fed.sizes
        labelled = fed.classes and fed.assignment is not None
        counts = (
            fed.assignment.histogram(fed.pool.y.cpu().numpy(), fed.classes)
            if labelled and fed.assignment is not None
            else None
        )
        self.entropies = None if counts is None else entropy(counts / np.maximum(counts.sum(1, keepdims=True), 1))

    def __call__(self, updates: RoundUpdates) -> Record:
        ids, record = list(updates.ids), Record()
        weights: Array = updates.weights.double().cpu().numpy()
        if self.entropies is not None:
            spread, sizes = self.entropies[ids], self.sizes[ids].astype(np.float64)
            by_labels, by_size = rank_correlation(weights, spread), rank_correlation(weights, sizes)
            record |= {
                "weights_entropy": by_labels,
                "weights_size": partial_correlation(by_size, by_labels, rank_correlation(sizes, spread)),
            }
        if self.evaluate is not None and updates.public is not None:
            own: Array = updates.public["accuracy"].double().cpu().numpy()
            whole = float(self.evaluate(updates.new, updates.buffers)[0])
            known = own[own > 0]
            record |= {
                "public_share": float(np.mean(whole >= own)),
                "public_ratio": float(np.mean(whole / known)) if len(known) else None,
            }
        return record


def partial_correlation(xy: float | None, xz: float | None, yz: float | None) -> float | None:
    """The correlation of x and y at given z; none where z says all there is."""
    if xy is None or xz is None or yz is None or max(abs(xz), abs(yz)) > 1 - 1e-9:
        return None
    return float((xy - xz * yz) / np.sqrt((1 - xz**2) * (1 - yz**2)))
