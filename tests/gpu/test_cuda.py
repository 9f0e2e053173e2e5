"""The same numbers on a CUDA device as on the CPU, for every method."""

from __future__ import annotations

import pytest
import torch

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
