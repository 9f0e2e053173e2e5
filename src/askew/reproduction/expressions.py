"""The expressions of claims: one number for each seed from the results of several runs.

    [case | method]                           the default metric; accuracies are in percent
    [case | method @ local.lr=0.1 | metric]   another metric, at a grid point instead of the tuned one
    [feddpc/fig6: case | method]              of this experiment
    [case | method | -metric]                 with the other sign
    [case | method | accuracy]                the curve of accuracies

are terms. They are joined by arithmetic, comparisons and the functions of `FUNCTIONS`.
"""

from __future__ import annotations

import ast
import math
import re
import statistics
from collections.abc import Callable, Mapping
from functools import cache
from types import CodeType
from typing import Any, NamedTuple

import numpy as np

from ..errors import ConfigError, did_you_mean
from ..experiment.curves import rounds_to

TERM = re.compile(r"\[([^\[\]]+)\]")


# functions ------------------------------------------------------------------------------------------------------


class RecordedCurve(NamedTuple):
    """A recorded curve: the rounds that have a value, ascending, and the values."""

    rounds: np.ndarray
    values: np.ndarray
    stopped: bool = False  # of a run that was stopped at an accuracy: what follows is not known

    def cut(self, first: float, last: float) -> RecordedCurve:
        """The part from round `first` to round `last`."""
        inside = (self.rounds >= first) & (self.rounds <= last)
        return RecordedCurve(self.rounds[inside], self.values[inside])


Value = float | RecordedCurve


def mean(c: RecordedCurve, first: float = 1, last: float = math.inf) -> float:
    """The mean over the evaluated rounds from `first` to `last`."""
    values = c.cut(first, last).values
    return float(values.mean()) if len(values) else math.nan


def mean_of_first(c: RecordedCurve, share: float) -> float:
    """The mean over the first share of the rounds."""
    return mean(c, 1, share * c.rounds[-1])


def mean_of_last(c: RecordedCurve, share: float) -> float:
    """The mean over the last share of the rounds."""
    return mean(c, (1 - share) * c.rounds[-1] + 1e-9)


def moving_mean(c: RecordedCurve, width: int = 5) -> RecordedCurve:
    """The mean of every so many evaluated rounds, at the last of them."""
    sums = np.cumsum(np.append(0.0, c.values))
    return RecordedCurve(c.rounds[width - 1 :], (sums[width:] - sums[:-width]) / width)


def rounds_or_one_more(c: RecordedCurve, target: float) -> float:
    """The first evaluated round at or above the target; one more than the last round if there is none.

    nan of a run that was stopped before.
    """
    reached = rounds_to(c.rounds, c.values, target)
    if reached is None and c.stopped:
        return math.nan
    return float(c.rounds[-1] + 1 if reached is None else reached)


def rounds_or_last(c: RecordedCurve, target: float) -> float:
    """The first evaluated round at or above the target; the last round if there is none, as speed-ups are printed."""
    return min(rounds_or_one_more(c, target), float(c.rounds[-1]))


def is_missed(c: RecordedCurve, target: float) -> float:
    """1 if no value reaches the target, else 0; nan of a run that was stopped before."""
    missed = float(c.values.max() < target)
    return math.nan if missed and c.stopped else missed


def best_value(c: RecordedCurve) -> float:
    return float(c.values.max())


def last_value(c: RecordedCurve) -> float:
    return float(c.values[-1])


def value_at(c: RecordedCurve, round: float) -> float:
    """The value of one round; nan where it was not evaluated."""
    return float(c.values[c.rounds == round][0]) if round in c.rounds else math.nan


def round_of_lowest(c: RecordedCurve) -> float:
    """The round of the lowest value."""
    return float(c.rounds[c.values.argmin()])


def rise_from_lowest(c: RecordedCurve) -> float:
    """The last value less the lowest."""
    return float(c.values[-1] - c.values.min())


def jitter(c: RecordedCurve, first: float = 1, last: float = math.inf) -> float:
    """The standard deviation of the changes from one evaluated round to the next."""
    changes = np.diff(c.cut(first, last).values)
    return float(changes.std(ddof=1)) if len(changes) > 1 else math.nan


def share_ahead(first: float, c: RecordedCurve, *others: RecordedCurve) -> float:
    """The share of the rounds after `first` in which a curve is above all others; 0 if these have other rounds."""
    comparable = all(np.array_equal(o.rounds, c.rounds) for o in others)
    highest = np.max([o.values for o in others], axis=0) if comparable else np.full_like(c.values, math.nan)
    return float(np.mean((c.values > highest)[c.rounds > first]))


