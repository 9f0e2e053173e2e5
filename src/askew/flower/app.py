"""A ready Flower app: a folder with the run's configuration, the user's data module and two lines of Python."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..experiment.folder_lock import explain_write_errors
from ..experiment.store import write_text
from ..experiment.toml import literal, read_toml, to_toml
from ..version import __version__
from .rules import DeploymentRules

PACKAGE = "askew_app"  # the Python package inside an app folder

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
CONFIG = Path(__file__).parent / "run.toml"
"""
NO_DATA = "DATA = None"
OWN_DATA = "from askew.flower import DataModule\n\nfrom . import data\n\nDATA = DataModule.of(data)"

SIDE = """\
from askew.flower.{side}_app import {side}_app

from .parts import CONFIG, DATA

app = {side}_app(CONFIG, DATA)
"""


def write_app(
    config_path: Path,
    folder: Path,
    data: Path | None = None,
    rules: DeploymentRules | None = None,
    publisher: str = "askew",
) -> None:
    """Write an app folder for the run of a TOML file; plugins and the data module, if there is one, are copied.

    Datasets and other files that the configuration names must be on the machines of the server and the clients already.
    """
    write_app_from_tables(read_toml(config_path), folder, data, rules, config_path.stem, publisher)


def write_app_from_tables(
    tables: Mapping[str, Any],
    folder: Path,
    data: Path | None,
    rules: DeploymentRules | None,
    name: str = "run",
    publisher: str = "askew",
) -> None:
    """Write an app folder for a configuration that is read already."""
    if folder.is_file() or (
        folder.exists() and any(folder.iterdir()) and not (folder / PACKAGE / "run.toml").is_file()
    ):
        raise ConfigError(f"{str(folder)!r} holds other files; name a new folder for the app.")
    package, tables = folder / PACKAGE, dict(tables)
    if isinstance(tables.get("plugins"), list):
        tables["plugins"] = copy_plugins([Path(str(path)) for path in tables["plugins"]], package)
    if data is not None:
        copy_file(data, package / "data.py")
    else:
        (package / "data.py").unlink(missing_ok=True)
    settings = {key: value for key, value in (rules or DeploymentRules()).table().items() if value is not None}
    project = PROJECT.format(
        name=literal(re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "run"),
        version=__version__,
        publisher=literal(publisher),
        package=PACKAGE,
        rules="\n".join(f"{key} = {literal(value)}" for key, value in settings.items()),
    )
    write_text(folder / "pyproject.toml", project)
    write_text(package / "__init__.py", "")
    write_text(package / "run.toml", to_toml(tables))
    write_text(package / "parts.py", PARTS.format(data=NO_DATA if data is None else OWN_DATA))
    for side in ("server", "client"):
        write_text(package / f"{side}.py", SIDE.format(side=side))


def read_app(folder: Path) -> tuple[dict[str, Any], Path | None, dict[str, Any]]:
    """What an app folder was written from: the configuration's tables, the data module and the rules."""
    config_path, data = folder / PACKAGE / "run.toml", folder / PACKAGE / "data.py"
    if not config_path.is_file():
        raise ConfigError(
            f"{str(folder)!r} is no app folder: it has no {PACKAGE}/run.toml; name one that `askew deploy app` wrote."
        )
    tables, rules = read_toml(config_path), read_toml(folder / "pyproject.toml")
    if isinstance(tables.get("plugins"), list):
        tables["plugins"] = [str(config_path.parent / str(path)) for path in tables["plugins"]]
    for key in ("tool", "flwr", "app", "config"):
        rules = rules.get(key, {})
    return tables, data if data.is_file() else None, rules


def copy_plugins(paths: list[Path], package: Path) -> list[str]:
    """Copy plugins into an app's package and return their names there; one that is there already keeps its name."""
    names = [f"plugin_{n}_{path.name.removeprefix(f'plugin_{n}_')}" for n, path in enumerate(paths)]
    for path, name in zip(paths, names, strict=True):
        copy_file(path, package / name)
    return names


def copy_file(path: Path, target: Path) -> None:
    """Copy a file, unless it is the target itself."""
    if not path.is_file():
        raise ConfigError(f"there is no file {str(path)!r}; name a Python file.")
    if target.exists() and path.samefile(target):
        return
    with explain_write_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
