"""The digits of scikit-learn: real handwritten digits that need no download."""

from __future__ import annotations

import gzip
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from ..core.rng import generator
from .dataset import Dataset, Samples, Source, hold_out_fifth


class Digits(Source):
    """The 1,797 handwritten digits of scikit-learn, 8×8 pixels in [0, 1].

    1,437 are to train and 360 to test, split once for all seeds.
    """

    idea: ClassVar[str] = "1,797 real handwritten digits, 8×8 grey, 10 classes; ships with scikit-learn"

    @property
    def seeded(self) -> bool:
        return False

    def load(self, seed: int, clients: int) -> Dataset:
        pixels, labels = read_digits()
        x = torch.from_numpy(pixels).float().div(16).reshape(-1, 1, 8, 8)
        y = torch.from_numpy(labels).long()
        # Sorted by class and shuffled within: every fifth sample is then a stratified fifth.
        order = np.lexsort((generator(0, "digits split").random(len(y)), labels))
        train, test = hold_out_fifth(Samples(x, y), order)
        return Dataset(train, test, classes=10)


@cache  # half of a small run would be to read the file
def read_digits() -> tuple[np.ndarray[Any, np.dtype[np.float64]], np.ndarray[Any, np.dtype[np.int64]]]:
    """Pixels [n, 64], 0 to 16, and labels [n], from scikit-learn's own file: to import it takes as long as torch."""
    found = find_spec("sklearn")
    file = Path(*(found.submodule_search_locations or () if found else ()), "datasets", "data", "digits.csv.gz")
    if not file.is_file():  # another version keeps it elsewhere
        from sklearn.datasets import load_digits

        pixels, labels = load_digits(return_X_y=True)
        return pixels, labels
    with gzip.open(file, "rt") as lines:
        table = np.loadtxt(lines, delimiter=",")
    return table[:, :-1], table[:, -1].astype(np.int64)
