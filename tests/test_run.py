"""Configurations, run folders and `askew.run`: what is stored, what is read back, what a user may hand in."""

from __future__ import annotations

import copy
import ctypes
import gc
import importlib.util
import json
import os
import sys
import tomllib
import types
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

import askew
from askew.algorithms import FedAvg, FedProx, algorithms
from askew.data import Natural, Synthetic
from askew.data.federation import Federation, LocalSettings
from askew.engine.server import Server
from askew.errors import ConfigError, EngineError, ModelError, StoreError
from askew.experiment import checkpoint, folder_lock, process_tuning
from askew.experiment.api import OwnData, OwnNetwork
from askew.experiment.build import build
from askew.experiment.config import Config, load_config, set_key
from askew.experiment.extend import end_file
from askew.experiment.folder_lock import lock_folder
from askew.experiment.run import ActiveRun, run_together
from askew.experiment.store import append_lines, load, read_rounds, write_text
from askew.experiment.sweep import load_sweep

TINY = {
    "rounds": 3,
    "model": {"name": "softmax"},
    "partition": {"clients": 10},
    "participation": {"cohort": 3},
    "local": {"lr": 0.1},
}


def records(run: askew.Run) -> list[dict[str, object]]:
    return [{k: v for k, v in r.items() if k != "seconds"} for r in run.rounds]


# configuration --------------------------------------------------------------------------------------------------


def test_the_stored_toml_reads_back_as_the_same_configuration() -> None:
    config = Config.build(
        {**TINY, "algorithm": {"name": "feddpc", "max_ratio": 4}, "data": {"name": "synthetic", "beta": 0.5}}
    )
    again = Config.build(tomllib.loads(config.toml()))
    assert again == config and again.name() == config.name()
    assert config.tables()["partition"]["name"] == "natural"  # what comes divided among clients stays so


def test_another_method_of_a_stored_run_has_its_own_defaults(tmp_path: Path) -> None:
    tables, stored = {**TINY, "participation": {}}, tmp_path / "run.toml"
    (tmp_path / "rounds.jsonl").touch()
    stored.write_text(Config.build(tables).toml())  # with every default
    assert load_config(stored) == Config.build(tables)
    chosen = {"algorithm": {"name": "scaffold"}, "participation": {"name": "full"}}  # SCAFFOLD weighs all alike
    config = load_config(stored, ["algorithm.name=scaffold", "participation.name=full"])
    assert config == Config.build({**tables, **chosen})
    (swept,) = load_sweep(stored, ["participation.name=full"], ["algorithm.name=scaffold"])
    assert swept == config
    stored.write_text(Config.build({**tables, "algorithm": {"name": "fedprox", "mu": 0.5}}).toml())
    with pytest.raises(ConfigError, match=r"unknown setting algorithm\.mu"):  # which somebody has set
        load_config(stored, ["algorithm.name=scaffold"])


def test_every_setting_of_a_run_is_stored_and_changes_the_name() -> None:
    base = Config.build(TINY)
    tables = base.tables()
    assert list(tables) == [
        "seed",
        "rounds",
        "data",
        "partition",
        "participation",
        "model",
        "algorithm",
        "local",
        "evaluation",
        "engine",
    ]
    assert set(tables["local"]) == {
        "epochs",
        "steps",
        "batch",
        "drop_last",
        "lr",
        "momentum",
        "weight_decay",
        "clip",
        "decay",
        "schedule",
    }
    assert set(tables["engine"]) == {"name", "device", "workers", "dtype", "compile", "deterministic"}
    changes = [
        {"seed": 1},
        {"rounds": 4},
        {"local": {"lr": 0.2}},
        {"algorithm": {"server_scale": 2.0}},
        {"data": {"name": "synthetic"}},
    ]
    names = {Config.build({**TINY, **change}).name() for change in changes}
    assert len(names | {base.name()}) == len(changes) + 1
    assert Config.build(TINY).name() == base.name()


