"""What a method's hooks may return: what does not fit is refused by a sentence that names the method and the hook."""

from __future__ import annotations

import sys

from torch import Tensor

from ..errors import AlgorithmError
from .algorithm import Algorithm

STATE = "a dictionary of tensors by name"


def fits(value: object, like: Tensor) -> bool:
    """Is this a tensor of the same shape and type?"""
    return isinstance(value, Tensor) and value.shape == like.shape and value.dtype == like.dtype


def is_state(value: object) -> bool:
    """Is this a dictionary of tensors by name?"""
    return isinstance(value, dict) and all(isinstance(n, str) and isinstance(v, Tensor) for n, v in value.items())


def is_pair(value: object) -> bool:
    """Is this a tuple of two?"""
    return isinstance(value, tuple) and len(value) == 2


def wrong_return(alg: Algorithm, hook: str, expected: str, value: object) -> AlgorithmError:
    """The error for a hook that returned this value instead of what is expected."""
    return AlgorithmError(
        f"{alg.display_name()}: {hook}() must return {expected}, and returned {in_words(value)}. {correct_hook(alg)}"
    )


def correct_hook(alg: Algorithm) -> str:
    """What to do about a wrong hook, with the file of a method that is not askew's own."""
    module = alg.settings_class().__module__
    file = None if module.startswith("askew.") else getattr(sys.modules.get(module), "__file__", None)
    return f"Correct the hook in {file!r}." if file else "Correct the hook."


def in_words(value: object) -> str:
    """A value in words, by its shape and type."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)} and {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name!r}: {in_words(entry)}" for name, entry in value.items()) + "}"
    if isinstance(value, tuple):
        return "(" + ", ".join(map(in_words, value)) + ")"
    return "None" if value is None else f"a value of type {type(value).__name__}"
