"""The virtual clock of a simulation: how long clients take, when they are there, and how the server waits.

All of it is a function of the seed and the client. Nothing is drawn of a client before it is asked for.
"""

from __future__ import annotations

import csv
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import cached_property, lru_cache
from itertools import chain, count
from math import log
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple, Protocol

import numpy as np

from .core.files import is_readable_file
from .core.records import LATE, LEFT, NOT_AWAITED
from .core.rng import uniform_words, uniforms
from .core.settings import Settings, setting
from .errors import ConfigError, DataError

HOUR, DAY = 3600.0, 86400.0  # seconds
REFRESHES = 3  # of a client's on/off state in one block of time, on average
BLOCK = 4096  # intervals of a trace that are looked at together
FURTHEST = 1e4  # times that one mean stay may be longer than the other: more would take long to search
AVAILABILITY = "time availability"  # the purpose of these draws
LINK_COLUMNS = ("latency", "up", "down")
NORMAL = NormalDist()


class TimeSettings(Settings):
    """A virtual clock: how long clients take, when they are there, and how the server waits for their answers.

    Simulations only. `wait` switches it on. An answer takes latency + bytes down / `down` + samples · seconds a sample
    + bytes up / `up` + latency.
    """

    title = "time"
    wait: str = setting(
        "how the server waits: for all answers, until the deadline, for the first answers of a larger cohort, or "
        "asynchronously until `buffer` answers have come; none: there is no clock",
        default="none",
        choices=("none", "all", "deadline", "first", "buffer"),
    )
    deadline: float = setting(
        "seconds after which a round ends, with wait = deadline; may be inf",
        default=0.0,
        least=0,
        infinite=True,
    )
    late: str = setting(
        "what becomes of answers after the deadline: drop: they are lost; next: the client stays at work, and its "
        "answer is used in the round in which it comes",
        default="drop",
        choices=("drop", "next"),
    )
    spare: int = setting("clients that are asked beyond the cohort, with wait = first", default=0, least=0)
    buffer: int = setting("answers that make a step of the server, with wait = buffer", default=0, least=0)
    at_work: int = setting(
        "clients that are at work at the same time, with wait = buffer; 0: the cohort of the participation rule",
        default=0,
        least=0,
    )
    seconds: float = setting("seconds that a client computes for each sample", default=0.01, least=0)
    speed: str = setting(
        "how clients differ: all take `seconds`; lognormal with that median; Pareto with that least value; "
        "half-normal with that standard deviation; or in proportion to their number of samples, the mean client taking "
        "`seconds`",
        default="constant",
        choices=("constant", "lognormal", "pareto", "halfnormal", "size"),
    )
    sigma: float = setting("standard deviation of log seconds, with speed = lognormal", default=0.5, least=0, most=10)
    tail: float = setting(
        "tail index of the Pareto distribution, with speed = pareto; smaller: more very slow clients",
        default=2.0,
        least=0.1,
    )
    latency: float = setting("seconds that a message travels, each way, beside its bytes", default=0.0, least=0)
    up: float = setting("bytes a second from a client to the server; 0: no limit", default=0.0, least=0)
    down: float = setting("bytes a second from the server to a client; 0: no limit", default=0.0, least=0)
    clients: str = setting(
        "a CSV file with the columns client and seconds, a row for each client; also latency, up and down, if it has "
        "them; its numbers replace the settings above",
        default="",
    )
    availability: str = setting(
        "when clients are there: always; markov: on and off for exponential times; day: between two hours of their "
        "local day",
        default="always",
        choices=("always", "markov", "day"),
    )
    mean_on: float = setting("mean seconds that a client stays, with availability = markov", default=3600.0, above=0)
    mean_off: float = setting("mean seconds that it stays away", default=3600.0, above=0)
    opens: float = setting(
        "local hour from which a client is there, with availability = day", default=22.0, least=0, most=24
    )
    closes: float = setting("local hour from which it is away", default=6.0, least=0, most=24)
    zones: int = setting("time zones, evenly over the day, in which clients live", default=24, least=1, most=24)
    trace: str = setting(
        "a CSV file with the columns client, from and to (seconds): when clients are there, instead of availability; "
        "it begins again after its last second",
        default="",
    )

    def check(self) -> None:
        if not self.on and any(getattr(self, field.name) != field.default for field in fields(self)):
            raise ConfigError(
                'time: the clock is off without time.wait; set wait = "all", "deadline", "first" or "buffer".'
            )
        if self.wait == "deadline" and not self.deadline:
            raise ConfigError('time: wait = "deadline" needs time.deadline, in seconds; set it, for example to 60.')
        if self.wait == "buffer" and not self.buffer:
            raise ConfigError(
                'time: wait = "buffer" needs time.buffer, a number of answers; set it, for example to 10.'
            )
        if self.wait == "buffer" and 0 < self.at_work < self.buffer:
            raise ConfigError(
                f"time: a buffer of {self.buffer} answers never fills with {self.at_work} clients at work; "
                "lower time.buffer or raise time.at_work."
            )
        if self.clients and self.speed != "constant":
            raise ConfigError(
                f"time: the file {self.clients} says every client's seconds; leave out time.speed or time.clients."
            )
        if self.trace and self.availability != "always":
            raise ConfigError(
                f"time: the file {self.trace} says when clients are there; leave out time.availability or time.trace."
            )
        if self.availability == "markov" and not 1 / FURTHEST <= self.mean_on / self.mean_off <= FURTHEST:
            raise ConfigError(
                f"time: mean_on and mean_off may differ by a factor of {FURTHEST:,.0f} at most, got {self.mean_on:g} "
                f"and {self.mean_off:g}; set them nearer to each other."
            )
        if self.availability == "day" and (self.closes - self.opens) % 24 == 0:
            raise ConfigError(
                f"time: opens and closes must be different hours, got {self.opens:g} and {self.closes:g}; "
                'set another hour, or availability = "always".'
            )

    @property
    def on(self) -> bool:
        """Is there a clock?"""
        return self.wait != "none"

    @property
    def overlapping(self) -> bool:
        """May an answer be used in a later round than that in which its client began?"""
        return self.wait == "buffer" or (self.wait == "deadline" and self.late == "next")

    def reads(self) -> tuple[Path, ...]:
        return tuple(Path(name) for name in (self.clients, self.trace) if name)

    def check_clients(self, clients: int) -> None:
        """Refuse files that do not fit so many clients; called when the configuration loads."""
        if self.clients:
            read_table(self.clients, "clients", clients)
        if self.trace:
            read_table(self.trace, "trace", clients)


