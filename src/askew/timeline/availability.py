"""When clients are there."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from functools import cached_property, lru_cache
from itertools import chain, count
from math import log
from typing import NamedTuple, Protocol

import numpy as np

from ..core.rng import uniform, uniform_words
from ..errors import ConfigError
from .files import read_table
from .settings import TimeSettings

HOUR, DAY = 3600.0, 86400.0  # seconds
REFRESHES = 3  # of a client's on/off state in one block of time, on average
BLOCK = 4096  # intervals of a trace that are looked at together
AVAILABILITY = "time availability"  # the purpose of these draws
MOST_REMEMBERED = 2**20  # clients of which it is remembered until when they are away
MOST_CYCLES = 2.0**53  # of a trace: from there on not every whole number is a float
ROUNDING = 64  # neighbouring numbers among which a moment must be, if its sum was rounded


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

    def longest_stay(self, client: int) -> float:
        """The most seconds that a client is there without a break; 0 if it never comes."""
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

    def longest_stay(self, client: int) -> float:
        return math.inf

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


def round_up(moment: float, is_there: Callable[[float], bool]) -> float:
    """This moment, or the next number at which a client is there: a sum may be rounded to before it comes."""
    for _ in range(ROUNDING):
        if is_there(moment):
            return moment
        moment = math.nextafter(moment, math.inf)
    raise too_late(moment)


def too_late(moment: float) -> ConfigError:
    """The refusal of a moment near which numbers are too far apart."""
    return ConfigError(
        f"time: the clock is at {moment:.3g} seconds, where two moments of one stay are the same number; "
        "make answers shorter (time.seconds, time.up, time.down), or stays longer."
    )


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

    def first(self, client: int, t: float, state: bool, limit: float = math.inf) -> float:
        """The first moment after t at which a client's state is drawn anew and is this one; after `limit`: infinity."""
        number = math.floor(t / self.block)
        while number * self.block <= limit * (1 + 1e-12):  # moments are rounded
            moments, states = refreshes(self, client, number)
            for k in range(bisect_right(moments, t), len(moments)):
                if states[k] == state:
                    return moments[k] if moments[k] <= limit else math.inf
            number += 1
        return math.inf

    def until(self, client: int, t: float) -> float:
        moments, states = refreshes(self, client, math.floor(t / self.block))
        before = bisect_right(moments, t)
        there = states[before - 1] if before else self.is_there(client, t)
        return self.first(client, t, False) if there else t

    def since(self, client: int, t: float) -> float:
        return t if self.is_there(client, t) else self.first(client, t, True)


class SearchedOnOff:
    """`OnOff` that remembers how far it has looked for the return of clients that are away.

    Where fewer are there than are wanted, everybody's return is looked for again and again.
    """

    def __init__(self, rule: OnOff) -> None:
        self.rule = rule
        self.away: dict[int, tuple[float, float]] = {}  # by client, from when to when it is known to be away

    def is_there(self, client: int, t: float) -> bool:
        begin, end = self.away.get(client, NEVER)
        return not begin <= t < end and self.rule.is_there(client, t)

    def until(self, client: int, t: float) -> float:
        return self.rule.until(client, t)

    def since(self, client: int, t: float) -> float:
        return self.since_before(client, t, math.inf)

    def since_before(self, client: int, t: float, limit: float) -> float:
        """`since`, if that is by `limit`; else infinity, and the search ends there."""
        begin, end = self.away.get(client, NEVER)
        begin, start = (begin, end) if begin <= t < end else (t, t)
        if start > limit:
            return math.inf
        if self.rule.is_there(client, start):
            return start
        moment = self.rule.first(client, start, True, limit)
        if len(self.away) >= MOST_REMEMBERED:
            self.away.clear()
        self.away[client] = (begin, min(moment, limit))
        return moment

    def earliest(self, clients: np.ndarray, t: float) -> float:
        # With a share p of them there, about 1 / p are looked at. All are only if nobody is there, the chance of which
        # falls exponentially with their number.
        first = math.inf
        for i in clients.tolist():
            first = min(first, self.since_before(i, t, first))
            if first <= t:
                break
        return first

    def longest_stay(self, client: int) -> float:
        return math.inf

    def few(self, t: float, most: int) -> np.ndarray | None:
        return None


