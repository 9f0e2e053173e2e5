"""The mean gradient of a round: a displacement, divided by the rate and by the length of the round.

Without momentum a round of K_i steps has the length K_i. Momentum ρ makes it up to 1/(1 − ρ) times as long: its length
is FedNova's a_i then, and a displacement divided by K_i would be longer than a mean of gradients.
"""

from __future__ import annotations

from torch import Tensor

from ..core.settings import setting
from ..core.types import Client, Cohort, Number


def length_setting(where: str) -> str:
    """The setting of a method that says by which length it divides."""
    return setting(f"length of a round in {where}: a_i of FedNova, or K_i", default="nova", choices=("nova", "steps"))


def round_length(of: Client | Cohort, length: str) -> Number:
    """The length of one client's round, or of each participant's [C]."""
    return of.tau if length == "nova" else of.steps


def mean_gradient(start: Tensor, theta: Tensor, client: Client, length: str, rate: str = "current") -> Tensor:
    """The mean gradient of a client's steps from `start` to theta, with this round's rate or the initial one."""
    return (start - theta) / (round_length(client, length) * (client.lr if rate == "current" else client.lr0))


def cohort_mean_gradient(delta: Tensor, cohort: Cohort, length: str) -> Tensor:
    """The weighted mean of the participants' mean gradients, from their displacements [C, P]."""
    return -(cohort.p / (round_length(cohort, length) * cohort.lr)) @ delta
