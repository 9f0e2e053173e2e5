"""Claims that need no stored run: what follows from a method's own code, from arithmetic, or from one round of a small federation.

Each deduction says whether the claim holds and on what grounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..algorithms import algorithms
from ..algorithms._simplex import min_norm_point
from ..core.algorithm import Algorithm
from ..core.rng import generator
from ..core.types import Cohort, State
from ..data.federation import LocalSettings
from ..data.partition import Natural
from ..data.synthetic import Synthetic
from ..engine.choose import EngineSettings
from ..experiment.build import BuiltRun, build
from ..experiment.catalogue import costs
from ..experiment.config import Config
from ..models import MLP
from ..participation import Skewed, chances

Deduction = tuple[bool, str]
DRAWS, LONG = 20, 2000  # seeds and rounds over which participation is counted


def small(method: Algorithm, local: LocalSettings, rounds: int = 1) -> BuiltRun:
    """A few rounds of four clients on generated data, played."""
    data, model = Synthetic(dim=8, labels=3, samples=24), MLP(hidden=(6,))
    engine = EngineSettings(name="sequential", device="cpu", dtype="float64")
    house = build(
        Config(
            rounds=rounds,
            data=data,
            partition=Natural(clients=4),
            model=model,
            algorithm=method,
            local=local,
            engine=engine,
        )
    )
    for t in range(1, rounds + 1):
        house.server.run_round(t, house.fed.eligible.tolist())
    return house


def even(updates: Tensor, round: int = 1) -> Cohort:
    """Participants of equal weight."""
    ones = torch.ones(len(updates), dtype=updates.dtype)
    return Cohort(ones / len(ones), ones, ones, ones, ones, None, 0.1, 0.1, round, len(ones))


def random(*shape: int, address: int = 0) -> Tensor:
    return torch.from_numpy(generator(0, "deduction", address).standard_normal(shape))


def alike(same: bool) -> str:
    return "the same" if same else "different"


def size(value: float) -> str:
    """A number that may be rounding alone, which differs from machine to machine."""
    return "0, up to rounding" if abs(value) < 1e-9 else f"{value:.1g}"


class Work(TorchFunctionMode):
    """Counts values: of every operation the largest tensor that it reads or writes."""

    def __init__(self) -> None:
        super().__init__()
        self.values = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.values += max((t.numel() for t in (*args, out) if isinstance(t, Tensor)), default=0)
        return out


def server_work(method: Algorithm, participants: int, parameters: int) -> int:
    """Values that the server handles in a round that is not the first."""
    updates, x = random(participants, parameters), torch.zeros(parameters, dtype=torch.float64)
    state: State = {"prev": random(parameters, address=1), "ratio": x.sum(), "undefined": x.sum()}
    work = Work()
    with work:
        method.aggregate(x, {"delta": updates}, even(updates, 2), state)
    return work.values


@cache
def dpc_server_slope() -> Deduction:
    """Does what projection and scaling add for a further participant not depend on the model's size?"""
    added = {}
    for d in (1000, 4000):
        extra = [
            server_work(algorithms["feddpc"](), k, d) - server_work(algorithms["fedavg"](), k, d)
            for k in (5, 10, 20, 50)
        ]
        added[d] = float(np.polyfit((5, 10, 20, 50), extra, 1)[0])
    ratio = added[4000] / added[1000]
    return (
        ratio < 2,
        f"what a further participant adds is {ratio:.2f} times as much for 4 times the parameters (counted)",
    )


def dpc_server_linear() -> Deduction:
    """Is the server's work linear in the number of participants?"""
    at = (5, 10, 20, 50, 100)
    work = np.array([server_work(algorithms["feddpc"](), k, 1000) for k in at], dtype=float)
    line = np.polyval(np.polyfit(at, work, 1), at)
    off = float(np.abs(work - line).max() / work.max())
    return (
        off < 0.01,
        f"values handled for {', '.join(map(str, at))} participants are off a line by {size(off)} (counted, not timed)",
    )


def dpc_client_extra() -> Deduction:
    """Does a FedDPC client do at most 2d operations more than FedAvg's, whatever the batches?"""
    hooks = ("begin", "carry", "direction", "descend", "note", "loss", "finish")
    own = [hook for hook in hooks if getattr(algorithms["feddpc"], hook) is not getattr(algorithms["fedavg"], hook)]
    return not own, "the client's code is FedAvg's: it sends its displacement, and the division is the server's"


