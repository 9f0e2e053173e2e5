"""MOON: a contrastive term on features."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from textbook import EVERY_TERM, EVERYBODY, LINE_CLIENTS, PLAIN, SIZES, TWO_STEPS, assert_defaults, sample_shares
from torch import Tensor, nn
from torch.func import functional_call

from askew.algorithms import MOON, FedAvg
from askew.core.space import Space
from askew.core.task import Functional
from askew.core.types import Batch, Client, State
from askew.data.federation import LocalSettings
from askew.engine.server import Server
from problems import (
    Problem,
    classification,
    client_row,
    close,
    first_client_batches,
    make_server,
    round_outputs,
    run_rounds,
    scalars,
    skewed_samples,
    trained_server,
)


def cosine(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(1) / (a.norm(dim=1).clamp(min=1e-8) * b.norm(dim=1).clamp(min=1e-8))


def moon_training(
    problem: Problem,
    server: Server,
    local: LocalSettings,
    round: int,
    client: int,
    received: State,
    previous: State | None,
) -> State:
    """One client's round of MOON by torch alone: μ = 2, τ = 0.4."""
    model = {n: v.clone() for n, v in received.items()}
    weights = [n for n, _ in problem.module.named_parameters()]
    velocity = {n: torch.zeros_like(model[n]) for n in weights}

    def features(state: State, inputs: Tensor) -> Tensor:
        problem.module.eval()
        with torch.no_grad():
            z: Tensor = functional_call(problem.module, state, (inputs,))[1]
        return z

    for inputs, labels in first_client_batches(
        problem.fed.plan([client], round, local, smallest_batch=server.smallest_batch)
    ):
        z_g, z_p = features(received, inputs), None if previous is None else features(previous, inputs)
        leaves = {n: model[n].detach().requires_grad_() for n in weights}
        problem.module.train()
        # The statistics in `model` are renewed in place.
        output, z = functional_call(problem.module, model | leaves, (inputs,))
        loss = F.cross_entropy(output, labels)
        if z_p is not None:
            near, far = (torch.exp(cosine(z, other) / 0.4) for other in (z_g, z_p))
            loss = loss + 2.0 * (-torch.log(near / (near + far))).mean()
        for n, g in zip(weights, torch.autograd.grad(loss, list(leaves.values())), strict=True):
            velocity[n] = local.momentum * velocity[n] + g
            model[n] = model[n] - local.rate(round) * velocity[n]
    return model


@pytest.mark.parametrize("norm", ["none", "batch"])
def test_rounds_follow_the_formulas(norm: str) -> None:
    """The −log of a quotient as printed; frozen models in evaluation mode, each with the statistics of its round."""
    problem = classification(skewed_samples(SIZES), norm)
    local = LocalSettings(epochs=2, batch=3, lr=0.3, momentum=0.5)
    server = make_server(MOON(mu=2.0, temperature=0.4), problem, local)
    previous: dict[int, State] = {}
    for t, ids in enumerate([[0, 1, 3], [1, 2], [0, 1, 2, 3]], 1):
        received = {**server.space.split(server.w), **server.space.split_buffers(server.buffers)}
        models = {i: moon_training(problem, server, local, t, i, received, previous.get(i)) for i in ids}
        server.run_round(t, ids)
        previous |= models
        p = sample_shares(problem, ids)
        for name, value in {**server.space.split(server.w), **server.space.split_buffers(server.buffers)}.items():
            assert close(value, sum(p_i * models[i][name] for p_i, i in zip(p, ids, strict=True)), 1e-11)


