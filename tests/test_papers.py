"""The papers' experiments: every one is there, plans the runs that it should, and runs at its smallest scale."""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from dataclasses import replace
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from askew.cli.main import main
from askew.core.records import Record
from askew.core.task import Functional
from askew.data.federation import Federation
from askew.engine.evaluate import Evaluator, selection_half
from askew.engine.settings import EngineSettings
from askew.errors import ConfigError, ModelError, StoreError, UnknownName
from askew.experiment.build import build
from askew.experiment.config import Config
from askew.experiment.curves import rounds_to
from askew.experiment.launch import run_config as play_one
from askew.experiment.store import Run
from askew.reproduction import cost, papers
from askew.reproduction.comparison import TableCell, table_cells
from askew.reproduction.cost import (
    Estimate,
    estimate_memory,
    estimate_seconds,
    experiment_cost,
    network_name,
    run_cost,
    training_speeds,
)
from askew.reproduction.digests import result_digest, seed_digests
from askew.reproduction.evidence import GridPoint, choose_point, metric_value
from askew.reproduction.expressions import RecordedCurve, is_missed, rounds_or_last, rounds_or_one_more
from askew.reproduction.paper_figures import untrained_table, write_paper_figures
from askew.reproduction.paper_tables import long_duration, metric_table
from askew.reproduction.papers import find_experiment, papers_folder
from askew.reproduction.plan import Reproduction, chosen_points, prepare_reproduction
from askew.reproduction.planned_runs import PlannedRun, configure_runs, hyper_text, merge_tables, plan_runs, run_specs
from askew.reproduction.printed import PrintedNumber, read_printed
from askew.reproduction.provenance import Provenance, source_commit, source_hash
from askew.reproduction.reproduce import reproduce, run_missing
from askew.reproduction.results import (
    ResultRow,
    metrics_by_run,
    read_results,
    read_results_file,
    result_rows,
    run_command,
    run_provenance,
    write_results,
)
from askew.reproduction.run_metrics import TO_TARGET, parse_curve, run_metrics
from askew.reproduction.worked_examples import global_models, least_squares, worked_example

# Every table and figure of the papers, and what was added to them, by the names under which they are known.
NAMED = {
    "feddpc": "table1 table2 fig3 fig4 fig5 fig6 fig7 fair-scale lambda",
    "feddc": "table1/mnist table1/fmnist table1/emnist table1/cifar10 table1/cifar100 table2 "
    "table3/setting1 table3/setting2 table3/setting3 fig1 fig3 local-models cost",
    "mldl24": "central-cifar100 central-shakespeare fedavg-baseline fedavg-shakespeare-C table1-cifar100 "
    "table1-shakespeare table2 fig1 skew-shakespeare-iid mgda-batch fig16 fig17 table3 table4 fig21 cost",
    "fedpmvr": "table1 table2 table3 fig1 fig2 fig3 fig4 fig5 fig6 fig7 fig8 fig9 fig10 fig11 readings cost",
    "fedpdc": "table2 table3 table4 table5 fig3 fig4 fig5 fig6 fig7 solo adaptive variants partial",
}
ALL = sorted(papers.experiments())
# Experiments that are run in every test: all kinds, a grid, runs of others, and each way to lay out a figure.
FAST = {
    *("mldl24/central-shakespeare-grid", "mldl24/table3", "feddc/fig3"),
    *("mldl24/central-shakespeare", "mldl24/fedavg-shakespeare-C", "mldl24/table2"),
    *("fedpmvr/fig11", "fedpmvr/fig5", "mldl24/fig1", "fedpdc/fig3", "fedpmvr/fig1", "mldl24/cost"),
}


def run_of(config: Config, rounds: list[Record], **facts: Any) -> Run:
    return Run(config.tables(), rounds, {"device": "cpu", "version": "1", **facts})


def rounds_of(accuracy: list[float | None], loss: float | None = 1.0) -> list[Record]:
    return [
        {
            "round": n,
            "participants": [0],
            "accuracy": a,
            "loss": 2.0,
            "train_loss": loss,
            "seconds": 0.5,
            "bytes_up": 8,
            "bytes_down": 8,
        }
        for n, a in enumerate(accuracy, 1)
    ]


# the files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [f"{paper}/{e}" for paper, names in NAMED.items() for e in names.split()])
def test_every_experiment_has_a_file(name: str) -> None:
    assert find_experiment(name).title and find_experiment(name).where


def test_our_own_are_there_too() -> None:
    assert [find_experiment(name).id for name in ("cross", "skew × method", "identities", "quadratics", "turnout")] == [
        "ours/cross",
        "ours/skew-x-method",
        "ours/identities",
        "ours/quadratics",
        "ours/turnout",
    ]


@pytest.mark.parametrize("id", ALL)
@pytest.mark.parametrize("scale", papers.SCALES)
def test_every_scale_can_be_planned(id: str, scale: str) -> None:
    e = find_experiment(id)
    planned = configure_runs(e, scale)
    assert planned and all(p.config.rounds for p in planned)
    if scale == "smoke" and e.trains:
        assert all(p.config.rounds <= 8 and p.config.partition.clients <= 4 for p in planned) and len(planned) <= 30


@pytest.mark.parametrize(
    ("id", "runs"),
    [
        ("feddpc/table2", 540),  # 90 for each dataset and α
        ("feddpc/fig7", 14),
        ("feddc/table1-mnist", 30),
        ("feddc/table3-setting1", 144),
        ("feddc/table3-setting2", 24),
        ("feddc/table3-setting3", 36),
        ("mldl24/central-cifar100", 27),
        ("mldl24/central-shakespeare-grid", 4 * 3 * 2 * 2 * 3),
        ("mldl24/fedavg-shakespeare-C", 72),
        ("mldl24/table3", 15),
        ("fedpmvr/table1", 3 * (4 * 2 * 9 + 1 + 2 + 2 + 3 + 1)),
        ("fedpmvr/fig11", 3 * 5 * 9),
        ("fedpdc/table2", 3 * (1 + 4 + 1 + 4 + 1) + 1),
    ],
)
def test_as_many_runs_as_the_grids_have(id: str, runs: int) -> None:
    assert len(plan_runs(find_experiment(id))) == runs == sum(1 for _ in run_specs(find_experiment(id)))


