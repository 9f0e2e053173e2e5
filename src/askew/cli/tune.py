"""`askew tune`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group
from rich.text import Text

from ..core.records import Record
from ..core.text import count_text
from ..errors import ConfigError
from ..experiment.cores import check_cores
from ..experiment.process_tuning import quick_imports
from ..experiment.store import Run
from ..report import terminal
from .options import (
    AsJson,
    Configuration,
    Device,
    Folder,
    Overrides,
    PlainConsole,
    Plugins,
    Processes,
    Rounds,
    Seed,
    all_overrides,
    examples,
    exit_with_command,
    interruptible,
    option_words,
    print_json,
    print_rich,
)
from .progress import ProgressDisplay

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..experiment.config import Config
    from ..experiment.launch import FailedRun
    from ..experiment.tune import Launch, Tuner
    from ..report.tuning import Tuning

app = typer.Typer(add_completion=False)


Methods = Annotated[
    str | None,
    typer.Option(metavar="A,B,…", help="Methods to try, or all.", show_default="eight that need nothing special"),
]
Amount = Annotated[
    str | None,
    typer.Option(
        metavar="AMOUNT",
        help="What all runs together may cost: 6000rounds, 90s, 10m, 2h, 50MB, 2GB.",
        show_default="what runs of all rounds need",
    ),
]
FreshSeeds = Annotated[int, typer.Option(metavar="K", help="Fresh seeds at which the best three are ranked.")]
Tries = Annotated[
    list[str] | None,
    typer.Option("--over", metavar="KEY=A,B,…", help="Values to try instead of those declared; repeatable."),
]
TuneFolder = Annotated[Path, typer.Option(metavar="DIR", help="Folder for the runs, the curves and run.toml.")]
PlanFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Repeat the plan in a tune.json, on any machine.", show_default=False),
]


@app.command(
    epilog=examples(
        "askew tune",
        "askew tune --methods fedavg,feddyn,scaffold --budget 3000rounds --set partition.alpha=0.1",
        "askew tune --set data.name=csv --set data.file=mine.csv --budget 10m",
        "askew tune --methods all --over local.lr=0.1,0.3 --budget 2GB",
        "askew run tuned/run.toml",
    )
)
def tune(
    file: Configuration = None,
    methods: Methods = None,
    budget: Amount = None,
    seeds: FreshSeeds = 5,
    over: Tries = None,
    rounds: Rounds = None,
    seed: Seed = None,
    device: Device = None,
    overrides: Overrides = None,
    plugins: Plugins = None,
    out: TuneFolder = Path("tuned"),
    folder: Folder = None,
    plan: PlanFile = None,
    processes: Processes = 1,
    as_json: AsJson = False,
) -> None:
    """Find the method and the settings that suit a federation, inside of a budget.

    Every method may spend the same. Settings are chosen on samples that clients hold out; the test set chooses
    nothing. The same command goes on after an interruption; with rounds or bytes it gives the same answer again.
    """
    began = time.monotonic()
    with quick_imports():
        from ..experiment.sweep import parse_spans, read_sweep
        from ..experiment.tune import Budget, Tuner, load_plan

    check_cores(processes, "--processes")
    settings = all_overrides(overrides, rounds=rounds, seed=seed, engine__device=device)
    tables, spans = read_sweep(file, settings, plugins or ())
    console = PlainConsole(stderr=True)
    tuner = Tuner(
        tables,
        out,
        launch_with_progress(console, processes),
        methods=method_list(methods),
        over=spans | parse_spans(over or ()),
        budget=None if budget is None else Budget.parse(budget),
        seeds=seeds,
        plan=None if plan is None else load_plan(plan),
        processes=processes,
        began=began,
    )
    many = [("--over", over), ("--set", overrides), ("--plugin", plugins)]
    options = {"--rounds": rounds, "--seed": seed, "--device": device, "--seeds": seeds}
    words = [*([str(file)] if file else []), *option_words(options | {"--data-dir": folder})]
    words += chain.from_iterable((flag, value) for flag, values in many for value in values or ())
    words += ["--processes", str(processes)] * (processes > 1)
    own = option_words({"--methods": methods, "--budget": budget, "--plan": plan, "--out": out})
    same = terminal.command("tune", *words, *own)
    tuning = carry_out(tuner, console, same, out)
    if as_json:
        print_json(tuning.summary())
    else:
        repeat = terminal.command("tune", *words, "--plan", out / "tune.json", "--out", "OTHER")
        print_answer(tuning, out, repeat if tuner.unit == "seconds" else "")


def method_list(text: str | None) -> list[str]:
    """The names in --methods; none where it was not given."""
    names = [name.strip() for name in (text or "").split(",") if name.strip()]
    if text is not None and not names:
        raise ConfigError("tune: --methods takes names with commas between, such as fedavg,feddyn; or all.")
    return names


def launch_with_progress(console: PlainConsole, processes: int) -> Launch:
    """What trains the runs of one stage, here or in several processes, and shows how far they are."""

    def launch(
        configs: Sequence[Config], folder: Path, title: str, note: Callable[[Run, Record | None], None]
    ) -> Iterator[Run | FailedRun]:
        from ..experiment.launch import FailedRun, run_each
        from ..experiment.process_pool import run_each_in_pool

        count = count_text(len(configs), "run")
        console.print(Text(f"{title}: {count}", terminal.QUIET), soft_wrap=True)
        shown = PlainConsole(stderr=True, quiet=not console.is_terminal)  # elsewhere a line for each stage is enough
        with ProgressDisplay(shown, configs, title) as ticker:

            def watch(run: Run, record: Record | None) -> None:
                note(run, record)
                ticker(run, record)

            if processes > 1:
                running = run_each_in_pool(configs, folder, processes, watch, ticker.say)
            else:
                running = run_each(configs, folder, watch=watch)
            for run in running:
                if isinstance(run, FailedRun):
                    ticker.give_up(run.config.name())
                elif run.over:
                    ticker.end(run)
                yield run

    return launch


def carry_out(tuner: Tuner, console: PlainConsole, command: str, out: Path) -> Tuning:
    """Tune, and write run.toml of the winner and the curves; if it is stopped, exit and say how to go on."""
    from ..experiment.tune import TuneStopped, write_winner
    from ..report.tuning import Tuning

    try:
        with interruptible(console, command):
            result = tuner.run()
    except TuneStopped as e:
        exit_with_command(console, f"stopped in {e}, all that was trained is stored", command)
    tuning = Tuning(result, out)
    write_winner(result.standings[0], out)
    tuning.write_curves(out)
    return tuning


def print_answer(tuning: Tuning, out: Path, repeat: str) -> None:
    """Print the ranking, what it cost, and where the rest is."""
    rows = [("", ""), ("spent", tuning.spent_text()), ("winner", str(out / "run.toml"))]
    rows += [("curves", str(out / "curves.svg"))] if tuning.runs else []
    rows.append(("next", terminal.command("run", out / "run.toml")))
    if tuning.runs:
        rows.append(("", terminal.command("compare", out / "evaluation", "--test", "--against", tuning.best)))
        rows.append(("", terminal.command("report", out / "evaluation")))
    rows += [("again", repeat)] if repeat else []
    print_rich(Group(tuning.rich(), terminal.pairs(rows)))
