"""MOON: a contrastive term pulls a client's features to the global model's and away from its own last model's.

    ℓ = CE + μ · mean_B( −log( e^{cos(z, z_g)/τ} / (e^{cos(z, z_g)/τ} + e^{cos(z, z_p)/τ}) ) )

Li, He, Song, Model-Contrastive Federated Learning, CVPR 2021 (arXiv 2103.16257), Algorithm 1. z, z_g, z_p are the
features of the trained, the received and the client's previous local model; the last two are frozen and in evaluation
mode. A client without a previous model has a zero term; the authors' code uses a random network for one that joins
late.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.settings import setting
from ..core.space import Space
from ..core.task import Task
from ..core.types import Batch, Client, State
from .fedavg import FedAvg


class MOON(FedAvg):
    paper = "Li, He, Song, CVPR 2021"
    idea = "contrast features with the global and the own previous model"

    mu: float = setting(
        "strength μ of the contrastive term",
        default=1.0,
        least=0,
        hint="papers use 0.1–10, try 1.",
        tries=(0.1, 1.0, 10.0),
    )
    temperature: float = setting("temperature τ", default=0.5, above=0)

    def client_state(self, space: Space) -> State:
        return {"prev": space.zeros(), "buffers": space.buffers.clone(), "has": space.scalar()}

    def loss(self, task: Task, theta: Tensor, batch: Batch, client: Client) -> Tensor:
        output, z = task(theta, batch)
        z_g = task.frozen(client.w, client.buffers, batch)[1]
        z_p = task.frozen(client.state["prev"], client.state["buffers"], batch)[1]
        farther = (F.cosine_similarity(z, z_p, dim=-1) - F.cosine_similarity(z, z_g, dim=-1)) / self.temperature
        contrast = self.mu * client.state["has"] * task.mean(F.softplus(farther), batch)
        return task.mean_loss(output, batch) + contrast

    def finish(self, theta: Tensor, client: Client) -> tuple[State, State]:
        has = torch.ones_like(client.state["has"])
        return {"delta": theta - client.w}, {"prev": theta, "buffers": client.carry["buffers"], "has": has}
