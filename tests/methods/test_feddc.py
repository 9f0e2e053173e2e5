"""FedDC: a learned drift and control variates."""

from __future__ import annotations

import pytest
import torch
from textbook import (
    ALL,
    COHORTS,
    DECAYING,
    EVERY_TERM,
    EVERYBODY,
    assert_defaults,
    exactly,
    momentum_length,
    relative_size,
    sample_shares,
    two_rounds_on_the_line,
    zeros,
)

from askew.algorithms import FedAvg, FedDC, FedDyn, Scaffold
from askew.data.federation import LocalSettings
from problems import (
    Problem,
    client_row,
    close,
    first_client_batches,
    make_server,
    quadratics,
    random_cohorts,
    round_outputs,
    train_locally,
    trained_server,
)


@pytest.mark.parametrize("variate", ["code", "displacement", "off"])
@pytest.mark.parametrize("rule", ["code", "paper"])
@pytest.mark.parametrize("drift", [True, False])
@pytest.mark.parametrize("rate", ["initial", "current"])
def test_rounds_follow_the_formulas(noisy: Problem, variate: str, rule: str, drift: bool, rate: str) -> None:
    """The whole penalty and the variates are inside the clipped norm."""
    alg = FedDC(alpha=0.5, variate=variate, rule=rule, drift=drift, variate_lr=rate)
    server, w, c = make_server(alg, noisy, EVERY_TERM), zeros(noisy), zeros(noisy)
    h, variates = ({i: zeros(noisy) for i in ALL} for _ in range(2))
    for t, ids in enumerate(COHORTS, 1):
        server.run_round(t, ids)
        ends, change = [], zeros(noisy)
        for i in ids:
            size = relative_size(noisy, i)
            inside = lambda theta, size=size, i=i, w=w, c=c: 0.5 / size * (theta - w + h[i]) + c - variates[i]
            end, _, gradients = train_locally(noisy, EVERY_TERM, i, t, w, inside=inside)
            length = momentum_length(len(gradients), 0.6) * EVERY_TERM.rate(1 if rate == "initial" else t)
            mean_gradient = (w - end) / length
            new = {"code": variates[i] - c + mean_gradient, "displacement": mean_gradient, "off": zeros(noisy)}[variate]
            ends.append(end)
            h[i] = h[i] + (end - w if drift else 0)
            change = change + (size if variate == "code" else 1.0) * (new - variates[i]) / 4
            variates[i] = new
        if rule == "code":
            w = torch.stack(ends).mean(0) + sum(h.values()) / 4
        else:
            w = sample_shares(noisy, ids) @ torch.stack([end + h[i] for end, i in zip(ends, ids, strict=True)])
        c = c + change
        assert close(server.w, w) and close(server.state["c"], c)
        for i in ALL:
            state = client_row(server.clients, i)
            assert close(state["h"], h[i]) and close(state["c"], variates[i])


def test_two_rounds_by_hand() -> None:
    # α = 1. The first round is FedDyn's: w = −0.765, h_0 = 0.18, h_1 = −1.2. c_0 = −0.9, c_1 = 6, c = 5.1/4 = 1.275.
    # Client 0: θ ← 0.8 θ + 0.0055 − 0.1 (1.275 + 0.9) = 0.8 θ − 0.212: −0.824, −0.8712; h_0 = 0.18 − 0.1062.
    # Client 2: θ ← 0.7 θ + 0.5235 − 0.1275 = 0.7 θ + 0.396: −0.1395, 0.29835; h_2 = 1.06335.
    # w = −0.286425 + (0.0738 − 1.2 + 1.06335)/4 = −0.3021375.
    # c_0 = −0.9 − 1.275 + 0.1062/0.2 = −1.644, c_2 = −1.275 − 1.06335/0.2 = −6.59175;
    # c = 1.275 + (−0.744 − 6.59175)/4.
    path, server = two_rounds_on_the_line(FedDC(alpha=1.0))
    assert path == exactly(-0.765, -0.3021375)
    states = server.clients.read(range(4))
    assert states["h"].flatten().tolist() == exactly(0.0738, -1.2, 1.06335, 0.0)
    assert states["c"].flatten().tolist() == exactly(-1.644, 6.0, -6.59175, 0.0)
    assert server.state["c"].tolist() == exactly(-0.5589375)


