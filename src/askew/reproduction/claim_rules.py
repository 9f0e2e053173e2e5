"""The rules by which claims are decided on measured results.

A rule spans cells (every combination of the lists in its `each`), computes one number for each seed in each cell (`d`,
an expression as expressions.py reads it, in which {name} is the cell's value of `name`) and tests these numbers. All
its cells, and all rules of a claim, must agree for the claim to hold. Seeds that some term of a cell lacks are left
out of that cell.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean, stdev
from typing import NamedTuple

import numpy as np

from ..core.text import count_text
from ..errors import ConfigError
from ..report.statistics import (
    MIN_SEEDS,
    SIGNIFICANCE,
    MeanTest,
    holm_adjust,
    is_within,
    paired_test,
    t_interval,
    welch_test,
)
from .claim_checks import CLAIM_CHECKS
from .evidence import Evidence, metric_value
from .expressions import Term, read_formula
from .papers import Experiment
from .printed import PrintedNumbers

HOLDS, FAILS, UNDECIDED, NOT_RUN, UNTESTABLE = "holds", "does not hold", "undecided", "not run", "not testable"
NAME = re.compile(r"\{(\w+)\}")
LEVEL = 0.9  # of the interval by which two things are similar: two one-sided tests at 5%
MAX_CELLS = 6  # cells that a finding lists one by one


class ClaimCell(NamedTuple):
    """One comparison of a rule: its number at every seed that has all of its terms."""

    name: str
    values: list[float]
    missing: tuple[Term, ...] = ()  # terms that no run has
    undefined: int = 0  # seeds that were run and at which it has no value, such as a level that is never reached
    comparable: bool = True  # whether all of its terms are about problems that the paper can have run

    @property
    def n(self) -> int:
        """The number of seeds."""
        return len(self.values)

    @property
    def mean(self) -> float:
        return fmean(self.values) if self.values else math.nan


class Finding(NamedTuple):
    """The verdict of a rule, the test it comes from, and the evidence in words."""

    verdict: str
    test: str
    evidence: str
    cells: tuple[ClaimCell, ...] = ()
    if_corrected: str = ""  # the verdict if exact p-values are corrected for the number of cells too, where it differs


class ClaimRule(NamedTuple):
    """A test over cells; the fields are keys of claims.toml. Which of the numbers are used depends on the test."""

    test: str  # one of RULE_TESTS
    d: str
    cells: tuple[dict[str, str], ...]
    metric: str = "best_accuracy"
    what: str = ""  # of a rule that stands beside a claim
    reading: str = ""  # the reading of the paper that it is about; each has a verdict of its own
    seeds: int = MIN_SEEDS  # a cell with fewer decides nothing
    refutes: bool = True  # whether it can refute a claim; otherwise it can only keep one from holding
    bound: float = 0.0  # above: what the mean must exceed; linear: what R² must exceed
    below: float | None = None  # above: what a refuting mean lies below, if not the bound
    strict: bool = True  # above: differences of 0 do not support it
    tie: float = 0.0  # above: a cell whose mean |d| is smaller passes
    low: float = -math.inf  # similar, between: the range
    high: float = math.inf  # of linear: the largest spread, as a share of a cell's mean
    errors: Sequence[float] = (1, 2)  # between: standard errors by which a mean may be out, and by which it refutes
    interval: float = 0.0  # similar: the level, if not 90%; between: of a t-interval that refutes instead of errors
    sign: int = 1  # trend
    along: str = ""  # trend: the values of {step}, in order
    neighbours: bool = True  # trend: whether two neighbours that are reversed refute it, or only keep it from holding
    b: str = ""  # welch: the other sample
    more: float = 0.5  # share: a cell passes if more of its seeds say yes
    least: int = 1  # count: how many cells must exceed the bound
    of: str = ""  # count: cells that agree in this name count once
    value: float | None = None  # printed: the number, unless printed.csv has it
    off: float = 0.0  # printed: its spread
    function: str = ""  # custom: one of CLAIM_CHECKS
    hidden: tuple[str, ...] = ()  # names that are left out of a cell's own name


class RuleEvaluator:
    """Evaluates rules on what was measured at one scale."""

    def __init__(
        self, evidence: Evidence, experiments: Sequence[str], printed: PrintedNumbers, blind: bool = True
    ) -> None:
        """`experiments` are the claim's; `blind` chooses tuned points on other seeds than those tested."""
        self.evidence, self.experiments, self.printed, self.blind = evidence, experiments, printed, blind

    def owner(self, t: Term) -> str:
        """The experiment that a term belongs to."""
        if t.experiment:
            return t.experiment
        for name in self.experiments:
            if has_cell(self.evidence.known, self.evidence.known[name], t.case, t.method):
                return name
        raise ConfigError(
            f"claims: none of {', '.join(self.experiments)} has the case {t.case!r} and the method {t.method!r}; "
            "correct it."
        )

    def cell(self, rule: ClaimRule, names: Mapping[str, str], d: str) -> ClaimCell:
        """The numbers of expression `d` in one cell, whose names are given."""
        formula = read_formula(fill_names(d, names), rule.metric)
        values = {name: self.evidence.term_values(self.owner(t), t, self.blind) for name, t in formula.terms.items()}
        seeds = sorted(set.intersection(*(set(by_seed) for by_seed in values.values()))) if values else []
        numbers = [formula({name: by_seed[seed] for name, by_seed in values.items()}) for seed in seeds]
        missing = tuple(t for name, t in formula.terms.items() if not values[name])
        title = " · ".join(value for name, value in names.items() if name not in rule.hidden) or "all"
        found = finite_values(numbers)
        comparable = all(self.is_comparable(t) for t in formula.terms.values())
        return ClaimCell(title, found, missing, len(numbers) - len(found), comparable)

    def is_comparable(self, t: Term) -> bool:
        """Whether the runs of a term are on the problem that the paper ran, as far as is known."""
        e = self.evidence.known[self.owner(t)]
        return all(self.evidence.known[id].is_comparable(t.case) for id in (e.id, *e.runs))

    def cells(self, rule: ClaimRule, d: str = "") -> list[ClaimCell]:
        """All cells of a rule, of its own expression or of another."""
        return [self.cell(rule, names, d or rule.d) for names in rule.cells]

    def evaluate(self, rule: ClaimRule) -> Finding:
        """The rule's finding; "not run" where no cell has a number."""
        finding = RULE_TESTS[rule.test](self, rule)
        if finding.verdict == FAILS and not rule.refutes:
            finding = finding._replace(verdict=UNDECIDED)
        if not finding.cells or any(c.n or c.undefined for c in finding.cells):
            return finding
        unrecorded = sorted({t.metric for c in finding.cells for t in c.missing if self.is_unrecorded(t)})
        evidence = f"the runs there are lack {', '.join(unrecorded)}" if unrecorded else ""
        return finding._replace(verdict=NOT_RUN, evidence=evidence)

    def is_unrecorded(self, t: Term) -> bool:
        """Whether there are runs of a term, and none of them recorded its metric."""
        points = self.evidence.points_of(self.owner(t), t.case, t.method, t.hyper)
        runs = [metrics for point in points for metrics in point.runs.values()]
        return bool(runs) and all(metric_value(metrics, t.metric) is None for metrics in runs)


