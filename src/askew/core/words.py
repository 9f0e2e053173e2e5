"""Values in words, for sentences about what a user's code returned."""

from __future__ import annotations

from torch import Tensor


def in_words(value: object) -> str:
    """A value in words, by its shape and type."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)} and {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name!r}: {in_words(entry)}" for name, entry in value.items()) + "}"
    if isinstance(value, tuple):
        return "(" + ", ".join(map(in_words, value)) + ")"
    return "None" if value is None else f"a value of type {type(value).__name__}"
