"""Time steps of LSTM layers with their weights in registers, beside the kernels that askew uses: are they faster?

$ python benchmarks/lstm_clusters.py --groups 10 --batch 10

A candidate for askew.kernels.cuda.lstm, which launches a kernel for every time and reads all weights each time. Here a
layer is one launch, and a cluster of blocks has a network (lstm_clusters.cu). It needs a GPU with clusters, from the
H100 on, and layers of 32 to 256 units. Both are compared with torch in float64, and timed in turn.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from askew.bench.timing import seconds_of
from askew.kernels import batched_lstm
from askew.kernels.cuda import lstm, nvrtc

SOURCE = Path(__file__).with_suffix(".cu")
NAMES = ("forward", "backward")
UNITS, MOST_RANKS, THREADS = 32, 8, 512  # units of a block, blocks of a cluster, threads of a block
FORWARD_PARTS, BACKWARD_PARTS = 8, 16  # as in the CUDA file
MOST_SAMPLES = 16  # of a cluster
INPUTS, TIMES = 8, 80  # of the networks that are timed


def kernel(name: str, ranks: int, samples: int) -> nvrtc.Kernel:
    constants = (("RANKS", ranks), ("SAMPLES", samples))
    return nvrtc.kernels(SOURCE, constants, NAMES, torch.cuda.current_device())[NAMES.index(name)]


def shape(gates: Tensor) -> tuple[int, int, tuple[int, int, int]]:
    """Blocks of a cluster, samples of a cluster, and the grid; gates [G, L, T, B, 4, H]."""
    groups, _, _, batch, _, units = gates.shape
    tiles = -(-batch // MOST_SAMPLES)
    return units // UNITS, -(-batch // tiles), (units // UNITS, groups, tiles)


def run_forward(pre: Tensor, weights: Tensor, bias: Tensor, hidden: Tensor, cells: Tensor, gates: Tensor) -> None:
    """Fill hidden, cells and gates, from the first layer's inputs `pre`; shapes as in batched_lstm.py."""
    (_, layers, times, batch, _, size), (ranks, samples, grid) = gates.shape, shape(gates)
    memory = 4 * samples * (2 * size + FORWARD_PARTS * 4 * UNITS)
    for layer in range(layers):
        if layer:
            below = hidden[:, layer - 1, 1:].flatten(1, 2)
            pre = torch.baddbmm(bias[:, layer, None], below, weights[:, 2 * layer].mT)
        apart = (pre.stride(0), weights.stride(0), hidden.stride(0), gates.stride(0))
        tensors = (pre, weights[:, max(2 * layer - 1, 0)], hidden[:, layer], cells[:, layer], gates[:, layer])
        kernel("forward", ranks, samples).launch(grid, THREADS, memory, (*tensors, times, batch, *apart))


def run_backward(dy: Tensor, weights: Tensor, cells: Tensor, gates: Tensor) -> Tensor:
    """What flows back to the gates, before their sigmoids and tanh, from that to the last layer's last output."""
    (_, layers, times, batch, _, size), (ranks, samples, grid) = gates.shape, shape(gates)
    memory = 4 * samples * (2 * 4 * size + BACKWARD_PARTS * UNITS)
    slopes, above = torch.empty_like(gates), None
    for layer in reversed(range(layers)):
        if layer < layers - 1:
            above = slopes[:, layer + 1].flatten(3).flatten(1, 2) @ weights[:, 2 * layer + 2]
        own = (weights[:, max(2 * layer - 1, 0)], cells[:, layer], gates[:, layer], slopes[:, layer])
        apart = (0 if above is None else above.stride(0), dy.stride(0), weights.stride(0), cells.stride(0))
        numbers = (times, batch, *apart, gates.stride(0))
        kernel("backward", ranks, samples).launch(grid, THREADS, memory, (above, dy, *own, *numbers))
    return slopes


def example(groups: int, batch: int, layers: int, units: int, device: str) -> tuple[Tensor, ...]:
    """pre, weights, bias and dy of networks, in float64."""
    torch.manual_seed(0)
    draw: Callable[..., Tensor] = lambda *sizes: torch.randn(*sizes, dtype=torch.float64, device=device)
    weights, bias = draw(groups, 2 * layers - 1, 4 * units, units) / units**0.5, draw(groups, layers, 4 * units)
    return draw(groups, TIMES * batch, 4 * units), weights, bias, draw(groups, batch, units)


def states(pre: Tensor, weights: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """hidden, cells and gates, of which the first two begin with zeros."""
    (groups, batch, units), layers = dy.shape, (weights.shape[1] + 1) // 2
    times = pre.shape[1] // batch
    hidden, cells = (pre.new_zeros(groups, layers, times + 1, batch, units) for _ in range(2))
    return hidden, cells, pre.new_empty(groups, layers, times, batch, 4, units)


def show(groups: int, batch: int, layers: int, units: int, rounds: int) -> None:
    """Errors against float64 and times of both, forward and backward."""
    given, device = example(groups, batch, layers, units, "cuda"), torch.device("cuda")
    right: list[Tensor] = []
    ways = {"float64": batched_lstm, "a launch a time": lstm, "a launch a layer": None}
    for name, way in ways.items():
        pre, weights, bias, dy = given if name == "float64" else (t.float() for t in given)
        forward = run_forward if way is None else way.run_forward
        backward = run_backward if way is None else way.run_backward
        hidden, cells, gates = states(pre, weights, dy)

        def ahead() -> None:
            forward(pre, weights, bias, hidden, cells, gates)  # noqa: B023 - called in this pass of the loop

        def back() -> Tensor:
            return backward(dy, weights, cells, gates)  # noqa: B023

        ahead()
        found = [hidden, cells, gates, back()]
        right = right or found
        errors = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, right, strict=True)]
        times = [statistics.median(seconds_of(device, work) for _ in range(rounds)) for work in (ahead, back)]
        print(f"{name}: forward {1e3 * times[0]:.3f} ms, backward {1e3 * times[1]:.3f}, error {max(errors):.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=10, help="networks")
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--units", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    show(options.groups, options.batch, options.layers, options.units, options.rounds)


if __name__ == "__main__":
    main()
