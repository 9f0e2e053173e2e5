"""Tables of a user: columns of numbers and of texts, read from CSV or Parquet files."""

from __future__ import annotations

import csv
import gzip
import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any, ClassVar, NamedTuple

import numpy as np

from ..core.files import is_readable_file
from ..core.memory import require_memory
from ..core.settings import Settings, setting
from ..core.text import count_text
from ..errors import DataError

MISSING = {"", "?", "na", "n/a", "nan", "none", "null", "#n/a", "-nan", "<na>", "nat"}  # texts, in small letters
ROWS = 4096  # rows that are read at once
LONGEST_LINE = 2**24  # characters
STEP = 2**26  # characters between two looks at the memory
EXACT = 2**53  # whole numbers below are exact in float64


def share_setting(things: str, condition: str) -> float:
    """The setting of the share that is held out for testing."""
    text = f"share of each client's {things} held out for testing, where {condition}"
    return setting(text, default=0.2, above=0, below=1)


def seed_setting(things: str) -> int:
    """The setting of the seed by which some are held out."""
    return setting(f"seed of which {things} are held out", default=0, least=0)


class TableSettings(Settings):
    """How a table is read: what each column is for, and what is done about missing values."""

    title: ClassVar[str] = "data"
    advice: ClassVar[dict[str, str]] = {  # how to do it, in the sentences that say that it must be done
        "drop": "name it in data.drop",
        "categories": "name it in data.categories",
        "missing": 'set data.missing to "drop", which leaves such rows out',
        "fill": ', or to "fill"',
        "test": "raise it (every client keeps one row to train on), or name a file of test rows in data.test",
        "task": 'set data.task = "regression" or "classes"',
    }
    label: str = setting("the column to predict", default="")
    client: str = setting("the column that names the client of each row; empty: the rows have none", default="")
    drop: tuple[str, ...] = setting("columns that are left out", default=())
    categories: tuple[str, ...] = setting("columns of numbers that are categories, such as codes", default=())
    task: str = setting(
        "what the label is; auto: texts and whole numbers are classes, other numbers a regression",
        default="auto",
        choices=("auto", "classes", "regression"),
    )
    missing: str = setting(
        "missing values: refuse them, fill them (numbers by the training part's mean, categories by one of their own), "
        "or drop their rows",
        default="refuse",
        choices=("refuse", "fill", "drop"),
    )
    standardise: bool = setting(
        "numbers minus the training part's mean, by its standard deviation; false: as they are", default=True
    )
    test_share: float = share_setting("rows", "there is no test file")
    test_seed: int = seed_setting("rows")


class FrameSettings(TableSettings):
    """How a DataFrame is read."""

    advice: ClassVar[dict[str, str]] = {
        "drop": "leave it out by table.drop(columns=…)",
        "categories": 'make it one of categories by .astype("category")',
        "missing": "leave such rows out by table.dropna()",
        "fill": ", or fill them by table.fillna(…)",
        "test": "give more rows, or test=, a DataFrame of test rows",
        "task": 'for a regression .astype(float), for classes .astype("category")',
    }


