"""The digits of scikit-learn: real handwritten digits that need no download."""

from __future__ import annotations

from typing import ClassVar

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
        from sklearn.datasets import load_digits  # slow to import, and no other dataset needs it

        pixels, labels = load_digits(return_X_y=True)
        x = torch.from_numpy(pixels).float().div(16).reshape(-1, 1, 8, 8)
        y = torch.from_numpy(labels).long()
        # Sorted by class and shuffled within: every fifth sample is then a stratified fifth.
        order = np.lexsort((generator(0, "digits split").random(len(y)), labels))
        train, test = hold_out_fifth(Samples(x, y), order)
        return Dataset(train, test, classes=10)
