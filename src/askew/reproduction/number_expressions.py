"""How printed numbers follow from what runs record, as expressions (see expressions.py)."""

from __future__ import annotations

import re

from .papers import Experiment
from .printed import PrintedNumber
from .run_metrics import TO_TARGET

RECORDED_METRIC = re.compile(r"[a-z_0-9]+")  # how the metrics are spelled that runs record


def is_measurable(e: Experiment, number: PrintedNumber) -> bool:
    """Whether runs measure such a number; formulas, for example, they do not."""
    return number.metric.startswith("chosen ") or bool(number_expression(e, number))


def number_expression(e: Experiment, number: PrintedNumber) -> str:
    """How a printed metric follows from recorded ones; empty where it does not."""
    if number.metric == "rounds_to":
        return f"rounds({curve_term(e, number)}, {target_expression(e, number)})"
    if number.metric == "speedup":
        target = target_expression(e, number)
        base = curve_term(e, number, baseline_method(e, number))
        return f"capped({base}, {target}) / capped({curve_term(e, number)}, {target})"
    if number.metric.startswith("accuracy at "):
        return f"at({curve_term(e, number)}, {number.metric.removeprefix('accuracy at ')})"
    recorded = RECORDED_METRIC.fullmatch(number.metric) and e.trains
    return f"[{number.case} | {number.method} | {number.metric}]" if recorded else ""


def curve_term(e: Experiment, number: PrintedNumber, method: str = "") -> str:
    """The term of the accuracy curve in a number's case, of its own method or another."""
    return f"[{number.case} | {method or number.method} | {curve_name(e, number)}]"


def curve_name(e: Experiment, number: PrintedNumber) -> str:
    """The curve that a number is read off: it may end at a given accuracy where the rounds to that are counted."""
    counts_rounds = number.metric in ("rounds_to", "speedup") and isinstance(e.target, float)
    return TO_TARGET if counts_rounds else "accuracy"


def baseline_method(e: Experiment, number: PrintedNumber) -> str:
    """The method that a printed number is relative to; empty where there is none."""
    named = target_method(e)
    return named or "FedAvg" if number.metric == "speedup" or (named and number.metric == "rounds_to") else ""


def rival_methods(e: Experiment, number: PrintedNumber) -> list[str]:
    """The methods, other than its own, whose runs a printed number takes."""
    base = baseline_method(e, number)
    return [base] if base and base != number.method.partition(" @ ")[0] else []


def target_method(e: Experiment) -> str:
    """The method whose accuracy is the target of rounds; empty where the target is a number or there is none."""
    return e.target.removesuffix(" last") if isinstance(e.target, str) else ""


def target_expression(e: Experiment, number: PrintedNumber) -> str:
    """The target of rounds, as an expression: a number, or another method's best or last accuracy."""
    if isinstance(e.target, str):
        which = "last" if e.target.endswith(" last") else "best"
        return f"{which}({curve_term(e, number, target_method(e) or 'FedAvg')})"
    return f"{100 * e.target:g}" if e.target is not None else "0"
