"""The CUDA engine for small networks: many clients in one kernel. Where `slots` gives every client kernels and a stream
of its own, here clients are the rows of stacked buffers; every move is vmapped over the first rows and captured as one
graph.

Jobs are sorted by length, so those still at work are the first rows; the graph is that of the next larger number of
rows, and rows without work in it are left as they are. Which batch a row sees follows from a counter on the device. A
few jobs that are much longer than the others have rows of their own, which go ahead on a stream of their own: steps of
few rows leave a GPU idle.

What does not depend on a model, above all the samples, is put in place while the round before is at work.

Runs of a sweep share the rows. What differs between them must be a tensor: learning rates always are, and so become the
float settings of a method where they differ, unless a hook of it cannot work with that. Without CUDA the same rows run
without graphs.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from ..core import hooks, local
from ..core.algorithm import Algorithm
from ..core.differentiate import GradientResult, differentiate_rows, value_and_buffers
from ..core.local import Look, Move, Progress, Result
from ..core.task import Functional
from ..core.types import Batch, Client, State
from ..data.federation import ClientBatches
from ..kernels.cuda.gather import Cursor, gather
from ..kernels.cuda.rows import real_samples
from .base import PhaseOutputs, PhaseRequest
from .graphs import GraphCache, overwrite, progress_tensors
from .jobs import ClientJobs, Jobs
from .sample_buffer import BufferFull, SampleBuffer, example, fill_buffers, free_bytes, send

MOST = 512  # rows
PARTS = 2  # lengths, to one of which a batch is padded
DEEP = 16  # times an input's size is what a row's step takes, roughly
SHARE = 0.3  # of the free memory
LONG = 0.5  # of the longest job's steps: above, a job may be one of the few that go ahead
FEW = 0.5  # of all steps: more must not be those of jobs that go ahead
SPARED = 8  # steps that the others must have less than the longest: fewer are done before two lots are on their way

AHEAD = "ahead"  # marks the buffers of jobs that go ahead

NUMBERS = 7  # columns of ClientJobs.numbers

LengthTable = np.ndarray[Any, np.dtype[np.int64]]
Mask = np.ndarray[Any, np.dtype[np.bool_]]


def graph_rows(n: int) -> int:
    """The next number of rows that graphs are captured for: 1, 2, 3, 4, 6, 8, 10, … 32, 36, … 64, 72, …"""
    step = 1 << max(0, (n - 1).bit_length() - (2 if n <= 8 else 3 if n <= 16 else 4))
    return -(-n // step) * step


class LoadedJob(NamedTuple):
    """The job in a row: of which request, which client, and its batches."""

    owner: int
    client: int
    batches: list[ClientBatches]

    def same(self, other: LoadedJob) -> bool:
        """The same client with the very same batches?"""
        pairs = zip(self.batches, other.batches, strict=True)
        return self[:2] == other[:2] and len(self.batches) == len(other.batches) and all(a is b for a, b in pairs)


class RowBuffers:
    """Stacked buffers for one kind of job, and the graphs of the moves on their first rows."""

    def __init__(self, task: Functional, owner: ClientJobs, ahead: bool = False) -> None:
        self.task, inputs = task, owner.inputs
        self.names = [list(state) for state in (inputs.server, inputs.memory, inputs.state, inputs.carry)]
        self.parts, self.fixed = inputs.parts, (inputs.momentum, inputs.decay, inputs.clip)  # the same for this kind
        self.device, self.dtype = inputs.w.device, inputs.w.dtype
        priority = -1 if ahead else 0  # negative: before others
        cuda = self.device.type == "cuda"
        self.stream = torch.cuda.Stream(self.device, priority) if cuda else None  # type: ignore[no-untyped-call]
        self.samples: dict[str, SampleBuffer] = {}
        self.rows = self.usual = 0  # rows there are, and jobs of the first round
        self.progress: Progress | None = None
        self.result: dict[int, Result] = {}
        self.loaded: list[LoadedJob] = []

    def allocate(self, rows: int) -> None:
        """Make buffers for so many rows; what was captured over smaller ones is forgotten."""
        self.rows, self.progress, self.result = rows, None, {}
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
        owners = distinct_owners(jobs)
        number = {id(owner): n for n, owner in enumerate(owners)}
        loaded = [LoadedJob(number[id(owner)], i, list(owner.batches[i].values())) for owner, i in jobs]
        if len(loaded) == len(self.loaded) and all(a.same(b) for a, b in zip(loaded, self.loaded, strict=True)):
            return
        self.loaded = []
        if not grow and len(jobs) > self.rows:
            raise BufferFull
        grown, first = fill_buffers(self.samples, jobs, grow=grow)
        if grown or len(jobs) > self.rows:
            self.allocate(min(most, max(graph_rows(len(jobs)), self.rows)))
        self._place_cursors(jobs, owners, loaded, first)
        self.loaded = loaded

    def _place_cursors(
        self, jobs: Jobs, owners: list[ClientJobs], loaded: list[LoadedJob], first: dict[str, list[int]]
    ) -> None:
        """Where each row's batches are, and which rows and clients belong together, sent to the device at once."""
        begins = np.cumsum([0, *(len(owner.batches) for owner in owners)]).tolist()
        owner_of = [job.owner for job in loaded]
        job_of = [begins[job.owner] + job.client for job in loaded]
        order = sorted(range(len(jobs)), key=lambda row: loaded[row][:2])  # by request and client
        counts = [[owner.batches[i][name].batches for owner, i in jobs] for name in first]
        lasts = [
            [a + max(b - 1, 0) for a, b in zip(begin, count, strict=True)]
            for begin, count in zip(first.values(), counts, strict=True)
        ]
        lists = [owner_of, job_of, order, [jobs[row][1] for row in order], *first.values(), *lasts, *counts]
        self.owner_of, self.job_of, rows, clients, *rest = send(torch.tensor(lists), self.device).unbind()
        sizes = [owner_of.count(n) for n in range(len(owners))]
        self.back = list(zip(torch.split(rows, sizes), torch.split(clients, sizes), strict=True))
        for n, name in enumerate(first):
            for part, row in zip((self.first, self.last, self.count), rest[n :: len(first)], strict=True):
                part[name][: len(jobs)].copy_(row)
            self.count[name][len(jobs) :].zero_()

    def load(self, jobs: Jobs, most: int, floats: Sequence[str]) -> None:
        """Put all that the jobs begin with in place: samples, models, states, numbers and the settings that differ."""
        self.place_samples(jobs, most)
        owners, n = distinct_owners(jobs), len(jobs)
        sources, picks = self._sources(owners)
        self.given = self.given or [t.new_zeros((self.rows, *t.shape[1:])) for t in sources]
        for buffer, source, pick in zip(self.given, sources, picks, strict=True):
            torch.index_select(source, 0, pick, out=buffer[:n])
        numbers = torch.cat([owner.numbers for owner in owners])
        if self.numbers.shape[1] != NUMBERS + len(floats):
            self.numbers = numbers.new_zeros((self.rows, NUMBERS + len(floats)))
        self.numbers[:n, :NUMBERS] = numbers[self.job_of]
        if floats:
            values = [[float(getattr(owner.phase, name)) for name in floats] for owner in owners]
            sent = send(torch.tensor(values, dtype=numbers.dtype), self.device)
            self.numbers[:n, NUMBERS:] = sent[self.owner_of]

    def _sources(self, owners: Sequence[ClientJobs]) -> tuple[list[Tensor], list[Tensor]]:
        """What rows are picked from, and by which index: w, buffers, server, memory, state, carry."""
        inputs = [owner.inputs for owner in owners]
        sources, picks = list[Tensor](), list[Tensor]()
        for name in ("w", "buffers"):
            each = [getattr(one, name) for one in inputs]
            shared = each[0].dim() == 1
            sources.append(torch.stack(each) if shared else torch.cat(each))
            picks.append(self.owner_of if shared else self.job_of)
        for n in inputs[0].server:
            sources.append(torch.stack([one.server[n] for one in inputs]))
            picks.append(self.owner_of)
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


