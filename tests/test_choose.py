"""Which engine a run gets: by the rule, by a trial with a clock that the test moves, and after an interruption."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import askew
from askew.core.space import Space
from askew.engine import choose as engine_choice
from askew.engine.base import PhaseOutputs, PhaseRequest
from askew.engine.choose import EngineChoice, choose, fastest, first_steps, worth_a_trial
from askew.engine.process_group import ProcessGroup
from askew.engine.settings import EngineSettings
from askew.experiment import build as run_parts
from askew.experiment.build import BuildCache, build
from askew.experiment.config import Config
from askew.experiment.launch import run_config
from askew.kernels.cpu import compiler
from askew.kernels.cpu.dense import SOURCE
from askew.models import CNN, CNN64, MLP, LeNet, Softmax

in_c = pytest.mark.skipif(compiler.library(SOURCE, torch.float32) is None, reason="kernels cannot be compiled here")

TABLES: dict[str, Any] = {
    "rounds": 4,
    "data": {"name": "digits"},
    "model": {"name": "mlp", "hidden": [12]},
    "partition": {"name": "dirichlet", "alpha": 0.3, "clients": 12},
    "participation": {"cohort": 10},
    "local": {"batch": 16, "epochs": 2, "lr": 0.1},
    "engine": {"device": "cpu"},
}


class ManualClock:
    """A clock that only a test moves."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class OutOfResources(Exception):
    """Triton's errors are no RuntimeErrors."""


class TimedEngine:
    """An engine that trains nothing and moves the clock by `pace` seconds for every step of a client."""

    def __init__(self, name: str, clock: ManualClock, pace: float, fails: bool = False) -> None:
        self.name, self.clock, self.pace, self.fails = name, clock, pace, fails
        self.requests = list[PhaseRequest]()

    def run(self, requests: Sequence[PhaseRequest]) -> list[PhaseOutputs]:
        self.requests += requests
        if self.fails:
            raise OutOfResources("not on this GPU")
        self.clock.seconds += self.pace * sum(work.batches for request in requests for work in request.plan.train)
        return []


@pytest.fixture
def phase_request() -> PhaseRequest:
    """The first request of a round of ten clients."""
    server = build(Config.build({**TABLES, "engine": {"name": "sequential", "device": "cpu"}})).server
    return next(server.round_requests(1, list(range(10))))


@pytest.fixture(autouse=True)
def forget_trials() -> Iterator[None]:
    yield
    BuildCache.trials.clear()


def run_trial(
    request: PhaseRequest, width: float = 8, rule: str = "sequential", **paces: float
) -> tuple[EngineChoice, dict[str, TimedEngine]]:
    """The choice among engines with known seconds for a step (negative: the engine fails), and these engines."""
    clock = ManualClock()
    engines = {name: TimedEngine(name, clock, abs(pace), pace < 0) for name, pace in paces.items()}
    others = tuple(name for name in engines if name != rule)
    choice = fastest(EngineChoice(rule, "the rule", others), request, width, lambda name: engines[name], clock)
    return choice, engines


# the rule -------------------------------------------------------------------------------------------------------------


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


@in_c
@pytest.mark.parametrize(
    ("method", "epochs", "name"),
    [("fedavg", 1, "vmapped"), ("fedavg", 10, "sequential"), ("scaffold", 5, "sequential"), ("moon", 10, "vmapped")],
)
def test_where_a_client_takes_many_steps_in_c_clients_are_trained_one_after_another(
    method: str, epochs: int, name: str
) -> None:
    """Ten clients, two batches in an epoch: FedAvg must take more than 13 steps, others that C can take more than 4."""
    tables = {
        "data": {"name": "synthetic", "dim": 8, "samples": 40},
        "partition": {"clients": 10},
        "participation": {"cohort": 10},
        "model": {"name": "softmax"},
        "local": {"epochs": epochs, "batch": 20},
        "engine": {"device": "cpu", "workers": 1},
        "algorithm": {"name": method},
    }
    facts = build(Config.build(tables)).facts
    assert facts["engine"] == name and ("one call of a kernel" in facts["reason"]) == (name == "sequential")


