"""The time steps of the LSTM layers of many networks, for CUDA: one kernel a step serves all networks and layers.

A layer at a time needs the layer below at the same time and itself one time before. So while the first layer is at time
t, the second one is at t - 1, and so on; all of them are in one launch. Such a launch reads every weight once, which is
what it takes its time for.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from . import available
from .rows import cudnn_precision

UNITS = 64  # a layer's units are padded to a multiple
FORWARD = (16, 64, 4, 4)  # units of one program, inputs at a time, its warps, and the stages of its loop
BACKWARD = (16, 32, 4, 4)  # units of one program, inputs of each gate at a time, warps, stages
FEWEST, MOST = 16, 32  # samples of one program


def can_launch(x: Tensor) -> bool:
    """Can the kernels take this?"""
    return x.is_cuda and x.dtype is torch.float32 and available()


def run_forward(pre: Tensor, weights: Tensor, bias: Tensor, hidden: Tensor, cells: Tensor, gates: Tensor) -> None:
    """Fill hidden, cells and gates, from the first layer's inputs `pre`; shapes as in batched_lstm.py."""
    groups, layers, times, batch, _, size = gates.shape
    units, depth, warps, stages = FORWARD
    sizes = (layers, size, block_of(batch), units, depth, cudnn_precision())
    for step, low, top in steps(times, layers):
        tiles = -(-batch // block_of(batch))
        grid = (size // units, groups, tiles * (top - low + 1))
        kernels().forward[grid](
            *(pre, weights, bias, hidden, cells, gates, step, top, times, batch, tiles, *sizes),
            num_warps=warps,
            num_stages=stages,
        )


def run_backward(dy: Tensor, weights: Tensor, cells: Tensor, gates: Tensor) -> Tensor:
    """What flows back to the gates, before their sigmoids and tanh, from that to the last layer's last output."""
    groups, layers, times, batch, _, size = gates.shape
    units, depth, warps, stages = BACKWARD
    sizes = (layers, size, block_of(batch), units, depth, cudnn_precision())
    slopes, carried = torch.empty_like(gates), gates.new_zeros((groups, layers, batch, size))
    for step, low, top in reversed(list(steps(times, layers))):
        tiles = -(-batch // block_of(batch))
        grid = (size // units, groups, tiles * (top - low + 1))
        kernels().backward[grid](
            *(dy, weights, cells, gates, slopes, carried, step, top, times, batch, tiles, *sizes),
            num_warps=warps,
            num_stages=stages,
        )
    return slopes


def steps(times: int, layers: int) -> Iterator[tuple[int, int, int]]:
    """The launches: their number, and the lowest and highest layer at work, each at the time number - layer."""
    for step in range(times + layers - 1):
        yield step, max(0, step - times + 1), min(layers - 1, step)


def block_of(batch: int) -> int:
    """The samples of one program."""
    return FEWEST if batch <= FEWEST else MOST


@cache
def kernels() -> ModuleType:
    """The kernels; triton is loaded where they are first needed."""
    from . import triton_lstm

    return triton_lstm
