"""The workloads that `askew bench` times, and each as a configuration on random samples.

Nothing is downloaded. The network `mnist` gets the images of MNIST where its files are found, else random numbers.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import NamedTuple

import torch

from ..core.settings import setting
from ..data import files, sources
from ..data.dataset import Dataset, Samples, Source
from ..data.images import Images
from ..engine.settings import EngineSettings
from ..errors import ConfigError, did_you_mean
from ..experiment.config import Config, FromPython
from ..models import CNN64, MLP, CharLSTM, LeNet, Network, ResNet18, Softmax

LR = 0.01  # learning rate
TEST_SAMPLES = 10  # of the test set, which no bench looks at
IMAGE = (3, 32, 32)  # the shape of a CIFAR image


class Workload(NamedTuple):
    """What one round trains: a network, clients, and of each client its steps and batch size."""

    network: Network
    shape: tuple[int, ...]
    classes: int
    clients: int
    steps: int
    batch: int
    heavy: bool = False  # minutes a round on a CPU

    @property
    def samples(self) -> int:
        """Training samples of all clients."""
        return self.clients * self.steps * self.batch

    @property
    def images(self) -> str:
        """The dataset whose images are taken instead of random numbers; empty for none, or without its files."""
        return "mnist" if self[:3] == NETWORKS["mnist"] and files.find("mnist") else ""


# network: itself, the shape of an input, classes
NETWORKS: dict[str, tuple[Network, tuple[int, ...], int]] = {
    "lenet": (LeNet(), IMAGE, 10),
    "cnn64": (CNN64(), IMAGE, 10),
    "resnet18": (ResNet18(), IMAGE, 100),
    "mlp": (MLP(hidden=(200, 200)), (784,), 10),
    "mnist": (MLP(hidden=(200, 200)), (1, 28, 28), 10),
    "mlp64": (MLP(), (64,), 10),
    "softmax": (Softmax(), (60,), 10),
    "charlstm": (CharLSTM(), (80,), 80),
}
NAME_WITH_SIZES = re.compile(rf"({'|'.join(NETWORKS)})-([1-9]\d*)x([1-9]\d*)x([1-9]\d*)")
WORKLOADS = {
    "lenet-10x10x50": Workload(*NETWORKS["lenet"], 10, 10, 50),
    "lenet-10x2x256": Workload(*NETWORKS["lenet"], 10, 2, 256),
    "lenet-100x10x50": Workload(*NETWORKS["lenet"], 100, 10, 50),
    "cnn64-15x50x50": Workload(*NETWORKS["cnn64"], 15, 50, 50, heavy=True),
    "cnn64-100x10x50": Workload(*NETWORKS["cnn64"], 100, 10, 50, heavy=True),
    "resnet18-10x10x50": Workload(*NETWORKS["resnet18"], 10, 10, 50, heavy=True),
    "resnet18-10x2x256": Workload(*NETWORKS["resnet18"], 10, 2, 256, heavy=True),
    "mlp-mnist-100": Workload(*NETWORKS["mnist"], 100, 12, 50),
    "softmax-100": Workload(*NETWORKS["softmax"], 100, 10, 10),
    "charlstm-10x5x10": Workload(*NETWORKS["charlstm"], 10, 5, 10),
    "tiny": Workload(Softmax(), (4,), 2, 3, 2, 4),
}
FRAMEWORK_WORKLOADS = ("lenet-10x10x50", "mlp-mnist-100", "softmax-100")  # those that other frameworks are given


def find_workload(name: str) -> Workload:
    """The workload of a name: one of the list, or a network with any number of clients, steps and batch size."""
    if name in WORKLOADS:
        return WORKLOADS[name]
    if sizes := NAME_WITH_SIZES.fullmatch(name):
        return Workload(*NETWORKS[sizes[1]], int(sizes[2]), int(sizes[3]), int(sizes[4]))
    raise ConfigError(
        f"bench: --work is NETWORK-CLIENTSxSTEPSxBATCH, as lenet-20x5x64, or a name of askew bench --list, "
        f"got {name!r}; {did_you_mean(name, WORKLOADS)}"
    )


class RandomSamples(FromPython, Source):
    """Random numbers; of a text, random tokens; or a dataset's images in random order, repeated if they are too few."""

    samples: int = setting("training samples", default=1, least=1)
    shape: tuple[int, ...] = setting("shape of one input", default=())
    classes: int = setting("classes", default=2, least=2)
    tokens: bool = setting("inputs are tokens", default=False)
    images: str = setting("the dataset whose images are taken instead", default="")

    def load(self, seed: int, clients: int) -> Dataset:
        g = torch.Generator().manual_seed(seed)
        if self.images:
            real = sources[self.images]().load(seed, clients)
            order = torch.randperm(len(real.train.y), generator=g)
            order = order[torch.arange(self.samples) % len(order)]
            train, test = Samples(*(t[order] for t in real.train)), Samples(*(t[:TEST_SAMPLES] for t in real.test))
            return replace(real, train=train, test=test)

        def draw(n: int) -> Samples:
            size = (n, *self.shape)
            x = torch.randint(self.classes, size, generator=g) if self.tokens else torch.randn(size, generator=g)
            return Samples(x, torch.randint(self.classes, (n,), generator=g))

        return Dataset(draw(self.samples), draw(TEST_SAMPLES), self.classes)


def workload_config(name: str, engine: EngineSettings, skewed: bool = False) -> Config:
    """A workload as a configuration; `skewed`: clients differ in size, with as many samples in all."""
    workload = find_workload(name)
    tokens = isinstance(workload.network, CharLSTM)
    partition = {"name": "dirichlet", "alpha": 0.2, "min_size": 0} if skewed else {"name": "iid"}
    return Config.build(
        {
            "data": RandomSamples(
                samples=workload.samples,
                shape=workload.shape,
                classes=workload.classes,
                tokens=tokens,
                images=workload.images,
            ),
            "partition": partition | {"clients": workload.clients},
            "participation": {"name": "full"},
            "model": workload.network,
            "local": {"batch": workload.batch, "lr": LR},
            "engine": engine,
        }
    )


def with_random_images(config: Config) -> Config:
    """A configuration on CIFAR-10 or CIFAR-100 with random images in their place, so that no files are needed."""
    data = config.data
    assert isinstance(data, Images) and data.key in ("cifar10", "cifar100")
    entry = files.table[data.key]

    def draw(count: int, g: torch.Generator) -> Samples:
        x = torch.randint(256, (count, *IMAGE), dtype=torch.uint8, generator=g)
        return Samples(x, torch.arange(count) % entry.classes)

    class RandomImages(FromPython, type(data)):  # type: ignore[misc]
        """Random images, changed as those that they stand for."""

        def read(self) -> tuple[Samples, Samples]:
            g = torch.Generator().manual_seed(0)
            return draw(entry.train, g), draw(entry.test, g)

    return replace(config, data=RandomImages(**data.table()))
