"""Robust rules: against hand computations, closed forms and brute force, and in front of every method."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.stats import trim_mean
from torch import Tensor

import askew
from askew.algorithms import algorithms
from askew.core.algorithm import Algorithm
from askew.data.federation import LocalSettings, RoundPlan
from askew.engine.answers import NOT_FINITE
from askew.engine.base import PhaseInputs, PhaseOutputs, PhaseRequest
from askew.engine.robust import NOT_CHOSEN, RULES, TOO_FEW, Robust, RobustStage
from askew.engine.robust_rules import (
    Uploads,
    cap_weights,
    geometric_median,
    krum_scores,
    multi_krum,
    trimmed_mean,
    weighted_median,
)
from askew.engine.server import Server
from askew.errors import ConfigError
from askew.experiment.build import build
from askew.experiment.config import Config, stored_tables
from askew.experiment.store import Run
from askew.report.tables import labels
from problems import FaultyReports, classification, close, make_server, skewed_samples

CENTRES = ("median", "trimmed", "geometric")
FEDAVG = algorithms["fedavg"]()
SMALL: dict[str, Any] = {
    "rounds": 2,
    "data": {"name": "synthetic", "dim": 8, "labels": 3, "samples": 20},
    "partition": {"clients": 6},
    "participation": {"cohort": 6},
    "model": {"name": "mlp", "hidden": [4]},
    "engine": {"name": "sequential", "device": "cpu"},
}


def vectors(*rows: Sequence[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def shares(*weights: float) -> Tensor:
    p = torch.tensor(weights, dtype=torch.float64)
    return p / p.sum()


def equal(count: int) -> Tensor:
    return shares(*[1.0] * count)


def random_rows(count: int, width: int, seed: int = 0) -> Tensor:
    return torch.randn(count, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def request_of(sizes: Sequence[float], round: int = 1, buffers: int = 0) -> PhaseRequest:
    """A phase that asks one client for each size; the received buffers are zero."""
    size = torch.tensor(sizes, dtype=torch.float64)
    w, rates = torch.zeros(1, dtype=torch.float64), (0.1, 0.1, 0.0, 0.0, math.inf)
    inputs = PhaseInputs(w, w.new_zeros(buffers), {}, {}, {}, {}, {}, *rates, round, size, size, size, size)
    plan = RoundPlan(list(range(len(sizes))), None, [], {})  # type: ignore[arg-type]
    return PhaseRequest(FEDAVG, inputs, plan, ())


def outputs_of(up: dict[str, Tensor] | Tensor, buffers: Tensor | None = None) -> PhaseOutputs:
    up = up if isinstance(up, dict) else {"delta": up}
    count = len(next(iter(up.values())))
    zeros = torch.zeros(count, dtype=torch.float64)
    return PhaseOutputs(up, {}, {}, zeros.new_zeros(count, 0) if buffers is None else buffers, zeros, None)


def after(rows: Tensor, sizes: Sequence[float] | None = None, alg: Algorithm = FEDAVG, **settings: Any) -> PhaseOutputs:
    """What is left of rows after a rule."""
    stage = RobustStage(Robust(**settings), alg, seed=0)
    return stage(request_of(sizes or [1.0] * len(rows)), outputs_of(rows))


def step(rows: Tensor, sizes: Sequence[float], **settings: Any) -> Tensor:
    """The weighted mean of what is left: FedAvg's step."""
    out = after(rows, sizes, **settings)
    p = shares(*[sizes[i] for i in out.cohort_rows()])
    return p @ out.up["delta"]


# the rules by themselves ----------------------------------------------------------------------------------------------


def test_the_median_is_that_of_values_repeated_as_often_as_they_weigh() -> None:
    rng = np.random.default_rng(0)
    for count in range(1, 9):
        times = rng.integers(1, 6, count)
        rows = rng.normal(size=(count, 5))
        found = weighted_median(torch.from_numpy(rows), shares(*times))
        assert close(found, torch.from_numpy(np.median(np.repeat(rows, times, 0), axis=0)))


def test_the_median_by_hand() -> None:
    rows = vectors([1], [2], [10])
    assert weighted_median(rows, shares(1, 1, 1)).item() == 2
    assert weighted_median(rows, shares(1, 1, 3)).item() == 10
    assert weighted_median(rows, shares(1, 1, 2)).item() == 6  # half of the weight is below 2, half above it
    assert weighted_median(vectors([1], [2], [3], [5]), equal(4)).item() == 2.5


