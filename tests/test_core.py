"""Space, task, bank, random streams and settings, each against what it must mean."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import nn

from askew.algorithms import FedAvg
from askew.core.algebra import clipped, dot, norm
from askew.core.algorithm import Algorithm
from askew.core.bank import Bank
from askew.core.local import Progress, begin, differentiate, slide_rows, slope_rows, step, straight
from askew.core.rng import generator, key, torch_seed
from askew.core.settings import Registry, Settings, setting
from askew.core.space import BATCH_NORMS, Space
from askew.core.task import Bound, Functional, Task, WithFeatures, dense_layers, with_features
from askew.core.types import Batch, Client, State, nova_length
from askew.engine.server import halved
from askew.errors import AlgorithmError, ConfigError, ModelError, UnknownName
from askew.models import networks


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
    normal = space.kind(*BATCH_NORMS)
    assert normal.indices.numel() == 16 and normal.buffer_indices.numel() == 16
    assert torch.equal(space.start[normal.w], torch.cat([torch.ones(8), torch.zeros(8)]))
    assert space.layers("out").w.numel() == 8 * 3 + 3
    assert torch.equal(space.last(1).w, space.layers("out").w)
    assert space.everything().w.numel() == space.P
    assert space.nothing().empty and not normal.empty
    with pytest.raises(ModelError, match="no layer 'head'"):
        space.layers("head")


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


def test_a_loss_that_speaks_of_w_itself_is_differentiated_too() -> None:
    module = mlp().double()
    space = Space(module, torch.float64)
    batch = Batch(torch.randn(4, 6, dtype=torch.float64), torch.tensor([0, 1, 2, 1]))
    for task in (Bound(module, space), Functional(module, space)):
        plain = differentiate(task, lambda u, task=task: task.loss(u, batch), space.start, space.buffers)[0]
        ridge = differentiate(
            task, lambda u, task=task: task.loss(u, batch) + 0.5 * u.square().sum(), space.start, space.buffers
        )[0]
        assert torch.allclose(ridge - plain, space.start, atol=1e-12)


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
    one = differentiate(task, lambda u: task.loss(u, Batch(x, y)), space.start, space.buffers)[0]
    two = differentiate(task, lambda u: task.loss(u, padded), space.start, space.buffers)[0]
    assert torch.allclose(one, two, atol=1e-15)


def test_a_plain_module_gains_features_and_survives_copying() -> None:
    plain = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))
    example = torch.randn(3, 4)
    wrapped = with_features(plain, example)
    for module in (wrapped, copy.deepcopy(wrapped), copy.deepcopy(copy.deepcopy(wrapped))):
        output, features = module(example)
        inner = module.module
        assert torch.equal(output, inner[2](features)) and torch.equal(features, inner[1](inner[0](example)))
    ours = mlp()
    assert with_features(ours, torch.randn(2, 6)) is ours


def test_frozen_models_run_in_evaluation_mode_and_move_nothing() -> None:
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
    assert torch.allclose(clipped(d, 1.0), d / 5, atol=1e-6)
    assert torch.equal(clipped(d, 10.0), d)
    assert clipped(d, float("inf")) is d


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9])
def test_the_length_of_a_path_under_momentum(rho: float) -> None:
    for k in (1, 2, 7, 30):
        a = c = 0.0
        for _ in range(k):
            c = rho * c + 1
            a += c
        assert float(nova_length(torch.tensor([float(k)], dtype=torch.float64), rho)[0]) == pytest.approx(a, rel=1e-12)


# random streams -------------------------------------------------------------------------------------------------


def test_every_draw_has_an_address() -> None:
    draw = lambda *address: generator(*address).random(4).tolist()
    assert draw(0, "batches", 3, 7) == draw(0, "batches", 3, 7)
    others = [(1, "batches", 3, 7), (0, "other", 3, 7), (0, "batches", 4, 7), (0, "batches", 3, 8)]
    assert all(draw(0, "batches", 3, 7) != draw(*other) for other in others)
    assert len({key(0, "p", r, c) for r in range(50) for c in range(50)}) == 2500
    assert torch_seed(0, "model") != torch_seed(1, "model")


def test_an_address_is_the_key_of_philox() -> None:
    for client in range(20):
        words = np.frombuffer(key(5, "batches", 3, client), dtype=np.uint64)
        plain = np.random.Generator(np.random.Philox(key=words))
        mine = generator(5, "batches", 3, client)
        assert (
            np.array_equal(mine.permutation(300), plain.permutation(300))
            and mine.standard_normal() == plain.standard_normal()
        )


def test_addressed_draws_look_uniform() -> None:
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
    assert sum(bank.places().values()) == 0
    for client in range(0, 400, 4):
        bank.write([client], {"h": torch.full((1, 1000), float(client))})
    places = bank.places()
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


class Knobs(Settings):
    """For the tests below."""

    rate: float = setting("a rate", default=0.1, above=0, hint="try 0.1.")
    count: int = setting("a count", default=3, least=1, most=9)
    kind: str = setting("a kind", default="plain", choices=("plain", "fancy"))
    on: bool = setting("a switch", default=False)
    cap: float | None = setting("a cap", default=None, least=1)
    widths: tuple[int, ...] = setting("widths", default=(64,))


class Finer(Knobs):
    rate = 0.01


def test_settings_are_canonical_and_frozen() -> None:
    knobs = Knobs.build({"rate": 1, "count": 4.0, "widths": [8, 4], "cap": 2})
    assert knobs.rate == 1.0 and isinstance(knobs.rate, float)
    assert knobs.count == 4 and isinstance(knobs.count, int)
    assert knobs.widths == (8, 4) and knobs.cap == 2.0
    with pytest.raises(AttributeError):
        knobs.rate = 2.0  # type: ignore[misc]


def test_a_plain_override_is_a_new_default_with_the_old_rules() -> None:
    assert Finer().rate == 0.01 and Knobs().rate == 0.1
    with pytest.raises(ConfigError, match="Finer: rate must be > 0"):
        Finer(rate=0.0)


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({"rate": -1}, "Knobs: rate must be > 0, got -1; try 0.1."),
        ({"rate": "fast"}, "Knobs: rate must be a number, got 'fast'; try 0.1."),
        ({"rate": True}, "Knobs: rate must be a number, got true; try 0.1."),
        ({"rate": float("nan")}, "Knobs: rate must be a number, got nan; try 0.1."),
        ({"rate": float("inf")}, "Knobs: rate must be finite, got inf; try 0.1."),
        ({"count": 2.5}, "Knobs: count must be a whole number, got 2.5; the default is 3."),
        ({"count": 10}, "Knobs: count must be ≥ 1 and ≤ 9, got 10; the default is 3."),
        ({"kind": "plian"}, "Knobs: unknown kind 'plian'; did you mean 'plain'? Known: fancy, plain."),
        ({"on": 1}, "Knobs: on must be true or false, got 1; the default is false."),
        (
            {"widths": [1, "a"]},
            "Knobs: widths must be a list, each item a whole number, got [1, 'a']; the default is [64].",
        ),
        ({"rte": 1}, "Knobs: unknown setting rte; did you mean 'rate'? Known: cap, count, kind, on, rate, widths."),
    ],
)
def test_a_refusal_says_what_what_is_allowed_and_what_to_do(table: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Knobs.build(table)
    assert str(caught.value) == sentence


def test_a_registry_knows_the_nearest_name_and_keeps_its_members() -> None:
    registry: Registry[Knobs] = Registry("knob", {"knobs": Knobs})
    with pytest.raises(UnknownName, match="did you mean 'knobs'"):
        registry["knob"]
    registry.register("finer", Finer)
    assert registry.name_of(Finer()) == "finer" and list(registry) == ["knobs", "finer"]
    with pytest.raises(ConfigError, match="exists already"):
        registry.register("knobs", Finer)


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

    class Clashes(askew.Algorithm):
        def server_state(self, space):  # type: ignore[no-untyped-def]
            return {"loss": space.scalar()}

    for method, words in (
        (Widens(), "aggregate.. must return the model"),
        (Invents(), "note.. may only renew"),
        (Clashes(), "'loss' is a name"),
    ):
        with pytest.raises(AlgorithmError, match=words):
            askew.run(method, model="softmax", rounds=1, clients=10)


def test_channels_last_is_another_order_of_the_same_coordinates() -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 5), nn.Flatten(), nn.Linear(4, 2))
    plain, last = Space(module), Space(module, last=True)
    assert torch.equal(plain.start.sort().values, last.start.sort().values) and not torch.equal(plain.start, last.start)
    for (name, a), b in zip(plain.split(plain.start).items(), last.split(last.start).values(), strict=True):
        assert torch.equal(a, b) and a.shape == b.shape, name
        assert torch.equal(last.row(b), last.row(a.clone()))
    weight = last.split(last.start)["0.weight"]
    assert weight.is_contiguous(memory_format=torch.channels_last) and weight.data_ptr() == last.start.data_ptr()
    x, y = torch.randn(6, 3, 5, 5), torch.randint(0, 2, (6,))
    grads = []
    for space in (plain, last):
        task = Bound(WithFeatures(module), Space(WithFeatures(module), last=space.last_channels))
        g, _, _ = differentiate(
            task, lambda u, task=task: task.loss(u, Batch(x, y)), task.space.start, task.space.buffers
        )
        grads.append(task.space.split(g))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(grads[0].values(), grads[1].values(), strict=True))


# steps in place -------------------------------------------------------------------------------------------------


class Noting(FedAvg):
    """FedAvg, but its steps are not known to be straight."""

    def note(self, theta: torch.Tensor, g: torch.Tensor, d: torch.Tensor, client: Client) -> State:
        return {}


class Penalised(FedAvg):
    def loss(self, task: Task, theta: torch.Tensor, batch: Batch, client: Client) -> torch.Tensor:
        return task.loss(theta, batch) + 0.1 * (theta - client.w + 1).square().sum()


class PenalisedNoting(Penalised, Noting):
    pass


class Odd(nn.Module):
    """Linear layers that are called twice, with a third dimension, without a bias, never, and whose weights are used besides."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.bare, self.deep = nn.Linear(6, 6), nn.Linear(6, 4, bias=False), nn.Linear(3, 2)
        self.never, self.out, self.scale = nn.Linear(2, 2), nn.Linear(8, 3), nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = torch.tanh(self.twice(torch.tanh(self.twice(x * self.scale))))
        h = torch.cat([self.bare(h), self.deep(h.view(-1, 2, 3)).flatten(1)], 1)
        return self.out(h) + F.linear(x[:, :4], self.bare.weight[:3, :4]), h


