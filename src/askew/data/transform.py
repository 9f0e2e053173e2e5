"""Input transforms: how stored samples become a network's inputs, a batch at a time, on the device.

Randomness is drawn in the plan: every use of a sample has a *draw*, a 64-bit number that belongs to (seed, round,
client, use). What a transform does at random is a function of the draw in whole-number arithmetic, so it is the same on
every device, in every engine and after a resume, and costs the host nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol, Self

import torch
from torch import Tensor

from ..core.rng import torch_seed
from ..kernels.cuda.views import ViewRules, changed_images

DRAW_BITS = 24  # bits of a draw that decide one random choice
WEYL_STEP = -0x61C8864680B583EB  # 2^64/φ as a signed number: the step of a Weyl sequence


class InputTransform(Protocol):
    """What turns a dataset's stored samples into inputs; without draws it does what is done in a test."""

    @property
    def random(self) -> bool:
        """Does it do anything at random, so that uses of samples need draws?"""

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of an input, from the shape of a stored sample."""

    def to(self, device: torch.device) -> Self:
        """The same transform with its tensors on a device."""

    def __call__(self, x: Tensor, dtype: torch.dtype, draws: Tensor | None = None) -> Tensor:
        """Inputs [.., *shape] from stored samples [.., *stored] and the draws [..] of their uses."""


def sample_draws(seed: int, count: int, round: int = 0, client: int = -1) -> Tensor:
    """The draws of a client's first `count` uses of samples in a round, int64 [count]."""
    return mix_bits(torch.arange(count) * WEYL_STEP + torch_seed(seed, "view", round, client))


def mix_bits(z: Tensor) -> Tensor:
    """64 bits scrambled one to one (the finaliser of SplitMix64)."""
    z = (z ^ shift_right(z, 30)) * -0x40A7B892E31B1A47
    z = (z ^ shift_right(z, 27)) * -0x6B2FB644ECCEEE15
    return z ^ shift_right(z, 31)


