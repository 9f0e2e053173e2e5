"""Drift metrics: their arithmetic against closed forms, the server's records against the updates that were sent, and
what engines, resumed runs and reports make of them.
"""

from __future__ import annotations

import json
import math
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import askew
from askew.algorithms.fedavg import FedAvg
from askew.algorithms.fedbn import FedBN
from askew.algorithms.feddpc import FedDPC
from askew.algorithms.fedga import FedGA
from askew.algorithms.mgda import MGDA
from askew.algorithms.scaffold import Scaffold
from askew.core.algorithm import Algorithm
from askew.core.space import Space
from askew.core.task import Bound
from askew.core.types import Batch
from askew.data.dataset import Samples
from askew.data.federation import LocalSettings
from askew.engine import drift
from askew.engine.drift import layer_slices, measure_updates
from askew.engine.evaluate import client_spread, per_sample
from askew.engine.server import Server
from askew.experiment import checkpoint
from askew.experiment.build import build, client_label_counts
from askew.experiment.config import Config
from askew.experiment.launch import run_config
from askew.report import table, terminal
from askew.report.figures import draw_pictures
from askew.report.tables import group_runs
from problems import (
    FaultyReports,
    Problem,
    RecordingEngine,
    classification,
    make_server,
    random_cohorts,
    run_rounds,
    skewed_samples,
    with_features,
)

LOCAL = LocalSettings(epochs=2, batch=4, lr=0.1)
TINY: dict[str, Any] = {
    "rounds": 4,
    "model": {"name": "mlp"},
    "partition": {"clients": 6},
    "evaluation": {"drift": True},
}


