"""The rule that takes the clients of each round from a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

import numpy as np

from ..core.files import is_readable_file, map_array
from ..core.settings import setting
from ..errors import ConfigError, DataError
from .base import Participation, keep


class Trace(Participation):
    """The clients that a file names take part: as it was observed, or as another program drew it.

    A .json file is a list of rounds, each a list of client ids from 0 to N − 1. A .npy file is a bool array
    [rounds, N].
    """

    idea: ClassVar[str] = "a file says who comes in each round"
    path: str = setting("the .json or .npy file; a relative path starts from the working folder", default="")
    repeat: bool = setting("begin again after the file's last round; false: later rounds have no clients", default=True)

    def check_clients(self, clients: int) -> None:
        self.rows(clients)

    def reads(self) -> tuple[Path, ...]:
        return (Path(self.path),)

    def sample(self, seed: int, round: int, eligible: np.ndarray, clients: int) -> np.ndarray:
        rows = self.rows(clients)
        ids = rows[(round - 1) % len(rows)] if self.repeat or round <= len(rows) else rows[0][:0]
        return ids[np.isin(ids, eligible)]

    def sample_there(
        self, seed: int, round: int, eligible: np.ndarray, clients: int, is_there: Callable[[int], bool]
    ) -> np.ndarray:
        return keep(self.sample(seed, round, eligible, clients), is_there)

    def rows(self, clients: int) -> tuple[np.ndarray, ...]:
        """The sorted ids of every round of the file; an error if the file cannot be used."""
        path = Path(self.path)
        if path.suffix not in READERS:
            raise ConfigError(
                f"{self.display_name()}: path must name a .json or .npy file that says who comes in each round, "
                f"got {self.path!r}; set participation.path."
            )
        try:
            if path.exists() and not is_readable_file(path):
                raise ValueError("it is no regular file, or far too large")
            stat = path.stat()
            return read_trace(path, stat.st_mtime_ns, stat.st_size, clients)
        except OSError as problem:
            reason = problem.strerror or type(problem).__name__
        except (ValueError, RecursionError) as problem:
            reason = str(problem)
        raise DataError(
            f"{self.display_name()}: cannot use {path}: {reason}; "
            "mend the file or name another one in participation.path."
        )


@lru_cache(maxsize=8)
def read_trace(path: Path, changed: int, size: int, clients: int) -> tuple[np.ndarray, ...]:
    """The rounds of a file; the time of its last change and its size are there so that a new version is read again."""
    return READERS[path.suffix](path, clients)


def read_json(path: Path, clients: int) -> tuple[np.ndarray, ...]:
    """The rounds of a JSON file, a list of lists of ids."""
    page = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(page, list) or not page or not all(isinstance(row, list) for row in page):
        raise ValueError("it must be a list of rounds, one or more, each a list of client ids")
    for t, row in enumerate(page, 1):
        for i in row:
            if type(i) is not int or not 0 <= i < clients:
                raise ValueError(
                    f"its round {t} names {json.dumps(i):.40}, but ids are whole numbers from 0 to {clients - 1}"
                )
        if len(set(row)) < len(row):
            raise ValueError(f"its round {t} names a client twice")
    return tuple(np.array(sorted(row), dtype=np.int64) for row in page)


def read_npy(path: Path, clients: int) -> tuple[np.ndarray, ...]:
    """The rounds of a numpy file, a bool array."""
    page = map_array(path)
    if page.dtype != bool or page.shape[1:] != (clients,) or not len(page):
        raise ValueError(
            f"it must be a bool array [rounds, {clients}] of one round or more, got {page.dtype} {list(page.shape)}"
        )
    return tuple(np.flatnonzero(row).astype(np.int64, copy=False) for row in page)


READERS = {".json": read_json, ".npy": read_npy}
