"""`askew deploy`: write the Flower app of a run, run it on this machine, make keys for a federation of several."""

from __future__ import annotations

import importlib.util
import shlex
import shutil
import signal
import socket
import sys
from argparse import ArgumentError, ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from errno import EADDRINUSE
from importlib.machinery import SourceFileLoader
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Annotated, Any, NamedTuple, NoReturn

import typer
from rich.text import Text

from ..core.signals import END_SIGNALS
from ..errors import ConfigError
from ..experiment.config import load_tables
from ..experiment.folder_lock import lock_folder
from ..experiment.run_folder import is_finished
from ..experiment.store import Run, load
from ..experiment.toml import parse_value, to_toml
from ..flower import DataModule, require_flower
from ..flower.app import PACKAGE, read_app, write_app_from_tables
from ..flower.buffered_engine import check_buffer
from ..flower.deployment_data import ClientDataset, DeploymentConfig, NodeConfig, read_config
from ..flower.guard import can_identify_users
from ..flower.keys import MAX_DAYS, VALID_DAYS, KeyFiles, make_keys, temporary_keys
from ..flower.launch import run_program
from ..flower.loopback import Loopback
from ..flower.rules import DeploymentRules, check_answers, check_same_buffer
from ..report import terminal
from .options import (
    AsJson,
    Folder,
    Fresh,
    Out,
    Overrides,
    Plugins,
    Quiet,
    all_overrides,
    data_options,
    examples,
    exit_with_command,
    print_json,
    print_rich,
    progress_consoles,
)
from .progress import ProgressDisplay

app = typer.Typer(name="deploy", add_completion=False)

OPEN_PORT = (
    "on this system any user of the machine can run code as you through the federation's port, with --secure "
    "too; run it on Linux, or on a machine that is yours alone"
)
SUPERLINK_OPTIONS = [  # with its database it knows the registered nodes after a restart
    *("--database", "superlink.db"),
    *("--enable-supernode-auth", "--disable-runtime-dependency-installation"),
]

PORTS = {"flower-superlink": 8000, "flower-supernode": 9094}  # of Flower's programs, where none is named

Command = Callable[[typer.Context], None]
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}  # options are those of another program

