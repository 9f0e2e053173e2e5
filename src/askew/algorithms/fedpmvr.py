"""FedPMVR: after local training the last layers are pulled back by a share of their own update.

    θ_i ← θ_i − α (θ_i − w) on the last two layers,    w ← mean_S θ_i

FedPMVR (anonymous submission): partial momentum variance reduction. The momentum starts anew in every round, so it is
FedAvg with a server factor of 1 − α on these layers. The paper contradicts itself and its code: its six other readings
are variants below. Equal weights; Eq. 7's sample weights are `weighting = "samples"`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..core.algorithm import Algorithm, Gradient
from ..core.settings import setting
from ..core.space import Space
from ..core.types import Client, Part, State
from ..errors import ModelError
from .fedavg import FedAvg

READINGS = (
    "displacement",
    "displacement_ema",
    "displacement_sum",
    "extra_gradient",
    "momentum_sgd",
    "additive",
    "as_published",
)


class FedPMVR(FedAvg):
    paper = "anonymous submission"
    idea = "damp the last layers by their own momentum"
    weighting = "uniform"

    alpha: float = setting(
        "strength α of the momentum",
        default=0.1,
        least=0,
        most=1,
        hint="the paper uses 0.001–0.8, try 0.1.",
        tries=(0.01, 0.1, 0.5),
    )
    reading: str = setting(
        "which of the paper's readings; the method's file has a class for each, with its formula",
        default="displacement",
        choices=READINGS,
    )
    head: int = setting("number of last layers that are corrected", default=2, least=1)
    head_unit: str = setting(
        "what `head` counts: layers with parameters, or tensors", default="layers", choices=("layers", "tensors")
    )
    corrected: str = setting(
        "correct the last layers, as `head` says, or all convolutions",
        default="head",
        choices=("head", "convolutions"),
    )

    def correct(self, theta: Tensor, client: Client) -> tuple[Tensor, State]:
        """The corrected model and the client's new state."""
        q = client.parts["head"].indices
        return theta.index_add(0, q, -self.alpha * (theta - client.w)[q]), client.state

    def finish(self, theta: Tensor, client: Client) -> tuple[State, State]:
        corrected, state = self.correct(theta, client)
        return {"delta": corrected - client.w}, state

    def parts(self, space: Space) -> dict[str, Part]:
        return {"head": head_of(self, space)}

    def variants(self) -> tuple[type[Algorithm], ...]:
        return (VARIANTS[self.reading],) if self.reading in VARIANTS else ()


def head_of(alg: FedPMVR, space: Space) -> Part:
    """The part of the network that is corrected; a network without one is refused."""
    if alg.corrected == "convolutions":
        part = space.layers_of_type(nn.Conv1d, nn.Conv2d, nn.Conv3d)
        if part.indices.numel() == 0:
            raise ModelError(
                'FedPMVR: this network has no convolutions to correct; set corrected = "head", or take another network.'
            )
        return part
    part = space.last_layers(alg.head) if alg.head_unit == "layers" else space.last_tensors(alg.head)
    if part.indices.numel() == 0:
        raise ModelError("FedPMVR: the head is empty; choose head ≥ 1 on a network with parameters.")
    return part


# variants: the paper's other readings -------------------------------------------------------------------------------
#
# In their formulas δ = θ − w, and q marks the last layers. The default agrees with the paper's listing, which resets
# the momentum, with its word "gradient" for a displacement, and with its claim of no extra state or traffic.


class DisplacementSum(FedPMVR):
    """m_i ← α δ + m_i,   q: θ − m_i: a momentum that the client keeps and that never decays. The code as intended.

    It diverges: `test_with_a_running_sum_it_diverges` of tests/methods/test_fedpmvr.py shows it on a line.
    """

    def client_state(self, space: Space) -> State:
        return {"m": space.zeros()[head_of(self, space).indices]}

    def decay(self) -> float:
        """The share of the old momentum that stays."""
        return 1.0

    def correct(self, theta: Tensor, client: Client) -> tuple[Tensor, State]:
        q = client.parts["head"].indices
        m = self.alpha * (theta - client.w)[q] + self.decay() * client.state["m"]
        return theta.index_add(0, q, -m), {"m": m}


class DisplacementEma(DisplacementSum):
    """m_i ← α δ + (1 − α) m_i,   q: θ − m_i: a momentum that the client keeps, as a moving average.

    It stops short of the optimum: `test_with_a_running_mean_it_stops_short`, in the same file, gives the reason.
    """

    def decay(self) -> float:
        return 1 - self.alpha


class ExtraGradient(FedPMVR):
    """G = ∇L_i(θ),   q: θ − α G,   elsewhere: θ − η G: one more pass over the client's data. Algorithm 1, literally."""

    after = ("gradient",)

    def correct(self, theta: Tensor, client: Client) -> tuple[Tensor, State]:
        q, G = client.parts["head"].indices, client.carry["gradient"]
        return (theta - client.lr * G).index_copy(0, q, theta[q] - self.alpha * G[q]), client.state


class AsPublished(FedPMVR):
    """No correction: what the public code does as it runs."""

    def correct(self, theta: Tensor, client: Client) -> tuple[Tensor, State]:
        return theta, client.state


class MomentumSGD(AsPublished):
    """Every step on q:  m ← α m + (1 − α) g,   θ ← θ − η m. Eqs. 12–15."""

    def carry(self, client: Client) -> State:
        return {"m": torch.zeros_like(client.w)[client.parts["head"].indices]}

    def momentum(self, g: Tensor, client: Client) -> Tensor:
        return self.alpha * client.carry["m"] + (1 - self.alpha) * g[client.parts["head"].indices]

    def direction(self, theta: Tensor, grad: Gradient, client: Client) -> Tensor:
        g = grad(theta)
        return g.index_copy(0, client.parts["head"].indices, self.momentum(g, client))

    def note(self, theta: Tensor, g: Tensor, d: Tensor, client: Client) -> State:
        return {"m": self.momentum(g, client)}


class Additive(MomentumSGD):
    """Every step on q:  m as in MomentumSGD,   θ ← θ − η (g + m). Eqs. 18 and 27."""

    def direction(self, theta: Tensor, grad: Gradient, client: Client) -> Tensor:
        g = grad(theta)
        return g.index_add(0, client.parts["head"].indices, self.momentum(g, client))


VARIANTS: dict[str, type[FedPMVR]] = {
    "displacement_ema": DisplacementEma,
    "displacement_sum": DisplacementSum,
    "extra_gradient": ExtraGradient,
    "momentum_sgd": MomentumSGD,
    "additive": Additive,
    "as_published": AsPublished,
}
