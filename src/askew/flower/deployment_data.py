"""The configuration and the data of a deployment: a client has its own samples, the server knows how many they are.

Data come from one of two places. Without a data module every node divides the configuration's dataset as the simulator
does and takes the part of its number (`partition-id`): so a deployment can be compared with a simulation. With a data
module a client's samples are what its function `client(node)` returns for the node's configuration, and never leave the
node.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..core.settings import setting
from ..core.text import count_text
from ..data.arrays import UserData, make_dataset, to_samples
from ..data.dataset import Dataset, Samples, Source, concatenate
from ..data.federation import Federation
from ..data.partition import Natural
from ..errors import AskewError, ConfigError, DataError
from ..experiment.build import BuildCache, BuiltRun, build, device_of
from ..experiment.code_text import source_text
from ..experiment.config import Config, FromPython
from ..experiment.toml import read_toml
from ..experiment.value_text import fingerprint
from ..participation import ByClass

NodeConfig = Mapping[str, bool | int | float | str]  # a node's configuration, as --node-config gives it
# What a data module's client(node) returns: training, validation and test data, or a ready Dataset.
ClientDataset = Dataset | tuple[UserData, UserData | None, UserData | None]
T = TypeVar("T")
# Settings of [evaluation] that need the clients' samples.
NEED_SAMPLES = {"spread", "fit", "weights", "rare", "descent", "validation"}


class DataModule(NamedTuple):
    """The two functions of a user's data module: what a client has, and what the server has, if anything."""

    client: Callable[[NodeConfig], ClientDataset]
    server: Callable[[], tuple[UserData | None, UserData | None]] | None = None

    @classmethod
    def of(cls, module: ModuleType) -> DataModule:
        """The functions that a module defines."""
        client, server = (vars(module).get(name) for name in cls._fields)
        if not callable(client):
            raise DataError(
                f"the data module {module.__file__} must define client(node), which returns (train, validation, test); "
                "add it."
            )
        return cls(client, server)

    def digest(self) -> str:
        """A hash of the module's source text."""
        return fingerprint(about=source_text(inspect.getmodule(self.client) or self.client))


class NodeData(FromPython, Source):
    """The data source of a configuration whose data stay with the clients of a deployment."""

    module: str = setting("hash of the data module", default="")


@dataclass(frozen=True)
class DeploymentConfig(Config):
    """The configuration of a run on real clients; a simulation of the same run has another folder and checkpoint."""

    simulated: ClassVar[bool] = False

    def digest(self) -> str:
        return f"{super().digest()}-flower"

    @property
    def client_count(self) -> int:
        """The number of clients; a method that pools all data has one."""
        return 1 if self.algorithm.pooled else self.partition.clients


def read_config(path: Path, data: DataModule | None = None) -> DeploymentConfig:
    """The configuration in an app's TOML file, with plugins beside that file; a data module replaces its data."""
    tables = read_toml(path)
    if isinstance(tables.get("plugins"), list):
        tables["plugins"] = [str(path.parent / str(plugin)) for plugin in tables["plugins"]]
    if data is not None:
        given = tables.get("partition", {})
        kept = {k: v for k, v in given.items() if k in ("clients", "validation")} if isinstance(given, dict) else {}
        tables |= {"data": NodeData(module=data.digest()), "partition": {"name": "natural", **kept}}
    config = DeploymentConfig.build(tables)
    assert isinstance(config, DeploymentConfig)
    check_deployable(config, has_data_module=data is not None)
    return config


