"""FedSGD: one full gradient from every participant, one step at the server.

    w ← w − η Σ_S p_i ∇L_i(w)

McMahan et al., AISTATS 2017 (arXiv 1602.05629), where it is FedAvg with one epoch and one batch. Large clients add
their gradient up over chunks, weighted by chunk size; so networks with batch norm, whose chunks have no common
statistics, are refused. Clipping, weight decay and rate act as in a local step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.algebra import clip_norm
from ..core.types import Client, State
from .fedavg import FedAvg


class FedSGD(FedAvg):
    paper = "McMahan et al., AISTATS 2017"
    idea = "one full gradient a client, one step a round"
    before = ("gradient",)
    trains = False

    def finish(self, theta: Tensor, client: Client) -> tuple[State, State]:
        g = clip_norm(client.carry["gradient"], client.clip)
        new, _ = self.descend(theta, g, torch.zeros_like(theta), client)
        return {"delta": new - client.w}, client.state
