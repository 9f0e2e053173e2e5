"""The published files themselves: byte for byte what they should be, and read as what they are.

One dataset of each file format is quick; the others are slow tests.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from askew.data import files
from askew.data.images import Cifar10, Cifar100, Emnist, FashionMnist, Images, Mnist, TinyImageNet
from askew.data.shakespeare import ALPHABET, Shakespeare, split_plays, text_of_roles

MNIST = (
    [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949],
    [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009],
)


def find_or_skip(name: str) -> files.DatasetLocation:
    """Where the files are; the test is skipped if they are not."""
    found = files.find(name)
    if found is None:
        pytest.skip(f"{name} is not in {files.folder()}; askew data get {name}")
    return found


def decode(source: Images) -> dict[str, Tensor]:
    """The arrays of a dataset from its original files, whose checksums are thereby verified, without the cache."""
    return source.decode_checked(find_or_skip(source.key))


def class_counts(labels: Tensor) -> list[int]:
    return torch.bincount(labels.int()).tolist()


@pytest.mark.parametrize(
    "source, side, channels, train, test, mean, std",
    [
        (Mnist(), 28, 1, *MNIST, [0.13066], [0.30811]),
        pytest.param(*(FashionMnist(), 28, 1, [6000] * 10, [1000] * 10, [0.28604], [0.35302]), marks=pytest.mark.slow),
        (Cifar10(), 32, 3, [5000] * 10, [1000] * 10, [0.49140, 0.48216, 0.44653], [0.24703, 0.24349, 0.26159]),
        pytest.param(
            *(Cifar100(), 32, 3, [500] * 100, [100] * 100),
            *([0.50708, 0.48655, 0.44092], [0.26733, 0.25644, 0.27615]),
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda value: value.key if isinstance(value, Images) else None,
)
def test_images(
    source: Images, side: int, channels: int, train: Any, test: Any, mean: list[float], std: list[float]
) -> None:
    arrays = decode(source)
    assert arrays["x_train"].shape == (sum(train), channels, side, side)
    assert arrays["x_test"].shape == (sum(test), channels, side, side)
    assert arrays["x_train"].dtype == torch.uint8
    assert class_counts(arrays["y_train"]) == train and class_counts(arrays["y_test"]) == test
    histogram = np.zeros((channels, 256))
    for part in np.array_split(arrays["x_train"].numpy(), 50):
        for row, plane in zip(histogram, part.swapaxes(0, 1), strict=True):
            row += np.bincount(plane.ravel(), minlength=256)
    shares, values = histogram / histogram.sum(1, keepdims=True), np.arange(256) / 255
    middle = shares @ values
    assert middle.round(5).tolist() == mean
    assert ((shares @ values**2 - middle**2) ** 0.5).round(5).tolist() == std
    assert np.allclose(source.mean, mean, atol=5e-4) and np.allclose(source.std, std, atol=6e-4)
    for name, sha in SHA.get(source.key, {}).items():
        assert hashlib.sha256(np.ascontiguousarray(arrays[name].numpy().transpose(0, 2, 3, 1)).data).hexdigest() == sha


SHA = {
    "cifar10": {
        "x_train": "47af8b02cfcfb6cdf3dbbd1969ad7f1b70f4413f6f80f437b020ee4e5bc8304a",
        "x_test": "f9b1e2130bab680db56eb06d886f7f1ad0f1183907ceff4659d1735c890f5b04",
    },
    "cifar100": {
        "x_train": "4e457917601a66aed021f5fa37957b56c6319557c0a8ed5484de3c390af45430",
        "x_test": "4cb8e5d9309da489bf6b19cc10cd96c3ae6f8daf225380b605aaee4c0d6aee19",
    },
}


@pytest.mark.slow
def test_letters() -> None:
    arrays = decode(Emnist())
    assert class_counts(arrays["y_train"]) == [4800] * 26 and class_counts(arrays["y_test"]) == [800] * 26
    assert arrays["x_train"].shape == (124_800, 1, 28, 28)


@pytest.mark.slow
def test_tiny_imagenet() -> None:
    find_or_skip("tiny_imagenet")
    pytest.importorskip("PIL", reason="needs Pillow, which reads JPEG files: pip install -e '.[images]'")
    arrays = decode(TinyImageNet())
    assert class_counts(arrays["y_train"]) == [500] * 200 and class_counts(arrays["y_test"]) == [50] * 200


def test_shakespeare() -> None:
    [data] = files.read_all(find_or_skip("shakespeare")).values()
    text = data.decode("ascii").replace("\r\n", "\n")
    assert sum(len(roles) >= 2 for _, roles in split_plays(text)) == 36
    roles = text_of_roles(text)
    windows = np.array([max(len(text) - 80, 0) for text in roles.values()])
    assert len(roles) == 1145 and (windows > 0).sum() == 1130 and windows.sum() == 4_226_206
    assert windows.max() == 66_903 and int(np.median(windows[windows > 0])) == 1162
    assert set("".join(roles.values())) | {"\n"} == set(ALPHABET)
    assert roles["THE_TRAGEDY_OF_MACBETH_MACBETH"].startswith("So foul and fair a day I have not seen.")


@pytest.mark.slow
def test_shakespeare_divided_as_in_the_paper() -> None:
    find_or_skip("shakespeare")
    data = Shakespeare(share=0.8).load(0, 799)
    assert len(data.train.y) == 3_335_127 and len(data.test.y) == 771_051 and data.classes == 80
    entry, whole = files.table["shakespeare"], Shakespeare().load(0, 660)
    assert (len(whole.train.y), len(whole.test.y)) == (entry.train, entry.test)
    few = Shakespeare(samples=2000, reserve=200, vocabulary="seen").load(0, 100)
    assert np.bincount(few.owner).tolist() == [2000] * 100 and 60 <= few.classes <= 81  # type: ignore[arg-type]
