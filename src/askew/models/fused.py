"""Convolution, ReLU and 2×2 max-pooling in one kernel, for CUDA.

Small networks spend a GPU's time on many short kernels and on convolutions that cuDNN has no good kernel for (3 → 6
channels). Here the forward pass is one kernel that never writes what is pooled away, and the backward pass reads only the
pixel that was the largest of its four. The weights' gradient is summed in a fixed order, so results repeat bit for bit.
Where `counted` says how many samples of a batch are real, padding costs next to nothing.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ..core.entropy import available as available
from . import wide
from .conv import plain

WIDTH = 16  # channels at most: with more, four columns for each do not fit
TILE = 64  # pixels of patches, of all channels, at a time; forward no more than columns of weights, which are few in a first layer
FORWARD = (128, 4, 1)  # pixels of one program, its warps, and the stages of its loop
WEIGHTS = (8192, 4, 1)  # pixels times tile
INPUTS = (64, 4, 1)
PROGRAMS = 512  # of the weights' gradient, which is summed in parts: enough to fill the device
MOST_PARTS = 32


def fits(conv: nn.Module, relu: nn.Module, pool: nn.Module, *, many: bool = False) -> bool:
    """Is this what the kernels do? With many channels only for many networks at once, where they were measured."""
    if not plain(conv, relu, pool):
        return False
    ci, co, k, pad = conv.in_channels, conv.out_channels, conv.kernel_size[0], int(conv.padding[0])
    return (k <= 7 and pad <= 2 and max(ci, co) <= WIDTH) or (many and wide.fits(ci, co, k, pad))


def conv_relu_pool(x: Tensor, conv: nn.Conv2d) -> Tensor:
    """max_pool2d(relu(conv(x)), 2)."""
    y: Tensor = _ConvReluPool.apply(x, conv.weight, conv.bias, conv.padding[0])[0]  # type: ignore[no-untyped-call]
    return y


class _Counted:
    """How many samples are real in each network's batch of so many, where an engine knows."""

    real: Tensor | None = None
    batch = 0


@contextmanager
def counted(real: Tensor | None, batch: int) -> Iterator[None]:
    """Networks that are vmapped in here have batches of `batch` samples, of which only the first `real` [G] (int32) count.

    What the others are given as outputs is finite, and else of no account.
    """
    before = _Counted.real, _Counted.batch
    _Counted.real, _Counted.batch = real, batch
    try:
        yield
    finally:
        _Counted.real, _Counted.batch = before


def real_of(x: Tensor) -> Tensor | None:
    """The number of real samples in each batch of x [G, B, …]."""
    return _Counted.real if _Counted.real is not None and x.shape[:2] == (len(_Counted.real), _Counted.batch) else None


