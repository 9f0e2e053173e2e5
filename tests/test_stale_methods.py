"""Methods and stale answers: what FedBuff and FedAsync make of them, and which methods are refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from askew.algorithms import FedAsync, FedAvg, FedBuff, algorithms
from askew.algorithms._staleness import hinge
from askew.core.algorithm import Algorithm
from askew.engine.overlapping_clock import OverlappingClock
from askew.errors import ConfigError
from askew.experiment.build import build
from askew.experiment.config import Config
from askew.participation import Uniform
from askew.timeline import TimeSettings
from problems import classification, make_server, scalars, skewed_samples
from test_asynchronous import BY_HAND, CURVES, LOCAL, moved, overlapping_server, run_clock
from test_timeline import link

PAGE = Path(__file__).parent.parent / "docs" / "asynchrony.md"
BUFFER = {"wait": "buffer", "buffer": 2}


@pytest.mark.parametrize(
    "alg",
    [FedBuff(), FedBuff(staleness="constant"), FedAsync(rho=0.0)],
    ids=["fedbuff", "fedbuff-constant", "fedasync"],
)
def test_models_of_asynchronous_steps_are_as_computed_by_hand(alg: Algorithm, tmp_path: Path) -> None:
    """Six steps of two answers each, of five clients; one answer starts five steps before the one that uses it."""
    how, rule, steps = BY_HAND["buffer"]
    server = overlapping_server(alg, scalars(*CURVES, copies=[16] * 5))
    run_clock(server, OverlappingClock(TimeSettings(**link(tmp_path, 8), **how), rule, server, 0), len(steps))
    models = [0.0]  # before each step
    for _, _, used, stale, _, _ in steps:
        w, change = models[-1], 0.0
        for client, s in zip(used, stale, strict=True):
            start = models[-1 - s]
            if isinstance(alg, FedAsync):
                change += 0.6 / (1 + s) ** 0.5 * (start + moved(start, client) - w)
            else:
                change += moved(start, client) / ((1 + s) ** 0.5 if alg.table()["staleness"] == "polynomial" else 1)
        models.append(w + change / 2)
    assert abs(float(server.w) - models[-1]) < 1e-14 and max(s for step in steps for s in step[3]) == 5


def test_fedbuff_with_a_full_buffer_of_equal_clients_is_fedavg_bit_for_bit() -> None:
    problem, rule = classification(skewed_samples([4, 7, 5, 9, 6])), Uniform(cohort=3)
    server, fedavg = (overlapping_server(FedBuff(), problem), make_server(FedAvg(weighting="uniform"), problem, LOCAL))
    how = TimeSettings(wait="buffer", buffer=3, seconds=0.0, latency=1.0)
    records = run_clock(server, OverlappingClock(how, rule, server, 0), 5)
    for t, record in enumerate(records, 1):
        ids = rule.sample(0, t, problem.fed.eligible, problem.fed.clients).tolist()
        fedavg.run_round(t, ids)
        assert record["participants"] == ids and record["staleness"] == [0, 0, 0]
    assert torch.equal(server.w, fedavg.w)


def test_the_page_says_which_methods_are_refused_as_they_are() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (yes|yes, to another point|no) \|", PAGE.read_text("utf-8"), re.M))
    assert {*algorithms} - {*rows} == {"solo", "centralised", "fedalign", "fedpdc", "moon"}
    assert {name for name, sound in rows.items() if sound == "no"} == {n for n in algorithms if algorithms[n].stale}
    counts_less = {name for name in algorithms if hasattr(algorithms[name], "staleness")}
    assert {name for name, sound in rows.items() if sound == "yes, to another point"} == counts_less


@pytest.mark.parametrize("name", [name for name in algorithms if algorithms[name].stale])
def test_methods_that_stale_answers_make_wrong_are_refused_with_their_reason(name: str) -> None:
    reason = re.escape(algorithms[name].stale)
    with pytest.raises(ConfigError, match=rf"may start from an older model, .*: {reason}; set time.wait"):
        Config.build({"algorithm": {"name": name}, "time": BUFFER})
    assert Config.build({"algorithm": {"name": name}, "time": {"wait": "all"}}).algorithm.stale


def test_settings_decide_where_the_reason_is_theirs() -> None:
    """FedDC without drift is sound; FedDyn's log of all models is not."""
    assert Config.build({"algorithm": {"name": "feddc", "drift": False}, "time": BUFFER}).time.overlapping
    for name in ("feddyn", "fedspeed"):
        with pytest.raises(ConfigError, match="log_all adds an update to the newest model"):
            Config.build({"algorithm": {"name": name, "log_all": True}, "time": BUFFER})


def test_a_method_for_stale_answers_says_where_there_are_none() -> None:
    tiny = {"rounds": 1, "model": {"name": "softmax"}, "participation": {"cohort": 2}}
    for name, time, said in (
        ("fedbuff", {}, True),
        ("fedasync", {}, True),
        ("fedavg", {}, False),
        ("fedbuff", BUFFER, False),
    ):
        built = build(Config.build(tiny | {"algorithm": {"name": name}, "time": time}))
        assert ("staleness has no effect" in built.facts["remark"]) == said, (name, time)


def test_the_hinge_stays_a_number() -> None:
    """In single precision ∞ · 0 is none: slope and free end before a fresh answer could come to that."""
    with pytest.raises(ConfigError, match="slope"):
        FedAsync(staleness="hinge", slope=1e39)
    factors = hinge(torch.tensor([0.0, 1e6]), 1e6, 0.0)
    assert factors.isfinite().all() and factors[0] == 1