class BodyAndHead(nn.Module):
    """A layer of six coordinates, one of two, and one parameter outside of both."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.body, self.head = nn.Linear(2, 2), nn.Linear(2, 1, bias=False)


SPACE = Space(BodyAndHead())
BODY, HEAD = slice(1, 7), slice(7, 9)


def vectors(*rows: dict[int, float]) -> Tensor:
    """Sparse rows of R^9."""
    dense = torch.zeros(len(rows), SPACE.P)
    for dense_row, row in zip(dense, rows, strict=True):
        for at, value in row.items():
            dense_row[at] = value
    return dense


def drift_record(
    deltas: Tensor, step: Tensor | None = None, previous: Tensor | None = None, weights: list[float] | None = None
) -> dict[str, Any]:
    """The record of updates [C, P]; the global step is by default their weighted mean, the previous one 0."""
    p = torch.tensor(weights or [1 / len(deltas)] * len(deltas))
    step = p @ deltas if step is None else step
    previous = SPACE.zeros_float64() if previous is None else previous.double()
    return measure_updates(SPACE, deltas, p, step.double(), previous)


# closed forms ---------------------------------------------------------------------------------------------------------


def test_layers_are_the_owners_of_parameters() -> None:
    assert layer_slices(SPACE) == {"network": slice(0, 1), "body": BODY, "head": HEAD}
    own = with_features(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.zeros(1, 3))
    assert layer_slices(Space(own)) == {"0": slice(0, 16), "2": slice(16, 26)}


def test_equal_updates_have_cosine_one_and_diversity_one_over_their_number() -> None:
    d = torch.randn(1, SPACE.P, generator=torch.Generator().manual_seed(0))
    record = drift_record(d.expand(5, -1), previous=-3 * d[0])
    for key in ("drift_cosine_mean", "drift_cosine_min", "drift_cosine_max"):
        assert record[key] == pytest.approx(1, abs=1e-7)  # the mean of float32 is rounded
    assert record["drift_previous_mean"] == pytest.approx(-1, abs=1e-12) == record["drift_previous_max"]
    assert record["drift_previous_acute"] == 0 and record["drift_turn"] == pytest.approx(-1, abs=1e-7)
    assert record["drift_diversity"] == pytest.approx(1 / 5, abs=1e-12)
    assert record["drift_layers"] == {
        "network": pytest.approx(1 / 5),
        "body": pytest.approx(1 / 5),
        "head": pytest.approx(1 / 5),
    }
    assert record["drift_norm"] == pytest.approx(float(d.norm())) == pytest.approx(record["drift_norm_global"])
    assert record["drift_spread"] == pytest.approx(0, abs=1e-6)


def test_orthogonal_updates() -> None:
    """Four of lengths 3, 4, 2 and 0: the last has no angle; the mean of the others is (3, 4, 2)/4, of length √29/4."""
    record = drift_record(vectors({1: 3}, {2: 4}, {7: 2}, {}))
    cosines = np.array([3, 4, 2]) / math.sqrt(29)
    assert [record[f"drift_cosine_{end}"] for end in ("mean", "min", "max")] == pytest.approx(
        [cosines.mean(), min(cosines), max(cosines)]
    )
    assert record["drift_diversity"] == pytest.approx(1, abs=1e-15)
    assert record["drift_layers"] == {"network": None, "body": pytest.approx(1), "head": pytest.approx(1)}
    assert (record["drift_norm"], record["drift_norm_global"]) == pytest.approx((9 / 4, math.sqrt(29) / 4))
    assert [record[f"drift_previous_{what}"] for what in ("mean", "min", "max", "acute")] == [None] * 4
    assert record["drift_turn"] is None
    aside = drift_record(vectors({1: 3}, {2: 4}, {7: 2}, {}), previous=vectors({1: 1})[0])
    assert aside["drift_previous_acute"] == pytest.approx(1 / 3)  # a right angle is not acute


def test_opposed_updates() -> None:
    """3 and −1 along one axis: 10 / 4. 1 and −1 along another cancel: no ratio alone, and 2 more for the whole."""
    record = drift_record(vectors({1: 3, 7: 1}, {1: -1, 7: -1}), step=vectors({1: 1})[0], previous=vectors({7: 2})[0])
    assert record["drift_layers"] == {"network": None, "body": pytest.approx(10 / 4), "head": None}
    assert record["drift_diversity"] == pytest.approx(12 / 4)
    assert (record["drift_cosine_max"], record["drift_cosine_min"]) == pytest.approx(
        (3 / math.sqrt(10), -1 / math.sqrt(2))
    )
    assert (record["drift_previous_max"], record["drift_previous_min"]) == pytest.approx(
        (1 / math.sqrt(10), -1 / math.sqrt(2))
    )
    assert record["drift_previous_acute"] == 0.5 and record["drift_turn"] == 0


def test_weights_count_in_the_spread_alone() -> None:
    """0 and 4 with weights 3/4 and 1/4: their average is 1, from which they are 1 and 3 apart."""
    deltas, step = vectors({1: 0.0}, {1: 4.0}), vectors({2: 1})[0]
    plain, weighted = (drift_record(deltas, step, weights=p) for p in ([0.5, 0.5], [0.75, 0.25]))
    assert (plain["drift_spread"], weighted["drift_spread"]) == pytest.approx((2, 0.75 * 1 + 0.25 * 3))
    assert (plain["drift_relative"], weighted["drift_relative"]) == pytest.approx((2 / 2, 1.5 / 1))
    one, other = (
        {k: v for k, v in r.items() if not k.startswith(("drift_spread", "drift_relative"))} for r in (plain, weighted)
    )
    assert one == other


def test_the_spread_of_a_layer_is_relative_to_its_mean_and_the_last_two_count_together() -> None:
    """Body: 3 and 1, mean 2, 1 apart. Head: (4, 0) and (0, 2), mean (2, 1) of length √5, from which both are √5 apart.
    Together: mean of length √(4 + 5), both √(1 + 5) apart. The first layer, which moves by 7, is not of the last two.
    """
    record = drift_record(vectors({0: 7, 1: 3, 7: 4}, {0: 7, 1: 1, 8: 2}))
    assert record["drift_relative_layers"] == {"network": 0, "body": pytest.approx(1 / 2), "head": pytest.approx(1)}
    assert record["drift_relative_head"] == pytest.approx(math.sqrt(6) / 3)
    assert record["drift_relative"] == pytest.approx(math.sqrt(6) / math.sqrt(9 + 49))


def test_projection_takes_out_what_the_updates_share_or_what_they_differ_in() -> None:
    """(1, ±1): without the first coordinate the mean is 0, so there is no ratio; without the second the variance is."""
    d = vectors({1: 1, 2: 1}, {1: 1, 2: -1})
    for axis in (1, 2):
        record = drift_record(d, previous=vectors({axis: 5})[0])
        assert record["drift_projected"] is record["drift_projected_absolute"] is None
    # along 1 all are 2; apart: 1 + 1 + 4 along 2, 2 along 3
    d = vectors({1: 2, 2: 1, 3: 1}, {1: 2, 2: 1, 3: -1}, {1: 2, 2: -2})
    shared = drift_record(d, previous=vectors({1: -3})[0])
    assert shared["drift_projected_absolute"] is None  # what is left has no mean
    own = drift_record(d, previous=vectors({2: 0.1})[0])
    assert own["drift_projected_absolute"] == pytest.approx(math.log(8 / 2)) == pytest.approx(own["drift_projected"])
    # off (1, 1) the update (3, 1) becomes (1, −1), and (1, 1) becomes 0
    tilted = drift_record(vectors({1: 3, 2: 1}, {1: 1, 2: 1}), previous=vectors({1: 1, 2: 1})[0])
    assert tilted["drift_projected_absolute"] == pytest.approx(math.log(2 / 1))
    assert tilted["drift_projected"] == pytest.approx(math.log((2 / 5) / (1 / 0.5)))


def test_ranks_of_cosines_and_of_their_sizes() -> None:
    along = vectors({1: 1})[0]
    acute = drift_record(vectors({1: 1}, {1: 1, 2: 1}, {1: 1, 2: 3}), previous=along)
    assert acute["drift_previous_rank"] == pytest.approx(1)
    obtuse = drift_record(vectors({1: -1}, {1: -1, 2: 1}, {1: -1, 2: 3}), previous=along)
    assert obtuse["drift_previous_rank"] == pytest.approx(-1)
    # sizes 1, 0.7, 0.3 rank 3 2 1; cosines 1 3 2
    mixed = drift_record(vectors({1: -1}, {1: 1, 2: 1}, {1: 1, 2: 3}), previous=along)
    assert mixed["drift_previous_rank"] == pytest.approx(-0.5)
    assert drift_record(vectors({1: 1}), previous=along)["drift_previous_rank"] is None


def test_numerators_and_denominators_of_the_layers_add_up() -> None:
    d = torch.randn(7, SPACE.P, generator=torch.Generator().manual_seed(1))
    record = drift_record(d)
    denominators = {name: float(d[:, at].double().sum(0).square().sum()) for name, at in layer_slices(SPACE).items()}
    numerators = [record["drift_layers"][name] * below for name, below in denominators.items()]
    whole = sum(numerators) / sum(denominators.values())
    assert record["drift_diversity"] == pytest.approx(whole, rel=1e-12)


def test_one_update_is_its_own_and_none_leave_the_global_update_alone() -> None:
    record = drift_record(vectors({1: 2.0}))
    assert (record["drift_cosine_mean"], record["drift_diversity"], record["drift_spread"]) == (1, 1, 0)
    record = measure_updates(
        SPACE, torch.zeros(0, SPACE.P), torch.zeros(0), vectors({1: 3})[0].double(), vectors({1: 1})[0].double()
    )
    tables = {"drift_layers", "drift_relative_layers"}
    assert {k for k, v in record.items() if v is not None} == {"drift_norm_global", "drift_turn"} | tables
    assert (record["drift_norm_global"], record["drift_turn"]) == (3, 1)
    assert {value for name in tables for value in record[name].values()} == {None}


def test_tiny_and_huge_updates_are_measured_alike() -> None:
    """Squares of 1e-25 vanish in float32, and so does 1 beside 1e8."""
    d = vectors({1: 1e-25, 7: 1e-25}, {1: 1e-25, 7: -1e-25})
    assert drift_record(d)["drift_diversity"] == pytest.approx(1)
    assert drift_record(d)["drift_cosine_mean"] == pytest.approx(math.sqrt(0.5))
    d = vectors({1: 1e8, 2: 1.0}, {1: -1e8, 2: 1.0})
    assert drift_record(d)["drift_diversity"] == pytest.approx((2e16 + 2) / 4, rel=1e-12)


# the server -----------------------------------------------------------------------------------------------------------


def server_with_drift(alg: Algorithm, problem: Problem, engine: str = "sequential") -> Server:
    """A server that records drift."""
    server = make_server(alg, problem, LOCAL, engine)
    server.drift_history = drift.history(server.space)
    return server


@pytest.fixture
def problem() -> Problem:
    return classification(skewed_samples([20, 7, 12, 9, 16, 5]))


@pytest.mark.parametrize(
    "alg", [FedAvg(), Scaffold(), FedDPC(), FedGA(form="exact")], ids=lambda alg: alg.display_name()
)
def test_the_record_follows_from_what_was_sent(alg: Algorithm, problem: Problem) -> None:
    server = server_with_drift(alg, problem)
    server.engine = recording = RecordingEngine(server.engine)
    w, previous = server.w.clone(), None
    for t, ids in enumerate(random_cohorts(4, 3, 6), 1):
        record = server.run_round(t, ids)
        deltas, step = recording.calls[-1][2].up["delta"].numpy(), (server.w - w).numpy()
        lengths = np.linalg.norm(deltas, axis=1)
        cosines = deltas @ step / lengths / np.linalg.norm(step)
        assert [record[f"drift_cosine_{end}"] for end in ("mean", "min", "max")] == pytest.approx(
            [cosines.mean(), *sorted(cosines)[::2]]
        )
        assert (record["drift_norm"], record["drift_norm_global"]) == pytest.approx(
            (lengths.mean(), np.linalg.norm(step))
        )
        assert record["drift_diversity"] == pytest.approx((lengths**2).sum() / np.linalg.norm(deltas.sum(0)) ** 2)
        if previous is None:
            assert record["drift_turn"] is record["drift_previous_mean"] is None
        else:
            length = np.linalg.norm(previous)
            assert record["drift_previous_mean"] == pytest.approx((deltas @ previous / lengths / length).mean())
            assert record["drift_turn"] == pytest.approx(step @ previous / np.linalg.norm(step) / length, abs=1e-12)
            residuals = deltas - np.outer(deltas @ previous, previous) / length**2
            before, after = (float(((d - d.mean(0)) ** 2).sum()) for d in (deltas, residuals))
            mean_before, mean_after = (float((d.mean(0) ** 2).sum()) for d in (deltas, residuals))
            assert record["drift_projected_absolute"] == pytest.approx(math.log(before / after))
            relative = before / mean_before / (after / mean_after)
            assert record["drift_projected"] == pytest.approx(math.log(relative))
            cosines, factors = deltas @ previous, lengths / np.linalg.norm(residuals, axis=1)
            ranks = [np.argsort(np.argsort(v)) for v in (cosines / lengths, factors)]
            assert record["drift_previous_rank"] == pytest.approx(np.corrcoef(ranks)[0, 1])
        w, previous = server.w.clone(), step


@pytest.mark.parametrize("alg", [FedAvg(), MGDA(server_lr=0.1)], ids=lambda alg: alg.display_name())
def test_the_variance_of_global_updates_in_a_window(
    alg: Algorithm, problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of windows of three rounds; a round without a usable report is not counted."""
    monkeypatch.setattr(drift, "WINDOW", 3)
    server = server_with_drift(alg, problem)
    server.engine = FaultyReports(server.engine, {5})
    models, records = [server.w.clone()], list[dict[str, Any]]()
    for t, ids in enumerate([[0, 1], [1, 2], [2, 3], [0, 4], [5], [3, 1], [0, 2]], 1):
        records.append(server.run_round(t, ids))
        models.append(server.w.clone())
    for end, window in ((3, models[:4]), (6, [models[3], models[4], models[6]])):
        steps = torch.stack([b - a for a, b in pairwise(window)])
        relative = (steps - steps.mean(0)).square().sum() / len(steps) / steps.mean(0).square().sum()
        assert records[end - 1]["drift_window"] == pytest.approx(float(relative))
    assert [t for t, r in enumerate(records, 1) if "drift_window" in r] == [3, 6]


