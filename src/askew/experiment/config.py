"""Configurations: frozen settings, read from TOML and written back with every default filled in.

Unknown keys and wrong values are refused when a configuration is built.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

from ..algorithms import algorithms
from ..core.algorithm import Algorithm
from ..core.settings import Registry, Settings, checked_fields, is_askews, setting, with_defaults
from ..core.text import count_text
from ..data import partitions, sources
from ..data.dataset import Source
from ..data.federation import LocalSettings, validation_fraction
from ..data.partition import Natural, Partition
from ..engine.attacks import Attack
from ..engine.faults import Faults
from ..engine.privacy import Privacy
from ..engine.robust import Robust
from ..engine.settings import EngineSettings
from ..errors import ConfigError, StoreWarning, did_you_mean
from ..models import Network, networks
from ..participation import CohortParticipation, Participation, participations
from ..timeline import TimeSettings
from .file_hash import file_hash
from .plugins import PLUGIN_PREFIX, PLUGINS, check_kept_plugins, load_plugin, source_text
from .store import STOPS, find_plugins, read_json
from .toml import parse_value, read_stored_toml, read_toml, text_hash, to_toml

S = TypeVar("S", bound=Settings)

SMALLEST_RATE = 2.0**-126  # the smallest number that float32 holds with all its digits


class Evaluation(Settings):
    """What is measured, and when."""

    title = "evaluation"
    every: int = setting("rounds between evaluations; the last round is always evaluated", default=1, least=1)
    halves: bool = setting(
        "also measure the accuracy on two fixed halves of the test set, one to choose settings by, one to report",
        default=False,
    )
    spread: bool = setting(
        "also measure the accuracy on each client's own samples: mean, worst and best tenth, standard deviation",
        default=False,
    )
    per_class: bool = setting("also record the test accuracy on the samples of each class", default=False)
    drift: bool = setting(
        "also record how similar the participants' updates are to each other and to the global update", default=False
    )
    fit: bool = setting(
        "also measure, in the first 100 rounds, the participants' models on their own samples", default=False
    )
    weights: bool = setting(
        "also record how the participants' weights correlate with their labels and sizes, "
        "and the accuracy of their models on public data",
        default=False,
    )
    rare: bool = setting(
        "also measure the accuracy on the three classes that the fewest clients hold, and on the others", default=False
    )
    times: bool = setting(
        "also record the seconds that clients and server take in a round; the two no longer overlap", default=False
    )
    descent: bool = setting(
        "also measure for how many participants the server's step raised the loss on their own samples", default=False
    )
    validation: bool = setting(
        "also measure accuracy and loss on the samples that clients hold out, as partition.validation says",
        default=False,
    )
    stop_diverged: bool = setting(
        "stop a run once it has diverged, which is always said; false: it goes on", default=False
    )
    stop_at: float = setting(
        "stop a run once its test accuracy is at least this, between 0 and 1; 0: it goes on",
        default=0.0,
        least=0.0,
        most=1.0,
    )


# tables in which `name` chooses a member of a registry
CHOICES: dict[str, Registry[Any]] = {
    "data": sources,
    "partition": partitions,
    "participation": participations,
    "model": networks,
    "algorithm": algorithms,
}
# tables with fixed settings
TABLES: dict[str, type[Settings]] = {"local": LocalSettings, "evaluation": Evaluation, "engine": EngineSettings}
# tables that are stored only where a setting differs from its default: most runs have none of them
OPTIONAL_TABLES: dict[str, type[Settings]] = {
    "attack": Attack,
    "faults": Faults,
    "privacy": Privacy,
    "robust": Robust,
    "time": TimeSettings,
}
NEED_UPLOADS = {"drift", "fit", "weights"}  # settings of [evaluation] that need every client's upload
DEFAULT_NAMES = {
    "data": "digits",
    "partition": "dirichlet",
    "participation": "uniform",
    "model": "mlp",
    "algorithm": "fedavg",
}
# words that many programs have for settings, by what they are here
COMMON_WORDS = {
    "batch_size": "local.batch",
    "dataset": "data.name",
    "learning_rate": "local.lr",
    "local_epochs": "local.epochs",
    "method": "algorithm.name",
    "n_clients": "partition.clients",
    "name": "algorithm.name",
    "network": "model.name",
    "num_clients": "partition.clients",
    "num_rounds": "rounds",
    "random_state": "seed",
}


class TopLevel(Settings):
    """The settings outside any table."""

    title = "configuration"
    seed: int = setting("seed of every random draw", default=0, least=0)
    rounds: int = setting("communication rounds", default=30, least=1)
    plugins: tuple[str, ...] = setting("Python files that register methods of your own", default=())


@dataclass(frozen=True)
class Config:
    """All settings of one run: the same configuration gives the same folder and the same numbers.

    Its fields are the keys and tables of a TOML file, which the page *Configuration* explains.
    """

    simulated: ClassVar[bool] = True  # on this machine, and not on real clients
    seed: int = 0
    rounds: int = 30
    data: Source = field(default_factory=lambda: sources[DEFAULT_NAMES["data"]]())
    partition: Partition = field(default_factory=lambda: partitions[DEFAULT_NAMES["partition"]]())
    participation: Participation = field(default_factory=lambda: participations[DEFAULT_NAMES["participation"]]())
    model: Network = field(default_factory=lambda: networks[DEFAULT_NAMES["model"]]())
    algorithm: Algorithm = field(default_factory=lambda: algorithms[DEFAULT_NAMES["algorithm"]]())
    local: LocalSettings = field(default_factory=LocalSettings)
    evaluation: Evaluation = field(default_factory=Evaluation)
    engine: EngineSettings = field(default_factory=EngineSettings)
    attack: Attack = field(default_factory=Attack)
    faults: Faults = field(default_factory=Faults)
    privacy: Privacy = field(default_factory=Privacy)
    robust: Robust = field(default_factory=Robust)
    time: TimeSettings = field(default_factory=TimeSettings)
    plugins: tuple[str, ...] = ()

    @classmethod
    def build(cls, tables: Mapping[str, Any]) -> Config:
        """A configuration from nested tables, as a TOML file holds them; the plugins that it names are loaded."""
        check_keys(tables)
        top = TopLevel.build({k: v for k, v in tables.items() if k in checked_fields(TopLevel)})
        for path in top.plugins:
            load_plugin(path)
        parts: dict[str, Any] = {}
        for name, kind in (TABLES | OPTIONAL_TABLES).items():
            table = tables.get(name, {})
            parts[name] = build_table(kind, name, table, tables) if table else with_defaults(kind)
        for name, registry in CHOICES.items():
            default = default_name(name, parts.get("data"), tables)
            parts[name] = build_choice(registry, name, tables.get(name, {}), default, tables)
            if name == "partition" and isinstance(parts[name], Natural):
                parts[name] = one_client_an_owner(parts[name], parts["data"], tables.get(name, {}))
        config = cls(seed=top.seed, rounds=top.rounds, plugins=top.plugins, **parts)
        config.participation.check_clients(config.partition.clients)
        config.algorithm.check_learning_rate(config.local.lr)
        config.attack.check_method(config.algorithm)
        config.robust.check_method(config.algorithm)
        config.check_privacy()
        config.check_validation()
        config.check_time()
        check_division_by_rate(config)
        return config

    def check_privacy(self) -> None:
        """Refuse protection that other settings undo, or that this kind of run does not have."""
        self.privacy.check_participation(self.participation)
        hidden = self.privacy.secure or self.privacy.noise
        if hidden and (names := [name for name in sorted(NEED_UPLOADS) if getattr(self.evaluation, name)]):
            raise ConfigError(
                f"evaluation.{names[0]} measures the clients' uploads one by one, which privacy hides; "
                "leave one of them out."
            )
        if self.robust.on and (self.privacy.secure or self.privacy.central):
            raise ConfigError(
                "robust: a rule must see the clients' uploads one by one, which privacy.secure and the server's noise "
                "hide; leave one of them out."
            )
        if self.privacy.secure and self.simulated:
            raise ConfigError(
                "privacy: secure aggregation hides messages between machines, of which a simulation has none; "
                "leave out privacy.secure, or use askew deploy."
            )

    def check_validation(self) -> None:
        """Refuse to measure on samples that nobody holds out."""
        held_out = validation_fraction(self.partition, self.algorithm.needs)
        if self.evaluation.validation and (not held_out or self.algorithm.pooled):
            why = "this method has no clients" if self.algorithm.pooled else "no client holds samples out"
            advice = "leave it out" if self.algorithm.pooled else "set partition.validation = 0.2"
            raise ConfigError(f"evaluation.validation measures on held-out samples, and {why}; {advice}.")

    def check_time(self) -> None:
        """Refuse a virtual clock that does not fit the other settings."""
        if not self.time.on:
            return
        if self.algorithm.pooled:
            raise ConfigError(
                f"time: {self.algorithm.display_name()} trains on all data at one place, so that no client is waited "
                "for; leave out [time], or use another method."
            )
        if self.time.wait == "first" and self.time.spare and not isinstance(self.participation, CohortParticipation):
            raise ConfigError(
                "time: spare clients are asked beyond a cohort of fixed size, which participation "
                f"{self.participation.display_name()} does not have; "
                'set participation.name = "uniform", or leave out time.spare.'
            )
        self.time.check_clients(self.partition.clients)
        if self.time.overlapping:
            self.check_overlapping()

    def check_overlapping(self) -> None:
        """Refuse answers that start from an older model where they cannot be right."""
        alg, time = self.algorithm, self.time
        how, advice = ('wait = "buffer"' if time.wait == "buffer" else 'late = "next"'), 'set time.wait = "all"'
        if len(alg.phases()) > 1:
            raise ConfigError(
                f"time: {alg.display_name()} has {len(alg.phases())} exchanges in a round, and with {how} answers of "
                f"several rounds would mix; {advice}, or use another method."
            )
        if alg.stale:
            raise ConfigError(
                f"time: with {how} answers may start from an older model, which is wrong for {alg.display_name()}: "
                f"{alg.stale}; {advice}, or use another method."
            )
        if "public" in alg.needs or self.evaluation.fit or self.evaluation.weights:
            what = alg.display_name() if "public" in alg.needs else "evaluation.fit and evaluation.weights"
            verb = "evaluates" if "public" in alg.needs else "evaluate"
            raise ConfigError(
                f"time: {what} {verb} the clients' models at the server, which with {how} does not keep the models "
                f"that they started from; {advice}, or leave that out."
            )
        if self.privacy.central or self.privacy.secret_sampling:
            raise ConfigError(
                f"time: with {how} the server's noise and secret_sampling have no account, as a round's answers are "
                f'not one draw of clients; {advice}, or privacy.where = "client" without secret_sampling.'
            )
        if time.wait == "buffer":
            self.check_at_work()

    def check_at_work(self) -> None:
        """Refuse a number of clients at work that the other settings do not allow."""
        rule, time, clients = self.participation, self.time, self.partition.clients
        if not isinstance(rule, CohortParticipation):
            raise ConfigError(
                f'time: wait = "buffer" keeps a fixed number of clients at work, and participation '
                f'{rule.display_name()} has no cohort of fixed size; set participation.name = "uniform".'
            )
        at_work = time.at_work or rule.size(clients)
        if at_work > clients:
            raise ConfigError(
                f"time: at_work must be at most the number of clients, {clients}, got {at_work}; lower time.at_work."
            )
        if time.buffer > at_work:
            raise ConfigError(
                f"time: a buffer of {time.buffer} answers never fills with {count_text(at_work, 'client')} at work "
                "(the cohort of participation); lower time.buffer, or set time.at_work."
            )

    def tables(self) -> dict[str, Any]:
        """The whole configuration as plain nested tables."""
        tables: dict[str, Any] = {"seed": self.seed, "rounds": self.rounds}
        if self.plugins:
            tables["plugins"] = list(self.plugins)
        for name, registry in CHOICES.items():
            part = getattr(self, name)
            chosen = part.name if isinstance(part, FromPython) else registry.name_of(part)
            tables[name] = {"name": chosen, **part.table()}
        optional = [name for name, kind in OPTIONAL_TABLES.items() if getattr(self, name) != with_defaults(kind)]
        return tables | {name: getattr(self, name).table() for name in (*TABLES, *optional)}

    def toml(self) -> str:
        """The whole configuration as TOML text."""
        return to_toml(self.tables())

    def digest(self) -> str:
        """Eight letters for the configuration, the files it reads and the code of what is not askew's own."""
        tables = {k: v for k, v in self.tables().items() if k != "plugins"}
        # Settings at their default are left out, so that a setting which is new in askew changes no name.
        for name in [name for name in (*CHOICES, *TABLES, *OPTIONAL_TABLES) if name in tables]:
            part = getattr(self, name)
            defaults = {f.name: f.default for f in fields(part) if f.name not in part.digested}
            tables[name] = {k: v for k, v in tables[name].items() if k not in defaults or v != defaults[k]}
        tables["engine"].pop("workers", None)  # a run may go on with another number of processes
        tables["model"].pop("structure", None)  # of a user's network, whose fingerprint holds it too
        for name in STOPS:  # and after it was stopped
            tables["evaluation"].pop(name, None)
        tables |= {f"content of {name}": hashes for name, hashes in self.file_hashes().items()}
        tables |= {f"source of {name}": text for name, text in self.source_texts.items()}
        return hashlib.sha256(json.dumps(tables, sort_keys=True).encode()).hexdigest()[:8]

    def file_hashes(self) -> dict[str, list[str]]:
        """Hashes of the files that each choice reads."""
        names = [*CHOICES, *(["time"] if self.time.reads() else [])]
        return {name: [file_hash(path) for path in getattr(self, name).reads()] for name in names}

    @cached_property
    def source_texts(self) -> dict[str, str]:
        """The code of each choice that is not askew's own, as it was when this was asked first: what code changes while
        it trains, as a list of the module's that it fills, does not make it another run.
        """
        classes = {name: type(getattr(self, name)) for name in CHOICES}
        return {name: source_text(cls) for name, cls in classes.items() if not is_askews(cls)}

    def origins(self) -> dict[str, str]:
        """Short hashes of the files that choices read and of their code, by what they are: of runs with the same
        settings, those with other hashes are not the same.
        """
        data = {f"content of {name}": "".join(hashes) for name, hashes in self.file_hashes().items() if hashes}
        return {name: text_hash(text)[:8] for name, text in (data | self.source_texts).items()}

    def name(self) -> str:
        """The run folder's name."""
        tables = self.tables()
        return f"{tables['algorithm']['name']}-{tables['data']['name']}-seed{self.seed}-{self.digest()}"


