"""The slots engine on a CUDA device: every method equals the sequential reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import askew
from askew.algorithms import algorithms
from askew.core.space import Space
from askew.engine import stacked as rows
from askew.experiment.config import Config
from askew.experiment.run import run_together

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LOCAL = {"epochs": 2, "batch": 16, "lr": 0.1, "momentum": 0.5, "weight_decay": 1e-3, "clip": 5.0, "decay": 0.9}
STILL = ("fedsgd", "fedga", "fedamd")  # full gradients need no batch norm


def run(
    method: str, engine: str, model: object, device: str = "cuda", dtype: str = "float32", **more: object
) -> askew.Run:
    given = {"clients": 12, "cohort": 5, "rounds": 4, "local": LOCAL, "model": model} | more
    return askew.run(method, engine={"name": engine, "device": device, "dtype": dtype}, **given)  # type: ignore[arg-type]


def apart(a: askew.Run, b: askew.Run) -> float:
    return max(float((a.model[n].double() - v.double()).abs().max()) for n, v in b.model.items())


def shaken(method: str, model: object, one: askew.Run, monkeypatch: pytest.MonkeyPatch) -> float:
    """How far the sequential run gets from itself when its start is a few roundings off: of two almost equal pixels another is
    the largest, a unit of ReLU's goes on or off, and a quotient of two tiny numbers is another.
    """
    begin, far = Space.__init__, list[float]()

    def moved(self: Space, *given: Any, **more: Any) -> None:
        begin(self, *given, **more)
        self.start.mul_(1 + 1e-6 * torch.randn(self.start.shape, generator=chance).to(self.start))

    with monkeypatch.context() as patch:
        patch.setattr(Space, "__init__", moved)
        for seed in range(12):
            chance = torch.Generator().manual_seed(seed)
            far.append(apart(run(method, "sequential", model), one))
    return max(far)


@pytest.mark.parametrize("engine", ["slots", "vmapped"])
@pytest.mark.parametrize("method", list(algorithms))
def test_every_method_equals_the_sequential_reference(
    method: str, engine: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ragged batches, momentum, weight decay, clipping, a decaying rate; convolutions, in slots with batch norm.

    In float64 to many digits. In float32 too, or no further apart than the reference is from itself when it is shaken.
    """
    norm = "none" if engine == "vmapped" else "group" if method in STILL else "batch"
    if method == "fedbn" and engine == "vmapped":
        norm = "batch"
    model = {"name": "cnn", "width": 4, "norm": norm}
    one = run(method, "sequential", model)
    other = run(method, engine, model)
    double = apart(
        run(method, engine, model, dtype="float64", rounds=2),
        run(method, "sequential", model, dtype="float64", rounds=2),
    )
    with capsys.disabled():
        print(f"\n{method:12s} {engine:8s} float32 {apart(other, one):.1e}  float64 {double:.1e}", end="")
    assert other.facts["engine"] == engine
    tiny = {"fedalign": 1e-4, "mgda": 1e-6, "fedmgdaplus": 1e-6}  # divides by a loss; solve a programme to a tolerance
    assert double < tiny.get(method, 1e-10)
    far = apart(other, one)
    assert far < 1e-5 or far < 3 * shaken(method, model, one, monkeypatch)
    assert [r["bytes_up"] for r in other.rounds] == [r["bytes_up"] for r in one.rounds]


@pytest.mark.parametrize("method", ["fedprox", "fedcm", "fedavg"])
def test_runs_of_a_sweep_share_the_rows(method: str) -> None:
    """Rates, seeds and a method's own settings differ; every run is what it is alone."""
    own = {"fedprox": "mu", "fedcm": "alpha"}.get(method)
    engine = {
        "name": "vmapped",
        "device": "cuda",
        "dtype": "float64",
    }  # in float32, products round by the number of rows
    tables = [
        {
            "algorithm": {"name": method} | ({own: value} if own else {}),
            "seed": seed,
            "local": LOCAL | {"lr": lr},
            "model": {"name": "lenet"},
        }
        for value, lr, seed in ((0.1, 0.1, 0), (0.5, 0.05, 0), (0.9, 0.1, 1))
    ]
    configs = [Config.build(table | {"rounds": 3, "partition": {"clients": 12}, "engine": engine}) for table in tables]
    for config, run in zip(configs, run_together(configs), strict=True):
        (alone,) = run_together([config])
        assert apart(run, alone) < 1e-11


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "feddc"])
def test_long_clients_go_ahead_on_a_stream_of_their_own(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    play = rows.side_by_side

    def watched(phase: Any, lanes: Any, differ: Any) -> Any:
        seen.append(len(lanes))
        return play(phase, lanes, differ)

    monkeypatch.setattr(rows, "side_by_side", watched)
    given = {
        "dtype": "float64",
        "local": LOCAL | {"batch": 4},
        "partition": {"clients": 30, "alpha": 0.2},
        "clients": 30,
        "cohort": 15,
    }
    other, one = (run(method, engine, {"name": "lenet"}, **given) for engine in ("vmapped", "sequential"))  # type: ignore[arg-type]
    assert 2 in seen and apart(one, other) < 1e-11


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "moon", "lossbias", "fedpdc"])
def test_more_jobs_than_slots(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = {"name": "cnn", "width": 4}
    one = run(method, "sequential", model, dtype="float64")
    monkeypatch.setattr("askew.engine.slots.Slots.__init__.__defaults__", (2, False))
    assert apart(run(method, "slots", model, dtype="float64"), one) < 1e-10


def test_an_lstm_in_slots() -> None:
    tokens = torch.randint(0, 12, (400, 20)), torch.randint(0, 12, (400,))
    model = {"name": "charlstm", "hidden": 16}
    one, other = (
        run("fedavg", engine, model, data=tokens, partition={"name": "iid", "clients": 6}, clients=6, cohort=3)
        for engine in ("sequential", "slots")
    )
    assert apart(one, other) < 1e-4


@pytest.mark.parametrize("method", ["fedavg", "feddc"])
def test_many_channels_in_rows(method: str) -> None:
    """Clients of unequal size, so that batches are padded."""
    x, y = torch.randn(700, 3, 32, 32), torch.randint(0, 10, (700,))
    given = {
        "data": (x, y),
        "partition": {"clients": 10, "alpha": 0.3},
        "clients": 10,
        "cohort": 5,
        "rounds": 2,
        "local": {"batch": 20, "lr": 0.01},
    }
    one, other = (run(method, engine, {"name": "cnn64"}, **given) for engine in ("sequential", "vmapped"))  # type: ignore[arg-type]
    assert other.facts["engine"] == "vmapped" and apart(one, other) < 1e-5


def test_out_of_memory_halves_the_slots() -> None:
    x, y = torch.randn(1200, 3, 32, 32), torch.randint(0, 10, (1200,))
    given = {
        "data": (x, y),
        "partition": {"name": "iid", "clients": 12},
        "cohort": 12,
        "rounds": 2,
        "local": {"batch": 100, "lr": 0.01},
    }
    model = {"name": "cnn64"}
    one = run("fedavg", "sequential", model, **given)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 1.2 * 2**30) / total)
    try:
        other = run("fedavg", "slots", model, **given)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert apart(one, other) < 1e-4


@pytest.mark.parametrize("dtype", ["tf32", "bf16"])
def test_lower_precision_is_near(dtype: str) -> None:
    model = {"name": "cnn", "width": 8}
    one, other = run("fedavg", "slots", model), run("fedavg", "slots", model, dtype=dtype)
    assert 0 < apart(one, other) < 0.1 and other.model["conv1.weight"].dtype == torch.float32
