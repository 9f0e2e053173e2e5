"""FedAlign: the last block at reduced width."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from textbook import COHORTS, EVERY_TERM, PLAIN, SIZES, vectors
from torch import Tensor, nn
from torch.func import grad

from askew.algorithms import FedAlign, FedAvg
from askew.algorithms.fedalign import top_singular_value
from askew.core.types import Batch
from askew.data.dataset import Samples
from askew.data.federation import LocalSettings
from askew.engine.server import Server
from askew.models.network import make_chain
from askew.models.small import MLP
from problems import (
    Problem,
    classification,
    close,
    federation,
    full_state,
    largest_gap,
    make_server,
    run_rounds,
    skewed_samples,
    trained_server,
)


def test_the_top_singular_value() -> None:
    """Of [c, s] feature maps; after ten iterations as near as the gap allows, exact for rank one (s = 1)."""
    rng = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=rng, dtype=torch.float64)
    one, two = draw(5, 6, 1).abs(), draw(5, 3, 1)
    assert close(top_singular_value(one, two), torch.linalg.matrix_norm(one @ two.mT, ord=2), 1e-10)
    one, two = 0.1 * draw(5, 6, 7) + 1, 0.1 * draw(5, 3, 7) + 1
    assert close(top_singular_value(one, two), torch.linalg.matrix_norm(one @ two.mT / 7, ord=2), 1e-10)


def test_the_top_singular_value_is_as_small_as_its_features() -> None:
    """Nothing absolute is added on the way, which at features of 1e-3 would be as large as what it is added to."""
    rng = torch.Generator().manual_seed(0)
    one, two = (torch.randn(5, c, 1, generator=rng, dtype=torch.float64).abs() for c in (6, 3))
    exact = torch.linalg.matrix_norm(one @ two.mT, ord=2)
    for size in (1e-3, 1e-30, 1e30):
        assert close(top_singular_value(size * one, two) / size, exact, 1e-12)
    slope = grad(lambda features: top_singular_value(one, 1e-6 * features).sum())(two)
    assert close(slope, 1e-6 * one.norm(dim=1, keepdim=True) * two / two.norm(dim=1, keepdim=True), 1e-17)
    dead = torch.zeros(5, 3, 1, dtype=torch.float64)  # a sample for which no unit is at work has σ = 0, and no gradient
    assert float(top_singular_value(one, dead).abs().max()) == 0
    assert float(grad(lambda features: top_singular_value(one, features).sum())(dead).abs().max()) == 0


def fedalign_loss(mu: float) -> tuple[Server, Callable[[Tensor], Tensor]]:
    """FedAlign's loss on some samples, as a function of theta; layers of 4·5+5, 5·8+8 and 8·3+3 numbers."""
    problem = classification(skewed_samples([9]))
    torch.manual_seed(0)
    server = make_server(FedAlign(mu=mu), Problem(problem.fed, MLP(hidden=(5, 8)).module((4,), 3)), PLAIN, "vmapped")
    task, batch = server.engine.task, Batch(*problem.fed.test)  # type: ignore[attr-defined]
    return server, lambda theta: server.alg.loss(task, theta, batch, None)  # type: ignore[arg-type]


def test_the_term_is_as_large_as_mu_times_the_loss() -> None:
    server, plain = fedalign_loss(0.0)
    theta = server.space.start
    for mu in (0.45, 2.0):
        assert float(fedalign_loss(mu)[1](theta)) == pytest.approx((1 + mu) * float(plain(theta)), rel=1e-8)


def test_the_term_reaches_the_last_hidden_layer_alone() -> None:
    """And there only the first quarter of its width and of its inputs, with the gradient of (σ_narrow − σ_full)² at a
    fixed σ_full.
    """
    server, plain = fedalign_loss(0.0)
    theta = server.space.start.clone()
    for at in (slice(20, 25), slice(65, 73)):  # biases: all units at work
        theta[at] += 2
    extra = grad(fedalign_loss(0.7)[1])(theta) - grad(plain)(theta)
    assert extra[:25].abs().max() < 1e-14 and extra[73:].abs().max() < 1e-14
    weight, bias = extra[25:65].view(8, 5), extra[65:73]
    assert weight[:2, 0].abs().min() > 1e-3 and weight[:2, 1:].abs().max() < 1e-14  # of five inputs the first
    assert weight[2:].abs().max() < 1e-14 and bias[2:].abs().max() < 1e-14 and bias[:2].abs().max() > 1e-3

    parts, X = server.space.split(theta), server.fed.test.x
    z = F.relu(X @ parts["fc1.weight"].T + parts["fc1.bias"])

    def term(u: Tensor) -> Tensor:
        narrow = F.relu(z[:, :1] @ u[:40].view(8, 5)[:2, :1].T + u[40:42])
        full = F.relu(z @ parts["fc2.weight"].T + parts["fc2.bias"])
        gap = z[:, 0] * narrow.norm(dim=1) - z.norm(dim=1) * full.norm(dim=1)  # of rank one: σ is the lengths' product
        return gap.square().mean()

    at = theta[25:73]
    expected = 0.7 * float(plain(theta) / term(at)) * grad(term)(at)
    assert close(extra[25:73], expected, 1e-9)


