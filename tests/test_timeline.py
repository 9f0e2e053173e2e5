"""The virtual clock: timelines computed by hand, distributions of what is drawn, and that nothing else changes."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from itertools import combinations, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import askew
import askew.engine.clock as clock_module
import askew.participation.rules as participation_rules
import askew.report.timeline_figure as timeline_figure
from askew.algorithms import algorithms
from askew.core.records import CLOCK, LATE, LEFT, NO_ANSWER, NOT_AWAITED
from askew.core.rng import uniforms
from askew.data import Natural, Synthetic
from askew.data.dataset import Dataset, Samples
from askew.data.federation import Federation, LocalSettings
from askew.engine.clock import VirtualClock
from askew.engine.expected_uploads import answer_bytes
from askew.engine.privacy_stage import PrivacyStage
from askew.engine.settings import EngineSettings
from askew.errors import AskewError, ConfigError
from askew.experiment.build import BuiltRun, build
from askew.experiment.config import Config
from askew.experiment.run import ActiveRun, round_loop
from askew.models import MLP
from askew.participation import (
    Bernoulli,
    ByClass,
    CohortParticipation,
    Cyclic,
    FullParticipation,
    Participation,
    Poisson,
    Skewed,
    Uniform,
)
from askew.report.columns import Columns
from askew.report.tables import RunGroup, table
from askew.report.terminal import clock_text
from askew.report.timeline_figure import (
    AT_WORK,
    DROPPED_OUT,
    IN_TIME,
    NEWEST,
    NOT_USED,
    OLDER,
    bars_of,
    overlapping_bars,
    timeline_picture,
)
from askew.report.views import curves
from askew.timeline import (
    AlwaysThere,
    DayNight,
    Device,
    OnOff,
    SearchedOnOff,
    TimeSettings,
    TraceIntervals,
    availability_of,
    device_of,
    refreshes,
    wait_for,
)


class RoundByRound(Bernoulli):
    """A rule of a user's own, which draws in another way than its base class."""

    def sample(self, seed: int, round: int, eligible: np.ndarray, clients: int) -> np.ndarray:
        return eligible[: round % 3]


MESSAGE = 650 * 4  # bytes of the model: softmax regression on 64 pixels and 10 classes
# 2 steps of 8 samples; 2 s down, 4 s up, 0.5 s latency each way: clients answer after 11, 15, 23, 39 and 71 seconds.
SPEEDS = "client,seconds\n0,0.25\n1,0.5\n2,1\n3,2\n4,4\n"
TRACE = "client,from,to\n0,0,1000\n1,0,1000\n2,0,1000\n3,0,30\n3,100,1000\n4,0,1000\n"
SECONDS = {0: 11.0, 1: 15.0, 2: 23.0, 3: 39.0, 4: 71.0}
Round = tuple[float, float, list[int], dict[str, list[int]]]  # begin, end, whose answers count, incidents

BY_HAND: dict[str, tuple[dict[str, Any], list[Round]]] = {
    # client 3 leaves at 30 and comes again at 100
    "all": (
        {"wait": "all"},
        [
            (0.0, 71.0, [0, 1, 2, 4], {LEFT: [3]}),
            (71.0, 142.0, [0, 1, 2, 4], {}),
            (142.0, 213.0, [0, 1, 2, 3, 4], {}),
        ],
    ),
    # in round 1 the deadline comes before client 3 leaves
    "deadline": (
        {"wait": "deadline", "deadline": 25},
        [
            (0.0, 25.0, [0, 1, 2], {LATE: [3, 4]}),
            (25.0, 50.0, [0, 1, 2], {LEFT: [3], LATE: [4]}),
            (50.0, 75.0, [0, 1, 2], {LATE: [4]}),
        ],
    ),
    "first": (
        {"wait": "first", "spare": 2},
        [
            (0.0, 23.0, [0, 1, 2], {NOT_AWAITED: [3, 4]}),
            (23.0, 46.0, [0, 1, 2], {LEFT: [3], NOT_AWAITED: [4]}),
            (46.0, 69.0, [0, 1, 2], {NOT_AWAITED: [4]}),
        ],
    ),
}


def five_clients(method: str = "scaffold", **tables: Any) -> dict[str, Any]:
    """Five clients that take two steps of eight samples."""
    given: dict[str, Any] = {
        "rounds": 3,
        "algorithm": {"name": method},
        "model": {"name": "softmax"},
        "partition": {"name": "iid", "clients": 5},
        "participation": {"name": "full"},
        "local": {"steps": 2, "batch": 8},
        "engine": {"name": "sequential", "device": "cpu"},
    }
    return given | tables


def link(folder: Path, method_bytes: int = MESSAGE) -> dict[str, Any]:
    """The settings of the timeline by hand, for a method that sends so many bytes each way."""
    (folder / "speeds.csv").write_text(SPEEDS)
    (folder / "trace.csv").write_text(TRACE)
    rates = {"latency": 0.5, "down": method_bytes / 2, "up": method_bytes / 4}
    return {"clients": str(folder / "speeds.csv"), "trace": str(folder / "trace.csv"), **rates}


def comparable(run: askew.Run) -> list[dict[str, Any]]:
    """The records without the time that they took."""
    return [{k: v for k, v in r.items() if k != "seconds"} for r in run.rounds]


def same_model(run: askew.Run, other: askew.Run) -> bool:
    return all(torch.equal(run.model[name], other.model[name]) for name in run.model)


