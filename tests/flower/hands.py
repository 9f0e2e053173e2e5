"""A post that carries letters by hand, within one process, and the small runs that are deployed on it."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from askew.algorithms import algorithms
from askew.core.algorithm import Algorithm
from askew.core.types import State
from askew.errors import AskewError
from askew.experiment.config import Config
from askew.experiment.launch import run_config
from askew.experiment.store import Run
from askew.experiment.toml import to_toml
from askew.flower.client import Client, hello
from askew.flower.client_state import InFile
from askew.flower.deployment_data import DataModule, DeploymentConfig, Home, Node, read_page
from askew.flower.server import Answer, Rules, serve
from askew.flower.wire import Payload, RawPayload, sealed

VARIANTS: dict[str, dict[str, Any]] = {key: {"name": key} for key in algorithms} | {
    "scaffold-I": {"name": "scaffold", "option": "I"},
    "fedga-memory": {"name": "fedga", "form": "memory"},
    "fedpdc-prox": {"name": "fedpdc", "penalty": "prox", "adaptive": True},
    "lossbias-each": {"name": "lossbias", "measure": "mean_over_steps"},
    "fedbn-init": {"name": "fedbn", "eval": "server_init"},
}


def method(table: Mapping[str, Any]) -> Algorithm:
    return algorithms[table["name"]].build({k: v for k, v in table.items() if k != "name"})


def looks(alg: Algorithm) -> bool:
    return any("gradient" in (*phase.before, *phase.each, *phase.after) for phase in alg.phases())


def page(table: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """A small run of a method, with batch norm where the method allows it."""
    norm = "none" if looks(method(table)) else "batch"
    data = {
        "name": "synthetic",
        "dim": 8,
        "labels": 3,
        "samples": 30,
        "sigma": 0.7,
        "alpha": 1.0,
        "beta": 1.0,
        "test_clients": 5,
    }
    return {
        "seed": 3,
        "rounds": 4,
        "data": data,
        "partition": {"name": "natural", "clients": 5},
        "participation": {"name": "uniform", "cohort": 3},
        "model": {"name": "mlp", "hidden": [8], "norm": norm},
        "algorithm": dict(table),
        "local": {
            "epochs": 2,
            "batch": 8,
            "lr": 0.05,
            "momentum": 0.5,
            "weight_decay": 0.01,
            "clip": 1.0,
            "decay": 0.9,
        },
        "evaluation": {"every": 2},
        "engine": {"name": "sequential", "device": "cpu"},
    } | more


def written(tables: dict[str, Any], folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "run.toml"
    path.write_text(to_toml(tables))
    return path


class Hands:
    """A post whose nodes live in this process, one for each client; `change` may spoil an answer, `carry` is the way."""

    def __init__(
        self,
        config: DeploymentConfig,
        folder: Path,
        data: DataModule | None = None,
        carry: Callable[[Payload], RawPayload] = sealed,
        change: Callable[[str, int, Payload, Payload], Answer | Payload | None] | None = None,
        late: Sequence[int] = (),
    ) -> None:
        self.config, self.folder, self.data, self.carry, self.change = config, folder, data, carry, change
        self.there = [100 + i for i in range(1 if config.algorithm.pooled else config.partition.clients)]
        self.late = late  # clients that are not there before the first round
        self.sent = self.received = 0
        self.log: list[tuple[str, int, Payload]] = []
        self.answers: dict[str, Answer] = {}

    def nodes(self) -> list[int]:
        begun = any(kind == "train" for kind, _, _ in self.log)
        return [number for number in self.there if begun or number - 100 not in self.late]

    def node(self, number: int) -> Node:
        return {"partition-id": number - 100}

    def send(self, kind: str, letters: Mapping[int, Payload], group: str, timeout: float) -> dict[str, int]:
        names = {f"{len(self.log) + n}": number for n, number in enumerate(letters)}
        for name, number in names.items():
            letter = letters[number]
            self.log.append((kind, number - 100, letter))
            told = self.answer(kind, number, self.carry(letter))
            told = (
                told if self.change is None or isinstance(told, str) else self.change(kind, number - 100, letter, told)
            )
            self.sent += sealed(letter).bytes
            if isinstance(told, Payload):
                told = self.carry(told)
                self.received += told.bytes
            if told is not None:
                self.answers[name] = told
        return names

    def collect(self, names: Collection[str]) -> dict[str, Answer]:
        return {name: self.answers.pop(name) for name in names if name in self.answers}

    def answer(self, kind: str, number: int, letter: RawPayload) -> Payload | str:
        """As a process of its own would: nothing is remembered but what lies in the client's file."""
        try:
            home = Home(
                self.config, self.node(number), self.data, None if kind == "query" else letter.numbers["classes"]
            )
            return hello(home) if kind == "query" else Client(home, self.place(home)).answer(kind, letter)
        except AskewError as e:
            return str(e)

    def place(self, home: Home) -> InFile:
        return InFile(self.folder / f"client-{home.client}.safetensors")


def deployed(
    tables: dict[str, Any],
    folder: Path,
    rules: Mapping[str, Any] | None = None,
    said: list[str] | None = None,
    **how: Any,
) -> tuple[Run, Hands, list[str]]:
    """A run deployed by hand, and what was said."""
    config = read_page(written(tables, folder / "app"), how.get("data"))
    said = [] if said is None else said
    post = Hands(config, folder / "clients", **how)
    table = {"out": str(folder / "runs"), "wait": 1.0, "timeout": 0.2, "hello": 5.0, **(rules or {})}
    run = serve(config, post, Rules.build(table), post.data, said.append)
    return run, post, said


def simulated(tables: dict[str, Any]) -> Run:
    return run_config(Config.build(tomllib.loads(to_toml(tables))))


def same_model(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], v) for n, v in other.items())


def assert_same_rounds(ours: Run, theirs: Run) -> None:
    """Record by record, but for what depends on the clock and the way; means over clients are taken in another order."""
    assert len(ours.rounds) == len(theirs.rounds)
    for one, other in zip(ours.rounds, theirs.rounds, strict=True):
        assert {k: v for k, v in one.items() if k not in ("seconds", "wire_up", "wire_down", *SCORES)} == {
            k: v for k, v in other.items() if k not in ("seconds", *SCORES)
        }
        for name in SCORES:
            assert one[name] == (None if other[name] is None else pytest.approx(other[name], rel=1e-12))


SCORES = ("accuracy", "loss")