def test_the_trimmed_mean_is_that_of_values_repeated_as_often_as_they_weigh() -> None:
    rng = np.random.default_rng(1)
    for share in (0.1, 0.25, 0.4):
        times = np.array([3, 7, 2, 5, 3])  # 20 in all, so that every share cuts whole values
        rows = rng.normal(size=(5, 4))
        found = trimmed_mean(torch.from_numpy(rows), shares(*times), share)
        assert close(found, torch.from_numpy(trim_mean(np.repeat(rows, times, 0), share, axis=0)))


def test_the_trimmed_mean_by_hand() -> None:
    rows = vectors([0], [1], [2], [3], [1e30])
    assert close(trimmed_mean(rows, equal(5), 0.2), 2.0)
    assert close(trimmed_mean(rows[:4], equal(4), 0.0), 1.5)
    # 0.3 of five values is one and a half: half of 1 and of 3 stay, and 2
    assert close(trimmed_mean(rows, equal(5), 0.3), (0.5 * 1 + 2 + 0.5 * 3) / 2)


def test_nothing_is_left_of_what_is_trimmed_whatever_its_size() -> None:
    for count in range(3, 30):
        for bad in range(1, (count + 1) // 2):
            rows = torch.ones(count, 1, dtype=torch.float64)
            rows[:bad] = 1e300
            assert close(trimmed_mean(rows, equal(count), bad / count), 1.0), (count, bad)


def test_the_geometric_median_of_known_points() -> None:
    triangle = vectors([0, 0], [1, 0], [0.5, math.sqrt(3) / 2])
    (found,) = geometric_median(Uploads([triangle]), equal(3), 200, 1e-10)
    assert close(found, triangle.mean(0), 1e-8)
    line = vectors([0, 0], [1, 1], [2, 2], [7, 7], [100, 100])
    (found,) = geometric_median(Uploads([line]), equal(5), 1000, 0.0)
    assert close(found, line[2], 1e-4)  # ν smooths the corner
    (found,) = geometric_median(Uploads([triangle]), shares(1, 1, 2.5), 1000, 0.0)
    assert close(found, triangle[2], 1e-4)  # more than half of the weight is there


def test_the_geometric_median_minimises_the_weighted_distances() -> None:
    rows, p = random_rows(6, 3), shares(1, 2, 3, 4, 5, 6)
    parts = Uploads([rows[:, :1], rows[:, 1:]])  # two entries are one vector
    found = torch.cat(geometric_median(parts, p, 1000, 1e-12))
    total = lambda v: float(p @ (rows - torch.from_numpy(v)).norm(dim=1))
    best = minimize(total, rows.mean(0).numpy(), method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-14})
    assert close(found, torch.from_numpy(best.x), 1e-6)


def test_too_few_participants_for_krum_in_the_singular() -> None:
    with pytest.raises(ConfigError, match=r"krum with 1 bad client needs .* a round has 1 participant;"):
        Robust(rule="krum").check_cohort(1)


def test_krum_scores_by_hand() -> None:
    rows = Uploads([vectors([0], [1], [2], [4], [100])])
    # one bad of five: the two nearest neighbours of each
    assert krum_scores(rows, 1).tolist() == [1 + 4, 1 + 1, 1 + 4, 4 + 9, 96**2 + 98**2]
    assert multi_krum(rows, 1, 4) == [0, 1, 2, 3]
    assert multi_krum(rows, 1, 1) == [1]


def test_krum_sees_all_entries_as_one_vector() -> None:
    near, far = vectors([0], [0.1], [0.2], [0.3], [0.4]), vectors([0], [0], [0], [0], [9])
    assert multi_krum(Uploads([near]), 1, 4) == [0, 1, 2, 3]
    assert multi_krum(Uploads([near.flip(0), far]), 1, 4) == [0, 1, 2, 3]
    assert krum_scores(Uploads([near, far]), 1)[4].item() == pytest.approx(2 * 81 + 0.1**2 + 0.2**2)