# by hand --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wait", BY_HAND)
def test_three_rounds_of_five_clients_are_as_computed_by_hand(wait: str, tmp_path: Path) -> None:
    how, rounds = BY_HAND[wait]
    cohort = {"participation": {"name": "uniform", "cohort": 3}} if wait == "first" else {}
    tables = five_clients(**cohort, time=link(tmp_path, 2 * MESSAGE) | how)  # scaffold sends the model twice
    run = askew.run(tables)
    found = [(r["began"], r["clock"], r["participants"], r.get("incidents", {})) for r in run.rounds]
    assert found == rounds
    for record, (began, _, used, incidents) in zip(run.rounds, rounds, strict=True):
        asked = sorted({*used, *(i for clients in incidents.values() for i in clients)})
        left = dict.fromkeys(incidents.get(LEFT, ()), 30.0 - began)
        assert record["answer_seconds"] == [left.get(i, SECONDS[i]) for i in asked]
        assert (record["asked"], record["away"]) == (len(asked), len(left))
        assert record["late"] == len(incidents.get(LATE, [])) + len(incidents.get(NOT_AWAITED, []))
        assert record["bytes_down"] == 2 * MESSAGE * len(asked) and record["bytes_up"] == 2 * MESSAGE * len(used)
    # What is trained is what a run trains whose participants are these: who was dropped keeps its state.
    (tmp_path / "who.json").write_text(json.dumps([used for _, _, used, _ in rounds]))
    named = askew.run(five_clients(participation={"name": "trace", "path": str(tmp_path / "who.json")}))
    assert same_model(run, named)


def test_the_duration_of_an_answer_is_the_formula() -> None:
    assert Device(0.25, 0.5, up=650.0, down=1300.0).answer_seconds(16, 2600, 2600) == 0.5 + 2 + 4 + 4 + 0.5
    assert Device(0.25).answer_seconds(16, 10**12, 10**12) == 4.0  # links without limit
    assert Device(0.25, 0.5).answer_seconds(16, 0, 0, messages=2) == 6.0  # two phases: four messages


