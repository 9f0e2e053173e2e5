"""Groups of runs that differ only in their seed, their labels, and one row of figures for each group.

Groups are compared only within a federation: the same data, divided alike among the same clients.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import mean, stdev
from typing import Any, NamedTuple

from ..core.text import count_text
from ..experiment.curves import rounds_to
from ..experiment.folder_lock import is_locked
from ..experiment.listing import stored_catalogue
from ..experiment.store import STOPS, Run

FlatSettings = dict[str, str]  # values as text by dotted key: {"local.lr": "0.1"}
ComparisonRow = dict[str, Any]  # the figures of one group, by the names that `table` gives them
FEDERATION = ("data", "partition")  # tables that say who holds what
CONTENT = "content of data"  # the hash of a dataset's files, in `origins` of run.json
STOPPING = tuple(f"evaluation.{name}" for name in STOPS)  # no number of a round depends on these
DIGEST = re.compile(r"-([0-9a-f]{8})$")  # at the end of a run folder's name
MAX_NAMED = 6  # methods that one remark names


FINGERPRINT = "model.fingerprint"  # of the first weights of a network from Python, which may differ with the seed


class MeanCurve(NamedTuple):
    """The mean over seeds at every recorded round, and the standard deviation (0 for one seed)."""

    rounds: list[int]
    mean: list[float]
    std: list[float]


@dataclass(frozen=True)
class RunGroup:
    """Runs of one configuration, one for each seed."""

    label: str  # the method, and what distinguishes it from other groups of its federation
    runs: tuple[Run, ...]
    federation: str = ""  # in one line, different for different federations
    place: str = ""  # the settings that distinguish its federation from the others, if there are several
    repeated: int = 0  # other runs of one of these seeds, which are as long at most and do not count

    @property
    def config(self) -> dict[str, Any]:
        return self.runs[0].config

    @property
    def title(self) -> str:
        """The label, with the federation where there are several."""
        return f"{self.label} {self.place}".strip()

    @property
    def task(self) -> str:
        """A key that is equal for groups that may be ranked: the same federation, participation and network."""
        return federation_key(self.runs[0]) + settings_key(self.config, ("participation", "model"))

    @property
    def diverged(self) -> int:
        """How many of its measured runs have diverged."""
        return sum(map(has_diverged, self.measured))

    @property
    def measured(self) -> tuple[Run, ...]:
        """The runs that figures are of: those that are over or, while none is, all. One that was interrupted beside
        others would draw their means to its early rounds.
        """
        return tuple(run for run in self.runs if run.over) or self.runs

    def values(self, figure: Callable[[Run], float | None]) -> list[float]:
        """One figure of each measured seed, where there is one."""
        return [v for v in map(figure, self.measured) if v is not None]

    def last(self, key: str) -> list[float]:
        """The last recorded value of each measured seed, where there is one."""
        return [values[-1] for run in self.measured if (values := run.curve(key)[1])]

    def curve(self, key: str) -> MeanCurve:
        """The mean curve of a record key over the measured seeds; one that was stopped early stays where it ended."""
        curves = [dict(zip(*run.curve(key), strict=True)) for run in self.measured]
        rounds = sorted({r for curve in curves for r in curve})
        for run, curve in zip(self.measured, curves, strict=True):
            if curve and run.over:
                last = max(curve)
                curve |= {r: curve[last] for r in rounds if r > last}
        values = [[curve[r] for curve in curves if r in curve] for r in rounds]
        return MeanCurve(rounds, [mean(v) for v in values], [sample_std(v) or 0.0 for v in values])

    def rounds_to(self, target: float | None) -> int | None:
        """The first round whose mean accuracy over the seeds is at least the target; None if there is none."""
        curve = self.curve("accuracy")
        return None if target is None else rounds_to(curve.rounds, curve.mean, target)

    def seconds_to(self, target: float | None) -> float | None:
        """The virtual clock after that round, mean over the seeds; None where there is no clock."""
        reached, clock = self.rounds_to(target), self.curve("clock")
        return None if reached is None else dict(zip(clock.rounds, clock.mean, strict=True)).get(reached)


def has_diverged(run: Run) -> bool:
    """Has a run diverged in some of its rounds? Those before and after may look like any others."""
    return bool(run.facts.get("diverged"))


def is_running(run: Run) -> bool:
    """Is a process training this run now? Only then is its folder locked."""
    return not run.finished and run.folder is not None and is_locked(run.folder)


def average(values: Sequence[float]) -> float | None:
    """The mean; None of no values."""
    return mean(values) if values else None


def sample_std(values: Sequence[float]) -> float | None:
    """The sample standard deviation; None of fewer than two values."""
    return stdev(values) if len(values) > 1 else None


# groups ---------------------------------------------------------------------------------------------------------


def settings_key(config: Mapping[str, Any], tables: Iterable[str]) -> str:
    """A key that is equal for configurations with equal tables of these names."""
    return repr([sorted(flatten_settings({name: config.get(name, {})}).items()) for name in tables])


def flatten_settings(config: Mapping[str, Any], above: str = "") -> FlatSettings:
    """Nested tables as dotted keys and values as text.

    The seed is left out, by which the runs of a group differ, and with it a network's first weights; and settings that
    are off or that no number depends on.
    """
    flat: FlatSettings = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= flatten_settings(value, f"{above}{key}.")
        elif value is False and above in ("engine.", "evaluation."):
            continue  # as in runs that are older than the setting
        elif above + key not in ("seed", "plugins", "engine.workers", *STOPPING, FINGERPRINT):
            flat[above + key] = value_text(value)
    return flat


def run_settings(run: Run) -> FlatSettings:
    """The settings that distinguish a run from those of other groups; a deployed run differs from its simulation."""
    flat, usual = flatten_settings(run.config), optional_defaults()
    flat = {key: value for key, value in flat.items() if usual.get(key) != value}
    return flat | ({"engine.name": "flower"} if run.facts.get("engine") == "flower" else {})


@cache
def optional_defaults() -> FlatSettings:
    """The defaults of tables that most runs do not have: a run with one differs from them by its other settings."""
    return flatten_settings(stored_catalogue()["optional tables"])


def federation_key(run: Run) -> str:
    """A key that is equal for runs on the same data, divided alike."""
    return settings_key(run.config, FEDERATION) + str(run.facts.get("origins", {}).get(CONTENT, ""))


def group_runs(runs: Iterable[Run]) -> list[RunGroup]:
    """Groups in order of appearance, those of a federation one after the other.

    Of two runs with one configuration, one code and one seed the longer one counts, and the other is `repeated`.
    """
    federations: dict[str, dict[str, list[Run]]] = {}
    for run in runs:
        settings = repr(sorted(run_settings(run).items()))
        federations.setdefault(federation_key(run), {}).setdefault(settings, []).append(run)
    members = {
        key: [variant for its in alike.values() for variant in variants(its)] for key, alike in federations.items()
    }
    first = [groups[0].runs[0] for groups in members.values()]
    headings, places = federation_names(first, list(members.values())), federation_places(first)
    found = []
    for groups, heading, place in zip(members.values(), headings, places, strict=True):
        names = group_labels([run_settings(variant.runs[0]) for variant in groups])
        for name, (mark, its, repeated) in zip(names, groups, strict=True):
            found.append(RunGroup(f"{name} {mark}".strip(), its, heading, place, repeated))
    return found


def by_federation(groups: Iterable[RunGroup]) -> list[list[RunGroup]]:
    """The groups of each federation."""
    found: dict[str, list[RunGroup]] = {}
    for g in groups:
        found.setdefault(g.federation, []).append(g)
    return list(found.values())


def best_groups(groups: Sequence[RunGroup], most: int) -> list[RunGroup]:
    """At most so many groups, in their order: those with the best accuracies, or without any the lowest losses."""
    if len(groups) <= most:
        return list(groups)
    accuracies = [average(g.values(lambda run: run.best_accuracy)) for g in groups]
    losses = [average(g.last("loss")) for g in groups]
    is_regression = all(accuracy is None for accuracy in accuracies)
    scores = [None if loss is None else -loss for loss in losses] if is_regression else accuracies
    ranked = sorted(range(len(groups)), key=lambda n: (scores[n] is None, -(scores[n] or 0.0), n))
    return [groups[n] for n in sorted(ranked[:most])]


class Variant(NamedTuple):
    """Runs of one code among others with the same settings, one for each seed."""

    mark: str
    runs: tuple[Run, ...]
    repeated: int  # other runs of these seeds, which are as long at most


def variants(runs: Sequence[Run]) -> list[Variant]:
    """Runs with the same settings, divided by the code of plugins that they were run with, and by first weights
    where one seed has several.
    """
    weights: dict[Any, set[str]] = {}
    for run in runs:
        weights.setdefault(run.config.get("seed"), set()).add(str(run.config.get("model", {}).get("fingerprint")))
    by_weights = any(len(marks) > 1 for marks in weights.values())
    found: dict[tuple[str, ...], dict[Any, Run]] = {}
    digests: dict[Any, list[str]] = {}  # of runs without a record of their code, by seed
    counts = Counter[tuple[str, ...]]()
    for run in runs:
        seed, origins = run.config.get("seed"), run.facts.get("origins", {})
        code = " ".join(f"{key} {value}" for key, value in origins.items() if key != CONTENT)
        digest = DIGEST.search(run.name)
        if not code and run.config.get("plugins") and digest:
            known = digests.setdefault(seed, [])
            known += [digest[1]] if digest[1] not in known else []
            code = f"text {known.index(digest[1]) + 1}"
        own = str(run.config.get("model", {}).get("fingerprint")) if by_weights else ""
        by_seed = found.setdefault((code, own), {})
        counts[code, own] += 1
        if seed not in by_seed or len(run.rounds) > len(by_seed[seed].rounds):
            by_seed[seed] = run
    members = [tuple(by_seed.values()) for by_seed in found.values()]
    repeated = [counts[key] - len(its) for key, its in found.items()]
    marks = [""]
    if len(members) > 1:
        codes = [code for code, _ in found]
        marks = [f"(weights {own})" for _, own in found] if by_weights else edit_marks(members, codes)
    return list(map(Variant, marks, members, repeated))


def edit_marks(members: Sequence[Sequence[Run]], codes: Sequence[str]) -> list[str]:
    """The mark of runs of an edited plugin: "(edited 10:42)", or a short hash of the text."""
    edited = [max((str(e.get("edited")) for e in its[0].facts.get("plugins", ())), default="") for its in members]
    same_day = len({time[:10] for time in edited}) == 1
    for form in (slice(11 if same_day else 5, 16), slice(11 if same_day else 5, 19)):
        texts = [time[form] for time in edited]
        if all(texts) and len(set(texts)) == len(texts):
            return [f"(edited {text})" for text in texts]
    return [f"({code.removeprefix('algorithm ')})" for code in codes]


def federation_names(first: Sequence[Run], members: Sequence[Sequence[Variant]]) -> list[str]:
    """Each federation in one line: "digits, 30 clients, Dirichlet α = 0.2, 20% take part each round"."""
    names = []
    for run, groups in zip(first, members, strict=True):
        clients = max(client_count(each) for variant in groups for each in variant.runs)  # a pooled run counts as one
        turnouts = {participation_name(variant.runs[0].config) for variant in groups}
        parts = [
            str(run.config.get("data", {}).get("name", "")),
            count_text(clients, "client"),
            partition_name(run.config),
        ]
        names.append(", ".join(filter(None, [*parts, turnouts.pop() if len(turnouts) == 1 else ""])))
    places = federation_places(first)
    return [f"{n} ({p})" if p and names.count(n) > 1 else n for n, p in zip(names, places, strict=True)]


def federation_places(first: Sequence[Run]) -> list[str]:
    """The settings by which each federation, given by one of its runs, differs from the others."""
    flat = []
    for run in first:
        tables = {name: run.config.get(name, {}) for name in FEDERATION}
        content = run.facts.get("origins", {}).get(CONTENT)
        flat.append(flatten_settings(tables) | ({CONTENT: content} if content else {}))
    differing = differing_keys(flat)
    return [setting_words([k for k in settings if k in differing], settings) for settings in flat]


def setting_words(keys: Iterable[str], settings: FlatSettings) -> str:
    """Settings as `--set` takes them; of a table's name only the name."""
    return " ".join(
        settings[k] if k.endswith(".name") else f"{k.removeprefix('algorithm.')}={settings[k]}" for k in keys
    )


