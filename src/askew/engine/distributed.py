"""Several processes share a run's work, through torch.distributed.

All ranks run the same rounds from the same configuration. Each trains some of the participants with an engine of its
own; then rows are exchanged, so that every rank has the whole cohort's in the cohort's order and goes on alike. Sums
are thus taken in one order, whatever the number of ranks: with the sequential engine on the CPU results are the same
bit for bit, with the others up to rounding, as rows that are trained side by side then differ.

Client state lives with the rank that owns the client and does not travel. Server memory and private parts are kept by
all.
"""

from __future__ import annotations

import atexit
import heapq
import hmac
import json
import math
import os
import secrets
import socket
import tempfile
import weakref
from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import cache
from itertools import accumulate, combinations, pairwise
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.algorithm import Algorithm
from ..core.ranks import STORE, rank_and_size
from ..core.task import Task
from ..core.types import State
from ..data.dataset import Samples
from ..data.federation import Federation, RoundPlan
from ..errors import AlgorithmError, EngineError
from .base import Engine, PhaseInputs, PhaseOutputs, PhaseRequest
from .evaluate import CHUNK, Evaluator, per_sample

LONGEST = timedelta(days=1)  # that a rank waits for another: whoever started the ranks looks after dead ones
ALIGNED = 16  # bytes; where every entry of a message starts, so that it can be seen as numbers of any type


class PeerLost(EngineError):
    """Another rank is gone; why, that rank or whoever started it knows."""


@contextmanager
def peer_errors() -> Iterator[None]:
    """Turn a failing exchange into a sentence."""
    try:
        yield
    except (RuntimeError, OSError) as e:
        first = str(e).splitlines()[0] if str(e) else type(e).__name__
        raise PeerLost(
            f"the processes that share this run lost each other ({first}); start the run again: it goes on from what "
            "is stored."
        ) from None


