"""What the framework costs: one sequential round of askew against a bare PyTorch loop doing the same steps.

Both are measured in turn in one process, round after round, so that a busy machine disturbs them alike; printed is
the ratio of the medians. Evaluation is left out on both sides; drawing participants, planning batches, averaging and
all bookkeeping are in.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from askew.algorithms import algorithms
from askew.data.dataset import Dataset, Samples
from askew.experiment.api import OwnData
from askew.experiment.build import BuiltRun, build
from askew.experiment.config import Config
from askew.experiment.process_tuning import tune_process


def random_images(n: int, shape: tuple[int, ...]) -> Dataset:
    """Random images with random labels of ten classes."""
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(n, *shape, generator=g), torch.randint(0, 10, (n,), generator=g)
    return Dataset(Samples(x, y), Samples(x[:100], y[:100]), 10)


WORKLOADS: dict[str, dict[str, Any]] = {
    "digits/mlp": {
        "data": {"name": "digits"},
        "model": {"name": "mlp"},
        "partition": {"name": "dirichlet", "clients": 30},
        "participation": {"fraction": 0.2},
        "local": {"epochs": 5, "batch": 16, "lr": 0.1},
    },
    "lenet 32x32x3": {
        "data": (50 * 500, (3, 32, 32)),
        "model": {"name": "lenet"},
        "partition": {"name": "iid", "clients": 50},
        "participation": {"cohort": 5},
        "local": {"batch": 50, "lr": 0.05},
    },
}


def bare_round(built: BuiltRun, t: int, start: dict[str, torch.Tensor], model: torch.nn.Module) -> Callable[[], None]:
    """A function that trains the same clients on the same batches as askew's round t, as one would write it by hand."""
    config, fed = built.config, built.fed
    ids = config.participation.sample(config.seed, t, fed.eligible, fed.clients).tolist()
    plan = fed.plan(ids, t, config.local)
    x, y = plan.pool
    batches = [[work.places[a:b] for a, b in zip(work.cuts, work.cuts[1:], strict=False)] for work in plan.train]

    def train() -> None:
        mean = {n: torch.zeros_like(p) for n, p in start.items()}
        for work in batches:
            model.load_state_dict(start)
            optimiser = torch.optim.SGD(model.parameters(), lr=config.local.lr)
            for index in work:
                optimiser.zero_grad()
                F.cross_entropy(model(x[index])[0], y[index]).backward()
                optimiser.step()
            for n, p in model.state_dict().items():
                mean[n] += p / len(ids)

    return train


def measure(name: str, algorithm: str, rounds: int) -> dict[str, Any]:
    """Milliseconds of a round in askew and in the bare loop, and the median of their ratios, of one workload."""
    tables = copy.deepcopy(WORKLOADS[name])
    if isinstance(tables["data"], tuple):
        tables["data"] = OwnData.of(random_images(*tables["data"]), None)
    config = Config.build(
        {**tables, "algorithm": {"name": algorithm}, "engine": {"name": "sequential", "device": "cpu"}}
    )
    built = build(config)
    model = copy.deepcopy(built.module)
    start = {n: p.clone() for n, p in model.state_dict().items()}
    ours, bare = [], []
    for t in range(1, rounds + 3):
        bare_training = bare_round(built, t, start, model)

        def askew_round(t: int = t) -> None:
            built.server.run_round(
                t, config.participation.sample(config.seed, t, built.fed.eligible, built.fed.clients).tolist()
            )

        both = [(bare_training, bare), (askew_round, ours)]
        for train, times in both if t % 2 else reversed(both):
            began = time.perf_counter()
            train()
            times.append(time.perf_counter() - began)
    ratios = [a / b for a, b in zip(ours[2:], bare[2:], strict=True)]
    return {
        "work": name,
        "algorithm": algorithm,
        "askew_ms": 1e3 * statistics.median(ours[2:]),
        "bare_ms": 1e3 * statistics.median(bare[2:]),
        "ratio": statistics.median(ratios),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--algorithms", default="fedavg,fedprox,scaffold,feddpc")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tune_process()
    rows = []
    for name in WORKLOADS:
        for algorithm in options.algorithms.split(","):
            assert algorithm in algorithms, algorithm
            row = measure(name, algorithm, options.rounds)
            rows.append(row)
            if not options.json:
                print("{work:16} {algorithm:10} ".format(**row), end="")
                times = "askew {askew_ms:8.2f} ms   bare {bare_ms:8.2f} ms   ratio {ratio:.3f}"
                print(times.format(**row), flush=True)
    if options.json:
        print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
