"""A queue of experiments: parts that end in time, results stored as they come, and the rows of single commands."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from io import StringIO
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from askew.cli import progress
from askew.cli.main import main
from askew.errors import AskewError, EngineError
from askew.experiment.config import Config
from askew.reproduction import schedule as schedule_module
from askew.reproduction.cost import MeasuredSpeed, Speeds
from askew.reproduction.papers import find_experiment, papers_folder
from askew.reproduction.plan import prepare_reproduction
from askew.reproduction.planned_runs import run_specs, spec_value, wanted_values
from askew.reproduction.queue import prepare_queue, read_queue
from askew.reproduction.reproduce import reproduce
from askew.reproduction.results import read_results
from askew.reproduction.run_metrics import TO_TARGET
from askew.reproduction.schedule import (
    FEWEST_RUNS,
    PART_SECONDS,
    STACKED_RUNS,
    RunSchedule,
    ScheduledExperiment,
    whole_methods,
)

SMOKE = """
[[entry]]
experiment = "feddpc/fig6"
only = ["FedDPC", "FedAvg two-sided"]
[[entry]]
experiment = "feddpc/fig7"
only = ["FedDPC λ 1", "FedDPC λ -0.5"]
"""
TUNED = """
title = "A grid"
where = "here"
shows = "table"
choose = ["best_accuracy"]
[base]
rounds = 2
evaluation = { halves = true }
partition = { clients = 4 }
[grid]
"local.lr" = [1e-6, 0.5]
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


def test_a_queue_stores_the_rows_of_single_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("askew.reproduction.prune_curves.experiments", dict)  # no others use the curves
    grid = tmp_path / "grid.toml"
    grid.write_text(TUNED)
    queue_file(tmp_path, SMOKE + f"[[entry]]\nexperiment = {str(grid)!r}\nseeds = 2\n")
    assert run_queue(tmp_path, "--json") == 0
    entries = json.loads(capsys.readouterr().out)["entries"]
    # FedDPC of fig6 and λ 1 of fig7 are one run; the second seed of the grid is run at the chosen point alone
    assert [(e["done"], e["stored"], e["left"]) for e in entries] == [(2, 0, 0), (1, 0, 0), (3, 0, 0)]
    single = {"out": tmp_path / "one", "results": tmp_path / "single"}
    reproduce("feddpc/fig6", "smoke", ["FedDPC", "FedAvg two-sided"], **single)
    reproduce("feddpc/fig7", "smoke", ["FedDPC λ 1", "FedDPC λ -0.5"], **single)
    reproduce(str(grid), "smoke", seeds=2, **single)
    assert rows(tmp_path / "results") == rows(tmp_path / "single")
    assert run_queue(tmp_path) == 0 and "1:" not in capsys.readouterr().err  # nothing is trained again


PLUGIN = """
import os, signal
import askew
from askew.algorithms import FedAvg

@askew.register("deadly")
class Deadly(FedAvg):
    \"\"\"FedAvg that kills its process in the second round.\"\"\"

    def aggregate(self, w, up, cohort, server):
        if cohort.round == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().aggregate(w, up, cohort, server)
"""
EXPERIMENT = """
title = "Some runs"
where = "here"
shows = "table"
[base]
rounds = 3
partition = { clients = 4 }
[[method]]
name = "A"
[[method]]
name = "B"
set = { algorithm = { name = "fedprox" } }
[[method]]
name = "C"
set = { LAST }
"""


@pytest.mark.slow
def test_what_was_finished_survives_the_death_of_the_command(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(PLUGIN)
    page = EXPERIMENT.replace("LAST", 'algorithm = { name = "deadly" }')
    (tmp_path / "mine.toml").write_text(page.replace("[base]", f"[base]\nplugins = [{str(tmp_path / 'own.py')!r}]"))
    queue_file(tmp_path, '[[entry]]\nexperiment = "mine.toml"\n')
    command = [sys.executable, "-m", "askew", "reproduce", "--queue", "queue.toml"]
    code = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=300, check=False).returncode
    assert code == -signal.SIGKILL
    assert {r.method for r in read_results(tmp_path / "results")} == {"A", "B"}


