"""Users' own networks and rules: every engine trains them as the plain loop does, or they are refused by a sentence."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import askew
from askew.algorithms import FedAvg, FedProx, Scaffold
from askew.core.task import WithFeatures
from askew.errors import AlgorithmError, ConfigError, EngineError, ModelError, Remark
from askew.experiment.api import own_model
from askew.experiment.config import Config
from askew.experiment.run import run_together
from askew.experiment.store import Run
from askew.kernels.dense import dense_layers
from askew.models import MLP

ENGINES = ("sequential", "slots", "vmapped", "stacked")
# engines are compared here; one test asks for the sentence
pytestmark = pytest.mark.filterwarnings("ignore:engine. vmapped trained, and not stacked")


def dataset(classes: int = 3) -> askew.Dataset:
    """Samples of six numbers whose classes, or sums, can be learned."""
    draw = np.random.default_rng(0)
    y = draw.integers(max(classes, 1), size=403)
    x = torch.tensor(draw.normal(size=(3, 6))[y] + draw.normal(size=(403, 6))).float()
    labels = torch.tensor(y) if classes else x.sum(1)
    parts = [askew.Samples(x[a:b], labels[a:b]) for a, b in ((0, 303), (303, 403))]
    return askew.Dataset(*parts, classes=classes, criterion="cross_entropy" if classes else "squared_error")


def train(model: Any, engine: str = "sequential", algorithm: Any = "fedavg", **given: Any) -> Run:
    """Three rounds of clients whose last batches are shorter than the others."""
    usual = {"data": dataset(), "rounds": 3, "partition": {"name": "lognormal", "clients": 8}, "seed": 1}
    usual |= {"participation": {"cohort": 5}, "local": {"epochs": 2, "batch": 10, "lr": 0.1}}
    settings = {"name": engine, "dtype": "float64", "device": "cpu"}
    return askew.run(algorithm, model=model, engine=settings, **(usual | given))


def gap(one: Run, other: Run) -> float:
    """The largest difference of two models."""
    return max(float((one.model[n] - other.model[n]).abs().max()) for n in one.model)


class Net(nn.Module):
    """A layer, something of a test's own, and a layer."""

    def __init__(self, middle: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.middle = nn.Linear(6, 8), nn.Linear(8, 3), middle

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.middle(self.first(x)))
        return out


class Centre(nn.Identity):
    """A subclass of a layer that looks at one sample alone."""

    def forward(self, input: Tensor) -> Tensor:
        return input - input.mean(0, keepdim=True)


# what padding would change --------------------------------------------------------------------------------------------


class Statistics(Net):
    """Keeps the mean of its batches in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.copy_(0.9 * self.mean + 0.1 * x.detach().mean(0))
        return super().forward(x - self.mean)


class ByLength(Net):
    """Uses a layer for whole batches alone."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.last(hidden.relu() if len(x) >= 10 else hidden)  # type: ignore[no-any-return]


def tracked_norm() -> nn.Module:
    torch.manual_seed(0)
    norm = nn.InstanceNorm1d(1, track_running_stats=True, affine=True)
    return nn.Sequential(nn.Unflatten(1, (1, 6)), norm, nn.Flatten(), nn.Linear(6, 3))


MIXING: dict[str, Callable[[], nn.Module]] = {
    "a centred batch": lambda: Net(Centre()),
    "batch norm as a function": lambda: Net(lambda h: F.batch_norm(h, None, None, training=True)),
    "instance norm with statistics": tracked_norm,
    "statistics of its own": Statistics,
    "the length of a batch": ByLength,
}


@pytest.mark.parametrize("name", MIXING)
def test_batches_are_not_padded_where_that_would_change_a_result(name: str) -> None:
    plain = train(MIXING[name]())
    assert len({len(r["participants"]) for r in plain.rounds}) == 1
    for engine in ENGINES[1:]:
        assert gap(plain, train(MIXING[name](), engine)) < 1e-12
    assert train(MIXING[name](), "stacked").facts["engine"] == "vmapped"


def own_layer_in_a_network_of_askew() -> nn.Module:
    torch.manual_seed(0)
    network = MLP(hidden=(8,)).module((6,), 3)
    network.fc_relu1 = Centre()
    return network


