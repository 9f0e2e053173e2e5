"""Protection of uploads: the table [privacy] of a configuration, clipping and noise, and which methods support them."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from ..core.settings import Settings, setting
from ..core.types import Cohort, State
from ..engine.server import Server
from ..errors import ConfigError

TRIAL_CLIENTS = 8  # clients in the trial that finds out whether a method needs single uploads


class Privacy(Settings):
    """How uploads are hidden from the server, and from those who see the model."""

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
    delta: float = setting("δ for which ε is reported", default=1e-5, above=0, below=1)

    def check(self) -> None:
        if self.noise and not self.clip:
            raise ConfigError(
                f"privacy: noise = {self.noise:g} needs a largest length to be measured by; "
                "set clip, for example to 1.0."
            )

    @property
    def on(self) -> bool:
        """Is any protection switched on?"""
        return self.secure or self.clip > 0

    @property
    def local(self) -> bool:
        """Does every client add noise to its upload?"""
        return self.noise > 0 and self.where == "client"

    @property
    def central(self) -> bool:
        """Does the server add noise to the mean?"""
        return self.noise > 0 and self.where == "server"

    def epsilon(self, rounds: int) -> float:
        """ε at δ of a client that takes part in so many rounds T, for Gaussian noise of multiple z; ∞ without noise.

        ε = T / (2 z²) + √(2 T ln(1/δ)) / z, by concentrated differential privacy: Bun, Steinke, 2016 (arXiv
        1605.02065), Propositions 1.3 and 1.6, Lemma 1.7. Rounds in which other clients are drawn do not lower it.
        """
        if not self.noise:
            return math.inf
        return rounds / (2 * self.noise**2) + math.sqrt(2 * rounds * math.log(1 / self.delta)) / self.noise

    def describe(self, rounds: int) -> str:
        """A phrase for the facts of a run with so many rounds."""
        phrases = []
        if self.clip:
            phrases.append(f"uploads of length {self.clip:g} at most")
        if self.noise:
            phrases.append(f"noise of {self.noise:g} times that by {'each client' if self.local else 'the server'}")
            phrases.append(f"ε ≤ {self.epsilon(rounds):.3g} at δ = {self.delta:g} for a client in all {rounds} rounds")
        if self.secure:
            phrases.append("secure aggregation")
        return ", ".join(phrases)


def clip_upload(upload: State, max_length: float) -> State:
    """The upload, shortened if the L2 norm of all its tensors together is larger than this."""
    length = math.sqrt(sum(float(t.double().square().sum()) for t in upload.values()))
    return {n: t * (max_length / length) if length > max_length else t for n, t in upload.items()}


def add_noise(t: Tensor, std: float) -> Tensor:
    """The tensor plus Gaussian noise of this standard deviation.

    The noise comes from the machine and not from the run's seed: who can draw it again can subtract it.
    """
    return t + torch.from_numpy(np.random.default_rng().normal(0.0, std, tuple(t.shape))).to(t)


# which methods are supported ------------------------------------------------------------------------------------


def needs_mean_only(server: Server, zero_uploads: list[State]) -> bool:
    """Does the server's step depend on the uploads through their weighted mean alone?

    Tried with random uploads, unequal clients and a random state: replacing every upload by the mean must change
    nothing.
    """
    alg, rng = server.alg, np.random.default_rng(0)
    if server.memory.start or "public" in alg.needs or alg.pooled:
        return False

    def draw(t: Tensor) -> Tensor:
        return torch.from_numpy(rng.uniform(0.5, 1.5, tuple(t.shape)))

    size, steps, tau, loss = (draw(torch.empty(TRIAL_CLIENTS)) for _ in range(4))
    p = size / size.sum() if alg.by_samples else torch.full_like(size, 1 / TRIAL_CLIENTS)
    cohort = Cohort(p, steps, tau, size, loss, None, 0.1, 0.2, 3, 5)
    equal_losses = cohort._replace(loss=loss.mean().expand_as(loss))
    w, state = draw(server.w), {n: draw(v) for n, v in server.state.items()}
    for phase, zeros in zip(server.phases, zero_uploads, strict=True):
        up = {n: torch.from_numpy(rng.normal(size=(TRIAL_CLIENTS, *t.shape))) for n, t in zeros.items()}
        means = {n: torch.tensordot(p, t, 1).expand_as(t) for n, t in up.items()}
        model, new_state = phase.aggregate(w, up, cohort, dict(state))
        model_of_means, state_of_means = phase.aggregate(w, means, equal_losses, dict(state))
        pairs = [
            (model, model_of_means),
            (phase.weights(up, cohort), phase.weights(means, equal_losses)),
            *((new_state[n], state_of_means[n]) for n in new_state),
        ]
        if not all(torch.allclose(a.double(), b.double(), rtol=1e-6, atol=1e-9) for a, b in pairs):
            return False
    return True


def check_supported(privacy: Privacy, server: Server, zero_uploads: list[State]) -> None:
    """Refuse a method, a network or weights that do not support this protection."""
    name = server.alg.display_name()
    if (privacy.secure or privacy.central) and not needs_mean_only(server, zero_uploads):
        raise ConfigError(
            f"{name}: its server's step needs every client's upload, not their mean alone, which is all that "
            f"{'secure aggregation' if privacy.secure else 'noise on the sum'} leaves; "
            "use FedAvg or another that docs/privacy.md lists."
        )
    if privacy.clip and (
        server.alg.client_state(server.space)
        or any({*upload} - {"delta"} for upload in zero_uploads)
        or len(zero_uploads) > 1
    ):
        raise ConfigError(
            f"{name}: clipping changes what the server receives, and its clients keep or send more than their update; "
            "use FedAvg, or another method that docs/privacy.md lists."
        )
    if privacy.noise and server.private.buffer_indices.numel() < server.space.Q:
        raise ConfigError(
            "privacy: noise protects no batch-norm statistics, which would travel beside; "
            "use a network with another norm."
        )
    if privacy.central and server.alg.by_samples:
        raise ConfigError(
            f'{name}: noise on the sum is measured for equal weights; set algorithm.weighting = "uniform".'
        )