class Column(NamedTuple):
    """One column: numbers, or texts by their places in a list of the different ones."""

    name: str
    numbers: np.ndarray | None  # [n] float64, NaN where there is none
    codes: np.ndarray  # [n] places in texts, −1 where there is none; empty where number_text gives the texts
    texts: tuple[str, ...] = ()

    @property
    def has_codes(self) -> bool:
        """Would some of the texts lose something as numbers?"""
        return any(is_code(text) for text in self.texts)

    @property
    def missing(self) -> np.ndarray:
        """Which rows have no value, bool [n]."""
        return np.isnan(self.numbers) if self.numbers is not None else self.codes < 0

    @classmethod
    def of_texts(cls, name: str, texts: Sequence[str], codes: np.ndarray) -> Column:
        """A column from its different texts: one of numbers, where all that are there can be read as such."""
        is_missing = [text.lower() in MISSING for text in texts]
        values = [math.nan if gone else to_number(text) for text, gone in zip(texts, is_missing, strict=True)]
        kept = [text for text, gone in zip(texts, is_missing, strict=True) if not gone]
        place = np.where(is_missing, -1, np.cumsum([not gone for gone in is_missing]) - 1)
        if any(value is None for value in values) or not kept:
            return cls(name, None, place[codes], tuple(kept))
        numbers = np.array(values, dtype=np.float64)
        if all(text == number_text(value) for text, value in zip(kept, numbers[place >= 0].tolist(), strict=True)):
            return cls(name, numbers[codes], codes[:0])
        return cls(name, numbers[codes], place[codes], tuple(kept))

    @classmethod
    def of_values(cls, name: str, values: np.ndarray) -> Column:
        """A column from an array of numpy, of numbers or of any objects."""
        if values.dtype.kind in "iu" and (np.abs(values.astype(np.float64)) >= EXACT).any():
            whole, codes = np.unique(values, return_inverse=True)
            return cls.of_texts(name, [str(value) for value in whole.tolist()], codes)
        if values.dtype.kind in "biuf":
            return cls(name, values.astype(np.float64), np.empty(0, dtype=np.int64))
        texts = ["" if value is None or value != value else str(value).strip() for value in values.tolist()]
        distinct, codes = np.unique(np.array(texts, dtype=object).astype(str), return_inverse=True)
        return cls.of_texts(name, distinct.tolist(), codes)

    def as_texts(self) -> Column:
        """The same column with its values as texts; numbers are written in one way, unless some are codes."""
        if self.numbers is None or self.has_codes:
            return self._replace(numbers=None)
        return self._replace(codes=self.codes[:0], texts=()).as_written()

    def as_written(self) -> Column:
        """The same column with its values as the texts that they were read from."""
        if self.numbers is None or len(self.codes):
            return self._replace(numbers=None)
        values, codes = np.unique(self.numbers, return_inverse=True)  # NaN comes last, once
        texts = tuple(number_text(value) for value in values.tolist() if not math.isnan(value))
        return Column(self.name, None, np.where(codes < len(texts), codes, -1), texts)

    def take(self, rows: np.ndarray) -> Column:
        """The column at some rows."""
        return self._replace(
            numbers=None if self.numbers is None else self.numbers[rows],
            codes=self.codes[rows] if len(self.codes) else self.codes,
        )

    def joined(self, other: Column, as_numbers: bool = False) -> Column:
        """The rows of both columns, one after the other: as if one file had held them.

        With `as_numbers` the texts of numbers are not kept, which saves time and memory.
        """
        numbers = None
        if self.numbers is not None and (other.numbers is not None or other.missing.all()):
            others = other.numbers if other.numbers is not None else np.full(len(other.codes), np.nan)
            numbers = np.concatenate([self.numbers, others])
            if as_numbers or not (self.texts or other.texts):
                return Column(self.name, numbers, self.codes[:0])
        one, two = self.as_written(), other.as_written()
        known = {text: k for k, text in enumerate(one.texts)}
        place = np.array([known.setdefault(text, len(known)) for text in two.texts] + [-1], dtype=np.int64)
        return Column(self.name, numbers, np.concatenate([one.codes, place[two.codes]]), tuple(known))


def to_number(text: str) -> float | None:
    """The number that a text is, or None."""
    try:
        return None if "_" in text else float(text)
    except ValueError:
        return None


def is_code(text: str) -> bool:
    """Is this the text of a number that would lose something as a number: 007, or more digits than a number holds?"""
    digits = text.lstrip("+-")
    return digits.isdecimal() and (
        (len(digits) > 1 and digits[0] == "0") or len(digits) > len(str(EXACT)) or int(digits) >= EXACT
    )


def number_text(value: float) -> str:
    """A number as a name: 3 and not 3.0."""
    return str(int(value)) if abs(value) < EXACT and value == round(value) else repr(value)