def test_a_run_that_takes_too_long_is_stopped_and_goes_on_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    page = EXPERIMENT.replace("LAST", "rounds = 4")
    (tmp_path / "mine.toml").write_text(page.replace("rounds = 3", "rounds = 12", 1))
    (tmp_path / "brief.toml").write_text(page)
    queue_file(tmp_path, '[[entry]]\nexperiment = "mine.toml"\nonly = ["A"]\n[[entry]]\nexperiment = "brief.toml"\n')
    command = ["reproduce", "--queue", "queue.toml", "--json"]

    def note_if_too_slow(self: RunSchedule, configs: Any) -> bool:
        part = self.begun[configs[0].name()].part
        part.too_slow = part.records == 5 and configs[0].rounds == 12
        return part.too_slow

    with monkeypatch.context() as patch:
        patch.setattr(RunSchedule, "note_if_too_slow", note_if_too_slow)
        assert main(command) == 0
    first, second = json.loads(capsys.readouterr().out)["entries"]
    assert (first["done"], first["too_long"], first["left"]) == (0, 1, 1) and second["done"] == 3
    assert main(command) == 0
    first, second = json.loads(capsys.readouterr().out)["entries"]
    assert (first["done"], first["left"], second["stored"], second["left"]) == (1, 0, 3, 0)
    for name, only in (("mine.toml", ["A"]), ("brief.toml", [])):
        reproduce(name, only=only, out="other", results="single")
    assert rows(tmp_path / "results") == rows(tmp_path / "single")


def test_a_failure_and_missing_data_do_not_stop_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ASKEW_DATA", str(tmp_path))
    monkeypatch.setattr("askew.data.files.chosen_folder", None)
    (tmp_path / "mine.toml").write_text(EXPERIMENT.replace("LAST", "rounds = 4"))

    def fail(*args: object, **options: object) -> None:
        raise EngineError("there is not enough memory for this run; take a smaller network.")

    monkeypatch.setattr("askew.models.network.Network.build_module", fail)
    queue_file(
        tmp_path, '[[entry]]\nexperiment = "feddc/table1-mnist"\n[[entry]]\nexperiment = "mine.toml"\nonly = ["A"]\n'
    )
    assert main(["reproduce", "--queue", "queue.toml"]) == 1
    out, err = capsys.readouterr()
    assert "feddc/table1-mnist is left out: " in err and "1 run failed (there is not enough memory" in err
    assert "mine.toml" in out and "1 run failed or lost a process" in err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no entries"),
        ("[[entry]]\nseeds = 2\n", "entry 1: experiment is missing"),
        ('[[entry]]\nexperiment = "feddpc/fig6"\nseeds = 0\n', "seeds must be a number of seeds, 1 or more, got 0"),
        ('[[entry]]\nexperiment = "feddpc/fig6"\nseed = 1\n', "unknown key 'seed'"),
        ('[[entry]]\nexperiment = "feddpc/fig6"\nonly = "FedDPC"\n', "only must be a list of texts"),
        ('[[entry]]\nexperiment = "feddpc/fig6"\nonly = ["FedDPX"]\n', "there is no 'FedDPX' here"),
        ('[[entry]]\nexperiment = "feddc/cost"\n', "feddc/cost times rounds"),
    ],
)
def test_mistakes_in_a_queue_are_one_sentence(
    text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    queue_file(tmp_path, text)
    assert run_queue(tmp_path) == 2
    out, err = capsys.readouterr()
    assert not out and says in err and err.count("\n") == 1


def test_the_command_needs_an_experiment_or_a_queue(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    queue_file(tmp_path)
    assert main(["reproduce"]) == 2 and "--queue FILE" in capsys.readouterr().err
    assert run_queue(tmp_path, "--seeds", "2") == 2
    assert "--seeds and --queue do not go together" in capsys.readouterr().err


def test_a_plan_says_what_entries_bring_and_sorts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    number = SimpleNamespace(experiment="feddpc/fig3", case="cifar10-0.6", method="FedCM @ local.lr=1")
    row = SimpleNamespace(printed=number, values=(), missing=True)
    measured = SimpleNamespace(printed=number, values=(50.0,), missing=None)
    section = SimpleNamespace(rows=[row, measured], claims=[])
    monkeypatch.setattr("askew.reproduction.queue_plan.collect_ledger", lambda papers, results: [section])
    speeds = known_speeds("NVIDIA H200", "lenet", 1.5e6)
    monkeypatch.setattr("askew.reproduction.queue_plan.training_speeds", lambda rows: speeds)
    queue_file(
        tmp_path,
        '[[entry]]\nexperiment = "feddpc/fig6"\n'
        '[[entry]]\nexperiment = "feddpc/table2"\nonly = ["case=cifar10-0.6", "method=FedCM", "local.lr=1"]\n',
    )
    best = tmp_path / "best.toml"
    where = ["--results", str(tmp_path / "results")]
    command = ["reproduce", "--queue", str(tmp_path / "queue.toml"), "--plan", "--sorted", str(best), *where]
    assert main([*command, "--json"]) == 0
    plans = json.loads(capsys.readouterr().out)
    assert [(p["missing"], p["numbers"]) for p in plans] == [(5, 0), (4, 1)] and plans[1]["numbers_per_minute"] > 0
    assert [entry.experiment for entry in read_queue(best)] == ["feddpc/table2", "feddpc/fig6"]
    assert read_queue(best)[0].only == ("case=cifar10-0.6", "method=FedCM", "local.lr=1")


def test_the_queues_of_the_papers_can_be_read() -> None:
    for entry in (entry for path in papers_folder().glob("queue*.toml") for entry in read_queue(path)):
        experiment = find_experiment(entry.experiment)
        specs = list(run_specs(experiment, "full", entry.seeds))
        wanted = wanted_values(entry.only, specs)
        assert any(all(spec_value(s, kind) in values for kind, values in wanted.items()) for s in specs), entry


def test_lines_come_regularly_away_from_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while nothing happens, with rounds, rate and time left."""
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.01)
    config = Config.build({"rounds": 10, "partition": {"clients": 4}})
    output, rounds = StringIO(), progress.RoundCount([config, config])
    rounds.began -= 100
    run: Any = SimpleNamespace(name="a", rounds=[1, 2, 3, 4, 5])
    for _ in run.rounds:
        rounds(run, {"round": 1})
    with progress.RegularLines(Console(file=output), rounds.text):
        time.sleep(0.2)
    lines = output.getvalue().splitlines()
    assert len(lines) > 1 and lines[0] == "5 of 20 rounds, 0.05 a second, 5 min left"


# what comes next ------------------------------------------------------------------------------------------------


class Simulation:
    """A GPU that trains parts one after the other: a round of k runs takes fixed + each · k seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fixed: float, each: float, build: float = 5.0) -> None:
        self.now, self.fixed, self.each, self.build = 1000.0, fixed, each, build
        monkeypatch.setattr(schedule_module, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(schedule_module, "device_of", lambda name: torch.device("cuda"))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 10**12))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "some GPU")

    def train(self, schedule: RunSchedule) -> list[tuple[int, float]]:
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


