"""FedNova: displacements are divided by the length of the path that made them before they are averaged.

    v ← ρ v + g(θ) + μ (θ − w),   θ ← θ − η v                 ρ: local momentum; μ: an optional proximal term
    c ← ρ c + 1 − ημ a,   a ← a + c                           the path's length; plain SGD: a_i = K_i
    w ← w + τ_eff Σ_S p_i δ_i / a_i,    τ_eff = Σ_S p_i a_i   (with a proximal term: Σ_S p_i K_i)

Wang et al., Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization, NeurIPS 2020 (arXiv
2007.07481). As in the authors' optimiser the proximal term is outside the clipped norm, and momentum carries it on.
Their code counts a twice when momentum and proximal term are both on; the recursion above is the exact sum of the
gradients' coefficients then too. `server_momentum` acts as in FedAvgM, on displacements.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.algorithm import Algorithm
from ..core.settings import is_off, setting
from ..core.space import Space
from ..core.types import Client, Cohort, State
from .fedprox import check_stability


class FedNova(Algorithm):
    paper = "Wang et al., NeurIPS 2020"
    idea = "normalise updates by the local work done"
    combines = "reports"

    mu: float = setting("strength μ of an optional proximal term", default=0.0, least=0)
    server_momentum: float = setting("momentum of the server's step", default=0.0, least=0, below=1)

    def check_learning_rate(self, lr: float) -> None:
        check_stability(self.display_name(), self.mu, lr)

    def server_state(self, space: Space) -> State:
        return {"M": space.zeros()}

    def carry(self, client: Client) -> State:
        return {"c": torch.zeros_like(client.w[0]), "a": torch.zeros_like(client.w[0])}

    def descend(self, theta: Tensor, d: Tensor, v: Tensor, client: Client) -> tuple[Tensor, Tensor]:
        return super().descend(theta, d if is_off(self.mu) else d + self.mu * (theta - client.w), v, client)

    def note(self, theta: Tensor, g: Tensor, d: Tensor, client: Client) -> State:
        c = client.momentum * client.carry["c"] + 1 - client.lr * self.mu * client.carry["a"]
        return {"c": c, "a": client.carry["a"] + c}

    def finish(self, theta: Tensor, client: Client) -> tuple[State, State]:
        return {"delta": theta - client.w, "a": client.carry["a"]}, client.state

    def aggregate(self, w: Tensor, up: State, cohort: Cohort, server: State) -> tuple[Tensor, State]:
        p, a = self.weights(up, cohort), up["a"]
        if bool((a <= 0).any()):  # ημ > 1 with momentum: the update has no length to divide by, and is left out
            p, a = torch.where(a > 0, p, 0), torch.where(a > 0, a, 1)
            p = p / p.sum().clamp(min=torch.finfo(p.dtype).tiny)
        tau_eff = p @ (a if self.mu == 0 else cohort.steps)
        M = self.server_momentum * server["M"] + tau_eff * ((p / a) @ up["delta"])
        return w + M, {"M": M}
