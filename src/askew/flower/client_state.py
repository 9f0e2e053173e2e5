"""What a client keeps between messages: its state, by the round that left it, and what it has answered.

With every message the server says which round of this client it used last. So a client stores two states, the one that
this round left and the one that its latest round left, and continues from the right one: after a reply that came too
late, after a round that the server threw away, and after a server that was killed and runs a round again.

A client answers each message of a round once. The same message gets the same bytes again, another one gets none: two
answers with fresh noise, or two sums over different clients, would reveal more about its samples than one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ..core.files import read_tensors
from ..core.types import State
from ..errors import StoreError
from ..experiment.checkpoint import save_tensors
from ..experiment.folder_lock import explain_write_errors
from .wire import InvalidMessage, Payload, RawPayload, add_prefix, strip_prefix

try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]

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


class AnswerLog:
    """What a client has answered: of every message a hash, and of the latest round's messages the replies too.

    `path` is a file that outlives the client's processes; without it the log is in memory alone. A run that was started
    over (`start` has changed) is answered anew, unless the log is `strict`, as the privacy of a run demands: whoever
    could start a run over could otherwise ask for every answer again.
    """

    def __init__(self, path: Path | None, client: int, strict: bool) -> None:
        self.path, self.client, self.strict = path, client, strict
        self.start, self.hashes = "", dict[str, str]()  # by message, "ROUND/KIND"
        self.replies: dict[str, Payload] = {}  # by message, of the latest round
        if path is not None and path.exists():
            self._read(path)

    def find(self, start: str, round: int, kind: str, request: str) -> Payload | None:
        """The reply that this request got before; None if its message was not answered yet, a refusal if it was."""
        name = f"{round}/{kind}"
        if self.start != start and not self.strict:
            self.start, self.hashes, self.replies = start, {}, {}
        known = self.hashes.get(name)
        if known is None:
            answered = [int(key.partition("/")[0]) for key in self.hashes if key.endswith(f"/{kind}")]
            latest = max(answered, default=0)
            if self.start == start and kind != "evaluate" and latest > round:
                raise InvalidMessage(
                    f"client {self.client} has answered round {latest} and trains for no earlier one; "
                    f"round {round} came too late, go on with another round."
                )
            return None
        if known == request and (name in self.replies or not self.strict):
            return self.replies.get(name)  # without noise an older answer is computed again, and is the same
        other = "another message" if known != request else "this message, and no longer has its answer,"
        place = "" if self.path is None else f", or remove {self.path} to let the run start over"
        raise InvalidMessage(
            f"client {self.client} has answered {other} of round {round} ({kind}) before, and answers once; "
            f"go on with another round{place}."
        )

    def add(self, start: str, round: int, kind: str, request: str, reply: Payload) -> None:
        """Note an answer. It must be stored before it is sent, so that no answer is ever sent unnoted."""
        self.start = start
        self.hashes[f"{round}/{kind}"] = request
        self.replies = {name: old for name, old in self.replies.items() if name.startswith(f"{round}/")}
        self.replies[f"{round}/{kind}"] = reply
        if self.path is None:
            return
        tensors = {
            f"{name}:{n}": t.detach().clone() for name, one in self.replies.items() for n, t in one.tensors.items()
        }
        numbers = {name: {n: to_json(v) for n, v in one.numbers.items()} for name, one in self.replies.items()}
        about = {"start": start, "hashes": json.dumps(self.hashes), "replies": json.dumps(numbers)}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        save_tensors(self.path, tensors, about)

    def _read(self, path: Path) -> None:
        try:
            tensors, about = read_tensors(path)
            self.start, self.hashes = about["start"], json.loads(about["hashes"])
            for name, numbers in json.loads(about["replies"]).items():
                values = {n: from_json(v) for n, v in numbers.items()}
                self.replies[name] = Payload(values, strip_prefix(f"{name}:", tensors))
        except (OSError, KeyError, ValueError, AttributeError):
            raise StoreError(
                f"the client's list of answers {path} cannot be read or is damaged; "
                "restore it, or remove it and start the run over."
            ) from None


@contextmanager
def lock_answers(path: Path) -> Iterator[None]:
    """Let one process at a time answer for a client, so that two cannot give two answers; others wait."""
    if fcntl is None:  # as on Windows
        yield
        return
    with explain_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path.with_suffix(".lock"), "w")  # noqa: SIM115 - closed below
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def request_hash(payload: RawPayload, ignored: tuple[str, ...] = ()) -> str:
    """A hash of all that a message says, apart from the numbers with these names."""
    numbers = {name: to_json(value) for name, value in payload.numbers.items() if name not in ignored}
    hashed = sha256(json.dumps(numbers, sort_keys=True).encode())
    for name in sorted(payload.arrays):
        hashed.update(sha256(name.encode()).digest() + sha256(payload.arrays[name]).digest())
    return hashed.hexdigest()


def to_json(value: Any) -> Any:
    """A number of a message as JSON can hold it: bytes become an object with their hexadecimal digits."""
    if isinstance(value, list):
        return [to_json(one) for one in value]
    return {"hex": value.hex()} if isinstance(value, bytes) else value


def from_json(value: Any) -> Any:
    """The number that `to_json` made a JSON value of."""
    if isinstance(value, list):
        return [from_json(one) for one in value]
    return bytes.fromhex(value["hex"]) if isinstance(value, dict) else value
