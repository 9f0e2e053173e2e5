"""Compiled code as a text, and whether a source text contains it: a file may have been edited since it was loaded."""

from __future__ import annotations

import ast
import warnings
from functools import lru_cache
from types import CodeType


def compiled(code: CodeType) -> str:
    """What a piece of compiled code does, without where it stands."""
    inner = [compiled(c) if isinstance(c, CodeType) else constant_text(c) for c in code.co_consts]
    return f"{code.co_code.hex()} {inner} {code.co_names} {code.co_varnames} {code.co_freevars}"


def constant_text(constant: object) -> str:
    """A constant of compiled code; a set's members in an order that is the same in every process."""
    return f"{sorted(map(repr, constant))}" if isinstance(constant, frozenset) else repr(constant)


def function_in(attribute: object) -> object:
    """What a class's static method, class method or property calls; of others the attribute itself."""
    return getattr(attribute, "__func__", None) or getattr(attribute, "fget", None) or attribute


def contains_code(text: str, code: CodeType) -> bool:
    """Is this code somewhere in a source text?"""
    return compiled(code) in compiled_in(text)


@lru_cache(maxsize=100)
def compiled_in(text: str) -> frozenset[str]:
    """All pieces of code in a source text; none in one that Python cannot compile."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # a notebook's cells may wait outside of functions
            waiting = [compile(text, "<text>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return frozenset()
    found = set[str]()
    while waiting:
        code = waiting.pop()
        found.add(compiled(code))
        waiting += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return frozenset(found)