def group_labels(groups: Sequence[FlatSettings]) -> list[str]:
    """Each group's algorithm and the settings that distinguish it, written as `--set` takes them: "fedprox mu=0.1"."""
    task = {key for key in differing_keys(groups) if key.split(".")[0] in ("participation", "model")}
    by_method: dict[str, list[FlatSettings]] = {}
    for settings in groups:
        by_method.setdefault(settings["algorithm.name"], []).append(settings)
    shown = {method: (differing_keys(its) | task) - {"algorithm.name"} for method, its in by_method.items()}
    names = []
    for settings in groups:
        method = settings["algorithm.name"]
        names.append(f"{method} {setting_words([k for k in settings if k in shown[method]], settings)}".strip())
    return names


def differing_keys(groups: Sequence[FlatSettings]) -> set[str]:
    """The settings that are not the same in all groups."""
    keys = {key for settings in groups for key in settings}
    return {key for key in keys if len({settings.get(key) for settings in groups}) > 1}


def value_text(value: object) -> str:
    """A value as short as it can be without becoming another."""
    if isinstance(value, bool):
        return str(value).lower()
    short = f"{value:g}" if isinstance(value, float) else str(value)
    return short if not isinstance(value, float) or float(short) == value else repr(value)


def shorten_label(label: str) -> str:
    """A label that is short enough for a legend or a sentence: the middle of a very long one is left out."""
    return label if len(label) <= 80 else f"{label[:50]} … {label[-27:]}"


