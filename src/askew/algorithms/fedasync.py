"""FedAsync: the server mixes every model that comes into its own, and stale ones less.

    θ ← θ − η (g(θ) + ρ (θ − w_τ))              from the model w_τ that the client received
    w ← (1 − α_i) w + α_i θ_i,                  α_i = α · s(τ_i)
    s(τ) = 1,   (1 + τ)^{−a},   or 1 up to b and 1 / (a (τ − b) + 1) beyond

Xie, Koyejo, Gupta, Asynchronous Federated Optimization, OPT 2020 (arXiv 1903.03934), Algorithm 1. τ_i is the staleness:
how many steps the server took between the model from which a client started and the step that uses its answer, 0 for
the newest. The server steps with every answer: `time.wait = "buffer"` and `time.buffer = 1`; where a step has several,
w is mixed with their mean. With α = 1 and ρ = 0 and without stale answers it is FedAvg.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.algorithm import Algorithm, Gradient
from ..core.settings import setting
from ..core.types import Affine, Client, Cohort, State
from ._staleness import hinge, polynomial
from .fedprox import check_stability


class FedAsync(Algorithm):
    paper = "Xie, Koyejo, Gupta, OPT 2020"
    idea = "mix every model that comes into the global one, stale ones less"
    weighting = "uniform"
    combines = "models"

    alpha: float = setting(
        "weight α of a fresh model",
        default=0.6,
        above=0,
        most=1,
        hint="papers use 0.6 and 0.9.",
        tries=(0.3, 0.6, 0.9),
    )
    rho: float = setting("strength ρ of the proximal term", default=0.005, least=0, hint="papers use 0.005–0.1.")
    staleness: str = setting(
        "how a stale answer counts: as a fresh one, (1 + τ)^−exponent, or less from a staleness of `free` on",
        default="polynomial",
        choices=("constant", "polynomial", "hinge"),
    )
    exponent: float = setting("a, with staleness = polynomial", default=0.5, least=0)
    slope: float = setting("a, with staleness = hinge", default=10.0, least=0, most=1e6)
    free: float = setting(
        "b: up to this staleness an answer counts as a fresh one, with hinge", default=4.0, least=0, most=1e6
    )

    def check_learning_rate(self, lr: float) -> None:
        check_stability(self.display_name(), self.rho, lr, "rho")

    def direction(self, theta: Tensor, grad: Gradient, client: Client) -> Tensor:
        return grad(theta) + self.rho * (theta - client.w)

    def affine_step(self, client: Client) -> Affine:
        return Affine(pull=self.rho, shift=-self.rho * client.w)

    def finish(self, theta: Tensor, client: Client) -> tuple[State, State]:
        # not an update: w + α (θ_i − w_τ) would not forget where the client started, and is FedBuff's step
        return {"model": theta}, client.state

    def mixing(self, cohort: Cohort) -> Tensor:
        """α_i of each answer, [C], or one number where all are fresh."""
        tau = cohort.staleness.to(cohort.p.dtype)
        if self.staleness == "constant":
            return self.alpha * torch.ones_like(tau)
        return self.alpha * (
            hinge(tau, self.slope, self.free) if self.staleness == "hinge" else polynomial(tau, self.exponent)
        )

    def aggregate(self, w: Tensor, up: State, cohort: Cohort, server: State) -> tuple[Tensor, State]:
        p = self.weights(up, cohort) * self.mixing(cohort)  # of one answer α_i
        return w + p @ (up["model"] - w), server
