"""Conformal prediction: sets of classes that hold the true one with a probability that was asked for.

A part of the test set calibrates, the rest is measured. With π the class probabilities of a sample, o(y) the rank of class y from 1
and U one uniform draw a sample, class y has the score

    aps     s(y) = Σ over classes ranked above y of π + U π(y)
    raps    s(y) = that + λ max(0, o(y) − k)
    set     {y: s(y) ≤ q},   q the ⌈(n + 1)(1 − a)⌉-th smallest of the n calibrating samples' scores of their true classes
    naive   the fewest top classes with Σ π ≥ 1 − a, which nothing calibrates

If samples are exchangeable, the coverage of aps and raps is at least 1 − a, and its law is known (`law`). With too few samples for
such a q a set holds all classes. Not randomised, U is 1. Classes of equal probability are ranked by their number.

Romano, Sesia, Candès, Classification with Valid and Adaptive Coverage, NeurIPS 2020 (arXiv 2006.02544); Angelopoulos et al., Uncertainty
Sets for Image Classifiers using Conformal Prediction, ICLR 2021 (arXiv 2009.14193). The latter's code adds the class at which q is passed
where scores are not randomised; the plain set, which is smaller and covers as promised, is taken here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil, lgamma, log
from typing import Any, NamedTuple

import numpy as np
import torch

from ..core.rng import generator
from ..core.settings import Settings, setting
from ..core.types import Batch
from ..engine.evaluate import CHUNK
from ..errors import DataError, ModelError, StoreError
from .build import BuildCache, build
from .config import Config
from .run import torch_state
from .store import Run, jsonable, write_json

Array = np.ndarray[Any, np.dtype[Any]]

FILE = "conformal.json"
METHODS = ("naive", "aps", "raps")
LEVELS = tuple(k / 100 for k in range(1, 81))  # a, of curves
ROUNDING = 1e-9  # sums of probabilities and products of levels are exact only up to this
SIZES = (1, 3, 6, 10, 100, 1000)  # where bins of set sizes end if there are many classes, as in RAPS's paper
MANY = 20  # classes


class Conformal(Settings):
    """How prediction sets are made and measured."""

    title = "conformal"
    alpha: float = setting("share of samples whose set may miss the true class", default=0.1, above=0, below=1)
    calibration: float = setting("part of the test set that calibrates", default=0.5, above=0, below=1)
    splits: int = setting(
        "random divisions into calibration and measurement, over which means are taken", default=10, least=1
    )
    k_reg: int = setting("k: so many top classes bear no penalty (raps)", default=1, least=0)
    penalty: float = setting("λ: penalty of every further class (raps)", default=0.01, least=0)
    randomised: bool = setting("draw U; otherwise it is 1, and sets are larger", default=True)
    nonempty: bool = setting("put the top class into a set that would be empty", default=False)

    def calibrating(self, samples: int) -> int:
        """How many of so many samples calibrate: at least one, and not all."""
        return min(max(1, round(self.calibration * samples)), samples - 1)


# sets -----------------------------------------------------------------------------------------------------------


def ranked(probabilities: Array) -> tuple[Array, Array]:
    """Of every sample and class [n, K]: its rank from 1, and the probability of the classes ranked above it."""
    order = np.argsort(-probabilities, axis=1, kind="stable")
    rank = np.argsort(order, axis=1, kind="stable")
    down = np.take_along_axis(probabilities, order, 1)
    above = np.cumsum(np.pad(down, ((0, 0), (1, 0)))[:, :-1], axis=1)
    return rank + 1, np.take_along_axis(above, rank, 1)


def scores(method: str, probabilities: Array, u: Array, how: Conformal) -> Array:
    """The score of every sample and class [n, K], from one uniform draw a sample [n]; a set holds the classes with low ones."""
    rank, above = ranked(probabilities)
    if method == "naive":
        return above
    own = (u if how.randomised else np.ones_like(u))[:, None] * probabilities
    penalty = how.penalty if method == "raps" else 0.0
    total: Array = above + own + penalty * np.maximum(0, rank - how.k_reg)
    return total


def place(samples: int, alpha: float) -> int:
    """⌈(n + 1)(1 − a)⌉."""
    return max(1, ceil((samples + 1) * (1 - alpha) - ROUNDING))


def threshold(method: str, true: Array, alpha: float) -> float:
    """The highest score that a class in a set may have, from the true classes' scores of the calibrating samples [n]."""
    if method == "naive":
        return 1 - alpha - ROUNDING
    k = place(len(true), alpha)
    return float(np.partition(true, k - 1)[k - 1]) if k <= len(true) else np.inf


