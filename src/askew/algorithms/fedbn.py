"""FedBN: batch-norm layers, weights and statistics, stay with their client; the rest is FedAvg.

Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021 (arXiv 2102.07623).
There is no single global model. `eval = "clients"` measures each client's own model and averages over clients
(default); "server_mean" puts the mean of the clients' batch norm into the server's model, for the evaluation only;
"server_init" leaves the server's as it began, which is what the authors' code leaves in the server's model. Batch norm
is found by the layer's type. Equal weights, as in the authors' code.
"""

from __future__ import annotations

from ..core.settings import setting
from ..core.space import BATCH_NORMS, Space
from ..core.types import Part
from .fedavg import FedAvg


class FedBN(FedAvg):
    paper = "Li et al., ICLR 2021"
    idea = "batch-norm layers stay with their client"
    weighting = "uniform"

    eval: str = setting(
        "whose batch norm is evaluated", default="clients", choices=("clients", "server_mean", "server_init")
    )

    def private(self, space: Space) -> Part:
        return space.layers_of_type(*BATCH_NORMS)

    def evaluates(self) -> str:
        return {"clients": "clients", "server_mean": "mean", "server_init": "global"}[self.eval]

    def remark(self, space: Space) -> str:
        if self.private(space).empty:
            return "the network has no batch-norm layer, so FedBN is FedAvg with equal weights here."
        return ""