@pytest.mark.parametrize(
    ("network", "shape", "name", "others"),
    [
        (LeNet(), (3, 32, 32), "stacked", ()),
        (MLP(hidden=(200, 200)), (784,), "stacked", ("slots",)),
        (CNN64(), (3, 32, 32), "slots", ("stacked",)),
        (CNN(norm="batch"), (1, 8, 8), "slots", ()),
    ],
)
def test_the_rule_for_a_gpu(network: Any, shape: tuple[int, ...], name: str, others: tuple[str, ...]) -> None:
    module = network.build_module(shape, 80)
    space = Space(module)
    space.device = torch.device("cuda")
    choice = choose("auto", module, space, 10.0)
    assert (choice.name, choice.others) == (name, others) and choice.reason
    compiled = choose("auto", module, space, 10.0, compiled=True)
    assert (compiled.name, compiled.others) == ("slots", ())
    in_bf16 = choose("auto", module, space, 10.0, bf16=True)
    assert (in_bf16.name, in_bf16.others) == ("slots", others if name == "slots" else ("stacked",))


def test_networks_that_draw_random_numbers_or_have_unknown_layers_are_trained_one_client_at_a_time() -> None:
    for layer in (nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Softplus()):
        module = nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(4, 2))
        assert choose("auto", module, Space(module), 20.0)[::2] == ("sequential", ())


def test_a_stacked_network_with_batch_norm_is_vmapped_instead() -> None:
    for norm, name in (("group", "stacked"), ("batch", "vmapped")):
        module = MLP(norm=norm).build_module((64,), 10)
        choice = choose("stacked", module, Space(module), 9.0)
        assert (choice.name, choice.others) == (name, ())
        assert ("batch norm" in choice.reason) == (norm == "batch")


# the trial ------------------------------------------------------------------------------------------------------------


def test_the_faster_engine_is_taken_and_both_times_are_given(phase_request: PhaseRequest) -> None:
    choice, _ = run_trial(phase_request, sequential=1e-3, vmapped=5e-4)
    assert choice.name == "vmapped"
    assert "sequential 56 ms, vmapped 28 ms" in choice.reason  # eight clients, seven steps each
    assert run_trial(phase_request, rule="vmapped", vmapped=1e-3, sequential=5e-4)[0].name == "sequential"


def test_the_rule_stays_unless_another_is_clearly_faster(phase_request: PhaseRequest) -> None:
    assert run_trial(phase_request, sequential=1e-3, vmapped=0.95e-3)[0].name == "sequential"
    assert run_trial(phase_request, sequential=1e-3, vmapped=2e-3)[0].name == "sequential"
    assert run_trial(phase_request, rule="vmapped", vmapped=1e-3, sequential=0.95e-3)[0].name == "vmapped"


def test_an_engine_that_fails_is_passed_over(phase_request: PhaseRequest) -> None:
    choice, _ = run_trial(phase_request, sequential=1e-3, vmapped=-1e-4)
    assert choice.name == "sequential" and "vmapped" not in choice.reason


def test_a_trial_is_short(phase_request: PhaseRequest) -> None:
    """It has so few clients that it ends within TRIAL_SECONDS; with room for one client alone nothing is compared."""
    choice, engines = run_trial(phase_request, sequential=8e-3, vmapped=6e-3)
    assert [len(a.plan.ids) for a in engines["vmapped"].requests] == [3] * (1 + engine_choice.TRIALS)
    assert {work.batches for a in engines["vmapped"].requests for work in a.plan.train} == {engine_choice.TRIAL_STEPS}
    assert choice.name == "vmapped"
    slow, engines = run_trial(phase_request, sequential=1.0, vmapped=0.1)
    assert slow.reason == "the rule" and not engines["vmapped"].requests
    hopeless = run_trial(phase_request, sequential=1e-3, vmapped=3e-3)[1]["vmapped"]
    assert len(hopeless.requests) == 2  # one to warm up, and one that counts


def test_a_trial_is_the_first_steps_of_the_clients_with_most_steps(phase_request: PhaseRequest) -> None:
    short = first_steps(phase_request, 3, 2)
    batches = sorted((work.batches for work in phase_request.plan.train), reverse=True)
    assert [work.batches for work in short.plan.train] == [min(2, b) for b in batches[:3]]
    for i, client in enumerate(short.plan.ids):
        row = phase_request.plan.ids.index(client)
        count = short.plan.train[i].cuts[-1]
        assert torch.equal(short.plan.train[i].places, phase_request.plan.train[row].places[:count])
        assert short.inputs.steps[i] == phase_request.inputs.steps[row]


