"""Flower's ClientApp around a client."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from flwr.app import ConfigRecord, Context, Error, Message
from flwr.clientapp import ClientApp

from ..errors import AskewError
from ..experiment.process_state import explain_out_of_memory, torch_state
from .client import SERVER, STAGES, Client, hello
from .client_state import InContext, InFile, Place
from .deployment_data import DataModule, Home, read_page
from .wire import Payload, from_records, to_records, told

RAISED = 2  # Flower's code of a client's own error


def client_app(page: Path, data: DataModule | None = None) -> ClientApp:
    """The client of an app whose run is on this page of TOML."""
    app, homes = ClientApp(), dict[tuple[int, int | None], Home]()

    def answer(kind: str, message: Message, context: Context) -> Payload:
        config = read_page(page, data)
        letter = from_records(message.content, SERVER)
        classes = None if kind == "query" else told(letter, "classes", int, SERVER)
        with torch_state(config), explain_out_of_memory():
            key = (context.node_id, classes)
            if key not in homes:  # of many nodes in one process, as in Flower's simulation, the latest
                homes.clear()
                homes[key] = Home(config, context.node_config, data, classes)
            home = homes[key]
            if kind == "query":
                return hello(home)
            if config.privacy.secure and "secure" not in context.state:
                context.state["secure"] = ConfigRecord()
            return Client(home, place_of(home, context), context.state.config_records.get("secure")).answer(
                kind, letter
            )

    def handler(kind: str) -> Callable[[Message, Context], Message]:
        def handle(message: Message, context: Context) -> Message:
            try:
                return Message(to_records(answer(kind, message, context)), reply_to=message)
            except AskewError as e:
                return Message(Error(RAISED, str(e)), reply_to=message)

        return handle

    app.query()(handler("query"))
    app.train()(handler("train"))
    app.evaluate()(handler("evaluate"))
    for stage in STAGES:
        app.train(stage)(handler(f"train.{stage}"))
    return app


def place_of(home: Home, context: Context) -> Place:
    """Where a client's state lies: in the folder that the node's configuration names, else with Flower while the node is up."""
    named = context.node_config.get("state")
    folder = Path(str(named)) if named else Path(os.environ.get("FLWR_HOME", Path.home() / ".flwr")) / "askew"
    file = InFile(folder / home.config.name() / f"client-{home.client}.safetensors")
    return file if named else InContext(context.state, file)
