"""FedProx: a proximal term holds local training near the received model.

    θ ← θ − η (g(θ) + μ (θ − w))        the gradient of L_i(θ) + μ/2 ‖θ − w‖²

Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020 (arXiv 1812.06127), Algorithm 2. The penalty is
inside the clipped gradient. FedDC's code leaves out the half and fixes 1e-4, which is μ = 2e-4 here. With one local
step the term vanishes and any μ is FedAvg.
"""

from __future__ import annotations

from torch import Tensor

from ..core.algorithm import Gradient
from ..core.settings import setting
from ..core.types import Affine, Client
from ..errors import ConfigError
from .fedavg import FedAvg


def check_stability(owner: str, mu: float, lr: float, name: str = "mu") -> None:
    """Explicit steps on a proximal term overshoot for ever longer from η μ = 2 on."""
    if mu * lr >= 2:
        raise ConfigError(
            f"{owner}: {name} × local.lr must be < 2, got {mu * lr:g}; steps on the penalty would diverge: "
            f"lower {name} or local.lr."
        )


class FedProx(FedAvg):
    paper = "Li et al., MLSys 2020"
    idea = "a proximal term pulls local models back to the global one"

    mu: float = setting(
        "strength μ of the proximal term",
        default=0.01,
        least=0,
        hint="papers use 0.001–1, try 0.01.",
        tries=(0.01, 0.1, 1.0),
    )

    def check_learning_rate(self, lr: float) -> None:
        check_stability(self.display_name(), self.mu, lr)

    def direction(self, theta: Tensor, grad: Gradient, client: Client) -> Tensor:
        return grad(theta) + self.mu * (theta - client.w)

    def affine_step(self, client: Client) -> Affine:
        return Affine(pull=self.mu, shift=-self.mu * client.w)