def default_name(name: str, data: Source | None, tables: Mapping[str, Any]) -> str:
    """The member of a registry that a table means which names none; the data may decide it."""
    named = isinstance(table := tables.get(name, {}), Settings) or "name" in table
    if data is None or named:
        return DEFAULT_NAMES[name]
    if name == "partition" and (data.natural or data.owners):
        return "natural"
    if name == "partition" and data.regression:
        return "iid"
    return (data.default_network if name == "model" else "") or DEFAULT_NAMES[name]


def one_client_an_owner(partition: Natural, data: Source, table: Any) -> Natural:
    """The natural partition with as many clients as the data have owners; another number is refused."""
    owners = data.owners
    if not owners or partition.clients == owners:
        return partition
    usual = next(f.default for f in fields(partition) if f.name == "clients")
    if partition.clients != usual if isinstance(table, Settings) else "clients" in table:
        raise ConfigError(
            f"the data come divided among {owners:,} clients, and partition.clients is {partition.clients:,}; leave it "
            'out, or set another partition, such as partition.name = "iid".'
        )
    return replace(partition, clients=owners)


def check_keys(tables: Mapping[str, Any]) -> None:
    """Refuse keys that no configuration has, and single values where a table of settings belongs."""
    fixed = TABLES | OPTIONAL_TABLES
    known = [*checked_fields(TopLevel), *CHOICES, *fixed]
    for key, value in tables.items():
        if key not in known:
            place = "" if get_close_matches(key, known, n=1, cutoff=0.75) else place_of(key, tables)
            hint = f"write {place}; at the top there are: {', '.join(sorted(known))}." if place else ""
            raise ConfigError(f"unknown setting {key!r}; {hint or did_you_mean(key, known)}")
        if (key in CHOICES or key in fixed) and not isinstance(value, (Mapping, Settings)):
            first = "name" if key in CHOICES else next(iter(fixed[key]().table()))
            got = repr(value)[:100]
            example = f"{key}.{first} = {got}" if key in CHOICES else f"{key}.{first} = …"
            raise ConfigError(f"{key} is a table of settings, got {got}; write {example}, or [{key}] in a file.")


