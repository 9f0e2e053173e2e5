"""Flower's ClientApp around a client of a deployment."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from flwr.app import ConfigRecord, Context, Error, Message
from flwr.clientapp import ClientApp

from ..errors import AskewError
from ..experiment.process_state import explain_out_of_memory, torch_state
from .client import SECURE_STAGES, SERVER, DeployedClient, answer_query
from .client_state import ContextStore, FileStore, StateStore, lock_answers
from .deployment_data import ClientSetup, DataModule, DeploymentConfig, read_config
from .wire import Payload, from_records, read_value, to_records

CLIENT_ERROR = 2  # Flower's code for an error that the client app itself reports


def client_app(config_path: Path, data: DataModule | None = None) -> ClientApp:
    """The client of an app whose configuration is in this TOML file."""
    app, setups = ClientApp(), dict[tuple[int, int | None], ClientSetup]()

    def find_setup(config: DeploymentConfig, context: Context, classes: int | None) -> ClientSetup:
        key = (context.node_id, classes)
        if key not in setups:  # a process with many nodes, as in Flower's simulation, keeps the latest alone
            setups.clear()
            setups[key] = ClientSetup(config, context.node_config, data, classes)
        return setups[key]

    def answer(kind: str, message: Message, context: Context) -> Payload:
        config = read_config(config_path, data)
        payload = from_records(message.content, SERVER)
        classes = None if kind == "query" else read_value(payload, "classes", int, SERVER)
        with torch_state(config), explain_out_of_memory():
            if kind == "query":
                return answer_query(config, context.node_config, lambda: find_setup(config, context, classes))
            setup = find_setup(config, context, classes)
            if config.privacy.secure and "secure" not in context.state:
                context.state["secure"] = ConfigRecord()
            secrets = context.state.config_records.get("secure")
            store, answers = choose_store(setup, context)
            with lock_answers(answers):
                return DeployedClient(setup, store, secrets, answers).answer(kind, payload)

    def handler(kind: str) -> Callable[[Message, Context], Message]:
        def handle(message: Message, context: Context) -> Message:
            try:
                return Message(to_records(answer(kind, message, context)), reply_to=message)
            except AskewError as e:
                return Message(Error(CLIENT_ERROR, str(e)), reply_to=message)

        return handle

    app.query()(handler("query"))
    app.train()(handler("train"))
    app.evaluate()(handler("evaluate"))
    for stage in SECURE_STAGES:
        app.train(stage)(handler(f"train.{stage}"))
    return app


def choose_store(setup: ClientSetup, context: Context) -> tuple[StateStore, Path]:
    """The store of a client's state, and the file of its answers.

    State is kept in the folder that the node's configuration names, else in Flower's context. Answers are always kept
    in a file, as a client must know them after a restart too.
    """
    named = context.node_config.get("state")
    folder = Path(str(named)) if named else Path(os.environ.get("FLWR_HOME", Path.home() / ".flwr")) / "askew"
    folder /= setup.config.name()
    file = FileStore(folder / f"client-{setup.client}.safetensors")
    store: StateStore = file if named else ContextStore(context.state, file)
    return store, folder / f"client-{setup.client}-answers.safetensors"
