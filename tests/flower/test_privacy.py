"""Clipping, noise and secure aggregation: what they promise, which methods support them, and what is refused."""

from __future__ import annotations

import math
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import (
    NO_NORM,
    VARIANTS,
    deploy,
    model_values,
    models_equal,
    private_run,
    simulate,
    small_run,
    wide_run,
    with_participants,
    write_config,
)

from askew.algorithms import algorithms
from askew.engine import accounting
from askew.engine.expected_uploads import zero_uploads
from askew.engine.noise import SystemNoise
from askew.engine.privacy import Privacy
from askew.engine.privacy_stage import add_noise, clip_upload
from askew.engine.privacy_support import check_supported
from askew.errors import ConfigError
from askew.experiment.build import BuildCache
from askew.flower.deployment_data import build_run, read_config
from askew.flower.wire import Payload

# clipping and noise ---------------------------------------------------------------------------------------------


def test_no_update_is_longer_than_the_bound(tmp_path: Path) -> None:
    """Shorter updates are unchanged."""
    lengths, losses = list[float](), list[float]()

    def note(kind: str, client: int, payload: Payload, reply: Payload) -> Payload:
        if kind == "train":
            lengths.append(reply.tensors["up.delta"].norm().item())
            losses.append(reply.numbers["loss"])
        return reply

    clipped, _, warnings = deploy(private_run(privacy={"clip": 0.05}), tmp_path, change_reply=note)
    assert warnings == [] and len(lengths) == 12 and max(lengths) <= 0.05 * (1 + 1e-6) and {*losses} == {0.0}
    assert clipped.finished and all(r["train_loss"] is None for r in clipped.rounds)
    assert "0.05" in clipped.facts["privacy"]
    unchanged, _, _ = deploy(private_run(privacy={"clip": 1e6}), tmp_path / "unchanged")
    assert models_equal(unchanged.model, simulate(private_run()).model)
    assert clipped.name != unchanged.name  # another bound is another run


def test_two_tensors_are_clipped_together() -> None:
    given = {"a": torch.full((4,), 3.0), "b": torch.full((4,), 4.0)}
    upload, short = clip_upload(given, 5.0)
    assert not short and clip_upload(given, 10.0) == (given, True)
    assert math.hypot(*(t.norm().item() for t in upload.values())) == pytest.approx(5.0)
    assert upload["a"][0] / upload["b"][0] == pytest.approx(0.75)


def test_an_update_that_is_too_long_is_refused(tmp_path: Path) -> None:
    lengthen = lambda kind, client, payload, reply: (
        reply._replace(tensors={n: 100 * t for n, t in reply.tensors.items()})
        if (kind, client) == ("train", 1)
        else reply
    )
    tables = private_run(privacy={"clip": 0.05}, participation={"name": "full"})
    run, _, warnings = deploy(tables, tmp_path, change_reply=lengthen)
    assert [r["absent"] for r in run.rounds] == [1] * 4
    assert len(warnings) == 4 and all("at most 0.05 is allowed" in text for text in warnings)


@pytest.mark.parametrize("where", ["server", "client"])
def test_noise_has_the_stated_deviation(where: str, tmp_path: Path) -> None:
    """Central: z · clip / m on the mean of m updates; local: z · clip on each, so 1/√m of that on the mean."""
    tables = wide_run()
    without, _, _ = deploy(tables | {"privacy": {"clip": 0.5}}, tmp_path / "without")
    with_noise = tables | {"privacy": {"clip": 0.5, "noise": 2.0, "where": where}}
    runs = [deploy(with_noise, tmp_path / str(n))[0] for n in range(2)]
    first, second = (model_values(run) - model_values(without) for run in runs)
    std = 2.0 * 0.5 / (5 if where == "server" else math.sqrt(5))
    count = len(first)
    assert count > 40_000
    for noise in (first, second):
        assert abs(noise.mean().item()) < 5 * std / math.sqrt(count)
        assert noise.std().item() == pytest.approx(std, rel=5 / math.sqrt(2 * count))
        assert (noise.abs() < std).double().mean().item() == pytest.approx(math.erf(math.sqrt(0.5)), abs=0.02)
    correlation = torch.corrcoef(torch.stack([first, second]))[0, 1].item()
    assert abs(correlation) < 5 / math.sqrt(count)  # the noise is not drawn from the run's seed


