"""FedCM: clients step along a mix of their own gradient and the server's last direction.

    θ ← θ − η (α g(θ) + (1 − α) M)
    M ← mean_S (w − θ_i) / (η K_i),    w ← w + s · mean_S δ_i

Xu et al., FedCM: Federated Learning with Client-level Momentum, 2021 (arXiv 2106.10874), Algorithm 2. The paper assumes
equal K and steps without momentum. Here each client is divided by its own length and by the rate of its round, so that
M is a mean of gradients whatever sizes and schedule; under local momentum the length is FedNova's a_i, or with
`length = "steps"` the paper's K_i. M starts at 0: the first round takes steps of α.
"""

from __future__ import annotations

from torch import Tensor

from ..core.algorithm import Gradient
from ..core.settings import setting
from ..core.space import Space
from ..core.types import Affine, Client, Cohort, State
from ._mean_gradient import cohort_mean_gradient, length_setting
from .fedavg import FedAvg


class FedCM(FedAvg):
    paper = "Xu et al., 2021"
    idea = "clients mix the server's last direction into every step"
    weighting = "uniform"
    broadcast = ("M",)

    alpha: float = setting(
        "share α of the client's own gradient",
        default=0.1,
        above=0,
        most=1,
        hint="papers use 0.001–1, try 0.1.",
        tries=(0.03, 0.1, 0.3),
    )
    length: str = length_setting("M")

    def divides_by_rate(self) -> str:
        return "current"

    def server_state(self, space: Space) -> State:
        return {"M": space.zeros()}

    def direction(self, theta: Tensor, grad: Gradient, client: Client) -> Tensor:
        return self.alpha * grad(theta) + (1 - self.alpha) * client.server["M"]

    def affine_step(self, client: Client) -> Affine:
        return Affine(gain=self.alpha, shift=(1 - self.alpha) * client.server["M"])

    def aggregate(self, w: Tensor, up: State, cohort: Cohort, server: State) -> tuple[Tensor, State]:
        w, _ = super().aggregate(w, up, cohort, server)
        return w, {"M": cohort_mean_gradient(up["delta"], cohort, self.length)}
