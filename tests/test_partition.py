"""Partitions: laws that hold for all labels, and the statistics of the Dirichlet one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from askew.core.rng import generator
from askew.data import Digits, Dirichlet, Iid, Natural, Partition, Shares, partitions
from askew.errors import ConfigError, DataError, UnknownName

LABELS = st.lists(st.integers(0, 6), min_size=1, max_size=200).map(np.array)


def whole(shares: Shares, n: int, clients: int) -> None:
    """Disjoint and complete."""
    assert shares.order.dtype == shares.offsets.dtype == np.int64
    assert shares.clients == clients and shares.offsets[0] == 0 and shares.offsets[-1] == n
    assert np.array_equal(np.sort(shares.order), np.arange(n))
    assert (shares.sizes >= 0).all() and shares.sizes.sum() == n
    assert [len(shares.client(i)) for i in range(clients)] == shares.sizes.tolist()


@given(labels=LABELS, clients=st.integers(1, 40), alpha=st.floats(1e-8, 1e4), cap=st.booleans(), seed=st.integers(0, 2**40))
@settings(max_examples=150, deadline=None)
def test_dirichlet_hands_out_everything_once(labels: np.ndarray, clients: int, alpha: float, cap: bool, seed: int) -> None:
    rule = Dirichlet(clients=clients, alpha=alpha, cap=cap, min_size=0)
    shares = rule.split(labels, seed)
    whole(shares, len(labels), clients)
    again = rule.split(labels, seed)
    assert np.array_equal(shares.order, again.order) and np.array_equal(shares.offsets, again.offsets)
    if cap:
        # Class after class: who holds n/N samples gets no more.
        counts = shares.histogram(labels, 7)
        held = np.cumsum(counts, axis=1) - counts
        assert (counts[held * clients >= len(labels)] == 0).all()


@given(labels=LABELS, clients=st.integers(1, 40), seed=st.integers(0, 2**40))
@settings(max_examples=100, deadline=None)
def test_iid_cuts_evenly(labels: np.ndarray, clients: int, seed: int) -> None:
    shares = Iid(clients=clients).split(labels, seed)
    whole(shares, len(labels), clients)
    assert shares.sizes.max() - shares.sizes.min() <= 1


@given(owner=st.lists(st.integers(0, 9), min_size=1, max_size=50).map(np.array), seed=st.integers(0, 9))
@settings(max_examples=50, deadline=None)
def test_natural_keeps_the_owners(owner: np.ndarray, seed: int) -> None:
    shares = Natural(clients=12).split(np.zeros_like(owner), seed, owner)
    whole(shares, len(owner), 12)
    for i in range(12):
        assert np.array_equal(shares.client(i), np.flatnonzero(owner == i))


@given(labels=LABELS, clients=st.integers(1, 20))
@settings(max_examples=50, deadline=None)
def test_the_histogram_counts(labels: np.ndarray, clients: int) -> None:
    shares = Iid(clients=clients).split(labels, 0)
    table = shares.histogram(labels, 7)
    assert table.shape == (clients, 7) and table.dtype == np.int64
    for i in range(clients):
        assert np.array_equal(table[i], np.bincount(labels[shares.client(i)], minlength=7))


@pytest.mark.parametrize("rule", [Iid(), Dirichlet(alpha=1.0)])
def test_another_seed_is_another_partition(rule: Partition) -> None:
    labels = np.arange(3000) % 10
    assert not np.array_equal(rule.split(labels, 0).order, rule.split(labels, 1).order)


@pytest.mark.parametrize("clients", [30, 40, 50])
def test_every_client_has_its_least_number_on_the_digits(clients: int) -> None:
    labels = Digits().load(0, clients).train.y.numpy()
    for seed in range(3):
        shares = Dirichlet(clients=clients).split(labels, seed)
        whole(shares, 1437, clients)
        assert shares.sizes.min() >= 10


def test_dirichlet_shares_have_the_mean_and_variance_of_the_law() -> None:
    # P_j of Dir_N(a) has mean 1/N and variance (1/N)(1 − 1/N)/(N a + 1); one class, so no cap can act.
    n, clients, alpha, repetitions = 10_000, 8, 0.5, 3000
    rng = generator(0, "law")
    rule = Dirichlet(clients=clients, alpha=alpha, min_size=0)
    shares = np.array([rule.deal(np.array([n]), rng)[0] for _ in range(repetitions)]) / n
    variance = (1 / clients) * (1 - 1 / clients) / (clients * alpha + 1)
    assert np.abs(shares.mean(0) - 1 / clients).max() < 4.5 * np.sqrt(variance / repetitions)
    assert np.abs(shares.var(0) / variance - 1).max() < 0.15


def test_classes_are_independent_without_the_cap_and_balance_with_it() -> None:
    totals = np.full(10, 1000)
    sizes = {}
    for cap in (False, True):
        rng = generator(0, "law")
        rule = Dirichlet(clients=10, alpha=0.2, cap=cap, min_size=0)
        sizes[cap] = np.array([rule.deal(totals, rng).sum(0) for _ in range(400)])
    # Without the cap a size is the sum of ten independent shares.
    expected = 10 * 1000**2 * 0.1 * 0.9 / (10 * 0.2 + 1)
    assert abs(sizes[False].var() / expected - 1) < 0.1
    assert sizes[True].var() < 0.8 * sizes[False].var()


def test_the_samples_of_a_class_are_shuffled() -> None:
    # Sample 0 is equally likely at every client, however the cuts lie.
    labels = np.zeros(40, dtype=np.int64)
    rule = Dirichlet(clients=4, alpha=50.0, min_size=1)
    seen = np.zeros(4)
    for seed in range(600):
        shares = rule.split(labels, seed)
        seen[np.searchsorted(shares.offsets, np.flatnonzero(shares.order == 0)[0], side="right") - 1] += 1
    assert ((seen - 150) ** 2 / 150).sum() < 16.3  # chi-squared, 3 degrees of freedom: exceeded once in a thousand


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
    shares = Dirichlet(clients=10_000, min_size=0).split(labels, 0)
    whole(shares, 20_000, 10_000)
    assert shares.sizes.min() == 0


def test_too_few_samples_are_refused_at_once() -> None:
    with pytest.raises(DataError, match=r"299 samples cannot give 30 clients partition.min_size = 10 each; at most 9 is possible: lower"):
        Dirichlet().split(np.zeros(299, dtype=np.int64), 0)


def test_a_hopeless_draw_is_refused_in_the_end() -> None:
    with pytest.raises(
        DataError, match=r"in 2000 draws with alpha = 0.001 and 5 clients the smallest never had more than \d+; set partition.min"
    ):
        Dirichlet(clients=5, alpha=0.001).split(np.arange(100) % 2, 0)


def test_targets_that_are_no_labels_are_refused() -> None:
    with pytest.raises(DataError, match="needs class labels, whole numbers, and these targets are not; use the iid partition"):
        Dirichlet(min_size=0).split(np.linspace(0, 1, 50), 0)
    whole(Iid(clients=7).split(np.linspace(0, 1, 50), 0), 50, 7)


def test_natural_refuses_what_has_no_owner_or_too_many() -> None:
    labels = np.zeros(3, dtype=np.int64)
    with pytest.raises(DataError, match=r'does not come divided among clients; set partition.name to "iid" or "dirichlet"'):
        Natural().split(labels, 0)
    with pytest.raises(DataError, match=r"belong to 6 clients, more than partition.clients = 5; set partition.clients = 6"):
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
