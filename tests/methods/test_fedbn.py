"""FedBN: batch norm stays with the client."""

from __future__ import annotations

import pytest
import torch
from textbook import ALL, COHORTS, EVERY_TERM, PLAIN, SIZES, assert_defaults, evaluation_of, exactly, loss_on_test_set
from torch import Tensor, nn

from askew.algorithms import FedAvg, FedBN
from askew.core.space import Space
from askew.data.dataset import Samples
from askew.data.federation import LocalSettings
from askew.engine.evaluate import with_private
from problems import (
    Problem,
    RecordingEngine,
    classification,
    client_row,
    close,
    federation,
    full_state,
    identical,
    make_server,
    skewed_samples,
    trained_server,
)


def test_without_batch_norm_it_is_fedavg_and_says_so() -> None:
    problem = classification(skewed_samples(SIZES))
    ours = trained_server(FedBN(), problem, EVERY_TERM, COHORTS)
    assert torch.equal(ours.w, trained_server(FedAvg(weighting="uniform"), problem, EVERY_TERM, COHORTS).w)
    assert "FedAvg" in FedBN().remark(ours.space) and not len(ours.privates)
    assert FedBN().remark(make_server(FedBN(), classification(skewed_samples(SIZES), "batch"), EVERY_TERM).space) == ""


def test_batch_norm_is_found_by_type_not_by_name() -> None:
    class Misleading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn_like, self.layer, self.out = nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.layer(self.bn_like(x)))  # type: ignore[no-any-return]

    space = Space(Misleading(), torch.float64)
    part = FedBN().private(space)
    assert part.indices.tolist() == list(range(15, 21)) and part.buffer_indices.tolist() == list(range(6))


def test_clients_share_all_but_their_batch_norm() -> None:
    """Every client starts from the common coordinates and its own batch norm; the server's own stays as it began."""
    problem = classification(skewed_samples(SIZES), "batch")
    server = make_server(FedBN(), problem, PLAIN)
    start, (private, private_buffers) = full_state(server), server.private
    assert len(private) == 8 and len(private_buffers) == 8
    others = [i for i in range(server.space.P) if i not in private.tolist()]
    first = {"w": start["w"][private], "b": start["buffers"][private_buffers]}
    rows = dict.fromkeys(ALL, first)
    for t, ids in enumerate(COHORTS, 1):
        w = server.w
        server.engine = recording = RecordingEngine(server.engine)
        server.run_round(t, ids)
        server.engine = recording.engine
        inputs, _, outputs = recording.calls[0]
        assert outputs.theta is not None
        for k, i in enumerate(ids):
            assert torch.equal(inputs.w[k][others], w[others])
            assert torch.equal(inputs.w[k][private], rows[i]["w"])
            assert torch.equal(inputs.buffers[k][private_buffers], rows[i]["b"])
            rows[i] = client_row(server.privates, i)
            assert torch.equal(rows[i]["w"], outputs.theta[k][private])
            assert torch.equal(rows[i]["b"], outputs.buffers[k][private_buffers])
        assert close(server.w[others], outputs.theta.mean(0)[others])
        assert torch.equal(server.w[private], first["w"]) and torch.equal(server.buffers[private_buffers], first["b"])
        assert all(identical(client_row(server.privates, i), rows[i]) for i in ALL)
    assert not torch.equal(rows[0]["w"], rows[1]["w"]) and not torch.equal(rows[0]["b"], rows[1]["b"])


def test_three_ways_to_evaluate() -> None:
    """Each client's own model on the test set, meaned; the mean of all clients' batch norm; the server's own."""
    problem = classification(skewed_samples(SIZES), "batch")
    found, expected = [], []
    for how in ("clients", "server_mean", "server_init"):
        server = trained_server(FedBN(eval=how), problem, PLAIN, [[0, 1], [1, 3]])  # client 2 never takes part
        found.append(evaluation_of(server, problem)["loss"])
        rows = [client_row(server.privates, i) for i in ALL]
        assert torch.equal(rows[2]["w"], server.space.start[server.private.indices])
        loss_with = lambda part, server=server: loss_on_test_set(
            problem, server, *with_private(server.w, server.buffers, server.private, part)
        )
        mean = {n: torch.stack([row[n] for row in rows]).mean(0) for n in "wb"}
        each = {
            "clients": sum(map(loss_with, rows)) / 4,
            "server_mean": loss_with(mean),
            "server_init": loss_on_test_set(problem, server, server.w, server.buffers),
        }
        expected.append(each[how])
    assert found == pytest.approx(expected, rel=1e-12)
    assert len({round(v, 6) for v in found}) == 3


class LinearPlusBatchNorm(nn.Module):
    """w·x plus batch norm of x. On x = ±1 batch norm is γx + β."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1, eps=1e-30)
        nn.init.zeros_(self.fc.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) + self.norm(x)  # type: ignore[no-any-return]


def test_two_rounds_by_hand() -> None:
    # Client i holds (−1, −s_i + m_i) and (1, s_i + m_i): gradients u + γ − s_i for the linear weight u and γ, β − m_i
    # for β. u = 0, γ = 1, β = 0, one step of rate ½. s, m = (3, 2), (−1, 4), (5, −6).
    # Client 0: u = 1, γ = 2, β = 1. Client 1: u = −1, γ = 0, β = 2. Global: u = 0, γ and β as they began.
    # Running variance: 0.9 + 0.1 · 2 = 1.1 (unbiased), running mean 0.
    # Client 0 from u = 0, γ = 2, β = 1: residual −1: u = ½, γ = 2½, β = 1½; variance 1.19.
    # Client 2 from u = 0, γ = 1, β = 0: residual −4: u = 2, γ = 3, β = −3. Global: u = 5/4.
    inputs = torch.tensor([[-1.0], [1.0]], dtype=torch.float64)
    samples = [Samples(inputs, inputs * s + m) for s, m in ((3.0, 2.0), (-1.0, 4.0), (5.0, -6.0))]
    problem = Problem(federation(samples), LinearPlusBatchNorm())
    server = make_server(FedBN(), problem, LocalSettings(batch=0, steps=1, lr=0.5))
    server.run_round(1, [0, 1])
    assert server.w.tolist() == exactly(0.0, 1.0, 0.0)
    assert server.privates.read(range(3))["w"].tolist() == [exactly(2.0, 1.0), exactly(0.0, 2.0), exactly(1.0, 0.0)]
    assert server.privates.read(range(3))["b"].tolist() == [exactly(0.0, 1.1), exactly(0.0, 1.1), exactly(0.0, 1.0)]
    server.run_round(2, [0, 2])
    assert server.w.tolist() == exactly(1.25, 1.0, 0.0) and server.buffers.tolist() == exactly(0.0, 1.0)
    assert server.privates.read(range(3))["w"].tolist() == [exactly(2.5, 1.5), exactly(0.0, 2.0), exactly(3.0, -3.0)]
    assert server.privates.read(range(3))["b"].tolist() == [exactly(0.0, 1.19), exactly(0.0, 1.1), exactly(0.0, 1.1)]


def test_defaults_are_the_published_ones() -> None:
    assert_defaults(FedBN(), {"weighting": "uniform", "eval": "clients"})
