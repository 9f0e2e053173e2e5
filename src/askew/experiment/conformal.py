"""Conformal prediction: sets of classes that contain the true class with a probability that was asked for.

A part of the test set calibrates, the remaining samples are measured. With π the class probabilities of a sample,
o(y) the rank of class y from 1 and U one uniform draw a sample, class y has the score

    aps     s(y) = Σ over classes ranked above y of π + U π(y)
    raps    s(y) = that + λ max(0, o(y) − k)
    set     {y: s(y) ≤ q},   q the ⌈(n + 1)(1 − a)⌉-th smallest of the true classes' scores of n calibrating samples
    naive   the fewest top classes with Σ π ≥ 1 − a, which nothing calibrates

If samples are exchangeable, the coverage of aps and raps is at least 1 − a, and its distribution is known
(`coverage_distribution`). With too few samples for such a q a set contains all classes. Not randomised, U is 1.
Classes of equal probability are ranked by their number.

Romano, Sesia, Candès, Classification with Valid and Adaptive Coverage, NeurIPS 2020 (arXiv 2006.02544); Angelopoulos
et al., Uncertainty Sets for Image Classifiers using Conformal Prediction, ICLR 2021 (arXiv 2009.14193). The latter's
code adds the class at which q is passed where scores are not randomised; the plain set, which is smaller and covers
as promised, is taken here.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil, lgamma, log
from typing import Any, NamedTuple

import numpy as np
import torch

from ..core.rng import generator
from ..core.settings import Settings, setting
from ..core.text import count_text
from ..core.types import Batch
from ..engine.evaluate import SAMPLES_AT_A_TIME
from ..errors import AskewError, ConfigError, DataError, ModelError, StoreError, StoreWarning
from .build import BuildCache, build
from .config import Config, imports_edited_files
from .plugins import plugin_module
from .process_state import torch_state
from .run_folder import stored_model
from .store import Run, jsonable, write_json

Array = np.ndarray[Any, np.dtype[Any]]

FILE = "conformal.json"  # in a run's folder
METHODS = ("naive", "aps", "raps")
LEVELS = tuple(k / 100 for k in range(1, 81))  # the values of a for which curves have points
ROUNDING = 1e-9  # sums of probabilities and products of levels are exact only up to this
SIZE_BINS = (1, 3, 6, 10, 100, 1000)  # where bins of set sizes end if there are many classes, as in RAPS's paper
MANY_CLASSES = 20  # with more classes than this, set sizes are put into bins


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


def rank_classes(probabilities: Array) -> tuple[Array, Array]:
    """Of every sample and class [n, K]: the class's rank from 1, and the probability of the classes ranked above it."""
    order = np.argsort(-probabilities, axis=1, kind="stable")
    rank = np.argsort(order, axis=1, kind="stable")
    descending = np.take_along_axis(probabilities, order, 1)
    above = np.cumsum(np.pad(descending, ((0, 0), (1, 0)))[:, :-1], axis=1)
    return rank + 1, np.take_along_axis(above, rank, 1)


def scores(method: str, probabilities: Array, u: Array, how: Conformal) -> Array:
    """The score of every sample and class [n, K], from one uniform draw u a sample [n]; sets have low scores."""
    rank, above = rank_classes(probabilities)
    if method == "naive":
        return above
    of_class = (u if how.randomised else np.ones_like(u))[:, None] * probabilities
    penalty = how.penalty if method == "raps" else 0.0
    total: Array = above + of_class + penalty * np.maximum(0, rank - how.k_reg)
    return total


def quantile_rank(samples: int, alpha: float) -> int:
    """⌈(n + 1)(1 − a)⌉, the rank of the calibrating score that is the threshold."""
    return max(1, ceil((samples + 1) * (1 - alpha) - ROUNDING))


def threshold(method: str, true: Array, alpha: float) -> float:
    """The highest score that a class in a set may have, from the true classes' scores of calibrating samples [n]."""
    if method == "naive":
        return 1 - alpha - ROUNDING
    k = quantile_rank(len(true), alpha)
    return float(np.partition(true, k - 1)[k - 1]) if k <= len(true) else np.inf


def prediction_sets(scores: Array, limit: float, nonempty: bool = False) -> Array:
    """Which classes are in each sample's set: booleans [n, K]."""
    chosen: Array = scores <= limit
    if nonempty:
        chosen[np.arange(len(scores)), scores.argmin(1)] = True
    return chosen


