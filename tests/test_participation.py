"""Participation: sizes of cohorts, distributions of the draws, addresses, dropout and stragglers."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import combinations, pairwise, permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import askew
from askew.errors import ConfigError, DataError
from askew.experiment.build import with_informed_rule
from askew.experiment.config import Config
from askew.participation import (
    Bernoulli,
    ByClass,
    Cyclic,
    FullParticipation,
    Markov,
    Participation,
    Poisson,
    Skewed,
    Trace,
    Uneven,
    Uniform,
    base,
    chances,
    participations,
)
from askew.participation.rules import LEAST_CHANCE, latest_state, membership, own_chances
from problems import classification, skewed_samples

Probabilities = dict[tuple[int, ...], float]


def agree(probabilities: Mapping[Any, float], draws: Iterable[Any]) -> bool:
    """Is each outcome drawn as often as its probability says, within five standard errors, and no other outcome?"""
    counts = Counter(draws)
    n = counts.total()
    return set(counts) <= set(probabilities) and all(
        abs(counts[k] - n * p) <= 5 * np.sqrt(n * p * (1 - p)) + 1e-9 for k, p in probabilities.items()
    )


def draw_rounds(
    rule: Participation, rounds: int, eligible: Iterable[int], clients: int, seed: int = 0
) -> list[tuple[int, ...]]:
    """The clients that a rule chooses in each of the first rounds."""
    ids = np.array(list(eligible))
    return [tuple(rule.sample(seed, t, ids, clients).tolist()) for t in range(1, rounds + 1)]


def frequencies(rule: Participation, rounds: int, clients: int, seed: int = 0) -> np.ndarray:
    """How often each client took part, as a fraction of all participations."""
    counts = np.bincount(
        np.concatenate([rule.sample(seed, t, np.arange(clients), clients) for t in range(1, rounds + 1)]),
        minlength=clients,
    )
    return counts / counts.sum()


def successive(p: np.ndarray, among: Iterable[int], m: int) -> Probabilities:
    """The probabilities of all sets of m clients, drawn one by one, each in proportion to p among those left."""
    probabilities: Probabilities = {}
    for order in permutations(among, m):
        left, chance = sum(p[i] for i in among), 1.0
        for i in order:
            chance *= p[i] / left
            left -= p[i]
        drawn = tuple(sorted(order))
        probabilities[drawn] = probabilities.get(drawn, 0) + chance
    return probabilities


def test_uniform_draws_are_fixed_for_all_versions() -> None:
    everybody = np.arange(30)
    assert Uniform().sample(0, 1, everybody, 30).tolist() == [4, 6, 7, 14, 27, 28]
    assert Uniform().sample(7, 250, everybody, 30).tolist() == [0, 3, 6, 9, 26, 28]
    assert Uniform(cohort=4).sample(1, 2, np.arange(1, 20000, 3), 20000).tolist() == [5503, 6379, 7054, 7864]


@pytest.mark.parametrize(
    ("fraction", "clients", "expected"),
    [
        (0.2, 30, 6),
        (0.1, 100, 10),
        (0.3, 10, 3),
        (0.7, 10, 7),
        (0.29, 100, 29),
        (0.01, 30, 1),
        (1.0, 7, 7),
        (0.15, 10, 2),
        (0.55, 100, 55),
    ],
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


@pytest.mark.parametrize(("clients", "cohort", "rounds"), [(20, 5, 4000), (8000, 100, 2000)])
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
    assert FullParticipation().sample(0, 1, np.array([4, 2, 9]), 10).tolist() == [2, 4, 9]
    FullParticipation().check_clients(1)


def test_a_cohort_beyond_the_clients_is_refused() -> None:
    Uniform(cohort=10).check_clients(10)
    with pytest.raises(
        ConfigError,
        match=r"Uniform: cohort must be at most the number of clients, 9, got 10; lower participation.cohort",
    ):
        Uniform(cohort=10).check_clients(9)
    for fraction in (0, 1.5):
        with pytest.raises(ConfigError, match="Uniform: fraction must be > 0 and ≤ 1"):
            Uniform(fraction=fraction)
    with pytest.raises(ConfigError, match="Uniform: cohort must be ≥ 0"):
        Uniform(cohort=-1)


@pytest.mark.parametrize("name", list(participations))
def test_every_rule_says_its_idea(name: str) -> None:
    rule = participations[name]()
    assert isinstance(rule, Participation) and rule.idea
    assert name == "trace" or rule.reads() == ()


# Every rule, over its settings

CLIENTS = 20
FRACTION, CHANCE = st.floats(0.001, 1), st.floats(0.01, 1)
SIZED = {"fraction": FRACTION, "cohort": st.integers(0, CLIENTS)}
SETTINGS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "uniform": SIZED,
    "full": {},
    "bernoulli": {"fraction": FRACTION},
    "by_class": {"high": CHANCE, "low": CHANCE, "swing": st.floats(0, 0.5), "period": st.integers(1, 9)},
    "poisson": {"fraction": FRACTION},
    "skewed": SIZED | {"gamma": st.floats(0, 1e6)},
    "cyclic": SIZED | {"groups": st.integers(1, CLIENTS), "shuffle": st.booleans()},
    "markov": SIZED | {"join": CHANCE, "leave": st.floats(0, 1)},
    "trace": {"repeat": st.booleans()},
    "uneven": {"fraction": st.floats(0.001, 0.999), "gamma": st.floats(0, 1000)},
}
TURNOUT = {"dropout": st.floats(0, 1), "stragglers": st.floats(0, 1), "least_work": st.floats(0.01, 0.99)}


@pytest.fixture(scope="module")
def trace_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of four rounds."""
    path = tmp_path_factory.mktemp("trace") / "who.json"
    path.write_text(json.dumps([[3, 1, 19], [], list(range(20)), [0]]))
    return path