def place_of(key: str, tables: Mapping[str, Any]) -> str:
    """The dotted key of the setting that somebody means by a name, or several; empty where there is none like it."""
    if key in COMMON_WORDS:
        return COMMON_WORDS[key]
    kinds: dict[str, Any] = dict(TABLES)
    for name, registry in CHOICES.items():
        table = tables.get(name, {})
        chosen = table.get("name", DEFAULT_NAMES[name]) if isinstance(table, Mapping) else ""
        member = registry.members.get(chosen) if isinstance(chosen, str) else None
        kinds[name] = type(table) if isinstance(table, Settings) else member
    places: dict[str, list[str]] = {}
    for name, kind in kinds.items():
        for each in fields(kind) if kind is not None else ():
            places.setdefault(each.name, []).append(f"{name}.{each.name}")
    near = [key] if key in places else get_close_matches(key, places, n=1, cutoff=0.75)
    return " or ".join(places[near[0]]) if near else ""


def build_table(kind: type[S], name: str, table: Any, tables: Mapping[str, Any]) -> S:
    """The settings of one table; where a key is unknown there and known in another table, the sentence says which."""
    if isinstance(table, Settings):
        return cast(S, table)
    known = checked_fields(kind)
    for key in table:
        if (
            key not in known
            and not get_close_matches(key, known, n=1, cutoff=0.75)
            and (place := place_of(key, tables))
        ):
            there = f"another {name} has it" if place == f"{name}.{key}" else f"there is {place}"
            raise ConfigError(
                f"{kind.display_name()}: unknown setting {name}.{key} ({there}); {did_you_mean(key, known)}"
            )
    return kind.build(table, name)


