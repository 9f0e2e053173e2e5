"""FedAWE: clients catch up on the rounds they missed, from where they stopped."""

from __future__ import annotations

import math

import pytest
import torch
from textbook import ALL, EVERY_TERM, assert_defaults, exactly, two_rounds_on_the_line, weights_of, zeros
from torch import Tensor
from turnout import MINIMA, RATE, RATES, ServerOnTheLine, biased_minimum, draw_cohorts, long_run_mean, mean_shares

from askew.algorithms import FedAvg, FedAWE
from askew.core.types import Client
from problems import Problem, client_row, close, identical, make_server, run_rounds, train_locally

SPARSE = [[0, 1], [1], [1, 3], [0], [1, 2], [0, 3], [2], [0, 2, 3]]


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_rounds_follow_the_formulas(noisy: Problem, weighting: str) -> None:
    """Rounds are counted from 0 as in the paper, and who has not come yet came in round −1."""
    alg = FedAWE(server_scale=0.9, evaluate_mean=True, weighting=weighting)
    server = make_server(alg, noisy, EVERY_TERM)
    x, came = {i: zeros(noisy) for i in ALL}, dict.fromkeys(ALL, -1)
    for t, ids in enumerate(SPARSE):
        server.run_round(t + 1, ids)
        G = {i: x[i] - train_locally(noisy, EVERY_TERM, i, t + 1, x[i]).theta for i in ids}
        new = torch.stack([x[i] - 0.9 * (t - came[i]) * G[i] for i in ids])
        w = weights_of(noisy, ids, weighting) @ new
        x, came = x | dict.fromkeys(ids, w), came | dict.fromkeys(ids, t)
        mean = weights_of(noisy, ALL, weighting) @ torch.stack([*x.values()])
        assert close(server.w, w) and all(close(client_row(server.memory, i)["x"], x[i]) for i in ALL)
        assert close(server.state["mean"], mean) and close(alg.models(server.w, server.state)["global"], mean)
    assert list(FedAWE().models(server.w, {})) == ["global"] and FedAWE().models(server.w, {})["global"] is server.w


def test_the_mean_update_is_shortened_and_the_mean_of_the_starts_is_not() -> None:
    # The mean update of the first round, −0.545, becomes −0.5, and w −0.5 · 0.4. Then the starts −0.2 and 0 have the
    # mean −0.1, and the mean update (0.19 · 1.2 + 2 · 1.08) / 2 becomes 0.5. No update is longer than 3.
    assert two_rounds_on_the_line(FedAWE(longest=0.5, server_scale=0.4))[0] == exactly(-0.2, 0.1)
    assert two_rounds_on_the_line(FedAWE(longest=3.0))[0] == exactly(*two_rounds_on_the_line(FedAWE())[0])


def test_two_rounds_by_hand() -> None:
    # (0.19 − 1.28) / 2. Then client 0 starts there, and client 2 at 0 with what it missed: 0.19 · 1.545 and 2 · 1.08.
    path, server = two_rounds_on_the_line(FedAWE())
    assert path == exactly(-0.545, (-0.545 + 0.29355 + 2.16) / 2)
    rows = [float(client_row(server.memory, i)["x"]) for i in ALL]
    assert rows == exactly(0.954275, -0.545, 0.954275, 0.0)


def test_with_everybody_it_is_fedavg_bit_for_bit(noisy: Problem) -> None:
    servers = [make_server(alg, noisy, EVERY_TERM) for alg in (FedAWE(), FedAvg(weighting="uniform"))]
    for server in servers:
        run_rounds(server, [ALL] * 4)
    assert identical({"w": servers[0].w}, {"w": servers[1].w})


def upload_of(alg: FedAWE, server: ServerOnTheLine, round: int, ids: list[int], step: Tensor) -> Tensor:
    """What these clients send after moving by `step` from where they start."""
    rows = {n: server.memory[n][ids] for n in alg.broadcast}
    sent = []
    for i in range(len(ids)):
        row = {n: v[i] for n, v in rows.items()}
        client = Client(server.w, server.w[:0], row, {}, {}, {}, RATE, RATE, 0.0, 0.0, math.inf, 1, 1, 1, round, 0.5)
        sent.append(alg.finish(alg.begin(client) + step[i], client)[0]["delta"])
    return torch.stack(sent) if sent else server.w.new_zeros(0, len(server.w))


def test_every_client_has_made_as_many_updates_as_rounds_have_passed() -> None:
    """Proposition 1: where everybody moves by 1 a round, w is the number of rounds, whoever comes and whenever."""
    server = ServerOnTheLine(FedAWE())
    for t, ids in enumerate(draw_cohorts(60, lambda t: RATES if t % 20 < 10 else RATES[::-1]), 1):
        server.take_step(t, ids, upload_of(FedAWE(), server, t, ids, torch.ones(4, 1, dtype=torch.float64)))
        if ids:
            assert float(server.w) == pytest.approx(t)


@pytest.mark.slow
@pytest.mark.parametrize("changing", [False, True], ids=["constant", "changing"])
def test_uneven_rates_leave_the_mean_of_all_clients_where_it_belongs(changing: bool) -> None:
    """Equal curvatures and a small rate; rates that change from round to round as a sine, as in the paper."""

    def rates(t: int) -> list[float]:
        return [p * (0.7 + 0.3 * math.sin(0.1 * math.pi * t)) for p in RATES] if changing else [*RATES]

    def upload(server: ServerOnTheLine, round: int, ids: list[int]) -> Tensor:
        return upload_of(alg, server, round, ids, RATE * (MINIMA[ids] - server.memory["x"][ids]))

    alg = FedAWE(evaluate_mean=True)
    mean = long_run_mean(alg, upload, rates, rounds=3000, read=lambda server: server.state["mean"])
    assert mean == pytest.approx(biased_minimum([1.0] * 4), abs=0.2)
    assert biased_minimum(mean_shares()) < 1  # where FedAvg comes to


def test_defaults() -> None:
    assert_defaults(FedAWE(), {"weighting": "uniform", "server_scale": 1.0, "longest": None, "evaluate_mean": False})
