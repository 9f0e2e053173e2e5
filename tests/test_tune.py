"""`askew tune`: schedules by hand, budgets, samples that nobody trains on, and the same answer again."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import askew
from askew.cli.main import main
from askew.core.rng import generator
from askew.data import Digits
from askew.data.federation import Federation
from askew.data.partition import Dirichlet
from askew.errors import ConfigError, StoreError
from askew.experiment import process_state, tune
from askew.experiment.config import Config, stored_tables
from askew.experiment.contenders import Candidate, Score, keep_best, score_run
from askew.experiment.halving import (
    Cost,
    Rung,
    Search,
    full_lengths,
    least_budget,
    longest_rungs,
    make_plan,
    rung_sizes,
    search_cost,
    seeds_cost,
    shortest_rungs,
)
from askew.experiment.launch import FailedRun, run_each
from askew.experiment.round_timer import RoundTimer
from askew.experiment.tune import Budget, Tuner, TuneResult, TuneStopped

TINY: dict[str, Any] = {
    "rounds": 4,
    "partition": {"name": "iid", "clients": 4},
    "participation": {"cohort": 2},
    "model": {"name": "mlp", "hidden": [4]},
    "local": {"epochs": 1, "batch": 0},
}

# schedules ------------------------------------------------------------------------------------------------------------


def test_a_third_is_kept_until_one_is_left() -> None:
    assert [rung_sizes(n) for n in (1, 2, 3, 4, 20)] == [[], [2], [3], [4, 2], [20, 7, 3]]


def test_rungs_and_their_costs_by_hand() -> None:
    """Nine settings and nine rounds: nine of them train 3 rounds, three of them 6 more: 27 + 18 = 45 rounds."""
    search = Search(9)
    assert shortest_rungs(9, 9) == [Rung(9, 3), Rung(3, 9)]
    assert search_cost(shortest_rungs(9, 9), Cost()) == 45
    assert search_cost(shortest_rungs(9, 9), Cost(), restarts=True) == 27 + 27
    assert search_cost(shortest_rungs(9, 9), Cost(2.0, 0.5)) == 90 + 12 * 0.5
    assert longest_rungs(search, 9, 45) == longest_rungs(search, 9, 50) == [Rung(9, 3), Rung(3, 9)]
    assert longest_rungs(search, 9, 51) == [Rung(9, 4), Rung(3, 9)]  # 36 + 15
    assert longest_rungs(search, 9, 1000)[0] == Rung(9, 9)


def test_a_plan_by_hand() -> None:
    """Two methods with three settings, three fresh seeds: each trains 3 R in the search and 3 R afterwards."""
    methods = {"a": Search(3), "b": Search(3)}
    assert least_budget(methods, 10, 3) == 2 * 30 + 2 * 2 * 10 + 2 * 10
    plan = make_plan(methods, 10, 3, budget=119)  # one too few
    assert plan is not None and plan.rounds == {"a": 9, "b": 9}
    assert make_plan(methods, 10, 3, budget=11) is None
    assert make_plan(methods, 10, 3) == make_plan(methods, 10, 3, budget=120)
    without = make_plan({"a": Search(9), "b": Search(20)}, 9, 3)  # 20 of b train 3 rounds, 7 train 5 and 3 all of 9
    assert without is not None and without.rungs["b"] == [Rung(20, 3), Rung(7, 5), Rung(3, 9)]
    assert without.rungs["a"] == [Rung(9, 9), Rung(3, 9)]  # 81 rounds, and b has 60 + 14 + 12 = 86


def test_a_run_costs_the_same_for_every_method() -> None:
    """A round of b costs twice as much, so that its runs are half as long; one that sends nothing has all rounds."""
    methods = {"a": Search(1), "b": Search(1, Cost(2.0)), "silent": Search(1, Cost(0.0))}
    assert full_lengths(methods, 10) == {"a": 10, "b": 5, "silent": 10}
    assert seeds_cost(methods, {"a": 10, "b": 5, "silent": 10}, 3) == 3 * (10 + 10)


@settings(max_examples=50)
@given(
    counts=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    costs=st.lists(st.floats(0.1, 10), min_size=6, max_size=6),
    rounds=st.integers(1, 60),
    seeds=st.integers(1, 6),
    budget=st.floats(1, 5000),
)
def test_a_plan_costs_no_more_than_its_budget(
    counts: list[int], costs: list[float], rounds: int, seeds: int, budget: float
) -> None:
    methods = {str(n): Search(count, Cost(cost)) for n, (count, cost) in enumerate(zip(counts, costs, strict=False))}
    plan = make_plan(methods, rounds, seeds, budget)
    if plan is None:
        return
    share = (budget - seeds_cost(methods, plan.rounds, seeds)) / len(methods)
    for name, search in methods.items():
        assert search_cost(plan.rungs[name], search.cost) <= share * (1 + 1e-9)  # the same for all
        lengths = [rung.rounds for rung in plan.rungs[name]]
        assert lengths == sorted(lengths) and lengths[-1:] in ([], [plan.rounds[name]])


def test_seconds_are_compared_by_the_shortest_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of a take 2, 2 and 8 s (another program was busy), of b 5 s: b costs 2.5 times as much, and all of it
    takes on average (4 + 5) / 2 s a round."""
    now, timer = [0.0], RoundTimer()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    timer.latest, runs = 0.0, dict[str, list[askew.Run]]()
    for method, seconds in {"a": (1, 9, 2, 2, 8), "b": (1, 9, 5, 5, 5)}.items():
        run = make_run([(0, 1, 0)] * 4)
        run.facts["name"], runs[method] = method, [run]
        for record, took in zip([None, *run.rounds], seconds, strict=True):
            now[0] += took
            timer(run, record)
    unit = 4.5 / 1.75
    assert timer.costs(runs) == {"a": pytest.approx((unit, 1.0)), "b": pytest.approx((2.5 * unit, 1.0))}


