"""FedPVR: SCAFFOLD's variance reduction on the last layers only.

    θ ← θ − η (g(θ) + q ⊙ (c − c_i)),    c_i⁺ = q ⊙ (c_i − c + (w − θ_i) / (K_i η))

Li et al., On the Effectiveness of Partial Variance Reduction in Federated Learning with Heterogeneous Data, CVPR 2023
(arXiv 2212.02191), Algorithm 1. q marks the last `head` layers with parameters; states and messages hold their v
numbers alone. As in the authors' code the masked layers take no momentum, so K_i is their length. A full mask is
SCAFFOLD, an empty one FedAvg.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.algorithm import Gradient
from ..core.settings import off, setting
from ..core.space import Space
from ..core.types import Client, Cohort, Part, State
from .fedavg import FedAvg


class FedPVR(FedAvg):
    paper = "Li et al., CVPR 2023"
    idea = "control variates on the last layers only"
    weighting = "uniform"
    broadcast = ("c",)

    head: int = setting("number of last layers with parameters that are corrected", default=2, least=0)

    def parts(self, space: Space) -> dict[str, Part]:
        return {"head": space.last(self.head)}

    def server_state(self, space: Space) -> State:
        return {"c": space.precise()[space.last(self.head).w]}

    def client_state(self, space: Space) -> State:
        return {"c": space.zeros()[space.last(self.head).w]}

    def direction(self, w: Tensor, grad: Gradient, me: Client) -> Tensor:
        return grad(w).index_add(0, me.part["head"].w, me.server["c"] - me.mine["c"])

    def descend(self, w: Tensor, d: Tensor, v: Tensor, me: Client) -> tuple[Tensor, Tensor]:
        if off(me.momentum):
            return super().descend(w, d, v, me)
        d = d + me.decay * w
        v = me.momentum * v.index_fill(0, me.part["head"].w, 0.0) + d
        return w - me.lr * v, v

    def finish(self, w: Tensor, me: Client) -> tuple[State, State]:
        head = me.part["head"].w
        c = me.mine["c"] - me.server["c"] + (me.x - w)[head] / (me.steps * me.lr)
        dc = (c - me.mine["c"]) * (me.size if self.by_samples else 1.0)
        return {"delta": w - me.x, "dc": dc}, {"c": c}

    def aggregate(self, x: Tensor, up: State, cohort: Cohort, server: State) -> tuple[Tensor, State]:
        x, _ = super().aggregate(x, up, cohort, server)
        return x, {"c": server["c"] + torch.sum(up["dc"], 0) / cohort.clients}
