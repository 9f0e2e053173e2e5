"""Rows for a cohort's results, filled as clients finish."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from ..core.local import Result
from .base import PhaseOutputs
from .graphs import copy_tensors


class ResultRows:
    """The results of a cohort, row by row."""

    def __init__(self, rows: int, wanted: Collection[str]) -> None:
        self.rows, self.wanted = rows, wanted
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

    def _allocate(self, entries: list[Tensor], names: list[list[str]]) -> None:
        self.entries, rest = entries, iter(entries)
        up, state, carry = ({n: next(rest) for n in part} for part in names)
        loss, theta = next(rest), next(rest, None)
        kept = carry if "carry" in self.wanted else {}
        self._outputs = PhaseOutputs(up, state, kept, carry["buffers"], loss, theta)
