"""The client of an app that does what the orders on a desk say: a test's hand in another process.

`orders.json` has by "round-client" what happens to that answer of training; files `came-…` and `go-…` are how both sides wait.
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

CLIENT = "from faulty import faulty_app\n\nfrom .parts import DATA, PAGE\n\napp = faulty_app(PAGE, DATA)\n"
PATIENCE = 240.0  # seconds; an order that nobody lifts ends by itself

Change = Callable[[np.ndarray], np.ndarray]
ARRAYS: dict[str, Change] = {
    "shape": lambda a: a[:-1],
    "nan": lambda a: np.full_like(a, np.nan),
    "model": lambda a: np.tile(a, 2),
    "bytes": lambda a: np.zeros(2_000_000, a.dtype),
    "type": lambda a: a.astype(np.float64),
}
NUMBERS: dict[str, dict[str, Any]] = {"round": {"round": 99}, "client": {"client": 2}, "long": {"loss": "x" * 10**6}}


def spoiled(reply: Message, order: str) -> Message:
    arrays, numbers = reply.content["arrays"], reply.content["numbers"]
    if order in ARRAYS:
        for name, array in list(arrays.items()):
            arrays[name] = Array(ARRAYS[order](array.numpy()))
    numbers.update(NUMBERS.get(order, {}))
    return reply


def faulty_app(page: Path, data: DataModule | None) -> ClientApp:
    honest, app, desk = client_app(page, data), ClientApp(), Path(os.environ["ASKEW_DESK"])

    def order(place: str) -> str:
        try:
            return str(json.loads((desk / "orders.json").read_text()).get(place, ""))
        except (OSError, ValueError):  # the desk is being cleared
            return ""

    def wait(place: str) -> None:
        end = time.monotonic() + PATIENCE
        while order(place) and not (desk / f"go-{place}").exists() and time.monotonic() < end:
            time.sleep(0.1)

    def train(message: Message, context: Context) -> Message:
        place = f"{message.content['numbers']['round']}-{context.node_config['partition-id']}"
        told = order(place)
        (desk / f"came-{place}").touch()
        if told == "hold":
            wait(place)
        if told == "raise":
            raise RuntimeError("the disk\nis full")
        reply = honest(message, context)
        if told == "late":
            wait(place)
        return spoiled(reply, told)

    app.query()(honest)
    app.evaluate()(honest)
    app.train()(train)
    return app
