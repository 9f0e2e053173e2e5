"""`askew reproduce` and `askew list experiments`: the papers' tables and figures, one command each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.text import Text

from ..engine.choose import EngineSettings
from ..errors import ConfigError
from ..experiment.build import device_of
from ..experiment.launch import TOGETHER
from ..experiment.store import Record, Run
from ..report import terminal
from ..reproduction import cost, paper_figures
from ..reproduction import paper_tables as papers
from ..reproduction.papers import experiments
from ..reproduction.reproduce import Cell, Reproduction, play, start, table
from ..reproduction.results import read
from ..reproduction.worked_examples import toy
from .options import AsJson, Compiled, Dtype, Folder, examples, exit_with_command, print_json, print_rich

EPILOG = examples(
    "askew reproduce feddpc/table2 --scale smoke",
    "askew reproduce feddpc/table2 --plan",
    "askew reproduce feddpc/table2 --only case=cifar10-0.2 --only method=FedDPC --seeds 3",
    "askew reproduce mldl24/table2 --scale reduced --json",
    "askew reproduce fedpmvr/table1 --processes 4",
)
H200 = "NVIDIA H200"


class Bar(terminal.Ticker):
    """One bar for all runs of an experiment, which differ in more than their method."""

    def __call__(self, run: Run, record: Record | None) -> None:
        self.training, self.played = True, self.played + (record is not None)
        self.parts[run.name] = len(run.rounds) / int(run.config["rounds"])
        if self.whole is not None:
            self.bars.update(self.whole, completed=self.done + sum(self.parts.values()))


def reproduce(
    id: Annotated[
        str, typer.Argument(metavar="ID", help="An experiment of `askew list experiments`, or a file of your own.")
    ],
    scale: Annotated[
        str, typer.Option(metavar="SCALE", help="full (as published), reduced or smoke (seconds).")
    ] = "full",
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="NAME", help="A case, a method or a value, as local.lr=0.1; repeatable."),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Seeds 0 to N−1.", show_default="as published")
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder that holds the run folders and figures.")] = Path(
        "runs"
    ),
    results: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the results' CSV files.")] = Path("results"),
    plan: Annotated[
        bool, typer.Option("--plan", help="Say what would be run and what it costs, and run nothing.")
    ] = False,
    alone: Annotated[
        bool, typer.Option("--alone", help="One run at a time, as needed to time rounds on a GPU.")
    ] = False,
    dtype: Dtype = "float32",
    compiled: Compiled = False,
    workers: Annotated[
        int, typer.Option(metavar="N", help="Processes that share the work of each run; 0: as many as pay.")
    ] = 0,
    processes: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, help="Processes that play different runs at a time, on one GPU or several cores."
        ),
    ] = 1,
    folder: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Run a table or figure of a paper again and show it beside the paper's numbers.

    Runs whose results are stored are not played again, interrupted ones go on. Ctrl-C keeps all that was done.
    """
    said = Console(stderr=True)
    if processes > 1 and workers > 1:
        raise ConfigError(
            f"reproduce: --processes {processes} and --workers {workers} both divide the machine; give one of them."
        )
    engine = EngineSettings(dtype=dtype, compile=compiled, workers=workers)
    begun = start(id, scale, only or (), seeds, results, engine if engine != EngineSettings() else None, alone)
    if plan:
        print_json(planned(begun, results)) if as_json else print_rich(papers.planned(begun, *costs(begun, results)))
        return
    for title in (id, f"{id}, further seeds"):
        if missing := begun.missing:
            with Bar(said, [p.config for p in missing], title) if len(missing) > 1 else terminal.Ticker(said) as ticker:
                for done in play(begun, out, results, ticker, processes, lambda words: ticker.say(words, "yellow")):
                    ticker.end(done)
            words = [*(w for o in only or () for w in ("--only", o)), *(["--seeds", str(seeds)] if seeds else [])]
            words += ["--dtype", dtype] * (dtype != "float32") + ["--compile"] * compiled + ["--alone"] * alone
            words += ["--processes", str(processes)] * (processes > 1)
            again = terminal.command("reproduce", id, "--scale", scale, *words, "--out", out, "--results", results)
            if begun.unfinished:
                exit_with_command(
                    said, f"stopped with {len(begun.missing)} of {len(missing)} runs to go, all of it stored", again
                )
            if begun.lost:
                what = f"{len(begun.lost)} of {len(missing)} runs were not made, as their processes were lost, all others are stored"
                exit_with_command(said, f"{what}: {papers.called(begun.lost)}", again, 1)
            begun.plan()
    example = toy(begun.experiment.id, scale) if begun.experiment.shows == "toy" else None
    cells, pictures = table(begun), paper_figures.write(begun, out / "figures", example)
    if as_json:
        print_json(told(begun, cells, pictures))
        return
    if example:
        print_rich(papers.figures(example.headings, example.rows))
    elif begun.experiment.trains:
        print_rich(papers.compared(begun, cells))
    else:
        print_rich(papers.figures(*paper_figures.told(begun)))
    for note in begun.experiment.notes:
        Console().print(Text(f"note: {note}", "yellow"))  # prose, which fits the terminal
    for path in pictures:
        print_rich(Text(f"figure: {path}"))


