"""Checks of claims that need no stored run, but a method's code, arithmetic or one round of a small federation.

Each check says whether the claim holds and on what grounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..algorithms import algorithms
from ..algorithms._simplex import min_norm_point
from ..algorithms.fedpmvr import READINGS
from ..core.algorithm import Algorithm
from ..core.rng import generator
from ..core.space import Space
from ..core.types import Cohort, State
from ..data.federation import LocalSettings
from ..data.partition import Natural
from ..data.synthetic import Synthetic
from ..engine.settings import EngineSettings
from ..experiment.build import BuiltRun, build
from ..experiment.catalogue import costs
from ..experiment.config import Config
from ..models import MLP, LeNet, LeNetPMVR
from ..participation import chances
from .participation_counts import gini, skewed_counts

CheckResult = tuple[bool, str]  # whether the claim holds, and the grounds
DRAWS = 20  # seeds at which participation is counted
ROUNDS = 2000  # rounds over which it is counted


def run_small_federation(method: Algorithm, local: LocalSettings, rounds: int = 1) -> BuiltRun:
    """Train four clients on generated data for a few rounds, in double precision."""
    config = Config(
        rounds=rounds,
        data=Synthetic(dim=8, labels=3, samples=24),
        partition=Natural(clients=4),
        model=MLP(hidden=(6,)),
        algorithm=method,
        local=local,
        engine=EngineSettings(name="sequential", device="cpu", dtype="float64"),
    )
    built = build(config)
    for t in range(1, rounds + 1):
        built.server.run_round(t, built.fed.eligible.tolist())
    return built


def equal_cohort(updates: Tensor, round: int = 1) -> Cohort:
    """A cohort of clients of equal weight, one for each row of the updates [C, P]."""
    ones = torch.ones(len(updates), dtype=updates.dtype)
    return Cohort(ones / len(ones), ones, ones, ones, ones, None, 0.1, 0.1, round, len(ones))


def random_values(*shape: int, address: int = 0) -> Tensor:
    """Standard normal values; the same for the same address."""
    return torch.from_numpy(generator(0, "deduction", address).standard_normal(shape))


def same_or_different(same: bool) -> str:
    return "the same" if same else "different"


def size_text(value: float) -> str:
    """A number that may be rounding alone, which differs from machine to machine."""
    return "0, up to rounding" if abs(value) < 1e-9 else f"{value:.1g}"


# FedDPC ---------------------------------------------------------------------------------------------------------


class ValueCounter(TorchFunctionMode):
    """Counts values: of every operation the size of the largest tensor that it reads or writes."""

    def __init__(self) -> None:
        super().__init__()
        self.values = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.values += max((t.numel() for t in (*args, out) if isinstance(t, Tensor)), default=0)
        return out


def count_server_values(method: Algorithm, participants: int, parameters: int) -> int:
    """Values that the server handles in a round that is not the first."""
    updates, x = random_values(participants, parameters), torch.zeros(parameters, dtype=torch.float64)
    state: State = {"prev": random_values(parameters, address=1), "ratio": x.sum(), "undefined": x.sum()}
    counter = ValueCounter()
    with counter:
        method.aggregate(x, {"delta": updates}, equal_cohort(updates, 2), state)
    return counter.values


@cache
def dpc_server_slope() -> CheckResult:
    """Does what projection and scaling add for a further participant not depend on the model's size?"""
    cohorts, added = (5, 10, 20, 50), {}
    for d in (1000, 4000):
        ours, base = ([count_server_values(algorithms[name](), c, d) for c in cohorts] for name in ("feddpc", "fedavg"))
        extra = [x - y for x, y in zip(ours, base, strict=True)]
        added[d] = float(np.polyfit(cohorts, extra, 1)[0])
    ratio = added[4000] / added[1000]
    grounds = f"what a further participant adds is {ratio:.2f} times as much for 4 times the parameters (counted)"
    return ratio < 2, grounds


