"""Datasets: the digits, the synthetic generators and a user's own data."""

from __future__ import annotations

import sys
from dataclasses import fields

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset, TensorDataset

import askew.data
from askew.core.rng import generator
from askew.data import (
    Dataset,
    Digits,
    NaturalSource,
    Samples,
    Source,
    Synthetic,
    SyntheticLeaf,
    digits,
    from_user,
    partitions,
    sources,
)
from askew.data.partition import Partition
from askew.errors import AskewError, ConfigError, DataError

NATURAL = [Synthetic(alpha=1.0, beta=1.0), Synthetic(sigma=0.7), SyntheticLeaf()]


def test_exported_names_are_sorted_and_exist() -> None:
    assert askew.data.__all__ == sorted(askew.data.__all__)
    assert all(name in vars(askew.data) for name in askew.data.__all__)


@pytest.mark.parametrize("member", [registry[name]() for registry in (sources, partitions) for name in registry])
def test_every_member_has_an_idea_and_documented_fields(member: Source | Partition) -> None:
    assert member.idea
    assert set(member.table()).isdisjoint({"idea", "natural", "title"})
    assert all(field.metadata["doc"] for field in fields(member))


# --- digits


def test_digits_are_the_real_ones_split_once() -> None:
    data = Digits().load(0, 30)
    assert data.train.x.shape == (1437, 1, 8, 8)
    assert data.test.x.shape == (360, 1, 8, 8)
    assert data.classes == 10 and data.owner is None and data.criterion == "cross_entropy"
    assert data.train.x.dtype == torch.float32 and data.train.y.dtype == torch.int64
    everything = torch.cat([data.train.x, data.test.x])
    assert everything.min() == 0 and everything.max() == 1
    assert torch.equal(everything * 16, (everything * 16).round())
    # The split loses and repeats nothing: the sum over all images is the sum over scikit-learn's.
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    assert torch.equal((everything.reshape(-1, 64) * 16).sum(0).double(), torch.from_numpy(pixels.sum(0)))
    share = np.bincount(data.test.y) / np.bincount(labels)
    assert np.abs(share * np.bincount(labels) - 0.2 * np.bincount(labels)).max() < 1
    other = Digits().load(7, 3)
    assert torch.equal(data.test.x, other.test.x) and torch.equal(data.train.y, other.train.y)


