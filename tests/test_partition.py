"""Partitions: rules that hold for all labels, and the distributions of the random ones."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import combinations, permutations, product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from askew.core.rng import generator
from askew.core.settings import setting
from askew.data import Digits, partitions
from askew.data.assignment import Assignment, lognormal_sizes
from askew.data.dataset import Dataset, Samples
from askew.data.federation import Federation
from askew.data.partition import (
    Dirichlet,
    DirichletPrior,
    Iid,
    LabelsPerClient,
    Lognormal,
    Natural,
    Partition,
    Shards,
    deal_overlapping,
    serving_order,
)
from askew.data.partition_file import FromFile
from askew.errors import ConfigError, DataError, UnknownName

LABELS = st.lists(st.integers(0, 6), min_size=1, max_size=200).map(np.array)


def check_complete(assignment: Assignment, n: int, clients: int) -> None:
    """Check that every one of n samples belongs to exactly one of the clients."""
    assert assignment.order.dtype == assignment.offsets.dtype == np.int64
    assert assignment.clients == clients and assignment.offsets[0] == 0 and assignment.offsets[-1] == n
    assert np.array_equal(np.sort(assignment.order), np.arange(n))
    assert (assignment.sizes >= 0).all() and assignment.sizes.sum() == n
    assert [len(assignment.client(i)) for i in range(clients)] == assignment.sizes.tolist()


@given(
    labels=LABELS, clients=st.integers(1, 40), alpha=st.floats(1e-8, 1e4), cap=st.booleans(), seed=st.integers(0, 2**40)
)
@settings(max_examples=150, deadline=None)
def test_dirichlet_hands_out_everything_once(
    labels: np.ndarray, clients: int, alpha: float, cap: bool, seed: int
) -> None:
    rule = Dirichlet(clients=clients, alpha=alpha, cap=cap, min_size=0)
    assignment = rule.split(labels, seed)
    check_complete(assignment, len(labels), clients)
    again = rule.split(labels, seed)
    assert np.array_equal(assignment.order, again.order) and np.array_equal(assignment.offsets, again.offsets)
    if cap:
        # Class after class: who holds n/N samples gets no more.
        counts = assignment.histogram(labels, 7)
        held = np.cumsum(counts, axis=1) - counts
        assert (counts[held * clients >= len(labels)] == 0).all()


@given(labels=LABELS, clients=st.integers(1, 40), seed=st.integers(0, 2**40))
@settings(max_examples=100, deadline=None)
def test_iid_cuts_evenly(labels: np.ndarray, clients: int, seed: int) -> None:
    assignment = Iid(clients=clients).split(labels, seed)
    check_complete(assignment, len(labels), clients)
    assert assignment.sizes.max() - assignment.sizes.min() <= 1


@given(owner=st.lists(st.integers(0, 9), min_size=1, max_size=50).map(np.array), seed=st.integers(0, 9))
@settings(max_examples=50, deadline=None)
def test_natural_keeps_the_owners(owner: np.ndarray, seed: int) -> None:
    assignment = Natural(clients=12).split(np.zeros_like(owner), seed, owner)
    check_complete(assignment, len(owner), 12)
    for i in range(12):
        assert np.array_equal(assignment.client(i), np.flatnonzero(owner == i))


@given(labels=LABELS, clients=st.integers(1, 20))
@settings(max_examples=50, deadline=None)
def test_the_histogram_counts(labels: np.ndarray, clients: int) -> None:
    assignment = Iid(clients=clients).split(labels, 0)
    table = assignment.histogram(labels, 7)
    assert table.shape == (clients, 7) and table.dtype == np.int64
    for i in range(clients):
        assert np.array_equal(table[i], np.bincount(labels[assignment.client(i)], minlength=7))


RULES = [
    Iid(),
    Iid(balanced=True),
    Lognormal(),
    Dirichlet(alpha=1.0),
    Dirichlet(alpha=1.0, overlap=True),
    DirichletPrior(),
    DirichletPrior(sigma=0.3),
    LabelsPerClient(),
    LabelsPerClient(balanced=True),
    Shards(),
]


@pytest.mark.parametrize("rule", RULES)
def test_another_seed_is_another_partition(rule: Partition) -> None:
    labels = np.arange(3000) % 10
    assert not np.array_equal(rule.split(labels, 0).order, rule.split(labels, 1).order)
    one, two = rule.split(labels, 5), rule.split(labels, 5)
    assert np.array_equal(one.order, two.order) and np.array_equal(one.offsets, two.offsets)
    assert all((np.diff(one.client(i)) > 0).all() for i in range(30))


@pytest.mark.parametrize("clients", [30, 40, 50])
def test_every_client_has_its_least_number_on_the_digits(clients: int) -> None:
    labels = Digits().load(0, clients).train.y.numpy()
    for seed in range(3):
        assignment = Dirichlet(clients=clients).split(labels, seed)
        check_complete(assignment, 1437, clients)
        assert assignment.sizes.min() >= 10


def test_dirichlet_proportions_have_their_mean_and_variance() -> None:
    # P_j of Dir_N(a) has mean 1/N and variance (1/N)(1 − 1/N)/(N a + 1); one class, so no cap can act.
    n, clients, alpha, repetitions = 10_000, 8, 0.5, 3000
    rng = generator(0, "law")
    rule = Dirichlet(clients=clients, alpha=alpha, min_size=0)
    proportions = np.array([rule.draw_counts(np.array([n]), rng)[0] for _ in range(repetitions)]) / n
    variance = (1 / clients) * (1 - 1 / clients) / (clients * alpha + 1)
    assert np.abs(proportions.mean(0) - 1 / clients).max() < 4.5 * np.sqrt(variance / repetitions)
    assert np.abs(proportions.var(0) / variance - 1).max() < 0.15


def test_classes_are_independent_without_the_cap_and_balance_with_it() -> None:
    totals = np.full(10, 1000)
    sizes = {}
    for cap in (False, True):
        rng = generator(0, "law")
        rule = Dirichlet(clients=10, alpha=0.2, cap=cap, min_size=0)
        sizes[cap] = np.array([rule.draw_counts(totals, rng).sum(0) for _ in range(400)])
    # Without the cap a size is the sum of ten independent assignment.
    expected = 10 * 1000**2 * 0.1 * 0.9 / (10 * 0.2 + 1)
    assert abs(sizes[False].var() / expected - 1) < 0.1
    assert sizes[True].var() < 0.8 * sizes[False].var()


def test_the_samples_of_a_class_are_shuffled() -> None:
    # Sample 0 is equally likely at every client, however the cuts lie.
    labels = np.zeros(40, dtype=np.int64)
    rule = Dirichlet(clients=4, alpha=50.0, min_size=1)
    counts = np.zeros(4)
    for seed in range(600):
        assignment = rule.split(labels, seed)
        counts[np.searchsorted(assignment.offsets, np.flatnonzero(assignment.order == 0)[0], side="right") - 1] += 1
    assert ((counts - 150) ** 2 / 150).sum() < 16.3  # chi-squared, 3 degrees of freedom: exceeded once in a thousand


def test_a_large_alpha_is_nearly_iid_and_a_small_one_is_not() -> None:
    labels = np.arange(10_000) % 10
    even = Dirichlet(clients=10, alpha=1e5).split(labels, 0).histogram(labels, 10)
    assert np.abs(even - 100).max() <= 5
    skewed = Dirichlet(clients=10, alpha=0.05, min_size=0).split(labels, 0).histogram(labels, 10)
    assert skewed.max() > 900


def test_a_tiny_alpha_gives_each_class_to_one_client_that_has_room() -> None:
    labels = np.arange(1000) % 10
    for seed in range(20):
        table = Dirichlet(clients=10, alpha=1e-6, min_size=0).split(labels, seed).histogram(labels, 10)
        assert np.array_equal(np.sort(table, axis=None), [0] * 90 + [100] * 10)
        # 100 = n/N: whoever got one class is full, so everybody gets exactly one.
        assert np.array_equal(table.sum(1), np.full(10, 100))


def test_one_client_gets_all() -> None:
    assert np.array_equal(Dirichlet(clients=1).split(np.arange(50) % 3, 0).client(0), np.arange(50))


def test_many_clients_may_stay_empty() -> None:
    labels = np.arange(20_000) % 10
    assignment = Dirichlet(clients=10_000, min_size=0).split(labels, 0)
    check_complete(assignment, 20_000, 10_000)
    assert assignment.sizes.min() == 0


def test_too_few_samples_are_refused_at_once() -> None:
    with pytest.raises(
        DataError,
        match=r"299 samples cannot give 30 clients partition.min_size = 10 each; at most 9 is possible: lower",
    ):
        Dirichlet().split(np.zeros(299, dtype=np.int64), 0)


def test_a_hopeless_draw_is_refused_in_the_end() -> None:
    with pytest.raises(
        DataError,
        match=r"in 2000 draws with alpha = 0.001 and 5 clients the smallest never had more than \d+; set partition.min",
    ):
        Dirichlet(clients=5, alpha=0.001).split(np.arange(100) % 2, 0)


def test_targets_that_are_no_labels_are_refused() -> None:
    with pytest.raises(
        DataError, match="needs class labels, whole numbers, and these targets are not; use the iid partition"
    ):
        Dirichlet(min_size=0).split(np.linspace(0, 1, 50), 0)
    check_complete(Iid(clients=7).split(np.linspace(0, 1, 50), 0), 50, 7)


def test_natural_refuses_what_has_no_owner_or_too_many() -> None:
    labels = np.zeros(3, dtype=np.int64)
    with pytest.raises(
        DataError, match=r'does not come divided among clients; set partition.name to "iid" or "dirichlet"'
    ):
        Natural().split(labels, 0)
    with pytest.raises(
        DataError, match=r"belong to 6 clients, more than partition.clients = 5; set partition.clients = 6"
    ):
        Natural(clients=5).split(labels, 0, np.array([0, 5, 1]))
    with pytest.raises(DataError, match="one client number from 0 for each of the 3 samples, got 2"):
        Natural().split(labels, 0, np.array([0, 1]))


def test_settings_and_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="Dirichlet: alpha must be > 0, got 0"):
        Dirichlet(alpha=0)
    with pytest.raises(ConfigError, match="Iid: clients must be ≥ 1"):
        Iid(clients=0)
    with pytest.raises(UnknownName, match="unknown partition 'dirichlt'; did you mean 'dirichlet'"):
        partitions["dirichlt"]


# --- distributions: the frequencies of outcomes against their exact probabilities


def check_frequencies(
    probabilities: dict[object, float], draw: Callable[[np.random.Generator], object], repetitions: int = 2000
) -> None:
    """Check that outcomes are drawn as often as their probabilities say, by the chi-squared statistic.

    That of d degrees of freedom has mean d and variance 2 d; five standard deviations are allowed.
    """
    assert sum(probabilities.values()) == pytest.approx(1)
    rng = generator(0, "law")
    counts = Counter(draw(rng) for _ in range(repetitions))
    assert set(counts) <= set(probabilities)
    statistic = sum((counts[k] - repetitions * p) ** 2 / (repetitions * p) for k, p in probabilities.items())
    freedom = len(probabilities) - 1
    assert statistic < freedom + 5 * np.sqrt(2 * freedom) + 5


def sequences(sizes: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], float]]:
    """All orders in which clients of these sizes can get their samples, and the probability of each.

    Each time one of the clients that are not full gets a sample, all equally likely.
    """
    not_full = [i for i, s in enumerate(sizes) if s]
    if not not_full:
        yield (), 1.0
    for i in not_full:
        for following, p in sequences(tuple(s - (i == j) for j, s in enumerate(sizes))):
            yield (i, *following), p / len(not_full)


def test_clients_that_are_not_full_are_served_at_even_odds() -> None:
    check_frequencies(dict(sequences((1, 3, 0, 2))), lambda rng: tuple(serving_order(np.array([1, 3, 0, 2]), rng)))


def test_a_flat_prior_draws_the_classes_left_at_even_odds() -> None:
    # As α → ∞ every prior is uniform: classes are then drawn as clients are served.
    rule, served, totals = DirichletPrior(clients=2, alpha=1e300), np.array([0, 1, 1, 0, 1]), np.array([1, 2, 2])
    check_frequencies(dict(sequences((1, 2, 2))), lambda rng: tuple(rule.draw_classes(served, totals, rng)))


@pytest.mark.parametrize("alpha", [1e-300, 1e-6])
def test_a_steep_prior_is_an_order_of_preference(alpha: float) -> None:
    # As α → 0 a client wants one class alone, when that is gone another one alone, and so on: a random order, its own.
    served, totals = [0, 1, 0, 0, 1, 1], (2, 1, 3)
    probabilities: Counter[object] = Counter()
    for preferences in product(permutations(range(3)), repeat=2):
        left, classes = list(totals), []
        for client in served:
            classes.append(next(k for k in preferences[client] if left[k]))
            left[classes[-1]] -= 1
        probabilities[tuple(classes)] += 1 / 36
    rule = DirichletPrior(clients=2, alpha=alpha)
    check_frequencies(
        dict(probabilities), lambda rng: tuple(rule.draw_classes(np.array(served), np.array(totals), rng))
    )


def test_priors_have_the_moments_of_the_dirichlet_while_no_class_runs_out() -> None:
    # m draws from q ~ Dir_K(α): mean m/K, variance m (1/K)(1 − 1/K)(m + Kα)/(1 + Kα).
    clients, classes, m, alpha = 20_000, 4, 5, 0.6
    rule = DirichletPrior(clients=clients, alpha=alpha)
    drawn = rule.draw_classes(np.repeat(np.arange(clients), m), np.full(classes, 10**9), generator(0, "law")).reshape(
        clients, m
    )
    counts = np.stack([(drawn == k).sum(1) for k in range(classes)], 1)
    variance = m * (1 / classes) * (1 - 1 / classes) * (m + classes * alpha) / (1 + classes * alpha)
    assert np.abs(counts.mean(0) - m / classes).max() < 5 * np.sqrt(variance / clients)
    # The fourth moment is at most m² times the second: five standard errors of a variance.
    assert np.abs(counts.var(0) - variance).max() < 5 * np.sqrt(m**2 * variance / clients)


def test_blocks_of_any_length_draw_from_the_same_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    from askew.data import partition

    monkeypatch.setattr(partition, "BLOCK", 2)
    monkeypatch.setattr(partition, "CELLS", 6)  # two draws of three classes
    test_clients_that_are_not_full_are_served_at_even_odds()
    test_a_flat_prior_draws_the_classes_left_at_even_odds()
    test_labels_are_chosen_at_even_odds_among_those_left()


def choices(places: tuple[int, ...], clients: int, labels: int) -> Iterator[tuple[tuple[object, ...], float]]:
    """All ways in which clients can choose labels among those left, at even odds, and the probability of each."""
    left = [k for k, count in enumerate(places) if count]
    if not clients:
        yield (), 1.0
        return
    sets = list(combinations(left, min(labels, len(left))))
    for chosen in sets:
        for following, p in choices(tuple(c - (k in chosen) for k, c in enumerate(places)), clients - 1, labels):
            yield (chosen, *following), p / len(sets)


def test_labels_are_chosen_at_even_odds_among_those_left() -> None:
    rule, places = LabelsPerClient(clients=3, labels=2), np.array([2, 1, 2])

    def draw(rng: np.random.Generator) -> object:
        return tuple(tuple(np.flatnonzero(row).tolist()) for row in rule.choose_labels(places, np.ones(3), rng))

    check_frequencies(dict(choices((2, 1, 2), 3, 2)), draw)


def test_overlapping_clients_draw_from_the_whole_class_each() -> None:
    # One class of 6: each set of m samples is equally likely at a client of m, whatever others hold.
    # 5 of 6 are drawn by the one that is left.
    labels, totals, counts = np.zeros(6, dtype=np.int64), np.array([6]), np.array([[1, 5, 0]])
    one_and_five = {((a,), tuple(b)): 1 / 36 for a in range(6) for b in combinations(range(6), 5)}

    def draw(rng: np.random.Generator) -> object:
        assignment = deal_overlapping(labels, totals, counts, rng)
        return tuple(assignment.client(0).tolist()), tuple(assignment.client(1).tolist())

    check_frequencies(one_and_five, draw)
    two_and_two = {((a, b), c): 1 / 225 for a, b in combinations(range(6), 2) for c in combinations(range(6), 2)}
    counts = np.array([[2, 2, 0]])
    check_frequencies(two_and_two, draw)


def test_lognormal_sizes_have_their_spread() -> None:
    clients, sigma = 4000, 0.3
    sizes = lognormal_sizes(10**12, clients, sigma, generator(0, "law"))
    logs = np.log(sizes[1:] / sizes.mean())
    assert abs(logs.std() / sigma - 1) < 5 / np.sqrt(2 * clients)
    # Scaled to the sum: the mean of the sizes is e^(σ²/2) above their median.
    assert abs(np.median(logs) + sigma**2 / 2) < 5 * 1.2533 * sigma / np.sqrt(clients) + 5 * sigma / np.sqrt(clients)


@pytest.mark.parametrize(
    "rule", [Lognormal(clients=4), Iid(clients=4), Iid(clients=4, balanced=True), DirichletPrior(clients=4, alpha=2.0)]
)
def test_which_samples_a_client_gets_is_random(rule: Partition) -> None:
    # Over many seeds the first sample goes where the others of its class go: their frequencies are its chances.
    labels = np.arange(40) % 2
    first, others = np.zeros(4), np.zeros(4)
    for seed in range(500):
        assignment = rule.split(labels, seed)
        holder = np.empty(40, dtype=np.int64)
        holder[assignment.order] = np.repeat(np.arange(4), assignment.sizes)
        first[holder[0]] += 1
        others += np.bincount(holder[2::2], minlength=4) / 19
    assert (np.abs(first - others) < 5 * np.sqrt(first * (1 - first / 500))).all()


def test_shards_are_dealt_at_random() -> None:
    # The first two of the 3 · 2 shards meet at one client with chance 1/5.
    labels, rule = np.arange(6), Shards(clients=3)
    met = np.mean(
        [any({0, 1} <= set(rule.split(labels, seed).client(i).tolist()) for i in range(3)) for seed in range(1000)]
    )
    assert abs(met - 1 / 5) < 5 * np.sqrt(0.2 * 0.8 / 1000)


@pytest.mark.parametrize(
    "rule",
    [DirichletPrior(clients=5, alpha=0.3), LabelsPerClient(clients=5, labels=2, balanced=True), Shards(clients=5)],
)
def test_clients_and_equal_classes_are_exchangeable(rule: Partition) -> None:
    labels = np.arange(100) % 4
    tables = np.array([rule.split(labels, seed).histogram(labels, 4) for seed in range(400)])
    error = tables.std(0) / np.sqrt(len(tables))
    assert (np.abs(tables.mean(0) - 5) < 5 * error).all()
    assert tables.std(0).min() > 1


# --- rules: what holds in every draw


@given(labels=LABELS, clients=st.integers(1, 40), seed=st.integers(0, 2**40))
@settings(max_examples=50, deadline=None)
def test_balanced_iid_is_even_in_every_class(labels: np.ndarray, clients: int, seed: int) -> None:
    assignment = Iid(clients=clients, balanced=True).split(labels, seed)
    check_complete(assignment, len(labels), clients)
    table = assignment.histogram(labels, 7)
    assert (np.ptp(table, axis=0) <= 1).all() and np.ptp(assignment.sizes) <= 1


@pytest.mark.parametrize("clients", [100, 500])
def test_balanced_iid_is_exact_where_it_can_be(clients: int) -> None:
    labels = np.arange(50_000) % 100
    assert (Iid(clients=clients, balanced=True).split(labels, 0).histogram(labels, 100) == 500 // clients).all()


@given(n=st.integers(1, 10**9), clients=st.integers(1, 60), sigma=st.floats(0, 100), seed=st.integers(0, 2**40))
@settings(max_examples=60, deadline=None)
def test_lognormal_sizes_are_scaled_floored_and_summed(n: int, clients: int, sigma: float, seed: int) -> None:
    n = max(n, clients)
    sizes = lognormal_sizes(n, clients, sigma, generator(seed, "law"))
    assert sizes.sum() == n and (sizes >= 0).all()
    if sigma == 0:
        assert np.ptp(sizes) <= 1
    else:
        s = np.exp(sigma * generator(seed, "law").standard_normal(clients).astype(np.longdouble))
        exact = s / s.sum() * n
        assert np.abs(sizes[1:] - (exact[1:] - 0.5)).max(initial=0) <= 0.5 + 1e-6
        assert 0 <= sizes[0] - np.floor(exact[0] - 1e-6) <= clients


@given(labels=LABELS, clients=st.integers(1, 40), sigma=st.floats(0.01, 3), seed=st.integers(0, 2**40))
@settings(max_examples=50, deadline=None)
def test_sizes_come_first_and_are_kept(labels: np.ndarray, clients: int, sigma: float, seed: int) -> None:
    clients = min(clients, len(labels))
    expected = lognormal_sizes(len(labels), clients, sigma, generator(seed, "partition"))
    for rule in (
        Lognormal(clients=clients, sigma=sigma),
        DirichletPrior(clients=clients, sigma=sigma, alpha=10**-sigma),
    ):
        assignment = rule.split(labels, seed)
        check_complete(assignment, len(labels), clients)
        assert np.array_equal(assignment.sizes, expected)


@given(
    labels=LABELS,
    clients=st.integers(1, 40),
    alpha=st.sampled_from([5e-324, 1e-8, 0.1, 1.0, 1e4, 1.7e308]),
    seed=st.integers(0, 2**40),
)
@settings(max_examples=50, deadline=None)
def test_dirichlet_prior_hands_out_everything_once_in_equal_parts(
    labels: np.ndarray, clients: int, alpha: float, seed: int
) -> None:
    clients = min(clients, len(labels))
    assignment = DirichletPrior(clients=clients, alpha=alpha).split(labels, seed)
    check_complete(assignment, len(labels), clients)
    assert np.ptp(assignment.sizes) <= 1


@given(
    labels=LABELS, clients=st.integers(1, 40), alpha=st.floats(1e-8, 1e4), cap=st.booleans(), seed=st.integers(0, 2**40)
)
@settings(max_examples=50, deadline=None)
def test_overlapping_counts_are_floors(labels: np.ndarray, clients: int, alpha: float, cap: bool, seed: int) -> None:
    rule = Dirichlet(clients=clients, alpha=alpha, cap=cap, min_size=0, overlap=True)
    assignment = rule.split(labels, seed)
    totals = np.unique(labels, return_counts=True)[1]
    table = assignment.histogram(labels, 7)[:, np.unique(labels)]
    assert np.array_equal(table.T, rule.draw_counts(totals, generator(seed, "partition")))
    assert (table.sum(0) <= totals).all() and (table.sum(0) > totals - clients).all()
    for i in range(clients):
        assert len(set(assignment.client(i).tolist())) == assignment.sizes[i]
    if cap:
        held = np.cumsum(table, axis=1) - table
        assert (table[held * clients >= len(labels)] == 0).all()


def test_overlapping_clients_share_samples_and_leave_some_out() -> None:
    labels = np.arange(3000) % 10
    assignment = Dirichlet(clients=10, alpha=0.5, overlap=True).split(labels, 0)
    holders = np.bincount(assignment.order, minlength=3000)
    assert holders.max() > 1 and holders.min() == 0 and assignment.sizes.min() >= 10


def check_label_rule(labels: np.ndarray, clients: int, n_c: int, table: np.ndarray) -> None:
    """Check the rule of N_c labels a client on the counts [N, classes], client after client, from what is left."""
    quota, left = len(labels) // clients // n_c, np.bincount(labels, minlength=table.shape[1])
    for row in table:
        classes = np.flatnonzero(row)
        assert len(classes) == min(n_c, (left > 0).sum())
        for k in classes:
            assert row[k] == (left[k] if left[k] < 2 * quota else quota)
        left -= row


@given(labels=LABELS, clients=st.integers(1, 30), n_c=st.integers(1, 7), seed=st.integers(0, 2**40))
@settings(max_examples=60, deadline=None)
def test_labels_per_client_follows_its_rule(labels: np.ndarray, clients: int, n_c: int, seed: int) -> None:
    n_c = min(n_c, len(np.unique(labels)))
    clients = max(1, min(clients, len(labels) // n_c))
    assignment = LabelsPerClient(clients=clients, labels=n_c).split(labels, seed)
    assert len(np.unique(assignment.order)) == len(assignment.order)
    check_label_rule(labels, clients, n_c, assignment.histogram(labels, 7))


@given(labels=LABELS, clients=st.integers(1, 30), n_c=st.integers(1, 7), seed=st.integers(0, 2**40))
@settings(max_examples=60, deadline=None)
def test_balanced_labels_hand_out_everything(labels: np.ndarray, clients: int, n_c: int, seed: int) -> None:
    totals = np.unique(labels, return_counts=True)[1]
    n_c = min(n_c, len(totals))
    clients = max(1, min(clients, len(labels) // n_c))
    rule = LabelsPerClient(clients=clients, labels=n_c, balanced=True)
    most = np.minimum(totals, clients)
    if not len(totals) <= clients * n_c <= most.sum():
        with pytest.raises(
            DataError, match=r"need [\d,]+ to [\d,]+ places for these classes, got [\d,]+; change partition.labels"
        ):
            rule.split(labels, seed)
        return
    assignment = rule.split(labels, seed)
    check_complete(assignment, len(labels), clients)
    table = assignment.histogram(labels, 7)[:, np.unique(labels)]
    assert ((table > 0).sum(1) == n_c).all()
    places = (table > 0).sum(0)
    assert np.array_equal(places, rule.places(totals)) and (places >= 1).all() and (places <= most).all()
    assert all(np.ptp(table[table[:, k] > 0, k]) <= 1 for k in range(len(totals)))


@given(totals=st.lists(st.integers(1, 300), min_size=2, max_size=8), clients=st.integers(1, 30), n_c=st.integers(1, 8))
@settings(max_examples=60, deadline=None)
def test_places_go_one_by_one_to_the_class_with_the_most_samples_a_place(
    totals: list[int], clients: int, n_c: int
) -> None:
    places = [1] * len(totals)
    n_c = min(n_c, len(totals))
    assume(len(totals) <= clients * n_c <= sum(min(total, clients) for total in totals))
    while sum(places) < clients * n_c:
        open_ = [k for k, total in enumerate(totals) if places[k] < min(total, clients)]
        places[max(open_, key=lambda k: totals[k] / places[k])] += 1
    assert LabelsPerClient(clients=clients, labels=n_c).places(np.array(totals)).tolist() == places


def test_labels_of_the_report() -> None:
    # 100 clients, 100 classes of 500: with one label a client has a whole class; with 50 a few clients get too little.
    labels = np.arange(50_000) % 100
    one = LabelsPerClient(clients=100, labels=1).split(labels, 0).histogram(labels, 100)
    assert np.array_equal(np.sort(one.argmax(1)), np.arange(100)) and (one.max(1) == 500).all()
    unused, short = [], []
    for seed in range(10):
        assignment = LabelsPerClient(clients=100, labels=50).split(labels, seed)
        unused.append(50_000 - len(assignment.order))
        short.append((assignment.sizes < 500).sum())
    assert 400 < np.mean(unused) < 800 and 2 < np.mean(short) < 6
    check_complete(LabelsPerClient(clients=100, labels=50, balanced=True).split(labels, 0), 50_000, 100)


@given(labels=LABELS, clients=st.integers(1, 30), count=st.integers(1, 6), seed=st.integers(0, 2**40))
@settings(max_examples=50, deadline=None)
def test_shards_are_runs_of_the_sorted_samples(labels: np.ndarray, clients: int, count: int, seed: int) -> None:
    clients = max(1, min(clients, len(labels) // count))
    count = min(count, len(labels))
    assignment = Shards(clients=clients, shards=count).split(labels, seed)
    check_complete(assignment, len(labels), clients)
    low, high = len(labels) // (clients * count), -(-len(labels) // (clients * count))
    assert (assignment.sizes >= count * low).all() and (assignment.sizes <= count * high).all()
    # A shard holds one label, and one more for each border of two labels within it.
    assert (assignment.histogram(labels, 7) > 0).sum() <= clients * count + len(np.unique(labels)) - 1


def test_shards_of_one_label_each() -> None:
    labels = np.arange(6000) % 10
    table = Shards(clients=100).split(labels, 0).histogram(labels, 10)
    assert (table.sum(1) == 60).all() and np.isin(table, (0, 30, 60)).all()


# --- a user's file


def write(path: Path, content: object) -> str:
    if isinstance(content, np.ndarray):
        np.save(path, content, allow_pickle=True)
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(json.dumps(content))
    return str(path)


def test_a_split_of_one_s_own_in_three_forms(tmp_path: Path) -> None:
    labels = np.zeros(6, dtype=np.int64)
    lists = [[5, 0], [], [3]]
    forms = [
        write(tmp_path / "a.json", lists),
        write(tmp_path / "b.JSON", dict(zip(("zoe", "al", "ben"), lists, strict=True))),
        write(tmp_path / "c.npy", np.array([0, -1, -1, 2, -1, 0], dtype=np.int8)),
    ]
    for form in forms:
        rule = FromFile(clients=3, path=form)
        assignment = rule.split(labels, 0)
        assert [assignment.client(i).tolist() for i in range(3)] == [[0, 5], [], [3]]
        assert rule.reads() == (Path(form),)
    assert Iid().reads() == () and assignment.order.dtype == np.int64


WRONG = [
    ("json", b"", "is no valid .json file"),
    ("json", b"[[0, 1], [2", "is no valid .json file"),
    ("json", b"\xff\xfe[[", "is no valid .json file"),
    ("json", b"[" * 100_000, "is no valid .json file"),
    ("json", [], "gives nobody a sample"),
    ("json", [[], []], "gives nobody a sample"),
    ("json", 7, "must hold a list of lists, or an object of lists; list the sample indices of every client"),
    ("json", [0, 1], "must hold a list of lists"),
    ("json", {"a": 1}, "must hold a list of lists"),
    ("json", [[0], [1.0]], "lists 1.0, which is no sample; samples are the whole numbers from 0 to 4"),
    ("json", [[0], [True]], "lists true, which is no sample"),
    ("json", [[0], ["1"]], 'lists "1", which is no sample'),
    ("json", [[0], [5]], "lists 5, which is no sample"),
    ("json", [[0], [-1]], "lists -1, which is no sample"),
    ("json", [[0], [10**30]], "lists 1000000000000000000000000000000, which is no sample"),
    ("json", [[0, 1], [2, 1]], "lists sample 1 twice, for client 0 and client 1; a sample may belong to one client"),
    ("json", [[0], [2, 2]], "lists sample 2 twice, for client 1;"),
    ("json", b'{"a": [0], "a": [1]}', "names the client 'a' twice"),
    ("json", [[0], [1], [2]], "divides the samples among 3 clients, not 2; set partition.clients = 3"),
    ("npy", b"", "is no valid .npy file"),
    ("npy", b"no array", "is no valid .npy file"),
    ("npy", b"PK\x03\x04 an archive", "is no valid .npy file"),
    ("npy", np.array([{}, None]), "is no valid .npy file"),
    ("npy", np.zeros(5), "must hold a whole number for each of the 5 samples, got float64 of shape [5]"),
    ("npy", np.zeros((5, 1), dtype=int), "got int64 of shape [5, 1]"),
    ("npy", np.zeros(4, dtype=int), "got int64 of shape [4]"),
    (
        "npy",
        np.array([0, 1, -2, 0, 0]),
        "has owners from -2 to 1; number the clients 0, 1, 2, …, and write −1 for nobody's",
    ),
    ("npy", np.array([0, 1, 2**63, 0, 0], dtype=np.uint64), "has owners from 0 to 9223372036854775808"),
    ("npy", np.full(5, -1), "gives nobody a sample"),
    ("npy", np.array([0, 1, 2, 1, 0]), "divides the samples among 3 clients, not 2; set partition.clients = 3"),
    ("npy", np.zeros(5, dtype=int), "divides the samples among 1 clients, not 2; set partition.clients = 1"),
]


@pytest.mark.parametrize(("kind", "content", "sentence"), WRONG)
def test_wrong_files_are_refused_in_a_sentence(kind: str, content: object, sentence: str, tmp_path: Path) -> None:
    rule = FromFile(clients=2, path=write(tmp_path / f"own.{kind}", content))
    with pytest.raises(DataError) as error:
        rule.split(np.zeros(5, dtype=np.int64), 0)
    assert sentence in str(error.value) and "\n" not in str(error.value)
    assert str(error.value).startswith(f"the partition's file {rule.path} ")


def test_missing_files_and_other_kinds_are_refused(tmp_path: Path) -> None:
    for name in ("none.json", "none.npy"):
        with pytest.raises(DataError, match=r"cannot be read: No such file or directory; check partition.path"):
            FromFile(path=str(tmp_path / name)).split(np.zeros(5), 0)
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(DataError, match="cannot be read: "):
        FromFile(path=str(tmp_path / "folder.json")).split(np.zeros(5), 0)
    with pytest.raises(
        ConfigError, match=r"FromFile: path must name a .json or .npy file, got 'own.csv'; save the split"
    ):
        FromFile(path="own.csv")


# --- refused


@pytest.mark.parametrize(
    "rule",
    [
        Iid(balanced=True),
        Dirichlet(min_size=0),
        DirichletPrior(),
        LabelsPerClient(),
        LabelsPerClient(balanced=True),
        Shards(),
    ],
)
def test_rules_by_class_need_classes(rule: Partition) -> None:
    with pytest.raises(
        DataError,
        match="partition needs class labels, whole numbers, and these targets are not; use the iid partition",
    ):
        rule.split(np.linspace(0, 1, 500), 0)


@pytest.mark.parametrize(
    ("rule", "sentence"),
    [
        (
            Lognormal(),
            "29 samples cannot be shared among 30 clients, one each at least on average; lower partition.clients",
        ),
        (DirichletPrior(), "29 samples cannot be shared among 30 clients"),
        (DirichletPrior(clients=10**12), "29 samples cannot be shared among 1,000,000,000,000 clients"),
        (
            LabelsPerClient(),
            "29 samples cannot give 30 clients one sample of each of partition.labels = 5 labels; lower",
        ),
        (
            LabelsPerClient(clients=1, labels=8),
            "cannot hold partition.labels = 8 labels of 7 classes; set partition.labels to 7 or less",
        ),
        (
            LabelsPerClient(clients=3, labels=2, balanced=True),
            "3 clients of 2 labels need 7 to 21 places for these classes, got 6; change",
        ),
        (
            Shards(),
            "29 samples cannot be cut into 30 × partition.shards = 2 shards; "
            "lower partition.shards or partition.clients",
        ),
        (Shards(clients=10**12, shards=10**12), "29 samples cannot be cut into"),
        (Dirichlet(clients=10**12, min_size=10**12), "29 samples cannot give 1,000,000,000,000 clients"),
    ],
)
def test_too_few_samples_or_classes_are_refused(rule: Partition, sentence: str) -> None:
    with pytest.raises(DataError) as error:
        rule.split(np.arange(29) % 7, 0)
    assert sentence in str(error.value)


# rules of a user -------------------------------------------------------------------------------------------------


class Given(Partition):
    """A rule that returns what a test gives it."""

    answer: object = setting("what split returns", default=None)

    def split(self, labels: np.ndarray, seed: int, owner: np.ndarray | None = None) -> Assignment:
        for array in (labels, owner):
            if array is not None:
                array[:] = 0
        return self.answer  # type: ignore[return-value]


WHOLE, ENDS = np.arange(6), np.array([0, 2, 6])


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (None, r"the partition Given must return an askew.Assignment, got NoneType; end split\(\)"),
        ((WHOLE, ENDS), "must return an askew.Assignment, got tuple"),
        (Assignment(WHOLE.tolist(), ENDS), "order of the Assignment must be .* of whole numbers, got list"),  # type: ignore[arg-type]
        (Assignment(WHOLE, ENDS / 1), r"offsets of the Assignment must be .*, got float64 of shape \[3\]"),
        (Assignment(WHOLE[:, None], ENDS), r"order .*, got int64 of shape \[6, 1\]"),
        (Assignment(WHOLE, np.array([0, 6])), "partition.clients = 2 clients, .* 3 offsets, got 2"),
        (Assignment(WHOLE, np.array([0, 2, 4, 6])), "3 offsets, got 4"),
        (Assignment(WHOLE, np.array([1, 2, 6])), "must begin at 0, never decrease and end at 6"),
        (Assignment(WHOLE, np.array([0, 7, 6])), "must begin at 0, never decrease and end at 6"),
        (Assignment(WHOLE, np.array([0, 2, 5])), "must begin at 0, never decrease and end at 6"),
        (Assignment(WHOLE + 1, ENDS), "must assign samples 0 to 5, got 6"),
        (Assignment(WHOLE - 1, ENDS), "must assign samples 0 to 5, got -1"),
    ],
)
def test_what_a_rule_of_a_user_may_not_return(answer: object, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence) as caught:
        Given(clients=2, answer=answer).divide(np.arange(6), 0)
    assert "\n" not in str(caught.value)


def test_a_rule_of_a_user_may_share_samples_and_cannot_change_the_data() -> None:
    labels, owner = np.arange(6) + 1, np.arange(6) + 1
    made = Given(clients=2, answer=Assignment(np.array([5, 0, 0, 5], np.int32), np.array([0, 0, 4]))).divide(
        labels, 0, owner
    )
    assert made.order.tolist() == [5, 0, 0, 5] and made.order.dtype == np.int64 and made.sizes.tolist() == [0, 4]
    assert labels.min() == owner.min() == 1
    y = torch.arange(6) + 1
    data = Dataset(Samples(y[:, None].float(), y), Samples(y[:, None].float(), y), classes=7)
    for public in (0, 2):
        fed = Federation(data, Given(clients=2, public=public, answer=Assignment(WHOLE[:4], np.array([0, 2, 4]))), 0)
        assert fed.pool.y.tolist() == [1, 2, 3, 4, 5, 6]
    with pytest.raises(DataError, match="must assign samples 0 to 3, got 4"):  # the others are public
        Federation(data, Given(clients=2, public=2, answer=Assignment(WHOLE, ENDS)), 0)
