"""`askew run`, `sweep`, `partition` and `demo`.

A command imports what trains when it runs: loading torch takes seconds, and help should come at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group
from rich.text import Text

from ..core.text import count_text
from ..errors import ConfigError
from ..experiment.process_tuning import quick_imports
from ..experiment.store import Run
from ..report import skew, terminal, write_report
from ..report.picture import save_figure
from ..report.tables import partition_name
from .options import (
    AsJson,
    BatchSize,
    Configuration,
    Device,
    Epochs,
    Folder,
    Fresh,
    Method,
    Out,
    Overrides,
    PlainConsole,
    Plugins,
    Processes,
    Quiet,
    Rate,
    Rounds,
    Seed,
    StopAfter,
    Track,
    all_overrides,
    data_options,
    examples,
    exit_with_command,
    explain,
    fail,
    interruptible,
    print_json,
    print_rich,
    progress_consoles,
    track_options,
)
from .progress import ProgressDisplay

if TYPE_CHECKING:
    from ..experiment.launch import FailedRun

app = typer.Typer(add_completion=False)

DEMO_ROUNDS, DEMO_SEEDS = 30, 3


@app.command(
    epilog=examples(
        "askew run",
        "askew run --method fedprox --set algorithm.mu=0.1 --rounds 50 --lr 0.05",
        "askew run experiment.toml --set seed=1 --out runs",
        "askew run --plugin mine.py --set algorithm.name=mine",
        "askew run experiment.toml --workers 4 --stop-after 2h",
        "askew run experiment.toml --track tensorboard",
    )
)
def run(
    file: Configuration = None,
    method: Method = None,
    rounds: Rounds = None,
    lr: Rate = None,
    epochs: Epochs = None,
    batch_size: BatchSize = None,
    seed: Seed = None,
    device: Device = None,
    overrides: Overrides = None,
    plugins: Plugins = None,
    out: Out = Path("runs"),
    folder: Folder = None,
    fresh: Fresh = False,
    workers: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Processes that share the work; 0: as many as pay.", show_default="engine.workers"
        ),
    ] = None,
    stop: StopAfter = None,
    track: Track = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Train one federation.

    A finished run is read back, an interrupted one goes on.

    Ctrl-C ends the round and stores everything; a second one stops at once.
    """
    with quick_imports():
        from ..experiment.config import load_config
        from ..experiment.launch import run_config
        from ..experiment.trackers import tracking

    local = {"local__lr": lr, "local__epochs": epochs, "local__batch": batch_size}
    engine = {"engine__device": device, "engine__workers": workers}
    settings = all_overrides(overrides, method, rounds=rounds, seed=seed, **local, **engine)
    config, (console, warnings) = load_config(file, settings, plugins or ()), progress_consoles(quiet)
    again = terminal.resume_command(out / config.name(), options=[*data_options(folder), *track_options(track)])
    trackers = tracking(track, [config.name()])
    with interruptible(console, again, stop), trackers, ProgressDisplay(console, warnings=warnings) as ticker:
        result = run_config(config, out, fresh=fresh, watch=trackers.beside(ticker))
        trackers.end(result)
    if as_json:
        print_json(result.summary())
    if not result.over:
        progress = f"round {len(result.rounds)} of {result.config['rounds']}"
        exit_with_command(console, f"stopped after {progress}, all of it stored", again)
    if not ticker.trained_rounds:
        ticker.say("already finished, nothing to do; --fresh runs it again", "yellow")
    if not as_json and not quiet:
        print_rich(terminal.summary(result))


@app.command(
    epilog=examples(
        "askew sweep --over local.lr=0.1,0.03,0.01 --over seed=0,1,2",
        "askew sweep --over algorithm.name=fedavg,scaffold,feddyn --set rounds=50",
        "askew sweep --over algorithm.name=fedavg,fedprox --over algorithm.mu=0.01,0.1 --processes 2",
        "askew sweep grid.toml --out runs",
    )
)
def sweep(
    file: Configuration = None,
    over: Annotated[
        list[str] | None, typer.Option("--over", metavar="KEY=A,B,…", help="Values to try; repeatable.")
    ] = None,
    method: Method = None,
    rounds: Rounds = None,
    lr: Rate = None,
    epochs: Epochs = None,
    batch_size: BatchSize = None,
    device: Device = None,
    overrides: Overrides = None,
    plugins: Plugins = None,
    out: Out = Path("runs"),
    folder: Folder = None,
    processes: Processes = 1,
    stop: StopAfter = None,
    track: Track = None,
    as_json: AsJson = False,
) -> None:
    """Train every combination of some settings' values; on a GPU many runs at a time.

    The sweep table of a file and --over span the combinations. A setting that only some of the methods have is tried
    with those alone. On a CPU --processes trains several runs at once. Finished runs are read back, interrupted ones
    go on. A run that fails does not end the others; it is named at the end.
    """
    with quick_imports():
        from ..experiment.launch import run_each
        from ..experiment.process_pool import run_each_in_pool
        from ..experiment.sweep import load_sweep
        from ..experiment.trackers import tracking

    local = {"local__lr": lr, "local__epochs": epochs, "local__batch": batch_size}
    settings = all_overrides(overrides, method, rounds=rounds, engine__device=device, **local)
    configs, console = load_sweep(file, settings, over or (), plugins or ()), PlainConsole(stderr=True)
    given = (("--over", over), ("--set", settings), ("--plugin", plugins))
    flags = [(flag, value) for flag, values in given for value in values or ()]
    words = [*([file] if file else []), *chain.from_iterable(flags), "--out", out, *data_options(folder)]
    words += track_options(track) + ["--processes", str(processes)] * (processes > 1)
    failed: list[FailedRun] = []
    order = [config.name() for config in configs]
    trackers, again = tracking(track, order), terminal.command("sweep", *words)
    with interruptible(console, again, stop), trackers, ProgressDisplay(console, configs, "sweep") as ticker:
        watch = trackers.beside(ticker) or ticker
        if processes > 1:
            running = run_each_in_pool(configs, out, processes, watch, ticker.say)
        else:
            running = run_each(configs, out, watch=watch)
        ended = keep_failures(trackers.follow(running), failed, ticker)
        runs = collect_runs(ended, len(configs), ticker, again)
    runs.sort(key=lambda run: order.index(run.name))  # processes end them in another one
    if as_json:
        print_json([run.summary() for run in runs])
    elif runs:
        print_rich(terminal.comparison(runs))
    if failed:
        raise typer.Exit(max(fail_run(run) for run in failed))


