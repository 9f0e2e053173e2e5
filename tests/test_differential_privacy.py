"""Differential privacy: ε against closed forms and dp-accounting, noise against its distribution, an attack on sums."""

from __future__ import annotations

import io
import math
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

import askew
from askew.cli.progress import ProgressDisplay
from askew.core.types import State
from askew.engine import accounting
from askew.engine.accounting import epsilon, gaussian_epsilon
from askew.engine.base import PhaseOutputs
from askew.engine.noise import BITS, RandomWords, SystemNoise, bernoulli_exp, discrete_gaussian, discrete_laplace
from askew.engine.privacy import Privacy
from askew.engine.privacy_stage import PrivacyStage
from askew.errors import ConfigError
from askew.experiment.config import Config
from askew.participation import Bernoulli, FullParticipation, Participation, Poisson, Uniform
from askew.report import terminal
from askew.report.tables import table

DELTA = 1e-5


def fixed_words(seed: int) -> RandomWords:
    """A generator that repeats, in place of the operating system's."""
    rng = np.random.Generator(np.random.Philox(seed))
    return lambda count: rng.integers(0, 2**64, count, dtype=np.uint64)


# ε --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("replaced", "expected"), [(False, 91.817), (True, 284.392)], ids=["add or remove", "replace"])
def test_epsilon_of_known_participants(replaced: bool, expected: float) -> None:
    """Noise 1 in 100 rounds, δ = 1e-5: numbers of dp-accounting 0.6."""
    assert epsilon(1.0, 100, DELTA, replaced=replaced) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("mu", [0.01, 0.3, 1.0, 5.0, 40.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-10])
def test_epsilon_solves_the_formula(mu: float, delta: float) -> None:
    """δ(ε) = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ), by another function for Φ; at ε = 0 it is 2 Φ(μ/2) − 1."""
    eps = gaussian_epsilon(mu, delta)
    if 2 * stats.norm.cdf(mu / 2) - 1 <= delta:
        assert eps == 0
        return
    log_second = eps + stats.norm.logcdf(-mu / 2 - eps / mu)
    assert stats.norm.cdf(mu / 2 - eps / mu) - math.exp(log_second) == pytest.approx(delta, rel=1e-4)


def test_epsilon_at_the_limits() -> None:
    assert epsilon(0.0, 1, DELTA) == math.inf and epsilon(1.0, 0, DELTA) == 0
    assert epsilon(1.0, 4, DELTA) == pytest.approx(epsilon(0.5, 1, DELTA))  # four rounds are one of half the noise
    assert epsilon(2.0, 1, DELTA, replaced=True) == pytest.approx(epsilon(1.0, 1, DELTA))


GRID = [
    (noise, rounds, rate, delta, replaced)
    for noise in (0.7, 1.0, 3.0)
    for rounds in (1, 100, 1000)
    for rate in (1.0, 0.3, 0.1, 0.01)
    for delta in (1e-5, 1e-8)
    for replaced in (False, True)
]
QUICK = [(1.0, 100, 1.0, 1e-5, False), (1.0, 100, 0.1, 1e-5, False), (1.0, 100, 0.1, 1e-5, True)]


SLOW = [case for case in GRID[1::18] if case not in QUICK]


@pytest.mark.parametrize("case", [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)])
def test_epsilon_agrees_with_dp_accounting(case: tuple[float, int, float, float, bool]) -> None:
    """To a hundredth; the package's steps of privacy loss are finer than ours."""
    noise, rounds, rate, delta, replaced = case
    dp = pytest.importorskip("dp_accounting", reason="needs dp-accounting: pip install -e '.[dev]'")
    relation = dp.NeighboringRelation.REPLACE_ONE if replaced else dp.NeighboringRelation.ADD_OR_REMOVE_ONE
    loss = dp.pld.privacy_loss_distribution.from_gaussian_mechanism(
        noise, sampling_prob=rate, value_discretization_interval=5e-4, neighboring_relation=relation
    )
    reference = loss.self_compose(rounds).get_epsilon_for_delta(delta)
    assert epsilon(noise, rounds, delta, rate, replaced) == pytest.approx(reference, rel=0.01)


@pytest.mark.skipif(os.environ.get("ASKEW_LONG") != "all", reason="takes minutes; ASKEW_LONG=all runs it")
def test_epsilon_agrees_with_dp_accounting_everywhere() -> None:
    for case in GRID:
        test_epsilon_agrees_with_dp_accounting(case)


