"""A run is known by the user's own files that its code is from: it is another one after an edit, and only then."""

from __future__ import annotations

import importlib
import linecache
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import askew
from askew.cli.main import main
from askew.errors import ConfigError, StoreWarning
from askew.experiment.api import OwnNetwork
from askew.experiment.config import CHOICES, Config
from askew.experiment.conformal import conformal
from askew.experiment.launch import configs_message, received_configs
from askew.experiment.value_text import STANDARD_LIBRARY, is_library_module

METHOD = """import askew
from askew.algorithms import FedAvg
{imports}
{decorator}
class Own(FedAvg):
    def direction(self, theta, grad, client):
        {first}
        return {scale} * grad(theta)
"""
PLUGIN = '@askew.register("own")'
NETWORK = """from torch import nn
{imports}
class Net({base}):
    {decorator}
    def forward(self, x):
        {first}
        return {scale} * super().forward(x.flatten(1))
"""
SMALL: dict[str, Any] = {"rounds": 2, "partition": {"clients": 3}, "model": {"name": "softmax"}}


def method(imports: str = "", scale: str = "1.0", first: str = "pass", decorator: str = "") -> str:
    return METHOD.format(imports=imports, scale=scale, first=first, decorator=decorator)


def network(imports: str, scale: str = "1.0", first: str = "pass", base: str = "nn.Linear", decorator: str = "") -> str:
    return NETWORK.format(imports=imports, scale=scale, first=first, base=base, decorator=decorator)


@pytest.fixture
def own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder from which a plugin imports a file, which imports another one; they are forgotten afterwards."""
    for registry in CHOICES.values():
        monkeypatch.setattr(registry, "members", dict(registry.members))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # of a file that is edited twice in a second
    (tmp_path / "own_rates.py").write_text("from own_package.numbers import HALF\ndef factor():\n    return HALF\n")
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package" / "__init__.py").write_text("")
    (tmp_path / "own_package" / "numbers.py").write_text("from .start import WHOLE\nHALF = WHOLE / 2\n")
    (tmp_path / "own_package" / "start.py").write_text("WHOLE = 1.0\n")
    (tmp_path / "own_base.py").write_text(
        "import own_rates\nfrom askew.algorithms import FedAvg\nclass Base(FedAvg):\n"
        "    def direction(self, theta, grad, client):\n        return own_rates.factor() * grad(theta)\n"
    )
    (tmp_path / "own_plots.py").write_text("colour = 'red'\n")
    yield tmp_path
    forget_own_files()


def forget_own_files() -> None:
    """Forget modules, as if a new process began."""
    for name in [name for name in sys.modules if name.startswith(("own_", "askew_plugin_"))]:
        del sys.modules[name]
    importlib.invalidate_caches()


def config_of_plugin(**tables: Any) -> Config:
    """The configuration of the plugin in this folder."""
    return Config.build({"plugins": ["plugin.py"], "algorithm": {"name": "own"}} | SMALL | tables)


def digest_of_plugin() -> str:
    """Its digest in a new process."""
    forget_own_files()
    return config_of_plugin().digest()


def network_mark() -> str:
    """The fingerprint of the network of own_net.py in a new process."""
    forget_own_files()
    torch.manual_seed(0)
    return OwnNetwork.of(importlib.import_module("own_net").Net(64, 10)).fingerprint


def typed_in(text: str) -> Any:
    """The method of a text that a notebook's cell defines."""
    file = f"/tmp/ipykernel_1/{len(linecache.cache)}.py"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    names: dict[str, Any] = {"__name__": "own_notebook"}
    exec(compile(text, file, "exec"), names)
    return names["Own"]()


# which files count ----------------------------------------------------------------------------------------------------


