"""The fused kernels against the layers they replace."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap

from askew.core import entropy
from askew.engine import gather
from askew.engine.jobs import SampleBuffer
from askew.models import fused, linears

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


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
def test_values_and_gradients(shape: tuple[int, ...], out: int, kernel: int, pad: int) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(shape[1], out, kernel, padding=pad).cuda()
    assert fused.fits(conv, nn.ReLU(), nn.MaxPool2d(2))
    x = torch.randn(shape, device="cuda", requires_grad=True)
    double = nn.Conv2d(shape[1], out, kernel, padding=pad).cuda().double()
    double.load_state_dict(conv.state_dict())
    wide = x.detach().double().requires_grad_()
    torch.backends.cudnn.allow_tf32 = False
    ours = fused.conv_relu_pool(x, conv)
    theirs = F.max_pool2d(double(wide).relu(), 2)
    weight = torch.randn_like(ours)
    mine = torch.autograd.grad((ours * weight).sum(), (x, conv.weight, conv.bias))
    true = torch.autograd.grad((theirs * weight.double()).sum(), (wide, double.weight, double.bias))
    assert (ours - theirs).abs().max() < 1e-5
    for a, b in zip(mine, true, strict=True):
        assert a.shape == b.shape and float((a - b).abs().max() / b.abs().max()) < 1e-5
    again = torch.autograd.grad((fused.conv_relu_pool(x, conv) * weight).sum(), (x, conv.weight, conv.bias))
    assert all(torch.equal(a, b) for a, b in zip(mine, again, strict=True))


def chosen(before: Tensor, which: Tensor) -> Tensor:
    """Of every four pixels the chosen one, or nothing: of two that are almost equal, rounding decides which has the slope."""
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
    torch.manual_seed(0)
    convs = [nn.Conv2d(shape[1], out, kernel).cuda() for _ in range(groups)]
    assert fused.fits(convs[0], nn.ReLU(), nn.MaxPool2d(2), many=True) and not fused.fits(
        convs[0], nn.ReLU(), nn.MaxPool2d(2)
    )
    w, bias = (
        torch.stack([getattr(conv, name).detach() for conv in convs]).requires_grad_() for name in ("weight", "bias")
    )
    x = torch.randn((groups, *shape), device="cuda", requires_grad=True)
    real = torch.arange(groups, device="cuda", dtype=torch.int32) % shape[0] + 1 if counted else None
    torch.backends.cudnn.allow_tf32 = False
    ours, which = fused._Grouped.apply(x, w, bias, 0, real)
    doubles = [t.detach().double().requires_grad_() for t in (x, w, bias)]
    before = torch.stack([F.conv2d(*each) for each in zip(*doubles, strict=True)])
    theirs, weight = chosen(before, which), torch.randn_like(ours)
    right = torch.stack([F.max_pool2d(each.relu(), 2) for each in before])
    if real is not None:
        seen = (torch.arange(shape[0], device="cuda")[None] < real[:, None])[..., None, None, None]
        weight, ours, theirs, right = (t * seen for t in (weight, ours, theirs, right))
    assert (ours - right).abs().max() < 1e-5
    mine = torch.autograd.grad((ours * weight).sum(), (x, w, bias), retain_graph=True)
    for a, b in zip(mine, torch.autograd.grad((theirs * weight.double()).sum(), doubles), strict=True):
        assert a.shape == b.shape and float((a - b).abs().max() / b.abs().max()) < 1e-5
    again = torch.autograd.grad((ours * weight).sum(), (x, w, bias))
    assert all(torch.equal(a, b) for a, b in zip(mine, again, strict=True))


@pytest.mark.parametrize("half", [False, True])
def test_lower_precision(half: bool) -> None:
    torch.manual_seed(0)
    conv, x = nn.Conv2d(3, 6, 5).cuda(), torch.randn(64, 3, 32, 32, device="cuda")
    before, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, True
    with torch.autocast("cuda", torch.bfloat16, enabled=half):
        ours = fused.conv_relu_pool(x, conv)
    torch.backends.cudnn.allow_tf32 = before
    theirs = F.max_pool2d(conv.double()(x.double()).relu(), 2)
    assert ours.dtype == (torch.bfloat16 if half else torch.float32)
    assert (ours - theirs).abs().max() < (0.02 if half else 5e-3)


def test_nothing_passes_where_the_relu_is_off() -> None:
    conv = nn.Conv2d(1, 4, 3).cuda()
    nn.init.constant_(conv.bias, -100.0)
    x = torch.randn(3, 1, 8, 8, device="cuda", requires_grad=True)
    y = fused.conv_relu_pool(x, conv)
    gx, gw = torch.autograd.grad(y.sum(), (x, conv.weight))
    assert not y.any() and not gx.any() and not gw.any()


@pytest.mark.parametrize(("groups", "batch", "classes"), [(3, 50, 10), (2, 7, 3), (5, 256, 100), (1, 5, 600)])
@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy_of_many_batches(groups: int, batch: int, classes: int, weighted: bool) -> None:
    torch.manual_seed(0)
    x = (5 * torch.randn(groups, batch, classes, device="cuda")).requires_grad_()
    y = torch.randint(classes, (groups, batch), device="cuda")
    weight = (
        (torch.rand(groups, batch, device="cuda") > 0.3).float()
        if weighted
        else torch.ones(groups, batch, device="cuda")
    )
    weight[:, 0] = 1
    assert entropy.fits(x[0], y[0])
    ours = vmap(lambda x, y, w: entropy.cross_entropy(x, y, w if weighted else None))(x, y, weight)
    each = F.cross_entropy(x.double().flatten(0, 1), y.flatten(), reduction="none").view(groups, batch)
    theirs = (each * weight).sum(1) / weight.sum(1)
    scale = torch.arange(1, groups + 1, device="cuda")
    mine, true = (torch.autograd.grad((loss * scale).sum(), x)[0] for loss in (ours, theirs))
    assert (ours - theirs).abs().max() < 1e-5 and (mine - true).abs().max() < 1e-6
    alone = entropy.cross_entropy(x[0], y[0], weight[0] if weighted else None)
    assert torch.equal(alone, ours[0])


@pytest.mark.parametrize("pad", [0, 2])
def test_many_networks_at_once(pad: int) -> None:
    """Under vmap, with weights that are rows of a longer vector."""
    torch.manual_seed(0)
    convs = [nn.Conv2d(3, 6, 5, padding=pad).cuda() for _ in range(4)]
    flat = torch.stack(
        [torch.cat([torch.zeros(3, device="cuda"), *(p.detach().flatten() for p in c.parameters())]) for c in convs]
    )
    flat, x = flat.requires_grad_(), torch.randn(4, 20, 3, 32, 32, device="cuda")

    def one(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        state = {"weight": w[3:453].view(6, 3, 5, 5), "bias": w[453:]}
        return functional_call(Fused(convs[0]), {f"conv.{n}": v for n, v in state.items()}, (x,))

    ours = vmap(one)(flat, x)
    for n, conv in enumerate(convs):
        assert torch.equal(ours[n], fused.conv_relu_pool(x[n], conv))
    weight = torch.randn_like(ours)
    (mine,) = torch.autograd.grad((ours * weight).sum(), flat)
    for n, conv in enumerate(convs):
        grads = torch.autograd.grad((fused.conv_relu_pool(x[n], conv) * weight[n]).sum(), tuple(conv.parameters()))
        assert torch.allclose(mine[n, 3:], torch.cat([g.flatten() for g in grads]), rtol=1e-4, atol=1e-4)


class Fused(nn.Module):
    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return fused.conv_relu_pool(x, self.conv)


@pytest.mark.parametrize(("inner", "out", "kernel", "pad"), [(3, 6, 5, 0), (6, 16, 5, 2)])
def test_padding_is_of_no_account(inner: int, out: int, kernel: int, pad: int) -> None:
    """Where samples do not count, outputs are finite; gradients are those of the samples that do, bit for bit."""
    torch.manual_seed(0)
    conv, real = (
        nn.Conv2d(inner, out, kernel, padding=pad).cuda(),
        torch.tensor([50, 17, 0, 1], dtype=torch.int32, device="cuda"),
    )
    x = torch.randn(4, 50, inner, 14, 14, device="cuda", requires_grad=True)
    flat = torch.randn(4, sum(p.numel() for p in conv.parameters()), device="cuda", requires_grad=True)
    counts = (torch.arange(50, device="cuda") < real[:, None])[:, :, None, None, None]

    def one(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        state = {"conv.weight": w[:-out].view(conv.weight.shape), "conv.bias": w[-out:]}
        return functional_call(Fused(conv), state, (x,))

    whole = vmap(one)(flat, x)
    with fused.counted(real, 50):
        some = vmap(one)(flat, x)
    weight = torch.randn_like(whole) * counts
    assert torch.equal(whole * counts, some * counts) and bool(some.isfinite().all())
    for a, b in zip(*(torch.autograd.grad((y * weight).sum(), (flat, x)) for y in (whole, some)), strict=True):
        assert torch.equal(a, b) and bool(a.any())


class Line(nn.Module):
    def __init__(self, layer: nn.Linear, relu: bool) -> None:
        super().__init__()
        self.layer, self.relu = layer, relu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linears.linear(x, self.layer, self.relu)


@pytest.mark.parametrize(
    ("groups", "batch", "inner", "out"), [(3, 50, 400, 120), (10, 256, 120, 84), (2, 7, 84, 10), (1, 100, 33, 70)]
)
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_linear_layers_of_many_networks(
    groups: int, batch: int, inner: int, out: int, relu: bool, padded: bool
) -> None:
    """Against products in float64, with weights that are rows of a longer vector; the same bits again."""
    torch.manual_seed(0)
    layer, size = nn.Linear(inner, out).cuda(), inner * out
    flat = torch.randn(groups, 3 + size + out, device="cuda").requires_grad_()
    x = torch.randn(groups, batch, inner, device="cuda", requires_grad=True)
    assert linears.fits(x, flat[:, 3 : 3 + size].view(groups, out, inner))
    real = torch.randint(batch + 1, (groups,), dtype=torch.int32, device="cuda")
    counts = (
        (torch.arange(batch, device="cuda") < real[:, None])[..., None]
        if padded
        else torch.ones(1, 1, 1, device="cuda")
    )

    def one(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return functional_call(
            Line(layer, relu), {"layer.weight": w[3 : 3 + size].view(out, inner), "layer.bias": w[3 + size :]}, (x,)
        )

    def ours() -> torch.Tensor:
        with fused.counted(real if padded else None, batch):
            return vmap(one)(flat, x)

    before, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, False
    exact = [t.detach().double().requires_grad_() for t in (flat, x)]
    theirs = exact[1] @ exact[0][:, 3 : 3 + size].view(groups, out, inner).mT + exact[0][:, None, 3 + size :]
    theirs = theirs.relu() if relu else theirs
    weight, y = torch.randn(groups, batch, out, device="cuda") * counts, ours()
    apart = ((y - theirs) * counts).detach().abs().max()
    assert bool(y.isfinite().all()) and apart < 1e-5 * theirs.detach().abs().max()
    mine, again = (torch.autograd.grad((t * weight).sum(), (flat, x)) for t in (y, ours()))
    for a, b, true in zip(mine, again, torch.autograd.grad((theirs * weight).sum(), exact), strict=True):
        assert torch.equal(a, b) and (a - true).abs().max() <= 1e-5 * true.abs().max()
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize(("shape", "label"), [((3, 5, 4), ()), ((700,), (2,)), ((), (3000,))])
def test_batches_are_taken_as_torch_takes_them(
    shape: tuple[int, ...], label: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = torch.tensor([8, 8, 3, 8, 1, 8, 8, 8, 2, 5])
    feed = SampleBuffer(
        torch.randn(60, *shape).cuda(), torch.randint(9, (60, *label)).cuda(), 60, 10, 8, torch.float32, False
    )
    feed.x.copy_(torch.randn(feed.x.shape))
    feed.y.copy_(torch.randint(9, feed.y.shape))
    column, begin = torch.arange(8), (lengths.cumsum(0) - lengths)[:, None]
    feed.rows.copy_(begin + torch.minimum(column, lengths[:, None] - 1))
    feed.weight.copy_((column < lengths[:, None]).float())
    feed.lengths.copy_(lengths)
    on = lambda *values: torch.tensor(values).cuda()
    first, last = on(0, 3, 5), on(2, 4, 9)
    for k in range(5):
        reach = gather.Reach(first, last, on(3, 2, 5), torch.tensor(k).cuda())
        limit = gather.Reach(first, last, on(5, 1, 3), torch.tensor(2).cuda())
        for span in (8, 4):
            ours = gather.take(feed, reach, limit, span)
            with monkeypatch.context() as patch:
                patch.setattr(gather, "available", lambda: False)
                theirs = gather.take(feed, reach, limit, span)
            assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(ours, theirs, strict=True))
            assert ours.real.tolist() == [[8, 8, 3][k] if k < 3 else 0, 0, [8, 8, 8, 2, 5][k]]
