"""Rows for a cohort's results, filled as clients finish."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from ..core import hooks
from ..core.algorithm import Algorithm
from ..core.local import Result
from ..core.types import State
from ..core.words import in_words
from ..errors import AlgorithmError
from .base import PhaseOutputs
from .graphs import copy_tensors


class ResultRows:
    """The results of a cohort, row by row."""

    def __init__(self, alg: Algorithm, rows: int, wanted: Collection[str]) -> None:
        self.alg, self.rows, self.wanted = alg, rows, wanted
        self.entries: list[Tensor] = []
        self._outputs: PhaseOutputs | None = None

    def outputs(self) -> PhaseOutputs:
        """All results, once they are in."""
        assert self._outputs is not None
        return self._outputs

    def put(self, i: int, result: Result, main: torch.cuda.Stream | None) -> None:
        """Keep the result of the i-th client."""
        tensors, names = self._wanted(result)
        if self._outputs is None:
            with torch.cuda.stream(main):  # whose memory it is; nothing without CUDA
                self._allocate([t.new_empty((self.rows, *t.shape)) for t in tensors], names)
        if not hooks.is_ours(self.alg, "finish"):
            self._require_alike(result)
        copy_tensors([entry[i] for entry in self.entries], tensors)

    def put_rows(self, clients: Tensor, rows: Tensor, result: Result) -> None:
        """Keep the results of some clients, which stand in these rows."""
        tensors, names = self._wanted(result)
        if len(rows) == self.rows:  # all of them, in the order of the cohort
            self._allocate([t.index_select(0, rows) for t in tensors], names)
            return
        if self._outputs is None:
            self._allocate([t.new_empty((self.rows, *t.shape[1:])) for t in tensors], names)
        for entry, t in zip(self.entries, tensors, strict=True):
            entry.index_copy_(0, clients, t.index_select(0, rows))

    def _wanted(self, result: Result) -> tuple[list[Tensor], list[list[str]]]:
        """What is wanted of a result, and the names of its parts."""
        carry = result.carry if "carry" in self.wanted else {"buffers": result.carry["buffers"]}
        tensors = [*result.up.values(), *result.state.values(), *carry.values(), result.loss]
        tensors += [result.theta] if "theta" in self.wanted else []
        return tensors, [list(result.up), list(result.state), list(carry)]

    def _require_alike(self, result: Result) -> None:
        """Refuse a result that is not of the form of the first one: a copy would spread or cut it without a word."""
        outputs = self.outputs()
        for what, rows, own in (("upload", outputs.up, result.up), ("client state", outputs.state, result.state)):
            first: State = {name: entry[0] for name, entry in rows.items()}
            if list(first) == list(own) and all(hooks.fits(own[n], first[n]) for n in own):
                continue
            raise AlgorithmError(
                f"{self.alg.display_name()}: finish() must return the same {what} for all clients, with the same "
                f"names, shapes and types in the same order; of one client it was {in_words(first)}, and of "
                f"another {in_words(own)}. {hooks.correct_hook(self.alg)}"
            )

    def _allocate(self, entries: list[Tensor], names: list[list[str]]) -> None:
        self.entries, rest = entries, iter(entries)
        up, state, carry = ({n: next(rest) for n in part} for part in names)
        loss, theta = next(rest), next(rest, None)
        kept = carry if "carry" in self.wanted else {}
        self._outputs = PhaseOutputs(up, state, kept, carry["buffers"], loss, theta)
