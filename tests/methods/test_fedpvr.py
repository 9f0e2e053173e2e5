"""FedPVR: control variates on the last layers alone."""

from __future__ import annotations

import torch
from textbook import ALL, COHORTS, EVERY_TERM, LAST_LAYER, PLAIN, SIZES, exactly, two_rounds_on_the_line, vectors, zeros

from askew.algorithms import FedAvg, FedPVR, Scaffold
from askew.data.federation import LocalSettings
from problems import (
    Problem,
    classification,
    client_row,
    close,
    make_server,
    run_rounds,
    skewed_samples,
    train_locally,
    trained_server,
)


def test_rounds_follow_the_formulas(layered: Problem) -> None:
    """Variates and no momentum on the last layer, momentum and no variates on the first; K_i divides."""
    server, w = make_server(FedPVR(head=1), layered, EVERY_TERM), zeros(layered)
    c = torch.zeros(2, dtype=torch.float64)
    variates, mask = {i: c.clone() for i in ALL}, vectors([1.0, 1.0, 0.0, 0.0])[0]
    for t, ids in enumerate(COHORTS, 1):
        server.run_round(t, ids)
        step, change = zeros(layered), torch.zeros_like(c)
        for i in ids:
            add = zeros(layered).index_copy(0, LAST_LAYER, c - variates[i])
            correction = lambda theta, add=add: add
            rho = EVERY_TERM.momentum * mask
            end, _, gradients = train_locally(layered, EVERY_TERM, i, t, w, inside=correction, rho=rho)
            new = variates[i] - c + (w - end)[LAST_LAYER] / (len(gradients) * EVERY_TERM.rate(t))
            step, change, variates[i] = step + (end - w) / len(ids), change + (new - variates[i]) / 4, new
        w, c = w + step, c + change
        assert close(server.w, w) and close(server.state["c"], c)
        assert all(close(client_row(server.clients, i)["c"], variates[i]) for i in ALL)


def test_two_rounds_by_hand() -> None:
    # c_0 = −0.19 / 0.2 = −0.95, c_1 = 6.4, c = 5.45 / 4 = 1.3625, w = −0.545.
    # Client 0: −0.545 − 0.1 (−1.545 + 2.3125) = −0.62175 → −0.690825. Client 2: → 0.02775 → 0.48595.
    # w = −0.545 + (−0.145825 + 1.03095) / 2; c_0 = −2.3125 + 0.729125, c_2 = −1.3625 − 5.15475.
    path, server = two_rounds_on_the_line(FedPVR())
    assert path == exactly(-0.545, -0.1024375)
    assert server.clients.read(ALL)["c"][:, 0].tolist() == exactly(-1.583375, 6.4, -6.51725, 0.0)
    assert server.state["c"].tolist() == exactly((-1.583375 + 6.4 - 6.51725) / 4)


def test_with_a_full_mask_it_is_scaffold_without_momentum() -> None:
    problem = classification(skewed_samples(SIZES))
    local = LocalSettings(epochs=2, batch=3, lr=0.1, weight_decay=0.03, clip=0.9, decay=0.9)
    one, other = (trained_server(alg, problem, local, COHORTS) for alg in (FedPVR(head=2), Scaffold()))
    assert close(one.w, other.w) and close(one.state["c"], other.state["c"])
    assert not close(trained_server(FedPVR(head=1), problem, local, COHORTS).w, other.w, 1e-6)


def test_with_a_full_mask_under_momentum_it_is_scaffold_without_momentum() -> None:
    """Masked layers take no momentum, so it stays what it was, and SCAFFOLD with momentum is something else."""
    problem = classification(skewed_samples(SIZES))
    plain = LocalSettings(epochs=2, batch=3, lr=0.1, weight_decay=0.03, clip=0.9, decay=0.9)
    ours = trained_server(FedPVR(head=2), problem, EVERY_TERM, COHORTS)
    assert close(ours.w, trained_server(Scaffold(), problem, plain, COHORTS).w)
    assert not close(ours.w, trained_server(Scaffold(), problem, EVERY_TERM, COHORTS).w, 1e-3)


def test_with_an_empty_mask_it_is_fedavg() -> None:
    problem = classification(skewed_samples(SIZES))
    server = trained_server(FedPVR(head=0), problem, EVERY_TERM, COHORTS)
    assert close(server.w, trained_server(FedAvg(weighting="uniform"), problem, EVERY_TERM, COHORTS).w)
    assert server.state["c"].numel() == 0


def test_only_the_masked_numbers_are_kept_and_sent() -> None:
    server = make_server(FedPVR(head=1), classification(skewed_samples(SIZES)), PLAIN)
    (record,) = run_rounds(server, [[0, 1]])
    P, v = 4 * 4 + 4 + 4 * 3 + 3, 4 * 3 + 3
    assert client_row(server.clients, 0)["c"].shape == server.state["c"].shape == (v,)
    assert record["bytes_down"] == record["bytes_up"] == 2 * 8 * (P + v)
