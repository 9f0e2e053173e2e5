"""Sweeps: the configurations of all combinations of some settings' values."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .config import Config, load_tables, set_key
from .toml import parse_value

MOST_RUNS = 100_000  # of one sweep


def load_sweep(
    path: str | Path | None = None, overrides: Iterable[str] = (), over: Iterable[str] = (), plugins: Iterable[str] = ()
) -> list[Config]:
    """The configurations that a file's [sweep] table and `--over key=a,b,c` span, each once."""
    tables, spans = read_sweep(path, overrides, plugins)
    return grid(tables, spans | dict(parse_span(text) for text in over))


def read_sweep(
    path: str | Path | None, overrides: Iterable[str] = (), plugins: Iterable[str] = ()
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A file's nested tables, and the lists of its [sweep] table by dotted keys."""
    tables = load_tables(path, overrides, plugins)
    spans = tables.pop("sweep", {})
    if not isinstance(spans, Mapping):
        raise ConfigError(
            f"sweep is a table of lists, got {spans!r}; "
            'write for example [sweep] and "local.lr" = [0.1, 0.01] below it.'
        )
    return tables, flatten_spans(spans)


def flatten_spans(spans: Mapping[str, Any]) -> dict[str, Any]:
    """The lists of a [sweep] table by dotted keys, whether these were written with quotes, with dots or as tables."""
    keys: dict[str, Any] = {}
    for key, value in spans.items():
        keys |= {f"{key}.{inner}": v for inner, v in value.items()} if isinstance(value, Mapping) else {key: value}
    return keys


def parse_span(text: str) -> tuple[str, list[Any]]:
    """The key and the values of one `--over key=a,b,c`."""
    key, found, values = text.partition("=")
    if not found or not key.strip() or not values.strip():
        raise ConfigError(f"--over takes key=value,value,…, got {text!r}; for example --over local.lr=0.1,0.01.")
    parsed = parse_value(f"[{values}]")
    return key.strip(), parsed if isinstance(parsed, list) else [parse_value(v.strip()) for v in values.split(",")]


def grid(tables: Mapping[str, Any], spans: Mapping[str, Any]) -> list[Config]:
    """The configurations of every combination, each once; the first key changes slowest.

    A key may be a whole table: `algorithm = [{name = …}, {name = …}]`.
    """
    for key, values in spans.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(
                f"sweep: {key} must be a list of one value or more, got {values!r}; write {key} = [0.1, 0.01]."
            )
    count = math.prod(len(values) for values in spans.values())
    if count > MOST_RUNS:
        raise ConfigError(f"this sweep has {count:,} runs, at most {MOST_RUNS:,} are allowed; give fewer values.")
    configs: dict[str, Config] = {}
    for values in product(*spans.values()):
        combination = copy.deepcopy(dict(tables))
        for key, value in zip(spans, values, strict=True):
            set_key(combination, key, value, "sweep: ")
        config = Config.build(combination)
        configs.setdefault(config.name(), config)
    return list(configs.values())
