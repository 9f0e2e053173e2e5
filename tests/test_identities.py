"""Every identity and guard of the ten methods as a test of its own, and two rounds of each by pencil.

`walk` (problems.py) writes local training out for least squares, so gradients and local models are known here
independently of the code under test.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from askew.algorithms import MOON, FedAvg, FedBN, FedCM, FedDC, FedDPC, FedDyn, FedNova, FedProx, Scaffold
from askew.core.algorithm import Algorithm
from askew.core.space import Space
from askew.core.task import Functional
from askew.core.types import Batch, Client, State
from askew.data.dataset import Samples
from askew.data.federation import LocalSettings
from askew.engine.base import PhaseOutputs
from askew.engine.evaluate import Evaluator, with_private
from askew.engine.server import Server
from askew.errors import ConfigError
from askew.experiment.build import BuiltRun
from askew.experiment.config import Config
from askew.experiment.run_evaluation import evaluate_models, evaluation_record
from askew.kernels.interface import Kernels
from problems import (
    Listening,
    Problem,
    Record,
    Walk,
    batches,
    close,
    draws,
    everything,
    federation,
    labelled,
    least_squares,
    play,
    played,
    quadratics,
    regression,
    row,
    same,
    scalars,
    serve,
    softmax,
    softmax_optimum,
    tastes,
    walk,
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


@pytest.fixture
def even() -> Problem:
    """Four clients of equal sizes whose batches differ."""
    return regression([6, 6, 6, 6])


def heard(server: Server, round: int, ids: Sequence[int]) -> PhaseOutputs:
    """Play a round and return what the clients answered."""
    listening = Listening(server.engine)
    server.engine = listening
    server.run_round(round, ids)
    server.engine = listening.engine
    return listening.heard[-1][2]


def relative(on: Problem, client: int) -> float:
    """n_i / n̄"""
    return float(on.fed.sizes[client] / on.fed.sizes.mean())


# the round of every method, by the book -------------------------------------------------------------------------
# Under momentum, weight decay, clipping, a decaying rate, unequal sizes and partial participation.


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_fedavg_by_the_book(noisy: Problem, weighting: str) -> None:
    server, x = serve(FedAvg(weighting=weighting, server_scale=0.8), noisy, RICH), zeros(noisy)
    for t, ids in enumerate(COHORTS, 1):
        server.run_round(t, ids)
        p = shares(noisy, ids) if weighting == "samples" else torch.full((len(ids),), 1 / len(ids), dtype=torch.float64)
        x = x + 0.8 * sum(p_i * (walk(noisy, RICH, i, t, x).end - x) for p_i, i in zip(p, ids, strict=True))
        assert close(server.w, x)


def test_fedprox_by_the_book(noisy: Problem) -> None:
    """The penalty is inside the clipped norm."""
    server, x = serve(FedProx(mu=0.7), noisy, RICH), zeros(noisy)
    for t, ids in enumerate(COHORTS, 1):
        server.run_round(t, ids)
        ends = [walk(noisy, RICH, i, t, x, inside=lambda theta, x=x: 0.7 * (theta - x)).end for i in ids]
        x = shares(noisy, ids) @ torch.stack(ends)
        assert close(server.w, x)


@pytest.mark.parametrize("mu", [0.0, 0.8])
def test_fednova_by_the_book(noisy: Problem, mu: float) -> None:
    """The proximal term is outside the clipped norm, inside the momentum; τ_eff is Σ p_i a_i without and Σ p_i K_i with it."""
    server, x, M = serve(FedNova(mu=mu, server_momentum=0.5), noisy, RICH), zeros(noisy), zeros(noisy)
    for t, ids in enumerate(COHORTS, 1):
        server.run_round(t, ids)
        p, total, tau = shares(noisy, ids), zeros(noisy), 0.0
        for p_i, i in zip(p, ids, strict=True):
            end, gradients = walk(noisy, RICH, i, t, x, beside=lambda theta, x=x: mu * (theta - x))
            a = c = 0.0
            for _ in gradients:
                c = 0.6 * c + 1 - RICH.rate(t) * mu * a
                a = a + c
            total, tau = total + p_i * (end - x) / a, tau + p_i * (len(gradients) if mu else a)
        M = 0.5 * M + tau * total
        x = x + M
        assert close(server.w, x) and close(server.state["M"], M)


@pytest.mark.parametrize("norm", ["nova", "steps"])
@pytest.mark.parametrize("rate", ["current", "initial"])
def test_scaffold_by_the_book(noisy: Problem, norm: str, rate: str) -> None:
    server = serve(Scaffold(variate_norm=norm, variate_lr=rate, server_scale=0.8), noisy, RICH)
    x, c, own = zeros(noisy), zeros(noisy), {i: zeros(noisy) for i in range(4)}
    for t, ids in enumerate(COHORTS, 1):
        server.run_round(t, ids)
        step, change = zeros(noisy), zeros(noisy)
        for i in ids:
            end, gradients = walk(noisy, RICH, i, t, x, inside=lambda _, c=c, c_i=own[i]: c - c_i)
            length = nova(len(gradients), 0.6) if norm == "nova" else len(gradients)
            new = own[i] - c + (x - end) / (length * RICH.rate(t if rate == "current" else 1))
            step, change, own[i] = step + (end - x) / len(ids), change + (new - own[i]) / 4, new
        x, c = x + 0.8 * step, c + change
        assert close(server.w, x) and close(server.state["c"], c)
        assert all(close(row(server.clients, i)["c"], own[i]) for i in own)


def test_feddyn_by_the_book(noisy: Problem) -> None:
    """α_i θ acts beside weight decay, outside the clipped norm; α_i (h_i − w) inside it; α_i = α/(n_i/n̄)."""
    server, x, h = serve(FedDyn(alpha=0.5), noisy, RICH), zeros(noisy), {i: zeros(noisy) for i in range(4)}
    for t, ids in enumerate(COHORTS, 1):
        server.run_round(t, ids)
        ends = []
        for i in ids:
            alpha = 0.5 / relative(noisy, i)
            inside = lambda theta, alpha=alpha, h_i=h[i], x=x: alpha * (h_i - x)
            ends.append(walk(noisy, RICH, i, t, x, inside, beside=lambda theta, alpha=alpha: alpha * theta).end)
            h[i] = h[i] + ends[-1] - x
        mean = torch.stack(ends).mean(0)
        x = mean + sum(h.values()) / 4
        assert close(server.w, x) and all(close(row(server.clients, i)["h"], h[i]) for i in h)
        models = server.alg.models(server.w, server.state)
        assert list(models) == ["global", "participants"]
        assert torch.equal(models["global"], server.w) and close(models["participants"], mean)


@pytest.mark.parametrize("variate", ["code", "displacement", "off"])
@pytest.mark.parametrize("rule", ["code", "paper"])
@pytest.mark.parametrize("drift", [True, False])
@pytest.mark.parametrize("rate", ["initial", "current"])
def test_feddc_by_the_book(noisy: Problem, variate: str, rule: str, drift: bool, rate: str) -> None:
    """The whole penalty and the variates are inside the clipped norm."""
    alg = FedDC(alpha=0.5, variate=variate, rule=rule, drift=drift, variate_lr=rate)
    server, x, c = serve(alg, noisy, RICH), zeros(noisy), zeros(noisy)
    h, own = ({i: zeros(noisy) for i in range(4)} for _ in range(2))
    for t, ids in enumerate(COHORTS, 1):
        server.run_round(t, ids)
        ends, change = [], zeros(noisy)
        for i in ids:
            size = relative(noisy, i)
            inside = lambda theta, size=size, i=i, x=x, c=c: 0.5 / size * (theta - x + h[i]) + c - own[i]
            end, gradients = walk(noisy, RICH, i, t, x, inside)
            told = (x - end) / (nova(len(gradients), 0.6) * RICH.rate(1 if rate == "initial" else t))
            new = {"code": own[i] - c + told, "displacement": told, "off": zeros(noisy)}[variate]
            ends.append(end)
            h[i] = h[i] + (end - x if drift else 0)
            change = change + (size if variate == "code" else 1.0) * (new - own[i]) / 4
            own[i] = new
        if rule == "code":
            x = torch.stack(ends).mean(0) + sum(h.values()) / 4
        else:
            x = shares(noisy, ids) @ torch.stack([end + h[i] for end, i in zip(ends, ids, strict=True)])
        c = c + change
        assert close(server.w, x) and close(server.state["c"], c)
        for i in range(4):
            assert close(row(server.clients, i)["h"], h[i]) and close(row(server.clients, i)["c"], own[i])


def test_fedcm_by_the_book(noisy: Problem) -> None:
    """M is told by each client's own length and by the rate of its round."""
    server, x, M = serve(FedCM(alpha=0.3, server_scale=0.8), noisy, RICH), zeros(noisy), zeros(noisy)
    for t, ids in enumerate(COHORTS, 1):
        server.run_round(t, ids)
        walks = [walk(noisy, RICH, i, t, x, inside=lambda _, M=M: 0.7 * M, share=0.3) for i in ids]
        step = sum(w.end - x for w in walks) / len(ids)
        M = sum((x - w.end) / (RICH.rate(t) * nova(len(w.gradients), 0.6)) for w in walks) / len(ids)
        x = x + 0.8 * step
        assert close(server.w, x) and close(server.state["M"], M)


