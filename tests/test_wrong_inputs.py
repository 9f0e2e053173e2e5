"""Wrong inputs: each gets one sentence that says what was wrong, what is allowed and what to do; never a traceback."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from io import BytesIO, IOBase
from pathlib import Path
from typing import IO

import numpy as np
import pytest
import torch

from askew.cli.main import main
from askew.data import files
from askew.experiment import cores
from askew.experiment.config import CHOICES
from askew.experiment.store import read_json, write_json

QUICK = "--quiet --set rounds=2 --set model.name=softmax --set partition.clients=5"
Says = tuple[str, str, str]  # fragments of the sentence: the culprit, what is allowed, what to do
Setup = Callable[[Path, pytest.MonkeyPatch], object]


@dataclass(frozen=True)
class Case:
    """A command line (RUN stands for a finished run of QUICK), what is prepared for it, and what its sentence says."""

    id: str
    arguments: tuple[str, ...]
    says: Says
    setup: Setup | None = None


def case(id: str, line: str, wrong: str, allowed: str, advice: str, setup: Setup | None = None) -> Case:
    return Case(id, tuple(line.split()), (wrong, allowed, advice), setup)


def setting(change: str, *says: str) -> Case:
    """`askew run` with these settings."""
    return case(change, "run --quiet " + " ".join(f"--set {each}" for each in change.split()), *says)


def file(name: str, content: str | bytes) -> Setup:
    data = content.encode() if isinstance(content, str) else content

    def write(here: Path, patch: pytest.MonkeyPatch) -> None:
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_bytes(data)

    return write


def reading(key: str, name: str, content: object, *says: str, more: str = "") -> Case:
    """`askew run` with a setting that names a file of this content: bytes, an array, tensors by name, else JSON."""
    sets = " ".join(f"--set {each}" for each in (f"{key}={name}", *more.split()))
    return case(f"{key} {content!s:.30}", f"run --quiet {sets}", *says, setup=file(name, saved(content)))


def saved(content: object) -> bytes:
    buffer = BytesIO()
    if isinstance(content, np.ndarray):
        np.save(buffer, content)
    elif isinstance(content, dict):
        torch.save(content, buffer)
    else:
        return content if isinstance(content, bytes) else json.dumps(content).encode()
    return buffer.getvalue()


def toml_file(id: str, content: str | bytes, *says: str) -> Case:
    """`askew run` with this file."""
    return case(f"file: {id}", "run wrong.toml", *says, setup=file("wrong.toml", content))


def plugin(id: str, content: str, *says: str, more: str = "") -> Case:
    """`askew run` with this plugin."""
    return case(f"plugin: {id}", f"run --quiet --plugin own.py {more}", *says, setup=file("own.py", content))


def damage(name: str, change: Callable[[str], str | bytes]) -> Setup:
    """Change a file of the finished run."""

    def spoil(here: Path, patch: pytest.MonkeyPatch) -> None:
        path = next((here / "runs").iterdir()) / name
        content = change(path.read_text())
        path.write_bytes(content.encode() if isinstance(content, str) else content)

    return spoil


def unfinished(here: Path, patch: pytest.MonkeyPatch) -> None:
    """The run was stopped after a round, and what it left to go on from is broken."""
    folder = next((here / "runs").iterdir())
    log = folder / "rounds.jsonl"
    log.write_text(log.read_text().splitlines(keepends=True)[0])
    write_json(folder / "run.json", read_json(folder / "run.json") | {"state": "interrupted"})
    (folder / "checkpoint.safetensors").write_bytes(b"not tensors")


def locked(here: Path, patch: pytest.MonkeyPatch) -> IO[str]:
    """Somebody else writes the run."""
    lock = (next((here / "runs").iterdir()) / ".lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def two_cores(here: Path, patch: pytest.MonkeyPatch) -> None:
    """The machine has two cores, and more processes are refused, as they are outside of tests."""
    patch.delenv(cores.MANY, raising=False)
    patch.setattr(cores, "own_cores", lambda: 2)


def full_disk(here: Path, patch: pytest.MonkeyPatch) -> None:
    def replace(source: object, target: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    patch.setattr(os, "replace", replace)


def full_disk_later(here: Path, patch: pytest.MonkeyPatch) -> None:
    """There is room for the first files, none for the rounds."""

    def no_room(path: object, mode: str = "r", encoding: str | None = None) -> object:
        if mode == "a":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return open(str(path), mode, encoding=encoding)

    patch.setattr("askew.experiment.store.open", no_room, raising=False)


METHOD = """import askew
from askew.algorithms import FedAvg

@askew.register("own")
class Own(FedAvg):
    def {hook}
"""
NETWORK = """import askew
from torch import nn

@askew.register("own")
class Own(askew.Network):
    def module(self, shape, classes):
        return nn.Sequential(nn.Flatten(), {layers})
"""
TEXT = """import askew, torch

@askew.register("own")
class Own(askew.Source):
    def load(self, seed, clients):
        part = askew.Samples(torch.arange(400).reshape(100, 4) % 9, torch.arange(100) % 9)
        return askew.Dataset(part, part, 9)
