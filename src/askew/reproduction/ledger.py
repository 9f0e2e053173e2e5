"""The ledger: every printed number beside ours and every claim with its verdict, from papers/ and results/ alone.

A run that was not made is never filled in: what is missing says so, and what it would cost.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

from . import claims as law
from .claims import FAILS, HOLDS, NOT_RUN, UNDECIDED, UNTESTABLE, Claim, ClaimJudge, Finding, Printed, Rule
from .cost import work
from .evidence import Evidence, Term, number
from .papers import Experiment, configure, experiments, spanned, words
from .results import HELD, by_run, read
from .statistics import FEWEST

VERDICTS = (HOLDS, FAILS, UNDECIDED, NOT_RUN, UNTESTABLE)
NAMES = {"feddpc": "FedDPC", "feddc": "FedDC", "mldl24": "MLDL24", "fedpmvr": "FedPMVR", "fedpdc": "FedPDC"}
RECORDED = re.compile(r"[a-z_0-9]+")
LENGTHS = ("rounds", "local.steps", "local.batch", "local.epochs")  # settings of a grid that change what a run costs
UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


class Bill(NamedTuple):
    """Runs that are missing, and the samples that they would train on."""

    runs: int
    samples: int

    def __str__(self) -> str:
        unit, name = next(((u, n) for u, n in UNITS if self.samples >= u), (1, ""))
        return f"{self.runs:,} run{'s' * (self.runs != 1)}, {self.samples / unit:.3g} {name} samples".replace("  ", " ")


class Row(NamedTuple):
    """One printed number and ours."""

    printed: Printed
    values: tuple[float, ...]  # ours, one a seed
    missed: int  # seeds that never reached the target
    half: tuple[float, ...]  # settings and round chosen on one half of the test set, measured on the other
    hyper: str  # the chosen grid point, where there is a grid
    bill: Bill | None  # of a number that was not measured
    command: str

    @property
    def digits(self) -> int:
        """As many decimals as are printed; one more for a mean of whole numbers, and three for seconds."""
        if self.printed.metric == "seconds_per_round":
            return 3
        decimals = len(self.printed.value.partition(".")[2]) if numeric(self.printed.value) else 0
        return decimals or int(len(self.values) > 1)

    @property
    def paper(self) -> str:
        return f"{self.printed.value} ± {self.printed.spread}" if self.printed.spread else self.printed.value

    @property
    def ours(self) -> str:
        if not self.values:
            return f"{NOT_RUN}: {self.bill}" if self.bill else "–"
        if self.missed == len(self.values):
            return f"> {self.values[0] - 1:.0f} ({counted(self.missed)})"
        late = f", {self.missed} missed" if self.missed else ""
        return f"{self.told(self.values)} ({counted(len(self.values))}{late})"

    @property
    def validated(self) -> str:
        return self.told(self.half) if self.half else "–"

    @property
    def difference(self) -> str:
        if not self.values or self.missed or not numeric(self.printed.value):
            return "–"
        return f"{fmean(self.values) - float(self.printed.value):+.{self.digits}f}"

    def told(self, values: Sequence[float]) -> str:
        spread = f" ± {stdev(values):.{self.digits}f}" if len(values) > 1 else ""
        return f"{fmean(values):.{self.digits}f}{spread}"


class Judged(NamedTuple):
    """A claim and what was found at each scale."""

    claim: Claim
    findings: dict[str, tuple[Finding, ...]]
    beside: tuple[tuple[Rule, Finding], ...]
    bill: Bill

    @property
    def scale(self) -> str:
        """The scale that the verdict comes from: full, unless only reduced has results."""
        return next(
            (s for s, found in self.findings.items() if law.together(found) != NOT_RUN), next(iter(self.findings))
        )

    @property
    def verdict(self) -> str:
        if not self.claim.rules:
            return UNTESTABLE if self.claim.kind == "theory-not-testable" else NOT_RUN
        return law.together(self.findings[self.scale])

    @property
    def seeds(self) -> int:
        return min((c.n for f in self.findings[self.scale] for c in f.cells if c.n), default=0)

    @property
    def words(self) -> str:
        """The verdict as it is shown: "holds (reduced)", "undecided at 1 seed"."""
        few = f" at {counted(self.seeds)}" if self.verdict == UNDECIDED and self.seeds else ""
        return f"{self.verdict}{few}{' (reduced)' if self.scale == 'reduced' else ''}"

    @property
    def evidence(self) -> list[str]:
        """On what grounds, rule by rule; then what was found at reduced scale beside a full one."""
        if not self.claim.rules:
            return [f"needs {self.claim.needs}"]
        lines = [grounds(f, len(self.claim.rules) > 1) for f in self.findings[self.scale]]
        smaller = self.findings.get("reduced", ()) if self.scale == "full" else ()
        if any(c.n for f in smaller for c in f.cells):
            lines.append(f"{law.together(smaller)} (reduced)")
        return [line for line in lines if line]

    @property
    def controls(self) -> list[str]:
        """What the claim's controls say, where they were run."""
        lines = [self.claim.control] if self.claim.control else []
        for rule, f in self.beside:
            found = f"{f.verdict}: {f.evidence}" if f.verdict and f.evidence else f.evidence or NOT_RUN
            lines.append(f"{rule.what}: {found}")
        return lines


