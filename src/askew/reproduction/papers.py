"""The papers' experiments: one TOML file each, and the runs that follow from it at three scales.

    papers/NAME/EXPERIMENT.toml      the settings, whole; what the paper leaves open is listed as a choice
    papers/NAME/printed.csv          the numbers that the paper prints (see printed.py)
    papers/NAME/claims.toml          what the paper claims (see claims.py)

A run's configuration is base ← case ← method ← what the case says of the method ← scale ← grid point ← seed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from ..core.settings import with_defaults
from ..errors import ConfigError, UnknownName, did_you_mean
from ..experiment.config import CHOICES, DEFAULT_NAMES, Config, set_key
from ..experiment.store import STOPS
from ..experiment.toml import literal, parse_value, read_toml

SCALES = ("full", "reduced", "smoke")
# What an experiment shows; "toy" is a worked example (see worked_examples.py).
SHOWS = ("table", "curves", "bars", "coverage", "histogram", "heatmap", "toy", "cost")
UNTRAINED = ("histogram", "heatmap", "toy")  # of SHOWS: those for which nothing is trained
# Keys that a file may have, at its top level, in [[case]] and [[method]], and in [scale.NAME].
# Papers in the order of the ledger, by folder, with their titles.
TITLES = {"feddpc": "FedDPC", "feddc": "FedDC", "mldl24": "MLDL24", "fedpmvr": "FedPMVR", "fedpdc": "FedPDC"}
# The methods that a paper proposes or compares with FedAvg, where they are not called like the paper.
OWN_METHODS = {"mldl24": ("Loss-biased", "MGDA")}
DATA_PATTERNS = (r"cifar(\d+)", "mnist", "fashion_mnist", "tiny_imagenet", r"synthetic-(\d)-(\d)")
CASE_PARTS = re.compile(r"synthetic-\d-\d|gamma-[\d.]+|by-role|[^-]+")  # of the name of a case
CASE_WORDS = {  # how they read, by their pattern
    r"cifar(\d+)": r"CIFAR-\1",
    "mnist": "MNIST",
    "fashion_mnist": "Fashion-MNIST",
    "tiny_imagenet": "Tiny ImageNet",
    "cnn": "CNN",
    "lenet": "LeNet",
    r"vgg(\d+)": r"VGG\1",
    r"resnet(\d+)": r"ResNet\1",
    r"synthetic-(\d)-(\d)": r"Synthetic (\1, \2)",
    r"gamma-(.+)": r"γ \1",
    r"(0\.\d+)": r"Dirichlet \1",
    "15": "15%",
    "by-role": "by role",
    "Nc1": "1 label",
    r"Nc(\d+)": r"\1 labels",
    r"J(\d+)": r"J \1",
}
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


class PlannedRun(NamedTuple):
    """One run of an experiment with its whole configuration."""

    experiment: str
    scale: str
    case: str
    method: str
    hyper: Hyper  # the grid point
    seed: int
    config: Config
    curves: tuple[str, ...] = ("accuracy",)
    curves_every: int = 1
    stored: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        return result_digest(self.config)

    @property
    def key(self) -> tuple[str, int]:
        """Digest and seed, by which results are found."""
        return self.digest, self.seed


def own_methods(paper: str) -> tuple[str, ...]:
    """The methods that a paper proposes, by its folder."""
    return OWN_METHODS.get(paper, (TITLES.get(paper, paper),))


def case_title(name: str) -> str:
    """A case in words: "cifar10-cnn-0.1" is "CIFAR-10, CNN, Dirichlet 0.1"."""
    parts = CASE_PARTS.findall(name)
    for pattern, words in CASE_WORDS.items():
        parts = [re.sub(pattern, words, part) if re.fullmatch(pattern, part) else part for part in parts]
    return ", ".join(parts)


def data_title(e: Experiment, case: str) -> str:
    """A case of an experiment in words, with its data where its name does not say them."""
    title, data = case_title(case), case_title(e.base.get("data", {}).get("name", "")).capitalize()
    named = any(re.match(pattern, case) for pattern in DATA_PATTERNS)
    return title if named or not data else f"{data.replace('Cifar', 'CIFAR')}, {title}"


def papers_folder() -> Path:
    """The folder of the papers' files: beside the modules in an installed package, at the root of a checkout."""
    installed = Path(__file__).resolve().parents[1] / "papers"
    return installed if installed.is_dir() else Path(__file__).resolve().parents[3] / "papers"


# reading --------------------------------------------------------------------------------------------------------


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


# planning -------------------------------------------------------------------------------------------------------


class RunSpec(NamedTuple):
    """What a run is made of, before its configuration is built."""

    experiment: Experiment  # the one whose file describes it
    case: Case
    method: Method
    hyper: Hyper
    seed: int


