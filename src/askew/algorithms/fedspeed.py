"""FedSpeed: FedDyn's correction with a gradient taken after a small step of ascent.

    g' = gradient at θ + ρ g / ‖g‖ on the same batch
    θ ← θ − η ((1 − a) g + a g' + λ_p (θ − w + h_i))
    h_i ← h_i + δ_i,    w ← mean_S θ_i + mean_N h_i

Sun et al., FedSpeed: Larger Local Interval, Less Communication Round, and Higher Generalization Accuracy, ICLR 2023
(arXiv 2302.10429). λ_p is 1/λ of the paper and FedDyn's α here, so for unequal sizes α / (n_i / n̄). The first author's
simulator, which leaves the sizes out, takes a = 1 and the server rule above; ρ = 0 is FedDyn.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.algorithm import Gradient
from ..core.settings import setting
from ..core.types import Client
from .feddyn import FedDyn


class FedSpeed(FedDyn):
    paper = "Sun et al., ICLR 2023"
    idea = "FedDyn with a gradient taken after an ascent step"
    exact = False  # the ascent step biases the gradient by the order of ρ

    alpha = 0.1
    rho: float = setting("length ρ of the ascent step", default=0.1, least=0)
    mix: float = setting("weight a of the gradient after the ascent step", default=1.0, least=0, most=1)

    def direction(self, theta: Tensor, grad: Gradient, client: Client) -> Tensor:
        g = grad(theta)
        up = grad(theta + self.rho * g / (torch.linalg.vector_norm(g) + 1e-7))
        return (1 - self.mix) * g + self.mix * up + self.strength(client) * (client.state["h"] - client.w)
