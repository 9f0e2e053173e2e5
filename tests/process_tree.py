"""Processes of this machine: those that another one started."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def process_tree(process_id: int) -> list[int]:
    """A process and all that it started, also those in sessions of their own."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    tree = [process_id]
    for one in tree:
        tree += children.get(one, [])
    return tree