def grounds(f: Finding, several: bool) -> str:
    """One rule's finding in a line."""
    if not f.evidence:
        return f.verdict if several else ""
    named = f" ({f.test})" if f.test else ""
    return f"{f'{f.verdict}: ' if several else ''}{f.evidence}{named}"


class Table(NamedTuple):
    """The printed numbers of one experiment."""

    experiment: Experiment
    rows: tuple[Row, ...]
    machines: tuple[str, ...]  # what ours were measured on


class Chapter(NamedTuple):
    """One paper."""

    name: str
    tables: tuple[Table, ...]
    claims: tuple[Judged, ...]

    def count(self, verdict: str) -> int:
        return sum(j.verdict == verdict for j in self.claims)

    @property
    def rows(self) -> list[Row]:
        return [row for table in self.tables for row in table.rows]


def counted(seeds: int) -> str:
    return f"{seeds} seed{'s' * (seeds != 1)}"


def numeric(text: str) -> bool:
    return bool(re.fullmatch(r"-?\d+(\.\d+)?", text)) and text != "00"


# collecting -----------------------------------------------------------------------------------------------------


class Books:
    """Everything that the ledger is made from."""

    def __init__(self, papers: Path, results: Path) -> None:
        self.papers, self.known, self.results = papers, experiments(papers), read(results)
        self.evidence = {
            scale: Evidence(self.known, by_run(r for r in self.results if r.scale == scale), scale)
            for scale in law.SCALES
        }
        self.costs: dict[str, dict[tuple[str, str], list[tuple[str, int]]]] = {}

    def prices(self, experiment: str) -> dict[tuple[str, str], list[tuple[str, int]]]:
        """By case and method: the grid points at full scale, each with the samples that a run of it trains on."""
        if experiment not in self.costs:
            found: dict[tuple[str, str], list[tuple[str, int]]] = {}
            known: dict[tuple[str, ...], int] = {}
            for p in spanned(self.known[experiment], "full", [0]) if self.known[experiment].trains else ():
                key = (
                    p.experiment.id,
                    p.case.name,
                    p.method.name,
                    words({k: v for k, v in p.hyper.items() if k in LENGTHS}),
                )
                if key not in known:
                    known[key] = work(configure(p, "full")).trained
                found.setdefault((p.case.name, p.method.name), []).append((words(p.hyper), known[key]))
            self.costs[experiment] = found
        return self.costs[experiment]

    def owner(self, experiment: str, case: str, method: str) -> str:
        """Whose run it is that an experiment shows."""
        return next(
            (o for o in self.known[experiment].runs if law.has(self.known, self.known[o], case, method)), experiment
        )

    def made(self, experiment: str, case: str, method: str, hyper: str) -> int:
        """How many seeds of a full-scale grid point were run."""
        points = self.evidence["full"].at(experiment, case, method)
        return next((len(p.runs) for p in points if words(p.hyper) == hyper), 0)

    def bill(self, asked: Iterable[tuple[str, Term]], seeds: int, tested: bool) -> Bill:
        """What is missing for some terms. Tested, a grid is run at one seed and its chosen point at others."""
        missing: dict[tuple[str, ...], tuple[int, int]] = {}
        for experiment, t in asked:
            owner = self.owner(experiment, t.case, t.method)
            priced = self.prices(owner).get((t.case, t.method), [])
            points = [(hyper, samples) for hyper, samples in priced if set(t.hyper.split()) <= set(hyper.split())]
            for n, (hyper, samples) in enumerate(points):
                needed = seeds if len(points) == 1 else 1 + (seeds if tested and n == 0 else 0)
                left = max(0, needed - self.made(owner, t.case, t.method, hyper))
                key = owner, t.case, t.method, hyper
                missing[key] = max(missing.get(key, (0, samples)), (left, samples))
        return Bill(sum(n for n, _ in missing.values()), sum(n * samples for n, samples in missing.values()))

    def row(self, p: Printed) -> Row:
        e, full = self.known[p.experiment], self.evidence["full"]
        method, _, hyper = p.method.partition(" @ ")
        points = full.at(e.id, p.case, method, hyper)
        chosen = full.tuned(e.id, points)
        values, missed, text = list[float](), 0, expression(e, p)
        seeds = sorted(chosen.runs) if chosen else []
        if text:
            court = ClaimJudge(full, [e.id], {}, blind=False)
            values = court.cell(ROW, {}, text).values
            missed = (
                int(sum(court.cell(ROW, {}, f"missed({here(p)}, {goal(e, p)})").values))
                if p.metric == "rounds_to"
                else 0
            )
        if p.metric.startswith("chosen ") and chosen and len(points) > 1 and seeds:
            values = [float(chosen.hyper[p.metric.removeprefix("chosen ")])]
        by, report = HELD.get(p.metric, ("", ""))
        half = full.tuned(e.id, points, by=(by,)) if values and by else None
        reported = [number(run, report) for _, run in sorted(half.runs.items())] if half else []
        rivals = [base] if (base := baseline(e, p)) and base != method else []
        asked = [(e.id, Term("", p.case, m, hyper, "", 1)) for m in (method, *rivals)]
        bill = None if values or not (text or p.metric.startswith("chosen ")) else self.bill(asked, len(e.seeds), False)
        only = [f"case={p.case}", *(f"method={m}" for m in (*rivals, method)), *hyper.split()]
        more = ["--seeds", str(seeds[-1] + 1)] if seeds and seeds[-1] >= len(e.seeds) else []
        command = ["askew", "reproduce", e.id, "--scale", "full", *(w for o in only for w in ("--only", o)), *more]
        return Row(
            printed=p,
            values=tuple(values),
            missed=missed,
            half=tuple(v for v in reported if isinstance(v, float)),
            hyper=words(chosen.hyper) if chosen and len(points) > 1 and values else "",
            bill=bill if bill and bill.runs else None,
            command=shlex.join(command),
        )

    def judged(self, claim: Claim, book: law.Book) -> Judged:
        there = [scale for scale in claim.scales if scale == "full" or self.evidence[scale].seeds]
        courts = {scale: ClaimJudge(self.evidence[scale], claim.experiments, book) for scale in there}
        findings = {scale: tuple(court.decide(rule) for rule in claim.rules) for scale, court in courts.items()}
        scale = Judged(claim, findings, (), Bill(0, 0)).scale
        asked = [(courts["full"].owner(t), t) for rule in claim.rules for t in law.terms(rule)]
        beside = tuple((rule, courts[scale].decide(rule)) for rule in claim.beside)
        return Judged(claim, findings, beside, self.bill(asked, FEWEST, True))

    def machines(self, e: Experiment) -> tuple[str, ...]:
        owners = (e.id, *e.runs)
        return tuple(
            sorted(
                {f"{r.device}, askew {r.version}" for r in self.results if r.scale == "full" and r.experiment in owners}
            )
        )

    def chapter(self, name: str) -> Chapter:
        folder = self.papers / name
        printed = law.read_printed(folder)
        book = {(p.experiment, p.case, p.method, p.metric): p for p in printed}
        tables = [
            Table(
                self.known[id], tuple(self.row(p) for p in printed if p.experiment == id), self.machines(self.known[id])
            )
            for id in dict.fromkeys(p.experiment for p in printed)
        ]
        return Chapter(name, tuple(tables), tuple(self.judged(claim, book) for claim in law.read_claims(folder)))