def test_if_nobody_is_there_the_clock_goes_on_to_who_comes_first(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("client,from,to\n1,40,100\n3,60,100\n")
    run = askew.run(five_clients("fedavg", time={"wait": "all", "trace": str(tmp_path / "trace.csv"), "seconds": 0.5}))
    # 16 samples are 8 seconds; the file ends at 100 and begins again
    assert [(r["began"], r["clock"], r["participants"]) for r in run.rounds] == [
        (40.0, 48.0, [1]),
        (48.0, 56.0, [1]),
        (56.0, 64.0, [1]),
    ]


def test_if_a_round_can_ask_nobody_ever_the_rounds_before_it_are_kept(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("client,from,to\n0,0,9\n1,0,9\n")
    turns = {"name": "cyclic", "groups": 2, "shuffle": False}  # clients 3 and 4, of round 2, never come
    tables = five_clients("fedavg", participation=turns, time={"wait": "all", "trace": str(tmp_path / "trace.csv")})
    with pytest.raises(ConfigError, match="nobody that round 2 could ask is ever there by"):
        askew.run(tables, out=tmp_path / "runs")
    (folder,) = (tmp_path / "runs").iterdir()
    assert [r["round"] for r in askew.load(folder).rounds] == [1]


SOME = {"speed": "lognormal", "sigma": 1.0, "availability": "markov", "mean_on": 3.0, "mean_off": 1.0, "up": 1e5}


@pytest.mark.parametrize("other", [{"wait": "deadline", "deadline": math.inf}, {"wait": "first", "spare": 0}])
def test_no_deadline_and_no_spare_are_waiting_for_all(other: dict[str, Any]) -> None:
    small = {"rounds": 4, "model": {"name": "softmax"}, "participation": {"name": "uniform", "dropout": 0.2}}
    run, same = (askew.run(small | {"time": SOME | how}) for how in ({"wait": "all"}, other))
    assert comparable(run) == comparable(same) and same_model(run, same)
    assert sum(r["away"] for r in run.rounds) > 0


def test_the_clock_alone_changes_no_training_and_is_off_where_it_is_not_asked_for() -> None:
    small = {"rounds": 3, "model": {"name": "softmax"}}
    plain, clocked = askew.run(small), askew.run(small | {"time": {"wait": "all", "speed": "pareto"}})
    assert same_model(plain, clocked) and not {*CLOCK} & plain.rounds[0].keys()
    assert comparable(plain) == [{k: v for k, v in r.items() if k not in CLOCK} for r in comparable(clocked)]
    assert "time" not in Config().tables() and plain.clock is None and clocked.clock == clocked.rounds[-1]["clock"]
    assert Config.build(small).name() == plain.name and Config.build(small | {"time": {}}).name() == plain.name


@pytest.mark.parametrize("engine", ["stacked", "vmapped"])
def test_all_engines_have_the_same_timeline(engine: str) -> None:
    time = SOME | {"wait": "deadline", "deadline": 0.7}
    small = {"rounds": 3, "model": {"name": "softmax"}, "algorithm": {"name": "scaffold"}, "time": time}
    runs = [askew.run(small | {"engine": {"name": name}}) for name in ("sequential", engine)]
    keys = (*CLOCK, "participants", "incidents", "bytes_up", "bytes_down")
    assert [[r.get(k) for k in keys] for r in runs[0].rounds] == [[r.get(k) for k in keys] for r in runs[1].rounds]
    assert sum(r["late"] for r in runs[0].rounds) > 0


def test_a_run_that_was_killed_goes_on_with_the_same_clock(tmp_path: Path) -> None:
    tables = {"rounds": 4, "model": {"name": "softmax"}, "time": SOME | {"wait": "first", "spare": 4}}

    def kill(run: askew.Run, record: dict[str, Any] | None) -> None:
        if record and record["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        askew.run(tables, out=tmp_path / "killed", watch=kill, save_every=0)
    killed, whole = askew.run(tables, out=tmp_path / "killed"), askew.run(tables, out=tmp_path / "whole")
    longer = [askew.run(tables | {"rounds": rounds}, out=tmp_path / "longer") for rounds in (2, 4)][1]
    for run in (killed, longer):
        assert comparable(run) == comparable(whole) and same_model(run, whole)


@pytest.mark.parametrize(("where", "rounds"), [("server", [3, 3, 3, 0, 0]), ("client", [3, 3, 3, 2, 3])])
def test_privacy_counts_who_was_dropped_where_its_update_may_have_been_sent(
    where: str, rounds: list[int], tmp_path: Path
) -> None:
    method = {"name": "fedavg", "weighting": "uniform"}
    privacy = {"clip": 1.0, "noise": 1.0, "where": where}
    how = link(tmp_path) | BY_HAND["deadline"][0]
    active = ActiveRun(
        build(Config.build(five_clients(algorithm=method, privacy=privacy, time=how))), None, None, save_every=1e9
    )
    round_loop([active], lambda: False)
    (stage,) = active.server.recording
    assert isinstance(stage, PrivacyStage) and stage.rounds_of.tolist() == rounds  # client 3 is not asked in round 3


# any timeline ---------------------------------------------------------------------------------------------------------

moments = st.floats(0, 100, allow_subnormal=False) | st.integers(0, 5).map(float)


@given(
    wait=st.sampled_from([("all", 0.0), ("deadline", 3.0), ("deadline", math.inf), ("first", 0.0)]),
    clients=st.lists(st.tuples(moments, moments | st.just(math.inf)), max_size=8),
    wanted=st.integers(0, 8),
)
@example(wait=("first", 0.0), clients=[(5.0, math.inf), (60.0, 50.0)], wanted=1)  # nobody waits for who will be lost
@settings(max_examples=50, deadline=None)
def test_every_answer_has_one_fate_and_the_round_ends_when_it_is_known(
    wait: tuple[str, float], clients: list[tuple[float, float]], wanted: int
) -> None:
    how = TimeSettings(wait=wait[0], deadline=wait[1])
    answers, leaves = [a for a, _ in clients], [b for _, b in clients]
    end, reasons = wait_for(how, wanted, answers, leaves)
    assert len(reasons) == len(clients) and 0 <= end <= max(answers, default=0.0)
    used = [k for k, reason in enumerate(reasons) if not reason]
    for k, reason in enumerate(reasons):
        came = answers[k] <= leaves[k]
        assert came and answers[k] <= end if not reason else True
        assert (reason == LEFT) == (not came and leaves[k] <= end)
        assert reason in ("", LEFT) or max(answers[k], end) > end or how.wait == "first"
    able = [k for k in range(len(clients)) if answers[k] <= leaves[k]]
    if how.wait == "first":
        assert len(used) == min(wanted, len(able))
        assert all(answers[k] >= answers[u] for u in used for k in able if k not in used)
        known = map(min, answers, leaves) if len(able) < wanted else [answers[k] for k in used]
        assert end == max(known, default=0.0)
    else:
        limit = how.deadline if how.wait == "deadline" else math.inf
        assert used == [k for k in able if answers[k] <= limit]
        assert end == min(limit, max(map(min, answers, leaves), default=0.0))


class LeaveAt(AlwaysThere):
    """Everybody, until one moment."""

    def __init__(self, end: float) -> None:
        self.end = end

    def is_there(self, client: int, t: float) -> bool:
        return t < self.end

    def until(self, client: int, t: float) -> float:
        return max(t, self.end)


@pytest.mark.parametrize(("began", "left"), [(0.4, 1.7), (0.6, 1.8)])
def test_a_round_ends_when_the_last_one_leaves(built: BuiltRun, began: float, left: float) -> None:
    assert began + (left - began) != left  # rounded to a moment at which they are still there, or to a later one
    clock = VirtualClock(TimeSettings(wait="all", seconds=1e6), Uniform(cohort=3), built.server, 0)
    clock.availability, clock.now = LeaveAt(left), began
    assert clock.turnout(1).record["away"] == 3 and clock.now == left


def test_a_clock_is_refused_only_if_nobody_can_ever_answer(built: BuiltRun, tmp_path: Path) -> None:
    """A client that stays just as long as its answer takes can answer, also where the file begins again."""
    samples = int(built.fed.sizes[3])
    for text, there in (
        (f"0,0,{samples / 4}\n3,1,{1 + samples / 2}\n", True),
        (f"0,0,{samples / 4}\n3,1,{0.99 + samples / 2}\n", False),
        (f"3,0,{samples / 4}\n3,100,{100 + samples / 4}\n", True),  # half before the end of the file, half after it
        (f"3,0,{samples / 4}\n3,100,{99.99 + samples / 4}\n", False),
        ("3,0,1\n", True),  # without a break
    ):
        (tmp_path / "trace.csv").write_text(f"client,from,to\n{text}")
        how = TimeSettings(wait="all", trace=str(tmp_path / "trace.csv"), seconds=0.5)
        if there:
            assert VirtualClock(how, Uniform(), built.server, 0).now == 0.0
        else:
            with pytest.raises(ConfigError, match="nobody can ever answer before it leaves: client 3, which misses"):
                VirtualClock(how, Uniform(), built.server, 0)


@pytest.fixture(scope="module")
def built() -> BuiltRun:
    tables = {"model": {"name": "softmax"}, "partition": {"name": "iid", "clients": 12}}
    return build(Config.build(tables | {"engine": {"name": "sequential"}, "time": {"wait": "all"}}))


def timelines() -> Iterator[tuple[Participation, dict[str, Any]]]:
    rules = [Uniform(), Uniform(cohort=9, dropout=0.3), FullParticipation(), Bernoulli(), Cyclic(groups=3), Skewed()]
    there: list[dict[str, Any]] = [
        {"availability": "markov", "mean_on": 2.0, "mean_off": 3.0},
        {"availability": "day", "zones": 3, "seconds": 200.0},
    ]
    for rule in rules:
        for n, wait in enumerate(({"wait": "all"}, {"wait": "deadline", "deadline": 1e5}, {"wait": "first"})):
            spare = {"spare": 2} if wait["wait"] == "first" and isinstance(rule, (Uniform, Cyclic, Skewed)) else {}
            yield rule, {"speed": "lognormal", "seconds": 0.02} | wait | spare | there[n % 2]


@pytest.mark.parametrize(("rule", "how"), list(timelines()), ids=lambda value: str(value)[:40])
def test_clocks_never_run_back_and_no_client_is_counted_twice_or_lost(
    built: BuiltRun, rule: Participation, how: dict[str, Any]
) -> None:
    clock, again = (VirtualClock(TimeSettings(**how), rule, built.server, 5) for _ in range(2))
    at = 0.0
    for t in range(1, 13):
        turnout = clock.turnout(t)
        record, ids, absent = turnout.record, turnout.ids.tolist(), turnout.absent.tolist()
        assert at <= record["began"] <= record["clock"] == clock.now
        assert record["asked"] == len(ids) + len(absent) == len({*ids, *absent}) == len(record["answer_seconds"])
        assert [*turnout.reasons] == absent and len(turnout.share) == len(ids)
        assert all(clock.availability.until(i, record["began"]) > record["began"] for i in (*ids, *absent))
        asked_most = rule.size(12) + clock.settings.spare if isinstance(rule, (Uniform, Cyclic, Skewed)) else 12
        assert record["asked"] <= asked_most
        at = record["clock"]
    again.now = clock.turnout(13).record["began"]  # a clock that begins later goes on the same way
    clock.now = again.now
    assert clock.turnout(14).record == again.turnout(14).record


def test_the_preview_leaves_the_clock_where_it_is(built: BuiltRun) -> None:
    clock = VirtualClock(TimeSettings(wait="all", seconds=0.5), FullParticipation(), built.server, 0)
    sizes = built.fed.sizes
    assert (
        clock.preview()
        == f"about {sizes.max() / 2:.3g} seconds ({sizes.max() / 2:.3g} to {sizes.max() / 2:.3g} in 20 rounds)"
    )
    assert clock.now == 0.0


# who is asked ---------------------------------------------------------------------------------------------------------


THERE = [1, 4, 5, 8, 10]


def clock_of_trace(built: BuiltRun, folder: Path, rule: Participation) -> VirtualClock:
    """A clock on which the clients THERE, and nobody else, are always there."""
    (folder / "trace.csv").write_text("client,from,to\n" + "".join(f"{i},0,1\n" for i in THERE))
    return VirtualClock(TimeSettings(wait="all", trace=str(folder / "trace.csv")), rule, built.server, 0)


@pytest.mark.parametrize("sparse", [64, 1])  # found by looking at some; all who are there are known
def test_stand_ins_for_who_is_away_are_drawn_with_equal_chances(
    built: BuiltRun, tmp_path: Path, sparse: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock_module, "MANY", 0)
    monkeypatch.setattr(clock_module, "SPARSE", sparse)
    clock = clock_of_trace(built, tmp_path, Uniform(cohort=3))
    drawn = Counter(tuple(clock.ask(t, 0.0)[0].tolist()) for t in range(1, 1001))
    assert {*drawn} == {*combinations(THERE, 3)}
    assert all(abs(count - 100) < 5 * math.sqrt(100 * 0.9) for count in drawn.values())


def test_bernoulli_draws_again_until_somebody_comes_who_is_there(
    built: BuiltRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(participation_rules, "MANY", 0)  # as with many clients
    clock, rounds = clock_of_trace(built, tmp_path, Bernoulli(fraction=0.1)), 1000
    monkeypatch.setattr(clock.availability, "few", lambda t, most: None)
    drawn = Counter(tuple(clock.ask(t, 0.0)[0].tolist()) for t in range(1, rounds + 1))
    groups = [group for size in range(6) for group in combinations(THERE, size)]
    assert {*drawn} <= {*groups[1:]}
    for group in groups[1:16]:  # of one or two clients
        chance = 0.1 ** len(group) * 0.9 ** (5 - len(group)) / (1 - 0.9**5)
        assert abs(drawn[group] - rounds * chance) < 5 * math.sqrt(rounds * chance)
    alone, chance = sum(drawn[i,] for i in THERE), 5 * 0.1 * 0.9**4 / (1 - 0.9**5)
    assert abs(alone - rounds * chance) < 5 * math.sqrt(rounds * chance * (1 - chance))


AVAILABILITIES = [SearchedOnOff(OnOff.of_means(3, 2.0, 30.0)), DayNight(3, 9.0, 10.0, 8), "trace"]


@pytest.fixture(scope="module", params=AVAILABILITIES, ids=("markov", "day", "trace"))
def availability(request: pytest.FixtureRequest) -> Any:
    if request.param != "trace":
        return request.param
    rng = np.random.default_rng(5)
    cuts = {i: np.sort(rng.uniform(0, 100, 4)).tolist() for i in range(11)} | {3: [0.0, 5.0, 90.0, 100.0]}
    return TraceIntervals({i: {"from": own[::2], "to": own[1::2]} for i, own in cuts.items()}, 100.0)


def test_what_is_known_of_many_clients_is_what_each_of_them_says(availability: Any) -> None:
    rng, clients = np.random.default_rng(0), range(12)
    for _ in range(2):  # forwards, with the begin of a file in between, and then from the start
        for t in np.cumsum(rng.exponential(10.0 if isinstance(availability, TraceIntervals) else 4000.0, 60)).tolist():
            there = [i for i in clients if availability.until(i, t) > t]
            assert [i for i in clients if availability.is_there(i, t)] == there
            assert (few := availability.few(t, 2)) is None or few.tolist() == there
            if isinstance(availability, TraceIntervals):
                assert (few is None) == (len(there) > 2)
            pool = np.flatnonzero(rng.random(12) < 0.4)
            first = min((availability.since(i, t) for i in pool.tolist()), default=math.inf)
            assert availability.earliest(pool, t) == first


ASKED = [
    Bernoulli(fraction=0.3),
    Poisson(fraction=0.3),
    ByClass(),
    Skewed(cohort=1),
    FullParticipation(),
    RoundByRound(),
]


@pytest.mark.parametrize("rule", ASKED, ids=lambda rule: type(rule).__name__)
def test_rules_draw_among_those_who_are_there_as_if_they_had_looked_at_everybody(
    built: BuiltRun, availability: Any, rule: Participation
) -> None:
    clock = VirtualClock(TimeSettings(wait="first", spare=2), rule, built.server, 0)
    clock.availability = availability
    wider = Skewed(cohort=3) if isinstance(rule, Skewed) else rule
    for t in range(1, 41):
        moment = 1733.0 * t
        there = np.array([i for i in range(12) if availability.until(i, moment) > moment], dtype=np.int64)
        asked, wanted = clock.ask(t, moment)
        assert asked.tolist() == wider.sample(0, t, there, 12).tolist()
        assert wanted == (min(1, len(there)) if isinstance(rule, Skewed) else len(asked))


def test_a_skewed_rule_without_skew_asks_as_the_uniform_one(built: BuiltRun) -> None:
    how = TimeSettings(wait="all", availability="markov", mean_on=2.0, mean_off=3.0)
    clocks = [VirtualClock(how, rule, built.server, 0) for rule in (Uniform(cohort=3), Skewed(cohort=3, gamma=0.0))]
    for t in range(1, 11):
        asked, other = (clock.ask(t, 7.0 * t)[0].tolist() for clock in clocks)
        assert asked == other


@pytest.mark.parametrize("rule", [Uniform(cohort=40), Skewed(cohort=40), Bernoulli(fraction=5.5e-4)])
def test_a_million_clients_cost_nothing_until_they_are_asked_for(built: BuiltRun, rule: Participation) -> None:
    class Million(Federation):
        def __init__(self) -> None:
            self.clients, self.sizes, self.mean_size = 10**6, np.full(10**6, 20), 20.0
            self.eligible = np.arange(10**6)

    class Counted:
        looked = 0

        def __getattr__(self, name: str) -> Any:
            self.looked += name in ("is_there", "since")
            return getattr(there, name)

    how = TimeSettings(wait="first", spare=10, speed="pareto", availability="markov", mean_on=60.0, mean_off=600.0)
    clock = VirtualClock(how, rule, built.server, 0)
    clock.fed, there, clock.availability = Million(), clock.availability, Counted()  # type: ignore[assignment]
    records = [clock.turnout(t).record for t in range(1, 4)]
    assert all(r["asked"] == 50 if isinstance(rule, CohortParticipation) else 20 < r["asked"] < 90 for r in records)
    assert clock.availability.looked < 4000 and len(clock.devices) <= 300  # of about 11 clients one is there


# work and bytes -------------------------------------------------------------------------------------------------------


@given(
    local=st.builds(
        LocalSettings,
        epochs=st.integers(1, 3),
        steps=st.integers(0, 9),
        batch=st.integers(0, 40),
        drop_last=st.booleans(),
    ),
    least=st.integers(1, 2),
    share=st.none() | st.lists(st.floats(0.05, 1), min_size=4, max_size=4),
)
@settings(max_examples=25, deadline=None)
def test_the_work_that_is_planned_is_that_of_the_plan(
    small_federation: Federation, local: LocalSettings, least: int, share: list[float] | None
) -> None:
    fed, ids = small_federation, [0, 1, 2, 3]
    plan = fed.plan(ids, 1, local, ("gradient", "validation"), least, share or ())
    batches, samples = fed.planned_work(ids, local, least, share or ())
    assert batches.tolist() == [work.batches for work in plan.train]
    assert samples.tolist() == [work.samples for work in plan.train]
    for name, looks in plan.looks.items():
        assert fed.looked_at(name, ids).tolist() == [work.samples for work in looks]


@pytest.fixture(scope="module")
def small_federation() -> Federation:
    sizes = np.array([1, 2, 9, 33])  # a client with one sample holds out none
    owner = np.repeat(np.arange(4), sizes)
    samples = Samples(torch.zeros(45, 2), torch.from_numpy(owner % 2))
    return Federation(Dataset(samples, samples, 2, owner=owner), Natural(clients=4, validation=0.2), 0)


@pytest.mark.parametrize("name", [name for name in algorithms if not algorithms[name].pooled])
def test_bytes_are_known_before_the_round(name: str) -> None:
    engine = EngineSettings(name="sequential", device="cpu")
    for norm in ("batch", "none"):  # some methods refuse batch norm
        data, local = Synthetic(dim=4, labels=3, samples=20), LocalSettings(steps=1)
        config = Config(data=data, partition=Natural(clients=2), model=MLP(norm=norm, hidden=(3,)), local=local)
        try:
            parts = build(Config(**{**vars(config), "algorithm": algorithms[name](), "engine": engine}))
        except AskewError:
            continue
        down, up = answer_bytes(parts.server)
        record = parts.server.run_round(1, parts.fed.eligible.tolist(), absent={})
        assert (record["bytes_down"], record["bytes_up"]) == (2 * down, 2 * up) and record["participants"] == [0, 1]
        # Who leaves has received what the first phase begins with, also where nobody answers.
        alone, with_another, nobody = (
            parts.server.run_round(round, ids, absent=dict.fromkeys(absent, LEFT))["bytes_down"]
            for round, ids, absent in ((2, [0], []), (3, [0], [1]), (4, [], [0, 1]))
        )
        assert nobody == 2 * (with_another - alone)
        return
    raise AssertionError("no network was tried")


# distributions --------------------------------------------------------------------------------------------------------

N = 2000


def near(values: Any, chance: float) -> bool:
    """Are so many of N independent values true as their chance says, within five standard errors?"""
    return abs(np.mean(values) - chance) < 5 * math.sqrt(chance * (1 - chance) / N)


def test_speeds_have_their_distributions() -> None:
    def speeds(**how: Any) -> np.ndarray:
        given = TimeSettings(wait="all", seconds=2.0, **how)
        return np.array([device_of(given, 3, i, 1.5, N).seconds for i in range(N)])

    assert {*speeds()} == {2.0} and {*speeds(speed="size")} == {3.0}
    lognormal, pareto = speeds(speed="lognormal", sigma=0.7), speeds(speed="pareto", tail=1.5)
    for z, chance in ((-1, 0.158655), (0, 0.5), (2, 0.977250)):
        assert near(lognormal <= 2 * math.exp(0.7 * z), chance)
    assert pareto.min() >= 2.0
    for x in (3.0, 8.0, 40.0):
        assert near(pareto > x, (2 / x) ** 1.5)
    for z, chance in ((0.5, 0.382925), (1, 0.682689), (2, 0.954500)):
        assert near(speeds(speed="halfnormal") <= 2 * z, chance)
    drawn = list(islice(uniforms(0, "any"), 100))  # of several parts of eight
    assert len({*drawn}) == 100 and 0 < min(drawn) < 0.1 and 0.9 < max(drawn) < 1


def test_clients_come_and_go_as_a_markov_chain_in_seconds() -> None:
    on, off, rule = 30.0, 10.0, OnOff.of_means(1, 30.0, 10.0)
    t, later = 12345.6, 12345.6 + 7.0
    there = np.array([rule.is_there(i, t) for i in range(N)])
    assert near(there, on / (on + off))
    both = np.array([rule.is_there(i, t) and rule.is_there(i, later) for i in range(N)])
    share, kept = on / (on + off), math.exp(-7.0 * (1 / on + 1 / off))
    assert near(both, share * (share + (1 - share) * kept))
    stays = np.array([rule.until(i, t) - t for i in range(N) if there[i]])
    waits = np.array([rule.since(i, t) - t for i in range(N) if not there[i]])
    for values, mean in ((stays, on), (waits, off)):
        assert abs(values.mean() - mean) < 5 * mean / math.sqrt(len(values))
        assert abs(np.mean(values > mean) - math.exp(-1)) < 5 * 0.49 / math.sqrt(len(values))
    changes = [0.0]
    while changes[-1] < 2000.0:
        now = changes[-1]
        changes.append(rule.until(7, now) if rule.is_there(7, now) else rule.since(7, now))
    refreshes.cache_clear()
    for k in reversed(range(len(changes) - 1)):  # whatever was asked before, moments between two changes agree
        here = rule.is_there(7, changes[k])
        for s in np.linspace(changes[k], changes[k + 1], 9)[:-1].tolist():
            assert rule.is_there(7, s) == here and (rule.until if here else rule.since)(7, s) == changes[k + 1]


def test_days_open_and_close_in_time_zones() -> None:
    rule = DayNight(0, 22.0, 6.0, 1)
    assert rule.until(3, 0.0) == 6 * 3600 and rule.since(3, 0.0) == 0.0
    assert rule.until(3, 7 * 3600.0) == 7 * 3600.0 and rule.since(3, 7 * 3600.0) == 22 * 3600.0
    assert rule.until(3, 23 * 3600.0) == 30 * 3600.0
    spread = DayNight(0, 9.0, 12.0, 8)
    assert near([spread.until(i, 1000.0) > 1000.0 for i in range(N)], 1 / 8)
    for i in range(50):
        comes = spread.since(i, 98765.4321)
        assert spread.until(i, comes) > comes and comes - 98765.4321 <= 86400.0


def test_a_trace_begins_again_after_its_last_second(tmp_path: Path) -> None:
    text = "client, from, to\n2,5,10\n0,0,4\n0,8,10\n0,4,5\n1,0,10\n"  # 0…4 and 4…5 touch
    (tmp_path / "trace.csv").write_text(text)
    rule = availability_of(TimeSettings(wait="all", trace=str(tmp_path / "trace.csv")), 0, 4)
    assert isinstance(rule, TraceIntervals) and rule.period == 10.0
    assert [rule.until(0, t) for t in (0.0, 4.0, 5.0, 8.0, 19.0, 26.0)] == [5.0, 5.0, 5.0, 15.0, 25.0, 26.0]
    assert [rule.since(0, t) for t in (5.0, 6.0, 26.0)] == [8.0, 8.0, 28.0]
    assert rule.until(1, 123.0) == math.inf and rule.since(3, 0.0) == math.inf and rule.until(3, 0.0) == 0.0
    assert rule.since(2, 11.0) == 15.0


# what is shown --------------------------------------------------------------------------------------------------------


def test_tables_curves_and_the_picture_use_the_clock(tmp_path: Path) -> None:
    how = link(tmp_path) | BY_HAND["deadline"][0]
    run, plain = askew.run(five_clients("fedavg", time=how)), askew.run(five_clients("fedavg"))
    target = run.rounds[1]["accuracy"]
    reached = run.rounds_to(target)
    assert run.seconds_to(target) == run.rounds[reached - 1]["clock"] and run.seconds_to(2.0) is None
    assert plain.seconds_to(0.0) is None and run.summary()["clock"] == 75.0 and "clock" not in plain.summary()
    rows = table([run], target=target)
    assert (rows[0]["seconds_to_target"], rows[0]["clock"]) == (run.seconds_to(target), 75.0)
    (axes,) = run.plot(over="clock").axes
    assert [*axes.lines[0].get_xdata()] == [25.0, 50.0, 75.0] and axes.get_xlabel() == "Virtual clock, seconds"
    shown, without = (curves(SimpleNamespace(columns=Columns(r.rounds), config={})) for r in (run, plain))
    assert (shown["clock"], without["clock"]) == ([25.0, 50.0, 75.0], [])
    picture = timeline_picture([RunGroup("fedavg", (run,))])
    assert picture is not None and "9 answer in time, 4 late answer, 1 left before its answer" in picture.alt
    ends = [line.get_xdata()[0] for line in picture.figure.axes[0].lines if line.get_linestyle() == "--"]
    assert ends == [25.0, 50.0, 75.0] and timeline_picture([RunGroup("fedavg", (plain,))]) is None
    stale = askew.run(five_clients("fedavg", time=how | {"late": "next"}))  # client 4 answers in round 3
    picture, text = timeline_picture([RunGroup("fedavg", (stale,))]), clock_text(stale)
    assert picture is not None and "9 answer from the newest model, 1 from an older model" in picture.alt
    numbers = [(note.xy, note.get_text()) for note in picture.figure.axes[0].texts if note.get_color() == "white"]
    assert numbers == [((71.0, 4), "2")] and "staleness 0.2 on average, at most 2" in text


def test_nobody_is_away_where_a_file_begins_again_whose_length_is_not_exact() -> None:
    """0.7 is no binary number: three files end at 2.0999999999999996 or at 2.1, depending on how one adds."""
    own = {0: {"from": [0.0], "to": [0.7]}, 1: {"from": [0.1], "to": [0.7]}, 2: {"from": [0.0, 0.5], "to": [0.2, 0.7]}}
    rule = TraceIntervals(own, 0.7)
    moments = [m for k in range(1, 200) for m in (k * 0.7, math.nextafter(k * 0.7, 0), (k - 1) * 0.7 + 0.7)]
    for t in moments:
        assert rule.is_there(0, t) and rule.until(0, t) == math.inf
        there = rule.few(t, 3)
        assert there is not None and there.tolist() == [i for i in own if rule.is_there(i, t)]
        assert rule.earliest(np.arange(3), t) == t
        if rule.is_there(2, t):
            assert not rule.is_there(2, rule.until(2, t))


# clients that are rarely there -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("on", "off", "times"), [(2.0, 30.0, 400), (30.0, 10.0, 400), (1.0, 1000.0, 80)])
def test_what_is_remembered_of_a_client_is_what_would_be_found(on: float, off: float, times: int) -> None:
    """In any order of clients and moments, also at the very moments at which what is known begins and ends."""
    rule, rng = OnOff.of_means(5, on, off), np.random.default_rng(0)
    remembered = SearchedOnOff(rule)
    for _ in range(times):
        i, t = int(rng.integers(20)), float(rng.uniform(0, 40 * (on + off)))
        if remembered.away and rng.random() < 0.5:
            t = float(rng.choice(list(remembered.away.values())[int(rng.integers(len(remembered.away)))]))
        some = np.sort(rng.choice(20, int(rng.integers(1, 8)), replace=False))
        assert remembered.earliest(some, t) == min(rule.since(j, t) for j in some.tolist())
        assert remembered.is_there(i, t) == rule.is_there(i, t)
        assert (remembered.since(i, t), remembered.until(i, t)) == (rule.since(i, t), rule.until(i, t))


def test_a_clock_too_late_for_a_short_stay_is_refused(tmp_path: Path) -> None:
    """After 1e12 seconds two neighbouring numbers are 1e-4 seconds apart: a stay of that length is between them."""
    trace = TraceIntervals({0: {"from": [0.0], "to": [10.0]}, 1: {"from": [0.0001], "to": [0.0002]}}, 10.0)
    with pytest.raises(ConfigError, match="are the same number"):
        trace.since(1, 8e17)
    short = TraceIntervals({0: {"from": [0.0], "to": [1e-6]}}, 1e-6)
    assert short.is_there(0, 1e9) and short.few(1e9, 1) is not None
    for moment in (1e10, 1e300, math.inf):
        with pytest.raises(ConfigError, match="are the same number"):
            short.is_there(0, moment)


def test_a_client_comes_at_one_moment_whenever_that_is_asked() -> None:
    """Also if it is asked before the file begins again: 12.3 and 4.5 added in two ways are two numbers."""
    rule = TraceIntervals({0: {"from": [4.5], "to": [5.0]}}, 12.3)
    for k in range(1, 300):
        before, after = (k - 0.5) * 12.3, k * 12.3
        assert rule.since(0, before) == rule.since(0, after) == pytest.approx(after + 4.5, rel=1e-15)


def test_an_answer_that_was_lost_is_not_drawn_as_used(tmp_path: Path) -> None:
    """Of answers that may be used in later rounds, too: a bar is as many colours as the records say."""
    run = askew.run(
        "fedbuff",
        rounds=8,
        clients=12,
        cohort=4,
        model={"name": "softmax"},
        time={"wait": "buffer", "buffer": 2, "speed": "lognormal"},
        faults={"missing": 0.3},
        progress=False,
    )
    bars = overlapping_bars(run.rounds)
    used = [staleness for record in run.rounds for staleness in record["staleness"]]
    lost = sum(len(clients) for record in run.rounds for clients in record.get("incidents", {}).values())
    assert lost and any(used) and not all(used)
    outcomes = Counter(bar.outcome for bar in bars if bar.outcome != AT_WORK)
    assert outcomes == {NEWEST: used.count(0), OLDER: len(used) - used.count(0), NOT_USED: lost}


def test_a_client_that_left_dropped_out_or_whose_answer_was_lost_is_drawn_as_that() -> None:
    record = {"participants": [0, 2], "incidents": {NO_ANSWER: [1, 2], LEFT: [3]}, "began": 10.0, "clock": 14.0}
    bars = bars_of(record | {"answer_seconds": [4.0, 0.0, 2.0, 1.0]})
    assert [bar.outcome for bar in bars] == [IN_TIME, DROPPED_OUT, NOT_USED, LEFT]
    _, absent, _, left = bars  # marks are within the round, and within the bar of a client that left
    assert [absent.mark(inside) for inside in (0.5, 9.0)] == [10.5, 12.0]
    assert [left.mark(inside) for inside in (0.25, 9.0)] == [10.75, 10.5]


def test_the_picture_shows_deadlines_and_every_answer_on_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = link(tmp_path) | {"wait": "deadline", "deadline": 80.0}  # rounds end with client 4, after 71 seconds
    run = askew.run(five_clients("fedavg", participation={"name": "full", "dropout": 0.2}, time=how))
    monkeypatch.setattr(timeline_figure, "MOST_ROUNDS", 2)
    picture = timeline_picture([RunGroup("fedavg", (run,))])
    assert picture is not None and picture.note.startswith("The first 2 of 3 rounds of fedavg.")
    (axes,), (legend,) = picture.figure.axes, picture.figure.legends
    words = [text.get_text() for text in legend.get_texts()]
    assert words == [IN_TIME, LEFT, DROPPED_OUT, "end of a round", "deadline of a round"]
    assert [line.get_xdata()[0] for line in axes.lines if line.get_marker() == 7] == [80.0]  # the second is outside
    bars = [bar for group in axes.containers for bar in group.patches]
    assert len(bars) == sum(len(record["participants"]) + record["away"] for record in run.rounds[:2])
    assert {bar.get_edgecolor() for bar in bars} == {(1, 1, 1, 1)}
    ends = [line for line in axes.lines if line.get_linestyle() == "--"]
    assert max(line.zorder for line in ends) < min(bar.zorder for bar in bars)  # numbers on bars are not crossed


def test_the_picture_is_grey_where_nobody_is_at_work(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("client,from,to\n1,40,60\n3,55,100\n")
    for wait in ({"wait": "all"}, {"wait": "buffer", "buffer": 1}):
        how = {**wait, "trace": str(tmp_path / "trace.csv"), "seconds": 0.5}
        run = askew.run(five_clients("fedavg", participation={"name": "uniform", "cohort": 1}, time=how))
        picture = timeline_picture([RunGroup("fedavg", (run,))])
        assert picture is not None
        (axes,), (legend,) = picture.figure.axes, picture.figure.legends
        assert "nobody at work" in [text.get_text() for text in legend.get_texts()]
        bars = {id(bar) for group in axes.containers for bar in group.patches}
        (grey,) = [patch for patch in axes.patches if id(patch) not in bars]
        assert (grey.get_x(), grey.get_width()) == (0.0, 40.0)