def test_another_engine_than_the_one_that_was_named_is_said() -> None:
    sentence = (
        "engine: vmapped trained, and not stacked: stacked would pad batches, and batch norm, .* would count that"
    )
    with pytest.warns(Remark, match=sentence):
        run = train(MIXING["a centred batch"](), "stacked")
    assert run.facts["engine"] == "vmapped" and "would pad" in run.facts["reason"]


def test_a_layer_of_ones_own_in_a_network_of_askew_is_tried_too() -> None:
    plain = train(own_layer_in_a_network_of_askew())
    for engine in ENGINES[1:]:
        assert gap(plain, train(own_layer_in_a_network_of_askew(), engine)) < 1e-12


def by_class(output: Tensor, y: Tensor) -> Tensor:
    """A loss that weighs a sample by how many of its class the batch holds."""
    counts = (y[:, None] == y[None]).sum(1)
    return F.cross_entropy(output, y, reduction="none") / counts


def focal(output: Tensor, y: Tensor) -> Tensor:
    losses = F.cross_entropy(output, y, reduction="none")
    return losses * (1 + losses.mean())


@pytest.mark.parametrize("criterion", [by_class, focal])
@pytest.mark.parametrize("network", [Net, lambda: {"name": "mlp", "hidden": [8]}], ids=["own", "askew's"])
def test_a_criterion_that_looks_at_its_batch_is_given_no_padding(criterion: Any, network: Callable[[], Any]) -> None:
    data = replace(dataset(), criterion=criterion)
    plain = train(network(), data=data)
    for engine in (*ENGINES[1:], "auto"):
        assert gap(plain, train(network(), engine, data=data)) < 1e-12, engine


def doubled(output: Tensor, y: Tensor) -> Tensor:
    """A loss that is changed where a mask says so, which torch cannot do for many clients at once."""
    losses = F.cross_entropy(output, y, reduction="none")
    losses[y == 0] = 2 * losses[y == 0]
    return losses


def test_a_criterion_that_changes_its_output_in_place_changes_no_accuracy() -> None:
    """It may do so where torch can differentiate it; predictions are read off the output before."""

    def in_place(output: Tensor, y: Tensor) -> Tensor:
        losses = F.cross_entropy(output, y, reduction="none")
        with torch.no_grad():
            output.neg_()
        return losses

    plain = lambda output, y: F.cross_entropy(output, y, reduction="none")
    given = (replace(dataset(), criterion=criterion) for criterion in (plain, in_place))
    one, other = (train("softmax", data=data) for data in given)
    assert one.curve("accuracy") == other.curve("accuracy") and one.curve("loss") == other.curve("loss")


def test_a_criterion_for_one_client_at_a_time_is_refused_elsewhere_and_avoided() -> None:
    data, mlp = replace(dataset(), criterion=doubled), {"name": "mlp", "hidden": [8]}
    many = {"partition": {"name": "lognormal", "clients": 30}, "participation": {"cohort": 20}}
    plain, auto = (train(mlp, engine, data=data, **many) for engine in ("sequential", "auto"))
    assert auto.facts["engine"] == "sequential" and gap(plain, auto) == 0
    for engine in ("vmapped", "stacked"):
        with pytest.raises(EngineError, match="cannot do with this criterion"):
            train(mlp, engine, data=data)


@pytest.mark.parametrize("engine", ["vmapped", "stacked"])
def test_hooks_on_the_backward_pass_are_for_one_client_at_a_time(engine: str) -> None:
    network = Net()
    network.last.register_full_backward_hook(lambda layer, inner, outer: tuple(0.1 * g for g in inner))
    with pytest.raises(EngineError, match="hooks on its backward pass"):
        train(network, engine)


def test_the_first_parameter_may_be_a_whole_number() -> None:
    class Numbered(Net):
        def __init__(self) -> None:
            super().__init__()
            self.number = nn.Parameter(torch.tensor([3]), requires_grad=False)
            self.__dict__["_parameters"] = dict(sorted(self._parameters.items(), reverse=True))

    assert train(Numbered()).best_accuracy


def test_a_subclass_of_a_dense_layer_is_not_taken_for_one() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(6, 8), Centre(), nn.Linear(8, 3))
    found = train(network, "auto", partition={"name": "lognormal", "clients": 30}, participation={"cohort": 20})
    assert found.facts["engine"] == "sequential" and "Centre" in str(found.facts)


# random numbers -------------------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """Dropout inside of a layer that has another class."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rnn, self.last = nn.LSTM(3, 4, 2, batch_first=True, dropout=0.5), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.rnn(x.view(-1, 2, 3))[0][:, -1])  # type: ignore[no-any-return]