FULL: dict[tuple[str, str, str], dict[str, Any]] = {
    ("feddpc/table2", "cifar10-0.6", "FedDPC"): {
        "rounds": 400,
        "data.name": "cifar10",
        "partition.name": "dirichlet",
        "partition.clients": 100,
        "partition.alpha": 0.6,
        "participation.cohort": 10,
        "model.name": "lenet",
        "algorithm.lam": 1.0,
        "algorithm.weighting": "uniform",
        "local.epochs": 1,
        "local.batch": 256,
        "local.momentum": 0.0,
        "evaluation.every": 1,
    },
    ("feddpc/table2", "tiny_imagenet-0.2", "FedGA"): {
        "rounds": 800,
        "model.name": "resnet18",
        "model.norm": "group",
        "model.groups": 2,
        "model.stem": "small",
        "algorithm.form": "memory",
        "partition.alpha": 0.2,
    },
    ("feddc/table3-setting1", "mnist-D2-15", "FedDC"): {
        "rounds": 600,
        "partition.name": "dirichlet_prior",
        "partition.alpha": 0.3,
        "partition.clients": 100,
        "participation.name": "bernoulli",
        "participation.fraction": 0.15,
        "data.flip": False,
        "data.pad": 0,
        "model.hidden": (200, 200),
        "algorithm.alpha": 0.1,
        "algorithm.variate_lr": "initial",
        "local.epochs": 5,
        "local.batch": 50,
        "local.lr": 0.1,
        "local.decay": 0.998,
        "local.weight_decay": 1e-3,
        "local.clip": 10.0,
    },
    ("feddc/table3-setting1", "cifar100-iid-full", "FedProx"): {
        "rounds": 1000,
        "partition.balanced": True,
        "participation.name": "full",
        "data.chance": 0.5,
        "data.pad": 4,
        "data.fill": "mean",
        "algorithm.mu": 2e-4,
        "algorithm.weighting": "samples",
    },
    ("feddc/table3-setting1", "cifar10-unbalance-full", "FedDC"): {
        "partition.name": "lognormal",
        "partition.sigma": 0.3,
        "algorithm.alpha": 0.01,
    },
    ("feddc/table3-setting3", "synthetic-0-1-15", "FedDC"): {
        "rounds": 300,
        "data.beta": 1.0,
        "partition.clients": 20,
        "algorithm.alpha": 0.005,
        "local.epochs": 10,
        "local.batch": 10,
        "local.decay": 1.0,
        "local.weight_decay": 1e-5,
    },
    ("mldl24/table2", "Nc5-J16", "FedAvg"): {
        "rounds": 500,
        "local.steps": 16,
        "local.batch": 64,
        "local.lr": 0.1,
        "local.weight_decay": 4e-4,
        "partition.name": "labels",
        "partition.labels": 5,
        "partition.clients": 100,
        "participation.fraction": 0.1,
        "data.crop": 28,
        "data.frozen": True,
        "model.name": "cnn64",
        "evaluation.every": 50,
    },
    ("mldl24/table2", "Nc5-J16", "FedAvg, 72 steps"): {"local.steps": 72, "data.frozen": True},
    ("mldl24/table2", "Nc5-J8", "FedAvg, fresh augmentation"): {"rounds": 1000, "data.frozen": False},
    ("mldl24/table3", "gamma-10", "Loss-biased"): {
        "data.samples": 2250,
        "data.reserve": 250,
        "participation.gamma": 10.0,
        "participation.fraction": 0.1,
        "local.steps": 5,
        "local.batch": 10,
        "local.lr": 1.5,
        "algorithm.measure": "final",
    },
    ("mldl24/table4", "iid-J4", "MGDA"): {
        "algorithm.server_lr": 1.0,
        "algorithm.server_decay": 4e-4,
        "local.weight_decay": 4e-4,
    },
    ("fedpmvr/table1", "fashion_mnist-lenet-0.3", "MOON"): {
        "rounds": 300,
        "data.normalise": "unit",
        "partition.alpha": 0.3,
        "partition.clients": 10,
        "participation.name": "full",
        "local.epochs": 2,
        "local.batch": 32,
        "local.lr": 0.01,
        "local.momentum": 0.9,
        "local.weight_decay": 1e-6,
        "algorithm.mu": 5.0,
        "algorithm.temperature": 0.5,
        "algorithm.weighting": "uniform",
    },
    ("fedpmvr/table3", "cifar10-vgg19-0.1-20of100", "FedPMVR"): {
        "model.name": "vgg19",
        "model.norm": "batch",
        "partition.clients": 100,
        "participation.cohort": 20,
        "algorithm.alpha": 0.1,
        "algorithm.head": 2,
    },
    ("fedpdc/table3", "cifar100-cnn-0.5", "MOON"): {
        "rounds": 100,
        "data.turn": 15.0,
        "partition.public": 1000,
        "partition.alpha": 0.5,
        "model.head": 256,
        "local.epochs": 10,
        "local.batch": 64,
        "local.drop_last": True,
        "local.momentum": 0.9,
        "local.weight_decay": 1e-5,
        "algorithm.weighting": "samples",
    },
    ("fedpdc/table2", "cifar10-cnn-0.1", "SOLO"): {"rounds": 300, "local.epochs": 1, "partition.public": 1000},
    ("fedpdc/table4", "tiny_imagenet-resnet18-0.3", "FedPDC"): {
        "rounds": 20,
        "partition.public": 2000,
        "algorithm.lam": 10.0,
    },
}


@pytest.mark.parametrize("key", FULL, ids=" ".join)
def test_full_settings_are_the_published_ones(key: tuple[str, str, str]) -> None:
    id, case, method = key
    page = plan_runs(find_experiment(id), only=[f"case={case}", f"method={method}"])[0].config.tables()
    for name, value in FULL[key].items():
        table, _, setting = name.partition(".")
        found = page[table][setting] if setting else page[table]
        assert found == value, name


def test_loss_biased_clients_on_text_train_2000_and_validate_250() -> None:
    config = plan_runs(find_experiment("mldl24/table3"), only=["gamma-0", "Loss-biased"])[0].config
    samples, share = int(str(config.data.table()["samples"])), config.partition.validation
    assert share is not None and samples - math.floor(share * samples) == 2000 and math.floor(share * samples) == 250


def test_printed_numbers_belong_to_planned_runs() -> None:
    for paper in NAMED:
        for number in read_printed(papers_folder() / paper):
            method, _, at = number.method.partition(" @ ")
            specs = run_specs(find_experiment(number.experiment))
            known = {(s.case.name, s.method.name, hyper_text(s.hyper) if at else "") for s in specs}
            assert (number.case, method, at) in known, number


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    text = 'title = "t"\nwhere = "here"\nshows = "table"\n[base]\nrounds = 2\n'
    text += '[[method]]\nname = "A"\nset = { local = { lr = 0.5 } }\n'
    file.write_text(text)
    [p] = plan_runs(find_experiment(str(file)))
    assert (p.case, p.method, p.config.rounds, p.config.local.lr) == ("all", "A", 2, 0.5)
    file.write_text(f'seeds = [0, 3.0]\n{text}[grid]\n"local.momentum" = [0.1, 0.2]\n')
    runs = plan_runs(find_experiment(str(file)))
    assert [(p.config.seed, p.config.local.momentum) for p in runs] == [(0, 0.1), (0, 0.2), (3, 0.1), (3, 0.2)]
    assert all(type(p.config.seed) is int for p in runs)
    for wrong, says in (
        (text.replace("shows", "show"), "unknown key 'show'; did you mean 'shows'"),
        (text.replace('"table"', '"tabel"'), "shows must be one of"),
        (text.replace('name = "A"', "lr = 1"), "needs a name"),
        (text + 'cases = ["B"]\n', "there is no 'B' here"),
        (text + '[[method]]\nname = "A"\n', "two cases or two methods"),
        (text + "[scale.tiny]\n", "unknown scale 'tiny'"),
        (text.replace("title", "notes"), "is not an experiment"),
        (f'curves = ["los"]\n{text}', "there is no curve 'los'; did you mean 'loss'"),
        (text.replace("lr =", "rate ="), "unknown setting local.rate"),
        (f"seeds = [0, -1]\n{text}", "seed must be ≥ 0, got -1"),
    ):
        file.write_text(wrong)
        with pytest.raises(ConfigError, match=says):
            plan_runs(find_experiment(str(file)))


