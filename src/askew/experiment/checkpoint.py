"""Checkpoints: everything a run needs to be continued, in one safetensors file with a JSON header; the last two stay.

Every random draw depends on its own seed, round and client, so there is no generator state to store.
"""

from __future__ import annotations

import json
import warnings
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from ..core.bank import Bank
from ..core.files import read_tensors, write_tensors
from ..engine.process_group import SINGLE, ProcessGroup
from ..engine.server import Server
from ..errors import StoreError, StoreWarning
from .folder_lock import CHECKPOINTS, explain_write_errors

FILE, PREVIOUS = CHECKPOINTS
NEXT = "checkpoint-next.safetensors"  # one that is whole and about to become FILE
FILES = (FILE, PREVIOUS, NEXT)
END_FILES = "end-*.safetensors"  # the state after the last round of a finished run
MODEL = "x"  # the name of the global model w in the file, as older versions wrote it


def layout_digest(digest: str, server: Server) -> str:
    """A configuration's digest with the order of the coordinates, which depends on the device."""
    return digest + "-channels-last" * server.space.channels_last


def banks_of(server: Server) -> dict[str, Bank]:
    """The tables with a row for each client, by the names that they have in the file."""
    return server.stored_banks


def tensors_of(server: Server) -> dict[str, Tensor]:
    """The server's tensors beside its banks, by the names that they have in the file."""
    state = {f"server.{n}": v for n, v in server.state.items()}
    drift_history = {f"trail.{n}": v for n, v in (server.drift_history or {}).items()}
    return {MODEL: server.w, "buffers": server.buffers} | state | drift_history


def save_tensors(path: Path, tensors: dict[str, Tensor], about: dict[str, str]) -> None:
    """Write a safetensors file atomically, with a hash of all that is in it."""
    with explain_write_errors(path):
        write_tensors(path, tensors, about)


def gather_bank(bank: Bank, group: ProcessGroup) -> tuple[list[int], dict[str, Tensor]]:
    """The clients and rows of a bank; where ranks hold some each, rank 0 gets all."""
    rows = bank.read(bank.clients)
    if bank.owns is None or not bank.start:
        return bank.clients, rows
    clients = [group.broadcast(bank.clients, rank) for rank in range(group.size)]  # of each rank
    counts = [len(of_rank) for of_rank in clients]
    return list(chain.from_iterable(clients)), {n: group.collect_rows(v, counts) for n, v in rows.items()}


