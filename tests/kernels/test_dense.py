"""Dense networks in C: gradients and steps, against torch's autograd and optimisers."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import askew
from askew.core.differentiate import differentiate
from askew.core.space import Space
from askew.core.task import Bound, Functional, Task, WithFeatures
from askew.core.types import Affine, Batch, Client
from askew.kernels import steps
from askew.kernels.cpu import compiler
from askew.kernels.cpu.dense import SOURCE, DenseKernel, row_spans, step_rule
from askew.kernels.dense import dense_kernel, dense_layers
from askew.models import CNN, MLP, Softmax

in_c = pytest.mark.skipif(compiler.library(SOURCE, torch.float64) is None, reason="kernels cannot be compiled here")
METHODS = ("fedprox", "fedcm", "feddc", "feddyn", "scaffold")  # declare a step of their own


def linear_network(widths: list[int], biased: bool = True, activation: type[nn.Module] = nn.ReLU) -> nn.Module:
    body: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in itertools.pairwise(widths[:-1]):
        body += [nn.Linear(inputs, outputs, bias=biased), activation()]
    return WithFeatures(nn.Sequential(*body, nn.Linear(*widths[-2:], bias=biased))).double()


def kernel_of(module: nn.Module) -> tuple[DenseKernel, Space]:
    space = Space(module, torch.float64)
    kernel = dense_kernel(module, space)
    assert kernel is not None
    return kernel, space


def make_client(rate: float, momentum: float = 0.0, decay: float = 0.0, clip: float = math.inf) -> Client:
    """What a step asks a client for: rates and limits."""
    nothing: dict[str, Tensor] = {}
    numbers = (rate, rate, momentum, decay, clip, 3.0, 3.0, 1.0, 1, 0.5)
    return Client(torch.zeros(0), torch.zeros(0), nothing, nothing, nothing, {}, *numbers)


def cut(sizes: list[int]) -> tuple[list[int], Tensor]:
    """Where batches of these sizes end, and their spans [1, S, 2]."""
    cuts = [0, *itertools.accumulate(sizes)]
    return cuts, torch.tensor([list(itertools.pairwise(cuts))])


def flat(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


WIDTHS = [[30, 5], [3, 7, 2], [17, 33, 16, 3], [784, 200, 200, 10], [64, 64, 10], [5, 1, 9], [129, 40, 4], [1, 1]]


@in_c
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("widths", WIDTHS)
def test_steps_in_a_row_are_torchs(widths: list[int], biased: bool) -> None:
    """Gradient, mean cross-entropy and plain steps, on batches of several sizes."""
    module, rate, sizes = linear_network(widths, biased), 0.05, [50, 50, 37, 1, 2, 13]
    kernel, space = kernel_of(module)
    x, y = torch.randn(sum(sizes), widths[0], dtype=torch.float64), torch.randint(0, widths[-1], (sum(sizes),))
    w, (cuts, spans) = space.start.clone()[None], cut(sizes)
    (value,) = kernel.steps(w, Batch(x, y), spans, Affine(), make_client(rate), torch.zeros_like(w))
    total, optimiser = 0.0, torch.optim.SGD(module.parameters(), lr=rate)
    for a, b in itertools.pairwise(cuts):
        optimiser.zero_grad()
        loss = F.cross_entropy(module(x[a:b])[0], y[a:b])
        loss.backward()
        optimiser.step()
        total += loss.item()
    torch.testing.assert_close(w[0], flat(module), rtol=1e-12, atol=1e-13)
    assert value.item() == pytest.approx(total, rel=1e-13, abs=1e-13)


@in_c
@pytest.mark.parametrize(
    ("momentum", "decay", "clip"),
    [(0.9, 0.0, math.inf), (0.0, 0.01, math.inf), (0.0, 0.0, 0.3), (0.5, 0.02, 0.4), (0.5, 0.02, 1e3)],
)
def test_momentum_decay_and_clipping_in_c_are_torchs(momentum: float, decay: float, clip: float) -> None:
    """Decay and momentum come after clipping, as everywhere here; torch's optimiser is handed a clipped gradient."""
    module, sizes = linear_network([17, 33, 3]), [50, 37, 1, 2, 13]
    kernel, space = kernel_of(module)
    x, y = 3 * torch.randn(sum(sizes), 17, dtype=torch.float64), torch.randint(0, 3, (sum(sizes),))
    w, (cuts, spans) = space.start.clone()[None], cut(sizes)
    client = make_client(0.1, momentum, decay, clip)
    (value,) = kernel.steps(w, Batch(x, y), spans, Affine(), client, torch.zeros_like(w))
    total, clipped = 0.0, 0
    optimiser = torch.optim.SGD(module.parameters(), lr=0.1, momentum=momentum, weight_decay=decay)
    for a, b in itertools.pairwise(cuts):
        optimiser.zero_grad()
        loss = F.cross_entropy(module(x[a:b])[0], y[a:b])
        loss.backward()
        if clip < math.inf:
            clipped += bool(nn.utils.clip_grad_norm_(module.parameters(), clip) > clip)
        optimiser.step()
        total += loss.item()
    torch.testing.assert_close(w[0], flat(module), rtol=1e-12, atol=1e-13)
    assert value.item() == pytest.approx(total, rel=1e-13)
    assert (clipped > 0) == (clip < 1)


