"""The format of messages: what is written is read back, and anything else is refused."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO

import numpy as np
import pytest
import torch
from in_process import encode_as_flower
from torch import Tensor

from askew.core.space import Space
from askew.engine.distributed import TensorSpec
from askew.flower.wire import (
    InvalidMessage,
    Payload,
    RawPayload,
    SharedCoordinates,
    check_values,
    decode_tensor,
    encode_payload,
    encode_tensor,
    from_records,
    read_tensors,
    read_value,
)

TENSORS = {
    "vector": torch.randn(7),
    "matrix": torch.randn(3, 4),
    "precise": torch.randn(2, dtype=torch.float64),
    "number": torch.tensor(1.5),
    "whole": torch.arange(3),
    "empty": torch.zeros(0),
    "turned": torch.randn(4, 3).T,
}
NUMBERS = {
    "round": 3,
    "loss": float("nan"),
    "clip": float("inf"),
    "name": "é",
    "real": True,
    "shape": [1, 2],
    "scores": [0.5, 1.0],
}


def specs(tensors: dict[str, Tensor]) -> dict[str, TensorSpec]:
    return {n: TensorSpec(tuple(t.shape), t.dtype) for n, t in tensors.items()}


@pytest.mark.parametrize("encode", [encode_payload, encode_as_flower])
@pytest.mark.parametrize("tensors", [TENSORS, {}])
def test_a_payload_is_read_back(encode: Callable[[Payload], RawPayload], tensors: dict[str, Tensor]) -> None:
    payload = encode(Payload(NUMBERS, tensors))
    received = read_tensors(payload, specs(tensors), "somebody")
    assert received.keys() == tensors.keys()
    assert all(torch.equal(received[n], t) and received[n].dtype == t.dtype for n, t in tensors.items())
    assert repr(dict(payload.numbers)) == repr(NUMBERS)


def to_npy(array: np.ndarray, version: tuple[int, int] = (1, 0)) -> bytes:
    """An array in numpy's file format, whatever it holds."""
    file = BytesIO()
    np.lib.format.write_array(file, array, version=version, allow_pickle=True)
    return file.getvalue()


def with_header(text: str) -> bytes:
    """The header of an array in numpy's file format, with this text."""
    line = text.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(line).to_bytes(2, "little") + line


SPEC = TensorSpec((3,), torch.float32)
GOOD = encode_tensor(torch.ones(3))


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "no plain array in numpy's format"),
        (b"hello", "no plain array in numpy's format"),
        (GOOD[:20], "no plain array in numpy's format"),
        (to_npy(np.ones(3, dtype=np.float32), (2, 0)), "no plain array in numpy's format"),
        (
            with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (3,), }(")[:128],
            "no plain array in numpy's format",
        ),
        (with_header("__import__('os').system('true')"), "no plain array in numpy's format"),
        (to_npy(np.array([1, "a", None], dtype=object)), "|O [3] came, expected <f4 [3]"),
        (to_npy(np.zeros(3, dtype="f4,f4")), "no plain array in numpy's format"),
        (with_header("-" * 116 + "1"), "no plain array in numpy's format"),
        (to_npy(np.ones(3)), "<f8 [3] came, expected <f4 [3]"),
        (to_npy(np.ones(3, dtype=">f4")), ">f4 [3] came, expected <f4 [3]"),
        (to_npy(np.ones((1, 3), dtype=np.float32)), "<f4 [1, 3] came, expected <f4 [3]"),
        (
            with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (10000000000000,), }"),
            "<f4 [10000000000000] came",
        ),
        (GOOD[:-1], "11 bytes of numbers came, expected 12"),
        (GOOD + b"x", "13 bytes of numbers came, expected 12"),
        (GOOD + bytes(20_000), "20,140 bytes came, at most 1,012 are allowed"),
    ],
)
def test_a_wrong_array_is_refused_in_a_sentence(data: bytes, sentence: str) -> None:
    with pytest.raises(InvalidMessage, match="tensor 'delta'") as error:
        decode_tensor(data, SPEC, "client 2, tensor 'delta'")
    assert sentence in str(error.value)


def test_an_array_stored_by_columns_is_refused() -> None:
    with pytest.raises(InvalidMessage, match="by rows"):
        decode_tensor(
            to_npy(np.asfortranarray(np.ones((2, 3), dtype=np.float32))), TensorSpec((2, 3), torch.float32), "it"
        )


def test_other_names_and_other_numbers_are_refused() -> None:
    payload = encode_payload(Payload({"round": 3}, {"delta": torch.ones(2)}))
    with pytest.raises(InvalidMessage, match="client 1 sent tensors named 'delta', expected 'delta', 'loss'"):
        read_tensors(payload, specs({"delta": torch.ones(2), "loss": torch.ones(())}), "client 1")
    with pytest.raises(InvalidMessage, match="not all of its numbers are finite"):
        read_tensors(
            encode_payload(Payload({}, {"x": torch.tensor([1.0, torch.inf])})),
            specs({"x": torch.ones(2)}),
            "the server",
        )
    with pytest.raises(InvalidMessage, match="this is of round 3, expected round 4"):
        check_values(payload, "client 1", round=4)


@pytest.mark.parametrize("value", [-1, True, 3.0, "3", None, [3]])
def test_a_number_of_another_type_is_refused(value: object) -> None:
    with pytest.raises(InvalidMessage, match="client 1: round must be of type int"):
        read_value(RawPayload({"round": value}, {}), "round", int, "client 1")


def test_records_of_other_kinds_are_refused() -> None:
    flwr = pytest.importorskip("flwr.app", reason="needs Flower: pip install -e '.[flower]'")
    for records in (
        flwr.RecordDict(),
        flwr.RecordDict({"arrays": flwr.ConfigRecord(), "numbers": flwr.ConfigRecord()}),
    ):
        with pytest.raises(InvalidMessage, match="expected 'arrays' and 'numbers'"):
            from_records(records, "client 1")


def test_private_coordinates_are_removed_and_restored() -> None:
    network = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1))
    space = Space(network)
    private = space.layers_of_type(torch.nn.BatchNorm1d)
    shared, w = SharedCoordinates(space, private), torch.arange(space.P, dtype=torch.float32)
    state = {"x": w, "scalar": torch.tensor(2.0)}
    sent = shared.remove_private(state)
    assert len(sent["x"]) == space.P - 4 and not {*sent["x"].tolist()} & {*w[private.indices].tolist()}
    back = shared.restore_private(sent, {"x": torch.full_like(w, -1.0), "scalar": torch.tensor(0.0)})
    assert torch.equal(back["x"][private.indices], torch.full((4,), -1.0)) and back["scalar"] == 2
    assert torch.equal(back["x"][shared.w], w[shared.w])
    assert shared.shared_buffers(space.buffers) == {} and torch.equal(
        shared.restore_buffers({}, space.buffers), space.buffers
    )
