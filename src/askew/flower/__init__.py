"""The same methods on real machines, over Flower (the extra `flower`).

An app folder holds a page of TOML and two lines of Python: `server_app(page)` and `client_app(page)`, each with the user's data module
where there is one. Nothing here is imported by the rest of askew but the command line.
"""

from __future__ import annotations

from importlib.util import find_spec

from ..errors import EngineError
from .deployment_data import DataModule

FLOWER = "flwr>=1.41,<1.42"  # what was tested; the extra `flower` says the same


def require_flower() -> None:
    """A sentence where Flower is not installed."""
    if find_spec("flwr") is None:
        raise EngineError(f"deployments need Flower, which is not installed; run pip install '{FLOWER}'.")


__all__ = ["FLOWER", "DataModule", "require_flower"]
