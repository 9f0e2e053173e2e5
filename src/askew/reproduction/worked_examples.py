"""The papers' examples that fit on a page: computed in seconds, nothing is stored."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..data.dataset import Dataset, Samples
from ..errors import UnknownName, did_you_mean
from ..experiment.api import OwnData, OwnNetwork
from ..experiment.build import build
from ..experiment.config import Config

ROUNDS = {"full": 120, "reduced": 40, "smoke": 3}


class WorkedExample(NamedTuple):
    """A table, and the curves it comes from."""

    headings: list[str]
    rows: list[list[str]]
    curves: dict[str, list[float]]  # from round 0 on
    axis: str = ""


def toy(id: str, scale: str) -> WorkedExample:
    """The example of an experiment."""
    if id not in TOYS:
        raise UnknownName(f"there is no example for {id!r}; {did_you_mean(id, TOYS)}")
    return TOYS[id](ROUNDS[scale])


def two_quadratics(rounds: int) -> WorkedExample:
    """FedPMVR's example: losses (w − a)² and (w − b)², one step of each client a round, from 0.

    As printed, the second client of the second case moves half as far as its gradient says.
    """
    rate, said = 0.05, 3.0
    cases = {
        "optima 15 and 2": ((15.0, 2.0), (2.0, 2.0)),
        "optima 3 and 3.5, as printed": ((3.0, 3.5), (2.0, 1.0)),
        "optima 3 and 3.5, corrected": ((3.0, 3.5), (2.0, 2.0)),
    }
    rows, curves = [], {}
    for name, (optima, slopes) in cases.items():
        w, path = 0.0, [0.0]
        for _ in range(rounds):
            w += rate * float(np.mean([slope * (optimum - w) for optimum, slope in zip(optima, slopes, strict=True)]))
            path.append(w)
        best = float(np.mean(optima))
        rows.append(
            [name, f"{path[1] / rate:g} η", f"{w:.4f}", f"{best:g}", f"{abs(w - best):.4f}", f"{abs(w - said):.4f}"]
        )
        curves[name] = path
    headings = [
        "case",
        "after round 1",
        f"after round {rounds}",
        "minimiser",
        "distance to it",
        "distance to 3, as said",
    ]
    return WorkedExample(headings, rows, curves, "Global weight")


def two_sigmoids(rounds: int) -> WorkedExample:
    """FedDC's drawing: the output of the mean weight beside the mean of the outputs, σ(θ x)."""

    def output(theta: float, x: float) -> float:
        return 1 / (1 + math.exp(-theta * x))

    rows = []
    for one, two, x in ((1.0, 5.0, 1.0), (-1.0, 4.0, 1.0), (0.5, 8.0, 2.0), (-3.0, 3.0, 1.0), (1.0, 5.0, 0.0)):
        mean, apart = output((one + two) / 2, x), (output(one, x) + output(two, x)) / 2
        rows.append([f"{one:g}", f"{two:g}", f"{x:g}", f"{mean:.4f}", f"{apart:.4f}", f"{mean - apart:+.4f}"])
    return WorkedExample(["θ₁", "θ₂", "x", "output of the mean", "mean of the outputs", "difference"], rows, {})


QUADRATIC: dict[str, dict[str, float]] = {  # settings of the order of the curvature, where a method has one
    "fedavg": {},
    "fedprox": {"mu": 1.0},
    "fednova": {},
    "scaffold": {},
    "feddyn": {"alpha": 1.0},
    "feddc": {"alpha": 1.0},
}


def quadratics(rounds: int) -> WorkedExample:
    """Least squares of four clients that differ in curvature and solution; ten full-batch steps a round, everybody comes."""
    rows, curves = [], {}
    for kind, sizes in (("equal sizes", (20, 20, 20, 20)), ("unequal sizes", (8, 16, 24, 32))):
        data, plain, weighted = least_squares(sizes)
        for name, settings in QUADRATIC.items():
            path = walked(name, settings, data, rounds)
            away = [[float((x - best).norm() / best.norm()) for x in path] for best in (plain, weighted)]
            rows.append([name, kind, *(f"{each[-1]:.1e}" if math.isfinite(each[-1]) else "diverged" for each in away)])
            curves[f"{name}, {kind}"] = away[0]
    return WorkedExample(
        ["method", "clients", "to the optimum of the plain mean", "to that weighted by samples"],
        rows,
        curves,
        "Relative distance",
    )


def least_squares(sizes: tuple[int, ...], dim: int = 4) -> tuple[Dataset, Tensor, Tensor]:
    """Clients of these sizes, the minimiser of the plain mean of their losses, and that of the mean weighted by samples."""
    g = torch.Generator().manual_seed(1)
    x, y, curvature, slope = [], [], [], []
    for n in sizes:
        inputs = torch.randn(n, dim, generator=g, dtype=torch.float64) * (
            0.5 + torch.rand(dim, generator=g, dtype=torch.float64)
        )
        targets = inputs @ torch.randn(dim, 1, generator=g, dtype=torch.float64)
        x.append(inputs)
        y.append(targets)
        curvature.append(inputs.T @ inputs / n)
        slope.append(inputs.T @ targets / n)
    shares = torch.tensor(sizes, dtype=torch.float64) / sum(sizes)
    H, b = torch.stack(curvature), torch.stack(slope)
    plain, weighted = (
        torch.linalg.solve(torch.einsum("c,cij->ij", p, H), torch.einsum("c,cij->ij", p, b))[:, 0]
        for p in (shares * 0 + 1, shares)
    )
    pooled = Samples(torch.cat(x), torch.cat(y))
    return (
        Dataset(pooled, pooled, 0, owner=np.repeat(np.arange(len(sizes)), sizes), criterion="squared_error"),
        plain,
        weighted,
    )


def walked(name: str, settings: dict[str, float], data: Dataset, rounds: int) -> list[Tensor]:
    """The global model before the first round and after each."""
    assert data.owner is not None
    module = nn.Linear(data.train.x.shape[1], 1, bias=False)
    nn.init.zeros_(module.weight)
    tables = {
        "algorithm": {"name": name, **settings},
        "data": OwnData.of(data, None),
        "model": OwnNetwork.of(module),
        "partition": {"name": "natural", "clients": int(data.owner[-1]) + 1},
        "participation": {"name": "full"},
        "local": {"batch": 0, "steps": 10, "lr": 0.05},
        "engine": {"name": "sequential", "device": "cpu", "dtype": "float64"},
    }
    house = build(Config.build(tables | {"rounds": rounds}))
    path = [house.server.w.clone()]
    for t in range(1, rounds + 1):
        house.server.run_round(t, house.fed.eligible.tolist())
        path.append(house.server.w.clone())
    return path


TOYS: dict[str, Callable[[int], WorkedExample]] = {
    "fedpmvr/fig1": two_quadratics,
    "feddc/fig1": two_sigmoids,
    "ours/quadratics": quadratics,
}