class ProcessGroup:
    """This process, a rank, among those that share its runs; a single one by default."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size
        nothing = torch.empty(0, dtype=torch.uint8)
        self.memory: list[Tensor | None] = [nothing, nothing]  # areas that all ranks see, used in turn; None: not here
        self.sockets: list[socket.socket] | None = None  # rank 0's to the others, theirs to rank 0; None: not tried yet

    @property
    def is_leader(self) -> bool:
        """Rank 0 writes the files, prints, and decides what depends on the clock."""
        return self.rank == 0

    def owns(self, client: int) -> bool:
        """Does this client's state live here?"""
        return client % self.size == self.rank

    def share_rows(self, rows: Tensor, cuts: Sequence[int]) -> None:
        """Fill rows in place: rows cuts[r]:cuts[r + 1] are rank r's, and afterwards everybody's.

        One broadcast after another: with gloo two to five times faster than its all_gather, and nothing is padded.
        """
        if self.size > 1:
            with peer_errors():
                for r, (a, b) in enumerate(pairwise(cuts)):
                    if a < b:
                        dist.broadcast(rows[a:b], r)

    def collect_rows(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """At rank 0 all ranks' rows, one rank's below the other's; elsewhere, rows are sent there and returned."""
        with peer_errors():
            if self.is_leader:
                others = [rows.new_empty(count, *rows.shape[1:]) for count in counts[1:]]
                for r, room in enumerate(others, 1):
                    if room.numel():
                        dist.recv(room, r)
                return torch.cat([rows, *others]) if others else rows
            if rows.numel():
                dist.send(rows.contiguous(), 0)
        return rows

    def gather_numbers(self, numbers: Sequence[int]) -> Tensor:
        """The ranks' whole numbers [R, …], at all of them."""
        if self.sockets:
            with peer_errors():
                received = memoryview(self._exchange_bytes(array("q", numbers).tobytes())).cast("q")
                return torch.tensor(received.tolist()).view(self.size, -1)
        table = torch.zeros(self.size, len(numbers), dtype=torch.int64)
        table[self.rank] = torch.tensor(numbers)
        self.share_rows(table, range(self.size + 1))
        return table

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """What rank `source` passes, anything that JSON holds, at all ranks."""
        if self.size == 1:
            return value
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        length = int(self.gather_numbers([len(text)])[source, 0])
        text = text if self.rank == source else text.new_empty(length)
        self.share_rows(text, [0] * (source + 1) + [length] * (self.size - source))
        return json.loads(text.numpy().tobytes())

    # ranks on one machine ---------------------------------------------------------------------------------------------

    def _exchange_bytes(self, own: bytes) -> bytes:
        """All ranks' bytes, in the order of ranks; each gives as many. Faster than gloo, which wakes threads."""
        assert self.sockets
        if not self.is_leader:
            self.sockets[0].sendall(own)
            return receive(self.sockets[0], self.size * len(own))
        everything = b"".join([own, *(receive(line, len(own)) for line in self.sockets)])
        for line in self.sockets:
            line.sendall(everything)
        return everything

    def _connect(self) -> None:
        """Open sockets between the ranks, if they are on one machine."""
        lines, path = list[socket.socket](), ""
        weakref.finalize(self, close_sockets, lines)
        with ExitStack() as rest:
            if self.is_leader:
                listening = rest.enter_context(socket.socket(socket.AF_UNIX))
                with suppress(OSError):
                    folder = rest.enter_context(tempfile.TemporaryDirectory(prefix="askew-"))  # nobody else may open it
                    listening.bind(f"{folder}/line")
                    listening.listen(self.size)
                    path = f"{folder}/line"
            path, connected = self.broadcast(path), self.is_leader
            if not self.is_leader:
                lines.append(socket.socket(socket.AF_UNIX))
                with suppress(OSError):
                    lines[0].connect(path)
                    lines[0].sendall(self.rank.to_bytes(4, "little"))
                    connected = True
            if not bool(self.gather_numbers([connected]).all()):
                self.sockets = []
                return
            if self.is_leader:
                lines += [listening.accept()[0] for _ in range(self.size - 1)]
                lines.sort(key=lambda line: int.from_bytes(receive(line, 4), "little"))
            self.sockets = lines

    def needs_memory(self, count: int) -> bool:
        """Will the ranks have to agree before they have so many bytes of memory in common?"""
        return self.memory[0] is not None and len(self.memory[0]) < count

    def shared_memory(self, count: int) -> Tensor | None:
        """So many bytes that all ranks see and nobody else finds; None where they are not on one machine with room.

        They are others than the last time: who has these has met all others since they read those.
        """
        area = self.memory.pop(0)
        if area is not None and len(area) < count:
            file = create_shared_file(count) if self.is_leader else None
            path, number = self.broadcast(path_of_file(file) if file else ("", 0))
            here = is_shared_file(path, number, count)
            new = torch.from_file(path, shared=True, size=count, dtype=torch.uint8) if here else None
            area = new if bool(self.gather_numbers([here]).all()) else None
            if file:
                file.close()  # the memory stays for those who have it
            if self.sockets is None and area is not None:
                self._connect()
        self.memory.append(area)
        return None if area is None else area[:count]


def close_sockets(lines: list[socket.socket]) -> None:
    for line in lines:
        line.close()


def receive(line: socket.socket, count: int) -> bytes:
    """The next so many bytes from a socket."""
    data = bytearray()
    while len(data) < count:
        more = line.recv(count - len(data))
        if not more:
            raise ConnectionError("a socket was closed")
        data += more
    return bytes(data)


def create_shared_file(count: int) -> IO[bytes] | None:
    """A new file of so many bytes in memory, or None where that cannot be.

    It has no name: the system takes the memory back when the processes end, however they end.
    """
    try:
        file = tempfile.TemporaryFile(dir="/dev/shm")  # noqa: SIM115 - closed when all ranks have the memory
    except OSError:
        return None
    try:
        os.posix_fallocate(file.fileno(), 0, count)  # room is taken now: later, too little of it would kill the process
    except OSError:
        file.close()
        return None
    return file


def path_of_file(file: IO[bytes]) -> tuple[str, int]:
    """Where processes of this machine find an open file that has no name, and its number in the file system."""
    return f"/proc/{os.getpid()}/fd/{file.fileno()}", os.fstat(file.fileno()).st_ino


def is_shared_file(path: str, number: int, count: int) -> bool:
    """Is this the file of so many bytes that the leader opened? On another machine there is another one, or none."""
    try:
        found, target = Path(path).stat(), str(Path(path).readlink())
    except OSError:
        return False
    return (found.st_ino, found.st_size) == (number, count) and target.startswith("/dev/shm/")


SINGLE = ProcessGroup()


@cache
def process_group() -> ProcessGroup:
    """The group this process was started in; the first call waits for the others."""
    rank, size = rank_and_size()
    if size == 1:
        return SINGLE
    if not dist.is_available():
        raise EngineError(
            "this build of torch has no torch.distributed; set engine.workers = 1, or install another one."
        )
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)) % torch.cuda.device_count())
    if not dist.is_initialized():
        backend, path = "cpu:gloo,cuda:nccl" if cuda else "gloo", os.environ.get(STORE)
        with peer_errors():
            if path:
                store = dist.FileStore(path, size)  # type: ignore[attr-defined]
                dist.init_process_group(backend, timeout=LONGEST, store=store, rank=rank, world_size=size)
                check_peers(rank, size, shared_secret(store, rank))
            else:  # as torchrun says
                dist.init_process_group(backend, timeout=LONGEST)
        atexit.register(dist.destroy_process_group)
    return ProcessGroup(dist.get_rank(), dist.get_world_size())


