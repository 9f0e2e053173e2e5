"""The registry of methods: a new one is a file and a line here; a user's own is one call of `register`."""

from __future__ import annotations

from ..core.algorithm import Algorithm
from ..core.settings import Registry
from .fedavg import FedAvg
from .fedbn import FedBN
from .fedcm import FedCM
from .feddc import FedDC
from .feddpc import FedDPC
from .feddyn import FedDyn
from .fednova import FedNova
from .fedprox import FedProx
from .moon import MOON
from .scaffold import Scaffold

algorithms: Registry[Algorithm] = Registry(
    "algorithm",
    {
        "fedavg": FedAvg,
        "fedprox": FedProx,
        "fednova": FedNova,
        "scaffold": Scaffold,
        "feddyn": FedDyn,
        "feddc": FedDC,
        "fedcm": FedCM,
        "feddpc": FedDPC,
        "moon": MOON,
        "fedbn": FedBN,
    },
)

__all__ = ["MOON", "FedAvg", "FedBN", "FedCM", "FedDC", "FedDPC", "FedDyn", "FedNova", "FedProx", "Scaffold", "algorithms"]
