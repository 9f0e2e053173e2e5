"""Bank: the state of all N clients, of which only those that were ever written cost memory.

Rows are kept in blocks. Each new block goes where there is space: on the device, then in host memory, then in a file
that is mapped into memory; so a federation grows from one place into the next without copying. Every other client reads
the declared start.
"""

from __future__ import annotations

import math
import os
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..errors import EngineError
from .types import State, select_rows

BLOCK = 256 * 2**20  # bytes of a full block; blocks start small and double up to this


def free_host_bytes() -> int:
    """Memory this machine can still give."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return 2**32


class BankBlock:
    """Some rows of every entry, in one place."""

    def __init__(self, start: State, rows: int, place: str, folder: Path | None) -> None:
        self.place, self.rows = place, rows
        self.entries: State = {}
        self.device = next(iter(start.values())).device if place == "device" else torch.device("cpu")
        for name, value in start.items():
            shape = (rows, *value.shape)
            if place == "file":
                self.entries[name] = tensor_in_file(shape, value.dtype, folder)
            else:
                pinned = place == "host" and value.device.type == "cuda"
                self.entries[name] = torch.empty(shape, dtype=value.dtype, device=self.device, pin_memory=pinned)

    def read(self, rows: list[int], device: torch.device) -> State:
        """Some rows, on a device."""
        places = index_of(rows, self.device)
        return {n: t.index_select(0, places).to(device, non_blocking=True) for n, t in self.entries.items()}


def tensor_in_file(shape: Sequence[int], dtype: torch.dtype, folder: Path | None) -> Tensor:
    """A tensor in an unnamed file: the system takes it back when the process ends, however it ends."""
    count = math.prod(shape)
    size = count * torch.empty((), dtype=dtype).element_size()
    try:
        with tempfile.TemporaryFile(dir=folder) as file:  # the mapping keeps it open
            allocate(file.fileno(), max(size, 1))
            array = np.memmap(file, dtype=np.uint8, mode="r+", shape=(max(size, 1),))
    except OSError as e:
        raise EngineError(
            f"no room for client state on disk ({size >> 20} MB): {e.strerror}; free some space or set TMPDIR; "
            "started again, the run goes on from its last checkpoint, if it has one."
        ) from None
    return (
        torch.frombuffer(array, dtype=dtype, count=count).view(*shape)
        if count
        else torch.empty(tuple(shape), dtype=dtype)
    )


def allocate(file: int, size: int) -> None:
    """Give an open file so many bytes on the disk now: a mapped page without room would kill the process later."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
    else:
        os.ftruncate(file, size)


def index_of(rows: list[int], device: torch.device) -> Tensor:
    """An index of these rows; by way of numpy, which takes a third of the time of `torch.tensor`."""
    return torch.from_numpy(np.array(rows, dtype=np.int64)).to(device)


class Bank:
    """Rows by client. `device_bytes` and `host_bytes` bound what it may take there.

    None: a quarter of the free memory of the device, half of that of the host.

    Where several processes share a federation, `owns` says whose rows are kept in this one: others are not kept.
    """

    def __init__(
        self,
        start: State,
        *,
        device_bytes: int | None = None,
        host_bytes: int | None = None,
        folder: Path | None = None,
        owns: Callable[[int], bool] | None = None,
    ) -> None:
        self.start, self.folder, self.owns = start, folder, owns
        self.row_bytes = sum(v.numel() * v.element_size() for v in start.values())
        self.row_of: dict[int, int] = {}
        self.free: list[int] = []  # rows of clients that were forgotten
        self.blocks: list[BankBlock] = []
        self.first: list[int] = []  # first row of each block
        self.device = next(iter(start.values())).device if start else torch.device("cpu")
        self.on_cuda = self.device.type == "cuda"
        if self.on_cuda and device_bytes is None:
            device_bytes = torch.cuda.mem_get_info(self.device)[0] // 4
        self.device_bytes = device_bytes if self.on_cuda and device_bytes is not None else 0
        self.host_bytes = free_host_bytes() // 2 if host_bytes is None else host_bytes

    def __len__(self) -> int:
        return len(self.row_of)

    def __contains__(self, client: int) -> bool:
        return client in self.row_of

    @property
    def clients(self) -> list[int]:
        """The clients that have a row, in the order in which they were first written."""
        return list(self.row_of)

    def bytes_by_place(self) -> dict[str, int]:
        """Bytes taken in each place."""
        taken = {"device": 0, "host": 0, "file": 0}
        for block in self.blocks:
            taken[block.place] += block.rows * self.row_bytes
        return taken

    def _grow(self, missing: int) -> None:
        """Make a block, for so many rows if that is not too much."""
        have = sum(b.rows for b in self.blocks)
        rows = max(1, min(max(16, have, missing), BLOCK // max(self.row_bytes, 1)))
        size, taken = rows * self.row_bytes, self.bytes_by_place()
        if self.on_cuda and taken["device"] + size <= self.device_bytes:
            place = "device"
        else:
            place = "host" if taken["host"] + size <= self.host_bytes else "file"
        self.blocks.append(BankBlock(self.start, rows, place, self.folder))
        self.first.append(have)

    def _groups(self, clients: Iterable[int]) -> list[tuple[BankBlock, list[int], list[int]]]:
        """Positions in the request and rows within a block, block by block, of clients that have a row."""
        groups: dict[int, tuple[list[int], list[int]]] = {}
        for position, client in enumerate(clients):
            row = self.row_of.get(client)
            if row is not None:
                block = bisect_right(self.first, row) - 1
                at, rows = groups.setdefault(block, ([], []))
                at.append(position)
                rows.append(row - self.first[block])
        return [(self.blocks[b], at, rows) for b, (at, rows) in groups.items()]

    def read(self, clients: Sequence[int]) -> State:
        """Rows [C, …] on the device, in the order asked."""
        groups = self._groups(clients)
        if len(groups) == 1 and len(groups[0][1]) == len(clients):  # all of them, in their order
            return groups[0][0].read(groups[0][2], self.device)
        out = {n: v.expand(len(clients), *v.shape).clone() for n, v in self.start.items()}
        for block, at, rows in groups:
            to = index_of(at, self.device)
            for name, found in block.read(rows, self.device).items():
                out[name].index_copy_(0, to, found)
        return out

    def write(self, clients: Sequence[int], rows: State) -> None:
        """Keep rows [C, …]; a client's first write gives it a row."""
        if not self.start:
            return
        if self.owns is not None:
            own = [i for i, client in enumerate(clients) if self.owns(client)]
            clients, rows = [clients[i] for i in own], select_rows(rows, own)
        new = dict.fromkeys(client for client in clients if client not in self.row_of)
        for n, client in enumerate(new):
            self.row_of[client] = self.free.pop() if self.free else len(self.row_of)
            if not self.blocks or self.row_of[client] >= self.first[-1] + self.blocks[-1].rows:
                self._grow(len(new) - n)
        for block, at, inner in self._groups(clients):
            places = index_of(inner, block.device)
            chosen = None if len(at) == len(clients) else index_of(at, self.device)
            for name, entry in block.entries.items():
                new_rows = rows[name] if chosen is None else rows[name].index_select(0, chosen)
                entry.index_copy_(0, places, new_rows.to(block.device))

    def forget(self, clients: Iterable[int]) -> None:
        """Give the rows of these clients free; they read the declared start again."""
        self.free += [self.row_of.pop(client) for client in clients if client in self.row_of]
