"""`askew doctor`: what it finds, and that nothing which is missing or broken ends it."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

import askew
from askew.cli.main import main
from askew.experiment import doctor
from askew.kernels.cpu import compiler


@pytest.fixture
def findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs `askew doctor --json` in an empty folder; returns its exit code and what it found, by topic and name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ASKEW_DATA", str(tmp_path / "data"))

    def examine(*options: str) -> tuple[int, dict[str, dict[str, str]]]:
        code = main(["doctor", "--json", *options])
        return code, {f"{each['topic']} {each['name']}": each for each in json.loads(capsys.readouterr().out)}

    return examine


def test_it_says_what_a_run_says(findings: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = askew.run(rounds=1, out="runs")
    code, found = findings()
    assert code == 0
    engine = found["engine default configuration"]["found"]
    assert engine == f"{run.facts['engine']}: {run.facts['reason']}"
    assert found["engine device"]["found"] == run.facts["device"]
    assert found["folders runs"]["found"].startswith(f"{tmp_path / 'runs'}: 1 run, ")
    assert found["folders data"]["found"].startswith(f"{tmp_path / 'data'}: is made when it is needed")
    assert found["folders datasets"]["advice"].startswith("askew data get ")
    assert all(each["advice"] for each in found.values() if each["state"] != "ok")
    assert main(["doctor"]) == 0
    assert "all that simulations need is there" in capsys.readouterr().out


def test_a_folder_that_cannot_be_written_is_broken(findings: Any) -> None:
    Path("taken").write_text("")
    code, found = findings("--out", "taken")
    assert code == 1 and found["folders runs"]["state"] == "broken" and "--out" in found["folders runs"]["advice"]


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="there is no /proc")
def test_a_folder_is_tried_and_not_only_its_permissions_are_read(findings: Any) -> None:
    code, found = findings("--out", "/proc/x")
    assert code == 1 and found["folders runs"]["found"] == "/proc/x: cannot be written"
    assert findings("--out", "new/runs")[1]["folders runs"]["state"] == "ok" and not list(Path().glob("**/.askew-*"))


def test_a_needed_library_is_broken_and_an_optional_one_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(doctor, "version", absent)
    needed = doctor.find_library("numpy", ">=1.26", None)
    assert (needed.state, needed.advice) == ("broken", "pip install 'numpy>=1.26'")
    optional = doctor.find_library("flwr", "<1.42,>=1.41", "flower")
    assert (optional.state, optional.advice) == ("missing", "pip install 'askew[flower]'")
    monkeypatch.setattr(doctor, "version", lambda name: "1.42.0")
    assert doctor.find_library("flwr", "<1.42,>=1.41", "flower").state == "missing"


@pytest.mark.parametrize(
    ("found", "wanted", "fit"),
    [
        *(
            ("2.10.0", ">=2.9", True),
            ("2.9.1", ">=2.10", False),
            ("2.13.0+cpu", ">=2.10", True),
            ("13", ">=13.0", True),
        ),
        *(("1.41.0", "<1.42,>=1.41", True), ("1.42.0", "<1.42,>=1.41", False), ("0.6.0rc1", "", True)),
    ],
)
def test_versions_are_compared_as_numbers(found: str, wanted: str, fit: bool) -> None:
    assert doctor.fits(found, wanted) is fit


def test_no_compiler_is_no_obstacle(findings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    compiler.compiler.cache_clear()
    try:
        code, found = findings()
    finally:
        compiler.compiler.cache_clear()
    assert code == 0 and found["kernels compiler"]["state"] == "missing"
    assert "install gcc or clang" in found["kernels compiler"]["advice"]


def test_a_compiler_that_does_not_compile_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "false")
    caches = (compiler.compiler, compiler._library)
    for each in caches:
        each.cache_clear()
    try:
        found = {each.name: each for each in doctor.find_compiler()}
    finally:
        for each in caches:
            each.cache_clear()
        compiler.errors.clear()
    assert found["C"].state == "missing" and "do not compile: false ended with 1" in found["C"].found


def test_without_torch_it_says_so(tmp_path: Path) -> None:
    source = str(Path(askew.__file__).parents[1])
    code = f"import sys; sys.path.insert(0, {source!r}); sys.modules['torch'] = None\n"
    code += "from askew.cli.main import main; sys.exit(main(['doctor', '--json']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    broken = [each for each in json.loads(done.stdout) if each["state"] == "broken"]
    assert broken and all("torch" in each["found"] for each in broken)
