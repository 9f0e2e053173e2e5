"""Space, task, gradients, algebra, random streams, bank and settings, each against its definition."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import nn

import askew
from askew.algorithms import FedAvg
from askew.core.algebra import clip_norm, dot, norm, step_along
from askew.core.bank import Bank
from askew.core.differentiate import differentiate
from askew.core.rng import address_key, generator, torch_seed
from askew.core.settings import Registry, Settings, setting
from askew.core.space import BATCH_NORMS, Space
from askew.core.task import Bound, Functional, WithFeatures
from askew.core.types import Batch, momentum_length
from askew.engine.finite import half_means
from askew.errors import AlgorithmError, ConfigError, ModelError, UnknownName
from askew.experiment.plugins import REGISTRIES
from askew.models import networks
from problems import with_features


def mlp(norm: str = "none") -> nn.Module:
    torch.manual_seed(0)
    return networks["mlp"].build({"hidden": [8], "norm": norm}).module((6,), 3)


# space ----------------------------------------------------------------------------------------------------------


def test_a_module_is_its_vector_and_back() -> None:
    module = mlp("batch")
    space = Space(module)
    assert sum(p.numel() for p in module.parameters()) == space.P
    for name, part in space.split(space.start).items():
        assert torch.equal(part, dict(module.named_parameters())[name])
    for name, part in space.split_buffers(space.buffers).items():
        assert torch.equal(part, dict(module.named_buffers())[name])
    assert space.Q == 16  # running mean and variance of eight units


def test_parts_by_kind_by_name_and_from_the_end() -> None:
    space = Space(mlp("batch"))
    norms = space.layers_of_type(*BATCH_NORMS)
    assert norms.indices.numel() == 16 and norms.buffer_indices.numel() == 16
    assert torch.equal(space.start[norms.indices], torch.cat([torch.ones(8), torch.zeros(8)]))
    assert space.named_layers("out").indices.numel() == 8 * 3 + 3
    assert torch.equal(space.last_layers(1).indices, space.named_layers("out").indices)
    assert space.whole_part().indices.numel() == space.P
    assert space.empty_part().empty and not norms.empty
    with pytest.raises(ModelError, match="no layer 'head'"):
        space.named_layers("head")


def test_a_network_without_weights_or_with_bad_ones_is_refused() -> None:
    with pytest.raises(ModelError, match="no trainable parameter"):
        Space(nn.Flatten())
    bad = nn.Linear(2, 2)
    with torch.no_grad():
        bad.weight[0, 0] = torch.nan
    with pytest.raises(ModelError, match="not finite"):
        Space(bad)
    with pytest.raises(ModelError, match="momentum=None"):
        Space(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, momentum=None)))


def test_frozen_parameters_and_shared_ones() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[0].weight.requires_grad_(False)
    assert Space(module).P == 3 + 12
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    assert Space(tied).P == 9 + 3 + 3


# tasks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_kind", ["none", "batch", "group"])
def test_both_tasks_give_torchs_own_gradient_and_statistics(norm_kind: str) -> None:
    module = mlp(norm_kind).double()
    space = Space(module, torch.float64)
    batch = Batch(torch.randn(5, 6, dtype=torch.float64), torch.tensor([0, 1, 2, 1, 0]))
    reference = copy.deepcopy(module).train()
    loss = F.cross_entropy(reference(batch.x)[0], batch.y)
    loss.backward()
    g = torch.cat([p.grad.reshape(-1) for p in reference.parameters()])
    buffers = torch.cat([b.reshape(-1) for b in reference.buffers()]) if space.Q else space.buffers
    for task in (Bound(module, space), Functional(module, space)):
        got, value, after = differentiate(task, lambda u, task=task: task.loss(u, batch), space.start, space.buffers)
        assert torch.allclose(got, g, atol=1e-15)
        assert float(value) == pytest.approx(loss.item(), abs=1e-12)
        assert torch.allclose(after, buffers, atol=1e-15)


def test_a_loss_that_depends_on_theta_itself_is_differentiated_too() -> None:
    module = mlp().double()
    space = Space(module, torch.float64)
    batch = Batch(torch.randn(4, 6, dtype=torch.float64), torch.tensor([0, 1, 2, 1]))
    for task in (Bound(module, space), Functional(module, space)):
        plain = lambda u, task=task: task.loss(u, batch)
        ridge = lambda u, plain=plain: plain(u) + 0.5 * u.square().sum()
        g, with_ridge = (differentiate(task, loss, space.start, space.buffers).gradient for loss in (plain, ridge))
        assert torch.allclose(with_ridge - g, space.start, atol=1e-12)


def test_padding_weighs_nothing() -> None:
    module = mlp().double()
    space = Space(module, torch.float64)
    x, y = torch.randn(3, 6, dtype=torch.float64), torch.tensor([0, 1, 2])
    padded = Batch(
        torch.cat([x, torch.randn(2, 6, dtype=torch.float64)]),
        torch.tensor([0, 1, 2, 0, 0]),
        torch.tensor([1.0, 1, 1, 0, 0]),
    )
    task = Bound(module, space)
    one = differentiate(task, lambda u: task.loss(u, Batch(x, y)), space.start, space.buffers).gradient
    two = differentiate(task, lambda u: task.loss(u, padded), space.start, space.buffers).gradient
    assert torch.allclose(one, two, atol=1e-15)


def test_a_plain_module_is_given_features_and_can_be_copied() -> None:
    plain = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))
    example = torch.randn(3, 4)
    wrapped = with_features(plain, example)
    for module in (wrapped, copy.deepcopy(wrapped), copy.deepcopy(copy.deepcopy(wrapped))):
        output, features = module(example)
        inner = module.module
        assert torch.equal(output, inner[2](features)) and torch.equal(features, inner[1](inner[0](example)))
    own = mlp()
    assert with_features(own, torch.randn(2, 6)) is own


def test_frozen_models_run_in_evaluation_mode_and_change_nothing() -> None:
    module = mlp("batch")
    space = Space(module)
    task = Bound(module, space)
    batch = Batch(torch.randn(4, 6) * 5 + 3, torch.tensor([0, 1, 2, 0]))
    statistics = space.buffers.clone()
    output = task.frozen(space.start, space.buffers, batch)[0]
    assert torch.allclose(output, copy.deepcopy(module).eval()(batch.x)[0])
    assert torch.equal(space.buffers, statistics)


# algebra --------------------------------------------------------------------------------------------------------


def test_norms_and_products_are_accumulated_in_float64() -> None:
    a = torch.full((1_000_000,), 0.1)
    assert float(norm(a)) == pytest.approx(100, rel=1e-7)
    assert float(dot(a, a)) == pytest.approx(1e4, rel=1e-7)
    assert dot(a, a).dtype == torch.float64


def test_clipping_shortens_and_never_lengthens() -> None:
    d = torch.tensor([3.0, 4.0])
    assert torch.allclose(clip_norm(d, 1.0), d / 5, atol=1e-6)
    assert torch.equal(clip_norm(d, 10.0), d)
    assert clip_norm(d, float("inf")) is d


def test_a_step_is_the_same_with_a_number_and_with_a_tensor_as_its_rate() -> None:
    theta, d = torch.tensor([1.0, 2.0]), torch.tensor([3.0, -4.0])
    assert torch.allclose(step_along(theta, d, 0.5), torch.tensor([-0.5, 4.0]))
    assert torch.equal(step_along(theta, d, 0.5), step_along(theta, d, torch.tensor(0.5)))


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9])
def test_the_length_of_a_path_under_momentum(rho: float) -> None:
    for k in (1, 2, 7, 30):
        a = c = 0.0
        for _ in range(k):
            c = rho * c + 1
            a += c
        steps = torch.tensor([float(k)], dtype=torch.float64)
        assert float(momentum_length(steps, rho)[0]) == pytest.approx(a, rel=1e-12)


# random streams -------------------------------------------------------------------------------------------------


def test_draws_follow_from_seed_purpose_round_and_client() -> None:
    draw = lambda *address: generator(*address).random(4).tolist()
    assert draw(0, "batches", 3, 7) == draw(0, "batches", 3, 7)
    others = [(1, "batches", 3, 7), (0, "other", 3, 7), (0, "batches", 4, 7), (0, "batches", 3, 8)]
    assert all(draw(0, "batches", 3, 7) != draw(*other) for other in others)
    assert len({address_key(0, "p", r, c) for r in range(50) for c in range(50)}) == 2500
    assert torch_seed(0, "model") != torch_seed(1, "model")


def test_the_key_of_a_stream_is_that_of_philox() -> None:
    for client in range(20):
        words = np.frombuffer(address_key(5, "batches", 3, client), dtype=np.uint64)
        plain = np.random.Generator(np.random.Philox(key=words))
        stream = generator(5, "batches", 3, client)
        assert np.array_equal(stream.permutation(300), plain.permutation(300))
        assert stream.standard_normal() == plain.standard_normal()


def test_draws_of_many_clients_are_uniform() -> None:
    coins = np.array([generator(0, "coin", 1, client).random() for client in range(4000)])
    assert abs(coins.mean() - 0.5) < 4 * np.sqrt(1 / 12 / 4000)
    assert abs(np.corrcoef(coins[:-1], coins[1:])[0, 1]) < 4 / np.sqrt(4000)


# bank -----------------------------------------------------------------------------------------------------------


@hypothesis_settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 10**9), min_size=1, max_size=6, unique=True), st.floats(-9, 9)), max_size=12
    )
)
def test_a_bank_reads_back_what_was_last_written(writes: list[tuple[list[int], float]]) -> None:
    bank = Bank({"h": torch.tensor([1.0, 2.0]), "n": torch.tensor(7)})
    truth: dict[int, float] = {}
    for clients, value in writes:
        bank.write(clients, {"h": torch.full((len(clients), 2), value), "n": torch.arange(len(clients))})
        truth |= dict.fromkeys(clients, value)
    ask = [*truth, 10**9 + 1]
    rows = bank.read(ask)
    for i, client in enumerate(ask[:-1]):
        assert rows["h"][i].tolist() == pytest.approx([truth[client]] * 2)
    assert rows["h"][-1].tolist() == [1.0, 2.0] and int(rows["n"][-1]) == 7
    assert len(bank) == len(truth) and rows["n"].dtype == torch.int64


def test_a_bank_grows_from_memory_into_a_file_and_only_for_clients_that_took_part(tmp_path: Path) -> None:
    start = {"h": torch.zeros(1000)}
    bank = Bank(start, host_bytes=100_000, folder=tmp_path)
    assert sum(bank.bytes_by_place().values()) == 0
    for client in range(0, 400, 4):
        bank.write([client], {"h": torch.full((1, 1000), float(client))})
    places = bank.bytes_by_place()
    assert 0 < places["host"] <= 100_000 and places["file"] > 0
    rows = bank.read(list(range(0, 400, 4)))["h"]
    assert torch.equal(rows[:, 0], torch.arange(0.0, 400.0, 4.0))
    assert torch.equal(bank.read([1])["h"][0], start["h"])
    assert sum(places.values()) < 3 * 100 * 4000
    assert list(tmp_path.iterdir()) == []  # the file has no name: it ends with the process


def test_reading_a_bank_gives_copies() -> None:
    bank = Bank({"h": torch.zeros(2)})
    bank.write([3], {"h": torch.ones(1, 2)})
    bank.read([3])["h"].fill_(9)
    bank.read([4])["h"].fill_(9)
    assert bank.read([3, 4])["h"].tolist() == [[1, 1], [0, 0]]


def test_a_stateless_bank_costs_nothing() -> None:
    bank = Bank({})
    bank.write([1, 2], {})
    assert bank.read([1]) == {} and len(bank) == 0


# settings -------------------------------------------------------------------------------------------------------


class Example(Settings):
    """A setting of every type."""

    rate: float = setting("a rate", default=0.1, above=0, hint="try 0.1.")
    count: int = setting("a count", default=3, least=1, most=9)
    kind: str = setting("a kind", default="plain", choices=("plain", "fancy"))
    on: bool = setting("a switch", default=False)
    cap: float | None = setting("a cap", default=None, least=1)
    widths: tuple[int, ...] = setting("widths", default=(64,))


class OtherDefault(Example):
    rate = 0.01


def test_settings_are_canonical_and_frozen() -> None:
    example = Example.build({"rate": 1, "count": 4.0, "widths": [8, 4], "cap": 2})
    assert example.rate == 1.0 and isinstance(example.rate, float)
    assert example.count == 4 and isinstance(example.count, int)
    assert example.widths == (8, 4) and example.cap == 2.0
    with pytest.raises(AttributeError):
        example.rate = 2.0  # type: ignore[misc]


def test_a_plain_override_is_a_new_default_with_the_old_rules() -> None:
    assert OtherDefault().rate == 0.01 and Example().rate == 0.1
    with pytest.raises(ConfigError, match="OtherDefault: rate must be > 0"):
        OtherDefault(rate=0.0)


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({"rate": -1}, "Example: rate must be > 0, got -1; try 0.1."),
        ({"rate": "fast"}, "Example: rate must be a number, got 'fast'; try 0.1."),
        ({"rate": True}, "Example: rate must be a number, got true; try 0.1."),
        ({"rate": float("nan")}, "Example: rate must be a number, got nan; try 0.1."),
        ({"rate": float("inf")}, "Example: rate must be finite, got inf; try 0.1."),
        ({"count": 2.5}, "Example: count must be a whole number, got 2.5; the default is 3."),
        ({"count": 10}, "Example: count must be ≥ 1 and ≤ 9, got 10; the default is 3."),
        ({"kind": "plian"}, "Example: unknown kind 'plian'; did you mean 'plain'? Known: fancy, plain."),
        ({"on": 1}, "Example: on must be true or false, got 1; the default is false."),
        (
            {"widths": [1, "a"]},
            "Example: widths must be a list, each item a whole number, got [1, 'a']; the default is [64].",
        ),
        ({"rte": 1}, "Example: unknown setting rte; did you mean 'rate'? Known: cap, count, kind, on, rate, widths."),
    ],
)
def test_a_refusal_says_what_was_wrong_what_is_allowed_and_what_to_do(table: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Example.build(table)
    assert str(caught.value) == sentence


def test_a_registry_knows_the_nearest_name_and_keeps_its_members() -> None:
    registry: Registry[Example] = Registry("example", {"example": Example})
    with pytest.raises(UnknownName, match="did you mean 'example'"):
        registry["exampel"]
    registry.register("other", OtherDefault)
    assert registry.name_of(OtherDefault()) == "other" and list(registry) == ["example", "other"]
    with pytest.raises(ConfigError, match="exists already"):
        registry.register("example", OtherDefault)


@pytest.mark.parametrize("name", ["", "..", ".hidden", "-x", "../evil/x y", "a b", "fedavg,v2", "a/b", "a\n"])
def test_a_name_that_no_folder_or_option_can_have_is_refused(name: str) -> None:
    registry: Registry[Example] = Registry("example", {})
    with pytest.raises(ConfigError) as caught:
        registry.register(name, Example)
    assert str(caught.value).startswith(f"the example cannot have the name {name!r}; use letters, digits,")
    assert not list(registry)


@pytest.mark.parametrize("base", REGISTRIES, ids=lambda base: base.__name__)
def test_names_of_every_registry_are_checked_and_those_of_askew_pass(base: type[Any]) -> None:
    registry = REGISTRIES[base]
    for name in registry:
        registry.register(name, registry[name])
    with pytest.raises(ConfigError, match=r"cannot have the name '\.\./evil'"):
        askew.register("../evil")(type("Evil", (base,), {}))


def test_hooks_that_break_the_interface_are_named() -> None:
    import askew

    class Widens(askew.Algorithm):
        def aggregate(self, w, up, cohort, server):  # type: ignore[no-untyped-def]
            return torch.cat([w, w]), server

    class Invents(askew.Algorithm):
        def note(self, theta, g, d, client):  # type: ignore[no-untyped-def]
            return {"new": theta}

        def aggregate(self, w, up, cohort, server):  # type: ignore[no-untyped-def]
            return w, server

    class Clashes(FedAvg):
        def server_state(self, space):  # type: ignore[no-untyped-def]
            return {"loss": space.scalar()}

    for method, sentence in (
        (Widens(), "aggregate.. must return the model"),
        (Invents(), "note.. may only renew"),
        (Clashes(), "'loss' is a name"),
    ):
        with pytest.raises(AlgorithmError, match=sentence):
            askew.run(method, model="softmax", rounds=1, clients=10)


def test_channels_last_is_another_order_of_the_same_coordinates() -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 5), nn.Flatten(), nn.Linear(4, 2))
    plain, last = Space(module), Space(module, channels_last=True)
    assert torch.equal(plain.start.sort().values, last.start.sort().values) and not torch.equal(plain.start, last.start)
    for (name, a), b in zip(plain.split(plain.start).items(), last.split(last.start).values(), strict=True):
        assert torch.equal(a, b) and a.shape == b.shape, name
        assert torch.equal(last.flatten_parameter(b), last.flatten_parameter(a.clone()))
    weight = last.split(last.start)["0.weight"]
    assert weight.is_contiguous(memory_format=torch.channels_last) and weight.data_ptr() == last.start.data_ptr()
    x, y = torch.randn(6, 3, 5, 5), torch.randint(0, 2, (6,))
    grads = []
    for space in (plain, last):
        task = Bound(WithFeatures(module), Space(WithFeatures(module), channels_last=space.channels_last))
        g, _, _ = differentiate(
            task, lambda u, task=task: task.loss(u, Batch(x, y)), task.space.start, task.space.buffers
        )
        grads.append(task.space.split(g))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(grads[0].values(), grads[1].values(), strict=True))


# reports that are not finite ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("length", [1, 7, 1000])
def test_rows_with_a_number_that_is_not_finite_are_found(dtype: torch.dtype, length: int) -> None:
    rows = torch.randn(5, length, dtype=dtype)
    rows[1, -1], rows[2, 0] = float("nan"), float("inf")
    rows[3, 0], rows[3, -1] = float("inf"), float("-inf")
    assert half_means(rows).isfinite().tolist() == [True, False, False, False, True]
    assert half_means(rows.view(5, length, 1)).isfinite().tolist() == half_means(rows).isfinite().tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("length", [1, 2, 3, 1000, 100_003])
def test_the_largest_numbers_are_finite(dtype: torch.dtype, length: int) -> None:
    most = torch.finfo(dtype).max
    rows = torch.full((3, length), most, dtype=dtype)
    rows[1] = -most
    rows[2, ::2] = -most
    assert half_means(rows).isfinite().all() and half_means(rows[:, 0]).isfinite().all()


def test_rows_of_whole_numbers_and_empty_rows_are_finite() -> None:
    assert half_means(torch.full((3, 2), 2**62)).tolist() == half_means(torch.zeros(3, 0)).tolist() == [0.0] * 3
    assert half_means(torch.tensor([1.0, float("nan")])).isfinite().tolist() == [True, False]
