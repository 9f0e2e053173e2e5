"""Datasets of labelled images, kept as bytes: they become network inputs a batch at a time (see transform.py)."""

from __future__ import annotations

import io
import math
import pickle
import re
import string
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ..core.settings import setting
from ..errors import ConfigError, DataError
from . import files
from .dataset import Dataset, Samples, Source
from .files import DatasetLocation
from .transform import PixelTransform, sample_draws

CHUNK = 4096  # images worked on at once
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Images(Source):
    """Images and how they become inputs; the base class of all image datasets."""

    key: ClassVar[str] = ""  # its name in the table of files
    mean: ClassVar[tuple[float, ...]] = ()  # of each channel of the training images, pixels in 0..1
    std: ClassVar[tuple[float, ...]] = ()
    names: ClassVar[tuple[str, ...]] = ()  # of the classes, where they are few

    train: int = setting("number of training images to use, the first ones; 0: all", default=0, least=0)
    test: int = setting("number of test images to use, the first ones; 0: all", default=0, least=0)
    normalise: str = setting(
        "channels: by the set's mean and standard deviation; unit: to 0..1; half: to −1..1",
        default="channels",
        choices=("channels", "unit", "half"),
    )
    crop: int = setting(
        "side in pixels of the square crop, at a random place for training; 0: the whole image", default=0, least=0
    )
    pad: int = setting("pixels added on each side before a training image is cropped", default=0, least=0)
    fill: str = setting(
        "value of the added pixels: black, mean (zero after normalisation) or reflect",
        default="black",
        choices=("black", "mean", "reflect"),
    )
    flip: bool = setting("mirror half of the training images, left to right", default=False)
    turn: float = setting(
        "rotate training images at random, by at most this many degrees to either side", default=0.0, least=0, most=180
    )
    chance: float = setting(
        "fraction of the training images cropped at a random place; the others are cropped in the middle",
        default=1.0,
        least=0,
        most=1,
    )
    frozen: bool = setting("draw the random changes of each training image once, not at each use", default=False)
    random_test: bool = setting("also change test images at random, once", default=False)

    def check(self) -> None:
        cuts, changes = self.crop or self.pad, self.crop or self.pad or self.flip or self.turn
        if self.chance < 1 and not cuts:
            raise ConfigError(
                f"{self.display_name()}: chance says how often images are cut, and nothing cuts them; "
                "set crop or pad, or drop it."
            )
        if (self.frozen or self.random_test) and not changes:
            which = "frozen" if self.frozen else "random_test"
            raise ConfigError(
                f"{self.display_name()}: {which} needs a random change to make; "
                "set crop, pad, flip or turn, or drop it."
            )
        if self.fill == "reflect" and not self.pad:
            raise ConfigError(
                f'{self.display_name()}: fill = "reflect" says what padding is, and there is none; set pad, or drop it.'
            )
        if self.fill == "mean" and not (self.pad or self.turn):
            raise ConfigError(
                f'{self.display_name()}: fill = "mean" says what padding is, and there is none; '
                "set pad or turn, or drop it."
            )
        if self.fill == "mean" and (self.frozen or self.random_test):
            raise ConfigError(
                f'{self.display_name()}: images changed once for all stay bytes, which cannot hold fill = "mean"; '
                'use "black" or "reflect".'
            )

    @property
    def seeded(self) -> bool:
        return self.frozen or self.random_test

    def load(self, seed: int, clients: int) -> Dataset:
        train, test = self.read()
        side = min(train.x.shape[2:])
        self.check_size(side)
        mean, std = (torch.tensor(values).reshape(-1, 1, 1) for values in self.normalisation(train.x))
        train = take_first(train, self.train, f"{self.key}: train")
        test = take_first(test, self.test, f"{self.key}: test")
        transform = PixelTransform(mean, std, self.crop, self.pad, self.fill, self.flip, self.turn, self.chance)
        if self.random_test:
            test = Samples(augment(transform, test.x, sample_draws(seed, len(test.y), client=-2)), test.y)
        if self.frozen:
            train = Samples(augment(transform, train.x, sample_draws(seed, len(train.y))), train.y)
            test = Samples(crop_middle(test.x, self.crop or side), test.y)
            transform = PixelTransform(mean, std)
        return Dataset(train, test, self.classes, transform=transform)

    def check_size(self, side: int) -> None:
        """Refuse what cannot be cut out of, or reflected in, images of this side in pixels."""
        if self.crop > side:
            raise DataError(
                f"{self.key}: crop must be at most the side of an image, {side}, got {self.crop}; lower data.crop."
            )
        if self.fill == "reflect" and self.pad >= side:
            raise DataError(
                f"{self.key}: an image of side {side} reflects at most {side - 1} pixels, got pad = {self.pad}; "
                "lower data.pad."
            )

    @property
    def classes(self) -> int:
        """The number of classes."""
        return files.table[self.key].classes

    def normalisation(self, x: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """The mean and standard deviation of each channel by which images are normalised.

        `x` are the training images, bytes [n, c, h, w].
        """
        channels = x.shape[1]
        if self.normalise == "channels":
            return self.mean, self.std
        return ((0.5,) * channels,) * 2 if self.normalise == "half" else ((0.0,) * channels, (1.0,) * channels)

    def read(self) -> tuple[Samples, Samples]:
        """All training and test images, from the cache where there is one."""
        arrays = files.load_decoded(files.locate(self.key), self.decode_checked)
        train, test = (Samples(arrays[f"x_{part}"], arrays[f"y_{part}"].long()) for part in ("train", "test"))
        return train, test

    def decode_checked(self, location: DatasetLocation) -> dict[str, Tensor]:
        """Bytes [n, c, h, w] and labels [n] of both parts, after a check that there are as many as there should be."""
        entry, arrays = files.entry(self.key), self.decode(location)
        for part, count in (("train", entry.train), ("test", entry.test)):
            x, y = arrays[f"x_{part}"], arrays[f"y_{part}"]
            if len(x) != count or len(y) != count:
                raise DataError(
                    f"{location.path} should hold {count:,} {part} images and labels, got {len(x):,} and {len(y):,}; "
                    f"remove it and run `{files.get_command(self.key)}`."
                )
            if y.size and int(y.max()) >= entry.classes:
                raise DataError(
                    f"{location.path} should hold labels of {entry.classes} classes, got number {int(y.max())}; "
                    f"remove it and run `{files.get_command(self.key)}`."
                )
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def decode(self, location: DatasetLocation) -> dict[str, Bytes]:
        """The arrays x_train, y_train, x_test and y_test that the files hold."""
        raise NotImplementedError


def take_first(samples: Samples, count: int, what: str) -> Samples:
    """The first samples, all if count is 0; `what` names the setting in the error message."""
    if count > len(samples.y):
        raise DataError(
            f"{what} must be at most the {len(samples.y):,} images there are, got {count:,}; lower it, 0 takes all."
        )
    return samples.select(slice(count)) if count else samples


def augment(transform: PixelTransform, x: Tensor, draws: Tensor) -> Tensor:
    """Images changed at random, still bytes.

    A few are changed at a time, as the numbers of their pixels take eight times the memory of the bytes.
    """
    chunks = zip(torch.split(x, CHUNK), torch.split(draws, CHUNK), strict=True)
    return torch.cat([transform.augment(images, their_draws) for images, their_draws in chunks])


def crop_middle(x: Tensor, side: int) -> Tensor:
    """The square of this side in the middle of images."""
    top, left = ((length - side) // 2 for length in x.shape[2:])
    return x[:, :, top : top + side, left : left + side].contiguous()


def join_parts(parts: Sequence[tuple[Bytes, Bytes]], train_parts: int) -> dict[str, Bytes]:
    """The arrays of a dataset from the (x, y) of several files, the first `train_parts` of which are for training."""
    sides = {"train": parts[:train_parts], "test": parts[train_parts:]}
    return {
        f"{'xy'[k]}_{side}": np.concatenate([pair[k] for pair in pairs])
        for side, pairs in sides.items()
        for k in (0, 1)
    }


# idx files ------------------------------------------------------------------------------------------------------


def parse_idx(data: bytes, name: str, depth: int) -> Bytes:
    """The array of so many dimensions in an idx file of bytes; `name` is the file's, for the error message."""
    body = 4 + 4 * depth
    shape = np.frombuffer(data[4:body], ">u4").tolist() if len(data) >= body else []
    if data[:4] != bytes([0, 0, 8, depth]) or len(data) - body != math.prod(shape):
        raise DataError(f"{name} is not a whole idx file of bytes; remove it and get it anew.")
    return np.frombuffer(data, np.uint8, offset=body).reshape(shape)


class IdxImages(Images):
    """Grey images in four idx files."""

    def decode(self, location: DatasetLocation) -> dict[str, Bytes]:
        arrays = [
            parse_idx(data, f"{location.path}: {name}", 3 if "images" in name else 1)
            for name, data in files.read_all(location).items()
        ]
        x = [images.reshape(len(images), 1, *images.shape[1:]) for images in arrays[::2]]
        return join_parts(list(zip(x, arrays[1::2], strict=True)), train_parts=1)


class Mnist(IdxImages):
    """MNIST (LeCun, Cortes and Burges): handwritten digits."""

    key: ClassVar[str] = "mnist"
    idea: ClassVar[str] = files.table["mnist"].idea()
    mean: ClassVar[tuple[float, ...]] = (0.1307,)
    std: ClassVar[tuple[float, ...]] = (0.3081,)
    names: ClassVar[tuple[str, ...]] = tuple(string.digits)


class FashionMnist(IdxImages):
    """Fashion-MNIST (Xiao, Rasul and Vollgraf, 2017): articles of clothing in the form of MNIST."""

    key: ClassVar[str] = "fashion_mnist"
    idea: ClassVar[str] = files.table["fashion_mnist"].idea()
    mean: ClassVar[tuple[float, ...]] = (0.2860,)
    std: ClassVar[tuple[float, ...]] = (0.3530,)
    names: ClassVar[tuple[str, ...]] = (
        *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
        *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
    )


class Emnist(IdxImages):
    """The letters of EMNIST (Cohen et al., 2017), capital and small in one class; the first ten are FedDyn's EMNIST-L.

    Normalised by the mean and standard deviation of all pixels of the training images of the letters used.
    """

    key: ClassVar[str] = "emnist"
    idea: ClassVar[str] = files.table["emnist"].idea()
    names: ClassVar[tuple[str, ...]] = tuple(string.ascii_lowercase)
    letters: int = setting(
        "use only the first so many letters of the alphabet; 10: EMNIST-L", default=26, least=2, most=26
    )

    @property
    def classes(self) -> int:
        return self.letters

    def decode(self, location: DatasetLocation) -> dict[str, Bytes]:
        arrays = super().decode(location)
        if any(not array.all() for name, array in arrays.items() if name[0] == "y"):
            raise DataError(
                f"{location.path}: the letters of EMNIST are numbered from 1, and there is a 0; "
                "remove it and get it anew."
            )
        # The files hold images column by column, and letters counted from 1.
        return {name: array - 1 if name[0] == "y" else array.swapaxes(2, 3).copy() for name, array in arrays.items()}

    def read(self) -> tuple[Samples, Samples]:
        train, test = super().read()
        if self.letters < len(self.names):
            train, test = (Samples(x[y < self.letters], y[y < self.letters]) for x, y in (train, test))
        return train, test

    def normalisation(self, x: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
        if self.normalise != "channels":
            return super().normalisation(x)
        sums = [(part.sum(), part.square().sum()) for part in (chunk.double() / 255 for chunk in torch.split(x, CHUNK))]
        mean, square = (float(sum(column)) / x.numel() for column in zip(*sums, strict=True))
        return (mean,), ((square - mean**2) ** 0.5,)


# CIFAR ----------------------------------------------------------------------------------------------------------


class ArrayUnpickler(pickle.Unpickler):
    """Reads pickled arrays and plain containers, and refuses everything else that a pickle can call."""

    allowed: ClassVar[dict[str, object]] = {
        "_reconstruct": np.zeros(0).__reduce__()[0],
        "ndarray": np.ndarray,
        "dtype": np.dtype,
    }

    def find_class(self, module: str, name: str) -> object:
        if module not in ("numpy", "numpy.core.multiarray", "numpy._core.multiarray") or name not in self.allowed:
            raise DataError(
                f"a batch of images asks for {module}.{name}, which no array needs; get the published file."
            )
        return self.allowed[name]


class Cifar(Images):
    """Colour images of 32×32 pixels, as records of bytes or as pickled batches."""

    label_bytes: ClassVar[int] = 1  # before each image; the last is the label
    label_key: ClassVar[bytes] = b"labels"

    def decode(self, location: DatasetLocation) -> dict[str, Bytes]:
        read = self.read_records if location.layout.kind == "binary" else self.read_pickle
        parts = [read(data) for data in files.read_all(location).values()]
        return join_parts(parts, train_parts=len(parts) - 1)

    def read_records(self, data: bytes) -> tuple[Bytes, Bytes]:
        """Images and labels of a file of records: the bytes of the labels, then those of the image."""
        rows = np.frombuffer(data, np.uint8).reshape(-1, self.label_bytes + 3 * 32 * 32)
        return rows[:, self.label_bytes :].reshape(-1, 3, 32, 32), rows[:, self.label_bytes - 1]

    def read_pickle(self, data: bytes) -> tuple[Bytes, Bytes]:
        """Images and labels of a pickled dictionary."""
        batch = ArrayUnpickler(io.BytesIO(data), encoding="bytes").load()
        return batch[b"data"].reshape(-1, 3, 32, 32), np.array(batch[self.label_key], np.uint8)


class Cifar10(Cifar):
    """CIFAR-10 (Krizhevsky, 2009)."""

    key: ClassVar[str] = "cifar10"
    idea: ClassVar[str] = files.table["cifar10"].idea()
    mean: ClassVar[tuple[float, ...]] = (0.491, 0.482, 0.447)
    std: ClassVar[tuple[float, ...]] = (0.247, 0.243, 0.262)
    names: ClassVar[tuple[str, ...]] = (
        "airplane",
        "automobile",
        "bird",
        "cat",
        "deer",
        "dog",
        "frog",
        "horse",
        "ship",
        "truck",
    )


class Cifar100(Cifar):
    """CIFAR-100 with its fine labels (Krizhevsky, 2009)."""

    key: ClassVar[str] = "cifar100"
    idea: ClassVar[str] = files.table["cifar100"].idea()
    mean: ClassVar[tuple[float, ...]] = (0.5071, 0.4867, 0.4408)
    std: ClassVar[tuple[float, ...]] = (0.2675, 0.2565, 0.2761)
    label_bytes: ClassVar[int] = 2
    label_key: ClassVar[bytes] = b"fine_labels"


# Tiny ImageNet --------------------------------------------------------------------------------------------------


class TinyImageNet(Images):
    """Tiny ImageNet-200; the validation images are the test set: the labels of the authors' test images are not public.

    Classes are numbered in the order of their WordNet ids. Normalised by the usual numbers of ImageNet.
    """

    key: ClassVar[str] = "tiny_imagenet"
    idea: ClassVar[str] = files.table["tiny_imagenet"].idea()
    mean: ClassVar[tuple[float, ...]] = (0.485, 0.456, 0.406)
    std: ClassVar[tuple[float, ...]] = (0.229, 0.224, 0.225)
    side: ClassVar[int] = 64  # pixels

    def decode(self, location: DatasetLocation) -> dict[str, Bytes]:
        with files.open_verified(location) as read:
            classes = self.read_classes(read, location)
            tests = self.read_tests(read, location, classes)
            per_class = files.entry(self.key).train // len(classes)
            train = [f"train/{wnid}/images/{wnid}_{k}.JPEG" for wnid in classes for k in range(per_class)]
            images = [self.read_jpegs(read, names) for names in (train, [f"val/images/{name}" for name, _ in tests])]
        labels = [np.repeat(np.arange(len(classes)), per_class), np.array([number for _, number in tests])]
        parts = list(zip(images, [numbers.astype(np.uint8) for numbers in labels], strict=True))
        return join_parts(parts, train_parts=1)

    def read_classes(self, read: files.ReadFile, location: DatasetLocation) -> dict[str, int]:
        """The number of each class, by its WordNet id."""
        words, count = read("wnids.txt").decode(errors="replace").split(), files.entry(self.key).classes
        ids = sorted({word for word in words if re.fullmatch(r"[a-z0-9]+", word)})
        if len(ids) != count:
            raise DataError(
                f"{location.path}: wnids.txt should name {count} classes, got {len(ids)}; get Tiny ImageNet anew."
            )
        return {wnid: number for number, wnid in enumerate(ids)}

    def read_tests(
        self, read: files.ReadFile, location: DatasetLocation, classes: Mapping[str, int]
    ) -> list[tuple[str, int]]:
        """The file name and the class of every test image."""
        name, count = "val/val_annotations.txt", files.entry(self.key).test
        rows = [line.split("\t") for line in read(name).decode(errors="replace").splitlines()]
        named = [row for row in rows if len(row) > 1 and re.fullmatch(r"[A-Za-z0-9_]+\.JPEG", row[0])]
        tests = [(row[0], classes[row[1]]) for row in named if row[1] in classes]
        if not len(rows) == len(tests) == count:
            raise DataError(
                f"{location.path}: {name} should give {count:,} images a class of wnids.txt, got {len(rows):,} lines, "
                f"{len(rows) - len(tests):,} of them without one; get Tiny ImageNet anew."
            )
        return tests

    def read_jpegs(self, read: files.ReadFile, names: Sequence[str]) -> Bytes:
        """Decoded JPEG files, [n, 3, h, w]."""
        try:
            from PIL import Image  # an optional extra
        except ImportError:
            raise DataError(
                "Tiny ImageNet consists of JPEG files, which Pillow reads; run pip install 'askew[images]'."
            ) from None
        x = np.empty((len(names), 3, self.side, self.side), np.uint8)
        for row, name in zip(x, names, strict=True):
            data = read(name)
            try:
                with Image.open(io.BytesIO(data), formats=["JPEG"]) as image:
                    if image.size != (self.side, self.side):  # before anything of that size is allocated
                        raise ValueError
                    row[:] = np.asarray(image.convert("RGB")).transpose(2, 0, 1)
            except Exception:  # a decoder raises whatever it comes upon in a damaged file
                raise DataError(
                    f"{name} is not a JPEG file of {self.side}×{self.side} pixels; get Tiny ImageNet anew."
                ) from None
        return x
