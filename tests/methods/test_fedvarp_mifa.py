"""FedVARP and MIFA: the server remembers every client's last update."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import pytest
import torch
from textbook import (
    ALL,
    COHORTS,
    DECAYING,
    EVERY_TERM,
    PLAIN,
    SIZES,
    displacements,
    exactly,
    two_rounds_on_the_line,
    zeros,
)
from torch import Tensor

from askew.algorithms import MIFA, FedAvg, FedVARP
from askew.core.types import State
from askew.data.federation import LocalSettings
from problems import Problem, classification, client_row, close, make_server, skewed_samples, trained_server


@pytest.mark.parametrize("unit", ["gradient", "displacement"])
@pytest.mark.parametrize("cls", [FedVARP, MIFA])
def test_rounds_follow_the_formulas(noisy: Problem, cls: type[FedVARP], unit: str) -> None:
    """Under a decaying rate the unit decides whether a stale entry is replayed at today's rate or at its own."""
    server = make_server(cls(memory_unit=unit, server_scale=0.9), noisy, DECAYING)
    w, y = zeros(noisy), {i: zeros(noisy) for i in ALL}
    for t, ids in enumerate(COHORTS, 1):
        server.run_round(t, ids)
        rate = DECAYING.rate(t) if unit == "gradient" else 1.0
        new = dict(zip(ids, displacements(noisy, DECAYING, ids, t, w) / rate, strict=True))
        stale = sum(y.values()) / 4
        v = sum(new[i] - y[i] for i in ids) / len(ids) + stale if cls is FedVARP else sum((y | new).values()) / 4
        y, w = y | new, w + 0.9 * rate * v
        assert close(server.w, w) and all(close(client_row(server.memory, i)["y"], y[i]) for i in ALL)


def test_two_rounds_of_fedvarp_by_hand() -> None:
    # y = 1.9, −12.8 (downhill): mean −2.725. Then 2.9355 and 12.762: v = (1.0355 + 12.762) / 2 − 2.725 = 4.17375.
    assert two_rounds_on_the_line(FedVARP())[0] == exactly(-0.545, -0.127625)


def test_two_rounds_of_mifa_by_hand() -> None:
    # w = −0.2725; then 2.41775 and 11.781 beside −12.8 and 0: mean 0.3496875.
    assert two_rounds_on_the_line(MIFA())[0] == exactly(-0.2725, -0.23753125)


@pytest.mark.parametrize("cls", [FedVARP, MIFA])
def test_with_everybody_they_are_fedavg_in_every_round(noisy: Problem, cls: type[FedVARP]) -> None:
    one, other = make_server(cls(), noisy, EVERY_TERM), make_server(FedAvg(weighting="uniform"), noisy, EVERY_TERM)
    for t in (1, 2, 3):
        one.run_round(t, ALL)
        other.run_round(t, ALL)
        assert close(one.w, other.w)


def test_the_first_round_of_fedvarp_is_fedavg_and_that_of_mifa_is_shorter(noisy: Problem) -> None:
    methods = FedAvg(weighting="uniform"), FedVARP(), MIFA()
    fedavg, fedvarp, mifa = (trained_server(alg, noisy, EVERY_TERM, COHORTS[:1]).w for alg in methods)
    assert close(fedvarp, fedavg) and close(mifa, 3 / 4 * fedavg)
    assert FedVARP().weighting == MIFA().weighting == "uniform"


def third_step(cls: type[FedVARP], problem: Problem, ids: Sequence[int]) -> tuple[Tensor, State]:
    """The step of a third round in units of gradients, and the memory before it; the first two are FedVARP's."""
    server = trained_server(FedVARP(), problem, PLAIN, COHORTS[:2])
    server.alg, server.phases = cls(), cls().phases()
    w, memory = server.w, server.memory.read(ALL)
    server.run_round(3, ids)
    return (w - server.w) / PLAIN.lr, memory


def test_they_differ_by_the_participants_new_part(noisy: Problem) -> None:
    ids = [0, 2, 3]
    (one, memory), (other, _) = (third_step(cls, noisy, ids) for cls in (FedVARP, MIFA))
    w = trained_server(FedVARP(), noisy, PLAIN, COHORTS[:2]).w
    Delta = -displacements(noisy, PLAIN, ids, 3, w) / PLAIN.lr
    assert close(one - other, (1 / 3 - 1 / 4) * (Delta + memory["y"][ids]).sum(0))  # y points downhill


def test_fedvarp_is_unbiased(noisy: Problem) -> None:
    """The mean of its step over all cohorts of two is the step of everybody."""
    steps = [third_step(FedVARP, noisy, ids)[0] for ids in combinations(ALL, 2)]
    assert close(torch.stack(steps).mean(0), third_step(FedVARP, noisy, ALL)[0])
    mifa = torch.stack([third_step(MIFA, noisy, ids)[0] for ids in combinations(ALL, 2)]).mean(0)
    assert not close(mifa, third_step(MIFA, noisy, ALL)[0], 1e-3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_remembered_mean_is_exact_after_many_rounds(dtype: torch.dtype) -> None:
    problem = classification(skewed_samples(SIZES), dtype=dtype)
    pairs = [[t % 4, (t * t + t // 3 + 1) % 4] for t in range(60)]
    cohorts = [[a, b] for a, b in pairs if a != b]
    server = trained_server(FedVARP(), problem, LocalSettings(steps=1, batch=4, lr=0.2), cohorts)
    assert close(server.state["mean"], server.memory.read(ALL)["y"].double().mean(0), 1e-13)