def labels(runs: Iterable[Run]) -> list[str]:
    """One short label for each row of `table`, all distinct."""
    return [g.title for g in group_runs(runs)]


# the table ------------------------------------------------------------------------------------------------------


def table(runs: Iterable[Run], target: float | None = None) -> list[ComparisonRow]:
    """One row for each group; every figure is the mean over its seeds, None where nothing was recorded.

    Seeds that did not end are left out where others did (`left_out`).

    Labels are distinct within a federation. The target, unless given, is the best value of the mean accuracy curve of
    the first fedavg group with the same data, partition, participation and model; `speedup` is that group's rounds to
    it divided by the row's.
    """
    groups = group_runs(runs)
    rows = []
    for g in groups:
        base = next((b for b in groups if b.runs[0].algorithm == "fedavg" and b.task == g.task), None)
        goal = target if target is not None else max(base.curve("accuracy").mean, default=None) if base else None
        needed = g.rounds_to(goal)
        needed_by_base = base.rounds_to(goal) if base else None
        best = g.values(lambda run: run.best_accuracy)
        rows.append(
            {
                "label": g.label,
                "federation": g.federation,
                "algorithm": g.runs[0].algorithm,
                "seeds": len(g.measured),
                "left_out": len(g.runs) - len(g.measured),
                "repeated": g.repeated,
                "best_accuracy": average(best),
                "best_accuracy_std": sample_std(best),
                "best_round": average(g.values(lambda run: run.best_round)),
                "final_accuracy": average(g.last("accuracy")),
                "final_accuracy_std": sample_std(g.last("accuracy")),
                "worst_clients_accuracy": average(g.last("client_accuracy_worst10")),
                "train_loss": average(g.last("train_loss")),
                "test_loss": average(g.last("loss")),
                "test_loss_std": sample_std(g.last("loss")),
                "rounds": average(g.values(lambda run: len(run.rounds))),
                "finished": all(run.finished for run in g.measured),
                "running": sum(map(is_running, g.measured)),
                "diverged": g.diverged,
                "baseline": base.label if base and goal is not None else None,
                "target": goal,
                "rounds_to_target": needed,
                "seconds_to_target": g.seconds_to(goal),
                "speedup": needed_by_base / needed if needed and needed_by_base else None,
                "seconds_per_round": average(g.values(lambda run: run.seconds_per_round)),
                "clock": average(g.last("clock")),
                "bytes_up": average(g.values(lambda run: run.bytes_up)),
                "bytes_down": average(g.values(lambda run: run.bytes_down)),
                "dropped": average(g.values(lambda run: run.dropped)),
                "lost_answers": average(g.values(lambda run: run.roll_call().lost)),
                "epsilon": average(g.last("epsilon")),
            }
        )
    return rows


