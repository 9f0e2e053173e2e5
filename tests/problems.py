"""Small problems with known answers, and servers built directly on them, so that tests compare vectors in float64.

Letters as in the papers: L_i(w) = ½ (w − a_i)ᵀ A_i (w − a_i); N clients, K local steps, w the global model, θ a local
one.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from askew.core.algorithm import Algorithm, Gradient
from askew.core.bank import Bank
from askew.core.space import Space
from askew.core.task import Bound, Functional, Task, WithFeatures
from askew.core.types import State
from askew.data.dataset import Criterion, Dataset, Samples
from askew.data.federation import Federation, LocalSettings, RoundPlan
from askew.data.partition import Natural
from askew.engine.base import Engine, PhaseInputs, PhaseOutputs, PhaseRequest
from askew.engine.choose import has_batch_norm
from askew.engine.evaluate import Evaluator
from askew.engine.sequential import Sequential
from askew.engine.server import Server
from askew.engine.slots import Slots
from askew.engine.stacked import Stacked
from askew.engine.vmapped import Vmapped
from askew.kernels.steps import RowSteps, StepKernels
from askew.models import MLP, Softmax

Record = dict[str, Any]
Term = Callable[[Tensor], Tensor]  # something that is added to a gradient, as a function of theta
Direction = Callable[[Tensor, Gradient], Tensor]


class Problem(NamedTuple):
    """Clients with their samples, and a network."""

    fed: Federation
    module: nn.Module

    @property
    def clients(self) -> list[int]:
        """The clients that hold samples."""
        return [int(i) for i in self.fed.eligible]

    def samples(self, client: int) -> Samples:
        """The samples of one client."""
        pool, (own,) = self.fed.gather([client])
        return Samples(pool.x[own], pool.y[own])

    def optimum(self, weights: Sequence[float] | None = None) -> Tensor:
        """Of least squares: the minimum of the weighted mean of the clients' mean losses; without weights, of the plain
        mean.
        """
        samples = [self.samples(i) for i in self.clients]
        p = [1.0] * len(samples) if weights is None else weights
        A = sum(p_i * s.x.T @ s.x / len(s.y) for p_i, s in zip(p, samples, strict=True))
        b = sum(p_i * s.x.T @ s.y[:, 0] / len(s.y) for p_i, s in zip(p, samples, strict=True))
        return torch.linalg.solve(A, b)


# problems -------------------------------------------------------------------------------------------------------------


def federation(
    samples: Sequence[Samples],
    classes: int = 0,
    criterion: Criterion = "squared_error",
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Federation:
    """A federation in which client i holds samples[i]; the test set is all of them."""
    train = Samples(torch.cat([s.x for s in samples]), torch.cat([s.y for s in samples]))
    owner = np.repeat(np.arange(len(samples)), [len(s.y) for s in samples])
    dataset = Dataset(train, train, classes, owner, criterion)
    return Federation(dataset, Natural(clients=len(samples)), seed, "cpu", dtype)


def linear_model(d: int) -> nn.Module:
    """w·x without an intercept, from w = 0."""
    layer = nn.Linear(d, 1, bias=False)
    nn.init.zeros_(layer.weight)
    return layer


class TwoLayerLinear(nn.Module):
    """w·x with the four weights in two layers side by side, from w = 0."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (nn.Linear(2, 1, bias=False) for _ in range(2))
        for layer in (self.one, self.two):
            nn.init.zeros_(layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x[:, :2]) + self.two(x[:, 2:])  # type: ignore[no-any-return]


def least_squares(A: Tensor, a: Tensor, copies: Sequence[int] | None = None) -> Problem:
    """A problem in which client i's full gradient is A_i (w − a_i); more copies of its d samples change n_i alone."""
    d = a.shape[1]
    copies = [1] * len(a) if copies is None else copies
    inputs = [(math.sqrt(d) * torch.linalg.cholesky(A_i).T).repeat(k, 1) for A_i, k in zip(A, copies, strict=True)]
    samples = [Samples(x, (x @ a_i)[:, None]) for x, a_i in zip(inputs, a, strict=True)]
    return Problem(federation(samples), linear_model(d))


def quadratics(clients: int = 10, d: int = 4, copies: Sequence[int] | None = None, seed: int = 0) -> Problem:
    """Skewed quadratics: every client has its own minimum and its own curvatures between 0.3 and 1.5."""
    rng = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=rng, dtype=torch.float64)
    Q = torch.linalg.qr(draw(clients, d, d))[0]
    curvature = 0.3 + 1.2 * torch.rand(clients, d, generator=rng, dtype=torch.float64)
    return least_squares(Q @ torch.diag_embed(curvature) @ Q.mT, 2 * draw(clients, d), copies)


