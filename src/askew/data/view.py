"""Views: how stored samples become a network's inputs, a batch at a time, on the device.

Chance is drawn in the plan: every use of a sample has a *mark*, a 64-bit number that belongs to (seed, round, client, use).
What a view does at random is a function of the mark in whole-number arithmetic, so it is the same on every device, in
every engine and after a resume, and costs the host nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol, Self

import torch
from torch import Tensor

from ..core.rng import torch_seed

BITS = 24
ODD = -0x61C8864680B583EB  # 2^64/φ: the step of a Weyl sequence


class InputTransform(Protocol):
    """What a dataset may bring along; without marks, samples are seen as in a test."""

    @property
    def random(self) -> bool: ...
    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]: ...
    def to(self, device: torch.device) -> Self: ...
    def __call__(self, x: Tensor, dtype: torch.dtype, marks: Tensor | None = None) -> Tensor: ...


def marks(seed: int, count: int, round: int = 0, client: int = -1) -> Tensor:
    """The marks of a client's first `count` uses of samples in a round, int64 [count]."""
    return mixed(torch.arange(count) * ODD + torch_seed(seed, "view", round, client))


def mixed(z: Tensor) -> Tensor:
    """Scramble 64 bits, one to one (the finaliser of SplitMix64)."""
    z = (z ^ shifted(z, 30)) * -0x40A7B892E31B1A47
    z = (z ^ shifted(z, 27)) * -0x6B2FB644ECCEEE15
    return z ^ shifted(z, 31)


def shifted(z: Tensor, by: int) -> Tensor:
    """Shift right without the sign."""
    return (z >> by) & ((1 << (64 - by)) - 1)


def drawn(marks: Tensor, which: int, below: int = 1 << BITS) -> Tensor:
    """The `which`-th draw of every mark: whole numbers 0 … below − 1 (below ≤ 2^24), equally likely."""
    return (shifted(mixed(marks + which), 64 - BITS) * below) >> BITS


@dataclass(frozen=True)
class PixelTransform:
    """Bytes [.., c, h, w] to normalised numbers; at random flipped, cut out of a padded image, turned.

    Every random change moves whole pixels, so all of them together are one look-up in the stored image.
    """

    mean: Tensor  # [c, 1, 1], of pixels in 0..1
    std: Tensor
    crop: int = 0  # side of what is cut out; 0: the image's own
    pad: int = 0
    fill: str = "black"  # or "mean" (zero after normalisation), or "reflect"
    flip: bool = False
    turn: float = 0.0  # degrees to either side
    chance: float = 1.0  # that an image is cut at random; otherwise in the middle

    @property
    def random(self) -> bool:
        return self.flip or self.pad > 0 or self.crop > 0 or self.turn > 0

    @cached_property
    def affine(self) -> tuple[Tensor, Tensor]:
        """What bytes are multiplied by, and what is taken off then."""
        return 1 / (255 * self.std), self.mean / self.std

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        channels, height, width = stored
        return channels, self.crop or height, self.crop or width

    def to(self, device: torch.device) -> Self:
        return self if self.mean.device == device else replace(self, mean=self.mean.to(device), std=self.std.to(device))

    def __call__(self, x: Tensor, dtype: torch.dtype, marks: Tensor | None = None) -> Tensor:
        lead, (_, height, width) = x.shape[:-3], self.shape(tuple(x.shape[-3:]))
        flat = x.flatten(0, -4)
        if marks is None or not self.random:
            top, left = (flat.shape[2] - height) // 2, (flat.shape[3] - width) // 2
            seen = self.normalised(flat[:, :, top : top + height, left : left + width], dtype)
        else:
            index, inside = self.places(flat.shape[2], flat.shape[3], marks.flatten())
            seen = self.looked_up(flat, index, None if self.fill == "mean" else inside)
            seen = self.normalised(seen.view(*seen.shape[:2], height, width), dtype)
            if inside is not None and self.fill == "mean":
                seen = seen * inside.view(-1, 1, height, width)
        return seen.view(*lead, *seen.shape[1:])

    def cut(self, x: Tensor, marks: Tensor) -> Tensor:
        """Bytes [n, c, h, w] changed at random once for all."""
        index, inside = self.places(x.shape[2], x.shape[3], marks)
        return self.looked_up(x, index, inside).view(len(x), *self.shape(tuple(x.shape[1:])))

    def normalised(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        scale, shift = self.affine
        return (x.to(dtype) * scale.to(dtype)).sub_(shift.to(dtype))

    def looked_up(self, x: Tensor, index: Tensor, inside: Tensor | None) -> Tensor:
        seen = x.flatten(2).gather(2, index[:, None].expand(-1, x.shape[1], -1))
        return seen if inside is None else seen * inside[:, None]

    def places(self, rows: int, columns: int, marks: Tensor) -> tuple[Tensor, Tensor | None]:
        """For every pixel of what is seen its place in the stored image [n, h·w], and whether it is in it (None: all are)."""
        device, (_, height, width) = marks.device, self.shape((0, rows, columns))
        y, x = torch.arange(height, device=device)[None, :, None], torch.arange(width, device=device)[None, None, :]
        inside: Tensor | None = None
        if self.turn:
            angle = ((drawn(marks, 4).double() / (1 << BITS - 1) - 1) * (self.turn * torch.pi / 180))[:, None, None]
            down, right = y - (height - 1) / 2, x - (width - 1) / 2
            y = (angle.cos() * down - angle.sin() * right + (height - 1) / 2).round().long()
            x = (angle.sin() * down + angle.cos() * right + (width - 1) / 2).round().long()
            inside = (y >= 0) & (y < height) & (x >= 0) & (x < width)
            y, x = y.clamp(0, height - 1), x.clamp(0, width - 1)
        room = rows + 2 * self.pad - height, columns + 2 * self.pad - width
        top, left = (drawn(marks, k, space + 1) for k, space in enumerate(room))
        if self.chance < 1:
            chosen = drawn(marks, 3) < self.chance * (1 << BITS)
            top, left = (torch.where(chosen, at, space // 2) for at, space in zip((top, left), room, strict=True))
        y, x = y + top[:, None, None] - self.pad, x + left[:, None, None] - self.pad
        if self.flip:
            x = torch.where(drawn(marks, 2, 2)[:, None, None] == 1, columns - 1 - x, x)
        if self.pad and self.fill == "reflect":
            y, x = (last - (last - at.abs()).abs() for at, last in ((y, rows - 1), (x, columns - 1)))
        elif self.pad:
            there = (y >= 0) & (y < rows) & (x >= 0) & (x < columns)
            inside = there if inside is None else inside & there
            y, x = y.clamp(0, rows - 1), x.clamp(0, columns - 1)
        return (y * columns + x).flatten(1), None if inside is None else inside.expand(
            len(marks), height, width
        ).flatten(1)


@dataclass(frozen=True)
class TextWindows:
    """Pieces of one long text: a stored sample is the place where its window begins."""

    text: Tensor  # [length] codes of characters
    length: int

    @property
    def random(self) -> bool:
        return False

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        return (self.length,)

    def to(self, device: torch.device) -> Self:
        return self if self.text.device == device else replace(self, text=self.text.to(device))

    def __call__(self, x: Tensor, dtype: torch.dtype, marks: Tensor | None = None) -> Tensor:
        return self.text[x[..., None] + torch.arange(self.length, device=x.device)].long()