def test_weights_above_the_cap_are_shared_by_the_others() -> None:
    assert close(cap_weights(shares(8, 1, 1), 0.5), [0.5, 0.25, 0.25])
    assert close(cap_weights(shares(90, 9, 1), 0.4), [0.4, 0.4, 0.2])
    assert close(cap_weights(shares(90, 9, 1), 0.2), [1 / 3] * 3)
    assert close(cap_weights(shares(3, 2, 1), 1.0), [1 / 2, 1 / 3, 1 / 6])


# the stage ------------------------------------------------------------------------------------------------------------


def test_clip_shortens_to_the_length_and_keeps_directions() -> None:
    rows = vectors([3, 4], [0.3, 0.4], [0, 0])
    assert close(after(rows, rule="clip", length=1.0).up["delta"], vectors([0.6, 0.8], [0.3, 0.4], [0, 0]))


def test_clip_by_the_smaller_of_the_medians_by_number_and_by_weight() -> None:
    rows = vectors([1, 0], [0, 2], [0, 50])
    assert close(after(rows, rule="clip").up["delta"], vectors([1, 0], [0, 2], [0, 2]))
    assert close(after(rows, [6, 2, 2], rule="clip", multiple=3.0).up["delta"], vectors([1, 0], [0, 2], [0, 3]))
    assert close(after(rows, [1, 1, 8], rule="clip").up["delta"], vectors([1, 0], [0, 2], [0, 2]))


def test_several_entries_are_one_vector_for_clip() -> None:
    up = {"delta": vectors([3.0], [0.1]), "dc": vectors([4.0], [0.1])}
    out = RobustStage(Robust(rule="clip", length=1.0), FEDAVG, 0)(request_of([1, 1]), outputs_of(up))
    assert close(out.up["delta"], vectors([0.6], [0.1])) and close(out.up["dc"], vectors([0.8], [0.1]))


def test_buffers_belong_to_the_vector() -> None:
    sent = outputs_of(vectors([0.0], [0.0], [0.0]), buffers=vectors([1.0], [2.0], [1e9]))
    out = RobustStage(Robust(rule="median"), FEDAVG, 0)(request_of([1, 1, 1], buffers=1), sent)
    assert close(out.buffers, 2.0)


@pytest.mark.parametrize(
    "settings", [{"rule": rule} for rule in RULES] + [{"bucket": 2}, {"rule": "trimmed", "bucket": 2}]
)
def test_equal_rows_stay_as_they_are(settings: dict[str, Any]) -> None:
    rows = random_rows(1, 7).repeat(9, 1)
    out = after(rows, [float(n) for n in range(1, 10)], **settings)
    assert close(out.up["delta"], rows[: len(out.loss)], 1e-14)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_the_order_of_clients_does_not_matter(rule: str, weighting: str) -> None:
    rows, sizes, order = random_rows(8, 5), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], [3, 0, 7, 5, 1, 6, 2, 4]
    alg = algorithms["fedavg"](weighting=weighting)
    one = after(rows, sizes, alg, rule=rule, bad=0.1)
    other = after(rows[order], [sizes[i] for i in order], alg, rule=rule, bad=0.1)
    by_client = dict(zip([order[i] for i in other.cohort_rows()], other.up["delta"], strict=True))
    assert sorted(by_client) == one.cohort_rows()
    assert all(close(by_client[i], row, 1e-9) for i, row in zip(one.cohort_rows(), one.up["delta"], strict=True))


def test_equal_weights_are_used_where_the_method_has_them() -> None:
    rows, sizes = vectors([1], [2], [10]), [1.0, 1.0, 3.0]
    assert close(after(rows, sizes, rule="median").up["delta"], 10.0)
    assert close(after(rows, sizes, algorithms["fedavg"](weighting="uniform"), rule="median").up["delta"], 2.0)


def test_buckets_of_one_change_nothing_and_larger_ones_keep_the_weighted_mean() -> None:
    rows, sizes = random_rows(10, 4), [float(n) for n in range(1, 11)]
    assert torch.equal(
        after(rows, sizes, bucket=1, rule="krum").up["delta"], rows[after(rows, rule="krum").cohort_rows()]
    )
    for size in (2, 3, 10):
        out = after(rows, sizes, bucket=size)
        assert close(step(rows, sizes, bucket=size), shares(*sizes) @ rows)
        assert len(out.up["delta"].unique(dim=0)) == math.ceil(10 / size)


