"""Checkpoints: everything a run needs to be continued, in one safetensors file with a JSON header.

Every random draw depends on its own seed, round and client, so there is no generator state to store.
"""

from __future__ import annotations

import json
import os
from itertools import chain
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..core.bank import Bank
from ..engine.distributed import SINGLE, ProcessGroup
from ..engine.server import Server
from ..errors import StoreError
from .store import explain_write_errors

FILE = "checkpoint.safetensors"
MODEL = "x"  # the name of the global model w in the file, as older versions wrote it


def layout_digest(digest: str, server: Server) -> str:
    """A configuration's digest with the order of the coordinates, which depends on the device."""
    return digest + "-channels-last" * server.space.channels_last


def banks_of(server: Server) -> dict[str, Bank]:
    """The tables with a row for each client, by the names that they have in the file."""
    return {"clients": server.clients, "memory": server.memory, "private": server.privates}


def tensors_of(server: Server) -> dict[str, Tensor]:
    """The server's tensors beside its banks, by the names that they have in the file."""
    state = {f"server.{n}": v for n, v in server.state.items()}
    drift_history = {f"trail.{n}": v for n, v in (server.drift_history or {}).items()}
    return {MODEL: server.w, "buffers": server.buffers} | state | drift_history


def save_tensors(path: Path, tensors: dict[str, Tensor], about: dict[str, str]) -> None:
    """Write a safetensors file atomically."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with explain_write_errors(path):
        try:
            save_file({n: t.detach().cpu().contiguous() for n, t in tensors.items()}, temporary, metadata=about)
            with open(temporary, "rb+") as file:
                os.fsync(file.fileno())
            temporary.replace(path)
        except SafetensorError as e:
            raise OSError(None, str(e)) from None
        finally:
            temporary.unlink(missing_ok=True)


def gather_bank(bank: Bank, group: ProcessGroup) -> tuple[list[int], dict[str, Tensor]]:
    """The clients and rows of a bank; where ranks hold some each, rank 0 gets all."""
    rows = bank.read(bank.clients)
    if bank.owns is None or not bank.start:
        return bank.clients, rows
    clients = [group.broadcast(bank.clients, rank) for rank in range(group.size)]  # of each rank
    counts = [len(of_rank) for of_rank in clients]
    return list(chain.from_iterable(clients)), {n: group.collect_rows(v, counts) for n, v in rows.items()}


def save(folder: Path, server: Server, round: int, digest: str, group: ProcessGroup = SINGLE) -> None:
    """Write all state after a round; rank 0 writes, and all ranks must call this."""
    # copies: a method's state may be w itself, and tensors of one file must not share memory
    tensors = {n: v.clone() for n, v in tensors_of(server).items()}
    owners: dict[str, list[int]] = {}
    for kind, bank in banks_of(server).items():
        owners[kind], rows = gather_bank(bank, group)
        tensors |= {f"{kind}.{n}": v for n, v in rows.items()}
    about = {"round": str(round), "digest": layout_digest(digest, server), "owners": json.dumps(owners)}
    if group.is_leader:
        save_tensors(folder / FILE, tensors, about)


def restore(folder: Path, server: Server, digest: str) -> int:
    """Restore a server's state from a checkpoint; return the round it was saved after, 0 without a checkpoint."""
    path = folder / FILE
    if not path.exists():
        return 0
    broken = StoreError(
        f"the checkpoint {path} is damaged or of another run; remove it, or use --fresh to start this run over."
    )
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError):
        raise broken from None
    same_shapes = all(n in tensors and tensors[n].shape == v.shape for n, v in tensors_of(server).items())
    if about.get("digest") != layout_digest(digest, server) or not same_shapes:
        raise broken

    def stored(name: str, like: Tensor) -> Tensor:
        return tensors[name].to(like.device, like.dtype)

    server.w, server.buffers = stored(MODEL, server.w), stored("buffers", server.buffers)
    server.state = {n: stored(f"server.{n}", v) for n, v in server.state.items()}
    server.drift_history = server.drift_history and {
        n: stored(f"trail.{n}", v) for n, v in server.drift_history.items()
    }
    owners = json.loads(about["owners"])
    for kind, bank in banks_of(server).items():
        if owners[kind]:
            bank.write(owners[kind], {n: stored(f"{kind}.{n}", v) for n, v in bank.start.items()})
    return int(about["round"])
