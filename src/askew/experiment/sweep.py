"""Sweeps: all combinations of some values of some settings."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .config import Config, put_into, tables_of
from .toml import value_of

MOST = 100_000


def load_sweep(
    path: str | Path | None = None, overrides: Iterable[str] = (), over: Iterable[str] = (), plugins: Iterable[str] = ()
) -> list[Config]:
    """The configurations that a file's [sweep] table and `--over key=a,b,c` span, each once."""
    tables = tables_of(path, overrides, plugins)
    spans = tables.pop("sweep", {})
    if not isinstance(spans, Mapping):
        raise ConfigError(
            f'sweep is a table of lists, got {spans!r}; write for example [sweep] and "local.lr" = [0.1, 0.01] below it.'
        )
    return grid(tables, flat(spans) | dict(spanned(text) for text in over))


def flat(spans: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys, whether they were written with quotes, with dots or as tables."""
    keys: dict[str, Any] = {}
    for key, value in spans.items():
        keys |= {f"{key}.{inner}": v for inner, v in value.items()} if isinstance(value, Mapping) else {key: value}
    return keys


def spanned(text: str) -> tuple[str, list[Any]]:
    """One `--over key=a,b,c`."""
    key, found, values = text.partition("=")
    if not found or not key.strip() or not values.strip():
        raise ConfigError(f"--over takes key=value,value,…, got {text!r}; for example --over local.lr=0.1,0.01.")
    whole = value_of(f"[{values}]")
    return key.strip(), whole if isinstance(whole, list) else [value_of(v.strip()) for v in values.split(",")]


def grid(tables: Mapping[str, Any], spans: Mapping[str, Any]) -> list[Config]:
    """Every combination; the first key changes slowest. A key may be a whole table: `algorithm = [{name = …}, {name = …}]`."""
    for key, values in spans.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(
                f"sweep: {key} must be a list of one value or more, got {values!r}; write {key} = [0.1, 0.01]."
            )
    count = 1
    for values in spans.values():
        count *= len(values)
    if count > MOST:
        raise ConfigError(f"this sweep has {count:,} runs, at most {MOST:,} are allowed; give fewer values.")
    configs: dict[str, Config] = {}
    for values in product(*spans.values()):
        one = copy.deepcopy(dict(tables))
        for key, value in zip(spans, values, strict=True):
            put_into(one, key, value, "sweep: ")
        config = Config.build(one)
        configs.setdefault(config.name(), config)
    return list(configs.values())
