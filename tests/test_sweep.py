"""Sweeps: which runs a grid spans, and that runs which share an engine are the runs they would be alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import askew
from askew.cli.main import main
from askew.data.federation import LocalSettings
from askew.errors import ConfigError, Remark
from askew.experiment.api import sweep_configs
from askew.experiment.config import Config
from askew.experiment.launch import run_all, run_config
from askew.experiment.run import run_together
from askew.experiment.store import load_all
from askew.experiment.sweep import grid, load_sweep

TINY: dict[str, Any] = {
    "rounds": 3,
    "partition": {"clients": 6},
    "participation": {"cohort": 3},
    "model": {"name": "mlp", "hidden": [6]},
    "engine": {"name": "slots", "dtype": "float64", "device": "cpu"},
}


def records(run: askew.Run) -> list[dict[str, object]]:
    return [{k: v for k, v in r.items() if k != "seconds"} for r in run.rounds]


def test_a_grid_is_every_combination_once_in_order() -> None:
    configs = grid(
        TINY,
        {"local.lr": [0.1, 0.2], "seed": [0, 1, 1], "algorithm": [{"name": "fedavg"}, {"name": "fedprox", "mu": 0.5}]},
    )
    found = [(c.local.lr, c.seed, type(c.algorithm).__name__) for c in configs]
    assert found == [(lr, seed, name) for lr in (0.1, 0.2) for seed in (0, 1) for name in ("FedAvg", "FedProx")]
    assert grid(TINY, {}) == [Config.build(TINY)]


def test_a_setting_is_tried_where_it_exists() -> None:
    """mu is FedProx's, and given for all of them; lr of the local steps is everybody's, an unknown one nobody's."""
    spans = {"algorithm.name": ["fedavg", "fedprox", "feddyn"], "algorithm.mu": [0.01, 0.1]}
    with pytest.warns(Remark, match=r"algorithm\.mu is tried only where it exists: fedavg and feddyn have no such"):
        configs = grid(TINY, spans)
    found = [(type(c.algorithm).__name__, c.algorithm.table().get("mu")) for c in configs]
    assert found == [("FedAvg", None), ("FedProx", 0.01), ("FedProx", 0.1), ("FedDyn", None)]
    with pytest.warns(Remark, match=r"partition\.alpha is tried only where it exists: iid has no such"):
        configs = grid(TINY | {"partition": {"clients": 6, "alpha": 1.0}}, {"partition.name": ["iid", "dirichlet"]})
    assert [c.partition.table().get("alpha") for c in configs] == [None, 1.0]
    with pytest.raises(ConfigError, match="unknown setting"):
        grid(TINY, {"algorithm.name": ["fedavg", "feddyn"], "algorithm.mu": [0.1]})
    with pytest.warns(Remark, match=r"time\.deadline is tried only where it exists: time\.wait = all has no such"):
        configs = grid(TINY | {"time": {"deadline": 2.0}}, {"time.wait": ["all", "deadline"]})
    assert [(c.time.wait, c.time.deadline) for c in configs] == [("all", 0.0), ("deadline", 2.0)]


def test_a_methods_setting_is_swept_under_its_own_name() -> None:
    configs = sweep_configs("fedprox", {"mu": [0.1, 0.5]}, None, {"clients": 6})
    assert [c.algorithm.table()["mu"] for c in configs] == [0.1, 0.5]
    with pytest.warns(Remark, match="algorithm.mu is tried only where it exists: fedavg has no such setting"):
        configs = sweep_configs(None, {"method": ["fedavg", "fedprox"], "mu": [0.1, 0.5]}, None, {"clients": 6})
    assert [c.algorithm.table().get("mu") for c in configs] == [None, 0.1, 0.5]


def test_a_file_and_the_command_line_span_together(tmp_path: Path) -> None:
    file = tmp_path / "grid.toml"
    file.write_text(
        'rounds = 2\n[sweep]\n"local.lr" = [0.1, 0.2]\npartition.alpha = [1.0]\n'
        '[sweep.algorithm]\nname = ["fedavg", "feddyn"]\n'
    )
    configs = load_sweep(file, ["rounds=4"], ["seed=3,4", "participation.name=uniform,full"])
    assert len(configs) == 2 * 2 * 2 * 2 and {c.rounds for c in configs} == {4} and {c.seed for c in configs} == {3, 4}
    assert {c.partition.table()["alpha"] for c in configs} == {1.0}
    with pytest.raises(ConfigError, match="askew sweep"):
        askew.run(file)


