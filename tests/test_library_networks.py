"""Networks of torchvision and timm, where these are installed: a round of one client is a step of plain torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import askew

LEARNING_RATE = 0.05
SMALL_TRANSFORMER = {
    "image_size": 32,
    "patch_size": 8,
    "num_layers": 2,
    "num_heads": 2,
    "hidden_dim": 32,
    "mlp_dim": 64,
}


def torchvision_network(name: str, **options: Any) -> nn.Module:
    models = pytest.importorskip("torchvision.models", reason="needs torchvision: pip install torchvision")
    return getattr(models, name)(num_classes=3, **options)


def timm_network(name: str, **options: Any) -> nn.Module:
    timm = pytest.importorskip("timm", reason="needs timm: pip install timm")
    return timm.create_model(name, num_classes=3, **options)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torchvision_network("resnet18"),
        lambda: torchvision_network("VisionTransformer", **SMALL_TRANSFORMER),
        lambda: timm_network("resnet10t"),
        lambda: timm_network("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2),
    ],
    ids=["torchvision resnet18", "torchvision transformer", "timm resnet10t", "timm transformer"],
)
def test_a_round_of_one_client_is_a_step_of_plain_torch(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    network = make().double()
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(12, 3, 32, 32)).astype(np.float32), np.arange(12) % 3
    trained = copy.deepcopy(network).train()
    nn.functional.cross_entropy(trained(torch.tensor(x).double()), torch.tensor(y)).backward()
    with torch.no_grad():
        for weight in trained.parameters():
            weight -= LEARNING_RATE * (weight.grad if weight.grad is not None else 0)
    run = askew.run(
        "fedavg",
        data=(x, y),
        test=(x, y),
        model=network,
        partition={"name": "iid"},
        clients=1,
        cohort=1,
        rounds=1,
        epochs=1,
        batch_size=12,
        lr=LEARNING_RATE,
        engine={"name": "sequential", "dtype": "float64"},
    )
    expected = {name: value for name, value in trained.state_dict().items() if "num_batches" not in name}
    assert expected.keys() <= run.model.keys()
    for name, value in expected.items():
        torch.testing.assert_close(run.model[name].reshape(value.shape), value, rtol=1e-9, atol=1e-9)
