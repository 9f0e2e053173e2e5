"""FedDC: each client learns its drift h_i and corrects for it, with control variates beside.

    θ ← θ − η (g(θ) + α_i (θ − w + h_i) + c − c_i),   α_i = α / (n_i / n̄)
    h_i ← h_i + δ_i,    c_i⁺ = c_i − c + (w − θ_i) / (K_i η_0)
    w ← mean_S θ_i + mean_N h_i,    c ← c + (1/N) Σ_S (n_i / n̄)(c_i⁺ − c_i)

Gao et al., FedDC: Federated Learning with Non-IID Data via Local Drift Decoupling and Correction, CVPR 2022
(arXiv 2203.11751), Algorithm 1. Paper and code differ twice, and we follow the code: the paper's variate is the
client's last displacement (`variate = "displacement"`), and it averages θ_i + h_i by sample counts (`rule = "paper"`).
The divisor has the initial rate, as in the code. For unequal sizes the code also divides c by n_i / n̄, in the local step
and in the variate (`divide_c`; the same fixed point, less stable), and takes K from the average size in the divisor, which is
not copied. Without variates and clipping it is FedDyn, without the drift and α SCAFFOLD. `exact` rests on: equal sizes (or
the sample-weighted mean loss), no clipping, `rule = "code"`: under partial participation the paper's rule leaves the
participants' drifts in the model.
"""

from __future__ import annotations

from torch import Tensor

from ..core.algorithm import Algorithm, Gradient
from ..core.settings import setting
from ..core.space import Space
from ..core.types import Client, Cohort, State
from .scaffold import mean_gradient


class FedDC(Algorithm):
    paper = "Gao et al., CVPR 2022"
    idea = "each client learns its drift and corrects for it"
    affine = True
    weighting = "uniform"
    broadcast = ("c",)
    exact = True

    alpha: float = setting(
        "strength α of the drift penalty", default=0.01, least=0, hint="the paper uses 0.005–0.1, try 0.01."
    )
    drift: bool = setting("learn the drift h_i", default=True)
    variate: str = setting(
        "the code's control variate, the last displacement, or none",
        default="code",
        choices=("code", "displacement", "off"),
    )
    variate_norm: str = setting(
        "length of a round in the variate: a_i of FedNova, or K_i", default="nova", choices=("nova", "steps")
    )
    variate_lr: str = setting("rate in the variate's divisor", default="initial", choices=("current", "initial"))
    rule: str = setting(
        "server rule: participants' models plus all drifts, or the paper's", default="code", choices=("code", "paper")
    )

    divide_c: bool = setting("divide c by n_i / n̄, as the code does for unequal sizes", default=False)

    def server_state(self, space: Space) -> State:
        return {"c": space.precise(), "h": space.precise()}

    def client_state(self, space: Space) -> State:
        return {"c": space.zeros(), "h": space.zeros()}

    def direction(self, w: Tensor, grad: Gradient, me: Client) -> Tensor:
        pull = self.alpha / me.size * (w - me.x + me.mine["h"])
        return grad(w) + pull + self.common(me) - me.mine["c"]

    def common(self, me: Client) -> Tensor:
        """c as the client uses it."""
        return me.server["c"] / me.size if self.divide_c else me.server["c"]

    def finish(self, w: Tensor, me: Client) -> tuple[State, State]:
        delta, h, c = w - me.x, me.mine["h"], me.mine["c"]
        if self.drift:
            h = h + delta
        if self.variate != "off":
            old = c - self.common(me) if self.variate == "code" else 0.0
            c = old + mean_gradient(w, me, self.variate_norm, self.variate_lr)
        dc = (c - me.mine["c"]) * (me.size if self.variate == "code" else 1.0)
        sent = {"corrected": delta + h} if self.rule == "paper" else {"delta": delta}
        return sent | {"dc": dc}, {"c": c, "h": h}

    def aggregate(self, x: Tensor, up: State, cohort: Cohort, server: State) -> tuple[Tensor, State]:
        c = server["c"] + up["dc"].sum(0) / cohort.clients
        if self.rule == "paper":
            return x + cohort.size / cohort.size.sum() @ up["corrected"], {"c": c, "h": server["h"]}
        h = server["h"] + (up["delta"].sum(0) / cohort.clients if self.drift else 0.0)
        return (x + self.weights(up, cohort) @ up["delta"] + h).to(x.dtype), {"c": c, "h": h}
