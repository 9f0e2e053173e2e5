"""The messages between the server and its clients: what never travels in them, and how many bytes they take."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from ..core.algorithm import Algorithm
from ..core.space import Space
from ..core.types import Part, State
from .base import PhaseOutputs, PhaseRequest

TensorSize = tuple[torch.Size, int]  # a tensor's shape and the bytes of one of its numbers


class MessageBytes(NamedTuple):
    """Bytes to and from one client, in one phase or in all phases of a round."""

    down: int
    up: int


class Messages:
    """Messages of one method with one network. Private coordinates and buffers are in none of them."""

    def __init__(self, space: Space, private: Part) -> None:
        self.space, self.private = space, private

    def without_private(self, outputs: PhaseOutputs) -> PhaseOutputs:
        """The outputs as they arrive: every upload of length P has zeros in the private coordinates."""
        private = self.private.indices
        if not private.numel():
            return outputs
        whole = {n for n, t in outputs.up.items() if t.dim() == 2 and t.shape[1] == self.space.P}
        up = {n: t.index_fill(1, private, 0) if n in whole else t for n, t in outputs.up.items()}
        return outputs._replace(up=up)

    def declared_sizes(self, phase: Algorithm, state: State, memory: State) -> list[TensorSize]:
        """What a client receives for a phase beside a model, of the server's state and of one client's memory."""
        one = self.space.start.element_size()  # state is sent in the model's precision
        broadcast = [v for n, v in state.items() if n in phase.broadcast]
        sizes = [(v.shape, one if v.is_floating_point() else v.element_size()) for v in broadcast]
        return sizes + [(v.shape, v.element_size()) for n, v in memory.items() if n in phase.broadcast]

    def bytes_of_phase(self, request: PhaseRequest, outputs: PhaseOutputs, brings_model: bool) -> MessageBytes:
        """Bytes to and from one client in a phase that was done."""
        received = [(t.shape, t.element_size()) for t in request.inputs.server.values()]
        received += [(t.shape[1:], t.element_size()) for t in request.inputs.memory.values()]
        sent = [(t.shape[1:], t.element_size()) for t in outputs.up.values()]
        return self.bytes_of(request.phase, received, sent, brings_model)

    def bytes_of(
        self, phase: Algorithm, received: Iterable[TensorSize], sent: Iterable[TensorSize], brings_model: bool
    ) -> MessageBytes:
        """Bytes to and from one client that receives and sends these tensors beside a model and buffers."""
        one = self.space.start.element_size()
        hidden = self.private.indices.numel()
        buffers = (self.space.Q - self.private.buffer_indices.numel()) * one
        model = (self.space.P - hidden) * one + buffers

        def size(tensors: Iterable[TensorSize]) -> int:
            return sum(
                (shape.numel() - (hidden if shape.numel() == self.space.P else 0)) * item for shape, item in tensors
            )

        down = size(received) + (model if brings_model else 0)
        return MessageBytes(down, size(sent) + (buffers if phase.trains else 0))