@pytest.mark.parametrize("name", list(participations))
@given(data=st.data(), seed=st.integers(0, 2**40), round=st.integers(1, 60))
@settings(max_examples=30, deadline=None)
def test_every_rule_chooses_eligible_clients_and_is_repeatable(
    name: str, trace_file: Path, data: st.DataObject, seed: int, round: int
) -> None:
    eligible = np.array(data.draw(st.lists(st.integers(0, CLIENTS - 1), unique=True)), dtype=np.int64)
    table = data.draw(st.fixed_dictionaries(SETTINGS[name] | TURNOUT))
    rule = participations[name].build(table | ({"path": str(trace_file)} if name == "trace" else {}))
    rule.check_clients(CLIENTS)
    ids = rule.sample(seed, round, eligible, CLIENTS)
    assert ids.dtype == np.int64 and (np.diff(ids) > 0).all() and np.isin(ids, eligible).all()
    if name in ("uniform", "skewed"):
        assert len(ids) == min(len(eligible), rule.size(CLIENTS))
    assert name != "bernoulli" or len(ids) >= min(len(eligible), 1)
    came = rule.turnout(seed, round, eligible, CLIENTS)
    assert np.array_equal(np.sort(np.concatenate([came.ids, came.absent])), ids)
    for ids in (came.ids, came.absent):
        assert (np.diff(ids) > 0).all() and ids.dtype == np.int64
    assert came.share.dtype == np.float64 and came.share.shape == came.ids.shape
    assert (came.share >= rule.least_work).all() and (came.share <= 1).all()
    for cache in (chances, membership, latest_state, own_chances):
        cache.cache_clear()
    assert all(np.array_equal(a, b) for a, b in zip(came, rule.turnout(seed, round, eligible, CLIENTS), strict=True))


@pytest.mark.parametrize("name", [n for n in participations if n not in ("full", "trace")])
def test_every_draw_has_its_address(name: str) -> None:
    rule, everybody = participations[name](), np.arange(500)
    cohorts = {(seed, t): rule.sample(seed, t, everybody, 500).tolist() for seed in (0, 1) for t in (1, 2)}
    assert len({tuple(ids) for ids in cohorts.values()}) == 4


