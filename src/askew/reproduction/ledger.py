"""The ledger as data: every printed number beside ours, and every claim with its verdict.

It follows from papers/ and results/ alone. A run that was not made is never filled in: what is missing is listed, with
its cost. ledger_markdown.py and ledger_page.py write it out.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from ..report.tables import sample_std
from .claim_rules import (
    FAILS,
    HOLDS,
    NOT_RUN,
    UNDECIDED,
    UNTESTABLE,
    ClaimRule,
    Finding,
    RuleEvaluator,
    combine_findings,
    has_cell,
    rule_terms,
)
from .claims import CLAIM_SCALES, Claim, read_claims
from .cost import run_cost, short_count
from .evidence import Evidence, GridPoint, metric_value
from .expressions import Term
from .papers import Experiment, build_config, experiments, hyper_text, run_specs
from .printed import PrintedNumber, PrintedNumbers, printed_by_key, read_printed
from .results import HELD_OUT, metrics_by_run, read_results
from .statistics import MIN_SEEDS

VERDICTS = (HOLDS, FAILS, UNDECIDED, NOT_RUN, UNTESTABLE)
# Papers in the order of the ledger, by folder, with their titles.
TITLES = {"feddpc": "FedDPC", "feddc": "FedDC", "mldl24": "MLDL24", "fedpmvr": "FedPMVR", "fedpdc": "FedPDC"}
RECORDED_METRIC = re.compile(r"[a-z_0-9]+")  # how the metrics are spelled that runs record
COST_SETTINGS = ("rounds", "local.steps", "local.batch", "local.epochs")  # tuned settings that change a run's cost


class MissingRuns(NamedTuple):
    """How many runs are missing, and how many samples they would train on."""

    runs: int
    samples: int

    def __str__(self) -> str:
        return f"{self.runs:,} run{'s' * (self.runs != 1)}, {short_count(self.samples)} samples"


class LedgerRow(NamedTuple):
    """One printed number and ours."""

    printed: PrintedNumber
    values: tuple[float, ...]  # ours, one for each seed
    missed: int  # seeds that never reached the target
    held_out: tuple[float, ...]  # settings and round chosen on one half of the test set, measured on the other
    hyper: str  # the chosen grid point, where there is a grid
    missing: MissingRuns | None  # of a number that was not measured
    command: str

    @property
    def digits(self) -> int:
        """As many decimals as are printed; one more for a mean of whole numbers, and three for seconds."""
        if self.printed.metric == "seconds_per_round":
            return 3
        decimals = len(self.printed.value.partition(".")[2]) if is_number(self.printed.value) else 0
        return decimals or int(len(self.values) > 1)

    @property
    def ours(self) -> str:
        """Our number in words: "48.10 ± 0.10 (3 seeds)", "> 4 (1 seed)", "not run: 3 runs, 4.31 k samples"."""
        if not self.values:
            return f"{NOT_RUN}: {self.missing}" if self.missing else "–"
        if self.missed == len(self.values):
            return f"> {self.values[0] - 1:.0f} ({count_seeds(self.missed)})"
        missed = f", {self.missed} missed" if self.missed else ""
        return f"{self.mean_text(self.values)} ({count_seeds(len(self.values))}{missed})"

    @property
    def validated(self) -> str:
        """Our number with settings and round chosen on held-out samples; – if there is none."""
        return self.mean_text(self.held_out) if self.held_out else "–"

    @property
    def difference(self) -> str:
        """Our mean less the printed number; – where one of them is not a number."""
        if not self.values or self.missed or not is_number(self.printed.value):
            return "–"
        return f"{fmean(self.values) - float(self.printed.value):+.{self.digits}f}"

    def mean_text(self, values: Sequence[float]) -> str:
        """The mean ± one standard deviation, with the row's number of decimals."""
        std = sample_std(values)
        return f"{fmean(values):.{self.digits}f}" + ("" if std is None else f" ± {std:.{self.digits}f}")


