"""Federated learning when data and turnout are askew."""

from __future__ import annotations

from . import errors
from .core.algebra import dot, norm
from .core.algorithm import Algorithm
from .core.rng import generator
from .core.settings import setting
from .core.space import Space
from .core.task import Task
from .core.types import Affine, Batch, Client, Cohort, Part
from .data.dataset import Dataset, NaturalSource, Samples, Source
from .data.partition import Assignment, Partition
from .errors import AskewError
from .experiment.api import run
from .experiment.config import Config, load_config, register
from .experiment.process_tuning import tune_process
from .experiment.store import Run, load
from .models import Network
from .participation import Participation
from .version import __version__

__all__ = [
    "Affine",
    "Algorithm",
    "AskewError",
    "Assignment",
    "Batch",
    "Client",
    "Cohort",
    "Config",
    "Dataset",
    "NaturalSource",
    "Network",
    "Part",
    "Participation",
    "Partition",
    "Run",
    "Samples",
    "Source",
    "Space",
    "Task",
    "__version__",
    "dot",
    "errors",
    "generator",
    "load",
    "load_config",
    "norm",
    "register",
    "run",
    "setting",
    "tune_process",
]