@pytest.mark.parametrize("lam", [1.0, 0.0, -0.5])
def test_feddpc_by_the_book(noisy: Problem, lam: float) -> None:
    """In the paper's gradient units, Δ_i = (w − θ_i)/η, with a rate that decays."""
    server, x, prev = serve(FedDPC(lam=lam), noisy, SLOWING), zeros(noisy), zeros(noisy)
    for t, ids in enumerate(COHORTS, 1):
        server.run_round(t, ids)
        z, rate = [], SLOWING.rate(t)
        for i in ids:
            Delta = (x - walk(noisy, SLOWING, i, t, x).end) / rate
            r = Delta - (Delta @ prev / (prev @ prev) * prev if t > 1 else 0)
            z.append((lam + Delta.norm() / r.norm()) * r)
        prev = torch.stack(z).mean(0)
        x = x - rate * prev
        assert close(server.w, x, 1e-11)


@pytest.mark.parametrize("norm", ["none", "batch"])
def test_moon_by_the_book(norm: str) -> None:
    """The printed −log of a quotient; frozen models in evaluation mode, each with the statistics of its own time."""
    on, local = labelled(tastes(SIZES), norm), LocalSettings(epochs=2, batch=3, lr=0.3, momentum=0.5)
    server = serve(MOON(mu=2.0, temperature=0.4), on, local)
    previous: dict[int, State] = {}
    for t, ids in enumerate([[0, 1, 3], [1, 2], [0, 1, 2, 3]], 1):
        received = {**server.space.split(server.w), **server.space.split_buffers(server.buffers)}
        models = {i: trained_by_moon(on, server, local, t, i, received, previous.get(i)) for i in ids}
        server.run_round(t, ids)
        previous |= models
        p = shares(on, ids)
        for name, value in {**server.space.split(server.w), **server.space.split_buffers(server.buffers)}.items():
            assert close(value, sum(p_i * models[i][name] for p_i, i in zip(p, ids, strict=True)), 1e-11)


def cosine(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(1) / (a.norm(dim=1).clamp(min=1e-8) * b.norm(dim=1).clamp(min=1e-8))


def trained_by_moon(
    on: Problem, server: Server, local: LocalSettings, round: int, client: int, received: State, previous: State | None
) -> State:
    """One client's round of MOON in torch's own words: μ = 2, τ = 0.4."""
    model = {n: v.clone() for n, v in received.items()}
    weights = [n for n, _ in on.module.named_parameters()]
    velocity = {n: torch.zeros_like(model[n]) for n in weights}

    def features(state: State, inputs: Tensor) -> Tensor:
        on.module.eval()
        with torch.no_grad():
            z: Tensor = functional_call(on.module, state, (inputs,))[1]
        return z

    for inputs, labels in batches(on.fed.plan([client], round, local, least=server.least)):
        z_g, z_p = features(received, inputs), None if previous is None else features(previous, inputs)
        leaves = {n: model[n].detach().requires_grad_() for n in weights}
        on.module.train()
        output, z = functional_call(
            on.module, model | leaves, (inputs,)
        )  # the statistics in `model` are renewed in place
        loss = F.cross_entropy(output, labels)
        if z_p is not None:
            near, far = (torch.exp(cosine(z, other) / 0.4) for other in (z_g, z_p))
            loss = loss + 2.0 * (-torch.log(near / (near + far))).mean()
        for n, g in zip(weights, torch.autograd.grad(loss, list(leaves.values())), strict=True):
            velocity[n] = local.momentum * velocity[n] + g
            model[n] = model[n] - local.rate(round) * velocity[n]
    return model


# what a method is if nothing is said ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("alg", "expected"),
    [
        (FedAvg(), {"weighting": "samples", "server_scale": 1.0, "server_lr": None}),
        (FedProx(), {"weighting": "samples", "server_scale": 1.0}),
        (FedNova(), {"weighting": "samples", "mu": 0.0, "server_momentum": 0.0}),
        (
            Scaffold(),
            {
                "weighting": "uniform",
                "option": "II",
                "variate_norm": "nova",
                "variate_lr": "current",
                "server_scale": 1.0,
            },
        ),
        (FedDyn(), {"weighting": "uniform"}),
        (
            FedDC(),
            {
                "weighting": "uniform",
                "variate": "code",
                "variate_norm": "nova",
                "variate_lr": "initial",
                "rule": "code",
            },
        ),
        (FedCM(), {"weighting": "uniform", "server_scale": 1.0}),
        (
            FedDPC(),
            {
                "weighting": "uniform",
                "lam": 1.0,
                "projection": True,
                "scaling": True,
                "max_ratio": None,
                "server_scale": 1.0,
            },
        ),
        (MOON(), {"weighting": "samples", "temperature": 0.5}),
        (FedBN(), {"weighting": "uniform", "eval": "clients"}),
    ],
    ids=["fedavg", "fedprox", "fednova", "scaffold", "feddyn", "feddc", "fedcm", "feddpc", "moon", "fedbn"],
)
def test_defaults_are_the_published_ones(alg: Algorithm, expected: dict[str, object]) -> None:
    """Weights as in the authors' code or paper, and of every fork the branch we follow."""
    assert {name: alg.table()[name] for name in expected} == expected


# FedAvg ---------------------------------------------------------------------------------------------------------


def test_fedavg_with_one_full_step_of_everybody_is_a_step_on_the_pooled_loss(noisy: Problem) -> None:
    local = LocalSettings(batch=0, steps=1, lr=0.3)
    server, x = serve(FedAvg(), noisy, local), zeros(noisy)
    X, y = noisy.fed.pool.x, noisy.fed.pool.y[:, 0]
    for t in (1, 2, 3):
        server.run_round(t, [0, 1, 2, 3])
        x = x - 0.3 * X.T @ (X @ x - y) / len(y)
        assert close(server.w, x)


def test_fedavg_with_server_lr_equal_to_the_local_rate_is_fedavg(noisy: Problem) -> None:
    one = played(FedAvg(weighting="uniform", server_lr=0.1), noisy, PLAIN, COHORTS)
    assert torch.equal(one.w, played(FedAvg(weighting="uniform"), noisy, PLAIN, COHORTS).w)


def test_fedavg_server_lr_is_server_scale_times_the_rate_of_the_round(noisy: Problem) -> None:
    """w ← w − η_g mean Δ_i with Δ_i in gradient units, so under a decaying local rate the factor s grows."""
    server = serve(FedAvg(weighting="uniform", server_lr=0.05), noisy, SLOWING)
    for t, ids in enumerate(COHORTS, 1):
        x = server.w
        delta = heard(server, t, ids).up["delta"]
        assert close(server.w, x + 0.05 / SLOWING.rate(t) * delta.mean(0))
    scaled = played(FedAvg(weighting="uniform", server_scale=0.5), noisy, PLAIN, COHORTS)
    assert close(scaled.w, played(FedAvg(weighting="uniform", server_lr=0.05), noisy, PLAIN, COHORTS).w)


def test_fedavg_takes_one_server_rate_and_no_zero_rates() -> None:
    with pytest.raises(ConfigError, match=r"server_scale or server_lr, not both"):
        FedAvg(server_scale=2.0, server_lr=0.1)
    for wrong in ({"server_scale": 0.0}, {"server_lr": 0.0}):
        with pytest.raises(ConfigError, match="must be"):
            FedAvg(**wrong)
    with pytest.raises(ConfigError, match="lr must be > 0"):
        LocalSettings(lr=0.0)


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_statistics_are_averaged_like_the_models(weighting: str) -> None:
    on = labelled(tastes(SIZES), "batch")
    server = serve(FedAvg(weighting=weighting, server_scale=0.5), on, PLAIN)
    out = heard(server, 1, [0, 1, 3])
    p = shares(on, [0, 1, 3]) if weighting == "samples" else torch.full((3,), 1 / 3, dtype=torch.float64)
    assert not torch.equal(out.buffers[0], out.buffers[1])
    assert close(server.buffers, p @ out.buffers)


