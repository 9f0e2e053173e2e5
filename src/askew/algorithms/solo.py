"""SOLO: every client trains alone; nothing is sent.

    v ← ρ v + g(θ_i),    θ_i ← θ_i − η v        ρ: local momentum; v is kept from round to round

The reference "local only" of FedPDC (Zhang, Zhang): each client's own model is measured on the common test set and the
mean over clients is reported. A round is a client's local training of that round; with `local.epochs = 1` a schedule
runs over epochs. Left out of the mean are clients without samples and, where not all take part, clients that have not
trained yet: their model is the common start, which says nothing about training alone. The mean counts every other
client once, whatever its size.
"""

from __future__ import annotations

from torch import Tensor

from ..core.algorithm import Algorithm
from ..core.space import Space
from ..core.types import Client, Cohort, Part, State


class Solo(Algorithm):
    title = "SOLO"
    paper = "reference; FedPDC's SOLO"
    idea = "every client trains alone"
    combines = "nothing"
    own_weights = "nothing is averaged"

    def client_state(self, space: Space) -> State:
        return {"momentum": space.zeros()}

    def private(self, space: Space) -> Part:
        return space.whole_part()

    def evaluates(self) -> str:
        return "clients"

    def carry(self, client: Client) -> State:
        return {"momentum": client.state["momentum"]}

    def finish(self, theta: Tensor, client: Client) -> tuple[State, State]:
        return {}, {"momentum": client.carry["momentum"]}

    def aggregate(self, w: Tensor, up: State, cohort: Cohort, server: State) -> tuple[Tensor, State]:
        return w, server
