"""What the papers claim, as rules over measured results, and what the results say.

A claim in papers/NAME/claims.toml has rules. A rule spans cells (`each`: every combination of its lists), computes one number a seed in
each cell (`d`, an expression as evidence.py reads it, in which {name} is the cell's value of `name`) and tests these numbers. All its
cells, and all rules of a claim, must agree for the claim to hold. Seeds that some term of a cell lacks are left out of that cell.
"""

from __future__ import annotations

import csv
import io
import math
import re
import statistics as figures
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import ConfigError, did_you_mean
from ..experiment.store import read_text
from ..experiment.toml import read_toml
from .claim_checks import DEDUCTIONS
from .evidence import Evidence, Formula, Term, shows
from .papers import Experiment
from .statistics import FEWEST, LEVEL, Outcome, equivalent, holm, interval, paired, welch

HOLDS, FAILS, UNDECIDED, NOT_RUN, UNTESTABLE = "holds", "does not hold", "undecided", "not run", "not testable"
NAME = re.compile(r"\{(\w+)\}")
KINDS = ("ordering", "trend", "value", "ablation", "cost", "robustness", "theory-not-testable")
MANY = 6  # cells that are told one by one
SCALES = ("full", "reduced")  # smoke decides nothing


# rules ----------------------------------------------------------------------------------------------------------


class Cell(NamedTuple):
    """One comparison: its number at every seed. `lacking` says which runs or metrics are not there."""

    name: str
    values: list[float]
    lacking: tuple[Term, ...] = ()

    @property
    def n(self) -> int:
        return len(self.values)

    @property
    def mean(self) -> float:
        return figures.fmean(self.values) if self.values else math.nan


class Finding(NamedTuple):
    """What a rule says, and on what grounds."""

    verdict: str
    test: str
    evidence: str
    cells: tuple[Cell, ...] = ()


class Rule(NamedTuple):
    """A test over cells. Which of the numbers are used is the test's affair."""

    test: str
    d: str
    cells: tuple[dict[str, str], ...]
    metric: str = "best_accuracy"
    what: str = ""  # of a rule that stands beside a claim
    bound: float = 0.0  # above: what the mean must exceed
    strict: bool = True  # above: all differences 0 refute it
    tie: float = 0.0  # above: a cell whose mean |d| is smaller passes
    low: float = -math.inf  # similar, between: the range
    high: float = math.inf
    errors: Sequence[float] = (1, 2)  # between: standard errors by which a mean may be out, and by which it refutes
    sign: int = 1  # trend
    along: str = ""  # trend: the values of {step}, in order
    b: str = ""  # welch: the other sample
    more: float = 0.5  # share: a cell passes if more of its seeds say yes
    least: int = 1  # count: how many cells must exceed the bound
    of: str = ""  # count: cells that agree in this name count once
    value: float | None = None  # printed: the number, unless printed.csv has it
    off: float = 0.0  # printed: its spread
    function: str = ""  # custom
    hidden: tuple[str, ...] = ()  # names that a cell is not called by


class Claim(NamedTuple):
    """One claim of a paper, in our words."""

    id: str
    where: str
    text: str
    experiments: tuple[str, ...]
    kind: str
    printed: str  # do the paper's own numbers support it: yes, no, n/a
    control: str  # what a sceptic would run
    rules: tuple[Rule, ...]
    beside: tuple[Rule, ...]  # controls and readings, reported beside the verdict
    needs: str  # of a claim without rules: what it would take

    @property
    def scales(self) -> tuple[str, ...]:
        """Numbers stand beside published ones at full scale only."""
        return SCALES[:1] if self.kind == "value" or any(r.test == "printed" for r in self.rules) else SCALES


class Printed(NamedTuple):
    """One number of a paper, as printed."""

    experiment: str
    case: str
    method: str
    metric: str
    value: str
    spread: str
    note: str


Book = Mapping[tuple[str, str, str, str], Printed]


