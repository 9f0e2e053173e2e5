"""The command line: commands that call the library. Exit codes: 0 done, 1 failed, 2 misused, 130 stopped by Ctrl-C."""

from __future__ import annotations

import io
import os
import sys
import traceback
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.text import Text

from ..data.skew import heterogeneity
from ..engine.distributed import rank_and_size
from ..errors import AskewError, ConfigError
from ..experiment import catalogue
from ..experiment import demo as demonstration
from ..experiment.build import client_label_counts
from ..experiment.config import load_config, load_plugin, plugin_fault
from ..experiment.launch import FailedRun, run_config, run_each
from ..experiment.process_state import show_plain_warnings, stop_after
from ..experiment.process_tuning import tune_process
from ..experiment.store import Run, load_all, load_checked
from ..experiment.sweep import load_sweep
from ..report import skew, table, terminal, write_report
from ..report.page import check_run
from ..report.tables import partition_name
from ..version import __version__
from . import bench as cli_bench
from . import conformal as cli_conformal
from . import data as cli_data
from . import deploy as cli_deploy
from . import ledger as cli_ledger
from . import papers as cli_papers
from .options import (
    AsJson,
    Folder,
    Folders,
    Fresh,
    Out,
    Overrides,
    PlainConsole,
    Plugins,
    Quiet,
    StopAfter,
    data_options,
    examples,
    exit_with_command,
    parse_time,
    print_json,
    print_rich,
)

UsageError: Any = typer.BadParameter.__mro__[1]  # click's, which typer has moved about

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.add_typer(cli_data.app)
app.add_typer(cli_deploy.app)

Configuration = Annotated[
    Path | None, typer.Argument(metavar="FILE.toml", help="The configuration; without one, the defaults.")
]


def print_version(wanted: bool) -> None:
    """Print the version and exit, where that is wanted."""
    if wanted:
        print(f"askew {__version__}")
        raise typer.Exit


@app.callback(
    epilog=examples(
        "askew demo",
        "askew run --set algorithm.name=feddyn --set rounds=50",
        "askew list algorithms",
        "askew compare runs",
    )
)
def top(
    show_version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Say the version.")
    ] = False,
) -> None:
    """Federated learning when data and turnout are askew."""


