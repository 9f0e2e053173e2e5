"""The ledger as data: every printed number beside ours, and every claim with its verdict.

It follows from papers/ and results/ alone. A run that was not made is never filled in: what is missing is listed, with
its cost. ledger_summary.py says what it comes to; ledger_markdown.py and ledger_page.py write it out.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from ..experiment.store import read_text
from ..report.tables import sample_std
from .bills import Biller, ClaimBill, MissingRuns, Needs, printed_needs
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
    reading_verdicts,
)
from .claims import CLAIM_SCALES, Claim, read_claims
from .cost import training_speeds
from .evidence import Evidence, GridPoint, metric_value
from .ledger_curves import PaperFigure, collect_figure
from .papers import TITLES, Experiment, Gap, experiments, hyper_text, plan_runs, settings_text
from .printed import PrintedNumber, PrintedNumbers, printed_by_key, read_printed
from .results import (
    HELD_OUT,
    NOT_RECORDED,
    TO_TARGET,
    Provenance,
    RunKey,
    device_options,
    metrics_by_run,
    read_results,
    run_provenance,
)

VERDICTS = (HOLDS, FAILS, UNDECIDED, NOT_RUN, UNTESTABLE)
OPEN = {NOT_RUN, UNDECIDED}
RECORDED_METRIC = re.compile(r"[a-z_0-9]+")  # how the metrics are spelled that runs record
TRIED = re.compile(r"\b(Tried|Not tried(?: yet)?|Suspected(?: and not tried)?):")  # which begins a part of a cause
LARGE_GAP = 2.0  # points of accuracy; a larger difference from a printed number needs a cause


class LedgerRow(NamedTuple):
    """One printed number and ours."""

    printed: PrintedNumber
    values: tuple[float, ...]  # ours, one for each seed
    missed: int  # seeds that never reached the target
    held_out: tuple[float, ...]  # settings and round chosen on one half of the test set, measured on the other
    hyper: str  # the chosen grid point, where there is a grid
    missing: MissingRuns | None  # of a number that was not measured
    command: str
    seeds: tuple[int, ...] = ()  # of the values

    @property
    def digits(self) -> int:
        """As many decimals as are printed; one more for a mean of whole numbers, and three for seconds."""
        if self.printed.metric == "seconds_per_round":
            return 3
        decimals = len(self.printed.value.partition(".")[2]) if is_number(self.printed.value) else 0
        return decimals or int(len(self.values) > 1)

    @property
    def gap(self) -> float | None:
        """Our mean less the printed number, in points of accuracy; None where one of them is no accuracy."""
        known = bool(self.values) and is_number(self.printed.value) and "accuracy" in self.printed.metric
        return fmean(self.values) - float(self.printed.value) if known else None

    @property
    def is_gap(self) -> bool:
        """Whether ours is more than two points of accuracy from the printed number."""
        return self.gap is not None and abs(self.gap) > LARGE_GAP

    @property
    def ours(self) -> str:
        """Our number in words: "48.10 ± 0.10 (3 seeds)", "> 4 (1 seed)", "not run: 3 runs, 4.31 k samples"."""
        if not self.values:
            return f"{NOT_RUN}: {self.missing}" if self.missing else "–"
        return f"{self.number} ({self.seeds_text})"

    @property
    def number(self) -> str:
        """Our number alone: "48.10 ± 0.10", "> 4"."""
        return f"> {self.values[0] - 1:.0f}" if self.missed == len(self.values) else self.mean_text(self.values)

    @property
    def seeds_text(self) -> str:
        """The number of its seeds, and of those that missed a target which others reached."""
        missed = f", {self.missed} missed" if 0 < self.missed < len(self.values) else ""
        return f"{count_seeds(len(self.values))}{missed}"

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
    bill: ClaimBill | None  # what a verdict at full scale still needs, where it is open
    smaller: str = ""  # the settings of its smaller runs, where these decide
    refuted_by: str = ""  # the claim that it implies and that does not hold

    @property
    def scale(self) -> str:
        return deciding_scale(self.claim, self.findings)

    @property
    def readings(self) -> dict[str, str]:
        """The verdict in each reading of the paper, the default one first."""
        return reading_verdicts(self.claim.rules, self.findings[self.scale])

    @property
    def verdict(self) -> str:
        """One of VERDICTS; of several readings that of the first, for which some claims need all to be decided."""
        if not self.claim.rules:
            return UNTESTABLE if self.claim.kind == "theory-not-testable" else NOT_RUN
        return FAILS if self.refuted_by else joint_verdict(self.claim, self.readings)

    @property
    def if_corrected(self) -> str:
        """The verdict if exact p-values were corrected for the number of comparisons too."""
        if not self.claim.rules or self.refuted_by:
            return self.verdict
        found = [f._replace(verdict=f.if_corrected or f.verdict) for f in self.findings[self.scale]]
        return joint_verdict(self.claim, reading_verdicts(self.claim.rules, found))

    @property
    def is_decided(self) -> bool:
        return self.verdict in (HOLDS, FAILS)

    @property
    def is_reduced(self) -> bool:
        """Whether its verdict comes from smaller runs; what another claim refutes was refuted at full scale."""
        return self.scale == "reduced" and not self.refuted_by

    @property
    def has_open_reading(self) -> bool:
        """Whether it is decided, by its default reading, and open in another one."""
        return self.is_decided and not self.refuted_by and bool(OPEN.intersection(self.readings.values()))

    @property
    def seeds(self) -> int:
        """The fewest seeds of any cell that has some."""
        return min((c.n for f in self.findings[self.scale] for c in f.cells if c.n), default=0)

    @property
    def verdict_text(self) -> str:
        """The verdict as it is shown: "holds (reduced)", "undecided at 1 seed", "holds (literal); not run (prox)"."""
        seeds = f" at {count_seeds(self.seeds)}" if self.verdict == UNDECIDED and self.seeds else ""
        scale = " (reduced)" if self.is_reduced else ""
        if self.claim.rules and len(self.readings) > 1 and not self.refuted_by:
            default = self.claim.default_reading
            titles = {default: f"{default}, the default"} if default else {}
            texts = [f"{verdict} ({titles.get(reading, reading)})" for reading, verdict in self.readings.items()]
            return "; ".join(texts) + scale
        return f"{self.verdict}{seeds}{scale}"

    @property
    def evidence(self) -> list[str]:
        """The grounds of the verdict, and what is missing."""
        bill = [self.bill_text] if self.bill_text else []
        return self.grounds + bill

    @property
    def bill_text(self) -> str:
        """What a verdict at full scale still needs; empty where it is not open."""
        return str(self.bill) if self.bill and not self.refuted_by else ""

    @property
    def grounds(self) -> list[str]:
        """What was found, rule by rule; then what was found at reduced scale beside a full one."""
        if not self.claim.rules:
            return [f"needs {self.claim.needs}"]
        rules, found = self.claim.rules, self.findings[self.scale]
        lines = [f"it implies {self.refuted_by}, which does not hold"] if self.refuted_by else []
        lines += [f"smaller runs: {self.smaller}"] if self.smaller else []
        lines += [finding_text(f, len(rules) > 1, rule.reading) for rule, f in zip(rules, found, strict=True)]
        reduced = self.findings.get("reduced", ()) if self.scale == "full" else ()
        if any(c.n for f in reduced for c in f.cells):
            lines.append(f"{combine_findings(reduced)} (reduced)")
        return [line for line in lines if line]

    @property
    def controls(self) -> list[str]:
        """The claim's controls, and what they found where they were run."""
        lines = [self.claim.control] if self.claim.control else []
        for rule, f in self.beside:
            found = f"{f.verdict}: {f.evidence}" if f.verdict and f.evidence else f.evidence or NOT_RUN
            lines.append(f"{rule.what}: {found}")
        return lines


