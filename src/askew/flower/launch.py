"""Starts Flower's programs as a deployment needs them: `python -P launch.py PROGRAM OPTION…`.

Five things are different from Flower's own commands. Ports answer the same user's processes alone (see guard.py). A
program that a `Loopback` started ends with it, however that ends. A SuperNode has a process with all imports done, of
which a copy (a fork) answers each message: Flower starts a new Python for each, which takes seconds. Waits that would
add up to seconds in every round are short. And an app has longer to start than the half minute that Flower gives it.

Flower has no options for these, so functions of it are replaced here, for the one version that is supported. This file
is run as a script, without the package: importing askew takes seconds, and only what answers messages needs it.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

MARKER = "ASKEW_FEDERATION"  # environment variable by which all processes of one federation are found
LIFELINE = "ASKEW_LIFELINE"  # environment variable: a pipe whose other end closes when the starter has ended
KEYS_FOLDER = "ASKEW_KEYS"  # environment variable: a folder of keys that is removed when the starter has ended
lifeline: dict[str, str] = {}  # the two variables above, which programs that this one starts do not get
RESTARTS = "ASKEW_RESTARTS"  # environment variable: how often a node has started again without a connection
MAX_RESTARTS = 20
NEWS = "ASKEW_NEWS"  # environment variable: a pipe by which a SuperNode notifies its SuperExec of a task
POLL_SECONDS = 0.2  # between two looks of a SuperNode for a message
ANSWER_SECONDS = 0.05  # between two looks of a SuperNode, within itself, for the answer
FIRST_WAIT_SECONDS = 0.05  # before a part of a message is asked for again; later waits are longer
REFUSED = 412  # the HTTP status by which a SuperLink refuses a node whose signature is right
STOP_SECONDS = 5.0  # in which a program may end by itself
START_SECONDS = 180  # in which an app must start: its imports alone can take a minute on a busy machine
HEARTBEAT_SECONDS = 60  # after which an app that gives no sign of life has failed, as in Flower


def main() -> None:
    """Run the program that the command line names."""
    end_with_starter()
    try:
        run_program(sys.argv[1], sys.argv[2:])
    except KeyboardInterrupt:  # as from a SuperNode that ends while this starts: the log's last lines say why it did
        sys.exit(128 + signal.SIGINT)


def run_program(name: str, options: Sequence[str], open_fleet: bool = False) -> None:
    """Run one of Flower's programs in this process; `open_fleet` lets nodes of other machines in."""
    os.environ["FORWARDED_ALLOW_IPS"] = ""  # a header of a request must not say where it comes from
    sys.argv = [name, *options]
    programs: dict[str, Callable[[], Any]] = {
        "flower-superlink": lambda: run_superlink(open_fleet),
        "flower-supernode": run_supernode,
        "flower-superexec": run_superexec,
        "flwr": run_flwr,
    }
    if name not in programs:
        sys.exit(f"error: there is no program {name!r} of Flower; use one of {', '.join(programs)}.")
    programs[name]()


def command_of(program: str, *options: str) -> list[str]:
    """The command that runs a program of Flower by this module."""
    return [sys.executable, "-P", str(Path(__file__).resolve()), program, *options]


# ending -------------------------------------------------------------------------------------------------------------


def end_with_starter() -> None:
    """End this program and all that it started when the process that started it has ended."""
    lifeline.update({name: os.environ.pop(name) for name in (LIFELINE, KEYS_FOLDER) if name in os.environ})
    number, keys = lifeline.get(LIFELINE, ""), lifeline.get(KEYS_FOLDER, "")
    if not number:
        return

    def watch() -> None:
        with suppress(OSError):
            os.read(int(number), 1)  # returns when the other end is closed
        if keys:
            shutil.rmtree(keys, ignore_errors=True)
        end_sessions()
        for number_of_signal in (signal.SIGTERM, signal.SIGKILL):
            os.killpg(0, number_of_signal)
            time.sleep(STOP_SECONDS)

    threading.Thread(target=watch, daemon=True).start()


def end_sessions() -> None:
    """End what a SuperLink started in sessions of their own: its server apps do not notice that it has ended."""
    for number_of_signal in (signal.SIGTERM, signal.SIGKILL):
        end = time.monotonic() + STOP_SECONDS
        while (leaders := session_leaders()) and time.monotonic() < end:
            for leader in leaders:
                with suppress(ProcessLookupError):
                    os.killpg(leader, number_of_signal)
            time.sleep(1.0)


