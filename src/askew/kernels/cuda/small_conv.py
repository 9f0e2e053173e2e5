"""Convolution, ReLU and 2×2 max-pooling with few channels: the kernels of conv.cu."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from . import nvrtc
from .rows import contiguous_rows

SOURCE = Path(__file__).with_name("conv.cu")
NAMES = ("forward", "weights", "fold", "inputs")
THREADS, WARPS = 128, 4
BLOCKS = 1056  # that fill a device
BYTES = 57 * 1024  # of shared memory that a block has, if that is enough for an image
MOST_BYTES = 96 * 1024  # that any block can have


class ConvSizes(NamedTuple):
    """Sizes of a convolution, as the constants of the kernels; what follows from them is as in conv.cu."""

    ci: int
    h: int
    w: int
    co: int
    k: int
    pad: int

    @property
    def pooled(self) -> tuple[int, int]:
        return (self.h + 2 * self.pad - self.k + 1) // 2, (self.w + 2 * self.pad - self.k + 1) // 2

    @property
    def pixels(self) -> int:
        return self.pooled[0] * self.pooled[1]

    @property
    def inner(self) -> int:
        """Pixels of a patch, for one channel."""
        return 4 * ((self.k + 2) // 2) ** 2

    @property
    def channel_tiles(self) -> int:
        return -(-self.co // 8)

    @property
    def image(self) -> int:
        """Bytes of an image in shared memory."""
        wide = self.w + 2 * self.pad + 1
        return 4 * self.ci * (self.h + 2 * self.pad + 1) * (16 if wide <= 16 else (wide + 15) // 32 * 32 + 16)

    @property
    def back(self) -> int:
        """Bytes of what flows back to an image, of eight channels."""
        return 5 * 8 * ((self.pixels + 27) // 32 * 32 + 4)

    def patches(self, part: int) -> int:
        """Bytes of the patches of an image, of some channels, and of what flows back to it."""
        tiles = -(-part * self.inner // 8)
        across, back = (tiles * 8 + 23) // 32 * 32 + 8, (self.pixels + 23) // 32 * 32 + 8
        return 4 * self.pixels * across + 5 * 8 * self.channel_tiles * back

    @property
    def part(self) -> int:
        """Channels of the input that a block has: no more than registers have room for, nor shared memory."""
        wide = [n for n in range(1, self.ci + 1) if n * self.inner <= 224 and self.patches(n) <= MOST_BYTES]
        return max(wide, default=1)

    @property
    def groups(self) -> tuple[int, int]:
        """Groups of channels of the output, and those of them in one block."""
        each = 8 if -(-self.ci * self.inner // 8) <= 16 else 4
        return -(-self.co // each), min(-(-self.co // each), WARPS)

    @property
    def column_tiles(self) -> tuple[int, int, int]:
        """Tiles of columns of the weights' gradient, warps that share them, and those of them in one block."""
        columns = (self.ci * self.inner + 8) // 8
        warps = -(-columns // 7)
        return columns, warps, min(warps, WARPS)

    def fits(self) -> bool:
        """Is there shared memory for one image?"""
        return min(self.pooled) > 0 and max(self.image + self.back, self.patches(self.part)) <= MOST_BYTES


def at_a_time(size: int) -> int:
    """How many images lie in shared memory at a time, with so many bytes each."""
    return max(1, BYTES // size)


def for_each(images: int, groups: int, batch: int, blocks_per_image: int) -> int:
    """How many images a block has, one group in shared memory after the other."""
    fair = -(-groups * batch * blocks_per_image // BLOCKS)
    return max(1, min(-(-fair // images) * images, batch))


def kernel(name: str, shape: ConvSizes, half_in: bool, half_out: bool, split: bool) -> nvrtc.Kernel:
    """A kernel of conv.cu; half: of bfloat16."""
    names = ("CI", "H", "W", "CO", "K", "PAD", "PART", "HALF_IN", "HALF_OUT", "SPLIT")
    constants = tuple(zip(names, (*shape, shape.part, int(half_in), int(half_out), int(split)), strict=True))
    return nvrtc.kernels(SOURCE, constants, NAMES, torch.cuda.current_device())[NAMES.index(name)]


def outputs(
    x: Tensor, w: Tensor, bias: Tensor, pad: int, real: Tensor | None, split: bool, half: bool
) -> tuple[Tensor, Tensor]:
    """Pooled output and which of its four pixels each is; x [G, B, …], weights [G, …]."""
    groups, batch, ci, h, wd = x.shape
    shape = ConvSizes(ci, h, wd, w.shape[1], w.shape[3], pad)
    dtype = torch.bfloat16 if half else x.dtype
    y = torch.empty((groups, batch, shape.co, *shape.pooled), dtype=dtype, device=x.device)
    which = torch.empty_like(y, dtype=torch.uint8)
    images = at_a_time(shape.image)
    all_groups, together = shape.groups
    each = for_each(images, groups, batch, -(-all_groups // together))
    w, bias = contiguous_rows(w), contiguous_rows(bias)
    kernel("forward", shape, x.dtype is torch.bfloat16, y.dtype is torch.bfloat16, split).launch(
        (-(-batch // each), groups, -(-all_groups // together)),
        THREADS,
        images * shape.image,
        (x, w, bias, y, which, real, batch, w.stride(0), bias.stride(0), each, images),
    )
    return y, which


def weight_gradients(g: Tensor, x: Tensor, which: Tensor, k: int, pad: int, real: Tensor | None, split: bool) -> Tensor:
    """Gradients of weights and bias in one row [G, …]; summed in parts, in a fixed order."""
    groups, batch, ci, h, wd = x.shape
    shape = ConvSizes(ci, h, wd, g.shape[2], k, pad)
    columns, warps, warps_per_block = shape.column_tiles
    images = at_a_time(shape.image + shape.back)
    blocks_per_image = shape.channel_tiles * -(-warps // warps_per_block)
    each = for_each(images, groups, batch, blocks_per_image)
    halves = x.dtype is torch.bfloat16, g.dtype is torch.bfloat16
    blocks, count = -(-batch // each), -(-batch // each) * (WARPS // warps_per_block)
    parts = torch.empty((groups, count, shape.channel_tiles * 32 * columns * 8), device=x.device)
    kernel("weights", shape, *halves, split).launch(
        (blocks, groups, blocks_per_image),
        THREADS,
        images * (shape.image + shape.back),
        (x, g, which, parts, real, batch, each, images),
    )
    sums = torch.empty((groups, shape.co * (ci * k * k + 1)), device=x.device)
    grid = -(-sums.shape[1] // THREADS), groups, 1
    kernel("fold", shape, *halves, split).launch(grid, THREADS, 0, (parts, sums, count))
    return sums


def input_gradients(
    g: Tensor, x: Tensor, w: Tensor, which: Tensor, pad: int, real: Tensor | None, split: bool
) -> Tensor:
    """Gradients of the input, like x."""
    groups, batch, ci, h, wd = x.shape
    shape, dx = ConvSizes(ci, h, wd, g.shape[2], w.shape[3], pad), torch.empty_like(x)
    images, blocks_per_image = at_a_time(shape.patches(shape.part)), -(-ci // shape.part)
    each, w = for_each(images, groups, batch, blocks_per_image), contiguous_rows(w)
    kernel("inputs", shape, x.dtype is torch.bfloat16, g.dtype is torch.bfloat16, split).launch(
        (-(-batch // each), groups, blocks_per_image),
        THREADS,
        images * shape.patches(shape.part),
        (g, which, w, dx, real, batch, w.stride(0), each, images),
    )
    return dx
