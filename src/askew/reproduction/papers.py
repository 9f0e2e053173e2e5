"""The papers' experiments: one TOML file each.

    papers/NAME/EXPERIMENT.toml      the settings, whole; what the paper leaves open is listed as a choice
    papers/NAME/printed.csv          the numbers that the paper prints (see printed.py)
    papers/NAME/claims.toml          what the paper claims (see claims.py)

planned_runs.py makes the runs of an experiment, at three scales.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import ConfigError, UnknownName, did_you_mean
from ..experiment.toml import read_toml

SCALES = ("full", "reduced", "smoke")
# What an experiment shows; "toy" is a worked example (see worked_examples.py).
SHOWS = ("table", "curves", "bars", "coverage", "histogram", "heatmap", "toy", "cost")
UNTRAINED = ("histogram", "heatmap", "toy")  # of SHOWS: those for which nothing is trained
# Keys that a file may have, at its top level, in [[case]] and [[method]], and in [scale.NAME].
EXPERIMENT_KEYS = (
    *("title", "where", "shows", "metric", "target", "also", "seeds", "choose", "choices", "notes", "axis"),
    *("runs", "cases", "methods", "base", "case", "method", "grid", "scale", "gap", "curves", "curves_every", "stored"),
)
ENTRY_KEYS = {"case": ("name", "set", "methods"), "method": ("name", "set", "grid", "cases")}
GAP_KEYS = ("cases", "methods", "cause", "runs", "comparable")
SCALE_KEYS = ("set", "grid", "seeds", "cases", "methods")
# Record keys that can be stored as curves, and the rounds between two points of each.
CURVES = {"accuracy": 1, "train_loss": 1, "loss": 1, "public_share": 1, "public_ratio": 1, "drift_relative": 20}

Hyper = dict[str, Any]  # the tuned settings of a grid point, by dotted key: {"local.lr": 0.1}
Tables = dict[str, Any]  # nested tables of a configuration


class Case(NamedTuple):
    """A column of a paper's table: a data set, a partition, a participation."""

    name: str
    set: Tables
    methods: dict[str, Tables]  # what it changes of a method


class Method(NamedTuple):
    """A row of a paper's table: an algorithm with its settings."""

    name: str
    set: Tables
    grid: dict[str, list[Any]]  # tuned beside the experiment's own grid
    cases: tuple[str, ...]  # the cases it is run in; all, if none is named


class Gap(NamedTuple):
    """Why our numbers of some cases and methods are far from the printed ones, or what was tried to find out."""

    cases: tuple[str, ...]
    methods: tuple[str, ...]
    cause: str
    runs: int  # of these cases and methods that were stored when the cause was written; 0: not said
    comparable: bool = True  # whether it is the published problem at all; otherwise it decides no claim


class Scale(NamedTuple):
    """What a scale changes; its lists replace those of the experiment, key by key for the grid."""

    set: Tables
    grid: dict[str, list[Any]]
    seeds: tuple[int, ...]
    cases: tuple[str, ...]
    methods: tuple[str, ...]


@dataclass(frozen=True)
class Experiment:
    """One table or figure of a paper. If it shows the runs of others, it has `runs` and no base, cases and methods."""

    id: str
    title: str
    where: str  # in the paper: "Table 2"
    shows: str  # one of SHOWS
    metric: str  # the headline
    target: float | str | None  # of rounds_to: an accuracy, or the method whose best (or "NAME last") it is
    also: tuple[str, ...]  # other ids
    runs: tuple[str, ...]  # ids of the experiments whose runs it shows
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
    gaps: tuple[Gap, ...] = ()
    curves: tuple[str, ...] = ("accuracy",)  # that are stored
    curves_every: int = 1  # rounds between the stored points of a curve
    stored: tuple[str, ...] = ()  # metrics that are stored; all if none is named

    @property
    def paper(self) -> str:
        """The folder of its paper."""
        return self.id.partition("/")[0]

    @property
    def accuracy_to_reach(self) -> float | None:
        """The given accuracy up to which rounds are counted; None where something else is measured."""
        return self.target if self.metric == "rounds_to" and isinstance(self.target, float) else None

    @property
    def trains(self) -> bool:
        """Whether runs are trained for it."""
        return self.shows not in UNTRAINED

    def at(self, scale: str) -> Scale:
        """What a scale changes of this experiment."""
        if scale not in SCALES:
            raise ConfigError(f"unknown scale {scale!r}; {did_you_mean(scale, SCALES)}")
        return self.scales.get(scale, Scale({}, {}, (), (), ()))

    def is_comparable(self, case: str) -> bool:
        """Whether a case is the published problem, as far as is known."""
        return all(gap.comparable or case not in gap.cases for gap in self.gaps)

    def includes(self, case: str, method: str) -> bool:
        """Whether an experiment that shows the runs of others shows those of this case and method."""
        return (not self.only_cases or case in self.only_cases) and (
            not self.only_methods or method in self.only_methods
        )


def papers_folder() -> Path:
    """The folder of the papers' files: beside the modules in an installed package, at the root of a checkout."""
    installed = Path(__file__).resolve().parents[1] / "papers"
    return installed if installed.is_dir() else Path(__file__).resolve().parents[3] / "papers"


@cache
def experiments(folder: Path | None = None) -> dict[str, Experiment]:
    """All experiments by id, in the order of papers and names."""
    folder = folder or papers_folder()
    paths = [path for path in sorted(folder.glob("*/*.toml")) if path.name != "claims.toml"]
    return {e.id: e for e in map(read_experiment, paths)}


