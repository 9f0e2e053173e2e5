"""Flower's ServerApp around a deployed run, and the transport over Flower's grid."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from logging import INFO, WARNING
from pathlib import Path

from flwr.app import Context, Message
from flwr.common import log
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.common.logger import FLOWER_LOGGER
from flwr.serverapp import Grid, ServerApp
from httpx import HTTPError

from ..core.records import Record
from ..errors import AskewError
from ..experiment.roll_call import loss_sentence, never_sentences, round_sentence
from ..experiment.store import Run
from .deployment_data import DataModule, read_config
from .launch import ask_again_soon
from .rules import DeploymentRules
from .server import serve
from .transport import Reply
from .wire import SAME_SETUP, InvalidMessage, Payload, from_records, to_one_line, to_records

# Seconds for which Flower keeps a message beyond its time, so that the server notices first that nobody answered.
EXTRA_SECONDS = 5.0
LOGGED = ("accuracy", "loss", "train_loss", "epsilon")  # entries of a round's record that the log shows


class GridTransport:
    """Sends payloads as Flower's messages. Flower throws away a message that is not answered in time."""

    def __init__(self, grid: Grid) -> None:
        self.grid, self.bytes_sent, self.bytes_received = grid, 0, 0
        self.asked: dict[str, int] = {}  # by message without a reply: the node that it was sent to

    def connected_nodes(self) -> list[int]:
        return sorted(self.grid.get_node_ids())

    def send(self, kind: str, payloads: Mapping[int, Payload], group: str, timeout: float) -> dict[str, int]:
        messages = [
            Message(to_records(payload), node, kind, ttl=timeout + EXTRA_SECONDS, group_id=group)
            for node, payload in payloads.items()
        ]
        self.bytes_sent += sum(content_bytes(message) for message in messages)
        message_ids = self.grid.push_messages(messages)
        sent = {message_id: node for message_id, node in zip(message_ids, payloads, strict=False) if message_id}
        self.asked |= sent
        return sent

    def receive(self, message_ids: Collection[str]) -> dict[str, Reply]:
        try:
            messages = self.grid.pull_messages(list(message_ids))
            replies: dict[str, Message] = {}
            for message in messages:  # of several replies to one message the first is used
                replies.setdefault(message.metadata.reply_to_message_id, message)
        except HTTPError:
            raise
        except Exception as e:  # whatever Flower raises over a malformed message; those that came with it are lost
            log(
                WARNING,
                "a message came that Flower cannot read (%s), and its sender is waited for in vain; %s.",
                to_one_line(str(e)),
                SAME_SETUP,
            )
            return {}
        self.bytes_received += sum(content_bytes(message) for message in replies.values())
        return {name: self._read(name, message) for name, message in replies.items() if name in message_ids}

    def _read(self, name: str, message: Message) -> Reply:
        sender, asked = message.metadata.src_node_id, self.asked.pop(name, None)
        if sender != asked and not (message.has_error() and sender == SUPERLINK_NODE_ID):
            return f"the answer came from node {sender}, and node {asked} was asked; {SAME_SETUP}."
        if message.has_error():
            return to_one_line(message.error.reason or "") or f"Flower's error {message.error.code}"
        try:
            return from_records(message.content, f"node {sender}")
        except InvalidMessage as e:
            return str(e)


def content_bytes(message: Message) -> int:
    """The bytes of a message's records as Flower counts them."""
    return sum(record.count_bytes() for record in message.content.values()) if message.has_content() else 0


def server_app(config_path: Path, data: DataModule | None = None) -> ServerApp:
    """The server of an app whose configuration is in this TOML file; Flower's run configuration holds the rules."""
    app = ServerApp()

    def main(grid: Grid, context: Context) -> None:
        ask_again_soon()
        FLOWER_LOGGER.addFilter(shorten_error)
        rules = DeploymentRules.build(context.run_config)
        config = read_config(config_path, data)
        warn, say = lambda text: log(WARNING, text), lambda text: log(INFO, text)
        run = serve(config, GridTransport(grid), rules, data, warn, log_round, say)
        log(INFO, "the run is in %s", run.folder)

    app.main()(main)
    return app


def shorten_error(record: logging.LogRecord) -> bool:
    """Log the sentence of one of our errors, where Flower would log a traceback, which says no more to a user."""
    error = record.exc_info and record.exc_info[1]
    if isinstance(error, AskewError):
        record.msg, record.args, record.exc_info = str(error), (), None
    return True


def log_round(run: Run, record: Record | None) -> None:
    """Write one line about a round to the log; without a record, about the run that begins."""
    if record is None:
        log(INFO, "%s: rounds are written to %s", run.name, run.folder)
        if "privacy" in run.facts:
            log(INFO, "privacy: %s", run.facts["privacy"])
        return
    values = ", ".join(f"{name} {record[name]:.4g}" for name in LOGGED if record.get(name) is not None)
    log(INFO, "round %s of %s: %s", record["round"], run.config["rounds"], values)
    log(WARNING if record.get("incidents") else INFO, "round %s: %s", record["round"], round_sentence(record))
    if run.finished:
        log_losses(run)


def log_losses(run: Run) -> None:
    """Write to the log what was lost in a whole run, and whose data are not in its model."""
    call = run.roll_call()
    for sentence in [
        *([] if call.empty else [loss_sentence(call, len(run.rounds))]),
        *never_sentences(call, run.federation, run.deployed),
    ]:
        log(WARNING, "%s: %s", run.name, sentence)