@dataclass(frozen=True)
class Table:
    """Columns by name, and where they are from."""

    where: str  # the file, or what else it is
    columns: dict[str, Column]
    lines: np.ndarray  # [n] the line of each row in the file, or its number
    unit: str = "line"

    def row(self, at: int) -> str:
        """How a sentence calls a row: "line 17 of patients.csv"."""
        return f"{self.unit} {self.lines[at]} of {self.where}"

    def take(self, rows: np.ndarray) -> Table:
        """The table of some rows."""
        columns = {name: column.take(rows) for name, column in self.columns.items()}
        return Table(self.where, columns, self.lines[rows], self.unit)


# reading --------------------------------------------------------------------------------------------------------


def read_csv(path: Path, delimiter: str) -> Table:
    """The table in a text file, whose first line has the columns' names; a name that ends in .gz is unpacked."""
    require_file(path)
    name, rows = path.name, list[Sequence[str]]()
    try:
        with open_text(path) as file:
            reader = csv.reader(bounded_lines(file, name), delimiter=delimiter, skipinitialspace=True)
            header = [text.strip() for text in next(reader, [])]
            check_header(header, name, delimiter)
            seen: list[dict[str, int]] = [{} for _ in header]
            codes, lines = [array("i") for _ in header], array("q")
            while rows := list(islice(numbered_rows(reader, lines, len(header), name), ROWS)):
                for values, known, places in zip(zip(*rows, strict=True), seen, codes, strict=True):
                    places.extend([known.setdefault(value.strip(), len(known)) for value in values])
    except UnicodeDecodeError as e:
        before = f" after {e.object[max(0, e.start - 20) : e.start]!r}" if e.start else ""
        raise DataError(
            f"{name} is no text in UTF-8 (byte {e.object[e.start]:#04x}{before}); save it as CSV in UTF-8."
        ) from None
    except csv.Error as e:
        raise DataError(f"{name} cannot be read as CSV near line {reader.line_num}: {e}; save it anew.") from None
    except (EOFError, gzip.BadGzipFile) as e:
        raise DataError(f"{name} is a damaged gzip file ({e}); pack it anew.") from None
    if not len(lines):
        raise DataError(f"{name} has a header and no rows; give one row a sample.")
    columns = {
        title: Column.of_texts(title, list(known), np.frombuffer(places, dtype=np.int32).astype(np.int64))
        for title, known, places in zip(header, seen, codes, strict=True)
    }
    return Table(name, columns, np.frombuffer(lines, dtype=np.int64))


def require_file(path: Path) -> None:
    """Refuse a path that is no readable file."""
    if not is_readable_file(path):
        what = "is a folder" if path.is_dir() else "is no regular file, or far too large" if path.exists() else ""
        raise DataError(
            f"the file {str(path)!r} {what or 'does not exist'}; set data.file, or data.test, to a file's path "
            "(from the folder in which askew runs)."
        )


def open_text(path: Path) -> IO[str]:
    """A text file, unpacked where it is packed; a workbook is refused."""
    with path.open("rb") as file:
        start = file.read(4)
    if start[:2] == b"PK" or start == b"\xd0\xcf\x11\xe0":
        raise DataError(f"{path.name} is no text but a workbook or archive; export it as CSV.")
    if start[:2] == b"\x1f\x8b":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    require_memory(2 * path.stat().st_size, f"the table {path.name}", "take fewer rows or columns")
    return path.open(encoding="utf-8-sig", newline="")


def bounded_lines(file: IO[str], name: str) -> Iterator[str]:
    """The lines of a text that may be unpacked while it is read: neither a line nor the whole may fill the memory."""
    total, looked = 0, 0
    while line := file.readline(LONGEST_LINE):
        if len(line) == LONGEST_LINE:
            raise DataError(f"{name} has a line of more than {LONGEST_LINE:,} characters; is it a table?")
        if "\0" in line:
            raise DataError(
                f"{name} has a NUL byte in {line[:40]!r}; it is damaged, or no text: save it as CSV in UTF-8."
            )
        total += len(line)
        if total - looked > STEP:
            looked = total
            require_memory(2 * total, f"the table {name}", "take fewer rows or columns")
        yield line


