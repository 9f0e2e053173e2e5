"""The CUDA engine for small networks: many clients in one kernel. Where `slots` gives every client kernels and a stream
of its own, here clients are the rows of stacked buffers; every move is vmapped over the first rows and captured as one
graph.

Jobs are sorted by length, so those still at work are the first rows; the graph is that of the next larger number of
rows, and rows without work in it are left as they are. Which batch a row sees follows from a counter on the device. A
few jobs that are much longer than the others have rows and a stream of their own, before the others: steps of few rows
leave a GPU idle.

What does not depend on a model, above all the samples, is put in place while the round before is at work.

Runs of a sweep share the rows. What differs between them must be a tensor: learning rates always are, and so become the
float settings of a method where they differ, unless a hook of it cannot work with that. Without CUDA the same rows run
without graphs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, cached_property
from typing import Any, NamedTuple, cast

import torch

from ..core import local
from ..core.algorithm import Algorithm
from ..core.local import Result
from ..core.settings import is_askews
from ..core.task import Functional
from .base import PhaseOutputs, PhaseRequest
from .jobs import Jobs, RequestJobs, longest_first, requests_of
from .row_buffers import RowBuffers
from .row_moves import RowMoves
from .sample_buffer import NO_LENGTHS, BufferFull, example, free_bytes

MAX_ROWS = 512  # rows
ACTIVATION_FACTOR = 16  # times an input's size is what a row's step takes, roughly
MEMORY_SHARE = 0.3  # of the free memory
LONG_SHARE = 0.5  # of the longest job's steps: above, a job may be one of the few that have rows of their own
STEPS_SHARE = 0.5  # of all steps: more must not be those of long jobs
LEAST_GAP = 8  # steps between the longest job and the longest of the others; with fewer, rows of their own do not pay

LONG_JOBS = "long"  # marks the buffers of the few long jobs


class JobType(NamedTuple):
    """Requests whose jobs are of one type: they share rows."""

    key: tuple[Any, ...]  # of their buffers
    requests: list[RequestJobs]
    jobs: Jobs  # all of theirs, the longest first
    differ: list[str]  # settings of the method that are not the same for all

    @property
    def phase(self) -> Algorithm:
        """The method; settings that differ are those of the first request."""
        return self.requests[0].phase


JobGroup = tuple[tuple[Any, ...], Jobs]  # jobs, and the key of the buffers whose rows they take


class Stacked:
    """Jobs of one type side by side as rows, those of several runs too; several types side by side on streams."""

    name = "stacked"

    def __init__(
        self,
        task: Functional,
        most: int = MAX_ROWS,
        least_gap: int = LEAST_GAP,
        longest: Mapping[str, int] = NO_LENGTHS,
    ) -> None:
        """`longest`: by name, the samples that batches are padded to, instead of those of the longest batch so far."""
        self.task, self.most, self.least_gap, self.longest = task, most, least_gap, longest
        self.buffers: dict[Hashable, RowBuffers] = {}
        self.needs_numbers: set[type] = set()  # methods whose hooks cannot work with a setting that is a tensor

    def run(self, requests: Sequence[PhaseRequest]) -> list[PhaseOutputs]:
        """The requests' results; where memory runs out, once more with half the rows."""
        while True:
            try:
                with_jobs = [RequestJobs(request) for request in requests]
                for request in with_jobs:
                    request.compute_numbers()
                self._run(with_jobs)
                return [request.results.outputs() for request in with_jobs]
            except torch.OutOfMemoryError:
                if self.most == 1:
                    raise
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # what is on its way still uses the memory that is given back here
            rows = max((buffers.rows for buffers in self.buffers.values()), default=self.most)
            self.most = max(1, min(self.most, rows) // 2)
            self.buffers.clear()
            torch.cuda.empty_cache()

    def prepare(self, requests: Sequence[PhaseRequest]) -> None:
        """Put the samples of these requests in place, behind all that the device has to do, where there is room."""
        for job_type in self._job_types([RequestJobs(request) for request in requests]):
            for key, jobs in self._groups(job_type, job_type.jobs):
                with suppress(BufferFull, torch.OutOfMemoryError):
                    if key in self.buffers:
                        self.buffers[key].place_samples(jobs, self.most, grow=False)

    def _run(self, requests: Sequence[RequestJobs]) -> None:
        """Train all types of jobs side by side. A type without buffers is trained alone first: this shows how much
        memory it needs, and whether its hooks accept tensors as settings.
        """
        allocated = list[tuple[JobType, JobGroup]]()
        for job_type in self._job_types(requests):
            groups = self._groups(job_type, job_type.jobs)
            if self._have_room(groups):
                allocated += [(job_type, group) for group in groups]
                continue
            try:
                self._run_alone(job_type)
            except Exception as e:  # whatever a hook makes of a tensor: no key, no attribute, no number
                if not job_type.differ or isinstance(e, torch.OutOfMemoryError):
                    raise
                self.needs_numbers.add(type(job_type.phase))
                self._run(job_type.requests)
        if allocated:
            self._run_groups(allocated)

    def _job_types(self, requests: Sequence[RequestJobs]) -> Iterator[JobType]:
        """Requests that share rows."""
        types: dict[Hashable, list[RequestJobs]] = {}
        for request in requests:
            types.setdefault(self._type_key(request), []).append(request)
        for key, alike in types.items():
            phases = [request.phase for request in alike]
            values = {name: {getattr(phase, name) for phase in phases} for name in float_settings(phases[0])}
            differ = [name for name, found in values.items() if len(found) > 1]
            same = tuple((name, *found) for name, found in values.items() if name not in differ)  # are in the graphs
            yield JobType((key, tuple(differ), same), alike, longest_first(alike), differ)

    def _type_key(self, request: RequestJobs) -> Hashable:
        """Requests with one key share rows."""
        phase, *rest = request.key()
        if type(phase) in self.needs_numbers or not reads_settings_alone(phase):
            return phase, *rest
        floats = float_settings(phase)
        return type(phase), tuple((n, v) for n, v in phase.table().items() if n not in floats), *rest

    def _run_alone(self, job_type: JobType) -> None:
        """The jobs of one type, as many at a time as there is room for."""
        size = self._rows_at_once(job_type)
        for a in range(0, len(job_type.jobs), size):
            self._run_groups([(job_type, group) for group in self._groups(job_type, job_type.jobs[a : a + size])])

    def _run_groups(self, groups: Sequence[tuple[JobType, JobGroup]]) -> None:
        """Jobs in the rows of several buffers."""
        rows = list[RowMoves]()
        for job_type, (key, jobs) in groups:
            buffers = self._buffers(key, job_type.requests[0])
            buffers.load(jobs, self.most, job_type.differ)
            rows.append(RowMoves(job_type.phase, buffers, job_type.differ))
        results = run_side_by_side(rows)
        for (_, (_, jobs)), moves, result in zip(groups, rows, results, strict=True):
            places = moves.buffers.rows_by_request
            for request, (rows_of_request, clients) in zip(requests_of(jobs), places, strict=True):
                request.results.put_rows(clients, rows_of_request, result)

    def _buffers(self, key: tuple[Any, ...], request: RequestJobs) -> RowBuffers:
        if key not in self.buffers:
            self.buffers[key] = RowBuffers(self.task, request, key[-1] is LONG_JOBS, self.longest)
        return self.buffers[key]

    def _groups(self, job_type: JobType, jobs: Jobs) -> list[JobGroup]:
        """Jobs, sorted by length, by the key of their buffers: the few long ones, and the others."""
        few = count_long([job.steps for job in jobs], self.least_gap)
        return [((*job_type.key, LONG_JOBS), jobs[:few]), (job_type.key, jobs[few:])] if few else [(job_type.key, jobs)]

    def _have_room(self, groups: Sequence[JobGroup]) -> bool:
        """Are there rows for all these jobs?"""
        return all(key in self.buffers and len(jobs) <= self.buffers[key].rows for key, jobs in groups)

    def _rows_at_once(self, job_type: JobType) -> int:
        """Rows at a time of a type of jobs for which there is no room yet."""
        first = job_type.jobs[0]
        x = example(first.request.plan, next(iter(first.batches.values()))).x
        works = (work for job in job_type.jobs for work in job.batches.values())
        longest = max(max(work.lengths(), default=1) for work in works)
        inputs = first.request.inputs
        tensors = (inputs.w, *inputs.state.values())
        states = sum(t[0].numel() if t.dim() > 1 else t.numel() for t in tensors)
        one = (ACTIVATION_FACTOR * longest * x.numel() + 12 * states) * inputs.w.element_size()
        device = inputs.w.device
        room = int(free_bytes(device) * MEMORY_SHARE / one) if device.type == "cuda" else self.most
        return max(1, min(self.most, room))


def run_side_by_side(rows: Sequence[RowMoves]) -> list[Result]:
    """The results of jobs in the rows of several buffers, which take turns; each has a stream of its own."""
    device = rows[0].buffers.device
    main = torch.cuda.current_stream(device) if device.type == "cuda" else None
    streams = [moves.buffers.stream for moves in rows if moves.buffers.stream is not None]
    for stream in streams:
        stream.wait_stream(cast(torch.cuda.Stream, main))
    for moves in rows:
        with torch.cuda.stream(moves.buffers.stream):  # nothing for None
            moves.begin()
    results, left = dict[int, Result](), {n: local.moves(moves.alg, moves.schedule) for n, moves in enumerate(rows)}
    while left:
        for n in list(left):
            with torch.cuda.stream(rows[n].buffers.stream):
                move = next(left[n], None)
                if move is not None:
                    rows[n].apply(move)
                else:
                    results[n] = rows[n].finish()
                    del left[n]
    for stream in streams:
        cast(torch.cuda.Stream, main).wait_stream(stream)
    return [results[n] for n in range(len(rows))]


def count_long(steps: Sequence[int], least_gap: int = LEAST_GAP) -> int:
    """How many of these jobs, the longest first, are so much longer that they have rows of their own."""
    few, left = 0, STEPS_SHARE * sum(steps)
    while few < len(steps) and steps[few] > LONG_SHARE * steps[0] and steps[few] <= left:
        left -= steps[few]
        few += 1
    return few if few < len(steps) and steps[few] + least_gap <= steps[0] else 0


def reads_settings_alone(phase: Algorithm) -> bool:
    """Does a method differ between two runs in its settings alone, as far as one can see?

    A number that a plug-in computes from a setting once would be the first run's.
    """
    method: type = type(phase)
    settings = {f.name for f in dataclasses.fields(cast(Any, phase))}
    return vars(phase).keys() <= settings and not derives_from_settings(method)


@cache
def derives_from_settings(method: type) -> bool:
    """Has a plug-in's class a property that is computed once?"""
    own = [vars(cls) for cls in method.__mro__ if not is_askews(cls)]
    return any(isinstance(value, cached_property) for values in own for value in values.values())


def float_settings(phase: Algorithm) -> list[str]:
    """The names of float settings that are set."""
    return [f.name for f in dataclasses.fields(cast(Any, phase)) if isinstance(getattr(phase, f.name), float)]
