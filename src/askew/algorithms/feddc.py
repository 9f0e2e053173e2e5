"""FedDC: each client learns its drift h_i and corrects for it, and uses control variates as well.

    θ ← θ − η (g(θ) + α_i (θ − w + h_i) + c − c_i),   α_i = α / (n_i / n̄)
    h_i ← h_i + δ_i,    c_i⁺ = c_i − c + (w − θ_i) / (K_i η_0)
    w ← mean_S θ_i + mean_N h_i,    c ← c + (1/N) Σ_S (n_i / n̄)(c_i⁺ − c_i)

Gao et al., FedDC: Federated Learning with Non-IID Data via Local Drift Decoupling and Correction, CVPR 2022
(arXiv 2203.11751), Algorithm 1. Where paper and code differ, the formulas are the code's; `variate = "displacement"`
and `rule = "paper"` are the paper's. Without variates and clipping it is FedDyn, without the drift and α SCAFFOLD.
`exact` rests on: full batches, equal sizes (or the sample-weighted mean loss), no clipping, `rule = "code"`.
"""

from __future__ import annotations

from torch import Tensor

from ..core.algorithm import Algorithm, Gradient
from ..core.settings import setting
from ..core.space import Space
from ..core.types import Affine, Client, Cohort, Number, State
from ._mean_gradient import length_setting, mean_gradient


class FedDC(Algorithm):
    paper = "Gao et al., CVPR 2022"
    idea = "each client learns its drift and corrects for it"
    weighting = "uniform"
    broadcast = ("c",)
    exact = True
    drift_state = "h"
    stale = "the server adds the drift in every step, clients at older models take it back too late, and w runs away"

    alpha: float = setting(
        "strength α of the drift penalty",
        default=0.01,
        least=0,
        hint="the paper uses 0.005–0.1, try 0.01.",
        tries=(0.005, 0.01, 0.1),
    )
    drift: bool = setting("learn the drift h_i", default=True)
    variate: str = setting(
        "the code's control variate, the last displacement, or none",
        default="code",
        choices=("code", "displacement", "off"),
    )
    variate_norm: str = length_setting("the variate")
    variate_lr: str = setting("rate in the variate's divisor", default="initial", choices=("current", "initial"))
    rule: str = setting(
        "server rule: participants' models plus all drifts, or the paper's", default="code", choices=("code", "paper")
    )
    divide_c: bool = setting("divide c by n_i / n̄, as the code does for unequal sizes", default=False)

    def divides_by_rate(self) -> str:
        return "" if self.variate == "off" else self.variate_lr

    def server_state(self, space: Space) -> State:
        return {"c": space.zeros_float64(), "h": space.zeros_float64()}

    def client_state(self, space: Space) -> State:
        return {"c": space.zeros(), "h": space.zeros()}

    def direction(self, theta: Tensor, grad: Gradient, client: Client) -> Tensor:
        pull = self.strength(client) * (theta - client.w + client.state["h"])
        return grad(theta) + pull + self.c(client) - client.state["c"]

    def affine_step(self, client: Client) -> Affine:
        alpha = self.strength(client)
        shift = alpha * (client.state["h"] - client.w) + self.c(client) - client.state["c"]
        return Affine(pull=alpha, shift=shift)

    def strength(self, client: Client) -> Number:
        """α_i. Divided by the client's size, the plain mean of the h_i is a mean of gradients by sample counts."""
        return self.alpha / client.size

    def c(self, client: Client) -> Tensor:
        """The server's variate, as the client uses it."""
        return client.server["c"]

    def new_variate(self, theta: Tensor, client: Client) -> tuple[Tensor, Tensor]:
        """c_i⁺, and what goes up of its change."""
        g = mean_gradient(client.w, theta, client, self.variate_norm, self.variate_lr)
        c = client.state["c"] - self.c(client) + g
        return c, (c - client.state["c"]) * client.size

    def finish(self, theta: Tensor, client: Client) -> tuple[State, State]:
        delta = theta - client.w
        c, dc = self.new_variate(theta, client)
        return {"delta": delta, "dc": dc}, {"c": c, "h": client.state["h"] + delta}

    def aggregate(self, w: Tensor, up: State, cohort: Cohort, server: State) -> tuple[Tensor, State]:
        c = server["c"] + up["dc"].sum(0) / cohort.clients
        h = server["h"] + up["delta"].sum(0) / cohort.clients
        return (w + self.weights(up, cohort) @ up["delta"] + h).to(w.dtype), {"c": c, "h": h}

    def variants(self) -> tuple[type[Algorithm], ...]:
        chosen: dict[type[Algorithm], bool] = {
            PaperRule: self.rule == "paper",
            NoDrift: not self.drift,
            DisplacementVariate: self.variate == "displacement",
            NoVariate: self.variate == "off",
            DividedC: self.divide_c,
        }
        return tuple(variant for variant, wanted in chosen.items() if wanted)


# variants -----------------------------------------------------------------------------------------------------------


class PaperRule(FedDC):
    """The paper's server rule: the mean of θ_i + h_i by sample counts. Under partial participation it leaves the
    participants' drifts in the model, so it is not exact.
    """

    own_weights = 'rule = "paper" always weighs by sample counts'

    def weights(self, up: State, cohort: Cohort) -> Tensor:
        return cohort.size / cohort.size.sum()

    def finish(self, theta: Tensor, client: Client) -> tuple[State, State]:
        up, state = super().finish(theta, client)
        return {"corrected": up["delta"] + state["h"], "dc": up["dc"]}, state

    def aggregate(self, w: Tensor, up: State, cohort: Cohort, server: State) -> tuple[Tensor, State]:
        c = server["c"] + up["dc"].sum(0) / cohort.clients
        return w + self.weights(up, cohort) @ up["corrected"], {"c": c, "h": server["h"]}


class NoDrift(FedDC):
    """The drift is not learned: it stays at zero."""

    stale = ""

    def finish(self, theta: Tensor, client: Client) -> tuple[State, State]:
        up, state = super().finish(theta, client)
        return up, state | {"h": client.state["h"]}

    def aggregate(self, w: Tensor, up: State, cohort: Cohort, server: State) -> tuple[Tensor, State]:
        _, state = super().aggregate(w, up, cohort, server)
        mean = w + self.weights(up, cohort) @ up["delta"]
        return (mean + server["h"]).to(w.dtype), state | {"h": server["h"]}


class DisplacementVariate(FedDC):
    """The paper's variate: the client's last displacement, as a mean gradient."""

    def new_variate(self, theta: Tensor, client: Client) -> tuple[Tensor, Tensor]:
        c = mean_gradient(client.w, theta, client, self.variate_norm, self.variate_lr)
        return c, c - client.state["c"]


class NoVariate(FedDC):
    """Without control variates."""

    def new_variate(self, theta: Tensor, client: Client) -> tuple[Tensor, Tensor]:
        c = client.state["c"]
        return c, c - c


class DividedC(FedDC):
    """c divided by n_i / n̄ in the local step and in the variate, as the code does for unequal sizes: the same fixed
    point, but less stable. The code's divisor also takes K from the average size, which is not copied.
    """

    def c(self, client: Client) -> Tensor:
        return super().c(client) / client.size