# By class


def test_chances_follow_from_the_classes_and_rise_and_fall() -> None:
    """Clients of one class have its φ, below the largest one of its half; a mixed one has their mean."""
    counts = np.array([[4, 0, 0, 0], [0, 3, 0, 0], [0, 0, 2, 0], [0, 0, 0, 1], [5, 0, 0, 5], [0, 0, 0, 0]])
    rule = ByClass(high=0.9, low=0.3, swing=0.2, period=8).with_labels(lambda: counts)
    still, top = rule.chances(7, 1, 6) / 0.8, rule.chances(7, 3, 6)  # at sin 0 and sin π/2
    assert (still[:2] < 0.9).all() and (still[2:4] < 0.3).all() and len({*still}) == 6
    assert still[4] == pytest.approx((still[0] + still[3]) / 2) and still[5] == 0 and top == pytest.approx(still)
    came = [rule.sample(7, 3 + 8 * k, np.arange(6), 6) for k in range(2000)]
    shares = np.bincount(np.concatenate(came), minlength=6) / len(came)
    assert (np.abs(shares - top) <= 4 * np.sqrt(top * (1 - top) / len(came))).all()


def test_chances_by_class_use_the_labels_of_the_run() -> None:
    fed = classification(skewed_samples([4, 5, 6])).fed
    config = Config.build({"partition": {"clients": 3}, "participation": {"name": "by_class"}})
    informed = with_informed_rule(config, fed)
    counts = fed.label_counts([0, 1, 2]).numpy()
    expected = ByClass().with_labels(lambda: counts).chances(0, 1, 3)
    assert isinstance(informed.participation, ByClass) and len({*expected}) == 3
    assert informed.participation.chances(0, 1, 3) == pytest.approx(expected)
    assert informed.digest() == config.digest() and with_informed_rule(Config(), fed).participation == Uniform()
    with pytest.raises(ConfigError, match=r"ByClass: chances follow from classes, which .*; set participation.name"):
        askew.run("fedavg", data=(torch.randn(9, 2), torch.randn(9)), participation="by_class", clients=3)


# Bernoulli


@pytest.mark.parametrize("fraction", [0.05, 0.3, 0.8, 1.0])
def test_bernoulli_clients_are_independent_given_that_one_came(fraction: float) -> None:
    eligible = (0, 2, 3)
    sets = [s for k in (1, 2, 3) for s in combinations(eligible, k)]
    probabilities = {s: fraction ** len(s) * (1 - fraction) ** (3 - len(s)) / (1 - (1 - fraction) ** 3) for s in sets}
    assert agree(probabilities, draw_rounds(Bernoulli(fraction=fraction), 6000, eligible, 5))


def test_uneven_chances_have_their_mean_and_spread_and_everybody_comes_by_their_own() -> None:
    drawn = np.array([own_chances(seed, 1000, 0.1, 0.2) for seed in range(10)])
    variance = 0.1 * 0.9 / (1 / 0.2 + 1)  # of Beta(0.5, 4.5)
    assert np.allclose(drawn.mean(1), 0.1, rtol=1e-3) and abs(drawn.var() - variance) < 0.05 * variance
    own, rounds = own_chances(0, 3, 0.3, 0.2), draw_rounds(Uneven(fraction=0.3), 6000, range(3), 3)
    every = [tuple(i for i in range(3) if code >> i & 1) for code in range(8)]
    assert agree({s: float(np.prod([own[i] if i in s else 1 - own[i] for i in range(3)])) for s in every}, rounds)
    assert draw_rounds(Uneven(fraction=0.3, gamma=0), 50, (0, 2, 5), 9) == draw_rounds(
        Poisson(fraction=0.3), 50, (0, 2, 5), 9
    )


@pytest.mark.parametrize("fraction", [1e-9, 1e-300])
def test_bernoulli_with_hardly_any_chance_still_brings_one(fraction: float) -> None:
    assert agree({(i,): 0.25 for i in range(4)}, draw_rounds(Bernoulli(fraction=fraction), 4000, range(4), 4))


