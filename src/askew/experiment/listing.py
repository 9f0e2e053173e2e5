"""The stored catalogue: what this version of askew registers, with settings, defaults and measured costs.

It is read without what trains, so that lists and tables of stored runs come at once. `docs/generate.py` writes it from
`catalogue.py`, and a test compares the two.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import UnknownName, did_you_mean

PATH = Path(__file__).with_name("catalogue.json")
KINDS = ("algorithms", "datasets", "models", "partitions", "participations", "rules", "attacks")


@cache
def stored_catalogue() -> dict[str, Any]:
    """The entries of each kind, and under "optional tables" the defaults of tables that most runs do not have."""
    catalogue: dict[str, Any] = json.loads(PATH.read_text(encoding="utf-8"))
    return catalogue


def stored_entries(kind: str) -> list[dict[str, Any]]:
    """One entry for each member of a kind, such as "algorithms", that askew itself registers."""
    if kind not in KINDS:
        raise UnknownName(f"there is no list of {kind!r}; {did_you_mean(kind, [*KINDS, 'experiments'])}")
    entries: list[dict[str, Any]] = stored_catalogue()[kind]
    return entries