def collect_state(
    server: Server, round: int, digest: str, group: ProcessGroup = SINGLE, computed_with: str = ""
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """All state after a round, and what is noted about it; rank 0 gets all of it, and all ranks must call this."""
    # copies: a method's state may be w itself, and tensors of one file must not share memory
    tensors = {n: v.clone() for n, v in tensors_of(server).items()}
    owners: dict[str, list[int]] = {}
    for kind, bank in banks_of(server).items():
        owners[kind], rows = gather_bank(bank, group)
        tensors |= {f"{kind}.{n}": v for n, v in rows.items()}
    about = {"round": str(round), "digest": layout_digest(digest, server), "owners": json.dumps(owners)}
    return tensors, about | {"computed_with": computed_with}


def save(
    folder: Path, server: Server, round: int, digest: str, group: ProcessGroup = SINGLE, computed_with: str = ""
) -> None:
    """Write all state after a round, and keep the checkpoint before; rank 0 writes, and all ranks must call this."""
    tensors, about = collect_state(server, round, digest, group, computed_with)
    if not group.is_leader:
        return
    save_tensors(folder / NEXT, tensors, about)
    with explain_write_errors(folder / FILE):
        # killed after the first of these, a process leaves the checkpoint before, and its rounds are there
        if (folder / FILE).exists():
            (folder / FILE).replace(folder / PREVIOUS)
        (folder / NEXT).replace(folder / FILE)


def remove(folder: Path) -> None:
    """Remove the checkpoints of a run that has all its rounds."""
    for name in FILES:
        (folder / name).unlink(missing_ok=True)


def remove_end(folder: Path) -> None:
    """Remove the state after the last round of a finished run."""
    for path in folder.glob(END_FILES):
        path.unlink()


def has_checkpoint(folder: Path) -> bool:
    """Is there a checkpoint, whole or not?"""
    return any((folder / name).exists() for name in CHECKPOINTS)


class Checkpoint(NamedTuple):
    """What a checkpoint holds."""

    round: int
    tensors: dict[str, Tensor]
    owners: dict[str, list[int]]  # the clients of each bank's rows
    computed_with: str


def read(path: Path, server: Server, digest: str) -> Checkpoint:
    """A checkpoint of this run; a ValueError if it is damaged or of another run."""
    tensors, about = read_tensors(path)
    if about.get("digest") != layout_digest(digest, server):
        raise ValueError("of another run")
    if about.keys() - {"round", "digest", "owners", "computed_with"}:  # a damaged name, perhaps that of the hash
        raise ValueError("damaged")
    try:
        owners = json.loads(about["owners"])
        shapes = {n: tuple(v.shape) for n, v in tensors_of(server).items()}
        for kind, bank in banks_of(server).items():
            if owners[kind]:
                shapes |= {f"{kind}.{n}": (len(owners[kind]), *v.shape) for n, v in bank.start.items()}
        if any(tensors[n].shape != shape for n, shape in shapes.items()):
            raise ValueError("tensors of other shapes")
        return Checkpoint(int(about["round"]), tensors, owners, about.get("computed_with", ""))
    except (KeyError, TypeError):
        raise ValueError("incomplete") from None


def restore(
    folder: Path, server: Server, digest: str, rounds: int | None = None, computed_with: str = "", problem: str = ""
) -> int:
    """Restore a server's state from the newest whole checkpoint; return its round, 0 without a checkpoint.

    `rounds` is the number of rounds that have a record, and `problem` says why there are no more; a checkpoint of a
    later round is not used. A damaged one is named in a warning, and the one before it is used.
    """
    problems: list[str] = []
    for path in (folder / FILE, folder / PREVIOUS):
        if not path.exists():
            continue
        try:
            found = read(path, server, digest)
        except (ValueError, OSError):
            problems.append(f"the checkpoint {path} is damaged or of another run")
            continue
        if rounds is not None and found.round > rounds:
            problems.append(problem or f"{folder / 'rounds.jsonl'} ends before the checkpoint's round {found.round}")
            continue
        if problems:
            warn(f"{problems[0]}; the run goes on from the checkpoint before it, of round {found.round}.")
        if found.computed_with not in ("", computed_with) and computed_with:
            warn(
                f"the rounds up to {found.round} were computed with {found.computed_with}, and the run goes on with "
                f"{computed_with}: its numbers may differ in their last digits from those of a run that was not "
                "interrupted; where that matters, use the same again, or --fresh."
            )
        adopt(found, server)
        return found.round
    if problems:
        raise StoreError(f"{'; '.join(dict.fromkeys(problems))}; restore it, or use --fresh to start this run over.")
    if problem:
        warn(f"{problem}; there is no checkpoint, so the run starts over.")
    return 0


def warn(sentence: str) -> None:
    """Warn of something stored without which the run goes on."""
    warnings.warn(sentence, StoreWarning, stacklevel=3)


def adopt(found: Checkpoint, server: Server) -> None:
    """Give a server the state of a checkpoint."""

    def stored(name: str, like: Tensor) -> Tensor:
        return found.tensors[name].to(like.device, like.dtype)

    server.w, server.buffers = stored(MODEL, server.w), stored("buffers", server.buffers)
    server.state = {n: stored(f"server.{n}", v) for n, v in server.state.items()}
    server.drift_history = server.drift_history and {
        n: stored(f"trail.{n}", v) for n, v in server.drift_history.items()
    }
    for kind, bank in banks_of(server).items():
        if found.owners[kind]:
            bank.write(found.owners[kind], {n: stored(f"{kind}.{n}", v) for n, v in bank.start.items()})
