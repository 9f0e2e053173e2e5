"""Which engine a run gets: by the rule, by a stopwatch that tests hold in their hands, and again after a break."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import askew
from askew.core.space import Space
from askew.engine import choose as library
from askew.engine.base import PhaseOutputs, PhaseRequest
from askew.engine.choose import EngineChoice, EngineSettings, beginning, choose, tried, worth
from askew.engine.distributed import Group
from askew.experiment import build as building
from askew.experiment.build import BuildCache, build
from askew.experiment.config import Config
from askew.experiment.launch import run_config
from askew.models import CNN, CNN64, MLP, CharLSTM, LeNet, Softmax

PAGE: dict[str, Any] = {
    "rounds": 4,
    "data": {"name": "digits"},
    "model": {"name": "mlp", "hidden": [12]},
    "partition": {"name": "dirichlet", "alpha": 0.3, "clients": 12},
    "participation": {"cohort": 10},
    "local": {"batch": 16, "epochs": 2, "lr": 0.1},
    "engine": {"device": "cpu"},
}


class OnRound:
    """A clock that only stands still or is moved."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Paced:
    """An engine that does nothing, in a known time for every step of a client."""

    def __init__(self, name: str, watch: OnRound, pace: float, fails: bool = False) -> None:
        self.name, self.watch, self.pace, self.fails = name, watch, pace, fails
        self.asked = list[PhaseRequest]()

    def run(self, requests: Sequence[PhaseRequest]) -> list[PhaseOutputs]:
        self.asked += asks
        if self.fails:
            raise RuntimeError("not with this network")
        self.watch.now += self.pace * sum(work.batches for ask in asks for work in ask.plan.train)
        return []


@pytest.fixture
def ask() -> PhaseRequest:
    server = build(Config.build({**PAGE, "engine": {"name": "sequential", "device": "cpu"}})).server
    return next(server.round_requests(1, list(range(10))))


@pytest.fixture(autouse=True)
def forgetful() -> Iterator[None]:
    yield
    BuildCache.found.clear()


def contest(
    ask: PhaseRequest, width: float = 8, rule: str = "sequential", **paces: float
) -> tuple[EngineChoice, dict[str, Paced]]:
    watch = OnRound()
    engines = {name: Paced(name, watch, abs(pace), pace < 0) for name, pace in paces.items()}
    others = tuple(name for name in engines if name != rule)
    return tried(EngineChoice(rule, "the rule", others), ask, width, lambda name: engines[name], watch), engines


# the rule -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("network", "shape", "width", "name", "others"),
    [
        (MLP(), (64,), 9.0, "vmapped", ("sequential",)),
        (MLP(), (64,), 3.0, "sequential", ("vmapped",)),
        (MLP(), (64,), 1.5, "sequential", ()),
        (MLP(hidden=(500, 500)), (64,), 9.0, "sequential", ("vmapped",)),
        (CNN(), (1, 8, 8), 9.0, "sequential", ()),
    ],
)
def test_the_rule_for_a_cpu(
    network: Any, shape: tuple[int, ...], width: float, name: str, others: tuple[str, ...]
) -> None:
    module = network.build_module(shape, 10)
    choice = choose("auto", module, Space(module), width)
    assert (choice.name, choice.others) == (name, others) and choice.reason
    assert choose("slots", module, Space(module), width) == EngineChoice("slots", "as configured")


@pytest.mark.parametrize(
    ("network", "shape", "name", "others"),
    [
        (LeNet(), (3, 32, 32), "vmapped", ()),
        (MLP(hidden=(200, 200)), (784,), "vmapped", ("slots",)),
        (CNN64(), (3, 32, 32), "slots", ("vmapped",)),
        (CNN(norm="batch"), (1, 8, 8), "slots", ()),
        (CharLSTM(), (80,), "slots", ()),
    ],
)
def test_the_rule_for_a_gpu(network: Any, shape: tuple[int, ...], name: str, others: tuple[str, ...]) -> None:
    module = network.build_module(shape, 80)
    space = Space(module)
    space.device = torch.device("cuda")
    choice = choose("auto", module, space, 10.0)
    assert (choice.name, choice.others) == (name, others) and choice.reason
    assert choose("auto", module, space, 10.0, plain=True) == EngineChoice(
        "slots", choose("auto", module, space, 10.0, plain=True).reason
    )


def test_what_draws_random_numbers_or_is_unknown_goes_one_client_at_a_time() -> None:
    for layer in (nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Softplus()):
        module = nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(4, 2))
        assert choose("auto", module, Space(module), 20.0)[::2] == ("sequential", ())


# the stopwatch --------------------------------------------------------------------------------------------------


def test_the_faster_engine_is_taken_and_both_times_are_told(ask: PhaseRequest) -> None:
    choice, _ = contest(ask, sequential=1e-3, vmapped=5e-4)
    assert choice.name == "vmapped"
    assert "sequential 56 ms, vmapped 28 ms" in choice.reason  # eight clients, seven steps each
    assert contest(ask, rule="vmapped", vmapped=1e-3, sequential=5e-4)[0].name == "sequential"


def test_the_rule_stays_unless_another_is_clearly_faster(ask: PhaseRequest) -> None:
    assert contest(ask, sequential=1e-3, vmapped=0.95e-3)[0].name == "sequential"
    assert contest(ask, sequential=1e-3, vmapped=2e-3)[0].name == "sequential"
    assert contest(ask, rule="vmapped", vmapped=1e-3, sequential=0.95e-3)[0].name == "vmapped"


