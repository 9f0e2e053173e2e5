"""What travels between server and clients: letters of named numbers and tensors, checked on arrival.

A tensor travels as the bytes of numpy's file format inside Flower's array records, and nothing is ever unpickled. Who opens a letter
says which tensors it must hold: another name, shape or type, a byte too many, or a value that is not finite is refused in one sentence.
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
from ..engine.distributed import TensorSpec
from ..errors import EngineError

if TYPE_CHECKING:
    from flwr.app import RecordDict

Numbers = Mapping[str, Any]  # truth values, numbers, texts and lists of numbers
Parcels = Mapping[str, bytes]
T = TypeVar("T", bool, int, float, str, list[Any])

ALIKE = "give server and clients the same configuration, files and version of askew"
MAGIC, HEADER = b"\x93NUMPY\x01\x00", 1_000  # how an array begins; most bytes before its numbers
LONGEST = 1_000  # characters of a text
BESIDE = 2**20  # bytes that a letter may hold beside its tensors: the keys of a thousand clients


class Refused(EngineError):
    """A letter that cannot be what was asked for."""


class Payload(NamedTuple):
    """What one side says to the other."""

    numbers: Numbers
    tensors: State


class RawPayload(NamedTuple):
    """A letter on its way: tensors are bytes."""

    numbers: Numbers
    parcels: Parcels

    @property
    def bytes(self) -> int:
        """What it takes up, names included."""
        values = (e for v in self.numbers.values() for e in (v if isinstance(v, list) else [v]))
        beside = sum(len(e) if isinstance(e, (str, bytes)) else 8 for e in values)
        return sum(map(len, [*self.numbers, *self.parcels, *self.parcels.values()])) + beside


def sealed(letter: Payload) -> RawPayload:
    return RawPayload(letter.numbers, {name: packed(t) for name, t in letter.tensors.items()})


def opened(letter: RawPayload, forms: Mapping[str, TensorSpec], sender: str, finite: bool = True) -> State:
    """The tensors of a letter, which must be these; no other letter may be larger."""
    allowed = BESIDE + sum(form.bytes + HEADER for form in forms.values())
    if letter.bytes > allowed:
        raise Refused(f"{sender}: a message of {letter.bytes:,} bytes came, at most {allowed:,} are allowed; {ALIKE}.")
    if letter.parcels.keys() != forms.keys():
        raise Refused(f"{sender} sent tensors named {named(letter.parcels)}, expected {named(forms)}; {ALIKE}.")
    tensors = {name: unpacked(letter.parcels[name], form, f"{sender}, tensor {name!r}") for name, form in forms.items()}
    for name, t in tensors.items():
        if finite and t.is_floating_point() and not bool(torch.isfinite(t).all()):
            raise Refused(
                f"{sender}, tensor {name!r}: not all of its numbers are finite, as they must be; lower the learning rate."
            )
    return tensors


def named(names: Mapping[str, object]) -> str:
    return ", ".join(repr(name[:60]) for name in sorted(names)[:20]) or "none at all"


def line(text: str) -> str:
    """What somebody else wrote, fit for a line of the log."""
    return "".join(c if c.isprintable() else " " for c in text[:LONGEST])


def kind(dtype: torch.dtype) -> str:
    """A type by the name that numpy has for it as well."""
    return str(dtype).removeprefix("torch.")


def packed(t: Tensor) -> bytes:
    file = BytesIO()
    np.lib.format.write_array(file, t.detach().cpu().contiguous().numpy(), version=(1, 0), allow_pickle=False)
    return file.getvalue()


def unpacked(data: bytes, form: TensorSpec, what: str) -> Tensor:
    """A tensor of this form; no memory is taken for another one."""
    if len(data) > form.bytes + HEADER:
        raise Refused(f"{what}: {len(data):,} bytes came, at most {form.bytes + HEADER:,} are allowed; {ALIKE}.")
    try:
        start = 10 + int.from_bytes(data[8:10], "little")
        header = ast.literal_eval(data[10 : min(start, HEADER)].decode("latin1"))
        dtype, shape, columns = header["descr"], header["shape"], header["fortran_order"]
    except (ValueError, SyntaxError, TypeError, KeyError, RecursionError, MemoryError):
        dtype = shape = columns = None
    if data[:8] != MAGIC or not isinstance(dtype, str) or not isinstance(shape, tuple):
        raise Refused(f"{what}: its bytes are no plain array in numpy's format; {ALIKE}.")
    wanted = np.dtype(kind(form.dtype)).str
    if (dtype, shape) != (wanted, form.shape) or (columns and len(shape) > 1):
        raise Refused(
            f"{what}: {dtype!s:.20} {list(shape)!s:.60} came, expected {wanted} {list(form.shape)} by rows; {ALIKE}."
        )
    if len(data) - start != form.bytes:
        raise Refused(
            f"{what}: {len(data) - start:,} bytes of numbers came, expected {form.bytes:,}; send the whole array."
        )
    if not form.bytes:
        return torch.empty(form.shape, dtype=form.dtype)
    return torch.frombuffer(bytearray(memoryview(data)[start:]), dtype=form.dtype).view(form.shape)


def told(letter: RawPayload, name: str, kind: type[T], sender: str) -> T:
    """One number of a letter, of the right type; whole ones are at least 0, no text and no list is long."""
    value = letter.numbers.get(name)
    if (
        type(value) is not kind
        or (type(value) is int and value < 0)
        or (isinstance(value, (str, list)) and len(value) > LONGEST)
    ):
        came = "nothing" if value is None else f"{value!r:.60}"
        raise Refused(f"{sender}: {name} must be of type {kind.__name__} (whole numbers from 0), got {came}; {ALIKE}.")
    return value


def expect(letter: RawPayload, sender: str, **values: int | str) -> None:
    """Refuse an answer to another question: of another round, phase, client or run."""
    for name, wanted in values.items():
        came = told(letter, name, int, sender) if isinstance(wanted, int) else told(letter, name, str, sender)
        if came != wanted:
            raise Refused(
                f"{sender}: this is of {name} {line(str(came))}, expected {name} {wanted}; it is left out, {ALIKE}."
            )


# private parts --------------------------------------------------------------------------------------------------


class Shared:
    """What of a model travels: all coordinates and buffers but the private ones."""

    def __init__(self, space: Space, private: Part) -> None:
        self.space, self.private = space, private
        self.w, self.b = (
            rest(count, part) for count, part in ((space.P, private.indices), (space.Q, private.buffer_indices))
        )

    def cut(self, state: State) -> State:
        """Tensors as they travel: those as long as the model without its private coordinates."""
        if not self.private.indices.numel():
            return state
        return {n: t[self.w] if t.shape == (self.space.P,) else t for n, t in state.items()}

    def whole(self, state: State, like: State) -> State:
        """As they were, private coordinates filled in from tensors of the same names."""
        if not self.private.indices.numel():
            return state
        long = {n for n, t in like.items() if t.shape == (self.space.P,)}
        return {n: like[n].index_copy(0, self.w, t.to(like[n].device)) if n in long else t for n, t in state.items()}

    def forms(self, state: State, prefix: str = "") -> dict[str, TensorSpec]:
        """The forms of such tensors as they travel."""
        return {prefix + n: TensorSpec(tuple(t.shape), t.dtype) for n, t in self.cut(state).items()}

    def buffers(self, b: Tensor) -> State:
        """The buffers that travel; nothing where there is none."""
        return {"buffers": b[self.b]} if len(self.b) else {}

    def whole_buffers(self, state: State, like: Tensor) -> Tensor:
        return like.index_copy(0, self.b, state["buffers"].to(like.device)) if "buffers" in state else like.clone()


def rest(count: int, part: Tensor) -> Tensor:
    """All places but these."""
    kept = torch.ones(count, dtype=torch.bool, device=part.device)
    kept[part] = False
    return kept.nonzero().flatten()


def under(prefix: str, state: Mapping[str, Tensor]) -> State:
    """The entries of one kind, by their own names."""
    return {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}


def over(prefix: str, state: Mapping[str, Tensor]) -> State:
    return {prefix + n: t for n, t in state.items()}


# Flower's records -----------------------------------------------------------------------------------------------


def to_records(letter: Payload) -> RecordDict:
    """A letter as Flower carries it: one array record, one record of numbers."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    parcels = sealed(letter).parcels
    arrays = {
        name: Array(dtype=kind(t.dtype), shape=tuple(t.shape), stype="numpy.ndarray", data=parcels[name])
        for name, t in letter.tensors.items()
    }
    return RecordDict({"arrays": ArrayRecord(arrays), "numbers": ConfigRecord(dict(letter.numbers))})


def from_records(records: RecordDict, sender: str) -> RawPayload:
    """A letter out of Flower's records; what the arrays hold is checked when it is opened."""
    from flwr.app import ArrayRecord, ConfigRecord

    arrays, numbers = records.get("arrays"), records.get("numbers")
    if len(records) != 2 or not isinstance(arrays, ArrayRecord) or not isinstance(numbers, ConfigRecord):
        raise Refused(f"{sender} sent records named {named(records)}, expected 'arrays' and 'numbers'; {ALIKE}.")
    return RawPayload(dict(numbers), {name: array.data for name, array in arrays.items()})
