"""`askew reproduce` and `askew list experiments`: the papers' tables and figures, one command each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.text import Text

from ..core.records import Record
from ..core.text import count_text
from ..engine.settings import EngineSettings
from ..errors import ConfigError
from ..experiment.build import device_of
from ..experiment.cores import check_cores
from ..experiment.launch import TOGETHER
from ..experiment.run import OnRound
from ..experiment.store import Run
from ..report import terminal
from ..reproduction import paper_tables
from ..reproduction.comparison import TableCell, table_cells
from ..reproduction.cost import estimate_memory, experiment_cost, run_cost, run_times, training_speeds
from ..reproduction.paper_figures import untrained_table, write_paper_figures
from ..reproduction.papers import experiments, find_experiment
from ..reproduction.plan import Reproduction, prepare_reproduction
from ..reproduction.planned_runs import PlannedRun
from ..reproduction.reproduce import run_missing
from ..reproduction.results import ResultRow, metrics_by_run, read_results
from ..reproduction.worked_examples import WorkedExample, worked_example
from .options import (
    AsJson,
    Compiled,
    Dtype,
    Folder,
    PlainConsole,
    Processes,
    StopAfter,
    data_options,
    examples,
    exit_with_command,
    interruptible,
    parse_time,
    print_json,
    print_rich,
)
from .progress import ExperimentProgress, ProgressDisplay, RegularLines, RoundCount
from .queue import H200, QueueOptions, run_queue_file, show_queue_plan

app = typer.Typer(add_completion=False)

EPILOG = examples(
    "askew reproduce feddpc/table2 --scale smoke",
    "askew reproduce feddpc/table2 --plan",
    "askew reproduce feddpc/table2 --only case=cifar10-0.2 --only method=FedDPC --seeds 3",
    "askew reproduce mldl24/table2 --scale reduced --json",
    "askew reproduce fedpmvr/table1 --processes 4",
    "askew reproduce --queue papers/queue.toml --stop-after 9m --processes 4",
)

ExperimentId = Annotated[
    str | None,
    typer.Argument(
        metavar="ID", help="An experiment of `askew list experiments`, or a file of your own.", show_default=False
    ),
]
QueueFile = Annotated[
    Path | None,
    typer.Option("--queue", metavar="FILE", help="Many experiments, in the order of this file.", show_default=False),
]
SortedFile = Annotated[
    Path | None,
    typer.Option(
        "--sorted",
        metavar="FILE",
        help="With --queue and --plan: write the queue, the most printed numbers a minute first.",
        show_default=False,
    ),
]
ScaleName = Annotated[str, typer.Option(metavar="SCALE", help="full (as published), reduced or smoke (seconds).")]
Only = Annotated[
    list[str] | None,
    typer.Option("--only", metavar="NAME", help="A case, a method or a value, as local.lr=0.1; repeatable."),
]
Seeds = Annotated[int | None, typer.Option(metavar="N", min=1, help="Seeds 0 to N−1.", show_default="as published")]
RunsFolder = Annotated[Path, typer.Option(metavar="DIR", help="Folder that holds the run folders and figures.")]
ResultsFolder = Annotated[Path, typer.Option(metavar="DIR", help="Folder of the results' CSV files.")]
PlanOnly = Annotated[bool, typer.Option("--plan", help="Say what would be run and what it costs, and run nothing.")]
Alone = Annotated[bool, typer.Option("--alone", help="One run at a time, as needed to time rounds on a GPU.")]
StopAtTarget = Annotated[
    bool,
    typer.Option("--stop-at-target", help="End each run at the accuracy up to which the experiment counts rounds."),
]
AllRounds = Annotated[
    bool, typer.Option("--all-rounds", help="Train runs that were stopped at that accuracy to their last round.")
]
Workers = Annotated[
    int, typer.Option(metavar="N", help="Processes that share the work of each run; 0: as many as pay.")
]


@app.command(epilog=EPILOG)
def reproduce(
    id: ExperimentId = None,
    queue: QueueFile = None,
    sorted_file: SortedFile = None,
    scale: ScaleName = "full",
    only: Only = None,
    seeds: Seeds = None,
    out: RunsFolder = Path("runs"),
    results: ResultsFolder = Path("results"),
    plan: PlanOnly = False,
    alone: Alone = False,
    dtype: Dtype = "float32",
    compiled: Compiled = False,
    workers: Workers = 0,
    processes: Processes = 1,
    stop: StopAfter = None,
    stop_at_target: StopAtTarget = False,
    all_rounds: AllRounds = False,
    folder: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Run a table or figure of a paper again and show it beside the paper's numbers.

    Runs whose results are stored are not run again; interrupted ones continue. Ctrl-C keeps all that was done.
    """
    check_options(processes, workers, sorted_file, queue is not None and plan)
    engine = EngineSettings(dtype=dtype, compile=compiled, workers=workers)
    words = ["--dtype", dtype] * (dtype != "float32") + ["--compile"] * compiled + ["--alone"] * alone
    words += ["--stop-at-target"] * stop_at_target + ["--all-rounds"] * all_rounds
    words += ["--workers", str(workers)] * (workers > 0) + ["--processes", str(processes)] * (processes > 1)
    words += ["--out", str(out), "--results", str(results), *map(str, data_options(folder))]
    if queue is not None:
        beside = {"an ID": id, "--only": only, "--seeds": seeds, "--alone": alone, "--workers": workers}
        refuse_beside_queue(beside | {"--stop-at-target": stop_at_target, "--all-rounds": all_rounds})
        again = terminal.command("reproduce", "--queue", queue, "--scale", scale, *words)
        options = QueueOptions(scale, engine, out, results, processes, parse_time(stop), as_json, again)
        show_queue_plan(queue, options, sorted_file) if plan else run_queue_file(queue, options)
        return
    if id is None:
        raise ConfigError("reproduce: nothing is named; give one of `askew list experiments`, or --queue FILE.")
    own_engine = engine if engine != EngineSettings() else None
    find_experiment(id)  # refuse an unknown one before all results are read
    rows = read_results(results)
    runs = metrics_by_run(rows)
    chosen_runs = (id, scale, only or (), seeds)
    reproduction = prepare_reproduction(*chosen_runs, results, own_engine, alone, runs, stop_at_target, all_rounds)
    if plan:
        show_plan(reproduction, rows, as_json)
        return
    chosen = [word for name in only or () for word in ("--only", name)] + (["--seeds", str(seeds)] if seeds else [])
    again = terminal.command("reproduce", id, "--scale", scale, *chosen, *words)
    with interruptible(PlainConsole(stderr=True), again, stop):
        run_with_progress(reproduction, id, out, results, processes, again)
    show_outcome(reproduction, out / "figures", as_json)