def check_division_by_rate(config: Config) -> None:
    """Refuse a learning rate by which the method must divide and cannot: no displacement would give a gradient."""
    local, which = config.local, config.algorithm.divides_by_rate()
    t = config.rounds if which == "current" else 1
    rate = local.rate(t, config.rounds)  # rates never grow from round to round
    if which and rate < SMALLEST_RATE:
        raise ConfigError(
            f"{config.algorithm.display_name()} divides by the learning rate, which is {rate:g} in round {t} and must "
            f"be ≥ {SMALLEST_RATE:.2g}; set a larger local.lr, a local.decay nearer to 1, or fewer rounds."
        )


def stored_tables(config: Config) -> dict[str, Any]:
    """The tables of a configuration as they are read back from a stored run.toml."""
    return tomllib.loads(config.toml())


class FromPython:
    """Marks settings that stand for an object handed in from Python; `name` is their name in run.toml."""

    name = "own"


def of_loaded_class(registry: Registry[Any], name: str, settings: Settings) -> Settings:
    """Settings, by the class that takes the place of theirs if their plugin was edited and loaded again."""
    cls = type(settings)
    if cls.__module__.startswith(PLUGIN_PREFIX) and cls not in registry.members.values():
        for new in registry.members.values():
            if (new.__module__, new.__qualname__) == (cls.__module__, cls.__qualname__):
                return cast(Settings, new.build(settings.table(), name))
    return settings


