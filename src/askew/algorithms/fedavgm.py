"""FedAvgM: heavy-ball momentum at the server.

    D = Σ_S p_i δ_i,    M ← β M + (1 − dampening) D,    w ← w + η_g M

Hsu, Qi, Brown, Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification, 2019
(arXiv 1909.06335). A public variant averages instead: `dampening = 0.9` with β = 0.9.
"""

from __future__ import annotations

from torch import Tensor

from ..core.algorithm import Algorithm
from ..core.settings import setting
from ..core.space import Space
from ..core.types import Cohort, State


class FedAvgM(Algorithm):
    paper = "Hsu, Qi, Brown, 2019"
    idea = "server momentum"

    beta: float = setting("momentum β", default=0.9, least=0, below=1, tries=(0.5, 0.7, 0.9))
    server_lr: float = setting("server rate η_g on displacements", default=1.0, above=0)
    dampening: float = setting("share of D that is left out of M", default=0.0, least=0, below=1)

    def server_state(self, space: Space) -> State:
        return {"M": space.zeros()}

    def aggregate(self, w: Tensor, up: State, cohort: Cohort, server: State) -> tuple[Tensor, State]:
        M = self.beta * server["M"] + (1 - self.dampening) * (self.weights(up, cohort) @ up["delta"])
        return w + self.server_lr * M, {"M": M}
