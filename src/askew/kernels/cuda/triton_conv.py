"""Triton kernels of convolution, ReLU and 2×2 max-pooling with few channels; launched by conv.py."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr

# Four convolutions lie below a pooled pixel, and they see a patch of (k+1)² pixels of every channel. So all four of all
# channels are one product of patches with the weights in four places (column 4·out + place), and gradients, each put in
# the column of the place that was the largest, go back by the same products transposed.
loose = triton.jit(do_not_specialize=["total", "apart", "bias_apart", "blocks", "parts", "images"])


@loose
def forward(x, w, bias, y, which, real, total, apart, bias_apart,
            ci: constexpr, h: constexpr, wd: constexpr, co: constexpr, k: constexpr, ho: constexpr, wo: constexpr,
            pad: constexpr, BLOCK: constexpr, OUT: constexpr, TILE: constexpr,
            exact: constexpr, COUNTED: constexpr):  # fmt: skip
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
            ci: constexpr, h: constexpr, wd: constexpr, co: constexpr, k: constexpr, ho: constexpr, wo: constexpr,
            pad: constexpr, BLOCK: constexpr, OUT: constexpr, TILE: constexpr,
            exact: constexpr, COUNTED: constexpr):  # fmt: skip
    """A program has some pooled pixels, and a tile of their patches, of one network. The bias sees ones."""
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
    tl.store(base + co * ci * k * k + out[:, None] + q[None, :] * 0, acc, mask=(row[:, None] < 4 * co) & one[None, :])


@loose
def inputs(g, which, w, dx, real, images, apart,
           rows: constexpr, columns: constexpr, ci: constexpr, h: constexpr, wd: constexpr, co: constexpr,
           k: constexpr, ho: constexpr, wo: constexpr, pad: constexpr,
           BLOCK: constexpr, OUT: constexpr, IN: constexpr, exact: constexpr, COUNTED: constexpr):  # fmt: skip
    """A program has some squares of 2×2 pixels, of all input channels of one network: what the pooled pixels above send
    back.

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
