"""FOCUS: clients send changes of their gradient; the server adds them up to the sum of all clients' last gradients.

    θ starts at w,    θ ← θ − η (g(θ) − g_i)         g_i: the last gradient of the client's last round, at first 0
    y_i = g(θ) − g_i with the last g(θ) of the round,    then g_i ← g(θ)
    y ← y + Σ_S y_i,    w ← w − s η y

Ying, Li, Yang, Exact and Linear Convergence for Federated Learning under Arbitrary Client Participation is Attainable,
NeurIPS 2025 (arXiv 2503.20117), "federated optimization with exact convergence via push-pull strategy", as in the
authors' code. y is the sum of the g_i of all N clients and not their mean: the paper takes small η, and `server_scale`
s = 1/N takes the mean. Long local training slows it (a comment at the end of the file says why). `exact` rests on: full
batches, and an s η that is small enough for stale gradients.
"""

from __future__ import annotations

from torch import Tensor

from ..core.algorithm import Algorithm, Gradient
from ..core.settings import is_off, setting
from ..core.space import Space
from ..core.types import Client, Cohort, State


class FOCUS(Algorithm):
    paper = "Ying, Li, Yang, NeurIPS 2025"
    idea = "the server sums up the changes of the clients' gradients"
    weighting = "uniform"
    own_weights = "the clients' gradients are added up, each once"
    exact = True

    server_scale: float = setting(
        "factor s on the step along the sum of all clients' gradients",
        default=1.0,
        above=0,
        hint="1 divided by the number of clients is a step along their mean.",
    )

    def server_state(self, space: Space) -> State:
        return {"y": space.zeros_float64()}

    def client_state(self, space: Space) -> State:
        return {"g": space.zeros()}

    def carry(self, client: Client) -> State:
        return {"g": client.state["g"]}

    def direction(self, theta: Tensor, grad: Gradient, client: Client) -> Tensor:
        return grad(theta) - client.state["g"]

    def note(self, theta: Tensor, g: Tensor, d: Tensor, client: Client) -> State:
        # weight decay is a part of the client's gradient
        return {"g": g if is_off(client.decay) else g + client.decay * theta}

    def finish(self, theta: Tensor, client: Client) -> tuple[State, State]:
        g = client.carry["g"]
        return {"y": g - client.state["g"]}, {"g": g}

    def aggregate(self, w: Tensor, up: State, cohort: Cohort, server: State) -> tuple[Tensor, State]:
        y = server["y"] + up["y"].sum(0)
        return (w - self.server_scale * cohort.lr * y).to(w.dtype), {"y": y}


# Why long local training slows it: θ moves to where g(θ) is g_i again, and of a change of the gradient at w only the
# part (1 − η H)^(K−1) is sent, for K steps and curvature H. With one step and everybody it is FedSGD with N times its
# rate.