ROW = Rule("report", "", ({},))


def here(p: Printed, method: str = "") -> str:
    return f"[{p.case} | {method or p.method} | accuracy]"


def baseline(e: Experiment, p: Printed) -> str:
    """The method that a printed number is relative to."""
    named = str(e.target).removesuffix(" last") if isinstance(e.target, str) else ""
    return named or "FedAvg" if p.metric == "speedup" or (named and p.metric == "rounds_to") else ""


def goal(e: Experiment, p: Printed) -> str:
    """The target of rounds, as an expression: a number, or another method's best or last accuracy."""
    if isinstance(e.target, str):
        return (
            f"{'last' if e.target.endswith(' last') else 'best'}({here(p, baseline(e, p._replace(metric='speedup')))})"
        )
    return f"{100 * e.target:g}" if e.target is not None else "0"


def expression(e: Experiment, p: Printed) -> str:
    """How a printed metric follows from recorded ones; empty where it does not."""
    if p.metric == "rounds_to":
        return f"rounds({here(p)}, {goal(e, p)})"
    if p.metric == "speedup":
        return f"capped({here(p, baseline(e, p))}, {goal(e, p)}) / capped({here(p)}, {goal(e, p)})"
    if p.metric.startswith("accuracy at "):
        return f"at({here(p)}, {p.metric.removeprefix('accuracy at ')})"
    return f"[{p.case} | {p.method} | {p.metric}]" if RECORDED.fullmatch(p.metric) and e.trains else ""


