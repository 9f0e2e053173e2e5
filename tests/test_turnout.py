"""The study of turnouts: its page and its rates follow from the stored results, and its cases are comparable."""

from __future__ import annotations

import math
import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from askew.algorithms import algorithms
from askew.experiment.build import build
from askew.reproduction.comparison import table_cells
from askew.reproduction.papers import find_experiment
from askew.reproduction.plan import prepare_reproduction
from askew.reproduction.planned_runs import plan_runs, run_specs, settings_tables
from askew.reproduction.results import read_results_file
from askew.reproduction.run_metrics import parse_curve

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def study() -> dict[str, Any]:
    """The names of benchmarks/turnout.py."""
    return runpy.run_path(str(ROOT / "benchmarks/turnout.py"))


@pytest.fixture(scope="module")
def blocks(study: dict[str, Any]) -> list[Any]:
    """The study as stored, by dataset and skew."""
    return list(study["study_blocks"](study["read_study"]()))


@pytest.fixture(scope="module")
def page() -> str:
    """What docs/turnout.md says, on one line."""
    return " ".join((ROOT / "docs/turnout.md").read_text(encoding="utf-8").split())


def test_the_pages_are_what_the_results_say(study: dict[str, Any], blocks: list[Any]) -> None:
    sections = study["sections"](blocks)
    for path in study["PAGES"]:
        written = path.read_text(encoding="utf-8")
        assert written == study["page"](written, sections), "run python benchmarks/turnout.py --write"


def verdicts(study: dict[str, Any], block: Any) -> dict[str, dict[str, str]]:
    """By way and method: is it better than FedAvg on average over the partial turnouts?"""
    return {way: {m: test.verdict for m, test in study["overall"](block, way).items()} for way in study["WAYS"]}


def named(its: dict[str, str], verdict: str) -> set[str]:
    return {m for m, each in its.items() if each == verdict}


def test_what_the_page_says_in_short_of_digits(study: dict[str, Any], blocks: list[Any]) -> None:
    strong, mild = (block for block in blocks if block.data == "Digits")
    its = verdicts(study, strong)
    assert [its[way]["FedDyn"] for way in study["WAYS"]] == ["better", "undecided", "better"]
    assert round(study["overall"](strong, "rounds")["FedDyn"].mean) == 3
    assert all({"FedAU", "FedAWE", "FOCUS"} <= named(its[way], "worse") for way in study["WAYS"])
    assert "SCAFFOLD" in named(its["bytes"], "worse")
    its = verdicts(study, mild)
    assert not named(its["rounds"], "better") and not named(its["bytes"], "better")
    leads = study["overall"](mild, "seconds")
    assert named(its["seconds"], "better") == {"FedDyn", "FedDPC"}
    assert {round(leads[m].mean) for m in ("FedDyn", "FedDPC")} == {1}
    assert all({"FedAWE", "FOCUS"} <= named(its[way], "worse") for way in study["WAYS"])
    assert [its[way]["FedAU"] for way in study["WAYS"]] == ["undecided", "undecided", "worse"]
    assert "SCAFFOLD" in named(its["bytes"], "worse")
    for block in (strong, mild):
        for way in ("rounds", "bytes"):
            assert block.best(way, "asynchronous") == "FedDyn"
            decided = block.against(way, "asynchronous", "FedAvg")["FedDyn"].verdict == "better"
            assert decided == (block == strong and way == "rounds")


def test_what_the_page_says_in_short_of_cifar10(study: dict[str, Any], blocks: list[Any]) -> None:
    strong, mild = (block for block in blocks if block.data == "CIFAR-10")
    for block in (strong, mild):
        for way, its in verdicts(study, block).items():
            assert named(its, "better") == ({"FedDyn"} if block == strong else {"FedCM", "FedDyn", "FedDPC"})
            assert {"SCAFFOLD", "FedAU", "FedAWE", "FOCUS"} <= named(its, "worse"), (block.name, way)
            assert block == mild or "FedCM" in named(its, "worse")
    assert round(study["overall"](strong, "rounds")["FedDyn"].mean) == 10
    rounds, sent = (study["overall"](mild, way) for way in ("rounds", "bytes"))
    leads = [rounds["FedCM"], sent["FedCM"], rounds["FedDyn"], rounds["FedDPC"]]
    assert [round(test.mean) for test in leads] == [11, 8, 6, 4]
    assert study["chosen_rates"]()["cifar10-1", "FedCM"] == 1
    for way in ("rounds", "bytes"):
        assert {block.best(way, "asynchronous") for block in (strong, mild)} == {"FedBuff"}
        ahead = mild.against(way, "asynchronous", "FedAvg")["FedBuff"]
        assert ahead.verdict == "better" and round(ahead.mean) in (5, 6)
        assert strong.against(way, "asynchronous", "FedAvg")["FedBuff"].verdict == "undecided"