def test_a_clients_noise_is_drawn_anew_each_time() -> None:
    upload = {"a": torch.zeros(4), "b": torch.zeros(2, 3)}
    one, other = (add_noise(upload, 1.0, 1.0, SystemNoise()) for _ in range(2))
    assert all(one[n].shape == t.shape and not torch.equal(one[n], other[n]) for n, t in upload.items())


def test_epsilon_of_every_round_is_recorded(tmp_path: Path) -> None:
    """It counts the rounds of the client that took part most often."""
    tables = private_run(privacy={"clip": 0.5, "noise": 2.0}) | {
        "algorithm": {"name": "fedavg", "weighting": "uniform"}
    }
    tables = with_participants(tables, [[0, 1], [2, 3], [0, 4], [0, 1]], tmp_path)
    run, _, _ = deploy(tables, tmp_path)
    spent = [Privacy(clip=0.5, noise=2.0).epsilon(count) for count in (1, 1, 2, 3)]
    assert [r["epsilon"] for r in run.rounds] == spent
    assert "for a client in all 4 rounds" in run.facts["privacy"] and "simulated" not in run.facts["privacy"]


def secretly_drawn(fraction: float, **privacy: Any) -> dict[str, Any]:
    tables = wide_run() | {"participation": {"name": "poisson", "fraction": fraction}, "model": NO_NORM}
    return tables | {"privacy": {"clip": 0.5, "noise": 1.0, "secret_sampling": True} | privacy}


def test_secret_participants_are_not_drawn_from_the_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounting, "can_amplify", lambda: False)  # which takes longer than all else here
    tables = secretly_drawn(0.5) | {"rounds": 12}
    runs = [deploy(tables, tmp_path / str(n))[0] for n in range(2)]
    one, other = ([r["participants"] for r in run.rounds] for run in runs)
    assert one != other  # equal with a chance of 2^-60


def test_a_secret_round_without_participants_has_noise_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounting, "can_amplify", lambda: False)
    run, transport, _ = deploy(secretly_drawn(1e-9), tmp_path)
    start = build_run(read_config(tmp_path / "app" / "run.toml"), BuildCache()).server.w
    moved = torch.cat([t.flatten() for t in run.model.values()]) - start
    assert run.rounds[0]["participants"] == [] and not any(kind == "train" for kind, _, _ in transport.sent)
    std = 1.0 * 0.5 / (1e-9 * 5)  # the mean is over the expected number of participants
    assert moved.std().item() == pytest.approx(std, rel=5 / math.sqrt(2 * len(moved)))


@pytest.mark.parametrize(("rule", "advice"), [({"spare": 0.5}, "set spare = 0"), ({"answers": 2}, "set answers = 1")])
def test_rules_that_tie_clients_together_are_refused_with_secret_participants(
    rule: dict[str, Any], advice: str, tmp_path: Path
) -> None:
    """With two answers as the least, one client decides whether another's is used, and ε is larger than it says."""
    with pytest.raises(ConfigError, match=advice):
        deploy(secretly_drawn(0.5), tmp_path, rules=rule)


