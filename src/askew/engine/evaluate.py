"""Test accuracy and loss of a model, of the clients' own models, and the spread over clients."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..core.bank import Bank
from ..core.space import Space
from ..core.task import Task
from ..core.types import Batch, Part
from ..data.dataset import Samples
from ..data.federation import SHOWN, Federation

CHUNK = 2048


class Score(NamedTuple):
    """Mean over samples; the accuracy is nan where there are no classes."""

    accuracy: float
    loss: float


def per_sample(task: Task, w: Tensor, buffers: Tensor, samples: Samples, classes: int) -> tuple[Tensor, Tensor]:
    """Right or not [n] (nan without classes) and loss [n] of every sample, on the device."""
    right, loss = [], []
    for at in range(0, len(samples.y), CHUNK):
        batch = Batch(samples.x[at : at + CHUNK], samples.y[at : at + CHUNK])
        output = task.frozen(w, buffers, batch)[0]
        loss.append(task.criterion(output, batch.y))
        right.append((output.argmax(-1) == batch.y).to(output.dtype) if classes else torch.full_like(loss[-1], torch.nan))
    return torch.cat(right), torch.cat(loss)


def evaluate(task: Task, w: Tensor, buffers: Tensor, samples: Samples, classes: int) -> Score:
    """One model on one set."""
    right, loss = per_sample(task, w, buffers, samples, classes)
    return Score(float(right.double().mean()), float(loss.double().mean()))


def dressed(w: Tensor, buffers: Tensor, part: Part, row: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """A model with private coordinates and buffers put in place."""
    return w.index_copy(0, part.w, row["w"]), buffers.index_copy(0, part.b, row["b"])


def evaluate_clients(task: Task, space: Space, w: Tensor, buffers: Tensor, part: Part, bank: Bank, fed: Federation) -> Score:
    """The mean over all clients of their own models' scores; clients that never trained share one model."""
    total = np.zeros(2)
    for client in bank.clients:
        row = {n: v[0] for n, v in bank.read([client]).items()}
        total += evaluate(task, *dressed(w, buffers, part, row), fed.test, fed.classes)
    rest = len(fed.eligible) - len(bank)
    if rest:
        total += rest * np.array(evaluate(task, *dressed(w, buffers, part, bank.start), fed.test, fed.classes))
    return Score(*(total / len(fed.eligible)).tolist())


def mean_private(bank: Bank, clients: int) -> dict[str, Tensor]:
    """The mean over all clients of their private rows."""
    written = {n: v.double().sum(0) for n, v in bank.read(bank.clients).items()}
    rest = clients - len(bank)
    return {n: ((written[n] + rest * start.double()) / clients).to(start.dtype) for n, start in bank.start.items()}


def spread(task: Task, w: Tensor, buffers: Tensor, fed: Federation) -> dict[str, float]:
    """How evenly a model serves the clients, on their own samples: mean, worst tenth and standard deviation."""
    if fed.shares is not None:
        right = per_sample(task, w, buffers, fed.pool, fed.classes)[0].cpu().numpy()
        accuracy = np.array([right[fed.shares.client(i)].mean() for i in fed.eligible.tolist()])
    else:
        pool, places = fed.gather(fed.eligible[:SHOWN].tolist())
        right = per_sample(task, w, buffers, pool, fed.classes)[0].cpu().numpy()
        accuracy = np.array([right[own].mean() for own in places])
    worst = np.sort(accuracy)[: max(1, round(0.1 * len(accuracy)))]
    return {
        "client_accuracy_mean": float(accuracy.mean()),
        "client_accuracy_worst10": float(worst.mean()),
        "client_accuracy_std": float(accuracy.std()),
    }