def sets(scores: Array, limit: float, nonempty: bool = False) -> Array:
    """Which classes are in a sample's set [n, K]."""
    chosen: Array = scores <= limit
    if nonempty:
        chosen[np.arange(len(scores)), scores.argmin(1)] = True
    return chosen


# how good they are ----------------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """The measured samples of one division: is the true class in the set [m], and how many classes are [m]?"""

    covered: Array
    size: Array


def outcomes(
    method: str, probabilities: Array, labels: Array, alphas: Sequence[float], how: Conformal, seed: int
) -> Iterator[list[Outcome]]:
    """For each division, an outcome for each alpha. What is drawn depends on the seed and on the number of samples alone."""
    n = len(labels)
    calibrating = how.calibrating(n)
    for split in range(how.splits):
        draws = generator(seed, "conformal", split)
        order, u = draws.permutation(n), draws.random(n)
        s = scores(method, probabilities[order], u, how)
        true = s[np.arange(n), labels[order]]
        told = []
        for alpha in alphas:
            chosen = sets(s[calibrating:], threshold(method, true[:calibrating], alpha), how.nonempty)
            told.append(Outcome(chosen[np.arange(n - calibrating), labels[order[calibrating:]]], chosen.sum(1)))
        yield told


def strata(outcomes: Sequence[Outcome], classes: int) -> list[dict[str, Any]]:
    """Coverage of the sets of each size, or of sizes in bins where there are many classes; each with the share of samples."""
    covered, size = (np.concatenate(each) for each in zip(*outcomes, strict=True))
    ends = list(range(classes + 1)) if classes <= MANY else [*(end for end in SIZES if end < classes), classes]
    bins = np.searchsorted(ends, size)
    return [
        {
            "from": 0 if k == 0 else ends[k - 1] + 1,
            "to": end,
            "share": float((bins == k).mean()),
            "coverage": float(covered[bins == k].mean()),
        }
        for k, end in enumerate(ends)
        if (bins == k).any()
    ]


def law(calibrating: int, measured: int, alpha: float) -> Array:
    """Probability that so many of the measured samples are covered [m + 1]: beta-binomial, for scores without ties."""
    k, m = place(calibrating, alpha), measured
    rest = calibrating + 1 - k

    def beta(x: int, y: int) -> float:
        return lgamma(x) + lgamma(y) - lgamma(x + y)

    if not rest:
        return np.repeat([0.0, 1.0], [m, 1])
    told: Array = np.exp(
        [beta(j + k, m - j + rest) - beta(k, rest) - beta(j + 1, m - j + 1) - log(m + 1) for j in range(m + 1)]
    )
    return told


def band(calibrating: int, measured: int, alpha: float, outside: float = 0.01) -> tuple[float, float]:
    """Between which coverages one division's lies, except with probability `outside`, half of it at each end."""
    below = np.cumsum(law(calibrating, measured, alpha))
    low, high = np.searchsorted(below, [outside / 2, 1 - outside / 2])
    return float(low / measured), float(min(high, measured) / measured)


