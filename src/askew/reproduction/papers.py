"""The papers' experiments: one TOML file each, and the runs that follow from it at three scales.

    papers/NAME/EXPERIMENT.toml      the settings, whole; what the paper leaves open is listed as a choice
    papers/NAME/printed.csv          the numbers that the paper prints

A run's configuration is base ← case ← method ← what the case says of the method ← scale ← grid point ← seed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import ConfigError, UnknownName, did_you_mean
from ..experiment.config import CHOICES, DEFAULT_NAMES, Config, set_key
from ..experiment.toml import literal, parse_value, read_toml

SCALES = ("full", "reduced", "smoke")
SHOWS = ("table", "curves", "bars", "coverage", "histogram", "heatmap", "toy", "cost")
STILL = ("histogram", "heatmap", "toy")  # nothing is trained for these
KEYS = (
    *("title", "where", "shows", "metric", "target", "also", "seeds", "choose", "choices", "notes", "axis"),
    *("runs", "cases", "methods", "base", "case", "method", "grid", "scale"),
)
ENTRY = {"case": ("name", "set", "methods"), "method": ("name", "set", "grid", "cases")}
SCALE = ("set", "grid", "seeds", "cases", "methods")

Hyper = dict[str, Any]
Tables = dict[str, Any]


class Case(NamedTuple):
    """A column: a data set, a partition, a participation."""

    name: str
    set: Tables
    methods: dict[str, Tables]  # what it changes of a method


class Method(NamedTuple):
    """A row: an algorithm, with what it tunes beside the experiment's grid and the cases it is run in (all, if none is named)."""

    name: str
    set: Tables
    grid: dict[str, list[Any]]
    cases: tuple[str, ...]


class Scale(NamedTuple):
    """What a scale changes; its lists replace those of the experiment, key by key for the grid."""

    set: Tables
    grid: dict[str, list[Any]]
    seeds: tuple[int, ...]
    cases: tuple[str, ...]
    methods: tuple[str, ...]


@dataclass(frozen=True)
class Experiment:
    """One table or figure of a paper. One that shows the runs of others has `runs` and no base, cases and methods of its own."""

    id: str
    title: str
    where: str
    shows: str
    metric: str  # the headline
    target: float | str | None  # of rounds_to: an accuracy, or the method whose best (or "NAME last") it is
    also: tuple[str, ...]  # other ids
    runs: tuple[str, ...]
    only_cases: tuple[str, ...]  # of those runs; all if none is named
    only_methods: tuple[str, ...]
    axis: dict[str, Any]  # of a figure
    seeds: tuple[int, ...]  # as published; the first one tunes
    choices: dict[str, str]  # what the paper leaves open
    notes: tuple[str, ...]  # what cannot be had as published, and why
    base: Tables
    cases: tuple[Case, ...]
    methods: tuple[Method, ...]
    grid: dict[str, list[Any]]
    choose: tuple[str, ...]  # metrics by which a grid point is chosen: the first decides, the next breaks ties
    scales: dict[str, Scale]

    @property
    def paper(self) -> str:
        return self.id.partition("/")[0]

    @property
    def trains(self) -> bool:
        return self.shows not in STILL

    def at(self, scale: str) -> Scale:
        if scale not in SCALES:
            raise ConfigError(f"unknown scale {scale!r}; {did_you_mean(scale, SCALES)}")
        return self.scales.get(scale, Scale({}, {}, (), (), ()))


class Planned(NamedTuple):
    """One run of an experiment."""

    experiment: str
    scale: str
    case: str
    method: str
    hyper: Hyper  # the grid point, by dotted key
    seed: int
    config: Config

    @property
    def digest(self) -> str:
        return digest(self.config)


def papers_folder() -> Path:
    """Where the files are: beside the modules in an installed package, at the root of a checkout."""
    here = Path(__file__).resolve().parents[1] / "papers"
    return here if here.is_dir() else Path(__file__).resolve().parents[3] / "papers"


# reading --------------------------------------------------------------------------------------------------------


@cache
def experiments(folder: Path | None = None) -> dict[str, Experiment]:
    """All experiments by id, in the order of papers and names."""
    folder = folder or papers_folder()
    return {e.id: e for e in (read(path) for path in sorted(folder.glob("*/*.toml")) if path.name != "claims.toml")}


def find(id: str) -> Experiment:
    """An experiment by its id or another of its names, or by the path of a file of one's own."""
    if id.endswith(".toml"):
        return read(Path(id))
    known = experiments()
    for experiment in known.values():
        if id in (experiment.id, *experiment.also):
            return experiment
    near = get_close_matches(id, [name for e in known.values() for name in (e.id, *e.also)], n=1, cutoff=0.5)
    meant = f"did you mean {near[0]!r}? " if near else ""
    raise UnknownName(
        f"there is no experiment {id!r}; {meant}`askew list experiments` shows all, or name a .toml file of your own."
    )


