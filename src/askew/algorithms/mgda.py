"""MGDA, federated: step along the shortest convex combination of the clients' normalised gradients.

    u_i = Ḡ_i / ‖Ḡ_i‖,    Ḡ_i the mean of the K_i mini-batch gradients along client i's local steps
    α = argmin over the simplex of ‖Σ α_i u_i‖²,    u = Σ α_i u_i,    w ← w − η_s (u + wd · w)

Moroni, Tereshko, course project report (MLDL24), after Désidéri, Multiple-gradient descent algorithm, 2012. The length
of u (at most 1) is kept; wd is `server_decay`. The report mentions one back-propagation (`single_gradient`: the full
gradient at w, what the descent guarantee supposes), its code averages over the steps (default). The minimum-norm point
is exact (Wolfe); `solver = "slsqp"` is the report's route. ‖u‖ < 1e-8 is Pareto-stationary: no step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.algebra import norm
from ..core.algorithm import Algorithm
from ..core.settings import setting
from ..core.space import Space
from ..core.types import Client, Cohort, State
from ._simplex import min_norm_point, slsqp

STATIONARY = 1e-8


class MGDA(Algorithm):
    paper = "Moroni, Tereshko (MLDL24); Désidéri, 2012"
    idea = "step where no client's loss grows"
    combines = "directions"
    weighting = "uniform"
    own_weights = "the weights are those of the shortest combination of the gradients"

    server_lr: float = setting("server rate η_s", default=1.0, above=0)
    server_decay: float = setting("weight decay of the server's step", default=0.0, least=0)
    solver: str = setting("how the minimum-norm point is found", default="wolfe", choices=("wolfe", "slsqp"))
    single_gradient: bool = setting("use the full gradient at w instead of the mean along the steps", default=False)

    def variants(self) -> tuple[type[Algorithm], ...]:
        return (SingleGradient,) if self.single_gradient else ()

    def server_state(self, space: Space) -> State:
        return {"norm": space.scalar(), "stationary": space.scalar()}

    def carry(self, client: Client) -> State:
        return {"gradient": torch.zeros_like(client.w)}

    def note(self, theta: Tensor, g: Tensor, d: Tensor, client: Client) -> State:
        return {"gradient": client.carry["gradient"] + g / client.steps}

    def finish(self, theta: Tensor, client: Client) -> tuple[State, State]:
        return {"gradient": client.carry["gradient"]}, client.state

    def aggregate(self, w: Tensor, up: State, cohort: Cohort, server: State) -> tuple[Tensor, State]:
        length = norm(up["gradient"])
        moving = up["gradient"][length > 0].double() / length[length > 0, None]
        if len(moving) == 0:
            return w, {
                "norm": torch.zeros_like(server["norm"]),
                "stationary": torch.ones_like(server["stationary"]),
            }
        gram = (moving @ moving.T).cpu().numpy()
        alpha = torch.from_numpy((min_norm_point if self.solver == "wolfe" else slsqp)(gram)).to(moving)
        u = alpha @ moving
        size = norm(u)
        stationary = size < STATIONARY
        step = self.server_lr * (u.to(w.dtype) + self.server_decay * w)
        record = {"norm": size.to(w.dtype), "stationary": stationary.to(w.dtype)}
        return (w if bool(stationary) else w - step), record


# variants -----------------------------------------------------------------------------------------------------------


class SingleGradient(MGDA):
    """Nobody trains: the full gradient at w goes up."""

    before = ("gradient",)
    trains = False

    def carry(self, client: Client) -> State:
        return {}