NEVER = (math.inf, math.inf)


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
        return int(self.zones * uniform(self.seed, "time zone", client=client))

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
        return round_up(comes, lambda moment: self.zone_until(zone, moment) > moment)

    def is_there(self, client: int, t: float) -> bool:
        return self.until(client, t) > t

    def until(self, client: int, t: float) -> float:
        return self.zone_until(self.zone(client), t)

    def since(self, client: int, t: float) -> float:
        return self.zone_since(self.zone(client), t)

    def earliest(self, clients: np.ndarray, t: float) -> float:
        return search_earliest(self, clients, t, min(self.zone_since(zone, t) for zone in range(self.zones)))

    def longest_stay(self, client: int) -> float:
        return (self.closes - self.opens) % 24 * HOUR

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
        if own["to"][k] == self.period:
            again = self.next_begin(t)
            if own["from"][0] > 0:
                return again
            return math.inf if len(own["from"]) == 1 else again + own["to"][0]  # it goes on where the file begins again
        return begun + own["to"][k]

    def since(self, client: int, t: float) -> float:
        own = self.intervals.get(client)
        if own is None:
            return math.inf
        if self.until(client, t) > t:
            return t
        begun, at = self.place(t)
        k = bisect_right(own["from"], at)
        moment = begun + own["from"][k] if k < len(own["from"]) else self.next_begin(t) + own["from"][0]
        return round_up(moment, lambda moment: self.until(client, moment) > moment)

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

    def longest_stay(self, client: int) -> float:
        own = self.intervals.get(client)
        if own is None:
            return 0.0
        stays = [end - begin for begin, end in zip(own["from"], own["to"], strict=True)]
        if own["from"][0] == 0 and own["to"][-1] == self.period:  # it goes on where the file begins again
            return math.inf if len(stays) == 1 else max(*stays, stays[-1] + stays[0])
        return max(stays)

    def few(self, t: float, most: int) -> np.ndarray | None:
        (began, at), (begins, ends, client, sorted_ends) = self.place(t), self.sorted
        begun, ended = (int(moments.searchsorted(at, "right")) for moments in (begins, sorted_ends))
        if begun - ended > most:
            return None
        if at < self.last:  # the file begins again
            self.begun, self.open = 0, self.open[:0]
        # Time goes on: those who are there now were there the last time, or came since then.
        known = np.concatenate([self.open, np.arange(self.begun, begun)])
        until = np.where(ends[known] == self.period, self.next_begin(t), began + ends[known])
        self.last, self.begun, self.open = at, begun, known[until > t]
        return np.sort(client[self.open])

    def place(self, t: float) -> tuple[float, float]:
        """When the file began the last time before t, and the seconds since then."""
        begun = self.cycle(t) * self.period
        return begun, t - begun

    def next_begin(self, t: float) -> float:
        """When the file begins again after t: rounded as in `place`, so that nobody is away in between."""
        return (self.cycle(t) + 1) * self.period

    def cycle(self, t: float) -> int:
        """How often the file has begun again by t. A quotient alone may be rounded to the wrong side."""
        if t / self.period >= MOST_CYCLES:
            raise too_late(t)
        number = math.floor(t / self.period)
        return number + ((number + 1) * self.period <= t) - (number * self.period > t)


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
        return SearchedOnOff(OnOff.of_means(seed, settings.mean_on, settings.mean_off))
    if settings.availability == "day":
        return DayNight(seed, settings.opens, settings.closes, settings.zones)
    return AlwaysThere()