class Angle(nn.Module):
    """Output w·x and features (cos w, sin w): the cosine of two models' features is the cosine of w − w′."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * self.w, torch.cat([torch.cos(self.w), torch.sin(self.w)]).expand(len(x), 2)


def test_two_rounds_by_hand() -> None:
    # The first round is FedAvg: 0.19 and −1.28 (equal sizes), w = −0.545; the previous models are 0.19 and −1.28.
    # Client 0 then: g(θ) = θ − 1 + μ σ(f) f′,  f = (cos(θ − p) − cos(θ − w))/τ,  f′ = (sin(θ − w) − sin(θ − p))/τ.
    # Client 2 is new: 3 − 0.64 · 3.545 = 0.7312.
    problem = Problem(scalars(*LINE_CLIENTS).fed, Angle())
    server = make_server(MOON(mu=2.0, temperature=0.5), problem, TWO_STEPS)
    server.run_round(1, [0, 1])
    assert float(server.w) == pytest.approx(-0.545, abs=1e-12)
    server.run_round(2, [0, 2])
    theta, p, w = -0.545, 0.19, -0.545
    for _ in range(2):
        f = (math.cos(theta - p) - math.cos(theta - w)) / 0.5
        slope = (math.sin(theta - w) - math.sin(theta - p)) / 0.5
        theta -= 0.1 * (theta - 1 + 2.0 * slope / (1 + math.exp(-f)))
    assert float(server.w) == pytest.approx((theta + 0.7312) / 2, abs=1e-8)  # 1e-8 beside the norms
    assert client_row(server.clients, 0)["prev"].tolist() == pytest.approx([theta], abs=1e-8)


def moon_client(space: Space, previous: Tensor, has: float) -> Client:
    """A client in the second round with this previous model; `has` 0: it has none."""
    state = {"prev": previous, "buffers": space.buffers, "has": torch.tensor(has, dtype=torch.float64)}
    return Client(space.start, space.buffers, {}, state, {}, {}, 0.1, 0.1, 0.0, 0.0, math.inf, 1.0, 1.0, 1.0, 2, 0.5)


@pytest.mark.parametrize(
    ("has", "expected"), [(1.0, 5 * math.log(2)), (0.0, 0.0)], ids=["previous is global", "no previous"]
)
def test_the_term_is_constant_without_a_previous_model_or_if_it_is_the_global_one(has: float, expected: float) -> None:
    """With the global model as the previous one the term is log 2, without a previous one 0; neither has a gradient."""
    problem = classification(skewed_samples(SIZES))
    space = Space(problem.module, torch.float64)
    task = Functional(problem.module, space)
    batch, theta = Batch(*problem.samples(1)), space.start + 0.3
    client = moon_client(space, space.start if has else torch.zeros_like(space.start), has)
    loss = lambda u: MOON(mu=5.0).loss(task, u, batch, client)
    assert float(loss(theta) - task.loss(theta, batch)) == pytest.approx(expected, abs=1e-7)  # 1e-8 beside the norms
    assert close(torch.func.grad(loss)(theta), torch.func.grad(lambda u: task.loss(u, batch))(theta))


def test_gradients_of_zero_features_are_finite() -> None:
    """All features zero, in the trained, the global and the previous model: 1e-8 keeps the cosine a number."""
    problem = classification(skewed_samples(SIZES))
    with torch.no_grad():
        problem.module.fc1.bias.fill_(-100.0)
    server = make_server(MOON(), problem, PLAIN)
    records = run_rounds(server, EVERYBODY * 2)
    assert [r["dropped"] for r in records] == [0, 0]


def test_the_first_round_of_a_client_is_fedavg() -> None:
    problem = classification(skewed_samples(SIZES))
    server = trained_server(MOON(mu=5.0), problem, EVERY_TERM, [[0, 1]])
    assert torch.equal(server.w, trained_server(FedAvg(), problem, EVERY_TERM, [[0, 1]]).w)
    fedavg = make_server(FedAvg(), problem, EVERY_TERM)
    fedavg.w = server.w
    ours, plain = (round_outputs(s, 2, [0, 2]).up["delta"] for s in (server, fedavg))
    assert not close(ours[0], plain[0], 1e-6)  # a client that took part before
    assert torch.equal(ours[1], plain[1])  # a client in its first round


def test_a_client_keeps_its_last_model_however_old() -> None:
    problem = classification(skewed_samples(SIZES), "batch")
    server = make_server(MOON(), problem, PLAIN)
    w = server.w
    outputs = round_outputs(server, 1, [0, 1])
    run_rounds(server, [[1, 2], [2, 3]], first=2)
    state = client_row(server.clients, 0)
    assert close(state["prev"], w + outputs.up["delta"][0], 1e-15)
    assert torch.equal(state["buffers"], outputs.buffers[0]) and float(state["has"]) == 1


def test_defaults_are_the_published_ones() -> None:
    assert_defaults(MOON(), {"weighting": "samples", "temperature": 0.5})
