"""`askew deploy`: apps, keys, and whole federations on this machine that leave no process behind."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import IO

import numpy as np
import pytest
from in_process import largest_difference, simulate, small_run, write_config
from processes import assert_none_left, on_request, processes_of
from safetensors.torch import load_file

import askew
from askew import flower
from askew.cli import deploy
from askew.cli.main import main
from askew.cli.options import SHORT_OPTIONS
from askew.experiment import checkpoint
from askew.experiment.config import load_config
from askew.experiment.folder_lock import is_locked, lock_folder
from askew.experiment.run_folder import clear_run
from askew.experiment.store import load, write_json
from askew.experiment.toml import seal
from askew.flower import app
from askew.flower.deployment_data import read_config
from askew.flower.loopback import PROCESSES, Loopback, RunProgress, free_port
from askew.flower.transport import WAITING
from askew.report import terminal

needs_flower = pytest.mark.skipif(find_spec("flwr") is None, reason="needs the extra flower")
RUN_SECONDS = 300.0  # in which a run must end
TOLERANCE = 1e-6  # of weights: they are the same numbers where processes round alike


def full_run(clients: int, rounds: int = 2) -> dict[str, object]:
    """Rounds of SCAFFOLD in which all clients take part."""
    partition = {"name": "natural", "clients": clients}
    return small_run({"name": "scaffold"}, rounds=rounds, partition=partition, participation={"name": "full"})


OWN_DATA = "import torch\n\ndef client(node):\n    return (torch.randn(9, 8), torch.arange(9) % 3), None, None\n"
PLUGIN = """\
import askew
from askew.algorithms import FedAvg

@askew.register('mine', replace=True)
class Mine(FedAvg):
    pass
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a configuration and a data module."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    write_config(full_run(clients=5), tmp_path)
    (tmp_path / "data.py").write_text(OWN_DATA)
    return tmp_path


@pytest.fixture
def no_flower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flower, "find_spec", lambda name: None)


# apps -----------------------------------------------------------------------------------------------------------


def test_the_readme_deploys_a_run_in_which_several_clients_train(folder: Path) -> None:
    """Its commands one after the other, but for those that train: a run is stored, its file is deployed."""
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    run, up, written = (
        shlex.split(re.findall(rf"^\$ askew ({words} .*)$", readme, re.MULTILINE)[0], comments=True)
        for words in ("run", "deploy up", "deploy app")
    )
    settings = {option: setting for setting, option in SHORT_OPTIONS.items()}
    config = load_config(None, [f"{settings[word]}={text}" for word, text in pairwise(run) if word in settings])
    stored = folder / "runs" / config.name()
    stored.mkdir(parents=True)
    (stored / "run.toml").write_text(config.toml())
    (stored / "rounds.jsonl").touch()
    (source,) = folder.glob(up[2])  # as a shell finds it
    options = [word for word in up[3:] if word != "--secure"]
    assert main([*written[:2], str(source), written[3], *options]) == 0
    deployed = read_config(folder / written[3] / "askew_app" / "run.toml")
    count = deployed.client_count
    for n in range(1, 6):
        assert len(deployed.participation.sample(0, n, np.arange(count), count)) == 3


def test_an_app_is_written_without_flower(folder: Path, no_flower: None, capsys: pytest.CaptureFixture[str]) -> None:
    command = "deploy app run.toml app --data data.py --clients 3 --set rounds=7 --rule timeout=60 --rule out=/srv/runs"
    assert main(command.split()) == 0
    out = capsys.readouterr().out
    assert "3, with data of their own" in out and "askew deploy up app" in out and "flwr run app" in out
    tables, data, rules = app.read_app(Path("app"))
    assert (tables["rounds"], tables["partition"]["clients"]) == (7, 3)
    assert data is not None and data.read_text() == OWN_DATA
    assert (rules["timeout"], rules["out"], rules["wait"]) == (60.0, "/srv/runs", 600.0)
    assert main(["deploy", "app", "run.toml", "app", "--json"]) == 0  # again, without data of their own
    assert json.loads(capsys.readouterr().out) | {"rules": None} == {
        "app": "app",
        "clients": 5,
        "data": None,
        "rules": None,
    }
    assert app.read_app(Path("app"))[1] is None
    Path("own.csv").write_text("site,x,y\n" + "a,1,0\na,2,1\nb,3,0\nb,4,1\n" * 5)
    table = {"name": "csv", "file": "own.csv", "client": "site", "label": "y"}
    Path("own.toml").write_text("[data]\n" + "".join(f'{key} = "{value}"\n' for key, value in table.items()))
    assert main(["deploy", "app", "own.toml", "own"]) == 0
    assert "own.csv, not in the app: copy it to this path" in " ".join(capsys.readouterr().out.split())


