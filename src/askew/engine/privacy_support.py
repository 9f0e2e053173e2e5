"""Which methods, networks and weights support clipping, noise on the sum and secure aggregation."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..core.types import Cohort, State
from ..errors import ConfigError
from .privacy import Privacy
from .server import Server

TRIAL_CLIENTS = 8  # clients in the trial that finds out whether a method needs single uploads


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
