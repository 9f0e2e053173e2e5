"""What the server needs of whatever carries its messages: the interface, without any implementation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from .wire import Payload, RawPayload

Warn = Callable[[str], None]  # is given sentences for the server's log
WAITING = "waiting for clients: "  # begins a sentence that says how many are ready
Reply = RawPayload | str  # a payload, or a sentence that says why there is none


class Transport(Protocol):
    """Carries messages to nodes and their replies back, and counts the bytes of both."""

    bytes_sent: int
    bytes_received: int

    def connected_nodes(self) -> list[int]:
        """The numbers of the nodes that are connected now."""

    def send(self, kind: str, payloads: Mapping[int, Payload], group: str, timeout: float) -> dict[str, int]:
        """Send payloads by node, to be answered within `timeout` seconds; return nodes by message identifier."""

    def receive(self, message_ids: Collection[str]) -> dict[str, Reply]:
        """The replies to these messages that came so far; each is returned once."""
