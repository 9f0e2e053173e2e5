"""What a large federation costs: the same ten participants a round out of a thousand and out of a million clients.

The two federations play their rounds in turn, so that a busy machine disturbs them alike. Printed are milliseconds a
round, their ratio, seconds to start, and the process's peak memory.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time

import torch

from askew.experiment.build import build
from askew.experiment.config import Config
from askew.experiment.process_tuning import tune_process


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, nargs=2, default=[1_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--algorithm", default="scaffold", help="one that keeps client state shows the bank's cost")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tune_process()
    federations, rows, times = [], [], []
    for clients in options.clients:
        tables = {
            "data": {"name": "synthetic", "alpha": 1.0, "beta": 1.0},
            "partition": {"clients": clients},
            "participation": {"cohort": 10},
            "model": {"name": "softmax"},
            "algorithm": {"name": options.algorithm},
            "local": {"batch": 10, "lr": 0.1},
        }
        began = time.perf_counter()
        federations.append(build(Config.build(tables)))
        rows.append({"clients": clients, "start_s": time.perf_counter() - began})
        times.append([])
    for t in range(1, options.rounds + 3):
        for built, seconds in zip(federations, times, strict=True):
            began = time.perf_counter()
            ids = built.config.participation.sample(built.config.seed, t, built.fed.eligible, built.fed.clients)
            built.server.run_round(t, ids.tolist())
            seconds.append(time.perf_counter() - began)
    for row, seconds in zip(rows, times, strict=True):
        row["ms_per_round"] = 1e3 * statistics.median(seconds[2:])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    result = {
        "algorithm": options.algorithm,
        "rows": rows,
        "ratio": rows[1]["ms_per_round"] / rows[0]["ms_per_round"],
        "peak_gb": peak,
    }
    if options.json:
        print(json.dumps(result, indent=1))
        return
    for row in rows:
        print("{clients:>9,} clients   start {start_s:6.2f} s   {ms_per_round:8.2f} ms a round".format(**row))
    print(f"ratio {result['ratio']:.2f}   peak memory {peak:.2f} GB   ({options.algorithm}, 10 participants a round)")


if __name__ == "__main__":
    main()