def collect(papers: Path, results: Path) -> list[Chapter]:
    """The whole ledger as data, a chapter a paper."""
    books = Books(papers, results)
    names = sorted(
        (f.name for f in papers.iterdir() if (f / "claims.toml").exists()), key=lambda n: ([*NAMES, n].index(n), n)
    )
    return [books.chapter(name) for name in names]


# the page -------------------------------------------------------------------------------------------------------

HEAD = """# Reproduction ledger

This page is made by `askew ledger` from `papers/` and `results/` alone. `papers/` holds the experiments, the numbers that the papers print
and their claims in our words; `results/` holds what we measured. A run that was not made is never filled in.

- **Ours** is the mean over seeds ± one standard deviation, at full scale only. Where an experiment has a grid, settings are chosen as the
  paper chooses them, on the test set; **validated** chooses settings and round on one half of the test set and measures on the other.
- A **verdict** is *holds*, *does not hold*, *undecided* (at so many seeds) or *not run*. Differences are taken within a seed; the test is
  a one-sided paired t-test at 5%, from five seeds on confirmed by all flips of signs. A claim about many cells holds if every cell passes,
  and does not hold if one is reversed after Holm's correction over all of them. Tuned settings are chosen on other seeds than those tested.
- **Paper**: do the paper's own numbers support its claim? n/a: it prints none.
- Verdicts from smaller runs read *(reduced)* and never stand beside published numbers.
"""


def ledger(papers: Path, results: Path) -> str:
    """The page as Markdown."""
    return markdown(collect(papers, results))


def markdown(chapters: Sequence[Chapter]) -> str:
    lines = [HEAD, *table(("paper", "printed numbers", "measured", *VERDICTS), [summary(c) for c in chapters])]
    for chapter in chapters:
        lines += ["", f"## {title(chapter)}", "", f"### {title(chapter)}: claims", ""]
        lines += table(("claim", "verdict", "evidence", "paper", "controls"), [claim_cells(j) for j in chapter.claims])
        for t in chapter.tables:
            lines += [
                "",
                f"### {t.experiment.id}: {t.experiment.title}",
                "",
                f"{t.experiment.where}.{measured_on(t)}",
                "",
            ]
            lines += [line for note in t.experiment.notes for line in (note, "")]
            heads = ("case", "method", "metric", "paper", "ours", "validated", "difference", "chosen", "command")
            lines += table(heads, [row_cells(row) for row in t.rows])
    return "\n".join(lines) + "\n"


def title(chapter: Chapter) -> str:
    return NAMES.get(chapter.name, chapter.name)


def summary(c: Chapter) -> list[str]:
    numbers = [len(c.rows), sum(bool(r.values) for r in c.rows), *(c.count(v) for v in VERDICTS)]
    return [title(c), *map(str, numbers)]


def measured_on(t: Table) -> str:
    return f" Measured on {'; '.join(t.machines)}." if t.machines else ""


def unmade(j: Judged) -> list[str]:
    """What a claim without a verdict would still cost."""
    return [f"needs {j.bill} at full scale"] if j.bill.runs and j.verdict in (NOT_RUN, UNDECIDED) else []


def claim_cells(j: Judged) -> list[str]:
    where = f"{j.claim.where}; {', '.join(j.claim.experiments)}"
    return [
        f"**{j.claim.id}** {j.claim.text} *{where}*",
        f"**{j.words}**",
        "<br>".join([*j.evidence, *unmade(j)]),
        j.claim.printed,
        "<br>".join(j.controls),
    ]


def row_cells(row: Row) -> list[str]:
    p = row.printed
    note = f" ({p.note})" if p.note else ""
    return [
        p.case,
        p.method,
        p.metric,
        f"{row.paper}{note}",
        row.ours,
        row.validated,
        row.difference,
        row.hyper,
        f"`{row.command}`",
    ]


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table."""

    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"

    return [line(heads), line(["---"] * len(heads)), *map(line, rows)]