def session_leaders() -> list[int]:
    """The processes of this federation that have sessions of their own and no pipe to the starter."""
    marker, found = f"{MARKER}={os.environ.get(MARKER)}".encode(), list[int]()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            entries, process = path.read_bytes().split(b"\0"), int(path.parent.name)
            watched = any(entry.startswith(f"{LIFELINE}=".encode()) for entry in entries)
            if marker in entries and not watched and os.getsid(process) == process:
                found.append(process)
    return found


# Flower's programs --------------------------------------------------------------------------------------------------


def replace_in(module_name: str, **values: object) -> None:
    """Replace names of one of Flower's modules, which must be there."""
    module = import_module(module_name)
    for name, value in values.items():
        if not hasattr(module, name):
            sys.exit(f"error: this Flower has no {name} in {module_name}; install the version that askew names.")
        setattr(module, name, value)


def ask_again_soon() -> None:
    """Have Flower ask again soon for a part of a message that is still on its way.

    A message can be seen before its parts have come: three times on its way to a client and back. Flower then waits a
    second, and twice as long each time after that.
    """
    utils = import_module("flwr.supercore.inflatable.inflatable_utils")
    for function in (utils.pull_objects, utils.pull_and_inflate_object_from_tree):
        function.__kwdefaults__.update(initial_backoff=FIRST_WAIT_SECONDS)


def give_time_to_start(*module_names: str) -> None:
    """Give an app more time from the start of its process until it says that it runs.

    Flower takes it for dead after 30 seconds and starts another process, which has even less of the machine: then no
    app ever runs.
    """
    patience = HEARTBEAT_SECONDS / START_SECONDS  # in units of the other, as Flower has it
    for module_name in module_names:
        replace_in(module_name, HEARTBEAT_DEFAULT_INTERVAL=START_SECONDS, HEARTBEAT_PATIENCE=patience)


def guard(module_name: str, open_fleet: bool = False) -> None:
    """Have a module's server apps answer the same user alone, where users can be found, and read no huge requests."""
    spec = spec_from_file_location("askew_guard", Path(__file__).with_name("guard.py"))
    assert spec is not None and spec.loader is not None
    rules = module_from_spec(spec)
    spec.loader.exec_module(rules)
    create_app = import_module(module_name).create_app

    def create_guarded_app(*arguments: Any, **options: Any) -> Any:
        app = create_app(*arguments, **options)
        app.add_middleware(rules.BoundedRequests)
        if rules.can_identify_users():
            app.add_middleware(rules.SameUserOnly, open_fleet=open_fleet)
        return app

    replace_in(module_name, create_app=create_guarded_app)


def run_superlink(open_fleet: bool) -> None:
    """Run a SuperLink."""
    from flwr.superlink.cli import flower_superlink

    guard("flwr.superlink.main", open_fleet)
    give_time_to_start(*(f"flwr.supercore.corestate.{kind}_corestate" for kind in ("in_memory", "sql")))
    flower_superlink()


