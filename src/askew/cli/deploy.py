"""`askew deploy`: a run on real clients, over Flower; its app, a whole federation on this machine, and keys for separate ones."""

from __future__ import annotations

import importlib.util
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Annotated, Any, NamedTuple, NoReturn

import typer
from rich.console import Console
from rich.text import Text

from ..errors import ConfigError
from ..experiment.config import Config, load_tables
from ..experiment.run_folder import is_finished
from ..experiment.store import load, lock_folder
from ..experiment.toml import parse_value, to_toml
from ..flower import DataModule, require_flower
from ..flower.app import PACKAGE, lay_out, read_app
from ..flower.deployment_data import DeploymentConfig, Held, Node, read_page
from ..flower.keys import DAYS, Keys, make_keys
from ..flower.loopback import ENDING, Loopback
from ..flower.server import Rules
from ..report import terminal
from .options import (
    AsJson,
    Folder,
    Fresh,
    Out,
    Overrides,
    Plugins,
    Quiet,
    examples,
    exit_with_command,
    print_json,
    print_rich,
)

app = typer.Typer(name="deploy", add_completion=False)

LINK = ["--enable-supernode-auth", "--disable-runtime-dependency-installation"]

Page = Annotated[Path, typer.Argument(metavar="FILE.toml", help="The configuration.", show_default=False)]
Data = Annotated[
    Path | None, typer.Option("--data", metavar="FILE.py", help="A module whose client(node) gives a client's data.")
]
Clients = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Number of clients.", show_default="partition.clients")
]
Waits = Annotated[
    list[str] | None,
    typer.Option(
        "--rule", metavar="NAME=VALUE", help=f"How the server waits: {', '.join(Rules().table())}; repeatable."
    ),
]


@app.callback(
    invoke_without_command=True,
    epilog=examples(
        "askew deploy up run.toml --clients 3",
        "askew deploy app run.toml app --data data.py",
        "askew deploy keys keys --clients 3",
    ),
)
def top(context: typer.Context) -> None:
    """Run a method on real clients, over Flower."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command(
    "app",
    epilog=examples(
        "askew deploy app run.toml app",
        "askew deploy app run.toml app --data data.py --rule timeout=300 --rule out=/srv/runs",
        "askew deploy app run.toml app --clients 20 --set rounds=100",
    ),
)
def app_(
    file: Page,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the app.", show_default=False)],
    data: Data = None,
    clients: Clients = None,
    waits: Waits = None,
    overrides: Overrides = None,
    plugins: Plugins = None,
    as_json: AsJson = False,
) -> None:
    """Write a Flower app for a run: what `flwr run` takes. Flower need not be installed.

    The configuration, plugins and the data module go into the folder; askew itself must be installed on every machine.
    """
    wanted = asked(file, data, overrides, plugins, clients, waits)
    config = configured(wanted, called=False)
    lay_out(wanted.tables, folder, wanted.data, wanted.rules, file.stem)
    if as_json:
        told = {
            "app": str(folder),
            "clients": clients_of(config),
            "data": wanted.data and str(wanted.data),
            "rules": wanted.rules.table(),
        }
        print_json(told)
        return
    whose = "data of their own" if wanted.data else f"parts of {config.tables()['data']['name']}"
    here, there = terminal.command("deploy", "up", folder), shlex.join(["flwr", "run", str(folder)])
    rows = [
        ("app", str(folder)),
        ("clients", f"{clients_of(config)}, with {whose}"),
        ("", ""),
        ("on this machine", here),
    ]
    print_rich(
        terminal.pairs([(name, Text(text, overflow="fold")) for name, text in [*rows, ("on a SuperLink", there)]])
    )


@app.command(
    epilog=examples(
        "askew deploy up run.toml --clients 3",
        "askew deploy up run.toml --clients 3 --secure --rule timeout=120",
        "askew deploy up run.toml --data data.py --out runs",
        "askew deploy up app",
    )
)
def up(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="FILE.toml|APP", help="The configuration, or a folder that `deploy app` wrote.", show_default=False
        ),
    ],
    clients: Clients = None,
    data: Data = None,
    secure: Annotated[
        bool, typer.Option("--secure", help="Encrypt all connections and let in registered keys alone.")
    ] = False,
    waits: Waits = None,
    overrides: Overrides = None,
    plugins: Plugins = None,
    out: Out = Path("runs"),
    folder: Folder = None,
    fresh: Fresh = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Run a whole federation on this machine: a SuperLink, a SuperNode for every client, and the run.

    A finished run is read back, an interrupted one goes on. All processes are ended, also by Ctrl-C. Logs are in the run's folder.
    """
    require_flower()
    wanted = asked(source, data, overrides, plugins, clients, waits, out=str(out.resolve()), fresh=fresh)
    config, said = configured(wanted), Console(stderr=True, quiet=quiet)
    home, count = out / config.name(), clients_of(config)
    work = home / "flower"
    where: list[str | Path] = ["--data-dir", folder] if folder else []
    again = terminal.command("deploy", "up", work / "app", "--out", out, *["--secure"] * secure, *where)
    with lock_folder(work), terminal.Ticker(said) as ticker:
        if is_finished(home) and not fresh:
            ticker.say("already finished, nothing to do; --fresh runs it again", "yellow")
            done = load(home)
        else:
            lay_out(wanted.tables, work / "app", wanted.data, wanted.rules, source.stem)
            env = {"ASKEW_DATA": str(folder.resolve())} if folder else {}
            nodes = "a SuperNode" if count == 1 else f"{count} SuperNodes"
            ticker.say(f"starting a SuperLink and {nodes} on this machine{', with keys' * secure}; logs are in {work}")
            try:
                with (
                    ended_by_signals(),
                    Loopback(work, count, env=env, keys=new_keys(work / "keys", count, secure)) as link,
                ):
                    done = link.play(work / "app", home, ticker, lambda text: ticker.say(f"note: {text}", "yellow"))
            except KeyboardInterrupt:
                ticker.bars.stop()
                exit_with_command(
                    said, "stopped, and all processes are ended; the round at play will be played again", again
                )
    if as_json:
        print_json(done.summary())
    elif not quiet:
        print_rich(terminal.summary(done))


