"""Who holds what in a deployment: a client knows its own samples, the server how many each client has.

Data come from one of two places. Without a data module every node divides the configuration's dataset as the simulator does and
takes the part of its number (`partition-id`): so a deployment can be compared with a simulation. With a data module a client's
samples are what its function `client(node)` returns for the node's configuration, and never leave the node.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

from ..core.settings import setting
from ..data.arrays import UserData, make_dataset, to_samples
from ..data.dataset import Dataset, Samples, Source, concatenate
from ..data.federation import SHOWN, Federation
from ..data.partition import Natural
from ..errors import ConfigError, DataError
from ..experiment.api import fingerprint, source_text
from ..experiment.build import BuildCache, BuiltRun, build, device_of
from ..experiment.config import Config, FromPython
from ..experiment.toml import read_toml
from .privacy import Privacy

Node = Mapping[str, bool | int | float | str]  # a node's configuration, as --node-config gives it
Held = (
    Dataset | tuple[UserData, UserData | None, UserData | None]
)  # training, validation and test data; or a ready Dataset
SAMPLES = {"spread", "fit", "weights", "rare", "descent"}  # measurements that need the clients' samples,
UPLOADS = {"drift", "fit", "weights"}  # and those that need each client's upload
Kept = tuple[Samples | None, Samples | None]  # the server's public and test data


class DataModule(NamedTuple):
    """A user's data: what a client holds, and what the server does, if anything."""

    client: Callable[[Node], Held]
    server: Callable[[], tuple[UserData | None, UserData | None]] | None = None

    @classmethod
    def of(cls, module: ModuleType) -> DataModule:
        """The functions of a module."""
        client, server = (vars(module).get(name) for name in cls._fields)
        if not callable(client):
            raise DataError(
                f"the data module {module.__file__} must define client(node), which returns (train, validation, test); add it."
            )
        return cls(client, server)

    def mark(self) -> str:
        """Stands for the module's text."""
        return fingerprint(about=source_text(inspect.getmodule(self.client) or self.client))


class NodeData(FromPython, Source):
    """Data that lie with the clients of a deployment."""

    module: str = setting("hash of the data module", default="")


@dataclass(frozen=True)
class DeploymentConfig(Config):
    """A configuration that is played on real clients; its folder and its checkpoint are none of a simulation's."""

    privacy: Privacy = field(default_factory=Privacy)

    def tables(self) -> dict[str, Any]:
        return super().tables() | ({} if self.privacy == Privacy() else {"privacy": self.privacy.table()})

    def digest(self) -> str:
        return f"{super().digest()}-flower"


def read_page(page: Path, data: DataModule | None = None) -> DeploymentConfig:
    """The run of an app: its page of TOML, plugins beside it, with the data module's data if there is one."""
    tables = read_toml(page)
    if isinstance(tables.get("plugins"), list):
        tables["plugins"] = [str(page.parent / str(path)) for path in tables["plugins"]]
    if data is not None:
        table = tables.get("partition", {})
        kept = {k: v for k, v in table.items() if k in ("clients", "validation")} if isinstance(table, dict) else {}
        tables |= {"data": NodeData(module=data.mark()), "partition": {"name": "natural", **kept}}
    privacy = tables.pop("privacy", {})
    if not isinstance(privacy, dict):
        raise ConfigError(
            f"privacy is a table of settings, got {privacy!r}; write [privacy] and below it secure = true."
        )
    config = DeploymentConfig.build(tables)
    assert isinstance(config, DeploymentConfig)
    config = replace(config, privacy=Privacy.build(privacy, "privacy"))
    check(config, own=data is not None)
    return config


