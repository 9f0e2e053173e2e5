"""The CUDA kernels of a whole LSTM layer, without a GPU: compiled as C++ and run by emulate.h, against float64."""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
from emulator import address, compiled
from torch import Tensor

from askew.kernels import batched_lstm

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")

LAUNCHERS = """
extern "C" bool run_forward(int gx, int gy, int gz, int bytes, const float* pre, const float* w, float* hidden,
                            float* cells, float* gates, int times, int batch, int pre_apart, int w_apart,
                            int state_apart, int gates_apart) {
  launch_clusters(RANKS, gx, gy, gz, THREADS, bytes, [=] {
    forward(pre, w, hidden, cells, gates, times, batch, pre_apart, w_apart, state_apart, gates_apart);
  });
  return overrun;
}
extern "C" bool run_backward(int gx, int gy, int gz, int bytes, const float* above, const float* dy, const float* w,
                             const float* cells, const float* gates, float* slopes, int times, int batch,
                             int above_apart, int dy_apart, int w_apart, int state_apart, int gates_apart) {
  launch_clusters(RANKS, gx, gy, gz, THREADS, bytes, [=] {
    backward(above, dy, w, cells, gates, slopes, times, batch, above_apart, dy_apart, w_apart, state_apart,
             gates_apart);
  });
  return overrun;
}
"""


def candidate() -> ModuleType:
    """The module benchmarks/lstm_clusters.py."""
    path = Path(__file__).parents[2] / "benchmarks" / "lstm_clusters.py"
    spec = importlib.util.spec_from_file_location("lstm_clusters", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("groups", "batch", "times", "layers", "units"),
    [
        (2, 5, 3, 2, 64),
        pytest.param(1, 17, 4, 3, 96, marks=pytest.mark.slow),
        pytest.param(1, 2, 2, 1, 256, marks=pytest.mark.slow),
    ],
)
def test_a_launch_a_layer(
    groups: int, batch: int, times: int, layers: int, units: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several networks and layers, and samples that are not a whole number of clusters."""
    module, libraries = candidate(), dict[tuple[int, int], ctypes.CDLL]()
    monkeypatch.setattr(module, "MOST_SAMPLES", 3)
    monkeypatch.setattr(module, "TIMES", times)

    class Emulated:
        def __init__(self, name: str, ranks: int, samples: int) -> None:
            key = ranks, samples
            if key not in libraries:
                libraries[key] = compiled(module.SOURCE, {"RANKS": ranks, "SAMPLES": samples}, LAUNCHERS, tmp_path)
            self.function = getattr(libraries[key], f"run_{name}")

        def launch(self, grid: tuple[int, int, int], threads: int, memory: int, given: tuple[object, ...]) -> None:
            assert threads == module.THREADS
            values = [address(g) if g is None or isinstance(g, Tensor) else ctypes.c_int(g) for g in given]  # type: ignore[arg-type]
            assert not self.function(*grid, memory, *values) & 0xFF

    monkeypatch.setattr(module, "kernel", Emulated)
    exact = module.example(groups, batch, layers, units, "cpu")
    pre, weights, bias, dy = (t.float() for t in exact)
    right, found = module.states(exact[0], exact[1], exact[3]), module.states(pre, weights, dy)
    batched_lstm.run_forward(*exact[:3], *right)
    module.run_forward(pre, weights, bias, *found)
    for ours, wanted in zip(found, right, strict=True):
        assert (ours - wanted).abs().max() < 1e-5 * wanted.abs().max()
    ours = module.run_backward(dy, weights, *found[1:])
    wanted = batched_lstm.run_backward(exact[3], exact[1], *right[1:])
    assert (ours - wanted).abs().max() < 1e-5 * wanted.abs().max()
