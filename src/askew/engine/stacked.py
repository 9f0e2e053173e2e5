"""Small networks on CUDA: many clients in one kernel. Where `slots` gives every client kernels and a stream of its own, here
clients are the rows of stacked buffers, every move is vmapped over the first rows and captured as one graph.

Jobs are sorted by length, so those still at work are the first rows; the graph is that of the next larger number of rows, and
rows without work in it are left as they are. Which batch a row sees follows from a counter on the device. A few jobs that are
much longer than the others have rows of their own, which go ahead on a stream of their own: steps of few rows leave a GPU idle.

What does not depend on a model, above all the samples, is put in place while the round before is at work.

Runs of a sweep share the rows. What differs between them must be a tensor: learning rates always are, and so become the
float settings of a method where they differ, unless a hook of it cannot bear that.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from ..core.algorithm import Algorithm
from ..core.local import GradientResult, Progress, Result, client_moves, differentiate_rows, watched
from ..core.task import Functional, Task
from ..core.types import Batch, Client, State
from ..data.federation import ClientBatches
from ..models.fused import counted
from .base import PhaseOutputs, PhaseRequest
from .gather import Reach, take
from .graphs import Tape, moved, renew
from .jobs import ClientJobs, Full, Jobs, SampleBuffer, example, free, lay, sent

MOST = 512  # rows
PARTS = 2  # a batch is padded to one of so many lengths
DEEP = 16  # an input's size times this is what a row's step takes, roughly
SHARE = 0.3  # of the free memory
LONG = 0.5  # of the longest job's steps: above, a job may be one of the few that go ahead;
FEW = 0.5  # they have no more than this share of all steps,
SPARED = (
    8  # and the others at least so many steps less than the longest: fewer are done before two lots are on their way
)

AHEAD = "ahead"

Table = np.ndarray[Any, np.dtype[np.int64]]
Mask = np.ndarray[Any, np.dtype[np.bool_]]


def wide(n: int) -> int:
    """The next number of rows that graphs are captured for: 1, 2, 3, 4, 6, 8, 10, … 32, 36, … 64, 72, …; few rows cost little."""
    step = 1 << max(0, (n - 1).bit_length() - (2 if n <= 8 else 3 if n <= 16 else 4))
    return -(-n // step) * step


class RowBuffers:
    """Stacked buffers for one kind of job, and the graphs of the moves on their first rows."""

    def __init__(self, task: Task, errand: ClientJobs, first: bool = False) -> None:
        self.task, inbox = task, errand.inbox
        self.names = [list(state) for state in (inbox.server, inbox.memory, inbox.mine, inbox.carry)]
        self.part, self.fixed = (
            inbox.part,
            (inbox.momentum, inbox.decay, inbox.clip),
        )  # the same for all jobs of this kind
        self.device, self.dtype = inbox.x.device, inbox.x.dtype
        urgent = first and self.device.type == "cuda"
        self.stream = torch.cuda.Stream(self.device, priority=-1) if urgent else None  # type: ignore[no-untyped-call]
        self.feeds: dict[str, SampleBuffer] = {}
        self.rows = self.usual = 0
        self.moving: Progress | None = None
        self.result: dict[int, Result] = {}
        self.laid: list[tuple[int, int, list[ClientBatches]]] = []  # of every row the errand, the client and its works

    def make(self, rows: int) -> None:
        """Buffers for so many rows; what was captured over smaller ones is forgotten."""
        self.rows, self.tape, self.moving, self.result = rows, Tape(self.device, self.stream), None, {}
        self.given: list[Tensor] = []
        self.numbers = torch.zeros((rows, 7), dtype=self.dtype, device=self.device)
        self.first, self.last, self.count = (
            {name: torch.zeros(rows, dtype=torch.long, device=self.device) for name in self.feeds} for _ in range(3)
        )
        self.share = self.numbers.new_zeros(rows)
        self.at = {name: torch.zeros((), dtype=torch.long, device=self.device) for name in self.feeds}

    # loading ----------------------------------------------------------------------------------------------------

    def lay(self, jobs: Jobs, most: int, grow: bool = True) -> None:
        """Put the jobs' samples in place, one job to a row, unless they are there already; no model is needed for that."""
        errands = distinct(jobs)
        place = {id(errand): n for n, errand in enumerate(errands)}
        laid = [(place[id(errand)], i, list(errand.works[i].values())) for errand, i in jobs]
        if len(laid) == len(self.laid) and all(
            a[:2] == b[:2] and same(a[2], b[2]) for a, b in zip(laid, self.laid, strict=True)
        ):
            return
        self.laid = []
        begins = np.cumsum([0, *(len(errand.works) for errand in errands)]).tolist()
        whose = [n for n, _, _ in laid]
        order = sorted(range(len(jobs)), key=lambda row: laid[row][:2])  # by errand and client
        if not grow and len(jobs) > self.rows:
            raise Full
        grown, first = lay(self.feeds, jobs, grow=grow)
        if grown or len(jobs) > self.rows:
            self.make(min(most, max(wide(len(jobs)), self.rows)))
        counts = [[errand.works[i][name].batches for errand, i in jobs] for name in first]
        lasts = [
            [a + max(b - 1, 0) for a, b in zip(*pair, strict=True)] for pair in zip(first.values(), counts, strict=True)
        ]
        lists = [
            whose,
            [begins[n] + i for n, i, _ in laid],
            order,
            [jobs[row][1] for row in order],
            *first.values(),
            *lasts,
            *counts,
        ]
        self.of_errand, self.of_job, back, to, *rest = sent(torch.tensor(lists), self.device).unbind()
        cuts = [whose.count(n) for n in range(len(errands))]
        self.back = list(zip(torch.split(back, cuts), torch.split(to, cuts), strict=True))
        for n, name in enumerate(first):
            for part, row in zip((self.first, self.last, self.count), rest[n :: len(first)], strict=True):
                part[name][: len(jobs)].copy_(row)
            self.count[name][len(jobs) :].zero_()
        self.laid = laid

    def load(self, jobs: Jobs, most: int, floats: Sequence[str]) -> None:
        """Put all that the jobs begin with in place: samples, models, states and numbers."""
        self.lay(jobs, most)
        errands, n = distinct(jobs), len(jobs)
        sources, picks = self._sources(errands)
        self.given = self.given or [t.new_zeros((self.rows, *t.shape[1:])) for t in sources]
        for buffer, source, pick in zip(self.given, sources, picks, strict=True):
            torch.index_select(source, 0, pick, out=buffer[:n])
        numbers = torch.cat([errand.numbers for errand in errands])
        if self.numbers.shape[1] != 7 + len(floats):
            self.numbers = numbers.new_zeros((self.rows, 7 + len(floats)))
        self.numbers[:n, :7] = numbers[self.of_job]
        if floats:
            values = [[float(getattr(errand.phase, name)) for name in floats] for errand in errands]
            self.numbers[:n, 7:] = sent(torch.tensor(values, dtype=numbers.dtype), self.device)[self.of_errand]

    def _sources(self, errands: Sequence[ClientJobs]) -> tuple[list[Tensor], list[Tensor]]:
        """What rows are picked from, and by which index: x, buffers, server, memory, mine, carry."""
        of_errand, of_job = self.of_errand, self.of_job
        inboxes = [errand.inbox for errand in errands]
        sources, picks = list[Tensor](), list[Tensor]()
        for name in ("x", "buffers"):
            each = [getattr(inbox, name) for inbox in inboxes]
            shared = each[0].dim() == 1
            sources.append(torch.stack(each) if shared else torch.cat(each))
            picks.append(of_errand if shared else of_job)
        for n in inboxes[0].server:
            sources.append(torch.stack([inbox.server[n] for inbox in inboxes]))
            picks.append(of_errand)
        for state in ("memory", "mine", "carry"):
            for n in getattr(inboxes[0], state):
                each = [getattr(inbox, state)[n] for inbox in inboxes]
                sources.append(each[0] if len(each) == 1 else torch.cat(each))
                picks.append(of_job)
        return sources, picks

    # moves ------------------------------------------------------------------------------------------------------

    def me(self, given: Sequence[Tensor], numbers: Tensor) -> Client:
        """One client's view, under vmap."""
        rest = iter(given[2:])
        server, memory, mine, carry = ({n: next(rest) for n in names} for names in self.names)
        lr, lr0, round, steps, tau, size, coin = numbers[:7].unbind()
        return Client(
            given[0],
            given[1],
            server | memory,
            mine,
            carry,
            self.part,
            lr,
            lr0,
            *self.fixed,
            steps,
            tau,
            size,
            round,
            coin,
        )

    def held(self) -> list[Tensor]:
        return [*(moved(self.moving) if self.moving else ()), *self.at.values()]

    def rows_of(self, m: int) -> tuple[list[Tensor], Tensor]:
        return [t[:m] for t in self.given], self.numbers[:m]

    def reach(self, name: str, m: int) -> Reach:
        return Reach(self.first[name][:m], self.last[name][:m], self.count[name][:m], self.at[name])

    def moving_of(self, m: int) -> Progress:
        assert self.moving is not None
        return Progress(self.moving.w[:m], {n: v[:m] for n, v in self.moving.carry.items()}, self.moving.total[:m])


