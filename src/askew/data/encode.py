"""Turns tables of a user into a Dataset: categories, numbers, missing values, clients and classes.

Categories become one input for each of their values, in sorted order; numbers are standardised by the training part's
mean and deviation. What is wrong is said with its row and column.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from ..core.memory import require_memory
from ..core.rng import generator
from ..core.text import count_text
from ..errors import DataError, did_you_mean
from .dataset import Dataset, Samples, hold_out_share, remark_on_tests
from .names import in_order, listed, number_labels, spelling_remark
from .tables import (
    EXACT,
    Column,
    FrameSettings,
    Table,
    TableSettings,
    is_frame,
    number_text,
    table_of_values,
    to_number,
)

MOST_VALUES = 100  # different texts of a category, and labels of a class, that need no word of the user
DATE = re.compile(r"\d{4}-\d\d(-\d\d|$)|\d{1,2}[./-]\d{1,2}[./-]\d{2,4}")
SIGNS = re.compile(r"[\s,'’%$€£]")  # in numbers as people write them
MOSTLY = 0.8  # share of numbers from which on the texts in a column are taken for mistakes


class Target(NamedTuple):
    """What to predict: class labels counted from 0, or numbers."""

    y: torch.Tensor  # [n] int64, or [n, 1] float32
    classes: int  # 0: a regression
    names: tuple[str, ...] | None
    remark: str


def encode(train: Table, test: Table | None, settings: TableSettings) -> Dataset:
    """The dataset of a table's rows; without a table of test rows, a share of each client's rows is held out."""
    features = input_columns(train, settings)
    remarks: list[str] = []
    tables = [train] if test is None else [train, with_columns_of(train, test, features, settings)]
    tables = [without_missing(table, features, settings, remarks) for table in tables]
    for table in tables:
        check_values(table, features, settings, is_test=table is not tables[0])
    if test is not None:
        require_same_kinds(tables[0], tables[1], [*features, settings.label], settings)
    client = settings.client if all(settings.client in table.columns for table in tables) else ""
    used = [*features, settings.label, *([client] if client else [])]
    joined = {name: tables[0].columns[name] for name in used}
    plain = {*features} - {*settings.categories}
    for table in tables[1:]:
        joined = {name: column.joined(table.columns[name], name in plain) for name, column in joined.items()}
    rows = [len(table.lines) for table in tables]
    names, owner = None, None
    if settings.client:  # spelt as in all tables together, so that the test rows' clients are found among them
        clients = joined.get(client, tables[0].columns[settings.client]).as_texts()
        names, owner = client_numbers(clients.take(np.arange(rows[0])))
    held = np.repeat([False, True], rows) if test is not None else held_out(rows[0], owner, settings)
    target = read_target(joined[settings.label], tables, settings)
    x = torch.from_numpy(input_matrix([joined[name] for name in features], ~held, settings))
    parts = [Samples(x, target.y).select(torch.from_numpy(mask)) for mask in (~held, held)]
    spelt = [spelling_remark(names or (), "clients")]
    texts = {name: joined[name].texts for name in features if joined[name].numbers is None}
    spelt += [spelling_remark(texts[name], f"categories of column {name!r}") for name in texts]
    spelt.append(remark_on_tests(parts[0], parts[1], target.names, bool(target.classes)))
    remarks += [remark for remark in (target.remark, *spelt) if remark]
    test_owner = None
    if owner is not None and test is None:
        owner, test_owner = owner[~held], owner[held]
    elif owner is not None and names is not None and client:
        test_owner = known_clients(clients.take(np.arange(*np.cumsum(rows))), names)
    criterion = "cross_entropy" if target.classes else "squared_error"
    return Dataset(
        train=parts[0],
        test=parts[1],
        classes=target.classes,
        owner=owner,
        criterion=criterion,
        test_owner=test_owner,
        client_names=names,
        class_names=target.names,
        remarks=tuple(dict.fromkeys(remarks)),
    )


# columns --------------------------------------------------------------------------------------------------------


def input_columns(table: Table, settings: TableSettings) -> list[str]:
    """The columns that are inputs, in the table's order; names of columns that do not exist are refused."""
    known = list(table.columns)
    if not settings.label:
        raise DataError(
            f"the column to predict in {table.where} is not named; set data.label (in Python label=) to one of "
            f"{listed(known)}."
        )
    for what, names in (
        ("label", (settings.label,)),
        ("client", (settings.client,) if settings.client else ()),
        ("drop", settings.drop),
        ("categories", settings.categories),
    ):
        for name in names:
            if name not in table.columns:
                raise DataError(f"data.{what}: {table.where} has no column {name!r}; {did_you_mean(name, known)}")
    if settings.label == settings.client:
        raise DataError(f"data.label and data.client both name the column {settings.label!r}; name two columns.")
    for what, column in (("label", settings.label), ("client", settings.client)):
        if column and column in settings.drop:
            raise DataError(f"data.drop and data.{what} both name the column {column!r}; leave it out of data.drop.")
    features = [name for name in known if name not in (settings.label, settings.client, *settings.drop)]
    if not features:
        raise DataError(
            f"{table.where} has no column left for the inputs beside {settings.label!r}; add columns, or drop fewer."
        )
    return features


