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
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.algorithm import Algorithm
from ..core.local import Moving, Result, client_moves
from ..core.task import Bound
from ..core.types import Batch, Me
from ..data.federation import Pick, Plan, Work
from .base import Inbox, Outbox

MOST = 32  # slots; more gained nothing on an H200, LeNet5 to ResNet18
PARTS = 4  # a batch is padded to one of so many lengths
SMALL = 4096  # numbers; so few are copied together with others
CHUNK = 4096  # samples gathered at a time
SHARE = 0.2  # of the free memory that the samples of a wave of jobs may take

Making = Callable[[], Bound]


class Feed:
    """The samples of the jobs of a wave in order of use, and for every batch the places of its samples, at fixed addresses."""

    def __init__(self, x: Tensor, y: Tensor, samples: int, batches: int, length: int, dtype: torch.dtype) -> None:
        self.x, self.y = (t.new_empty((samples, *t.shape[1:])) for t in (x, y))
        self.rows = y.new_zeros((batches, length), dtype=torch.long)
        self.weight = torch.zeros((batches, length), dtype=dtype, device=y.device)

    def holds(self, samples: int, batches: int, length: int) -> bool:
        return samples <= len(self.x) and batches <= len(self.rows) and length <= self.rows.shape[1]

    def fill(self, plan: Plan, works: Sequence[Work]) -> None:
        device = self.y.device
        marks = [work.marks for work in works if work.marks is not None]
        pick = Pick(torch.cat([work.places for work in works]).to(device), torch.cat(marks).to(device) if marks else None)
        for at in range(0, len(pick.places), CHUNK):
            some = slice(at, min(at + CHUNK, len(pick.places)))
            self.x[some], self.y[some], _ = plan.batch(pick.at(some))
        ends = np.cumsum([length for work in works for length in work.lengths()])
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
            lr, lr0, steps, tau, size, round, coin = self.numbers.unbind()
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
            batch = Batch(feed.x[places], feed.y[places], weight)
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


