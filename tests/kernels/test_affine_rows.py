"""Affine steps of many rows in place. That engines agree with the plain loop is tested for all methods and for plug-ins
elsewhere (test_algorithms.py, test_adversarial.py); here the formula by itself, and that the path is taken at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import askew
from askew.algorithms import FedAvg, FedDC, FedDyn, FedProx, Scaffold
from askew.core.algorithm import Algorithm
from askew.core.types import Client
from askew.kernels.affine_rows import AffineRows


def client_with(momentum: float, decay: float, clip: float) -> Client:
    zero = torch.zeros(3, dtype=torch.float64)
    return Client(zero, zero, {}, {}, {}, {}, 0.1, 0.1, momentum, decay, clip, 1.0, 1.0, 1.0, 1, 0.5)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("clip", [math.inf, 1.5])
@pytest.mark.parametrize("terms", [(), ("shift",), ("gain", "pull", "decay", "shift")])
@pytest.mark.parametrize("idle", [False, True])
def test_the_formula(momentum: float, decay: float, clip: float, terms: tuple[str, ...], idle: bool) -> None:
    """d = clip(gain·g + pull·θ + shift), v ← momentum·v + d + decay·θ, θ ← θ − η v, row by row in float64; a row that
    is not active stays as it is.
    """
    draw = torch.Generator().manual_seed(0)
    random: Callable[..., Tensor] = lambda *shape: torch.randn(*shape, generator=draw, dtype=torch.float64)
    theta, v, g, lr = random(4, 3), random(4, 3), random(4, 3), random(4).abs()
    rule = {name: random(4, 3) if name == "shift" else random(4).abs() for name in terms}
    expected = []
    for k in range(4):
        own = {name: value[k] for name, value in rule.items()}
        d = own.get("gain", 1.0) * g[k] + own.get("pull", 0.0) * theta[k] + own.get("shift", 0.0)
        length = d.square().sum().sqrt()
        d = d * min(1.0, float(clip / (length + 1e-6)))
        outer = d + (decay + own.get("decay", 0.0)) * theta[k]
        new = momentum * v[k] + outer if momentum else outer
        expected.append((theta[k] - lr[k] * new, new if momentum else v[k]))
    steps = AffineRows(client_with(momentum, decay, clip))
    if idle:
        g[2], expected[2] = math.nan, (theta[2].clone(), v[2].clone())
    steps.take(theta, v, g, rule, lr, torch.tensor([True, True, False, True]) if idle else None)
    for k, (new_theta, new_v) in enumerate(expected):
        assert torch.allclose(theta[k], new_theta, rtol=0, atol=1e-14)
        assert torch.allclose(v[k], new_v, rtol=0, atol=1e-14)


class WithNote(FedAvg):
    """A hook after the step, which such a path would not call."""

    def note(self, theta: Tensor, g: Tensor, d: Tensor, client: Client) -> dict[str, Tensor]:
        return {}


@pytest.mark.parametrize(
    ("alg", "taken"),
    [
        (FedAvg(), True),
        (FedProx(), True),
        (FedDyn(), True),
        (Scaffold(), True),
        (FedDC(), True),
        (WithNote(), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_stacked_engine_takes_affine_steps_so(alg: Algorithm, taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, plain = list[int](), AffineRows.take

    def counted(self: AffineRows, theta: Tensor, *rest: Tensor) -> None:
        calls.append(len(theta))
        plain(self, theta, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(AffineRows, "take", counted)
    askew.run(alg, rounds=1, clients=6, cohort=3, local={"batch": 16}, engine={"name": "stacked", "device": "cpu"})
    assert bool(calls) == taken