# what is chosen -------------------------------------------------------------------------------------------------------


def make_run(values: Sequence[tuple[float, float, float]], config: Config | None = None) -> askew.Run:
    """A run with accuracies and losses on held-out samples and accuracies on the test set, round by round."""
    records = [
        {"round": t, "accuracy_validation": a, "loss_validation": loss, "accuracy": test, "loss": 1.0, "seconds": 0.1}
        | {"bytes_up": 1, "bytes_down": 1}
        for t, (a, loss, test) in enumerate(values, 1)
    ]
    config = config or Config()
    return askew.Run(stored_tables(config), records, {"name": config.name()}, {"classes": 10})


def test_held_out_samples_choose_the_round_and_the_test_set_nothing() -> None:
    run = make_run([(0.5, 1.0, 0.9), (0.7, 0.8, 0.4), (0.7, 0.8, 0.99), (0.6, 0.1, 1.0)])
    assert score_run(run) == Score(0.7, -0.8, 2, 0.4)
    assert score_run(make_run([])).value == -math.inf
    for record in run.rounds:  # a regression
        record["accuracy_validation"] = None
    assert score_run(run)[2:] == (4, 1.0)


def test_ties_are_broken_by_the_loss_and_then_by_order() -> None:
    candidates = [Candidate(Config(), {"n": n}) for n in range(5)]
    scores = [
        Score(0.5, -2.0, 1, 0),
        Score(0.5, -1.0, 1, 0),
        None,
        Score(0.5, -1.0, 9, 1),
        Score(0.4, 0.0, 1, 1),
    ]
    assert [c.setting["n"] for c in keep_best(candidates, scores, 3)] == [1, 3, 0]