def find_experiment(id: str) -> Experiment:
    """An experiment by its id or another of its names, or by the path of a .toml file."""
    if id.endswith(".toml"):
        return read_experiment(Path(id))
    known = experiments()
    for experiment in known.values():
        if id in (experiment.id, *experiment.also):
            return experiment
    paper = id.rstrip("/").lower()
    if own := [name for name, e in known.items() if e.paper == paper]:
        raise UnknownName(f"{id!r} is a paper, which has {', '.join(own)}; name one of them.")
    names = [name for e in known.values() for name in (e.id, *e.also)]
    near = get_close_matches(id.lower(), names, n=1, cutoff=0.5)
    meant = f"did you mean {near[0]!r}? " if near else ""
    raise UnknownName(
        f"there is no experiment {id!r}; {meant}`askew list experiments` shows all, or name a .toml file of your own."
    )


def read_experiment(path: Path) -> Experiment:
    """Read one experiment's file and check it."""
    page, name = read_toml(path), "/".join(filter(None, (path.parent.name, path.stem)))
    refuse_unknown_keys(page, EXPERIMENT_KEYS, f"{path}: ")
    for kind, keys in ENTRY_KEYS.items():
        for entry in page.get(kind, []):
            if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
                raise ConfigError(f'{path}: every [[{kind}]] needs a name; add name = "…".')
            refuse_unknown_keys(entry, keys, f"{path}: {kind} {entry['name']}: ")
    for entry in page.get("gap", []):
        refuse_unknown_keys(entry, GAP_KEYS, f"{path}: gap: ")
    for scale, table in page.get("scale", {}).items():
        if scale not in SCALES:
            raise ConfigError(f"{path}: unknown scale {scale!r}; {did_you_mean(scale, SCALES)}")
        refuse_unknown_keys(table, SCALE_KEYS, f"{path}: scale {scale}: ")
    if page.get("shows") not in SHOWS:
        raise ConfigError(
            f"{path}: shows must be one of {', '.join(SHOWS)}, got {page.get('shows')!r}; choose one of them."
        )
    try:
        experiment = experiment_from_tables(name, page)
    except (TypeError, ValueError, KeyError, AttributeError) as e:
        raise ConfigError(f"{path} is not an experiment: {e!r}; docs/papers.md shows the form.") from None
    check_names(experiment, path)
    return experiment


def experiment_from_tables(name: str, page: Mapping[str, Any]) -> Experiment:
    """The experiment that the tables of a file describe, with the defaults of what it leaves out."""
    runs, trains_itself = page.get("runs", ()), not page.get("runs")
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
            for c in page.get("case", [{"name": "all"}] if trains_itself else [])
        ),
        methods=tuple(
            Method(m["name"], m.get("set", {}), dict(m.get("grid", {})), tuple(m.get("cases", ())))
            for m in page.get("method", [{"name": "FedAvg"}] if trains_itself else [])
        ),
        grid=dict(page.get("grid", {})),
        choose=tuple(page.get("choose", ("best_accuracy", "-mean_train_loss_100"))),
        scales={scale: scale_from_table(table) for scale, table in page.get("scale", {}).items()},
        gaps=tuple(gap_from_table(table) for table in page.get("gap", [])),
        curves=curve_names(["accuracy", *page.get("axis", {}).get("y", ()), *page.get("curves", ())]),
        curves_every=positive_whole(page.get("curves_every", 1), "curves_every"),
        stored=tuple(page.get("stored", ())),
    )


def curve_names(names: Iterable[str]) -> tuple[str, ...]:
    """The names of curves, each once."""
    for name in names:
        if name not in CURVES:
            raise ValueError(f"there is no curve {name!r}; {did_you_mean(name, CURVES)}")
    return tuple(dict.fromkeys(names))


def positive_whole(value: object, key: str) -> int:
    """The value of a key that must be a whole number of at least 1."""
    if type(value) is not int or value < 1:
        raise ValueError(f"{key} must be a whole number of at least 1, got {value!r}")
    return value


def gap_from_table(table: Mapping[str, Any]) -> Gap:
    """One [[gap]] of an experiment's file."""
    runs, comparable = table.get("runs", 0), table.get("comparable", True)
    return Gap(tuple(table["cases"]), tuple(table["methods"]), table["cause"], runs, comparable)


def scale_from_table(table: Mapping[str, Any]) -> Scale:
    """What one [scale.NAME] changes."""
    lists = (tuple(table.get(key, ())) for key in ("seeds", "cases", "methods"))
    return Scale(table.get("set", {}), dict(table.get("grid", {})), *lists)


def refuse_unknown_keys(table: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    """Raise ConfigError for a key that is not known; `where` begins the sentence, such as "FILE: "."""
    for key in table:
        if key not in known:
            raise ConfigError(f"{where}unknown key {key!r}; {did_you_mean(key, known)}")


def check_names(e: Experiment, path: Path) -> None:
    """Refuse names that no case and no method has, and names that two of them have."""
    cases, methods = [c.name for c in e.cases], [m.name for m in e.methods]
    used = [(name, cases) for m in e.methods for name in m.cases]
    used += [(name, methods) for c in e.cases for name in c.methods]
    used += [(name, cases) for s in e.scales.values() for name in s.cases]
    used += [(name, methods) for s in e.scales.values() for name in s.methods]
    used += [(name, cases) for gap in e.gaps for name in gap.cases]
    used += [(name, methods) for gap in e.gaps for name in gap.methods]
    for name, known in used if not e.runs else ():
        if name not in known:
            raise ConfigError(f"{path}: there is no {name!r} here; {did_you_mean(name, known)}")
    if len(set(cases)) < len(cases) or len(set(methods)) < len(methods):
        raise ConfigError(f"{path}: two cases or two methods have one name; give each its own.")