# planning -------------------------------------------------------------------------------------------------------


def test_a_table_that_names_another_choice_keeps_what_it_knows() -> None:
    below = {
        "partition": {"name": "dirichlet", "clients": 7, "alpha": 0.2, "cap": True},
        "rounds": 3,
        "algorithm": {"weighting": "uniform"},
    }
    above = {"partition": {"name": "iid"}, "algorithm": {"name": "fedprox", "mu": 1.0}}
    assert merge_tables(below, above) == {
        "partition": {"name": "iid", "clients": 7},
        "rounds": 3,
        "algorithm": {"name": "fedprox", "weighting": "uniform", "mu": 1.0},
    }
    assert merge_tables(below, {"partition": {"alpha": 0.5}})["partition"] == below["partition"] | {"alpha": 0.5}  # type: ignore[operator]


def test_a_grid_point_does_not_change_the_settings_of_other_runs() -> None:
    """FedAsync tunes local.lr, the other methods of this experiment do not; planned twice, their rates are the same."""
    experiment = find_experiment("fedbuff/cifar10")
    for _ in range(2):
        rates = {p.config.local.lr for p in configure_runs(experiment) if p.method != "FedAsync"}
        assert rates == {0.01}


def test_no_number_of_a_table_is_cut_on_a_narrow_terminal() -> None:
    point = "algorithm.alpha=0.0123 local.lr=0.1"
    cells = [
        TableCell(
            f"cifar10-0.{n}, on digits", "FedProx", point, "best_accuracy", [0, 1], [61.0, 62.5], 8, None, [60.0], ""
        )
        for n in range(3)
    ]
    console = Console(file=StringIO(), width=80)
    console.print(metric_table(cells, with_paper=True))
    assert isinstance(console.file, StringIO)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text
    for number in ("alpha=0.0123", "local.lr=0.1", "61.75 ± 1.06", "60.00"):
        assert text.count(number) == 3


def test_only_names_of_a_kind_widen_and_kinds_narrow() -> None:
    e = find_experiment("feddpc/table2")
    picked = plan_runs(e, only=["cifar10-0.2", "case=cifar10-0.6", "FedProx", "local.lr=0.1"])
    assert Counter((p.case, p.method) for p in picked) == {("cifar10-0.2", "FedProx"): 4, ("cifar10-0.6", "FedProx"): 4}
    assert {p.seed for p in plan_runs(e, "smoke", 3, ["seed=2"])} == {2}
    for wrong in ("case=cifar", "method=Fed", "momentum=0.9", "nothing"):
        with pytest.raises(UnknownName):
            plan_runs(e, only=[wrong])
    with pytest.raises(ConfigError, match="no run here has seed=3; the values are 0, 1, 2"):
        plan_runs(e, "smoke", 3, ["seed=3"])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("feddpc/fig6", "cifar10-0.2", "FedDPC"), ("feddpc/table2", "cifar10-0.2", "FedDPC", "local.lr=0.1")),
        (
            ("feddpc/fig7", "cifar10-0.2", "FedAvg factor 2"),
            ("feddpc/fair-scale", "cifar10-0.2", "FedAvg factor 2", "local.lr=0.1"),
        ),
        (("feddc/table1-cifar10", "D1-full", "FedDC"), ("feddc/table3-setting1", "cifar10-D1-full", "FedDC")),
        (("feddc/table1-mnist", "iid-15", "SCAFFOLD"), ("feddc/table3-setting1", "mnist-iid-15", "SCAFFOLD")),
        (("mldl24/fedavg-baseline", "iid-J4", "FedAvg"), ("mldl24/table1-cifar100", "gamma-0", "FedAvg")),
        (("mldl24/table2", "Nc10-J4", "FedAvg"), ("mldl24/table4", "Nc10-J4", "FedAvg")),
        (("mldl24/table1-shakespeare", "gamma-5", "FedAvg"), ("mldl24/table3", "gamma-5", "FedAvg")),
        (("fedpmvr/fig10", "cifar10-cnn-0.1", "α 0.1"), ("fedpmvr/table1", "cifar10-cnn-0.1", "FedPMVR")),
        (("fedpmvr/fig11", "clients-10", "MOON"), ("fedpmvr/table1", "cifar10-cnn-0.1", "MOON")),
        (("fedpdc/variants", "cifar10-cnn-0.1", "literal λ 10"), ("fedpdc/table2", "cifar10-cnn-0.1", "FedPDC")),
        (("fedpdc/solo", "cifar100-cnn-0.1", "SOLO"), ("fedpdc/table3", "cifar100-cnn-0.1", "SOLO")),
    ],
)
def test_experiments_share_equal_runs(one: tuple[str, ...], other: tuple[str, ...]) -> None:
    digests = [{p.digest for p in plan_runs(find_experiment(id), seeds=1, only=only)} for id, *only in (one, other)]
    assert digests[0] == digests[1] and len(digests[0]) == 1


def test_the_digest_tells_what_is_computed_and_not_where() -> None:
    config = plan_runs(find_experiment("feddpc/fig6"))[0].config
    assert result_digest(replace(config, engine=EngineSettings(dtype="tf32", workers=2))) == result_digest(config)
    for other in (
        replace(config, seed=1),
        replace(config, rounds=9),
        replace(config, local=replace(config.local, lr=0.2)),
    ):
        assert result_digest(other) != result_digest(config)
    spelled = Config.build(
        {**config.tables(), "evaluation": {"every": 1, "halves": True, "drift": True, "spread": False}}
    )
    assert result_digest(spelled) == result_digest(config)  # a default that is written down changes nothing
    assert seed_digests(config, (4, 7)) == {seed: result_digest(replace(config, seed=seed)) for seed in (4, 7)}


# running --------------------------------------------------------------------------------------------------------


@pytest.fixture
def three_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs at smoke scale have three rounds instead of eight: enough to see that everything is recorded and shown."""
    whole = papers.Experiment.at

    def shortened(e: papers.Experiment, scale: str) -> papers.Scale:
        at = whole(e, scale)
        return at._replace(set=at.set | {"rounds": 3}) if "rounds" in at.set else at

    monkeypatch.setattr(papers.Experiment, "at", shortened)


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for all tests: runs that experiments share are trained once."""
    return tmp_path_factory.mktemp("papers")


def test_every_kind_of_experiment_is_among_the_fast_ones() -> None:
    fast = [find_experiment(id) for id in FAST]
    assert {e.shows for e in fast} == set(papers.SHOWS)
    assert any(e.runs for e in fast) and any(e.grid for e in fast)
    assert any("panels" in e.axis for e in fast) and any("hyper" in e.axis for e in fast)


