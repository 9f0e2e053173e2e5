"""Which requests Flower's ports on this machine answer: those of processes of the same user, up to a size.

Flower asks nodes for keys, if that is switched on, and asks nobody who starts apps or takes tasks for them: whoever
reaches a SuperLink's port runs code as the user who started it. The system knows which user owns the other end of a
connection within this machine, so every request is checked by that. Flower also reads a request of any size into
memory, before it looks who sends it; what is larger than anything that it sends itself is refused.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Awaitable, Callable, MutableMapping
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Any

TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))  # of the system's connections, with the owner of each end
ESTABLISHED = 1  # the state of an open connection; of a closed one the system no longer has the owner
FLEET_PREFIX = "/v1/fleet/"  # of the requests that nodes send, which Flower itself checks by their keys
REFUSAL = b"Requests are answered to processes of the user who started this server, on the same machine, alone.\n"
MAX_REQUEST = 256 * 2**20  # bytes; Flower sends arrays in pieces of 5 MB, and a client's state of up to 64 MB at once
TOO_LARGE = f"Requests are read up to {MAX_REQUEST} bytes, and must say their size.\n".encode()

# Linux answers a question about one connection over netlink (sock_diag(7)): its constants and structures.
SOCK_DIAG, BY_FAMILY, IS_ERROR, IS_REQUEST, ANY_STATE, ANY_COOKIE = 4, 20, 2, 1, 2**32 - 1, 2**64 - 1
HEADER = struct.Struct("=IHHII")  # length, type, flags, number, process
ENDS = struct.Struct("!HH16s16s")  # ports of the near and the far end, and their addresses
QUESTION = struct.Struct(f"=BBxxI{ENDS.size}sIQ")  # family, protocol, states, ends, interface, cookie
ANSWER = struct.Struct(f"=xBxx{ENDS.size}s24xI")  # state, ends, user

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
ServerApp = Callable[[Scope, Receive, Send], Awaitable[None]]


def can_identify_users() -> bool:
    """Does this system say who owns the other end of a connection? Linux does."""
    return TABLES[0].is_file()


def connection_owner(near: tuple[str, int], far: tuple[str, int]) -> int | None:
    """The user who owns the end `near` of an open connection to `far`; None if that end is not on this machine."""
    try:
        return ask_for_owner(near, far)
    except OSError:  # not every system answers this question
        return find_owner(near, far)


def ask_for_owner(near: tuple[str, int], far: tuple[str, int]) -> int | None:
    """The owner of the end `near`, by a question about this one connection: the tables of all take milliseconds."""
    addresses = [parse_address(host) for host, _ in (near, far)]
    if addresses[0].version != addresses[1].version:
        return None
    ends = ENDS.pack(near[1], far[1], *(address.packed for address in addresses))
    family = socket.AF_INET if addresses[0].version == 4 else socket.AF_INET6
    question = QUESTION.pack(family, socket.IPPROTO_TCP, ANY_STATE, ends, 0, ANY_COOKIE)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, SOCK_DIAG) as system:
        system.send(HEADER.pack(HEADER.size + len(question), BY_FAMILY, IS_REQUEST, 0, 0) + question)
        answer = system.recv(4096)
    if HEADER.unpack_from(answer)[1] == IS_ERROR:
        number = -int(struct.unpack_from("=i", answer, HEADER.size)[0])
        if number == errno.ENOENT:
            return None
        raise OSError(number, os.strerror(number))
    state, found, user = ANSWER.unpack_from(answer, HEADER.size)
    return int(user) if (state, found) == (ESTABLISHED, ends) else None  # else one that listens at this port


def find_owner(near: tuple[str, int], far: tuple[str, int]) -> int | None:
    """The owner of the end `near`, from the system's tables of all connections."""
    near_forms, far_forms = table_address(*near), table_address(*far)
    for table in TABLES:
        if not table.is_file():
            continue
        for line in table.read_text().splitlines()[1:]:
            _, local, remote, state, _, _, _, user, *_ = line.split()
            if local in near_forms and remote in far_forms and int(state, 16) == ESTABLISHED:
                return int(user)
    return None


def table_address(host: str, port: int) -> set[str]:
    """An address as the system's tables write it: bytes of each word in reverse order, in hexadecimal digits."""
    address = parse_address(host)
    forms = [address.packed]
    if isinstance(address, IPv4Address):
        forms.append(IPv6Address(f"::ffff:{address}").packed)
    words = [b"".join(packed[i : i + 4][::-1] for i in range(0, len(packed), 4)).hex().upper() for packed in forms]
    return {f"{text}:{port:04X}" for text in words}


def parse_address(host: str) -> IPv4Address | IPv6Address:
    """An address; one of IPv4 within IPv6 is returned as what it is."""
    address = ip_address(host.partition("%")[0])
    return (isinstance(address, IPv6Address) and address.ipv4_mapped) or address


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
            await refuse(send, 403, REFUSAL)

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


class BoundedRequests:
    """A server's app that reads no request which is larger than `max_bytes`, or does not say how large it is."""

    def __init__(self, app: ServerApp, max_bytes: int = MAX_REQUEST) -> None:
        self.app, self.max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope.get("headers", ()))
        length = headers.get(b"content-length", b"0")
        if b"transfer-encoding" in headers or not length.isdigit() or int(length) > self.max_bytes:
            await refuse(send, 413, TOO_LARGE)
        else:
            await self.app(scope, receive, send)


async def refuse(send: Send, status: int, text: bytes) -> None:
    """Answer a request with a refusal, and end its connection."""
    headers = [
        (b"content-type", b"text/plain"),
        (b"content-length", str(len(text)).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text})
