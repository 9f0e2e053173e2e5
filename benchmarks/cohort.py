"""How fast a cohort is trained: full rounds of the slots engine against the bare loop that one would write by hand.

    python benchmarks/cohort.py [WORK ...] [--rounds 20] [--dtype tf32] [--json FILE]

Both train the same clients on the same batches, data gathered in the round; evaluation is apart. Rounds alternate.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from askew.experiment.api import OwnData
from askew.experiment.build import House, build
from askew.experiment.config import Config
from askew.experiment.run import torch_state

# name: (network, classes, clients at work, steps, batch)
WORK: dict[str, tuple[str, int, int, int, int]] = {
    "lenet-10x10x50": ("lenet", 10, 10, 10, 50),
    "lenet-10x2x256": ("lenet", 10, 10, 2, 256),
    "lenet-100x10x50": ("lenet", 10, 100, 10, 50),
    "cnn64-15x50x50": ("cnn64", 10, 15, 50, 50),
    "resnet18-10x2x256": ("resnet18", 100, 10, 2, 256),
}


def pool(count: int, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return torch.randn(count, 3, 32, 32, generator=g), torch.randint(0, classes, (count,), generator=g)


def configured(work: str, dtype: str, engine: str, skewed: bool = False, compiled: bool = False) -> Config:
    network, classes, cohort, steps, batch = WORK[work]
    x, y = pool(cohort * steps * batch + 100, classes)
    data = OwnData.of((x[:-100], y[:-100]), (x[-100:], y[-100:]))
    partition = {"name": "dirichlet", "alpha": 0.2, "clients": cohort} if skewed else {"name": "iid", "clients": cohort}
    return Config.build(
        {
            "data": data,
            "rounds": 1000,
            "partition": partition,
            "participation": {"name": "full"},
            "model": {"name": network},
            "local": {"batch": batch, "lr": 0.01},
            "engine": {"name": engine, "dtype": dtype, "compile": compiled},
        }
    )


def bare_round(house: House, t: int, model: torch.nn.Module, start: dict[str, torch.Tensor], half: bool) -> Callable[[], None]:
    plan = house.fed.plan(range(house.fed.clients), t, house.config.local)
    x, y = plan.pool
    batches = [[work.places[a:b].to(y.device) for a, b in zip(work.cuts, work.cuts[1:], strict=False)] for work in plan.train]

    def go() -> None:
        mean = {n: torch.zeros_like(p) for n, p in start.items()}
        for work in batches:
            model.load_state_dict(start)
            optimiser = torch.optim.SGD(model.parameters(), lr=house.config.local.lr)
            for index in work:
                optimiser.zero_grad()
                with torch.autocast(y.device.type, torch.bfloat16, enabled=half):
                    output = model(x[index])[0]
                F.cross_entropy(output.float(), y[index]).backward()
                optimiser.step()
            for n, p in model.state_dict().items():
                mean[n] += p / len(batches)

    return go


def timed(go: Callable[[], Any]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    go()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - began)


def measure(work: str, dtype: str, engine: str, rounds: int, skewed: bool, compiled: bool) -> dict[str, Any]:
    config = configured(work, dtype, engine, skewed, compiled)
    with torch_state(config):
        house = build(config)
        model = copy.deepcopy(house.module).to(house.space.device)
        start = {n: p.clone() for n, p in model.state_dict().items()}
        ids, ours, bare = list(range(house.fed.clients)), [], []
        plan = lambda t: house.server.prepare(t, ids)
        began = time.perf_counter()
        house.server.play(1, ids)
        first = time.perf_counter() - began
        for t in range(2, rounds + 2):
            if t <= 5:
                bare.append(timed(bare_round(house, t, model, start, dtype == "bf16")))
            ours.append(timed(lambda t=t: house.server.play(t, ids, meanwhile=lambda: plan(t + 1))))  # type: ignore[misc]
    told = {"work": work, "engine": house.facts["engine"], "dtype": dtype, "skewed": skewed, "compile": compiled}
    told |= {"bare_ms": statistics.median(bare), "ours_ms": statistics.median(ours), "first_s": first}
    told["ratio"] = told["bare_ms"] / told["ours_ms"]
    told["samples_per_s"] = 1000 * sum(len(w.places) for w in plan(rounds + 2).train) / told["ours_ms"]
    if torch.cuda.is_available():
        told["peak_gb"] = torch.cuda.max_memory_allocated() / 2**30
        torch.cuda.reset_peak_memory_stats()
    return told


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("work", nargs="*", default=list(WORK))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--dtype", default="tf32")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--skewed", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = []
    for work in given.work:
        row = measure(work, given.dtype, given.engine, given.rounds, given.skewed, given.compile)
        rows.append(row)
        print({k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