def has_cell(known: Mapping[str, Experiment], e: Experiment, case: str, method: str) -> bool:
    """Whether an experiment has this case and method, of its own or among the runs of others that it shows."""
    if e.runs:
        return e.includes(case, method) and any(has_cell(known, known[owner], case, method) for owner in e.runs)
    return any(c.name == case for c in e.cases) and any(
        m.name == method and (not m.cases or case in m.cases) for m in e.methods
    )


def rule_terms(rule: ClaimRule) -> list[Term]:
    """All terms of a rule, each once."""
    return list(dict.fromkeys(t for names in (rule.cells if rule.d else ()) for t in cell_terms(rule, names)))


def cell_terms(rule: ClaimRule, names: Mapping[str, str]) -> list[Term]:
    """All terms of one cell of a rule, each once."""
    steps = fill_names(rule.along, names).split() or [""]
    texts = [fill_names(rule.d, {**names, "step": step}) for step in steps]
    texts += [fill_names(rule.b, names)] if rule.b else []
    return list(dict.fromkeys(t for text in texts for t in read_formula(text, rule.metric).terms.values()))


def fill_names(text: str, names: Mapping[str, str]) -> str:
    """The text with names in braces replaced by their values, over and over: a value may hold names."""
    while match := NAME.search(text):
        if match[1] not in names:
            raise ConfigError(f"claims: {{{match[1]}}} in {text!r} is not defined; add it to `each` or `let`.")
        text = text.replace(match[0], names[match[1]])
    return text