# samples that nobody trains on ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
def test_no_client_trains_on_a_sample_that_is_held_out(overlap: bool) -> None:
    partition = Dirichlet(clients=12, alpha=0.3, validation=0.25, overlap=overlap, min_size=3)
    fed = Federation(Digits(), partition, seed=3)
    assert fed.assignment is not None
    held, trained = set[int](), set[int]()
    for client in range(12):  # written out: the first quarter of a random order, one sample at least
        places = fed.assignment.client(client)
        order = places[generator(3, "validation", 0, client).permutation(len(places))]
        count = max(1, len(places) // 4)
        held |= set(order[:count].tolist())
        trained |= set(order[count:].tolist())
    chosen = sorted(held - trained)
    assert (len(held & trained) > 0) == overlap
    assert torch.equal(fed.held_out().x, fed.pool.x[chosen]) and torch.equal(fed.held_out().y, fed.pool.y[chosen])
    plan = fed.plan(range(12), 1, askew.Config().local)
    assert not {int(i) for batches in plan.train for i in batches.places} & set(chosen)


def test_measuring_on_held_out_samples_is_right_and_changes_nothing_else() -> None:
    partition = {"name": "iid", "clients": 4, "validation": 0.5}
    tables = {**TINY, "rounds": 2, "model": {"name": "softmax"}, "partition": partition}
    run = askew.run({**tables, "evaluation": {"validation": True}}, progress=False)
    config = Config.build(tables)
    held = Federation(config.data, config.partition, config.seed).held_out()
    weight, bias = (next(v for k, v in run.model.items() if k.endswith(end)) for end in ("weight", "bias"))
    logits = held.x.flatten(1) @ weight.T + bias
    assert run.rounds[-1]["accuracy_validation"] == pytest.approx(float((logits.argmax(1) == held.y).double().mean()))
    loss = torch.nn.functional.cross_entropy(logits.double(), held.y)
    assert run.rounds[-1]["loss_validation"] == pytest.approx(float(loss), rel=1e-5)
    plain = askew.run(tables, progress=False)
    without = ("seconds", "accuracy_validation", "loss_validation")
    same = [[{k: v for k, v in r.items() if k not in without} for r in each.rounds] for each in (run, plain)]
    assert same[0] == same[1]
    with pytest.raises(ConfigError, match=r"set partition\.validation = 0\.2"):
        Config.build({"evaluation": {"validation": True}})


# the whole of it, with made-up runs -----------------------------------------------------------------------------------

Quality = Callable[[Config, int], float]
Launched = Iterator[askew.Run | FailedRun]


class MadeUp:
    """Stands for what trains: accuracies follow a function of the configuration and the round."""

    def __init__(self, quality: Quality) -> None:
        self.quality, self.stages = quality, list[tuple[str, list[Config]]]()
        self.stored = dict[str, list[askew.Run]]()  # by configuration without its rounds, from short to long
        self.rounds, self.now, self.seconds = 0, 1000.0, 0.0  # trained rounds, the time, and the seconds of a round

    def __call__(self, configs: Sequence[Config], folder: Path, what: str, note: Any) -> Launched:
        self.stages.append((what, list(configs)))
        for config in configs:
            runs = self.stored.setdefault(str(stored_tables(config) | {"rounds": 0}), [])
            before = runs[-1] if runs else askew.Run({})
            if len(before.rounds) < config.rounds:
                runs.append(self.train(config, before, note))
            yield runs[-1]
            if not runs[-1].over:
                return

    def train(self, config: Config, before: askew.Run, note: Any) -> askew.Run:
        run = make_run([(q := self.quality(config, t), 1 - q, q) for t in range(1, config.rounds + 1)], config)
        run.facts |= {"extends": before.facts["name"]} if before.rounds else {}
        note(run, None)
        for t in range(len(before.rounds), config.rounds):
            self.rounds, self.now = self.rounds + 1, self.now + self.seconds
            note(run, run.rounds[t])
            if self.now >= process_state._deadline:
                del run.rounds[t + 1 :]
                break
        return run


def lr_quality(config: Config, t: int) -> float:
    """Fedavgm is better than fedavg, a learning rate of 0.3 best; it grows with the rounds, and depends on the seed."""
    best = {"FedAvg": 0.6, "FedAvgM": 0.8, "FedProx": 0.4}[type(config.algorithm).__name__]
    return best - abs(math.log10(config.local.lr / 0.3)) / 10 - 1 / (t + 10) + config.seed / 1000


def tuner(folder: Path, launch: Any, **options: Any) -> Tuner:
    given: dict[str, Any] = {"methods": ["fedavg", "fedavgm"], "over": {"algorithm.beta": [0.9]}, "seeds": 3}
    return Tuner({"rounds": 9, "seed": 7}, folder, launch, **given | options)


def test_a_tune_by_hand(tmp_path: Path) -> None:
    """Five rates each: five train 3 rounds, two of them 9; then two fresh seeds and a third, of 9 rounds each."""
    made = MadeUp(lr_quality)
    result = tuner(tmp_path, made).run()
    assert [(s.method, s.setting["local.lr"]) for s in result.standings] == [("fedavgm", 0.3), ("fedavg", 0.3)]
    assert made.rounds == 2 * (5 * 3 + 2 * 6) + 2 * 3 * 9 == result.spent  # the round that tries a method goes on
    seeds = [{c.seed for c in configs} for _, configs in made.stages]
    assert seeds == [{7}, {7}, {7}, {8, 9}, {10}]
    assert [sorted({c.local.lr for c in configs}) for _, configs in made.stages[1:3]] == [
        [0.01, 0.03, 0.1, 0.3, 1.0],
        [0.1, 0.3],
    ]
    best = result.standings[0]
    values = [lr_quality(best.config, 9) - 0.007 + s / 1000 for s in (8, 9, 10)]
    assert best.validation == pytest.approx(np.mean(values))
    assert best.tests == pytest.approx(dict(zip((8, 9, 10), values, strict=True)))
    assert best.config.partition.validation is None and best.config.rounds == 9 and best.config.seed == 7


def test_a_damaged_run_ends_a_tune_and_leaves_out_no_setting(tmp_path: Path) -> None:
    def launch(configs: Sequence[Config], folder: Path, what: str, note: Any) -> Launched:
        yield FailedRun(configs[0], StoreError("its records are damaged"))

    with pytest.raises(StoreError, match="its records are damaged"):
        tuner(tmp_path, launch).run()


@pytest.mark.parametrize(("amount", "unit"), [(200, "rounds"), (97, "rounds"), (300.0, "bytes")])
def test_a_tune_stays_inside_its_budget(amount: float, unit: str, tmp_path: Path) -> None:
    made = MadeUp(lr_quality)
    result = tuner(tmp_path, made, budget=Budget(amount, unit)).run()
    trained = made.rounds * (2 if unit == "bytes" else 1)
    assert result.spent == trained <= amount and result.standings[0].method == "fedavgm"
    costs = [s.costs[unit] for s in result.standings]
    assert costs[0] == costs[1] > 0.3 * amount


def test_seconds_end_inside_the_budget_although_the_machine_slows_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = MadeUp(lr_quality)
    made.seconds = 1.0
    monkeypatch.setattr(time, "monotonic", lambda: made.now)

    def launch(configs: Sequence[Config], folder: Path, what: str, note: Any) -> Launched:
        yield from made(configs, folder, what, note)
        made.seconds = 3.0 if "rung" in what else made.seconds

    result = tuner(tmp_path, launch, budget=Budget(250, "seconds")).run()
    assert made.now - 1000 <= 250 and result.standings[0].method == "fedavgm"
    assert result.plan.seeds < 3 or result.remarks
    again = MadeUp(lr_quality)  # the plan that was carried out, without a clock
    repeated = tuner(tmp_path / "again", again, plan=tune.load_plan(tmp_path / "tune.json")).run()
    assert repeated.plan == result.plan and [s.validation for s in repeated.standings] == [
        s.validation for s in result.standings
    ]


def test_a_plan_brings_its_methods_and_refuses_others_before_anything_is_trained(tmp_path: Path) -> None:
    result, again = tuner(tmp_path, MadeUp(lr_quality)).run(), MadeUp(lr_quality)
    plan = tune.load_plan(tmp_path / "tune.json")
    repeated = tuner(tmp_path / "again", again, methods=[], plan=plan).run()
    assert [s.method for s in repeated.standings] == [s.method for s in result.standings]
    untouched = MadeUp(lr_quality)
    with pytest.raises(ConfigError, match="the plan has no method fedprox, only fedavg, fedavgm; give some of these"):
        tuner(tmp_path / "other", untouched, methods=["fedavg", "fedprox"], plan=plan).run()
    with pytest.raises(ConfigError, match="a plan is followed whatever it costs; leave out the budget, or the plan"):
        tuner(tmp_path / "other", untouched, methods=[], plan=plan, budget=Budget(90, "rounds"))
    assert not untouched.stages and not (tmp_path / "other").exists()


def test_what_cannot_be_asked_for_is_said_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = MadeUp(lr_quality)
    cases: dict[str, dict[str, Any]] = {"is too small": {"budget": Budget(5, "rounds")}, "≥ 1": {"seeds": 0}}
    cases |= {"unknown method 'fedavgg'": {"methods": ["fedavgg"]}, "seed is not searched": {"over": {"seed": [1]}}}
    cases |= {"none of the methods has": {"over": {"algorithm.mu": [1]}}, "a list": {"over": {"local.lr": 1}}}
    for sentence, options in cases.items():
        with pytest.raises(ConfigError, match=sentence):
            tuner(tmp_path, made, **options).run()
    for text in ("5", "10x", "0s", "rounds", 3):
        with pytest.raises(ConfigError, match=f"such as 6000rounds, 90s.* got {text!r}"):
            Budget.parse(text)
    with pytest.raises(ConfigError, match="too small for 1 method with 1 fresh seed: runs"):
        tuner(tmp_path / "one", made, methods=["fedavg"], over={}, seeds=1, budget=Budget(2, "rounds")).run()
    parsed = [Budget.parse(text) for text in ("6000rounds", "1.5m", "2 GB")]
    assert parsed == [(6000, "rounds"), (90, "seconds"), (2e9, "bytes")]
    assert main(["tune", "--budget", "5", "--out", str(tmp_path)]) == 2 and "6000rounds" in capsys.readouterr().err


# the whole of it, trained ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The settings of a small table of one's own: two classes, which one column tells apart."""
    x = np.random.default_rng(0).normal(size=(80, 3))
    lines = [",".join(f"{v:.3f}" for v in row) + (",yes" if row[0] > 0 else ",no") for row in x]
    file = tmp_path_factory.mktemp("data") / "mine.csv"
    file.write_text("\n".join(["a,b,c,answer", *lines]))
    return {**TINY, "data": {"name": "csv", "file": str(file), "label": "answer"}}


def facts(result: TuneResult) -> Any:
    return [(s.method, s.setting, s.validation, s.tests, s.costs["rounds"]) for s in result.standings]


def stopping_launch(runs: int) -> Any:
    """Trains so many runs, and then is asked to stop."""
    left = [runs]

    def launch(configs: Sequence[Config], folder: Path, what: str, note: Any) -> Launched:
        for run in run_each(configs, folder, watch=note):
            left[0] -= 1
            yield run if left[0] >= 0 else askew.Run(stored_tables(configs[0]))

    return launch


def test_an_interrupted_tune_goes_on_and_answers_the_same(table: dict[str, Any], tmp_path: Path) -> None:
    options: dict[str, Any] = {"methods": ["fedavg", "lossbias", "centralised", "fedalign"], "seeds": 1}
    options |= {"over": {"local.lr": [0.1, 1.0], "algorithm.mu": [0.1]}}
    tables, trained = {**table, "model": {"name": "softmax"}}, list[str]()
    whole = Tuner(tables, tmp_path / "a", stopping_launch(10**6), **options).run()
    with pytest.raises(TuneStopped, match="search, rung 1"):
        Tuner(tables, tmp_path / "b", stopping_launch(2), **options).run()

    def launch(configs: Sequence[Config], folder: Path, what: str, note: Any) -> Launched:
        yield from run_each(configs, folder, watch=lambda run, record: trained.append(run.name) if record else None)

    parts = Tuner(tables, tmp_path / "b", launch, **options).run()
    assert facts(parts) == facts(whole) and whole.refused == parts.refused
    stored = {path.name for path in (tmp_path / "b" / "search").iterdir()}
    assert len(trained) < sum(s.costs["rounds"] for s in whole.standings) and set(trained) - stored
    assert set(whole.refused) == {"lossbias", "centralised", "fedalign"} and "transfer" in whole.refused["fedalign"]


def test_the_command_answers_with_a_ranking_curves_and_a_run(
    table: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(Config.build(table).toml())
    words = ["tune", "mine.toml", "--methods", "fedavg,fedavgm", "--over", "local.lr=1", "--seeds", "1"]
    words += ["--over", "algorithm.beta=0.5,0.9", "--budget", "60rounds"]
    assert main([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["spent"] <= 60 and [row["rank"] for row in answer["ranking"]] == [1, 2]
    assert Path("tuned/curves.svg").exists()
    assert main(words) == 0  # read back
    shown = capsys.readouterr().out
    assert f"1  {answer['ranking'][0]['method']} " in shown and "60 rounds" in shown and "tuned/run.toml" in shown
    assert main(["run", "tuned/run.toml", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["algorithm"] == answer["ranking"][0]["method"] and again["rounds"] == answer["winner"]["rounds"]
    fresh = askew.tune(
        "mine.toml",
        methods=["fedavg", "fedavgm"],
        over={"lr": [1], "algorithm.beta": [0.5, 0.9]},
        budget="60rounds",
        seeds=1,
        progress=False,
    )
    same = ("method", "setting", "validation", "test", "rounds", "bytes")
    assert [[row[key] for key in same] for row in fresh.ranking] == [
        [row[key] for key in same] for row in answer["ranking"]
    ]
    assert fresh.winner.toml() == Config.build(answer["winner"]).toml() and "held" in repr(fresh)
