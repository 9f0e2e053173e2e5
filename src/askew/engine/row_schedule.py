"""Which rows of the stacked engine have which batches; it needs no model, and so is made before a round."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import numpy as np

from ..core import local
from .jobs import Jobs

LengthTable = np.ndarray[Any, np.dtype[np.int64]]
Mask = np.ndarray[Any, np.dtype[np.bool_]]


class StackedBatch(NamedTuple):
    """The k-th batch of all rows under a name; of a look after a step, of the rows that took that step."""

    name: str
    k: int
    step: int | None


class Extent(NamedTuple):
    """The rows that have a batch."""

    rows: int
    last: int  # the first so many rows contain them all
    longest: int  # samples of their longest batch
    shortest: int


def extents(table: LengthTable) -> list[Extent]:
    """The rows that have a batch, for each column of a table of lengths; 0: none."""
    has = table > 0
    last = np.where(has.any(0), len(table) - has[::-1].argmax(0), 0)
    longest, shortest = table.max(0), np.where(has, table, table.max()).min(0)
    return [Extent(*numbers) for numbers in np.stack([has.sum(0), last, longest, shortest], 1).tolist()]


def length_table(jobs: Jobs, name: str) -> LengthTable:
    """The samples in each of the jobs' batches of a name."""
    works = [job.batches[name] for job in jobs]
    lengths = {id(work): work.lengths() for work in works}  # runs may share them
    table = np.zeros((len(works), max(map(len, lengths.values()))), dtype=np.int64)
    for row, work in enumerate(works):
        table[row, : len(lengths[id(work)])] = lengths[id(work)]
    return table


class StackedSchedule:
    """The batches of jobs in rows, the longest first."""

    def __init__(self, jobs: Jobs) -> None:
        self.rows = len(jobs)
        self.lengths = {name: length_table(jobs, name) for name in jobs[0].batches}  # rows × batches, 0: none
        self.count = {name: (table > 0).sum(1) for name, table in self.lengths.items()}
        self.extents = {name: extents(table) for name, table in self.lengths.items()}

    def batches(self) -> Iterator[StackedBatch]:
        return (StackedBatch("train", k, None) for k in range(self.lengths["train"].shape[1]))

    def chunks(self, name: str, step: int | None) -> Iterator[StackedBatch]:
        return (StackedBatch(name, k, step) for k in range(self.count[name][self._takes(step)].max()))

    def _takes(self, step: int | None) -> Mask:
        """Which rows take this step."""
        return np.ones(self.rows, dtype=bool) if step is None else self.count["train"] > step

    def active(self, batch: StackedBatch) -> Mask:
        """Which rows have this batch."""
        return np.asarray((self.count[batch.name] > batch.k) & self._takes(batch.step))

    def extent(self, batch: StackedBatch) -> Extent:
        """The rows that have this batch."""
        if batch.step is None:
            return self.extents[batch.name][batch.k]
        column = self.lengths[batch.name][:, batch.k] * self._takes(batch.step)
        return extents(column[:, None])[0]

    def shares(self, batch: StackedBatch, rows: int) -> list[float]:
        """What a look's chunk adds to each row's mean."""
        table = self.lengths[batch.name][:rows]
        steps = None if batch.step is None else self.count["train"][:rows]
        shares = local.look_share(self.active(batch)[:rows] * table[:, batch.k], table.sum(1), steps)
        return cast(list[float], shares.tolist())