def check_header(header: list[str], name: str, delimiter: str) -> None:
    """Refuse a first line that cannot be the columns' names."""
    if not header:
        raise DataError(f"{name} is empty; its first line must have the columns' names.")
    if len(header) == 1:
        other = next((sign for sign in ";\t|," if sign != delimiter and sign in header[0]), "")
        if other:
            shown = "tab" if other == "\t" else other
            raise DataError(
                f"{name} has one column, {header[0]!r}: its values are separated by {other!r} and not by "
                f'{delimiter!r}; set data.delimiter = "{shown}".'
            )
    for k, title in enumerate(header):
        if not title:
            raise DataError(
                f"column {k + 1} of {name} has no name, and the first line must name every column; name it, or leave "
                "it out (row numbers that pandas wrote: save by to_csv(path, index=False))."
            )
        if title in header[:k]:
            raise DataError(f"{name} has two columns named {title!r}; rename one.")


def numbered_rows(reader: Any, lines: array[int], width: int, name: str) -> Iterator[Sequence[str]]:
    """The rows of a reader, each as long as the header; their lines are noted. Empty lines are left out."""
    for row in reader:
        if not row:
            continue
        if len(row) != width:
            raise DataError(
                f"line {reader.line_num} of {name} has {count_text(len(row), 'value')}, and the header names "
                f"{width} columns; correct that line (a value with the separator in it needs quotes)."
            )
        lines.append(reader.line_num)
        yield row


def read_parquet(path: Path) -> Table:
    """The table in a Parquet file."""
    require_file(path)
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise DataError(
            f"{path.name} is read by pyarrow, which is not installed; pip install pyarrow, or save the table as CSV."
        ) from None
    try:
        file = parquet.ParquetFile(path)
        groups = [file.metadata.row_group(k).total_byte_size for k in range(file.metadata.num_row_groups)]
        require_memory(4 * sum(groups), f"the table {path.name}", "take fewer rows or columns")
        content = file.read()
    except (pyarrow.ArrowException, OSError) as e:
        reason = " ".join(str(e).split()).rstrip(".")
        raise DataError(f"{path.name} cannot be read as Parquet ({reason}); save it anew.") from None
    if not content.num_rows:
        raise DataError(f"{path.name} has no rows; give one row a sample.")
    values = {}
    for name in content.column_names:
        column = content.column(name)
        if pyarrow.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        if column.null_count and pyarrow.types.is_integer(column.type):  # as real numbers long ones would be merged
            values[name] = np.array(column.to_pylist(), dtype=object)
        else:
            values[name] = column.to_numpy()
    return table_of_values(values, path.name)


def table_of_values(values: dict[str, Any], where: str) -> Table:
    """A table from one array for each column."""
    columns = {}
    for name, column in values.items():
        if column.dtype.kind == "O" and any(isinstance(value, (list, tuple, dict, np.ndarray)) for value in column):
            raise DataError(f"column {name!r} of {where} holds lists; give one column to each number.")
        if column.dtype.kind == "c":
            raise DataError(f"column {name!r} of {where} holds complex numbers; give two columns of real ones.")
        if column.dtype.kind == "m":  # a duration: seconds
            column = np.where(np.isnat(column), np.nan, column / np.timedelta64(1, "s"))
        elif column.dtype.kind == "M":
            column = column.astype("datetime64[s]").astype(str)
        columns[name] = Column.of_values(name, column)
    count = len(next(iter(values.values()))) if values else 0
    return Table(where, columns, np.arange(count), "row")


def is_frame(data: object) -> bool:
    """Is this a DataFrame of pandas? It need not be installed to ask."""
    return any(
        base.__module__.split(".")[0] == "pandas" and base.__name__ == "DataFrame" for base in type(data).__mro__
    )
