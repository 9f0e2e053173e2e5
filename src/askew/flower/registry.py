"""The registry of clients: it asks every node which client it is, as a node's number in Flower does not say it."""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Collection
from typing import NamedTuple

from ..core.text import count_text
from ..data.federation import Federation
from ..errors import EngineError
from ..version import __version__
from .deployment_data import DataKind, DeploymentConfig, RemoteFederation
from .rules import DeploymentRules
from .transport import WAITING, Reply, Transport, Warn
from .wire import SAME_SETUP, InvalidMessage, Payload, RawPayload, check_values, read_tensors, read_value, to_one_line

MAX_ATTEMPTS = 3  # how often a node that does not say which client it is, is asked
MAX_INPUT_SIZE = 10**7  # numbers in one input
MAX_SAMPLES = 10**7  # of one client: the server lists them to plan batches
MAX_CLASSES = 10**5  # the network's last layer grows with them
MAX_DIMENSIONS = 8  # of one input
MAX_GROWTH = 1.25  # mean relative size of all clients; in an experiment FedDC converged at 1.4 and diverged at 1.7
POLL_SECONDS = 0.5  # between two looks for new nodes
LOOK_SECONDS = 1.0  # between two looks, while clients are at work, for what other nodes say
ALIKE = "prepare the data alike on every node"  # ends sentences about clients whose data differ in kind


class RefusedClient(InvalidMessage):
    """A client that said which it is, and whose data this run cannot use."""

    def __init__(self, client: int, sentence: str) -> None:
        super().__init__(sentence)
        self.client = client


class FaultyClient(RefusedClient):
    """A client that said which it is, and that it cannot take part, as with data that are not finite."""


class ClientInfo(NamedTuple):
    """What a client says about its data when it joins."""

    samples: int
    classes: int  # in its data; 0 for a regression
    kind: DataKind


