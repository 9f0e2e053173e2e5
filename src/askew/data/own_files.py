"""Datasets that are a user's own files: CSV and Parquet tables, NumPy archives and folders of images."""

from __future__ import annotations

import os
import zipfile
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, ClassVar, NamedTuple

import numpy as np
import torch

from ..core.memory import require_memory
from ..core.rng import generator
from ..core.settings import setting
from ..errors import ConfigError, DataError, did_you_mean
from .arrays import label_classes, make_user_dataset, numbers_among, to_raw_samples
from .dataset import Dataset, Samples, Source, hold_out_share
from .encode import encode
from .names import listed, number_names
from .tables import Table, TableSettings, read_csv, read_parquet, require_file, seed_setting, share_setting
from .transform import PixelTransform

IMAGE_ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
IGNORED_FILES = ("thumbs.db", "desktop.ini")  # what systems put beside images; names that begin with a dot too
TRAIN_FOLDERS, TEST_FOLDERS = ("train", "training"), ("test", "testing", "val", "valid", "validation")
TWO_BYTES = "I;16"  # how Pillow's names of modes with 16 bits a pixel begin; the byte order may follow
MOST_PIXELS = 2**26  # of one image; a file may claim more than there is memory
KEPT_DATASETS = 2  # that stay in memory, so that a configuration and its run read a file once


class OwnFiles(Source):
    """A dataset that is in the user's own files."""

    title: ClassVar[str] = "data"
    file: str = setting("path of the file", default="")
    test: str = setting("path of a file of test samples; empty: some are held out", default="")

    @property
    def seeded(self) -> bool:
        return False

    @property
    def owners(self) -> int:
        if not self.has_clients:
            return 0
        names = self.load(0, 0).client_names
        return 0 if names is None else len(names)

    @property
    def regression(self) -> bool:
        try:
            return bool(self.file) and self.load(0, 0).classes == 0
        except DataError:  # which a run says
            return False

    @property
    def has_clients(self) -> bool:
        """May the samples have owners? Where not, the files are not read to learn it."""
        return True

    def reads(self) -> tuple[Path, ...]:
        return tuple(Path(text).expanduser() for text in (self.file, self.test) if text)

    def load(self, seed: int, clients: int) -> Dataset:
        if not self.file:
            raise ConfigError('data.file is not set; name the file of the data, as in data.file = "patients.csv".')
        return load_once(self, stamp(self.reads()))

    def read(self) -> Dataset:
        """The dataset that the files hold."""
        raise NotImplementedError


@lru_cache(KEPT_DATASETS)
def load_once(source: OwnFiles, stamp: tuple[Any, ...]) -> Dataset:
    """What a source reads; `stamp` changes with its files."""
    return source.read()


def stamp(paths: tuple[Path, ...]) -> tuple[Any, ...]:
    """Names, sizes and times of files, and of all files in folders."""
    found: list[Any] = []
    for path in paths:
        for file in files_below(path) if path.is_dir() else [path]:
            try:
                about = file.stat()
            except (OSError, ValueError):
                found.append((str(file), None))
            else:
                found.append((str(file), about.st_size, about.st_mtime_ns))
    return tuple(found)


def files_below(folder: Path) -> list[Path]:
    """All files in a folder and the folders in it, sorted; links to folders are not followed."""
    return sorted(Path(where) / name for where, _, names in os.walk(folder) for name in names)


# tables ---------------------------------------------------------------------------------------------------------


class TableFile(OwnFiles, TableSettings):
    """A table in a file, one row a sample."""

    @property
    def has_clients(self) -> bool:
        return bool(self.client)

    @property
    def owners(self) -> int:
        try:
            return super().owners
        except DataError:  # a table that cannot be trained on can still be described; a run says what is wrong
            column = self.tables()[0].columns.get(self.client)
            if column is None:
                raise
            return len(column.as_texts().texts)

    def tables(self) -> list[Table]:
        """The table of the training rows, and perhaps that of the test rows."""
        return [self.read_table(path) for path in self.reads()]

    def read_table(self, path: Path) -> Table:
        """The table in one file."""
        raise NotImplementedError

    def read(self) -> Dataset:
        train, *test = self.tables()
        return encode(train, test[0] if test else None, self)