def dpc_state() -> Deduction:
    """Does FedDPC's server keep nothing, and FedVARP's one model?"""
    dpc, varp = costs(algorithms["feddpc"]()), costs(algorithms["fedvarp"]())
    words = f"kept at the server, in models: FedDPC {dpc.server_state:.3g}; FedVARP {varp.server_state:.3g} and {varp.memory:.3g} a client"
    return dpc.server_state == 0 and varp.memory == 0, words


def dpc_orthogonal() -> Deduction:
    """Is each global update orthogonal to the one before?"""
    method, x, worst = algorithms["feddpc"](), torch.zeros(500, dtype=torch.float64), 0.0
    state: State = {"prev": torch.zeros_like(x), "ratio": x.sum(), "undefined": x.sum()}
    before: Tensor | None = None
    for t in range(1, 21):
        updates = random(10, 500, address=t) + random(500, address=99)  # clients that agree in part
        new, state = method.aggregate(x, {"delta": updates}, even(updates, t), state)
        moved = new - x
        if before is not None:
            worst = max(worst, abs(float(moved @ before / (moved.norm() * before.norm()))))
        x, before = new, moved
    return worst < 1e-5, f"largest |cosine| of consecutive updates in 20 rounds of random ones: {size(worst)}"


def sigmoid_average() -> Deduction:
    """Is f(mean of weights) unlike the mean of f for a sigmoid unit, wherever the weights differ and are not opposite?"""
    sigmoid: Callable[[Any], Any] = lambda z: 1 / (1 + np.exp(-z))
    a, b, x = np.meshgrid(*[np.linspace(-4, 4, 17)] * 3, indexing="ij")
    apart = np.abs(sigmoid((a + b) / 2 * x) - (sigmoid(a * x) + sigmoid(b * x)) / 2)
    generic, opposite = (a != b) & (a != -b) & (x != 0), (a == -b) & (a != b)
    words = (
        f"smallest difference on a grid {apart[generic].min():.1g}; for opposite weights {size(apart[opposite].max())}"
    )
    return bool((apart[generic] > 1e-12).all()), words


@cache
def participation_gini() -> Deduction:
    """Are participation counts the more unequal the larger γ is, step by step in every draw?"""
    gammas, everybody, many = (0.0, 0.5, 1.0, 5.0, 10.0), np.arange(100), 10

    def counts(seed: int, gamma: float) -> np.ndarray:
        rule = Skewed(gamma=gamma, fraction=many / 100)
        drawn = [rule.sample(seed, t, everybody, 100) for t in range(1, LONG + 1)]
        return np.bincount(np.concatenate(drawn), minlength=100)

    def returned(seed: int, gamma: float) -> np.ndarray:
        """As many draws, each put back."""
        p = chances(seed, 100, gamma) if gamma else np.full(100, 0.01)
        return np.random.default_rng([seed, 1]).multinomial(many * LONG, p / p.sum())

    def gini(counts: np.ndarray) -> float:
        return float((2 * np.arange(1, 101) - 101) @ np.sort(counts) / (100 * counts.sum()))

    tables = np.array(
        [
            [[gini(c), np.sum(c == 0), gini(returned(s, g))] for g in gammas for c in [counts(s, g)]]
            for s in range(DRAWS)
        ]
    )
    told = zip(gammas, *tables.mean(0).T, strict=True)
    words = "; ".join(
        f"γ {g:g}: {one:.2f}, {never:.0f} never drawn, {back:.2f} with replacement" for g, one, never, back in told
    )
    rising = (np.diff(tables[..., 0]) > 0).all(1)
    share = f"rising in {rising.sum()} of {DRAWS} draws"
    return bool(rising.all()), f"mean Gini coefficient over {LONG} rounds, {share}: {words}"


def pmvr_quadratics() -> Deduction:
    """Do two quadratic clients settle at 3 in one case and away from their best point in the other?"""
    ends = {}
    for name, optima in (("15 and 2", (15.0, 2.0)), ("3 and 3.5", (3.0, 3.5))):
        w = 0.0
        for _ in range(200):
            w = float(np.mean([w - 0.1 * 2 * (w - best) for best in optima]))
        ends[name] = (w, float(np.mean(optima)))
    words = "; ".join(
        f"optima {name}: ends at {end:.4g}, the mean loss is least at {best:.4g}" for name, (end, best) in ends.items()
    )
    return any(abs(end - best) > 1e-6 for end, best in ends.values()), words


