"""FedAU: every update is multiplied by the client's mean interval between participations, an estimate of 1/p_i.

    w ← w + s · (1/N) Σ_S ω_i δ_i,    ω_i: the mean of client i's past intervals, 1 before the first one ends

Wang, Ji, A Lightweight Method for Tackling Unknown Participation Statistics in Federated Averaging, ICLR 2024 (arXiv
2306.03401), Algorithm 2, as in the authors' code. An interval is the number of rounds from one participation to the
next; it also ends after `cutoff` rounds without one. The step is divided by N and not by the cohort; with everybody in
every round it is FedAvg's. With `weighting = "samples"` the mean over all clients is that by sample counts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.settings import setting
from ..core.space import Space
from ..core.types import Cohort, State
from .fedavg import FedAvg


class FedAU(FedAvg):
    paper = "Wang, Ji, ICLR 2024"
    idea = "weights by the mean interval between participations"
    weighting = "uniform"

    cutoff: int | None = setting(
        "rounds K after which an interval ends without a participation; left out: never",
        default=None,
        least=1,
        hint="the paper uses 50.",
    )

    def memory(self, space: Space) -> State:
        return {"last": space.scalar(), "intervals": space.scalar()}

    def aggregate(self, w: Tensor, up: State, cohort: Cohort, server: State) -> tuple[Tensor, State]:
        cut = self.cut_intervals(server["last"], cohort)
        count = server["intervals"] + cut
        total = server["last"] + (0.0 if self.cutoff is None else self.cutoff * cut)
        omega = torch.where(count > 0, total / count.clamp(min=1), 1.0).to(w.dtype)
        present = cohort.size.sum() if self.by_samples else len(omega)  # of the N that all clients together count
        step = (self.weights(up, cohort) * omega) @ up["delta"]
        now = torch.full_like(server["last"], cohort.round)
        return w + self.scale(cohort) * (present / cohort.clients) * step, {"last": now, "intervals": count + 1}

    def cut_intervals(self, last: Tensor, cohort: Cohort) -> Tensor:
        """How many of each participant's intervals the cutoff ended since its last participation [C]."""
        if self.cutoff is None:
            return torch.zeros_like(last)
        return torch.div(cohort.round - 1 - last, self.cutoff, rounding_mode="floor")


# the mean interval --------------------------------------------------------------------------------------------------
#
# A client that takes part independently with chance p has intervals of mean (1 − (1 − p)^K) / p for the cutoff K, which
# is 1/p without one: the step is then unbiased for the mean over all N clients, however uneven their chances are.
#
# The first interval begins with the first round, and the interval that a participation ends counts from the client's
# next one on. Intervals follow each other without a gap. So the server keeps two numbers of a client: the round t_i of
# its last participation, which is the sum of the intervals, and their number M_i. What the cutoff adds is computed when
# the client comes again, in round t: c = ⌊(t − 1 − t_i) / K⌋ intervals of length K ended meanwhile, and
# ω_i = (t_i + c K) / (M_i + c).