@pytest.mark.parametrize("fraction", [0.3, 0.8])
def test_poisson_clients_are_independent(fraction: float) -> None:
    sets = [s for k in range(4) for s in combinations((0, 2, 3), k)]
    probabilities = {s: fraction ** len(s) * (1 - fraction) ** (3 - len(s)) for s in sets}
    assert agree(probabilities, draw_rounds(Poisson(fraction=fraction), 6000, (0, 2, 3), 5))


# Skewed


@pytest.mark.parametrize(
    ("gamma", "among", "m"),
    [(1.0, (0, 1, 2, 3), 2), (5.0, (0, 1, 2, 3, 4), 3), (0.5, (0, 2, 4), 1), (2.0, (1, 2, 3), 2)],
)
def test_skewed_draws_one_after_the_other(gamma: float, among: tuple[int, ...], m: int) -> None:
    probabilities = successive(chances(3, 5, gamma), among, m)
    assert sum(probabilities.values()) == pytest.approx(1)
    assert agree(probabilities, draw_rounds(Skewed(gamma=gamma, cohort=m), 8000, among, 5, seed=3))


@pytest.mark.parametrize("gamma", [0.5, 1, 5, 10])
def test_the_chances_are_a_dirichlet_draw_with_concentration_one_over_gamma(gamma: float) -> None:
    p = np.stack([chances(seed, 50, gamma) for seed in range(1500)])
    assert np.allclose(p.sum(1), 1)
    assert len({row.tobytes() for row in p}) == 1500
    square = (p**2).sum(1)  # its mean is (1 + γ) / (N + γ)
    assert abs(square.mean() - (1 + gamma) / (50 + gamma)) < 5 * square.std() / np.sqrt(1500)
    one = p[:, 7]
    assert abs(one.mean() - 1 / 50) < 5 * one.std() / np.sqrt(1500)


def test_without_skew_it_is_uniform_draw_for_draw() -> None:
    assert draw_rounds(Skewed(gamma=0, fraction=0.3), 20, range(1, 30), 30) == draw_rounds(
        Uniform(fraction=0.3), 20, range(1, 30), 30
    )


@pytest.mark.parametrize("gamma", [1e-9, 5e-324])
def test_with_hardly_any_skew_all_sets_are_equally_likely(gamma: float) -> None:
    assert np.allclose(chances(0, 5, gamma), 0.2, rtol=1e-3)
    assert agree(
        dict.fromkeys(combinations(range(5), 2), 0.1), draw_rounds(Skewed(gamma=gamma, cohort=2), 6000, range(5), 5)
    )


def test_more_skew_means_fewer_clients() -> None:
    """100 clients, C = 0.1: the larger γ, the sparser the histogram of participations (MLDL24, Fig. 1)."""
    runs = {
        g: [frequencies(Skewed(gamma=g, fraction=0.1), 200, 100, seed) for seed in range(4)] for g in (0, 0.5, 1, 5, 10)
    }
    effective = [float(np.mean([1 / (often**2).sum() for often in runs[g]])) for g in runs]
    assert all(a > b + 5 for a, b in pairwise(effective))
    assert effective[0] > 90 and effective[-1] < 25
    assert not any((often == 0).any() for often in runs[0])
    assert all((often == 0).sum() > 30 for often in runs[10])
    assert all(often.max() > 0.08 for often in runs[10]), "the most frequent comes nearly always: a tenth of all"


def test_even_the_unlikeliest_come_when_the_others_are_used_up() -> None:
    rule = Skewed(gamma=1e6, cohort=8)
    p = chances(0, 8, 1e6)
    assert (p > 0).all() and (p == LEAST_CHANCE).any()
    assert draw_rounds(rule, 3, range(8), 8) == [tuple(range(8))] * 3
    assert agree(successive(p, range(8), 7), draw_rounds(Skewed(gamma=1e6, cohort=7), 2000, range(8), 8))


# Cyclic