@app.command(
    epilog=examples(
        "askew deploy keys keys --clients 3", "askew deploy keys keys --clients 3 --host fl.example.org --host 10.0.0.5"
    )
)
def keys(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder for the keys.", show_default=False)],
    clients: Annotated[int, typer.Option(metavar="N", min=1, help="Number of clients.", show_default=False)],
    hosts: Annotated[
        list[str] | None,
        typer.Option(
            "--host", metavar="NAME", help="A name or address of the server; repeatable. This machine is included."
        ),
    ] = None,
    days: Annotated[int, typer.Option(metavar="N", min=1, help="Days for which certificates are good.")] = DAYS,
    as_json: AsJson = False,
) -> None:
    """Make the keys of a federation: a certificate authority, the server's certificate, and a key pair for every client.

    Nothing is overwritten. Secrets can be read by their owner alone; bring each client its own files and ca.crt.
    """
    made = make_keys(folder, clients, hosts or (), days)
    if as_json:
        print_json([{"file": str(path), "secret": secret} for path, secret in made.files().items()])
        return
    last = clients - 1
    each = "node-0, node-0.pem, node-0.key" + (f" … node-{last}, node-{last}.pem, node-{last}.key" if last else "")
    rows = [
        ("every machine", "ca.crt"),
        ("the server", "server.pem, server.key, all .pub files"),
        ("each client", f"its own of {each}"),
        ("nobody", "ca.key: whoever has it can pass for the server"),
    ]
    print_rich(terminal.pairs([*rows, ("", "")]))
    name = (hosts or ["SERVER"])[0]
    commands = {
        "on the server:": ["flower-superlink", "--host", "0.0.0.0", *made.server(), *LINK],
        "there, for each client:": ["flwr", "supernode", "register", str(made.public(0)), "SUPERLINK"],
        "on client 0:": [
            "flower-supernode",
            "--superlink",
            f"{name}:8000",
            *made.node(0),
            "--node-config",
            "partition-id=0",
        ],
    }
    for where, words in commands.items():
        print_rich(Text.assemble((where, "cyan"), f"\n  {shlex.join(words)}"))
    print_rich(
        Text(
            "\nWhoever reaches the server's port can also start apps there: let in your nodes alone (docs/flower.md).",
            "yellow",
        )
    )