def test_an_apps_plugins_go_from_app_to_app(folder: Path) -> None:
    """An app can be written from an app: its parts are the same, under the same names."""
    Path("mine.py").write_text(PLUGIN)
    options = ["--plugin", "mine.py", "--set", 'algorithm={name = "mine"}', "--data", "data.py"]
    assert main(["deploy", "app", "run.toml", "run", *options]) == 0
    assert main(["deploy", "app", "run", "two"]) == 0
    names = {path.relative_to("run") for path in Path("run").rglob("*.*")}
    assert Path("askew_app/plugin_0_mine.py") in names
    assert {path.relative_to("two"): path.read_text() for path in Path("two").rglob("*.*")} == {
        n: (Path("run") / n).read_text() for n in names
    }


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (
            "app none.toml app",
            "there is no file 'none.toml'; name a TOML file, or a folder that `askew deploy app` wrote.",
        ),
        ("app run.toml app --set algorithm.mu=1", "unknown setting algorithm.mu"),
        ("app run.toml app --clients 0", "--clients must be ≥ 1, got 0"),
        ("app run.toml app --rule patience=3", "deployment: unknown setting patience"),
        ("app run.toml app --rule timeout", "--rule takes name=value, got 'timeout'"),
        ("app run.toml app --rule timeout=-1", "deployment: timeout must be > 0"),
        ("app run.toml app --data none.py", "there is no file 'none.py'; name a Python file that defines client(node)"),
        ("app run.toml app --data bad.py", "the data module 'bad.py' is no Python: invalid syntax"),
        ("app run.toml .", "'.' holds other files; name a new folder"),
        ("app run.toml run.toml", "'run.toml' holds other files; name a new folder"),
        (
            "app run.toml app --set evaluation.spread=true --data data.py",
            "evaluation.spread needs the clients' samples",
        ),
        ("app run.toml app --set sweep.seed=[1,2]", "a [sweep] table"),
        (
            "app run.toml app --rule answers=6",
            "answers must be at most the number that a round waits for, 5",
        ),
        ("up folder", "'folder' is no app folder: it has no askew_app/run.toml"),
        ("up run.toml --rule out=elsewhere", "--rule out has an option of its own here; use --out"),
        ("up run.toml --data failing.py", "the data module 'failing.py' failed: ZeroDivisionError"),
        ("up run.toml --data empty.py", "must define client(node)"),
        ("keys keys", "missing option '--clients'"),
        ("keys keys --clients 2 --host a/b", "--host must be a name or an address without a port, got 'a/b'"),
        ("keys keys --clients 2 --days 100000000", "--days must be ≥ 1 and ≤ 36500"),
        ("keys full --clients 2", "'full' holds node-1 already, and keys are never overwritten; name a new folder"),
        ("down", "no such command 'down'"),
    ],
)
def test_a_wrong_command_is_answered_in_one_sentence(
    command: str, sentence: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if command.startswith(("up", "keys")) and find_spec("cryptography") is None and "missing" not in sentence:
        pytest.skip("needs the extra flower")
    Path("folder").mkdir()
    Path("full").mkdir()
    Path("full/node-1").write_text("secret")
    Path("failing.py").write_text("1 / 0\n")
    Path("empty.py").write_text("")
    Path("bad.py").write_text("client of node\n")
    assert main(["deploy", *command.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and sentence in err, err
    assert not Path("app").exists() and not Path("runs").exists() and not Path("keys").exists()
    assert [path.name for path in Path("full").iterdir()] == ["node-1"] and Path("full/node-1").read_text() == "secret"


@pytest.mark.parametrize("command", ["up run.toml", "keys keys --clients 2"])
def test_without_flower_one_sentence_says_how_to_get_it(
    command: str, folder: Path, no_flower: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["deploy", *command.split()]) == 2
    out, err = capsys.readouterr()
    assert (
        out == ""
        and err == f"error: deployments need Flower, which is not installed; run pip install '{flower.FLOWER}'.\n"
    )


# keys -----------------------------------------------------------------------------------------------------------


@needs_flower
def test_keys_are_complete_private_and_valid_for_the_hosts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import (
        load_pem_private_key,
        load_ssh_private_key,
        load_ssh_public_key,
    )

    os.umask(0o022)
    hosts = ["--host", "fl.example.org", "--host", "10.0.0.5"]
    assert main(["deploy", "keys", "keys", "--clients", "2", *hosts, "--days", "30"]) == 0
    out = capsys.readouterr().out
    assert "--superlink fl.example.org:8000" in out and "flwr supernode register keys/node-0.pub" in out
    assert "--database superlink.db" in out  # so that a restarted SuperLink knows its nodes
    assert """--node-config 'partition-id=0 state="/var/askew"'""" in " ".join(out.split())
    secret = {"ca.key", "server.key", "node-0", "node-0.key", "node-1", "node-1.key"}
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in Path("keys").iterdir()}
    assert modes == dict.fromkeys(secret, 0o600) | dict.fromkeys(modes.keys() - secret, 0o644) and len(modes) == 12
    read_certificate = lambda name: x509.load_pem_x509_certificate((Path("keys") / name).read_bytes())
    root = read_certificate("ca.crt")
    root.verify_directly_issued_by(root)
    for name in ("server", "node-0", "node-1"):
        certificate = read_certificate(f"{name}.pem")
        certificate.verify_directly_issued_by(root)
        key = load_pem_private_key(Path(f"keys/{name}.key").read_bytes(), None)
        assert certificate.public_key() == key.public_key()
        assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca  # it signs nothing
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        hosts = [*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))]
        assert hosts == (
            ["fl.example.org", "localhost", "10.0.0.5", "127.0.0.1"] if name == "server" else ["localhost", "127.0.0.1"]
        )
        assert 30 <= (certificate.not_valid_after_utc - certificate.not_valid_before_utc).total_seconds() / 86400 < 31
    publics = []
    for client in range(2):
        private = load_ssh_private_key(Path(f"keys/node-{client}").read_bytes(), None)
        assert isinstance(private, ec.EllipticCurvePrivateKey) and private.curve.name == "secp384r1"
        publics.append(load_ssh_public_key(Path(f"keys/node-{client}.pub").read_bytes()))
        assert private.public_key() == publics[-1]
    assert publics[0] != publics[1]
    before = {path: path.read_bytes() for path in Path("keys").iterdir()}
    assert main(["deploy", "keys", "keys", "--clients", "3"]) == 2
    assert before == {path: path.read_bytes() for path in Path("keys").iterdir()}


