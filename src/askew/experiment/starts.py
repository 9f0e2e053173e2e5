"""Runs of networks that were handed in from Python: which of them differ in their initial weights alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

START, STRUCTURE = "model.fingerprint", "model.structure"  # hashes, of a network with its weights and without them


def without_starts(runs: Sequence[Mapping[str, str]], seeds: Sequence[object]) -> list[dict[str, str]]:
    """The flat settings of runs, without the hash of the initial weights where each seed has a start of its own.

    Such runs repeat one experiment. Where one seed has several starts, these are what is compared, and stay.
    """
    rests = [{key: value for key, value in settings.items() if key != START} for settings in runs]
    starts: dict[str, dict[object, set[str | None]]] = {}
    for settings, rest, seed in zip(runs, rests, seeds, strict=True):
        starts.setdefault(repr(rest), {}).setdefault(seed, set()).add(settings.get(START))
    return [
        rest
        if STRUCTURE in settings and all(len(each) == 1 for each in starts[repr(rest)].values())
        else dict(settings)
        for settings, rest in zip(runs, rests, strict=True)
    ]
