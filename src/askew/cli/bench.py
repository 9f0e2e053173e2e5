"""`askew bench`: how fast rounds are here, against a plain PyTorch loop and against what the arithmetic needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Annotated, NamedTuple, Self

import typer
from rich.console import Group, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ..bench import timing
from ..bench.baselines import FRAMEWORKS
from ..bench.start import Stage, time_start
from ..bench.workloads import FRAMEWORK_WORKLOADS, WORKLOADS, Workload, find_workload
from ..core.text import count_text
from ..engine.settings import EngineSettings
from ..errors import ConfigError
from ..experiment.config import Config
from ..experiment.cores import check_cores
from ..report import terminal
from ..report.plain_table import plain_table
from ..reproduction.cost import short_count
from ..reproduction.papers import find_experiment
from ..reproduction.planned_runs import build_config, run_specs
from .options import AsJson, Compiled, Dtype, PlainConsole, examples, print_json, print_rich

app = typer.Typer(add_completion=False)

EPILOG = examples(
    "askew bench",
    "askew bench --work lenet-10x10x50 --rounds 20",
    "askew bench --work mlp-mnist-100 --workers 2",
    "askew bench --dtype tf32 --skewed --json",
    "askew bench --start",
    "askew bench --list",
)


class PaperRun(NamedTuple):
    """A run of an experiment whose rounds can be timed."""

    experiment: str
    case: str
    method: str
    heavy: bool  # minutes a round on a CPU


EXPERIMENTS = {
    "feddc-cifar10": PaperRun("feddc/table1-cifar10", "D1-15", "FedDC", heavy=True),
    "fedpdc-cifar10": PaperRun("fedpdc/table2", "cifar10-cnn-0.1", "FedPDC", heavy=True),
    "feddpc-cifar10": PaperRun("feddpc/table2", "cifar10-0.2", "FedDPC", heavy=False),
    "feddpc-cifar100": PaperRun("feddpc/table2", "cifar100-0.2", "FedDPC", heavy=True),
}
HEAVY = "too long on a CPU"
MS, RATIO = "{:,.3g}", "{:.2f}"  # formats of milliseconds and of ratios


Works = Annotated[
    list[str] | None,
    typer.Option(
        "--work",
        metavar="NAME",
        help="A workload, of the list or as lenet-20x5x64: 20 clients, 5 steps each, batches of 64; "
        "feddc-cifar10 and the like are rounds of a paper's run; repeatable.",
    ),
]
Start = Annotated[
    bool, typer.Option("--start", help="Time the start of a run instead, from the shell to its first rounds.")
]


@app.command(epilog=EPILOG)
def bench(
    names: Works = None,
    rounds: Annotated[int, typer.Option(metavar="N", help="Rounds that are timed, after a first one.")] = timing.ROUNDS,
    dtype: Dtype = "float32",
    engine: Annotated[
        str, typer.Option("--engine", metavar="ENGINE", help="auto, sequential, vmapped, stacked or slots.")
    ] = "auto",
    device: Annotated[str, typer.Option("--device", metavar="DEVICE", help="auto, cpu, cuda or cuda:N.")] = "auto",
    workers: Annotated[
        int, typer.Option(metavar="N", min=1, help="Processes that share a round, on the CPU with one thread each.")
    ] = 1,
    compiled: Compiled = False,
    skewed: Annotated[
        bool, typer.Option("--skewed", help="Clients of unequal size (Dirichlet 0.2), as many samples in all.")
    ] = False,
    start: Start = False,
    listed: Annotated[bool, typer.Option("--list", help="List the workloads and time nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Time full rounds on random data, beside a bare PyTorch loop that does the same steps.

    Rounds of a paper's run are timed as in the experiment, with its changes of images, clipping and evaluation.

    The workload mlp-mnist-100 is done on the images of MNIST, where its files are found.

    Where pfl, fedlab or flwr (with its simulation) is installed, it is given the first, the MLP's and the softmax one.

    It gets one thread, and as many as there are workers.
    """
    if listed:
        facts = [{"work": name, **workload_facts(workload)} for name, workload in WORKLOADS.items()]
        facts += [{"work": name, "experiment": " ".join(of[:3]), "heavy": of.heavy} for name, of in EXPERIMENTS.items()]
        print_json(facts) if as_json else print_rich(workload_table())
        return
    check_cores(workers, "--workers")
    refuse_unused(names or (), skewed, start, rounds)
    settings = EngineSettings(name=engine, dtype=dtype, device=device, workers=workers, compile=compiled)
    if start:
        show_start(names or [], settings, as_json)
        return
    timed, console = Timed([], [], []), PlainConsole(stderr=True)
    stopped = time_all(timed, names or (), settings, rounds, skewed, console)
    if as_json:
        print_json({kind: [figures._asdict() for figures in found] for kind, found in timed._asdict().items()})
    else:
        print_rich(results(timed))
    if stopped:
        console.print(f"stopped while {stopped} was timed", style=terminal.QUIET)
        raise typer.Exit(130)


