"""Successive halving: how many settings of each method are trained for how many rounds, inside of one budget.

    n_1 = n,  n_{k+1} = ⌈n_k / 3⌉          settings in rung k, until one is left
    r_1 < … < r_K = R                      rounds after which a rung ends, a geometric sequence up to the full length
    Σ_k n_k (r_k − r_{k−1})                rounds that are trained, as the settings that are kept go on where they were

Every method may spend the same on its search. One with fewer settings therefore trains each of them longer before it
drops any. Where a round of a method costs more than that of another, in bytes or in seconds, its runs have fewer
rounds: a run of full length costs the same for all. Then the best setting of every method is trained at fresh seeds,
and the best methods at more of them.

Jamieson, Talwalkar, Non-stochastic Best Arm Identification and Hyperparameter Optimization, AISTATS 2016.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

KEPT = 3  # one setting in so many is kept after a rung
FIRST_SEEDS = 2  # fresh seeds of every method
FINALISTS = 3  # methods that get the other fresh seeds


class Rung(NamedTuple):
    """So many settings of a method are trained up to this round."""

    settings: int
    rounds: int


class Cost(NamedTuple):
    """What training costs in the budget's unit: a round, and the start of a run."""

    round: float = 1.0
    start: float = 0.0

    def of(self, runs: float, rounds: float) -> float:
        """The cost of so many starts and rounds."""
        return runs * self.start + rounds * self.round


class Search(NamedTuple):
    """What the plan has to know of a method: its settings, what they cost, and whether longer runs begin anew."""

    settings: int
    cost: Cost = Cost()
    restarts: bool = False


class Plan(NamedTuple):
    """The whole schedule: of each method the rounds of a run of full length and the rungs; and the fresh seeds."""

    rounds: dict[str, int]
    rungs: dict[str, list[Rung]]
    first_seeds: int  # of every method
    seeds: int  # of the finalists, the first ones included


def rung_sizes(settings: int) -> list[int]:
    """How many settings are in each rung; none where there is nothing to choose."""
    sizes = []
    while settings > 1:
        sizes.append(settings)
        settings = math.ceil(settings / KEPT)
    return sizes


def make_rungs(settings: int, first: int, full: int) -> list[Rung]:
    """The rungs from a first length to the full one, in a geometric sequence; a single rung has the full length."""
    sizes = rung_sizes(settings)
    last = len(sizes) - 1
    lengths = [round(first * (full / first) ** (k / last)) if last else full for k in range(len(sizes))]
    return [Rung(size, length) for size, length in zip(sizes, lengths, strict=True)]


def search_cost(rungs: Sequence[Rung], cost: Cost, restarts: bool = False) -> float:
    """What rungs cost; each begins where the one before ended, unless runs begin anew."""
    before = [0, *(0 if restarts else rung.rounds for rung in rungs)]
    rounds = sum(rung.settings * (rung.rounds - done) for rung, done in zip(rungs, before, strict=False))
    return cost.of(sum(rung.settings for rung in rungs), rounds)


def shortest_rungs(settings: int, full: int) -> list[Rung]:
    """The rungs that are planned at least: each trains three times as long as the one before."""
    return make_rungs(settings, max(1, math.ceil(full / KEPT ** (len(rung_sizes(settings)) - 1))), full)


def usual_rungs(settings: int, full: int) -> list[Rung]:
    """The rungs that are planned without a budget: nothing is dropped before a third of the rounds."""
    return make_rungs(settings, math.ceil(full / KEPT), full)


def longest_rungs(search: Search, full: int, allowance: float) -> list[Rung]:
    """The rungs with the longest first one that cost no more than this; the shortest ones if none do."""
    for first in range(full, 0, -1):
        rungs = make_rungs(search.settings, first, full)
        if search_cost(rungs, search.cost, search.restarts) <= allowance:
            return rungs
    return shortest_rungs(search.settings, full)


def full_lengths(methods: Mapping[str, Search], rounds: int) -> dict[str, int]:
    """The rounds of a run of full length of each method: so many of the cheapest one, and as costly for the others."""
    cheapest = min((search.cost.round for search in methods.values() if search.cost.round), default=1.0)
    return {
        name: max(1, math.floor(rounds * cheapest / search.cost.round + 1e-9)) if search.cost.round else rounds
        for name, search in methods.items()
    }


def seeds_cost(methods: Mapping[str, Search], full: Mapping[str, int], seeds: int) -> float:
    """What the fresh seeds cost at most: some of every method, and the others of the most expensive ones."""
    one = sorted((search.cost.of(1, full[name]) for name, search in methods.items()), reverse=True)
    first = min(FIRST_SEEDS, seeds)
    return first * sum(one) + (seeds - first) * sum(one[:FINALISTS])


def least_budget(methods: Mapping[str, Search], rounds: int, seeds: int) -> float:
    """What is needed for runs of so many rounds: an equal share for the search of every method, and fresh seeds."""
    full = full_lengths(methods, rounds)
    return len(methods) * largest_search(methods, full, shortest_rungs) + seeds_cost(methods, full, seeds)


def largest_search(
    methods: Mapping[str, Search], full: Mapping[str, int], rungs: Callable[[int, int], list[Rung]]
) -> float:
    """What the most expensive of the methods' searches costs, with such rungs: a share that is enough for all."""
    return max(
        search_cost(rungs(search.settings, full[name]), search.cost, search.restarts)
        for name, search in methods.items()
    )


def make_plan(methods: Mapping[str, Search], rounds: int, seeds: int, budget: float | None = None) -> Plan | None:
    """The schedule with the longest runs, of so many rounds at most, that the budget pays; None if it pays for none.

    Without a budget runs have all rounds, and searches what the largest one needs with its usual rungs.
    """
    fits = (n for n in range(rounds, 0, -1) if budget is None or least_budget(methods, n, seeds) <= budget)
    if (length := next(fits, None)) is None:
        return None
    full = full_lengths(methods, length)
    share = largest_search(methods, full, usual_rungs)
    if budget is not None:
        share = (budget - seeds_cost(methods, full, seeds)) / len(methods)
    rungs = {name: longest_rungs(search, full[name], share) for name, search in methods.items()}
    return Plan(full, rungs, min(FIRST_SEEDS, seeds), seeds)
