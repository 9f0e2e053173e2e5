"""What shows runs in Python. It is in `report`, a package above this one, so `askew/__init__.py` says where."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

shown_by: Callable[[], Any]  # the module that shows runs, imported when a run is to be shown