def keep_failures(
    running: Iterable[Run | FailedRun], failed: list[FailedRun], ticker: ProgressDisplay
) -> Iterator[Run]:
    """The runs that did not fail; the others are added to a list."""
    from ..experiment.launch import FailedRun

    for run in running:
        if isinstance(run, FailedRun):
            failed.append(run)
            ticker.give_up(run.config.name())
        else:
            yield run


def fail_run(run: FailedRun) -> int:
    """Print why a run failed, and return the exit code."""
    sentence, code = explain(run.error)
    return fail(f"{run.config.name()}: {sentence}", code)


def collect_runs(running: Iterable[Run], count: int, ticker: ProgressDisplay, command: str) -> list[Run]:
    """The runs, once all have ended; if one was stopped, exit and say by which command to continue."""
    runs: list[Run] = []
    for run in running:
        if not run.over:
            ticker.bars.stop()
            exit_with_command(ticker.console, f"stopped in run {ticker.done + 1} of {count}, all of it stored", command)
        ticker.end(run)
        runs.append(run)
    return runs


@app.command(
    epilog=examples(
        "askew partition --set data.name=cifar10 --set partition.clients=100",
        "askew partition experiment.toml --out who-holds-what.svg",
        "askew partition --set partition.name=labels --set partition.labels=2 --json",
    )
)
def partition(
    file: Configuration = None,
    overrides: Overrides = None,
    plugins: Plugins = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The picture: png, svg or pdf.")] = Path("partition.png"),
    folder: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Show how a configuration divides its data among clients: figures, and a heat map of classes by clients."""
    from ..data.skew import heterogeneity
    from ..experiment.build import client_label_counts
    from ..experiment.config import load_config

    if out.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"partition: --out must end in .png, .svg or .pdf, got {str(out)!r}; try partition.png.")
    config = load_config(file, overrides or (), plugins or ())
    counts, sizes = client_label_counts(config)
    figures = heterogeneity(counts, sizes)
    if as_json:
        print_json(figures)
        return
    tables = {name: config.tables()[name] for name in ("data", "partition")}
    title = f"{tables['data']['name']}, {count_text(len(sizes), 'client')}, {partition_name(tables)}"
    save_figure(skew.draw_skew(counts, sizes, title), out)
    print_rich(Group(Text(title, "bold"), skew.skew_table(figures, ("picture", str(out)))))


@app.command(epilog=examples("askew demo", "askew demo --rounds 20 --seeds 1"))
def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the runs and the report.")] = Path("demo"),
    rounds: Annotated[int, typer.Option(metavar="N", help="Communication rounds of each run.")] = DEMO_ROUNDS,
    seeds: Annotated[
        int, typer.Option(metavar="K", help="Runs of each method, which differ in their seed.")
    ] = DEMO_SEEDS,
) -> None:
    """Compare seven methods on thirty clients with skewed digits, and write a report."""
    with quick_imports():
        from ..experiment import demo as demonstration

    configs, console = demonstration.configs(rounds, seeds), PlainConsole(stderr=True)
    command = terminal.command("demo", "--out", out, "--rounds", str(rounds), "--seeds", str(seeds))
    with interruptible(console, command), ProgressDisplay(console, configs, "demo") as ticker:
        running = demonstration.run_demo(configs, out / "runs", ticker)
        runs = collect_runs(running, len(configs), ticker, command)
    if not ticker.trained_rounds:
        ticker.say(
            f"all {len(runs)} runs were finished already and are read back; remove {out / 'runs'} to train them again",
            "yellow",
        )
    print_rich(terminal.comparison(runs))
    page = write_report(runs, out / "report", "Seven methods on thirty clients with skewed digits")
    print_rich(
        terminal.pairs([("", ""), ("report", str(page)), ("next", terminal.command("show", runs[0].folder or ""))])
    )
