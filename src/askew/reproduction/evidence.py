"""What was measured, and expressions over it: one number a seed from the results of several runs.

    [case | method]                           the default metric; accuracies are in percent
    [case | method @ local.lr=0.1 | metric]   at a grid point instead of the tuned one, another metric; "accuracy" is the curve
    [feddpc/fig6: case | method]              of this experiment
    [case | method | -metric]                 with the other sign

are joined by arithmetic, comparisons and the functions below.
"""

from __future__ import annotations

import ast
import math
import re
import statistics as figures
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import CodeType
from typing import Any, NamedTuple

import numpy as np

from ..errors import ConfigError, did_you_mean
from .papers import Experiment, Hyper, digest, plan, words
from .results import Runs, curve

TERM = re.compile(r"\[([^\[\]]+)\]")


# what an expression may say -------------------------------------------------------------------------------------


class Curve(NamedTuple):
    """A recorded curve: the rounds that have a value, ascending, and the values."""

    rounds: np.ndarray
    values: np.ndarray

    def cut(self, first: float, last: float) -> Curve:
        kept = (self.rounds >= first) & (self.rounds <= last)
        return Curve(self.rounds[kept], self.values[kept])


Value = float | Curve


def mean(c: Curve, first: float = 1, last: float = math.inf) -> float:
    """Over the evaluated rounds from `first` to `last`."""
    values = c.cut(first, last).values
    return float(values.mean()) if len(values) else math.nan


def early(c: Curve, share: float) -> float:
    """The mean over the first share of the rounds."""
    return mean(c, 1, share * c.rounds[-1])


def late(c: Curve, share: float) -> float:
    """The mean over the last share of the rounds."""
    return mean(c, (1 - share) * c.rounds[-1] + 1e-9)


def smooth(c: Curve, width: int = 5) -> Curve:
    """The mean of every so many evaluated rounds, at the last of them."""
    sums = np.cumsum(np.append(0.0, c.values))
    return Curve(c.rounds[width - 1 :], (sums[width:] - sums[:-width]) / width)


def rounds(c: Curve, target: float) -> float:
    """The first evaluated round at or above the target; a miss is one more than the last round."""
    reached = np.flatnonzero(c.values >= target)
    return float(c.rounds[reached[0]] if len(reached) else c.rounds[-1] + 1)


def capped(c: Curve, target: float) -> float:
    """As `rounds`, but a miss is the last round, as speed-ups are printed."""
    return min(rounds(c, target), float(c.rounds[-1]))


def missed(c: Curve, target: float) -> float:
    return float(c.values.max() < target)


def best(c: Curve) -> float:
    return float(c.values.max())


def last(c: Curve) -> float:
    return float(c.values[-1])


def at(c: Curve, round: float) -> float:
    """The value of one round; nothing where it was not evaluated."""
    return float(c.values[c.rounds == round][0]) if round in c.rounds else math.nan


def lowest(c: Curve) -> float:
    """The round of the lowest value."""
    return float(c.rounds[c.values.argmin()])


def rise(c: Curve) -> float:
    """The last value above the lowest."""
    return float(c.values[-1] - c.values.min())


def jitter(c: Curve, first: float = 1, last: float = math.inf) -> float:
    """The standard deviation of the changes from one evaluated round to the next."""
    changes = np.diff(c.cut(first, last).values)
    return float(changes.std(ddof=1)) if len(changes) > 1 else math.nan


def leads(first: float, c: Curve, *others: Curve) -> float:
    """The share of the rounds after `first` in which a curve is above all others."""
    rest = (
        np.max([o.values for o in others], axis=0)
        if all(np.array_equal(o.rounds, c.rounds) for o in others)
        else c.values * math.nan
    )
    return float(np.mean((c.values > rest)[c.rounds > first]))


def gap(a: Curve, b: Curve) -> float:
    """The largest difference of two curves."""
    return float(np.abs(a.values - b.values).max()) if np.array_equal(a.rounds, b.rounds) else math.inf


