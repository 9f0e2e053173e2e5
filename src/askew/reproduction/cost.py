"""What runs will cost: samples, seconds and memory, computed from their settings before anything is trained."""

from __future__ import annotations

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from statistics import median, stdev
from typing import NamedTuple

import torch

from ..core.algorithm import Algorithm
from ..data import files
from ..errors import ConfigError, UnknownName
from ..experiment import catalogue
from ..experiment.config import Config
from ..models import Network
from ..participation import Bernoulli, ByClass, CohortParticipation, Poisson, Uneven
from .papers import Experiment, Tables, find_experiment
from .planned_runs import RunSpec, build_config, hyper_text, run_specs, settings_tables
from .provenance import parse_provenance
from .results import PROVENANCE, ResultRow, read_results

# Tables of a configuration on which the cost of a run depends, besides the length of local training.
COST_TABLES = ("rounds", "data", "partition", "participation", "model", "evaluation")
SPEEDS = Path(__file__).with_name("speeds.csv")  # written by docs/generate.py
SPEED_COLUMNS = "device", "network", "engine", "data", "participants", "batch", "steps", "speed", "spread"
RESULTS = Path("results")  # where `askew reproduce` stores results by default
SHARED_TIME, OWN_TIME = "seconds_shared", "seconds_per_round"  # of runs that shared a device, and of one alone
COST_SETTINGS = ("rounds", "local.steps", "local.batch", "local.epochs")  # tuned settings that change a run's cost
USUAL_SPREAD = 0.3  # standard deviation of the logarithm of a speed, where too little was measured
LEAST_SPREAD = 0.1  # of it: machines are never busier or idler by less
RANGE = 1.28  # standard deviations on either side of an estimate: eight of ten lie inside
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
    if config.time.wait == "buffer":
        return config.time.buffer
    if isinstance(rule, CohortParticipation):
        return min(rule.size(clients), clients)
    if isinstance(rule, ByClass):
        return (1 - rule.swing) * (rule.high + rule.low) / 4 * clients
    return rule.fraction * clients if isinstance(rule, Bernoulli | Poisson | Uneven) else clients


@cache
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
    tables = config.tables()
    own_models = tables["algorithm"]["name"] == "solo" or tables["model"].get("norm") == "batch"  # FedBN's own layers
    each_client = alg.evaluates() == "clients" and own_models
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


# network, engine, data, participants, batch, and local steps or, as a negative number, epochs
Workload = tuple[str, str, str, int, int | None, int]


@cache
def workload_of(config: Config) -> Workload:
    """What a run's speed depends on: runs with the same workload are about as fast."""
    local = config.local
    batch = int(local.batch) if local.batch else None
    return (
        network_name(config),
        config.engine.name,  # clients one after another, where an experiment wants it, are many times slower
        str(config.tables()["data"]["name"]),
        1 if config.algorithm.pooled else round(mean_participants(config)),
        batch,
        local.steps or -round(local.epochs),
    )


class Estimate(float):
    """A time in seconds that was computed from measured speeds, with a range: eight of ten times lie inside."""

    low: float
    high: float

    def __new__(cls, seconds: float, low: float, high: float) -> Estimate:
        self = super().__new__(cls, seconds)
        self.low, self.high = low, high
        return self


class MeasuredSpeed(NamedTuple):
    """Samples trained in a second on a device, and the standard deviation of their logarithm."""

    speed: float
    spread: float


class TimedBatch(NamedTuple):
    """Runs that shared a device at one time: their samples of a round, together, and the seconds of it."""

    samples: float
    seconds: float
    rounds: int
    workloads: frozenset[Workload]
    date: str = ""  # on which they were stored, if it is known

    @property
    def speed(self) -> float:
        return self.samples / self.seconds


class Speeds:
    """Measured speeds by device: of every workload that was run, and of every network."""

    def __init__(self, workloads: Mapping[tuple[str, Workload], MeasuredSpeed]) -> None:
        """`workloads` are by device and workload."""
        self.workloads = dict(workloads)
        self.networks: dict[tuple[str, str, str], MeasuredSpeed] = {}  # by device, network and engine
        by_network: dict[tuple[str, str, str], list[MeasuredSpeed]] = {}
        for (device, workload), measured in self.workloads.items():
            by_network.setdefault((device, *workload[:2]), []).append(measured)
        usual = typical_spread([[each.speed for each in its] for its in by_network.values()])
        for key, its in by_network.items():
            speeds = [each.speed for each in its]
            # of another workload no more is known than of one of these
            spread = max(usual, log_spread(speeds) or 0.0, median(each.spread for each in its))
            self.networks[key] = MeasuredSpeed(median(speeds), spread)

    @classmethod
    def measured(cls, batches: Mapping[str, Sequence[TimedBatch]]) -> Speeds:
        """The speeds that these batches, by device, show."""
        own = list[tuple[str, Workload, list[TimedBatch]]]()
        for device, its in batches.items():
            for workload in {w for batch in its for w in batch.workloads}:
                own.append((device, workload, newest([batch for batch in its if workload in batch.workloads])))
        usual = typical_spread([[b.speed for b in its] for _, _, its in own])
        found: dict[tuple[str, Workload], MeasuredSpeed] = {}
        for device, workload, its in own:
            speed = sum(b.samples * b.rounds for b in its) / sum(b.seconds * b.rounds for b in its)
            spread = log_spread([b.speed for b in its]) or usual
            found[device, workload] = MeasuredSpeed(speed, max(LEAST_SPREAD, spread))
        return cls(found)

    def find(self, device: str, config: Config) -> MeasuredSpeed | None:
        """The speed of a run: of its own workload, else of other workloads with its network; None if unknown."""
        workload = workload_of(config)
        return self.workloads.get((device, workload)) or self.networks.get((device, *workload[:2]))


