"""Triton kernels against the layers and functions of torch that they replace."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap

from askew.core.types import Client
from askew.data.transform import PixelTransform, sample_draws
from askew.engine.sample_buffer import Needs, SampleBuffer
from askew.kernels import batched_linear, batched_lstm
from askew.kernels.affine_rows import AffineRows
from askew.kernels.cuda import conv as cuda_conv
from askew.kernels.cuda import cross_entropy as cuda_cross_entropy
from askew.kernels.cuda import gather as cuda_gather
from askew.kernels.cuda import group_norm
from askew.kernels.cuda.rows import real_samples
from askew.models.lstm import LastOutputLSTM

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(autouse=True)
def seeded_float32() -> Iterator[None]:
    """Fixed random numbers, and products of float32 that are not rounded to TF32."""
    torch.manual_seed(0)
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


def relative_error(tensor: Tensor, exact: Tensor) -> float:
    """The largest difference, relative to the largest exact value; where that is zero, the difference itself."""
    gap, largest = (tensor - exact).detach().abs().max(), exact.detach().abs().max()
    return float(gap / largest if largest > 0 else gap)


@pytest.mark.parametrize(
    ("shape", "out", "kernel", "pad"),
    [
        ((50, 3, 32, 32), 6, 5, 0),
        ((50, 6, 14, 14), 16, 5, 0),
        ((7, 1, 28, 28), 6, 5, 2),
        ((33, 1, 8, 8), 16, 3, 1),
        ((50, 3, 32, 32), 16, 5, 0),
        ((5, 2, 13, 11), 12, 3, 0),
        ((256, 3, 32, 32), 6, 5, 0),
    ],
)
def test_a_convolution_and_its_gradients(shape: tuple[int, ...], out: int, kernel: int, pad: int) -> None:
    """Against float64; a second time bit for bit the same."""
    conv = nn.Conv2d(shape[1], out, kernel, padding=pad).cuda()
    x = torch.randn(shape, device="cuda", requires_grad=True)
    assert cuda_conv.can_run(x, conv, nn.ReLU(), nn.MaxPool2d(2))
    exact_conv = nn.Conv2d(shape[1], out, kernel, padding=pad).cuda().double()
    exact_conv.load_state_dict(conv.state_dict())
    exact_x = x.detach().double().requires_grad_()
    y = cuda_conv.conv_relu_pool(x, conv)
    exact_y = F.max_pool2d(exact_conv(exact_x).relu(), 2)
    weight, inputs = torch.randn_like(y), (x, conv.weight, conv.bias)
    exact_inputs = (exact_x, exact_conv.weight, exact_conv.bias)
    gradients = torch.autograd.grad((y * weight).sum(), inputs)
    which = cuda_conv.forward(x[None], conv.weight[None], conv.bias[None], pad)[1][0]
    same_choice = pooled_by_choice(exact_conv(exact_x), which)
    exact_gradients = torch.autograd.grad((same_choice * weight.double()).sum(), exact_inputs)
    assert (y - exact_y).abs().max() < 1e-5
    for a, b in zip(gradients, exact_gradients, strict=True):
        assert a.shape == b.shape and relative_error(a, b) < 1e-5
    again = torch.autograd.grad((cuda_conv.conv_relu_pool(x, conv) * weight).sum(), inputs)
    assert all(torch.equal(a, b) for a, b in zip(gradients, again, strict=True))


def pooled_by_choice(before: Tensor, which: Tensor) -> Tensor:
    """Of every four pixels the chosen one, or 0 where `which` is 4. Of two almost equal pixels rounding decides which
    has the gradient, so that gradients can be compared only for the same choice.
    """
    ho, wo = which.shape[-2:]
    four = before[..., : 2 * ho, : 2 * wo].unflatten(-1, (wo, 2)).unflatten(-3, (ho, 2)).movedim(-3, -2).flatten(-2)
    return four.gather(-1, which.long().clamp(max=3)[..., None])[..., 0] * (which < 4)


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize(
    ("groups", "shape", "out", "kernel"),
    [
        (15, (50, 3, 32, 32), 64, 5),
        (15, (50, 64, 14, 14), 64, 5),
        (3, (7, 1, 28, 28), 32, 5),
        (2, (9, 32, 11, 9), 128, 3),
        (4, (1, 128, 6, 6), 32, 3),
    ],
)
def test_many_channels_of_many_networks(
    groups: int, shape: tuple[int, ...], out: int, kernel: int, counted: bool
) -> None:
    """Kernels that are for many networks alone, against float64; `counted`: only the first samples are real."""
    convs = [nn.Conv2d(shape[1], out, kernel).cuda() for _ in range(groups)]
    layers = (convs[0], nn.ReLU(), nn.MaxPool2d(2))
    assert cuda_conv.supports(*layers, many=True) and not cuda_conv.supports(*layers, many=False)
    w, bias = (
        torch.stack([getattr(conv, name).detach() for conv in convs]).requires_grad_() for name in ("weight", "bias")
    )
    x = torch.randn((groups, *shape), device="cuda", requires_grad=True)
    real = torch.arange(groups, device="cuda", dtype=torch.int32) % shape[0] + 1 if counted else None
    y, which = cuda_conv._Grouped.apply(x, w, bias, 0, real)
    exact = [t.detach().double().requires_grad_() for t in (x, w, bias)]
    before = torch.stack([F.conv2d(*each) for each in zip(*exact, strict=True)])
    same_choice, weight = pooled_by_choice(before, which), torch.randn_like(y)
    exact_y = torch.stack([F.max_pool2d(each.relu(), 2) for each in before])
    if real is not None:
        is_real = (torch.arange(shape[0], device="cuda")[None] < real[:, None])[..., None, None, None]
        weight, y, same_choice, exact_y = (t * is_real for t in (weight, y, same_choice, exact_y))
    assert (y - exact_y).abs().max() < 1e-5
    gradients = torch.autograd.grad((y * weight).sum(), (x, w, bias), retain_graph=True)
    for a, b in zip(gradients, torch.autograd.grad((same_choice * weight.double()).sum(), exact), strict=True):
        assert a.shape == b.shape and relative_error(a, b) < 1e-5
    again = torch.autograd.grad((y * weight).sum(), (x, w, bias))
    assert all(torch.equal(a, b) for a, b in zip(gradients, again, strict=True))


@pytest.mark.parametrize("bf16", [False, True])
def test_a_convolution_in_lower_precision(bf16: bool) -> None:
    torch.backends.cudnn.allow_tf32 = True
    conv, x = nn.Conv2d(3, 6, 5).cuda(), torch.randn(64, 3, 32, 32, device="cuda")
    with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
        y = cuda_conv.conv_relu_pool(x, conv)
    exact_y = F.max_pool2d(conv.double()(x.double()).relu(), 2)
    assert y.dtype == (torch.bfloat16 if bf16 else torch.float32)
    assert (y - exact_y).abs().max() < (0.02 if bf16 else 5e-3)


@pytest.mark.parametrize(
    ("shape", "out", "kernel"), [((9, 3, 32, 32), 64, 5), ((9, 64, 14, 14), 64, 5), ((9, 3, 32, 32), 6, 5)]
)
def test_convolutions_of_many_networks_in_bfloat16(shape: tuple[int, ...], out: int, kernel: int) -> None:
    """Forward and backward, against float64 of the rounded inputs, up to roundings of single numbers."""
    x = torch.randn((3, *shape), device="cuda", dtype=torch.bfloat16 if shape[1] > 3 else None, requires_grad=True)
    convs = [nn.Conv2d(shape[1], out, kernel).cuda() for _ in range(3)]
    w, bias = (
        torch.stack([getattr(conv, name).detach() for conv in convs]).requires_grad_() for name in ("weight", "bias")
    )
    with torch.autocast("cuda", torch.bfloat16):
        y, which = cuda_conv._Grouped.apply(x, w, bias, 0, None)
    assert y.dtype == torch.bfloat16
    exact = [t.detach().double().requires_grad_() for t in (x, w, bias)]
    before = torch.stack([F.conv2d(*each) for each in zip(*exact, strict=True)])
    weight = torch.randn_like(y)
    assert relative_error(y, torch.stack([F.max_pool2d(each.relu(), 2) for each in before])) < 0.01
    gradients = torch.autograd.grad((y * weight).sum(), (x, w, bias))
    exact_gradients = torch.autograd.grad((pooled_by_choice(before, which) * weight.double()).sum(), exact)
    for a, b in zip(gradients, exact_gradients, strict=True):
        assert a.shape == b.shape and relative_error(a, b) < 0.01


def test_nothing_passes_where_the_relu_is_off() -> None:
    conv = nn.Conv2d(1, 4, 3).cuda()
    nn.init.constant_(conv.bias, -100.0)
    x = torch.randn(3, 1, 8, 8, device="cuda", requires_grad=True)
    y = cuda_conv.conv_relu_pool(x, conv)
    gx, gw = torch.autograd.grad(y.sum(), (x, conv.weight))
    assert not y.any() and not gx.any() and not gw.any()


@pytest.mark.parametrize(("groups", "batch", "classes"), [(3, 50, 10), (2, 7, 3), (5, 256, 100), (1, 5, 600)])
@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy_of_many_batches(groups: int, batch: int, classes: int, weighted: bool) -> None:
    x = (5 * torch.randn(groups, batch, classes, device="cuda")).requires_grad_()
    y = torch.randint(classes, (groups, batch), device="cuda")
    weight = torch.ones(groups, batch, device="cuda")
    if weighted:
        weight = (torch.rand(groups, batch, device="cuda") > 0.3).float()
        weight[:, 0] = 1
    assert cuda_cross_entropy.can_run(x[0], y[0])
    losses = vmap(lambda x, y, w: cuda_cross_entropy.cross_entropy(x, y, w if weighted else None))(x, y, weight)
    each = F.cross_entropy(x.double().flatten(0, 1), y.flatten(), reduction="none").view(groups, batch)
    exact = (each * weight).sum(1) / weight.sum(1)
    scale = torch.arange(1, groups + 1, device="cuda")
    gradient, exact_gradient = (torch.autograd.grad((loss * scale).sum(), x)[0] for loss in (losses, exact))
    assert (losses - exact).abs().max() < 1e-5 and (gradient - exact_gradient).abs().max() < 1e-6
    alone = cuda_cross_entropy.cross_entropy(x[0], y[0], weight[0] if weighted else None)
    assert torch.equal(alone, losses[0])


class ConvReluPool(nn.Module):
    """A convolution with ReLU and pooling, by the kernel."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor) -> Tensor:
        return cuda_conv.conv_relu_pool(x, self.conv)


