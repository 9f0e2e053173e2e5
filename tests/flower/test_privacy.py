"""Clipping, noise and secure aggregation: what they promise, which methods they fit, and what they refuse."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hands import VARIANTS, Hands, page, same_model, simulated, written

from askew.algorithms import algorithms
from askew.errors import AskewError, ConfigError
from askew.experiment.store import Run
from askew.flower.client import Client, hello
from askew.flower.deployment_data import Home, house_of, read_page
from askew.flower.privacy import Privacy, check_fit, clipped, noisy
from askew.flower.server import Rules, serve, uploads
from askew.flower.wire import Payload, RawPayload

PLAIN = {"name": "mlp", "hidden": [8], "norm": "none"}


class Secret(Hands):
    """Nodes that keep their secrets between the stages."""

    def answer(self, kind: str, number: int, letter: RawPayload) -> Payload | str:
        self.vaults: dict[int, dict[str, Any]] = self.__dict__.setdefault("vaults", {})
        try:
            home = Home(
                self.config, self.node(number), self.data, None if kind == "query" else letter.numbers["classes"]
            )
            if kind == "query":
                return hello(home)
            return Client(home, self.place(home), self.vaults.setdefault(number, {})).answer(kind, letter)
        except AskewError as e:
            return str(e)


def tables(key: str = "fedavg", privacy: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return page(VARIANTS[key], **{"model": PLAIN, **more}) | ({} if privacy is None else {"privacy": privacy})


def deployed(whole: dict[str, Any], tmp_path: Path, change: Any = None, **rules: Any) -> tuple[Run, Secret, list[str]]:
    config, said = read_page(written(whole, tmp_path / "app")), list[str]()
    post = Secret(config, tmp_path / "clients", change=change)
    run = serve(
        config,
        post,
        Rules.build({"out": str(tmp_path / "runs"), "wait": 1.0, "timeout": 0.2, **rules}),
        None,
        said.append,
    )
    return run, post, said


# clipping and noise ---------------------------------------------------------------------------------------------


def test_the_largest_length_is_kept(tmp_path: Path) -> None:
    """Every update that travels is no longer than the bound, and what is shorter is as it was."""
    lengths, losses = [], []

    def noted(kind: str, client: int, letter: Payload, told: Payload) -> Payload:
        if kind == "train":
            lengths.append(told.tensors["up.delta"].norm().item())
            losses.append(told.numbers["loss"])
        return told

    run, _, said = deployed(tables(privacy={"clip": 0.05}), tmp_path, noted)
    assert said == [] and len(lengths) == 12 and max(lengths) <= 0.05 * (1 + 1e-6) and {*losses} == {0.0}
    assert run.finished and all(r["train_loss"] is None for r in run.rounds) and "0.05" in run.facts["privacy"]
    loose, _, _ = deployed(tables(privacy={"clip": 1e6}), tmp_path / "loose")
    assert same_model(loose.model, simulated(tables()).model)
    assert run.name != loose.name  # another bound is another run


def test_two_tensors_are_clipped_together() -> None:
    up = clipped({"a": torch.full((4,), 3.0), "b": torch.full((4,), 4.0)}, 5.0)
    assert math.hypot(*(t.norm().item() for t in up.values())) == pytest.approx(5.0) and up["a"][0] / up["b"][
        0
    ] == pytest.approx(0.75)


def test_an_update_that_is_too_long_is_refused(tmp_path: Path) -> None:
    longer = lambda kind, client, letter, told: (
        told._replace(tensors={n: 100 * t for n, t in told.tensors.items()}) if (kind, client) == ("train", 1) else told
    )
    run, _, said = deployed(tables(privacy={"clip": 0.05}, participation={"name": "full"}), tmp_path, longer)
    assert [r["absent"] for r in run.rounds] == [1] * 4 and all("at most 0.05 is allowed" in text for text in said)


def values(run: Run) -> torch.Tensor:
    return torch.cat([t.flatten() for t in run.model.values()]).double()


WIDE = {"name": "mlp", "hidden": [4096], "norm": "none"}


@pytest.mark.parametrize("where", ["server", "client"])
def test_noise_has_the_stated_deviation(where: str, tmp_path: Path) -> None:
    """Central: z · clip / m on the mean of m updates; local: z · clip on each, so 1/√m of that on the mean."""
    whole = tables(model=WIDE, rounds=1, participation={"name": "full"})
    whole["algorithm"] = {"name": "fedavg", "weighting": "uniform"}
    still, _, _ = deployed(whole | {"privacy": {"clip": 0.5}}, tmp_path / "still")
    runs = [
        deployed(whole | {"privacy": {"clip": 0.5, "noise": 2.0, "where": where}}, tmp_path / str(n))[0]
        for n in range(2)
    ]
    first, second = (values(run) - values(still) for run in runs)
    std = 2.0 * 0.5 / (5 if where == "server" else math.sqrt(5))
    count = len(first)
    assert count > 40_000
    for drawn in (first, second):
        assert abs(drawn.mean().item()) < 5 * std / math.sqrt(count)
        assert drawn.std().item() == pytest.approx(std, rel=5 / math.sqrt(2 * count))
        assert (drawn.abs() < std).double().mean().item() == pytest.approx(math.erf(math.sqrt(0.5)), abs=0.02)
    assert abs(torch.corrcoef(torch.stack([first, second]))[0, 1].item()) < 5 / math.sqrt(
        count
    )  # not from the run's seed


def test_noise_is_drawn_anew_each_time() -> None:
    assert not torch.equal(noisy(torch.zeros(9), 1.0), noisy(torch.zeros(9), 1.0))


def test_epsilon() -> None:
    """By hand: T = 100, z = 10, δ = 1e-5 gives ρ = 0.5 and ε = 0.5 + 2 √(0.5 ln 1e5)."""
    assert Privacy(clip=1.0, noise=10.0).epsilon(100) == pytest.approx(0.5 + 2 * math.sqrt(0.5 * math.log(1e5)))
    assert Privacy(clip=1.0).epsilon(1) == math.inf
    # it is an upper bound: the exact δ of the Gaussian mechanism at this ε is smaller
    z, phi = 1.5, lambda v: 0.5 * (1 + math.erf(v / math.sqrt(2)))
    eps = Privacy(clip=1.0, noise=z, delta=1e-3).epsilon(1)
    assert 0 < phi(1 / (2 * z) - eps * z) - math.exp(eps) * phi(-1 / (2 * z) - eps * z) < 1e-3


# which methods fit ----------------------------------------------------------------------------------------------


def fits(key: str, tmp_path: Path, **privacy: Any) -> bool:
    whole = page(VARIANTS[key]) | (
        {"algorithm": VARIANTS[key] | {"weighting": "uniform"}} if "noise" in privacy else {}
    )
    if whole["model"].get("norm") == "batch" and "noise" in privacy and key not in ("fedbn", "solo"):
        whole["model"] = PLAIN
    try:
        config = read_page(written(whole | {"privacy": privacy}, tmp_path))
        from askew.experiment.build import BuildCache

        server = house_of(config, BuildCache()).server
        check_fit(config.privacy, server, uploads(server))
    except ConfigError:
        return False
    return True


COLUMNS = {
    "secure aggregation": {"secure": True},
    "noise by the server": {"clip": 1.0, "noise": 1.0},
    "noise by the clients": {"clip": 1.0, "noise": 1.0, "where": "client"},
}


@pytest.mark.parametrize("key", list(algorithms))
def test_the_documented_methods_fit(key: str, tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "privacy.md").read_text()
    rows = {
        cells[0].strip(" `"): [cell.strip() == "yes" for cell in cells[1:4]]
        for cells in re.findall(r"^\|(.+?)\|(.+?)\|(.+?)\|(.+?)\|", text, re.M)
    }
    assert rows[key] == [fits(key, tmp_path, **privacy) for privacy in COLUMNS.values()]


@pytest.mark.parametrize(
    "key",
    ["feddpc", "fedexp", "fednova", "fedcm", "lossbias", "mgda", "fedmgdaplus", "fedvarp", "mifa", "fedpdc", "fedamd"],
)
def test_methods_that_look_at_each_upload_are_refused(key: str, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match="needs every client's upload, not their mean alone, which is all that secure aggregation leaves",
    ):
        deployed(page(VARIANTS[key]) | {"privacy": {"secure": True}}, tmp_path)


@pytest.mark.parametrize(
    ("key", "privacy", "more", "sentence"),
    [
        ("fedavg", {"noise": 1.0}, {}, "noise = 1 needs a largest length to be measured by; set clip"),
        ("fedavg", {"clip": 1.0, "noise": 1.0}, {}, 'set algorithm.weighting = "uniform"'),
        (
            "fedavg",
            {"clip": 1.0, "noise": 1.0, "where": "client"},
            {"model": {**PLAIN, "norm": "batch"}},
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
def test_what_does_not_fit_is_refused(
    key: str, privacy: dict[str, Any], more: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as refused:
        deployed(tables(key, privacy, **more), tmp_path)
    assert sentence in str(refused.value)


def test_a_privacy_that_is_no_table_is_refused(tmp_path: Path) -> None:
    path = written(tables(), tmp_path)
    path.write_text("privacy = true\n" + path.read_text())
    with pytest.raises(ConfigError, match="privacy is a table of settings"):
        read_page(path)