def finite_values(values: Sequence[float]) -> list[float]:
    """The values without nan; an infinite one (one of two runs diverged) becomes ten times the largest finite one."""
    numbers = [v for v in values if not math.isnan(v)]
    size = 10 * max((abs(v) for v in numbers if math.isfinite(v)), default=0.1)
    return [v if math.isfinite(v) else math.copysign(size, v) for v in numbers]


def combine_findings(findings: Sequence[Finding]) -> str:
    """The verdict on a claim, in one reading of the paper, from those on its rules."""
    found = {f.verdict for f in findings}
    return FAILS if FAILS in found else found.pop() if len(found) == 1 else UNDECIDED


def reading_verdicts(rules: Sequence[ClaimRule], findings: Sequence[Finding]) -> dict[str, str]:
    """The verdict on a claim in each reading of the paper, the default reading first; "" where there is but one."""
    return {
        reading: combine_findings([f for rule, f in zip(rules, findings, strict=True) if rule.reading == reading])
        for reading in dict.fromkeys(rule.reading for rule in rules)
    }


# texts of findings ----------------------------------------------------------------------------------------------


def cells_verdict(cells: Sequence[ClaimCell], passes: Iterable[bool], fails: Iterable[bool]) -> str:
    """The verdict on a rule from its cells: one that fails refutes it, all must pass for it to hold.

    A cell that is not comparable with the paper's does neither.
    """
    failed = any(fail and c.comparable for c, fail in zip(cells, fails, strict=False))
    passed = all(ok and c.comparable for c, ok in zip(cells, passes, strict=True))
    return FAILS if failed else HOLDS if passed else UNDECIDED


def p_text(p: float) -> str:
    """A p-value with two digits."""
    return "p < 0.001" if p < 0.001 else f"p = {p:.2g}"


def mean_text(test: MeanTest, bound: float = 0.0) -> str:
    """The tested mean, to which the bound is added again, with its standard deviation."""
    return f"{test.mean + bound:+.3g}" + (f" ± {test.std:.2g}" if test.n > 1 else "")


def count_above(cells: Sequence[ClaimCell], bound: float = 0.0) -> str:
    """How many cells have a mean above the bound, and how many were not run."""
    means = [c.mean for c in cells if c.n and c.comparable]
    sign = f"above {bound:g}" if bound else "by sign"
    return f"{sum(m > bound for m in means)} of {count_text(len(means), 'cell')} {sign}{empty_cells(cells)}"


def empty_cells(cells: Sequence[ClaimCell]) -> str:
    """How many cells lack numbers, in words: those that decide nothing, that were not run, or whose runs reach none."""
    others = [c for c in cells if not c.comparable]
    undefined = [c for c in cells if c.undefined]
    not_run = sum(not c.n and not c.undefined for c in cells)
    text = f", {len(others)} not comparable with the paper's, which decide nothing" if others else ""
    text += f", {not_run} not run" if not_run else ""
    if undefined:
        names = "; ".join(f"{c.name}: {c.undefined} of {c.n + c.undefined} seeds" for c in undefined)
        text += f", {len(undefined)} without a value at seeds that were run, as a level is out of reach there ({names})"
    return text


