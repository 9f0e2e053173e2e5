"""FedGA: local training starts from a displaced model."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from textbook import (
    ALL,
    COHORTS,
    EVERY_TERM,
    ONE_STEP,
    SIZES,
    exactly,
    full_gradient,
    momentum_length,
    two_rounds_on_the_line,
    vectors,
    zeros,
)
from torch import Tensor
from torch.func import grad

from askew.algorithms import FedAvg, FedGA
from askew.data.federation import LocalSettings
from askew.errors import ConfigError
from problems import Problem, client_row, close, make_server, softmax_regression, train_locally, trained_server


def test_rounds_of_the_exact_form_follow_the_formulas(noisy: Problem) -> None:
    server, w = make_server(FedGA(beta=0.4, server_scale=0.8), noisy, EVERY_TERM), zeros(noisy)
    for t, ids in enumerate(COHORTS, 1):
        server.run_round(t, ids)
        G = torch.stack([full_gradient(noisy, i, w) for i in ids])
        starts = w + 0.4 * (G - G.mean(0))
        ends = [train_locally(noisy, EVERY_TERM, i, t, start).theta for i, start in zip(ids, starts, strict=True)]
        w = w + 0.8 * (torch.stack(ends).mean(0) - w)
        assert close(server.w, w)


@pytest.mark.parametrize("length", ["nova", "steps"])
def test_rounds_of_the_memory_form_follow_the_formulas(noisy: Problem, length: str) -> None:
    """Stored gradients are measured from the displaced start and per unit of the path's length, a_i or the paper's K_i;
    clients without one start at w.
    """
    alg = FedGA(beta=0.4, form="memory", length=length)
    server, w, mean = make_server(alg, noisy, EVERY_TERM), zeros(noisy), zeros(noisy)
    length_of = (lambda K: momentum_length(K, EVERY_TERM.momentum)) if length == "nova" else float
    G: dict[int, Tensor] = {}
    for t, ids in enumerate(COHORTS, 1):
        server.run_round(t, ids)
        step, update = zeros(noisy), zeros(noisy)
        for i in ids:
            start = w + 0.4 * (G[i] - mean) if i in G else w
            end, _, gradients = train_locally(noisy, EVERY_TERM, i, t, start)
            path = length_of(len(gradients)) * EVERY_TERM.rate(t)
            G[i] = (start - end) / path
            step, update = step + (end - w) / len(ids), update + (w - end) / path / len(ids)
        w, mean = w + step, update
        assert close(server.w, w) and close(server.state["g"], mean)
        assert all(close(client_row(server.clients, i)["g"], G[i]) for i in G)


def test_the_exact_form_measures_its_gradients_and_has_no_length() -> None:
    with pytest.raises(ConfigError, match='length is a setting of form = "memory"'):
        FedGA(length="steps")


def test_two_rounds_of_the_exact_form_by_hand() -> None:
    # Gradients −1, 8: starts ∓0.45; θ = 1 − 0.81 · 1.45 = −0.1745 and −2 + 0.36 · 2.45 = −1.118; w = −0.64625.
    # Gradients −1.64625, −7.2925: starts −0.3639375 and −0.9285625; θ = −0.104789375 and 0.48572.
    assert two_rounds_on_the_line(FedGA(beta=0.1))[0] == exactly(-0.64625, 0.1904653125)


def test_two_rounds_of_the_memory_form_by_hand() -> None:
    # w = −0.545; G_0 = −0.95, G_1 = 6.4, Ḡ = 2.725. Client 0 starts at −0.545 − 0.3675 = −0.9125: θ = −0.549125;
    # client 2 at −0.545: θ = 0.7312. G_0 = −0.363375 / 0.2.
    path, server = two_rounds_on_the_line(FedGA(beta=0.1, form="memory"))
    assert path == exactly(-0.545, 0.0910375)
    assert client_row(server.clients, 0)["g"].tolist() == exactly(-1.816875)
    assert server.state["g"].tolist() == exactly(-(0.0910375 + 0.545) / 0.2)


@pytest.mark.parametrize("form", ["exact", "memory"])
def test_without_displacement_it_is_fedavg(noisy: Problem, form: str) -> None:
    one, other = (
        trained_server(FedGA(beta=0.0, form=form), noisy, EVERY_TERM, COHORTS),
        trained_server(FedAvg(weighting="uniform"), noisy, EVERY_TERM, COHORTS),
    )
    assert close(one.w, other.w)


def test_displacements_sum_to_zero(noisy: Problem) -> None:
    """So steps of no length leave w."""
    server = make_server(FedGA(beta=5.0), noisy, LocalSettings(lr=1e-200))
    server.w = vectors([1.0, -2.0, 3.0])[0]
    before = server.w
    server.run_round(1, [0, 1, 3])
    assert close(server.w, before, 1e-14)


def test_the_first_round_of_the_memory_form_is_fedavg(noisy: Problem) -> None:
    one = trained_server(FedGA(beta=3.0, form="memory"), noisy, EVERY_TERM, COHORTS[:1])
    assert torch.equal(one.w, trained_server(FedAvg(weighting="uniform"), noisy, EVERY_TERM, COHORTS[:1]).w)


def test_it_steps_down_the_variance_of_gradients() -> None:
    """The mean first gradient is ∇f + β ∇(½ mean ‖G_i − Ḡ‖²) up to β²: halving β quarters the error."""
    problem = softmax_regression(SIZES)
    samples = [problem.samples(i) for i in ALL]

    def loss(i: int, w: Tensor) -> Tensor:
        return F.cross_entropy(samples[i].x @ w[:12].view(3, 4).T + w[12:], samples[i].y)

    def half_variance(w: Tensor) -> Tensor:
        G = torch.stack([grad(lambda u, i=i: loss(i, u))(w) for i in ALL])
        return 0.5 * (G - G.mean(0)).square().sum(1).mean()

    errors = []
    for beta in (0.02, 0.01):
        server = make_server(FedGA(beta=beta), problem, ONE_STEP)
        w = server.w = server.space.start + 0.3
        server.run_round(1, ALL)
        mean = torch.stack([grad(lambda u, i=i: loss(i, u))(w) for i in ALL]).mean(0)
        errors.append(float(((w - server.w) / 0.3 - mean - beta * grad(half_variance)(w)).norm()))
    assert errors[0] < 1e-3 and errors[0] / errors[1] == pytest.approx(4, rel=0.1)
