"""Participation: sizes of cohorts, uniformity, addresses."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from askew.errors import ConfigError
from askew.participation import Full, Participation, Uniform, participations


@pytest.mark.parametrize(
    ("fraction", "clients", "expected"),
    [(0.2, 30, 6), (0.1, 100, 10), (0.3, 10, 3), (0.7, 10, 7), (0.29, 100, 29), (0.01, 30, 1), (1.0, 7, 7), (0.15, 10, 2), (0.55, 100, 55)],
)
def test_the_fraction_gives_the_number_one_expects(fraction: float, clients: int, expected: int) -> None:
    assert len(Uniform(fraction=fraction).sample(0, 1, np.arange(clients), clients)) == expected


def test_a_cohort_wins_over_the_fraction() -> None:
    assert len(Uniform(fraction=0.5, cohort=3).sample(0, 1, np.arange(10), 10)) == 3


@given(
    eligible=st.sets(st.integers(0, 49), min_size=1).map(sorted).map(np.array),
    fraction=st.floats(0.001, 1),
    cohort=st.integers(0, 50),
    seed=st.integers(0, 2**40),
    round=st.integers(1, 10**6),
)
@settings(max_examples=100, deadline=None)
def test_a_sample_is_sorted_distinct_eligible_and_repeatable(
    eligible: np.ndarray, fraction: float, cohort: int, seed: int, round: int
) -> None:
    rule = Uniform(fraction=fraction, cohort=cohort)
    ids = rule.sample(seed, round, eligible, 50)
    assert ids.dtype == np.int64
    assert (np.diff(ids) > 0).all() and np.isin(ids, eligible).all()
    assert len(ids) == min(len(eligible), rule.size(50)) >= 1
    assert np.array_equal(ids, rule.sample(seed, round, eligible, 50))


def test_rounds_and_seeds_differ() -> None:
    rule, everybody = Uniform(), np.arange(1000)
    first = rule.sample(0, 1, everybody, 1000)
    assert not np.array_equal(first, rule.sample(0, 2, everybody, 1000))
    assert not np.array_equal(first, rule.sample(1, 1, everybody, 1000))


@pytest.mark.parametrize(("clients", "cohort", "rounds"), [(20, 5, 4000), (12_000, 100, 2000)])
def test_everybody_is_equally_likely(clients: int, cohort: int, rounds: int) -> None:
    # The second case is in the range where numpy draws by a set instead of a shuffle.
    rule, everybody, counts = Uniform(cohort=cohort), np.arange(clients), np.zeros(clients)
    for t in range(1, rounds + 1):
        counts[rule.sample(3, t, everybody, clients)] += 1
    share = cohort / clients
    expected, variance = rounds * share, rounds * share * (1 - share)
    # A sum of squares of (dependent, nearly normal) counts: mean `clients`, standard deviation about sqrt(2 clients).
    statistic = ((counts - expected) ** 2 / variance).sum()
    assert abs(statistic - clients) < 4 * np.sqrt(2 * clients)


def test_a_million_clients_cost_only_the_cohort() -> None:
    everybody = np.arange(1_000_000)
    rule = Uniform(cohort=100)
    rule.sample(0, 1, everybody, 1_000_000)
    tracemalloc.start()
    rule.sample(0, 2, everybody, 1_000_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000, "an array of all clients was built"


def test_full_is_everybody() -> None:
    assert Full().sample(0, 1, np.array([4, 2, 9]), 10).tolist() == [2, 4, 9]
    Full().fit(1)


def test_a_cohort_beyond_the_clients_is_refused() -> None:
    Uniform(cohort=10).fit(10)
    with pytest.raises(ConfigError, match=r"Uniform: cohort must be at most the number of clients, 9, got 10; lower participation.cohort"):
        Uniform(cohort=10).fit(9)
    for fraction in (0, 1.5):
        with pytest.raises(ConfigError, match="Uniform: fraction must be > 0 and ≤ 1"):
            Uniform(fraction=fraction)
    with pytest.raises(ConfigError, match="Uniform: cohort must be ≥ 0"):
        Uniform(cohort=-1)


@pytest.mark.parametrize("name", list(participations))
def test_every_rule_says_its_idea(name: str) -> None:
    rule = participations[name]()
    assert isinstance(rule, Participation) and rule.idea
