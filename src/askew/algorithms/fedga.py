"""FedGA: clients start displaced along the deviation of their gradient, which aligns gradients implicitly.

    θ_i starts at w + β (G_i − Ḡ),    then plain steps,    w ← w + s · mean_S (θ_i − w)

Dandi, Barba, Jaggi, Implicit Gradient Alignment in Distributed and Federated Learning, AAAI 2022 (arXiv 2106.13897).
G_i is client i's gradient at w, Ḡ the participants' mean: they are measured in a phase of its own. `form = "memory"`,
FedDPC's comparison, needs no such phase: it takes the client's last mean gradient and the last global update instead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.algorithm import Algorithm
from ..core.settings import setting
from ..core.space import Space
from ..core.types import Client, Cohort, State
from ..errors import ConfigError
from ._mean_gradient import cohort_mean_gradient, length_setting, mean_gradient
from .fedavg import FedAvg


class FedGA(FedAvg):
    paper = "Dandi, Barba, Jaggi, AAAI 2022"
    idea = "displaced starts align the clients' gradients"
    weighting = "uniform"
    broadcast = ("g",)

    beta: float = setting(
        "size β of the displacement",
        default=0.1,
        least=0,
        hint="papers use 0.001–1, try 0.1.",
        tries=(0.01, 0.1, 1.0),
    )
    form: str = setting("gradients measured anew, or remembered", default="exact", choices=("exact", "memory"))
    length: str = length_setting('the gradients of form = "memory"')

    def check(self) -> None:
        super().check()
        if self.form != "memory" and self.length != "nova":
            raise ConfigError('FedGA: length is a setting of form = "memory"; set that too, or leave length out.')

    def phases(self) -> tuple[Algorithm, ...]:
        return (Probe(), self)

    def server_state(self, space: Space) -> State:
        return {"g": space.zeros()}

    def begin(self, client: Client) -> Tensor:
        return client.w + self.beta * (client.carry["gradient"] - client.server["g"])

    def variants(self) -> tuple[type[Algorithm], ...]:
        return (Remembered,) if self.form == "memory" else ()


class Probe(Algorithm):
    """A phase: everybody sends the gradient of its data at w; w stays."""

    before = ("gradient",)
    trains = False
    weighting = "uniform"

    def finish(self, theta: Tensor, client: Client) -> tuple[State, State]:
        return {"gradient": client.carry["gradient"]}, client.state

    def aggregate(self, w: Tensor, up: State, cohort: Cohort, server: State) -> tuple[Tensor, State]:
        return w, server | {"g": cohort.p @ up["gradient"]}


# variants -----------------------------------------------------------------------------------------------------------


class Remembered(FedGA):
    """form = "memory": G_i is the client's last mean gradient, measured from its displaced start, and Ḡ the last global
    update in the same unit. A client that never took part starts at w.
    """

    def divides_by_rate(self) -> str:
        return "current"

    def phases(self) -> tuple[Algorithm, ...]:
        return (self,)

    def client_state(self, space: Space) -> State:
        return {"g": space.zeros(), "seen": space.scalar()}

    def begin(self, client: Client) -> Tensor:
        return client.w + self.beta * client.state["seen"] * (client.state["g"] - client.server["g"])

    def finish(self, theta: Tensor, client: Client) -> tuple[State, State]:
        g = mean_gradient(self.begin(client), theta, client, self.length)
        return {"delta": theta - client.w}, {"g": g, "seen": torch.ones_like(client.state["seen"])}

    def aggregate(self, w: Tensor, up: State, cohort: Cohort, server: State) -> tuple[Tensor, State]:
        w, _ = super().aggregate(w, up, cohort, server)
        return w, {"g": cohort_mean_gradient(up["delta"], cohort, self.length)}
