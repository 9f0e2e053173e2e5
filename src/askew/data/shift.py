"""Feature skew: the inputs of every client are a little rotated, or noisy, more so from client to client."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

from ..core.rng import generator
from ..errors import DataError

CELLS = 1 << 19  # numbers worked on at once


class FeatureShift(NamedTuple):
    """How the inputs of clients 0…N−1 are shifted: client i by i/(N−1) of the noise and of the rotation."""

    clients: int  # N
    noise: float  # standard deviation, in units of the inputs' full range
    rotation: float  # degrees, counterclockwise
    seed: int


def shift_inputs(
    x: Tensor, client: Tensor | np.ndarray, clients: int, noise: float, rotation: float, seed: int
) -> Tensor:
    """Inputs [n, ..], those of client i of 0…N−1 rotated by rotation·i/(N−1) degrees, then with noise·i/(N−1) added.

    `client` [n] is each sample's client, −1 if it is nobody's. Images [c, h, w] rotate counterclockwise about their
    centre, with zeros from outside. The noise is Gaussian, its unit the inputs' full range: 255 for bytes, which are
    rounded and clipped to 0…255, and 1 for floats. It is a function of the seed, the client and the sample's position
    among the client's samples, so that a client's inputs do not depend on which other clients are shifted with them.
    """
    if not x.numel() or not (noise or rotation):
        return x
    check_inputs(x, rotation)
    pixels = x.dtype == torch.uint8
    owner = client.cpu().numpy() if isinstance(client, Tensor) else client
    order = np.argsort(owner, kind="stable")
    order = order[owner[order] > 0]  # client 0 has the data as they are
    size = x[:1].numel()
    shifted, streams = x.clone(), NoiseStreams(seed, size)
    for start in range(0, len(order), max(1, CELLS // size)):
        rows = order[start : start + max(1, CELLS // size)]
        at, level = torch.from_numpy(rows).to(x.device), torch.from_numpy(owner[rows] / (clients - 1))
        part = x[at].to(torch.float64 if x.dtype == torch.float64 else torch.float32)
        if rotation:
            part = rotate(part, torch.deg2rad(rotation * level))
        if noise:
            spread = (noise * (255 if pixels else 1) * level).to(part).view(-1, *[1] * (x.ndim - 1))
            part.addcmul_(spread, streams.next(owner[rows]).to(part).view_as(part))
        shifted[at] = part.round_().clamp_(0, 255).to(torch.uint8) if pixels else part.to(x.dtype)
    return shifted


def check_inputs(x: Tensor, rotation: float) -> None:
    """Refuse inputs that cannot be shifted: tokens, and anything but images where there is a rotation."""
    if x.dtype != torch.uint8 and not x.is_floating_point():
        raise DataError(
            f"noise and rotation need real inputs or bytes, got {x.dtype}; "
            "set partition.noise and partition.rotation to 0."
        )
    if rotation and x.ndim != 4:
        raise DataError(
            f"rotation needs images [channels, height, width], got inputs of shape {list(x.shape[1:])}; "
            "set partition.rotation = 0."
        )


def rotate(x: Tensor, angle: Tensor) -> Tensor:
    """Images [B, c, h, w], each rotated counterclockwise by its angle in radians."""
    h, w = x.shape[-2:]
    cos, sin = angle.cos(), angle.sin()
    zero = torch.zeros_like(angle)
    # Where each pixel comes from, in units of half the width and half the height.
    source = torch.stack([torch.stack([cos, -sin * h / w, zero], 1), torch.stack([sin * w / h, cos, zero], 1)], 1)
    grid = affine_grid(source.to(x), list(x.shape), align_corners=False)
    return grid_sample(x, grid, padding_mode="zeros", align_corners=False)


class NoiseStreams:
    """Standard normal numbers for samples ordered by client, each client's from its own stream."""

    def __init__(self, seed: int, size: int) -> None:
        self.seed, self.size = seed, size
        self.client, self.rng = -1, generator(seed, "feature noise")  # of the latest sample

    def next(self, owner: np.ndarray) -> Tensor:
        """The numbers of the samples that follow, which belong to these clients, [n, size].

        The first client may be the last one of the call before: its stream goes on.
        """
        noise = np.empty((len(owner), self.size), dtype=np.float32)
        ids, starts = np.unique(owner, return_index=True)
        for i, a, b in zip(ids.tolist(), starts, [*starts[1:], len(owner)], strict=True):
            if i != self.client:
                self.client, self.rng = i, generator(self.seed, "feature noise", client=i)
            self.rng.standard_normal(dtype=np.float32, out=noise[a:b])
        return torch.from_numpy(noise)
