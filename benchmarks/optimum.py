"""How near every algorithm comes to the optimum of two convex problems with skewed clients, 4 of 10 of them a round.

Both problems have ten clients of equal size, full local batches and a known minimiser of the plain mean of the client
losses: least squares, solved in closed form, and softmax regression with weight decay, solved by Newton's method. All
algorithms get the same local training and their default settings, but FedDyn and FedSpeed α = 1: their speed depends
on α beside the curvature, and the default is made for networks. FOCUS, whose default is a step along the sum of all
clients' gradients, takes one of five steps' length along their mean. Methods that claim `exact` must reach the optimum;
the others stop at the distance that heterogeneity and partial participation leave them.

    python benchmarks/optimum.py                 prints the table
    python benchmarks/optimum.py --only fedavg   prints the row of one method; repeatable
    python benchmarks/optimum.py --write         also writes the table into docs/optimum.md
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from askew.algorithms import algorithms
from askew.data.dataset import Dataset, Samples
from askew.experiment.api import OwnData, OwnNetwork
from askew.experiment.build import build
from askew.experiment.config import Config
from askew.experiment.process_tuning import tune_process
from askew.models import networks

N, SIZE = 10, 20  # clients, and samples of each
ROUNDS = (100, 300, 600)  # after which the distance is measured
SETTINGS: dict[str, dict[str, Any]] = {
    "feddyn": {"alpha": 1.0},  # as the curvature
    "fedspeed": {"alpha": 1.0},
    "focus": {"server_scale": 5 / N},  # five steps, as many as local ones, along the mean of the clients' gradients
}
SKIPPED = {"solo", "centralised", "fedalign", "fedpdc"}  # for the reasons at the end of the introduction
OUT = Path(__file__).parent.parent / "docs" / "optimum.md"
INTRODUCTION = """# Distance to the optimum

This page shows how near each method comes to the optimum w*, the minimiser of the mean client loss: the relative
distance ‖w − w*‖ / ‖w*‖ after 100, 300 and 600 rounds. Ten clients have different data, and four of them take part in
each round, with five local full-batch steps and equal weights. Settings are the defaults, except for FedDyn and
FedSpeed: α = 1, which is of the order of the problems' curvature, and FOCUS: `server_scale = 0.5`, a step of five
times the local rate along the mean of the ten clients' gradients. This command writes the page:

```console
$ python benchmarks/optimum.py --write
```