class ClaimJudge:
    """Decides rules on what one scale has measured."""

    def __init__(self, evidence: Evidence, experiments: Sequence[str], book: Book, blind: bool = True) -> None:
        self.evidence, self.experiments, self.book, self.blind = evidence, experiments, book, blind

    def owner(self, t: Term) -> str:
        """The experiment a term belongs to."""
        if t.experiment:
            return t.experiment
        for name in self.experiments:
            if has(self.evidence.known, self.evidence.known[name], t.case, t.method):
                return name
        raise ConfigError(
            f"claims: none of {', '.join(self.experiments)} has the case {t.case!r} and the method {t.method!r}; correct it."
        )

    def cell(self, rule: Rule, names: Mapping[str, str], d: str) -> Cell:
        formula = Formula(filled(d, names), rule.metric)
        series = {name: self.evidence.series(self.owner(t), t, self.blind) for name, t in formula.terms.items()}
        seeds = sorted(set.intersection(*(set(s) for s in series.values()))) if series else []
        values = [formula({name: s[seed] for name, s in series.items()}) for seed in seeds]
        lacking = tuple(t for name, t in formula.terms.items() if not series[name])
        return Cell(" · ".join(v for n, v in names.items() if n not in rule.hidden) or "all", tame(values), lacking)

    def cells(self, rule: Rule, d: str = "") -> list[Cell]:
        return [self.cell(rule, names, d or rule.d) for names in rule.cells]

    def decide(self, rule: Rule) -> Finding:
        finding = TESTS[rule.test](self, rule)
        if not finding.cells or any(c.n for c in finding.cells):
            return finding
        unsaid = {t.metric for c in finding.cells for t in c.lacking if self.unrecorded(t)}
        return finding._replace(
            verdict=NOT_RUN, evidence=f"the runs there are lack {', '.join(sorted(unsaid))}" if unsaid else ""
        )

    def unrecorded(self, t: Term) -> bool:
        """Were there runs, and did none of them record this metric?"""
        runs = [run for p in self.evidence.at(self.owner(t), t.case, t.method, t.hyper) for run in p.runs.values()]
        return bool(runs) and not any(t.metric in run for run in runs)


def has(known: Mapping[str, Experiment], e: Experiment, case: str, method: str) -> bool:
    """Does an experiment have such a cell, of its own or of the runs that it shows?"""
    if e.runs:
        return shows(e, case, method) and any(has(known, known[owner], case, method) for owner in e.runs)
    return any(c.name == case for c in e.cases) and any(
        m.name == method and (not m.cases or case in m.cases) for m in e.methods
    )


def terms(rule: Rule) -> list[Term]:
    """Everything a rule looks at, each once."""
    found: dict[Term, None] = {}
    for names in rule.cells if rule.d else ():
        steps = filled(rule.along, names).split() or [""]
        for text in [
            *(filled(rule.d, names | {"step": step}) for step in steps),
            *([filled(rule.b, names)] if rule.b else []),
        ]:
            found |= dict.fromkeys(Formula(text, rule.metric).terms.values())
    return list(found)


def filled(text: str, names: Mapping[str, str]) -> str:
    """Names in braces replaced, over and over: a value may hold names."""
    while match := NAME.search(text):
        if match[1] not in names:
            raise ConfigError(f"claims: {{{match[1]}}} in {text!r} is not defined; add it to `each` or `let`.")
        text = text.replace(match[0], names[match[1]])
    return text


def tame(values: Sequence[float]) -> list[float]:
    """Without what is no number; an infinite difference (one of two runs diverged) counts as ten times the largest finite one."""
    kept = [v for v in values if not math.isnan(v)]
    size = 10 * max((abs(v) for v in kept if math.isfinite(v)), default=0.1)
    return [v if math.isfinite(v) else math.copysign(size, v) for v in kept]


def verdict(passes: Iterable[bool], fails: Iterable[bool]) -> str:
    return FAILS if any(fails) else HOLDS if all(passes) else UNDECIDED


def p_words(p: float) -> str:
    return "p < 0.001" if p < 0.001 else f"p = {p:.2g}"


