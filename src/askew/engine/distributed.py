"""Several processes share a run's work, through torch.distributed.

All ranks play the same rounds from the same configuration. Each trains some of the participants with an engine of its own;
then rows are exchanged, so that every rank has the whole cohort's in the cohort's order and goes on alike. Sums are thus taken
in one order, whatever the number of ranks: with the sequential engine on the CPU results are the same bit for bit, with
the others up to rounding, as rows that are trained side by side then differ.

Client state lives with the rank that owns the client and does not travel. Server memory and private parts are kept by all.
"""

from __future__ import annotations

import atexit
import heapq
import json
import math
import os
import socket
import tempfile
import weakref
from array import array
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.algorithm import Algorithm
from ..core.task import Task
from ..core.types import State, taken
from ..data.dataset import Samples
from ..data.federation import Federation, RoundPlan
from ..errors import AlgorithmError, EngineError
from .base import Engine, PhaseInputs, PhaseOutputs, PhaseRequest
from .evaluate import CHUNK, Evaluator, per_sample

LONGEST = timedelta(
    days=1
)  # that a rank waits for another: who started the ranks looks after the dead, so this ends nothing else
ALIGNED = 16  # bytes; where every entry of a message starts, so that it can be seen as numbers of any type


class Lost(EngineError):
    """Another rank is gone; why, that rank or who started it knows."""


@contextmanager
def peers() -> Iterator[None]:
    """Turn a failing exchange into a sentence."""
    try:
        yield
    except (RuntimeError, OSError) as e:
        first = str(e).splitlines()[0] if str(e) else type(e).__name__
        raise Lost(
            f"the processes that share this run lost each other ({first}); start the run again: it goes on from what is stored."
        ) from None


