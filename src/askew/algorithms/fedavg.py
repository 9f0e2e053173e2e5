"""FedAvg, also with two-sided learning rates.

    w ← w + s · Σ_S p_i δ_i,   δ_i = θ_i − w

McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017
(arXiv 1602.05629), Algorithm 1. With s ≠ 1 it is generalised FedAvg: Yang, Fang, Liu, ICLR 2021 (arXiv 2101.11203).
The server's rate is given as `server_scale` (s, of displacements) or as `server_lr` (η_g = s·η, of updates in
gradient units), never both. Weights are sample counts, as in the paper; several authors' codes use equal ones
(`weighting = "uniform"`).
"""

from __future__ import annotations

from torch import Tensor

from ..core.algorithm import Algorithm
from ..core.settings import setting
from ..core.types import Cohort, State
from ..errors import ConfigError


class FedAvg(Algorithm):
    paper = "McMahan et al., AISTATS 2017"
    idea = "average the clients' models"

    server_scale: float = setting("factor s on the mean displacement", default=1.0, above=0)
    server_lr: float | None = setting(
        "server rate on updates in gradient units; replaces server_scale", default=None, above=0
    )

    def check(self) -> None:
        if self.server_lr is not None and self.server_scale != 1.0:
            raise ConfigError(
                f"{self.display_name()}: give server_scale or server_lr, not both; "
                "server_lr = server_scale × local.lr. Leave one out."
            )

    def divides_by_rate(self) -> str:
        return "" if self.server_lr is None else "current"

    def scale(self, cohort: Cohort) -> float:
        """s, whichever way it was given."""
        return self.server_scale if self.server_lr is None else self.server_lr / cohort.lr

    def aggregate(self, w: Tensor, up: State, cohort: Cohort, server: State) -> tuple[Tensor, State]:
        return w + self.scale(cohort) * (self.weights(up, cohort) @ up["delta"]), server