def cell_list(cells: Sequence[ClaimCell], text: Callable[[ClaimCell], str]) -> str:
    """A text for every cell that has numbers; of many, for the first ones."""
    texts = [f"{f'{c.name}: ' if len(cells) > 1 else ''}{text(c)}" for c in cells if c.n]
    return "; ".join(texts[:MAX_CELLS] + ([f"{len(texts) - MAX_CELLS} more"] if len(texts) > MAX_CELLS else []))


def interval_text(c: ClaimCell, level: float) -> str:
    """A cell's interval at a level; of one seed its value alone."""
    if c.n == 1:
        return f"{c.mean:.3g}, 1 seed"
    return "{:.3g} to {:.3g}".format(*t_interval(c.values, level))


def paired_test_name(cells: Sequence[ClaimCell]) -> str:
    """What the paired test over these cells is called in a finding."""
    exact = "; exact sign flips too" if any(paired_test(c.values).exact_above is not None for c in cells) else ""
    return f"paired t, one-sided{', Holm' if len(cells) > 1 else ''}{exact}"


def extreme_cells(
    cells: Sequence[ClaimCell], tests: Sequence[MeanTest], adjusted: Sequence[float], bound: float = 0.0
) -> list[str]:
    """The cell with the weakest support, and the one that is most clearly reversed, in words.

    `adjusted` are the p-values of "below" after Holm.
    """
    several = len(cells) > 1
    tested = [
        (test, c.name, p) for test, c, p in zip(tests, cells, adjusted, strict=True) if test.n >= 2 and c.comparable
    ]
    if not tested:
        return []
    test, name, _ = max(tested, key=lambda entry: (entry[0].p_above, -entry[0].mean))
    exact = f", exact {p_text(test.exact_above)}" if test.exact_above is not None else ""
    found = [f"{f'weakest {name}: ' if several else ''}{mean_text(test, bound)}, {p_text(test.p_above)}{exact}"]
    return found + against_texts(cells, tests, adjusted, bound)


def against_texts(
    cells: Sequence[ClaimCell], tests: Sequence[MeanTest], adjusted: Sequence[float], bound: float = 0.0
) -> list[str]:
    """The cell that is most clearly reversed, in words; none where no cell is, after Holm."""
    reversed_cells = [
        (p, mean_text(test, bound), c.name)
        for c, test, p in zip(cells, tests, adjusted, strict=True)
        if p < SIGNIFICANCE and test.mean < 0
    ]
    if not reversed_cells:
        return []
    p, text, name = min(reversed_cells)
    cell, holm = (f", {name}", "Holm ") if len(cells) > 1 else ("", "")
    return [f"against{cell}: {text}, {holm}{p_text(p)}"]


# the tests ------------------------------------------------------------------------------------------------------


def check_above(evaluator: RuleEvaluator, rule: ClaimRule) -> Finding:
    """Every cell's mean is above the bound; one that is below, after Holm over the cells, refutes it."""
    cells = evaluator.cells(rule)
    tests = [paired_test([v - rule.bound for v in c.values]) for c in cells]
    reversals = tests
    if rule.below is not None:
        reversals = [paired_test([v - rule.below for v in c.values]) for c in cells]
    adjusted, corrected = (holm_below(cells, reversals, rule.seeds, exact) for exact in (False, True))
    passes, fails, sure = [], [], []
    for c, test, reversal, p, stricter in zip(cells, tests, reversals, adjusted, corrected, strict=True):
        enough = c.n >= rule.seeds
        tied = rule.tie > 0 and enough and fmean(map(abs, c.values)) < rule.tie
        passes.append(tied or (enough and (test.is_above or (test.is_zero and not rule.strict))))
        fails.append(enough and not tied and reversal.is_below and p < SIGNIFICANCE)
        sure.append(fails[-1] and stricter < SIGNIFICANCE)
    parts = [count_above(cells, rule.bound), *extreme_cells(cells, tests, adjusted, rule.bound)]
    found, if_corrected = (cells_verdict(cells, passes, reversed_cells) for reversed_cells in (fails, sure))
    return corrected_finding(Finding(found, paired_test_name(cells), "; ".join(parts), tuple(cells)), if_corrected)


