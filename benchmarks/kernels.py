"""Where the time of a round goes on a GPU: its milliseconds, and the kernels that take most of them.

$ python benchmarks/kernels.py cnn64-15x50x50:tf32 resnet18-10x2x256:bf16 charlstm-10x10x10

Only askew's rounds are run, so that a row takes seconds; `askew bench` has the bare loop beside them. Clients that
train on several streams overlap, so that their kernels' times add up to more than the round.
"""

from __future__ import annotations

import argparse
import statistics

import torch
from torch.profiler import ProfilerActivity, profile

from askew.bench.timing import time_own_rounds
from askew.bench.workloads import workload_config
from askew.engine.settings import EngineSettings
from askew.experiment.build import build
from askew.experiment.process_state import torch_state
from askew.experiment.process_tuning import tune_process

WARM_UP = 6  # rounds in which graphs are captured
NAME_WIDTH = 100  # characters of a kernel's name


def show_workload(name: str, engine: EngineSettings, rounds: int, most: int) -> None:
    """Time rounds of a workload, then look at the kernels of one more."""
    config = workload_config(name, engine)
    with torch_state(config):
        built = build(config)
        timed = [1e3 * seconds for seconds in time_own_rounds(built, WARM_UP + rounds)[WARM_UP:]]
        median, least = statistics.median(timed), min(timed)
        print(f"{name} {engine.dtype} {built.facts['engine']}: {median:.2f} ms, least {least:.2f}")
        if built.space.device.type != "cuda":
            return
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:  # else it warns
            built.server.run_round(WARM_UP + rounds + 1, built.fed.eligible.tolist())
            torch.cuda.synchronize()
    kernels = sorted(profiler.key_averages(), key=lambda k: -k.device_time_total)
    busy = sum(k.device_time_total for k in kernels) / 1e3
    print(f"  {sum(k.count for k in kernels)} kernels, {busy:.2f} ms")
    for k in kernels[:most]:
        print(f"  {k.device_time_total / 1e3:8.2f} ms {k.count:6d}  {k.key[:NAME_WIDTH]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", nargs="+", help="as of `askew bench`, with :DTYPE behind it if that is not float32")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--kernels", type=int, default=16, help="kernels that are shown")
    options = parser.parse_args()
    tune_process()
    for work in options.work:
        name, _, dtype = work.partition(":")
        engine = EngineSettings(name=options.engine, dtype=dtype or "float32", workers=1)
        show_workload(name, engine, options.rounds, options.kernels)


if __name__ == "__main__":
    main()
