"""Generated configurations: every table, every setting. Each one is trained, or refused in one sentence; none hangs.

A configuration is a function of its number alone, so `attempt(1234)` repeats what failed.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import os
import random
import signal
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from askew.core.settings import Settings, field_types
from askew.errors import AskewError
from askew.experiment.config import CHOICES, OPTIONAL_TABLES, TABLES, Config
from askew.experiment.launch import run_config
from askew.experiment.store import to_json
from askew.kernels.cpu import compiler

SECONDS = 60  # of the processor, for one configuration
HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 1.5, -0.5, 0.5, 1e-300, 1e300, -1e300, 1e6, 10**4, 10**9, 10**12, 10**30),
    *(math.nan, math.inf, -math.inf, "", "x", "auto", "1", "\0", "ü/..", "a" * 5000, "/", ".", "[bold]"),
    *([], [1], [0], [-1], [1.5], ["x"], [[1]], [None], [10**9], [8] * 5, {}, {"name": "x"}, {"a": {"b": 1}}),
)
RARE = {  # what takes seconds, needs a file, or is refused on digits
    "data": {*CHOICES["data"]} - {"digits", "synthetic"},
    "model": {"resnet18", "resnet50", "vgg19", "charlstm", "cnn64", "lenet_pmvr"},
    "partition": {"file", "natural"},
    "participation": {"trace"},
}
DEEP = ("resnet18", "resnet50", "vgg19")  # one step of these on a CPU takes as long as a run of the others
WHOLE = (1, 2, 3, 4, 6, 9, 16)
FRACTIONS = (0.0, 1e-3, 0.1, 0.25, 0.5, 0.9, 1.0, 2.0, 10.0)
TOP = {"seed": (0, 1, 7, 10**9), "rounds": (1, 2)}


def valid_value(kind: Any, field: dataclasses.Field[Any], rng: random.Random) -> Any:
    """A value that the field allows by itself: small, or at one of its limits."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if field.metadata.get("choices"):
        return rng.choice(field.metadata["choices"])
    if origin in (typing.Union, types.UnionType):
        return valid_value(rng.choice([arg for arg in args if arg is not type(None)]), field, rng)
    if origin is tuple:
        return [valid_value(args[0], field, rng) for _ in range(rng.randint(1, 2))]
    if kind is bool:
        return rng.random() < 0.5
    if kind not in (int, float):
        return field.default
    limits = field.metadata.get("limits", {})
    low = max([limits[k] for k in ("above", "least") if k in limits], default=-10.0)
    high = min([limits[k] for k in ("below", "most") if k in limits], default=math.inf)
    options = [v for v in (WHOLE if kind is int else FRACTIONS) if low <= v <= high]
    options += [limits[k] for k in ("least", "most") if k in limits and limits[k] <= 16]
    options = [v for v in options if ("above" not in limits or v > low) and ("below" not in limits or v < high)]
    return kind(rng.choice(options)) if options else field.default


def draw_settings(cls: type[Settings], rng: random.Random, share: float) -> dict[str, Any]:
    """Some of a class's settings, each by itself valid."""
    kinds = field_types(cls)
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    drawn = {f.name: valid_value(kinds[f.name], f, rng) for f in fields if rng.random() < share}
    return {name: value for name, value in drawn.items() if value is not None}


def draw_tables(rng: random.Random) -> dict[str, Any]:
    """The tables of a small configuration whose settings are valid one by one."""
    tables: dict[str, Any] = {key: rng.choice(values) for key, values in TOP.items()}
    for name, registry in CHOICES.items():
        names = sorted(registry)
        if name in RARE and rng.random() < 0.95:
            names = [n for n in names if n not in RARE[name]]
        chosen = rng.choice(names)
        tables[name] = {"name": chosen, **draw_settings(registry[chosen], rng, 0.3)}
    tables["partition"]["clients"] = rng.choice((1, 2, 5, 12, 12))
    for name, cls in (TABLES | OPTIONAL_TABLES).items():
        if name not in OPTIONAL_TABLES or rng.random() < 0.2:
            tables[name] = draw_settings(cls, rng, 0.3)
    tables["local"] |= {"epochs": rng.choice((1, 1, 1, 2)), "steps": rng.choice((0, 1, 2, 3))}
    if not tables["local"]["steps"]:  # few steps, whatever the batch
        tables["local"]["batch"] = rng.choice((0, 16, 50, 10**6))
    tables["local"]["lr"] = rng.choice((0.01, 0.1, 1.0, 30.0, 1e6))
    if rng.random() < 0.9:  # what is usually refused, and would hide the rest
        tables["model"].pop("new_head", None)
        tables["local"].pop("decay", None)
        tables["algorithm"].pop("server_lr", None)
        tables["evaluation"].pop("validation", None)
        if tables["data"]["name"] != "digits":  # no images
            tables["partition"].pop("rotation", None)
            tables["model"] = {"name": rng.choice(("mlp", "softmax"))}
        if "time" in tables:
            wait = rng.choice(("all", "deadline", "first", "buffer"))
            used = {"deadline": ("deadline", "late"), "first": ("spare",), "buffer": ("buffer", "at_work")}
            for name in {name for names in used.values() for name in names} - {*used.get(wait, ())}:
                tables["time"].pop(name, None)
            least = {"deadline": {"deadline": 5.0}, "buffer": {"buffer": 1}}
            tables["time"] |= {"wait": wait, **least.get(wait, {})}
        if "privacy" in tables:
            tables["privacy"] |= {"clip": 1.0, "secret_sampling": False}
        faults = tables.get("faults", {})
        faults |= {name: 0.1 for name, value in faults.items() if isinstance(value, float)}
    return tables | {"engine": tables["engine"] | {"device": "cpu", "workers": 1, "compile": rng.random() < 0.02}}