def test_the_documented_numbers() -> None:
    pytest.importorskip("dp_accounting", reason="needs dp-accounting: pip install -e '.[dev]'")
    page = (Path(__file__).parent.parent / "docs" / "privacy.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (known|secret, a tenth) \| (add_or_remove|replace) \| ([\d.]+) \|$", page, re.M)
    assert len(rows) == 8
    for noise, participants, neighbours, shown in rows:
        privacy = Privacy(clip=1.0, noise=float(noise), neighbours=neighbours)
        assert f"{privacy.epsilon(100, 1.0 if participants == 'known' else 0.1):.2f}" == shown


def test_without_dp_accounting_sampling_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounting, "find_spec", lambda name: None)
    privacy, poisson = Privacy(clip=1.0, noise=1.0, secret_sampling=True), Poisson(fraction=0.1)
    assert privacy.epsilon(100, 0.1) == privacy.epsilon(100)
    assert "ε ≤ 91.8" in privacy.describe(100, poisson)
    assert "pip install 'askew[privacy]'" in privacy.describe(100, poisson)


@pytest.mark.parametrize("rule", [Uniform(), Bernoulli(), FullParticipation(), Poisson(seed=1)])
def test_draws_that_are_not_secret_poisson_sampling_lower_nothing(rule: Participation) -> None:
    with pytest.raises(ConfigError, match=r'set participation.name = "poisson" and leave out participation.seed'):
        Privacy(clip=1.0, noise=1.0, secret_sampling=True).check_participation(rule)
    assert Privacy(clip=1.0, noise=1.0).rate(rule) == 1


# noise ----------------------------------------------------------------------------------------------------------


def test_discrete_gaussian_is_gaussian() -> None:
    """Mean, variance, fourth moment and the whole distribution of 100,000 fixed draws."""
    count = 100_000
    draws = discrete_gaussian(count, fixed_words(0)) / 2**BITS
    assert len(draws) == count and abs(draws.mean()) < 4 / math.sqrt(count)
    assert draws.var() == pytest.approx(1, abs=4 * math.sqrt(2 / count))
    assert stats.kurtosis(draws) == pytest.approx(0, abs=4 * math.sqrt(24 / count))
    assert stats.kstest(draws, "norm").statistic < 1.63 / math.sqrt(count)  # a hundredth of all tests would exceed it
    assert abs(np.corrcoef(draws[1:], draws[:-1])[0, 1]) < 4 / math.sqrt(count)
    assert stats.kstest(2 * discrete_gaussian(count, fixed_words(0)) / 2**BITS, "norm").pvalue < 1e-9


@pytest.mark.parametrize("gamma", [0.0, 0.3, 1.0, 1.7, 4.2])
def test_bernoulli_of_an_exponential(gamma: float) -> None:
    count, bits = 50_000, 20
    counts = np.full(count, round(gamma * 2**bits), dtype=np.uint64)
    chance = math.exp(-round(gamma * 2**bits) / 2**bits)
    drawn = bernoulli_exp(counts, bits, fixed_words(1)).mean()
    assert drawn == pytest.approx(chance, abs=4 * math.sqrt(chance * (1 - chance) / count) + 1e-12)


def test_discrete_laplace_is_laplace() -> None:
    draws = discrete_laplace(100_000, fixed_words(2)) / 2**BITS
    assert stats.kstest(draws, "laplace").statistic < 1.63 / math.sqrt(len(draws))


def test_noisy_sums_are_whole_numbers_of_steps() -> None:
    """Whatever is summed: so the last bits of the result tell nothing."""
    step = 0.7 / 2**BITS
    for rows in (torch.zeros(1, 500), torch.full((3, 500), 1e-3), torch.randn(2, 500)):
        noisy = SystemNoise(fixed_words(3)).noisy_sum(rows, 1.0, 0.7, "", 1).numpy() / step
        assert np.abs(noisy - noisy.round()).max() < 1e-6 and np.abs(noisy).max() > 2**BITS


def test_one_client_changes_the_sum_by_no_more_than_the_bound() -> None:
    """With the same noise the difference of two sums is the client's part: exactly, in whole steps."""
    others, client, step = torch.randn(3, 1000), 100 * torch.randn(1, 1000), 2.0 / 2**BITS
    sums = [
        SystemNoise(fixed_words(4)).noisy_sum(rows, 1.0, 2.0, "", 1) for rows in (others, torch.cat([others, client]))
    ]
    part = ((sums[1] - sums[0]) / step).round().to(torch.int64)
    assert 0.999 < math.sqrt(sum(int(n) ** 2 for n in part)) * step <= 1


# the stage ------------------------------------------------------------------------------------------------------