@pytest.mark.parametrize("id", [pytest.param(id, marks=[pytest.mark.slow] * (id not in FAST)) for id in ALL])
def test_every_experiment_runs_at_smoke_scale(id: str, desk: Path, three_rounds: None) -> None:
    e = find_experiment(id)
    cells = reproduce(id, "smoke", out=desk / "runs", results=desk / "results")
    reproduction = prepare_reproduction(id, "smoke", results=desk / "results")
    assert not reproduction.missing
    example = worked_example(e.id, "smoke") if e.shows == "toy" else None
    pictures = write_paper_figures(reproduction, desk / "figures", example)
    assert bool(pictures) == (
        bool(e.axis) or e.shows in ("heatmap", "histogram", "coverage") or id in ("fedpmvr/fig1", "ours/quadratics")
    )
    if e.trains:
        wanted = {(p.case, p.method) for p in reproduction.planned}
        assert wanted == {(cell.case, cell.method) for cell in cells if cell.metric == e.metric}
        assert all(len(cell.values) == len(cell.seeds) for cell in cells)
    else:
        assert not cells
        assert e.shows == "toy" or len(untrained_table(reproduction)[1]) == len(configure_runs(e, "smoke"))


def test_a_run_cut_off_loses_nothing_and_what_is_stored_is_not_trained_again(tmp_path: Path) -> None:
    """Stopped in the moment in which the second of three runs ends: it is stored, though nobody got it back."""
    out, results = tmp_path / "runs", tmp_path / "results"
    ends, trained = list[str](), list[str]()

    def watch(run: Run, record: Record | None) -> None:
        ends.extend([run.name] * (record is not None and run.finished))
        if len(ends) == 2:
            raise KeyboardInterrupt

    reproduction = prepare_reproduction("feddpc/fig7", "smoke", results=results)
    with pytest.raises(KeyboardInterrupt):
        list(run_missing(reproduction, out, results, watch))
    reproduction = prepare_reproduction("feddpc/fig7", "smoke", results=results)
    assert [p.method for p in reproduction.missing] == ["FedAvg factor 2"]
    list(run_missing(reproduction, out, results, lambda run, record: trained.append(run.algorithm)))
    assert set(trained) == {"fedavg"} and not reproduction.missing
    stored = table_cells(reproduction)
    trained.clear()
    again = reproduce("feddpc/fig7", "smoke", (), None, "nowhere", results, lambda run, _: trained.append(run.name))
    assert again == stored and len(stored) >= 3 and not trained and not Path("nowhere").exists()


def test_further_seeds_are_run_at_the_chosen_points_alone(tmp_path: Path) -> None:
    cells = reproduce(
        "feddpc/table2", "smoke", ["FedProx"], seeds=3, out=tmp_path / "runs", results=tmp_path / "results"
    )
    rows = [r for r in read_results(tmp_path / "results") if r.metric == "best_accuracy"]
    assert Counter(r.seed for r in rows)[0] == 2
    [cell] = [c for c in cells if c.metric == "best_accuracy"]
    tried = {r.hyper: float(r.value) for r in rows if r.seed == 0}
    assert cell.seeds == [0, 1, 2] and tried[cell.hyper] == max(tried.values())
    assert {r.hyper for r in rows if r.seed} <= {cell.hyper, cell.held_out_hyper}


def test_curves_that_nothing_uses_are_pruned_and_restored_once_they_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("askew.reproduction.prune_curves.experiments", dict)  # no others use them
    file, where = tmp_path / "mine.toml", {"out": tmp_path / "runs", "results": tmp_path / "results"}
    page = 'title = "t"\nwhere = "here"\nshows = "table"\naxis = { y = ["accuracy"] }\nchoose = ["best_accuracy"]\n'
    page += "[base]\nrounds = 2\nevaluation = { halves = true }\npartition = { clients = 4 }\n"
    page += '[grid]\n"local.lr" = [1e-6, 0.5, 0.01, 0.1]\n'
    file.write_text(page)
    cells = reproduce(str(file), seeds=2, **where)
    rows = read_results(tmp_path / "results")
    curves = {(r.hyper, r.seed) for r in rows if r.metric == "accuracy"}
    [cell] = [c for c in cells if c.metric == "best_accuracy"]
    assert curves == {(hyper, seed) for hyper in (cell.hyper, cell.held_out_hyper) for seed in (0, 1)}
    assert len({r.hyper for r in rows if r.metric == "best_accuracy"}) == 4
    # a run without its curve is finished nevertheless
    assert not prepare_reproduction(str(file), seeds=2, results=tmp_path / "results").missing
    assert not prepare_reproduction(str(file), only=["local.lr=1e-6"], results=tmp_path / "results").missing
    file.write_text(page.replace("best_accuracy", "-best_accuracy"))  # the worst is chosen now
    reproduction, trained = prepare_reproduction(str(file), results=tmp_path / "results"), list[str]()
    [p] = reproduction.missing
    [[worst, *_]] = chosen_points(reproduction, reproduction.planned).values()
    assert (hyper_text(p.hyper), 0) not in curves and p.hyper == worst
    reproduce(str(file), **where, watch=lambda run, record: trained.append(run.name))
    assert "accuracy" in metrics_by_run(read_results(tmp_path / "results"))[p.key]
    assert not trained  # the curve was read from its run folder
    assert not prepare_reproduction(str(file), results=tmp_path / "results").missing
    file.write_text(f'curves = ["loss"]\n{file.read_text()}')  # which no run has
    assert hyper_text(worst) in {
        hyper_text(p.hyper) for p in prepare_reproduction(str(file), results=where["results"]).missing
    }
    reproduce(str(file), **where)
    stored = metrics_by_run(read_results(tmp_path / "results"))[p.key]
    assert "loss" in stored and "train_loss" not in stored
    assert not prepare_reproduction(str(file), results=where["results"]).missing


def test_data_and_weights_that_are_not_there_are_missed_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASKEW_DATA", str(tmp_path))
    monkeypatch.setattr("askew.data.files.chosen_folder", None)
    with pytest.raises(Exception, match="askew data get mnist"):
        reproduce("feddc/table1-mnist", "reduced", out=tmp_path / "runs", results=tmp_path / "results")
    monkeypatch.setattr("askew.reproduction.reproduce.files.table", {})
    with pytest.raises(ModelError, match="no file of weights"):
        reproduce("feddc/table2", out=tmp_path / "runs", results=tmp_path / "results")
    assert not (tmp_path / "runs").exists()


# choosing -------------------------------------------------------------------------------------------------------


def test_ties_are_broken_by_the_next_metric_and_what_diverged_loses_them() -> None:
    points = [
        GridPoint({"a": n}, {0: {"best_accuracy": accuracy, "mean_train_loss_100": loss}}, {}, {})
        for n, (accuracy, loss) in enumerate((("0.5", "inf"), ("0.5", "2"), ("0.5", "1"), ("0.4", "0")))
    ]
    rule = ("best_accuracy", "-mean_train_loss_100")
    assert choose_point(points, rule, [0]) == points[2] and choose_point(points[:2], rule, [0]) == points[1]
    unmeasured = GridPoint({"a": 9}, {0: {"best_accuracy": "0.5"}}, {}, {})
    assert choose_point([unmeasured, *points], rule, [0]) == points[2]  # no measured loss is the worst one
    assert choose_point(points, ("chosen_accuracy",), [0]) is None
    assert choose_point([], rule, [0]) is None and choose_point(points, rule, []) is None


