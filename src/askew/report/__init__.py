"""Tables, pictures and one page from stored runs; nothing here trains or needs what trains."""

from __future__ import annotations

from .figures import figures
from .page import write_report
from .tables import labels, table

__all__ = ["figures", "labels", "table", "write_report"]