@pytest.mark.parametrize("pad", [0, 2])
def test_convolutions_of_many_networks(pad: int) -> None:
    """Under vmap, with weights that are rows of a longer vector; each network as alone."""
    convs = [nn.Conv2d(3, 6, 5, padding=pad).cuda() for _ in range(4)]
    flat = torch.stack(
        [torch.cat([torch.zeros(3, device="cuda"), *(p.detach().flatten() for p in c.parameters())]) for c in convs]
    )
    flat, x = flat.requires_grad_(), torch.randn(4, 20, 3, 32, 32, device="cuda")

    def one(w: Tensor, x: Tensor) -> Tensor:
        state = {"conv.weight": w[3:453].view(6, 3, 5, 5), "conv.bias": w[453:]}
        return functional_call(ConvReluPool(convs[0]), state, (x,))

    y = vmap(one)(flat, x)
    for n, conv in enumerate(convs):
        assert torch.equal(y[n], cuda_conv.conv_relu_pool(x[n], conv))
    weight = torch.randn_like(y)
    (gradient,) = torch.autograd.grad((y * weight).sum(), flat)
    for n, conv in enumerate(convs):
        loss = (cuda_conv.conv_relu_pool(x[n], conv) * weight[n]).sum()
        alone = torch.cat([g.flatten() for g in torch.autograd.grad(loss, tuple(conv.parameters()))])
        assert torch.allclose(gradient[n, 3:], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("inner", "out", "kernel", "pad"), [(3, 6, 5, 0), (6, 16, 5, 2)])
