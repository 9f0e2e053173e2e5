"""A client app that does what a test orders, in the processes that Flower starts for it.

A folder, named by the environment variable ASKEW_ORDERS, connects it with the test. Its file `orders.json` has by
"ROUND-CLIENT" what to do with that client's reply to training. The app creates `started-ROUND-CLIENT` when the message
comes, and the orders "hold" (before training) and "late" (after it) wait until the test creates `go-ROUND-CLIENT`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, Context, Message
from flwr.clientapp import ClientApp

from askew.flower.client_app import client_app
from askew.flower.deployment_data import DataModule

FOLDER_VARIABLE = "ASKEW_ORDERS"
# The client's half of an app that has a faulty client.
CLIENT_SOURCE = """\
from faulty_client import faulty_app

from .parts import CONFIG, DATA

app = faulty_app(CONFIG, DATA)
"""
MAX_WAIT = 240.0  # seconds; an order that no test lifts ends by itself

# Orders that change all arrays of a reply, and those that change its numbers.
ARRAY_CHANGES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "shape": lambda a: a[:-1],
    "nan": lambda a: np.full_like(a, np.nan),
    "model": lambda a: np.tile(a, 2),
    "bytes": lambda a: np.zeros(2_000_000, a.dtype),
    "type": lambda a: a.astype(np.float64),
}
NUMBER_CHANGES: dict[str, dict[str, Any]] = {
    "round": {"round": 99},
    "client": {"client": 2},
    "long": {"loss": "x" * 10**6},
}


def spoil(reply: Message, order: str) -> Message:
    """The reply, changed as ordered."""
    arrays, numbers = reply.content["arrays"], reply.content["numbers"]
    if order in ARRAY_CHANGES:
        for name, array in list(arrays.items()):
            arrays[name] = Array(ARRAY_CHANGES[order](array.numpy()))
    numbers.update(NUMBER_CHANGES.get(order, {}))
    return reply


def faulty_app(config_path: Path, data: DataModule | None) -> ClientApp:
    """A client app that follows orders when it trains."""
    honest, app, folder = client_app(config_path, data), ClientApp(), Path(os.environ[FOLDER_VARIABLE])

    def read_order(name: str) -> str:
        try:
            return str(json.loads((folder / "orders.json").read_text()).get(name, ""))
        except (OSError, ValueError):  # a test is just replacing it
            return ""

    def wait_for_go(name: str) -> None:
        end = time.monotonic() + MAX_WAIT
        while read_order(name) and not (folder / f"go-{name}").exists() and time.monotonic() < end:
            time.sleep(0.1)

    def train(message: Message, context: Context) -> Message:
        name = f"{message.content['numbers']['round']}-{context.node_config['partition-id']}"
        order = read_order(name)
        (folder / f"started-{name}").touch()
        if order == "hold":
            wait_for_go(name)
        if order == "raise":
            raise RuntimeError("the disk\nis full")
        reply = honest(message, context)
        if order == "late":
            wait_for_go(name)
        return spoil(reply, order)

    app.query()(honest)
    app.evaluate()(honest)
    app.train()(train)
    return app
