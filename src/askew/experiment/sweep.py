"""Sweeps: the configurations of all combinations of some settings' values."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import Any

from ..errors import ConfigError, Remark
from ..timeline.settings import unused_settings
from .config import CHOICES, Config, load_tables, set_key
from .plugins import load_plugin
from .toml import parse_value

MOST_RUNS = 100_000  # of one sweep


def load_sweep(
    path: str | Path | None = None, overrides: Iterable[str] = (), over: Iterable[str] = (), plugins: Iterable[str] = ()
) -> list[Config]:
    """The configurations that a file's [sweep] table and `--over key=a,b,c` span, each once."""
    overrides = list(overrides)
    tables, spans = read_sweep(path, overrides, plugins)
    spans |= parse_spans(over)
    refuse_swept(overrides, spans)
    return grid(tables, spans)


def refuse_swept(overrides: Iterable[str], spans: Mapping[str, Any]) -> None:
    """Refuse a setting that an override gives one value and the sweep others: the one would be lost."""
    for override in overrides:
        key, _, text = (part.strip() for part in override.partition("="))
        value = parse_value(text)
        given = {f"{key}.{name}": v for name, v in value.items()} if isinstance(value, dict) else {key: value}
        for setting, single in given.items():
            if setting in spans or setting.partition(".")[0] in spans:
                raise ConfigError(
                    f"sweep: {setting} is given the single value {single} and is swept as well; give it once."
                )


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


def parse_spans(texts: Iterable[str]) -> dict[str, list[Any]]:
    """The values of several `--over`, by their keys."""
    spans: dict[str, list[Any]] = {}
    for key, values in map(parse_span, texts):
        if key in spans:
            raise ConfigError(f"--over has {key} twice; give all its values at once, as in --over {key}=A,B.")
        spans[key] = values
    return spans


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
    for path in tables.get("plugins", ()):
        load_plugin(str(path))
    configs: dict[str, Config] = {}
    left_out: dict[tuple[str, str], None] = {}
    for values in product(*spans.values()):
        combination = copy.deepcopy(dict(tables))
        for key, value in zip(spans, values, strict=True):
            set_key(combination, key, value, "sweep: ")
        left_out |= dict.fromkeys(leave_out_settings(combination, spans))
        config = Config.build(combination)
        configs.setdefault(config.name(), config)
    for key in dict.fromkeys(key for key, _ in left_out):
        without = [name for other, name in left_out if other == key]
        text = f"{key} is tried only where it exists: {join_words(without)} {'has' if len(without) == 1 else 'have'} no"
        warnings.warn(f"{text} such setting and {'is' if len(without) == 1 else 'are'} run without it.", Remark, 2)
    return list(configs.values())


def leave_out_settings(combination: Mapping[str, Any], spans: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Leave out settings that others of a sweep's members have and the chosen one has not; yields them with its name.

    With `algorithm.name` = fedavg, fedprox the setting `algorithm.mu` is fedprox's alone; so are settings of the clock
    that one `time.wait` alone uses.
    """
    for table, registry in CHOICES.items():
        names, settings = spans.get(f"{table}.name"), combination.get(table)
        if not names or not isinstance(settings, dict):
            continue
        known = {name: {f.name for f in fields(registry.members[name])} for name in names if name in registry}
        chosen = settings.get("name")
        for key in [key for key in settings if key != "name" and chosen in known and key not in known[chosen]]:
            if any(key in its for its in known.values()):
                del settings[key]
                yield f"{table}.{key}", str(chosen)
    clock = combination.get("time")
    if "time.wait" in spans and isinstance(clock, dict):
        for key in unused_settings(clock):
            del clock[key]
            yield f"time.{key}", f"time.wait = {clock['wait']}"


def join_words(words: Sequence[str]) -> str:
    """Words as in a sentence: "fedavg, fedcm and scaffold"."""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))
