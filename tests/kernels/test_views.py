"""The CUDA kernel of random changes of images, without a GPU, against the plain code: the same numbers."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from emulator import address, compiled

from askew.data.transform import PixelTransform, sample_draws
from askew.kernels.cuda.views import SOURCE, ViewRules

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")

LAUNCHER = """
extern "C" void run_view(int count, const u8* images, const long long* draws, const float* scale, const float* offset,
                         float* out, double radians, int most) {
  launch(count, 1, 1, THREADS, 0, [=] { view(images, draws, scale, offset, out, radians, most); });
}
"""


@pytest.mark.parametrize(
    ("stored", "changes"),
    [
        ((3, 32, 32), {"pad": 4, "flip": True, "turn": 15.0}),
        ((3, 32, 32), {"pad": 4, "flip": True, "fill": "mean", "chance": 0.5}),
        ((3, 32, 32), {"pad": 4, "flip": True, "fill": "reflect"}),
        ((3, 32, 32), {"crop": 28, "flip": True}),
        ((1, 9, 13), {"pad": 2, "fill": "mean", "turn": 40.0, "chance": 0.3}),
        ((1, 12, 12), {"crop": 9, "pad": 1, "turn": 5.0, "fill": "reflect"}),
        ((2, 7, 7), {"flip": True}),
    ],
)
def test_every_image_is_changed_as_by_the_plain_code(
    stored: tuple[int, int, int], changes: dict[str, Any], tmp_path: Path
) -> None:
    shape = (stored[0], 1, 1)
    transform = PixelTransform(torch.full(shape, 0.45), torch.linspace(0.2, 0.3, stored[0]).view(shape), **changes)
    images = torch.randint(256, (40, *stored), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    draws = sample_draws(seed=3, count=len(images))
    right = transform(images, torch.float32, draws)
    _, height, width = transform.shape(stored)
    rules = ViewRules(height, width, transform.pad, transform.fill, transform.flip, transform.turn, transform.chance)
    out = torch.full(right.shape, torch.nan)
    radians, most = rules.numbers()
    kernel = compiled(SOURCE, rules.constants(stored), LAUNCHER, tmp_path)
    given = [address(t) for t in (images, draws, *transform.scale_and_offset, out)]
    kernel.run_view(len(images), *given, ctypes.c_double(radians), most)
    assert torch.equal(out, right)
    assert len({tuple(image.flatten().tolist()) for image in right}) == len(images)
