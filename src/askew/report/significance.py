"""Which differences between methods are more than chance: paired tests over the seeds that two groups of runs share.

    d_s = figure of the method − figure of the reference, at seed s
    d_z = mean d / standard deviation of d            (Cohen's effect size of paired samples)

A pair counts only where both runs had the same clients, the same turns and the same start, which is checked in what is
stored. Each method of a federation is tested against one reference, and Holm's correction is over these methods.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..errors import ConfigError, UnknownName, did_you_mean
from ..experiment.store import Run
from .statistics import (
    MIN_SEEDS,
    bootstrap_interval,
    holm_adjust,
    paired_test,
    seeds_needed,
    t_interval,
    two_sided_p,
)
from .tables import FINGERPRINT, RunGroup, by_federation, settings_key

BETTER, WORSE, UNDECIDED, EQUAL, TOO_FEW = "better", "worse", "undecided", "equal", "too few seeds"
MOST_SEEDS = 1000  # more are not proposed
POWER = 0.8
# A corrected p-value below this decides. At 0.05 one expects false wins in 5% of comparisons, so a measured share is
# above that as often as below; benchmarks/aa.py measures 3.4 to 5.0% at 0.04.
LEVEL = 0.04


class RunMetric(NamedTuple):
    """A figure of a run by which methods are compared."""

    name: str
    value: Callable[[Run], float | None]
    better: int  # 1: more is better, −1: less is
    percent: bool


METRICS = {
    "best_accuracy": RunMetric("best accuracy", lambda run: run.best_accuracy, 1, True),
    "final_accuracy": RunMetric("last accuracy", lambda run: run.final_accuracy, 1, True),
    "worst_clients_accuracy": RunMetric(
        "last accuracy of the worst tenth of clients", lambda run: run.last("client_accuracy_worst10"), 1, True
    ),
    "test_loss": RunMetric("last test loss", lambda run: run.last("loss"), -1, False),
}


class PairedComparison(NamedTuple):
    """A method against the reference of its federation, over the seeds that both have."""

    method: str
    against: str
    federation: str
    metric: str  # a key of METRICS, or what a paper's table shows
    seeds: list[int]  # those of the pairs
    differences: list[float]  # by seed: the method's figure less the reference's
    missing: dict[str, list[int]]  # by label: seeds that only the other one has
    refused: list[str]  # pairs that were left out, a sentence each
    sign: int = 1  # 1: more is better, −1: less is
    mean: float | None = None
    std: float | None = None
    t_interval: tuple[float, float] | None = None  # 95%
    bootstrap_interval: tuple[float, float] | None = None  # 95%
    p: float | None = None  # two-sided, of this comparison alone
    p_holm: float | None = None  # corrected for the other methods
    effect: float | None = None  # Cohen's d_z; None without spread
    verdict: str = TOO_FEW
    more_seeds: int | None = None  # that would decide it with power 0.8; None: decided, or no number up to MOST_SEEDS


# pairs ----------------------------------------------------------------------------------------------------------


def pair_fault(run: Run, other: Run) -> str:
    """Why two runs of one seed are not a pair; empty if they are one."""
    for name, tables in (("participation", ("participation",)), ("network", ("model",))):
        if settings_key(run.config, tables) != settings_key(other.config, tables):
            return f"their settings of {name} differ"
    table, key = FINGERPRINT.split(".")
    if run.config.get(table, {}).get(key) != other.config.get(table, {}).get(key):
        return "their networks start from different weights"
    if run.config["rounds"] != other.config["rounds"]:
        return f"one has {run.config['rounds']} rounds and the other {other.config['rounds']}"
    for each in (run, other):
        if not each.over:
            return f"{each.algorithm} was stopped after round {len(each.rounds)} of {each.config['rounds']}"
    known = [key for key in ("clients", "sizes", "labels") if key in run.federation and key in other.federation]
    if any(run.federation[key] != other.federation[key] for key in known):
        return "their clients hold different samples"
    for one, two in zip(run.rounds, other.rounds, strict=False):  # one may have diverged before the last round
        if one.get("participants") != two.get("participants"):
            return f"different clients took part in round {one['round']}"
    return ""


def make_pairs(group: RunGroup, base: RunGroup, metric: str) -> PairedComparison:
    """The differences of a method from the reference, at every seed that both have; nothing is tested yet."""
    runs, others = ({int(run.config.get("seed", 0)): run for run in g.runs} for g in (group, base))
    seeds, differences, refused = list[int](), list[float](), list[str]()
    for seed in sorted(runs.keys() & others.keys()):
        values = [METRICS[metric].value(run) for run in (runs[seed], others[seed])]
        fault = pair_fault(runs[seed], others[seed])
        finite = [v for v in values if v is not None and math.isfinite(v)]
        if not fault and len(finite) < 2:
            fault = f"one of them has no finite {METRICS[metric].name}"
        if fault:
            refused.append(f"Seed {seed} of {group.label} and {base.label} is left out: {fault}.")
        else:
            seeds.append(seed)
            differences.append(finite[0] - finite[1])
    missing = {group.label: sorted(others.keys() - runs.keys()), base.label: sorted(runs.keys() - others.keys())}
    return PairedComparison(
        group.label,
        base.label,
        group.federation,
        metric,
        seeds,
        differences,
        {label: lacking for label, lacking in missing.items() if lacking},
        refused,
        METRICS[metric].better,
    )


# tests ----------------------------------------------------------------------------------------------------------


def judge_pairs(pairs: Sequence[PairedComparison]) -> list[PairedComparison]:
    """The comparisons of one family with their tests; Holm's correction is over those with enough seeds."""
    tested = [each for each in pairs if len(each.seeds) >= MIN_SEEDS]
    adjusted = iter(holm_adjust([two_sided_p(each.differences) for each in tested]))
    return [
        judge(each, next(adjusted), len(tested)) if len(each.seeds) >= MIN_SEEDS else describe(each) for each in pairs
    ]