def repeated_remark(count: int) -> str:
    """How many runs are not counted since another one has their settings, in a sentence; empty if none."""
    if count == 1:
        return "1 run is not counted: there is another one with its settings and seed that is as long or longer."
    others = "there are others with their settings and seeds that are as long or longer"
    return f"{count} runs are not counted: {others}." if count else ""


def best_words(rows: Sequence[ComparisonRow], baseline: str) -> str:
    """What a target is: "the best of fedavg", or with several seeds, whose own bests are others, that of their mean."""
    several = any(row["seeds"] > 1 for row in rows if row["label"] == baseline)
    return f"the best of {baseline}" + ("'s mean curve" if several else "")


def divergence_remark(counts: Mapping[str, tuple[int, int]]) -> str:
    """Which runs diverged, in a sentence: "1 of 4 runs diverged: scaffold (1 of 2); …"; empty if none did.

    `counts` are those of each method: its runs that diverged, and all its runs.
    """
    named = [f"{shorten_label(name)} ({bad} of {runs})" for name, (bad, runs) in counts.items() if bad]
    if not named:
        return ""
    bad, runs = (sum(numbers) for numbers in zip(*counts.values(), strict=True))
    more = f" and {len(named) - MAX_NAMED} more" if len(named) > MAX_NAMED else ""
    count = f"{bad} of {count_text(runs, 'run')} diverged"
    whose = "its" if bad == 1 else "their"
    return f"{count}: {', '.join(named[:MAX_NAMED])}{more}; {whose} numbers are those before or after it."