def outputs_of(delta: torch.Tensor) -> PhaseOutputs:
    """What clients with these updates return."""
    return PhaseOutputs({"delta": delta}, {}, {}, torch.zeros(len(delta), 0), torch.ones(len(delta)), None)


class Asked:
    """A request of a round with clients 0 to m − 1, as far as the stage reads it."""

    def __init__(self, clients: int, round: int = 1) -> None:
        self.plan = type("Plan", (), {"ids": list(range(clients))})()
        self.inputs = type("Inputs", (), {"round": round})()


def protect(stage: PrivacyStage, delta: torch.Tensor, round: int = 1) -> torch.Tensor:
    """The updates that leave the stage."""
    request: Any = Asked(len(delta), round)
    return stage(request, outputs_of(delta)).up["delta"]


def make_stage(clients: int = 10, participation: Participation | None = None, **privacy: Any) -> PrivacyStage:
    return PrivacyStage.simulated(Privacy(**privacy), participation or FullParticipation(), clients, seed=5)


@pytest.mark.parametrize("clients", [1, 4, 25])
def test_noise_on_the_sum_is_the_same_for_any_number_of_answers(clients: int) -> None:
    """z · clip on the sum, so z · clip / m on the mean of the m updates that came, every row the same."""
    size = 40_000
    rows = protect(make_stage(100, clip=0.5, noise=2.0), torch.zeros(clients, size))
    assert torch.equal(rows, rows[:1].expand_as(rows))
    assert rows[0].std().item() * clients == pytest.approx(1.0, rel=5 / math.sqrt(2 * size))


def test_a_secret_mean_is_over_the_expected_number() -> None:
    """Else the size of the noise would show how many came."""
    stage = make_stage(50, Poisson(fraction=0.1), clip=0.5, noise=2.0, secret_sampling=True)
    for clients in (2, 9):
        noise = protect(stage, torch.zeros(clients, 40_000))[0]
        assert noise.std().item() == pytest.approx(2.0 * 0.5 / 5, rel=0.02)
    alone = stage.without_clients(1, torch.zeros(40_000))
    assert alone is not None and alone["delta"].std().item() == pytest.approx(0.2, rel=0.02)
    assert make_stage(clip=0.5, noise=2.0).without_clients(1, torch.zeros(4)) is None


def test_clients_noise_their_own_updates() -> None:
    rows = protect(make_stage(3, clip=0.5, noise=2.0, where="client"), torch.zeros(3, 40_000))
    assert rows.std(1).tolist() == pytest.approx([1.0] * 3, rel=0.02)
    assert abs(torch.corrcoef(rows)[0, 1].item()) < 0.025


def test_updates_that_are_not_finite_are_left_out_of_the_mean() -> None:
    delta = torch.zeros(4, 1000)
    delta[2, 7] = torch.nan
    request: Any = Asked(4)
    out = make_stage(clip=1e6, noise=1e-4)(request, outputs_of(delta))
    assert out.answered == [0, 1, 3] and [i.client for i in out.incidents] == [2]
    assert bool(torch.isfinite(out.up["delta"]).all())


def test_clip_moves_to_the_quantile_by_hand() -> None:
    """Lengths 1, 2, 3, 4 and clip 2.5: half are short; at γ = 0.75 it grows by e^{0.2 · 0.25}, at γ = 0.5 it stays."""
    delta = torch.eye(4) * torch.arange(1.0, 5.0)[:, None]
    for quantile, factor in ((0.75, math.exp(0.2 * 0.25)), (0.5, 1.0), (0.25, math.exp(-0.2 * 0.25))):
        stage = make_stage(clip=2.5, quantile=quantile)
        assert protect(stage, delta).norm(dim=1).tolist() == pytest.approx([1, 2, 2.5, 2.5])
        assert stage.clip == pytest.approx(2.5 * factor)


def test_adaptive_clipping_finds_the_quantile_and_pays_for_it() -> None:
    """From a hundred times too short, with noise on the count; the noise on updates grows by its share."""
    lengths = torch.linspace(0.5, 1.5, 101)
    stage = make_stage(101, clip=0.01, noise=1.0, quantile=0.8, count_noise=5.0)
    for round in range(1, 121):
        protect(stage, lengths[:, None].clone(), round)
    assert stage.clip == pytest.approx(1.3, rel=0.05)
    z = stage.privacy.update_noise
    assert z > 1 and z**-2 + (2 * 5.0) ** -2 == pytest.approx(1.0)
    noise = protect(make_stage(1, clip=1.0, noise=1.0, quantile=0.5, count_noise=0.6), torch.zeros(1, 40_000))
    assert noise.std().item() == pytest.approx((1 - 1.2**-2) ** -0.5, rel=0.02)


