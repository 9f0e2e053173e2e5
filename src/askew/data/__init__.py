"""Datasets and how they are divided among clients; the registries of both."""

from __future__ import annotations

from ..core.settings import Registry
from .assignment import Assignment
from .dataset import Dataset, NaturalSource, Samples, Source
from .digits import Digits
from .images import Cifar10, Cifar100, Emnist, FashionMnist, Mnist, TinyImageNet
from .own_files import Csv, ImageFolder, Npz, Parquet
from .partition import Dirichlet, DirichletPrior, Iid, LabelsPerClient, Lognormal, Natural, Partition, Shards
from .partition_file import FromFile
from .shakespeare import Shakespeare
from .synthetic import Synthetic, SyntheticLeaf
from .user import from_user

sources: Registry[Source] = Registry(
    "dataset",
    {
        "cifar10": Cifar10,
        "cifar100": Cifar100,
        "csv": Csv,
        "digits": Digits,
        "emnist": Emnist,
        "fashion_mnist": FashionMnist,
        "folder": ImageFolder,
        "mnist": Mnist,
        "npz": Npz,
        "parquet": Parquet,
        "shakespeare": Shakespeare,
        "synthetic": Synthetic,
        "synthetic_leaf": SyntheticLeaf,
        "tiny_imagenet": TinyImageNet,
    },
)
partitions: Registry[Partition] = Registry(
    "partition",
    {
        "dirichlet": Dirichlet,
        "dirichlet_prior": DirichletPrior,
        "file": FromFile,
        "iid": Iid,
        "labels": LabelsPerClient,
        "lognormal": Lognormal,
        "natural": Natural,
        "shards": Shards,
    },
)

__all__ = [
    "Assignment",
    "Cifar10",
    "Cifar100",
    "Csv",
    "Dataset",
    "Digits",
    "Dirichlet",
    "DirichletPrior",
    "Emnist",
    "FashionMnist",
    "FromFile",
    "Iid",
    "ImageFolder",
    "LabelsPerClient",
    "Lognormal",
    "Mnist",
    "Natural",
    "NaturalSource",
    "Npz",
    "Parquet",
    "Partition",
    "Samples",
    "Shakespeare",
    "Shards",
    "Source",
    "Synthetic",
    "SyntheticLeaf",
    "TinyImageNet",
    "from_user",
    "partitions",
    "sources",
]
