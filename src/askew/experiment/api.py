"""`askew.run`: the same runs as the command line's, with your own data, network and method where you want."""

from __future__ import annotations

import hashlib
import inspect
import warnings
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, Self
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from ..core.algorithm import Algorithm
from ..core.settings import Settings, setting
from ..data.adapt import library_type
from ..data.dataset import Dataset, Source
from ..data.user import from_user, is_divided
from ..errors import ConfigError, DataWarning
from ..models import Network
from .build import OWNERS_PASSED_OVER, passes_over_owners
from .config import OPTIONAL_TABLES, Config, FromPython, load_config
from .launch import run_config
from .run import OnRound
from .store import Run

Table = str | Mapping[str, Any]


class HeldObject(FromPython):
    """Settings that stand for an object handed in from Python, and hold it.

    Copies of the settings find the object by its fingerprint while any of them lives; with the last one it is freed.
    """

    fingerprint: str
    objects: ClassVar[WeakValueDictionary[str, Any]] = WeakValueDictionary()  # by fingerprint

    def hold_object(self) -> None:
        """Find the object, and keep it alive as long as these settings live."""
        object.__setattr__(self, "_object", self.objects.get(self.fingerprint))

    def held_object(self, what: str) -> Any:
        """The object; `what` names it in the sentence where no settings held it any more when these were made."""
        if self.__dict__["_object"] is None:
            raise ConfigError(
                f"the {what} of this configuration was handed in from Python and is gone; call askew.run with it again."
            )
        return self.__dict__["_object"]

    def __deepcopy__(self, memo: object) -> Self:
        return self  # settings never change, and the object must not be copied


class OwnData(HeldObject, Source):
    """Data handed in from Python; the fingerprint tells one dataset from another."""

    fingerprint: str = setting("hash of the samples", default="")

    @classmethod
    def of(cls, data: Any, test: Any, client: str = "", label: str = "") -> OwnData:
        """The settings that stand for a user's data; the arguments are as for `askew.run`."""
        dataset = from_user(data, test, client=client, label=label)
        owner = torch.zeros(0) if dataset.owner is None else torch.as_tensor(dataset.owner)
        about = f"{dataset.classes} {source_text(dataset.criterion)} {dataset.transform}"
        if dataset.client_names or dataset.class_names:
            about += f" {dataset.client_names} {dataset.class_names}"
        of_test = () if dataset.test_owner is None else (torch.as_tensor(dataset.test_owner),)
        mark = fingerprint(*dataset.train, *dataset.test, owner, *of_test, about=about)
        cls.objects[mark] = dataset
        return cls(fingerprint=mark)

    def check(self) -> None:
        self.hold_object()

    @property
    def seeded(self) -> bool:
        return False

    @property
    def owners(self) -> int:
        owner = self.load(0, 0).owner
        return 0 if owner is None else int(owner.max()) + 1

    @property
    def regression(self) -> bool:
        return self.load(0, 0).classes == 0

    def load(self, seed: int, clients: int) -> Dataset:
        dataset: Dataset = self.held_object("data")
        return dataset


class OwnNetwork(HeldObject, Network):
    """A network handed in from Python, which starts from the weights it has."""

    kind: str = setting("its class", default="")
    fingerprint: str = setting("hash of its weights", default="")

    @classmethod
    def of(cls, module: nn.Module) -> OwnNetwork:
        """The settings that stand for a user's module."""
        mark = fingerprint(*module.state_dict().values(), about=f"{module} {source_text(type(module))}")
        cls.objects[mark] = module
        return cls(kind=type(module).__name__, fingerprint=mark)

    def check(self) -> None:
        super().check()
        self.hold_object()

    def module(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        module: nn.Module = self.held_object("model")
        return module


def source_text(thing: object) -> str:
    """The source text of a function or class, or what else tells it from others; a text stands for itself."""
    if isinstance(thing, str):
        return thing
    try:
        return inspect.getsource(thing)  # type: ignore[arg-type]
    except (OSError, TypeError):
        return repr(thing)


def fingerprint(*tensors: Tensor, about: str = "") -> str:
    """Twelve letters that stand for the values, shapes and types of tensors, and for a text."""
    digest = hashlib.sha256(about.encode())
    for tensor in tensors:
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:12]


