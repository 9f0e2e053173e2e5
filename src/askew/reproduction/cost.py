"""What runs will cost: samples, seconds and memory, counted from their settings before anything is trained."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from statistics import median
from typing import NamedTuple

import torch

from ..core.algorithm import Algorithm
from ..data import files
from ..errors import ConfigError, UnknownName
from ..experiment import catalogue
from ..experiment.config import Config
from ..models import Network
from ..participation import Bernoulli, CohortParticipation
from .papers import Experiment, configure, find, spanned, tables, words
from .results import Result

# Samples trained a second where a GPU is full of runs, by network: rough, until results say better.
SPEEDS: dict[str, dict[str, float]] = {
    "NVIDIA H200": {
        **dict.fromkeys(("lenet", "lenet_pmvr", "mlp", "softmax", "cnn"), 2e6),
        "cnn64": 5e5,
        "resnet18": 4e4,
    }
}
PRICED = ("rounds", "data", "partition", "participation", "model", "evaluation")  # settings that cost time
TIMES = ("seconds_per_round", "seconds_shared")  # the latter, of a device that is full, where both are there
FORWARD = 3  # a sample that is only evaluated costs a third
SHAPES = {
    "mnist": (1, 28, 28),
    "fashion_mnist": (1, 28, 28),
    "emnist": (1, 28, 28),
    "digits": (1, 8, 8),
    "tiny_imagenet": (3, 64, 64),
}
DIGITS = 1437, 360
ALL, LETTERS = 26, (4800, 800)  # letters of EMNIST; training and test images of each
WINDOWS = 900  # test windows of a role of Shakespeare's, roughly


class Work(NamedTuple):
    """Of one run."""

    trained: int  # samples that are trained on, each as often as it is used
    evaluated: int  # test samples that pass through the network
    rounds: int

    @property
    def weight(self) -> float:
        """In trained samples."""
        return self.trained + self.evaluated / FORWARD


def sizes(config: Config) -> tuple[int, int]:
    """Training and test samples."""
    table, clients = config.tables()["data"], config.partition.clients
    name = table["name"]
    if name == "digits":
        return DIGITS
    if name == "shakespeare":
        return table["samples"] * clients, WINDOWS * clients
    if name == "synthetic":
        return table["samples"] * clients, table["samples"] * clients
    if name not in files.table:
        return 0, 0
    entry, letters = files.table[name], table.get("letters", ALL)
    train, test = (entry.train, entry.test) if letters == ALL else (letters * each for each in LETTERS)
    return table["train"] or train, table["test"] or test


def participants(config: Config) -> float:
    """How many clients a round has, on average."""
    clients, rule = config.partition.clients, config.participation
    if isinstance(rule, CohortParticipation):
        return min(rule.size(clients), clients)
    return rule.fraction * clients if isinstance(rule, Bernoulli) else clients


def work(config: Config) -> Work:
    """By the formula rounds × clients × steps × batch, or rounds × samples × epochs; what varies by chance at its mean."""
    train, test = sizes(config)
    alg, local, clients = config.algorithm, config.local, config.partition.clients
    train -= config.partition.public or (min(1000, train // 10) if "public" in alg.needs else 0)
    share = config.partition.validation
    train = round(train * (1 - (share if share is not None else 0.2 if "validation" in alg.needs else 0)))
    came, clients = (1.0, 1) if alg.pooled else (participants(config), clients)
    own = train / clients
    used = local.steps * min(local.batch or own, own) if local.steps else local.epochs * own
    evaluations = -(-config.rounds // config.evaluation.every)
    alone = alg.evaluates() == "clients" and config.tables()["algorithm"]["name"] == "solo"
    return Work(round(config.rounds * came * used), evaluations * test * (clients if alone else 1), config.rounds)


# seconds --------------------------------------------------------------------------------------------------------


def network(config: Config) -> str:
    return str(config.tables()["model"]["name"])


Speeds = Mapping[tuple[str, str], float]  # trained samples a second by (device, network)


def speeds(results: Iterable[Result] = ()) -> dict[tuple[str, str], float]:
    """The table above, and before it what was measured: the median over cases of a network on a device."""
    told = {(device, net): rate for device, rates in SPEEDS.items() for net, rate in rates.items()}
    timed = {(r.experiment, r.scale, r.case): r for r in sorted(results, key=lambda r: r.metric) if r.metric in TIMES}
    measured: dict[tuple[str, str], list[float]] = {}
    for r in timed.values():
        with suppress(UnknownName, ConfigError):  # of an experiment that has changed since
            points = spanned(find(r.experiment), r.scale, [r.seed])
            point = next(
                (p for p in points if (p.case.name, p.method.name, words(p.hyper)) == (r.case, r.method, r.hyper)), None
            )
            if point:
                config = configure(point, r.scale)
                rate = work(config).trained / config.rounds / max(float(r.value), 1e-9)
                measured.setdefault((r.device.partition(",")[0], network(config)), []).append(rate)
    return told | {key: median(rates) for key, rates in measured.items()}


class Total(NamedTuple):
    """Of all runs of an experiment."""

    runs: int
    samples: int
    seconds: float | None


def total(e: Experiment, scale: str, device: str, rates: Speeds) -> Total:
    """What a whole experiment costs; runs that differ in nothing that matters for it are looked at once."""
    known: dict[str, tuple[Work, str]] = {}
    runs, samples, time = 0, 0, 0.0
    for p in spanned(e, scale) if e.trains else ():
        page = tables(p, scale)
        local = {k: page.get("local", {}).get(k) for k in ("epochs", "steps", "batch")}
        key = json.dumps([page.get(k) for k in PRICED] + [local, page["algorithm"]["name"]], sort_keys=True)
        if key not in known:
            config = configure(p, scale)
            known[key] = work(config), network(config)
        done, net = known[key]
        runs, samples = runs + 1, samples + done.trained
        time += done.weight / rates.get((device, net), math.nan)
    return Total(runs, samples, None if math.isnan(time) else time)


def seconds(configs: Iterable[Config], device: str, rates: Speeds) -> float | None:
    """How long they take there, evaluation included; None where the speed of a network is not known."""
    total = 0.0
    for config in configs:
        rate = rates.get((device, network(config)))
        if rate is None:
            return None
        total += work(config).weight / rate
    return total


# memory ---------------------------------------------------------------------------------------------------------


@cache
def vectors(algorithm: Algorithm) -> tuple[float, float, float]:
    """In multiples of the model: an upload, what one client keeps or is kept of it, what the server keeps."""
    costs = catalogue.costs(algorithm)
    return costs.up or 1.0, (costs.client_state or 0.0) + (costs.memory or 0.0), costs.server_state or 0.0


@cache
def parameters(model: Network, shape: tuple[int, ...], classes: int) -> int:
    """Of a network as it is built for such inputs; where its weights come from does not matter."""
    with torch.random.fork_rng(devices=[]):
        module = replace(model, weights="", new_head=False).build_module(shape, classes)
    return sum(p.numel() for p in module.parameters())


def inputs(config: Config) -> tuple[tuple[int, ...], int]:
    """The shape of a sample and the number of classes."""
    table = config.tables()["data"]
    name, side = table["name"], table.get("crop", 0)
    if name == "synthetic":
        return (table["dim"],), table["labels"]
    if name == "shakespeare":
        return (table["window"],), files.table[name].classes
    channels, *sides = SHAPES.get(name, (3, 32, 32))
    return (channels, *([side, side] if side else sides)), table.get("letters") or (
        files.table[name].classes if name in files.table else 10
    )


def memory(config: Config) -> int:
    """Bytes of the vectors that a run holds: uploads of a round, state of all clients, the server's. Activations and data come on top."""
    up, kept, server = vectors(config.algorithm)
    held = participants(config) * up + config.partition.clients * kept + server + 1
    return round(4 * parameters(config.model, *inputs(config)) * held)
