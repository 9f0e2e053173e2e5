"""Rounds that use answers from older models: timelines and models by hand, any timeline, engines, ranks and resumes."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import askew
from askew.algorithms import FedAvg, FedBN, Scaffold, algorithms
from askew.core.algorithm import Algorithm
from askew.core.bank import Bank
from askew.core.records import LEFT, NO_ANSWER
from askew.core.types import Cohort, State
from askew.data.federation import LocalSettings
from askew.engine.answers import NOT_FINITE
from askew.engine.client_draws import FreeClients
from askew.engine.distributed import DistributedEngine
from askew.engine.overlapping_clock import OverlappingClock
from askew.engine.overlapping_server import OverlappingServer
from askew.engine.privacy_stage import PrivacyStage
from askew.errors import ConfigError
from askew.experiment.build import build
from askew.experiment.config import Config
from askew.experiment.run import ActiveRun, round_loop, run_together
from askew.participation import Cyclic, FullParticipation, Participation, Skewed, Uniform
from askew.timeline import TimeSettings, TraceIntervals
from problems import (
    FaultyReports,
    Problem,
    Record,
    classification,
    full_state,
    identical,
    largest_gap,
    make_server,
    scalars,
    skewed_samples,
)
from test_ranks import ThreadGroup, on_ranks
from test_timeline import SOME, LeaveAt, comparable, five_clients, link, same_model

# what is by hand ------------------------------------------------------------------------------------------------------

# L_i(w) = ½ A_i (w − a_i)²; every client takes two steps of eight of its sixteen samples, at η = 1/4
CURVES = [(1.0, 1.0), (2.0, -1.0), (1.0, 3.0), (0.5, 2.0), (2.0, 5.0)]
LOCAL = LocalSettings(steps=2, batch=8, lr=0.25)
Step = tuple[
    float, float, list[int], list[int], dict[str, list[int]], list[int]
]  # began, clock, used, stale, lost, new

# Answers take 11, 15, 23, 39 and 71 seconds. Client 3 leaves at 30 and comes again at 100.
BY_HAND: dict[str, tuple[dict[str, Any], Participation, list[Step]]] = {
    "late": (
        {"wait": "deadline", "deadline": 25, "late": "next"},
        FullParticipation(),
        [
            (0.0, 25.0, [0, 1, 2], [0, 0, 0], {}, [0, 1, 2, 3, 4]),
            (25.0, 50.0, [0, 1, 2], [0, 0, 0], {LEFT: [3]}, [0, 1, 2]),
            (50.0, 73.0, [0, 1, 2, 4], [0, 0, 0, 2], {}, [0, 1, 2]),  # 4 began at 0; nobody is at work after 73
            (73.0, 98.0, [0, 1, 2], [0, 0, 0], {}, [0, 1, 2, 4]),
        ],
    ),
    "buffer": (
        {"wait": "buffer", "buffer": 2},
        Uniform(cohort=5),
        [
            (0.0, 15.0, [0, 1], [0, 0], {}, [0, 1, 2, 3, 4]),
            (15.0, 26.0, [0, 2], [0, 1], {}, [0, 1]),  # 2 came at 23
            (26.0, 37.0, [0, 1], [0, 1], {LEFT: [3]}, [0, 2]),  # 1 came at 30, when 3 left
            (37.0, 49.0, [0, 2], [0, 1], {}, [0, 1]),
            (49.0, 60.0, [0, 1], [0, 1], {}, [0, 2]),
            (60.0, 71.0, [0, 4], [0, 5], {}, [0, 1]),
        ],
    ),
}


def moved(w: float, client: int) -> float:
    """How far two steps move a client that starts at w."""
    A, a = CURVES[client]
    return ((1 - 0.25 * A) ** 2 - 1) * (w - a)


def overlapping_server(
    alg: Algorithm, problem: Problem, local: LocalSettings = LOCAL, engine: str = "sequential", **given: Any
) -> OverlappingServer:
    """A server before its first round."""
    plain = make_server(alg, problem, local, engine)
    made = given.pop("engine_of", lambda engine: engine)(plain.engine)
    return OverlappingServer(plain.alg, plain.space, plain.fed, local, made, plain.seed, plain.smallest_batch, **given)


def run_clock(server: OverlappingServer, clock: OverlappingClock, rounds: int, first: int = 1) -> list[Record]:
    """The records of so many rounds."""
    records = []
    for t in range(first, first + rounds):
        turnout = clock.turnout(t)
        requests, outputs = server.turnout_requests(t, turnout), None
        try:
            while True:
                request = next(requests) if outputs is None else requests.send(outputs)
                (outputs,) = server.engine.run([request])
        except StopIteration as end:
            records.append(end.value | turnout.record)
    return records


def five(folder: Path, way: str, engine_of: Any = lambda engine: engine) -> tuple[OverlappingServer, OverlappingClock]:
    """The five clients' server and clock."""
    how, rule, _ = BY_HAND[way]
    server = overlapping_server(FedAvg(), scalars(*CURVES, copies=[16] * 5), engine_of=engine_of)
    return server, OverlappingClock(TimeSettings(**link(folder, 8), **how), rule, server, 0)


