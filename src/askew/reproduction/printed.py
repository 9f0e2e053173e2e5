"""The numbers that the papers print: papers/NAME/printed.csv, read and checked."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from ..errors import ConfigError
from ..experiment.store import read_text

PrintedKey = tuple[str, str, str, str]  # experiment, case, method and metric


class PrintedNumber(NamedTuple):
    """One number of a paper, as it is printed; the fields are the columns of printed.csv."""

    experiment: str
    case: str
    method: str  # "NAME @ SETTINGS" is one point of a grid
    metric: str
    value: str
    spread: str  # the printed standard deviation; empty if none is printed
    note: str

    @property
    def key(self) -> PrintedKey:
        return self.experiment, self.case, self.method, self.metric

    @property
    def text(self) -> str:
        """The value with its spread, as a table shows it."""
        return f"{self.value} ± {self.spread}" if self.spread else self.value


PrintedNumbers = Mapping[PrintedKey, PrintedNumber]


def read_printed(folder: Path) -> list[PrintedNumber]:
    """The printed numbers of the paper in this folder, in the file's order; none where the file does not exist."""
    path = folder / "printed.csv"
    if not path.is_file():
        return []
    try:
        rows = list(csv.reader(io.StringIO(read_text(path), newline="")))
    except csv.Error as e:
        raise ConfigError(f"{path} is not a table of commas and lines ({e}); correct the file.") from None
    columns = PrintedNumber._fields
    if not rows or tuple(rows[0]) != columns or any(len(row) != len(columns) for row in rows):
        raise ConfigError(
            f"{path} must hold the columns {','.join(columns)}; correct its first line and the number of commas."
        )
    return [PrintedNumber(*row) for row in rows[1:]]


def printed_by_key(numbers: Iterable[PrintedNumber]) -> dict[PrintedKey, PrintedNumber]:
    """The same numbers by experiment, case, method and metric."""
    return {number.key: number for number in numbers}
