"""What can be named in a configuration: every registered thing with its settings, and what each method costs."""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ..algorithms import algorithms
from ..core.algorithm import Algorithm
from ..core.settings import Registry, Settings, allowed, spoken, types_of
from ..core.space import Space
from ..core.task import Bound
from ..core.types import State
from ..data import partitions, sources
from ..data.federation import Federation, Local
from ..data.partition import Natural
from ..data.synthetic import Synthetic
from ..engine.sequential import Sequential
from ..engine.server import Server
from ..errors import AskewError, UnknownName, did_you_mean
from ..models import MLP, networks
from ..participation import participations

KINDS: dict[str, Registry[Any]] = {
    "algorithms": algorithms,
    "datasets": sources,
    "models": networks,
    "partitions": partitions,
    "participations": participations,
}
SEED = 0


class Costs(NamedTuple):
    """Traffic of one client in one round and the state of a method, in multiples of the model; memory: of one client, at the server."""

    down: float | None
    up: float | None
    server_state: float
    client_state: float
    memory: float


class Bench(NamedTuple):
    """Two clients and a small network with batch norm, on which costs are measured."""

    fed: Federation
    task: Bound
    space: Space


def entries(kind: str) -> list[dict[str, Any]]:
    """One entry for each registered member of a kind, such as "algorithms"."""
    if kind not in KINDS:
        raise UnknownName(f"there is no list of {kind!r}; {did_you_mean(kind, KINDS)}")
    return [entry(kind, name, member) for name, member in KINDS[kind].members.items()]


def entry(kind: str, name: str, member: type[Settings]) -> dict[str, Any]:
    told: dict[str, Any] = {"name": name}
    if issubclass(member, Algorithm):
        method = member()
        told |= {"paper": method.paper, "idea": method.idea, **costs(method)._asdict()}
        told |= {"exact": method.exact, "weighting": method.weighting}
    else:
        told["idea"] = KINDS[kind][name].idea
    return told | {"parameters": parameters(member)}


def parameters(member: type[Settings]) -> list[dict[str, Any]]:
    """The settings of a class: its own first, then those of each class above it."""
    kinds = types_of(member)
    above = [cls for cls in member.__mro__ if dataclasses.is_dataclass(cls)]
    depth = {field.name: n for n, cls in enumerate(above) for field in dataclasses.fields(cls)}
    return [
        {
            "name": field.name,
            "type": spoken(kinds[field.name]),
            "default": field.default,
            "doc": field.metadata.get("doc", ""),
            "allowed": allowed(field, kinds[field.name]),
        }
        for field in sorted(dataclasses.fields(above[0]), key=lambda field: depth[field.name])
    ]


@lru_cache(maxsize=1)
def bench() -> Bench:
    fed = Federation(Synthetic(dim=64, labels=10, samples=8), Natural(clients=2), SEED)
    with torch.random.fork_rng(devices=[]):
        module = MLP(norm="batch").module(fed.shape, fed.classes)
    space = Space(module)
    return Bench(fed, Bound(module, space, fed.criterion), space)


def costs(method: Algorithm) -> Costs:
    """Played, not computed: one round through the real server, whose bytes are those that runs report."""
    fed, task, space = bench()
    model = space.P + space.Q
    size = lambda state: sum(t.numel() for t in state.values()) / model
    states: tuple[State, ...] = (method.server_state(space), method.client_state(space), method.memory(space))
    try:
        server = Server(method, space, fed, Local(steps=1), Sequential(task, SEED, False), SEED, least=2)
        record = server.play(1, range(fed.clients))
    except AskewError:  # a method that this network does not suit
        return Costs(None, None, *map(size, states))
    whole = model * space.start.element_size() * fed.clients
    return Costs(record["bytes_down"] / whole, record["bytes_up"] / whole, *map(size, states))
