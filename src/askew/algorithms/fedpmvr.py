"""FedPMVR: after local training the last layers are pulled back by a momentum of their own update.

    δ = θ − w;  q marks the last two layers

    displacement (default)   q: θ − α δ                                    momentum reset every round
    displacement_ema         m_i ← α δ + (1 − α) m_i,   q: θ − m_i         kept by the client
    displacement_sum         m_i ← α δ + m_i,           q: θ − m_i         kept, never decayed: the public code as intended
    extra_gradient           G = ∇L_i(θ),   q: θ − α G,   elsewhere: θ − η G          Algorithm 1, literally
    momentum_sgd             every step on q:  m ← α m + (1 − α) g,   θ ← θ − η m      Eqs. 12–15
    additive                 every step on q:  m as above,   θ ← θ − η (g + m)         Eqs. 18 and 27
    as_published             no correction: what the public code does as it runs

    w ← mean_S of the corrected models

FedPMVR (anonymous submission): partial momentum variance reduction. The paper contradicts itself and its code; the
default agrees with the listing's reset, with "gradient" as displacement, and with no extra state or traffic. It equals
FedAvg with a server factor of 1 − α on the head. The persistent readings are defective: `_ema` stops short of the
optimum and `_sum` diverges. Equal weights; Eq. 7's sample weights are `weighting = "samples"`.
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
        "strength α of the momentum", default=0.1, least=0, most=1, hint="the paper uses 0.001–0.8, try 0.1."
    )
    reading: str = setting("which of the paper's readings", default="displacement", choices=READINGS)
    head: int = setting("number of last layers that are corrected", default=2, least=1)
    head_unit: str = setting(
        "what `head` counts: layers with parameters, or tensors", default="layers", choices=("layers", "tensors")
    )
    corrected: str = setting(
        "correct the last layers, as `head` says, or all convolutions", default="head", choices=("head", "convolutions")
    )

    def part(self, space: Space) -> Part:
        if self.corrected == "convolutions":
            return space.kind(nn.Conv1d, nn.Conv2d, nn.Conv3d)
        return space.last(self.head) if self.head_unit == "layers" else space.last_tensors(self.head)

    def parts(self, space: Space) -> dict[str, Part]:
        part = self.part(space)
        if part.w.numel() == 0:
            if self.corrected == "convolutions":
                raise ModelError(
                    'FedPMVR: this network has no convolutions to correct; set corrected = "head", or take another network.'
                )
            raise ModelError("FedPMVR: the head is empty; choose head ≥ 1 on a network with parameters.")
        return {"head": part}

    def client_state(self, space: Space) -> State:
        return (
            {"m": space.zeros()[self.part(space).w]} if self.reading in ("displacement_ema", "displacement_sum") else {}
        )

    def phases(self) -> tuple[Algorithm, ...]:
        return (ExtraGradient.build(self.table()),) if self.reading == "extra_gradient" and not self.after else (self,)

    def stepwise(self) -> bool:
        return self.reading in ("momentum_sgd", "additive")

    def carry(self, me: Client) -> State:
        return {"m": torch.zeros_like(me.x)[me.part["head"].w]} if self.stepwise() else {}

    def momentum(self, g: Tensor, me: Client) -> Tensor:
        return self.alpha * me.carry["m"] + (1 - self.alpha) * g[me.part["head"].w]

    def direction(self, w: Tensor, grad: Gradient, me: Client) -> Tensor:
        g = grad(w)
        if not self.stepwise():
            return g
        head, m = me.part["head"].w, self.momentum(g, me)
        return g.index_copy(0, head, m) if self.reading == "momentum_sgd" else g.index_add(0, head, m)

    def note(self, w: Tensor, g: Tensor, d: Tensor, me: Client) -> State:
        return {"m": self.momentum(g, me)} if self.stepwise() else {}

    def correct(self, w: Tensor, me: Client) -> tuple[Tensor, State]:
        """The corrected model and the client's new state."""
        head = me.part["head"].w
        delta = (w - me.x)[head]
        if self.reading == "displacement":
            return w.index_add(0, head, -self.alpha * delta), me.mine
        if self.reading in ("displacement_ema", "displacement_sum"):
            keep = 1 - self.alpha if self.reading == "displacement_ema" else 1.0
            m = self.alpha * delta + keep * me.mine["m"]
            return w.index_add(0, head, -m), {"m": m}
        return w, me.mine

    def finish(self, w: Tensor, me: Client) -> tuple[State, State]:
        corrected, mine = self.correct(w, me)
        return {"delta": corrected - me.x}, mine


class ExtraGradient(FedPMVR):
    """One more pass over the client's data after training."""

    after = ("gradient",)

    def correct(self, w: Tensor, me: Client) -> tuple[Tensor, State]:
        head, G = me.part["head"].w, me.carry["gradient"]
        return (w - me.lr * G).index_copy(0, head, w[head] - self.alpha * G[head]), me.mine
