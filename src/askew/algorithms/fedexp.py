"""FedExP: the server extrapolates as far as the disagreement of the updates allows.

    δ̄ = Σ_S p_i δ_i,    η_g = max(1, Σ_S p_i ‖δ_i‖² / (2 (‖δ̄‖² + ε))),    w ← w + η_g δ̄

Jhunjhunwala, Wang, Joshi, FedExP: Speeding Up Federated Averaging via Extrapolation, ICLR 2023 (arXiv 2301.09604),
Algorithm 1. As in the authors' code ε shrinks with the squared rate under a decaying one; the code also adds m·ε
(`eps_times_m`) and evaluates the mean of the last two iterates (`evaluate_average_of_last_two`).
"""

from __future__ import annotations

from torch import Tensor

from ..core.algebra import dot
from ..core.algorithm import Algorithm
from ..core.settings import setting
from ..core.space import Space
from ..core.types import Cohort, State


class FedExP(Algorithm):
    paper = "Jhunjhunwala, Wang, Joshi, ICLR 2023"
    idea = "extrapolate by the updates' disagreement"
    combines = "rows"

    eps: float = setting(
        "ε, in squared displacements", default=0.001, least=0, hint="papers use 0.001–1.", tries=(0.001, 0.01, 0.1)
    )
    eps_times_m: bool = setting("add m·ε, as the authors' code does", default=False)
    evaluate_average_of_last_two: bool = setting(
        "measure the mean of the last two iterates, as the code does", default=False
    )

    def server_state(self, space: Space) -> State:
        return {"last": space.start.clone(), "eta_g": space.scalar(1.0)}

    def aggregate(self, w: Tensor, up: State, cohort: Cohort, server: State) -> tuple[Tensor, State]:
        p = self.weights(up, cohort)
        mean = p @ up["delta"]
        eps = self.eps * (cohort.lr / cohort.lr0) ** 2 * (len(p) if self.eps_times_m else 1)
        below = 2 * (dot(mean, mean) + eps)
        ratio = (p.double() @ dot(up["delta"], up["delta"])) / below if bool(below > 0) else below + 1
        eta_g = ratio.clamp(min=1.0).to(w.dtype)
        new = w + eta_g * mean
        return new, {"last": w if cohort.round > 1 else new, "eta_g": eta_g}  # the start is no iterate

    def models(self, w: Tensor, server: State) -> dict[str, Tensor]:
        return {"mean_of_two": (w + server["last"]) / 2} if self.evaluate_average_of_last_two else {"global": w}