def scalars(*clients: tuple[float, float], copies: Sequence[int] | None = None) -> Problem:
    """L_i(w) = ½ A_i (w − a_i)² on the line, from pairs (A_i, a_i); w starts at 0."""
    A, a = torch.tensor(clients, dtype=torch.float64).T
    return least_squares(A[:, None, None], a[:, None], copies)


def regression(sizes: Sequence[int], d: int = 3, seed: int = 0, batch_seed: int = 0) -> Problem:
    """Least squares with noise: batches of one client differ, clients differ more."""
    rng = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=rng, dtype=torch.float64)
    inputs = [draw(n, d) for n in sizes]
    samples = [Samples(x, x @ draw(d, 1) + 0.5 * draw(len(x), 1)) for x in inputs]
    return Problem(federation(samples, seed=batch_seed), linear_model(d))


def skewed_samples(sizes: Sequence[int], d: int = 4, classes: int = 3, seed: int = 0) -> list[Samples]:
    """Samples of classes around centres, for each client with other shares of the labels."""
    rng = np.random.default_rng(seed)
    centres, samples = rng.normal(size=(classes, d)), []
    for n in sizes:
        y = rng.choice(classes, n, p=rng.dirichlet(np.full(classes, 0.5)))
        samples.append(Samples(torch.from_numpy(centres[y] + rng.normal(size=(n, d))), torch.from_numpy(y)))
    return samples


def classification(
    samples: Sequence[Samples], norm: str = "none", dtype: torch.dtype = torch.float64, seed: int = 0
) -> Problem:
    """Three classes and a small network with a hidden layer, which always starts alike."""
    fed = federation(samples, 3, "cross_entropy", seed, dtype)
    return Problem(fed, small_network(fed, norm))