class Timed(NamedTuple):
    """What was timed."""

    works: list[timing.Timing]
    rivals: list[timing.FrameworkTiming]
    experiments: list[timing.ExperimentTiming]


def time_all(
    timed: Timed, names: Sequence[str], settings: EngineSettings, rounds: int, skewed: bool, console: PlainConsole
) -> str:
    """Time what has these names, one after the other; after Ctrl-C, what was being timed."""
    runs, plain = ([name for name in names if (name in EXPERIMENTS) is listed] for listed in (True, False))
    selected = [] if runs and not plain else timing.selected_workloads(plain, settings.device)
    with BenchProgress(console) as progress:
        try:
            for name in selected:
                timed.works.append(time_one(name, settings, rounds, skewed, progress))
            for figures in time_frameworks(selected, rounds, settings.device, settings.workers, progress):
                timed.rivals.append(figures)
            for name in runs:
                timed.experiments.append(time_run(name, settings, rounds, progress))
        except KeyboardInterrupt:
            return progress.what
    return ""


def refuse_unused(names: Sequence[str], skewed: bool, start: bool, rounds: int) -> None:
    """Refuse options that would change nothing."""
    runs = [name for name in names if name in EXPERIMENTS]
    if skewed and (runs or start):
        what = "--start" if start else f"{runs[0]}, whose clients are those of the paper"
        raise ConfigError(f"bench: --skewed does not go with {what}; leave one of them out.")
    if start and rounds != timing.ROUNDS:
        raise ConfigError("bench: --rounds does not go with --start, which times a few rounds; leave one of them out.")


class BenchProgress:
    """A bar on the terminal for what is being timed; without a terminal, a line for each."""

    def __init__(self, console: PlainConsole) -> None:
        self.console = console
        columns = (
            TextColumn("{task.description}"),
            BarColumn(None),
            TextColumn("{task.completed} of {task.total}"),
            TimeElapsedColumn(),
        )
        hidden = not self.console.is_terminal
        self.bars = Progress(*columns, console=self.console, transient=True, disable=hidden, expand=True)
        self.bar, self.what = self.bars.add_task(""), ""

    def __enter__(self) -> Self:
        self.bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bars.stop()

    def begin(self, what: str, steps: int) -> None:
        """Start anew with something that takes so many steps."""
        self.what = what
        self.bars.reset(self.bar, total=steps, description=what)
        if not self.console.is_terminal:
            self.console.print(what, highlight=False)

    def advance(self) -> None:
        """Note that a step is done."""
        self.bars.advance(self.bar)


def time_one(name: str, settings: EngineSettings, rounds: int, skewed: bool, progress: BenchProgress) -> timing.Timing:
    """Time a workload, and warn if the two loops did not train the same."""
    progress.begin(name, rounds + 1)
    figures = timing.time_workload(name, settings, rounds, skewed, progress.advance)
    if not timing.loops_agree(figures):
        warning = f"the two loops do not train alike (apart {figures.apart:.2g}), so what is timed is not the same"
        progress.console.print(Text(f"{name}: {warning}", "yellow"))
    return figures