def with_columns_of(train: Table, test: Table, features: list[str], settings: TableSettings) -> Table:
    """The test table, which must have the training table's columns."""
    for name in (*features, settings.label):
        if name not in test.columns:
            raise DataError(
                f"{test.where} has no column {name!r}, which {train.where} has; "
                f"both must have the same: add it, or {settings.advice['drop']}."
            )
    return test


def without_missing(table: Table, features: list[str], settings: TableSettings, remarks: list[str]) -> Table:
    """The table with what `settings.missing` says done to rows that have no value; filling comes later."""
    named = [settings.label, *([settings.client] if settings.client in table.columns else [])]
    checked = [*named, *(features if settings.missing != "fill" else [])]
    missing = np.column_stack([table.columns[name].missing for name in checked])
    if not missing.any():
        return table
    if settings.missing == "drop":
        kept = ~missing.any(1)
        if not kept.any():
            raise DataError(
                f"every row of {table.where} has a missing value; find the emptiest column and "
                f"{settings.advice['drop']}."
            )
        remarks.append(f"Left out: {count_text(int((~kept).sum()), 'row')} of {table.where} with missing values.")
        return table.take(np.flatnonzero(kept))
    row = int(np.flatnonzero(missing.any(1))[0])
    name, cells = checked[int(np.flatnonzero(missing[row])[0])], int(missing.sum())
    others = f" ({cells:,} values are missing in all)" if cells > 1 else ""
    advice = settings.advice["missing"]
    if name in features:
        advice += settings.advice["fill"]
    else:
        advice += f"; a {'label' if name == named[0] else 'client'} cannot be filled in"
    raise DataError(f"column {name!r} has no value in {table.row(row)}{others}; {advice}.")


def require_same_kinds(train: Table, test: Table, names: list[str], settings: TableSettings) -> None:
    """Refuse a column that holds numbers in the training table and texts in the test table."""
    for name in names:
        column = test.columns[name]
        if train.columns[name].numbers is None or column.numbers is not None or name in settings.categories:
            continue
        rows = [
            k for k, code in enumerate(column.codes.tolist()) if code >= 0 and to_number(column.texts[code]) is None
        ]
        if rows:
            raise DataError(
                f"column {name!r} holds numbers in {train.where}, but {column.texts[column.codes[rows[0]]][:40]!r} in "
                f"{test.row(rows[0])}; correct that value, or {settings.advice['categories']}."
            )


def check_values(table: Table, features: list[str], settings: TableSettings, is_test: bool) -> None:
    """Refuse infinite numbers, empty columns, texts among numbers, and texts that are no categories."""
    for name in (*features, settings.label):
        column = table.columns[name]
        if column.missing.all() and is_test:
            continue
        if column.missing.all():
            raise DataError(f"column {name!r} of {table.where} has no values; {settings.advice['drop']}.")
        if column.numbers is not None:
            wrong = np.flatnonzero(np.isinf(column.numbers))
            if len(wrong):
                raise DataError(f"column {name!r} is infinite in {table.row(int(wrong[0]))}; correct it.")
            continue
        if name in settings.categories:
            continue
        refuse_stray_texts(table, column, settings)
        if name == settings.label:
            continue
        refuse_disguised_numbers(table, column, settings)
        if len(column.texts) > MOST_VALUES:
            raise DataError(
                f"column {name!r} of {table.where} has {len(column.texts):,} different texts, such as "
                f"{column.texts[0][:40]!r}, too many for categories; {settings.advice['drop']}, or to keep it "
                f"{settings.advice['categories']}."
            )