def test_padding_does_not_count(inner: int, out: int, kernel: int, pad: int) -> None:
    """Outputs of padding are finite; gradients are those of the real samples, bit for bit."""
    conv = nn.Conv2d(inner, out, kernel, padding=pad).cuda()
    real = torch.tensor([50, 17, 0, 1], dtype=torch.int32, device="cuda")
    x = torch.randn(4, 50, inner, 14, 14, device="cuda", requires_grad=True)
    flat = torch.randn(4, sum(p.numel() for p in conv.parameters()), device="cuda", requires_grad=True)
    is_real = (torch.arange(50, device="cuda") < real[:, None])[:, :, None, None, None]

    def one(w: Tensor, x: Tensor) -> Tensor:
        state = {"conv.weight": w[:-out].view(conv.weight.shape), "conv.bias": w[-out:]}
        return functional_call(ConvReluPool(conv), state, (x,))

    full = vmap(one)(flat, x)
    with real_samples(real, 50):
        without_padding = vmap(one)(flat, x)
    weight = torch.randn_like(full) * is_real
    assert torch.equal(full * is_real, without_padding * is_real) and bool(without_padding.isfinite().all())
    one_way, other_way = (torch.autograd.grad((y * weight).sum(), (flat, x)) for y in (full, without_padding))
    for a, b in zip(one_way, other_way, strict=True):
        assert torch.equal(a, b) and bool(a.any())