class ClaimResult(NamedTuple):
    """A claim and what was found at each scale."""

    claim: Claim
    findings: dict[str, tuple[Finding, ...]]  # by scale, one for each rule
    beside: tuple[tuple[ClaimRule, Finding], ...]  # controls
    missing: MissingRuns  # what a verdict at full scale still needs

    @property
    def scale(self) -> str:
        return deciding_scale(self.findings)

    @property
    def verdict(self) -> str:
        """One of VERDICTS."""
        if not self.claim.rules:
            return UNTESTABLE if self.claim.kind == "theory-not-testable" else NOT_RUN
        return combine_findings(self.findings[self.scale])

    @property
    def seeds(self) -> int:
        """The fewest seeds of any cell that has some."""
        return min((c.n for f in self.findings[self.scale] for c in f.cells if c.n), default=0)

    @property
    def verdict_text(self) -> str:
        """The verdict as it is shown: "holds (reduced)", "undecided at 1 seed"."""
        seeds = f" at {count_seeds(self.seeds)}" if self.verdict == UNDECIDED and self.seeds else ""
        return f"{self.verdict}{seeds}{' (reduced)' if self.scale == 'reduced' else ''}"

    @property
    def evidence(self) -> list[str]:
        """The grounds, rule by rule; then what was found at reduced scale beside a full one, and what is missing."""
        if not self.claim.rules:
            return [f"needs {self.claim.needs}"]
        lines = [finding_text(f, len(self.claim.rules) > 1) for f in self.findings[self.scale]]
        reduced = self.findings.get("reduced", ()) if self.scale == "full" else ()
        if any(c.n for f in reduced for c in f.cells):
            lines.append(f"{combine_findings(reduced)} (reduced)")
        if self.missing.runs and self.verdict in (NOT_RUN, UNDECIDED):
            lines.append(f"needs {self.missing} at full scale")
        return [line for line in lines if line]

    @property
    def controls(self) -> list[str]:
        """The claim's controls, and what they found where they were run."""
        lines = [self.claim.control] if self.claim.control else []
        for rule, f in self.beside:
            found = f"{f.verdict}: {f.evidence}" if f.verdict and f.evidence else f.evidence or NOT_RUN
            lines.append(f"{rule.what}: {found}")
        return lines


def deciding_scale(findings: Mapping[str, Sequence[Finding]]) -> str:
    """The scale that a verdict comes from: full, unless only reduced has results."""
    return next((s for s, found in findings.items() if combine_findings(found) != NOT_RUN), next(iter(findings)))


def finding_text(f: Finding, several: bool) -> str:
    """One rule's finding in a line; with its verdict if it is one of several."""
    if not f.evidence:
        return f.verdict if several else ""
    test = f" ({f.test})" if f.test else ""
    return f"{f'{f.verdict}: ' if several else ''}{f.evidence}{test}"


class LedgerTable(NamedTuple):
    """The printed numbers of one experiment."""

    experiment: Experiment
    rows: tuple[LedgerRow, ...]
    machines: tuple[str, ...]  # what ours were measured on


class PaperSection(NamedTuple):
    """All numbers and claims of one paper."""

    name: str
    tables: tuple[LedgerTable, ...]
    claims: tuple[ClaimResult, ...]

    @property
    def title(self) -> str:
        return TITLES.get(self.name, self.name)

    @property
    def rows(self) -> list[LedgerRow]:
        return [row for table in self.tables for row in table.rows]

    def count(self, verdict: str) -> int:
        """How many claims have this verdict."""
        return sum(result.verdict == verdict for result in self.claims)

    def summary(self) -> list[str]:
        """Title, printed numbers, how many of them are measured, and the claims by verdict."""
        numbers = [len(self.rows), count_measured(self.rows), *(self.count(v) for v in VERDICTS)]
        return [self.title, *map(str, numbers)]


def count_measured(rows: Iterable[LedgerRow]) -> int:
    """How many of the rows have a number of ours."""
    return sum(bool(row.values) for row in rows)


def count_seeds(seeds: int) -> str:
    """The number with its noun: "1 seed", "3 seeds"."""
    return f"{seeds} seed{'s' * (seeds != 1)}"


def is_number(text: str) -> bool:
    """Whether a printed text is a number; ">600" and "O(d)" are not."""
    return bool(re.fullmatch(r"-?\d+(\.\d+)?", text)) and text != "00"


# collecting -----------------------------------------------------------------------------------------------------


def collect_ledger(papers: Path, results: Path) -> list[PaperSection]:
    """The whole ledger as data, one section for each paper."""
    builder = LedgerBuilder(papers, results)
    names = [folder.name for folder in papers.iterdir() if (folder / "claims.toml").exists()]
    return [builder.section(name) for name in sorted(names, key=lambda name: ([*TITLES, name].index(name), name))]