def signs(cells: Sequence[Cell], bound: float = 0.0) -> str:
    ahead, there = sum(c.mean > bound for c in cells if c.n), sum(1 for c in cells if c.n)
    short = f", {len(cells) - there} not run" if there < len(cells) else ""
    return f"{ahead} of {there} cell{'s' * (there != 1)} {f'above {bound:g}' if bound else 'by sign'}{short}"


def each(cells: Sequence[Cell], words: Callable[[Cell], str]) -> str:
    """What is to be said of every cell that has numbers; of many, of the first ones."""
    there = [f"{f'{c.name}: ' if len(cells) > 1 else ''}{words(c)}" for c in cells if c.n]
    return "; ".join(there[:MANY] + ([f"{len(there) - MANY} more"] if len(there) > MANY else []))


def above(court: ClaimJudge, rule: Rule) -> Finding:
    """Every cell's mean is above the bound; one that is below, after Holm over the cells, refutes it."""
    cells = court.cells(rule)
    outcomes = [paired([v - rule.bound for v in c.values]) for c in cells]
    adjusted = holm([o.reverse for o in outcomes])
    tied = [
        rule.tie > 0 and o.n >= FEWEST and figures.fmean(map(abs, c.values)) < rule.tie
        for c, o in zip(cells, outcomes, strict=True)
    ]
    passes = [t or o.passes or (o.zero and not rule.strict) for o, t in zip(outcomes, tied, strict=True)]
    fails = [
        not t and ((o.reversed and p < LEVEL) or (o.zero and rule.strict))
        for o, p, t in zip(outcomes, adjusted, tied, strict=True)
    ]
    words = [signs(cells, rule.bound), *extremes(cells, outcomes, adjusted, rule.bound)]
    return Finding(verdict(passes, fails), sided(cells), "; ".join(words), tuple(cells))


def sided(cells: Sequence[Cell]) -> str:
    exact = ", exact sign flips decide" if any(paired(c.values).exact is not None for c in cells) else ""
    return f"paired t, one-sided{', Holm' if len(cells) > 1 else ''}{exact}"


def extremes(
    cells: Sequence[Cell], outcomes: Sequence[Outcome], adjusted: Sequence[float], bound: float = 0.0
) -> list[str]:
    """The weakest cell, and the worst of those that speak against."""
    tested = [(o, c.name, p) for o, c, p in zip(outcomes, cells, adjusted, strict=True) if o.n >= 2]
    if not tested:
        return []
    o, name, _ = max(tested, key=lambda x: (x[0].p, -x[0].mean))
    exact = f", exact {p_words(o.exact)}" if o.exact is not None else ""
    found = [f"{f'weakest {name}: ' if len(cells) > 1 else ''}{told(o, bound)}, {p_words(o.p)}{exact}"]
    o, name, p = min(tested, key=lambda x: x[2])
    against = f"against{f', {name}' if len(cells) > 1 else ''}: {told(o, bound)}, {'Holm ' if len(cells) > 1 else ''}{p_words(p)}"
    return found + ([against] if p < LEVEL and o.mean < 0 else [])


def told(o: Outcome, bound: float = 0.0) -> str:
    return f"{o.mean + bound:+.3g}" + (f" ± {o.std:.2g}" if o.n > 1 else "")


def sign(court: ClaimJudge, rule: Rule) -> Finding:
    """A condition beside a test: every cell's mean is above the bound. Where it is not, nothing is decided."""
    cells = court.cells(rule)
    found = verdict([c.n >= FEWEST and c.mean > rule.bound for c in cells], [])
    return Finding(
        found, "by sign", "; ".join(([rule.what] if rule.what else []) + [signs(cells, rule.bound)]), tuple(cells)
    )


def similar(court: ClaimJudge, rule: Rule) -> Finding:
    """In every cell the 90% interval lies inside the range; one wholly outside refutes it."""
    cells = court.cells(rule)
    answers = [equivalent(c.values, rule.low, rule.high) for c in cells]
    inside = f"{sum(a is True for a in answers)} of {len(cells)} intervals inside {rule.low:.3g} to {rule.high:.3g}"
    spans = each(cells, lambda c: "{:.3g} to {:.3g}".format(*interval(c.values)))
    found = verdict([a is True for a in answers], [a is False for a in answers])
    return Finding(found, "two one-sided t, 90% interval", f"{inside}; {spans}", tuple(cells))