def joint_verdict(claim: Claim, readings: Mapping[str, str]) -> str:
    """The verdict in the first reading; open while that in any reading is which the claim needs."""
    first = next(iter(readings.values()))
    is_open = any(verdict in OPEN for reading, verdict in readings.items() if claim.needs_reading(reading))
    return UNDECIDED if is_open and first in (HOLDS, FAILS) else first


def deciding_scale(claim: Claim, findings: Mapping[str, Sequence[Finding]]) -> str:
    """The scale that a verdict comes from: full, unless only reduced has results."""
    ran = (s for s, found in findings.items() if set(reading_verdicts(claim.rules, found).values()) != {NOT_RUN})
    return next(ran, next(iter(findings)))


def finding_text(f: Finding, several: bool, reading: str = "") -> str:
    """One rule's finding in a line; with its reading, and its verdict if it is one of several."""
    about = f"{reading}: " if reading else ""
    if not f.evidence:
        return f"{about}{f.verdict}" if several else ""
    test = f" ({f.test})" if f.test else ""
    return f"{about}{f'{f.verdict}: ' if several else ''}{f.evidence}{test}"


class LedgerTable(NamedTuple):
    """The printed numbers of one experiment."""

    experiment: Experiment
    rows: tuple[LedgerRow, ...]
    machines: tuple[str, ...]  # what ours were measured on
    choices: Mapping[str, str]  # what the paper leaves open, and what is done here
    missing: MissingRuns | None = None  # of all its numbers that were not measured, together

    def choice_texts(self, shared: Collection[tuple[str, str]] = ()) -> list[str]:
        """What the paper leaves open and what is done; of shared choices, whose texts stand elsewhere, the names."""
        own = [f"{key}: {text}" for key, text in self.choices.items() if (key, text) not in shared]
        names = [key for key, text in self.choices.items() if (key, text) in shared]
        return [*([f"as above: {', '.join(names)}"] if names else []), *own]

    def remarks(self, shared: Collection[tuple[str, str]] = ()) -> list[str]:
        """Notes and choices in sentences."""
        choices = self.choice_texts(shared)
        return [*self.experiment.notes, *([f"Our choices. {'; '.join(choices)}."] if choices else [])]

    def count_runs(self, gap: Gap) -> int:
        """How many stored runs the accuracies come from that a cause is about."""
        counts = dict[tuple[str, str], int]()
        for r in self.rows:
            key = r.printed.case, r.printed.method.partition(" @ ")[0]
            if key[0] in gap.cases and key[1] in gap.methods:
                counts[key] = max(counts.get(key, 0), len(r.values))
        return sum(counts.values())

    @property
    def causes(self) -> list[str]:
        """The causes of large gaps, each with the cells that it is about; last the cells without an entry."""
        open_gaps = {(r.printed.case, r.printed.method.partition(" @ ")[0]): r for r in self.rows if r.is_gap}
        texts = list[str]()
        for gap in self.experiment.gaps:
            own = {key: r for key, r in open_gaps.items() if key[0] in gap.cases and key[1] in gap.methods}
            open_gaps = {key: r for key, r in open_gaps.items() if key not in own}
            if own:
                stored = self.count_runs(gap)
                stale = f" (written of {gap.runs} runs, and {stored} are stored)" if gap.runs not in (0, stored) else ""
                cause = TRIED.sub(r"*\1:*", gap.cause)
                texts.append(f"**{gap_cells(own.values())}**: {cause}{stale}")
        return texts + ([f"**{gap_cells(open_gaps.values())}**: no cause looked for yet"] if open_gaps else [])


