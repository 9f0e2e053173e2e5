"""What the commands have in common: their options, and how they print and exit."""

from __future__ import annotations

import os
import re
import signal
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from ..core.files import CONTROL, printable
from ..errors import AskewError, ConfigError
from ..experiment.listing import stored_entries
from ..experiment.store import to_json, write_text
from ..experiment.toml import literal, parse_value
from ..report.paste import FORMATS, PasteTables


def use_data_folder(path: Path | None) -> Path | None:
    """Read datasets from this folder, as --data-dir says; returns it, which is then the option's value."""
    if path is not None:
        from ..data import files  # with torch, which takes seconds to load

        files.use(path)
    return path


Folder = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        metavar="DIR",
        callback=use_data_folder,
        help="Folder of the datasets.",
        show_default="ASKEW_DATA, or a folder in the user's cache",
    ),
]


def data_options(folder: Path | None) -> list[str | Path]:
    """The words that give a command the folder of the datasets, if --data-dir named one."""
    return ["--data-dir", folder] if folder else []


def method_names(incomplete: str) -> list[str]:
    """The methods whose names begin with what was typed, for shell completion."""
    return [entry["name"] for entry in stored_entries("algorithms") if entry["name"].startswith(incomplete)]


Processes = Annotated[
    int,
    typer.Option(metavar="N", min=1, help="Processes that train different runs at once, on one GPU or several cores."),
]
Configuration = Annotated[
    Path | None, typer.Argument(metavar="FILE.toml", help="The configuration; without one, the defaults.")
]
Folders = Annotated[
    list[Path], typer.Argument(metavar="RUN...", help="Run folders, or folders of run folders.", show_default=False)
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting; repeatable.")
]
Method = Annotated[
    str | None,
    typer.Option(
        "--method",
        metavar="NAME",
        help="The algorithm, with its defaults.",
        show_default=False,
        autocompletion=method_names,
    ),
]
Rounds = Annotated[int | None, typer.Option("--rounds", metavar="N", help="Communication rounds.", show_default=False)]
Rate = Annotated[float | None, typer.Option("--lr", metavar="X", help="Local learning rate.", show_default=False)]
Epochs = Annotated[int | None, typer.Option("--epochs", metavar="N", help="Local epochs.", show_default=False)]
BatchSize = Annotated[
    int | None, typer.Option("--batch-size", metavar="N", help="Local batch size; 0: all samples.", show_default=False)
]
Seed = Annotated[int | None, typer.Option("--seed", metavar="N", help="Seed of every random draw.", show_default=False)]
Device = Annotated[
    str | None, typer.Option("--device", metavar="NAME", help="auto, cpu, cuda or cuda:N.", show_default=False)
]
Plugins = Annotated[
    list[str] | None, typer.Option("--plugin", metavar="FILE.py", help="Load methods of your own; repeatable.")
]
Out = Annotated[Path, typer.Option(metavar="DIR", help="Folder that holds the run folders.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Start over, even if the run is stored already.")]
Dtype = Annotated[str, typer.Option(metavar="TYPE", help="float32, tf32, bf16 or float64.")]
Compiled = Annotated[bool, typer.Option("--compile", help="Compile the networks.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on standard output.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print no progress, notes or summary; warnings and errors stay.")]


TableFormat = Annotated[
    str | None,
    typer.Option(
        "--format", metavar="FORMAT", help="A table to paste: markdown, latex or csv.", show_default="by --out's ending"
    ),
]
TableFile = Annotated[
    Path | None,
    typer.Option("--out", metavar="FILE", help="Write the table to this file.", show_default="standard output"),
]


StopAfter = Annotated[
    str | None,
    typer.Option(
        "--stop-after",
        metavar="TIME",
        help="Stop after the round in which this time is over, as Ctrl-C does: 30s, 10m or 2h.",
        show_default="never",
    ),
]


Track = Annotated[
    list[str] | None,
    typer.Option(
        "--track",
        metavar="NAME[:PLACE]",
        help="Record every round with tensorboard, mlflow, wandb or trackio; repeatable.",
        show_default=False,
    ),
]


def track_options(track: list[str] | None) -> list[str]:
    """The words that give a command its trackers."""
    return [word for each in track or () for word in ("--track", each)]


# options for single settings
SHORT_OPTIONS = {
    "algorithm.name": "--method",
    "rounds": "--rounds",
    "seed": "--seed",
    "local.lr": "--lr",
    "local.epochs": "--epochs",
    "local.batch": "--batch-size",
    "engine.device": "--device",
    "engine.workers": "--workers",
    "partition.clients": "--clients",
}


def all_overrides(overrides: Sequence[str] | None, method: str | None = None, **words: float | str | None) -> list[str]:
    """What --method, then --set, then the options for single settings change, all as --set takes it.

    Tables and keys of `words` have "__" between. A setting with two values is refused.
    """
    given = {name.replace("__", "."): value for name, value in words.items() if value is not None}
    named = given if method is None else {"algorithm.name": method, **given}
    for override in overrides or ():
        key, _, text = (part.strip() for part in override.partition("="))
        value = parse_value(text)
        for name, other in (value if isinstance(value, dict) else {"": value}).items():
            setting = f"{key}.{name}" if name else key
            if setting in named and named[setting] != other:
                raise ConfigError(
                    f"{SHORT_OPTIONS[setting]} {named[setting]} and --set {override} contradict each other; "
                    "give one of them."
                )
    chosen = [] if method is None else [f"algorithm={{name = {literal(method)}}}"]
    # --set may change settings of the method, and may replace a table that has a single setting
    return [*chosen, *(overrides or ()), *(f"{key}={literal(value)}" for key, value in given.items())]


UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}  # seconds


def parse_time(text: str | None) -> float | None:
    """The seconds of a time such as 30s, 10m, 2h or 1d; None where there is none."""
    if text is None:
        return None
    if not (found := re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([smhd])", text.strip())):
        raise ConfigError(f"--stop-after takes a time such as 30s, 10m, 2h or 1d, got {text!r}; try 2h.")
    return float(found[1]) * UNITS[found[2]]


class PlainConsole(Console):
    """A console that prints texts as they are, but no control characters: they may come from somebody else's files."""

    def __init__(self, *, stderr: bool = False, quiet: bool = False) -> None:
        super().__init__(stderr=stderr, quiet=quiet, markup=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """What is printed, piece by piece."""
        for piece in super().render(renderable, options):
            yield piece if piece.control else Segment(printable(piece.text), piece.style)


def progress_consoles(quiet: bool) -> tuple[PlainConsole, PlainConsole]:
    """Where progress and where warnings are printed; with --quiet warnings alone are."""
    console = PlainConsole(stderr=True, quiet=quiet)
    return console, PlainConsole(stderr=True) if quiet else console  # bars and texts above them need one console


def examples(*lines: str) -> str:
    """The examples at the end of a help page."""
    # each line is a paragraph: older versions of typer join the lines of one
    return "\n\n".join(["Examples:", *(f"$ {line}" for line in lines)])


def print_rich(output: RenderableType) -> None:
    """Print on standard output; tables are as wide as the terminal, lines of text are not broken."""
    PlainConsole().print(output, soft_wrap=isinstance(output, Text), crop=False)


def print_json(value: Any) -> None:
    """Print a value as JSON on standard output."""
    print(json_text(value))


def json_text(value: Any, indent: int | None = 1) -> str:
    """A value as JSON in which control characters are escaped, also those that JSON allows."""
    return CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", to_json(value, indent))


def put_table(tables: PasteTables, form: str | None, out: Path | None) -> None:
    """Print tables to paste, or write them to a file, in a format or in that of the file's ending."""
    if form is None and out is not None:
        form = next((name for name, ending in FORMATS.items() if out.suffix == ending), None)
        if form is None:
            raise ConfigError(
                f"--out {out} has no ending that gives the format ({', '.join(FORMATS.values())}); give --format."
            )
    text = tables.text(form or "markdown")
    if out is None:
        print(text, end="")
    else:
        write_text(out, text)
        print(out)


def option_words(options: Mapping[str, object]) -> list[str]:
    """The words of options that were given: a flag alone, others with their values."""
    given = {name: value for name, value in options.items() if value is not None and value is not False}
    return [word for name, value in given.items() for word in ([name] if value is True else [name, str(value)])]


def exit_with_command(console: Console, sentence: str, command: str, code: int = 130) -> NoReturn:
    """Say what was stopped and the command that continues it, and exit; code 130 stands for Ctrl-C."""
    set_interrupt(signal.SIG_IGN)  # whoever presses Ctrl-C once more gets this sentence too
    console.print(Text(f"{sentence}; to go on:\n  {command}", "yellow"), soft_wrap=True)
    raise typer.Exit(code)


@contextmanager
def interruptible(console: Console, command: str, stop: str | None = None) -> Iterator[None]:
    """Inside, runs stop when the time of --stop-after is over; a second Ctrl-C exits with the command that goes on."""
    from ..experiment.process_state import stop_after  # with torch, which takes seconds to load

    try:
        with stop_after(parse_time(stop)):
            yield
    except KeyboardInterrupt:
        exit_with_command(console, "stopped at once; rounds since the last checkpoint will be run again", command)


def set_interrupt(handler: Any) -> None:
    """Set what Ctrl-C does from now on; elsewhere than in the main thread it does nothing anyway."""
    with suppress(ValueError, TypeError):  # None stands for a handler that was not set from Python
        signal.signal(signal.SIGINT, handler)


def fail(sentence: str, code: int = 2) -> int:
    """Print an error sentence in one line, and return the exit code."""
    line = Text.assemble(("error:", "bold red"), " ", " ".join(sentence.split()))
    PlainConsole(stderr=True).print(line, soft_wrap=True)
    return code


def explain(e: Exception) -> tuple[str, int]:
    """The sentence and the exit code for an exception: 2 for a mistake of the user's or of a plugin's, 1 for ours."""
    if isinstance(e, AskewError):
        return str(e), 2
    if isinstance(e, UnicodeEncodeError) and CONTROL.match(e.object, e.start):
        return "a name or text that was given is not in UTF-8, and cannot be stored; give another.", 2
    if os.environ.get("ASKEW_DEBUG"):
        traceback.print_exception(e)
    from ..experiment.plugins import plugin_fault  # with torch, which takes seconds to load

    if fault := plugin_fault(e):
        return fault, 2
    what = f"{type(e).__name__}: {e}"
    return (
        f"unexpected {what}; this is a defect of askew: please report it with the traceback that ASKEW_DEBUG=1 shows.",
        1,
    )