def test_a_plugin_that_registers_what_it_imports_alone_is_told_what_to_do(
    own_files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plugin = own_files / "plugin.py"
    plugin.write_text("import askew\nfrom own_base import Base\naskew.register('own')(Base)\n")
    assert main(["run", "--plugin", str(plugin), "--out", str(own_files)]) == 2
    assert "registers Base of own_base, whose text" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "is_another"), [("own_base", True), ("own_package/start", True), ("own_plots", False)]
)
def test_a_run_is_another_one_if_a_file_that_its_plugin_imports_was_edited(
    own_files: Path, file: str, is_another: bool
) -> None:
    (own_files / "plugin.py").write_text(
        "import askew\nfrom own_base import Base\n@askew.register('own')\nclass Own(Base): pass\n"
    )
    before, path = digest_of_plugin(), own_files / f"{file}.py"
    path.write_text(path.read_text() + "\n# edited\n")
    assert (digest_of_plugin() != before) is is_another


@pytest.mark.parametrize(
    "imports",
    [
        "try:\n    from . import own_plots\nexcept ImportError:\n    import own_plots",  # the first one fails
        "def later():\n    from own_plots import colour",
        "def later():\n    import own_package.more",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import own_plots",
        "import importlib\nown_plots = importlib.import_module('own_plots')",
    ],
)
def test_a_file_counts_whether_or_not_it_is_loaded(own_files: Path, imports: str) -> None:
    (own_files / "own_package" / "more.py").write_text("from own_plots import colour\n")
    (own_files / "plugin.py").write_text(method(imports, decorator=PLUGIN))
    before = digest_of_plugin()
    forget_own_files()
    importlib.import_module("own_package.more")  # as another file may do
    assert config_of_plugin().digest() == before
    (own_files / "own_plots.py").write_text("colour = 'blue'\n")
    assert digest_of_plugin() != before


def test_a_folder_of_the_name_of_what_is_not_installed_is_no_module(own_files: Path) -> None:
    (own_files / "plugin.py").write_text(method(first="import own_tracker", scale="1.0", decorator=PLUGIN))
    before = digest_of_plugin()
    (own_files / "own_tracker").mkdir()  # where it writes its files
    assert digest_of_plugin() == before
    importlib.import_module("own_tracker")
    assert config_of_plugin().digest() == before


@pytest.mark.parametrize("folder", ["/usr/lib/python3/dist-packages", "/home/me/.venv/lib/python3.12/site-packages"])
def test_installed_packages_are_no_files_of_ones_own(folder: str) -> None:
    module = ModuleType("some_library")
    assert not is_library_module(module)
    module.__file__ = f"{folder}/some_library/__init__.py"
    assert is_library_module(module)
    assert is_library_module("some_library", module.__file__)


def test_a_file_of_ones_own_may_have_the_name_of_pythons() -> None:
    module = ModuleType("code")
    assert is_library_module(module)
    module.__file__ = str(STANDARD_LIBRARY / "code.py")
    assert is_library_module(module)
    for file in ("/home/me/code.py", "/home/me/my-site-packages-tests/code.py"):
        module.__file__ = file
        assert not is_library_module(module)


def test_a_network_is_another_one_if_what_it_uses_of_another_file_was_edited(own_files: Path) -> None:
    scale = "own_rates.factor() * own_package.numbers.HALF"
    (own_files / "own_net.py").write_text(network("import own_rates, own_package.numbers", scale))
    marks = [network_mark()]
    (own_files / "own_rates.py").write_text("def factor():\n    return 0.25\n")
    marks.append(network_mark())
    (own_files / "own_package" / "numbers.py").write_text("HALF, UNUSED = 0.125, 1\n")
    marks.append(network_mark())
    (own_files / "own_package" / "numbers.py").write_text("HALF, UNUSED = 0.125, 2\n")
    assert len({*marks}) == 3 and network_mark() == marks[-1]


HELPERS = """import functools
from torch import nn
def act():
    return {0}
class Base(nn.Linear):
    def forward(self, x):
        return act() * super().forward(x)
def scaled(hook):
    @functools.wraps(hook)
    def inner(*arguments):
        return {0} * hook(*arguments)
    return inner
"""


