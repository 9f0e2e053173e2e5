"""What is still to be run, and what it costs: for a printed number, and for a verdict at least cost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median, stdev
from typing import NamedTuple

from ..core.text import count_text
from ..report.statistics import MAX_SEEDS, MIN_SEEDS, SIGNIFICANCE, find_power, seeds_needed, t_quantile
from .claim_rules import ClaimCell, ClaimRule, Finding, RuleEvaluator, cell_terms, has_cell
from .cost import (
    COST_SETTINGS,
    Estimate,
    Speeds,
    run_cost,
    run_seconds,
    scale_estimate,
    short_count,
    sum_estimates,
)
from .evidence import Evidence
from .expressions import Term
from .paper_tables import long_duration
from .papers import Experiment
from .planned_runs import build_config, hyper_text, run_specs
from .run_metrics import TO_TARGET

DEVICES = ("NVIDIA H200", "cpu")  # whose times are given: the first of them that was measured
LARGE_EFFECT = 2.0  # standard deviations; the power of a test is given for it where nothing was measured
POWER = 0.8  # with which all cells of a claim are to pass together
MEAN_TESTS = ("above", "trend")  # rules whose cells pass by a t-test
OTHER_PROBLEMS = "it can only be refuted, as other cells are not comparable with the paper's"
CLEAR_EFFECT = 3.0  # standard deviations that a difference is taken to have which was measured at one seed alone

Needs = Mapping[tuple[str, Term], int]  # seeds by experiment and term
CellId = tuple[str, str, str, str]  # experiment, case, method and grid point


class MissingRuns(NamedTuple):
    """How many runs are missing, how many samples they would train on, and how long that takes on a device."""

    runs: int
    samples: int
    seconds: Estimate | None = None  # None: not known
    device: str = ""

    def __str__(self) -> str:
        time = f"{long_duration(self.seconds)} on {self.device}" if self.device else "time unknown"
        return f"{count_text(self.runs, 'run')}, {short_count(self.samples)} samples, {time}"

    @property
    def price(self) -> tuple[bool, float]:
        """What a cheaper bill has less of: seconds, or samples where they are not known."""
        return self.seconds is None, self.samples if self.seconds is None else float(self.seconds)


class ClaimBill(NamedTuple):
    """The cheapest runs that would decide a claim, as far as is known."""

    missing: MissingRuns
    plan: str  # which cells at how many seeds, and the power of that

    def __str__(self) -> str:
        return f"needs {self.missing} at full scale: {self.plan}" if self.missing.runs else self.plan


class PointCost(NamedTuple):
    """What a run of one grid point costs: samples, and seconds by device."""

    hyper: str
    samples: int
    seconds: dict[str, Estimate | None]


class Biller:
    """Counts and prices runs that are missing at full scale."""

    def __init__(self, known: Mapping[str, Experiment], evidence: Evidence, speeds: Speeds) -> None:
        self.known, self.evidence, self.speeds = known, evidence, speeds
        self.costs: dict[str, dict[tuple[str, str], list[PointCost]]] = {}  # by experiment, once computed

    # runs

    def missing_runs(self, needs: Needs, tested: bool) -> MissingRuns:
        """What is missing for so many seeds of every term; tested, tuned points are chosen on other seeds."""
        missing: dict[CellId, tuple[int, PointCost]] = {}
        for (experiment, t), seeds in needs.items():
            owner = self.owner(experiment, t)
            for point, runs in self.missing_points(owner, t, seeds, tested):
                key = owner, t.case, t.method, point.hyper
                missing[key] = max(missing.get(key, (0, point)), (runs, point), key=lambda entry: entry[0])
        wanted = [(runs, point) for runs, point in missing.values() if runs]
        device, seconds = "", None
        for name in DEVICES:
            seconds = sum_estimates(scale_estimate(point.seconds[name], runs) for runs, point in wanted)
            if seconds is not None and wanted:
                device = name
                break
        total = sum(runs for runs, _ in wanted), sum(runs * point.samples for runs, point in wanted)
        return MissingRuns(*total, seconds, device)

    def missing_points(self, owner: str, t: Term, seeds: int, tested: bool) -> list[tuple[PointCost, int]]:
        """The grid points of a term, each with how many of its runs are missing."""
        costs = self.point_costs(owner).get((t.case, t.method), [])
        costs = [point for point in costs if set(t.hyper.split()) <= set(point.hyper.split())]
        points = self.evidence.points_of(owner, t.case, t.method, t.hyper)
        stored = {hyper_text(p.hyper): {*p.runs, *(p.stopped if t.metric == TO_TARGET else ())} for p in points}
        if len(costs) < 2 or not self.known[owner].choose:
            return [(point, max(0, seeds - len(stored.get(point.hyper, ())))) for point in costs]
        chosen = self.evidence.tuned_point(owner, points)
        if chosen is None:  # the grid at one seed, then the chosen point, whichever it will be, at others
            at = max(
                (s for s in self.evidence.seeds), key=lambda s: sum(s in has for has in stored.values()), default=0
            )
            grid = [(point, int(at not in stored.get(point.hyper, ()))) for point in costs]
            further = seeds if tested else seeds - 1
            return [(grid[0][0], grid[0][1] + further), *grid[1:]]
        usable = sorted(chosen.runs)
        if tested:
            blind = {s: self.evidence.tuned_point(owner, points, without=s) for s in self.evidence.seeds}
            usable = [s for s, point in blind.items() if point and s in point.runs]
        text = hyper_text(chosen.hyper)
        return [(point, max(0, seeds - len(usable)) * (point.hyper == text)) for point in costs]

    def owner(self, experiment: str, t: Term) -> str:
        """The experiment that has the runs of a term, which another may show."""
        owners = self.known[experiment].runs
        return next((o for o in owners if has_cell(self.known, self.known[o], t.case, t.method)), experiment)

    def point_costs(self, experiment: str) -> dict[tuple[str, str], list[PointCost]]:
        """By case and method: the grid points at full scale with what a run of each costs."""
        if experiment not in self.costs:
            found: dict[tuple[str, str], list[PointCost]] = {}
            known: dict[tuple[str, ...], PointCost] = {}
            e = self.known[experiment]
            for spec in run_specs(e, "full", [0]) if e.trains else ():
                lengths = hyper_text({k: v for k, v in spec.hyper.items() if k in COST_SETTINGS})
                key = spec.experiment.id, spec.case.name, spec.method.name, lengths
                if key not in known:
                    config = build_config(spec, "full")
                    cost = run_cost(config)
                    seconds = {device: run_seconds(config, device, self.speeds, cost) for device in DEVICES}
                    known[key] = PointCost("", cost.trained, seconds)
                point = known[key]._replace(hyper=hyper_text(spec.hyper))
                found.setdefault((spec.case.name, spec.method.name), []).append(point)
            self.costs[experiment] = found
        return self.costs[experiment]

    # verdicts

    def claim_bill(
        self, evaluator: RuleEvaluator, rules: Sequence[ClaimRule], findings: Sequence[Finding]
    ) -> ClaimBill | None:
        """The cheapest way to a verdict on these rules; None where runs decide nothing."""
        refuting = [self.refutations(evaluator, rule, f) for rule, f in zip(rules, findings, strict=True)]
        bills = [bill for found in refuting for bill in found if bill.missing.runs]
        if bills:
            return min(bills, key=lambda bill: bill.missing.price)
        needs: dict[tuple[str, Term], int] = {}
        plans = list[str]()
        tested = sum(len(rule.cells) for rule in rules if rule.test in MEAN_TESTS)
        power = POWER ** (1 / max(1, tested))  # of each cell, such that all pass with POWER
        for rule, f in zip(rules, findings, strict=True):
            if rule.d:
                plans.append(self.plan_cells(evaluator, rule, f, needs, power))
        if not needs:
            return None
        return ClaimBill(self.missing_runs(needs, tested=True), "; ".join(dict.fromkeys(plans)))

    def refutations(self, evaluator: RuleEvaluator, rule: ClaimRule, f: Finding) -> list[ClaimBill]:
        """Bills for every cell that points the other way and could refute the rule with more seeds.

        Where no cell has two seeds that say so, for the cell that points furthest the other way at its one seed.
        """
        if rule.test != "above" or not rule.refutes or len(f.cells) != len(rule.cells):
            return []
        bound = rule.bound if rule.below is None else rule.below
        pairs = zip(rule.cells, f.cells, strict=True)
        cells = [(names, cell) for names, cell in pairs if cell.mean < bound and cell.comparable]
        bills = list[ClaimBill]()
        for names, cell in cells:
            if effect := cell_effect(cell, bound):
                bills += self.refutation(evaluator, rule, names, cell, -effect, f"it stays {mean_of(cell)}")
        single = [(cell.mean, names, cell) for names, cell in cells if cell.n == 1]
        if single and not bills:
            mean, names, cell = min(single, key=lambda entry: entry[0])
            shown, spreads = f"the {mean - bound:+.3g} that its one seed shows", known_spreads(f.cells)
            if spreads:
                effect = (bound - mean) / median(spreads)
                vary = f"{shown} stays and its seeds vary by {median(spreads):.2g}, as those of other cells do"
            else:
                effect, vary = CLEAR_EFFECT, f"its seeds vary by a third of {shown}"
            bills = self.refutation(evaluator, rule, names, cell, effect, vary)
        return bills

    def refutation(
        self,
        evaluator: RuleEvaluator,
        rule: ClaimRule,
        names: Mapping[str, str],
        cell: ClaimCell,
        effect: float,
        condition: str,
    ) -> list[ClaimBill]:
        """The bill for one cell whose difference is so many standard deviations; empty where no seeds are enough."""
        level = SIGNIFICANCE / len(rule.cells)
        seeds = seeds_needed(effect, level, rule.seeds)
        if seeds is None:
            return []
        needs = {(evaluator.owner(t), t): seeds for t in cell_terms(rule, names)}
        power = find_power(effect, seeds, level)
        plan = f"{cell.name} at {seeds} seeds refutes it with power {power:.2f} if {condition}"
        return [ClaimBill(self.missing_runs(needs, tested=True), plan)]

    def plan_cells(
        self, evaluator: RuleEvaluator, rule: ClaimRule, f: Finding, needs: dict[tuple[str, Term], int], power: float
    ) -> str:
        """Adds the seeds at which every cell passes with this power to `needs`; returns what that plan can find."""
        used, hopeless, joint, assumed = list[int](), list[str](), 1.0, False
        measured = f.cells[: len(rule.cells)] if rule.test == "trend" else f.cells  # slopes, then pairs of neighbours
        cells = measured if len(measured) == len(rule.cells) else [None] * len(rule.cells)
        others = sum(not cell.comparable for cell in cells if cell)
        for names, cell in zip(rule.cells, cells, strict=True):
            if cell and not cell.comparable:
                continue
            seeds = 1 if rule.test == "fact" else rule.seeds  # what is counted needs no repetition
            if rule.test in MEAN_TESTS:
                effect = cell_effect(cell, rule.bound) if cell else None
                if cell and effect is None and cell.n >= MIN_SEEDS:  # without variance its sign decides
                    effect = math.copysign(math.inf, cell.mean - rule.bound)
                assumed |= effect is None
                effect = LARGE_EFFECT if effect is None else effect
                found = seeds_to_pass(effect, rule.seeds, power)
                seeds = found or rule.seeds
                joint *= (1.0 if math.isinf(effect) else find_power(effect, seeds, SIGNIFICANCE)) if found else 0.0
                hopeless += [] if found else [cell.name if cell else "all"]
            used.append(seeds)
            for t in cell_terms(rule, names):
                key = evaluator.owner(t), t
                needs[key] = max(needs.get(key, 0), seeds)
        if not used:
            return OTHER_PROBLEMS
        seeds_text = f"{min(used)}" if min(used) == max(used) else f"{min(used)} to {max(used)}"
        cells_text = f"{count_text(len(used), 'cell')} at {seeds_text} seed{'s' * (max(used) != 1)}"
        plan = f"{cells_text}{rule_limits(rule, min(used))}"
        if rule.test in MEAN_TESTS and len(used) > 1 and not hopeless:
            unknown = f", if those not measured yet are {LARGE_EFFECT:g} standard deviations" if assumed else ""
            plan += f"; all {len(used)} pass with power {joint:.2f}{unknown}"
        if others:
            plan += f"; {OTHER_PROBLEMS}"
        if hopeless:
            some = ", ".join(hopeless[:3]) + (f" and {len(hopeless) - 3} more" if len(hopeless) > 3 else "")
            plan += f"; as measured so far, up to {MAX_SEEDS} seeds would not make {some} pass"
        return plan


def seeds_to_pass(effect: float, least: int, power: float) -> int | None:
    """The fewest seeds at which a cell passes with this power; None if it does not at any number that is planned."""
    if math.isinf(effect):
        return least if effect > 0 else None
    return seeds_needed(effect, SIGNIFICANCE, least, power) if effect > 0 else None


def cell_effect(cell: ClaimCell, bound: float) -> float | None:
    """The mean less the bound in standard deviations; None of fewer than two seeds and without variance."""
    std = stdev(cell.values) if cell.n > 1 else 0.0
    return (cell.mean - bound) / std if std else None


def known_spreads(cells: Iterable[ClaimCell]) -> list[float]:
    """The standard deviations of the cells that have one."""
    return [std for cell in cells if cell.n > 1 and (std := stdev(cell.values))]


def mean_of(cell: ClaimCell) -> str:
    """The mean of a cell with its standard deviation."""
    return f"{cell.mean:+.3g} ± {stdev(cell.values):.2g}"


def limits_text(family: int, seeds: int) -> str:
    """What t-tests of a family of cells need at so many seeds, and the power of one of them."""
    passing, refuting = (t_quantile(1 - level, seeds - 1) for level in (SIGNIFICANCE, SIGNIFICANCE / family))
    powers = [find_power(LARGE_EFFECT, seeds, level) for level in (SIGNIFICANCE, SIGNIFICANCE / family)]
    one = f"one of {family} refutes" if family > 1 else "it refutes"
    return (
        f" (a cell passes where t > {passing:.3g}, {one} where t < −{refuting:.3g}: power {powers[0]:.2f} and "
        f"{powers[1]:.2f} for a difference of {LARGE_EFFECT:g} standard deviations)"
    )


def rule_limits(rule: ClaimRule, seeds: int) -> str:
    """The limits of a rule's tests, in words; empty where it has no t-test of a mean."""
    return limits_text(len(rule.cells), seeds) if rule.test == "above" and seeds >= MIN_SEEDS else ""


def printed_needs(
    experiment: str, case: str, methods: Iterable[str], hyper: str, seeds: int, metric: str = ""
) -> Needs:
    """What a printed number needs: so many seeds of its method, and of those that it is relative to."""
    return {(experiment, Term("", case, method, hyper, metric, 1)): seeds for method in methods}