def run(
    what: str | Path | Mapping[str, Any] | Config | Algorithm | None = None,
    *,
    method: str | Algorithm | None = None,
    data: Table | Source | Any = None,
    test: Any = None,
    client: str = "",
    label: str = "",
    model: Table | Network | nn.Module | None = None,
    partition: Table | Settings | None = None,
    participation: Table | Settings | None = None,
    local: Mapping[str, Any] | Settings | None = None,
    evaluation: Mapping[str, Any] | Settings | None = None,
    engine: Table | Settings | None = None,
    seed: int | None = None,
    rounds: int | None = None,
    clients: int | None = None,
    cohort: int | None = None,
    lr: float | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    device: str | None = None,
    out: str | Path | None = None,
    fresh: bool = False,
    watch: OnRound | None = None,
    save_every: float = 5.0,
    **parameters: Any,
) -> Run:
    """Train one federation and return its run.

    `what` is an algorithm's name or instance, a TOML file, nested tables or a Config; `method` another algorithm for
    the last three. `data` is a dataset's name, a table, a pair (x, y) or triple (x, y, owner) of tensors or arrays, a
    torch Dataset, a dictionary {client: data}, a list of such data, one a client, or a DataFrame of which `client` and
    `label` name columns (`test` likewise, a fifth is held out without it); `model` a network's name, a table or any
    nn.Module. `clients`, `cohort`, `lr`, `epochs`, `batch_size` and `device` stand for partition.clients,
    participation.cohort, local.lr, local.epochs, local.batch and engine.device; further keywords are the algorithm's
    hyper-parameters, or tables that most runs do not need, such as `faults`. With `out` the run lives in a folder
    there, as the command line's do.
    """
    tables = with_method(what, method)
    if data is not None:
        tables["data"] = data_settings(data, test, client, label)
    given = {
        "model": OwnNetwork.of(model) if isinstance(model, nn.Module) else model,
        "partition": partition,
        "participation": participation,
        "local": local,
        "evaluation": evaluation,
        "engine": engine,
        "seed": seed,
        "rounds": rounds,
    }
    short: dict[str, Any] = {"partition.clients": clients, "participation.cohort": cohort, "engine.device": device}
    short |= {"local.lr": lr, "local.epochs": epochs, "local.batch": batch_size}
    put_settings(tables, given | take_tables(parameters), short, parameters)
    config = Config.build(tables)
    for remark in own_data_remarks(config):
        warnings.warn(remark, DataWarning, stacklevel=2)
    return run_config(config, out, fresh=fresh, watch=watch, save_every=save_every)


def data_settings(data: Any, test: Any, client: str, label: str) -> Any:
    """The settings of the data: a name or a table as they are, and settings that stand for anything else."""
    by_settings = isinstance(data, (str, Mapping, Source)) and not library_type(data) and not is_divided(data)
    if not by_settings:
        return OwnData.of(data, test, client, label)
    if test is not None:
        raise ConfigError("test is for data handed in from Python; leave it out, or name a file in data.test.")
    table = {"name": data} if isinstance(data, str) else data
    given = {key: value for key, value in (("client", client), ("label", label)) if value}
    if given and isinstance(table, Source):
        raise ConfigError("client and label belong to the settings of the data; set them there.")
    return {**table, **given} if given else table


def own_data_remarks(config: Config) -> list[str]:
    """What was done to data that were handed in from Python, and whether their owners are passed over."""
    if not isinstance(config.data, OwnData):
        return []
    dataset = config.data.load(config.seed, config.partition.clients)
    passed_over = dataset.owner is not None and passes_over_owners(config)
    return [*dataset.remarks, *([OWNERS_PASSED_OVER] if passed_over else [])]


def with_method(
    what: str | Path | Mapping[str, Any] | Config | Algorithm | None, method: str | Algorithm | None
) -> dict[str, Any]:
    """The nested tables of the first argument of `run`, with the algorithm that `method` names, if any."""
    tables = tables_from("fedavg" if what is None else what)
    if method is None:
        return tables
    if isinstance(what, Algorithm) or (isinstance(what, str) and not what.endswith(".toml")):
        raise ConfigError(f"the first argument and method={method!r} both name a method; leave one of them out.")
    return tables | tables_from(method)


def put_settings(
    tables: dict[str, Any], given: Mapping[str, Any], short: Mapping[str, Any], parameters: Mapping[str, Any]
) -> None:
    """Put into nested tables: other tables, single settings by dotted keys, and the algorithm's; None is not given."""
    if "seeds" in parameters:
        raise ConfigError(
            "askew.run trains one run, which has one seed; write [askew.run(…, seed=s) for s in (0, 1, 2)]."
        )
    tables |= {name: value for name, value in given.items() if value is not None}
    for name in ("data", "model", "partition", "participation", "engine"):
        if isinstance(tables.get(name), str):
            tables[name] = {"name": tables[name]}
    for path, value in short.items():
        name, _, key = path.partition(".")
        if value is not None:
            merge(tables, name, {key: value})
    if parameters:
        merge(tables, "algorithm", parameters)


def take_tables(keywords: dict[str, Any]) -> dict[str, Any]:
    """Remove optional tables of the configuration from keywords, and return them."""
    return {name: keywords.pop(name) for name in [*keywords] if name in OPTIONAL_TABLES}


def tables_from(what: str | Path | Mapping[str, Any] | Config | Algorithm) -> dict[str, Any]:
    """The nested tables of what the first argument of `run` stands for."""
    if isinstance(what, Algorithm):
        return {"algorithm": what}
    if isinstance(what, Mapping):
        return {k: dict(v) if isinstance(v, Mapping) else v for k, v in what.items()}
    if isinstance(what, str) and not what.endswith(".toml"):
        return {"algorithm": {"name": what}}
    config = what if isinstance(what, Config) else load_config(what)
    return {field.name: getattr(config, field.name) for field in fields(config)}


def merge(tables: dict[str, Any], name: str, values: Mapping[str, Any]) -> None:
    """Put values into one table, which may be a table or settings that were built from one."""
    before = tables.get(name, {})
    if isinstance(before, Settings):
        tables[name] = type(before).build({**before.table(), **values}, name)
    elif isinstance(before, Mapping):
        tables[name] = {**before, **values}
    else:
        raise ConfigError(f"{name} must be a table, got {before!r}; write {name}={{...}}.")
