"""FedDPC: updates lose their component along the previous global update and are scaled up again.

    r_i = δ_i − (⟨δ_i, d⟩ / ⟨d, d⟩) d          d: the previous global update
    z_i = (λ + ‖δ_i‖ / ‖r_i‖) r_i
    w ← w + s · mean_S z_i,    d ← mean_S z_i

Sen, Nag, FedDPC: handling data heterogeneity and partial client participation in federated learning; Eqs. 2–4 and
Algorithm 1, whose line 19 prints one norm twice and which lacks the aggregation: Eqs. 3 and 4 supply both. Written in
displacements: rescaling d changes nothing, so this equals the paper's gradient units. The paper gives no server rate;
s = 1 is η_g = η_l. In the first round nothing is projected and the step is (1 + λ) times FedAvg's: compare with
FedAvg at `server_scale` = 1 + λ. Ablations: `scaling = false` takes z_i = r_i; without both it is two-sided FedAvg.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.algebra import dot, norm
from ..core.settings import setting
from ..core.space import Space
from ..core.types import Cohort, State
from ..errors import ConfigError
from .fedavg import FedAvg

PARALLEL = 1e-6  # a residual this small relative to its update has no direction of its own


class FedDPC(FedAvg):
    paper = "Sen, Nag"
    idea = "project updates off the previous global one, then rescale them"
    weighting = "uniform"

    lam: float = setting("λ, added to the scaling factor", default=1.0, hint="the paper sweeps −0.5 to 3 and uses 1.")
    projection: bool = setting("remove the component along the previous update", default=True)
    scaling: bool = setting("scale the residual by λ + ‖δ‖/‖r‖", default=True)
    max_ratio: float | None = setting("cap on ‖δ‖/‖r‖; left out: none", default=None, least=1)

    def check(self) -> None:
        super().check()
        if self.scaling and not self.projection:
            raise ConfigError(
                "FedDPC: scaling without projection is not defined by the paper; set scaling = false too, or projection = true."
            )

    def server_state(self, space: Space) -> State:
        return {"prev": space.zeros(), "ratio": space.scalar(), "undefined": space.scalar(), "turn": space.scalar()}

    def aggregate(self, x: Tensor, up: State, cohort: Cohort, server: State) -> tuple[Tensor, State]:
        delta, d = up["delta"], server["prev"]
        r = delta
        if self.projection:
            length = dot(d, d)
            there = (length > 0) & (length < torch.inf)
            way, length = torch.where(there, d, 0.0), torch.where(there, length, 1.0)
            for _ in range(2):  # the second time removes what rounding left of the first
                r = r - torch.outer((dot(r, way) / length).to(r.dtype), way)
        length, left = norm(delta), norm(r)
        defined = left > PARALLEL * length
        ratio = torch.where(defined, length / left, 0.0)
        if self.max_ratio is not None:
            ratio = ratio.clamp(max=self.max_ratio)
        factor = torch.where(defined, self.lam + ratio if self.scaling else 1.0, 0.0).to(r.dtype)
        z = self.weights(up, cohort) @ (factor[:, None] * r)
        angle = dot(z, d) / (norm(z) * norm(d)).clamp(min=torch.finfo(torch.float64).tiny)  # 0 where there is none
        told = {"ratio": ratio.max().to(x.dtype), "undefined": (~defined).sum().to(x.dtype), "turn": angle.to(x.dtype)}
        return x + self.scale(cohort) * z, told | {"prev": torch.where(norm(z) > 0, z, d)}
