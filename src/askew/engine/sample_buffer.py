"""The samples of many jobs on the device, in the order of their use."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..core.types import Batch
from ..data.federation import ClientBatches, RoundPlan, SampleIndex
from .jobs import Jobs

GATHERED = 16384  # samples gathered at a time
# Below so many bytes, a buffer is so many times as large as is needed.
SPARE_FACTORS = ((2**28, 4.0), (2**32, 2.0), (math.inf, 1.1))

NO_LENGTHS: Mapping[str, int] = MappingProxyType({})

Sources = list[tuple[RoundPlan, ClientBatches]]  # batches, and the plan whose pool they come from


class BufferFull(Exception):
    """The jobs' samples do not fit into the buffers there are."""


class Needs(NamedTuple):
    """What a buffer must hold."""

    samples: int
    batches: int
    length: int  # samples of the longest batch


class SampleBuffer:
    """Samples in order of use, and for every batch the places of its samples, at fixed addresses."""

    def __init__(self, x: Tensor, y: Tensor, size: Needs, dtype: torch.dtype, channels_last: bool) -> None:
        """x and y are examples of what it holds."""
        self.x, self.y = (t.new_empty((size.samples, *t.shape[1:])) for t in (x, y))
        if channels_last and x.dim() == 4:
            self.x = self.x.to(memory_format=torch.channels_last)
        self.rows = y.new_zeros((size.batches, size.length), dtype=torch.long)
        self.weight = torch.zeros((size.batches, size.length), dtype=dtype, device=y.device)
        self.lengths = y.new_zeros(size.batches, dtype=torch.long)
        self.filled: list[int] = []  # lengths of the batches that rows and weight are made for

    def inputs(self, places: Tensor) -> Tensor:
        """Inputs at some places, in the memory format in which they lie."""
        if self.x.dim() != 4 or self.x.is_contiguous():
            return self.x[places]
        return self.x.permute(0, 2, 3, 1)[places].permute(0, 3, 1, 2)

    @property
    def batch_numbers(self) -> int:
        """Numbers in the inputs of the longest batch."""
        return self.rows.shape[1] * self.x.stride(0)

    def padded_length(self, length: int, parts: int) -> int:
        """The length that a batch is padded to: one of `parts` lengths, whose longest is that of the longest batch."""
        longest = self.rows.shape[1]
        part = -(-longest // parts)
        return min(longest, -(-length // part) * part)

    def holds(self, needs: Needs) -> bool:
        """Is it large enough?"""
        samples, batches, length = needs
        return samples <= len(self.x) and batches <= len(self.rows) and length <= self.rows.shape[1]

    def fill(self, sources: Sources) -> None:
        """Lay the samples out, job after job; neighbours with the same pool are gathered together."""
        device, at = self.y.device, 0
        # with flipped labels (an attack) runs share the inputs of a pool, and not its labels
        for _, group in groupby(sources, key=lambda source: (*map(id, source[0].pool), id(source[0].transform))):
            part = list(group)
            plan, draws = part[0][0], [work.draws for _, work in part if work.draws is not None]
            places = join([work.places for _, work in part], device)
            index = SampleIndex(places, join(draws, device) if draws else None)
            x, y = (t[at : at + len(places)] for t in (self.x, self.y))
            at += len(places)
            if plan.transform is None and x.is_contiguous():  # as they are: straight into place
                for pool, to in zip(plan.pool, (x, y), strict=True):
                    torch.index_select(pool, 0, places, out=to)
                continue
            for a in range(0, len(places), GATHERED):
                now = slice(a, a + GATHERED)
                x[now], y[now], *_ = plan.batch(index.at(now))
        self._lay_out_batches([length for _, work in sources for length in work.lengths()])

    def _lay_out_batches(self, lengths: list[int]) -> None:
        """Where each batch's samples are, and which of them are padding."""
        if lengths == self.filled:
            return
        self.filled, device = lengths, self.y.device
        ends = np.cumsum(lengths)
        begin, length = send(torch.from_numpy(np.stack([ends - lengths, lengths])), device)[:, :, None]
        column = torch.arange(self.rows.shape[1], device=device)
        self.rows[: len(ends)] = begin + torch.minimum(column, length - 1)
        self.weight[: len(ends)] = (column < length).to(self.weight.dtype)
        self.lengths[: len(ends)] = length[:, 0]


def fill_buffers(
    buffers: dict[str, SampleBuffer],
    jobs: Jobs,
    channels_last: bool = False,
    grow: bool = True,
    longest: Mapping[str, int] = NO_LENGTHS,
) -> tuple[bool, dict[str, list[int]]]:
    """Put the jobs' samples in place.

    Returns whether a buffer was too small, and is another one now, and for each name where every job's batches begin.
    Without `grow` a buffer that is too small raises BufferFull. A buffer is made for batches of `longest` samples, by
    name, or of those that there are.
    """
    grown, first, needed = False, dict[str, list[int]](), needs_of(jobs)
    if not grow and any(n not in buffers or not buffers[n].holds(needs) for n, (_, needs) in needed.items()):
        raise BufferFull
    for name, (sources, needs) in needed.items():
        if name not in buffers or not buffers[name].holds(needs):
            x, y, _ = example(*sources[0])
            size_in_bytes = needs.samples * x.numel() * x.element_size()
            spare = next(times for below, times in SPARE_FACTORS if size_in_bytes < below)
            before = buffers[name].rows.shape[1] if name in buffers else 0
            length = max(needs.length, before, longest.get(name, 0))
            size = Needs(int(spare * needs.samples), int(spare * needs.batches), length)
            buffers[name] = SampleBuffer(x, y, size, jobs[0].request.inputs.w.dtype, channels_last)
            grown = True
        buffers[name].fill(sources)
        ends = np.cumsum([work.batches for _, work in sources]).tolist()
        begins = dict(zip((id(work) for _, work in sources), [0, *ends[:-1]], strict=True))
        first[name] = [begins[id(job.batches[name])] for job in jobs]
    return grown, first


def needs_of(jobs: Jobs) -> dict[str, tuple[Sources, Needs]]:
    """By name the batches of the jobs, those that several runs share once, and what a buffer for them must hold."""
    found: dict[str, tuple[Sources, Needs]] = {}
    for name in jobs[0].batches:
        works = [(job.request.plan, job.batches[name]) for job in jobs]
        sources = list({id(work): (plan, work) for plan, work in works}.values())
        longest = max(max(work.lengths(), default=1) for _, work in sources)
        samples, batches = sum(work.samples for _, work in sources), sum(work.batches for _, work in sources)
        found[name] = sources, Needs(samples, batches, longest)
    return found


def example(plan: RoundPlan, work: ClientBatches) -> Batch:
    """One sample as the network sees it."""
    return plan.batch(work.to(plan.pool.y.device).slice(0, 1))


def free_bytes(device: torch.device) -> float:
    """Bytes of memory that are left on the device."""
    return float(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else math.inf


def send(t: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on the device, for which the host does not wait."""
    return t.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else t


def join(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """Tensors of the host one after the other, on the device."""
    if device.type != "cuda":
        return torch.cat([*parts])
    joined = torch.empty(sum(map(len, parts)), dtype=parts[0].dtype, pin_memory=True)
    return torch.cat([*parts], out=joined).to(device, non_blocking=True)
