"""The CUDA engine for large networks. A network that is trained one step at a time leaves a GPU idle while the host
launches its kernels one by one; so here a client's step is captured once as a graph over fixed buffers and replayed,
and many clients are at work at a time.

A *slot* has buffers of its own (the received model and state, theta, carry, a network bound to them) and a stream of
its own. A *job* is one client's phase. Jobs wait in a queue, the longest first, and are loaded into slots as they fall
free, so clients of unequal size waste nothing. A round's samples are gathered, augmented and normalised at once, in the
order in which they will be used; a step reads its batch from there by a cursor that advances in the graph, so the host
does nothing for a step but start it. Nothing waits for the device before the cohort is done.

A short batch is padded, a large one to a quarter, half, … of the usual one, and weighted, which is exact; batch norm,
whose statistics padding would pollute, runs such a batch at its own length, outside a graph. Without CUDA the same
slots run without graphs: slowly, and with the same numbers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..core import local
from ..core.algorithm import Algorithm
from ..core.local import Look, Move, Progress, Result
from ..core.task import Bound
from ..core.types import Batch, Client, State
from ..data.federation import ClientBatches
from .base import PhaseInputs, PhaseOutputs, PhaseRequest
from .graphs import GraphCache, contiguous_copy, copy_tensors, overwrite, progress_tensors
from .jobs import Job, Jobs, RequestJobs, by_name, longest_first
from .sample_buffer import NO_LENGTHS, SampleBuffer, example, fill_buffers, free_bytes

MAX_SLOTS = 32  # slots; more gained nothing on an H200, LeNet5 to ResNet18
PADDED_LENGTHS = 4  # lengths, to one of which a large batch is padded
LARGE_BATCH = 2**19  # numbers of a batch: with fewer, changing to another graph takes longer than padding
SAMPLES_SHARE = 0.2  # of the free memory that the samples of the jobs in place may take
MOST_BYTES = 8 * 2**30  # that they may take


class BatchRef(NamedTuple):
    """The k-th batch of a job under a name: "train", or that of a look."""

    name: str
    k: int


class JobSchedule:
    """One job's batches in order."""

    def __init__(self, batches: dict[str, ClientBatches], first: dict[str, int]) -> None:
        self.first = first  # by name, the row of the sample buffer that holds the job's first batch
        self.lengths = {name: work.lengths() for name, work in batches.items()}

    def batches(self) -> Iterator[BatchRef]:
        return (BatchRef("train", k) for k in range(len(self.lengths["train"])))

    def chunks(self, name: str, step: int | None) -> Iterator[BatchRef]:
        return (BatchRef(name, k) for k in range(len(self.lengths[name])))

    def length(self, batch: BatchRef) -> int:
        return self.lengths[batch.name][batch.k]

    def share(self, look: Look[BatchRef]) -> float:
        steps = None if look.step is None else len(self.lengths["train"])
        return local.look_share(self.length(look.chunk), sum(self.lengths[look.name]), steps)