class LinearRelu(nn.Module):
    """A linear layer, and a ReLU if asked for, by the kernel."""

    def __init__(self, layer: nn.Linear, relu: bool) -> None:
        super().__init__()
        self.layer, self.relu = layer, relu

    def forward(self, x: Tensor) -> Tensor:
        return batched_linear.linear(x, self.layer, self.relu)


@pytest.mark.parametrize(
    ("groups", "batch", "inner", "out"), [(3, 50, 400, 120), (10, 256, 120, 84), (2, 7, 84, 10), (1, 100, 33, 70)]
)
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_linear_layers_of_many_networks(
    groups: int, batch: int, inner: int, out: int, relu: bool, padded: bool
) -> None:
    """Against products in float64, with weights that are rows of a longer vector; the same bits again."""
    layer, size = nn.Linear(inner, out).cuda(), inner * out
    flat = torch.randn(groups, 3 + size + out, device="cuda").requires_grad_()
    x = torch.randn(groups, batch, inner, device="cuda", requires_grad=True)
    assert batched_linear.can_launch(x, flat[:, 3 : 3 + size].view(groups, out, inner), batched_linear.MAX_WIDTH)
    real = torch.randint(batch + 1, (groups,), dtype=torch.int32, device="cuda")
    is_real = torch.ones(1, 1, 1, device="cuda")
    if padded:
        is_real = (torch.arange(batch, device="cuda") < real[:, None])[..., None]

    def one(w: Tensor, x: Tensor) -> Tensor:
        state = {"layer.weight": w[3 : 3 + size].view(out, inner), "layer.bias": w[3 + size :]}
        return functional_call(LinearRelu(layer, relu), state, (x,))

    def outputs() -> Tensor:
        with real_samples(real if padded else None, batch):
            return vmap(one)(flat, x)

    exact_flat, exact_x = exact = [t.detach().double().requires_grad_() for t in (flat, x)]
    exact_y = exact_x @ exact_flat[:, 3 : 3 + size].view(groups, out, inner).mT + exact_flat[:, None, 3 + size :]
    exact_y = exact_y.relu() if relu else exact_y
    weight, y = torch.randn(groups, batch, out, device="cuda") * is_real, outputs()
    gap = ((y - exact_y) * is_real).detach().abs().max()
    assert bool(y.isfinite().all()) and gap < 1e-5 * exact_y.detach().abs().max()
    gradients, again = (torch.autograd.grad((t * weight).sum(), (flat, x)) for t in (y, outputs()))
    exact_gradients = torch.autograd.grad((exact_y * weight).sum(), exact)
    for a, b, right in zip(gradients, again, exact_gradients, strict=True):
        assert torch.equal(a, b) and (a - right).abs().max() <= 1e-5 * right.abs().max()