def measured_run(planned: PlannedRun, **metrics: float) -> dict[tuple[str, int], dict[str, str]]:
    return {(planned.digest, planned.seed): {name: str(value) for name, value in metrics.items()}}


def test_the_half_that_chooses_does_not_report() -> None:
    """The test set prefers μ 0.1, its choosing half μ 0.01: what the other half says of that is shown beside."""
    e = find_experiment("feddpc/table2")
    planned = plan_runs(e, "smoke", 1, ["FedProx"])
    runs = measured_run(
        planned[0], best_accuracy=0.60, chosen_accuracy=0.61, reported_accuracy=0.59, mean_train_loss_100=1
    )
    runs |= measured_run(
        planned[1], best_accuracy=0.59, chosen_accuracy=0.63, reported_accuracy=0.55, mean_train_loss_100=1
    )
    reproduction = Reproduction(e, "smoke", ("FedProx",), 1, None, runs, planned)
    assert chosen_points(reproduction, planned) == {
        ("feddpc/table2", "cifar10-0.2", "FedProx"): [planned[0].hyper, planned[1].hyper]
    }
    [cell] = [c for c in table_cells(reproduction) if c.metric == "best_accuracy"]
    assert (cell.values, cell.hyper) == ([60.0], hyper_text(planned[0].hyper)) and cell.held_out == [
        pytest.approx(55.0)
    ]
    assert cell.held_out_hyper == hyper_text(planned[1].hyper)
    reproduction.runs.pop((planned[1].digest, 0))
    assert chosen_points(reproduction, planned) == {
        ("feddpc/table2", "cifar10-0.2", "FedProx"): []
    } and not table_cells(reproduction)


def test_halves_of_the_test_set_are_fixed_disjoint_and_make_up_the_whole() -> None:
    config = Config.build({"rounds": 2, "partition": {"clients": 3}, "evaluation": {"halves": True}})
    built = build(config)
    functional = Functional(built.module, built.space, built.fed.criterion)
    w, buffers, test = built.server.w, built.server.buffers, built.fed.test
    accuracy, _, choosing = Evaluator(functional, built.fed, test, halves=True)(w, buffers).tolist()
    right = (functional.frozen(w, buffers, test)[0].argmax(-1) == test.y).double()  # type: ignore[arg-type]
    half = selection_half(len(test.y))
    assert len(half) == len(test.y) // 2 == len(set(half.tolist())) and torch.equal(half, selection_half(len(test.y)))
    assert choosing == pytest.approx(float(right[half].mean())) and accuracy == pytest.approx(float(right.mean()))
    for record in play_one(config).rounds:
        other = np.setdiff1d(np.arange(len(test.y)), half)
        whole = (len(half) * record["accuracy_choose"] + len(other) * record["accuracy_report"]) / len(test.y)
        assert whole == pytest.approx(record["accuracy"], abs=1e-12)
    assert "accuracy_choose" not in play_one(Config.build({"rounds": 1, "partition": {"clients": 3}})).rounds[-1]


# results --------------------------------------------------------------------------------------------------------


def test_metrics_of_a_run() -> None:
    config = Config.build({"rounds": 4, "evaluation": {"every": 2}})
    metrics = run_metrics(run_of(config, rounds_of([None, 0.5, None, 0.4]), parameters=7), ["accuracy", "train_loss"])
    assert (
        metrics["best_accuracy"] == "0.5"
        and metrics["best_round"] == "2"
        and metrics["last_accuracy"] == "0.4"
        and metrics["last_loss"] == "2"
    )
    assert (
        metrics["mean_accuracy_50"] == "0.5"
        and metrics["mean_accuracy_100"] == "0.45"
        and "mean_accuracy_10" not in metrics
    )
    assert metrics["accuracy"] == "2:0.5 4:0.4" and metrics["train_loss"] == "1 1 1 1" and metrics["parameters"] == "7"
    assert metrics["seconds_per_round"] == "0.5" and "seconds_shared" not in metrics
    shared = run_metrics(run_of(config, rounds_of([None, 0.5, None, 0.4]), together=8))
    assert shared["seconds_shared"] == "0.5" and "seconds_per_round" not in shared
    timed = [
        r | {"seconds_clients": 0.25 + n, "seconds_server": 0.125}
        for n, r in enumerate(rounds_of([None, 0.5, None, 0.4]))
    ]
    metrics, shared = (run_metrics(run_of(config, timed, together=n)) for n in (1, 8))
    assert (
        metrics["seconds_clients"] == "1.75"
        and metrics["seconds_server"] == "0.125"
        and "mean_seconds_clients" not in metrics
    )
    assert "seconds_clients" not in shared  # which had the device to itself in neither part
    assert run_metrics(run_of(config, rounds_of([0.1], loss=None)))["mean_train_loss_100"] == "inf"


def test_curves_survive_being_stored() -> None:
    config = Config.build({"rounds": 3})
    metrics = run_metrics(run_of(config, rounds_of([0.1, 0.98765, 0.3])))["accuracy"]
    assert parse_curve(metrics) == ([1, 2, 3], [0.1, 0.9877, 0.3]) and parse_curve("50:0.2 100:0.4") == (
        [50, 100],
        [0.2, 0.4],
    )
    assert not {"loss", "train_loss"} & run_metrics(run_of(config, rounds_of([0.1]))).keys()  # which nobody asked for
    drifting = [r | {"drift_relative": n} for n, r in enumerate(rounds_of([0.1] * 42), 1)]
    assert run_metrics(run_of(config, drifting), ["drift_relative"])["drift_relative"] == "20:20 40:40 42:42"
    fewer = run_metrics(run_of(config, rounds_of([0.1, 0.98765, 0.3])), curves_every=2)
    assert fewer["accuracy"] == "2:0.9877 3:0.3" and fewer["mean_accuracy_100"] == f"{(0.1 + 0.98765 + 0.3) / 3:.6g}"
    timed = [r | {"clock": 1.5 * n} for n, r in enumerate(rounds_of([0.1, 0.2, 0.3]), 1)]
    on_clock = run_metrics(run_of(config, timed), curves_every=2)
    assert (on_clock["clock"], on_clock["bytes"]) == ("2:3 3:4.5", "2:32 3:48") and "bytes" not in fewer
    assert rounds_to([50, 100], [0.2, 0.4], 0.3) == 100 and rounds_to([50, 100], [0.2, 0.4], 0.5) is None


def test_results_are_merged_by_run_and_metric(tmp_path: Path) -> None:
    p = plan_runs(find_experiment("feddpc/fig6"), "smoke")[0]
    rows = result_rows(p, run_of(p.config, rounds_of([0.1, 0.2])))
    write_results(tmp_path, rows)
    [path] = write_results(tmp_path, [rows[0]._replace(value="9")])
    read = read_results(tmp_path)
    assert (
        path.name == "feddpc-fig6-smoke.csv"
        and len(read) == len(rows)
        and {r.key for r in read} == {r.key for r in rows}
    )
    assert metrics_by_run(read)[p.digest, 0][rows[0].metric] == "9"
    assert p.key in metrics_by_run(read) and p._replace(seed=1).key not in metrics_by_run(read)
    assert rows[0].command.startswith("askew reproduce feddpc/fig6 --scale smoke")
    some = result_rows(p._replace(stored=("accuracy",)), run_of(p.config, rounds_of([0.1, 0.2])))
    assert [row.metric for row in some] == ["accuracy", "provenance"] and "config" not in some[1].value
    path.write_text(path.read_text() + "a,b\n")
    with pytest.raises(StoreError, match=r"line \d+ is not a result"):
        read_results(tmp_path)
    path.write_text("nonsense\n")
    with pytest.raises(StoreError, match="does not begin with digest,experiment"):
        read_results(tmp_path)


