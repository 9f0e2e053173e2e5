"""FOCUS: the server adds up the changes of the clients' gradients."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from textbook import ALL, COHORTS, EVERY_TERM, PLAIN, SIZES, assert_defaults, exactly, two_rounds_on_the_line, zeros

from askew.algorithms import FOCUS, FedSGD
from askew.data.federation import LocalSettings
from problems import (
    Problem,
    classification,
    client_row,
    close,
    first_client_batches,
    make_server,
    skewed_samples,
    train_locally,
    trained_server,
)


def test_rounds_follow_the_published_loop(noisy: Problem) -> None:
    """The loop of the authors' code: before all but the first gradient a step along y, which collects the changes."""
    server = make_server(FOCUS(server_scale=0.5), noisy, PLAIN)
    w, y, last = zeros(noisy), zeros(noisy), {i: zeros(noisy) for i in ALL}
    for t, ids in enumerate(COHORTS, 1):
        server.run_round(t, ids)
        for i in ids:
            theta, own = w, zeros(noisy)
            for k, (X, target) in enumerate(first_client_batches(noisy.fed.plan([i], t, PLAIN))):
                theta = theta - PLAIN.lr * own if k else theta
                g = X.T @ (X @ theta - target[:, 0]) / len(target)
                own, last[i] = own + g - last[i], g
            y = y + own
        w = w - 0.5 * PLAIN.lr * y
        assert close(server.w, w) and close(server.state["y"], y)
        assert all(close(client_row(server.clients, i)["g"], last[i]) for i in ALL)


def test_momentum_and_clipping_act_on_local_steps_alone(noisy: Problem) -> None:
    local = dataclasses.replace(EVERY_TERM, weight_decay=0.0)
    server = make_server(FOCUS(), noisy, local)
    w, last = zeros(noisy), {i: zeros(noisy) for i in ALL}
    for t, ids in enumerate(COHORTS, 1):
        server.run_round(t, ids)
        for i in ids:
            last[i] = train_locally(noisy, local, i, t, w, inside=lambda theta, g=last[i]: -g).gradients[-1]
        w = w - local.rate(t) * sum(last.values())
        assert close(server.w, w)


def test_two_rounds_by_hand() -> None:
    # Last gradients −0.9 (at 0.1) and 4.8 (at −0.8): w = −0.39. Then client 0 goes on by −0.1 (−1.39 + 0.9) to −0.341,
    # where its gradient is −1.341, and client 2 to 0.288, where it is −5.424: y = −1.341 + 4.8 − 5.424.
    path, server = two_rounds_on_the_line(FOCUS())
    assert path == exactly(-0.39, -0.39 + 0.1965) and float(server.state["y"]) == pytest.approx(-1.965)


def test_with_one_step_and_everybody_it_is_gradient_descent_on_the_sum(noisy: Problem) -> None:
    local = LocalSettings(batch=0, steps=1, lr=0.05, weight_decay=0.1)
    servers = [
        trained_server(alg, noisy, local, [ALL] * 4) for alg in (FOCUS(), FedSGD(weighting="uniform", server_scale=4.0))
    ]
    assert close(servers[0].w, servers[1].w)


def test_the_server_has_the_sum_of_the_clients_last_gradients() -> None:
    problem = classification(skewed_samples(SIZES), dtype=torch.float32)
    server = trained_server(FOCUS(server_scale=0.1), problem, PLAIN, COHORTS * 2)
    assert server.w.dtype == torch.float32 and server.state["y"].dtype == torch.float64
    assert close(server.state["y"], server.clients.read(ALL)["g"].double().sum(0), 1e-5)


def test_defaults() -> None:
    assert_defaults(FOCUS(), {"weighting": "uniform", "server_scale": 1.0})
