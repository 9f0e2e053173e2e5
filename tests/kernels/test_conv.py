"""Convolution, ReLU and pooling in C, against torch's."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from askew.kernels.cpu import compiler, conv
from askew.kernels.cpu.dense import SOURCE
from askew.kernels.interface import Kernels
from askew.models.network import use_kernels
from askew.models.small import CNN, CNN64, LeNet

in_c = pytest.mark.skipif(compiler.library(SOURCE, torch.float64) is None, reason="kernels cannot be compiled here")


def layers(ci: int, co: int, k: int, pad: int) -> tuple[nn.Conv2d, nn.ReLU, nn.MaxPool2d]:
    return nn.Conv2d(ci, co, k, padding=pad).double(), nn.ReLU(), nn.MaxPool2d(2)


FILTERS = [(1, 1, 1), (3, 6, 5), (6, 16, 5), (1, 5, 3), (2, 7, 4), (13, 9, 3), (16, 12, 2), (5, 24, 7)]
FAST = {((3, 6, 5), 0, (33, 18)), ((2, 7, 4), 2, (8, 7)), ((16, 12, 2), 0, (8, 7))}  # each case is compiled for itself
CASES = [
    pytest.param(filters, pad, size, marks=[] if (filters, pad, size) in FAST else [pytest.mark.slow])
    for filters in FILTERS
    for pad in (0, 2)
    for size in ((8, 7), (33, 18))
    if min(size) + 2 * pad > filters[2]  # else there is nothing to pool
]


@in_c
@pytest.mark.parametrize(("filters", "pad", "size"), CASES)
def test_a_convolution_is_torchs(filters: tuple[int, int, int], pad: int, size: tuple[int, int]) -> None:
    ci, co, k = filters
    row, x = layers(ci, co, k, pad), torch.randn(5, ci, *size, dtype=torch.float64, requires_grad=True)
    assert conv.can_run(x, *row)
    plain, y = nn.Sequential(*row)(x), conv.conv_relu_pool(x, row[0])
    torch.testing.assert_close(y, plain, rtol=1e-12, atol=1e-13)
    behind, wanted = torch.randn_like(y), (x, row[0].weight, row[0].bias)
    for a, b in zip(torch.autograd.grad(y, wanted, behind), torch.autograd.grad(plain, wanted, behind), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@in_c
def test_where_there_is_nothing_to_pool_torch_does_it() -> None:
    assert not conv.can_run(torch.zeros(5, 5, 8, 7, dtype=torch.float64), *layers(5, 24, 7, 0))


@in_c
def test_of_equal_pixels_the_first_has_the_gradient_and_nan_is_seen() -> None:
    row, x = layers(2, 3, 3, 1), torch.zeros(4, 2, 10, 10, dtype=torch.float64)
    x[1, :, 3, 4], x[2, 1, 5, 5] = float("nan"), float("inf")
    x[3] = 1.0
    plain, y = nn.Sequential(*row)(x), conv.conv_relu_pool(x, row[0])
    torch.testing.assert_close(y, plain, equal_nan=True)
    assert y[1].isnan().any()
    even = x[[0, 3]]
    mine, theirs = (
        torch.autograd.grad(t.sum(), row[0].weight)[0]
        for t in (conv.conv_relu_pool(even, row[0]), nn.Sequential(*row)(even))
    )
    torch.testing.assert_close(mine, theirs)


NETWORKS = [
    pytest.param(network, shape, marks=[] if (network, shape) == (LeNet(), (3, 32, 32)) else [pytest.mark.slow])
    for network in (CNN(), LeNet(), LeNet(padding=2), CNN64())
    for shape in ((1, 28, 28), (3, 32, 32), (3, 19, 21))
]


@in_c
@pytest.mark.parametrize(("network", "shape"), NETWORKS)
def test_single_precision_is_as_good_as_torchs(network: CNN | LeNet, shape: tuple[int, ...]) -> None:
    plain = network.build_module(shape, 5)
    fast = use_kernels(plain, Kernels(torch.device("cpu"), torch.float32))
    truth = copy.deepcopy(plain).double()
    x, y = torch.randn(24, *shape), torch.randint(0, 5, (24,))

    def outputs_and_gradients(module: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        logits, features = module(x)
        return torch.cat([logits, features], 1), list(
            torch.autograd.grad(F.cross_entropy(logits, y), list(module.parameters()))
        )

    (right, slope), (theirs, _), (ours, mine) = (
        outputs_and_gradients(truth, x.double()),
        outputs_and_gradients(plain, x),
        outputs_and_gradients(fast, x),
    )
    rounding = torch.finfo(torch.float32).eps * right.abs().max()
    assert (ours - right).abs().max() <= 2 * (theirs - right).abs().max() + 4 * rounding
    for a, b in zip(mine, slope, strict=True):  # of two almost equal pixels, rounding decides which has the gradient
        assert (a - b).norm() <= 0.1 * b.norm()


@in_c
@pytest.mark.parametrize(
    "row",
    [
        (nn.Conv2d(2, 3, 3, stride=2), nn.ReLU(), nn.MaxPool2d(2)),
        (nn.Conv2d(2, 4, 3, groups=2), nn.ReLU(), nn.MaxPool2d(2)),
        (nn.Conv2d(2, 3, 3, dilation=2), nn.ReLU(), nn.MaxPool2d(2)),
        (nn.Conv2d(2, 3, 3, bias=False), nn.ReLU(), nn.MaxPool2d(2)),
        (nn.Conv2d(2, 3, (3, 5)), nn.ReLU(), nn.MaxPool2d(2)),
        (nn.Conv2d(2, 3, 3, padding=(1, 0)), nn.ReLU(), nn.MaxPool2d(2)),
        (nn.Conv2d(2, 3, 3, padding="same"), nn.ReLU(), nn.MaxPool2d(2)),
        (nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), nn.ReLU(), nn.MaxPool2d(2)),
        (nn.Conv2d(2, 3, 3), nn.Tanh(), nn.MaxPool2d(2)),
        (nn.Conv2d(2, 3, 3), nn.ReLU(), nn.AvgPool2d(2)),
        (nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(3)),
        (nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2, padding=1)),
        (nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2, ceil_mode=True)),
        (nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2, stride=1)),
        (nn.Conv2d(2, 3, 3).half(), nn.ReLU(), nn.MaxPool2d(2)),
    ],
    ids=repr,
)
def test_other_layers_are_left_to_torch(row: tuple[nn.Module, ...]) -> None:
    assert not conv.can_run(torch.zeros(2, 2, 9, 9, dtype=row[0].weight.dtype), *row)


@in_c
def test_what_is_vmapped_or_cast_is_left_to_torch() -> None:
    row, x = layers(2, 3, 3, 0), torch.zeros(4, 1, 2, 8, 8, dtype=torch.float64)
    answers = list[bool]()
    torch.func.vmap(lambda x: answers.append(conv.can_run(x, *row)) or x)(x)
    with torch.autocast("cpu", torch.bfloat16):
        answers.append(conv.can_run(x[0], *row))
    assert answers == [False, False] and conv.can_run(x[0], *row)