def test_what_the_page_says_in_short_of_time(study: dict[str, Any], blocks: list[Any]) -> None:
    found = study["waits"](blocks)
    assert len(found) == 20
    told = {
        (turnout, way): [
            (each[0].verdict, f"{each[0].mean:.1f}") for (_, t, w), each in found.items() if (t, w) == (turnout, way)
        ]
        for turnout, way in study["WAITS"]
    }
    digits, cifar10 = told["deadline", "seconds"][:2], told["deadline", "seconds"][2:]
    assert [verdict for verdict, _ in digits] == ["undecided"] * 2 and cifar10 == [
        ("better", "12.7"),
        ("better", "4.3"),
    ]
    assert told["asynchronous", "seconds"] == [
        *(("better", "26.6"), ("undecided", "5.1")),
        *(("better", "9.1"), ("undecided", "6.2")),
    ]
    assert told["asynchronous", "rounds"][2:] == [("worse", "-7.5"), ("worse", "-11.0")]
    assert {verdict for verdict, _ in told["full", "bytes"]} == {"worse"}
    ends = [
        limit / 3600 for (_, turnout, way), (_, limit) in found.items() if (turnout, way) == ("asynchronous", "seconds")
    ]
    assert round(min(ends)) == 8 and round(max(ends)) == 11
    counts = [study["stored_by"](b, "uniform", found[b.name, "asynchronous", "seconds"][1])[:6] for b in blocks]
    assert counts == ["1 or 2", "1 or 2", "1 accu", "1 or 2"]


def test_runs_are_compared_at_a_time_that_both_reach(study: dict[str, Any], blocks: list[Any]) -> None:
    for (name, turnout, way), (_, limit) in study["waits"](blocks).items():
        [block] = [block for block in blocks if block.name == name]
        other, _ = study["WAITS"][turnout, way]
        for run in (*block.runs[turnout]["FedAvg"].values(), *block.runs[other]["FedAvg"].values()):
            assert run.total(way) >= limit
        assert "asynchronous" not in block.values["seconds"] and "uniform, size" not in block.turnouts


def test_scaffold_ends_at_guessing_where_the_page_says_so(study: dict[str, Any], blocks: list[Any]) -> None:
    """The round from which the accuracy stays at 10%, of the seeds where it does."""
    ends: dict[str, list[int]] = {}
    for block in blocks:
        for run in block.runs["full"]["SCAFFOLD"].values():
            rounds, values = run.accuracy
            from_here = [r for i, r in enumerate(rounds) if set(values[i:]) == {0.1}]
            ends.setdefault(block.name, []).extend(from_here[:1])
    assert not ends["digits-0.1"] and not ends["digits-1"]
    assert len(ends["cifar10-0.1"]) == 5 and (min(ends["cifar10-0.1"]), max(ends["cifar10-0.1"])) == (30, 60)
    assert len(ends["cifar10-1"]) == 3 and {*ends["cifar10-1"]} == {90, 100}
    [mild] = [block for block in blocks if block.name == "cifar10-1"]
    assert f"{mild.mean('rounds', 'full', 'SCAFFOLD'):.1f}" == "27.5"


def test_the_limits_name_all_rates_at_the_edge(study: dict[str, Any], page: str) -> None:
    found = {key[::-1] for key in study["chosen_rates"]() if study["at_edge"](*key[::-1])}
    assert found == {
        *(("SCAFFOLD", block) for block in ("cifar10-0.1", "cifar10-1")),
        *(("FOCUS", block) for block in ("cifar10-0.1", "cifar10-1")),
        *(("FedCM", block) for block in ("cifar10-0.1", "digits-1")),
        ("FedDPC", "cifar10-0.1"),
    }
    assert (
        "SCAFFOLD and FOCUS on CIFAR-10, FedCM and FedDPC on CIFAR-10 with α = 0.1, FedCM on digits with α = 1.0."
        in page
    )