def test_a_linear_layer_with_many_inputs() -> None:
    """In TF32 the kernel has the forward pass and cuBLAS the gradients."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    layer, x = nn.Linear(1600, 384).cuda(), torch.randn(3, 50, 1600, device="cuda", requires_grad=True)
    w = torch.randn(3, 384, 1600, device="cuda", requires_grad=True)
    one = lambda w, x: functional_call(LinearRelu(layer, True), {"layer.weight": w}, (x,))
    exact = [t.detach().double().requires_grad_() for t in (w, x)]
    y, exact_y = vmap(one)(w, x), (exact[1] @ exact[0].mT + layer.bias.detach().double()).relu()
    assert relative_error(y.detach(), exact_y.detach()) < 1e-3
    both = (y > 0) & (exact_y > 0)  # near 0 rounding decides what the ReLU lets through
    gradients = torch.autograd.grad((y * both).sum(), (w, x))
    for a, right in zip(gradients, torch.autograd.grad((exact_y * both).sum(), exact), strict=True):
        assert relative_error(a, right) < 5e-3


@pytest.mark.parametrize(("tf32", "within"), [(False, 1e-5), (True, 2e-3)])
def test_many_images_of_one_network_are_evaluated(tf32: bool, within: float) -> None:
    torch.backends.cudnn.allow_tf32 = tf32
    layers = nn.Conv2d(3, 64, 5).cuda(), nn.ReLU(), nn.MaxPool2d(2)
    x = torch.randn(600, 3, 32, 32, device="cuda")
    assert not cuda_conv.can_run(x, *layers)
    with torch.no_grad():
        assert cuda_conv.can_run(x, *layers) and not cuda_conv.can_run(x[:100], *layers)
        exact = F.max_pool2d(F.conv2d(x.double(), *(p.double() for p in layers[0].parameters())).relu(), 2)
        assert relative_error(cuda_conv.conv_relu_pool(x, layers[0]), exact) < within


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(
    ("images", "channels", "side", "groups"), [(5, 64, 32, 2), (3, 512, 4, 2), (1, 6, 3, 1), (2, 96, 7, 32)]
)
def test_group_norm_with_shortcut_and_relu(
    images: int, channels: int, side: int, groups: int, add: bool, relu: bool, dtype: torch.dtype
) -> None:
    """Against torch in float64, of numbers far from zero; the same bits again."""
    shape, norm = (images, channels, side, side), nn.GroupNorm(groups, channels).cuda()
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    last = lambda t: t.to(dtype).contiguous(memory_format=torch.channels_last).requires_grad_()
    x, shortcut = last(torch.randn(shape, device="cuda") * 2 + 30), last(torch.randn(shape, device="cuda"))
    parameters = [x, norm.weight, norm.bias, *([shortcut] if add else [])]
    assert group_norm.can_run(x, norm) and not group_norm.can_run(x.contiguous(), norm)
    outputs = lambda: group_norm.norm_relu(x, norm, relu, shortcut if add else None)
    exact = [t.detach().double().requires_grad_() for t in parameters]
    y, exact_y = outputs(), F.group_norm(exact[0], groups, exact[1], exact[2], norm.eps)
    exact_y = exact_y + exact[3] if add else exact_y
    exact_y = exact_y * (y > 0) if relu else exact_y
    within = 1e-5 if dtype == torch.float32 else 1e-2
    assert relative_error(y, exact_y.detach()) < within
    weight = torch.randn(shape, device="cuda").to(dtype)
    gradients, again = (torch.autograd.grad((t * weight).sum(), parameters) for t in (y, outputs()))
    for a, b, right in zip(gradients, again, torch.autograd.grad((exact_y * weight).sum(), exact), strict=True):
        assert torch.equal(a, b) and relative_error(a, right) < within


@pytest.mark.parametrize(("shape", "label"), [((3, 5, 4), ()), ((700,), (2,)), ((), (3000,))])
def test_batches_are_gathered_as_by_torch(
    shape: tuple[int, ...], label: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = torch.tensor([8, 8, 3, 8, 1, 8, 8, 8, 2, 5])
    examples = torch.randn(1, *shape).cuda(), torch.randint(9, (1, *label)).cuda()
    buffer = SampleBuffer(*examples, Needs(samples=60, batches=10, length=8), torch.float32, channels_last=False)
    buffer.x.copy_(torch.randn(buffer.x.shape))
    buffer.y.copy_(torch.randint(9, buffer.y.shape))
    column, begin = torch.arange(8), (lengths.cumsum(0) - lengths)[:, None]
    buffer.rows.copy_(begin + torch.minimum(column, lengths[:, None] - 1))
    buffer.weight.copy_((column < lengths[:, None]).float())
    buffer.lengths.copy_(lengths)
    numbers = lambda *values: torch.tensor(values).cuda()
    first, last = numbers(0, 3, 5), numbers(2, 4, 9)
    for k in range(5):
        cursor = cuda_gather.Cursor(first, last, numbers(3, 2, 5), torch.tensor(k).cuda())
        limit = cuda_gather.Cursor(first, last, numbers(5, 1, 3), torch.tensor(2).cuda())
        for length in (8, 4):
            by_kernel = cuda_gather.gather(buffer, cursor, limit, length)
            with monkeypatch.context() as patch:
                patch.setattr(cuda_gather, "available", lambda: False)
                by_torch = cuda_gather.gather(buffer, cursor, limit, length)
            assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(by_kernel, by_torch, strict=True))
            assert by_kernel.real.tolist() == [[8, 8, 3][k] if k < 3 else 0, 0, [8, 8, 8, 2, 5][k]]


@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize(
    ("groups", "batch", "times", "inputs", "units", "layers"),
    [
        (10, 10, 80, 8, 256, 2),
        (3, 5, 6, 4, 64, 2),
        (2, 10, 7, 8, 100, 2),
        (1, 1, 1, 3, 5, 1),
        (2, 17, 5, 3, 33, 3),
        (1, 33, 3, 8, 64, 2),
        (12, 70, 20, 8, 128, 1),
    ],
)
def test_lstm_layers(groups: int, batch: int, times: int, inputs: int, units: int, layers: int, tf32: bool) -> None:
    """Against torch in float64; a second time bit for bit the same."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = tf32
    within = 1e-2 if tf32 else 1e-5
    networks = [LastOutputLSTM(inputs, units, layers, batch_first=True).cuda().double() for _ in range(groups)]
    x = torch.randn((groups, batch, times, inputs), device="cuda", requires_grad=True)
    parameters = [
        torch.stack(same).detach().float().requires_grad_()
        for same in zip(*(network.parameters() for network in networks), strict=True)
    ]
    weight = torch.randn((groups, batch, units), device="cuda")

    def gradients() -> tuple[Tensor, tuple[Tensor, ...]]:
        y = vmap(lambda *given: batched_lstm._LSTM.apply(*given)[0])(x, *parameters)
        return y, torch.autograd.grad((y * weight).sum(), (x, *parameters))

    (y, found), (_, again) = gradients(), gradients()
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    for n, network in enumerate(networks):
        leaf = x[n].detach().double().requires_grad_()
        exact_y = network(leaf)
        exact = torch.autograd.grad((exact_y * weight[n]).sum(), (leaf, *network.parameters()))
        assert relative_error(y[n], exact_y) < within
        for a, b in zip(found, exact, strict=True):
            assert a[n].shape == b.shape and relative_error(a[n], b) < within