def refuse_disguised_numbers(table: Table, column: Column, settings: TableSettings) -> None:
    """Refuse a column of dates, or of numbers that are written with signs: as categories they would say little."""
    what = ""
    if all(DATE.match(text) for text in column.texts):
        what, instead = "dates", "give numbers, such as days since the first"
    elif all(to_number(SIGNS.sub("", text)) is not None for text in column.texts):
        what, instead = "numbers", "write them as 1234.5, without other signs"
    if what:
        raise DataError(
            f"column {column.name!r} of {table.where} holds {what} as texts, such as {column.texts[0][:40]!r}; "
            f"{instead}, or {settings.advice['drop']}, or {settings.advice['categories']}."
        )


def refuse_stray_texts(table: Table, column: Column, settings: TableSettings) -> None:
    """Refuse a column of numbers in which a few texts stand."""
    is_text = np.array([to_number(text) is None for text in column.texts])
    stray = is_text[column.codes] & (column.codes >= 0)
    present = int((column.codes >= 0).sum())
    if present - stray.sum() >= MOSTLY * present:
        row = int(np.flatnonzero(stray)[0])
        raise DataError(
            f"column {column.name!r} holds numbers, but {column.texts[column.codes[row]][:40]!r} in {table.row(row)}; "
            f"correct that value, or {settings.advice['categories']}."
        )


def input_matrix(columns: list[Column], training: np.ndarray, settings: TableSettings) -> np.ndarray:
    """The inputs [n, d] float32: standardised numbers, and one input for each value of a category."""
    blocks, count = list[np.ndarray](), len(training)
    widths = [1 if column.numbers is not None else len(column.texts) + 1 for column in columns]
    require_memory(8 * count * sum(widths), "the table's inputs", "drop columns of many categories (data.drop)")
    for column in columns:
        if column.numbers is not None and column.name not in settings.categories:
            blocks.append(standardised(column.numbers, training, settings.standardise)[:, None])
            continue
        texts = column.as_texts()
        ordered = in_order(texts.texts)
        place = np.array([ordered.index(text) for text in texts.texts] + [len(ordered)], dtype=np.int64)
        width = len(ordered) + bool(texts.missing.any())  # a category of their own for missing values
        blocks.append((place[texts.codes][:, None] == np.arange(width)).astype(np.float32))
    x = np.concatenate(blocks, axis=1).astype(np.float32)
    if not np.isfinite(x).all():
        raise DataError("some numbers of the table are too large for float32; rescale them, or leave data.standardise.")
    return x


def standardised(values: np.ndarray, training: np.ndarray, rescale: bool) -> np.ndarray:
    """A column of numbers, NaN replaced by the training mean; minus that mean and by the training deviation.

    One that is constant in the training rows is 0 in all rows: nothing can be learned of its other values.
    """
    known = values[training & ~np.isnan(values)]
    is_constant = not len(known) or known.min() == known.max()  # which rounding hides in mean and deviation
    mean = float(known.mean()) if not is_constant else float(known[0]) if len(known) else 0.0
    filled = np.where(np.isnan(values), mean, values)
    if not rescale:
        return filled
    return np.zeros_like(filled) if is_constant else (filled - mean) / (float(known.std()) or 1.0)


# clients and targets --------------------------------------------------------------------------------------------


def client_numbers(column: Column) -> tuple[tuple[str, ...], np.ndarray]:
    """The names of the clients in their order, and the number of each row's client."""
    present = {column.texts[code] for code in np.unique(column.codes).tolist()}
    ordered = in_order(present)
    place = np.array([ordered.index(text) if text in present else -1 for text in column.texts], dtype=np.int64)
    return tuple(ordered), place[column.codes]


def known_clients(column: Column, names: tuple[str, ...]) -> np.ndarray | None:
    """The numbers of test rows' clients; None if one of them does not train."""
    numbers = np.array([names.index(text) if text in names else -1 for text in column.texts], dtype=np.int64)
    owner = numbers[column.codes]
    return None if (owner < 0).any() else owner


