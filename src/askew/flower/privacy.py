"""What the server may learn of a client's upload: clipped and noisy, or only in a sum. The page's table [privacy]."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from ..core.settings import Settings, setting
from ..core.types import Cohort, State
from ..engine.server import Server
from ..errors import ConfigError


class Privacy(Settings):
    """How uploads are hidden from the server, and the model's readers."""

    title = "privacy"
    clip: float = setting(
        "largest length of a client's upload, longer ones are shortened; 0: as long as they are", default=0.0, least=0
    )
    noise: float = setting("standard deviation of the Gaussian noise, as a multiple of clip", default=0.0, least=0)
    where: str = setting(
        "who adds it: the server, to the sum, or every client, to its upload",
        default="server",
        choices=("server", "client"),
    )
    secure: bool = setting("secure aggregation: the server learns sums of uploads and no upload", default=False)
    fewest: int = setting("clients whose sum the server may learn, at least", default=3, least=2)
    delta: float = setting("δ at which ε is told", default=1e-5, above=0, below=1)

    def check(self) -> None:
        if self.noise and not self.clip:
            raise ConfigError(
                f"privacy: noise = {self.noise:g} needs a largest length to be measured by; set clip, for example to 1.0."
            )

    @property
    def on(self) -> bool:
        return self.secure or self.clip > 0

    @property
    def local(self) -> bool:
        return self.noise > 0 and self.where == "client"

    @property
    def central(self) -> bool:
        return self.noise > 0 and self.where == "server"

    def epsilon(self, rounds: int) -> float:
        """Of a client that takes part in so many rounds, at δ: Gaussian noise composed as concentrated differential privacy.

        ε = T / (2 z²) + √(2 T ln(1/δ)) / z.  Bun, Steinke, 2016 (arXiv 1605.02065), Propositions 1.3 and 1.6, Lemma 1.7. Nothing is
        taken off for rounds in which others were drawn.
        """
        return (
            rounds / (2 * self.noise**2) + math.sqrt(2 * rounds * math.log(1 / self.delta)) / self.noise
            if self.noise
            else math.inf
        )

    def remark(self, rounds: int) -> str:
        """What the run's facts say."""
        told = [f"uploads of length {self.clip:g} at most"] if self.clip else []
        if self.noise:
            told.append(f"noise of {self.noise:g} times that by {'each client' if self.local else 'the server'}")
            told.append(f"ε ≤ {self.epsilon(rounds):.3g} at δ = {self.delta:g} for a client in all {rounds} rounds")
        return ", ".join([*told, *(["secure aggregation"] if self.secure else [])])


def clipped(up: State, most: float) -> State:
    """An upload, all tensors together no longer than this."""
    length = math.sqrt(sum(float(t.double().square().sum()) for t in up.values()))
    return {n: t * (most / length) if length > most else t for n, t in up.items()}


def noisy(t: Tensor, std: float) -> Tensor:
    """Noise comes from the machine, not from the run's seed: who can draw it again can take it away."""
    return t + torch.from_numpy(np.random.default_rng().normal(0.0, std, tuple(t.shape))).to(t)


MANY = 8  # clients by which a method is tried


# which methods fit ----------------------------------------------------------------------------------------------


def sums_only(server: Server, blank: list[State]) -> bool:
    """Does the server's step depend on the uploads through their weighted mean alone?

    Tried with random uploads, unequal clients and a random state: replacing every upload by the mean must change nothing.
    """
    alg, rng = server.alg, np.random.default_rng(0)
    if server.memory.start or "public" in alg.needs or alg.pooled:
        return False

    def draw(t: Tensor) -> Tensor:
        return torch.from_numpy(rng.uniform(0.5, 1.5, tuple(t.shape)))

    size, steps, tau, loss = (draw(torch.empty(MANY)) for _ in range(4))
    p = size / size.sum() if alg.by_samples else torch.full_like(size, 1 / MANY)
    cohort = Cohort(p, steps, tau, size, loss, None, 0.1, 0.2, 3, 5)
    x, state = draw(server.w), {n: draw(v) for n, v in server.state.items()}
    alike = cohort._replace(loss=loss.mean().expand_as(loss))
    for phase, like in zip(server.phases, blank, strict=True):
        up = {n: torch.from_numpy(rng.normal(size=(MANY, *t.shape))) for n, t in like.items()}
        mean = {n: torch.tensordot(p, t, 1).expand_as(t) for n, t in up.items()}
        (one, told), (other, told_too) = (
            phase.aggregate(x, rows, who, dict(state)) for rows, who in ((up, cohort), (mean, alike))
        )
        pairs = [
            (one, other),
            (phase.weights(up, cohort), phase.weights(mean, alike)),
            *((told[n], told_too[n]) for n in told),
        ]
        if not all(torch.allclose(a.double(), b.double(), rtol=1e-6, atol=1e-9) for a, b in pairs):
            return False
    return True


def check_fit(privacy: Privacy, server: Server, blank: list[State]) -> None:
    """Refuse a method, a network or weights that this protection does not fit."""
    name = server.alg.called()
    if (privacy.secure or privacy.central) and not sums_only(server, blank):
        raise ConfigError(
            f"{name}: its server's step needs every client's upload, not their mean alone, which is all that "
            f"{'secure aggregation' if privacy.secure else 'noise on the sum'} leaves; use FedAvg or another that docs/privacy.md lists."
        )
    if privacy.clip and (
        server.alg.client_state(server.space) or any({*up} - {"delta"} for up in blank) or len(blank) > 1
    ):
        raise ConfigError(
            f"{name}: clipping changes what the server receives, and its clients keep or send more than their update; "
            "use FedAvg, or another method that docs/privacy.md lists."
        )
    if privacy.noise and server.private.buffer_indices.numel() < server.space.Q:
        raise ConfigError(
            "privacy: noise protects no batch-norm statistics, which would travel beside; use a network with another norm."
        )
    if privacy.central and server.alg.by_samples:
        raise ConfigError(
            f'{name}: noise on the sum is measured for equal weights; set algorithm.weighting = "uniform".'
        )