def spoil(tables: dict[str, Any], rng: random.Random) -> None:
    """Put one or two hostile values into tables, in place of a setting, of a whole table, or beside them."""
    fixed = TABLES | OPTIONAL_TABLES
    for _ in range(rng.choice((1, 1, 1, 2))):
        name, value = rng.choice([*CHOICES, *fixed, *TOP, "plugins", "sweep", ""]), copy.deepcopy(rng.choice(HOSTILE))
        inner = tables.get(name)
        if not isinstance(inner, dict) or rng.random() < 0.05:
            tables[name] = value
            continue
        chosen = inner.get("name")
        known = CHOICES[name].members if name in CHOICES and isinstance(chosen, str) else {}
        cls = fixed.get(name) or (known.get(chosen) if isinstance(chosen, str) else None)
        keys = [f.name for f in dataclasses.fields(cls)] if cls else []
        inner[rng.choice([*keys, "name", "x"])] = value


def small(config: Config) -> Config:
    """The configuration with little work, whatever its settings say: much work is not wrong."""
    local = replace(config.local, epochs=min(config.local.epochs, 2), steps=min(config.local.steps, 5))
    engine = replace(config.engine, workers=min(config.engine.workers, 1), device="cpu")
    config = replace(config, rounds=min(config.rounds, 2), local=local, engine=engine)
    if not any(type(config.model) is CHOICES["model"][name] for name in DEEP):
        return config
    local, engine = replace(local, batch=min(local.batch or 4, 4), steps=1), replace(engine, dtype="float32")
    return replace(config, rounds=1, local=local, engine=engine, evaluation=type(config.evaluation)())


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Fail after so many seconds of the processor: other programs do not count."""

    def late(number: int, frame: object) -> None:
        raise AssertionError(f"took longer than {seconds} seconds")

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def generate(number: int) -> dict[str, Any]:
    """The tables of a configuration by its number; every second one has hostile values."""
    rng = random.Random(number)
    tables = draw_tables(rng)
    if number % 2:
        spoil(tables, rng)
    return tables


def attempt(number: int, train: bool = True) -> str:
    """Build and train a configuration; returns "trained", "built", or the sentence with which it was refused."""
    tables = generate(number)
    with limited(SECONDS):
        try:
            config = Config.build(tables)
            if not train:
                return "built"
            config = small(config)
            run = run_config(config)
        except AskewError as e:
            assert str(e) and "\n" not in str(e) and len(str(e)) < 7000, tables
            return str(e)
    assert len(run.rounds) == config.rounds or run.over
    assert isinstance(json.loads(to_json([run.summary(), run.rounds, run.facts])), list)
    return "trained"


def attempt_all(numbers: range, train: bool = True) -> Mapping[str, int]:
    """How many were trained and refused; every other end is listed with its configuration."""
    ends, wrong = {"trained": 0, "built": 0, "refused": 0}, list[str]()
    for number in numbers:
        try:
            end = attempt(number, train)
            ends[end if end in ends else "refused"] += 1
        except Exception as e:
            wrong.append(f"{number}: {type(e).__name__}: {e}\n    {generate(number)}")
    assert not wrong, "\n".join(wrong)
    return ends


@pytest.fixture(autouse=True)
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels have tests of their own, and compiling them for every size takes most of the time."""
    monkeypatch.setattr(compiler, "compiler", lambda: ())
    yield
    for module in [module for name, module in sys.modules.items() if name.startswith("askew.kernels")]:
        for value in vars(module).values():  # what was remembered of missing kernels is not for other tests
            if clear := getattr(value, "cache_clear", None):
                clear()


def test_hostile_values_are_refused_in_one_sentence() -> None:
    ends = attempt_all(range(1, 1001, 2), train=False)
    assert ends["refused"] > 100 and ends["built"] > 5  # a hostile value may be a valid one


@pytest.mark.slow
def test_what_is_built_is_trained_or_refused_in_one_sentence() -> None:
    ends = attempt_all(range(200, 280))
    assert ends["trained"] > 10 and ends["refused"] > 10


@pytest.mark.skipif(os.environ.get("ASKEW_LONG") != "all", reason="takes minutes; ASKEW_LONG=all runs it")
@pytest.mark.parametrize("first", range(0, 10_000, 1000))
def test_ten_thousand_of_them(first: int) -> None:
    print(first, attempt_all(range(first, first + 1000)))
