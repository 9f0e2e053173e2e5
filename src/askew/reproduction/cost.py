"""What runs will cost: samples, seconds and memory, computed from their settings before anything is trained."""

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
from .papers import Experiment, build_config, find_experiment, hyper_text, run_specs, settings_tables
from .results import ResultRow

# Samples trained in a second where a GPU is full of runs, by device and network: rough, until results say better.
ROUGH_SPEEDS: dict[str, dict[str, float]] = {
    "NVIDIA H200": {
        **dict.fromkeys(("lenet", "lenet_pmvr", "mlp", "softmax", "cnn"), 2e6),
        "cnn64": 5e5,
        "resnet18": 4e4,
    }
}
# Tables of a configuration on which the cost of a run depends, besides the length of local training.
COST_TABLES = ("rounds", "data", "partition", "participation", "model", "evaluation")
# Metrics that tell a round's time, in the order of preference: where both are there, the last one, of a full device.
TIME_METRICS = ("seconds_per_round", "seconds_shared")
EVALUATIONS_PER_TRAINING = 3  # samples that are evaluated in the time that one is trained
SHAPES = {  # of a sample; (3, 32, 32) where not listed
    "mnist": (1, 28, 28),
    "fashion_mnist": (1, 28, 28),
    "emnist": (1, 28, 28),
    "digits": (1, 8, 8),
    "tiny_imagenet": (3, 64, 64),
}
DIGITS_SAMPLES = 1437, 360  # training and test
EMNIST_LETTERS = 26
EMNIST_SAMPLES = 4800, 800  # training and test images of each letter
SHAKESPEARE_TEST_SAMPLES = 900  # test windows of one role, roughly


class RunCost(NamedTuple):
    """What one run costs."""

    trained: int  # samples that are trained on, each as often as it is used
    evaluated: int  # test samples that pass through the network
    rounds: int

    @property
    def weight(self) -> float:
        """All of it in trained samples."""
        return self.trained + self.evaluated / EVALUATIONS_PER_TRAINING


def sample_counts(config: Config) -> tuple[int, int]:
    """The numbers of training and test samples of a configuration's data."""
    table, clients = config.tables()["data"], config.partition.clients
    name = table["name"]
    if name == "digits":
        return DIGITS_SAMPLES
    if name == "shakespeare":
        return table["samples"] * clients, SHAKESPEARE_TEST_SAMPLES * clients
    if name == "synthetic":
        return table["samples"] * clients, table["samples"] * clients
    if name not in files.table:
        return 0, 0
    entry, letters = files.table[name], table.get("letters", EMNIST_LETTERS)
    train, test = entry.train, entry.test
    if letters != EMNIST_LETTERS:
        train, test = (letters * each for each in EMNIST_SAMPLES)
    return table["train"] or train, table["test"] or test


def mean_participants(config: Config) -> float:
    """How many clients a round has, on average."""
    clients, rule = config.partition.clients, config.participation
    if isinstance(rule, CohortParticipation):
        return min(rule.size(clients), clients)
    return rule.fraction * clients if isinstance(rule, Bernoulli) else clients


