"""Clients that misbehave: each fault is refused for its own reason, and the round is the one without that client."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import askew
from askew.algorithms import FedAvg, FedGA, Scaffold, algorithms
from askew.core import records
from askew.core.algorithm import Algorithm
from askew.core.rng import generator
from askew.data.federation import LocalSettings
from askew.engine import answers as reasons
from askew.engine.answers import Answer, AskedPhase, judge
from askew.engine.base import PhaseOutputs, PhaseRequest
from askew.engine.distributed import TensorSpec
from askew.engine.faults import Faults, FaultStage
from askew.engine.server import Server
from askew.errors import ConfigError
from askew.experiment.config import Config
from askew.experiment.launch import run_config
from problems import (
    Problem,
    Record,
    classification,
    client_row,
    full_state,
    identical,
    make_server,
    random_cohorts,
    skewed_samples,
)

SIZES = [5, 9, 4, 12, 7, 6, 30, 8, 5, 11, 6, 7]
SHORT = LocalSettings(steps=1, batch=4, lr=0.05)
MANY_FAULTS = Faults(  # three in ten answers do not come, one in ten is wrong
    missing=0.1,
    late=0.1,
    error=0.1,
    not_finite=0.02,
    wrong_shape=0.02,
    wrong_type=0.02,
    scaled=0.02,
    old_round=0.02,
    repeated=0.05,
)
REASON = {  # by kind of fault, in the order in which the rates are laid side by side
    "missing": records.NO_ANSWER,
    "error": records.CLIENT_ERROR,
    "late": records.LATE,
    "not_finite": reasons.NOT_FINITE,
    "wrong_shape": reasons.WRONG_FORM,
    "wrong_type": reasons.WRONG_FORM,
    "scaled": reasons.TOO_LARGE,
    "old_round": reasons.OTHER_ROUND,
    "repeated": reasons.REPEATED,
}
NAMED = ("fedavg", "scaffold", "feddyn", "feddc", "feddpc", "fedvarp")


def problem() -> Problem:
    return classification(skewed_samples(SIZES))


def faulty_server(alg: Algorithm, faults: Faults, engine: str = "sequential") -> Server:
    server = make_server(alg, problem(), SHORT, engine)
    server.stages = [FaultStage(faults, server.seed)]
    return server


def drawn_fault(faults: Faults, seed: int, round: int, client: int, phase: int = 0) -> str:
    """The fault of an answer, from the draw and the rates: written out, and not by the code that is tested."""
    place = generator(seed, f"faults {phase}", round, client).random()
    for kind in REASON:
        rate = float(faults.table()[kind])  # type: ignore[arg-type]
        if place < rate:
            return kind
        place -= rate
    return ""


def lost_clients(record: Record) -> set[int]:
    incidents = record.get("incidents", {})
    return {client for reason, clients in incidents.items() if reason != reasons.REPEATED for client in clients}


def check_record(record: Record, ids: Collection[int], sizes: np.ndarray, expected: Mapping[int, str]) -> None:
    """Every incident is in the record once, and the counts and the share of the data agree with it."""
    recorded = {client: reason for reason, clients in record.get("incidents", {}).items() for client in clients}
    assert recorded == {client: REASON[kind] for client, kind in expected.items() if kind}
    assert sum(map(len, record.get("incidents", {}).values())) == len(recorded)
    lost = lost_clients(record)
    dropped = {client for client in lost if recorded[client] == reasons.NOT_FINITE}
    assert (record["dropped"], record.get("absent", 0)) == (len(dropped), len(lost - dropped))
    assert record["participants"] == [client for client in ids if client not in lost - dropped]
    if recorded:
        assert record["lost_share"] == pytest.approx(sizes[sorted(lost)].sum() / sizes[list(ids)].sum(), abs=1e-15)


# all faults at once ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key", [pytest.param(key, marks=[] if key in NAMED else pytest.mark.slow) for key in algorithms]
)
def test_methods_train_on_where_three_in_ten_are_silent_and_one_in_ten_is_wrong(key: str) -> None:
    alg = algorithms[key]()
    server = faulty_server(alg, MANY_FAULTS)
    cohorts, found = random_cohorts(6, 10, len(SIZES)), set[str]()
    for t, ids in enumerate(cohorts, 1):
        record = server.run_round(t, ids)
        expected = {client: drawn_fault(MANY_FAULTS, server.seed, t, client) for client in ids}
        if key in ("solo", "centralised"):  # send nothing that could be scaled
            expected = {client: "" if kind == "scaled" else kind for client, kind in expected.items()}
        if len(server.phases) > 1:  # whoever answers in one phase is asked in the next
            lost = {client for client, kind in expected.items() if kind and kind != "repeated"}
            later = {
                client: drawn_fault(MANY_FAULTS, server.seed, t, client, 1) for client in ids if client not in lost
            }
            named = {client for clients in record["incidents"].values() for client in clients}
            assert named == {client for client, kind in (*expected.items(), *later.items()) if kind}
            assert record["lost_share"] == pytest.approx(
                server.fed.sizes[sorted(lost_clients(record))].sum() / server.fed.sizes[ids].sum()
            )
        else:
            check_record(record, ids, server.fed.sizes, expected)
        found |= {*record.get("incidents", {})}
        assert all(bool(torch.isfinite(v).all()) for v in full_state(server).values())
    assert len(found) >= 6 and not identical(full_state(server), full_state(make_server(alg, problem(), SHORT)))


def first_phase_only(server: Server, stage: FaultStage) -> Any:
    def apply(request: PhaseRequest, outputs: PhaseOutputs) -> PhaseOutputs:
        return stage(request, outputs) if request.phase is server.phases[0] else outputs

    return apply


@pytest.mark.parametrize("alg", [FedGA(), *(algorithms[k]() for k in ("scaffold", "feddc", "fedvarp"))])
def test_a_round_with_faults_is_the_round_without_those_clients(alg: Algorithm) -> None:
    """Bit for bit in float64, with all state. Two phases: a client lost in the first takes no part in the second."""
    faulty, without = faulty_server(alg, MANY_FAULTS), make_server(alg, problem(), SHORT)
    (stage,) = faulty.stages
    assert isinstance(stage, FaultStage)
    faulty.stages, lost = [first_phase_only(faulty, stage)], 0
    for t, ids in enumerate(random_cohorts(4, 9, len(SIZES), seed=1), 1):
        record = faulty.run_round(t, ids)
        lost += len(lost_clients(record))
        other = without.run_round(t, [client for client in ids if client not in lost_clients(record)])
        assert identical(full_state(faulty), full_state(without)) and record["train_loss"] == other["train_loss"]
    assert lost > 8


# each fault alone -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", REASON)
def test_each_fault_has_its_own_treatment(kind: str) -> None:
    faults = Faults(**{kind: 0.2})  # few enough for the median to be that of right answers
    faulty, without = faulty_server(Scaffold(), faults), make_server(Scaffold(), problem(), SHORT)
    occurred = 0
    for t, ids in enumerate(random_cohorts(3, 9, len(SIZES), seed=2), 1):
        before = {client: client_row(faulty.clients, client) for client in ids}
        record = faulty.run_round(t, ids)
        check_record(record, ids, faulty.fed.sizes, {client: drawn_fault(faults, 0, t, client) for client in ids})
        lost = lost_clients(record)
        assert all(identical(client_row(faulty.clients, client), before[client]) for client in lost)
        without.run_round(t, [client for client in ids if client not in lost])
        assert identical(full_state(faulty), full_state(without))
        occurred += sum(map(len, record.get("incidents", {}).values()))
    assert occurred > 2


def test_a_late_answer_is_refused_when_it_comes_and_counted_when_it_was_due() -> None:
    """Of round 1 it is counted in round 1. In round 2 all answer, and it changes nothing there."""
    faults = Faults(late=0.5)
    server = faulty_server(FedAvg(), faults)
    (stage,) = server.stages
    assert isinstance(stage, FaultStage)
    record, ids = server.run_round(1, range(12)), list(range(12))
    late = {answer.client for answer in stage.late}
    assert late and lost_clients(record) == late == {c for c in ids if drawn_fault(faults, 0, 1, c)}
    stage.faults = Faults(check_answers=True)
    assert "incidents" not in server.run_round(2, ids) and stage.late == []


def test_what_befalls_a_client_does_not_depend_on_the_others() -> None:
    one, other = (faulty_server(FedAvg(), MANY_FAULTS) for _ in range(2))
    for t in range(1, 6):
        many, few = one.run_round(t, range(12)), other.run_round(t, [1, 4, 6, 8, 10])
        for reason in REASON.values():
            told = [{*record.get("incidents", {}).get(reason, ())} & {1, 4, 6, 8, 10} for record in (many, few)]
            assert told[0] == told[1]


def test_nothing_changes_where_all_answers_are_good() -> None:
    plain, checked = make_server(Scaffold(), problem(), SHORT), faulty_server(Scaffold(), Faults(check_answers=True))
    for t, ids in enumerate(random_cohorts(3, 6, len(SIZES)), 1):
        assert plain.run_round(t, ids) == checked.run_round(t, ids)
    assert identical(full_state(plain), full_state(checked))


def test_a_round_in_which_everybody_fails_changes_nothing_and_counts_what_was_sent() -> None:
    server = faulty_server(Scaffold(), Faults(not_finite=1.0))
    before, record = full_state(server), server.run_round(1, [0, 1, 2])
    assert identical(full_state(server), before) and record["lost_share"] == 1.0 and record["train_loss"] is None
    assert record["dropped"] == 3 and record["bytes_up"] == 3 * 2 * server.space.P * 8  # delta and dc of three clients


# the check ------------------------------------------------------------------------------------------------------------

SPECS = {"up.delta": TensorSpec((2,), torch.float64), "buffers": TensorSpec((1,), torch.float64)}


def answer(client: int, delta: Any = (3.0, 4.0), round: int = 5, phase: int = 0, **more: Any) -> Answer:
    up = {"delta": torch.as_tensor(delta, dtype=torch.float64)}
    one = torch.ones(1, dtype=torch.float64)
    return Answer(client, round, phase, up, one, torch.tensor(0.5), {})._replace(**more)


def judged(
    answers: list[Answer], limit: float = 100.0, model: float = 10.0, **steps: float
) -> tuple[list[int], dict[int, str]]:
    """The clients whose answers are used, and the reasons of the incidents; clients 0 to 4 were asked."""
    w = torch.tensor([model, 0.0], dtype=torch.float64)
    asked = AskedPhase(5, 0, {i: steps.get(f"c{i}", 1.0) for i in range(5)}, SPECS, w, limit)
    used, incidents = judge(asked, answers, {4: records.CLIENT_ERROR})
    assert len({(incident.client, incident.reason) for incident in incidents}) == len(incidents)
    return list(used), {incident.client: incident.reason for incident in incidents}


NO_FOUR = {4: records.CLIENT_ERROR}


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (answer(1, round=4), reasons.OTHER_ROUND),
        (answer(1, round=6), reasons.OTHER_ROUND),
        (answer(1, phase=1), reasons.OTHER_ROUND),
        (answer(1, (3.0, 4.0, 0.0)), reasons.WRONG_FORM),
        (answer(1, up={"delta": torch.ones(2)}), reasons.WRONG_FORM),
        (answer(1, up={"dc": torch.ones(2, dtype=torch.float64)}), reasons.WRONG_FORM),
        (answer(1, up={}), reasons.WRONG_FORM),
        (answer(1, buffers=torch.ones(2, dtype=torch.float64)), reasons.WRONG_FORM),
        (answer(1, (math.nan, 0.0)), reasons.NOT_FINITE),
        (answer(1, (0.0, -math.inf)), reasons.NOT_FINITE),
        (answer(1, buffers=torch.full((1,), math.nan, dtype=torch.float64)), reasons.NOT_FINITE),
        (answer(1, loss=torch.tensor(math.nan)), reasons.NOT_FINITE),
        (answer(1, kept={"h": torch.tensor([math.inf])}), reasons.NOT_FINITE),
        (answer(1, (500.1, 0.0)), reasons.TOO_LARGE),
        (answer(1, buffers=torch.full((1,), -101.0, dtype=torch.float64)), reasons.TOO_LARGE),
    ],
)
def test_a_wrong_answer_is_refused_for_its_reason(wrong: Answer, reason: str) -> None:
    """Right answers have length 5 and buffers of length 1."""
    assert judged([answer(0), wrong, answer(2), answer(3)]) == ([0, 2, 3], NO_FOUR | {1: reason})


def test_only_the_first_answer_of_a_client_counts() -> None:
    answers = [answer(3), answer(0), answer(3, (7.0, 7.0)), answer(1), answer(2)]
    assert judged(answers) == ([0, 1, 2, 3], NO_FOUR | {3: reasons.REPEATED})
    asked = AskedPhase(5, 0, dict.fromkeys(range(5), 1.0), SPECS, torch.zeros(2), 0.0)
    used, incidents = judge(asked, answers, NO_FOUR)
    assert used[3] is answers[0] and [i.lost for i in incidents] == [False, True]


def test_answers_of_old_rounds_and_of_strangers_change_nothing() -> None:
    old = [answer(client, round=4) for client in (0, 4, 9)]  # client 4 fails in this round, 9 is not asked
    assert judged([*old, answer(0), answer(1), answer(2), answer(3), answer(1, round=3)]) == ([0, 1, 2, 3], NO_FOUR)


def test_lengths_are_compared_with_the_median_from_three_answers_on() -> None:
    huge = answer(1, (1e9, 0.0))
    assert judged([answer(0), huge, answer(2)])[1][1] == reasons.TOO_LARGE
    assert judged([answer(0), huge])[0] == [0, 1]  # nobody knows which of the two is wrong
    assert judged([answer(0), huge, answer(2)], limit=0.0)[0] == [0, 1, 2]
    zeros = [answer(0, (0.0, 0.0)), answer(1), answer(2, (0.0, 0.0))]  # a median of 0 says nothing
    assert judged(zeros)[0] == [0, 1, 2]
    assert judged([answer(0), huge, answer(2), answer(3, (1e9, 0.0))])[0] == [0, 2]


def test_a_client_with_much_data_is_not_taken_for_a_faulty_one() -> None:
    """With 300 steps, where others have one, an update may be 300 times longer for that alone."""
    large = [answer(0), answer(1, (3000.0, 0.0)), answer(2), answer(3)]
    assert judged(large)[1] == NO_FOUR | {1: reasons.TOO_LARGE}
    assert judged(large, c1=300.0)[1] == NO_FOUR


def test_a_client_that_still_moves_is_not_taken_for_a_faulty_one() -> None:
    """Where the others have arrived, one with other data moves a million times as far: less than the model's length."""
    moving = [answer(i, (1e-6, 0.0)) for i in range(3)] + [answer(3, (1.0, 0.0))]
    assert judged(moving)[1] == NO_FOUR
    assert judged(moving, model=0.5)[1] == NO_FOUR | {3: reasons.TOO_LARGE}