# devices --------------------------------------------------------------------------------------------------------------


class Device(NamedTuple):
    """How fast one client computes and sends."""

    seconds: float  # a sample
    latency: float = 0.0  # seconds, each way
    up: float = 0.0  # bytes a second; 0: no limit
    down: float = 0.0

    def answer_seconds(self, samples: float, bytes_down: float, bytes_up: float, messages: int = 1) -> float:
        """How long an answer takes, from when the server asks; `messages` travel each way, one for each phase."""
        latency = messages * self.latency
        received = bytes_down / self.down if self.down else 0.0
        sent = bytes_up / self.up if self.up else 0.0
        return latency + received + samples * self.seconds + sent + latency


def device_of(settings: TimeSettings, seed: int, client: int, relative_size: float, clients: int) -> Device:
    """The device of a client; `relative_size` is n_i / n̄."""
    if settings.clients:
        link = {name: getattr(settings, name) for name in LINK_COLUMNS}
        table = read_table(settings.clients, "clients", clients)
        return Device(**{"seconds": 0.0, **link, **table[client]})
    seconds = settings.seconds
    if settings.speed == "lognormal":
        seconds *= math.exp(settings.sigma * NORMAL.inv_cdf(next(uniforms(seed, "time speed", client=client))))
    elif settings.speed == "pareto":
        seconds *= next(uniforms(seed, "time speed", client=client)) ** (-1 / settings.tail)
    elif settings.speed == "halfnormal":
        seconds *= abs(NORMAL.inv_cdf(next(uniforms(seed, "time speed", client=client))))
    elif settings.speed == "size":
        seconds *= relative_size
    return Device(seconds, settings.latency, settings.up, settings.down)


# availability ---------------------------------------------------------------------------------------------------------


class Availability(Protocol):
    """When clients are there."""

    def is_there(self, client: int, t: float) -> bool:
        """Is a client there at t?"""
        ...

    def until(self, client: int, t: float) -> float:
        """The moment at which a client leaves that is there at t; t itself if it is away."""
        ...

    def since(self, client: int, t: float) -> float:
        """The first moment from t on at which it is there, t itself if it is; infinity if it never comes."""
        ...

    def earliest(self, clients: np.ndarray, t: float) -> float:
        """The first moment from t on at which one of these is there; infinity if none ever comes."""
        ...

    def few(self, t: float, most: int) -> np.ndarray | None:
        """The clients that are there at t, sorted, if they are at most so many and need not be searched; else None."""
        ...


