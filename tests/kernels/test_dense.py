"""Dense networks without autograd, in C and as products: against torch's autograd and optimisers."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import askew
from askew.core.space import Space
from askew.core.task import Bound, Functional, Task, WithFeatures
from askew.core.types import Affine, Batch, Client
from askew.kernels import steps
from askew.kernels.cpu import compiler
from askew.kernels.cpu.dense import SOURCE, DenseKernel, StepRule
from askew.kernels.dense import DenseNetwork, dense_layers, step_rule
from askew.models import CNN, MLP, Softmax

in_c = pytest.mark.skipif(compiler.library(SOURCE, torch.float64) is None, reason="kernels cannot be compiled here")
METHODS = ("fedprox", "fedcm", "feddc", "feddyn", "scaffold")  # declare a step of their own


def linear_network(widths: list[int], biased: bool = True, activation: type[nn.Module] = nn.ReLU) -> nn.Module:
    body: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in itertools.pairwise(widths[:-1]):
        body += [nn.Linear(inputs, outputs, bias=biased), activation()]
    return WithFeatures(nn.Sequential(*body, nn.Linear(*widths[-2:], bias=biased))).double()


def kernel_of(module: nn.Module) -> tuple[DenseKernel, Space]:
    task = Bound(module, Space(module, torch.float64))
    dense = DenseNetwork.of(task)
    assert dense is not None and dense.kernel is not None
    return dense.kernel, task.space


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
    (value,) = kernel.steps(w, rate, None, None, None, x, y, spans)
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
    [(0.9, 0.0, 0.0), (0.0, 0.01, 0.0), (0.0, 0.0, 0.3), (0.5, 0.02, 0.4), (0.5, 0.02, 1e3)],
)
def test_momentum_decay_and_clipping_in_c_are_torchs(momentum: float, decay: float, clip: float) -> None:
    """Decay and momentum come after clipping, as everywhere here; torch's optimiser is handed a clipped gradient."""
    module, sizes = linear_network([17, 33, 3]), [50, 37, 1, 2, 13]
    kernel, space = kernel_of(module)
    x, y = 3 * torch.randn(sum(sizes), 17, dtype=torch.float64), torch.randint(0, 3, (sum(sizes),))
    w, (cuts, spans) = space.start.clone()[None], cut(sizes)
    v, rule = torch.zeros_like(w) if momentum else None, StepRule(1.0, 0.0, momentum, decay, clip or math.inf)
    (value,) = kernel.steps(w, 0.1, rule, None, v, x, y, spans)
    total, clipped = 0.0, 0
    optimiser = torch.optim.SGD(module.parameters(), lr=0.1, momentum=momentum, weight_decay=decay)
    for a, b in itertools.pairwise(cuts):
        optimiser.zero_grad()
        loss = F.cross_entropy(module(x[a:b])[0], y[a:b])
        loss.backward()
        if clip:
            clipped += bool(nn.utils.clip_grad_norm_(module.parameters(), clip) > clip)
        optimiser.step()
        total += loss.item()
    torch.testing.assert_close(w[0], flat(module), rtol=1e-12, atol=1e-13)
    assert value.item() == pytest.approx(total, rel=1e-13)
    assert (clipped > 0) == (0 < clip < 1)


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
    task = Bound(module, Space(module, torch.float64))
    dense = DenseNetwork.of(task)
    assert dense is not None and task.space.P == 696
    x, y = torch.randn(sum(sizes), 17, dtype=torch.float64), torch.randint(0, 3, (sum(sizes),))
    nothing: dict[str, Tensor] = {}
    numbers = (0.1, 0.1, 0.5, 0.02, 0.9, 3.0, 3.0, 1.0, 1, 0.5)
    client = Client(task.space.start, task.space.buffers, nothing, nothing, nothing, {}, *numbers)
    theta, v = task.space.start.clone(), torch.zeros(696, dtype=torch.float64)
    expected, momentum = theta.clone(), v.clone()
    dense.affine_steps(theta, Batch(x, y), cut(sizes)[0], rule, client, v)
    for a, b in itertools.pairwise(cut(sizes)[0]):
        leaf = task.load(expected, task.space.buffers)
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


def products(task: Task) -> DenseNetwork:
    """A network's gradients and steps as products of matrices, though C may be there."""
    dense = DenseNetwork.of(task)
    assert dense is not None
    dense.kernel = None
    return dense


