"""FedVARP: the server stores every client's last update and uses it for the clients that are absent.

    Δ_i = (w − θ_i) / η,    v = mean_S (Δ_i − y_i) + mean_N y
    y_i ← Δ_i,    w ← w − s η v

Jhunjhunwala et al., FedVARP: Tackling the Variance Due to Partial Client Participation in Federated Learning, UAI 2022
(arXiv 2207.14130), Algorithm 2. The memory holds gradient units and is used with the current rate;
`memory_unit = "displacement"` uses it with the rate of its own round. y starts at 0, so the first round is FedAvg;
so is every round under full participation.
"""

from __future__ import annotations

from torch import Tensor

from ..core.settings import setting
from ..core.space import Space
from ..core.types import Cohort, State
from ..errors import ConfigError
from .fedavg import FedAvg


class FedVARP(FedAvg):
    paper = "Jhunjhunwala et al., UAI 2022"
    idea = "the server uses the stored last updates of absent clients"
    weighting = "uniform"

    memory_unit: str = setting("what the memory holds", default="gradient", choices=("gradient", "displacement"))

    def check(self) -> None:
        super().check()
        if self.by_samples:
            raise ConfigError(
                f'{self.display_name()}: weighting must be "uniform", got "samples"; '
                "its memory is a plain mean over all clients."
            )

    def divides_by_rate(self) -> str:
        return "current" if self.memory_unit == "gradient" else super().divides_by_rate()

    def server_state(self, space: Space) -> State:
        return {"mean": space.zeros_float64()}

    def memory(self, space: Space) -> State:
        return {"y": space.zeros()}

    def correction(self, new: Tensor, cohort: Cohort) -> Tensor:
        """What the participants add to the remembered mean in this step."""
        return cohort.p.double() @ new

    def aggregate(self, w: Tensor, up: State, cohort: Cohort, server: State) -> tuple[Tensor, State]:
        rate = cohort.lr if self.memory_unit == "gradient" else 1.0
        y = up["delta"] / rate  # downhill, in the memory's unit; server["y"] holds the participants' rows
        new = y.double() - server["y"]  # in float64, so that the running mean stays the mean of the rows
        step = self.correction(new, cohort) + server["mean"]
        return (w + self.scale(cohort) * rate * step).to(w.dtype), {
            "y": y,
            "mean": server["mean"] + new.sum(0) / cohort.clients,
        }
