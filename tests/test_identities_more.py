"""Identities and guards of the references, server optimisers, memories and multi-objective methods, each a test of its own.

Beside them two rounds of each by pencil. `trained` (problems.py) writes local training out for least squares,
independently of the code under test.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call, grad

import askew
from askew.algorithms import (
    MGDA,
    MIFA,
    Centralised,
    FedAdagrad,
    FedAdam,
    FedAlign,
    FedAMD,
    FedAvg,
    FedAvgM,
    FedDyn,
    FedExP,
    FedGA,
    FedMGDAPlus,
    FedPDC,
    FedPMVR,
    FedPVR,
    FedSGD,
    FedSpeed,
    FedVARP,
    FedYogi,
    LossBias,
    Scaffold,
    Solo,
)
from askew.algorithms._simplex import min_norm_point, slsqp
from askew.algorithms.fedalign import top_singular_value
from askew.algorithms.fedpmvr import READINGS
from askew.core.rng import coin
from askew.core.space import Space
from askew.core.types import Batch, State
from askew.data.dataset import Dataset, Samples
from askew.data.federation import Federation, LocalSettings
from askew.data.partition import Iid
from askew.engine.evaluate import Evaluator, evaluate_clients
from askew.engine.server import Server
from askew.errors import ConfigError, ModelError
from askew.models.small import CNN, MLP, chain
from problems import (
    Halves,
    Problem,
    apart,
    close,
    everything,
    federation,
    labelled,
    least_squares,
    linear,
    play,
    played,
    quadratics,
    regression,
    row,
    same,
    scalars,
    serve,
    softmax,
    tastes,
    trained,
)
from textbook import (
    CLIENTS,
    COHORTS,
    EVERYBODY,
    PLAIN,
    RICH,
    SIZES,
    SLOWING,
    TWICE,
    by_pencil,
    cohort,
    exactly,
    gradient,
    nova,
    shares,
    zeros,
)

Gradient = Callable[[Tensor], Tensor]
ALL = [0, 1, 2, 3]
ONE = LocalSettings(batch=0, steps=1, lr=0.3)


@pytest.fixture
def layered() -> Problem:
    """The same with four weights in two layers of two."""
    return Problem(regression(SIZES, d=4).fed, Halves())


HEAD = torch.tensor([2, 3])  # the last layer's places in `layered`


def displacements(on: Problem, local: LocalSettings, ids: Sequence[int], round: int, x: Tensor) -> Tensor:
    """FedAvg's, [C, P]."""
    return torch.stack([trained(on, local, i, round, x)[0] - x for i in ids])


def rows(*vectors: Sequence[float]) -> Tensor:
    return torch.tensor(vectors, dtype=torch.float64)


# FedSGD ---------------------------------------------------------------------------------------------------------


def test_fedsgd_is_fedavg_with_one_epoch_and_one_batch(noisy: Problem) -> None:
    local = LocalSettings(epochs=1, batch=0, lr=0.3, momentum=0.6, weight_decay=0.03, clip=0.9, decay=0.9)
    one, other = played(FedSGD(), noisy, local, COHORTS), played(FedAvg(), noisy, local, COHORTS)
    assert close(one.w, other.w)


def test_fedsgd_takes_one_step_whatever_the_epochs(noisy: Problem) -> None:
    one, other = (played(FedSGD(), noisy, LocalSettings(epochs=e, batch=3, lr=0.3), COHORTS) for e in (1, 4))
    assert same(everything(one), everything(other))


def test_fedsgd_of_everybody_is_gradient_descent_on_the_pooled_loss(noisy: Problem) -> None:
    server, x = serve(FedSGD(), noisy, ONE), zeros(noisy)
    X, y = noisy.fed.pool.x, noisy.fed.pool.y[:, 0]
    for t in (1, 2, 3):
        server.run_round(t, ALL)
        x = x - 0.3 * X.T @ (X @ x - y) / len(y)
        assert close(server.w, x)