def time_run(name: str, settings: EngineSettings, rounds: int, progress: BenchProgress) -> timing.ExperimentTiming:
    """Time rounds of a paper's run."""
    progress.begin(name, rounds + timing.FIRST_ROUNDS)
    return timing.time_experiment(name, experiment_config(name), settings, rounds, progress.advance)


def experiment_config(name: str) -> Config:
    """A paper's run as a configuration; of a grid, the first point."""
    run = EXPERIMENTS[name]
    specs = run_specs(find_experiment(run.experiment))
    return next(build_config(s, "full") for s in specs if (s.case.name, s.method.name) == (run.case, run.method))


def show_start(names: Sequence[str], settings: EngineSettings, as_json: bool) -> None:
    """Time the start of a paper's run, or of the default configuration's, and print its stages."""
    if unknown := [name for name in names if name not in EXPERIMENTS]:
        known = ", ".join(EXPERIMENTS)
        raise ConfigError(
            f"bench: --start times the default configuration or, with --work, {known}; got {unknown[0]!r}."
        )
    for name in names or [""]:
        config = replace(experiment_config(name) if name else Config.build({}), engine=settings)
        stages = time_start(config, random_images=bool(name))
        if as_json:
            print_json([stage._asdict() for stage in stages])
        else:
            print_rich(start_table(name or "the default configuration", stages))


def start_table(name: str, stages: Sequence[Stage]) -> RenderableType:
    """A table of the stages of a run's start."""
    table = plain_table("stage", "seconds")
    table.columns[0].justify = "left"
    for stage in stages:
        table.add_row(stage.name, f"{stage.seconds:.3f}")
    names = [stage.name for stage in stages]
    total = sum(stage.seconds for stage in stages[: names.index("first round") + 1])
    note = f"{name}: {total:.2f} s from the shell to the end of the first round."
    return Group(table, Text(note, terminal.QUIET))


def time_frameworks(
    selected: Sequence[str], rounds: int, device: str, workers: int, progress: BenchProgress
) -> Iterator[timing.FrameworkTiming]:
    """Time other frameworks with those of the selected workloads that they are given."""
    for workload, name in product((w for w in FRAMEWORK_WORKLOADS if w in selected), FRAMEWORKS):
        for threads in sorted({1, workers}) if timing.is_installed(name) else [1]:
            if timing.is_installed(name):
                progress.begin(f"{workload} in {name}", 1)
            yield timing.time_framework(name, workload, rounds, device, threads)


def workload_facts(workload: Workload) -> dict[str, object]:
    """What is listed of a workload."""
    return {
        "network": workload.network.display_name().lower(),
        "clients": workload.clients,
        "steps": workload.steps,
        "batch": workload.batch,
        "heavy": workload.heavy,
    }


def workload_table() -> RenderableType:
    """A table of all workloads, and one of the papers' runs."""
    table = plain_table("work", "network", "clients", "steps\neach", "batch")
    table.add_column("")
    for column in table.columns[:2]:
        column.justify = "left"
    for name, workload in WORKLOADS.items():
        *values, heavy = workload_facts(workload).values()
        table.add_row(name, *map(str, values), Text(HEAVY if heavy else "", terminal.QUIET))
    runs = plain_table("work", "a run of", "case", "method")
    runs.add_column("")
    for column in runs.columns:
        column.justify = "left"
    for name, run in EXPERIMENTS.items():
        runs.add_row(name, *run[:3], Text(HEAVY if run.heavy else "", terminal.QUIET))
    return Group(table, Text(), runs)


