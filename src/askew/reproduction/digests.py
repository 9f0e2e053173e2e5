"""The digests of configurations, by which results are stored and found."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import cache

from ..core.settings import with_defaults
from ..experiment.config import Config
from ..experiment.store import STOPS
from .papers import Tables


@cache
def result_digest(config: Config) -> str:
    """Ten letters that identify what a run computes, for results/*.csv.

    Settings at their defaults are left out, so that a setting added later changes no digest. So is where and in which
    precision the run is computed, which stands beside each result.
    """
    return settings_digest(changed_settings(config))


def seed_digests(config: Config, seeds: Iterable[int]) -> dict[int, str]:
    """The digests of a configuration with these seeds in place of its own, by seed."""
    page = changed_settings(config)
    return {seed: settings_digest(page | {"seed": seed}) for seed in seeds}


def settings_digest(page: Tables) -> str:
    """The digest of what `changed_settings` returns."""
    return hashlib.sha256(json.dumps(page, sort_keys=True).encode()).hexdigest()[:10]


def changed_settings(config: Config) -> Tables:
    """A configuration without its defaults and without its engine; `Config.build` makes a configuration of it."""
    page: Tables = {"seed": config.seed, "rounds": config.rounds}
    for name, table in config.tables().items():
        if not isinstance(table, Mapping) or name == "engine":
            continue
        usual = with_defaults(type(getattr(config, name))).table()
        page[name] = {k: v for k, v in table.items() if k == "name" or v != usual[k]}
    page["evaluation"] = {k: v for k, v in page["evaluation"].items() if k not in STOPS}
    return page
