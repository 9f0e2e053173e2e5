"""Datasets and how they are divided among clients."""

from __future__ import annotations

from ..core.settings import Registry
from .dataset import Dataset, NaturalSource, Samples, Source, from_user
from .digits import Digits
from .partition import Dirichlet, Iid, Natural, Partition, Shares
from .synthetic import Synthetic, SyntheticLeaf

sources: Registry[Source] = Registry("dataset", {"digits": Digits, "synthetic": Synthetic, "synthetic_leaf": SyntheticLeaf})
partitions: Registry[Partition] = Registry("partition", {"dirichlet": Dirichlet, "iid": Iid, "natural": Natural})

__all__ = [
    "Dataset",
    "Digits",
    "Dirichlet",
    "Iid",
    "Natural",
    "NaturalSource",
    "Partition",
    "Samples",
    "Shares",
    "Source",
    "Synthetic",
    "SyntheticLeaf",
    "from_user",
    "partitions",
    "sources",
]