def dpc_client_extra() -> CheckResult:
    """Does a FedDPC client do at most 2d operations more than FedAvg's, whatever the batches?"""
    hooks = ("begin", "carry", "direction", "descend", "note", "loss", "finish")
    changed = [hook for hook in hooks if getattr(algorithms["feddpc"], hook) is not getattr(algorithms["fedavg"], hook)]
    return not changed, "the client's code is FedAvg's: it sends its displacement, and the division is the server's"


def dpc_state() -> CheckResult:
    """Does FedDPC's server keep nothing, and FedVARP's one model?"""
    dpc, varp = costs(algorithms["feddpc"]()), costs(algorithms["fedvarp"]())
    grounds = (
        f"kept at the server, in models: FedDPC {dpc.server_state:.3g}; "
        f"FedVARP {varp.server_state:.3g} and {varp.memory:.3g} a client"
    )
    return dpc.server_state == 0 and varp.memory == 0, grounds


def dpc_orthogonal() -> CheckResult:
    """Is each global update orthogonal to the one before?"""
    method, x, worst = algorithms["feddpc"](), torch.zeros(500, dtype=torch.float64), 0.0
    state: State = {"prev": torch.zeros_like(x), "ratio": x.sum(), "undefined": x.sum()}
    before: Tensor | None = None
    for t in range(1, 21):
        updates = random_values(10, 500, address=t) + random_values(500, address=99)  # clients that agree in part
        new, state = method.aggregate(x, {"delta": updates}, equal_cohort(updates, t), state)
        update = new - x
        if before is not None:
            worst = max(worst, abs(float(update @ before / (update.norm() * before.norm()))))
        x, before = new, update
    return worst < 1e-5, f"largest |cosine| of consecutive updates in 20 rounds of random ones: {size_text(worst)}"


# FedDC ----------------------------------------------------------------------------------------------------------


def sigmoid_average() -> CheckResult:
    """Is f(mean of weights) unlike the mean of f for a sigmoid unit, where weights differ and are not opposite?"""
    sigmoid: Callable[[Any], Any] = lambda z: 1 / (1 + np.exp(-z))
    a, b, x = np.meshgrid(*[np.linspace(-4, 4, 17)] * 3, indexing="ij")
    gaps = np.abs(sigmoid((a + b) / 2 * x) - (sigmoid(a * x) + sigmoid(b * x)) / 2)
    generic, opposite = (a != b) & (a != -b) & (x != 0), (a == -b) & (a != b)
    grounds = (
        f"smallest difference on a grid {gaps[generic].min():.1g}; "
        f"for opposite weights {size_text(gaps[opposite].max())}"
    )
    return bool((gaps[generic] > 1e-12).all()), grounds


# MLDL24 ---------------------------------------------------------------------------------------------------------


@cache
def participation_gini() -> CheckResult:
    """Are participation counts the more unequal the larger γ is, step by step in every draw?"""
    gammas, clients, cohort = (0.0, 0.5, 1.0, 5.0, 10.0), 100, 10

    def counts_with_replacement(seed: int, gamma: float) -> np.ndarray:
        p = chances(seed, clients, gamma) if gamma else np.full(clients, 0.01)
        return np.random.default_rng([seed, 1]).multinomial(cohort * ROUNDS, p / p.sum())

    def measure(seed: int) -> list[list[float]]:
        """By γ: Gini coefficient, clients that are never drawn, and the coefficient with replacement."""
        return [
            [gini(counts), float(np.sum(counts == 0)), gini(counts_with_replacement(seed, gamma))]
            for gamma, counts in skewed_counts(seed, clients, cohort, gammas, ROUNDS).items()
        ]

    tables = np.array([measure(seed) for seed in range(DRAWS)])
    figures_text = "; ".join(
        f"γ {gamma:g}: {coefficient:.2f}, {never:.0f} never drawn, {replaced:.2f} with replacement"
        for gamma, coefficient, never, replaced in zip(gammas, *tables.mean(0).T, strict=True)
    )
    rising = (np.diff(tables[..., 0]) > 0).all(1)
    share = f"rising in {rising.sum()} of {DRAWS} draws"
    return bool(rising.all()), f"mean Gini coefficient over {ROUNDS} rounds, {share}: {figures_text}"