def known_speeds(device: str, network: str, speed: float) -> Speeds:
    speeds = Speeds({})
    speeds.networks[device, network, "auto"] = MeasuredSpeed(speed, 0.1)
    return speeds


def scheduled(id: str, *only: str, seeds: int | None = None) -> ScheduledExperiment:
    reproduction = prepare_reproduction(id, only=only, seeds=seeds, results="nowhere")
    return ScheduledExperiment(reproduction, waiting=reproduction.missing)


def test_parts_end_every_few_minutes_and_do_not_leave_the_gpu_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Simulation(monkeypatch, fixed=0.073, each=0.0137)  # FedDC's MLP on MNIST, 600 rounds
    ends = gpu.train(RunSchedule([scheduled("feddc/table1-mnist", "D1-15", "D2-15", "iid-15", seeds=2)], "nowhere"))
    sizes = [size for size, _ in ends]
    assert sum(sizes) == 30 and all(size >= STACKED_RUNS for size in sizes[1:-1])
    times = [1000.0, *(end for _, end in ends)]
    assert all(after - before < 1.2 * PART_SECONDS for before, after in pairwise(times))
    # of runs that take long, as few at a time as the rule allows
    slow = Simulation(monkeypatch, fixed=0.1, each=0.4)
    ends = slow.train(RunSchedule([scheduled("feddc/table1-mnist", "D1-15", "D2-15", seeds=2)], "nowhere"))
    assert max(size for size, _ in ends) == FEWEST_RUNS


def test_no_part_begins_that_would_not_end_in_time_and_shorter_entries_take_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = Simulation(monkeypatch, fixed=0.02, each=0.01)
    long, short = scheduled("feddc/table1-mnist", "D1-15", seeds=8), scheduled("feddpc/fig6", seeds=2)
    deadline = gpu.now + 200
    schedule = RunSchedule([long, short], "nowhere", deadline=deadline)
    schedule.speeds = known_speeds("some GPU", "lenet", 1.5e6)  # as stored results say
    ends = gpu.train(schedule)
    assert all(end <= deadline for _, end in ends)
    assert long.done and short.done and long.left and not long.parts and not short.parts
    assert deadline - gpu.now < 30  # little of the time is left unused


def test_a_part_that_is_slower_than_expected_is_given_up_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Simulation(monkeypatch, fixed=0.0, each=0.0)
    schedule = RunSchedule([scheduled("feddc/table1-mnist", "D1-15", "FedAvg")], "nowhere", deadline=gpu.now + 300)
    [config] = next(iter(schedule.parts()))
    run: Any = SimpleNamespace(name=config.name(), rounds=[])
    for seconds, hopeless in ((0.4, False), (1.0, True)):  # 600 rounds of 0.4 seconds end in time
        for _ in range(60):
            gpu.now += seconds
            run.rounds.append(1)
            schedule.on_round(run, {"round": 1})
        assert schedule.note_if_too_slow([config]) == hopeless
    schedule.on_loss([config])
    [experiment] = schedule.experiments
    assert [p.method for p in experiment.too_long] == ["FedAvg"] and not experiment.lost and not experiment.parts


