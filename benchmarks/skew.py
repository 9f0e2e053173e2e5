"""Rounds of equal clients and of unequal ones (Dirichlet 0.2) with as many samples in all, in turn.

$ python benchmarks/skew.py --work lenet-100x10x50 --dtype tf32 --engine stacked --pairs 3
"""

from __future__ import annotations

import argparse
import statistics

from askew.bench.timing import time_own_rounds
from askew.bench.workloads import workload_config
from askew.engine.settings import EngineSettings
from askew.experiment.build import build
from askew.experiment.process_state import torch_state
from askew.experiment.process_tuning import tune_process

WARM_UP = 6  # rounds in which graphs are captured


def round_ms(workload: str, engine: EngineSettings, skewed: bool, count: int) -> float:
    """The median of a round's milliseconds."""
    config = workload_config(workload, engine, skewed)
    with torch_state(config):
        took = time_own_rounds(build(config), WARM_UP + count)
    return 1e3 * statistics.median(took[WARM_UP:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", action="append", help="as of `askew bench`; repeatable")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=17)
    options = parser.parse_args()
    tune_process()
    engine = EngineSettings(name=options.engine, dtype=options.dtype, workers=1)
    for workload in options.work or ["lenet-100x10x50"]:
        pairs = [
            (round_ms(workload, engine, False, options.rounds), round_ms(workload, engine, True, options.rounds))
            for _ in range(options.pairs)
        ]
        for equal, unequal in pairs:
            print(f"{workload}: {equal:.2f} ms equal, {unequal:.2f} ms unequal, {100 * (unequal / equal - 1):+.0f}%")
        equal, unequal = (statistics.median(column) for column in zip(*pairs, strict=True))
        change = 100 * (unequal / equal - 1)
        print(f"{workload}: {equal:.2f} and {unequal:.2f} ms, {change:+.0f}%, medians of {options.pairs}")


if __name__ == "__main__":
    main()
