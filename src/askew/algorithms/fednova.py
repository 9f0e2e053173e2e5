"""FedNova: displacements are divided by the length of the path that made them before they are averaged.

    w ← w + τ_eff Σ_S p_i δ_i / a_i,    τ_eff = Σ_S p_i a_i   (with a proximal term: Σ_S p_i K_i)
    per step:  c ← ρ c + 1 − ημ a,   a ← a + c                (plain SGD: a_i = K_i)

Wang et al., Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization, NeurIPS 2020
(arXiv 2007.07481). As in the authors' optimiser the proximal term is outside the clipped norm and, added to the buffer in
place, carried on by momentum. Their code counts a twice when momentum and proximal term are both on; the recursion above
is the exact sum of the gradients' coefficients then too. `server_momentum` acts as in FedAvgM, on displacements; the
authors' is in gradient units, the same at a constant rate.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.algorithm import Algorithm
from ..core.settings import off, setting
from ..core.space import Space
from ..core.types import Client, Cohort, State
from .fedprox import stable


class FedNova(Algorithm):
    paper = "Wang et al., NeurIPS 2020"
    idea = "normalise updates by the local work done"

    mu: float = setting("strength μ of an optional proximal term", default=0.0, least=0)
    server_momentum: float = setting("momentum of the server's step", default=0.0, least=0, below=1)

    def fit(self, lr: float) -> None:
        stable(self.called(), self.mu, lr)

    def server_state(self, space: Space) -> State:
        return {"M": space.zeros()}

    def carry(self, me: Client) -> State:
        return {"c": torch.zeros_like(me.x[0]), "a": torch.zeros_like(me.x[0])}

    def descend(self, w: Tensor, d: Tensor, v: Tensor, me: Client) -> tuple[Tensor, Tensor]:
        return super().descend(w, d if off(self.mu) else d + self.mu * (w - me.x), v, me)

    def note(self, w: Tensor, g: Tensor, d: Tensor, me: Client) -> State:
        c = me.momentum * me.carry["c"] + 1 - me.lr * self.mu * me.carry["a"]
        return {"c": c, "a": me.carry["a"] + c}

    def finish(self, w: Tensor, me: Client) -> tuple[State, State]:
        return {"delta": w - me.x, "a": me.carry["a"]}, me.mine

    def aggregate(self, x: Tensor, up: State, cohort: Cohort, server: State) -> tuple[Tensor, State]:
        p = self.weights(up, cohort)
        tau_eff = p @ (up["a"] if self.mu == 0 else cohort.steps)
        M = self.server_momentum * server["M"] + tau_eff * ((p / up["a"]) @ up["delta"])
        return x + M, {"M": M}