@pytest.mark.parametrize("secure", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_clip_follows_the_lengths_as_in_a_simulation(secure: bool, tmp_path: Path) -> None:
    """Without noise the clip of every round is the simulation's, whatever hides the updates."""
    privacy = {"clip": 0.05, "quantile": 0.5, "clip_rate": 0.7}
    tables = private_run(privacy=privacy) | {"algorithm": {"name": "fedavg", "weighting": "uniform"}}
    simulated = [r["privacy_clip"] for r in simulate(tables).rounds]
    run, _, _ = deploy(tables | {"privacy": privacy | {"secure": secure}}, tmp_path)
    assert [r["privacy_clip"] for r in run.rounds] == pytest.approx(simulated, rel=1e-6)
    assert len({*simulated}) == 4


def test_a_false_count_of_short_updates_is_refused(tmp_path: Path) -> None:
    lie = lambda kind, client, payload, reply: (
        reply._replace(numbers={**reply.numbers, "loss": 1000.0}) if (kind, client) == ("train", 1) else reply
    )
    tables = private_run(privacy={"clip": 0.05, "quantile": 0.5}, participation={"name": "full"}, rounds=1)
    run, _, warnings = deploy(tables, tmp_path, change_reply=lie)
    assert run.rounds[0]["absent"] == 1 and "whether its update was short" in warnings[0]


def test_names_of_older_deployments_stay(tmp_path: Path) -> None:
    """Digests as they were when [privacy] was a table of deployments alone and all its settings were part of them."""
    tables = {"seed": 3, "rounds": 4, "algorithm": {"name": "fedavg", "weighting": "uniform"}} | {"model": NO_NORM}
    old = {
        "239b5384": {},
        "b7b1e735": {"secure": True},
        "9a0676e4": {"clip": 0.5, "noise": 1.0},
        "017e9d13": {"clip": 0.5, "noise": 1.0, "where": "client", "delta": 1e-6},
    }
    for digest, privacy in old.items():
        config = read_config(write_config(tables | {"privacy": privacy}, tmp_path))
        assert config.name() == f"fedavg-digits-seed3-{digest}-flower"
    assert [*config.tables()["privacy"]] == ["clip", "noise", "where", "secure", "fewest", "delta"]


# which methods are supported ------------------------------------------------------------------------------------


def is_supported(key: str, folder: Path, **privacy: Any) -> bool:
    tables = small_run(VARIANTS[key])
    if "noise" in privacy:
        if not algorithms[key].own_weights:
            tables["algorithm"] = VARIANTS[key] | {"weighting": "uniform"}
        if tables["model"].get("norm") == "batch" and key not in ("fedbn", "solo"):
            tables["model"] = NO_NORM
    try:
        config = read_config(write_config(tables | {"privacy": privacy}, folder))
        server = build_run(config, BuildCache()).server
        check_supported(config.privacy, server, zero_uploads(server))
    except ConfigError:
        return False
    return True


COLUMNS = {
    "secure aggregation": {"secure": True},
    "noise by the server": {"clip": 1.0, "noise": 1.0},
    "noise by the clients": {"clip": 1.0, "noise": 1.0, "where": "client"},
}


@cache
def documented_support() -> dict[str, list[bool]]:
    """The table of docs/privacy.md: for each method, whether it supports each of COLUMNS."""
    text = (Path(__file__).parents[2] / "docs" / "privacy.md").read_text()
    rows = re.findall(r"^\|(.+?)\|(.+?)\|(.+?)\|(.+?)\|", text, re.M)
    return {cells[0].strip(" `"): [cell.strip() == "yes" for cell in cells[1:4]] for cells in rows}


@pytest.mark.parametrize("key", list(algorithms))
def test_the_documented_methods_are_supported(key: str, tmp_path: Path) -> None:
    assert documented_support()[key] == [is_supported(key, tmp_path, **privacy) for privacy in COLUMNS.values()]


@pytest.mark.parametrize(
    "key",
    [
        *("feddpc", "fedexp", "fednova", "fedcm", "lossbias", "mgda", "fedmgdaplus", "fedvarp", "mifa", "fedpdc"),
        *("fedamd", "fedau", "fedawe"),
    ],
)
def test_methods_that_need_each_upload_are_refused(key: str, tmp_path: Path) -> None:
    sentence = "needs every client's upload, not their mean alone, which is all that secure aggregation leaves"
    with pytest.raises(ConfigError, match=sentence):
        deploy(small_run(VARIANTS[key]) | {"privacy": {"secure": True}}, tmp_path)


@pytest.mark.parametrize(
    ("key", "privacy", "changes", "sentence"),
    [
        ("fedavg", {"noise": 1.0}, {}, "noise = 1 needs a largest length to be measured by; set clip"),
        ("fedavg", {"clip": 1.0, "noise": 1.0}, {}, 'set algorithm.weighting = "uniform"'),
        (
            "fedavg",
            {"clip": 1.0, "noise": 1.0, "where": "client"},
            {"model": {**NO_NORM, "norm": "batch"}},
            "use a network with another norm",
        ),
        ("scaffold", {"clip": 1.0}, {}, "its clients keep or send more than their update"),
        ("fedavg", {"clip": -1.0}, {}, "privacy: clip must be ≥ 0"),
        ("fedavg", {"secret": True}, {}, "unknown setting"),
        (
            "fedavg",
            {"secure": True},
            {"evaluation": {"drift": True}},
            "evaluation.drift measures the clients' uploads one by one",
        ),
    ],
)
def test_what_is_not_supported_is_refused(
    key: str, privacy: dict[str, Any], changes: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as error:
        deploy(private_run(key, privacy, **changes), tmp_path)
    assert sentence in str(error.value)


def test_a_privacy_that_is_no_table_is_refused(tmp_path: Path) -> None:
    path = write_config(private_run(), tmp_path)
    path.write_text("privacy = true\n" + path.read_text())
    with pytest.raises(ConfigError, match="privacy is a table of settings"):
        read_config(path)