# names ----------------------------------------------------------------------------------------------------------


def client_count(run: Run) -> int:
    """The number of clients N of a run; 0 if it was not recorded."""
    return int(run.federation.get("clients") or run.config.get("partition", {}).get("clients") or 0)


# Settings that a partition is known by, with their symbols: they are shown even at their defaults.
PARTITION_SYMBOLS = {"alpha": "α", "sigma": "σ", "labels": "labels", "shards": "shards"}


def partition_name(config: Mapping[str, Any]) -> str:
    """A partition in words: "Dirichlet α = 0.2"."""
    settings = {k: v for k, v in config.get("partition", {}).items() if k not in ("name", "clients")}
    name = str(config.get("partition", {}).get("name", ""))
    entries = {entry["name"]: entry["parameters"] for entry in stored_catalogue()["partitions"]}
    # natural has only the settings that every partition has, also one of the user's own
    defaults = {p["name"]: p["default"] for p in entries.get(name, entries["natural"])}
    shown = {k: v for k, v in settings.items() if k in PARTITION_SYMBOLS or v != defaults.get(k)}
    title = "IID" if name == "iid" else name.replace("_", " ").capitalize()
    return f"{title} {', '.join(f'{PARTITION_SYMBOLS.get(k, k)} = {value_text(v)}' for k, v in shown.items())}".strip()


def participation_name(config: Mapping[str, Any]) -> str:
    """Who takes part, in words: "20% take part each round", or asynchronously "10 are at work, 3 make a step"."""
    settings, time = config.get("participation", {}), config.get("time", {})
    name, cohort, fraction = str(settings.get("name", "")), settings.get("cohort"), settings.get("fraction")
    if time.get("wait") == "buffer":
        at_work = time.get("at_work") or cohort
        return (
            f"{value_text(at_work) if at_work else f'{100 * fraction:.4g}%'} are at work, {time['buffer']} make a step"
        )
    if name == "full":
        return "all take part each round"
    if not cohort and not fraction:
        return f"{name} participation" if name else ""
    rule = f" ({name})" if name not in ("", "uniform") else ""
    return f"{value_text(cohort) if cohort else f'{100 * fraction:.4g}%'} take part each round{rule}"