def describe(pairs: PairedComparison) -> PairedComparison:
    """A comparison with the mean of its differences, and their spread where there are two."""
    if not pairs.differences:
        return pairs
    test = paired_test(pairs.differences)
    return pairs._replace(mean=test.mean, std=test.std if test.n > 1 else None)


def judge(pairs: PairedComparison, p_holm: float, family: int) -> PairedComparison:
    """A comparison with its test, as one of so many in its family.

    It is decided where the corrected p-value is below LEVEL and neither interval contains 0.
    """
    d, test = pairs.differences, paired_test(pairs.differences)
    intervals = t_interval(d, 0.95), bootstrap_interval(d, 0.95)
    clear = all(low > 0 or high < 0 for low, high in intervals)
    verdict, more = UNDECIDED, None
    if test.is_zero:
        verdict = EQUAL
    elif p_holm < LEVEL and clear:
        verdict = BETTER if test.mean * pairs.sign > 0 else WORSE
    effect = test.mean / test.std if test.std else None
    if verdict == UNDECIDED and effect:
        # the level that the last of Holm's steps cannot exceed; the tail on the other side is left out
        needed = seeds_needed(abs(effect), LEVEL / 2 / family, test.n + 1, POWER, MOST_SEEDS)
        more = None if needed is None else needed - test.n
    return pairs._replace(
        mean=test.mean,
        std=test.std,
        t_interval=intervals[0],
        bootstrap_interval=intervals[1],
        p=two_sided_p(d),
        p_holm=p_holm,
        effect=effect,
        verdict=verdict,
        more_seeds=more,
    )


# federations ----------------------------------------------------------------------------------------------------


def compare_methods(
    groups: Sequence[RunGroup], against: str | None = None, metric: str | None = None
) -> list[PairedComparison]:
    """Every method of each federation against its reference: `against`, or the first fedavg, or the first method."""
    if metric is not None and metric not in METRICS:
        raise UnknownName(f"compare: unknown metric {metric!r}; {did_you_mean(metric, list(METRICS))}")
    federations = by_federation(groups)
    if all(len(its) < 2 for its in federations):
        raise ConfigError(
            "compare: a test needs two methods on the same federation, and these runs have one; "
            "run another method with the same data, partition and seeds."
        )
    bases = [find_reference(its, against) for its in federations]
    if against is not None and not any(bases):
        known = list(dict.fromkeys(name for g in groups for name in (g.label, g.runs[0].algorithm)))
        raise UnknownName(f"compare: no method is called {against!r} in these runs; {did_you_mean(against, known)}")
    tests = list[PairedComparison]()
    for its, base in zip(federations, bases, strict=True):
        if base is not None:
            chosen = metric or usual_metric(its)
            tests += judge_pairs([make_pairs(g, base, chosen) for g in its if g is not base])
    return tests


def usual_metric(groups: Sequence[RunGroup]) -> str:
    """The best accuracy; the test loss where no accuracy is recorded."""
    return "best_accuracy" if any(g.values(lambda run: run.best_accuracy) for g in groups) else "test_loss"


def find_reference(groups: Sequence[RunGroup], against: str | None) -> RunGroup | None:
    """The group that the others of its federation are tested against; None where it has none of that name."""
    if against is None:
        return next((g for g in groups if g.runs[0].algorithm == "fedavg"), groups[0])
    named = [g for g in groups if g.label == against]
    named = named or [g for g in groups if g.runs[0].algorithm == against]
    if len(named) > 1:
        raise ConfigError(
            f"compare: several groups of runs are of {against!r}; give the label of one: "
            f"{', '.join(repr(g.label) for g in named)}."
        )
    return named[0] if named else None