Methods that claim `exact` reach the optimum, however skewed the data are; a test of every method measures this. FOCUS
takes longer for softmax regression, because long local training slows it (see [its text](algorithms.md#focus)). The
others stop at a distance that depends on the skew and on partial participation: with a constant learning rate it does
not shrink with more rounds. FedPVR corrects the only layer of both problems, and steps take no momentum, so it equals
SCAFFOLD here. All clients take part equally often: what FedAU and FedAWE do about uneven chances does not show, and
they add noise. All answers are fresh, and FedBuff is FedAvg. Left out are SOLO and centralised training (clients share
nothing), FedAlign (needs a hidden layer) and FedPDC (needs public labels).
"""


def quadratics(dim: int = 8) -> tuple[Dataset, nn.Module, Tensor, dict[str, Any]]:
    """Least squares: every client has its own inputs, scales and solution."""
    g = torch.Generator().manual_seed(1)
    scales = 0.5 + torch.rand(N, 1, dim, generator=g, dtype=torch.float64)
    x = torch.randn(N, SIZE, dim, generator=g, dtype=torch.float64) * scales
    solution = torch.randn(N, dim, 1, generator=g, dtype=torch.float64)
    y = x @ solution + 0.1 * torch.randn(N, SIZE, 1, generator=g, dtype=torch.float64)
    samples = Samples(x.reshape(-1, dim).float().double(), y.reshape(-1, 1).float().double())
    hessian, slope = samples.x.T @ samples.x, samples.x.T @ samples.y
    best = torch.linalg.solve(hessian, slope)[:, 0]
    module = nn.Linear(dim, 1, bias=False)
    nn.init.zeros_(module.weight)
    return as_dataset(samples, 0, "squared_error"), module, best, {"lr": 0.05, "weight_decay": 0.0}


def softmax(dim: int = 6, classes: int = 4, decay: float = 0.02) -> tuple[Dataset, nn.Module, Tensor, dict[str, Any]]:
    """Softmax regression: every client has its own input centre and mostly two classes."""
    g = torch.Generator().manual_seed(2)
    x = torch.randn(N, SIZE, dim, generator=g, dtype=torch.float64) + torch.randn(
        N, 1, dim, generator=g, dtype=torch.float64
    )
    y = (torch.arange(N)[:, None] + (torch.rand(N, SIZE, generator=g) < 0.5)) % classes
    samples = Samples(x.reshape(-1, dim).float().double(), y.reshape(-1))
    inputs = torch.cat([samples.x, torch.ones(N * SIZE, 1, dtype=torch.float64)], 1)

    def objective(w: Tensor) -> Tensor:
        return (
            nn.functional.cross_entropy(inputs @ w.view(classes, dim + 1).T, samples.y) + decay / 2 * w.square().sum()
        )

    w = torch.zeros(classes * (dim + 1), dtype=torch.float64)
    for _ in range(50):
        w = w - torch.linalg.solve(torch.func.hessian(objective)(w), torch.func.grad(objective)(w))
    matrix = w.view(classes, dim + 1)
    best = torch.cat([matrix[:, :dim].reshape(-1), matrix[:, dim]])  # as the network orders them: weights, then biases
    module = networks["softmax"]().module((dim,), classes)
    return as_dataset(samples, classes, "cross_entropy"), module, best, {"lr": 0.2, "weight_decay": decay}


def as_dataset(samples: Samples, classes: int, criterion: str) -> Dataset:
    """Samples of clients one after the other as a dataset, whose test set they are too."""
    return Dataset(samples, samples, classes, owner=np.repeat(np.arange(N), SIZE), criterion=criterion)


def distances(name: str, problem: tuple[Dataset, nn.Module, Tensor, dict[str, Any]]) -> list[float | None]:
    """Relative distance to the optimum after each of ROUNDS; None once it is not finite."""
    data, module, best, local = problem
    config = Config.build(
        {
            "algorithm": {"name": name, "weighting": "uniform", **SETTINGS.get(name, {})},
            "data": OwnData.of(data, None),
            "model": OwnNetwork.of(module),
            "partition": {"name": "natural", "clients": N},
            "participation": {"cohort": 4},
            "local": {"batch": 0, "steps": 5, **local},
            "engine": {"name": "sequential", "dtype": "float64"},
            "rounds": max(ROUNDS),
        }
    )
    built = build(config)
    relative: list[float | None] = []
    for t in range(1, max(ROUNDS) + 1):
        built.server.run_round(
            t, config.participation.sample(config.seed, t, built.fed.eligible, built.fed.clients).tolist()
        )
        if t in ROUNDS:
            distance = float((built.server.w - best).norm() / best.norm())
            relative.append(distance if math.isfinite(distance) else None)
    return relative


def format_distance(value: float | None) -> str:
    """A distance as the table shows it."""
    return "diverged" if value is None or value > 1e6 else f"{value:.1e}" if value < 1e-3 else f"{value:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write docs/optimum.md")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", metavar="NAME", action="append", choices=sorted({*algorithms} - SKIPPED))
    options = parser.parse_args()
    if options.write and options.only:
        parser.error("--write needs the rows of all methods; leave out --only.")
    torch.set_num_threads(1)
    tune_process()
    problems = {"least squares": quadratics(), "softmax regression": softmax()}
    rows = []
    for name in options.only or [name for name in algorithms if name not in SKIPPED]:
        row: dict[str, Any] = {"algorithm": name, "exact": algorithms[name].exact}
        for title, problem in problems.items():
            row[title] = distances(name, problem)
        rows.append(row)
        if not options.json:
            cells = "   ".join(" ".join(f"{format_distance(v):>9}" for v in row[title]) for title in problems)
            print(f"{name:12} {'exact' if row['exact'] else '':6} {cells}", flush=True)
    if options.json:
        print(json.dumps(rows, indent=1))
    if options.write:
        OUT.write_text(markdown(rows, list(problems)), encoding="utf-8")


def markdown(rows: list[dict[str, Any]], problems: list[str]) -> str:
    """The page docs/optimum.md."""
    head = "| algorithm | claims `exact` | " + " | ".join(f"{p}, round {r}" for p in problems for r in ROUNDS) + " |"
    lines = [INTRODUCTION, head, "| --- | --- |" + " ---: |" * (len(problems) * len(ROUNDS))]
    for row in rows:
        cells = " | ".join(format_distance(v) for p in problems for v in row[p])
        lines.append(f"| {row['algorithm']} | {'yes' if row['exact'] else ''} | {cells} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