def corrected_finding(f: Finding, if_corrected: str) -> Finding:
    """The finding with a remark, where its verdict would be another if exact p-values were corrected too."""
    if f.verdict == if_corrected:
        return f
    evidence = f"{f.evidence}; {if_corrected} if the exact p is corrected too"
    return f._replace(evidence=evidence, if_corrected=if_corrected)


def holm_below(
    cells: Sequence[ClaimCell], tests: Sequence[MeanTest], seeds: int = MIN_SEEDS, exact: bool = False
) -> list[float]:
    """The p-values of "below" after Holm over all cells: Student's, or the exact ones where they are there.

    A cell that has too few seeds or is not comparable counts, and its p-value is 1.
    """
    ps = [test.p_below if test.exact_below is None or not exact else test.exact_below for test in tests]
    used = [c.comparable and test.n >= seeds for c, test in zip(cells, tests, strict=True)]
    return holm_adjust([p if use else 1.0 for p, use in zip(ps, used, strict=True)])


def check_sign(evaluator: RuleEvaluator, rule: ClaimRule) -> Finding:
    """A condition beside a test: every cell's mean is above the bound. Where it is not, nothing is decided."""
    cells = evaluator.cells(rule)
    found = cells_verdict(cells, [c.n >= rule.seeds and c.mean > rule.bound for c in cells], [])
    parts = [*([rule.what] if rule.what else []), count_above(cells, rule.bound)]
    return Finding(found, "by sign", "; ".join(parts), tuple(cells))


def check_similar(evaluator: RuleEvaluator, rule: ClaimRule) -> Finding:
    """In every cell the interval, at 90% or the level of the rule, lies inside the range; one outside refutes it."""
    cells, level = evaluator.cells(rule), rule.interval or LEVEL
    answers = [is_within(c.values, rule.low, rule.high, level) for c in cells]
    count = sum(a is True and c.comparable for a, c in zip(answers, cells, strict=True))
    inside = f"{count} of {len(cells)} intervals inside {rule.low:.3g} to {rule.high:.3g}"
    intervals = cell_list(cells, lambda c: interval_text(c, level))
    inside += empty_cells(cells)
    found = cells_verdict(cells, [a is True for a in answers], [a is False for a in answers])
    name = f"{'' if rule.interval else 'two one-sided t, '}{100 * level:g}% interval"
    return Finding(found, name, f"{inside}; {intervals}", tuple(cells))


def check_trend(evaluator: RuleEvaluator, rule: ClaimRule) -> Finding:
    """At each seed a line through the steps: its slope has the stated sign, and no two neighbours are reversed.

    A slope that is reversed refutes it, and so do two neighbours unless the rule says otherwise.
    """
    slopes, pairs = list[ClaimCell](), list[ClaimCell]()
    for names in rule.cells:
        steps = fill_names(rule.along, names).split()
        texts = [f"({fill_names(rule.d, names | {'step': step})})" for step in steps]
        slopes.append(evaluator.cell(rule, names, f"{rule.sign} * slope({', '.join(texts)})"))
        for (x, first), (y, second) in pairwise(zip(steps, texts, strict=True)):
            cell = evaluator.cell(rule, names, f"{rule.sign} * ({second} - {first})")
            pairs.append(cell._replace(name=f"{cell.name}, {x} to {y}"))
    slope_tests, pair_tests = ([paired_test(c.values) for c in cells] for cells in (slopes, pairs))
    cells, tests = [*slopes, *pairs], [*slope_tests, *pair_tests]
    refuting = len(tests) if rule.neighbours else len(slopes)
    adjusted, corrected = (holm_below(cells[:refuting], tests[:refuting], exact=exact) for exact in (False, True))
    passes = [test.is_above for test in slope_tests]
    passes += [not test.is_below and test.n >= MIN_SEEDS for test in pair_tests]
    fails = [test.is_below and p < SIGNIFICANCE for test, p in zip(tests, adjusted, strict=False)]
    sure = [fail and p < SIGNIFICANCE for fail, p in zip(fails, corrected, strict=True)]
    parts = [f"slopes as stated: {count_above(slopes)}", *extreme_cells(slopes, slope_tests, adjusted[: len(slopes)])]
    parts += [f"{sum(test.is_below for test in pair_tests)} of {len(pairs)} neighbours reversed"]
    if rule.neighbours:
        parts += against_texts(pairs, pair_tests, adjusted[len(slopes) :])
    name = f"t on slopes{' and neighbours' * rule.neighbours}, one-sided, Holm"
    found, if_corrected = (cells_verdict(cells, passes, reversed_cells) for reversed_cells in (fails, sure))
    return corrected_finding(Finding(found, name, "; ".join(parts), tuple(cells)), if_corrected)


