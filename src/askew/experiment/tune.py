"""Which method and which settings suit a federation: successive halving on samples that clients hold out.

Every client holds out a share of its samples, on which nobody trains. Settings are dropped, rounds are chosen and
methods are ranked by them; the test set decides nothing. Settings are searched at the configured seed and methods
ranked at fresh ones, since the best of many noisy numbers is too high. `halving` plans how long each is trained; runs
are those of a sweep, and those that are kept go on from where the rung before ended.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from ..core.text import count_text
from ..errors import AskewError, ConfigError, StoreError, StoreWarning
from .config import Config
from .contenders import Contender, check_over, choose_methods, keep_best, make_contender, score_run, use_all_samples
from .extend import stored_reason
from .halving import FINALISTS, Cost, Plan, Rung, Search, least_budget, make_plan
from .launch import FailedRun, next_batch
from .plugins import plugin_fault
from .process_state import stop_after
from .round_timer import RoundTimer
from .run import OnRound
from .run_folder import is_finished, run_folder
from .store import Run, read_json, write_json, write_text

SEEDS = 5  # fresh seeds of the finalists
PROBE_ROUNDS = {"rounds": 1, "bytes": 1, "seconds": 6}  # by which a method's costs are measured; the first warms up
PLANNED_TIME, LAST_TIME = 0.85, 0.95  # shares of the seconds that are planned, and after which nothing is trained
END_SECONDS = 4.0  # seconds of the budget that are left for the curves and the table
UNITS = {
    "rounds": ("rounds", 1),
    "s": ("seconds", 1),
    "m": ("seconds", 60),
    "h": ("seconds", 3600),
    "kB": ("bytes", 1e3),
    "MB": ("bytes", 1e6),
    "GB": ("bytes", 1e9),
    "TB": ("bytes", 1e12),
}
STATE = "tune.json"  # the file with the plan, what it rests on and the time that was spent

# trains configurations in a folder and yields the runs; the text says what for, the function is called each round
Launch = Callable[[Sequence[Config], Path, str, OnRound], Iterable[Run | FailedRun]]


class Budget(NamedTuple):
    """What all runs together may cost."""

    amount: float
    unit: str  # "rounds", "seconds" or "bytes"

    @classmethod
    def parse(cls, text: object) -> Budget:
        """A budget from a text such as 6000rounds, 10m or 2GB."""
        found = re.fullmatch(r"(\d{1,12}(?:\.\d{1,9})?)\s*([A-Za-z]+)", str(text).strip())
        if not found or found[2] not in UNITS or not float(found[1]):
            raise ConfigError(
                f"tune: a budget is rounds, a time or bytes of all runs together, such as 6000rounds, 90s, 10m, 2h, "
                f"50MB or 2GB; got {text!r}."
            )
        unit, factor = UNITS[found[2]]
        return cls(float(found[1]) * factor, unit)


class TuneStopped(Exception):
    """Somebody asked to stop; all that was trained is stored."""


@dataclass(frozen=True)
class Standing:
    """The place of a method in the ranking."""

    method: str
    setting: dict[str, Any]  # the best one found
    config: Config  # of a run with it on all samples
    settings: int  # that were tried
    validation: float  # mean over fresh seeds; without any, that of the search
    tests: dict[int, float | None]  # by fresh seed: on the test set, in the round that held-out samples choose
    best_rounds: list[int]  # these rounds
    last: str  # the stage that it reached
    costs: dict[str, float]  # rounds, seconds and bytes of all that was trained of it


@dataclass(frozen=True)
class TuneResult:
    """The answer: methods from the best to the worst, those that cannot run here, and what it cost."""

    standings: list[Standing]
    refused: dict[str, str]  # reasons by method
    runs: list[Run]  # at fresh seeds
    plan: Plan  # as it was carried out
    budget: Budget | None
    spent: float  # in the budget's unit; without a budget, rounds
    classes: bool  # or a regression
    remarks: list[str]


# the whole of it ------------------------------------------------------------------------------------------------------


def kept_state(request: str) -> str:
    """The file in which the finished plan of a request is kept when another request follows it."""
    return f"tune-{request}.json"


class Tuner:
    """Carries a plan out, stage by stage; what is stored of an earlier attempt is read back."""

    def __init__(
        self,
        tables: Mapping[str, Any],
        out: Path,
        launch: Launch,
        *,
        methods: Sequence[str] = (),
        over: Mapping[str, Any] | None = None,
        budget: Budget | None = None,
        seeds: int = SEEDS,
        plan: Plan | None = None,
        processes: int = 1,
        began: float | None = None,  # when the command began, by time.monotonic()
    ) -> None:
        over = dict(over or {})
        planned = [] if plan is None else list(plan.rounds)
        if methods and "algorithm.name" in over:
            raise ConfigError("tune: --methods and --over algorithm.name both name the methods; give one of them.")
        names = choose_methods(tables, methods or over.get("algorithm.name", planned))
        if plan is not None and (unplanned := [name for name in names if name not in planned]):
            raise ConfigError(
                f"tune: the plan has no method {unplanned[0]}, only {', '.join(planned)}; "
                "give some of these, or leave --methods or --plan out."
            )
        over.pop("algorithm.name", None)
        check_over(over, names)
        if seeds < 1:
            raise ConfigError(f"tune: seeds must be ≥ 1, got {seeds}; methods are ranked at fresh seeds.")
        self.out, self.launch, self.budget, self.seeds, self.processes = out, launch, budget, seeds, processes
        if plan is not None and budget is not None:
            raise ConfigError("tune: a plan is followed whatever it costs; leave out the budget, or the plan.")
        self.given = plan  # which is then followed, whatever it costs
        self.contenders = [make_contender(tables, name, names, over) for name in names]
        self.began = time.monotonic() if began is None else began
        self.timer = RoundTimer()
        self.unit = budget.unit if budget else "rounds"
        self.remarks: list[str] = []
        settings = {c.name: [candidate.config.name() for candidate in c.candidates] for c in self.contenders}
        request = json.dumps([settings, budget, seeds], sort_keys=True)
        self.state: dict[str, Any] = read_json(out / STATE)
        self.earlier: dict[str, Any] = {}  # a finished plan of another request, which is not to be lost
        if self.state.get("request") != (digest := hashlib.sha256(request.encode()).hexdigest()[:16]):
            self.earlier = self.state if "done" in self.state else {}
            self.state = read_json(out / kept_state(digest)) or {"request": digest, "seconds": 0.0}
        self.before = float(self.state["seconds"])  # that earlier attempts took
        if "done" in self.state:
            self.given = self.given or read_plan(self.state["done"])

    @property
    def left(self) -> list[Contender]:
        """The methods that can run here."""
        return [c for c in self.contenders if not c.reason]

    def run(self) -> TuneResult:
        """Try, search, rank; the answer."""
        self.probe()
        self.require_methods()
        plan = self.given or self.stored_plan() or self.make_plan()
        if unplanned := [c.name for c in self.left if c.name not in plan.rounds]:
            raise ConfigError(
                f"tune: {self.out / STATE} has no plan of {unplanned[0]}, which could not run when it was made; "
                "give another folder by --out."
            )
        timed = self.unit == "seconds" and not self.given
        with stop_after(self.limit(LAST_TIME) - self.elapsed()) if timed else nullcontext():
            rungs = self.search(plan)
            seeds = self.rank(plan)
        cut = {name: its[:rungs] for name, its in plan.rungs.items()}
        done = plan._replace(rungs=cut, first_seeds=seeds[0], seeds=seeds[1])
        again = "done" in self.state
        self.state |= {} if again else {"done": done._asdict(), "remarks": self.remarks, "spent": self.spent()}
        self.save()
        return self.result(done)

    def require_methods(self) -> None:
        """Refuse to go on where no method can run."""
        if not self.left:
            reasons = dict.fromkeys(c.reason for c in self.contenders)
            raise ConfigError(f"tune: no method can run here: {' '.join(reasons)}")

    # the plan ---------------------------------------------------------------------------------------------------------

    @property
    def amount(self) -> float:
        """The budget's amount; infinite without one."""
        return self.budget.amount if self.budget and not self.given else math.inf

    def limit(self, share: float) -> float:
        """What may be spent: the budget, of seconds this share without those for the end."""
        return share * (self.amount - END_SECONDS) if self.unit == "seconds" else self.amount

    def budget_for(self, planned: float) -> float:
        """The budget of which so much can be planned."""
        return planned / PLANNED_TIME + END_SECONDS if self.unit == "seconds" else planned

    def elapsed(self) -> float:
        """The seconds that this and earlier attempts took."""
        return self.before + time.monotonic() - self.began

    def spent(self) -> float:
        """What was spent so far, in the budget's unit; seconds are those of the clock."""
        return self.elapsed() if self.unit == "seconds" else sum(c.spent(self.unit) for c in self.contenders)

    def save(self) -> None:
        """Store what a later attempt has to know."""
        self.state["seconds"] = self.before if self.given else self.elapsed()
        if self.earlier:
            write_json(self.out / kept_state(self.earlier["request"]), self.earlier)
            self.earlier = {}
        write_json(self.out / STATE, self.state)

    def probe(self) -> None:
        """Train the first setting of every method for a round or a few: whether it can run here, and what it costs.

        Where runs are trained side by side and seconds count, as many settings as in the search are beside each other.
        """
        rounds, settings = PROBE_ROUNDS[self.unit], [o.config for c in self.left for o in c.candidates]
        many = len(next_batch(settings)) // len(self.left) if settings and self.unit == "seconds" else 1
        wanted = [
            (c, [replace(o.config, rounds=min(rounds, o.config.rounds)) for o in c.candidates[: max(1, many)]])
            for c in self.left
        ]
        # a single round is the beginning of the search; where more were needed, rungs may be shorter than that
        self.train(wanted, "search" if rounds == 1 else "probe", "try every method")
        costs = {name: Cost(*cost) for name, cost in self.state.get("costs", {}).items()}
        costs = costs if all(c.name in costs for c in self.left) else self.measure_costs()
        reasons: dict[str, list[str]] = {}  # why longer runs begin anew, and the methods
        for c in self.left:
            folders = [run.folder for run in c.trained.values() if run.folder]
            reason = next(filter(None, map(stored_reason, folders)), "")
            c.search = Search(len(c.candidates), costs[c.name], bool(reason))
            reasons.setdefault(reason, []).append(c.name)
        for reason, names in reasons.items():
            self.remarks += [f"Rungs of {', '.join(names)} begin at the first round: {reason}."] if reason else []
        self.state["costs"] = costs

    def measure_costs(self) -> dict[str, Cost]:
        """What a round of each method costs in the budget's unit, and in seconds the start of a run."""
        if self.unit == "seconds":
            return self.timer.costs({c.name: list(c.trained.values()) for c in self.left}, self.processes)
        return {c.name: Cost(c.spent(self.unit) / max(1, len(c.new_records()))) for c in self.left}

    def make_plan(self) -> Plan:
        """The schedule that the rest of the budget pays; a budget that pays for nothing is refused."""
        methods = {c.name: c.search for c in self.left}
        rounds = min(c.candidates[0].config.rounds for c in self.left)
        rest = self.limit(PLANNED_TIME) - self.spent() if self.budget else None
        plan = make_plan(methods, rounds, self.seeds, rest)
        if plan is None:
            least = self.budget_for(self.spent() + least_budget(methods, 1, self.seeds))
            who = count_text(len(methods), "method")
            raise ConfigError(
                f"tune: the budget is too small for {who} with {count_text(self.seeds, 'fresh seed')}: runs "
                f"of a single round need {amount_text(least, self.unit)}; raise it, or give fewer methods, values or "
                "seeds."
            )
        self.state["plan"] = plan._asdict()
        self.save()
        return plan

    def stored_plan(self) -> Plan | None:
        """The plan of an earlier attempt with the same request."""
        return read_plan(self.state["plan"]) if "plan" in self.state else None

    # stages -----------------------------------------------------------------------------------------------------------

    def train(self, wanted: Sequence[tuple[Contender, list[Config]]], folder: str, what: str) -> bool:
        """Train configurations of contenders side by side; False if the time was over before all were trained.

        In the search a method is out if all its settings fail.
        """
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*holds the first", StoreWarning)  # a remark says it once
            return self.train_all(wanted, folder, what)

    def train_all(self, wanted: Sequence[tuple[Contender, list[Config]]], folder: str, what: str) -> bool:
        """As `train`, with all warnings."""
        owners = {config.name(): c for c, configs in wanted for config in configs}
        configs, searching = [config for _, its in wanted for config in its], folder != "evaluation"
        for run in self.launch(configs, self.out / folder, what, self.timer) if configs else ():
            if isinstance(run, FailedRun):
                if isinstance(run.error, StoreError):  # of a damaged folder, which says nothing about the method
                    raise run.error
                self.drop_failed(owners[run.config.name()], run, searching)
                continue
            if not run.over:
                if self.unit == "seconds" and self.elapsed() >= self.limit(LAST_TIME):
                    return False
                self.save()
                raise TuneStopped(what)
            run.model = {}  # many runs are kept, and their models are stored
            c = owners[run.name]
            if searching:
                c.trained[run.name] = run
            else:
                c.seeds[int(run.config["seed"])] = run
        self.save()
        return True

    def drop_failed(self, c: Contender, failed: FailedRun, searching: bool) -> None:
        """Leave out a setting that failed; a method whose first one did, or of which none is left, cannot run here."""
        same, error = replace(failed.config, rounds=1).digest(), failed.error
        reason = str(error) if isinstance(error, AskewError) else plugin_fault(error)
        reason = reason or f"it failed ({type(error).__name__}: {error})."
        if not searching:
            self.remarks.append(f"{c.name} failed at seed {failed.config.seed}: {reason}")
            return
        c.candidates = [o for o in c.candidates if c.trained and replace(o.config, rounds=1).digest() != same]
        c.reason = "" if c.candidates else reason

    def affordable(self, cost: float) -> bool:
        """Does the budget pay for this too?"""
        return self.spent() + cost <= self.limit(LAST_TIME)

    def is_stored(self, config: Config, folder: str) -> bool:
        """Was this trained by an earlier attempt? Its time is counted then."""
        return self.unit == "seconds" and is_finished(run_folder(config, self.out / folder))

    def search(self, plan: Plan) -> int:
        """Carry the rungs out, all methods' first ones, then the second ones …; how many were carried out."""
        count = max((len(its) for its in plan.rungs.values()), default=0)
        for k in range(count):
            rungs = {c.name: plan.rungs[c.name][k] for c in self.left if k < len(plan.rungs.get(c.name, ()))}
            wanted = [
                (c, [replace(o.config, rounds=rungs[c.name].rounds) for o in c.candidates])
                for c in self.left
                if c.name in rungs
            ]
            if not self.affordable(sum(self.rung_cost(c, its, plan.rungs[c.name][:k]) for c, its in wanted)):
                self.remarks.append(f"The budget was spent after {k} of {count} rungs of the search.")
                return k
            if not self.train(wanted, "search", f"search, rung {k + 1} of {count}"):
                self.remarks.append(f"The time was over in rung {k + 1} of {count} of the search.")
                return k
            for c, _ in wanted:
                self.halve(c, plan.rungs[c.name], k)
        return count

    def rung_cost(self, c: Contender, configs: Sequence[Config], before: Sequence[Rung]) -> float:
        """What a rung of a method costs after those before it."""
        done = before[-1].rounds if before and not c.search.restarts else 0
        new = [config.rounds - done for config in configs if not self.is_stored(config, "search")]
        return c.search.cost.of(len(new), sum(new))

    def halve(self, c: Contender, rungs: Sequence[Rung], k: int) -> None:
        """Keep the best of a method's settings after a rung; those that diverged only if all did."""
        runs = [c.trained.get(replace(o.config, rounds=rungs[k].rounds).name()) for o in c.candidates]
        scores = [score_run(run) if run and "diverged" not in run.facts else None for run in runs]
        if not any(scores):
            scores = [score_run(run) if run else None for run in runs]
        kept = rungs[k + 1].settings if k + 1 < len(rungs) else 1
        c.candidates = keep_best(c.candidates, scores, kept) or c.candidates[:1]

    def rank(self, plan: Plan) -> tuple[int, int]:
        """Train the best settings at fresh seeds: all methods, then the finalists; how many seeds each of them got."""
        first = self.train_seeds(self.left, plan, range(1, plan.first_seeds + 1), "every method")
        for c in self.left:
            c.last = count_text(first, "seed") if first else "search"
        finalists = sorted(self.left, key=lambda c: c.value, reverse=True)[:FINALISTS]
        if first < plan.first_seeds:
            return first, first
        last = self.train_seeds(finalists, plan, range(first + 1, plan.seeds + 1), "finalists")
        for c in finalists:
            c.last = "final" if last or plan.seeds <= first else c.last
        return first, first + last

    def train_seeds(self, contenders: Sequence[Contender], plan: Plan, seeds: range, who: str) -> int:
        """Train methods at fresh seeds, as many as the budget pays; how many they got."""
        wanted = [[(c, [self.at_seed(c, plan, n)]) for c in contenders] for n in seeds]
        while wanted and not self.affordable(sum(map(self.seed_cost, wanted))):
            wanted.pop()
        if self.train([pair for seed in wanted for pair in seed], "evaluation", f"fresh seeds, {who}"):
            return len(wanted)
        whole = [seed for seed in wanted if all(config.seed in c.seeds for c, (config,) in seed)]
        kept = {config.seed for seed in whole for _, (config,) in seed}
        unfinished = {config.seed for seed in wanted for _, (config,) in seed} - kept
        for c in contenders:  # seeds that only some have rank nothing
            c.seeds = {seed: run for seed, run in c.seeds.items() if seed not in unfinished}
        self.remarks.append(f"The time was over at fresh seeds: {len(whole)} of {len(wanted)} for {who} count.")
        return len(whole)

    def seed_cost(self, wanted: Sequence[tuple[Contender, list[Config]]]) -> float:
        """What runs at one fresh seed cost, those without which are stored."""
        new = [(c, config) for c, (config,) in wanted if not self.is_stored(config, "evaluation")]
        return sum(c.search.cost.of(1, config.rounds) for c, config in new)

    def at_seed(self, c: Contender, plan: Plan, n: int) -> Config:
        """The best setting of a method at the n-th fresh seed, at full length."""
        best = c.candidates[0].config
        return replace(best, seed=best.seed + n, rounds=plan.rounds[c.name])

    # the answer -------------------------------------------------------------------------------------------------------

    def result(self, plan: Plan) -> TuneResult:
        """The ranking: finalists, then the other methods, each by the samples held out."""
        ranked = sorted(self.left, key=lambda c: (c.last == "final", c.value), reverse=True)
        runs = [run for c in ranked for run in (*c.seeds.values(), *c.trained.values())]
        return TuneResult(
            [self.standing(c, plan) for c in ranked],
            {c.name: c.reason for c in self.contenders if c.reason},
            [run for c in ranked for run in c.seeds.values()],
            plan,
            self.budget,
            float(self.state.get("spent", 0.0)),
            any(run.federation.get("classes") for run in runs),
            list(self.state.get("remarks", self.remarks)),
        )

    def standing(self, c: Contender, plan: Plan) -> Standing:
        """The place of one method; the configuration is that of a run on all samples."""
        best, scores = c.candidates[0], {seed: score_run(run) for seed, run in sorted(c.seeds.items())}
        return Standing(
            c.name,
            best.setting,
            use_all_samples(replace(best.config, rounds=plan.rounds[c.name])),
            c.search.settings,
            c.value,
            {seed: score.test for seed, score in scores.items()},
            [score.round for score in scores.values()],
            c.last,
            {unit: c.spent(unit) for unit in PROBE_ROUNDS},
        )