@cache
def known_speeds() -> Mapping[tuple[str, Workload], MeasuredSpeed]:
    """The speeds that come with askew: those that its own stored results show."""
    found: dict[tuple[str, Workload], MeasuredSpeed] = {}
    with SPEEDS.open(encoding="utf-8", newline="") as file:
        for device, network, engine, data, participants, batch, steps, speed, spread in islice(
            csv.reader(file), 1, None
        ):
            workload = network, engine, data, int(participants), int(batch) if batch else None, int(steps)
            found[device, workload] = MeasuredSpeed(float(speed), float(spread))
    return found


def speeds_text(results: Iterable[ResultRow]) -> str:
    """The text of the file of speeds that comes with askew, from stored results."""
    speeds, file = measured_speeds(results).workloads, io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(SPEED_COLUMNS)
    for (device, workload), measured in sorted(speeds.items(), key=lambda item: (item[0][0], str(item[0][1]))):
        writer.writerow([device, *workload, f"{measured.speed:.4g}", f"{measured.spread:.3g}"])
    return file.getvalue()


def newest(batches: Sequence[TimedBatch]) -> list[TimedBatch]:
    """The batches of the last day: askew was slower before."""
    last = max(batch.date for batch in batches)
    return [batch for batch in batches if batch.date == last]


def log_spread(speeds: Sequence[float]) -> float | None:
    """The standard deviation of the logarithms; None of fewer than two."""
    return stdev(map(math.log, speeds)) if len(speeds) > 1 else None


def typical_spread(groups: Sequence[Sequence[float]]) -> float:
    """The root mean square of the groups' spreads; a usual value where no group has two speeds."""
    spreads = [spread for speeds in groups if (spread := log_spread(speeds)) is not None]
    return math.sqrt(sum(spread**2 for spread in spreads) / len(spreads)) if spreads else USUAL_SPREAD


def training_speeds(results: Iterable[ResultRow] | None = None) -> Speeds:
    """The speeds that stored results show, those of the folder `results` where none are given; of workloads that are
    not among these, the speeds that come with askew.
    """
    rows = read_results(RESULTS, leave_out=True) if results is None else results
    return Speeds({**known_speeds(), **measured_speeds(rows).workloads})


def measured_speeds(rows: Iterable[ResultRow]) -> Speeds:
    """The speeds that stored results show."""
    rows = list(rows)
    timed = [row for row in rows if row.metric in (SHARED_TIME, OWN_TIME) and float(row.value) > 0]
    dates = {row.run: parse_provenance(row.value).date or "" for row in rows if row.metric == PROVENANCE}
    find, batches = StoredConfigs(), dict[tuple[str, ...], list[tuple[ResultRow, Config]]]()
    for row in timed:
        if config := find(row):
            # runs of one batch have one time, which was divided equally among them; runs alone have each their own
            key = row.experiment, row.scale, row.device, row.metric, row.value
            batches.setdefault(key, []).append((row, config))
    found: dict[str, dict[str, list[TimedBatch]]] = {}  # by device and metric
    for (_, _, device, metric, value), runs in batches.items():
        costs = [run_cost(config) for _, config in runs]
        samples = sum(cost.trained / cost.rounds for cost in costs)
        workloads = frozenset(workload_of(config) for _, config in runs)
        date = max(dates.get(row.run, "") for row, _ in runs)
        batch = TimedBatch(samples, len(runs) * float(value), costs[0].rounds, workloads, date)
        found.setdefault(device.partition(",")[0], {}).setdefault(metric, []).append(batch)
    return Speeds.measured({device: preferred_batches(by_metric) for device, by_metric in found.items()})


def preferred_batches(by_metric: Mapping[str, Sequence[TimedBatch]]) -> list[TimedBatch]:
    """Batches that shared a device; those alone, which leave it half idle, only of workloads that no other has."""
    shared = list(by_metric.get(SHARED_TIME, ()))
    known = {workload for batch in shared for workload in batch.workloads}
    return shared + [batch for batch in by_metric.get(OWN_TIME, ()) if not batch.workloads & known]


