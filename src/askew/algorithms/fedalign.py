"""FedAlign: the last block is made as smooth at reduced width as it is at full width.

    ℓ = CE + μ · (CE / ℓ_L) · ℓ_L,    CE / ℓ_L a detached scale
    ℓ_L = mean_B (σ(T_narrow) − σ(T_full))²,    T = F₁ F₂ᵀ / s  the transfer matrix from the block's input to its output

Mendieta et al., Local Learning Matters: Rethinking Data Heterogeneity in Federated Learning, CVPR 2022 (arXiv
2111.14213). σ is the top singular value, by ten power iterations from ones; the block runs once more at a quarter of
its width on the same detached input, and T_full is detached. The authors train with Nesterov momentum, ours is
heavy-ball. The block is what the network's `transfer` says: in the small networks here the last hidden layer, where the
authors have the last residual stage. μ = 0 is FedAvg.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.settings import setting
from ..core.task import Task
from ..core.types import Batch, Client
from .fedavg import FedAvg

ITERATIONS, TINY = 10, 1e-12


class FedAlign(FedAvg):
    paper = "Mendieta et al., CVPR 2022"
    idea = "align the last block's smoothness across widths"
    needs = ("transfer",)

    mu: float = setting("strength μ of the alignment", default=0.45, least=0, hint="the paper uses 0.45.")

    def loss(self, task: Task, theta: Tensor, batch: Batch, client: Client) -> Tensor:
        output, before, full, narrow = task(theta, batch, call="transfer")
        ce = task.mean_loss(output, batch)
        gap = top_singular_value(before.detach(), narrow) - top_singular_value(before.detach(), full.detach())
        lipschitz = task.mean(gap.square(), batch)
        return ce + self.mu * (ce / (lipschitz + TINY)).detach() * lipschitz


def top_singular_value(one: Tensor, two: Tensor) -> Tensor:
    """Of the transfer matrix between two feature maps [B, c, s], for every sample."""
    transfer = one @ two.transpose(1, 2) / one.shape[2]
    square = transfer @ transfer.transpose(1, 2)
    v = torch.ones_like(square[:, :, :1])
    length = v[:, 0, 0]
    for _ in range(ITERATIONS):
        v = square @ v
        length = torch.sqrt(v.square().sum((1, 2)) + TINY)
        v = v / length[:, None, None]
    return torch.sqrt(length)
