"""A ready Flower app: a folder with the run's page of TOML, the user's data module and two lines of Python."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..experiment.store import explain_write_errors, write_text
from ..experiment.toml import literal, read_toml, to_toml
from ..version import __version__
from .server import Rules

PACKAGE = "askew_app"

PROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = {name}
version = "1.0.0"
description = "A run of askew on Flower"
license = "Apache-2.0"
dependencies = [] # askew with its extra `flower`, version {version}, must be there on every machine

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = {publisher}

[tool.flwr.app.components]
serverapp = "{package}.server:app"
clientapp = "{package}.client:app"

# How the server waits for its clients; what is learned is in {package}/run.toml.
[tool.flwr.app.config]
{rules}
"""

PARTS = """\
from pathlib import Path

{data}
PAGE = Path(__file__).parent / "run.toml"
"""

SIDE = """\
from askew.flower.{side}_app import {side}_app

from .parts import DATA, PAGE

app = {side}_app(PAGE, DATA)
"""


def write_app(
    page: Path, folder: Path, data: Path | None = None, rules: Rules | None = None, publisher: str = "askew"
) -> None:
    """Write an app folder for a run's page of TOML and, where clients have data of their own, a data module; plugins go along.

    What the server and the clients read beside (datasets, files that the page names) must be on their machines.
    """
    lay_out(read_toml(page), folder, data, rules, page.stem, publisher)


def lay_out(
    tables: Mapping[str, Any],
    folder: Path,
    data: Path | None,
    rules: Rules | None,
    name: str = "run",
    publisher: str = "askew",
) -> None:
    """The same for a page that is read already."""
    if folder.is_file() or (
        folder.exists() and any(folder.iterdir()) and not (folder / PACKAGE / "run.toml").is_file()
    ):
        raise ConfigError(f"{str(folder)!r} holds other files; name a new folder for the app.")
    inside, tables = folder / PACKAGE, dict(tables)
    if isinstance(tables.get("plugins"), list):
        named = [Path(str(path)) for path in tables["plugins"]]
        tables["plugins"] = [f"plugin_{n}_{path.name.removeprefix(f'plugin_{n}_')}" for n, path in enumerate(named)]
        for path, copy in zip(named, tables["plugins"], strict=True):
            copied(path, inside / copy)
    source = "DATA = None"
    if data is not None:
        copied(data, inside / "data.py")
        source = "from askew.flower import DataModule\n\nfrom . import data\n\nDATA = DataModule.of(data)"
    else:
        (inside / "data.py").unlink(missing_ok=True)
    table = {key: value for key, value in (rules or Rules()).table().items() if value is not None}
    project = PROJECT.format(
        name=literal(re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "run"),
        version=__version__,
        publisher=literal(publisher),
        package=PACKAGE,
        rules="\n".join(f"{key} = {literal(value)}" for key, value in table.items()),
    )
    write_text(folder / "pyproject.toml", project)
    write_text(inside / "__init__.py", "")
    write_text(inside / "run.toml", to_toml(tables))
    write_text(inside / "parts.py", PARTS.format(data=source))
    for side in ("server", "client"):
        write_text(inside / f"{side}.py", SIDE.format(side=side))


def read_app(folder: Path) -> tuple[dict[str, Any], Path | None, dict[str, Any]]:
    """What an app folder was written from: tables, data module and rules."""
    page, data = folder / PACKAGE / "run.toml", folder / PACKAGE / "data.py"
    if not page.is_file():
        raise ConfigError(
            f"{str(folder)!r} is no app folder: it has no {PACKAGE}/run.toml; name one that `askew deploy app` wrote."
        )
    tables, rules = read_toml(page), read_toml(folder / "pyproject.toml")
    if isinstance(tables.get("plugins"), list):
        tables["plugins"] = [str(page.parent / str(path)) for path in tables["plugins"]]
    for key in ("tool", "flwr", "app", "config"):
        rules = rules.get(key, {})
    return tables, data if data.is_file() else None, rules


def copied(path: Path, target: Path) -> None:
    if not path.is_file():
        raise ConfigError(f"there is no file {str(path)!r}; name a Python file.")
    if target.exists() and path.samefile(target):
        return
    with explain_write_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
