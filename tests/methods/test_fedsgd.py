"""FedSGD: one full gradient step a round."""

from __future__ import annotations

import pytest
from textbook import ALL, COHORTS, ONE_STEP, exactly, two_rounds_on_the_line, zeros

from askew.algorithms import FedAvg, FedSGD
from askew.data.federation import LocalSettings
from problems import Problem, close, full_state, identical, make_server, trained_server


def test_it_is_fedavg_with_one_epoch_and_one_batch(noisy: Problem) -> None:
    local = LocalSettings(epochs=1, batch=0, lr=0.3, momentum=0.6, weight_decay=0.03, clip=0.9, decay=0.9)
    one, other = trained_server(FedSGD(), noisy, local, COHORTS), trained_server(FedAvg(), noisy, local, COHORTS)
    assert close(one.w, other.w)


def test_two_rounds_by_hand() -> None:
    # Gradients −1 and 8: w = −0.1 · 3.5. Then −1.35 and 2 · (−3.35) = −6.7: w = −0.35 + 0.4025.
    assert two_rounds_on_the_line(FedSGD())[0] == exactly(-0.35, 0.0525)


def test_one_step_whatever_the_epochs(noisy: Problem) -> None:
    one, other = (trained_server(FedSGD(), noisy, LocalSettings(epochs=e, batch=3, lr=0.3), COHORTS) for e in (1, 4))
    assert identical(full_state(one), full_state(other))


def test_with_everybody_it_is_gradient_descent_on_the_pooled_loss(noisy: Problem) -> None:
    server, w = make_server(FedSGD(), noisy, ONE_STEP), zeros(noisy)
    X, y = noisy.fed.pool.x, noisy.fed.pool.y[:, 0]
    for t in (1, 2, 3):
        server.run_round(t, ALL)
        w = w - 0.3 * X.T @ (X @ w - y) / len(y)
        assert close(server.w, w)


def test_a_gradient_in_chunks_is_the_whole_gradient(noisy: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = trained_server(FedSGD(), noisy, ONE_STEP, COHORTS)
    monkeypatch.setattr("askew.data.federation.CHUNK", 2)
    assert close(trained_server(FedSGD(), noisy, ONE_STEP, COHORTS).w, whole.w, 1e-13)