# a run whose process was killed ---------------------------------------------------------------------------------


def test_a_killed_run_is_distinguished_from_a_running_one(tmp_path: Path) -> None:
    folder = tmp_path / "scaffold-flower"
    with lock_folder(folder):
        config = write_config(full_run(clients=1), folder)
        config.write_text(seal(config.read_text()))
        write_json(folder / "run.json", {"state": "running", "engine": "flower"})
        assert is_locked(folder) and load(folder).facts["state"] == "running"
    run = load(folder)
    assert not is_locked(folder) and run.facts["state"] == "interrupted"
    assert terminal.state(run) == "interrupted, 0 of 2 rounds"
    assert terminal.resume_command(folder, "flower") == "flwr run APP"
    (folder / "flower").mkdir()
    assert terminal.resume_command(folder, "flower") == f"askew deploy up {folder}/flower/app --out {tmp_path}"
    write_json(folder / "flower" / PROCESSES, {"marker": "x", "keys": True})
    assert terminal.resume_command(folder, "flower") == f"askew deploy up {folder}/flower/app --out {tmp_path} --secure"


@needs_flower
def test_the_reason_of_a_failure_is_the_last_informative_line_of_a_log(tmp_path: Path) -> None:
    link = Loopback(tmp_path, 0)
    log = [
        "\x1b[92mINFO \x1b[0m:      Start",
        "\x1b[91mERROR \x1b[0m:     ServerApp raised an exception",
        "Traceback (most recent call last):",
        '  File "a.py", line 2, in serve',
        "askew.errors.EngineError: 0 of 2 clients came; start the others.",
        "\x1b[91mERROR \x1b[0m:     Exit Code: 201",
        "",
        "An unhandled exception occurred in the ServerApp.",
        "",
        "For more information",
    ]
    (tmp_path / "run.log").write_text("\n".join(log))
    reason = f"0 of 2 clients came; start the others; its log is {tmp_path / 'run.log'}."
    assert link.failure_reason("run") == reason
    (tmp_path / "node-0.log").write_text("╭─ Error ───╮\n│ No such   key. │\n╰───────────╯\nINFO:     Shutting down\n")
    assert link.failure_reason("node-0").startswith("No such key; ")
    (tmp_path / "x.log").write_bytes(b"")
    assert link.failure_reason("x").startswith("it said nothing; ")