def small_network(fed: Federation, norm: str = "none", hidden: int = 4) -> nn.Module:
    """A network with one hidden layer, drawn from a fixed seed."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # torch.manual_seed also notes the call for every kind of device
        return MLP(hidden=(hidden,), norm=norm).module(fed.shape, fed.classes)


def softmax_regression(sizes: Sequence[int], seed: int = 0) -> Problem:
    """Three classes and a network without a hidden layer: a convex problem."""
    fed = federation(skewed_samples(sizes, seed=seed), 3, "cross_entropy")
    return Problem(fed, Softmax().module(fed.shape, fed.classes))


def softmax_optimum(problem: Problem, decay: float) -> Tensor:
    """The minimum of the plain mean of the clients' losses plus decay/2 ‖w‖², by Newton's method."""
    space = Space(problem.module, torch.float64)
    task = Functional(problem.module, space)
    samples = [problem.samples(i) for i in problem.clients]

    def total(w: Tensor) -> Tensor:
        output = lambda x: torch.func.functional_call(task.module, space.split(w), (x,))[0]
        losses = [torch.nn.functional.cross_entropy(output(s.x), s.y) for s in samples]
        return torch.stack(losses).mean() + decay / 2 * w @ w

    w = space.start.clone()
    for _ in range(20):
        w = w - torch.linalg.solve(torch.func.jacrev(torch.func.grad(total))(w), torch.func.grad(total)(w))
    assert float(torch.func.grad(total)(w).norm()) < 1e-14
    return w


# servers --------------------------------------------------------------------------------------------------------------


class PairsOfClients(Vmapped):
    """Two clients at a time, whatever the memory."""

    def _chunk_size(self, request: PhaseRequest, steps: RowSteps | None) -> int:
        return 2


def with_features(module: nn.Module, example: Tensor) -> nn.Module:
    """A module that gives (output, features): the given one if it does so already."""
    probe = copy.deepcopy(module).eval()
    with torch.no_grad():
        output = probe(example)
    return WithFeatures(module) if isinstance(output, Tensor) else module


def make_engine(name: str, task: Task, never_pad: bool) -> Engine:
    """An engine by name.

    sequential    the reference: no kernels
    kernels       the same with kernels
    slots         two slots without graphs
    stacked       three rows without graphs;  groups: long jobs in rows of their own
    vmapped       as in use, with kernels;  plain_rows: without;  pairs, single: in chunks of two and of one
    """
    if name in ("sequential", "kernels"):
        return Sequential(task, 0, False, StepKernels(task, set()) if name == "kernels" else None)
    if name == "slots":
        return Slots(lambda: Bound(task.module, task.space, task.criterion), never_pad, most=2)
    assert isinstance(task, Functional)
    if name in ("stacked", "groups"):
        return Stacked(task, most=3) if name == "stacked" else Stacked(task, least_gap=1)
    kernels = None if name == "plain_rows" else StepKernels(task, set())
    if name == "pairs":
        return PairsOfClients(task, never_pad, kernels)
    return Vmapped(task, never_pad, kernels, **({"budget": 1} if name == "single" else {}))


def with_needs(fed: Federation, needs: Sequence[str]) -> Federation:
    """The same clients and samples, with what a method needs: validation parts, or twenty public samples."""
    if "validation" in needs and fed.assignment is not None:
        owner = np.repeat(np.arange(fed.clients), fed.assignment.sizes)
        dataset = Dataset(fed.pool, fed.test, fed.classes, owner, fed.criterion)
        fed = Federation(dataset, Natural(clients=fed.clients), fed.seed, "cpu", fed.dtype, needs)
    if "public" in needs and fed.public is None:
        x, y = skewed_samples([1, 20])[1]
        fed = copy.copy(fed)
        fed.public = Samples(x.to(fed.dtype), y)
    return fed


def make_server(
    alg: Algorithm, problem: Problem, local: LocalSettings, engine: str = "sequential", rounds: int = 0
) -> Server:
    """A server before its first round."""
    fed = with_needs(problem.fed, alg.needs)
    module = with_features(problem.module.to(fed.dtype), fed.test.x[:2])
    space, batch_norm = Space(module, fed.dtype), has_batch_norm(module)
    task = (Bound if engine in ("sequential", "kernels", "slots") else Functional)(module, space, fed.criterion)
    evaluate = Evaluator(task, fed, fed.public) if fed.public is not None and "public" in alg.needs else None
    made, least = make_engine(engine, task, batch_norm), 2 if batch_norm else 1
    return Server(alg, space, fed, local, made, fed.seed, least, rounds=rounds, evaluate=evaluate)


def run_rounds(server: Server, cohorts: Iterable[Sequence[int]], first: int = 1) -> list[Record]:
    """The records of rounds with given participants."""
    return [server.run_round(t, ids) for t, ids in enumerate(cohorts, first)]


def run_prepared_rounds(server: Server, cohorts: Sequence[Sequence[int]]) -> list[Record]:
    """The same, each round prepared while the one before runs."""
    next_cohorts = [*cohorts[1:], cohorts[-1]]
    return [
        server.run_round(t, ids, meanwhile=lambda t=t, coming=coming: server.prepare(t + 1, coming))  # type: ignore[misc]
        for t, (ids, coming) in enumerate(zip(cohorts, next_cohorts, strict=True), 1)
    ]


def trained_server(
    alg: Algorithm, problem: Problem, local: LocalSettings, cohorts: Iterable[Sequence[int]], engine: str = "sequential"
) -> Server:
    """A server after rounds with these participants."""
    server = make_server(alg, problem, local, engine)
    run_rounds(server, cohorts)
    return server


def random_cohorts(rounds: int, cohort: int, clients: int, seed: int = 0) -> list[list[int]]:
    """The participants of every round, drawn without replacement."""
    rng = np.random.default_rng(seed)
    return [sorted(rng.choice(clients, cohort, replace=False).tolist()) for _ in range(rounds)]


# comparing ------------------------------------------------------------------------------------------------------------


def client_row(bank: Bank, client: int) -> State:
    """What a bank holds of one client."""
    return {n: v[0] for n, v in bank.read([client]).items()}


def full_state(server: Server, order: Sequence[int] | None = None) -> State:
    """All that a server holds, with a row of every bank for every client (in the given order)."""
    order = range(server.fed.clients) if order is None else order
    state = {"w": server.w, "buffers": server.buffers} | {f"server.{n}": v.clone() for n, v in server.state.items()}
    for name, bank in server.banks.items():
        state |= {f"{name}.{n}": v for n, v in bank.read(list(order)).items()}
    return {n: v.clone() for n, v in state.items()}


def largest_gap(one: State, other: State) -> float:
    """The largest difference between two states, entry by entry relative to the larger of 1 and the entry's size."""
    assert {n: (v.shape, v.dtype) for n, v in one.items()} == {n: (v.shape, v.dtype) for n, v in other.items()}
    gaps = [(one[n] - v).abs().max().item() / max(1.0, v.abs().max().item()) for n, v in other.items() if v.numel()]
    return math.inf if any(math.isnan(gap) for gap in gaps) else max(gaps, default=0.0)


