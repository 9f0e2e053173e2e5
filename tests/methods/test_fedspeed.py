"""FedSpeed: FedDyn with a gradient at an ascended point."""

from __future__ import annotations

import pytest
import torch
from textbook import ALL, COHORTS, EVERY_TERM, SIZES, relative_size, two_rounds_on_the_line, zeros
from torch import Tensor

from askew.algorithms import FedDyn, FedSpeed
from askew.core.algorithm import Gradient
from problems import (
    Problem,
    classification,
    close,
    full_state,
    largest_gap,
    make_server,
    skewed_samples,
    train_locally,
    trained_server,
)


@pytest.mark.parametrize("mix", [1.0, 0.3])
def test_rounds_follow_the_formulas(noisy: Problem, mix: float) -> None:
    """The second gradient on the same batch at θ + ρ g / (‖g‖ + 1e-7); only α θ is outside the clipped norm."""
    server = make_server(FedSpeed(alpha=0.5, rho=0.4, mix=mix), noisy, EVERY_TERM)
    w, h = zeros(noisy), {i: zeros(noisy) for i in ALL}
    for t, ids in enumerate(COHORTS, 1):
        server.run_round(t, ids)
        ends = []
        for i in ids:
            alpha = 0.5 / relative_size(noisy, i)

            def direction(theta: Tensor, at: Gradient, alpha: float = alpha, i: int = i, w: Tensor = w) -> Tensor:
                g = at(theta)
                return (1 - mix) * g + mix * at(theta + 0.4 * g / (g.norm() + 1e-7)) + alpha * (h[i] - w)

            beside = lambda theta, alpha=alpha: alpha * theta
            ends.append(train_locally(noisy, EVERY_TERM, i, t, w, direction, beside=beside).theta)
        for i, end in zip(ids, ends, strict=True):
            h[i] = h[i] + end - w
        w = torch.stack(ends).mean(0) + sum(h.values()) / 4
        assert close(server.w, w)


def test_two_rounds_by_hand() -> None:
    # α = ½, ρ = 0.1: the gradient is A ρ = 0.1, 0.4, 0.2 steeper. Client 0: 0.11 → 0.11 − 0.1 (−0.99 + 0.055) = 0.2035.
    # Client 1: −0.84 → −0.84 − 0.1 (5.04 − 0.42) = −1.302. w = −0.54925 − 1.0985 / 4 = −0.823875.
    # Client 0: −0.6416625 → −0.486781875. Client 2: −0.0391 → 0.54948125. Drifts 0.540593125, −1.302, 1.37335625.
    path, _ = two_rounds_on_the_line(FedSpeed(alpha=0.5, rho=0.1))
    assert path == pytest.approx([-0.823875, 0.0313496875 + 0.611949375 / 4], abs=1e-7)  # 1e-7 beside the norm


@pytest.mark.parametrize("how", [{"rho": 0.0}, {"mix": 0.0}])
def test_without_an_ascent_it_is_feddyn(how: dict[str, float]) -> None:
    problem = classification(skewed_samples(SIZES), "batch")
    methods = FedSpeed(alpha=0.3, **how), FedDyn(alpha=0.3)  # type: ignore[arg-type]
    one, other = (trained_server(alg, problem, EVERY_TERM, COHORTS) for alg in methods)
    assert largest_gap(full_state(one), full_state(other)) < 1e-12