@pytest.mark.parametrize("way", [pytest.param("c", marks=in_c), "products"])
def test_gradients_of_many_networks_are_each_ones_own(way: str) -> None:
    module = linear_network([20, 11, 4])
    task = Bound(module, Space(module, torch.float64))
    dense = products(task) if way == "products" else DenseNetwork.of(task)
    assert dense is not None
    theta = torch.randn(3, task.space.P, dtype=torch.float64)
    x, y = torch.randn(3, 6, 20, dtype=torch.float64), torch.randint(0, 4, (3, 6))
    weight = (torch.arange(6) < torch.tensor([[6], [1], [4]])).double()
    gradients, values = dense.gradients(theta, Batch(x, y, weight))
    for i, count in enumerate((6, 1, 4)):
        leaf = task.load(theta[i], task.space.buffers)
        loss = task.loss(leaf, Batch(x[i, :count], y[i, :count]))
        right = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, task.parameters)])
        torch.testing.assert_close(gradients[i], right, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(values[i], loss.detach(), rtol=1e-13, atol=0)


@pytest.mark.parametrize("criterion", ["cross_entropy", "squared_error"])
@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.Identity])
def test_products_are_autograds(activation: type[nn.Module], criterion: str) -> None:
    """Every activation and criterion, with padded batches and without."""
    module = linear_network([9, 6, 5, 3], activation=activation)
    task = Functional(module, Space(module, torch.float64), criterion)
    dense = products(task)
    theta, x = torch.randn(2, task.space.P, dtype=torch.float64), torch.randn(2, 7, 9, dtype=torch.float64)
    y = torch.randint(0, 3, (2, 7)) if criterion == "cross_entropy" else torch.randn(2, 7, 3, dtype=torch.float64)
    for weight in (None, (torch.arange(7) < torch.tensor([[5], [7]])).double()):
        gradients, values = dense.gradients(theta, Batch(x, y, weight))
        for i in range(2):
            batch = Batch(x[i], y[i], None if weight is None else weight[i])
            right, value = torch.func.grad_and_value(lambda u, batch=batch: task.loss(u, batch))(theta[i])
            torch.testing.assert_close(gradients[i], right, rtol=1e-11, atol=1e-13)
            torch.testing.assert_close(values[i], value, rtol=1e-12, atol=1e-14)


@in_c
def test_what_does_not_fit_is_refused_and_a_loss_that_is_not_finite_is_seen() -> None:
    kernel, space = kernel_of(linear_network([4, 3]))
    w, x, spans = space.start.clone()[None], torch.randn(2, 4, dtype=torch.float64), torch.tensor([[[0, 2]]])
    take = lambda x, y: kernel.steps(w, 1.0, None, None, None, x, torch.tensor(y), spans)
    for wrong in (3, -1):
        with pytest.raises(IndexError, match="3 classes"):
            take(x, [0, wrong])
    for inputs in (x.float(), x[:, :3]):
        with pytest.raises(ValueError, match="4 numbers"):
            take(inputs, [0, 1])
    assert torch.equal(w[0], space.start)
    w[0, 0] = math.nan
    assert take(x, [0, 1]).isnan()


def test_only_rows_of_linear_layers_and_known_functions_are_dense() -> None:
    def dense(*layers: nn.Module) -> bool:
        return bool(dense_layers(WithFeatures(nn.Sequential(*layers))))

    assert dense(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    assert dense_layers(MLP().module((1, 8, 8), 10)) and dense_layers(Softmax().module((5,), 3))
    assert not dense_layers(CNN().module((1, 8, 8), 10)) and not dense_layers(MLP(norm="batch").module((5,), 3))
    assert not dense(nn.Linear(4, 3))  # nothing makes the input flat
    assert not dense(nn.Flatten(2), nn.Linear(4, 3)) and not dense(nn.Flatten(), nn.Linear(4, 3), nn.Dropout())
    assert not dense(nn.Flatten(), nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    tied = nn.Linear(4, 4)
    assert not dense(nn.Flatten(), tied, nn.ReLU(), tied)
    frozen = nn.Linear(4, 4)
    frozen.weight.requires_grad_(False)
    assert not dense(nn.Flatten(), frozen, nn.ReLU(), nn.Linear(4, 2))
    assert not dense(nn.Flatten(), nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 2))

    class Mine(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    assert not dense(nn.Flatten(), Mine(4, 2))


def test_a_plain_step_needs_no_rule() -> None:
    nothing: dict[str, Tensor] = {}
    numbers = (0.1, 0.1, 0.0, 0.0, math.inf, 3.0, 3.0, 1.0, 1, 0.5)
    client = Client(torch.zeros(2), torch.zeros(0), nothing, nothing, nothing, {}, *numbers)
    assert step_rule(Affine(), client) is None
    assert step_rule(Affine(decay=0.1), client) and step_rule(Affine(), client._replace(momentum=0.5))


@pytest.mark.parametrize("gathered", [1, 2000])
def test_how_many_steps_are_taken_at_a_time_changes_no_bit(gathered: int, monkeypatch: pytest.MonkeyPatch) -> None:
    local = {"epochs": 2, "batch": 7}
    tables = {"data": "digits", "model": {"name": "mlp"}, "rounds": 2, "local": local, "engine": {"name": "sequential"}}
    usual = askew.run(tables)
    monkeypatch.setattr(steps, "GATHERED", gathered)
    assert torch.equal(askew.run(tables).model["fc1.weight"], usual.model["fc1.weight"])