class AlwaysThere:
    """Everybody, always."""

    def is_there(self, client: int, t: float) -> bool:
        return True

    def until(self, client: int, t: float) -> float:
        return math.inf

    def since(self, client: int, t: float) -> float:
        return t

    def earliest(self, clients: np.ndarray, t: float) -> float:
        return t if len(clients) else math.inf

    def few(self, t: float, most: int) -> np.ndarray | None:
        return None


def search_earliest(rule: Availability, clients: np.ndarray, t: float, bound: float) -> float:
    """The first moment from t on at which one of these is there; nobody is before `bound`, so there the search ends."""
    first = math.inf
    for i in clients.tolist():
        first = min(first, rule.since(i, t))
        if first <= bound:
            break
    return first


class OnOff(NamedTuple):
    """Each client is there and away in turns, for exponential times of these means, from a stationary start.

    Such a client is one whose state is drawn anew at the points of a Poisson process of rate 1/on + 1/off: there with
    the chance on / (on + off), whatever it was before. So blocks of time can be drawn by their address, and any moment
    is found without those before it.
    """

    seed: int
    share: float  # of the time that a client is there
    block: float  # seconds of a block of time

    @classmethod
    def of_means(cls, seed: int, on: float, off: float) -> OnOff:
        """The rule with these mean times."""
        return cls(seed, on / (on + off), REFRESHES / (1 / on + 1 / off))

    def is_there(self, client: int, t: float) -> bool:
        number = math.floor(t / self.block)
        while (state := self.last_draw(client, number, t)) < 0:
            number -= 1
        return ((state >> 12) + 0.5) / 2**52 < self.share

    def last_draw(self, client: int, number: int, t: float) -> int:
        """The last state that is drawn in one block by t, as its 64 bits; −1: none is.

        This is what `refreshes` draws, up to t and not further: most clients are looked at once.
        """
        seed, _, block = self
        at, state, begin, length = 0.0, -1, number * REFRESHES, block / REFRESHES
        for part in count():
            words = uniform_words(seed, AVAILABILITY, number, client, part)
            for k in (0, 2, 4, 6):
                at -= log(((words[k] >> 12) + 0.5) / 2**52)
                if at >= REFRESHES or (begin + at) * length > t:
                    return state
                state = words[k + 1]
        raise AssertionError("unreachable")

    def first(self, client: int, t: float, state: bool) -> float:
        """The first moment after t at which a client's state is drawn anew and is this one."""
        number = math.floor(t / self.block)
        while True:
            moments, states = refreshes(self, client, number)
            for k in range(bisect_right(moments, t), len(moments)):
                if states[k] == state:
                    return moments[k]
            number += 1

    def until(self, client: int, t: float) -> float:
        moments, states = refreshes(self, client, math.floor(t / self.block))
        before = bisect_right(moments, t)
        there = states[before - 1] if before else self.is_there(client, t)
        return self.first(client, t, False) if there else t

    def since(self, client: int, t: float) -> float:
        return t if self.is_there(client, t) else self.first(client, t, True)

    def earliest(self, clients: np.ndarray, t: float) -> float:
        # One in 1 / share clients is there, so that the search is short. All are looked at only if nobody is there,
        # the chance of which falls exponentially with their number.
        return search_earliest(self, clients, t, t)

    def few(self, t: float, most: int) -> np.ndarray | None:
        return None


@lru_cache(maxsize=2**15)
def refreshes(rule: OnOff, client: int, number: int) -> tuple[list[float], list[bool]]:
    """The moments of one block at which a client's state is drawn anew, and these states."""
    seed, share, block = rule
    moments: list[float] = []
    states: list[bool] = []
    at, begin, length = 0.0, number * REFRESHES, block / REFRESHES
    for part in count():
        words = uniform_words(seed, AVAILABILITY, number, client, part)
        for k in (0, 2, 4, 6):
            at -= log(((words[k] >> 12) + 0.5) / 2**52)
            if at >= REFRESHES:
                return moments, states
            moments.append((begin + at) * length)
            states.append(((words[k + 1] >> 12) + 0.5) / 2**52 < share)
    raise AssertionError("unreachable")