def test_fedsgd_in_chunks_is_the_whole_gradient(noisy: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = played(FedSGD(), noisy, ONE, COHORTS)
    monkeypatch.setattr("askew.data.federation.CHUNK", 2)
    assert close(played(FedSGD(), noisy, ONE, COHORTS).w, whole.w, 1e-13)


# SOLO and centralised -------------------------------------------------------------------------------------------


def test_rates_fall_by_their_formulas() -> None:
    rates = lambda **how: [LocalSettings(lr=0.4, **how).rate(t, 4) for t in (1, 2, 3, 4)]
    assert rates(decay=0.5) == exactly(0.4, 0.2, 0.1, 0.05)
    assert rates(schedule="linear") == exactly(0.4, 0.3, 0.2, 0.1)
    half = math.sqrt(2) / 2
    assert rates(schedule="cosine") == exactly(0.4, 0.2 * (1 + half), 0.2, 0.2 * (1 - half))
    with pytest.raises(ConfigError, match="decay is the factor of the exponential schedule"):
        LocalSettings(decay=0.9, schedule="cosine")


@pytest.mark.parametrize("schedule", ["exponential", "linear", "cosine"])
def test_solo_by_the_book(noisy: Problem, schedule: str) -> None:
    """Every client plain SGD from the common start with one momentum for all rounds; x stays, the rate falls over rounds."""
    local = LocalSettings(epochs=2, batch=3, lr=0.1, momentum=0.6, weight_decay=0.03, clip=0.9, schedule=schedule)
    server = serve(Solo(), noisy, local, rounds=len(COHORTS))
    own, v = ({i: zeros(noisy) for i in ALL} for _ in range(2))
    for t, ids in enumerate(COHORTS, 1):
        server.run_round(t, ids)
        now = LocalSettings(
            epochs=2, batch=3, lr=local.rate(t, len(COHORTS)), momentum=0.6, weight_decay=0.03, clip=0.9
        )
        for i in ids:
            own[i], v[i], _ = trained(noisy, now, i, t, own[i], v=v[i])
        for i in ALL:
            assert close(row(server.privates, i)["w"], own[i]) and close(row(server.clients, i)["momentum"], v[i])
        assert torch.equal(server.w, server.space.start)


def test_solo_with_one_client_is_centralised() -> None:
    on = labelled(tastes([13]), "batch")
    one, other = (played(alg, on, RICH, [[0]] * 4) for alg in (Solo(), Centralised()))
    assert same(everything(one), everything(other)) and not torch.equal(row(one.privates, 0)["w"], one.w)
    held = tastes([40])[0]
    common = {"data": (held.x.float(), held.y), "rounds": 3, "model": "softmax", "local": {"batch": 8, "momentum": 0.9}}
    solo = askew.run("solo", partition="iid", clients=1, cohort=1, **common)  # type: ignore[arg-type]
    pooled = askew.run("centralised", clients=7, cohort=3, **common)  # type: ignore[arg-type]
    told = lambda run: [{k: v for k, v in record.items() if k != "seconds"} for record in run.rounds]
    assert told(solo) == told(pooled) and pooled.federation["sizes"] == [len(held.y) - len(held.y) // 5]


def test_solo_reports_the_mean_over_clients_without_the_empty(noisy: Problem) -> None:
    held = [noisy.samples(i) for i in ALL]
    on = Problem(federation([*held, Samples(held[0].x[:0], held[0].y[:0])]), linear(3))
    server = played(Solo(), on, PLAIN, [[0, 1], [1, 3]])  # client 2 never trains: it still has the common start
    X, y = on.fed.test
    losses = [0.5 * (X @ row(server.privates, i)["w"] - y[:, 0]).square().mean() for i in ALL]
    task = server.engine.task  # type: ignore[attr-defined]
    score = evaluate_clients(
        Evaluator(task, on.fed, on.fed.test), server.w, server.buffers, server.private, server.privates
    )
    assert Solo().evaluates() == "clients" and float(score[1]) == pytest.approx(float(sum(losses)) / 4, rel=1e-12)


# server optimisers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dampening", [0.0, 0.4])
def test_fedavgm_by_the_book(noisy: Problem, dampening: float) -> None:
    server, x, M = serve(FedAvgM(beta=0.5, server_lr=0.8, dampening=dampening), noisy, RICH), zeros(noisy), zeros(noisy)
    for t, ids in enumerate(COHORTS, 1):
        server.run_round(t, ids)
        M = 0.5 * M + (1 - dampening) * (shares(noisy, ids) @ displacements(noisy, RICH, ids, t, x))
        x = x + 0.8 * M
        assert close(server.w, x) and close(server.state["M"], M)


def test_fedavgm_without_momentum_is_fedavg(noisy: Problem) -> None:
    one, other = played(FedAvgM(beta=0.0), noisy, RICH, COHORTS), played(FedAvg(), noisy, RICH, COHORTS)
    assert close(one.w, other.w) and FedAvgM().beta == 0.9


SECOND = {
    FedAdagrad: lambda V, D: V + D**2,
    FedAdam: lambda V, D: 0.9 * V + 0.1 * D**2,
    FedYogi: lambda V, D: V - 0.1 * D**2 * torch.sign(V - D**2),
}


@pytest.mark.parametrize("cls", SECOND)
def test_adaptive_server_optimisers_by_the_book(noisy: Problem, cls: type[FedAdam]) -> None:
    server = serve(cls(server_lr=0.3, beta1=0.5, beta2=0.9, tau=0.2), noisy, RICH)
    x, M, V = zeros(noisy), zeros(noisy), torch.full_like(zeros(noisy), 0.04)
    assert close(server.state["V"], V) and close(server.state["M"], M)
    for t, ids in enumerate(COHORTS, 1):
        server.run_round(t, ids)
        D = shares(noisy, ids) @ displacements(noisy, RICH, ids, t, x)
        M, V = 0.5 * M + 0.5 * D, SECOND[cls](V, D)
        x = x + 0.3 * M / (V.sqrt() + 0.2)
        assert close(server.w, x) and close(server.state["V"], V) and close(server.state["M"], M)


@pytest.mark.parametrize(
    ("cls", "factor"), [(FedAdagrad, 1 / 2), (FedYogi, 1 / 2), (FedAdam, 1 / (1 + math.sqrt(0.64)))]
)
def test_the_first_adaptive_step_with_a_large_tau(noisy: Problem, cls: type[FedAdam], factor: float) -> None:
    """V starts at τ², so with η_g = τ → ∞ it is D/2, and for Adam D/(1 + √β2)."""
    server = played(cls(beta1=0.0, beta2=0.64, tau=1e9, server_lr=1e9), noisy, PLAIN, COHORTS[:1])
    D = shares(noisy, COHORTS[0]) @ displacements(noisy, PLAIN, COHORTS[0], 1, zeros(noisy))
    assert close(server.w, factor * D)


def test_yogi_and_adam_agree_where_the_square_is_the_moment() -> None:
    V = rows([4.0, 4.0, 4.0])[0]
    adam, yogi = (cls(beta2=0.75).second(V, rows([2.0, 1.0, 3.0])[0]) for cls in (FedAdam, FedYogi))
    assert adam.tolist() == exactly(4.0, 3.25, 5.25) and yogi.tolist() == exactly(4.0, 3.75, 6.25)


def test_adaptive_optimisers_refuse_no_adaptivity() -> None:
    with pytest.raises(ConfigError, match="tau must be > 0"):
        FedAdam(tau=0.0)
    assert FedAdagrad().beta1 == 0.0 and (FedYogi().beta1, FedYogi().beta2, FedYogi().tau) == (0.9, 0.99, 1e-3)


# FedExP ---------------------------------------------------------------------------------------------------------


def extrapolated(alg: FedExP, delta: Tensor, **more: float) -> tuple[Tensor, float]:
    """The step from the origin and its factor, with equal weights."""
    x = torch.zeros(delta.shape[1], dtype=torch.float64)
    told = cohort([1 / len(delta)] * len(delta), **more)  # type: ignore[arg-type]
    new, state = alg.aggregate(x, {"delta": delta}, told, {"last": x, "eta_g": torch.ones((), dtype=torch.float64)})
    return new, float(state["eta_g"])


@pytest.mark.parametrize("times_m", [False, True])
def test_fedexp_by_the_book(noisy: Problem, times_m: bool) -> None:
    """ε shrinks with the squared rate."""
    server, x = serve(FedExP(eps=0.003, eps_times_m=times_m), noisy, SLOWING), zeros(noisy)
    for t, ids in enumerate(COHORTS, 1):
        record = server.run_round(t, ids)
        p, delta = shares(noisy, ids), displacements(noisy, SLOWING, ids, t, x)
        mean, eps = p @ delta, 0.003 * 0.7 ** (2 * (t - 1)) * (len(ids) if times_m else 1)
        eta = max(1.0, float(p @ delta.square().sum(1) / (2 * (mean @ mean + eps))))
        x = x + eta * mean
        assert close(server.w, x) and record["eta_g"] == pytest.approx(eta, rel=1e-12)


def test_fedexp_of_one_or_of_identical_updates_is_fedavg() -> None:
    """The quotient is 1/2 there, so the factor is 1."""
    for m in (1, 3):
        new, eta = extrapolated(FedExP(eps=0.0), rows(*[[3.0, 4.0]] * m))
        assert eta == 1.0 and new.tolist() == exactly(3.0, 4.0)


@pytest.mark.parametrize("m", [2, 3, 6])
def test_fedexp_of_orthogonal_updates_is_half_their_number(m: int) -> None:
    assert extrapolated(FedExP(eps=0.0), 5 * torch.eye(m, dtype=torch.float64))[1] == pytest.approx(
        max(1.0, m / 2), rel=1e-14
    )


@given(
    st.lists(st.lists(st.floats(-9, 9), min_size=2, max_size=2), min_size=1, max_size=6), st.sampled_from([0.0, 0.01])
)
@settings(max_examples=60, deadline=None)
def test_fedexp_never_shortens(delta: list[list[float]], eps: float) -> None:
    new, eta = extrapolated(FedExP(eps=eps), rows(*delta))
    assert eta >= 1.0 and bool(torch.isfinite(new).all())


def test_fedexp_without_a_mean_and_without_eps_stays() -> None:
    new, eta = extrapolated(FedExP(eps=0.0), rows([1.0, 2.0], [-1.0, -2.0]))
    assert eta == 1.0 and new.tolist() == [0.0, 0.0]


def test_fedexp_eps_shrinks_with_the_squared_rate() -> None:
    delta = rows([3.0, 0.0], [0.0, 1.0])  # mean square 5, squared mean 5/2
    for lr, eps in ((0.1, 0.1), (0.05, 0.025)):
        assert extrapolated(FedExP(eps=0.1), delta, lr=lr)[1] == pytest.approx(max(1.0, 5 / (2 * (2.5 + eps))))
    wide = rows([3.0, 0.0], [0.0, 3.0], [0.0, -3.0])  # mean square 9, squared mean 1
    assert extrapolated(FedExP(eps=0.4), wide, lr=0.05)[1] == pytest.approx(9 / (2 * 1.1))
    assert extrapolated(FedExP(eps=0.4, eps_times_m=True), wide)[1] == pytest.approx(9 / (2 * 2.2))


def test_fedexp_evaluates_the_last_iterate_or_the_mean_of_two(noisy: Problem) -> None:
    for average in (False, True):
        server = serve(FedExP(evaluate_average_of_last_two=average), noisy, PLAIN)
        play(server, COHORTS[:2])
        before = server.w
        server.run_round(3, COHORTS[2])
        (model,) = server.alg.models(server.w, server.state).values()
        assert close(model, (server.w + before) / 2 if average else server.w)


# FedPVR ---------------------------------------------------------------------------------------------------------


def test_fedpvr_by_the_book(layered: Problem) -> None:
    """Variates and no momentum on the last layer, momentum and no variates on the first; K_i divides."""
    server, x, c = serve(FedPVR(head=1), layered, RICH), zeros(layered), torch.zeros(2, dtype=torch.float64)
    own, mask = {i: c.clone() for i in ALL}, rows([1.0, 1.0, 0.0, 0.0])[0]
    for t, ids in enumerate(COHORTS, 1):
        server.run_round(t, ids)
        step, change = zeros(layered), torch.zeros_like(c)
        for i in ids:
            add = zeros(layered).index_copy(0, HEAD, c - own[i])
            end, _, raw = trained(
                layered, RICH, i, t, x, lambda theta, at, add=add: at(theta) + add, rho=RICH.momentum * mask
            )
            new = own[i] - c + (x - end)[HEAD] / (len(raw) * RICH.rate(t))
            step, change, own[i] = step + (end - x) / len(ids), change + (new - own[i]) / 4, new
        x, c = x + step, c + change
        assert close(server.w, x) and close(server.state["c"], c)
        assert all(close(row(server.clients, i)["c"], own[i]) for i in ALL)


def test_fedpvr_with_a_full_mask_is_scaffold_without_momentum() -> None:
    on, local = (
        labelled(tastes(SIZES)),
        LocalSettings(epochs=2, batch=3, lr=0.1, weight_decay=0.03, clip=0.9, decay=0.9),
    )
    one, other = played(FedPVR(head=2), on, local, COHORTS), played(Scaffold(), on, local, COHORTS)
    assert close(one.w, other.w) and close(one.state["c"], other.state["c"])
    assert not close(played(FedPVR(head=1), on, local, COHORTS).w, other.w, 1e-6)


def test_fedpvr_with_an_empty_mask_is_fedavg() -> None:
    on = labelled(tastes(SIZES))
    server = played(FedPVR(head=0), on, RICH, COHORTS)
    assert close(server.w, played(FedAvg(weighting="uniform"), on, RICH, COHORTS).w)
    assert server.state["c"].numel() == 0


def test_fedpvr_keeps_and_sends_the_masked_numbers_alone() -> None:
    server = serve(FedPVR(head=1), labelled(tastes(SIZES)), PLAIN)
    (record,) = play(server, [[0, 1]])
    P, v = 4 * 4 + 4 + 4 * 3 + 3, 4 * 3 + 3
    assert row(server.clients, 0)["c"].shape == server.state["c"].shape == (v,)
    assert record["bytes_down"] == record["bytes_up"] == 2 * 8 * (P + v)


# FedVARP and MIFA -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", ["gradient", "displacement"])
@pytest.mark.parametrize("cls", [FedVARP, MIFA])
def test_memories_by_the_book(noisy: Problem, cls: type[FedVARP], unit: str) -> None:
    """Under a decaying rate the unit decides whether a stale entry is replayed at today's rate or at its own."""
    server, x, y = (
        serve(cls(memory_unit=unit, server_scale=0.9), noisy, SLOWING),
        zeros(noisy),
        {i: zeros(noisy) for i in ALL},
    )
    for t, ids in enumerate(COHORTS, 1):
        server.run_round(t, ids)
        rate = SLOWING.rate(t) if unit == "gradient" else 1.0
        new = dict(zip(ids, displacements(noisy, SLOWING, ids, t, x) / rate, strict=True))
        stale = sum(y.values()) / 4
        v = sum(new[i] - y[i] for i in ids) / len(ids) + stale if cls is FedVARP else sum((y | new).values()) / 4
        y, x = y | new, x + 0.9 * rate * v
        assert close(server.w, x) and all(close(row(server.memory, i)["y"], y[i]) for i in ALL)


@pytest.mark.parametrize("cls", [FedVARP, MIFA])
def test_memories_of_everybody_are_fedavg_in_every_round(noisy: Problem, cls: type[FedVARP]) -> None:
    one, other = serve(cls(), noisy, RICH), serve(FedAvg(weighting="uniform"), noisy, RICH)
    for t in (1, 2, 3):
        one.run_round(t, ALL), other.run_round(t, ALL)
        assert close(one.w, other.w)


def test_fedvarp_begins_as_fedavg_and_mifa_shorter(noisy: Problem) -> None:
    fedavg, fedvarp, mifa = (
        played(alg, noisy, RICH, COHORTS[:1]).w for alg in (FedAvg(weighting="uniform"), FedVARP(), MIFA())
    )
    assert close(fedvarp, fedavg) and close(mifa, 3 / 4 * fedavg)
    assert FedVARP().weighting == MIFA().weighting == "uniform"


def stepped(cls: type[FedVARP], on: Problem, ids: Sequence[int]) -> tuple[Tensor, State]:
    """The step of a third round in units of gradients, and the memory before it; the first two are FedVARP's."""
    server = played(FedVARP(), on, PLAIN, COHORTS[:2])
    server.alg, server.phases = cls(), cls().phases()
    x, memory = server.w, server.memory.read(ALL)
    server.run_round(3, ids)
    return (x - server.w) / PLAIN.lr, memory


def test_fedvarp_minus_mifa_is_the_surprise(noisy: Problem) -> None:
    ids = [0, 2, 3]
    (one, memory), (other, _) = (stepped(cls, noisy, ids) for cls in (FedVARP, MIFA))
    x = played(FedVARP(), noisy, PLAIN, COHORTS[:2]).w
    Delta = -displacements(noisy, PLAIN, ids, 3, x) / PLAIN.lr
    assert close(one - other, (1 / 3 - 1 / 4) * (Delta + memory["y"][ids]).sum(0))  # y points downhill


def test_fedvarp_is_unbiased(noisy: Problem) -> None:
    """The mean of its step over all cohorts of two is the step of everybody."""
    steps = [stepped(FedVARP, noisy, ids)[0] for ids in combinations(ALL, 2)]
    assert close(torch.stack(steps).mean(0), stepped(FedVARP, noisy, ALL)[0])
    mifa = torch.stack([stepped(MIFA, noisy, ids)[0] for ids in combinations(ALL, 2)]).mean(0)
    assert not close(mifa, stepped(MIFA, noisy, ALL)[0], 1e-3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_remembered_mean_is_exact_after_many_rounds(dtype: torch.dtype) -> None:
    on = labelled(tastes(SIZES), dtype=dtype)
    server = played(
        FedVARP(),
        on,
        LocalSettings(steps=1, batch=4, lr=0.2),
        [[t % 4, (t * t + t // 3 + 1) % 4] for t in range(60) if t % 4 != (t * t + t // 3 + 1) % 4],
    )
    assert close(server.state["mean"], server.memory.read(ALL)["y"].double().mean(0), 1e-13)


# FedGA ----------------------------------------------------------------------------------------------------------


def test_fedga_exact_by_the_book(noisy: Problem) -> None:
    server, x = serve(FedGA(beta=0.4, server_scale=0.8), noisy, RICH), zeros(noisy)
    for t, ids in enumerate(COHORTS, 1):
        server.run_round(t, ids)
        G = torch.stack([gradient(noisy, i, x) for i in ids])
        ends = [trained(noisy, RICH, i, t, x + 0.4 * (G_i - G.mean(0)))[0] for G_i, i in zip(G, ids, strict=True)]
        x = x + 0.8 * (torch.stack(ends).mean(0) - x)
        assert close(server.w, x)


def test_fedga_memory_by_the_book(noisy: Problem) -> None:
    """Stored gradients are measured from the displaced start and per unit of the path's length; the newcomers start at w."""
    server, x, mean = serve(FedGA(beta=0.4, form="memory"), noisy, RICH), zeros(noisy), zeros(noisy)
    G: dict[int, Tensor] = {}
    for t, ids in enumerate(COHORTS, 1):
        server.run_round(t, ids)
        step, update = zeros(noisy), zeros(noisy)
        for i in ids:
            start = x + 0.4 * (G[i] - mean) if i in G else x
            end, _, raw = trained(noisy, RICH, i, t, start)
            length = nova(len(raw), RICH.momentum) * RICH.rate(t)
            G[i] = (start - end) / length
            step, update = step + (end - x) / len(ids), update + (x - end) / length / len(ids)
        x, mean = x + step, update
        assert close(server.w, x) and close(server.state["g"], mean)
        assert all(close(row(server.clients, i)["g"], G[i]) for i in G)


@pytest.mark.parametrize("form", ["exact", "memory"])
def test_fedga_without_displacement_is_fedavg(noisy: Problem, form: str) -> None:
    one, other = (
        played(FedGA(beta=0.0, form=form), noisy, RICH, COHORTS),
        played(FedAvg(weighting="uniform"), noisy, RICH, COHORTS),
    )
    assert close(one.w, other.w)


def test_fedga_displacements_sum_to_zero(noisy: Problem) -> None:
    """So steps of no length leave w."""
    server = serve(FedGA(beta=5.0), noisy, LocalSettings(lr=1e-200))
    server.w = rows([1.0, -2.0, 3.0])[0]
    before = server.w
    server.run_round(1, [0, 1, 3])
    assert close(server.w, before, 1e-14)


def test_fedga_remembering_begins_as_fedavg(noisy: Problem) -> None:
    one = played(FedGA(beta=3.0, form="memory"), noisy, RICH, COHORTS[:1])
    assert torch.equal(one.w, played(FedAvg(weighting="uniform"), noisy, RICH, COHORTS[:1]).w)


def test_fedga_steps_down_the_variance_of_gradients() -> None:
    """The mean first gradient is ∇f + β ∇(½ mean ‖G_i − Ḡ‖²) up to β²: halving β quarters the rest."""
    on = softmax(SIZES)
    held = [on.samples(i) for i in ALL]

    def loss(i: int, w: Tensor) -> Tensor:
        return F.cross_entropy(held[i].x @ w[:12].view(3, 4).T + w[12:], held[i].y)

    def half_variance(w: Tensor) -> Tensor:
        G = torch.stack([grad(lambda u, i=i: loss(i, u))(w) for i in ALL])
        return 0.5 * (G - G.mean(0)).square().sum(1).mean()

    rest = []
    for beta in (0.02, 0.01):
        server = serve(FedGA(beta=beta), on, ONE)
        x = server.w = server.space.start + 0.3
        server.run_round(1, ALL)
        mean = torch.stack([grad(lambda u, i=i: loss(i, u))(x) for i in ALL]).mean(0)
        rest.append(float(((x - server.w) / 0.3 - mean - beta * grad(half_variance)(x)).norm()))
    assert rest[0] < 1e-3 and rest[0] / rest[1] == pytest.approx(4, rel=0.1)


# FedPMVR --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
@pytest.mark.parametrize("reading", READINGS)
def test_fedpmvr_by_the_book(layered: Problem, reading: str, weighting: str) -> None:
    server, x, alpha = (
        serve(FedPMVR(alpha=0.3, reading=reading, head=1, weighting=weighting), layered, RICH),
        zeros(layered),
        0.3,
    )
    kept = {i: torch.zeros(2, dtype=torch.float64) for i in ALL}
    for t, ids in enumerate(COHORTS, 1):
        server.run_round(t, ids)
        ends = []
        for i in ids:
            m = [torch.zeros(2, dtype=torch.float64)]

            def direction(theta: Tensor, at: Gradient, m: list[Tensor] = m) -> Tensor:
                g = at(theta)
                m.append(alpha * m[-1] + (1 - alpha) * g[HEAD])
                return {"momentum_sgd": g.index_copy(0, HEAD, m[-1]), "additive": g.index_add(0, HEAD, m[-1])}.get(
                    reading, g
                )

            end = trained(layered, RICH, i, t, x, direction)[0]
            delta, G = (end - x)[HEAD], gradient(layered, i, end)
            if reading == "displacement":
                end = end.index_copy(0, HEAD, end[HEAD] - alpha * delta)
            if reading in ("displacement_ema", "displacement_sum"):
                kept[i] = alpha * delta + (1 - alpha if reading == "displacement_ema" else 1) * kept[i]
                end = end.index_copy(0, HEAD, end[HEAD] - kept[i])
            if reading == "extra_gradient":
                end = (end - RICH.rate(t) * G).index_copy(0, HEAD, end[HEAD] - alpha * G[HEAD])
            ends.append(end)
        p = (
            shares(layered, ids)
            if weighting == "samples"
            else torch.full((len(ids),), 1 / len(ids), dtype=torch.float64)
        )
        x = p @ torch.stack(ends)
        assert close(server.w, x)


@pytest.mark.parametrize(
    "reading", ["displacement", "displacement_ema", "displacement_sum", "momentum_sgd", "as_published"]
)
def test_fedpmvr_without_strength_is_fedavg(layered: Problem, reading: str) -> None:
    alpha = 0.7 if reading == "as_published" else 0.0
    one = played(FedPMVR(alpha=alpha, reading=reading, head=1), layered, RICH, COHORTS)
    assert close(one.w, played(FedAvg(weighting="uniform"), layered, RICH, COHORTS).w)


def test_fedpmvr_is_fedavg_with_a_server_factor_on_the_head(layered: Problem) -> None:
    server, x = serve(FedPMVR(alpha=0.3, head=1), layered, RICH), zeros(layered)
    factor = rows([1.0, 1.0, 0.7, 0.7])[0]
    for t, ids in enumerate(COHORTS, 1):
        server.run_round(t, ids)
        x = x + factor * displacements(layered, RICH, ids, t, x).mean(0)
        assert close(server.w, x, 1e-14)


def test_fedpmvr_at_full_strength_freezes_the_head() -> None:
    server = played(FedPMVR(alpha=1.0, head=1), labelled(tastes(SIZES)), RICH, COHORTS)
    moved = (server.w - server.space.start).abs()
    assert moved[:20].min() > 0 and moved[20:].max() < 1e-15


def test_fedpmvr_extra_gradient_with_the_rate_is_one_more_full_step(layered: Problem) -> None:
    server, x = serve(FedPMVR(alpha=0.1, reading="extra_gradient", head=1), layered, PLAIN), zeros(layered)
    for t, ids in enumerate(COHORTS, 1):
        server.run_round(t, ids)
        ends = [trained(layered, PLAIN, i, t, x)[0] for i in ids]
        x = torch.stack([end - 0.1 * gradient(layered, i, end) for end, i in zip(ends, ids, strict=True)]).mean(0)
        assert close(server.w, x)


def on_the_line(reading: str, rounds: int) -> list[float]:
    """w* = 1, local response δ = −0.3 (w − 1), α = 0.1."""
    server, xs = serve(FedPMVR(alpha=0.1, reading=reading), scalars((1.0, 1.0)), ONE), []
    for t in range(1, rounds + 1):
        server.run_round(t, [0])
        xs.append(float(server.w))
    return xs


def test_fedpmvr_displacement_contracts() -> None:
    """By 1 − k (1 − α) a round."""
    assert on_the_line("displacement", 6) == exactly(*(1 - 0.73**t for t in range(1, 7)))


def test_fedpmvr_with_a_kept_mean_stops_short() -> None:
    """The matrix of (w − w*, m) is [[1 − k (1 − α), −(1 − α)], [−αk, 1 − α]]: its eigenvalues are 1 and −0.37 + …, so it halts."""
    k, alpha = 0.3, 0.1
    matrix = np.array([[1 - k * (1 - alpha), -(1 - alpha)], [-alpha * k, 1 - alpha]])
    assert np.isclose(np.linalg.eigvals(matrix), 1.0).sum() == 1
    xs = on_the_line("displacement_ema", 120)
    assert xs[-1] == pytest.approx(0.7297, abs=5e-5) and abs(xs[-1] - xs[-2]) < 1e-12


def test_fedpmvr_with_a_kept_sum_diverges() -> None:
    xs = on_the_line("displacement_sum", 400)
    assert abs(xs[-1]) > 10 * abs(xs[200]) > 100 * abs(xs[20])


@pytest.mark.parametrize(
    ("head", "unit", "from_place"), [(1, "layers", 20), (1, "tensors", 32), (2, "tensors", 20), (2, "layers", 0)]
)
def test_fedpmvr_head_counts_layers_or_tensors(head: int, unit: str, from_place: int) -> None:
    on = labelled(tastes(SIZES))
    frozen = played(FedPMVR(alpha=1.0, head=head, head_unit=unit), on, RICH, COHORTS[:1])
    stays = (frozen.w - frozen.space.start).abs() < 1e-15
    assert stays.tolist() == [place >= from_place for place in range(35)]


def test_fedpmvr_refuses_an_empty_head() -> None:
    with pytest.raises(ConfigError, match="head must be ≥ 1"):
        FedPMVR(head=0)
    with pytest.raises(ConfigError, match="alpha must be"):
        FedPMVR(alpha=1.1)


# FedPDC ---------------------------------------------------------------------------------------------------------


def score(w: Tensor, buffers: Tensor) -> Tensor:
    """Stands in for the accuracy on a public set."""
    return torch.stack([1 / (1 + w @ w), w.new_zeros(())])


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize(("penalty", "lam"), [("literal", 10.0), ("prox", 2.0), ("prox", 1e5), ("loss_scale", 0.7)])
def test_fedpdc_by_the_book(noisy: Problem, penalty: str, lam: float, adaptive: bool) -> None:
    """a_i = 1 for those who were absent in the round before; η λ (1 − a) ≤ 1 in prox."""
    server, x = serve(FedPDC(penalty=penalty, lam=lam, adaptive=adaptive), noisy, RICH), zeros(noisy)
    server.evaluate = score
    last: dict[int, float] = {}
    for t, ids in enumerate([[0, 1, 3], [1, 2], [0, 1, 2, 3], [0, 1, 2, 3]], 1):
        server.run_round(t, ids)
        ends = []
        for i in ids:
            factor = (0.5 * t if adaptive else lam) * (1 - last.get(i, 1.0))
            pull, times = (
                (min(factor, 1 / RICH.rate(t)), 1.0)
                if penalty == "prox"
                else (0.0, 1 + factor * (penalty == "loss_scale"))
            )
            ends.append(
                trained(noisy, RICH, i, t, x, lambda theta, at, p=pull, s=times, x=x: s * at(theta) + p * (theta - x))[
                    0
                ]
            )
        last = {i: float(score(end, end)[0]) for i, end in zip(ids, ends, strict=True)}
        a = torch.tensor(list(last.values()), dtype=torch.float64)
        x = a / a.sum() @ torch.stack(ends)
        assert close(server.w, x)


@pytest.mark.parametrize("accuracy", [0.4, 0.0])
def test_fedpdc_with_equal_accuracies_is_uniform_fedavg(noisy: Problem, accuracy: float) -> None:
    """All zero is equal as well."""
    server = serve(FedPDC(), noisy, RICH)
    server.evaluate = lambda w, buffers: torch.tensor([accuracy, 0.0])
    play(server, COHORTS)
    assert close(server.w, played(FedAvg(weighting="uniform"), noisy, RICH, COHORTS).w)


def test_fedpdc_penalty_changes_the_logged_loss_alone() -> None:
    on = labelled(tastes(SIZES))
    servers = [serve(alg, on, RICH) for alg in (FedPDC(lam=0.0), FedPDC(lam=10.0), FedPDC(adaptive=True))]
    logs = [[r["train_loss"] for r in play(server, EVERYBODY * 3)] for server in servers]
    assert all(same(everything(server), everything(servers[0])) for server in servers[1:])
    assert logs[0][0] == logs[1][0] == logs[2][0] and logs[0][1] < logs[2][1] < logs[1][1]


def test_fedpdc_weighs_by_the_accuracy_on_the_public_set() -> None:
    on = labelled(tastes(SIZES))
    server = serve(FedPDC(), on, RICH)
    play(server, EVERYBODY)
    models = displaced(on, RICH, ALL, 1, server.space.start)
    assert server.fed.public is not None
    X, y = server.fed.public
    forward = lambda w: functional_call(on.module, server.space.split(w), (X,))[0]
    a = torch.tensor([float((forward(w).argmax(1) == y).double().mean()) for w in models])
    assert len(set(a.tolist())) > 1 and close(server.w, (a / a.sum()).double() @ models, 1e-7)
    assert close(server.memory.read(ALL)["a"], a.double(), 1e-7) and server.memory.read(ALL)["at"].tolist() == [1.0] * 4


def displaced(on: Problem, local: LocalSettings, ids: Sequence[int], round: int, x: Tensor) -> Tensor:
    """The models that FedAvg's clients send from x."""
    models = []
    for i in ids:
        server = serve(FedAvg(), on, local)
        server.w = x
        server.run_round(round, [i])
        models.append(server.w)
    return torch.stack(models)


def test_the_public_set_is_nobodys_and_balanced() -> None:
    numbers = torch.arange(300.0)[:, None]
    labels = torch.cat([torch.full((200,), 0), torch.full((70,), 1), torch.full((30,), 2)])
    test = Samples(numbers[:5] + 1000, labels[:5])
    fed = Federation(Dataset(Samples(numbers, labels), test, 3), Iid(clients=7), 0, needs=("public",))
    assert fed.public is not None and len(fed.public.y) == 30
    assert torch.bincount(fed.public.y).tolist() == [10, 10, 10]
    held = {float(v) for i in range(7) for v in fed.pool.x[fed.gather([i])[1][0]]}
    public = {float(v) for v in fed.public.x}
    assert not public & held and not public & {float(v) for v in fed.test.x} and len(public | held) == 300
    with pytest.raises(ConfigError, match=r"partition\.public = 0"):
        Federation(Dataset(Samples(numbers, labels), test, 3), Iid(clients=7, public=0), 0, needs=("public",))


def test_public_data_of_a_regression_are_refused() -> None:
    x = torch.randn(40, 3)
    with pytest.raises(ConfigError, match="a regression has no classes"):
        askew.run("fedpdc", data=(x, x.sum(1, keepdim=True)), clients=4, cohort=2, rounds=1)


# loss-biased FedAvg ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("measure", ["final", "mean_over_steps"])
def test_lossbias_by_the_book(measure: str) -> None:
    """The loss on samples that are never trained on; a client with one sample tells its training loss."""
    on, looks = regression([5, 8, 1, 6]), ["validation"]
    server, x = serve(LossBias(measure=measure), on, RICH), zeros(on)
    own = Problem(server.fed, on.module)
    for t, ids in enumerate(COHORTS, 1):
        server.run_round(t, ids)
        ends, losses = [], []
        for i in ids:
            plan = server.fed.plan([i], t, RICH, looks)
            X, y = (v[plan.looks["validation"][0].places] for v in server.fed.pool)
            seen: list[float] = []
            told = lambda theta, X=X, y=y: float(0.5 * (X @ theta - y[:, 0]).square().mean())
            path = lambda theta, at, seen=seen, told=told: (seen.append(told(theta)), at(theta))[1]
            end = trained(own, RICH, i, t, x, path)[0]
            seen.append(told(end))
            ends.append(end)
            losses.append(seen[-1] if measure == "final" else sum(seen[1:]) / (len(seen) - 1))
        ell = torch.tensor(losses, dtype=torch.float64)
        x = ell / ell.sum() @ torch.stack(ends)
        assert close(server.w, x)


def test_validation_parts_are_never_trained_on_and_always_the_same() -> None:
    fed = serve(LossBias(), regression([5, 12, 1, 6]), RICH).fed
    for i, (train, held) in enumerate([(4, 1), (10, 2), (1, 0), (5, 1)]):
        own = set(fed.gather([i])[1][0].tolist())
        seen = []
        for t in (1, 2, 3):
            plan = fed.plan([i], t, RICH, ["validation"])
            trained_on, looked_at = (set(work.places.tolist()) for work in (plan.train[0], plan.looks["validation"][0]))
            assert len(trained_on) == train == fed.sizes[i] and trained_on | looked_at == own
            assert (len(looked_at), trained_on & looked_at) == ((held, set()) if held else (1, own))
            seen.append(looked_at)
        assert seen[0] == seen[1] == seen[2]


def test_lossbias_weights() -> None:
    weigh = lambda *losses: LossBias().weights({"validation": torch.tensor(losses)}, cohort([1.0])).tolist()
    assert weigh(2.0, 2.0) == [0.5, 0.5] == weigh(0.0, 0.0)
    assert weigh(1.0, 3.0) == [0.25, 0.75] == weigh(100.0, 300.0)
    assert weigh(0.0, 3.0) == [0.0, 1.0]


def test_lossbias_of_equal_losses_is_uniform_fedavg() -> None:
    """Everybody holds the same sample many times, in different numbers."""
    on = scalars((1.0, 2.0), (1.0, 2.0), (1.0, 2.0), copies=[3, 6, 9])
    server = played(LossBias(), on, TWICE, [[0, 1, 2]] * 2)
    assert close(server.w, played(FedAvg(weighting="uniform"), on, TWICE, [[0, 1, 2]] * 2).w)


# MGDA -----------------------------------------------------------------------------------------------------------


@st.composite
def vectors(draw: st.DrawFn) -> np.ndarray:
    """Unit vectors, up to a hundred, in few or many dimensions; some repeated, some opposite."""
    m, d, seed = draw(st.integers(1, 100)), draw(st.integers(1, 120)), draw(st.integers(0, 10**6))
    rng = np.random.default_rng(seed)
    u = rng.normal(size=(m, d)) + draw(st.sampled_from([0.0, 0.5, 3.0])) * rng.normal(size=d)
    if draw(st.booleans()):
        u[rng.integers(m, size=m // 2)] = u[0]
    if draw(st.booleans()):
        u[-1] = -u[0]
    return u / np.linalg.norm(u, axis=1, keepdims=True)


@given(vectors())
@settings(max_examples=60, deadline=None)
def test_the_shortest_point_is_optimal(u: np.ndarray) -> None:
    """⟨u*, u_i⟩ ≥ ‖u*‖² for all, with equality where α_i > 0; not longer than the mean."""
    alpha = min_norm_point(u @ u.T)
    point = alpha @ u
    products, length = u @ point, point @ point
    assert alpha.min() >= 0 and abs(alpha.sum() - 1) < 1e-12
    assert products.min() > length - 1e-9
    assert np.abs(products[alpha > 1e-9] - length).max() < 1e-8
    assert length <= np.square(u.mean(0)).sum() + 1e-12


def test_the_shortest_point_among_vectors_of_many_lengths_is_optimal() -> None:
    """Many points of few dimensions, some of them a hundred times longer: where several at once would leave the corral."""
    for seed in range(300):
        rng = np.random.default_rng(seed)
        m, d = rng.integers(3, 40), rng.integers(1, 12)
        u = rng.normal(size=(m, d)) * rng.lognormal(0, 1 + seed % 2, size=(m, 1)) + (1, 3, 10)[seed % 3] * rng.normal(
            size=d
        )
        point = min_norm_point(u @ u.T) @ u
        assert (u @ point).min() > point @ point - 1e-12 * np.square(u).sum(1).max()


@given(vectors())
@settings(max_examples=25, deadline=None)
def test_both_solvers_find_the_same_point(u: np.ndarray) -> None:
    gram = u @ u.T
    one, other = min_norm_point(gram) @ u, slsqp(gram) @ u
    assert abs(one @ one - other @ other) < 1e-8
    assert np.linalg.norm(one - other) < 1e-4  # squares that differ by ε allow points that differ by √ε


@given(st.integers(0, 10**6), st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_the_shortest_of_two_in_closed_form(seed: int, d: int) -> None:
    a, b = np.random.default_rng(seed).normal(size=(2, d))
    alpha = np.clip((b - a) @ b / ((a - b) @ (a - b)), 0, 1)
    u = np.stack([a, b])
    assert min_norm_point(u @ u.T) == pytest.approx([alpha, 1 - alpha], abs=1e-10)


def descended(alg: MGDA, gradients: Tensor, x: Tensor | None = None) -> tuple[Tensor, dict[str, float]]:
    """The server's step, from the origin if nothing is said."""
    x = torch.zeros(gradients.shape[1], dtype=torch.float64) if x is None else x
    zero = torch.zeros((), dtype=torch.float64)
    new, state = alg.aggregate(
        x, {"gradient": gradients}, cohort([1 / len(gradients)] * len(gradients)), {"norm": zero, "stationary": zero}
    )
    return new, {n: float(v) for n, v in state.items()}


@pytest.mark.parametrize("solver", ["wolfe", "slsqp"])
def test_mgda_of_orthogonal_gradients_is_their_unit_mean(solver: str) -> None:
    for m in (1, 2, 5):
        new, state = descended(MGDA(solver=solver), torch.diag(torch.arange(1.0, m + 1).double()))
        assert new.tolist() == pytest.approx([-1 / m] * m, abs=1e-8) and state["norm"] == pytest.approx(
            1 / math.sqrt(m), abs=1e-8
        )
        assert state["stationary"] == 0


@pytest.mark.parametrize("solver", ["wolfe", "slsqp"])
def test_mgda_of_two_halves_unit_vectors(solver: str) -> None:
    new, _ = descended(MGDA(solver=solver, server_lr=2.0), rows([30.0, 40.0], [8.0, 6.0]))
    assert new.tolist() == pytest.approx([-1.4, -1.4], abs=1e-8)


@pytest.mark.parametrize("solver", ["wolfe", "slsqp"])
def test_mgda_of_identical_gradients_is_normalised(solver: str) -> None:
    """The Gram matrix is singular: the weights are not unique, the step is."""
    new, state = descended(MGDA(solver=solver), rows(*[[3.0, 4.0]] * 4))
    assert new.tolist() == pytest.approx([-0.6, -0.8], abs=1e-12) and state["norm"] == pytest.approx(1)


def test_mgda_leaves_out_zero_gradients() -> None:
    new, _ = descended(MGDA(), rows([0.0, 0.0], [0.0, 5.0]))
    assert new.tolist() == exactly(0.0, -1.0)
    new, state = descended(MGDA(), rows([0.0, 0.0], [0.0, 0.0]), rows([1.0, 1.0])[0])
    assert new.tolist() == [1.0, 1.0] and state == {"norm": 0.0, "stationary": 1.0}


def test_mgda_takes_no_step_where_it_is_stationary() -> None:
    """Not even the weight decay's; the record counts it."""
    three = rows([1.0, 0.0], [-1.0, math.sqrt(3)], [-1.0, -math.sqrt(3)])
    for gradients in (rows([2.0, 1.0], [-4.0, -2.0]), three):
        new, state = descended(MGDA(server_decay=0.5), gradients, rows([1.0, 1.0])[0])
        assert new.tolist() == [1.0, 1.0] and state["stationary"] == 1 and state["norm"] < 1e-8


def test_mgda_of_one_client_is_normalised_sgd_with_decay(noisy: Problem) -> None:
    server, x = serve(MGDA(single_gradient=True, server_lr=0.2, server_decay=0.3), noisy, PLAIN), zeros(noisy)
    for t in (1, 2, 3):
        server.run_round(t, [1])
        g = gradient(noisy, 1, x)
        x = x - 0.2 * (g / g.norm() + 0.3 * x)
        assert close(server.w, x)


def test_mgda_by_the_book(noisy: Problem) -> None:
    """Raw gradients along the steps, before clipping and weight decay, which bend the path."""
    server, x = serve(MGDA(server_lr=0.3, server_decay=0.1), noisy, RICH), zeros(noisy)
    for t, ids in enumerate(COHORTS, 1):
        server.run_round(t, ids)
        G = torch.stack([torch.stack(trained(noisy, RICH, i, t, x)[2]).mean(0) for i in ids])
        u = G / G.norm(dim=1, keepdim=True)
        alpha = torch.from_numpy(min_norm_point((u @ u.T).numpy()))
        x = x - 0.3 * (alpha @ u + 0.1 * x)
        assert close(server.w, x, 1e-10)


# FedMGDA+ -------------------------------------------------------------------------------------------------------


def test_fedmgdaplus_without_freedom_is_fedavg_of_unit_updates(noisy: Problem) -> None:
    server, x = serve(FedMGDAPlus(eps=0.0, server_lr=0.3, server_decay_rate=0.5), noisy, RICH), zeros(noisy)
    for t, ids in enumerate(COHORTS, 1):
        server.run_round(t, ids)
        delta = displacements(noisy, RICH, ids, t, x)
        x = x + 0.3 * 0.5 ** (t - 1) * (shares(noisy, ids) @ (delta / delta.norm(dim=1, keepdim=True)))
        assert close(server.w, x)


def test_fedmgdaplus_with_full_freedom_is_mgda_on_displacements(noisy: Problem) -> None:
    server, x = serve(FedMGDAPlus(eps=1.0), noisy, PLAIN), zeros(noisy)
    for t, ids in enumerate(COHORTS, 1):
        server.run_round(t, ids)
        x = descended(MGDA(), -displacements(noisy, PLAIN, ids, t, x), x)[0]
        assert close(server.w, x, 1e-10)


def test_fedmgdaplus_weights_of_two_in_their_box() -> None:
    """Unit vectors want one half each: shares of 0.8 and 0.2 may go to 0.7 and 0.3; 0.55 and 0.45 may go all the way."""
    delta = rows([-3.0, 0.0], [0.0, -7.0])
    for p, eps, want in (
        ((0.8, 0.2), 0.1, (0.7, 0.3)),
        ((0.55, 0.45), 0.1, (0.5, 0.5)),
        ((0.98, 0.02), 0.3, (0.68, 0.32)),
    ):
        x = torch.zeros(2, dtype=torch.float64)
        new, state = FedMGDAPlus(eps=eps).aggregate(x, {"delta": delta}, cohort(p), {"norm": x[0]})
        assert (-new).tolist() == pytest.approx(want, abs=1e-7)
        assert float(state["norm"]) == pytest.approx(math.hypot(*want), abs=1e-7)


def test_fedmgdaplus_walls_of_three() -> None:
    """Of two the one's lower wall is the other's upper; of three each can stand alone. Equal shares, a twin pair e_1, e_2.

    Against the third, −(e_1 + e_2)/√2, weights 1/(1 + √2) = 0.414 and 0.293 would cancel: the upper wall stops at 0.383.
    The third as (e_1 + e_2)/√2 is of no use: the lower wall keeps it at 1/30.
    """
    side = math.sqrt(0.5)
    for third, eps, weight in ((-side, 0.05, 1 / 3 + 0.05), (side, 0.3, 1 / 30)):
        u = rows([1.0, 0.0], [0.0, 1.0], [third, third])
        x = torch.zeros(2, dtype=torch.float64)
        new, _ = FedMGDAPlus(eps=eps).aggregate(x, {"delta": -5 * u}, cohort([1 / 3] * 3), {"norm": x[0]})
        assert (-new).tolist() == pytest.approx([(1 - weight) / 2 + weight * third] * 2, abs=1e-7)


@given(vectors(), st.sampled_from([0.02, 0.1, 0.4]))
@settings(max_examples=25, deadline=None)
def test_weights_in_a_box_are_optimal(u: np.ndarray, eps: float) -> None:
    """Karush–Kuhn–Tucker: one price ν; ⟨u*, u_i⟩ is ν inside the box, above it at the lower and below it at the upper wall."""
    share = np.random.default_rng(len(u)).dirichlet(np.ones(len(u)))
    low, high = np.clip(share - eps, 0, 1), np.clip(share + eps, 0, 1)
    weights = slsqp(u @ u.T, low, high, share)
    assert (weights > low - 1e-9).all() and (weights < high + 1e-9).all() and abs(weights.sum() - 1) < 1e-12
    products = u @ (weights @ u)
    may_grow, may_shrink = products[weights < high - 1e-6], products[weights > low + 1e-6]
    if len(may_grow) and len(may_shrink):
        assert may_grow.min() > may_shrink.max() - 1e-5


def test_fedmgdaplus_leaves_out_who_did_not_move() -> None:
    x, delta = torch.zeros(2, dtype=torch.float64), rows([0.0, 0.0], [0.0, 5.0])
    for eps in (0.0, 0.1, 1.0):
        alg = FedMGDAPlus(eps=eps)
        assert alg.aggregate(x, {"delta": delta}, cohort([0.9, 0.1]), {"norm": x[0]})[0].tolist() == pytest.approx(
            [0.0, 1.0]
        )
        assert torch.equal(alg.aggregate(x, {"delta": 0 * delta}, cohort([0.9, 0.1]), {"norm": x[0]})[0], x)


# FedSpeed -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mix", [1.0, 0.3])
def test_fedspeed_by_the_book(noisy: Problem, mix: float) -> None:
    """The second gradient on the same batch at θ + ρ g / (‖g‖ + 1e-7); only α θ is outside the clipped norm."""
    server, x, h = (
        serve(FedSpeed(alpha=0.5, rho=0.4, mix=mix), noisy, RICH),
        zeros(noisy),
        {i: zeros(noisy) for i in ALL},
    )
    for t, ids in enumerate(COHORTS, 1):
        server.run_round(t, ids)
        ends = []
        for i in ids:
            alpha = 0.5 / float(noisy.fed.sizes[i] / noisy.fed.sizes.mean())

            def direction(theta: Tensor, at: Gradient, alpha: float = alpha, i: int = i, x: Tensor = x) -> Tensor:
                g = at(theta)
                return (1 - mix) * g + mix * at(theta + 0.4 * g / (g.norm() + 1e-7)) + alpha * (h[i] - x)

            ends.append(trained(noisy, RICH, i, t, x, direction, beside=lambda theta, alpha=alpha: alpha * theta)[0])
        for i, end in zip(ids, ends, strict=True):
            h[i] = h[i] + end - x
        x = torch.stack(ends).mean(0) + sum(h.values()) / 4
        assert close(server.w, x)


@pytest.mark.parametrize("how", [{"rho": 0.0}, {"mix": 0.0}])
def test_fedspeed_without_an_ascent_is_feddyn(how: dict[str, float]) -> None:
    on = labelled(tastes(SIZES), "batch")
    one, other = played(FedSpeed(alpha=0.3, **how), on, RICH, COHORTS), played(FedDyn(alpha=0.3), on, RICH, COHORTS)  # type: ignore[arg-type]
    assert apart(everything(one), everything(other)) < 1e-12


# FedAlign -------------------------------------------------------------------------------------------------------


def test_the_top_singular_value() -> None:
    """Of [c, s] feature maps; after ten iterations as near as the gap allows, exact for rank one (s = 1)."""
    rng = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=rng, dtype=torch.float64)
    one, two = draw(5, 6, 1).abs(), draw(5, 3, 1)
    assert close(top_singular_value(one, two), torch.linalg.matrix_norm(one @ two.mT, ord=2), 1e-10)
    one, two = 0.1 * draw(5, 6, 7) + 1, 0.1 * draw(5, 3, 7) + 1
    assert close(top_singular_value(one, two), torch.linalg.matrix_norm(one @ two.mT / 7, ord=2), 1e-10)


def aligned(mu: float) -> tuple[Server, Callable[[Tensor], Tensor]]:
    """FedAlign's loss on some samples, as a function of w; layers of 4·5+5, 5·8+8 and 8·3+3 numbers."""
    on = labelled(tastes([9]))
    torch.manual_seed(0)
    server = serve(FedAlign(mu=mu), Problem(on.fed, MLP(hidden=(5, 8)).module((4,), 3)), PLAIN, "vmapped")
    task, batch = server.engine.task, Batch(*on.fed.test)  # type: ignore[attr-defined]
    return server, lambda w: server.alg.loss(task, w, batch, None)  # type: ignore[arg-type]


def test_fedalign_term_is_as_large_as_mu_times_the_loss() -> None:
    server, plain = aligned(0.0)
    w = server.space.start
    for mu in (0.45, 2.0):
        assert float(aligned(mu)[1](w)) == pytest.approx((1 + mu) * float(plain(w)), rel=1e-8)


def test_fedalign_term_reaches_the_last_hidden_layer_alone() -> None:
    """And there only what makes the first quarter of its width, with the gradient of (σ_narrow − σ_full)², σ_full fixed."""
    server, plain = aligned(0.0)
    w = server.space.start.clone()
    for at in (slice(20, 25), slice(65, 73)):  # biases: all units at work, as none of σ's 1e-12 then counts
        w[at] += 2
    extra = grad(aligned(0.7)[1])(w) - grad(plain)(w)
    assert extra[:25].abs().max() < 1e-14 and extra[73:].abs().max() < 1e-14
    weight, bias = extra[25:65].view(8, 5), extra[65:73]
    assert weight[2:].abs().max() < 1e-14 and bias[2:].abs().max() < 1e-14 and bias[:2].abs().max() > 1e-3

    parts, X = server.space.split(w), server.fed.test.x
    z = F.relu(X @ parts["fc1.weight"].T + parts["fc1.bias"])

    def term(u: Tensor) -> Tensor:
        out = F.relu(z @ u[:40].view(8, 5).T + u[40:])
        lengths = z.norm(dim=1)  # of rank one: σ is the product of the lengths
        return (
            (lengths * (out[:, :2].norm(dim=1) - F.relu(z @ parts["fc2.weight"].T + parts["fc2.bias"]).norm(dim=1)))
            .square()
            .mean()
        )

    at = w[25:73]
    expected = 0.7 * float(plain(w) / term(at)) * grad(term)(at)
    assert close(extra[25:73], expected, 1e-9)


def test_fedalign_without_strength_is_fedavg() -> None:
    """Batch norm included: the second pass leaves the running statistics alone."""
    on = labelled(tastes(SIZES), "batch")
    one, other = played(FedAlign(mu=0.0), on, RICH, COHORTS), played(FedAvg(), on, RICH, COHORTS)
    assert apart(everything(one), everything(other)) < 1e-12
    assert not close(played(FedAlign(), on, RICH, COHORTS).w, other.w, 1e-4)


# FedAMD ---------------------------------------------------------------------------------------------------------


def test_fedamd_by_the_book(noisy: Problem) -> None:
    """Miners begin with the mean of all remembered gradients as it was before this round's anchors."""
    server, x, g = (
        serve(FedAMD(anchor=0.5, server_scale=0.9), noisy, RICH),
        zeros(noisy),
        {i: zeros(noisy) for i in ALL},
    )
    roles = []
    for t, ids in enumerate([*COHORTS, *COHORTS], 1):
        server.run_round(t, ids)
        moves, new = [], dict(g)
        for i in ids:
            anchor = coin(noisy.fed.seed, t, i) < 0.5
            roles.append(anchor)
            if anchor:
                new[i] = gradient(noisy, i, x)
                continue
            path, v = [x], [sum(g.values()) / 4]

            def direction(theta: Tensor, at: Gradient, path: list[Tensor] = path, v: list[Tensor] = v) -> Tensor:
                v.append(v[-1] - at(path[-1]) + at(theta))
                path.append(theta)
                return v[-1]

            moves.append(trained(noisy, RICH, i, t, x, direction)[0] - x)
        g, x = new, x + (0.9 * torch.stack(moves).mean(0) if moves else 0)
        assert close(server.w, x) and close(server.state["v"], sum(g.values()) / 4)
        assert all(close(row(server.memory, i)["g"], g[i]) for i in ALL)
    assert 0 < sum(roles) < len(roles)


def cast(monkeypatch: pytest.MonkeyPatch, anchors: dict[int, list[int]]) -> None:
    """Anchors of every round, whatever the coins."""

    coins = lambda seed, round, client: 0.0 if client in anchors.get(round, []) else 0.999
    monkeypatch.setattr("askew.engine.server.coin", coins)


def test_fedamd_anchors_do_not_move_the_model(noisy: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    cast(monkeypatch, {1: ALL, 2: [0, 1], 3: [0]})
    server = serve(FedAMD(), noisy, PLAIN)
    server.run_round(1, ALL)
    assert torch.equal(server.w, server.space.start)
    assert close(server.state["v"], torch.stack([gradient(noisy, i, server.w) for i in ALL]).mean(0))
    server.run_round(2, [0, 1])
    assert torch.equal(server.w, server.space.start)
    alone = serve(FedAMD(), noisy, PLAIN)
    alone.run_round(1, ALL)
    alone.run_round(3, [2]), server.run_round(3, [0, 2])
    assert close(alone.w, server.w, 1e-14) and not close(server.w, server.space.start, 1e-3)


def test_fedamd_first_step_is_along_the_anchored_mean(noisy: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    cast(monkeypatch, {1: [0, 1, 3]})
    server = serve(FedAMD(), noisy, LocalSettings(steps=1, batch=3, lr=0.1))
    server.run_round(1, [0, 1, 3])
    v = (gradient(noisy, 0, server.w) + gradient(noisy, 1, server.w) + gradient(noisy, 3, server.w)) / 4
    server.run_round(2, [1, 2])
    assert close(server.w, -0.1 * v)


# two rounds of everything, by pencil ----------------------------------------------------------------------------
# L_i = ½ A_i (w − a_i)², pairs (A, a): (1, 1), (4, −2), (2, 3), (1, 0). Two full gradient steps of rate 0.1 leave of the
# distance to a_i 0.81, 0.36, 0.64 and 0.81. First clients 0 and 1 come, then 0 and 2; w starts at 0. So the first
# displacements are 0.19 and −1.28, and from w the second ones 0.19 (1 − w) and 0.36 (3 − w).


def second(w: float) -> tuple[float, float]:
    return 0.19 * (1 - w), 0.36 * (3 - w)


def test_fedsgd_by_pencil() -> None:
    # Gradients −1 and 8: x = −0.1 · 3.5. Then −1.35 and 2 · (−3.35) = −6.7: x = −0.35 + 0.4025.
    assert by_pencil(FedSGD())[0] == exactly(-0.35, 0.0525)


def test_solo_by_pencil() -> None:
    # Momentum ½. Client 0: v = −1, θ = 0.1; v = −0.5 − 0.9, θ = 0.24. Again: v = −0.7 − 0.76, θ = 0.386;
    # v = −0.73 − 0.614, θ = 0.5204. Client 1: v = 8, θ = −0.8; v = 4 + 4.8, θ = −1.68. Client 2, new in the second round:
    # v = −6, θ = 0.6; v = −3 − 4.8, θ = 1.38.
    xs, server = by_pencil(Solo(), LocalSettings(batch=0, steps=2, lr=0.1, momentum=0.5))
    assert xs == [0.0, 0.0]
    assert server.privates.read(ALL)["w"][:, 0].tolist() == exactly(0.5204, -1.68, 1.38, 0.0)
    assert server.clients.read(ALL)["momentum"][:, 0].tolist() == exactly(-1.344, 8.8, -7.8, 0.0)


def test_centralised_by_pencil() -> None:
    # One client holds (1, 1) and (2, −4): g = ½ (5 w + 7). 0 → −0.35 → −0.6125 | −0.809375 → −0.95703125.
    on = Problem(federation([Samples(rows([1.0], [2.0]), rows([1.0], [-4.0]))]), linear(1))
    server = serve(Centralised(), on, TWICE)
    for t, w in ((1, -0.6125), (2, -0.95703125)):
        server.run_round(t, [0])
        assert row(server.privates, 0)["w"].tolist() == exactly(w)


def test_fedavgm_by_pencil() -> None:
    # M = −0.545 = x. Then D = (0.29355 + 1.2762) / 2, M = −0.2725 + 0.784875.
    assert by_pencil(FedAvgM(beta=0.5))[0] == exactly(-0.545, -0.032625)


@pytest.mark.parametrize("cls", SECOND)
def test_adaptive_server_optimisers_by_pencil(cls: type[FedAdam]) -> None:
    # β1 = ½, β2 = ¾, τ = ½, η_g = 0.1; D = −0.545, D² = 0.297025 > V = 0.25.
    V = {FedAdagrad: 0.547025, FedAdam: 0.1875 + 0.07425625, FedYogi: 0.25 + 0.07425625}[cls]
    x = 0.1 * -0.2725 / (math.sqrt(V) + 0.5)
    D = sum(second(x)) / 2  # about 0.66: larger than √V again
    V = {FedAdagrad: V + D**2, FedAdam: 0.75 * V + 0.25 * D**2, FedYogi: V + 0.25 * D**2}[cls]
    y = x + 0.1 * (-0.13625 + 0.5 * D) / (math.sqrt(V) + 0.5)
    assert by_pencil(cls(beta1=0.5, beta2=0.75, tau=0.5, server_lr=0.1))[0] == exactly(x, y)


def test_fedexp_by_pencil() -> None:
    # Mean −0.545, its square 0.297025; mean square (0.0361 + 1.6384) / 2 = 0.83725; η_g = 0.83725 / (2 · 0.298025).
    x = -0.545 * 0.83725 / 0.59605
    a, b = second(x)  # alike: the quotient is below 1
    assert by_pencil(FedExP(eps=0.001))[0] == exactly(x, x + (a + b) / 2)


def test_fedpvr_by_pencil() -> None:
    # c_0 = −0.19 / 0.2 = −0.95, c_1 = 6.4, c = 5.45 / 4 = 1.3625, x = −0.545.
    # Client 0: −0.545 − 0.1 (−1.545 + 2.3125) = −0.62175 → −0.690825. Client 2: → 0.02775 → 0.48595.
    # x = −0.545 + (−0.145825 + 1.03095) / 2; c_0 = −2.3125 + 0.729125, c_2 = −1.3625 − 5.15475.
    xs, server = by_pencil(FedPVR())
    assert xs == exactly(-0.545, -0.1024375)
    assert server.clients.read(ALL)["c"][:, 0].tolist() == exactly(-1.583375, 6.4, -6.51725, 0.0)
    assert server.state["c"].tolist() == exactly((-1.583375 + 6.4 - 6.51725) / 4)


def test_fedvarp_by_pencil() -> None:
    # y = 1.9, −12.8 (downhill): mean −2.725. Then 2.9355 and 12.762: v = (1.0355 + 12.762) / 2 − 2.725 = 4.17375.
    assert by_pencil(FedVARP())[0] == exactly(-0.545, -0.127625)


def test_mifa_by_pencil() -> None:
    # x = −0.2725; then 2.41775 and 11.781 beside −12.8 and 0: mean 0.3496875.
    assert by_pencil(MIFA())[0] == exactly(-0.2725, -0.23753125)


def test_fedga_by_pencil() -> None:
    # Gradients −1, 8: starts ∓0.45; θ = 1 − 0.81 · 1.45 = −0.1745 and −2 + 0.36 · 2.45 = −1.118; x = −0.64625.
    # Gradients −1.64625, −7.2925: starts −0.3639375 and −0.9285625; θ = −0.104789375 and 0.48572.
    assert by_pencil(FedGA(beta=0.1))[0] == exactly(-0.64625, 0.1904653125)


def test_fedga_memory_by_pencil() -> None:
    # x = −0.545; G_0 = −0.95, G_1 = 6.4, Ḡ = 2.725. Client 0 starts at −0.545 − 0.3675 = −0.9125: θ = −0.549125;
    # client 2 at −0.545: θ = 0.7312. G_0 = −0.363375 / 0.2.
    xs, server = by_pencil(FedGA(beta=0.1, form="memory"))
    assert xs == exactly(-0.545, 0.0910375)
    assert row(server.clients, 0)["g"].tolist() == exactly(-1.816875)
    assert server.state["g"].tolist() == exactly(-(0.0910375 + 0.545) / 0.2)


def test_fedpmvr_by_pencil() -> None:
    # α = ¼: x = −0.75 · 0.545 = −0.40875; then 0.75 · (0.2676625 + 1.22715) / 2 = 0.5605546875.
    assert by_pencil(FedPMVR(alpha=0.25))[0] == exactly(-0.40875, 0.1518046875)


def test_fedpdc_by_pencil() -> None:
    # Accuracies ¼, ¾, then ½, ½; λ = 2 as a proximal term. x = 0.0475 − 0.96 = −0.9125. Client 0 is held by 1.5:
    # −0.9125 → −0.72125 → −0.5778125. Client 2 was absent: δ = 0.36 · 3.9125. x = −0.9125 + (0.3346875 + 1.4085) / 2.
    server, accuracies = serve(FedPDC(penalty="prox", lam=2.0), scalars(*CLIENTS), TWICE), iter([0.25, 0.75, 0.5, 0.5])
    server.evaluate = lambda w, buffers: torch.tensor([next(accuracies), 0.0])
    server.run_round(1, [0, 1])
    assert server.w.tolist() == exactly(-0.9125)
    server.run_round(2, [0, 2])
    assert server.w.tolist() == exactly(-0.04090625)


def test_lossbias_by_pencil() -> None:
    # Everybody holds its sample twice: one to train, one to validate. ℓ = ½ · 0.81² = 0.32805 and 2 · 0.72² = 1.0368.
    xs, _ = by_pencil(LossBias(), copies=[2, 2, 2, 2])
    x = (0.32805 * 0.19 - 1.0368 * 1.28) / 1.36485
    a, b = 0.5 * (0.81 * (1 - x)) ** 2, (0.64 * (3 - x)) ** 2
    assert xs == exactly(x, x + (a * second(x)[0] + b * second(x)[1]) / (a + b))


def test_mgda_by_pencil() -> None:
    # On the line u_i is a sign. Clients 0 and 2 both pull up: x = 0.5. Then 0 pulls up and 1 down: nobody may lose.
    server = serve(MGDA(server_lr=0.5), scalars(*CLIENTS), TWICE)
    records = play(server, [[0, 2], [0, 1]])
    assert server.w.tolist() == exactly(0.5)
    assert [(r["norm"], r["stationary"]) for r in records] == [(1.0, 0.0), (0.0, 1.0)]


def test_mgda_in_the_plane_by_pencil() -> None:
    # L_i = ½ ‖w − a_i‖², a = (3, 4), (4, −3): unit gradients −(0.6, 0.8), −(0.8, −0.6), orthogonal: w = (0.7, 0.1).
    # From there client 2 with a = (0.7, 5.1) has −(0, 1) and client 0 −(2.3, 3.9)/√20.5: half of both.
    on = least_squares(torch.eye(2, dtype=torch.float64).expand(3, 2, 2), rows([3.0, 4.0], [4.0, -3.0], [0.7, 5.1]))
    server = serve(MGDA(single_gradient=True), on, ONE)
    server.run_round(1, [0, 1])
    assert server.w.tolist() == exactly(0.7, 0.1)
    server.run_round(2, [0, 2])
    root = math.sqrt(2.3**2 + 3.9**2)
    assert server.w.tolist() == exactly(0.7 + 1.15 / root, 0.1 + 0.5 + 1.95 / root)


def test_fedmgdaplus_by_pencil() -> None:
    # Sizes 1, 3, 2: shares ¼ and ¾, free by 0.1. One up, one down: weights 0.35 and 0.65, x = −0.3. Then both up: x = 0.7.
    server = serve(FedMGDAPlus(eps=0.1), scalars(*CLIENTS, copies=[1, 3, 2, 1]), TWICE)
    assert server.run_round(1, [0, 1])["norm"] == pytest.approx(0.3, abs=1e-9)
    assert server.w.tolist() == pytest.approx([-0.3], abs=1e-9)
    assert server.run_round(2, [0, 2])["norm"] == pytest.approx(1, abs=1e-9)
    assert server.w.tolist() == pytest.approx([0.7], abs=1e-9)


def test_fedspeed_by_pencil() -> None:
    # α = ½, ρ = 0.1: the gradient is A ρ = 0.1, 0.4, 0.2 steeper. Client 0: 0.11 → 0.11 − 0.1 (−0.99 + 0.055) = 0.2035.
    # Client 1: −0.84 → −0.84 − 0.1 (5.04 − 0.42) = −1.302. x = −0.54925 − 1.0985 / 4 = −0.823875.
    # Client 0: −0.6416625 → −0.486781875. Client 2: −0.0391 → 0.54948125. Drifts 0.540593125, −1.302, 1.37335625.
    xs, _ = by_pencil(FedSpeed(alpha=0.5, rho=0.1))
    assert xs == pytest.approx([-0.823875, 0.0313496875 + 0.611949375 / 4], abs=1e-7)  # 1e-7 beside the norm


def test_fedalign_by_pencil() -> None:
    # Output v·(u x), u = (3, 4), v = (1, 0), one sample x = y = 1, μ = ½, one step of 0.1. Output 3, CE = 2.
    # σ_narrow − σ_full = 3 − 5 = −2, ℓ_L = 4: the term's gradient on u_1 is ½ · 2/4 · 2 · (−2) = −1.
    # CE's gradients are 2 v on u and 2 u on v: u = (2.9, 4), v = (0.4, −0.8).
    layers = {"flat": nn.Flatten(), "fc1": nn.Linear(1, 2, bias=False), "out": nn.Linear(2, 1, bias=False)}
    with torch.no_grad():
        layers["fc1"].weight.copy_(torch.tensor([[3.0], [4.0]]))  # type: ignore[operator]
        layers["out"].weight.copy_(torch.tensor([[1.0, 0.0]]))  # type: ignore[operator]
    on = Problem(federation([Samples(rows([1.0]), rows([1.0]))]), chain(iter(layers.items())))
    server = serve(FedAlign(mu=0.5), on, LocalSettings(batch=0, steps=1, lr=0.1))
    server.run_round(1, [0])
    assert server.w.tolist() == pytest.approx([2.9, 4.0, 0.4, -0.8], abs=1e-9)
    server.run_round(2, [0])
    r = 0.4 * 2.9 - 0.8 * 4 - 1
    term = 0.5 * (r**2 / 2) * 2 / (2.9 - math.sqrt(2.9**2 + 16))
    u, v = (2.9 - 0.1 * (0.4 * r + term), 4 + 0.08 * r), (0.4 - 0.29 * r, -0.8 - 0.4 * r)
    assert server.w.tolist() == pytest.approx([*u, *v], abs=1e-9)


def test_fedamd_by_pencil(monkeypatch: pytest.MonkeyPatch) -> None:
    # Clients 0 and 1 are anchors: gradients −1 and 8, v = 7/4, x stays. Then 0 is an anchor again and 2 mines:
    # θ = −0.175, v = 1.75 + 2 · (−0.175) = 1.4, θ = −0.315.
    cast(monkeypatch, {1: [0, 1], 2: [0]})
    xs, server = by_pencil(FedAMD())
    assert xs == exactly(0.0, -0.315)
    assert server.state["v"].tolist() == exactly(1.75)


def test_the_tests_own_training() -> None:
    """`trained` on a quadratic with a known answer, and optima that differ."""
    on = scalars((2.0, 3.0))
    assert close(trained(on, TWICE, 0, 1, zeros(on))[0], 3 * (1 - 0.64))
    assert not close(quadratics().optimum(), quadratics(seed=1).optimum(), 1e-3)


# FedPMVR on convolutions ----------------------------------------------------------------------------------------


def test_fedpmvr_may_correct_the_convolutions_and_nothing_else() -> None:
    """What goes up is (1 − α) of the displacement there, and all of it elsewhere."""
    space = Space(CNN(width=2).module((1, 8, 8), 3), torch.float64)
    method = FedPMVR(alpha=0.25, corrected="convolutions")
    part = method.parts(space)["head"]
    convolutions = [name for name, shape in space.shapes.items() if len(shape) == 4 or name.startswith("conv")]
    assert len(part.indices) == sum(space.shapes[name].numel() for name in convolutions) > 0
    w = torch.randn(space.P, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    client: Any = SimpleNamespace(w=space.start, parts={"head": part}, state={})
    sent, whole = space.split(method.finish(w, client)[0]["delta"]), space.split(w - space.start)
    for name in space.shapes:
        assert torch.allclose(sent[name], (0.75 if name in convolutions else 1.0) * whole[name], rtol=1e-14, atol=1e-14)
    with pytest.raises(ModelError, match="no convolutions"):
        method.parts(Space(MLP().module((8,), 3)))