class StoredConfigs:
    """Finds configurations of stored runs; of runs that cost the same, one is built."""

    def __init__(self) -> None:
        self.specs: dict[tuple[str, str], dict[tuple[str, ...], RunSpec]] = {}  # by experiment and scale
        self.built: dict[tuple[str, ...], Config] = {}

    def __call__(self, row: ResultRow) -> Config | None:
        """The configuration of a row's run, up to its seed and rates; None if its experiment has changed since."""
        at = row.experiment, row.scale
        if at not in self.specs:
            self.specs[at] = {}
            with suppress(UnknownName, ConfigError):
                for spec in run_specs(find_experiment(row.experiment), row.scale, [0]):
                    lengths = cost_settings(hyper_text(spec.hyper))
                    self.specs[at].setdefault((spec.case.name, spec.method.name, lengths), spec)
        key = row.case, row.method, cost_settings(row.hyper)
        if key not in self.specs[at]:
            return None
        if (*at, *key) not in self.built:
            self.built[*at, *key] = build_config(self.specs[at][key], row.scale)
        return self.built[*at, *key]


def cost_settings(hyper: str) -> str:
    """The part of a grid point, as text, on which the cost of a run depends."""
    return " ".join(item for item in hyper.split() if item.partition("=")[0] in COST_SETTINGS)


class ExperimentCost(NamedTuple):
    """What all runs of an experiment cost."""

    runs: int
    samples: int
    seconds: Estimate | None  # None where the speed of a network is not known


def experiment_cost(e: Experiment, scale: str, device: str, speeds: Speeds) -> ExperimentCost:
    """What a whole experiment costs on a device; of runs that cost the same, one is computed."""
    known: dict[str, tuple[Config, RunCost]] = {}
    counts: dict[str, int] = {}
    keys: dict[tuple[str, str, str, str], str] = {}  # of all seeds of a grid point
    for spec in run_specs(e, scale) if e.trains else ():
        point = spec.experiment.id, spec.case.name, spec.method.name, repr(spec.hyper)
        if point not in keys:
            keys[point] = cost_key(settings_tables(spec, scale))
        key = keys[point]
        if key not in known:
            config = build_config(spec, scale)
            known[key] = config, run_cost(config)
        counts[key] = counts.get(key, 0) + 1
    total = sum_estimates(
        scale_estimate(run_seconds(config, device, speeds, cost), counts[key]) for key, (config, cost) in known.items()
    )
    samples = sum(counts[key] * cost.trained for key, (_, cost) in known.items())
    return ExperimentCost(sum(counts.values()), samples, total)


def cost_key(tables: Tables) -> str:
    """The settings of a run on which its cost depends, as text."""
    local = {k: tables.get("local", {}).get(k) for k in ("epochs", "steps", "batch")}
    return json.dumps([tables.get(k) for k in COST_TABLES] + [local, tables["algorithm"]["name"]], sort_keys=True)


def estimate_seconds(configs: Iterable[Config], device: str, speeds: Speeds) -> Estimate | None:
    """How long runs take on a device, evaluation included; None where the speed of a network is not known."""
    return run_times(configs, device, speeds).seconds


class RunTimes(NamedTuple):
    """How long runs take on a device, as far as their networks were timed there."""

    timed: Estimate  # of runs whose network was timed
    untimed: Mapping[str, int]  # how many others there are of each network

    @property
    def seconds(self) -> Estimate | None:
        """Of all of them; None where that is not known."""
        return None if self.untimed else self.timed


def run_times(configs: Iterable[Config], device: str, speeds: Speeds) -> RunTimes:
    """How long runs take on a device, evaluation included."""
    known, untimed = list[Estimate](), Counter[str]()
    for config in configs:
        seconds = run_seconds(config, device, speeds)
        if seconds is None:
            untimed[network_name(config)] += 1
        else:
            known.append(seconds)
    return RunTimes(sum_known(known), untimed)


def run_seconds(config: Config, device: str, speeds: Speeds, cost: RunCost | None = None) -> Estimate | None:
    """How long one run takes on a device; None where the speed of its network is not known."""
    measured = speeds.find(device, config)
    if measured is None:
        return None
    seconds, wide = (cost or run_cost(config)).weight / measured.speed, math.exp(RANGE * measured.spread)
    return Estimate(seconds, seconds / wide, seconds * wide)


def scale_estimate(estimate: Estimate | None, times: float) -> Estimate | None:
    """An estimate so many times over; None of None."""
    return estimate and Estimate(times * estimate, times * estimate.low, times * estimate.high)


def sum_estimates(estimates: Iterable[Estimate | None]) -> Estimate | None:
    """The sum, as of those that are known; None if one is not."""
    given = list(estimates)
    known = [each for each in given if each is not None]
    return sum_known(known) if len(known) == len(given) else None


def sum_known(estimates: Sequence[Estimate]) -> Estimate:
    """The sum, whose range is that of estimates that are all too low or all too high."""
    return Estimate(sum(estimates), sum(each.low for each in estimates), sum(each.high for each in estimates))


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
