"""FedAMD: some participants send a large-batch gradient (anchors), the others train along it (miners).

    with probability p a participant is an anchor:   g_i ← ∇L_i(w), kept at the server
    otherwise it is a miner, which starts from v = mean_N g_i:
    v ← v − g(θ_prev) + g(θ)  on the same batch,   θ ← θ − η v            θ_prev: the model one step before
    w ← w + s · mean of δ_i over the miners

Wu et al., Anchor Sampling for Federated Learning with Partial Client Participation, ICML 2023 (arXiv 2206.05891),
Algorithm 1, constant probability. Miners start from the mean as it was before this round's anchors. The authors' code
asks every client for a gradient before the first round; here the memory starts at 0. A client's role is
a random draw of its own; both kinds of work are done and one of the two results is sent, so that no role is a special
case of an engine.
"""

from __future__ import annotations

from torch import Tensor

from ..core.algorithm import Gradient
from ..core.settings import setting
from ..core.space import Space
from ..core.types import Client, Cohort, State
from .fedavg import FedAvg


class FedAMD(FedAvg):
    paper = "Wu et al., ICML 2023"
    idea = "anchors set the direction, miners follow it"
    combines = "reports"
    alike = False  # anchors send gradients, miners what they moved by
    weighting = "uniform"
    own_weights = "all miners count alike, and so do all anchors"
    before = ("gradient",)
    broadcast = ("v",)

    anchor: float = setting("probability p of being an anchor", default=0.2, above=0, below=1, tries=(0.1, 0.2, 0.5))

    def server_state(self, space: Space) -> State:
        return {"v": space.zeros_float64()}

    def memory(self, space: Space) -> State:
        return {"g": space.zeros()}

    def carry(self, client: Client) -> State:
        return {"v": client.server["v"], "last": client.w}

    def direction(self, theta: Tensor, grad: Gradient, client: Client) -> Tensor:
        return client.carry["v"] - grad(client.carry["last"]) + grad(theta)

    def note(self, theta: Tensor, g: Tensor, d: Tensor, client: Client) -> State:
        return {"v": d, "last": theta}

    def finish(self, theta: Tensor, client: Client) -> tuple[State, State]:
        # 1 for an anchor; the sum with 0 makes a tensor of the coin, which is a number in some engines
        role = (client.w.new_zeros(()) + client.coin < self.anchor).to(theta.dtype)
        return {
            "message": role * client.carry["gradient"] + (1 - role) * (theta - client.w),
            "anchor": role,
        }, client.state

    def aggregate(self, w: Tensor, up: State, cohort: Cohort, server: State) -> tuple[Tensor, State]:
        anchor, miner = up["anchor"], 1 - up["anchor"]
        change = anchor[:, None] * (up["message"] - server["g"])
        step = (miner / miner.sum().clamp(min=1)) @ up["message"]
        return w + self.scale(cohort) * step, {
            "g": server["g"] + change,
            "v": server["v"] + change.sum(0) / cohort.clients,
        }
