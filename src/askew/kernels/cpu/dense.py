"""Networks of linear layers and ReLUs on a CPU, in C: gradients or SGD steps of many at once.

Rows: C networks w [C, P], batches [C, B, …].
"""

from __future__ import annotations

import math
from ctypes import CDLL, Structure, byref, c_double, c_float, c_int64, c_void_p
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from ...core.types import Affine, Batch, Client

SOURCE = Path(__file__).with_suffix(".c")


class StepRule(Structure):
    """How a step follows from a gradient: direction gain·g + pull·w + shift, norm clipping, weight decay, momentum."""

    _fields_: ClassVar = [(name, c_double) for name in ("gain", "pull", "momentum", "decay", "clip")]


class DenseKernel:
    """Gradients and steps of networks with these layers, under the mean cross-entropy."""

    def __init__(self, functions: CDLL, table: list[list[int]], dtype: torch.dtype) -> None:
        self.functions, self.dtype = functions, dtype
        self.depth, self.table = c_int64(len(table)), torch.tensor(table)
        self.inputs: int = table[0][0]  # numbers of one sample
        self.real = c_double if dtype is torch.float64 else c_float

    def gradients(self, w: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Gradients [C, P] and mean losses [C]."""
        g = torch.empty_like(w, memory_format=torch.contiguous_format)
        return g, self._train(w.contiguous(), g, 1.0, None, None, None, batch, row_spans(batch))

    def steps(self, w: Tensor, batch: Batch, spans: Tensor, rule: Affine, client: Client, momentum: Tensor) -> Tensor:
        """Take steps in place: network c on the samples spans[c, s, 0:2] of the whole batch, for every s in turn.

        The momentum [C, P] is changed in place too. Returns the sums [C] of the mean losses.
        """
        how, shift = step_rule(rule, client), rule.shift
        if shift is None and (rule.gain, rule.pull) != (1.0, 0.0):  # gain and pull go with a shift
            shift = w.new_zeros(())
        if shift is not None:
            shift = shift.to(w.dtype).expand(w.shape).contiguous()
        v = momentum if how and how.momentum else None
        return self._train(w, w, -float(client.lr), how, shift, v, batch, spans)

    def _train(
        self,
        w: Tensor,
        to: Tensor,
        factor: float,
        rule: StepRule | None,
        shift: Tensor | None,
        v: Tensor | None,
        batch: Batch,
        spans: Tensor,
    ) -> Tensor:
        x, y, values = batch.x.contiguous(), batch.y.contiguous(), w.new_empty(len(w))
        if x.dtype is not self.dtype or x.numel() != self.inputs * y.numel():
            raise ValueError(f"inputs must be {self.inputs} numbers of type {self.dtype} for every label")
        count, steps, _ = spans.shape
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


def row_spans(batch: Batch) -> Tensor:
    """Where the real samples of batches [C, B, …] begin and end, [C, 1, 2]; padding comes last."""
    count, size = batch.y.shape
    begin = torch.arange(0, count * size, size)
    length = size if batch.weight is None else batch.weight.sum(1).long()
    return torch.stack((begin, begin + length), 1)[:, None].contiguous()


def step_rule(rule: Affine, client: Client) -> StepRule | None:
    """The rule as C takes it; None: a step along the gradient alone, which C adds to the weights as it comes."""
    decay = float(client.decay) + float(rule.decay)
    numbers = (float(rule.gain), float(rule.pull), float(client.momentum), decay, float(client.clip))
    plain = rule.shift is None and numbers == (1.0, 0.0, 0.0, 0.0, math.inf)
    return None if plain else StepRule(*numbers)