def check_options(processes: int, workers: int, sorted_file: Path | None, plans_queue: bool) -> None:
    """Refuse options that do not go together, and more processes than cores."""
    if processes > 1 and workers > 1:
        raise ConfigError(
            f"reproduce: --processes {processes} and --workers {workers} both divide the machine; give one of them."
        )
    check_cores(processes, "--processes")
    if sorted_file is not None and not plans_queue:
        raise ConfigError("reproduce: --sorted writes the queue that is planned; give --queue and --plan with it.")


def refuse_beside_queue(options: Mapping[str, object]) -> None:
    """Refuse what the entries of a queue say."""
    for name, value in options.items():
        if value:
            raise ConfigError(f"reproduce: {name} and --queue do not go together; say it in the queue's file.")


# running --------------------------------------------------------------------------------------------------------


def run_with_progress(
    reproduction: Reproduction, id: str, out: Path, results: Path, processes: int, again: str
) -> None:
    """Train what is missing, then the further seeds of what was tuned; leave with the command `again` if stopped."""
    console = PlainConsole(stderr=True)
    for title in (id, f"{id}, further seeds"):
        missing = reproduction.missing
        if not missing:
            continue
        rounds = RoundCount([p.config for p in missing])
        with progress_display(console, missing, title) as display, RegularLines(console, rounds.text):
            log = partial(display.say, style="yellow")

            watch = partial(call_both, rounds, display)
            for run in run_missing(reproduction, out, results, watch, processes, log):
                display.end(run)
        if reproduction.unfinished:
            left = f"{len(reproduction.missing)} of {count_text(len(missing), 'run')}"
            exit_with_command(console, f"stopped with {left} to go, all of it stored", again)
        if reproduction.lost:
            count = f"not made: {len(reproduction.lost)} of {count_text(len(missing), 'run')}"
            names = paper_tables.run_names(reproduction.lost)
            exit_with_command(
                console, f"{count}, as their processes were lost, all others are stored: {names}", again, 1
            )
        reproduction.update_plan()


def call_both(first: OnRound, second: OnRound, run: Run, record: Record | None) -> None:
    """Call two functions with a round's record."""
    first(run, record)
    second(run, record)


def progress_display(console: Console, missing: Sequence[PlannedRun], title: str) -> ProgressDisplay:
    """One bar for several runs; one run is shown in detail."""
    if len(missing) > 1:
        return ExperimentProgress(console, [p.config for p in missing], title)
    return ProgressDisplay(console)


# showing --------------------------------------------------------------------------------------------------------