def gap_cells(rows: Iterable[LedgerRow]) -> str:
    """The cells of some rows with their differences."""
    return ", ".join(f"{r.printed.method}, {r.printed.case} ({r.difference})" for r in rows)


class PaperSection(NamedTuple):
    """All numbers and claims of one paper."""

    name: str
    tables: tuple[LedgerTable, ...]
    claims: tuple[ClaimResult, ...]
    unprinted: tuple[LedgerTable, ...] = ()  # experiments with choices of ours and without printed numbers
    summary_template: str = ""  # papers/NAME/summary.md, whose placeholders ledger_summary.py fills
    figures: tuple[PaperFigure, ...] = ()  # published figures as far as their runs are stored

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
        self.biller = Biller(self.known, self.evidence["full"], training_speeds(self.results))
        self.devices = {row.run: row.device for row in self.results}
        self.provenance = run_provenance(self.results)
        self.full_runs: dict[str, dict[tuple[str, str], set[RunKey]]] = {}  # by experiment, device and version
        for row in self.results:
            if row.scale == "full":
                by_machine = self.full_runs.setdefault(row.experiment, {})
                by_machine.setdefault((row.device, row.version), set()).add(row.run)

    def section(self, name: str) -> PaperSection:
        """Numbers and claims of the paper in this folder."""
        folder = self.papers / name
        numbers = read_printed(folder)
        by_key = printed_by_key(numbers)
        ids = dict.fromkeys(number.experiment for number in numbers)
        tables = [self.table(self.known[id], [number for number in numbers if number.experiment == id]) for id in ids]
        printed = {table.experiment.id for table in tables}
        own = [e for e in self.known.values() if e.paper == name]
        others = [e for e in own if e.id not in printed and e.choices]
        unprinted = [LedgerTable(e, (), self.machines(e), e.choices) for e in others]
        claims = imply_verdicts([self.claim_result(claim, by_key) for claim in read_claims(folder)])
        summary = folder / "summary.md"
        template = read_text(summary) if summary.is_file() else ""
        figures = [figure for e in own if (figure := collect_figure(e, self.evidence["full"]))]
        return PaperSection(name, tuple(tables), tuple(claims), tuple(unprinted), template, tuple(figures))

    def table(self, e: Experiment, numbers: Sequence[PrintedNumber]) -> LedgerTable:
        """The printed numbers of an experiment beside ours, and what the missing ones cost together."""
        rows = tuple(map(self.row, numbers))
        needs: Needs = {key: n for row in rows if row.missing for key, n in self.needs(e, row.printed).items()}
        missing = self.biller.missing_runs(needs, tested=False) if needs else None
        return LedgerTable(e, rows, self.machines(e), self.choices(e), missing)

    def needs(self, e: Experiment, number: PrintedNumber) -> Needs:
        """The runs that a printed number takes."""
        method, _, hyper = number.method.partition(" @ ")
        methods = (method, *rival_methods(e, number))
        return printed_needs(e.id, number.case, methods, hyper, len(e.seeds), curve_name(e, number))

    def choices(self, e: Experiment) -> dict[str, str]:
        """What a paper leaves open of an experiment, or of the experiments whose runs it shows."""
        return {key: text for id in (*e.runs, e.id) for key, text in self.known[id].choices.items()}

    def machines(self, e: Experiment) -> tuple[str, ...]:
        """Devices, versions and dates that an experiment's full results come from."""
        runs: dict[str, set[RunKey]] = {}
        for id in dict.fromkeys((e.id, *e.runs)):
            for (device, version), its in self.full_runs.get(id, {}).items():
                runs.setdefault(f"{device}, askew {version}", set()).update(its)
        return tuple(f"{what}{origin_text([self.provenance[k] for k in runs[what]])}" for what in sorted(runs))

    # numbers

    def row(self, number: PrintedNumber) -> LedgerRow:
        """A printed number beside ours at full scale."""
        e, full = self.known[number.experiment], self.evidence["full"]
        method, _, hyper = number.method.partition(" @ ")
        points = full.points_of(e.id, number.case, method, hyper)
        chosen = full.tuned_point(e.id, points)
        values, missed = self.measured_values(e, number, chosen if len(points) > 1 else None)
        missing = None
        if not values and is_measurable(e, number):
            missing = self.biller.missing_runs(self.needs(e, number), tested=False)
        methods = (*rival_methods(e, number), method)
        only = [f"case={number.case}", *(f"method={m}" for m in methods), *hyper.split()]
        stopped = chosen.stopped if chosen and curve_name(e, number) == TO_TARGET else {}
        digests = sorted((chosen.digests | stopped).items()) if chosen else []
        seeds = [seed for seed, _ in digests]
        more = ["--seeds", str(seeds[-1] + 1)] if seeds and seeds[-1] >= len(e.seeds) else []
        precision = next((device_options(self.devices[digest, seed]) for seed, digest in digests), [])
        command = ["askew", "reproduce", e.id, "--scale", "full", *["--stop-at-target"] * bool(stopped), *precision]
        command += [*(word for item in only for word in ("--only", item)), *more]
        return LedgerRow(
            printed=number,
            values=tuple(values),
            missed=missed,
            held_out=tuple(self.held_out_values(e, number, points)) if values else (),
            hyper=hyper_text(chosen.hyper) if chosen and len(points) > 1 and values else "",
            missing=missing if missing and missing.runs else None,
            command=shlex.join(command),
            seeds=tuple(seeds) if len(seeds) == len(values) else (),
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
            missed_text = f"missed({curve_term(e, number)}, {target_expression(e, number)})"
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
        deciding = deciding_scale(claim, findings)
        beside = tuple((rule, evaluators[deciding].evaluate(rule)) for rule in claim.beside)
        owners = [owner for id in claim.experiments for owner in (self.known[id].runs or (id,))]
        smaller = [] if deciding == "full" else [p for id in owners for p in plan_runs(self.known[id], deciding, [0])]
        verdicts = reading_verdicts(claim.rules, findings["full"])
        wanted = {reading for reading, verdict in verdicts.items() if verdict in OPEN and claim.needs_reading(reading)}
        still_open = [n for n, rule in enumerate(claim.rules) if rule.reading in wanted]
        rules, found = [claim.rules[n] for n in still_open], [findings["full"][n] for n in still_open]
        bill = self.biller.claim_bill(evaluators["full"], rules, found)
        return ClaimResult(claim, findings, beside, bill, settings_text(smaller) if smaller else "")


def imply_verdicts(results: Sequence[ClaimResult]) -> list[ClaimResult]:
    """The same results, where an open claim does not hold if one that it implies does not."""
    refuted = {r.claim.id: r for r in results if r.verdict == FAILS}
    found = list[ClaimResult]()
    for r in results:
        by = [id for id in r.claim.implies if id in refuted and refuted[id].scale == "full"]
        open_yet = r.verdict in OPEN
        found.append(r._replace(refuted_by=by[0]) if by and open_yet else r)
    return imply_verdicts(found) if [r.verdict for r in found] != [r.verdict for r in results] else found


def origin_text(origins: Sequence[Provenance]) -> str:
    """Versions of torch, commits and dates of some runs, in words."""
    if not origins or all(o.torch is None for o in origins):
        return f"; commit, torch and date {NOT_RECORDED}"
    known = [o for o in origins if o.torch is not None]
    parts = [
        f"torch {', '.join(sorted({str(o.torch) for o in known}))}",
        f"commit {', '.join(sorted({o.commit or f'unknown (source {o.source})' for o in known}))}",
        " to ".join(sorted({min(str(o.date) for o in known), max(str(o.date) for o in known)})),
    ]
    rest = f"; {len(origins) - len(known)} of {len(origins)} runs {NOT_RECORDED}" if len(known) < len(origins) else ""
    return f", {', '.join(parts)}{rest}"


# printed numbers as expressions ---------------------------------------------------------------------------------

VALUE_RULE = ClaimRule("report", "", ({},))  # one cell without names: an expression is given with it


def is_measurable(e: Experiment, number: PrintedNumber) -> bool:
    """Whether runs measure such a number; formulas, for example, they do not."""
    return number.metric.startswith("chosen ") or bool(number_expression(e, number))


def number_expression(e: Experiment, number: PrintedNumber) -> str:
    """How a printed metric follows from recorded ones; empty where it does not."""
    if number.metric == "rounds_to":
        return f"rounds({curve_term(e, number)}, {target_expression(e, number)})"
    if number.metric == "speedup":
        target = target_expression(e, number)
        base = curve_term(e, number, baseline_method(e, number))
        return f"capped({base}, {target}) / capped({curve_term(e, number)}, {target})"
    if number.metric.startswith("accuracy at "):
        return f"at({curve_term(e, number)}, {number.metric.removeprefix('accuracy at ')})"
    recorded = RECORDED_METRIC.fullmatch(number.metric) and e.trains
    return f"[{number.case} | {number.method} | {number.metric}]" if recorded else ""


def curve_term(e: Experiment, number: PrintedNumber, method: str = "") -> str:
    """The term of the accuracy curve in a number's case, of its own method or another."""
    return f"[{number.case} | {method or number.method} | {curve_name(e, number)}]"


def curve_name(e: Experiment, number: PrintedNumber) -> str:
    """The curve that a number is read off: it may end at a given accuracy where the rounds to that are counted."""
    counts_rounds = number.metric in ("rounds_to", "speedup") and isinstance(e.target, float)
    return TO_TARGET if counts_rounds else "accuracy"


def baseline_method(e: Experiment, number: PrintedNumber) -> str:
    """The method that a printed number is relative to; empty where there is none."""
    named = target_method(e)
    return named or "FedAvg" if number.metric == "speedup" or (named and number.metric == "rounds_to") else ""


def rival_methods(e: Experiment, number: PrintedNumber) -> list[str]:
    """The methods, other than its own, whose runs a printed number takes."""
    base = baseline_method(e, number)
    return [base] if base and base != number.method.partition(" @ ")[0] else []


def target_method(e: Experiment) -> str:
    """The method whose accuracy is the target of rounds; empty where the target is a number or there is none."""
    return e.target.removesuffix(" last") if isinstance(e.target, str) else ""


def target_expression(e: Experiment, number: PrintedNumber) -> str:
    """The target of rounds, as an expression: a number, or another method's best or last accuracy."""
    if isinstance(e.target, str):
        which = "last" if e.target.endswith(" last") else "best"
        return f"{which}({curve_term(e, number, target_method(e) or 'FedAvg')})"
    return f"{100 * e.target:g}" if e.target is not None else "0"