def test_buckets_are_drawn_anew_every_round() -> None:
    stage, rows = RobustStage(Robust(bucket=2), FEDAVG, seed=0), random_rows(10, 2)
    first, again, second = (stage(request_of([1] * 10, t), outputs_of(rows)).up["delta"] for t in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, second)


@pytest.mark.parametrize("rule", CENTRES)
def test_less_than_half_of_the_weight_cannot_move_the_centre_far(rule: str) -> None:
    """The honest vectors are within 1 of a point; the mean goes wherever the bad ones want."""
    honest = 5 + random_rows(6, 3) / 10
    radius = float((honest - 5).norm(dim=1).max())
    for far in (1e2, 1e12, 1e30):
        rows = torch.cat([honest, torch.full((4, 3), far, dtype=torch.float64)])
        centre = after(rows, [1.0] * 10, rule=rule, bad=0.4).up["delta"][0]
        # each coordinate's median is within the honest values; for the geometric median C/(C − 2f) times two radii
        assert float((centre - 5).norm()) <= 2 * (10 / (10 - 2 * 4)) * radius
        assert float((rows.mean(0) - 5).norm()) > 0.3 * far


@pytest.mark.parametrize("rule", CENTRES)
def test_bad_clients_by_number_are_harmless_if_their_weight_is_small(rule: str) -> None:
    rows = torch.cat([torch.ones(3, 2), torch.full((7, 2), 1e9)]).double()
    assert close(after(rows, [30.0] * 3 + [1.0] * 7, rule=rule).up["delta"], 1.0, 1e-4)


@pytest.mark.parametrize("rule", CENTRES)
def test_a_client_with_most_of_the_data_needs_the_cap(rule: str) -> None:
    rows = torch.cat([torch.ones(9, 2), torch.full((1, 2), 1e9)]).double()
    sizes = [1.0] * 9 + [20.0]
    assert float(after(rows, sizes, rule=rule).up["delta"].abs().max()) > 1e8
    assert close(after(rows, sizes, rule=rule, cap=0.15).up["delta"], 1.0, 1e-4)


SMALL_SITE = 0.006  # the share of the data of a site that sends a wrong update


def small_site() -> tuple[Tensor, list[float], Tensor]:
    """Nine honest updates of length about 1, and one of a site with 0.6% of the data, so long that the weighted mean is
    5.5 times the honest one's length away from it.
    """
    direction = torch.nn.functional.normalize(random_rows(1, 50, 3)[0], dim=0)
    honest = direction + random_rows(9, 50, 4) / 50
    sizes = [(1 - SMALL_SITE) * n / 45 for n in range(1, 10)]
    mean = shares(*sizes) @ honest
    bad = -5.5 / SMALL_SITE * direction * float(mean.norm())
    return torch.cat([honest, bad[None]]), [*sizes, SMALL_SITE], mean


def test_a_site_with_little_data_moves_the_weighted_mean_and_no_robust_rule() -> None:
    rows, sizes, mean = small_site()
    off = {
        name: float((step(rows, sizes, **settings) - mean).norm() / mean.norm())
        for name, settings in {
            "none": {},
            "bucket": {"bucket": 2},
            **{rule: {"rule": rule} for rule in RULES},
        }.items()
    }
    assert off["none"] == pytest.approx(5.5, rel=0.01)
    assert off["bucket"] == pytest.approx(5.5, rel=0.01)  # by itself it only mixes
    assert all(off[rule] < 0.1 for rule in RULES), off


def test_a_site_with_most_of_the_data_is_held_by_krum_and_by_the_cap() -> None:
    """The table of docs/robustness.md."""
    rows, small, _ = small_site()
    sizes = [0.4 * n / 45 for n in range(1, 10)] + [0.6]
    mean = shares(*small[:9]) @ rows[:9]
    off = lambda **settings: float((step(rows, sizes, **settings) - mean).norm() / mean.norm())
    assert off() == pytest.approx(551, rel=0.01) and off(bucket=2) == pytest.approx(551, rel=0.01)
    assert off(rule="clip") == pytest.approx(1.2, rel=0.01)
    assert off(rule="median") == pytest.approx(918, rel=0.01) == off(rule="geometric")
    assert off(rule="trimmed") == pytest.approx(612, rel=0.01)
    assert off(rule="krum") < 0.02
    assert all(off(rule=rule, cap=0.15) < 0.05 for rule in CENTRES)


