"""The registry of methods: a new one is a file and a line here; a user's own is one call of `register`."""

from __future__ import annotations

from ..core.algorithm import Algorithm
from ..core.settings import Registry
from .centralised import Centralised
from .fedadagrad import FedAdagrad
from .fedadam import FedAdam
from .fedalign import FedAlign
from .fedamd import FedAMD
from .fedasync import FedAsync
from .fedau import FedAU
from .fedavg import FedAvg
from .fedavgm import FedAvgM
from .fedawe import FedAWE
from .fedbn import FedBN
from .fedbuff import FedBuff
from .fedcm import FedCM
from .feddc import FedDC
from .feddpc import FedDPC
from .feddyn import FedDyn
from .fedexp import FedExP
from .fedga import FedGA
from .fedmgdaplus import FedMGDAPlus
from .fednova import FedNova
from .fedpdc import FedPDC
from .fedpmvr import FedPMVR
from .fedprox import FedProx
from .fedpvr import FedPVR
from .fedsgd import FedSGD
from .fedspeed import FedSpeed
from .fedvarp import FedVARP
from .fedyogi import FedYogi
from .focus import FOCUS
from .lossbias import LossBias
from .mgda import MGDA
from .mifa import MIFA
from .moon import MOON
from .scaffold import Scaffold
from .solo import Solo

algorithms: Registry[Algorithm] = Registry(
    "algorithm",
    {
        "fedavg": FedAvg,
        "fedsgd": FedSGD,
        "solo": Solo,
        "centralised": Centralised,
        "fedprox": FedProx,
        "fedavgm": FedAvgM,
        "fedadagrad": FedAdagrad,
        "fedadam": FedAdam,
        "fedyogi": FedYogi,
        "fedexp": FedExP,
        "fednova": FedNova,
        "scaffold": Scaffold,
        "fedpvr": FedPVR,
        "feddyn": FedDyn,
        "feddc": FedDC,
        "fedcm": FedCM,
        "fedvarp": FedVARP,
        "mifa": MIFA,
        "fedga": FedGA,
        "feddpc": FedDPC,
        "moon": MOON,
        "fedbn": FedBN,
        "fedpmvr": FedPMVR,
        "fedpdc": FedPDC,
        "lossbias": LossBias,
        "mgda": MGDA,
        "fedmgdaplus": FedMGDAPlus,
        "fedspeed": FedSpeed,
        "fedalign": FedAlign,
        "fedamd": FedAMD,
        "fedau": FedAU,
        "fedawe": FedAWE,
        "focus": FOCUS,
        "fedasync": FedAsync,
        "fedbuff": FedBuff,
    },
)

__all__ = [
    "FOCUS",
    "MGDA",
    "MIFA",
    "MOON",
    "Centralised",
    "FedAMD",
    "FedAU",
    "FedAWE",
    "FedAdagrad",
    "FedAdam",
    "FedAlign",
    "FedAsync",
    "FedAvg",
    "FedAvgM",
    "FedBN",
    "FedBuff",
    "FedCM",
    "FedDC",
    "FedDPC",
    "FedDyn",
    "FedExP",
    "FedGA",
    "FedMGDAPlus",
    "FedNova",
    "FedPDC",
    "FedPMVR",
    "FedPVR",
    "FedProx",
    "FedSGD",
    "FedSpeed",
    "FedVARP",
    "FedYogi",
    "LossBias",
    "Scaffold",
    "Solo",
    "algorithms",
]