# what is asked for ----------------------------------------------------------------------------------------------


class Asked(NamedTuple):
    """A run as it was asked for."""

    tables: dict[str, Any]
    data: Path | None
    rules: Rules


def asked(
    source: Path,
    data: Path | None,
    overrides: Sequence[str] | None,
    plugins: Sequence[str] | None,
    clients: int | None,
    waits: Sequence[str] | None,
    **fixed: str | bool,
) -> Asked:
    """A page, or what an app was written from, with what the command line changes; `fixed` are rules with options of their own."""
    before, kept, rules = read_app(source) if source.is_dir() else ({}, None, {})
    more = [*(overrides or ()), *([] if clients is None else [f"partition.clients={clients}"])]
    page = source / PACKAGE / "run.toml" if source.is_dir() else source
    tables = load_tables(page, more, plugins or (), "name a TOML file, or a folder that `askew deploy app` wrote")
    if "sweep" in tables:
        raise ConfigError(
            "this file has a [sweep] table, which spans several runs, and a deployment is one; remove the table."
        )
    if isinstance(tables.get("plugins"), list):
        named = [*before.get("plugins", []), *(plugins or ())] if before else tables["plugins"]
        tables["plugins"] = [str(Path(str(path)).resolve()) for path in named]
    for text in waits or ():
        name, found, value = text.partition("=")
        name = name.strip()
        if not found or not name:
            raise ConfigError(f"--rule takes name=value, got {text!r}; for example --rule timeout=60.")
        if name in fixed:
            raise ConfigError(f"--rule {name} has an option of its own here; use --{name}.")
        rules[name] = parse_value(value.strip())
    return Asked(tables, data or kept, Rules.build({**rules, **fixed}))


def configured(wanted: Asked, called: bool = True) -> DeploymentConfig:
    """The configuration, checked; without `called` the data module is read but not imported, as it need not work on this machine."""
    module = None
    if wanted.data is not None:
        parsed(wanted.data)
        module = DataModule.of(imported(wanted.data)) if called else DataModule(unseen)
    else:
        # Its sentences name no file that is not the user's.
        Config.build({name: table for name, table in wanted.tables.items() if name != "privacy"})
    with TemporaryDirectory() as folder:
        page = Path(folder) / "run.toml"
        page.write_text(to_toml(wanted.tables), encoding="utf-8")
        return read_page(page, module)


def unseen(node: Node) -> Held:
    """Stands for a data module that is not imported."""
    raise NotImplementedError


def clients_of(config: DeploymentConfig) -> int:
    return 1 if config.algorithm.pooled else config.partition.clients


def parsed(path: Path) -> None:
    """Tell a data module's mistakes before it is on any machine."""
    if not path.is_file():
        raise ConfigError(f"there is no file {str(path)!r}; name a Python file that defines client(node).")
    try:
        compile(path.read_bytes(), str(path), "exec")
    except (SyntaxError, ValueError) as e:
        raise ConfigError(f"the data module {str(path)!r} is no Python: {e}; correct it and try again.") from None


def imported(path: Path) -> ModuleType:
    """A data module, as nodes import it."""
    spec = importlib.util.spec_from_loader("askew_data_module", SourceFileLoader("askew_data_module", str(path)))
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as e:
        raise ConfigError(
            f"the data module {str(path)!r} failed: {type(e).__name__}: {e}; correct it and try again."
        ) from None
    return module


def new_keys(folder: Path, clients: int, secure: bool) -> Keys | None:
    """Keys for one run of one machine, which need not last."""
    shutil.rmtree(folder, ignore_errors=True)
    return make_keys(folder, clients) if secure else None


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """What ends a process raises KeyboardInterrupt, once: nothing breaks off the ending of the others."""

    def end(number: int, frame: object) -> NoReturn:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    heard = [s for s in ENDING if s != signal.SIGHUP or signal.getsignal(s) != signal.SIG_IGN]  # which nohup leaves so
    before = {s: signal.signal(s, end) for s in heard}
    try:
        yield
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