def test_work_of_a_client_that_leaves_ends_when_it_leaves(tmp_path: Path) -> None:
    began, left = 0.4, 1.7
    assert began + (left - began) < left  # a sum that is rounded to a moment at which it is still there
    _, clock = five(tmp_path, "buffer")
    clock.there = LeaveAt(left)
    (job,), _ = clock.work([2], 1, began)
    assert (job.leaves, job.ends) == (True, left)


def test_the_rules_own_draw_waits_until_somebody_is_there(tmp_path: Path) -> None:
    _, clock = five(tmp_path, "buffer")
    clock.rule, here = Uniform(cohort=2), TraceIntervals({i: {"from": [7.0], "to": [1e6]} for i in range(5)}, 1e6)
    clock.there, clock.availability = here, FreeClients(here, clock.busy)
    for round in range(1, 9):
        own = clock.rule.choose(clock.rule.drawn_by(0), round, clock.fed.eligible, 5).tolist()
        draw = clock.draw_of_round(round)
        assert draw(2, 0.0) == []
        assert draw(2, 7.0) == sorted(own)


@pytest.mark.parametrize("way", BY_HAND)
def test_timeline_and_model_are_as_computed_by_hand(way: str, tmp_path: Path) -> None:
    steps = BY_HAND[way][2]
    records = run_clock(*(parts := five(tmp_path, way)), len(steps))
    models = [0.0]  # before each round
    for record, (began, clock, used, stale, lost, new) in zip(records, steps, strict=True):
        assert (record["began"], record["clock"], record["participants"]) == (began, clock, used)
        assert (record["staleness"], record.get("incidents", {})) == (stale, lost)
        assert (record["started"], record["asked"]) == (new, len(new)) and {*record["started_at"]} == {began}
        assert (record["bytes_down"], record["bytes_up"]) == (8 * len(new), 8 * len(used))
        changes = [moved(models[-1 - s], i) for i, s in zip(used, stale, strict=True)]
        models.append(models[-1] + sum(changes) / len(used))
    assert abs(float(parts[0].w) - models[-1]) < 1e-14
    assert records[0]["answer_seconds"] == [11.0, 15.0, 23.0, 30.0, 71.0]  # 3 left then
    assert [r["late"] for r in records] == ([2, 0, 0, 1] if way == "late" else [0] * 6)
    waiting = {"late": [4], "buffer": [1, 2]}[way]
    assert sorted(parts[0].answers.clients) == sorted(parts[0].answer_states.clients or waiting) == waiting


def test_a_refused_answer_is_an_incident_of_the_round_that_would_use_it_and_makes_no_step(tmp_path: Path) -> None:
    broken = lambda engine: FaultyReports(engine, [0, 2])
    records = run_clock(*five(tmp_path, "buffer", broken), 6)
    assert [r.get("incidents", {}) for r in records[1:3]] == [{NOT_FINITE: [0, 2]}, {LEFT: [3], NOT_FINITE: [0]}]
    # rounds 2 and 4 made no step, so that answers are as much less stale
    assert [r["staleness"] for r in records] == [[0, 0], [0, 1], [0, 0], [0, 1], [0, 0], [0, 3]]


