"""The study of turnouts: its page and its rates follow from the stored results, and its cases are comparable."""

from __future__ import annotations

import math
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from askew.algorithms import algorithms
from askew.experiment.build import build
from askew.reproduction.comparison import table_cells
from askew.reproduction.papers import find_experiment, plan_runs, run_specs, settings_tables
from askew.reproduction.plan import prepare_reproduction

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def study() -> dict[str, Any]:
    """The names of benchmarks/turnout.py."""
    return runpy.run_path(str(ROOT / "benchmarks/turnout.py"))


@pytest.fixture(scope="module")
def blocks(study: dict[str, Any]) -> list[Any]:
    """The study as stored, by dataset and skew."""
    return list(study["study_blocks"](study["read_study"]()))


def test_the_page_is_what_the_results_say(study: dict[str, Any], blocks: list[Any]) -> None:
    written = (ROOT / "docs/turnout.md").read_text(encoding="utf-8")
    assert written == study["page"](written, blocks), "run python benchmarks/turnout.py --write"


def test_what_the_page_says_in_short_is_decided_by_the_tests(study: dict[str, Any], blocks: list[Any]) -> None:
    strong, mild = (block for block in blocks if block.name.startswith("digits"))
    overall = {(b.name, way): study["overall"](b, way) for b in (strong, mild) for way in study["WAYS"]}
    verdicts = {key: {m: test.verdict for m, test in tests.items()} for key, tests in overall.items()}
    assert verdicts[strong.name, "rounds"]["FedDyn"] == verdicts[strong.name, "seconds"]["FedDyn"] == "better"
    assert "better" not in {*verdicts[mild.name, "rounds"].values(), *verdicts[mild.name, "bytes"].values()}
    assert [m for m, verdict in verdicts[mild.name, "seconds"].items() if verdict == "better"] == ["FedDyn", "FedDPC"]
    assert {verdicts[strong.name, way][m] for way in study["WAYS"] for m in ("FedAU", "FedAWE", "FOCUS")} == {"worse"}
    assert {verdicts[mild.name, way][m] for way in study["WAYS"] for m in ("FedAWE", "FOCUS")} == {"worse"}
    assert [verdicts[mild.name, way]["FedAU"] for way in study["WAYS"]] == ["undecided", "undecided", "worse"]
    assert {verdicts[b.name, "bytes"]["SCAFFOLD"] for b in (strong, mild)} == {"worse"}
    for turnout in ("deadline", "asynchronous"):
        [saved] = study["judge_pairs"]([study["across"](strong, "seconds", turnout, "uniform")])
        assert saved.verdict == "better", turnout
    [nearest] = study["by_turnout"]([strong, mild])
    assert all("FedDyn" in turnout for turnout in nearest.split(": ", 1)[1].split("; "))


def test_what_the_page_says_in_short_of_cifar10(study: dict[str, Any], blocks: list[Any]) -> None:
    strong, mild = (block for block in blocks if block.name.startswith("cifar10"))
    ways, asynchronous = study["WAYS"], study["ASYNCHRONOUS"]
    overall = {(b.name, way): study["overall"](b, way) for b in (strong, mild) for way in ways}
    ahead = {key: {m for m, test in tests.items() if test.verdict == "better"} for key, tests in overall.items()}
    behind = {key: {m for m, test in tests.items() if test.verdict == "worse"} for key, tests in overall.items()}
    assert all(ahead[strong.name, way] == {"FedDyn"} and "FedCM" in behind[strong.name, way] for way in ways)
    assert all(ahead[mild.name, way] == {"FedCM", "FedDyn", "FedDPC"} for way in ways)
    assert all({"SCAFFOLD", "FedAU", "FedAWE", "FOCUS"} <= names for names in behind.values())
    leads = {
        (m, way): round(overall[mild.name, way][m].mean)
        for m, way in (("FedCM", "rounds"), ("FedCM", "bytes"), ("FedDyn", "rounds"), ("FedDPC", "rounds"))
    }
    assert list(leads.values()) == [11, 8, 6, 4]
    assert {b.best(way, asynchronous) for b in (strong, mild) for way in ways} == {"FedBuff"}
    assert all(mild.against(way, asynchronous, "FedAvg")["FedBuff"].verdict == "better" for way in ways)
    for block in (strong, mild):
        [saved] = study["judge_pairs"]([study["across"](block, "seconds", "deadline", "uniform")])
        assert saved.verdict == "better"


