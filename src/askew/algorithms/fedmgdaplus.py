"""FedMGDA+: MGDA on normalised displacements, with weights near the clients' shares.

    g_i = (w − θ_i) / ‖w − θ_i‖
    λ = argmin ‖Σ λ_i g_i‖²  over the simplex with |λ_i − λ⁰_i| ≤ ε,    w ← w − η_g Σ λ_i g_i

Hu et al., Federated Learning Meets Multi-Objective Optimization, IEEE TNSE 2022 (arXiv 2006.11489). λ⁰ are the sample
weights. ε = 0 is FedAvg of normalised updates, ε = 1 MGDA on displacements. The original decays η_g
(`server_decay_rate` per round).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..core.algebra import norm
from ..core.algorithm import Algorithm, refuse_weighting
from ..core.settings import setting
from ..core.space import Space
from ..core.types import Cohort, State
from ._simplex import min_norm_point, slsqp


class FedMGDAPlus(Algorithm):
    title = "FedMGDA+"
    paper = "Hu et al., IEEE TNSE 2022"
    idea = "MGDA with weights near the clients' shares"
    combines = "directions"

    server_lr: float = setting("server rate η_g", default=1.0, above=0)
    server_decay_rate: float = setting("factor on η_g after every round", default=1.0, above=0, most=1)
    eps: float = setting("how far a weight may leave its share", default=0.1, least=0, most=1, tries=(0.03, 0.1, 0.3))

    def check(self) -> None:
        if self.eps >= 1:
            refuse_weighting(self, "with eps = 1 a weight may be any share")

    def server_state(self, space: Space) -> State:
        return {"norm": space.scalar()}

    def aggregate(self, w: Tensor, up: State, cohort: Cohort, server: State) -> tuple[Tensor, State]:
        length = norm(up["delta"])
        moved = length > 0
        if not bool(moved.any()):
            return w, {"norm": torch.zeros_like(server["norm"])}
        g = -up["delta"][moved].double() / length[moved, None]
        share = (cohort.p[moved] / cohort.p[moved].sum()).double().cpu().numpy()
        gram = (g @ g.T).cpu().numpy()
        if self.eps >= 1:
            weights = min_norm_point(gram)
        elif self.eps == 0:
            weights = share
        else:
            weights = slsqp(gram, np.clip(share - self.eps, 0, 1), np.clip(share + self.eps, 0, 1), share)
        u = torch.from_numpy(weights).to(g) @ g
        rate = self.server_lr * self.server_decay_rate ** (cohort.round - 1)
        return w - rate * u.to(w.dtype), {"norm": norm(u).to(w.dtype)}