# how good they are ----------------------------------------------------------------------------------------------


class MeasuredSets(NamedTuple):
    """The sets of the m measured samples of one division: does each contain the true class [m], and its size [m]."""

    covered: Array
    size: Array


def measure_sets(
    method: str, probabilities: Array, labels: Array, alphas: Sequence[float], how: Conformal, seed: int
) -> Iterator[list[MeasuredSets]]:
    """For each division the sets for each alpha; draws depend on the seed and the number of samples alone."""
    n = len(labels)
    calibrating = how.calibrating(n)
    for split in range(how.splits):
        draws = generator(seed, "conformal", split)
        order, u = draws.permutation(n), draws.random(n)
        s = scores(method, probabilities[order], u, how)
        true = s[np.arange(n), labels[order]]
        divided = []
        for alpha in alphas:
            limit = threshold(method, true[:calibrating], alpha)
            sets = prediction_sets(s[calibrating:], limit, how.nonempty)
            covered = sets[np.arange(n - calibrating), labels[order[calibrating:]]]
            divided.append(MeasuredSets(covered, sets.sum(1)))
        yield divided


def strata(divisions: Sequence[MeasuredSets], classes: int) -> list[dict[str, Any]]:
    """Coverage and share of the sets of each size, or of sizes in bins where there are many classes."""
    covered, size = (np.concatenate(arrays) for arrays in zip(*divisions, strict=True))
    ends = (
        list(range(classes + 1)) if classes <= MANY_CLASSES else [*(end for end in SIZE_BINS if end < classes), classes]
    )
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


def coverage_distribution(calibrating: int, measured: int, alpha: float) -> Array:
    """Probability that 0, 1, … of m measured samples are covered [m + 1]: beta-binomial, for scores without ties."""
    k, m = quantile_rank(calibrating, alpha), measured
    above = calibrating + 1 - k

    def log_beta(x: int, y: int) -> float:
        return lgamma(x) + lgamma(y) - lgamma(x + y)

    if not above:
        return np.repeat([0.0, 1.0], [m, 1])
    log_probabilities = [
        log_beta(j + k, m - j + above) - log_beta(k, above) - log_beta(j + 1, m - j + 1) - log(m + 1)
        for j in range(m + 1)
    ]
    probabilities: Array = np.exp(log_probabilities)
    return probabilities


def band(calibrating: int, measured: int, alpha: float, outside: float = 0.01) -> tuple[float, float]:
    """The interval in which one division's coverage lies, except with probability `outside`, half of it at each end."""
    below = np.cumsum(coverage_distribution(calibrating, measured, alpha))
    low, high = np.searchsorted(below, [outside / 2, 1 - outside / 2])
    return float(low / measured), float(min(high, measured) / measured)


def interpolate(curve: dict[str, list[float]], what: str, value: float, of: str) -> float | None:
    """Column `what` of a curve where column `of` has a value, by linear interpolation; None outside of the curve."""
    points = sorted(zip(curve[of], curve[what], strict=True))
    x, y = zip(*points, strict=True)
    return float(np.interp(value, x, y)) if x[0] <= value <= x[-1] else None