def largest_gap(a: RecordedCurve, b: RecordedCurve) -> float:
    """The largest difference of two curves; infinite if they were evaluated in other rounds."""
    return float(np.abs(a.values - b.values).max()) if np.array_equal(a.rounds, b.rounds) else math.inf


def value_where(x: RecordedCurve, y: RecordedCurve, value: float) -> float:
    """The second of two curves where the first has a value, between neighbours on a line; nan outside of its range."""
    order = np.argsort(x.values, kind="stable")
    xs, ys = x.values[order], y.values[order]
    return float(np.interp(value, xs, ys)) if xs[0] <= value <= xs[-1] else math.nan


def slope(*values: float) -> float:
    """The slope of the least-squares line through values at equal steps."""
    return float(np.polyfit(np.arange(len(values)), values, 1)[0])


def value_range(*values: float) -> float:
    """The largest value less the smallest."""
    return max(values) - min(values)


def median(*values: float) -> float:
    return statistics.median(values)


# The functions by the names that papers/*/claims.toml uses.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "mean": mean,
    "early": mean_of_first,
    "late": mean_of_last,
    "smooth": moving_mean,
    "rounds": rounds_or_one_more,
    "capped": rounds_or_last,
    "missed": is_missed,
    "best": best_value,
    "last": last_value,
    "at": value_at,
    "lowest": round_of_lowest,
    "rise": rise_from_lowest,
    "jitter": jitter,
    "leads": share_ahead,
    "gap": largest_gap,
    "where": value_where,
    "slope": slope,
    "spread": value_range,
    "median": median,
    "min": min,
    "max": max,
    "abs": abs,
    "log": math.log,
}


# terms and formulas ---------------------------------------------------------------------------------------------

# Kinds of syntax that an expression may use.
ALLOWED = (
    *(ast.Expression, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.Call, ast.Name, ast.Load, ast.Constant),
    *(ast.operator, ast.unaryop, ast.boolop, ast.cmpop),
)


class Term(NamedTuple):
    """One number or curve of every seed: a metric of the runs of a case and method."""

    experiment: str  # empty: the first of the claim's experiments that has the case and method
    case: str
    method: str
    hyper: str  # empty: the tuned point
    metric: str
    sign: int  # 1, or −1 for the other sign


def parse_term(text: str, metric: str) -> Term:
    """The term between two brackets; `metric` is the default."""
    parts = [part.strip() for part in text.split("|")]
    if len(parts) not in (2, 3):
        raise ConfigError(f"claims: [{text}] is not a term; write [case | method] or [case | method | metric].")
    experiment, _, case = parts[0].rpartition(": ")
    method, _, hyper = parts[1].partition(" @ ")
    name = parts[2] if len(parts) == 3 else metric
    return Term(
        experiment.strip(),
        case.strip(),
        method.strip(),
        hyper.strip(),
        name.removeprefix("-"),
        -1 if name.startswith("-") else 1,
    )


@cache
def read_formula(text: str, metric: str) -> Formula:
    """The formula of a text; many rules and cells have the same."""
    return Formula(text, metric)


class Formula:
    """An expression over terms, compiled once; `terms` are its terms by the names they have in the code."""

    def __init__(self, text: str, metric: str) -> None:
        self.terms: dict[str, Term] = {}
        try:
            tree = ast.parse(TERM.sub(lambda match: self.name(parse_term(match[1], metric)), text).strip(), mode="eval")
        except SyntaxError:
            raise ConfigError(
                f"claims: {text!r} is not an expression; see askew.reproduction.expressions for what may be written."
            ) from None
        for node in ast.walk(tree):
            known = [*self.terms, *FUNCTIONS]
            if not isinstance(node, ALLOWED) or (isinstance(node, ast.Name) and node.id not in known):
                what = node.id if isinstance(node, ast.Name) else type(node).__name__
                raise ConfigError(f"claims: {what!r} is not known in {text!r}; {did_you_mean(what, FUNCTIONS)}")
        self.code: CodeType = compile(tree, "<claim>", "eval")

    def name(self, term: Term) -> str:
        """The name of a term in the code; equal terms have one name."""
        for name, known in self.terms.items():
            if known == term:
                return name
        name = f"term{len(self.terms)}"
        self.terms[name] = term
        return name

    def __call__(self, values: Mapping[str, Value]) -> float:
        """The number that follows from the terms' values at one seed; nan where it is not defined."""
        try:
            # eval is given only what ALLOWED lets through
            return float(eval(self.code, {"__builtins__": {}}, {**FUNCTIONS, **values}))
        except (ZeroDivisionError, ValueError, IndexError):
            return math.nan
