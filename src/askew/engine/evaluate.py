"""Test accuracy and loss of a model, of the clients' own models, and the spread over clients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.bank import Bank
from ..core.rng import generator
from ..core.task import Task
from ..core.types import Batch, Part, select_rows
from ..data.dataset import Samples
from ..data.federation import SHOWN, Federation
from .graphs import capture_stream

SAMPLES_AT_A_TIME = 2048  # in evaluation
RAISED = 1e-4  # by more than this a loss must grow to count
RARE = 3  # classes


def per_sample(task: Task, w: Tensor, buffers: Tensor, samples: Samples, fed: Federation) -> tuple[Tensor, Tensor]:
    """Right or not [n] (nan without classes) and loss [n] of every sample, on the device."""
    right, loss = [], []
    for at in range(0, len(samples.y), SAMPLES_AT_A_TIME):
        batch = Batch(fed.inputs(samples.x[at : at + SAMPLES_AT_A_TIME]), samples.y[at : at + SAMPLES_AT_A_TIME])
        output = task.frozen(w, buffers, batch)[0]
        if fed.classes:  # before the loss: a criterion may change the output in place
            right.append((output.argmax(-1) == batch.y).to(output.dtype))
        else:
            right.append(output.new_full((len(output),), torch.nan))
        loss.append(task.losses(output, batch.y))
    return torch.cat(right), torch.cat(loss)


def selection_half(count: int) -> Tensor:
    """Indices of the fixed half of a test set that chooses between settings; results are reported on the other half."""
    return torch.from_numpy(np.sort(generator(0, "halves").permutation(count)[: count // 2]))


class Evaluator:
    """Accuracy and loss of models on one set of samples.

    The score [2] (float64, the accuracy nan without classes) stays on the device until it is read; on CUDA the whole
    evaluation is one captured graph. With `halves` the accuracy on a fixed half of the samples follows. With
    `per_class` there follow, class by class, the share of all samples that are of the class and right, and then the
    share that are of the class: means of scores remain what they say, over models and over test sets.
    """

    def __init__(
        self, task: Task, fed: Federation, samples: Samples, halves: bool = False, per_class: bool = False
    ) -> None:
        self.task, self.fed, self.samples = task, fed, samples
        self.half = selection_half(len(samples.y)).to(samples.y.device) if halves else None
        self.held = self.by_class(torch.ones_like(samples.y)) if per_class and fed.classes else None
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
        return self.score_of(right.double(), loss.double())

    def score_of(self, right: Tensor, loss: Tensor) -> Tensor:
        """The score from what became of every sample."""
        score = [right.mean(), loss.mean()]
        both = torch.stack(score if self.half is None else [*score, right[self.half].mean()])
        return both if self.held is None else torch.cat([both, self.by_class(right), self.held])

    def by_class(self, values: Tensor) -> Tensor:
        """The sum of the samples' values in each class, divided by the number of all samples."""
        none = torch.zeros(self.fed.classes, dtype=torch.float64, device=values.device)
        return none.index_add(0, self.samples.y.long(), values.double()) / len(values)

    def _capture(self, w: Tensor, buffers: Tensor) -> None:
        self.w, self.buffers = w.clone(), buffers.clone()
        here = torch.cuda.current_stream(w.device)
        aside = capture_stream(w.device, here.cuda_stream)
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            self._score(self.w, self.buffers)  # libraries choose and allocate
        here.wait_stream(aside)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=aside, capture_error_mode="thread_local"):
            self.score = self._score(self.w, self.buffers)