RANDOM: dict[str, Callable[[], nn.Module]] = {
    "dropout as a function": lambda: Net(lambda h: F.dropout(h, 0.5)),
    "dropout of an LSTM": Recurrent,
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers_of_a_network_come_from_the_clients_own_stream(name: str, tmp_path: Path) -> None:
    def stop(run: Any, record: Any) -> None:
        if record and record["round"] == 2:
            raise KeyboardInterrupt

    whole = train(RANDOM[name](), "auto")
    with suppress(KeyboardInterrupt):
        train(RANDOM[name](), "auto", out=tmp_path, watch=stop, save_every=0.0)
    assert gap(whole, train(RANDOM[name](), "auto", out=tmp_path)) == 0
    with pytest.raises(askew.AskewError, match="cannot run a network with dropout, or a method that draws"):
        train(RANDOM[name](), "slots")


# what is refused ------------------------------------------------------------------------------------------------------


class Assigned(Net):
    def __init__(self, whole: bool = False) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.long if whole else torch.float))
        self.whole = whole

    def forward(self, x: Tensor) -> Tensor:
        if self.whole:
            self.seen += 1
        else:
            self.seen = self.seen + 1
        return super().forward(x)


class WithBuffer(Net):
    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", value)


class InPlace(Net):
    def forward(self, x: Tensor) -> Tensor:
        x -= 0.5
        return super().forward(x)


class InPlaceByNumpy(Net):
    def forward(self, x: Tensor) -> Tensor:
        np.clip(values := x.numpy(), -0.1, 0.1, out=values)
        return super().forward(x)


class Changed(Net):
    """Calls something of a test's own before its layers."""

    def __init__(self, change: Callable[[Changed], Tensor | float | None]) -> None:
        super().__init__()
        self.change, self.calls, self.memory = change, 0, torch.zeros(())
        self.own = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        more = self.change(self)
        return super().forward(x if more is None else x + more)


@torch.no_grad()
def clamp(network: Changed) -> None:
    network.first.weight.clamp_(-0.1, 0.1)


def renorm(network: Changed) -> None:
    network.first.weight.data = torch.renorm(network.first.weight.data, 2, 0, 0.5)


def clamp_data(network: Changed) -> None:
    network.first.weight.data.clamp_(-0.1, 0.1)


def count(network: Changed) -> float:
    network.calls += 1
    return network.calls > 100


def remember(network: Changed) -> Tensor:
    network.memory = 0.9 * network.memory + 0.1
    return network.memory


def own_generator(network: Changed) -> Tensor:
    return torch.rand(6, generator=network.own)


def numpy_number(_: Changed) -> float:
    return float(np.random.rand())  # noqa: NPY002 what users still write


def hooked() -> nn.Module:
    network = Net()
    network.first.weight.register_hook(lambda g: 0 * g)
    return network


def with_forward_on_the_object() -> nn.Module:
    network = Net()
    network.forward = lambda x: network.last(network.first(x))  # type: ignore[method-assign]
    return network


def compiled(network: nn.Module) -> nn.Module:
    """As torch.compile wraps a network; the function itself takes half a minute to load."""
    wrapped = nn.Module()
    wrapped._orig_mod = network
    wrapped.forward = network.forward
    return wrapped


