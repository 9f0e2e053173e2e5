"""The lists of what a configuration can name: every registered member with its settings, and what each method costs."""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
from typing import Any, NamedTuple

from ..algorithms import algorithms
from ..core.algorithm import Algorithm
from ..core.settings import Registry, Settings, allowed_values, field_types, is_askews, type_in_words
from ..data import partitions, sources
from ..data.federation import LocalSettings
from ..data.partition import Natural
from ..data.synthetic import Synthetic
from ..engine.attacks import ATTACKS, Attack
from ..engine.robust import RULES, Robust
from ..engine.settings import EngineSettings
from ..errors import AskewError
from ..models import MLP, networks
from ..participation import participations
from .build import build
from .config import OPTIONAL_TABLES, Config
from .listing import KINDS as LISTED
from .listing import stored_entries

KINDS: dict[str, Registry[Any]] = {
    "algorithms": algorithms,
    "datasets": sources,
    "models": networks,
    "partitions": partitions,
    "participations": participations,
}


class Costs(NamedTuple):
    """What a method sends for one client and round, in model sizes (bytes), and its state, in model sizes (parameters).

    `memory` is what the server stores for one client. None where the method does not run on a small network.
    """

    down: float | None
    up: float | None
    server_state: float | None
    client_state: float | None
    memory: float | None


def entries(kind: str) -> list[dict[str, Any]]:
    """One entry for each registered member of a kind, such as "algorithms"; also for each robust rule and attack."""
    if kind == "rules":
        of_all = {p["name"]: p for p in parameters(Robust)}
        return [
            {"name": name, "idea": rule.idea, "parameters": [of_all[n] for n in (*rule.settings, "bucket")]}
            for name, rule in RULES.items()
        ]
    if kind == "attacks":
        shared = [p for p in parameters(Attack) if p["name"] != "name"]
        return [{"name": name, "idea": idea, "parameters": shared} for name, idea in ATTACKS.items()]
    return [entry(kind, name, member) for name, member in KINDS[kind].members.items()]


def entries_with_plugins(kind: str) -> list[dict[str, Any]]:
    """The stored entries of a kind, then those of what plugins have registered, whose costs are measured."""
    stored, members = stored_entries(kind), KINDS[kind].members if kind in KINDS else {}
    own = {name: member for name, member in members.items() if not is_askews(member)}
    kept = [known for known in stored if known["name"] not in own]
    return [*kept, *(entry(kind, name, member) for name, member in own.items())]


def catalogue_text() -> str:
    """The text of the stored catalogue, from what is registered now; plugins must not be loaded."""
    kinds: dict[str, Any] = {kind: entries(kind) for kind in LISTED}
    optional = {name: kind().table() for name, kind in OPTIONAL_TABLES.items()}
    return json.dumps({**kinds, "optional tables": optional}, ensure_ascii=False, indent=1) + "\n"


def entry(kind: str, name: str, member: type[Settings]) -> dict[str, Any]:
    """What is listed of one member: its name, idea and settings; of an algorithm also its paper, costs and claims."""
    facts: dict[str, Any] = {"name": name}
    if issubclass(member, Algorithm):
        method = member()
        facts |= {"paper": method.paper, "idea": method.idea, **costs(method)._asdict()}
        facts |= {"exact": method.exact, "weighting": method.weighting, "about": documentation(member)}
    else:
        facts["idea"] = KINDS[kind][name].idea
    return facts | {"parameters": parameters(member)}


def documentation(member: type[Settings]) -> str:
    """What the module of a method says of it, with its equations; where it says nothing, what the class does."""
    module, own = sys.modules.get(member.__module__), member.__doc__ or ""
    own = "" if own.startswith(f"{member.__name__}(") else own  # dataclasses put the signature there
    return inspect.cleandoc((module and module.__doc__) or own)


def parameters(member: type[Settings]) -> list[dict[str, Any]]:
    """The settings of a class: its own first, then those of each class above it."""
    kinds = field_types(member)
    above = [cls for cls in member.__mro__ if dataclasses.is_dataclass(cls)]
    depth = {field.name: n for n, cls in enumerate(above) for field in dataclasses.fields(cls)}
    return [
        {
            "name": field.name,
            "type": type_in_words(kinds[field.name]),
            "default": field.default,
            "doc": field.metadata.get("doc", ""),
            "allowed": allowed_values(field, kinds[field.name]),
        }
        for field in sorted(dataclasses.fields(above[0]), key=lambda field: depth[field.name])
    ]


def costs(method: Algorithm) -> Costs:
    """What a method sends and stores, measured in one round of two clients on a small network."""
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
            built = build(config)
            clients = built.fed.eligible.tolist()
            record = built.server.run_round(1, clients)
        except AskewError:
            continue
        space = built.space
        model_bytes = (space.P + space.Q) * space.start.element_size() * len(clients)
        states = (method.server_state(space), method.client_state(space), method.memory(space))
        sizes = [sum(t.numel() for t in state.values()) / space.P for state in states]
        return Costs(record["bytes_down"] / model_bytes, record["bytes_up"] / model_bytes, *sizes)
    return Costs(None, None, None, None, None)