def with_private(w: Tensor, buffers: Tensor, part: Part, row: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """A model with private coordinates and buffers put in place."""
    return w.index_copy(0, part.indices, row["w"]), buffers.index_copy(0, part.buffer_indices, row["b"])


def evaluate_clients(evaluator: Evaluator, w: Tensor, buffers: Tensor, part: Part, bank: Bank, clients: int) -> Tensor:
    """The mean over clients of their own models' scores; each counts once.

    `clients` is how many hold samples; the evaluator does not know it, as runs with other clients share it. Clients
    that never trained share one model. Where no coordinate is shared (SOLO) it is the start, which nobody trained: they
    are left out, as soon as one client has trained.
    """
    rest = 0 if trains_alone(w, part, bank) else clients - len(bank)
    total = rest * evaluator(*with_private(w, buffers, part, bank.start)) if rest else 0
    for client in bank.clients:
        total = total + evaluator(*with_private(w, buffers, part, select_rows(bank.read([client]), 0)))
    return torch.as_tensor(total) / (len(bank) + rest)


def trains_alone(w: Tensor, part: Part, bank: Bank) -> bool:
    """Do clients share no coordinate of the model, and has one of them trained?"""
    return part.indices.numel() == w.numel() and len(bank) > 0


def mean_private(bank: Bank, clients: int) -> dict[str, Tensor]:
    """The mean over all clients of their private rows."""
    written = {n: v.double().sum(0) for n, v in bank.read(bank.clients).items()}
    rest = clients - len(bank)
    return {n: ((written[n] + rest * start.double()) / clients).to(start.dtype) for n, start in bank.start.items()}


def client_spread(
    task: Task, w: Tensor, buffers: Tensor, fed: Federation, part: Part, bank: Bank | None
) -> dict[str, float]:
    """How evenly the clients are served, on their own training samples: mean, worst and best tenth, standard deviation.

    With a bank of private parts it is each client's own model that serves it; where no coordinate is shared, clients
    that never trained are left out.
    """
    ids = fed.eligible.tolist() if fed.assignment is not None else fed.eligible[:SHOWN].tolist()
    if bank is not None and trains_alone(w, part, bank):
        trained = {*bank.clients}
        ids = [i for i in ids if i in trained] or ids
    pool, places = fed.training_samples(ids)
    if bank is None:
        right = per_sample(task, w, buffers, pool, fed)[0].cpu().numpy()
        accuracy = np.sort([right[own].mean() for own in places])
    else:
        models = (with_private(w, buffers, part, select_rows(bank.read([i]), 0)) for i in ids)
        held = (Samples(pool.x[own], pool.y[own]) for own in places)
        accuracy = np.sort(
            [float(per_sample(task, *model, own, fed)[0].mean()) for model, own in zip(models, held, strict=True)]
        )
    tenth = max(1, round(0.1 * len(accuracy)))
    return {
        "client_accuracy_mean": float(accuracy.mean()),
        "client_accuracy_worst10": float(accuracy[:tenth].mean()),
        "client_accuracy_best10": float(accuracy[-tenth:].mean()),
        "client_accuracy_std": float(accuracy.std()),
    }


def share_raised(
    task: Task, models: Sequence[tuple[Tensor, Tensor]], fed: Federation, ids: Sequence[int]
) -> dict[str, float | None]:
    """The share of these clients whose own samples have a higher mean loss under the second model than the first; None
    if there are no clients.
    """
    if not len(ids):
        return {"raised": None}
    pool, places = fed.training_samples(ids)
    every = torch.from_numpy(np.concatenate(places)).to(pool.y.device)
    first, second = (
        per_sample(task, *model, Samples(pool.x[every], pool.y[every]), fed)[1].double() for model in models
    )
    ends = np.cumsum([0, *map(len, places)])
    changes = [change.mean() for change in np.split((second - first).cpu().numpy(), ends[1:-1])]
    return {"raised": float(np.mean(np.array(changes) > RAISED))}


def rarest_classes(fed: Federation) -> np.ndarray[Any, Any]:
    """The classes that the fewest clients hold; of equals the first."""
    assert fed.assignment is not None
    holders = (fed.assignment.histogram(fed.pool.y.cpu().numpy(), fed.classes) > 0).sum(0)
    return np.argsort(holders, kind="stable")[:RARE]


def accuracy_by_rarity(task: Task, w: Tensor, buffers: Tensor, fed: Federation) -> dict[str, float | None]:
    """Test accuracy on the rarest classes and on the others; None where there are no test samples of them."""
    right, rare = (
        per_sample(task, w, buffers, fed.test, fed)[0].double(),
        torch.from_numpy(rarest_classes(fed)).to(fed.test.y.device),
    )
    among = torch.isin(fed.test.y, rare)
    few, rest = (float(some.mean()) if some.numel() else None for some in (right[among], right[~among]))
    return {"accuracy_rare": few, "accuracy_common": rest}


def accuracy_by_owner(
    task: Task, w: Tensor, buffers: Tensor, fed: Federation, rounds_taken: Sequence[int]
) -> dict[str, float | None]:
    """How clients with test samples of their own are served: the standard deviation of their test accuracy, and by how
    much the mean loss on test samples is above that on training samples for the tenth that took part most often
    (`rounds_taken`: how often each); None where there is nothing to measure.
    """
    assert fed.test_owner is not None
    right, tested = (t.double().cpu().numpy() for t in per_sample(task, w, buffers, fed.test, fed))
    accuracy = [right[fed.test_owner == i].mean() for i in fed.eligible if (fed.test_owner == i).any()]
    often = np.argsort(-np.asarray(rounds_taken), kind="stable")[: max(1, round(0.1 * len(rounds_taken)))]
    pool, places = fed.training_samples(often.tolist())
    own = torch.from_numpy(np.concatenate(places)).to(pool.y.device)
    of_often, gap = tested[np.isin(fed.test_owner, often)], None
    if of_often.size and len(own):
        trained = per_sample(task, w, buffers, Samples(pool.x[own], pool.y[own]), fed)[1].double().mean()
        gap = float(of_often.mean() - float(trained))
    return {"client_test_accuracy_std": float(np.std(accuracy)) if fed.classes and accuracy else None, "often_gap": gap}
