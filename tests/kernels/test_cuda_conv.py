"""The CUDA kernels of small convolutions, without a GPU: compiled as C++ and run by emulate.h, against float64."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from emulator import address, compiled
from torch import Tensor

from askew.kernels.cuda.small_conv import SOURCE, WARPS, ConvSizes

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")

LAUNCHERS = """
#define LAUNCH(bytes, call) launch(gx, gy, gz, THREADS, bytes, [=] { call; })
extern "C" void run_forward(int gx, int gy, int gz, const In* x, const float* w, const float* bias, Out* y, u8* which,
                            const int* real, int batch, int apart, int bias_apart, int each, int images) {
  LAUNCH(images * 4 * IMAGE, forward(x, w, bias, y, which, real, batch, apart, bias_apart, each, images));
}
extern "C" void run_weights(int gx, int gy, int gz, const In* x, const Out* g, const u8* which, float* parts,
                            const int* real, int batch, int each, int images) {
  LAUNCH(images * (4 * IMAGE + 40 * BACK), weights(x, g, which, parts, real, batch, each, images));
}
extern "C" void run_fold(int gx, int gy, int gz, const float* parts, float* out, int count) {
  LAUNCH(0, fold(parts, out, count));
}
extern "C" void run_inputs(int gx, int gy, int gz, const Out* g, const u8* which, const float* w, In* dx,
                           const int* real, int batch, int apart, int each, int images) {
  const int bytes = 4 * PIXELS * PATCH_ROW + 40 * CHANNEL_TILES * INPUT_BACK;
  LAUNCH(images * bytes, inputs(g, which, w, dx, real, batch, apart, each, images));
}
extern "C" int number(int which) {
  const int numbers[] = {4 * IMAGE, 40 * BACK, 4 * PIXELS * PATCH_ROW + 40 * CHANNEL_TILES * INPUT_BACK, SUMS, TURNS,
                         GROUPS, TOGETHER, SHARES, ABREAST, overrun};
  return numbers[which];
}
"""


def kernels_of(shape: ConvSizes, split: bool, folder: Path) -> ctypes.CDLL:
    """The kernels for the CPU."""
    constants = dict(zip(("CI", "H", "W", "CO", "K", "PAD"), shape, strict=True))
    constants |= {"PART": shape.part, "HALF_IN": 0, "HALF_OUT": 0, "SPLIT": int(split)}
    return compiled(SOURCE, constants, LAUNCHERS, folder)


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """What no kernel has written yet."""
    return torch.full(shape, 99, dtype=dtype) if dtype is torch.uint8 else torch.full(shape, torch.nan)


def relative_error(tensor: Tensor, exact: Tensor) -> float:
    return float((tensor - exact).abs().max() / exact.abs().max())


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize(
    ("shape", "batch", "images", "each", "counted"),
    [
        (ConvSizes(3, 32, 32, 6, 5, 0), 3, 1, 2, False),
        (ConvSizes(6, 14, 14, 16, 5, 0), 6, 3, 4, True),
        (ConvSizes(1, 28, 28, 6, 5, 2), 3, 2, 2, True),
        pytest.param(ConvSizes(2, 13, 11, 12, 3, 0), 3, 2, 3, False, marks=pytest.mark.slow),
        pytest.param(ConvSizes(16, 9, 10, 3, 5, 1), 2, 1, 2, False, marks=pytest.mark.slow),
        pytest.param(ConvSizes(3, 12, 12, 4, 4, 0), 3, 2, 3, True, marks=pytest.mark.slow),
        pytest.param(ConvSizes(2, 20, 22, 7, 7, 2), 2, 1, 1, False, marks=pytest.mark.slow),
    ],
)
def test_outputs_and_gradients(
    shape: ConvSizes, batch: int, images: int, each: int, counted: bool, split: bool, tmp_path: Path
) -> None:
    """Two networks, whose weights are rows of a longer vector; `counted`: only some samples are real."""
    kernels, groups, (ci, h, w, co, k, pad) = kernels_of(shape, split, tmp_path), 2, shape
    (ho, wo), blocks = shape.pooled, -(-batch // each)
    columns, warps, warps_per_block = shape.column_tiles
    numbers = [shape.image, shape.back, shape.patches(shape.part), shape.channel_tiles * 32 * columns * 8]
    numbers += [WARPS // warps_per_block, *shape.groups, warps, warps_per_block]
    assert [kernels.number(n) for n in range(9)] == numbers and shape.fits()

    draw = torch.Generator().manual_seed(0)
    x, long = torch.randn(groups, batch, ci, h, w, generator=draw), co * ci * k * k + co + 5
    flat = 0.2 * torch.randn(groups, long, generator=draw)
    weight, bias = flat[:, : co * ci * k * k].view(groups, co, ci, k, k), flat[:, co * ci * k * k : -5]
    real = torch.tensor([batch // 2, 0][:groups], dtype=torch.int32) if counted else None
    y, which = empty(groups, batch, co, ho, wo), empty(groups, batch, co, ho, wo, dtype=torch.uint8)
    ours = [address(t) for t in (x, flat, bias, y, which, real)]
    kernels.run_forward(blocks, groups, -(-shape.groups[0] // shape.groups[1]), *ours, batch, long, long, each, images)
    exact = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    before = torch.stack([F.conv2d(a, b, c, padding=pad) for a, b, c in zip(*exact, strict=True)])
    four = before[..., : 2 * ho, : 2 * wo].reshape(groups, batch, co, ho, 2, wo, 2).movedim(-3, -2).flatten(-2)
    same_choice = four.gather(-1, which.long().clamp(max=3)[..., None])[..., 0] * (which < 4)
    there = torch.arange(batch) < (torch.full((groups,), batch) if real is None else real)[:, None]
    is_real = there[..., None, None, None]
    right = F.max_pool2d(before.flatten(0, 1).relu(), 2).view(y.shape).detach()
    assert y.isfinite().all() and (which <= 4).all()
    assert ((y - right) * is_real).abs().max() < (2e-5 if split else 1e-2)

    g = torch.randn(y.shape, generator=draw) * is_real
    want = torch.autograd.grad((same_choice * g.double()).sum(), exact)
    parts, sums, dx = empty(groups, blocks * numbers[4], numbers[3]), empty(groups, long - 5), empty(*x.shape)
    given = [address(t) for t in (x, g, which, parts, real)]
    kernels.run_weights(blocks, groups, shape.channel_tiles * -(-warps // warps_per_block), *given, batch, each, images)
    kernels.run_fold(-(-sums.shape[1] // 128), groups, 1, address(parts), address(sums), parts.shape[1])
    given = [address(t) for t in (g, which, flat, dx, real)]
    kernels.run_inputs(blocks, groups, -(-ci // shape.part), *given, batch, long, each, images)
    for ours_, theirs in zip((dx, sums[:, :-co].view(weight.shape), sums[:, -co:]), want, strict=True):
        assert relative_error(ours_, theirs) < (1e-6 if split else 2e-3)
    assert not kernels.number(9)
