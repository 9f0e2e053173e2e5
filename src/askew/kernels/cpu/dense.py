"""Networks of linear layers and ReLUs on a CPU, in C: their gradients, or several SGD steps in a row."""

from __future__ import annotations

from ctypes import CDLL, Structure, byref, c_double, c_float, c_int64, c_void_p
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from ...core.space import Space
from . import compiler

SOURCE = Path(__file__).with_suffix(".c")


class StepRule(Structure):
    """How a step follows from a gradient: direction gain·g + pull·w + shift, norm clipping, weight decay, momentum."""

    _fields_: ClassVar = [(name, c_double) for name in ("gain", "pull", "momentum", "decay", "clip")]


class DenseKernel:
    """Gradients and steps of networks with these layers."""

    def __init__(self, functions: CDLL, table: list[list[int]], dtype: torch.dtype) -> None:
        self.functions, self.dtype = functions, dtype
        self.depth, self.table = c_int64(len(table)), torch.tensor(table)
        self.inputs: int = table[0][0]  # numbers of one sample
        self.real = c_double if dtype is torch.float64 else c_float

    def gradients(self, w: Tensor, x: Tensor, y: Tensor, spans: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients [C, P] and mean losses [C] of networks w [C, P]: network c on samples spans[c, 0] of x and y."""
        g = torch.empty_like(w, memory_format=torch.contiguous_format)
        return g, self._train(w.contiguous(), g, 1.0, None, None, None, x, y, spans)

    def steps(
        self,
        w: Tensor,
        lr: float,
        rule: StepRule | None,
        shift: Tensor | None,
        v: Tensor | None,
        x: Tensor,
        y: Tensor,
        spans: Tensor,
    ) -> Tensor:
        """Take steps in place: network c of w [C, P] steps on samples spans[c, s, 0:2] of x and y, for every s in turn.

        Without a rule, lr times the gradient is subtracted. Returns the sums [C] of the batches' mean losses.
        `shift` [C, P] belongs to the rule, v [C, P] is the momentum, changed in place.
        """
        return self._train(w, w, -lr, rule, shift, v, x, y, spans)

    def _train(
        self,
        w: Tensor,
        to: Tensor,
        factor: float,
        rule: StepRule | None,
        shift: Tensor | None,
        v: Tensor | None,
        x: Tensor,
        y: Tensor,
        spans: Tensor,
    ) -> Tensor:
        if x.dtype is not self.dtype or x.numel() != self.inputs * y.numel():
            raise ValueError(f"inputs must be {self.inputs} numbers of type {self.dtype} for every label")
        (count, steps, _), x, values = spans.shape, x.contiguous(), w.new_empty(len(w))
        networks = (c_int64(count), c_int64(w.stride(0)), pointer(w), pointer(to), self.real(factor))
        how = (byref(rule) if rule else c_void_p(), c_int64(w.shape[1]), pointer(shift), pointer(v))
        data = (c_int64(steps), *map(pointer, (spans, x, y, values)))
        failed = self.functions.train(self.depth, pointer(self.table), *networks, *how, *data)
        if failed == 2:
            raise IndexError(f"a label is not one of the {self.table[-1, 1]} classes")
        if failed:
            raise MemoryError("there is no memory for a batch; use smaller ones.")
        return values


def pointer(t: Tensor | None) -> c_void_p:
    return c_void_p(None if t is None else t.data_ptr())


def dense_kernel(layers: list[tuple[str, nn.Module]], space: Space) -> DenseKernel | None:
    """The kernel for a row of layers that is known to be dense; None where it is not what is written in C."""
    places, at = dict[str, int](), 0
    for name, size in zip(space.shapes, space.sizes, strict=True):
        places[name], at = at, at + size
    table = list[list[int]]()
    for name, layer in layers:
        if isinstance(layer, nn.Linear):
            weight, bias = places[f"{name}.weight"], places.get(f"{name}.bias", -1)
            table.append([layer.in_features, layer.out_features, weight, bias, 0])
        elif type(layer) is nn.ReLU and table:
            table[-1][4] = 1
        elif type(layer) is not nn.Flatten:
            return None
    if not table or table[-1][4] or space.device.type != "cpu" or space.dtype not in (torch.float32, torch.float64):
        return None
    functions = compiler.library(SOURCE, space.dtype)
    return DenseKernel(functions, table, space.dtype) if functions else None
