"""A ready Flower app: a folder with the run's page of TOML, the user's data module and two lines of Python."""

from __future__ import annotations

import shutil
from pathlib import Path

from ..errors import ConfigError
from ..experiment.store import disk, write_text
from ..experiment.toml import literal, read_toml, to_toml
from ..version import __version__
from .field import Rules

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


def write_app(page: Path, folder: Path, data: Path | None = None, rules: Rules | None = None, publisher: str = "askew") -> None:
    """Write an app folder for a run's page of TOML and, where clients have data of their own, a data module; plugins go along.

    What the server and the clients read beside (datasets, files that the page names) must be on their machines.
    """
    if folder.exists() and any(folder.iterdir()) and not (folder / PACKAGE / "run.toml").is_file():
        raise ConfigError(f"{str(folder)!r} holds other files; name a new folder for the app.")
    inside, tables = folder / PACKAGE, read_toml(page)
    if isinstance(tables.get("plugins"), list):
        named = [Path(str(path)) for path in tables["plugins"]]
        tables["plugins"] = [f"plugin_{n}_{path.name}" for n, path in enumerate(named)]
        for path, name in zip(named, tables["plugins"], strict=True):
            copied(path, inside / name)
    source = "DATA = None"
    if data is not None:
        copied(data, inside / "data.py")
        source = "from askew.flower import DataModule\n\nfrom . import data\n\nDATA = DataModule.of(data)"
    table = {name: value for name, value in (rules or Rules()).table().items() if value is not None}
    project = PROJECT.format(
        name=literal(page.stem.lower().replace("_", "-")),
        version=__version__,
        publisher=literal(publisher),
        package=PACKAGE,
        rules="\n".join(f"{name} = {literal(value)}" for name, value in table.items()),
    )
    write_text(folder / "pyproject.toml", project)
    write_text(inside / "__init__.py", "")
    write_text(inside / "run.toml", to_toml(tables))
    write_text(inside / "parts.py", PARTS.format(data=source))
    for side in ("server", "client"):
        write_text(inside / f"{side}.py", SIDE.format(side=side))


def copied(path: Path, target: Path) -> None:
    if not path.is_file():
        raise ConfigError(f"there is no file {str(path)!r}; name a Python file.")
    with disk(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