"""
OWN_TEXT = "--set data.name=own --set partition.name=iid"
TRACE, SPLIT = "participation.name=trace", "partition.name=file"
BODY = {"fc1.weight": torch.zeros(64, 64), "fc1.bias": torch.zeros(64)}
SEVEN = BODY | {"out.weight": torch.zeros(7, 64), "out.bias": torch.zeros(7)}

CASES = [
    # names and keys
    setting("algorithm.name=fedavgg", "unknown algorithm 'fedavgg'", "fedavg, fedavgm,", "did you mean 'fedavg'?"),
    setting("data.name=digit", "unknown dataset 'digit'", "Known: cifar10,", "did you mean 'digits'?"),
    setting("model.name=mpl", "unknown model 'mpl'", "Known: charlstm,", "did you mean 'mlp'?"),
    setting(
        "partition.name=dirichelt", "unknown partition 'dirichelt'", "Known: dirichlet,", "did you mean 'dirichlet'?"
    ),
    setting("participation.name=unifrom", "unknown participation 'unifrom'", "full,", "did you mean 'uniform'?"),
    setting(
        "engine.name=vmaped",
        "unknown name 'vmaped'",
        "Known: auto, sequential, slots, stacked, vmapped",
        "did you mean 'vmapped'?",
    ),
    setting("algorithm.name=zzz", "unknown algorithm 'zzz'", "known: ", "choose one of them"),
    setting("rouns=3", "unknown setting 'rouns'", "Known: algorithm,", "did you mean 'rounds'?"),
    setting("local.schedule=constant", "unknown schedule 'constant'", "linear", "for a constant rate leave it out"),
    setting("local.lrr=0.1", "unknown setting local.lrr", "Known: batch,", "did you mean 'lr'?"),
    setting(
        "algorithm.servr_lr=0.1", "unknown setting algorithm.servr_lr", "Known: server_lr,", "did you mean 'server_lr'?"
    ),
    setting("data.alpha=1", "unknown setting data.alpha", "none is known here", "leave it out"),
    setting("model.hiden=[3]", "unknown setting model.hiden", "Known: head, hidden,", "did you mean 'hidden'?"),
    setting("partition.alhpa=1", "unknown setting partition.alhpa", "Known: alpha,", "did you mean 'alpha'?"),
    setting(
        "participation.fracton=1",
        "unknown setting participation.fracton",
        "Known: cohort, dropout,",
        "did you mean 'fraction'?",
    ),
    setting(
        "evaluation.evry=2", "unknown setting evaluation.evry", "Known: descent, drift, every,", "did you mean 'every'?"
    ),
    setting(
        "engine.devise=cpu", "unknown setting engine.devise", "Known: compile, deterministic,", "did you mean 'device'?"
    ),
    setting("local.lr.x=1", "unknown setting local.lr.x", "Known: batch,", "did you mean 'lr'?"),
    setting("[bold]x=1", "unknown setting '[bold]x'", "known: algorithm,", "choose one of them"),
    # types
    setting("rounds=abc", "rounds", "must be a whole number, got 'abc'", "the default is 30"),
    setting("rounds=2.5", "rounds", "must be a whole number, got 2.5", "the default is 30"),
    setting("rounds=true", "rounds", "must be a whole number, got true", "the default is 30"),
    setting("local.lr=fast", "local: lr", "must be a number, got 'fast'", "try 0.1"),
    setting("local.lr=nan", "local: lr", "must be a number, got nan", "try 0.1"),
    setting("local.lr=", "local: lr", "must be a number, got ''", "try 0.1"),
    setting("algorithm.name=3", "algorithm.name", "must be a text in quotes, got 3", "fedavg, fedavgm,"),
    setting(
        "model.hidden=64", "MLP: hidden", "must be a list, each item a whole number, got 64", "the default is [64]"
    ),
    setting("model.hidden=[1.5]", "MLP: hidden", "each item a whole number, got [1.5]", "the default is [64]"),
    setting("partition.cap=1", "Dirichlet: cap", "must be true or false, got 1", "the default is true"),
    setting(
        "evaluation.spread=maybe", "evaluation: spread", "must be true or false, got 'maybe'", "the default is false"
    ),
    setting("engine.device=3", "engine: device", "must be a text in quotes, got 3", "the default is 'auto'"),
    setting("plugins=3", "plugins", "must be a list, each item a text in quotes, got 3", "the default is []"),
    setting(
        "algorithm=fedprox", "algorithm", "is a table of settings, got 'fedprox'", "write algorithm.name = 'fedprox'"
    ),
    setting("local=3", "local", "is a table of settings, got 3", "write local."),
    setting("seed.x=1", "seed", "must be a whole number, got {'x': 1}", "the default is 0"),
    setting("seed=1 seed.x=2", "--set seed.x", "is a single value, not a table", "write --set seed=VALUE"),
    # ranges
    setting("rounds=0", "rounds", "must be ≥ 1, got 0", "the default is 30"),
    setting("seed=-1", "seed", "must be ≥ 0, got -1", "the default is 0"),
    setting("local.lr=-0.1", "local: lr", "must be > 0 and ≤ 1e+06, got -0.1", "try 0.1"),
    setting("local.lr=0", "local: lr", "must be > 0 and ≤ 1e+06, got 0", "try 0.1"),
    setting("local.lr=inf", "local: lr", "≤ 1e+06, got inf", "try 0.1"),
    setting("local.momentum=1", "local: momentum", "must be ≥ 0 and < 1, got 1", "the default is 0"),
    setting("local.decay=0", "local: decay", "must be > 0 and ≤ 1, got 0", "the default is 1"),
    setting("local.decay=1.5", "local: decay", "must be > 0 and ≤ 1, got 1.5", "the default is 1"),
    setting("local.batch=-1", "local: batch", "must be ≥ 0, got -1", "the default is 32"),
    setting("local.epochs=0", "local: epochs", "must be ≥ 1", "the default is 1"),
    setting("local.weight_decay=-1", "local: weight_decay", "must be ≥ 0, got -1", "the default is 0"),
    setting("evaluation.every=0", "evaluation: every", "must be ≥ 1, got 0", "the default is 1"),
    setting("partition.clients=0", "Dirichlet: clients", "must be ≥ 1, got 0", "the default is 30"),
    setting("partition.alpha=0", "Dirichlet: alpha", "must be > 0, got 0", "the default is 0.2"),
    setting("participation.fraction=0", "Uniform: fraction", "must be > 0 and ≤ 1, got 0", "the default is 0.2"),
    setting("participation.fraction=1.5", "Uniform: fraction", "must be > 0 and ≤ 1, got 1.5", "the default is 0.2"),
    setting("algorithm.name=fedcm algorithm.alpha=0", "FedCM: alpha", "must be > 0 and ≤ 1, got 0", "try 0.1"),
    setting("algorithm.name=fedcm algorithm.alpha=2", "FedCM: alpha", "must be > 0 and ≤ 1, got 2", "try 0.1"),
    setting("algorithm.name=feddyn algorithm.alpha=-1", "FedDyn: alpha", "must be ≥ 0, got -1", "try 0.01"),
    setting(
        "algorithm.server_lr=0",
        "FedAvg: server_lr",
        "must be a number > 0, or left out, got 0",
        "leave it out for the default",
    ),
    setting("engine.dtype=float16", "engine: unknown dtype 'float16'", "Known: bf16, float32, float64", "did you mean"),
    setting("engine.workers=-1", "engine: workers", "must be ≥ 0 and ≤ 128, got -1", "the default is 0"),
    case(
        "too many workers", "run --workers 200", "engine: workers", "must be ≥ 0 and ≤ 128, got 200", "the default is 0"
    ),
    setting("engine.device=gpu", "unknown device 'gpu'", "allowed are auto, cpu, cuda and cuda:N", "Try auto"),
    setting("engine.device=cuda:99", "there is no device 'cuda:99' here", "CUDA devices", "use auto or cpu"),
    case(
        "no cuda",
        "run --set engine.device=cuda",
        "there is no device 'cuda' here",
        "0 CUDA devices",
        "use auto or cpu",
        lambda here, patch: patch.setattr(torch.cuda, "device_count", lambda: 0),
    ),
    # combinations
    setting(
        "algorithm.server_lr=0.1 algorithm.server_scale=2",
        "FedAvg",
        "server_scale or server_lr, not both",
        "Leave one out",
    ),
    setting(
        "algorithm.name=feddpc algorithm.projection=false",
        "FedDPC",
        "scaling without projection is not defined",
        "set scaling = false",
    ),
    setting(
        "participation.cohort=31",
        "Uniform: cohort",
        "at most the number of clients, 30, got 31",
        "lower participation.cohort",
    ),
    setting(
        "partition.min_size=500",
        "1437 samples cannot give 30 clients",
        "at most 47 is possible",
        "lower partition.min_size",
    ),
    setting("partition.min_size=40", "partition.min_size = 40", "never had more than", "set partition.min_size to"),
    setting(
        "partition.name=natural",
        "natural partition",
        "does not come divided among clients",
        'set partition.name to "iid" or "dirichlet"',
    ),
    setting("data.name=synthetic model.name=cnn", "cnn", "needs images", "use mlp or softmax"),
    setting("model.hidden=[]", "MLP: hidden", "must be one width ≥ 1 or several, got []", "use softmax"),
    setting("model.norm=group model.hidden=[3]", 'norm = "group"', "needs even widths", "try [64]"),
    # datasets
    setting("data.name=cifar", "unknown dataset 'cifar'", "Known: cifar10, cifar100,", "did you mean 'cifar10'?"),
    setting(
        "data.name=cifar10",
        "cifar10: its files are not in",
        "run `askew data get cifar10`",
        "or put cifar-10-binary.tar.gz",
    ),
    setting(
        "data.name=tiny_imagenet",
        "tiny_imagenet: its files are not in",
        "askew data get",
        "or put tiny-imagenet-200.zip into",
    ),
    setting(
        "data.name=shakespeare", "shakespeare: its files are not in", "askew data get", "or put shakespeare/pg100.txt"
    ),
    setting("data.name=cifar10 data.train=-1", "Cifar10: train", "must be ≥ 0, got -1", "the default is 0"),
    setting("data.name=cifar10 data.crop=-1", "Cifar10: crop", "must be ≥ 0, got -1", "the default is 0"),
    setting("data.name=cifar10 data.pad=1.5", "Cifar10: pad", "must be a whole number, got 1.5", "the default is 0"),
    setting("data.name=cifar10 data.turn=200", "Cifar10: turn", "must be ≥ 0 and ≤ 180, got 200", "the default is 0"),
    setting("data.name=cifar10 data.chance=1.5", "Cifar10: chance", "must be ≥ 0 and ≤ 1, got 1.5", "the default is 1"),
    setting(
        "data.name=cifar10 data.fill=grey", "unknown fill 'grey'", "known: black, mean, reflect", "choose one of them"
    ),
    setting(
        "data.name=cifar10 data.normalise=mean",
        "unknown normalise 'mean'",
        "known: channels, half, unit",
        "choose one of them",
    ),
    setting(
        "data.name=cifar10 data.flip=yes", "Cifar10: flip", "must be true or false, got 'yes'", "the default is false"
    ),
    setting("data.name=cifar10 data.chance=0.5", "Cifar10: chance", "nothing cuts them", "set crop or pad"),
    setting(
        "data.name=cifar10 data.frozen=true", "Cifar10: frozen", "needs a random change", "set crop, pad, flip or turn"
    ),
    setting(
        "data.name=cifar10 data.random_test=true",
        "Cifar10: random_test",
        "needs a random change",
        "set crop, pad, flip or turn",
    ),
    setting(
        "data.name=cifar10 data.fill=reflect", 'fill = "reflect"', "says what padding is, and there is none", "set pad"
    ),
    setting(
        "data.name=cifar10 data.pad=4 data.fill=mean data.frozen=true",
        'fill = "mean"',
        "stay bytes",
        'use "black" or "reflect"',
    ),
    setting("data.name=mnist data.letters=10", "unknown setting data.letters", "Known: chance, crop,", "did you mean"),
    setting("data.name=emnist data.letters=27", "Emnist: letters", "must be ≥ 2 and ≤ 26, got 27", "the default is 26"),
    setting("data.name=shakespeare data.samples=-1", "Shakespeare: samples", "must be ≥ 0, got -1", "the default is 0"),
    setting(
        "data.name=shakespeare data.share=1", "Shakespeare: share", "must be > 0 and < 1, got 1", "the default is 0.9"
    ),
    setting(
        "data.name=shakespeare data.window=0", "Shakespeare: window", "≥ 1 and ≤ 10000, got 0", "the default is 80"
    ),
    setting(
        "data.name=shakespeare data.vocabulary=all",
        "unknown vocabulary 'all'",
        "known: leaf, seen",
        "choose one of them",
    ),
    *(
        case(
            f"data: tampered, {line:.8}",
            line,
            "pg100.txt has the MD5",
            "and the published one",
            "remove it and run `askew data get shakespeare`",
            file("data/shakespeare/pg100.txt", "Enter GHOST."),
        )
        for line in ("run --quiet --set data.name=shakespeare --set model.name=charlstm", "data get shakespeare")
    ),
    # partitions
    setting(
        "partition.name=dirichlet_prior partition.alpha=0",
        "DirichletPrior: alpha",
        "must be > 0, got 0",
        "the default is 0.6",
    ),
    setting(
        "partition.name=dirichlet_prior partition.sigma=-1",
        "DirichletPrior: sigma",
        "≥ 0 and ≤ 100, got -1",
        "the default is 0",
    ),
    setting(
        "partition.name=dirichlet_prior partition.min_size=3",
        "partition.min_size",
        "known: alpha,",
        "choose one of them",
    ),
    setting(
        "partition.name=lognormal partition.sigma=101",
        "Lognormal: sigma",
        "≥ 0 and ≤ 100, got 101",
        "the default is 0.3",
    ),
    setting(
        "partition.name=lognormal partition.clients=2000",
        "among 2,000 clients",
        "one each at least",
        "lower partition.clients",
    ),
    setting("partition.name=labels partition.labels=0", "labels", "must be ≥ 1, got 0", "the default is 5"),
    setting(
        "partition.name=labels partition.labels=11",
        "partition.labels = 11",
        "of 10 classes",
        "set partition.labels to 10 or less",
    ),
    setting(
        "partition.name=labels partition.clients=500",
        "give 500 clients",
        "partition.labels = 5",
        "lower partition.labels or",
    ),
    setting(
        "partition.name=labels partition.labels=1 partition.balanced=true partition.clients=5",
        "5 clients of 1 label",
        "need 10 to 50 places",
        "change partition.labels",
    ),
    setting("partition.name=shards partition.shards=0", "Shards: shards", "must be ≥ 1, got 0", "the default is 2"),
    setting(
        "partition.name=shards partition.shards=100",
        "30 × partition.shards = 100",
        "1,437 samples cannot",
        "lower partition.shards",
    ),
    setting(
        "partition.name=iid partition.alpha=1",
        "unknown setting partition.alpha",
        "known: balanced,",
        "choose one of them",
    ),
    setting(
        "partition.name=iid partition.balanced=1",
        "Iid: balanced",
        "must be true or false, got 1",
        "the default is false",
    ),
    setting("partition.noise=-1", "Dirichlet: noise", "must be ≥ 0, got -1", "the default is 0"),
    setting("partition.rotation=left", "Dirichlet: rotation", "must be a number, got 'left'", "the default is 0"),
    setting(
        "data.name=synthetic partition.rotation=45", "rotation", "needs images [channels,", "set partition.rotation = 0"
    ),
    setting(
        "partition.overlap=true partition.noise=0.1",
        "partition.noise",
        "share no sample",
        "set partition.overlap = false",
    ),
    setting("partition.validation=1", "Dirichlet: validation", "≥ 0 and < 1, or left out, got 1", "leave it out"),
    setting("partition.public=-1", "Dirichlet: public", "a whole number ≥ 0, or left out, got -1", "leave it out"),
    setting("partition.public=2000", "partition.public", "less than the 1,437 training samples, got 2,000", "lower it"),
    setting("algorithm.name=fedpdc partition.public=0", "partition.public = 0", "needs public data", "set 1 or more"),
    setting(SPLIT, "partition.json cannot be read", "No such file", "check partition.path"),
    setting(
        f"{SPLIT} partition.path=split.csv",
        "FromFile: path",
        "a .json or .npy file, got 'split.csv'",
        "save the split as one",
    ),
    reading(
        "partition.path",
        "s.json",
        b"[[1,",
        "s.json is no valid .json file",
        "line 1 column 5",
        "save it anew",
        more=SPLIT,
    ),
    reading(
        "partition.path", "s.json", 3, "s.json", "must hold a list of lists", "list the sample indices", more=SPLIT
    ),
    reading(
        "partition.path",
        "s.json",
        [[0], [0]],
        "s.json lists sample 0 twice",
        "client 0 and client 1",
        "and once",
        more=SPLIT,
    ),
    reading("partition.path", "s.json", [[5000]], "s.json lists 5000", "is no sample", "from 0 to 1436", more=SPLIT),
    reading(
        "partition.path",
        "s.json",
        [[0], [1]],
        "s.json",
        "among 2 clients, not 30",
        "set partition.clients = 2",
        more=SPLIT,
    ),
    reading(
        "partition.path",
        "s.npy",
        np.zeros(5),
        "s.npy",
        "each of the 1437 samples, got float64",
        "as one row of integers",
        more=SPLIT,
    ),
    # participation
    setting(
        "participation.name=bernoulli participation.cohort=5",
        "participation.cohort",
        "known: dropout, fraction,",
        "choose one",
    ),
    setting(
        "participation.name=bernoulli participation.fraction=0",
        "Bernoulli: fraction",
        "> 0 and ≤ 1, got 0",
        "the default is 0.2",
    ),
    setting(
        "participation.name=full participation.fraction=0.5",
        "participation.fraction",
        "known: dropout,",
        "choose one of them",
    ),
    setting(
        "participation.name=skewed participation.gamma=-1", "Skewed: gamma", "must be ≥ 0, got -1", "the default is 1"
    ),
    setting(
        "participation.name=skewed participation.gamma=inf",
        "Skewed: gamma",
        "must be finite, got inf",
        "the default is 1",
    ),
    setting(
        "participation.name=cyclic participation.groups=31",
        "Cyclic: groups",
        "at most the number of clients, 30",
        "lower participation",
    ),
    setting(
        "participation.name=cyclic participation.groups=0", "Cyclic: groups", "must be ≥ 1, got 0", "the default is 5"
    ),
    setting(
        "participation.name=cyclic participation.shuffle=1",
        "Cyclic: shuffle",
        "true or false, got 1",
        "the default is true",
    ),
    setting(
        "participation.name=cyclic participation.cohort=31",
        "Cyclic: cohort",
        "at most the number of clients, 30",
        "lower participation",
    ),
    setting(
        "participation.name=markov participation.join=0",
        "Markov: join",
        "must be > 0 and ≤ 1, got 0",
        "the default is 0.1",
    ),
    setting(
        "participation.name=markov participation.leave=1.5",
        "Markov: leave",
        "must be ≥ 0 and ≤ 1, got 1.5",
        "the default is 0.1",
    ),
    setting("participation.dropout=1.1", "Uniform: dropout", "must be ≥ 0 and ≤ 1, got 1.1", "the default is 0"),
    setting(
        "participation.stragglers=-0.1", "Uniform: stragglers", "must be ≥ 0 and ≤ 1, got -0.1", "the default is 0"
    ),
    setting("participation.least_work=0", "Uniform: least_work", "must be > 0 and < 1, got 0", "the default is 0.1"),
    setting(TRACE, "Trace: path", "must name a .json or .npy file", "set participation.path"),
    setting(
        f"{TRACE} participation.path=t.json",
        "cannot use t.json",
        "No such file",
        "name another one in participation.path",
    ),
    reading(
        "participation.path", "t.json", b"[[1,", "cannot use t.json", "line 1 column 5", "mend the file", more=TRACE
    ),
    reading(
        "participation.path",
        "t.json",
        [],
        "cannot use t.json",
        "a list of rounds, one or more",
        "mend the file",
        more=TRACE,
    ),
    reading(
        "participation.path", "t.json", [[0, 30]], "its round 1 names 30", "from 0 to 29", "mend the file", more=TRACE
    ),
    reading(
        "participation.path",
        "t.json",
        [[1], [2, 2]],
        "its round 2",
        "names a client twice",
        "mend the file",
        more=TRACE,
    ),
    reading(
        "participation.path",
        "t.npy",
        np.zeros((2, 3), bool),
        "t.npy",
        "[rounds, 30]",
        "got bool [2, 3]; mend",
        more=TRACE,
    ),
    # networks
    setting("model.name=charlstm", "charlstm", "needs inputs [length] of tokens", "use a text dataset, or mlp"),
    setting(
        "model.name=charlstm data.name=synthetic",
        "charlstm",
        "reads tokens, whole numbers from 0",
        "use a text dataset, or mlp",
    ),
    setting("model.name=charlstm model.hidden=0", "CharLSTM: hidden", "must be ≥ 1, got 0", "the default is 256"),
    setting(
        "model.name=vgg19",
        "vgg19",
        "32×32 pixels or more, got inputs of shape [1, 8, 8]",
        "use cnn or lenet for smaller images",
    ),
    setting(
        "model.name=lenet_pmvr",
        "lenet_pmvr",
        "16×16 pixels or more, got inputs of shape [1, 8, 8]",
        "use lenet for smaller images",
    ),
    setting("model.name=cnn64 data.name=synthetic", "cnn64", "needs images", "use mlp or softmax"),
    setting("model.name=resnet50 data.name=synthetic", "resnet50", "needs images", "use mlp or softmax"),
    setting(
        "model.name=resnet18 model.stem=imagenet", 'stem = "imagenet"', "32×32 pixels or more", 'use stem = "small"'
    ),
    setting(
        "model.name=resnet18 model.stem=large", "unknown stem 'large'", "known: imagenet, small", "choose one of them"
    ),
    setting("model.name=resnet18 model.groups=3", "ResNet18: groups", "must divide 64 channels, got 3", "try 2 or 32"),
    setting("model.name=resnet18 model.norm=none", "unknown norm 'none'", "known: batch, group", "choose one of them"),
    setting("model.name=lenet model.padding=5", "LeNet: padding", "must be ≥ 0 and ≤ 4, got 5", "the default is 0"),
    setting("model.head=-1", "MLP: head", "must be ≥ 0, got -1", "the default is 0"),
    setting(
        "model.new_head=true",
        "new_head = true",
        "is about model.weights, which is not set",
        "set it, or leave new_head out",
    ),
    setting(
        "model.weights=none.pt",
        "there is no weights file 'none.pt'",
        "a .safetensors file or a torch state dict",
        "in model.weights",
    ),
    reading(
        "model.weights", "w.pt", b"junk", "w.pt is damaged", "are not opened", "save the state_dict() with torch.save"
    ),
    reading(
        "model.weights", "w.safetensors", b"junk", "w.safetensors is damaged", "are not opened", "save the state_dict()"
    ),
    reading(
        "model.weights",
        "w.pt",
        {"a": torch.zeros(3)},
        "w.pt do not fit",
        "1 unexpected (a)",
        "take a file of this network",
    ),
    reading(
        "model.weights", "w.pt", SEVEN, "out.weight: [7, 64] in the file", "[10, 64] here", "set model.new_head = true"
    ),
    Case(
        "weights: no name of a file",
        ("run", "--quiet", "--set", r'model.weights="\u0000"'),
        ("there is no weights file", "a .safetensors file or a torch state dict", "name a"),
    ),
    plugin(
        "a network for images on text",
        TEXT,
        "cnn64",
        "got inputs of shape [4]",
        "use mlp",
        more=f"{OWN_TEXT} --set model.name=cnn64",
    ),
    plugin(
        "noise on text",
        TEXT,
        "noise",
        "need real inputs or bytes",
        "to 0",
        more=f"{OWN_TEXT} --set partition.noise=0.1",
    ),
    # engines
    *(
        plugin(
            f"dropout {engine}",
            NETWORK.format(layers="nn.Dropout(0.5), nn.Linear(64, classes)"),
            f'"{engine}"',
            "a network with dropout",
            'use engine.name = "sequential"',
            more=f"--set model.name=own --set engine.name={engine}",
        )
        for engine in ("slots", "vmapped")
    ),
    plugin(
        "no row of layers for a head",
        NETWORK.format(layers="nn.Linear(64, classes), nn.Identity()"),
        "model.head = 4",
        "end with a linear one",
        "leave head out",
        more="--set model.name=own --set model.head=4",
    ),
    setting(
        "engine.compile=true engine.device=cpu", "engine: compile = true", "needs a CUDA device", "leave compile out"
    ),
    setting(
        "engine.compile=true engine.name=vmapped",
        "engine: compile",
        'is for engine.name = "sequential"',
        "leave one of the two out",
    ),
    setting(
        "engine.dtype=bf16 engine.name=vmapped",
        'dtype = "bf16"',
        '"sequential", "slots" or "stacked"',
        "leave one of the two out",
    ),
    setting("engine.dtype=fp16", "engine: unknown dtype 'fp16'", "Known: bf16,", "did you mean 'bf16'?"),
    setting("engine.name=slot", "unknown name 'slot'", "Known: auto, sequential, slots,", "did you mean 'slots'?"),
    setting("local.drop_last=2", "local: drop_last", "must be true or false, got 2", "the default is false"),
    # their commands
    case("data get: name", "data get nonsense", "no dataset 'nonsense'", "known: cifar10,", "choose one of them"),
    case(
        "data get: last name",
        "data get mnist cifar-10",
        "'cifar-10' is kept in files",
        "Known: cifar10,",
        "did you mean 'cifar10'?",
    ),
    case("data get: built in", "data get digits", "no dataset 'digits' is kept in files", "cifar10,", "mnist"),
    case(
        "data get: nothing",
        "data get",
        "missing argument 'NAME...'",
        "askew data get takes NAME...",
        "see askew data get --help",
    ),
    case(
        "data check: not here",
        "data check mnist",
        "mnist: its files are not in",
        "askew data get mnist",
        "or put MNIST/raw/",
    ),
    case(
        "data: no such command",
        "data fetch",
        "no such command 'fetch'",
        "commands are list, get, check, describe, path",
        "see askew data --help",
    ),
    case(
        "a setting for an option",
        "run --clients 5",
        "no such option '--clients'",
        "takes FILE.toml",
        "write --set partition.clients=…;",
    ),
    case("of a sweep", "sweep --learning-rate 5", "no such option", "takes FILE.toml", "write --lr …;"),
    case(
        "an option without value", "run --method", "'--method' requires an argument; askew run takes", "--lr", "--help"
    ),
    case(
        "an option: a text", "run --rounds ten", "--rounds must be", "a whole number, got 'ten'", "see askew run --help"
    ),
    case("an option: range", "sweep --processes 0", "--processes must be", "≥ 1, got 0", "see askew sweep --help"),
    case("an option: two ends", "watch --port 99999", "--port must be", "≥ 0 and ≤ 65535, got 99999", "watch --help"),
    case(
        "two methods",
        "run --method fedprox --set algorithm.name=fedavg",
        "--method fedprox and --set algorithm.name=fedavg",
        "contradict each other",
        "give one of them",
    ),
    case(
        "two rates",
        "sweep --lr 0.1 --set local={lr=0.2}",
        "--lr 0.1 and --set local={lr=0.2}",
        "contradict each other",
        "give one of them",
    ),
    case(
        "two numbers of clients",
        "deploy app wrong.toml app --clients 3 --set partition.clients=4",
        "--clients 3 and --set partition.clients=4",
        "contradict each other",
        "give one of them",
        file("wrong.toml", "rounds = 1"),
    ),
    case(
        "one value and several",
        "sweep --method fedavg --over algorithm.name=fedprox,scaffold",
        "algorithm.name",
        "is given the single value fedavg and is swept as well",
        "give it once",
    ),
    case(
        "one value and whole tables",
        "sweep wrong.toml --lr 0.1",
        "local.lr",
        "the single value 0.1",
        "give it once",
        file("wrong.toml", "[sweep]\nlocal = [{lr = 0.2}, {lr = 0.3}]"),
    ),
    case(
        "methods twice", "tune --methods fedavg --over algorithm.name=solo", "--methods and --over", "both", "give one"
    ),
    case("tune: no plan", "tune --plan none.json", "none.json of --plan", "does not exist", "give the tune.json"),
    case(
        "tune: another file",
        "tune --plan wrong.json",
        "wrong.json of --plan",
        "holds no finished plan",
        "give the tune.json",
        file("wrong.json", "no plan"),
    ),
    case("tune: processes", "tune --processes 3", "--processes = 3", "2 cores", "use at most 2", two_cores),
    case(
        "reproduce: processes",
        "reproduce feddpc/table2 --processes 3 --plan",  # which trains nothing, whatever becomes of the check
        "--processes = 3",
        "2 cores",
        "use at most 2",
        two_cores,
    ),
    case(
        "reproduce: sorted", "reproduce feddpc/table2 --sorted x.toml", "--sorted", "--queue", "give --queue and --plan"
    ),
    case(
        "reproduce: no value", "reproduce feddpc/table2 --only local.lr=7", "local.lr=7", "the values are 1, 0.1", "."
    ),
    case(
        "reproduce: no run",
        "reproduce feddpc/table2 --only FedProx --only algorithm.eps=0.1",
        "--only",
        "no run of feddpc/table2 has all of method=FedProx, algorithm.eps=0.1",
        "leave one of them out",
    ),
    case("compare: no test", "compare RUN --metric test_loss", "--against and --metric", "how to test", "give --test"),
    case("report: size", "report RUN --figures pdf --size a4", "unknown --size 'a4'", "column, page", "choose one"),
    case(
        "conformal: classes", "conformal RUN --k-reg -1", "--k-reg must be", "≥ 0, got -1", "see askew conformal --help"
    ),
    case(
        "conformal: disk",
        "conformal RUN --plot taken/x.png",
        "taken/x.png",
        "File exists",
        "you can write to.",
        file("taken", ""),
    ),
    case(
        "data list: option",
        "data list --name x",
        "no such option",
        "takes --data-dir --json",
        "see askew data list --help",
    ),
    case(
        "partition: picture",
        "partition --out x.txt",
        "--out",
        "must end in .png, .svg or .pdf, got 'x.txt'",
        "try partition.png",
    ),
    case(
        "partition: missing", "partition none.toml", "there is no file 'none.toml'", "name a TOML file", "leave it out"
    ),
    case(
        "partition: setting",
        "partition --set partition.labels=3",
        "unknown setting partition.labels",
        "known: alpha,",
        "choose one",
    ),
    case(
        "partition: below a file",
        "partition --out taken/x.png",
        "cannot write taken/x.png",
        "File exists",
        "name a folder you can write",
        file("taken", ""),
    ),
    case(
        "data-dir without value",
        "run --data-dir",
        "'--data-dir' requires an argument",
        "askew run takes",
        "see askew run --help",
    ),
    # the argument of --set
    case("set without =", "run --set local.lr", "'local.lr'", "takes key=value", "for example --set"),
    case("set without key", "run --set =3", "'=3'", "takes key=value", "for example --set"),
    Case(
        "set over two lines",
        ("run", "--set", "a\nb=1"),
        ("unknown setting 'a\\nb'", "known: algorithm,", "choose one of them"),
    ),
    # files
    case(
        "file: missing",
        "run none.toml",
        "there is no file 'none.toml'",
        "name a TOML file",
        "leave it out to run the defaults",
    ),
    case(
        "deploy: missing",
        "deploy up none.toml",
        "there is no file 'none.toml'",
        "name a TOML file",
        "or a folder that `askew deploy app` wrote.",
        lambda here, patch: patch.setattr("askew.cli.deploy.require_flower", lambda: None),
    ),
    case("file: a folder", "run .", "cannot read .", "Is a directory", "check that it is a file"),
    toml_file("binary", b"\x80\x81\xff\x00", "wrong.toml", "is not a text file in UTF-8", "name a TOML file"),
    toml_file(
        "truncated",
        '[algorithm]\nname = "fedav',
        "wrong.toml is not valid TOML",
        "at end of document",
        "correct that line",
    ),
    toml_file("deep", "seed = " + "[" * 9999, "wrong.toml is not valid TOML", "nested too deeply", "correct it"),
    case("set: deep", f"run --set seed={'[' * 9999}", "seed must be", "got '[[", "the default is 0"),
    toml_file("twice", "seed = 1\nseed = 2\n", "wrong.toml is not valid TOML", "line 2", "correct that line"),
    toml_file(
        "value for a table", 'model = "mlp"\n', "model", "is a table of settings, got 'mlp'", "write model.name = 'mlp'"
    ),
    toml_file(
        "table for a value",
        "[rounds]\nnumber = 3\n",
        "rounds",
        "must be a whole number, got {'number': 3}",
        "the default is 30",
    ),
    toml_file(
        "table in a table", "[local.lr]\nfirst = 0.1\n", "local: lr", "must be a number, got {'first': 0.1}", "try 0.1"
    ),
    toml_file(
        "unknown table", "[lokal]\nlr = 0.1\n", "unknown setting 'lokal'", "Known: algorithm,", "did you mean 'local'?"
    ),
    # plugins
    case(
        "plugin: missing",
        "run --plugin none.py",
        "there is no plugin file 'none.py'",
        "name a Python file",
        "askew.register",
    ),
    case(
        "plugin: a long name",
        f"run --plugin {'a' * 5000}",
        "no plugin file 'aaa",
        "name a Python file",
        "askew.register",
    ),
    case("plugin: a folder", "run --plugin .", "there is no plugin file '.'", "name a Python file", "askew.register"),
    case(
        "plugin: not Python",
        "run --plugin own.txt",
        "'own.txt'",
        "is not a Python file",
        "ends in .py",
        file("own.txt", "pass"),
    ),
    case(
        "plugins: both",
        "run --set plugins=3 --plugin own.py",
        "plugins",
        "must be a list",
        "the default is []",
        file("own.py", ""),
    ),
    plugin("syntax", "x = 1\ndef f(:\n", "'own.py' failed in line 2", "SyntaxError", "correct the file"),
    plugin(
        "raises",
        "x = 1\n1 / 0\n",
        "'own.py' failed in line 2",
        "ZeroDivisionError: division by zero",
        "correct the file",
    ),
    plugin("leaves", "import sys\nsys.exit(3)\n", "'own.py' failed in line 2", "SystemExit: 3", "correct the file"),
    plugin("nothing", "x = 1\n", "'own.py'", "registers nothing", "put @askew.register"),
    plugin(
        "duplicate",
        METHOD.replace('"own"', '"fedavg"').format(hook="x(self): ..."),
        "'fedavg'",
        "exists already",
        "choose another name",
    ),
    plugin(
        "no method",
        "import askew\n@askew.register('own')\nclass Own: ...\n",
        "Own",
        "is none of Algorithm,",
        "derive it from one",
    ),
    plugin(
        "hook raises",
        METHOD.format(hook="direction(self, w, grad, me): return me.nothing"),
        "own.py' failed in line 6",
        "AttributeError",
        "correct the file",
        more="--set algorithm.name=own --set rounds=1",
    ),
    plugin(
        "hook changes a shape",
        METHOD.format(hook="aggregate(self, x, up, cohort, server): return x[:3], server"),
        "Own: aggregate() must return the model",
        "declared",
        "Correct the hook",
        more="--set algorithm.name=own --set rounds=1",
    ),
    plugin(
        "network misfits",
        NETWORK.format(layers="nn.Linear(7, classes)"),
        "cannot take inputs of shape (1, 8, 8)",
        "shapes cannot be multiplied",
        "change the network or the data",
        more="--set model.name=own",
    ),
    # run folders
    case(
        "show: missing",
        "show runs/none",
        "no run folder 'runs/none'",
        "name a folder that `askew run` made",
        "such as runs/NAME",
    ),
    case(
        "compare: missing", "compare RUN runs/none", "no run folder 'runs/none'", "name a folder", "such as runs/NAME"
    ),
    case("report: missing", "report runs/none", "no run folder 'runs/none'", "name a folder", "such as runs/NAME"),
    case(
        "show: no run",
        "show runs",
        "'runs' is not a run folder",
        "it has no run.toml",
        "name a folder that `askew run` made",
    ),
    case(
        "compare: no run",
        "compare other",
        "'other' is not a run folder",
        "it has no run.toml",
        "name a folder that `askew run` made",
        file("other/notes.txt", "none here"),
    ),
    case(
        "report: no run",
        "report other",
        "'other' is not a run folder",
        "it has no run.toml",
        "name a folder that `askew run` made",
        file("other/notes.txt", "none here"),
    ),
    case(
        "rounds cut",
        "show RUN",
        "rounds.jsonl, line 1",
        "is not the record of round 1",
        "restore the file",
        damage("rounds.jsonl", lambda t: t[9:]),
    ),
    case(
        "rounds lost",
        "compare runs",
        "line 1",
        "not the record",
        "remove the folder",
        damage("rounds.jsonl", lambda t: t.split("\n", 1)[1]),
    ),
    case(
        "facts cut",
        "show RUN",
        "run.json",
        "is not a JSON object",
        "remove the folder",
        damage("run.json", lambda t: t[:20]),
    ),
    case(
        "facts a list",
        "report RUN",
        "run.json",
        "is not a JSON object",
        "remove the folder",
        damage("run.json", lambda t: "[1]"),
    ),
    case(
        "facts binary",
        "show RUN",
        "run.json",
        "is not a text file in UTF-8",
        "remove the folder",
        damage("run.json", lambda t: b"\xff\xfe"),
    ),
    case(
        "page cut",
        "show RUN",
        "run.toml",
        "does not describe a whole run",
        "remove the folder",
        damage("run.toml", lambda t: t.partition("\n")[2][:9]),
    ),
    case(
        "page broken",
        "show RUN",
        "run.toml is not valid TOML",
        "at end of document",
        "correct that line",
        damage("run.toml", lambda t: t.partition("\n")[2][:4]),
    ),
    case(
        "checkpoint broken",
        f"run {QUICK}",
        "the checkpoint",
        "is damaged or of another run",
        "use --fresh to start",
        unfinished,
    ),
    case(
        "other run",
        f"run {QUICK}",
        "of another configuration",
        "use another --out",
        "--fresh",
        damage("run.toml", lambda t: t.partition("\n")[2].replace("5", "6")),
    ),
    case(
        "run changed",
        f"run {QUICK}",
        "run.toml is not as askew wrote it",
        "was changed or is damaged",
        "change a copy of it elsewhere",
        damage("run.toml", lambda t: t.replace("5", "6")),
    ),
    case(
        "locked",
        f"run {QUICK}",
        "another process is writing",
        "wait for it to end",
        "run another configuration",
        locked,
    ),
    # the disk
    case(
        "out: a file",
        "run --out taken",
        "cannot write taken",
        "Not a directory",
        "name a folder you can write",
        file("taken", ""),
    ),
    case(
        "out: below a file",
        "run --out taken/deep",
        "cannot write taken/deep",
        "Not a dir",
        "name a folder you can write",
        file("taken", ""),
    ),
    case(
        "report: a file",
        "report RUN --out taken",
        "cannot write taken/",
        "File exists",
        "name a folder you can write",
        file("taken", ""),
    ),
    case("out: empty", "run --out=", "--out is empty", "name a folder", "for the current one"),
    Case("results: empty", ("table", "feddpc/table2", "--results", ""), ("--results is", "empty", "name a folder")),
    case("disk full", f"run --fresh {QUICK}", "run.toml", "No space left on device", "free some space", full_disk),
    case(
        "disk full later",
        f"run --fresh {QUICK}",
        "rounds.jsonl",
        "No space left on device",
        "start the run again",
        full_disk_later,
    ),
    # the command line itself
    case(
        "no such list",
        "list algoritms",
        "there is no list of 'algoritms'",
        "Known: algorithms, attacks",
        "did you mean 'algorithms'?",
    ),
    case(
        "no list named",
        "list",
        "missing argument 'KIND'",
        "askew list takes KIND NAME --plugin --json",
        "see askew list --help",
    ),
    case(
        "no such command",
        "rum",
        "no such command 'rum'",
        "commands are run, sweep, tune, partition,",
        "see askew --help",
    ),
    case(
        "no such option",
        "run --turns 3",
        "no such option",
        "askew run takes FILE.toml --method",
        "see askew run --help",
    ),
    case("no run named", "show", "missing argument 'RUN'", "askew show takes RUN --json", "see askew show --help"),
    case(
        "too many files",
        "run a.toml b.toml",
        "unexpected extra argument",
        "askew run takes FILE.toml",
        "see askew run --help",
    ),
    case(
        "option without value",
        "run --set",
        "'--set' requires an argument",
        "askew run takes FILE.toml",
        "see askew run --help",
    ),
    case(
        "demo: text",
        "demo --rounds few",
        "--rounds must be a whole number, got 'few'",
        "askew demo takes --out --rounds --seeds",
        "see askew demo --help",
    ),
    case("demo: no round", "demo --rounds 0", "rounds", "must be ≥ 1, got 0", "the default is 30"),
    case("demo: no seed", "demo --seeds 0", "demo: seeds", "must be ≥ 1, got 0", "the default is 3"),
    case("target: percent", "compare RUN --target 90", "--target", "must be > 0 and ≤ 1, got 90", "try 0.9"),
    case(
        "json is for results",
        "show runs/none --json",
        "no run folder 'runs/none'",
        "name a folder",
        "such as runs/NAME",
    ),
    # the virtual clock
    setting(
        "time.seconds=1",
        "time: the clock is off",
        "without time.wait",
        'set wait = "all", "deadline", "first" or "buffer"',
    ),
    setting("time.wait=deadlin", "unknown wait 'deadlin'", "all, buffer, deadline, first", "did you mean 'deadline'?"),
    setting("time.wait=deadline", 'wait = "deadline"', "needs time.deadline, in seconds", "for example to 60"),
    setting("time.wait=all time.seconds=-1", "time: seconds", "must be ≥ 0 and ≤ 1e+09, got -1", "the default is 0.01"),
    setting("time.wait=all time.seconds=inf", "time: seconds", "≤ 1e+09, got inf", "the default is 0.01"),
    setting(
        "time.wait=deadline time.deadline=1e-9",
        "no client can answer within time.deadline = 1e-09 seconds",
        "the fastest needs",
        "raise the deadline",
    ),
    setting(
        "time.wait=first time.spare=2 participation.name=full",
        "time: spare clients",
        "a cohort of fixed size, which participation Full does not have",
        'set participation.name = "uniform"',
    ),
    setting(
        "time.wait=all time.availability=markov time.mean_on=1 time.mean_off=1e6",
        "mean_on and mean_off",
        "a factor of 10,000 at most, got 1 and 1e+06",
        "nearer to each other",
    ),
    setting(
        "time.wait=all time.availability=day time.opens=5 time.closes=5",
        "opens and closes",
        "must be different hours, got 5 and 5",
        "set another hour",
    ),
    setting(
        "time.wait=all algorithm.name=centralised",
        "trains on all data at one place",
        "no client is waited for",
        "leave out [time]",
    ),
    setting("time.wait=all time.trace=t.csv", "time: cannot use t.csv", "No such file or directory", "in time.trace"),
    setting(
        "time.wait=all time.trace=t.csv time.availability=day", "t.csv", "says when clients are there", "leave out"
    ),
    reading(
        "time.trace",
        "short.csv",
        b"client,from,to\n1,0,0.5\n2,1.25,2\n",
        "nobody can ever answer before it leaves: client 2, which misses that by least, needs",
        "seconds and stays for 0.75 at most",
        "let clients stay longer",
        more="time.wait=all time.seconds=1",
    ),
    setting(
        "time.wait=deadline time.deadline=1e9 time.seconds=1e5 time.availability=day",
        "nobody can ever answer before it leaves and by the deadline",
        "stays for 2.88e+04 at most",
        "lower the work or time.seconds",
    ),
    setting("time.wait=all time.clients=c.csv time.speed=size", "c.csv", "says every client's seconds", "leave out"),
    *(
        reading(f"time.{key}", f"{key}.csv", text.encode(), f"cannot use {key}.csv", *says, more="time.wait=all")
        for key, text, *says in (
            ("trace", "client,from\n0,1\n", "client, from, to; to is missing", "mend the file"),
            ("trace", "client,from,to\n0,5,9\n0,1,6\n", "line 2 overlaps another interval of client 0", "mend"),
            ("trace", "client,from,to\n0,9,5\n", "line 2 ends before it begins: from 9 to 5", "mend the file"),
            ("trace", "client,from,to\n30,1,5\n", "line 2 names the client '30'", "numbered from 0 to 29; mend"),
            ("trace", "client,from,to\nann,1,5\n", "line 2 names the client 'ann'", "numbered from 0 to 29; mend"),
            ("trace", "client,from,to\n1,-1,5\n", "from in line 2 must be a number ≥ 0, got '-1'", "mend the file"),
            ("trace", "client,from,to\n1,1,inf\n", "to in line 2 must be a number ≥ 0, got 'inf'", "mend the file"),
            ("trace", "client,from,to\n1,1\n", "to in line 2 must be a number ≥ 0, got ''", "mend the file"),
            ("trace", "client,from,to\n", "it has no row below the names", "mend the file"),
            ("trace", "client,from,to,from\n0,1,5,2\n", "names the column from more than once", "mend the file"),
            ("trace", "client,from,to\n0,1,5,9\n", "line 2 has more fields than the first line", "mend the file"),
            ("trace", f"client,from,to\n{'9' * 5000},1,5\n", f"names the client '{'9' * 40}'", "0 to 29; mend"),
            ("trace", "\x00\x00", "client is missing", "mend the file"),
            (
                "trace",
                "client,from,to\n0,0,5e-324\n",
                "its last second is 4.94066e-324",
                "must be 1e-06 or later; mend",
            ),
            ("trace", "client,from,to\n0,0,1e-17\n", "its last second is 1e-17", "must be 1e-06 or later; mend"),
            ("trace", "client,from,to\n1_0,1,5\n", "line 2 names the client '1_0'", "numbered from 0 to 29; mend"),
            ("trace", "client,from,to\n٣,1,5\n", "line 2 names the client '٣'", "numbered from 0 to 29; mend"),
            ("trace", "client,from,to\n3,1_0,5\n", "from in line 2 must be a number ≥ 0, got '1_0'", "mend the file"),
            ("trace", "client,from,to\n3,1,٥\n", "to in line 2 must be a number ≥ 0, got '٥'", "mend the file"),
            ("clients", "client,speed\n0,1\n", "client, seconds; seconds is missing", "mend the file"),
            ("clients", "client,seconds\n0,1\n", "a row for each of the 30 clients", "none for client 1; mend"),
            ("clients", "client,seconds\n0,1\n0,2\n", "line 3 names the client 0 a second time", "mend the file"),
            ("clients", "client,seconds\n0,-2\n", "seconds in line 2 must be a number ≥ 0, got '-2'", "mend the file"),
            *(
                (
                    "clients",
                    f"client,seconds,{wrong}\n0,2,5\n",
                    f"column '{wrong}', which is not read",
                    f"call it {name!r}",
                )
                for wrong, name in (("latncy", "latency"), ("upload", "up"), ("Bytes down", "down"), ("UP", "up"))
            ),
            ("clients", "client,seconds,up\n0,2,x\n", "up in line 2 must be a number ≥ 0, got 'x'", "mend the file"),
        )
    ),
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of QUICK."""
    out = tmp_path_factory.mktemp("finished")
    assert main(["run", *QUICK.split(), "--out", str(out)]) == 0
    return next(out.iterdir())


