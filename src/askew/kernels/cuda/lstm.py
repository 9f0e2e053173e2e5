"""The time steps of the LSTM layers of many networks, for CUDA: one kernel a step serves all networks and layers.

A layer at a time needs the layer below at the same time and itself one time before. So while the first layer is at time
t, the second one is at t - 1, and so on; all of them are in one launch. Such a launch reads every weight once, which is
what it takes its time for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import available, triton_kernels
from .rows import cudnn_precision

kernels = partial(triton_kernels, "lstm")


class Shape(NamedTuple):
    """How a kernel divides its work."""

    units: int  # of one program
    depth: int  # inputs at a time; backward, of each gate
    warps: int
    stages: int  # of its loop


class Launch(NamedTuple):
    """The number of a launch, and the lowest and highest layer at work; each is at the time number - layer."""

    step: int
    low: int
    top: int


UNITS = 64  # a layer's units are padded to a multiple
FORWARD = Shape(units=16, depth=64, warps=4, stages=3)
BACKWARD_FEW = Shape(units=16, depth=32, warps=4, stages=3)  # of few networks, whose weights stay in the cache
BACKWARD_MANY = Shape(units=64, depth=16, warps=4, stages=4)
MANY_NETWORKS = 16  # networks; measured: 10 and 30
SMALL_BLOCK, LARGE_BLOCK = 16, 32  # samples of one program


def can_launch(x: Tensor) -> bool:
    """Can the kernels take this?"""
    return x.is_cuda and x.dtype is torch.float32 and available()


def run_forward(pre: Tensor, weights: Tensor, bias: Tensor, hidden: Tensor, cells: Tensor, gates: Tensor) -> None:
    """Fill hidden, cells and gates, from the first layer's inputs `pre`; shapes as in batched_lstm.py."""
    launches = list(steps(gates.shape[2], gates.shape[1]))
    launch(kernels().forward, FORWARD, launches, gates, (pre, weights, bias, hidden, cells, gates))


def run_backward(dy: Tensor, weights: Tensor, cells: Tensor, gates: Tensor) -> Tensor:
    """What flows back to the gates, before their sigmoids and tanh, from that to the last layer's last output."""
    slopes, carried = torch.empty_like(gates), cells.new_zeros(cells[:, :, 0].shape)
    launches = list(steps(gates.shape[2], gates.shape[1]))[::-1]
    shape = BACKWARD_MANY if len(gates) > MANY_NETWORKS else BACKWARD_FEW
    launch(kernels().backward, shape, launches, gates, (dy, weights, cells, gates, slopes, carried))
    return slopes


def launch(kernel: Any, shape: Shape, launches: Sequence[Launch], gates: Tensor, tensors: tuple[Tensor, ...]) -> None:
    """One launch of a kernel for each step."""
    groups, layers, times, batch, _, size = gates.shape
    block = SMALL_BLOCK if batch <= SMALL_BLOCK else LARGE_BLOCK
    tiles, sizes = -(-batch // block), (layers, size, block, shape.units, shape.depth, cudnn_precision())
    options = {"num_warps": shape.warps, "num_stages": shape.stages}
    for step, low, top in launches:
        grid = (size // shape.units, groups, tiles * (top - low + 1))
        kernel[grid](*tensors, step, top, times, batch, tiles, *sizes, **options)


def steps(times: int, layers: int) -> Iterator[Launch]:
    """The launches of all times and layers."""
    for step in range(times + layers - 1):
        yield Launch(step, max(0, step - times + 1), min(layers - 1, step))
