"""Triton kernels of convolution, ReLU and 2×2 max-pooling with many channels; launched by wide_conv.py."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr

loose = triton.jit(do_not_specialize=["total", "parts", "rows", "chunks", "images"])


@triton.jit
def product(patch, taps, acc, exact: constexpr, HALF: constexpr):
    if HALF:
        return tl.dot(patch.to(tl.bfloat16), taps.to(tl.bfloat16), acc)
    return tl.dot(patch.to(tl.float32), taps.to(tl.float32), acc, input_precision=exact)


@loose
def forward(x, w, bias, y, which, real, total,
            ci: constexpr, h: constexpr, wd: constexpr, co: constexpr, k: constexpr, ho: constexpr, wo: constexpr,
            BLOCK: constexpr, OUT: constexpr, STEP: constexpr, exact: constexpr, HALF: constexpr,
            COUNTED: constexpr):  # fmt: skip
    """A program has some pooled pixels of one network, for some outputs.

    Each of the four pixels below has sums of its own, so that a thread has all four, and taps are read once for them.
    """
    run: tl.constexpr = k * ci
    tiles: tl.constexpr = (run + STEP - 1) // STEP
    group = tl.program_id(1).to(tl.int64)
    x += group * (total // (ho * wo)) * (h * wd * ci)
    w += group * (co * k * run)
    pooled, out, depth = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, OUT), tl.arange(0, STEP)
    if co > OUT:
        out += tl.program_id(2) * OUT
    image, spot, live = pooled // (ho * wo), pooled % (ho * wo), (pooled < total)[:, None]
    corner = image * (h * wd * ci) + spot // wo * (2 * wd * ci) + spot % wo * (2 * ci)
    stop = k * tiles
    if COUNTED:
        stop = tl.where(tl.program_id(0) * BLOCK < tl.load(real + group) * (ho * wo), k * tiles, 0)
    a0 = tl.zeros((BLOCK, OUT), dtype=tl.float32)
    a1, a2, a3 = a0, a0, a0
    for n in range(stop):
        row, begin = n // tiles, n % tiles * STEP
        inside, seen = live, out[None, :] < co
        if run % STEP != 0:
            inside, seen = inside & (begin + depth < run)[None, :], seen & (begin + depth < run)[:, None]
        taps = tl.load(w + (row * run + begin + depth)[:, None] + (out * (k * run))[None, :], mask=seen, other=0.0)
        here = x + corner[:, None] + (row * (wd * ci) + begin + depth)[None, :]
        a0 = product(tl.load(here, mask=inside, other=0.0), taps, a0, exact, HALF)
        a1 = product(tl.load(here + ci, mask=inside, other=0.0), taps, a1, exact, HALF)
        a2 = product(tl.load(here + wd * ci, mask=inside, other=0.0), taps, a2, exact, HALF)
        a3 = product(tl.load(here + (wd * ci + ci), mask=inside, other=0.0), taps, a3, exact, HALF)
    best, arg = a0, tl.zeros((BLOCK, OUT), dtype=tl.int32)
    arg = tl.where(a1 > best, 1, arg)
    best = tl.maximum(best, a1, tl.PropagateNan.ALL)
    arg = tl.where(a2 > best, 2, arg)
    best = tl.maximum(best, a2, tl.PropagateNan.ALL)
    arg = tl.where(a3 > best, 3, arg)
    best = tl.maximum(best, a3, tl.PropagateNan.ALL) + tl.load(bias + group * co + out).to(tl.float32)[None, :]
    arg = tl.where(best > 0, arg, 4)  # 4: the ReLU is off, nothing flows back
    best = tl.where(best != best, best, tl.maximum(best, 0.0))
    spots = pooled[:, None] * co + out[None, :]  # `which` is stored first: nothing but the largest is kept after that
    tl.store(which + group * total * co + spots, arg.to(tl.uint8), mask=live)
    tl.store(y + group * total * co + spots, best, mask=live)


@triton.jit
def images_last(x, into, real, images, apart, image_apart, row, column,
                columns: constexpr, inner: constexpr, into_row: constexpr, into_column: constexpr,
                into_inner: constexpr, size: constexpr, PAD: constexpr, IMAGES: constexpr, COLUMNS: constexpr,
                COUNTED: constexpr):  # fmt: skip
    """A program copies one line of numbers of some images of one network, so that the images are next to each other.

    Line `outer · inner + n` begins at outer · row + n · column. Images that are not real become zeros.
    """
    group, line = tl.program_id(1).to(tl.int64), tl.program_id(0)
    image, place = tl.program_id(2) * IMAGES + tl.arange(0, IMAGES), tl.arange(0, COLUMNS)
    there = images
    if COUNTED:
        there = tl.minimum(images, tl.load(real + group))
    begin = x + group * apart + line // inner * row + line % inner * column
    seen = (image < there)[:, None] & (place < columns)[None, :]
    numbers = tl.load(begin + image[:, None] * image_apart + place[None, :], mask=seen, other=0.0)
    spots = line // inner * into_row + line % inner * into_inner + place[:, None] * into_column + image[None, :]
    inside = (place < columns)[:, None] & (image < PAD)[None, :]
    tl.store(into + group * size + spots, tl.trans(numbers), mask=inside)


@triton.jit
def spread(g, which, dy, last, places, sums, real, images, g_group, g_image, g_channel, g_row, g_column,
           co: constexpr, ho: constexpr, wo: constexpr, PAD: constexpr, IMAGES: constexpr,
           ALL: constexpr, COUNTED: constexpr):  # fmt: skip
    """A program has one pooled pixel of some images of one network: its gradients, with the images last.

    `ALL`: for each of the four pixels below it, of which the largest has the gradient and the others zeros, and once
    more channels-last in `dy`. Else for the pooled pixel alone, and which of the four it is. And sums for the bias.
    """
    group, spot = tl.program_id(1).to(tl.int64), tl.program_id(0)
    image, out = tl.program_id(2) * IMAGES + tl.arange(0, IMAGES), tl.arange(0, co)
    there = images
    if COUNTED:
        there = tl.minimum(images, tl.load(real + group))
    live, inside = (image < there)[:, None], (image < PAD)[None, :]
    py, px = spot // wo, spot % wo
    at = ((group * images + image) * (ho * wo) + spot)[:, None] * co + out[None, :]
    arg = tl.load(which + at, mask=live, other=4).to(tl.int32)
    begin = g + group * g_group + py * g_row + px * g_column
    grad = tl.load(begin + image[:, None] * g_image + out[None, :] * g_channel, mask=live, other=0.0).to(tl.float32)
    part = (tl.program_id(2) * tl.num_programs(1) + group) * (ho * wo) + spot
    tl.store(sums + part * co + out, tl.sum(tl.where(arg < 4, grad, 0.0), 0))
    if ALL:
        for place in tl.static_range(4):
            sent = tl.where(arg == place, grad, 0.0)
            y, x = 2 * py + place // 2, 2 * px + place % 2
            pixel = (group * images + image) * (4 * ho * wo) + y * (2 * wo) + x
            tl.store(dy + pixel[:, None] * co + out[None, :], sent, mask=(image < images)[:, None])
            line = (group * (2 * ho) + y) * co + out
            tl.store(last + line[:, None] * (2 * wo * PAD) + x * PAD + image[None, :], tl.trans(sent), mask=inside)
    else:
        spots = ((group * ho + py) * co + out)[:, None] * (wo * PAD) + px * PAD + image[None, :]
        tl.store(last + spots, tl.trans(grad), mask=inside)
        tl.store(places + spots, tl.trans(arg).to(tl.uint8), mask=inside)


@loose
def weights(x, dy, partial, real, parts, rows,
            ci: constexpr, h: constexpr, wd: constexpr, co: constexpr, k: constexpr, ho: constexpr, wo: constexpr,
            PAD: constexpr, DEPTH: constexpr, TAPS: constexpr, exact: constexpr, COUNTED: constexpr):  # fmt: skip
    """A program has some taps of one network's filters, of all channels, and some rows of pixels that see through them.

    x [G, h, ci, wd, PAD] and dy [G, ho, co, wo, PAD] have the images last, so that what is summed over, a row's pixels
    of all images, is a run of numbers; a tap further to the right begins PAD numbers later.
    """
    group, part = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts
    x += group * (h * ci * wd * PAD)
    dy += group * (ho * co * wo * PAD)
    out, lane, depth = tl.arange(0, co), tl.arange(0, TAPS * ci), tl.arange(0, DEPTH)
    tap = tl.program_id(1) * TAPS + lane // ci
    aligned: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth  # numbers that are read at once
    begin = tl.multiple_of((tap // k * ci + lane % ci) * (wd * PAD) + tap % k * PAD, aligned)
    chunks: tl.constexpr = (wo * PAD + DEPTH - 1) // DEPTH
    first, stop = part * rows, tl.minimum(part * rows + rows, ho)
    if COUNTED:
        stop = tl.where(tl.load(real + group) > 0, stop, first)
    acc = tl.zeros((co, TAPS * ci), dtype=tl.float32)
    for n in range(first * chunks, stop * chunks):
        row, at = n // chunks, n % chunks * DEPTH + depth
        inside = (at < wo * PAD)[None, :]
        sent = tl.load(dy + (row * co + out)[:, None] * (wo * PAD) + at[None, :], mask=inside, other=0.0)
        spots = (row * (ci * wd * PAD) + begin)[:, None] + at[None, :]
        seen = tl.load(x + spots, mask=inside & (tap < k * k)[:, None], other=0.0)
        acc = tl.dot(sent, tl.trans(seen), acc, input_precision=exact)
    base = partial + tl.program_id(0).to(tl.int64) * (k * k * ci * co)
    spot = tl.program_id(1) * TAPS * ci + lane
    tl.store(base + spot[None, :] * co + out[:, None], acc, mask=(tap < k * k)[None, :])


@loose
def first_weights(x, g, which, partial, real, parts, chunks,
                  ci: constexpr, h: constexpr, wd: constexpr, co: constexpr, k: constexpr, ho: constexpr, wo: constexpr,
                  PAD: constexpr, DEPTH: constexpr, SPOTS: constexpr, exact: constexpr,
                  COUNTED: constexpr):  # fmt: skip
    """The same for few channels of the input: g and which [G, ho, co, wo, PAD] are those of pooled pixels.

    A program has some runs of pooled pixels, and some spots of the square of k + 1 by k + 1 pixels that a pooled one
    depends on. Each of the four places has sums of its own over the whole square, so that the square is read once; of
    these sums, those of its k by k taps are kept.
    """
    group, part = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts
    x += group * (h * ci * wd * PAD)
    g += group * (ho * co * wo * PAD)
    which += group * (ho * co * wo * PAD)
    out, lane, depth = tl.arange(0, co), tl.program_id(1) * SPOTS + tl.arange(0, SPOTS), tl.arange(0, DEPTH)
    channel, across, down = lane % ci, lane // ci % (k + 1), lane // (ci * (k + 1))
    aligned: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth  # numbers that are read at once
    begin = tl.multiple_of((down * ci + channel) * (wd * PAD) + across * PAD, aligned)
    runs: tl.constexpr = (wo * PAD + DEPTH - 1) // DEPTH
    first, stop = part * chunks, tl.minimum(part * chunks + chunks, ho * runs)
    if COUNTED:
        stop = tl.where(tl.load(real + group) > 0, stop, first + 1)  # of no images: one run, all of it zeros
    tl.assume(stop > first)  # where a loop may be skipped, ptxas has each product wait for the one before it
    a0 = tl.zeros((co, SPOTS), dtype=tl.float32)
    a1, a2, a3 = a0, a0, a0
    for n in range(first, stop):
        row, at = n // runs, n % runs * DEPTH + depth
        inside = (at < wo * PAD)[None, :]
        spots = (row * co + out)[:, None] * (wo * PAD) + at[None, :]
        arg = tl.load(which + spots, mask=inside, other=0).to(tl.int32)
        grad = tl.load(g + spots, mask=inside, other=0.0)
        wide = tl.max_contiguous(tl.multiple_of(at + at // PAD * PAD, aligned), aligned)  # every second pixel of a row
        square = x + (2 * row * (ci * wd * PAD) + begin)[:, None] + wide[None, :]
        seen = tl.trans(tl.load(square, mask=inside & (down <= k)[:, None], other=0.0))
        a0 = tl.dot(tl.where(arg == 0, grad, 0.0), seen, a0, input_precision=exact)
        a1 = tl.dot(tl.where(arg == 1, grad, 0.0), seen, a1, input_precision=exact)
        a2 = tl.dot(tl.where(arg == 2, grad, 0.0), seen, a2, input_precision=exact)
        a3 = tl.dot(tl.where(arg == 3, grad, 0.0), seen, a3, input_precision=exact)
    sums = (a0, a1, a2, a3)
    for place in tl.static_range(4):
        ky, kx = down - place // 2, across - place % 2
        tap = (ky * k + kx) * ci + channel
        base = partial + (tl.program_id(0).to(tl.int64) * 4 + place) * (k * k * ci * co)
        mine = (ky >= 0) & (ky < k) & (kx >= 0) & (kx < k)
        tl.store(base + tap[None, :] * co + out[:, None], sums[place], mask=mine[None, :])


@loose
def inputs(dy, w, dx, images,
           ci: constexpr, h: constexpr, wd: constexpr, co: constexpr, k: constexpr, ho: constexpr, wo: constexpr,
           BLOCK: constexpr, STEP: constexpr, IN: constexpr, exact: constexpr, HALF: constexpr):  # fmt: skip
    """A program has some pixels of the input of one network: what the convolutions that see them send back.

    Its rows are the images of one pixel, or of a few, so most of them see the same taps, and the others are left out.
    """
    group = tl.program_id(1).to(tl.int64)
    dy += group * images * (ho * wo * co)
    w += group * (k * k * ci * co)
    at, channel, out = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, IN), tl.arange(0, STEP)
    image, y, x = at % images, at // images // wd, at // images % wd
    one = tl.program_id(0) * BLOCK // images  # the first and the last pixel; in one row, few convolutions see them
    two = (tl.minimum(tl.program_id(0) * BLOCK + BLOCK, images * (h * wd)) - 1) // images
    here, there = tl.where(one // wd == two // wd, one % wd, 0), tl.where(one // wd == two // wd, two % wd, wd - 1)
    top, left = tl.maximum(one // wd - ho + 1, 0), tl.maximum(here - wo + 1, 0)
    down, across = tl.minimum(two // wd, k - 1) - top + 1, tl.minimum(there, k - 1) - left + 1
    live, acc = at < images * (h * wd), tl.zeros((BLOCK, IN), dtype=tl.float32)
    for n in range(down * across * (co // STEP)):
        begin, near = n % (co // STEP) * STEP, n // (co // STEP)
        ky, kx = top + near // across, left + near % across
        oy, ox = y - ky, x - kx
        seen = (live & (oy >= 0) & (oy < ho) & (ox >= 0) & (ox < wo))[:, None]
        above = (image * (ho * wo) + oy * wo + ox)[:, None] * co + (begin + out)[None, :]
        sent = tl.load(dy + above, mask=seen, other=0.0)
        taps = w + ((ky * k + kx) * ci + channel)[None, :] * co + (begin + out)[:, None]
        weight = tl.load(taps, mask=(channel < ci)[None, :] & (out < co)[:, None], other=0.0)
        acc = tl.dot(sent, weight.to(tl.bfloat16) if HALF else weight, acc, input_precision=exact)
    into = dx + ((group * images + image) * (h * wd) + y * wd + x)[:, None] * ci + channel[None, :]
    tl.store(into, acc, mask=live[:, None] & (channel < ci)[None, :])
