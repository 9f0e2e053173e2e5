"""Runs that were killed and files that were damaged, for tests of everything that is read again.

ASKEW_LONG=all tries many more damages.
"""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import askew
from askew.errors import AskewError, StoreWarning

LONG = os.environ.get("ASKEW_LONG") == "all"
TIMES = 500 if LONG else 12  # damages of each file
TABLES: dict[str, Any] = {
    "rounds": 6,
    "model": {"name": "softmax"},
    "partition": {"clients": 10},
    "participation": {"cohort": 3},
    "algorithm": {"name": "scaffold"},
    "local": {"lr": 0.1, "steps": 2},
}
Read = Callable[[Path], object]


class Killed(BaseException):
    """Stands for a kill: nothing after it is done."""


def kill_after(round: int, out: Path, tables: dict[str, Any] = TABLES) -> Path:
    """The folder of a run that was killed after a round and its checkpoint."""

    def kill(run: askew.Run, record: dict[str, object] | None) -> None:
        if record and record["round"] == round:
            raise Killed

    with pytest.raises(Killed):
        askew.run(tables, out=out, watch=kill, save_every=0)
    return next(folder for folder in out.iterdir() if folder.is_dir())


def records(run: askew.Run) -> list[dict[str, object]]:
    """A run's records without times."""
    return [{k: v for k, v in r.items() if k != "seconds"} for r in run.rounds]


def damaged(content: bytes, draw: random.Random) -> bytes:
    """The content after one accident: a flipped bit, or some bytes lost, repeated, zeroed, overwritten or inserted."""
    start = draw.randrange(len(content))
    end = min(len(content), start + draw.choice([1, 1, 2, 8, 64, 512]))
    kind = draw.randrange(7)
    if kind == 0:
        return content[:start] + bytes([content[start] ^ 1 << draw.randrange(8)]) + content[start + 1 :]
    if kind == 1:
        return content[:start]
    inner = {
        2: b"",
        3: content[start:end] * 2,
        4: bytes(end - start),
        5: draw.randbytes(end - start),
        6: draw.randbytes(draw.randrange(1, 9)) + content[start:end],
    }
    return content[:start] + inner[kind] + content[end:]


def attack(path: Path, read: Read, right: object = None, seed: int = 0) -> int:
    """Damage a file in many ways; how often a sentence was given. With `right`, nothing else may ever be read."""
    content, draw, refused = path.read_bytes(), random.Random(seed), 0
    for _ in range(TIMES):
        path.write_bytes(damaged(content, draw))
        try:
            with warnings.catch_warnings(record=True) as noted:
                warnings.simplefilter("always", StoreWarning)
                found = read(path)
        except AskewError as problem:
            refused += 1
            assert str(problem).strip() and "\n" not in str(problem)
        else:
            assert right is None or noted or found == right, f"damage {refused} of {path.name} was read"
    path.write_bytes(content)
    print(f"{path.name}: {TIMES} damages, {refused} refused in one sentence")
    return refused
