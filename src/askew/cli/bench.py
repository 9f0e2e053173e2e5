"""`askew bench`: how fast rounds are here, against a loop written by hand and against what the arithmetic needs."""

from __future__ import annotations

from itertools import product
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ..bench import timing as library
from ..bench.baselines import FRAMEWORKS
from ..bench.workloads import SHARED, WORKS, Workload, work_of
from ..engine.choose import EngineSettings
from ..report import terminal
from .options import AsJson, Compiled, Dtype, examples, put, put_json

EPILOG = examples(
    "askew bench",
    "askew bench --work lenet-10x10x50 --rounds 20",
    "askew bench --work mlp-mnist-100 --workers 2",
    "askew bench --dtype tf32 --skewed --json",
    "askew bench --list",
)
MS, RATIO = "{:,.3g}", "{:.2f}"


def bench(
    names: Annotated[
        list[str] | None,
        typer.Option(
            "--work",
            metavar="NAME",
            help="A work to time, of the list or as lenet-20x5x64: 20 clients, 5 steps each, batches of 64; repeatable.",
        ),
    ] = None,
    rounds: Annotated[
        int, typer.Option(metavar="N", help="Rounds that are timed, after a first one.")
    ] = library.ROUNDS,
    dtype: Dtype = "float32",
    engine: Annotated[
        str, typer.Option("--engine", metavar="ENGINE", help="auto, sequential, vmapped or slots.")
    ] = "auto",
    device: Annotated[str, typer.Option("--device", metavar="DEVICE", help="auto, cpu, cuda or cuda:N.")] = "auto",
    workers: Annotated[
        int, typer.Option(metavar="N", help="Processes that share a round, on the CPU with one thread each.")
    ] = 1,
    compiled: Compiled = False,
    skewed: Annotated[
        bool, typer.Option("--skewed", help="Clients of unequal size (Dirichlet 0.2), as many samples in all.")
    ] = False,
    listed: Annotated[bool, typer.Option("--list", help="List the works and time nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Time full rounds on random data, beside a bare PyTorch loop that does the same steps.

    The work mlp-mnist-100 is done on the images of MNIST, where its files are found.

    Where pfl, fedlab or flwr (with its simulation) is installed, it is given the first, the MLP's and the softmax works too: with one
    thread, and with as many as there are workers.
    """
    if listed:
        told = [{"work": name, **facts(work)} for name, work in WORKS.items()]
        put_json(told) if as_json else put(works())
        return
    settings = EngineSettings(name=engine, dtype=dtype, device=device, workers=workers, compile=compiled)
    todo = library.chosen(names or (), device)
    said = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(None),
        TextColumn("{task.completed} of {task.total}"),
        TimeElapsedColumn(),
    )
    timings, rivals = list[library.Timing](), list[library.Rival]()
    with Progress(*columns, console=said, transient=True, disable=not said.is_terminal, expand=True) as bars:
        bar = bars.add_task("")

        def begin(what: str, steps: int) -> None:
            bars.reset(bar, total=steps, description=what)
            if not said.is_terminal:
                said.print(what, highlight=False)

        for name in todo:
            begin(name, rounds + 1)
            timings.append(library.measure(name, settings, rounds, skewed, lambda: bars.advance(bar)))
            if not library.alike(timings[-1]):
                said.print(
                    Text(
                        f"{name}: the two loops do not train alike (apart {timings[-1].apart:.2g}), so what is timed is not the same",
                        "yellow",
                    )
                )
        for work, name in product((w for w in SHARED if w in todo), FRAMEWORKS):
            for threads in sorted({1, workers}) if library.installed(name) else [1]:
                begin(f"{work} in {name}", 1)
                rivals.append(library.rival(name, work, rounds, device, threads))
    if as_json:
        put_json({"works": [t._asdict() for t in timings], "rivals": [r._asdict() for r in rivals]})
    else:
        put(shown(timings, rivals))


def facts(work: Workload) -> dict[str, object]:
    return {
        "network": work.network.called().lower(),
        "clients": work.clients,
        "steps": work.steps,
        "batch": work.batch,
        "heavy": work.heavy,
    }


def works() -> Table:
    table = terminal.plain_table("work", "network", "clients", "steps\neach", "batch")
    table.add_column("")
    for column in table.columns[:2]:
        column.justify = "left"
    for name, work in WORKS.items():
        *values, heavy = facts(work).values()
        table.add_row(
            name,
            *map(str, values),
            Text("minutes a round on a CPU; there only if named" if heavy else "", terminal.QUIET),
        )
    return table


def shown(timings: list[library.Timing], rivals: list[library.Rival]) -> RenderableType:
    """A table of the works, one of other frameworks, and what the figures mean."""
    parts: list[RenderableType] = [figures(timings), Text(remarks(timings), terminal.QUIET)]
    if rivals:
        parts += [Text(), others(rivals)]
    return Group(*parts)


def figures(timings: list[library.Timing]) -> Table:
    launches = any(t.over_launch is not None for t in timings)
    table = terminal.plain_table(
        "work", "engine", "ms a\nround", "samples\na second", "bare\nms", "times\nas fast", "over\nfloor"
    )
    for column in table.columns[:2]:
        column.justify = "left"
    for heading in (*(["over\nlaunch"] if launches else []), "peak\nmemory", "apart"):
        table.add_column(heading, justify="right")
    for t in timings:
        row = [
            t.work,
            t.engine,
            MS.format(t.round_ms),
            f"{t.samples_per_s:,.0f}",
            MS.format(t.bare_ms),
            RATIO.format(t.speedup),
        ]
        row += [MS.format(t.over_floor), *([terminal.digits(t.over_launch)] if launches else [])]
        table.add_row(*row, "–" if t.peak_bytes is None else terminal.size(t.peak_bytes), f"{t.apart:.0e}")
    return table


def remarks(timings: list[library.Timing]) -> str:
    first = timings[0]
    speed = f"{first.matmul_flops_per_s / 1e9:,.0f} GFLOP/s"
    kind = f"{first.dtype}{', compiled' if first.compile else ''}{', clients of unequal size' if first.skewed else ''}"
    kind += f", {first.workers} processes" if first.workers > 1 else ""
    without = [t.work for t in timings if "mnist" in t.work and not work_of(t.work).images]
    missing = (
        f" {' and '.join(without)}: on random numbers, as there are no files of MNIST (askew data get mnist)."
        if without
        else ""
    )
    return (
        f"{first.device}, {kind}; medians of {first.rounds} rounds. bare: the same steps in a loop by hand, its rounds between ours; "
        f"times as fast: than that. over floor: ours over the arithmetic at {speed}, what one large matrix product reaches here. "
        f"apart: how far the two loops' models are from each other after a round, relative to how far they went.{missing}"
    )


def others(rivals: list[library.Rival]) -> Table:
    table = terminal.plain_table("work", "framework", "threads", "ms a\nround", "bare\nms", "times\nas fast")
    table.add_column("", overflow="fold")
    for column in table.columns[:2]:
        column.justify = "left"
    for r in rivals:
        row = [
            "–" if v is None else form.format(v) for v, form in ((r.round_ms, MS), (r.bare_ms, MS), (r.speedup, RATIO))
        ]
        table.add_row(r.work, f"{r.name} {r.version}".strip(), str(r.threads), *row, Text(r.note, terminal.QUIET))
    return table