def check_linear(evaluator: RuleEvaluator, rule: ClaimRule) -> Finding:
    """The numbers lie on a line over the cells, whose names are numbers too: R² is large and nothing is quadratic.

    A parabola is fitted at every seed; where the mean of its quadratic terms is not 0, by a 95% interval, the claim is
    refuted. Numbers that spread more than allowed decide nothing.
    """
    cells, name = evaluator.cells(rule), "straight line; t on quadratic terms, two-sided"
    if min(c.n for c in cells) < rule.seeds or len({c.n for c in cells}) > 1:
        return Finding(UNDECIDED, name, count_seeds_of(cells), tuple(cells))
    x, y = np.array([float(c.name) for c in cells]), np.array([c.values for c in cells])
    spread = float((y.std(axis=1, ddof=1) / y.mean(axis=1)).max())
    slope, intercept = np.polyfit(x, y.mean(axis=1), 1)  # as many numbers at each x: the line through all of them
    r2 = 1 - float(((y - (slope * x + intercept)[:, None]) ** 2).sum() / ((y - y.mean()) ** 2).sum())
    left, right = t_interval(np.polyfit(x, y, 2)[0], 0.95)
    is_straight = left <= 0 <= right
    found = UNDECIDED if spread > rule.high else FAILS if not is_straight else HOLDS if r2 > rule.bound else UNDECIDED
    term = f"quadratic term {fmean((left, right)):.3g} ({left:.3g} to {right:.3g})"
    evidence = f"R² {r2:.4f} of {intercept:.3g} + {slope:.3g} n; {term}; largest spread {100 * spread:.0f}%"
    return Finding(found, name, evidence, tuple(cells))


def check_printed(evaluator: RuleEvaluator, rule: ClaimRule) -> Finding:
    """Every cell is within two standard deviations, ours and the paper's together, of the printed number.

    Half a point is always allowed.
    """
    cells, texts, passes = evaluator.cells(rule), dict[int, str](), list[bool]()
    for names, c in zip(rule.cells, cells, strict=True):
        value, off = (rule.value, rule.off) if rule.value is not None else printed_value(evaluator, rule, names)
        std = stdev(c.values) if c.n > 1 else 0.0
        room = max(0.5, 2 * math.hypot(std, off or std))
        passes.append(c.n >= rule.seeds and abs(c.mean - value) <= room)
        spread = f" ± {std:.2f}" if c.n > 1 else ", 1 seed"
        texts[id(c)] = f"{c.mean:.2f}{spread}, printed {value:g}, room {room:.2f}"
    fails = [c.n >= rule.seeds and not ok for c, ok in zip(cells, passes, strict=True)]
    name = "within 2 standard deviations, at least 0.5"
    return Finding(cells_verdict(cells, passes, fails), name, cell_list(cells, lambda c: texts[id(c)]), tuple(cells))