def pmvr_damping() -> Deduction:
    """Does the default reading shrink the spread of the head's updates by exactly 1 − α? What do those that remember do in later rounds?"""
    alpha, ratios = 0.1, dict[str, list[float]]()
    house = small(algorithms["fedavg"](), LocalSettings(steps=1))
    x = house.space.start
    for reading in ("displacement", "displacement_ema", "displacement_sum", "as_published"):
        method = algorithms["fedpmvr"].build({"alpha": alpha, "reading": reading}, "algorithm")
        part, mine = method.parts(house.space)["head"], [method.client_state(house.space)] * 4
        for t in range(3):
            models = random(4, house.space.P, address=10 * t)
            done: list[Any] = [
                method.finish(w, cast(Any, _Me(x, {"head": part}, own))) for w, own in zip(models, mine, strict=True)
            ]
            mine = [kept for _, kept in done]
            sent, raw = torch.stack([up["delta"] for up, _ in done])[:, part.w], (models - x)[:, part.w]
            ratios.setdefault(reading, []).append(float((sent - sent.mean(0)).norm() / (raw - raw.mean(0)).norm()))
    exact = all(abs(ratio - (1 - alpha)) < 1e-4 for ratio in ratios["displacement"])
    words = "; ".join(f"{reading} {', '.join(f'{r:.3f}' for r in told)}" for reading, told in ratios.items())
    return (
        exact,
        f"ratios at α = {alpha} in three rounds of random models: {words}; the other readings change the steps themselves",
    )


class _Me:
    """What the default reading reads of a client."""

    def __init__(self, x: Tensor, part: dict[str, Any], mine: State) -> None:
        self.x, self.part, self.mine = x, part, mine


@cache
def pdc_penalty() -> Deduction:
    """Does the literal penalty change training at all?"""
    apart = moved(algorithms["fedpdc"](), [{"lam": 0.0}, {"lam": 0.1}, {"lam": 10.0}, {"adaptive": True}])
    return apart > 0, f"models after 3 rounds at factors 0, 0.1, 10 and 0.5 t differ by {size(apart)}"


def pdc_insensitive() -> Deduction:
    """Is training the same for every factor of the literal penalty?"""
    acts, words = pdc_penalty()
    return not acts, words


def moved(method: Algorithm, settings: Sequence[dict[str, Any]]) -> float:
    """How far apart small runs of a method under several settings end."""
    local = LocalSettings(steps=3, batch=8, lr=0.1)
    ends = [small(replace(method, **changed), local, rounds=3).server.w for changed in settings]
    return max(float((end - ends[0]).abs().max()) for end in ends[1:])


def scaffold_traffic() -> Deduction:
    """Does SCAFFOLD move twice what FedAvg does?"""
    ours, base = costs(algorithms["scaffold"]()), costs(algorithms["fedavg"]())
    ratios = [(x or 0) / (y or math.nan) for x, y in ((ours.up, base.up), (ours.down, base.down))]
    return all(
        abs(r - 2) < 0.1 for r in ratios
    ), f"{ratios[0]:.3g} times up, {ratios[1]:.3g} down (batch norm's statistics travel once)"


def fedavg_is_fedsgd() -> Deduction:
    """With everybody taking part, are FedAvg and FedSGD the same?"""
    ways = (LocalSettings(epochs=2, batch=8, lr=0.1), LocalSettings(epochs=1, batch=10_000, lr=0.1))
    ends = [[small(algorithms[name](), way).server.w for name in ("fedavg", "fedsgd")] for way in ways]
    several, single = (float((x - y).abs().max()) < 1e-6 for x, y in ends)
    words = f"after a round of two epochs their models are {alike(several)}; of one epoch in one batch {alike(single)}"
    return several, words


def shortest_descends() -> Deduction:
    """Does the shortest convex combination make no obtuse angle with any of the vectors?"""
    worst = math.inf
    for n in range(20):
        g = random(10, 50, address=200 + n).numpy() + random(50, address=300 + n).numpy()
        u = min_norm_point(g @ g.T) @ g
        worst = min(worst, float((g @ u - u @ u).min()))
    return worst >= -1e-8, f"smallest ⟨u, u_i⟩ − ‖u‖² of 20 random sets: {size(worst)}"


DEDUCTIONS: dict[str, Callable[[], Deduction]] = {
    f.__name__: f
    for f in (
        *(
            dpc_server_slope,
            dpc_server_linear,
            dpc_client_extra,
            dpc_state,
            dpc_orthogonal,
            sigmoid_average,
            participation_gini,
        ),
        *(
            pmvr_quadratics,
            pmvr_damping,
            pdc_penalty,
            pdc_insensitive,
            scaffold_traffic,
            fedavg_is_fedsgd,
            shortest_descends,
        ),
    )
}
