"""Lists of what a configuration can name, in a terminal: `askew list`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .plain_table import plain_table
from .terminal import QUIET, command, pairs, setting_text, times


def catalogue(kind: str, entries: Sequence[dict[str, Any]]) -> RenderableType:
    """Everything of one kind that a configuration can name, such as "models", with its settings."""
    if kind == "algorithms":
        return algorithm_catalogue(entries)
    listing, one = plain_table(), kind.removesuffix("s")
    listing.add_column(one, style="bold", no_wrap=True)
    listing.add_column("what it is, and its settings with their defaults (–: left out)")
    first, *others = [entry["parameters"] for entry in entries]
    common = [p for p in first if others and all(p in other for other in others)]
    for entry in entries:
        special = [p for p in entry["parameters"] if p not in common]
        about = Group(Text(entry["idea"]), *([explain_settings(special)] if special else []))
        listing.add_row(entry["name"], about, end_section=True)
    if not common:
        return listing
    return Group(listing, Text(f"\nevery {one} has these settings too\n", "cyan"), explain_settings(common))


def algorithm_catalogue(entries: Sequence[dict[str, Any]]) -> RenderableType:
    """All methods: what they send and keep, their ideas and papers, then their settings."""
    listing, setting_table = plain_table(), plain_table()
    for each in (listing, setting_table):
        each.add_column("algorithm", style="bold", no_wrap=True)
    for heading in ("sent\ndown", "sent\nup", "kept at\nserver", "kept at\nclient"):
        listing.add_column(heading, justify="right")
    listing.add_column("exact", justify="center")
    listing.add_column("idea and paper")
    setting_table.add_column("settings, with their defaults (–: left out)")
    for entry in entries:
        server = times(entry["server_state"]) + (f"+{times(entry['memory'])}N" if entry["memory"] else "")
        costs = [times(entry["down"]), times(entry["up"]), server, times(entry["client_state"])]
        about = Text.assemble(entry["idea"], "\n", (entry["paper"], QUIET))
        listing.add_row(entry["name"], *costs, Text("yes", "green") if entry["exact"] else "–", about)
        defaults = [f"{p['name']}={setting_text(p['default'])}" for p in entry["parameters"]]
        setting_table.add_row(entry["name"], " ".join(defaults))
    notes = (
        "sent: by and to one client in a round, kept: from round to round, both in multiples of the model, measured "
        "on a small network with batch norm. exact: claims the true optimum under skewed data and partial "
        "participation."
    ) + (" +1N: and once for each client." if any(entry["memory"] for entry in entries) else "")
    more = Text("\none method, its equations and settings: askew list algorithms NAME", QUIET)
    return Group(listing, Text(f"\n{notes}\n", QUIET), setting_table, more)


# what to set, by the kind of list
SETTING_OF_KIND = {
    "algorithms": "algorithm.name",
    "attacks": "attack.name",
    "datasets": "data.name",
    "models": "model.name",
    "partitions": "partition.name",
    "participations": "participation.name",
    "rules": "robust.rule",
}


def explain_entry(kind: str, entry: dict[str, Any]) -> RenderableType:
    """One entry of a list: what it is, of a method also its equations, paper and costs; settings, and a command."""
    key, name = SETTING_OF_KIND[kind], entry["name"]
    parts: list[RenderableType] = [Text.assemble((name, "bold"), f": {entry['idea']}"), Text()]
    if entry.get("about"):
        blocks = re.split(r"\n\s*\n", entry["about"])
        for block in blocks:  # equations are indented and keep their lines; the rest is text
            is_equation = all(line.startswith("    ") for line in block.splitlines())
            parts += [Text(block if is_equation else " ".join(block.split()), "cyan" if is_equation else ""), Text()]
    if kind == "algorithms":
        server = times(entry["server_state"]) + (f", and {times(entry['memory'])} a client" if entry["memory"] else "")
        facts = [
            *([("paper", entry["paper"])] if entry["paper"] else []),
            ("sends", f"{times(entry['down'])} models down, {times(entry['up'])} up, for a client and round"),
            ("keeps", f"{server} at the server, {times(entry['client_state'])} at a client (models)"),
            ("exact", "claims the true optimum under skewed data" if entry["exact"] else "no such claim"),
        ]
        parts += [pairs(facts), Text()]
    settings = [p for p in entry["parameters"] if p["name"] != "name"]
    parts += [Text(f"settings of [{key.partition('.')[0]}], with their defaults (–: left out)", "cyan")] * bool(
        settings
    )
    parts += [explain_settings(settings), Text()] if settings else []
    first = next((p for p in settings if isinstance(p["default"], (int, float)) and p["default"] is not True), None)
    words = ["--method", name] if kind == "algorithms" else ["--set", f"{key}={name}"]
    if first and first["default"] is not False:
        words += ["--set", f"{key.partition('.')[0]}.{first['name']}={setting_text(first['default'])}"]
    return Group(*parts, pairs([("example", command("run", *words))]))


def explain_settings(parameters: Sequence[dict[str, Any]]) -> Table:
    """Settings with their defaults, meanings and ranges."""
    names = [f"{p['name']} = {setting_text(p['default'])}" for p in parameters]
    texts = [f"{p['doc']} ({p['allowed']})".strip() for p in parameters]
    return pairs((name, Text(text, QUIET)) for name, text in zip(names, texts, strict=True))