def read(path: Path) -> Experiment:
    """One file, checked."""
    page, name = read_toml(path), f"{path.parent.name}/{path.stem}"
    refuse_unknown(page, KEYS, path, "")
    for kind, keys in ENTRY.items():
        for entry in page.get(kind, []):
            if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
                raise ConfigError(f'{path}: every [[{kind}]] needs a name; add name = "…".')
            refuse_unknown(entry, keys, path, f"{kind} {entry['name']}: ")
    for scale, table in page.get("scale", {}).items():
        if scale not in SCALES:
            raise ConfigError(f"{path}: unknown scale {scale!r}; {did_you_mean(scale, SCALES)}")
        refuse_unknown(table, SCALE, path, f"scale {scale}: ")
    if page.get("shows") not in SHOWS:
        raise ConfigError(
            f"{path}: shows must be one of {', '.join(SHOWS)}, got {page.get('shows')!r}; choose one of them."
        )
    try:
        experiment = from_page(name, page)
    except (TypeError, ValueError, KeyError, AttributeError) as e:
        raise ConfigError(f"{path} is not an experiment: {e!r}; docs/papers.md shows the form.") from None
    check(experiment, path)
    return experiment


def from_page(name: str, page: Mapping[str, Any]) -> Experiment:
    runs, own = page.get("runs", ()), not page.get("runs")
    return Experiment(
        id=name,
        title=page["title"],
        where=page["where"],
        shows=page["shows"],
        metric=page.get("metric", "best_accuracy"),
        target=page.get("target"),
        also=tuple(page.get("also", ())),
        runs=(runs,) if isinstance(runs, str) else tuple(runs),
        only_cases=tuple(page.get("cases", ())),
        only_methods=tuple(page.get("methods", ())),
        axis=dict(page.get("axis", {})),
        seeds=tuple(page.get("seeds", (0,))),
        choices=dict(page.get("choices", {})),
        notes=tuple(page.get("notes", ())),
        base=dict(page.get("base", {})),
        cases=tuple(
            Case(c["name"], c.get("set", {}), c.get("methods", {}))
            for c in page.get("case", [{"name": "all"}] if own else [])
        ),
        methods=tuple(
            Method(m["name"], m.get("set", {}), dict(m.get("grid", {})), tuple(m.get("cases", ())))
            for m in page.get("method", [{"name": "FedAvg"}] if own else [])
        ),
        grid=dict(page.get("grid", {})),
        choose=tuple(page.get("choose", ("best_accuracy", "-mean_train_loss_100"))),
        scales={
            scale: Scale(
                table.get("set", {}),
                dict(table.get("grid", {})),
                *(tuple(table.get(key, ())) for key in ("seeds", "cases", "methods")),
            )
            for scale, table in page.get("scale", {}).items()
        },
    )


def refuse_unknown(table: Mapping[str, Any], known: Sequence[str], path: Path, where: str) -> None:
    for key in table:
        if key not in known:
            raise ConfigError(f"{path}: {where}unknown key {key!r}; {did_you_mean(key, known)}")


def check(e: Experiment, path: Path) -> None:
    """Refuse names that no case and no method has."""
    cases, methods = [c.name for c in e.cases], [m.name for m in e.methods]
    asked = [(n, cases) for m in e.methods for n in m.cases] + [(n, methods) for c in e.cases for n in c.methods]
    asked += [(n, cases) for s in e.scales.values() for n in s.cases] + [
        (n, methods) for s in e.scales.values() for n in s.methods
    ]
    for name, known in asked if not e.runs else ():
        if name not in known:
            raise ConfigError(f"{path}: there is no {name!r} here; {did_you_mean(name, known)}")
    if len(set(cases)) < len(cases) or len(set(methods)) < len(methods):
        raise ConfigError(f"{path}: two cases or two methods have one name; give each its own.")


# planning -------------------------------------------------------------------------------------------------------


class Point(NamedTuple):
    """A run before its configuration is built."""

    experiment: Experiment  # the one whose file says it
    case: Case
    method: Method
    hyper: Hyper
    seed: int


def plan(
    experiment: Experiment, scale: str = "full", seeds: int | Sequence[int] | None = None, only: Iterable[str] = ()
) -> list[Planned]:
    """The runs of an experiment, its whole grid at every seed; `seeds` is how many, 0 to N − 1, or which."""
    return scenes(experiment, scale, seeds, only) if experiment.trains else []


def scenes(
    experiment: Experiment, scale: str = "full", seeds: int | Sequence[int] | None = None, only: Iterable[str] = ()
) -> list[Planned]:
    """As `plan`, also of experiments that show what is there before any training."""
    points = list(spanned(experiment, scale, seeds))
    wanted = filters(only, points)
    return [
        Planned(p.experiment.id, scale, p.case.name, p.method.name, p.hyper, p.seed, configure(p, scale))
        for p in points
        if all(test(p) for test in wanted)
    ]


