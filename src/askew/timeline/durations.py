"""How long the answers of clients take, and how long a round lasts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

from ..core.records import LATE, LEFT, NOT_AWAITED
from ..core.rng import uniform
from .files import LINK_COLUMNS, read_table
from .settings import TimeSettings

NORMAL = NormalDist()


class Device(NamedTuple):
    """How fast one client computes and sends."""

    seconds: float  # a sample
    latency: float = 0.0  # seconds, each way
    up: float = 0.0  # bytes a second; 0: no limit
    down: float = 0.0

    def answer_seconds(self, samples: float, bytes_down: float, bytes_up: float, messages: int = 1) -> float:
        """How long an answer takes, from when the server asks; `messages` travel each way, one for each phase."""
        latency = messages * self.latency
        received = bytes_down / self.down if self.down else 0.0
        sent = bytes_up / self.up if self.up else 0.0
        return latency + received + samples * self.seconds + sent + latency


def device_of(settings: TimeSettings, seed: int, client: int, relative_size: float, clients: int) -> Device:
    """The device of a client; `relative_size` is n_i / n̄."""
    if settings.clients:
        link = {name: getattr(settings, name) for name in LINK_COLUMNS}
        table = read_table(settings.clients, "clients", clients)
        return Device(**{"seconds": 0.0, **link, **table[client]})
    seconds = settings.seconds
    if settings.speed == "lognormal":
        seconds *= math.exp(settings.sigma * NORMAL.inv_cdf(uniform(seed, "time speed", client=client)))
    elif settings.speed == "pareto":
        seconds *= uniform(seed, "time speed", client=client) ** (-1 / settings.tail)
    elif settings.speed == "halfnormal":
        seconds *= abs(NORMAL.inv_cdf(uniform(seed, "time speed", client=client)))
    elif settings.speed == "size":
        seconds *= relative_size
    return Device(seconds, settings.latency, settings.up, settings.down)


class Waited(NamedTuple):
    """How long a round lasted, and what became of each client that was asked."""

    seconds: float
    reasons: list[str]  # why an answer is not used; empty: it is


def wait_for(settings: TimeSettings, wanted: int, answers: Sequence[float], leaves: Sequence[float]) -> Waited:
    """How long a round lasts whose clients answer and leave so many seconds after its begin.

    A client that leaves before its answer has come is lost, and the server knows it at that moment. Of answers that
    come at the same moment those of the first clients count. `wanted` is the cohort's size.
    """
    known = [min(answer, leave) for answer, leave in zip(answers, leaves, strict=True)]
    came = [k for k, answer in enumerate(answers) if answer <= leaves[k]]
    end = max(known, default=0.0)
    if settings.wait == "deadline":
        end = min(end, settings.deadline)
        came = [k for k in came if answers[k] <= end]
    elif settings.wait == "first" and len(came) >= wanted:
        came = sorted(came, key=lambda k: (answers[k], k))[:wanted]
        end = max((answers[k] for k in came), default=0.0)
    used, missed = {*came}, LATE if settings.wait == "deadline" else NOT_AWAITED
    gone = [leaves[k] < answers[k] and leaves[k] <= end for k in range(len(answers))]
    return Waited(end, ["" if k in used else LEFT if gone[k] else missed for k in range(len(answers))])