def check_deployable(config: DeploymentConfig, has_data_module: bool) -> None:
    """Refuse a configuration that asks real clients for what they cannot do."""
    method = config.algorithm.display_name()
    if config.faults.on:
        raise ConfigError(
            "faults: the rates and check_answers are for simulations, and a deployment checks all answers anyway; "
            "leave out all of [faults] but scale_limit."
        )
    if config.algorithm.evaluates() == "mean":
        raise ConfigError(
            f'{method}: eval = "server_mean" needs the clients\' private layers at the server, which they never leave '
            'for; set algorithm.eval = "clients".'
        )
    if config.algorithm.pooled and has_data_module:
        raise ConfigError(
            f"{method} needs all data in one place, and a data module's stay with their nodes; use another method."
        )
    switched_on = {name for name, value in config.evaluation.table().items() if value is True}
    if (names := [*switched_on & NEED_SAMPLES]) and (has_data_module or config.algorithm.evaluates() == "clients"):
        raise ConfigError(
            f"evaluation.{names[0]} needs the clients' samples at the server, where they are not; leave it out."
        )
    if config.time.on:
        raise ConfigError(
            "time: the virtual clock is for simulations, and this is a run on real clients; leave [time] out, and set "
            "the rules timeout, spare and buffer of the deployment."
        )
    if isinstance(config.participation, ByClass):
        raise ConfigError(
            "participation: chances that follow from the clients' classes are for simulations, as the server of real "
            'clients does not know them; set participation.name = "uniform".'
        )
    if config.attack.on:
        raise ConfigError("attack: attacks are for simulations, and this is a run on real clients; leave [attack] out.")


# federations ----------------------------------------------------------------------------------------------------


class ClientFederation(Federation):
    """A federation as one client sees it: its own samples, and nothing of the others."""

    def __init__(
        self, data: Dataset, validation: Samples | None, client: int, config: Config, device: torch.device
    ) -> None:
        self.validation_count = 0 if validation is None else len(validation.y)
        train = data.train if validation is None else concatenate([data.train, validation])
        owned = replace(data, train=train, owner=np.full(len(train.y), client))
        share = config.partition.validation if validation is None else 0.0
        needs = [need for need in config.algorithm.needs if need != "public"]  # public data are with the server
        partition = Natural(clients=config.partition.clients, validation=share)
        super().__init__(owned, partition, config.seed, device, config.engine.storage, needs)
        self.sizes[client] -= self.validation_count

    def _split_validation(
        self, own: np.ndarray[Any, Any], client: int
    ) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        count = self.validation_count
        return (own[:-count], own[-count:]) if count else super()._split_validation(own, client)


class DataKind(NamedTuple):
    """What is the same for the data of all clients of a federation."""

    shape: tuple[int, ...]  # of one input
    real: bool  # are inputs floating-point numbers?
    labelled: bool  # are targets classes?

    @classmethod
    def of(cls, samples: Samples) -> DataKind:
        """The kind of these samples."""
        return cls(tuple(samples.x.shape[1:]), samples.x.is_floating_point(), not samples.y.is_floating_point())

    def __str__(self) -> str:
        inputs, targets = "real" if self.real else "whole", "class labels" if self.labelled else "real targets"
        return f"{inputs} inputs of shape {[*self.shape]} and {targets}"


class ServerData(NamedTuple):
    """The data that the server has of its own."""

    public: Samples | None
    test: Samples | None

    @property
    def parts(self) -> list[Samples]:
        """Those that there are."""
        return [part for part in self if part is not None]

    @property
    def classes(self) -> int:
        """How many classes there are in them, as far as their labels say; 0 without labels."""
        return max((int(p.y.max()) + 1 for p in self.parts if DataKind.of(p).labelled and len(p.y)), default=0)

    def check_like(self, kind: DataKind, classes: int) -> None:
        """Refuse data that a run which was begun with this kind and so many classes cannot use."""
        own = next((own for own in map(DataKind.of, self.parts) if own != kind), kind)
        if own != kind:
            problem = f"are {own}, and the run was begun with {kind}"
        elif self.classes > classes:
            problem = f"have {count_text(self.classes, 'class', 'classes')}, and the run was begun with {classes}"
        else:
            return
        raise DataError(
            f"the server's data {problem}; give the server the data that it had, or start the run over (fresh = true)."
        )


