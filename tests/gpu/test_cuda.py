"""The same numbers on a CUDA device as on the CPU, for every method."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import askew
from askew.algorithms import algorithms
from askew.data.dataset import Dataset, Samples
from askew.data.transform import PixelTransform

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# Two engines on the CPU are 5e-11 and 2e-11 apart already: fedmgdaplus solves by iterations, and fedamd makes
# roundings 1e5 times larger here.
TOLERANCES = {"fedmgdaplus": 1e-9, "fedamd": 1e-9}
FULL_GRADIENTS = ("fedsgd", "fedga", "fedamd")  # methods that refuse batch norm


@pytest.mark.parametrize("engine", ["sequential", "vmapped", "stacked"])
@pytest.mark.parametrize("method", list(algorithms))
def test_cuda_agrees_with_the_cpu(method: str, engine: str) -> None:
    """With batch norm where the method allows it; under batch norm the stacked engine would be the vmapped one."""
    norm = "group" if method in FULL_GRADIENTS or engine == "stacked" else "batch"

    def run(device: str, name: str) -> askew.Run:
        return askew.run(
            method,
            model={"name": "mlp", "norm": norm},
            clients=12,
            cohort=4,
            rounds=4,
            local={"epochs": 2, "batch": 16, "lr": 0.1, "momentum": 0.5, "weight_decay": 1e-3, "clip": 5.0},
            engine={"name": name, "device": device, "dtype": "float64"},
        )

    reference, on_cuda = run("cpu", "sequential"), run("cuda", engine)
    for name, value in reference.model.items():
        assert torch.allclose(on_cuda.model[name], value, rtol=0, atol=TOLERANCES.get(method, 1e-11)), name
    assert [r["bytes_up"] for r in on_cuda.rounds] == [r["bytes_up"] for r in reference.rounds]


def test_convolutions_agree_in_float32() -> None:
    runs = [
        askew.run("scaffold", model="cnn", clients=12, cohort=4, rounds=3, engine={"name": e, "device": d})
        for e, d in (("sequential", "cpu"), ("sequential", "cuda"), ("vmapped", "cuda"), ("stacked", "cuda"))
    ]
    for name, value in runs[0].model.items():
        for other in runs[1:]:
            assert torch.allclose(other.model[name], value, rtol=0, atol=1e-4), name


@pytest.mark.parametrize("engine", ["sequential", "vmapped", "slots", "stacked"])
def test_images_in_bytes_give_the_same_model(engine: str) -> None:
    """Grey images, whose bytes a CPU never turns into floating-point inputs."""
    x = torch.where(torch.rand(200, 1, 8, 8) < 0.2, torch.randint(0, 256, (200, 1, 8, 8)), 0).to(torch.uint8)
    samples = Samples(x, torch.randint(0, 4, (200,)))
    data = Dataset(
        samples, samples, 4, transform=PixelTransform(torch.full((1, 1, 1), 0.3), torch.full((1, 1, 1), 0.5))
    )
    settings = {"data": data, "clients": 8, "rounds": 3, "model": "mlp", "local": {"epochs": 2, "batch": 16}}
    runs = [
        askew.run("fedavg", engine={"name": name, "device": device, "dtype": "float64"}, **settings)  # type: ignore[arg-type]
        for name, device in (("sequential", "cpu"), (engine, "cuda"))
    ]
    assert max(float((runs[0].model[n] - v.cpu()).abs().max()) for n, v in runs[1].model.items()) < 1e-11


@pytest.mark.parametrize("engine", ["sequential", "slots", "stacked"])
def test_the_accuracy_of_each_class_is_that_of_its_predictions(engine: str) -> None:
    """It is counted inside of the captured evaluation."""
    x = torch.randn(60, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y, tested = torch.arange(60) % 3, torch.arange(25) % 2
    data = askew.Dataset(askew.Samples(x, y), askew.Samples(x[:25], tested), classes=3)
    common: dict[str, Any] = {"data": data, "model": nn.Linear(5, 3, dtype=torch.float64), "partition": "iid"}
    common |= {"clients": 3, "rounds": 2, "lr": 0.5, "evaluation": {"per_class": True}, "progress": False}
    run = askew.run("fedavg", engine={"name": engine, "device": "cuda", "dtype": "float64"}, **common)
    right = (x[:25] @ run.model["weight"].cpu().T + run.model["bias"].cpu()).argmax(1) == tested
    by_hand = {str(k): right[tested == k].double().mean().item() for k in (0, 1)}
    assert run.rounds[-1]["class_accuracy"] == pytest.approx(by_hand | {"2": None}, abs=1e-15)