def results(timed: Timed) -> RenderableType:
    """A table of the workloads, what its figures mean, and tables of other frameworks and of runs of papers."""
    parts: list[RenderableType] = []
    if timed.works:
        parts += [timing_table(timed.works), Text(remarks(timed.works), terminal.QUIET)]
    if tried := [figures for figures in timed.rivals if timing.is_installed(figures.name)]:
        parts += [Text(), framework_table(tried)]
    if missing := [*dict.fromkeys(figures.name for figures in timed.rivals if not timing.is_installed(figures.name))]:
        parts += [Text(f"not installed, and so not timed: {', '.join(missing)}.", terminal.QUIET)]
    if timed.experiments:
        remark = Text(experiment_remarks(timed.experiments[0]), terminal.QUIET)
        parts += [Text()] * bool(parts) + [experiment_table(timed.experiments), remark]
    return Group(*parts)


def experiment_table(timings: list[timing.ExperimentTiming]) -> Table:
    """A table with a row for each run of a paper."""
    table = plain_table("work", "method", "engine", "ms a\nround", "first\nround, s")
    for column in table.columns[:3]:
        column.justify = "left"
    for t in timings:
        table.add_row(t.work, t.method, t.engine, milliseconds(t.round_ms), milliseconds(t.first_s))
    return table


def experiment_remarks(first: timing.ExperimentTiming) -> str:
    """The sentences below that table."""
    kind = f"{first.dtype}{', compiled' if first.compile else ''}"
    return (
        f"{first.device}, {kind}; medians of {count_text(first.rounds, 'round')} after the first "
        f"{timing.FIRST_ROUNDS}, on random images in place of the dataset's; with the experiment's changes of images, "
        "clipping and evaluation."
    )


def timing_table(timings: list[timing.Timing]) -> Table:
    """A table with a row of figures for each workload. It fits in 80 columns: some figures are in the JSON alone."""
    headings = ("work", "engine", "ms a\nround", "samples\na second", "bare\nms", "times\nfaster", "over\nfloor")
    table = plain_table(*headings, "apart")
    for column in table.columns[:2]:
        column.justify = "left"
    for t in timings:
        row = [t.work, t.engine, milliseconds(t.round_ms), short_count(t.samples_per_s), milliseconds(t.bare_ms)]
        row += [milliseconds(t.speedup), milliseconds(t.over_floor)]
        table.add_row(*row, f"{t.apart:.0e}")
    return table


def milliseconds(value: float) -> str:
    """A time or ratio with three digits, and never as a power of ten."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def remarks(timings: list[timing.Timing]) -> str:
    """The sentences below the table: the device, the precision, and what the headings mean."""
    first = timings[0]
    speed = f"{first.matmul_flops_per_s / 1e9:,.0f} GFLOP/s"
    kind = f"{first.dtype}{', compiled' if first.compile else ''}{', clients of unequal size' if first.skewed else ''}"
    kind += f", {first.workers} processes" if first.workers > 1 else ""
    without = [t.work for t in timings if "mnist" in t.work and not find_workload(t.work).images]
    missing = (
        f" {' and '.join(without)}: on random numbers, as there are no files of MNIST (askew data get mnist)."
        if without
        else ""
    )
    return (
        f"{first.device}, {kind}; medians of {count_text(first.rounds, 'round')}. "
        "bare: the same steps in a loop by hand, its rounds between ours; times faster: than that. "
        f"over floor: ours over the arithmetic at {speed}, what one large matrix product reaches here. "
        "apart: how far the two loops' models are from each other after a round, relative to how far they went. "
        "More, such as peak memory: --json."
        f"{missing}"
    )


def framework_table(timings: list[timing.FrameworkTiming]) -> Table:
    """A table with a row for each framework, workload and number of threads."""
    table = plain_table("work", "framework", "threads", "ms a\nround", "bare\nms", "times\nas fast")
    table.add_column("")
    for column in table.columns[:2]:
        column.justify = "left"
    for t in timings:
        figures = ((t.round_ms, MS), (t.bare_ms, MS), (t.speedup, RATIO))
        cells = ["–" if value is None else form.format(value) for value, form in figures]
        table.add_row(t.work, f"{t.name} {t.version}".strip(), str(t.threads), *cells, Text(t.note, terminal.QUIET))
    return table
