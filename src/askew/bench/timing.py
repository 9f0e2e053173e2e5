"""How fast rounds are: full rounds as a user gets them, against a loop written by hand and against what the arithmetic needs.

A round is `Server.play`: batches are gathered, every client is trained, the model is averaged, the next round's batches are
planned; evaluation is apart. The loop by hand trains the same clients on the same batches one after the other, its batches
planned before the clock starts. Rounds of the two alternate, so that a busy machine disturbs them alike, and both start
once from the same model, so that what is timed is known to be the same work (`apart`).
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch

from ..engine.base import finished_time
from ..engine.choose import EngineSettings
from ..engine.distributed import process_group
from ..errors import ConfigError
from ..experiment.build import BuiltRun, build, device_of
from ..experiment.run import enough_memory, torch_state
from ..experiment.workers import Say, Told, WorkerPool
from .baselines import FRAMEWORKS, PlainLoop, step_flops
from .workloads import WORKS, configured, work_of

ROUNDS = 10
FAR, FAR_ROUNDED = (
    0.1,
    0.5,
)  # models so far apart were not trained alike; in tf32 and bf16 many steps of rounding alone may be 0.2
PATIENCE = 900  # seconds that another framework may take

Tick = Callable[[], None]  # called after every round


class Timing(NamedTuple):
    """One work's figures. Times are medians over the rounds."""

    work: str
    engine: str
    device: str
    dtype: str
    compile: bool
    skewed: bool
    workers: int  # processes that share our rounds; the loop by hand is always one
    parameters: int
    clients: int
    steps: int  # of all clients together
    samples: int
    rounds: int
    first_s: float  # the first round, with all that is chosen, compiled or captured in it
    round_ms: float
    samples_per_s: float
    bare_ms: float  # the loop by hand
    speedup: float  # of a round against the loop's beside it
    apart: float  # after the first round: the two models' largest difference over the largest change, of the worst parameter
    flops: int  # of forward and backward passes
    matmul_flops_per_s: float  # what one large product of matrices reaches here, in every process
    floor_ms: float  # the flops at that speed
    over_floor: float
    launch_ms: (
        float | None
    )  # a GPU: the longest client's kernels one after the other, each for as long as an empty one takes
    over_launch: float | None
    peak_bytes: int | None  # of the device's memory, or of the process; of several, of the first


def alike(timing: Timing) -> bool:
    """Did the two loops train alike, but for rounding?"""
    return timing.apart <= (FAR_ROUNDED if timing.dtype in ("tf32", "bf16") else FAR)


def chosen(names: Sequence[str], device: str = "auto") -> list[str]:
    """The works to do: the named ones, or all of the list that a device does in bearable time."""
    for name in names:
        work_of(name)
    cpu = device_of(device).type == "cpu"
    return list(dict.fromkeys(names)) or [
        name for name, work in WORKS.items() if name != "tiny" and not (cpu and work.heavy)
    ]


def measure(
    name: str, engine: EngineSettings, rounds: int = ROUNDS, skewed: bool = False, tick: Tick = lambda: None
) -> Timing:
    """Play rounds of a work, and time them; with engine.workers > 1, in as many processes."""
    if rounds < 1:
        raise ConfigError(f"bench: rounds must be ≥ 1, got {rounds}; the default is {ROUNDS}.")
    if engine.workers < 2:
        return time_rounds(name, engine, rounds, skewed, tick)
    told = list[Told]()
    with WorkerPool(
        engine.workers, time_job, {"work": name, "engine": engine.table(), "rounds": rounds, "skewed": skewed}
    ) as crew:
        for word in crew.heard(lambda: False):
            told.append(word)
            tick()
    return Timing(**told[-1])


def time_job(job: Told, say: Say) -> None:
    """A rank's part of a measurement."""
    timing = time_rounds(job["work"], EngineSettings(**job["engine"]), job["rounds"], job["skewed"], lambda: say({}))
    say(timing._asdict())


def time_rounds(name: str, engine: EngineSettings, rounds: int, skewed: bool, tick: Tick) -> Timing:
    """Rounds of this process, or of all that share its work; the loop by hand runs at the first, while the others wait."""
    config, group = configured(name, engine, skewed), process_group()
    with torch_state(config, group), enough_memory():
        house = build(config, group=group)
        device, ids = house.space.device, house.fed.eligible.tolist()
        hand = PlainLoop(house)
        ours, bare, peaks = list[float](), list[float](), list[int | None]()

        def play(t: int) -> None:
            forget_peak(device)
            ours.append(
                measure_time(device, lambda: house.server.run_round(t, ids, meanwhile=lambda: prepare_next(t + 1)))
            )
            peaks.append(peak(device))

        def prepare_next(t: int) -> None:
            house.server.prepare(t, ids)

        def loop(t: int) -> None:
            if group.is_leader:
                batches = hand.batches(ids, t)
                bare.append(measure_time(device, lambda: hand.round(batches)))

        speed = matmul_speed(device, engine.dtype)
        play(1)
        apart = hand.apart(hand.round(hand.batches(ids, 1)), house.server.w) if group.is_leader else 0.0
        tick()
        for t in range(2, rounds + 2):
            for turn in (play, loop) if t % 2 else (loop, play):
                turn(t)
            tick()
        works = house.server.prepare(rounds + 2, ids).train
        samples, first = sum(len(work.places) for work in works), ours.pop(0)
        round_s = statistics.median(ours)
        flops = round(step_flops(name) * samples / work_of(name).batch)
        speed = group.size * max(speed, matmul_speed(device, engine.dtype))
        launch = launch_floor(house, max(work.batches for work in works)) if device.type == "cuda" else None
    known = [p for p in peaks if p is not None]
    return Timing(
        work=name,
        engine=house.facts["engine"],
        device=house.facts["device"],
        dtype=engine.dtype,
        compile=engine.compile,
        skewed=skewed,
        workers=group.size,
        parameters=house.space.P,
        clients=len(ids),
        steps=sum(work.batches for work in works),
        samples=samples,
        rounds=rounds,
        first_s=first,
        round_ms=1e3 * round_s,
        samples_per_s=samples / round_s,
        bare_ms=1e3 * statistics.median(bare or ours),
        speedup=statistics.median(b / a for a, b in zip(ours, bare or ours, strict=True)),
        apart=apart,
        flops=flops,
        matmul_flops_per_s=speed / group.size,
        floor_ms=1e3 * flops / speed,
        over_floor=round_s * speed / flops,
        launch_ms=None if launch is None else 1e3 * launch,
        over_launch=None if launch is None else round_s / launch,
        peak_bytes=max(known, default=None),
    )


