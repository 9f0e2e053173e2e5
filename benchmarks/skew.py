"""Rounds of equal clients and of unequal ones (Dirichlet 0.2) with as many samples in all, in turns and without a loop beside them.

    python benchmarks/skew.py --work lenet-100x10x50 --dtype tf32 --engine vmapped --pairs 3

On CUDA it also tells how many kernels a round of equal clients has and how long they take.
"""

from __future__ import annotations

import argparse
import statistics

import torch
from torch.profiler import ProfilerActivity, profile

from askew.bench.workloads import configured
from askew.engine.base import finished_time
from askew.engine.choose import EngineSettings
from askew.experiment.build import build
from askew.experiment.run import torch_state

WARM_UP = 6  # rounds in which graphs are captured


def rounds(work: str, engine: EngineSettings, skewed: bool, count: int) -> float:
    """The median of a round's milliseconds."""
    config = configured(work, engine, skewed)
    with torch_state(config):
        house = build(config)
        server, device, ids, took = house.server, house.space.device, house.fed.eligible.tolist(), list[float]()
        for t in range(1, WARM_UP + count + 1):
            began = finished_time(device)
            server.run_round(t, ids, meanwhile=lambda t=t: server.prepare(t + 1, ids))
            took.append(1e3 * (finished_time(device) - began))
        if device.type == "cuda" and not skewed:
            with profile(activities=[ProfilerActivity.CUDA]) as seen:
                server.run_round(WARM_UP + count + 1, ids)
                torch.cuda.synchronize()
            kernels = seen.key_averages()
            busy = sum(k.device_time_total for k in kernels) / 1e3
            print(f"  {sum(k.count for k in kernels)} kernels a round, {busy:.2f} ms of them on the GPU")
    return statistics.median(took[WARM_UP:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", action="append", help="as of `askew bench`; repeatable")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=17)
    given = parser.parse_args()
    engine = EngineSettings(name=given.engine, dtype=given.dtype, workers=1)
    for work in given.work or ["lenet-100x10x50"]:
        pairs = [
            (rounds(work, engine, False, given.rounds), rounds(work, engine, True, given.rounds))
            for _ in range(given.pairs)
        ]
        for equal, unequal in pairs:
            print(f"{work}: {equal:.2f} ms equal, {unequal:.2f} ms unequal, {100 * (unequal / equal - 1):+.0f}%")
        equal, unequal = (statistics.median(column) for column in zip(*pairs, strict=True))
        print(
            f"{work}: {equal:.2f} and {unequal:.2f} ms, {100 * (unequal / equal - 1):+.0f}%, medians of {given.pairs}"
        )


if __name__ == "__main__":
    main()