class RemoteFederation(Federation):
    """A federation as the server sees it where data stay with the clients: how many samples each has.

    Clients that have not joined yet are counted in, so that one that joins later changes nothing for the others. For
    the same reason the mean size, the unit of all relative sizes, is fixed when the run begins.
    """

    def __init__(
        self,
        config: Config,
        kind: DataKind,
        classes: int,
        server_data: ServerData,
        device: torch.device,
    ) -> None:
        self.seed, self.device, self.dtype, self.validation = config.seed, device, config.engine.storage, 0.0
        self.transform, self.assignment, self.source, self.shift = None, None, None, None
        self.classes, self.criterion = classes, "cross_entropy" if classes else "squared_error"
        self.clients = config.partition.clients
        self.known = np.zeros(self.clients, dtype=bool)  # which clients' sizes are known
        self.sizes = np.zeros(self.clients, dtype=np.int64)
        self.mean_size = 1.0  # until the run begins
        self.plans = {}
        public, test = server_data
        if test is None:  # two blank samples stand for the shape and type of the inputs
            inputs = torch.zeros(2, *kind.shape, dtype=self.dtype if kind.real else torch.int64)
            test = Samples(inputs, torch.zeros(2, dtype=torch.int64 if classes else self.dtype))
        self.has_test_set = self.has_targets = server_data.test is not None
        self.test = test.to(self.device, self.dtype)
        self.public = None if public is None else public.to(self.device, self.dtype)
        self.pool = Samples(self.test.x[:0], self.test.y[:0])
        self._update_eligible()

    def label_counts(self, ids: Sequence[int]) -> Tensor:
        """Zeros: clients count their labels by themselves, and send them only if the method does."""
        return torch.zeros(len(ids), self.classes, dtype=self.dtype)

    def set_size(self, client: int, count: int) -> None:
        """Note how many samples a client trains on."""
        self.known[client], self.sizes[client] = True, count
        self._update_eligible()

    def _update_eligible(self) -> None:
        self.eligible = np.flatnonzero((self.sizes > 0) | ~self.known)
        self.plans.clear()

    def fix_mean_size(self, stored: float | None) -> None:
        """Fix the mean size for the whole run, from the clients known now unless an earlier start has stored it.

        Sums that the server keeps over rounds (SCAFFOLD's, FedDC's) are weighted with relative sizes, and would be
        wrong in another unit.
        """
        counts = self.sizes[self.sizes > 0]
        if not len(counts):
            raise DataError(
                "none of the clients that came has training samples; start others, or wait for more of them (nodes)."
            )
        self.mean_size = stored or float(counts.mean())

    def gather(self, ids: Sequence[int]) -> tuple[Samples, list[np.ndarray[Any, Any]]]:
        return self.pool, [np.arange(self.sizes[i]) for i in ids]

    def labels(self) -> dict[str, Any]:
        kind = {"shape": [*self.shape], "real": self.test.x.is_floating_point()}
        return self.size_numbers() | kind | {"mean_size": self.mean_size}


class GivenFederationCache(BuildCache):
    """Builds runs on a federation that exists already, whatever the configuration says about data."""

    def __init__(self, fed: Federation) -> None:
        super().__init__()
        self.fed = fed

    def federation(self, *settings: Any) -> Federation:
        return self.fed


# what users give ------------------------------------------------------------------------------------------------


def client_number(node: NodeConfig, clients: int) -> int:
    """Which of the clients a node is: its partition-id."""
    number = node.get("partition-id")
    if type(number) is not int or not 0 <= number < clients:
        raise ConfigError(
            f"the node's partition-id must be its client number from 0 to {clients - 1}, got {number!r}; "
            "start it with --node-config 'partition-id=0', another number on every node."
        )
    return number


def read_samples(given: Sequence[UserData | None], *names: str) -> list[Samples | None]:
    """Samples from what a user gave, each checked, or None where nothing is given."""
    return [None if part is None else to_samples(part, name) for part, name in zip(given, names, strict=True)]


def call_data_module(function: Callable[..., T], name: str, *arguments: NodeConfig) -> T:
    """What a function of a data module returns; what it raises becomes a sentence with its line."""
    try:
        return function(*arguments)
    except AskewError:
        raise
    except Exception as e:
        module = inspect.getmodule(function)
        lines = [f.lineno for f in traceback.extract_tb(e.__traceback__) if module and f.filename == module.__file__]
        where = f" in line {lines[-1]}" if lines else ""
        raise DataError(
            f"the data module's {name} failed{where}: {type(e).__name__}: {e}; correct the module or this "
            "machine's data, and start again."
        ) from None