def test_training_loss_is_the_mean_over_clients_of_the_mean_over_steps(noisy: Problem) -> None:
    """Of each batch before its step, whatever the number of steps."""
    server, x, means = serve(FedAvg(), noisy, PLAIN), zeros(noisy), []
    record = server.run_round(1, [0, 1, 3])
    for i in (0, 1, 3):
        theta, losses = x, []
        for X, y in batches(noisy.fed.plan([i], 1, PLAIN)):
            residual = X @ theta - y[:, 0]
            losses.append(float(residual.square().mean()) / 2)
            theta = theta - 0.1 * X.T @ residual / len(y)
        means.append(sum(losses) / len(losses))
    assert record["train_loss"] == pytest.approx(sum(means) / 3, rel=1e-12)


def test_batches_have_an_address(noisy: Problem) -> None:
    """Drawn anew for every seed, round, client and epoch; the same again at the same address; every sample once an epoch."""
    drawn = lambda seed, round, client: (
        regression(SIZES, seed=0, draws=seed).fed.plan([client], round, PLAIN).train[0].places.tolist()
    )
    one = drawn(0, 1, 1)
    assert sorted(one[:8]) == sorted(one[8:]) == sorted(noisy.fed.gather([1])[1][0].tolist()) and one[:8] != one[8:]
    assert drawn(0, 1, 1) == one != drawn(0, 2, 1) and drawn(1, 1, 1) != one
    alike = regression([8, 8])
    first, second = (alike.fed.plan([i], 1, PLAIN).train[0].places - 8 * i for i in (0, 1))
    assert not torch.equal(first, second)


# FedProx --------------------------------------------------------------------------------------------------------


def test_fedprox_with_one_local_step_is_fedavg_at_any_mu(noisy: Problem) -> None:
    local = LocalSettings(batch=3, steps=1, lr=0.1, momentum=0.5, weight_decay=0.1, clip=0.5)
    assert torch.equal(played(FedProx(mu=7.0), noisy, local, COHORTS).w, played(FedAvg(), noisy, local, COHORTS).w)


def test_fedprox_solved_exactly_is_the_proximal_point() -> None:
    """θ_i minimises L_i + μ/2 ‖θ − w‖²: (A_i + μ) θ = A_i a_i + μ w."""
    on = quadratics(3, 2)
    server = serve(FedProx(mu=0.8), on, LocalSettings(batch=0, steps=120, lr=0.4))
    server.w = torch.tensor([3.0, -2.0], dtype=torch.float64)
    x = server.w
    delta = heard(server, 1, [0, 1, 2]).up["delta"]
    for i in range(3):
        X, y = on.samples(i)
        A, b = X.T @ X / len(y), X.T @ y[:, 0] / len(y)
        assert close(x + delta[i], torch.linalg.solve(A + 0.8 * torch.eye(2, dtype=torch.float64), b + 0.8 * x))


# FedNova --------------------------------------------------------------------------------------------------------


def told_lengths(alg: FedNova, local: LocalSettings) -> tuple[list[int], Tensor]:
    """K_i and the reported a_i of clients with 1 to 5 steps."""
    on = scalars(*[(1.0, float(k)) for k in range(5)], copies=[1, 2, 3, 4, 5])
    return [1, 2, 3, 4, 5], heard(serve(alg, on, local), 1, range(5)).up["a"]


def test_fednova_closed_forms_are_the_recursions() -> None:
    steps, a = told_lengths(FedNova(), LocalSettings(batch=1, lr=0.1))
    assert a.tolist() == steps
    steps, a = told_lengths(FedNova(), LocalSettings(batch=1, lr=0.1, momentum=0.9))
    assert close(a, [(K - 0.9 * (1 - 0.9**K) / (1 - 0.9)) / (1 - 0.9) for K in steps])
    steps, a = told_lengths(FedNova(mu=2.0), LocalSettings(batch=1, lr=0.1))
    assert close(a, [(1 - (1 - 0.2) ** K) / 0.2 for K in steps])


@pytest.mark.parametrize(("mu", "momentum"), [(0.0, 0.0), (0.0, 0.9), (2.0, 0.0), (2.0, 0.9)])
def test_fednova_length_is_the_path_under_a_constant_gradient(mu: float, momentum: float) -> None:
    """On a linear loss δ_i = −η a_i g whatever momentum and proximal term: the definition of a_i."""
    held = [
        Samples(torch.ones(n, 1, dtype=torch.float64), torch.full((n, 1), g, dtype=torch.float64))
        for n, g in ((2, 1.0), (4, -3.0))
    ]
    on = Problem(federation(held, criterion=lambda output, y: (output * y)[:, 0]), scalars((1.0, 0.0)).module)
    server = serve(FedNova(mu=mu), on, LocalSettings(batch=1, lr=0.1, momentum=momentum))
    out = heard(server, 1, [0, 1])
    a = out.up["a"]
    assert close(out.up["delta"][:, 0], -0.1 * a * torch.tensor([1.0, -3.0], dtype=torch.float64))
    effective = (2 * a[0] + 4 * a[1]) / 6 if mu == 0 else (2 * 2 + 4 * 4) / 6
    assert close(server.w, -0.1 * effective * (2 * 1.0 + 4 * -3.0) / 6)


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.8}])
def test_fednova_with_equal_lengths_is_fedavg(noisy: Problem, settings: dict[str, float]) -> None:
    local = LocalSettings(batch=2, steps=4, lr=0.1, **settings)
    assert close(played(FedNova(), noisy, local, COHORTS).w, played(FedAvg(), noisy, local, COHORTS).w)


def fixed_point(alg: Algorithm, on: Problem, local: LocalSettings) -> float:
    """Of a method without state on the line, where a round is x ↦ αx + β."""
    server = serve(alg, on, local)
    images = []
    for start in (0.0, 1.0):
        server.w = torch.tensor([start], dtype=torch.float64)
        server.run_round(1, on.clients)
        images.append(float(server.w))
    beta, alpha = images[0], images[1] - images[0]
    return beta / (1 - alpha)


def test_fednova_fixed_point_tends_to_the_optimum_and_fedavgs_does_not() -> None:
    """K_i from 1 to 8. Error at η = 0.08, 0.02, 0.005: FedNova 0.040, 0.010, 0.0025; FedAvg 1.28, 1.27, 1.27."""
    on = scalars((1.0, 4.0), (0.5, -3.0), (2.0, 1.0), copies=[1, 8, 3])
    best = float(on.optimum([1.0, 8.0, 3.0]))
    away = {
        alg: [abs(fixed_point(alg, on, LocalSettings(batch=1, lr=lr)) - best) for lr in (0.08, 0.02, 0.005)]
        for alg in (FedNova(), FedAvg())
    }
    normalised, plain = away.values()
    assert min(plain) > 1
    assert normalised[2] < 0.005
    assert normalised[0] / normalised[1] == pytest.approx(4, rel=0.2) and normalised[1] / normalised[
        2
    ] == pytest.approx(4, rel=0.1)


# SCAFFOLD -------------------------------------------------------------------------------------------------------


def test_scaffold_variate_is_the_mean_of_the_raw_gradients_of_the_round(noisy: Problem) -> None:
    """Under any participation, with unequal numbers of steps and a decaying rate."""
    server = serve(Scaffold(), noisy, SLOWING)
    for t, ids in enumerate(COHORTS, 1):
        x, c, own = server.w, server.state["c"], {i: row(server.clients, i)["c"] for i in ids}
        server.run_round(t, ids)
        for i in ids:
            gradients = walk(noisy, SLOWING, i, t, x, inside=lambda _, c=c, c_i=own[i]: c - c_i).gradients
            assert close(row(server.clients, i)["c"], gradients.mean(0))


@pytest.mark.parametrize("option", ["I", "II"])
@pytest.mark.parametrize("cohorts", [EVERYBODY * 3, COHORTS], ids=["everybody", "some"])
def test_scaffold_server_variate_is_the_mean_over_all_clients(
    noisy: Problem, option: str, cohorts: list[list[int]]
) -> None:
    server = serve(Scaffold(option=option), noisy, PLAIN)
    for t, ids in enumerate(cohorts, 1):
        server.run_round(t, ids)
        assert close(server.state["c"], server.clients.read(range(4))["c"].mean(0))


def test_scaffold_option_i_is_the_full_gradient_at_the_received_model(noisy: Problem) -> None:
    server = serve(Scaffold(option="I"), noisy, RICH)
    for t, ids in enumerate(COHORTS, 1):
        x = server.w
        server.run_round(t, ids)
        assert all(close(row(server.clients, i)["c"], gradient(noisy, i, x)) for i in ids)


def test_scaffold_first_round_is_fedavg(noisy: Problem) -> None:
    for option in ("I", "II"):
        ours = played(Scaffold(option=option), noisy, RICH, COHORTS[:1])
        assert torch.equal(ours.w, played(FedAvg(weighting="uniform"), noisy, RICH, COHORTS[:1]).w)


