"""FedAlign: the last block is made as smooth at reduced width as it is at full width.

    ℓ = CE + μ · (CE / ℓ_L) · ℓ_L,    CE / ℓ_L a detached scale
    ℓ_L = mean_B (σ(T_narrow) − σ(T_full))²,    T = F₁ F₂ᵀ / s  the block's transfer matrix

Mendieta et al., Local Learning Matters: Rethinking Data Heterogeneity in Federated Learning, CVPR 2022 (arXiv
2111.14213). F₁ and F₂ are the block's input and output for one sample, channels by positions, and s is the number of
positions. σ is the top singular value, by ten power iterations from ones. The narrow block reads the first quarter of
the detached input's channels and has the first quarter of every layer's width; T_full is detached. As in the authors'
code the block is the last stage of a residual network; in networks whose layers stand in a row it is the last hidden
layer. Where we differ from the code: a floor under ℓ_L, and no Nesterov momentum. μ = 0 is FedAvg.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.settings import setting
from ..core.task import Task
from ..core.types import Batch, Client
from .fedavg import FedAvg

ITERATIONS = 10
# The least ℓ_L that is divided by, as a share of mean_B σ(T_full)². The authors divide by ℓ_L as it is; but a gap of
# less than 1% between the two σ is smaller than the rounding of σ in float32 allows to follow.
ALIGNED = 1e-4


class FedAlign(FedAvg):
    paper = "Mendieta et al., CVPR 2022"
    idea = "align the last block's smoothness across widths"
    needs = ("transfer",)

    mu: float = setting(
        "strength μ of the alignment", default=0.45, least=0, hint="the paper uses 0.45.", tries=(0.15, 0.45)
    )

    def loss(self, task: Task, theta: Tensor, batch: Batch, client: Client) -> Tensor:
        output, before, full, before_narrow, narrow = task(theta, batch, call="transfer")
        ce = task.mean_loss(output, batch)
        target = top_singular_value(before.detach(), full.detach())
        # The narrow input is needed: the units of the narrow block are among those of the full one. On the same input
        # its σ can never reach the full block's, and without normalisation the weights grow without end.
        gap = top_singular_value(before_narrow.detach(), narrow) - target
        lipschitz = task.mean(gap.square(), batch)
        least = ALIGNED * task.mean(target.square(), batch)
        return ce + self.mu * quotient(ce.detach(), torch.maximum(lipschitz.detach(), least)) * lipschitz


def top_singular_value(one: Tensor, two: Tensor) -> Tensor:
    """Of the transfer matrix between two feature maps [B, c, s], for every sample; 0 where the iteration finds none."""
    transfer = one @ two.transpose(1, 2) / one.shape[2]
    size = transfer.detach().abs().amax((1, 2), keepdim=True)
    transfer = quotient(transfer, size)  # σ is as many times smaller: so no number of the iteration is tiny
    square = transfer @ transfer.transpose(1, 2)
    v = torch.ones_like(square[:, :, :1])
    length = v[:, :1]
    for _ in range(ITERATIONS):
        v = square @ v
        length = root(v.square().sum(1, keepdim=True))
        v = quotient(v, length)
    return (size * root(length))[:, 0, 0]


def root(x: Tensor) -> Tensor:
    """√x, with the gradient 0 at 0."""
    return torch.where(x > 0, torch.where(x > 0, x, 1.0).sqrt(), 0.0)


def quotient(x: Tensor, y: Tensor) -> Tensor:
    """x / y, and 0 where y is 0."""
    return torch.where(y > 0, x / torch.where(y > 0, y, 1.0), 0.0)