@given(clients=st.integers(1, 60), groups=st.integers(1, 60), shuffle=st.booleans(), start=st.integers(1, 1000))
@settings(max_examples=60, deadline=None)
def test_every_cycle_of_groups_sees_everybody_once(clients: int, groups: int, shuffle: bool, start: int) -> None:
    rule, everybody = Cyclic(groups=min(groups, clients), fraction=1, shuffle=shuffle), np.arange(clients)
    turns = [rule.sample(5, t, everybody, clients) for t in range(start, start + rule.groups)]
    assert np.array_equal(np.sort(np.concatenate(turns)), everybody)
    assert max(map(len, turns)) - min(map(len, turns)) <= 1
    assert np.array_equal(turns[0], rule.sample(5, start + rule.groups, everybody, clients))


def test_groups_by_id_are_blocks_and_groups_at_random_belong_to_the_seed() -> None:
    by_id = Cyclic(groups=3, fraction=1, shuffle=False)
    assert draw_rounds(by_id, 4, range(7), 7) == [(0, 1, 2), (3, 4), (5, 6), (0, 1, 2)]
    assert draw_rounds(by_id, 3, [1, 5, 6], 7) == [(1,), (), (5, 6)]
    groups = [frozenset(draw_rounds(Cyclic(groups=2, cohort=2), 2, range(4), 4, seed)) for seed in range(1500)]
    pairs = [frozenset([(0, a), tuple(sorted({1, 2, 3} - {a}))]) for a in (1, 2, 3)]
    assert agree(dict.fromkeys(pairs, 1 / 3), groups)


def test_within_its_turn_a_group_is_drawn_from_uniformly() -> None:
    cohorts = draw_rounds(Cyclic(groups=2, cohort=2, shuffle=False), 6000, range(8), 8)
    assert agree(dict.fromkeys(combinations(range(4), 2), 1 / 6), cohorts[::2])
    assert agree(dict.fromkeys(combinations(range(4, 8), 2), 1 / 6), cohorts[1::2])
    assert len(Cyclic(groups=4, cohort=5).sample(0, 1, np.arange(8), 8)) == 2


# Markov


def test_the_state_of_a_round_does_not_depend_on_what_was_asked_before() -> None:
    rule = Markov(join=0.3, leave=0.2)

    def states(order: Iterable[int]) -> dict[int, list[bool]]:
        latest_state.cache_clear()
        return {t: rule.available(1, t, 40).tolist() for t in order}

    forward = states(range(1, 31))
    shuffled = np.random.default_rng(0).permutation(np.arange(1, 31)).tolist()
    assert forward == states(range(30, 0, -1)) == states(shuffled)
    assert states([25])[25] == forward[25] != forward[24]
    # Chains of other seeds, sizes and chances have caches of their own.
    for other in (Markov(join=0.31, leave=0.2), Markov(join=0.3, leave=0.21)):
        other.available(1, 29, 40)
    rule.available(2, 29, 40)
    rule.available(1, 29, 41)
    assert rule.available(1, 30, 40).tolist() == forward[30]


@pytest.mark.parametrize(("join", "leave"), [(0.1, 0.1), (0.05, 0.3), (0.6, 0.7)])
def test_availability_is_stationary_and_forgets_geometrically(join: float, leave: float) -> None:
    clients, rule = 20_000, Markov(join=join, leave=leave)
    x = np.stack([rule.available(4, t, clients) for t in range(1, 9)]).astype(float)
    mean = join / (join + leave)
    assert (abs(x.mean(1) - mean) < 5 * np.sqrt(mean * (1 - mean) / clients)).all()
    for lag in (1, 2, 3):
        ahead = [np.corrcoef(a, b)[0, 1] for a, b in zip(x, x[lag:], strict=False)]
        assert (abs(np.array(ahead) - (1 - join - leave) ** lag) < 5 / np.sqrt(clients) + 1e-3).all()
    left, joined = (x[:-1] > x[1:]).sum() / x[:-1].sum(), (x[:-1] < x[1:]).sum() / (1 - x[:-1]).sum()
    assert abs(left - leave) < 5 * np.sqrt(leave * (1 - leave) / x[:-1].sum())
    assert abs(joined - join) < 5 * np.sqrt(join * (1 - join) / (1 - x[:-1]).sum())


