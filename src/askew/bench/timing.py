"""How fast full rounds are, against a plain PyTorch loop and against what the arithmetic needs.

A round is `Server.run_round`: batches are gathered, every client is trained, the model is averaged, the next round's
batches are planned; evaluation is left out. The plain loop trains the same clients on the same batches one after the
other, its batches planned before the clock starts. Rounds of the two alternate, so that a busy machine disturbs them
alike. Both start once from the same model, and how far they are apart afterwards shows that they do the same work
(`apart`).
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from ..core.records import Record
from ..engine.base import finished_time
from ..engine.process_group import ProcessGroup, process_group
from ..engine.settings import EngineSettings
from ..errors import ConfigError
from ..experiment.build import BuiltRun, build, device_of
from ..experiment.config import Config
from ..experiment.launch import run_config
from ..experiment.process_state import explain_out_of_memory, torch_state
from ..experiment.process_tuning import tune_process
from ..experiment.store import Run
from ..experiment.workers import Message, Send, WorkerGroup
from .baselines import FRAMEWORKS, OnRoundEnd, PlainLoop, step_flops
from .workloads import WORKLOADS, find_workload, with_random_images, workload_config

ROUNDS = 10  # that are timed, where nobody says how many
FIRST_ROUNDS = 4  # of an experiment's run, which are not: engines are tried, graphs captured
# `apart` above which two models were not trained alike; in tf32 and bf16 many steps of rounding alone may be 0.2
LARGEST_APART, LARGEST_APART_ROUNDED = 0.1, 0.5
FRAMEWORK_SECONDS = 900  # seconds that another framework may take


class Timing(NamedTuple):
    """One workload's figures. Times are medians over the rounds."""

    work: str
    engine: str
    device: str
    dtype: str
    compile: bool
    skewed: bool
    workers: int  # processes that share our rounds; the plain loop is always one
    parameters: int
    clients: int
    steps: int  # of all clients together
    samples: int
    rounds: int
    first_s: float  # the first round, with all that is chosen, compiled or captured in it
    round_ms: float
    samples_per_s: float
    bare_ms: float  # the plain loop
    speedup: float  # the plain loop's time over ours, round by round
    apart: (
        float  # after the first round: the two models' largest difference over the largest change, of the worst layer
    )
    flops: int  # of forward and backward passes
    matmul_flops_per_s: float  # what one large product of matrices reaches here, in every process
    floor_ms: float  # the flops at that speed
    over_floor: float
    launch_ms: float | None  # on a GPU: the longest client's kernels one after the other, were all of them empty
    over_launch: float | None
    peak_bytes: int | None  # of the device's memory, or of the process; of several, of the first


def loops_agree(timing: Timing) -> bool:
    """Did the two loops train the same model, but for rounding?"""
    rounded = timing.dtype in ("tf32", "bf16")
    return timing.apart <= (LARGEST_APART_ROUNDED if rounded else LARGEST_APART)


def selected_workloads(names: Sequence[str], device: str = "auto") -> list[str]:
    """The names of the workloads to time: the given ones, or all of the list that are not too heavy for the device."""
    for name in names:
        find_workload(name)
    cpu = device_of(device).type == "cpu"
    return list(dict.fromkeys(names)) or [
        name for name, workload in WORKLOADS.items() if name != "tiny" and not (cpu and workload.heavy)
    ]


def time_workload(
    name: str,
    engine: EngineSettings,
    rounds: int = ROUNDS,
    skewed: bool = False,
    on_round_end: OnRoundEnd = lambda: None,
) -> Timing:
    """Time rounds of a workload; with engine.workers > 1, in as many worker processes."""
    if rounds < 1:
        raise ConfigError(f"bench: rounds must be ≥ 1, got {rounds}; the default is {ROUNDS}.")
    if engine.workers < 2:
        return time_rounds(name, engine, rounds, skewed, on_round_end)
    job = {"workload": name, "engine": engine.table(), "rounds": rounds, "skewed": skewed}
    last: Message = {}
    with WorkerGroup(engine.workers, time_in_worker, job) as group:
        for message in group.messages(lambda: False):
            last = message
            on_round_end()
    return Timing(**last)


def time_in_worker(job: Message, send: Send) -> None:
    """A worker's job: time rounds together with the other workers; send a message after each, then the figures."""
    engine = EngineSettings(**job["engine"])
    timing = time_rounds(job["workload"], engine, job["rounds"], job["skewed"], lambda: send({}))
    send(timing._asdict())


class RoundTimes(NamedTuple):
    """What was measured round by round."""

    first: float  # seconds of our first round
    ours: list[float]  # seconds
    plain: list[float]  # seconds of the plain loop; of a rank other than 0, ours
    peaks: list[int]  # bytes
    apart: float