def rows_first(info: Any, dims: tuple[int | None, ...], tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """Each tensor with its vmapped dimension first."""
    return [
        t.expand(info.batch_size, *t.shape) if d is None else t.movedim(d, 0)
        for t, d in zip(tensors, dims, strict=True)
    ]


def dense(t: Tensor) -> Tensor:
    """Rows that are contiguous, each in itself: rows of a matrix may be apart."""
    return t if t[0].is_contiguous() else t.contiguous()


def precision() -> str:
    """Of products: TF32 where that is allowed, else three of them, which is as good as float32."""
    return "tf32" if torch.backends.cudnn.allow_tf32 else "tf32x3"


def padded(channels: int) -> int:
    """The next power of two, and four at least: what a product of matrices can take."""
    return max(4, 1 << (channels - 1).bit_length())


def forward(x: Tensor, w: Tensor, bias: Tensor, pad: int, real: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Pooled output and which of its four pixels each is; x [G, B, …], weights [G, …]: G networks at once."""
    half = x.is_cuda and torch.is_autocast_enabled("cuda")
    if max(w.shape[1:3]) > WIDTH:
        return wide.outputs(x, w, bias, real, precision(), half)
    x, w, bias = x.contiguous(), dense(w), dense(bias)
    groups, b, ci, h, wd = x.shape
    co, k = w.shape[1], w.shape[3]
    ho, wo = (h + 2 * pad - k + 1) // 2, (wd + 2 * pad - k + 1) // 2
    y = torch.empty((groups, b, co, ho, wo), dtype=torch.bfloat16 if half else x.dtype, device=x.device)
    which = torch.empty((groups, b, co, ho, wo), dtype=torch.uint8, device=x.device)
    total, (block, warps, stages) = b * ho * wo, FORWARD
    tile = min(TILE, 4 * padded(co))
    sizes = (
        total,
        w.stride(0),
        bias.stride(0),
        ci,
        h,
        wd,
        co,
        k,
        ho,
        wo,
        pad,
        block,
        padded(co),
        tile,
        precision(),
        real is not None,
    )
    _kernels().forward[(-(-total // block), groups)](
        x, w, bias, y, which, x if real is None else real, *sizes, num_warps=warps, num_stages=stages
    )
    return y, which


def backward(
    g: Tensor, x: Tensor, w: Tensor, which: Tensor, pad: int, inner: bool, real: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of weights, bias and, if `inner`, of the input."""
    if max(w.shape[1:3]) > WIDTH:
        return wide.slopes(g, x, w, which, inner, real, precision(), g.dtype is torch.bfloat16)
    kernels, g, x, w, which = _kernels(), g.contiguous(), x.contiguous(), dense(w), which.contiguous()
    groups, b, ci, h, wd = x.shape
    co, k = w.shape[1], w.shape[3]
    ho, wo = g.shape[3:]
    area, warps, stages = WEIGHTS
    patch = ci * (k + 1) ** 2 + 1  # and the one that the bias sees
    tile = 2 * TILE if TILE < patch <= 2 * TILE else TILE  # one tile reads what flows back once, two read it twice
    block = area // tile
    blocks, tiles = -(-b * ho * wo // block), -(-patch // tile)
    each = -(-blocks // max(8, min(MOST_PARTS, PROGRAMS // (groups * tiles))))
    parts = -(-blocks // each)
    partial = torch.empty((groups, 4 * parts, co * ci * k * k + co), dtype=torch.float32, device=x.device)
    shape = (
        b * ho * wo,
        each,
        parts,
        ci,
        h,
        wd,
        co,
        k,
        ho,
        wo,
        pad,
        block,
        padded(co),
        tile,
        precision(),
        real is not None,
    )
    counts = x if real is None else real
    kernels.weights[(parts * groups, tiles)](x, g, which, partial, counts, *shape, num_warps=warps, num_stages=stages)
    sums = partial.sum(1)
    dx = torch.empty_like(x) if inner else x.new_empty((groups, 0))
    if inner:
        rows, columns, (block, warps, stages) = (h + pad) // 2 + 1, (wd + pad) // 2 + 1, INPUTS
        sizes = (
            b,
            w.stride(0),
            rows,
            columns,
            ci,
            h,
            wd,
            co,
            k,
            ho,
            wo,
            pad,
            block,
            padded(co),
            padded(ci),
            precision(),
            real is not None,
        )
        kernels.inputs[(-(-b * rows * columns // block), groups)](
            g, which, w, dx, counts, *sizes, num_warps=warps, num_stages=stages
        )
    return sums[:, :-co].view(w.shape), sums[:, -co:], dx


class _Grouped(torch.autograd.Function):
    """Many networks at once."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, pad: int, real: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return forward(x, weight, bias, pad, real)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, weight, _, ctx.pad, *rest = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)  # no zeros for what has no gradient
        ctx.save_for_backward(x, weight, output[1], *rest)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inner = ctx.needs_input_grad[0]
        x, w, which, real = ctx.saved_tensors
        weight, bias, dx = backward(grads[0], x, w, which, ctx.pad, inner, real)
        return dx if inner else None, weight, bias, None, None


class _ConvReluPool(_Grouped):
    """One network, or one of those that are vmapped."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, pad: int) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        y, which = forward(x[None], weight[None], bias[None], pad)
        return y[0], which[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inner = ctx.needs_input_grad[0]
        weight, bias, x = _Backward.apply(grads[0], *ctx.saved_tensors, ctx.pad, inner)  # type: ignore[no-untyped-call]
        return x if inner else None, weight, bias, None

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], x: Tensor, weight: Tensor, bias: Tensor, pad: int) -> Any:
        x, weight, bias = rows_first(info, dims[:3], (x, weight, bias))
        return _Grouped.apply(x, weight, bias, pad, real_of(x)), (0, 0)  # type: ignore[no-untyped-call]


class _Backward(torch.autograd.Function):
    """The backward pass as a function of its own, so that it too can be vmapped."""

    @staticmethod
    def forward(g: Tensor, x: Tensor, weight: Tensor, which: Tensor, pad: int, inner: bool) -> tuple[Tensor, ...]:
        return tuple(t[0] for t in backward(g[None], x[None], weight[None], which[None], pad, inner))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Nothing is kept: there are no second derivatives."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError("a fused convolution has no second derivative")

    @staticmethod
    def vmap(
        info: Any,
        dims: tuple[int | None, ...],
        g: Tensor,
        x: Tensor,
        weight: Tensor,
        which: Tensor,
        pad: int,
        inner: bool,
    ) -> Any:
        g, x, weight, which = rows_first(info, dims[:4], (g, x, weight, which))
        return backward(g, x, weight, which, pad, inner), (0, 0, 0)


@cache
def _kernels() -> Any:
    """The kernels, compiled at first use."""
    import triton
    import triton.language as tl

    # Four convolutions lie below a pooled pixel, and they see a patch of (k+1)² pixels of every channel. So all four of all
    # channels are one product of patches with the weights in four places (column 4·out + place), and gradients, each put in
    # the column of the place that was the largest, go back by the same products transposed.
    loose = triton.jit(do_not_specialize=["total", "apart", "bias_apart", "blocks", "parts", "images"])

    @loose
    def forward(x, w, bias, y, which, real, total, apart, bias_apart,
                ci: tl.constexpr, h: tl.constexpr, wd: tl.constexpr, co: tl.constexpr, k: tl.constexpr, ho: tl.constexpr, wo: tl.constexpr,
                pad: tl.constexpr, BLOCK: tl.constexpr, OUT: tl.constexpr, TILE: tl.constexpr,
                exact: tl.constexpr, COUNTED: tl.constexpr):  # fmt: skip
        """A program has some pooled pixels of one network."""
        group = tl.program_id(1).to(tl.int64)
        x += group * (total // (ho * wo)) * (ci * h * wd)
        w += group * apart
        bias += group * bias_apart
        y += group * total * co
        which += group * total * co
        side: tl.constexpr = (k + 1) * (k + 1)
        at, column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, 4 * OUT)
        image, place, live = at // (ho * wo), at % (ho * wo), at < total
        top, left = (place // wo) * 2 - pad, (place % wo) * 2 - pad
        corner = image * (ci * h * wd) + top * wd + left
        acc, stop = tl.zeros((BLOCK, 4 * OUT), dtype=tl.float32), ci * side
        if COUNTED:
            stop = tl.where(tl.program_id(0) * BLOCK < tl.load(real + group) * (ho * wo), ci * side, 0)
        for start in range(0, stop, TILE):
            q = start + tl.arange(0, TILE)
            c, qy, qx = q // side, q % side // (k + 1), q % (k + 1)
            inside = live[:, None] & (c < ci)[None, :]
            if pad > 0:
                yy, xx = top[:, None] + qy[None, :], left[:, None] + qx[None, :]
                inside = inside & (yy >= 0) & (yy < h) & (xx >= 0) & (xx < wd)
            spots = corner[:, None] + (c * (h * wd) + qy * wd + qx)[None, :]
            patch = tl.load(x + spots, mask=inside, other=0.0).to(tl.float32)
            ky, kx = qy[:, None] - column[None, :] % 4 // 2, qx[:, None] - column[None, :] % 2
            seen = (c[:, None] < ci) & (column[None, :] < 4 * co) & (ky >= 0) & (ky < k) & (kx >= 0) & (kx < k)
            taps = w + ((column[None, :] // 4) * ci + c[:, None]) * (k * k) + ky * k + kx
            acc = tl.dot(patch, tl.load(taps, mask=seen, other=0.0).to(tl.float32), acc, input_precision=exact)
        even, odd = tl.split(tl.reshape(acc, (BLOCK, OUT, 2, 2)))
        a0, a2 = tl.split(even)
        a1, a3 = tl.split(odd)
        out = tl.arange(0, OUT)
        best, arg = a0, tl.zeros((BLOCK, OUT), dtype=tl.int32)
        arg = tl.where(a1 > best, 1, arg)
        best = tl.maximum(best, a1, tl.PropagateNan.ALL)
        arg = tl.where(a2 > best, 2, arg)
        best = tl.maximum(best, a2, tl.PropagateNan.ALL)
        arg = tl.where(a3 > best, 3, arg)
        best = (
            tl.maximum(best, a3, tl.PropagateNan.ALL)
            + tl.load(bias + out, mask=out < co, other=0.0).to(tl.float32)[None, :]
        )
        arg = tl.where(best > 0, arg, 4)  # 4: the ReLU is off, nothing flows back
        best = tl.where(best != best, best, tl.maximum(best, 0.0))
        spot = (image[:, None] * co + out[None, :]) * (ho * wo) + place[:, None]
        keep = live[:, None] & (out[None, :] < co)
        tl.store(y + spot, best, mask=keep)
        tl.store(which + spot, arg.to(tl.uint8), mask=keep)

    @loose
    def weights(x, g, which, partial, real, total, blocks, parts,
                ci: tl.constexpr, h: tl.constexpr, wd: tl.constexpr, co: tl.constexpr, k: tl.constexpr, ho: tl.constexpr, wo: tl.constexpr,
                pad: tl.constexpr, BLOCK: tl.constexpr, OUT: tl.constexpr, TILE: tl.constexpr,
                exact: tl.constexpr, COUNTED: tl.constexpr):  # fmt: skip
        """A program has some pooled pixels, and a tile of their patches, of one network. The bias sees a pixel that is one."""
        side: tl.constexpr = (k + 1) * (k + 1)
        group, first = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts
        x += group * (total // (ho * wo)) * (ci * h * wd)
        g += group * total * co
        which += group * total * co
        row, channel, q = tl.arange(0, 4 * OUT), tl.arange(0, OUT), tl.program_id(1) * TILE + tl.arange(0, TILE)
        out, c, qy, qx, one = row // 4, q // side, q % side // (k + 1), q % (k + 1), q == ci * side
        acc, stop = tl.zeros((4 * OUT, TILE), dtype=tl.float32), blocks
        if COUNTED:
            stop = tl.minimum(blocks, (tl.load(real + group) * (ho * wo) + BLOCK - 1) // BLOCK - first * blocks)
        for n in range(stop):
            at = (first * blocks + n) * BLOCK + tl.arange(0, BLOCK)
            image, place, live = at // (ho * wo), at % (ho * wo), at < total
            spot = (image * (co * ho * wo) + place)[None, :] + (channel * (ho * wo))[:, None]
            keep = live[None, :] & (channel[:, None] < co)
            arg = tl.load(which + spot, mask=keep, other=4).to(tl.int32)
            grad = tl.load(g + spot, mask=keep, other=0.0).to(tl.float32)
            top, left = (place // wo) * 2 - pad, (place % wo) * 2 - pad
            inside = live[:, None] & (c < ci)[None, :]
            if pad > 0:
                yy, xx = top[:, None] + qy[None, :], left[:, None] + qx[None, :]
                inside = inside & (yy >= 0) & (yy < h) & (xx >= 0) & (xx < wd)
            spots = (image * (ci * h * wd) + top * wd + left)[:, None] + (c * (h * wd) + qy * wd + qx)[None, :]
            patch = tl.load(x + spots, mask=inside, other=0.0).to(tl.float32)
            patch = tl.where(one[None, :], 1.0, patch)
            placed = tl.where(arg[:, None, :] == tl.arange(0, 4)[None, :, None], grad[:, None, :], 0.0)
            acc = tl.dot(tl.reshape(placed, (4 * OUT, BLOCK)), patch, acc, input_precision=exact)
        base = partial + (tl.program_id(0).to(tl.int64) * 4 + row[:, None] % 4) * (co * ci * k * k + co)
        ky, kx = qy[None, :] - row[:, None] % 4 // 2, qx[None, :] - row[:, None] % 2
        mine = (row[:, None] < 4 * co) & (c[None, :] < ci) & (ky >= 0) & (ky < k) & (kx >= 0) & (kx < k)
        tl.store(base + (out[:, None] * ci + c[None, :]) * (k * k) + ky * k + kx, acc, mask=mine)
        tl.store(
            base + co * ci * k * k + out[:, None] + q[None, :] * 0, acc, mask=(row[:, None] < 4 * co) & one[None, :]
        )

    @loose
    def inputs(g, which, w, dx, real, images, apart,
               rows: tl.constexpr, columns: tl.constexpr, ci: tl.constexpr, h: tl.constexpr, wd: tl.constexpr, co: tl.constexpr,
               k: tl.constexpr, ho: tl.constexpr, wo: tl.constexpr, pad: tl.constexpr,
               BLOCK: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr, exact: tl.constexpr, COUNTED: tl.constexpr):  # fmt: skip
        """A program has some squares of 2×2 pixels, of all input channels of one network: what the pooled pixels above send back.

        Of the pooled pixel that is so and so far away, all squares see the same weights: one product of what it sends back,
        in the four places (row 4·out + place), with the weights of the square's four pixels (column 4·in + pixel).
        """
        group = tl.program_id(1).to(tl.int64)
        g += group * images * (co * ho * wo)
        which += group * images * (co * ho * wo)
        w += group * apart
        dx += group * images * (ci * h * wd)
        at, channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, OUT)
        row, column = tl.arange(0, 4 * OUT), tl.arange(0, 4 * IN)
        image, live = at // (rows * columns), at < images * rows * columns
        half_y, half_x = at % (rows * columns) // columns, at % columns
        acc, stop = tl.zeros((BLOCK, 4 * IN), dtype=tl.float32), ((k + 2) // 2) * ((k + 2) // 2)
        if COUNTED:
            stop = tl.where(tl.program_id(0) * BLOCK < tl.load(real + group) * (rows * columns), stop, 0)
        for near in range(stop):
            ny, nx = near // ((k + 2) // 2), near % ((k + 2) // 2)
            py, px = half_y - ny, half_x - nx
            there = live & (py >= 0) & (px >= 0) & (py < ho) & (px < wo)
            above = (image * (co * ho * wo) + py * wo + px)[:, None] + (channel * (ho * wo))[None, :]
            keep = there[:, None] & (channel[None, :] < co)
            arg = tl.load(which + above, mask=keep, other=4).to(tl.int32)
            grad = tl.load(g + above, mask=keep, other=0.0).to(tl.float32)
            placed = tl.where(arg[:, :, None] == tl.arange(0, 4)[None, None, :], grad[:, :, None], 0.0)
            ky = (column % 4 // 2)[None, :] + 2 * ny - (row % 4 // 2)[:, None]
            kx = (column % 2)[None, :] + 2 * nx - (row % 2)[:, None]
            seen = (row < 4 * co)[:, None] & (column < 4 * ci)[None, :] & (ky >= 0) & (ky < k) & (kx >= 0) & (kx < k)
            taps = w + ((row // 4)[:, None] * ci + (column // 4)[None, :]) * (k * k) + ky * k + kx
            weight = tl.load(taps, mask=seen, other=0.0).to(tl.float32)
            acc = tl.dot(tl.reshape(placed, (BLOCK, 4 * OUT)), weight, acc, input_precision=exact)
        y, x = (
            (half_y * 2 - pad)[:, None] + (column % 4 // 2)[None, :],
            (half_x * 2 - pad)[:, None] + (column % 2)[None, :],
        )
        inside = live[:, None] & (column < 4 * ci)[None, :] & (y >= 0) & (y < h) & (x >= 0) & (x < wd)
        tl.store(dx + (image[:, None] * ci + (column // 4)[None, :]) * (h * wd) + y * wd + x, acc, mask=inside)

    return SimpleNamespace(forward=forward, weights=weights, inputs=inputs)
