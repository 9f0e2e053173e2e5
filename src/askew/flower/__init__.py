"""The same methods on real machines, over Flower (the extra `flower`).

An app folder holds the configuration as TOML and two lines of Python, `server_app(CONFIG, DATA)` and
`client_app(CONFIG, DATA)`, where DATA is the user's data module or None. Of the rest of askew only the command line
imports this package.
"""

from __future__ import annotations

from importlib.util import find_spec

from ..errors import EngineError
from .deployment_data import DataModule

FLOWER = "flwr>=1.41,<1.42"  # the versions that were tested; the extra `flower` names the same


def require_flower() -> None:
    """Refuse to go on where Flower is not installed."""
    if find_spec("flwr") is None:
        raise EngineError(f"deployments need Flower, which is not installed; run pip install '{FLOWER}'.")


__all__ = ["FLOWER", "DataModule", "require_flower"]