def plan_runs(
    experiment: Experiment, scale: str = "full", seeds: int | Sequence[int] | None = None, only: Iterable[str] = ()
) -> list[PlannedRun]:
    """The runs to train for an experiment: its whole grid at every seed.

    `seeds` is how many, 0 to N − 1, or a list of them; `only` narrows the runs as `askew reproduce --only` does.
    """
    return configure_runs(experiment, scale, seeds, only) if experiment.trains else []


def configure_runs(
    experiment: Experiment, scale: str = "full", seeds: int | Sequence[int] | None = None, only: Iterable[str] = ()
) -> list[PlannedRun]:
    """As `plan_runs`, but also for experiments that train nothing and show what follows from the settings."""
    specs = list(run_specs(experiment, scale, seeds))
    wanted, planned = wanted_values(only, specs), list[PlannedRun]()
    built, seeds_built = dict[str, Config](), dict[str, int]()  # by grid point, and by the seed that a file says
    for s in specs:
        if all(spec_value(s, kind) in values for kind, values in wanted.items()):
            point, seed = repr((s.experiment.id, s.case.name, s.method.name, s.hyper)), repr(s.seed)
            if point not in built or seed not in seeds_built:  # checking takes long; other runs differ in nothing else
                built[point] = build_config(s, scale)
                seeds_built[seed] = built[point].seed
            run = (s.experiment.id, scale, s.case.name, s.method.name, s.hyper, s.seed)
            config = replace(built[point], seed=seeds_built[seed])
            e = s.experiment
            planned.append(PlannedRun(*run, config, e.curves, e.curves_every, e.stored))
    if specs and not planned:
        given = ", ".join(f"{kind}={value}" for kind, values in wanted.items() for value in values)
        raise ConfigError(f"--only: no run of {experiment.id} has all of {given}; leave one of them out.")
    return planned


def settings_text(planned: Sequence[PlannedRun]) -> str:
    """What is trained at a scale instead of the published settings: "digits, 4 clients, mlp, 8 rounds"."""
    tables = [p.config.tables() for p in planned]
    names = [sorted({t[key]["name"] for t in tables}) for key in ("data", "model")]
    counts = [sorted({t["partition"]["clients"] for t in tables}), sorted({t["rounds"] for t in tables})]
    (data, models), (clients, rounds) = names, counts
    ranges = [str(c[0]) if len(c) == 1 else f"{c[0]} to {c[-1]}" for c in (clients, rounds) if c]
    if not ranges:
        return "not the published settings"
    return f"{', '.join(data)}, {ranges[0]} clients, {', '.join(models)}, {ranges[1]} rounds"


def run_specs(e: Experiment, scale: str = "full", seeds: int | Sequence[int] | None = None) -> Iterator[RunSpec]:
    """Cases × methods × grid × seeds; the seed changes slowest, so that the runs that tune come first."""
    at = e.at(scale)
    if e.runs:
        cases, methods = at.cases or e.only_cases, at.methods or e.only_methods
        for other in map(find_experiment, e.runs):
            for spec in run_specs(other, scale, seeds):
                if (not cases or spec.case.name in cases) and (not methods or spec.method.name in methods):
                    yield spec
        return
    for seed in range(seeds) if isinstance(seeds, int) else seeds or at.seeds or e.seeds:
        for case in (c for c in e.cases if not at.cases or c.name in at.cases):
            for method in (m for m in e.methods if not at.methods or m.name in at.methods):
                if not method.cases or case.name in method.cases:
                    grid = {key: at.grid.get(key, values) for key, values in (e.grid | method.grid).items()}
                    for values in product(*grid.values()):
                        yield RunSpec(e, case, method, dict(zip(grid, values, strict=True)), seed)


def settings_tables(spec: RunSpec, scale: str) -> Tables:
    """The settings of one run as nested tables, without the defaults of a configuration."""
    whole: Tables = {"algorithm": {"name": DEFAULT_NAMES["algorithm"]}}
    for part in (
        spec.experiment.base,
        spec.case.set,
        spec.method.set,
        spec.case.methods.get(spec.method.name, {}),
        spec.experiment.at(scale).set,
    ):
        whole = merge_tables(whole, part)
    for key, value in spec.hyper.items():
        set_key(whole, key, value, "grid: ")
    return whole | {"seed": spec.seed}


def build_config(spec: RunSpec, scale: str) -> Config:
    """The whole configuration of one run."""
    try:
        config = Config.build(settings_tables(spec, scale))
        for name in STOPS:
            if getattr(config.evaluation, name):
                raise ConfigError(f"evaluation.{name} leaves a run without its last result; leave it out.")
    except ConfigError as e:
        raise type(e)(f"{spec.experiment.id}, {spec.case.name}, {spec.method.name}: {e}") from None
    return config


