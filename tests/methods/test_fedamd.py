"""FedAMD: anchors and miners."""

from __future__ import annotations

import pytest
import torch
from textbook import ALL, COHORTS, EVERY_TERM, PLAIN, exactly, full_gradient, two_rounds_on_the_line, zeros
from torch import Tensor

from askew.algorithms import FedAMD
from askew.core.algorithm import Gradient
from askew.core.rng import coin
from askew.data.federation import LocalSettings
from problems import Problem, client_row, close, make_server, train_locally


def test_rounds_follow_the_formulas(noisy: Problem) -> None:
    """Miners begin with the mean of all remembered gradients as it was before this round's anchors."""
    server = make_server(FedAMD(anchor=0.5, server_scale=0.9), noisy, EVERY_TERM)
    w, g, roles = zeros(noisy), {i: zeros(noisy) for i in ALL}, []
    for t, ids in enumerate([*COHORTS, *COHORTS], 1):
        server.run_round(t, ids)
        moves, new = [], dict(g)
        for i in ids:
            anchor = coin(noisy.fed.seed, t, i) < 0.5
            roles.append(anchor)
            if anchor:
                new[i] = full_gradient(noisy, i, w)
                continue
            path, v = [w], [sum(g.values()) / 4]

            def direction(theta: Tensor, at: Gradient, path: list[Tensor] = path, v: list[Tensor] = v) -> Tensor:
                v.append(v[-1] - at(path[-1]) + at(theta))
                path.append(theta)
                return v[-1]

            moves.append(train_locally(noisy, EVERY_TERM, i, t, w, direction).theta - w)
        g, w = new, w + (0.9 * torch.stack(moves).mean(0) if moves else 0)
        assert close(server.w, w) and close(server.state["v"], sum(g.values()) / 4)
        assert all(close(client_row(server.memory, i)["g"], g[i]) for i in ALL)
    assert 0 < sum(roles) < len(roles)


def set_anchors(monkeypatch: pytest.MonkeyPatch, anchors: dict[int, list[int]]) -> None:
    """Choose the anchors of every round instead of drawing them."""
    coins = lambda seed, round, client: 0.0 if client in anchors.get(round, []) else 0.999
    monkeypatch.setattr("askew.engine.client_numbers.coin", coins)


def test_two_rounds_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    # Clients 0 and 1 are anchors: gradients −1 and 8, v = 7/4, w stays. Then 0 is an anchor again and 2 mines:
    # θ = −0.175, v = 1.75 + 2 · (−0.175) = 1.4, θ = −0.315.
    set_anchors(monkeypatch, {1: [0, 1], 2: [0]})
    path, server = two_rounds_on_the_line(FedAMD())
    assert path == exactly(0.0, -0.315)
    assert server.state["v"].tolist() == exactly(1.75)


def test_anchors_do_not_move_the_model(noisy: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    set_anchors(monkeypatch, {1: ALL, 2: [0, 1], 3: [0]})
    server = make_server(FedAMD(), noisy, PLAIN)
    server.run_round(1, ALL)
    assert torch.equal(server.w, server.space.start)
    assert close(server.state["v"], torch.stack([full_gradient(noisy, i, server.w) for i in ALL]).mean(0))
    server.run_round(2, [0, 1])
    assert torch.equal(server.w, server.space.start)
    alone = make_server(FedAMD(), noisy, PLAIN)
    alone.run_round(1, ALL)
    alone.run_round(3, [2])
    server.run_round(3, [0, 2])
    assert close(alone.w, server.w, 1e-14) and not close(server.w, server.space.start, 1e-3)


def test_the_first_step_is_along_the_anchored_mean(noisy: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    set_anchors(monkeypatch, {1: [0, 1, 3]})
    server = make_server(FedAMD(), noisy, LocalSettings(steps=1, batch=3, lr=0.1))
    server.run_round(1, [0, 1, 3])
    v = sum(full_gradient(noisy, i, server.w) for i in (0, 1, 3)) / 4
    server.run_round(2, [1, 2])
    assert close(server.w, -0.1 * v)
