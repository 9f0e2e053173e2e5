"""The format of messages between server and clients: named numbers and tensors, checked when they are read.

A tensor travels as the bytes of numpy's file format inside Flower's array records, and nothing is ever unpickled. Who
reads a message states which tensors it must hold: another name, shape or type, extra bytes, or a value that is not
finite is refused in one sentence.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from io import BytesIO
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..core.space import Space
from ..core.types import Part, State
from ..engine.answers import NOT_FINITE, OTHER_CLIENT, OTHER_ROUND, WRONG_FORM
from ..engine.distributed import TensorSpec
from ..errors import EngineError

if TYPE_CHECKING:
    from flwr.app import RecordDict

Numbers = Mapping[str, Any]  # truth values, numbers, texts, and lists of them
T = TypeVar("T", bool, int, float, str, list[Any])

MODEL = "x"  # the name of the global model w in messages and in stored phases, as older versions wrote it

# The advice that ends most sentences about a wrong message.
SAME_SETUP = "give server and clients the same configuration, files and version of askew"
NPY_MAGIC = b"\x93NUMPY\x01\x00"  # the first bytes of an array in numpy's file format, version 1.0
MAX_HEADER = 1_000  # bytes before the numbers of an array
MAX_LENGTH = 1_000  # characters of a text, or items of a list
# Why a message with another one of these numbers is refused; WRONG_FORM for the other numbers.
ADDRESS_REASONS = {"client": OTHER_CLIENT, "round": OTHER_ROUND, "phase": OTHER_ROUND}
MAX_NUMBER = 2**53  # of a whole number: up to here a float holds it too
MAX_EXTRA = 2**20  # bytes of a message besides its tensors: enough for the keys of a thousand clients


class InvalidMessage(EngineError):
    """A message that cannot be what was asked for; `reason` is that of the incident, as records name it."""

    def __init__(self, sentence: str, reason: str = WRONG_FORM) -> None:
        super().__init__(sentence)
        self.reason = reason


class Payload(NamedTuple):
    """What a message says: numbers and tensors by name."""

    numbers: Numbers
    tensors: State


class RawPayload(NamedTuple):
    """A payload as it travels: every tensor is the bytes of an array, not yet checked."""

    numbers: Numbers
    arrays: Mapping[str, bytes]

    @property
    def bytes(self) -> int:
        """Its size in bytes, names included."""
        values = (e for v in self.numbers.values() for e in (v if isinstance(v, list) else [v]))
        value_bytes = sum(len(e) if isinstance(e, (str, bytes)) else 8 for e in values)
        return sum(map(len, [*self.numbers, *self.arrays, *self.arrays.values()])) + value_bytes


def encode_payload(payload: Payload) -> RawPayload:
    """The payload as it travels."""
    return RawPayload(payload.numbers, {name: encode_tensor(t) for name, t in payload.tensors.items()})


def read_tensors(
    payload: RawPayload, specs: Mapping[str, TensorSpec], sender: str, require_finite: bool = True
) -> State:
    """The tensors of a payload, which must have exactly these names, shapes and types; a larger payload is refused."""
    allowed = MAX_EXTRA + sum(spec.bytes + MAX_HEADER for spec in specs.values())
    if payload.bytes > allowed:
        raise InvalidMessage(
            f"{sender}: a message of {payload.bytes:,} bytes came, at most {allowed:,} are allowed; {SAME_SETUP}."
        )
    if payload.arrays.keys() != specs.keys():
        raise InvalidMessage(
            f"{sender} sent tensors named {quote_names(payload.arrays)}, expected {quote_names(specs)}; {SAME_SETUP}."
        )
    tensors = {
        name: decode_tensor(payload.arrays[name], spec, f"{sender}, tensor {name!r}") for name, spec in specs.items()
    }
    for name, t in tensors.items():
        if require_finite and t.is_floating_point() and not bool(torch.isfinite(t).all()):
            raise InvalidMessage(
                f"{sender}, tensor {name!r}: not all of its numbers are finite, as they must be; "
                "lower the learning rate.",
                NOT_FINITE,
            )
    return tensors


def quote_names(names: Mapping[str, object]) -> str:
    """The first names, shortened and in quotes, for a sentence."""
    return ", ".join(repr(name[:60]) for name in sorted(names)[:20]) or "none at all"


def to_one_line(text: str) -> str:
    """Text that another machine wrote, shortened and without control characters, so that it fits a line of the log."""
    return "".join(c if c.isprintable() else " " for c in text[:MAX_LENGTH])


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a type, which is the same in torch and in numpy."""
    return str(dtype).removeprefix("torch.")


