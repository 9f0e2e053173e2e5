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
from ..core.algorithm import Algorithm
from ..core.settings import setting
from ..core.space import Space
from ..core.types import Cohort, State
from ..errors import ConfigError
from .fedavg import FedAvg

PARALLEL = 1e-6  # of an update's length: a residual this short has no direction of its own


class FedDPC(FedAvg):
    paper = "Sen, Nag"
    idea = "project updates off the previous global one, then rescale them"
    weighting = "uniform"

    lam: float = setting(
        "λ, added to the scaling factor",
        default=1.0,
        hint="the paper sweeps −0.5 to 3 and uses 1.",
        tries=(0.0, 0.5, 1.0),
    )
    projection: bool = setting("remove the component along the previous update", default=True)
    scaling: bool = setting("scale the residual by λ + ‖δ‖/‖r‖", default=True)
    max_ratio: float | None = setting("cap on ‖δ‖/‖r‖; left out: none", default=None, least=1)

    def server_state(self, space: Space) -> State:
        return {"prev": space.zeros(), "ratio": space.scalar(), "undefined": space.scalar(), "turn": space.scalar()}

    def aggregate(self, w: Tensor, up: State, cohort: Cohort, server: State) -> tuple[Tensor, State]:
        delta, d = up["delta"], server["prev"]
        r = self.residual(delta, d)
        ratio, defined = length_ratio(delta, r, self.max_ratio)
        factor = torch.where(defined, self.factor(ratio), 0.0).to(r.dtype)
        z = self.weights(up, cohort) @ (factor[:, None] * r)
        state = {**self.record(ratio, defined, z, d), "prev": torch.where(norm(z) > 0, z, d)}
        return w + self.scale(cohort) * z, state

    def residual(self, delta: Tensor, d: Tensor) -> Tensor:
        """r_i = δ_i − (⟨δ_i, d⟩ / ⟨d, d⟩) d, rows [C, P]; δ_i where there is no d yet."""
        return remove_component(delta, d)

    def factor(self, ratio: Tensor) -> Tensor:
        """λ + ‖δ_i‖ / ‖r_i‖."""
        return self.lam + ratio

    def record(self, ratio: Tensor, defined: Tensor, z: Tensor, d: Tensor) -> State:
        """Numbers for the round's record: the largest ‖δ_i‖ / ‖r_i‖, how many are undefined, the cosine of z and d."""
        record = {"ratio": ratio.max(), "undefined": (~defined).sum(), "turn": cosine(z, d)}
        return {name: value.to(d.dtype) for name, value in record.items()}

    def check(self) -> None:
        super().check()
        if self.scaling and not self.projection:
            raise ConfigError(
                "FedDPC: scaling without projection is not defined by the paper; set scaling = false too, "
                "or projection = true."
            )

    def variants(self) -> tuple[type[Algorithm], ...]:
        return (*(() if self.scaling else (Unscaled,)), *(() if self.projection else (Unprojected,)))


# guards -------------------------------------------------------------------------------------------------------------


def remove_component(rows: Tensor, d: Tensor) -> Tensor:
    """Rows without their component along d; unchanged where d is zero, or too long for its square to be a number."""
    square = dot(d, d)
    usable = (square > 0) & (square < torch.inf)
    d, square = torch.where(usable, d, 0.0), torch.where(usable, square, 1.0)
    for _ in range(2):  # the second time removes what rounding left of the first
        rows = rows - torch.outer((dot(rows, d) / square).to(rows.dtype), d)
    return rows


def length_ratio(delta: Tensor, r: Tensor, most: float | None) -> tuple[Tensor, Tensor]:
    """‖δ_i‖ / ‖r_i‖ [C], at most `most`, and where it is defined; 0 where the residual has no direction of its own."""
    length, left = norm(delta), norm(r)
    defined = left > PARALLEL * length
    ratio = torch.where(defined, length / left, 0.0)
    return ratio if most is None else ratio.clamp(max=most), defined


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """The cosine of the angle between two vectors; 0 where there is none."""
    return dot(a, b) / (norm(a) * norm(b)).clamp(min=torch.finfo(torch.float64).tiny)


# variants -----------------------------------------------------------------------------------------------------------


class Unscaled(FedDPC):
    """z_i = r_i."""

    def factor(self, ratio: Tensor) -> Tensor:
        return torch.ones_like(ratio)


class Unprojected(FedDPC):
    """r_i = δ_i."""

    def residual(self, delta: Tensor, d: Tensor) -> Tensor:
        return delta