def build_choice(registry: Registry[Any], name: str, table: Any, default: str, tables: Mapping[str, Any]) -> Any:
    """The member of a registry that a table names, built from the table's other keys."""
    if isinstance(table, Settings):
        return of_loaded_class(registry, name, table)
    key = table.get("name", default)
    if not isinstance(key, str):
        raise ConfigError(f"{name}.name must be a text in quotes, got {key!r}; known: {', '.join(sorted(registry))}.")
    if key == FromPython.name and key not in registry:
        raise ConfigError(
            f"{name}.name is {key!r}: it was handed in from Python and is not stored; call askew.run with it again."
        )
    return build_table(registry[key], name, {k: v for k, v in table.items() if k != "name"}, tables)


def load_config(path: str | Path | None = None, overrides: Iterable[str] = (), plugins: Iterable[str] = ()) -> Config:
    """A configuration from a file, with `key=value` overrides on top."""
    overrides, plugins = list(overrides), list(plugins)
    tables = load_tables(path, overrides, plugins)
    if "sweep" in tables:
        raise ConfigError(
            "this file has a [sweep] table, which spans several runs; use askew sweep with it, or remove the table."
        )
    config = Config.build(tables)
    if path and is_stored(path) and not [*overrides, *plugins] and imports_edited_files(Path(path).parent, config):
        warnings.warn(
            f"a file that the plugins of {Path(path).parent} import has changed since this run was begun, so "
            f"{config.name()} is another run, which begins with round 1; to go on with the first, restore the file.",
            StoreWarning,
            stacklevel=2,
        )
    return config