def test_answers_of_one_moment_come_by_number_before_anybody_begins(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("client,from,to\n" + "".join(f"{i},0,100\n" for i in range(4)) + "4,0,10\n")
    server = overlapping_server(FedAvg(), scalars(*CURVES, copies=[16] * 5))
    how = TimeSettings(wait="buffer", buffer=2, seconds=0, latency=5, trace=str(tmp_path / "trace.csv"))
    records = run_clock(server, OverlappingClock(how, Uniform(cohort=5), server, 0), 4)
    assert [(r["began"], r["clock"], r["participants"], r["staleness"], r["started"]) for r in records] == [
        (0.0, 10.0, [0, 1], [0, 0], [0, 1, 2, 3, 4]),
        (10.0, 10.0, [2, 3], [1, 1], []),
        (10.0, 20.0, [0, 4], [0, 2], [0, 1, 2, 3]),  # 4 answered at 10, the moment at which it left
        (20.0, 20.0, [1, 2], [1, 1], []),
    ]


def test_a_clients_state_is_stored_when_its_answer_is_used(tmp_path: Path) -> None:
    how, rule, _ = BY_HAND["buffer"]
    server = overlapping_server(Scaffold(), scalars(*CURVES, copies=[16] * 5))
    clock = OverlappingClock(TimeSettings(**link(tmp_path, 16), **how), rule, server, 0)  # it sends the model twice
    for first, rounds, stored in ((1, 1, [0, 1]), (2, 4, [0, 1, 2]), (6, 1, [0, 1, 2, 4])):
        run_clock(server, clock, rounds, first)
        assert sorted(server.clients.clients) == stored
    A, a = CURVES[4]  # its variate is the mean gradient along its two steps, from the model that it started from, 0
    assert abs(float(server.clients.read([4])["c"]) - A * (0.0 - a) * (1 + (1 - 0.25 * A)) / 2) < 1e-14


def test_privacy_counts_every_answer_once_and_who_left(tmp_path: Path) -> None:
    tables = five_clients(
        rounds=6,
        algorithm={"name": "fedavg", "weighting": "uniform"},
        participation={"cohort": 5},
        privacy={"clip": 1.0, "noise": 1.0, "where": "client"},
        time=link(tmp_path) | BY_HAND["buffer"][0],
    )
    active = ActiveRun(build(Config.build(tables)), None, None, save_every=1e9)
    round_loop([active], lambda: False)
    (stage,) = active.server.recording
    assert isinstance(stage, PrivacyStage) and stage.rounds_of.tolist() == [6, 3, 2, 1, 1]


# nothing new where nothing overlaps -----------------------------------------------------------------------------------

NEW = ("started", "started_at", "staleness")


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedvarp"])
def test_a_full_buffer_of_equal_clients_is_waiting_for_all(method: str) -> None:
    small = {"rounds": 4, "model": {"name": "softmax"}, "algorithm": {"name": method}}
    equal = {"seconds": 0.0, "latency": 1.0, "up": 1e5}
    run = askew.run(small | {"time": equal | {"wait": "all"}})
    same = askew.run(small | {"time": equal | {"wait": "buffer", "buffer": 6}})
    assert comparable(run) == [{k: v for k, v in r.items() if k not in NEW} for r in comparable(same)]
    assert same_model(run, same) and all(r["staleness"] == [0] * 6 for r in same.rounds)


def test_late_answers_without_a_deadline_are_waiting_for_all() -> None:
    small = {"rounds": 4, "model": {"name": "softmax"}, "algorithm": {"name": "scaffold"}}
    ways = ({"wait": "all"}, {"wait": "deadline", "deadline": math.inf, "late": "next"})
    run, same = (askew.run(small | {"time": SOME | how}) for how in ways)
    assert same_model(run, same) and sum(r["away"] for r in run.rounds) > 0
    assert comparable(run) == [{k: v for k, v in r.items() if k not in NEW} for r in comparable(same)]


# any timeline ---------------------------------------------------------------------------------------------------------


def check_timeline(records: Sequence[Record], how: TimeSettings, at_work: int, final: float) -> None:
    """Every client that began has one outcome, the clock never runs back, and the model is the sum of what was used."""
    began: dict[int, tuple[int, float, float]] = {}  # of those at work: round, begin and end
    w, steps, at = 0.0, 0, 0.0
    before = [(0.0, 0)]  # the model and the number of steps before each round
    for t, record in enumerate(records, 1):
        assert at <= record["began"] <= record["clock"]
        for i, moment, length in zip(*(record[key] for key in (*NEW[:2], "answer_seconds")), strict=True):
            assert i not in began and record["began"] <= moment <= record["clock"]
            began[i] = (t, moment, moment + length)
        lost, used = record.get("incidents", {}), record["participants"]
        changes = []
        for i, stale in zip(used, record["staleness"], strict=True):
            first, _, end = began.pop(i)  # an answer that is used was asked for, and is used once
            assert end <= record["clock"] and (end > at or first == t or how.wait == "buffer")
            assert stale == steps - before[first - 1][1]
            changes.append(moved(before[first - 1][0], i))
        for i in lost.get(LEFT, ()):
            assert began.pop(i)[2] <= record["clock"]
        assert lost.keys() <= {LEFT, NO_ANSWER} and not {*lost.get(NO_ANSWER, ())} & {*record["started"]}
        if how.wait == "buffer":
            assert len(began) <= at_work and (len(used) == how.buffer or not began)
        else:
            assert record["clock"] <= record["began"] + how.deadline and all(
                end > record["clock"] for _, _, end in began.values()
            )
        w += sum(changes) / max(1, len(used))
        steps, at = steps + bool(used), record["clock"]
        before.append((w, steps))
    assert abs(final - w) < 1e-12


spans = st.lists(st.integers(1, 9), min_size=2, max_size=6)  # away and there in turns


@given(
    wait=st.sampled_from(
        [("buffer", 1, 3), ("buffer", 2, 2), ("buffer", 3, 5), ("deadline", 2, 0), ("deadline", 6, 0)]
    ),
    seconds=st.lists(st.integers(0, 12) | st.floats(0, 30), min_size=5, max_size=5),
    there=st.lists(st.none() | spans, min_size=5, max_size=5),
    rule=st.sampled_from([Uniform(cohort=3), Uniform(cohort=2, dropout=0.3), Cyclic(groups=2), Skewed(cohort=3)]),
)
@settings(max_examples=1000 if os.environ.get("ASKEW_LONG") == "all" else 8, deadline=None)
def test_on_any_timeline_no_answer_is_lost_or_counted_twice(
    wait: tuple[str, int, int], seconds: list[float], there: list[list[int] | None], rule: Participation
) -> None:
    kind, number, at_work = wait
    rest = {"buffer": number, "at_work": at_work} if kind == "buffer" else {"deadline": float(number), "late": "next"}
    how = TimeSettings(wait=kind, **rest)
    server = overlapping_server(FedAvg(), scalars(*CURVES, copies=[16] * 5))
    clock = OverlappingClock(how, rule, server, 0)
    intervals: dict[int, Mapping[str, list[float]]] = {}
    for i, own in enumerate(there):
        edges = [float(sum(own[: k + 1])) for k in range(len(own))] if own else [0.0, 60.0]
        intervals[i] = {"from": edges[: len(edges) // 2 * 2 : 2], "to": edges[1::2]}
    clock.there = TraceIntervals(intervals, 60.0)
    clock.availability = FreeClients(clock.there, clock.busy)
    clock.answer_seconds = lambda client, samples, keep=True: float(seconds[client])  # type: ignore[method-assign]
    records = run_clock(server, clock, 7)
    check_timeline(records, how, at_work, float(server.w))
    again = OverlappingClock(how, rule, server, 0)
    again.there, again.availability = clock.there, FreeClients(clock.there, again.busy)
    again.answer_seconds = clock.answer_seconds  # type: ignore[method-assign]
    again.resume(records[:4])  # a clock that goes on from records knows who is at work
    assert [again.turnout(t).record for t in (5, 6, 7)] == [
        {k: v for k, v in r.items() if k in again.turnout(8).record} for r in records[4:]
    ]


# the same result in whatever way it is computed -----------------------------------------------------------------------

ASYNCHRONOUS = [
    {"wait": "buffer", "buffer": 2, "at_work": 4},
    {"wait": "deadline", "deadline": 0.5, "late": "next"},
]


def seven_clients(
    alg: Algorithm, engine: str = "sequential", **given: Any
) -> tuple[OverlappingServer, OverlappingClock]:
    """A server and its clock; one client has no batch with batch norm."""
    problem = classification(skewed_samples([5, 8, 3, 6, 3, 9, 1]), "batch" if isinstance(alg, FedBN) else "none")
    local = LocalSettings(epochs=2, batch=4, lr=0.2, momentum=0.5, decay=0.9)
    server = overlapping_server(alg, problem, local, engine, **given)
    return server, OverlappingClock(TimeSettings(speed="lognormal", **ASYNCHRONOUS[0]), Uniform(cohort=4), server, 0)


def everything(server: OverlappingServer) -> State:
    """The server's state and the answers that wait."""
    waiting = server.answers.read(range(7)) | server.answer_states.read(range(7))
    return full_state(server) | {f"waiting.{n}": t for n, t in waiting.items()}


@pytest.mark.slow
@pytest.mark.parametrize("alg", [FedBN(), Scaffold()], ids=["fedbn", "scaffold"])
def test_engines_and_ranks_agree(alg: Algorithm) -> None:
    server, clock = seven_clients(alg)
    records = run_clock(server, clock, 8)
    assert max(s for r in records for s in r["staleness"]) > 1 and len(server.answers) > 0
    for engine in ("vmapped", "slots" if isinstance(alg, FedBN) else "stacked"):
        other, clock = seven_clients(alg, engine)
        assert [r["staleness"] for r in run_clock(other, clock, 8)] == [r["staleness"] for r in records]
        assert largest_gap(everything(other), everything(server)) < 1e-12

    broken = lambda engine: FaultyReports(engine, [3], "state") if alg.client_state(server.space) else engine

    def rank(group: ThreadGroup) -> tuple[OverlappingServer, OverlappingClock]:
        return seven_clients(alg, engine_of=lambda engine: DistributedEngine(broken(engine), group), owns=group.owns)

    whole, clock = seven_clients(alg, engine_of=broken)
    records = run_clock(whole, clock, 8)
    assert any(NOT_FINITE in r.get("incidents", {}) for r in records) == bool(whole.clients.start)
    for n, ((one, _), same) in enumerate(on_ranks(2, rank, lambda parts: run_clock(*parts, 8))):
        assert torch.equal(one.w, whole.w) and same == records
        own = [i for i in range(7) if i % 2 == n and i != 3]  # the state of 3 that waits is never used
        for bank, other_bank in ((one.clients, whole.clients), (one.answer_states, whole.answer_states)):
            assert identical(bank.read(own), other_bank.read(own)) and all(i % 2 == n for i in bank.clients)


@pytest.mark.parametrize("how", ASYNCHRONOUS, ids=["buffer", "late"])
def test_a_run_that_was_killed_goes_on_with_the_answers_that_wait(how: dict[str, Any], tmp_path: Path) -> None:
    small = {"model": {"name": "softmax"}, "algorithm": {"name": "scaffold"}, "time": SOME | how}
    tables = small | {
        "rounds": 8,
        "partition": {"clients": 8},
        "participation": {"cohort": 4, "dropout": 0.2, "stragglers": 0.3},
        "faults": {"missing": 0.1},
    }

    def kill(run: askew.Run, record: Record | None) -> None:
        if record and record["round"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        askew.run(tables, out=tmp_path / "killed", watch=kill, save_every=0)
    killed, whole = askew.run(tables, out=tmp_path / "killed"), askew.run(tables, out=tmp_path / "whole")
    longer = [askew.run(tables | {"rounds": rounds}, out=tmp_path / "longer") for rounds in (3, 8)][1]
    for run in (killed, longer):
        assert comparable(run) == comparable(whole) and same_model(run, whole)
    assert max(s for r in whole.rounds[3:] for s in r["staleness"]) > 0


def test_runs_side_by_side_and_rounds_that_overlap_on_the_device_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"rounds": 5, "model": {"name": "softmax"}, "evaluation": {"every": 2, "drift": True}}
    configs = [Config.build(small | {"seed": n, "time": SOME | how}) for n, how in enumerate(ASYNCHRONOUS)]
    alone = [run for config in configs for run in run_together([config])]
    monkeypatch.setattr(ActiveRun, "can_overlap", property(lambda run: True))
    monkeypatch.setattr(ActiveRun, "evaluation_stream", lambda run: None)
    monkeypatch.setattr("askew.experiment.run.SHORT_ROUND", 60.0)
    for run, other in zip(run_together(configs), alone, strict=True):
        assert comparable(run) == comparable(other) and same_model(run, other)


def test_a_round_is_measured_before_one_that_trains_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a round ends at once, with answers that waited; the record of the one before it may not be written yet."""
    tables = {"model": {"name": "softmax"}, "partition": {"name": "iid"}, "evaluation": {"spread": True}}
    config = Config.build(tables | {"rounds": 5, "time": {"wait": "buffer", "buffer": 1, "at_work": 4}})
    (alone,) = run_together([config])
    assert any(not record["started"] for record in alone.rounds)
    monkeypatch.setattr(ActiveRun, "can_overlap", property(lambda run: True))
    monkeypatch.setattr(ActiveRun, "evaluation_stream", lambda run: None)
    monkeypatch.setattr("askew.experiment.run.SHORT_ROUND", 60.0)
    assert comparable(run_together([config])[0]) == comparable(alone)


def test_a_cohort_has_its_staleness_and_without_late_answers_zero(tmp_path: Path) -> None:
    seen: list[list[float]] = []

    class Seeing(FedAvg):
        def aggregate(self, w: torch.Tensor, up: State, cohort: Cohort, server: State) -> tuple[torch.Tensor, State]:
            seen.append((cohort.staleness + 0 * cohort.p).tolist())
            return super().aggregate(w, up, cohort, server)

    server = overlapping_server(Seeing(), scalars(*CURVES, copies=[16] * 5))
    how, rule, steps = BY_HAND["buffer"]
    run_clock(server, OverlappingClock(TimeSettings(**link(tmp_path, 8), **how), rule, server, 0), 6)
    assert seen == [stale for _, _, _, stale, _, _ in steps]
    make_server(Seeing(), scalars(*CURVES), LOCAL).run_round(1, [0, 1])
    assert seen[-1] == [0.0, 0.0]


# who waits for whom ---------------------------------------------------------------------------------------------------


def test_if_nobody_can_come_any_more_the_step_is_made_with_the_answers_that_there_are(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("client,from,to\n1,40,100\n3,60,100\n")
    how = {"wait": "buffer", "buffer": 3, "seconds": 0.5, "trace": str(tmp_path / "trace.csv")}
    tables = five_clients("fedavg", participation={"name": "uniform", "cohort": 4}, time=how)
    run = askew.run(tables)  # 16 samples are 8 seconds; 1 and 3 never make three answers
    assert [(r["began"], r["clock"], r["participants"], r["started_at"]) for r in run.rounds] == [
        (40.0, 68.0, [1, 3], [40.0, 60.0]),
        (68.0, 76.0, [1, 3], [68.0, 68.0]),
        (76.0, 84.0, [1, 3], [76.0, 76.0]),
    ]


def test_a_round_that_can_ask_nobody_takes_no_time() -> None:
    rarely = {"name": "markov", "cohort": 2, "join": 0.01, "leave": 0.9}
    run = askew.run(five_clients("fedavg", participation=rarely, time={"wait": "buffer", "buffer": 1}))
    empty = [r for r in run.rounds if not r["started"] and not r["participants"]]
    assert empty and all(r["began"] == r["clock"] for r in empty)


def test_if_nobody_is_ever_there_it_is_refused_and_the_rounds_before_are_kept(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("client,from,to\n0,0,9\n1,0,9\n")
    turns = {"name": "cyclic", "groups": 2, "shuffle": False}
    how = {"wait": "buffer", "buffer": 1, "trace": str(tmp_path / "trace.csv")}
    with pytest.raises(ConfigError, match="nobody that round 2 could ask is ever there by"):
        askew.run(five_clients("fedavg", participation=turns, time=how), out=tmp_path / "runs")
    (folder,) = (tmp_path / "runs").iterdir()
    assert [r["round"] for r in askew.load(folder).rounds] == [1]


@pytest.mark.parametrize("method", [name for name in algorithms if len(algorithms[name]().phases()) > 1])
def test_methods_with_several_exchanges_in_a_round_are_refused(method: str) -> None:
    for how in ASYNCHRONOUS:
        with pytest.raises(ConfigError, match=r"exchanges in a round, and with .*; set time.wait = \"all\""):
            Config.build({"algorithm": {"name": method}, "time": how})


BUFFER = {"wait": "buffer", "buffer": 2}
NOISE = {"clip": 1.0, "noise": 1.0}


@pytest.mark.parametrize(
    ("tables", "sentence"),
    [
        ({"time": {"wait": "buffer"}}, 'wait = "buffer" needs time.buffer, a number of answers; set it'),
        ({"time": BUFFER | {"at_work": 1}}, "a buffer of 2 answers never fills with 1 client at work; lower time.buf"),
        ({"time": BUFFER | {"buffer": 7}}, r"never fills with 6 clients at work \(the cohort of participation\)"),
        ({"time": BUFFER | {"at_work": 31}}, "at_work must be at most the number of clients, 30, got 31; lower time"),
        (
            {"time": BUFFER, "participation": {"name": "full"}},
            "Full has no cohort of fixed size; set participation.nam",
        ),
        ({"time": BUFFER, "evaluation": {"fit": True}}, "evaluation.fit and evaluation.weights evaluate the clients'"),
        ({"time": BUFFER, "algorithm": {"name": "fedpdc", "adaptive": True}}, "FedPDC evaluates the clients' models"),
        ({"time": BUFFER, "privacy": NOISE}, "the server's noise and secret_sampling have no account"),
        *(
            ({"time": how | {name: value}}, rf'time\.{name} has no effect with wait = "{how["wait"]}"; .* "{user}"\.$')
            for name, value, user in (
                ("deadline", 1.0, "deadline"),
                ("late", "next", "deadline"),
                ("spare", 1, "first"),
                ("buffer", 2, "buffer"),
                ("at_work", 2, "buffer"),
            )
            for how in ({"wait": "all"}, {"wait": "deadline", "deadline": 1.0}, {"wait": "first"}, BUFFER)
            if how["wait"] != user
        ),
        ({"time": {"late": "next"}}, 'the clock is off without time.wait; set wait = "all", "deadline", "first" or'),
    ],
)
def test_what_cannot_be_right_is_refused_with_one_sentence(tables: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as error:
        Config.build(tables)
    assert "\n" not in str(error.value) and str(error.value).endswith(".")


def test_a_method_that_says_why_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FedAvg, "stale", "its step needs answers of one model")
    Config.build({"time": {"wait": "all"}})
    for how in ASYNCHRONOUS:
        with pytest.raises(ConfigError, match="wrong for FedAvg: its step needs answers of one model; set"):
            Config.build({"time": how})


def test_rows_that_are_forgotten_are_used_again() -> None:
    bank = Bank({"h": torch.zeros(2)})
    bank.write([4, 5, 6], {"h": torch.arange(6.0).view(3, 2)})
    bank.forget([5, 9])
    bank.write([8, 4], {"h": torch.full((2, 2), 7.0)})
    assert bank.read([4, 5, 6, 8])["h"].tolist() == [[7, 7], [0, 0], [4, 5], [7, 7]]
    assert sorted(bank.clients) == [4, 6, 8] and max(bank.row_of.values()) == 2