class ProcessGroup:
    """This process, a rank, among those that share its runs; alone it is the only one."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size
        nothing = torch.empty(0, dtype=torch.uint8)
        self.areas: list[Tensor | None] = [
            nothing,
            nothing,
        ]  # memory that all ranks see, used in turn; None: there is none
        self.lines: list[socket.socket] | None = None  # rank 0's to the others, or to rank 0; not tried yet, or none

    @property
    def leads(self) -> bool:
        """Rank 0 writes the files, speaks, and decides what depends on the clock."""
        return self.rank == 0

    def owns(self, client: int) -> bool:
        """Does this client's state live here?"""
        return client % self.size == self.rank

    def fill(self, rows: Tensor, cuts: Sequence[int]) -> None:
        """Rows cuts[r]:cuts[r + 1] are rank r's; afterwards, in place, everybody's.

        One broadcast after another: with gloo two to five times faster than its all_gather, and nothing is padded.
        """
        if self.size > 1:
            with peers():
                for r, (a, b) in enumerate(pairwise(cuts)):
                    if a < b:
                        dist.broadcast(rows[a:b], r)

    def collect(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """At rank 0 all ranks' rows, one rank's below the other's; elsewhere, rows are sent there and handed back."""
        with peers():
            if self.leads:
                others = [rows.new_empty(count, *rows.shape[1:]) for count in counts[1:]]
                for r, room in enumerate(others, 1):
                    if room.numel():
                        dist.recv(room, r)
                return torch.cat([rows, *others]) if others else rows
            if rows.numel():
                dist.send(rows.contiguous(), 0)
        return rows

    def gather(self, numbers: Sequence[int]) -> Tensor:
        """The ranks' whole numbers [R, …], at all of them."""
        if self.lines:
            with peers():
                return torch.tensor(memoryview(self._talk(array("q", numbers).tobytes())).cast("q").tolist()).view(
                    self.size, -1
                )
        told = torch.zeros(self.size, len(numbers), dtype=torch.int64)
        told[self.rank] = torch.tensor(numbers)
        self.fill(told, range(self.size + 1))
        return told

    def _talk(self, own: bytes) -> bytes:
        """All ranks' words, one after the other, of which each has as many. Much faster than gloo, whose threads must be woken."""
        assert self.lines
        if not self.leads:
            self.lines[0].sendall(own)
            return heard(self.lines[0], self.size * len(own))
        words = b"".join([own, *(heard(line, len(own)) for line in self.lines)])
        for line in self.lines:
            line.sendall(words)
        return words

    def _connect(self) -> None:
        """Lines between ranks, if they are on one machine."""
        lines, path = list[socket.socket](), ""
        weakref.finalize(self, hang_up, lines)
        with ExitStack() as rest:
            if self.leads:
                listening = rest.enter_context(socket.socket(socket.AF_UNIX))
                with suppress(OSError):
                    folder = rest.enter_context(
                        tempfile.TemporaryDirectory(prefix="askew-")
                    )  # which nobody else may open
                    listening.bind(f"{folder}/line")
                    listening.listen(self.size)
                    path = f"{folder}/line"
            path, there = self.tell(path), self.leads
            if not self.leads:
                lines.append(socket.socket(socket.AF_UNIX))
                with suppress(OSError):
                    lines[0].connect(path)
                    lines[0].sendall(self.rank.to_bytes(4, "little"))
                    there = True
            if not bool(self.gather([there]).all()):
                self.lines = []
                return
            if self.leads:
                lines += [listening.accept()[0] for _ in range(self.size - 1)]
                lines.sort(key=lambda line: int.from_bytes(heard(line, 4), "little"))
            self.lines = lines

    def lacks(self, count: int) -> bool:
        """Will ranks have to talk before they have so many bytes in common?"""
        return self.areas[0] is not None and len(self.areas[0]) < count

    def common(self, count: int) -> Tensor | None:
        """So many bytes that all ranks see, if they are on one machine and it has room for that; nobody else finds them.

        They are others than the last time: who has these has met all others since they read those.
        """
        area = self.areas.pop(0)
        if area is not None and len(area) < count:
            path = Path(self.tell(shared_file(count) if self.leads else ""))
            here = path.is_file() and path.stat().st_size == count
            new = torch.from_file(str(path), shared=True, size=count, dtype=torch.uint8) if here else None
            area = new if bool(self.gather([here]).all()) else None
            if self.leads and here:
                path.unlink()  # the memory stays for those who have it
            if self.lines is None and area is not None:
                self._connect()
        self.areas.append(area)
        return None if area is None else area[:count]

    def tell(self, value: Any, source: int = 0) -> Any:
        """What rank `source` says, anything that JSON holds, at all ranks."""
        if self.size == 1:
            return value
        words = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        length = int(self.gather([len(words)])[source, 0])
        words = words if self.rank == source else words.new_empty(length)
        self.fill(words, [0] * (source + 1) + [length] * (self.size - source))
        return json.loads(words.numpy().tobytes())


def hang_up(lines: list[socket.socket]) -> None:
    for line in lines:
        line.close()


def heard(line: socket.socket, count: int) -> bytes:
    """The next so many bytes of a line."""
    words = bytearray()
    while len(words) < count:
        more = line.recv(count - len(words))
        if not more:
            raise ConnectionError("a line was closed")
        words += more
    return bytes(words)


def shared_file(count: int) -> str:
    """A new file of so many bytes in memory, or nothing where that cannot be."""
    try:
        number, path = tempfile.mkstemp(dir="/dev/shm", prefix="askew-")
    except OSError:
        return ""
    try:
        os.posix_fallocate(number, 0, count)  # room is taken now: later, too little of it would kill the process
    except OSError:
        Path(path).unlink()
        return ""
    finally:
        os.close(number)
    return path


ALONE = ProcessGroup()


def place() -> tuple[int, int]:
    """This process's rank and the number of ranks, as torchrun and `workers` tell them in the environment; alone, (0, 1)."""
    told = [os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")]
    return (int(told[0]), int(told[1])) if all(told) and told[0].isdigit() and told[1].isdigit() else (0, 1)


@cache
def joined() -> ProcessGroup:
    """The group this process was started in; the first call waits for the others."""
    rank, size = place()
    if size == 1:
        return ALONE
    if not dist.is_available():
        raise EngineError(
            "this build of torch has no torch.distributed; set engine.workers = 1, or install another one."
        )
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)) % torch.cuda.device_count())
    if not dist.is_initialized():
        with peers():
            dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=LONGEST)
        atexit.register(dist.destroy_process_group)
    return ProcessGroup(dist.get_rank(), dist.get_world_size())


