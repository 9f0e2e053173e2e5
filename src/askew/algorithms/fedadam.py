"""FedAdam, and with it FedAdagrad and FedYogi: adaptive optimisers at the server.

    D = Σ_S p_i δ_i,    M ← β1 M + (1 − β1) D
    Adagrad:  V ← V + D²
    Adam:     V ← β2 V + (1 − β2) D²
    Yogi:     V ← V − (1 − β2) D² sign(V − D²)
    w ← w + η_g M / (√V + τ)                       elementwise, without bias correction; M = 0 and V = τ² at the start

Reddi et al., Adaptive Federated Optimization, ICLR 2021 (arXiv 2003.00295), Algorithm 2. The paper tunes τ from 1e-5
to 1e-1 and η_g beside it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.algorithm import Algorithm
from ..core.settings import setting
from ..core.space import Space
from ..core.types import Cohort, State


class FedAdam(Algorithm):
    paper = "Reddi et al., ICLR 2021"
    idea = "Adam at the server"

    server_lr: float = setting(
        "server rate η_g", default=0.01, above=0, hint="papers tune 0.001–1, try 0.01.", tries=(0.001, 0.01, 0.1)
    )
    beta1: float = setting("momentum β1", default=0.9, least=0, below=1)
    beta2: float = setting("memory β2 of the second moment", default=0.99, least=0, below=1)
    tau: float = setting("adaptivity τ, also √V at the start", default=1e-3, above=0, hint="papers tune 1e-5–1e-1.")

    def server_state(self, space: Space) -> State:
        return {"M": space.zeros(), "V": space.zeros() + self.tau**2}

    def second_moment(self, V: Tensor, D: Tensor) -> Tensor:
        return self.beta2 * V + (1 - self.beta2) * D**2

    def aggregate(self, w: Tensor, up: State, cohort: Cohort, server: State) -> tuple[Tensor, State]:
        D = self.weights(up, cohort) @ up["delta"]
        M, V = self.beta1 * server["M"] + (1 - self.beta1) * D, self.second_moment(server["V"], D)
        return w + self.server_lr * M / (torch.sqrt(V) + self.tau), {"M": M, "V": V}
