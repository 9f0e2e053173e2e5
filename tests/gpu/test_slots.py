"""The slots and the stacked engine on a CUDA device: every method against the sequential reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import askew
from askew.algorithms import algorithms
from askew.bench.workloads import with_random_images
from askew.core.space import Space
from askew.engine import stacked
from askew.engine.jobs import RequestJobs
from askew.engine.slots import Slots
from askew.experiment.config import Config
from askew.experiment.run import run_together

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LOCAL = {"epochs": 2, "batch": 16, "lr": 0.1, "momentum": 0.5, "weight_decay": 1e-3, "clip": 5.0, "decay": 0.9}
RATES = {"fedamd": 0.01, "focus": 0.01}  # at 0.1 they diverge here, and a rounding grows a million times
FULL_GRADIENTS = ("fedsgd", "fedga", "fedamd")  # methods that refuse batch norm


def run(
    method: str, engine: str, model: object, device: str = "cuda", dtype: str = "float32", **more: object
) -> askew.Run:
    """A run of four rounds with five of twelve clients each, unless `more` says otherwise."""
    local = LOCAL | {"lr": RATES.get(method, LOCAL["lr"])}
    settings = {"clients": 12, "cohort": 5, "rounds": 4, "local": local, "model": model} | more
    return askew.run(method, engine={"name": engine, "device": device, "dtype": dtype}, **settings)  # type: ignore[arg-type]


def model_gap(a: askew.Run, b: askew.Run) -> float:
    """The largest difference between two runs' models."""
    return max(float((a.model[n].double() - v.double()).abs().max()) for n, v in b.model.items())


def gap_from_rounding(method: str, model: object, reference: askew.Run, monkeypatch: pytest.MonkeyPatch) -> float:
    """How far sequential runs end from the reference when their first models differ by a few roundings.

    Then another of two almost equal pixels is the largest, a ReLU goes on or off, a quotient of tiny numbers changes.
    """
    original, gaps = Space.__init__, list[float]()

    def perturbed(self: Space, *arguments: Any, **more: Any) -> None:
        original(self, *arguments, **more)
        self.start.mul_(1 + 1e-6 * torch.randn(self.start.shape, generator=generator).to(self.start))

    with monkeypatch.context() as patch:
        patch.setattr(Space, "__init__", perturbed)
        for seed in range(12):
            generator = torch.Generator().manual_seed(seed)
            gaps.append(model_gap(run(method, "sequential", model), reference))
    return max(gaps)


