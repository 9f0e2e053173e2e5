"""FedGA: clients start displaced along the deviation of their gradient, which aligns gradients implicitly.

    θ_i starts at w + β (G_i − Ḡ),    then plain steps,    w ← w + η_g mean_S (θ_i − w)

Dandi, Barba, Jaggi, Implicit Gradient Alignment in Distributed and Federated Learning, AAAI 2022 (arXiv 2106.13897).
`form = "exact"`: G_i is client i's gradient at w, Ḡ the participants' mean: one more exchange a round, a phase of its
own. `form = "memory"`: G_i is the client's last mean gradient, measured from its displaced start, and Ḡ the last global
update in the same unit; a client that never took part starts at w. FedDPC's comparison uses the memory form.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.algorithm import Algorithm
from ..core.settings import setting
from ..core.space import Space
from ..core.types import Client, Cohort, State
from .fedavg import FedAvg


class Probe(Algorithm):
    """A phase: everybody sends the gradient of its data at x; x stays."""

    before = ("gradient",)
    trains = False
    weighting = "uniform"

    def finish(self, w: Tensor, me: Client) -> tuple[State, State]:
        return {"gradient": me.carry["gradient"]}, me.mine

    def aggregate(self, x: Tensor, up: State, cohort: Cohort, server: State) -> tuple[Tensor, State]:
        return x, server | {"g": cohort.p @ up["gradient"]}


class FedGA(FedAvg):
    paper = "Dandi, Barba, Jaggi, AAAI 2022"
    idea = "displaced starts align the clients' gradients"
    weighting = "uniform"
    broadcast = ("g",)

    beta: float = setting("size β of the displacement", default=0.1, least=0, hint="papers use 0.001–1, try 0.1.")
    form: str = setting("gradients measured anew, or remembered", default="exact", choices=("exact", "memory"))

    def phases(self) -> tuple[Algorithm, ...]:
        return (Probe(), self) if self.form == "exact" else (self,)

    def server_state(self, space: Space) -> State:
        return {"g": space.zeros()}

    def client_state(self, space: Space) -> State:
        return {"g": space.zeros(), "seen": space.scalar()} if self.form == "memory" else {}

    def begin(self, me: Client) -> Tensor:
        if self.form == "exact":
            return me.x + self.beta * (me.carry["gradient"] - me.server["g"])
        return me.x + self.beta * me.mine["seen"] * (me.mine["g"] - me.server["g"])

    def finish(self, w: Tensor, me: Client) -> tuple[State, State]:
        up = {"delta": w - me.x}
        if self.form == "exact":
            return up, me.mine
        return up, {"g": (self.begin(me) - w) / (me.tau * me.lr), "seen": torch.ones_like(me.mine["seen"])}

    def aggregate(self, x: Tensor, up: State, cohort: Cohort, server: State) -> tuple[Tensor, State]:
        x, _ = super().aggregate(x, up, cohort, server)
        g = server["g"] if self.form == "exact" else -(cohort.p / (cohort.tau * cohort.lr)) @ up["delta"]
        return x, {"g": g}