@cache
def stream_of_slot(device: torch.device, n: int) -> torch.cuda.Stream | None:
    """The stream of the n-th slot: the same for all, as cuBLAS keeps memory for every stream it was used on."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


class Slot:
    """Fixed buffers, a network bound to some of them, a stream, and the graphs of the moves captured so far."""

    def __init__(self, alg: Algorithm, task: Bound, buffers: dict[str, SampleBuffer], never_pad: bool, n: int) -> None:
        self.alg, self.task, self.buffers, self.never_pad = alg, task, buffers, never_pad
        self.device = task.space.device
        self.stream = stream_of_slot(self.device, n)
        self.graphs = GraphCache(self.device, self.stream)
        self.cursor = {name: torch.zeros(1, dtype=torch.long, device=self.device) for name in buffers}
        self.share = torch.zeros((), dtype=task.space.dtype, device=self.device)
        self._client: Client | None = None
        self._progress: Progress | None = None
        self._result: Result | None = None

    def follow(self, main: torch.cuda.Stream | None) -> None:
        """Let what this slot does next come after all that was asked of the main stream."""
        if self.stream is not None and main is not None:
            self.stream.wait_stream(main)

    def enter(self) -> None:
        """Send what the host asks for from now on to this slot's stream."""
        if self.stream is not None:
            torch.cuda.set_stream(self.stream)

    def load(self, inputs: PhaseInputs, numbers: Tensor, i: int) -> None:
        """Put a client's view in place: tensors are copied, numbers that differ between clients become tensors."""
        w, buffers = (t if t.dim() == 1 else t[i] for t in (inputs.w, inputs.buffers))
        own = [v[i] for state in (inputs.memory, inputs.state, inputs.carry) for v in state.values()]
        rows = [w, buffers, *inputs.server.values(), *own]
        if self._client is None:
            self.numbers, self.rows = contiguous_copy(numbers[i]), [contiguous_copy(row) for row in rows]
            self._client = self._view(inputs)
        copy_tensors([self.numbers, *self.rows], [numbers[i], *rows])

    def _view(self, inputs: PhaseInputs) -> Client:
        """The client whose tensors are this slot's buffers."""
        w, buffers, *entries = self.rows
        rest = iter(entries)
        names = ((*inputs.server, *inputs.memory), inputs.state, inputs.carry)
        server, state, carry = (State((n, next(rest)) for n in part) for part in names)
        return Client(
            w=w,
            buffers=buffers,
            server=server,
            state=state,
            carry=carry,
            parts=inputs.parts,
            momentum=inputs.momentum,
            decay=inputs.decay,
            clip=inputs.clip,
            **by_name(self.numbers),
        )

    @property
    def client(self) -> Client:
        assert self._client is not None
        return self._client

    @property
    def progress(self) -> Progress:
        assert self._progress is not None
        return self._progress

    # moves ------------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        if self._progress is None:
            new = local.begin(self.alg, self.client)
            carry = {n: contiguous_copy(v) for n, v in new.carry.items()}
            self._progress = Progress(contiguous_copy(new.theta), carry, contiguous_copy(new.loss_sum))
        self._replay("begin", lambda: overwrite(self.progress, local.begin(self.alg, self.client)))

    def finish(self) -> Result:
        client, progress = self.client, self.progress
        if self._result is None:
            new = local.finish(self.alg, client, progress)
            up, state = ({n: contiguous_copy(v) for n, v in part.items()} for part in (new.up, new.state))
            self._result = new._replace(up=up, state=state, loss=contiguous_copy(new.loss))
        result = self._result

        def body() -> None:
            new = local.finish(self.alg, client, progress)
            to = [*result.up.values(), *result.state.values(), result.loss]
            copy_tensors(to, [*(new.up[n] for n in result.up), *(new.state[n] for n in result.state), new.loss])

        self._replay("finish", body)
        return result._replace(theta=progress.theta, carry=progress.carry)

    def apply(self, move: Move[BatchRef], schedule: JobSchedule) -> None:
        """One step or look."""
        name, k = batch = move.chunk if isinstance(move, Look) else move.batch
        if k == 0:
            self.cursor[name].fill_(schedule.first[name])
        if isinstance(move, Look):
            self.share.fill_(schedule.share(move))
        length, buffer = schedule.length(batch), self.buffers[name]
        padded = buffer.padded_length(length, PADDED_LENGTHS if buffer.batch_numbers >= LARGE_BATCH else 1)
        weighted = padded != length
        if self.never_pad and weighted:  # at its own length, outside of a graph, as there may be many lengths
            self._move(move, name, length, weighted=False)
        else:
            self._replay((name, padded, weighted), lambda: self._move(move, name, padded, weighted))

    def _move(self, move: Move[BatchRef], name: str, length: int, weighted: bool) -> None:
        """A step or look on the batch at the cursor, which moves on."""
        data = self._batch(name, length, weighted)
        if isinstance(move, Look):
            new = local.look(name, self.task, self.progress, data, self.share)
        else:
            new = local.step(self.alg, self.task, self.client, self.progress, data)
        overwrite(self.progress, new)
        self.cursor[name].add_(1)

    def _batch(self, name: str, length: int, weighted: bool) -> Batch:
        """The batch at the cursor."""
        buffer, cursor = self.buffers[name], self.cursor[name]
        places = buffer.rows.index_select(0, cursor)[0, :length]
        weight = buffer.weight.index_select(0, cursor)[0, :length] if weighted else None
        return Batch(buffer.inputs(places), buffer.y[places], weight)

    def _replay(self, key: Hashable, body: Callable[[], None]) -> None:
        changed = lambda: [*(progress_tensors(self._progress) if self._progress else ()), *self.cursor.values()]
        self.graphs.replay(key, body, changed)


class SlotPool:
    """The slots of one type of job, and the sample buffers that their graphs read from."""

    def __init__(
        self, make: Callable[[], Bound], never_pad: bool, channels_last: bool, longest: Mapping[str, int]
    ) -> None:
        self.make, self.never_pad, self.channels_last, self.longest = make, never_pad, channels_last, longest
        self.buffers: dict[str, SampleBuffer] = {}
        self.slots: list[Slot] = []
        self.idle: list[Slot] = []
        self.slot_bytes = 0.0

    def place_samples(self, jobs: Jobs) -> list[JobSchedule]:
        """Put the jobs' samples into the buffers; returns each job's schedule."""
        grown, first = fill_buffers(self.buffers, jobs, self.channels_last, longest=self.longest)
        if grown:
            self.slots, self.idle = [], []  # their graphs read from the old buffers
        rows = ({name: begins[n] for name, begins in first.items()} for n in range(len(jobs)))
        return [JobSchedule(job.batches, row) for job, row in zip(jobs, rows, strict=True)]

    def slot(self, alg: Algorithm, device: torch.device, n: int) -> Slot | None:
        """A slot that is free, or a new one, the n-th of all, if memory has room for it."""
        if self.idle:
            return self.idle.pop()
        if self.slots and free_bytes(device) < 1.2 * self.slot_bytes:
            return None
        self.slots.append(Slot(alg, self.make(), self.buffers, self.never_pad, n))
        return self.slots[-1]


