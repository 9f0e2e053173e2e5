"""The table [privacy] of a configuration: what is clipped, what noise is added, and what ε that comes to.

`privacy_stage.py` does it, and `privacy_support.py` says which methods it can be done with.
"""

from __future__ import annotations

import math
from typing import ClassVar

from ..core.settings import Settings, setting
from ..core.text import count_text
from ..errors import ConfigError
from ..participation import Participation, Poisson
from .accounting import HOW_TO_INSTALL, can_amplify, epsilon

LEAST_NOISE = 1e-4  # less hides nothing, and whole numbers of its steps would overflow


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
            count = count_text(rounds, "round")
            whose = f"a client in all {count}" if rate == 1 else f"{count} of secret draws at {rate:g}"
            also = " with other updates" if self.neighbours == "replace" else ""
            phrases.append(f"ε ≤ {self.epsilon(rounds, rate):.3g} at δ = {self.delta:g} for {whose}{also}")
            phrases += [HOW_TO_INSTALL] if rate < 1 and not can_amplify() else []
        if self.secure:
            phrases.append("secure aggregation")
        if simulated and self.noise:
            phrases.append("simulated: noise and draws come from the seed and protect nobody")
        return ", ".join(phrases)
