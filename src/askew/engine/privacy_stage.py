"""Clipping and noise for differential privacy, and the account of what ε they have come to.

In a simulation `PrivacyStage` does what clients and server would do. In a deployment clients shorten their updates
themselves, and the stage does the server's part.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.algebra import norm
from ..core.records import REPEATED
from ..core.types import State
from ..participation import Participation
from .answers import leave_out_not_finite
from .base import PhaseOutputs, PhaseRequest, RecordingStage
from .noise import NoiseSource, SeededNoise, SystemNoise, shorten_rows
from .privacy import Privacy

UPDATE_NOISE, COUNT_NOISE = "privacy noise", "privacy count"  # purposes of a simulation's random streams


def clip_upload(upload: State, max_length: float) -> tuple[State, bool]:
    """The upload, shortened if the L2 norm of all its tensors together is larger than this; and whether it was not."""
    length = math.sqrt(sum(float(t.double().square().sum()) for t in upload.values()))
    if length <= max_length:
        return upload, True
    return {n: t * (max_length / length) for n, t in upload.items()}, False


def add_noise(upload: State, max_length: float, std: float, source: NoiseSource) -> State:
    """A client's upload plus its own Gaussian noise of this standard deviation."""
    flat = torch.cat([t.flatten() for t in upload.values()])
    noisy = torch.split(
        source.noisy_sum(flat[None], max_length, std, UPDATE_NOISE, 0), [t.numel() for t in upload.values()]
    )
    return {n: part.view(t.shape).to(t) for (n, t), part in zip(upload.items(), noisy, strict=True)}


class PrivacyStage(RecordingStage):
    """Shortens updates, adds noise, and counts what ε it has come to."""

    def __init__(self, privacy: Privacy, participation: Participation, clients: int, noise: NoiseSource) -> None:
        """`clients` is N."""
        self.privacy, self.noise = privacy, noise
        self.deployed = False  # real clients shorten their updates, and say in place of their loss which were short
        self.rate, self.clip = privacy.rate(participation), privacy.clip
        # Of a secret draw not even the number of participants may show: the mean is over the expected number.
        self.fixed_count = self.rate * clients if privacy.secret_sampling else None
        self.rounds_of = np.zeros(clients, dtype=np.int64)  # by client: rounds in which its update was used
        self.rounds = 0

    @classmethod
    def simulated(cls, privacy: Privacy, participation: Participation, clients: int, seed: int) -> PrivacyStage:
        """The stage of a simulation."""
        return cls(privacy, participation, clients, SeededNoise(seed))

    def on_real_clients(self) -> PrivacyStage:
        """The same stage for a deployment, whose noise nobody can draw again."""
        stage = copy.copy(self)
        stage.noise, stage.deployed = SystemNoise(), True
        return stage

    def __call__(self, request: PhaseRequest, outputs: PhaseOutputs) -> PhaseOutputs:
        privacy, round, ids = self.privacy, request.inputs.round, request.plan.ids
        # in a mean, one that is not finite would spoil all
        outputs = leave_out_not_finite(outputs, ids, [outputs.loss, *outputs.up.values(), outputs.buffers])
        if not len(outputs.loss) or (self.deployed and not (privacy.central or privacy.quantile)):
            return outputs
        delta = outputs.up["delta"]
        short = outputs.loss.double() if self.deployed else (norm(delta) <= self.clip).double()
        if privacy.central:
            delta = self._noisy_mean(delta, round).expand_as(delta)
        elif privacy.local:
            clients = [ids[row] for row in outputs.cohort_rows()]
            delta = torch.stack([self._local(row, round, client) for row, client in zip(delta, clients, strict=True)])
        elif not self.deployed:
            delta = shorten_rows(delta, self.clip)
        if privacy.quantile:
            self._adapt(short, round)
        return outputs._replace(up={"delta": delta}, loss=outputs.loss * 0 if self.deployed else outputs.loss)

    def without_clients(self, round: int, w: Tensor) -> State | None:
        """Noise alone where the draw of participants is secret: a round without it would show that there were none."""
        if not self.privacy.secret_sampling:
            return None
        up = {"delta": self._noisy_mean(w.new_zeros(0, len(w)), round)[None]}
        if self.privacy.quantile:
            self._adapt(w.new_zeros(0), round)
        return up

    def _local(self, row: Tensor, round: int, client: int) -> Tensor:
        """A client's update with its own noise."""
        std = self.privacy.noise * self.clip
        return self.noise.noisy_sum(row[None], self.clip, std, UPDATE_NOISE, round, client).to(row)

    def _noisy_mean(self, delta: Tensor, round: int) -> Tensor:
        """The mean of updates [m, P] with noise that hides each of them, [P]."""
        rows, longest, count = delta, self.clip, len(delta)
        if self.privacy.secure:  # every row is the mean: what must be hidden is one client's part of the sum
            rows, longest = delta[:1].double() * count, self.clip * count
        total = self.noise.noisy_sum(rows, longest, self.privacy.update_noise * self.clip, UPDATE_NOISE, round)
        return (total / (self.fixed_count or count)).to(delta)

    def _adapt(self, short: Tensor, round: int) -> None:
        """Move clip towards the quantile; `short` [m] says of each update whether it was as short as clip.

        Halves are counted, −1/2 for a long and 1/2 for a short update, so that one client changes the sum by 1/2.
        """
        privacy, halves = self.privacy, (short - 0.5)[:, None].double()
        if privacy.noise:
            total = self.noise.noisy_sum(halves, 0.5, privacy.count_noise, COUNT_NOISE, round)
        else:
            total = halves.sum(0)
        share = float(total) / (self.fixed_count or len(short)) + 0.5
        self.clip *= math.exp(-privacy.clip_rate * (share - privacy.quantile))

    # the account ------------------------------------------------------------------------------------------------

    def note(self, record: dict[str, Any]) -> dict[str, Any]:
        self._count(record)
        entries: dict[str, Any] = {"privacy_clip": self.clip} if self.privacy.quantile else {}
        if self.privacy.noise:
            rounds = self.rounds if self.rate < 1 else int(self.rounds_of.max(initial=0))
            entries["epsilon"] = self.privacy.epsilon(rounds, self.rate)
        return entries

    def resume(self, records: Sequence[dict[str, Any]]) -> None:
        for record in records:
            self._count(record)
            self.clip = record.get("privacy_clip", self.clip)

    def _count(self, record: dict[str, Any]) -> None:
        """Count who was protected in a round: all of a sum, or all who may have sent their noisy update."""
        incidents = {reason: who for reason, who in record.get("incidents", {}).items() if reason != REPEATED}
        lost = {client for clients in incidents.values() for client in clients}
        took_part = {*record["participants"]}
        self.rounds_of[sorted(took_part | lost if self.privacy.local else took_part - lost)] += 1
        self.rounds += 1