@pytest.mark.parametrize("engine", ["slots", "stacked"])
@pytest.mark.parametrize("method", list(algorithms))
def test_every_method_equals_the_sequential_reference(
    method: str, engine: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ragged batches, momentum, weight decay, clipping, a decaying rate; convolutions, in slots with batch norm.

    In float64 to many digits. In float32 too, or no further apart than the reference gets from itself by rounding.
    """
    norm = "none" if engine == "stacked" else "group" if method in FULL_GRADIENTS else "batch"
    if method == "fedbn":
        norm = "batch"  # its private part
    model = {"name": "cnn", "width": 4, "norm": norm}
    reference, tested = run(method, "sequential", model), run(method, engine, model)
    gap = model_gap(tested, reference)
    gap64 = model_gap(
        run(method, engine, model, dtype="float64", rounds=2),
        run(method, "sequential", model, dtype="float64", rounds=2),
    )
    with capsys.disabled():
        print(f"\n{method:12s} {engine:8s} float32 {gap:.1e}  float64 {gap64:.1e}", end="")
    assert tested.facts["engine"] == ("vmapped" if (engine, norm) == ("stacked", "batch") else engine)
    # fedalign divides by a loss; the others solve a quadratic programme to a tolerance
    tolerances = {"fedalign": 1e-4, "mgda": 1e-6, "fedmgdaplus": 1e-6}
    assert gap64 < tolerances.get(method, 1e-10)
    assert gap < 1e-5 or gap < 3 * gap_from_rounding(method, model, reference, monkeypatch)
    assert [r["bytes_up"] for r in tested.rounds] == [r["bytes_up"] for r in reference.rounds]


@pytest.mark.parametrize("method", ["fedprox", "fedcm", "fedavg"])
def test_runs_of_a_sweep_share_the_rows(method: str) -> None:
    """Rates, seeds and a method's own settings differ; every run is what it is alone."""
    own = {"fedprox": "mu", "fedcm": "alpha"}.get(method)
    # float64, as in float32 the rounding of products depends on the number of rows
    engine = {"name": "stacked", "device": "cuda", "dtype": "float64"}
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
        assert model_gap(run, alone) < 1e-11


def test_several_methods_on_streams_of_their_own() -> None:
    """Clients of very different sizes, twelve rounds: every run is, to the last bit, what it is alone."""
    engine = {"name": "stacked", "device": "cuda", "dtype": "float32"}
    partition = {"name": "dirichlet", "alpha": 0.2, "clients": 12}
    settings = {"rounds": 12, "local": LOCAL | {"batch": 4}, "model": {"name": "lenet"}, "engine": engine}
    methods = ("fedavg", "scaffold", "moon", "feddyn", "fedcm", "feddc")
    configs = [Config.build(settings | {"algorithm": {"name": m}, "partition": partition}) for m in methods]
    for config, run in zip(configs, run_together(configs), strict=True):
        (alone,) = run_together([config])
        assert model_gap(run, alone) == 0


@pytest.mark.parametrize("engine", ["slots", "stacked"])
@pytest.mark.parametrize("dtype", ["float32", "tf32"])
def test_many_large_batches_of_a_network_without_kernels(engine: str, dtype: str) -> None:
    """Padded convolutions, 150 clients with batches of 128: activations of two gigabytes. Three rounds are those of the
    sequential engine.
    """
    tables = {
        "rounds": 3,
        "data": {"name": "cifar10"},
        "partition": {"name": "iid", "clients": 150},
        "participation": {"name": "full"},
        "model": {"name": "convnet", "channels": [32, 32], "hidden": [256, 64], "padding": 1},
        "local": {"steps": 2, "batch": 128, "lr": 0.05},
    }
    runs = list[askew.Run]()
    for name, precision in (("sequential", "float32"), (engine, dtype)):
        settings = {"name": name, "device": "cuda", "dtype": precision}
        runs += run_together([with_random_images(Config.build(tables | {"engine": settings}))])
    assert model_gap(*runs) < 1e-3
    assert abs(runs[0].rounds[-1]["train_loss"] - runs[1].rounds[-1]["train_loss"]) < 1e-3


def test_no_slot_reads_the_numbers_of_clients_before_they_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take long here. Rates and steps of the second run, computed on one slot's stream, were read by others."""
    compute = RequestJobs.compute_numbers

    def compute_late(self: RequestJobs) -> None:
        torch.cuda._sleep(200_000_000)  # a tenth of a second
        compute(self)

    def configs(engine: str) -> list[Config]:
        tables = {
            "rounds": 2,
            "partition": {"clients": 12},
            "participation": {"name": "bernoulli", "fraction": 0.6},
            "model": {"name": "lenet"},
            "local": LOCAL,
            "engine": {"name": engine, "device": "cuda", "dtype": "float64"},
        }
        return [Config.build(tables | {"seed": seed}) for seed in range(3)]

    alone = [run_together([config])[0] for config in configs("sequential")]
    monkeypatch.setattr(RequestJobs, "compute_numbers", compute_late)
    for one, other in zip(alone, run_together(configs("slots")), strict=True):
        assert model_gap(one, other) < 1e-11


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "feddc"])
def test_long_clients_go_ahead_on_a_stream_of_their_own(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lot_counts: list[int] = []
    run_side_by_side = stacked.run_side_by_side

    def count_groups(rows: Any) -> Any:
        lot_counts.append(len(rows))
        return run_side_by_side(rows)

    monkeypatch.setattr(stacked, "run_side_by_side", count_groups)
    settings = {
        "dtype": "float64",
        "local": LOCAL | {"batch": 4},
        "partition": {"clients": 30, "alpha": 0.2},
        "clients": 30,
        "cohort": 15,
    }
    one, other = (run(method, engine, {"name": "lenet"}, **settings) for engine in ("sequential", "stacked"))  # type: ignore[arg-type]
    assert 2 in lot_counts and model_gap(one, other) < 1e-11


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "moon", "lossbias", "fedpdc"])
def test_more_jobs_than_slots(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = {"name": "cnn", "width": 4}
    one = run(method, "sequential", model, dtype="float64")
    monkeypatch.setattr(Slots.__init__, "__defaults__", (2, False))  # most = 2 slots
    assert model_gap(run(method, "slots", model, dtype="float64"), one) < 1e-10


@pytest.mark.parametrize("engine", ["slots", "stacked"])
@pytest.mark.parametrize("method", ["fedavg", "moon", "fedspeed"])
def test_an_lstm(method: str, engine: str) -> None:
    """Clients of unequal size, so that batches are padded."""
    tokens = torch.randint(0, 12, (400, 20)), torch.randint(0, 12, (400,))
    model = {"name": "charlstm", "hidden": 24, "layers": 3 if method == "moon" else 2}
    partition = {"clients": 6, "alpha": 0.5}
    one, other = (
        run(method, name, model, data=tokens, partition=partition, clients=6, cohort=3)
        for name in ("sequential", engine)
    )
    assert other.facts["engine"] == engine and model_gap(one, other) < 1e-4


@pytest.mark.parametrize("method", ["fedavg", "feddc"])
def test_many_channels_in_rows(method: str) -> None:
    """Clients of unequal size, so that batches are padded."""
    x, y = torch.randn(700, 3, 32, 32), torch.randint(0, 10, (700,))
    settings = {
        "data": (x, y),
        "partition": {"clients": 10, "alpha": 0.3},
        "clients": 10,
        "cohort": 5,
        "rounds": 2,
        "local": {"batch": 20, "lr": 0.01},
    }
    one, other = (run(method, engine, {"name": "cnn64"}, **settings) for engine in ("sequential", "stacked"))  # type: ignore[arg-type]
    assert other.facts["engine"] == "stacked" and model_gap(one, other) < 1e-5


def test_out_of_memory_halves_the_slots() -> None:
    x, y = torch.randn(1200, 3, 32, 32), torch.randint(0, 10, (1200,))
    settings = {
        "data": (x, y),
        "partition": {"name": "iid", "clients": 12},
        "cohort": 12,
        "rounds": 2,
        "local": {"batch": 100, "lr": 0.01},
    }
    model = {"name": "cnn64"}
    one = run("fedavg", "sequential", model, **settings)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 1.2 * 2**30) / total)
    try:
        other = run("fedavg", "slots", model, **settings)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert model_gap(one, other) < 1e-4


@pytest.mark.parametrize("engine", ["slots", "stacked"])
@pytest.mark.parametrize("dtype", ["tf32", "bf16"])
def test_lower_precision_is_near(dtype: str, engine: str) -> None:
    model = {"name": "cnn", "width": 8}
    one, other = run("fedavg", engine, model), run("fedavg", engine, model, dtype=dtype)
    assert 0 < model_gap(one, other) < 0.1 and other.model["conv1.weight"].dtype == torch.float32
