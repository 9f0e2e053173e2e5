"""Convolution, ReLU and 2×2 max-pooling in one kernel, for CUDA.

Small networks spend a GPU's time on many short kernels and on convolutions that cuDNN has no good kernel for (3 → 6
channels). Here the forward pass is one kernel that never writes what is pooled away, and the backward pass reads only the
pixel that was the largest of its four. The weights' gradient is summed in a fixed order, so results repeat bit for bit.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

PIXELS = 32  # pixels of one program, one to a thread: many small programs, since a batch is small
CHANNELS = 4  # output channels of one program of the forward pass
DEPTH = 8  # input channels of one program of the backward pass
MOST_PARTS = 64  # partial sums of the weights' gradient


@cache
def available() -> bool:
    """Can kernels be compiled here?"""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return torch.cuda.is_available()


def fits(conv: nn.Module, relu: nn.Module, pool: nn.Module) -> bool:
    """Is this what the kernels do?"""
    return (
        type(conv) is nn.Conv2d
        and type(relu) is nn.ReLU
        and type(pool) is nn.MaxPool2d
        and pool.kernel_size == pool.stride == 2
        and pool.padding == 0
        and conv.stride == conv.dilation == (1, 1)
        and conv.groups == 1
        and conv.bias is not None
        and conv.padding_mode == "zeros"
        and conv.kernel_size[0] == conv.kernel_size[1] <= 7
        and conv.padding in ((0, 0), (1, 1), (2, 2))
        and max(conv.in_channels, conv.out_channels) <= 16  # above, cuDNN's matrix kernels are better
    )


def conv_relu_pool(x: Tensor, conv: nn.Conv2d) -> Tensor:
    """max_pool2d(relu(conv(x)), 2)."""
    y: Tensor = _ConvReluPool.apply(x, conv.weight, conv.bias, conv.padding[0])  # type: ignore[no-untyped-call]
    return y


class _ConvReluPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, pad: int) -> Tensor:
        half = x.is_cuda and torch.is_autocast_enabled("cuda")
        x, w = x.contiguous(), weight.contiguous()
        b, ci, h, wd = x.shape
        co, _, k, _ = w.shape
        ho, wo = (h + 2 * pad - k + 1) // 2, (wd + 2 * pad - k + 1) // 2
        y = torch.empty((b, co, ho, wo), dtype=torch.bfloat16 if half else x.dtype, device=x.device)
        which = torch.empty((b, co, ho, wo), dtype=torch.uint8, device=x.device)
        total = b * ho * wo
        grid = (-(-total // PIXELS), -(-co // CHANNELS))
        _kernels().forward[grid](x, w, bias, y, which, total, ci, h, wd, co, k, ho, wo, pad, PIXELS, CHANNELS, num_warps=1)
        ctx.save_for_backward(x, w, which)
        ctx.pad = pad
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, w, which = ctx.saved_tensors
        kernels, pad, g = _kernels(), ctx.pad, grads[0].contiguous()
        b, ci, h, wd = x.shape
        co, _, k, _ = w.shape
        ho, wo = g.shape[2:]
        blocks = -(-b * ho * wo // (2 * PIXELS))
        each = -(-blocks // MOST_PARTS)
        parts = -(-blocks // each)
        partial = torch.empty((parts, co * ci * k * k + co), dtype=torch.float32, device=x.device)
        shape = (b * ho * wo, each, ci, h, wd, co, k, ho, wo, pad, 2 * PIXELS)
        kernels.weights[(parts, co, ci)](x, g, which, partial, *shape, num_warps=2)
        sums = partial.sum(0)
        dx = None
        if ctx.needs_input_grad[0]:
            dx, pixels = torch.empty_like(x), b * h * wd
            grid = (-(-pixels // PIXELS), -(-ci // DEPTH))
            kernels.inputs[grid](g, which, w, dx, pixels, ci, h, wd, co, k, ho, wo, pad, PIXELS, DEPTH, num_warps=1)
        return dx, sums[:-co].view(w.shape), sums[-co:], None


@cache
def _kernels() -> Any:
    """The kernels, compiled at first use."""
    import triton
    import triton.language as tl

    @triton.jit
    def forward(x, w, bias, y, which, total,
                ci: tl.constexpr, h: tl.constexpr, wd: tl.constexpr, co: tl.constexpr, k: tl.constexpr, ho: tl.constexpr, wo: tl.constexpr,
                pad: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr):  # fmt: skip
        """A thread has one pooled pixel: the four convolutions below it, for several output channels."""
        at = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
        out = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
        image, place = at // (ho * wo), at % (ho * wo)
        top, left, live = (place // wo) * 2 - pad, (place % wo) * 2 - pad, at < total
        a0 = tl.zeros((PIXELS, CHANNELS), dtype=tl.float32)
        a1 = tl.zeros((PIXELS, CHANNELS), dtype=tl.float32)
        a2 = tl.zeros((PIXELS, CHANNELS), dtype=tl.float32)
        a3 = tl.zeros((PIXELS, CHANNELS), dtype=tl.float32)
        for c in range(ci):
            for ky in tl.static_range(k):
                row = x + ((image * ci + c) * h + top + ky) * wd + left
                up, low = live & (top + ky >= 0) & (top + ky < h), live & (top + ky + 1 >= 0) & (top + ky + 1 < h)
                u = tl.load(row, mask=up & (left >= 0), other=0.0).to(tl.float32)
                v = tl.load(row + wd, mask=low & (left >= 0), other=0.0).to(tl.float32)
                for kx in tl.static_range(k):
                    inside = (left + kx + 1 >= 0) & (left + kx + 1 < wd)
                    u1 = tl.load(row + kx + 1, mask=up & inside, other=0.0).to(tl.float32)
                    v1 = tl.load(row + wd + kx + 1, mask=low & inside, other=0.0).to(tl.float32)
                    wt = tl.load(w + ((out * ci + c) * k + ky) * k + kx, mask=out < co, other=0.0).to(tl.float32)[None, :]
                    a0 += u[:, None] * wt
                    a1 += u1[:, None] * wt
                    a2 += v[:, None] * wt
                    a3 += v1[:, None] * wt
                    u, v = u1, v1
        best, arg = a0, tl.zeros((PIXELS, CHANNELS), dtype=tl.int32)
        arg = tl.where(a1 > best, 1, arg)
        best = tl.maximum(best, a1)
        arg = tl.where(a2 > best, 2, arg)
        best = tl.maximum(best, a2)
        arg = tl.where(a3 > best, 3, arg)
        best = tl.maximum(best, a3) + tl.load(bias + out, mask=out < co, other=0.0).to(tl.float32)[None, :]
        arg = tl.where(best > 0, arg, 4)  # 4: the ReLU is off, nothing flows back
        best = tl.where(best != best, best, tl.maximum(best, 0.0))
        spot = (image[:, None] * co + out[None, :]) * (ho * wo) + place[:, None]
        keep = live[:, None] & (out[None, :] < co)
        tl.store(y + spot, best, mask=keep)
        tl.store(which + spot, arg.to(tl.uint8), mask=keep)

    @triton.jit
    def weights(x, g, which, partial, total, blocks,
                ci: tl.constexpr, h: tl.constexpr, wd: tl.constexpr, co: tl.constexpr, k: tl.constexpr, ho: tl.constexpr, wo: tl.constexpr,
                pad: tl.constexpr, PIXELS: tl.constexpr):  # fmt: skip
        """A program has some pooled pixels, one output channel and one input channel."""
        out, c = tl.program_id(1), tl.program_id(2)
        tap = tl.arange(0, 64)  # k·k weights, and the bias in the place after the last one
        ky, kx = tap // k, tap % k
        acc = tl.zeros((PIXELS, 64), dtype=tl.float32)
        for n in range(blocks):
            at = (tl.program_id(0) * blocks + n) * PIXELS + tl.arange(0, PIXELS)
            image, place, live = at // (ho * wo), at % (ho * wo), at < total
            spot = (image * co + out) * (ho * wo) + place
            arg = tl.load(which + spot, mask=live, other=4).to(tl.int32)
            grad = tl.load(g + spot, mask=live, other=0.0).to(tl.float32)
            grad = tl.where(arg < 4, grad, 0.0)
            yy = ((place // wo) * 2 + arg // 2 - pad)[:, None] + ky[None, :]
            xx = ((place % wo) * 2 + arg % 2 - pad)[:, None] + kx[None, :]
            inside = (live & (arg < 4))[:, None] & (tap[None, :] < k * k) & (yy >= 0) & (yy < h) & (xx >= 0) & (xx < wd)
            patch = tl.load(x + ((image * ci + c) * (h * wd))[:, None] + yy * wd + xx, mask=inside, other=0.0).to(tl.float32)
            acc += grad[:, None] * tl.where(tap[None, :] == k * k, 1.0, patch)
        base, told = partial + tl.program_id(0) * (co * ci * k * k + co), tl.sum(acc, 0)
        tl.store(base + (out * ci + c) * (k * k) + tap, told, mask=tap < k * k)
        tl.store(base + co * ci * k * k + out + tap * 0, told, mask=(tap == k * k) & (tap * 0 + c == 0))

    @triton.jit
    def inputs(g, which, w, dx, pixels,
               ci: tl.constexpr, h: tl.constexpr, wd: tl.constexpr, co: tl.constexpr, k: tl.constexpr, ho: tl.constexpr, wo: tl.constexpr,
               pad: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr):  # fmt: skip
        """A thread has one pixel of some input channels: what the pooled pixels above it send back."""
        at = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
        into = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
        image, place, live = at // (h * wd), at % (h * wd), at < pixels
        y, x = place // wd + pad, place % wd + pad
        acc = tl.zeros((PIXELS, CHANNELS), dtype=tl.float32)
        for pair in range(0, co, 2):
            for other in tl.static_range(2):  # two at a time: each waits for memory twice
                out = pair + other
                plane = (image * co + out) * (ho * wo)
                for ny in tl.static_range((k + 2) // 2):
                    py = y // 2 - ny
                    for nx in tl.static_range((k + 2) // 2):
                        px = x // 2 - nx
                        there = live & (py >= 0) & (px >= 0) & (py < ho) & (px < wo) & (px * 0 + out < co)
                        arg = tl.load(which + plane + py * wo + px, mask=there, other=4).to(tl.int32)
                        grad = tl.load(g + plane + py * wo + px, mask=there, other=0.0).to(tl.float32)
                        ky, kx = y - py * 2 - arg // 2, x - px * 2 - arg % 2
                        there = there & (arg < 4) & (ky >= 0) & (ky < k) & (kx >= 0) & (kx < k)
                        tap = w + (out * ci + into)[None, :] * (k * k) + (ky * k + kx)[:, None]
                        wt = tl.load(tap, mask=there[:, None] & (into[None, :] < ci), other=0.0).to(tl.float32)
                        acc += grad[:, None] * wt
        spot = (image[:, None] * ci + into[None, :]) * (h * wd) + place[:, None]
        tl.store(dx + spot, acc, mask=live[:, None] & (into[None, :] < ci))

    return SimpleNamespace(forward=forward, weights=weights, inputs=inputs)
