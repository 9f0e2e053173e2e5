"""Participation: which clients take part in a round, and how much of its local work each does.

base.py    what a rule is; who of the chosen clients answers, and with how much of the work
rules.py   rules that draw: bernoulli, by_class, cyclic, full, markov, poisson, skewed, uneven, uniform
trace.py   trace, which reads a file
"""

from __future__ import annotations

from ..core.settings import Registry
from .base import MANY, SPARSE, CohortParticipation, Participation, Turnout, UsedAnswer, keep, looks_at_all
from .rules import (
    Bernoulli,
    ByClass,
    Cyclic,
    FullParticipation,
    Markov,
    Poisson,
    Skewed,
    Uneven,
    Uniform,
    chances,
    takes_any,
)
from .trace import Trace

participations: Registry[Participation] = Registry(
    "participation",
    {
        "bernoulli": Bernoulli,
        "by_class": ByClass,
        "cyclic": Cyclic,
        "full": FullParticipation,
        "markov": Markov,
        "poisson": Poisson,
        "skewed": Skewed,
        "trace": Trace,
        "uneven": Uneven,
        "uniform": Uniform,
    },
)

__all__ = [
    "MANY",
    "SPARSE",
    "Bernoulli",
    "ByClass",
    "CohortParticipation",
    "Cyclic",
    "FullParticipation",
    "Markov",
    "Participation",
    "Poisson",
    "Skewed",
    "Trace",
    "Turnout",
    "Uneven",
    "Uniform",
    "UsedAnswer",
    "chances",
    "keep",
    "looks_at_all",
    "participations",
    "takes_any",
]
