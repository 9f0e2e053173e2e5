"""The ledger as data: every printed number beside ours, and every claim with its verdict.

It follows from papers/ and results/ alone. A run that was not made is never filled in: what is missing is listed, with
its cost. ledger_summary.py says what it comes to; ledger_markdown.py and ledger_page.py write it out.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ..experiment.store import read_text
from .bills import Biller, Needs, printed_needs
from .claim_results import OPEN, VERDICTS, ClaimResult, deciding_scale, imply_verdicts
from .claim_rules import ClaimRule, RuleEvaluator, reading_verdicts
from .claims import CLAIM_SCALES, Claim, read_claims
from .cost import training_speeds
from .evidence import Evidence, GridPoint, metric_value
from .ledger_curves import PaperFigure, collect_figure
from .ledger_rows import LedgerRow, LedgerTable, count_measured
from .number_expressions import (
    curve_name,
    curve_term,
    is_measurable,
    number_expression,
    rival_methods,
    target_expression,
)
from .papers import Experiment, experiments
from .planned_runs import hyper_text, plan_runs, settings_text
from .printed import PrintedNumber, PrintedNumbers, printed_by_key, read_printed
from .provenance import NOT_RECORDED, Provenance
from .results import RunKey, device_options, metrics_by_run, read_results, run_provenance
from .run_metrics import HELD_OUT, TO_TARGET
from .titles import TITLES

VALUE_RULE = ClaimRule("report", "", ({},))  # one cell without names: an expression is given with it


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
            tuned=tuple(full.tuning_seeds(points)) if len(points) > 1 else (),
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