class StackedSchedule:
    """The batches of jobs in rows, the longest first."""

    def __init__(self, jobs: Jobs) -> None:
        self.jobs = jobs
        self.lengths = {name: self._table(name) for name in jobs[0][0].batches[0]}  # rows × batches, 0: none
        self.count = {name: (table > 0).sum(1) for name, table in self.lengths.items()}
        self.extents = {name: extents(table) for name, table in self.lengths.items()}

    def _table(self, name: str) -> LengthTable:
        works = [owner.batches[i][name] for owner, i in self.jobs]
        lengths = {id(work): work.lengths() for work in works}  # runs may share them
        table = np.zeros((len(works), max(map(len, lengths.values()))), dtype=np.int64)
        for row, work in enumerate(works):
            table[row, : len(lengths[id(work)])] = lengths[id(work)]
        return table

    def batches(self) -> Iterator[StackedBatch]:
        return (StackedBatch("train", k, None) for k in range(self.lengths["train"].shape[1]))

    def chunks(self, name: str, step: int | None) -> Iterator[StackedBatch]:
        return (StackedBatch(name, k, step) for k in range(self.count[name][self._takes(step)].max()))

    def _takes(self, step: int | None) -> Mask:
        """Which rows take this step."""
        return np.ones(len(self.jobs), dtype=bool) if step is None else self.count["train"] > step

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
        steps = 1 if batch.step is None else self.count["train"][:rows]
        shares = self.active(batch)[:rows] * table[:, batch.k] / table.sum(1) / steps
        return cast(list[float], shares.tolist())