class DayNight(NamedTuple):
    """Each client is there between two hours of its local day; its time zone is drawn once. The clock begins at 0 h in
    the first zone.
    """

    seed: int
    opens: float
    closes: float
    zones: int

    def zone(self, client: int) -> int:
        """The time zone in which a client lives."""
        return int(self.zones * next(uniforms(self.seed, "time zone", client=client)))

    def zone_until(self, zone: int, t: float) -> float:
        """The moment at which clients of a zone leave that are there at t; t itself if they are away."""
        shift = self.opens * HOUR - zone * DAY / self.zones
        opened = shift + math.floor((t - shift) / DAY) * DAY
        return max(t, opened + (self.closes - self.opens) % 24 * HOUR)

    def zone_since(self, zone: int, t: float) -> float:
        """The first moment from t on at which clients of a zone are there."""
        if self.zone_until(zone, t) > t:
            return t
        shift = self.opens * HOUR - zone * DAY / self.zones
        comes = shift + math.floor((t - shift) / DAY) * DAY + DAY
        while self.zone_until(zone, comes) <= comes:  # rounding
            comes = math.nextafter(comes, math.inf)
        return comes

    def is_there(self, client: int, t: float) -> bool:
        return self.until(client, t) > t

    def until(self, client: int, t: float) -> float:
        return self.zone_until(self.zone(client), t)

    def since(self, client: int, t: float) -> float:
        return self.zone_since(self.zone(client), t)

    def earliest(self, clients: np.ndarray, t: float) -> float:
        return search_earliest(self, clients, t, min(self.zone_since(zone, t) for zone in range(self.zones)))

    def few(self, t: float, most: int) -> np.ndarray | None:
        away = all(self.zone_until(zone, t) <= t for zone in range(self.zones))
        return np.zeros(0, dtype=np.int64) if away else None


class TraceIntervals:
    """Each client is there in the intervals of a file, which begins again after its last second."""

    def __init__(self, intervals: Mapping[int, Mapping[str, list[float]]], period: float) -> None:
        self.intervals = intervals  # by client, sorted; touching ones are one
        self.period = period
        # the second of the file at which it was last asked who is there, how many intervals had begun by then, and
        # which of them had not ended
        self.last, self.begun, self.open = 0.0, 0, np.zeros(0, dtype=np.int64)

    @cached_property
    def sorted(self) -> SortedIntervals:
        """The intervals of all clients."""
        columns = [
            np.fromiter(chain.from_iterable(own[name] for own in self.intervals.values()), dtype=np.float64)
            for name in ("from", "to")
        ]
        counts = [len(own["from"]) for own in self.intervals.values()]
        client = np.repeat(np.fromiter(self.intervals, dtype=np.int64), counts)
        order = np.argsort(columns[0], kind="stable")
        return SortedIntervals(columns[0][order], columns[1][order], client[order], np.sort(columns[1]))

    def is_there(self, client: int, t: float) -> bool:
        return self.until(client, t) > t

    def until(self, client: int, t: float) -> float:
        own = self.intervals.get(client)
        if own is None:
            return t
        begun, at = self.place(t)
        k = bisect_right(own["from"], at) - 1
        if k < 0 or own["to"][k] <= at:
            return t
        if own["to"][k] == self.period and own["from"][0] == 0:  # it goes on where the file begins again
            return math.inf if len(own["from"]) == 1 else begun + self.period + own["to"][0]
        return begun + own["to"][k]

    def since(self, client: int, t: float) -> float:
        own = self.intervals.get(client)
        if own is None:
            return math.inf
        if self.until(client, t) > t:
            return t
        begun, at = self.place(t)
        k = bisect_right(own["from"], at)
        moment = begun + (own["from"][k] if k < len(own["from"]) else self.period + own["from"][0])
        while self.until(client, moment) <= moment:  # rounding
            moment = math.nextafter(moment, math.inf)
        return moment

    def earliest(self, clients: np.ndarray, t: float) -> float:
        there = self.few(t, len(self.intervals))
        if there is not None and len(members(there, clients)):
            return t
        begins, who = self.sorted.begins, self.sorted.client
        at = int(np.searchsorted(begins, self.place(t)[1], side="right"))
        for order in (who[at:], who[:at]):  # in the order in which they come, also after the file begins again
            for k in range(0, len(order), BLOCK):
                if len(coming := members(order[k : k + BLOCK], clients)):
                    return self.since(int(coming[0]), t)
        return math.inf

    def few(self, t: float, most: int) -> np.ndarray | None:
        (began, at), (begins, ends, client, sorted_ends) = self.place(t), self.sorted
        begun, ended = (int(np.searchsorted(moments, at, side="right")) for moments in (begins, sorted_ends))
        if begun - ended > most:
            return None
        if at < self.last:  # the file begins again
            self.begun, self.open = 0, self.open[:0]
        # Time goes on: those who are there now were there the last time, or came since then.
        known = np.concatenate([self.open, np.arange(self.begun, begun)])
        self.last, self.begun, self.open = at, begun, known[began + ends[known] > t]
        return np.sort(client[self.open])

    def place(self, t: float) -> tuple[float, float]:
        """When the file began the last time before t, and the seconds since then."""
        begun = math.floor(t / self.period) * self.period
        return begun, t - begun