def identical(one: State, other: State) -> bool:
    """Are two states equal bit for bit?"""
    return one.keys() == other.keys() and all(torch.equal(one[n], v) for n, v in other.items())


def close(one: Tensor, other: Tensor | Sequence[float] | float, within: float = 1e-12) -> bool:
    """Are two tensors equal up to rounding?"""
    return largest_gap({"": one}, {"": torch.as_tensor(other, dtype=one.dtype).expand_as(one)}) <= within


# engines around engines -----------------------------------------------------------------------------------------------


class FaultyReports:
    """An engine that replaces one number in the reports of some clients, by default with NaN."""

    def __init__(
        self, engine: Engine, clients: Collection[int], field: str = "up", value: float = math.nan, at: int = 0
    ) -> None:
        """`field`: of PhaseOutputs; `at`: the place of the number in the row."""
        self.engine, self.name, self.clients = engine, engine.name, clients
        self.field, self.value, self.at = field, value, at

    def run(self, requests: Sequence[PhaseRequest]) -> list[PhaseOutputs]:
        (outputs,) = self.engine.run(requests)
        entry = getattr(outputs, self.field)
        tensor = entry[sorted(entry)[-1]] if isinstance(entry, dict) else entry
        rows = [i for i, client in enumerate(requests[0].plan.ids) if client in self.clients]
        tensor.view(len(tensor), -1)[rows, self.at] = self.value
        return [outputs]


class RecordingEngine:
    """An engine that remembers what went in and out."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.name = engine, engine.name
        self.calls: list[tuple[PhaseInputs, RoundPlan, PhaseOutputs]] = []

    def run(self, requests: Sequence[PhaseRequest]) -> list[PhaseOutputs]:
        (outputs,) = self.engine.run(requests)
        self.calls.append((requests[0].inputs, requests[0].plan, outputs))
        return [outputs]


def round_outputs(server: Server, round: int, ids: Sequence[int]) -> PhaseOutputs:
    """Run a round; returns what its clients sent."""
    server.engine = recording = RecordingEngine(server.engine)
    server.run_round(round, ids)
    server.engine = recording.engine
    return recording.calls[-1][2]


# local training, written out ------------------------------------------------------------------------------------------


class LocalTraining(NamedTuple):
    """Where a client's round ended, its momentum, and the plain gradient of every step [K, d]."""

    theta: Tensor
    momentum: Tensor
    gradients: Tensor


def first_client_batches(plan: RoundPlan) -> Iterator[Samples]:
    """The batches of the plan's first client."""
    work = plan.train[0]
    for places in work.places.split(work.lengths()):
        yield Samples(plan.pool.x[places], plan.pool.y[places])


def no_term(theta: Tensor) -> Tensor:
    return torch.zeros_like(theta)


def train_locally(
    problem: Problem,
    local: LocalSettings,
    client: int,
    round: int,
    start: Tensor,
    direction: Direction | None = None,
    *,
    gain: float = 1.0,
    inside: Term = no_term,
    beside: Term = no_term,
    v: Tensor | None = None,
    rho: Tensor | float | None = None,
) -> LocalTraining:
    """A client's round of least squares, written out independently of the code under test.

    direction → clip → weight decay and `beside` → momentum ρ on v → step. The direction, where it is not given, is
    gain·gradient + `inside`.
    """
    direction = direction or (lambda theta, gradient_at: gain * gradient_at(theta) + inside(theta))
    theta, gradients = start.clone(), []
    v = torch.zeros_like(theta) if v is None else v
    rho = local.momentum if rho is None else rho
    for X, y in first_client_batches(problem.fed.plan([client], round, local)):
        gradient_at = lambda u, X=X, y=y: X.T @ (X @ u - y[:, 0]) / len(y)
        gradients.append(gradient_at(theta))
        d = direction(theta, gradient_at)
        if local.clip and d.norm() > local.clip:
            d = d * (local.clip / (d.norm() + 1e-6))
        v = rho * v + d + local.weight_decay * theta + beside(theta)
        theta = theta - local.rate(round) * v
    return LocalTraining(theta, v, torch.stack(gradients))