# an attack ------------------------------------------------------------------------------------------------------


def least_epsilon(without: np.ndarray, having: np.ndarray, delta: float) -> float:
    """A lower bound of ε at δ, wrong in one of 10,000 audits, from noisy sums without and with a client's update.

    A threshold tells the two apart; Clopper–Pearson bounds its rates (Jagielski, Ullman, Oprea, NeurIPS 2020).
    """
    thresholds = np.quantile(np.concatenate([without, having]), np.linspace(0.02, 0.9995, 60))
    alpha, best = 1e-4 / (2 * len(thresholds)), 0.0
    for threshold in thresholds:
        false, true = (int((sums > threshold).sum()) for sums in (without, having))
        most_false = stats.beta.ppf(1 - alpha, false + 1, len(without) - false)
        least_true = stats.beta.ppf(alpha, true, len(having) - true + 1) if true else 0.0
        if least_true > delta:
            best = max(best, math.log((least_true - delta) / most_false))
    return best


def audit(noise: float, stage_of: Callable[..., PrivacyStage]) -> float:
    """The lower bound of ε for one noised sum of one number, with 100,000 sums at once.

    Coordinates are independent sums: each update has 1 in all of them, and the largest length is √n, so that in every
    coordinate a client's part is at most 1 and the noise is `noise`.
    """
    count = 100_000
    stage = stage_of(clip=math.sqrt(count), noise=noise / math.sqrt(count))
    stage.noise = SystemNoise(fixed_words(6))
    others, client = torch.zeros(2, count), torch.full((1, count), 30.0)  # thirty times too long
    sums = [3 * protect(stage, torch.cat([others, last]))[0].numpy() for last in (torch.zeros(1, count), client)]
    return least_epsilon(*sums, DELTA)


NOISE = 1.0


def test_the_attack_finds_no_more_than_epsilon() -> None:
    found = audit(NOISE, make_stage)
    assert 0.5 * epsilon(NOISE, 1, DELTA) < found <= epsilon(NOISE, 1, DELTA)


def test_the_attack_finds_missing_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    claimed = epsilon(NOISE, 1, DELTA)
    assert audit(NOISE / 2, make_stage) > claimed
    monkeypatch.setattr("askew.engine.noise.discrete_gaussian", lambda count, words: np.zeros(count, dtype=np.int64))
    assert audit(NOISE, make_stage) > claimed


def test_the_attack_finds_missing_clipping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("askew.engine.noise.shorten_rows", lambda rows, longest: rows)
    assert audit(NOISE, make_stage) > epsilon(NOISE, 1, DELTA)


# runs -----------------------------------------------------------------------------------------------------------


TABLES: dict[str, Any] = {
    "rounds": 6,
    "data": {"name": "synthetic", "dim": 8, "labels": 3, "samples": 20},
    "partition": {"name": "natural", "clients": 8},
    "participation": {"name": "uniform", "cohort": 4},
    "model": {"name": "mlp", "hidden": [8], "norm": "none"},
    "algorithm": {"name": "fedavg", "weighting": "uniform"},
    "local": {"batch": 10},
    "engine": {"name": "sequential", "device": "cpu"},
}
ADAPTIVE = {"clip": 0.05, "noise": 1.0, "quantile": 0.5, "count_noise": 1.0}


def simulate(privacy: dict[str, Any] | None = None, **changes: Any) -> askew.Run:
    return askew.run({**TABLES, **changes} | ({} if privacy is None else {"privacy": privacy}))


def same_model(one: State, other: State) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def without_times(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in record.items() if k != "seconds"} for record in records]


def test_a_simulation_repeats_its_noise() -> None:
    one, other = (simulate({"clip": 0.05, "noise": 1.0}) for _ in range(2))
    assert same_model(one.model, other.model) and "protect nobody" in one.facts["privacy"]
    assert not same_model(one.model, simulate({"clip": 0.05}).model)
    assert same_model(simulate({"clip": 1e6}).model, simulate().model)  # shorter updates are unchanged


def test_epsilon_counts_the_client_that_took_part_most() -> None:
    run = simulate({"clip": 0.05, "noise": 2.0, "neighbours": "replace"})
    counts = np.zeros(8, dtype=int)
    for record in run.rounds:
        counts[record["participants"]] += 1
        assert record["epsilon"] == gaussian_epsilon(2 * math.sqrt(counts.max()) / 2.0, DELTA)