class LedgerBuilder:
    """Computes the ledger's rows and verdicts from a folder of papers and one of results."""

    def __init__(self, papers: Path, results: Path) -> None:
        self.papers, self.known, self.results = papers, experiments(papers), read_results(results, leave_out=True)
        self.evidence = {
            scale: Evidence(self.known, metrics_by_run(r for r in self.results if r.scale == scale), scale)
            for scale in CLAIM_SCALES
        }
        self.costs: dict[str, dict[tuple[str, str], list[tuple[str, int]]]] = {}  # by experiment, once computed

    def section(self, name: str) -> PaperSection:
        """Numbers and claims of the paper in this folder."""
        folder = self.papers / name
        numbers = read_printed(folder)
        by_key = printed_by_key(numbers)
        tables = [
            LedgerTable(
                self.known[id],
                tuple(self.row(number) for number in numbers if number.experiment == id),
                self.machines(self.known[id]),
            )
            for id in dict.fromkeys(number.experiment for number in numbers)
        ]
        claims = [self.claim_result(claim, by_key) for claim in read_claims(folder)]
        return PaperSection(name, tuple(tables), tuple(claims))

    def machines(self, e: Experiment) -> tuple[str, ...]:
        """Devices and versions that an experiment's full results come from."""
        rows = [r for r in self.results if r.scale == "full" and r.experiment in (e.id, *e.runs)]
        return tuple(sorted({f"{r.device}, askew {r.version}" for r in rows}))

    # numbers

    def row(self, number: PrintedNumber) -> LedgerRow:
        """A printed number beside ours at full scale."""
        e, full = self.known[number.experiment], self.evidence["full"]
        method, _, hyper = number.method.partition(" @ ")
        points = full.points_of(e.id, number.case, method, hyper)
        chosen = full.tuned_point(e.id, points)
        values, missed = self.measured_values(e, number, chosen if len(points) > 1 else None)
        base = baseline_method(e, number)
        rivals = [base] if base and base != method else []
        missing = None
        if not values and is_measurable(e, number):
            terms = [(e.id, Term("", number.case, m, hyper, "", 1)) for m in (method, *rivals)]
            missing = self.missing_runs(terms, len(e.seeds), tested=False)
        only = [f"case={number.case}", *(f"method={m}" for m in (*rivals, method)), *hyper.split()]
        seeds = sorted(chosen.runs) if chosen else []
        more = ["--seeds", str(seeds[-1] + 1)] if seeds and seeds[-1] >= len(e.seeds) else []
        command = ["askew", "reproduce", e.id, "--scale", "full", *(w for o in only for w in ("--only", o)), *more]
        return LedgerRow(
            printed=number,
            values=tuple(values),
            missed=missed,
            held_out=tuple(self.held_out_values(e, number, points)) if values else (),
            hyper=hyper_text(chosen.hyper) if chosen and len(points) > 1 and values else "",
            missing=missing if missing and missing.runs else None,
            command=shlex.join(command),
        )

    def measured_values(self, e: Experiment, number: PrintedNumber, tuned: GridPoint | None) -> tuple[list[float], int]:
        """Our values of a printed number by seed, and how many of them missed the target.

        `tuned` is the chosen point of a grid.
        """
        if number.metric.startswith("chosen "):
            return [float(tuned.hyper[number.metric.removeprefix("chosen ")])] if tuned and tuned.runs else [], 0
        text = number_expression(e, number)
        if not text:
            return [], 0
        evaluator, missed = RuleEvaluator(self.evidence["full"], [e.id], {}, blind=False), 0.0
        if number.metric == "rounds_to":
            missed_text = f"missed({curve_term(number)}, {target_expression(e, number)})"
            missed = sum(evaluator.cell(VALUE_RULE, {}, missed_text).values)
        return evaluator.cell(VALUE_RULE, {}, text).values, int(missed)

    def held_out_values(self, e: Experiment, number: PrintedNumber, points: Sequence[GridPoint]) -> list[float]:
        """By seed: measured on one half of the test set, at the grid point that the other half chose."""
        choose, report = HELD_OUT.get(number.metric, ("", ""))
        point = self.evidence["full"].tuned_point(e.id, points, by=(choose,)) if choose else None
        values = [metric_value(metrics, report) for _, metrics in sorted(point.runs.items())] if point else []
        return [v for v in values if isinstance(v, float)]

    # claims

    def claim_result(self, claim: Claim, printed: PrintedNumbers) -> ClaimResult:
        """The findings of all rules of a claim, at every scale that has results."""
        scales = [scale for scale in claim.scales if scale == "full" or self.evidence[scale].seeds]
        evaluators = {scale: RuleEvaluator(self.evidence[scale], claim.experiments, printed) for scale in scales}
        findings = {scale: tuple(map(evaluator.evaluate, claim.rules)) for scale, evaluator in evaluators.items()}
        controls = evaluators[deciding_scale(findings)]
        beside = tuple((rule, controls.evaluate(rule)) for rule in claim.beside)
        terms = [(evaluators["full"].owner(t), t) for rule in claim.rules for t in rule_terms(rule)]
        return ClaimResult(claim, findings, beside, self.missing_runs(terms, MIN_SEEDS, tested=True))

    # missing runs

    def missing_runs(self, terms: Iterable[tuple[str, Term]], seeds: int, tested: bool) -> MissingRuns:
        """What is missing at full scale for these terms, each with its experiment, at so many seeds.

        Tested, a grid is run at one seed and its chosen point at others.
        """
        missing: dict[tuple[str, ...], tuple[int, int]] = {}  # runs and samples of each, by grid point
        for experiment, t in terms:
            owner = self.owner(experiment, t.case, t.method)
            costs = self.point_costs(owner).get((t.case, t.method), [])
            points = [(hyper, samples) for hyper, samples in costs if set(t.hyper.split()) <= set(hyper.split())]
            for n, (hyper, samples) in enumerate(points):
                needed = seeds if len(points) == 1 else 1 + (seeds if tested and n == 0 else 0)
                runs = max(0, needed - self.stored_seeds(owner, t.case, t.method, hyper))
                key = owner, t.case, t.method, hyper
                missing[key] = max(missing.get(key, (0, samples)), (runs, samples))
        return MissingRuns(sum(n for n, _ in missing.values()), sum(n * samples for n, samples in missing.values()))

    def owner(self, experiment: str, case: str, method: str) -> str:
        """The experiment that has the runs of this case and method, which another may show."""
        owners = self.known[experiment].runs
        return next((o for o in owners if has_cell(self.known, self.known[o], case, method)), experiment)

    def point_costs(self, experiment: str) -> dict[tuple[str, str], list[tuple[str, int]]]:
        """By case and method: the grid points at full scale, each with the samples that a run of it trains on."""
        if experiment not in self.costs:
            found: dict[tuple[str, str], list[tuple[str, int]]] = {}
            known: dict[tuple[str, ...], int] = {}
            e = self.known[experiment]
            for spec in run_specs(e, "full", [0]) if e.trains else ():
                lengths = hyper_text({k: v for k, v in spec.hyper.items() if k in COST_SETTINGS})
                key = spec.experiment.id, spec.case.name, spec.method.name, lengths
                if key not in known:
                    known[key] = run_cost(build_config(spec, "full")).trained
                found.setdefault((spec.case.name, spec.method.name), []).append((hyper_text(spec.hyper), known[key]))
            self.costs[experiment] = found
        return self.costs[experiment]

    def stored_seeds(self, experiment: str, case: str, method: str, hyper: str) -> int:
        """How many seeds of a full-scale grid point were run."""
        points = self.evidence["full"].points_of(experiment, case, method)
        return next((len(p.runs) for p in points if hyper_text(p.hyper) == hyper), 0)


