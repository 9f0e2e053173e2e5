"""What can be named in a configuration: every registered thing with its settings, and what each method costs."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from ..algorithms import algorithms
from ..core.algorithm import Algorithm
from ..core.settings import Registry, Settings, allowed, spoken, types_of
from ..data import partitions, sources
from ..data.federation import LocalSettings
from ..data.partition import Natural
from ..data.synthetic import Synthetic
from ..engine.choose import EngineSettings
from ..errors import AskewError, UnknownName, did_you_mean
from ..models import MLP, networks
from ..participation import participations
from .build import build
from .config import Config

KINDS: dict[str, Registry[Any]] = {
    "algorithms": algorithms,
    "datasets": sources,
    "models": networks,
    "partitions": partitions,
    "participations": participations,
}


class Costs(NamedTuple):
    """Of one client in one round, in multiples of the model's bytes; and of state, in multiples of its parameters.

    `memory` is what the server keeps of one client. None where the method would not run on a small network.
    """

    down: float | None
    up: float | None
    server_state: float | None
    client_state: float | None
    memory: float | None


def entries(kind: str) -> list[dict[str, Any]]:
    """One entry for each registered member of a kind, such as "algorithms"."""
    if kind not in KINDS:
        raise UnknownName(f"there is no list of {kind!r}; {did_you_mean(kind, [*KINDS, 'experiments'])}")
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


def costs(method: Algorithm) -> Costs:
    """Played, not computed: one round of the real thing, whose bytes are those that runs report."""
    small = Synthetic(dim=64, labels=10, samples=20)
    for norm in ("batch", "none"):  # some methods refuse batch norm
        model, engine = MLP(norm=norm), EngineSettings(name="sequential", device="cpu")
        config = Config(
            rounds=1,
            data=small,
            partition=Natural(clients=2),
            model=model,
            algorithm=method,
            local=LocalSettings(steps=1),
            engine=engine,
        )
        try:
            house = build(config)
            clients = house.fed.eligible.tolist()
            record = house.server.run_round(1, clients)
        except AskewError:
            continue
        space = house.space
        whole = (space.P + space.Q) * space.start.element_size() * len(clients)
        states = (method.server_state(space), method.client_state(space), method.memory(space))
        kept = [sum(t.numel() for t in state.values()) / space.P for state in states]
        return Costs(record["bytes_down"] / whole, record["bytes_up"] / whole, *kept)
    return Costs(None, None, None, None, None)
