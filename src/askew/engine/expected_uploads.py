"""What clients will send, known before anybody trains: its names, shapes and types, and its bytes."""

from __future__ import annotations

import torch

from ..core import local
from ..core.types import Client, State
from .messages import MessageBytes
from .server import Server


def zero_uploads(server: Server) -> list[State]:
    """For each phase an upload of zeros, with the shapes and types of what a client sends that takes no step."""
    space, settings, uploads = server.space, server.local, list[State]()
    state = server.alg.client_state(space)
    carry = {n: rows[0] for n, rows in server.first_carry(server.fed.eligible[:1].tolist()).items()}
    for phase in server.phases:
        client = Client(
            w=space.start,
            buffers=space.buffers,
            server=server.broadcast_state(phase, server.state | server.memory.start),
            state=state,
            carry=carry,
            parts=server.parts,
            lr=settings.lr,
            lr0=settings.lr,
            momentum=settings.momentum,
            decay=settings.weight_decay,
            clip=settings.clip_limit,
            steps=1.0,
            tau=1.0,
            size=1.0,
            round=1,
            coin=0.5,
        )
        result = local.finish(phase, client, local.begin(phase, client))
        state, carry = result.state, result.carry
        uploads.append({n: torch.zeros_like(v) for n, v in result.up.items()})
    return uploads


def answer_bytes(server: Server) -> MessageBytes:
    """Bytes that travel to and from one client in a round, in all phases, as the server will count them.

    A phase after one that trains is taken to bring the model anew: whether it moves is not known beforehand.
    """
    down = up = 0
    for n, (phase, upload) in enumerate(zip(server.phases, zero_uploads(server), strict=True)):
        sent = [(t.shape, t.element_size()) for t in upload.values()]
        received = server.messages.declared_sizes(phase, server.state, server.memory.start)
        one = server.messages.bytes_of(phase, received, sent, n == 0 or server.phases[n - 1].trains)
        down, up = down + one.down, up + one.up
    return MessageBytes(down, up)
