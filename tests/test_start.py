"""What starts at once: commands that read, lists and help do without torch, which takes seconds to load."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import askew
from askew.cli.main import COMMANDS, app, early_processes, load_command, main
from askew.experiment import cores
from askew.experiment.catalogue import KINDS, Costs

LOADED = "print('loaded:', *sorted({'torch', 'numpy', 'matplotlib', 'sklearn', 'scipy', 'sympy'} & sys.modules.keys()))"


def loaded_by(code: str, where: Path | None = None) -> str:
    """Which large libraries Python has loaded at the end of some code."""
    source = str(Path(askew.__file__).parents[1])
    lines = f"import sys; sys.path.insert(0, {source!r})\n{code}\n{LOADED}"
    done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, cwd=where, check=True)
    return done.stdout.rpartition("loaded:")[2].strip()


def test_importing_askew_loads_no_torch_until_a_name_needs_it() -> None:
    assert loaded_by("import askew; askew.__version__, askew.errors, askew.load, askew.Run") == ""
    assert loaded_by("import askew.cli.watch") == ""


def test_commands_that_read_load_no_torch(tmp_path: Path) -> None:
    run = askew.run("fedavg", clients=2, rounds=1, out=tmp_path / "runs")
    words = [
        *(["--version"], ["--help"], ["run", "--help"], ["sweep", "--help"], ["compare", "runs"], ["list", "models"]),
        *(["list", "algorithms"], ["list", "algorithms", "--json"], ["show", f"runs/{run.facts['name']}"]),
        *(["show", "nothing"], ["compare", "runs", "--json"], ["compare", "runs", "--format", "latex"]),
    ]
    codes = [2 if each == ["show", "nothing"] else 0 for each in words]
    code = f"from askew.cli.main import main\nassert [main(each) for each in {words!r}] == {codes}"
    assert loaded_by(code, tmp_path) == ""


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("--over seed=0,1 --processes 2", 2),
        ("--processes=2", 2),
        ("--processes 3", 0),  # more than there are cores
        ("--processes 1", 0),
        ("--processes two", 0),
        ("--processes", 0),
        ("feddpc/table2 --processes 2 --plan", 0),
        ("--processes 2 --help", 0),
        ("--over seed=0,1", 0),
    ],
)
def test_processes_are_started_while_their_command_is_loaded(
    line: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "own_cores", lambda: 2)
    monkeypatch.delenv(cores.MANY)
    assert early_processes(line.split()) == 0  # torch is loaded already, and nothing is gained
    monkeypatch.delitem(sys.modules, "torch")
    assert early_processes(line.split()) == count


# Calls the command line and says on standard output which processes it has started early.
REFUSED = """
import sys
from askew.cli.main import main
from askew.experiment import worker_process
start = worker_process.start_process
def start_and_say():
    worker = start()
    print(worker.process.pid)
    return worker
worker_process.start_process = start_and_say
sys.exit(main(["sweep", "--processes", "2", "--no-such"]))
"""


def test_processes_that_a_refused_command_has_started_end_with_it() -> None:
    """The misuse is said once the command is loaded; nothing is left and nothing else is printed."""
    environment = os.environ | {"PYTHONPATH": str(Path(askew.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", REFUSED], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "--no-such" in done.stderr
    started = [int(line) for line in done.stdout.split()]
    assert len(started) == 2
    for process_id in started:
        with pytest.raises(ProcessLookupError):
            os.kill(process_id, 0)


OWN_METHOD = """
import askew
from askew.algorithms import FedAvg
class Own(FedAvg):
    def direction(self, theta, grad, client):
        return 2 * grad(theta)
run = askew.run(Own(), rounds=1, clients=3, model="softmax", device="cpu", progress=False)
assert run.facts["engine"] == "sequential"
"""


def test_a_trial_of_a_method_loads_nothing_that_only_some_engines_need() -> None:
    """torch imports sympy, for a second, when it first computes a cross-entropy under vmap."""
    assert "sympy" not in loaded_by(OWN_METHOD)


# Presses Ctrl-C when a module is first looked for, and says whether the module with the command was still loaded.
PRESSES = """
import os, signal, sys
_, module, source = sys.argv
class Press:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, source)
sys.meta_path.insert(0, Press())
sys.argv = ["askew", "deploy"]
from askew.__main__ import main
code = main()
print("askew.cli.deploy" in sys.modules)
sys.exit(code)
"""


@pytest.mark.parametrize(("module", "says"), [("typer", "False\n"), ("torch", "True\n")])
def test_ctrl_c_while_modules_are_loaded_ends_the_command_once_they_are(module: str, says: str) -> None:
    """Never between: half of numpy or torch can be neither used nor imported again."""
    source = str(Path(askew.__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", PRESSES, module, source], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, says, "")


def test_lazy_names_are_those_that_type_checkers_see() -> None:
    tree = ast.parse(Path(askew.__file__).read_text())
    checked = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    imports = [node for node in checked.body if isinstance(node, ast.ImportFrom)]
    assert {node.module: tuple(alias.name for alias in node.names) for node in imports} == askew.HOMES
    at_once = {"AskewError", "__version__", "errors"}
    assert {name for names in askew.HOMES.values() for name in names} | at_once == set(askew.__all__)
    assert set(askew.__all__) <= set(dir(askew))
    with pytest.raises(AttributeError, match="no attribute 'agregate'"):
        _ = askew.agregate  # type: ignore[attr-defined]


def test_the_line_of_each_command_is_its_own() -> None:
    assert list(typer.main.get_command(app).commands) == list(COMMANDS)  # type: ignore[attr-defined]
    for name, (_, line) in COMMANDS.items():
        help_text = " ".join(load_command(name).help.split("\n\n")[0].split())
        assert help_text.startswith(line), name


def test_a_plugins_method_is_listed_with_measured_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(KINDS["algorithms"], "members", dict(KINDS["algorithms"].members))  # restored
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "import askew\n"
        "from askew.algorithms import Scaffold\n"
        "@askew.register('listed')\n"
        "class Listed(Scaffold):\n"
        "    idea = 'As SCAFFOLD.'\n"
    )
    assert main(["list", "algorithms", "--plugin", str(plugin), "--json"]) == 0
    *ours, listed = json.loads(capsys.readouterr().out)
    assert main(["list", "algorithms", "--json"]) == 0
    stored = json.loads(capsys.readouterr().out)
    assert ours == stored and listed["name"] == "listed"
    scaffold = next(entry for entry in stored if entry["name"] == "scaffold")
    assert [listed[cost] for cost in Costs._fields] == [scaffold[cost] for cost in Costs._fields]
