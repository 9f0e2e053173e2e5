"""FedBuff: clients work without waiting for each other; the server steps when a buffer of answers is full.

    w ← w + s · (1/K) Σ_buffer (1 + τ_i)^{−a} δ_i,   δ_i = θ_i − the model from which client i started

Nguyen et al., Federated Learning with Buffered Asynchronous Aggregation, AISTATS 2022 (arXiv 2106.06639), Algorithm 1.
τ_i is the staleness: how many steps the server took between the model from which a client started and the step that
uses its answer. With a = 1/2 an answer counts 1/√(1 + τ_i); `staleness = "constant"` counts all alike. The sum is
divided by the number K of answers and not by the sum of their factors, so that a step from stale answers is short.

The buffer is that of the virtual clock: `time.wait = "buffer"`, with `time.buffer` answers for a step and
`time.at_work` clients at work. Without stale answers it is FedAvg with equal weights. The authors' library, FLSim, adds
up instead of dividing by K, which their server's rate absorbs, and divides all factors by that of a staleness of 1.
"""

from __future__ import annotations

from torch import Tensor

from ..core.settings import setting
from ..core.types import Cohort, State
from ._staleness import polynomial
from .fedavg import FedAvg


class FedBuff(FedAvg):
    paper = "Nguyen et al., AISTATS 2022"
    idea = "the server steps when a buffer of answers is full; stale ones count less"
    weighting = "uniform"

    staleness: str = setting(
        "how a stale answer counts: as a fresh one, or (1 + τ)^−exponent",
        default="polynomial",
        choices=("constant", "polynomial"),
    )
    exponent: float = setting("a, with staleness = polynomial", default=0.5, least=0)

    def aggregate(self, w: Tensor, up: State, cohort: Cohort, server: State) -> tuple[Tensor, State]:
        p = self.weights(up, cohort)
        if self.staleness == "polynomial":
            p = p * polynomial(cohort.staleness.to(p.dtype), self.exponent)
        return w + self.scale(cohort) * (p @ up["delta"]), server