@pytest.mark.parametrize(
    "text",
    [
        network("from own_helpers import Base", base="Base"),
        network("from own_helpers import scaled", decorator="@scaled"),
        network("", "act()", "from own_helpers import act"),
        network("", "(lambda: act())()", "import own_helpers as o; act = lambda: o.act()"),
    ],
    ids=["the function that its base uses", "a decorator", "what it imports itself", "what it imports by another name"],
)
def test_a_network_is_known_by(own_files: Path, text: str) -> None:
    (own_files / "own_net.py").write_text(text)
    marks = []
    for factor in (0.5, 0.25, 0.5):
        (own_files / "own_helpers.py").write_text(HELPERS.format(factor))
        marks.append(network_mark())
    assert marks[0] == marks[2] != marks[1]


def test_a_decorator_beside_a_notebooks_class_belongs_to_it() -> None:
    marks = []
    for factor in (0.5, 0.25, 0.5):
        own = typed_in(HELPERS.format(factor) + method(first="pass").replace("    def", "    @scaled\n    def"))
        marks.append(Config.build({"algorithm": own}).digest())
    assert marks[0] == marks[2] != marks[1]


def test_the_folder_of_a_network_is_not_in_its_mark(own_files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = network("import os, own_rates", "own_rates.factor()", "place = os.path.dirname(__file__)")
    (own_files / "own_net.py").write_text(text)
    mark = network_mark()
    moved = own_files / "moved"
    moved.mkdir()
    for name in ("own_net.py", "own_rates.py", "own_package"):
        (own_files / name).replace(moved / name)
    monkeypatch.syspath_prepend(moved)
    assert network_mark() == mark


# the text is that of the code that is loaded --------------------------------------------------------------------------


def test_a_class_from_python_is_known_by_its_files_as_they_were_when_it_was_met(own_files: Path) -> None:
    def config() -> Config:
        forget_own_files()  # as in a new process
        return Config.build({"algorithm": importlib.import_module("own_base").Base()})

    first = config()
    before, path = first.digest(), own_files / "own_package" / "start.py"
    path.write_text("WHOLE = 0.5\n")
    assert first.digest() == before  # the code that trains is the old one
    again = Config.build({"algorithm": sys.modules["own_base"].Base()})
    assert again.digest() == before
    assert config().digest() != before


def test_a_file_that_was_edited_before_its_code_was_met_does_not_stand_for_it(own_files: Path) -> None:
    def digest(text: str) -> str:
        """That of the class as it is now, whose file has another text by the time it is asked for."""
        forget_own_files()
        base = importlib.import_module("own_base").Base
        path.write_text(text)
        return Config.build({"algorithm": base()}).digest()

    path = own_files / "own_rates.py"
    old, new = path.read_text(), "def factor():\n    return 0.25\n"
    fresh = digest(old)
    mixed = digest(new)  # the code is the old one
    assert len({fresh, mixed, digest(new)}) == 3
    assert digest('"""unfinished') not in (fresh, mixed)
    path.write_text(old)
    assert digest(old) == fresh


@pytest.mark.parametrize("kind", ["file", "notebook", "network"])
def test_code_is_another_one_after_a_reload_and_not_after_an_edit_alone(own_files: Path, kind: str) -> None:
    def mark() -> str:
        if kind == "network":
            torch.manual_seed(0)
            return OwnNetwork.of(loaded.Net(64, 10)).fingerprint
        return Config.build({"algorithm": typed_in(text) if kind == "notebook" else loaded.Base()}).digest()

    forget_own_files()
    (own_files / "own_net.py").write_text(network("import own_rates", "own_rates.factor()"))
    text = method("import own_rates", "own_rates.factor()")
    loaded = importlib.import_module("own_net" if kind == "network" else "own_base")
    before, path = mark(), own_files / "own_rates.py"
    path.write_text("# a line\n\ndef factor():\n    return 0.25\n")
    assert mark() == before
    importlib.reload(sys.modules["own_rates"])
    assert mark() != before


def test_a_plugin_is_loaded_anew_with_what_it_imports(own_files: Path) -> None:
    (own_files / "plugin.py").write_text(method("from own_rates import factor", "factor()", decorator=PLUGIN))
    before = digest_of_plugin()
    (own_files / "own_rates.py").write_text("def factor():\n    return 0.25\n")
    old = config_of_plugin()
    assert old.digest() == before
    importlib.reload(sys.modules["own_rates"])
    new = config_of_plugin()
    assert new.digest() != before and type(new.algorithm) is not type(old.algorithm)
    assert config_of_plugin(algorithm=old.algorithm).digest() == new.digest()  # settings take the class that there is
    assert old.digest() == before


def test_a_plugin_is_not_taken_for_another_one_of_the_same_size_and_time(
    own_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    curves = []
    for scale in ("0.5", "0.7"):
        (own_files / "plugin.py").write_text(method(scale=scale, decorator=PLUGIN))
        os.utime(own_files / "plugin.py", (1.5e9, 1.5e9))
        forget_own_files()
        curves.append(askew.run(config_of_plugin(), progress=False).curve("loss"))
    assert curves[0] != curves[1]


def test_a_class_made_by_exec_in_a_file_is_known_by_its_code(own_files: Path) -> None:
    (own_files / "own_maker.py").write_text("def make(text):\n    exec(text, globals())\n    return Own()\n")
    make = importlib.import_module("own_maker").make
    one, two, again = (Config.build({"algorithm": make(method(scale=by))}).digest() for by in ("0.5", "0.25", "0.5"))
    assert one == again != two


def test_a_run_whose_hook_collects_in_a_list_of_its_module_goes_on(own_files: Path) -> None:
    text, rounds = method("LOG = []", first="LOG.append(1)"), list[int]()

    def watch(run: askew.Run, record: Any) -> None:
        rounds.extend([record["round"]] if record else [])
        if record and record["round"] == 1:
            raise KeyboardInterrupt

    for _ in range(2):  # as in two processes
        with suppress(KeyboardInterrupt):
            askew.run(typed_in(text), out=own_files, watch=watch, save_every=0, progress=False, **SMALL)
    assert rounds == [1, 2]


# an edit is never answered with the numbers of the old text -----------------------------------------------------------


def test_another_process_that_read_other_files_trains_nothing(own_files: Path) -> None:
    (own_files / "plugin.py").write_text(method("import own_rates", "own_rates.factor()", decorator=PLUGIN))
    forget_own_files()
    message = configs_message([config_of_plugin()])
    forget_own_files()
    assert [config.name() for config in received_configs(message)] == message["names"]
    (own_files / "own_rates.py").write_text("def factor():\n    return 0.25\n")
    forget_own_files()
    with pytest.raises(ConfigError, match="was edited after this command had read it"):
        received_configs(message)


def test_a_stored_run_says_that_a_file_that_its_plugin_imports_was_edited(own_files: Path) -> None:
    (own_files / "plugin.py").write_text(method("import own_rates", "own_rates.factor()", decorator=PLUGIN))
    forget_own_files()
    run = askew.run(config_of_plugin(), out=own_files, progress=False)
    assert run.folder is not None
    forget_own_files()
    assert askew.load_config(run.folder / "run.toml").name() == run.folder.name
    (own_files / "own_rates.py").write_text("def factor():\n    return 0.25\n")
    forget_own_files()
    with pytest.warns(StoreWarning, match="import has changed since this run was begun, so own-.* is another run"):
        assert askew.load_config(run.folder / "run.toml").name() != run.folder.name
    forget_own_files()
    with pytest.warns(StoreWarning, match="import has changed since this run was trained"):
        conformal([askew.load(run.folder)], trust=True)


def test_a_file_that_a_plugin_does_not_find_is_asked_for(own_files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (own_files / "plugin.py").write_text(method("import own_absent", decorator=PLUGIN))
    assert main(["run", "--plugin", "plugin.py", "--out", str(own_files)]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "No module named 'own_absent'; name its folder in the environment variable PYTHONPATH" in said