@pytest.fixture(autouse=True)
def registries() -> Iterator[None]:
    """What plugins registered is forgotten."""
    before = {kind: dict(registry.members) for kind, registry in CHOICES.items()}
    yield
    for kind, members in before.items():
        CHOICES[kind].members = members


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_one_sentence(
    case: Case, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ASKEW_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(files, "chosen_folder", None)
    shutil.copytree(finished, tmp_path / "runs" / finished.name)
    kept = case.setup(tmp_path, monkeypatch) if case.setup else None
    capsys.readouterr()
    with kept if isinstance(kept, IOBase) else nullcontext():
        code = main([f"runs/{finished.name}" if argument == "RUN" else argument for argument in case.arguments])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and err.endswith("\n") and err.count("\n") == 1
    assert "Traceback" not in err
    for fragment in case.says:
        assert fragment in err


def test_a_failed_check_shows_the_files_and_says_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(files, "chosen_folder", None)  # restored, whatever --data-dir does to it
    file("shakespeare/pg100.txt", "Enter GHOST.")(tmp_path, monkeypatch)
    assert main(["data", "check", "shakespeare", "--data-dir", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert "pg100.txt" in out and "should be" in out
    assert err.startswith("error: shakespeare: ") and err.count("\n") == 1
    assert "not as published: pg100.txt" in err and "askew data get shakespeare" in err


def test_a_defect_of_askew_is_not_taken_for_a_users_mistake(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(kind: str) -> None:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr("askew.cli.reading.listing.stored_entries", broken)
    assert main(["list", "models"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert (
        err.startswith("error: unexpected RuntimeError: two lines; this is a defect of askew: please report it")
        and "ASKEW_DEBUG=1" in err
    )
    monkeypatch.setenv("ASKEW_DEBUG", "1")
    assert main(["list", "models"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_an_error_of_the_system_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(kind: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "secret.csv")

    monkeypatch.setattr("askew.cli.reading.listing.stored_entries", refused)
    assert main(["list", "models"]) == 2
    assert capsys.readouterr().err.startswith("error: secret.csv: Permission denied; check that")