def is_stored(path: str | Path) -> bool:
    """Is this the run.toml of a run folder? It is given to go on with that run, and must be its configuration."""
    return Path(path).name == "run.toml" and Path(path).with_name("rounds.jsonl").exists()


def imports_edited_files(folder: Path, config: Config) -> bool:
    """Was a file that a run folder's plugins import edited since the run was begun?"""
    before, now = read_json(folder / "run.json").get("origins", {}), config.origins()
    return any(before.get(name, now[name]) != now[name] for name in config.source_texts)


def load_tables(
    path: str | Path | None,
    overrides: Iterable[str],
    plugins: Iterable[str],
    advice: str = "name a TOML file, or leave it out to run the defaults",
) -> dict[str, Any]:
    """A file's nested tables with overrides and plugins put in; `advice` is for a file that cannot be read."""
    tables: dict[str, Any] = {}
    if path is not None:
        stored = is_stored(path)
        tables = (
            without_defaults(read_stored_toml(Path(path))) if stored else read_toml(path, method_advice(path) or advice)
        )
        tables |= find_plugins(tables, Path(path).parent)
        if stored:
            check_kept_plugins(Path(path).parent)
    for override in overrides:
        key, found, text = override.partition("=")
        if not found or not key.strip():
            raise ConfigError(f"--set takes key=value, got {override!r}; for example --set local.lr=0.05.")
        set_key(tables, key.strip(), parse_value(text.strip()), "--set ")
    in_file = tables.get("plugins", [])
    if plugins and isinstance(in_file, list):
        given = {Path(path).name for path in plugins}  # which stand for those of the same name that a run kept
        kept = [path for path in in_file if Path(path).parent.name != PLUGINS or Path(path).name not in given]
        tables["plugins"] = [*kept, *(p for p in plugins if p not in kept)]
    return tables


def without_defaults(tables: Mapping[str, Any]) -> dict[str, Any]:
    """The tables of a stored run without settings at the defaults of what they choose, but for the number of clients.

    A stored run.toml has every default filled in. If an override then chooses another method, its own defaults hold,
    and not those of the old one.
    """
    kept = dict(tables)
    for name, registry in CHOICES.items():
        table = tables.get(name)
        kind = registry.members.get(str(table.get("name"))) if isinstance(table, Mapping) else None
        if isinstance(table, Mapping) and kind is not None:
            defaults = tomllib.loads(to_toml({f.name: f.default for f in fields(kind)}))
            kept[name] = {k: v for k, v in table.items() if k == "clients" or k not in defaults or v != defaults[k]}
    return kept


def method_advice(path: str | Path) -> str:
    """What to type instead, where the name of a method stands in place of a file; else empty."""
    near = [] if Path(path).suffix else get_close_matches(str(path).lower(), algorithms.members, n=1, cutoff=0.8)
    return f"to train by the method {near[0]}, type askew run --method {near[0]}" if near else ""


def set_key(tables: dict[str, Any], key: str, value: Any, where: str) -> None:
    """Set one value under a dotted key of nested tables; `where` begins the sentence if that cannot be."""
    first, dot, second = key.partition(".")
    if not dot:
        tables[first] = value
        return
    inner = tables.setdefault(first, {})
    if isinstance(inner, Settings):  # as a Config has them, or a user's own
        tables[first] = (
            {"name": value} if second == "name" else type(inner).build({**inner.table(), second: value}, first)
        )
        return
    if not isinstance(inner, dict):
        raise ConfigError(f"{where}{key}: {first!r} is a single value, not a table; write {where}{first}=VALUE.")
    inner[second] = value
