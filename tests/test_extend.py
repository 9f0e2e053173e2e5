"""A longer run begins where a shorter one ended, bit for bit; a run keeps its plugins; changed data are noticed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import askew
from askew.algorithms import algorithms
from askew.cli.main import main
from askew.errors import StoreError, StoreWarning
from askew.experiment import extend
from askew.experiment.config import CHOICES, load_config
from askew.experiment.run_folder import stored_model
from askew.report.tables import labels

SMALL: dict[str, Any] = {
    "data": {"name": "synthetic", "dim": 6, "samples": 30},
    "partition": {"name": "natural", "clients": 5},
    "participation": {"name": "uniform", "fraction": 0.5},
    "model": {"name": "softmax"},
    "engine": {"name": "sequential"},
}


def records(run: askew.Run) -> list[dict[str, Any]]:
    """The stored records, but for times."""
    assert run.folder is not None
    lines = (run.folder / "rounds.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in ("seconds", "checksum")} for line in lines]


def same(one: askew.Run, other: askew.Run) -> bool:
    """Have two runs the same records and the same stored model, bit for bit?"""
    assert one.folder and other.folder
    models = stored_model(one.folder), stored_model(other.folder)
    equal = all(torch.equal(models[0][name], models[1][name]) for name in models[0] | models[1])
    return records(one) == records(other) and equal


def trained(counts: list[int]) -> Any:
    """A function for `watch` that notes the rounds that are trained."""
    return lambda run, record: counts.append(record["round"]) if record else None


# server state, client state, memory rows, an exchange before training, and noise that is counted; records of rounds
# that are evaluated only because they are the last
@pytest.mark.parametrize(
    "tables",
    [
        {"algorithm": {"name": "fedavg"}, "evaluation": {"every": 4, "spread": True, "descent": True}},
        {"algorithm": {"name": "scaffold"}, "local": {"decay": 0.9, "momentum": 0.5}},
        {"algorithm": {"name": "feddyn"}},
        {"algorithm": {"name": "fedvarp"}, "evaluation": {"drift": True}},
        {"algorithm": {"name": "fedga"}},
        {"algorithm": {"name": "fedadam"}},
        {"algorithm": {"name": "fedavg", "weighting": "uniform"}, "privacy": {"clip": 1.0, "noise": 0.5}},
    ],
    ids=lambda tables: tables["algorithm"]["name"] + "-private" * ("privacy" in tables),
)
def test_more_rounds_continue_a_finished_run_bit_for_bit(tables: dict[str, Any], tmp_path: Path) -> None:
    tables, rounds = SMALL | tables, list[int]()
    short = askew.run(tables, rounds=3, out=tmp_path / "runs")
    before = (short.folder / "rounds.jsonl").read_bytes() if short.folder else b""
    long = askew.run(tables, rounds=5, out=tmp_path / "runs", watch=trained(rounds))
    assert rounds == [4, 5] and long.facts["extends"] == short.name
    assert same(long, askew.run(tables, rounds=5, out=tmp_path / "alone"))
    assert short.folder and (short.folder / "rounds.jsonl").read_bytes() == before  # the shorter run stays as it is


@pytest.mark.skipif(os.environ.get("ASKEW_LONG") != "all", reason="takes minutes; ASKEW_LONG=all runs it")
@pytest.mark.parametrize("name", list(algorithms))
def test_every_method_continues_a_finished_run(name: str, tmp_path: Path) -> None:
    tables = SMALL | {"algorithm": {"name": name}}
    if name == "fedalign":  # which needs a network with hidden layers
        data = {"data": {"name": "digits"}, "partition": {"name": "dirichlet", "clients": 6}}
        tables |= data | {"model": {"name": "cnn", "norm": "batch"}}
    test_more_rounds_continue_a_finished_run_bit_for_bit(tables, tmp_path)


def test_all_rounds_are_trained_where_the_first_ones_depend_on_their_number(tmp_path: Path) -> None:
    tables, rounds = SMALL | {"local": {"schedule": "cosine"}}, list[int]()
    askew.run(tables, rounds=2, out=tmp_path / "runs")
    with pytest.warns(StoreWarning, match=r'"cosine" every learning rate depends on the number of rounds, so all'):
        long = askew.run(tables, rounds=3, out=tmp_path / "runs", watch=trained(rounds))
    assert rounds == [1, 2, 3] and same(long, askew.run(tables, rounds=3, out=tmp_path / "alone"))


def test_fewer_rounds_are_another_run_and_the_longer_one_is_named(tmp_path: Path) -> None:
    long = askew.run(SMALL, rounds=3, out=tmp_path)
    with pytest.warns(StoreWarning, match=f"{long.name} holds the same run with 3 rounds, and begins with those"):
        short = askew.run(SMALL, rounds=2, out=tmp_path)
    assert records(short) == records(long)[:2]


def test_a_state_that_is_too_large_is_not_kept_and_fresh_begins_at_the_first_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: list[int] = []
    askew.run(SMALL, rounds=1, out=tmp_path)
    askew.run(SMALL, rounds=2, out=tmp_path, fresh=True, watch=trained(rounds))
    monkeypatch.setattr(extend, "LARGEST_END", 10)
    askew.run(SMALL, rounds=2, out=tmp_path, fresh=True)
    with pytest.warns(StoreWarning, match="was too large to be kept, so all rounds are trained"):
        askew.run(SMALL, rounds=3, out=tmp_path, watch=trained(rounds))
    assert rounds == [1, 2, 1, 2, 3]


# plugins --------------------------------------------------------------------------------------------------------

METHOD = """import askew
from askew.algorithms import FedAvg
@askew.register("mine")
class Mine(FedAvg):
    def aggregate(self, w, up, cohort, server):
        return w + {scale} * (cohort.p @ up["delta"]), server
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A plugin in a folder of its own, which is the current one."""
    for registry in CHOICES.values():
        monkeypatch.setattr(registry, "members", dict(registry.members))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    path = tmp_path / "work" / "mine.py"
    path.write_text(METHOD.format(scale=0.5))
    return path


def run_plugin(out: Path, **overrides: Any) -> askew.Run:
    """A run with the plugin mine.py of the current folder."""
    tables = SMALL | {"plugins": ["mine.py"], "algorithm": {"name": "mine"}, "rounds": 1} | overrides
    return askew.run(tables, out=out)


def test_a_run_keeps_its_plugin_and_goes_on_with_it_anywhere(
    plugin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = run_plugin(tmp_path / "runs")
    assert first.folder and (first.folder / "plugins" / "mine.py").read_text() == METHOD.format(scale=0.5)
    plugin.write_text(METHOD.format(scale=2.0))
    monkeypatch.chdir(tmp_path)
    moved = tmp_path / "elsewhere" / first.folder.name
    shutil.move(first.folder, moved)
    assert main(["run", str(moved / "run.toml"), "--out", str(moved.parent), "--fresh", "--quiet"]) == 0
    said = capsys.readouterr().err
    assert f"{plugin} has changed since this run was begun; the run's own copy of it is used" in " ".join(said.split())
    assert [run.name for run in map(askew.load, moved.parent.iterdir())] == [first.name]
    assert [record["loss"] for record in askew.load(moved).rounds] == [record["loss"] for record in first.rounds]
    (moved / "plugins" / "mine.py").write_text("import os")
    assert main(["run", str(moved / "run.toml"), "--out", str(moved.parent)]) == 2
    assert "not as askew wrote it" in capsys.readouterr().err


def test_a_plugin_is_found_beside_the_file_that_names_it(
    plugin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (plugin.parent / "mine.toml").write_text('plugins = ["mine.py"]\nalgorithm.name = "mine"\n')
    monkeypatch.chdir(tmp_path)
    assert load_config("work/mine.toml").algorithm.display_name() == "Mine"


def test_an_edit_during_a_run_changes_neither_its_name_nor_what_is_kept(plugin: Path, tmp_path: Path) -> None:
    tables = SMALL | {"plugins": ["mine.py"], "algorithm": {"name": "mine"}, "rounds": 2}

    def edit(run: askew.Run, record: Any) -> None:
        plugin.write_text(METHOD.format(scale=3.0))

    run = askew.run(tables, out=tmp_path / "runs", watch=edit, save_every=0)
    assert run.folder and "0.5" in (run.folder / "plugins" / "mine.py").read_text() and run.finished


def test_runs_of_an_edited_plugin_have_a_row_each(plugin: Path, tmp_path: Path) -> None:
    runs = [run_plugin(tmp_path / "runs", seed=seed) for seed in (0, 1)]
    plugin.write_text(METHOD.format(scale=2.0))
    later = run_plugin(tmp_path / "runs")
    names = labels([*runs, later])
    assert len(names) == len(set(names)) == 2 and all(name.startswith("mine (") for name in names)
    for run, edited in ((runs[0], "10:31"), (runs[1], "10:31"), (later, "10:42")):
        run.facts["plugins"][0]["edited"] = f"2026-11-17 {edited}:05"
    assert labels([*runs, later]) == ["mine (edited 10:31)", "mine (edited 10:42)"]
    for run in (*runs, later):
        del run.facts["origins"]  # as in runs that do not tell: their folders' names do
    assert labels([*runs, later]) == ["mine (edited 10:31)", "mine (edited 10:42)"]


DATA = """import askew, numpy, torch
from askew.data.dataset import Dataset, Samples, Source
@askew.register("sheet")
class Sheet(Source):
    def load(self, seed, clients):
        x = torch.from_numpy(numpy.load("sheet.npy"))
        samples = Samples(x, (x[:, 0] > 0).long())
        return Dataset(samples, samples, classes=2)
"""


def test_changed_data_of_a_plugin_are_never_already_finished(plugin: Path, tmp_path: Path) -> None:
    import numpy as np

    plugin.write_text(DATA)
    x = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)
    np.save("sheet.npy", x)
    tables: dict[str, Any] = {"plugins": ["mine.py"], "data": {"name": "sheet"}, "partition": {"clients": 3}}
    tables |= {"algorithm": {"name": "fedavg"}, "model": {"name": "softmax"}}
    first = run_plugin(tmp_path, **tables)
    assert records(run_plugin(tmp_path, **tables)) == records(first)  # nothing has changed
    np.save("sheet.npy", -x)
    with pytest.raises(StoreError, match=r"the data have changed since .* use --fresh"):
        run_plugin(tmp_path, **tables)
    with pytest.raises(StoreError, match="the data have changed since"):
        run_plugin(tmp_path, **tables | {"rounds": 2})