def trend(court: ClaimJudge, rule: Rule) -> Finding:
    """Per seed a line through the steps; its slope has the stated sign, and no two neighbours are reversed."""
    steps = [filled(rule.along, names).split() for names in rule.cells]
    slopes, pairs = list[Cell](), list[Cell]()
    for names, values in zip(rule.cells, steps, strict=True):
        texts = [f"({filled(rule.d, names | {'step': v})})" for v in values]
        times = f"{rule.sign} * "
        slopes.append(court.cell(rule, names, f"{times}slope({', '.join(texts)})"))
        for (x, first), (y, second) in pairwise(zip(values, texts, strict=True)):
            cell = court.cell(rule, names, f"{times}({second} - {first})")
            pairs.append(cell._replace(name=f"{cell.name}, {x} to {y}"))
    outcomes = [paired(c.values) for c in (*slopes, *pairs)]
    adjusted = holm([o.reverse for o in outcomes])
    passes = [o.passes for o in outcomes[: len(slopes)]] + [
        not o.reversed and o.n >= FEWEST for o in outcomes[len(slopes) :]
    ]
    fails = [o.reversed and p < LEVEL for o, p in zip(outcomes, adjusted, strict=True)] + [
        o.zero for o in outcomes[: len(slopes)]
    ]
    against = sum(o.reversed for o in outcomes[len(slopes) :])
    words = [f"slopes as stated: {signs(slopes)}", *extremes(slopes, outcomes[: len(slopes)], adjusted[: len(slopes)])]
    words += [f"{against} of {len(pairs)} neighbours reversed"]
    return Finding(
        verdict(passes, fails), "t on slopes and neighbours, one-sided, Holm", "; ".join(words), (*slopes, *pairs)
    )


def printed(court: ClaimJudge, rule: Rule) -> Finding:
    """Every cell is within two standard deviations, ours and the paper's together, of the printed number; at least half a point."""
    cells, said, passes = court.cells(rule), dict[int, str](), list[bool]()
    for names, c in zip(rule.cells, cells, strict=True):
        value, off = rule.value, rule.off
        if value is None:
            t = next(iter(Formula(filled(rule.d, names), rule.metric).terms.values()))
            row = court.book.get((court.owner(t), t.case, f"{t.method} @ {t.hyper}" if t.hyper else t.method, t.metric))
            if row is None:
                raise ConfigError(
                    f"claims: the paper prints no {t.metric} of {t.method} in {t.case}; give the rule a value."
                )
            value, off = float(row.value), float(row.spread or 0)
        own = figures.stdev(c.values) if c.n > 1 else 0.0
        room = max(0.5, 2 * math.hypot(own, off or own))
        passes.append(c.n >= FEWEST and abs(c.mean - value) <= room)
        said[id(c)] = f"{c.mean:.2f} ± {own:.2f}, printed {value:g}, room {room:.2f}"
    fails = [c.n >= FEWEST and not ok for c, ok in zip(cells, passes, strict=True)]
    return Finding(
        verdict(passes, fails),
        "within 2 standard deviations, at least 0.5",
        each(cells, lambda c: said[id(c)]),
        tuple(cells),
    )


def between(court: ClaimJudge, rule: Rule) -> Finding:
    """Every cell's mean is in the range within some standard errors; one that is out by more refutes it."""
    cells, passes, fails = court.cells(rule), list[bool](), list[bool]()
    for c in cells:
        error = figures.stdev(c.values) / c.n**0.5 if c.n > 1 else 0.0
        out = max(rule.low - c.mean, c.mean - rule.high, 0.0) if c.n else math.inf
        passes.append(c.n >= FEWEST and out <= rule.errors[0] * error)
        fails.append(c.n >= FEWEST and out > rule.errors[1] * error and not passes[-1])
    words = each(cells, lambda c: f"{c.mean:.3g}")
    return Finding(
        verdict(passes, fails), f"mean in {rule.low:g} to {rule.high:g}, by standard errors", words, tuple(cells)
    )


