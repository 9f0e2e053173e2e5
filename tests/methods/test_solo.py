"""SOLO: every client trains alone, with one optimiser for all rounds."""

from __future__ import annotations

import pytest
import torch
from textbook import ALL, COHORTS, PLAIN, exactly, two_rounds_on_the_line, zeros

from askew.algorithms import Solo
from askew.data.dataset import Samples
from askew.data.federation import LocalSettings
from askew.engine.evaluate import Evaluator, client_spread, evaluate_clients
from problems import (
    Problem,
    client_row,
    close,
    federation,
    linear_model,
    make_server,
    softmax_regression,
    train_locally,
    trained_server,
)


@pytest.mark.parametrize("schedule", ["exponential", "linear", "cosine"])
def test_rounds_follow_the_formulas(noisy: Problem, schedule: str) -> None:
    """Every client plain SGD from the common start with one momentum for all rounds; w stays, the rate
    falls over the rounds."""
    local = LocalSettings(epochs=2, batch=3, lr=0.1, momentum=0.6, weight_decay=0.03, clip=0.9, schedule=schedule)
    server = make_server(Solo(), noisy, local, rounds=len(COHORTS))
    theta, v = ({i: zeros(noisy) for i in ALL} for _ in range(2))
    for t, ids in enumerate(COHORTS, 1):
        server.run_round(t, ids)
        rate = local.rate(t, len(COHORTS))
        at_rate = LocalSettings(epochs=2, batch=3, lr=rate, momentum=0.6, weight_decay=0.03, clip=0.9)
        for i in ids:
            theta[i], v[i], _ = train_locally(noisy, at_rate, i, t, theta[i], v=v[i])
        for i in ALL:
            assert close(client_row(server.privates, i)["w"], theta[i])
            assert close(client_row(server.clients, i)["momentum"], v[i])
        assert torch.equal(server.w, server.space.start)


def test_two_rounds_by_hand() -> None:
    # Momentum ½. Client 0: v = −1, θ = 0.1; v = −0.5 − 0.9, θ = 0.24. Again: v = −0.7 − 0.76, θ = 0.386;
    # v = −0.73 − 0.614, θ = 0.5204. Client 1: v = 8, θ = −0.8; v = 4 + 4.8, θ = −1.68.
    # Client 2, new in the second round: v = −6, θ = 0.6; v = −3 − 4.8, θ = 1.38.
    path, server = two_rounds_on_the_line(Solo(), LocalSettings(batch=0, steps=2, lr=0.1, momentum=0.5))
    assert path == [0.0, 0.0]
    assert server.privates.read(ALL)["w"][:, 0].tolist() == exactly(0.5204, -1.68, 1.38, 0.0)
    assert server.clients.read(ALL)["momentum"][:, 0].tolist() == exactly(-1.344, 8.8, -7.8, 0.0)


def test_the_mean_over_clients_is_of_those_that_trained(noisy: Problem) -> None:
    """Left out are client 4, which holds no samples, and client 2, which never takes part and still has the start."""
    samples = [noisy.samples(i) for i in ALL]
    problem = Problem(federation([*samples, Samples(samples[0].x[:0], samples[0].y[:0])]), linear_model(3))
    server = trained_server(Solo(), problem, PLAIN, [[0, 1], [1, 3]])
    X, y = problem.fed.test
    losses = [float(0.5 * (X @ client_row(server.privates, i)["w"] - y[:, 0]).square().mean()) for i in (0, 1, 3)]
    task = server.engine.task  # type: ignore[attr-defined]
    evaluator = Evaluator(task, problem.fed, problem.fed.test)
    score = lambda of: evaluate_clients(evaluator, of.w, of.buffers, of.private, of.privates, 4)
    assert Solo().evaluates() == "clients" and float(score(server)[1]) == pytest.approx(sum(losses) / 3, rel=1e-12)
    untrained = make_server(Solo(), problem, PLAIN)  # before the first round there is only the start
    assert float(score(untrained)[1]) == pytest.approx(float(0.5 * y.square().mean()), rel=1e-12)


def test_the_spread_over_clients_is_of_those_that_trained() -> None:
    problem = softmax_regression([6, 6, 6, 6])
    server = trained_server(Solo(), problem, PLAIN, [[0, 1], [1, 3]])
    task = server.engine.task  # type: ignore[attr-defined]
    found = client_spread(task, server.w, server.buffers, problem.fed, server.private, server.privates)
    accuracies = []
    for i in (0, 1, 3):
        x, y = problem.samples(i)
        w = client_row(server.privates, i)["w"]
        accuracies.append(float(((x @ w[:12].view(3, 4).T + w[12:]).argmax(1) == y).double().mean()))
    assert found["client_accuracy_mean"] == pytest.approx(sum(accuracies) / 3)
    evaluator, (x, y) = Evaluator(task, problem.fed, problem.fed.test, per_class=True), problem.fed.test
    shares = evaluate_clients(evaluator, server.w, server.buffers, server.private, server.privates, 4)[2:]
    models = [client_row(server.privates, i)["w"] for i in (0, 1, 3)]
    right = torch.stack([(x @ w[:12].view(3, 4).T + w[12:]).argmax(1) == y for w in models]).double()
    assert (shares[:3] / shares[3:]).tolist() == pytest.approx([float(right[:, y == k].mean()) for k in range(3)])
    assert found["client_accuracy_worst10"] == min(accuracies)