def test_results_say_how_they_were_computed(tmp_path: Path) -> None:
    p = plan_runs(find_experiment("feddpc/fig6"), "smoke")[0]
    quick = p._replace(config=replace(p.config, engine=EngineSettings(dtype="tf32", compile=True)))
    run = run_of(quick.config, rounds_of([0.1, 0.2]))
    run.facts |= {"torch": "9.9", "device": "a GPU", "engine": "slots", "together": 3}
    write_results(tmp_path, result_rows(quick, run))
    rows = read_results(tmp_path)
    made = run_provenance(rows)[p.key]
    assert (made.torch, made.device, made.dtype, made.compiled) == ("9.9", "a GPU", "tf32", True)
    assert (made.engine, made.together) == ("slots", 3)
    assert made.date and made.source == source_hash() and made.commit == (source_commit() or None)
    assert result_digest(Config.build(made.config or {})) == p.digest  # the whole configuration, without defaults
    assert all("--dtype tf32 --compile" in row.command for row in rows)
    assert "provenance" not in metrics_by_run(rows)[p.key]  # it is no number
    [path] = tmp_path.glob("*.csv")
    path.write_text(path.read_text().replace('""torch"":', "torch:"))
    with pytest.raises(StoreError, match=r"line \d+ is not a result"):
        read_results(tmp_path)


def test_older_results_say_what_is_not_recorded_and_get_a_whole_command(tmp_path: Path) -> None:
    p = plan_runs(find_experiment("feddpc/fig6"), "smoke")[0]
    row = timed(p, "best_accuracy", "0.5", "NVIDIA H200, tf32, compiled")
    old = [row._replace(command="askew reproduce feddpc/fig6 --scale full --seeds 1 --only 'method=FedDPC λ 1'")]
    write_results(tmp_path, old)
    [read] = read_results(tmp_path)
    assert run_provenance([read])[p.key] == Provenance()
    assert read.command == (
        "askew reproduce feddpc/fig6 --scale full --dtype tf32 --compile --seeds 1 --only 'method=FedDPC λ 1'"
    )
    write_results(tmp_path, [read])
    assert read_results(tmp_path) == [read]


def test_a_stored_command_plans_that_run_alone() -> None:
    for p in plan_runs(find_experiment("feddpc/table2"), "smoke", 2)[-3:]:
        words = run_command(p).replace("'", "").split()
        only = [word for flag, word in pairwise(words) if flag == "--only"]
        [found] = plan_runs(
            find_experiment(words[2]), words[words.index("--scale") + 1], int(words[words.index("--seeds") + 1]), only
        )
        assert found.digest == p.digest


def test_rounds_to_a_target_and_speed_ups() -> None:
    e = find_experiment("fedpmvr/table2")
    planned = plan_runs(e, "smoke", 1, ["FedAvg", "FedProx", "FedBN"])
    planned = [p._replace(config=replace(p.config, rounds=2)) for p in planned]
    curves = {"FedAvg": "0.1 0.2 0.5 0.4", "FedProx": "0.1 0.5 0.5 0.5", "FedBN": "0.1 0.2 0.3 0.4"}
    runs = {(p.digest, p.seed): {"accuracy": curves[p.method]} for p in planned}
    cells = table_cells(Reproduction(e, "smoke", (), 1, None, runs, planned))
    assert {c.method: c.values for c in cells if c.metric == "rounds_to"} == {
        "FedAvg": [3.0],
        "FedProx": [2.0],
        "FedBN": [math.inf],
    }
    assert {c.method: c.values for c in cells if c.metric == "speedup"}["FedProx"] == [
        2 / 2
    ]  # a run has 2 rounds, FedAvg's 3 are cut
    last = Reproduction(replace(e, target="FedAvg last"), "smoke", (), 1, None, runs, planned)
    assert {c.method: c.values for c in table_cells(last) if c.metric == "rounds_to"} == {
        "FedAvg": [3.0],
        "FedProx": [2.0],
        "FedBN": [4.0],
    }


def test_runs_that_stop_at_the_target_count_for_its_rounds_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = 'title = "t"\nwhere = "here"\nshows = "table"\nmetric = "{}"\n{}[base]\nrounds = 8\n'
    text += '[[method]]\nname = "FedAvg"\n[[method]]\nname = "slow"\nset = {{ local = {{ lr = 1e-6 }} }}\n'
    count, best = tmp_path / "count.toml", tmp_path / "best.toml"
    count.write_text(text.format("rounds_to", "target = 0.3\n"))
    best.write_text(text.format("best_accuracy", ""))
    folders = {name: str(tmp_path / name) for name in ("stopped", "whole")}
    words = ["--out", str(tmp_path / "runs"), "--results", folders["stopped"]]
    assert main(["reproduce", str(count), "--stop-at-target", *words]) == 0
    assert main(["reproduce", str(best), "--stop-at-target", *words]) == 2  # it counts no rounds
    assert "--stop-at-target is for experiments that count" in capsys.readouterr().err

    def cells(file: Path, results: str) -> dict[str, list[float]]:
        return {c.method: c.values for c in table_cells(prepare_reproduction(str(file), results=results))}

    reproduce(str(count), out=tmp_path / "others", results=folders["whole"])
    counted = cells(count, folders["whole"])
    assert counted["slow"] == [math.inf] and 1 < counted["FedAvg"][0] < 8
    assert cells(count, folders["stopped"]) == counted
    stored = {r.method: {q.metric for q in read_results(folders["stopped"]) if q.run == r.run} for r in
              read_results(folders["stopped"])}  # fmt: skip
    assert "best_accuracy" in stored["slow"] and TO_TARGET not in stored["slow"]
    assert TO_TARGET in stored["FedAvg"] and not {"accuracy", "best_accuracy", "last_accuracy"} & stored["FedAvg"]
    [row] = [r for r in read_results(folders["stopped"]) if r.metric == TO_TARGET]
    assert "--stop-at-target" in row.command and len(row.value.split()) == counted["FedAvg"][0]
    assert not prepare_reproduction(str(count), results=folders["stopped"]).missing
    higher = tmp_path / "higher.toml"
    higher.write_text(text.format("rounds_to", "target = 0.99\n"))
    for file in (best, higher):  # these need more of that run
        assert [p.method for p in prepare_reproduction(str(file), results=folders["stopped"]).missing] == ["FedAvg"]
    assert set(cells(best, folders["stopped"])) == {"slow"}
    assert main(["reproduce", str(count), "--stop-at-target", "--all-rounds", *words]) == 2
    assert "--stop-at-target and --all-rounds do not go together" in capsys.readouterr().err
    shutil.copytree(folders["stopped"], tmp_path / "copy")
    rest = ["--out", str(tmp_path / "anew"), "--results", str(tmp_path / "copy")]
    assert main(["reproduce", str(count), "--all-rounds", *rest]) == 0
    assert cells(best, str(tmp_path / "copy")) == cells(best, folders["whole"])
    assert cells(count, str(tmp_path / "copy")) == counted
    reproduce(str(best), out=tmp_path / "runs", results=folders["stopped"])  # goes on where the run was stopped
    assert cells(best, folders["stopped"]) == cells(best, folders["whole"])
    assert cells(count, folders["stopped"]) == counted


