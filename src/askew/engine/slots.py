"""The CUDA engine. A small network leaves a GPU idle while the host launches its kernels one by one; so here a client's
step is captured once as a graph over fixed buffers and replayed, and many clients are at work at a time.

A *slot* has buffers of its own (the received model and state, w, carry, a network bound to them) and a stream of its own.
A *job* is one client's phase. Jobs wait in a queue, the longest first, and are loaded into slots as they fall free, so
clients of unequal size waste nothing. A round's samples are gathered, augmented and normalised at once, in the order in
which they will be used; a step reads its batch from there by a cursor that advances in the graph, so the host does
nothing for a step but start it. Nothing waits for the device before the cohort is done.

A short batch is padded, a large one to a quarter, half, … of the usual one, and weighted, which is exact; batch norm, whose statistics
padding would pollute, plays such a batch at its own length, outside a graph. Without CUDA the same slots are played
without graphs: slowly, and with the same numbers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from ..core.local import Progress, Result, client_moves
from ..core.task import Bound
from ..core.types import Batch, Client
from ..data.federation import ClientBatches
from .base import PhaseInputs, PhaseOutputs, PhaseRequest
from .graphs import Tape, copy, fresh, moved, renew
from .jobs import ClientJobs, Jobs, SampleBuffer, example, free, lay

MOST = 32  # slots; more gained nothing on an H200, LeNet5 to ResNet18
PARTS = 4  # a large batch is padded to one of so many lengths,
LARGE = 2**19  # numbers: of fewer, changing to another graph takes longer than what is padded
SHARE = 0.2  # of the free memory that the samples of a wave of jobs may take,
MOST_BYTES = 8 * 2**30  # and at most so many bytes

Making = Callable[[], Bound]


@cache
def stream_of(device: torch.device, n: int) -> torch.cuda.Stream | None:
    """That of the n-th slot. cuBLAS keeps some memory for every stream it was used on, so slots take those of others before them."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