def printed_value(evaluator: RuleEvaluator, rule: ClaimRule, names: Mapping[str, str]) -> tuple[float, float]:
    """The number that the paper prints for the first term of a cell, and its spread (0 if none is printed)."""
    t = next(iter(read_formula(fill_names(rule.d, names), rule.metric).terms.values()))
    method = f"{t.method} @ {t.hyper}" if t.hyper else t.method
    number = evaluator.printed.get((evaluator.owner(t), t.case, method, t.metric))
    if number is None:
        raise ConfigError(f"claims: the paper prints no {t.metric} of {t.method} in {t.case}; give the rule a value.")
    return float(number.value), float(number.spread or 0)


def check_between(evaluator: RuleEvaluator, rule: ClaimRule) -> Finding:
    """Every cell's mean is in the range within some standard errors; one that is out by more refutes it."""
    cells, passes, fails, distances = evaluator.cells(rule), list[bool](), list[bool](), list[float]()
    for c in cells:
        error = stdev(c.values) / c.n**0.5 if c.n > 1 else 0.0
        out = max(rule.low - c.mean, c.mean - rule.high, 0.0) if c.n else math.inf
        passes.append(c.n >= rule.seeds and out <= rule.errors[0] * error)
        refuted = out > rule.errors[1] * error
        if rule.interval and c.n:
            left, right = t_interval(c.values, rule.interval)
            refuted = left > rule.high or right < rule.low
        fails.append(c.n >= rule.seeds and refuted and not passes[-1])
        distances.append(out)
    farthest = sorted(range(len(cells)), key=lambda n: (-fails[n], -distances[n]))
    means = cell_list(
        [cells[n] for n in farthest],
        lambda c: f"{c.mean:.3g}" + (f" ({interval_text(c, rule.interval)})" if rule.interval and c.n > 1 else ""),
    )
    left_out = sum(not c.n for c in cells)
    means += f"; {left_out} of {len(cells)} not run" if means and left_out else ""
    by = f"{100 * rule.interval:g}% interval" if rule.interval else "standard errors"
    name = f"mean in {rule.low:g} to {rule.high:g}, by {by}"
    return Finding(cells_verdict(cells, passes, fails), name, means, tuple(cells))


def check_share(evaluator: RuleEvaluator, rule: ClaimRule) -> Finding:
    """In every cell more than a share of the seeds say yes; one where most say no refutes it."""
    cells = evaluator.cells(rule)
    passes = [c.n >= rule.seeds and c.mean > rule.more for c in cells]
    fails = [c.n >= rule.seeds and c.mean < min(0.5, rule.more) for c in cells]
    counts = cell_list(cells, lambda c: f"{sum(c.values):g} of {c.n}")
    return Finding(cells_verdict(cells, passes, fails), f"more than {rule.more:g} of the seeds", counts, tuple(cells))


def check_count(evaluator: RuleEvaluator, rule: ClaimRule) -> Finding:
    """At least so many cells have a mean above the bound; cells that agree in the name `of` count once."""
    cells = evaluator.cells(rule)
    reached = {
        names.get(rule.of, c.name)
        for names, c in zip(rule.cells, cells, strict=True)
        if c.n >= rule.seeds and c.mean > rule.bound
    }
    complete = all(c.n >= rule.seeds for c in cells)
    found = HOLDS if len(reached) >= rule.least else FAILS if complete else UNDECIDED
    names = f"{len(reached)}: {', '.join(sorted(reached)) or 'none'}"
    return Finding(found, f"at least {rule.least} above {rule.bound:g}", names, tuple(cells))