class SortedIntervals(NamedTuple):
    """The intervals of a file in the order of their begins, and their ends sorted by themselves."""

    begins: np.ndarray
    ends: np.ndarray
    client: np.ndarray
    sorted_ends: np.ndarray


def members(ids: np.ndarray, clients: np.ndarray) -> np.ndarray:
    """Those of the ids that are among the clients, which ascend."""
    return ids[clients[np.searchsorted(clients, ids).clip(max=len(clients) - 1)] == ids] if len(clients) else ids[:0]


def availability_of(settings: TimeSettings, seed: int, clients: int) -> Availability:
    """When clients are there, as configured."""
    if settings.trace:
        intervals = read_table(settings.trace, "trace", clients)
        return TraceIntervals(intervals, max(own["to"][-1] for own in intervals.values()))
    if settings.availability == "markov":
        return OnOff.of_means(seed, settings.mean_on, settings.mean_off)
    if settings.availability == "day":
        return DayNight(seed, settings.opens, settings.closes, settings.zones)
    return AlwaysThere()


# waiting --------------------------------------------------------------------------------------------------------------


class Waited(NamedTuple):
    """How long a round lasted, and what became of each client that was asked."""

    seconds: float
    reasons: list[str]  # why an answer is not used; empty: it is


def wait_for(settings: TimeSettings, wanted: int, answers: Sequence[float], leaves: Sequence[float]) -> Waited:
    """How long a round lasts whose clients answer and leave so many seconds after its begin.

    A client that leaves before its answer has come is lost, and the server knows it at that moment. Of answers that
    come at the same moment those of the first clients count. `wanted` is the cohort's size.
    """
    known = [min(answer, leave) for answer, leave in zip(answers, leaves, strict=True)]
    came = [k for k, answer in enumerate(answers) if answer <= leaves[k]]
    end = max(known, default=0.0)
    if settings.wait == "deadline":
        end = min(end, settings.deadline)
        came = [k for k in came if answers[k] <= end]
    elif settings.wait == "first" and len(came) >= wanted:
        came = sorted(came, key=lambda k: (answers[k], k))[:wanted]
        end = max((answers[k] for k in came), default=0.0)
    used, missed = {*came}, LATE if settings.wait == "deadline" else NOT_AWAITED
    gone = [leaves[k] < answers[k] and leaves[k] <= end for k in range(len(answers))]
    return Waited(end, ["" if k in used else LEFT if gone[k] else missed for k in range(len(answers))])


# files ----------------------------------------------------------------------------------------------------------------


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


def read_rows(path: Path, needed: Sequence[str], clients: int) -> list[tuple[int, int, dict[str, float]]]:
    """The line, the client and the numbers of every row of a CSV file, all of them ≥ 0 and finite."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file, skipinitialspace=True)
        columns = [column.strip() for column in reader.fieldnames or ()]
        reader.fieldnames = columns
        if missing := [column for column in ("client", *needed) if column not in columns]:
            raise ValueError(
                f"its first line must name the columns {', '.join(('client', *needed))}; {missing[0]} is missing"
            )
        names = [column for column in (*needed, *LINK_COLUMNS) if column in columns]
        rows = [(reader.line_num, client_of(row["client"], clients, reader.line_num), row) for row in reader]
    if not rows:
        raise ValueError("it has no row below the names of its columns")
    return [(line, client, {name: number_of(row[name], name, line) for name in names}) for line, client, row in rows]


def client_of(text: str | None, clients: int, line: int) -> int:
    """The client that a row is about."""
    word = (text or "").strip()
    if not word.isdecimal() or int(word) >= clients:
        raise ValueError(
            f"line {line} names the client {word[:40]!r}, but clients are numbered from 0 to {clients - 1}"
        )
    return int(word)


def number_of(text: str | None, name: str, line: int) -> float:
    """A number of a row."""
    try:
        value = float(text or "")
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} in line {line} must be a number ≥ 0, got {(text or '').strip()[:40]!r}")
    return value + 0.0


@lru_cache(maxsize=8)
def read_devices(path: Path, changed: int, size: int, clients: int) -> dict[int, dict[str, float]]:
    """Every client's seconds a sample, and its link where the file has it."""
    table: dict[int, dict[str, float]] = {}
    for line, client, numbers in read_rows(path, ("seconds",), clients):
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
    for line, client, numbers in read_rows(path, ("from", "to"), clients):
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
    return table


READERS: dict[str, Callable[[Path, int, int, int], Mapping[int, Mapping[str, Any]]]] = {
    "clients": read_devices,
    "trace": read_intervals,
}
