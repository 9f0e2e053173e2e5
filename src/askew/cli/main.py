"""The command line: commands that call the library. Exit codes: 0 done, 1 failed, 2 misused, 130 stopped by Ctrl-C."""

from __future__ import annotations

import io
import os
import re
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from importlib import import_module
from itertools import pairwise
from typing import Annotated, Any

import typer
from rich.text import Text
from typer.completion import completion_init  # type: ignore[attr-defined]
from typer.core import TyperGroup

from ..core.ranks import rank_and_size
from ..errors import ConfigError
from ..experiment.cores import are_too_many
from ..experiment.plain_warnings import show_plain_warnings
from ..experiment.process_tuning import quick_imports, tune_process
from ..experiment.worker_process import start_early
from ..version import __version__
from .options import SHORT_OPTIONS, PlainConsole, examples, explain, fail, set_interrupt

UsageError: Any = typer.BadParameter.__mro__[1]  # click's, which typer has moved about

# The commands: in which module each is, and the line that help shows of it, which is the first of its docstring. A
# module is imported when its command runs, since most of them load torch, which takes seconds.
COMMANDS = {
    "run": ("training", "Train one federation."),
    "sweep": ("training", "Train every combination of some settings' values; on a GPU many runs at a time."),
    "tune": ("tune", "Find the method and the settings that suit a federation, inside of a budget."),
    "partition": (
        "training",
        "Show how a configuration divides its data among clients: figures, and a heat map of classes by clients.",
    ),
    "list": ("reading", "List what a configuration can name, with its settings; or the papers' experiments."),
    "show": ("reading", "Show one run: settings, figures, curve and last rounds."),
    "compare": ("reading", "Compare runs in one table; runs that differ only in their seed share a row."),
    "report": ("reading", "Write one HTML page with tables and pictures of runs."),
    "watch": ("watch", "Show runs on a local web page, live while they train."),
    "demo": (
        "training",
        "Compare seven methods on thirty clients with skewed digits, and write a report.",
    ),
    "conformal": ("conformal", "Measure the prediction sets of finished runs: naive ones, APS and RAPS."),
    "bench": ("bench", "Time full rounds on random data, beside a bare PyTorch loop that does the same steps."),
    "reproduce": ("papers", "Run a table or figure of a paper again and show it beside the paper's numbers."),
    "table": (
        "table",
        "Print a table of a paper from stored results, to paste as Markdown, LaTeX or CSV; nothing is trained.",
    ),
    "ledger": ("ledger", "Put every number and claim of the papers beside what was measured."),
    "data": ("data", "List, get, check and describe the datasets."),
    "deploy": ("deploy", "Run a method on real clients, over Flower."),
    "doctor": (
        "doctor",
        "Say what is installed, which engine would be chosen, where files are, and what to do about what is missing.",
    ),
}


WITH_PROCESSES = ("sweep", "tune", "reproduce")  # the commands with an option --processes


class LazyGroup(TyperGroup):
    """Commands of which only the names and first lines are known until one of them runs."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The name, the command and the other words of a command line, as click needs them."""
        name, command, rest = super().resolve_command(ctx, args)
        if name in WITH_PROCESSES:
            start_early(early_processes(rest))
        return name, load_command(name) if name in COMMANDS else command, rest


def early_processes(words: Sequence[str]) -> int:
    """How many processes a command line asks for that may start before the command is loaded, which takes as long."""
    if "torch" in sys.modules or not {"--plan", "--help", "-h"}.isdisjoint(words):
        return 0
    parts = [part for word in words for part in word.split("=", 1)]
    given = [value for option, value in pairwise(parts) if option == "--processes"]
    count = int(given[-1]) if given and given[-1].isdecimal() else 1
    return 0 if count < 2 or are_too_many(count) else count


def load_command(name: str) -> Any:
    """The command of this name, whose module is imported now."""
    with quick_imports():
        command: Any = typer.main.get_command(import_module(f".{COMMANDS[name][0]}", __package__).app)
    # a module has one command, a group of its own name, or several commands
    return command if command.name == name else command.commands[name]


def placeholder() -> None:
    """Stands for a command in the list of commands."""