# files ----------------------------------------------------------------------------------------------------------------


def read_plan(table: Mapping[str, Any]) -> Plan:
    """A plan from what JSON holds of it."""
    try:
        rungs = {name: [Rung(*map(int, rung)) for rung in its] for name, its in table["rungs"].items()}
        rounds = {name: int(count) for name, count in table["rounds"].items()}
        return Plan(rounds, rungs, int(table["first_seeds"]), int(table["seeds"]))
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ConfigError("tune: this file holds no plan; give the tune.json of a folder that tune made.") from None


def load_plan(path: Path) -> Plan:
    """The plan that was carried out, from a stored tune.json."""
    try:
        table = read_json(path)
    except StoreError:
        table = {}
    if "done" not in table:
        what = "holds no finished plan" if path.exists() else "does not exist"
        raise ConfigError(f"tune: the file {path} of --plan {what}; give the tune.json of a folder that tune made.")
    return read_plan(table["done"])


def write_winner(standing: Standing, out: Path) -> Path:
    """Write run.toml of the best method: a run on all samples, which `askew run` takes."""
    plugins = tuple(str(Path(path).resolve()) for path in standing.config.plugins)
    path = out / "run.toml"
    write_text(path, replace(standing.config, plugins=plugins).toml())
    return path


def amount_text(amount: float, unit: str) -> str:
    """An amount of a budget in words."""
    if unit == "bytes":
        return f"{amount / 1e6:,.3g} MB"
    return f"{math.ceil(amount):,} {unit}"