@in_c
@pytest.mark.parametrize(
    "rule",
    [
        Affine(gain=0.7, pull=0.3),
        Affine(pull=0.2, shift=torch.linspace(-1, 1, 696, dtype=torch.float64)),
        Affine(gain=1.5, shift=torch.linspace(1, -1, 696, dtype=torch.float64), decay=0.1),
        Affine(decay=0.4),
    ],
)
def test_an_affine_direction_in_c_is_the_formula(rule: Affine) -> None:
    """d = clip(gain·g + pull·θ + shift),  v ← ρ v + d + (decay)·θ,  θ ← θ − η v, coordinate by coordinate."""
    module, sizes = linear_network([17, 33, 3]), [20, 20, 7]
    kernel, space = kernel_of(module)
    task = Bound(module, space)
    assert space.P == 696
    x, y = torch.randn(sum(sizes), 17, dtype=torch.float64), torch.randint(0, 3, (sum(sizes),))
    theta, v = space.start.clone(), torch.zeros(696, dtype=torch.float64)
    expected, momentum, (cuts, spans) = theta.clone(), v.clone(), cut(sizes)
    kernel.steps(theta[None], Batch(x, y), spans, rule, make_client(0.1, 0.5, 0.02, 0.9), v[None])
    for a, b in itertools.pairwise(cuts):
        leaf = task.load(expected, space.buffers)
        g = torch.cat(
            [p.reshape(-1) for p in torch.autograd.grad(task.loss(leaf, Batch(x[a:b], y[a:b])), task.parameters)]
        )
        d = rule.gain * g + rule.pull * expected + (0.0 if rule.shift is None else rule.shift)
        d = d * min(1.0, 0.9 / (float(d.norm()) + 1e-6))
        momentum = 0.5 * momentum + d + (0.02 + rule.decay) * expected
        expected = expected - 0.1 * momentum
    torch.testing.assert_close(theta, expected, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(v, momentum, rtol=1e-12, atol=1e-13)


@in_c
@pytest.mark.parametrize("method", METHODS)
def test_many_declared_steps_at_once_are_those_one_by_one(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    local = {"epochs": 2, "batch": 16, "lr": 0.1, "momentum": 0.5, "weight_decay": 1e-3, "clip": 0.4}
    given = {"clients": 12, "cohort": 5, "rounds": 3, "model": "mlp", "local": local}
    given |= {"engine": {"name": "sequential", "dtype": "float64", "device": "cpu"}}
    calls, take = list[int](), steps.ClientSteps.take

    def count(self: steps.ClientSteps, client: Client, progress: object, batch: Batch, cuts: list[int]) -> object:
        calls.append(len(cuts) - 1)
        return take(self, client, progress, batch, cuts)  # type: ignore[arg-type]

    monkeypatch.setattr(steps.ClientSteps, "take", count)
    fast = askew.run(method, **given)  # type: ignore[arg-type]
    assert len(calls) == 15 and max(calls) > 1
    monkeypatch.setattr(steps.StepKernels, "client_steps", lambda *_: None)
    plain = askew.run(method, **given)  # type: ignore[arg-type]
    for name, value in fast.model.items():
        torch.testing.assert_close(value, plain.model[name], rtol=0, atol=1e-13)


@in_c
@pytest.mark.parametrize("padded", [False, True])
def test_gradients_of_many_networks_are_each_ones_own(padded: bool) -> None:
    """And so are steps of the first rows in place, which leave the others as they are."""
    module = linear_network([20, 11, 4])
    kernel, space = kernel_of(module)
    task, client, start = Bound(module, space), make_client(0.1), torch.randn(4, space.P, dtype=torch.float64)
    x, y = torch.randn(3, 6, 20, dtype=torch.float64), torch.randint(0, 4, (3, 6))
    counts = (6, 1, 4) if padded else (6, 6, 6)
    weight = (torch.arange(6) < torch.tensor(counts)[:, None]).double() if padded else None
    batch, stepped = Batch(x, y, weight), start.clone()
    gradients, values = kernel.gradients(start[:3], batch)
    losses = kernel.steps(stepped[:3], batch, row_spans(batch), Affine(), client, torch.zeros(3, dtype=torch.float64))
    assert torch.equal(losses, values) and torch.equal(stepped[3], start[3])
    for i, count in enumerate(counts):
        leaf = task.load(start[i], space.buffers)
        loss = task.loss(leaf, Batch(x[i, :count], y[i, :count]))
        right = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, task.parameters)])
        torch.testing.assert_close(gradients[i], right, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(stepped[i], start[i] - 0.1 * right, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(values[i], loss.detach(), rtol=1e-13, atol=0)


@in_c
def test_what_does_not_fit_is_refused_and_a_loss_that_is_not_finite_is_seen() -> None:
    kernel, space = kernel_of(linear_network([4, 3]))
    w, x, spans = space.start.clone()[None], torch.randn(2, 4, dtype=torch.float64), torch.tensor([[[0, 2]]])
    take = lambda x, y: kernel.steps(w, Batch(x, torch.tensor(y)), spans, Affine(), make_client(1.0), w.new_zeros(1))
    for wrong in (3, -1):
        with pytest.raises(IndexError, match="3 classes"):
            take(x, [0, wrong])
    for inputs in (x.float(), x[:, :3]):
        with pytest.raises(ValueError, match="4 numbers"):
            take(inputs, [0, 1])
    assert torch.equal(w[0], space.start)
    w[0, 0] = math.nan
    assert take(x, [0, 1]).isnan()


def row(*layers: nn.Module) -> WithFeatures:
    return WithFeatures(nn.Sequential(nn.Flatten(), *layers))


def tied() -> WithFeatures:
    network = row(nn.Linear(4, 4), nn.Linear(4, 4))
    network.module[1].weight = network.module[2].weight  # type: ignore[index, union-attr]
    return network


def frozen() -> nn.Linear:
    layer = nn.Linear(4, 4)
    layer.weight.requires_grad_(False)
    return layer


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Reversed(nn.Sequential):
    """Layers that are run from the last to the first."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self):
            x = layer(x)
        return x


def test_only_rows_of_linear_layers_and_relus_are_dense() -> None:
    shared, relu = nn.Linear(4, 4), nn.ReLU(inplace=True)
    names = lambda module: [name for name, _ in dense_layers(module)]
    assert names(MLP(hidden=(8,)).module((1, 8, 8), 10)) == ["fc1", "fc_relu1", "out"]
    assert names(Softmax().module((5,), 3)) == ["out"]
    assert names(row(nn.Linear(4, 4), relu, nn.Linear(4, 4), relu, nn.Linear(4, 2))) == [
        f"module.{k}" for k in range(1, 6)
    ]
    for module in (
        CNN().module((1, 8, 8), 10),
        MLP(norm="batch").module((5,), 3),
        WithFeatures(nn.Sequential(nn.Linear(4, 3))),  # nothing makes the input flat
        WithFeatures(nn.Sequential(nn.Linear(3, 2), nn.Flatten(), nn.Linear(4, 3))),
        WithFeatures(nn.Sequential(nn.Flatten(2), nn.Linear(4, 3))),
        WithFeatures(Reversed(nn.Linear(4, 3), nn.Flatten())),
        row(nn.Linear(4, 3), nn.Dropout()),
        row(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)),
        row(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)),
        row(nn.Sequential(nn.Linear(4, 2))),
        row(shared, nn.ReLU(), shared),
        tied(),
        row(frozen(), nn.ReLU(), nn.Linear(4, 2)),
        row(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 2)),
        row(Doubled(4, 2)),
    ):
        assert not dense_layers(module)


@pytest.mark.parametrize("layers", [(nn.ReLU(), nn.Linear(4, 2)), (nn.Linear(4, 2), nn.ReLU())])
def test_a_relu_before_or_after_all_linear_layers_is_left_to_torch(layers: tuple[nn.Module, ...]) -> None:
    network = row(*layers)
    assert dense_kernel(network, Space(network)) is None


@in_c
def test_an_in_place_relu_and_two_in_a_row_are_trained_in_c() -> None:
    module = row(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.ReLU(), nn.Linear(5, 3, bias=False)).double()
    kernel, space = kernel_of(module)
    task, x, y = Bound(module, space), torch.randn(1, 6, 2, 2, dtype=torch.float64), torch.randint(0, 3, (1, 6))
    gradient, value, _ = differentiate(
        task, lambda leaf: task.loss(leaf, Batch(x[0], y[0])), space.start, space.buffers
    )
    (fast,), (loss,) = kernel.gradients(space.start[None], Batch(x, y))
    torch.testing.assert_close(fast, gradient, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(loss, value, rtol=1e-13, atol=0)


@pytest.mark.parametrize("kind", [Functional, Bound])
def test_bfloat16_and_other_criteria_are_left_to_torch(kind: type[Task]) -> None:
    module = MLP(hidden=(8,)).module((6,), 3)
    assert steps.StepKernels(kind(module, Space(module), bf16=True), set()).dense is None
    assert steps.StepKernels(kind(module, Space(module), "squared_error"), set()).dense is None


def test_a_plain_step_needs_no_rule() -> None:
    client = make_client(0.1)
    assert step_rule(Affine(), client) is None
    assert step_rule(Affine(decay=0.1), client) and step_rule(Affine(), client._replace(momentum=0.5))
    assert step_rule(Affine(), client._replace(clip=1.0)) and step_rule(Affine(shift=torch.zeros(2)), client)


@pytest.mark.parametrize("gathered", [1, 2000])
def test_how_many_steps_are_taken_at_a_time_changes_no_bit(gathered: int, monkeypatch: pytest.MonkeyPatch) -> None:
    local = {"epochs": 2, "batch": 7}
    tables = {"data": "digits", "model": {"name": "mlp"}, "rounds": 2, "local": local, "engine": {"name": "sequential"}}
    usual = askew.run(tables)
    monkeypatch.setattr(steps, "GATHERED", gathered)
    assert torch.equal(askew.run(tables).model["fc1.weight"], usual.model["fc1.weight"])
