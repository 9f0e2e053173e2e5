"""Wrong inputs: each is answered by one sentence that says what was wrong, what is allowed and what to do; never by a traceback."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from askew.cli import main

QUICK = ("--set", "rounds=2", "--set", "model.name=softmax", "--set", "partition.clients=5", "--quiet")
Setup = Callable[[Path, pytest.MonkeyPatch], object]


@dataclass(frozen=True)
class Case:
    """A command line, what makes it wrong besides, and fragments of its sentence: the culprit, what is allowed, what to do."""

    id: str
    words: tuple[str, ...]
    fragments: tuple[str, str, str]
    setup: Setup | None = None


def run(id: str, *settings: str, says: tuple[str, str, str], setup: Setup | None = None) -> Case:
    """`askew run` with these `--set`."""
    return Case(id, ("run", *(word for setting in settings for word in ("--set", setting))), says, setup)


def command(id: str, line: str, *says: str, setup: Setup | None = None) -> Case:
    wrong, allowed, advice = says
    return Case(id, tuple(line.split()), (wrong, allowed, advice), setup)


def file(name: str, content: str | bytes) -> Setup:
    data = content.encode() if isinstance(content, str) else content
    return lambda here, patch: (here / name).write_bytes(data)


def toml(id: str, content: str, *says: str) -> Case:
    """`askew run` with this file."""
    return command(id, "run wrong.toml", *says, setup=file("wrong.toml", content))


def plugin(id: str, content: str, *says: str, more: str = "") -> Case:
    """`askew run` with this plugin."""
    return command(id, f"run --plugin own.py {more}", *says, setup=file("own.py", content))


def stored(id: str, line: str, change: Callable[[Path], object], *says: str) -> Case:
    """A command on the folder `stored`, which holds a finished run of QUICK, after a change."""
    return command(id, line, *says, setup=lambda here, patch: change(here / "runs" / "stored"))
