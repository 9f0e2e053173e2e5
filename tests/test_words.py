"""The words that people try first: they work, or a sentence says what to write."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

import askew
from askew.algorithms import FedProx
from askew.cli.main import main
from askew.experiment.toml import parse_value

SMALL: dict[str, Any] = {"rounds": 1, "clients": 3, "model": "softmax"}


def test_common_words_in_python_are_settings() -> None:
    words = askew.run(method="fedprox", mu=0.1, lr=0.05, epochs=2, batch_size=16, device="cpu", **SMALL)
    local = {"lr": 0.05, "epochs": 2, "batch": 16}
    tables = askew.run("fedprox", mu=0.1, local=local, engine={"device": "cpu"}, **SMALL)
    assert words.config == tables.config and words.config["local"]["batch"] == 16
    assert words.curve("accuracy") == tables.curve("accuracy")


def test_a_method_replaces_the_one_of_a_configuration() -> None:
    tables = {"seed": 3, "algorithm": {"name": "fedprox", "mu": 0.5}}
    for method in ("fedprox", FedProx()):
        run = askew.run(tables, method=method, **SMALL)
        assert run.config["seed"] == 3 and run.config["algorithm"]["mu"] == FedProx().mu


def test_options_of_run_are_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file.toml").write_text('rounds = 7\n[algorithm]\nname = "feddyn"\nalpha = 0.5\n[model]\nname = "softmax"\n')
    options = "--method fedprox --rounds 1 --lr .05 --epochs 2 --batch-size 16 --seed 4 --device cpu"
    words = ["run", "file.toml", *options.split(), "--set", "algorithm.mu=.25", "--quiet"]
    assert main(words) == 0
    stored = tomllib.loads(next(Path("runs").glob("fedprox-digits-seed4-*/run.toml")).read_text())
    assert (stored["rounds"], stored["seed"], stored["algorithm"]["mu"]) == (1, 4, 0.25)
    assert (stored["local"]["lr"], stored["local"]["epochs"], stored["local"]["batch"]) == (0.05, 2, 16)
    assert stored["engine"]["device"] == "cpu"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("scaffold", "no file 'scaffold'; to train by the method scaffold, type askew run --method scaffold."),
        ("Scafold", "no file 'Scafold'; to train by the method scaffold, type askew run --method scaffold."),
        ("scaffold.toml", "no file 'scaffold.toml'; name a TOML file"),
        ("--set lr=0.1", "unknown setting 'lr'; write local.lr;"),
        ("--set batch_size=3", "unknown setting 'batch_size'; write local.batch;"),
        ("--set momentm=0.9", "unknown setting 'momentm'; write local.momentum;"),
        ("--set method=fedprox", "unknown setting 'method'; write algorithm.name;"),
        ("--set roundz=3", "unknown setting 'roundz'; did you mean 'rounds'?"),
        ("--set algorithm.momentum=0.9", "FedAvg: unknown setting algorithm.momentum (there is local.momentum);"),
        ("--set engine.lr=0.9", "unknown setting engine.lr (there is local.lr);"),
        ("--set algorithm.name=3 --set lr=1", "unknown setting 'lr'; write local.lr;"),
    ],
)
def test_a_word_that_is_none_is_answered_with_the_setting(
    words: str, sentence: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", *words.split()]) == 2
    err = capsys.readouterr().err
    assert sentence in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"seeds": [0, 1]}, r"one seed; for several write askew.sweep"),
        ({"num_rounds": 3}, r"unknown setting algorithm.num_rounds \(there is rounds\)"),
        ({"weight_decay": 0.1}, r"\(there is local.weight_decay\)"),
        ({"what": "fedavg", "method": "fedprox"}, "both name a method"),
    ],
)
def test_a_keyword_that_is_none_is_answered_with_the_setting(words: dict[str, Any], sentence: str) -> None:
    with pytest.raises(askew.errors.ConfigError, match=sentence):
        askew.run(**words)


@pytest.mark.parametrize("words", [["-h"], ["help"], ["run", "-h"], ["help", "run"], ["data", "get", "-h"]])
def test_help_is_there_under_its_other_names(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    shown = capsys.readouterr().out
    plain = [*(word for word in words if word not in ("-h", "help")), "--help"]
    assert main(plain) == 0
    assert shown == capsys.readouterr().out and "Usage: askew" in shown


def test_short_numbers_are_numbers() -> None:
    texts = {".05": 0.05, "-.5": -0.5, "5.": 5.0, ".5e-3": 0.0005, "0.1": 0.1, "3": 3}
    assert {text: parse_value(text) for text in texts} == texts
    assert [parse_value(text) for text in (".", "..", ".x", "e5", "v.5")] == [".", "..", ".x", "e5", "v.5"]