def test_clients_come_and_go_independently() -> None:
    x = np.stack([Markov(join=0.5, leave=0.5).available(0, t, 4) for t in range(1, 2001)])
    assert agree({tuple(bits): 1 / 16 for bits in np.ndindex(2, 2, 2, 2)}, map(tuple, x.astype(int).tolist()))


def test_those_there_are_drawn_from_uniformly_and_sometimes_nobody_is() -> None:
    rule = Markov(join=0.2, leave=0.4, cohort=2)
    pairs = []
    for t, ids in enumerate(draw_rounds(rule, 3000, range(5), 5), 1):
        there = np.flatnonzero(rule.available(0, t, 5))
        assert len(ids) == min(2, len(there))
        if len(there) == 3:
            pairs.append(tuple(np.searchsorted(there, ids).tolist()))
    assert agree({(0, 1): 1 / 3, (0, 2): 1 / 3, (1, 2): 1 / 3}, pairs)
    assert () in draw_rounds(rule, 100, range(5), 5)


def test_chains_at_their_limits() -> None:
    assert draw_rounds(Markov(leave=0, fraction=1), 5, range(6), 6) == [tuple(range(6))] * 5
    flip = draw_rounds(Markov(join=1, leave=1, fraction=1), 4, range(6), 6)
    assert flip[0] == flip[2] and flip[1] == flip[3] and sorted(flip[0] + flip[1]) == list(range(6))


# Trace


def test_a_trace_says_who_comes(tmp_path: Path) -> None:
    lists, array = tmp_path / "who.json", tmp_path / "who.npy"
    lists.write_text("[[4, 0], [], [1, 2, 3]]")
    np.save(array, np.array([[1, 0, 0, 0, 1], [0, 0, 0, 0, 0], [0, 1, 1, 1, 0]], dtype=bool))
    for path in (lists, array):
        rule = Trace(path=str(path))
        rule.check_clients(5)
        assert rule.reads() == (path,)
        assert draw_rounds(rule, 5, range(5), 5) == [(0, 4), (), (1, 2, 3), (0, 4), ()]
        assert draw_rounds(rule, 3, [4, 3, 1], 5) == [(4,), (), (1, 3)]
        assert draw_rounds(Trace(path=str(path), repeat=False), 5, range(5), 5) == [(0, 4), (), (1, 2, 3), (), ()]


def test_a_changed_trace_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "who.json"
    rule = Trace(path=str(path))
    for who in (3, 4):
        path.write_text(f"[[{who}]]")
        os.utime(path, ns=(who, who))
        assert draw_rounds(rule, 1, range(5), 5) == [(who,)]


def write_pickle(path: Path) -> None:
    np.save(path, np.array([[True, None]], dtype=object), allow_pickle=True)


def write_archive(path: Path) -> None:
    with path.open("wb") as file:
        np.savez(file, who=np.eye(5, dtype=bool))


def write_truncated(path: Path) -> None:
    np.save(path, np.ones((100, 5), dtype=bool))
    path.write_bytes(path.read_bytes()[:-1])