def test_overrides_are_toml_values_or_plain_words(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text('seed = 1\n[algorithm]\nname = "fedavg"\n[local]\nlr = 0.5\n')
    config = load_config(
        file,
        [
            "local.lr=0.25",
            "algorithm.name=fedprox",
            "algorithm.mu=1e-1",
            "model.hidden=[8, 4]",
            "evaluation.spread=true",
        ],
    )
    assert config.seed == 1 and config.local.lr == 0.25 and config.evaluation.spread
    assert isinstance(config.algorithm, FedProx) and config.algorithm.mu == 0.1
    assert config.tables()["model"]["hidden"] == (8, 4)
    tables: dict[str, object] = {"seed": 3}
    with pytest.raises(ConfigError, match="not a table"):
        set_key(tables, "seed.x", 1, "--set ")


def test_algorithm_names_tables_files_and_settings_give_the_same_run(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text(Config.build({**TINY, "algorithm": {"name": "fedprox", "mu": 0.5}}).toml())
    ways = [
        askew.run("fedprox", mu=0.5, model="softmax", clients=10, cohort=3, rounds=3, lr=0.1),
        askew.run(FedProx(mu=0.5), model={"name": "softmax"}, clients=10, cohort=3, rounds=3, local={"lr": 0.1}),
        askew.run({**TINY, "algorithm": {"name": "fedprox", "mu": 0.5}}),
        askew.run(str(file)),
        askew.run(file, out=tmp_path),
        askew.run(load_config(file)),
        askew.run(file, rounds=3, lr=0.1),
    ]
    assert all(records(run) == records(ways[0]) for run in ways)
    assert len({run.name for run in ways}) == 1


# folders --------------------------------------------------------------------------------------------------------


def test_a_run_folder_has_the_configuration_the_rounds_the_model_and_the_facts(tmp_path: Path) -> None:
    run = askew.run(TINY, out=tmp_path)
    assert run.folder is not None and run.folder.parent == tmp_path
    assert {p.name for p in run.folder.iterdir()} == {
        "run.toml",
        "rounds.jsonl",
        "run.json",
        "federation.json",
        "model.safetensors",
        end_file(Config.build(TINY)),
        ".lock",
    }
    lines = [json.loads(line) for line in (run.folder / "rounds.jsonl").read_text().splitlines()]
    keys = {"round", "participants", "train_loss", "accuracy", "loss", "bytes_up", "bytes_down", "seconds", "dropped"}
    keys |= {"checksum"}
    assert [set(line) for line in lines] == [keys] * 3 and [line["round"] for line in lines] == [1, 2, 3]
    assert lines[0]["bytes_up"] == lines[0]["bytes_down"] == 3 * 4 * (64 * 10 + 10)
    stored = load_file(run.folder / "model.safetensors")
    assert all(torch.equal(stored[n], run.model[n]) for n in run.model) and stored["out.weight"].shape == (10, 64)
    federation = json.loads((run.folder / "federation.json").read_text())
    assert np.array(federation["labels"]).sum() == sum(federation["sizes"]) == 1437
    again = askew.load(run.folder)
    assert again.rounds == run.rounds and again.summary() == run.summary() and again.finished


def test_a_finished_run_is_read_back_and_fresh_starts_over(tmp_path: Path) -> None:
    first = askew.run(TINY, out=tmp_path)
    calls: list[object] = []
    second = askew.run(TINY, out=tmp_path, watch=lambda run, record: calls.append(record))
    assert second.rounds == first.rounds and calls == []
    third = askew.run(TINY, out=tmp_path, fresh=True, watch=lambda run, record: calls.append(record))
    assert records(third) == records(first) and len(calls) == 4


def test_a_killed_run_goes_on_from_its_checkpoint_and_forgets_what_came_after(tmp_path: Path) -> None:
    whole = askew.run({**TINY, "rounds": 6, "algorithm": {"name": "scaffold"}})

    class Killed(Exception):
        pass

    def kill(run: askew.Run, record: dict[str, object] | None) -> None:
        if record and record["round"] == 4:
            raise Killed

    tables = {**TINY, "rounds": 6, "algorithm": {"name": "scaffold"}}
    with pytest.raises(Killed):
        askew.run(tables, out=tmp_path, watch=kill, save_every=0)
    folder = next(tmp_path.iterdir())
    log = folder / "rounds.jsonl"
    log.write_text(log.read_text() + '{"round": 5, "cut o')  # as a crash in mid-write leaves it
    lengths: list[int] = []
    resumed = askew.run(tables, out=tmp_path, watch=lambda run, record: lengths.append(len(run.rounds)))
    assert lengths[0] == 4  # the checkpoint's rounds were there before the first new one
    assert records(resumed) == records(whole)
    assert all(torch.equal(resumed.model[n], whole.model[n]) for n in whole.model)
    assert not (folder / checkpoint.FILE).exists()


def test_without_a_checkpoint_an_interrupted_run_starts_over(tmp_path: Path) -> None:
    whole = askew.run(TINY)

    def kill(run: askew.Run, record: dict[str, object] | None) -> None:
        if record and record["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        askew.run(TINY, out=tmp_path, watch=kill, save_every=1e9)
    assert records(askew.run(TINY, out=tmp_path)) == records(whole)


def test_a_checkpoint_of_another_run_or_a_damaged_one_is_refused(tmp_path: Path) -> None:
    built = build(Config.build({**TINY, "algorithm": {"name": "scaffold"}}))
    built.server.run_round(1, [0, 1, 2])
    checkpoint.save(tmp_path, built.server, 1, "abc")
    with pytest.raises(StoreError, match="of another run"):
        checkpoint.restore(tmp_path, built.server, "abd")
    path = tmp_path / checkpoint.FILE
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(StoreError, match="damaged"):
        checkpoint.restore(tmp_path, built.server, "abc")


def test_without_fcntl_all_works_but_storing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows: the module loads, and locking a folder is refused in one sentence."""
    monkeypatch.setitem(sys.modules, "fcntl", None)
    spec = importlib.util.spec_from_file_location("askew.experiment.lock_elsewhere", folder_lock.__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    with (
        pytest.raises(StoreError, match=r"storing a run needs a POSIX system.*use one, or"),
        module.lock_folder(tmp_path),
    ):
        pass
    assert not list(tmp_path.iterdir()) and not module.is_locked(tmp_path)
    monkeypatch.setattr(folder_lock, "fcntl", None)
    assert askew.run(TINY).finished
    with pytest.raises(StoreError, match="POSIX"):
        askew.run(TINY, out=tmp_path)
    users = [path for path in Path(askew.__file__).parent.rglob("*.py") if "import fcntl" in path.read_text()]
    assert all("except ImportError" in path.read_text() for path in users)  # or importing askew would fail elsewhere


def test_two_processes_cannot_write_one_folder(tmp_path: Path) -> None:
    with lock_folder(tmp_path), pytest.raises(StoreError, match="another process"), lock_folder(tmp_path):
        pass
    with lock_folder(tmp_path):  # free again
        pass


def test_a_log_broken_in_the_middle_is_named_and_a_cut_last_line_is_not(tmp_path: Path) -> None:
    log = tmp_path / "rounds.jsonl"
    append_lines(log, [{"round": 1}, {"round": 2, "loss": float("nan")}])
    assert read_rounds(log) == [{"round": 1}, {"round": 2, "loss": None}]
    write_text(log, '{"round": 1}\n{"round": 2, "lo')
    assert read_rounds(log) == [{"round": 1}]
    write_text(log, '{"round": 1}\n{"rou\n{"round": 3}\n')
    with pytest.raises(StoreError, match="line 2 is not the record of round 2"):
        read_rounds(log)


def test_the_figures_of_a_run_by_hand() -> None:
    accuracy = [0.2, None, 0.6, 0.6, 0.5]
    rounds = [
        {"round": i + 1, "accuracy": a, "seconds": 1.0 + (i == 0), "bytes_up": 10, "bytes_down": 20, "dropped": i % 2}
        for i, a in enumerate(accuracy)
    ]
    run = askew.Run({"rounds": 5, "algorithm": {"name": "x"}}, rounds)
    assert (run.best_accuracy, run.best_round, run.final_accuracy) == (0.6, 3, 0.5)
    assert (run.rounds_to(0.5), run.rounds_to(0.6), run.rounds_to(0.61)) == (3, 3, None)
    assert (run.seconds_per_round, run.bytes_up, run.bytes_down, run.dropped, run.finished) == (1.0, 50, 100, 2, True)


# what a user hands in -------------------------------------------------------------------------------------------


def blobs(n: int = 400) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    y = torch.arange(n) % 3
    return torch.randn(n, 2, generator=g) + 3 * torch.eye(3)[y][:, :2], y


def test_own_tensors_own_module_own_dataset() -> None:
    x, y = blobs()
    network = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 3))
    before = [p.clone() for p in network.parameters()]
    run = askew.run("feddyn", data=(x, y), model=network, clients=8, cohort=4, rounds=10, lr=0.2, alpha=0.1)
    assert run.best_accuracy is not None and run.best_accuracy > 0.8
    assert all(torch.equal(p, q) for p, q in zip(network.parameters(), before, strict=True))  # theirs stays as it was
    other = askew.run(
        "feddyn", data=TensorDataset(x, y), model=network, clients=8, cohort=4, rounds=10, lr=0.2, alpha=0.1
    )
    assert records(other) == records(run) and other.name == run.name
    moved = askew.run("feddyn", data=(x + 1, y), model=network, clients=8, cohort=4, rounds=1)
    assert moved.config["data"]["fingerprint"] != run.config["data"]["fingerprint"]


def test_what_was_handed_in_is_freed_when_nobody_uses_it_any_more() -> None:
    x, y = blobs()
    data, network = askew.Dataset(askew.Samples(x, y), askew.Samples(x, y), 3), nn.Linear(2, 3)
    settings = {"data": OwnData.of(data, None), "model": OwnNetwork.of(network)}
    config = Config.build({**TINY, **settings, "partition": {"clients": 4}})
    objects = [weakref.ref(data), weakref.ref(network)]
    run = askew.run(config)
    assert records(askew.run(data=data, model=network, clients=4, cohort=3, rounds=3, lr=0.1)) == records(run)
    del data, network, settings
    gc.collect()
    assert None not in [ref() for ref in objects]  # the configuration uses them
    copies = [replace(config.data), OwnData.build(config.data.table()), copy.deepcopy(config.data)]
    networks = [replace(config.model), OwnNetwork.build(config.model.table()), copy.deepcopy(config.model)]
    assert all(each == config.data and each.load(0, 4) is objects[0]() for each in copies)
    assert all(each == config.model and each.module((2,), 3) is objects[1]() for each in networks)
    table = config.data.table()
    del config
    gc.collect()
    assert None not in [ref() for ref in objects]  # the copies use them
    del copies, networks, run
    gc.collect()
    assert [ref() for ref in objects] == [None, None]
    with pytest.raises(ConfigError, match="the data of this configuration was handed in from Python and is gone; call"):
        OwnData.build(table).load(0, 4)


@pytest.mark.parametrize("method", ["moon", "fedbn", "scaffold"])
def test_own_modules_of_many_kinds(method: str) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.norm, self.drop, self.b = nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.drop(torch.relu(self.norm(self.a(x)))))

    torch.manual_seed(0)
    module, data = Odd(), blobs()
    one, two = (askew.run(method, data=data, model=module, clients=8, cohort=4, rounds=4) for _ in range(2))
    assert records(one) == records(two)  # dropout is drawn from the client's address
    assert one.facts["engine"] == "sequential" and "random" in one.facts["reason"]


def test_a_regression_with_an_own_criterion() -> None:
    x = torch.randn(300, 3, generator=torch.Generator().manual_seed(0))
    y = x @ torch.tensor([1.0, -2.0, 0.5])
    huber = lambda output, target: nn.functional.huber_loss(output[:, 0], target, reduction="none")
    data = askew.Dataset(askew.Samples(x[:240], y[:240]), askew.Samples(x[240:], y[240:]), 0, criterion=huber)
    run = askew.run(
        "fedavg", data=data, model=nn.Linear(3, 1), partition={"name": "iid", "clients": 6}, rounds=30, lr=0.3
    )
    assert run.best_accuracy is None and run.rounds[-1]["loss"] < 1e-3 * run.rounds[0]["loss"]


def test_data_with_natural_owners() -> None:
    x, y = blobs()
    owner = (np.arange(len(y)) // 100).astype(np.int64)
    data = askew.Dataset(askew.Samples(x, y), askew.Samples(x[:50], y[:50]), 3, owner=owner)
    run = askew.run(
        data=data, model="softmax", partition={"name": "natural", "clients": 4}, participation="full", rounds=2
    )
    assert run.federation["sizes"] == [100] * 4 and run.rounds[0]["participants"] == [0, 1, 2, 3]


def test_own_method_registered_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(algorithms, "members", dict(algorithms.members))

    @askew.register("halfavg")
    class HalfAvg(FedAvg):
        """FedAvg that moves half the way."""

        step: float = askew.setting("how far", default=0.5, above=0)

        def scale(self, cohort: askew.Cohort) -> float:
            return self.step

    half = askew.run({**TINY, "algorithm": {"name": "halfavg"}})
    same = askew.run({**TINY, "algorithm": {"name": "fedavg", "server_scale": 0.5}})
    assert [r["loss"] for r in half.rounds] == [r["loss"] for r in same.rounds]
    with pytest.raises(ConfigError, match="is none of"):
        askew.register("nothing")(dict)


def test_a_network_that_does_not_fit_is_named() -> None:
    with pytest.raises(ModelError, match="cannot take inputs of shape"):
        askew.run(data=blobs(), model=nn.Linear(7, 3), clients=4, rounds=1)


def test_the_spread_over_clients_by_hand() -> None:
    tables = {**TINY, "evaluation": {"spread": True}, "rounds": 1, "participation": {"name": "full"}}
    run = askew.run(tables)
    built = build(Config.build(tables))
    weight, bias = run.model["out.weight"], run.model["out.bias"]
    right = (built.fed.pool.x.flatten(1) @ weight.T + bias).argmax(1) == built.fed.pool.y
    each = np.array([right[built.fed.assignment.client(i)].float().mean() for i in range(10)])
    record = run.rounds[0]
    assert record["client_accuracy_mean"] == pytest.approx(each.mean(), abs=1e-6)
    assert record["client_accuracy_std"] == pytest.approx(each.std(), abs=1e-6)
    assert record["client_accuracy_worst10"] == pytest.approx(each.min(), abs=1e-6)


def test_evaluation_every_few_rounds_and_always_at_the_end() -> None:
    run = askew.run({**TINY, "rounds": 5, "evaluation": {"every": 2}})
    assert [r["accuracy"] is not None for r in run.rounds] == [False, True, False, True, True]


def test_a_million_clients_cost_what_ten_of_them_cost() -> None:
    run = askew.run(
        {
            "rounds": 2,
            "data": {"name": "synthetic", "test_clients": 5},
            "model": {"name": "softmax"},
            "algorithm": {"name": "feddc"},
            "partition": {"clients": 1_000_000},
            "participation": {"fraction": 1e-5},
        }
    )
    assert [len(r["participants"]) for r in run.rounds] == [10, 10]
    assert run.federation["shown"] == 500 and run.federation["clients"] == 1_000_000


def test_float64_starts_where_float32_does() -> None:
    narrow, wide = (
        build(Config.build({**TINY, "model": {"name": "mlp"}, "engine": {"dtype": d}})) for d in ("float32", "float64")
    )
    assert torch.equal(narrow.space.start.double(), wide.space.start)


def test_exact_steps_and_epochs_cut_the_same_stream() -> None:
    built = build(Config.build({**TINY, "local": {"batch": 7, "epochs": 3}}))
    by_epochs = built.fed.plan([0, 5], 1, built.config.local)
    for work, size in zip(by_epochs.train, built.fed.sizes[[0, 5]], strict=True):
        assert len(work.places) == 3 * size and work.batches == 3 * -(-size // 7)
        epoch = work.places[:size]
        assert sorted(epoch.tolist()) == sorted(set(epoch.tolist()))  # every sample once an epoch
    steps = type(built.config.local)(batch=7, steps=4)
    for work, whole in zip(built.fed.plan([0, 5], 1, steps).train, by_epochs.train, strict=True):
        assert work.batches == 4 and work.places.tolist() == whole.places[: len(work.places)].tolist()


def test_two_objects_from_python_that_differ_are_two_runs(tmp_path: Path) -> None:
    x, y = blobs()
    dataset = lambda **more: askew.Dataset(askew.Samples(x, y), askew.Samples(x[:50], y[:50]), 3, **more)
    owners = [np.arange(len(y)) % 4, np.arange(len(y)) // 100]
    first, second = (
        askew.run(
            data=dataset(owner=o), model="softmax", partition={"name": "natural", "clients": 4}, rounds=1, out=tmp_path
        )
        for o in owners
    )
    assert first.name != second.name and first.rounds[0]["loss"] != second.rounds[0]["loss"]
    torch.manual_seed(0)
    body = [nn.Linear(2, 4), nn.Linear(4, 3)]
    names = {
        askew.run(data=(x, y), model=nn.Sequential(body[0], act, body[1]), clients=4, rounds=1).name
        for act in (nn.ReLU(), nn.Tanh())
    }
    assert len(names) == 2


def test_a_module_handed_in_stays_as_it_was_and_takes_its_trained_weights_back(tmp_path: Path) -> None:
    network = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    before = {n: t.clone() for n, t in network.state_dict().items()}
    runs = [askew.run(data=blobs(), model=network, clients=4, rounds=2, out=tmp_path) for _ in range(2)]
    assert runs[0].name == runs[1].name and before.keys() == network.state_dict().keys()
    assert all(torch.equal(t, before[n]) for n, t in network.state_dict().items())
    missing, unexpected = network.load_state_dict(runs[0].model, strict=False)
    assert unexpected == [] and missing == []


def test_centralised_training_leaves_the_model_it_trained() -> None:
    run = askew.run("centralised", model="softmax", rounds=3, local={"lr": 0.5})
    built = build(Config.build({"model": {"name": "softmax"}}))
    right = (built.fed.test.x.flatten(1) @ run.model["out.weight"].T + run.model["out.bias"]).argmax(
        1
    ) == built.fed.test.y
    assert float(right.double().mean()) == pytest.approx(run.final_accuracy)


def test_settings_that_cannot_work_together_are_refused_when_they_load() -> None:
    for key, sentence in (
        ("fedprox", "FedProx: mu × local.lr must be < 2"),
        ("fednova", "FedNova: mu × local.lr must be < 2"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            Config.build({"algorithm": {"name": key, "mu": 2.0}, "local": {"lr": 1.0}})
        Config.build({"algorithm": {"name": key, "mu": 1.9}, "local": {"lr": 1.0}})
    for key in ("fedvarp", "mifa"):
        with pytest.raises(ConfigError, match="weighting must be"):
            Config.build({"algorithm": {"name": key, "weighting": "samples"}})


# turnout, stragglers, pooled data -------------------------------------------------------------------------------


def test_pooled_training_sees_the_data_of_all_clients() -> None:
    samples = [
        askew.run(m, data={"name": "synthetic", "samples": 20}, clients=7, rounds=1).federation["samples"]
        for m in ("fedavg", "centralised")
    ]
    assert samples == [140, 140]


def test_a_round_in_which_nobody_answers_changes_nothing() -> None:
    run = askew.run(
        "scaffold", data="synthetic", clients=6, rounds=2, participation={"cohort": 3, "dropout": 1.0}, model="softmax"
    )
    assert not any(v.any() for v in run.model.values())  # softmax begins at zero
    for record in run.rounds:
        assert (
            record["participants"] == []
            and record["absent"] == 3
            and record["train_loss"] is None
            and record["bytes_up"] == 0
        )
        assert record["bytes_down"] == 3 * 2 * 155 * 4  # the model and the server's variate


def test_the_absent_are_sent_the_model_and_answer_nothing() -> None:
    run = askew.run(
        "fedavg", data="synthetic", clients=40, rounds=5, participation={"cohort": 20, "dropout": 0.4}, model="softmax"
    )
    for record in run.rounds:
        present, absent = len(record["participants"]), record["absent"]
        assert present + absent == 20 and 0 < absent < 20
        assert record["bytes_down"] == 20 * 155 * 4 and record["bytes_up"] == present * 155 * 4


def test_stragglers_do_part_of_their_steps() -> None:
    local = LocalSettings(batch=5, epochs=2)
    fed = Federation(Synthetic(samples=50), Natural(clients=3), 0)
    whole, part = fed.plan([0, 1, 2], 1, local), fed.plan([0, 1, 2], 1, local, share=[1.0, 0.5, 0.01])
    assert [w.batches for w in whole.train] == [20, 20, 20] and [w.batches for w in part.train] == [20, 10, 1]
    for a, b in zip(whole.train, part.train, strict=True):
        assert b.places.tolist() == a.places[: len(b.places)].tolist() and len(b.places) == 5 * b.batches


def test_a_short_last_batch_may_be_dropped_unless_it_is_the_only_one() -> None:
    fed = Federation(Synthetic(samples=23), Natural(clients=2), 0)
    for batch, lengths in ((10, [10, 10, 10, 10]), (23, [23, 23]), (30, [23, 23])):
        work = fed.plan([1], 1, LocalSettings(batch=batch, epochs=2, drop_last=True)).train[0]
        assert work.lengths() == lengths and len(work.places) == sum(lengths)
    work = fed.plan([1], 1, LocalSettings(batch=10, steps=5, drop_last=True)).train[0]
    assert work.lengths() == [10] * 5


def test_a_changed_file_is_another_run(tmp_path: Path) -> None:
    file = tmp_path / "who.json"
    config = {**TINY, "partition": {"name": "file", "path": str(file), "clients": 2}, "participation": {"cohort": 1}}
    file.write_text(json.dumps([list(range(700)), list(range(700, 1437))]))
    before = Config.build(config).name()
    file.write_text(json.dumps([list(range(600)), list(range(600, 1437))]))
    assert Config.build(config).name() != before


@pytest.fixture
def overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds that are written while the next one is trained, as short ones on a GPU are."""
    monkeypatch.setattr(ActiveRun, "can_overlap", property(lambda run: True))
    monkeypatch.setattr(ActiveRun, "evaluation_stream", lambda run: None)
    monkeypatch.setattr("askew.experiment.run.SHORT_ROUND", 60.0)


def test_records_that_are_written_later_are_the_same(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Also with two phases a round, evaluation now and then, and several runs at a time."""
    given = {"rounds": 5, "partition": {"clients": 6}, "evaluation": {"every": 2, "spread": True, "drift": True}}
    configs = [
        Config.build(given | {"algorithm": {"name": name}, "seed": seed})
        for name, seed in (("fedga", 0), ("scaffold", 1))
    ]
    before = [records(run) for run in run_together(configs)]
    request.getfixturevalue("overlap")
    watched: list[tuple[str, int]] = []
    runs = run_together(
        configs,
        tmp_path,
        watch=lambda run, record: watched.append((run.algorithm, record["round"])) if record else None,
    )
    assert [records(run) for run in runs] == before
    assert watched == [(name, t) for t in range(1, 6) for name in ("fedga", "scaffold")]
    assert [len(load(run.folder).rounds) for run in runs if run.folder] == [5, 5]


def test_overlapping_rounds_without_an_answer_leave_the_record_before_them_alone(
    request: pytest.FixtureRequest,
) -> None:
    """Nobody's answer means no phase, so the next round may be over before the last one is written."""
    tables = {**TINY, "rounds": 6, "participation": {"cohort": 1, "dropout": 0.7}, "evaluation": {"every": 2}}
    before = records(askew.run(tables))
    assert before[3]["participants"] and before[3]["accuracy"] is not None and before[4]["participants"] == []
    request.getfixturevalue("overlap")
    assert records(askew.run(tables)) == before


def test_a_record_that_is_not_written_yet_is_written_when_the_next_round_fails(
    overlap: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = Config.build({"rounds": 5, "partition": {"clients": 6}})
    round_requests = Server.round_requests

    def failing(server: Server, round: int, *given: object) -> object:
        if round == 4:
            raise EngineError("the device is gone")
        return round_requests(server, round, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(Server, "round_requests", failing)
    with pytest.raises(EngineError):
        run_together([config], tmp_path)
    assert [record["round"] for record in read_rounds(next(tmp_path.glob("*/rounds.jsonl")))] == [1, 2, 3]


def test_times_of_clients_and_server_are_recorded_where_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on by one at every look: each part of a round is looked at twice."""
    ticks = iter(range(10**6))
    monkeypatch.setattr("askew.engine.server.finished_time", lambda device: float(next(ticks)))
    given = {"clients": 4, "rounds": 2, "model": {"name": "mlp"}}
    assert not {"seconds_clients", "seconds_server"} & askew.run("fedavg", **given).rounds[0].keys()
    for method, phases in (("fedavg", 1), ("fedga", len(algorithms["fedga"]().phases()))):
        run = askew.run(method, evaluation={"times": True}, **given)
        assert [(r["seconds_clients"], r["seconds_server"]) for r in run.rounds] == [(phases, phases)] * 2


# the process ----------------------------------------------------------------------------------------------------


def test_a_library_call_leaves_allocator_and_environment_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []
    libc, load = types.SimpleNamespace(mallopt=lambda *numbers: calls.append(numbers)), ctypes.CDLL
    # the C library alone: kernels are loaded in the same way
    monkeypatch.setattr(ctypes, "CDLL", lambda name: libc if name == "libc.so.6" else load(name))
    for name in process_tuning.ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    assert askew.run(TINY).finished
    assert calls == [] and dict(os.environ) == before
    askew.tune_process()
    assert calls == [(-1, 256 * 2**20), (-3, 32 * 2**20)]
    assert dict(os.environ) == before | {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "7")
    askew.tune_process()
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "7"  # the user's own choice stays

    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    askew.tune_process()  # a system without glibc


def test_imports_are_not_searched_for_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where torch is still to be loaded, so that a program which has loaded it stays as it is."""
    frozen = gc.get_freeze_count()
    with process_tuning.quick_imports():
        assert gc.isenabled()
    assert gc.get_freeze_count() == frozen
    monkeypatch.delitem(sys.modules, "torch")
    try:
        with pytest.raises(ImportError), process_tuning.quick_imports():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() and gc.get_freeze_count() > frozen
    finally:
        gc.unfreeze()