def encode_tensor(t: Tensor) -> bytes:
    """The tensor in numpy's file format."""
    file = BytesIO()
    np.lib.format.write_array(file, t.detach().cpu().contiguous().numpy(), version=(1, 0), allow_pickle=False)
    return file.getvalue()


def decode_tensor(data: bytes, spec: TensorSpec, what: str) -> Tensor:
    """The tensor of this shape and type that the bytes hold; `what` names it in sentences.

    The header is checked before memory is taken, so a false one costs nothing.
    """
    allowed = spec.bytes + MAX_HEADER
    if len(data) > allowed:
        raise InvalidMessage(f"{what}: {len(data):,} bytes came, at most {allowed:,} are allowed; {SAME_SETUP}.")
    try:
        start = 10 + int.from_bytes(data[8:10], "little")  # where the numbers begin
        header = ast.literal_eval(data[10 : min(start, MAX_HEADER)].decode("latin1"))
        dtype, shape, by_columns = header["descr"], header["shape"], header["fortran_order"]
    except (ValueError, SyntaxError, TypeError, KeyError, RecursionError, MemoryError):
        dtype = shape = by_columns = None
    if data[:8] != NPY_MAGIC or not isinstance(dtype, str) or not isinstance(shape, tuple):
        raise InvalidMessage(f"{what}: its bytes are no plain array in numpy's format; {SAME_SETUP}.")
    expected = np.dtype(dtype_name(spec.dtype)).str
    if (dtype, shape) != (expected, spec.shape) or (by_columns and len(shape) > 1):
        raise InvalidMessage(
            f"{what}: {dtype!s:.20} {list(shape)!s:.60} came, expected {expected} {list(spec.shape)} by rows; "
            f"{SAME_SETUP}."
        )
    if len(data) - start != spec.bytes:
        raise InvalidMessage(
            f"{what}: {len(data) - start:,} bytes of numbers came, expected {spec.bytes:,}; send the whole array."
        )
    if not spec.bytes:
        return torch.empty(spec.shape, dtype=spec.dtype)
    return torch.frombuffer(bytearray(memoryview(data)[start:]), dtype=spec.dtype).view(spec.shape)


def read_value(payload: RawPayload, name: str, kind: type[T], sender: str) -> T:
    """One of the numbers, of the right type: an int from 0 to MAX_NUMBER, a text or list of MAX_LENGTH at most."""
    value = payload.numbers.get(name)
    if (
        type(value) is not kind
        or (type(value) is int and not 0 <= value <= MAX_NUMBER)
        or (isinstance(value, (str, list)) and len(value) > MAX_LENGTH)
    ):
        received = "nothing" if value is None else f"{value!r:.60}"
        raise InvalidMessage(
            f"{sender}: {name} must be of type {kind.__name__} (whole numbers from 0), got {received}; {SAME_SETUP}."
        )
    return value


def check_values(payload: RawPayload, sender: str, **expected: int | str) -> None:
    """Refuse a message of another round, phase, client or run: each of these numbers must have the expected value."""
    for name, value in expected.items():
        number = isinstance(value, int)
        received = read_value(payload, name, int, sender) if number else read_value(payload, name, str, sender)
        if received != value:
            raise InvalidMessage(
                f"{sender}: this is of {name} {to_one_line(str(received))}, expected {name} {value}; "
                f"it is left out, {SAME_SETUP}.",
                ADDRESS_REASONS.get(name, WRONG_FORM),
            )


