"""`askew.run`: the same runs as the command line's, with your own data, network and method where you want."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..core.algorithm import Algorithm
from ..core.settings import Settings, setting
from ..data.adapt import library_type
from ..data.dataset import Dataset, Source
from ..data.user import from_user
from ..errors import ConfigError
from ..models import Network
from .config import Config, FromPython, load_config
from .run import OnRound, play
from .store import Run

Table = str | Mapping[str, Any]


class OwnData(FromPython, Source):
    """Data handed in from Python; the fingerprint tells one dataset from another."""

    fingerprint: str = setting("hash of the samples", default="")
    held: ClassVar[dict[str, Dataset]] = {}

    @classmethod
    def of(cls, data: Any, test: Any) -> OwnData:
        dataset = from_user(data, test)
        owner = torch.zeros(0) if dataset.owner is None else torch.as_tensor(dataset.owner)
        mark = fingerprint(
            *dataset.train,
            *dataset.test,
            owner,
            about=f"{dataset.classes} {spelled(dataset.criterion)} {dataset.transform}",
        )
        cls.held[mark] = dataset
        return cls(fingerprint=mark)

    @property
    def seeded(self) -> bool:
        return False

    def load(self, seed: int, clients: int) -> Dataset:
        return self.held[self.fingerprint]


class OwnNetwork(FromPython, Network):
    """A network handed in from Python, which starts from the weights it has."""

    kind: str = setting("its class", default="")
    fingerprint: str = setting("hash of its weights", default="")
    held: ClassVar[dict[str, nn.Module]] = {}

    @classmethod
    def of(cls, module: nn.Module) -> OwnNetwork:
        mark = fingerprint(*module.state_dict().values(), about=f"{module} {spelled(type(module))}")
        cls.held[mark] = module
        return cls(kind=type(module).__name__, fingerprint=mark)

    def module(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        return self.held[self.fingerprint]


def spelled(thing: object) -> str:
    """The text of a function or class, or what else stands for it: two that differ must not be taken for one."""
    if isinstance(thing, str):
        return thing
    try:
        return inspect.getsource(thing)  # type: ignore[arg-type]
    except (OSError, TypeError):
        return repr(thing)


def fingerprint(*tensors: Tensor, about: str = "") -> str:
    """Twelve letters that stand for the values, shapes and types of tensors, and for a text."""
    mark = hashlib.sha256(about.encode())
    for t in tensors:
        mark.update(f"{t.dtype}{tuple(t.shape)}".encode())
        mark.update(t.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return mark.hexdigest()[:12]


def run(
    what: str | Path | Mapping[str, Any] | Config | Algorithm = "fedavg",
    *,
    data: Table | Source | Any = None,
    test: Any = None,
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
    out: str | Path | None = None,
    fresh: bool = False,
    watch: OnRound | None = None,
    save_every: float = 5.0,
    **parameters: Any,
) -> Run:
    """Train one federation and return its rounds.

    `what` is an algorithm's name or instance, a TOML file, nested tables or a Config. `data` is a dataset's name, a table, a pair
    (x, y) of tensors or arrays, or a torch Dataset (`test` likewise, a fifth is held out without it); `model` a network's name, a
    table or any nn.Module. `clients`, `cohort` and `lr` stand for partition.clients, participation.cohort and local.lr; further
    keywords are the algorithm's hyper-parameters. With `out` the run lives in a folder there, as the command line's do.
    """
    tables: dict[str, Any]
    if isinstance(what, Config):
        tables = {name: getattr(what, name) for name in what.__dataclass_fields__}
    elif isinstance(what, Algorithm):
        tables = {"algorithm": what}
    elif isinstance(what, Mapping):
        tables = {k: dict(v) if isinstance(v, Mapping) else v for k, v in what.items()}
    elif isinstance(what, Path) or what.endswith(".toml"):
        config = load_config(what)
        tables = {name: getattr(config, name) for name in config.__dataclass_fields__}
    else:
        tables = {"algorithm": {"name": what}}
    if data is not None:
        known = isinstance(data, (str, Mapping, Source)) and not library_type(data)  # a dictionary of splits is data
        tables["data"] = data if known else OwnData.of(data, test)
    if isinstance(model, nn.Module):
        model = OwnNetwork.of(model)
    given = {
        "model": model,
        "partition": partition,
        "participation": participation,
        "local": local,
        "evaluation": evaluation,
    }
    for name, value in (given | {"engine": engine, "seed": seed, "rounds": rounds}).items():
        if value is not None:
            tables[name] = value
    for name in ("data", "model", "partition", "participation", "engine"):
        if isinstance(tables.get(name), str):
            tables[name] = {"name": tables[name]}
    for table, values in (
        ("partition", {"clients": clients}),
        ("participation", {"cohort": cohort}),
        ("local", {"lr": lr}),
    ):
        if None not in values.values():
            merge(tables, table, values)
    if parameters:
        merge(tables, "algorithm", parameters)
    return play(Config.build(tables), out, fresh=fresh, watch=watch, save_every=save_every)


def merge(tables: dict[str, Any], name: str, values: Mapping[str, Any]) -> None:
    """Put values into one table, whether it is a table still or settings already."""
    have = tables.get(name, {})
    if isinstance(have, Settings):
        tables[name] = type(have).build({**have.table(), **values}, name)
    elif isinstance(have, Mapping):
        tables[name] = {**have, **values}
    else:
        raise ConfigError(f"{name} must be a table, got {have!r}; write {name}={{...}}.")