def test_scaffold_with_one_step_of_everybody_is_fedavg_in_every_round(noisy: Problem) -> None:
    local = LocalSettings(batch=3, steps=1, lr=0.1)
    ours, fedavg = serve(Scaffold(), noisy, local), serve(FedAvg(weighting="uniform"), noisy, local)
    for t in range(1, 6):
        ours.run_round(t, [0, 1, 2, 3])
        fedavg.run_round(t, [0, 1, 2, 3])
        assert close(ours.w, fedavg.w)


def test_scaffold_initial_rate_in_the_divisor_is_a_relaxation(noisy: Problem) -> None:
    """c_i⁺ = ρ·(mean gradient) + (1 − ρ)(c_i − c) with ρ = η_t/η_0."""
    server = serve(Scaffold(variate_lr="initial"), noisy, SLOWING)
    for t, ids in enumerate(COHORTS, 1):
        x, c, own = server.w, server.state["c"], {i: row(server.clients, i)["c"] for i in ids}
        server.run_round(t, ids)
        rho = SLOWING.rate(t) / SLOWING.rate(1)
        for i in ids:
            gradients = walk(noisy, SLOWING, i, t, x, inside=lambda _, c=c, c_i=own[i]: c - c_i).gradients
            assert close(row(server.clients, i)["c"], rho * gradients.mean(0) + (1 - rho) * (own[i] - c))


def test_scaffold_under_momentum_needs_the_length_of_fednova() -> None:
    """ρ = 0.9: after 20 rounds the distance is 1e5 with K in the divisor, 6e-13 with a_i."""
    on = quadratics(6, 3)
    away = {}
    for norm in ("nova", "steps"):
        server = played(
            Scaffold(variate_norm=norm), on, LocalSettings(batch=0, steps=8, lr=0.05, momentum=0.9), [range(6)] * 20
        )
        away[norm] = float((server.w - on.optimum()).norm())
    assert away["nova"] < 1e-10 and away["steps"] > 1e3


def test_scaffold_reaches_the_optimum_of_the_plain_mean_whatever_the_sizes() -> None:
    on = quadratics(5, 2, copies=[1, 2, 5, 3, 1])
    server = played(Scaffold(), on, LocalSettings(batch=0, steps=3, lr=0.2), draws(150, 2, 5))
    assert close(server.w, on.optimum(), 1e-10)
    assert not close(server.w, on.optimum([1.0, 2.0, 5.0, 3.0, 1.0]), 0.01)


@pytest.mark.parametrize(
    ("alg", "within"),
    [(Scaffold(), 1e-11), (FedDC(alpha=0.1), 1e-5), (FedDyn(alpha=0.3), 1e-4)],
    ids=["scaffold", "feddc", "feddyn"],
)
def test_exact_methods_reach_the_optimum_of_regularised_softmax_regression(alg: Algorithm, within: float) -> None:
    """Weight decay is the regulariser, 2 of 5 clients come. Measured after 150 rounds: 2e-13, 1.4e-7, 6e-6."""
    on, local = softmax([12] * 5), LocalSettings(batch=0, steps=4, lr=0.2, weight_decay=0.1)
    assert float((played(alg, on, local, draws(150, 2, 5)).w - softmax_optimum(on, 0.1)).norm()) < within


def test_fedavg_does_not_reach_the_optimum_of_regularised_softmax_regression() -> None:
    """Measured after 40 rounds: 0.15."""
    on, local = softmax([12] * 5), LocalSettings(batch=0, steps=4, lr=0.2, weight_decay=0.1)
    assert float((played(FedAvg(), on, local, draws(40, 2, 5)).w - softmax_optimum(on, 0.1)).norm()) > 0.05


# FedDyn ---------------------------------------------------------------------------------------------------------


def test_feddyn_code_form_is_the_paper_form(even: Problem) -> None:
    """The paper: −⟨g_i, θ⟩ + α/2 ‖θ − w‖², g_i ← g_i − α δ_i, H ← H − (α/N) Σ_S δ_i, w ← mean_S θ_i − H/α."""
    server, alpha = serve(FedDyn(alpha=0.4), even, PLAIN), 0.4
    x, H, memory = zeros(even), zeros(even), {i: zeros(even) for i in range(4)}
    for t, ids in enumerate(COHORTS, 1):
        server.run_round(t, ids)
        ends = {
            i: walk(even, PLAIN, i, t, x, inside=lambda theta, i=i, x=x: alpha * (theta - x) - memory[i]).end
            for i in ids
        }
        for i in ids:
            memory[i] = memory[i] - alpha * (ends[i] - x)
            H = H - alpha / 4 * (ends[i] - x)
        x = sum(ends.values()) / len(ids) - H / alpha
        assert close(server.w, x)
        assert close(server.state["h"], -H / alpha)
        assert all(close(row(server.clients, i)["h"], -memory[i] / alpha) for i in range(4))


@pytest.mark.parametrize(("ids", "factor"), [([0, 1, 2, 3], 2.0), ([0, 2], 1.5), ([1], 1.25)])
def test_feddyn_first_round_without_strength_steps_farther(noisy: Problem, ids: list[int], factor: float) -> None:
    """α = 0: w_1 = w_0 + (1 + m/N) mean_S δ_i."""
    fedavg = played(FedAvg(weighting="uniform"), noisy, RICH, [ids])
    assert close(played(FedDyn(alpha=0.0), noisy, RICH, [ids]).w, factor * fedavg.w)


def test_feddyn_solved_exactly_is_stationary() -> None:
    """∇L_i(θ_i) = −α_i h_i after each participation, with unequal sizes."""
    on = quadratics(3, 2, copies=[1, 2, 3])
    server = serve(FedDyn(alpha=0.7), on, LocalSettings(batch=0, steps=120, lr=0.4))
    for t, ids in enumerate([[0, 1], [1, 2], [0, 1]], 1):
        x = server.w
        delta = heard(server, t, ids).up["delta"]
        for theta, i in zip(x + delta, ids, strict=True):
            assert close(gradient(on, i, theta), -0.7 / relative(on, i) * row(server.clients, i)["h"])


@pytest.mark.parametrize(
    ("alg", "copies"),
    [(FedDyn(alpha=0.5), [1, 2, 4, 1]), (FedDC(alpha=0.2), [1, 2, 4, 1]), (FedDyn(alpha=0.5), [3, 3, 3, 3])],
    ids=["feddyn", "feddc", "feddyn-equal"],
)
def test_drift_methods_rest_at_the_optimum_of_the_sample_weighted_loss(alg: Algorithm, copies: list[int]) -> None:
    """Full participation: θ_i = w and mean h = 0; with unequal sizes this is not the optimum of the plain mean."""
    on = quadratics(4, 2, copies=copies)
    server = played(alg, on, LocalSettings(batch=0, steps=5, lr=0.25), [range(4)] * 100)
    delta = heard(server, 101, range(4)).up["delta"]
    assert float(delta.abs().max()) < 1e-9 and float(server.state["h"].abs().max()) < 1e-9
    assert close(server.w, on.optimum([float(k) for k in copies]), 1e-8)
    assert close(server.w, on.optimum(), 0.01) == (len(set(copies)) == 1)


def test_feddc_rests_there_under_partial_participation_too() -> None:
    on = quadratics(5, 2, copies=[1, 2, 4, 1, 2])
    server = played(FedDC(alpha=0.2), on, LocalSettings(batch=0, steps=3, lr=0.2), draws(200, 2, 5))
    assert close(server.w, on.optimum([1.0, 2.0, 4.0, 1.0, 2.0]), 1e-6)


def test_fedavg_solved_exactly_is_biased() -> None:
    """Its clients jump to their own minima, whose mean is not the minimum of the mean."""
    on = quadratics(4, 2)
    x = played(FedAvg(), on, LocalSettings(batch=0, steps=120, lr=1.0), [range(4)]).w
    minima = [torch.linalg.lstsq(*(s.x, s.y)).solution[:, 0] for s in map(on.samples, range(4))]
    assert close(x, torch.stack(minima).mean(0))
    assert float((x - on.optimum()).norm()) > 0.1


# FedDC ----------------------------------------------------------------------------------------------------------


def test_feddc_without_variates_is_feddyn(noisy: Problem) -> None:
    local = LocalSettings(epochs=2, batch=3, lr=0.1, momentum=0.5, weight_decay=0.05, decay=0.9)
    ours, feddyn = (played(alg, noisy, local, COHORTS) for alg in (FedDC(alpha=0.3, variate="off"), FedDyn(alpha=0.3)))
    assert close(ours.w, feddyn.w) and close(ours.state["h"], feddyn.state["h"])
    assert close(ours.clients.read(range(4))["h"], feddyn.clients.read(range(4))["h"])