class ClientRegistry:
    """The clients that are connected, the node of each, and what each said about its data."""

    def __init__(
        self, transport: Transport, rules: DeploymentRules, config: DeploymentConfig, warn: Warn, say: Warn
    ) -> None:
        self.transport, self.rules, self.config, self.warn, self.say = transport, rules, config, warn, say
        self.clients = config.client_count
        self.node_of: dict[int, int] = {}  # by client, of those that are connected
        self.info: dict[int, ClientInfo] = {}  # by client, of all that ever joined
        self.kind: DataKind | None = None  # that data of all clients must have; None while that is not known
        self.kind_source = ""  # begins the part of a sentence that says why it is that kind
        self.max_classes = 0  # that a client may have; 0: any number, as the run has not begun
        self.odd: dict[int, int] = {}  # before the run begins: clients with data unlike those of most, and their nodes
        self.attempts: dict[int, int] = {}  # by node, of those that are connected
        self.pending: dict[str, tuple[int, float]] = {}  # by message without a reply: its node, the time it ends
        self.replies: dict[str, Reply] = {}  # that came to them, until the next look at all nodes
        self.next_look = 0.0  # the time after which `receive` looks again
        self.refused: set[int] = set()  # clients that said which they are, and whose data cannot be used
        self.faulty: set[int] = set()  # clients that said which they are, and that they cannot take part
        self.silent: dict[int, bool] = {}  # clients that were late and have shown no life since: does the log say so?
        self.problems: dict[int, str] = {}  # by node: why it was left out the last time
        self.sizes: dict[int, int] = {}  # by client with its own data: samples that the run, once begun, counts with
        self.displaced: dict[int, int] = {}  # by node that is connected: the client that another node is now
        self.fed: Federation | None = None  # set once it is known

    def refresh(self) -> set[int]:
        """The clients that are connected and have said which they are. New nodes are asked; nobody is waited for."""
        nodes, now = self.transport.connected_nodes(), time.monotonic()
        self.attempts = {node: self.attempts.get(node, 0) for node in nodes}
        self.pending = {name: (node, end) for name, (node, end) in self.pending.items() if node in self.attempts}
        gone = {client: node for client, node in self.node_of.items() if node not in self.attempts}
        self.node_of = {client: node for client, node in self.node_of.items() if client not in gone}
        self.odd = {client: node for client, node in self.odd.items() if node in self.attempts}
        self._reset_displaced(gone)
        self._ask([node for node in nodes if self.attempts[node] < MAX_ATTEMPTS], now)
        self._receive()
        replies, self.replies = {name: reply for name, reply in self.replies.items() if name in self.pending}, {}
        late: dict[str, Reply] = {
            name: f"it did not say which client it is within {self.rules.hello:g} s"
            for name, (_, end) in self.pending.items()
            if end < now
        }
        silent_nodes = {node for client, node in self.node_of.items() if client in self.silent}
        for name, reply in (late | replies).items():
            node, _ = self.pending.pop(name)
            if node in silent_nodes and name not in replies:
                continue  # it is known to be silent, and is asked again
            self.attempts[node] += 1
            try:
                self._add_client(node, reply)
            except InvalidMessage as e:
                self._note_problem(node, e)
        for client in [client for client in gone if client not in self.node_of]:
            self.warn(
                f"client {client} is left out, as its node {gone[client]} is no longer connected; start it again if it "
                "does not come back."
            )
        for client in [client for client, is_logged in self.silent.items() if not is_logged]:
            self.silent[client] = True
            self.warn(f"client {client} was late and is left out until its node says again which client it is.")
        return self.reachable()

    def receive(self) -> None:
        """Take in what nodes say while clients are at work, for the next look at all nodes.

        Flower keeps a reply no longer than its message, which is `hello` seconds, and a round may last hours.
        """
        if time.monotonic() >= self.next_look:
            self.next_look = time.monotonic() + LOOK_SECONDS
            self._receive()

    def _receive(self) -> None:
        if waiting := [name for name in self.pending if name not in self.replies]:
            self.replies |= self.transport.receive(waiting)

    def reachable(self) -> set[int]:
        """The clients that were connected at the last look and are not silent."""
        return self.node_of.keys() - self.silent.keys()

    def _nodes_in_use(self) -> set[int]:
        return {node for client, node in self.node_of.items() if client not in self.silent}

    def ask_again(self) -> None:
        """Have the nodes that are left out asked once more: what was wrong with their data may be put right by now.

        A node that was started again with its key is the same node, and may never have been seen to be away.
        """
        for node in self.attempts.keys() - self._nodes_in_use() - self.displaced.keys():
            self.attempts[node] = min(self.attempts[node], MAX_ATTEMPTS - 1)

    def _note_problem(self, node: int, problem: InvalidMessage) -> None:
        """Note why a node is left out, and say it once: a node is asked again, and says the same."""
        client = next((client for client, its_node in self.node_of.items() if its_node == node), None)
        if isinstance(problem, RefusedClient):
            client = problem.client
            if not isinstance(problem, FaultyClient):
                self.refused.add(client)
            elif self.attempts[node] >= MAX_ATTEMPTS:
                self.faulty.add(client)
        if self.problems.get(node) != str(problem):
            is_named = client is None or re.search(rf"\bclient {client}\b", str(problem))
            self.warn(f"node {node}{'' if is_named else f', client {client},'} is left out: {problem}")
        self.problems[node] = str(problem)

    def _reset_displaced(self, clients: Collection[int]) -> None:
        """Let nodes be asked again that were these clients before others displaced them.

        Not before: of two nodes with one number that are both well, each would displace the other for ever.
        """
        self.displaced = {node: client for node, client in self.displaced.items() if node in self.attempts}
        self.attempts |= {node: 0 for node, client in self.displaced.items() if client in clients}

    def _ask(self, nodes: list[int], now: float) -> None:
        """Ask nodes which client they are, except those that are known or were asked already."""
        known = self._nodes_in_use() | {node for node, _ in self.pending.values()}
        payloads = {node: Payload({"digest": self.config.digest()}, {}) for node in nodes if node not in known}
        sent = self.transport.send("query", payloads, "0", self.rules.hello) if payloads else {}
        self.pending |= {name: (node, now + self.rules.hello) for name, node in sent.items()}

    def _add_client(self, node: int, reply: Reply) -> None:
        """Note which client a node is, or raise why it is none."""
        if isinstance(reply, str):
            raise InvalidMessage(reply)
        if "fault" not in reply.numbers:
            self.attempts[node] = MAX_ATTEMPTS  # a node that answered is not asked again
        client = read_value(reply, "client", int, f"node {node}")
        if client >= self.clients:
            raise InvalidMessage(
                f"it says it is client {client}, and clients are numbered from 0 to {self.clients - 1}; "
                "start it with another partition-id."
            )
        if "fault" in reply.numbers:
            raise FaultyClient(client, to_one_line(read_value(reply, "fault", str, f"client {client}")))
        try:
            info = self._read_info(client, reply)
        except InvalidMessage as e:
            raise RefusedClient(client, str(e)) from None
        if self.node_of.get(client, node) != node:
            self.warn(f"client {client} is now node {node} and no longer node {self.node_of[client]}.")
            self.displaced[self.node_of[client]] = client
        self.displaced.pop(node, None)
        self.odd.pop(client, None)
        if self.problems.pop(node, None) or client in self.refused | self.faulty:
            self.say(f"client {client} takes part after all.")
        self.node_of[client], self.info[client] = node, info
        self.silent.pop(client, None)
        self.refused.discard(client)
        self.faulty.discard(client)
        if isinstance(self.fed, RemoteFederation):
            self.fed.set_size(client, info.samples)
            self._check_growth(self.fed, client)
            self.sizes[client] = info.samples

    def _check_growth(self, fed: RemoteFederation, client: int) -> None:
        """Warn of a client that joins with so many samples that sums of relative sizes over the clients run away."""
        growth = fed.sizes.sum() / (fed.clients * fed.mean_size)
        if client not in self.sizes and growth > MAX_GROWTH:
            self.warn(
                f"client {client} joins with {fed.sizes[client]:,} training samples, and relative sizes are counted in "
                f"{fed.mean_size:g}, the mean when the run began; methods that add them up (FedDC, SCAFFOLD by "
                "samples) may diverge: if this one does, start over with all clients (fresh = true, nodes = 0)."
            )

    def _read_info(self, client: int, reply: RawPayload) -> ClientInfo:
        """What a client says about its data, which must be of this run and like that of the others."""
        sender = f"client {client}"
        read_tensors(reply, {}, sender)
        check_values(reply, sender, digest=self.config.digest(), version=__version__)
        if not isinstance(self.fed, RemoteFederation) and self.fed is not None:
            check_values(reply, sender, samples=int(self.fed.sizes[client]))
        samples, classes = read_value(reply, "samples", int, sender), read_value(reply, "classes", int, sender)
        shape, real = read_value(reply, "shape", list, sender), read_value(reply, "real", bool, sender)
        for name, value, most in (("samples", samples, MAX_SAMPLES), ("classes", classes, MAX_CLASSES)):
            if value > most:
                raise InvalidMessage(
                    f"{sender} says it has {value:,} {name}, at most {most:,} are allowed; correct its data, "
                    "or divide them among several clients."
                )
        if (
            len(shape) > MAX_DIMENSIONS
            or not all(type(n) is int and n > 0 for n in shape)
            or math.prod(shape) > MAX_INPUT_SIZE
        ):
            raise InvalidMessage(
                f"{sender}: inputs of shape {shape!r:.60} came, at most {MAX_INPUT_SIZE:,} numbers are allowed; "
                f"{SAME_SETUP}."
            )
        info = ClientInfo(samples, classes, DataKind(tuple(shape), real, classes > 0))
        if self.kind not in (None, info.kind):
            raise InvalidMessage(f"{sender} has {info.kind}, and {self.kind_source} {self.kind}; {ALIKE}.")
        if self.max_classes and classes > self.max_classes:
            raise InvalidMessage(
                f"{sender} has {classes} classes, and the run was begun with {self.max_classes}; "
                "let client(node) return an askew.Dataset that names all of them on every node."
            )
        known = self.sizes.get(client, 0)
        if known and samples != known:
            raise InvalidMessage(
                f"{sender} has {samples:,} training samples, and had {known:,} when it joined this run; start it with "
                "the data that it had, or begin a new run with the new data (fresh = true)."
            )
        return info

    def _check_hope(self, needed: int) -> None:
        """Refuse to wait on where all nodes have come and every one of them fails in what it is asked."""
        asked_enough = all(count >= MAX_ATTEMPTS for count in self.attempts.values())
        may_come = self.node_of or self.pending or 0 < len(self.refused) < self.clients
        if len(self.attempts) >= needed and asked_enough and not may_come:
            reasons = dict.fromkeys(self.problems[node] for node in self.attempts if node in self.problems)
            count = len(self.attempts)
            who = "the only connected node cannot" if count == 1 else f"none of the {count} connected nodes can"
            raise EngineError(f"{who} take part: {'; '.join(reasons)}")

    def _count_able(self, connected: Collection[int]) -> int:
        """How many clients can take part, as far as is known: those that are connected, and others that may come."""
        return self.clients - len((self.refused | self.faulty).difference(connected))

    def set_silent(self, client: int) -> None:
        """Note that a client did not answer in time: it is asked nothing but which client it is, until it says so."""
        node = self.node_of.get(client)
        if node is not None:
            self.silent[client], self.attempts[node] = False, 0
            self._reset_displaced([client])

    def fix_kind(self, kind: DataKind, source: str, max_classes: int = 0) -> None:
        """Refuse clients with data of another kind from now on; `source` begins a sentence that ends with the kind."""
        self.kind, self.kind_source, self.max_classes = kind, source, max_classes

    def wait_for_first(self) -> None:
        """Wait for the clients of the first round, and fix the kind of data from theirs if it is not known."""
        count = self.rules.nodes or self.clients
        self.wait_for(count)
        while self.kind is None:
            kind, source = self._most_common_kind()
            if self._leave_out_odd(kind, source):
                self.wait_for(count)  # others may stand in for those that are left out
            else:
                self.fix_kind(kind, source)
        self.info = {client: info for client, info in self.info.items() if client not in self.odd}

    def _most_common_kind(self) -> tuple[DataKind, str]:
        """The kind of data that most of the clients have that are here, or else the first of them; and which it is."""
        here = self.node_of | self.odd
        kinds = {client: info.kind for client, info in self.info.items() if client in here}
        (kind, most), *others = Counter(kinds.values()).most_common()  # of equally common ones the first is first
        if others and others[0][1] == most:
            return kind, f"client {next(iter(kinds))}, which came first, has"
        return kind, "most of the clients have"

    def _leave_out_odd(self, kind: DataKind, source: str) -> bool:
        """Leave out the clients with data of another kind, and no others; does that change who takes part?"""
        nodes = self.odd | self.node_of
        odd = {client: node for client, node in nodes.items() if self.info[client].kind != kind}
        before, self.odd = self.odd, odd
        self.node_of = {client: node for client, node in nodes.items() if client not in odd}
        for client in before.keys() - odd.keys():
            self.refused.discard(client)
            self.problems.pop(self.node_of[client], None)
            self.say(f"client {client} takes part after all: {source} {kind}.")
        for client in odd.keys() - before.keys():
            sentence = f"client {client} has {self.info[client].kind}, and {source} {kind}; {ALIKE}."
            self._note_problem(odd[client], RefusedClient(client, sentence))
        return odd != before

    def wait_for(self, count: int) -> set[int]:
        """The clients that are connected, once there are so many; those that cannot take part are not waited for."""
        needed, end = min(count, self.clients), time.monotonic() + self.rules.wait
        least, reported = min(needed, self.rules.answers), -1
        while len(connected := self.refresh()) < max(min(needed, self._count_able(connected)), least):
            self._check_hope(needed)
            if time.monotonic() > end:
                raise EngineError(
                    f"{len(connected)} of {count_text(needed, 'client')} came within {self.rules.wait:g} s; "
                    "start the others, or wait for fewer (nodes, answers); the run goes on from its last round."
                )
            if reported != len(connected):
                reported = len(connected)
                self.say(f"{WAITING}{reported} of {needed} are ready")
            time.sleep(POLL_SECONDS)
        return connected