def test_short_runs_go_by_the_rule(phase_request: PhaseRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not worth_a_trial(phase_request, 4) and worth_a_trial(phase_request, 10**8)
    monkeypatch.setattr(run_parts, "fastest", no_trial)
    assert build(Config.build(TABLES)).facts["engine"] == "sequential"


# runs -----------------------------------------------------------------------------------------------------------------


def trial_won_by(engine: str, winners: list[str]) -> Any:
    """A trial that takes no time, which this engine wins; `winners` gets one entry for every trial."""

    def fake_trial(rule: EngineChoice, request: PhaseRequest, width: float, make: Any) -> EngineChoice:
        winners.append(engine)
        return EngineChoice(engine, f"measured: {engine}")

    return fake_trial


def no_trial(*arguments: Any) -> EngineChoice:
    return pytest.fail("an engine was tried")


def test_a_trial_changes_nothing_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run whose engine was measured for real is, bit for bit, the run with that engine configured."""
    monkeypatch.setattr(engine_choice, "TRIAL_SECONDS", 60.0)  # on a busy machine a step may take long
    monkeypatch.setattr(engine_choice, "MUCH_WORK", 0)
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    for method in ("scaffold", "feddpc"):
        run = askew.run({**TABLES, "algorithm": {"name": method}})
        assert "measured" in run.facts["reason"]
        fixed = askew.run(
            {**TABLES, "algorithm": {"name": method}, "engine": {"name": run.facts["engine"], "device": "cpu"}}
        )
        assert all(torch.equal(run.model[n], fixed.model[n]) for n in fixed.model)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_runs_with_equal_work_share_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    winners = list[str]()
    monkeypatch.setattr(engine_choice, "MUCH_WORK", 0)
    monkeypatch.setattr(run_parts, "fastest", trial_won_by("vmapped", winners))
    engines = [
        build(Config.build({**TABLES, "algorithm": {"name": name}})).facts["engine"] for name in ("fedavg", "fedprox")
    ]
    assert engines == ["vmapped"] * 2 and len(winners) == 1
    build(Config.build({**TABLES, "local": TABLES["local"] | {"batch": 8}}))
    assert len(winners) == 2


def test_a_resumed_run_keeps_its_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(Exception):
        pass

    def stop(run: askew.Run, record: Any) -> None:
        if record and record["round"] == 2:
            raise Interrupted

    winners, config = list[str](), Config.build(TABLES)
    monkeypatch.setattr(engine_choice, "MUCH_WORK", 0)
    monkeypatch.setattr(run_parts, "fastest", trial_won_by("vmapped", winners))
    with pytest.raises(Interrupted):
        run_config(config, tmp_path, watch=stop, save_every=0)
    BuildCache.trials.clear()
    monkeypatch.setattr(run_parts, "fastest", trial_won_by("sequential", winners))
    run = run_config(config, tmp_path)
    assert run.finished and winners == ["vmapped"]
    assert (run.facts["engine"], run.facts["reason"]) == ("vmapped", "measured: vmapped")
    whole = askew.run({**TABLES, "engine": {"name": "vmapped", "device": "cpu"}})
    assert all(torch.equal(run.model[n], whole.model[n]) for n in whole.model)
    again = run_config(config, tmp_path)  # read back
    assert again.facts["engine"] == "vmapped" and winners == ["vmapped"]
    fresh = run_config(config, tmp_path, fresh=True)
    assert fresh.facts["engine"] == "sequential"


def test_of_several_ranks_the_first_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    class SecondRank(ProcessGroup):
        def broadcast(self, value: Any, source: int = 0) -> Any:
            return ["vmapped", "as rank 0 found"]

    monkeypatch.setattr(engine_choice, "MUCH_WORK", 0)
    monkeypatch.setattr(run_parts, "fastest", no_trial)
    facts = build(Config.build(TABLES), group=SecondRank(1, 2)).facts
    assert (facts["engine"], facts["reason"]) == ("vmapped", "as rank 0 found")


def test_a_configured_engine_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_choice, "MUCH_WORK", 0)
    monkeypatch.setattr(run_parts, "fastest", no_trial)
    settings = EngineSettings(name="slots", device="cpu")
    assert build(Config.build({**TABLES, "model": Softmax(), "engine": settings})).facts["reason"] == "as configured"