def test_uniform_turnout_trains_the_same_at_other_speeds(blocks: list[Any]) -> None:
    """On the same machine to the last digit; on another one rounding is all that differs."""
    off: dict[str, list[float]] = {}
    for block in blocks:
        plain, sized = (block.runs[turnout]["FedAvg"] for turnout in ("uniform", "uniform, size"))
        assert plain.keys() == sized.keys()
        for seed, run in sized.items():
            assert run.bytes == plain[seed].bytes and run.clock != plain[seed].clock
            off.setdefault(block.data, []).extend(np.abs(np.subtract(run.accuracy[1], plain[seed].accuracy[1])))
        means = [np.mean([run.at("rounds", 1.0) for run in runs.values()]) for runs in (plain, sized)]
        assert abs(means[0] - means[1]) < 0.001, block.name
    assert not any(off["Digits"])
    assert np.median(off["CIFAR-10"]) < 0.003 and sorted(off["CIFAR-10"])[-2] < 0.04 < max(off["CIFAR-10"]) < 0.0455


def test_both_measures_say_who_leads(study: dict[str, Any], blocks: list[Any]) -> None:
    for block, line in zip(blocks, study["last_round"](blocks), strict=True):
        last = {m: float(lead.replace("−", "-")) for m, lead in re.findall(r"(\w+)(?: †)? ([+−][\d.]+) \(", line)}
        mean = {m: test.mean for m, test in study["overall"](block, "rounds").items()}
        for leads in (last, mean):
            first = max(leads, key=lambda m: leads[m])
            assert leads["FOCUS"] < -10 > leads["FedAWE"]
            assert block.name == "digits-1" or first == ("FedCM" if block.name == "cifar10-1" else "FedDyn")


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


def test_published_comparisons_are_as_stored(page: str) -> None:
    """Ours and the printed numbers of the page; nothing is printed for what was not run as published."""
    fedbuff = prepare_reproduction("fedbuff/cifar10", results=ROOT / "results")
    cells = {cell.method: cell for cell in table_cells(fedbuff)}
    assert set(cells) == {"FedBuff", "FedAvgM", "FedAvg"}
    for method, cell in cells.items():
        assert cell.printed and f"{cell.mean:,.0f} | {float(cell.printed.value):,.0f} |" in page, method
    rows = read_results_file(ROOT / "results/fedbuff-cifar10-full.csv")
    [curve] = [
        parse_curve(row.value)
        for row in rows
        if row.method == "FedBuff" and row.hyper == "algorithm.server_scale=3" and row.metric == "accuracy"
    ]
    accuracy = {step: f"{100 * value:.2f}" for step, value in zip(*curve, strict=True)}
    assert [accuracy[step] for step in (6950, 7000, 7050)] == ["58.84", "60.35", "58.65"]
    assert [step for step, value in zip(*curve, strict=True) if value >= 0.6][:2] == [7000, 7700]
    assert max(accuracy.values()) == "60.65" and max(accuracy) == 8000
    other = prepare_reproduction("fedawe/table8", results=ROOT / "results", stop_at_target=True)
    found = {(cell.case, cell.method): cell for cell in table_cells(other)}
    for method in ("MIFA", "FedAU", "FedAvg over active clients", "FedAWE"):
        cell, torch_weights = found["sine", method], found["sine, torch weights", method]
        last = "over 300" if torch_weights.mean == math.inf else f"{torch_weights.mean:.0f}"
        assert cell.printed and torch_weights.printed is None
        assert f"| {method} | {cell.mean:.0f} | {float(cell.printed.value):.0f} | {last} |" in page
        assert 50 <= cell.mean - float(cell.printed.value) <= 80
    assert [*found["sine", "FedAU"].values] == [180, 160, 200]
    assert [*found["sine", "FedAvg over active clients"].values] == [180, 140, 240]