def read_client_data(given: ClientDataset) -> tuple[Dataset, Samples | None, bool]:
    """What client(node) of a data module returned, checked: dataset, validation samples, and is there a test set?"""
    if isinstance(given, Dataset):
        return given, None, True
    if not isinstance(given, (tuple, list)) or len(given) != 3:
        raise DataError(
            "the data module's client(node) must return (train, validation, test), each a pair (x, y) or None, or an "
            "askew.Dataset, "
            f"got {type(given).__name__}; return for example ((x, y), None, None)."
        )
    names = ("client's training data", "client's validation data", "client's test data")
    train, validation, test = read_samples(given, *names)
    if train is None:
        raise DataError(
            "the data module's client(node) returned no training data; return at least ((x, y), None, None)."
        )
    dataset = make_dataset(train, train if test is None else test, renumber=False)
    if validation is not None:
        classes = make_dataset(train, validation, renumber=False).classes
        dataset = replace(dataset, classes=max(dataset.classes, classes))
    return dataset, validation, test is not None


def read_server_data(config: DeploymentConfig, data: DataModule) -> ServerData:
    """The public and the test set that a data module gives the server, checked."""
    given = (None, None) if data.server is None else call_data_module(data.server, "server()")
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise DataError(
            "the data module's server() must return (public, test), each a pair (x, y) or None; "
            "return for example (None, (x, y))."
        )
    public, test = read_samples(given, "server's public data", "server's test data")
    if public is None and "public" in config.algorithm.needs:
        raise ConfigError(
            f"{config.algorithm.display_name()} needs public data at the server; "
            "let the data module's server() return ((x, y), None), "
            "or use another method."
        )
    kept = ServerData(public, test)
    if len(kinds := {str(DataKind.of(part)) for part in kept.parts}) > 1:
        raise DataError(f"the data module's server() returned {' and '.join(sorted(kinds))}; prepare both alike.")
    return kept


# building -------------------------------------------------------------------------------------------------------


class ClientSetup:
    """One client of a deployment: its number, its samples and, built when it is first used, its network and engine.

    `classes` is the number of classes of the run, or None while the server does not know it yet.
    """

    def __init__(
        self, config: DeploymentConfig, node: NodeConfig, data: DataModule | None, classes: int | None = None
    ) -> None:
        self.config, self.client = config, client_number(node, config.client_count)
        self.has_test_set = True
        self.fed: Federation
        if data is None:
            parts = node.get("num-partitions", config.partition.clients)
            if parts != config.partition.clients and not config.algorithm.pooled:
                raise ConfigError(
                    f"the node's num-partitions is {parts}, and partition.clients is {config.partition.clients}; "
                    "make them equal."
                )
            self.built = build_on_divided_dataset(config)
            self.fed = self.built.fed
            return
        dataset, validation, self.has_test_set = read_client_data(call_data_module(data.client, "client(node)", node))
        if classes is not None and (dataset.classes > classes or (dataset.classes > 0) != (classes > 0)):
            raise DataError(
                f"client {self.client} has {dataset.classes} classes, and the run was begun with {classes}; "
                "let client(node) return an askew.Dataset that names all classes on every node, and start the run over."
            )
        dataset = dataset if classes is None else replace(dataset, classes=classes)
        self.fed = ClientFederation(dataset, validation, self.client, config, device_of(config.engine.device))

    @cached_property
    def built(self) -> BuiltRun:
        return build_run(self.config, GivenFederationCache(self.fed))


@lru_cache(maxsize=1)
def build_on_divided_dataset(config: DeploymentConfig) -> BuiltRun:
    """The run on the configuration's divided dataset, built once for all clients of a process.

    Flower's simulation has many clients in one process.
    """
    return build_run(config, BuildCache())


def build_run(config: DeploymentConfig, cache: BuildCache) -> BuiltRun:
    """The run, for server or client, with the engine that trains one client at a time unless another is named."""
    engine = config.engine
    engine = replace(engine, name="sequential" if engine.name == "auto" else engine.name, workers=1)
    built = build(replace(config, engine=engine), cache)
    built.facts["name"] = config.name()
    return built._replace(config=config)