def test_a_curve_that_ends_at_a_target_says_nothing_of_a_higher_one() -> None:
    metrics = {TO_TARGET: "0.1 0.3 0.5"}
    curve = metric_value(metrics, TO_TARGET)
    assert isinstance(curve, RecordedCurve) and metric_value(metrics, "accuracy") is None
    assert (rounds_or_one_more(curve, 30), rounds_or_last(curve, 50), is_missed(curve, 50)) == (2, 3, 0)
    assert all(math.isnan(f(curve, 51)) for f in (rounds_or_one_more, rounds_or_last, is_missed))
    whole = metric_value({"accuracy": "0.1 0.3 0.5", "best_accuracy": "0.5"}, TO_TARGET)
    assert isinstance(whole, RecordedCurve) and (rounds_or_one_more(whole, 51), is_missed(whole, 51)) == (4, 1)


def test_a_cell_beside_the_papers_number() -> None:
    printed = PrintedNumber("e", "c", "m", "best_accuracy", "50.5", "", "")
    cell = TableCell("c", "m", "", "best_accuracy", [0, 1, 2], [50.0, 51.0, 52.0], 10, printed, [], "")
    assert (cell.mean, cell.std, cell.difference) == (51.0, 1.0, 0.5)
    assert cell._replace(printed=printed._replace(value=">600")).difference is None
    assert cell._replace(values=[math.inf, 1.0]).difference is None
    assert cell._replace(values=[50.0]).std is None


# costs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "id", ["feddpc/fig6", "mldl24/table4", "fedpdc/table2", "feddc/table3-setting3", "mldl24/central-cifar100"]
)
def test_samples_are_counted_as_they_are_trained(id: str) -> None:
    """The formula beside the plans of batches that a run makes, summed over many rounds."""
    for p in plan_runs(find_experiment(id), "smoke")[:3]:
        config = replace(p.config, rounds=30)
        built = build(config)
        fed: Federation = built.fed
        trained = 0
        for t in range(1, config.rounds + 1):
            ids = config.participation.sample(config.seed, t, fed.eligible, fed.clients).tolist()
            trained += sum(len(work.places) for work in fed.plan(ids, t, config.local).train)
        assert run_cost(config).trained == pytest.approx(trained, rel=0.12), p.method


def test_what_a_run_at_full_scale_costs() -> None:
    assert run_cost(plan_runs(find_experiment("fedpmvr/table1"), only=["cifar10-cnn-0.1", "FedAvg"])[0].config) == (
        30_000_000,
        3_000_000,
        300,
    )
    assert run_cost(plan_runs(find_experiment("feddpc/table2"), only=["cifar10-0.2", "FedDPC"])[0].config) == (
        2_000_000,
        4_000_000,
        400,
    )
    config = plan_runs(find_experiment("feddc/table3-setting1"), only=["cifar10-D1-full", "FedDC"])[0].config
    assert estimate_memory(config) == pytest.approx(
        4 * 797_962 * (100 * 2 + 100 * 2 + 2 + 1), rel=0.02
    )  # uploads, states, server
    assert estimate_seconds([config], "an abacus", training_speeds([])) is None


def timed(planned: PlannedRun, metric: str, seconds: str, device: str = "a GPU, tf32") -> ResultRow:
    where = planned.digest, planned.experiment, "full", planned.case, planned.method, hyper_text(planned.hyper)
    return ResultRow(*where, planned.seed, metric, seconds, device, "0", "askew …")


def test_times_follow_from_measured_rounds_with_their_spread() -> None:
    e = find_experiment("feddpc/fig6")
    one, two, three, four, _ = runs = plan_runs(e)  # of 5,000 samples a round, 400 rounds
    shared = [timed(one, "seconds_shared", "0.01"), timed(two, "seconds_shared", "0.01")]  # together: 5e5 a second
    rows = [*shared, timed(three, "seconds_shared", "0.02"), timed(four, "seconds_per_round", "9")]  # 2.5e5; alone
    speeds = training_speeds(rows)
    found = estimate_seconds([four.config], "a GPU", speeds)
    seconds = (2_000_000 + 4_000_000 / 3) / (15_000 / 0.04)  # what is evaluated counts a third
    assert found == pytest.approx(seconds)
    wide = math.exp(1.28 * math.log(2) / math.sqrt(2))  # the standard deviation of two logarithms
    assert found is not None and (found.low, found.high) == pytest.approx((seconds / wide, seconds * wide))
    whole = experiment_cost(e, "full", "a GPU", speeds)  # the list and the plan have one price
    assert whole.seconds == pytest.approx(estimate_seconds([p.config for p in runs], "a GPU", speeds) or 0)
    assert estimate_seconds([four.config], "an abacus", speeds) is None
    [other] = plan_runs(find_experiment("fedpmvr/table1"), "full", 1, ["cifar10-cnn-0.1", "FedAvg"])
    guess = estimate_seconds([other.config], "a GPU", speeds)  # the same network with another load, so less is known
    assert guess is not None and guess == pytest.approx(run_cost(other.config).weight / 375_000)
    assert guess.high / guess >= 0.999 * found.high / found
    alone = training_speeds([timed(four, "seconds_per_round", "0.5")])
    assert estimate_seconds([four.config], "a GPU", alone) == pytest.approx((2_000_000 + 4_000_000 / 3) / 10_000)
    later = timed(three, "provenance", '{"date":"2026-01-02"}')
    newest = estimate_seconds([four.config], "a GPU", training_speeds([*rows, later]))  # of the last day alone: 2.5e5
    assert newest == pytest.approx((2_000_000 + 4_000_000 / 3) / 250_000)
    gone = timed(one, "seconds_shared", "0.01")._replace(experiment="feddpc/gone")
    assert estimate_seconds([one.config], "a GPU", training_speeds([gone])) is None


def test_where_nothing_was_measured_the_speeds_that_come_with_askew_give_the_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = ["reproduce", "feddpc/table2", "--plan", "--results", tmp_path / "none"]
    code, out, _ = run_command_line(capsys, *plan, "--json")
    found = json.loads(out)
    assert code == 0 and found["seconds"]["NVIDIA H200"] is None
    assert found["untimed"]["NVIDIA H200"] == {"resnet18": 360}
    e = find_experiment("feddpc/table2")
    lenet = [p.config for p in plan_runs(e) if network_name(p.config) == "lenet"]
    timed = estimate_seconds(lenet, "NVIDIA H200", training_speeds([]))
    assert timed is not None and found["seconds_timed"]["NVIDIA H200"] == pytest.approx(timed) and 30 < timed < 3000
    code, out, _ = run_command_line(capsys, *plan)
    assert "360 runs of resnet18, which was never timed there" in " ".join(out.split())