@needs_flower
def test_a_process_that_was_killed_failed_as_it_was_killed(tmp_path: Path) -> None:
    """Not for what it said before, or what an earlier start of it said."""
    (tmp_path / "node-0.log").write_text("No such key.\n")
    link = Loopback(tmp_path, 0)
    try:
        process = link.start_process(
            "node-0", sys.executable, "-c", "import time; print('hm', flush=True); time.sleep(60)"
        )
        wait_until(lambda: b"hm" in (tmp_path / "node-0.log").read_bytes())
        assert link.failure_reason("node-0").startswith("hm; ")
        process.kill()
        process.wait()
        assert link.failure_reason("node-0").startswith("it was killed (SIGKILL); its log is ")
        link.start_process("node-0", sys.executable, "-c", "").wait()
        assert link.failure_reason("node-0").startswith("it said nothing; ")
    finally:
        link.stop_all()


@needs_flower
def test_the_console_says_who_is_connected_while_a_federation_starts(tmp_path: Path) -> None:
    """A start takes half a minute on a busy machine; logs of an earlier start in the same folder do not count."""
    said: list[str] = []
    link = Loopback(tmp_path, 2, say=said.append)
    connected = "\x1b[92mINFO \x1b[0m:      SuperNode ID: 5\n"
    (tmp_path / "node-0.log").write_text(connected)
    for name in ("node-0", "node-1"):
        link.start_process(name, "sleep", "60")
    try:
        link.note_connections()
        assert said == []
        with open(tmp_path / "node-0.log", "a") as log:
            log.write(connected)
        link.note_connections()
        link.note_connections()
        (tmp_path / "node-1.log").write_text(connected)
        link.note_connections()
    finally:
        link.stop_all()
    (tmp_path / "run.log").write_text("INFO :      another line\n")
    progress = RunProgress(tmp_path / "run", tmp_path / "run.log", None, None, said.append)
    with open(tmp_path / "run.log", "a") as log:
        log.write(f"\x1b[92mINFO \x1b[0m:      {WAITING}1 of 2 are ready\n\x1b[92mINFO \x1b[0m:      {WAITING}2 of")
    progress.update(finished=False)
    nodes = ["1 of 2 SuperNodes is connected", "2 of 2 SuperNodes are connected"]
    assert said == [*nodes, "waiting for clients: 1 of 2 are ready"]


def test_a_folder_that_is_cleared_or_half_written_is_read_later(tmp_path: Path) -> None:
    """As by --fresh: the server removes an earlier run's files, and writes its own one after the other."""
    earlier = askew.run("fedavg", clients=2, rounds=1, model={"name": "softmax"}, out=tmp_path, progress=False)
    folder, log, begun = earlier.folder, tmp_path / "run.log", list[int]()
    assert folder is not None
    config = (folder / "run.toml").read_text()
    log.touch()
    progress = RunProgress(folder, log, lambda run, record: begun.append(len(run.rounds)), None, lambda text: None)
    clear_run(folder)
    progress.update(finished=False)
    write_json(folder / "run.json", {})
    progress.update(finished=False)
    assert progress.run is None and begun == []
    (folder / "run.toml").write_text(config)
    (folder / "rounds.jsonl").touch()
    progress.update(finished=False)
    assert progress.run is not None and begun == [0]


# whole federations ----------------------------------------------------------------------------------------------


STEPS = (  # of a start, in the order in which the console says them
    "starting a SuperLink and 2 SuperNodes on this machine",
    "SuperLink is ready",
    "2 of 2 SuperNodes are conn",
    "waiting for clients: 0 of 2 are ready",
)


def start_deployment(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "askew", "deploy", "up", *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )


def read_until(stream: IO[str], start: str) -> str:
    """What a stream says up to the line that starts so."""
    text = ""
    for line in stream:
        text += line
        if line.startswith(start):
            return text
    raise AssertionError(f"no line starts with {start!r}: {text}")


def wait_until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + RUN_SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def only_run() -> Path:
    [folder] = Path("runs").iterdir()
    return folder.resolve()