def at(curve: dict[str, list[float]], what: str, value: float, of: str) -> float | None:
    """One column of a curve where another has a value, between neighbours on a line: size at a coverage, coverage at a size."""
    points = sorted(zip(curve[of], curve[what], strict=True))
    known, found = zip(*points, strict=True)
    return float(np.interp(value, known, found)) if known[0] <= value <= known[-1] else None


def measured(probabilities: Array, labels: Array, how: Conformal, seed: int = 0) -> dict[str, Any]:
    """Coverage and set size of every method at alpha, over curves of alpha, and by set size."""
    n, classes = probabilities.shape
    if n < 2:
        raise DataError(
            f"conformal: {n} test samples cannot be divided into some that calibrate and some that are measured; take more."
        )
    calibrating = how.calibrating(n)
    told: dict[str, Any] = {
        "accuracy": float((probabilities.argmax(1) == labels).mean()),
        "classes": classes,
        "calibrating": calibrating,
        "measured": n - calibrating,
        "band": band(calibrating, n - calibrating, how.alpha),
        "settings": how.table(),
        "methods": {},
        "curves": {},
    }
    for method in METHODS:
        first, *rest = zip(*outcomes(method, probabilities, labels, [how.alpha, *LEVELS], how, seed), strict=True)
        coverage, size = ([float(getattr(o, what).mean()) for o in first] for what in Outcome._fields)
        told["methods"][method] = {
            "coverage": float(np.mean(coverage)),
            "coverage_std": float(np.std(coverage)),
            "size": float(np.mean(size)),
            "size_std": float(np.std(size)),
            "empty": float(np.mean([(o.size == 0).mean() for o in first])),
            "strata": strata(first, classes),
        }
        means = {
            what: [float(np.mean([getattr(o, what).mean() for o in each])) for each in rest] for what in Outcome._fields
        }
        told["curves"][method] = {"alpha": list(LEVELS), "coverage": means["covered"], "size": means["size"]}
    return told


# runs -----------------------------------------------------------------------------------------------------------


def probabilities(run: Run, shop: BuildCache | None = None) -> tuple[Array, Array]:
    """What a stored run's global model says of the test samples [n, K], and their labels [n]."""
    if run.folder is None or not (run.folder / "model.safetensors").is_file():
        raise StoreError(
            f"the run {run.name} has no stored model; run it with askew run, or with out= in Python, and name its folder."
        )
    if not run.finished:
        raise StoreError(
            f"the run {run.name} has played {len(run.rounds)} of {run.config['rounds']} rounds; let it end first: askew run."
        )
    config = Config.build(run.config)
    network = replace(config.model, weights=str(run.folder / "model.safetensors"), new_head=False)
    with torch_state(config), torch.no_grad():
        house = build(replace(config, model=network), shop)
        if not house.server.private.empty and not config.algorithm.pooled:
            raise ModelError(
                f"{run.algorithm} keeps parts of the model with its clients, which are not stored; conformal takes methods with one model."
            )
        if not house.fed.classes:
            raise DataError(f"the run {run.name} is a regression; conformal takes data with classes.")
        test, server = house.fed.test, house.server
        batches = zip(torch.split(test.x, CHUNK), torch.split(test.y, CHUNK), strict=True)
        logits = [house.task.frozen(server.w, server.buffers, Batch(house.fed.inputs(x), y))[0] for x, y in batches]
        return torch.softmax(torch.cat(logits).double(), 1).cpu().numpy(), test.y.cpu().numpy()


def conformal(runs: Sequence[Run], how: Conformal | None = None) -> list[dict[str, Any]]:
    """Measure finished runs, and keep each one's tables in its folder, where a report finds them."""
    how, shop = how or Conformal(), BuildCache()
    for run in runs:
        run.conformal = jsonable(measured(*probabilities(run, shop), how, int(run.config["seed"])))
        assert run.folder is not None
        write_json(run.folder / FILE, run.conformal)
    return [run.conformal for run in runs]