def test_every_run_of_the_study_is_stored_once(study: dict[str, Any]) -> None:
    stored = [
        (case, m, seed) for case, methods in study["read_study"]().items() for m in methods for seed in methods[m]
    ]
    planned = {(run.case, run.method, run.seed) for run in plan_runs(find_experiment("ours/turnout"))}
    assert set(stored) == planned


def test_the_rates_of_the_study_are_the_best_on_held_out_samples(study: dict[str, Any]) -> None:
    text = (ROOT / "papers/ours/turnout.toml").read_text(encoding="utf-8")
    assert text == study["write_rates"](text, study["chosen_rates"]()), "run python benchmarks/turnout.py --rates"
    page = {case.name: case.methods for case in find_experiment("ours/turnout").cases}
    for (block, method), rates in study["measured_rates"]().items():
        [highest] = [rate for rate, value in rates.items() if value == max(rates.values())]
        own = page[f"{block} {'asynchronous' if method in ('FedBuff', 'FedAsync') else 'uniform'}"][method]
        assert own["local"]["lr"] == highest and len(rates) == 4


def test_the_search_is_the_study_but_for_rates_seeds_and_held_out_samples() -> None:
    study, search = (
        {(s.case.name, s.method.name): settings_tables(s, "full") for s in run_specs(find_experiment(id), seeds=[0])}
        for id in ("ours/turnout", "ours/turnout-rates")
    )
    for key, own in search.items():
        changed = {
            "partition": {"validation": 0.2},
            "evaluation": {"validation": True},
            "local": {"lr": own["local"]["lr"]},
        }
        assert own == study[key] | {name: study[key][name] | table for name, table in changed.items()}, key


def test_methods_that_stale_answers_would_break_have_no_asynchronous_run() -> None:
    e = find_experiment("ours/turnout")
    names = {m.name: str(m.set["algorithm"]["name"]) for m in e.methods}
    for method in e.methods:
        stale = algorithms[names[method.name]].stale
        assert bool(stale) != (not method.cases or "digits-0.1 asynchronous" in method.cases), method.name


def test_an_accuracy_is_the_mean_over_the_last_fifth_on_straight_lines(study: dict[str, Any]) -> None:
    run = study["RunCurve"](([10, 20], [0.5, 0.7]), ([5, 10, 15, 20], [50, 100, 180, 200]), ([10, 20], [8, 24]))
    assert run.at("rounds", 1.0) == pytest.approx((0.62 + 0.7) / 2)  # rounds 16 to 20
    assert run.at("seconds", 20.0) == pytest.approx((0.6 + 0.65) / 2)  # seconds 16 to 20
    assert run.at("bytes", 100.0) == pytest.approx((0.42 + 0.5) / 2)  # from one in ten to the first stored round
    assert (run.total("bytes"), run.total("seconds"), study["round_down"](129_600.0)) == (200, 24, 120_000)


@pytest.mark.slow
def test_a_tenth_of_the_clients_answers_in_every_partial_turnout() -> None:
    for p in plan_runs(find_experiment("ours/turnout"), seeds=[0], only=["method=FedAvg"]):
        block, _, turnout = p.case.partition(" ")
        if block.startswith("digits") and turnout not in ("full", "asynchronous"):
            clock = build(p.config).clock
            assert clock is not None
            answers = np.mean([len(clock.turnout(t).ids) for t in range(1, 101)])
            assert 4.5 <= answers <= 5.5, (p.case, answers)


def test_published_comparisons_are_as_stored() -> None:
    """Ours and the printed numbers of the page; nothing is printed for what was not run as published."""
    page = " ".join((ROOT / "docs/turnout.md").read_text(encoding="utf-8").split())
    cells = {
        cell.method: cell for cell in table_cells(prepare_reproduction("fedbuff/cifar10", results=ROOT / "results"))
    }
    assert set(cells) == {"FedBuff", "FedAvgM", "FedAvg"}
    for method, cell in cells.items():
        assert cell.printed and f"{cell.mean:,.0f} | {float(cell.printed.value):,.0f} |" in page, method
    other = prepare_reproduction("fedawe/table8", results=ROOT / "results", stop_at_target=True)
    found = {(cell.case, cell.method): cell for cell in table_cells(other)}
    for method in ("MIFA", "FedAU", "FedAvg over active clients", "FedAWE"):
        cell, torch_weights = found["sine", method], found["sine, torch weights", method]
        last = "over 300" if torch_weights.mean == math.inf else f"{torch_weights.mean:.0f}"
        assert cell.printed and torch_weights.printed is None
        assert f"| {method} | {cell.mean:.0f} | {float(cell.printed.value):.0f} | {last} |" in page