@needs_flower
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=on_request)])
def test_an_interrupted_federation_leaves_no_process_goes_on_and_plays_the_simulators_run(
    number: int, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two clients, each of whose messages is a process of its own; some rounds pass until all have ended."""
    arguments = ("run.toml", "--clients", "2", "--rule", "timeout=120", "--set", "rounds=12")
    first = start_deployment(*arguments)
    assert first.stderr is not None
    before = read_until(first.stderr, "round 1/12")
    positions = [before.find(step) for step in (*STEPS, "round 1/12")]
    assert -1 not in positions and positions == sorted(positions), before
    wait_until(lambda: any(Path("runs").glob(f"*/{checkpoint.FILE}")))
    home = only_run() / "flower" / "flwr"
    assert first.poll() is None and len(processes_of(home)) >= 3
    first.send_signal(number)
    first.send_signal(number)  # a second signal does not hurry it
    out, err = first.communicate(timeout=60)
    assert first.returncode == 130 and out == "" and "stopped, and all processes are ended" in err, before + err
    assert_none_left(home, seconds=0)
    command = err.splitlines()[-1].split()
    assert command[:3] == ["askew", "deploy", "up"]
    assert load(only_run()).facts["state"] == "interrupted" and main(["show", str(only_run())]) == 0
    assert f"askew deploy up {only_run()}/flower/app" in capsys.readouterr().out
    second = start_deployment(*command[3:], "--json")
    out, err = second.communicate(timeout=RUN_SECONDS)
    assert second.returncode == 0 and re.search(r"going on after round \d+ of 12", err) and "round 12/12" in err, err
    assert_none_left(home, seconds=0)
    deployed, simulated = load(only_run()), simulate(full_run(clients=2, rounds=12))
    assert json.loads(out) | {"run": None} == deployed.summary() | {"run": None}
    assert deployed.finished and deployed.facts["engine"] == "flower"
    assert [r["participants"] for r in deployed.rounds] == [[0, 1]] * 12
    assert largest_difference(load_file(only_run() / "model.safetensors"), simulated.model) <= TOLERANCE
    for name in ("train_loss", "loss", "accuracy"):
        assert deployed.rounds[-1][name] == pytest.approx(simulated.rounds[-1][name], rel=1e-5)
    assert (deployed.bytes_up, deployed.bytes_down) == (simulated.bytes_up, simulated.bytes_down)
    third = start_deployment(*arguments, "--quiet")  # finished: nothing is started
    assert third.communicate(timeout=60) == ("", "") and third.returncode == 0


@needs_flower
@pytest.mark.slow
@on_request
def test_a_server_that_fails_says_so_in_a_sentence(folder: Path) -> None:
    """A client whose data are wrong is named while it is waited for; then the run fails."""
    Path("data.py").write_text("def client(node):\n    return 5\n")
    run = start_deployment("run.toml", "--clients", "1", "--data", "data.py", "--secure")
    out, err = run.communicate(timeout=RUN_SECONDS)
    assert run.returncode == 2 and out == ""
    assert "warning: node " in err and "the data module's client(node) must return (train, validation, test)" in err
    last, log = err.splitlines()[-1], only_run() / "flower" / "run.log"
    assert last.startswith("error: the run failed; the only connected node cannot take part: the data module's client")
    assert last.endswith(f"its log is {log}.")
    assert "Traceback" not in log.read_text()
    assert_none_left(only_run() / "flower" / "flwr", seconds=0)


@needs_flower
@pytest.mark.parametrize("program", ["superlink", "supernode"])
def test_a_port_that_cannot_be_opened_is_one_sentence(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["deploy", program, "--insecure", "--port", str(port)]) == 2
        assert main(["deploy", program, "--insecure", "--port", str(port), "--host", "192.0.2.1"]) == 2  # of nobody
    used, foreign = (" ".join(line.split()) for line in capsys.readouterr().err.splitlines())
    start = f"error: port {port} of"
    assert used.startswith(f"{start} 127.0.0.1 cannot be opened (address already in use); end the program that uses it")
    assert foreign.startswith(f"{start} 192.0.2.1 cannot be opened (") and "this machine with --host" in foreign


@needs_flower
def test_an_error_of_flowers_program_is_one_sentence_and_no_defect_of_ours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("unable to open database file\n[SQL: ...]")

    monkeypatch.setattr(deploy, "run_program", fail)
    assert main(["deploy", "superlink", "--insecure", "--port", str(free_port())]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert said == (
        "error: flower-superlink ended (RuntimeError: unable to open database file); correct its options or files, "
        "and start it again."
    )


@needs_flower
@pytest.mark.slow
@on_request
@pytest.mark.parametrize("name", ["superlink", "flwr-serverapp"])
def test_a_process_that_is_killed_ends_all(name: str, folder: Path) -> None:
    run = start_deployment("run.toml", "--clients", "1")
    assert run.stderr is not None
    read_until(run.stderr, "round 1/2")
    home = only_run() / "flower" / "flwr"
    for process_id in processes_of(home):
        if name in Path(f"/proc/{process_id}/cmdline").read_text():
            os.kill(process_id, signal.SIGKILL)
    _, err = run.communicate(timeout=RUN_SECONDS)
    assert run.returncode == 2 and err.splitlines()[-1].startswith("error: "), err
    assert_none_left(home, seconds=0)
    assert load(only_run()).facts["state"] == "interrupted"