def share(court: ClaimJudge, rule: Rule) -> Finding:
    """In every cell more than a share of the seeds say yes; one where most say no refutes it."""
    cells = court.cells(rule)
    found = verdict(
        [c.n >= FEWEST and c.mean > rule.more for c in cells], [c.n >= FEWEST and c.mean < 0.5 for c in cells]
    )
    words = each(cells, lambda c: f"{sum(c.values):g} of {c.n}")
    return Finding(found, f"more than {rule.more:g} of the seeds", words, tuple(cells))


def count(court: ClaimJudge, rule: Rule) -> Finding:
    """At least so many cells have a mean above the bound; cells that agree in the name `of` count once."""
    cells = court.cells(rule)
    reached = {
        names.get(rule.of, c.name)
        for names, c in zip(rule.cells, cells, strict=True)
        if c.n >= FEWEST and c.mean > rule.bound
    }
    whole = all(c.n >= FEWEST for c in cells)
    found = HOLDS if len(reached) >= rule.least else FAILS if whole else UNDECIDED
    words = f"{len(reached)}: {', '.join(sorted(reached)) or 'none'}"
    return Finding(found, f"at least {rule.least} above {rule.bound:g}", words, tuple(cells))


def unpaired(court: ClaimJudge, rule: Rule) -> Finding:
    """The mean of `d` is above that of `b`, which comes from other data."""
    firsts, seconds = court.cells(rule), court.cells(rule, rule.b)
    outcomes = [welch(a.values, b.values) for a, b in zip(firsts, seconds, strict=True)]
    adjusted = holm([o.reverse for o in outcomes])
    found = verdict(
        [o.passes for o in outcomes], [o.reversed and p < LEVEL for o, p in zip(outcomes, adjusted, strict=True)]
    )
    cells = [
        a._replace(values=a.values if b.n else [], lacking=a.lacking + b.lacking)
        for a, b in zip(firsts, seconds, strict=True)
    ]
    words = "; ".join(f"{told(o)}, {p_words(o.p)}" for c, o in zip(cells, outcomes, strict=True) if c.n)
    return Finding(found, "Welch's t, one-sided", words, tuple(cells))


def fact(court: ClaimJudge, rule: Rule) -> Finding:
    """Counted, not estimated: true in every cell and seed, and one seed suffices."""
    cells = court.cells(rule)
    true = [all(c.values) for c in cells if c.n]
    found = verdict([bool(c.n) and all(c.values) for c in cells], [not t for t in true])
    return Finding(found, "counted", f"true in {sum(true)} of {len(true)} cells", tuple(cells))


def report(court: ClaimJudge, rule: Rule) -> Finding:
    """No verdict: mean, standard deviation and number of seeds, and how sure the sign is; of many cells the ends."""
    cells = court.cells(rule)
    there = sorted((c for c in cells if c.n), key=lambda c: c.mean) if len(cells) > MANY else [c for c in cells if c.n]
    words = [signs(cells)] if len(there) > MANY else []
    for c in [there[0], there[-1]] if words else there:
        o = paired(c.values)
        sure = f", {p_words(min(o.p, o.reverse))}" if o.n >= FEWEST else ""
        words.append(f"{f'{c.name}: ' if len(cells) > 1 else ''}{told(o)} ({o.n}){sure}")
    return Finding("", "", "; ".join(words), tuple(cells))


def deduced(court: ClaimJudge, rule: Rule) -> Finding:
    """Decided by the methods' code or by arithmetic, without a stored run."""
    true, words = DEDUCTIONS[rule.function]()
    return Finding(HOLDS if true else FAILS, "deduced", words)


TESTS: dict[str, Callable[[ClaimJudge, Rule], Finding]] = {
    "above": above,
    "sign": sign,
    "similar": similar,
    "trend": trend,
    "printed": printed,
    "between": between,
    "share": share,
    "count": count,
    "welch": unpaired,
    "fact": fact,
    "custom": deduced,
    "report": report,
}