class QueuedJob(NamedTuple):
    """A job that waits for a slot."""

    pool: SlotPool
    job: Job
    schedule: JobSchedule


class RunningJob(NamedTuple):
    """A job in its slot, and its moves that are left."""

    queued: QueuedJob
    slot: Slot
    moves: Iterator[Move[BatchRef]]


class Slots:
    """Jobs from a queue, several at a time; those of several runs share it."""

    name = "slots"

    def __init__(
        self,
        make: Callable[[], Bound],
        never_pad: bool,
        most: int = MAX_SLOTS,
        channels_last: bool = False,
        longest: Mapping[str, int] = NO_LENGTHS,
    ) -> None:
        """`never_pad`: batches must not be padded; `channels_last`: inputs lie channels-last; `longest`: by name, the
        samples that batches are padded to, instead of those of the longest batch so far.
        """
        self.make, self.never_pad, self.most, self.channels_last = make, never_pad, most, channels_last
        self.longest = longest
        self.pools: dict[Hashable, SlotPool] = {}

    def run(self, requests: Sequence[PhaseRequest]) -> list[PhaseOutputs]:
        """The requests' results; where memory runs out, once more with half the slots."""
        while True:
            try:
                return self._run(requests)
            except torch.OutOfMemoryError:
                if self.most == 1:
                    raise
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # what is on its way still uses the memory that is given back here
            self.most = max(1, min(self.most, self._count() or self.most) // 2)
            self.pools.clear()
            torch.cuda.empty_cache()

    def _count(self) -> int:
        return sum(len(pool.slots) for pool in self.pools.values())

    def _run(self, requests: Sequence[PhaseRequest]) -> list[PhaseOutputs]:
        with_jobs = [RequestJobs(request) for request in requests]
        for request in with_jobs:
            request.compute_numbers()  # on the main stream: of one slot's stream, others would read them too early
        queue = deque(longest_first(with_jobs))
        while queue:
            self._run_jobs(self._next_jobs(queue))
        return [request.results.outputs() for request in with_jobs]

    def _next_jobs(self, queue: deque[Job]) -> deque[QueuedJob]:
        """As many jobs as memory has room for their samples, with these put in place; the longest first."""
        x = example(queue[0].request.plan, next(iter(queue[0].batches.values()))).x
        room = min(free_bytes(x.device) * SAMPLES_SHARE, MOST_BYTES) / (x.element_size() * x.numel())
        jobs, samples = list[Job](), 0
        while queue and (not jobs or samples <= room):
            job = queue.popleft()
            samples += sum(len(work.places) for work in job.batches.values())
            jobs.append(job)
        waiting = list[QueuedJob]()
        for key in dict.fromkeys(job.request.key() for job in jobs):
            pool = self.pools.setdefault(key, SlotPool(self.make, self.never_pad, self.channels_last, self.longest))
            alike = [job for job in jobs if job.request.key() == key]
            schedules = pool.place_samples(alike)
            waiting += [QueuedJob(pool, job, schedule) for job, schedule in zip(alike, schedules, strict=True)]
        return deque(sorted(waiting, key=lambda queued: -queued.job.steps))

    def _run_jobs(self, waiting: deque[QueuedJob]) -> None:
        """Keep the slots busy until no job is left: one move of each at a time."""
        device = waiting[0].job.request.numbers.device
        main = torch.cuda.current_stream(device) if device.type == "cuda" else None
        running, used = list[RunningJob](), set[Slot]()
        try:
            while waiting or running:
                while waiting and len(running) < self.most:
                    pool, before = waiting[0].pool, free_bytes(device)
                    first = not pool.slots
                    with torch.cuda.stream(main):  # which the slot follows: what is new in it is filled there
                        slot = pool.slot(waiting[0].job.request.phase, device, self._count() % MAX_SLOTS)
                    if slot is None:
                        break
                    if slot not in used:
                        slot.follow(main)
                        used.add(slot)
                    running.append(start(waiting.popleft(), slot))
                    if first:
                        advance(running, main)
                        pool.slot_bytes = before - free_bytes(device)
                advance(running, main)
        finally:
            if main is not None:
                torch.cuda.set_stream(main)
                for stream in (slot.stream for slot in used if slot.stream is not None):
                    main.wait_stream(stream)


def start(queued: QueuedJob, slot: Slot) -> RunningJob:
    """Load a job into a slot and begin it."""
    request = queued.job.request
    slot.enter()
    slot.load(request.inputs, request.numbers, queued.job.i)
    slot.begin()
    return RunningJob(queued, slot, local.moves(request.phase, queued.schedule))


def advance(running: list[RunningJob], main: torch.cuda.Stream | None) -> None:
    """One move of every running job; those without another are finished and leave their slots."""
    for entry in list(running):
        queued, slot, moves = entry
        slot.enter()
        move = next(moves, None)
        if move is not None:
            slot.apply(move, queued.schedule)
            continue
        queued.job.request.results.put(queued.job.i, slot.finish(), main)
        queued.pool.idle.append(slot)
        running.remove(entry)
