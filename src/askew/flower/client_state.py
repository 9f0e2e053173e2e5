"""The state that a client keeps between messages: where it is stored, and which round left it.

With every message the server says which round of this client it used last. So a client stores two states, the one that
this round left and the one that its latest round left, and continues from the right one: after a reply that came too
late, after a round that the server threw away, and after a server that was killed and runs a round again.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from ..core.files import read_tensors
from ..core.types import State
from ..errors import StoreError
from ..experiment.checkpoint import save_tensors
from .wire import add_prefix, strip_prefix

if TYPE_CHECKING:
    from flwr.app import RecordDict

MAX_CONTEXT = 64 * 2**20  # bytes; a context travels between processes with every message, so more goes to a file


class StateStore(Protocol):
    """A place for tensors between messages."""

    def read(self) -> State: ...
    def write(self, tensors: State) -> None: ...


class MemoryStore:
    """Tensors in the memory of this process."""

    def __init__(self) -> None:
        self.tensors: State = {}

    def read(self) -> State:
        return self.tensors

    def write(self, tensors: State) -> None:
        self.tensors = tensors


class FileStore:
    """Tensors in a file of the client, which is replaced as a whole."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> State:
        try:
            return read_tensors(self.path)[0] if self.path.exists() else {}
        except (ValueError, OSError):
            raise StoreError(
                f"the client's state {self.path} cannot be read or is damaged; "
                "restore it, or remove it and start the run over."
            ) from None

    def write(self, tensors: State) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        save_tensors(self.path, tensors, {})


class ContextStore:
    """Tensors in the context that Flower keeps for a run while the node is up; in a file if they are large."""

    def __init__(self, context: RecordDict, file: FileStore) -> None:
        self.context, self.file = context, file

    def read(self) -> State:
        from flwr.app import ArrayRecord

        record = self.context.get("askew")
        if not isinstance(record, ArrayRecord):
            return self.file.read()
        return {name: torch.from_numpy(array.numpy().copy()) for name, array in record.items()}

    def write(self, tensors: State) -> None:
        from flwr.app import Array, ArrayRecord

        if sum(t.numel() * t.element_size() for t in tensors.values()) > MAX_CONTEXT:
            self.file.write(tensors)
            self.context.pop("askew", None)
            return
        self.context["askew"] = ArrayRecord(
            {name: Array(t.detach().cpu().contiguous().numpy()) for name, t in tensors.items()}
        )


class StateHistory:
    """A client's state by the round that left it, and what a phase of a round leaves for the next phase.

    `initial` is the state before the client's first round. Names in the store begin with "ROUND." or "ROUND/PHASE.".
    """

    def __init__(self, store: StateStore, initial: State, client: int) -> None:
        self.store, self.initial, self.client = store, initial, client

    def load_round(self, round: int) -> State:
        """The state that a round left; round 0 is the initial state."""
        if round == 0 or not self.initial:
            return self.initial
        state = strip_prefix(f"{round}.", self.store.read())
        if state.keys() != self.initial.keys() or any(t.shape != self.initial[n].shape for n, t in state.items()):
            raise StoreError(
                f"client {self.client} has no state of round {round}, which the server has used; "
                "give the node a folder that outlives it "
                "(--node-config 'state=\"FOLDER\"'), then start the run over."
            )
        return {n: t.to(self.initial[n].device, self.initial[n].dtype) for n, t in state.items()}

    def save_round(self, last_used: int, round: int, state: State) -> None:
        """Store the state that a round leaves, beside the state of the round that the server used last."""
        if self.initial:
            self._write(last_used, add_prefix(f"{round}.", state))

    def load_phase(self, round: int, phase: int) -> State:
        """What the phase before left for this phase of a round."""
        state = strip_prefix(f"{round}/{phase}.", self.store.read())
        if not state:
            raise StoreError(
                f"client {self.client} has not done phase {phase - 1} of round {round}; "
                "it takes part again in another round."
            )
        return state

    def save_phase(self, last_used: int, round: int, phase: int, state: State) -> None:
        """Store what a phase leaves for the next one, which is `phase`, beside the state that the server used last."""
        self._write(last_used, add_prefix(f"{round}/{phase}.", state))

    def _write(self, last_used: int, new: State) -> None:
        old = add_prefix(f"{last_used}.", self.load_round(last_used)) if last_used and self.initial else {}
        self.store.write(old | new)