def test_a_resumed_run_is_not_given_up_for_rounds_that_it_has_done(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Simulation(monkeypatch, fixed=0.0, each=0.0)
    schedule = RunSchedule([scheduled("feddc/table1-mnist", "D1-15", "FedAvg")], "nowhere", deadline=gpu.now + 150)
    [config] = next(iter(schedule.parts()))
    for t in range(550, 591):  # of 600 rounds, two seconds each
        gpu.now += 2.0
        schedule.on_round(SimpleNamespace(name=config.name(), rounds=[0] * t), {"round": t})  # type: ignore[arg-type]
    assert not schedule.note_if_too_slow([config])


def test_runs_of_a_part_that_was_stopped_are_tried_in_a_smaller_one_once(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Simulation(monkeypatch, fixed=0.0, each=0.0)
    experiment = scheduled("feddc/table1-mnist", "D1-15", "FedAvg", seeds=8)
    schedule = RunSchedule([experiment], "nowhere", deadline=gpu.now + 200)
    schedule.speeds = known_speeds("some GPU", "mlp", 1e8)  # far too fast
    sizes = list[int]()
    for configs in schedule.parts():
        sizes.append(len(configs))
        for t in range(1, 61):  # of 600 rounds, which take 0.05 seconds for each run, later a second
            gpu.now += (0.05 if len(sizes) == 1 else 1.0) * len(configs)
            for config in configs:
                run: Any = SimpleNamespace(name=config.name(), rounds=[0] * t)
                schedule.on_round(run, {"round": t})
        assert schedule.note_if_too_slow(configs)
        schedule.on_loss(configs)
    assert sizes == [8, 2]
    assert len(experiment.too_long) == 2 and len(experiment.waiting) == 6


def test_a_run_given_up_is_not_done_by_results_up_to_its_target_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Simulation(monkeypatch, fixed=0.0, each=0.0)
    experiment = scheduled("feddc/table3-setting1", "case=cifar10-D1-15", "FedAvg")
    [planned] = experiment.waiting
    experiment.reproduction.runs[planned.key] = {TO_TARGET: "0.5 0.6"}  # of another experiment
    schedule = RunSchedule([experiment], "nowhere", deadline=gpu.now + 1e6)
    [config] = next(iter(schedule.parts()))
    schedule.on_loss([config])
    assert (experiment.done, [p.key for p in experiment.lost]) == (0, [planned.key])


def test_runs_of_one_method_are_in_one_part(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Simulation(monkeypatch, fixed=0.05, each=0.03)  # 15 runs of 300 rounds end within PART_SECONDS
    experiment = scheduled("fedpmvr/table1", "cifar10-cnn-0.3", "mnist-lenet-0.3")  # planned seed by seed
    schedule = RunSchedule([experiment], "nowhere")
    schedule.speeds = known_speeds("some GPU", "lenet", 3e6)
    parts, begin = list[list[str]](), schedule.begin
    monkeypatch.setattr(schedule, "begin", lambda e, runs: parts.append([p.method for p in runs]) or begin(e, runs))
    gpu.train(schedule)
    everything = [method for part in parts for method in part]
    assert len(everything) == 60 and len(parts) > 2
    assert all(part.count(method) == everything.count(method) for part in parts for method in part)
    # runs of one method that are too many for a part are cut evenly
    many = scheduled("fedpmvr/table1", "mnist-lenet-0.1", "mnist-lenet-0.3", "FedAvg", seeds=9).waiting
    assert [whole_methods(many, most) for most in (8, 10, 17, 18)] == [6, 9, 9, 18]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ('experiment = "feddpc/table2"\ndtype = "int8"\n', "int8"),
        ('experiment = "FedDPC/Table2"\n', "did you mean 'feddpc/table2'?"),
        ('experiment = "feddpc"\n', "is a paper, which has feddpc/fair-scale"),
        ('experiment = "feddpc/table2"\nonly = ["method=feddpc"]\n', "did you mean 'FedDPC'? Known: FedCM"),
    ],
)
def test_a_mistake_in_an_entry_names_the_entry(tmp_path: Path, lines: str, words: str) -> None:
    path = tmp_path / "q.toml"
    path.write_text(f'[[entry]]\nexperiment = "feddpc/fig6"\n[[entry]]\n{lines}')
    with pytest.raises(AskewError) as caught:
        prepare_queue(path, tmp_path)
    assert str(caught.value).startswith(f"{path}, entry 2: ") and words in str(caught.value)


def test_a_file_of_ones_own_has_an_id_without_a_slash_at_its_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text((papers_folder() / "feddpc" / "table2.toml").read_text())
    assert find_experiment("mine.toml").id == "mine"
