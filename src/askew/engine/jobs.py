"""What an engine of many clients at a time is fed with: jobs, and their samples on the device in the order of their use."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.local import Result
from ..core.types import Batch
from ..data.federation import ClientBatches, RoundPlan, SampleIndex
from .base import PhaseOutputs, PhaseRequest
from .graphs import copy

CHUNK = 16384  # samples gathered at a time
SMALL = 2**28  # bytes; a feed below is made four times as large as needed, others twice


class SampleBuffer:
    """The samples of the jobs of a wave in order of use, and for every batch the places of its samples, at fixed addresses."""

    def __init__(
        self, x: Tensor, y: Tensor, samples: int, batches: int, length: int, dtype: torch.dtype, last: bool
    ) -> None:
        self.x, self.y = (t.new_empty((samples, *t.shape[1:])) for t in (x, y))
        if last and x.dim() == 4:
            self.x = self.x.to(memory_format=torch.channels_last)
        self.rows = y.new_zeros((batches, length), dtype=torch.long)
        self.weight = torch.zeros((batches, length), dtype=dtype, device=y.device)
        self.lengths = y.new_zeros(batches, dtype=torch.long)
        self.laid: list[int] = []  # lengths of the batches that rows and weight are made for

    def take(self, places: Tensor) -> Tensor:
        """Inputs in the memory format in which they lie."""
        if self.x.dim() != 4 or self.x.is_contiguous():
            return self.x[places]
        return self.x.permute(0, 2, 3, 1)[places].permute(0, 3, 1, 2)

    def holds(self, samples: int, batches: int, length: int) -> bool:
        return samples <= len(self.x) and batches <= len(self.rows) and length <= self.rows.shape[1]

    def fill(self, jobs: Sequence[tuple[RoundPlan, ClientBatches]]) -> None:
        """Lay the samples out, job after job; neighbours with the same pool are gathered together."""
        device, at = self.y.device, 0
        for _, some in groupby(jobs, key=lambda job: (id(job[0].pool.x), id(job[0].transform))):
            part = list(some)
            plan, draws = part[0][0], [work.draws for _, work in part if work.draws is not None]
            pick = SampleIndex(
                joined([work.places for _, work in part], device), joined(draws, device) if draws else None
            )
            x, y = (t[at : at + len(pick.places)] for t in (self.x, self.y))
            at += len(pick.places)
            if plan.transform is None and x.is_contiguous():  # as they are: straight into place
                for pool, to in zip(plan.pool, (x, y), strict=True):
                    torch.index_select(pool, 0, pick.places, out=to)
                continue
            for a in range(0, len(pick.places), CHUNK):
                now = slice(a, a + CHUNK)
                x[now], y[now], *_ = plan.batch(pick.at(now))
        lengths = [length for _, work in jobs for length in work.lengths()]
        if lengths == self.laid:
            return
        self.laid = lengths
        ends = np.cumsum(lengths)
        begin, length = sent(torch.from_numpy(np.stack([ends - lengths, lengths])), device)[:, :, None]
        column = torch.arange(self.rows.shape[1], device=device)
        self.rows[: len(ends)] = begin + torch.minimum(column, length - 1)
        self.weight[: len(ends)] = (column < length).to(self.weight.dtype)
        self.lengths[: len(ends)] = length[:, 0]


def sent(t: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on the device, for which the host does not wait."""
    return t.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else t