class StackedSchedule:
    """The course of the jobs in a block's rows, the longest first."""

    def __init__(self, block: RowBuffers, jobs: Jobs, floats: Sequence[str]) -> None:
        self.block, self.jobs, self.floats = block, jobs, floats
        self.lengths = {name: self._table(name) for name in jobs[0][0].works[0]}  # rows × batches, 0: none
        self.count = {name: (table > 0).sum(1) for name, table in self.lengths.items()}

    def _table(self, name: str) -> Table:
        works = [errand.works[i][name] for errand, i in self.jobs]
        lengths = {id(work): work.lengths() for work in works}  # runs may share them
        table = np.zeros((len(works), max(map(len, lengths.values()))), dtype=np.int64)
        for row, work in enumerate(works):
            mine = lengths[id(work)]
            table[row, : len(mine)] = mine
        return table

    def steps(self) -> Iterator[tuple[str, int, int | None]]:
        return (("train", k, None) for k in range(self.lengths["train"].shape[1]))

    def chunks(self, name: str, step: int | None) -> Iterator[tuple[tuple[str, int, int | None], float]]:
        return (((name, j, step), 0.0) for j in range(self.count[name][self._works(step)].max()))

    def _works(self, step: int | None) -> Mask:
        """Which rows take this step."""
        return np.ones(len(self.jobs), dtype=bool) if step is None else self.count["train"] > step

    def lifted(self, alg: Algorithm, numbers: Tensor) -> Algorithm:
        """The method with the settings of this row."""
        if not self.floats:
            return alg
        other = copy.copy(alg)
        for name, value in zip(self.floats, numbers[7:].unbind(), strict=True):
            object.__setattr__(other, name, value)
        return other

    def bound(self, move: Callable[..., Any], numbers: Tensor) -> Callable[..., Any]:
        """A move of the local loop is `partial(move, method or name)`."""
        inner = cast(partial[Any], move)
        first, *more = inner.args
        return partial(inner.func, self.lifted(first, numbers) if isinstance(first, Algorithm) else first, *more)

    def all(self, move: Callable[..., Any], me: Any, *moving: Any) -> Any:
        block, m = self.block, min(wide(len(self.jobs)), self.block.rows)
        if moving:
            return self._finish(move, m)

        def begin() -> Progress:
            given, numbers = block.rows_of(m)
            new: Progress = vmap(lambda g, n: self.bound(move, n)(block.me(g, n)))(given, numbers)
            return new

        if block.moving is None:
            new = begin()
            block.moving = Progress(*(self._room(part) for part in (new.w, new.carry, new.total)))
        for counter in block.at.values():
            counter.zero_()
        block.tape.play(("begin", m), lambda: renew(block.moving_of(m), begin()), block.held)
        return block.moving

    def _room(self, part: Any) -> Any:
        if isinstance(part, dict):
            return {n: self._room(v) for n, v in part.items()}
        return part.new_zeros((self.block.rows, *part.shape[1:]))

    def _finish(self, move: Callable[..., Any], m: int) -> Result:
        block = self.block

        def finish() -> None:
            given, numbers = block.rows_of(m)
            block.result[m] = vmap(lambda g, n, at: self.bound(move, n)(block.me(g, n), at))(
                given, numbers, block.moving_of(m)
            )

        block.tape.play(("finish", m), finish, block.held)
        return block.result[m]

    def some(
        self, move: Callable[..., Progress], me: Any, moving: Any, batch: tuple[str, int, int | None], share: float
    ) -> Progress:
        """One move of the rows that have a k-th batch of this name."""
        name, k, step = batch
        block, feed = self.block, self.block.feeds[name]
        table = self.lengths[name]
        mine = (self.count[name] > k) & self._works(step)
        assert block.moving is not None
        if not mine.any():
            return block.moving
        last = int(np.flatnonzero(mine)[-1]) + 1
        whole, part = feed.rows.shape[1], max(1, -(-feed.rows.shape[1] // PARTS))
        longest, shortest = int(table[mine, k].max()), int(table[mine, k].min())
        span = min(whole, -(-longest // part) * part)
        padded = shortest < span
        exact = last == len(self.jobs) == block.usual
        m = last if exact else min(wide(last), block.rows)
        every = int(mine.sum()) == m
        if k == 0:
            block.at[name].zero_()
        if name != "train":
            shares = (
                mine[:last]
                * table[:last, k]
                / table[:last].sum(1)
                / (1 if step is None else self.count["train"][:last])
            )
            block.share[:last].copy_(sent(torch.tensor(shares.tolist(), dtype=block.share.dtype), block.device))

        def body() -> None:
            taken = take(feed, block.reach(name, m), block.reach(name if step is None else "train", m), span)
            given, numbers = block.rows_of(m)
            old = block.moving_of(m)
            extra = {"weight": taken.weight} if padded else {}
            if name != "train":
                extra["share"] = block.share[:m]
            seen = (given, numbers, old, taken.x, taken.y, extra)
            with counted(taken.real if padded or not every else None, span):
                new = vmap(partial(self._one, move))(self._slope(move, name, seen), *seen)
            renew(old, new, None if every else taken.live)
            block.at[name].add_(1)

        block.tape.play((name, step is None, m, span, padded, every), body, block.held)
        return block.moving

    def _slope(self, move: Callable[..., Progress], name: str, seen: tuple[Any, ...]) -> GradientResult | tuple[()]:
        """Gradients of all rows, for the moves that follow them."""
        if name not in ("train", "gradient"):
            return ()

        def valued(
            w: Tensor, given: list[Tensor], numbers: Tensor, at: Progress, x: Tensor, y: Tensor, extra: State
        ) -> tuple[Tensor, Tensor]:
            me, data = self.block.me(given, numbers)._replace(carry=at.carry), Batch(x, y, extra.get("weight"))
            alg = cast(partial[Any], move).args[0] if name == "train" else None
            task = cast(Functional, self.block.task)
            objective = lambda u: self.lifted(alg, numbers).loss(task, u, data, me) if alg else task.loss(u, data)
            return watched(task, objective, at.carry["buffers"], w)

        return differentiate_rows(valued, seen[2].w, *seen)

    def _one(
        self,
        move: Callable[..., Progress],
        slope: GradientResult | tuple[()],
        given: list[Tensor],
        numbers: Tensor,
        at: Progress,
        x: Tensor,
        y: Tensor,
        extra: State,
    ) -> Progress:
        """One row's move, under vmap."""
        me, data = self.block.me(given, numbers), Batch(x, y, extra.get("weight"))
        return cast(Progress, self.bound(move, numbers)(self.block.task, me, at, data, extra.get("share", 1.0), slope))


class Stacked:
    """Jobs of one kind side by side as rows, those of several runs too."""

    name = "vmapped"

    def __init__(self, task: Task, most: int = MOST, spared: int = SPARED) -> None:
        self.task, self.most, self.spared = task, most, spared
        self.blocks: dict[Any, RowBuffers] = {}
        self.rigid: set[type] = set()  # methods whose hooks cannot bear a setting that is a tensor

    def map(self, asks: Sequence[PhaseRequest]) -> list[PhaseOutputs]:
        while True:
            try:
                errands = [ClientJobs(ask) for ask in asks]
                self._map(errands)
                return [errand.room.outbox for errand in errands if errand.room.outbox is not None]
            except torch.OutOfMemoryError:
                if self.most == 1:
                    raise
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # what is on its way still uses the memory that is given back here
            self.most = max(
                1, min(self.most, max((block.rows for block in self.blocks.values()), default=self.most)) // 2
            )
            self.blocks.clear()
            torch.cuda.empty_cache()

    def ahead(self, asks: Sequence[PhaseRequest]) -> None:
        """Put the samples of these asks in place, behind all that the device has to do, where there is room for them already."""
        for kind, some, _ in self._kinds([ClientJobs(ask) for ask in asks]):
            for key, jobs in self._lanes(kind, sorted_jobs(some)):
                with suppress(Full, torch.OutOfMemoryError):
                    if key in self.blocks:
                        self.blocks[key].lay(jobs, self.most, grow=False)

    def _map(self, errands: Sequence[ClientJobs]) -> None:
        for kind, some, differ in self._kinds(errands):
            try:
                self._play(kind, some, differ)
            except (TypeError, ValueError, RuntimeError) as e:
                if not differ or isinstance(e, torch.OutOfMemoryError):
                    raise
                self.rigid.add(type(some[0].phase))
                self._map(some)

    def _kinds(self, errands: Sequence[ClientJobs]) -> Iterator[tuple[Any, list[ClientJobs], list[str]]]:
        """Errands that share rows, by their kind, and which settings of theirs differ."""
        kinds: dict[Any, list[ClientJobs]] = {}
        for errand in errands:
            kinds.setdefault(self._kind(errand), []).append(errand)
        for kind, some in kinds.items():
            values = {name: {getattr(errand.phase, name) for errand in some} for name in liftable(some[0].phase)}
            differ = [name for name, found in values.items() if len(found) > 1]
            alike = tuple(
                (name, *found) for name, found in values.items() if name not in differ
            )  # which the graphs have in them
            yield (kind, tuple(differ), alike), some, differ

    def _kind(self, errand: ClientJobs) -> Any:
        """Errands of one kind share rows."""
        phase, *rest = errand.key()
        if type(phase) in self.rigid:
            return phase, *rest
        floats = liftable(phase)
        return type(phase), tuple((n, v) for n, v in phase.table().items() if n not in floats), *rest

    def _play(self, kind: Any, errands: Sequence[ClientJobs], differ: Sequence[str]) -> None:
        """Some jobs at a time, as many as there is room for."""
        jobs = sorted_jobs(errands)
        size = self._room(kind, jobs)
        for a in range(0, len(jobs), size):
            lanes = [(self._block(key, errands[0]), some) for key, some in self._lanes(kind, jobs[a : a + size])]
            for block, now in lanes:
                block.load(now, self.most, differ)
                block.usual = block.usual or len(now)
            for (block, now), result in zip(lanes, side_by_side(errands[0].phase, lanes, differ), strict=True):
                for errand, (rows, clients) in zip(distinct(now), block.back, strict=True):
                    errand.room.put_rows(clients, rows, result)

    def _block(self, key: Any, errand: ClientJobs) -> RowBuffers:
        if key not in self.blocks:
            self.blocks[key] = RowBuffers(self.task, errand, first=key[-1] is AHEAD)
        return self.blocks[key]

    def _lanes(self, kind: Any, jobs: Jobs) -> list[tuple[Any, Jobs]]:
        """Jobs, sorted by length, that go together, by the key of their block: the few that go ahead, if there are any, and the others."""
        few = ahead_of([longest(*job) for job in jobs], self.spared)
        return [((*kind, AHEAD), jobs[:few]), (kind, jobs[few:])] if few else [(kind, jobs)]

    def _room(self, kind: Any, jobs: Jobs) -> int:
        """Rows at a time."""
        if all(key in self.blocks and len(some) <= self.blocks[key].rows for key, some in self._lanes(kind, jobs)):
            return len(jobs)
        errand, i = jobs[0]
        x = example(errand.plan, next(iter(errand.works[i].values()))).x
        batch = max(max(work.lengths(), default=1) for errand, i in jobs for work in errand.works[i].values())
        states = sum(t[0].numel() if t.dim() > 1 else t.numel() for t in (errand.inbox.x, *errand.inbox.mine.values()))
        one = (DEEP * batch * x.numel() + 12 * states) * errand.inbox.x.element_size()
        device = errand.inbox.x.device
        return max(1, min(self.most, int(free(device) * SHARE / one) if device.type == "cuda" else self.most))


def side_by_side(phase: Algorithm, lanes: Sequence[tuple[RowBuffers, Jobs]], differ: Sequence[str]) -> list[Result]:
    """The results of jobs in the rows of several blocks, which take turns; one with a stream of its own is side by side with the rest."""
    main = torch.cuda.current_stream(lanes[0][0].device) if lanes[0][0].device.type == "cuda" else None
    own = [block.stream for block, _ in lanes if block.stream is not None]
    me = cast(Client, None)  # a row's view is made under vmap
    going = {n: client_moves(phase, me, StackedSchedule(block, jobs, differ)) for n, (block, jobs) in enumerate(lanes)}
    results: dict[int, Result] = {}
    for stream in own:
        stream.wait_stream(cast(torch.cuda.Stream, main))
    while going:
        for n in list(going):
            with torch.cuda.stream(lanes[n][0].stream):  # nothing for None
                try:
                    next(going[n])
                except StopIteration as end:
                    results[n] = end.value
                    del going[n]
    for stream in own:
        cast(torch.cuda.Stream, main).wait_stream(stream)
    return [results[n] for n in range(len(lanes))]


def ahead_of(steps: Sequence[int], spared: int = SPARED) -> int:
    """How many of these jobs, the longest first, are so much longer that they go ahead of the others."""
    few = sum(n > LONG * steps[0] for n in steps)
    while sum(steps[:few]) > FEW * sum(steps):
        few -= 1
    return few if few < len(steps) and steps[few] + spared <= steps[0] else 0


def sorted_jobs(errands: Sequence[ClientJobs]) -> Jobs:
    """The longest first."""
    return sorted(((errand, i) for errand in errands for i in range(len(errand.works))), key=lambda job: -longest(*job))


def distinct(jobs: Jobs) -> list[ClientJobs]:
    """The errands of jobs, in the order of their first ones."""
    return list({id(errand): errand for errand, _ in jobs}.values())


def same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))


def longest(errand: ClientJobs, i: int) -> int:
    return errand.plan.train[i].batches


def liftable(phase: Algorithm) -> list[str]:
    """Float settings that are set."""
    return [f.name for f in dataclasses.fields(cast(Any, phase)) if isinstance(getattr(phase, f.name), float)]