def measure(probabilities: Array, labels: Array, how: Conformal, seed: int = 0) -> dict[str, Any]:
    """Coverage and set size of every method at alpha, over curves of alpha, and by set size."""
    n, classes = probabilities.shape
    if n < 2:
        raise DataError(
            f"conformal: {n} test samples cannot be divided into some that calibrate and some that are measured; "
            "take more."
        )
    calibrating = how.calibrating(n)
    result: dict[str, Any] = {
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
        divisions = measure_sets(method, probabilities, labels, [how.alpha, *LEVELS], how, seed)
        at_alpha, *at_levels = zip(*divisions, strict=True)  # for each alpha the sets of all divisions
        coverage, size = ([float(getattr(sets, what).mean()) for sets in at_alpha] for what in MeasuredSets._fields)
        result["methods"][method] = {
            "coverage": float(np.mean(coverage)),
            "coverage_std": float(np.std(coverage)),
            "size": float(np.mean(size)),
            "size_std": float(np.std(size)),
            "empty": float(np.mean([(sets.size == 0).mean() for sets in at_alpha])),
            "strata": strata(at_alpha, classes),
        }
        means = {
            what: [float(np.mean([getattr(sets, what).mean() for sets in level])) for level in at_levels]
            for what in MeasuredSets._fields
        }
        result["curves"][method] = {"alpha": list(LEVELS), "coverage": means["covered"], "size": means["size"]}
    return result


# runs -----------------------------------------------------------------------------------------------------------


def probabilities(run: Run, build_cache: BuildCache | None = None, trust: bool = False) -> tuple[Array, Array]:
    """The class probabilities [n, K] that a stored run's global model gives the test samples, and their labels [n].

    A plugin that the run's folder names, and nobody else, is run only with `trust`.
    """
    if run.folder is None or not (run.folder / "model.safetensors").is_file():
        raise StoreError(
            f"the run {run.name} has no stored model; "
            "run it with askew run, or with out= in Python, and name its folder."
        )
    stored_model(run.folder)  # which refuses a damaged one
    if not run.finished:
        raise StoreError(
            f"the run {run.name} has trained {len(run.rounds)} of {count_text(run.config['rounds'], 'round')}; "
            "let it end first: askew run."
        )
    if not trust:
        refuse_unknown_plugins(run)
    # The model is trained: how its updates were hidden changes nothing any more.
    config = Config.build({name: table for name, table in run.config.items() if name != "privacy"})
    if imports_edited_files(run.folder, config):
        warnings.warn(
            f"a file that the plugins of {run.folder} import has changed since this run was trained: what is measured "
            "are its weights in the new code; restore the file if that computes something else.",
            StoreWarning,
            stacklevel=2,
        )
    network = replace(config.model, weights=str(run.folder / "model.safetensors"), new_head=False)
    with torch_state(config), torch.no_grad():
        built = build(replace(config, model=network), build_cache)
        of_clients = built.server.alg.evaluates() == "clients" and not built.server.private.empty
        if of_clients and not config.algorithm.pooled:
            raise ModelError(
                f"{run.algorithm} keeps parts of the model with its clients, which are not stored; "
                "conformal takes methods with one model."
            )
        if not built.fed.classes:
            raise DataError(f"the run {run.name} is a regression; conformal takes data with classes.")
        test, server = built.fed.test, built.server
        batches = zip(torch.split(test.x, SAMPLES_AT_A_TIME), torch.split(test.y, SAMPLES_AT_A_TIME), strict=True)
        logits = [built.task.frozen(server.w, server.buffers, Batch(built.fed.inputs(x), y))[0] for x, y in batches]
        return torch.softmax(torch.cat(logits).double(), 1).cpu().numpy(), test.y.cpu().numpy()


def refuse_unknown_plugins(run: Run) -> None:
    """Refuse a run whose folder names a plugin that this process has not loaded: it is code, perhaps a stranger's."""
    plugins = run.config.get("plugins", [])
    for path in plugins if isinstance(plugins, list) else [plugins]:
        if plugin_module(str(path)) not in sys.modules:
            raise ConfigError(
                f"the run {run.name} names the plugin {str(path)!r}, which is Python code and would be run; "
                "read it, then name it with --plugin, or trust the whole folder with --trust."
            )


def conformal(runs: Sequence[Run], how: Conformal | None = None, trust: bool = False) -> list[dict[str, Any]]:
    """Measure the prediction sets of finished runs, and store the figures in each run's folder.

    With `trust` the plugins that the folders name are run.
    """
    build_cache = BuildCache()
    for run in runs:
        measure_run(run, how or Conformal(), build_cache, trust)
    return [run.conformal for run in runs]


def measure_run(run: Run, how: Conformal, build_cache: BuildCache, trust: bool) -> None:
    """Measure the prediction sets of one run, and store the figures in its folder."""
    run.conformal = jsonable(measure(*probabilities(run, build_cache, trust), how, int(run.config["seed"])))
    assert run.folder is not None
    write_json(run.folder / FILE, run.conformal)


def measure_whole(runs: Sequence[Run], how: Conformal, trust: bool = False) -> list[Run]:
    """As `conformal`, but a run that cannot be measured is left out, with a warning, as long as others can."""
    build_cache, measured, problems = BuildCache(), list[Run](), list[AskewError]()
    for run in runs:
        try:
            measure_run(run, how, build_cache, trust)
            measured.append(run)
        except AskewError as e:
            problems.append(e)
    if problems and not measured:
        raise problems[0]
    for problem in problems:
        warnings.warn(f"a run is left out: {problem}", StoreWarning, stacklevel=2)
    return measured
