"""Tables, pictures and one page from stored runs; nothing here trains or needs what trains.

The package is also the function `askew.report`, since a function of that name would hide the package.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

from .figures import write_figures
from .page import write_report
from .python import RunsOrFolders, report
from .tables import labels, table

__all__ = ["labels", "table", "write_figures", "write_report"]


class CallablePackage(ModuleType):
    """A package that can be called: `askew.report(…)`."""

    def __call__(self, *what: RunsOrFolders, out: str | Path = "report", title: str | None = None) -> Path:
        """Write one HTML page with tables and pictures of runs into a folder; return the page's path."""
        return report(*what, out=out, title=title)


sys.modules[__name__].__class__ = CallablePackage
