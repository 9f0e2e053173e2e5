"""The runs that follow from an experiment, at each of its scales.

A run's configuration is base ← case ← method ← what the case says of the method ← scale ← grid point ← seed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import product
from typing import Any, NamedTuple

from ..errors import ConfigError, UnknownName, did_you_mean
from ..experiment.config import CHOICES, DEFAULT_NAMES, Config, set_key
from ..experiment.store import STOPS
from ..experiment.toml import literal, parse_value
from ..timeline.settings import unused_settings
from .digests import result_digest
from .papers import Case, Experiment, Hyper, Method, Tables, find_experiment


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
    of_scale = spec.experiment.at(scale).set.get("time", {})  # for all cases, which may wait in several ways
    for key in unused_settings(whole.get("time", {})):
        if key in of_scale:
            del whole["time"][key]
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