def shared_secret(store: Any, rank: int) -> bytes:
    """A random number of this group, which rank 0 puts into the store: a file that only this user can read."""
    if rank == 0:
        store.set("secret", secrets.token_hex(32))
    return bytes(store.get("secret"))


def check_peers(rank: int, size: int, secret: bytes) -> None:
    """Let every two ranks show each other that they know the secret, as other programs of this machine can connect."""
    for low, high in combinations(range(size), 2):
        if rank not in (low, high):
            continue
        other = low + high - rank
        shown = torch.zeros(32, dtype=torch.uint8)
        for sender in (low, high):
            if rank == sender:
                dist.send(peer_proof(secret, rank, other), other)
            else:
                dist.recv(shown, other)
        if not hmac.compare_digest(shown.numpy().tobytes(), peer_proof(secret, other, rank).numpy().tobytes()):
            raise EngineError(
                f"another program answers in the place of worker process {other}; "
                "set engine.workers = 1, or see who else uses this machine."
            )


def peer_proof(secret: bytes, sender: int, receiver: int) -> Tensor:
    """What only somebody who knows the secret can send."""
    digest = hmac.digest(secret, f"{sender} {receiver}".encode(), "sha256")
    return torch.frombuffer(bytearray(digest), dtype=torch.uint8)


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

    def to_json(self) -> list[Any]:
        return [self.shape, str(self.dtype).removeprefix("torch.")]

    @classmethod
    def from_json(cls, value: list[Any]) -> TensorSpec:
        return cls(tuple(value[0]), getattr(torch, value[1]))


def specs_of(state: State) -> dict[str, TensorSpec]:
    return {n: TensorSpec.of(t) for n, t in state.items()}