def held_out(count: int, owner: np.ndarray | None, settings: TableSettings) -> np.ndarray:
    """Which rows are held out for testing, bool [n]."""
    clients = np.zeros(count, dtype=np.int64) if owner is None else owner
    held = hold_out_share(clients, settings.test_share, generator(settings.test_seed, "test split"))
    if not held.any():
        raise DataError(
            f"{f'{count} rows' if owner is None else 'the rows of every client'} are too few to hold out "
            f"data.test_share = {settings.test_share:g} of them for testing; "
            f"{settings.advice['test']}."
        )
    return held


def read_target(column: Column, tables: list[Table], settings: TableSettings) -> Target:
    """What to predict, from the rows of all tables one after the other."""
    task, numbers = settings.task, column.numbers
    if numbers is None and task == "regression":
        raise DataError(
            f"column {column.name!r} holds texts such as {column.texts[0][:40]!r}, and a regression needs numbers; "
            'set data.task = "classes".'
        )
    whole = numbers is not None and bool((numbers == np.round(numbers)).all())
    if numbers is not None and (task == "regression" or (task == "auto" and not whole)):
        return Target(torch.from_numpy(numbers.astype(np.float32))[:, None], 0, None, "")
    different = len(np.unique(column.codes if column.has_codes or numbers is None else numbers))
    if numbers is not None and task == "auto" and different > MOST_VALUES:
        raise DataError(
            f"column {column.name!r} of {tables[0].where} has {different:,} different whole numbers; say "
            f"what they are: {settings.advice['task']}."
        )
    if numbers is not None and whole and not column.has_codes and np.abs(numbers).max() < EXACT:
        labels, names, remark = number_labels(numbers.astype(np.int64))
    else:
        texts = column.as_texts()
        names, labels = client_numbers(texts)
        remark = spelling_remark(names, "classes")
    present = np.unique(labels)
    if len(present) == 1:
        only = names[0] if names else number_text(float(present[0]))
        raise DataError(
            f"every row of {tables[0].where} has the label {only!r} in column {column.name!r}, so there is nothing to "
            "learn; name another column in data.label."
        )
    return Target(torch.from_numpy(labels), len(names) if names else int(present[-1]) + 1, names, remark)


# data frames ----------------------------------------------------------------------------------------------------


def from_frame(frame: Any, test: Any, settings: FrameSettings) -> Dataset:
    """A dataset from a DataFrame and perhaps one of test rows; clients and labels may be in its index."""
    tables: list[Table] = []
    for name, part in (("the DataFrame", frame), ("the test DataFrame", test)):
        if part is None:
            continue
        if not is_frame(part):
            raise DataError(f"the test data must be a DataFrame like the training data, got {type(part).__name__}.")
        if not len(part):
            raise DataError(f"{name} has no rows; give one row a sample.")
        if levels := [level for level in part.index.names if level in (settings.client, settings.label) and level]:
            part = part.reset_index(level=levels)
        if not tables:
            settings = settings_of_types(part, settings)
        titles = [str(title) for title in part.columns]
        if len(set(titles)) < len(titles):
            raise DataError(f"{name} has two columns of one name; rename one.")
        values = {title: frame_column(part.iloc[:, k]) for k, title in enumerate(titles)}
        tables.append(table_of_values(values, name))
    return encode(tables[0], tables[1] if len(tables) > 1 else None, settings)


def settings_of_types(frame: Any, settings: FrameSettings) -> FrameSettings:
    """The settings with what the types of columns say: categories, and what kind of label it is."""
    categories = [str(name) for name, dtype in frame.dtypes.items() if str(dtype) == "category"]
    task = settings.task
    if settings.label in categories:
        task = "classes"
    elif settings.label in frame.columns:
        label = frame[settings.label]
        if getattr(label.dtype, "kind", "") == "f" and label.nunique() > MOST_VALUES:
            task = "regression"
    return replace(settings, categories=tuple(categories), task=task)


def frame_column(series: Any) -> np.ndarray:
    """A column of a DataFrame as an array of numbers or of objects."""
    values = series.to_numpy()
    if values.dtype.kind == "O":
        try:  # whole numbers and truth values that may be missing
            numbers = series.astype("Float64") if str(series.dtype)[:1] in "IUFb" else None
            if numbers is not None:
                return np.asarray(numbers.to_numpy(dtype=np.float64, na_value=np.nan))
        except (TypeError, ValueError):
            pass
        return np.asarray(series.astype(object).where(series.notna(), None).to_numpy())
    return np.asarray(values)
