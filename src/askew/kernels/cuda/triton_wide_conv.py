"""Triton kernels of convolution, ReLU and 2×2 max-pooling with many channels; launched by wide_conv.py."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr

loose = triton.jit(do_not_specialize=["total", "blocks", "parts", "images"])


@loose
def forward(x, w, bias, y, which, real, total,
            ci: constexpr, h: constexpr, wd: constexpr, co: constexpr, k: constexpr, ho: constexpr, wo: constexpr,
            BLOCK: constexpr, STEP: constexpr, exact: constexpr, HALF: constexpr, COUNTED: constexpr):  # fmt: skip
    """A program has some pooled pixels of one network, four rows each."""
    run: tl.constexpr = k * ci
    tiles: tl.constexpr = (run + STEP - 1) // STEP
    group = tl.program_id(1).to(tl.int64)
    x += group * (total // (ho * wo)) * (h * wd * ci)
    w += group * (co * k * run)
    at, out, depth = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, co), tl.arange(0, STEP)
    pooled, place = at // 4, at % 4
    image, spot, live = pooled // (ho * wo), pooled % (ho * wo), pooled < total
    corner = image * (h * wd * ci) + (2 * (spot // wo) + place // 2) * (wd * ci) + (2 * (spot % wo) + place % 2) * ci
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
            ci: constexpr, h: constexpr, wd: constexpr, co: constexpr, k: constexpr, ho: constexpr, wo: constexpr,
            BLOCK: constexpr, TILE: constexpr, exact: constexpr, HALF: constexpr, COUNTED: constexpr):  # fmt: skip
    """A program has some pixels of one network and a tile of what they see; that of the first tile has the bias too."""
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
           ci: constexpr, h: constexpr, wd: constexpr, co: constexpr, k: constexpr, ho: constexpr, wo: constexpr,
           BLOCK: constexpr, STEP: constexpr, IN: constexpr, exact: constexpr,
           HALF: constexpr, COUNTED: constexpr):  # fmt: skip
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