def measure_time(device: torch.device, go: Callable[[], object]) -> float:
    """Seconds until it is done, on the device too."""
    began = finished_time(device)
    go()
    return finished_time(device) - began


# memory ---------------------------------------------------------------------------------------------------------


def forget_peak(device: torch.device) -> None:
    """Let the peak begin anew; of a process that is Linux's to give, elsewhere the peak is that of its whole life."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak(device: torch.device) -> int | None:
    """Bytes: the most that were allocated on the device, or resident in the process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        import resource
    except ImportError:  # Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


# floors ---------------------------------------------------------------------------------------------------------


def matmul_speed(device: torch.device, dtype: str) -> float:
    """Operations a second of one large product of matrices: the best of several, as a floor should not depend on who disturbs."""
    n = 8192 if device.type == "cuda" else 1024
    kind = {"float64": torch.float64, "bf16": torch.bfloat16}.get(dtype, torch.float32)
    a, b = (torch.randn(n, n, device=device).to(kind) for _ in range(2))
    return 2 * n**3 / min(measure_time(device, lambda: a @ b) for _ in range(12))


def launch_floor(house: BuiltRun, steps: int) -> float:
    """Seconds that the kernels of one client's steps take one after the other if each is empty."""
    hand = PlainLoop(house)
    batch = torch.arange(house.config.local.batch, device=house.space.device)
    hand.round([[batch]])
    one, two = (kernels(lambda count=count: hand.round([[batch] * count])) for count in (1, 2))  # type: ignore[misc]
    return steps * (two - one) * empty_kernel(house.space.device)  # what surrounds the steps is in both


def kernels(go: Callable[[], object]) -> int:
    """How many kernels the device is given."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        go()
    return sum(event.device_type.name == "CUDA" for event in seen.events() or ())


@cache
def empty_kernel(device: torch.device) -> float:
    """Seconds that a kernel with nothing to do takes in a captured graph."""
    count, number = 1000, torch.zeros(1, device=device)
    number.add_(1)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            number.add_(1)
    return min(measure_time(device, graph.replay) for _ in range(10)) / count


# other frameworks -----------------------------------------------------------------------------------------------


class Rival(NamedTuple):
    """Another framework at the same work, against the loop by hand in its own process; or why there are no figures."""

    work: str
    name: str
    version: str
    threads: int
    round_ms: float | None
    bare_ms: float | None
    speedup: float | None
    note: str


def installed(name: str) -> bool:
    return all(find_spec(package) is not None for package in FRAMEWORKS[name].needs)


def rival(name: str, work: str, rounds: int = ROUNDS, device: str = "auto", threads: int = 1) -> Rival:
    """Give a work to another framework, in a process of its own."""
    if not installed(name):
        return Rival(work, name, "", threads, None, None, None, "not installed")
    version = ""
    with suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version(name)
    none = Rival(work, name, version, threads, None, None, None, "")
    given = (name, work, str(rounds), str(device_of(device)), str(threads))
    command = [sys.executable, "-W", "ignore", "-m", "askew.bench.timing", *given]
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    try:
        told = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE, env=os.environ | quiet, check=True
        )
    except subprocess.TimeoutExpired:
        return none._replace(note=f"not done after {PATIENCE} s")
    except subprocess.CalledProcessError as e:
        return none._replace(note=f"failed: {(e.stderr.strip().splitlines() or ['without a word'])[-1]}")
    laps = json.loads(told.stdout.splitlines()[-1])[1:]
    round_ms, bare_ms = (1e3 * statistics.median(column) for column in zip(*laps, strict=True))
    return none._replace(
        round_ms=round_ms, bare_ms=bare_ms, speedup=statistics.median(b / a for a, b in laps), note=FRAMEWORKS[name].how
    )


class Laps:
    """Seconds between calls, and after each those of the loop by hand."""

    def __init__(self, work: str, device: str) -> None:
        self.device, self.pairs = torch.device(device), list[tuple[float, float]]()
        house = build(configured(work, EngineSettings(name="sequential", device=device)))
        self.hand = PlainLoop(house)
        self.batches = self.hand.batches(house.fed.eligible.tolist(), 1)
        self.last = time.perf_counter()

    def __call__(self) -> None:
        lap = finished_time(self.device) - self.last
        self.pairs.append((lap, measure_time(self.device, lambda: self.hand.round(self.batches))))
        self.last = time.perf_counter()


if __name__ == "__main__":
    framework, work, count, device, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    laps = Laps(work, device)
    FRAMEWORKS[framework].play(work, int(count) + 1, device, laps)
    print(json.dumps(laps.pairs))