def me_of(space: Space, momentum: float = 0.0, decay: float = 0.0, clip: float = float("inf")) -> Client:
    return Client(space.start, space.buffers, {}, {}, {}, {}, 0.1, 0.1, momentum, decay, clip, 3.0, 3.0, 1.0, 1, 0.5)


@pytest.mark.parametrize("module", [mlp(), mlp("batch"), Odd(), networks["cnn"].build({}).module((1, 8, 8), 3)])
@pytest.mark.parametrize("ways", [(FedAvg(), Noting()), (Penalised(), PenalisedNoting())])
def test_a_step_in_place_is_the_step(module: nn.Module, ways: tuple[Algorithm, Algorithm]) -> None:
    space = Space(module, torch.float64)
    shape = (1, 8, 8) if isinstance(next(module.children()), nn.Conv2d) else (6,)
    batches = [Batch(torch.randn(5, *shape, dtype=torch.float64), torch.randint(0, 3, (5,))) for _ in range(3)]
    ends = list[Progress]()
    for alg in ways:
        task, me = Bound(module, space), me_of(space)
        moving = begin(alg, me)
        for batch in batches:
            moving = step(alg, task, me, moving, batch)
        assert (moving.w is task.flat) == straight(alg, me) == (alg is ways[0])
        ends.append(moving)
    here, there = ends
    assert not torch.equal(here.w, space.start)
    torch.testing.assert_close(here.w, there.w, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(here.total, there.total, rtol=1e-12, atol=0)
    torch.testing.assert_close(here.carry["buffers"], there.carry["buffers"], rtol=1e-12, atol=1e-13)


def test_a_step_in_place_of_half_precision_passes_is_the_step() -> None:
    space, batch = Space(mlp()), Batch(torch.randn(5, 6), torch.randint(0, 3, (5,)))
    ends = [
        step(alg, Bound(mlp(), space, half=True), me_of(space), begin(alg, me_of(space)), batch).w
        for alg in (FedAvg(), Noting())
    ]
    torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-6)


