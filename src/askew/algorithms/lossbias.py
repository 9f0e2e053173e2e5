"""Loss-biased FedAvg: clients that still do badly on their validation data weigh more.

    w ← Σ_S ℓ_i θ_i / Σ_S ℓ_j,    ℓ_i: client i's validation loss

Moroni, Tereshko, course project report (MLDL24). Report and code differ: the code measures the loss once, after the
last step (`measure = "final"`, default), the report averages it over the local steps (`mean_over_steps`). A client too
small for a validation part reports its training loss. Sample counts are in none of these weights, so `weighting` has no
effect; it is accepted, because published runs name it, and the run's note says so.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ..core.algorithm import Algorithm
from ..core.settings import setting
from ..core.space import Space
from ..core.types import Client, Cohort, State
from .fedavg import FedAvg


class LossBias(FedAvg):
    title = "Loss-biased FedAvg"
    paper = "Moroni, Tereshko (MLDL24)"
    idea = "weigh clients by their validation loss"
    combines = "reports"
    needs = ("validation",)
    after: ClassVar[tuple[str, ...]] = ("validation",)

    measure: str = setting(
        "when the validation loss is measured", default="final", choices=("final", "mean_over_steps")
    )

    def variants(self) -> tuple[type[Algorithm], ...]:
        return (MeanOverSteps,) if self.measure == "mean_over_steps" else ()

    def remark(self, space: Space) -> str:
        return "" if self.by_samples else "weighting has no effect here: clients weigh by their validation loss."

    def finish(self, theta: Tensor, client: Client) -> tuple[State, State]:
        return {"delta": theta - client.w, "validation": client.carry["validation"]}, client.state

    def weights(self, up: State, cohort: Cohort) -> Tensor:
        loss = up["validation"].clamp(min=0)
        return loss / loss.sum() if bool(loss.sum() > 0) else torch.full_like(loss, 1 / len(loss))


# variants -----------------------------------------------------------------------------------------------------------


class MeanOverSteps(LossBias):
    """The report's way: after every local step."""

    after = ()
    each = ("validation",)