def spanned(e: Experiment, scale: str = "full", seeds: int | Sequence[int] | None = None) -> Iterator[Point]:
    """Cases × methods × grid × seeds; the seed changes slowest, so that what tunes comes first."""
    at = e.at(scale)
    if e.runs:
        cases, methods = at.cases or e.only_cases, at.methods or e.only_methods
        for other in map(find, e.runs):
            for p in spanned(other, scale, seeds):
                if (not cases or p.case.name in cases) and (not methods or p.method.name in methods):
                    yield p
        return
    for seed in range(seeds) if isinstance(seeds, int) else seeds or at.seeds or e.seeds:
        for case in (c for c in e.cases if not at.cases or c.name in at.cases):
            for method in (m for m in e.methods if not at.methods or m.name in at.methods):
                if not method.cases or case.name in method.cases:
                    grid = {key: at.grid.get(key, values) for key, values in (e.grid | method.grid).items()}
                    for values in product(*grid.values()):
                        yield Point(e, case, method, dict(zip(grid, values, strict=True)), seed)


def tables(p: Point, scale: str) -> Tables:
    """The settings of one run as nested tables."""
    whole: Tables = {"algorithm": {"name": DEFAULT_NAMES["algorithm"]}}
    for part in (
        p.experiment.base,
        p.case.set,
        p.method.set,
        p.case.methods.get(p.method.name, {}),
        p.experiment.at(scale).set,
    ):
        whole = merged(whole, part)
    for key, value in p.hyper.items():
        set_key(whole, key, value, "grid: ")
    return whole | {"seed": p.seed}


def configure(p: Point, scale: str) -> Config:
    """The whole configuration of one run."""
    try:
        return Config.build(tables(p, scale))
    except ConfigError as e:
        raise type(e)(f"{p.experiment.id}, {p.case.name}, {p.method.name}: {e}") from None


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> Tables:
    """Nested tables laid over others. A table that names another choice keeps the settings that this one has too, and no others."""
    out = dict(below)
    for key, value in above.items():
        old = out.get(key)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            name = value.get("name", old.get("name", DEFAULT_NAMES.get(key)))
            if key in CHOICES and name != old.get("name", DEFAULT_NAMES[key]):
                known = {f.name for f in fields(CHOICES[key][name])}
                old = {k: v for k, v in old.items() if k in known}
            out[key] = merged(old, value)
        else:
            out[key] = value
    return out


def filters(only: Iterable[str], points: Sequence[Point]) -> list[Any]:
    """Tests of points. Names of one kind widen each other, kinds narrow: two cases and one method are two runs."""
    wanted: dict[str, list[Any]] = {}
    cases, methods = {p.case.name for p in points}, {p.method.name for p in points}
    keys = {key for p in points for key in p.hyper}
    for item in only:
        kind, found, text = item.rpartition("=")
        kind = kind.strip() if found else "case" if item in cases else "method"
        known: set[str] = {"case": cases, "method": methods}.get(kind, set())
        if kind not in ("case", "method", "seed", *keys):
            raise UnknownName(
                f"--only: nothing here is called {kind!r}; {did_you_mean(kind, ['case', 'method', 'seed', *keys])}"
            )
        if kind in ("case", "method") and text.strip() not in known:
            raise UnknownName(
                f"--only: there is no {text.strip()!r} here; {did_you_mean(text.strip(), cases | methods)}"
            )
        wanted.setdefault(kind, []).append(text.strip() if kind in ("case", "method") else parse_value(text.strip()))
    return [tester(kind, values) for kind, values in wanted.items()]


def tester(kind: str, values: Sequence[Any]) -> Any:
    seen = {"case": lambda p: p.case.name, "method": lambda p: p.method.name, "seed": lambda p: p.seed}
    return lambda p: (seen[kind](p) if kind in seen else p.hyper.get(kind)) in values


def words(hyper: Mapping[str, Any]) -> str:
    """A grid point in one line, sorted: "algorithm.mu=1 local.lr=0.1"."""
    return " ".join(f"{key}={spoken(hyper[key])}" for key in sorted(hyper))


def spoken(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else value if isinstance(value, str) else literal(value)


@cache
def digest(config: Config) -> str:
    """Ten letters for what a run computes: all settings but defaults, so that a setting added later changes none of them.

    Where and in which precision it is computed is left out, and told beside each result.
    """
    page: dict[str, Any] = {"seed": config.seed, "rounds": config.rounds}
    for name, table in config.tables().items():
        if not isinstance(table, Mapping) or name == "engine":
            continue
        usual = type(getattr(config, name))().table()
        page[name] = {k: v for k, v in table.items() if k == "name" or v != usual[k]}
    return hashlib.sha256(json.dumps(page, sort_keys=True).encode()).hexdigest()[:10]
