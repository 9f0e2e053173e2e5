"""Warnings and remarks as sentences."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TextIO

from ..core.files import printable
from ..errors import Remark, StoreWarning


def show_plain_warnings(show: Callable[[str], object]) -> None:
    """Show warnings about what is stored, and remarks, as one sentence each, every time; others as Python does."""
    show_other = warnings.showwarning

    def show_warning(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if issubclass(category, (StoreWarning, Remark)):
            show(f"warning: {printable(str(message))}")
        else:
            show_other(message, category, filename, lineno, file, line)

    for kind in (StoreWarning, Remark):
        warnings.simplefilter("always", kind)
    warnings.showwarning = show_warning