class RowMoves:
    """The moves of one method's jobs in the rows of a buffer."""

    def __init__(self, alg: Algorithm, buffers: RowBuffers, schedule: StackedSchedule, floats: Sequence[str]) -> None:
        self.alg, self.buffers, self.schedule, self.floats = alg, buffers, schedule, floats
        self.task = buffers.task
        self.rows = min(graph_rows(len(schedule.jobs)), buffers.rows)

    def method(self, numbers: Tensor) -> Algorithm:
        """The method with the settings of this row."""
        if not self.floats:
            return self.alg
        other = copy.copy(self.alg)
        for name, value in zip(self.floats, numbers[NUMBERS:].unbind(), strict=True):
            object.__setattr__(other, name, value)
        return other

    def begin(self) -> None:
        buffers, m = self.buffers, self.rows

        def begin() -> Progress:
            one = lambda given, numbers: local.begin(self.method(numbers), buffers.client(given, numbers))
            return vmap(one)(*buffers.first_rows(m))

        if buffers.progress is None:
            buffers.progress = buffers.room_for(begin())
        for counter in buffers.counter.values():
            counter.zero_()
        buffers.graphs.replay(("begin", m), lambda: overwrite(buffers.first_progress(m), begin()), buffers.changed)

    def finish(self) -> Result:
        buffers, m = self.buffers, self.rows

        def one(given: list[Tensor], numbers: Tensor, progress: Progress) -> Result:
            return local.finish(self.method(numbers), buffers.client(given, numbers), progress)

        def body() -> None:
            buffers.result[m] = vmap(one)(*buffers.first_rows(m), buffers.first_progress(m))

        buffers.graphs.replay(("finish", m), body, buffers.changed)
        return buffers.result[m]

    def apply(self, move: Move[StackedBatch]) -> None:
        """One step or look of the rows that have the batch."""
        buffers, batch = self.buffers, move.chunk if isinstance(move, Look) else move.batch
        extent = self.schedule.extent(batch)
        if not extent.rows:
            return
        last = extent.last
        whole = buffers.samples[batch.name].rows.shape[1]
        part = max(1, -(-whole // PARTS))
        length = min(whole, -(-extent.longest // part) * part)
        usual = last == len(self.schedule.jobs) == buffers.usual
        m = last if usual else min(graph_rows(last), buffers.rows)
        padded, every = extent.shortest < length, extent.rows == m
        if batch.k == 0:
            buffers.counter[batch.name].zero_()
        if isinstance(move, Look):
            shares = torch.tensor(self.schedule.shares(batch, last), dtype=buffers.share.dtype)
            buffers.share[:last].copy_(send(shares, buffers.device))
        key = (batch.name, batch.step is None, m, length, padded, every)
        buffers.graphs.replay(key, lambda: self._move(move, batch, m, length, padded, every), buffers.changed)

    def _move(
        self, move: Move[StackedBatch], batch: StackedBatch, m: int, length: int, padded: bool, every: bool
    ) -> None:
        """A move of the first m rows on batches of `length` samples; rows without a batch stay as they are."""
        buffers, name = self.buffers, batch.name
        limit = buffers.cursor(name if batch.step is None else "train", m)
        data = gather(buffers.samples[name], buffers.cursor(name, m), limit, length)
        given, numbers = buffers.first_rows(m)
        old = buffers.first_progress(m)
        extra = {"weight": data.weight} if padded else {}
        if isinstance(move, Look):
            extra["share"] = buffers.share[:m]
        rows = (given, numbers, old, data.x, data.y, extra)
        with real_samples(data.real if padded or not every else None, length):
            new = self._vmapped(move, rows)
        overwrite(old, new, None if every else data.active)
        buffers.counter[name].add_(1)

    def _vmapped(self, move: Move[StackedBatch], rows: tuple[Any, ...]) -> Progress:
        """The new progress of all rows: first their gradients, then the move."""
        known = self._gradients(move, rows)

        def one(
            known: tuple[Tensor, ...],
            given: list[Tensor],
            numbers: Tensor,
            at: Progress,
            x: Tensor,
            y: Tensor,
            extra: State,
        ) -> Progress:
            gradient, batch = GradientResult(*known) if known else None, Batch(x, y, extra.get("weight"))
            if isinstance(move, Look):
                return local.look(move.name, self.task, at, batch, extra["share"], gradient)
            client = self.buffers.client(given, numbers)
            return local.step(self.method(numbers), self.task, client, at, batch, gradient)

        return vmap(one)(known, *rows)

    def _gradients(self, move: Move[StackedBatch], rows: tuple[Any, ...]) -> tuple[Tensor, ...]:
        """Gradients, values and buffers of all rows, where the move follows from them."""
        if isinstance(move, Look) and move.name != "gradient":
            return ()

        def evaluate(
            theta: Tensor, given: list[Tensor], numbers: Tensor, at: Progress, x: Tensor, y: Tensor, extra: State
        ) -> tuple[Tensor, Tensor]:
            batch = Batch(x, y, extra.get("weight"))
            client = self.buffers.client(given, numbers)._replace(carry=at.carry)
            if isinstance(move, Look):
                objective = lambda u: self.task.loss(u, batch)
            else:
                objective = lambda u: hooks.loss(self.method(numbers), self.task, u, batch, client)
            return value_and_buffers(self.task, objective, at.carry["buffers"], theta)

        return differentiate_rows(evaluate, rows[2].theta, *rows)


class Kind(NamedTuple):
    """Requests whose jobs share rows."""

    key: tuple[Any, ...]  # of their buffers
    owners: list[ClientJobs]
    jobs: Jobs  # all of theirs, the longest first
    differ: list[str]  # settings of the method that are not the same for all

    @property
    def phase(self) -> Algorithm:
        """The method; settings that differ are those of the first request."""
        return self.owners[0].phase


Lot = tuple[tuple[Any, ...], Jobs]  # jobs, and the key of the buffers whose rows they take


class Stacked:
    """Jobs of one kind side by side as rows, those of several runs too; several kinds side by side on streams."""

    name = "stacked"

    def __init__(self, task: Functional, most: int = MOST, spared: int = SPARED) -> None:
        self.task, self.most, self.spared = task, most, spared
        self.buffers: dict[Hashable, RowBuffers] = {}
        self.rigid: set[type] = set()  # methods whose hooks cannot work with a setting that is a tensor

    def run(self, requests: Sequence[PhaseRequest]) -> list[PhaseOutputs]:
        """The requests' results; where memory runs out, once more with half the rows."""
        while True:
            try:
                owners = [ClientJobs(request) for request in requests]
                for owner in owners:
                    owner.compute_numbers()
                self._run(owners)
                return [owner.results.outputs() for owner in owners]
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
        for kind in self._kinds([ClientJobs(request) for request in requests]):
            for key, jobs in self._lots(kind, kind.jobs):
                with suppress(BufferFull, torch.OutOfMemoryError):
                    if key in self.buffers:
                        self.buffers[key].place_samples(jobs, self.most, grow=False)

    def _run(self, owners: Sequence[ClientJobs]) -> None:
        """Kinds side by side; but one for which there is no room yet by itself, as its memory is found there and its
        hooks are tried.
        """
        roomy = list[Kind]()
        for kind in self._kinds(owners):
            if self._has_room(kind):
                roomy.append(kind)
                continue
            try:
                self._run_alone(kind)
            except (TypeError, ValueError, RuntimeError) as e:
                if not kind.differ or isinstance(e, torch.OutOfMemoryError):
                    raise
                self.rigid.add(type(kind.phase))
                self._run(kind.owners)
        if roomy:
            self._run_lots([(kind, lot) for kind in roomy for lot in self._lots(kind, kind.jobs)])

    def _kinds(self, owners: Sequence[ClientJobs]) -> Iterator[Kind]:
        """Requests that share rows."""
        kinds: dict[Hashable, list[ClientJobs]] = {}
        for owner in owners:
            kinds.setdefault(self._kind(owner), []).append(owner)
        for key, alike in kinds.items():
            values = {name: {getattr(owner.phase, name) for owner in alike} for name in float_settings(alike[0].phase)}
            differ = [name for name, found in values.items() if len(found) > 1]
            same = tuple((name, *found) for name, found in values.items() if name not in differ)  # are in the graphs
            yield Kind((key, tuple(differ), same), alike, longest_first(alike), differ)

    def _kind(self, owner: ClientJobs) -> Hashable:
        """Requests of one kind share rows."""
        phase, *rest = owner.key()
        if type(phase) in self.rigid:
            return phase, *rest
        floats = float_settings(phase)
        return type(phase), tuple((n, v) for n, v in phase.table().items() if n not in floats), *rest

    def _run_alone(self, kind: Kind) -> None:
        """The jobs of one kind, as many at a time as there is room for."""
        size = self._rows_at_once(kind)
        for a in range(0, len(kind.jobs), size):
            self._run_lots([(kind, lot) for lot in self._lots(kind, kind.jobs[a : a + size])])

    def _run_lots(self, lots: Sequence[tuple[Kind, Lot]]) -> None:
        """Jobs in the rows of several buffers."""
        rows = list[RowMoves]()
        for kind, (key, jobs) in lots:
            buffers = self._buffers(key, kind.owners[0])
            buffers.load(jobs, self.most, kind.differ)
            buffers.usual = buffers.usual or len(jobs)
            rows.append(RowMoves(kind.phase, buffers, StackedSchedule(jobs), kind.differ))
        for moves, result in zip(rows, run_side_by_side(rows), strict=True):
            for owner, (places, clients) in zip(distinct_owners(moves.schedule.jobs), moves.buffers.back, strict=True):
                owner.results.put_rows(clients, places, result)

    def _buffers(self, key: tuple[Any, ...], owner: ClientJobs) -> RowBuffers:
        if key not in self.buffers:
            self.buffers[key] = RowBuffers(self.task, owner, ahead=key[-1] is AHEAD)
        return self.buffers[key]

    def _lots(self, kind: Kind, jobs: Jobs) -> list[Lot]:
        """Jobs, sorted by length, by the key of their buffers: the few that go ahead, and the others."""
        few = count_ahead([steps_of(*job) for job in jobs], self.spared)
        return [((*kind.key, AHEAD), jobs[:few]), (kind.key, jobs[few:])] if few else [(kind.key, jobs)]

    def _has_room(self, kind: Kind) -> bool:
        """Are there rows for all jobs of this kind?"""
        lots = self._lots(kind, kind.jobs)
        return all(key in self.buffers and len(jobs) <= self.buffers[key].rows for key, jobs in lots)

    def _rows_at_once(self, kind: Kind) -> int:
        """Rows at a time of a kind for which there is no room yet."""
        owner, i = kind.jobs[0]
        x = example(owner.plan, next(iter(owner.batches[i].values()))).x
        longest = max(max(work.lengths(), default=1) for owner, i in kind.jobs for work in owner.batches[i].values())
        tensors = (owner.inputs.w, *owner.inputs.state.values())
        states = sum(t[0].numel() if t.dim() > 1 else t.numel() for t in tensors)
        one = (DEEP * longest * x.numel() + 12 * states) * owner.inputs.w.element_size()
        device = owner.inputs.w.device
        return max(1, min(self.most, int(free_bytes(device) * SHARE / one) if device.type == "cuda" else self.most))


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


def count_ahead(steps: Sequence[int], spared: int = SPARED) -> int:
    """How many of these jobs, the longest first, are so much longer that they go ahead of the others."""
    few = sum(n > LONG * steps[0] for n in steps)
    while sum(steps[:few]) > FEW * sum(steps):
        few -= 1
    return few if few < len(steps) and steps[few] + spared <= steps[0] else 0


def longest_first(owners: Sequence[ClientJobs]) -> Jobs:
    """All jobs of some requests, those with most steps first."""
    jobs = [(owner, i) for owner in owners for i in range(len(owner.batches))]
    return sorted(jobs, key=lambda job: -steps_of(*job))


def distinct_owners(jobs: Jobs) -> list[ClientJobs]:
    """The requests of some jobs, in the order of their first ones."""
    return list({id(owner): owner for owner, _ in jobs}.values())


def steps_of(owner: ClientJobs, i: int) -> int:
    return owner.plan.train[i].batches


def float_settings(phase: Algorithm) -> list[str]:
    """The names of float settings that are set."""
    return [f.name for f in dataclasses.fields(cast(Any, phase)) if isinstance(getattr(phase, f.name), float)]
