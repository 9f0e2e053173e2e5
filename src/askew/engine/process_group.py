"""The processes that share a run: who they are, and how numbers and rows get from one to the others."""

from __future__ import annotations

import atexit
import hmac
import json
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
from itertools import combinations, pairwise
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.ranks import STORE, rank_and_size
from ..errors import EngineError

LONGEST = timedelta(days=1)  # that a rank waits for another: whoever started the ranks ends them when one has failed


class PeerLost(EngineError):
    """Another rank has ended; its own message, or that of whoever started it, says why."""


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
        """Is this client's state kept here?"""
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
