"""Letters: what went in comes out, and nothing else gets in."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from askew.core.space import Space
from askew.engine.distributed import TensorSpec
from askew.flower.wire import (
    Payload,
    RawPayload,
    Refused,
    Shared,
    expect,
    from_records,
    opened,
    packed,
    sealed,
    to_records,
    told,
    unpacked,
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


def forms(tensors: dict[str, Tensor]) -> dict[str, TensorSpec]:
    return {n: TensorSpec(tuple(t.shape), t.dtype) for n, t in tensors.items()}


def by_hand(letter: Payload) -> RawPayload:
    return sealed(letter)


def by_flower(letter: Payload) -> RawPayload:
    """Through the bytes in which Flower's processes exchange records."""
    pytest.importorskip("flwr", reason="needs the extra flower")
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

    records = to_records(letter)
    contents = {name: thing.deflate() for name, thing in get_all_nested_objects(records).items()}
    return from_records(inflate_object_from_contents(records.object_id, contents), "somebody")


WAYS = pytest.mark.parametrize("way", [by_hand, by_flower])


@WAYS
@pytest.mark.parametrize("tensors", [TENSORS, {}])
def test_what_went_in_comes_out(way: Callable[[Payload], RawPayload], tensors: dict[str, Tensor]) -> None:
    letter = way(Payload(NUMBERS, tensors))
    came = opened(letter, forms(tensors), "somebody")
    assert came.keys() == tensors.keys()
    assert all(torch.equal(came[n], t) and came[n].dtype == t.dtype for n, t in tensors.items())
    assert repr(dict(letter.numbers)) == repr(NUMBERS)


def npy(array: np.ndarray, version: tuple[int, int] = (1, 0)) -> bytes:
    from io import BytesIO

    file = BytesIO()
    np.lib.format.write_array(file, array, version=version, allow_pickle=True)
    return file.getvalue()


def header(text: str) -> bytes:
    words = text.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(words).to_bytes(2, "little") + words


FORM = TensorSpec((3,), torch.float32)
GOOD = packed(torch.ones(3))


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "no plain array in numpy's format"),
        (b"hello", "no plain array in numpy's format"),
        (GOOD[:20], "no plain array in numpy's format"),
        (npy(np.ones(3, dtype=np.float32), (2, 0)), "no plain array in numpy's format"),
        (
            header("{'descr': '<f4', 'fortran_order': False, 'shape': (3,), }(")[:128],
            "no plain array in numpy's format",
        ),
        (header("__import__('os').system('true')"), "no plain array in numpy's format"),
        (npy(np.array([1, "a", None], dtype=object)), "|O [3] came, expected <f4 [3]"),
        (npy(np.zeros(3, dtype="f4,f4")), "no plain array in numpy's format"),
        (header("-" * 116 + "1"), "no plain array in numpy's format"),
        (npy(np.ones(3)), "<f8 [3] came, expected <f4 [3]"),
        (npy(np.ones(3, dtype=">f4")), ">f4 [3] came, expected <f4 [3]"),
        (npy(np.ones((1, 3), dtype=np.float32)), "<f4 [1, 3] came, expected <f4 [3]"),
        (header("{'descr': '<f4', 'fortran_order': False, 'shape': (10000000000000,), }"), "<f4 [10000000000000] came"),
        (GOOD[:-1], "11 bytes of numbers came, expected 12"),
        (GOOD + b"x", "13 bytes of numbers came, expected 12"),
        (GOOD + bytes(20_000), "20,140 bytes came, at most 1,012 are allowed"),
    ],
)
def test_a_false_array_is_refused_in_a_sentence(data: bytes, sentence: str) -> None:
    with pytest.raises(Refused, match="tensor 'delta'") as refused:
        unpacked(data, FORM, "client 2, tensor 'delta'")
    assert sentence in str(refused.value)


def test_columns_first_are_refused() -> None:
    with pytest.raises(Refused, match="by rows"):
        unpacked(npy(np.asfortranarray(np.ones((2, 3), dtype=np.float32))), TensorSpec((2, 3), torch.float32), "it")


def test_other_names_and_other_numbers_are_refused() -> None:
    letter = sealed(Payload({"round": 3}, {"delta": torch.ones(2)}))
    with pytest.raises(Refused, match="client 1 sent tensors named 'delta', expected 'delta', 'loss'"):
        opened(letter, forms({"delta": torch.ones(2), "loss": torch.ones(())}), "client 1")
    with pytest.raises(Refused, match="not all of its numbers are finite"):
        opened(sealed(Payload({}, {"x": torch.tensor([1.0, torch.inf])})), forms({"x": torch.ones(2)}), "the server")
    with pytest.raises(Refused, match="this is of round 3, expected round 4"):
        expect(letter, "client 1", round=4)


@pytest.mark.parametrize("value", [-1, True, 3.0, "3", None, [3]])
def test_a_number_of_another_type_is_refused(value: object) -> None:
    with pytest.raises(Refused, match="client 1: round must be of type int"):
        told(RawPayload({"round": value}, {}), "round", int, "client 1")


def test_records_of_other_kinds_are_refused() -> None:
    flwr = pytest.importorskip("flwr.app", reason="needs the extra flower")
    for records in (
        flwr.RecordDict(),
        flwr.RecordDict({"arrays": flwr.ConfigRecord(), "numbers": flwr.ConfigRecord()}),
    ):
        with pytest.raises(Refused, match="expected 'arrays' and 'numbers'"):
            from_records(records, "client 1")


def test_private_coordinates_are_cut_and_filled_in() -> None:
    network = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1))
    space = Space(network)
    private = space.kind(torch.nn.BatchNorm1d)
    shared, w = Shared(space, private), torch.arange(space.P, dtype=torch.float32)
    state = {"x": w, "scalar": torch.tensor(2.0)}
    sent = shared.cut(state)
    assert len(sent["x"]) == space.P - 4 and not {*sent["x"].tolist()} & {*w[private.indices].tolist()}
    back = shared.whole(sent, {"x": torch.full_like(w, -1.0), "scalar": torch.tensor(0.0)})
    assert torch.equal(back["x"][private.indices], torch.full((4,), -1.0)) and back["scalar"] == 2
    assert torch.equal(back["x"][shared.w], w[shared.w])
    assert shared.buffers(space.buffers) == {} and torch.equal(shared.whole_buffers({}, space.buffers), space.buffers)
