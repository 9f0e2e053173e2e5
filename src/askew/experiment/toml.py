"""TOML: reading files with sentences for what is wrong in them, and writing the few shapes that a configuration has."""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..core.files import is_readable_file
from ..errors import ConfigError, StoreError

SHORT_NUMBER = re.compile(r"[+-]?(?:\d+\.|\.\d+)(?:[eE][+-]?\d+)?")  # .05 and 5., which TOML does not have
SEAL = re.compile(r"# checksum ([0-9a-f]{16}) .*\n")


def read_toml(path: str | Path, advice: str = "name a TOML file") -> dict[str, Any]:
    """A TOML file as nested dicts; errors name the wrong line, and end with `advice` where there is no such file."""
    path = Path(path)
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except tomllib.TOMLDecodeError as e:
        raise ConfigError(f"{path} is not valid TOML: {e}; correct that line and try again.") from None
    except RecursionError:
        raise ConfigError(f"{path} is not valid TOML: it is nested too deeply; correct it and try again.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not a text file in UTF-8; {advice}.") from None
    except FileNotFoundError:
        raise ConfigError(f"there is no file {str(path)!r}; {advice}.") from None
    except OSError as e:
        raise StoreError(
            f"cannot read {path}: {e.strerror}; check that it is a file and that you may read it."
        ) from None


def seal(text: str) -> str:
    """TOML text with a first line that holds a hash of the others."""
    return f"# checksum {text_hash(text)} of the lines below, as askew wrote them\n{text}"


def text_hash(text: str) -> str:
    """Sixteen letters that stand for a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def is_damaged(text: str) -> bool:
    """Is this a sealed text that is not as it was written? A text without a hash is taken as it is."""
    found = SEAL.match(text)
    return found is not None and text_hash(text[found.end() :]) != found[1]


def read_stored_toml(path: Path) -> dict[str, Any]:
    """The run.toml of a run folder, which must be as askew wrote it."""
    with suppress(OSError):  # of which `read_toml` says more
        if path.exists() and not is_readable_file(path):  # a pipe would be waited for
            raise StoreError(f"cannot read {path}: it is no regular file, or far too large; restore it.")
    tables = read_toml(path)
    if is_damaged(path.read_text(encoding="utf-8")):
        raise StoreError(
            f"{path} is not as askew wrote it: it was changed or is damaged; restore it, or remove the folder and run "
            "again; to run another configuration, change a copy of it elsewhere."
        )
    return tables


def parse_value(text: str) -> Any:
    """The value in `--set key=value`: TOML where it parses (3, 0.1, true, [1, 2], "a"), .05 as well; else a text."""
    if SHORT_NUMBER.fullmatch(text):
        return float(text)
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except (tomllib.TOMLDecodeError, RecursionError):
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
