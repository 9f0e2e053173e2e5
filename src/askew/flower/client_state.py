"""What a client keeps between messages, and where: its state by the round that left it.

The server says with every message which round of this client's it has used last. So a client holds the state that round left and the
one its latest round left, and goes on from the right one: after an answer that came too late, after a round that the server threw
away, and after a server that was killed and plays a round again.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load as tensors_of

from ..core.types import State
from ..errors import StoreError
from ..experiment.checkpoint import save_tensors
from .wire import over, under

if TYPE_CHECKING:
    from flwr.app import RecordDict

SMALL = 64 * 2**20  # bytes; a context travels between processes with every message, more is kept in a file


class Place(Protocol):
    """Where tensors lie between messages."""

    def read(self) -> State: ...
    def write(self, tensors: State) -> None: ...


class InMemory:
    """In this process."""

    def __init__(self) -> None:
        self.tensors: State = {}

    def read(self) -> State:
        return self.tensors

    def write(self, tensors: State) -> None:
        self.tensors = tensors


class InFile:
    """In a file that the client owns, replaced as a whole."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> State:
        try:
            return tensors_of(self.path.read_bytes())
        except FileNotFoundError:
            return {}
        except (SafetensorError, OSError):
            raise StoreError(
                f"the client's state {self.path} cannot be read; restore it, or remove it and start the run over."
            ) from None

    def write(self, tensors: State) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        save_tensors(self.path, tensors, {})


class InContext:
    """In the context that Flower keeps for a node and a run while the node is up; what is large, in a file all the same."""

    def __init__(self, state: RecordDict, file: InFile) -> None:
        self.state, self.file = state, file

    def read(self) -> State:
        from flwr.app import ArrayRecord

        kept = self.state.get("askew")
        if not isinstance(kept, ArrayRecord):
            return self.file.read()
        return {name: torch.from_numpy(array.numpy().copy()) for name, array in kept.items()}

    def write(self, tensors: State) -> None:
        from flwr.app import Array, ArrayRecord

        if sum(t.numel() * t.element_size() for t in tensors.values()) > SMALL:
            self.file.write(tensors)
            self.state.pop("askew", None)
            return
        self.state["askew"] = ArrayRecord(
            {name: Array(t.detach().cpu().contiguous().numpy()) for name, t in tensors.items()}
        )


class Kept:
    """A client's state by the round that left it, before its first round as declared; and what a phase leaves to the next."""

    def __init__(self, place: Place, start: State, client: int) -> None:
        self.place, self.start, self.client = place, start, client

    def after(self, round: int) -> State:
        """The state that a round left, 0 for the start."""
        if round == 0 or not self.start:
            return self.start
        found = under(f"{round}.", self.place.read())
        if found.keys() != self.start.keys() or any(t.shape != self.start[n].shape for n, t in found.items()):
            raise StoreError(
                f"client {self.client} has no state of round {round}, which the server has used; give the node a folder that outlives it "
                "(--node-config 'state=\"FOLDER\"'), then start the run over."
            )
        return {n: t.to(self.start[n].device, self.start[n].dtype) for n, t in found.items()}

    def keep(self, used: int, round: int, state: State) -> None:
        """The state that this round leaves, beside the one of the round used last."""
        if self.start:
            self._write(used, over(f"{round}.", state))

    def between(self, round: int, phase: int) -> State:
        """What this round's phase before left."""
        found = under(f"{round}/{phase}.", self.place.read())
        if not found:
            raise StoreError(
                f"client {self.client} has not done phase {phase - 1} of round {round}; it takes part again in another round."
            )
        return found

    def keep_between(self, used: int, round: int, phase: int, state: State) -> None:
        self._write(used, over(f"{round}/{phase}.", state))

    def _write(self, used: int, new: State) -> None:
        self.place.write((over(f"{used}.", self.after(used)) if used and self.start else {}) | new)