def test_a_step_in_place_leaves_the_received_model_alone() -> None:
    space = Space(mlp())
    task, me, start = Bound(mlp(), space), me_of(space), space.start.clone()
    step(FedAvg(), task, me, begin(FedAvg(), me), Batch(torch.randn(5, 6), torch.randint(0, 3, (5,))))
    assert torch.equal(me.x, start) and not torch.equal(task.flat, start)


def test_only_steps_along_the_gradient_are_straight() -> None:
    space = Space(mlp())
    assert straight(FedAvg(), me_of(space))
    for me in (
        me_of(space, momentum=0.9),
        me_of(space, decay=0.1),
        me_of(space, clip=1.0),
        me_of(space)._replace(lr=torch.tensor(0.1)),
    ):
        assert not straight(FedAvg(), me)
    assert not straight(Noting(), me_of(space))


class Backwards(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self):
            x = layer(x)
        return x


def linears(*layers: nn.Module) -> nn.Module:
    return WithFeatures(nn.Sequential(nn.Flatten(), nn.Linear(6, 5), *layers, nn.Linear(5, 3, bias=False)))


TWICE = nn.ReLU()  # one module in two places


@pytest.mark.parametrize(
    "module",
    [
        mlp(),
        linears(nn.Tanh(), nn.Sigmoid()),
        linears(nn.GELU(), nn.Identity()),
        linears(nn.GELU("tanh"), TWICE, nn.Linear(5, 5), TWICE),
    ],
)
@pytest.mark.parametrize("criterion", ["cross_entropy", "squared_error"])
@pytest.mark.parametrize("padded", [False, True])
def test_rows_that_step_in_place_take_their_own_steps(module: nn.Module, criterion: str, padded: bool) -> None:
    space, rate = Space(module, torch.float64), 0.1
    task, bound = Functional(module, space, criterion), Bound(module, space, criterion)
    w = space.start + 0.1 * torch.randn(4, space.P, dtype=torch.float64)
    x = torch.randn(4, 5, 2, 3, dtype=torch.float64)
    y = torch.randint(0, 3, (4, 5)) if criterion == "cross_entropy" else torch.randn(4, 5, 3, dtype=torch.float64)
    weight = (torch.arange(5) < torch.tensor([[5], [3], [1], [4]])).double() if padded else None
    new = w.clone()
    some = Batch(x[:3], y[:3], None if weight is None else weight[:3])
    slopes, same = slope_rows(task, w[:3], some)
    values = slide_rows(task, new[:3], some, rate)
    torch.testing.assert_close(same, values, rtol=1e-12, atol=0)
    for i in range(3):
        batch = Batch(x[i], y[i], None if weight is None else weight[i])
        g, value, _ = differentiate(bound, lambda u, batch=batch: bound.loss(u, batch), w[i], space.buffers)
        torch.testing.assert_close(slopes[i], g, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(new[i], w[i] - rate * g, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(values[i], value, rtol=1e-12, atol=0)
    assert torch.equal(new[3], w[3])  # a row that has no work


def test_what_is_not_a_row_of_linear_layers_is_not_taken_for_one() -> None:
    assert [name for name, _ in dense_layers(mlp())] == ["flat", "fc1", "fc_relu1", "out"]
    assert [name for name, _ in dense_layers(linears(nn.ReLU()))] == ["module.0", "module.1", "module.2", "module.3"]
    frozen = linears(nn.ReLU())
    frozen.get_submodule("module.1").requires_grad_(False)
    others = [frozen, mlp("batch"), Odd(), linears(nn.LayerNorm(5)), linears(nn.Sequential(nn.Linear(5, 5)))]
    others += [
        WithFeatures(Backwards(nn.Linear(5, 3), nn.Linear(6, 5))),
        WithFeatures(nn.Sequential(nn.Flatten(2), nn.Linear(3, 3))),
    ]
    again, tied = nn.Linear(5, 5), linears(nn.Linear(5, 5), nn.Linear(5, 5))
    tied.get_submodule("module.2").weight = tied.get_submodule("module.3").weight
    others += [
        linears(again, again),
        tied,
        linears(nn.Tanh(), nn.ReLU(inplace=True)),
    ]  # weights that are two layers', outputs that change
    others += [
        WithFeatures(nn.Sequential(nn.Linear(3, 2), nn.Flatten(), nn.Linear(4, 3)))
    ]  # the first one has more dimensions
    for module in (*others, networks["cnn"].build({}).module((1, 8, 8), 3)):
        assert not dense_layers(module)
    assert not Functional(mlp(), Space(mlp()), half=True).layers and not Bound(mlp(), Space(mlp()), half=True).layers


# what reaches the server ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("length", [1, 7, 1000])
def test_rows_with_something_that_is_no_number_are_seen(dtype: torch.dtype, length: int) -> None:
    rows = torch.randn(5, length, dtype=dtype)
    rows[1, -1], rows[2, 0] = float("nan"), float("inf")
    rows[3, 0], rows[3, -1] = float("inf"), float("-inf")
    assert halved(rows).isfinite().tolist() == [True, False, False, False, True]
    assert halved(rows.view(5, length, 1)).isfinite().tolist() == halved(rows).isfinite().tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("length", [1, 2, 3, 1000, 100_003])
def test_numbers_however_large_are_numbers(dtype: torch.dtype, length: int) -> None:
    most = torch.finfo(dtype).max
    rows = torch.full((3, length), most, dtype=dtype)
    rows[1] = -most
    rows[2, ::2] = -most
    assert halved(rows).isfinite().all() and halved(rows[:, 0]).isfinite().all()


def test_rows_of_whole_numbers_and_of_nothing_are_numbers() -> None:
    assert halved(torch.full((3, 2), 2**62)).tolist() == halved(torch.zeros(3, 0)).tolist() == [0.0] * 3
    assert halved(torch.tensor([1.0, float("nan")])).isfinite().tolist() == [True, False]