app = typer.Typer(
    cls=LazyGroup,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _name, (_, _help) in COMMANDS.items():
    app.command(_name, help=_help)(placeholder)


def print_version(wanted: bool) -> None:
    """Print the version and exit, where that is wanted."""
    if wanted:
        print(f"askew {__version__}")
        raise typer.Exit


@app.callback(
    epilog=examples(
        "askew demo",
        "askew run --method feddyn --rounds 50",
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


# settings by the words that people try as options
SETTINGS = {
    "method": "algorithm.name",
    "algorithm": "algorithm.name",
    "data": "data.name",
    "dataset": "data.name",
    "model": "model.name",
    "partition": "partition.name",
    "alpha": "partition.alpha",
    "clients": "partition.clients",
    "num_clients": "partition.clients",
    "cohort": "participation.cohort",
    "lr": "local.lr",
    "learning_rate": "local.lr",
    "momentum": "local.momentum",
    "epochs": "local.epochs",
    "batch": "local.batch",
    "batch_size": "local.batch",
    "rounds": "rounds",
    "seed": "seed",
    "device": "engine.device",
    "engine": "engine.name",
    "workers": "engine.workers",
}


FOLDER_OPTIONS = ("--out", "--results", "--data-dir")  # of all commands that write something


# sentences of click about the value of an option, which the first group names, and plainer ones
PLAINER = {
    r"(\S+) is not in the range x>=(\S+)": r"\1 must be ≥ \3, got \2",
    r"(\S+) is not in the range (\S+)<=x<=(\S+)": r"\1 must be ≥ \3 and ≤ \4, got \2",
    r"('.*') is not a valid integer(?: range)?": r"\1 must be a whole number, got \2",
    r"('.*') is not a valid float(?: range)?": r"\1 must be a number, got \2",
}


# errors ---------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; every error becomes one sentence on standard error and an exit code."""
    before = signal.getsignal(signal.SIGINT)
    try:
        return run_command_line(argv)
    except KeyboardInterrupt:  # before or after the command
        return 130
    finally:  # one Ctrl-C more would interrupt Python as it ends, amid torch's own last steps
        set_interrupt(signal.SIG_IGN if argv is None else before)


def run_command_line(argv: Sequence[str] | None) -> int:
    """As `main`, which also takes care of signals."""
    open_closed_streams()
    tune_process()
    if "_ASKEW_COMPLETE" in os.environ:  # a shell requests the words that may come next
        completion_init()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without block characters shows question marks
    arguments, command = list(sys.argv[1:] if argv is None else argv) or ["--help"], typer.main.get_command(app)
    if arguments[0] == "help":
        arguments = [*arguments[1:], "--help"]
    try:
        refuse_empty_folders(arguments)
        # of several ranks only the first prints
        with silent() if rank_and_size()[0] else nullcontext(), warnings.catch_warnings():
            show_plain_warnings(lambda text: PlainConsole(stderr=True).print(Text(text, "yellow"), soft_wrap=True))
            code = command.main(arguments, prog_name="askew", standalone_mode=False)
        sys.stdout.flush()
    except UsageError as e:
        return fail(usage_sentence(e, command, arguments))
    except BrokenPipeError:
        return leave_closed_pipe()
    except SystemExit as e:  # by which click answers the same, with the code of a failure
        if not isinstance(e.__context__, BrokenPipeError):
            raise
        return leave_closed_pipe()
    except OSError as e:
        return fail(
            f"{e.filename or 'the system'}: {e.strerror or e}; "
            "check that the path is right, may be written and has space."
        )
    except Exception as e:
        return fail(*explain(e))
    return code if isinstance(code, int) else 0


def leave_closed_pipe() -> int:
    """The exit code where nobody reads the output any more, as after `| head`: what was asked for is done."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains when it flushes
    return 0


def refuse_empty_folders(arguments: Sequence[str]) -> None:
    """Refuse an empty name of a folder, as an unset variable of a shell gives it: it would be the current folder."""
    for option, value in pairwise([*arguments, "the end"]):
        name = option.removesuffix("=")
        if name in FOLDER_OPTIONS and (value == "" or option != name):
            raise ConfigError(f"{name} is empty; name a folder, or . for the current one.")


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


def usage_sentence(e: Any, app: Any, arguments: Sequence[str]) -> str:
    """The sentence for a usage error: click's own, then what the command takes and where to read more."""
    command = e.ctx.command if e.ctx else load_command(arguments[0]) if arguments[0] in COMMANDS else app
    path = e.ctx.command_path if e.ctx else "askew" if command is app else f"askew {command.name}"
    if commands := getattr(command, "commands", None):
        takes = f"commands are {', '.join(commands)}"
    else:
        names = (p.opts[0] if p.param_type_name == "option" else p.metavar for p in command.params)
        takes = f"{path} takes {' '.join(names)}"
    message = re.sub(r"(Did you mean [^?]*\?)( \1| \(Did you mean [^?]*\?\))+", r"\1", e.format_message())
    message = message.strip().rstrip(".")
    for pattern, words in PLAINER.items():
        message = re.sub(f"^Invalid value for '(--[a-z-]+)': {pattern}$", words, message)
    word = str(getattr(e, "option_name", "")).lstrip("-").replace("-", "_")
    is_unknown = message.startswith("No such option")
    options = {name for option in command.params for name in option.opts}
    if is_unknown and word in SETTINGS and "--set" in options:
        short = SHORT_OPTIONS.get(SETTINGS[word], "")
        instead = f"{short} …" if short in options else f"--set {SETTINGS[word]}=…"
        message = f"{message.split('. ')[0].rstrip('.')}; write {instead}"
    return f"{message[:1].lower()}{message[1:]}{' ' if message.endswith('?') else '; '}{takes}; see {path} --help."