def test_digits_do_not_load_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their file is read, since scikit-learn takes seconds to load; a version without the file is asked for them."""
    read_anew = digits.read_digits.__wrapped__
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "sklearn.datasets", None)  # an import of it fails
        read = read_anew()
    monkeypatch.setattr(digits, "find_spec", lambda name: None)
    for ours, theirs in zip(read, read_anew(), strict=True):
        assert ours.dtype == theirs.dtype and np.array_equal(ours, theirs)


# --- synthetic


def test_a_stream_of_sizes_begins_alike_however_long_it_is() -> None:
    long = generator(3, "client sizes").standard_normal(100_000)
    for length in (1, 17, 4096, 50_001):
        assert np.array_equal(generator(3, "client sizes").standard_normal(length), long[:length])
    assert np.array_equal(generator(3, "x").lognormal(4, 2, 10), generator(3, "x").lognormal(4, 2, 1000)[:10])


@pytest.mark.parametrize("source", NATURAL)
def test_a_client_is_a_function_of_seed_and_number_alone(source: NaturalSource) -> None:
    few, many = source.sizes(5, 40), source.sizes(5, 1_000_000)
    assert few.dtype == many.dtype == np.int64 and many.shape == (1_000_000,)
    assert np.array_equal(few, many[:40])
    for i in (0, 1, 39, 4095, 4096, 70_000, 999_999):
        drawn, again = source.client(5, i), source.client(5, i)
        assert len(drawn.x) == len(drawn.y) == many[i] >= 1
        assert torch.equal(drawn.x, again.x) and torch.equal(drawn.y, again.y)
        assert drawn.x.dtype == torch.float32 and drawn.y.dtype == torch.int64
        assert drawn.y.min() >= 0 and drawn.y.max() < source.classes
    assert not torch.equal(source.client(5, 1).x[:5], source.client(5, 2).x[:5])
    assert not torch.equal(source.client(5, 1).x[:5], source.client(6, 1).x[:5])


@pytest.mark.parametrize("source", NATURAL)
def test_pooled_data_are_the_clients_in_their_order(source: NaturalSource) -> None:
    data = source.load(2, 6)
    assert source.natural and data.classes == source.classes
    assert data.owner is not None
    assert np.array_equal(np.bincount(data.owner, minlength=6), source.sizes(2, 6))
    for i in range(6):
        of_client = data.train.select(torch.from_numpy(data.owner == i))
        assert torch.equal(of_client.x, source.client(2, i).x)
        assert torch.equal(of_client.y, source.client(2, i).y)


def test_pooling_too_much_is_refused() -> None:
    with pytest.raises(
        DataError, match=r'600,000,000 numbers, at most 50,000,000 are allowed; set partition.name = "natural"'
    ):
        Synthetic().load(0, 100_000)


def test_synthetic_sizes_and_its_test_set() -> None:
    source = Synthetic()
    assert source.table()["dim"] == 30 and source.classes == 5
    assert np.array_equal(source.sizes(0, 20), np.full(20, 200))
    data = source.load(0, 20)
    assert data.train.x.shape == (4000, 30)
    assert torch.equal(data.train.x, data.test.x) and torch.equal(data.train.y, data.test.y)
    of_three = Synthetic(test_clients=3).test_set(0, 20)
    assert torch.equal(of_three.x, data.train.x[:600])
    sizes = Synthetic(sigma=0.5).sizes(1, 200_000)
    assert abs(sizes.mean() / 200 - 1) < 0.01
    assert abs(np.log(sizes).std() - 0.5) < 0.01
    assert Synthetic(sigma=30.0).sizes(1, 10_000).min() == 1
    assert Synthetic(samples=100_000, sigma=1.0).sizes(1, 1000).max() == 100_000


def test_synthetic_inputs_have_the_declared_distribution() -> None:
    x = Synthetic(samples=20_000).client(0, 3).x.double()
    assert x.mean(0).abs().max() < 0.03
    expected = torch.arange(1, 31, dtype=torch.float64) ** -1.2
    assert (x.var(0) / expected - 1).abs().max() < 0.05
    # Own inputs: the centre of client i has entries N(B_i, 1) with B_i ~ N(0, beta).
    centres = torch.stack([Synthetic(beta=3.0, samples=100).client(1, i).x.double().mean(0) for i in range(400)])
    assert abs(float(centres.std(1).mean()) - 1) < 0.05
    assert abs(float(centres.mean(1).std()) - 3) < 0.35


def disagreement(source: Synthetic) -> float:
    """The fraction of client 1's labels that differ from those that client 0's W, b give.

    W and b are drawn here from client 0's stream.
    """
    rng = generator(0, "synthetic solution", client=0 if source.own_solutions else -1)
    mean = rng.normal(0, source.alpha) * source.own_solutions
    w, b = rng.normal(mean, 1, (30, 5)), rng.normal(mean, 1, 5)
    x, y = source.client(0, 1)
    return float(((x.double().numpy() @ w + b).argmax(1) != y.numpy()).mean())


def test_solutions_are_common_or_own() -> None:
    assert disagreement(Synthetic()) == 0
    assert disagreement(Synthetic(beta=1.0)) == 0
    assert disagreement(Synthetic(alpha=1.0, samples=2000)) > 0.3
    assert disagreement(Synthetic(iid_solution=False, samples=2000)) > 0.3
    assert disagreement(Synthetic(alpha=1.0, iid_solution=True)) == 0


def test_the_mean_of_a_solution_cancels_in_the_argmax() -> None:
    without_mean, with_mean = Synthetic(iid_solution=False), Synthetic(alpha=5.0)
    for i in range(5):
        assert torch.equal(without_mean.client(0, i).y, with_mean.client(0, i).y)


def test_own_inputs_and_solutions_follow_from_alpha_and_beta_unless_set() -> None:
    cases = {(0, 0): (False, False), (1, 0): (False, True), (0, 1): (True, False), (1, 1): (True, True)}
    for (alpha, beta), expected in cases.items():
        source = Synthetic(alpha=alpha, beta=beta)
        assert (source.own_inputs, source.own_solutions) == expected
    explicit = Synthetic(beta=1.0, iid_data=True, iid_solution=False)
    assert (explicit.own_inputs, explicit.own_solutions) == (False, True)
    # Switching the centres on moves a client's inputs by one vector, and leaves its noise alone.
    moved = Synthetic(beta=1.0).client(0, 0).x - Synthetic().client(0, 0).x
    assert moved.std(0).max() < 1e-5 and moved.abs().max() > 0.5


def test_synthetic_leaf_is_the_original() -> None:
    source = SyntheticLeaf()
    assert source.table() == {"dim": 60, "labels": 10, "alpha": 1.0, "beta": 1.0, "test_clients": 1000}
    sizes = source.sizes(0, 100_000)
    assert sizes.min() >= 45 and sizes.max() == 90_000
    # Quantiles of 50 + LogNormal(4, 2): at z = 0, 1 and 2 standard deviations.
    for z, share in ((0, 0.5), (1, 0.84134), (2, 0.97725)):
        assert abs(np.log(np.quantile(sizes, share) / 0.9 - 50) - (4 + 2 * z)) < 0.06
    data = source.load(0, 8)
    total = len(data.train.y) + len(data.test.y)
    assert 0.1 <= len(data.test.y) / total < 0.12
    train, test = source.split(0, 0)
    assert len(train.y) == int(0.9 * source.count(0, 0)) and len(train.y) + len(test.y) == source.count(0, 0)
    assert torch.equal(data.test.x[: len(test.x)], test.x)


def test_out_of_range_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="Synthetic: alpha must be ≥ 0, got -1"):
        Synthetic(alpha=-1)
    with pytest.raises(ConfigError, match="Synthetic: samples must be ≥ 1 and ≤ 100000"):
        Synthetic(samples=0)


# --- a user's own data


def test_arrays_become_a_dataset() -> None:
    x, y = np.arange(20.0).reshape(10, 2), np.arange(10, dtype=np.int32) % 3
    data = from_user((x, y), (x[:4], y[:4]))
    assert data.classes == 3 and data.criterion == "cross_entropy" and data.owner is None
    assert data.train.x.dtype == torch.float32 and data.train.y.dtype == torch.int64
    assert torch.equal(data.train.x, torch.from_numpy(x).float()) and len(data.test.y) == 4
    x[0, 0] = 99
    assert data.train.x[0, 0] == 0, "the dataset shares no memory with the user's array"
    assert from_user(data) is data


def test_classes_count_the_test_labels_too() -> None:
    assert from_user((torch.zeros(2, 1), torch.tensor([0, 1])), (torch.zeros(1, 1), torch.tensor([6]))).classes == 7


def test_a_fifth_is_held_out() -> None:
    x = torch.arange(101.0)[:, None]
    data, again = (from_user((x, torch.arange(101))) for _ in range(2))
    assert len(data.test.y) == 21 and len(data.train.y) == 80
    assert torch.equal(data.test.x, again.test.x)
    assert torch.equal(torch.cat([data.train.y, data.test.y]).sort().values, torch.arange(101))
    assert torch.equal(data.train.x[:, 0].long(), data.train.y)
    assert not torch.equal(data.test.y, torch.arange(0, 101, 5))


def test_types_of_inputs_and_targets() -> None:
    tokens = from_user((torch.ones(5, 3, dtype=torch.int32), torch.zeros(5, dtype=torch.int8)))
    assert tokens.train.x.dtype == torch.int64
    pixels = from_user((np.full((5, 1, 2, 2), 255, dtype=np.uint8), np.array([True, False] * 2 + [True])))
    assert pixels.train.x.dtype == torch.float32 and pixels.train.x.max() == 255 and pixels.classes == 2
    regression = from_user((torch.ones(5, 3, dtype=torch.float64), np.linspace(0, 1, 5)))
    assert (
        regression.classes == 0
        and regression.criterion == "squared_error"
        and regression.train.y.dtype == torch.float32
    )


class Pairs(TorchDataset):
    def __init__(self, items: list[object]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> object:
        return self.items[i]


def test_torch_datasets_are_stacked() -> None:
    x, y = torch.randn(6, 2), torch.tensor([0, 1, 2, 0, 1, 2])
    data = from_user(TensorDataset(x, y), Pairs([(np.zeros(2), 1), (np.ones(2), 0)]))
    assert torch.equal(data.train.x, x) and torch.equal(data.train.y, y)
    assert data.test.x.tolist() == [[0, 0], [1, 1]] and data.test.y.tolist() == [1, 0]


class Stream(IterableDataset):
    def __iter__(self) -> object:
        return iter([(torch.zeros(1), 0)])


X, Y = torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("data", "test", "sentence"),
    [
        (
            (X, Y[:3]),
            None,
            r"as many targets as inputs and at least one, got x of shape \[4, 2\] and y of shape \[3\]; give one",
        ),
        ((X[:0], Y[:0]), None, "at least one, got x of shape"),
        ((X, Y[:, None]), None, r"must be one number a sample, got shape \[4, 1\]; flatten"),
        (
            (X / 0, Y),
            None,
            "inputs of the training data must be finite in float32, got NaN or infinite .*sample 0 at \\[0\\]",
        ),
        ((X.double() + 1e300, Y), None, "inputs of the training data must be finite in float32"),
        ((X, Y / 0), None, "targets of the training data must be finite"),
        ((X, Y), (X / 0, Y), "inputs of the test data must be finite"),
        ((X, Y), (X[:, :1], Y), "inputs of shape .* both must be alike"),
        ((X, Y), (X, Y.float()), "targets of type .* both must be alike"),
        ((X[:1], Y[:1]), None, "held out from 2 samples or more, got 1; give more data, or pass test"),
        (
            X,
            None,
            r"must be a pair \(x, y\) of tensors or arrays, a triple \(x, y, owner\), .* got Tensor; pass",
        ),
        ((X, Y, Y, Y), None, r"must be a pair \(x, y\)"),
        ((X * 1j, Y), None, "x of the training data must be a tensor or an array of real numbers"),
        (Stream(), None, "must be map-style, with a length and an index"),
        (Pairs([]), None, "must hold at least one sample"),
        (Pairs([X[0]] * 3), None, "must yield pairs"),
        (Pairs([(X[0], 0), (X[0, :1], 0)]), None, "must all have one shape"),
        (Dataset(Samples(X, Y), Samples(X, Y), 1), (X, Y), "test must be left out"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(data: object, test: object, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence) as caught:
        from_user(data, test)  # type: ignore[arg-type]
    assert isinstance(caught.value, AskewError) and "\n" not in str(caught.value)


def test_a_source_of_ones_own() -> None:
    class Coins(Source):
        def load(self, seed: int, clients: int) -> Dataset:
            y = torch.from_numpy(generator(seed, "coins").integers(0, 2, 50))
            return from_user((y[:, None].float(), y))

    assert Coins().load(0, 5).classes == 2
