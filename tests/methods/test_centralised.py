"""Centralised training: SOLO with one client that holds all samples."""

from __future__ import annotations

from typing import Any

import torch
from textbook import EVERY_TERM, TWO_STEPS, exactly, vectors

import askew
from askew.algorithms import Centralised, Solo
from askew.data.dataset import Samples
from problems import (
    Problem,
    classification,
    client_row,
    federation,
    full_state,
    identical,
    linear_model,
    make_server,
    skewed_samples,
    trained_server,
)


def test_two_rounds_by_hand() -> None:
    # One client holds (1, 1) and (2, −4): g = ½ (5 w + 7). 0 → −0.35 → −0.6125 | −0.809375 → −0.95703125.
    problem = Problem(federation([Samples(vectors([1.0], [2.0]), vectors([1.0], [-4.0]))]), linear_model(1))
    server = make_server(Centralised(), problem, TWO_STEPS)
    for t, theta in ((1, -0.6125), (2, -0.95703125)):
        server.run_round(t, [0])
        assert client_row(server.privates, 0)["w"].tolist() == exactly(theta)


def test_it_is_solo_with_one_client() -> None:
    problem = classification(skewed_samples([13]), "batch")
    one, other = (trained_server(alg, problem, EVERY_TERM, [[0]] * 4) for alg in (Solo(), Centralised()))
    assert identical(full_state(one), full_state(other)) and not torch.equal(client_row(one.privates, 0)["w"], one.w)
    samples = skewed_samples([40])[0]
    common: dict[str, Any] = {"data": (samples.x.float(), samples.y), "rounds": 3, "model": "softmax"}
    common |= {"local": {"batch": 8, "momentum": 0.9}}
    solo = askew.run("solo", partition="iid", clients=1, cohort=1, **common)
    pooled = askew.run("centralised", clients=7, cohort=3, **common)
    records = lambda run: [{k: v for k, v in record.items() if k != "seconds"} for record in run.rounds]
    assert records(solo) == records(pooled)
    assert pooled.federation["sizes"] == [len(samples.y) - len(samples.y) // 5]
