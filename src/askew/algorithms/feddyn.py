"""FedDyn: each client's objective gets a term by which its minimum moves towards the global one.

    θ ← θ − η (g(θ) + α_i (θ − w + h_i)),   α_i = α / (n_i / n̄)
    h_i ← h_i + δ_i,     w ← mean_S θ_i + mean_N h_i

Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021 (arXiv 2111.04263), Algorithm 1; the paper's
gradient memory is −α h_i and its server state −α mean_N h. As in the authors' code α_i θ acts like weight decay,
outside the clipped norm, and α_i (h_i − w) inside it. The drift form allows α = 0. Evaluated: the server's w
(headline), the mean of the participants' models and, with `log_all`, the mean of all clients' latest models, which the
authors plot. `exact` rests on: full batches, equal sizes (or the sample-weighted mean loss), local training near its
minimum, no clipping.
"""

from __future__ import annotations

from torch import Tensor

from ..core.algorithm import Algorithm, Gradient
from ..core.settings import setting
from ..core.space import Space
from ..core.types import Affine, Client, Cohort, Number, State


class FedDyn(Algorithm):
    paper = "Acar et al., ICLR 2021"
    idea = "a dynamic regulariser aligns local minima with the global one"
    weighting = "uniform"
    exact = True
    drift_state = "h"

    alpha: float = setting(
        "strength α of the regulariser",
        default=0.01,
        least=0,
        hint="papers use 0.001–0.1, try 0.01.",
        tries=(0.001, 0.01, 0.1),
    )
    log_all: bool = setting(
        "also measure the mean of all clients' latest models, which the server must then remember", default=False
    )

    def server_state(self, space: Space) -> State:
        return {"h": space.zeros_float64(), "mean": space.start.clone()}

    def client_state(self, space: Space) -> State:
        return {"h": space.zeros()}

    def strength(self, client: Client) -> Number:
        return self.alpha / client.size

    def direction(self, theta: Tensor, grad: Gradient, client: Client) -> Tensor:
        return grad(theta) + self.strength(client) * (client.state["h"] - client.w)

    def descend(self, theta: Tensor, d: Tensor, v: Tensor, client: Client) -> tuple[Tensor, Tensor]:
        return super().descend(theta, d + self.strength(client) * theta, v, client)

    def affine_step(self, client: Client) -> Affine:
        strength = self.strength(client)
        return Affine(shift=strength * (client.state["h"] - client.w), decay=strength)

    def finish(self, theta: Tensor, client: Client) -> tuple[State, State]:
        delta = theta - client.w
        return {"delta": delta}, {"h": client.state["h"] + delta}

    def aggregate(self, w: Tensor, up: State, cohort: Cohort, server: State) -> tuple[Tensor, State]:
        h = server["h"] + up["delta"].sum(0) / cohort.clients
        mean = w + self.weights(up, cohort) @ up["delta"]
        return (mean + h).to(w.dtype), server | {"h": h, "mean": mean}

    def models(self, w: Tensor, server: State) -> dict[str, Tensor]:
        return {"global": w, "participants": server["mean"]}

    def variants(self) -> tuple[type[Algorithm], ...]:
        return (LogAll,) if self.log_all else ()


# variants -----------------------------------------------------------------------------------------------------------


class LogAll(FedDyn):
    """The server keeps every client's latest model, and their mean is measured too."""

    stale = "log_all adds an update to the newest model, and not to the one from which it started"

    def server_state(self, space: Space) -> State:
        return super().server_state(space) | {"all": space.start.double()}

    def memory(self, space: Space) -> State:
        return super().memory(space) | {"theta": space.start.clone()}

    def aggregate(self, w: Tensor, up: State, cohort: Cohort, server: State) -> tuple[Tensor, State]:
        theta = w + up["delta"]
        all_models = server["all"] + (theta - server["theta"]).sum(0) / cohort.clients
        w, state = super().aggregate(w, up, cohort, server)
        return w, state | {"theta": theta, "all": all_models}

    def models(self, w: Tensor, server: State) -> dict[str, Tensor]:
        return super().models(w, server) | {"all": server["all"].to(w.dtype)}