def where(x: Curve, y: Curve, value: float) -> float:
    """The second of two curves where the first has a value, between neighbours on a line; nothing outside of its range."""
    order = np.argsort(x.values, kind="stable")
    known, found = x.values[order], y.values[order]
    return float(np.interp(value, known, found)) if known[0] <= value <= known[-1] else math.nan


def slope(*values: float) -> float:
    """Of the least-squares line through values at equal steps."""
    return float(np.polyfit(np.arange(len(values)), values, 1)[0])


def spread(*values: float) -> float:
    return max(values) - min(values)


def median(*values: float) -> float:
    return figures.median(values)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (
        *(mean, early, late, smooth, rounds, capped, missed, best, last, at, lowest, rise, jitter),
        *(leads, gap, where, slope, spread, median),
        *(min, max, abs, math.log),
    )
}
ALLOWED = (
    *(ast.Expression, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.Call, ast.Name, ast.Load, ast.Constant),
    *(ast.operator, ast.unaryop, ast.boolop, ast.cmpop),
)


class Term(NamedTuple):
    """One number or curve of every seed."""

    experiment: str  # empty: whichever of the claim's has it
    case: str
    method: str
    hyper: str  # empty: the tuned point
    metric: str
    sign: int


def term(text: str, metric: str) -> Term:
    parts = [part.strip() for part in text.split("|")]
    if len(parts) not in (2, 3):
        raise ConfigError(f"claims: [{text}] is not a term; write [case | method] or [case | method | metric].")
    where, _, case = parts[0].rpartition(": ")
    method, _, hyper = parts[1].partition(" @ ")
    name = parts[2] if len(parts) == 3 else metric
    return Term(
        where.strip(),
        case.strip(),
        method.strip(),
        hyper.strip(),
        name.removeprefix("-"),
        -1 if name.startswith("-") else 1,
    )


class Formula:
    """An expression over terms, compiled once."""

    def __init__(self, text: str, metric: str) -> None:
        self.text, self.terms = text, dict[str, Term]()

        def named(match: re.Match[str]) -> str:
            found = term(match[1], metric)
            return next((n for n, known in self.terms.items() if known == found), None) or self.add(found)

        try:
            tree = ast.parse(TERM.sub(named, text).strip(), mode="eval")
        except SyntaxError:
            raise ConfigError(
                f"claims: {text!r} is not an expression; see askew.reproduction.claims for what may be said."
            ) from None
        for node in ast.walk(tree):
            known = [*self.terms, *FUNCTIONS]
            if not isinstance(node, ALLOWED) or (isinstance(node, ast.Name) and node.id not in known):
                what = node.id if isinstance(node, ast.Name) else type(node).__name__
                raise ConfigError(f"claims: {what!r} is not known in {text!r}; {did_you_mean(what, FUNCTIONS)}")
        self.code: CodeType = compile(tree, "<claim>", "eval")

    def add(self, found: Term) -> str:
        name = f"term{len(self.terms)}"
        self.terms[name] = found
        return name

    def __call__(self, values: Mapping[str, Value]) -> float:
        try:
            return float(
                eval(self.code, {"__builtins__": {}}, {**FUNCTIONS, **values})
            )  # only what ALLOWED lets through
        except (ZeroDivisionError, ValueError, IndexError):
            return math.nan


# what was measured ----------------------------------------------------------------------------------------------


class Point(NamedTuple):
    """One grid point of a case and method: its runs by seed, as far as they were made."""

    hyper: Hyper
    runs: dict[int, dict[str, str]]
    digests: dict[int, str]  # of these runs