def test_a_resumed_run_goes_on_with_clip_and_epsilon(tmp_path: Path) -> None:
    tables = {**TABLES, "privacy": ADAPTIVE}
    whole = askew.run(tables)

    def stop(run: askew.Run, record: Any) -> None:
        if record is not None and record["round"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        askew.run(tables, out=tmp_path, watch=stop, save_every=0.0)
    resumed = askew.run(tables, out=tmp_path)
    assert without_times(resumed.rounds) == without_times(whole.rounds) and same_model(resumed.model, whole.model)


def test_a_secret_round_without_participants_moves_the_model() -> None:
    privacy = {"clip": 0.05, "noise": 1.0, "secret_sampling": True}
    run = simulate(privacy, participation={"name": "poisson", "fraction": 1e-6}, rounds=1)
    assert run.rounds[0]["participants"] == [] and run.rounds[0]["dropped"] == 0
    start = simulate(participation={"name": "poisson", "fraction": 1e-6}, rounds=1)
    moved = torch.cat([(run.model[n] - t).flatten() for n, t in start.model.items()])
    assert moved.std().item() == pytest.approx(0.05 / 8e-6, rel=0.3)


def test_private_parts_get_no_noise() -> None:
    model = {"name": "mlp", "hidden": [8], "norm": "batch"}
    method = {"name": "fedbn", "weighting": "uniform", "eval": "server_init"}
    run, start = (
        simulate(privacy, model=model, algorithm=method, rounds=1, participation={"name": "full"})
        for privacy in ({"clip": 0.05, "noise": 100.0}, {"clip": 1e-9})
    )
    moved = {name: (run.model[name] - t).abs().max().item() for name, t in start.model.items()}
    assert {name for name, size in moved.items() if size > 1e-3} == {n for n in moved if "norm" not in n}


@pytest.mark.parametrize(
    ("privacy", "changes", "sentence"),
    [
        ({"secure": True}, {}, "of which a simulation has none; leave out privacy.secure"),
        ({"clip": 1.0, "noise": 1.0}, {"evaluation": {"drift": True}}, "which privacy hides"),
        ({"clip": 1.0}, {"algorithm": {"name": "scaffold"}}, "clients keep or send more than their update"),
        ({"clip": 1.0, "noise": 1.0}, {"algorithm": {"name": "fedavg"}}, 'set algorithm.weighting = "uniform"'),
        ({"clip": 1.0, "noise": 1.0}, {"algorithm": {"name": "fedexp"}}, "noise on the sum leaves"),
        ({"clip": 1.0, "noise": 1e-9}, {}, "hides nothing"),
        ({"clip": 1.0, "noise": 1.0, "secret_sampling": True}, {}, 'participation.name = "poisson"'),
        ({"clip": 1.0, "secret_sampling": True}, {}, "only where the server adds noise to the sum"),
        (
            {"clip": 1.0, "noise": 1.0, "secure": True, "secret_sampling": True},
            {},
            "leave out secret_sampling or secure",
        ),
        ({"quantile": 0.5}, {}, "adaptive clipping needs a first clip"),
        ({"clip": 1.0, "noise": 1.0, "where": "client", "quantile": 0.5}, {}, "adaptive clipping needs a first clip"),
        ({"clip": 1.0, "noise": 1.0, "quantile": 0.5}, {}, "count_noise must be larger than noise / 2 = 0.5"),
    ],
)
def test_what_cannot_be_protected_is_refused(privacy: dict[str, Any], changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        simulate(privacy, **changes)
    assert sentence in str(error.value)


def test_the_table_is_stored_only_where_it_says_something() -> None:
    plain, off = Config.build(TABLES), Config.build({**TABLES, "privacy": {}})
    assert "privacy" not in plain.tables() and off.name() == plain.name()
    assert Config.build({**TABLES, "privacy": {"clip": 1.0}}).name() != plain.name()


def test_epsilon_is_shown(tmp_path: Path) -> None:
    from rich.console import Console

    run = askew.run({**TABLES, "privacy": {"clip": 0.05, "noise": 1.0}}, out=tmp_path)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(terminal.run_details(run))
    with ProgressDisplay(console) as show:
        show(run, None)
        show(run, run.rounds[-1])
    spent = f"{run.rounds[-1]['epsilon']:.3g}"
    text = console.export_text()
    assert f"ε = {spent} at δ = 1e-05 after round 6" in text and f" · ε {spent}" in text
    assert table([run])[0]["epsilon"] == pytest.approx(run.rounds[-1]["epsilon"])
