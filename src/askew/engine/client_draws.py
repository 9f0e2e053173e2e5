"""Who begins in a round in which clients begin at several moments: draws among those who are there and free then.

A draw says for a number of places and a moment which clients begin, sorted, or all that can if they are fewer. The
first draw of a round is the participation rule's own for this round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Set
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

import numpy as np

from ..core.rng import uniforms
from ..data.federation import Federation
from ..participation import MANY, SPARSE, CohortParticipation, Skewed, keep, looks_at_all, takes_any
from ..timeline import Availability, members

LEAST_TRIES = 8  # random clients that are looked at before all are

Draw = Callable[[int, float], list[int]]  # (places, moment) → clients


class FreeClients(NamedTuple):
    """When clients are there and free: those who are busy count as away."""

    availability: Availability
    busy: Set[int]

    def is_there(self, client: int, t: float) -> bool:
        return client not in self.busy and self.availability.is_there(client, t)

    def until(self, client: int, t: float) -> float:
        return t if client in self.busy else self.availability.until(client, t)

    def since(self, client: int, t: float) -> float:
        return math.inf if client in self.busy else self.availability.since(client, t)

    def earliest(self, clients: np.ndarray, t: float) -> float:
        busy = members(np.array(sorted(self.busy), dtype=np.int64), clients)
        return self.availability.earliest(np.delete(clients, np.searchsorted(clients, busy)), t)

    def longest_stay(self, client: int) -> float:
        return self.availability.longest_stay(client)

    def few(self, t: float, most: int) -> np.ndarray | None:
        there = self.availability.few(t, most + len(self.busy))
        return None if there is None else np.array([i for i in there.tolist() if i not in self.busy], dtype=np.int64)


def draw_of(rule: CohortParticipation, seed: int, round: int, fed: Federation, free: FreeClients) -> Draw:
    """The draw of a rule in a round; `seed` is the run's."""
    seed = rule.drawn_by(seed)
    if takes_any(rule):
        return DrawOfAny(rule, seed, round, fed, free)
    if type(rule) is Skewed:
        return DrawInOrder(rule.order(seed, round, fed.eligible, fed.clients), free)
    return DrawByRule(rule, seed, round, fed, free)


class DrawByRule:
    """The rule draws anew for the places that are free."""

    def __init__(self, rule: CohortParticipation, seed: int, round: int, fed: Federation, free: FreeClients) -> None:
        self.rule, self.seed, self.round, self.fed, self.free = rule, seed, round, fed, free

    def __call__(self, places: int, now: float) -> list[int]:
        is_free: Callable[[int], bool] = lambda client: self.free.is_there(client, now)
        rule, seed, round, eligible = replace(self.rule, cohort=places), self.seed, self.round, self.fed.eligible
        if looks_at_all(rule):
            drawn = rule.draw(seed, round, keep(eligible, is_free), self.fed.clients)
        else:
            drawn = rule.sample_there(seed, round, eligible, self.fed.clients, is_free)
        return list(drawn.tolist())


class DrawInOrder:
    """The first free clients of a fixed order: those who began are not free any more, so the next ones follow."""

    def __init__(self, order: Iterator[int], free: FreeClients) -> None:
        self.free, self.rest = free, order
        self.known: list[int] = []  # the order as far as anybody looked; who was away or busy may come later

    def __call__(self, places: int, now: float) -> list[int]:
        return sorted(islice((client for client in self._order() if self.free.is_there(client, now)), places))

    def _order(self) -> Iterator[int]:
        yield from self.known
        for client in self.rest:
            self.known.append(client)
            yield client


class DrawOfAny:
    """Any of those whom the rule takes, all equally likely. Of very many clients, only some are looked at."""

    def __init__(self, rule: CohortParticipation, seed: int, round: int, fed: Federation, free: FreeClients) -> None:
        self.pool = rule.present(seed, round, fed.eligible, fed.clients)
        self.own: Callable[[], np.ndarray] = lambda: rule.choose(seed, round, self.pool, fed.clients)
        self.free, self.first = free, True
        self.chance = uniforms(seed, "time starts", round)

    def __call__(self, places: int, now: float) -> list[int]:
        pool, found = self.pool, list[int]()
        there = self.free.few(now, len(pool) // SPARSE) if len(pool) > MANY else None
        if self.first:
            own = [client for client in self.own().tolist() if self.free.is_there(client, now)]
            found = self._some_of(own, places) if len(own) > places else own
        if there is None:
            self._try_some(found, places, now)
        if len(found) < places:
            is_free: Callable[[int], bool] = lambda client: self.free.is_there(client, now)
            free = keep(pool, is_free) if there is None else members(there, pool)
            found += self._some_of(np.setdiff1d(free, found).tolist(), places - len(found))
        self.first = self.first and not found
        return sorted(found)

    def _some_of(self, clients: list[int], count: int) -> list[int]:
        """So many of these clients at random, or all."""
        return sorted(clients, key=lambda client: next(self.chance))[:count]

    def _try_some(self, found: list[int], places: int, now: float) -> None:
        """Add random clients that are free; after so many tries it is faster to look at all."""
        pool, count, chance = self.pool, len(self.pool), self.chance
        busy, is_there = self.free.busy, self.free.availability.is_there
        tries = count // 2 + LEAST_TRIES if count else 0  # where nobody can be asked there is nothing to try
        while len(found) < places and tries:
            client, tries = pool.item(int(next(chance) * count)), tries - 1
            if client not in busy and client not in found and is_there(client, now):
                found.append(client)