def run_supernode() -> None:
    """Run a SuperNode, which looks for messages often, whose messages are answered by forks, and which lasts."""
    from flwr.supernode import start_client_internal
    from flwr.supernode.cli import flower_supernode

    started: list[subprocess.Popen[bytes]] = []  # the SuperExec
    news, tell = os.pipe()

    def start(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        env = {**os.environ, NEWS: str(news)}
        started.append(subprocess.Popen(command_of(*command), env=env, pass_fds=[news], **options))
        return started[-1]

    restarts = int(os.environ.pop(RESTARTS, "0"))  # in a row, without a connection between them

    def pull(*arguments: Any, **options: Any) -> object:
        nonlocal restarts
        try:
            message = pull_message(*arguments, **options)
        except Exception as e:  # Flower's SuperNode would end here, or hang, over one damaged piece of data
            print(f"WARNING: the connection failed ({type(e).__name__}: {e}); the node starts again.", flush=True)
            restart(started, 1)
        restarts = 0
        if message is not None:
            os.write(tell, b".")
        return message

    ask_again_soon()
    sleep = lambda seconds: time.sleep(POLL_SECONDS if seconds > 1 else ANSWER_SECONDS)
    guard("flwr.supernode.main")
    give_time_to_start("flwr.supercore.corestate.in_memory_corestate")
    pull_message = start_client_internal._pull_and_store_message
    replace_in(
        "flwr.supernode.start_client_internal",
        _pull_and_store_message=pull,
        subprocess=SimpleNamespace(Popen=start),
        time=SimpleNamespace(sleep=sleep),
    )
    try:
        flower_supernode()
    except SystemExit as e:
        if not e.code or not 0 < restarts < MAX_RESTARTS:
            explain_refusal(e.__context__)
            raise
        restart(started, restarts + 1)  # the SuperLink still takes it for connected, until it misses its heartbeat


def explain_refusal(error: BaseException | None) -> None:
    """Say what to do if this is the error of a SuperLink that refused a node: Flower says only that it failed."""
    response: Any = getattr(error, "response", None)
    if response is not None and response.status_code == REFUSED and response.url.path.endswith("/activate-node"):
        print(
            "the SuperLink refused this node: either its key is not registered (flwr supernode register), or an "
            "earlier start of it that was killed still counts as connected, for a minute at most; start it again then.",
            flush=True,
        )


def restart(started: Sequence[subprocess.Popen[bytes]], number: int) -> NoReturn:
    """Replace this program by a new start of it, the so many-th in a row; what it started is ended first."""
    for process in started:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
    time.sleep(1.0)  # so that a connection that always fails keeps no core busy
    os.environ.update(lifeline, **{RESTARTS: str(number)})
    os.execv(sys.executable, command_of(*sys.argv))


def run_flwr() -> None:
    """Run `flwr`, the command of operators."""
    from flwr.cli.app import app

    app()


def run_superexec() -> None:
    """Run the SuperExec of a SuperNode: it starts what answers messages, and a fork answers instead of a new Python."""
    from flwr.supercore.cli import flower_superexec

    ask_again_soon()
    news, forker = int(os.environ.pop(NEWS)), start_forker()

    def start(command: Sequence[str], **options: Any) -> object:
        if command[0] == "flwr-clientapp":
            with suppress(OSError):
                forker.sendall(json.dumps(list(command)).encode() + b"\n")
                return None
        return subprocess.Popen(command, **options)

    processes = SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL)
    replace_in("flwr.supercore.superexec.executor.subprocess_executor", subprocess=processes)
    sleep = lambda seconds: wait_for_news(news, seconds)
    replace_in("flwr.supercore.superexec.run_superexec", time=SimpleNamespace(sleep=sleep))
    flower_superexec()


def wait_for_news(news: int, seconds: float) -> None:
    """Wait until a byte comes through a pipe, which is taken out of it, or for so many seconds."""
    if select.select([news], [], [], seconds)[0] and not os.read(news, 1):
        time.sleep(seconds)  # the other end is closed: the SuperNode has ended


# forks --------------------------------------------------------------------------------------------------------------


def start_forker() -> socket.socket:
    """Start a process with all imports done that runs each command it is sent in a fork of itself.

    Commands are sent as lines of JSON. The process has one thread, as a fork copies no other, and ends when the socket
    is closed.
    """
    near, far = socket.socketpair()
    if os.fork() == 0:
        near.close()
        serve_forks(far)
    far.close()
    return near


def serve_forks(commands: socket.socket) -> NoReturn:
    """Run each command that comes in a fork of this process, and import what a fork has imported, for the next one."""
    import_all(["torch", "flwr.supernode.cli", "askew.flower.client_app", "askew.flower.secure"])

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks that have ended need not be waited for
    report, reports = os.pipe()
    files, texts = (commands.fileno(), report), {commands.fileno(): b"", report: b""}
    while True:
        for file in select.select(files, [], [])[0]:
            new = os.read(file, 65536)
            if not new:
                os._exit(0)  # the starter has ended
            *lines, texts[file] = (texts[file] + new).split(b"\n")
            for line in lines:
                if file == report:
                    import_all(json.loads(line))
                elif os.fork() == 0:
                    commands.close()
                    run_client_app(json.loads(line), reports)


def run_client_app(command: Sequence[str], reports: int) -> NoReturn:
    """Answer one message as `flwr-clientapp` does, report what was imported for it, and end this process."""
    from flwr.supernode.cli import flwr_clientapp

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    code, before = 1, {*sys.modules}
    try:
        sys.argv = list(command)
        flwr_clientapp()
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else int(e.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
            if names := installed_modules(before):
                os.write(reports, json.dumps(names).encode() + b"\n")
        os._exit(code)


def installed_modules(before: Collection[str]) -> list[str]:
    """The modules imported since then that are installed on this machine, and so are the same for every app."""
    folders = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "purelib", "platlib"))
    new = {name: module for name, module in list(sys.modules.items()) if name not in before}
    return [name for name, module in new.items() if str(getattr(module, "__file__", "")).startswith(folders)]


def import_all(names: Sequence[str]) -> None:
    """Import modules; one that cannot be imported by itself is left to who needs it."""
    for name in names:
        with suppress(Exception):
            import_module(name)


if __name__ == "__main__":
    main()
