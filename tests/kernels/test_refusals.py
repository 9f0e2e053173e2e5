"""Networks, losses and plug-ins of which a kernel or a shared row knows too little are left to the plain code."""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import askew
from askew.algorithms import FedAvg, FedSpeed
from askew.core import hooks
from askew.core.algorithm import Algorithm, Gradient
from askew.core.settings import setting
from askew.core.space import Space
from askew.core.task import Task
from askew.core.types import Affine, Batch, Client, Part
from askew.errors import AlgorithmError
from askew.experiment.config import Config
from askew.experiment.run import run_together
from askew.kernels import steps as step_kernels
from askew.kernels.cpu import compiler
from askew.kernels.cpu import conv as cpu_conv
from askew.kernels.cpu.dense import SOURCE, DenseKernel
from askew.models.network import use_kernels

in_c = pytest.mark.skipif(compiler.library(SOURCE, torch.float64) is None, reason="kernels cannot be compiled here")
X = torch.randn(320, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = (X[:, 0] > 0).long() + (X[:, 1] > 0).long()


def network(clipped: bool) -> nn.Sequential:
    """A dense network, with or without a hook that changes what a layer gives."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Flatten(), nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 3))
    if clipped:
        layers[1].register_forward_hook(lambda layer, given, output: output.clamp(-0.2, 0.2))
    return layers


def trained(alg: Algorithm, engine: str, clipped: bool = False, criterion: Any = None) -> Tensor:
    """The model after three rounds."""
    samples = askew.Samples(X, Y)
    data = askew.Dataset(samples, samples, classes=3, **({"criterion": criterion} if criterion else {}))
    run = askew.run(
        alg,
        data=data,
        model=network(clipped),
        partition={"name": "iid", "clients": 10},
        cohort=5,
        rounds=3,
        lr=0.3,
        local={"batch": 16},
        engine={"name": engine, "device": "cpu", "dtype": "float64", "workers": 1},
    )
    return torch.cat([value.flatten() for value in run.model.values()])


def without_kernels(patch: pytest.MonkeyPatch) -> None:
    for name in ("client_steps", "gradient", "row_steps", "row_gradients"):
        patch.setattr(step_kernels.StepKernels, name, lambda *_: None)


@pytest.mark.parametrize("engine", ["sequential", "vmapped"])
@pytest.mark.parametrize("alg", [FedAvg(), FedSpeed()], ids=["steps", "gradients"])
def test_a_hook_of_a_layer_is_not_left_out(alg: Algorithm, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = trained(alg, engine, clipped=True)
    without_kernels(monkeypatch)
    plain = trained(alg, engine, clipped=True)
    torch.testing.assert_close(model, plain, rtol=1e-12, atol=1e-12)
    assert float((plain - trained(alg, engine)).abs().max()) > 1e-3  # the hook changes what is trained


@in_c
@pytest.mark.parametrize("engine", ["sequential", "vmapped"])
def test_a_wrong_gradient_of_a_kernel_is_found(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        without_kernels(patch)
        plain = trained(FedSpeed(), engine)
    right = DenseKernel.gradients

    def wrong(self: DenseKernel, *given: Any) -> tuple[Tensor, Tensor]:
        g, values = right(self, *given)
        return 1.01 * g, values

    monkeypatch.setattr(DenseKernel, "gradients", wrong)
    with pytest.warns(UserWarning, match="gradients of this network differ from torch's"):
        model = trained(FedSpeed(), engine)
    torch.testing.assert_close(model, plain, rtol=1e-12, atol=1e-12)


def losses(output: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, y, reduction="none")


def test_a_loss_that_looks_at_its_batch_sees_one_client_s() -> None:
    def balanced(output: Tensor, y: Tensor) -> Tensor:
        """Every class of a batch weighs the same."""
        same = (y[:, None] == y[None]).to(output.dtype).sum(1)
        return losses(output, y) / same * len(y) / 3

    one, many = (trained(FedAvg(), engine, criterion=balanced) for engine in ("sequential", "vmapped"))
    torch.testing.assert_close(many, one, rtol=1e-12, atol=1e-12)


def masked(output: Tensor, y: Tensor) -> Tensor:
    """Class 0 weighs twice, by a boolean index."""
    each = losses(output, y)
    each[y == 0] = 2 * each[y == 0]
    return each


def scaled(output: Tensor, y: Tensor) -> Tensor:
    """Divided by a number taken out of a tensor."""
    return losses(output, y) / (1 + (y == 0).sum().item())


def branching(output: Tensor, y: Tensor) -> Tensor:
    """By an `if` on what the batch holds."""
    return 2 * losses(output, y) if y.max() < 2 else losses(output, y)


@pytest.mark.parametrize("criterion", [masked, scaled, branching])
@pytest.mark.parametrize("alg", [FedAvg(), FedSpeed()], ids=["steps", "gradients"])
def test_a_loss_that_vmap_does_not_take_is_trained_one_client_at_a_time(
    alg: Algorithm, criterion: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = trained(alg, "sequential", criterion=criterion)
    without_kernels(monkeypatch)
    assert torch.equal(model, trained(alg, "sequential", criterion=criterion))


@pytest.mark.parametrize("engine", ["sequential", "vmapped"])
@pytest.mark.parametrize("alg", [FedAvg(), FedSpeed()], ids=["steps", "gradients"])
def test_a_loss_put_in_the_place_of_the_base_class_s_is_not_left_out(
    alg: Algorithm, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = trained(alg, engine)

    def doubled(self: Algorithm, task: Task, theta: Tensor, batch: Batch, client: Client) -> Tensor:
        return 2 * task.loss(theta, batch)

    monkeypatch.setattr(Algorithm, "loss", doubled)
    monkeypatch.setattr(hooks, "watches_left", {})  # which hooks are askew's own is looked up once
    model = trained(alg, engine)
    assert float((model - usual).abs().max()) > 1e-3
    without_kernels(monkeypatch)
    torch.testing.assert_close(model, trained(alg, engine), rtol=1e-12, atol=1e-12)


# runs of a sweep, side by side ----------------------------------------------------------------------------------------


class Derived(FedAvg):
    """Computes a number from its setting when it is made."""

    mu: float = setting("strength", default=0.1)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "twice", 2 * self.mu)

    def direction(self, theta: Tensor, grad: Gradient, client: Client) -> Tensor:
        return grad(theta) + self.twice * (theta - client.w)  # type: ignore[attr-defined]


class Cached(FedAvg):
    """Computes it when it is first asked for."""

    mu: float = setting("strength", default=0.1)

    @cached_property
    def twice(self) -> float:
        return 2 * self.mu

    def direction(self, theta: Tensor, grad: Gradient, client: Client) -> Tensor:
        return grad(theta) + self.twice * (theta - client.w)


class Frozen(FedAvg):
    """Its parts depend on its setting."""

    mu: float = setting("share of the coordinates that stay", default=0.1)

    def parts(self, space: Space) -> dict[str, Part]:
        return {"frozen": Part(torch.arange(int(self.mu * space.P)), torch.zeros(0, dtype=torch.long))}

    def direction(self, theta: Tensor, grad: Gradient, client: Client) -> Tensor:
        return grad(theta).index_fill(0, client.parts["frozen"].indices, 0.0)


class Typed(FedAvg):
    """It asks what type its setting is of."""

    mu: float = setting("strength", default=0.1)

    def direction(self, theta: Tensor, grad: Gradient, client: Client) -> Tensor:
        return grad(theta) + (self.mu if isinstance(self.mu, float) else 0.0) * (theta - client.w)


class LooksUp(FedAvg):
    """It looks its setting up in a table."""

    mu: float = setting("strength", default=0.1)
    strengths: ClassVar[dict[float, float]] = {0.05: 0.5, 0.9: 1.0}

    def direction(self, theta: Tensor, grad: Gradient, client: Client) -> Tensor:
        return grad(theta) + self.strengths.get(self.mu, 0.0) * (theta - client.w)


class LooksUpOrFails(LooksUp):
    """It has no value for what is not in the table."""

    def direction(self, theta: Tensor, grad: Gradient, client: Client) -> Tensor:
        return grad(theta) + self.strengths[self.mu] * (theta - client.w)


@pytest.mark.parametrize("method", [Derived, Cached, Frozen, Typed, LooksUp, LooksUpOrFails])
def test_runs_side_by_side_keep_what_follows_from_their_settings(method: Any) -> None:
    configs = [
        Config.build(
            {
                "algorithm": method(mu=mu),
                "rounds": 2,
                "model": {"name": "mlp", "hidden": [8]},
                "partition": {"clients": 6},
                "participation": {"cohort": 3},
                "local": {"batch": 16, "lr": 0.1},
                "engine": {"name": "stacked", "device": "cpu", "dtype": "float64"},
            }
        )
        for mu in (0.05, 0.9)
    ]
    for config, beside in zip(configs, run_together(configs), strict=True):
        (alone,) = run_together([config])
        for name, value in alone.model.items():
            torch.testing.assert_close(beside.model[name], value, rtol=1e-12, atol=1e-12)


# what a plug-in declares ----------------------------------------------------------------------------------------------


class ScalarShift(FedAvg):
    """One number for all coordinates."""

    def direction(self, theta: Tensor, grad: Gradient, client: Client) -> Tensor:
        return grad(theta) + 0.1

    def affine_step(self, client: Client) -> Affine:
        return Affine(shift=torch.full((), 0.1, dtype=client.w.dtype))


class ShortShift(FedAvg):
    def direction(self, theta: Tensor, grad: Gradient, client: Client) -> Tensor:
        return grad(theta)

    def affine_step(self, client: Client) -> Affine:
        return Affine(shift=torch.zeros(3, dtype=client.w.dtype))


class NoRule(FedAvg):
    def direction(self, theta: Tensor, grad: Gradient, client: Client) -> Tensor:
        return grad(theta)

    def affine_step(self, client: Client) -> Any:
        return (1.0, 0.0)


@pytest.mark.parametrize(("alg", "what"), [(ShortShift(), "a shift of shape"), (NoRule(), "an Affine or None")])
def test_a_declared_step_of_another_form_is_refused_by_a_sentence(alg: Algorithm, what: str) -> None:
    with pytest.raises(AlgorithmError, match=rf"affine_step\(\) must return {what}"):
        trained(alg, "sequential")


@pytest.mark.parametrize("engine", ["sequential", "vmapped", "stacked"])
def test_a_shift_may_be_one_number(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = trained(ScalarShift(), engine)
    without_kernels(monkeypatch)
    torch.testing.assert_close(model, trained(ScalarShift(), "sequential"), rtol=1e-12, atol=1e-12)


# convolutions in C ----------------------------------------------------------------------------------------------------


def conv_layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2)]


def test_images_with_other_channels_are_left_to_torch() -> None:
    layers = conv_layers()
    if not cpu_conv.can_run(torch.randn(2, 3, 32, 32), *layers):
        pytest.skip("kernels cannot be compiled here")
    assert not cpu_conv.can_run(torch.randn(2, 1, 32, 32), *layers)


def test_second_derivatives_of_a_convolution_in_c_are_refused() -> None:
    layers, x = conv_layers(), torch.randn(2, 3, 32, 32, requires_grad=True)
    if not cpu_conv.can_run(x, *layers):
        pytest.skip("kernels cannot be compiled here")
    conv = layers[0]
    assert isinstance(conv, nn.Conv2d)
    (dx,) = torch.autograd.grad(cpu_conv.conv_relu_pool(x, conv).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        dx.square().sum().backward()


def test_layers_with_hooks_keep_their_own_forward_pass() -> None:
    from askew.kernels.interface import Kernels
    from askew.models import LeNet

    model: Any = LeNet().module((3, 32, 32), 10)
    kernels = Kernels(torch.device("cpu"), torch.float32)
    layer = next(m for m in model.modules() if isinstance(m, nn.Conv2d))
    assert use_kernels(model, kernels).kernels is kernels
    layer.register_forward_hook(lambda *_: None)
    assert use_kernels(model, kernels).kernels is None
