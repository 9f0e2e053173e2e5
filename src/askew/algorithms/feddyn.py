"""FedDyn: each client's objective is bent so that its minimum agrees with the global one.

    θ ← θ − η (g(θ) + α_i (θ − w + h_i)),   α_i = α / (n_i / n̄)
    h_i ← h_i + δ_i,     w ← mean_S θ_i + mean_N h_i

Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021 (arXiv 2111.04263), Algorithm 1; the paper's
gradient memory is −α h_i and its server state −α mean_N h. As in the authors' code α_i θ acts like weight decay, outside
the clipped norm, and α_i (h_i − w) inside it. The drift form allows α = 0. Evaluated: the server's w (headline), the mean
of the participants' models and, with `log_all`, the mean of all clients' latest models, which the authors plot. `exact`
rests on: equal sizes (or the sample-weighted mean loss), local training near its minimum, no clipping.
"""

from __future__ import annotations

from torch import Tensor

from ..core.algorithm import Algorithm, Gradient
from ..core.settings import setting
from ..core.space import Space
from ..core.types import Client, Cohort, Number, State


class FedDyn(Algorithm):
    paper = "Acar et al., ICLR 2021"
    idea = "a dynamic regulariser aligns local minima with the global one"
    affine = True
    weighting = "uniform"
    exact = True

    alpha: float = setting(
        "strength α of the regulariser", default=0.01, least=0, hint="papers use 0.001–0.1, try 0.01."
    )

    log_all: bool = setting(
        "also measure the mean of all clients' latest models, which the server must then remember", default=False
    )

    def server_state(self, space: Space) -> State:
        return {"h": space.precise(), "mean": space.start.clone()} | (
            {"all": space.start.double()} if self.log_all else {}
        )

    def memory(self, space: Space) -> State:
        return {"theta": space.start.clone()} if self.log_all else {}

    def client_state(self, space: Space) -> State:
        return {"h": space.zeros()}

    def strength(self, me: Client) -> Number:
        return self.alpha / me.size

    def direction(self, w: Tensor, grad: Gradient, me: Client) -> Tensor:
        return grad(w) + self.strength(me) * (me.mine["h"] - me.x)

    def descend(self, w: Tensor, d: Tensor, v: Tensor, me: Client) -> tuple[Tensor, Tensor]:
        return super().descend(w, d + self.strength(me) * w, v, me)

    def finish(self, w: Tensor, me: Client) -> tuple[State, State]:
        return {"delta": w - me.x}, {"h": me.mine["h"] + (w - me.x)}

    def aggregate(self, x: Tensor, up: State, cohort: Cohort, server: State) -> tuple[Tensor, State]:
        h = server["h"] + up["delta"].sum(0) / cohort.clients
        mean = x + self.weights(up, cohort) @ up["delta"]
        told = {"h": h, "mean": mean}
        if self.log_all:
            theta = x + up["delta"]
            told |= {"theta": theta, "all": server["all"] + (theta - server["theta"]).sum(0) / cohort.clients}
        return (mean + h).to(x.dtype), told

    def models(self, x: Tensor, server: State) -> dict[str, Tensor]:
        every = {"all": server["all"].to(x.dtype)} if self.log_all else {}
        return {"global": x, "participants": server["mean"], **every}
