"""Checkpoints: everything a run needs to go on as if nothing had happened, in one safetensors file with a JSON header.

Random streams are addressed, so there is no generator state to keep.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..core.bank import Bank
from ..engine.server import Server
from ..errors import StoreError
from .store import disk

FILE = "checkpoint.safetensors"


def banks_of(server: Server) -> dict[str, Bank]:
    return {"clients": server.clients, "memory": server.memory, "private": server.privates}


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


def save(folder: Path, server: Server, round: int, digest: str) -> None:
    """All state after a round."""
    own = {f"server.{n}": v.clone() for n, v in server.state.items()}  # a method may keep x itself, and the file shares nothing
    tensors = {"x": server.x, "buffers": server.buffers} | own
    owners: dict[str, list[int]] = {}
    for kind, bank in banks_of(server).items():
        owners[kind] = bank.clients
        tensors |= {f"{kind}.{n}": v for n, v in bank.read(bank.clients).items()}
    about = {"round": str(round), "digest": digest, "owners": json.dumps(owners)}
    save_tensors(folder / FILE, tensors, about)


def restore(folder: Path, server: Server, digest: str) -> int:
    """Put a server back to where it was; returns the round it had played, 0 without a checkpoint."""
    path = folder / FILE
    if not path.exists():
        return 0
    broken = StoreError(f"the checkpoint {path} is damaged or of another run; remove it, or use --fresh to start this run over.")
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError):
        raise broken from None
    want = {"x": server.x, "buffers": server.buffers} | {f"server.{n}": v for n, v in server.state.items()}
    if about.get("digest") != digest or any(n not in tensors or tensors[n].shape != v.shape for n, v in want.items()):
        raise broken

    def place(name: str, like: Tensor) -> Tensor:
        return tensors[name].to(like.device, like.dtype)

    server.x, server.buffers = place("x", server.x), place("buffers", server.buffers)
    server.state = {n: place(f"server.{n}", v) for n, v in server.state.items()}
    owners = json.loads(about["owners"])
    for kind, bank in banks_of(server).items():
        if owners[kind]:
            bank.write(owners[kind], {n: place(f"{kind}.{n}", v) for n, v in bank.start.items()})
    return int(about["round"])