def test_lstm_layers_under_a_gradient() -> None:
    """vmap around a gradient, as in methods that take more than one in a step; a shared input."""
    layer = LastOutputLSTM(4, 20, 2, batch_first=True).cuda()
    stacked = {n: torch.stack((p.detach(), 2 * p.detach())) for n, p in layer.named_parameters()}
    x = torch.randn((6, 9, 4), device="cuda")

    def loss(state: dict[str, Tensor]) -> Tensor:
        y: Tensor = batched_lstm._LSTM.apply(x, *state.values())[0]
        return y.square().sum()

    found = vmap(torch.func.grad(loss))(stacked)
    for n in range(2):
        exact = copy.deepcopy(layer).double()
        with torch.no_grad():
            for name, parameter in exact.named_parameters():
                parameter.copy_(stacked[name][n])
        wanted = torch.autograd.grad(exact(x.double()).square().sum(), list(exact.parameters()))
        for name, gradient in zip(stacked, wanted, strict=True):
            assert relative_error(found[name][n], gradient) < 1e-5


@pytest.mark.parametrize(
    "changes",
    [
        {"pad": 4, "flip": True, "turn": 15.0},
        {"pad": 4, "flip": True, "fill": "mean", "chance": 0.5},
        {"pad": 4, "flip": True, "fill": "reflect"},
        {"crop": 28, "flip": True},
    ],
)
def test_images_are_changed_as_on_a_cpu(changes: dict[str, Any]) -> None:
    mean, std = torch.full((3, 1, 1), 0.45), torch.tensor([0.2, 0.25, 0.3]).view(3, 1, 1)
    transform = PixelTransform(mean, std, **changes)
    images, draws = torch.randint(256, (5000, 3, 32, 32), dtype=torch.uint8), sample_draws(seed=1, count=5000)
    on_gpu = transform.to(torch.device("cuda"))(images.cuda(), torch.float32, draws.cuda())
    assert torch.equal(on_gpu.cpu(), transform(images, torch.float32, draws))


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("clip", [math.inf, 1.5, 1e9])
@pytest.mark.parametrize("terms", [(), ("shift",), ("gain", "pull", "decay", "shift")])
@pytest.mark.parametrize("size", [3, 4095, 70001])
@pytest.mark.parametrize("idle", [False, True])
def test_affine_steps_of_rows(momentum: float, clip: float, terms: tuple[str, ...], size: int, idle: bool) -> None:
    """Against the same step in float64, which torch computes; a second time bit for bit the same."""
    zero = torch.zeros(3, device="cuda")
    steps = AffineRows(Client(zero, zero, {}, {}, {}, {}, 0.1, 0.1, momentum, 0.1, clip, 1.0, 1.0, 1.0, 1, 0.5))
    theta, v, g = (torch.randn(4, size, device="cuda") for _ in range(3))
    lr = torch.rand(4, 2, device="cuda")[:, 0]
    rule = {name: torch.randn_like(g) if name == "shift" else torch.rand(4, device="cuda") for name in terms}
    active = torch.tensor([True, False, True, True], device="cuda") if idle else None
    exact = [t.double() for t in (theta, v, g)]
    steps.take(exact[0], exact[1], exact[2], {name: t.double() for name, t in rule.items()}, lr.double(), active)
    one, other = ([t.clone() for t in (theta, v, g)] for _ in range(2))
    for rows in (one, other):
        steps.take(rows[0], rows[1], rows[2], rule, lr, active)
    assert all(relative_error(a, b) < 1e-6 for a, b in zip(one[:2], exact[:2], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert not idle or all(torch.equal(a[1], b[1]) for a, b in zip(one, (theta, v), strict=False))