def merge_tables(below: Mapping[str, Any], above: Mapping[str, Any]) -> Tables:
    """Nested tables with those of `above` laid over those of `below`.

    A table that names another choice keeps the settings of the old one that the new one has too, and no others. No
    table of either is part of the result, which may be changed.
    """
    out = {key: merge_tables(value, {}) if isinstance(value, Mapping) else value for key, value in below.items()}
    for key, value in above.items():
        old = out.get(key)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            name = value.get("name", old.get("name", DEFAULT_NAMES.get(key)))
            if key in CHOICES and name != old.get("name", DEFAULT_NAMES[key]):
                known = {f.name for f in fields(CHOICES[key][name])}
                old = {k: v for k, v in old.items() if k in known}
            out[key] = merge_tables(old, value)
        else:
            out[key] = merge_tables(value, {}) if isinstance(value, Mapping) else value
    return out


def wanted_values(only: Iterable[str], specs: Sequence[RunSpec]) -> dict[str, list[Any]]:
    """The values that `only` allows for "case", "method", "seed" and tuned settings, where it names some.

    Names of one kind widen each other, kinds narrow: two cases and one method are two runs.
    """
    wanted: dict[str, list[Any]] = {}
    cases, methods = {s.case.name for s in specs}, {s.method.name for s in specs}
    keys = {key for s in specs for key in s.hyper}
    for item in only:
        kind, equals, text = item.rpartition("=")
        kind = kind.strip() if equals else "case" if item in cases else "method"
        known: set[str] = {"case": cases, "method": methods}.get(kind, set())
        if kind not in ("case", "method", "seed", *keys):
            raise UnknownName(
                f"--only: nothing here is called {kind!r}; {did_you_mean(kind, ['case', 'method', 'seed', *keys])}"
            )
        if kind in ("case", "method") and text.strip() not in known:
            among = known if equals else cases | methods
            raise UnknownName(f"--only: there is no {text.strip()!r} here; {did_you_mean(text.strip(), among)}")
        value = text.strip() if kind in ("case", "method") else parse_value(text.strip())
        if not any(spec_value(s, kind) == value for s in specs):
            values = dict.fromkeys(hyper_value_text(v) for s in specs if (v := spec_value(s, kind)) is not None)
            raise ConfigError(f"--only: no run here has {kind}={text.strip()}; the values are {', '.join(values)}.")
        wanted.setdefault(kind, []).append(value)
    return wanted


def spec_value(spec: RunSpec, kind: str) -> Any:
    """The case, method or seed of a run by name, or one of its tuned settings."""
    own = {"case": spec.case.name, "method": spec.method.name, "seed": spec.seed}
    return own[kind] if kind in own else spec.hyper.get(kind)


def hyper_text(hyper: Mapping[str, Any]) -> str:
    """A grid point in one line, sorted: "algorithm.mu=1 local.lr=0.1"."""
    return " ".join(f"{key}={hyper_value_text(hyper[key])}" for key in sorted(hyper))


def hyper_value_text(value: Any) -> str:
    """One value of a grid point as text: a string as it is, a float without needless zeros."""
    return f"{value:g}" if isinstance(value, float) else value if isinstance(value, str) else literal(value)


@cache
def result_digest(config: Config) -> str:
    """Ten letters that identify what a run computes, for results/*.csv.

    Settings at their defaults are left out, so that a setting added later changes no digest. So is where and in which
    precision the run is computed, which stands beside each result.
    """
    return settings_digest(changed_settings(config))


def seed_digests(config: Config, seeds: Iterable[int]) -> dict[int, str]:
    """The digests of a configuration with these seeds in place of its own, by seed."""
    page = changed_settings(config)
    return {seed: settings_digest(page | {"seed": seed}) for seed in seeds}


def settings_digest(page: Tables) -> str:
    """The digest of what `changed_settings` returns."""
    return hashlib.sha256(json.dumps(page, sort_keys=True).encode()).hexdigest()[:10]


def changed_settings(config: Config) -> Tables:
    """A configuration without its defaults and without its engine; `Config.build` makes a configuration of it."""
    page: Tables = {"seed": config.seed, "rounds": config.rounds}
    for name, table in config.tables().items():
        if not isinstance(table, Mapping) or name == "engine":
            continue
        usual = with_defaults(type(getattr(config, name))).table()
        page[name] = {k: v for k, v in table.items() if k == "name" or v != usual[k]}
    page["evaluation"] = {k: v for k, v in page["evaluation"].items() if k not in STOPS}
    return page