def complex_weights() -> nn.Module:
    network = Net()
    network.more = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    return network


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "its input is changed": (InPlace, "changes its input in place"),
    "its input is changed by numpy": (InPlaceByNumpy, "changes its input in place"),
    "a first ReLU in place": (lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 3)), "changes its input"),
    "a buffer is assigned": (Assigned, r"assigns its buffer 'seen' anew .* self\.seen\.copy_"),
    "a counter": (lambda: Assigned(whole=True), "changes its buffer 'seen' in forward, which holds whole numbers"),
    "a mask of infinities": (lambda: WithBuffer(torch.tensor([0, -torch.inf])), "'mask' .* not finite"),
    "complex numbers": (lambda: WithBuffer(torch.zeros(2, dtype=torch.complex64)), "'mask' .* complex"),
    "a weight is clamped": (lambda: Changed(clamp), r"changes its weight 'first.weight' in forward"),
    "a weight is clamped by .data": (lambda: Changed(clamp_data), r"changes its weight 'first.weight' in forward"),
    "a weight is set anew": (lambda: Changed(renorm), r"changes its weight 'first.weight' in forward"),
    "a number counts": (lambda: Changed(count), "changes its number 'calls' in forward"),
    "a tensor remembers": (lambda: Changed(remember), "another output when it is run again"),
    "a generator of its own": (lambda: Changed(own_generator), "another output when it is run again"),
    "numbers of Python": (lambda: Changed(lambda _: random.random()), "another output when it is run again"),
    "numbers of numpy": (lambda: Changed(numpy_number), "another output when it is run again"),
    "a hook on a gradient": (hooked, "'first.weight' of the network has a hook on its gradient"),
    "forward on the object": (with_forward_on_the_object, "forward of 'Net' was set on the object"),
    "a compiled network": (lambda: compiled(Net()), "the network is wrapped by torch.compile.* engine.compile = true"),
    "a compiled layer": (lambda: nn.Sequential(compiled(nn.Linear(6, 3))), "the layer '0' is wrapped by torch.compile"),
    "complex weights": (complex_weights, "'more' of the network holds complex numbers"),
    "sparse gradients": (lambda: nn.Sequential(nn.Embedding(3, 3, sparse=True)), "sparse=True"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_clients_would_share_is_refused(name: str) -> None:
    make, said = REFUSED[name]
    with pytest.raises(ModelError, match=said):
        train(make())


class ChangesBatch(FedAvg):
    def loss(self, task: Any, theta: Tensor, batch: Any, client: Any) -> Tensor:
        batch.x.mul_(2)
        return super().loss(task, theta, batch, client)


def test_a_loss_that_changes_the_batch_is_refused() -> None:
    with pytest.raises(AlgorithmError, match=r"loss\(\) changed batch\.x in place"):
        train(Net(), algorithm=ChangesBatch())


# layers that are not what their class says ----------------------------------------------------------------------------


def pruned() -> nn.Sequential:
    """Two of eight hidden units are left; out_features still says eight."""
    torch.manual_seed(0)
    first, last = nn.Linear(6, 8), nn.Linear(8, 3)
    first.weight, first.bias = nn.Parameter(first.weight[:2].clone()), nn.Parameter(first.bias[:2].clone())
    last.weight = nn.Parameter(last.weight[:, :2].clone())
    return nn.Sequential(nn.Flatten(), first, nn.ReLU(), last)


def fixed(name: str) -> nn.Sequential:
    """The last layer's weight or bias is a buffer, which is not trained."""
    torch.manual_seed(0)
    last = nn.Linear(6, 3)
    value = getattr(last, name).detach().clone()
    delattr(last, name)
    last.register_buffer(name, value)
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 6), nn.ReLU(), last)


@pytest.mark.parametrize("make", [pruned, lambda: fixed("weight"), lambda: fixed("bias")])
def test_kernels_leave_layers_of_other_sizes_to_torch(make: Callable[[], nn.Sequential]) -> None:
    assert not dense_layers(WithFeatures(make()))
    plain = train(make())
    for engine in ENGINES[1:]:
        assert gap(plain, train(make(), engine)) < 1e-12


class Tokens(nn.Module):
    """One token's row is never trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.last = nn.Embedding(12, 4, padding_idx=0), nn.Linear(20, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.embedding(x).flatten(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("engine", ENGINES)
def test_the_padding_token_of_an_embedding_is_not_trained(engine: str) -> None:
    draw = np.random.default_rng(0)
    x = torch.tensor(draw.integers(12, size=(400, 5)))
    parts = [askew.Samples(x[a:b], x[a:b].sum(1) % 3) for a, b in ((0, 300), (300, 400))]
    run = train(Tokens(), engine, data=askew.Dataset(*parts, classes=3), partition={"name": "iid", "clients": 10})
    assert not run.model["embedding.weight"][0].any() and run.model["embedding.weight"][1].any()


class Doubled(torch.autograd.Function):
    """A function that torch cannot compute for many clients at once, as it does not say how."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 2 * grads[0]


def test_a_network_that_cannot_be_trained_in_rows_is_refused_there() -> None:
    make = lambda: Net(lambda h: Doubled.apply(h).relu())  # type: ignore[no-untyped-call]
    assert gap(train(make()), train(make(), "slots")) < 1e-12
    for engine in ENGINES[2:]:
        with pytest.raises(askew.AskewError, match=f'"{engine}" trains many clients at once, which torch cannot do'):
            train(make(), engine)


