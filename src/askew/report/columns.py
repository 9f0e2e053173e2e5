"""The records of a run as columns: small in memory, added to round by round, and shown in parts."""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from math import isfinite, nan
from threading import Lock
from typing import Any

from ..core.records import NOTHING_CAME, REPEATED
from ..experiment.roll_call import round_sentence

USED, MISSING, REFUSED = 1, 2, 3  # what became of a client that was asked in a round
UNREACHABLE = "not connected or silent when a round began"
KEPT_INCIDENTS = 100  # rounds whose incidents are kept as sentences
MOST_COLUMNS = 2000  # numbers of one record that are kept
NO_CURVES = ("participants", "incidents", "answer_seconds")  # tables and lists of a record that are no curves


class Columns:
    """The numbers of all rounds by key, and who was asked in each of them."""

    def __init__(self, records: Iterable[Mapping[str, Any]] = ()) -> None:
        self.lock = Lock()  # the reader of the folder adds while requests are answered
        self.count = 0
        self.numbers: dict[str, array[float]] = {}  # nan, or too short, where nothing was recorded
        self.clients = array("I")  # that were asked, round after round
        self.outcomes = bytearray()  # of each of them
        self.ends = array("Q", [0])  # round r has the clients from ends[r - 1] to ends[r]
        self.reasons: dict[str, Counter[int]] = {}  # by reason, how often each client
        self.incidents: deque[tuple[int, str]] = deque(maxlen=KEPT_INCIDENTS)
        self.best: float | None = None
        self.totals = {"bytes": 0.0, "seconds": 0.0}
        self.extend(records)

    def extend(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Add records of the rounds that follow."""
        for record in records:
            clients, outcomes = client_outcomes(record)
            with self.lock:
                for key, value in numbers_of(record):
                    self._put(key, value)
                self.clients.extend(clients)
                self.outcomes.extend(outcomes)
                self.ends.append(len(self.clients))
                self.count += 1
                self._add_incidents(record)
                accuracy = record.get("accuracy")
                if isinstance(accuracy, (int, float)):
                    self.best = accuracy if self.best is None else max(self.best, accuracy)
                self.totals["bytes"] += record["bytes_up"] + record["bytes_down"]
                self.totals["seconds"] += record["seconds"]

    def _put(self, key: str, value: float) -> None:
        column = self.numbers.get(key)
        if column is None:
            if len(self.numbers) >= MOST_COLUMNS:
                return
            column = self.numbers[key] = array("d")
        if len(column) < self.count:
            column.extend([nan] * (self.count - len(column)))
        column.append(value)

    def _add_incidents(self, record: Mapping[str, Any]) -> None:
        incidents = record.get("incidents")
        if unreachable := record.get("unreachable"):
            self.reasons.setdefault(UNREACHABLE, Counter()).update(unreachable)
        if isinstance(incidents, dict) and incidents:
            for reason, clients in incidents.items():
                self.reasons.setdefault(reason, Counter()).update(clients)
            self.incidents.append((self.count, round_sentence(record)))

    def last(self, key: str) -> float | None:
        """The last number of a key."""
        return next((value for value in reversed(self.numbers.get(key, ())) if isfinite(value)), None)

    def points(self, key: str) -> tuple[list[int], list[float]]:
        """The rounds in which there is a number of a key, and these numbers."""
        with self.lock:
            values = self.numbers.get(key, array("d"))[:]
        pairs = [(round, value) for round, value in enumerate(values, 1) if isfinite(value)]
        return [round for round, _ in pairs], [value for _, value in pairs]

    def so_far(self, *keys: str) -> list[float]:
        """The sum of the numbers of some keys up to the end of each round."""
        with self.lock:
            columns = [self.numbers[key][:] for key in keys if key in self.numbers]
        return list(accumulate(sum(row) for row in zip(*columns, strict=False)))

    def asked(self, first: int, last: int) -> tuple[array[int], bytearray, array[int]]:
        """Clients and outcomes of the rounds from `first` to `last`, and where each of these rounds ends."""
        with self.lock:
            start, end = self.ends[first - 1], self.ends[last]
            return self.clients[start:end], self.outcomes[start:end], self.ends[first - 1 : last + 1]


def numbers_of(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of a record; entries of tables and lists as "table.name"."""
    for key, value in record.items():
        kind = type(value)  # not isinstance, which is slower, and true of bool
        if kind is float or kind is int:
            yield key, value
        elif (kind is dict or kind is list) and key not in NO_CURVES:
            for name, entry in value.items() if kind is dict else enumerate(value):
                if type(entry) is float or type(entry) is int:
                    yield f"{key}.{name}", entry


def client_outcomes(record: Mapping[str, Any]) -> tuple[Iterable[int], bytes]:
    """The clients that were asked in a round, and what became of each."""
    participants, incidents = record.get("participants") or [], record.get("incidents")
    if not incidents or not isinstance(incidents, dict):
        return array("I", participants), bytes([USED]) * len(participants)
    outcomes = dict.fromkeys(participants, USED)
    for reason, clients in incidents.items():
        if reason != REPEATED:
            outcomes |= dict.fromkeys(clients, MISSING if reason in NOTHING_CAME else REFUSED)
    return array("I", outcomes), bytes(outcomes.values())


def thin_out(values: Sequence[float], most: int) -> list[int]:
    """The places of at most about so many values: the lowest and the highest of each stretch, so that no peak is
    lost.
    """
    count, stretches = len(values), most // 2
    if count <= most:
        return list(range(count))
    kept = {0, count - 1}
    for k in range(stretches):
        inside = range(k * count // stretches, (k + 1) * count // stretches)
        kept |= {min(inside, key=values.__getitem__), max(inside, key=values.__getitem__)}
    return sorted(kept)