def check_unpaired(evaluator: RuleEvaluator, rule: ClaimRule) -> Finding:
    """The mean of `d` is above that of `b`, which comes from other data."""
    firsts, seconds = evaluator.cells(rule), evaluator.cells(rule, rule.b)
    tests = [welch_test(a.values, b.values) for a, b in zip(firsts, seconds, strict=True)]
    cells = [
        a._replace(values=a.values if b.n else [], missing=a.missing + b.missing)
        for a, b in zip(firsts, seconds, strict=True)
    ]
    adjusted = holm_below(cells, tests)
    fails = [test.is_below and p < SIGNIFICANCE for test, p in zip(tests, adjusted, strict=True)]
    parts = [f"{mean_text(test)}, {p_text(test.p_above)}" for c, test in zip(cells, tests, strict=True) if c.n]
    found = cells_verdict(cells, [test.is_above for test in tests], fails)
    return Finding(found, "Welch's t, one-sided", "; ".join(parts), tuple(cells))


def check_fact(evaluator: RuleEvaluator, rule: ClaimRule) -> Finding:
    """Counted, not estimated: true in every cell and seed, and one seed suffices."""
    cells = evaluator.cells(rule)
    true = [all(c.values) for c in cells if c.n]
    found = cells_verdict(cells, [bool(c.n) and all(c.values) for c in cells], [not all(c.values) for c in cells])
    counts = f"true in {sum(true)} of {count_text(len(true), 'cell')}{empty_cells(cells)}"
    return Finding(found, "counted", counts, tuple(cells))


def check_flat(evaluator: RuleEvaluator, rule: ClaimRule) -> Finding:
    """Refuted where the 90% intervals of all cells lie inside the range; otherwise other rules decide."""
    cells = evaluator.cells(rule)
    if any(c.n < rule.seeds for c in cells):
        return Finding(UNDECIDED, "two one-sided t, 90% interval", count_seeds_of(cells), tuple(cells))
    flat = all(is_within(c.values, rule.low, rule.high) for c in cells)
    intervals = cell_list(cells, lambda c: interval_text(c, LEVEL))
    what = f"{'' if flat else 'not '}flat within {rule.low:.3g} to {rule.high:.3g}; {intervals}"
    return Finding(FAILS if flat else HOLDS, "two one-sided t, 90% interval", what, tuple(cells))


def count_seeds_of(cells: Sequence[ClaimCell]) -> str:
    """The fewest seeds of any cell, in words."""
    return f"{min(c.n for c in cells)} seeds at least"


def report_cells(evaluator: RuleEvaluator, rule: ClaimRule) -> Finding:
    """No verdict: mean, standard deviation, number of seeds and the p-value of the sign; of many cells the extremes."""
    cells = evaluator.cells(rule)
    measured = [c for c in cells if c.n]
    if len(cells) > MAX_CELLS:
        measured.sort(key=lambda c: c.mean)
    parts = [count_above(cells)] if len(measured) > MAX_CELLS else []
    for c in [measured[0], measured[-1]] if parts else measured:
        test = paired_test(c.values)
        p = f", {p_text(min(test.p_above, test.p_below))}" if test.n >= MIN_SEEDS else ""
        parts.append(f"{f'{c.name}: ' if len(cells) > 1 else ''}{mean_text(test)} ({test.n}){p}")
    return Finding("", "", "; ".join(parts), tuple(cells))


def run_claim_check(evaluator: RuleEvaluator, rule: ClaimRule) -> Finding:
    """Decided by the methods' code or by arithmetic, without a stored run."""
    true, grounds = CLAIM_CHECKS[rule.function]()
    return Finding(HOLDS if true else FAILS, "deduced", grounds)


# The tests by the names that claims.toml uses.
FIXED_SEEDS = ("similar", "trend", "welch")  # tests with a least number of seeds of their own, MIN_SEEDS
RULE_TESTS: dict[str, Callable[[RuleEvaluator, ClaimRule], Finding]] = {
    "above": check_above,
    "sign": check_sign,
    "similar": check_similar,
    "trend": check_trend,
    "linear": check_linear,
    "printed": check_printed,
    "between": check_between,
    "share": check_share,
    "count": check_count,
    "welch": check_unpaired,
    "fact": check_fact,
    "flat": check_flat,
    "custom": run_claim_check,
    "report": report_cells,
}
