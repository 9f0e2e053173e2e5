"""FedPDC: a public set at the server weighs the clients.

    loss:  CE + λ (1 − a_i)              this term has no gradient, as published
    w ← Σ_S a_i θ_i / Σ_S a_j            with the new accuracies

a_i is the accuracy of client i's last model on the public set, in the loss 1 if it did not take part in the round
before.

Zhang, Zhang, FedPDC: Federated Learning for Public Dataset Correction (arXiv 2302.12503), Algorithm 2, Eqs. 6–8. The
published penalty does not depend on θ, so the method is accuracy-weighted FedAvg for every λ. Two variants below make
the penalty effective; they are ours and never the paper's method. The public set is taken from the training data before
partitioning, never from the test set.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.algorithm import Algorithm, Gradient
from ..core.settings import setting
from ..core.space import Space
from ..core.task import Task
from ..core.types import Batch, Client, Cohort, Number, State
from .fedavg import FedAvg


class FedPDC(FedAvg):
    paper = "Zhang, Zhang, 2023"
    idea = "accuracy on public data weighs the clients"
    combines = "rows"
    needs = ("public",)
    own_weights = "the accuracies on the public set are the weights"
    broadcast = ("a", "at")

    lam: float = setting(
        "penalty factor λ", default=10.0, least=0, hint="the paper uses 0.1–10.", tries=(0.1, 1.0, 10.0)
    )
    penalty: str = setting("form of the penalty", default="literal", choices=("literal", "prox", "loss_scale"))
    adaptive: bool = setting("λ = 0.5·t instead of a constant, the self-adaptive form", default=False)

    def memory(self, space: Space) -> State:
        return {"a": space.scalar(), "at": space.scalar()}

    def factor(self, client: Client) -> Number:
        """λ (1 − a_i), with a_i = 1 for a client that was absent in the round before."""
        a = torch.where(client.server["at"] == client.round - 1, client.server["a"], 1.0)
        a = torch.where(client.server["at"] > 0, a, 1.0)
        return (0.5 * client.round if self.adaptive else self.lam) * (1 - a)

    def loss(self, task: Task, theta: Tensor, batch: Batch, client: Client) -> Tensor:
        return task.loss(theta, batch) + self.factor(client)  # this term has no gradient, as published

    def weights(self, up: State, cohort: Cohort) -> Tensor:
        assert cohort.public is not None
        a = cohort.public["accuracy"]
        return a / a.sum() if bool(a.sum() > 0) else torch.full_like(a, 1 / len(a))

    def aggregate(self, w: Tensor, up: State, cohort: Cohort, server: State) -> tuple[Tensor, State]:
        w, _ = super().aggregate(w, up, cohort, server)
        assert cohort.public is not None
        return w, {"a": cohort.public["accuracy"], "at": torch.full_like(server["at"], cohort.round)}

    def variants(self) -> tuple[type[Algorithm], ...]:
        if self.penalty == "literal":
            return ()
        return (ProximalPenalty,) if self.penalty == "prox" else (ScaledLoss,)


# variants of our own making -----------------------------------------------------------------------------------------


class ProximalPenalty(FedPDC):
    """CE + λ (1 − a_i)/2 · ‖θ − w‖²; the factor λ (1 − a_i) is at most 1/η, since a longer step would pass w."""

    def loss(self, task: Task, theta: Tensor, batch: Batch, client: Client) -> Tensor:
        return task.loss(theta, batch)

    def direction(self, theta: Tensor, grad: Gradient, client: Client) -> Tensor:
        factor = torch.as_tensor(self.factor(client))
        return grad(theta) + torch.minimum(factor, torch.ones_like(factor) / client.lr) * (theta - client.w)


class ScaledLoss(FedPDC):
    """CE · (1 + λ (1 − a_i))."""

    def loss(self, task: Task, theta: Tensor, batch: Batch, client: Client) -> Tensor:
        return task.loss(theta, batch) * (1 + self.factor(client))