def time_rounds(name: str, engine: EngineSettings, rounds: int, skewed: bool, on_round_end: OnRoundEnd) -> Timing:
    """Time rounds in this process, together with the other ranks where there are some."""
    config, group = workload_config(name, engine, skewed), process_group()
    with torch_state(config, group), explain_out_of_memory():
        built = build(config, group=group)
        device, ids = built.space.device, built.fed.eligible.tolist()
        speed = matmul_speed(device, engine.dtype)
        times = alternate_rounds(built, rounds, group, on_round_end)
        speed = group.size * max(speed, matmul_speed(device, engine.dtype))
        clients = built.server.prepare(rounds + 2, ids).train
        longest = max(client.batches for client in clients)
        launch = launch_floor(built, longest) if device.type == "cuda" else None
    samples, seconds = sum(len(client.places) for client in clients), statistics.median(times.ours)
    flops = round(step_flops(name) * samples / find_workload(name).batch)
    return Timing(
        work=name,
        engine=built.facts["engine"],
        device=built.facts["device"],
        dtype=engine.dtype,
        compile=engine.compile,
        skewed=skewed,
        workers=group.size,
        parameters=built.space.P,
        clients=len(ids),
        steps=sum(client.batches for client in clients),
        samples=samples,
        rounds=rounds,
        first_s=times.first,
        round_ms=1e3 * seconds,
        samples_per_s=samples / seconds,
        bare_ms=1e3 * statistics.median(times.plain),
        speedup=statistics.median(plain / ours for ours, plain in zip(times.ours, times.plain, strict=True)),
        apart=times.apart,
        flops=flops,
        matmul_flops_per_s=speed / group.size,
        floor_ms=1e3 * flops / speed,
        over_floor=seconds * speed / flops,
        launch_ms=None if launch is None else 1e3 * launch,
        over_launch=None if launch is None else seconds / launch,
        peak_bytes=max(times.peaks, default=None),
    )


def alternate_rounds(built: BuiltRun, rounds: int, group: ProcessGroup, on_round_end: OnRoundEnd) -> RoundTimes:
    """Time rounds of askew and of the plain loop in turn; the latter runs at rank 0, while the others wait."""
    device, ids, server = built.space.device, built.fed.eligible.tolist(), built.server
    loop = PlainLoop(built)
    ours, plain, peaks = list[float](), list[float](), list[int | None]()

    def time_ours(t: int) -> None:
        reset_peak_memory(device)
        ours.append(seconds_of(device, lambda: server.run_round(t, ids, meanwhile=lambda: prepare(t + 1))))
        peaks.append(peak_memory(device))

    def prepare(t: int) -> None:
        server.prepare(t, ids)

    def time_plain(t: int) -> None:
        if group.is_leader:
            batches = loop.batches(ids, t)
            plain.append(seconds_of(device, lambda: loop.round(batches)))

    time_ours(1)
    apart = loop.difference(loop.round(loop.batches(ids, 1)), server.w) if group.is_leader else 0.0
    on_round_end()
    for t in range(2, rounds + 2):
        for time_round in (time_ours, time_plain) if t % 2 else (time_plain, time_ours):
            time_round(t)
        on_round_end()
    first = ours.pop(0)
    return RoundTimes(first, ours, plain or ours, [peak for peak in peaks if peak is not None], apart)


def time_own_rounds(built: BuiltRun, rounds: int) -> list[float]:
    """The seconds of each of the first rounds of all clients, without the plain loop."""
    device, ids, server = built.space.device, built.fed.eligible.tolist(), built.server

    def prepare(t: int) -> None:
        server.prepare(t, ids)

    def train(t: int) -> None:
        server.run_round(t, ids, meanwhile=lambda: prepare(t + 1))

    return [seconds_of(device, partial(train, t)) for t in range(1, rounds + 1)]


def seconds_of(device: torch.device, work: Callable[[], object]) -> float:
    """Seconds until work is done, on the device too."""
    began = finished_time(device)
    work()
    return finished_time(device) - began


# experiments ----------------------------------------------------------------------------------------------------


class ExperimentTiming(NamedTuple):
    """Rounds of an experiment's run as a user gets them, evaluation and all. Times are medians over the rounds."""

    work: str
    method: str
    engine: str
    device: str
    dtype: str
    compile: bool
    rounds: int
    first_s: float  # until the first round is done
    round_ms: float


def time_experiment(
    name: str, config: Config, engine: EngineSettings, rounds: int = ROUNDS, on_round_end: OnRoundEnd = lambda: None
) -> ExperimentTiming:
    """Time rounds of a configuration, after the first ones, in which engines are chosen and graphs captured."""
    if rounds < 1:
        raise ConfigError(f"bench: rounds must be ≥ 1, got {rounds}; the default is {ROUNDS}.")
    config = with_random_images(replace(config, rounds=FIRST_ROUNDS + rounds, engine=engine))
    ends = [finished_time(device_of(engine.device))]

    def watch(run: Run, record: Record | None) -> None:
        if record is not None:
            ends.append(finished_time(device_of(engine.device)))
            on_round_end()

    run = run_config(config, watch=watch)
    if not run.over:
        raise KeyboardInterrupt  # the run has noted a request to stop, and ended after its round
    took = [b - a for a, b in pairwise(ends)]
    return ExperimentTiming(
        work=name,
        method=config.algorithm.display_name(),
        engine=run.facts["engine"],
        device=run.facts["device"],
        dtype=engine.dtype,
        compile=engine.compile,
        rounds=rounds,
        first_s=took[0],
        round_ms=1e3 * statistics.median(took[FIRST_ROUNDS:]),
    )