# runs -----------------------------------------------------------------------------------------------------------------

TABLES: dict[str, Any] = {
    "rounds": 6,
    "partition": {"clients": 8},
    "participation": {"cohort": 6},
    "algorithm": {"name": "scaffold"},
    "data": {"name": "synthetic", "dim": 6, "labels": 3, "samples": 20},
    "model": {"name": "softmax"},
    "engine": {"name": "sequential", "device": "cpu"},
    "faults": {"missing": 0.15, "late": 0.15, "not_finite": 0.1, "wrong_shape": 0.1, "repeated": 0.1},
}


class Interrupted(Exception):
    """Raised where a machine would stop."""


def without_times(run: askew.Run) -> list[Record]:
    return [{k: v for k, v in record.items() if k != "seconds"} for record in run.rounds]


def same_model(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], t) for name, t in other.items())


@pytest.mark.parametrize("key", ["scaffold", "fedga"])
def test_an_interrupted_run_with_faults_goes_on_as_if_nothing_had_happened(key: str, tmp_path: Path) -> None:
    config = Config.build(TABLES | {"algorithm": {"name": key}})
    whole = run_config(config)
    assert {reason for record in whole.rounds for reason in record.get("incidents", ())} >= {records.LATE}

    def interrupt(run: askew.Run, record: Record | None) -> None:
        if record and record["round"] == 3:
            raise Interrupted

    with pytest.raises(Interrupted):
        run_config(config, tmp_path, watch=interrupt, save_every=0.0)
    resumed = run_config(config, tmp_path)
    assert without_times(resumed) == without_times(whole) and same_model(resumed.model, whole.model)


@pytest.mark.slow
def test_two_processes_lose_the_same_answers(tmp_path: Path) -> None:
    one, two = (
        run_config(
            Config.build(TABLES | {"engine": {"name": "sequential", "device": "cpu", "workers": n}}), tmp_path / str(n)
        )
        for n in (1, 2)
    )
    assert two.facts["workers"] == 2 and without_times(one) == without_times(two) and same_model(one.model, two.model)


def test_the_table_is_stored_only_where_it_says_something() -> None:
    assert "faults" not in Config.build({}).tables() and "faults" not in Config.build({"faults": {}}).tables()
    assert Config.build({"faults": {}}).name() == Config.build({}).name()
    config = Config.build({"faults": {"missing": 0.2}})
    assert config.name() != Config.build({}).name() and Config.build(config.tables()) == config


def test_rates_that_sum_to_more_than_one_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"the rates must sum to at most 1, got 1\.2; lower some of them"):
        Faults(missing=0.7, scaled=0.5)