@pytest.mark.parametrize("rate", ["current", "initial"])
@pytest.mark.parametrize("norm", ["nova", "steps"])
def test_feddc_without_drift_is_scaffold(even: Problem, rate: str, norm: str) -> None:
    ours = played(FedDC(alpha=0.0, drift=False, variate_lr=rate, variate_norm=norm), even, RICH, COHORTS)
    scaffold = played(Scaffold(variate_lr=rate, variate_norm=norm), even, RICH, COHORTS)
    assert close(ours.w, scaffold.w) and close(ours.state["c"], scaffold.state["c"])
    assert close(ours.clients.read(range(4))["c"], scaffold.clients.read(range(4))["c"])


def test_feddc_without_both_is_fedavg(noisy: Problem) -> None:
    ours = played(FedDC(alpha=0.0, drift=False, variate="off"), noisy, RICH, COHORTS)
    assert close(ours.w, played(FedAvg(weighting="uniform"), noisy, RICH, COHORTS).w)


def test_feddc_rules_of_paper_and_code_agree_where_everybody_of_one_size_comes(even: Problem) -> None:
    one, other = (played(FedDC(alpha=0.3, rule=rule), even, RICH, EVERYBODY * 4) for rule in ("code", "paper"))
    assert close(one.w, other.w) and not close(one.w, zeros(even), 0.01)


def test_feddc_displacement_variate_is_the_last_displacement(noisy: Problem) -> None:
    """c_i is (w − θ_i)/(K η) of the client's last round and c the mean over all clients of the latest ones."""
    server = serve(FedDC(alpha=0.3, variate="displacement", variate_lr="current"), noisy, SLOWING)
    last = torch.zeros(4, 3, dtype=torch.float64)
    for t, ids in enumerate(COHORTS, 1):
        steps = [len(list(batches(noisy.fed.plan([i], t, SLOWING)))) for i in ids]
        delta = heard(server, t, ids).up["delta"]
        last[ids] = -delta / (SLOWING.rate(t) * torch.tensor(steps, dtype=torch.float64)[:, None])
        assert close(server.clients.read(range(4))["c"], last) and close(server.state["c"], last.mean(0))


# FedCM ----------------------------------------------------------------------------------------------------------


def test_fedcm_momentum_is_a_running_mean_of_gradients(noisy: Problem) -> None:
    """M⁺ = α·(mean over participants and steps of g) + (1 − α) M, with unequal K_i and a decaying rate."""
    server = serve(FedCM(alpha=0.3), noisy, SLOWING)
    for t, ids in enumerate(COHORTS, 1):
        x, M = server.w, server.state["M"]
        server.run_round(t, ids)
        walks: list[Walk] = [walk(noisy, SLOWING, i, t, x, inside=lambda _, M=M: 0.7 * M, share=0.3) for i in ids]
        mean = torch.stack([w.gradients.mean(0) for w in walks]).mean(0)
        assert close(server.state["M"], 0.3 * mean + 0.7 * M)


def test_fedcm_first_round_takes_steps_of_alpha(noisy: Problem) -> None:
    slow = LocalSettings(epochs=2, batch=3, lr=0.03)
    ours = played(FedCM(alpha=0.3), noisy, PLAIN, COHORTS[:1])
    assert close(ours.w, played(FedAvg(weighting="uniform"), noisy, slow, COHORTS[:1]).w)


def test_fedcm_takes_a_share_above_0_and_at_most_1() -> None:
    for wrong in (0.0, -0.1, 1.5):
        with pytest.raises(ConfigError, match="alpha must be"):
            FedCM(alpha=wrong)


# FedDPC ---------------------------------------------------------------------------------------------------------


def projected(alg: FedDPC, delta: Tensor, prev: Tensor, x: Tensor | None = None) -> tuple[Tensor, State]:
    """One server step; without `x`, from the origin."""
    number = torch.zeros((), dtype=delta.dtype)
    state = {"prev": prev, "ratio": number, "undefined": number}
    rows = cohort([1 / len(delta)] * len(delta), round=2)
    return alg.aggregate(
        torch.zeros_like(prev) if x is None else x, {"delta": delta}, rows._replace(p=rows.p.to(delta.dtype)), state
    )


@pytest.fixture
def updates() -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(1)
    return torch.randn(4, 6, generator=rng, dtype=torch.float64), torch.randn(6, generator=rng, dtype=torch.float64)


@pytest.mark.parametrize("settings", [{}, {"lam": 0.0}, {"lam": -0.5}, {"scaling": False}, {"server_scale": 0.6}])
def test_feddpc_update_is_orthogonal_to_the_last_one(noisy: Problem, settings: dict[str, float]) -> None:
    """Hence ‖w_t − w_{t−2}‖² = ‖w_t − w_{t−1}‖² + ‖w_{t−1} − w_{t−2}‖²; to older ones it is not orthogonal."""
    server, path = serve(FedDPC(**settings), noisy, RICH), [zeros(noisy)]
    for t, ids in enumerate([[0, 1, 3], [1, 2], [0, 2, 3], [2, 3]], 1):
        server.run_round(t, ids)
        path.append(server.w)
    steps = [b - a for a, b in pairwise(path)]
    for a, b in pairwise(steps):
        assert abs(float(a @ b)) < 1e-13 * float(a.norm() * b.norm())
        assert float((a + b) @ (a + b)) == pytest.approx(float(a @ a + b @ b), rel=1e-12)
    assert abs(float(steps[0] @ steps[2])) > 1e-3 * float(steps[0].norm() * steps[2].norm())


@pytest.mark.parametrize("lam", [0.0, 1.0, 2.5, -0.5])
def test_feddpc_lengths(updates: tuple[Tensor, Tensor], lam: float) -> None:
    """‖z_i‖ = |λ‖r_i‖ + ‖δ_i‖|: with λ = 0 the length is kept, for λ ≥ 0 it is between ‖δ_i‖ and (1 + λ)‖δ_i‖."""
    delta, prev = updates
    for row_i in delta:
        z, _ = projected(FedDPC(lam=lam), row_i[None], prev)
        r = row_i - row_i @ prev / (prev @ prev) * prev
        assert float(z.norm()) == pytest.approx(abs(lam * float(r.norm()) + float(row_i.norm())), rel=1e-12)
        assert close(z / z.norm(), r / r.norm())
        if lam >= 0:
            assert row_i.norm() * (1 - 1e-12) <= z.norm() <= (1 + lam) * row_i.norm() * (1 + 1e-12)


def test_feddpc_mean_and_memory(updates: tuple[Tensor, Tensor]) -> None:
    """The mean of the scaled residuals moves w and is remembered; the server's factor moves w alone."""
    delta, prev = updates
    each = torch.stack([projected(FedDPC(), row_i[None], prev)[0] for row_i in delta])
    x, state = projected(FedDPC(server_scale=0.5), delta, prev, torch.ones(6, dtype=torch.float64))
    assert close(x, 1 + 0.5 * each.mean(0)) and close(state["prev"], each.mean(0))


@pytest.mark.parametrize("lam", [0.0, 1.0, -0.5])
def test_feddpc_first_round_is_a_longer_fedavg(noisy: Problem, lam: float) -> None:
    fedavg = played(FedAvg(weighting="uniform"), noisy, RICH, COHORTS[:1])
    assert close(played(FedDPC(lam=lam), noisy, RICH, COHORTS[:1]).w, (1 + lam) * fedavg.w)


def test_feddpc_first_round_without_scaling_is_fedavg(noisy: Problem) -> None:
    fedavg = played(FedAvg(weighting="uniform", server_lr=0.2), noisy, RICH, COHORTS[:1])
    assert close(played(FedDPC(scaling=False, server_lr=0.2), noisy, RICH, COHORTS[:1]).w, fedavg.w)


@pytest.mark.parametrize("factor", [1e-6, 3.0, -2.0, 1e6])
def test_feddpc_length_of_the_last_update_changes_nothing(updates: tuple[Tensor, Tensor], factor: float) -> None:
    delta, prev = updates
    for alg in (FedDPC(), FedDPC(scaling=False)):
        assert close(projected(alg, delta, factor * prev)[0], projected(alg, delta, prev)[0])


def test_feddpc_ablations(updates: tuple[Tensor, Tensor]) -> None:
    delta, prev = updates
    r = delta - torch.outer(delta @ prev / (prev @ prev), prev)
    assert close(projected(FedDPC(scaling=False), delta, prev)[0], r.mean(0))
    assert close(projected(FedDPC(scaling=False, projection=False), delta, prev)[0], delta.mean(0))
    with pytest.raises(ConfigError, match="scaling without projection"):
        FedDPC(projection=False)


@pytest.mark.parametrize("wrong", [0.0, math.inf, math.nan])
def test_feddpc_guard_a_no_last_update_no_projection(updates: tuple[Tensor, Tensor], wrong: float) -> None:
    delta, prev = updates
    x, state = projected(FedDPC(), delta, torch.full_like(prev, wrong))
    assert (
        close(x, 2 * delta.mean(0)) and float(state["ratio"]) == pytest.approx(1.0) and float(state["undefined"]) == 0
    )