def run_cost(config: Config) -> RunCost:
    """What a run costs; random sizes are taken at their means.

    Trained are rounds × participants × steps × batch samples, or rounds × participants × epochs × a client's samples.
    """
    train, test = sample_counts(config)
    alg, local, clients = config.algorithm, config.local, config.partition.clients
    train -= config.partition.public or (min(1000, train // 10) if "public" in alg.needs else 0)
    validation = config.partition.validation
    if validation is None:
        validation = 0.2 if "validation" in alg.needs else 0
    train = round(train * (1 - validation))
    participants, clients = (1.0, 1) if alg.pooled else (mean_participants(config), clients)
    samples = train / clients  # of one client
    used = local.steps * min(local.batch or samples, samples) if local.steps else local.epochs * samples
    evaluations = -(-config.rounds // config.evaluation.every)
    each_client = alg.evaluates() == "clients" and config.tables()["algorithm"]["name"] == "solo"
    evaluated = evaluations * test * (clients if each_client else 1)
    return RunCost(round(config.rounds * participants * used), evaluated, config.rounds)


def short_count(count: float) -> str:
    """A large number in few letters: "4.31 k", "2 G"."""
    for limit, unit in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if count >= limit:
            return f"{count / limit:.3g}{unit}"
    return f"{count:.0f}"


# seconds --------------------------------------------------------------------------------------------------------


def network_name(config: Config) -> str:
    return str(config.tables()["model"]["name"])


Speeds = Mapping[tuple[str, str], float]  # samples trained in a second, by device and network


def training_speeds(results: Iterable[ResultRow] = ()) -> dict[tuple[str, str], float]:
    """Samples trained in a second by device and network: the median over measured cases, else the rough ones."""
    rough = {(device, net): speed for device, speeds in ROUGH_SPEEDS.items() for net, speed in speeds.items()}
    times = [row for row in sorted(results, key=lambda row: row.metric) if row.metric in TIME_METRICS]
    measured: dict[tuple[str, str], list[float]] = {}
    for row in {(row.experiment, row.scale, row.case): row for row in times}.values():
        with suppress(UnknownName, ConfigError):  # of an experiment that has changed since
            if config := config_of_row(row):
                speed = run_cost(config).trained / config.rounds / max(float(row.value), 1e-9)
                measured.setdefault((row.device.partition(",")[0], network_name(config)), []).append(speed)
    return rough | {key: median(speeds) for key, speeds in measured.items()}


def config_of_row(row: ResultRow) -> Config | None:
    """The configuration of a stored run; None if its experiment has no such run any more."""
    for spec in run_specs(find_experiment(row.experiment), row.scale, [row.seed]):
        if (spec.case.name, spec.method.name, hyper_text(spec.hyper)) == (row.case, row.method, row.hyper):
            return build_config(spec, row.scale)
    return None


class ExperimentCost(NamedTuple):
    """What all runs of an experiment cost."""

    runs: int
    samples: int
    seconds: float | None  # None where the speed of a network is not known


def experiment_cost(e: Experiment, scale: str, device: str, speeds: Speeds) -> ExperimentCost:
    """What a whole experiment costs on a device; of runs that cost the same, one is computed."""
    known: dict[str, tuple[RunCost, str]] = {}
    runs, samples, seconds = 0, 0, 0.0
    for spec in run_specs(e, scale) if e.trains else ():
        tables = settings_tables(spec, scale)
        local = {k: tables.get("local", {}).get(k) for k in ("epochs", "steps", "batch")}
        key = json.dumps([tables.get(k) for k in COST_TABLES] + [local, tables["algorithm"]["name"]], sort_keys=True)
        if key not in known:
            config = build_config(spec, scale)
            known[key] = run_cost(config), network_name(config)
        cost, network = known[key]
        runs, samples = runs + 1, samples + cost.trained
        seconds += cost.weight / speeds.get((device, network), math.nan)
    return ExperimentCost(runs, samples, None if math.isnan(seconds) else seconds)


def estimate_seconds(configs: Iterable[Config], device: str, speeds: Speeds) -> float | None:
    """How long runs take on a device, evaluation included; None where the speed of a network is not known."""
    total = 0.0
    for config in configs:
        speed = speeds.get((device, network_name(config)))
        if speed is None:
            return None
        total += run_cost(config).weight / speed
    return total


# memory ---------------------------------------------------------------------------------------------------------


@cache
def vector_counts(algorithm: Algorithm) -> tuple[float, float, float]:
    """In multiples of the model: one upload, the state of one client (its own and the server's of it), the server's."""
    costs = catalogue.costs(algorithm)
    return costs.up or 1.0, (costs.client_state or 0.0) + (costs.memory or 0.0), costs.server_state or 0.0


@cache
def parameter_count(model: Network, shape: tuple[int, ...], classes: int) -> int:
    """The number of parameters P of a network for such inputs; no file of weights is read."""
    with torch.random.fork_rng(devices=[]):
        module = replace(model, weights="", new_head=False).build_module(shape, classes)
    return sum(p.numel() for p in module.parameters())


def input_shape(config: Config) -> tuple[tuple[int, ...], int]:
    """The shape of a sample and the number of classes."""
    table = config.tables()["data"]
    name, side = table["name"], table.get("crop", 0)
    if name == "synthetic":
        return (table["dim"],), table["labels"]
    if name == "shakespeare":
        return (table["window"],), files.table[name].classes
    channels, *sides = SHAPES.get(name, (3, 32, 32))
    classes = table.get("letters") or (files.table[name].classes if name in files.table else 10)
    return (channels, *([side, side] if side else sides)), classes


def estimate_memory(config: Config) -> int:
    """Bytes of the vectors that a run holds: uploads of a round, states of all clients, the server's.

    Activations and data come on top.
    """
    upload, client_state, server_state = vector_counts(config.algorithm)
    vectors = mean_participants(config) * upload + config.partition.clients * client_state + server_state + 1
    return round(4 * parameter_count(config.model, *input_shape(config)) * vectors)
