"""Numbers with their nouns, in sentences and tables."""

from __future__ import annotations


def count_text(number: int, word: str, plural: str = "") -> str:
    """A number with its noun: "1 round", "2,000 rounds"."""
    return f"{number:,} {word if number == 1 else plural or f'{word}s'}"