class Slot:
    """Fixed buffers, a network bound to some of them, a stream, and the graphs of the moves captured so far."""

    def __init__(self, task: Bound, feeds: dict[str, SampleBuffer], even: bool, n: int) -> None:
        self.task, self.feeds, self.even = task, feeds, even
        self.device = task.space.device
        self.stream = stream_of(self.device, n)
        self.tape = Tape(self.device, self.stream)
        self.cursor = {name: torch.zeros(1, dtype=torch.long, device=self.device) for name in feeds}
        self.share = torch.zeros((), dtype=task.space.dtype, device=self.device)
        self.me: Client | None = None
        self.moving: Progress | None = None
        self.result: Result | None = None

    def follow(self, main: torch.cuda.Stream | None) -> None:
        """What this slot does next comes after all that was asked of the main stream."""
        if self.stream is not None and main is not None:
            self.stream.wait_stream(main)

    def enter(self) -> None:
        """What the host asks for from now on goes to this slot's stream."""
        if self.stream is not None:
            torch.cuda.set_stream(self.stream)

    def load(self, inbox: PhaseInputs, numbers: Tensor, i: int) -> Client:
        """Put a client's view in place: tensors are copied, numbers that differ between clients or rounds become tensors."""
        x, buffers = (t if t.dim() == 1 else t[i] for t in (inbox.x, inbox.buffers))
        rows = [
            x,
            buffers,
            *inbox.server.values(),
            *(v[i] for state in (inbox.memory, inbox.mine, inbox.carry) for v in state.values()),
        ]
        if self.me is None:
            self.numbers, self.rows = fresh(numbers[i]), [fresh(row) for row in rows]
            lr, lr0, round, steps, tau, size, coin = self.numbers.unbind()
            rest = iter(self.rows[2:])
            server, mine, carry = (
                {n: next(rest) for n in names} for names in ((*inbox.server, *inbox.memory), inbox.mine, inbox.carry)
            )
            fixed = (inbox.part, lr, lr0, inbox.momentum, inbox.decay, inbox.clip, steps, tau, size, round, coin)
            self.me = Client(self.rows[0], self.rows[1], server, mine, carry, *fixed)
        copy([self.numbers, *self.rows], [numbers[i], *rows])
        return self.me

    # moves ------------------------------------------------------------------------------------------------------

    def begin(self, move: Callable[[Client], Progress]) -> Progress:
        assert self.me is not None
        me = self.me
        if self.moving is None:
            new = move(me)
            self.moving = Progress(fresh(new.w), {n: fresh(v) for n, v in new.carry.items()}, fresh(new.total))
        self.play("begin", partial(self._begin, move, me))
        return self.moving

    def _begin(self, move: Callable[[Client], Progress], me: Client) -> None:
        assert self.moving is not None
        renew(self.moving, move(me))

    def finish(self, move: Callable[[Client, Progress], Result]) -> Result:
        assert self.me is not None and self.moving is not None
        me, moving = self.me, self.moving
        if self.result is None:
            r = move(me, moving)
            self.result = r._replace(
                up={n: fresh(v) for n, v in r.up.items()},
                mine={n: fresh(v) for n, v in r.mine.items()},
                loss=fresh(r.loss),
            )

        def body() -> None:
            assert self.result is not None
            r = move(me, moving)
            copy(
                [*self.result.up.values(), *self.result.mine.values(), self.result.loss],
                [*(r.up[n] for n in self.result.up), *(r.mine[n] for n in self.result.mine), r.loss],
            )

        self.play("finish", body)
        return self.result._replace(w=moving.w, carry=moving.carry)

    def some(self, move: Callable[..., Progress], name: str, k: int, first: int, length: int, share: float) -> Progress:
        """One move on the k-th batch of the job's work of this name, whose first batch is row `first` of the feed."""
        assert self.me is not None and self.moving is not None
        me, moving, feed, cursor = self.me, self.moving, self.feeds[name], self.cursor[name]
        whole = feed.rows.shape[1]
        part = max(1, -(-whole // PARTS)) if whole * feed.x.stride(0) >= LARGE else whole
        span = min(whole, -(-length // part) * part)
        exact = self.even and span != length  # no padding in batch norm's statistics
        span, padded = (length, False) if exact else (span, span != length)
        if k == 0:
            cursor.fill_(first)
        if name != "train":
            self.share.fill_(share)

        def body() -> None:
            places = feed.rows.index_select(0, cursor)[0, :span]
            weight = feed.weight.index_select(0, cursor)[0, :span] if padded else None
            batch = Batch(feed.take(places), feed.y[places], weight)
            new = move(self.task, me, moving, batch, 1.0 if name == "train" else self.share)
            renew(moving, new)
            cursor.add_(1)

        if exact:
            body()
        else:
            self.play((name, span, padded), body)
        return moving

    def play(self, key: Any, body: Callable[[], None]) -> None:
        self.tape.play(key, body, lambda: [*(moved(self.moving) if self.moving else ()), *self.cursor.values()])


class Job:
    """The course of one client in a slot."""

    def __init__(self, slot: Slot, works: dict[str, ClientBatches], first: dict[str, int]) -> None:
        self.slot, self.works, self.first = slot, works, first
        self.lengths = {name: work.lengths() for name, work in works.items()}

    def steps(self) -> Iterator[tuple[str, int]]:
        return (("train", k) for k in range(self.works["train"].batches))

    def chunks(self, name: str, step: int | None) -> Iterator[tuple[tuple[str, int], float]]:
        lengths = self.lengths[name]
        total = sum(lengths) * (1 if step is None else self.works["train"].batches)
        return (((name, j), length / total) for j, length in enumerate(lengths))

    def all(self, move: Callable[..., Any], me: Client, *moving: Progress) -> Any:
        return self.slot.finish(move) if moving else self.slot.begin(move)

    def some(
        self, move: Callable[..., Progress], me: Client, moving: Progress, batch: tuple[str, int], share: float
    ) -> Progress:
        name, k = batch
        return self.slot.some(move, name, k, self.first[name], self.lengths[name][k], share)


class SlotPool:
    """The slots of one kind of job, and the feeds that their graphs read from."""

    def __init__(self, make: Making, even: bool, last: bool) -> None:
        self.make, self.even, self.last = make, even, last
        self.feeds: dict[str, SampleBuffer] = {}
        self.slots: list[Slot] = []
        self.idle: list[Slot] = []
        self.cost = 0.0  # bytes that one slot takes

    def lay(self, jobs: Jobs) -> list[dict[str, int]]:
        """Put the jobs' samples in place; returns each job's first batches."""
        grown, first = lay(self.feeds, jobs, self.last)
        if grown:
            self.slots, self.idle = [], []  # their graphs read from the old one
        return [{name: begins[n] for name, begins in first.items()} for n in range(len(jobs))]

    def slot(self, device: torch.device, n: int) -> Slot | None:
        """A slot that is free, or a new one, the n-th of all, if memory has room for it."""
        if self.idle:
            return self.idle.pop()
        if self.slots and free(device) < 1.2 * self.cost:
            return None
        self.slots.append(Slot(self.make(), self.feeds, self.even, n))
        return self.slots[-1]


class Slots:
    """Jobs from a queue, several at a time; those of several runs share it."""

    name = "slots"

    def __init__(self, make: Making, even: bool, most: int = MOST, last: bool = False) -> None:
        """`even`: batches must not be padded; `last`: inputs lie channels-last."""
        self.make, self.even, self.most, self.last = make, even, most, last
        self.stations: dict[Any, SlotPool] = {}

    def map(self, asks: Sequence[PhaseRequest]) -> list[PhaseOutputs]:
        while True:
            try:
                return self._map(asks)
            except torch.OutOfMemoryError:
                if self.most == 1:
                    raise
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # what is on its way still uses the memory that is given back here
            self.most = max(1, min(self.most, self._count() or self.most) // 2)
            self.stations.clear()
            torch.cuda.empty_cache()

    def _count(self) -> int:
        return sum(len(station.slots) for station in self.stations.values())

    def _map(self, asks: Sequence[PhaseRequest]) -> list[PhaseOutputs]:
        errands = [ClientJobs(ask) for ask in asks]
        jobs = [(errand, i) for errand in errands for i in range(len(errand.works))]
        queue = deque(sorted(jobs, key=lambda job: -job[0].plan.train[job[1]].batches))
        while queue:
            self._play(self._wave(queue))
        return [outbox for errand in errands if (outbox := errand.room.outbox) is not None]

    def _wave(self, queue: deque[tuple[ClientJobs, int]]) -> deque[tuple[SlotPool, ClientJobs, int, dict[str, int]]]:
        """Take as many jobs as memory has room for their samples, and lay those out."""
        errand, i = queue[0]
        x = example(errand.plan, next(iter(errand.works[i].values()))).x
        room = min(free(x.device) * SHARE, MOST_BYTES) / (x.element_size() * x.numel())
        jobs, load = list[tuple[ClientJobs, int]](), 0
        while queue and (not jobs or load <= room):
            errand, i = queue.popleft()
            load += sum(len(work.places) for work in errand.works[i].values())
            jobs.append((errand, i))
        wave: list[tuple[SlotPool, ClientJobs, int, dict[str, int]]] = []
        for key in dict.fromkeys(errand.key() for errand, _ in jobs):
            station = self.stations.setdefault(key, SlotPool(self.make, self.even, self.last))
            mine = [job for job in jobs if job[0].key() == key]
            wave += [(station, *job, first) for job, first in zip(mine, station.lay(mine), strict=True)]
        return deque(sorted(wave, key=lambda job: -job[1].plan.train[job[2]].batches))

    def _play(self, wave: deque[tuple[SlotPool, ClientJobs, int, dict[str, int]]]) -> None:
        """Keep the slots busy until no job is left: one move of each at a time."""
        device = wave[0][1].numbers.device
        main = torch.cuda.current_stream(device) if device.type == "cuda" else None
        going: list[tuple[SlotPool, Slot, ClientJobs, int, Generator[None, None, Result]]] = []
        used: set[Slot] = set()

        def advance() -> None:
            for job in list(going):
                station, slot, errand, i, moves = job
                slot.enter()
                try:
                    next(moves)
                except StopIteration as end:
                    errand.room.put(i, end.value, main)
                    station.idle.append(slot)
                    going.remove(job)

        try:
            while wave or going:
                while wave and len(going) < self.most:
                    station, errand, i, first = wave[0]
                    before = 0.0 if station.slots else free(device)
                    slot = station.slot(device, self._count() % MOST)
                    if slot is None:
                        break
                    wave.popleft()
                    if slot not in used:
                        slot.follow(main)
                        used.add(slot)
                    slot.enter()
                    me = slot.load(errand.inbox, errand.numbers, i)
                    going.append(
                        (station, slot, errand, i, client_moves(errand.phase, me, Job(slot, errand.works[i], first)))
                    )
                    if before:
                        advance()
                        station.cost = before - free(device)
                advance()
        finally:
            if main is not None:
                torch.cuda.set_stream(main)
                for stream in (slot.stream for slot in used if slot.stream is not None):
                    main.wait_stream(stream)
