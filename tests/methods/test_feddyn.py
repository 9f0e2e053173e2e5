"""FedDyn: dynamic regularisation."""

from __future__ import annotations

import pytest
import torch
from textbook import (
    ALL,
    COHORTS,
    EVERY_TERM,
    PLAIN,
    SIZES,
    assert_defaults,
    evaluation_of,
    exactly,
    full_gradient,
    loss_on_test_set,
    relative_size,
    two_rounds_on_the_line,
    zeros,
)

from askew.algorithms import FedAvg, FedDyn
from askew.data.federation import LocalSettings
from problems import (
    Problem,
    classification,
    client_row,
    close,
    make_server,
    quadratics,
    round_outputs,
    skewed_samples,
    train_locally,
    trained_server,
)


def test_rounds_follow_the_formulas(noisy: Problem) -> None:
    """α_i θ acts beside weight decay, outside the clipped norm; α_i (h_i − w) inside it; α_i = α/(n_i/n̄)."""
    server, w, h = make_server(FedDyn(alpha=0.5), noisy, EVERY_TERM), zeros(noisy), {i: zeros(noisy) for i in ALL}
    for t, ids in enumerate(COHORTS, 1):
        server.run_round(t, ids)
        ends = []
        for i in ids:
            alpha = 0.5 / relative_size(noisy, i)
            inside = lambda theta, alpha=alpha, h_i=h[i], w=w: alpha * (h_i - w)
            beside = lambda theta, alpha=alpha: alpha * theta
            ends.append(train_locally(noisy, EVERY_TERM, i, t, w, inside=inside, beside=beside).theta)
            h[i] = h[i] + ends[-1] - w
        mean = torch.stack(ends).mean(0)
        w = mean + sum(h.values()) / 4
        assert close(server.w, w) and all(close(client_row(server.clients, i)["h"], h[i]) for i in h)
        models = server.alg.models(server.w, server.state)
        assert list(models) == ["global", "participants"]
        assert torch.equal(models["global"], server.w) and close(models["participants"], mean)


def test_two_rounds_by_hand() -> None:
    # α = 1. Client 0: θ ← θ − 0.1 (θ − 1 + θ) = 0.8 θ + 0.1: 0.1, 0.18. Client 1: 0.5 θ − 0.8: −0.8, −1.2.
    # h_0 = 0.18, h_1 = −1.2; w = −0.51 − 1.02/4 = −0.765.
    # Client 0: θ ← θ − 0.1 (θ − 1 + θ + 0.765 + 0.18) = 0.8 θ + 0.0055: −0.6065, −0.4797; h_0 = 0.18 + 0.2853.
    # Client 2: θ ← θ − 0.1 (2θ − 6 + θ + 0.765) = 0.7 θ + 0.5235: −0.012, 0.5151; h_2 = 1.2801.
    # w = 0.0177 + (0.4653 − 1.2 + 1.2801)/4 = 0.15405.
    path, server = two_rounds_on_the_line(FedDyn(alpha=1.0))
    assert path == exactly(-0.765, 0.15405)
    assert server.clients.read(ALL)["h"].flatten().tolist() == exactly(0.4653, -1.2, 1.2801, 0.0)
    assert float(server.state["mean"]) == pytest.approx(0.0177)


def test_the_form_of_the_code_is_that_of_the_paper(equal_sizes: Problem) -> None:
    """The paper: −⟨g_i, θ⟩ + α/2 ‖θ − w‖², g_i ← g_i − α δ_i, H ← H − (α/N) Σ_S δ_i, w ← mean_S θ_i − H/α."""
    server, alpha = make_server(FedDyn(alpha=0.4), equal_sizes, PLAIN), 0.4
    w, H, memory = zeros(equal_sizes), zeros(equal_sizes), {i: zeros(equal_sizes) for i in ALL}
    for t, ids in enumerate(COHORTS, 1):
        server.run_round(t, ids)
        ends = {}
        for i in ids:
            inside = lambda theta, i=i, w=w: alpha * (theta - w) - memory[i]
            ends[i] = train_locally(equal_sizes, PLAIN, i, t, w, inside=inside).theta
        for i in ids:
            memory[i] = memory[i] - alpha * (ends[i] - w)
            H = H - alpha / 4 * (ends[i] - w)
        w = sum(ends.values()) / len(ids) - H / alpha
        assert close(server.w, w)
        assert close(server.state["h"], -H / alpha)
        assert all(close(client_row(server.clients, i)["h"], -memory[i] / alpha) for i in ALL)


@pytest.mark.parametrize(("ids", "factor"), [([0, 1, 2, 3], 2.0), ([0, 2], 1.5), ([1], 1.25)])
def test_without_strength_the_first_round_steps_farther(noisy: Problem, ids: list[int], factor: float) -> None:
    """α = 0: w_1 = w_0 + (1 + m/N) mean_S δ_i."""
    fedavg = trained_server(FedAvg(weighting="uniform"), noisy, EVERY_TERM, [ids])
    assert close(trained_server(FedDyn(alpha=0.0), noisy, EVERY_TERM, [ids]).w, factor * fedavg.w)


def test_solved_exactly_it_is_stationary() -> None:
    """∇L_i(θ_i) = −α_i h_i after each participation, with unequal sizes."""
    problem = quadratics(3, 2, copies=[1, 2, 3])
    server = make_server(FedDyn(alpha=0.7), problem, LocalSettings(batch=0, steps=120, lr=0.4))
    for t, ids in enumerate([[0, 1], [1, 2], [0, 1]], 1):
        w = server.w
        delta = round_outputs(server, t, ids).up["delta"]
        for theta, i in zip(w + delta, ids, strict=True):
            h = client_row(server.clients, i)["h"]
            assert close(full_gradient(problem, i, theta), -0.7 / relative_size(problem, i) * h)


def test_the_global_model_and_the_mean_of_the_participants_are_evaluated() -> None:
    problem = classification(skewed_samples(SIZES))
    server = trained_server(FedDyn(), problem, PLAIN, COHORTS)
    record = evaluation_of(server, problem)
    assert record["loss"] == pytest.approx(loss_on_test_set(problem, server, server.w, server.buffers), rel=1e-12)
    assert record["loss_participants"] == pytest.approx(
        loss_on_test_set(problem, server, server.state["mean"], server.buffers), rel=1e-12
    )
    assert record["loss"] != pytest.approx(record["loss_participants"], rel=1e-3)


def test_defaults_are_the_published_ones() -> None:
    assert_defaults(FedDyn(), {"weighting": "uniform"})
