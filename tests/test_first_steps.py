"""What newcomers get wrong: one sentence, exit code 2, and nothing lost."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import askew
from askew.cli.main import main
from askew.errors import ConfigError
from askew.experiment import cores
from askew.experiment.api import OwnNetwork
from askew.experiment.config import Config
from askew.experiment.plugins import plugin_module
from askew.experiment.value_text import is_library_module


def test_a_plugin_without_a_word_registers_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.py").write_text("")
    assert main(["run", "--plugin", str(tmp_path / "empty.py"), "--out", str(tmp_path)]) == 2
    assert "registers nothing" in capsys.readouterr().err


def test_a_key_that_is_swept_twice_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["sweep", "--over", "local.lr=0.1", "--over", "local.lr=0.2", "--out", str(tmp_path)]
    assert main(command) == 2 and "--over has local.lr twice" in capsys.readouterr().err


def test_a_bench_with_more_processes_than_cores_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(cores.MANY, raising=False)
    monkeypatch.setattr(cores, "own_cores", lambda: 2)
    assert main(["bench", "--workers", "100"]) == 2 and "can stop the machine" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("seconds=1e308", "seconds must be"),
        ("up=1e-320", "never ends; give it fewer seconds a sample, or raise time.up"),
    ],
)
def test_an_answer_that_never_comes_is_refused(
    setting: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["run", "--rounds", "2", "--set", "time.wait=all", "--set", f"time.{setting}", "--out", str(tmp_path)]
    assert main(command) == 2 and said in capsys.readouterr().err


def test_an_empty_dictionary_is_no_data() -> None:
    with pytest.raises(ConfigError, match="an empty dictionary"):
        askew.run("fedavg", data={}, rounds=1)


def test_another_tune_keeps_the_plan_of_the_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also one that is refused; and asked again, the first is found."""
    first = ["tune", "--methods", "fedavg", "--over", "local.lr=0.1,0.3", "--rounds", "2", "--seeds", "1"]
    first += ["--out", str(tmp_path)]
    assert main(first) == 0
    plan = (tmp_path / "tune.json").read_text()
    assert main(["tune", "--methods", "fedavg", "--set", "local.lr=-3", "--out", str(tmp_path)]) == 2
    [kept] = tmp_path.glob("tune-*.json")
    assert kept.read_text() == plan
    assert main(first) == 0
    assert (tmp_path / "tune.json").read_text() == plan


def test_a_plugin_that_registers_what_it_imports_alone_is_told_what_to_do(
    own_files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plugin = own_files / "plugin.py"
    plugin.write_text("import askew\nfrom own_base import Base\naskew.register('own')(Base)\n")
    assert main(["run", "--plugin", str(plugin), "--out", str(own_files)]) == 2
    assert "registers Base of own_base, whose text" in capsys.readouterr().err


@pytest.fixture
def own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder from which a plugin imports a file, which imports another one; they are forgotten afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
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
    for name in [name for name in sys.modules if name.startswith("own_")]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("file", "is_another"), [("own_base", True), ("own_package/start", True), ("own_plots", False)]
)
def test_a_run_is_another_one_if_a_file_that_its_plugin_imports_was_edited(
    own_files: Path, file: str, is_another: bool
) -> None:
    plugin = own_files / "plugin.py"
    plugin.write_text("import askew\nfrom own_base import Base\n@askew.register('own')\nclass Own(Base): pass\n")

    def digest() -> str:
        forget_own_files()  # as in a new process
        sys.modules.pop(plugin_module(str(plugin)), None)
        return Config.build({"plugins": [str(plugin)], "algorithm": {"name": "own"}}).digest()

    before = digest()
    path = own_files / f"{file}.py"
    path.write_text(path.read_text() + "\n# edited\n")
    assert (digest() != before) is is_another


def test_a_class_from_python_is_known_by_its_files_as_they_were_when_it_was_met(own_files: Path) -> None:
    def config() -> Config:
        forget_own_files()  # as in a new process
        return Config.build({"algorithm": importlib.import_module("own_base").Base()})

    first = config()
    before, path = first.digest(), own_files / "own_package" / "start.py"
    path.write_text("WHOLE = 0.5\n")
    assert first.digest() == before  # the code that trains is the old one
    assert config().digest() != before


@pytest.mark.parametrize("folder", ["/usr/lib/python3/dist-packages", "/home/me/.venv/lib/python3.12/site-packages"])
def test_installed_packages_are_no_files_of_ones_own(folder: str) -> None:
    module = ModuleType("some_library")
    assert not is_library_module(module)
    module.__file__ = f"{folder}/some_library/__init__.py"
    assert is_library_module(module)


def test_a_network_is_another_one_if_what_it_uses_of_another_file_was_edited(own_files: Path) -> None:
    (own_files / "own_net.py").write_text(
        "import own_rates, own_package.numbers\nfrom torch import nn\nclass Net(nn.Linear):\n"
        "    def forward(self, x):\n"
        "        return own_rates.factor() * own_package.numbers.HALF * super().forward(x.flatten(1))\n"
    )

    def mark() -> str:
        forget_own_files()  # as in a new process
        torch.manual_seed(0)
        return OwnNetwork.of(importlib.import_module("own_net").Net(64, 10)).fingerprint

    marks = [mark()]
    (own_files / "own_rates.py").write_text("def factor():\n    return 0.25\n")
    marks.append(mark())
    (own_files / "own_package" / "numbers.py").write_text("HALF, UNUSED = 0.125, 1\n")
    marks.append(mark())
    (own_files / "own_package" / "numbers.py").write_text("HALF, UNUSED = 0.125, 2\n")
    assert len({*marks}) == 3 and mark() == marks[-1]