class DistributedEngine:
    """The engine of a run that several ranks share: each trains some rows, all get all.

    Without client state the work is divided, the longest first, each to the rank with the least so far; with it, a
    client is trained by its owner. A client stays with its rank for all phases of a round, so its carry does not
    travel.
    """

    def __init__(self, inner: Engine, group: ProcessGroup) -> None:
        self.inner, self.group, self.name = inner, group, inner.name
        self.round = 0
        self.rank_of: dict[int, int] = {}  # this round's clients, and who trains them
        self.specs: dict[int, dict[str, TensorSpec]] = {}  # of each phase's rows

    def run(self, requests: Sequence[PhaseRequest]) -> list[PhaseOutputs]:
        (request,) = requests  # one run: its clients have one rank
        return [self._run(request)]

    def _run(self, request: PhaseRequest) -> PhaseOutputs:
        phase, inputs, plan, wanted = request
        ranks = self._rows_of_ranks(inputs, plan)
        own = ranks[self.group.rank]
        outputs: PhaseOutputs | None = None
        if own:
            (outputs,) = self.inner.run([PhaseRequest(phase, inputs.rows(own), plan.only(own), wanted)])
        rows = self._exchange(phase, ranks, entries_of(outputs) if outputs else {}, inputs, plan)
        up = {n.removeprefix("up."): t for n, t in rows.items() if n.startswith("up.")}
        count, local_carry = len(plan.ids), outputs.carry if outputs else {}
        carry = {n: put_rows(t.new_zeros(count, *t.shape[1:]), own, t) for n, t in local_carry.items()}
        state = self._client_state(inputs, own, outputs, rows.get("finite"))
        return PhaseOutputs(up, state, carry, rows["buffers"], rows["loss"], rows.get("theta"))

    def _client_state(
        self, inputs: PhaseInputs, own: list[int], outputs: PhaseOutputs | None, finite: Tensor | None
    ) -> State:
        """New client state of the own rows; the others stay as they were, or are NaN where their owner's are not
        finite.
        """
        state = inputs.state
        if outputs:
            if specs_of(outputs.state) != specs_of(state):
                return outputs.state  # which the server refuses
            state = {n: put_rows(state[n].clone(), own, t) for n, t in outputs.state.items()}
        if finite is None or bool(finite.all()):
            return state
        mark: dict[str, Tensor] = {}
        for n, t in state.items():
            mark[n] = torch.where(expand_like(finite, t), t, torch.nan) if t.is_floating_point() else t
        return mark

    def _synchronise(self, inputs: PhaseInputs, plan: RoundPlan) -> None:
        """Wait for all ranks, and refuse to go on where they differ: other data, code or processors would change
        results.
        """
        bits = inputs.w.contiguous().view(torch.int32 if inputs.w.element_size() == 4 else torch.int64)
        samples = sum((i + 1) * len(work.places) for i, work in zip(plan.ids, plan.train, strict=True))
        checksum = int(bits.sum(dtype=torch.int64))
        table = self.group.gather_numbers([inputs.round, len(plan.ids), samples, checksum])
        if bool((table != table[0]).any()):
            raise EngineError(
                "the processes that share this run came to different rounds, batches or models before round "
                f"{inputs.round}; give all of them the same files, folders, versions and kind of machine."
            )

    def _rows_of_ranks(self, inputs: PhaseInputs, plan: RoundPlan) -> list[list[int]]:
        """The rows that each rank trains."""
        if inputs.round != self.round or not self.rank_of.keys() >= {*plan.ids}:
            looks = [sum(len(look[i].places) for look in plan.looks.values()) for i in range(len(plan.ids))]
            loads = [len(work.places) + more for work, more in zip(plan.train, looks, strict=True)]
            size = self.group.size
            ranks = [i % size for i in plan.ids] if inputs.state else balance_load(loads, size)
            self.round, self.rank_of = inputs.round, dict(zip(plan.ids, ranks, strict=True))
        ranked = [self.rank_of[client] for client in plan.ids]
        return [[i for i, rank in enumerate(ranked) if rank == r] for r in range(self.group.size)]

    def _known_specs(
        self, phase: Algorithm, ranks: list[list[int]], sent: State, inputs: PhaseInputs, plan: RoundPlan
    ) -> dict[str, TensorSpec]:
        """What the rows of a phase are made of: in every round the same."""
        if id(phase) not in self.specs:
            self._synchronise(inputs, plan)  # before anything is sent that only those expect who came to the same point
            source = next(r for r, rows in enumerate(ranks) if rows)
            values = self.group.broadcast({n: spec.to_json() for n, spec in specs_of(sent).items()}, source)
            self.specs[id(phase)] = {n: TensorSpec.from_json(value) for n, value in values.items()}
        known = self.specs[id(phase)]
        if sent and specs_of(sent) != known:
            raise AlgorithmError(
                f"{phase.display_name()}: finish() must upload the same names, shapes and types in every round. "
                "Correct the hook."
            )
        return known

    def _exchange(
        self, phase: Algorithm, ranks: list[list[int]], sent: State, inputs: PhaseInputs, plan: RoundPlan
    ) -> State:
        """All rows, in the cohort's order, from those that each rank sends."""
        known, device = self._known_specs(phase, ranks, sent, inputs, plan), inputs.w.device
        lengths = [[-(-len(rows) * spec.bytes // ALIGNED) * ALIGNED for spec in known.values()] for rows in ranks]
        cuts = [0, *accumulate(sum(each) for each in lengths)]
        if device.type == "cpu" and self.group.needs_memory(cuts[-1]):
            self._synchronise(inputs, plan)
        shared = self.group.shared_memory(cuts[-1]) if device.type == "cpu" else None
        message = torch.empty(cuts[-1], dtype=torch.uint8, device=device) if shared is None else shared

        def entries(rank: int) -> Iterator[tuple[str, Tensor]]:
            """A rank's rows of every entry, as views of the message."""
            at, count = cuts[rank], len(ranks[rank])
            for (name, spec), length in zip(known.items(), lengths[rank], strict=True):
                yield name, message[at : at + count * spec.bytes].view(spec.dtype).view(count, *spec.shape)
                at += length

        if ranks[self.group.rank]:
            for name, room in entries(self.group.rank):
                room.copy_(sent[name])
        self._synchronise(inputs, plan)  # all have written
        if shared is None:
            self.group.share_rows(message, cuts)
        total = sum(map(len, ranks))
        whole = {n: torch.empty(total, *spec.shape, dtype=spec.dtype, device=device) for n, spec in known.items()}
        for rank, rows in enumerate(ranks):
            for name, room in entries(rank) if rows else ():
                put_rows(whole[name], rows, room)
        return whole


def entries_of(outputs: PhaseOutputs) -> State:
    """What the others need of a rank's rows; of client state, whether it is finite."""
    entries = {**{f"up.{n}": t for n, t in outputs.up.items()}, "buffers": outputs.buffers, "loss": outputs.loss}
    entries |= {} if outputs.theta is None else {"theta": outputs.theta}
    if outputs.state:
        finite = [torch.isfinite(t).reshape(len(t), -1).all(1) for t in outputs.state.values()]
        entries["finite"] = torch.stack(finite).all(0)
    return entries


def put_rows(whole: Tensor, rows: list[int], new: Tensor) -> Tensor:
    """The tensor with these rows new; on a CPU one by one, three times as fast as all by their indices."""
    if whole.is_cuda:
        whole[rows] = new
    else:
        for i, row in enumerate(rows):
            whole[row].copy_(new[i])
    return whole


def expand_like(row: Tensor, like: Tensor) -> Tensor:
    """[C] with as many dimensions as another tensor."""
    return row.view(-1, *[1] * (like.dim() - 1))


def balance_load(loads: Sequence[int], ranks: int) -> list[int]:
    """The rank of each piece of work: the longest first, each to the rank that has least to do so far."""
    totals, rank_of = [(0, r) for r in range(ranks)], [0] * len(loads)
    for i in sorted(range(len(loads)), key=lambda i: -loads[i]):
        total, rank_of[i] = heapq.heappop(totals)
        heapq.heappush(totals, (total + loads[i], rank_of[i]))
    return rank_of


class SharedEvaluator(Evaluator):
    """An evaluator whose chunks of samples are divided among the ranks; on CUDA, where it is one captured graph, each
    does it all.
    """

    def __init__(self, task: Task, fed: Federation, samples: Samples, group: ProcessGroup, *measured: bool) -> None:
        super().__init__(task, fed, samples, *measured)
        count, self.group = len(samples.y), group
        chunks = -(-count // CHUNK)
        self.cuts = [*(r * chunks // group.size * CHUNK for r in range(group.size)), count]

    def _score(self, w: Tensor, buffers: Tensor) -> Tensor:
        if w.is_cuda or len(self.samples.y) <= CHUNK:
            return super()._score(w, buffers)
        results = torch.empty(len(self.samples.y), 2, dtype=torch.float64)
        own = slice(*self.cuts[self.group.rank : self.group.rank + 2])
        if own.start < own.stop:
            part = Samples(self.samples.x[own], self.samples.y[own])
            results[own] = torch.stack(per_sample(self.task, w, buffers, part, self.fed), 1).double()
        self.group.share_rows(results, self.cuts)
        return self.score_of(*results.T.contiguous())
