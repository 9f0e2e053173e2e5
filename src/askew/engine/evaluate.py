"""Test accuracy and loss of a model, of the clients' own models, and the spread over clients."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..core.bank import Bank
from ..core.task import Task
from ..core.types import Batch, Part
from ..data.dataset import Samples
from ..data.federation import SHOWN, Federation

CHUNK = 2048


def per_sample(task: Task, w: Tensor, buffers: Tensor, samples: Samples, fed: Federation) -> tuple[Tensor, Tensor]:
    """Right or not [n] (nan without classes) and loss [n] of every sample, on the device."""
    right, loss = [], []
    for at in range(0, len(samples.y), CHUNK):
        batch = Batch(fed.inputs(samples.x[at : at + CHUNK]), samples.y[at : at + CHUNK])
        output = task.frozen(w, buffers, batch)[0]
        loss.append(task.criterion(output, batch.y))
        right.append((output.argmax(-1) == batch.y).to(output.dtype) if fed.classes else torch.full_like(loss[-1], torch.nan))
    return torch.cat(right), torch.cat(loss)


class Exam:
    """Accuracy and loss of models on one set of samples.

    The score [2] (float64, the accuracy nan without classes) stays on the device until somebody asks; on CUDA the whole
    exam is one captured graph.
    """

    def __init__(self, task: Task, fed: Federation, samples: Samples) -> None:
        self.task, self.fed, self.samples = task, fed, samples
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, w: Tensor, buffers: Tensor) -> Tensor:
        if not w.is_cuda:
            return self._score(w, buffers)
        if self.graph is None:
            self._capture(w, buffers)
        assert self.graph is not None
        self.w.copy_(w)
        self.buffers.copy_(buffers)
        self.graph.replay()
        return self.score.clone()

    def _score(self, w: Tensor, buffers: Tensor) -> Tensor:
        right, loss = per_sample(self.task, w, buffers, self.samples, self.fed)
        return torch.stack([right.double().mean(), loss.double().mean()])

    def _capture(self, w: Tensor, buffers: Tensor) -> None:
        self.w, self.buffers = w.clone(), buffers.clone()
        aside = torch.cuda.Stream(w.device)  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream(w.device))
        with torch.cuda.stream(aside):
            self._score(self.w, self.buffers)  # libraries choose and allocate
        torch.cuda.current_stream(w.device).wait_stream(aside)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.score = self._score(self.w, self.buffers)


def dressed(w: Tensor, buffers: Tensor, part: Part, row: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """A model with private coordinates and buffers put in place."""
    return w.index_copy(0, part.w, row["w"]), buffers.index_copy(0, part.b, row["b"])


def examine_clients(exam: Exam, w: Tensor, buffers: Tensor, part: Part, bank: Bank) -> Tensor:
    """The mean over all clients of their own models' scores; clients that never trained share one model."""
    clients = len(exam.fed.eligible)
    rest = clients - len(bank)
    total = rest * exam(*dressed(w, buffers, part, bank.start)) if rest else 0
    for client in bank.clients:
        total = total + exam(*dressed(w, buffers, part, {n: v[0] for n, v in bank.read([client]).items()}))
    return torch.as_tensor(total) / clients


def mean_private(bank: Bank, clients: int) -> dict[str, Tensor]:
    """The mean over all clients of their private rows."""
    written = {n: v.double().sum(0) for n, v in bank.read(bank.clients).items()}
    rest = clients - len(bank)
    return {n: ((written[n] + rest * start.double()) / clients).to(start.dtype) for n, start in bank.start.items()}


def spread(task: Task, w: Tensor, buffers: Tensor, fed: Federation) -> dict[str, float]:
    """How evenly a model serves the clients, on their own samples: mean, worst tenth and standard deviation."""
    if fed.shares is not None:
        right = per_sample(task, w, buffers, fed.pool, fed)[0].cpu().numpy()
        accuracy = np.array([right[fed.shares.client(i)].mean() for i in fed.eligible.tolist()])
    else:
        pool, places = fed.gather(fed.eligible[:SHOWN].tolist())
        right = per_sample(task, w, buffers, pool, fed)[0].cpu().numpy()
        accuracy = np.array([right[own].mean() for own in places])
    worst = np.sort(accuracy)[: max(1, round(0.1 * len(accuracy)))]
    return {
        "client_accuracy_mean": float(accuracy.mean()),
        "client_accuracy_worst10": float(worst.mean()),
        "client_accuracy_std": float(accuracy.std()),
    }