def costs(begun: Reproduction, results: Path) -> tuple[int, dict[str, float | None], int | None, int]:
    """Samples, seconds by device and memory of the runs that are missing, and how many share a GPU."""
    configs, rates = [p.config for p in begun.missing], cost.speeds(read(results))
    here = device_of("auto")
    devices = dict.fromkeys([H200, torch.cuda.get_device_name(here) if here.type == "cuda" else "cpu"])
    times = {name: cost.seconds(configs, name, rates) for name in devices}
    kinds = {(c.model, type(c.algorithm), c.partition, c.participation): c for c in configs}
    largest = max(kinds.values(), key=cost.memory, default=None)
    return sum(cost.work(c).trained for c in configs), times, cost.memory(largest) if largest else None, TOGETHER


def planned(begun: Reproduction, results: Path) -> dict[str, Any]:
    """The plan for a script."""
    samples, times, memory, together = costs(begun, results)
    missing = {(p.digest, p.seed) for p in begun.missing}
    runs = [
        {
            "case": p.case,
            "method": p.method,
            "hyper": p.hyper,
            "seed": p.seed,
            "digest": p.digest,
            "finished": (p.digest, p.seed) not in missing,
        }
        for p in begun.planned
    ]
    told = {
        "experiment": begun.experiment.id,
        "scale": begun.scale,
        "missing": len(missing),
        "samples": samples,
        "seconds": times,
    }
    told |= {
        "memory": memory,
        "together": together,
        "choices": begun.experiment.choices,
        "notes": list(begun.experiment.notes),
    }
    return told | {"runs": runs}


def told(begun: Reproduction, cells: Sequence[Cell], pictures: Sequence[Path]) -> dict[str, Any]:
    """The table for a script."""
    rows = [
        cell._asdict()
        | {"mean": cell.mean, "std": cell.std, "difference": cell.difference if begun.scale == "full" else None}
        | {"printed": cell.printed._asdict() if cell.printed and begun.scale == "full" else None}
        for cell in cells
    ]
    about = {
        "experiment": begun.experiment.id,
        "scale": begun.scale,
        "comparable": begun.scale == "full",
        "missing": len(begun.missing),
    }
    return about | {"cells": rows, "figures": [str(path) for path in pictures]}


def listed(as_json: bool) -> None:
    """Every experiment with its number of runs at full scale and a rough cost."""
    rates = cost.speeds()
    entries = [
        papers.Listed(e.id, e.where, e.title, *cost.total(e, "full", H200, rates)) for e in experiments().values()
    ]
    if as_json:
        print_json([entry._asdict() for entry in entries])
    else:
        print_rich(papers.listing(entries, H200))
