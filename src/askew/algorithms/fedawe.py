"""FedAWE: a client starts from the last average that it was part of, and its update counts for the rounds it missed.

    θ_i starts at x_i,    x_i⁺ = x_i + η_g (t − t_i) (θ_i − x_i)         t_i: the round of its last participation
    w ← mean_S x_i⁺,      x_i ← w and t_i ← t for the participants       at first x_i is the start and t_i = 0

Xiang, Ioannidis, Yeh, Joe-Wong, Su, Efficient Federated Learning against Heterogeneous and Non-stationary Client
Unavailability, NeurIPS 2024 (arXiv 2409.17446), Algorithm 1. The factors t − t_i of a client add up to the rounds so
far (Proposition 1), and averaging keeps the mean of all x_i: so all clients count alike, however uneven their chances
are. With everybody in every round it is FedAvg. After a long absence an update is long, and w may jump: `longest`
limits it as the authors' code does. Batch-norm statistics are those received with w.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.algebra import norm
from ..core.algorithm import Algorithm
from ..core.settings import setting
from ..core.space import Space
from ..core.types import Client, Cohort, State


class FedAWE(Algorithm):
    paper = "Xiang et al., NeurIPS 2024"
    idea = "an update counts for the rounds that its client missed"
    weighting = "uniform"
    broadcast = ("x", "last")
    stale = "an update is relative to the model that was sent with it, so that w would not be the mean of the models"

    server_scale: float = setting("factor η_g on the local update", default=1.0, above=0)
    longest: float | None = setting(
        "largest length of the mean update, before η_g; left out: any", default=None, above=0, hint="the code uses 0.5."
    )
    evaluate_mean: bool = setting("measure the mean of all clients' models instead of w", default=False)

    # In the paper the server sends the new w to the participants at the end of a round, and each stores it as x_i. Here
    # the server stores x_i and sends it with the next request, beside w: the same numbers, with one vector more.

    def memory(self, space: Space) -> State:
        return {"x": space.start.clone(), "last": space.scalar()}

    def begin(self, client: Client) -> Tensor:
        return client.server["x"]

    def finish(self, theta: Tensor, client: Client) -> tuple[State, State]:
        x, echo = client.server["x"], client.round - client.server["last"]  # "adaptive innovation echoing", line 11
        return {"delta": (x - client.w) + self.server_scale * echo * (theta - x)}, client.state

    def aggregate(self, w: Tensor, up: State, cohort: Cohort, server: State) -> tuple[Tensor, State]:
        w = self.average(w, up, cohort, server)
        rows = {"x": w.expand_as(server["x"]), "last": torch.full_like(server["last"], cohort.round)}
        return w, server | rows

    def average(self, w: Tensor, up: State, cohort: Cohort, server: State) -> Tensor:
        """mean_S x_i⁺: "implicit gossiping", lines 15–18."""
        return w + self.weights(up, cohort) @ up["delta"]

    def variants(self) -> tuple[type[Algorithm], ...]:
        return (*((MeanMeasured,) if self.evaluate_mean else ()), *(() if self.longest is None else (Shortened,)))


# variants -----------------------------------------------------------------------------------------------------------


class Shortened(FedAWE):
    """mean_S x_i plus the mean update, of at most this length."""

    def average(self, w: Tensor, up: State, cohort: Cohort, server: State) -> Tensor:
        assert self.longest is not None
        base = self.weights(up, cohort) @ server["x"]
        step, limit = super().average(w, up, cohort, server) - base, self.server_scale * self.longest
        return base + step * (limit / norm(step).clamp(min=limit)).to(step.dtype)


class MeanMeasured(FedAWE):
    """The mean of x_i over all N clients is kept and measured, each counted as in the objective."""

    def server_state(self, space: Space) -> State:
        return {"mean": space.start.double()}

    def aggregate(self, w: Tensor, up: State, cohort: Cohort, server: State) -> tuple[Tensor, State]:
        w, new = super().aggregate(w, up, cohort, server)
        share = (cohort.size if self.by_samples else torch.ones_like(cohort.size)).double() / cohort.clients
        return w, new | {"mean": server["mean"] + share @ (new["x"].double() - server["x"])}

    def models(self, w: Tensor, server: State) -> dict[str, Tensor]:
        return {"global": server["mean"].to(w.dtype)}