def test_clip_bounds_what_a_share_of_the_weight_can_do() -> None:
    """The step differs from that without the bad client by at most its share times twice the limit."""
    rows, sizes, mean = small_site()
    limit = float(rows[:9].norm(dim=1).max())
    assert float((step(rows, sizes, rule="clip", length=limit) - mean).norm()) <= 2 * SMALL_SITE * limit


# in a run -------------------------------------------------------------------------------------------------------------


def with_rule(alg: Algorithm, robust: Robust, clients: int = 7) -> Server:
    problem = classification(skewed_samples([4 + n for n in range(clients)]))
    server = make_server(alg, problem, LocalSettings(lr=0.1, batch=4))
    server.stages = [RobustStage(robust, alg, seed=0)]
    return server


def test_without_a_rule_a_run_is_the_same_bit_for_bit() -> None:
    plain, off = Config.build(SMALL), Config.build({**SMALL, "robust": {"bad": 0.2}, "attack": {"fraction": 0.2}})
    assert plain.name() == off.name() and "robust" not in plain.toml() and not build(off).server.stages
    other = Config.build({**SMALL, "robust": {"rule": "median"}})
    assert other.digest() != plain.digest() and Config.build(other.tables()) == other


def test_clients_that_krum_leaves_out_are_in_the_record() -> None:
    server = with_rule(FEDAVG, Robust(rule="krum", bad=0.2))
    server.engine = FaultyReports(server.engine, [2], value=1e4)
    record = server.run_round(1, range(7))
    assert 2 in record["incidents"][NOT_CHOSEN] and len(record["incidents"][NOT_CHOSEN]) == 2
    assert record["dropped"] == 2 and record["lost_share"] > 0


def test_a_round_with_too_few_for_krum_changes_nothing() -> None:
    server = with_rule(FEDAVG, Robust(rule="krum", bad=0.3))
    before = server.w.clone()
    record = server.run_round(1, [0, 1, 2])
    assert record["incidents"] == {TOO_FEW: [0, 1, 2]} and torch.equal(server.w, before)


@pytest.mark.parametrize("rule", RULES)
def test_rows_that_are_not_finite_are_left_out_first(rule: str) -> None:
    server, clean = (with_rule(FEDAVG, Robust(rule=rule, bad=0.1)) for _ in range(2))
    server.engine = FaultyReports(server.engine, [3], value=math.nan)
    record, others = server.run_round(1, range(7)), [0, 1, 2, 4, 5, 6]
    assert record["incidents"][NOT_FINITE] == [3]
    clean.run_round(1, others)
    assert torch.equal(server.w, clean.w)


@pytest.mark.parametrize("settings", [{"rule": rule} for rule in RULES] + [{"bucket": 2}], ids=str)
def test_a_round_in_which_no_row_is_finite_changes_nothing(settings: dict[str, Any]) -> None:
    server = with_rule(FEDAVG, Robust(**settings))
    before = server.w.clone()
    server.engine = FaultyReports(server.engine, [0, 1, 2], value=math.nan)
    assert server.run_round(1, range(3))["incidents"] == {NOT_FINITE: [0, 1, 2]}
    assert torch.equal(server.w, before)


def test_stored_updates_of_clients_that_krum_leaves_out_stay() -> None:
    server = with_rule(algorithms["fedvarp"](), Robust(rule="krum", bad=0.2))
    server.engine = FaultyReports(server.engine, [2], value=1e4)
    record = server.run_round(1, range(7))
    gone = record["incidents"][NOT_CHOSEN]
    stored = server.memory.read(range(7))["y"].abs().sum(1)
    assert [i for i in range(7) if stored[i] == 0] == gone


@pytest.mark.parametrize("rule", CENTRES)
def test_fedavg_steps_to_the_centre(rule: str) -> None:
    server = with_rule(FEDAVG, Robust(rule=rule))
    sent = make_server(
        FEDAVG, classification(skewed_samples([4 + n for n in range(7)])), LocalSettings(lr=0.1, batch=4)
    )
    request = next(sent.round_requests(1, range(7)))
    (outputs,) = sent.engine.run([request])
    start, p = sent.w.clone(), shares(*[4.0 + n for n in range(7)])
    rows = outputs.up["delta"]
    expected = {
        "median": lambda: weighted_median(rows, p),
        "trimmed": lambda: trimmed_mean(rows, p, 0.2),
        "geometric": lambda: geometric_median(Uploads([rows]), p, 100, 1e-6)[0],
    }[rule]()
    server.run_round(1, range(7))
    assert close(server.w, start + expected)


