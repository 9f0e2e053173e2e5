"""Round metrics beside the drift of updates, and the accuracy of classes and clients, each against plain formulas."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import askew
from askew.algorithms.fedavg import FedAvg
from askew.algorithms.feddc import FedDC
from askew.algorithms.feddyn import FedDyn
from askew.algorithms.fedpdc import FedPDC
from askew.algorithms.mgda import MGDA
from askew.algorithms.solo import Solo
from askew.core.algorithm import Algorithm
from askew.core.records import is_record_key
from askew.core.space import Space
from askew.core.task import Bound
from askew.core.types import Batch
from askew.data.dataset import Dataset, Samples
from askew.data.federation import Federation, LocalSettings
from askew.data.partition import Iid, Natural
from askew.engine import drift, round_metrics
from askew.engine.drift import rank_correlation
from askew.engine.evaluate import Evaluator, accuracy_by_owner, accuracy_by_rarity, rarest_classes
from askew.engine.round_metrics import ClientWeights, LocalFit, partial_correlation
from askew.engine.server import Server
from askew.experiment.build import build
from askew.experiment.config import Config, Evaluation
from askew.experiment.store import Run
from askew.models.small import MLP
from askew.reproduction.run_metrics import run_metrics
from problems import (
    Problem,
    RecordingEngine,
    classification,
    client_row,
    make_server,
    random_cohorts,
    run_rounds,
    skewed_samples,
)

LOCAL = LocalSettings(epochs=2, batch=4, lr=0.1)
ENGINES = ["sequential", "vmapped", "slots", "stacked", "pairs"]


@pytest.fixture
def problem() -> Problem:
    return classification(skewed_samples([20, 7, 12, 9, 16, 5]))


def server_with_metrics(alg: Algorithm, problem: Problem, engine: str = "sequential") -> tuple[Server, Bound]:
    """A server with all round metrics, and a task to compute them independently."""
    server = make_server(alg, problem, LOCAL, engine)
    task = Bound(copy.deepcopy(problem.module), server.space)
    if server.fed.public is not None:
        server.evaluate = Evaluator(task, server.fed, server.fed.public)
    server.metrics = [LocalFit(task, server.fed), ClientWeights(server.fed, server.evaluate)]
    server.drift_history = drift.history(server.space)
    return server, task


def mean_loss(task: Bound, w: Tensor, samples: Samples) -> float:
    """The mean loss of a model on samples."""
    output = task.frozen(w, torch.zeros(0, dtype=w.dtype), Batch(samples.x, samples.y))[0]
    return float(nn.functional.cross_entropy(output, samples.y))


# the participants' models on their own samples ------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_how_well_local_models_fit(engine: str, problem: Problem) -> None:
    server, task = server_with_metrics(FedAvg(), problem, engine)
    server.engine = recording = RecordingEngine(server.engine)
    for t, ids in enumerate(random_cohorts(3, 3, 6), 1):
        old = server.w.clone()
        record = server.run_round(t, ids)
        models = old + recording.calls[-1][2].up["delta"]
        losses = [mean_loss(task, w, problem.samples(i)) for w, i in zip(models, ids, strict=True)]
        assert record["fit_loss"] == pytest.approx(np.mean(losses))
        assert record["fit_loss"] < np.mean([mean_loss(task, old, problem.samples(i)) for i in ids])


def test_only_early_rounds_are_measured_so(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_metrics, "EARLY", 2)
    records = run_rounds(server_with_metrics(FedAvg(), problem)[0], random_cohorts(3, 3, 6))
    assert ["fit_loss" in r for r in records] == [True, True, False]


def test_metrics_change_nothing_and_are_not_taken_where_no_update_is_sent(problem: Problem) -> None:
    plain, measured = make_server(FedPDC(), problem, LOCAL), server_with_metrics(FedPDC(), problem)[0]
    one, other = (run_rounds(server, random_cohorts(3, 3, 6)) for server in (plain, measured))
    assert torch.equal(plain.w, measured.w)
    assert [{k: r[k] for k in one[0]} for r in other] == one
    assert {"fit_loss", "weights_entropy", "public_share"} <= {*other[0]}
    for alg in (MGDA(server_lr=0.1), Solo()):
        records = run_rounds(server_with_metrics(alg, problem)[0], random_cohorts(2, 3, 6))
        assert not any(key.startswith(("fit_", "weights_", "public_")) for r in records for key in r)


# learned drifts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alg", [FedDC(alpha=0.1), FedDyn(alpha=0.1)], ids=lambda alg: alg.display_name())
@pytest.mark.parametrize("engine", ENGINES)
def test_distances_to_the_next_model_with_and_without_the_drift(alg: Algorithm, engine: str, problem: Problem) -> None:
    server, _ = server_with_metrics(alg, problem, engine)
    server.engine = recording = RecordingEngine(server.engine)
    for t, ids in enumerate(random_cohorts(3, 3, 6), 1):
        old = server.w.clone()
        record = server.run_round(t, ids)
        models = old + recording.calls[-1][2].up["delta"]
        plain = [float((w - server.w).norm()) for w in models]
        corrected = [
            float((w + client_row(server.clients, i)["h"] - server.w).norm()) for w, i in zip(models, ids, strict=True)
        ]
        assert record["drift_apart"] == pytest.approx(np.mean(plain))
        assert record["drift_apart_corrected"] == pytest.approx(np.mean(corrected))


def test_methods_that_learn_none_record_none(problem: Problem) -> None:
    records = run_rounds(server_with_metrics(FedAvg(), problem)[0], random_cohorts(2, 3, 6))
    assert not any("apart" in key for record in records for key in record)


# weights and public data ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_what_weights_correlate_with(engine: str, problem: Problem) -> None:
    server, task = server_with_metrics(FedPDC(), problem, engine)
    server.engine = recording = RecordingEngine(server.engine)
    fed = server.fed
    assert fed.public is not None and fed.assignment is not None
    labels = [fed.pool.y[fed.assignment.client(i)].numpy() for i in range(6)]
    entropies = np.array([stats.entropy(np.bincount(y, minlength=3)) for y in labels])
    public = Batch(*fed.public)
    public_accuracy = lambda w: float((task.frozen(w, server.buffers, public)[0].argmax(1) == public.y).double().mean())
    compared = 0
    for t, ids in enumerate(random_cohorts(4, 5, 6), 1):
        old = server.w.clone()
        record = server.run_round(t, ids)
        own = np.array([public_accuracy(w) for w in old + recording.calls[-1][2].up["delta"]])
        by_labels = stats.spearmanr(own, entropies[ids]).statistic
        if math.isnan(by_labels):
            assert record["weights_entropy"] is None
            continue
        compared += 1
        by_size, both = (stats.spearmanr(a, fed.sizes[ids]).statistic for a in (own, entropies[ids]))
        assert record["weights_entropy"] == pytest.approx(by_labels)
        assert record["weights_size"] == pytest.approx(
            (by_size - by_labels * both) / math.sqrt((1 - by_labels**2) * (1 - both**2))
        )
        whole = public_accuracy(server.w)
        assert record["public_share"] == np.mean(whole >= own)
        assert record["public_ratio"] == pytest.approx(np.mean(whole / own[own > 0]))
    assert compared


def test_rank_correlations_are_those_of_scipy() -> None:
    a, b = np.array([1.0, 2, 2, 5, 3]), np.array([4.0, 4, 1, 9, 9])
    assert rank_correlation(a, b) == pytest.approx(stats.spearmanr(a, b).statistic)
    assert rank_correlation(a, np.ones(5)) is None and rank_correlation(a[:1], b[:1]) is None
    assert partial_correlation(0.5, 0.0, 0.0) == 0.5
    assert partial_correlation(0.5, 1.0, 0.3) is partial_correlation(None, 0.1, 0.1) is None
    assert partial_correlation(0.6, 0.5, 0.4) == pytest.approx((0.6 - 0.2) / math.sqrt(0.75 * 0.84))


def test_a_run_records_what_its_evaluation_asks_for() -> None:
    """FedAvg is evaluated on public data only if the configuration asks for it, and trains the same."""
    tables: dict[str, Any] = {
        "rounds": 3,
        "model": {"name": "mlp", "hidden": [8]},
        "partition": {"clients": 6, "public": 60},
        "participation": {"name": "full"},
    }
    measured = askew.run({**tables, "evaluation": {"weights": True, "rare": True, "fit": True}})
    plain = askew.run(tables)
    assert [r["train_loss"] for r in measured.rounds] == [r["train_loss"] for r in plain.rounds]
    names = {
        "weights_entropy",
        "weights_size",
        "public_share",
        "public_ratio",
        "accuracy_rare",
        "accuracy_common",
        "fit_loss",
    }
    assert set(measured.rounds[-1]) - set(plain.rounds[-1]) == names
    kept = run_metrics(measured, ["public_share", "public_ratio"])
    assert {"last_accuracy_rare", "mean_weights_entropy", "public_share", "public_ratio"} <= set(kept)


# classes and clients --------------------------------------------------------------------------------------------------


def test_the_classes_that_the_fewest_clients_hold() -> None:
    tables = {"rounds": 1, "model": {"name": "mlp", "hidden": [8]}, "partition": {"alpha": 0.1, "clients": 6}}
    parts = build(Config.build(tables))
    fed, task, space = parts.fed, parts.task, parts.space
    assert fed.assignment is not None
    labels = [{*fed.pool.y[fed.assignment.client(i)].tolist()} for i in range(6)]
    holders = [sum(k in own for own in labels) for k in range(10)]
    rare = sorted(range(10), key=lambda k: (holders[k], k))[:3]
    assert rarest_classes(fed).tolist() == rare and len(set(holders)) > 1
    output = task.frozen(space.start, space.buffers, Batch(fed.inputs(fed.test.x), fed.test.y))[0]
    right = (output.argmax(1) == fed.test.y).numpy()
    among = np.isin(fed.test.y.numpy(), rare)
    assert accuracy_by_rarity(task, space.start, space.buffers, fed) == {
        "accuracy_rare": pytest.approx(right[among].mean()),
        "accuracy_common": pytest.approx(right[~among].mean()),
    }


def test_the_accuracy_of_each_class_is_that_of_its_predictions_in_every_engine() -> None:
    """A class without test samples has none; what is measured besides changes nothing of it."""
    x = torch.randn(60, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y, tested = torch.arange(60) % 3, torch.arange(25) % 2
    data = askew.Dataset(askew.Samples(x, y), askew.Samples(x[:25], tested), classes=3)
    common: dict[str, Any] = {"data": data, "model": nn.Linear(5, 3, dtype=torch.float64), "partition": "iid"}
    common |= {"clients": 3, "rounds": 2, "lr": 0.5, "progress": False}
    for engine in ENGINES[:4]:
        table = {"per_class": True, "halves": engine != "slots", "every": 2}
        run = askew.run("fedavg", evaluation=table, engine={"name": engine, "dtype": "float64"}, **common)
        right = (x[:25] @ run.model["weight"].T + run.model["bias"]).argmax(1) == tested
        by_hand = {str(k): right[tested == k].double().mean().item() for k in (0, 1)}
        assert run.rounds[-1]["class_accuracy"] == pytest.approx(by_hand | {"2": None}, abs=1e-15), engine
        assert "class_accuracy" not in run.rounds[0] and run.rounds[-1]["accuracy"] == right.double().mean().item()


def dataset_with_owners() -> Dataset:
    """Twenty clients with three training and two test samples each."""
    rng = np.random.default_rng(0)
    train, test = (
        Samples(torch.from_numpy(rng.standard_normal((n, 4))), torch.from_numpy(rng.integers(0, 3, n)))
        for n in (60, 40)
    )
    return Dataset(train, test, 3, np.repeat(np.arange(20), 3), test_owner=np.repeat(np.arange(20), 2))


def test_clients_with_test_samples_of_their_own() -> None:
    fed = Federation(dataset_with_owners(), Natural(clients=20), 0, dtype=torch.float64)
    problem = classification(skewed_samples([9, 9]))
    task = Bound(problem.module, make_server(FedAvg(), problem, LOCAL).space)
    w, none = task.space.start, torch.zeros(0, dtype=torch.float64)
    rounds_taken = [0] * 20
    rounds_taken[7], rounds_taken[3] = 5, 9
    record = accuracy_by_owner(task, w, none, fed, rounds_taken)
    output = task.frozen(w, none, Batch(fed.test.x, fed.test.y))[0]
    accuracy = (output.argmax(1) == fed.test.y).double().view(20, 2).mean(1)
    assert record["client_test_accuracy_std"] == pytest.approx(float(accuracy.std(correction=0)))
    losses = nn.functional.cross_entropy(output, fed.test.y, reduction="none").view(20, 2)
    train = [mean_loss(task, w, Samples(fed.pool.x[3 * i : 3 * i + 3], fed.pool.y[3 * i : 3 * i + 3])) for i in (3, 7)]
    assert record["often_gap"] == pytest.approx(float(losses[[3, 7]].mean()) - np.mean(train))
    assert Federation(dataset_with_owners(), Iid(clients=4), 0).test_owner is None


def test_no_method_may_name_a_number_like_one_that_a_run_records() -> None:
    """All that can be asked for is: a new setting whose keys are not in core/records.py fails here."""
    switches = {name: True for name, f in Evaluation.__dataclass_fields__.items() if f.default is False}
    tables: dict[str, Any] = {"rounds": 1, "model": {"name": "softmax"}, "evaluation": switches}
    partition = {"clients": 6, "public": 60, "validation": 0.2}
    measured = askew.run({**tables, "partition": partition, "privacy": {"clip": 1.0, "quantile": 0.5}})
    timed = askew.run({"rounds": 1, "model": {"name": "softmax"}, "time": {"wait": "buffer", "buffer": 2}})
    keys = {*measured.rounds[0], *timed.rounds[0]}
    assert {"raised", "fit_loss", "privacy_clip", "class_accuracy", "staleness"} <= keys
    assert not [key for key in keys if not is_record_key(key)]


def test_what_no_test_sample_tells_is_null() -> None:
    """Of at most three classes none is common; the client that took part most often has no test samples."""
    owner, test_owner = np.array([0, *[1] * 9, *[2] * 9]), np.repeat([1, 2], 4)
    train, test = (Samples(torch.randn(n, 4), torch.arange(n) % 2) for n in (19, 8))
    data = Dataset(train, test, 2, owner, test_owner=test_owner)
    table = {"rare": True, "spread": True}
    run = askew.run("fedavg", data=data, model="softmax", participation="full", rounds=1, evaluation=table)
    record = run.rounds[-1]
    assert record["accuracy_common"] is None and record["often_gap"] is None
    assert record["accuracy_rare"] == record["accuracy"]


def test_a_regression_and_rounds_without_clients_have_no_figures_of_test_owners() -> None:
    """Nobody took part, so client 0 is the first of those that did most often, and it has nothing to train on."""
    samples, owner = Samples(torch.randn(6, 4), torch.randn(6)), np.repeat([1, 2], 3)
    data = Dataset(samples, samples, 0, owner, "squared_error", test_owner=owner - 1)
    fed = Federation(data, Natural(clients=3), 0)
    module = MLP(hidden=(3,)).build_module((4,), 1)
    task = Bound(module, Space(module), "squared_error")
    record = accuracy_by_owner(task, task.space.start, torch.zeros(0), fed, [0, 0, 0])
    assert record == {"client_test_accuracy_std": None, "often_gap": None} and all(map(is_record_key, record))


# what results keep ----------------------------------------------------------------------------------------------------


def test_what_results_keep_of_records() -> None:
    """Means over rounds 10 to 100, the largest angle by size, a curve of every twentieth round and the last."""
    rounds: list[dict[str, Any]] = [
        {
            "round": t,
            "participants": [0],
            "seconds": 1.0,
            "bytes_up": 1,
            "bytes_down": 1,
            "train_loss": 1.0,
            "accuracy": None,
            "loss": None,
        }
        | {
            "turn": -0.5 if t == 30 else 0.1,
            "drift_turn": None if t == 1 else 0.2,
            "drift_relative": float(t),
            "fit_loss": float(t),
        }
        | {
            "drift_relative_layers": {"conv1": float(t), "dead": None},
            "drift_apart": 2.0 * t,
            "drift_layers": {"conv1": 1.0},
        }
        | ({"drift_window": float(t)} if t % 20 == 0 else {})
        for t in range(1, 111)
    ]
    metrics = run_metrics(Run({"rounds": 110}, rounds, {}), ["drift_relative"])
    assert (metrics["max_turn"], metrics["max_drift_turn"], metrics["mean_drift_window"]) == ("0.5", "0.2", "60")
    for name in ("drift_relative_layers.conv1", "drift_relative", "fit_loss"):
        assert metrics[f"early_{name}"] == "55"
    assert metrics["early_drift_apart"] == "110" and "early_drift_relative_layers.dead" not in metrics
    assert metrics["drift_relative"] == "20:20 40:40 60:60 80:80 100:100 110:110"
    assert not any("drift_layers" in name for name in metrics)
