"""SCAFFOLD: control variates cancel the clients' drift.

    θ ← θ − η (g(θ) − c_i + c)
    c_i⁺ = c_i − c + (w − θ_i) / (K_i η)      option II;      option I: the full gradient of client i at w
    w ← w + η_g mean_S δ_i,    c ← c + (1/N) Σ_S (c_i⁺ − c_i)

Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020 (arXiv 1910.06378),
Algorithm 1. The variates' mean is divided by N, not by the cohort. Under local momentum (w − θ)/(Kη) is up to 1/(1−ρ)
times too long and the method diverges; `variate_norm = "nova"` divides by η·a_i (FedNova's length of K_i momentum
steps), the same as `steps` without momentum. FedDyn's and FedDC's codes divide by the initial rate
(`variate_lr = "initial"`), a relaxation under a decaying rate. With `weighting = "samples"` c is the mean of the c_i by
sample counts, and the optimum that of the sample-weighted loss; the codes of FedDyn and FedDC also divide c by n_i / n̄ in
the local step, which is not copied. `exact` rests on: no clipping.
"""

from __future__ import annotations

from torch import Tensor

from ..core.algorithm import Algorithm, Gradient
from ..core.settings import setting
from ..core.space import Space
from ..core.types import Client, Cohort, State
from .fedavg import FedAvg


def mean_gradient(w: Tensor, me: Client, norm: str, rate: str) -> Tensor:
    """(w − θ)/(K η) in the paper's letters: the mean gradient of the round, as its displacement tells it."""
    return (me.x - w) / ((me.tau if norm == "nova" else me.steps) * (me.lr if rate == "current" else me.lr0))


class Scaffold(FedAvg):
    title = "SCAFFOLD"
    paper = "Karimireddy et al., ICML 2020"
    idea = "control variates cancel the clients' drift"
    affine = True
    weighting = "uniform"
    broadcast = ("c",)
    exact = True

    option: str = setting(
        "new variate: II the mean gradient of the round, I the full gradient at w", default="II", choices=("I", "II")
    )
    variate_norm: str = setting(
        "length of a round in the variate: a_i of FedNova, or K_i", default="nova", choices=("nova", "steps")
    )
    variate_lr: str = setting("rate in the variate's divisor", default="current", choices=("current", "initial"))

    def server_state(self, space: Space) -> State:
        return {"c": space.precise()}

    def client_state(self, space: Space) -> State:
        return {"c": space.zeros()}

    def phases(self) -> tuple[Algorithm, ...]:
        return (OptionI.build(self.table()),) if self.option == "I" and not self.before else (self,)

    def direction(self, w: Tensor, grad: Gradient, me: Client) -> Tensor:
        return grad(w) - me.mine["c"] + me.server["c"]

    def new_variate(self, w: Tensor, me: Client) -> Tensor:
        return me.mine["c"] - me.server["c"] + mean_gradient(w, me, self.variate_norm, self.variate_lr)

    def finish(self, w: Tensor, me: Client) -> tuple[State, State]:
        c = self.new_variate(w, me)
        dc = (c - me.mine["c"]) * (me.size if self.by_samples else 1.0)
        return {"delta": w - me.x, "dc": dc}, me.mine | {"c": c}

    def aggregate(self, x: Tensor, up: State, cohort: Cohort, server: State) -> tuple[Tensor, State]:
        x, server = super().aggregate(x, up, cohort, server)
        return x, server | {"c": server["c"] + up["dc"].sum(0) / cohort.clients}


class OptionI(Scaffold):
    """The variate is the full gradient at the received model: one more pass over the client's data."""

    before = ("gradient",)

    def new_variate(self, w: Tensor, me: Client) -> Tensor:
        return me.carry["gradient"]