# memory ---------------------------------------------------------------------------------------------------------


def reset_peak_memory(device: torch.device) -> None:
    """Begin to measure the peak anew; of a process only Linux can, elsewhere its peak is that of its whole life."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory(device: torch.device) -> int | None:
    """The most bytes that were allocated on the device, or resident in the process; None where that is not known."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        import resource
    except ImportError:  # Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


# floors ---------------------------------------------------------------------------------------------------------


def matmul_speed(device: torch.device, dtype: str) -> float:
    """Operations a second of one large product of matrices: the best of several, which other programs disturb least."""
    n = 8192 if device.type == "cuda" else 1024
    kind = {"float64": torch.float64, "bf16": torch.bfloat16}.get(dtype, torch.float32)
    a, b = (torch.randn(n, n, device=device).to(kind) for _ in range(2))
    return 2 * n**3 / min(seconds_of(device, lambda: a @ b) for _ in range(12))


def launch_floor(built: BuiltRun, steps: int) -> float:
    """Seconds that the kernels of one client's steps take one after the other if each is empty."""
    loop = PlainLoop(built)
    batch = torch.arange(built.config.local.batch, device=built.space.device)
    loop.round([[batch]])
    one, two = (
        count_kernels(lambda count=count: loop.round([[batch] * count]))  # type: ignore[misc]
        for count in (1, 2)
    )
    return steps * (two - one) * empty_kernel_seconds(built.space.device)  # what surrounds the steps is in both


def count_kernels(work: Callable[[], object]) -> int:
    """How many kernels the device is given."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's remarks on its profiler are not for users of a benchmark
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            work()
    return sum(event.device_type.name == "CUDA" for event in profiler.events() or ())


@cache
def empty_kernel_seconds(device: torch.device) -> float:
    """Seconds that a kernel with nothing to do takes in a captured graph."""
    count, number = 1000, torch.zeros(1, device=device)
    number.add_(1)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            number.add_(1)
    return min(seconds_of(device, graph.replay) for _ in range(10)) / count


# other frameworks -----------------------------------------------------------------------------------------------


class FrameworkTiming(NamedTuple):
    """Another framework's time for a workload, and the plain loop's in the same process; or why there are none."""

    work: str
    name: str
    version: str
    threads: int
    round_ms: float | None
    bare_ms: float | None
    speedup: float | None
    note: str


def is_installed(name: str) -> bool:
    """Are all packages there that a framework needs?"""
    return all(find_spec(package) is not None for package in FRAMEWORKS[name].needs)


def time_framework(
    name: str, workload: str, rounds: int = ROUNDS, device: str = "auto", threads: int = 1
) -> FrameworkTiming:
    """Time a workload in another framework, in a process of its own."""
    if not is_installed(name):
        return FrameworkTiming(workload, name, "", threads, None, None, None, "not installed")
    version = ""
    with suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version(name)
    nothing = FrameworkTiming(workload, name, version, threads, None, None, None, "")
    arguments = (name, workload, str(rounds), str(device_of(device)), str(threads))
    command = [sys.executable, "-W", "ignore", "-m", "askew.bench.timing", *arguments]
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=FRAMEWORK_SECONDS, env=os.environ | quiet, check=True
        )
    except subprocess.TimeoutExpired:
        return nothing._replace(note=f"not done after {FRAMEWORK_SECONDS} s")
    except subprocess.CalledProcessError as e:
        return nothing._replace(note=f"failed: {(e.stderr.strip().splitlines() or ['without a word'])[-1]}")
    laps = json.loads(process.stdout.splitlines()[-1])[1:]
    round_ms, bare_ms = (1e3 * statistics.median(column) for column in zip(*laps, strict=True))
    speedup = statistics.median(plain / theirs for theirs, plain in laps)
    return nothing._replace(round_ms=round_ms, bare_ms=bare_ms, speedup=speedup, note=FRAMEWORKS[name].how)


class LapTimer:
    """Measures the seconds from its start, then between its calls, and after each call those of the plain loop."""

    def __init__(self, workload: str, device: str) -> None:
        self.device, self.pairs = torch.device(device), list[tuple[float, float]]()
        built = build(workload_config(workload, EngineSettings(name="sequential", device=device)))
        self.loop = PlainLoop(built)
        self.batches = self.loop.batches(built.fed.eligible.tolist(), 1)
        self.last = time.perf_counter()

    def __call__(self) -> None:
        lap = finished_time(self.device) - self.last
        self.pairs.append((lap, seconds_of(self.device, lambda: self.loop.round(self.batches))))
        self.last = time.perf_counter()


if __name__ == "__main__":
    framework, workload, rounds, device, threads = sys.argv[1:]
    tune_process()
    torch.set_num_threads(int(threads))
    laps = LapTimer(workload, device)
    FRAMEWORKS[framework].run(workload, int(rounds) + 1, device, laps)
    print(json.dumps(laps.pairs))