def together(findings: Sequence[Finding]) -> str:
    """The verdict on a claim from those on its rules."""
    found = {f.verdict for f in findings}
    return FAILS if FAILS in found else found.pop() if len(found) == 1 else UNDECIDED


# files ----------------------------------------------------------------------------------------------------------

CLAIM = ("id", "where", "text", "experiments", "kind", "printed", "control", "rule", "beside", "needs")
RULE = {"each", "let", *Rule._fields} - {"cells"}


def read_claims(folder: Path) -> list[Claim]:
    """The claims of one paper, checked."""
    path = folder / "claims.toml"
    page = read_toml(path) if path.exists() else {}
    lists = page.get("lists", {})
    try:
        return [claim(table, lists) for table in page.get("claim", [])]
    except (ConfigError, TypeError, KeyError, ValueError) as e:
        raise ConfigError(f"{path}: {e}") from None


def claim(table: Mapping[str, Any], lists: Mapping[str, Any]) -> Claim:
    refuse(table, CLAIM, table.get("id", "a claim"))
    if table["kind"] not in KINDS or table["printed"] not in ("yes", "no", "n/a"):
        raise ConfigError(f"{table['id']}: kind must be one of {', '.join(KINDS)}, printed yes, no or n/a; correct it.")
    rules = table.get("rule", [])
    if (rules == "needs") != ("needs" in table):
        raise ConfigError(
            f'{table["id"]}: rule = "needs" goes with needs = "…", which says what it would take; give both or neither.'
        )
    return Claim(
        id=table["id"],
        where=table["where"],
        text=table["text"],
        experiments=tuple(table["experiments"]),
        kind=table["kind"],
        printed=table["printed"],
        control=table.get("control", ""),
        rules=tuple(rule(r, lists, table["id"]) for r in (rules if isinstance(rules, list) else [])),
        beside=tuple(rule({"test": "report"} | r, lists, table["id"]) for r in table.get("beside", [])),
        needs=table.get("needs", ""),
    )


def rule(table: Mapping[str, Any], lists: Mapping[str, Any], owner: str) -> Rule:
    refuse(table, sorted(RULE), owner)
    if table.get("test") not in TESTS:
        raise ConfigError(f"{owner}: unknown test {table.get('test')!r}; {did_you_mean(str(table.get('test')), TESTS)}")
    if table["test"] == "custom" and table.get("function") not in DEDUCTIONS:
        raise ConfigError(
            f"{owner}: unknown function {table.get('function')!r}; {did_you_mean(str(table.get('function')), DEDUCTIONS)}"
        )
    spans, let = table.get("each", {}), table.get("let", {})
    cells = [
        dict(zip(span, values, strict=True)) | let
        for span in (spans if isinstance(spans, list) else [spans])
        for values in product(*(lists[v] if isinstance(v, str) else v for v in span.values()))
    ]
    kept = {k: v for k, v in table.items() if k not in ("each", "let")}
    return Rule(
        d=kept.pop("d", ""),
        cells=tuple({k: str(v) for k, v in cell.items()} for cell in cells),
        hidden=tuple(let),
        **kept,
    )


def refuse(table: Mapping[str, Any], known: Sequence[str], owner: str) -> None:
    for key in table:
        if key not in known:
            raise ConfigError(f"{owner}: unknown key {key!r}; {did_you_mean(key, known)}")


def read_printed(folder: Path) -> list[Printed]:
    """The numbers that one paper prints."""
    path = folder / "printed.csv"
    if not path.exists():
        return []
    rows = list(csv.reader(io.StringIO(read_text(path))))
    if not rows or tuple(rows[0]) != Printed._fields or any(len(row) != len(Printed._fields) for row in rows):
        raise ConfigError(
            f"{path} must hold the columns {','.join(Printed._fields)}; correct its first line and the number of commas."
        )
    return [Printed(*row) for row in rows[1:]]
