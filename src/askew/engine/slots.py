"""The CUDA engine. A small network leaves a GPU idle while the host launches its kernels one by one; so here a client's
step is captured once as a graph over fixed buffers and replayed, and many clients are at work at a time.

A *slot* has buffers of its own (the received model and state, w, carry, a network bound to them) and a stream of its own.
A *job* is one client's phase. Jobs wait in a queue, the longest first, and are loaded into slots as they fall free, so
clients of unequal size waste nothing. A round's samples are gathered, augmented and normalised at once, in the order in
which they will be used; a step reads its batch from there by a cursor that advances in the graph, so the host does
nothing for a step but start it. Nothing waits for the device before the cohort is done.

A short batch is padded to a quarter, half, … of the usual one and weighted, which is exact; batch norm, whose statistics
padding would pollute, plays such a batch at its own length, outside a graph. Without CUDA the same slots are played
without graphs: slowly, and with the same numbers.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.local import Moving, Result, client_moves
from ..core.task import Bound
from ..core.types import Batch, Me
from ..data.federation import Pick, Plan, Work
from .base import Ask, Inbox, Outbox

MOST = 32  # slots; more gained nothing on an H200, LeNet5 to ResNet18
PARTS = 4  # a batch is padded to one of so many lengths
SMALL = 4096  # numbers; so few are copied together with others
CHUNK = 4096  # samples gathered at a time
SHARE = 0.2  # of the free memory that the samples of a wave of jobs may take,
MOST_BYTES = 8 * 2**30  # and at most so many bytes

Making = Callable[[], Bound]


class Feed:
    """The samples of the jobs of a wave in order of use, and for every batch the places of its samples, at fixed addresses."""

    def __init__(self, x: Tensor, y: Tensor, samples: int, batches: int, length: int, dtype: torch.dtype, last: bool) -> None:
        self.x, self.y = (t.new_empty((samples, *t.shape[1:])) for t in (x, y))
        if last and x.dim() == 4:
            self.x = self.x.to(memory_format=torch.channels_last)
        self.rows = y.new_zeros((batches, length), dtype=torch.long)
        self.weight = torch.zeros((batches, length), dtype=dtype, device=y.device)

    def take(self, places: Tensor) -> Tensor:
        """Inputs in the memory format in which they lie."""
        if self.x.dim() != 4 or self.x.is_contiguous():
            return self.x[places]
        return self.x.permute(0, 2, 3, 1)[places].permute(0, 3, 1, 2)

    def holds(self, samples: int, batches: int, length: int) -> bool:
        return samples <= len(self.x) and batches <= len(self.rows) and length <= self.rows.shape[1]

    def fill(self, jobs: Sequence[tuple[Plan, Work]]) -> None:
        """Lay the samples out, job after job; neighbours with the same pool are gathered together."""
        device, at = self.y.device, 0
        for _, some in groupby(jobs, key=lambda job: (id(job[0].pool.x), id(job[0].view))):
            part = list(some)
            plan, marks = part[0][0], [work.marks for _, work in part if work.marks is not None]
            pick = Pick(torch.cat([work.places for _, work in part]).to(device), torch.cat(marks).to(device) if marks else None)
            for a in range(0, len(pick.places), CHUNK):
                now = slice(a, min(a + CHUNK, len(pick.places)))
                self.x[at + now.start : at + now.stop], self.y[at + now.start : at + now.stop], _ = plan.batch(pick.at(now))
            at += len(pick.places)
        ends = np.cumsum([length for _, work in jobs for length in work.lengths()])
        starts = np.concatenate([[0], ends[:-1]])
        begin, length = torch.from_numpy(np.stack([starts, ends - starts])).to(device)[:, :, None]
        column = torch.arange(self.rows.shape[1], device=device)
        self.rows[: len(ends)] = begin + torch.minimum(column, length - 1)
        self.weight[: len(ends)] = (column < length).to(self.weight.dtype)


class Slot:
    """Fixed buffers, a network bound to some of them, a stream, and the graphs of the moves captured so far."""

    def __init__(self, task: Bound, feeds: dict[str, Feed], even: bool) -> None:
        self.task, self.feeds, self.even = task, feeds, even
        self.device = task.space.device
        self.cuda = self.device.type == "cuda"
        self.stream = torch.cuda.Stream(self.device) if self.cuda else None  # type: ignore[no-untyped-call]
        self.pool = torch.cuda.graph_pool_handle() if self.cuda else None
        self.graphs: dict[Any, torch.cuda.CUDAGraph] = {}
        self.cursor = {name: torch.zeros(1, dtype=torch.long, device=self.device) for name in feeds}
        self.share = torch.zeros((), dtype=task.space.dtype, device=self.device)
        self.me: Me | None = None
        self.moving: Moving | None = None
        self.result: Result | None = None

    def follow(self, main: torch.cuda.Stream | None) -> None:
        """What this slot does next comes after all that was asked of the main stream."""
        if self.stream is not None and main is not None:
            self.stream.wait_stream(main)

    def enter(self) -> None:
        """What the host asks for from now on goes to this slot's stream."""
        if self.stream is not None:
            torch.cuda.set_stream(self.stream)

    def load(self, inbox: Inbox, numbers: Tensor, i: int) -> Me:
        """Put a client's view in place: tensors are copied, numbers that differ between clients or rounds become tensors."""
        x, buffers = (t if t.dim() == 1 else t[i] for t in (inbox.x, inbox.buffers))
        rows = [x, buffers, *inbox.server.values(), *(v[i] for state in (inbox.memory, inbox.mine, inbox.carry) for v in state.values())]
        if self.me is None:
            self.numbers, self.rows = fresh(numbers[i]), [fresh(row) for row in rows]
            lr, lr0, round, steps, tau, size, coin = self.numbers.unbind()
            rest = iter(self.rows[2:])
            server, mine, carry = ({n: next(rest) for n in names} for names in ((*inbox.server, *inbox.memory), inbox.mine, inbox.carry))
            fixed = (inbox.part, lr, lr0, inbox.momentum, inbox.decay, inbox.clip, steps, tau, size, round, coin)
            self.me = Me(self.rows[0], self.rows[1], server, mine, carry, *fixed)
        copy([self.numbers, *self.rows], [numbers[i], *rows])
        return self.me

    # moves ------------------------------------------------------------------------------------------------------

    def begin(self, move: Callable[[Me], Moving]) -> Moving:
        assert self.me is not None
        me = self.me
        if self.moving is None:
            new = move(me)
            self.moving = Moving(fresh(new.w), {n: fresh(v) for n, v in new.carry.items()}, fresh(new.total))
        self.play("begin", partial(self._begin, move, me))
        return self.moving

    def _begin(self, move: Callable[[Me], Moving], me: Me) -> None:
        assert self.moving is not None
        renew(self.moving, move(me))

    def finish(self, move: Callable[[Me, Moving], Result]) -> Result:
        assert self.me is not None and self.moving is not None
        me, moving = self.me, self.moving
        if self.result is None:
            r = move(me, moving)
            self.result = r._replace(
                up={n: fresh(v) for n, v in r.up.items()}, mine={n: fresh(v) for n, v in r.mine.items()}, loss=fresh(r.loss)
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

    def some(self, move: Callable[..., Moving], name: str, k: int, first: int, length: int, share: float) -> Moving:
        """One move on the k-th batch of the job's work of this name, whose first batch is row `first` of the feed."""
        assert self.me is not None and self.moving is not None
        me, moving, feed, cursor = self.me, self.moving, self.feeds[name], self.cursor[name]
        whole = feed.rows.shape[1]
        part = max(1, -(-whole // PARTS))
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

    # graphs -----------------------------------------------------------------------------------------------------

    def play(self, key: Any, body: Callable[[], None]) -> None:
        """Replay what was captured under a key, on the current stream; capture it first if need be."""
        if not self.cuda:
            body()
            return
        if key not in self.graphs:
            self.graphs[key] = self._capture(body)
        self.graphs[key].replay()

    def _capture(self, body: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Two rehearsals let libraries choose and allocate; then what they changed is put back."""
        held = [*tensors(self.moving), *self.cursor.values()]
        before = [t.clone() for t in held]
        for _ in range(2):
            body()
        copy(held, before)
        torch.cuda.synchronize(self.device)
        if torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device) > 2**30:
            torch.cuda.empty_cache()  # what the rehearsals left is of no use to the graph, which allocates from a pool of its own
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
            body()
        return graph


class Job:
    """The course of one client in a slot."""

    def __init__(self, slot: Slot, works: dict[str, Work], first: dict[str, int]) -> None:
        self.slot, self.works, self.first = slot, works, first
        self.lengths = {name: work.lengths() for name, work in works.items()}

    def steps(self) -> Iterator[tuple[str, int]]:
        return (("train", k) for k in range(self.works["train"].batches))

    def chunks(self, name: str, step: int | None) -> Iterator[tuple[tuple[str, int], float]]:
        lengths = self.lengths[name]
        total = sum(lengths) * (1 if step is None else self.works["train"].batches)
        return (((name, j), length / total) for j, length in enumerate(lengths))

    def all(self, move: Callable[..., Any], me: Me, *moving: Moving) -> Any:
        return self.slot.finish(move) if moving else self.slot.begin(move)

    def some(self, move: Callable[..., Moving], me: Me, moving: Moving, batch: tuple[str, int], share: float) -> Moving:
        name, k = batch
        return self.slot.some(move, name, k, self.first[name], self.lengths[name][k], share)


class Errand:
    """What one ask is made of: a work of every name for each client, its numbers, and room for the results."""

    def __init__(self, ask: Ask) -> None:
        self.phase, self.inbox, self.plan, want = ask
        phase, inbox, plan = self.phase, self.inbox, self.plan
        names = [*(["train"] if phase.trains else []), *sorted({*phase.before, *phase.each, *phase.after})]
        self.works = [{n: (plan.train if n == "train" else plan.looks[n])[i] for n in names} for i in range(len(plan.ids))]
        same = torch.tensor([inbox.lr, inbox.lr0, inbox.round], dtype=inbox.x.dtype).to(inbox.x.device).expand(len(plan.ids), -1)
        self.numbers = torch.cat([same, torch.stack([inbox.steps, inbox.tau, inbox.size, inbox.coin], 1)], 1)
        self.room = Room(len(plan.ids), want)

    def key(self) -> Any:
        """Jobs with one key can be done in one another's slots."""
        inbox = self.inbox
        names = tuple(tuple(state) for state in (inbox.server, inbox.memory, inbox.mine, inbox.carry))
        return self.phase, inbox.momentum, inbox.decay, inbox.clip, names


class Station:
    """The slots of one kind of job, and the feeds that their graphs read from."""

    def __init__(self, make: Making, even: bool, last: bool) -> None:
        self.make, self.even, self.last = make, even, last
        self.feeds: dict[str, Feed] = {}
        self.slots: list[Slot] = []
        self.idle: list[Slot] = []
        self.cost = 0.0  # bytes that one slot takes

    def lay(self, jobs: Sequence[tuple[Errand, int]]) -> list[dict[str, int]]:
        """Put the jobs' samples in place; returns each job's first batches."""
        first: list[dict[str, int]] = [{} for _ in jobs]
        for name in jobs[0][0].works[0]:
            mine = [(errand.plan, errand.works[i][name]) for errand, i in jobs]
            works = [work for _, work in mine]
            need = (sum(len(w.places) for w in works), sum(w.batches for w in works), max(max(w.lengths(), default=1) for w in works))
            if name not in self.feeds or not self.feeds[name].holds(*need):
                old = self.feeds[name].rows.shape[1] if name in self.feeds else 0
                x, y, _ = example(*mine[0])
                dtype = jobs[0][0].numbers.dtype
                self.feeds[name] = Feed(x, y, 2 * need[0], 2 * need[1], max(old, need[2]), dtype, self.last)
                self.slots, self.idle = [], []  # their graphs read from the old one
            self.feeds[name].fill(mine)
            row = 0
            for told, work in zip(first, works, strict=True):
                told[name] = row
                row += work.batches
        return first

    def slot(self, device: torch.device) -> Slot | None:
        """A slot that is free, or a new one if memory has room for it."""
        if self.idle:
            return self.idle.pop()
        if self.slots and free(device) < 1.2 * self.cost:
            return None
        self.slots.append(Slot(self.make(), self.feeds, self.even))
        return self.slots[-1]


class Slots:
    """Jobs from a queue, several at a time; those of several runs share it."""

    name = "slots"

    def __init__(self, make: Making, even: bool, most: int = MOST, last: bool = False) -> None:
        """`even`: batches must not be padded; `last`: inputs lie channels-last."""
        self.make, self.even, self.most, self.last = make, even, most, last
        self.stations: dict[Any, Station] = {}

    def map(self, asks: Sequence[Ask]) -> list[Outbox]:
        while True:
            try:
                return self._map(asks)
            except torch.OutOfMemoryError:
                if self.most == 1:
                    raise
            busy = sum(len(station.slots) for station in self.stations.values())
            self.most = max(1, min(self.most, busy or self.most) // 2)
            self.stations.clear()
            torch.cuda.empty_cache()

    def _map(self, asks: Sequence[Ask]) -> list[Outbox]:
        errands = [Errand(ask) for ask in asks]
        jobs = [(errand, i) for errand in errands for i in range(len(errand.works))]
        queue = deque(sorted(jobs, key=lambda job: -job[0].plan.train[job[1]].batches))
        while queue:
            self._play(self._wave(queue))
        return [outbox for errand in errands if (outbox := errand.room.outbox) is not None]

    def _wave(self, queue: deque[tuple[Errand, int]]) -> deque[tuple[Station, Errand, int, dict[str, int]]]:
        """Take as many jobs as memory has room for their samples, and lay those out."""
        errand, i = queue[0]
        x = example(errand.plan, next(iter(errand.works[i].values()))).x
        room = min(free(x.device) * SHARE, MOST_BYTES) / (x.element_size() * x.numel())
        jobs, load = list[tuple[Errand, int]](), 0
        while queue and (not jobs or load <= room):
            errand, i = queue.popleft()
            load += sum(len(work.places) for work in errand.works[i].values())
            jobs.append((errand, i))
        wave: list[tuple[Station, Errand, int, dict[str, int]]] = []
        for key in dict.fromkeys(errand.key() for errand, _ in jobs):
            station = self.stations.setdefault(key, Station(self.make, self.even, self.last))
            mine = [job for job in jobs if job[0].key() == key]
            wave += [(station, *job, first) for job, first in zip(mine, station.lay(mine), strict=True)]
        return deque(sorted(wave, key=lambda job: -job[1].plan.train[job[2]].batches))

    def _play(self, wave: deque[tuple[Station, Errand, int, dict[str, int]]]) -> None:
        """Keep the slots busy until no job is left: one move of each at a time."""
        device = wave[0][1].numbers.device
        main = torch.cuda.current_stream(device) if device.type == "cuda" else None
        going: list[tuple[Station, Slot, Errand, int, Generator[None, None, Result]]] = []
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
                    slot = station.slot(device)
                    if slot is None:
                        break
                    wave.popleft()
                    if slot not in used:
                        slot.follow(main)
                        used.add(slot)
                    slot.enter()
                    me = slot.load(errand.inbox, errand.numbers, i)
                    going.append((station, slot, errand, i, client_moves(errand.phase, me, Job(slot, errand.works[i], first))))
                    if before:
                        advance()
                        station.cost = before - free(device)
                advance()
        finally:
            if main is not None:
                torch.cuda.set_stream(main)
                for stream in (slot.stream for slot in used if slot.stream is not None):
                    main.wait_stream(stream)


def free(device: torch.device) -> float:
    """Bytes of memory that are left on the device."""
    return float(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else math.inf


def example(plan: Plan, work: Work) -> Batch:
    """One sample as the network sees it."""
    return plan.batch(work.to(plan.pool.y.device).pick(0, 1))


class Room:
    """The results of a cohort, row by row."""

    def __init__(self, rows: int, want: Collection[str]) -> None:
        self.rows, self.want = rows, want
        self.outbox: Outbox | None = None
        self.entries: list[Tensor] = []

    def put(self, i: int, result: Result, main: torch.cuda.Stream | None) -> None:
        carry = result.carry if "carry" in self.want else {"buffers": result.carry["buffers"]}
        given = [*result.up.values(), *result.mine.values(), *carry.values(), result.loss, *([result.w] if "w" in self.want else [])]
        if self.outbox is None:
            with torch.cuda.stream(main):  # whose memory it is; nothing without CUDA
                self.entries = [t.new_empty((self.rows, *t.shape)) for t in given]
            rest = iter(self.entries)
            up, mine, kept = ({n: next(rest) for n in state} for state in (result.up, result.mine, carry))
            loss, w = next(rest), next(rest, None)
            self.outbox = Outbox(up, mine, kept if "carry" in self.want else {}, kept["buffers"], loss, w)
        copy([entry[i] for entry in self.entries], given)


# tensors in rows and in nests -------------------------------------------------------------------------------------


def tensors(nest: Any) -> list[Tensor]:
    """All tensors of a nest of tuples and dictionaries, in order; parts of the model, which are the same for ever, left out."""
    if isinstance(nest, Tensor):
        return [nest]
    if isinstance(nest, Me):
        return [t for part in (nest.x, nest.buffers, nest.server, nest.mine, nest.carry) for t in tensors(part)]
    inner = nest.values() if isinstance(nest, dict) else nest if isinstance(nest, (tuple, list)) else ()
    return [t for part in inner for t in tensors(part)]


def fresh(t: Tensor) -> Tensor:
    return torch.empty_like(t, memory_format=torch.contiguous_format).copy_(t)


def copy(to: Sequence[Tensor], source: Sequence[Tensor]) -> None:
    """Copy tensors: large ones each by itself, which uses the whole device, small ones together, which saves launches."""
    kinds: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for a, b in zip(to, source, strict=True):
        if a is b or not a.numel():
            continue
        if a.numel() > SMALL:
            a.copy_(b)
        else:
            both = kinds.setdefault(a.dtype, ([], []))
            both[0].append(a)
            both[1].append(b)
    for into, values in kinds.values():
        torch._foreach_copy_(into, values)


def renew(old: Moving, new: Moving) -> None:
    """Put new values in the place of old ones; a hook may have returned an old one under another name."""
    to = [old.w, old.total, *old.carry.values()]
    source = [new.w, new.total, *(new.carry[n] for n in old.carry)]
    places = {t.data_ptr(): n for n, t in enumerate(to)}
    copy(to, [t if t is to[n] or places.get(t.data_ptr(), n) == n else t.clone() for n, t in enumerate(source)])