def joined(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """Tensors of the host one after the other, on the device."""
    if device.type != "cuda":
        return torch.cat([*parts])
    room = torch.empty(sum(map(len, parts)), dtype=parts[0].dtype, pin_memory=True)
    return torch.cat([*parts], out=room).to(device, non_blocking=True)


class ResultRows:
    """The results of a cohort, row by row."""

    def __init__(self, rows: int, want: Collection[str]) -> None:
        self.rows, self.want = rows, want
        self.outbox: PhaseOutputs | None = None
        self.entries: list[Tensor] = []

    def put(self, i: int, result: Result, main: torch.cuda.Stream | None) -> None:
        """The result of the i-th client."""
        given, names = self._given(result)
        if self.outbox is None:
            with torch.cuda.stream(main):  # whose memory it is; nothing without CUDA
                self._take([t.new_empty((self.rows, *t.shape)) for t in given], names)
        copy([entry[i] for entry in self.entries], given)

    def put_rows(self, clients: Tensor, rows: Tensor, result: Result) -> None:
        """The results of some clients, which stand in these rows."""
        given, names = self._given(result)
        if len(rows) == self.rows:  # all of them, in the order of the cohort
            self._take([t.index_select(0, rows) for t in given], names)
            return
        if self.outbox is None:
            self._take([t.new_empty((self.rows, *t.shape[1:])) for t in given], names)
        for entry, t in zip(self.entries, given, strict=True):
            entry.index_copy_(0, clients, t.index_select(0, rows))

    def _given(self, result: Result) -> tuple[list[Tensor], list[list[str]]]:
        """What is wanted of a result, and the names of its parts."""
        carry = result.carry if "carry" in self.want else {"buffers": result.carry["buffers"]}
        given = [
            *result.up.values(),
            *result.mine.values(),
            *carry.values(),
            result.loss,
            *([result.w] if "w" in self.want else []),
        ]
        return given, [list(result.up), list(result.mine), list(carry)]

    def _take(self, entries: list[Tensor], names: list[list[str]]) -> None:
        self.entries, rest = entries, iter(entries)
        up, mine, kept = ({n: next(rest) for n in part} for part in names)
        loss, w = next(rest), next(rest, None)
        self.outbox = PhaseOutputs(up, mine, kept if "carry" in self.want else {}, kept["buffers"], loss, w)


class ClientJobs:
    """What one ask is made of: a work of every name for each client, its numbers, and room for the results."""

    def __init__(self, ask: PhaseRequest) -> None:
        self.phase, self.inbox, self.plan, want = ask
        phase, plan = self.phase, self.plan
        names = [*(["train"] if phase.trains else []), *sorted({*phase.before, *phase.each, *phase.after})]
        self.works = [
            {n: (plan.train if n == "train" else plan.looks[n])[i] for n in names} for i in range(len(plan.ids))
        ]
        self.room = ResultRows(len(plan.ids), want)

    @cached_property
    def numbers(self) -> Tensor:
        """What a client's moves need to know besides tensors: seven numbers of each."""
        inbox = self.inbox
        same = [torch.full_like(inbox.steps, value) for value in (inbox.lr, inbox.lr0, inbox.round)]
        return torch.stack([*same, inbox.steps, inbox.tau, inbox.size, inbox.coin], 1)

    def key(self) -> Any:
        """Jobs with one key can be done in one another's slots."""
        inbox = self.inbox
        names = tuple(tuple(state) for state in (inbox.server, inbox.memory, inbox.mine, inbox.carry))
        return self.phase, inbox.momentum, inbox.decay, inbox.clip, names


def free(device: torch.device) -> float:
    """Bytes of memory that are left on the device."""
    return float(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else math.inf


def example(plan: RoundPlan, work: ClientBatches) -> Batch:
    """One sample as the network sees it."""
    return plan.batch(work.to(plan.pool.y.device).slice(0, 1))


Jobs = Sequence[tuple[ClientJobs, int]]


Own = list[tuple[RoundPlan, ClientBatches]]


def needed(jobs: Jobs) -> dict[str, tuple[Own, tuple[int, int, int]]]:
    """By name the works of the jobs, one that several runs share once, and what a feed for them must hold."""
    found: dict[str, tuple[Own, tuple[int, int, int]]] = {}
    for name in jobs[0][0].works[0]:
        own = list({id(work): (errand.plan, work) for errand, i in jobs for work in (errand.works[i][name],)}.values())
        longest = max(max(work.lengths(), default=1) for _, work in own)
        found[name] = own, (sum(work.samples for _, work in own), sum(work.batches for _, work in own), longest)
    return found


class Full(Exception):
    """There is no room for the jobs' samples in what there is."""


def lay(
    feeds: dict[str, SampleBuffer], jobs: Jobs, last: bool = False, grow: bool = True
) -> tuple[bool, dict[str, list[int]]]:
    """Put the jobs' samples in place.

    Returns whether a feed was too small, and is another one now, and for each name where every job's batches begin.
    """
    grown, first, needs = False, dict[str, list[int]](), needed(jobs)
    if not grow and any(name not in feeds or not feeds[name].holds(*need) for name, (_, need) in needs.items()):
        raise Full
    for name, (own, need) in needs.items():
        if name not in feeds or not feeds[name].holds(*need):
            x, y, *_ = example(*own[0])
            spare = 4 if need[0] * x.numel() * x.element_size() < SMALL else 2
            longest = max(need[2], feeds[name].rows.shape[1] if name in feeds else 0)
            feeds[name] = SampleBuffer(x, y, spare * need[0], spare * need[1], longest, jobs[0][0].inbox.x.dtype, last)
            grown = True
        feeds[name].fill(own)
        ends = np.cumsum([work.batches for _, work in own]).tolist()
        begins = dict(zip((id(work) for _, work in own), [0, *ends[:-1]], strict=True))
        first[name] = [begins[id(errand.works[i][name])] for errand, i in jobs]
    return grown, first