class Slots:
    """Jobs from a queue, several at a time."""

    name = "slots"

    def __init__(self, make: Making, even: bool, most: int = MOST) -> None:
        self.make, self.even, self.most = make, even, most
        self.feeds: dict[Algorithm, dict[str, Feed]] = {}
        self.slots: dict[Algorithm, list[Slot]] = {}
        self.cost: dict[Algorithm, float] = {}  # bytes that one slot takes

    def map(self, phase: Algorithm, inbox: Inbox, plan: Plan, want: Collection[str]) -> Outbox:
        while True:
            try:
                return self._map(phase, inbox, plan, want)
            except torch.OutOfMemoryError:
                if self.most == 1:
                    raise
            self.most = max(1, min(self.most, len(self.slots.get(phase, ())) or self.most) // 2)
            self.slots.clear()
            self.feeds.clear()
            torch.cuda.empty_cache()

    def _map(self, phase: Algorithm, inbox: Inbox, plan: Plan, want: Collection[str]) -> Outbox:
        names = [*(["train"] if phase.trains else []), *sorted({*phase.before, *phase.each, *phase.after})]
        works = [{name: (plan.train if name == "train" else plan.looks[name])[i] for name in names} for i in range(len(plan.ids))]
        queue = deque(sorted(range(len(works)), key=lambda i: -plan.train[i].batches))
        each = [inbox.lr, inbox.lr0, inbox.steps, inbox.tau, inbox.size, inbox.round, inbox.coin]
        numbers = torch.stack([torch.as_tensor(n, dtype=inbox.x.dtype, device=inbox.x.device).expand(len(works)) for n in each], 1)
        out = Room(len(works), want)
        while queue:
            self._play(Shift(phase, inbox, works, self._wave(phase, plan, works, queue), numbers, out))
        assert out.outbox is not None
        return out.outbox

    # feeding ----------------------------------------------------------------------------------------------------

    def _wave(self, phase: Algorithm, plan: Plan, works: list[dict[str, Work]], queue: deque[int]) -> dict[int, dict[str, int]]:
        """Take as many jobs as memory has room for their samples, and lay those out; returns each job's first batches."""
        example = plan.batch(Pick(torch.zeros(1, dtype=torch.long, device=plan.pool.y.device), self._mark(plan)))
        bytes_each = example.x.element_size() * example.x.numel()
        room = torch.cuda.mem_get_info(example.x.device)[0] * SHARE / bytes_each if example.x.is_cuda else 2**28 / bytes_each
        jobs, load = list[int](), 0
        while queue and (not jobs or load + self._samples(works[queue[0]]) <= room):
            load += self._samples(works[queue[0]])
            jobs.append(queue.popleft())
        feeds = self.feeds.setdefault(phase, {})
        first: dict[int, dict[str, int]] = {i: {} for i in jobs}
        for name in works[jobs[0]]:
            mine = [works[i][name] for i in jobs]
            need = (sum(len(w.places) for w in mine), sum(w.batches for w in mine), max(max(w.lengths(), default=1) for w in mine))
            if name not in feeds or not feeds[name].holds(*need):
                old = feeds[name].rows.shape[1] if name in feeds else 0
                feeds[name] = Feed(example.x, example.y, 2 * need[0], 2 * need[1], max(old, need[2]), self._dtype(plan, example))
                self.slots.pop(phase, None)  # their graphs read from the old one
            feeds[name].fill(plan, mine)
            row = 0
            for i, work in zip(jobs, mine, strict=True):
                first[i][name] = row
                row += work.batches
        return first

    def _samples(self, work: dict[str, Work]) -> int:
        return sum(len(w.places) for w in work.values())

    def _mark(self, plan: Plan) -> Tensor | None:
        marks = plan.train[0].marks
        return None if marks is None else marks[:1].to(plan.pool.y.device)

    def _dtype(self, plan: Plan, example: Batch) -> torch.dtype:
        return example.x.dtype if example.x.is_floating_point() else torch.get_default_dtype()

    # playing ----------------------------------------------------------------------------------------------------

    def _play(self, shift: Shift) -> None:
        """Keep every slot busy until no job is left: one move of each at a time."""
        phase, device, free = shift.phase, shift.numbers.device, 0.0
        slots = self.slots.setdefault(phase, [])
        main = torch.cuda.current_stream(device) if device.type == "cuda" else None
        used: list[Slot] = []
        try:
            for n in range(min(len(shift.waiting), self.most)):
                if n == len(slots):
                    free = self._free(device)
                    if n and free < 1.2 * self.cost[phase]:
                        break
                    slots.append(Slot(self.make(), self.feeds[phase], self.even))
                used.append(slots[n])
                slots[n].follow(main)
                shift.start(slots[n])
                if n == 0 and phase not in self.cost:
                    shift.advance()
                    self.cost[phase] = free - self._free(device)
            while shift.going:
                shift.advance()
        finally:
            if main is not None:
                torch.cuda.set_stream(main)
                for stream in (slot.stream for slot in used if slot.stream is not None):
                    main.wait_stream(stream)

    def _free(self, device: torch.device) -> float:
        """Bytes of memory that are left on the device."""
        return float(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else math.inf


class Shift:
    """The jobs of one wave: those that wait, those at work, and room for what they leave."""

    def __init__(
        self, phase: Algorithm, inbox: Inbox, works: list[dict[str, Work]], first: dict[int, dict[str, int]], numbers: Tensor, out: Room
    ) -> None:
        self.phase, self.inbox, self.works, self.first, self.numbers, self.out = phase, inbox, works, first, numbers, out
        self.waiting = deque(first)
        self.going: list[tuple[int, Slot, Generator[None, None, Result]]] = []

    def start(self, slot: Slot) -> None:
        """Load the next job."""
        i = self.waiting.popleft()
        slot.enter()
        me = slot.load(self.inbox, self.numbers, i)
        self.going.append((i, slot, client_moves(self.phase, me, Job(slot, self.works[i], self.first[i]))))

    def advance(self) -> None:
        """One move of every job at work; a slot that falls free gets the next job."""
        for job in list(self.going):
            i, slot, moves = job
            slot.enter()
            try:
                next(moves)
            except StopIteration as end:
                self.out.put(i, end.value)
                self.going.remove(job)
                if self.waiting:
                    self.start(slot)


class Room:
    """The results of a cohort, row by row."""

    def __init__(self, rows: int, want: Collection[str]) -> None:
        self.rows, self.want = rows, want
        self.outbox: Outbox | None = None
        self.entries: list[Tensor] = []

    def put(self, i: int, result: Result) -> None:
        carry = result.carry if "carry" in self.want else {"buffers": result.carry["buffers"]}
        given = [*result.up.values(), *result.mine.values(), *carry.values(), result.loss, *([result.w] if "w" in self.want else [])]
        if self.outbox is None:
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