@pytest.mark.parametrize("settings", [{}, {"scaling": False}, {"max_ratio": 5.0}])
@pytest.mark.parametrize("along", [1.0, -3.0, 1e-3])
def test_feddpc_guard_b_an_update_along_the_last_one_has_no_direction(
    updates: tuple[Tensor, Tensor], settings: dict[str, float], along: float
) -> None:
    """It contributes nothing, is counted, and still is one of the m."""
    delta, prev = updates
    alone, _ = projected(FedDPC(**settings), delta[:1], prev)
    x, state = projected(FedDPC(**settings), torch.stack([delta[0], along * prev]), prev)
    assert close(x, alone / 2) and float(state["undefined"]) == 1


def test_feddpc_guard_b_begins_at_one_part_in_a_million(updates: tuple[Tensor, Tensor]) -> None:
    delta, prev = updates
    r = delta[0] - delta[0] @ prev / (prev @ prev) * prev
    for part, undefined in ((1e-7, 1), (1e-5, 0)):
        _, state = projected(FedDPC(), (prev + part * prev.norm() * r / r.norm())[None], prev)
        assert float(state["undefined"]) == undefined
        assert float(state["ratio"]) == pytest.approx(0 if undefined else 1 / part, rel=1e-3)


def test_feddpc_guard_c_no_update_contributes_nothing(updates: tuple[Tensor, Tensor]) -> None:
    delta, prev = updates
    x, _ = projected(FedDPC(), torch.stack([delta[0], torch.zeros_like(prev)]), prev)
    assert close(x, projected(FedDPC(), delta[:1], prev)[0] / 2)


def test_feddpc_guard_d_the_ratio_can_be_capped(updates: tuple[Tensor, Tensor]) -> None:
    delta, prev = updates
    r = delta - torch.outer(delta @ prev / (prev @ prev), prev)
    ratio = delta.norm(dim=1) / r.norm(dim=1)
    assert float(ratio.max()) > 1.1 > float(ratio.min())
    x, state = projected(FedDPC(lam=0.5, max_ratio=1.1), delta, prev)
    assert close(x, ((0.5 + ratio.clamp(max=1.1))[:, None] * r).mean(0)) and float(state["ratio"]) == pytest.approx(1.1)
    assert float(projected(FedDPC(), delta, prev)[1]["ratio"]) == pytest.approx(float(ratio.max()))


def test_feddpc_guard_e_if_all_are_along_it_everything_stays(updates: tuple[Tensor, Tensor]) -> None:
    _, prev = updates
    x = torch.ones(6, dtype=torch.float64)
    after, state = projected(FedDPC(), torch.stack([prev, -2 * prev, 0 * prev]), prev, x)
    assert torch.equal(after, x) and torch.equal(state["prev"], prev) and float(state["undefined"]) == 3


def test_feddpc_guard_f_one_participant(noisy: Problem) -> None:
    server = serve(FedDPC(), noisy, PLAIN)
    records = play(server, [[0], [1], [2]])
    assert all(math.isfinite(r["ratio"]) and r["ratio"] >= 1 and r["undefined"] == 0 for r in records)


@pytest.mark.parametrize("part", [1e-2, 1e-4, 1e-5])
def test_feddpc_guard_g_orthogonal_in_single_precision(part: float) -> None:
    """The residual of an update nearly along the last one: one subtraction would leave 1e-3 and more of it."""
    rng = torch.Generator().manual_seed(2)
    prev, noise = (torch.randn(10_000, generator=rng) for _ in range(2))
    x, _ = projected(FedDPC(), (prev + part * noise)[None], prev)
    assert abs(float(x.double() @ prev.double())) < 1e-6 * float(x.double().norm() * prev.double().norm())


# MOON -----------------------------------------------------------------------------------------------------------


def moons_view(on: Problem, space: Space, previous: Tensor, has: float) -> Client:
    scalar = torch.tensor(has, dtype=torch.float64)
    mine = {"prev": previous, "buffers": space.buffers, "has": scalar}
    return Client(space.start, space.buffers, {}, mine, {}, {}, 0.1, 0.1, 0.0, 0.0, math.inf, 1.0, 1.0, 1.0, 2, 0.5)


@pytest.mark.parametrize(
    ("has", "expected"), [(1.0, 5 * math.log(2)), (0.0, 0.0)], ids=["previous is global", "no previous"]
)
def test_moon_term_is_a_constant(has: float, expected: float) -> None:
    """If the previous model is the global one the term is log 2, without a previous one it is 0: no gradient in both."""
    on = labelled(tastes(SIZES))
    space = Space(on.module, torch.float64)
    task = Functional(on.module, space)
    batch, w = Batch(*on.samples(1)), space.start + 0.3
    me = moons_view(on, space, space.start if has else torch.zeros_like(space.start), has)
    loss = lambda u: MOON(mu=5.0).loss(task, u, batch, me)
    assert float(loss(w) - task.loss(w, batch)) == pytest.approx(expected, abs=1e-7)  # 1e-8 beside the norms
    assert close(torch.func.grad(loss)(w), torch.func.grad(lambda u: task.loss(u, batch))(w))


def test_moon_with_dead_features_has_finite_gradients() -> None:
    """All features zero, in the trained, the global and the previous model: 1e-8 keeps the cosine a number."""
    on = labelled(tastes(SIZES))
    with torch.no_grad():
        on.module.fc1.bias.fill_(-100.0)
    server = serve(MOON(), on, PLAIN)
    records = play(server, EVERYBODY * 2)
    assert [r["dropped"] for r in records] == [0, 0]


def test_moon_first_round_is_fedavg_and_a_newcomers_first_round_too() -> None:
    on = labelled(tastes(SIZES))
    server = played(MOON(mu=5.0), on, RICH, [[0, 1]])
    assert torch.equal(server.w, played(FedAvg(), on, RICH, [[0, 1]]).w)
    fedavg = serve(FedAvg(), on, RICH)
    fedavg.w = server.w
    ours, plain = (heard(s, 2, [0, 2]).up["delta"] for s in (server, fedavg))
    assert not close(ours[0], plain[0], 1e-6)  # a client that was there before
    assert torch.equal(ours[1], plain[1])  # a newcomer


def test_moon_keeps_the_last_own_model_however_old() -> None:
    on = labelled(tastes(SIZES), "batch")
    server = serve(MOON(), on, PLAIN)
    x = server.w
    out = heard(server, 1, [0, 1])
    play(server, [[1, 2], [2, 3]], first=2)
    kept = row(server.clients, 0)
    assert close(kept["prev"], x + out.up["delta"][0], 1e-15)
    assert torch.equal(kept["buffers"], out.buffers[0]) and float(kept["has"]) == 1


# FedBN ----------------------------------------------------------------------------------------------------------


def test_fedbn_without_batch_norm_is_fedavg_and_says_so() -> None:
    on = labelled(tastes(SIZES))
    ours = played(FedBN(), on, RICH, COHORTS)
    assert torch.equal(ours.w, played(FedAvg(weighting="uniform"), on, RICH, COHORTS).w)
    assert "FedAvg" in FedBN().remark(ours.space) and not len(ours.privates)
    assert FedBN().remark(serve(FedBN(), labelled(tastes(SIZES), "batch"), RICH).space) == ""


def test_fedbn_finds_batch_norm_by_type_not_by_name() -> None:
    class Misleading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn_like, self.layer, self.out = nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.layer(self.bn_like(x)))  # type: ignore[no-any-return]

    space = Space(Misleading(), torch.float64)
    part = FedBN().private(space)
    assert part.indices.tolist() == list(range(15, 21)) and part.buffer_indices.tolist() == list(range(6))


def test_fedbn_clients_share_all_but_their_batch_norm() -> None:
    """Every client starts from the common coordinates and its own batch norm; the server's own stays as it began."""
    on = labelled(tastes(SIZES), "batch")
    server = serve(FedBN(), on, PLAIN)
    start, w, b = everything(server), server.private.indices, server.private.buffer_indices
    assert len(w) == 8 and len(b) == 8
    others = [i for i in range(server.space.P) if i not in w.tolist()]
    before = {i: {"w": start["w"][w], "b": start["buffers"][b]} for i in range(4)}
    for t, ids in enumerate(COHORTS, 1):
        x = server.w
        listening = Listening(server.engine)
        server.engine = listening
        server.run_round(t, ids)
        server.engine = listening.engine
        inputs, _, out = listening.heard[0]
        for k, i in enumerate(ids):
            assert torch.equal(inputs.x[k][others], x[others])
            assert torch.equal(inputs.x[k][w], before[i]["w"]) and torch.equal(inputs.buffers[k][b], before[i]["b"])
            before[i] = row(server.privates, i)
            assert torch.equal(before[i]["w"], out.w[k][w]) and torch.equal(before[i]["b"], out.buffers[k][b])  # type: ignore[index]
        assert close(server.w[others], out.w.mean(0)[others])  # type: ignore[union-attr]
        assert torch.equal(server.w[w], start["w"][w]) and torch.equal(server.buffers[b], start["buffers"][b])
        assert all(torch.equal(row(server.privates, i)[n], before[i][n]) for i in range(4) for n in "wb")
    assert not torch.equal(before[0]["w"], before[1]["w"]) and not torch.equal(before[0]["b"], before[1]["b"])


