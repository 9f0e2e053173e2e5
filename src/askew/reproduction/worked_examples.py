"""The papers' small examples: computed in seconds, nothing is stored."""

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

ROUNDS = {"full": 120, "reduced": 40, "smoke": 3}  # by scale


class WorkedExample(NamedTuple):
    """The table of an example, and the curves it comes from."""

    headings: list[str]
    rows: list[list[str]]
    curves: dict[str, list[float]]  # from round 0 on
    axis: str = ""  # what the curves show


def worked_example(id: str, scale: str) -> WorkedExample:
    """Compute the example of an experiment."""
    if id not in WORKED_EXAMPLES:
        raise UnknownName(f"there is no example for {id!r}; {did_you_mean(id, WORKED_EXAMPLES)}")
    return WORKED_EXAMPLES[id](ROUNDS[scale])


def two_quadratics(rounds: int) -> WorkedExample:
    """FedPMVR's example: losses (w − a)² and (w − b)², one step of each client in a round, from 0.

    As printed, the second client of the second case moves half as far as its gradient says.
    """
    rate, stated_limit = 0.05, 3.0
    cases = {  # optima and slopes of the gradients
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
        distances = [f"{abs(w - best):.4f}", f"{abs(w - stated_limit):.4f}"]
        rows.append([name, f"{path[1] / rate:g} η", f"{w:.4f}", f"{best:g}", *distances])
        curves[name] = path
    headings = ["case", "after round 1", f"after round {rounds}", "minimiser"]
    headings += ["distance to it", "distance to 3, as said"]
    return WorkedExample(headings, rows, curves, "Global weight")


def two_sigmoids(rounds: int) -> WorkedExample:
    """FedDC's drawing: the output of the mean weight beside the mean of the outputs, σ(θ x)."""

    def output(theta: float, x: float) -> float:
        return 1 / (1 + math.exp(-theta * x))

    rows = []
    for one, two, x in ((1.0, 5.0, 1.0), (-1.0, 4.0, 1.0), (0.5, 8.0, 2.0), (-3.0, 3.0, 1.0), (1.0, 5.0, 0.0)):
        of_mean, mean_of = output((one + two) / 2, x), (output(one, x) + output(two, x)) / 2
        rows.append([f"{one:g}", f"{two:g}", f"{x:g}", f"{of_mean:.4f}", f"{mean_of:.4f}", f"{of_mean - mean_of:+.4f}"])
    return WorkedExample(["θ₁", "θ₂", "x", "output of the mean", "mean of the outputs", "difference"], rows, {})


# Methods on least squares; settings of the order of the curvature, where a method has one.
QUADRATIC_METHODS: dict[str, dict[str, float]] = {
    "fedavg": {},
    "fedprox": {"mu": 1.0},
    "fednova": {},
    "scaffold": {},
    "feddyn": {"alpha": 1.0},
    "feddc": {"alpha": 1.0},
}


def quadratics(rounds: int) -> WorkedExample:
    """Least squares of four clients that differ in curvature and solution; all take part, with ten full-batch steps."""
    rows, curves = [], {}
    for kind, sizes in (("equal sizes", (20, 20, 20, 20)), ("unequal sizes", (8, 16, 24, 32))):
        data, plain, weighted = least_squares(sizes)
        for name, settings in QUADRATIC_METHODS.items():
            models = global_models(name, settings, data, rounds)
            to_plain, to_weighted = (
                [float((w - best).norm() / best.norm()) for w in models] for best in (plain, weighted)
            )
            ends = (to_plain[-1], to_weighted[-1])
            rows.append([name, kind, *(f"{end:.1e}" if math.isfinite(end) else "diverged" for end in ends)])
            curves[f"{name}, {kind}"] = to_plain
    headings = ["method", "clients", "to the optimum of the plain mean", "to that weighted by samples"]
    return WorkedExample(headings, rows, curves, "Relative distance")


def least_squares(sizes: tuple[int, ...], dim: int = 4) -> tuple[Dataset, Tensor, Tensor]:
    """Clients of these sizes, the minimiser of the plain mean of their losses, and that of the weighted mean."""
    g = torch.Generator().manual_seed(1)
    x, y, curvature, slope = [], [], [], []
    for n in sizes:
        inputs = torch.randn(n, dim, generator=g, dtype=torch.float64)
        inputs = inputs * (0.5 + torch.rand(dim, generator=g, dtype=torch.float64))
        targets = inputs @ torch.randn(dim, 1, generator=g, dtype=torch.float64)
        x.append(inputs)
        y.append(targets)
        curvature.append(inputs.T @ inputs / n)
        slope.append(inputs.T @ targets / n)
    shares = torch.tensor(sizes, dtype=torch.float64) / sum(sizes)
    H, b = torch.stack(curvature), torch.stack(slope)
    plain, weighted = (
        torch.linalg.solve(torch.einsum("c,cij->ij", p, H), torch.einsum("c,cij->ij", p, b))[:, 0]
        for p in (torch.ones_like(shares), shares)
    )
    pooled = Samples(torch.cat(x), torch.cat(y))
    owner = np.repeat(np.arange(len(sizes)), sizes)
    return Dataset(pooled, pooled, 0, owner=owner, criterion="squared_error"), plain, weighted


def global_models(name: str, settings: dict[str, float], data: Dataset, rounds: int) -> list[Tensor]:
    """The global model [P] before the first round and after each, of a linear model without bias."""
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
    built = build(Config.build(tables | {"rounds": rounds}))
    models = [built.server.w.clone()]
    for t in range(1, rounds + 1):
        built.server.run_round(t, built.fed.eligible.tolist())
        models.append(built.server.w.clone())
    return models


WORKED_EXAMPLES: dict[str, Callable[[int], WorkedExample]] = {
    "fedpmvr/fig1": two_quadratics,
    "feddc/fig1": two_sigmoids,
    "ours/quadratics": quadratics,
}
