"""Dense networks on a CPU, in C: gradients of many, or plain SGD steps of one or many, as many in a row as there are batches."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure, byref, c_double, c_float, c_int64, c_void_p
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from . import native
from .space import Space

SOURCE = Path(__file__).with_suffix(".c")


class Rule(Structure):
    """How a step is made of a gradient: the direction gain·g + pull·w + b, where b is given; momentum, weight decay, limit of the norm."""

    _fields_: ClassVar = [(name, c_double) for name in ("gain", "pull", "momentum", "decay", "clip")]


class Walk:
    """The steps of networks with these layers."""

    def __init__(self, functions: Any, table: list[list[int]], dtype: torch.dtype) -> None:
        self.walk, self.dtype = functions.walk, dtype
        self.depth, self.table, self.inputs = c_int64(len(table)), torch.tensor(table), table[0][0]
        self.real = c_double if dtype is torch.float64 else c_float

    def __call__(
        self,
        w: Tensor,
        to: Tensor,
        by: float,
        x: Tensor,
        y: Tensor,
        spans: Tensor,
        rule: Rule | None = None,
        b: Tensor | None = None,
        v: Tensor | None = None,
        places: Tensor | None = None,
        table: Tensor | None = None,
    ) -> Tensor:
        """Networks w [C, P], each on batches spans[c, s, 0] … spans[c, s, 1] of x and y, in turn; returns the sums [C] of their losses.

        by times the gradient is added to w, if that is `to`; else the gradient, of one batch, is put there. With a rule, by
        times what it makes of the gradient is added to w; b [C, P] is its vector and v [C, P] the momentum, if there are any.
        With places, inputs are those of x, a pool of bytes, which stand for numbers in a table [256].
        """
        dtype, count = (self.dtype, y.numel()) if places is None else (torch.uint8, len(x))
        if x.dtype is not dtype or x.numel() != self.inputs * count:
            raise ValueError(f"inputs must be {self.inputs} numbers of type {dtype} for every label")
        if places is not None and (
            places.dtype is not torch.long or places.numel() != y.numel() or not places.is_contiguous()
        ):
            raise ValueError("places must be whole numbers in a row, one for every label")
        (count, steps, _), x, values = spans.shape, x.contiguous(), w.new_empty(len(w))
        how = (byref(rule) if rule else c_void_p(), c_int64(w.shape[1]), pointer(b), pointer(v))
        given = (c_int64(count), c_int64(w.stride(0)), pointer(w), pointer(to), self.real(by), *how, c_int64(steps))
        failed = self.walk(self.depth, pointer(self.table), *given, *map(pointer, (spans, x, places, table, y, values)))
        if failed == 2:
            raise IndexError(f"a label is not one of the {self.table[-1, 1]} classes")
        if failed:
            raise MemoryError("there is no memory for a batch; use smaller ones.")
        return values


def pointer(t: Tensor | None) -> c_void_p:
    return c_void_p(None if t is None else t.data_ptr())


def in_a_row(cuts: Sequence[int]) -> Tensor:
    """The spans of one network whose batches follow each other."""
    return torch.tensor([list(pairwise(cuts))])


def walk_of(layers: list[tuple[str, nn.Module]], space: Space) -> Walk | None:
    """The steps of a row of layers that is known to be dense, if they are what is written in C, and that can be had here."""
    places, at = dict[str, int](), 0
    for name, size in zip(space.shapes, space.sizes, strict=True):
        places[name], at = at, at + size
    table = list[list[int]]()
    for name, layer in layers:
        if isinstance(layer, nn.Linear):
            table.append(
                [layer.in_features, layer.out_features, places[f"{name}.weight"], places.get(f"{name}.bias", -1), 0]
            )
        elif type(layer) is nn.ReLU and table:
            table[-1][4] = 1
        elif type(layer) is not nn.Flatten:
            return None
    if not table or table[-1][4] or space.device.type != "cpu" or space.dtype not in (torch.float32, torch.float64):
        return None
    functions = native.library(SOURCE, space.dtype)
    return Walk(functions, table, space.dtype) if functions else None
