"""How long the host prepares a round of the stacked engine, from the request to the first move, samples in place.

$ python benchmarks/host.py softmax-220x10x64 softmax-10x2x256

It needs no GPU: what is measured is the processor time of Python and of small tensors, and nothing is trained.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

import torch

from askew.bench.workloads import workload_config
from askew.engine import stacked
from askew.engine.row_moves import RowMoves
from askew.engine.settings import EngineSettings
from askew.engine.stacked import Stacked
from askew.experiment.build import build
from askew.experiment.process_state import torch_state

ROUNDS = 2  # that are trained first, so that there are buffers


class FirstMove(Exception):
    """The first move would begin now."""


def stop(rows: Sequence[RowMoves]) -> None:
    raise FirstMove


def show_workload(name: str, repeats: int) -> None:
    """Time the host's work before a round of a workload."""
    config = workload_config(name, EngineSettings(name="stacked", device="cpu", workers=1))
    with torch_state(config):
        built = build(config)
        engine, ids = built.server.engine, built.fed.eligible.tolist()
        assert isinstance(engine, Stacked)
        for round in range(ROUNDS):
            built.server.run_round(round + 1, ids)
        request = next(built.server.round_requests(ROUNDS + 1, ids))
        engine.prepare([request])
        run_side_by_side, times = stacked.run_side_by_side, list[float]()
        stacked.run_side_by_side = stop  # type: ignore[assignment]
        for _ in range(repeats):
            began = time.process_time()
            try:
                engine.run([request])
            except FirstMove:
                times.append(1e3 * (time.process_time() - began))
        stacked.run_side_by_side = run_side_by_side
    print(f"{name}: {statistics.median(times):.2f} ms, least {min(times):.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", nargs="+", help="as of `askew bench`")
    parser.add_argument("--repeats", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.work:
        show_workload(name, options.repeats)


if __name__ == "__main__":
    main()
