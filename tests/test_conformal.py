"""Prediction sets: scores and thresholds by hand, coverage against its exact distribution, and sets of stored runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import betabinom, binom
from torch import nn

import askew
from askew.cli.main import main
from askew.core.rng import generator
from askew.errors import AskewError, ConfigError, DataError, ModelError, StoreError
from askew.experiment import conformal as library
from askew.experiment.conformal import (
    LEVELS,
    METHODS,
    Conformal,
    MeasuredSets,
    band,
    coverage_distribution,
    interpolate,
    measure,
    measure_sets,
    prediction_sets,
    scores,
    strata,
    threshold,
)
from askew.experiment.store import read_json

TINY: dict[str, Any] = {"rounds": 2, "model": {"name": "softmax"}, "partition": {"clients": 5}}
FIXED = Conformal(randomised=False)
RARE = 1e-6  # the probability of a false alarm
Array = np.ndarray[Any, Any]


def draw_samples(n: int, classes: int = 6, sharp: float = 1.0, seed: int = 0) -> tuple[Array, Array]:
    """Class probabilities, and labels drawn from them; `sharp` above 1 makes the probabilities overconfident."""
    rng = np.random.default_rng(seed)
    logits = 1.5 * rng.normal(size=(n, classes))
    true, given = (np.exp(k * logits) / np.exp(k * logits).sum(1, keepdims=True) for k in (1.0, sharp))
    return given, (rng.random((n, 1)) > true.cumsum(1)).sum(1).clip(0, classes - 1)


# by hand --------------------------------------------------------------------------------------------------------


def test_scores_by_hand() -> None:
    p, u = np.array([[0.3, 0.5, 0.2], [0.25, 0.25, 0.5]]), np.array([0.5, 0.2])
    above = [[0.5, 0, 0.8], [0.5, 0.75, 0]]  # of two equal classes the first ranks higher
    aps = [[0.5 + 0.15, 0.25, 0.8 + 0.1], [0.5 + 0.05, 0.75 + 0.05, 0.1]]
    raps = np.array(aps) + 0.3 * np.array([[1, 0, 2], [1, 2, 0]])
    how = Conformal(penalty=0.3, k_reg=1)
    for method, expected in (("naive", above), ("aps", aps), ("raps", raps)):
        np.testing.assert_allclose(scores(method, p, u, how), expected, atol=1e-15)
    np.testing.assert_allclose(scores("aps", p, u, FIXED), [[0.8, 0.5, 1], [0.75, 1, 0.5]], atol=1e-15)
    np.testing.assert_allclose(
        scores("raps", p, u, Conformal(penalty=0.3, k_reg=2)) - aps, [[0, 0, 0.3], [0, 0.3, 0]], atol=1e-15
    )


@pytest.mark.parametrize(
    ("n", "alpha", "k"),
    [
        (9, 0.1, 9),
        (10, 0.1, 10),
        (99, 0.05, 95),
        (9, 0.7, 3),
        (19, 0.3, 14),
        (8, 0.1, None),
        (1, 0.5, 1),
        (1, 0.49, None),
    ],
)
def test_the_threshold_is_the_corrected_quantile(n: int, alpha: float, k: int | None) -> None:
    """(9 + 1)(1 − 0.7) is 3, though floating point says a little more."""
    true = np.random.default_rng(0).permutation(n) + 1.0
    assert threshold("aps", true, alpha) == threshold("raps", true, alpha) == (k or np.inf)


def test_naive_sets_by_hand() -> None:
    p = np.array([[0.3, 0.3, 0.3, 0.1], [0.97, 0.01, 0.01, 0.01]])
    for alpha, sizes in (
        (0.1, [3, 1]),
        (0.4, [2, 1]),
        (0.05, [4, 1]),
        (0.02, [4, 2]),
        (0.8, [1, 1]),
    ):  # .3 + .3 + .3 is a little below .9
        chosen = prediction_sets(scores("naive", p, np.zeros(2), FIXED), threshold("naive", np.zeros(0), alpha))
        assert chosen.sum(1).tolist() == sizes
        assert np.all((chosen * p).sum(1) >= 1 - alpha - 1e-12)


def test_a_whole_measurement_by_hand() -> None:
    """One of four samples calibrates: at a = 1/2 the threshold is its own score."""
    p, y = np.array([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.6, 0.4]]), np.array([0, 1, 0, 0])
    first, second, own = p[:, 0], np.ones(4), np.array([0.9, 1, 0.7, 0.6])  # scores of the classes, and of the true one
    how = Conformal(calibration=0.25, splits=20, randomised=False)
    calibrated = set()
    for split, (outcome,) in enumerate(measure_sets("aps", p, y, [0.5], how, seed=7)):
        chosen, *rest = generator(7, "conformal", split).permutation(4)
        assert outcome.covered.tolist() == (own[rest] <= own[chosen]).tolist()
        assert outcome.size.tolist() == ((first[rest] <= own[chosen]) * 1 + (second[rest] <= own[chosen])).tolist()
        calibrated.add(chosen)
    assert calibrated == {0, 1, 2, 3}


# coverage -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["aps", "raps"])
@pytest.mark.parametrize("alpha", [0.3, 0.1, 0.01])
@pytest.mark.parametrize("sharp", [0.3, 1.0, 4.0])
def test_coverage_is_within_its_exact_distribution_whatever_the_probabilities_are(
    method: str, alpha: float, sharp: float
) -> None:
    n, m = 300, 4000
    p, y = draw_samples(n + m, sharp=sharp, seed=int(1000 * alpha))
    ((outcome,),) = measure_sets(
        method, p, y, [alpha], Conformal(calibration=n / (n + m), splits=1, penalty=0.05), seed=1
    )
    k = np.ceil((n + 1) * (1 - alpha) - 1e-9)
    low, high = betabinom.ppf([RARE / 2, 1 - RARE / 2], m, k, n + 1 - k)
    assert len(outcome.covered) == m and low <= outcome.covered.sum() <= high


def test_the_finite_sample_correction_is_exact() -> None:
    """With ten calibrating samples one more is covered with probability 10/11; without the correction, 9/11."""
    repetitions, n, alpha = 20_000, 10, 0.1
    p, y = draw_samples(repetitions * (n + 1), classes=4)
    u = np.random.default_rng(1).random(len(y))
    true = scores("aps", p, u, Conformal())[np.arange(len(y)), y].reshape(repetitions, n + 1)
    covered = sum(row[-1] <= threshold("aps", row[:-1], alpha) for row in true)
    low, high = binom.ppf([RARE / 2, 1 - RARE / 2], repetitions, 10 / 11)
    assert low <= covered <= high and not low <= 9 / 11 * repetitions


@pytest.mark.parametrize(("n", "m", "alpha"), [(50, 70, 0.1), (9, 5, 0.3), (500, 2000, 0.05)])
def test_the_coverage_distribution_is_beta_binomial(n: int, m: int, alpha: float) -> None:
    k = int(np.ceil((n + 1) * (1 - alpha) - 1e-9))
    np.testing.assert_allclose(
        coverage_distribution(n, m, alpha), betabinom.pmf(np.arange(m + 1), m, k, n + 1 - k), rtol=1e-8, atol=1e-300
    )
    low, high = band(n, m, alpha, outside=0.02)
    assert (low * m, high * m) == pytest.approx(betabinom.ppf([0.01, 0.99], m, k, n + 1 - k))
    assert coverage_distribution(5, 3, 0.1).tolist() == [0, 0, 0, 1] and band(5, 3, 0.1) == (
        1.0,
        1.0,
    )  # too few: all classes


def test_naive_sets_undercover_where_the_model_is_overconfident_and_calibrated_ones_do_not() -> None:
    p, y = draw_samples(4000, sharp=4.0)
    methods = measure(p, y, Conformal(), seed=0)["methods"]
    assert methods["naive"]["coverage"] < 0.75
    assert abs(methods["aps"]["coverage"] - 0.9) < 0.02 and abs(methods["raps"]["coverage"] - 0.9) < 0.02
    assert methods["aps"]["size"] > methods["naive"]["size"]


def test_naive_sets_of_true_probabilities_cover_at_least_what_was_asked_for() -> None:
    p, y = draw_samples(20_000)
    covered = prediction_sets(scores("naive", p, np.zeros(len(y)), FIXED), threshold("naive", np.zeros(0), 0.2))[
        np.arange(len(y)), y
    ].sum()
    assert covered >= binom.ppf(RARE, len(y), 0.8)


# sets -----------------------------------------------------------------------------------------------------------


def test_aps_is_raps_without_regularisation() -> None:
    p, y = draw_samples(500)
    u = np.random.default_rng(0).random(500)
    aps = scores("aps", p, u, Conformal(penalty=7.0))
    for how in (Conformal(penalty=0.0), Conformal(penalty=7.0, k_reg=6)):  # no penalty, or one that no class bears
        assert np.array_equal(scores("raps", p, u, how), aps)
        one, other = (measure(p, y, how, seed=3) for _ in range(2))
        assert one["methods"]["aps"] == other["methods"]["raps"] and one["curves"]["aps"] == other["curves"]["raps"]
    assert not np.array_equal(scores("raps", p, u, Conformal(penalty=0.1)), aps)


def test_a_large_penalty_makes_all_sets_of_nearly_one_size() -> None:
    p, y = draw_samples(2000)
    ((outcome,),) = measure_sets("raps", p, y, [0.1], Conformal(penalty=100.0, splits=1), seed=0)
    assert np.ptp(outcome.size) <= 1


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("randomised", [True, False])
def test_sets_grow_with_what_is_asked_for_and_are_top_classes(method: str, randomised: bool) -> None:
    p, y = draw_samples(300)
    s = scores(method, p, np.random.default_rng(0).random(300), Conformal(randomised=randomised))
    true = s[np.arange(300), y]
    before = np.zeros_like(p, dtype=bool)
    for alpha in sorted(LEVELS, reverse=True):
        chosen = prediction_sets(s, threshold(method, true, alpha))
        assert not np.any(before & ~chosen)
        left_out = np.where(chosen, -1.0, p).max(1)
        assert np.all(np.where(chosen, p, 2.0).min(1) >= left_out)
        before = chosen
    curves = measure(p, y, Conformal(randomised=randomised), seed=0)["curves"][method]
    assert np.all(np.diff(curves["coverage"]) <= 0) and np.all(np.diff(curves["size"]) <= 0)


@pytest.mark.parametrize("randomised", [True, False])
def test_sets_are_never_empty_where_that_is_promised(randomised: bool) -> None:
    p, y = draw_samples(400, classes=3, sharp=3.0)
    free, filled = (
        measure(p, y, Conformal(alpha=0.6, randomised=randomised, nonempty=nonempty), seed=0)["methods"]
        for nonempty in (False, True)
    )
    assert free["aps"]["empty"] > 0.1 and free["raps"]["empty"] > 0.1  # so there is something to promise
    assert [filled[method]["empty"] for method in METHODS] == [0, 0, 0] and free["naive"]["empty"] == 0
    assert filled["aps"]["coverage"] >= free["aps"]["coverage"]
    chosen = prediction_sets(np.array([[0.7, 0.4, 0.9]]), 0.1, nonempty=True)
    assert chosen.tolist() == [[False, True, False]]


def test_too_few_calibrating_samples_give_all_classes() -> None:
    p, y = draw_samples(100)
    ((outcome,),) = measure_sets("aps", p, y, [0.05], Conformal(calibration=0.1, splits=1), seed=0)
    assert outcome.size.tolist() == [6] * 90 and outcome.covered.all()


def test_methods_and_runs_share_the_draws_of_a_seed() -> None:
    p, y = draw_samples(200)
    how = Conformal(penalty=0.0)
    one, two = (measure(p, y, how, seed=seed) for seed in (4, 5))
    assert one["curves"] == measure(p, y, how, seed=4)["curves"] != two["curves"]
    assert one["curves"]["aps"] == one["curves"]["raps"]


# figures --------------------------------------------------------------------------------------------------------


def test_strata_by_hand() -> None:
    parts = [
        MeasuredSets(np.array([True, False, True]), np.array([1, 1, 2])),
        MeasuredSets(np.array([True]), np.array([0])),
    ]
    assert strata(parts, 3) == [
        {"from": 0, "to": 0, "share": 0.25, "coverage": 1.0},
        {"from": 1, "to": 1, "share": 0.5, "coverage": 0.5},
        {"from": 2, "to": 2, "share": 0.25, "coverage": 1.0},
    ]
    sizes = np.array([0, 1, 2, 3, 4, 6, 7, 10, 11, 100, 101, 200])
    bins = strata([MeasuredSets(sizes > 5, sizes)], 200)
    assert [(b["from"], b["to"]) for b in bins] == [(0, 1), (2, 3), (4, 6), (7, 10), (11, 100), (101, 200)]
    assert [round(12 * b["share"]) for b in bins] == [2] * 6 and [b["coverage"] for b in bins] == [0, 0, 0.5, 1, 1, 1]


def test_strata_add_up_to_the_whole() -> None:
    p, y = draw_samples(500)
    for figures in measure(p, y, Conformal(), seed=0)["methods"].values():
        assert sum(s["share"] for s in figures["strata"]) == pytest.approx(1)
        assert sum(s["share"] * s["coverage"] for s in figures["strata"]) == pytest.approx(figures["coverage"])
        assert sum(s["share"] * s["to"] for s in figures["strata"]) == pytest.approx(figures["size"])


def test_sizes_at_equal_coverage_lie_between_neighbours() -> None:
    curve = {"coverage": [0.9, 0.8, 0.6], "size": [3.0, 2.0, 1.0]}
    assert interpolate(curve, "size", 0.85, of="coverage") == pytest.approx(2.5)
    assert interpolate(curve, "coverage", 1.5, of="size") == pytest.approx(0.7)
    assert interpolate(curve, "size", 0.95, of="coverage") is None
    assert interpolate(curve, "size", 0.5, of="coverage") is None


@pytest.mark.parametrize(
    "wrong",
    [{"alpha": 0}, {"alpha": 1}, {"calibration": 1.0}, {"splits": 0}, {"k_reg": -1}, {"penalty": -0.1}, {"lamda": 1}],
)
def test_wrong_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Conformal.build(wrong)


def test_one_sample_cannot_be_divided() -> None:
    with pytest.raises(DataError, match="1 test samples cannot be divided"):
        measure(np.array([[0.5, 0.5]]), np.array([0]), Conformal())


# runs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tables",
    [
        {"model": {"name": "mlp", "norm": "batch"}},
        {"model": {"name": "cnn", "head": 8}, "algorithm": {"name": "moon"}},
        {"algorithm": {"name": "centralised"}},
        {"engine": {"name": "vmapped", "dtype": "float64"}},
        {"algorithm": {"name": "fedexp", "evaluate_average_of_last_two": True}},
        {"model": {"name": "mlp", "norm": "batch"}, "algorithm": {"name": "fedbn", "eval": "server_mean"}},
        {"model": {"name": "mlp", "norm": "batch"}, "algorithm": {"name": "fedbn", "eval": "server_init"}},
    ],
    ids=[
        *("batch norm", "projection head", "centralised", "float64", "mean of two models", "mean batch norm"),
        "batch norm as it began",
    ],
)
def test_a_stored_run_is_measured_with_the_model_it_ended_with(tables: dict[str, Any], tmp_path: Path) -> None:
    run = askew.run({**TINY, **tables}, out=tmp_path)
    p, y = library.probabilities(askew.load(run.folder or ""))
    assert p.shape == (360, 10) and np.allclose(p.sum(1), 1)
    assert (p.argmax(1) == y).mean() == pytest.approx(run.final_accuracy)
    loss = -np.log(p[np.arange(360), y]).mean()
    assert loss == pytest.approx(run.rounds[-1]["loss"], rel=1e-5)


def test_what_was_measured_is_stored_read_back_drawn_and_cleared(tmp_path: Path) -> None:
    run = askew.run(TINY, out=tmp_path / "runs")
    assert run.folder is not None
    (figures,) = library.conformal([askew.load(run.folder)], Conformal(splits=2))
    again = askew.load(run.folder)
    assert again.conformal == figures == read_json(run.folder / library.FILE)
    assert main(["report", str(run.folder), "--out", str(tmp_path / "report")]) == 0
    assert (tmp_path / "report" / "coverage.png").stat().st_size > 10_000
    assert "Prediction sets" in (tmp_path / "report" / "index.html").read_text()
    askew.run(TINY, out=tmp_path / "runs", fresh=True)
    assert askew.load(run.folder).conformal == {}


def test_runs_that_have_no_sets_are_refused(tmp_path: Path) -> None:
    def refused(run: askew.Run, kind: type[AskewError], sentence: str) -> None:
        with pytest.raises(kind, match=sentence):
            library.probabilities(run)

    refused(askew.run(TINY), StoreError, "has no stored model")
    private = askew.run(
        {**TINY, "model": {"name": "mlp", "norm": "batch"}, "algorithm": {"name": "fedbn"}}, out=tmp_path
    )
    refused(private, ModelError, "keeps parts of the model with its clients")
    short = askew.run(TINY, out=tmp_path)
    short.rounds.pop()
    refused(short, StoreError, "has trained 1 of 2 rounds")
    x = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
    own = askew.run(data=(x, torch.arange(200) % 2), model=nn.Linear(3, 2), clients=4, rounds=1, out=tmp_path)
    refused(own, ConfigError, "handed in from Python")


# the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for seed in (0, 1):
        askew.run({**TINY, "seed": seed}, out="runs")
    return tmp_path / "runs"


def test_the_command_prints_tables_draws_and_prints_json(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformal", "runs", "--alpha", "0.2", "--splits", "3", "--plot", "sets/coverage.svg"]) == 0
    out = capsys.readouterr().out
    assert (
        "fedavg" in out
        and "coverage 80.0%" in out
        and "sets/coverage.svg" in out
        and "Means over 3 random divisions and over seeds" in out
    )
    assert b"<svg" in Path("sets/coverage.svg").read_bytes()
    one = str(next(stored.iterdir()))
    assert main(["conformal", one, "--calibration", "0.2", "--fixed", "--nonempty", "--splits", "2"]) == 0
    out = capsys.readouterr().out
    assert "72 test samples calibrate, 288 are measured" in " ".join(out.split()) and "coverage by set size" in out
    assert main(["conformal", "runs", "--json", "--penalty", "0", "--k-reg", "2", "--splits", "2"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [each["seed"] for each in rows] == [0, 1]
    for each in rows:
        assert each["settings"]["penalty"] == 0 and each["methods"]["aps"] == each["methods"]["raps"]
        assert len(each["curves"]["naive"]["size"]) == len(LEVELS)
        assert each == {
            "run": each["run"],
            "algorithm": "fedavg",
            "seed": each["seed"],
            **askew.load(each["run"]).conformal,
        }


def test_a_damaged_run_is_left_out_as_long_as_others_are_whole(
    stored: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = sorted(stored.iterdir())
    model = second / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-40] + bytes(40))
    capsys.readouterr()
    assert main(["conformal", "runs", "--splits", "2", "--json"]) == 0
    out, err = capsys.readouterr()
    assert [each["run"] for each in json.loads(out)] == [str(first.relative_to(stored.parent))]
    assert err.startswith("warning: a run is left out: ") and err.count("\n") == 1
    assert f"{second.name}/model.safetensors cannot be read or is damaged" in err
    (first / "model.safetensors").unlink()
    assert main(["conformal", "runs", "--splits", "2"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: the run ") and err.count("\n") == 1


def test_sets_that_are_never_empty_have_the_lower_end_of_the_range_alone(
    stored: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    low, high = (f"{100 * end:.1f}%" for end in band(180, 180, 0.1))
    for options, sentence in (
        ([], f"lies between {low} and {high} with probability 99%."),
        (["--nonempty"], f"is at least {low} with probability 99.5%, as empty sets get a class."),
    ):
        capsys.readouterr()
        assert main(["conformal", "runs", "--splits", "2", *options]) == 0
        assert sentence in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--alpha", "1"], "alpha must be > 0 and < 1, got 1.0"),
        (["--calibration", "0"], "calibration must be > 0 and < 1"),
        (["--plot", "x.gif"], "--plot must end in .png, .svg or .pdf"),
        (["--splits", "0"], "splits must be ≥ 1"),
    ],
)
def test_the_command_refuses_in_one_sentence(
    arguments: list[str], sentence: str, stored: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["conformal", "runs", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and sentence in " ".join(err.split()) and "Traceback" not in err
