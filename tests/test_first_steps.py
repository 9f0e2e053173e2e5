"""What newcomers get wrong: one sentence, exit code 2, and nothing lost."""

from __future__ import annotations

from pathlib import Path

import pytest

import askew
from askew.cli.main import main
from askew.errors import ConfigError
from askew.experiment import cores


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
