"""Images changed at random and normalised, in one pass on CUDA. Torch takes 41 where they are rotated, else 6 to 9."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from . import available, nvrtc

SOURCE = Path(__file__).with_name("views.cu")
FILLS = ("black", "mean", "reflect")
THREADS = 128
BITS = 24  # of a draw, that decide one random choice


class ViewRules(NamedTuple):
    """How images are changed at random."""

    height: int  # of an input
    width: int
    pad: int
    fill: str
    flip: bool
    turn: float  # degrees to either side
    chance: float  # that an image is cut at random, and not in the middle

    def constants(self, stored: tuple[int, int, int]) -> dict[str, int]:
        """Those of the kernel, for stored images of this shape."""
        names = ("CHANNELS", "ROWS", "COLUMNS", "HEIGHT", "WIDTH", "PAD", "FLIP", "TURN", "FILL", "BITS")
        own = (self.height, self.width, self.pad, int(self.flip), int(self.turn > 0), FILLS.index(self.fill), BITS)
        return dict(zip(names, (*stored, *own), strict=True))

    def numbers(self) -> tuple[float, int]:
        """What turns half of the draws' range into radians, and how many of 2^24 draws cut at random."""
        # torch compares the draws in float32
        most = math.ceil(float(torch.tensor(self.chance * 2**BITS, dtype=torch.float32)))
        return self.turn * math.pi / 180, most


def changed_images(images: Tensor, draws: Tensor, rules: ViewRules, scale: Tensor, offset: Tensor) -> Tensor | None:
    """Inputs [n, c, h, w] in float32 from bytes and draws; None where the kernel cannot be had."""
    if not images.is_cuda or images.dtype is not torch.uint8 or not available() or not nvrtc.can_compile():
        return None
    channels, rows, columns = images.shape[1:]
    constants = tuple(rules.constants((channels, rows, columns)).items())
    [kernel] = nvrtc.kernels(SOURCE, constants, ("view",), torch.cuda.current_device())
    out = torch.empty((len(images), channels, rules.height, rules.width), device=images.device)
    scale, offset = (t.to(torch.float32).contiguous() for t in (scale, offset))
    given = (images.contiguous(), draws.contiguous(), scale, offset, out, *rules.numbers())
    kernel.launch((len(images), 1, 1), THREADS, 0, given)
    return out