def show_outcome(reproduction: Reproduction, figures: Path, as_json: bool) -> None:
    """Draw the figures and print the tables."""
    example = None
    if reproduction.experiment.shows == "toy":
        example = worked_example(reproduction.experiment.id, reproduction.scale)
    cells, pictures = table_cells(reproduction), write_paper_figures(reproduction, figures, example)
    if as_json:
        print_json(comparison_json(reproduction, cells, pictures))
    else:
        show_results(reproduction, cells, pictures, example)


def show_results(
    reproduction: Reproduction, cells: Sequence[TableCell], pictures: Sequence[Path], example: WorkedExample | None
) -> None:
    """Print the tables, the experiment's notes and the paths of the figures."""
    if example:
        print_rich(paper_tables.text_table(example.headings, example.rows))
    elif reproduction.experiment.trains:
        print_rich(paper_tables.comparison_tables(reproduction, cells))
    else:
        print_rich(paper_tables.text_table(*untrained_table(reproduction)))
    # notes are about the paper's numbers, with which other scales are not compared
    for note in reproduction.experiment.notes if reproduction.scale == "full" else ():
        PlainConsole().print(Text(f"note: {note}", "yellow"))  # prose, which is broken into lines
    for path in pictures:
        print_rich(Text(f"figure: {path}"))


def show_plan(reproduction: Reproduction, rows: Iterable[ResultRow], as_json: bool) -> None:
    """Print what would be run and what it costs; `rows` are the stored results."""
    cost = plan_cost(reproduction, rows)
    print_json(plan_json(reproduction, cost)) if as_json else print_rich(paper_tables.plan_table(reproduction, cost))


def plan_cost(reproduction: Reproduction, rows: Iterable[ResultRow]) -> paper_tables.PlanCost:
    """What the missing runs cost, on an H200 and on this machine's device; `rows` are the stored results."""
    configs, speeds = [p.config for p in reproduction.missing], training_speeds(rows)
    device = device_of("auto")
    devices = dict.fromkeys([H200, torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"])
    kinds = {(c.model, type(c.algorithm), c.partition, c.participation): c for c in configs}
    return paper_tables.PlanCost(
        samples=sum(run_cost(c).trained for c in configs),
        times={name: run_times(configs, name, speeds) for name in devices},
        memory=max(map(estimate_memory, kinds.values()), default=None),
        together=TOGETHER,
    )


def plan_json(reproduction: Reproduction, cost: paper_tables.PlanCost) -> dict[str, Any]:
    """The plan for a script."""
    missing = {p.key for p in reproduction.missing}
    runs = [
        {
            "case": p.case,
            "method": p.method,
            "hyper": p.hyper,
            "seed": p.seed,
            "digest": p.digest,
            "finished": p.key not in missing,
        }
        for p in reproduction.planned
    ]
    return {
        "experiment": reproduction.experiment.id,
        "scale": reproduction.scale,
        "missing": len(missing),
        "samples": cost.samples,
        "seconds": {name: times.seconds for name, times in cost.times.items()},
        "seconds_timed": {name: times.timed for name, times in cost.times.items()},
        "untimed": {name: times.untimed for name, times in cost.times.items()},
        "memory": cost.memory,
        "together": cost.together,
        "choices": reproduction.experiment.choices,
        "notes": list(reproduction.experiment.notes),
        "runs": runs,
    }


def comparison_json(reproduction: Reproduction, cells: Sequence[TableCell], pictures: Sequence[Path]) -> dict[str, Any]:
    """The table for a script; the paper's numbers only at full scale."""
    full = reproduction.scale == "full"
    return {
        "experiment": reproduction.experiment.id,
        "scale": reproduction.scale,
        "comparable": full,
        "missing": len(reproduction.missing),
        "cells": [cell_json(cell, full) for cell in cells],
        "figures": [str(path) for path in pictures],
    }


def cell_json(cell: TableCell, with_paper: bool) -> dict[str, Any]:
    """One cell of the table for a script."""
    printed = cell.printed if with_paper else None
    return {
        "case": cell.case,
        "method": cell.method,
        "hyper": cell.hyper,
        "metric": cell.metric,
        "seeds": cell.seeds,
        "values": cell.values,
        "limit": cell.limit,
        "printed": {key: getattr(printed, key) for key in ("value", "spread", "note")} if printed else None,
        "held": cell.held_out,
        "held_hyper": cell.held_out_hyper,
        "mean": cell.mean,
        "std": cell.std,
        "difference": cell.difference if with_paper else None,
    }


def list_experiments(as_json: bool) -> None:
    """Print every experiment with its number of runs at full scale and a rough cost."""
    speeds = training_speeds()
    entries = [
        paper_tables.ExperimentEntry(e.id, e.where, e.title, *experiment_cost(e, "full", H200, speeds))
        for e in experiments().values()
    ]
    if as_json:
        print_json([entry._asdict() for entry in entries])
    else:
        print_rich(paper_tables.experiment_list(entries, H200))
