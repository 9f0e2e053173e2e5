"""Checkpoints: everything a run needs to go on as if nothing had happened, in one safetensors file with a JSON header.

Random streams are addressed, so there is no generator state to keep.
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
from .store import disk

FILE = "checkpoint.safetensors"


def marked(digest: str, server: Server) -> str:
    """Stands for the configuration and the order of the coordinates, which a device may want its own way."""
    return digest + "-channels-last" * server.space.last_channels


def banks_of(server: Server) -> dict[str, Bank]:
    return {"clients": server.clients, "memory": server.memory, "private": server.privates}


def held(server: Server) -> dict[str, Tensor]:
    """What a server holds beside its banks."""
    own = {f"server.{n}": v for n, v in server.state.items()} | {
        f"trail.{n}": v for n, v in (server.drift_history or {}).items()
    }
    return {"x": server.w, "buffers": server.buffers} | own


def save_tensors(path: Path, tensors: dict[str, Tensor], about: dict[str, str]) -> None:
    """Write a safetensors file atomically."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with disk(path):
        try:
            save_file({n: t.detach().cpu().contiguous() for n, t in tensors.items()}, beside, metadata=about)
            with open(beside, "rb+") as file:
                os.fsync(file.fileno())
            beside.replace(path)
        except SafetensorError as e:
            raise OSError(None, str(e)) from None
        finally:
            beside.unlink(missing_ok=True)


def gathered(bank: Bank, group: ProcessGroup) -> tuple[list[int], dict[str, Tensor]]:
    """The clients and rows of a bank; where ranks hold some each, rank 0 gets all."""
    rows = bank.read(bank.clients)
    if bank.owns is None or not bank.start:
        return bank.clients, rows
    held = [group.broadcast(bank.clients, rank) for rank in range(group.size)]
    return list(chain.from_iterable(held)), {
        n: group.collect_rows(v, [len(clients) for clients in held]) for n, v in rows.items()
    }


def save(folder: Path, server: Server, round: int, digest: str, group: ProcessGroup = SINGLE) -> None:
    """All state after a round, written by rank 0 with the help of all."""
    tensors = {n: v.clone() for n, v in held(server).items()}  # a method may keep x itself, and the file shares nothing
    owners: dict[str, list[int]] = {}
    for kind, bank in banks_of(server).items():
        owners[kind], rows = gathered(bank, group)
        tensors |= {f"{kind}.{n}": v for n, v in rows.items()}
    about = {"round": str(round), "digest": marked(digest, server), "owners": json.dumps(owners)}
    if group.is_leader:
        save_tensors(folder / FILE, tensors, about)


def restore(folder: Path, server: Server, digest: str) -> int:
    """Put a server back to where it was; returns the round it had played, 0 without a checkpoint."""
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
    want = held(server)
    if about.get("digest") != marked(digest, server) or any(
        n not in tensors or tensors[n].shape != v.shape for n, v in want.items()
    ):
        raise broken

    def place(name: str, like: Tensor) -> Tensor:
        return tensors[name].to(like.device, like.dtype)

    server.w, server.buffers = place("x", server.w), place("buffers", server.buffers)
    server.state = {n: place(f"server.{n}", v) for n, v in server.state.items()}
    server.drift_history = server.drift_history and {n: place(f"trail.{n}", v) for n, v in server.drift_history.items()}
    owners = json.loads(about["owners"])
    for kind, bank in banks_of(server).items():
        if owners[kind]:
            bank.write(owners[kind], {n: place(f"{kind}.{n}", v) for n, v in bank.start.items()})
    return int(about["round"])