def shift_right(z: Tensor, bits: int) -> Tensor:
    """64-bit numbers shifted right as if they had no sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def random_below(draws: Tensor, which: int, below: int = 1 << DRAW_BITS) -> Tensor:
    """The `which`-th random choice of every draw: whole numbers 0 … below − 1 (below ≤ 2^24), equally likely."""
    return (shift_right(mix_bits(draws + which), 64 - DRAW_BITS) * below) >> DRAW_BITS


@dataclass(frozen=True)
class PixelTransform:
    """Bytes [.., c, h, w] to normalised numbers; at random mirrored, cut out of a padded image, rotated.

    Every random change moves whole pixels, so all of them together are one look-up in the stored image.
    """

    mean: Tensor  # [c, 1, 1], of pixels in 0..1
    std: Tensor
    crop: int = 0  # pixels, the side of what is cut out; 0: the image's own
    pad: int = 0  # pixels on each side
    fill: str = "black"  # or "mean" (zero after normalisation), or "reflect"
    flip: bool = False
    turn: float = 0.0  # degrees to either side
    chance: float = 1.0  # probability that an image is cut at random; otherwise in the middle

    @property
    def random(self) -> bool:
        return self.flip or self.pad > 0 or self.crop > 0 or self.turn > 0

    @cached_property
    def scale_and_offset(self) -> tuple[Tensor, Tensor]:
        """What bytes are multiplied by, and what is subtracted then, both [c, 1, 1]."""
        return 1 / (255 * self.std), self.mean / self.std

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        channels, height, width = stored
        return channels, self.crop or height, self.crop or width

    def to(self, device: torch.device) -> Self:
        return self if self.mean.device == device else replace(self, mean=self.mean.to(device), std=self.std.to(device))

    def __call__(self, x: Tensor, dtype: torch.dtype, draws: Tensor | None = None) -> Tensor:
        leading, (_, height, width) = x.shape[:-3], self.shape(tuple(x.shape[-3:]))
        images = x.flatten(0, -4)
        if draws is None or not self.random:
            top, left = (images.shape[2] - height) // 2, (images.shape[3] - width) // 2
            inputs = self.normalise(images[:, :, top : top + height, left : left + width], dtype)
        elif (changed := self._changed_by_kernel(images, dtype, draws.flatten())) is not None:
            inputs = changed
        else:
            index, inside = self.source_pixels(images.shape[2], images.shape[3], draws.flatten())
            pixels = look_up(images, index, None if self.fill == "mean" else inside)
            inputs = self.normalise(pixels.view(*pixels.shape[:2], height, width), dtype)
            if inside is not None and self.fill == "mean":
                inputs = inputs * inside.view(-1, 1, height, width)
        return inputs.view(*leading, *inputs.shape[1:])

    def _changed_by_kernel(self, images: Tensor, dtype: torch.dtype, draws: Tensor) -> Tensor | None:
        """The same in one pass, where a kernel does that."""
        if dtype is not torch.float32:
            return None
        _, height, width = self.shape(tuple(images.shape[1:]))
        rules = ViewRules(height, width, self.pad, self.fill, self.flip, self.turn, self.chance)
        return changed_images(images, draws, rules, *self.scale_and_offset)

    def augment(self, x: Tensor, draws: Tensor) -> Tensor:
        """Bytes [n, c, h, w] changed at random, still bytes."""
        index, inside = self.source_pixels(x.shape[2], x.shape[3], draws)
        return look_up(x, index, inside).view(len(x), *self.shape(tuple(x.shape[1:])))

    def normalise(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Bytes [n, c, h, w] as numbers whose channels have mean 0 and standard deviation 1."""
        scale, offset = self.scale_and_offset
        return (x.to(dtype) * scale.to(dtype)).sub_(offset.to(dtype))

    def source_pixels(self, rows: int, columns: int, draws: Tensor) -> tuple[Tensor, Tensor | None]:
        """For every output pixel the number of the stored pixel it shows, and whether it shows one, both [n, h·w].

        The stored image has rows × columns pixels. The second is None where every output pixel shows a stored one.
        """
        device, (_, height, width) = draws.device, self.shape((0, rows, columns))
        y, x = torch.arange(height, device=device)[None, :, None], torch.arange(width, device=device)[None, None, :]
        inside: Tensor | None = None
        if self.turn:
            y, x = self._rotate(y, x, height, width, draws)
            inside = is_inside(y, x, height, width)
            y, x = y.clamp(0, height - 1), x.clamp(0, width - 1)
        top, left = self._corner(rows + 2 * self.pad - height, columns + 2 * self.pad - width, draws)
        y, x = y + top[:, None, None] - self.pad, x + left[:, None, None] - self.pad
        if self.flip:
            x = torch.where(random_below(draws, 2, 2)[:, None, None] == 1, columns - 1 - x, x)
        if self.pad and self.fill == "reflect":
            y, x = (last - (last - at.abs()).abs() for at, last in ((y, rows - 1), (x, columns - 1)))
        elif self.pad:
            stored = is_inside(y, x, rows, columns)
            inside = stored if inside is None else inside & stored
            y, x = y.clamp(0, rows - 1), x.clamp(0, columns - 1)
        index = (y * columns + x).flatten(1)
        return index, None if inside is None else inside.expand(len(draws), height, width).flatten(1)

    def _rotate(self, y: Tensor, x: Tensor, height: int, width: int, draws: Tensor) -> tuple[Tensor, Tensor]:
        """Coordinates rotated about the middle of an output image by a random angle for each image, rounded."""
        half = 1 << DRAW_BITS - 1
        angle = ((random_below(draws, 4).double() / half - 1) * (self.turn * torch.pi / 180))[:, None, None]
        down, right = y - (height - 1) / 2, x - (width - 1) / 2
        return (
            (angle.cos() * down - angle.sin() * right + (height - 1) / 2).round().long(),
            (angle.sin() * down + angle.cos() * right + (width - 1) / 2).round().long(),
        )

    def _corner(self, free_rows: int, free_columns: int, draws: Tensor) -> tuple[Tensor, Tensor]:
        """The upper left corner of what is cut out of each padded image, in rows and columns of that, both [n]."""
        free = free_rows, free_columns
        top, left = (random_below(draws, which, space + 1) for which, space in enumerate(free))
        if self.chance < 1:
            at_random = random_below(draws, 3) < self.chance * (1 << DRAW_BITS)
            top, left = (torch.where(at_random, at, space // 2) for at, space in zip((top, left), free, strict=True))
        return top, left


def is_inside(y: Tensor, x: Tensor, height: int, width: int) -> Tensor:
    """Which coordinates lie within an image."""
    return (y >= 0) & (y < height) & (x >= 0) & (x < width)


def look_up(images: Tensor, index: Tensor, inside: Tensor | None) -> Tensor:
    """Pixels [n, c, m] of images [n, c, h, w] by their numbers [n, m]; 0 where `inside` [n, m] is false."""
    pixels = images.flatten(2).gather(2, index[:, None].expand(-1, images.shape[1], -1))
    return pixels if inside is None else pixels * inside[:, None]


@dataclass(frozen=True)
class TextWindows:
    """Pieces of one long text: a stored sample is the position where its window begins."""

    text: Tensor  # [length of the text] codes of characters
    length: int  # characters of a window

    @property
    def random(self) -> bool:
        return False

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        return (self.length,)

    def to(self, device: torch.device) -> Self:
        return self if self.text.device == device else replace(self, text=self.text.to(device))

    def __call__(self, x: Tensor, dtype: torch.dtype, draws: Tensor | None = None) -> Tensor:
        return self.text[x[..., None] + torch.arange(self.length, device=x.device)].long()
