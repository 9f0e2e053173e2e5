"""FedPDC: a public set at the server weighs the clients.

    a_i: accuracy of client i's last model on the public set, 1 if it did not take part in the round before
    literal (default)    loss CE + λ (1 − a_i)
    prox                 loss CE + λ (1 − a_i)/2 · ‖θ − w‖²           ours
    loss_scale           loss CE · (1 + λ (1 − a_i))                  ours
    w ← Σ_S a_i θ_i / Σ_S a_j                                         with the new accuracies

Zhang, Zhang, FedPDC: Federated Learning for Public Dataset Correction (arXiv 2302.12503), Algorithm 2, Eqs. 6–8. The published
penalty does not depend on the weights being trained: its gradient is zero, so `literal` is accuracy-weighted FedAvg for
every λ. `prox` and `loss_scale` are effective variants of our own making, never the paper's method. `adaptive` takes
λ = 0.5·t (the self-adaptive form); with `prox` it is bounded so that η λ (1 − a) ≤ 1. The public set is taken from the
training data before partitioning, never from the test set.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.algorithm import Gradient
from ..core.settings import setting
from ..core.space import Space
from ..core.task import Task
from ..core.types import Batch, Client, Cohort, Number, State
from .fedavg import FedAvg


class FedPDC(FedAvg):
    paper = "Zhang, Zhang, 2023"
    idea = "accuracy on public data weighs the clients"
    needs = ("public",)
    broadcast = ("a", "at")

    lam: float = setting("penalty factor λ", default=10.0, least=0, hint="the paper uses 0.1–10.")
    penalty: str = setting("form of the penalty", default="literal", choices=("literal", "prox", "loss_scale"))
    adaptive: bool = setting("λ = 0.5·t instead of a constant", default=False)

    def memory(self, space: Space) -> State:
        return {"a": space.scalar(), "at": space.scalar()}

    def factor(self, me: Client) -> Number:
        """λ (1 − a_i), with a_i = 1 for a client that was absent in the round before."""
        a = torch.where(me.server["at"] == me.round - 1, me.server["a"], torch.ones_like(me.server["a"]))
        a = torch.where(me.server["at"] > 0, a, torch.ones_like(a))
        return (0.5 * me.round if self.adaptive else self.lam) * (1 - a)

    def loss(self, task: Task, w: Tensor, batch: Batch, me: Client) -> Tensor:
        loss = task.loss(w, batch)
        if self.penalty == "prox":
            return loss
        return loss + self.factor(me) if self.penalty == "literal" else loss * (1 + self.factor(me))

    def direction(self, w: Tensor, grad: Gradient, me: Client) -> Tensor:
        if self.penalty != "prox":
            return grad(w)
        factor = torch.as_tensor(self.factor(me))
        return grad(w) + torch.minimum(factor, torch.ones_like(factor) / me.lr) * (w - me.x)

    def weights(self, up: State, cohort: Cohort) -> Tensor:
        assert cohort.public is not None
        a = cohort.public["accuracy"]
        return a / a.sum() if bool(a.sum() > 0) else torch.full_like(a, 1 / len(a))

    def aggregate(self, x: Tensor, up: State, cohort: Cohort, server: State) -> tuple[Tensor, State]:
        x, _ = super().aggregate(x, up, cohort, server)
        assert cohort.public is not None
        return x, {"a": cohort.public["accuracy"], "at": torch.full_like(server["at"], cohort.round)}
