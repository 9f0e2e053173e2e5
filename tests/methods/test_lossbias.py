"""Loss-biased FedAvg: weights by validation loss."""

from __future__ import annotations

import pytest
import torch
from textbook import (
    COHORTS,
    EVERY_TERM,
    TWO_STEPS,
    exactly,
    make_cohort,
    second_displacements,
    two_rounds_on_the_line,
    zeros,
)
from torch import Tensor

from askew.algorithms import FedAvg, LossBias
from problems import Problem, close, make_server, regression, scalars, train_locally, trained_server


@pytest.mark.parametrize("measure", ["final", "mean_over_steps"])
def test_rounds_follow_the_formulas(measure: str) -> None:
    """The loss on samples that are never trained on; a client with one sample reports its training loss."""
    problem = regression([5, 8, 1, 6])
    server, w = make_server(LossBias(measure=measure), problem, EVERY_TERM), zeros(problem)
    with_validation = Problem(server.fed, problem.module)
    for t, ids in enumerate(COHORTS, 1):
        server.run_round(t, ids)
        ends, losses = [], []
        for i in ids:
            places = server.fed.plan([i], t, EVERY_TERM, ["validation"]).looks["validation"][0].places
            X, y = (v[places] for v in server.fed.pool)
            path: list[Tensor] = []
            keep_path = lambda theta, gradient_at, path=path: (path.append(theta), gradient_at(theta))[1]
            end = train_locally(with_validation, EVERY_TERM, i, t, w, keep_path).theta
            after_steps = [float(0.5 * (X @ theta - y[:, 0]).square().mean()) for theta in (*path[1:], end)]
            ends.append(end)
            losses.append(after_steps[-1] if measure == "final" else sum(after_steps) / len(after_steps))
        ell = torch.tensor(losses, dtype=torch.float64)
        w = ell / ell.sum() @ torch.stack(ends)
        assert close(server.w, w)


def test_two_rounds_by_hand() -> None:
    # Everybody holds its sample twice: one to train, one to validate. ℓ = ½ · 0.81² = 0.32805 and 2 · 0.72² = 1.0368.
    path, _ = two_rounds_on_the_line(LossBias(), copies=[2, 2, 2, 2])
    w = (0.32805 * 0.19 - 1.0368 * 1.28) / 1.36485
    a, b = 0.5 * (0.81 * (1 - w)) ** 2, (0.64 * (3 - w)) ** 2
    delta0, delta2 = second_displacements(w)
    assert path == exactly(w, w + (a * delta0 + b * delta2) / (a + b))


def test_weights_are_shares_of_the_losses() -> None:
    weigh = lambda *losses: LossBias().weights({"validation": torch.tensor(losses)}, make_cohort([1.0])).tolist()
    assert weigh(2.0, 2.0) == [0.5, 0.5] == weigh(0.0, 0.0)
    assert weigh(1.0, 3.0) == [0.25, 0.75] == weigh(100.0, 300.0)
    assert weigh(0.0, 3.0) == [0.0, 1.0]


def test_with_equal_losses_it_is_uniform_fedavg() -> None:
    """Everybody holds the same sample many times, in different numbers."""
    problem = scalars((1.0, 2.0), (1.0, 2.0), (1.0, 2.0), copies=[3, 6, 9])
    server = trained_server(LossBias(), problem, TWO_STEPS, [[0, 1, 2]] * 2)
    assert close(server.w, trained_server(FedAvg(weighting="uniform"), problem, TWO_STEPS, [[0, 1, 2]] * 2).w)