def test_each_update_of_feddpc_is_orthogonal_to_the_last_and_those_of_fedavg_are_not(problem: Problem) -> None:
    turns = {}
    for alg in (FedDPC(), FedAvg()):
        records = run_rounds(server_with_drift(alg, problem), random_cohorts(6, 3, 6))
        turns[alg.display_name()] = [abs(r["drift_turn"]) for r in records[1:]]
    assert max(turns["FedDPC"]) < 1e-12 < 1e-3 < min(turns["FedAvg"])


@pytest.mark.parametrize("projection", [True, False])
def test_feddpc_records_the_turn_of_its_updates_before_rounding(projection: bool, problem: Problem) -> None:
    """Without projection it is how the model turned; with it always 0."""
    server = server_with_drift(FedDPC(projection=projection, scaling=projection), problem)
    records = run_rounds(server, random_cohorts(4, 3, 6))
    assert records[0]["turn"] == 0
    for record in records[1:]:
        assert record["turn"] == pytest.approx(record["drift_turn"], abs=1e-12)
        assert (abs(record["turn"]) < 1e-12) == projection


@pytest.mark.parametrize("engine", ["vmapped", "slots", "stacked", "pairs"])
def test_engines_agree(engine: str, problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drift, "WINDOW", 2)
    servers = (server_with_drift(Scaffold(), problem, name) for name in ("sequential", engine))
    one, other = (run_rounds(server, random_cohorts(3, 4, 6)) for server in servers)
    for a, b in zip(one, other, strict=True):
        assert a.keys() == b.keys()
        for key in a:
            if key.startswith("drift_"):
                assert b[key] == (a[key] if a[key] is None else pytest.approx(a[key], rel=1e-9, abs=1e-12))
    assert one[1]["drift_window"] > 0 and one[1]["drift_projected"] is not None and one[2]["drift_relative_head"] > 0