def check(config: DeploymentConfig, own: bool) -> None:
    """Refuse what real clients cannot do."""
    if config.algorithm.evaluates() == "mean":
        raise ConfigError(
            f'{config.algorithm.called()}: eval = "server_mean" needs the clients\' private layers at the server, which they never leave '
            'for; set algorithm.eval = "clients".'
        )
    if config.algorithm.pooled and own:
        raise ConfigError(
            f"{config.algorithm.called()} needs all data in one place, and a data module's stay with their nodes; use another method."
        )
    asked = [name for name, value in config.evaluation.table().items() if value is True]
    if (near := [*{*asked} & SAMPLES]) and (own or config.algorithm.evaluates() == "clients"):
        raise ConfigError(
            f"evaluation.{near[0]} needs the clients' samples at the server, where they are not; leave it out."
        )
    if (each := [*{*asked} & UPLOADS]) and (config.privacy.secure or config.privacy.noise):
        raise ConfigError(
            f"evaluation.{each[0]} measures the clients' uploads one by one, which privacy hides; leave one of them out."
        )


# samples --------------------------------------------------------------------------------------------------------


class Own(Federation):
    """One client's own samples; of the others it knows nothing."""

    def __init__(
        self, data: Dataset, validation: Samples | None, client: int, config: Config, device: torch.device
    ) -> None:
        self.held = 0 if validation is None else len(validation.y)
        train = data.train if validation is None else concatenate([data.train, validation])
        owned = replace(data, train=train, owner=np.full(len(train.y), client))
        share = config.partition.validation if validation is None else 0.0
        needs = [need for need in config.algorithm.needs if need != "public"]  # which the server has
        partition = Natural(clients=config.partition.clients, validation=share)
        super().__init__(owned, partition, config.seed, device, config.engine.storage, needs)
        self.sizes[client] -= self.held

    def _split_validation(
        self, own: np.ndarray[Any, Any], client: int
    ) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        return (own[: -self.held], own[-self.held :]) if self.held else super()._split_validation(own, client)


class Remote(Federation):
    """What the server knows of clients whose samples it does not have: how many there are.

    Clients that have not come yet are counted in, so that one that joins later changes nothing for the others.
    """

    def __init__(
        self, config: Config, shape: Sequence[int], real: bool, classes: int, kept: Kept, device: torch.device
    ) -> None:
        self.seed, self.device, self.dtype, self.validation = config.seed, device, config.engine.storage, 0.0
        self.transform, self.assignment, self.source, self.shift = None, None, None, None
        self.classes, self.criterion = classes, "cross_entropy" if classes else "squared_error"
        self.clients = config.partition.clients
        self.known, self.sizes = np.zeros(self.clients, dtype=bool), np.zeros(self.clients, dtype=np.int64)
        self.plans = {}
        inputs = torch.zeros(2, *shape, dtype=self.dtype if real else torch.int64)
        blank = Samples(inputs, torch.zeros(2, dtype=torch.int64 if classes else self.dtype))
        public, test = kept
        self.tested = test is not None
        self.test = (test if test is not None else blank).to(device, self.dtype)
        self.public = None if public is None else public.to(device, self.dtype)
        self.pool = Samples(self.test.x[:0], self.test.y[:0])
        if self.tested and self.shape != tuple(shape):
            raise DataError(
                f"the server's test data have inputs of shape {self.shape}, the clients' {tuple(shape)}; prepare them alike."
            )
        self._count()

    def learn(self, client: int, count: int) -> None:
        """A client has told how many samples it trains on."""
        self.known[client], self.sizes[client] = True, count
        self._count()

    def _count(self) -> None:
        self.eligible = np.flatnonzero((self.sizes > 0) | ~self.known)
        counts = self.sizes[self.sizes > 0]
        self.mean_size = float(counts.mean()) if len(counts) else 1.0
        self.plans.clear()

    def gather(self, ids: Sequence[int]) -> tuple[Samples, list[np.ndarray[Any, Any]]]:
        return self.pool, [np.arange(self.sizes[i]) for i in ids]

    def labels(self) -> dict[str, Any]:
        shown = min(self.clients, SHOWN)
        told = {
            "clients": self.clients,
            "classes": self.classes,
            "empty": self.clients - len(self.eligible),
            "shown": shown,
        }
        return told | {"sizes": self.sizes[:shown].tolist(), "samples": int(self.sizes.sum())}


class Site(BuildCache):
    """Builds a run on a federation that is there already."""

    def __init__(self, fed: Federation) -> None:
        super().__init__()
        self.fed = fed

    def federation(self, *asked: Any) -> Federation:
        return self.fed