ConfigFile = Annotated[Path, typer.Argument(metavar="FILE.toml", help="The configuration.", show_default=False)]
Data = Annotated[
    Path | None, typer.Option("--data", metavar="FILE.py", help="A module whose client(node) gives a client's data.")
]
Clients = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Number of clients.", show_default="partition.clients")
]
RuleTexts = Annotated[
    list[str] | None,
    typer.Option(
        "--rule",
        metavar="NAME=VALUE",
        help=f"How the server waits: {', '.join(DeploymentRules().table())}; repeatable.",
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
def deploy(context: typer.Context) -> None:
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
def write_app(
    file: ConfigFile,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the app.", show_default=False)],
    data: Data = None,
    clients: Clients = None,
    rules: RuleTexts = None,
    overrides: Overrides = None,
    plugins: Plugins = None,
    as_json: AsJson = False,
) -> None:
    """Write a Flower app for a run: what `flwr run` takes. Flower need not be installed.

    The configuration, plugins and the data module go into the folder; askew itself must be installed on every machine.
    """
    request = read_request(file, data, overrides, plugins, clients, rules)
    config = build_config(request, import_data=False)
    write_app_from_tables(request.tables, folder, request.data, request.rules, file.stem)
    if as_json:
        print_json(
            {
                "app": str(folder),
                "clients": config.client_count,
                "data": request.data and str(request.data),
                "rules": request.rules.table(),
            }
        )
        return
    source = "data of their own" if request.data else f"parts of {config.tables()['data']['name']}"
    files = () if request.data else config.data.reads()
    rows = [
        ("app", str(folder)),
        ("clients", f"{config.client_count}, with {source}"),
        *[("file", f"{path}, not in the app: copy it to this path on every machine") for path in files],
        ("", ""),
        ("on this machine", terminal.command("deploy", "up", folder)),
        ("on a SuperLink", shlex.join(["flwr", "run", str(folder)])),
    ]
    print_rich(terminal.pairs([(name, Text(text, overflow="fold")) for name, text in rows]))


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
        bool, typer.Option("--secure", help="Encrypt all connections; nodes need keys, made for this run.")
    ] = False,
    rules: RuleTexts = None,
    overrides: Overrides = None,
    plugins: Plugins = None,
    out: Out = Path("runs"),
    folder: Folder = None,
    fresh: Fresh = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Run a whole federation on this machine: a SuperLink, a SuperNode for every client, and the run.

    A finished run is read back, an interrupted one goes on. All processes are ended, also by Ctrl-C. Logs are in the
    run's folder. On Linux ports answer your own processes alone; elsewhere any user of the machine can run code as you.
    """
    require_flower()
    request = read_request(source, data, overrides, plugins, clients, rules, out=str(out.resolve()), fresh=fresh)
    config, (console, warnings) = build_config(request), progress_consoles(quiet)
    run_folder = out / config.name()
    with lock_folder(run_folder / "flower"), ProgressDisplay(console, warnings=warnings) as ticker:
        if not fresh:
            check_same_buffer(run_folder, request.rules)
        if is_finished(run_folder, config.evaluation) and not fresh:
            ticker.say("already finished, nothing to do; --fresh runs it again", "yellow")
            run = load(run_folder)
        else:
            try:
                run = run_on_loopback(request, config, source.stem, run_folder, folder, secure, ticker)
            except KeyboardInterrupt:
                ticker.bars.stop()
                options = ["--out", out, *["--secure"] * secure, *data_options(folder)]
                again = terminal.command("deploy", "up", run_folder / "flower" / "app", *options)
                exit_with_command(
                    console, "stopped, and all processes are ended; the current round will be run again", again
                )
    if as_json:
        print_json(run.summary())
    elif not quiet:
        print_rich(terminal.summary(run))


def run_on_loopback(
    request: DeployRequest,
    config: DeploymentConfig,
    name: str,
    run_folder: Path,
    data_dir: Path | None,
    secure: bool,
    ticker: ProgressDisplay,
) -> Run:
    """Write the app of a run, start a federation on this machine and run the app on it to its end."""
    work, count = run_folder / "flower", config.client_count
    if not can_identify_users():
        ticker.say_warning(OPEN_PORT)
    if request.rules.fresh:
        shutil.rmtree(work / "state", ignore_errors=True)  # what clients have answered is of the run before
    write_app_from_tables(request.tables, work / "app", request.data, request.rules, name)
    env = {"ASKEW_DATA": str(data_dir.resolve())} if data_dir else {}
    nodes = "a SuperNode" if count == 1 else f"{count} SuperNodes"
    ticker.say(f"starting a SuperLink and {nodes} on this machine{', with keys' * secure}; logs are in {work}")
    made = temporary_keys(count) if secure else nullcontext()
    with interrupt_on_signals(), made as keys, Loopback(work, count, env=env, keys=keys, say=ticker.say) as federation:
        shutil.rmtree(work / "keys", ignore_errors=True)  # where older versions left them
        return federation.run_app(work / "app", run_folder, ticker, ticker.say_warning)


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
    days: Annotated[
        int, typer.Option(metavar="N", min=1, max=MAX_DAYS, help="Days for which certificates are good.")
    ] = VALID_DAYS,
    as_json: AsJson = False,
) -> None:
    """Make the keys of a federation: a certificate authority, the server's certificate, and a key pair for each client.

    Nothing is overwritten. Secrets can be read by their owner alone; bring each client its own files and ca.crt.
    """
    key_files = make_keys(folder, clients, hosts or (), days)
    if as_json:
        print_json([{"file": str(path), "secret": secret} for path, secret in key_files.files().items()])
    else:
        show_keys(key_files, (hosts or ["SERVER"])[0])


def show_keys(key_files: KeyFiles, server: str) -> None:
    """Print which file goes where, and the commands that use them; `server` is the server's name."""
    last = key_files.clients - 1
    each = "node-0, node-0.pem, node-0.key" + (f" … node-{last}, node-{last}.pem, node-{last}.key" if last else "")
    rows = [
        ("every machine", "ca.crt"),
        ("the server", "server.pem, server.key, all .pub files"),
        ("each client", f"its own of {each}"),
        ("nobody", "ca.key: whoever has it can pass for the server"),
    ]
    print_rich(terminal.pairs([*rows, ("", "")]))
    superlink = ["askew", "deploy", "superlink", "--host", "0.0.0.0", *key_files.server_options(), *SUPERLINK_OPTIONS]
    register = ["flwr", "supernode", "register", str(key_files.public_key(0)), "SUPERLINK"]
    node = ["askew", "deploy", "supernode", "--superlink", f"{server}:8000", *key_files.node_options(0)]
    commands = {
        "on the server:": superlink,
        "there, for each client:": register,
        "on client 0:": [*node, "--node-config", 'partition-id=0 state="/var/askew"'],
    }
    for where, command in commands.items():
        print_rich(Text.assemble((where, "cyan"), f"\n  {shlex.join(command)}"))
    print_rich(
        Text(
            "\nstate is a folder that outlives the node: without what it keeps there, a run cannot go on.\n"
            "On the server use these commands and not flower-superlink itself, on which whoever reaches the port can "
            "start apps.",
            "yellow",
        )
    )


def register_program(example: str) -> Callable[[Command], Command]:
    """Register a command whose options are those of a program of Flower."""
    return app.command(context_settings=PASS_ON, epilog=examples(example))


@register_program(
    "askew deploy superlink --host 0.0.0.0 --database superlink.db --enable-supernode-auth --ssl-ca-certfile "
    "keys/ca.crt --ssl-certfile keys/server.pem --ssl-keyfile keys/server.key"
)
def superlink(context: typer.Context) -> None:
    """Run a SuperLink that only you can start apps on: `flower-superlink` with the same options.

    Nodes may come from everywhere, with keys if --enable-supernode-auth is given. All other requests are answered to
    your own processes on this machine alone (Linux).
    """
    require_flower()
    if not can_identify_users():
        raise ConfigError(
            "this system does not say which user sends a request, so anybody who reaches the port could start apps; "
            "use Linux, or flower-superlink behind a proxy (docs/flower.md)."
        )
    run_flower("flower-superlink", context.args, open_fleet=True)


def run_flower(program: str, options: Sequence[str], open_fleet: bool = False) -> None:
    """Run a program of Flower in this process; an error that it raises becomes a sentence."""
    check_port(options, PORTS[program])
    try:
        run_program(program, options, open_fleet)
    except Exception as e:
        reason = f"{type(e).__name__}: {e}".splitlines()[0].rstrip(". ")
        raise ConfigError(f"{program} ended ({reason}); correct its options or files, and start it again.") from e


def check_port(options: Sequence[str], default: int) -> None:
    """Refuse a port that cannot be opened: Flower says so after half a minute, among other lines."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--host", default="127.0.0.1")  # the default is Flower's
    parser.add_argument("--port", default=default, type=int)
    try:
        asked, _ = parser.parse_known_args(options)
        family, kind, protocol, _, address = socket.getaddrinfo(asked.host, asked.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as trial:
            # as Flower does: a port left a moment ago is free
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(address)
    except (ArgumentError, OverflowError):  # Flower has sentences for these
        return
    except OSError as e:
        advice = "name an address of this machine with --host, and a port that you may open with --port"
        if e.errno == EADDRINUSE:
            advice = "end the program that uses it, or name another one with --port"
        reason = (e.strerror or str(e)).lower()
        raise ConfigError(f"port {asked.port} of {asked.host} cannot be opened ({reason}); {advice}.") from None


@register_program(
    "askew deploy supernode --superlink fl.example.org:8000 --root-certificates keys/ca.crt "
    "--auth-supernode-private-key keys/node-0 --node-config 'partition-id=0 state=\"/var/askew\"'"
)
def supernode(context: typer.Context) -> None:
    """Run a SuperNode that answers messages at once: `flower-supernode` with the same options.

    A process with all imports done answers each message in a copy of itself; Flower starts a new Python for each. Its
    port answers your own processes alone (Linux).
    """
    require_flower()
    run_flower("flower-supernode", context.args)


# what is asked for ----------------------------------------------------------------------------------------------


class DeployRequest(NamedTuple):
    """A run as the command line asks for it."""

    tables: dict[str, Any]  # of the configuration
    data: Path | None  # the data module
    rules: DeploymentRules


def read_request(
    source: Path,
    data: Path | None,
    overrides: Sequence[str] | None,
    plugins: Sequence[str] | None,
    clients: int | None,
    rule_texts: Sequence[str] | None,
    **fixed: str | bool,
) -> DeployRequest:
    """The run of a configuration file or an app folder, with what the command line changes.

    `fixed` are rules that have options of their own.
    """
    app_tables, app_data, rules = read_app(source) if source.is_dir() else ({}, None, {})
    changes = all_overrides(overrides, partition__clients=clients)
    path = source / PACKAGE / "run.toml" if source.is_dir() else source
    tables = load_tables(path, changes, plugins or (), "name a TOML file, or a folder that `askew deploy app` wrote")
    if "sweep" in tables:
        raise ConfigError(
            "this file has a [sweep] table, which spans several runs, and a deployment is one; remove the table."
        )
    if isinstance(tables.get("plugins"), list):
        named = [*app_tables.get("plugins", []), *(plugins or ())] if app_tables else tables["plugins"]
        tables["plugins"] = [str(Path(str(plugin)).resolve()) for plugin in named]
    for text in rule_texts or ():
        name, equals, value = text.partition("=")
        name = name.strip()
        if not equals or not name:
            raise ConfigError(f"--rule takes name=value, got {text!r}; for example --rule timeout=60.")
        if name in fixed:
            raise ConfigError(f"--rule {name} has an option of its own here; use --{name}.")
        rules[name] = parse_value(value.strip())
    return DeployRequest(tables, data or app_data, DeploymentRules.build({**rules, **fixed}))


def build_config(request: DeployRequest, import_data: bool = True) -> DeploymentConfig:
    """The configuration of a request, checked. Without `import_data` the data module need not work on this machine."""
    module = None
    if request.data is not None:
        check_syntax(request.data)
        module = DataModule.of(import_file(request.data)) if import_data else DataModule(placeholder_client)
    else:
        # Checked here first, so that sentences name no file but the user's.
        DeploymentConfig.build(request.tables)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "run.toml"
        path.write_text(to_toml(request.tables), encoding="utf-8")
        config = read_config(path, module)
    check_buffer(config, request.rules)
    check_answers(config, request.rules)
    return config


def placeholder_client(node: NodeConfig) -> ClientDataset:
    """Stands for the function of a data module that is not imported."""
    raise NotImplementedError


def check_syntax(path: Path) -> None:
    """Refuse a data module that is no Python, before it is copied to any machine."""
    if not path.is_file():
        raise ConfigError(f"there is no file {str(path)!r}; name a Python file that defines client(node).")
    try:
        compile(path.read_bytes(), str(path), "exec")
    except (SyntaxError, ValueError) as e:
        raise ConfigError(f"the data module {str(path)!r} is no Python: {e}; correct it and try again.") from None


def import_file(path: Path) -> ModuleType:
    """A data module, imported as nodes import it."""
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


@contextmanager
def interrupt_on_signals() -> Iterator[None]:
    """Raise KeyboardInterrupt at the first signal that ends a process; ignore later ones while processes are ended."""

    def interrupt(number: int, frame: object) -> NoReturn:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    # nohup has set SIGHUP to be ignored, and it stays so
    handled = [s for s in END_SIGNALS if s != signal.SIGHUP or signal.getsignal(s) != signal.SIG_IGN]
    before = {s: signal.signal(s, interrupt) for s in handled}
    try:
        yield
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