@pytest.mark.parametrize(
    ("over", "says"),
    [
        ("local.lr", "takes key=value"),
        ("=1", "takes key=value"),
        ("seed=", "takes key=value"),
        ("seed.x=1", "single value"),
    ],
)
def test_wrong_spans_are_refused(over: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("seed = 1\n")
    with pytest.raises(ConfigError, match=says):
        load_sweep(file, (), [over])


def test_single_settings_have_options_as_in_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--method fedprox --rounds 1 --lr .05 --epochs 1 --batch-size 30 --set algorithm.mu=0.5 --over seed=0,1"
    assert main(["sweep", *words.split(), "--out", str(tmp_path)]) == 0
    capsys.readouterr()
    runs = load_all([tmp_path])
    assert sorted(run.config["seed"] for run in runs) == [0, 1]
    for run in runs:
        local, method = run.config["local"], run.config["algorithm"]
        assert (method["name"], method["mu"], len(run.rounds)) == ("fedprox", 0.5, 1)
        assert (local["lr"], local["epochs"], local["batch"]) == (0.05, 1, 30)


def test_a_span_must_be_a_list() -> None:
    with pytest.raises(ConfigError, match=r"local\.lr must be a list"):
        grid(TINY, {"local.lr": 0.1})
    with pytest.raises(ConfigError, match="at most 100,000"):
        grid(TINY, {"seed": list(range(1000)), "local.lr": [0.1] * 101})


@pytest.mark.parametrize(
    "method",
    [
        "scaffold",
        *(pytest.param(m, marks=pytest.mark.slow) for m in ("moon", "fedavg", "fedga", "lossbias", "fedpdc", "fedbn")),
    ],
)
def test_runs_that_share_slots_are_the_runs_they_are_alone(method: str) -> None:
    """Other rates, seeds and hyper-parameters beside them only change how far a batch is padded, hence roundings."""
    spans: dict[str, Any] = {
        "seed": [0, 1],
        "local.lr": [0.05, 0.2],
        "algorithm": [{"name": method}, {"name": "fedprox", "mu": 0.3}],
    }
    configs = grid(TINY, spans)
    together = run_together(configs)
    for config, run in zip(configs, together, strict=True):
        alone = run_config(config)
        assert all(torch.allclose(run.model[n], v, rtol=0, atol=1e-13) for n, v in alone.model.items())
        assert [r["participants"] for r in run.rounds] == [r["participants"] for r in alone.rounds]
        assert run.best_accuracy == alone.best_accuracy


def test_runs_that_share_an_evaluator_may_have_other_clients() -> None:
    """FedBN's accuracy is a mean over the clients of the run, and not over those of the first run of the sweep."""
    model = {"name": "mlp", "hidden": [6], "norm": "batch"}
    partitions = [{"name": "iid", "clients": 20}, {"name": "dirichlet", "clients": 20, "alpha": 0.01, "min_size": 0}]
    configs = grid(TINY | {"rounds": 1, "model": model, "algorithm": {"name": "fedbn"}}, {"partition": partitions})
    for config, run in zip(configs, run_together(configs), strict=True):
        assert [r["loss"] for r in run.rounds] == pytest.approx([r["loss"] for r in run_config(config).rounds])


@pytest.mark.parametrize("engine", ["slots", "stacked"])
def test_runs_that_share_an_engine_may_have_other_labels(engine: str) -> None:
    """An attack flips labels in one run; the inputs beside them are the same tensor."""
    tiny = TINY | {"rounds": 1, "engine": TINY["engine"] | {"name": engine}}
    configs = grid(tiny, {"attack": [{"name": "none"}, {"name": "label_flip", "fraction": 1.0}]})
    losses = [run.rounds[0]["train_loss"] for run in run_together(configs)]
    assert losses == pytest.approx([run_config(config).rounds[0]["train_loss"] for config in configs], rel=1e-12)


def test_runs_of_unequal_length_end_each_in_its_time(tmp_path: Path) -> None:
    configs = [
        Config.build({**TINY, "rounds": n, "local": LocalSettings(batch=b).table()})
        for n, b in ((1, 8), (4, 32), (2, 0))
    ]
    runs = run_together(configs, tmp_path)
    assert [len(run.rounds) for run in runs] == [1, 4, 2] and all(run.finished for run in runs)
    again = list(run_all(configs, tmp_path))
    assert [records(run) for run in again] == [records(run) for run in runs]
