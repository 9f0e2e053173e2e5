"""Federated learning when data and turnout are askew."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import errors
from .errors import AskewError
from .experiment import shown
from .version import __version__

if TYPE_CHECKING:
    from .core.algebra import dot, norm
    from .core.algorithm import Algorithm, Gradient
    from .core.rng import generator
    from .core.settings import setting
    from .core.space import Space
    from .core.task import Task
    from .core.types import Affine, Batch, Client, Cohort, Number, Part, State
    from .data.assignment import Assignment
    from .data.dataset import Dataset, NaturalSource, Samples, Source
    from .data.partition import Partition
    from .experiment.api import run
    from .experiment.config import Config, load_config
    from .experiment.plugins import register
    from .experiment.process_tuning import tune_process
    from .experiment.store import Run, load
    from .models import Network
    from .participation import Participation
    from .report.describe import Description, describe
    from .report.python import compare, report, sweep, tune
    from .report.runs import Runs
    from .report.tuning import Tuning

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
    "Description",
    "Gradient",
    "NaturalSource",
    "Network",
    "Number",
    "Part",
    "Participation",
    "Partition",
    "Run",
    "Runs",
    "Samples",
    "Source",
    "Space",
    "State",
    "Task",
    "Tuning",
    "__version__",
    "compare",
    "describe",
    "dot",
    "errors",
    "generator",
    "load",
    "load_config",
    "norm",
    "register",
    "report",
    "run",
    "setting",
    "sweep",
    "tune",
    "tune_process",
]

# Public names by the module that defines them: it is imported when one is first used, since torch takes seconds to
# load. The imports above are the same for type checkers; a test compares the two.
HOMES = {
    "core.algebra": ("dot", "norm"),
    "core.algorithm": ("Algorithm", "Gradient"),
    "core.rng": ("generator",),
    "core.settings": ("setting",),
    "core.space": ("Space",),
    "core.task": ("Task",),
    "core.types": ("Affine", "Batch", "Client", "Cohort", "Number", "Part", "State"),
    "data.dataset": ("Dataset", "NaturalSource", "Samples", "Source"),
    "data.assignment": ("Assignment",),
    "data.partition": ("Partition",),
    "experiment.api": ("run",),
    "experiment.config": ("Config", "load_config"),
    "experiment.plugins": ("register",),
    "experiment.process_tuning": ("tune_process",),
    "experiment.store": ("Run", "load"),
    "models": ("Network",),
    "participation": ("Participation",),
    "report.describe": ("Description", "describe"),
    "report.python": ("compare", "report", "sweep", "tune"),
    "report.runs": ("Runs",),
    "report.tuning": ("Tuning",),
}
PACKAGES = ("algorithms", "core", "data", "engine", "experiment", "kernels", "models", "participation", "report")

shown.shown_by = lambda: import_module(".report.runs", __name__)


if not TYPE_CHECKING:  # or type checkers would take every name for a public one

    def __getattr__(name: str) -> Any:
        """A public name or a package of askew, which is imported now."""
        if name in PACKAGES:
            return import_module(f".{name}", __name__)
        for home, names in HOMES.items():
            if name in names:
                value = globals()[name] = getattr(import_module(f".{home}", __name__), name)
                return value
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
