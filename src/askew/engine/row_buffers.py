"""The buffers of the stacked engine: clients are their rows, and the graphs of the moves are captured over them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

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
from .jobs import NUMBERS, Jobs, RequestJobs, by_name, requests_of
from .row_schedule import StackedSchedule
from .sample_buffer import BufferFull, SampleBuffer, fill_buffers, send


def graph_rows(n: int) -> int:
    """The next number of rows that graphs are captured for: 1, 2, 3, 4, 6, 8, 10, … 32, 36, … 64, 72, …"""
    step = 1 << max(0, (n - 1).bit_length() - (2 if n <= 8 else 3 if n <= 16 else 4))
    return -(-n // step) * step


class RowBuffers:
    """Stacked buffers for one type of job, and the graphs of the moves on their first rows.

    A round's jobs are first put into rows with their samples (`place_samples`, perhaps while the round before is at
    work), then with all else that they begin with (`load`). `RowMoves` takes the moves.
    """

    # made by `allocate`, a row for each job
    graphs: GraphCache
    given: list[Tensor]  # what the job was given: w, buffers, and the entries that `names` has
    numbers: Tensor  # [rows, 7 and more]: the columns of NUMBERS, and the settings of the method that differ
    first: dict[str, Tensor]  # by name, the places of its first and last batch in the sample buffer,
    last: dict[str, Tensor]
    count: dict[str, Tensor]  # and how many it has; 0: no job is in this row
    counter: dict[str, Tensor]  # by name, one number for all rows: which of their batches is next
    share: Tensor  # of a look's mean: what its next chunk adds
    # made by `place_samples`
    schedule: StackedSchedule
    request_of: Tensor  # by row, the place of the job's request among the requests
    job_of: Tensor  # by row, the place of the job among the jobs of all requests
    # of each request, the rows of its jobs and the places of their clients
    rows_by_request: list[tuple[Tensor, Tensor]]

    def __init__(self, task: Functional, request: RequestJobs, long: bool, longest: Mapping[str, int]) -> None:
        self.task, self.longest, inputs = task, longest, request.inputs
        self.names = [list(state) for state in (inputs.server, inputs.memory, inputs.state, inputs.carry)]
        # the same for all jobs of this type
        self.parts, self.momentum, self.decay, self.clip = inputs.parts, inputs.momentum, inputs.decay, inputs.clip
        self.device, self.dtype = inputs.w.device, inputs.w.dtype
        priority = -1 if long else 0  # negative: before others
        cuda = self.device.type == "cuda"
        self.stream = torch.cuda.Stream(self.device, priority) if cuda else None  # type: ignore[no-untyped-call]
        self.samples: dict[str, SampleBuffer] = {}
        self.rows = self.first_jobs = 0  # rows there are, and jobs of the first round
        self.progress: Progress | None = None
        self.result: dict[int, Result] = {}
        self.placed: list[tuple[int, ...]] = []  # by row: the request, the client, the identities of its batches
        self.placed_batches: list[dict[str, ClientBatches]] = []  # kept, or others might get their identities
        self.rule: State | None = None  # what stays of affine steps until a round ends
        phase, client = request.phase, inputs.client(0)
        self.affine = AffineRows.of(phase, client._replace(carry=local.begin(phase, client).carry))

    def allocate(self, rows: int) -> None:
        """Make buffers for so many rows; what was captured over smaller ones is forgotten."""
        self.rows, self.progress, self.result, self.rule = rows, None, {}, None
        self.graphs = GraphCache(self.device, self.stream)
        self.given = []
        self.numbers = torch.zeros((rows, len(NUMBERS)), dtype=self.dtype, device=self.device)
        self.first, self.last, self.count = (
            {name: torch.zeros(rows, dtype=torch.long, device=self.device) for name in self.samples} for _ in range(3)
        )
        self.share = self.numbers.new_zeros(rows)
        self.counter = {name: torch.zeros((), dtype=torch.long, device=self.device) for name in self.samples}

    # loading ----------------------------------------------------------------------------------------------------------

    def place_samples(self, jobs: Jobs, most: int, grow: bool = True) -> None:
        """Put the jobs' samples in place, one job to a row, unless they are there already; needs no model."""
        requests = requests_of(jobs)
        number = {id(request): n for n, request in enumerate(requests)}
        placed = [(number[id(job.request)], job.i, *map(id, job.batches.values())) for job in jobs]
        if placed == self.placed:
            return
        self.placed = []
        if not grow and len(jobs) > self.rows:
            raise BufferFull
        grown, first = fill_buffers(self.samples, jobs, grow=grow, longest=self.longest)
        if grown or len(jobs) > self.rows:
            self.allocate(min(most, max(graph_rows(len(jobs)), self.rows)))
        self._place_cursors(jobs, requests, placed, first)
        self.schedule = StackedSchedule(jobs)
        self.placed, self.placed_batches = placed, [job.batches for job in jobs]

    def _place_cursors(
        self, jobs: Jobs, requests: list[RequestJobs], placed: list[tuple[int, ...]], first: dict[str, list[int]]
    ) -> None:
        """Where each row's batches are, and which rows and clients belong together, sent to the device at once."""
        begins = np.cumsum([0, *(len(request.batches) for request in requests)]).tolist()
        order = sorted(range(len(jobs)), key=lambda row: placed[row][:2])  # by request and client
        lists: dict[object, list[int]] = {
            "request": [request for request, *_ in placed],
            "job": [begins[request] + client for request, client, *_ in placed],
            "row": order,
            "client": [jobs[row].i for row in order],
        }
        for name, begin in first.items():
            count = [job.batches[name].batches for job in jobs]
            last = [a + max(b - 1, 0) for a, b in zip(begin, count, strict=True)]
            lists |= {("first", name): begin, ("last", name): last, ("count", name): count}
        sent = dict(zip(lists, send(torch.tensor([*lists.values()]), self.device).unbind(), strict=True))
        self.request_of, self.job_of = sent["request"], sent["job"]
        sizes = [lists["request"].count(n) for n in range(len(requests))]
        rows, clients = (torch.split(sent[what], sizes) for what in ("row", "client"))
        self.rows_by_request = list(zip(rows, clients, strict=True))
        for name in first:
            for what, part in (("first", self.first), ("last", self.last), ("count", self.count)):
                part[name][: len(jobs)].copy_(sent[what, name])
            self.count[name][len(jobs) :].zero_()

    def load(self, jobs: Jobs, most: int, floats: Sequence[str]) -> None:
        """Put all that the jobs begin with in place: samples, models, states, numbers and the settings that differ."""
        self.place_samples(jobs, most)
        requests, n = requests_of(jobs), len(jobs)
        sources, picks = self._sources(requests)
        self.given = self.given or [t.new_zeros((self.rows, *t.shape[1:])) for t in sources]
        for buffer, source, pick in zip(self.given, sources, picks, strict=True):
            torch.index_select(source, 0, pick, out=buffer[:n])
        numbers = torch.cat([request.numbers for request in requests])
        columns = len(NUMBERS)
        if self.numbers.shape[1] != columns + len(floats):
            self.numbers = numbers.new_zeros((self.rows, columns + len(floats)))
        self.numbers[:n, :columns] = numbers[self.job_of]
        if floats:
            values = [[float(getattr(request.phase, name)) for name in floats] for request in requests]
            sent = send(torch.tensor(values, dtype=numbers.dtype), self.device)
            self.numbers[:n, columns:] = sent[self.request_of]
        self.first_jobs = self.first_jobs or n

    def _sources(self, requests: Sequence[RequestJobs]) -> tuple[list[Tensor], list[Tensor]]:
        """What rows are picked from, and by which index: w, buffers, server, memory, state, carry."""
        inputs = [request.inputs for request in requests]
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
        """One row's view, under vmap, of what it was given and of its numbers."""
        w, buffers, *entries = given
        rest = iter(entries)
        server, memory, state, carry = ({n: next(rest) for n in names} for names in self.names)
        return Client(
            w=w,
            buffers=buffers,
            server=server | memory,
            state=state,
            carry=carry,
            parts=self.parts,
            momentum=self.momentum,
            decay=self.decay,
            clip=self.clip,
            **by_name(numbers[: len(NUMBERS)]),
        )

    def first_rows(self, m: int) -> tuple[list[Tensor], Tensor]:
        """What the first m rows were given, and their numbers."""
        return [t[:m] for t in self.given], self.numbers[:m]

    def first_progress(self, m: int) -> Progress:
        """The progress of the first m rows."""
        assert self.progress is not None
        theta, carry, loss_sum = self.progress
        return Progress(theta[:m], {n: v[:m] for n, v in carry.items()}, loss_sum[:m])

    def allocate_progress(self, like: Progress) -> None:
        """Make rows for the jobs' progress, of the shapes of these."""
        theta, carry, loss_sum = like
        empty: Callable[[Tensor], Tensor] = lambda t: t.new_zeros((self.rows, *t.shape[1:]))
        self.progress = Progress(empty(theta), {n: empty(v) for n, v in carry.items()}, empty(loss_sum))

    def cursor(self, name: str, m: int) -> Cursor:
        """Which batch the first m rows see next."""
        return Cursor(self.first[name][:m], self.last[name][:m], self.count[name][:m], self.counter[name])

    def changed(self) -> list[Tensor]:
        """The tensors that moves change."""
        return [*(progress_tensors(self.progress) if self.progress else ()), *self.counter.values()]