class Csv(TableFile):
    """A CSV file whose first line names the columns; a name that ends in .gz may be packed.

    Columns of numbers are standardised, columns of texts become one input for each of their values. `client` names the
    column of the clients and `label` the one to predict.
    """

    idea: ClassVar[str] = "a CSV file of your own: numbers and categories, clients by a column"
    delimiter: str = setting("what separates the values; tab: a tab", default=",")

    def check(self) -> None:
        if len(self.separator) != 1 or self.separator in '\r\n"':
            raise ConfigError(f'data: delimiter must be one character, got {self.delimiter!r}; try "," or ";".')

    @property
    def separator(self) -> str:
        """The delimiter itself; a shell hands a tab over as two characters."""
        return "\t" if self.delimiter in ("\\t", "tab") else self.delimiter

    def read_table(self, path: Path) -> Table:
        return read_csv(path, self.separator)


class Parquet(TableFile):
    """A Parquet file, read by pyarrow; columns mean what they mean in a CSV file."""

    idea: ClassVar[str] = "a Parquet file of your own: numbers and categories, clients by a column"

    def read_table(self, path: Path) -> Table:
        return read_parquet(path)


# arrays ---------------------------------------------------------------------------------------------------------


class Npz(OwnFiles):
    """A NumPy archive (.npz) with one array of inputs [n, …] and one of targets [n].

    The arrays x_train, y_train, x_test and y_test are taken where there is no x. Bytes of images [n, c, h, w] or
    [n, h, w] become numbers in 0..1.
    """

    idea: ClassVar[str] = "arrays of your own in a NumPy archive"
    x: str = setting("the array of the inputs", default="x")
    label: str = setting("the array of the targets", default="y")
    client: str = setting("the array that names the client of each sample; empty: none", default="")
    test_share: float = share_setting("samples", "there is no test file")
    test_seed: int = seed_setting("samples")

    @property
    def has_clients(self) -> bool:
        return bool(self.client)

    @property
    def default_network(self) -> str:
        if not self.file:
            return ""
        data = self.load(0, 0)
        shape = data.train.x.shape[1:]
        return "cnn" if len(shape) == 3 and shape[0] in (1, 3) and min(shape[1:]) >= 4 else ""

    def read(self) -> Dataset:
        parts, remarks = list[dict[str, Any]](), list[str]()
        for path in self.reads():
            arrays = read_arrays(path)
            split = self.x not in arrays and "x_train" in arrays and "y_train" in arrays
            names = {"x": "x_train", "y": "y_train"} if split else {"x": self.x, "y": self.label}
            names |= {"owner": self.client} if self.client else {}
            for what, name in names.items():
                if name not in arrays:
                    setting_name = {"x": "x", "y": "label", "owner": "client"}[what]
                    raise DataError(
                        f"data.{setting_name}: {path.name} has no array {name!r}; {did_you_mean(name, arrays)}"
                    )
            parts.append({what: arrays[name] for what, name in names.items()})
            test = [arrays.get("x_test"), arrays.get("y_test")] if split and not self.test else [None]
            if test[0] is not None and test[-1] is not None:
                parts.append({"x": test[0], "y": test[1]})
                names |= {"x test": "x_test", "y test": "y_test"}
            others = [name for name in arrays if name not in names.values()]
            remarks += [f"{path.name} also holds {listed(others)}, which is not used."] if others else []
        dataset = self.divide(parts)
        return replace_remarks(dataset, remarks)

    def divide(self, parts: list[dict[str, Any]]) -> Dataset:
        """The dataset of the training arrays, and of test arrays if there are two parts."""
        is_pixels = parts[0]["x"].dtype == np.uint8 and parts[0]["x"].ndim in (3, 4)
        if is_pixels:
            parts = [part | {"x": part["x"][:, None] if part["x"].ndim == 3 else part["x"]} for part in parts]
        whats = [
            f"{what} in {path.name}" for what, path in zip(("arrays", "test arrays"), self.reads() * 2, strict=False)
        ]
        raw = [
            to_raw_samples(tuple(part.values()), what, keep_bytes=is_pixels)
            for part, what in zip(parts, whats, strict=False)
        ]
        if len(raw) == 1:
            owner = np.zeros(len(raw[0].x), dtype=np.int64) if raw[0].owner is None else number_names(raw[0].owner)[0]
            held = hold_out_share(owner, self.test_share, generator(self.test_seed, "test split"))
            if not held.any():
                raise DataError(f"{len(owner)} samples are too few to hold some out; raise data.test_share.")
            raw = [
                part._replace(x=part.x[rows], y=part.y[rows], owner=None if part.owner is None else part.owner[rows])
                for part, rows in ((raw[0], ~held), (raw[0], held))
            ]
        dataset = make_user_dataset(raw[0], raw[1])
        return with_unit_range(dataset) if is_pixels else dataset