def shortest_descends() -> CheckResult:
    """Does the shortest convex combination make no obtuse angle with any of the vectors?"""
    worst = math.inf
    for n in range(20):
        g = random_values(10, 50, address=200 + n).numpy() + random_values(50, address=300 + n).numpy()
        u = min_norm_point(g @ g.T) @ g
        worst = min(worst, float((g @ u - u @ u).min()))
    return worst >= -1e-8, f"smallest ⟨u, u_i⟩ − ‖u‖² of 20 random sets: {size_text(worst)}"


# FedPMVR --------------------------------------------------------------------------------------------------------


def pmvr_quadratics() -> CheckResult:
    """Do two quadratic clients settle at 3 in one case and away from their best point in the other?"""
    ends = {}
    for name, optima in (("15 and 2", (15.0, 2.0)), ("3 and 3.5", (3.0, 3.5))):
        w = 0.0
        for _ in range(200):
            w = float(np.mean([w - 0.1 * 2 * (w - best) for best in optima]))
        ends[name] = (w, float(np.mean(optima)))
    grounds = "; ".join(
        f"optima {name}: ends at {end:.4g}, the mean loss is least at {best:.4g}" for name, (end, best) in ends.items()
    )
    return any(abs(end - best) > 1e-6 for end, best in ends.values()), grounds


DAMPING = 0.1  # the strength α at which readings of FedPMVR are compared


def pmvr_damping(reading: str) -> CheckResult:
    """Does a reading of FedPMVR shrink the spread of the head's updates by exactly 1 − α, in every round?"""
    method = algorithms["fedpmvr"].build({"alpha": DAMPING, "reading": reading}, "algorithm")
    if reading in ("extra_gradient", "momentum_sgd", "additive"):
        ratios, how = [one_round_damping(method)], "in one round of four clients, trained with it and without"
    else:
        ratios, how = random_model_damping(method), "in three rounds of random models"
    exact = all(abs(ratio - (1 - DAMPING)) < 1e-4 for ratio in ratios)
    return exact, f"ratio at α = {DAMPING} {how}: {', '.join(f'{ratio:.3f}' for ratio in ratios)}"


def spread_ratio(corrected: Tensor, plain: Tensor) -> float:
    """The spread of corrected updates [C, P] over that of plain ones."""
    return float((corrected - corrected.mean(0)).norm() / (plain - plain.mean(0)).norm())


def random_model_damping(method: Algorithm) -> list[float]:
    """What a reading that corrects trained models does to the head's spread, by round; clients keep their momentum."""
    space, ratios = run_small_federation(algorithms["fedavg"](), LocalSettings(steps=1)).space, list[float]()
    x, head, states = space.start, method.parts(space)["head"], [method.client_state(space)] * 4
    for t in range(3):
        models = random_values(4, space.P, address=10 * t)
        done: list[Any] = [
            method.finish(w, cast(Any, SimpleNamespace(w=x, parts={"head": head}, state=state)))
            for w, state in zip(models, states, strict=True)
        ]
        states = [state for _, state in done]
        sent = torch.stack([up["delta"] for up, _ in done])
        ratios.append(spread_ratio(sent[:, head.indices], (models - x)[:, head.indices]))
    return ratios


def one_round_damping(method: Algorithm) -> float:
    """What a reading that changes the local steps does to the head's spread: each client trained alone, both ways."""
    local, models = LocalSettings(steps=5, batch=8, lr=0.1), dict[str, list[Tensor]]()
    for name, each in (("corrected", method), ("plain", algorithms["fedavg"]())):
        for client in range(4):
            built = run_small_federation(each, local, rounds=0)
            built.server.run_round(1, [client])
            models.setdefault(name, []).append(built.server.w - built.space.start)
    head = method.parts(built.space)["head"].indices
    return spread_ratio(torch.stack(models["corrected"])[:, head], torch.stack(models["plain"])[:, head])