def test_off_by_default_it_records_nothing_and_computes_nothing(
    problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*arguments: object) -> None:
        raise AssertionError("drift was measured")

    monkeypatch.setattr(drift, "measure_updates", never)
    server = make_server(FedAvg(), problem, LOCAL)
    assert server.drift_history is None and Config().evaluation.drift is False
    assert not any(key.startswith("drift") for record in run_rounds(server, random_cohorts(2, 3, 6)) for key in record)
    assert not any(name.startswith("trail") for name in checkpoint.tensors_of(server))
    with pytest.raises(AssertionError, match="drift was measured"):
        server_with_drift(FedAvg(), problem).run_round(1, [0, 1])


def test_recording_changes_nothing_else(problem: Problem) -> None:
    plain, measured = make_server(FedDPC(), problem, LOCAL), server_with_drift(FedDPC(), problem)
    one, other = (run_rounds(server, random_cohorts(3, 3, 6)) for server in (plain, measured))
    assert torch.equal(plain.w, measured.w)
    assert one == [{k: v for k, v in r.items() if not k.startswith("drift_")} for r in other]


def test_refused_reports_do_not_count_and_a_round_with_no_others_has_no_drift(problem: Problem) -> None:
    server, fewer = server_with_drift(FedAvg(), problem), server_with_drift(FedAvg(), problem)
    server.engine = FaultyReports(server.engine, {1})
    one, other = server.run_round(1, [0, 1, 2]), fewer.run_round(1, [0, 2])
    drifts = [{k: v for k, v in r.items() if k.startswith("drift_")} for r in (one, other)]
    assert drifts[0] == drifts[1] and one["dropped"] == 1
    history = server.drift_history
    record = server.run_round(2, [1])
    assert not any(key.startswith("drift_") for key in record) and server.drift_history is history