REFUSED = {
    "clip": "solo centralised fednova lossbias fedamd mgda fedmgdaplus fedasync",
    "krum": "solo centralised fednova lossbias fedamd",
    **dict.fromkeys(
        CENTRES, "solo centralised fednova lossbias fedamd mgda fedmgdaplus fedexp fedpdc fedvarp mifa fedau fedawe"
    ),
    "none": "solo centralised fednova lossbias fedamd fedpdc fedvarp mifa fedau fedawe",  # with buckets
}


@pytest.mark.parametrize("name", [*algorithms])
def test_every_method_takes_a_rule_or_says_why_not(name: str) -> None:
    alg = algorithms[name]()
    for rule, refused in REFUSED.items():
        robust = Robust(rule=rule, bad=0.1, bucket=2 if rule == "none" else 0)
        if name in refused.split():
            with pytest.raises(ConfigError, match=r"; .*(use|omit|leave)"):
                robust.check_method(alg)
            continue
        robust.check_method(alg)
        if name == "fedalign" or rule in ("median", "trimmed"):  # needs a network of blocks; as geometric
            continue
        server = with_rule(alg, robust)
        record = server.run_round(1, range(7))
        assert bool(torch.isfinite(server.w).all()) and not torch.equal(server.w, server.space.start)
        assert record["round"] == 1


def test_a_network_with_batch_norm_and_private_statistics() -> None:
    """FedBN's statistics stay each client's own; FedAvg's become the centre of all."""
    for name in ("fedavg", "fedbn"):
        alg = algorithms[name]()
        problem = classification(skewed_samples([6] * 5), "batch")
        server = make_server(alg, problem, LocalSettings(lr=0.1, batch=3))
        server.stages = [RobustStage(Robust(rule="median"), alg, seed=0)]
        server.run_round(1, range(5))
        assert bool(torch.isfinite(server.buffers).all())
        if name == "fedbn":
            own = server.privates.read(range(5))["b"]
            assert len(own.unique(dim=0)) == 5
        else:
            assert not torch.equal(server.buffers, server.space.buffers)


# what is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tables", "sentence"),
    [
        ({"robust": {"rule": "krum", "bad": 0.4}}, r"krum with 3 bad clients needs at least 9 uploads.*6 participants"),
        ({"robust": {"rule": "krum", "bucket": 3, "bad": 0.1}}, r"6 participants in 2 groups"),
        ({"robust": {"rule": "trimmed", "bucket": 3}}, "lower bucket or bad"),
        ({"robust": {"rule": "clip", "cap": 0.5}}, 'weighting = "uniform"'),
        ({"robust": {"rule": "kurm"}}, "did you mean 'krum'"),
        ({"robust": {"bad": 0.5}}, "bad must be"),
        ({"robust": {"rule": "median"}, "algorithm": {"name": "fedmgdaplus"}}, "compares the clients' updates"),
        ({"robust": {"rule": "median"}, "algorithm": {"name": "fednova"}}, "numbers that clients report"),
        ({"robust": {"rule": "median"}, "algorithm": {"name": "fedvarp"}}, "stores something of every client"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_sentence(tables: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as error:
        build(Config.build({**SMALL, **tables}))
    assert "\n" not in str(error.value) and str(error.value).endswith((".", "?"))


def test_python_takes_the_tables_as_keywords() -> None:
    run = askew.run(SMALL, robust={"rule": "krum", "bad": 0.1}, attack={"name": "sign_flip", "clients": [1]})
    assert run.config["robust"]["rule"] == "krum" and run.facts["attack"] == {"name": "sign_flip", "clients": [1]}


def test_labels_show_what_differs_from_the_defaults_of_a_table_that_most_runs_do_not_have() -> None:
    tables = ({}, {"robust": {"rule": "clip"}}, {"attack": {"name": "scale", "strength": 3.0}})
    runs = [Run(stored_tables(Config.build({**SMALL, **extra}))) for extra in tables]
    assert labels(runs) == ["fedavg", "fedavg robust.rule=clip", "fedavg scale attack.strength=3"]
