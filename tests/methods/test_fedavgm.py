"""FedAvgM: momentum at the server."""

from __future__ import annotations

import pytest
from textbook import COHORTS, EVERY_TERM, displacements, exactly, sample_shares, two_rounds_on_the_line, zeros

from askew.algorithms import FedAvg, FedAvgM
from problems import Problem, close, make_server, trained_server


@pytest.mark.parametrize("dampening", [0.0, 0.4])
def test_rounds_follow_the_formulas(noisy: Problem, dampening: float) -> None:
    server = make_server(FedAvgM(beta=0.5, server_lr=0.8, dampening=dampening), noisy, EVERY_TERM)
    w, M = zeros(noisy), zeros(noisy)
    for t, ids in enumerate(COHORTS, 1):
        server.run_round(t, ids)
        M = 0.5 * M + (1 - dampening) * (sample_shares(noisy, ids) @ displacements(noisy, EVERY_TERM, ids, t, w))
        w = w + 0.8 * M
        assert close(server.w, w) and close(server.state["M"], M)


def test_two_rounds_by_hand() -> None:
    # M = −0.545 = w. Then D = (0.29355 + 1.2762) / 2, M = −0.2725 + 0.784875.
    assert two_rounds_on_the_line(FedAvgM(beta=0.5))[0] == exactly(-0.545, -0.032625)


def test_without_momentum_it_is_fedavg(noisy: Problem) -> None:
    one, other = (trained_server(alg, noisy, EVERY_TERM, COHORTS) for alg in (FedAvgM(beta=0.0), FedAvg()))
    assert close(one.w, other.w) and FedAvgM().beta == 0.9
