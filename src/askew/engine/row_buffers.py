"""The buffers of the stacked engine: clients are their rows, and the graphs of the moves are captured over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..core import local
from ..core.local import Progress, Result
from ..core.task import Functional
from ..core.types import Client, State
from ..data.federation import ClientBatches
from ..kernels.affine_rows import AffineRows
from ..kernels.cuda.gather import Cursor
from .graphs import GraphCache, progress_tensors
from .jobs import ClientJobs, Jobs
from .sample_buffer import BufferFull, SampleBuffer, fill_buffers, send

NUMBERS = 7  # columns of ClientJobs.numbers


def graph_rows(n: int) -> int:
    """The next number of rows that graphs are captured for: 1, 2, 3, 4, 6, 8, 10, … 32, 36, … 64, 72, …"""
    step = 1 << max(0, (n - 1).bit_length() - (2 if n <= 8 else 3 if n <= 16 else 4))
    return -(-n // step) * step


class LoadedJob(NamedTuple):
    """The job in a row: of which request, which client, and its batches."""

    request: int
    client: int
    batches: list[ClientBatches]

    def same(self, other: LoadedJob) -> bool:
        """The same client with the very same batches?"""
        pairs = zip(self.batches, other.batches, strict=True)
        return self[:2] == other[:2] and len(self.batches) == len(other.batches) and all(a is b for a, b in pairs)


class RowBuffers:
    """Stacked buffers for one type of job, and the graphs of the moves on their first rows."""

    def __init__(self, task: Functional, request_jobs: ClientJobs, long: bool = False) -> None:
        self.task, inputs = task, request_jobs.inputs
        self.names = [list(state) for state in (inputs.server, inputs.memory, inputs.state, inputs.carry)]
        self.parts, self.fixed = inputs.parts, (inputs.momentum, inputs.decay, inputs.clip)  # the same for this type
        self.device, self.dtype = inputs.w.device, inputs.w.dtype
        priority = -1 if long else 0  # negative: before others
        cuda = self.device.type == "cuda"
        self.stream = torch.cuda.Stream(self.device, priority) if cuda else None  # type: ignore[no-untyped-call]
        self.samples: dict[str, SampleBuffer] = {}
        self.rows = self.first_jobs = 0  # rows there are, and jobs of the first round
        self.progress: Progress | None = None
        self.result: dict[int, Result] = {}
        self.loaded: list[LoadedJob] = []
        self.rule: State | None = None  # what stays of affine steps until a round ends
        phase, client = request_jobs.phase, inputs.client(0)
        self.affine = AffineRows.of(phase, client._replace(carry=local.begin(phase, client).carry))

    def allocate(self, rows: int) -> None:
        """Make buffers for so many rows; what was captured over smaller ones is forgotten."""
        self.rows, self.progress, self.result, self.rule = rows, None, {}, None
        self.graphs = GraphCache(self.device, self.stream)
        self.given: list[Tensor] = []
        self.numbers = torch.zeros((rows, NUMBERS), dtype=self.dtype, device=self.device)
        self.first, self.last, self.count = (
            {name: torch.zeros(rows, dtype=torch.long, device=self.device) for name in self.samples} for _ in range(3)
        )
        self.share = self.numbers.new_zeros(rows)
        self.counter = {name: torch.zeros((), dtype=torch.long, device=self.device) for name in self.samples}

    # loading ----------------------------------------------------------------------------------------------------------

    def place_samples(self, jobs: Jobs, most: int, grow: bool = True) -> None:
        """Put the jobs' samples in place, one job to a row, unless they are there already; needs no model."""
        by_request = jobs_by_request(jobs)
        number = {id(request_jobs): n for n, request_jobs in enumerate(by_request)}
        loaded = [
            LoadedJob(number[id(request_jobs)], i, list(request_jobs.batches[i].values())) for request_jobs, i in jobs
        ]
        if len(loaded) == len(self.loaded) and all(a.same(b) for a, b in zip(loaded, self.loaded, strict=True)):
            return
        self.loaded = []
        if not grow and len(jobs) > self.rows:
            raise BufferFull
        grown, first = fill_buffers(self.samples, jobs, grow=grow)
        if grown or len(jobs) > self.rows:
            self.allocate(min(most, max(graph_rows(len(jobs)), self.rows)))
        self._place_cursors(jobs, by_request, loaded, first)
        self.loaded = loaded

    def _place_cursors(
        self, jobs: Jobs, by_request: list[ClientJobs], loaded: list[LoadedJob], first: dict[str, list[int]]
    ) -> None:
        """Where each row's batches are, and which rows and clients belong together, sent to the device at once."""
        begins = np.cumsum([0, *(len(request_jobs.batches) for request_jobs in by_request)]).tolist()
        request_of = [job.request for job in loaded]
        job_of = [begins[job.request] + job.client for job in loaded]
        order = sorted(range(len(jobs)), key=lambda row: loaded[row][:2])  # by request and client
        counts = [[request_jobs.batches[i][name].batches for request_jobs, i in jobs] for name in first]
        lasts = [
            [a + max(b - 1, 0) for a, b in zip(begin, count, strict=True)]
            for begin, count in zip(first.values(), counts, strict=True)
        ]
        lists = [request_of, job_of, order, [jobs[row][1] for row in order], *first.values(), *lasts, *counts]
        self.request_of, self.job_of, rows, clients, *rest = send(torch.tensor(lists), self.device).unbind()
        sizes = [request_of.count(n) for n in range(len(by_request))]
        self.back = list(zip(torch.split(rows, sizes), torch.split(clients, sizes), strict=True))
        for n, name in enumerate(first):
            for part, row in zip((self.first, self.last, self.count), rest[n :: len(first)], strict=True):
                part[name][: len(jobs)].copy_(row)
            self.count[name][len(jobs) :].zero_()

    def load(self, jobs: Jobs, most: int, floats: Sequence[str]) -> None:
        """Put all that the jobs begin with in place: samples, models, states, numbers and the settings that differ."""
        self.place_samples(jobs, most)
        by_request, n = jobs_by_request(jobs), len(jobs)
        sources, picks = self._sources(by_request)
        self.given = self.given or [t.new_zeros((self.rows, *t.shape[1:])) for t in sources]
        for buffer, source, pick in zip(self.given, sources, picks, strict=True):
            torch.index_select(source, 0, pick, out=buffer[:n])
        numbers = torch.cat([request_jobs.numbers for request_jobs in by_request])
        if self.numbers.shape[1] != NUMBERS + len(floats):
            self.numbers = numbers.new_zeros((self.rows, NUMBERS + len(floats)))
        self.numbers[:n, :NUMBERS] = numbers[self.job_of]
        if floats:
            values = [[float(getattr(request_jobs.phase, name)) for name in floats] for request_jobs in by_request]
            sent = send(torch.tensor(values, dtype=numbers.dtype), self.device)
            self.numbers[:n, NUMBERS:] = sent[self.request_of]

    def _sources(self, by_request: Sequence[ClientJobs]) -> tuple[list[Tensor], list[Tensor]]:
        """What rows are picked from, and by which index: w, buffers, server, memory, state, carry."""
        inputs = [request_jobs.inputs for request_jobs in by_request]
        sources, picks = list[Tensor](), list[Tensor]()
        for name in ("w", "buffers"):
            each = [getattr(one, name) for one in inputs]
            shared = each[0].dim() == 1
            sources.append(torch.stack(each) if shared else torch.cat(each))
            picks.append(self.request_of if shared else self.job_of)
        for n in inputs[0].server:
            sources.append(torch.stack([one.server[n] for one in inputs]))
            picks.append(self.request_of)
        for state in ("memory", "state", "carry"):
            for n in getattr(inputs[0], state):
                each = [getattr(one, state)[n] for one in inputs]
                sources.append(each[0] if len(each) == 1 else torch.cat(each))
                picks.append(self.job_of)
        return sources, picks

    # rows -------------------------------------------------------------------------------------------------------------

    def client(self, given: Sequence[Tensor], numbers: Tensor) -> Client:
        """One row's view, under vmap."""
        rest = iter(given[2:])
        server, memory, state, carry = ({n: next(rest) for n in names} for names in self.names)
        lr, lr0, round, steps, tau, size, coin = numbers[:NUMBERS].unbind()
        rates = (lr, lr0, *self.fixed, steps, tau, size, round, coin)
        return Client(given[0], given[1], server | memory, state, carry, self.parts, *rates)

    def first_rows(self, m: int) -> tuple[list[Tensor], Tensor]:
        """What the first m rows were given, and their numbers."""
        return [t[:m] for t in self.given], self.numbers[:m]

    def first_progress(self, m: int) -> Progress:
        """The progress of the first m rows."""
        assert self.progress is not None
        theta, carry, loss_sum = self.progress
        return Progress(theta[:m], {n: v[:m] for n, v in carry.items()}, loss_sum[:m])

    def room_for(self, some: Progress) -> Progress:
        """Empty rows like these, as many as there are."""
        theta, carry, loss_sum = some
        empty: Callable[[Tensor], Tensor] = lambda t: t.new_zeros((self.rows, *t.shape[1:]))
        return Progress(empty(theta), {n: empty(v) for n, v in carry.items()}, empty(loss_sum))

    def cursor(self, name: str, m: int) -> Cursor:
        """Which batch the first m rows see next."""
        return Cursor(self.first[name][:m], self.last[name][:m], self.count[name][:m], self.counter[name])

    def changed(self) -> list[Tensor]:
        """The tensors that moves change."""
        return [*(progress_tensors(self.progress) if self.progress else ()), *self.counter.values()]


def jobs_by_request(jobs: Jobs) -> list[ClientJobs]:
    """The requests of some jobs, in the order of their first ones."""
    return list({id(request_jobs): request_jobs for request_jobs, _ in jobs}.values())