def test_own_results_give_a_time_before_those_that_come_with_askew() -> None:
    [planned] = plan_runs(find_experiment("feddpc/table2"), "full", 1, ["cifar10-0.2", "FedDPC"])[:1]
    own = training_speeds([timed(planned, "seconds_shared", "5", "NVIDIA H200")])  # 5,000 samples a round
    found = estimate_seconds([planned.config], "NVIDIA H200", own)
    assert found == pytest.approx((2_000_000 + 4_000_000 / 3) / 1000)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((None, "unknown"), (0.25, "250 ms"), (75, "75 s"), (5000, "83.3 min"), (36_000, "10 h")),
        *((400 * 3600, "16.7 days"), (3e8, "9.51 years"), (Estimate(4e5, 2e5, 9e5), "4.63 days (2.3 to 10 days)")),
    ],
)
def test_long_times_have_a_unit_in_which_they_are_read(seconds: float | None, text: str) -> None:
    assert long_duration(seconds) == text


# small examples -------------------------------------------------------------------------------------------------


def test_the_example_of_two_quadratics_as_printed_and_corrected() -> None:
    rows = {row[0]: row for row in worked_example("fedpmvr/fig1", "full").rows}
    assert [row[1] for row in rows.values()] == ["17 η", "4.75 η", "6.5 η"]
    assert float(rows["optima 15 and 2"][2]) == pytest.approx(8.5, abs=1e-3)
    assert float(rows["optima 3 and 3.5, corrected"][2]) == pytest.approx(3.25, abs=1e-3)
    assert float(rows["optima 3 and 3.5, as printed"][2]) == pytest.approx(9.5 / 3, abs=1e-3)


def test_the_mean_of_two_sigmoids() -> None:
    gaps = {tuple(row[:3]): float(row[-1]) for row in worked_example("feddc/fig1", "full").rows}
    assert gaps["1", "5", "1"] > 0.05 and gaps["-3", "3", "1"] == 0 == gaps["1", "5", "0"]


def test_where_methods_rest_on_quadratics() -> None:
    data, plain, weighted = least_squares((8, 16, 24, 32))
    scaffold, feddc, fedavg = (
        global_models(name, settings, data, 20)[-1]
        for name, settings in (("scaffold", {}), ("feddc", {"alpha": 1.0}), ("fedavg", {}))
    )
    distance = lambda model, to: float((model - to).norm() / to.norm())
    assert distance(scaffold, plain) < 1e-3 < 0.1 < distance(scaffold, weighted)
    assert distance(feddc, weighted) < 1e-3 < 0.1 < distance(fedavg, weighted)


# the command line -----------------------------------------------------------------------------------------------


def run_command_line(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, str]:
    """The exit code, standard output and standard error of a command."""
    capsys.readouterr()
    code = main([str(word) for word in words])
    return code, *capsys.readouterr()


def test_the_list_of_experiments(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)  # where no speed was measured
    monkeypatch.setattr(cost, "known_speeds", dict)
    code, out, _ = run_command_line(capsys, "list", "experiments", "--json")
    entries = {entry["id"]: entry for entry in json.loads(out)}
    assert (
        code == 0
        and sorted(entries) == ALL
        and entries["feddpc/table2"]["runs"] == 540
        and not entries["mldl24/fig1"]["runs"]
    )
    assert entries["feddpc/fig3"]["samples"] == 180 * 2_000_000 and entries["mldl24/table3"]["seconds"] is None
    one = {"feddpc/table2": find_experiment("feddpc/table2")}  # the same list as text, of one
    monkeypatch.setattr("askew.cli.papers.experiments", lambda: one)
    code, out, _ = run_command_line(capsys, "list", "experiments")
    assert code == 0 and "feddpc/table2" in out and "540" in out


def test_plan_run_and_table_on_the_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = (
        "reproduce",
        "feddpc/fig6",
        "--scale",
        "smoke",
        "--out",
        tmp_path / "runs",
        "--results",
        tmp_path / "results",
    )
    code, out, _ = run_command_line(capsys, *words, "--plan", "--json")
    assert code == 0 and json.loads(out)["missing"] == 5 and not (tmp_path / "runs").exists()
    code, out, err = run_command_line(capsys, *words)
    assert (
        code == 0 and "FedAvg two-sided" in out and "not comparable" in out and "5/5 runs" in err and "round" not in err
    )
    assert (tmp_path / "runs" / "figures" / "feddpc-fig6-smoke.png").is_file()
    # the numbers are those of digits, which it says, and above chance
    assert "cifar10-0.2, on digits" in out and "digits, 4 clients, mlp, 8 rounds" in out
    stored = metrics_by_run(read_results(tmp_path / "results")).values()
    assert len(stored) == 5 and all(float(run["best_accuracy"]) > 0.3 for run in stored)
    code, out, _ = run_command_line(capsys, *words, "--json")
    page = json.loads(out)
    assert (
        code == 0
        and not page["comparable"]
        and all(cell["printed"] is None for cell in page["cells"])
        and len(page["cells"]) == 5
    )
    code, out, _ = run_command_line(capsys, *words, "--plan")
    assert code == 0 and "5, of which 5 are finished" in out and "left open" in out
    assert {row.scale for row in read_results_file(tmp_path / "results" / "feddpc-fig6-smoke.csv")} == {"smoke"}


@pytest.mark.parametrize("id", ["fedpdc/fig3", "mldl24/fig1", "feddc/fig1", "fedpmvr/fig5"])
def test_what_is_not_a_table_of_runs(
    id: str, capsys: pytest.CaptureFixture[str], desk: Path, three_rounds: None
) -> None:
    code, out, _ = run_command_line(
        capsys, "reproduce", id, "--scale", "smoke", "--out", desk / "runs", "--results", desk / "results"
    )
    assert code == 0 and out.strip()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("feddpc/tabel2",), "did you mean 'feddpc/table2'?"),
        (("feddpc/table2", "--scale", "tiny"), "unknown scale 'tiny'"),
        (("feddpc/table2", "--only", "case=cifar"), "there is no 'cifar' here"),
        (("feddpc/table2", "--seeds", "0"), "--seeds must be ≥ 1, got 0"),
        (("nothing.toml",), "there is no file"),
        (("feddpc/fig6", "--dtype", "float8", "--plan"), "unknown dtype 'float8'"),
    ],
)
def test_misuse_is_one_sentence(
    words: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, out, err = run_command_line(capsys, "reproduce", *words, "--results", tmp_path)
    assert code == 2 and not out and says in err and err.count("\n") == 1


def test_clients_that_an_experiment_trains_one_after_another_do_not_price_other_runs() -> None:
    [beside] = plan_runs(find_experiment("mldl24/table1-shakespeare"), only=["gamma-0"])
    [in_turn] = plan_runs(
        find_experiment("mldl24/cost"), seeds=1, only=["case=shakespeare-C0.1, in turn", "method=FedAvg"]
    )
    slow = training_speeds([timed(in_turn, "seconds_per_round", "0.4")])
    assert estimate_seconds([in_turn.config], "a GPU", slow) is not None
    assert estimate_seconds([beside.config], "a GPU", slow) is None