def with_unit_range(dataset: Dataset) -> Dataset:
    """A dataset of bytes [n, c, h, w] whose inputs are numbers in 0..1."""
    channels = dataset.train.x.shape[1]
    return replace(dataset, transform=PixelTransform(torch.zeros(channels, 1, 1), torch.ones(channels, 1, 1)))


def replace_remarks(dataset: Dataset, remarks: list[str]) -> Dataset:
    """The dataset with further remarks."""
    return replace(dataset, remarks=(*dataset.remarks, *remarks))


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a NumPy archive by name; nothing is unpickled, and a false header allocates nothing."""
    require_file(path)
    try:
        with zipfile.ZipFile(path) as archive:
            require_memory(
                sum(entry.file_size for entry in archive.infolist()),
                f"the arrays in {path.name}",
                "store fewer samples",
            )
            arrays = {}
            for entry in archive.infolist():
                with archive.open(entry) as file:
                    arrays[entry.filename.removesuffix(".npy")] = read_array(file, entry, path.name)
            return arrays
    except zipfile.BadZipFile:
        raise DataError(
            f"{path.name} is no NumPy archive, or a damaged one; save it by numpy.savez(path, x=x, y=y)."
        ) from None


def read_array(file: IO[bytes], entry: zipfile.ZipInfo, name: str) -> np.ndarray:
    """One array of an archive, if its header states as many bytes as there are."""
    where = f"the array {entry.filename.removesuffix('.npy')!r} in {name}"
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file)
    except Exception:  # numpy parses the header as Python text, where anything may go wrong
        raise DataError(f"{where} is damaged, or no array; save it anew by numpy.savez.") from None
    if dtype.hasobject:
        raise DataError(
            f"{where} holds Python objects, which could run code when they are read; save names as texts, "
            "as in owner.astype(str), and ragged lists padded."
        )
    count = int(np.prod(shape, dtype=object)) if shape else 1
    content = file.read()
    if count * dtype.itemsize != len(content):
        raise DataError(f"{where} is damaged: its header states {count:,} values; save it anew by numpy.savez.")
    return np.frombuffer(bytearray(content), dtype=dtype).reshape(shape, order="F" if fortran else "C")


# images ---------------------------------------------------------------------------------------------------------


class ImagePlace(NamedTuple):
    """An image file, and what the folders that it is in say of it."""

    path: Path
    client: str  # empty: the folders name none
    label: str


class ImageFolder(OwnFiles):
    """A folder of images: one folder a class, or a folder a client with folders of classes in it.

    Folders train and test (or val) at the top are the training and the test images. Pillow reads the images, which are
    stored as bytes and become numbers in 0..1.
    """

    idea: ClassVar[str] = "a folder of images of your own: a folder a class, or a folder a client with classes inside"
    file: str = setting("path of the folder", default="")
    test: str = setting("path of a folder of test images; empty: a folder test, or some are held out", default="")
    size: int = setting(
        "images are resized to so many pixels a side; 0: all have one size already", default=0, least=0, most=4096
    )
    test_share: float = share_setting("images", "there are no test images")
    test_seed: int = seed_setting("images")

    @property
    def default_network(self) -> str:
        return "cnn"

    @property
    def has_clients(self) -> bool:
        return bool(self.file) and any(place.client for place in self.places()[0])

    def places(self) -> tuple[list[ImagePlace], list[ImagePlace], list[str]]:
        """The images to train on, those to test on, and the names of files that are no images."""
        folder, *test = self.reads()
        found, others = image_files(folder)
        parts = [(file, file.relative_to(folder).parts[:-1]) for file in found]
        first = {names[0].lower() if names else "" for _, names in parts}
        split = first <= {*TRAIN_FOLDERS, *TEST_FOLDERS} and first & {*TRAIN_FOLDERS} and first & {*TEST_FOLDERS}
        train, held = parts, []
        if split:
            train, held = (
                [(file, names[1:]) for file, names in parts if names[0].lower() in kind]
                for kind in (TRAIN_FOLDERS, TEST_FOLDERS)
            )
        if test:
            more, other = image_files(test[0])
            held, others = [(file, file.relative_to(test[0]).parts[:-1]) for file in more], others + other
        return image_places(train, folder), image_places(held, folder), others

    def read(self) -> Dataset:
        train, test, others = self.places()
        reader = ImageReader(self.size, [place.path for place in (*train, *test)])
        labels = number_names(np.array([place.label for place in (*train, *test)]))
        if len(labels.names) < 2:
            raise DataError(
                f"all images in {self.file} are in the one class {labels.names[0]!r}; make one folder for each class."
            )
        samples = Samples(torch.from_numpy(reader.read()), torch.from_numpy(labels.numbers))
        owner, names = None, None
        if train[0].client:
            owner, names = number_names(np.array([place.client for place in train]))
        is_test = np.repeat([False, True], [len(train), len(test)])
        test_owner = numbers_among(names, np.array([p.client for p in test])) if names and test else None
        if not test:
            clients = np.zeros(len(train), dtype=np.int64) if owner is None else owner
            is_test = hold_out_share(clients, self.test_share, generator(self.test_seed, "test split"))
            if not is_test.any():
                raise DataError(f"{len(train)} images are too few to hold some out; raise data.test_share.")
            owner, test_owner = (None, None) if owner is None else (owner[~is_test], owner[is_test])
        parts = [samples.select(torch.from_numpy(rows)) for rows in (~is_test, is_test)]
        more: dict[str, Any] = {"owner": owner, "test_owner": test_owner, "client_names": names}
        are = "file is no image" if len(others) == 1 else "files are no images"
        remarks = [f"{len(others):,} {are} and left out: {listed(others)}."] if others else []
        return replace_remarks(with_unit_range(label_classes(parts[0], parts[1], labels.names, **more)), remarks)


def image_files(folder: Path) -> tuple[list[Path], list[str]]:
    """The images in a folder, and the names of other files; what systems put there is not counted."""
    if not folder.is_dir():
        what = "is no folder" if folder.exists() else "does not exist"
        raise DataError(f"the folder {str(folder)!r} {what}; set data.file to a folder with one folder for each class.")
    found, others = list[Path](), list[Path]()
    for path in files_below(folder):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if hidden or path.name.lower() in IGNORED_FILES:
            continue
        (found if path.suffix.lower() in IMAGE_ENDINGS else others).append(path)
    if not found:
        raise DataError(
            f"the folder {str(folder)!r} holds no images ({', '.join(IMAGE_ENDINGS)}); "
            "put them into one folder for each class."
        )
    return found, [path.name for path in others]


def image_places(files: list[tuple[Path, tuple[str, ...]]], folder: Path) -> list[ImagePlace]:
    """The class of every image, and its client where folders of classes are in a folder for each client."""
    depths = {len(names) for _, names in files}
    if not files:
        return []
    if len(depths) > 1 or not depths <= {1, 2}:
        depth = len(files[0][1])
        odd = next((file for file, names in files if len(names) != depth or depth not in (1, 2)), files[0][0])
        raise DataError(
            f"the image {odd.relative_to(folder) if odd.is_relative_to(folder) else odd} is not where images belong; "
            "every one must be in CLASS/image or every one in CLIENT/CLASS/image."
        )
    return [ImagePlace(file, names[0] if len(names) == 2 else "", names[-1]) for file, names in files]


class ImageReader:
    """Reads image files as bytes of one size and one number of channels."""

    def __init__(self, side: int, paths: list[Path]) -> None:
        try:
            from PIL import Image
        except ImportError:
            raise DataError(
                "images are read by Pillow, which is not installed; pip install pillow, or store arrays (npz)."
            ) from None
        self.library, self.side, self.paths = Image, side, paths

    def read(self) -> np.ndarray:
        """All images as bytes [n, c, h, w]: grey if all are grey, else in colour."""
        sizes, grey = dict[tuple[int, int], Path](), True
        for path in self.paths:
            with self.open(path) as image:
                sizes.setdefault(image.size, path)
                grey &= image.mode in ("1", "L", "LA") or image.mode.startswith(TWO_BYTES)
        if not self.side and len(sizes) > 1:
            (one, first), (two, second) = list(sizes.items())[:2]
            raise DataError(
                f"the images must have one size, and {first} has {one[0]}×{one[1]} pixels, {second} "
                f"{two[0]}×{two[1]}; set data.size, for example data.size = 32, to resize them."
            )
        width, height = (self.side, self.side) if self.side else next(iter(sizes))
        if min(width, height) < 4:
            raise DataError(f"the images have {width}×{height} pixels, too few; give images of 4×4 or more.")
        channels = 1 if grey else 3
        require_memory(
            len(self.paths) * channels * width * height, f"{len(self.paths):,} images", "set data.size to fewer pixels"
        )
        pixels = np.empty((len(self.paths), channels, height, width), dtype=np.uint8)
        for k, path in enumerate(self.paths):
            with self.open(path) as image:
                pixels[k] = self.decode(image, path, "L" if grey else "RGB")
        return pixels

    def open(self, path: Path) -> Any:
        """An image that is not decoded yet; one that is damaged or far too large is refused."""
        try:
            image = self.library.open(path)
        except Exception as e:  # anything may go wrong inside a damaged file
            raise self.damaged(path, e) from None
        if image.width * image.height > MOST_PIXELS:
            image.close()
            raise DataError(f"the image {path} has {image.width}×{image.height} pixels, too many; make it smaller.")
        if image.mode in ("I", "F"):
            image.close()
            raise DataError(
                f"the image {path} has {'whole' if image.mode == 'I' else 'real'} numbers as pixels, and nothing says "
                "which are black and white; save it as 8 bit."
            )
        return image

    def decode(self, image: Any, path: Path, mode: str) -> np.ndarray:
        """The bytes [c, h, w] of an image, resized where a side is asked for."""
        try:
            if image.mode.startswith(TWO_BYTES):  # Pillow's convert would clip at 255
                image = self.library.fromarray((np.asarray(image) >> 8).astype(np.uint8))
            image = image.convert(mode)
            if self.side:
                image = image.resize((self.side, self.side), self.library.Resampling.BILINEAR)
            values = np.asarray(image)
        except Exception as e:
            raise self.damaged(path, e) from None
        return values[None] if values.ndim == 2 else values.transpose(2, 0, 1)

    def damaged(self, path: Path, problem: Exception) -> DataError:
        """The error for a file that is no image."""
        reason = " ".join(str(problem).split())[:100].rstrip(".")
        return DataError(f"the image {path} cannot be read ({reason}); replace or remove it.")