@app.command(
    epilog=examples(
        "askew run",
        "askew run --set algorithm.name=fedprox --set algorithm.mu=0.1",
        "askew run experiment.toml --set seed=1 --out runs",
        "askew run --plugin mine.py --set algorithm.name=mine",
        "askew run experiment.toml --workers 4 --stop-after 2h",
    )
)
def run(
    file: Configuration = None,
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
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Train one federation.

    A finished run is read back, an interrupted one goes on.

    Ctrl-C ends the round and stores everything; a second one stops at once.
    """
    config = load_config(
        file, [*(overrides or ()), *([] if workers is None else [f"engine.workers={workers}"])], plugins or ()
    )
    console = PlainConsole(stderr=True, quiet=quiet)
    again = terminal.resume_command(out / config.name(), options=data_options(folder))
    try:
        with stop_after(parse_time(stop)), terminal.ProgressDisplay(console) as ticker:
            result = run_config(config, out, fresh=fresh, watch=ticker)
    except KeyboardInterrupt:
        exit_with_command(console, "stopped at once; rounds since the last checkpoint will be run again", again)
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
        "askew sweep grid.toml --out runs",
    )
)
def sweep(
    file: Configuration = None,
    over: Annotated[
        list[str] | None, typer.Option("--over", metavar="KEY=A,B,…", help="Values to try; repeatable.")
    ] = None,
    overrides: Overrides = None,
    plugins: Plugins = None,
    out: Out = Path("runs"),
    folder: Folder = None,
    stop: StopAfter = None,
    as_json: AsJson = False,
) -> None:
    """Train every combination of some settings' values; on a GPU many runs at a time.

    The sweep table of a file and --over span the combinations. Finished runs are read back, interrupted ones go on.
    A run that fails does not end the others; it is named at the end.
    """
    configs, console = load_sweep(file, overrides or (), over or (), plugins or ()), PlainConsole(stderr=True)
    given = (("--over", over), ("--set", overrides), ("--plugin", plugins))
    flags = [(flag, value) for flag, values in given for value in values or ()]
    words = [*([file] if file else []), *chain.from_iterable(flags), "--out", out, *data_options(folder)]
    failed: list[FailedRun] = []
    with stop_after(parse_time(stop)), terminal.ProgressDisplay(console, configs, "sweep") as ticker:
        runs = collect_runs(
            keep_failures(run_each(configs, out, watch=ticker), failed, ticker),
            len(configs),
            ticker,
            terminal.command("sweep", *words),
        )
    if as_json:
        print_json([run.summary() for run in runs])
    elif runs:
        print_rich(terminal.comparison(runs))
    if failed:
        raise typer.Exit(max(fail_run(run) for run in failed))


def keep_failures(
    running: Iterable[Run | FailedRun], failed: list[FailedRun], ticker: terminal.ProgressDisplay
) -> Iterator[Run]:
    """The runs that did not fail; the others are added to a list."""
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


def collect_runs(running: Iterable[Run], count: int, ticker: terminal.ProgressDisplay, command: str) -> list[Run]:
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
    if out.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"partition: --out must end in .png, .svg or .pdf, got {str(out)!r}; try partition.png.")
    config = load_config(file, overrides or (), plugins or ())
    counts, sizes = client_label_counts(config)
    figures = heterogeneity(counts if counts.shape[1] else sizes[:, None])
    if as_json:
        print_json(figures)
        return
    tables = {name: config.tables()[name] for name in ("data", "partition")}
    title = f"{tables['data']['name']}, {len(sizes):,} clients, {partition_name(tables)}"
    out.parent.mkdir(parents=True, exist_ok=True)
    skew.draw_skew(counts, sizes, title).savefig(out, dpi=150)
    print_rich(Group(Text(title, "bold"), skew.skew_table(figures, ("picture", str(out)))))


@app.command("list", epilog=examples("askew list algorithms", "askew list partitions --json"))
def list_(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="KIND",
            help="One of algorithms, attacks, datasets, experiments, models, partitions, participations, rules.",
        ),
    ],
    plugins: Plugins = None,
    as_json: AsJson = False,
) -> None:
    """List what a configuration can name, with its settings; or the papers' experiments."""
    for path in plugins or ():
        load_plugin(path)
    if kind == "experiments":
        cli_papers.list_experiments(as_json)
        return
    entries = catalogue.entries(kind)
    if as_json:
        print_json(entries)
    else:
        print_rich(terminal.catalogue(kind, entries))


@app.command(epilog=examples("askew show runs/NAME", "askew show runs/NAME --json"))
def show(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Show one run: settings, figures, curve and last rounds."""
    run = load_checked(folder, terminal.run_details)
    if as_json:
        print_json(run.summary() | {"config": run.config, "facts": run.facts, "records": run.rounds})
    else:
        print_rich(terminal.run_details(run))


@app.command(
    epilog=examples("askew compare runs", "askew compare runs/A runs/B --target 0.9", "askew compare runs --json")
)
def compare(
    folders: Folders,
    target: Annotated[
        float | None,
        typer.Option(metavar="ACC", help="Count rounds to this accuracy, 0 to 1.", show_default="fedavg's best"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare runs in one table; runs that differ only in their seed share a row."""
    if target is not None and not 0 < target <= 1:
        raise ConfigError(f"compare: --target must be > 0 and ≤ 1, got {target:g}; accuracies are fractions, try 0.9.")
    runs = load_all(folders, lambda run: terminal.comparison([run]))
    if as_json:
        print_json(table(runs, target))
    else:
        print_rich(terminal.comparison(runs, target))


@app.command(
    epilog=examples("askew report runs --out report", "askew report runs/A runs/B --out report --title 'A against B'")
)
def report(
    folders: Folders,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the page and its pictures.")] = Path("report"),
    title: Annotated[str | None, typer.Option(help="Heading of the page.", show_default=False)] = None,
) -> None:
    """Write one HTML page with tables and pictures of runs."""
    print(write_report(load_all(folders, check_run), out, title))


@app.command(epilog=examples("askew demo", "askew demo --rounds 20 --seeds 1"))
def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the runs and the report.")] = Path("demo"),
    rounds: Annotated[int, typer.Option(metavar="N", help="Communication rounds of each run.")] = demonstration.ROUNDS,
    seeds: Annotated[
        int, typer.Option(metavar="K", help="Runs of each method, which differ in their seed.")
    ] = demonstration.SEEDS,
) -> None:
    """Compare seven methods on thirty clients with skewed digits, in a minute, and write a report."""
    configs, console = demonstration.configs(rounds, seeds), PlainConsole(stderr=True)
    command = terminal.command("demo", "--out", out, "--rounds", str(rounds), "--seeds", str(seeds))
    with terminal.ProgressDisplay(console, configs, "demo") as ticker:
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


app.command(epilog=cli_conformal.EPILOG)(cli_conformal.conformal)
app.command(epilog=cli_bench.EPILOG)(cli_bench.bench)
app.command(epilog=cli_papers.EPILOG)(cli_papers.reproduce)
app.command(epilog=cli_ledger.EPILOG)(cli_ledger.ledger)


# errors ---------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; every error becomes one sentence on standard error and an exit code."""
    open_closed_streams()
    tune_process()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without block characters shows question marks
    arguments, command = list(sys.argv[1:] if argv is None else argv) or ["--help"], typer.main.get_command(app)
    try:
        # of several ranks only the first prints
        with silent() if rank_and_size()[0] else nullcontext(), warnings.catch_warnings():
            show_plain_warnings(lambda text: PlainConsole(stderr=True).print(Text(text, "yellow"), soft_wrap=True))
            code = command.main(arguments, prog_name="askew", standalone_mode=False)
        sys.stdout.flush()
    except UsageError as e:
        return fail(usage_sentence(e, command, arguments))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains when it flushes
        return 0
    except KeyboardInterrupt:
        return 130
    except OSError as e:
        return fail(
            f"{e.filename or 'the system'}: {e.strerror or e}; "
            "check that the path is right, may be written and has space."
        )
    except Exception as e:
        return fail(*explain(e))
    return code if isinstance(code, int) else 0


def open_closed_streams() -> None:
    """Discard what goes to standard streams that are closed, as by `>&-`: else other files would take their place."""
    while (number := os.open(os.devnull, os.O_RDWR)) < 3:
        pass
    os.close(number)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - as long as the process


@contextmanager
def silent() -> Iterator[None]:
    """Discard what is printed."""
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


def fail(sentence: str, code: int = 2) -> int:
    """Print an error sentence in one line, and return the exit code."""
    line = Text.assemble(("error:", "bold red"), " ", " ".join(sentence.split()))
    PlainConsole(stderr=True).print(line, soft_wrap=True)
    return code


def usage_sentence(e: Any, app: Any, arguments: Sequence[str]) -> str:
    """The sentence for a usage error: click's own, then what the command takes and where to read more."""
    command = e.ctx.command if e.ctx else app.commands.get(arguments[0], app)
    path = e.ctx.command_path if e.ctx else "askew" if command is app else f"askew {command.name}"
    if commands := getattr(command, "commands", None):
        takes = f"commands are {', '.join(commands)}"
    else:
        names = (p.opts[0] if p.param_type_name == "option" else p.metavar for p in command.params)
        takes = f"{path} takes {' '.join(names)}"
    message = e.format_message().strip().rstrip(".")
    return f"{message[:1].lower()}{message[1:]}{' ' if message.endswith('?') else '; '}{takes}; see {path} --help."


def explain(e: Exception) -> tuple[str, int]:
    """The sentence and the exit code for an exception: 2 for a mistake of the user's or of a plugin's, 1 for ours."""
    if isinstance(e, AskewError):
        return str(e), 2
    if os.environ.get("ASKEW_DEBUG"):
        traceback.print_exception(e)
    if fault := plugin_fault(e):
        return fault, 2
    what = f"{type(e).__name__}: {e}"
    return (
        f"unexpected {what}; this is a defect of askew: please report it with the traceback that ASKEW_DEBUG=1 shows.",
        1,
    )