def test_without_strength_it_is_fedavg() -> None:
    """Batch norm included: the second pass leaves the running statistics alone."""
    problem = classification(skewed_samples(SIZES), "batch")
    one, other = (trained_server(alg, problem, EVERY_TERM, COHORTS) for alg in (FedAlign(mu=0.0), FedAvg()))
    assert largest_gap(full_state(one), full_state(other)) < 1e-12
    assert not close(trained_server(FedAlign(), problem, EVERY_TERM, COHORTS).w, other.w, 1e-4)


def two_unit_server(u: tuple[float, float]) -> Server:
    """Output v·(u x) with v = (1, 0), one sample x = y = 1, μ = ½, one step of 0.1."""
    layers = {"flat": nn.Flatten(), "fc1": nn.Linear(1, 2, bias=False), "out": nn.Linear(2, 1, bias=False)}
    with torch.no_grad():
        layers["fc1"].weight.copy_(torch.tensor(u)[:, None])  # type: ignore[operator]
        layers["out"].weight.copy_(torch.tensor([[1.0, 0.0]]))  # type: ignore[operator]
    problem = Problem(federation([Samples(vectors([1.0]), vectors([1.0]))]), make_chain(iter(layers.items())))
    return make_server(FedAlign(mu=0.5), problem, LocalSettings(batch=0, steps=1, lr=0.1))


def test_a_gap_of_less_than_one_percent_counts_as_aligned() -> None:
    # u = (3, 0.1): σ_narrow − σ_full = 3 − √9.01, 0.06% of σ_full. CE = 2; the scale is 2 / (1e-4 · 9.01), not 2 / ℓ_L,
    # with which the step would be 240 long.
    server = two_unit_server((3.0, 0.1))
    u = server.space.start[:2].double()
    server.run_round(1, [0])
    gap = float(u[0] - u.norm())
    term = 0.5 * 2 / (1e-4 * float(u @ u)) * 2 * gap
    assert server.w.tolist() == pytest.approx([2.8 - 0.1 * term, float(u[1]), 0.4, -0.2 * float(u[1])], abs=1e-9)
    aligned = two_unit_server((3.0, 0.0))  # no gap at all: no term, and no 0 / 0
    aligned.run_round(1, [0])
    assert aligned.w.tolist() == pytest.approx([2.8, 0.0, 0.4, 0.0], abs=1e-12)


@pytest.mark.parametrize("norm", ["none", "group"])
def test_it_learns_with_and_without_normalisation(norm: str) -> None:
    """On the same input the narrow units, being among the full ones, could only grow, and did: to 1e10."""
    problem, local = classification(skewed_samples([40, 40]), norm), LocalSettings(batch=20, epochs=4, lr=0.2)
    server, fedavg = (make_server(alg, problem, local) for alg in (FedAlign(), FedAvg()))
    losses = [record["train_loss"] for record in run_rounds(server, [[0, 1]] * 4)]
    assert float(server.w.abs().max()) < 5 and losses[-1] < 0.8 * losses[0]
    assert losses[-1] / 1.45 < 1.3 * run_rounds(fedavg, [[0, 1]] * 4)[-1]["train_loss"]


def test_two_rounds_by_hand() -> None:
    # Output v·(u x), u = (3, 4), v = (1, 0), one sample x = y = 1, μ = ½, one step of 0.1. Output 3, CE = 2.
    # σ_narrow − σ_full = 3 − 5 = −2, ℓ_L = 4: the term's gradient on u_1 is ½ · 2/4 · 2 · (−2) = −1.
    # CE's gradients are 2 v on u and 2 u on v: u = (2.9, 4), v = (0.4, −0.8).
    server = two_unit_server((3.0, 4.0))
    server.run_round(1, [0])
    assert server.w.tolist() == pytest.approx([2.9, 4.0, 0.4, -0.8], abs=1e-9)
    server.run_round(2, [0])
    r = 0.4 * 2.9 - 0.8 * 4 - 1
    term = 0.5 * (r**2 / 2) * 2 / (2.9 - math.sqrt(2.9**2 + 16))
    u, v = (2.9 - 0.1 * (0.4 * r + term), 4 + 0.08 * r), (0.4 - 0.29 * r, -0.8 - 0.4 * r)
    assert server.w.tolist() == pytest.approx([*u, *v], abs=1e-9)