def test_an_engine_that_fails_is_passed_over(ask: PhaseRequest) -> None:
    choice, _ = contest(ask, sequential=1e-3, vmapped=-1e-4)
    assert choice.name == "sequential" and "vmapped" not in choice.reason


def test_a_trial_takes_a_moment(ask: PhaseRequest) -> None:
    """So few clients that one trial stays below the moment; where that is one client, there is nothing to compare."""
    choice, engines = contest(ask, sequential=8e-3, vmapped=6e-3)
    assert [len(a.plan.ids) for a in engines["vmapped"].asked] == [3] * (1 + library.TRIALS)
    assert {work.batches for a in engines["vmapped"].asked for work in a.plan.train} == {library.STEPS}
    assert choice.name == "vmapped"
    slow, engines = contest(ask, sequential=1.0, vmapped=0.1)
    assert slow.reason == "the rule" and not engines["vmapped"].asked
    assert len(contest(ask, sequential=1e-3, vmapped=3e-3)[1]["vmapped"].asked) == 2  # hopeless after one that counts


def test_a_trial_is_the_beginning_of_the_longest_clients_work(ask: PhaseRequest) -> None:
    short = beginning(ask, 3, 2)
    batches = sorted((work.batches for work in ask.plan.train), reverse=True)
    assert [work.batches for work in short.plan.train] == [min(2, b) for b in batches[:3]]
    for i, client in enumerate(short.plan.ids):
        row = ask.plan.ids.index(client)
        count = short.plan.train[i].cuts[-1]
        assert torch.equal(short.plan.train[i].places, ask.plan.train[row].places[:count])
        assert short.inputs.steps[i] == ask.inputs.steps[row]


def test_small_works_go_by_the_rule(ask: PhaseRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not worth(ask, 4) and worth(ask, 10**8)
    monkeypatch.setattr(building, "tried", lambda *given: pytest.fail("tried"))
    assert build(Config.build(PAGE)).facts["engine"] == "sequential"


# runs -----------------------------------------------------------------------------------------------------------


def told(engine: str, calls: list[str]) -> Any:
    def tried(rule: EngineChoice, ask: PhaseRequest, width: float, make: Any) -> EngineChoice:
        calls.append(engine)
        return EngineChoice(engine, f"measured: {engine}")

    return tried


def test_a_trial_changes_nothing_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run whose engine was measured for real is, bit for bit, the run with that engine configured."""
    monkeypatch.setattr(library, "MUCH", 0)
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    for method in ("scaffold", "feddpc"):
        run = askew.run({**PAGE, "algorithm": {"name": method}})
        assert "measured" in run.facts["reason"]
        fixed = askew.run(
            {**PAGE, "algorithm": {"name": method}, "engine": {"name": run.facts["engine"], "device": "cpu"}}
        )
        assert all(torch.equal(run.model[n], fixed.model[n]) for n in fixed.model)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_runs_of_one_kind_share_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[str]()
    monkeypatch.setattr(library, "MUCH", 0)
    monkeypatch.setattr(building, "tried", told("vmapped", calls))
    engines = [
        build(Config.build({**PAGE, "algorithm": {"name": name}})).facts["engine"] for name in ("fedavg", "fedprox")
    ]
    assert engines == ["vmapped"] * 2 and len(calls) == 1
    build(Config.build({**PAGE, "local": PAGE["local"] | {"batch": 8}}))
    assert len(calls) == 2


def test_a_resumed_run_keeps_its_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Enough(Exception):
        pass

    def stop(run: askew.Run, record: Any) -> None:
        if record and record["round"] == 2:
            raise Enough

    calls, config = list[str](), Config.build(PAGE)
    monkeypatch.setattr(library, "MUCH", 0)
    monkeypatch.setattr(building, "tried", told("vmapped", calls))
    with pytest.raises(Enough):
        run_config(config, tmp_path, watch=stop, save_every=0)
    BuildCache.found.clear()
    monkeypatch.setattr(building, "tried", told("sequential", calls))
    run = run_config(config, tmp_path)
    assert (
        run.finished
        and (run.facts["engine"], run.facts["reason"]) == ("vmapped", "measured: vmapped")
        and calls == ["vmapped"]
    )
    whole = askew.run({**PAGE, "engine": {"name": "vmapped", "device": "cpu"}})
    assert all(torch.equal(run.model[n], whole.model[n]) for n in whole.model)
    again = run_config(config, tmp_path)  # read back
    assert again.facts["engine"] == "vmapped" and calls == ["vmapped"]
    fresh = run_config(config, tmp_path, fresh=True)
    assert fresh.facts["engine"] == "sequential"


def test_of_several_ranks_the_first_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    class Second(Group):
        def tell(self, value: Any, source: int = 0) -> Any:
            return ["vmapped", "as rank 0 found"]

    monkeypatch.setattr(library, "MUCH", 0)
    monkeypatch.setattr(building, "tried", lambda *given: pytest.fail("tried"))
    facts = build(Config.build(PAGE), group=Second(1, 2)).facts
    assert (facts["engine"], facts["reason"]) == ("vmapped", "as rank 0 found")


def test_a_configured_engine_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "MUCH", 0)
    monkeypatch.setattr(building, "tried", lambda *given: pytest.fail("tried"))
    settings = EngineSettings(name="slots", device="cpu")
    assert build(Config.build({**PAGE, "model": Softmax(), "engine": settings})).facts["reason"] == "as configured"
