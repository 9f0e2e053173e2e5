"""TOML: reading files with sentences for what is wrong in them, and writing the few shapes that a configuration has."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError, StoreError


def read_toml(path: str | Path, advice: str = "name a TOML file") -> dict[str, Any]:
    """A TOML file as nested dicts; errors name the wrong line, and end with `advice` where there is no such file."""
    path = Path(path)
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except tomllib.TOMLDecodeError as e:
        raise ConfigError(f"{path} is not valid TOML: {e}; correct that line and try again.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not a text file in UTF-8; {advice}.") from None
    except FileNotFoundError:
        raise ConfigError(f"there is no file {str(path)!r}; {advice}.") from None
    except OSError as e:
        raise StoreError(
            f"cannot read {path}: {e.strerror}; check that it is a file and that you may read it."
        ) from None


def parse_value(text: str) -> Any:
    """The value in `--set key=value`: TOML where it parses (3, 0.1, true, [1, 2], "a"), a plain text otherwise."""
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text


def to_toml(table: Mapping[str, Any]) -> str:
    """Top-level values first, then one [table] each; values that are None are left out, as TOML has no null."""
    lines = [f"{k} = {literal(v)}" for k, v in table.items() if not isinstance(v, Mapping) and v is not None]
    for name, inner in table.items():
        if isinstance(inner, Mapping):
            lines += ["", f"[{name}]", *(f"{k} = {literal(v)}" for k, v in inner.items() if v is not None)]
    return "\n".join(lines) + "\n"


def literal(value: Any) -> str:
    """A value as TOML text."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(literal(v) for v in value) + "]"
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return f"{value:.1f}"
    return repr(value)