def evaluated(server: Server, on: Problem) -> Record:
    """What a run would record of this server."""
    task = Functional(on.module, server.space, on.fed.criterion)
    evaluator = Evaluator(task, on.fed, on.fed.test)
    house = BuiltRun(
        Config(),
        on.fed,
        on.module,
        server.space,
        task,
        evaluator,
        server,
        Kernels(torch.device("cpu"), torch.float64),
        {},
    )
    return evaluation_record(house, evaluate_models(house))


def loss_of(on: Problem, server: Server, x: Tensor, buffers: Tensor) -> float:
    on.module.eval()
    state = server.space.split(x) | server.space.split_buffers(buffers)
    return float(F.cross_entropy(functional_call(on.module, state, (on.fed.test.x,))[0], on.fed.test.y))


def test_fedbn_three_evaluations() -> None:
    """Each client's own model on the test set, meaned; the mean of all clients' batch norm; the server's own."""
    on = labelled(tastes(SIZES), "batch")
    found, expected = [], []
    for how in ("clients", "server_mean", "server_init"):
        server = played(FedBN(eval=how), on, PLAIN, [[0, 1], [1, 3]])  # client 2 never came
        found.append(evaluated(server, on)["loss"])
        own = [row(server.privates, i) for i in range(4)]
        assert torch.equal(own[2]["w"], server.space.start[server.private.indices])
        worn = lambda part, server=server: loss_of(
            on, server, *with_private(server.w, server.buffers, server.private, part)
        )
        mean = {n: torch.stack([part[n] for part in own]).mean(0) for n in "wb"}
        each = {
            "clients": sum(map(worn, own)) / 4,
            "server_mean": worn(mean),
            "server_init": loss_of(on, server, server.w, server.buffers),
        }
        expected.append(each[how])
    assert found == pytest.approx(expected, rel=1e-12)
    assert len({round(v, 6) for v in found}) == 3


def test_feddyn_evaluates_the_server_and_the_participants() -> None:
    on = labelled(tastes(SIZES))
    server = played(FedDyn(), on, PLAIN, COHORTS)
    record = evaluated(server, on)
    assert record["loss"] == pytest.approx(loss_of(on, server, server.w, server.buffers), rel=1e-12)
    assert record["loss_participants"] == pytest.approx(
        loss_of(on, server, server.state["mean"], server.buffers), rel=1e-12
    )
    assert record["loss"] != pytest.approx(record["loss_participants"], rel=1e-3)


@pytest.mark.parametrize(
    ("alg", "names"),
    [(Scaffold(), ["c"]), (FedDyn(), ["h"]), (FedDC(), ["c", "h"])],
    ids=["scaffold", "feddyn", "feddc"],
)
def test_means_that_are_never_recomputed_are_kept_in_double_precision(alg: Algorithm, names: list[str]) -> None:
    server = played(alg, labelled(tastes(SIZES), dtype=torch.float32), PLAIN, COHORTS)
    assert server.w.dtype == torch.float32
    assert all(server.state[name].dtype == torch.float64 for name in names)


# two rounds by pencil -------------------------------------------------------------------------------------------
# On the line, as textbook.py says.


def test_fedavg_by_pencil() -> None:
    # Sizes 1, 3, 2. Client 0 from 0: 0.1, 0.19. Client 1: −0.8, −1.28. x = (0.19 − 3 · 1.28) / 4 = −0.9125.
    # Client 0 from there: 1 − 0.81 · 1.9125 = −0.549125. Client 2: 3 − 0.64 · 3.9125 = 0.496.
    # x = (−0.549125 + 2 · 0.496) / 3 = 0.147625.
    assert by_pencil(FedAvg(), copies=[1, 3, 2, 1])[0] == exactly(-0.9125, 0.147625)


def test_fedavg_two_sided_by_pencil() -> None:
    # Displacements 0.19 and −1.28, mean −0.545; η_g = 0.05 is half of the local rate: x = −0.2725.
    # Client 0: 1 − 0.81 · 1.2725 = −0.030725, Client 2: 3 − 0.64 · 3.2725 = 0.9056; mean 0.4374375.
    # x = −0.2725 + ½ (0.4374375 + 0.2725) = 0.08246875.
    assert by_pencil(FedAvg(weighting="uniform", server_lr=0.05))[0] == exactly(-0.2725, 0.08246875)


def test_fedprox_by_pencil() -> None:
    # μ = 1. Client 0: θ ← 0.8 θ + 0.1: 0.1, 0.18. Client 1: θ ← 0.5 θ − 0.8: −0.8, −1.2. x = −0.51.
    # Client 0: θ ← θ − 0.1 (θ − 1 + θ + 0.51) = 0.8 θ + 0.049: −0.359, −0.2382.
    # Client 2: θ ← θ − 0.1 (2θ − 6 + θ + 0.51) = 0.7 θ + 0.549: 0.192, 0.6834. x = 0.2226.
    assert by_pencil(FedProx(mu=1.0))[0] == exactly(-0.51, 0.2226)


def test_fednova_by_pencil() -> None:
    # One epoch in batches of one: K = 1, 3, 2 and as many samples.
    # Client 0 from 0: 0.1. Client 1: −2 (1 − 0.6³) = −1.568. p = ¼, ¾; δ/a = 0.1 and −1.568/3; τ_eff = ¼ + 9/4 = 2.5.
    # x = 2.5 (0.025 − 0.392) = −0.9175.
    # Client 0: δ = 0.1 · 1.9175 = 0.19175. Client 2: δ = 0.36 · 3.9175 = 1.4103. p = ⅓, ⅔; τ_eff = ⅓ + 4/3 = 5/3.
    # x = −0.9175 + 5/3 (0.19175/3 + 1.4103/3) = −0.9175 + 5/9 · 1.60205 = −0.0274722…
    assert by_pencil(FedNova(), LocalSettings(batch=1, lr=0.1), [1, 3, 2, 1])[0] == exactly(
        -0.9175, -0.9175 + 5 / 9 * 1.60205
    )


def test_scaffold_by_pencil() -> None:
    # The first round is FedAvg: 0.19 and −1.28, x = −0.545. c_0 = −0.19/0.2 = −0.95, c_1 = 6.4, c = 5.45/4 = 1.3625.
    # Client 0: θ ← 0.9 θ + 0.1 − 0.1 (1.3625 + 0.95) = 0.9 θ − 0.13125: −0.62175, −0.690825.
    # Client 2: θ ← 0.8 θ + 0.6 − 0.13625: 0.02775, 0.48595. x = −0.1024375.
    # c_0 = mean of −1.545 and −1.62175 = −1.583375; c_2 = mean of 2(−0.545 − 3) and 2(0.02775 − 3) = −6.51725.
    # c = (−1.583375 + 6.4 − 6.51725)/4 = −0.42515625.
    xs, server = by_pencil(Scaffold())
    assert xs == exactly(-0.545, -0.1024375)
    assert server.clients.read(range(4))["c"].flatten().tolist() == exactly(-1.583375, 6.4, -6.51725, 0.0)
    assert server.state["c"].tolist() == exactly(-0.42515625)


def test_scaffold_option_i_by_pencil() -> None:
    # c_0 = −1 and c_1 = 8, the gradients at 0; c = 7/4.
    # Client 0: θ ← 0.9 θ + 0.1 − 0.275: −0.6655, −0.77395. Client 2: θ ← 0.8 θ + 0.6 − 0.175: −0.011, 0.4162. x = −0.178875.
    # c_0 = −1.545, c_2 = −7.09, the gradients at −0.545; c = (−1.545 + 8 − 7.09)/4 = −0.15875.
    xs, server = by_pencil(Scaffold(option="I"))
    assert xs == exactly(-0.545, -0.178875) and server.state["c"].tolist() == exactly(-0.15875)


