"""Flower's ServerApp around a run, and the post that Flower's grid is."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from logging import INFO, WARNING
from pathlib import Path

from flwr.app import Context, Message
from flwr.common import log
from flwr.serverapp import Grid, ServerApp
from httpx import HTTPError

from ..experiment.store import Record, Run
from .deployment_data import DataModule, read_page
from .server import Answer, Rules, serve
from .wire import ALIKE, Payload, Refused, from_records, line, to_records

LONGER = (
    5.0  # seconds that Flower keeps a message beyond its time, so that it is the server who says that nobody answered
)


class GridPost:
    """Letters as Flower's messages. One that is not answered in time is thrown away by Flower, wherever it is."""

    def __init__(self, grid: Grid) -> None:
        self.grid, self.sent, self.received = grid, 0, 0

    def nodes(self) -> list[int]:
        return sorted(self.grid.get_node_ids())

    def send(self, kind: str, letters: Mapping[int, Payload], group: str, timeout: float) -> dict[str, int]:
        messages = [
            Message(to_records(letter), node, kind, ttl=timeout + LONGER, group_id=group)
            for node, letter in letters.items()
        ]
        self.sent += sum(weight(message) for message in messages)
        return {name: node for name, node in zip(self.grid.push_messages(messages), letters, strict=False) if name}

    def collect(self, names: Collection[str]) -> dict[str, Answer]:
        try:
            replies = {reply.metadata.reply_to_message_id: reply for reply in self.grid.pull_messages(list(names))}
        except HTTPError:
            raise
        except Exception as e:  # whatever a false message makes Flower stumble over; those that came with it are lost
            log(
                WARNING,
                "a message came that Flower cannot read (%s), and its sender is waited for in vain; %s.",
                line(str(e)),
                ALIKE,
            )
            return {}
        self.received += sum(weight(reply) for reply in replies.values())
        return {name: self._read(reply) for name, reply in replies.items() if name in names}

    def _read(self, reply: Message) -> Answer:
        if reply.has_error():
            return line(reply.error.reason or "") or f"Flower's error {reply.error.code}"
        try:
            return from_records(reply.content, f"node {reply.metadata.src_node_id}")
        except Refused as e:
            return str(e)


def weight(message: Message) -> int:
    """The bytes of a message's records as Flower counts them."""
    return sum(record.count_bytes() for record in message.content.values()) if message.has_content() else 0


def server_app(page: Path, data: DataModule | None = None) -> ServerApp:
    """The server of an app whose run is on this page of TOML; Flower's run configuration holds the rules."""
    app = ServerApp()

    def main(grid: Grid, context: Context) -> None:
        rules = Rules.build(context.run_config)
        config = read_page(page, data)
        run = serve(config, GridPost(grid), rules, data, lambda text: log(WARNING, text), watch)
        log(INFO, "the run is in %s", run.folder)

    app.main()(main)
    return app


def watch(run: Run, record: Record | None) -> None:
    """One line a round."""
    if record is None:
        log(INFO, "%s: rounds are written to %s", run.name, run.folder)
        if "privacy" in run.facts:
            log(INFO, "privacy: %s", run.facts["privacy"])
        return
    told = {
        name: record.get(name)
        for name in ("accuracy", "loss", "train_loss", "dropped", "absent")
        if record.get(name) is not None
    }
    log(
        INFO,
        "round %s of %s: %s",
        record["round"],
        run.config["rounds"],
        ", ".join(f"{k} {v:.4g}" for k, v in told.items()),
    )