def test_private_coordinates_are_no_drift() -> None:
    problem = classification(skewed_samples([20, 8, 12]), norm="batch")
    records = run_rounds(server_with_drift(FedBN(), problem), [[0, 1, 2], [0, 1]])
    for record in records:
        assert record["drift_layers"]["fc_norm1"] is None and record["drift_layers"]["fc1"] > 1 / 3


def test_a_method_that_sends_no_updates_records_the_global_one(problem: Problem) -> None:
    first, second = run_rounds(server_with_drift(MGDA(server_lr=0.1), problem), [[0, 1, 2], [0, 1, 3]])
    assert second["drift_norm_global"] > 0 and -1 <= second["drift_turn"] <= 1 and first["drift_diversity"] is None


# runs -----------------------------------------------------------------------------------------------------------------


def test_a_resumed_run_remembers_the_last_update(tmp_path: Path) -> None:
    whole = askew.run(TINY)

    def kill(run: askew.Run, record: dict[str, object] | None) -> None:
        if record and record["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        askew.run(TINY, out=tmp_path, watch=kill, save_every=0)
    resumed = askew.run(TINY, out=tmp_path)
    assert [r["drift_turn"] for r in resumed.rounds] == [r["drift_turn"] for r in whole.rounds]
    assert resumed.rounds[2]["drift_turn"] is not None
    assert [r["drift_layers"] for r in askew.load(resumed.folder or "").rounds] == [
        r["drift_layers"] for r in whole.rounds
    ]


def test_reports_show_the_records(tmp_path: Path) -> None:
    runs = [askew.run({**TINY, "algorithm": {"name": name}}, out=tmp_path) for name in ("fedavg", "feddpc", "mgda")]
    run = askew.load(runs[0].folder or "")
    assert run.curve("drift_turn")[0] == [2, 3, 4]
    assert run.curve("drift_layers")[1] == run.curve("drift_layers.none")[1] == []
    assert run.curve("drift_layers.fc1")[1] == [r["drift_layers"]["fc1"] for r in run.rounds]
    Console(width=80, file=(output := StringIO())).print(terminal.run_details(run))
    printed = output.getvalue()
    assert "drift_previous_acute" in printed and "drift_layers" not in printed
    assert [row["algorithm"] for row in table(runs)] == ["fedavg", "feddpc", "mgda"]
    pictures = {picture.name: picture for picture in draw_pictures(group_runs(runs))}
    assert {"drift", "layers"} <= set(pictures)
    assert "fedavg" in pictures["layers"].alt and "mgda" not in pictures["layers"].alt
    assert len(pictures["drift"].figure.axes) == 3 and b"<svg" in pictures["layers"].render("svg")
    first_line = (run.folder or tmp_path).joinpath("rounds.jsonl").read_text().splitlines()[0]
    assert json.loads(first_line)["drift_turn"] is None


def test_without_records_there_are_no_pictures_of_drift() -> None:
    plain, global_only = (
        askew.run({**TINY, "rounds": 2, **more}) for more in ({"evaluation": {}}, {"algorithm": {"name": "mgda"}})
    )
    for run in (plain, global_only):
        assert not {"drift", "layers", "coverage"} & {picture.name for picture in draw_pictures(group_runs([run]))}


# fairness across clients ----------------------------------------------------------------------------------------------


def test_held_out_samples_are_not_training_samples() -> None:
    tables = {"partition": {"name": "iid", "clients": 5, "validation": 0.5}, "model": {"name": "softmax"}}
    built = build(Config.build(tables))
    fed, page = built.fed, built.fed.labels()
    assert [sum(row) for row in page["labels"]] == page["sizes"] == fed.sizes.tolist()
    counts, sizes = client_label_counts(built.config)
    assert counts.tolist() == page["labels"] and sizes.tolist() == page["sizes"]
    weights = torch.randn(built.space.P, generator=torch.Generator().manual_seed(0))
    record = client_spread(built.task, weights, built.space.buffers, fed, built.server.private, None)
    right = []
    for client, work in enumerate(fed.plan(range(5), 1, LocalSettings(epochs=1)).train):
        pool = fed.gather([client])[0]
        own = Samples(pool.x[work.places], pool.y[work.places])
        right.append(float(per_sample(built.task, weights, built.space.buffers, own, fed)[0].mean()))
    assert record["client_accuracy_mean"] == pytest.approx(np.mean(right), abs=1e-6)


def test_the_spread_over_clients_against_predictions_one_by_one() -> None:
    problem = classification(skewed_samples([9] * 20, seed=3))
    server = make_server(FedAvg(), problem, LOCAL)
    run_rounds(server, [[0, 1, 2]])
    task = Bound(problem.module, server.space)
    predict = lambda x: torch.func.functional_call(task.eval_module, server.space.split(server.w), (x,))[0].argmax(1)
    accuracy = sorted(float((predict(s.x) == s.y).double().mean()) for s in map(problem.samples, range(20)))
    record = client_spread(task, server.w, server.buffers, problem.fed, server.private, None)
    expected = {
        "mean": np.mean(accuracy),
        "worst10": np.mean(accuracy[:2]),
        "best10": np.mean(accuracy[-2:]),
        "std": np.std(accuracy),
    }
    assert record == {f"client_accuracy_{what}": pytest.approx(value) for what, value in expected.items()}
    assert accuracy[1] < accuracy[-2]


def test_clients_with_models_of_their_own_are_measured_with_these() -> None:
    """A client that trains alone on two labels has a model that is good for these and poor on the common test set."""
    tables = {
        **TINY,
        "rounds": 3,
        "algorithm": {"name": "solo"},
        "partition": {"name": "labels", "labels": 2, "clients": 6},
    }
    run = askew.run(
        {**tables, "participation": {"name": "full"}, "local": {"epochs": 10}, "evaluation": {"spread": True}}
    )
    last = run.rounds[-1]
    assert last["accuracy"] < 0.35 and last["client_accuracy_worst10"] > 0.9


def test_for_whom_a_step_raised_the_loss() -> None:
    """A server that goes too far: the share of participants whose mean loss on their own samples grew, by hand."""
    tables = {**TINY, "partition": {"name": "labels", "labels": 2, "clients": 6}, "participation": {"cohort": 4}}
    config = Config.build(
        tables
        | {
            "algorithm": {"server_scale": 3.0},
            "engine": {"dtype": "float64"},
            "evaluation": {"every": 2, "descent": True},
        }
    )
    run, parts = run_config(config), build(config)
    shares = []
    for t, record in enumerate(run.rounds, 1):
        models = [(parts.server.w, parts.server.buffers)]
        parts.server.run_round(t, record["participants"])
        models.append((parts.server.w, parts.server.buffers))
        grew = []
        for own in parts.fed.gather(record["participants"])[1]:
            x, y = parts.fed.inputs(parts.fed.pool.x[own]), parts.fed.pool.y[own]
            before, after = (
                float(nn.functional.cross_entropy(parts.task.frozen(*m, Batch(x, y))[0], y)) for m in models
            )
            grew.append(after - before > 1e-4)
        shares.append(np.mean(grew) if t % 2 == 0 else None)
    assert [r.get("raised") for r in run.rounds] == shares and 0 < shares[1] < 1


def test_nobody_is_left_for_whom_a_step_could_raise_the_loss() -> None:
    """Rounds in which no participant answers have no such share, whether or not the data were divided beforehand."""
    tables = {**TINY, "rounds": 3, "participation": {"cohort": 1, "dropout": 1.0}, "evaluation": {"descent": True}}
    for data in ({"name": "digits"}, {"name": "synthetic", "test_clients": 2}):
        run = askew.run({**tables, "data": data, "partition": {"clients": 3}})
        assert [r["participants"] for r in run.rounds] == [[], [], []]
        assert all(r["raised"] is None and r["accuracy"] is not None for r in run.rounds)
