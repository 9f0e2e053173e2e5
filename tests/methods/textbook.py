"""What the tests of methods share: cohorts, settings, the papers' quantities, and two rounds to compute by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from askew.algorithms import MGDA
from askew.core.algorithm import Algorithm
from askew.core.task import Functional
from askew.core.types import Cohort
from askew.data.federation import LocalSettings
from askew.engine.evaluate import Evaluator
from askew.engine.server import Server
from askew.experiment.build import BuiltRun
from askew.experiment.config import Config
from askew.experiment.run_evaluation import evaluate_models, evaluation_record
from askew.kernels.interface import Kernels
from problems import Problem, Record, make_server, scalars, train_locally

SIZES = [5, 8, 3, 6]  # samples of the four clients
ALL = [0, 1, 2, 3]
COHORTS = [[0, 1, 3], [1, 2], [0, 2, 3], [2]]
EVERYBODY = [ALL]
PLAIN = LocalSettings(epochs=2, batch=3, lr=0.1)
DECAYING = LocalSettings(epochs=2, batch=3, lr=0.1, decay=0.7)
EVERY_TERM = LocalSettings(epochs=2, batch=3, lr=0.1, momentum=0.6, weight_decay=0.03, clip=0.9, decay=0.9)
ONE_STEP = LocalSettings(batch=0, steps=1, lr=0.3)  # on all samples
LAST_LAYER = torch.tensor([2, 3])  # places of the last layer's weights in the fixture `layered`


def zeros(problem: Problem) -> Tensor:
    """The origin, where all models of least squares start."""
    return torch.zeros(problem.fed.shape[0], dtype=torch.float64)


def sample_shares(problem: Problem, ids: Sequence[int]) -> Tensor:
    """n_i / Σ n_j"""
    n = torch.tensor(problem.fed.sizes[list(ids)], dtype=torch.float64)
    return n / n.sum()


def weights_of(problem: Problem, ids: Sequence[int], weighting: str) -> Tensor:
    """The clients' weights in an average, by sample count or equal."""
    equal = torch.full((len(ids),), 1 / len(ids), dtype=torch.float64)
    return sample_shares(problem, ids) if weighting == "samples" else equal


def relative_size(problem: Problem, client: int) -> float:
    """n_i / n̄"""
    return float(problem.fed.sizes[client] / problem.fed.sizes.mean())


def full_gradient(problem: Problem, client: int, w: Tensor) -> Tensor:
    """∇L_i(w) over all of a client's samples."""
    x, y = problem.samples(client)
    return x.T @ (x @ w - y[:, 0]) / len(y)


def displacements(problem: Problem, local: LocalSettings, ids: Sequence[int], round: int, w: Tensor) -> Tensor:
    """δ_i = θ_i − w of FedAvg's clients [C, P]."""
    return torch.stack([train_locally(problem, local, i, round, w).theta - w for i in ids])


def momentum_length(K: int, rho: float) -> float:
    """The length of K heavy-ball steps along a constant gradient, in closed form."""
    return (K - rho * (1 - rho**K) / (1 - rho)) / (1 - rho)


def make_cohort(p: Sequence[float], lr: float = 0.1, lr0: float = 0.1, round: int = 1, clients: int = 10) -> Cohort:
    """What a server knows, where only the weights and the rate matter."""
    row = torch.tensor(p, dtype=torch.float64)
    ones = torch.ones_like(row)
    return Cohort(row, ones, ones, ones, ones, None, lr, lr0, round, clients)


def stale_cohort(*staleness: float) -> Cohort:
    """Clients of equal weight that started from models of so many server steps ago."""
    cohort = make_cohort([1 / len(staleness)] * len(staleness))
    return cohort._replace(staleness=torch.tensor(staleness, dtype=torch.float64))


def vectors(*rows: Sequence[float]) -> Tensor:
    """Rows of numbers as a float64 matrix."""
    return torch.tensor(rows, dtype=torch.float64)


def assert_defaults(alg: Algorithm, expected: dict[str, object]) -> None:
    """These settings have the published values: weights as in the authors' code or paper, of every fork our branch."""
    assert {name: alg.table()[name] for name in expected} == expected


def mgda_step(alg: MGDA, gradients: Tensor, w: Tensor | None = None) -> tuple[Tensor, dict[str, float]]:
    """The model after MGDA's server step, from the origin if `w` is not given, and the server's state."""
    w = torch.zeros(gradients.shape[1], dtype=torch.float64) if w is None else w
    zero = torch.zeros((), dtype=torch.float64)
    cohort = make_cohort([1 / len(gradients)] * len(gradients))
    new, state = alg.aggregate(w, {"gradient": gradients}, cohort, {"norm": zero, "stationary": zero})
    return new, {n: float(v) for n, v in state.items()}


# evaluation -----------------------------------------------------------------------------------------------------------


def evaluation_of(server: Server, problem: Problem) -> Record:
    """What a run would record of this server's evaluation."""
    task = Functional(problem.module, server.space, problem.fed.criterion)
    evaluator, kernels = (
        Evaluator(task, problem.fed, problem.fed.test),
        Kernels(server.space.device, server.space.dtype),
    )
    built = BuiltRun(Config(), problem.fed, problem.module, server.space, task, evaluator, server, kernels, {})
    return evaluation_record(built, evaluate_models(built))


def loss_on_test_set(problem: Problem, server: Server, w: Tensor, buffers: Tensor) -> float:
    """The mean loss of a model on the test set, by torch alone."""
    problem.module.eval()
    state = server.space.split(w) | server.space.split_buffers(buffers)
    output = functional_call(problem.module, state, (problem.fed.test.x,))[0]
    return float(F.cross_entropy(output, problem.fed.test.y))


# two rounds by hand ---------------------------------------------------------------------------------------------------
# On the line: L_i(θ) = ½ A_i (θ − a_i)², w starts at 0, two full steps of rate 0.1, which leave of the distance to a_i
# 0.81, 0.36, 0.64 and 0.81. Clients 0 and 1 take part in the first round, clients 0 and 2 in the second; client 3 never
# does but is one of N = 4. So the first displacements are 0.19 and −1.28, and from w the second ones are 0.19 (1 − w)
# and 0.36 (3 − w).

LINE_CLIENTS = (1.0, 1.0), (4.0, -2.0), (2.0, 3.0), (1.0, 0.0)  # pairs (A_i, a_i)
TWO_STEPS = LocalSettings(batch=0, steps=2, lr=0.1)
LINE_COHORTS = [[0, 1], [0, 2]]


def two_rounds_on_the_line(
    alg: Algorithm, local: LocalSettings = TWO_STEPS, copies: Sequence[int] | None = None
) -> tuple[list[float], Server]:
    """w after the first and after the second round, and the server."""
    server, path = make_server(alg, scalars(*LINE_CLIENTS, copies=copies), local), []
    for t, ids in enumerate(LINE_COHORTS, 1):
        server.run_round(t, ids)
        path.append(float(server.w))
    return path, server


def second_displacements(w: float) -> tuple[float, float]:
    """The displacements of the second round, from w."""
    return 0.19 * (1 - w), 0.36 * (3 - w)


def exactly(*values: float) -> object:
    """These numbers up to rounding."""
    return pytest.approx(list(values), rel=1e-12, abs=1e-13)
