"""Where the time goes between the shell and a run's first rounds: a run in a new process, stage by stage.

The process does what `askew run` does, and stops after some rounds. Nothing is stored.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from typing import NamedTuple

import torch

from ..engine.base import finished_time
from ..errors import EngineError
from ..experiment.build import BuildCache, build, device_of
from ..experiment.config import Config
from ..experiment.process_state import explain_out_of_memory, torch_state
from ..experiment.process_tuning import tune_process
from ..kernels.cuda import available
from .workloads import with_random_images

LATER = 5  # rounds after the second, of which the median is shown

# what runs in the new process: it notes when torch and when askew were there
CHILD = """
import sys, time
times = [float(sys.argv[1]), time.time()]
from askew.experiment.process_tuning import quick_imports
with quick_imports():
    import torch
    times.append(time.time())
    from askew.bench.start import print_stages
times.append(time.time())
print_stages(times, sys.argv[2], sys.argv[3] == "random")
"""


class Stage(NamedTuple):
    """A part of a run's start, and its seconds."""

    name: str
    seconds: float


def time_start(config: Config, random_images: bool = False) -> list[Stage]:
    """The stages of a run's start, in their order; `random_images`: in place of those of CIFAR."""
    words = [repr(time.time()), json.dumps(config.tables()), "random" if random_images else "stored"]
    done = subprocess.run([sys.executable, "-c", CHILD, *words], capture_output=True, text=True)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1].rpartition("Error: ")[2]
        raise EngineError(f"bench: the run that was to be timed failed: {reason}")
    return [Stage(*each) for each in json.loads(done.stdout.splitlines()[-1])]


def print_stages(times: list[float], tables: str, random_images: bool) -> None:
    """Build a run, train some rounds, and print the seconds of every stage as JSON.

    `times`: when the process was asked for, when it was there, when torch was loaded, and when askew was.
    """
    stages = [Stage(name, b - a) for name, (a, b) in zip(("Python", "torch", "askew"), pairwise(times), strict=True)]
    tune_process()
    config = Config.build(json.loads(tables))
    config = with_random_images(config) if random_images else config
    device, last = device_of(config.engine.device), time.perf_counter()

    def note(name: str) -> None:
        nonlocal last
        now = finished_time(device)
        stages.append(Stage(name, now - last))
        last = now

    if device.type == "cuda":
        torch.zeros(1, device=device)
        note("CUDA")
        available()
        note("Triton")
    with torch_state(config), explain_out_of_memory():
        cache = BuildCache()
        fed = cache.federation(config, device)
        note("samples")
        built = build(config, cache)
        note("network, engine and server")
        draw = config.participation.drawn_by(config.seed)
        for t in range(1, LATER + 3):
            ids = config.participation.draw(draw, t, fed.eligible, fed.clients).tolist()
            built.server.run_round(t, ids)
            built.evaluator(built.server.w, built.server.buffers)
            note("first round" if t == 1 else "second round" if t == 2 else "a later round")
        later = [stage.seconds for stage in stages if stage.name == "a later round"]
    first = stages[: -len(later)]
    print(json.dumps([*first, Stage("a later round", statistics.median(later))]))
