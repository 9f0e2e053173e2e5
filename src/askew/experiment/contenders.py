"""What `askew tune` tries: the methods, the values of their settings, and how runs of them are scored.

Values are declared where settings are: `setting(…, tries=…)`. A run is scored by the samples that clients hold out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from statistics import mean
from typing import Any, NamedTuple

from ..algorithms import algorithms
from ..core.records import Record
from ..core.settings import Settings
from ..data.federation import DEFAULT_VALIDATION, LocalSettings
from ..errors import AskewError, ConfigError, UnknownName, did_you_mean
from .config import Config
from .halving import Search
from .plugins import load_plugin, plugin_module
from .store import Run
from .sweep import MOST_RUNS, grid

# what is tried where nobody says it: one method of each idea that needs nothing special
METHODS = ("fedavg", "fedprox", "fedavgm", "fedadam", "scaffold", "feddyn", "fedcm", "feddpc")
NOTHING = Search(0)


class Candidate(NamedTuple):
    """One setting of a method: the configuration, and the values that were chosen for it."""

    config: Config
    setting: dict[str, Any]  # by dotted key


class Score(NamedTuple):
    """A run by the round that the held-out samples choose; compared as a tuple, more is better."""

    value: float  # accuracy on held-out samples; without classes the loss, negated
    tie: float  # the loss on them, negated
    round: int
    test: float | None  # accuracy, or loss, on the test set in that round


@dataclass
class Contender:
    """A method while it is tuned."""

    name: str
    candidates: list[Candidate]  # those that are left, the best one first once they are scored
    search: Search = NOTHING  # of all its settings
    trained: dict[str, Run] = field(default_factory=dict)  # by name: what was trained of it in the search
    seeds: dict[int, Run] = field(default_factory=dict)  # fresh seeds of its best setting
    last: str = "search"  # the stage that it reached
    reason: str = ""  # why it cannot run here

    @property
    def value(self) -> float:
        """The mean of its scores at fresh seeds; without any, its best one in the search."""
        if self.seeds:
            return mean(score_run(run).value for run in self.seeds.values())
        return max((score_run(run).value for run in self.trained.values()), default=-math.inf)

    def new_records(self) -> list[Record]:
        """The records of all rounds that were trained, each once though a longer run holds them too."""
        records = [record for run in self.seeds.values() for record in run.rounds]
        for run in self.trained.values():
            shorter = self.trained.get(str(run.facts.get("extends")))
            records += run.rounds[len(shorter.rounds) if shorter else 0 :]
        return records

    def spent(self, unit: str) -> float:
        """What its rounds cost so far, in rounds, seconds of training or bytes."""
        records = self.new_records()
        if unit == "rounds":
            return len(records)
        keys = ("seconds",) if unit == "seconds" else ("bytes_up", "bytes_down")
        return float(sum(record[key] for record in records for key in keys))


# what is tried --------------------------------------------------------------------------------------------------------


def choose_methods(tables: Mapping[str, Any], methods: Sequence[str]) -> list[str]:
    """The names of the methods to try: those given, all, or a short list with the configured one and plugins'."""
    for path in tables.get("plugins", ()):
        load_plugin(str(path))
    if list(methods) == ["all"]:
        return list(algorithms)
    for name in methods:
        if name not in algorithms:
            raise UnknownName(f"tune: unknown method {name!r}; {did_you_mean(name, algorithms.members)}")
    if methods:
        return list(dict.fromkeys(methods))
    table = tables.get("algorithm", {})
    named = algorithms.name_of(table) if isinstance(table, Settings) else table.get("name", METHODS[0])
    if named not in algorithms:
        raise ConfigError(
            f"tune: the method {named!r} has no name to be chosen by; put @askew.register above its class."
        )
    modules = {plugin_module(str(path)) for path in tables.get("plugins", ())}
    own = [name for name, kind in algorithms.members.items() if kind.__module__ in modules]
    return list(dict.fromkeys([*METHODS, named, *own]))


def setting_names(method: str) -> set[str]:
    """The names of a method's settings."""
    return {f.name for f in fields(algorithms[method])}


def method_tables(tables: Mapping[str, Any], method: str, methods: Sequence[str]) -> dict[str, Any]:
    """The tables with this method, and of the configured settings those that it has; nobody's settings stay."""
    given = tables.get("algorithm", {})
    if isinstance(given, Settings):
        same = algorithms.name_of(given) == method
        return {**tables, "algorithm": given if same else {"name": method}}
    own, others = setting_names(method), set[str]().union(*map(setting_names, methods))
    kept = {key: value for key, value in given.items() if key in own or key not in others}
    return {**tables, "algorithm": kept | {"name": method}}


