"""An engine's first results are compared with the sequential engine's; here on a CPU, where that is else not done."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from askew.cli.main import main
from askew.engine import check
from askew.engine.base import PhaseOutputs, PhaseRequest
from askew.engine.check import CheckedEngine, WrongResult, upload_distance
from askew.engine.choose import EngineChoice, fastest
from askew.engine.sequential import Sequential
from askew.engine.stacked import Stacked
from askew.experiment import build as build_module
from askew.experiment.build import build
from askew.experiment.config import Config
from askew.experiment.run import run_together

FEW = ("fedavg", "scaffold", "feddc", "fedpdc", "fedamd", "moon")  # of several phases, with state, with looks


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Engines are checked on a CPU as well; returns how many clients each check had."""
    monkeypatch.setattr(build_module, "CHECKED_DEVICES", ("cpu",))
    counts, compare = list[int](), CheckedEngine.check

    def counted(self: CheckedEngine, requests: Sequence[PhaseRequest]) -> None:
        counts.append(sum(len(r.plan.ids) for r in requests))
        compare(self, requests)

    monkeypatch.setattr(CheckedEngine, "check", counted)
    return counts


def make_config(engine: str, algorithm: str = "fedavg", dtype: str = "float32", **more: Any) -> Config:
    tables = {
        "rounds": 1,
        "algorithm": {"name": algorithm},
        "partition": {"clients": 12},
        "participation": {"cohort": 5},
        "model": {"name": "mlp", "hidden": [16]},
        "local": {"epochs": 2, "batch": 16},
        "engine": {"name": engine, "device": "cpu", "dtype": dtype},
    }
    return Config.build(tables | more)


