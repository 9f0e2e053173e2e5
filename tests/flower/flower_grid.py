"""Flower's grid within one process: apps are called as Flower calls them, and messages go through its bytes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity
from in_process import write_config

from askew.flower.client_app import client_app
from askew.flower.server_app import server_app


@pytest.fixture
def task_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Flower sets in the process of an app."""
    for name in ("run_id", "node_id", "task_id"):
        monkeypatch.setattr(TaskIdentity, f"_{name}", 1)


def transmit(message: Message) -> Message:
    """The message as it arrives."""
    contents = {name: thing.deflate() for name, thing in get_all_nested_objects(message).items()}
    received = inflate_object_from_contents(message.object_id, contents)
    assert isinstance(received, Message)
    received.metadata.__dict__["_message_id"] = message.object_id
    return received


class InProcessGrid(Grid):
    """A grid whose nodes are in this process; their contexts last as long as the grid."""

    def __init__(self, app: ClientApp, clients: int, **node_config: Any) -> None:
        self.app, self.replies = app, dict[str, Message]()
        nodes = {client: 7 * client + 1 for client in range(clients)}
        self.contexts = {
            node: Context(1, node, {"partition-id": client, **node_config}, RecordDict(), {})
            for client, node in nodes.items()
        }

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any: ...

    def create_message(self, *arguments: Any, **options: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return self.contexts

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            received = transmit(message)
            ids.append(received.metadata.message_id)
            self.replies[ids[-1]] = transmit(self.app(received, self.contexts[received.metadata.dst_node_id]))
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self.replies.pop(id) for id in message_ids if id in self.replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        raise NotImplementedError


def run_apps(tables: dict[str, Any], folder: Path, **node_config: Any) -> InProcessGrid:
    """Run the two apps of a configuration on five nodes."""
    path = write_config(tables, folder / "app")
    grid = InProcessGrid(client_app(path), 5, **node_config)
    server_app(path)(grid, Context(1, 0, {}, RecordDict(), {"out": str(folder / "runs"), "wait": 1.0}))
    return grid