class Evidence:
    """Results at one scale, looked up as the experiments plan their runs: experiments that plan the same run share it."""

    def __init__(self, known: Mapping[str, Experiment], runs: Runs, scale: str) -> None:
        self.known, self.scale, self.runs, self.seeds = known, scale, runs, sorted({seed for _, seed in runs})
        self.planned: dict[str, dict[tuple[str, str], list[Point]]] = {}

    def points(self, experiment: str) -> dict[tuple[str, str], list[Point]]:
        """The grid points of every case and method, with what was measured."""
        if experiment not in self.planned:
            self.planned[experiment] = self.looked_up(self.known[experiment]) if self.seeds else {}
        return self.planned[experiment]

    def looked_up(self, e: Experiment) -> dict[tuple[str, str], list[Point]]:
        if e.runs:
            return {key: points for owner in e.runs for key, points in self.points(owner).items() if shows(e, *key)}
        found: dict[tuple[str, str], list[Point]] = {}
        for run in plan(e, self.scale, self.seeds[:1]):
            keys = {seed: digest(replace(run.config, seed=seed)) for seed in self.seeds}
            made = {seed: key for seed, key in keys.items() if (key, seed) in self.runs}
            runs = {seed: self.runs[key, seed] for seed, key in made.items()}
            found.setdefault((run.case, run.method), []).append(Point(run.hyper, runs, made))
        return found

    def at(self, experiment: str, case: str, method: str, hyper: str = "") -> list[Point]:
        wanted = set(hyper.split())
        return [p for p in self.points(experiment).get((case, method), []) if wanted <= set(words(p.hyper).split())]

    def tuned(
        self, experiment: str, points: Sequence[Point], without: int | None = None, by: Sequence[str] = ()
    ) -> Point | None:
        """The grid point with the best mean over the seeds at which all points were run; `without` leaves one seed out.

        By the experiment's rule, or `by` other metrics. None where no seed has the whole grid.
        """
        if len(points) == 1:
            return points[0]
        rule = by or self.known[experiment].choose
        if not rule:
            return None  # the whole grid is the result
        return pick(points, rule, [s for s in self.tuning(points) if s != without])

    def tuning(self, points: Sequence[Point]) -> list[int]:
        """The seeds at which a whole grid was run."""
        return [s for s in self.seeds if points and all(s in p.runs for p in points)]

    def series(self, experiment: str, t: Term, blind: bool = True) -> dict[int, Value]:
        """A term by seed. Blind, a tuned point is chosen on other seeds than the one it is tested at; otherwise on all, as papers do."""
        points, found = self.at(experiment, t.case, t.method, t.hyper), dict[int, Value]()
        for seed in self.seeds:
            point = self.tuned(experiment, points, without=seed if blind else None)
            if point and (value := number(point.runs.get(seed, {}), t.metric)) is not None:
                found[seed] = (
                    value if t.sign > 0 else -value if isinstance(value, float) else Curve(value.rounds, -value.values)
                )
        return found


def shows(e: Experiment, case: str, method: str) -> bool:
    """Does an experiment that shows the runs of others show these?"""
    return (not e.only_cases or case in e.only_cases) and (not e.only_methods or method in e.only_methods)


def pick(points: Sequence[Point], rule: Sequence[str], seeds: Sequence[int]) -> Point | None:
    """The point with the best mean over some seeds; None without a seed, and where it was not measured."""
    if not seeds or any(rule[0].removeprefix("-") not in p.runs[s] for p in points for s in seeds):
        return None
    return max(points, key=lambda p: [score(p, metric, seeds) for metric in rule])


def score(p: Point, metric: str, seeds: Sequence[int]) -> float:
    values = [number(p.runs[s], metric.removeprefix("-")) for s in seeds]
    means = (
        figures.fmean(v for v in values if isinstance(v, float))
        if any(isinstance(v, float) for v in values)
        else -math.inf
    )
    return -means if metric.startswith("-") else means


def number(run: Mapping[str, str], metric: str) -> Value | None:
    """A metric of a run: accuracies in percent, a curve where several values are stored."""
    if metric not in run:
        return None
    text, unit = run[metric], 100.0 if "accuracy" in metric else 1.0
    if metric in ("accuracy", "train_loss", "loss") or " " in text or ":" in text:
        at, values = curve(text)
        return Curve(np.array(at), unit * np.array(values)) if at else None
    return unit * float(text)
