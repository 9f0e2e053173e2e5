"""Layers in a row as a network with kernels runs them, against the same layers one after the other."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from askew.kernels.cpu import conv
from askew.kernels.interface import Kernels
from askew.models import CNN, CNN64, LeNet, Network
from askew.models.network import make_chain, use_kernels


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """No convolution is compiled, as where there is no C compiler."""
    monkeypatch.setattr(conv, "kernels", lambda *sizes: None)


def with_kernels(module: nn.Module) -> nn.Module:
    """A copy of the network that runs its layers by kernels."""
    return use_kernels(module, Kernels(torch.device("cpu"), next(module.parameters()).dtype))


def gradients(network: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    """The gradients of the loss with respect to all parameters."""
    return list(torch.autograd.grad(F.cross_entropy(network(x)[0], y), list(network.parameters())))


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("network", [CNN(), LeNet(), LeNet(padding=2), CNN64()])
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (3, 19, 21)])
def test_without_a_compiler_pooled_convolutions_give_the_same_numbers(network: Network, shape: tuple[int, ...]) -> None:
    plain = network.build_module(shape, 5)
    fast = with_kernels(plain)
    x, y = torch.randn(24, *shape), torch.randint(0, 5, (24,))
    x[:6] = 0  # where all pixels of a window are equal, the same one must be picked
    for a, b in zip(plain(x), fast(x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    for a, b in zip(gradients(plain, x, y), gradients(fast, x, y), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)


@pytest.mark.usefixtures("no_compiler")
def test_where_torch_has_switched_onednn_off_numbers_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it does by itself when a product in bfloat16 fails."""
    plain = LeNet().build_module((1, 28, 28), 5)
    x, fast = torch.randn(24, 1, 28, 28), with_kernels(plain)
    torch._C._set_mkldnn_enabled(False)
    try:
        torch.testing.assert_close(fast(x)[0], plain(x)[0], rtol=1e-5, atol=1e-6)
    finally:
        torch._C._set_mkldnn_enabled(True)


@pytest.mark.parametrize(
    "network",
    [CNN(norm="batch"), CNN(norm="group"), LeNet(norm="group"), pytest.param(CNN(), marks=pytest.mark.slow), LeNet()],
)
def test_in_double_precision_and_with_norms_numbers_are_the_same_to_rounding(network: Network) -> None:
    plain = network.build_module((1, 28, 28), 5).double()
    fast = with_kernels(plain)
    x, y = torch.randn(24, 1, 28, 28, dtype=torch.float64), torch.randint(0, 5, (24,))
    for a, b in zip([*plain(x), *plain.buffers()], [*fast(x), *fast.buffers()], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)
    for a, b in zip(gradients(plain, x, y), gradients(fast, x, y), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("pool", [nn.MaxPool2d(2), nn.MaxPool2d(3, 2, 1), nn.MaxPool2d(2, ceil_mode=True)])
def test_a_relu_may_come_after_the_pooling(pool: nn.MaxPool2d) -> None:
    """Bit for bit as in the order that is written, with ties, zeros, numbers below zero and NaN."""
    layers = [
        ("conv", nn.Conv2d(2, 3, 3)),
        ("relu", nn.ReLU()),
        ("pool", pool),
        ("flatten", nn.Flatten()),
        ("out", nn.Linear(3 * pool(torch.zeros(1, 7, 7)).numel(), 4)),
    ]
    plain = make_chain(iter(layers))
    x = torch.randint(-1, 2, (5, 2, 9, 9)).float()
    with torch.no_grad():
        plain.conv.weight.copy_(torch.randint(-1, 2, plain.conv.weight.shape))
        plain.conv.bias.copy_(torch.tensor([0.0, -40.0, 1.0]))

    def output_and_gradients(network: nn.Module) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        output = network(leaf)[0]
        wanted = (leaf, *network.parameters())
        return [output.detach(), *torch.autograd.grad((output * torch.arange(4)).sum(), wanted)]

    for with_nan in (False, True):
        x[0, 0, 4, 4] = torch.nan if with_nan else 0
        one, other = output_and_gradients(plain), output_and_gradients(with_kernels(plain))
        assert all(torch.equal(a.nan_to_num(7.5), b.nan_to_num(7.5)) for a, b in zip(one, other, strict=True))
        assert bool(one[0].isnan().any()) is with_nan
