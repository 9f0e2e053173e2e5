"""SCAFFOLD: control variates cancel the clients' drift.

    θ ← θ − η (g(θ) − c_i + c)
    c_i⁺ = c_i − c + (w − θ_i) / (K_i η)      option II;      option I: the full gradient of client i at w
    w ← w + s · mean_S δ_i,    c ← c + (1/N) Σ_S (c_i⁺ − c_i)

Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020 (arXiv 1910.06378),
Algorithm 1. Under local momentum (w − θ_i) / (K_i η) is too long and the method diverges; so `variate_norm = "nova"`
divides by FedNova's a_i, which is K_i without momentum. With `weighting = "samples"` c is the mean of the c_i by
sample counts, and the optimum that of the sample-weighted loss. `exact` rests on: full batches, no clipping.
"""

from __future__ import annotations

from torch import Tensor

from ..core.algorithm import Algorithm, Gradient
from ..core.settings import setting
from ..core.space import Space
from ..core.types import Affine, Client, Cohort, State
from ._mean_gradient import length_setting, mean_gradient
from .fedavg import FedAvg


class Scaffold(FedAvg):
    title = "SCAFFOLD"
    paper = "Karimireddy et al., ICML 2020"
    idea = "control variates cancel the clients' drift"
    weighting = "uniform"
    broadcast = ("c",)
    exact = True

    option: str = setting(
        "new variate: II the mean gradient of the round, I the full gradient at w", default="II", choices=("I", "II")
    )
    variate_norm: str = length_setting("the variate")
    variate_lr: str = setting("rate in the variate's divisor", default="current", choices=("current", "initial"))

    def divides_by_rate(self) -> str:
        return super().divides_by_rate() or (self.variate_lr if self.option == "II" else "")

    def server_state(self, space: Space) -> State:
        return {"c": space.zeros_float64()}

    def client_state(self, space: Space) -> State:
        return {"c": space.zeros()}

    def direction(self, theta: Tensor, grad: Gradient, client: Client) -> Tensor:
        return grad(theta) - client.state["c"] + client.server["c"]

    def affine_step(self, client: Client) -> Affine:
        return Affine(shift=client.server["c"] - client.state["c"])

    def new_variate(self, theta: Tensor, client: Client) -> Tensor:
        g = mean_gradient(client.w, theta, client, self.variate_norm, self.variate_lr)
        return client.state["c"] - client.server["c"] + g

    def finish(self, theta: Tensor, client: Client) -> tuple[State, State]:
        c = self.new_variate(theta, client)
        dc = (c - client.state["c"]) * (client.size if self.by_samples else 1.0)
        return {"delta": theta - client.w, "dc": dc}, client.state | {"c": c}

    def aggregate(self, w: Tensor, up: State, cohort: Cohort, server: State) -> tuple[Tensor, State]:
        w, server = super().aggregate(w, up, cohort, server)
        return w, server | {"c": server["c"] + up["dc"].sum(0) / cohort.clients}

    def variants(self) -> tuple[type[Algorithm], ...]:
        return (OptionI,) if self.option == "I" else ()


# variants -----------------------------------------------------------------------------------------------------------


class OptionI(Scaffold):
    """The variate is the full gradient at the received model: one more pass over the client's data."""

    before = ("gradient",)

    def new_variate(self, theta: Tensor, client: Client) -> Tensor:
        return client.carry["gradient"]
