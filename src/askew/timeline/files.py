"""The CSV files of the virtual clock: clients' speeds and links, and when they are there."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..core.files import is_readable_file
from ..errors import DataError

LINK_COLUMNS = ("latency", "up", "down")
MOST_DIGITS = 18  # of a client's number: Python refuses to read very long ones
SHORTEST = 1e-6  # seconds of a whole trace: the clock must be able to tell its moments apart


def read_table(name: str, key: str, clients: int) -> Mapping[int, Mapping[str, Any]]:
    """What a CSV file of the setting `key` says, by client; an error if it cannot be used."""
    path = Path(name)
    try:
        if path.exists() and not is_readable_file(path):
            raise ValueError("it is no regular file, or far too large")
        stat = path.stat()
        return READERS[key](path, stat.st_mtime_ns, stat.st_size, clients)
    except OSError as problem:
        reason = problem.strerror or type(problem).__name__
    except (ValueError, csv.Error) as problem:
        reason = "it is not a text file in UTF-8" if isinstance(problem, UnicodeDecodeError) else str(problem)
    raise DataError(f"time: cannot use {path}: {reason}; mend the file or name another one in time.{key}.")


def read_rows(
    path: Path, needed: Sequence[str], optional: Sequence[str], clients: int
) -> list[tuple[int, int, dict[str, float]]]:
    """The line, the client and the numbers of every row of a CSV file, all of them ≥ 0 and finite."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file, skipinitialspace=True)
        columns = [column.strip() for column in reader.fieldnames or ()]
        reader.fieldnames = columns
        if missing := [column for column in ("client", *needed) if column not in columns]:
            raise ValueError(
                f"its first line must name the columns {', '.join(('client', *needed))}; {missing[0]} is missing"
            )
        names = [column for column in (*needed, *optional) if column in columns]
        if twice := [name for name in ("client", *names) if columns.count(name) > 1]:
            raise ValueError(f"its first line names the column {twice[0]} more than once")
        for name in optional:
            if name not in columns and (near := [column for column in columns if resembles(column, name)]):
                raise ValueError(
                    f"its first line names the column {near[0][:40]!r}, which is not read; call it {name!r} if that is "
                    "meant, or leave it out"
                )
        rows = [(reader.line_num, client_of(row["client"], clients, reader.line_num), row) for row in reader]
    if not rows:
        raise ValueError("it has no row below the names of its columns")
    if longer := [line for line, _, row in rows if None in row]:  # where the reader puts what has no column
        raise ValueError(f"line {longer[0]} has more fields than the first line has columns")
    return [(line, client, {name: number_of(row[name], name, line) for name in names}) for line, client, row in rows]


def resembles(column: str, name: str) -> bool:
    """May a column be meant that has this name? Or does a word of its name begin so, as in "upload" and "bytes_up"?"""
    words = re.split(r"[^a-z]+", column.lower())
    return any(word.startswith(name) or get_close_matches(word, [name], cutoff=0.75) for word in words)


def client_of(text: str | None, clients: int, line: int) -> int:
    """The client that a row is about."""
    word = (text or "").strip()
    if not (word.isascii() and word.isdecimal()) or len(word) > MOST_DIGITS or int(word) >= clients:
        raise ValueError(
            f"line {line} names the client {word[:40]!r}, but clients are numbered from 0 to {clients - 1}"
        )
    return int(word)


def number_of(text: str | None, name: str, line: int) -> float:
    """A number of a row. Python itself would read digits of any script, and underscores between them."""
    word = (text or "").strip()
    try:
        value = float(word) if word.isascii() and "_" not in word else math.nan
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} in line {line} must be a number ≥ 0, got {word[:40]!r}")
    return value + 0.0


@lru_cache(maxsize=8)
def read_devices(path: Path, changed: int, size: int, clients: int) -> dict[int, dict[str, float]]:
    """Every client's seconds a sample, and its link where the file has it."""
    table: dict[int, dict[str, float]] = {}
    for line, client, numbers in read_rows(path, ("seconds",), LINK_COLUMNS, clients):
        if client in table:
            raise ValueError(f"line {line} names the client {client} a second time")
        table[client] = numbers
    if len(table) < clients:
        first = next(i for i in range(clients) if i not in table)
        raise ValueError(f"it needs a row for each of the {clients} clients and has none for client {first}")
    return table


@lru_cache(maxsize=8)
def read_intervals(path: Path, changed: int, size: int, clients: int) -> dict[int, dict[str, list[float]]]:
    """When each client is there: begins and ends of its intervals, sorted; touching ones are joined."""
    found: dict[int, list[tuple[float, float, int]]] = {}
    for line, client, numbers in read_rows(path, ("from", "to"), (), clients):
        if numbers["from"] >= numbers["to"]:
            raise ValueError(f"line {line} ends before it begins: from {numbers['from']:g} to {numbers['to']:g}")
        found.setdefault(client, []).append((numbers["from"], numbers["to"], line))
    table: dict[int, dict[str, list[float]]] = {}
    for client, intervals in found.items():
        own = table[client] = {"from": [], "to": []}
        for start, end, line in sorted(intervals):
            if own["to"] and start < own["to"][-1]:
                raise ValueError(f"line {line} overlaps another interval of client {client}")
            if own["to"] and start == own["to"][-1]:
                own["to"][-1] = end
            else:
                own["from"].append(start)
                own["to"].append(end)
    last = max(own["to"][-1] for own in table.values())
    if last < SHORTEST:
        raise ValueError(f"its last second is {last:g}, and it begins again then; it must be {SHORTEST:g} or later")
    return table


READERS: dict[str, Callable[[Path, int, int, int], Mapping[int, Mapping[str, Any]]]] = {
    "clients": read_devices,
    "trace": read_intervals,
}
