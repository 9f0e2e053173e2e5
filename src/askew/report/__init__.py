"""Tables, pictures and one page from stored runs; nothing here trains or needs what trains."""

from __future__ import annotations

from .figures import write_figures
from .page import write_report
from .tables import labels, table

__all__ = ["labels", "table", "write_figures", "write_report"]
