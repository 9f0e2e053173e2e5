"""FedPVR: SCAFFOLD's variance reduction on the last layers only.

    θ ← θ − η (g(θ) + q ⊙ (c − c_i)),    c_i⁺ = q ⊙ (c_i − c + (w − θ_i) / (K_i η))

Li et al., On the Effectiveness of Partial Variance Reduction in Federated Learning with Heterogeneous Data, CVPR 2023
(arXiv 2212.02191), Algorithm 1. q is 1 on the last `head` layers with parameters and 0 elsewhere; ⊙ multiplies
coordinate by coordinate. w is averaged as in FedAvg and c renewed as in SCAFFOLD; c and c_i hold the numbers of these
layers alone. As in the authors' code the masked layers take no momentum, so K_i is their length. An empty mask is
FedAvg. A full one is SCAFFOLD without local momentum; under momentum it is not, as SCAFFOLD's steps take it and these
do not.
"""

from __future__ import annotations

from torch import Tensor

from ..core.algorithm import Gradient
from ..core.settings import is_off, setting
from ..core.space import Space
from ..core.types import Client, Cohort, Part, State
from .fedavg import FedAvg


class FedPVR(FedAvg):
    paper = "Li et al., CVPR 2023"
    idea = "control variates on the last layers only"
    weighting = "uniform"
    broadcast = ("c",)

    head: int = setting("number of last layers with parameters that are corrected", default=2, least=0)

    def divides_by_rate(self) -> str:
        return "current"

    def parts(self, space: Space) -> dict[str, Part]:
        return {"head": space.last_layers(self.head)}

    def server_state(self, space: Space) -> State:
        return {"c": space.zeros_float64()[space.last_layers(self.head).indices]}

    def client_state(self, space: Space) -> State:
        return {"c": space.zeros()[space.last_layers(self.head).indices]}

    def direction(self, theta: Tensor, grad: Gradient, client: Client) -> Tensor:
        return grad(theta).index_add(0, client.parts["head"].indices, client.server["c"] - client.state["c"])

    def descend(self, theta: Tensor, d: Tensor, v: Tensor, client: Client) -> tuple[Tensor, Tensor]:
        if is_off(client.momentum):
            return super().descend(theta, d, v, client)
        d = d + client.decay * theta
        v = client.momentum * v.index_fill(0, client.parts["head"].indices, 0.0) + d
        return theta - client.lr * v, v  # not `step_along`: it rounds in another way, and stored results would change

    def finish(self, theta: Tensor, client: Client) -> tuple[State, State]:
        head = client.parts["head"].indices
        c = client.state["c"] - client.server["c"] + (client.w - theta)[head] / (client.steps * client.lr)
        dc = (c - client.state["c"]) * (client.size if self.by_samples else 1.0)
        return {"delta": theta - client.w, "dc": dc}, {"c": c}

    def aggregate(self, w: Tensor, up: State, cohort: Cohort, server: State) -> tuple[Tensor, State]:
        w, _ = super().aggregate(w, up, cohort, server)
        return w, {"c": server["c"] + up["dc"].sum(0) / cohort.clients}