def tried_values(base: Config, method: str, methods: Sequence[str], over: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The values that are tried, by dotted key: those that settings declare and the configured one, or those given."""
    values: dict[str, list[Any]] = {}
    for table, kind in (("local", LocalSettings), ("algorithm", algorithms[method])):
        for f in fields(kind):
            if f.metadata.get("tries"):
                configured = getattr(getattr(base, table), f.name)
                values[f"{table}.{f.name}"] = sorted({*f.metadata["tries"], configured})
    others = set[str]().union(*map(setting_names, methods)) - setting_names(method)
    for key, given in over.items():
        if not (key.startswith("algorithm.") and key.removeprefix("algorithm.") in others):
            values[key] = list(given) if isinstance(given, (list, tuple)) else given
    return values


def make_contender(
    tables: Mapping[str, Any], method: str, methods: Sequence[str], over: Mapping[str, Any]
) -> Contender:
    """A method with its settings; those that cannot be are left out, and if none can be, the reason is kept."""
    contender = Contender(method, [])
    own = method_tables(tables, method, methods)
    kind = algorithms[method]
    if kind.pooled:
        contender.reason = "it trains on all data in one place, and no client holds samples out there."
        return contender
    if "validation" in kind.needs:
        contender.reason = "it trains by the held-out samples, which choose the settings here."
        return contender
    try:
        base = grid(own, {})[0]
        values = tried_values(base, method, methods, over)
        if (count := math.prod(map(len, values.values()))) > MOST_RUNS:
            raise ConfigError(f"tune: {method} would have {count:,} settings; give fewer values.")
    except AskewError as e:
        contender.reason = str(e)
        return contender
    for chosen in product(*values.values()):
        setting = dict(zip(values, chosen, strict=True))
        try:
            (config,) = grid(own, {key: [value] for key, value in setting.items()})
        except AskewError as e:
            contender.reason = str(e)
            continue
        contender.candidates.append(Candidate(hold_out(config), setting))
    contender.reason = "" if contender.candidates else contender.reason
    return contender


def hold_out(config: Config) -> Config:
    """The configuration with samples held out and measured; a run that diverges is stopped."""
    share = config.partition.validation or DEFAULT_VALIDATION
    evaluation = replace(config.evaluation, validation=True, stop_diverged=True)
    return replace(config, partition=replace(config.partition, validation=share), evaluation=evaluation)


def use_all_samples(config: Config) -> Config:
    """The configuration of a run in which clients hold nothing out."""
    evaluation = replace(config.evaluation, validation=False, stop_diverged=False)
    return replace(config, partition=replace(config.partition, validation=None), evaluation=evaluation)


def check_over(over: Mapping[str, Any], methods: Sequence[str]) -> None:
    """Refuse values for the seed, whole methods or the number of rounds, and settings that no method has."""
    known, instead = set[str]().union(*map(setting_names, methods)), {"algorithm": "methods", "seed": "seeds"}
    for key, values in over.items():
        if key in ("seed", "rounds", "algorithm"):
            raise ConfigError(f"tune: {key} is not searched; give {instead.get(key, key)} instead.")
        name = key.removeprefix("algorithm.")
        if name != key and name not in known:
            raise ConfigError(f"tune: none of the methods has the setting {key}; {did_you_mean(name, sorted(known))}")
        if not isinstance(values, (list, tuple)) or not values:
            raise ConfigError(f"tune: {key} must be a list of one value or more, got {values!r}.")


# scores ---------------------------------------------------------------------------------------------------------------


def score_run(run: Run) -> Score:
    """A run in its best round by the samples held out; the first of equal ones."""
    best = Score(-math.inf, -math.inf, 0, None)
    for record in run.rounds:
        accuracy, loss = record.get("accuracy_validation"), record.get("loss_validation")
        if loss is None or not math.isfinite(loss):
            continue
        value = -loss if accuracy is None else accuracy
        if (value, -loss) > best[:2]:
            best = Score(value, -loss, record["round"], record["loss"] if accuracy is None else record["accuracy"])
    return best


def keep_best(candidates: Sequence[Candidate], scores: Sequence[Score | None], count: int) -> list[Candidate]:
    """The best candidates, the best first; those without a score are dropped, and equal ones stay in order."""
    scored = [(score[:2], candidate) for score, candidate in zip(scores, candidates, strict=True) if score]
    return [candidate for _, candidate in sorted(scored, key=lambda pair: pair[0], reverse=True)[:count]]