def number_of(node: Node, clients: int) -> int:
    """Which client a node is."""
    told = node.get("partition-id")
    if type(told) is not int or not 0 <= told < clients:
        raise ConfigError(
            f"the node's partition-id must be its client number from 0 to {clients - 1}, got {told!r}; "
            "start it with --node-config 'partition-id=0', another number on every node."
        )
    return told


def read(parts: Sequence[UserData | None], *names: str) -> list[Samples | None]:
    """What a user gave, checked, where something is given."""
    return [None if part is None else to_samples(part, name) for part, name in zip(parts, names, strict=True)]


def dataset_of(held: Held) -> tuple[Dataset, Samples | None, bool]:
    """What a data module's `client` returned, checked; and whether there is a test set."""
    if isinstance(held, Dataset):
        return held, None, True
    if not isinstance(held, (tuple, list)) or len(held) != 3:
        raise DataError(
            f"the data module's client(node) must return (train, validation, test), each a pair (x, y) or None, or an askew.Dataset, "
            f"got {type(held).__name__}; return for example ((x, y), None, None)."
        )
    train, validation, test = read(held, "client's training data", "client's validation data", "client's test data")
    if train is None:
        raise DataError(
            "the data module's client(node) returned no training data; return at least ((x, y), None, None)."
        )
    whole = make_dataset(train, train if test is None else test)
    if validation is not None:
        alike = make_dataset(train, validation)
        whole = replace(whole, classes=max(whole.classes, alike.classes))
    return whole, validation, test is not None


class Home:
    """One client of a deployment: its samples and, once the number of classes is known, its network."""

    def __init__(
        self, config: DeploymentConfig, node: Node, data: DataModule | None, classes: int | None = None
    ) -> None:
        self.config, self.client = config, number_of(node, 1 if config.algorithm.pooled else config.partition.clients)
        self.tested = True  # is there a test set?
        self.fed: Federation
        if data is None:
            parts = node.get("num-partitions", config.partition.clients)
            if parts != config.partition.clients and not config.algorithm.pooled:
                raise ConfigError(
                    f"the node's num-partitions is {parts}, and partition.clients is {config.partition.clients}; make them equal."
                )
            self.house = divided_house(config)
            self.fed = self.house.fed
            return
        whole, validation, self.tested = dataset_of(data.client(node))
        if classes is not None and (whole.classes > classes or (whole.classes > 0) != (classes > 0)):
            raise DataError(
                f"client {self.client} has {whole.classes} classes, and the run was begun with {classes}; "
                "let client(node) return an askew.Dataset that names all classes on every node, and start the run over."
            )
        whole = whole if classes is None else replace(whole, classes=classes)
        self.fed = Own(whole, validation, self.client, config, device_of(config.engine.device))

    @cached_property
    def house(self) -> BuiltRun:
        return house_of(self.config, Site(self.fed))


@lru_cache(maxsize=1)
def divided_house(config: DeploymentConfig) -> BuiltRun:
    """What all clients of one process share where the configuration's dataset is divided: Flower's simulation has many."""
    return house_of(config, BuildCache())


def server_data(config: DeploymentConfig, data: DataModule) -> Kept:
    """The public and the test set that the server has of its own, checked."""
    given = (None, None) if data.server is None else data.server()
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise DataError(
            "the data module's server() must return (public, test), each a pair (x, y) or None; return for example (None, (x, y))."
        )
    public, test = read(given, "server's public data", "server's test data")
    if public is None and "public" in config.algorithm.needs:
        raise ConfigError(
            f"{config.algorithm.called()} needs public data at the server; let the data module's server() return ((x, y), None), "
            "or use another method."
        )
    return public, test


def house_of(config: DeploymentConfig, shop: BuildCache) -> BuiltRun:
    """All that a run is made of, at the server or at a client, with the engine that trains one client at a time unless one is named."""
    engine = config.engine
    plain = replace(engine, name="sequential" if engine.name == "auto" else engine.name, workers=1)
    house = build(replace(config, engine=plain), shop)
    house.facts["name"] = config.name()
    return house._replace(config=config)
