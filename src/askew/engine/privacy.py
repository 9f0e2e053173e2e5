"""Differential privacy: the table [privacy] of a configuration, clipping and noise, and which methods support them.

In a simulation `PrivacyStage` does what clients and server would do. In a deployment clients shorten their updates
themselves, and the stage does the server's part.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ..core.algebra import norm
from ..core.records import REPEATED
from ..core.settings import Settings, setting
from ..core.types import Cohort, State
from ..errors import ConfigError
from ..participation import Participation, Poisson
from .accounting import HOW_TO_INSTALL, can_amplify, epsilon
from .answers import NOT_FINITE
from .base import Incident, PhaseOutputs, PhaseRequest, RecordingStage
from .finite import finite_rows
from .noise import NoiseSource, SeededNoise, SystemNoise, shorten_rows
from .server import Server

TRIAL_CLIENTS = 8  # clients in the trial that finds out whether a method needs single uploads
LEAST_NOISE = 1e-4  # less hides nothing, and whole numbers of its steps would overflow
UPDATE_NOISE, COUNT_NOISE = "privacy noise", "privacy count"  # purposes of a simulation's random streams


class Privacy(Settings):
    """How uploads are hidden from the server, and from those who see the model."""

    title = "privacy"
    # Names of deployments rest on these settings even at their defaults, as older versions wrote them.
    digested: ClassVar[tuple[str, ...]] = ("clip", "noise", "where", "secure", "fewest", "delta")
    clip: float = setting(
        "largest length of a client's upload, longer ones are shortened; 0: as long as they are", default=0.0, least=0
    )
    noise: float = setting("standard deviation of the Gaussian noise, as a multiple of clip", default=0.0, least=0)
    where: str = setting(
        "who adds it: the server, to the sum, or every client, to its upload",
        default="server",
        choices=("server", "client"),
    )
    secure: bool = setting(
        "secure aggregation: the server learns sums of uploads and no upload; deployments only", default=False
    )
    fewest: int = setting("clients whose sum the server may learn, at least", default=3, least=2)
    delta: float = setting("δ for which ε is reported", default=1e-5, above=0, below=1)
    neighbours: str = setting(
        "what ε compares: runs with and without a client's updates, or runs in which they are others, which doubles "
        "what one client can change",
        default="add_or_remove",
        choices=("add_or_remove", "replace"),
    )
    secret_sampling: bool = setting(
        "participants are drawn so that only the server knows them, which lowers ε; needs participation poisson",
        default=False,
    )
    quantile: float = setting(
        "adaptive clipping: clip follows this quantile of the updates' lengths; 0: it stays",
        default=0.0,
        least=0,
        most=1,
    )
    clip_rate: float = setting("learning rate of adaptive clipping", default=0.2, above=0)
    count_noise: float = setting(
        "standard deviation of the noise on the number of short updates, for adaptive clipping", default=0.0, least=0
    )

    def check(self) -> None:
        if self.noise and not self.clip:
            raise ConfigError(
                f"privacy: noise = {self.noise:g} needs a largest length to be measured by; "
                "set clip, for example to 1.0."
            )
        if 0 < self.noise < LEAST_NOISE:
            raise ConfigError(f"privacy: noise = {self.noise:g} hides nothing; set it to 0, or to 0.5 or more.")
        if self.secret_sampling and not self.central:
            raise ConfigError(
                "privacy: secret_sampling lowers ε only where the server adds noise to the sum; "
                'set noise and where = "server", or leave it out.'
            )
        if self.secret_sampling and self.secure:
            raise ConfigError(
                "privacy: with secure aggregation the participants learn of each other, so that their draw is not "
                "secret; leave out secret_sampling or secure."
            )
        if self.quantile:
            self._check_adaptive()

    def _check_adaptive(self) -> None:
        if not self.clip or self.local:
            raise ConfigError(
                "privacy: adaptive clipping needs a first clip, and noise by the server if there is any; "
                'set clip and where = "server", or leave out quantile.'
            )
        if self.noise and self.count_noise <= self.noise / 2:
            raise ConfigError(
                f"privacy: count_noise must be larger than noise / 2 = {self.noise / 2:g}, got {self.count_noise:g}: "
                "a part of the noise goes to the count; try a twentieth of the participants."
            )

    def table(self) -> dict[str, object]:
        """All settings as plain values; newer ones only where they differ from their defaults, so that a deployment
        that an older version began can go on.
        """
        defaults = {name: f.default for name, f in type(self).__dataclass_fields__.items()}
        return {n: v for n, v in super().table().items() if n in self.digested or v != defaults[n]}

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

    @property
    def update_noise(self) -> float:
        """The multiple of clip by which updates are noised: adaptive clipping uses up the rest of the noise.

        Andrew et al., NeurIPS 2021, arXiv 1905.03871, Theorem 1: with noise σ_b on a count of halves, z_Δ with
        z_Δ⁻² + (2 σ_b)⁻² = z⁻² hides as much as z.
        """
        if not (self.quantile and self.noise):
            return self.noise
        return 1 / math.sqrt(self.noise**-2 - (2 * self.count_noise) ** -2)

    def rate(self, participation: Participation) -> float:
        """The chance at which a client is secretly drawn in a round; 1 where its taking part is not secret."""
        return participation.fraction if self.secret_sampling and type(participation) is Poisson else 1.0

    def epsilon(self, rounds: int, rate: float = 1.0) -> float:
        """ε at δ of a client that takes part in so many rounds, or is drawn in each of them at this rate."""
        return epsilon(self.noise, rounds, self.delta, rate, self.neighbours == "replace")

    def check_participation(self, participation: Participation) -> None:
        """Refuse a draw of participants that is no secret Poisson sampling where this was asked for."""
        if self.secret_sampling and (type(participation) is not Poisson or participation.seed is not None):
            raise ConfigError(
                "privacy: secret_sampling needs participants that are drawn independently of each other and from no "
                'given seed; set participation.name = "poisson" and leave out participation.seed.'
            )

    def describe(self, rounds: int, participation: Participation, simulated: bool = False) -> str:
        """A phrase for the facts of a run with so many rounds."""
        phrases = []
        if self.clip:
            follows = f" at first, then the {self.quantile:g} quantile" if self.quantile else ""
            phrases.append(f"uploads of length {self.clip:g} at most{follows}")
        if self.noise:
            rate = self.rate(participation)
            phrases.append(f"noise of {self.noise:g} times that by {'each client' if self.local else 'the server'}")
            whose = f"a client in all {rounds} rounds" if rate == 1 else f"{rounds} rounds of secret draws at {rate:g}"
            also = " with other updates" if self.neighbours == "replace" else ""
            phrases.append(f"ε ≤ {self.epsilon(rounds, rate):.3g} at δ = {self.delta:g} for {whose}{also}")
            phrases += [HOW_TO_INSTALL] if rate < 1 and not can_amplify() else []
        if self.secure:
            phrases.append("secure aggregation")
        if simulated and self.noise:
            phrases.append("simulated: noise and draws come from the seed and protect nobody")
        return ", ".join(phrases)


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


# the stage ------------------------------------------------------------------------------------------------------


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
        outputs = leave_out_not_finite(outputs, ids)
        if not len(outputs.loss) or (self.deployed and not (privacy.central or privacy.quantile)):
            return outputs
        delta = outputs.up["delta"]
        short = outputs.loss.double() if self.deployed else (norm(delta) <= self.clip).double()
        if privacy.central:
            delta = self._noisy_mean(delta, round).expand_as(delta)
        elif privacy.local:
            rows = range(len(ids)) if outputs.answered is None else outputs.answered
            delta = torch.stack([self._local(delta[i], round, ids[row]) for i, row in enumerate(rows)])
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


def leave_out_not_finite(outputs: PhaseOutputs, ids: Sequence[int]) -> PhaseOutputs:
    """The outputs without clients whose numbers are not finite: in a mean they would spoil all."""
    finite = finite_rows([outputs.loss, *outputs.up.values(), outputs.buffers]).tolist()
    if all(finite):
        return outputs
    rows = range(len(ids)) if outputs.answered is None else outputs.answered
    lost = [Incident(ids[row], NOT_FINITE, True) for row, fine in zip(rows, finite, strict=True) if not fine]
    return outputs.leave_out(lost, ids)


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