def test_feddyn_by_pencil() -> None:
    # α = 1. Client 0: θ ← θ − 0.1 (θ − 1 + θ) = 0.8 θ + 0.1: 0.1, 0.18. Client 1: 0.5 θ − 0.8: −0.8, −1.2.
    # h_0 = 0.18, h_1 = −1.2; x = −0.51 − 1.02/4 = −0.765.
    # Client 0: θ ← θ − 0.1 (θ − 1 + θ + 0.765 + 0.18) = 0.8 θ + 0.0055: −0.6065, −0.4797; h_0 = 0.18 + 0.2853.
    # Client 2: θ ← θ − 0.1 (2θ − 6 + θ + 0.765) = 0.7 θ + 0.5235: −0.012, 0.5151; h_2 = 1.2801.
    # x = 0.0177 + (0.4653 − 1.2 + 1.2801)/4 = 0.15405.
    xs, server = by_pencil(FedDyn(alpha=1.0))
    assert xs == exactly(-0.765, 0.15405)
    assert server.clients.read(range(4))["h"].flatten().tolist() == exactly(0.4653, -1.2, 1.2801, 0.0)
    assert float(server.state["mean"]) == pytest.approx(0.0177)


def test_feddc_by_pencil() -> None:
    # α = 1. The first round is FedDyn's: x = −0.765, h_0 = 0.18, h_1 = −1.2. c_0 = −0.9, c_1 = 6, c = 5.1/4 = 1.275.
    # Client 0: θ ← 0.8 θ + 0.0055 − 0.1 (1.275 + 0.9) = 0.8 θ − 0.212: −0.824, −0.8712; h_0 = 0.18 − 0.1062.
    # Client 2: θ ← 0.7 θ + 0.5235 − 0.1275 = 0.7 θ + 0.396: −0.1395, 0.29835; h_2 = 1.06335.
    # x = −0.286425 + (0.0738 − 1.2 + 1.06335)/4 = −0.3021375.
    # c_0 = −0.9 − 1.275 + 0.1062/0.2 = −1.644, c_2 = −1.275 − 1.06335/0.2 = −6.59175; c = 1.275 + (−0.744 − 6.59175)/4.
    xs, server = by_pencil(FedDC(alpha=1.0))
    assert xs == exactly(-0.765, -0.3021375)
    kept = server.clients.read(range(4))
    assert kept["h"].flatten().tolist() == exactly(0.0738, -1.2, 1.06335, 0.0)
    assert kept["c"].flatten().tolist() == exactly(-1.644, 6.0, -6.59175, 0.0)
    assert server.state["c"].tolist() == exactly(-0.5589375)


def test_fedcm_by_pencil() -> None:
    # α = ½, M = 0: half steps. Client 0: 0.05, 0.0975. Client 1: −0.4, −0.72. x = −0.31125, M = 0.31125/0.2 = 1.55625.
    # Client 0: θ ← 0.95 θ + 0.05 − 0.0778125: −0.3235, −0.3351375.
    # Client 2: θ ← 0.9 θ + 0.3 − 0.0778125: −0.0579375, 0.17004375. x = −0.082546875.
    # M = (−0.31125 + 0.082546875)/0.2 = −1.143515625.
    xs, server = by_pencil(FedCM(alpha=0.5))
    assert xs == exactly(-0.31125, -0.082546875) and server.state["M"].tolist() == exactly(-1.143515625)


def test_feddpc_by_pencil() -> None:
    # In the plane: ½‖θ − a_i‖², one step of rate ½, λ = 1. a_0 = (6, 8), a_1 = (2, 0): δ = (3, 4) and (1, 0).
    # First round: twice the mean, x = (4, 4) = d.
    # Client 0: δ = (1, 2), along d (1.5, 1.5), r = (−½, ½), ratio √5/√½ = √10.
    # Client 2, a_2 = (4, 2): δ = (0, −1), along d (−½, −½), r = (½, −½), ratio √2.
    # x = (4, 4) + ½ ((1 + √10) − (1 + √2)) (−½, ½).
    a = torch.tensor([[6.0, 8.0], [2.0, 0.0], [4.0, 2.0]], dtype=torch.float64)
    on = least_squares(torch.eye(2, dtype=torch.float64).expand(3, 2, 2), a)
    server = serve(FedDPC(), on, LocalSettings(batch=0, steps=1, lr=0.5))
    server.run_round(1, [0, 1])
    assert server.w.tolist() == exactly(4.0, 4.0)
    record = server.run_round(2, [0, 2])
    step = (math.sqrt(10) - math.sqrt(2)) / 4
    assert server.w.tolist() == exactly(4 - step, 4 + step)
    assert server.state["prev"].tolist() == exactly(-step, step)
    assert record["ratio"] == pytest.approx(math.sqrt(10)) and record["undefined"] == 0


class Angle(nn.Module):
    """Output w·x and features (cos w, sin w): the cosine of two models' features is the cosine of w − w′."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * self.w, torch.cat([torch.cos(self.w), torch.sin(self.w)]).expand(len(x), 2)


def test_moon_by_pencil() -> None:
    # The first round is FedAvg: 0.19 and −1.28 (equal sizes), x = −0.545; the previous models are 0.19 and −1.28.
    # Client 0 then: g(θ) = θ − 1 + μ σ(f) f′,  f = (cos(θ − p) − cos(θ − x))/τ,  f′ = (sin(θ − x) − sin(θ − p))/τ.
    # Client 2 is new: 3 − 0.64 · 3.545 = 0.7312.
    on = Problem(scalars(*CLIENTS).fed, Angle())
    server = serve(MOON(mu=2.0, temperature=0.5), on, TWICE)
    server.run_round(1, [0, 1])
    assert float(server.w) == pytest.approx(-0.545, abs=1e-12)
    server.run_round(2, [0, 2])
    theta, p, x = -0.545, 0.19, -0.545
    for _ in range(2):
        f = (math.cos(theta - p) - math.cos(theta - x)) / 0.5
        slope = (math.sin(theta - x) - math.sin(theta - p)) / 0.5
        theta -= 0.1 * (theta - 1 + 2.0 * slope / (1 + math.exp(-f)))
    assert float(server.w) == pytest.approx((theta + 0.7312) / 2, abs=1e-8)  # 1e-8 beside the norms
    assert row(server.clients, 0)["prev"].tolist() == pytest.approx([theta], abs=1e-8)


class Beside(nn.Module):
    """w·x plus batch norm of x. On x = ±1 batch norm is γx + β."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1, eps=1e-30)
        nn.init.zeros_(self.fc.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) + self.norm(x)  # type: ignore[no-any-return]


def test_fedbn_by_pencil() -> None:
    # Client i holds (−1, −s_i + m_i) and (1, s_i + m_i): gradients w + γ − s_i for w and γ, β − m_i for β.
    # w = 0, γ = 1, β = 0, one step of rate ½. s, m = (3, 2), (−1, 4), (5, −6).
    # Client 0: w = 1, γ = 2, β = 1. Client 1: w = −1, γ = 0, β = 2. x: w = 0, γ and β as they began.
    # Running variance: 0.9 + 0.1 · 2 = 1.1 (unbiased), running mean 0.
    # Client 0 from w = 0, γ = 2, β = 1: residual −1: w = ½, γ = 2½, β = 1½; variance 1.19.
    # Client 2 from w = 0, γ = 1, β = 0: residual −4: w = 2, γ = 3, β = −3. x: w = 5/4.
    inputs = torch.tensor([[-1.0], [1.0]], dtype=torch.float64)
    on = Problem(
        federation([Samples(inputs, inputs * s + m) for s, m in ((3.0, 2.0), (-1.0, 4.0), (5.0, -6.0))]), Beside()
    )
    server = serve(FedBN(), on, LocalSettings(batch=0, steps=1, lr=0.5))
    server.run_round(1, [0, 1])
    assert server.w.tolist() == exactly(0.0, 1.0, 0.0)
    assert server.privates.read(range(3))["w"].tolist() == [exactly(2.0, 1.0), exactly(0.0, 2.0), exactly(1.0, 0.0)]
    assert server.privates.read(range(3))["b"].tolist() == [exactly(0.0, 1.1), exactly(0.0, 1.1), exactly(0.0, 1.0)]
    server.run_round(2, [0, 2])
    assert server.w.tolist() == exactly(1.25, 1.0, 0.0) and server.buffers.tolist() == exactly(0.0, 1.0)
    assert server.privates.read(range(3))["w"].tolist() == [exactly(2.5, 1.5), exactly(0.0, 2.0), exactly(3.0, -3.0)]
    assert server.privates.read(range(3))["b"].tolist() == [exactly(0.0, 1.19), exactly(0.0, 1.1), exactly(0.0, 1.1)]


def test_the_tests_own_sums() -> None:
    """What the tests above compare with: full gradients of a quadratic, and states that are told apart."""
    on = scalars((2.0, 3.0))
    assert close(gradient(on, 0, torch.tensor([1.0], dtype=torch.float64)), -4.0)
    assert close(walk(on, TWICE, 0, 1, zeros(on)).end, 3 * (1 - 0.64))
    assert not same({"x": torch.zeros(1)}, {"x": torch.ones(1)})
