"""Attacks: what hostile clients send instead of their updates, to test methods and robust rules in simulations.

x_i is the upload of a client, μ and σ are the mean and the standard deviation, coordinate by coordinate, of the honest
participants' uploads, which the attackers are supposed to know; a is the strength.

    scale           x_i ← a x_i
    sign_flip       x_i ← −a x_i
    noise           x_i ← Gaussian noise of about a times the length of x_i
    alie            x_i ← μ − z σ,   z = a if given, else Φ⁻¹((C − m − s) / (C − m)),  s = ⌊C/2 + 1⌋ − m,
                    for m attackers among C participants
    inner_product   x_i ← −a μ
    label_flip      attackers train on the labels K − 1 − y; their uploads are what that gives

ALIE: Baruch, Baruch, Goldberg, A Little Is Enough: Circumventing Defenses For Distributed Learning, NeurIPS 2019 (arXiv
1902.06156); the paper's attackers estimate μ and σ from their own data. Inner product: Xie, Koyejo, Gupta, Fall of
Empires, UAI 2019 (arXiv 1903.03936). Entries of one number, such as a step count, stay as they are, and so do buffers;
where no participant is honest, μ and σ are the attackers' own.
"""

from __future__ import annotations

from collections.abc import Collection
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.algebra import norm
from ..core.algorithm import Algorithm
from ..core.rng import generator, torch_generator
from ..core.settings import Settings, setting
from ..data.federation import Federation
from ..errors import ConfigError
from .base import PhaseOutputs, PhaseRequest
from .finite import finite_rows

ATTACKS = {  # by name: what attackers do
    "scale": "send the update times the strength",
    "sign_flip": "send the update times minus the strength",
    "noise": "send noise of the update's length times the strength",
    "alie": "all send the honest mean minus z standard deviations (a little is enough)",
    "inner_product": "all send minus the strength times the honest mean",
    "label_flip": "train on the labels K − 1 − y",
}
STRENGTH = {"scale": 10.0, "sign_flip": 1.0, "noise": 1.0, "inner_product": 1.0}  # where none is given


class Attack(Settings):
    """Hostile clients in a simulation; tests of the model are on clean data."""

    title = "attack"
    name: str = setting("what hostile clients do", default="none", choices=("none", *ATTACKS))
    fraction: float = setting(
        "share of the clients that are hostile, drawn from the seed; at least one", default=0.2, above=0, most=1
    )
    clients: tuple[int, ...] = setting("the hostile clients, instead of a share", default=())
    strength: float | None = setting(
        "factor of the attack; left out: 10 for scale, the paper's z for alie, 1 for the others",
        default=None,
        least=0,
    )

    def check(self) -> None:
        if self.name == "label_flip" and self.strength is not None:
            raise ConfigError("attack: label_flip has no strength; leave attack.strength out.")

    def check_method(self, alg: Algorithm) -> None:
        """Refuse a method without clients that could attack; raise ConfigError."""
        if self.on and (alg.pooled or alg.combines == "nothing"):
            raise ConfigError(f"attack: {alg.display_name()} combines no uploads of clients; leave [attack] out.")

    @property
    def on(self) -> bool:
        """Does anybody attack?"""
        return self.name != "none"

    @property
    def flips_labels(self) -> bool:
        """Do attackers train on other labels?"""
        return self.name == "label_flip"

    def attackers(self, seed: int, fed: Federation) -> list[int]:
        """The hostile clients, sorted; drawn among those that hold samples."""
        if not self.on:
            return []
        if self.clients:
            wrong = [client for client in self.clients if not 0 <= client < fed.clients]
            if wrong:
                raise ConfigError(
                    f"attack: there is no client {wrong[0]}; clients are numbered 0 to {fed.clients - 1:,}."
                )
            return sorted({*self.clients})
        count = max(1, round(self.fraction * len(fed.eligible)))
        chosen: list[int] = np.sort(generator(seed, "attack").choice(fed.eligible, count, replace=False)).tolist()
        return chosen

    def facts(self, seed: int, fed: Federation) -> dict[str, Any]:
        """What run.json says of the attack; nothing without one."""
        return {"attack": {"name": self.name, "clients": self.attackers(seed, fed)}} if self.on else {}


class AttackStage:
    """Puts what the attackers send in place of their uploads."""

    def __init__(self, settings: Attack, attackers: Collection[int], seed: int) -> None:
        self.settings, self.attackers, self.seed = settings, {*attackers}, seed

    def __call__(self, request: PhaseRequest, outputs: PhaseOutputs) -> PhaseOutputs:
        clients = [request.plan.ids[row] for row in outputs.cohort_rows()]
        hostile = [i for i, client in enumerate(clients) if client in self.attackers]
        if not hostile or self.settings.flips_labels:
            return outputs
        vectors = {n: t for n, t in outputs.up.items() if t.dim() > 1 and t.is_floating_point()}
        changed = {n: t.clone() for n, t in vectors.items()}
        for n, rows in vectors.items():
            if self.settings.name == "noise":
                for i in hostile:
                    changed[n][i] = self.noise(rows[i], f"attack noise {n}", request.inputs.round, clients[i])
            else:
                changed[n][hostile] = self.send(rows, hostile)
        return outputs._replace(up=outputs.up | changed)

    def send(self, rows: Tensor, hostile: list[int]) -> Tensor:
        """What these attackers send, of the uploads of all participants; one vector if they all send the same."""
        name, strength = self.settings.name, self.strength
        if name in ("scale", "sign_flip"):
            return rows[hostile] * (strength if name == "scale" else -strength)
        finite = finite_rows([rows]).tolist()  # one that is not would make all that attackers send be refused
        honest = [i for i in range(len(rows)) if i not in hostile and finite[i]] or hostile
        mean = rows[honest].mean(0)
        if name == "inner_product":
            return -strength * mean
        z = little_is_enough(len(rows), len(hostile)) if self.settings.strength is None else strength
        return mean - z * rows[honest].std(0, correction=0)

    @property
    def strength(self) -> float:
        given = self.settings.strength
        return STRENGTH.get(self.settings.name, 0.0) if given is None else given

    def noise(self, row: Tensor, purpose: str, round: int, client: int) -> Tensor:
        """Gaussian noise of about the row's length times the strength."""
        draw = torch.randn(row.shape, generator=torch_generator(self.seed, purpose, round, client)).to(row)
        draw = torch.where(row == 0, 0.0, draw)  # coordinates that never leave a client are zero, and stay so
        size = (row != 0).sum().clamp(min=1).sqrt()
        return draw * (self.strength * norm(row.flatten()) / size).to(row.dtype)


def little_is_enough(count: int, hostile: int) -> float:
    """z of ALIE: as far from the mean as attackers can go, of whom there are `hostile` among `count` participants.

    So many honest uploads, s, are farther out that with the attackers they are a majority. 0 if that cannot be.
    """
    honest = count - hostile
    supporters = max(1, count // 2 + 1 - hostile)
    share = (honest - supporters) / honest if honest else 0.0
    return max(0.0, NormalDist().inv_cdf(share)) if share > 0 else 0.0