class TensorSpec(NamedTuple):
    """An entry of the exchanged rows: the shape and type of one row."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, rows: Tensor) -> TensorSpec:
        return cls(tuple(rows.shape[1:]), rows.dtype)

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def told(self) -> list[Any]:
        return [self.shape, str(self.dtype).removeprefix("torch.")]

    @classmethod
    def heard(cls, told: list[Any]) -> TensorSpec:
        return cls(tuple(told[0]), getattr(torch, told[1]))


def forms(state: State) -> dict[str, TensorSpec]:
    return {n: TensorSpec.of(t) for n, t in state.items()}


class DistributedEngine:
    """The engine of a run that several ranks share: each trains some rows, all get all.

    Without client state the work is dealt out, the longest first, each to the rank with the least so far; with it, a
    client is trained by its owner. A client stays with its rank for all phases of a round, so its carry does not travel.
    """

    def __init__(self, inner: Engine, group: ProcessGroup) -> None:
        self.inner, self.group, self.name = inner, group, inner.name
        self.round = 0
        self.home: dict[int, int] = {}  # this round's clients, and who trains them
        self.forms: dict[int, dict[str, TensorSpec]] = {}  # of each phase's rows

    def map(self, asks: Sequence[PhaseRequest]) -> list[PhaseOutputs]:
        (ask,) = asks  # one run: its clients have one home
        return [self._map(*ask)]

    def _map(self, phase: Algorithm, inbox: PhaseInputs, plan: RoundPlan, want: Collection[str]) -> PhaseOutputs:
        shares = self._shares(inbox, plan)
        own = shares[self.group.rank]
        out = self.inner.map([PhaseRequest(phase, part(inbox, own), plan.only(own), want)])[0] if own else None
        rows = self._exchange(phase, shares, travelling(out) if out else {}, inbox, plan)
        up = {n.removeprefix("up."): t for n, t in rows.items() if n.startswith("up.")}
        carry = {
            n: placed(t.new_zeros(len(plan.ids), *t.shape[1:]), own, t) for n, t in (out.carry if out else {}).items()
        }
        return PhaseOutputs(
            up, self._mine(inbox, own, out, rows.get("fine")), carry, rows["buffers"], rows["loss"], rows.get("w")
        )

    def _mine(self, inbox: PhaseInputs, own: list[int], out: PhaseOutputs | None, fine: Tensor | None) -> State:
        """New client state of the own rows; the others stay as they were, or are no numbers where their owner's are none."""
        mine = inbox.mine
        if out:
            if forms(out.mine) != forms(mine):
                return out.mine  # which the server refuses
            mine = {n: placed(mine[n].clone(), own, t) for n, t in out.mine.items()}
        if fine is None or bool(fine.all()):
            return mine
        return {n: torch.where(lifted(fine, t), t, torch.nan) if t.is_floating_point() else t for n, t in mine.items()}

    def _meet(self, inbox: PhaseInputs, plan: RoundPlan) -> None:
        """Wait for all ranks. Other data, another version of the code or another kind of processor elsewhere must not go unnoticed."""
        bits = inbox.x.contiguous().view(torch.int32 if inbox.x.element_size() == 4 else torch.int64)
        works = sum((i + 1) * len(work.places) for i, work in zip(plan.ids, plan.train, strict=True))
        told = self.group.gather([inbox.round, len(plan.ids), works, int(bits.sum(dtype=torch.int64))])
        if bool((told != told[0]).any()):
            raise EngineError(
                f"the processes that share this run came to different rounds, batches or models before round {inbox.round}; "
                "give all of them the same files, folders, versions and kind of machine."
            )

    def _shares(self, inbox: PhaseInputs, plan: RoundPlan) -> list[list[int]]:
        """The rows that each rank trains."""
        if inbox.round != self.round or not self.home.keys() >= {*plan.ids}:
            works = [
                len(work.places) + sum(len(look[i].places) for look in plan.looks.values())
                for i, work in enumerate(plan.train)
            ]
            homes = [i % self.group.size for i in plan.ids] if inbox.mine else dealt(works, self.group.size)
            self.round, self.home = inbox.round, dict(zip(plan.ids, homes, strict=True))
        return [[i for i, client in enumerate(plan.ids) if self.home[client] == r] for r in range(self.group.size)]

    def _exchange(
        self, phase: Algorithm, shares: list[list[int]], sent: State, inbox: PhaseInputs, plan: RoundPlan
    ) -> State:
        """All rows, in the cohort's order, from those that each rank sends."""
        own, device = shares[self.group.rank], inbox.x.device
        if id(phase) not in self.forms:
            self._meet(inbox, plan)  # before anything is said that only those expect who came to the same point
            source = next(r for r, rows in enumerate(shares) if rows)
            told = self.group.tell({n: form.told() for n, form in forms(sent).items()}, source)
            self.forms[id(phase)] = {n: TensorSpec.heard(form) for n, form in told.items()}
        known = self.forms[id(phase)]
        if sent and forms(sent) != known:
            raise AlgorithmError(
                f"{phase.called()}: finish() must upload the same names, shapes and types in every round. Correct the hook."
            )
        lengths = [[-(-len(rows) * form.bytes // ALIGNED) * ALIGNED for form in known.values()] for rows in shares]
        cuts = [0, *accumulate(sum(each) for each in lengths)]
        if device.type == "cpu" and self.group.lacks(cuts[-1]):
            self._meet(inbox, plan)
        shared = self.group.common(cuts[-1]) if device.type == "cpu" else None
        message = torch.empty(cuts[-1], dtype=torch.uint8, device=device) if shared is None else shared

        def entries(rank: int) -> Iterator[tuple[str, Tensor]]:
            """A rank's rows of every entry, as views of the message."""
            at = cuts[rank]
            for (name, form), length in zip(known.items(), lengths[rank], strict=True):
                count = len(shares[rank]) * form.bytes
                yield name, message[at : at + count].view(form.dtype).view(len(shares[rank]), *form.shape)
                at += length

        if own:
            for name, room in entries(self.group.rank):
                room.copy_(sent[name])
        self._meet(inbox, plan)  # all have written
        if shared is None:
            self.group.fill(message, cuts)
        whole = {
            n: torch.empty(sum(map(len, shares)), *form.shape, dtype=form.dtype, device=device)
            for n, form in known.items()
        }
        for rank, rows in enumerate(shares):
            if rows:
                for name, room in entries(rank):
                    placed(whole[name], rows, room)
        return whole


def part(inbox: PhaseInputs, rows: list[int]) -> PhaseInputs:
    """What the clients of some rows are handed."""
    x, buffers = (t if t.dim() == 1 else t[rows] for t in (inbox.x, inbox.buffers))
    memory, mine, carry = (taken(state, rows) for state in (inbox.memory, inbox.mine, inbox.carry))
    steps, tau, size, coin = (t[rows] for t in (inbox.steps, inbox.tau, inbox.size, inbox.coin))
    return inbox._replace(
        x=x, buffers=buffers, memory=memory, mine=mine, carry=carry, steps=steps, tau=tau, size=size, coin=coin
    )


def travelling(out: PhaseOutputs) -> State:
    """What the others need of a rank's rows; of client state, whether it is all numbers."""
    told = {**{f"up.{n}": t for n, t in out.up.items()}, "buffers": out.buffers, "loss": out.loss}
    told |= {} if out.w is None else {"w": out.w}
    if out.mine:
        told["fine"] = torch.stack([torch.isfinite(t).reshape(len(t), -1).all(1) for t in out.mine.values()]).all(0)
    return told


def placed(whole: Tensor, rows: list[int], new: Tensor) -> Tensor:
    """With these rows new; on a CPU one by one, three times as fast as all by their indices."""
    if whole.is_cuda:
        whole[rows] = new
    else:
        for i, row in enumerate(rows):
            whole[row].copy_(new[i])
    return whole


def lifted(row: Tensor, like: Tensor) -> Tensor:
    """[C] with as many dimensions as another tensor."""
    return row.view(-1, *[1] * (like.dim() - 1))


def dealt(works: Sequence[int], ranks: int) -> list[int]:
    """Who does what: the longest work first, each to the rank that has least to do so far."""
    loads, home = [(0, r) for r in range(ranks)], [0] * len(works)
    for i in sorted(range(len(works)), key=lambda i: -works[i]):
        load, home[i] = heapq.heappop(loads)
        heapq.heappush(loads, (load + works[i], home[i]))
    return home


class SharedEvaluator(Evaluator):
    """An exam whose chunks of samples are divided among the ranks; on CUDA, where it is one captured graph, each does it all."""

    def __init__(
        self, task: Task, fed: Federation, samples: Samples, group: ProcessGroup, halves: bool = False
    ) -> None:
        super().__init__(task, fed, samples, halves)
        count, self.group = len(samples.y), group
        chunks = -(-count // CHUNK)
        self.cuts = [*(r * chunks // group.size * CHUNK for r in range(group.size)), count]

    def _score(self, w: Tensor, buffers: Tensor) -> Tensor:
        if w.is_cuda or len(self.samples.y) <= CHUNK:
            return super()._score(w, buffers)
        told = torch.empty(len(self.samples.y), 2, dtype=torch.float64)
        own = slice(*self.cuts[self.group.rank : self.group.rank + 2])
        if own.start < own.stop:
            part = Samples(self.samples.x[own], self.samples.y[own])
            told[own] = torch.stack(per_sample(self.task, w, buffers, part, self.fed), 1).double()
        self.group.fill(told, self.cuts)
        return self.told(*told.T.contiguous())
