"""Who may send requests to Flower's ports on this machine: processes of the same user, and nobody else.

Flower asks nodes for keys, if that is switched on, and asks nobody who starts apps or takes tasks for them: whoever
reaches a SuperLink's port runs code as the user who started it. The system knows which user owns the other end of a
connection within this machine, so every request is checked by that.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, MutableMapping
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Any

TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))  # of the system's connections, with the owner of each end
ESTABLISHED = "01"  # the state of an open connection; of a closed one the system forgets the owner
FLEET_PREFIX = "/v1/fleet/"  # of the requests that nodes send, which Flower itself checks by their keys
REFUSAL = b"Requests are answered to processes of the user who started this server, on the same machine, alone.\n"

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
ServerApp = Callable[[Scope, Receive, Send], Awaitable[None]]


def can_identify_users() -> bool:
    """Does this system say who owns the other end of a connection? Linux does."""
    return TABLES[0].is_file()


def table_address(host: str, port: int) -> set[str]:
    """An address as the system's tables write it: bytes of each word in reverse order, in hexadecimal digits."""
    address: IPv4Address | IPv6Address = ip_address(host.partition("%")[0])
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    forms = [address.packed]
    if isinstance(address, IPv4Address):
        forms.append(IPv6Address(f"::ffff:{address}").packed)
    words = [b"".join(packed[i : i + 4][::-1] for i in range(0, len(packed), 4)).hex().upper() for packed in forms]
    return {f"{text}:{port:04X}" for text in words}


def connection_owner(near: tuple[str, int], far: tuple[str, int]) -> int | None:
    """The user who owns the end `near` of an open connection to `far`; None if that end is not on this machine."""
    near_forms, far_forms = table_address(*near), table_address(*far)
    for table in TABLES:
        if not table.is_file():
            continue
        for line in table.read_text().splitlines()[1:]:
            _, local, remote, state, _, _, _, user, *_ = line.split()
            if local in near_forms and remote in far_forms and state == ESTABLISHED:
                return int(user)
    return None


class SameUserOnly:
    """A server's app that answers processes of its own user on its own machine alone.

    With `open_fleet` requests of nodes are passed on from everywhere: Flower checks their keys.
    """

    def __init__(self, app: ServerApp, open_fleet: bool = False) -> None:
        self.app, self.open_fleet = app, open_fleet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self.is_allowed(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(REFUSAL)).encode())]
            await send({"type": "http.response.start", "status": 403, "headers": headers})
            await send({"type": "http.response.body", "body": REFUSAL})

    def is_allowed(self, scope: Scope) -> bool:
        """May this request be answered?"""
        if self.open_fleet and scope["type"] == "http" and scope["path"].startswith(FLEET_PREFIX):
            return True
        client, server = scope.get("client"), scope.get("server")
        if not client or not server:
            return False
        try:
            return connection_owner(tuple(client), tuple(server)) == os.getuid()
        except ValueError:  # an address that is none
            return False
