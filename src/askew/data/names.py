"""Names and numbers: clients and classes that are called by names, or by any whole numbers, counted from 0."""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from ..errors import DataError

FEW = 100  # classes
SHOWN = 5  # names that a sentence lists


class Numbering(NamedTuple):
    """Things numbered 0, 1, 2, … and what they were called."""

    numbers: np.ndarray  # [n] int64
    names: tuple[str, ...]  # by number


def to_names(values: Any, what: str) -> np.ndarray:
    """Names or whole numbers as an array [n] of texts or of int64; `what` says whose they are in error messages."""
    if isinstance(values, Tensor):
        values = values.detach().cpu().numpy()
    try:
        array = np.asarray(values)
    except ValueError:
        raise DataError(f"the {what} must be one name or number a sample, got a ragged list; flatten it.") from None
    if array.ndim != 1:
        raise DataError(
            f"the {what} must be one name or number a sample, got shape {list(array.shape)}; "
            "flatten them, or take their argmax."
        )
    array = plain_numbers(array)
    if array.dtype.kind in "ib":
        return array.astype(np.int64)
    if array.dtype.kind == "f":
        wrong = np.flatnonzero(~np.isfinite(array) | (array != np.round(array)))
        if len(wrong):
            raise DataError(
                f"the {what} must be names or whole numbers, got {array[wrong[0]]:g} for sample {wrong[0]}; "
                "clean them first."
            )
        long = np.flatnonzero(np.abs(array) >= 2 / np.finfo(array.dtype).eps)
        if len(long):
            raise DataError(
                f"the {what} must be exact, got {array[long[0]]:g} for sample {long[0]}, and {array.dtype} merges "
                "whole numbers of such length; pass them as texts."
            )
        return array.astype(np.int64)
    missing = [k for k, value in enumerate(array.tolist()) if is_missing(value)]
    if missing:
        raise DataError(f"the {what} must have a value for every sample, and sample {missing[0]} has none; drop it.")
    return array.astype(str)


def plain_numbers(values: np.ndarray) -> np.ndarray:
    """Objects that all are numbers as an array of numbers, and whole numbers beyond int64 as texts; else what came."""
    if values.dtype.kind == "O" and len(values):
        each = values.tolist()
        if all(isinstance(value, (Integral, np.bool_)) for value in each):
            try:
                return np.array([int(value) for value in each], dtype=np.int64)
            except OverflowError:
                return np.array([str(int(value)) for value in each])
        if all(isinstance(value, (Real, Decimal, np.bool_)) for value in each):
            return values.astype(np.float64)
    if values.dtype.kind == "u":
        return values.astype(str if int(values.max(initial=0)) >= 2**63 else np.int64)
    return values


def is_missing(value: Any) -> bool:
    """Is this what stands for no value? The NA of pandas cannot be compared."""
    return value is None or type(value).__name__ == "NAType" or bool(value != value) or value == ""


def in_order(names: Iterable[str]) -> list[str]:
    """Names in their order: by number where all are whole numbers, else by letters."""
    names = list(names)
    whole = all(name.removeprefix("-").isdecimal() for name in names)
    return sorted(names, key=lambda name: (int(name), name)) if whole else sorted(names)


def number_names(values: np.ndarray) -> Numbering:
    """An array of `to_names` numbered in the order of the names."""
    distinct, numbers = np.unique(values, return_inverse=True)
    if distinct.dtype.kind == "U":
        ordered = in_order(distinct.tolist())
        place = {name: k for k, name in enumerate(ordered)}
        numbers = np.array([place[name] for name in distinct.tolist()], dtype=np.int64)[numbers]
        return Numbering(numbers, tuple(ordered))
    return Numbering(numbers.astype(np.int64), tuple(str(value) for value in distinct.tolist()))


def is_counted(values: np.ndarray) -> bool:
    """Are these the whole numbers 0 … N − 1, each there?"""
    distinct = np.unique(values)
    return bool(values.dtype.kind == "i" and distinct[0] == 0 and distinct[-1] == len(distinct) - 1)


def number_labels(values: np.ndarray) -> tuple[np.ndarray, tuple[str, ...] | None, str]:
    """Class labels counted from 0, the classes' names (None: their numbers), and a remark where that changed them.

    Whole numbers that begin at 0 stay, if they are below 100 or half of the classes at least are there: the others may
    be in other data.
    """
    if values.dtype.kind == "i":
        distinct = np.unique(values)
        if distinct[0] == 0 and int(distinct[-1]) < max(2 * len(distinct), FEW):
            absent = np.setdiff1d(np.arange(int(distinct[-1])), distinct)
            remark = f"no sample has the label {listed(absent)}; each stays a class." if len(absent) else ""
            return values, None, remark
    numbering = number_names(values)
    if values.dtype.kind != "i":
        return *numbering, ""
    counted = listed(range(len(numbering.names)))
    return *numbering, f"the labels {listed(numbering.names)} are counted as classes {counted}."


def spelling_remark(names: Iterable[str], what: str) -> str:
    """A remark on two names that differ by capital letters or spaces only; empty where there are none."""
    seen: dict[str, str] = {}
    for name in names:
        other = seen.setdefault(" ".join(name.casefold().split()), name)
        if other != name:
            return f"{other!r} and {name!r} are two {what}; if they are one, spell them alike."
    return ""


def listed(things: Iterable[object]) -> str:
    """The first few of some things, and the last: "1, 2, 3, 4, 5, … 10"."""
    texts = [str(thing) for thing in things]
    return ", ".join(texts) if len(texts) <= SHOWN + 1 else f"{', '.join(texts[:SHOWN])}, … {texts[-1]}"
