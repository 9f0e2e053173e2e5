"""Everything askew raises on purpose, and the nearest-match helper behind its sentences.

    AskewError                     one clear sentence; the command line prints it and exits with 2
    ├── ConfigError                a setting is unknown, of the wrong type or out of range
    │   └── UnknownName            a name that no registry holds; names the nearest match
    ├── DataError                  a dataset or partition cannot be had as asked
    ├── ModelError                 a network does not fit the data, the algorithm or the engine
    ├── AlgorithmError             a hook returned something the interface does not allow
    ├── EngineError                an engine or device cannot do this run
    └── StoreError                 a run folder or file cannot be read or written
        └── DiskFull               there is no room for it: the next file would fail too

A StoreWarning says what is damaged where the program can go on without it, a DataWarning what was done to data that
were handed in from Python, and a Remark what else a user should know about a run or a method.

Every sentence says what was wrong, what is allowed and what to do.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from difflib import get_close_matches


class AskewError(Exception):
    """Root of the tree: a mistake or a circumstance that a person can put right."""


class ConfigError(AskewError):
    """A setting is unknown, of the wrong type or out of range."""


class UnknownName(ConfigError):
    """A name that no registry holds."""


class DataError(AskewError):
    """A dataset or partition cannot be had as asked."""


class ModelError(AskewError):
    """A network does not fit the data, the algorithm or the engine."""


class AlgorithmError(AskewError):
    """A hook returned something the interface does not allow."""


class EngineError(AskewError):
    """An engine or device cannot do this run."""


class StoreError(AskewError):
    """A run folder or file cannot be read or written."""


class DiskFull(StoreError):
    """A file cannot be written as there is no room for it; the next one would fail too."""


class StoreWarning(UserWarning):
    """Something that is stored is damaged or was made otherwise, and the program goes on without it."""


class DataWarning(UserWarning):
    """Something was done to a user's data, such as counting labels anew, that the user should know."""


class Remark(UserWarning):
    """Something that a user should know, and with which the program goes on."""


# Python says a warning once for each line of code, and the line of a notebook's cell may be run again.
warnings.simplefilter("always", Remark, append=True)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Say the nearest match, then the rest: "did you mean 'feddyn'? Known: …"."""
    names = sorted(known)
    spelled = {known_name.lower(): known_name for known_name in names}
    near = [spelled[match] for match in get_close_matches(name.lower(), spelled, n=1, cutoff=0.5)]
    if not names:
        return "none is known here: leave it out."
    return (
        f"did you mean {near[0]!r}? Known: {', '.join(names)}."
        if near
        else f"known: {', '.join(names)}; choose one of them."
    )