def test_it_reaches_the_optimum_of_the_sample_weighted_loss_under_partial_participation() -> None:
    problem = quadratics(5, 2, copies=[1, 2, 4, 1, 2])
    local = LocalSettings(batch=0, steps=3, lr=0.2)
    server = trained_server(FedDC(alpha=0.2), problem, local, random_cohorts(200, 2, 5))
    assert close(server.w, problem.optimum([1.0, 2.0, 4.0, 1.0, 2.0]), 1e-6)


def test_without_variates_it_is_feddyn(noisy: Problem) -> None:
    local = LocalSettings(epochs=2, batch=3, lr=0.1, momentum=0.5, weight_decay=0.05, decay=0.9)
    methods = FedDC(alpha=0.3, variate="off"), FedDyn(alpha=0.3)
    ours, feddyn = (trained_server(alg, noisy, local, COHORTS) for alg in methods)
    assert close(ours.w, feddyn.w) and close(ours.state["h"], feddyn.state["h"])
    assert close(ours.clients.read(ALL)["h"], feddyn.clients.read(ALL)["h"])


@pytest.mark.parametrize("rate", ["current", "initial"])
@pytest.mark.parametrize("norm", ["nova", "steps"])
def test_without_drift_it_is_scaffold(equal_sizes: Problem, rate: str, norm: str) -> None:
    alg = FedDC(alpha=0.0, drift=False, variate_lr=rate, variate_norm=norm)
    ours = trained_server(alg, equal_sizes, EVERY_TERM, COHORTS)
    scaffold = trained_server(Scaffold(variate_lr=rate, variate_norm=norm), equal_sizes, EVERY_TERM, COHORTS)
    assert close(ours.w, scaffold.w) and close(ours.state["c"], scaffold.state["c"])
    assert close(ours.clients.read(ALL)["c"], scaffold.clients.read(ALL)["c"])


def test_without_both_it_is_fedavg(noisy: Problem) -> None:
    ours = trained_server(FedDC(alpha=0.0, drift=False, variate="off"), noisy, EVERY_TERM, COHORTS)
    assert close(ours.w, trained_server(FedAvg(weighting="uniform"), noisy, EVERY_TERM, COHORTS).w)


def test_rules_of_paper_and_code_agree_where_all_clients_take_part_and_have_one_size(equal_sizes: Problem) -> None:
    one, other = (
        trained_server(FedDC(alpha=0.3, rule=rule), equal_sizes, EVERY_TERM, EVERYBODY * 4)
        for rule in ("code", "paper")
    )
    assert close(one.w, other.w) and not close(one.w, zeros(equal_sizes), 0.01)


def test_the_displacement_variate_is_the_last_displacement(noisy: Problem) -> None:
    """c_i is (w − θ_i)/(K η) of the client's last round and c the mean over all clients of the latest ones."""
    server = make_server(FedDC(alpha=0.3, variate="displacement", variate_lr="current"), noisy, DECAYING)
    last = torch.zeros(4, 3, dtype=torch.float64)
    for t, ids in enumerate(COHORTS, 1):
        steps = [len(list(first_client_batches(noisy.fed.plan([i], t, DECAYING)))) for i in ids]
        delta = round_outputs(server, t, ids).up["delta"]
        last[ids] = -delta / (DECAYING.rate(t) * torch.tensor(steps, dtype=torch.float64)[:, None])
        assert close(server.clients.read(ALL)["c"], last) and close(server.state["c"], last.mean(0))


def test_defaults_are_the_published_ones() -> None:
    expected = {
        "weighting": "uniform",
        "variate": "code",
        "variate_norm": "nova",
        "variate_lr": "initial",
        "rule": "code",
    }
    assert_defaults(FedDC(), expected)