def header_with_shape(shape: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        np.save(path, np.ones((2, 5), dtype=bool))
        path.write_bytes(path.read_bytes().replace(b"(2, 5)", shape.encode()))

    return write


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("who.json", "", "Expecting value: line 1 column 1"),
        ("who.json", "[[0], [1,]]", r"line 1 column \d+"),
        ("who.json", b"[[0]]\xff", "invalid start byte"),
        ("who.json", "[" * 100_000, "recursion"),
        ("who.json", "[]", "it must be a list of rounds, one or more, each a list of client ids"),
        ("who.json", "[0, 1]", "it must be a list of rounds"),
        ("who.json", '{"1": [0]}', "it must be a list of rounds"),
        ("who.json", "[[0], [5]]", "its round 2 names 5, but ids are whole numbers from 0 to 4"),
        ("who.json", "[[-1]]", "its round 1 names -1"),
        ("who.json", f"[[{10**30}]]", "its round 1 names 1000000"),
        ("who.json", "[[1.0]]", "its round 1 names 1.0"),
        ("who.json", "[[true]]", "its round 1 names true"),
        ("who.json", '[["zoe"]]', 'its round 1 names "zoe"'),
        ("who.json", "[[[0]]]", r"its round 1 names \[0\]"),
        ("who.json", "[[1], [2, 0, 2]]", "its round 2 names a client twice"),
        ("who.npy", "", "it is empty, damaged or no plain array"),
        ("who.npy", "[[0]]", "no plain array of numpy.save"),
        ("who.npy", write_pickle, "no plain array of numpy.save"),
        ("who.npy", write_archive, "no plain array of numpy.save"),
        ("who.npy", write_truncated, "damaged"),
        ("who.npy", header_with_shape(f"({10**30}, 5)"), "damaged"),
        ("who.npy", header_with_shape("(2, 'a')"), "damaged"),
        ("who.npy", np.eye(5), r"it must be a bool array \[rounds, 5\] of one round or more, got float64 \[5, 5\]"),
        ("who.npy", np.ones(5, dtype=bool), r"got bool \[5\]"),
        ("who.npy", np.ones((3, 4), dtype=bool), r"got bool \[3, 4\]"),
        ("who.npy", np.ones((0, 5), dtype=bool), r"got bool \[0, 5\]"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, name: str, content: Any, sentence: str) -> None:
    path = tmp_path / name
    if isinstance(content, np.ndarray):
        np.save(path, content)
    elif callable(content):
        content(path)
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(
        DataError,
        match=f"^Trace: cannot use .*{name}: .*{sentence}.*; mend the file or name another one in participation.path.$",
    ):
        Trace(path=str(path)).check_clients(5)


def test_a_path_without_a_file_is_refused(tmp_path: Path) -> None:
    for path in ("", "who.csv", str(tmp_path)):
        with pytest.raises(
            ConfigError, match=r"^Trace: path must name a .json or .npy file .*, got '.*'; set participation.path.$"
        ):
            Trace(path=path).check_clients(5)
    (tmp_path / "folder.json").mkdir()
    for name, reason in (("none.json", "No such file"), ("folder.json", "no regular file"), ("a\0.npy", "null")):
        with pytest.raises(DataError, match=f"Trace: cannot use .*: .*{reason}.*; mend the file"):
            Trace(path=str(tmp_path / name)).check_clients(5)


# Turnout


def test_without_dropout_and_stragglers_nothing_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    everybody, purposes, generator = np.arange(30), [], base.generator

    def note_purpose(seed: int, purpose: str, round: int) -> np.random.Generator:
        purposes.append(purpose)
        return generator(seed, purpose, round)

    monkeypatch.setattr(base, "generator", note_purpose)
    came = Uniform().turnout(0, 1, everybody, 30)
    assert purposes == ["participation"]
    assert np.array_equal(came.ids, Uniform().sample(0, 1, everybody, 30)) and came.absent.size == 0
    assert came.share.tolist() == [1.0] * 6


def test_dropout_takes_each_of_those_chosen_with_the_same_chance() -> None:
    rule = FullParticipation(dropout=0.3)
    answers = [tuple(rule.turnout(0, t, np.arange(3), 3).ids.tolist()) for t in range(1, 8001)]
    assert agree({s: 0.7 ** len(s) * 0.3 ** (3 - len(s)) for k in range(4) for s in combinations(range(3), k)}, answers)
    nobody = FullParticipation(dropout=1, stragglers=1).turnout(0, 1, np.arange(5), 5)
    assert nobody.ids.size == nobody.share.size == 0 and nobody.absent.tolist() == [0, 1, 2, 3, 4]


def test_stragglers_do_a_uniform_share_of_their_work() -> None:
    n = 40_000
    share = FullParticipation(stragglers=0.25, least_work=0.4).turnout(2, 1, np.arange(n), n).share
    late = share[share < 1]
    assert abs(len(late) / n - 0.25) < 5 * np.sqrt(0.25 * 0.75 / n)
    place = (late - 0.4) / 0.6
    assert agree(dict.fromkeys(range(10), 0.1), (place * 10).astype(int).tolist())
    # Neighbours, rounds, and lateness and dropping out are independent.
    again = FullParticipation(stragglers=0.25, least_work=0.4).turnout(2, 2, np.arange(n), n).share
    gone = FullParticipation(dropout=0.3).turnout(2, 1, np.arange(n), n).absent
    dropped = np.isin(np.arange(n), gone)
    for a, b in ((share[:-1], share[1:]), (share, again), (share, dropped)):
        assert abs(np.corrcoef(a, b)[0, 1]) < 5 / np.sqrt(n)


def test_dropout_and_work_of_a_client_do_not_depend_on_the_others() -> None:
    settings_ = {"dropout": 0.4, "stragglers": 0.5}
    few = Uniform(cohort=20, **settings_).turnout(3, 7, np.arange(50), 60)
    everybody = FullParticipation(**settings_).turnout(3, 7, np.arange(60), 60)
    more_clients = FullParticipation(**settings_).turnout(3, 7, np.arange(500), 500)
    work = dict(zip(more_clients.ids.tolist(), more_clients.share.tolist(), strict=True))
    assert 0 < len(few.absent) < 20 and len({*few.share.tolist()}) > 2
    for came in (few, everybody):
        assert not set(came.absent.tolist()) & set(work)
        assert [work[i] for i in came.ids.tolist()] == came.share.tolist()
    # More stragglers are these and others: who was late before does the same.
    more = FullParticipation(stragglers=0.9).turnout(3, 7, np.arange(500), 500).share[more_clients.ids]
    assert (more[more_clients.share < 1] == more_clients.share[more_clients.share < 1]).all() and (more < 1).sum() > (
        more_clients.share < 1
    ).sum()


# Wrong settings


@pytest.mark.parametrize(
    ("rule", "wrong", "sentence"),
    [
        (Uniform, {"dropout": 1.1}, "Uniform: dropout must be ≥ 0 and ≤ 1, got 1.1"),
        (FullParticipation, {"stragglers": -0.1}, "Full: stragglers must be ≥ 0 and ≤ 1, got -0.1"),
        (FullParticipation, {"least_work": 0}, "Full: least_work must be > 0 and < 1, got 0"),
        (FullParticipation, {"least_work": 1}, "Full: least_work must be > 0 and < 1, got 1"),
        (Bernoulli, {"fraction": 0}, "Bernoulli: fraction must be > 0 and ≤ 1, got 0"),
        (Skewed, {"gamma": -1}, "Skewed: gamma must be ≥ 0, got -1"),
        (Skewed, {"gamma": float("inf")}, "Skewed: gamma must be finite"),
        (Cyclic, {"groups": 0}, "Cyclic: groups must be ≥ 1, got 0"),
        (Markov, {"join": 0}, "Markov: join must be > 0 and ≤ 1, got 0"),
        (Markov, {"leave": 1.5}, "Markov: leave must be ≥ 0 and ≤ 1, got 1.5"),
        (Trace, {"path": 3}, "Trace: path must be a text in quotes, got 3"),
    ],
)
def test_settings_out_of_range_are_refused(rule: type[Participation], wrong: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=f"^{sentence}"):
        rule.build(wrong)


def test_more_than_there_are_clients_is_refused() -> None:
    for rule in (Skewed, Cyclic, Markov):
        with pytest.raises(
            ConfigError, match=f"^{rule.__name__}: cohort must be at most the number of clients, 9, got 10; lower"
        ):
            rule(cohort=10).check_clients(9)
    Cyclic(groups=9).check_clients(9)
    with pytest.raises(
        ConfigError,
        match=r"^Cyclic: groups must be at most the number of clients, 9, got 10; lower participation.groups or raise",
    ):
        Cyclic(groups=10).check_clients(9)