# printed numbers as expressions ---------------------------------------------------------------------------------

VALUE_RULE = ClaimRule("report", "", ({},))  # one cell without names: an expression is given with it


def is_measurable(e: Experiment, number: PrintedNumber) -> bool:
    """Whether runs measure such a number; formulas, for example, they do not."""
    return number.metric.startswith("chosen ") or bool(number_expression(e, number))


def number_expression(e: Experiment, number: PrintedNumber) -> str:
    """How a printed metric follows from recorded ones; empty where it does not."""
    if number.metric == "rounds_to":
        return f"rounds({curve_term(number)}, {target_expression(e, number)})"
    if number.metric == "speedup":
        target = target_expression(e, number)
        base = curve_term(number, baseline_method(e, number))
        return f"capped({base}, {target}) / capped({curve_term(number)}, {target})"
    if number.metric.startswith("accuracy at "):
        return f"at({curve_term(number)}, {number.metric.removeprefix('accuracy at ')})"
    recorded = RECORDED_METRIC.fullmatch(number.metric) and e.trains
    return f"[{number.case} | {number.method} | {number.metric}]" if recorded else ""


def curve_term(number: PrintedNumber, method: str = "") -> str:
    """The term of the accuracy curve in a number's case, of its own method or another."""
    return f"[{number.case} | {method or number.method} | accuracy]"


def baseline_method(e: Experiment, number: PrintedNumber) -> str:
    """The method that a printed number is relative to; empty where there is none."""
    named = target_method(e)
    return named or "FedAvg" if number.metric == "speedup" or (named and number.metric == "rounds_to") else ""


def target_method(e: Experiment) -> str:
    """The method whose accuracy is the target of rounds; empty where the target is a number or there is none."""
    return e.target.removesuffix(" last") if isinstance(e.target, str) else ""


def target_expression(e: Experiment, number: PrintedNumber) -> str:
    """The target of rounds, as an expression: a number, or another method's best or last accuracy."""
    if isinstance(e.target, str):
        which = "last" if e.target.endswith(" last") else "best"
        return f"{which}({curve_term(number, target_method(e) or 'FedAvg')})"
    return f"{100 * e.target:g}" if e.target is not None else "0"
