"""A queue of experiments: parts that end in time, results stored as they come, and the rows of single commands."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from askew.cli.main import main
from askew.reproduction import schedule as schedule_module
from askew.reproduction.plan import prepare_reproduction
from askew.reproduction.results import read_results
from askew.reproduction.schedule import FEWEST_RUNS, PART_SECONDS, Schedule, ScheduledExperiment

SMOKE = """
[[entry]]
experiment = "feddpc/fig7"
[[entry]]
experiment = "feddpc/table2"
only = ["FedProx", "FedDPC"]
seeds = 2
"""


def rows(folder: Path) -> dict[Any, Any]:
    """The stored results without times."""
    return {r.key: r for r in read_results(folder) if not r.metric.startswith("seconds")}


def queue_file(folder: Path, text: str = SMOKE) -> Path:
    path = folder / "queue.toml"
    path.write_text(text)
    return path


# running --------------------------------------------------------------------------------------------------------


def run_queue(folder: Path, *words: str) -> int:
    """Run the queue of a folder at smoke scale; the exit code."""
    where = ["--out", str(folder / "runs"), "--results", str(folder / "results")]
    return main(["reproduce", "--queue", str(folder / "queue.toml"), "--scale", "smoke", *where, *words])


def test_a_queue_stores_the_rows_of_single_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    queue_file(tmp_path)
    assert run_queue(tmp_path, "--json") == 0
    entries = json.loads(capsys.readouterr().out)["entries"]
    # FedDPC's run with seed 0 is that of fig7, and is trained once
    assert [(e["done"], e["stored"], e["left"]) for e in entries] == [(3, 0, 0), (4, 0, 0)]
    where = ["--scale", "smoke", "--out", str(tmp_path / "one"), "--results", str(tmp_path / "single")]
    assert main(["reproduce", "feddpc/fig7", *where]) == 0
    assert main(["reproduce", "feddpc/table2", "--only", "FedProx", "--only", "FedDPC", "--seeds", "2", *where]) == 0
    assert rows(tmp_path / "results") == rows(tmp_path / "single")
    capsys.readouterr()
    assert run_queue(tmp_path) == 0 and "1:" not in capsys.readouterr().err  # nothing is trained again


# what comes next ------------------------------------------------------------------------------------------------


class Simulation:
    """A GPU that trains parts one after the other: a round of k runs takes fixed + each · k seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fixed: float, each: float, build: float = 5.0) -> None:
        self.now, self.fixed, self.each, self.build = 1000.0, fixed, each, build
        monkeypatch.setattr(schedule_module, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(schedule_module, "device_of", lambda name: torch.device("cuda"))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 10**12))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "some GPU")

    def train(self, schedule: Schedule) -> list[tuple[int, float]]:
        """Train all that is given out: the size of each part and when it ended."""
        ends = list[tuple[int, float]]()
        for configs in schedule.parts():
            assert configs
            part = schedule.begun[configs[0].name()].part
            self.now += self.build
            runs = [SimpleNamespace(name=c.name(), rounds=list[int]()) for c in configs]
            for t in range(configs[0].rounds):
                self.now += self.fixed + self.each * len(runs)
                for run in runs:
                    run.rounds.append(t)
                    schedule.on_round(run, {"round": t})  # type: ignore[arg-type]
            for run in runs:
                schedule.on_end(run)  # type: ignore[arg-type]
            assert not part.names
            ends.append((len(runs), self.now))
        return ends


def scheduled(id: str, *only: str, seeds: int | None = None) -> ScheduledExperiment:
    reproduction = prepare_reproduction(id, only=only, seeds=seeds, results="nowhere")
    return ScheduledExperiment(reproduction, waiting=reproduction.missing)


def test_parts_end_every_few_minutes_and_do_not_leave_the_gpu_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Simulation(monkeypatch, fixed=0.073, each=0.0137)  # FedDC's MLP on MNIST, 600 rounds
    ends = gpu.train(Schedule([scheduled("feddc/table1-mnist", "D1-15", "D2-15", "iid-15", seeds=2)], "nowhere"))
    sizes = [size for size, _ in ends]
    assert sum(sizes) == 30 and all(size >= FEWEST_RUNS for size in sizes[1:-1])
    times = [1000.0, *(end for _, end in ends)]
    assert all(after - before < 1.2 * PART_SECONDS for before, after in pairwise(times))
    # of runs that take long, as few at a time as the rule allows
    slow = Simulation(monkeypatch, fixed=0.1, each=0.4)
    ends = slow.train(Schedule([scheduled("feddc/table1-mnist", "D1-15", "D2-15", seeds=2)], "nowhere"))
    assert max(size for size, _ in ends) == FEWEST_RUNS


def test_no_part_begins_that_would_not_end_in_time_and_shorter_entries_take_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = Simulation(monkeypatch, fixed=0.02, each=0.01)
    long, short = scheduled("feddc/table1-mnist", "D1-15", seeds=8), scheduled("feddpc/fig6", seeds=2)
    deadline = gpu.now + 200
    schedule = Schedule([long, short], "nowhere", deadline=deadline)
    schedule.speeds = {("some GPU", "lenet"): 1.5e6}  # as stored results say
    ends = gpu.train(schedule)
    assert all(end <= deadline for _, end in ends)
    assert long.done and short.done and long.left and not long.parts and not short.parts
    assert deadline - gpu.now < 30  # little of the time is left unused