# private parts --------------------------------------------------------------------------------------------------


class SharedCoordinates:
    """The coordinates [P] and buffers [Q] of a model that travel: all but the private ones."""

    def __init__(self, space: Space, private: Part) -> None:
        self.space, self.private = space, private
        self.w = remaining_indices(space.P, private.indices)
        self.b = remaining_indices(space.Q, private.buffer_indices)

    def remove_private(self, state: State) -> State:
        """Tensors as they travel: those of shape [P] lose their private coordinates, others stay as they are."""
        if not self.private.indices.numel():
            return state
        return {n: t[self.w] if t.shape == (self.space.P,) else t for n, t in state.items()}

    def restore_private(self, state: State, full: State) -> State:
        """Tensors as they were before they travelled; private coordinates are those of the tensors in `full`."""
        if not self.private.indices.numel():
            return state
        model_sized = {n for n, t in full.items() if t.shape == (self.space.P,)}
        return {
            n: full[n].index_copy(0, self.w, t.to(full[n].device)) if n in model_sized else t for n, t in state.items()
        }

    def specs(self, state: State, prefix: str = "") -> dict[str, TensorSpec]:
        """Shapes and types of these tensors as they travel."""
        return {prefix + n: TensorSpec(tuple(t.shape), t.dtype) for n, t in self.remove_private(state).items()}

    def shared_buffers(self, buffers: Tensor) -> State:
        """The buffers that travel, under the name `buffers`; nothing where there are none."""
        return {"buffers": buffers[self.b]} if len(self.b) else {}

    def restore_buffers(self, state: State, full: Tensor) -> Tensor:
        """All buffers [Q]: those that travelled, and the private ones of `full`."""
        return full.index_copy(0, self.b, state["buffers"].to(full.device)) if "buffers" in state else full.clone()


def remaining_indices(count: int, indices: Tensor) -> Tensor:
    """The numbers from 0 to `count` − 1 that are not among the indices."""
    remaining = torch.ones(count, dtype=torch.bool, device=indices.device)
    remaining[indices] = False
    return remaining.nonzero().flatten()


def add_prefix(prefix: str, state: Mapping[str, Tensor]) -> State:
    """The tensors with a prefix before each name."""
    return {prefix + n: t for n, t in state.items()}


def strip_prefix(prefix: str, state: Mapping[str, Tensor]) -> State:
    """The tensors whose names have a prefix, by their names without it."""
    return {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}


# Flower's records -----------------------------------------------------------------------------------------------


def to_records(payload: Payload) -> RecordDict:
    """The payload as Flower carries it: one record of arrays, one of numbers."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    raw = encode_payload(payload)
    arrays = {
        name: Array(dtype=dtype_name(t.dtype), shape=tuple(t.shape), stype="numpy.ndarray", data=raw.arrays[name])
        for name, t in payload.tensors.items()
    }
    return RecordDict({"arrays": ArrayRecord(arrays), "numbers": ConfigRecord(dict(payload.numbers))})


def from_records(records: RecordDict, sender: str) -> RawPayload:
    """The payload in Flower's records; `read_tensors` checks what its arrays hold."""
    from flwr.app import ArrayRecord, ConfigRecord

    arrays, numbers = records.get("arrays"), records.get("numbers")
    if len(records) != 2 or not isinstance(arrays, ArrayRecord) or not isinstance(numbers, ConfigRecord):
        raise InvalidMessage(
            f"{sender} sent records named {quote_names(records)}, expected 'arrays' and 'numbers'; {SAME_SETUP}."
        )
    return RawPayload(dict(numbers), {name: array.data for name, array in arrays.items()})
