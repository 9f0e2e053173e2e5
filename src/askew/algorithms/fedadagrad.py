"""FedAdagrad: FedAdam with a second moment that only grows, V ← V + D², and no momentum by default.

Reddi et al., Adaptive Federated Optimization, ICLR 2021 (arXiv 2003.00295), Algorithm 2.
"""

from __future__ import annotations

from torch import Tensor

from .fedadam import FedAdam


class FedAdagrad(FedAdam):
    paper = "Reddi et al., ICLR 2021"
    idea = "Adagrad at the server"
    beta1 = 0.0

    def second_moment(self, V: Tensor, D: Tensor) -> Tensor:
        return V + D**2
