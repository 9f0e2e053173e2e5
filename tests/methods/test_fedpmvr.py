"""FedPMVR in all its readings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from textbook import (
    ALL,
    COHORTS,
    EVERY_TERM,
    LAST_LAYER,
    ONE_STEP,
    PLAIN,
    SIZES,
    displacements,
    exactly,
    full_gradient,
    two_rounds_on_the_line,
    vectors,
    weights_of,
    zeros,
)
from torch import Tensor

from askew.algorithms import FedAvg, FedPMVR
from askew.algorithms.fedpmvr import READINGS
from askew.core.algorithm import Gradient
from askew.core.space import Space
from askew.errors import ConfigError, ModelError
from askew.models.small import CNN, MLP
from problems import Problem, classification, close, make_server, scalars, skewed_samples, train_locally, trained_server


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
@pytest.mark.parametrize("reading", READINGS)
def test_rounds_follow_the_formulas(layered: Problem, reading: str, weighting: str) -> None:
    alg, alpha = FedPMVR(alpha=0.3, reading=reading, head=1, weighting=weighting), 0.3
    server, w = make_server(alg, layered, EVERY_TERM), zeros(layered)
    memory = {i: torch.zeros(2, dtype=torch.float64) for i in ALL}
    for t, ids in enumerate(COHORTS, 1):
        server.run_round(t, ids)
        ends = []
        for i in ids:
            m = [torch.zeros(2, dtype=torch.float64)]

            def direction(theta: Tensor, at: Gradient, m: list[Tensor] = m) -> Tensor:
                g = at(theta)
                m.append(alpha * m[-1] + (1 - alpha) * g[LAST_LAYER])
                if reading == "momentum_sgd":
                    return g.index_copy(0, LAST_LAYER, m[-1])
                return g.index_add(0, LAST_LAYER, m[-1]) if reading == "additive" else g

            end = train_locally(layered, EVERY_TERM, i, t, w, direction).theta
            delta, G = (end - w)[LAST_LAYER], full_gradient(layered, i, end)
            if reading == "displacement":
                end = end.index_copy(0, LAST_LAYER, end[LAST_LAYER] - alpha * delta)
            if reading in ("displacement_ema", "displacement_sum"):
                memory[i] = alpha * delta + (1 - alpha if reading == "displacement_ema" else 1) * memory[i]
                end = end.index_copy(0, LAST_LAYER, end[LAST_LAYER] - memory[i])
            if reading == "extra_gradient":
                end = (end - EVERY_TERM.rate(t) * G).index_copy(0, LAST_LAYER, end[LAST_LAYER] - alpha * G[LAST_LAYER])
            ends.append(end)
        w = weights_of(layered, ids, weighting) @ torch.stack(ends)
        assert close(server.w, w)


def test_two_rounds_by_hand() -> None:
    # α = ¼: w = −0.75 · 0.545 = −0.40875; then 0.75 · (0.2676625 + 1.22715) / 2 = 0.5605546875.
    assert two_rounds_on_the_line(FedPMVR(alpha=0.25))[0] == exactly(-0.40875, 0.1518046875)


@pytest.mark.parametrize(
    "reading", ["displacement", "displacement_ema", "displacement_sum", "momentum_sgd", "as_published"]
)
def test_without_strength_it_is_fedavg(layered: Problem, reading: str) -> None:
    alpha = 0.7 if reading == "as_published" else 0.0
    one = trained_server(FedPMVR(alpha=alpha, reading=reading, head=1), layered, EVERY_TERM, COHORTS)
    assert close(one.w, trained_server(FedAvg(weighting="uniform"), layered, EVERY_TERM, COHORTS).w)


def test_it_is_fedavg_with_a_server_factor_on_the_head(layered: Problem) -> None:
    server, w = make_server(FedPMVR(alpha=0.3, head=1), layered, EVERY_TERM), zeros(layered)
    factor = vectors([1.0, 1.0, 0.7, 0.7])[0]
    for t, ids in enumerate(COHORTS, 1):
        server.run_round(t, ids)
        w = w + factor * displacements(layered, EVERY_TERM, ids, t, w).mean(0)
        assert close(server.w, w, 1e-14)


def test_at_full_strength_the_head_is_frozen() -> None:
    server = trained_server(FedPMVR(alpha=1.0, head=1), classification(skewed_samples(SIZES)), EVERY_TERM, COHORTS)
    moved = (server.w - server.space.start).abs()
    assert moved[:20].min() > 0 and moved[20:].max() < 1e-15


def test_an_extra_gradient_with_the_rate_is_one_more_full_step(layered: Problem) -> None:
    server, w = make_server(FedPMVR(alpha=0.1, reading="extra_gradient", head=1), layered, PLAIN), zeros(layered)
    for t, ids in enumerate(COHORTS, 1):
        server.run_round(t, ids)
        ends = [train_locally(layered, PLAIN, i, t, w).theta for i in ids]
        w = torch.stack([end - 0.1 * full_gradient(layered, i, end) for end, i in zip(ends, ids, strict=True)]).mean(0)
        assert close(server.w, w)


def path_on_the_line(reading: str, rounds: int) -> list[float]:
    """The path of w where w* = 1, local response δ = −0.3 (w − 1), α = 0.1."""
    server, path = make_server(FedPMVR(alpha=0.1, reading=reading), scalars((1.0, 1.0)), ONE_STEP), []
    for t in range(1, rounds + 1):
        server.run_round(t, [0])
        path.append(float(server.w))
    return path


def test_the_displacement_reading_contracts() -> None:
    """By 1 − k (1 − α) a round."""
    assert path_on_the_line("displacement", 6) == exactly(*(1 - 0.73**t for t in range(1, 7)))


def test_with_a_running_mean_it_stops_short() -> None:
    """(w − w*, m) moves by the matrix [[1 − k (1 − α), −(1 − α)], [−αk, 1 − α]], of which one eigenvalue is 1."""
    k, alpha = 0.3, 0.1
    matrix = np.array([[1 - k * (1 - alpha), -(1 - alpha)], [-alpha * k, 1 - alpha]])
    assert np.isclose(np.linalg.eigvals(matrix), 1.0).sum() == 1
    path = path_on_the_line("displacement_ema", 120)
    assert path[-1] == pytest.approx(0.7297, abs=5e-5) and abs(path[-1] - path[-2]) < 1e-12


def test_with_a_running_sum_it_diverges() -> None:
    path = path_on_the_line("displacement_sum", 400)
    assert abs(path[-1]) > 10 * abs(path[200]) > 100 * abs(path[20])


@pytest.mark.parametrize(
    ("head", "unit", "from_place"), [(1, "layers", 20), (1, "tensors", 32), (2, "tensors", 20), (2, "layers", 0)]
)
def test_the_head_counts_layers_or_tensors(head: int, unit: str, from_place: int) -> None:
    problem = classification(skewed_samples(SIZES))
    frozen = trained_server(FedPMVR(alpha=1.0, head=head, head_unit=unit), problem, EVERY_TERM, COHORTS[:1])
    stays = (frozen.w - frozen.space.start).abs() < 1e-15
    assert stays.tolist() == [place >= from_place for place in range(35)]


def test_an_empty_head_is_refused() -> None:
    with pytest.raises(ConfigError, match="head must be ≥ 1"):
        FedPMVR(head=0)
    with pytest.raises(ConfigError, match="alpha must be"):
        FedPMVR(alpha=1.1)


def test_the_convolutions_alone_may_be_corrected() -> None:
    """What goes up is (1 − α) of the displacement there, and all of it elsewhere."""
    space = Space(CNN(width=2).module((1, 8, 8), 3), torch.float64)
    method = FedPMVR(alpha=0.25, corrected="convolutions")
    part = method.parts(space)["head"]
    convolutions = [name for name, shape in space.shapes.items() if len(shape) == 4 or name.startswith("conv")]
    assert len(part.indices) == sum(space.shapes[name].numel() for name in convolutions) > 0
    theta = torch.randn(space.P, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    client: Any = SimpleNamespace(w=space.start, parts={"head": part}, state={})
    sent, whole = space.split(method.finish(theta, client)[0]["delta"]), space.split(theta - space.start)
    for name in space.shapes:
        assert torch.allclose(sent[name], (0.75 if name in convolutions else 1.0) * whole[name], rtol=1e-14, atol=1e-14)
    with pytest.raises(ModelError, match="no convolutions"):
        method.parts(Space(MLP().module((8,), 3)))
