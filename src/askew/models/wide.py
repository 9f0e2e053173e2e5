"""Convolution, ReLU and 2×2 max-pooling of many networks at once, with channels enough for matrix units, for CUDA.

cuDNN trains one network at a time: a batch of fifty fills a GPU badly, and of the first layer's three channels it makes
nothing of matrix units. Here images lie channels-last, so that a pixel's channels, and a row of a filter, are a run of
numbers; four pixels that are pooled are four rows of one product. What flows back goes to the largest of the four.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

WIDTHS = (32, 64, 128)  # channels of the output
FORWARD = (128, 32, 8, 3)  # pixels of one program, inputs at a time, its warps, and the stages of its loop
WEIGHTS = (64, 64, 4, 3)  # pixels at a time, inputs of one program
FIRST = (32, 128, 4, 4)  # the same where rows of filters are short
INPUTS = (64, 32, 4, 3)  # pixels of one program, outputs at a time, the fewest of WIDTHS
PROGRAMS = 512  # of the weights' gradient, which is summed in parts: enough to fill the device


def fits(ci: int, co: int, k: int, pad: int) -> bool:
    """Is this what the kernels do?"""
    return co in WIDTHS and pad == 0 and (ci in WIDTHS or k * ci <= 16)


def last(t: Tensor) -> Tensor:
    """[…, channels, height, width] with the channels last, and contiguous."""
    return t.movedim(-3, -1).contiguous()


def first(t: Tensor) -> Tensor:
    return t.movedim(-1, -3)


def outputs(x: Tensor, w: Tensor, bias: Tensor, real: Tensor | None, exact: str, half: bool) -> tuple[Tensor, Tensor]:
    """Pooled output and which of its four pixels each is; x [G, B, …], weights [G, …]: G networks at once."""
    x, w, bias = last(x), last(w), bias.contiguous()
    groups, b, h, wd, ci = x.shape
    co, k = w.shape[1:3]
    ho, wo = (h - k + 1) // 2, (wd - k + 1) // 2
    y = torch.empty((groups, b, ho, wo, co), dtype=torch.bfloat16 if half else x.dtype, device=x.device)
    which = torch.empty(y.shape, dtype=torch.uint8, device=x.device)
    block, step, warps, stages = FORWARD
    total, step = b * ho * wo, 16 if k * ci <= 16 else step
    sizes = (total, ci, h, wd, co, k, ho, wo, block, step, exact, half, real is not None)
    grid = (-(-4 * total // block), groups)
    _kernels().forward[grid](
        x, w, bias, y, which, x if real is None else real, *sizes, num_warps=warps, num_stages=stages
    )
    return first(y), first(which)


def slopes(
    g: Tensor, x: Tensor, w: Tensor, which: Tensor, inner: bool, real: Tensor | None, exact: str, half: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of weights, bias and, if `inner`, of the input."""
    g, x, which, kernels = last(g), last(x), last(which), _kernels()
    groups, b, h, wd, ci = x.shape
    co, k = w.shape[1], w.shape[3]
    ho, wo = g.shape[2:4]
    total, counts = b * ho * wo, x if real is None else real
    run = k * ci
    block, tile, warps, stages = WEIGHTS if run > 16 else FIRST
    tiles = -(-k * max(run, 16) // tile)
    blocks = -(-4 * total // block)
    each = -(-blocks // max(1, PROGRAMS // (groups * tiles)))
    parts = -(-blocks // each)
    partial = torch.empty((groups, parts, k * run * co + co), dtype=torch.float32, device=x.device)
    sizes = (total, each, parts, ci, h, wd, co, k, ho, wo, block, tile, exact, half, real is not None)
    kernels.weights[(parts * groups, tiles)](x, g, which, partial, counts, *sizes, num_warps=warps, num_stages=stages)
    sums = partial.sum(1)
    dw, db = sums[:, :-co].view(groups, k, k, ci, co).permute(0, 4, 3, 1, 2), sums[:, -co:]
    if not inner:
        return dw, db, x.new_empty((groups, 0))
    dx, turned = torch.empty_like(x), w.permute(0, 3, 4, 2, 1).contiguous()
    block, step, warps, stages = INPUTS
    shape = (
        b,
        ci,
        h,
        wd,
        co,
        k,
        ho,
        wo,
        block,
        step,
        max(16, 1 << (ci - 1).bit_length()),
        exact,
        half,
        real is not None,
    )
    kernels.inputs[(-(-b * h * wd // block), groups)](
        g, which, turned, dx, counts, *shape, num_warps=warps, num_stages=stages
    )
    return dw, db, first(dx)


@cache
def _kernels() -> Any:
    """The kernels, compiled at first use."""
    import triton
    import triton.language as tl

    loose = triton.jit(do_not_specialize=["total", "blocks", "parts", "images"])

    @loose
    def forward(x, w, bias, y, which, real, total,
                ci: tl.constexpr, h: tl.constexpr, wd: tl.constexpr, co: tl.constexpr, k: tl.constexpr, ho: tl.constexpr, wo: tl.constexpr,
                BLOCK: tl.constexpr, STEP: tl.constexpr, exact: tl.constexpr, HALF: tl.constexpr, COUNTED: tl.constexpr):  # fmt: skip
        """A program has some pooled pixels of one network, four rows each."""
        run: tl.constexpr = k * ci
        tiles: tl.constexpr = (run + STEP - 1) // STEP
        group = tl.program_id(1).to(tl.int64)
        x += group * (total // (ho * wo)) * (h * wd * ci)
        w += group * (co * k * run)
        at, out, depth = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, co), tl.arange(0, STEP)
        pooled, place = at // 4, at % 4
        image, spot, live = pooled // (ho * wo), pooled % (ho * wo), pooled < total
        corner = (
            image * (h * wd * ci) + (2 * (spot // wo) + place // 2) * (wd * ci) + (2 * (spot % wo) + place % 2) * ci
        )
        acc, stop = tl.zeros((BLOCK, co), dtype=tl.float32), k * tiles
        if COUNTED:
            stop = tl.where(tl.program_id(0) * BLOCK < tl.load(real + group) * (4 * ho * wo), k * tiles, 0)
        for n in range(stop):
            row, begin = n // tiles, n % tiles * STEP
            inside, seen = live[:, None], out[None, :] < co
            if run % STEP != 0:
                inside, seen = inside & (begin + depth < run)[None, :], seen & (begin + depth < run)[:, None]
            patch = tl.load(x + corner[:, None] + (row * (wd * ci) + begin + depth)[None, :], mask=inside, other=0.0)
            taps = tl.load(w + (row * run + begin + depth)[:, None] + (out * (k * run))[None, :], mask=seen, other=0.0)
            if HALF:
                acc = tl.dot(patch.to(tl.bfloat16), taps.to(tl.bfloat16), acc)
            else:
                acc = tl.dot(patch.to(tl.float32), taps.to(tl.float32), acc, input_precision=exact)
        four = tl.permute(tl.reshape(acc, (BLOCK // 4, 2, 2, co)), (0, 3, 1, 2))
        even, odd = tl.split(four)
        a0, a2 = tl.split(even)
        a1, a3 = tl.split(odd)
        best, arg = a0, tl.zeros((BLOCK // 4, co), dtype=tl.int32)
        arg = tl.where(a1 > best, 1, arg)
        best = tl.maximum(best, a1, tl.PropagateNan.ALL)
        arg = tl.where(a2 > best, 2, arg)
        best = tl.maximum(best, a2, tl.PropagateNan.ALL)
        arg = tl.where(a3 > best, 3, arg)
        best = tl.maximum(best, a3, tl.PropagateNan.ALL) + tl.load(bias + group * co + out).to(tl.float32)[None, :]
        arg = tl.where(best > 0, arg, 4)  # 4: the ReLU is off, nothing flows back
        best = tl.where(best != best, best, tl.maximum(best, 0.0))
        mine = tl.program_id(0) * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
        spots = (group * total + mine)[:, None] * co + out[None, :]
        tl.store(y + spots, best, mask=(mine < total)[:, None])
        tl.store(which + spots, arg.to(tl.uint8), mask=(mine < total)[:, None])

    @loose
    def weights(x, g, which, partial, real, total, blocks, parts,
                ci: tl.constexpr, h: tl.constexpr, wd: tl.constexpr, co: tl.constexpr, k: tl.constexpr, ho: tl.constexpr, wo: tl.constexpr,
                BLOCK: tl.constexpr, TILE: tl.constexpr, exact: tl.constexpr, HALF: tl.constexpr, COUNTED: tl.constexpr):  # fmt: skip
        """A program has some pixels, and a tile of what they see, of one network; that of the first tile has the bias too."""
        run: tl.constexpr = k * ci
        group, part = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts
        x += group * (total // (ho * wo)) * (h * wd * ci)
        g += group * total * co
        which += group * total * co
        out = tl.arange(0, co)
        if run > 16:
            spots = tl.program_id(1) * TILE + tl.arange(0, TILE)
            offset, valid = (spots // run) * (wd * ci) + spots % run, spots < k * run
        else:  # its rows, each as if it had 16 numbers
            q = tl.program_id(1) * TILE + tl.arange(0, TILE)
            spots, offset, valid = q // 16 * run + q % 16, q // 16 * (wd * ci) + q % 16, (q // 16 < k) & (q % 16 < run)
        acc, sums, stop = tl.zeros((TILE, co), dtype=tl.float32), tl.zeros((co,), dtype=tl.float32), blocks
        if COUNTED:
            stop = tl.minimum(blocks, (tl.load(real + group) * (4 * ho * wo) + BLOCK - 1) // BLOCK - part * blocks)
        for n in range(stop):
            begin = (part * blocks + n) * BLOCK
            at, mine = begin + tl.arange(0, BLOCK), begin // 4 + tl.arange(0, BLOCK // 4)
            keep = (mine < total)[:, None] & (out < co)[None, :]
            arg = tl.load(which + mine[:, None] * co + out[None, :], mask=keep, other=4).to(tl.int32)
            grad = tl.load(g + mine[:, None] * co + out[None, :], mask=keep, other=0.0).to(tl.float32)
            placed = tl.where(arg[:, None, :] == tl.arange(0, 4)[None, :, None], grad[:, None, :], 0.0)
            placed = tl.reshape(placed, (BLOCK, co))
            pooled, place = at // 4, at % 4
            image, spot = pooled // (ho * wo), pooled % (ho * wo)
            corner = (
                image * (h * wd * ci) + (2 * (spot // wo) + place // 2) * (wd * ci) + (2 * (spot % wo) + place % 2) * ci
            )
            inside = (pooled < total)[:, None] & valid[None, :]
            patch = tl.load(x + corner[:, None] + offset[None, :], mask=inside, other=0.0)
            if HALF:
                acc = tl.dot(tl.trans(patch.to(tl.bfloat16)), placed.to(tl.bfloat16), acc)
            else:
                acc = tl.dot(tl.trans(patch.to(tl.float32)), placed, acc, input_precision=exact)
            if tl.program_id(1) == 0:
                sums += tl.sum(tl.where(arg < 4, grad, 0.0), 0)
        base = partial + tl.program_id(0).to(tl.int64) * (k * run * co + co)
        tl.store(base + spots[:, None] * co + out[None, :], acc, mask=valid[:, None])
        if tl.program_id(1) == 0:
            tl.store(base + k * run * co + out, sums)

    @loose
    def inputs(g, which, w, dx, real, images,
               ci: tl.constexpr, h: tl.constexpr, wd: tl.constexpr, co: tl.constexpr, k: tl.constexpr, ho: tl.constexpr, wo: tl.constexpr,
               BLOCK: tl.constexpr, STEP: tl.constexpr, IN: tl.constexpr, exact: tl.constexpr,
               HALF: tl.constexpr, COUNTED: tl.constexpr):  # fmt: skip
        """A program has some pixels of the input of one network: what the convolutions that see them send back."""
        group = tl.program_id(1).to(tl.int64)
        g += group * images * (ho * wo * co)
        which += group * images * (ho * wo * co)
        w += group * (k * k * ci * co)
        at, channel, out = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, IN), tl.arange(0, STEP)
        image, y, x = at % images, at // images // wd, at // images % wd
        one, two = (
            tl.program_id(0) * BLOCK // images,
            tl.minimum(tl.program_id(0) * BLOCK + BLOCK, images * (h * wd)) - 1,
        )
        two = two // images  # the first and the last pixel; where they are in one row, few convolutions see them
        here, there = tl.where(one // wd == two // wd, one % wd, 0), tl.where(one // wd == two // wd, two % wd, wd - 1)
        top, left = tl.maximum(one // wd - 2 * ho + 1, 0), tl.maximum(here - 2 * wo + 1, 0)
        down, across = tl.minimum(two // wd, k - 1) - top + 1, tl.minimum(there, k - 1) - left + 1
        live, acc = at < images * (h * wd), tl.zeros((BLOCK, IN), dtype=tl.float32)
        if COUNTED:
            live = live & (image < tl.load(real + group))
        for n in range(down * across * (co // STEP)):
            begin, near = n % (co // STEP) * STEP, n // (co // STEP)
            ky, kx = top + near // across, left + near % across
            oy, ox = y - ky, x - kx
            seen = (live & (oy >= 0) & (oy < 2 * ho) & (ox >= 0) & (ox < 2 * wo))[:, None]
            above = (image * (ho * wo) + oy // 2 * wo + ox // 2)[:, None] * co + (begin + out)[None, :]
            arg = tl.load(which + above, mask=seen, other=4).to(tl.int32)
            grad = tl.load(g + above, mask=seen, other=0.0).to(tl.float32)
            sent = tl.where(arg == (oy % 2 * 2 + ox % 2)[:, None], grad, 0.0)
            taps = w + ((ky * k + kx) * ci + channel)[None, :] * co + (begin + out)[:, None]
            weight = tl.load(taps, mask=(channel < ci)[None, :] & (out < co)[:, None], other=0.0)
            if HALF:
                acc = tl.dot(sent.to(tl.bfloat16), weight.to(tl.bfloat16), acc)
            else:
                acc = tl.dot(sent, weight.to(tl.float32), acc, input_precision=exact)
        into = dx + ((group * images + image) * (h * wd) + y * wd + x)[:, None] * ci + channel[None, :]
        tl.store(into, acc, mask=(at < images * (h * wd))[:, None] & (channel < ci)[None, :])

    return SimpleNamespace(forward=forward, weights=weights, inputs=inputs)
