"""What all methods are given in a round: batches, rates, validation and public samples; also the recorded loss and the
averaged statistics.
"""

from __future__ import annotations

import math

import pytest
import torch
from textbook import EVERY_TERM, PLAIN, SIZES, exactly, weights_of, zeros

import askew
from askew.algorithms import FedAvg, LossBias
from askew.data.dataset import Dataset, Samples
from askew.data.federation import Federation, LocalSettings
from askew.data.partition import Iid
from askew.errors import ConfigError
from problems import (
    Problem,
    classification,
    close,
    first_client_batches,
    make_server,
    regression,
    round_outputs,
    skewed_samples,
)


def test_batches_follow_from_seed_round_and_client(noisy: Problem) -> None:
    """They differ between seeds, rounds, clients and epochs and are else the same; every sample comes once an epoch."""

    def places(seed: int, round: int, client: int) -> list[int]:
        plan = regression(SIZES, seed=0, batch_seed=seed).fed.plan([client], round, PLAIN)
        return plan.train[0].places.tolist()

    one = places(0, 1, 1)
    assert sorted(one[:8]) == sorted(one[8:]) == sorted(noisy.fed.gather([1])[1][0].tolist()) and one[:8] != one[8:]
    assert places(0, 1, 1) == one != places(0, 2, 1) and places(1, 1, 1) != one
    equal = regression([8, 8])
    first, second = (equal.fed.plan([i], 1, PLAIN).train[0].places - 8 * i for i in (0, 1))
    assert not torch.equal(first, second)


def test_rates_fall_by_their_formulas() -> None:
    rates = lambda **how: [LocalSettings(lr=0.4, **how).rate(t, 4) for t in (1, 2, 3, 4)]
    assert rates(decay=0.5) == exactly(0.4, 0.2, 0.1, 0.05)
    assert rates(schedule="inverse_sqrt") == exactly(*(0.4 / math.sqrt(1 + t / 10) for t in range(4)))
    assert rates(schedule="linear") == exactly(0.4, 0.3, 0.2, 0.1)
    half = math.sqrt(2) / 2
    assert rates(schedule="cosine") == exactly(0.4, 0.2 * (1 + half), 0.2, 0.2 * (1 - half))
    with pytest.raises(ConfigError, match="decay is the factor of the exponential schedule"):
        LocalSettings(decay=0.9, schedule="cosine")


def test_validation_parts_are_never_trained_on_and_always_the_same() -> None:
    fed = make_server(LossBias(), regression([5, 12, 1, 6]), EVERY_TERM).fed
    for i, (train, validation) in enumerate([(4, 1), (10, 2), (1, 0), (5, 1)]):
        all_places, validated = set(fed.gather([i])[1][0].tolist()), []
        for t in (1, 2, 3):
            plan = fed.plan([i], t, EVERY_TERM, ["validation"])
            trained_on, looked_at = (set(work.places.tolist()) for work in (plan.train[0], plan.looks["validation"][0]))
            assert len(trained_on) == train == fed.sizes[i] and trained_on | looked_at == all_places
            assert (len(looked_at), trained_on & looked_at) == ((validation, set()) if validation else (1, all_places))
            validated.append(looked_at)
        assert validated[0] == validated[1] == validated[2]


def test_the_public_set_belongs_to_no_client_and_is_balanced() -> None:
    numbers = torch.arange(300.0)[:, None]
    labels = torch.cat([torch.full((200,), 0), torch.full((70,), 1), torch.full((30,), 2)])
    test = Samples(numbers[:5] + 1000, labels[:5])
    fed = Federation(Dataset(Samples(numbers, labels), test, 3), Iid(clients=7), 0, needs=("public",))
    assert fed.public is not None and len(fed.public.y) == 30
    assert torch.bincount(fed.public.y).tolist() == [10, 10, 10]
    private = {float(v) for i in range(7) for v in fed.pool.x[fed.gather([i])[1][0]]}
    public = {float(v) for v in fed.public.x}
    assert not public & private and not public & {float(v) for v in fed.test.x} and len(public | private) == 300
    with pytest.raises(ConfigError, match=r"partition\.public = 0"):
        Federation(Dataset(Samples(numbers, labels), test, 3), Iid(clients=7, public=0), 0, needs=("public",))


def test_public_data_of_a_regression_are_refused() -> None:
    x = torch.randn(40, 3)
    with pytest.raises(ConfigError, match="a regression has no classes"):
        askew.run("fedpdc", data=(x, x.sum(1, keepdim=True)), clients=4, cohort=2, rounds=1)


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_statistics_are_averaged_like_the_models(weighting: str) -> None:
    problem = classification(skewed_samples(SIZES), "batch")
    server = make_server(FedAvg(weighting=weighting, server_scale=0.5), problem, PLAIN)
    outputs = round_outputs(server, 1, [0, 1, 3])
    p = weights_of(problem, [0, 1, 3], weighting)
    assert not torch.equal(outputs.buffers[0], outputs.buffers[1])
    assert close(server.buffers, p @ outputs.buffers)


def test_training_loss_is_the_mean_over_clients_of_the_mean_over_steps(noisy: Problem) -> None:
    """Of each batch before its step, whatever the number of steps."""
    server, w, means = make_server(FedAvg(), noisy, PLAIN), zeros(noisy), []
    record = server.run_round(1, [0, 1, 3])
    for i in (0, 1, 3):
        theta, losses = w, []
        for X, y in first_client_batches(noisy.fed.plan([i], 1, PLAIN)):
            residual = X @ theta - y[:, 0]
            losses.append(float(residual.square().mean()) / 2)
            theta = theta - 0.1 * X.T @ residual / len(y)
        means.append(sum(losses) / len(losses))
    assert record["train_loss"] == pytest.approx(sum(means) / 3, rel=1e-12)