@pytest.mark.parametrize("algorithm", FEW)
@pytest.mark.parametrize("engine", ["stacked", "slots", "vmapped"])
def test_a_right_engine_passes_and_its_results_stay(
    engine: str, algorithm: str, on_cpu: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = run_together([make_config(engine, algorithm)])[0]
    assert on_cpu
    monkeypatch.setattr(build_module, "CHECKED_DEVICES", ())
    plain = run_together([make_config(engine, algorithm)])[0]
    assert all(torch.equal(checked.model[n], v) for n, v in plain.model.items())


def spoil(monkeypatch: pytest.MonkeyPatch, row: int, factor: float) -> None:
    """From now on one row of the stacked engine's uploads is wrong."""
    right = Stacked.run

    def run(self: Stacked, requests: Sequence[PhaseRequest]) -> list[PhaseOutputs]:
        outputs = right(self, requests)
        for entry in outputs[-1].up.values():
            entry[row] *= factor
        return outputs

    monkeypatch.setattr(Stacked, "run", run)


@pytest.mark.parametrize("factor", [0.5, 2.0, -1.0, float("nan"), 1e30])
def test_a_wrong_result_is_never_used(factor: float, on_cpu: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, 4, factor)
    with pytest.raises(WrongResult, match=r"the stacked engine's result of client \d+ is .* with 10 clients"):
        run_together([make_config("stacked", seed=seed) for seed in (0, 1)])
    assert on_cpu == [10]


@pytest.mark.parametrize(("own", "passes"), [(0.9, True), (0.99, False)])
def test_rounding_that_the_sequential_engine_has_too_is_no_error(
    own: float, passes: bool, on_cpu: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A result that is 20% off, where the sequential engine's is 10% off with tf32, or 1%."""
    exact, right = [False], Sequential.run

    @contextmanager
    def without_tf32() -> Iterator[None]:
        exact[0] = True
        yield
        exact[0] = False

    def run(self: Sequential, requests: Sequence[PhaseRequest]) -> list[PhaseOutputs]:
        outputs = right(self, requests)
        for entry in () if exact[0] else outputs[-1].up.values():
            entry *= own
        return outputs

    monkeypatch.setattr(check, "without_tf32", without_tf32)
    monkeypatch.setattr(Sequential, "run", run)
    spoil(monkeypatch, 4, 1.2)
    configs = [make_config("stacked", seed=seed) for seed in (0, 1)]
    if passes:
        assert all(done.finished for done in run_together(configs))
    else:
        with pytest.raises(WrongResult):
            run_together(configs)


@pytest.mark.parametrize(("lost_bits", "passes"), [(13, True), (18, False)])
def test_cutting_factors_to_tf32_is_no_error(
    lost_bits: int, passes: bool, on_cpu: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that cuts weights as TF32 does, or further, beside a sequential one that does not round at all."""
    right = Stacked.run

    def run(self: Stacked, requests: Sequence[PhaseRequest]) -> list[PhaseOutputs]:
        monkeypatch.setattr(check, "TF32_LOST_BITS", lost_bits)
        cut = [r._replace(inputs=r.inputs._replace(w=check.cut_to_tf32(r.inputs.w))) for r in requests]
        monkeypatch.setattr(check, "TF32_LOST_BITS", 13)
        return right(self, cut)

    monkeypatch.setattr(Stacked, "run", run)
    monkeypatch.setitem(check.FAR, "tf32", 1e-6)
    configs = [make_config("stacked", dtype="tf32", seed=seed) for seed in (0, 1)]
    if passes:
        assert all(done.finished for done in run_together(configs))
    else:
        with pytest.raises(WrongResult):
            run_together(configs)


def test_cut_to_tf32_keeps_ten_bits() -> None:
    x = torch.tensor([1 + 2**-10 + 2**-11, -(1 + 2**-10 + 2**-11), 2**-126, 0.0])
    assert torch.equal(check.cut_to_tf32(x), torch.tensor([1 + 2**-10, -(1 + 2**-10), 2**-126, 0.0]))


def test_tf32_is_off_inside_alone() -> None:
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    with check.without_tf32():
        assert not torch.backends.cudnn.allow_tf32 and not torch.backends.cuda.matmul.allow_tf32
    assert before == (torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32)


def test_it_is_one_sentence_on_the_command_line(
    on_cpu: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    spoil(monkeypatch, 0, 2.0)
    (tmp_path / "a.toml").write_text(make_config("stacked").toml())
    assert main(["run", str(tmp_path / "a.toml"), "--out", str(tmp_path / "runs")]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert "please report this" in " ".join(said) and "Traceback" not in " ".join(said)


def test_larger_rounds_are_checked_again(on_cpu: list[int]) -> None:
    config = make_config("stacked", participation={"name": "bernoulli", "fraction": 0.3}, rounds=12, seed=3)
    run = run_together([config])[0]
    sizes, expected = [len(r["participants"]) for r in run.rounds], list[int]()
    for size in sizes:
        if size > check.GROWTH * (expected[-1] if expected else 0):
            expected.append(size)
    assert on_cpu == expected and 1 < len(expected) < len(sizes)


def test_rounding_of_small_steps_is_no_error(on_cpu: list[int]) -> None:
    """In float32, weights hardly move at such a rate, and what they move by is mostly rounding."""
    for algorithm in ("fedavg", "scaffold"):
        local = {"epochs": 2, "batch": 16, "lr": 1e-7}
        assert run_together([make_config("stacked", algorithm, local=local)])[0].finished


def test_a_result_that_diverged_by_itself_is_no_error() -> None:
    row = torch.ones(1, 3)
    right = PhaseOutputs({"delta": row * float("inf")}, {}, {}, torch.zeros(1, 0), torch.ones(1), None)
    assert upload_distance(right._replace(up={"delta": row}), right, 1e-6) == 0
    finite = right._replace(up={"delta": row})
    assert upload_distance(right, finite, 1e-6) == float("inf")
    assert upload_distance(finite._replace(loss=torch.ones(1) * 3), finite, 0.0) == 2.0


def test_a_wrong_engine_is_not_chosen(on_cpu: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, 0, 2.0)
    config = make_config("stacked")
    built = build(config)
    request = next(built.server.round_requests(1, [0, 1, 2], [1.0, 1.0, 1.0]))
    rule = EngineChoice("stacked", "", ("slots", "sequential"))
    parts = (built.server.space, built.fed, config)
    module = built.server.engine.engine.task.module  # type: ignore[attr-defined]
    make = lambda name: build_module.make_engine(name, module, *parts).engine
    monkeypatch.setattr("askew.engine.choose.TRIAL_SECONDS", 60.0)
    choice = fastest(rule, request, 3.0, make)
    assert choice.name in ("slots", "sequential") and "stacked wrong" in choice.reason
    with pytest.raises(WrongResult):
        fastest(EngineChoice("sequential", "", ("stacked",)), request, 3.0, lambda name: make("stacked"))