def bn_without_norm() -> CheckResult:
    """Do FedBN and FedAvg train different models where a network has no batch norm?"""
    method, networks = algorithms["fedbn"](), {"CNN": (LeNet(), (3, 32, 32)), "LeNet": (LeNetPMVR(), (1, 28, 28))}
    own = [name for name, (net, shape) in networks.items() if not method.private(Space(net.module(shape, 10))).empty]
    local = LocalSettings(epochs=2, batch=8, lr=0.1, momentum=0.9)
    avg = algorithms["fedavg"].build({"weighting": "uniform"}, "algorithm")
    models = [run_small_federation(each, local, rounds=5).server.w for each in (method, avg)]
    difference = float((models[0] - models[1]).abs().max())
    keeps = f"a client keeps layers of {' and '.join(own)} to itself" if own else "no layer of either stays at a client"
    return bool(own) or difference > 1e-6, f"{keeps}; models after 5 rounds without batch norm differ by {difference:g}"


# FedPDC ---------------------------------------------------------------------------------------------------------


@cache
def pdc_penalty() -> CheckResult:
    """Does the literal penalty change training at all?"""
    settings: Sequence[dict[str, Any]] = [{"lam": 0.0}, {"lam": 0.1}, {"lam": 10.0}, {"adaptive": True}]
    local, method = LocalSettings(steps=3, batch=8, lr=0.1), algorithms["fedpdc"]()
    models = [run_small_federation(replace(method, **changed), local, rounds=3).server.w for changed in settings]
    difference = max(float((model - models[0]).abs().max()) for model in models[1:])
    grounds = f"models after 3 rounds at factors 0, 0.1, 10 and 0.5 t differ by {size_text(difference)}"
    return difference > 0, grounds


def pdc_insensitive() -> CheckResult:
    """Is training the same for every factor of the literal penalty?"""
    changes, grounds = pdc_penalty()
    return not changes, grounds


def scaffold_traffic() -> CheckResult:
    """Does SCAFFOLD move twice what FedAvg does?"""
    ours, base = costs(algorithms["scaffold"]()), costs(algorithms["fedavg"]())
    up, down = ((x or 0) / (y or math.nan) for x, y in ((ours.up, base.up), (ours.down, base.down)))
    holds = abs(up - 2) < 0.1 and abs(down - 2) < 0.1
    return holds, f"{up:.3g} times up, {down:.3g} down (batch norm's statistics travel once)"


def fedavg_is_fedsgd() -> CheckResult:
    """With everybody taking part, are FedAvg and FedSGD the same?"""

    def same_model(local: LocalSettings) -> bool:
        avg, sgd = (run_small_federation(algorithms[name](), local).server.w for name in ("fedavg", "fedsgd"))
        return float((avg - sgd).abs().max()) < 1e-6

    two_epochs = same_model(LocalSettings(epochs=2, batch=8, lr=0.1))
    one_batch = same_model(LocalSettings(epochs=1, batch=10_000, lr=0.1))
    grounds = (
        f"after a round of two epochs their models are {same_or_different(two_epochs)}; "
        f"of one epoch in one batch {same_or_different(one_batch)}"
    )
    return two_epochs, grounds


# The checks by the names that papers/*/claims.toml uses.
CLAIM_CHECKS: dict[str, Callable[[], CheckResult]] = {
    check.__name__: check
    for check in (
        *(dpc_server_slope, dpc_client_extra, dpc_state, dpc_orthogonal),
        *(sigmoid_average, participation_gini, pmvr_quadratics, bn_without_norm, pdc_penalty, pdc_insensitive),
        *(scaffold_traffic, fedavg_is_fedsgd, shortest_descends),
    )
} | {f"pmvr_damping {reading}": partial(pmvr_damping, reading) for reading in READINGS}
