"""FedYogi: FedAdam whose second moment moves by at most (1 − β2) D², V ← V − (1 − β2) D² sign(V − D²).

Reddi et al., Adaptive Federated Optimization, ICLR 2021 (arXiv 2003.00295), Algorithm 2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .fedadam import FedAdam


class FedYogi(FedAdam):
    paper = "Reddi et al., ICLR 2021"
    idea = "Yogi at the server"

    def second_moment(self, V: Tensor, D: Tensor) -> Tensor:
        return V - (1 - self.beta2) * D**2 * torch.sign(V - D**2)
