"""FedPDC: weights by accuracy on a public set, and its penalties."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from textbook import ALL, COHORTS, EVERY_TERM, EVERYBODY, LINE_CLIENTS, SIZES, TWO_STEPS, exactly, zeros
from torch import Tensor
from torch.func import functional_call

from askew.algorithms import FedAvg, FedPDC
from askew.data.federation import LocalSettings
from problems import (
    Problem,
    classification,
    close,
    full_state,
    identical,
    make_server,
    run_rounds,
    scalars,
    skewed_samples,
    train_locally,
    trained_server,
)


def stand_in_accuracy(w: Tensor, buffers: Tensor) -> Tensor:
    """Accuracy and loss that depend on w, in the place of those on a public set."""
    return torch.stack([1 / (1 + w @ w), w.new_zeros(())])


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize(("penalty", "lam"), [("literal", 10.0), ("prox", 2.0), ("prox", 1e5), ("loss_scale", 0.7)])
def test_rounds_follow_the_formulas(noisy: Problem, penalty: str, lam: float, adaptive: bool) -> None:
    """a_i = 1 for clients that took no part in the round before; η λ (1 − a) ≤ 1 in prox."""
    server, w = make_server(FedPDC(penalty=penalty, lam=lam, adaptive=adaptive), noisy, EVERY_TERM), zeros(noisy)
    server.evaluate = stand_in_accuracy
    last: dict[int, float] = {}
    for t, ids in enumerate([[0, 1, 3], [1, 2], [0, 1, 2, 3], [0, 1, 2, 3]], 1):
        server.run_round(t, ids)
        ends = []
        for i in ids:
            factor = (0.5 * t if adaptive else lam) * (1 - last.get(i, 1.0))
            pull, gain = (
                (min(factor, 1 / EVERY_TERM.rate(t)), 1.0)
                if penalty == "prox"
                else (0.0, 1 + factor * (penalty == "loss_scale"))
            )
            inside = lambda theta, pull=pull, w=w: pull * (theta - w)
            ends.append(train_locally(noisy, EVERY_TERM, i, t, w, inside=inside, gain=gain).theta)
        last = {i: float(stand_in_accuracy(end, end)[0]) for i, end in zip(ids, ends, strict=True)}
        a = torch.tensor(list(last.values()), dtype=torch.float64)
        w = a / a.sum() @ torch.stack(ends)
        assert close(server.w, w)


def test_two_rounds_by_hand() -> None:
    # Accuracies ¼, ¾, then ½, ½; λ = 2 as a proximal term. w = 0.0475 − 0.96 = −0.9125. Client 0 is pulled back by 1.5:
    # −0.9125 → −0.72125 → −0.5778125. Client 2 was absent: δ = 0.36 · 3.9125. w = −0.9125 + (0.3346875 + 1.4085) / 2.
    server = make_server(FedPDC(penalty="prox", lam=2.0), scalars(*LINE_CLIENTS), TWO_STEPS)
    accuracies = iter([0.25, 0.75, 0.5, 0.5])
    server.evaluate = lambda w, buffers: torch.tensor([next(accuracies), 0.0])
    server.run_round(1, [0, 1])
    assert server.w.tolist() == exactly(-0.9125)
    server.run_round(2, [0, 2])
    assert server.w.tolist() == exactly(-0.04090625)


@pytest.mark.parametrize("accuracy", [0.4, 0.0])
def test_with_equal_accuracies_it_is_uniform_fedavg(noisy: Problem, accuracy: float) -> None:
    """All zero is equal as well."""
    server = make_server(FedPDC(), noisy, EVERY_TERM)
    server.evaluate = lambda w, buffers: torch.tensor([accuracy, 0.0])
    run_rounds(server, COHORTS)
    assert close(server.w, trained_server(FedAvg(weighting="uniform"), noisy, EVERY_TERM, COHORTS).w)


def test_the_literal_penalty_changes_the_logged_loss_alone() -> None:
    problem = classification(skewed_samples(SIZES))
    methods = FedPDC(lam=0.0), FedPDC(lam=10.0), FedPDC(adaptive=True)
    servers = [make_server(alg, problem, EVERY_TERM) for alg in methods]
    logs = [[r["train_loss"] for r in run_rounds(server, EVERYBODY * 3)] for server in servers]
    assert all(identical(full_state(server), full_state(servers[0])) for server in servers[1:])
    assert logs[0][0] == logs[1][0] == logs[2][0] and logs[0][1] < logs[2][1] < logs[1][1]


def local_models(problem: Problem, local: LocalSettings, ids: Sequence[int], round: int, w: Tensor) -> Tensor:
    """The models that FedAvg's clients send from w."""
    models = []
    for i in ids:
        server = make_server(FedAvg(), problem, local)
        server.w = w
        server.run_round(round, [i])
        models.append(server.w)
    return torch.stack(models)


def test_weights_are_accuracies_on_the_public_set() -> None:
    problem = classification(skewed_samples(SIZES))
    server = make_server(FedPDC(), problem, EVERY_TERM)
    run_rounds(server, EVERYBODY)
    models = local_models(problem, EVERY_TERM, ALL, 1, server.space.start)
    assert server.fed.public is not None
    X, y = server.fed.public
    forward = lambda theta: functional_call(problem.module, server.space.split(theta), (X,))[0]
    a = torch.tensor([float((forward(theta).argmax(1) == y).double().mean()) for theta in models])
    assert len(set(a.tolist())) > 1 and close(server.w, (a / a.sum()).double() @ models, 1e-7)
    assert close(server.memory.read(ALL)["a"], a.double(), 1e-7) and server.memory.read(ALL)["at"].tolist() == [1.0] * 4
