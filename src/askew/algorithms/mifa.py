"""MIFA: the mean of every client's last update, the participants' renewed first.

    y_i ← (w − θ_i) / η,    w ← w − s η mean_N y

Gu et al., Fast Federated Learning in the Presence of Arbitrary Device Unavailability, NeurIPS 2021 (arXiv 2106.04159),
Algorithm 1. In the paper every client answers once before the first step; here y starts at 0 and the first steps are
shorter by the share of clients that have taken part so far.
"""

from __future__ import annotations

from torch import Tensor

from ..core.types import Cohort
from .fedvarp import FedVARP


class MIFA(FedVARP):
    paper = "Gu et al., NeurIPS 2021"
    idea = "average every client's last update"

    def correction(self, new: Tensor, cohort: Cohort) -> Tensor:
        return new.sum(0) / cohort.clients