# features and outputs -------------------------------------------------------------------------------------------------


class ByKeyword(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(input=self.first(x))  # type: ignore[no-any-return]


class Unused(Net):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(6, 3)


class Functional(Net):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.first(x), self.last.weight)


FEATURES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "a layer by keyword": (ByKeyword, 8),
    "a last layer that is not called": (Unused, 3),
    "weights used by a function": (Functional, 3),
    "weight norm": (lambda: nn.Sequential(nn.Linear(6, 8), parametrizations.weight_norm(nn.Linear(8, 3))), 8),
}


@pytest.mark.parametrize("name", FEATURES)
def test_features_are_the_last_layers_input_or_else_the_output(name: str) -> None:
    make, size = FEATURES[name]
    output, features = WithFeatures(make())(torch.randn(5, 6))
    assert output.shape == (5, 3) and features.shape == (5, size)
    assert train(make()).rounds[-1]["loss"] < 1.1


def test_a_regression_may_return_one_number_a_sample_without_a_dimension() -> None:
    torch.manual_seed(0)
    column = nn.Sequential(nn.Linear(6, 1))
    losses = [
        [r["loss"] for r in train(network, data=dataset(0), local={"epochs": 1, "batch": 10, "lr": 0.01}).rounds]
        for network in (column, nn.Sequential(*column, nn.Flatten(0)))
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


class Head(FedAvg):
    def parts(self, space: askew.Space) -> dict[str, askew.Part]:
        return {"head": space.named_layers("last")}


def test_layers_of_a_users_network_are_found_by_their_own_names() -> None:
    assert train(Net(), algorithm=Head()).finished

    class Misspelt(FedAvg):
        def parts(self, space: askew.Space) -> dict[str, askew.Part]:
            return {"head": space.named_layers("lost")}

    with pytest.raises(ModelError, match="no layer 'lost'; it has first, last"):
        train(Net(), algorithm=Misspelt())


# losses ---------------------------------------------------------------------------------------------------------------


class WithoutWeights(FedAvg):
    """The loss that one writes first: it counts samples that pad a batch."""

    def loss(self, task: Any, theta: Tensor, batch: Any, client: Any) -> Tensor:
        return F.cross_entropy(task(theta, batch)[0], batch.y)


class Backwards(FedAvg):
    """The samples in another order, with their weights."""

    def loss(self, task: Any, theta: Tensor, batch: Any, client: Any) -> Tensor:
        turned = [None if t is None else t.flip(0) for t in batch]
        value: Tensor = task.loss(theta, type(batch)(*turned)) + 0.01 * (theta - client.w).square().sum()
        return value


@pytest.mark.parametrize(("method", "stacked"), [(WithoutWeights, "vmapped"), (Backwards, "stacked")])
def test_a_loss_that_counts_padding_is_given_none(method: type[FedAvg], stacked: str) -> None:
    plain = train(Net(), algorithm=method())
    runs = {engine: train(Net(), engine, method()) for engine in ENGINES[1:]}
    assert all(gap(plain, run) < 1e-12 for run in runs.values()) and runs["stacked"].facts["engine"] == stacked


class Wrapped(FedAvg):
    """As WithoutWeights, under the name and module of the hook that it wraps."""

    loss = functools.wraps(FedAvg.loss)(WithoutWeights.loss)


def test_a_wrapped_loss_is_ones_own() -> None:
    plain = train(Net(), algorithm=Wrapped())
    for engine in ENGINES[1:]:
        assert gap(plain, train(Net(), engine, Wrapped())) < 1e-12


def test_a_loss_that_is_replaced_between_two_runs_is_tried_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    class Later(FedAvg):
        pass

    train(Net(), "vmapped", Later())
    monkeypatch.setattr(Later, "loss", WithoutWeights.loss)
    assert gap(train(Net(), algorithm=Later()), train(Net(), "vmapped", Later())) < 1e-12


def test_a_hook_on_the_object_is_refused() -> None:
    method = FedAvg()
    object.__setattr__(
        method, "loss", lambda task, theta, batch, client: F.cross_entropy(task(theta, batch)[0], batch.y)
    )
    with pytest.raises(AlgorithmError, match=r"loss\(\) was set on the object"):
        train(Net(), algorithm=method)


class ByRound(FedAvg):
    """Looks the round up, where an engine may have a tensor."""

    def direction(self, theta: Tensor, grad: Any, client: Any) -> Tensor:
        factor = {1: 1.0, 2: 0.5}.get(client.round, 0.1)
        return factor * grad(theta)  # type: ignore[no-any-return]


class Milestone(FedAvg):
    """Finds an entry in a round that no trial takes."""

    def direction(self, theta: Tensor, grad: Any, client: Any) -> Tensor:
        return {3: 0.5}.get(client.round, 1.0) * grad(theta)  # type: ignore[no-any-return]


class Remembered(FedAvg):
    """Has a number computed once for every round: of a tensor that changes in place, for the first round alone."""

    def direction(self, theta: Tensor, grad: Any, client: Any) -> Tensor:
        return inverse(client.round) * grad(theta)  # type: ignore[no-any-return]


@functools.cache
def inverse(number: float) -> float:
    return 1 / number


class PullsByRate(FedAvg):
    """Asks whether the rate is a number, for what is zero in the first step."""

    def direction(self, theta: Tensor, grad: Any, client: Any) -> Tensor:
        pull = 0.1 if isinstance(client.lr, float) else 0.0
        return grad(theta) + pull * (theta - client.w)  # type: ignore[no-any-return]


class DriftsByRate(Scaffold):
    """Does so for a state, which is zero in the first round."""

    def direction(self, theta: Tensor, grad: Any, client: Any) -> Tensor:
        more = 0.5 if isinstance(client.lr, float) else 0.0
        return super().direction(theta, grad, client) + more * client.state["c"]


@pytest.mark.parametrize("method", [ByRound, Milestone, Remembered, PullsByRate, DriftsByRate])
def test_a_hook_that_needs_a_number_is_refused_where_it_would_get_a_tensor(method: Any) -> None:
    plain = train(Net(), algorithm=method())
    assert gap(plain, train(Net(), "vmapped", method())) < 1e-12
    for engine in ("slots", "stacked"):
        with pytest.raises(EngineError, match="as tensors, with which a hook of this method fails or gives another"):
            train(Net(), engine, method())


class PullsByShare(PullsByRate):
    """Does so with a state to which nothing may be added."""

    def client_state(self, space: Any) -> dict[str, Tensor]:
        return {"share": torch.ones(1)}

    def direction(self, theta: Tensor, grad: Any, client: Any) -> Tensor:
        if float(client.state["share"]) > 1:
            raise ValueError("a share is at most 1")
        return super().direction(theta, grad, client)


def test_a_state_that_the_trial_may_not_change_hides_no_hook_that_needs_a_number() -> None:
    for engine in ("slots", "stacked"):
        with pytest.raises(EngineError, match="as tensors, with which a hook of this method fails or gives another"):
            train(Net(), engine, PullsByShare())


class TakesANumber(FedAvg):
    """Scales the direction by a number out of a tensor."""

    def direction(self, theta: Tensor, grad: Any, client: Any) -> Tensor:
        g: Tensor = grad(theta)
        return g / max(1.0, g.norm().item())


class Branches(FedAvg):
    """Has its own state, and branches on it once training is over."""

    def client_state(self, space: Any) -> dict[str, Tensor]:
        return {"moved": space.zeros()}

    def finish(self, theta: Tensor, client: Any) -> Any:
        delta = theta - client.w
        if client.state["moved"].sum() > 0:
            delta = 0.5 * delta
        return {"delta": delta}, {"moved": delta}


class StepsOfAType(FedAvg):
    """Asks whether the client's number of steps is a number."""

    def direction(self, theta: Tensor, grad: Any, client: Any) -> Tensor:
        return (2.0 if isinstance(client.steps, float) else 1.0) * grad(theta)  # type: ignore[no-any-return]


class StepsInATable(FedAvg):
    """Looks up numbers of steps that no client of a trial takes."""

    def direction(self, theta: Tensor, grad: Any, client: Any) -> Tensor:
        return dict.fromkeys(range(2, 100), 0.5).get(client.steps, 1.0) * grad(theta)  # type: ignore[no-any-return]


class GoesOnWithout(FedAvg):
    """Takes no notice where it gets no number."""

    def direction(self, theta: Tensor, grad: Any, client: Any) -> Tensor:
        g: Tensor = grad(theta)
        with suppress(RuntimeError):
            return g / max(1.0, g.norm().item())
        return g


@pytest.mark.parametrize("method", [StepsOfAType, StepsInATable, GoesOnWithout])
def test_a_hook_that_gives_another_result_in_rows_is_refused_there(method: Any) -> None:
    alone, found = (train(Net(), engine, method()) for engine in ("sequential", "auto"))
    assert gap(alone, found) == 0 and found.facts["engine"] == "sequential"
    for engine in ("vmapped", "stacked"):
        with pytest.raises(EngineError, match=r"many clients at once, with which a hook .* gives another result"):
            train(Net(), engine, method())


class OfTheRow(FedAvg):
    """Needs no engine of its own: a number of each client, in tensors."""

    def direction(self, theta: Tensor, grad: Any, client: Any) -> Tensor:
        g: Tensor = grad(theta)
        return g * torch.where(torch.as_tensor(client.size) > 1, 1.0, 0.5)


@pytest.mark.parametrize(
    ("method", "name"), [(TakesANumber, "sequential"), (Branches, "sequential"), (OfTheRow, "vmapped")]
)
def test_a_hook_for_one_client_at_a_time_is_given_an_engine_that_can_run_it(method: type[FedAvg], name: str) -> None:
    many = {"partition": {"name": "iid", "clients": 12}, "participation": {"cohort": 10}}
    found = [train({"name": "mlp", "hidden": [8]}, engine, method(), **many) for engine in ("auto", "sequential")]
    assert gap(*found) < 1e-12 and found[0].facts["engine"] == name
    assert ("one client at a time alone" in found[0].facts["reason"]) == (name == "sequential")


class Noisy(FedAvg):
    def direction(self, theta: Tensor, grad: Any, client: Any) -> Tensor:
        return grad(theta) + 0.01 * torch.randn_like(theta)


def test_a_method_that_draws_is_trained_one_client_at_a_time() -> None:
    many = {"partition": {"name": "lognormal", "clients": 30}, "participation": {"cohort": 20}}
    found = [train({"name": "mlp", "hidden": [8]}, engine, Noisy(), **many) for engine in ("auto", "sequential")]
    assert gap(*found) == 0 and found[0].facts["engine"] == "sequential"
    with pytest.raises(EngineError, match="draws random numbers"):
        train(Net(), "slots", Noisy())


class ChangesItself(FedProx):
    def begin(self, client: Any) -> Tensor:
        object.__setattr__(self, "mu", 0.5 * self.mu)
        return super().begin(client)


def test_a_method_that_changes_itself_is_refused() -> None:
    with pytest.raises(AlgorithmError, match="mu was changed by one of its hooks"):
        train(Net(), algorithm=ChangesItself(mu=0.2))


@pytest.mark.parametrize("mu", [np.float32(0.25), np.float64(0.25), torch.tensor(0.25)])
def test_a_number_of_numpy_or_torch_is_a_number(mu: Any) -> None:
    assert type(FedProx(mu=mu).mu) is float and FedProx(mu=mu) == FedProx(mu=0.25)


@pytest.mark.parametrize("mu", [np.float32(-1), torch.tensor(-5.0), torch.ones(3), torch.tensor(torch.nan)])
def test_limits_are_for_numbers_of_numpy_and_torch_too(mu: Any) -> None:
    with pytest.raises(ConfigError, match="mu must be"):
        FedProx(mu=mu)


def test_methods_that_may_be_padded_and_others_do_not_share_an_engine() -> None:
    common = {"rounds": 2, "model": {"name": "softmax"}, "partition": {"name": "lognormal", "clients": 8}}
    common |= {"participation": {"cohort": 5}, "local": {"epochs": 2, "batch": 10, "lr": 0.1}}
    alone, together = (
        [
            Config.build(common | {"algorithm": alg, "engine": {"name": name, "device": "cpu", "dtype": "float64"}})
            for alg in (FedAvg(), WithoutWeights())
        ]
        for name in ("sequential", "slots")
    )
    pairs = zip((run_together([config])[0] for config in alone), run_together(together), strict=True)
    assert all(gap(a, b) < 1e-12 for a, b in pairs)


# runs side by side ----------------------------------------------------------------------------------------------------


class Freeze(FedAvg):
    def direction(self, theta: Tensor, grad: Any, client: Any) -> Tensor:
        g: Tensor = grad(theta)
        return g.index_fill(0, client.parts["head"].indices, 0)


class FreezeSome(FedAvg):
    """A setting says which part; the phase that reads it has no setting."""

    last: int = askew.setting("tensors that are frozen", default=1)

    def parts(self, space: askew.Space) -> dict[str, askew.Part]:
        return {"head": space.last_tensors(self.last)}

    def phases(self) -> tuple[FedAvg, ...]:
        return (Freeze(),)


class RandomFeatures(nn.Module):
    """Features that are drawn with the weights and are no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn, self.last = torch.randn(64, 16) / 8, nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.cos(x.flatten(1) @ self.drawn.to(x.dtype)))  # type: ignore[no-any-return]


def configurations(what: str) -> list[Config]:
    common = {"rounds": 3, "model": {"name": "mlp", "hidden": [16]}, "partition": {"clients": 12}}
    common |= {"participation": {"cohort": 5}, "local": {"epochs": 2, "batch": 16, "lr": 0.1}}
    common |= {"engine": {"name": "sequential", "device": "cpu", "dtype": "float64"}}
    if what == "parts":
        return [Config.build(common | {"algorithm": FreezeSome(last=n)}) for n in (1, 3)]
    return [Config.build(common | {"model": own_model(RandomFeatures), "seed": seed}) for seed in (0, 1)]


@pytest.mark.parametrize("engine", ENGINES[1:])
@pytest.mark.parametrize("what", ["parts", "features"])
def test_runs_side_by_side_do_not_share_what_differs(what: str, engine: str) -> None:
    configs = configurations(what)
    alone = [run_together([config])[0] for config in configs]
    together = run_together([replace(config, engine=replace(config.engine, name=engine)) for config in configs])
    assert all(gap(a, b) < 1e-12 for a, b in zip(alone, together, strict=True)) and gap(*alone) > 1e-3


# participation rules --------------------------------------------------------------------------------------------------


class Shuffled(askew.Participation):
    """Five at random, by a function that shuffles in place."""

    def sample(self, seed: int, round: int, eligible: np.ndarray, clients: int) -> np.ndarray:
        askew.generator(seed, "participation", round).shuffle(eligible)
        return eligible[:5]


class Returns(askew.Participation):
    """Whatever a test says."""

    ids: tuple[float, ...] = (0,)

    def sample(self, seed: int, round: int, eligible: np.ndarray, clients: int) -> np.ndarray:
        return [*self.ids]  # type: ignore[return-value]


def test_a_rule_may_shuffle_what_it_is_given() -> None:
    run = train(Net(), participation=Shuffled())
    for record in run.rounds:
        expected = np.arange(8)
        askew.generator(1, "participation", record["round"]).shuffle(expected)
        assert record["participants"] == sorted(expected[:5].tolist())


@pytest.mark.parametrize("ids", [(0, 0, 1), (0, 99), (-1, 0), (0.5, 1.0)])
def test_ids_that_are_not_those_of_clients_are_refused(ids: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match=r"Returns: sample\(\) must return ids of eligible clients, each once"):
        train(Net(), participation=Returns(ids=ids))


def test_a_rule_may_return_a_list_in_any_order() -> None:
    assert [r["participants"] for r in train(Net(), participation=Returns(ids=(3, 1))).rounds] == [[1, 3]] * 3


# declared steps -------------------------------------------------------------------------------------------------------


class Root(FedAvg):
    """Its state is a square, whose root is no number where a trial makes it negative."""

    def client_state(self, space: askew.Space) -> dict[str, Tensor]:
        return {"v": space.zeros() + 1.0}

    def direction(self, theta: Tensor, grad: Any, client: Any) -> Tensor:
        d: Tensor = grad(theta) + 0.1 * (theta - client.w) + 0.01 * client.state["v"].sqrt()
        return d

    def affine_step(self, client: Any) -> askew.Affine:
        return askew.Affine(pull=0.1, shift=0.01 * client.state["v"].sqrt() - 0.1 * client.w)


class WrongRoot(FedAvg):
    client_state, direction = Root.client_state, Root.direction

    def affine_step(self, client: Any) -> askew.Affine:
        return askew.Affine(pull=0.2, shift=0.01 * client.state["v"].sqrt() - 0.1 * client.w)


@pytest.mark.filterwarnings("error")
def test_a_right_declaration_with_a_root_is_believed() -> None:
    train(nn.Sequential(nn.Flatten(), nn.Linear(6, 3)), algorithm=Root())


def test_a_wrong_declaration_with_a_root_is_not() -> None:
    with pytest.warns(UserWarning, match="is not what direction"):
        train(nn.Sequential(nn.Flatten(), nn.Linear(6, 3)), algorithm=WrongRoot())
