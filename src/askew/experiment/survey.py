"""What a configuration's data are, before anything is trained: clients, sizes, classes, and what is missing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..data.federation import Federation
from ..data.own_files import TableFile
from ..data.skew import heterogeneity
from ..data.tables import Column, Table
from ..engine.settings import EngineSettings
from .build import OWNERS_PASSED_OVER, build, client_label_counts, passes_over_owners
from .config import Config


@dataclass(frozen=True)
class Survey:
    """What the data of a configuration are."""

    name: str  # of the dataset
    samples: int  # to train on
    tests: int  # to test on
    shape: tuple[int, ...]  # of an input
    classes: int  # 0: a regression
    clients: tuple[str, ...]  # names, or numbers
    labels: tuple[str, ...]  # names of the classes, or numbers
    sizes: np.ndarray  # [N] training samples of every client
    counts: np.ndarray  # [N, classes] of them by class
    tests_of: np.ndarray | None  # [N] test samples of every client, where these have owners
    columns: tuple[dict[str, Any], ...]  # of a table: what each is for, its values, and how many are missing
    remarks: tuple[str, ...]
    round_length: str = ""  # on the virtual clock, in words; empty without one

    @property
    def skew(self) -> dict[str, float | int]:
        """The measures of how unequal the clients are."""
        return heterogeneity(self.counts, self.sizes)

    def summary(self) -> dict[str, Any]:
        """All of it as plain values."""
        facts = {
            "data": self.name,
            "train": self.samples,
            "test": self.tests,
            "shape": list(self.shape),
            "classes": list(self.labels),
            "columns": list(self.columns),
            "remarks": list(self.remarks),
            "skew": self.skew,
            **({"round": self.round_length} if self.round_length else {}),
        }
        held = [
            {"client": name, "samples": int(size), **({"labels": row.tolist()} if self.classes else {})}
            for name, size, row in zip(self.clients, self.sizes, self.counts, strict=True)
        ]
        return facts | {"clients": held}


def survey(config: Config) -> Survey:
    """What the data of a configuration are; values that a run would refuse as missing are counted."""
    columns, remarks, source = tuple[dict[str, Any], ...](), list[str](), config.data
    if isinstance(source, TableFile) and source.file:
        columns = tuple(column_facts(source.tables(), source))
        missing = {column["name"]: column["missing"] for column in columns if column["missing"] and column["use"]}
        if missing and source.missing == "refuse":
            named = {source.label, source.client} & set(missing)
            source = replace(source, missing="drop" if named else "fill")
            advice = 'data.missing = "drop"' + ("" if named else ' or "fill"')
            remarks.append(f"{sum(missing.values()):,} values are missing, and a run refuses them; set {advice}.")
    config = replace(config, data=source)
    counts, sizes = client_label_counts(config)
    fed = Federation(config.data, config.partition, config.seed)
    passed_over = fed.divided and passes_over_owners(config)
    tests_of = None if fed.test_owner is None else np.bincount(fed.test_owner, minlength=fed.clients)
    return Survey(
        name=config.tables()["data"]["name"],
        samples=int(sizes.sum()),
        tests=len(fed.test.y),
        shape=fed.shape,
        classes=fed.classes,
        clients=fed.client_names or tuple(str(i) for i in range(fed.clients)),
        labels=fed.class_names or tuple(str(k) for k in range(fed.classes)),
        sizes=sizes,
        counts=counts.astype(np.int64),
        tests_of=tests_of,
        columns=columns,
        remarks=(*remarks, *fed.remarks, *([OWNERS_PASSED_OVER] if passed_over else [])),
        round_length=expected_round(config) if config.time.on else "",
    )


def expected_round(config: Config) -> str:
    """The expected length of a round on the virtual clock, in words; nothing is trained."""
    built = build(replace(config, engine=EngineSettings(name="sequential", device="cpu")))
    assert built.clock is not None
    return built.clock.preview()


def column_facts(tables: list[Table], source: TableFile) -> list[dict[str, Any]]:
    """What each column of a table is for, how many values it has and how many are missing, in all files together."""
    facts = []
    for name, first in tables[0].columns.items():
        column = first
        for table in tables[1:]:
            column = column.joined(table.columns[name]) if name in table.columns else column
        facts.append({"name": name, "use": column_use(name, column, source), **value_facts(column)})
    return facts


def column_use(name: str, column: Column, source: TableFile) -> str:
    """What a column is for; empty: it is left out."""
    if name in source.drop:
        return ""
    roles = {source.label: "label", source.client: "client"}
    return roles.get(name) or ("category" if column.numbers is None or name in source.categories else "number")


def value_facts(column: Column) -> dict[str, Any]:
    """How many different values a column has, how many are missing, and what they are like."""
    missing = int(column.missing.sum())
    if column.numbers is None or column.has_codes:
        return {"different": len(column.texts), "missing": missing, "values": ", ".join(sorted(column.texts)[:4])}
    known = column.numbers[~np.isnan(column.numbers)]
    span = f"{known.min():.6g} to {known.max():.6g}" if len(known) else ""
    return {"different": len(np.unique(known)), "missing": missing, "values": span}
