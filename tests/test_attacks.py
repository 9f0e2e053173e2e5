"""Attacks: what hostile clients send, by the papers' formulas; who they are; and that tests are on clean data."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import norm as normal

import askew
from askew.algorithms import FedMGDAPlus
from askew.cli.main import main
from askew.core.types import Cohort
from askew.data.federation import Federation
from askew.data.partition import Natural
from askew.data.synthetic import Synthetic
from askew.engine.attacks import ATTACKS, Attack, AttackStage, little_is_enough
from askew.engine.base import PhaseOutputs
from askew.errors import AskewError, ConfigError, Remark
from askew.experiment.build import BuildCache, build
from askew.experiment.config import Config
from askew.flower.deployment_data import read_config
from problems import close
from test_robust import SMALL, outputs_of, random_rows, request_of

HOSTILE = [1, 4]
HONEST = [0, 2, 3, 5, 6]


def sent(name: str, rows: torch.Tensor | None = None, seed: int = 0, **settings: Any) -> PhaseOutputs:
    """What seven participants send, two of them hostile."""
    stage = AttackStage(Attack(name=name, **settings), HOSTILE, seed)
    return stage(request_of([1.0] * 7), outputs_of(random_rows(7, 40) if rows is None else rows))


@pytest.mark.parametrize("name", [name for name in ATTACKS if name != "label_flip"])
def test_honest_rows_stay_and_hostile_ones_change(name: str) -> None:
    rows = random_rows(7, 40)
    before, out = rows.clone(), sent(name, rows).up["delta"]
    assert torch.equal(out[HONEST], rows[HONEST]) and torch.equal(rows, before)
    assert not any(torch.equal(out[i], rows[i]) for i in HOSTILE)


def test_a_sign_flip_is_its_own_inverse() -> None:
    rows = random_rows(7, 40)
    once = sent("sign_flip", rows).up["delta"]
    assert torch.equal(once[HOSTILE], -rows[HOSTILE]) and torch.equal(sent("sign_flip", once).up["delta"], rows)
    assert close(sent("sign_flip", rows, strength=3.0).up["delta"][1], -3 * rows[1])
    assert close(sent("scale", rows).up["delta"][4], 10 * rows[4])


def test_the_inner_product_with_the_honest_mean_is_minus_the_strength() -> None:
    rows = random_rows(7, 40)
    mean = rows[HONEST].mean(0)
    for strength in (0.1, 1.0, 5.0):
        out = sent("inner_product", rows, strength=strength).up["delta"]
        assert all(close(out[i] @ mean, -strength * (mean @ mean)) for i in HOSTILE)


def test_alie_is_the_honest_mean_minus_z_standard_deviations() -> None:
    rows = random_rows(7, 40)
    honest = rows[HONEST].numpy()
    for settings, z in (({}, little_is_enough(7, 2)), ({"strength": 1.5}, 1.5)):
        expected = torch.from_numpy(honest.mean(0) - z * honest.std(0))
        assert all(close(sent("alie", rows, **settings).up["delta"][i], expected) for i in HOSTILE)


def test_z_is_the_papers() -> None:
    """s = ⌊n/2 + 1⌋ − m, z = the largest with Φ(z) < (n − m − s)/(n − m)."""
    for n, m in ((50, 24), (50, 12), (20, 4), (10, 3), (7, 2)):
        s = math.floor(n / 2 + 1) - m
        assert little_is_enough(n, m) == pytest.approx(normal.ppf((n - m - s) / (n - m)), abs=1e-12)
    assert little_is_enough(50, 24) == pytest.approx(1.4261, abs=1e-4)  # 24 of 26 honest values below it
    assert little_is_enough(3, 1) == 0.0 and little_is_enough(4, 4) == 0.0
    assert math.isfinite(little_is_enough(5, 4))


def test_where_nobody_is_honest_the_attackers_use_their_own() -> None:
    stage, rows = AttackStage(Attack(name="inner_product"), range(3), 0), random_rows(3, 5)
    assert close(stage(request_of([1] * 3), outputs_of(rows)).up["delta"], -rows.mean(0))


def test_noise_has_the_rows_length_and_a_seed() -> None:
    rows = random_rows(7, 4000)
    rows[:, :100] = 0  # what never leaves a client
    out = sent("noise", rows, strength=10.0).up["delta"]
    for i in HOSTILE:
        assert float(out[i].norm() / rows[i].norm()) == pytest.approx(10, rel=0.05)
        assert abs(float(torch.cosine_similarity(out[i], rows[i], dim=0))) < 0.1
        assert not out[i, :100].any()
    assert torch.equal(out, sent("noise", rows, strength=10.0).up["delta"])
    assert not torch.equal(out, sent("noise", rows, seed=1, strength=10.0).up["delta"])


def test_one_number_of_a_client_stays_as_it_is() -> None:
    up = {"delta": random_rows(7, 3), "a": torch.arange(7.0)}
    out = AttackStage(Attack(name="sign_flip"), HOSTILE, 0)(request_of([1] * 7), outputs_of(up))
    assert torch.equal(out.up["a"], up["a"]) and torch.equal(out.up["delta"][1], -up["delta"][1])


# who attacks ----------------------------------------------------------------------------------------------------------


def test_the_attackers_are_drawn_from_the_seed() -> None:
    fed = Federation(Synthetic(dim=4, labels=3, samples=20), Natural(clients=20), 0)
    one, again, other = (Attack(name="scale").attackers(seed, fed) for seed in (0, 0, 1))
    assert len(one) == 4 and one == again == sorted(one) and one != other
    assert Attack(name="scale", fraction=0.01).attackers(0, fed)  # at least one
    assert Attack(name="scale", clients=(3, 1)).attackers(0, fed) == [1, 3]
    assert Attack().attackers(0, fed) == []
    with pytest.raises(ConfigError, match="there is no client 20; clients are numbered 0 to 19"):
        Attack(name="scale", clients=(20,)).attackers(0, fed)


@pytest.mark.parametrize("natural", [True, False])
def test_a_label_flip_changes_the_attackers_training_labels_alone(natural: bool) -> None:
    partition: dict[str, Any] = {"clients": 6} if natural else {"name": "dirichlet", "clients": 6, "alpha": 1.0}
    data = SMALL["data"] if natural else {"name": "digits"}
    tables = {**SMALL, "data": data, "partition": partition}
    clean, attacked = (
        BuildCache().federation(Config.build({**tables, **extra}), torch.device("cpu"))
        for extra in ({}, {"attack": {"name": "label_flip", "clients": [2, 3]}})
    )
    for i in range(6):
        (pool, (places,)), (poisoned, (other,)) = clean.gather([i]), attacked.gather([i])
        expected = clean.classes - 1 - pool.y[places] if i in (2, 3) else pool.y[places]
        assert np.array_equal(places, other) and torch.equal(poisoned.y[other], expected)
        assert torch.equal(poisoned.x[other], pool.x[places])
    assert torch.equal(clean.test.y, attacked.test.y)


def test_the_samples_are_not_copied_and_a_shared_federation_stays_clean() -> None:
    tables, cache = {**SMALL, "data": {"name": "digits"}, "partition": {"name": "iid", "clients": 6}}, BuildCache()
    clean = cache.federation(Config.build(tables), torch.device("cpu"))
    labels = clean.pool.y.clone()
    attacked = cache.federation(Config.build({**tables, "attack": {"name": "label_flip"}}), torch.device("cpu"))
    other = cache.federation(Config.build({**tables, "attack": {"name": "scale"}}), torch.device("cpu"))
    assert attacked.pool.x.data_ptr() == clean.pool.x.data_ptr() and other is clean
    assert torch.equal(clean.pool.y, labels) and not torch.equal(attacked.pool.y, labels)


def test_the_run_says_who_attacks(tmp_path: Path) -> None:
    built = build(Config.build({**SMALL, "attack": {"name": "alie", "fraction": 0.5}}))
    assert built.facts["attack"]["name"] == "alie" and len(built.facts["attack"]["clients"]) == 3
    assert "attack" not in build(Config.build(SMALL)).facts


@pytest.mark.parametrize(
    ("tables", "sentence"),
    [
        ({"attack": {"name": "label_flip", "strength": 1.0}}, "label_flip has no strength"),
        ({"attack": {"name": "alien"}}, "did you mean 'alie'"),
        ({"attack": {"name": "scale"}, "algorithm": {"name": "centralised"}}, "combines no uploads"),
        ({"attack": {"name": "scale"}, "algorithm": {"name": "solo"}}, "combines no uploads"),
    ],
)
def test_what_makes_no_sense_is_refused(tables: dict[str, Any], sentence: str) -> None:
    with pytest.raises(AskewError, match=sentence):
        Config.build({**SMALL, **tables})


def test_a_deployment_refuses_attacks_and_rules_that_privacy_hides_uploads_from(tmp_path: Path) -> None:
    for text, sentence in (
        ('[attack]\nname = "scale"', "attacks are for simulations"),
        ('[time]\nwait = "all"', "the virtual clock is for simulations"),
        ('[participation]\nname = "by_class"', "chances that follow from the clients' classes are for simulations"),
        ('[robust]\nrule = "median"\n[privacy]\nsecure = true', "one by one"),
    ):
        (tmp_path / "run.toml").write_text(text)
        with pytest.raises(ConfigError, match=sentence):
            read_config(tmp_path / "run.toml")
    (tmp_path / "run.toml").write_text('[robust]\nrule = "median"')
    assert read_config(tmp_path / "run.toml").robust.rule == "median"


def test_rules_and_attacks_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    for kind, names in (("attacks", ATTACKS), ("rules", ("clip", "median", "trimmed", "geometric", "krum"))):
        assert main(["list", kind, "--json"]) == 0
        assert [entry["name"] for entry in json.loads(capsys.readouterr().out)] == [*names]
        assert main(["list", kind]) == 0
        printed = capsys.readouterr().out
        assert all(name in printed for name in names)


@pytest.mark.slow
def test_a_rule_keeps_what_an_attack_destroys() -> None:
    """Accuracy on digits: FedAvg alone fails under four attackers of twenty, and with a rule it does not."""
    tables: dict[str, Any] = {
        "rounds": 15,
        "data": {"name": "digits"},
        "partition": {"name": "iid", "clients": 20},
        "participation": {"cohort": 20},
        "model": {"name": "mlp", "hidden": [16]},
        "local": {"epochs": 2, "batch": 16, "lr": 0.3},
        "evaluation": {"every": 15},
        "engine": {"device": "cpu"},
        "attack": {"name": "sign_flip", "strength": 8.0},
    }
    accuracy = lambda **extra: askew.run({**tables, **extra}).rounds[-1]["accuracy"]
    assert accuracy(attack={}) > 0.85
    with pytest.warns(Remark, match="diverged"):
        assert accuracy() < 0.3
    for rule in ("median", "trimmed", "geometric", "krum"):
        assert accuracy(robust={"rule": rule}) > 0.8, rule


# FedMGDA+ -------------------------------------------------------------------------------------------------------------


def mgda_step(rows: torch.Tensor, eps: float) -> torch.Tensor:
    """FedMGDA+'s step from 0 with equal weights."""
    alg, ones = FedMGDAPlus(eps=eps), torch.ones(len(rows), dtype=torch.float64)
    cohort = Cohort(ones / len(rows), ones, ones, ones, ones, None, 0.1, 0.1, 1, len(rows))
    w, _ = alg.aggregate(torch.zeros_like(rows[0]), {"delta": rows}, cohort, {"norm": ones[0]})
    return w


def test_fedmgdaplus_is_blind_to_the_length_of_an_update() -> None:
    rows = random_rows(6, 10)
    longer = rows * torch.tensor([1, 1e6, 1, 1, 1e-3, 1], dtype=torch.float64)[:, None]
    assert all(close(mgda_step(rows, eps), mgda_step(longer, eps), 1e-9) for eps in (0.0, 0.1, 1.0))


def test_fedmgdaplus_gives_up_where_some_clients_pull_the_other_way() -> None:
    """Honest clients send u, m of C attackers −u: the mean is (1 − 2m/C) u, the shortest combination is 0.

    The weights reach 1/2 for the attackers as soon as ε ≥ (1/2 − m/C) / m.
    """
    u = torch.nn.functional.normalize(random_rows(1, 10)[0], dim=0)
    rows = torch.stack([*[u] * 16, *[-u] * 4])
    assert close(mgda_step(rows, 0.0), 0.6 * u, 1e-9)
    assert close(mgda_step(rows, 0.025), 0.4 * u, 1e-6)  # 4 · (0.05 + 0.025) = 0.3 for the attackers
    for eps in (0.075, 0.1, 1.0):
        assert float(mgda_step(rows, eps).norm()) < 1e-6
